"""The desk of node 0: it decides for all nodes of a run, and the desks of the others do as it says.

    arrive    each follower connects, says what its machine is, and proves that it belongs to the run
    assemble  before every attempt: all nodes are there, alike, in the same versions, and reach the ranks' port
    start     the plan as it is now, to all; from then on their ranks are watched here as if they ran here

To whoever supervises, the ranks of all nodes are one group (`SpreadRanks`), with one thing more that may happen to it:
trouble with a whole node. A node is lost when its connection is closed or it has been silent for too long. Then the
attempt has failed; a follower that has lost its leader ends its ranks by itself, so nothing of the old attempt lives on
when it comes back. The next attempt waits for it.

Of two processes that claim to be the same node the first one stays, for as long as it lives.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from tightfit.inputs.records import find_json, parse_json
from tightfit.messages import Listing, Message, Said, say_why
from tightfit.owned import open_own, replace_file
from tightfit.priced import GIB
from tightfit.runs import wire
from tightfit.runs.cause import KernelSaid
from tightfit.runs.heartbeat import Beat, read_beat
from tightfit.runs.launch import GRACE_S, LOOK_S, Exit, NodeTrouble, Ranks, RankStart
from tightfit.runs.processes import this_host
from tightfit.runs.rank_memory import Rank, RanksRecord, read_rank
from tightfit.runs.records import ERRORS, EVENTS, LastWords, WorkerFile
from tightfit.runs.run import Signals
from tightfit.runs.wire import Arrived, Connection, ConnectionLost, Facts, name_node
from tightfit.types import ConfigError

_MOST_EVENTS_BYTES = 1 << 20  # that are told at a time
HELLO_S = 10.0  # for the first word on a connection
FAREWELL_S = 5.0  # for a node to say that its ranks have ended, beyond the time that they have for it


@dataclass(slots=True)
class Seat:
    """A node that is there, or was."""

    arrived: Arrived
    connection: Connection
    address: str  # from which it came
    ahead_s: float  # of its clock, before ours
    is_checked: bool = False
    tried: str | None = None  # why it does not reach the ranks' port; "": it does; None: it has not said
    beats: dict[int, Beat] = field(default_factory=dict)
    ranks: tuple[Rank, ...] = ()  # what they hold
    is_apart: bool = False  # it has a folder of its own for the run
    # of the attempt that runs
    attempt: int = 0
    exits: list[wire.RankEnded] = field(default_factory=list)
    all_ended: wire.AllEnded | None = None
    cannot: Said | None = None

    @property
    def name(self) -> Message:
        return name_node(self.arrived.node, self.arrived.facts.host)

    @property
    def lives(self) -> bool:
        return not self.connection.is_closed and self.connection.silent_s <= wire.SILENT_S


@dataclass(frozen=True, slots=True, kw_only=True)
class Orders:
    """What all nodes are told to start."""

    files: Mapping[str, str]
    options: tuple[str, ...]
    port: int


class Leader:
    """Listens from its making on, so that nodes may arrive while the plan is still made; `close` it."""

    def __init__(self, nodes: int, address: str, port: int) -> None:
        """`port`: of the ranks."""
        self.nodes, self.address, self.port = nodes, address, port
        self.signals = Signals()  # with those of all nodes
        self._seats: dict[int, Seat] = {}
        self._problems: dict[int, Message] = {}  # of nodes that came and cannot stay
        self._said: list[Message] = []  # to be passed on by whoever leads
        self._change = threading.Condition()
        self._folder: Path | None = None
        self._record: wire.MeetingRecord | None = None
        self._key: wire.MeetingRecord | None = None  # of the user
        self._logs: dict[int, Path] = {}
        self._told = 0  # bytes of the events that other nodes know
        self._closed = False
        own = wire.desk_port(port)
        try:
            self._door = wire.listen(address, own)
        except socket.gaierror:
            raise ConfigError(Message("runs.master-unknown", address=address)) from None
        except PermissionError:
            raise ConfigError(Message("runs.systems-port", port=own)) from None
        except OSError as error:
            in_use = Message("runs.desk-port-in-use", port=own, ranks=port)
            elsewhere = Message("runs.master-not-here", address=address, why=say_why(error))
            raise ConfigError(in_use if error.errno in wire.IN_USE else elsewhere) from None
        threading.Thread(target=self._accept, name="leader", daemon=True).start()

    # --- who comes ---

    def _accept(self) -> None:
        while True:
            try:
                line, peer = self._door.accept()
            except OSError:
                return
            threading.Thread(target=self._receive, args=(line, str(peer[0])), name="node", daemon=True).start()

    def _receive(self, line: socket.socket, address: str) -> None:
        """One connection, from its first word to its last."""
        connection = Connection(line)
        seat: Seat | None = None
        with suppress(ConnectionLost):
            seat = self._admit(connection, address)
            while seat is not None:
                self._hear(seat, connection.receive(wire.BEAT_S))
        connection.close()
        with self._change:
            self._change.notify_all()

    def _admit(self, connection: Connection, address: str) -> Seat | None:
        """Seat a node that proves that it belongs here; None: it was sent away."""
        arrived = connection.receive(HELLO_S)
        if not isinstance(arrived, Arrived):
            return None
        ahead_s = arrived.clock - time.time()
        if arrived.nodes != self.nodes or not 0 < arrived.node < self.nodes:
            asked = {"node": arrived.node, "count": arrived.nodes, "nodes": self.nodes}
            connection.send(wire.NodeRefused(said=Message("runs.node-of-others", **asked)))
            return None
        while True:  # the plan may still be in the making
            with self._change:
                folder, record = self._folder, self._record
                if record is None and not self._closed:
                    self._change.wait(wire.BEAT_S)
            if self._closed or not connection.send(wire.Alive()):
                return None
            if folder is not None and record is not None:
                break
        name, nonce = name_node(arrived.node, arrived.facts.host), wire.draw()
        key = self._key
        key_mark = "" if key is None else key.mark
        connection.send(wire.Challenge(folder=str(folder), mark=record.mark, key_mark=key_mark, nonce=nonce))
        proof = connection.receive(2 * wire.SHARED_S)
        if not isinstance(proof, wire.NodeProof):
            return None
        if not proof.proof:
            with self._change:
                said = {"folder": folder, "key": wire.key_path()}
                self._problems[arrived.node] = Message("runs.folder-unseen", name=name, **said)
            return None
        if proof.by_key and key is not None:
            record = key
        if not record.is_proof(proof.proof, nonce, arrived.nonce, arrived.desk):
            connection.send(wire.NodeRefused(said=Message("runs.node-unproved")))
            return None
        seat = Seat(arrived=arrived, connection=connection, address=address, ahead_s=ahead_s)
        with self._change:
            there = self._seats.get(arrived.node)
            if there is not None and there.lives and there.arrived.desk != arrived.desk:
                who = {"node": arrived.node, "host": there.arrived.facts.host, "pid": there.arrived.pid}
                connection.send(wire.NodeRefused(said=Message("runs.node-there-already", **who)))
                pid, host = arrived.pid, arrived.facts.host
                self._said.append(Message("runs.node-twice", name=there.name, pid=pid, host=host))
                return None
            if there is not None:
                there.connection.close()
            self._seats[arrived.node] = seat
        silent_s = wire.SILENT_S
        connection.send(wire.Welcome(proof=record.prove(arrived.nonce, nonce, "leader"), silent_s=silent_s))
        connection.keep_alive()
        with self._change:
            self._change.notify_all()
        return seat

    def _hear(self, seat: Seat, said: wire.Line | None) -> None:
        if isinstance(said, wire.Logged) and said.rank in self._logs:
            with suppress(OSError), open_own(self._logs[said.rank], "ab") as log:
                log.write(said.text.encode("utf-8", "replace"))
        elif isinstance(said, wire.Signalled):
            self.signals.caught.append((said.number, time.monotonic()))
        with self._change:
            if isinstance(said, wire.Alive):
                seat.beats.update({beat.rank: beat for beat in said.beats})
                seat.ranks = said.ranks
            elif isinstance(said, wire.RanksStarted):
                seat.is_apart = said.is_apart
            elif isinstance(said, wire.PortTried):
                seat.tried = said.why
            elif isinstance(said, wire.RankEnded) and said.attempt == seat.attempt:
                self._keep_words(said)
                seat.exits.append(said)
            elif isinstance(said, wire.AllEnded) and said.attempt == seat.attempt:
                seat.all_ended = said
            elif isinstance(said, wire.CannotStart) and said.attempt == seat.attempt:
                seat.cannot = said.said
            if said is not None:
                self._change.notify_all()

    def _keep_words(self, ended: wire.RankEnded) -> None:
        """A network disk may show here only later what a rank wrote there."""
        assert self._folder is not None
        path = self._folder / ERRORS / f"rank-{ended.rank}.json"
        with suppress(OSError, ValueError):
            if ended.words and find_json(path) is None and isinstance(parse_json(ended.words), dict):
                path.parent.mkdir(exist_ok=True)
                replace_file(path, ended.words.encode())

    # --- before an attempt ---

    def open(self, folder: Path) -> None:
        """From now on nodes may prove that they belong to the run in this folder."""
        record, key = wire.write_meeting(folder / wire.MEETING), wire.make_key()
        with self._change:
            self._folder, self._record, self._key = folder, record, key
            with suppress(OSError):
                self._told = (folder / EVENTS).stat().st_size
            self._change.notify_all()

    def assemble(
        self, worker: WorkerFile, own: Facts, *, first: bool, say: Callable[[Said], None], give_up: Callable[[], bool]
    ) -> bool:
        """Whether all nodes are there for the next attempt; False: it was given up. ConfigError: one is missing, or is
        not as the others are."""
        began, limit_s, told = time.monotonic(), wire.MEETING_S if first else wire.RETURN_S, first
        while True:
            with self._change:
                seats = [seat for seat in self._seats.values() if seat.lives and seat.connection.heard >= began]
                missing = sorted({*range(1, self.nodes)} - {seat.arrived.node for seat in seats})
                problems = [self._problems[node] for node in missing if node in self._problems]
            for said in self.take_said():
                say(said)
            if problems:
                raise ConfigError(problems[0])
            for seat in seats:
                if not seat.is_checked:
                    self._check(seat, worker, own, say)
            if not missing:
                break
            if give_up():
                return False
            waited_s = time.monotonic() - began
            names = Listing([self._name(node) for node in missing], "and")
            if waited_s > limit_s:
                place = {"address": self.address, "port": wire.desk_port(self.port)}
                late = "runs.nodes-missing" if first else "runs.nodes-not-back"
                raise ConfigError(Message(late, names=names, seconds=round(limit_s), **place))
            if not told and waited_s > 2 * wire.BEAT_S:
                say(Message("runs.waiting-for-nodes", names=names, seconds=round(limit_s)))
                told = True
            with self._change:
                self._change.wait(LOOK_S)
        self._try_port(seats)
        return True

    def _name(self, node: int) -> Message:
        seat = self._seats.get(node)
        return Message("runs.node-unnamed", node=node) if seat is None else seat.name

    def _check(self, seat: Seat, worker: WorkerFile, own: Facts, say: Callable[[Said], None]) -> None:
        """One node against this one, and against the plan."""
        theirs, first = seat.arrived.facts, name_node(0, own.host)
        for package, version in own.versions.items():
            found = theirs.versions.get(package, "")
            short = slice(0, 2) if package == "Python" else slice(None)
            if version.split(".")[short] != found.split(".")[short]:
                has, other = (_say_version(package, each) for each in (version, found))
                raise ConfigError(Message("runs.other-versions", first=first, has=has, name=seat.name, other=other))
        wanted = worker.gpus_per_node if worker.vendor != "cpu" else 0
        if wanted > len(theirs.gpus) or (wanted and set(theirs.gpus) != set(own.gpus)):
            has, other = (_say_gpus(each) for each in (own, theirs))
            raise ConfigError(
                Message("runs.other-gpus", first=first, has=has, name=seat.name, other=other, wanted=wanted)
            )
        ram = theirs.ram_bytes
        if ram is not None and ram < worker.ram_bytes_per_node:
            need = worker.ram_bytes_per_node / GIB
            raise ConfigError(Message("runs.too-little-ram-on", name=seat.name, has=ram / GIB, need=need))
        if abs(seat.ahead_s) > wire.CLOCKS_S:
            way = "runs.clock-ahead" if seat.ahead_s > 0 else "runs.clock-behind"
            say(Message(way, name=seat.name, seconds=round(abs(seat.ahead_s))))
        seat.is_checked = True

    def _try_port(self, seats: Sequence[Seat]) -> None:
        """A firewall that eats what goes to the ranks' port would cost half an hour of silence."""
        try:
            door = wire.listen(self.address, self.port)
        except OSError as error:
            why = say_why(error)
            raise ConfigError(Message("runs.rank-port-taken", port=self.port, why=why)) from None
        with door:
            door.settimeout(LOOK_S)
            for seat in seats:
                seat.tried = None
                seat.connection.send(wire.TryPort(port=self.port))
            deadline = time.monotonic() + wire.TRY_S + wire.BEAT_S
            lines = []
            while any(seat.tried is None and seat.lives for seat in seats) and time.monotonic() < deadline:
                with suppress(OSError):
                    lines.append(door.accept()[0])
            for seat in seats:
                if seat.tried:
                    place = {"address": self.address, "port": self.port, "why": seat.tried}
                    raise ConfigError(Message("runs.rank-port-eaten", name=seat.name, **place))
            for line in lines:  # who closes last has nothing left of it to wait for
                line.close()

    # --- an attempt ---

    def start(self, attempt: int, orders: Orders, logs: Mapping[int, Path]) -> None:
        for log in logs.values():
            with suppress(OSError):
                log.parent.mkdir(exist_ok=True)
                open_own(log, "wb").close()  # a rank that is killed may have said nothing
        with self._change:
            self._logs = dict(logs)
            for seat in self._seats.values():
                seat.attempt, seat.exits, seat.all_ended, seat.cannot, seat.beats = attempt, [], None, None, {}
        self.tell(
            wire.Start(attempt=attempt, files=orders.files, options=orders.options, port=orders.port),
        )

    def tell(self, said: wire.Line) -> None:
        for seat in list(self._seats.values()):
            if not seat.connection.is_closed:
                seat.connection.send(said)

    def show_ranks(self, own: Sequence[Rank]) -> None:
        """Write down what the ranks of all nodes hold, for whoever watches, and tell the nodes what has happened whose
        folders are their own. `own`: the ranks of this node."""
        assert self._folder is not None
        others = [rank for seat in list(self._seats.values()) if seat.lives for rank in seat.ranks]
        RanksRecord(ranks=(*own, *others)).write(self._folder)
        with suppress(OSError), (self._folder / EVENTS).open("rb") as file:
            file.seek(self._told)
            text = file.read(_MOST_EVENTS_BYTES)
            text = text[: text.rfind(b"\n") + 1]
            self._told += len(text)
            for seat in list(self._seats.values()):
                if text and seat.is_apart and not seat.connection.is_closed:
                    seat.connection.send(wire.EventsTold(text=text.decode("utf-8", "replace")))

    def seat_of(self, node: int) -> Seat | None:
        return self._seats.get(node)

    def take_exits(self) -> list[wire.RankEnded]:
        with self._change:
            found = [gone for seat in self._seats.values() for gone in seat.exits]
            for seat in self._seats.values():
                seat.exits = []
        return found

    def take_said(self) -> list[Message]:
        """What there is to say about nodes meanwhile."""
        with self._change:
            said, self._said = self._said, []
        return said

    def read_beat(self, run: Path, rank: int) -> Beat | None:
        """Of a rank on any node: what its own desk last read, or what lies in the folder."""
        for seat in self._seats.values():
            if rank in seat.beats:
                return seat.beats[rank]
        return read_beat(run, rank)

    def set_clocks(self, words: Sequence[LastWords], node_of: Callable[[int], int]) -> tuple[LastWords, ...]:
        """Last words by this node's clock, whichever wrote them."""
        ahead = {node: seat.ahead_s for node, seat in self._seats.items()}
        return tuple(replace(each, at=each.at - ahead.get(node_of(each.rank), 0.0)) for each in words)

    @property
    def interface(self) -> str | None:
        """The network interface of this machine by which the others reach it."""
        places = (seat.connection.own_address for seat in self._seats.values())
        return next((name for place in places if (name := wire.find_interface(place)) is not None), None)

    # --- the end ---

    def close(self, exit_code: int, *, more: bool = False) -> None:
        """Tell all nodes how the run has ended."""
        with self._change:
            if self._closed:
                return
            self._closed = True
            self._change.notify_all()
        if self._folder is not None:
            self.show_ranks(())
            RanksRecord.remove(self._folder)
        with suppress(OSError):
            self._door.shutdown(socket.SHUT_RDWR)  # or whoever waits at it would wait on
        self._door.close()
        self.tell(wire.RunEnded(exit_code=exit_code, more=more))
        for seat in self._seats.values():
            deadline = time.monotonic() + wire.BEAT_S  # it closes the line itself when it has read this
            while not seat.connection.is_closed and time.monotonic() < deadline:
                time.sleep(LOOK_S)
            seat.connection.close()
        if self._folder is not None:
            with suppress(OSError):
                (self._folder / wire.MEETING).unlink(missing_ok=True)


