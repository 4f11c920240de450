"""`tightfit train` on two nodes with two CPU ranks each: a desk for each node, on this machine or in two network
namespaces that one link joins."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from faulty_training import JOB, LIMIT_S, STEPS, Trained

import warm_desk
from tightfit.runs.processes import PROC

QUICK = ("--engine", "fsdp2", "--no-probe")
LOCAL = "127.0.0.1"
DESK = """
import ctypes, os, subprocess, sys
from tightfit import cli
from tightfit.runs import wire

namespace, limits, *words = sys.argv[2:]
if namespace:
    assert ctypes.CDLL(None, use_errno=True).setns(os.open(namespace, os.O_RDONLY), 0x40000000) == 0, ctypes.get_errno()
wire.BEAT_S, wire.SILENT_S, wire.MEETING_S, wire.RETURN_S, wire.SHARED_S = map(float, limits.split(","))
subprocess.Popen.workers = True
sys.exit(cli.main(["train", *words]))
"""
PATIENCE = (0.5, 6.0, 50.0, 120.0, 3.0)
"""Of the desks: the same as in the program, but short where a test would wait for it."""


class TwoNodes:
    """The desks of one run."""

    def __init__(
        self,
        folder: Path,
        port: int,
        address: str = LOCAL,
        namespaces: Sequence[str] = ("", ""),
        patience: Sequence[float] = PATIENCE,
    ) -> None:
        self.folder, self.port, self.address, self.patience = folder, port, address, patience
        self.namespaces = namespaces  # one for each node; "": that of this process
        self.run = folder / "run"

    def begin(self, node: int, *words: str, faults: str = "", env: dict[str, str] | None = None) -> warm_desk.Process:
        surroundings = {
            **{name: value for name, value in os.environ.items() if not name.startswith("SLURM_")},
            "XDG_CACHE_HOME": str(self.folder / f"cache-{node}"),
            "TIGHTFIT_FAULTS": faults,
            "COLUMNS": "100",
            **(env or {}),
        }
        steps = () if "--max-steps" in words else ("--max-steps", str(STEPS))
        place = ("--nodes", "2", "--node-rank", str(node), "--master-addr", self.address, "--port", str(self.port))
        limits, namespace = ",".join(map(str, self.patience)), self.namespaces[node]
        command = (*JOB, *steps, *QUICK, *place, *words, "--output", str(self.run))
        asked = ("train", namespace and f"/run/netns/{namespace}", limits, *command)
        return warm_desk.Process(*asked, cwd=self.folder, env=surroundings, ranks=True, code=DESK)

    @contextmanager
    def desks(self, *words: str, faults: str = "") -> Iterator[list[warm_desk.Process]]:
        """Both; whatever still runs at the end is killed."""
        with ExitStack() as stack:
            started = []
            for node in (1, 0):
                process = self.begin(node, *words, faults=faults)
                stack.callback(process.kill)
                started.insert(0, process)
            yield started

    def train(self, *words: str, faults: str = "") -> tuple[Trained, int, str]:
        """To the end: what came of it, and how the second desk left."""
        with self.desks(*words, faults=faults) as (first, second):
            return self.end(first, second)

    def end(self, first: warm_desk.Process, second: warm_desk.Process) -> tuple[Trained, int, str]:
        out, err = first.communicate(timeout=LIMIT_S)
        said = second.communicate(timeout=60)[1]
        assert first.returncode is not None
        assert second.returncode is not None
        return Trained(self.run, first.returncode, out, err), second.returncode, said

    def ranks(self, node: int) -> dict[int, int]:
        """Of the ranks of a node that run: rank → process."""
        found = {}
        for entry in PROC.glob("[0-9]*"):
            with suppress(OSError, ValueError, KeyError):
                if f"{self.run}" not in os.readlink(entry / "cwd"):
                    continue
                lines = (entry / "environ").read_bytes().split(b"\0")
                held = dict(line.decode().partition("=")[::2] for line in lines if b"=" in line)
                if int(held["NODE_RANK"]) == node:
                    found[int(held["RANK"])] = int(entry.name)
        return found
