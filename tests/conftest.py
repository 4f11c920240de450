"""What every test may use: the benchmarks' modules can be imported by name, signals mean what they usually do, and what
DeepSpeed compiles is compiled once."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from tightfit.runs.build_lock import build_folder

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

# Behind nohup, or in the background of a script, these two are ignored, and so they would be in every process that a
# test starts and interrupts.
for number, usual in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, usual)

# Tests have caches of their own; a compilation costs a minute. One ninja for all: another would compile anew.
os.environ["TORCH_EXTENSIONS_DIR"] = str(build_folder(os.environ))
if str(Path(sys.executable).parent) not in os.environ["PATH"].split(os.pathsep):
    os.environ["PATH"] += os.pathsep + str(Path(sys.executable).parent)
