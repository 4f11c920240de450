"""The line between the desks of a run's nodes: what they say to each other, and who may say it.

Each machine has a desk. That of node 0 leads (`leader.py`); the others follow it (`follower.py`), each over one TCP
connection that it opens to the port above the one at which the ranks meet. A message is one line of JSON and one frozen
class here; it is read as any record is, so nothing that comes over the line can be more than its fields.

Both ends say every few seconds that they live. An end that has said nothing for `SILENT_S` is taken for dead, whatever
TCP believes: a machine that lost its power or its network closes no connection, and one that is paused keeps it open.

The leader writes a random token into the run's folder. Each end proves that it can read it by a keyed hash over numbers
that both have drawn; the token itself never travels, and nothing is obeyed before that. A node that does not see that
folder, since each has a disk of its own, proves itself by the user's key in the same way: a file in the home folder,
which machines often share, or to which it was copied. What is said is not encrypted, as NCCL's and gloo's own traffic
is not.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import hmac
import json
import os
import platform
import secrets
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar

from tightfit.hardware.machine import Occupancy, free_ram, ram_here
from tightfit.inputs.records import as_record, find_record, parse_json, record_text
from tightfit.inputs.surroundings import data_folder
from tightfit.inputs.versions import find_installed
from tightfit.messages import Message, Said, as_json
from tightfit.owned import fresh_beside, move_file, remove_file, replace_file
from tightfit.runs.heartbeat import Beat
from tightfit.runs.processes import this_host
from tightfit.runs.rank_memory import Rank

BEAT_S = 2.0
SILENT_S = 20.0  # an end of which nothing has been heard for so long is gone
MEETING_S = 50.0  # for all nodes to arrive at the first start
RETURN_S = 600.0  # for one that was lost to come back
CLOCKS_S = 30.0  # clocks that are further apart than this are worth a warning
SHARED_S = 15.0  # until a network disk shows every node what one of them has written
TRY_S = 8.0  # for a connection that is only tried
MEETING, KEY = "meeting.json", "nodes.key"
PACKAGES = ("tightfit", "torch", "deepspeed", "transformers")
IN_USE = (errno.EADDRINUSE,)
_SEND_S = 5.0
_LONGEST = 1 << 24  # bytes of one line
_LISTS = 0x8915  # SIOCGIFADDR


def desk_port(port: int) -> int:
    """Where the desks meet, of the port at which the ranks do."""
    return port + 1 if port < 65_535 else port - 1


# --- what is said ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What a node is."""

    host: str
    versions: Mapping[str, str]  # of Python and of PACKAGES; "": not installed
    gpus: tuple[str, ...]  # by name; none: the CPU stands in
    gpu_bytes: int | None  # of the smallest GPU
    ram_bytes: int | None
    free_ram_bytes: int | None

    @classmethod
    def here(cls, found: Occupancy) -> Facts:
        sizes = [device.total_bytes for device in found.devices if device.total_bytes is not None]
        return cls(
            host=this_host(),
            versions={"Python": platform.python_version(), **{name: find_installed(name) or "" for name in PACKAGES}},
            gpus=tuple(device.name for device in found.devices),
            gpu_bytes=min(sizes, default=None),
            ram_bytes=ram_here()[0],
            free_ram_bytes=free_ram(),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrived:
    """A follower's first word."""

    node: int
    nodes: int
    desk: str  # a random name of this process, which it keeps when it has to come back
    pid: int
    facts: Facts
    clock: float  # seconds since the epoch
    nonce: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Challenge:
    folder: str  # of the run
    mark: str  # by which its token is known from one that an earlier run has left
    key_mark: str  # likewise the user's key
    nonce: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeProof:
    proof: str  # "": neither token nor key can be read
    by_key: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Welcome:
    proof: str
    silent_s: float  # after which the leader takes a node for dead


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRefused:
    said: Said


@dataclass(frozen=True, slots=True, kw_only=True)
class Alive:
    beats: tuple[Beat, ...] = ()  # of a follower's ranks
    ranks: tuple[Rank, ...] = ()  # and what they hold


@dataclass(frozen=True, slots=True, kw_only=True)
class TryPort:
    """Whether a node reaches the port at which the ranks will meet."""

    port: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PortTried:
    port: int
    why: str = ""  # it did not; "": it did


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    attempt: int
    files: Mapping[str, str]  # the plan: by name
    options: tuple[str, ...]  # of the worker
    port: int  # where the ranks meet


@dataclass(frozen=True, slots=True, kw_only=True)
class RanksStarted:
    attempt: int
    pids: tuple[int, ...]
    is_apart: bool = False  # this node has a folder of its own for the run


@dataclass(frozen=True, slots=True, kw_only=True)
class EventsTold:
    """What has come into the run's events, for a node that does not see them."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CannotStart:
    attempt: int
    said: Said


@dataclass(frozen=True, slots=True, kw_only=True)
class Save:
    """Ask the ranks to save and to leave."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StopRanks:
    """End the ranks."""

    attempt: int
    grace_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Dump:
    """Ask these ranks for their stacks."""

    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Logged:
    rank: int
    text: str  # what came into its log meanwhile


@dataclass(frozen=True, slots=True, kw_only=True)
class RankEnded:
    attempt: int
    rank: int
    code: int
    words: str = ""  # the text of its last words; "": it left none
    kernel: tuple[str, ...] = ()
    kernel_readable: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class AllEnded:
    """No rank of this node lives any more."""

    attempt: int
    codes: Mapping[str, int]  # by rank


@dataclass(frozen=True, slots=True, kw_only=True)
class Signalled:
    """A follower's user, or scheduler, wants the run to end."""

    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEnded:
    """The run has."""

    exit_code: int
    more: bool = False  # another stage of the same job follows


Line = (
    Arrived | Challenge | NodeProof | Welcome | NodeRefused | Alive | TryPort | PortTried | Start | RanksStarted
    | EventsTold | CannotStart | Save | StopRanks | Dump | Logged | RankEnded | AllEnded | Signalled | RunEnded
)  # fmt: skip
L = TypeVar("L", Challenge, Welcome)
KINDS: Mapping[str, type[Line]] = {kind.__name__: kind for kind in Line.__args__}


def write_line(said: Line) -> bytes:
    tree = {"say": type(said).__name__, **asdict(said)}
    return json.dumps(tree, allow_nan=False, default=as_json).encode() + b"\n"


def read_line(line: bytes) -> Line | None:
    """None: it is none of ours, or of another version."""
    with suppress(ValueError):
        tree = parse_json(line, finite=True)
        if isinstance(tree, dict) and (kind := KINDS.get(str(tree.get("say")))) is not None:
            return as_record(tree, kind)
    return None


# --- the connection -------------------------------------------------------------------------------


class ConnectionLost(Exception):
    """The other end is not there any more."""


class Connection:
    """One end. Anybody may send; one thread receives."""

    def __init__(self, line: socket.socket) -> None:
        line.settimeout(_SEND_S)
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._line, self._sending, self._torn = line, threading.Lock(), b""
        self._waiting: list[Line] = []
        self.own_address: str = line.getsockname()[0]
        self.heard = time.monotonic()
        self.is_closed = False

    @property
    def silent_s(self) -> float:
        return time.monotonic() - self.heard

    def send(self, said: Line) -> bool:
        """False: the other end does not take it any more."""
        with self._sending:
            try:
                self._line.sendall(write_line(said))
            except OSError:
                self.close()
                return False
        return True

    def receive(self, within_s: float) -> Line | None:
        """The next message; None: none has come in that time."""
        deadline = time.monotonic() + within_s
        while not self._waiting:
            if self.is_closed:
                raise ConnectionLost
            left = deadline - time.monotonic()
            if left <= 0:
                return None
            try:
                if not select.select([self._line], [], [], left)[0]:
                    return None
                chunk = self._line.recv(1 << 16)
            except (OSError, ValueError):  # another thread may have closed it
                raise ConnectionLost from None
            if not chunk or len(self._torn) > _LONGEST:
                raise ConnectionLost
            self.heard = time.monotonic()
            *lines, self._torn = (self._torn + chunk).split(b"\n")
            self._waiting += [said for line in lines if (said := read_line(line)) is not None]
        return self._waiting.pop(0)

    def close(self) -> None:
        self.is_closed = True
        with suppress(OSError):
            self._line.shutdown(socket.SHUT_RDWR)
        with suppress(OSError):
            self._line.close()

    def keep_alive(self, say: Callable[[], Alive] = Alive) -> None:
        """Show from now on that this end lives, until it is closed."""

        def beat() -> None:
            while not self.is_closed and self.send(say()):
                time.sleep(BEAT_S)

        threading.Thread(target=beat, name="beats", daemon=True).start()


def listen(address: str, port: int) -> socket.socket:
    """At the address that was named. A name that this machine knows as its own loopback, as Debian writes it into
    /etc/hosts, would be out of reach for all others: then at every address."""
    found = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)
    family, _, _, _, place = next((each for each in found if each[0] == socket.AF_INET), found[0])
    by_name = not _is_literal(address) and address != "localhost"
    if by_name and str(place[0]).startswith("127."):
        family, place = socket.AF_INET, ("", port)
    line = socket.socket(family, socket.SOCK_STREAM)
    try:
        line.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        line.bind(place)
        line.listen(64)
    except OSError:
        line.close()
        raise
    return line


