"""How long `tightfit diagnose` takes for a large log, beside `grep -c` over the same file.

    python benchmarks/diagnose_speed.py [MEGABYTES]

A healthy log; one whose every line has a word that alarms; one with a traceback of every rank in the middle, after
which the launcher repeats itself to the end; and four that are worse than what people have: the logs of the tests one
after another, without failures and with every failure that we know, words of logs in any order, and a traceback after
every third step. Prints seconds by the clock and of the processor, peak memory, and the ratio of the processor's
seconds to grep's.
"""

from __future__ import annotations

import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

MIB = 2**20
WORSE = ("mixed", "failures", "words", "tracebacks")
STEP = (
    "[2026-05-01 12:00:{:02d},123] [INFO] [logging.py:96:log_dist] [Rank 0] step={}, skipped=0, lr=[1e-05], "
    "mom=[[0.9, 0.999]] loss: {:.4f} iter time (s): 1.234 samples/sec: 12.3\n"
)
ALARMING = (
    "[rank{}]: step {} loss {:.4f} error_rate 0.12 memory 21.3 GiB failed 0 killed 0 nan 0 timeout=1800 out of 64 "
    "signal none, no errors, exit code pending\n"
)
BROKEN = """[rank{0}]: Traceback (most recent call last):
[rank{0}]:   File "/job/train.py", line 88, in <module>
[rank{0}]:     loss.backward()
[rank{0}]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.32 GiB. GPU {0} has a total capacity of \
23.69 GiB of which 1.20 GiB is free.
"""
AFTER = "W0501 12:10:00.123000 12345 torch/distributed/elastic/multiprocessing/api.py:858] Sending process {} SIGTERM\n"


LOGS = Path(__file__).parents[1] / "tests" / "diagnose"


def write_worse(path: Path, kind: str, size: int) -> None:
    chance = random.Random(1)  # noqa: S311
    folder = LOGS / ("corpus" if kind == "failures" else "healthy")
    logs = [each.read_bytes() for each in sorted(folder.rglob("*.log"))]
    words = b" ".join(logs).split()
    with path.open("wb") as file:
        while file.tell() < size:
            if kind == "words":
                file.write(b" ".join(chance.choices(words, k=chance.randint(3, 20))) + b"\n")
            elif kind == "tracebacks":
                steps = [STEP.format(chance.randint(0, 59), chance.randint(1, 10**6), 2.5) for _ in range(3)]
                file.write("".join([*steps, BROKEN.format(chance.randint(0, 7))]).encode())
            else:
                file.write(chance.choice(logs) + b"\n")


def write(path: Path, kind: str, size: int) -> None:
    if kind in WORSE:
        return write_worse(path, kind, size)
    with path.open("w", encoding="utf-8") as file:
        first = 1
        while file.tell() < size:
            lines = []
            for number in range(first, first + 1000):
                if kind == "alarming":
                    lines.append(ALARMING.format(number % 8, number, 2 + 1 / number))
                elif kind == "broken" and file.tell() > size // 2:
                    lines.append(AFTER.format(number))
                else:
                    lines.append(STEP.format(number % 60, number, 2 + 1 / number))
            if kind == "broken" and size // 2 < file.tell() < size // 2 + 200_000:
                lines += [BROKEN.format(rank) for rank in range(8)]
            file.write("".join(lines))
            first += 1000
    return None


def seconds(command: list[str]) -> tuple[float, float]:
    """By the clock, and of the processor: others may use the machine too."""
    begin, used = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, stdout=subprocess.DEVNULL, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.perf_counter() - begin, after.ru_utime + after.ru_stime - used.ru_utime - used.ru_stime


def main() -> None:
    size = int(float(sys.argv[1]) if len(sys.argv) > 1 else 100) * MIB
    print(f"{'log':10} {'MiB':>6} {'diagnose s':>11} {'cpu s':>6} {'peak MiB':>9} {'grep -c cpu s':>14} {'ratio':>6}")
    with tempfile.TemporaryDirectory() as folder:
        for kind in ("healthy", "alarming", "broken", *WORSE):
            path = Path(folder) / f"{kind}.log"
            write(path, kind, size)
            grep = min(seconds(["grep", "-c", "-i", "out of memory", str(path)])[1] for _ in range(3))
            clock, ours = min(seconds([sys.executable, "-m", "tightfit", "diagnose", str(path)]) for _ in range(2))
            peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
            size_mib = path.stat().st_size / MIB
            row = f"{size_mib:6.0f} {clock:11.2f} {ours:6.2f} {peak / MIB:9.0f} {grep:14.2f} {ours / grep:6.1f}"
            print(f"{kind:10} {row}")


if __name__ == "__main__":
    main()
