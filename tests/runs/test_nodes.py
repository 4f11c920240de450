"""Two nodes with two CPU ranks each, a desk for each node, and the real worker: one of them decides for both."""

from __future__ import annotations

import pytest
from faulty_training import Trained, same_course
from several_nodes import TwoNodes

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
