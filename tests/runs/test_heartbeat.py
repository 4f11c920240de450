"""Signs of life, and how long a rank may give none."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from tightfit.runs.hang import LEAST_S, LONG_S, START_S, Frame, Hung, Stand, Watch
from tightfit.runs.heartbeat import DISK_FULL, HEARTBEATS, Beat, Heartbeat, beat_path, clear_beats, read_beat


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def beat(rank: int, stage: str = "forward", step: int = 4, micro: int = 0) -> Beat:
    return Beat(rank=rank, count=1, stage=stage, step=step, micro=micro)  # type: ignore[arg-type]


def test_a_beat_says_where_its_rank_stands(tmp_path: Path) -> None:
    heart = Heartbeat(tmp_path, 3)
    assert read_beat(tmp_path, 3) == Beat(rank=3, count=1, stage="prepare", step=0)
    heart.at("backward", 12, 2)
    heart.beat()
    assert read_beat(tmp_path, 3) == Beat(rank=3, count=3, stage="backward", step=12, micro=2)
    heart.beat(DISK_FULL)
    found = read_beat(tmp_path, 3)
    assert found is not None
    assert found.last_word == DISK_FULL
    assert read_beat(tmp_path, 0) is None


def test_a_beat_stays_within_the_bytes_that_it_has(tmp_path: Path) -> None:
    """So that a full disk takes it as well."""
    heart = Heartbeat(tmp_path, 0)
    size = beat_path(tmp_path, 0).stat().st_size
    heart.at("backward", 10**9, 10**6)
    heart.beat(DISK_FULL)
    assert beat_path(tmp_path, 0).stat().st_size == size
    assert read_beat(tmp_path, 0) is not None


def test_many_threads_may_beat(tmp_path: Path) -> None:
    heart = Heartbeat(tmp_path, 0)
    threads = [threading.Thread(target=lambda: [heart.beat() for _ in range(200)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = read_beat(tmp_path, 0)
    assert found is not None
    assert found.count == 801


@pytest.mark.parametrize("text", ["", "x", "1 dancing 3 0", "one forward 3 0", "1 forward"])
def test_what_is_no_beat_says_nothing(tmp_path: Path, text: str) -> None:
    (tmp_path / HEARTBEATS).mkdir()
    beat_path(tmp_path, 0).write_text(text)
    assert read_beat(tmp_path, 0) is None


def test_beats_of_an_attempt_that_ended_do_not_count_for_the_next(tmp_path: Path) -> None:
    Heartbeat(tmp_path, 0)
    Heartbeat(tmp_path, 1)
    clear_beats(tmp_path, [0])
    assert os.listdir(tmp_path / HEARTBEATS) == ["rank-1"], "which may live on another machine"
    clear_beats(tmp_path, [0, 1])
    assert os.listdir(tmp_path) == []
    clear_beats(tmp_path, [0])


def test_a_rank_is_late_when_its_file_has_not_changed_for_long(tmp_path: Path) -> None:
    clock = Clock()
    hearts = [Heartbeat(tmp_path, rank) for rank in (0, 1)]
    watch = Watch(tmp_path, [0, 1], 60.0, clock)
    for heart in hearts:
        heart.at("forward", 1)
    for clock.now in (1.0, 40.0, 59.0):
        hearts[0].beat()
        assert watch.look(0.5) is None
    clock.now = 61.5
    hearts[0].at("step", 1)
    found = watch.look(0.5)
    assert found is not None
    assert (found.rank, round(found.silent_s)) == (1, 60)
    assert [each.stage for each in found.beats] == ["step", "forward"]


def test_nobody_is_late_who_has_not_begun(tmp_path: Path) -> None:
    clock = Clock()
    watch = Watch(tmp_path, [0, 1], 1.0, clock)
    clock.now = 1e6
    assert watch.look(None) is None
    Heartbeat(tmp_path, 0)  # prepares: a download takes as long as it takes
    assert watch.look(None) is None
    clock.now = 2e6
    assert watch.look(None) is None


@pytest.mark.parametrize(
    ("stage", "step_s", "timeout_s", "limit"),
    [
        ("prepare", None, None, None),
        ("prepare", None, 10.0, None),
        ("init", None, None, START_S),
        ("init", None, 10.0, START_S),
        ("init", None, 2 * START_S, 2 * START_S),
        ("forward", None, None, START_S),
        ("forward", 1.0, None, LEAST_S),
        ("backward", 60.0, None, 1200.0),
        ("forward", 60.0, 10.0, 10.0),
        ("save", 1.0, None, LONG_S),
        ("eval", 1.0, None, LONG_S),
        ("save", 1.0, 10.0, 10.0),
        ("end", 1.0, 10.0, START_S),
    ],
)
def test_how_long_is_too_long(
    tmp_path: Path, stage: str, step_s: float | None, timeout_s: float | None, limit: float | None
) -> None:
    assert Watch(tmp_path, [0], timeout_s).limit(stage, step_s) == limit  # type: ignore[arg-type]


# --- whom the others wait for -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("beats", "rank"),
    [
        ([beat(0, "step"), beat(1, "forward"), beat(2, "step")], 1),
        ([beat(0, "forward", 5), beat(1, "vote", 4)], 1),
        ([beat(0, "forward", micro=1), beat(1, "backward", micro=0)], 1),
        ([beat(0, "backward", micro=3), beat(1, "step")], 0),
        ([beat(0, "save"), beat(1, "vote")], 1),
    ],
)
def test_the_rank_that_is_behind_is_waited_for(beats: list[Beat], rank: int) -> None:
    assert Hung(silent_s=300.0, beats=tuple(beats)).rank == rank


def stand(rank: int, *files: str, writer: tuple[str, ...] = ()) -> Stand:
    def frames(names: tuple[str, ...]) -> tuple[Frame, ...]:
        return tuple(Frame(file=name, line=1, name="f") for name in names)

    return Stand(rank=rank, main=frames(files), writer=frames(writer))


C10D = "/venv/torch/distributed/distributed_c10d.py"


def test_of_ranks_in_one_stage_the_one_outside_of_a_collective_is_waited_for() -> None:
    beats = tuple(beat(rank) for rank in range(3))
    stands = (stand(0, C10D, "m.py"), stand(1, C10D, "m.py"), stand(2, "data.py", "m.py"))
    hung = Hung(silent_s=300.0, beats=beats, stands=stands)
    assert hung.rank == 2
    assert str(hung.sentence) == "rank 2 gave no sign of life for 300 s in the forward pass of step 4 (data.py:1 in f)"


def test_a_rank_that_does_not_even_answer_is_waited_for() -> None:
    """As one that was stopped, or that the kernel holds."""
    beats = tuple(beat(rank, "backward") for rank in range(3))
    stands = (stand(0, C10D), stand(2, C10D))
    hung = Hung(silent_s=20.0, beats=beats, stands=stands)
    assert hung.rank == 1
    assert str(hung.sentence).endswith("of step 4, and did not answer when it was asked for its stacks")


def test_a_thread_that_writes_a_checkpoint_counts_where_all_wait_for_it() -> None:
    beats = tuple(beat(rank, "save") for rank in (0, 1))
    waits = ("/python/threading.py", "tightfit/train/checkpoint.py")
    stands = (
        stand(0, *waits, writer=(C10D, "tightfit/train/saved_model.py")),
        stand(1, *waits, writer=("tightfit/runs/disk.py", "tightfit/train/saved_model.py")),
    )
    hung = Hung(silent_s=9.0, beats=beats, stands=stands)
    assert hung.rank == 1
    assert hung.place is not None
    assert hung.place.file == "tightfit/runs/disk.py"
