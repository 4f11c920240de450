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

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast, get_args

from tightfit.formats.deepspeed.keys import GONE, KEYS, LOUD, PREFIXED, REMOVED_IN, SCHEDULER_PARAMS, UNPRICED
from tightfit.formats.document import parse_json_document
from tightfit.inputs.spelling import Fields, nearest, read_text, shown, unknown_key
from tightfit.inputs.versions import release
from tightfit.messages import Choice, Message
from tightfit.types import STAGES, ZERO3, Buckets, Compress, ConfigError, Engine, Levers, Offload, Optimizer, Precision

_ENGINES: tuple[Engine, ...] = tuple(STAGES)


_PINNED_SINCE = "0.19.5"  # from here on offloaded memory is pinned unless the file says otherwise

_ZERO_BLOCKS = frozenset(path for path in KEYS if path.startswith("zero_optimization."))
_NULL_BLOCKS = _ZERO_BLOCKS.union(("aio", "bf16", "optimizer.params", "scheduler.params"))  # blocks that may be null

_OPTIMIZERS: dict[str, Optimizer] = {"adam": "adamw", "adamw": "adamw", "SGD": "sgd", "Adafactor": "adafactor"}
"""DeepSpeed's own in any case of letters, torch.optim's by their exact names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepSpeedSettings:
    """What a DeepSpeed file says. None: the file leaves it to the trainer's flags, or says `auto`."""

    file: str
    engine: Engine
    offload_optimizer: Offload
    offload_param: Offload
    shard_within: int
    compress: Compress
    buckets: Buckets
    precision: Precision | None
    micro_batch: int | None
    accumulation: int | None
    train_batch: int | None  # samples a step over all GPUs
    gradient_clipping: float | None
    optimizer: Optimizer | None
    master_weights: bool
    because: tuple[Message, ...]


