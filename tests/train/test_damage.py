"""Checkpoints that are not what was written, and jobs that are not what they were: named, and never silently used."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from forking import Forked, Server, checkpoints_of, contents, small_plan
from plain import write_examples
from running import edit, in_words

from tightfit.runs.checkpoints import MANIFEST, Torn, read_manifest
from tightfit.train.events import EVENTS, Events
from tightfit.train.nodes import NodeDisks
from tightfit.train.place import Place
from tightfit.train.resume import FoundCheckpoint, choose
from tightfit.types import ConfigError

pytestmark = pytest.mark.thorough

ALONE = Place(rank=0, local_rank=0, world=1, device=torch.device("cpu"), launcher="tests")
FILES = (
    "chat_template.jinja",
    "config.json",
    "manifest.json",
    "model.safetensors",
    "optimizer/states.safetensors",
    "state.json",
    "tokenizer.json",
    "tokenizer_config.json",
)


@dataclass(frozen=True)
class Trained:
    """A run of three steps with a checkpoint of each, that may be copied and damaged."""

    plan: Path
    losses: list[float]
    server: Server

    @property
    def run(self) -> Path:
        return self.plan / "reference"

    def unfinished(self, folder: Path, *steps: int) -> Path:
        """The run as it was after these steps."""
        for step in steps or (1, 2):
            name = checkpoints_of(self.run)[step].name
            shutil.copytree(self.run / "checkpoints" / name, folder / "checkpoints" / name)
        return folder

    def start(self, folder: Path, *options: str, **changes: Any) -> Forked:
        """The worker in this run's folder, with other orders."""
        plan = folder.parent / f"{folder.name}-plan"
        plan.mkdir(exist_ok=True)
        shutil.copy(self.plan / "worker.json", plan)
        edit(plan, saving__folder=str(folder), **changes)
        return self.server.run(plan, "--no-probe", *options, cache=self.plan / "cache")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    server, plan = Server(), small_plan(tmp_path_factory.mktemp("trained"), 1, steps=3)
    ran = server.run(plan, "--no-probe")
    assert ran.codes == [0], ran.stderr
    ran.folder.rename(plan / "reference")
    return Trained(plan, ran.losses, server)


def chosen(run: Path, wanted: str = "auto") -> tuple[FoundCheckpoint | None, list[dict[str, Any]]]:
    """What a start would go on from, and the events about those that it would not."""
    (run / EVENTS).unlink(missing_ok=True)
    events = Events(run, speaks=True)
    try:
        found = choose(run, wanted, ALONE, NodeDisks.together(ALONE), events)
    finally:
        events.close()
    told = [in_words(json.loads(line)) for line in (run / EVENTS).read_text().splitlines()]
    return found, [each for each in told if each["event"] == "passed_over"]


def refusal(ran: Forked) -> str:
    """The one sentence of a worker that was not to start."""
    assert ran.codes == [2], ran.stderr
    assert ran.stderr[0].count("\n") == 1, ran.stderr[0]
    assert ran.stderr[0].startswith("tightfit: ")
    assert ran.losses == []
    return ran.stderr[0]


# --- damage --------------------------------------------------------------------------------------


def truncate(path: Path) -> None:
    """By two bytes: a manifest's last one is only the end of its line."""
    data = path.read_bytes()
    path.write_bytes(data[: len(data) - 2])


def halve(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])


