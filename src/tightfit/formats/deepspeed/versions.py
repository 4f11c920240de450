"""What changed in DeepSpeed's config between 0.14.0 and 0.19.8: one table, and the questions to ask of it.

Read from the sources of all 47 releases in that range (`runtime/zero/config.py`, `zero/offload_config.py`,
`precision_config.py`, `config.py`, `constants.py`, `swap_tensor/constants.py` of each sdist): a row stands here
when a key appeared, disappeared, or took another default on the way. A key without a row is known to every
release, with one and the same default.

Why it matters: `zero_optimization` and its offload blocks refuse a key that they do not know, so one key too
many stops a training at its start; a key that is left out takes whatever default that release has. A release
between two of these is read as the nearest lower one, and one that is newer than all of them as the newest.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tightfit.inputs.versions import Release, release
from tightfit.messages import Message
from tightfit.types import ConfigError

OLDEST, NEWEST = "0.14.0", "0.19.8"
"""The range whose sources were read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """The life of one key."""

    path: str
    """`zero_optimization.leaf_module`, as it stands in the file."""
    since: str = OLDEST
    """The first release that knows it."""
    gone: str | None = None
    """The first release that refuses it."""
    defaults: tuple[tuple[str, object], ...] = ()
    """Where the default moved: from which release on it is what."""


_ZERO = "zero_optimization"
_OPTIMIZER = f"{_ZERO}.offload_optimizer"

TABLE = (
    Key(path=f"{_ZERO}.stage3_use_all_reduce_for_fetch_params", since="0.14.3"),
    Key(path=f"{_ZERO}.stage3_module_granularity_threshold", since="0.16.0"),
    Key(path=f"{_ZERO}.log_trace_cache_warnings", since="0.16.4"),
    Key(path=f"{_ZERO}.zenflow", since="0.17.5"),
    Key(path=f"{_ZERO}.enable_sanity_checks", since="0.17.6"),
    Key(path=f"{_ZERO}.leaf_module", since="0.18.0"),
    Key(path=f"{_ZERO}.stage3_allgather_sequential", since="0.18.5"),
    Key(path=f"{_ZERO}.save_muon_momentum_buffer_in_memory", since="0.18.9"),
    Key(path=f"{_ZERO}.compute_grad_norm", since="0.19.7"),
    Key(path=f"{_ZERO}.parameter_alignment", since="0.19.7"),
    Key(path=f"{_ZERO}.zeropp_loco_param", since="0.16.2", gone="0.19.8"),
    Key(path=f"{_ZERO}.mics_shard_size", gone="0.19.7"),
    Key(path=f"{_ZERO}.mics_hierarchical_params_gather", gone="0.19.7"),
    Key(path=f"{_OPTIMIZER}.super_offload", since="0.18.0"),
    Key(path=f"{_OPTIMIZER}.cpuadam_cores_perc", since="0.18.0"),
    Key(path=f"{_OPTIMIZER}.pin_memory", defaults=((OLDEST, False), ("0.19.5", True))),
    Key(path=f"{_ZERO}.offload_param.pin_memory", defaults=((OLDEST, False), ("0.19.5", True))),
    Key(path="bf16.immediate_grad_update", defaults=((OLDEST, False), ("0.16.5", True), ("0.17.1", False))),
    Key(path="bf16.check_grad_overflow", since="0.17.1", defaults=(("0.17.1", False), ("0.19.3", True))),
    Key(path="bf16.bf16_master_weights_and_grads", since="0.18.3"),
    Key(path="bf16.bf16_optimizer_states", since="0.18.3"),
    Key(path="gradient_clipping", defaults=((OLDEST, 0.0), ("0.19.3", 1.0))),
    Key(path="steps_per_print", defaults=((OLDEST, 10), ("0.15.2", None))),
    Key(path="aio.use_gds", since="0.15.0"),
    Key(path="aio.thread_count", gone="0.16.4"),  # still accepted, and ignored without a word
    Key(path="aio.intra_op_parallelism", since="0.16.4"),
    Key(path="nebula", gone="0.19.7"),
    Key(path="compression_training", gone="0.19.7"),
    Key(path="quantize_training", gone="0.19.7"),
    Key(path="sparse_attention", gone="0.19.7"),
    Key(path="amp", gone="0.19.8"),
    Key(path="sparse_gradients", gone="0.19.8"),
    Key(path="eigenvalue", gone="0.19.8"),
    Key(path="elasticity", gone="0.19.8"),
    Key(path="graph_harvesting", gone="0.19.8"),
    Key(path="curriculum_learning", gone="0.19.8"),
    Key(path="progressive_layer_drop", gone="0.19.8"),
)

