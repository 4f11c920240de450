"""Two nodes with two CPU ranks each, a desk for each node, and the real worker: one of them decides for both."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from desks import wait_until
from faulty_training import Trained, same_course
from several_nodes import Link, TwoNodes, children, run_tool

from tightfit.runs.processes import is_alive
from tightfit.runs.records import read_attempts
from tightfit.runs.reservations import free_port

pytestmark = pytest.mark.thorough


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    trained, code, said = TwoNodes(tmp_path_factory.mktemp("undisturbed"), free_port()).train()
    assert (trained.code, code, said) == (0, 0, ""), trained.err
    assert [record.state for record in trained.records] == ["done"]
    return trained


def test_a_rank_of_the_second_node_is_killed(tmp_path_factory: pytest.TempPathFactory, undisturbed: Trained) -> None:
    nodes = TwoNodes(tmp_path_factory.mktemp("killed"), free_port())
    trained, code, said = nodes.train(faults="kill@rank=3,stage=forward,step=5")
    assert (trained.code, code, said) == (0, 0, ""), trained.err
    first, second = trained.records
    assert trained.actions == ["same plan"]
    assert first.cause is not None
    assert (first.cause.kind, first.cause.rank) in (("preempted", 3), ("host-oom", 3))  # where the kernel keeps silent
    assert (len(first.exit_codes), first.exit_codes[3]) == (4, -9)
    assert first.kept_step in (2, 4)
    assert (second.state, second.first_step) == ("done", first.kept_step)
    assert (trained.folder / "attempts/001/rank-3.log").is_file()
    assert (trained.folder / "logs/rank-3.log").is_file()
    assert not list(trained.folder.parent.glob("run-node1"))
    same_course(trained, undisturbed)
    assert trained.left_behind() == []


# --- a node that is lost and comes back -----------------------------------------------------------


def rank_step(run: Path, step: int) -> bool:
    """Whether the run has made this step."""
    try:
        return f'"step": {step},' in (run / "events.jsonl").read_text()
    except OSError:
        return False


def is_lost(trained: Trained, sentence: str) -> bool:
    cause = trained.records[0].cause
    return cause is not None and cause.kind == "communication" and sentence in str(cause.sentence)


@pytest.mark.slow
def test_the_desk_of_the_second_node_is_killed_and_started_again(
    tmp_path_factory: pytest.TempPathFactory, undisturbed: Trained
) -> None:
    nodes = TwoNodes(tmp_path_factory.mktemp("desk"), free_port())
    with nodes.desks(faults="hang@rank=1,stage=forward,step=4") as (first, second):
        nodes.wait_for_fault(2)
        second.send_signal(signal.SIGKILL)
        wait_until(lambda: read_attempts(nodes.run)[0].state == "failed")
        third = nodes.begin(1)
        try:
            trained, code, said = nodes.end(first, third)
        finally:
            third.kill()
    assert (trained.code, code, said) == (0, 0, ""), trained.err
    assert is_lost(trained, "has left: its tightfit train was ended, or the machine was")
    same_course(trained, undisturbed)
    assert trained.left_behind() == []


@pytest.mark.slow
def test_the_desk_of_the_first_node_is_killed_and_started_again(
    tmp_path_factory: pytest.TempPathFactory, undisturbed: Trained
) -> None:
    """The second one ends its ranks, waits, and follows whoever leads then."""
    nodes = TwoNodes(tmp_path_factory.mktemp("leader"), free_port())
    with nodes.desks(faults="hang@rank=1,stage=forward,step=4") as (first, second):  # the third has no faults
        nodes.wait_for_fault(2)
        ranks = [*children(first.pid), *children(second.pid)]
        assert len(ranks) == 4
        first.send_signal(signal.SIGKILL)
        wait_until(lambda: not any(is_alive(rank, None) for rank in ranks))
        third = nodes.begin(0)
        try:
            trained, code, said = nodes.end(third, second)
        finally:
            third.kill()
    assert (trained.code, code) == (0, 0), trained.err
    assert "is not to be heard any more: the ranks of this node were ended" in said
    assert [(record.state, record.first_step) for record in trained.records] == [("done", 2)]
    same_course(trained, undisturbed)


@pytest.mark.slow
def test_a_node_that_is_paused(tmp_path_factory: pytest.TempPathFactory, undisturbed: Trained) -> None:
    """Desk and ranks stand still together, as those of a virtual machine do; nobody closes a connection."""
    nodes = TwoNodes(tmp_path_factory.mktemp("paused"), free_port())
    with nodes.desks(faults="hang@rank=1,stage=forward,step=4") as (first, second):
        nodes.wait_for_fault(2)
        paused = [second.pid, *children(second.pid)]
        assert len(paused) == 3
        for pid in paused:
            os.kill(pid, signal.SIGSTOP)
        began = time.monotonic()
        wait_until(lambda: read_attempts(nodes.run)[0].state == "failed")
        found_s = time.monotonic() - began
        for pid in paused:
            os.kill(pid, signal.SIGCONT)
        trained, code, _ = nodes.end(first, second)
    assert found_s < 6.0 + 10.0 + 5.0 + 5.0  # silence, the end of ranks here, of those there, and something to spare
    assert (trained.code, code) == (0, 0), trained.err
    assert is_lost(trained, "gave no sign of life for 6 seconds")
    same_course(trained, undisturbed)
    assert trained.left_behind() == []


@pytest.mark.slow
def test_a_rank_of_the_second_node_that_hangs(tmp_path_factory: pytest.TempPathFactory, undisturbed: Trained) -> None:
    """Its heartbeat and its stacks come over the line."""
    nodes = TwoNodes(tmp_path_factory.mktemp("hangs"), free_port())
    trained, code, _ = nodes.train("--hang-timeout", "5s", faults="hang@rank=3,stage=forward,step=4")
    assert (trained.code, code) == (0, 0), trained.err
    cause = trained.records[0].cause
    assert cause is not None
    assert (cause.kind, cause.rank, cause.phase) == ("hang", 3, "forward")
    assert any("injected_faults.py" in line and "_hang" in line for line in cause.evidence)
    same_course(trained, undisturbed)


@pytest.mark.slow
def test_ctrl_c_at_the_second_node_stops_the_run_with_a_checkpoint(tmp_path: Path) -> None:
    nodes = TwoNodes(tmp_path, free_port())
    with nodes.desks("--max-steps", "500") as (first, second):
        wait_until(lambda: rank_step(nodes.run, 3))
        second.send_signal(signal.SIGINT)
        trained, code, _ = nodes.end(first, second)
    assert (trained.code, code) == (4, 4), trained.err
    assert "stopped" in trained.err
    assert trained.left_behind() == []


@pytest.mark.slow
def test_attempts_in_vain_are_counted_over_all_nodes(tmp_path: Path) -> None:
    nodes = TwoNodes(tmp_path, free_port())
    trained, code, said = nodes.train("--max-attempts", "1", faults="kill@rank=2,stage=forward,step=1")
    assert (trained.code, code) == (3, 3)
    assert trained.actions == ["stop"]
    assert "rank 2" in trained.err
    assert said == "tightfit: the run has ended on node 0 (127.0.0.1), which says why\n"


# --- two network namespaces -----------------------------------------------------------------------


@pytest.fixture
def link() -> Iterator[Link]:
    made = Link()
    try:
        made.make()
    except OSError as error:
        made.remove()
        pytest.skip(f"network namespaces cannot be made here: {error}")
    yield made
    made.remove()


@pytest.mark.slow
def test_a_training_across_two_namespaces(
    tmp_path_factory: pytest.TempPathFactory, undisturbed: Trained, link: Link
) -> None:
    folder = tmp_path_factory.mktemp("across")
    nodes = TwoNodes(folder, 29600, link.ADDRESSES[0], link.namespaces)
    trained, code, said = nodes.train()
    assert (trained.code, code, said) == (0, 0, ""), trained.err
    assert "4 ranks started by tightfit (cpu, 2 nodes)" in trained.out
    same_course(trained, undisturbed)
    assert trained.left_behind() == []


@pytest.mark.slow
def test_a_rank_is_killed_across_a_slow_link(
    tmp_path_factory: pytest.TempPathFactory, undisturbed: Trained, link: Link
) -> None:
    link.remove()
    link.make(rate="200mbit")
    nodes = TwoNodes(tmp_path_factory.mktemp("slow-link"), 29610, link.ADDRESSES[0], link.namespaces)
    trained, code, _ = nodes.train(faults="kill@rank=2,stage=backward,step=4")
    assert (trained.code, code) == (0, 0), trained.err
    cause = trained.records[0].cause
    assert cause is not None
    assert cause.rank == 2
    same_course(trained, undisturbed)


LAYOUTS: dict[str, tuple[str, ...]] = {
    "groups": ("--shard-within", "2"),
    "sequences": ("--engine", "zero2", "--sequence-parallel", "2"),
    "layers": ("--tensor-parallel", "2"),
    "pipeline": ("--pipeline-parallel", "2"),
}
"""Beside FSDP2 over all ranks; of each, what a node shares and what crosses the link."""


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_across_two_namespaces(
    tmp_path_factory: pytest.TempPathFactory, undisturbed: Trained, link: Link, layout: str
) -> None:
    """A rank is killed on the way. Sums in another order than those of one flat group differ by rounding."""
    nodes = TwoNodes(tmp_path_factory.mktemp(layout), 29640, link.ADDRESSES[0], link.namespaces)
    trained, code, _ = nodes.train(*LAYOUTS[layout], faults="kill@rank=3,stage=forward,step=5")
    assert (trained.code, code) == (0, 0), trained.err
    assert trained.actions == ["same plan"]
    assert sorted(trained.losses) == sorted(undisturbed.losses)
    assert trained.losses == pytest.approx(undisturbed.losses, rel=1e-5)
    assert trained.left_behind() == []


MIXTRAL = {"model_type": "mixtral", "vocab_size": 512, "hidden_size": 64, "intermediate_size": 96,
           "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 8,
           "num_experts_per_tok": 2, "max_position_embeddings": 512}  # fmt: skip


@pytest.mark.slow
def test_experts_across_two_namespaces(tmp_path_factory: pytest.TempPathFactory, link: Link) -> None:
    """Each node has some of every layer's experts, so that rows of tokens cross the link."""
    folder = tmp_path_factory.mktemp("experts")
    model = folder / "config.json"
    model.write_text(json.dumps(MIXTRAL))
    words = ("--model", str(model))
    whole, code, _ = TwoNodes(tmp_path_factory.mktemp("whole"), free_port()).train(*words)
    assert (whole.code, code) == (0, 0), whole.err
    nodes = TwoNodes(folder, 29650, link.ADDRESSES[0], link.namespaces)
    faults = "kill@rank=3,stage=forward,step=5"
    trained, code, _ = nodes.train(*words, "--expert-parallel", "4", faults=faults)
    assert (trained.code, code) == (0, 0), trained.err
    assert trained.actions == ["same plan"]
    assert trained.losses == pytest.approx(whole.losses, rel=1e-5)
    assert trained.left_behind() == []


