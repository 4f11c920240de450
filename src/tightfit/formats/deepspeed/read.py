"""The door for an existing DeepSpeed config: what its JSON means for memory, or one clear sentence.

DeepSpeed forgives too much. A misspelt key is refused in the blocks that pydantic reads and ignored
without a word everywhere else, so `zero_optimisation` trains unsharded. `KEYS` therefore lists every
key of every block that DeepSpeed reads, and a test holds it against the installed DeepSpeed by
watching which keys its own config classes ask for.

`auto` is not DeepSpeed's word: the Hugging Face layer replaces it, three buckets by the model's hidden
size and the rest by the trainer's flags. What is left as `auto` after that, DeepSpeed drops and takes
its default. Both are done here the same way. Values that tightfit cannot price yet stay readable;
each is named in `because`, so that no estimate hides what it left out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast, get_args

from tightfit.formats.deepspeed.keys import KEYS, LOUD, PREFIXED, REMOVED, REMOVED_FROM_ZERO, REMOVED_IN, SCHEDULERS
from tightfit.inputs.spelling import Fields, nearest, read_text, shown, unknown_key
from tightfit.inputs.versions import release
from tightfit.messages import Choice, Message
from tightfit.types import STAGES, ZERO3, Buckets, ConfigError, Engine, Levers, Offload, Optimizer, Precision

_ENGINES: tuple[Engine, ...] = tuple(STAGES)


_PINNED_SINCE = "0.19.5"
"""From here on offloaded memory is pinned unless the file says otherwise."""

_ZERO_BLOCKS = frozenset(path for path in KEYS if path.startswith("zero_optimization."))
_NULL_BLOCKS = _ZERO_BLOCKS.union(("aio", "bf16", "optimizer.params", "scheduler.params"))
"""Blocks that may be null."""

_OPTIMIZERS: dict[str, Optimizer] = {"adam": "adamw", "adamw": "adamw", "SGD": "sgd", "Adafactor": "adafactor"}
"""DeepSpeed's own in any case of letters, torch.optim's by their exact names."""

_UNPRICED = """zero_optimization.zenflow zero_optimization.zero_hpz_partition_size
    zero_optimization.zero_quantized_weights zero_optimization.zero_quantized_nontrainable_weights
    zero_optimization.zero_quantized_gradients zero_optimization.offload_optimizer.ratio
    zero_optimization.offload_optimizer.super_offload zero_optimization.model_persistence_threshold
    zero_optimization.stage3_model_persistence_threshold bf16.bf16_optimizer_states data_types.grad_accum_dtype
    communication_data_type torch_autocast.enabled tensor_parallel.autotp_size expert_parallel.enabled
    sequence_parallel_size compile.deepcompile zero_optimization.stage3_gather_16bit_weights_on_model_save""".split()
"""Settings that move memory and that Levers cannot say. Off, or one: they change nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepSpeedSettings:
    """What a DeepSpeed file says. None: the file leaves it to the trainer's flags, or says `auto`."""

    file: str
    engine: Engine
    offload_optimizer: Offload
    offload_param: Offload
    buckets: Buckets
    precision: Precision | None
    micro_batch: int | None
    accumulation: int | None
    train_batch: int | None
    """Samples a step over all GPUs."""
    gradient_clipping: float | None
    optimizer: Optimizer | None
    master_weights: bool
    cpu_checkpointing: bool
    """`activation_checkpointing.cpu_checkpointing`; acts only on models that call DeepSpeed's own checkpointing."""
    because: tuple[Message, ...]


