"""The address of the Plan view: what it asks, and what it may not."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from urllib.parse import parse_qsl

import pytest

from tightfit.model.load import load_model, shape_from_fields
from tightfit.model.presets import PRESETS
from tightfit.types import HardwareError, ModelShape, UserError
from tightfit.web import plan_answer
from tightfit.web.plan_answer import (
    MODEL,
    MOST_CONFIG_BYTES,
    AddressQuestion,
    answer_to,
    block_of,
    fill_form,
    read_address,
)


def asked(query: str) -> AddressQuestion:
    return read_address(parse_qsl(query, keep_blank_values=True))


def test_the_bare_address_asks_something_sensible() -> None:
    """An 8B instruct model with LoRA, on this machine's GPUs; on a card that many have where it has none."""
    assert (
        asked("").command()
        == f"tightfit plan --model {MODEL} --gpus 1xRTX4090 --method lora --host-ram 64GB --seq 2048"
    )
    assert asked("lang=zh").address() == asked("").address()
    assert answer_to(asked(""), advice=False).plan.fits


def test_the_bare_address_asks_for_this_machine_where_it_has_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_answer, "find_machine", lambda: "2 × RTX 3090")
    assert asked("").command() == f"tightfit plan --model {MODEL} --gpus this --method lora --seq 2048"
    assert asked("model=qwen2.5-7b").command() == "tightfit plan --model qwen2.5-7b --gpus this"


@pytest.mark.parametrize(
    ("query", "gpus"),
    [
        ("card=4xRTX4090&gpus=6", "4xRTX4090"),
        ("card=4 × 4090&gpus=4", "4x4090"),
        ("card=4090x4&gpus=2", "4x4090"),
        ("card=2x8xA100-80GB&gpus=3&nodes=5", "2x8xA100-80GB"),
        ("card=8x24GB&nodes=2", "2x8x24GB"),
        ("card=RX 7900 XTX&gpus=2", "2xRX 7900 XTX"),
    ],
)
def test_counts_in_the_box_of_the_card_are_not_multiplied(query: str, gpus: str) -> None:
    found = asked(query)
    assert found.said_flags()["gpus"] == gpus
    shown = fill_form(parse_qsl(query))
    assert f"{shown['gpus']}x{shown['card']}" == gpus.removeprefix("2x") if shown["nodes"] else gpus


@pytest.mark.parametrize(
    ("query", "command"),
    [
        ("model=qwen2.5-7b&gpus=4&card=RTX4090", "--model qwen2.5-7b --gpus 4xRTX4090"),
        ("gpus=2x8xA100-80GB", f"--model {MODEL} --gpus 2x8xA100-80GB"),
        ("gpus=8&card=A100-80GB&nodes=2", f"--model {MODEL} --gpus 2x8xA100-80GB"),
        ("gpus=1&card=24GB&nodes=1", f"--model {MODEL} --gpus 1x24GB"),
        ("card=this", f"--model {MODEL} --gpus this"),
        ("card=This&gpus=2", f"--model {MODEL} --gpus this --num-gpus 2"),
        ("gpus=2&card=24GB&allow=lora&allow=precision,lora", f"--model {MODEL} --gpus 2x24GB --allow lora,precision"),
        ("gpus=2&card=24GB&seq=&engine=&micro-batch=2", f"--model {MODEL} --gpus 2x24GB --micro-batch 2"),
        ("gpus=2&card=24GB&effective_batch=1_024", f"--model {MODEL} --gpus 2x24GB --effective-batch 1024"),
        (
            "gpus=8&card=H100&nodes=2&network=8x400Gb&link=nvlink",
            f"--model {MODEL} --gpus 2x8xH100 --network 8x400Gb --link nvlink",
        ),
        ("gpus=2&card=24GB&write=/etc&hostfile=/etc/passwd&nvme-path=/&file=x", f"--model {MODEL} --gpus 2x24GB"),
    ],
)
def test_an_address_is_a_command(query: str, command: str) -> None:
    found = asked(query)
    assert found.command() == f"tightfit plan {command}"
    again = asked(found.address())
    assert again == found
    assert again.address() == found.address()


