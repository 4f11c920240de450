"""Where a step waits: what runs on the GPU beside what, where computation stands still, and what the host does then.

    python benchmarks/step_profile.py DIR --out FOLDER [--only PART,PART] [--at-once 3]    # on a GPU
    python benchmarks/step_profile.py show FILE.json.gz                                    # anywhere

DIR holds plans that `fast.py prepare` or `stream.py prepare` wrote. Sides run as there, and their last two steps under
torch's profiler: FOLDER gets rows.jsonl and, for each side, what took time on the GPU, calls of CUDA, and when the host
updated which number of parameters. `show` says how long each stream was busy and with how many bytes, where the
computation waited for more than 0.3 ms and for which kernel, which kernels took longest, and the host's updates.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import fast

GAP_US, LONGEST, UPDATES = 300, 25, 80
OPERATION_US = 30  # of the host's own, at least


class Profiled(fast.Side):
    """A side whose last two steps are profiled."""

    out = Path()
    _profiler: Any = None

    def _work(self) -> None:
        from tightfit.train.host_states import HostStates

        self._updates: list[tuple[int, int, int, bool]] = []
        update = HostStates.update

        def timed(held: HostStates, gradients: Any, weights: Any, step: Any, **how: Any) -> None:
            began = time.time_ns()
            update(held, gradients, weights, step, **how)
            end = how.get("end") or held.elements
            self._updates.append((began, time.time_ns(), end - how.get("begin", 0), how.get("ahead", False)))

        HostStates.update = timed  # type: ignore[method-assign]
        super()._work()

    def _after_step(self, step: int) -> None:
        super()._after_step(step)
        import torch
        from torch.profiler import ProfilerActivity, profile

        last = fast.WARM_UP + fast.STEPS
        if step == last - 2:
            self._profiler = profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA])
            self._profiler.start()
        elif step == last:
            torch.cuda.synchronize()
            self._profiler.stop()
            self._keep(self.out / f"{self.place.parent.name}_{self.side}.json")

    def _keep(self, path: Path) -> None:
        self._profiler.export_chrome_trace(str(path))
        trace = json.loads(path.read_text())
        path.unlink()
        kept = [pick(event) for event in trace["traceEvents"] if is_of_use(event)]
        told = {"began_ns": trace.get("baseTimeNanoseconds", 0), "events": kept, "updates": self._updates}
        with gzip.open(f"{path}.gz", "wt") as file:
            json.dump(told, file)


def is_of_use(event: dict[str, Any]) -> bool:
    kind = event.get("cat", "")
    is_long = kind == "cpu_op" and event.get("dur", 0) > OPERATION_US
    return is_long or kind.startswith(("kernel", "gpu_mem", "cuda_"))


def pick(event: dict[str, Any]) -> dict[str, Any]:
    kept = {key: event[key] for key in ("name", "ts", "dur", "tid", "cat")}
    asked = event.get("args", {})
    return kept | {"name": event["name"][:90], "stream": asked.get("stream"), "bytes": asked.get("bytes") or 0}


def show(path: Path) -> None:
    with gzip.open(path, "rt") as file:
        told = json.load(file)
    on_gpu = sorted((e for e in told["events"] if e["cat"].startswith(("kernel", "gpu"))), key=lambda e: e["ts"])
    start_us = on_gpu[0]["ts"]
    busy, sent = Counter[tuple[int, str]](), Counter[tuple[int, str]]()
    for event in on_gpu:
        busy[event["stream"], event["cat"]] += event["dur"]
        sent[event["stream"], event["cat"]] += event["bytes"]
    print(f"two steps, {(on_gpu[-1]['ts'] + on_gpu[-1]['dur'] - start_us) / 1e3:.0f} ms")
    for (stream, kind), microseconds in busy.most_common():
        print(f"  stream {stream:3} {kind:12} {microseconds / 1e3:9.1f} ms {sent[stream, kind] / 1e9:8.2f} GB")
    computes = max((key for key in busy if key[1] == "kernel"), key=lambda key: busy[key])[0]
    gaps, kernels = [], Counter[str]()
    end_us = start_us
    for event in (each for each in on_gpu if each["stream"] == computes):
        if event["ts"] - end_us > GAP_US:
            gaps.append((event["ts"] - end_us, end_us - start_us, event["name"]))
        end_us = max(end_us, event["ts"] + event["dur"])
        kernels[event["name"]] += event["dur"]
    print(f"the computation waited {len(gaps)} times, {sum(gap for gap, _, _ in gaps) / 1e3:.0f} ms in all")
    for gap, since, name in sorted(gaps, reverse=True)[:LONGEST]:
        print(f"  {gap / 1e3:7.2f} ms from {since / 1e3:7.1f} on, for {name}")
    for name, microseconds in kernels.most_common(LONGEST):
        print(f"  {microseconds / 1e3:8.1f} ms {name}")
    for began, ended, count, is_ahead in told["updates"][-UPDATES:]:
        since_ms = (began - told["began_ns"]) / 1e6 - start_us / 1e3
        rate = count / max(1, ended - began)
        print(f"  updated {count:11,} from {since_ms:8.1f} ms on, {rate:.2f} G/s{', ahead' if is_ahead else ''}")


def main() -> None:
    if sys.argv[1:2] == ["show"]:
        for name in sys.argv[2:]:
            show(Path(name))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", default="", help="pieces of the names of folders, which are jobs and sides")
    parser.add_argument("--limit-s", type=int, default=150)
    parser.add_argument("--at-once", type=int, default=1, help="how many start together")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    fast.STEPS, fast.WARM_UP = 5, 2
    fast.Side = Profiled  # type: ignore[misc]
    Profiled.out, args.out = args.out, args.out / "rows.jsonl"
    args.peers, args.until = False, float("inf")
    fast.run(args)


if __name__ == "__main__":
    main()
