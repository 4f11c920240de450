"""Models that nobody described: what the trace says against what PyTorch does, and how it says no."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tightfit.model.load import load_model, shape_from_config
from tightfit.model.trace import trace_config
from tightfit.types import ModelError, Traced

pytestmark = pytest.mark.thorough

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def config_of(model_type: str, **settings: Any) -> Any:
    from transformers import AutoConfig

    return AutoConfig.for_model(model_type, **{**SIZES, **settings})


def saved_bytes(model_type: str, layers: int, length: int) -> int:
    """Distinct storages that autograd keeps of a real model on the CPU, in bf16, parameters left out."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(config_of(model_type, num_hidden_layers=layers), dtype=torch.bfloat16)
    model.train()
    outside = {p.untyped_storage().data_ptr() for p in (*model.parameters(), *model.buffers())}
    storages: dict[int, Any] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in outside:
            storages[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(input_ids=torch.zeros(1, length, dtype=torch.long), use_cache=False)
    return sum(storage.nbytes() for storage in storages.values())


def test_an_unknown_model_is_measured_when_asked(tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    (tmp_path / "config.json").write_text(json.dumps({"model_type": "cohere", **SIZES}))
    with pytest.raises(ModelError, match=r"'cohere'.*estimate --trace.*\[train\]"):
        load_model(str(tmp_path))
    shape = load_model(str(tmp_path), trust_trace=True)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config_of("cohere"))
    assert [(t.name, t.shape) for t in shape.tensors] == [(n, tuple(p.shape)) for n, p in model.named_parameters()]
    assert shape.parameters == sum(p.numel() for p in model.parameters())
    assert (shape.model_type, shape.n_layers, len(shape.blocks)) == ("cohere", 3, 1)
    assert (shape.hidden_size, shape.vocab_size, shape.tied) == (64, 96, model.config.tie_word_embeddings)
    assert any("meta device" in str(note) for note in shape.notes)
    mixer = shape.blocks[0].mixer
    assert isinstance(mixer, Traced)
    length = 128
    truth = (saved_bytes("cohere", 2, length) - saved_bytes("cohere", 1, length)) / length
    assert mixer.saved_bytes_per_token == pytest.approx(truth, rel=0.01)
    assert mixer.saved_bytes_per_token < mixer.forward_bytes_per_token
    assert mixer.saved_bytes_per_token < mixer.backward_bytes_per_token


def test_a_known_model_is_never_spawned(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("subprocess.run", None)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **SIZES}))
    assert load_model(str(tmp_path), trust_trace=True).blocks[0].mlp is not None


@pytest.mark.parametrize("model_type", ["llama", "gemma2", "qwen3_moe", "gpt2"])
def test_a_trace_of_a_known_family_finds_what_the_formula_knows(model_type: str, tmp_path: Path) -> None:
    from tightfit.train.trace import trace

    own = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24} if "moe" in model_type else {}
    config = {"model_type": model_type, **SIZES, **own}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    answer, shape = trace(path), shape_from_config(config, "m")
    assert answer["pattern"] == list(shape.pattern)
    assert answer["layer_prefix"] == shape.layer_prefix
    for kind, block in zip(answer["kinds"], shape.blocks, strict=True):
        assert [(name, tuple(sizes)) for name, sizes in kind["tensors"]] == [(t.name, t.shape) for t in block.tensors]
    assert [name for name, _ in answer["before"]] == [t.name for t in shape.before]
    assert [name for name, _ in answer["after"]] == [t.name for t in shape.after]
    assert (answer["tied"], answer["max_positions"]) == (shape.tied, shape.max_positions)
    assert answer["notes"] == []


def test_layers_of_several_kinds_and_attention_that_is_quadratic(tmp_path: Path) -> None:
    from tightfit.train.trace import trace

    path = tmp_path / "config.json"
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "num_key_value_heads": 4}
    path.write_text(json.dumps({"model_type": "deepseek_v3", **SIZES, **experts, "first_k_dense_replace": 1}))
    deepseek = trace(path)
    assert deepseek["pattern"] == [0, 1, 1]
    dense, sparse = deepseek["kinds"]
    assert dense["saved_bytes_per_token"] < sparse["saved_bytes_per_token"]
    path.write_text(json.dumps({"model_type": "bloom", **SIZES}))
    assert [note.id for note in trace(path)["notes"]] == ["train.trace-grows"]


def test_without_the_train_extra_the_error_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('No module named torch')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(ModelError, match=r"pip install 'tightfit\[train\]'"):
        trace_config({"model_type": "cohere", **SIZES}, "some/model")


@pytest.mark.slow
def test_what_cannot_be_traced_is_said_in_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    # Code from a model's repository is named in the config, and must not be fetched or run.
    remote = {"model_type": "mystery", "auto_map": {"AutoConfig": "configuration_mystery.MysteryConfig"}}
    with pytest.raises(
        ModelError, match="'some/model' cannot be traced: transformers cannot read this config"
    ) as caught:
        trace_config(remote, "some/model")
    assert len(str(caught.value)) < 300
    with pytest.raises(ModelError, match="failed with exit code 1: no message"):
        trace_config(remote, "m", python="/bin/false")
    with pytest.raises(ModelError, match="could not start /nowhere/python"):
        trace_config(remote, "m", python="/nowhere/python")
    monkeypatch.setattr("tightfit.model.trace.LIMIT_S", 0.01)
    with pytest.raises(ModelError, match="took longer than"):
        trace_config(remote, "m")
