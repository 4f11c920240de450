"""What a checkpoint takes from a rank of a large training: seconds, GPU memory, host memory.

One GPU poses as rank 0 of many, through the worker's own path: plan, data, engine, loop. After a few steps this rank's
share is saved by the worker's `Saver` and read back by `resume.load`. A checkpoint needs every rank's bytes and there
is one rank, so two things are left out: the look at the disk's room, and the question whether the others have written.
What they would have written are holes in the files.

Seconds that a save steals are those until training goes on, and those by which steps are slower while it is written.
"""

from __future__ import annotations

import gc
import json
import os
import platform
import shutil
import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

STEPS, WARM_UP = 5, 2
WATCHED = 40
"""Steps at most that are looked at while a save is written."""
BRIEF = "CHECKPOINT_BRIEF"
"""A variable that, when set, leaves out all but saving in the background."""

Situations = dict[str, dict[str, Any]]
Figures = dict[str, Any]

CPU = "cpu"
TINY: Situations = {
    f"tiny, one of 8, {engine}": {"model": "tiny_llama", "gpus": CPU, "engine": engine, "data": "shipped:text"}
    for engine in ("zero2", "zero3", "fsdp2")
}
"""The same path without a GPU, for tests: `gpus: cpu` is a machine of 8 processes."""


def large() -> Situations:
    from worker_pace import SITUATIONS

    return {name: flags for name, flags in SITUATIONS.items() if name.startswith("7.6B full")}


def prepare(folder: Path, only: str = "", situations: Situations | None = None) -> None:
    """A plan for each situation, as the desk writes it."""
    from tightfit.formats.render import render
    from tightfit.formats.target import Target
    from tightfit.job.file import hardware_of, job_from_flags, model_of
    from tightfit.planner import plan
    from tightfit.types import Gpu, Hardware

    processes = Hardware(
        gpu=Gpu(name="CPU", vendor="cpu", memory_bytes=12 * 2**30), gpus_per_node=8, host_ram_bytes=96 * 2**30
    )
    for name, situation in (situations or large()).items():
        place = folder / name.replace(" ", "_").replace(",", "")
        if not wanted(place, only):
            continue
        flags = {"attention": "sdpa", "output": "run", **situation}
        on_cpu = flags["gpus"] == CPU
        if on_cpu:
            flags |= {"precision": "bf16", "seq": 64, "effective_batch": 8}
            del flags["gpus"]
        job = job_from_flags(flags)
        answer = plan(job, model_of(job), processes if on_cpu else hardware_of(job))
        assert answer.chosen is not None, name
        place.mkdir(parents=True, exist_ok=True)
        for file, text in render(answer, Target()).items():
            (place / file).write_text(text, encoding="utf-8")


def wanted(place: Path, only: str) -> bool:
    parts = [part for part in only.split(",") if part]
    return not parts or any(part in place.name for part in parts)


def measure(folder: Path) -> Figures:
    """The figures of one plan; one process each."""
    from tightfit.inputs.surroundings import cache_folder
    from tightfit.train.__main__ import set_environment

    set_environment()
    from tightfit.train.config import Options, read_worker_config
    from tightfit.train.events import Events
    from tightfit.train.place import part, place_of
    from tightfit.train.stop import Stop

    config = read_worker_config(folder / "worker.json")
    options = Options(rehearse=True, probe=False, rehearse_steps=WARM_UP + STEPS)
    place = place_of(os.environ, config, options)
    os.environ.update(RANK=str(place.rank), LOCAL_RANK=str(place.device_number), WORLD_SIZE=str(place.world))
    shutil.rmtree(config.folder, ignore_errors=True)
    events = Events(config.folder, speaks=True)
    worker = _worker_class()(
        config=config, options=options, place=place, cache=cache_folder(), events=events, stop=Stop()
    )
    try:
        worker.run()
    finally:
        events.close()
        shutil.rmtree(config.folder / "checkpoints", ignore_errors=True)
    part(place)
    figures: Figures = worker.figures
    return figures


def _worker_class() -> Any:
    """The worker, but where its loop ends it saves and loads. Defined late: torch is loaded after the environment."""
    from tightfit.train import worker as module

    @dataclass(kw_only=True)
    class Saving(module.Worker):
        prepared: Any = None
        made: Any = None
        figures: Figures = field(default_factory=dict)

        def prepare(self, store: Any) -> Any:
            self.prepared = super().prepare(store)
            return self.prepared

        def assemble(self, *found: Any) -> Any:
            self.made = super().assemble(*found)
            return self.made

        def train(self, prepared: Any) -> Any:
            worker = self

            class Looking(module.Loop):
                def run(self, first: int = 0) -> Any:
                    ending = super().run(first)
                    worker.figures = Rank(worker, self, super().run).figures()
                    return ending

            kept, module.Loop = module.Loop, Looking  # type: ignore[misc]
            try:
                return super().train(prepared)
            finally:
                module.Loop = kept  # type: ignore[misc]

    return Saving


