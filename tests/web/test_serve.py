"""`tightfit ui` as a process: how it starts, streams, refuses and ends."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from ui_load import READERS, credentials, drain, reader, spent_s

import patience
import warm_desk

sys.path.insert(0, str(Path(__file__).parent))

from visits import served, step_line, written

pytestmark = pytest.mark.thorough

UI = [sys.executable, "-W", "error", "-m", "tightfit", "ui", "--no-open"]


def refused(*words: str, cwd: Path) -> str:
    done = warm_desk.run("ui", "--no-open", *words, cwd=cwd)
    assert done.returncode == 2, done.stdout + done.stderr
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("tightfit: ")
    return done.stderr


class Visitor:
    """A connection of its own, with the token of the link."""

    def __init__(self, link: str) -> None:
        self.place = urlsplit(link)
        assert self.place.hostname
        assert self.place.port
        self.headers = credentials(link)

    def connection(self) -> http.client.HTTPConnection:
        assert self.place.hostname
        return http.client.HTTPConnection(self.place.hostname, self.place.port, timeout=120)

    def get(self, path: str) -> tuple[int, str]:
        made = self.connection()
        try:
            made.request("GET", path, headers=self.headers)
            answer = made.getresponse()
            return answer.status, answer.read().decode()
        finally:
            made.close()

    @contextmanager
    def stream(self, run: str, last: str = "") -> Iterator[Iterator[tuple[str, dict[str, Any]]]]:
        made = self.connection()
        try:
            headers = {**self.headers, **({"Last-Event-ID": last} if last else {})}
            made.request("GET", f"/runs/stream?run={run}", headers=headers)
            answer = made.getresponse()
            assert answer.status == 200
            assert answer.headers["content-type"].startswith("text/event-stream")
            yield messages(answer)
        finally:
            made.close()


def messages(answer: http.client.HTTPResponse) -> Iterator[tuple[str, dict[str, Any]]]:
    name = ""
    while line := answer.readline():
        if line.startswith(b"id: "):
            name = line[4:].strip().decode()
        elif line.startswith(b"data: "):
            yield name, json.loads(line[6:])


def test_what_is_wrong_with_the_flags(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert "no such folder" in refused("--root", "nowhere", cwd=tmp_path)
    assert "is a file" in refused("--root", "file", cwd=tmp_path)
    for port in ("0", "70000", "http", "-1", "8e3"):
        assert "--port" in refused(f"--port={port}", cwd=tmp_path)
    assert "is no address of this machine" in refused("--host", "no.such.host.invalid", cwd=tmp_path)
    assert "did you mean --port" in refused("--ports", "1", cwd=tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        said = refused("--port", str(taken.getsockname()[1]), cwd=tmp_path)
        assert "name another --port" in said


def test_without_the_extra_one_sentence_names_it(tmp_path: Path) -> None:
    script = (
        "import sys\nfrom importlib.machinery import PathFinder\n"
        "import importlib.util as u\nreal = u.find_spec\n"
        "from tightfit.inputs import surroundings\n"
        "surroundings.find_spec = lambda name: None if name == 'starlette' else real(name)\n"
        "from tightfit.cli import main\nsys.exit(main(['ui', '--no-open']))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr == "tightfit: tightfit ui needs the packages of the page: pip install 'tightfit[web]'\n"


def test_another_host_gets_a_warning_and_a_link_that_works_from_elsewhere(tmp_path: Path) -> None:
    with subprocess.Popen(
        [*UI, "--host", "0.0.0.0"],  # noqa: S104
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    ) as process:  # fmt: skip
        try:
            assert process.stdout is not None
            links = [re.search(r"http://\S+", process.stdout.readline()) for _ in range(2)]
            assert all(links)
            elsewhere, here = (Visitor(found[0]) for found in links if found)
            assert here.place.hostname == "127.0.0.1"
            assert elsewhere.place.hostname not in ("127.0.0.1", "0.0.0.0", None)  # noqa: S104
            assert [visitor.get("/runs")[0] for visitor in (elsewhere, here)] == [200, 200]
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate(timeout=10)
        finally:
            process.kill()
    assert process.returncode == 0
    assert "warning: with --host 0.0.0.0 other machines can reach the page" in errors


def test_two_can_run_at_once_and_only_this_machine_is_listened_to(tmp_path: Path) -> None:
    with served(cwd=tmp_path) as one, served(cwd=tmp_path) as other:
        assert urlsplit(one).port != urlsplit(other).port
        assert urlsplit(one).hostname == "127.0.0.1"
        assert Visitor(one).get("/runs")[0] == 200
        swapped = Visitor(one)
        swapped.headers = Visitor(other).headers
        assert swapped.get("/runs")[0] == 403


def test_a_run_is_streamed_as_it_grows(tmp_path: Path) -> None:
    run = written(tmp_path / "run", [step_line(n, loss=float(n)) for n in range(1, 4)], ended=None, state="running")
    with served(cwd=tmp_path) as link:
        visitor = Visitor(link)
        with visitor.stream("0/run") as told:
            _, first = next(told)
            assert first["head"]["state"] == "elsewhere"
            assert (first["head"]["step"], first["head"]["steps"], first["head"]["loss"]) == (3, 100, 3.0)
            assert [row[:2] for row in first["series"]["rows"]] == [[1, 1.0], [2, 2.0], [3, 3.0]]
            with (run / "events.jsonl").open("a") as file:
                file.write(
                    json.dumps(step_line(4, loss=4.0)) + "\n" + json.dumps({"event": "warning", "text": "oh"}) + "\n"
                )
                file.write('{"event": "step", "st')  # torn: not yet
            name, second = next(told)
            while "series" not in second:
                name, second = next(told)
            assert second["series"]["start"] == 3
            assert [row[:2] for row in second["series"]["rows"]] == [[4, 4.0]]
            assert second["events"][-1]["text"] == "! oh"
            assert "checkpoints" not in second  # only what has changed
        with (run / "events.jsonl").open("a") as file:
            file.write('ep": 5, "loss": 5.0}\n')
        with visitor.stream("0/run", last=name) as told:  # a browser that comes back gets what it missed
            while "series" not in (missed := next(told)[1]):
                pass
            assert missed["series"]["start"] == 4
            assert [row[:2] for row in missed["series"]["rows"]] == [[5, 5.0]]
        with visitor.stream("0/run", last="stale-99") as told:
            assert len(next(told)[1]["series"]["rows"]) == 5


def test_ctrl_c_ends_it_at_once_with_streams_open(tmp_path: Path) -> None:
    written(tmp_path / "run", [step_line(1)], ended=None, state="running")
    with subprocess.Popen([*UI], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path) as process:
        try:
            assert process.stdout is not None
            link = re.search(r"http://\S+", process.stdout.readline())
            assert link
            visitor = Visitor(link[0])
            with visitor.stream("0/run") as one, visitor.stream("0/run") as other:
                next(one)
                next(other)
                began = patience.now()
                process.send_signal(signal.SIGINT)
                _, errors = process.communicate(timeout=10)
                assert patience.now() - began < 2
                assert list(one) == []  # ended, not cut off
            assert process.returncode == 0
            assert errors == ""
        finally:
            process.kill()


def test_a_long_paste_is_refused_without_being_read(tmp_path: Path) -> None:
    with served(cwd=tmp_path) as link:
        visitor = Visitor(link)
        assert visitor.place.hostname
        head = (
            f"POST /diagnose/answer HTTP/1.1\r\nHost: 127.0.0.1:{visitor.place.port}\r\n"
            f"Authorization: {visitor.headers['Authorization']}\r\n"
        ).encode()
        with socket.create_connection((visitor.place.hostname, visitor.place.port or 0), timeout=120) as made:
            made.sendall(head + b"Content-Length: 2147483648\r\n\r\n")
            assert b" 413 " in made.recv(4096)
        with socket.create_connection((visitor.place.hostname, visitor.place.port or 0), timeout=120) as made:
            made.sendall(head + b"Transfer-Encoding: chunked\r\n\r\n")
            chunk, sent = b"100000\r\n" + b"x" * 2**20 + b"\r\n", 0
            try:
                while sent < 2048:
                    made.sendall(chunk)
                    sent += 1
            except OSError:
                pass
            assert sent < 200  # MiB: it was cut off
        assert visitor.get("/runs")[0] == 200


@pytest.mark.thorough
def test_many_readers_come_and_go_and_nothing_stays(tmp_path: Path) -> None:
    run = written(tmp_path / "run", [step_line(n) for n in range(1, 500)], ended=None, state="running")
    with served(cwd=tmp_path) as link:
        visitor = Visitor(link)
        assert visitor.get("/runs/view?run=0/run")[0] == 200

        for number in range(2):
            ready = threading.Barrier(13, timeout=120)
            seen: list[int] = []

            def visit(ready: threading.Barrier = ready, seen: list[int] = seen) -> None:
                with visitor.stream("0/run") as told:
                    next(told)
                    ready.wait()
                    seen += [told_next["series"]["rows"][-1][0] for told_next in (next(told)[1],)]

            threads = [threading.Thread(target=visit) for _ in range(12)]
            for thread in threads:
                thread.start()
            ready.wait()
            with (run / "events.jsonl").open("a") as file:
                file.write(json.dumps(step_line(1000 + number)) + "\n")
            for thread in threads:
                thread.join(20)
            assert seen == [1000 + number] * 12
        assert visitor.get("/runs")[0] == 200


@pytest.mark.slow
@pytest.mark.thorough
def test_ten_readers_of_a_run_cost_less_than_a_fiftieth_of_a_core(tmp_path: Path) -> None:
    """A training whose cores are all busy loses what the page takes, and no more than that: processor time says how
    much on a machine that others use too, where times of steps do not."""
    run = written(tmp_path / "first", [step_line(n) for n in range(1, 500)], ended=None, state="running")
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(UI, stdout=subprocess.PIPE, text=True, cwd=tmp_path, env=env) as page:
        try:
            assert page.stdout is not None
            link = re.search(r"http://\S+", page.stdout.readline())
            assert link
            readers = [reader(link[0]) for _ in range(READERS)]
            got: list[int] = []
            threads = [threading.Thread(target=lambda each=each: got.append(drain(each))) for each in readers]
            for thread in threads:
                thread.start()
            before, end = -1.0, patience.now() + 60
            while (spent := spent_s(page.pid)) - before >= 0.04:  # until they have what was there before they came
                assert patience.now() < end
                before = spent
                time.sleep(2)
            began, step = time.monotonic(), 500
            with (run / "events.jsonl").open("a") as file:
                while (lasted := time.monotonic() - began) < 15:
                    file.write(json.dumps(step_line(step)) + "\n")
                    file.flush()
                    step += 1
                    time.sleep(0.2)
            share = (spent_s(page.pid) - before) / lasted
            for each in readers:
                each.shutdown(socket.SHUT_RDWR)
                each.close()
            for thread in threads:
                thread.join(20)
        finally:
            page.kill()
    assert len(got) == READERS
    assert min(got) > 50 * (step - 500), "each was told of every step"
    assert share < 0.02, f"{share:.1%} of a core"


def test_ctrl_c_waits_for_nobody_who_sends_slowly(tmp_path: Path) -> None:
    with served(cwd=tmp_path) as link:  # which checks how it ends
        visitor = Visitor(link)
        made = visitor.connection()
        made.putrequest("POST", "/diagnose/answer")
        made.putheader("Authorization", visitor.headers["Authorization"])
        made.putheader("Content-Length", "100")
        made.endheaders(b"only a few")
        time.sleep(0.3)
        began = patience.now()
    assert patience.now() - began < 2
    made.close()