def read_deepspeed(
    path: str | Path, *, hidden_size: int | None, version: str = Levers().deepspeed_version
) -> DeepSpeedSettings:
    """Read a DeepSpeed JSON or Hjson file; `hidden_size` is what the Hugging Face layer fills `auto` with."""
    file, text = Path(path).name, read_text(Path(path), "JSON")
    because: list[Message] = []
    try:
        values = json.loads(text, object_pairs_hook=_no_duplicates)
    except (ValueError, RecursionError) as plain:
        import hjson

        try:
            values = hjson.loads(text, object_pairs_hook=_no_duplicates)
        except (ValueError, OverflowError, RecursionError) as error:  # int() refuses thousands of digits, too
            # Hjson forgives so much that its complaint about a missing comma is no help: then JSON's is given.
            no_help = isinstance(error, hjson.HjsonDecodeError) and not re.search(r"//|/\*|#", text)
            cause = str(plain if no_help else error)
            said = Message("deepspeed.no-json", file=file, cause=cause[:1].lower() + cause[1:])
            raise ConfigError(said) from None
        because.append(Message("deepspeed.is-hjson", file=file))
    if not isinstance(values, dict) or not text.strip():
        raise ConfigError(Message("deepspeed.no-object", file=file))
    _check_keys(values, file, "", version)
    top = Fields(values=values, file=file, silent=(None, "auto"))
    zero = _block(top, "zero_optimization")
    if zero.values.get("stage") == "auto":
        raise ConfigError(Message("deepspeed.stage-auto", file=zero.file), at="zero_optimization.stage")
    stage = zero.integer("stage") or 0
    if stage >= len(_ENGINES):
        raise zero.wrong("stage", "0, 1, 2 or 3")
    offload_param = _offload(zero, "offload_param", stage)
    offload_optimizer = _offload(zero, "offload_optimizer", stage)
    for place in _UNPRICED:
        value: Any = values
        for key in place.split("."):
            value = value.get(key) if isinstance(value, Mapping) else None
        changes_nothing = value is None or value is False or value == "auto" or (value == 1 and value is not True)
        if not changes_nothing:
            because.append(Message("deepspeed.not-priced", key=place, file=file))
    cpu_checkpointing = bool(_block(top, "activation_checkpointing").switch("cpu_checkpointing"))
    if "activation_checkpointing" in values:
        because.append(Message("deepspeed.checkpointing-from-flags", file=file))
    return DeepSpeedSettings(
        file=file,
        engine=_ENGINES[stage],
        offload_optimizer=offload_optimizer,
        offload_param=offload_param,
        buckets=_buckets(zero, stage, hidden_size, version, because),
        precision=_precision(top, because),
        micro_batch=top.integer("train_micro_batch_size_per_gpu", least=1),
        accumulation=top.integer("gradient_accumulation_steps", least=1),
        train_batch=top.integer("train_batch_size", least=1),
        gradient_clipping=top.number("gradient_clipping"),
        optimizer=_optimizer(top),
        master_weights=_master_weights(top, stage, offload_optimizer),
        cpu_checkpointing=cpu_checkpointing,
        because=tuple(because),
    )


def to_levers(settings: DeepSpeedSettings, base: Levers, *, world: int | None = None) -> Levers:
    """The base with what the file says; what the file leaves open stays as it is.

    With `world` the batch sizes are completed and checked as DeepSpeed does. Below zero.Init DeepSpeed
    casts every parameter to the training precision, adapters included, whatever the trainer did before.
    """
    precision = settings.precision or base.precision
    lora = base.lora
    if lora is not None and settings.engine != ZERO3 and precision != "fp32":
        lora = replace(lora, dtype="bf16")
    micro, accumulation, total = settings.micro_batch, settings.accumulation, settings.train_batch
    if total is not None and world is not None:
        if micro is None:
            accumulation = accumulation or 1
            micro = total // (world * accumulation)
        elif accumulation is None:
            accumulation = total // (micro * world)
        product = micro * accumulation * world
        if product != total:
            said = Message(
                "deepspeed.batch-is-not",
                total=total,
                file=settings.file,
                micro=micro,
                accumulation=accumulation,
                world=world,
                product=product,
            )
            raise ConfigError(said)
    clipping = settings.gradient_clipping
    return replace(
        base,
        engine=settings.engine,
        offload_optimizer=settings.offload_optimizer,
        offload_param=settings.offload_param,
        buckets=settings.buckets,
        precision=precision,
        micro_batch=micro or base.micro_batch,
        accumulation=accumulation or base.accumulation,
        gradient_clipping=base.gradient_clipping if clipping is None else clipping > 0,
        optimizer=settings.optimizer or base.optimizer,
        master_weights=settings.master_weights and base.master_weights,
        lora=lora,
    )


# --- the file -----------------------------------------------------------------------------------


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """DeepSpeed refuses duplicates; plain JSON readers keep the last and say nothing."""
    values = dict(pairs)
    if len(values) != len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ConfigError(Message("deepspeed.key-twice", key=twice, fix=Message("lint.keep-one")), at=twice)
    return values


def _check_keys(values: Mapping[str, Any], file: str, path: str, version: str) -> None:
    """Raise at the first key that DeepSpeed does not know, in any block."""
    for key, value in values.items():
        child = f"{path}.{key}" if path else key
        if key not in KEYS[path]:
            if not path and key.startswith(("_", "#", "//")):
                continue  # the usual way to leave a comment in plain JSON
            removed = REMOVED if not path else REMOVED_FROM_ZERO if path == "zero_optimization" else frozenset()
            if key not in removed:
                raise _unknown(key, file, path)
            if release(version) >= release(REMOVED_IN):
                said = Message(
                    "deepspeed.key-removed", key=child, file=file, version=version, fix=Message("lint.delete")
                )
                raise ConfigError(said, at=child)
        elif child in KEYS and isinstance(value, Mapping):
            if child != "scheduler.params" or values.get("type") in SCHEDULERS:
                _check_keys(value, file, child, version)
        elif child in KEYS and not (value is None and child in _NULL_BLOCKS) and not (value == "auto" and path):
            raise ConfigError(Message("deepspeed.no-block", key=child, file=file, value=shown(value)), at=child)


