"""Start the ranks of a run, see them end, and end them: none is ever left behind.

Every rank is the first process of a session of its own. A Ctrl-C at the terminal therefore reaches the desk alone, and
whatever a rank starts (data loaders, compilers) can be ended with it. A rank that has ended is not collected until the
last one has: until then its number, which is its group's, cannot be given to anybody else.

What each rank of a node is told: torchrun's variables, its GPUs, those of `formats/launch/environment.py`.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from tightfit.formats.launch.environment import HIP, allocator, host
from tightfit.formats.worker.read import WORKER_FILE
from tightfit.inputs.surroundings import cores, inherited, is_set_by_user
from tightfit.messages import Message, say_why
from tightfit.owned import open_own
from tightfit.runs.heartbeat import DUMP
from tightfit.runs.processes import PARENT_FD, end_session, members_of, tell, tell_one
from tightfit.runs.records import LastWords, RunFolder, WorkerFile
from tightfit.types import ConfigError

GRACE_S = 10.0  # what ranks have between being asked to end and being ended
INSIST_S = 1.0
"""A rank that trains takes the first request as one for a checkpoint, which it cannot save when others are gone. It is
asked again after this, and leaves at once; more than what a worker takes for the same request."""
LOOK_S = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStart:
    name: str  # `rank-3`: the name of its log
    rank: int
    command: tuple[str, ...]
    environment: Mapping[str, str]  # the whole of it
    log: Path
    elsewhere: int | None = None  # the node whose desk starts it; None: it is started here

    @property
    def shown(self) -> str:
        """`rank 3`: its name for people."""
        return self.name.replace("-", " ")

    @property
    def saves(self) -> bool:
        """Whether it saves and leaves when it is asked to stop; a launcher of others ends its ranks instead."""
        return self.name.startswith("rank-")


@dataclass(frozen=True, slots=True, kw_only=True)
class Exit:
    start: RankStart
    code: int  # negative: the signal that ended it
    at: float  # seconds since the epoch, when it was seen


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeTrouble:
    """A whole node cannot go on."""

    node: int
    rank: int  # its first
    sentence: Message
    is_users: bool = False  # the user's to mend


class Ranks:
    """The processes of a run, from start to end. Leaving the `with` block ends whatever still runs."""

    def __init__(self, starts: Sequence[RankStart], folder: Path) -> None:
        self.starts, self._folder = starts, folder
        self._running: dict[int, RankStart] = {}
        self._processes: list[subprocess.Popen[bytes]] = []
        self._pipe: tuple[int, int] | None = None
        self.exits: list[Exit] = []

    def __enter__(self) -> Ranks:
        self._pipe = os.pipe()
        try:
            for start in self.starts:
                start.log.parent.mkdir(parents=True, exist_ok=True)
                try:
                    with open_own(start.log, "wb") as log:
                        process = subprocess.Popen(
                            start.command,
                            stdin=subprocess.DEVNULL,
                            stdout=log,
                            stderr=subprocess.STDOUT,
                            cwd=self._folder,
                            env={**start.environment, PARENT_FD: str(self._pipe[0])},
                            pass_fds=(self._pipe[0],),
                            start_new_session=True,
                        )
                except OSError as error:
                    what = say_why(error)
                    raise ConfigError(Message("runs.cannot-start", program=start.command[0], why=what)) from None
                self._processes.append(process)
                self._running[process.pid] = start
        except BaseException:
            self.end(grace_s=0)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.end(grace_s=GRACE_S if kind is None else 1.0)

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def pids(self) -> list[int]:
        """Of every rank, ended ones too."""
        return [process.pid for process in self._processes]

    @property
    def every_start(self) -> Sequence[RankStart]:
        """Of all nodes."""
        return self.starts

    def find_trouble(self) -> NodeTrouble | None:
        """With another node; None: there is none."""
        return None

    def set_clocks(self, words: Sequence[LastWords]) -> tuple[LastWords, ...]:
        """Last words by this machine's clock, whichever wrote them."""
        return tuple(words)

    def poll(self) -> list[Exit]:
        found = []
        for pid, start in list(self._running.items()):
            status = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if status is None:
                continue
            code = status.si_status if status.si_code == os.CLD_EXITED else -status.si_status
            found.append(Exit(start=start, code=code, at=time.time()))
            del self._running[pid]
        self.exits += found
        return found

    def ask(self) -> None:
        """Ask each rank to stop at its next step, and it alone: what it has started must work until then."""
        for pid in self._running:
            tell_one(pid, signal.SIGTERM)

    def dump(self, ranks: Collection[int]) -> None:
        """Ask these for their stacks. Only those that have given a sign of life: others do not know the signal yet."""
        for pid, start in self._running.items():
            if start.rank in ranks and start.saves:
                tell_one(pid, DUMP)

    def end(self, grace_s: float = GRACE_S, hurry: Callable[[], bool] = lambda: False) -> None:
        """Ask all that runs to end, then end it; `hurry`: the user will not wait any longer."""
        if self._pipe is None:
            return
        groups = frozenset(self.pids)
        if grace_s > 0:
            for group in groups:
                tell(group, signal.SIGTERM)
        deadline, insist_at = time.monotonic() + grace_s, time.monotonic() + INSIST_S
        while time.monotonic() < deadline and not hurry():
            self.poll()
            if not self._running and not members_of(groups):
                break
            if time.monotonic() >= insist_at:
                self.ask()
                insist_at = deadline
            time.sleep(LOOK_S)
        for group in groups:
            end_session(group)
        with ExitStack() as stack:
            for process in self._processes:
                stack.callback(process.wait)
        # those that ended by our hand, too late for a last look
        codes = {process.pid: process.returncode for process in self._processes}
        for pid, start in self._running.items():
            self.exits.append(Exit(start=start, code=codes[pid], at=time.time()))
        self._running.clear()
        os.close(self._pipe[0])
        os.close(self._pipe[1])
        self._pipe = None


