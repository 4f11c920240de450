"""The door for levers: words and numbers from a command line become `Levers`, or one clear sentence.

A flag that was not given is None here, never its default: an explicit `--lora-rank 64` beside
`--method full` is a mistake, the usual rank is not. What a file said comes in as `base`
and an explicit flag wins over it. The rules about which levers go together live in `check_levers`,
apart from the words, so that whoever makes Levers in another way can ask the same question.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, get_args

from tightfit.inputs.spelling import listed, nearest
from tightfit.types import (
    AttentionKernel,
    Buckets,
    Checkpointing,
    ConfigError,
    Engine,
    Levers,
    Lora,
    Loss,
    Method,
    ModelShape,
    Offload,
    Optimizer,
    Precision,
    Scan,
    Trains,
)

ADAPTER_DTYPES = ("fp32", "bf16")

WORDS: dict[str, tuple[str, ...]] = {
    "method": get_args(Method),
    "engine": get_args(Engine),
    "precision": get_args(Precision),
    "offload_optimizer": get_args(Offload),
    "offload_param": get_args(Offload),
    "loss": get_args(Loss),
    "attention": get_args(AttentionKernel),
    "optimizer": get_args(Optimizer),
    "adapter_dtype": ADAPTER_DTYPES,
    "scan": get_args(Scan),
    "trains": get_args(Trains),
    "overlap_comm": ("on", "off"),
}
"""The flags that take one of a few words. The command line's help is made from this."""

LEAST: dict[str, int] = {
    "seq": 1,
    "micro_batch": 1,
    "accum": 1,
    "lora_rank": 1,
    "reduce_bucket": 1,
    "allgather_bucket": 1,
    "prefetch_bucket": 0,
    "persistence_threshold": 0,
    "max_live_parameters": 0,
    "max_reuse_distance": 0,
    "frozen_layers": 0,
    "dataloader_workers": 0,
}
"""The flags that take a whole number, and the smallest that makes sense."""

SHARES = ("lora_dropout",)
"""The flags that take a number from 0 to below 1."""

MOST: dict[str, int] = {
    "seq": 16_777_216,
    "effective_batch": 1_000_000,
    "micro_batch": 65_536,
    "accum": 1_000_000,
    "lora_rank": 65_536,
    "reduce_bucket": 100_000_000_000,
    "allgather_bucket": 100_000_000_000,
    "prefetch_bucket": 100_000_000_000,
    "dataloader_workers": 1_024,
}
"""The largest that anybody can mean: no model reads longer texts, none is wider. More would only keep the search busy,
which tries what divides a batch, and its answer would be of no use."""

MOST_TOKENS = 2**30
"""In one forward pass on one GPU."""

_LEVER_OF_FLAG = {
    "method": "method",
    "engine": "engine",
    "seq": "sequence",
    "micro_batch": "micro_batch",
    "accum": "accumulation",
    "precision": "precision",
    "offload_optimizer": "offload_optimizer",
    "offload_param": "offload_param",
    "loss": "loss",
    "attention": "attention",
    "optimizer": "optimizer",
    "scan": "scan",
    "deepspeed_version": "deepspeed_version",
    "master_weights": "master_weights",
    "frozen_layers": "frozen_layers",
    "trains": "trains",
    "dataloader_workers": "dataloader_workers",
}
_BUCKET_FLAGS = (
    "reduce_bucket",
    "allgather_bucket",
    "prefetch_bucket",
    "persistence_threshold",
    "max_live_parameters",
    "max_reuse_distance",
)
LORA_FLAGS = {
    "lora_rank": Lora().rank,
    "lora_targets": "all",
    "adapter_dtype": Lora().adapter_dtype,
    "lora_dropout": Lora().dropout,
}
"""With their defaults, which a program may pass whatever the method is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Flags:
    """What the user said about the levers, a field a flag; None: not said."""

    method: str | None = None
    engine: str | None = None
    seq: int | None = None
    micro_batch: int | None = None
    accum: int | None = None
    precision: str | None = None
    offload_optimizer: str | None = None
    offload_param: str | None = None
    checkpointing: str | None = None
    loss: str | None = None
    attention: str | None = None
    optimizer: str | None = None
    lora_rank: int | None = None
    lora_targets: str | None = None
    adapter_dtype: str | None = None
    lora_dropout: float | None = None
    scan: str | None = None
    reduce_bucket: int | None = None
    allgather_bucket: int | None = None
    prefetch_bucket: int | None = None
    persistence_threshold: int | None = None
    max_live_parameters: int | None = None
    max_reuse_distance: int | None = None
    overlap_comm: str | None = None
    deepspeed_version: str | None = None
    master_weights: bool | None = None
    frozen_layers: int | None = None
    trains: str | None = None
    dataloader_workers: int | None = None

    def given(self) -> dict[str, Any]:
        """The flags that were said, by name."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if value is not None}


