"""Words of a command line → Levers, or one sentence."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tightfit.inputs.flags import (
    checkpointing_from_word,
    checkpointing_word,
    flags_from_levers,
    levers_from_flags,
)
from tightfit.model.load import load_model, shape_from_config
from tightfit.types import Buckets, Checkpointing, ConfigError, Levers, Lora

LLAMA = load_model("tiny_llama")
MAMBA = load_model("tiny_mamba")


def test_nothing_said_is_the_defaults() -> None:
    assert levers_from_flags({}, LLAMA) == Levers()


def test_every_flag_reaches_its_lever() -> None:
    flags = {
        "method": "lora",
        "engine": "zero3",
        "seq": 512,
        "micro_batch": 2,
        "accum": 4,
        "precision": "FP16",
        "offload_optimizer": "nvme",
        "offload_param": "cpu",
        "checkpointing": "layers:3",
        "loss": "fused",
        "attention": "eager",
        "optimizer": "adamw8bit",
        "lora_rank": 16,
        "lora_targets": "q_proj, v_proj",
        "adapter_dtype": "fp32",
        "lora_dropout": 0.05,
        "reduce_bucket": 1,
        "allgather_bucket": 2,
        "prefetch_bucket": 3,
        "persistence_threshold": 4,
        "max_live_parameters": 5,
        "deepspeed_version": "0.16.4",
        "master_weights": False,
        "dataloader_workers": 2,
    }
    assert levers_from_flags(flags, LLAMA) == Levers(
        method="lora",
        engine="zero3",
        sequence=512,
        micro_batch=2,
        accumulation=4,
        precision="fp16",
        offload_optimizer="nvme",
        offload_param="cpu",
        checkpointing=Checkpointing(layers=3),
        loss="fused",
        attention="eager",
        optimizer="adamw8bit",
        lora=Lora(rank=16, targets=("q_proj", "v_proj"), dtype="fp32", dropout=0.05),
        buckets=replace(
            Buckets(),
            reduce_bucket=1,
            allgather_bucket=2,
            prefetch_bucket=3,
            persistence_threshold=4,
            max_live_parameters=5,
        ),
        deepspeed_version="0.16.4",
        master_weights=False,
        dataloader_workers=2,
    )
    assert levers_from_flags({"scan": "tightfit", "frozen_layers": 2}, MAMBA) == Levers(
        scan="tightfit", frozen_layers=2
    )
    assert levers_from_flags({"trains": "Embeddings"}, MAMBA) == Levers(trains="embeddings")


def test_a_flag_wins_over_a_file() -> None:
    base = Levers(method="lora", engine="zero2", lora=Lora(rank=64), sequence=99, buckets=Buckets(reduce_bucket=7))
    levers = levers_from_flags({"engine": "zero3", "lora_rank": 4, "prefetch_bucket": 9}, LLAMA, base)
    buckets = Buckets(reduce_bucket=7, prefetch_bucket=9)
    assert levers == replace(base, engine="zero3", lora=Lora(rank=4), buckets=buckets)
    assert levers_from_flags({"method": "full"}, LLAMA, base).lora is None


def test_adapters_have_a_rank_without_being_asked() -> None:
    assert levers_from_flags({"method": "qlora", "lora_targets": "all"}, LLAMA).lora == Lora(rank=8)


def test_fsdp2_offloads_all_together() -> None:
    levers = levers_from_flags({"engine": "fsdp2", "offload_param": "cpu"}, LLAMA)
    assert (levers.offload_param, levers.offload_optimizer) == ("cpu", "cpu")


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ({"engine": "zero4"}, "--engine knows no 'zero4': did you mean zero"),
        ({"method": "dpo"}, "it takes full, lora or qlora"),
        ({"optimizer": "adam"}, "did you mean adamw?"),
        ({"micro_batch": 0}, "--micro-batch must be at least 1, not 0"),
        ({"seq": -1}, "--seq must be at least 1, not -1"),
        ({"checkpointing": "select:mpl"}, "did you mean mlp?"),
        ({"checkpointing": "select:mlp+layers:x"}, "--checkpointing knows no"),
        ({"checkpointing": "select:auto,mlp"}, "leave the rest out, or name the parts without auto"),
        ({"checkpointing": "select:auto+layers:3"}, "leave the rest out, or name the parts without auto"),
        ({"checkpointing": "select:mlp+offload"}, "select:mlp+offload needs --compile layers"),
        ({"kernels": "fused", "compile": "layers"}, "no effect in compiled layers"),
        ({"kernels": "fused", "checkpointing": "select:mlp"}, "no effect in layers of which parts recompute"),
        ({"engine": "ddp", "optimizer": "adafactor"}, "use a ZeRO engine, or --optimizer adamw"),
        ({"engine": "ddp", "precision": "fp16", "master_weights": False}, "leave --no-master-weights out"),
        ({"checkpointing": "layer:3"}, "did you mean layers:K?"),
        ({"checkpointing": "layers:5"}, "more layers than the 4 of tiny_llama"),
        ({"frozen_layers": 5}, "more than the 4 layers of tiny_llama"),
        ({"frozen_layers": 1, "method": "lora"}, "--frozen-layers is for --method full"),
        ({"trains": "embedding"}, "--trains knows no 'embedding': did you mean embeddings?"),
        ({"trains": "embeddings", "method": "lora"}, "--trains embeddings is for --method full"),
        ({"trains": "embeddings", "frozen_layers": 1}, "and --frozen-layers freezes the embeddings too: leave one out"),
        ({"lora_rank": 64}, "--lora-rank needs --method lora or qlora"),
        ({"adapter_dtype": "fp32"}, "--adapter-dtype needs --method lora or qlora"),
        ({"lora_dropout": 0.1}, "--lora-dropout needs --method lora or qlora"),
        ({"method": "lora", "lora_dropout": 1.0}, "--lora-dropout must be from 0 to below 1, not 1"),
        ({"method": "lora", "lora_targets": "qproj"}, "did you mean q_proj?"),
        ({"method": "lora", "lora_targets": " , "}, "--lora-targets takes `all` or names"),
        ({"engine": "zero2", "offload_param": "cpu"}, "--offload-param cpu needs --engine zero3 or fsdp2"),
        ({"engine": "zero2", "offload_optimizer": "nvme"}, "--offload-optimizer nvme needs --engine zero3 or stream"),
        ({"engine": "fsdp2", "offload_param": "nvme"}, "--offload-param nvme needs --engine zero3"),
        ({"engine": "zero3", "offload_param": "nvme", "max_reuse_distance": 5}, "so leave it out or say 0"),
        ({"engine": "zero3", "offload_param": "nvme", "method": "qlora"}, "use --offload-param cpu, or --method lora"),
        (
            {"engine": "zero3", "offload_param": "nvme", "method": "lora", "adapter_dtype": "fp32"},
            "use --adapter-dtype bf16 or --offload-param cpu",
        ),
        ({"offload_optimizer": "cpu"}, "needs --engine zero1, zero2 or zero3, not zero0"),
        ({"engine": "fsdp2", "offload_optimizer": "cpu"}, "say --offload-param cpu with fsdp2"),
        ({"deepspeed_version": "latest"}, "--deepspeed-version takes a version such as"),
    ],
)
def test_contradictions_are_one_sentence(flags: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        levers_from_flags(flags, LLAMA)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_fused_loss_would_leave_out_the_heads_adapter() -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 8}
    apart = shape_from_config(
        {"model_type": "llama", "vocab_size": 512, "tie_word_embeddings": False, **sizes}, "apart"
    )
    flags = {"method": "lora", "lora_targets": "q_proj,lm_head"}
    assert levers_from_flags(flags, apart).loss == "plain"
    with pytest.raises(ConfigError, match="leave lm_head out of --lora-targets"):
        levers_from_flags({**flags, "loss": "fused"}, apart)


@pytest.mark.parametrize("method", ["lora", "qlora"])
@pytest.mark.parametrize("engine", ["zero3", "fsdp2"])
def test_adapters_under_sharding_are_allowed(method: str, engine: str) -> None:
    assert levers_from_flags({"method": method, "engine": engine}, LLAMA).engine == engine


@pytest.mark.parametrize("word", ["none", "full", "full+offload", "layers:2"])
def test_checkpointing_has_one_word_each_way(word: str) -> None:
    assert checkpointing_word(checkpointing_from_word(word)) == word


def test_levers_can_be_said_in_flags_again() -> None:
    levers = levers_from_flags({"method": "lora", "engine": "zero3", "checkpointing": "none", "scan": "torch"}, MAMBA)
    words = flags_from_levers(levers)
    known = {name: value for name, value in words.items() if value is not None}
    assert levers_from_flags(dict(**known), MAMBA) == levers


def test_experts_drop_no_inputs() -> None:
    """PEFT refuses it when the model is built; here it is said before."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 8}
    experts = shape_from_config({"model_type": "mixtral", "vocab_size": 512, "num_local_experts": 4, **sizes}, "some")
    with pytest.raises(ConfigError, match="--lora-dropout cannot drop inputs of experts, which some has"):
        levers_from_flags({"method": "lora", "lora_dropout": 0.1}, experts)
    levers = levers_from_flags({"method": "lora", "lora_dropout": 0.1, "lora_targets": "q_proj,v_proj"}, experts)
    assert levers.lora == Lora(targets=("q_proj", "v_proj"), dropout=0.1)


