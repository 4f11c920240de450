"""What a run says in Chinese: why attempts failed, the lights and the warnings, and the stream as a whole."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "runs"))
sys.path.insert(0, str(Path(__file__).parent))

from recorded_attempts import NAMES, PLANNED, recorded
from visits import step_line

from tightfit.messages import Message, as_json, say
from tightfit.runs.cause import find_cause
from tightfit.runs.events import Step, event_of
from tightfit.runs.health import Held, Seen, judge_health
from tightfit.web.words import translate

GIB, MIB = 2**30, 2**20
CHINESE = re.compile(r"[\u4e00-\u9fff]")
CAUSE = Message("diagnose.cause", cause=Message("symptom.disk-full.cause"))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("readable", [True, False], ids=["kernel", "no-kernel"])
def test_why_a_recorded_attempt_failed_is_said_in_chinese(name: str, readable: bool) -> None:
    verdict = find_cause(recorded(name, kernel_readable=readable))
    for said in (verdict.cause, *(fix.text for fix in verdict.fixes)):
        assert isinstance(said, Message), said
        assert CHINESE.search(said.text("zh")), said


def seen_steps(count: int, **more: object) -> list[Step]:
    made = []
    for number in range(1, count + 1):
        line = step_line(number, 1000, 5 - number / 100, now_bytes=4 * GIB, peak_bytes=8 * GIB)
        values = {key: value(number) if callable(value) else value for key, value in more.items()}
        line["memory"].update(values.pop("memory", {}))
        event = event_of(json.dumps({**line, **values}))
        assert isinstance(event, Step)
        made.append(event)
    return made


def sights() -> Iterator[Seen]:
    card = Held(name="GPU 0", used_bytes=int(23.8 * GIB), total_bytes=24 * GIB)
    host = Held(name="host RAM", used_bytes=20 * GIB, total_bytes=64 * GIB)
    short = Held(name="host RAM", used_bytes=62 * GIB, total_bytes=64 * GIB)
    unknown = Held(name="host RAM", used_bytes=None, total_bytes=None)
    offloading = replace(PLANNED, peak_bytes=GIB, gpus_per_node=2, offload_optimizer="cpu")
    falling = tuple((10.0 * number, (40 - number) * GIB) for number in range(40))
    usual = {"memories": (card,), "host": host, "has_run": True, "worker": PLANNED}
    yield Seen(memories=(unknown,), host=unknown)
    yield Seen(**usual)
    yield Seen(**usual, steps=seen_steps(40))
    yield Seen(**usual, steps=seen_steps(40, loss=None))
    yield Seen(**usual, steps=seen_steps(40, loss=0.0))
    yield Seen(**usual, steps=seen_steps(40, loss=2.0))
    yield Seen(**usual, steps=seen_steps(40, loss=lambda n: 1.0 + n))
    yield Seen(**usual, steps=seen_steps(40, loss=lambda n: 5 + n / 50))
    yield Seen(**usual, steps=seen_steps(40), oom=CAUSE, oom_is_last=True)
    yield Seen(**{**usual, "worker": offloading, "host": short}, steps=seen_steps(40), own=(card,))
    yield Seen(**{**usual, "host": short})
    yield Seen(**usual, host_free=falling)
    yield Seen(**{**usual, "worker": offloading}, host_free=falling)
    for memory in ("now_bytes", "host_bytes"):
        grows = seen_steps(60, memory=lambda n, name=memory: {name: 4 * GIB + n * 200 * MIB})
        yield Seen(**usual, steps=grows)
        yield Seen(**{**usual, "host": unknown}, steps=grows, own=(card,))
    yield Seen(**usual, steps=seen_steps(40, alloc_retries=lambda n: n))
    yield Seen(**usual, steps=seen_steps(40, alloc_retries=lambda n: int(n == 40)))
    yield Seen(**usual, steps=seen_steps(40, loss_scale=lambda n: 65536.0 / 2 ** max(0, n - 30)))


def test_lights_and_warnings_are_said_in_chinese() -> None:
    for seen in sights():
        found = judge_health(seen)
        for said in (*found.warnings, *(light.text for light in found.lights if light.text)):
            assert CHINESE.search(say(said, "zh")), said


def test_a_piece_of_the_stream_is_translated_and_the_rest_of_it_stays() -> None:
    sections = {
        "events": [{"at": 1.0, "text": as_json(Message("web.no-folder")), "mood": "good"},
                   {"at": 2.0, "text": "as an older run said it", "mood": ""}],
        "attempts": [
            {"number": 1, "plan": "ZeRO-2", "cause": {"id": "disk-full", "sentence": as_json(CAUSE), "rank": 1},
             "evidence": ["rank-1.log:17: torch.OutOfMemoryError"],
             "changed": [as_json(Message("web.nested-too-deep"))],
             "next": {"action": as_json(Message("runs.stop")), "because": as_json(Message("web.no-folder"))}}],
        "checkpoints": [{"step": 3, "torn": as_json(Message("web.cannot-be-read"))}, {"step": 2, "torn": None}],
        "trouble": {"why": as_json(Message("web.no-such-file"))}, "series": {"rows": [[1, 0.1, None]]},
    }  # fmt: skip
    message = f"id: ab-1\ndata: {json.dumps(sections, separators=(',', ':'))}\n\n".encode()
    assert translate(b"retry: 2000\n\n", "zh") == b"retry: 2000\n\n"
    assert translate(b"event: beat\ndata: {}\n\n", "zh") == b"event: beat\ndata: {}\n\n"
    told = translate(message, "zh")
    assert told.startswith(b"id: ab-1\ndata: ")
    assert told.endswith(b"}\n\n")
    found = json.loads(told.partition(b"data: ")[2])
    assert [each["text"] for each in found["events"]] == ["不是目录", "as an older run said it"]
    assert found["attempts"][0]["cause"] == {"id": "disk-full", "sentence": "磁盘已满或配额用尽。", "rank": 1}
    assert found["attempts"][0]["changed"] == ["嵌套太深"]
    assert found["attempts"][0]["evidence"] == sections["attempts"][0]["evidence"]
    assert found["checkpoints"] == [{"step": 3, "torn": "无法读取"}, {"step": 2, "torn": None}]
    assert (found["trouble"], found["series"]) == ({"why": "文件或目录不存在"}, sections["series"])
    english = json.loads(translate(message, "en").partition(b"data: ")[2])
    assert english["trouble"] == {"why": "no such file or directory"}
