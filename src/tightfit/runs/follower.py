"""The desk of a node that follows: it starts, stops and reports the ranks of its machine as the leader says.

It decides nothing about the run. What it has to know by itself is when to stop: a leader of which nothing is heard may
be dead, and ranks that nobody supervises wait for others until a timeout. So it ends them, and comes back for as long
as `RETURN_S` says; the leader may have been started again meanwhile. It arrives anew only when none of its ranks lives.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from tightfit.inputs.records import find_record
from tightfit.messages import Message, Said, say_why
from tightfit.owned import open_own
from tightfit.runs import wire
from tightfit.runs.cause import KernelRecord
from tightfit.runs.heartbeat import clear_beats, read_beat
from tightfit.runs.launch import GRACE_S, LOOK_S, Ranks, RankStart
from tightfit.runs.processes import this_host
from tightfit.runs.rank_memory import read_rank
from tightfit.runs.records import ERRORS, EVENTS
from tightfit.runs.run import Signals, read_tail
from tightfit.runs.wire import Alive, Arrived, Connection, ConnectionLost, Facts
from tightfit.types import ConfigError, UserError

PAUSE_S = 1.0  # between two tries to reach the leader
_MOST_LOG_BYTES = 1 << 16
_MOST_WORDS_BYTES = 1 << 16
_STACKS_S = (1.0, 1.0)  # after being asked for stacks, until what has come of them is sent on


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """Which node of which run this is."""

    rank: int
    count: int
    address: str  # of the leader
    port: int  # of the ranks

    @property
    def words(self) -> dict[str, object]:
        return {"address": self.address, "port": wire.desk_port(self.port)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """The ranks of an attempt on this node."""

    starts: Sequence[RankStart]
    cwd: Path
    folder: Path  # of the run, as the ranks see it
    is_apart: bool = False  # whether that is another one than the leader's


@dataclass(frozen=True, slots=True, kw_only=True)
class Led:
    """The run of the leader."""

    folder: Path  # on the leader's machine
    is_seen: bool  # whether it is the same one here


@dataclass(kw_only=True)
class FollowingDesk:
    node: Node
    look: Callable[[], Facts]
    begin: Callable[[Led, wire.Start, str | None], Work]
    """What to start for the run; the name is that of the network interface towards the leader."""
    signals: Signals
    say: Callable[[Said], None]
    _desk: str = field(default_factory=wire.draw)
    _told: int = 0  # how many signals the leader knows of

    def follow(self) -> wire.RunEnded:
        """To the end of the run, as the leader tells it."""
        limit_s = wire.MEETING_S
        while True:
            connection, led = self._arrive(limit_s)
            try:
                ended = _Service(self, connection, led).serve()
            except ConnectionLost:
                ended = None
            finally:
                connection.close()
            if ended is not None and not ended.more:
                return ended
            limit_s = wire.RETURN_S
            if ended is None:
                if self.signals.caught:
                    return wire.RunEnded(exit_code=self.signals.exit_code)
                self.say(Message("runs.leader-lost", seconds=round(limit_s), **self.node.words))

    def _arrive(self, limit_s: float) -> tuple[Connection, Led]:
        deadline, why = time.monotonic() + limit_s, ""
        while True:
            connection: Connection | None = None
            try:
                place = (self.node.address, wire.desk_port(self.node.port))
                left = max(1.0, min(wire.TRY_S, deadline - time.monotonic()))
                connection = Connection(socket.create_connection(place, timeout=left))
                return connection, self._introduce(connection)
            except socket.gaierror:
                raise ConfigError(Message("runs.master-unknown", address=self.node.address)) from None
            except TimeoutError:
                why = "timed out"
            except OSError as error:
                why = say_why(error)
            except ConnectionLost:
                why = "closed by the other end"
            except BaseException:
                if connection is not None:
                    connection.close()
                raise
            if connection is not None:
                connection.close()
            if self.signals.caught:
                raise KeyboardInterrupt
            if time.monotonic() > deadline:
                raise ConfigError(Message("runs.leader-unreached", why=why, seconds=round(limit_s), **self.node.words))
            time.sleep(PAUSE_S)

    def _introduce(self, connection: Connection) -> Led:
        """Say who this is and prove it; the run."""
        nonce = wire.draw()
        connection.send(
            Arrived(
                node=self.node.rank,
                nodes=self.node.count,
                desk=self._desk,
                pid=os.getpid(),
                facts=self.look(),
                clock=time.time(),
                nonce=nonce,
            )
        )
        challenge = self._await(connection, wire.Challenge)
        folder = Path(challenge.folder)
        record = wire.find_meeting(folder, challenge.mark)
        is_seen = record is not None
        if record is None:
            key = find_record(wire.key_path(), wire.MeetingRecord)
            record = key if key is not None and key.mark == challenge.key_mark else None
        if record is None:
            connection.send(wire.NodeProof(proof=""))
            said = {"folder": folder, "key": wire.key_path()}
            raise ConfigError(Message("runs.folder-unseen-here", **said))
        proof = record.prove(challenge.nonce, nonce, self._desk)
        connection.send(wire.NodeProof(proof=proof, by_key=not is_seen))
        welcome = self._await(connection, wire.Welcome)
        if not record.is_proof(welcome.proof, nonce, challenge.nonce, "leader"):
            raise ConfigError(Message("runs.leader-unproved", **self.node.words))
        return Led(folder=folder, is_seen=is_seen)

    def _await(self, connection: Connection, kind: type[wire.L]) -> wire.L:
        """The leader's next word. While it plans it only says that it lives."""
        while connection.silent_s < wire.SILENT_S:
            said = connection.receive(LOOK_S)
            if isinstance(said, wire.NodeRefused):
                raise ConfigError(said.said)
            if isinstance(said, wire.RunEnded):
                raise ConnectionLost
            if isinstance(said, kind):
                return said
            if self.signals.caught:
                raise KeyboardInterrupt
        raise ConnectionLost