def levers_from_flags(flags: Flags, shape: ModelShape, base: Levers | None = None) -> Levers:
    """The levers that these flags mean for this model, on top of what a file said."""
    base = base or Levers()
    given = _checked_words(flags.given())
    changes = {lever: given[flag] for flag, lever in _LEVER_OF_FLAG.items() if flag in given}
    buckets = {flag: given[flag] for flag in _BUCKET_FLAGS if flag in given}
    if "overlap_comm" in given:
        buckets["overlap_comm"] = given["overlap_comm"] == "on"
    if buckets:
        changes["buckets"] = replace(base.buckets, **buckets)
    if "checkpointing" in given:
        changes["checkpointing"] = checkpointing_from_word(given["checkpointing"])
    changes["lora"] = _lora(given, changes.get("method", base.method), base.lora)
    levers = replace(base, **changes)
    levers = _imply(levers, reuses="max_reuse_distance" in given)
    check_levers(levers, shape)
    return levers


def check_levers(levers: Levers, shape: ModelShape) -> None:
    """Raise the first contradiction among the levers, or between them and the model."""
    for flag, value in _bounded(levers).items():
        if value > MOST[flag]:
            raise ConfigError(f"{spelt(flag)} must be at most {MOST[flag]}, not {value}")
    _check_offload(levers)
    if levers.micro_batch * levers.sequence > MOST_TOKENS:
        raise ConfigError(
            f"--micro-batch {levers.micro_batch} × --seq {levers.sequence} must be at most {MOST_TOKENS} tokens in a "
            "forward pass: lower one"
        )
    if levers.micro_batch * levers.accumulation > MOST["effective_batch"]:
        raise ConfigError(
            f"--micro-batch {levers.micro_batch} × --accum {levers.accumulation} must be at most "
            f"{MOST['effective_batch']} sequences a step: lower one"
        )
    depth = shape.n_layers
    recomputed = levers.checkpointing.layers
    if recomputed is not None and recomputed > depth:
        raise ConfigError(f"--checkpointing layers:{recomputed} asks for more layers than the {depth} of {shape.name}")
    if levers.frozen_layers > depth:
        raise ConfigError(f"--frozen-layers {levers.frozen_layers} is more than the {depth} layers of {shape.name}")
    if levers.frozen_layers and levers.method != "full":
        raise ConfigError(
            f"--frozen-layers is for --method full: {levers.method} freezes every weight of the model already"
        )
    _check_trains(levers)
    if levers.loss == "fused" and shape.final_softcap:
        raise ConfigError(f"--loss fused cannot soft-cap logits, which {shape.name} does: use --loss plain")
    if levers.lora is not None and levers.lora.targets is not None:
        _check_targets(levers.lora.targets, shape)
    elif levers.lora is not None and levers.lora.dropout and any(block.lora_on_experts for block in shape.blocks):
        raise ConfigError(
            f"--lora-dropout cannot drop inputs of experts, which {shape.name} has: leave it out, or name other layers "
            "with --lora-targets"
        )


def _bounded(levers: Levers) -> dict[str, int]:
    """What a file or a flag can have made larger than anybody means."""
    return {
        "seq": levers.sequence,
        "micro_batch": levers.micro_batch,
        "accum": levers.accumulation,
        "lora_rank": 0 if levers.lora is None else levers.lora.rank,
        "reduce_bucket": levers.buckets.reduce_bucket,
        "allgather_bucket": levers.buckets.allgather_bucket,
        "prefetch_bucket": levers.buckets.prefetch_bucket,
        "dataloader_workers": levers.dataloader_workers,
    }


