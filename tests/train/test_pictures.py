"""`loss.png` and `memory.png`: whatever the events hold, there are pictures or there are none, and no error."""

from __future__ import annotations

import json
import math
import struct
import time
from pathlib import Path
from typing import Any

import pytest

from tightfit.train.pictures import MOST_STEPS, draw, read, smooth

pytestmark = pytest.mark.thorough

GIB = 2**30
LONG = 50 * MOST_STEPS


def step(number: int, loss: float | None = 2.0, **more: Any) -> dict[str, Any]:
    memory = {"now_bytes": 3 * GIB, "peak_bytes": 5 * GIB, "host_bytes": GIB}
    return {"event": "step", "step": number, "loss": loss, "learning_rate": 1e-4, "memory": memory, **more}


def mark(milestone: str, predicted: int, measured: int | None) -> dict[str, Any]:
    return {
        "event": "memory",
        "milestone": milestone,
        "predicted_bytes": predicted,
        "measured_bytes": measured,
        "host_bytes": GIB,
    }


START = {
    "event": "start",
    "model": "tiny_llama",
    "predicted": {"limit_bytes": 8 * GIB, "peak_bytes": 6 * GIB},
}
MARKS = [mark(name, 4 * GIB, 3 * GIB) for name in ("init", "forward", "backward", "step")]


def write(folder: Path, events: list[dict[str, Any]]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    return folder


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != "events.jsonl")


def size_of(path: Path) -> tuple[int, int]:
    """Width and height of a whole PNG."""
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    assert data[-8:-4] == b"IEND"
    width, height = struct.unpack(">II", data[16:24])
    return width, height


def test_a_run_gets_both_pictures(tmp_path: Path) -> None:
    steps = [step(number, 3 / number) for number in range(1, 60)]
    folder = write(tmp_path, [START, *MARKS, *steps, {"event": "eval", "step": 59, "loss": 0.1}])
    made = draw(folder)
    assert [path.name for path in made] == ["loss.png", "memory.png"]
    assert names(folder) == ["loss.png", "memory.png"]
    for path in made:
        width, height = size_of(path)
        assert width > 800
        assert height > 400


@pytest.mark.parametrize(
    "events",
    [
        pytest.param([START, step(1)], marks=pytest.mark.slow),
        [START, *MARKS, step(1, None)],
        [START, step(1, math.nan), step(2, math.inf), step(3, 1e300), step(4, 10**400)],
        [step(1, learning_rate=None, memory=None)],
        pytest.param([START, *MARKS], marks=pytest.mark.slow),
        [{"event": "eval", "step": 4, "loss": 2.0}],
        [START, mark("forward", GIB, None), step(1, memory={"host_bytes": GIB})],
    ],
    ids=["one step", "no number", "odd numbers", "bare", "no steps", "evaluation alone", "no GPU"],
)
def test_odd_runs_are_drawn(tmp_path: Path, events: list[dict[str, Any]]) -> None:
    made = draw(write(tmp_path, events))
    assert made
    assert names(tmp_path) == sorted(path.name for path in made)


def test_torn_lines_and_other_things_are_passed_over(tmp_path: Path) -> None:
    folder = write(tmp_path, [START, step(1), step(2)])
    with (folder / "events.jsonl").open("ab") as file:
        file.write(b'{"event": "step", "step": 3, "lo\n\xff\xfe\x00\n[1]\n7\n"text"\nnull\n' + b"[" * 100_000 + b"\n")
        file.write(b'{"event": "step", "step": "x"}\n{"event": "step", "step": true}\n{"event": ["step"]}\n')
        file.write(b'{"event": "memory", "milestone": {}}\n{"event": "start", "predicted": 7}\n')
        file.write(b'{"event": "step", "step": 4, "loss": 1.5, "memory": []}\n{"event": "step", "step": 5')
    assert [each.step for each in read(folder / "events.jsonl").steps] == [1, 2, 4]
    assert [path.name for path in draw(folder)] == ["loss.png", "memory.png"]


