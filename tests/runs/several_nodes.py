"""`tightfit train` on two nodes with two CPU ranks each: a desk for each node, on this machine or in two network
namespaces that one link joins."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from desks import wait_until
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
        *,
        apart: bool = False,
    ) -> None:
        """`apart`: each node has a folder of its own for the run, as on a disk of its own."""
        self.folder, self.port, self.address, self.patience = folder, port, address, patience
        self.namespaces = namespaces  # one for each node; "": that of this process
        self.runs = (folder / "run", folder / ("other" if apart else "run"))

    @property
    def run(self) -> Path:
        """That of node 0."""
        return self.runs[0]

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
        command = (*JOB, *steps, *QUICK, *place, *words, "--output", str(self.runs[node]))
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

    def wait_for_fault(self, step: int) -> None:
        """Until a rank breaks down that should, and a checkpoint stands."""
        wait_until((self.run / f"checkpoints/step-{step:08d}/manifest.json").exists)
        wait_until(lambda: list(self.run.glob("faults/*")))


def children(pid: int) -> list[int]:
    """The processes that a process has started: the ranks of a desk."""
    return [
        int(child) for task in (PROC / str(pid) / "task").iterdir() for child in (task / "children").read_text().split()
    ]


# --- two machines, as far as the network goes -----------------------------------------------------


class Link:
    """Two network namespaces that a pair of interfaces joins."""

    ADDRESSES = ("10.213.7.1", "10.213.7.2")

    def __init__(self) -> None:
        number = os.getpid() % 100_000
        self.namespaces = (f"tf{number}a", f"tf{number}b")
        self.ends = (f"tfv{number}a", f"tfv{number}b")

    def make(self, *, rate: str | None = None) -> None:
        for namespace in self.namespaces:
            run_tool("ip", "netns", "add", namespace)
        run_tool("ip", "link", "add", self.ends[0], "type", "veth", "peer", "name", self.ends[1])
        for namespace, end, address in zip(self.namespaces, self.ends, self.ADDRESSES, strict=True):
            run_tool("ip", "link", "set", end, "netns", namespace)
            run_tool("ip", "-n", namespace, "addr", "add", f"{address}/24", "dev", end)
            run_tool("ip", "-n", namespace, "link", "set", "lo", "up")
            run_tool("ip", "-n", namespace, "link", "set", end, "up")
        if rate is not None:
            shaped = ("tc", "qdisc", "add", "dev", self.ends[0], "root", "tbf", "rate", rate)
            run_tool("ip", "netns", "exec", self.namespaces[0], *shaped, "burst", "256kbit", "latency", "100ms")

    def set(self, state: str) -> None:
        """`up` or `down`."""
        run_tool("ip", "-n", self.namespaces[1], "link", "set", self.ends[1], state)

    def remove(self) -> None:
        for namespace in self.namespaces:
            subprocess.run(["ip", "netns", "del", namespace], check=False, capture_output=True)


def run_tool(*words: str) -> None:
    done = subprocess.run(words, check=False, capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"{' '.join(words)}: {done.stderr.strip()}")