def _say_version(package: str, version: str) -> Message:
    if not version:
        return Message("runs.without-package", package=package)
    return Message("runs.has-version", package=package, version=version)


def _say_gpus(facts: Facts) -> Message:
    if not facts.gpus:
        return Message("runs.no-gpu")
    names = Listing(dict.fromkeys(facts.gpus), "and")
    return Message("runs.gpus-of", count=len(facts.gpus), names=names)


# --- the ranks of all nodes -----------------------------------------------------------------------


class SpreadRanks(Ranks):
    """The processes of a run on all its nodes: those of this one, and by their desks those of the others."""

    def __init__(self, starts: Sequence[RankStart], folder: Path, leader: Leader, attempt: int, orders: Orders) -> None:
        super().__init__([start for start in starts if start.elsewhere is None], folder)
        self._leader, self._attempt, self._orders = leader, attempt, orders
        self._away = {start.rank: start for start in starts if start.elsewhere is not None}
        self._node_of = {start.rank: start.elsewhere or 0 for start in starts}
        self._asleep_at = time.monotonic()
        self._ended_away = False
        self._every_start = starts
        self._trouble: NodeTrouble | None = None
        self._shown = 0.0
        self._kernels: dict[int, wire.RankEnded] = {}

    def __enter__(self) -> SpreadRanks:
        logs = {rank: start.log for rank, start in self._away.items()}
        self._leader.start(self._attempt, self._orders, logs)
        try:
            super().__enter__()
        except BaseException:
            self._end_away(0.0)
            raise
        return self

    @property
    def every_start(self) -> Sequence[RankStart]:
        return self._every_start

    @property
    def running(self) -> int:
        return super().running + len(self._away)

    def poll(self) -> list[Exit]:
        found = super().poll()
        away = [self._leave(ended.rank, ended.code) for ended in self._take_exits()]
        self.exits += (more := [gone for gone in away if gone is not None])
        return found + more

    def _take_exits(self) -> list[wire.RankEnded]:
        found = self._leader.take_exits()
        for ended in found:  # what the kernel said of the first that ended is what matters
            self._kernels.setdefault(self._node_of.get(ended.rank, 0), ended)
        return found

    def _leave(self, rank: int, code: int) -> Exit | None:
        start = self._away.pop(rank, None)
        return None if start is None else Exit(start=start, code=code, at=time.time())

    def ask(self) -> None:
        super().ask()
        self._leader.tell(wire.Save())

    def dump(self, ranks: Collection[int]) -> None:
        super().dump(ranks)
        self._leader.tell(wire.Dump(ranks=tuple(rank for rank in ranks if rank in self._away)))

    def find_trouble(self) -> NodeTrouble | None:
        """With a node whose ranks have not all ended."""
        now = time.monotonic()
        slept, self._asleep_at = now - self._asleep_at > wire.SILENT_S / 2, now
        if now - self._shown > wire.BEAT_S:
            self._shown, host = now, this_host()
            own = (read_rank(f"rank-{start.rank}", pid, host) for pid, start in self._running.items())
            self._leader.show_ranks([rank for rank in own if rank is not None])
        if slept:  # this desk was paused: what the others said meanwhile has not been read yet
            time.sleep(wire.BEAT_S)
        for node in sorted({start.elsewhere or 0 for start in self._away.values()}):
            if self._trouble is not None:
                break
            rank = min(rank for rank, start in self._away.items() if start.elsewhere == node)
            seat = self._leader.seat_of(node)
            if seat is None:
                continue
            if seat.cannot is not None:
                sentence = Message("runs.node-says", name=seat.name, said=seat.cannot)
                self._trouble = NodeTrouble(node=node, rank=rank, sentence=sentence, is_users=True)
            elif seat.connection.is_closed or seat.attempt != self._attempt:
                sentence = Message("runs.node-gone", name=seat.name)
                self._trouble = NodeTrouble(node=node, rank=rank, sentence=sentence)
            elif not seat.lives:
                sentence = Message("runs.node-silent", name=seat.name, seconds=round(wire.SILENT_S))
                self._trouble = NodeTrouble(node=node, rank=rank, sentence=sentence)
        return self._trouble

    def end(self, grace_s: float = GRACE_S, hurry: Callable[[], bool] = lambda: False) -> None:
        if not self._ended_away:
            self._leader.tell(wire.StopRanks(attempt=self._attempt, grace_s=grace_s))
        super().end(grace_s, hurry)
        self._end_away(grace_s)

    def _end_away(self, grace_s: float) -> None:
        """Until every node that can be reached says that its ranks have ended."""
        if self._ended_away:
            return
        self._ended_away = True
        deadline = time.monotonic() + grace_s + FAREWELL_S
        nodes = {start.elsewhere or 0 for start in self._away.values()}
        while nodes and time.monotonic() < deadline:
            for node in sorted(nodes):
                seat = self._leader.seat_of(node)
                if seat is None or not seat.lives or seat.attempt != self._attempt:
                    nodes.remove(node)
                elif seat.all_ended is not None:
                    codes = {int(rank): code for rank, code in seat.all_ended.codes.items()}
                    gone = [self._leave(rank, code) for rank, code in codes.items()]
                    self.exits += [each for each in gone if each is not None]
                    nodes.remove(node)
            time.sleep(LOOK_S)
        self._take_exits()
        self._away.clear()

    def kernel_of(self, rank: int) -> KernelSaid | None:
        """What the kernel of another node said when a rank ended there; None: this node's is the one to ask."""
        ended = self._kernels.get(self._node_of.get(rank, 0))
        return None if ended is None else KernelSaid(lines=ended.kernel, readable=ended.kernel_readable)

    def set_clocks(self, words: Sequence[LastWords]) -> tuple[LastWords, ...]:
        return self._leader.set_clocks(words, lambda rank: self._node_of.get(rank, 0))
