"""What a training shows while it runs, on a terminal and in a pipe."""

from __future__ import annotations

import io
import sys
from dataclasses import replace

import pytest
from rich.console import Console

from tightfit.runs.events import (
    Checkpointed,
    CheckpointFailed,
    Event,
    MemoryMark,
    Other,
    PassedOver,
    Pictures,
    Progress,
    Proof,
    Resumed,
    Step,
    Stopping,
    Tally,
    Warned,
)
from tightfit.runs.lines import duration, step_line
from tightfit.runs.records import WorkerFile
from tightfit.screen.train import Board, draw_summary

WORKER = WorkerFile(
    model="tiny_mamba",
    method="full",
    engine="zero2",
    optimizer="adamw",
    offload_optimizer="none",
    nodes=1,
    gpus_per_node=2,
    vendor="nvidia",
    folder="output",
    required_bytes=3 * 2**30,
    peak_bytes=2 * 2**30,
    host_bytes_per_node=2**30,
    step_s=0.5,
    tokens_per_s=1000.0,
)


def step(number: int, *, loss: float | None = 2.0, peak_bytes: int | None = 2**30, skipped: bool = False) -> Step:
    return Step(
        step=number,
        steps=100,
        loss=loss,
        learning_rate=1e-4,
        tokens_per_s=1234.5,
        step_s=0.5,
        seconds_left=3725.0,
        now_bytes=2**29,
        peak_bytes=peak_bytes,
        host_bytes=2**28,
        loss_scale=None,
        skipped=skipped,
    )


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def in_a_pipe(events: list[tuple[float, Event]]) -> list[str]:
    """The lines for events that come at these seconds."""
    out, clock = io.StringIO(), Clock()
    with Board(Console(file=out, width=80), WORKER, clock) as board:
        for clock.now, event in events:
            board.show(event)
    return out.getvalue().splitlines()


def test_a_step_in_one_line() -> None:
    assert step_line(step(7), WORKER.peak_bytes) == (
        "step 7/100  loss 2.0000  1,234 tokens/s  1 h 02 min left  memory 0.50 GiB now, 1.00 GiB peak, 2.00 GiB planned"
    )


def test_what_is_not_known_is_left_out() -> None:
    assert step_line(step(7, peak_bytes=None), 0).endswith("left  256.0 MiB of RAM")
    assert "loss ?" in step_line(step(7, loss=None), 0)
    assert "loss nan" in step_line(step(7, loss=float("nan")), 0)
    assert step_line(step(7, skipped=True), 0).endswith("skipped")


def test_a_pipe_gets_a_line_in_ten_seconds_and_the_last_one() -> None:
    lines = in_a_pipe([(second, step(1 + second)) for second in range(26)])
    assert [line.split("/")[0] for line in lines] == ["step 1", "step 11", "step 21", "step 26"]


def test_logging_steps_say_how_often_a_line_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "WORKER", replace(WORKER, logging_steps=4))
    saved = (7.5, Warned(text="look"))
    lines = in_a_pipe([*((second, step(1 + second)) for second in range(7)), saved, (8.0, step(8)), (9.0, step(9))])
    assert [line.split("/")[0] for line in lines] == ["step 4", "! look", "step 8", "step 9"]


def test_the_end_of_one_work_is_said_before_the_next() -> None:
    data = [(0.0, Progress(what="data", done=done, total=4)) for done in (1.0, 2.0, 4.0)]
    lines = in_a_pipe([*data, (0.1, Proof(name="a", ok=True, text="all is well")), (0.2, step(1))])
    assert lines[:3] == ["data: 25 %", "data: 100 %", "✓ all is well"]
    assert lines[3].startswith("step 1/100")


def test_one_thing_of_unknown_length_has_no_share() -> None:
    assert in_a_pipe([(0.0, Progress(what="starting DeepSpeed", done=0.0, total=1.0))]) == ["starting DeepSpeed …"]


def test_what_happens_once_is_always_said() -> None:
    lines = in_a_pipe([(0.0, Warned(text="look")), (0.0, Other(name="moon", text="full")), (0.0, Warned(text="out"))])
    assert lines == ["! look", "moon: full", "! out"]


GIB = 2**30