def _is_literal(address: str) -> bool:
    for family in (socket.AF_INET, socket.AF_INET6):
        with suppress(OSError):
            socket.inet_pton(family, address)
            return True
    return False


def find_interface(address: str) -> str | None:
    """The network interface of this machine that has an address; None: none has, or it cannot be told."""
    return next((name for _, name in socket.if_nameindex() if find_address(name) == address), None)


def find_address(interface: str) -> str | None:
    """The address of a network interface of this machine; None: it has none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, suppress(OSError):
        asked = struct.pack("256s", interface.encode()[:15])
        return socket.inet_ntoa(fcntl.ioctl(probe.fileno(), _LISTS, asked)[20:24])
    return None


# --- who may --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class MeetingRecord:
    """`meeting.json` in the run's folder, while its nodes may meet."""

    token: str

    @property
    def mark(self) -> str:
        return hashlib.sha256(f"mark {self.token}".encode()).hexdigest()[:16]

    def prove(self, *words: str) -> str:
        return hmac.new(self.token.encode(), "\n".join(words).encode(), hashlib.sha256).hexdigest()

    def is_proof(self, said: str, *words: str) -> bool:
        return hmac.compare_digest(said.encode(), self.prove(*words).encode())


def draw() -> str:
    return secrets.token_hex(16)