def test_what_cannot_be_traced_is_not_compiled() -> None:
    assert levers_from_flags({"compile": "layers", "engine": "fsdp2"}, LLAMA).compile == "layers"
    assert levers_from_flags({"compile": "layers"}, MAMBA).scan == "tightfit"  # the one that can be
    with pytest.raises(ConfigError, match="--engine fsdp2"):
        levers_from_flags({"compile": "layers", "engine": "zero3"}, LLAMA)
    with pytest.raises(ConfigError, match="--scan tightfit"):
        levers_from_flags({"compile": "layers", "scan": "official"}, MAMBA)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 8}
    experts = shape_from_config({"model_type": "mixtral", "vocab_size": 512, "num_local_experts": 4, **sizes}, "some")
    assert levers_from_flags({"compile": "layers"}, experts).compile == "layers"
    with pytest.raises(ConfigError, match="--precision bf16"):
        levers_from_flags({"compile": "layers", "precision": "fp16"}, experts)
    with pytest.raises(ConfigError, match="--lora-targets"):
        levers_from_flags({"compile": "layers", "method": "lora"}, experts)


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("select:auto", Checkpointing(layers=None, select=("auto",))),
        ("select:mlp,QKV", Checkpointing(layers=None, select=("elementwise", "qkv", "mlp"))),
        ("select:elementwise", Checkpointing(layers=None, select=("elementwise",))),
        ("select:mlp+layers:12", Checkpointing(layers=12, select=("elementwise", "mlp"))),
        ("select:mlp+layers:0", Checkpointing(layers=0)),
        ("select:mlp+offload", Checkpointing(layers=None, select=("elementwise", "mlp"), offload=True)),
        ("select:elementwise+offload+layers:3", Checkpointing(layers=3, select=("elementwise",), offload=True)),
    ],
)
def test_parts_that_recompute_are_named(word: str, meant: Checkpointing) -> None:
    assert checkpointing_from_word(word) == meant
    assert checkpointing_from_word(checkpointing_word(meant)) == meant
