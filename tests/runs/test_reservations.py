"""What live runs hold is held, and what dead ones held is free."""

from __future__ import annotations

import json
import os
import random
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import warm_desk
from tightfit.runs.processes import is_alive, mark_of
from tightfit.runs.reservations import Reservation, Reservations, check_port, free_port
from tightfit.types import ConfigError


def entry(folder: Path, host_bytes: int = 5) -> Reservation:
    return Reservation.ours(folder, host_bytes, ("GPU-1",), 29500)


def test_a_live_run_is_seen_until_it_removes_itself(tmp_path: Path) -> None:
    registry, ours = Reservations(tmp_path / "new" / "place"), entry(tmp_path)
    assert registry.live() == ()
    with registry.alone():
        assert registry.add(ours)
    assert registry.live() == (ours,)
    registry.remove(ours)
    assert registry.live() == ()


def test_a_dead_run_holds_nothing_and_is_forgotten(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    registry = Reservations(tmp_path)
    theirs = replace(entry(tmp_path), pid=process.pid, mark=mark_of(process.pid))
    with registry.alone():
        registry.add(theirs)
    assert registry.live() == (theirs,)
    process.communicate()
    assert registry.live() == ()
    assert list(tmp_path.glob("*.json")) == []


def test_a_number_that_was_given_out_again_is_another_process(tmp_path: Path) -> None:
    registry = Reservations(tmp_path)
    with registry.alone():
        registry.add(replace(entry(tmp_path), mark="another boot:1"))
    assert registry.live() == ()


def test_entries_of_other_machines_and_other_files_are_left_alone(tmp_path: Path) -> None:
    registry = Reservations(tmp_path)
    with registry.alone():
        registry.add(replace(entry(tmp_path), host="elsewhere", pid=1))
    (tmp_path / "odd.json").write_text("{")
    (tmp_path / "other.json").write_text(json.dumps({"pid": 1}))
    assert registry.live() == ()
    assert len(list(tmp_path.glob("*.json"))) == 3


def test_a_cache_that_cannot_be_written_reserves_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    registry = Reservations(tmp_path / "file" / "below")
    with registry.alone():
        assert not registry.add(entry(tmp_path))
    assert registry.live() == ()


def test_the_words_name_folder_and_process(tmp_path: Path) -> None:
    assert str(entry(Path("/data/run")).words) == f"the run in /data/run (process {os.getpid()})"


@pytest.mark.thorough
def test_only_one_reserves_at_a_time(tmp_path: Path) -> None:
    code = (
        "import sys, time\n"
        "from pathlib import Path\n"
        "from tightfit.runs.reservations import Reservations\n"
        "with Reservations(Path(sys.argv[1])).alone():\n"
        "    count = Path(sys.argv[1], 'count')\n"
        "    before = int(count.read_text())\n"
        "    time.sleep(0.05)\n"
        "    count.write_text(str(before + 1))\n"
    )
    (tmp_path / "count").write_text("0")
    running = [warm_desk.Process(str(tmp_path), code=code) for _ in range(4)]
    assert [process.wait() for process in running] == [0] * 4
    for process in running:
        process.kill()
    assert (tmp_path / "count").read_text() == "4"


def test_a_process_is_alive_under_its_own_mark_only() -> None:
    pid = os.getpid()
    assert is_alive(pid, mark_of(pid))
    assert is_alive(pid, None)
    assert not is_alive(pid, "x:1")
    assert not is_alive(2**22 + 1, None)


def test_free_ports_can_be_bound_and_avoid_those_that_were_given_out() -> None:
    port = free_port()
    check_port(port)
    assert free_port([port]) != port


def test_no_outgoing_connection_can_take_a_free_port_or_the_next_one_before_it_is_used() -> None:
    """The system gives each of them one from its own range, which a desk of two nodes found its second port in."""
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    for _ in range(20):
        port = free_port()
        check_port(port + 1)
        assert port + 1 < first


@pytest.mark.parametrize("next_one", [False, True])
def test_a_port_that_is_listened_on_or_whose_next_one_is_is_not_free(
    next_one: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as taken:
        taken.bind(("", free_port()))
        taken.listen()
        port = taken.getsockname()[1]
        draws = iter([port - next_one, port + 1_000, port + 2_000, port + 3_000])
        monkeypatch.setattr(random.SystemRandom, "randrange", lambda *_: next(draws))
        assert free_port() in (port + 1_000, port + 2_000, port + 3_000)


@pytest.mark.parametrize("address", ["127.0.0.1", "0.0.0.0"])  # noqa: S104
def test_a_port_in_use_is_said(address: str) -> None:
    with socket.socket() as taken:
        taken.bind((address, 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"--port {port} is in use"):
            check_port(port)
