"""Small models and made-up machines, for questions that brute force can answer too."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache, partial
from random import Random
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from tightfit.hardware.words import parse_hardware
from tightfit.job import Job
from tightfit.model.load import load_model, shape_from_config
from tightfit.planner import question_of
from tightfit.planner.candidates import Corner, corners, strategies
from tightfit.planner.question import Question
from tightfit.planner.search import search
from tightfit.types import Hardware, ModelShape

GIB = 2**30
properties = partial(
    settings, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)


FAMILIES = ("llama", "gemma3_text", "qwen3_moe", "gpt_neox", "mamba", "mamba2")


@lru_cache(maxsize=256)
def built(family: str, layers: int, hidden: int, vocab: int, tied: bool) -> ModelShape:
    """A small model of this family. Cached: shapes are compared by identity."""
    heads = max(1, hidden // 64)
    config: dict[str, Any] = {
        "model_type": family,
        "vocab_size": vocab,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "tie_word_embeddings": tied,
    }
    if family.startswith("mamba"):
        config |= {"state_size": 16, "expand": 2, "conv_kernel": 4, "n_groups": 1}
        config |= {"num_heads": 2 * heads, "head_dim": hidden // heads} if family == "mamba2" else {}
    else:
        config |= {"num_attention_heads": heads, "intermediate_size": 3 * hidden, "head_dim": hidden // heads}
        config |= {"num_key_value_heads": heads}
        config |= {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": hidden}
    return shape_from_config(config, family)


@lru_cache(maxsize=64)
def preset(name: str) -> ModelShape:
    return load_model(name)


def seeded(seed: int) -> Random:
    return Random(seed)  # noqa: S311


def machine(word: str, host_ram: str | None = "256GB", nvme: str | None = None) -> Hardware:
    return parse_hardware(word, host_ram=host_ram, nvme=nvme)


def card(hardware: Hardware, memory_bytes: int) -> Hardware:
    """The same with other cards: faster or slower they are not."""
    return replace(hardware, gpu=replace(hardware.gpu, memory_bytes=memory_bytes))


def ask(model: str | ModelShape, hardware: Hardware, **job: Any) -> Question:
    shape = preset(model) if isinstance(model, str) else model
    return question_of(Job(model=shape.name, **job), shape, hardware)


def fits(model: str | ModelShape, hardware: Hardware, **job: Any) -> bool:
    return search(ask(model, hardware, **job)).best is not None


# --- drawn by hypothesis ------------------------------------------------------------------------


@st.composite
def questions(draw: st.DrawFn) -> Question:
    """Any small model on any small machine; at most one lever pinned."""
    hidden = draw(st.sampled_from([64, 512, 2048]))
    shape = built(
        draw(st.sampled_from(FAMILIES)),
        draw(st.integers(1, 6)),
        hidden,
        draw(st.sampled_from([128, 5000, 50_000])),
        draw(st.booleans()),
    )
    method = draw(st.sampled_from(["full", "lora", "qlora"]))
    pins: list[dict[str, Any]] = [{}, {}, {"engine": "zero3"}, {"engine": "zero2"}, {"micro_batch": 1}]
    pins += [{"checkpointing": "none"}, {"loss": "fused"}, {"reduce_bucket": 1_000_000}]
    return ask(
        shape,
        machine(f"{draw(st.sampled_from([1, 2, 3, 4]))}x24GB", draw(st.sampled_from(["8GB", "16GB", "512GB"]))),
        method=method,
        sequence=draw(st.sampled_from([16, 128, 2048, 8192])),
        precision=draw(st.sampled_from(["bf16", "fp16", "fp32"])),
        **draw(st.sampled_from(({}, {"frozen_layers": 1}, {"trains": "embeddings"}))) if method == "full" else {},
        levers=draw(st.sampled_from(pins)),
    )


@st.composite
def corners_of_any_job(draw: st.DrawFn, *, streams: bool = True) -> tuple[Question, Corner]:
    """`streams`: also of layers that stream, of which no clock knows the times at every depth at once."""
    question = draw(questions())
    every = strategies(question.base, question.pinned, question.hardware)
    strategy = draw(st.sampled_from([levers for levers in every if streams or not levers.streams]))
    return question, draw(
        st.sampled_from(
            list(corners(question.shape, strategy, question.pinned, question.hardware, question.effective_batch))
        )
    )