def test_a_restart_replaces_what_was_lost(tmp_path: Path) -> None:
    before = [step(number, 2.0) for number in range(1, 11)]
    after = [step(number, 1.0) for number in range(6, 13)]
    folder = write(tmp_path, [START, *before, START, *after])
    history = read(folder / "events.jsonl")
    assert [(each.step, each.loss) for each in history.steps] == [
        *((number, 2.0) for number in range(1, 6)),
        *((number, 1.0) for number in range(6, 13)),
    ]
    assert history.restarts == [6]
    assert len(draw(folder)) == 2


def test_a_run_that_went_on_has_each_step_once(tmp_path: Path) -> None:
    """Killed after step 10 with a checkpoint at 5, and again after 7 with the same one."""
    resumed = {"event": "resumed", "step": 5}
    first = [START, *(step(number, 3.0) for number in range(1, 11)), {"event": "eval", "step": 10, "loss": 9.0}]
    second = [START, resumed, *(step(number, 2.0) for number in (6, 7))]
    third = [
        START,
        resumed,
        *(step(number, 1.0) for number in range(6, 13)),
        {"event": "eval", "step": 12, "loss": 1.0},
    ]
    folder = write(tmp_path, [*first, *second, *third])
    history = read(folder / "events.jsonl")
    assert [(each.step, each.loss) for each in history.steps] == [
        *((number, 3.0) for number in range(1, 6)),
        *((number, 1.0) for number in range(6, 13)),
    ]
    assert history.restarts == [5, 5]
    assert history.evaluations == {12: 1.0}
    assert len(draw(folder)) == 2


def test_lost_steps_are_gone_from_a_long_run_too(tmp_path: Path) -> None:
    """Of so many steps few are read, and the first that was made again may not be among them."""
    lost = [step(number, 3.0) for number in range(1, 3 * MOST_STEPS)]
    again = [step(number, 1.0) for number in range(MOST_STEPS, 4 * MOST_STEPS)]
    folder = write(tmp_path, [START, *lost, {"event": "resumed", "step": MOST_STEPS - 1}, *again])
    steps = read(folder / "events.jsonl").steps
    numbers = [each.step for each in steps]
    assert numbers == sorted(set(numbers))
    assert all(each.loss == (3.0 if each.step < MOST_STEPS else 1.0) for each in steps)


def test_a_run_that_goes_on_without_a_number_is_drawn(tmp_path: Path) -> None:
    folder = write(tmp_path, [START, step(1), {"event": "resumed", "step": None}, step(2)])
    assert [each.step for each in read(folder / "events.jsonl").steps] == [1, 2]


def test_without_events_there_is_no_picture_and_no_error(tmp_path: Path) -> None:
    assert draw(tmp_path) == []
    assert draw(tmp_path / "nowhere") == []
    assert draw(write(tmp_path / "empty", [])) == []


def test_a_picture_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    folder = write(tmp_path, [START, *MARKS, step(1)])
    (folder / "loss.png").mkdir()
    (folder / "loss.png" / "mine").write_text("kept")
    assert [path.name for path in draw(folder)] == ["memory.png"]
    assert names(folder) == ["loss.png", "memory.png"]
    assert (folder / "loss.png" / "mine").read_text() == "kept"


@pytest.mark.thorough
def test_a_long_run_takes_seconds(tmp_path: Path) -> None:
    line = json.dumps(step(7, tokens_per_s=1234.5, step_s=0.1, epoch=0.25, grad_norm=1.0, loss_scale=None))
    head, tail = line.split("7", 1)
    with (tmp_path / "events.jsonl").open("w") as file:
        file.writelines(f"{head}{number}{tail}\n" for number in range(1, LONG + 1))
        file.write(json.dumps({"event": "eval", "step": LONG, "loss": 1.0}) + "\n")
    history = read(tmp_path / "events.jsonl")
    assert MOST_STEPS // 2 <= len(history.steps) <= MOST_STEPS + 1
    assert history.steps[0].step == 1
    assert history.steps[-1].step == LONG
    began = time.process_time()
    assert len(draw(tmp_path)) == 2
    assert time.process_time() - began < 3


def test_smoothing_starts_at_the_first_value_and_passes_over_gaps() -> None:
    found = smooth([None, 4.0, None, 4.0, 2.0])
    assert found[0] is None
    assert found[1] == pytest.approx(4.0)
    assert found[2] == found[1]
    assert found[3] == pytest.approx(4.0)
    assert found[4] is not None
    assert 2.0 < found[4] < 4.0
