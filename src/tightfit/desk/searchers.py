"""Processes that search beside a server: the parts of one question at the same time, and away from its threads.

A search computes for some tenths of a second, and in a thread of the server it would hold the interpreter's lock
against whatever else the page asks for meanwhile. Each helper is a process that is started once and keeps what it has
learned about a model. It is told its tasks over a socket, ends when that is closed, however the server ended, and is
replaced when it dies; until it is there, and for what it could not do, the server searches by itself.
"""

from __future__ import annotations

import gc
import os
import queue
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import count as count_up
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import NamedTuple
from weakref import WeakKeyDictionary

from tightfit.planner.question import Question
from tightfit.planner.search import search_strategy
from tightfit.planner.team import Found, Task, helped_by
from tightfit.planner.wanted import check_wanted, only_while
from tightfit.types import ModelShape

MOST = 4  # helpers; a question has about a dozen parts, and a few of them take most of the time
GARBAGE = 50_000  # new objects that are looked through together: what a search makes goes by itself, but for little
BEHIND = 5  # by which helpers are nicer than the server, in whose session they are: bars go before the exact answer
REST_S = 1.0  # without a task, after which a helper looks through what is new, rather than while somebody waits
LOOK_S = 0.02  # between two looks whether the answer is still wanted
MODELS = 16  # that a helper remembers
READY, ABANDON = "ready", "abandon"
_SERVE = "from tightfit.desk.searchers import serve; serve()"  # what is sent is of the classes of this module


class Asked(NamedTuple):
    """What the tasks that follow are about."""

    number: int  # of the model: what a helper has learned about one, it finds under the object that it got first
    question: Question