DEFAULTS: dict[str, object] = {
    "zero_allow_untested_optimizer": False,
    "zero_force_ds_cpu_optimizer": True,
    "bf16.bf16_master_weights_and_grads": False,
    "bf16.bf16_optimizer_states": False,
    "fp16.fp16_master_weights_and_grads": False,
    f"{_ZERO}.contiguous_gradients": True,
    f"{_ZERO}.reduce_bucket_size": 500_000_000,
    f"{_ZERO}.allgather_bucket_size": 500_000_000,
    f"{_ZERO}.sub_group_size": 1_000_000_000,
    f"{_ZERO}.stage3_prefetch_bucket_size": 50_000_000,
    f"{_ZERO}.stage3_param_persistence_threshold": 100_000,
    f"{_ZERO}.stage3_max_live_parameters": 1_000_000_000,
    f"{_ZERO}.stage3_max_reuse_distance": 1_000_000_000,
    f"{_ZERO}.stage3_gather_16bit_weights_on_model_save": False,
    f"{_OPTIMIZER}.buffer_count": 4,
    f"{_ZERO}.offload_param.buffer_count": 5,
}
"""Of the keys that a plan may set: what every release takes where the file says nothing."""

_BY_PATH = {key.path: key for key in TABLE}


def check_version(version: str) -> Release:
    """The release, or the sentence that says why nothing can be written for it."""
    asked = release(version)
    if asked < release(OLDEST):
        raise ConfigError(Message("deepspeed.version-too-old", version=version, oldest=OLDEST))
    if asked[0] > release(NEWEST)[0]:
        raise ConfigError(Message("deepspeed.version-unknown", version=version, newest=NEWEST))
    return asked


def knows(version: str, path: str) -> bool:
    """Whether this release takes the key at `path`."""
    key = _BY_PATH.get(path)
    if key is None:
        return True
    asked = release(version)
    return release(key.since) <= asked and (key.gone is None or asked < release(key.gone))


def without_defaults(values: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """The same without what every release takes anyway, and without blocks that say nothing then."""
    kept: dict[str, Any] = {}
    for name, value in values.items():
        where = f"{path}.{name}" if path else name
        if isinstance(value, Mapping):
            if inside := without_defaults(value, where):
                kept[name] = inside
        elif where not in DEFAULTS or DEFAULTS[where] != value:
            kept[name] = value
    return kept


def newer_than_known(version: str) -> Message | None:
    """The sentence for a release whose source we have not read; None: we have."""
    if release(version) <= release(NEWEST):
        return None
    return Message("deepspeed.newer-than-known", version=version, newest=NEWEST)


def defaults_that_moved(version: str) -> dict[str, object]:
    """What this release assumes where the file says nothing, for each key whose default moved in the range."""
    asked, found = release(version), {}
    for key in TABLE:
        if key.defaults and knows(version, key.path):
            found[key.path] = [value for since, value in key.defaults if release(since) <= asked][-1]
    return found


_LIVES = {key.path: key for key in TABLE}

ARRIVED = {
    alias: key.since
    for path, key in _LIVES.items()
    for alias in (path, path.replace(".stage3_", "."))
    if key.since != OLDEST
}
"""DeepSpeed's key → the first release that knows it."""

LEARNT_AFTER = {
    "torch_autocast": "0.17.0",
    "log_level": "0.19.2",
    "managed_gradient_accumulation": "0.19.3",
    "disable_python_gc": "0.19.5",
    "gradient_allreduce_op": "0.19.5",
}
"""DeepSpeed's key at the top level → the newest release seen without it."""

GONE = {path: key.gone for path, key in _LIVES.items() if key.gone is not None}
"""DeepSpeed's key → the first release that no longer takes it."""

MOVED_DEFAULTS = tuple(
    (path, _LIVES[path].defaults[-1][0], _LIVES[path].defaults[-2][1], _LIVES[path].defaults[-1][1])
    for path in (
        "gradient_clipping",
        "bf16.check_grad_overflow",
        "zero_optimization.offload_optimizer.pin_memory",
        "zero_optimization.offload_param.pin_memory",
    )
)
"""DeepSpeed's key, the release since which its default is another, the default before and since."""

PYDANTIC_BF16 = "0.17.1"
"""From here on DeepSpeed reads fp16 and bf16 with pydantic; before, it took any key there, and any text for true."""

WARMUP_CHECKED_SINCE = "0.19.6"
"""From here on DeepSpeed refuses a warmup_num_steps that is no whole number above 0; before, it took 2 at least."""