def flip(path: Path, place: float, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[int(place * (len(data) - 1))] ^= 1 << bit
    path.write_bytes(data)


def empty(path: Path) -> None:
    path.write_bytes(b"")


def lengthen(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")


DAMAGES: dict[str, Callable[[Path], None]] = {
    "truncated": truncate,
    "halved": halve,
    "emptied": empty,
    "deleted": Path.unlink,
    "lengthened": lengthen,
    "first bit": lambda path: flip(path, 0, 7),
    "a bit in the middle": lambda path: flip(path, 0.5, 3),
    "last bit": lambda path: flip(path, 1, 0),
}


def test_what_a_checkpoint_consists_of(trained: Trained) -> None:
    """So that no file is left out below."""
    for folder in checkpoints_of(trained.run).values():
        assert sorted(contents(folder)) == sorted(FILES)


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_named_and_passed_over(
    trained: Trained, tmp_path: Path, file: str, damage: str
) -> None:
    run = trained.unfinished(tmp_path / "run")
    newest = run / "checkpoints/step-00000002"
    found, passed = chosen(run)
    assert found is not None
    assert (found.folder, found.step, passed) == (newest, 2, [])
    DAMAGES[damage](newest / file)
    broken = contents(newest)
    found, passed = chosen(run)
    assert found is not None
    assert (found.folder, found.step) == (run / "checkpoints/step-00000001", 1)
    assert [each["folder"] for each in passed] == [str(newest)]
    assert file in passed[0]["text"], passed[0]["text"]
    assert contents(newest) == broken, "whoever looks at it changes nothing"


def test_a_manifest_with_another_bit_is_none(trained: Trained, tmp_path: Path) -> None:
    folder = trained.unfinished(tmp_path / "run") / "checkpoints/step-00000002"
    whole, good = read_manifest(folder), (folder / MANIFEST).read_bytes()
    for place in range(0, len(good), 3):
        data = bytearray(good)
        data[place] ^= 1 << place % 8
        (folder / MANIFEST).write_bytes(data)
        try:
            assert read_manifest(folder) == whole, f"byte {place}"  # white space
        except Torn:
            continue


def test_several_damaged_ones_are_all_named(trained: Trained, tmp_path: Path) -> None:
    run = trained.unfinished(tmp_path / "run", 1, 2, 3)
    truncate(run / "checkpoints/step-00000003/model.safetensors")
    empty(run / "checkpoints/step-00000002/state.json")
    (run / "checkpoints/step-00000004").mkdir()
    found, passed = chosen(run)
    assert found is not None
    assert found.step == 1
    assert [Path(each["folder"]).name[-1] for each in passed] == ["4", "3", "2"]


def test_none_is_left(trained: Trained, tmp_path: Path) -> None:
    run = trained.unfinished(tmp_path / "run")
    flip(run / "checkpoints/step-00000002/model.safetensors", 0.5, 0)
    (run / "checkpoints/step-00000001/config.json").unlink()
    with pytest.raises(ConfigError) as refused:
        chosen(run)
    sentence = str(refused.value)
    assert "step-00000002 is no whole checkpoint (model.safetensors is damaged between bytes" in sentence
    assert "nor is the older one: name another with --resume PATH, or start over with --resume none" in sentence


# --- the real worker -----------------------------------------------------------------------------


def test_the_worker_goes_on_from_the_older_one(trained: Trained, tmp_path: Path) -> None:
    run = trained.unfinished(tmp_path / "run")
    flip(run / "checkpoints/step-00000002/optimizer/states.safetensors", 0.7, 5)
    ran = trained.start(run)
    assert ran.codes == [0], ran.stderr
    assert [each["step"] for each in ran.of("resumed")] == [1]
    assert "optimizer/states.safetensors is damaged" in ran.of("passed_over")[0]["text"]
    assert ran.losses == trained.losses[1:]
    for step, folder in checkpoints_of(run).items():
        assert contents(folder) == contents(checkpoints_of(trained.run)[step]), "the damaged one is replaced"


def test_whichever_rank_finds_the_damage(trained: Trained, tmp_path: Path) -> None:
    """Two ranks hash a part each, and both hear of what one of them finds."""
    plan = small_plan(tmp_path / "two", 2, steps=2, data=trained.plan / "examples.jsonl")
    run = plan / "run"
    first = trained.server.run(plan, "--no-probe")
    assert first.codes == [0, 0], first.stderr
    spans = read_manifest(run / "checkpoints/step-00000002").files["model.safetensors"].spans
    for span in spans[1:3]:
        shutil.rmtree(run / "model")
        seen = len((run / EVENTS).read_text().splitlines())
        path = run / "checkpoints/step-00000002/model.safetensors"
        data = bytearray(path.read_bytes())
        data[span.start] ^= 1
        path.write_bytes(data)
        ran = trained.server.run(plan, "--no-probe")
        assert ran.codes == [0, 0], ran.stderr
        told = next(each for each in ran.events[seen:] if each["event"] == "passed_over")
        assert f"model.safetensors is damaged between bytes {span.start:,} and {span.stop:,}" in told["text"]
        assert [each["loss"] for each in ran.events[seen:] if each["event"] == "step"] == first.losses[1:]


def test_the_worker_says_that_none_is_left(trained: Trained, tmp_path: Path) -> None:
    run = trained.unfinished(tmp_path / "run", 2)
    (run / "checkpoints/step-00000002/model.safetensors").unlink()
    before = contents(run / "checkpoints")
    sentence = refusal(trained.start(run))
    assert "is no whole checkpoint (model.safetensors is missing): name another with --resume PATH" in sentence
    assert contents(run / "checkpoints") == before


# --- another job ---------------------------------------------------------------------------------

OTHERS: dict[str, tuple[dict[str, Any], str]] = {
    "model": ({"model__config__rms_norm_eps": 1e-3}, "model.rms_norm_eps was 1e-06 and is 0.001"),
    "sequence": ({"levers__seq": 48}, "sequence was 32 and is 48"),
    "batch": ({"effective_batch": 4, "levers__accum": 4}, "effective_batch was 2 and is 4"),
    "data": ({}, "the samples of the data are others"),
}


@pytest.mark.parametrize("other", OTHERS)
def test_another_job_is_refused(trained: Trained, tmp_path: Path, other: str) -> None:
    changes, said = OTHERS[other]
    if other == "data":
        changes = {"data__path": str(write_examples(tmp_path / "others.jsonl", 60))}
    run = trained.unfinished(tmp_path / "run")
    before = contents(run / "checkpoints")
    sentence = refusal(trained.start(run, **changes))
    assert said in sentence
    assert "step-00000002 is of another job (" in sentence
    assert "--resume none" in sentence
    assert "--resume-anyway" in sentence
    assert contents(run / "checkpoints") == before
    seen = len((run / EVENTS).read_text().splitlines())
    anyway = trained.start(run, "--resume-anyway", **changes)
    assert anyway.codes == [0], anyway.stderr
    events = anyway.events[seen:]
    resumed = next(each for each in events if each["event"] == "resumed")
    assert (resumed["step"], said in resumed["changed"]) == (2, True)
    assert [each["step"] for each in events if each["event"] == "step"] == [3]


def test_other_numbers_of_the_schedule_are_the_users_to_choose(trained: Trained, tmp_path: Path) -> None:
    run = trained.unfinished(tmp_path / "run")
    ran = trained.start(run, training__max_steps=5, training__learning_rate=1e-3)
    assert ran.codes == [0], ran.stderr
    changed = ran.of("resumed")[0]["changed"]
    assert changed == ["learning_rate was 0.003 and is 0.001", "max_steps was 3 and is 5"]
    assert [each["step"] for each in ran.of("step")] == [3, 4, 5]


# --- from where ----------------------------------------------------------------------------------


def test_from_another_run(trained: Trained, tmp_path: Path) -> None:
    """Of its checkpoints the newest whole one; they stay as they are."""
    other = trained.unfinished(tmp_path / "other")
    before = contents(other)
    ran = trained.start(tmp_path / "run", "--resume", str(other))
    assert ran.codes == [0], ran.stderr
    assert ran.of("resumed")[0]["folder"] == str(other / "checkpoints/step-00000002")
    assert ran.losses == trained.losses[2:]
    assert contents(other) == before
    assert sorted(checkpoints_of(ran.folder)) == [3]


def test_from_one_checkpoint(trained: Trained, tmp_path: Path) -> None:
    wanted = trained.unfinished(tmp_path / "other") / "checkpoints/step-00000001"
    ran = trained.start(tmp_path / "run", "--resume", str(wanted))
    assert ran.codes == [0], ran.stderr
    assert ran.of("resumed")[0]["folder"] == str(wanted)
    assert ran.losses == trained.losses[1:]


def test_a_named_checkpoint_that_is_damaged_has_no_substitute(trained: Trained, tmp_path: Path) -> None:
    other = trained.unfinished(tmp_path / "other")
    truncate(other / "checkpoints/step-00000002/config.json")
    sentence = refusal(trained.start(tmp_path / "run", "--resume", str(other / "checkpoints/step-00000002")))
    assert "step-00000002 is no whole checkpoint (config.json has" in sentence


@pytest.mark.parametrize("name", ["nowhere", "nowhere/checkpoints/step-00000007", "empty"])
def test_from_nothing(trained: Trained, tmp_path: Path, name: str) -> None:
    (tmp_path / "empty").mkdir()
    sentence = refusal(trained.start(tmp_path / "run", "--resume", str(tmp_path / name)))
    assert f"there is no checkpoint in {tmp_path / name}: " in sentence


def test_back_behind_newer_ones(trained: Trained, tmp_path: Path) -> None:
    """Those are of another course: a later start must not take them, nor rotation keep them instead of the new ones."""
    run = trained.unfinished(tmp_path / "run", 1, 2, 3)
    changes = {"training__learning_rate": 1e-3, "training__max_steps": 2, "saving__keep_last": 1}
    ran = trained.start(run, "--resume", str(run / "checkpoints/step-00000001"), **changes)
    assert ran.codes == [0], ran.stderr
    assert sorted(checkpoints_of(run)) == [2]
    assert contents(checkpoints_of(run)[2]) != contents(checkpoints_of(trained.run)[2])
    assert sorted(checkpoints_of(run / "earlier/1")) == [2, 3]


def test_begun_anew(trained: Trained, tmp_path: Path) -> None:
    run = trained.unfinished(tmp_path / "run", 2, 3)
    ran = trained.start(run, "--resume", "none", training__max_steps=2, saving__keep_last=1)
    assert ran.codes == [0], ran.stderr
    assert (ran.of("resumed"), ran.of("passed_over")) == ([], [])
    assert [each["step"] for each in ran.of("step")] == [1, 2]
    assert ran.losses[0] == trained.losses[0]
    assert sorted(checkpoints_of(run)) == [2]
    assert sorted(checkpoints_of(run / "earlier/1")) == [2, 3]