def _check_trains(levers: Levers) -> None:
    if levers.trains == "all":
        return
    if levers.method != "full":
        raise ConfigError(
            f"--trains {levers.trains} is for --method full: {levers.method} trains adapters and nothing else"
        )
    if levers.frozen_layers:
        raise ConfigError(
            f"--trains {levers.trains} says what is frozen, and --frozen-layers freezes the embeddings too: "
            "leave one out"
        )


def checkpointing_from_word(word: str) -> Checkpointing:
    """`none`, `full`, `full+offload` or `layers:K`."""
    plain = {
        "none": Checkpointing(layers=0),
        "full": Checkpointing(layers=None),
        "full+offload": Checkpointing(layers=None, offload=True),
    }
    word = word.lower()
    if word in plain:
        return plain[word]
    if found := re.fullmatch(r"layers:(\d+)", word):
        return Checkpointing(layers=int(found[1]))
    raise ConfigError(f"--checkpointing knows no {word!r}{meant(word, [*plain, 'layers:K'])}")


def checkpointing_word(checkpointing: Checkpointing) -> str:
    """The word that gives this value."""
    if checkpointing.layers is None:
        return "full+offload" if checkpointing.offload else "full"
    return f"layers:{checkpointing.layers}" if checkpointing.layers else "none"


def meant(word: str, known: Iterable[str]) -> str:
    """The tail of a sentence about a wrong word: what would have been right."""
    words = list(known)
    close = nearest(word, words)
    return f": did you mean {close}?" if close else f": it takes {listed(words)}"


def _checked_words(given: dict[str, Any]) -> dict[str, Any]:
    """The same flags with words in their one spelling and numbers in their range."""
    checked = dict(given)
    for flag, words in WORDS.items():
        if flag in given:
            checked[flag] = given[flag].lower()
            if checked[flag] not in words:
                raise ConfigError(f"{spelt(flag)} knows no {given[flag]!r}{meant(given[flag], words)}")
    for flag, least in LEAST.items():
        if flag in given and given[flag] < least:
            raise ConfigError(f"{spelt(flag)} must be at least {least}, not {given[flag]}")
    for flag in SHARES:
        if not 0 <= given.get(flag, 0) < 1:
            raise ConfigError(f"{spelt(flag)} must be from 0 to below 1, not {given[flag]:g}")
    version = given.get("deepspeed_version")
    if version is not None and not re.fullmatch(r"\d+\.\d+(\.\d+)?([.+]?\w+)*", version):
        raise ConfigError(f"--deepspeed-version takes a version such as {Levers().deepspeed_version}, not {version!r}")
    return checked


def spelt(flag: str) -> str:
    """The flag as it is typed."""
    return "--" + flag.replace("_", "-")


def _lora(given: dict[str, Any], method: Method, base: Lora | None) -> Lora | None:
    if method == "full":
        said = next((flag for flag, usual in LORA_FLAGS.items() if given.get(flag, usual) != usual), None)
        if said:
            raise ConfigError(f"{spelt(said)} needs --method lora or qlora: full training has no adapters")
        return None
    lora = base or Lora()
    if "lora_rank" in given:
        lora = replace(lora, rank=given["lora_rank"])
    if "adapter_dtype" in given:
        lora = replace(lora, adapter_dtype=given["adapter_dtype"])
    if "lora_dropout" in given:
        lora = replace(lora, dropout=given["lora_dropout"])
    if "lora_targets" in given:
        lora = replace(lora, targets=_targets(given["lora_targets"]))
    return lora


def _targets(words: str) -> tuple[str, ...] | None:
    names = tuple(name.strip() for name in words.split(",") if name.strip())
    if not names:
        raise ConfigError("--lora-targets takes `all` or names such as q_proj,v_proj")
    return None if names == ("all",) else names


def _check_targets(targets: tuple[str, ...], shape: ModelShape) -> None:
    """A name must end some linear layer's path, as PEFT matches it."""
    inside = [tensor for block in shape.blocks for tensor in block.tensors]
    paths = [t.name.rpartition(".")[0] for t in (*inside, *shape.before, *shape.after) if t.is_linear]
    for target in targets:
        if not any(path == target or path.endswith("." + target) for path in paths):
            names = sorted({path.rpartition(".")[2] for path in paths})
            raise ConfigError(f"{shape.name} has no layer called {target!r} for --lora-targets{meant(target, names)}")


