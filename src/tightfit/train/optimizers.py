"""The optimizer of a job, for either engine, and its learning rate at each step."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from tightfit.messages import Message
from tightfit.train.config import OptimizerConfig
from tightfit.train.engines.local_parts import Groups, LocalParts
from tightfit.types import ConfigError, Optimizer

BETAS, EPS = (0.9, 0.999), 1e-8
COUNTERS = ("step",)
"""The states that count steps; the others are moments."""


def groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """What trains, in one group; with weight decay, norms and biases in another one without."""
    trainable = [(name, param) for name, param in model.named_parameters() if param.requires_grad]
    if not trainable:
        raise ConfigError(Message("train.nothing-trains"))
    if weight_decay == 0:
        return [{"params": [param for _, param in trainable], "weight_decay": 0.0}]
    decayed = [param for name, param in trainable if _decays(name, param)]
    rest = [param for name, param in trainable if not _decays(name, param)]
    made = [{"params": decayed, "weight_decay": weight_decay}, {"params": rest, "weight_decay": 0.0}]
    return [group for group in made if group["params"]]


def _decays(name: str, param: nn.Parameter) -> bool:
    """Matrices do. A_log is one by its shape alone: Mamba's authors keep decay off it."""
    shape = getattr(param, "ds_shape", param.shape)
    return len(shape) >= 2 and not name.endswith(("A_log", "bias"))


def make_optimizer(kind: Optimizer, param_groups: list[dict[str, Any]], *, fused: bool) -> torch.optim.Optimizer:
    """At learning rate zero: the loop sets it before each step, and DeepSpeed may take a step while it starts."""
    if kind == "adamw":
        return torch.optim.AdamW(param_groups, lr=0.0, betas=BETAS, eps=EPS, fused=fused)
    if kind == "sgd":
        return torch.optim.SGD(param_groups, lr=0.0)
    if kind == "adafactor":
        from transformers.optimization import Adafactor

        factored: Any = Adafactor
        made: torch.optim.Optimizer = factored(param_groups, lr=0.0, relative_step=False, scale_parameter=False)
        return made
    first = param_groups[0]["params"][0]
    if isinstance(first, DTensor):
        return LocalParts(param_groups, lambda groups: _eight_bit(kind, groups))
    return _eight_bit(kind, param_groups)


def _eight_bit(kind: Optimizer, param_groups: Groups) -> torch.optim.Optimizer:
    try:
        import bitsandbytes.optim as eight_bit
    except ImportError:
        raise ConfigError(Message("train.optimizer-needs-bitsandbytes", optimizer=kind)) from None
    on_host = param_groups[0]["params"][0].device.type == "cpu"  # where nothing can be paged out
    paged = kind == "paged_adamw8bit" and not on_host
    maker: Any = getattr(eight_bit, "PagedAdamW8bit" if paged else "AdamW8bit")
    optimizer: torch.optim.Optimizer = maker(param_groups, lr=0.0, betas=BETAS, eps=EPS)
    return optimizer


def make_states(optimizer: torch.optim.Optimizer) -> None:
    """The states that the first step would make, with zero moments; those that are there stay, and no weight moves."""
    if isinstance(optimizer, LocalParts):
        make_states(optimizer.inner)
        return
    if isinstance(optimizer, torch.optim.SGD):
        return  # without momentum there is nothing to keep
    for gindex, group in enumerate(optimizer.param_groups):
        for pindex, param in enumerate(group["params"]):
            if optimizer.state[param]:
                continue
            if isinstance(optimizer, torch.optim.AdamW):
                optimizer.state[param].update(adamw_states(param, on_device=bool(group["fused"])))
            elif hasattr(optimizer, "init_state"):
                if param.numel():  # a rank without rows is never stepped
                    optimizer.init_state(group, param, gindex, pindex)
            else:
                raise TypeError(Message("train.no-states-yet", optimizer=type(optimizer).__name__))


def adamw_states(param: torch.Tensor, *, on_device: bool) -> dict[str, torch.Tensor]:
    return {
        "step": torch.zeros((), dtype=torch.float32, device=param.device if on_device else "cpu"),
        "exp_avg": torch.zeros_like(param, memory_format=torch.preserve_format),
        "exp_avg_sq": torch.zeros_like(param, memory_format=torch.preserve_format),
    }


def forget(optimizer: torch.optim.Optimizer) -> None:
    """Moments and counters as before the first step, in place: engines hold references to them."""
    for group in optimizer.param_groups:
        if isinstance(group.get("step"), int):
            group["step"] = 0
    for state in optimizer.state.values():
        for name, value in state.items():
            if name.startswith("qmap"):
                continue  # what the 256 values of an 8-bit state mean; all parameters share it
            if isinstance(value, torch.Tensor):
                value.zero_()
            elif isinstance(value, (int, float)) and not isinstance(value, bool):
                state[name] = 0


def count_steps(optimizer: Any) -> int:
    """Steps that the optimizer took; skipped ones do not count."""
    counts = [group["step"] for group in optimizer.param_groups if isinstance(group.get("step"), int)]
    counts += [state["step"] for state in optimizer.state.values() if "step" in state]
    return int(max((int(count) for count in counts), default=0))


def set_steps(optimizer: Any, steps: int) -> None:
    """As if it had taken so many."""
    for group in optimizer.param_groups:
        if isinstance(group.get("step"), int):
            group["step"] = steps
    for state in optimizer.state.values():
        if isinstance(state.get("step"), torch.Tensor):
            state["step"].fill_(steps)
        elif "step" in state:
            state["step"] = steps


def set_rate(optimizer: Any, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate


def learning_rate(training: OptimizerConfig, step: int, steps: int) -> float:
    """Of step 0 to steps - 1: up over the warm-up, then down by the schedule."""
    peak, warm = training.learning_rate, warmup_steps(training, steps)
    if step < warm:
        return peak * (step + 1) / warm
    if training.schedule in ("constant", "constant_with_warmup"):
        return peak
    done = (step - warm) / max(1, steps - warm)
    if training.schedule == "linear":
        return peak * (1 - done)
    return peak * 0.5 * (1 + math.cos(math.pi * done))


def warmup_steps(training: OptimizerConfig, steps: int) -> int:
    if training.schedule == "constant":
        return 0
    share = training.warmup
    return min(steps, math.ceil(share * steps) if share < 1 else int(share))
