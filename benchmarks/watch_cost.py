"""What `tightfit watch` costs: its share of one core at a look a second, tools that it starts counted in.

python benchmarks/watch_cost.py [SECONDS]

On a terminal of 120 columns, three times: this machine; a run that writes ten events a second; the same with eight
cards, for which a stand-in prints what `nvidia-smi` prints (its own cost on a machine with cards is not in it).
"""

from __future__ import annotations

import json
import os
import stat
import sys
import tempfile
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from terminal import Terminal

WARM_S = 4.0
LONG = 20_000
"""Steps that the run has made before anybody looks."""
SMI = """#!/bin/sh
case "$*" in
  *compute-apps*) i=0; while [ $i -lt 8 ]; do echo "GPU-0$i, 1, 4000"; i=$((i+1)); done; exit;;
  *query-gpu*) ;;
  *) echo "CUDA Version: 12.4"; exit;;
esac
while :; do
  for i in 0 1 2 3 4 5 6 7; do
    echo "$i, 00000000:0$i:00.0, GPU-0$i, 81559, 40000, 41559, 97, 61, 312.50, 550.54.15, 9.0, NVIDIA H100 80GB HBM3"
  done
  case "$*" in *-lms*) sleep 1;; *) exit;; esac
done
"""


def spent_s(pid: int) -> float:
    """Of the process and of what it has started, also of what still runs."""
    ticks = 0
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            fields = entry.joinpath("stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if pid in (int(entry.name), int(fields[1])):
            ticks += sum(map(int, fields[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")


def write_events(run: Path, leave: threading.Event) -> None:
    memory = {"now_bytes": 2**33, "peak_bytes": 2**34, "host_bytes": 2**30}
    step = -LONG
    with (run / "events.jsonl").open("a", buffering=1) as file:
        while step < 0 or not leave.wait(0.1):
            step += 1
            line = {"event": "step", "step": step + LONG, "steps": 10**6, "loss": 5 - step / 1e4, "memory": memory}
            file.write(json.dumps({**line, "tokens_per_s": 1e4, "step_s": 0.1, "loss_scale": 65536.0}) + "\n")


def measured(words: list[str], env: dict[str, str], folder: str, seconds: float) -> tuple[float, int]:
    """The share of a core, and how often the screen was drawn."""
    terminal = Terminal([sys.executable, "-m", "tightfit", "watch", *words], env, folder, columns=120)
    drain = threading.Thread(target=lambda: _drain(terminal), daemon=True)
    drain.start()
    time.sleep(WARM_S)
    before, began, drawn = spent_s(terminal.process.pid), time.monotonic(), terminal.raw.count("memory under 90 %")
    time.sleep(seconds)
    share = (spent_s(terminal.process.pid) - before) / (time.monotonic() - began)
    drawn = terminal.raw.count("memory under 90 %") - drawn
    terminal.process.kill()
    drain.join(2)
    terminal.close()
    return share, drawn


def _drain(terminal: Terminal) -> None:
    while terminal.process.poll() is None:
        terminal.read(0.2)


def main() -> None:
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 20.0
    with tempfile.TemporaryDirectory() as folder:
        run, tools = Path(folder, "run"), Path(folder, "bin")
        run.mkdir()
        tools.mkdir()
        (tools / "nvidia-smi").write_text(SMI)
        (tools / "nvidia-smi").chmod(stat.S_IRWXU)
        leave = threading.Event()
        threading.Thread(target=write_events, args=(run, leave), daemon=True).start()
        wait = time.monotonic() + 2
        while not (run / "events.jsonl").exists() and time.monotonic() < wait:
            time.sleep(0.05)
        env = {**os.environ, "XDG_CACHE_HOME": folder}
        cards = {**env, "PATH": f"{tools}:{env['PATH']}"}
        for name, words, given in (("machine", [], env), ("run", ["run"], env), ("run, 8 cards", ["run"], cards)):
            share, drawn = measured(words, given, folder, seconds)
            print(f"{name:<14}{100 * share:5.2f} % of one core, {drawn / seconds:.2f} pictures a second")
        leave.set()


if __name__ == "__main__":
    main()
