"""Where a rank finds itself: its GPU, and what it says when it was started in another way than its plan wants."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from running import write_plan

from tightfit.messages import Message, as_json
from tightfit.train import place as places
from tightfit.train.config import Options, read_worker_config
from tightfit.train.place import Place, device_index, gather_messages, place_of
from tightfit.types import ConfigError

ONE_EACH = {"SLURM_GPUS_PER_TASK": "1", "SLURM_LOCALID": "3"}


@pytest.mark.parametrize(
    ("local_rank", "count", "environment", "index"),
    [
        (0, 4, {}, 0),
        (3, 4, ONE_EACH, 3),
        (3, 1, ONE_EACH, 0),
        (3, 1, {}, None),
        (3, 2, ONE_EACH, None),
        (2, 1, ONE_EACH, None),
    ],
)
def test_the_gpu_of_a_rank(local_rank: int, count: int, environment: dict[str, str], index: int | None) -> None:
    assert device_index(local_rank, count, environment) == index


def test_deepspeed_is_told_the_gpu_and_not_the_rank() -> None:
    alone = Place(rank=3, local_rank=3, world=4, device=torch.device("cuda", 0), launcher="srun")
    assert (alone.device_number, alone.local_rank) == (0, 3)
    on_cpu = Place(rank=1, local_rank=1, world=2, device=torch.device("cpu"), launcher="torchrun")
    assert on_cpu.device_number == 1


@pytest.mark.parametrize("started", [{}, {"RANK": "0", "WORLD_SIZE": "3"}])
def test_the_right_command_names_the_folder_of_the_plan(tmp_path: Path, started: dict[str, str]) -> None:
    """Not a folder of the run, which is not there before it has begun."""
    folder = write_plan(tmp_path / "written", 2, model="tiny_llama", seq=64, effective_batch=4, engine="zero2")
    config = read_worker_config(folder / "worker.json")
    with pytest.raises(ConfigError, match="`tightfit train --plan ") as found:
        place_of(started, config, Options())
    named = str(found.value).split("--plan ")[1].split("`")[0]
    assert Path(named) == folder
    assert (Path(named) / "worker.json").exists()


def test_what_ranks_say_is_said_once_and_names_them_unless_all_say_it(monkeypatch: pytest.MonkeyPatch) -> None:
    place = Place(rank=0, local_rank=0, world=4, device=torch.device("cpu"), launcher="tests")
    all_say = Message("train.code-not-kept", folder=Path("/cache"), why=Message("train.no-room-there"))
    some, one = Message("train.not-compiled", why=Message("train.no-triton")), Message("train.cannot-lock")
    said = [[all_say], [all_say, some], [some, all_say, one], [all_say, some]]
    lines = [json.dumps([as_json(each) for each in of_rank]) for of_rank in said]

    def words(place: Place, text: str) -> list[str]:
        assert text == lines[place.rank]
        return lines

    monkeypatch.setattr(places, "words", words)
    found = {tuple(ranks): str(sentence) for ranks, sentence in gather_messages(place, said[0])}
    assert found == {
        (0, 1, 2, 3): str(all_say),
        (1, 2, 3): f"ranks 1, 2, 3: {some}",
        (2,): f"rank 2: {one}",
    }
    monkeypatch.undo()
    alone = Place(rank=0, local_rank=0, world=4, device=torch.device("cpu"), launcher="rehearsal", rehearsal=True)
    assert [(ranks, str(each)) for ranks, each in gather_messages(alone, [some])] == [([0], str(some))]