# --- what each rank of a node is told ------------------------------------------------------------


WORKER = (sys.executable, "-m", "tightfit.train")  # what a rank is, before the name of its config
LAUNCHER = "TIGHTFIT_LAUNCHER"
GLOO = "GLOO_SOCKET_IFNAME"


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    node: int = 0
    nodes: int = 1
    address: str = "127.0.0.1"
    port: int
    interface: str | None = None  # of this machine, by which the others reach it; None: not known


@dataclass(frozen=True, slots=True, kw_only=True)
class Sight:
    """Which GPUs the ranks of this node may see."""

    variable: str
    words: tuple[str, ...] | None  # in the words of that variable; None: as the user's own environment says
    others: int = 0  # GPUs of this node that other runs have: each rank gets its share of the cores, and so do theirs


def rank_starts(
    worker: WorkerFile, meeting: Meeting, sight: Sight, folder: RunFolder, command: Sequence[str]
) -> list[RankStart]:
    """The ranks of this node. `command`: what starts one, with its options."""
    here = worker.gpus_per_node
    # what all ranks of the node are told alike; None: taken away
    shared: dict[str, str | None] = {
        "WORLD_SIZE": str(worker.ranks),
        "LOCAL_WORLD_SIZE": str(worker.gpus_per_node),
        "GROUP_RANK": str(meeting.node),
        "NODE_RANK": str(meeting.node),
        "MASTER_ADDR": meeting.address,
        "MASTER_PORT": str(meeting.port),
        LAUNCHER: "tightfit",
        "PYTHONUNBUFFERED": "1",  # a log that ends before the crash says nothing
    }
    if meeting.interface is not None and not is_set_by_user(GLOO):
        shared[GLOO] = meeting.interface  # by itself it takes what this machine's own name means, often the loopback
    for variable in (*allocator(worker.vendor), *host(worker.vendor, worker.steps_on_host, worker.gpus_per_node)):
        if variable.value is not None:
            shared[variable.name] = variable.value
    if "OMP_NUM_THREADS" in shared:  # there it is shell text, to be worked out where it runs
        shared["OMP_NUM_THREADS"] = str(-(-cores() // (worker.gpus_per_node + sight.others)))
    if worker.vendor == "cpu":
        shared["CUDA_VISIBLE_DEVICES"] = ""  # or libraries would take a GPU that the plan does not use
    elif sight.words is not None:
        shared["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"  # the numbers are those that the maker's tool shows
        if worker.vendor in HIP or sight.variable != "CUDA_VISIBLE_DEVICES":
            shared["CUDA_VISIBLE_DEVICES"] = None  # HIP obeys it too, and two that differ leave no GPU
        shared[sight.variable] = ",".join(sight.words)
    first = meeting.node * here
    return [
        RankStart(
            name=f"rank-{rank}",
            rank=rank,
            command=tuple(command),
            environment=inherited({**shared, "RANK": str(rank), "LOCAL_RANK": str(rank - first)}),
            log=folder.log(f"rank-{rank}"),
        )
        for rank in range(first, first + here)
    ]


def starts_elsewhere(worker: WorkerFile, folder: RunFolder) -> list[RankStart]:
    """The ranks of all nodes but the first: other desks start them, and their logs are kept here too."""
    return [
        RankStart(
            name=f"rank-{rank}",
            rank=rank,
            command=(),
            environment={},
            log=folder.log(f"rank-{rank}"),
            elsewhere=rank // worker.gpus_per_node,
        )
        for rank in range(worker.gpus_per_node, worker.ranks)
    ]


def launcher_start(folder: RunFolder, meeting: Meeting, options: Sequence[str]) -> RankStart:
    """Several nodes from one: the rendered script, which reaches the others."""
    environment = inherited({"MASTER_PORT": str(meeting.port), LAUNCHER: "deepspeed"})
    command = ("bash", str(folder.plan / "launch.sh"), *options)
    return RankStart(name="launcher", rank=0, command=command, environment=environment, log=folder.log("launcher"))


def worker_command(folder: RunFolder, options: Sequence[str], worker: Sequence[str] = WORKER) -> tuple[str, ...]:
    return (*worker, str(folder.plan / WORKER_FILE), *options)