@pytest.mark.parametrize(
    ("event", "line"),
    [
        (
            Checkpointed(step=1500, folder="f", written_bytes=3 * GIB, seconds=42.0, blocked_s=0.75, background=True),
            "✓ checkpoint at step 1,500, 3.00 GiB in 42 s, of which the training waited 0.8 s",
        ),
        (
            Checkpointed(step=5, folder="f", written_bytes=2**20, seconds=2.0, blocked_s=2.0, background=False),
            "✓ checkpoint at step 5, 1.0 MiB in 2 s",
        ),
        (
            Checkpointed(step=None, folder="f", written_bytes=None, seconds=None, blocked_s=None, background=True),
            "✓ checkpoint",
        ),
        (
            CheckpointFailed(step=7, text="the disk is full."),
            "✗ NO CHECKPOINT at step 7: the disk is full; the training goes on",
        ),
        (
            Resumed(step=1500, folder="runs/a/x", from_engine="zero2", from_world=4, changed=("lr", "a rank fewer")),
            "✓ going on from step 1,500 (runs/a/x, written by zero2 on 4 ranks; changed since: lr; a rank fewer)",
        ),
        (Resumed(step=2, folder="x", from_engine="fsdp2", from_world=1, changed=()), "written by fsdp2 on 1 rank)"),
        (Resumed(step=2, folder="x", from_engine=None, from_world=None, changed=()), "✓ going on from step 2 (x)"),
        (PassedOver(folder="a/b", text="b is missing"), "! a/b was passed over: b is missing"),
        (Stopping(text="saving; Ctrl-C again leaves at once"), "! saving; Ctrl-C again leaves at once"),
    ],
)
def test_checkpoints_in_a_line_each(event: Event, line: str) -> None:
    (said,) = in_a_pipe([(0.0, event)])
    assert said.endswith(line)


def test_a_checkpoint_that_failed_is_loud() -> None:
    out = io.StringIO()
    with Board(Console(file=out, width=200, force_terminal=True, color_system="standard"), WORKER) as board:
        board.show(CheckpointFailed(step=7, text="the disk is full"))
    assert "\x1b[1;31m✗ NO CHECKPOINT" in out.getvalue()


def test_the_summary_says_from_where_it_went_on() -> None:
    tally, out = Tally(), io.StringIO()
    tally.add(Resumed(step=60, folder="x", from_engine=None, from_world=None, changed=()))
    tally.add(step(100))
    draw_summary(Console(file=out, width=120), WORKER, tally, "runs/a")
    assert "Trained tiny_mamba for 100 steps, from step 60 on in this start: loss" in out.getvalue()


def test_the_summary_of_a_run_on_the_cpu_has_its_ram_and_its_pictures() -> None:
    tally, out = Tally(), io.StringIO()
    for milestone in ("init", "forward", "backward", "step"):
        tally.add(MemoryMark(milestone=milestone, predicted_bytes=2**20, measured_bytes=None, host_bytes=2**30))
    tally.add(step(100, peak_bytes=None))
    tally.add(Pictures(files=("runs/a/loss.png", "runs/a/memory.png")))
    draw_summary(Console(file=out, width=120), WORKER, tally, "runs/a")
    said = " ".join(out.getvalue().split())
    assert "RAM, engine ready - 1.00 GiB RAM, first forward - 1.00 GiB RAM, first backward - 1.00 GiB" in said
    assert "Pictures of loss and memory: runs/a/loss.png, runs/a/memory.png" in said


def test_no_markup_of_a_worker_is_obeyed() -> None:
    out = io.StringIO()
    with Board(Console(file=out, width=80, markup=True, emoji=True), WORKER) as board:
        board.show(Warned(text="[bold]x[/nothing] :smile:"))
    assert out.getvalue() == "! [bold]x[/nothing] :smile:\n"


def test_a_terminal_keeps_one_line_and_the_last_state() -> None:
    out = io.StringIO()
    with Board(Console(file=out, width=200, force_terminal=True, no_color=True), WORKER) as board:
        for number in range(1, 6):
            board.show(step(number))
        board.show(Warned(text="look"))
    text = out.getvalue()
    assert text.count("step 1/100") == 1
    assert "look" in text
    assert text.rstrip().splitlines()[-1].removeprefix("\x1b[1A\x1b[2K").startswith("step 5/100")


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0.25, "0.2 s"), (45, "45 s"), (200, "3 min 20 s"), (7500, "2 h 05 min"), (400_000, "4.6 days"), (-3, "0.0 s")],
)
def test_durations(seconds: float, words: str) -> None:
    assert str(duration(seconds)) == words