def test_a_measured_machine_is_a_card_by_the_name_of_its_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """And no other file is: whoever follows a link must not make the page read what it names."""
    (tmp_path / "cluster.json").write_text("{}", encoding="utf-8")
    with pytest.raises(HardwareError, match="not a measurement"):
        plan_answer.offer_machine(tmp_path / "cluster.json")
    monkeypatch.setitem(plan_answer.OFFERED, "cluster.json", tmp_path / "cluster.json")
    named = asked("card=cluster.json&gpus=4").command()
    assert named == f"tightfit plan --model {MODEL} --gpus {tmp_path / 'cluster.json'} --num-gpus 4"
    monkeypatch.chdir(tmp_path)
    for word in ("other.json", "./cluster.json", f"{tmp_path}/cluster.json", "../x"):
        with pytest.raises(HardwareError, match="We know no card"):
            asked(f"card={word}").request()


@pytest.mark.parametrize(
    ("query", "said"),
    [
        ("seq=abc", "--seq takes a whole number, not 'abc'"),
        ("seq=" + "9" * 60, "--seq takes a whole number"),
        ("gpus=0&card=24GB", "1 to 1024 GPUs"),
        ("gpus=4000000&card=24GB", "1 to 1024 GPUs"),
        ("gpus=512&nodes=512&card=24GB", "1 to 1024 GPUs"),
        ("gpus=-3&card=24GB", "1 to 1024 GPUs"),
        ("card=this&nodes=2", "one node"),
        ("effective-batch=720720", "up to 16384 sequences"),
        ("model=" + "x" * 300, "too long"),
        ("model=/etc/passwd", "opens no files"),
        ("model=~/.ssh/config", "opens no files"),
        ("model=config.json", "opens no files"),
        ("model=a b", "opens no files"),
        ("config=[]", "no config"),
        ("config={", "not JSON"),
        ("config={}", "model_type"),
        ('config={"model_type":"llama","hidden_size":64}', "num_hidden_layers"),
        ("config=" + "[" * 100_000, "not JSON"),
    ],
)
def test_what_makes_no_sense_is_one_sentence(query: str, said: str) -> None:
    with pytest.raises(UserError, match=said.replace("(", r"\(")) as error:
        asked(query).request()
    assert "\n" not in str(error.value)


def test_the_page_opens_no_folder_of_that_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "org").mkdir()
    (tmp_path / "org" / "model").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="opens no files"):
        asked("model=org/model")


@pytest.mark.parametrize("name", PRESETS)
def test_a_pasted_config_has_the_shape_of_its_model(name: str) -> None:
    config = {**PRESETS[name].config, "transformers_version": "5.0", "torch_dtype": "bfloat16", "extra": [1] * 1000}
    block = block_of(json.dumps(config))
    assert "extra" not in block
    one, other = load_model(name), shape_from_fields(block, name)
    assert facts(one) == facts(other)
    assert len(asked(f"config={json.dumps(block)}").address()) < 2000


def facts(shape: ModelShape) -> tuple[object, ...]:
    return shape.parameters, shape.tensors, shape.tied, shape.max_positions, shape.model_type, shape.pattern


def test_a_pasted_config_is_named_as_a_file_in_the_command() -> None:
    found = asked("gpus=2&card=24GB&config=" + json.dumps(dict(PRESETS["tiny_llama"].config)))
    assert shlex.split(found.command())[2:4] == ["--model", "config.json"]
    assert MOST_CONFIG_BYTES == 2**20


def test_the_form_shows_also_what_makes_no_sense() -> None:
    shown = fill_form([("seq", "abc"), ("gpus", "2x8xA100-80GB"), ("unknown", "1")])
    assert (shown["seq"], shown["nodes"], shown["gpus"], shown["card"]) == ("abc", "2", "8", "A100-80GB")
    assert fill_form([])["model"] == MODEL
