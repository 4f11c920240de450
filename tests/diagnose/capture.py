"""Runs the programs in `provoked/`, each of which fails for real, and keeps what they and their launchers print.

    python tests/diagnose/capture.py [NAME …]

writes `captured/NAME.log`; the name up to a final number is the symptom that it must be diagnosed as. Paths of this
machine are taken out.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).parent
PROVOKED, CAPTURED = HERE / "provoked", HERE / "captured"
SCRIPTS = Path(sys.executable).parent
MOST_LINES = 400
EXTENSIONS = Path(tempfile.gettempdir()) / "provoked-extensions"
"""Built once: DeepSpeed compiles for minutes."""
LONGEST_S = 300


def commands(script: Path) -> tuple[list[list[str]], int | None]:
    """How a program is started, one command after another, and the signal that it is sent after a while."""
    how = re.match(r"# run: (\S+)(.*)", script.read_text(encoding="utf-8"))
    kind, rest = (how[1], how[2].split()) if how else ("python", [])
    port = str(29600 + sum(script.name.encode()) % 300)
    path = str(script)
    python = [sys.executable, path, *rest]
    torchrun = [str(SCRIPTS / "torchrun"), "--nproc_per_node", "2", "--master_port", port, path]
    deepspeed = [str(SCRIPTS / "deepspeed"), "--num_gpus", "2", "--master_port", port, path]
    shell = ["bash", "-c", '"$0" "$1"; echo "exit code $?"', *python[:2]]
    return {
        "python": ([python], None),
        "torchrun": ([torchrun], None),
        "torchrun-term": ([torchrun], signal.SIGTERM),
        "torchrun-hup": ([torchrun], signal.SIGHUP),
        "interrupted": ([python], signal.SIGINT),
        "deepspeed": ([deepspeed], None),
        "deepspeed-then-one": ([deepspeed, [*deepspeed[:2], "1", *deepspeed[3:]]], None),
        "shell": ([shell], None),
        "faulthandler": ([[sys.executable, "-X", "faulthandler", path]], None),
    }[kind]


def capture(script: Path) -> str:
    lines, number = commands(script)
    with tempfile.TemporaryDirectory() as folder:
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("CUDA", "HF_"))}
        environment |= {"PYTHONPATH": str(PROVOKED), "DS_ACCELERATOR": "cpu", "HOME": folder, "OMP_NUM_THREADS": "1"}
        environment |= {"PATH": f"{SCRIPTS}:{os.environ['PATH']}", "TORCH_EXTENSIONS_DIR": str(EXTENSIONS)}
        said = "".join(_run(command, number, folder, environment) for command in lines)
    return plain(said, folder)


def _run(command: Sequence[str], number: int | None, folder: str, environment: dict[str, str]) -> str:
    process = subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        errors="replace", start_new_session=True,
    )  # fmt: skip
    if number is not None:
        time.sleep(8)
        process.send_signal(number)
    try:
        return process.communicate(timeout=LONGEST_S)[0]
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return process.communicate()[0]


def plain(text: str, folder: str) -> str:
    """Without this machine's paths and names."""
    host = os.uname().nodename
    for found, shown in (
        (sysconfig.get_paths()["purelib"], "/opt/venv/lib/python3/site-packages"),
        (str(SCRIPTS), "/opt/venv/bin"),
        (str(PROVOKED), "/job"),
        (str(Path(sysconfig.get_paths()["stdlib"])), "/usr/lib/python3"),
        (folder, "/job/work"),
        (str(EXTENSIONS), "/job/extensions"),
        (str(HERE.parents[1]), "/src"),
    ):
        text = text.replace(found, shown)
    text = re.sub(rf"\b{re.escape(host)}\b", "node-0", text)
    text = re.sub(r"/usr/(?:local/)?bin/python3[\w.]*", "/usr/bin/python3", text)
    lines = text.splitlines()
    if len(lines) > MOST_LINES:
        half = MOST_LINES // 2
        lines = [*lines[:half], f"[… {len(lines) - MOST_LINES} lines …]", *lines[-half:]]
    return "\n".join(line[:3000] for line in lines) + "\n"


def main(names: Sequence[str]) -> None:
    CAPTURED.mkdir(exist_ok=True)
    for script in sorted(PROVOKED.glob("*.py")):
        if script.name == "small.py" or (names and script.stem not in names):
            continue
        (CAPTURED / f"{script.stem}.log").write_text(capture(script), encoding="utf-8")
        sys.stdout.write(f"{script.stem}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