class Helper:
    """One process, seen from the server."""

    def __init__(self, number: int) -> None:
        self.asked: Asked | None
        self.process: subprocess.Popen[bytes] | None
        self.is_odd = number % 2 > 0
        """It begins with the last task, others with the first: neighbours have much in common, and what a helper has
        found out for one serves it for the next. ZeRO-3, which has least in common with the others, comes last."""
        self._start()

    def _start(self) -> None:
        self.owes = 1  # messages that nobody waits for: that it is ready, and what was abandoned
        self.is_new, self.asked, self.process = True, None, None
        self.line, theirs = Pipe()
        with theirs, suppress(OSError):  # no room for one more process: the next look tries again
            self.process = subprocess.Popen(
                [sys.executable, "-c", _SERVE, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                cwd=Path(__file__).parents[2],  # where nothing stands in the way of our own modules
            )

    def is_ready(self) -> bool:
        """Whether it waits for a task. One that has died is replaced, which takes a moment."""
        try:
            while self.owes and self.line.poll():
                self.line.recv()
                self.owes, self.is_new = self.owes - 1, False
        except Exception:
            self.restart()
        return not self.owes

    def send(self, asked: Asked, task: Task) -> bool:
        """Whether it has the task now. One of whom that is not certain is replaced."""
        try:
            if self.asked is None or asked.question is not self.asked.question:
                # A copy of the model is without what was worked out from it, which would be most of what is sent.
                self.line.send(Asked(asked.number, replace(asked.question, shape=replace(asked.question.shape))))
                self.asked = asked
            self.line.send(task)
        except Exception:
            self.restart()
            return False
        return True

    def receive(self) -> Found | None:
        """What came of its task; None: it could not do it."""
        try:
            answer: Found | None = self.line.recv()
        except Exception:
            self.restart()
            return None
        return answer

    def abandon(self) -> None:
        self.owes += 1
        with suppress(OSError):
            self.line.send(ABANDON)

    def restart(self) -> None:
        self.end()
        self._start()

    def end(self) -> None:
        self.line.close()
        if self.process is not None:
            self.process.kill()
            self.process.wait()


class Searchers:
    """The helpers of one server, which start when they are first asked for."""

    def __init__(self, count: int | None = None) -> None:
        """`count`: as many as there are processors, unless it is given."""
        self._count = max(1, min(MOST, os.cpu_count() or 1)) if count is None else count
        self._change = threading.Condition()
        self._all, self._idle = list[Helper](), list[Helper]()
        self._models: WeakKeyDictionary[ModelShape, int] = WeakKeyDictionary()
        self._numbers = count_up()

    @contextmanager
    def help(self) -> Iterator[None]:
        """What is searched for meanwhile, in this thread, is searched for here."""
        with self._change:
            if not self._all:
                self._all = [Helper(number) for number in range(self._count)]
                self._idle = [*self._all]
        with helped_by(self):
            yield

    def search(self, question: Question, tasks: Sequence[Task]) -> list[Found]:
        """What each of the tasks finds, whoever is free doing the next one."""
        with self._change:
            asked = Asked(self._models.setdefault(question.shape, next(self._numbers)), question)
        waiting, found = deque(sorted(enumerate(tasks), key=lambda each: each[1].levers.stage == 3)), dict[int, Found]()
        busy = dict[Connection, tuple[Helper, int]]()
        try:
            while busy or (waiting and self.have_started()):
                check_wanted()
                while waiting and (helper := self._take(patience_s=0 if busy else LOOK_S)) is not None:
                    number, task = waiting.pop() if helper.is_odd else waiting.popleft()
                    if helper.send(asked, task):
                        busy[helper.line] = helper, number
                    else:
                        self._give_back(helper)
                for line in wait(list(busy), LOOK_S) if busy else ():
                    assert isinstance(line, Connection)
                    helper, number = busy.pop(line)
                    answer = helper.receive()
                    if answer is not None:
                        way = answer.way and replace(answer.way, shape=question.shape)  # as it is known here
                        found[number] = answer._replace(way=way)
                    self._give_back(helper)
        finally:
            for helper, _ in busy.values():
                helper.abandon()
                self._give_back(helper)
        return [found.get(number) or search_strategy(question, task) for number, task in enumerate(tasks)]

    def have_started(self) -> bool:
        """Whether any of them can be waited for."""
        with self._change:
            are_busy = len(self._idle) < len(self._all)
            return are_busy or any(helper.is_ready() or not helper.is_new for helper in self._idle)

    def _take(self, patience_s: float) -> Helper | None:
        with self._change:
            helper = self._find_ready()
            if helper is None and patience_s:  # all search for somebody else
                self._change.wait(patience_s)
                helper = self._find_ready()
            if helper is not None:
                self._idle.remove(helper)
            return helper

    def _find_ready(self) -> Helper | None:
        return next((helper for helper in self._idle if helper.is_ready()), None)

    def _give_back(self, helper: Helper) -> None:
        with self._change:
            if helper in self._all:
                self._idle.append(helper)
                self._change.notify_all()
            else:  # they have ended meanwhile
                helper.end()

    def end(self) -> None:
        with self._change:
            for helper in self._idle:
                helper.end()
            self._all, self._idle = [], []


# --- the helper itself ----------------------------------------------------------------------------


def serve() -> None:
    """Do one task after the other; whoever sent one may abandon it before it is done."""
    line = Connection(int(sys.argv[1]))
    jobs: queue.SimpleQueue[tuple[Question, Task, threading.Event]] = queue.SimpleQueue()
    models = dict[int, ModelShape]()

    def listen() -> None:
        question, abandoned = None, threading.Event()  # of the latest task
        try:
            while True:
                told = line.recv()
                if told == ABANDON:
                    abandoned.set()
                elif isinstance(told, Asked):
                    question = replace(told.question, shape=models.setdefault(told.number, told.question.shape))
                    while len(models) > MODELS:
                        del models[next(iter(models))]
                elif question is not None:
                    abandoned = threading.Event()
                    jobs.put((question, told, abandoned))
        finally:  # the server has ended, or cannot be understood
            os._exit(0)

    threading.Thread(target=listen, daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the server
    os.nice(BEHIND)
    gc.freeze()
    gc.set_threshold(20 * GARBAGE)  # for one that never rests
    line.send(READY)
    while True:
        try:
            job = jobs.get(timeout=REST_S)
        except queue.Empty:
            gc.collect(0)
            job = jobs.get()
        line.send(_find(*job))


def _find(question: Question, task: Task, abandoned: threading.Event) -> Found | None:
    """None: it was abandoned, or it failed; the server then tries it too, and will say why."""
    try:
        with only_while(lambda: not abandoned.is_set()):
            found = search_strategy(question, task)
    except Exception:
        return None
    if found.way is None:
        return found
    outline = replace(found.way.shape, blocks=(), pattern=(), before=(), after=())  # the server has the model
    return found._replace(way=replace(found.way, shape=outline))
