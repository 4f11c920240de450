"""The head and both losses: whole models under saved-tensor hooks, and the fused loss against the plain one."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from kept import BATCH, SEQUENCE, forward, saved_bytes  # noqa: E402

from tightfit.memory.activations import activations  # noqa: E402
from tightfit.memory.loss import FUSED_CHUNK_BYTES, fused_chunk_tokens  # noqa: E402
from tightfit.model.load import shape_from_config  # noqa: E402
from tightfit.train.loss import linear_cross_entropy  # noqa: E402
from tightfit.types import Checkpointing, Levers  # noqa: E402

DENSE: dict[str, Any] = {
    "vocab_size": 1024,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": DENSE,
    "qwen2": {**DENSE, "tie_word_embeddings": True},
    "gemma2": {**DENSE, "head_dim": 16, "query_pre_attn_scalar": 16},
    "gemma3_text": {**DENSE, "head_dim": 16, "layer_types": ["full_attention"] * 2},
    "qwen3_moe": {**DENSE, "head_dim": 16, "moe_intermediate_size": 48, "num_experts": 4, "num_experts_per_tok": 2},
    "gpt_neox": {key: value for key, value in DENSE.items() if key != "num_key_value_heads"},
    "mamba": {"vocab_size": 1024, "hidden_size": 64, "num_hidden_layers": 2, "state_size": 8},
    "falcon_mamba": {"vocab_size": 1024, "hidden_size": 64, "num_hidden_layers": 2, "state_size": 8},
}


def built(model_type: str, dtype: Any, *, checkpointed: bool) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(model_type, **FAMILIES[model_type])
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype).train()
    if checkpointed:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


@pytest.mark.thorough
@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("model_type", FAMILIES)
def test_saved_bytes_of_a_whole_model(model_type: str, precision: str, fused: bool, checkpointed: bool) -> None:
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[precision]
    model = built(model_type, dtype, checkpointed=checkpointed)
    got = saved_bytes(model, forward(model, fused=fused))
    shape = shape_from_config({"model_type": model_type, **FAMILIES[model_type]}, model_type)
    levers = Levers(
        sequence=SEQUENCE,
        micro_batch=BATCH,
        precision=precision,  # type: ignore[arg-type]
        scan="torch",
        loss="fused" if fused else "plain",
        checkpointing=Checkpointing(layers=None if checkpointed else 0),
        # the CPU's kernel keeps what flash attention keeps, in every precision; soft-capping is eager's
        attention="eager" if model_type == "gemma2" else "flash",
    )
    acts = activations(shape, levers)
    indices = (1 if fused else 2) * 8 * BATCH * SEQUENCE  # the embedding and the plain loss keep token ids
    tables = 0 if checkpointed else acts.shared  # recomputed layers hold them as arguments, out of the hooks' sight
    want = acts.kept + tables + acts.head.saved_norm + acts.head.saved_logits + indices
    assert got == pytest.approx(want, rel=0.01)


def test_a_batch_without_labels_has_no_loss() -> None:
    states = torch.randn(1, 4, 8, requires_grad=True)
    loss = linear_cross_entropy(states, torch.randn(16, 8), torch.full((1, 4), -100))
    assert loss.item() == 0.0
    assert torch.autograd.grad(loss, states)[0].abs().sum().item() == 0.0


def test_a_chunk_never_holds_less_than_a_token() -> None:
    assert fused_chunk_tokens(4, 2**40, 8, width=2, trains_head=True, kernel=True) == 1


@pytest.mark.parametrize("tokens", [1, 127, 2048, 100_000])
def test_chunks_are_even_and_within_their_bytes(tokens: int) -> None:
    rows = fused_chunk_tokens(tokens, 151_936, 896, width=2, trains_head=True, kernel=True)
    assert rows * 151_936 * 2 <= FUSED_CHUNK_BYTES
    fewest = -(-tokens * 151_936 * 2 // FUSED_CHUNK_BYTES)
    assert -(-tokens // rows) == fewest


def test_a_frozen_head_needs_no_more_rows_than_its_products() -> None:
    """Its gradient is not added up; and many small chunks would be launched more slowly than they run."""
    rows = {
        frozen: fused_chunk_tokens(8192, 32_000, 4096, width=2, trains_head=not frozen, kernel=True)
        for frozen in (True, False)
    }
    assert rows == {True: 1024, False: 2048}
    assert fused_chunk_tokens(8192, 32_000, 512, width=2, trains_head=False, kernel=True) == 4096
