"""Who is told what: one reader a run, however many look at it.

The reader is a thread that lives as long as somebody looks, and a little longer, so that a page that is loaded again
finds it. Each second it sends what has changed, written out once for all. A client that does not take its messages is
let go: its browser comes back by itself and says which message it saw last, and gets what it missed, or everything.
"""

from __future__ import annotations

import asyncio
import errno
import json
import secrets
import threading
import time
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from tightfit.messages import Message, as_json, say_why
from tightfit.runs.machine_eye import MachineEye
from tightfit.web.sight import RunSight, Section

EVERY_S = 1.0
CATCH_UP_S = 0.25  # a long file is read for so long between two messages
PAUSE_S = 0.02  # for others, between two such times
LINGER_S = 8.0
LOOK_S = 2.0  # between two looks at the cards
QUEUE = 32  # messages that may wait for one client
MISSED = 64  # messages that are kept for those who come back
BEAT_S = 15.0  # a word so often, so that a connection that has gone is noticed, here and by the page
MOST_FEEDS, MOST_CLIENTS = 32, 64
KEPT_SIGHTS = 8  # runs whose curve is kept when nobody looks any more


class Client:
    """One open page, as one reader knows it. A page that shows several runs is a client of the reader of each: they
    share a queue, and what comes of a run is an event by its name."""

    def __init__(self, loop: asyncio.AbstractEventLoop, event: str = "") -> None:
        self._loop, self._event = loop, f"event: {event}\n".encode() if event else b""
        self._queue: asyncio.Queue[bytes | None] = asyncio.Queue(QUEUE + 1)

    def beside(self, event: str) -> Client:
        """The same page, for the reader of another run."""
        made = Client(self._loop, event)
        made._queue = self._queue
        return made

    def send(self, message: bytes | None) -> None:
        """From any thread."""

        def put(message: bytes | None) -> None:
            if message is not None and self._queue.qsize() >= QUEUE:
                while not self._queue.empty():
                    self._queue.get_nowait()
                message = None
            with suppress(asyncio.QueueFull):
                self._queue.put_nowait(message)

        with suppress(RuntimeError):  # the server has ended
            self._loop.call_soon_threadsafe(put, message and self._event + message)

    async def messages(self) -> AsyncIterator[bytes]:
        """Until it is let go."""
        while True:
            try:
                message = await asyncio.wait_for(self._queue.get(), BEAT_S)
            except (TimeoutError, asyncio.TimeoutError):
                yield b"event: beat\ndata: {}\n\n"
                continue
            if message is None:
                return
            yield message


class Feed:
    """The reader of one run. Its thread alone touches what it reads; the lock is held for moments only."""

    def __init__(self, sight: RunSight, machine: SharedMachineEye) -> None:
        self._sight, self._machine = sight, machine
        self._name = secrets.token_hex(4)
        self._clients: set[Client] = set()
        self._newcomers: list[tuple[Client, str]] = []
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._number = 0
        self._sections: dict[str, str] = {}
        self._missed: deque[tuple[int, bytes]] = deque(maxlen=MISSED)
        self._left_at = time.monotonic()
        self._over = False
        threading.Thread(target=self._follow, name="tightfit-run", daemon=True).start()

    @property
    def is_over(self) -> bool:
        return self._over

    def join(self, client: Client, last: str) -> bool:
        """False: the reader has just ended, or as many look as may."""
        with self._lock:
            if self._over or len(self._clients) + len(self._newcomers) >= MOST_CLIENTS:
                return False
            self._newcomers.append((client, last))
        self._wake.set()
        return True

    def leave(self, client: Client) -> None:
        with self._lock:
            self._clients.discard(client)
            self._newcomers = [each for each in self._newcomers if each[0] is not client]
            self._left_at = time.monotonic()

    def end(self) -> None:
        with self._lock:
            self._over = True
            for client in (*self._clients, *(client for client, _ in self._newcomers)):
                client.send(None)
            self._clients.clear()
            self._newcomers.clear()
        self._wake.set()

    def _follow(self) -> None:
        history = self._sight.history
        try:
            with self._machine as machine:
                while True:
                    with self._lock:
                        if not self._clients and not self._newcomers and time.monotonic() - self._left_at > LINGER_S:
                            self._over = True
                        if self._over:
                            return
                    was_rough = not history.is_whole
                    history.read_on(CATCH_UP_S)
                    self._tell(self._news(machine.eye, begun_anew=was_rough and history.is_whole))
                    self._wake.wait(EVERY_S if history.is_whole else PAUSE_S)
                    self._wake.clear()
        finally:
            self.end()

    def _news(self, eye: MachineEye | None, *, begun_anew: bool) -> bytes | None:
        """What has changed since the last message; None: nothing."""
        history = self._sight.history
        sections: dict[str, Section | list[Section]] = {}
        try:
            sections = {**self._sight.look(eye), "trouble": {"why": None}}
        except OSError as error:  # what was seen last stays
            why = _SYSTEM.get(error.errno or 0, say_why(error))
            sections = {"trouble": {"why": why}}
        sections["reading"] = {"share": None if history.is_whole else round(history.share, 2)}
        written = {name: _to_json(value) for name, value in sections.items()}
        parts = {name: text for name, text in written.items() if self._sections.get(name) != text}
        self._sections |= written
        change = history.shown.changed()
        if begun_anew:
            change = history.shown.whole()
        if change is not None:
            parts["series"] = _to_json(asdict(change))
        if not parts:
            return None
        self._number += 1
        return self._message(parts)

    def _tell(self, message: bytes | None) -> None:
        """Those who are there get what is new; those who come get what they lack."""
        with self._lock:
            if message is not None:
                for client in self._clients:
                    client.send(message)
                self._missed.append((self._number, message))
            coming, self._newcomers = self._newcomers, []
            self._clients.update(client for client, _ in coming)
        for client, last in coming:
            name, _, number = last.partition("-")
            seen = int(number) if name == self._name and number.isdecimal() and len(number) < 12 else None
            missed = [message for each, message in self._missed if seen is not None and each > seen]
            if seen is None or seen + len(missed) != self._number:  # what it lacks is not kept any more
                whole = _to_json(asdict(self._sight.history.shown.whole()))
                missed = [self._message({**self._sections, "series": whole})]
            for lacking in missed:
                client.send(lacking)

    def _message(self, parts: dict[str, str]) -> bytes:
        data = "{" + ",".join(f'"{name}":{text}' for name, text in parts.items()) + "}"
        return f"id: {self._name}-{self._number}\ndata: {data}\n\n".encode()