@pytest.mark.slow
def test_a_link_that_is_down_for_a_while(
    tmp_path_factory: pytest.TempPathFactory, undisturbed: Trained, link: Link
) -> None:
    nodes = TwoNodes(tmp_path_factory.mktemp("down"), 29620, link.ADDRESSES[0], link.namespaces)
    with nodes.desks(faults="hang@rank=1,stage=forward,step=4") as (first, second):
        nodes.wait_for_fault(2)
        link.set("down")
        began = time.monotonic()
        wait_until(lambda: read_attempts(nodes.run)[0].state == "failed")
        found_s = time.monotonic() - began
        link.set("up")
        trained, code, _ = nodes.end(first, second)
    assert found_s < 6.0 + 10.0 + 5.0 + 5.0
    assert (trained.code, code) == (0, 0), trained.err
    assert is_lost(trained, "gave no sign of life for 6 seconds")
    same_course(trained, undisturbed)
    assert trained.left_behind() == []


@pytest.mark.slow
def test_a_link_that_is_down_from_the_beginning(tmp_path: Path, link: Link) -> None:
    link.set("down")
    nodes = TwoNodes(tmp_path, 29630, link.ADDRESSES[0], link.namespaces, patience=(0.5, 6.0, 5.0, 5.0, 3.0))
    trained, code, said = nodes.train()
    assert (trained.code, code) == (2, 2)
    assert trained.err.startswith("tightfit: node 1 did not arrive at 10.213.7.1, port 29631, within 5 seconds")
    assert said.startswith("tightfit: node 0 did not answer at 10.213.7.1, port 29631, for 5 seconds")
    assert trained.err.count("\n") == said.count("\n") == 1


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("nft") is None, reason="needs nftables")
@pytest.mark.parametrize(
    ("node", "eaten", "sentence"),
    [
        (0, "tcp dport 29640", "does not reach port 29640 of 10.213.7.1, at which the ranks meet (timed out)"),
        (1, "tcp dport 1024-65535 tcp flags & (syn | ack) == syn", "does not reach"),
    ],
)
def test_a_firewall_that_eats_ports(tmp_path: Path, link: Link, node: int, eaten: str, sentence: str) -> None:
    hook = "add table inet f; add chain inet f i { type filter hook input priority 0; }"
    run_tool("ip", "netns", "exec", link.namespaces[node], "nft", f"{hook}; add rule inet f i {eaten} drop")
    nodes = TwoNodes(tmp_path, 29640, link.ADDRESSES[0], link.namespaces)
    trained, code, _ = nodes.train()
    assert (trained.code, code) == (2, 2)
    assert sentence in trained.err
    assert "(timed out)" in trained.err
    assert trained.err.count("\n") == 1