def _imply(levers: Levers, *, reuses: bool) -> Levers:
    """FSDP2 has one offload policy, for parameters, gradients and optimizer together. `reuses`: somebody said how far
    ahead a weight is kept for its next use."""
    if not reuses:
        levers = released_at_once(levers)
    if levers.engine == "fsdp2" and levers.offload_param == "cpu" and levers.offload_optimizer == "none":
        return replace(levers, offload_optimizer="cpu")
    return levers


def released_at_once(levers: Levers) -> Levers:
    """Weights on NVMe: each that waits for its next use keeps one of a few buffers, and DeepSpeed runs out of them."""
    if levers.offload_param != "nvme":
        return levers
    return replace(levers, buckets=replace(levers.buckets, max_reuse_distance=0))


def _check_swapped(levers: Levers) -> None:
    """What DeepSpeed does wrong with weights on NVMe: it has few buffers, all of the model's own dtype."""
    if levers.offload_param != "nvme":
        return
    if levers.buckets.max_reuse_distance:
        raise ConfigError(
            f"--max-reuse-distance {levers.buckets.max_reuse_distance} with --offload-param nvme: DeepSpeed would run "
            "out of buffers, so leave it out or say 0"
        )
    if levers.method == "qlora":
        raise ConfigError("--offload-param nvme swaps no 4-bit weights: use --offload-param cpu, or --method lora")
    if levers.lora is not None and levers.lora.adapter_dtype == "fp32" and levers.precision != "fp32":
        raise ConfigError(
            "--adapter-dtype fp32 with --offload-param nvme: DeepSpeed would swap the adapters in 16 bits, so use "
            "--adapter-dtype bf16 or --offload-param cpu"
        )


def _check_offload(levers: Levers) -> None:
    engine, optimizer, param = levers.engine, levers.offload_optimizer, levers.offload_param
    nvme = "--offload-optimizer" if optimizer == "nvme" else "--offload-param" if param == "nvme" else None
    if nvme and engine != "zero3":
        raise ConfigError(f"{nvme} nvme needs --engine zero3: only DeepSpeed's ZeRO-3 reads NVMe, not {engine}")
    if param != "none" and engine not in ("zero3", "fsdp2"):
        raise ConfigError(
            f"--offload-param {param} needs --engine zero3 or fsdp2: {engine} keeps whole weights on every GPU "
            "(--offload-param none overrules a file)"
        )
    if optimizer != "none" and engine == "zero0":
        raise ConfigError(f"--offload-optimizer {optimizer} needs --engine zero1, zero2 or zero3, not zero0")
    if optimizer != "none" and engine == "fsdp2" and param == "none":
        raise ConfigError("FSDP2 offloads parameters and optimizer together: say --offload-param cpu with fsdp2")
    _check_swapped(levers)


def flags_from_levers(levers: Levers) -> dict[str, object]:
    """The levers in the words of the command line, for a reader of JSON."""
    plain: dict[str, object] = {flag: getattr(levers, lever) for flag, lever in _LEVER_OF_FLAG.items()}
    plain["checkpointing"] = checkpointing_word(levers.checkpointing)
    if levers.lora is not None:
        plain["lora_rank"] = levers.lora.rank
        plain["lora_targets"] = ",".join(levers.lora.targets) if levers.lora.targets else "all"
        plain["adapter_dtype"] = levers.lora.adapter_dtype
        if levers.lora.dropout:
            plain["lora_dropout"] = levers.lora.dropout
    if levers.buckets.overlap_comm is not None:
        plain["overlap_comm"] = "on" if levers.buckets.overlap_comm else "off"
    return plain | {flag: getattr(levers.buckets, flag) for flag in _BUCKET_FLAGS}


def levers_as_written(words: Mapping[str, Any], buckets: Mapping[str, Any], lora: Mapping[str, Any] | None) -> Levers:
    """The levers of a plan's `worker.json`, whose sense was checked when it was written."""
    adapters = None
    if lora is not None:
        targets = None if lora["targets"] == "all" else tuple(lora["targets"])
        adapters = Lora(rank=lora["rank"], targets=targets, adapter_dtype=lora["dtype"], dropout=lora["dropout"])
    return Levers(
        **{lever: words[flag] for flag, lever in _LEVER_OF_FLAG.items()},
        checkpointing=checkpointing_from_word(words["checkpointing"]),
        lora=adapters,
        buckets=Buckets(**buckets),
    )