def _unknown(key: str, file: str, path: str) -> ConfigError:
    where = Message("deepspeed.block-of-file", block=path, file=file) if path else file
    aside = Message("deepspeed.would-refuse" if path in LOUD else "deepspeed.would-ignore")
    homes = [home for home, keys in KEYS.items() if key in keys and home != "bfloat16"]
    if len(homes) == 1 and not nearest(key, KEYS[path], cutoff=0.9):
        return ConfigError(
            Message("deepspeed.key-elsewhere", key=key, where=where, home=homes[0], aside=aside)
            if homes[0]
            else Message("deepspeed.key-at-top", key=key, where=where, aside=aside)
        )
    return unknown_key(key, KEYS[path], str(where), aside=str(aside))


# --- the blocks ---------------------------------------------------------------------------------


def _block(parent: Fields, key: str) -> Fields:
    """A block of the file, empty where there is none. Below the top level null is a value, and a wrong one."""
    value = parent.values.get(key)
    values = value if isinstance(value, Mapping) else {}
    return Fields(values=values, file=parent.file, path=parent.name(key), silent=("auto",))


def _offload(zero: Fields, kind: str, stage: int) -> Offload:
    old = {"offload_optimizer": "cpu_offload", "offload_param": "cpu_offload_param"}[kind]
    block = _block(zero, kind)
    word = block.word("device", get_args(Offload)) or "none"
    if old in zero.values and zero.values[old] is not None:
        if isinstance(zero.values.get(kind), Mapping):
            said = Message(
                "deepspeed.old-and-new",
                key=zero.name(old),
                kind=kind,
                file=zero.file,
                fix=Message("lint.keep", key=kind),
            )
            raise ConfigError(said, at=zero.name(old))
        word = "cpu" if zero.switch(old) else "none"
    ratio = block.number("ratio", most=1.0)
    partial = "ratio" if ratio is not None and ratio < 1 else "super_offload" if block.switch("super_offload") else None
    if partial and stage < 3:
        key = block.name(partial)
        raise ConfigError(Message("deepspeed.needs-stage3", key=key, file=block.file, stage=stage), at=key)
    device = cast(Offload, word)
    if device == "none":
        return "none"
    wrong = None
    if kind == "offload_param" and stage < 3:
        wrong = "deepspeed.weights-need-stage3"
    elif stage == 0:
        wrong = "deepspeed.offload-needs-stage"
    elif device == "nvme" and stage < 3:
        wrong = "deepspeed.nvme-needs-stage3"
    if wrong:
        said = Message(wrong, key=zero.name(kind), device=device, file=zero.file, stage=stage)
        raise ConfigError(said, at=zero.name(kind))
    if device == "nvme" and block.text("nvme_path") is None:
        said = Message("deepspeed.needs-nvme-path", key=zero.name(kind), device=device, file=zero.file)
        raise ConfigError(said, at=zero.name(kind))
    return device


