"""The door for levers: words and numbers from a command line become `Levers`, or one clear sentence.

All that is known of a lever stands on its field in `types.py`; here it is read. What a user said is a mapping of
flag → value, and what is not in it was not said: an explicit `--lora-rank 64` beside `--method full` is a mistake, the
usual rank is not. What a file said comes in as `base` and an explicit flag wins over it. The rules about which levers
go together live in `check_levers`, apart from the words, so that whoever makes Levers in another way can ask the same
question.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any, Literal, get_args, get_origin, get_type_hints

from tightfit.inputs.spelling import listed, nearest
from tightfit.types import ZERO3, Buckets, Checkpointing, ConfigError, Lever, Levers, Lora, ModelShape

MOST_BATCH = 1_000_000
"""Sequences a step, over all GPUs."""
MOST_TOKENS = 2**30
"""In one forward pass on one GPU."""

CHECKPOINTING = ("none", "full", "full+offload", "layers:K")
"""How a `Checkpointing` is said."""


def _levers_in(record: type, block: str) -> Iterator[Lever]:
    hints = get_type_hints(record)
    for each in fields(record):
        if "lever" in each.metadata:
            about: Lever = each.metadata["lever"]
            yield replace(
                about,
                flag=about.flag or each.name,
                name=each.name,
                block=block,
                default=each.default,
                type=hints[each.name],
            )
            continue
        inside = next((part for part in (hints[each.name], *get_args(hints[each.name])) if is_dataclass(part)), None)
        if isinstance(inside, type):
            yield from _levers_in(inside, each.name)


LEVERS: Mapping[str, Lever] = {lever.flag: lever for lever in _levers_in(Levers, "")}
"""Every lever that can be said, by the name of its flag, in the order of the fields."""

TRAINING = tuple(dict.fromkeys(lever.block or lever.name for lever in LEVERS.values() if not lever.free))
"""The fields of `Levers` that change the result."""


def words_of(lever: Lever) -> tuple[str, ...]:
    """The few words that it takes; empty: it takes something else."""
    if lever.type is Checkpointing:
        return CHECKPOINTING
    if is_on_or_off(lever):
        return ("on", "off")
    return get_args(lever.type) if get_origin(lever.type) is Literal else ()


def is_on_or_off(lever: Lever) -> bool:
    """Whether it is left to the engine where it is not said."""
    return get_args(lever.type) == (bool, type(None))


def _is_names(lever: Lever) -> bool:
    return any(get_origin(part) is tuple for part in get_args(lever.type))


def levers_from_flags(said: Mapping[str, Any], shape: ModelShape, base: Levers | None = None) -> Levers:
    """The levers that these flags mean for this model, on top of what a file said. None: not said."""
    base = base or Levers()
    given: dict[str, dict[str, Any]] = {}
    for flag, value in said.items():
        if value is not None:
            lever = LEVERS[flag]
            given.setdefault(lever.block, {})[lever.name] = read_lever(lever, value)
    changes, adapters, buckets = (given.get(block, {}) for block in ("", "lora", "buckets"))
    if changes.get("method", base.method) != "full":
        changes["lora"] = replace(base.lora or Lora(), **adapters)
    else:
        changes["lora"] = None
        unusual = {name for name, value in adapters.items() if value != getattr(Lora(), name)}
        for lever in LEVERS.values():
            if lever.block == "lora" and lever.name in unusual:
                raise ConfigError(f"{spelt(lever.flag)} needs --method lora or qlora: full training has no adapters")
    levers = replace(base, **changes, buckets=replace(base.buckets, **buckets))
    levers = _imply(levers, reuses="max_reuse_distance" in buckets)
    check_levers(levers, shape)
    return levers


def read_lever(lever: Lever, said: Any) -> Any:
    """The value of its field, from a word in any spelling or from a number in its range."""
    flag, words = spelt(lever.flag), words_of(lever)
    if lever.type is Checkpointing:
        return checkpointing_from_word(str(said))
    if words:
        word = str(said).lower()
        if word not in words:
            raise ConfigError(f"{flag} knows no {said!r}{meant(str(said), words)}")
        return word == "on" if is_on_or_off(lever) else word
    if lever.least is not None and said < lever.least:
        raise ConfigError(f"{flag} must be at least {lever.least}, not {said}")
    if lever.type is float and not 0 <= said < 1:
        raise ConfigError(f"{flag} must be from 0 to below 1, not {said:g}")
    if lever.form is not None and not re.fullmatch(lever.form[1], said):
        raise ConfigError(f"{flag} takes {lever.form[2]}, not {said!r}")
    if _is_names(lever):
        names = tuple(name.strip() for name in said.split(",") if name.strip())
        if not names:
            raise ConfigError(f"{flag} takes `all` or names such as q_proj,v_proj")
        return None if names == ("all",) else names
    return said


def check_levers(levers: Levers, shape: ModelShape) -> None:
    """Raise the first contradiction among the levers, or between them and the model."""
    for lever in _BOUNDED:
        value = lever_value(levers, lever)
        if value is not None and value > lever.most:
            raise ConfigError(f"{spelt(lever.flag)} must be at most {lever.most}, not {value}")
    _check_offload(levers)
    if levers.micro_batch * levers.sequence > MOST_TOKENS:
        raise ConfigError(
            f"--micro-batch {levers.micro_batch} × --seq {levers.sequence} must be at most {MOST_TOKENS} tokens in a "
            "forward pass: lower one"
        )
    if levers.micro_batch * levers.accumulation > MOST_BATCH:
        raise ConfigError(
            f"--micro-batch {levers.micro_batch} × --accum {levers.accumulation} must be at most "
            f"{MOST_BATCH} sequences a step: lower one"
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
    raise ConfigError(f"--checkpointing knows no {word!r}{meant(word, CHECKPOINTING)}")


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


def spelt(flag: str) -> str:
    """The flag as it is typed."""
    return "--" + flag.replace("_", "-")


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
    if levers.is_fsdp2 and levers.offload_param == "cpu" and levers.offload_optimizer == "none":
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
    if levers.lora is not None and levers.lora.dtype == "fp32" and levers.precision != "fp32":
        raise ConfigError(
            "--adapter-dtype fp32 with --offload-param nvme: DeepSpeed would swap the adapters in 16 bits, so use "
            "--adapter-dtype bf16 or --offload-param cpu"
        )


def _check_offload(levers: Levers) -> None:
    engine, optimizer, param = levers.engine, levers.offload_optimizer, levers.offload_param
    nvme = "--offload-optimizer" if optimizer == "nvme" else "--offload-param" if param == "nvme" else None
    if nvme and engine != ZERO3:
        raise ConfigError(f"{nvme} nvme needs --engine zero3: only DeepSpeed's ZeRO-3 reads NVMe, not {engine}")
    if param != "none" and not levers.shards_parameters:
        raise ConfigError(
            f"--offload-param {param} needs --engine zero3 or fsdp2: {engine} keeps whole weights on every GPU "
            "(--offload-param none overrules a file)"
        )
    if optimizer != "none" and engine == "zero0":
        raise ConfigError(f"--offload-optimizer {optimizer} needs --engine zero1, zero2 or zero3, not zero0")
    if optimizer != "none" and levers.is_fsdp2 and param == "none":
        raise ConfigError("FSDP2 offloads parameters and optimizer together: say --offload-param cpu with fsdp2")
    _check_swapped(levers)


def flags_from_levers(levers: Levers) -> dict[str, Any]:
    """The levers in the words of the command line, for a reader of JSON; what is left to the engine is not there."""
    plain: dict[str, Any] = {}
    for flag, lever in LEVERS.items():
        if lever.block and getattr(levers, lever.block) is None:
            continue
        value = lever_value(levers, lever)
        if lever.type is Checkpointing:
            value = checkpointing_word(value)
        elif _is_names(lever):
            value = ",".join(value) if value else "all"
        elif is_on_or_off(lever) and value is not None:
            value = "on" if value else "off"
        if value is not None and not (lever.type is float and value == 0):
            plain[flag] = value
    return plain


def lever_value(levers: Levers, lever: Lever) -> Any:
    """What its field holds; None also where there is no block for it."""
    block = getattr(levers, lever.block) if lever.block else levers
    return None if block is None else getattr(block, lever.name)


_BOUNDED = tuple(lever for lever in LEVERS.values() if lever.most is not None)
"""What a file or a flag can have made larger than anybody means."""


def levers_as_written(tree: Mapping[str, Any]) -> Levers:
    """The levers of a plan's `worker.json`, whose sense was checked when it was written. What an older version did not
    know has its default."""
    words, lora, adapters = tree["levers"], tree["lora"], None
    if lora is not None:
        named = {each.name: lora[each.name] for each in fields(Lora) if each.name in lora}
        adapters = Lora(**named | {"targets": None if lora["targets"] == "all" else tuple(lora["targets"])})
    own = {
        lever.name: read_lever(lever, words[flag])
        for flag, lever in LEVERS.items()
        if not lever.block and flag in words
    }
    own |= {"packed": tree["data"]["packing"], "gradient_clipping": tree["training"]["clip"] > 0}
    return Levers(**own, lora=adapters, buckets=Buckets(**tree["buckets"]))
