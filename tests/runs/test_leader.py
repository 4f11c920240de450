"""What node 0 says to nodes that are not as they should be: a meeting of one leader and nodes that a test plays."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from desks import wait_until

from tightfit.messages import Said
from tightfit.runs import follower, wire
from tightfit.runs.follower import FollowingDesk, Node, Work
from tightfit.runs.leader import Leader
from tightfit.runs.processes import this_host
from tightfit.runs.rank_memory import Rank
from tightfit.runs.records import WorkerFile
from tightfit.runs.reservations import free_port
from tightfit.runs.run import Signals
from tightfit.runs.watching import RankEye
from tightfit.runs.wire import Arrived, Connection, Facts
from tightfit.types import ConfigError

LOCAL = "127.0.0.1"
HERE = Facts(
    host="alpha",
    versions={"Python": "3.11.7", "tightfit": "0.1", "torch": "2.5.1", "deepspeed": "0.16.0", "transformers": "4.50.0"},
    gpus=("A100", "A100"),
    gpu_bytes=80 << 30,
    ram_bytes=512 << 30,
    free_ram_bytes=500 << 30,
)
THERE = replace(HERE, host="beta")
WORKER = WorkerFile(
    model="tiny",
    method="full",
    engine="fsdp2",
    optimizer="adamw",
    offload_optimizer="none",
    nodes=2,
    gpus_per_node=2,
    vendor="nvidia",
    folder="run",
    required_bytes=1 << 30,
    peak_bytes=1 << 30,
    host_bytes_per_node=64 << 30,
    step_s=None,
    tokens_per_s=None,
)


class Meeting:
    def __init__(self, run: Path) -> None:
        self.run, self.port, self.said = run, free_port(), list[Said]()
        self.leader = Leader(2, LOCAL, self.port)
        self.leader.open(run)
        self.record = wire.find_record(run / wire.MEETING, wire.MeetingRecord)
        self.lines: list[Connection] = []

    def arrive(self, facts: Facts = THERE, desk: str = "one", token: str | None = None, **more: Any) -> Connection:
        """A node that says what it is, and proves it."""
        line = Connection(socket.create_connection((LOCAL, wire.desk_port(self.port))))
        self.lines.append(line)
        said = {"node": 1, "nodes": 2, "pid": 4711, "clock": time.time(), "nonce": "n", **more}
        line.send(Arrived(desk=desk, facts=facts, **said))
        challenge = self.hear(line, wire.Challenge, wire.NodeRefused)
        if isinstance(challenge, wire.Challenge):
            assert self.record is not None
            record = self.record if token is None else wire.MeetingRecord(token=token)
            line.send(wire.NodeProof(proof=record.prove(challenge.nonce, "n", desk)))
        return line

    def hear(self, line: Connection, *kinds: type[wire.Line]) -> Any:
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            said = line.receive(0.1)
            if isinstance(said, kinds):
                return said
        raise AssertionError("nothing came")

    def answer(self, line: Connection, why: str = "") -> None:
        """Keep alive, and say whether the ranks' port is reached."""
        line.keep_alive()

        def work() -> None:
            while not line.is_closed:
                try:
                    if isinstance(said := line.receive(0.1), wire.TryPort):
                        line.send(wire.PortTried(port=said.port, why=why))
                except wire.ConnectionLost:
                    return

        threading.Thread(target=work, daemon=True).start()

    def assemble(self, *, first: bool = True) -> bool:
        return self.leader.assemble(WORKER, HERE, first=first, say=self.said.append, give_up=lambda: False)

    def close(self) -> None:
        for line in self.lines:
            line.close()
        self.leader.close(3)


@pytest.fixture
def meeting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Meeting]:
    monkeypatch.setattr(wire, "BEAT_S", 0.1)
    made = Meeting(tmp_path)
    yield made
    made.close()


def test_nodes_that_are_alike_meet(meeting: Meeting) -> None:
    meeting.answer(meeting.arrive())
    assert meeting.assemble()
    assert meeting.said == []
    assert (meeting.run / wire.MEETING).stat().st_mode & 0o777 == 0o600
    meeting.close()
    assert not (meeting.run / wire.MEETING).exists()