def _buckets(zero: Fields, stage: int, hidden_size: int | None, version: str, because: list[Message]) -> Buckets:
    # what `auto` becomes in the three keys that Hugging Face fills from the model (transformers' own formulas)
    filled: dict[str, int] = {}
    keys = ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold")
    if asked := [key for key in keys if zero.values.get(key) == "auto"]:
        if hidden_size is None:
            raise ConfigError(Message("deepspeed.auto-needs-model", key=asked[0], file=zero.file))
        sizes = (hidden_size * hidden_size, int(0.9 * hidden_size * hidden_size), 10 * hidden_size)
        for key, value in zip(keys, sizes, strict=True):
            if key in asked and (stage == 3 or not key.startswith("stage3_")):
                filled[key] = value
                because.append(
                    Message("deepspeed.auto-filled", key=key, file=zero.file, value=value, hidden_size=hidden_size)
                )
    # of `key` and `stage3_key` the one that the file has; the one that Hugging Face fills in if neither
    used: dict[str, str] = {}
    for key in PREFIXED:
        if key in zero.values and f"stage3_{key}" in zero.values:
            twice = Message("deepspeed.same-key", key=key, file=zero.file, fix=Message("lint.keep-one"))
            raise ConfigError(twice, at=zero.name(key))
        used[key] = key if key in zero.values else f"stage3_{key}"
    plain = Buckets()
    param, optimizer = _block(zero, "offload_param"), _block(zero, "offload_optimizer")

    def size(key: str, default: int, *, block: Fields = zero, least: int = 0) -> int:
        key = used.get(key, key)
        value = block.integer(key, least=least)
        return filled.get(key, default) if value is None else value

    sequential = zero.switch(used["allgather_sequential"])
    prefetch = size("prefetch_bucket_size", plain.prefetch_bucket)
    # DeepSpeed pins each kind apart and Levers both together: the optimizer's word, being the larger, counts
    said = [block.switch("pin_memory") for block in (optimizer, param) if block.says("pin_memory")]
    return Buckets(
        reduce_bucket=size("reduce_bucket_size", plain.reduce_bucket, least=1),
        allgather_bucket=size("allgather_bucket_size", plain.allgather_bucket),
        prefetch_bucket=1 if sequential else prefetch,  # as the engine sets it
        persistence_threshold=size("param_persistence_threshold", plain.persistence_threshold),
        max_live_parameters=size("max_live_parameters", plain.max_live_parameters),
        max_reuse_distance=size("max_reuse_distance", plain.max_reuse_distance),
        sub_group_size=size("sub_group_size", plain.sub_group_size),
        overlap_comm=None if zero.values.get("overlap_comm") is None else zero.switch("overlap_comm"),
        contiguous_gradients=zero.switch("contiguous_gradients") is not False,
        pin_memory=said[0] is True if said else release(version) >= release(_PINNED_SINCE),
        param_buffer_count=size("buffer_count", plain.param_buffer_count, block=param),
        param_buffer_size=size("buffer_size", 100_000_000, block=param) if param.values else None,
        optimizer_buffer_count=size("buffer_count", plain.optimizer_buffer_count, block=optimizer),
    )


def _precision(top: Fields, because: list[Message]) -> Precision | None:
    if "bf16" in top.values and "bfloat16" in top.values:
        raise ConfigError(
            Message("deepspeed.bf16-twice", file=top.file, fix=Message("lint.keep", key="bf16")), at="bfloat16"
        )
    bf16 = _block(top, "bf16" if "bf16" in top.values else "bfloat16")
    fp16 = _block(top, "fp16")
    if bf16.switch("enabled") and fp16.switch("enabled"):
        raise ConfigError(
            Message("deepspeed.both-precisions", file=top.file, fix=Message("lint.keep-one")), at="fp16.enabled"
        )
    if bf16.switch("enabled"):
        return "bf16"
    if fp16.switch("enabled"):
        return "fp16"
    if "auto" in (bf16.values.get("enabled"), fp16.values.get("enabled")):
        return None
    if fp16.values or bf16.values:
        return "fp32"
    because.append(Message("deepspeed.no-precision", file=top.file))
    return None


def _optimizer(top: Fields) -> Optimizer | None:
    block = _block(top, "optimizer")
    kind = block.text("type")
    if kind is None:
        return None
    if found := _OPTIMIZERS.get(kind.lower()) or _OPTIMIZERS.get(kind):
        return found
    names = ("AdamW", "Adam", "SGD", "Adafactor")
    close = nearest(kind, names, cutoff=0.8)
    if close:
        said = Message("deepspeed.optimizer-meant", kind=shown(kind), file=top.file, close=close)
    else:
        said = Message("deepspeed.optimizer-unknown", kind=shown(kind), file=top.file, names=Choice(names))
    raise ConfigError(said, at=block.name("type"))


def _master_weights(top: Fields, stage: int, offload: Offload) -> bool:
    """False where the file keeps the master weights in 16 bits; DeepSpeed has conditions for that."""
    for name in ("bf16", "bfloat16", "fp16"):
        block = _block(top, name)
        key = f"{'fp16' if name == 'fp16' else 'bf16'}_master_weights_and_grads"
        if not block.switch(key):
            if name != "fp16" and block.switch("bf16_optimizer_states"):
                states = block.name("bf16_optimizer_states")
                raise ConfigError(Message("deepspeed.needs-as-well", key=states, file=top.file, other=key), at=states)
            continue
        if stage == 0:
            said = Message("deepspeed.needs-a-stage", key=block.name(key), file=top.file)
            raise ConfigError(said, at=block.name(key))
        if offload == "none" and (name == "fp16" or not block.switch("bf16_optimizer_states")):
            said = Message("deepspeed.needs-offload", key=block.name(key), file=top.file)
            raise ConfigError(said, at=block.name(key))
        return False
    return True