def write_meeting(path: Path) -> MeetingRecord:
    """For this user's eyes alone."""
    record = MeetingRecord(token=draw())
    replace_file(path, record_text(record).encode(), sync=True, private=True)
    return record


def key_path() -> Path:
    """By this file machines know each other that share no folder."""
    return data_folder() / KEY


def make_key() -> MeetingRecord | None:
    """The user's key, made where there is none; None: it cannot be."""
    path = key_path()
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        return find_record(path, MeetingRecord) or _put_key(path)
    return None


def _put_key(path: Path) -> MeetingRecord | None:
    """The key that stands there in the end: of several machines that make one at once, one wins. It gets its name once
    it is written, so whoever finds it can read it; one that cannot be read is damaged, and replaced."""
    fresh = fresh_beside(path)
    write_meeting(fresh)
    try:
        move_file(fresh, path)
    except FileExistsError:
        if find_record(path, MeetingRecord) is None:
            write_meeting(path)
    finally:
        remove_file(fresh)
    return find_record(path, MeetingRecord)


def find_meeting(run: Path, mark: str) -> MeetingRecord | None:
    """None: it is not to be seen here."""
    deadline = time.monotonic() + SHARED_S
    while True:
        with suppress(OSError):
            os.listdir(run)  # a network disk looks again
        record = find_record(run / MEETING, MeetingRecord)
        if record is not None and record.mark == mark:
            return record
        if time.monotonic() > deadline:
            return None
        time.sleep(0.25)


def name_node(node: int, host: str) -> Message:
    return Message("runs.node", node=node, host=host)