def read_deepspeed(
    path: str | Path, *, hidden_size: int | None, version: str = Levers().deepspeed_version
) -> DeepSpeedSettings:
    """Read a DeepSpeed JSON or Hjson file; `hidden_size` is what the Hugging Face layer fills `auto` with."""
    path = Path(path)
    file, text = path.name, read_text(path, "JSON")
    document = parse_json_document(path, text)
    values = document.values
    if not isinstance(values, dict) or not text.strip():
        raise ConfigError(Message("deepspeed.no-object", file=file))
    for place in document.doubles:  # DeepSpeed refuses them; plain JSON readers keep the last and say nothing
        key = place.rpartition(".")[2]
        raise ConfigError(Message("deepspeed.key-twice", key=key, fix=Message("lint.keep-one")), at=place)
    because = [Message("deepspeed.is-hjson", file=file)] if document.syntax == "hjson" else []
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
    for place in UNPRICED:
        value: Any = values
        for key in place.split("."):
            value = value.get(key) if isinstance(value, Mapping) else None
        changes_nothing = value is None or value is False or value == "auto" or (value == 1 and value is not True)
        if not changes_nothing:
            because.append(Message("deepspeed.not-priced", key=place, file=file))
    if "activation_checkpointing" in values:
        because.append(Message("deepspeed.checkpointing-from-flags", file=file))
    return DeepSpeedSettings(
        file=file,
        engine=_ENGINES[stage],
        offload_optimizer=offload_optimizer,
        offload_param=offload_param,
        shard_within=_read_group(zero, stage),
        compress="zeropp" if stage == 3 and zero.switch("zero_quantized_weights") else "none",
        buckets=_buckets(zero, stage, hidden_size, version, because),
        precision=_precision(top, because),
        micro_batch=top.integer("train_micro_batch_size_per_gpu", least=1),
        accumulation=top.integer("gradient_accumulation_steps", least=1),
        train_batch=top.integer("train_batch_size", least=1),
        gradient_clipping=top.number("gradient_clipping"),
        optimizer=_optimizer(top),
        master_weights=_master_weights(top, stage, offload_optimizer),
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
            factors = {"micro": micro, "accumulation": accumulation, "world": world, "product": product}
            raise ConfigError(Message("deepspeed.batch-is-not", total=total, file=settings.file, **factors))
    clipping = settings.gradient_clipping
    return replace(
        base,
        engine=settings.engine,
        offload_optimizer=settings.offload_optimizer,
        offload_param=settings.offload_param,
        shard_within=settings.shard_within,
        compress=settings.compress,
        buckets=settings.buckets,
        precision=precision,
        micro_batch=micro or base.micro_batch,
        accumulation=accumulation or base.accumulation,
        gradient_clipping=base.gradient_clipping if clipping is None else clipping > 0,
        optimizer=settings.optimizer or base.optimizer,
        master_weights=settings.master_weights and base.master_weights,
        lora=lora,
    )


def _read_group(zero: Fields, stage: int) -> int:
    """Ranks that share a second copy of the weights; one rank alone is DeepSpeed's word for none."""
    size = zero.integer("zero_hpz_partition_size") or 0
    return size if stage == 3 and size > 1 else 0


# --- the file -----------------------------------------------------------------------------------


def _check_keys(values: Mapping[str, Any], file: str, path: str, version: str) -> None:
    """Raise at the first key that DeepSpeed does not know, in any block."""
    for key, value in values.items():
        child = f"{path}.{key}" if path else key
        if key not in KEYS[path]:
            if not path and key.startswith(("_", "#", "//")):
                continue  # the usual way to leave a comment in plain JSON
            if child not in GONE or path == "aio":
                raise _unknown(key, file, path)
            if release(version) >= release(REMOVED_IN):
                removed = {"key": child, "file": file, "version": version, "fix": Message("lint.delete")}
                raise ConfigError(Message("deepspeed.key-removed", **removed), at=child)
        elif child in KEYS and isinstance(value, Mapping):
            if child != "scheduler.params" or str(values.get("type")) in SCHEDULER_PARAMS:
                _check_keys(value, file, child, version)
        elif child in KEYS and not (value is None and child in _NULL_BLOCKS) and not (value == "auto" and path):
            raise ConfigError(Message("deepspeed.no-block", key=child, file=file, value=shown(value)), at=child)


def _unknown(key: str, file: str, path: str) -> ConfigError:
    where = Message("deepspeed.block-of-file", block=path, file=file) if path else file
    aside = Message("deepspeed.would-refuse" if path in LOUD else "deepspeed.would-ignore")
    homes = [home for home, keys in KEYS.items() if key in keys and home != "bfloat16"]
    if len(homes) == 1 and not nearest(key, KEYS[path], cutoff=0.9):
        if homes[0]:
            return ConfigError(Message("deepspeed.key-elsewhere", key=key, where=where, home=homes[0], aside=aside))
        return ConfigError(Message("deepspeed.key-at-top", key=key, where=where, aside=aside))
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
            key, fix = zero.name(old), Message("lint.keep", key=kind)
            raise ConfigError(Message("deepspeed.old-and-new", key=key, kind=kind, file=zero.file, fix=fix), at=key)
        word = "cpu" if zero.switch(old) else "none"
    ratio = block.number("ratio", most=1.0)
    partial = "ratio" if ratio is not None and ratio < 1 else "super_offload" if block.switch("super_offload") else None
    if partial and stage < 3:
        key = block.name(partial)
        raise ConfigError(Message("deepspeed.needs-stage3", key=key, file=block.file, stage=stage), at=key)
    device = cast(Offload, word)
    if device == "none":
        return "none"
    key = zero.name(kind)
    if device == "nvme" and stage == 3 and block.text("nvme_path") is None:
        raise ConfigError(Message("deepspeed.needs-nvme-path", key=key, device=device, file=zero.file), at=key)
    if stage == 3 or (stage and device == "cpu" and kind == "offload_optimizer"):
        return device
    wrong = "deepspeed.offload-needs-stage" if stage == 0 else "deepspeed.nvme-needs-stage3"
    wrong = "deepspeed.weights-need-stage3" if kind == "offload_param" else wrong
    raise ConfigError(Message(wrong, key=key, device=device, file=zero.file, stage=stage), at=key)


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
                filled_in = {"value": value, "hidden_size": hidden_size}
                because.append(Message("deepspeed.auto-filled", key=key, file=zero.file, **filled_in))
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
        fix = Message("lint.keep", key="bf16")
        raise ConfigError(Message("deepspeed.bf16-twice", file=top.file, fix=fix), at="bfloat16")
    bf16 = _block(top, "bf16" if "bf16" in top.values else "bfloat16")
    fp16 = _block(top, "fp16")
    if bf16.switch("enabled") and fp16.switch("enabled"):
        fix = Message("lint.keep-one")
        raise ConfigError(Message("deepspeed.both-precisions", file=top.file, fix=fix), at="fp16.enabled")
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
    if (kind := block.text("type")) is None:
        return None
    if found := _OPTIMIZERS.get(kind.lower()) or _OPTIMIZERS.get(kind):
        return found
    names = ("AdamW", "Adam", "SGD", "Adafactor")
    said = Message("deepspeed.optimizer-unknown", kind=shown(kind), file=top.file, names=Choice(names))
    if close := nearest(kind, names, cutoff=0.8):
        said = Message("deepspeed.optimizer-meant", kind=shown(kind), file=top.file, close=close)
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
        place = block.name(key)
        if stage == 0:
            raise ConfigError(Message("deepspeed.needs-a-stage", key=place, file=top.file), at=place)
        if offload == "none" and (name == "fp16" or not block.switch("bf16_optimizer_states")):
            raise ConfigError(Message("deepspeed.needs-offload", key=place, file=top.file), at=place)
        return False
    return True
