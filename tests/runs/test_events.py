"""Lines of a worker become typed events, whatever is in them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tightfit.messages import Message
from tightfit.runs.events import (
    Checkpointed,
    CheckpointFailed,
    Ended,
    Failed,
    Follower,
    MemoryMark,
    Other,
    PassedOver,
    Progress,
    Proof,
    Resumed,
    Step,
    Stopping,
    Tally,
    Warned,
    event_of,
)

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
NAMES = st.sampled_from(
    """start progress proof memory probe step eval warning overflow saved error end other checkpoint checkpoint_failed
    resumed passed_over stopping pictures""".split()
)
KEYS = st.sampled_from(
    """what done total name ok text milestone predicted_bytes measured_bytes seconds peak_bytes step steps loss memory
    seconds_left loss_scale skipped perplexity folder bytes rank kind reason summary blocked_s background from_engine
    from_world changed files host_bytes""".split()
)


@pytest.mark.thorough
@given(NAMES, st.dictionaries(KEYS, JSON, max_size=6))
def test_no_event_is_too_odd_to_be_read_and_counted(name: str, values: dict[str, object]) -> None:
    event = event_of(json.dumps({**values, "event": name, "at": 1.0}))
    assert event is not None
    Tally().add(event)


@pytest.mark.parametrize("line", ["", "{", "[]", "3", '"x"', "{}", '{"event": 3}', "[" * 100_000])
def test_what_is_no_event_is_left_out(line: str) -> None:
    assert event_of(line) is None


def test_an_unknown_event_is_shown_as_text() -> None:
    assert event_of('{"event": "moon", "at": 1, "phase": "full"}') == Other(name="moon", text="phase full")


def test_a_step_without_a_number_is_only_text() -> None:
    assert isinstance(event_of('{"event": "step", "loss": 2.0}'), Other)


def test_text_cannot_steer_the_terminal() -> None:
    event = event_of(json.dumps({"event": "warning", "text": "a\x1b[2Jb\nc\r"}))
    assert event == Warned(text="a [2Jb c")


def test_values_of_another_type_are_unknown() -> None:
    event = event_of('{"event": "step", "step": 4, "loss": "high", "memory": 3, "tokens_per_s": Infinity}')
    assert isinstance(event, Step)
    assert (event.step, event.loss, event.peak_bytes, event.tokens_per_s) == (4, None, None, None)


def test_events_with_all_their_fields() -> None:
    assert event_of('{"event": "progress", "what": "data", "done": 1, "total": 4}') == Progress(
        what="data", done=1.0, total=4.0
    )
    assert event_of('{"event": "proof", "name": "a", "ok": true, "text": "b"}') == Proof(name="a", ok=True, text="b")
    assert event_of('{"event": "memory", "milestone": "init", "predicted_bytes": 5, "measured_bytes": null}') == (
        MemoryMark(milestone="init", predicted_bytes=5, measured_bytes=None)
    )
    assert event_of('{"event": "error", "rank": 1, "kind": "user", "text": "x"}') == Failed(
        rank=1, kind="user", text="x"
    )
    assert event_of('{"event": "end", "reason": "finished", "summary": {"a": 1}}') == Ended(
        reason="finished", summary={"a": 1}
    )


def test_what_is_told_of_checkpoints() -> None:
    told = {"step": 5, "folder": "f", "bytes": 7, "seconds": 2, "blocked_s": 1, "background": True}
    done = Checkpointed(step=5, folder="f", written_bytes=7, seconds=2.0, blocked_s=1.0, background=True)
    assert event_of(json.dumps({"event": "checkpoint", **told})) == done
    failed = event_of('{"event": "checkpoint_failed", "step": 9, "text": "the disk is full"}')
    assert failed == CheckpointFailed(step=9, text="the disk is full")
    line = (
        '{"event": "resumed", "step": 3, "folder": "f", "from_engine": "zero2", "from_world": 4, "changed": ["a", 7]}'
    )
    resumed = Resumed(step=3, folder="f", from_engine="zero2", from_world=4, changed=("a",))
    assert event_of(line) == resumed
    assert event_of('{"event": "passed_over", "folder": "f", "text": "x"}') == PassedOver(folder="f", text="x")
    assert event_of('{"event": "stopping", "text": "saving"}') == Stopping(text="saving")
    assert event_of('{"event": "resumed"}') == Resumed(
        step=None, folder="?", from_engine=None, from_world=None, changed=()
    )
    tally = Tally()
    assert tally.safe_step is None
    tally.add(resumed)
    assert (tally.safe_step, tally.began) == (3, False)
    tally.add(done)
    assert (tally.safe_step, tally.checkpoint) == (5, done)


def line_of(step: int) -> str:
    return json.dumps({"event": "step", "step": step}) + "\n"


def steps_in(events: list[object]) -> list[int]:
    return [event.step for event in events if isinstance(event, Step)]


def test_a_file_is_followed_as_it_grows(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    follower = Follower(path)
    assert follower.poll() == []
    path.write_text(line_of(1) + line_of(2)[:9])
    assert steps_in([*follower.poll()]) == [1]
    with path.open("a") as file:
        file.write(line_of(2)[9:] + line_of(3).rstrip())
    assert steps_in([*follower.poll()]) == [2]
    assert steps_in([*follower.rest()]) == [3]
    assert follower.rest() == []


def test_a_file_that_was_begun_anew_is_read_anew(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text(line_of(1) + line_of(2))
    follower = Follower(path, start=0)
    assert steps_in([*follower.poll()]) == [1, 2]
    path.write_text(line_of(7))
    assert steps_in([*follower.poll()]) == [7]


def test_a_line_without_end_does_not_fill_the_memory(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(b"x" * (6 << 20) + b"\n" + line_of(4).encode())
    assert steps_in([*Follower(path, start=0).poll()]) == [4]


def test_what_was_there_before_is_not_followed(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text(line_of(1) + line_of(2))
    follower = Follower(path)
    assert follower.poll() == []
    with path.open("a") as file:
        file.write(line_of(3))
    assert steps_in([*follower.poll()]) == [3]


def test_a_message_in_an_event_is_read_as_one_and_cannot_steer_a_terminal() -> None:
    said = {"message": "runs.raised", "error": {"message": "runs.raised", "error": "a\x1b[2Jb"}}
    inner = Message("runs.raised", error="a [2Jb")
    assert event_of(json.dumps({"event": "warning", "text": said})) == Warned(text=Message("runs.raised", error=inner))
    unknown = {"event": "warning", "text": {"message": "runs.of-a-newer-version", "step": 7}}
    assert event_of(json.dumps(unknown)) == Warned(text="runs.of-a-newer-version, 7")


def test_a_step_in_which_layers_were_compiled_says_nothing_about_the_pace() -> None:
    tally = Tally()
    for number, seconds in enumerate([9.0, 9.0, 1.0, 60.0, 1.0], start=1):
        compiled = {"compiled": True} if seconds == 60.0 else {}
        event = event_of(json.dumps({"event": "step", "at": 1.0, "step": number, "step_s": seconds, **compiled}))
        assert isinstance(event, Step)
        tally.add(event)
    assert (tally.timed_steps, tally.step_s) == (2, 1.0)