@pytest.mark.parametrize(
    ("facts", "sentence"),
    [
        (
            replace(THERE, versions={**HERE.versions, "torch": "2.4.0"}),
            "node 0 (alpha) has torch 2.5.1 and node 1 (beta) has torch 2.4.0: install the same on all nodes",
        ),
        (
            replace(THERE, versions={**HERE.versions, "deepspeed": ""}),
            "node 0 (alpha) has deepspeed 0.16.0 and node 1 (beta) has no deepspeed",
        ),
        (replace(THERE, versions={**HERE.versions, "Python": "3.12.1"}), "node 1 (beta) has Python 3.12.1"),
        (replace(THERE, gpus=("A100",)), "node 0 (alpha) has 2 × A100 and node 1 (beta) has 1 × A100"),
        (replace(THERE, gpus=("L4", "L4")), "node 0 (alpha) has 2 × A100 and node 1 (beta) has 2 × L4"),
        (replace(THERE, gpus=()), "node 0 (alpha) has 2 × A100 and node 1 (beta) has no GPU"),
        (replace(THERE, ram_bytes=32 << 30), "node 1 (beta) has 32.0 GiB of RAM and the plan needs 64.0 GiB"),
    ],
)
def test_nodes_that_differ_are_named(meeting: Meeting, facts: Facts, sentence: str) -> None:
    meeting.answer(meeting.arrive(facts))
    with pytest.raises(ConfigError) as raised:
        meeting.assemble()
    assert sentence in str(raised.value)


def test_a_patch_of_python_makes_no_difference(meeting: Meeting) -> None:
    meeting.answer(meeting.arrive(replace(THERE, versions={**HERE.versions, "Python": "3.11.2"})))
    assert meeting.assemble()


@pytest.mark.parametrize(("seconds", "way"), [(45.0, "ahead of"), (-45.0, "behind")])
def test_clocks_that_are_apart_are_worth_a_warning(meeting: Meeting, seconds: float, way: str) -> None:
    meeting.answer(meeting.arrive(clock=time.time() + seconds))
    assert meeting.assemble()
    assert [str(said) for said in meeting.said] == [
        f"the clock of node 1 (beta) is 45 seconds {way} node 0's: times in logs cannot be compared"
    ]


def test_a_port_that_a_firewall_eats(meeting: Meeting) -> None:
    meeting.answer(meeting.arrive(), why="timed out")
    with pytest.raises(ConfigError, match=rf"node 1 \(beta\) does not reach port {meeting.port} of 127.0.0.1"):
        meeting.assemble()


def test_a_node_that_never_comes(meeting: Meeting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "MEETING_S", 0.5)
    with pytest.raises(ConfigError, match="node 1 did not arrive at"):
        meeting.assemble()


def test_a_second_process_with_the_same_rank(meeting: Meeting, monkeypatch: pytest.MonkeyPatch) -> None:
    """Is sent away while the first one lives, and takes its place when that has gone."""
    first = meeting.arrive(desk="one")
    meeting.answer(first)
    assert meeting.assemble()
    second = meeting.arrive(replace(THERE, host="gamma"), desk="two", pid=4712)
    refused = meeting.hear(second, wire.NodeRefused)
    assert str(refused.said).startswith("node 1 of this run is there already (process 4711 on beta) and lives")
    assert [str(said) for said in meeting.leader.take_said()] == [
        "process 4712 on gamma claimed to be node 1 (beta) too, and was sent away"
    ]
    first.close()
    until = time.monotonic() + 20
    while True:  # that it has gone takes a moment to be seen
        third = meeting.arrive(replace(THERE, host="gamma"), desk="three")
        if isinstance(meeting.hear(third, wire.Welcome, wire.NodeRefused), wire.Welcome):
            break
        assert time.monotonic() < until
    meeting.answer(third)
    assert meeting.assemble(first=False)