class Rank:
    """A rank that has done its first steps, and what is measured on it."""

    def __init__(self, worker: Any, loop: Any, run: Callable[[int], Any]) -> None:
        from tightfit.train.checkpoint import model_set
        from tightfit.train.nodes import NodeDisks

        self.worker, self.loop, self._run = worker, loop, run
        self.config, self.place, self.made = worker.config, worker.place, worker.made
        self.model = model_set(self.made, self.config, worker.prepared.tokenizer, NodeDisks.together(self.place))
        self.savers = saver_class()

    def figures(self) -> Figures:
        import torch

        from tightfit.train.checkpoint import Staging

        predicted = self.config.predicted
        plain_s = self.loop.step_seconds[WARM_UP:]
        step = self._watched(self.step)
        found: Figures = {
            "device": torch.cuda.get_device_name() if self.place.on_gpu else "cpu",
            "engine": self.config.levers.engine,
            "world": self.place.world,
            "parameters": self.config.model.parameters,
            "versions": {"python": platform.python_version(), "torch": torch.__version__},
            "predicted_save_bytes": predicted.phases["save"],
            "predicted_peak_bytes": predicted.peak_bytes,
            "step_s": round(statistics.median(plain_s), 4),
            "step": step,
        }
        say(found)
        behind = self._saver(background=True)
        found["preparing"] = self.prepare_behind(behind, found["step_s"])
        found["behind"] = [self.save_behind(behind, found["step_s"]) for _ in range(2)]
        say(found)
        if BRIEF in os.environ:
            return found
        behind._preparing = None
        sync = self._saver(background=False)
        found["share_bytes"] = Staging(sync.sets).bytes
        found["sync"] = self._watched(lambda: self.save(sync))
        found["disk_bytes"] = written_bytes(self.folder)
        found["file_bytes"] = sum(path.stat().st_size for path in self.folder.rglob("*.safetensors"))
        say(found)
        found["loads"] = self.loads()
        say(found)
        shutil.rmtree(self.folder)
        found["stagings"] = self.stagings(sync.sets)
        return found

    # --- steps and saves -------------------------------------------------------------------------

    @property
    def folder(self) -> Path:
        from tightfit.runs.checkpoints import folder_of

        return folder_of(self.config.folder, self.loop.steps)

    def step(self) -> None:
        """One more, as the loop does it."""
        self.loop.steps += 1
        self._run(self.loop.steps - 1)

    def _saver(self, *, background: bool) -> Any:
        from tightfit.runs.checkpoints import Keeping

        levers = self.config.levers
        return self.savers(
            run=self.config.folder,
            engine=self.made.engine,
            model=self.model,
            place=self.place,
            keeping=Keeping(last=1),
            background=background,
            ranks_here=1,  # the others' buffers are not here either
            masters=levers.precision != "fp32" and levers.master_weights,
        )

    def save(self, saver: Any) -> None:
        done = self.loop.steps
        saver.save(done, self.loop.standing(done), self.worker.events)
        if not saver.background:
            assert saver.last == done, last_event(self.worker.events.path)

    def save_behind(self, saver: Any, step_s: float) -> Figures:
        """Save, and train on until it is written."""
        steps: list[float] = []

        def both() -> None:
            began = time.monotonic()
            self.save(saver)
            assert saver._writing is not None, last_event(self.worker.events.path)
            steps.append(time.monotonic() - began)
            while not saver._writing.done() and len(steps) <= WATCHED:
                self.step()
                steps.append(self.loop.step_seconds[-1])
            saver.wait(self.worker.events)

        step = self.loop.steps
        found = self._watched(both)
        assert saver.last == step, last_event(self.worker.events.path)
        shutil.rmtree(self.folder.with_name(f"step-{step:08d}"))
        blocked, *beside = steps
        told = last_event(self.worker.events.path, "checkpoint")
        return found | {
            "staging_bytes": saver._preparing.result().bytes,
            "blocked_s": round(blocked, 3),
            "written_s": told["seconds"],
            "steps_beside": len(beside),
            "slower_s": round(sum(beside) - len(beside) * step_s, 3),
        }

    # --- the copy --------------------------------------------------------------------------------

    def prepare_behind(self, saver: Any, step_s: float) -> Figures:
        """Train on while the buffer is made."""
        beside: list[float] = []
        began = time.monotonic()
        saver.prepare()
        asked_s = time.monotonic() - began
        while not saver._preparing.done() and len(beside) < WATCHED:
            self.step()
            beside.append(self.loop.step_seconds[-1])
        saver._preparing.result()
        slower = sum(beside) - len(beside) * step_s
        return {
            "asked_s": round(asked_s, 3),
            "seconds": round(time.monotonic() - began, 3),
            "steps_beside": len(beside),
            "slower_s": round(slower, 3),
        }

    def stagings(self, sets: Any) -> Figures:
        """`Staging.take` into memory as malloc gives it, and into memory that the GPU may write to by itself."""
        found = {"pageable": self._taken(sets, registered=False)}
        if self.place.on_gpu:
            found["registered"] = self._taken(sets, registered=True)
        return found

    def _taken(self, sets: Any, *, registered: bool) -> Figures:
        import torch

        from tightfit.train.checkpoint import Staging

        staging = Staging(sets)
        began = time.monotonic()
        staging.prepare(self.place.device if registered else torch.device("cpu"))
        ready_s = time.monotonic() - began
        takes = [self._watched(partial(staging.take, sets)) for _ in range(3)]
        if registered:
            _unregister(staging._buffer)
        return {
            "ready_s": round(ready_s, 3),
            "seconds": [each["seconds"] for each in takes],
            "gpu_over_rest_bytes": max(_known(each["gpu_over_rest_bytes"]) for each in takes),
            "host_grown_bytes": [each["host_grown_bytes"] for each in takes],
        }

    # --- loading ---------------------------------------------------------------------------------

    def loads(self) -> Figures:
        """Weights and states of this rank, from the disk and from the page cache; they must be what they were."""
        from checkpoint_ranks import forget

        from tightfit.runs.checkpoints import read_state
        from tightfit.train.resume import CheckpointFiles, FoundCheckpoint, load
        from tightfit.train.sources import open_weights

        state = read_state(self.folder)
        found = FoundCheckpoint(folder=self.folder, step=int(state["step"]), state=state)

        def read() -> None:
            weights = open_weights(self.folder, self.made.twin)
            load(found, self.made.engine, weights, CheckpointFiles(self.folder), self.place, filled=False)

        before = self._sums()
        forget(self.folder)
        cold = self._watched(read)
        same = self._sums() == before
        return {"cold": cold, "warm": self._watched(read), "same": same}

    def _sums(self) -> list[int]:
        """A number for each state that changes with any of its bits."""
        import torch

        return [
            int(state.tensor.contiguous().view(torch.int32).sum(dtype=torch.int64))
            for state in self.made.engine.states(write=False)
        ]

    # --- memory ----------------------------------------------------------------------------------

    def _watched(self, work: Callable[[], object]) -> Figures:
        """Seconds, and by how much memory rose above what it was before."""
        import torch

        rest = peak = None
        if self.place.on_gpu:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            rest = torch.cuda.memory_allocated()
        with Resident() as host:
            began = time.monotonic()
            work()
            if self.place.on_gpu:
                torch.cuda.synchronize()
            seconds = time.monotonic() - began
        if rest is not None:
            peak = torch.cuda.max_memory_allocated()
        return {
            "seconds": round(seconds, 3),
            "gpu_peak_bytes": peak,
            "gpu_over_rest_bytes": None if rest is None or peak is None else peak - rest,
            "host_grown_bytes": host.grown_bytes,
        }


