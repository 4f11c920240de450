"""Where DeepSpeed keeps fp32 copies and moments, by stage.

Stages 1 and 2 flatten all parameters into one vector and give each rank a stretch of it; a parameter knows the fragment
of itself that lies there (`_hp_mapping`). Stage 3 cuts each parameter and flattens the cuts in sub groups
(`grad_position`). Stage 0 has everything on every rank: in 16 bits a flat fp32 vector where its own fused Adam runs
(`fp32_groups_flat`), or an fp32 copy of each parameter (`fp32_groups`); in fp32 nothing of its own, for the optimizer
works on the parameters.

The moments of a flat vector come with the optimizer's first step. Where a checkpoint is loaded before it, they are
made here as that step would have made them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from tightfit.train import optimizers
from tightfit.train.engines.states import (
    MASTER,
    LossScale,
    Shapes,
    State,
    elementwise,
    moments,
    own_shapes,
    per_parameter,
)
from tightfit.train.nvme import nvme_states
from tightfit.train.shards import Shard
from tightfit.types import Optimizer


def deepspeed_states(trainable: list[Shard], wrapper: Any, basic: Any, *, write: bool) -> Iterator[State]:
    if hasattr(wrapper, "grad_position"):
        return _stage3(trainable, wrapper, basic, write=write)
    if _is_flat(trainable):
        return _flat_states(trainable, wrapper, basic)
    _make(basic, [each for group in basic.param_groups for each in group["params"]])
    if hasattr(wrapper, "fp32_groups_flat"):
        return _whole_vectors(trainable, wrapper, basic)
    # The fp32 copy of each parameter, by the parameter's id; empty: the optimizer works on the parameters.
    groups = zip(getattr(wrapper, "fp16_groups", ()), getattr(wrapper, "fp32_groups", ()), strict=True)
    return per_parameter(
        trainable,
        basic.state,
        {id(param): copy for params, copies in groups for param, copy in zip(params, copies, strict=True)},
        write=write,
    )


def deepspeed_shapes(trainable: list[Shard], wrapper: Any, basic: Any, optimizer: Optimizer) -> Shapes:
    if hasattr(wrapper, "grad_position") or _is_flat(trainable) or hasattr(wrapper, "fp32_groups_flat"):
        return elementwise(trainable, (MASTER, *moments(optimizer)))
    return own_shapes(deepspeed_states(trainable, wrapper, basic, write=False))


def _is_flat(trainable: Iterable[Shard]) -> bool:
    return any(hasattr(shard.parameter, "_hp_mapping") for shard in trainable)


def _flat_states(trainable: Iterable[Shard], wrapper: Any, basic: Any) -> Iterator[State]:
    flats = getattr(wrapper, "single_partition_of_fp32_groups", None) or wrapper.fp32_groups_flat_partition
    _make(basic, flats)
    for shard in trainable:
        fragment = shard.parameter._hp_mapping  # type: ignore[attr-defined]
        if fragment is None:  # all of it lies with other ranks
            continue
        flat, here = flats[fragment.param_group_index], fragment.hp_fragment_address
        for kind, tensor in _elementwise(flat, basic).items():
            part = tensor.narrow(0, here.start, here.numel)
            yield State(kind, shard.path, shard.shape, fragment.lp_fragment_address.start, part, alike=False)


def _whole_vectors(trainable: Iterable[Shard], wrapper: Any, basic: Any) -> Iterator[State]:
    paths = {id(shard.parameter): shard for shard in trainable}
    for params, flat in zip(wrapper.fp16_groups, wrapper.fp32_groups_flat, strict=True):
        held, begin = _elementwise(flat, basic), 0
        for param in params:
            shard = paths[id(param)]
            for kind, tensor in held.items():
                yield State(kind, shard.path, shard.shape, 0, tensor.narrow(0, begin, param.numel()), alike=True)
            begin += param.numel()


def _stage3(trainable: list[Shard], wrapper: Any, basic: Any, *, write: bool) -> Iterator[State]:
    if getattr(wrapper, "swap_optimizer", False):
        groups: Iterable[tuple[int, dict[str, Tensor]]] = nvme_states(wrapper, write)
    else:
        _make(basic, wrapper.fp32_partitioned_groups_flat)
        groups = ((index, _elementwise(flat, basic)) for index, flat in enumerate(wrapper.fp32_partitioned_groups_flat))
    where = {id(shard.parameter): wrapper.grad_position[wrapper.get_param_id(shard.parameter)] for shard in trainable}
    for index, held in groups:
        for shard in trainable:
            group, offset, _ = where[id(shard.parameter)]
            if group == index:
                for kind, flat in held.items():  # the last rank's part is padded: `size` leaves that out
                    part = flat.narrow(0, offset, shard.size)
                    yield State(kind, shard.path, shard.shape, shard.start, part, alike=False)


def _elementwise(flat: Tensor, basic: Any) -> dict[str, Tensor]:
    held = basic.state[flat]
    return {MASTER: flat.detach()} | {
        kind: tensor.detach()
        for kind, tensor in held.items()
        if isinstance(tensor, Tensor) and tensor.shape == flat.shape
    }


def _make(basic: Any, worked_on: Iterable[Tensor]) -> None:
    """Zero moments for what has none yet."""
    for each in worked_on:
        if basic.state[each]:
            continue
        if isinstance(basic, torch.optim.AdamW):
            basic.state[each].update(optimizers.adamw_states(each, on_device=bool(basic.defaults["fused"])))
        elif type(basic).__name__ == "Adafactor":
            basic.state[each].update(_adafactor(each))
        elif type(basic).__name__ in ("DeepSpeedCPUAdam", "FusedAdam"):
            basic.state[each].update(step=0, exp_avg=torch.zeros_like(each), exp_avg_sq=torch.zeros_like(each))
        elif not isinstance(basic, torch.optim.SGD):
            optimizers.make_states(basic)


def _adafactor(each: Tensor) -> dict[str, Any]:
    shape = tuple(each.shape)
    if len(shape) < 2:
        return {"step": 0, "exp_avg_sq": torch.zeros_like(each), "RMS": 0}
    rows, columns = each.new_zeros(shape[:-1]), each.new_zeros(shape[:-2] + shape[-1:])
    return {"step": 0, "exp_avg_sq_row": rows, "exp_avg_sq_col": columns, "RMS": 0}


def gather_again(wrapper: Any) -> None:
    """Stage 3 keeps small parameters whole on every rank; after their parts have changed they are put together anew."""
    kept = getattr(wrapper, "persistent_parameters", None)
    if kept:
        kept[0].partition(kept)
        kept[0].all_gather(kept)


# --- loss scale ----------------------------------------------------------------------------------


def scale_of(scaler: Any) -> LossScale:
    return LossScale(
        value=float(scaler.cur_scale),
        good_steps=scaler.cur_iter - scaler.last_overflow_iter - 1,
        hysteresis=scaler.cur_hysteresis,
    )


def set_scale(scaler: Any, scale: LossScale) -> None:
    scaler.cur_scale = scale.value
    scaler.last_overflow_iter = -1
    scaler.cur_iter = scale.good_steps
    scaler.cur_hysteresis = scaler.delayed_shift if scale.hysteresis is None else scale.hysteresis