def test_a_silent_process_is_replaced(meeting: Meeting, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one that is paused, or behind a dead link, whose connection nobody has closed."""
    monkeypatch.setattr(wire, "SILENT_S", 0.5)
    meeting.arrive(desk="one")
    time.sleep(1.0)
    second = meeting.arrive(desk="two")
    assert isinstance(meeting.hear(second, wire.Welcome, wire.NodeRefused), wire.Welcome)


def test_one_that_does_not_know_the_token(meeting: Meeting) -> None:
    line = meeting.arrive(token="guessed")
    assert "does not take this node for one of its run" in str(meeting.hear(line, wire.NodeRefused).said)


@pytest.mark.parametrize("said", [{"node": 2}, {"node": 0}, {"nodes": 3}])
def test_a_node_of_another_number(meeting: Meeting, said: dict[str, int]) -> None:
    line = Connection(socket.create_connection((LOCAL, wire.desk_port(meeting.port))))
    meeting.lines.append(line)
    asked = {"node": 1, "nodes": 2, **said}
    line.send(Arrived(desk="x", pid=1, facts=THERE, clock=time.time(), nonce="n", **asked))
    assert "start the same command on every node" in str(meeting.hear(line, wire.NodeRefused).said)


@pytest.mark.parametrize(
    "line", [b"GET / HTTP/1.1\r\n\r\n", b"\xff\xfe\n", b"[1]\n", b'{"say": "Start"}\n', b"x" * 70_000]
)
def test_what_is_no_node_is_passed_over(meeting: Meeting, line: bytes) -> None:
    with socket.create_connection((LOCAL, wire.desk_port(meeting.port))) as stranger:
        stranger.sendall(line)
        meeting.answer(meeting.arrive())
        assert meeting.assemble()


def test_a_leader_without_its_address_or_port() -> None:
    with pytest.raises(ConfigError, match=r"192\.0\.2\.1 is not an address of this machine, which is node 0"):
        Leader(2, "192.0.2.1", free_port())
    port = free_port()
    leader = Leader(2, LOCAL, port)
    with pytest.raises(ConfigError, match=f"port {port + 1}, at which the nodes of this run meet, is in use"):
        Leader(2, LOCAL, port)
    leader.close(3)


# --- from the other side --------------------------------------------------------------------------


def follow(port: int, address: str = LOCAL) -> FollowingDesk:
    def begin(folder: Path, order: wire.Start, interface: str | None) -> Work:
        raise AssertionError

    node = Node(rank=1, count=2, address=address, port=port)
    return FollowingDesk(node=node, look=lambda: THERE, begin=begin, signals=Signals(), say=lambda _: None)


def test_a_master_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "MEETING_S", 0.3)
    monkeypatch.setattr(follower, "PAUSE_S", 0.1)
    port = free_port()
    with pytest.raises(ConfigError) as raised:
        follow(port).follow()
    assert str(raised.value).startswith(f"node 0 did not answer at 127.0.0.1, port {port + 1}, for 0 seconds")
    assert "connection refused" in str(raised.value)


def test_a_master_that_does_not_exist() -> None:
    with pytest.raises(
        ConfigError, match=r"--master-addr no\.such\.machine\.invalid is no machine that this one knows"
    ):
        follow(free_port(), "no.such.machine.invalid").follow()


def test_a_node_that_does_not_see_the_folder(meeting: Meeting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "SHARED_S", 0.3)
    monkeypatch.setattr(follower.wire, "find_meeting", lambda *_: None)
    with pytest.raises(
        ConfigError, match=r"put --output on a disk that all nodes share, or, .*copy node 0's key to /dev"
    ):
        follow(meeting.port).follow()
    with pytest.raises(ConfigError, match=r"node 1 \(beta\) sees neither .* nor node 0's key"):
        meeting.assemble()


def test_keys_that_are_made_at_once_are_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody has one yet when all of them look."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    ready, made = threading.Barrier(8), []
    write = wire.write_meeting

    def write_together(path: Path) -> wire.MeetingRecord:
        ready.wait(30)
        return write(path)

    monkeypatch.setattr(wire, "write_meeting", write_together)
    threads = [threading.Thread(target=lambda: made.append(wire.make_key())) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(made) == 8
    assert None not in made
    assert len(set(made)) == 1
    assert [path.name for path in wire.key_path().parent.iterdir()] == [wire.KEY]


def test_a_damaged_key_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    wire.key_path().parent.mkdir(parents=True)
    wire.key_path().write_text("{")
    assert wire.make_key() == wire.make_key() is not None


def test_a_node_that_has_the_key_needs_not_see_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "BEAT_S", 0.1)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setattr(follower.wire, "find_meeting", lambda *_: None)
    (tmp_path / "run").mkdir()
    meeting = Meeting(tmp_path / "run")
    try:
        assert wire.key_path().stat().st_mode & 0o777 == 0o600
        desk = follow(meeting.port)
        connection, led = desk._arrive(5.0)
        assert (led.folder, led.is_seen) == (tmp_path / "run", False)
        meeting.answer(connection)
        assert meeting.assemble()
        wire.write_meeting(wire.key_path())  # somebody else's
        with pytest.raises(ConfigError, match="nor node 0's key is to be seen here"):
            follow(meeting.port).follow()
    finally:
        meeting.close()


def test_a_leader_that_does_not_know_the_token(tmp_path: Path) -> None:
    """Somebody listens there who is not the leader of this run."""
    wire.write_meeting(tmp_path / wire.MEETING)
    record = wire.find_record(tmp_path / wire.MEETING, wire.MeetingRecord)
    assert record is not None
    port = free_port()
    with socket.create_server((LOCAL, wire.desk_port(port))) as door:

        def answer() -> None:
            line = Connection(door.accept()[0])
            line.receive(5)
            line.send(wire.Challenge(folder=str(tmp_path), mark=record.mark, key_mark="", nonce="m"))
            line.receive(5)
            line.send(wire.Welcome(proof="made up", silent_s=20.0))
            time.sleep(0.5)
            line.close()

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(ConfigError, match="is not node 0 of this run"):
            follow(port).follow()
        thread.join()


@pytest.mark.parametrize(
    "said",
    [
        Arrived(node=1, nodes=2, desk="d", pid=1, facts=HERE, clock=1.5, nonce="n"),
        wire.Start(attempt=2, files={"worker.json": "{}"}, options=("--resume", "auto"), port=29500),
        wire.RankEnded(attempt=1, rank=3, code=-9, words="{}", kernel=("oom",), kernel_readable=True),
        wire.AllEnded(attempt=1, codes={"2": 0}),
        wire.Save(),
    ],
)
def test_a_line_is_read_as_it_was_written(said: wire.Line) -> None:
    assert wire.read_line(wire.write_line(said)) == said


def test_what_ranks_of_other_nodes_hold_is_shown(meeting: Meeting) -> None:
    """And what happens is told to a node that has a folder of its own."""
    line = meeting.arrive()
    meeting.hear(line, wire.Welcome)
    there = Rank(name="rank-2", pid=4711, now_bytes=5, peak_bytes=7, host="beta")
    line.send(wire.RanksStarted(attempt=0, pids=(4711,), is_apart=True))
    line.send(wire.Alive(ranks=(there,)))
    wait_until(lambda: (seat := meeting.leader.seat_of(1)) is not None and seat.ranks and seat.is_apart)
    (meeting.run / "events.jsonl").write_text('{"event": "step", "step": 1}\n{"event": "st')
    here = Rank(name="rank-0", pid=1, now_bytes=3, peak_bytes=4, host=this_host())
    meeting.leader.show_ranks([here])
    assert RankEye(meeting.run).look() == (replace(here, host=None), there)
    assert meeting.hear(line, wire.EventsTold).text == '{"event": "step", "step": 1}\n'
    os.utime(meeting.run / "ranks.json", (0, 0))
    assert RankEye(meeting.run).look() == ()  # nobody keeps it up to date
    meeting.close()
    assert not (meeting.run / "ranks.json").exists()
