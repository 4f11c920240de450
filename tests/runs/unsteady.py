"""A worker that trains nothing, saves a checkpoint every second step, and breaks down as a script says.

    python unsteady.py SCRIPT worker.json [options]

SCRIPT has a word for each attempt, `kill@3/nan@5/good`: what happens to rank 1 in which step. The last one counts for
all further attempts.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import NoReturn

from stored import store

from tightfit.runs.checkpoints import newest_first, step_of
from tightfit.runs.heartbeat import DISK_FULL, DUMP, Heartbeat, read_beat
from tightfit.runs.processes import PARENT_FD, end_with_parent
from tightfit.runs.records import LastWords, write_last_words
from tightfit.train.stop import Stop, leave

RANK, STEPS, EVERY = int(os.environ["RANK"]), 8, 2


class Worker:
    def __init__(self) -> None:
        parser = argparse.ArgumentParser()
        parser.add_argument("script")
        parser.add_argument("worker", type=Path)
        parser.add_argument("--resume", default="auto")
        parser.add_argument("--resume-anyway", action="store_true")
        parser.add_argument("--skip-steps", default="")
        self.args = parser.parse_args()
        orders = json.loads(self.args.worker.read_text(encoding="utf-8"))
        self.run = Path(orders["saving"]["folder"])
        self.predicted = orders["predicted"]
        number = len(list((self.run / "attempts").glob("*.json")))
        words = self.args.script.split("/")
        self.fault, _, at = words[min(number, len(words)) - 1].partition("@")
        self.at = int(at or 0)
        self.skips = {int(word) for word in self.args.skip_steps.split(",") if word}
        self.heart = Heartbeat(self.run, RANK)
        self.stop = Stop().install()

    def write(self, event: str, **fields: object) -> None:
        if RANK == 0:
            with (self.run / "events.jsonl").open("a", encoding="utf-8") as file:
                file.write(json.dumps({"event": event, "at": time.time(), **fields}) + "\n")

    def main(self) -> NoReturn:
        first = self.begin()
        self.stop.arm()
        for step in range(first + 1, STEPS + 1):
            self.heart.at("forward", step)
            self.meet(step)
            if step in self.skips:
                self.write("warning", text=f"step {step} is left out")
                continue
            if self.fault != "good" and step == self.at:
                self.break_down(step)
            time.sleep(0.05)
            self.write("step", step=step, steps=STEPS, loss=5.0 - step / 10, step_s=0.05)
            if self.stop.is_asked:
                self.save(step)
                leave(4)
            if step % EVERY == 0:
                self.heart.at("save", step)
                self.save(step)
        if RANK == 0:
            (self.run / "model").mkdir()
            self.write("saved", folder=str(self.run / "model"), bytes=2)
        if self.fault == "after":
            os.kill(os.getpid(), signal.SIGKILL)
        leave(0)

    def meet(self, step: int) -> None:
        """Ranks wait for each other in every step, as those of a true training do."""
        for rank in range(int(os.environ["WORLD_SIZE"])):
            while not self.stop.is_asked and ((beat := read_beat(self.run, rank)) is None or beat.step < step):
                time.sleep(0.01)

    def begin(self) -> int:
        place = self.args.resume
        if place == "none":
            return 0
        run = self.run if place == "auto" else Path(place)
        found = [run] if step_of(run) is not None else newest_first(run)
        step = step_of(found[0]) if found else None
        if step is None:
            return 0
        more = ["--resume-anyway"] if self.args.resume_anyway else []
        self.write("resumed", step=step, folder=str(found[0]), from_engine="fsdp2", from_world=2, changed=more)
        return step

    def save(self, step: int) -> None:
        if RANK == 0:
            folder = store(self.run, step)
            self.write("checkpoint", step=step, folder=str(folder), bytes=4096, seconds=0.1)

    def break_down(self, step: int) -> None:
        if RANK == 0 and os.environ["WORLD_SIZE"] != "1" and self.fault != "nan":
            self.wait_for_the_other()
        if self.fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif self.fault == "hang":
            time.sleep(600)
        elif self.fault == "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif self.fault == "disk":
            self.heart.beat(DISK_FULL)
            leave(2)
        elif self.fault == "nan":
            self.write("step", step=step, steps=STEPS, loss=None)
            self.end("not-finite", f"the loss of step {step} is nan: look at samples 3, 1, 4 of the data", 1, step)
        elif self.fault == "user":
            self.end("user", "line 17 of data.jsonl is not JSON: mend it", 2)
        else:
            self.heart.at("backward", step)
            text = self.out_of_memory() if self.fault == "oom" else TEXTS[self.fault]
            sys.stderr.write(f'Traceback (most recent call last):\n  File "x.py", line 1, in f\n{text}\n')
            self.end("bug", text, 1)

    def out_of_memory(self) -> str:
        """The plan was right, and the card has a little less than it should."""
        held = self.predicted["gpu"]["phases"]["backward"] / 2**30
        return (
            f"torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 24.00 MiB. GPU 0 has a total capacity of "
            f"{held + 0.1:.2f} GiB of which 16.00 MiB is free. Including non-PyTorch memory, this process has "
            f"{held + 0.08:.2f} GiB memory in use. Of the allocated memory {held:.2f} GiB is allocated by PyTorch, and "
            "20.00 MiB is reserved by PyTorch but unallocated."
        )

    def wait_for_the_other(self) -> NoReturn:
        """In a collective, until somebody ends this rank."""
        if self.fault == "hang":
            self.heart.at("backward", self.at)
        while True:
            time.sleep(0.05)

    def end(self, kind: str, text: str, code: int, step: int | None = None) -> NoReturn:
        write_last_words(self.run, LastWords(rank=RANK, kind=kind, text=text, at=time.time(), step=step))
        leave(code)


TEXTS = {
    "nccl": "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:3699, unhandled system error, "
    "NCCL version 2.27.5",
    "others": "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 512.00 MiB. GPU 0 has a total capacity of "
    "23.64 GiB of which 96.00 MiB is free. Process 4711 has 22.46 GiB memory in use. Including non-PyTorch memory, "
    "this process has 1.05 GiB memory in use. Of the allocated memory 614.00 MiB is allocated by PyTorch, and 12.00 "
    "MiB is reserved by PyTorch but unallocated.",
    "bug": "KeyError: 'no_such_field'",
}

if __name__ == "__main__":
    faulthandler.register(DUMP, all_threads=True)
    end_with_parent(int(os.environ[PARENT_FD]))
    Worker().main()
