"""Two nodes with two CPU ranks each whose runs lie in folders of their own: each writes its part of a checkpoint."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
from desks import wait_until
from faulty_training import Trained, may_mount, same_course, small_disk
from several_nodes import TwoNodes

from tightfit.cli.checkpoints import checkpoints
from tightfit.cli.watch import watch
from tightfit.runs.checkpoints import RANGES, newest_first
from tightfit.runs.processes import this_host
from tightfit.runs.reservations import free_port
from tightfit.runs.watching import RankEye
from tightfit.web.sight import RunSight

pytestmark = pytest.mark.thorough
NEWEST, OLDER = "step-00000004.part-{}-of-2", "step-00000002.part-{}-of-2"


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """All in one folder."""
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
    for number, run in enumerate(nodes.runs, start=1):
        assert names(run) == [f"step-0000000{step}.part-{number}-of-2" for step in (6, 4)]
        assert json.loads((run / "run.json").read_text())["state"] == "done"
    assert not (nodes.runs[1] / "model").exists()
    assert trained.left_behind() == Trained(nodes.runs[1], 0, "", "").left_behind() == []


# --- what lies on the disks of a run that ended after step 4 --------------------------------------


@pytest.fixture(scope="module")
def broken_off(tmp_path_factory: pytest.TempPathFactory) -> Path:
    nodes = TwoNodes(tmp_path_factory.mktemp("broken-off"), free_port(), apart=True)
    trained, code, _ = nodes.train("--max-attempts", "1", "--no-async-save", faults="kill@rank=3,stage=forward,step=5")
    assert (trained.code, code) == (3, 3), trained.err
    assert [names(run) for run in nodes.runs] == [[NEWEST.format(n), OLDER.format(n)] for n in (1, 2)]
    return nodes.folder


@pytest.fixture
def nodes(broken_off: Path, tmp_path: Path) -> TwoNodes:
    """The same run on other disks."""
    for name in ("run", "other"):
        shutil.copytree(broken_off / name / "checkpoints", tmp_path / name / "checkpoints")
    return TwoNodes(tmp_path, free_port(), apart=True)


def check_end(trained: Trained, undisturbed: Trained, first_step: int) -> None:
    assert trained.code == 0, trained.err
    assert trained.records[0].first_step == first_step
    rest = {step: loss for step, loss in undisturbed.losses.items() if step > first_step}
    assert trained.losses == rest
    assert trained.model == undisturbed.model


def passed_over(trained: Trained) -> list[str]:
    return [json.dumps(event["text"]) for event in trained.events if event["event"] == "passed_over"]


@pytest.mark.slow
def test_nodes_in_another_order(nodes: TwoNodes, undisturbed: Trained) -> None:
    nodes.runs = nodes.runs[::-1]
    trained, code, _ = nodes.train()
    assert code == 0
    check_end(trained, undisturbed, 4)
    assert names(nodes.runs[1]) == ["step-00000006.part-2-of-2", NEWEST.format(1)]


@pytest.mark.slow
def test_a_part_is_missing_and_an_older_checkpoint_is_taken(nodes: TwoNodes, undisturbed: Trained) -> None:
    shutil.rmtree(nodes.runs[1] / "checkpoints" / NEWEST.format(2))
    trained, _, _ = nodes.train()
    check_end(trained, undisturbed, 2)
    assert f"of the checkpoint of step 4, part 2, which {this_host()} wrote, is missing" in trained.out


@pytest.mark.slow
def test_a_damaged_part_and_an_older_checkpoint_is_taken(nodes: TwoNodes, undisturbed: Trained) -> None:
    path = nodes.runs[1] / "checkpoints" / NEWEST.format(2) / RANGES / "rank-2.bin"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    trained, _, _ = nodes.train()
    check_end(trained, undisturbed, 2)
    assert "rank-2.bin is damaged" in trained.out


@pytest.mark.slow
def test_all_parts_of_a_node_are_missing(nodes: TwoNodes) -> None:
    shutil.rmtree(nodes.runs[1])
    trained, code, _ = nodes.train()
    assert (trained.code, code) == (2, 2)
    assert f"the checkpoint of step 4 lacks part 2, which {this_host()} wrote: start the machine that" in trained.err
    assert trained.err.count("\n") == 1
    assert names(nodes.runs[0]) == [NEWEST.format(1), OLDER.format(1)]


@pytest.mark.slow
def test_parts_that_are_laid_together(
    nodes: TwoNodes, undisturbed: Trained, capsys: pytest.CaptureFixture[str]
) -> None:
    """They are shown, put together and resumed, as they are and as a whole."""
    run, other = nodes.runs

    def look() -> list[dict[str, Any]]:
        assert checkpoints([str(run), "--json"]) == 0
        found: list[dict[str, Any]] = json.loads(capsys.readouterr().out)["checkpoints"]
        return found

    assert [(one["step"], one["complete"], one["part"]["lacking"]) for one in look()] == [
        (4, True, [2]),
        (2, True, [2]),
    ]
    assert checkpoints([str(run)]) == 0
    assert f"needs part 2, which {this_host()} wrote" in " ".join(capsys.readouterr().out.split())
    shutil.move(other / "checkpoints" / NEWEST.format(2), run / "checkpoints")
    assert [one["part"]["lacking"] for one in look()] == [[], [], [2]]
    shutil.copytree(run, nodes.folder / "whole")
    together = TwoNodes(nodes.folder, free_port())
    trained, code, _ = together.train()
    assert code == 0
    check_end(trained, undisturbed, 4)
    assert checkpoints([str(nodes.folder / "whole"), "--gather", "--prune"]) == 0
    assert names(nodes.folder / "whole") == ["step-00000004", OLDER.format(1)]
    assert checkpoints([str(nodes.folder / "whole"), "--verify"]) == 0
    together = TwoNodes(nodes.folder, free_port())
    together.runs = (nodes.folder / "whole",) * 2
    trained, code, _ = together.train("--engine", "zero2")
    assert (trained.code, code) == (0, 0), trained.err
    assert trained.records[0].first_step == 4
    for step, loss in trained.losses.items():
        assert abs(undisturbed.losses[step] - loss) <= 1e-5 * abs(loss)


@pytest.mark.slow
def test_every_node_of_a_plain_data_parallel_run_has_everything(tmp_path: Path) -> None:
    nodes = TwoNodes(tmp_path, free_port(), apart=True)
    trained, code, _ = nodes.train("--engine", "ddp")
    assert (trained.code, code) == (0, 0), trained.err
    whole = dict(trained.losses)
    for name in ("model", "checkpoints/step-00000006.part-1-of-2"):
        shutil.rmtree(nodes.runs[0] / name)
    shutil.rmtree(nodes.runs[0] / "checkpoints")
    shutil.rmtree(nodes.runs[1] / "checkpoints/step-00000006.part-2-of-2")
    trained, code, _ = nodes.train("--engine", "ddp")
    assert (trained.code, code) == (0, 0), trained.err
    assert trained.records[0].first_step == 4
    assert {step: trained.losses[step] for step in (5, 6)} == {step: whole[step] for step in (5, 6)}


@pytest.mark.slow
@pytest.mark.skipif(not may_mount(), reason="only root can make a small disk")
def test_the_disk_of_one_node_is_full(tmp_path: Path, undisturbed: Trained) -> None:
    """No node keeps a part of it, and the training goes on."""
    nodes = TwoNodes(tmp_path, free_port(), apart=True)
    with small_disk(tmp_path / "disk", 68) as small:
        nodes.runs = (nodes.runs[0], small / "run")
        with nodes.desks() as (first, second):
            trained, code, _ = nodes.end(first, second)
        assert (trained.code, code) == (0, 0), trained.err
        assert trained.losses == undisturbed.losses
        failed = [json.dumps(event["text"]) for event in trained.events if event["event"] == "checkpoint_failed"]
        assert failed
        assert this_host() in failed[-1]
        assert names(nodes.runs[0]) == [name.replace("part-2", "part-1") for name in names(nodes.runs[1])]
        assert not list(nodes.runs[0].glob("checkpoints/.*")) + list(nodes.runs[1].glob("checkpoints/.*"))


@pytest.mark.slow
@pytest.mark.parametrize("apart", [False, True])
def test_a_run_is_watched_on_each_node(tmp_path: Path, apart: bool, capsys: pytest.CaptureFixture[str]) -> None:
    """`tightfit watch`, and what the page shows: all ranks on node 0, and on a disk of its own those of the node."""
    nodes = TwoNodes(tmp_path, free_port(), apart=apart)
    with nodes.desks("--max-steps", "5000") as (first, second):
        wait_until(lambda: all(has_step(run, 3) for run in nodes.runs) and (nodes.run / "ranks.json").exists())
        for run in dict.fromkeys(nodes.runs):
            ranks = [f"rank-{number}" for number in range(0 if run == nodes.run else 2, 4)]
            wait_until(lambda: [rank.name for rank in RankEye(run).look()] == ranks)  # noqa: B023
            assert watch([str(run), "--once", "--json"]) == 0
            seen = json.loads(capsys.readouterr().out)["run"]
            assert [rank["name"] for rank in seen["ranks"]] == ranks
            assert seen["step"] >= 3
            rows = RunSight(run).look(None)["memory"]["rows"]  # type: ignore[call-overload]
            assert [row["name"] for row in rows] == [rank.replace("-", " ") for rank in ranks]
        second.send_signal(signal.SIGINT)
        trained, code, _ = nodes.end(first, second)
    assert (trained.code, code) == (4, 4), trained.err


def has_step(run: Path, step: int) -> bool:
    try:
        return f'"step": {step},' in (run / "events.jsonl").read_text()
    except OSError:
        return False
