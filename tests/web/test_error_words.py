"""What is wrong with a question is said in Chinese too."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from visits import HTML, client

from tightfit.web.words import words

CHINESE = re.compile(r"[\u4e00-\u9fff]")
BAD: tuple[dict[str, str], ...] = (
    {"seq": "x"}, {"seq": "0"}, {"seq": "999999999999"}, {"card": "RTX9999"}, {"card": "A100"}, {"card": "A100-30GB"},
    {"card": "MI250-32GB"}, {"card": "24"}, {"card": "-4"}, {"card": "!!"}, {"card": "x" * 100}, {"gpus": "0"},
    {"gpus": "9999"}, {"host_ram": "foo"}, {"host_ram": "0GB"}, {"nvme": "-1"}, {"method": "foo"}, {"method": "lroa"},
    {"network": "fast"}, {"link": "nvlnk"}, {"link": "nvlink"},
    {"engine": "zero9"}, {"offload_param": "cpu", "engine": "zero1"}, {"offload_optimizer": "cpu", "engine": "zero0"},
    {"offload_optimizer": "nvme"}, {"offload_optimizer": "nvme", "engine": "zero2", "nvme": "1TB"},
    {"checkpointing": "foo"}, {"checkpointing": "layers:999"}, {"lora_rank": "4"}, {"effective_batch": "7"},
    {"lora_targets": "foo", "method": "lora"}, {"lora_targets": ",", "method": "lora"}, {"margin": "10"},
    {"effective_batch": "8", "micro_batch": "3"}, {"effective_batch": "99999999"}, {"micro_batch": "0"},
    {"micro_batch": "100000", "accum": "100000"}, {"margin": "foo"}, {"epochs": "-1"}, {"samples": "0"},
    {"allow": "foo"}, {"allow": "precison"}, {"model": "no-such-model"}, {"model": "/etc/passwd"},
    {"model": "7b_mambo"}, {"model": "x" * 300}, {"card": "this", "nodes": "2"},
    {"optimizer": "adamw8bit", "engine": "zero2"}, {"config": "["}, {"config": "[]"}, {"config": "{}"},
    {"config": '{"model_type": "foo"}'}, {"config": '{"model_type": "lama"}'}, {"config": '{"model_type": "llama"}'},
    {"config": '{"model_type": "gemma3"}'}, {"config": '{"ssm_cfg": {}}'},
)  # fmt: skip
"""Questions that make no sense."""


@pytest.mark.thorough
@pytest.mark.parametrize("wrong", BAD, ids=",".join)
def test_a_question_that_makes_no_sense_is_answered_in_chinese(
    wrong: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    usual = {"model": "7b_mamba", "gpus": "2", "card": "24GB", "host_ram": "64GB", "seq": "1024", "lang": "zh"}
    asked: dict[str, Any] = {**usual, **wrong}
    if "config" in wrong:
        del asked["model"]
    for path, headers in (("/plan/answer", {}), ("/plan", HTML)):
        text = client(tmp_path).get(path, params=asked, headers=headers).text
        problem = re.search(r"<p class=.notice bad.[^>]*data-problem>(.*?)</p>", text, re.DOTALL)
        assert problem is not None, text
        assert 'lang="en"' not in problem[0]
        assert CHINESE.search(problem[1]), problem[1]


@pytest.mark.parametrize(("data", "said"), [(b" \n", "日志是空的"), (b"\x7fELF" + bytes(range(256)), "这不是日志")])
def test_the_diagnose_view_says_in_chinese_what_is_no_log(data: bytes, said: str, tmp_path: Path) -> None:
    visitor = client(tmp_path)
    visitor.cookies.set("tightfit_language", "zh")
    for path, headers in (("/diagnose/answer", {}), ("/diagnose", HTML)):
        answer = visitor.post(path, content=data, headers=headers)
        assert answer.status_code == 400
        assert said in answer.text
        assert "print" not in answer.text


def test_an_address_without_anything_is_said_in_chinese_as_before(tmp_path: Path) -> None:
    text = client(tmp_path).get("/nowhere", params={"lang": "zh"}, headers=HTML).text
    assert "这个地址没有内容" in text
    assert 'role="alert" lang="en"' not in text


def test_what_was_written_in_english_stays_and_is_marked() -> None:
    """By an older run, or by another program; a name is the same everywhere."""
    said = words("zh").said("Nobody has ever said this {sentence} before.")
    assert (said.text, said.is_foreign) == ("Nobody has ever said this {sentence} before.", True)
    assert not words("en").said("Any sentence.").is_foreign
    assert not words("zh").said("Qwen/Qwen2.5-7B").is_foreign
    assert not words("zh").said("ZeRO-2，优化器卸载到 CPU").is_foreign