class _Service:
    """One connection, from the leader's welcome to its end."""

    def __init__(self, follower: FollowingDesk, connection: Connection, led: Led) -> None:
        self._follower, self._connection, self._led = follower, connection, led
        self._folder = led.folder  # in which the ranks give signs of life
        self._is_apart = False  # whether that is another one than the leader's
        self._attempt, self._began, self._sent = 0, 0.0, dict[int, int]()
        self._codes: dict[str, int] = {}  # of the ranks that have ended
        self._ranks: Ranks | None = None
        self._kernel: KernelRecord | None = None
        self._numbers: tuple[int, ...] = ()
        self._send_logs_at: list[float] = []
        self._reading = threading.Lock()

    def serve(self) -> wire.RunEnded:
        connection = self._connection
        connection.keep_alive(self._beat)
        looked = time.monotonic()
        try:
            while True:
                said = connection.receive(LOOK_S)
                now = time.monotonic()
                slept, looked = now - looked > wire.SILENT_S / 2, now
                if isinstance(said, wire.RunEnded):
                    return said
                if said is not None:
                    self._obey(said)
                elif not slept and connection.silent_s > wire.SILENT_S:
                    raise ConnectionLost
                self._report()
                self._pass_on_signals()
        finally:
            self._end(GRACE_S)

    def _beat(self) -> Alive:
        """From a thread of its own: ending ranks, say, takes a while."""
        beats = (read_beat(self._folder, rank) for rank in self._numbers)
        ranks, held = self._ranks, []
        if ranks is not None:
            self._send_logs()
            starts, host = zip(ranks.starts, ranks.pids, strict=False), this_host()
            held = [read_rank(f"rank-{start.rank}", pid, host) for start, pid in starts]
        found = tuple(rank for rank in held if rank is not None)
        return Alive(beats=tuple(beat for beat in beats if beat is not None), ranks=found)

    def _obey(self, said: wire.Line) -> None:
        if isinstance(said, wire.TryPort):
            why = ""
            try:
                socket.create_connection((self._follower.node.address, said.port), timeout=wire.TRY_S).close()
            except TimeoutError:
                why = "timed out"
            except OSError as error:
                why = say_why(error)
            self._connection.send(wire.PortTried(port=said.port, why=why))
        elif isinstance(said, wire.Start):
            self._end(0.0)
            self._start(said)
        elif isinstance(said, wire.Save) and self._ranks is not None:
            self._ranks.ask()
        elif isinstance(said, wire.EventsTold) and self._is_apart:
            with suppress(OSError), open_own(self._folder / EVENTS, "ab") as events:
                events.write(said.text.encode())
        elif isinstance(said, wire.Dump) and self._ranks is not None:
            self._ranks.dump(said.ranks)
            now = time.monotonic()
            self._send_logs_at = [now + sum(_STACKS_S[: number + 1]) for number in range(len(_STACKS_S))]
        elif isinstance(said, wire.StopRanks) and said.attempt == self._attempt:
            self._end(said.grace_s)
            self._connection.send(wire.AllEnded(attempt=self._attempt, codes=self._codes))

    def _start(self, order: wire.Start) -> None:
        self._attempt, self._began, self._codes = order.attempt, time.time(), {}
        try:
            work = self._follower.begin(self._led, order, wire.find_interface(self._connection.own_address))
            self._folder, self._is_apart = work.folder, work.is_apart
            self._kernel = KernelRecord()
            self._sent = {start.rank: 0 for start in work.starts}
            ranks = Ranks(work.starts, work.cwd)
            ranks.__enter__()
        except UserError as error:
            self._connection.send(wire.CannotStart(attempt=order.attempt, said=error.said))
            return
        self._ranks, self._numbers = ranks, tuple(start.rank for start in work.starts)
        pids, apart = tuple(ranks.pids), self._is_apart
        self._connection.send(wire.RanksStarted(attempt=order.attempt, pids=pids, is_apart=apart))

    def _report(self) -> None:
        if self._ranks is None:
            return
        now = time.monotonic()
        if self._send_logs_at and now >= self._send_logs_at[0]:
            self._send_logs_at.pop(0)
            self._send_logs()
        for gone in self._ranks.poll():
            self._tell_end(gone.start.rank, gone.code)

    def _tell_end(self, rank: int, code: int) -> None:
        assert self._ranks is not None
        self._connection.send(self._beat())  # where it last stood
        words = ""
        path = self._folder / ERRORS / f"rank-{rank}.json"
        with suppress(OSError):
            if path.stat().st_mtime >= self._began - 1.0:
                words = read_tail(path, _MOST_WORDS_BYTES).decode("utf-8", "replace")
        kernel = None if self._kernel is None else self._kernel.said(self._ranks.pids)
        self._connection.send(
            wire.RankEnded(
                attempt=self._attempt,
                rank=rank,
                code=code,
                words=words,
                kernel=() if kernel is None else kernel.lines,
                kernel_readable=kernel is not None and kernel.readable,
            )
        )

    def _send_logs(self) -> None:
        """What has come into the logs of this node's ranks since: the leader's folder tells of all nodes."""
        ranks = self._ranks
        for start in () if ranks is None else ranks.starts:
            with self._reading, suppress(OSError), start.log.open("rb") as file:
                size, sent = file.seek(0, 2), self._sent.get(start.rank, 0)
                if size <= sent:
                    continue
                file.seek(max(sent, size - _MOST_LOG_BYTES))
                self._sent[start.rank] = size
                text = file.read(size - file.tell()).decode("utf-8", "replace")
                self._connection.send(wire.Logged(rank=start.rank, text=text))

    def _pass_on_signals(self) -> None:
        follower = self._follower
        for number, _ in follower.signals.caught[follower._told :]:
            follower._told += 1
            self._connection.send(wire.Signalled(number=number))
        if follower.signals.times > 1:
            raise ConnectionLost

    def _end(self, grace_s: float) -> None:
        """Leave no rank behind."""
        ranks = self._ranks
        if ranks is not None:
            ranks.end(grace_s)
            self._send_logs()
            self._codes = {str(gone.start.rank): gone.code for gone in ranks.exits}
            if self._is_apart:  # the leader clears its own folder
                clear_beats(self._folder, self._numbers)
            self._ranks, self._numbers = None, ()
        if self._kernel is not None:
            self._kernel.close()
            self._kernel = None
