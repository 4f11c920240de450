"""Parts of a layer that recompute: the gradients stay what they are, and what is kept is what was not selected."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from small_models import config_of, real
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from tightfit.train import recompute
from tightfit.types import PARTS, Checkpointing

BATCH, SEQUENCE, RANK = 2, 16, 4
SELECTIONS = [PARTS[:1], *(("elementwise", part) for part in PARTS[1:]), PARTS]


def make(family: str, *, dropout: float | None = None, **changes: Any) -> Any:
    """`dropout`: of the adapters; None: the model has none."""
    model = real(config_of(family, **changes)).train()
    if dropout is None:
        return model
    from peft import LoraConfig, get_peft_model

    targets = ["in_proj", "x_proj", "dt_proj"] if "mamba" in family else "all-linear"
    config = LoraConfig(
        task_type="CAUSAL_LM",
        r=RANK,
        lora_dropout=dropout,
        target_modules=targets,
        fan_in_fan_out=family == "gpt2",
    )
    adapted = get_peft_model(model, config)
    for name, param in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(param, std=0.05)
    return adapted


def gradients(model: Any) -> dict[str, torch.Tensor]:
    ids = torch.arange(BATCH * SEQUENCE).reshape(BATCH, SEQUENCE) * 7 % 300
    torch.manual_seed(3)  # of dropouts
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    return {name: param.grad for name, param in model.named_parameters() if param.grad is not None}


@pytest.fixture
def records(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What each selected layer keeps."""
    found: list[Any] = []
    original = recompute.Selection.contexts

    def contexts(selection: recompute.Selection) -> tuple[Any, Any]:
        first, second = original(selection)
        found.append(first._record)
        return first, second

    monkeypatch.setattr(recompute.Selection, "contexts", contexts)
    return found


def kept(record: Any) -> list[torch.Tensor]:
    return [each for entry in record for each in tree_leaves(entry.outputs) if isinstance(each, torch.Tensor)]


FAMILIES = ["gpt_neox", "gpt2", "gemma3_text", "olmo2", "phi3", "qwen2", "qwen3", "mixtral", "mamba", "mamba2"]


@pytest.mark.parametrize(
    ("family", "dropout"),
    [
        ("llama", None),
        pytest.param("llama", 0.1, marks=pytest.mark.thorough),
        *(pytest.param(family, None, marks=pytest.mark.thorough) for family in FAMILIES),
        *(pytest.param(family, 0.1, marks=pytest.mark.thorough) for family in ("gpt2", "gemma3_text", "mamba")),
    ],
)
def test_the_gradients_are_those_without_recomputation(records: list[Any], family: str, dropout: float | None) -> None:
    expected = gradients(make(family, dropout=dropout))
    for selected in SELECTIONS:
        model = make(family, dropout=dropout)
        recompute.recompute(model, Checkpointing(layers=1, select=selected))
        found = gradients(model)
        assert all(torch.equal(found[name], gradient) for name, gradient in expected.items()), selected
        assert not any(map(kept, records)), f"kept for nothing with {selected}"
        assert len(records) == 1, "the upper layer keeps everything"
        records.clear()


@pytest.fixture
def installed() -> Iterator[None]:
    from tightfit.mamba.install import install, uninstall

    install()
    yield
    uninstall()


@pytest.mark.thorough
@pytest.mark.parametrize(("family", "dropout"), [("mamba", None), ("falcon_mamba", None), ("mamba", 0.1)])
def test_a_mixer_of_ours_keeps_what_its_backward_pass_reads(
    records: list[Any], installed: None, family: str, dropout: float | None
) -> None:
    test_the_gradients_are_those_without_recomputation(records, family, dropout)


def test_what_is_kept_is_what_was_not_selected(records: list[Any]) -> None:
    config = config_of("llama")
    tokens, head = BATCH * SEQUENCE, config.hidden_size // config.num_attention_heads
    wide = {
        "qkv": (config.num_attention_heads + 2 * config.num_key_value_heads) * head,
        "mixer": config.num_attention_heads * (head + 1),  # and the logarithm of each row's sum
        "out": config.hidden_size,
        "mlp": 2 * config.intermediate_size,
    }
    narrow = {"qkv": 3 * RANK, "mixer": 0, "out": RANK, "mlp": 3 * RANK}  # the last projection's adapter is one of them
    for parts, dropout in itertools.product(([], ["mlp"], ["qkv", "out"], ["mixer"]), (None, 0.0)):
        model = make("llama", dropout=dropout)
        recompute.recompute(model, Checkpointing(layers=None, select=("elementwise", *parts)))
        ids = torch.ones(BATCH, SEQUENCE, dtype=torch.long)
        model(input_ids=ids, use_cache=False)
        each = {part: wide[part] + (0 if dropout is None else narrow[part]) for part in wide if part not in parts}
        for record in records:
            storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in kept(record)}
            assert sum(storage.nbytes() for storage in storages.values()) == 4 * tokens * sum(each.values()), parts
        records.clear()


@torch.compile(backend="aot_eager_decomp_partition", fullgraph=True)
def run_again(layer: Any, contexts: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return checkpoint(type(layer).forward, layer, *args, use_reentrant=False, context_fn=contexts, **kwargs)


def run_compiled(layer: Any, contexts: Any, saved: dict[int, torch.Tensor], *args: Any, **kwargs: Any) -> Any:
    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        return run_again(layer, contexts, args, kwargs)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:The .grad attribute")  # in torch's own tracing
@pytest.mark.parametrize("dropout", [None, 0.0])
def test_a_compiled_layer_keeps_the_same(records: list[Any], dropout: float | None) -> None:
    expected = gradients(make("llama", dropout=dropout))
    for selected in (PARTS[:1], ("elementwise", "qkv", "mlp")):
        how = Checkpointing(layers=None, select=selected)
        eager = make("llama", dropout=dropout)
        recompute.recompute(eager, how)
        ids = torch.ones(BATCH, SEQUENCE, dtype=torch.long)
        eager(input_ids=ids, use_cache=False)
        wanted = sorted(tensor.numel() for record in records for tensor in kept(record))
        records.clear()

        torch._dynamo.reset()
        model = make("llama", dropout=dropout)
        own = {each.untyped_storage().data_ptr() for each in model.parameters()}
        saved: dict[int, torch.Tensor] = {}
        for index, layer in enumerate(recompute.layers_of(model)):
            layer.forward = partial(run_compiled, layer, recompute.inside(layer, index, how), saved)
        found = gradients(model)
        for name, gradient in expected.items():
            torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-6)
        inputs = [BATCH * SEQUENCE * 64] * 2
        rotary = [SEQUENCE * 16] * 2
        elements = [tensor.numel() for pointer, tensor in saved.items() if pointer not in own]
        assert sorted(elements) == sorted([*wanted, *inputs, *rotary]), selected
    torch._dynamo.reset()


def test_a_layer_of_unknown_parts_recomputes_whole(records: list[Any]) -> None:
    model = make("llama")
    layer = recompute.layers_of(model)[0]
    layer.residual_proj = torch.nn.Linear(64, 64)
    how = Checkpointing(layers=None, select=("elementwise", "mlp"))
    recompute.recompute(model, how)
    gradients(model)
    assert len(records) == 1, "the other layer"
    text = recompute.say_whole(model, how)
    assert text is not None
    assert "LlamaDecoderLayer" in str(text)
    assert recompute.inside(layer, 0, how) is recompute.inside(layer, 1, Checkpointing(layers=None))
    assert recompute.recompute(model, how) == 2, "what is compiled takes no name of ours"
