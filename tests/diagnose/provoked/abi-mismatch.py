# ruff: noqa
import subprocess
import sys
from pathlib import Path

Path("scan.c").write_text(
    "extern void _ZN3c104cuda9SetDeviceEi(int); void *PyInit_scan(void) { _ZN3c104cuda9SetDeviceEi(0); return 0; }"
)
subprocess.run(["gcc", "-shared", "-fPIC", "-Wl,-z,now", "-o", "scan.so", "scan.c"], check=True)
sys.path.insert(0, ".")
import scan