class Resident:
    """Looks at this process's resident memory while something is done."""

    EVERY_S = 0.005

    def __enter__(self) -> Resident:
        gc.collect()
        self._before = self._most = self._now()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()
        return self

    def _look(self) -> None:
        while not self._done.wait(self.EVERY_S):
            self._most = max(self._most, self._now())

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()
        self._most = max(self._most, self._now())

    @staticmethod
    def _now() -> int:
        return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")

    @property
    def grown_bytes(self) -> int:
        return self._most - self._before


def say(found: Figures) -> None:
    """What is known so far: should the rest fail, or take too long, this is not lost."""
    print("ROW " + json.dumps(found), flush=True)


def saver_class() -> Any:
    """A Saver that asks neither for room on the disk nor for the other ranks."""
    from tightfit.train import checkpoint
    from tightfit.train.saved_model import Writer

    class Share(Writer):
        def _check(self, layout: Any) -> None:
            del layout  # the others' elements are missing

        def _note(self, rank: int, what: str) -> Path:
            del rank
            return super()._note(self._rank, what)

    checkpoint.Writer = Share  # type: ignore[misc]
    checkpoint.disk.room = lambda _: 2**60
    checkpoint.covered = lambda _: True  # the others' bytes are holes
    return checkpoint.Saver


def written_bytes(folder: Path) -> int:
    """On the disk; holes are none."""
    return sum(path.stat().st_blocks * 512 for path in folder.rglob("*") if path.is_file())


def last_event(path: Path, kind: str | None = None) -> Figures:
    found: list[Figures] = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return next(event for event in reversed(found) if kind in (None, event["event"]))


def _known(number: int | None) -> int:
    return 0 if number is None else number


def _unregister(buffer: Any) -> None:
    import torch

    torch.cuda.synchronize()
    torch.cuda.cudart().cudaHostUnregister(buffer.data_ptr())
