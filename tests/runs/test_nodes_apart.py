"""Two nodes with two CPU ranks each whose runs lie in folders of their own: each writes its part of a checkpoint."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from faulty_training import Trained, same_course
from several_nodes import TwoNodes

from tightfit.runs.checkpoints import newest_first
from tightfit.runs.reservations import free_port

pytestmark = pytest.mark.thorough


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    trained, code, said = TwoNodes(tmp_path_factory.mktemp("together"), free_port()).train()
    assert (trained.code, code, said) == (0, 0, ""), trained.err
    return trained


def names(run: Path) -> list[str]:
    return [folder.name for folder in newest_first(run)]


def test_a_rank_is_killed_and_each_node_has_its_part(
    tmp_path_factory: pytest.TempPathFactory, undisturbed: Trained
) -> None:
    nodes = TwoNodes(tmp_path_factory.mktemp("killed"), free_port(), apart=True)
    trained, code, said = nodes.train(faults="kill@rank=3,stage=forward,step=5")
    assert (trained.code, code, said) == (0, 0, ""), trained.err
    assert trained.actions == ["same plan"]
    assert trained.records[1].first_step in (2, 4)
    same_course(trained, undisturbed)
    assert names(nodes.runs[0]) == ["step-00000006.part-1-of-2", "step-00000004.part-1-of-2"]
    assert names(nodes.runs[1]) == ["step-00000006.part-2-of-2", "step-00000004.part-2-of-2"]
    assert not (nodes.runs[1] / "model").exists()
    assert trained.left_behind() == []