_SYSTEM: dict[int, Message] = {
    errno.ENOENT: Message("web.no-such-file"),
    errno.EACCES: Message("web.no-permission"),
    errno.ENOTDIR: Message("web.no-folder"),
}
"""What the system says most often."""


def _to_json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"), default=as_json)


class SharedMachineEye:
    """The eye on this machine, shared by all readers and open while there is one. It takes a while to open."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self.eye: MachineEye | None = None

    def __enter__(self) -> SharedMachineEye:
        def open_eye() -> None:
            eye = MachineEye(LOOK_S).__enter__()
            with self._lock:
                if self._users and self.eye is None:
                    self.eye = eye
                    return
            eye.__exit__(None, None, None)

        with self._lock:
            self._users += 1
            if self._users == 1:
                threading.Thread(target=open_eye, name="tightfit-machine", daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._users -= 1
            if self._users == 0 and self.eye is not None:
                self.eye.__exit__(None, None, None)
                self.eye = None


class Hub:
    def __init__(self) -> None:
        self._machine = SharedMachineEye()
        self._lock = threading.Lock()
        self._feeds: dict[Path, Feed] = {}
        self._sights: OrderedDict[Path, RunSight] = OrderedDict()
        self._closed = False

    async def follow(self, runs: Sequence[Path], last: str) -> AsyncIterator[bytes]:
        """Messages about a run, as long as they are read. `last`: the one that was seen last, or nothing. Those about
        several runs are events `0`, `1`, …, in their order."""
        client = Client(asyncio.get_running_loop())
        clients = [client] if len(runs) == 1 else [client.beside(str(number)) for number in range(len(runs))]
        asked = [(self._join(run, each, last), each) for run, each in zip(runs, clients, strict=True)]
        joined = [(feed, each) for feed, each in asked if feed is not None]
        try:
            if len(joined) < len(runs):
                return
            yield b"retry: 2000\n\n"
            async for message in client.messages():
                yield message
        finally:
            for feed, each in joined:
                feed.leave(each)

    def _join(self, run: Path, client: Client, last: str) -> Feed | None:
        with self._lock:
            if self._closed:
                return None
            self._feeds = {path: feed for path, feed in self._feeds.items() if not feed.is_over}
            feed = self._feeds.get(run)
            if feed is not None and feed.join(client, last):
                return feed
            if (feed is not None and not feed.is_over) or len(self._feeds) >= MOST_FEEDS:
                return None  # as many look as may: the browser tries again
            sight = self._sights[run] = self._sights.get(run) or RunSight(run)
            self._sights.move_to_end(run)
            while len(self._sights) > KEPT_SIGHTS:
                self._sights.popitem(last=False)
            feed = self._feeds[run] = Feed(sight, self._machine)
            return feed if feed.join(client, last) else None

    def close(self) -> None:
        with self._lock:
            self._closed = True
            feeds = list(self._feeds.values())
        for feed in feeds:
            feed.end()
