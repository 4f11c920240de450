"""The Chinese page in a real browser: what goes wrong is said in Chinese too, in the diagnosis and in a run."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from visits import follow, need_a_browser, opened, says, served, step_line, within, written

from tightfit.messages import Message, as_json

pytestmark = pytest.mark.thorough

CHINESE = re.compile(r"[\u4e00-\u9fff]")
CAUSE = as_json(
    Message(
        "diagnose.cause-with-numbers",
        cause=Message("symptom.device-oom.cause", where=Message("diagnose.at-backward")),
        numbers=Message("diagnose.oom-numbers", asked="2.00 GiB"),
    )
)
BECAUSE = as_json(Message("plan.step-slower", share=0.12))

OOM = (
    "step 1\nTraceback (most recent call last):\n"
    '  File "/a/train.py", line 3, in <module>\n    loss.backward()\n'
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of "
    "23.65 GiB of which 1.00 GiB is free. Of the allocated memory 20.00 GiB is allocated by PyTorch, and 1.00 GiB is "
    "reserved by PyTorch but unallocated.\n"
)
ENGLISH = re.compile(r"(?:\b[A-Za-z][a-z]+\b[ ,]+){4}")
"""Five words in a row, which no name has."""
EVENTS = (
    {"event": "memory", "milestone": "init", "predicted_bytes": 2**30, "measured_bytes": 2**30},
    {"event": "checkpoint", "step": 2, "folder": "checkpoints/step-2", "bytes": 2**30, "seconds": 3.0},
    {"event": "warning", "text": as_json(Message("train.no-flash-attn"))},
    {
        "event": "attempt_failed", "number": 1, "kind": "device-oom", "step": 3, "kept_step": 2, "wait_s": 0,
        "text": CAUSE, "action": "smaller plan", "because": BECAUSE,
    },
)  # fmt: skip
ATTEMPT = {
    "schema": 1, "number": 1, "started": "2026-01-01T00:00:00+00:00", "ended": "2026-01-01T00:01:00+00:00",
    "plan": "ZeRO-2, optimizer on CPU, micro batch 4 × 1 on 2 ranks", "ranks": 2, "effective_batch": 8,
    "state": "failed", "exit_codes": [1, -9], "first_step": 0, "last_step": 3, "kept_step": 2,
    "cause": {
        "id": "device-oom", "kind": "device-oom", "confidence": "certain", "rank": 1, "phase": "backward",
        "sentence": CAUSE,
        "evidence": ["rank-1.log:17: torch.OutOfMemoryError: CUDA out of memory."],
    },
    "next": {
        "action": "smaller plan", "wait_s": 0,
        "because": BECAUSE,
        "changed": ["checkpointing none → full"],
    },
}  # fmt: skip


@pytest.fixture(autouse=True)
def browser() -> None:
    need_a_browser()


def all_chinese(page: Any, place: str) -> list[str]:
    """Each element there; none is English, and none is marked as such."""
    texts: list[str] = page.locator(place).all_text_contents()
    assert texts
    for text in texts:
        assert CHINESE.search(text), text
        assert not ENGLISH.search(text), text
    assert page.locator(f"{place}[lang=en], {place} [lang=en]").count() == 0
    return texts


def test_a_log_is_diagnosed_in_chinese(tmp_path: Path) -> None:
    with served(cwd=tmp_path) as link, opened(within(link, "/runs"), locale="zh-CN") as page:
        assert page.get_attribute("html", "lang") == "zh-Hans", "the browser alone says so"
        follow(page, "诊断")
        page.get_by_label("日志", exact=True).fill(OOM)
        page.keyboard.press("Control+Enter")
        says(page, "#cause", "反向传播时 GPU 显存不足（申请 2.00 GiB，总量 23.65 GiB 中空闲 1.00 GiB")
        all_chinese(page, "#cause")
        fixes = all_chinese(page, "#answer .fixes li > span:first-child")
        assert any(text.startswith("减小 micro batch") for text in fixes)
        assert "阶段：反向" in page.text_content("#answer")
        assert page.text_content("#answer .tag") == "显存不足"
        assert "--per_device_train_batch_size 1" in page.text_content("#answer")  # what is typed stays
        assert "torch.OutOfMemoryError" in page.text_content("#answer .evidence")
        follow(page, "English")
        page.get_by_label("Log", exact=True).fill(OOM)
        page.keyboard.press("Control+Enter")
        says(page, "#cause", "The GPU ran out of memory in the backward pass")
        assert not CHINESE.search(page.text_content("#answer"))


def test_a_run_is_shown_in_chinese(tmp_path: Path) -> None:
    steps = [step_line(number, 1000, 3.0, host_bytes=2**30 + number * 2**27) for number in range(1, 60)]
    run = written(tmp_path / "run", [*steps[:3], *EVENTS, *steps[3:]], ended=None, state="running")
    (run / "attempts").mkdir()
    (run / "attempts" / "001.json").write_text(json.dumps(ATTEMPT), encoding="utf-8")
    (run / "checkpoints" / "step-00000005").mkdir(parents=True)
    with (
        served(cwd=tmp_path) as link,
        opened(within(link, "/runs/view?run=0/run&lang=zh")) as page,
    ):
        says(page, "#attempts", "反向传播时 GPU 显存不足（申请 2.00 GiB）。")
        attempts = page.text_content("#attempts")
        assert "ZeRO-2, optimizer on CPU, micro batch 4 × 1 on 2 ranks" in attempts  # as an older run said it
        assert "换用更省的方案: 预计每步慢 12%。" in attempts
        assert "rank-1.log:17: torch.OutOfMemoryError" in attempts  # evidence stays as it is
        says(page, "#events", "检查点")
        events = all_chinese(page, "#events li")
        assert any("第 2 步检查点" in text and "用时 3 秒" in text for text in events)
        assert any("第 1 次尝试于第 3 步之后失败（保留第 2 步的检查点）" in text for text in events)
        says(page, "#checkpoints", "没有 manifest.json：没有写完")
        all_chinese(page, "#lights li")
        all_chinese(page, "#warnings p")
        follow(page, "English")
        says(page, "#attempts", "The GPU ran out of memory in the backward pass")
        says(page, "#events", "checkpoint at step 2")
