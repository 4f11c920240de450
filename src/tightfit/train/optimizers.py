"""The optimizer of a job, for either engine, and its learning rate at each step.

FSDP2's shards are DTensors. bitsandbytes hands pointers to its kernels and refuses them; torch's own optimizers take
them, at tens of microseconds of Python for each parameter, in which the GPU waits. An update goes element by element
over one tensor, and so do bitsandbytes' blocks of states, so each rank lets its optimizer work on the plain tensor that
lies under each of its shards (`LocalParts`). What the engine sees stays a DTensor, and only the step itself is local.

States of 8 bits are read and written as fp32 numbers. bitsandbytes keeps one as one byte an element, an index into a
map of 256 numbers between -1 and 1, and one fp32 scale for each block of elements: a value is its number times its
block's scale. To quantise, the scale is the block's largest magnitude and each element takes the nearest number.

That alone is no exact inverse. The signed map has 1 and no -1: where the largest element is negative its number is
about -0.993, so the values read back have a smaller magnitude, and a scale taken from them would be too small. Such a
block is recognised: if the scale that this end of the map implies gives every value back bit for bit, it is the one
the values were made with. Values then survive any number of round trips, as long as the blocks are the same; the next
step sees nothing else of a state. A parameter with few elements has plain fp32 states, which are copied.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tightfit.messages import Message
from tightfit.train.config import OptimizerConfig
from tightfit.types import ConfigError, Optimizer

BETAS, EPS = (0.9, 0.999), 1e-8
CLIP_EPS = 1e-6  # what torch adds to the norm that it divides by
BLOCK = 256  # elements that share a scale: a constant of bitsandbytes' optimizers, which they do not keep with a state
PIECE = BLOCK * 2**13  # elements that are converted at a time
Which = Literal[1, 2]  # the first or the second moment
Groups = list[dict[str, Any]]


def name_decays(model: nn.Module, weight_decay: float) -> dict[str, float]:
    """The weight decay of everything that trains, by its path."""
    found = {}
    for name, param in model.named_parameters():
        if param.requires_grad:
            # Matrices decay. A_log is one by its shape alone: Mamba's authors keep decay off it.
            is_matrix = len(getattr(param, "ds_shape", param.shape)) >= 2 and not name.endswith(("A_log", "bias"))
            found[name] = weight_decay if is_matrix else 0.0
    if not found:
        raise ConfigError(Message("train.nothing-trains"))
    return found


def groups(model: nn.Module, weight_decay: float) -> Groups:
    """What trains, in one group; with weight decay, norms and biases in another one without."""
    decays, named = name_decays(model, weight_decay), dict(model.named_parameters())
    params: dict[float, list[nn.Parameter]] = {weight_decay: [], 0.0: []}
    for name, decay in decays.items():
        params[decay].append(named[name])
    return [{"params": held, "weight_decay": decay} for decay, held in params.items() if held]


def make_optimizer(kind: Optimizer, param_groups: Groups, *, fused: bool) -> torch.optim.Optimizer:
    """At learning rate zero: the loop sets it before each step, and DeepSpeed may take a step while it starts."""

    def make(groups: Groups) -> torch.optim.Optimizer:
        if kind == "adamw":
            return torch.optim.AdamW(groups, lr=0.0, betas=BETAS, eps=EPS, fused=fused)
        if kind == "sgd":
            return torch.optim.SGD(groups, lr=0.0, fused=fused)
        if kind == "adafactor":
            maker: Any = import_module("transformers.optimization").Adafactor
            made: torch.optim.Optimizer = maker(groups, lr=0.0, relative_step=False, scale_parameter=False)
            return made
        try:
            import bitsandbytes.optim as eight_bit
        except ImportError:
            raise ConfigError(Message("train.optimizer-needs-bitsandbytes", optimizer=kind)) from None
        on_host = groups[0]["params"][0].device.type == "cpu"  # where nothing can be paged out
        paged = kind == "paged_adamw8bit" and not on_host
        maker = getattr(eight_bit, "PagedAdamW8bit" if paged else "AdamW8bit")
        optimizer: torch.optim.Optimizer = maker(groups, lr=0.0, betas=BETAS, eps=EPS)
        return optimizer

    sharded = isinstance(param_groups[0]["params"][0], DTensor)
    return LocalParts(param_groups, make) if sharded else make(param_groups)


class LocalParts(torch.optim.Optimizer):
    """Groups and states by DTensor, as other optimizers have them; `inner` has the same by local part. `state[param]`
    is the very dict that `inner.state[local]` is. A rank without rows of a parameter has an empty part, which is never
    stepped and has no states."""

    def __init__(self, groups: Groups, make: Callable[[Groups], torch.optim.Optimizer]) -> None:
        super().__init__(groups, {"lr": 0.0})
        params: list[Tensor] = [param for group in self.param_groups for param in group["params"]]
        self.locals = {param: nn.Parameter(part_of(param)) for param in params}
        self.inner = make([group | {"params": [self.locals[p] for p in group["params"]]} for group in groups])
        for param, local in self.locals.items():
            self.state[param] = self.inner.state[local]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is None
        for ours, theirs in zip(self.param_groups, self.inner.param_groups, strict=True):
            theirs["lr"] = ours["lr"]
        for param, local in self.locals.items():
            if local.data_ptr() != (part := part_of(param)).data_ptr():
                local.data = part  # the first forward pass pads and pins shards, which moves them
            local.grad = None if param.grad is None or local.numel() == 0 else part_of(param.grad)
        try:
            self.inner.step()
        finally:
            for local in self.locals.values():
                local.grad = None

    def grads(self) -> list[Tensor]:
        """This rank's parts of all gradients."""
        return [part_of(param.grad) for param in self.locals if param.grad is not None]


def step_unless(optimizer: Any, spoilt: Tensor) -> None:
    """A step, unless `spoilt` is 1. Torch's fused kernels look for themselves, so that the host need not wait."""
    inner = getattr(optimizer, "inner", optimizer)
    if inner.defaults.get("fused"):
        inner.found_inf = spoilt  # as torch's own loss scaler tells them
        optimizer.step()
        inner.found_inf = None
    elif not spoilt:
        optimizer.step()


@torch.no_grad()
def clip(grads: list[Tensor], most: float, reduce: Callable[[Tensor], Any] | None, copies: int = 0) -> Tensor:
    """Scale the gradients so that their norm is `most` at most; 0: leave them. The norm of all of them, as it was.
    `reduce` adds up the ranks' numbers in place; None: there is one rank. `copies`: how many, of the last ones, another
    rank counts."""
    # `nn.utils.get_total_norm` does the same, and is younger than some releases of torch that are met.
    counted = grads[: len(grads) - copies]
    norm = torch.zeros((), device=grads[0].device if grads else None)
    if counted:
        norm = torch.stack(torch._foreach_norm(counted)).float().norm()
    if reduce is not None:
        reduce(norm.square_())
        norm.sqrt_()
    if most > 0 and grads:
        torch._foreach_mul_(grads, (most / (norm + CLIP_EPS)).clamp(max=1.0).to(grads[0]))  # as torch does it
    return norm


def part_of(tensor: Tensor | None) -> Tensor:
    """This rank's part, sharing its memory."""
    assert isinstance(tensor, DTensor)
    part: Tensor = tensor._local_tensor  # which `to_local` hands out through autograd
    assert part.is_contiguous()  # of another layout bitsandbytes would update a copy
    return part


def make_states(optimizer: Any, worked_on: Iterable[Tensor] | None = None) -> None:
    """The states that the first step would make, with zero moments; those that are there stay, and no weight moves.
    `worked_on`: the tensors in question, where an engine took the parameters out of the groups."""
    if isinstance(optimizer, LocalParts):
        optimizer = optimizer.inner
    if isinstance(optimizer, torch.optim.SGD):
        return  # without momentum there is nothing to keep
    kind = type(optimizer).__name__
    places = {
        param: (group, param, group_number, number)
        for group_number, group in enumerate(optimizer.param_groups)
        for number, param in enumerate(group["params"])
    }
    for each in places if worked_on is None else worked_on:
        state = optimizer.state[each]
        if state:
            continue
        if kind in ("AdamW", "DeepSpeedCPUAdam", "FusedAdam"):
            state.update(step=0, exp_avg=torch.zeros_like(each), exp_avg_sq=torch.zeros_like(each))
            if kind == "AdamW":
                counts_on = each.device if optimizer.defaults["fused"] else "cpu"
                state["step"] = torch.zeros((), dtype=torch.float32, device=counts_on)
        elif kind == "Adafactor" and each.dim() < 2:
            state.update(step=0, exp_avg_sq=torch.zeros_like(each), RMS=0)
        elif kind == "Adafactor":
            rows, columns = each.new_zeros(each.shape[:-1]), each.new_zeros(each.shape[:-2] + each.shape[-1:])
            state.update(step=0, exp_avg_sq_row=rows, exp_avg_sq_col=columns, RMS=0)
        elif not hasattr(optimizer, "init_state"):
            raise TypeError(Message("train.no-states-yet", optimizer=kind))
        elif each.numel():  # a rank without rows is never stepped
            optimizer.init_state(*places[each])


def forget(optimizer: torch.optim.Optimizer) -> None:
    """Moments and counters as before the first step, in place: engines hold references to them."""
    set_steps(optimizer, 0)
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
    peak, share = training.learning_rate, 0.0 if training.schedule == "constant" else training.warmup
    warm = min(steps, math.ceil(share * steps) if share < 1 else int(share))
    if step < warm:
        return peak * (step + 1) / warm
    if training.schedule in ("constant", "constant_with_warmup"):
        return peak
    done = (step - warm) / max(1, steps - warm)
    return peak * (1 - done if training.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * done)))


def is_eight_bit(state: Mapping[str, Any]) -> bool:
    """Whether a parameter's states have 8 bits; small parameters' have 32, and are `state1` and `state2` as well."""
    return "qmap1" in state


def read_8bit(state: Mapping[str, Any], which: Which, start: int = 0, stop: int | None = None) -> Tensor:
    """The elements from `start` up to `stop` of a moment, flat, in fp32, where the parameter is."""
    codes: Tensor = state[f"state{which}"].view(-1)
    stop = codes.numel() if stop is None else stop
    if not is_eight_bit(state):
        return codes[start:stop].clone()
    numbers, scales = state[f"qmap{which}"], state[f"absmax{which}"]
    made = torch.empty(stop - start, dtype=torch.float32, device=scales.device)
    for at in range(start, stop, PIECE):
        end = min(at + PIECE, stop)
        picked = numbers[codes[at:end].to(scales.device, torch.int32)]
        blocks = torch.arange(at, end, device=scales.device) // BLOCK
        torch.mul(picked, scales[blocks], out=made[at - start : end - start])
    return made


def write_8bit(state: Mapping[str, Any], which: Which, values: Tensor, start: int = 0) -> None:
    """Put `values` in place from element `start` on; whole blocks of them, or up to the end."""
    codes: Tensor = state[f"state{which}"].view(-1)
    values = values.reshape(-1)
    stop = start + values.numel()
    if not is_eight_bit(state):
        codes[start:stop].copy_(values)
        return
    if start % BLOCK or (stop % BLOCK and stop != codes.numel()):
        raise ValueError(f"elements {start} to {stop} are no whole blocks of {BLOCK}")
    numbers, scales = state[f"qmap{which}"], state[f"absmax{which}"]
    for at in range(start, stop, PIECE):
        end = min(at + PIECE, stop)
        piece = values[at - start : end - start].to(scales.device, torch.float32)
        piece = torch.nn.functional.pad(piece, (0, -piece.numel() % BLOCK)).view(-1, BLOCK)
        found, scale = quantise(piece, numbers)
        codes[at:end].copy_(found.view(-1)[: end - at])
        scales[at // BLOCK : -(-end // BLOCK)].copy_(scale)


def quantise(blocks: Tensor, numbers: Tensor) -> tuple[Tensor, Tensor]:
    """Indices into the map and scales of blocks, a row each."""
    scales = blocks.abs().amax(dim=1)
    codes = _nearest(blocks, scales, numbers)
    if numbers[0] < 0:
        lost = (_values(codes, scales, numbers) != blocks).any(dim=1) & (blocks.amin(dim=1) == -scales)
        rows = lost.nonzero().view(-1)
        # A scale that the most negative element implies, wherever that gives every value back.
        implied = scales[rows] / -numbers[0]
        up, down = torch.full_like(implied, torch.inf), torch.zeros_like(implied)
        above, below = torch.nextafter(implied, up), torch.nextafter(implied, down)
        for guess in (implied, above, below, torch.nextafter(above, up), torch.nextafter(below, down)):
            found = _nearest(blocks[rows], guess, numbers)
            exact = (_values(found, guess, numbers) == blocks[rows]).all(dim=1)
            codes[rows[exact]], scales[rows[exact]] = found[exact], guess[exact]
    codes[scales == 0] = 0  # as bitsandbytes makes them
    return codes, scales


def _nearest(blocks: Tensor, scales: Tensor, numbers: Tensor) -> Tensor:
    middles = (numbers[1:].double() + numbers[:-1].double()) / 2
    scaled = blocks / torch.where(scales > 0, scales, 1)[:, None]
    return torch.bucketize(scaled, middles.float(), out_int32=True)


def _values(codes: Tensor, scales: Tensor, numbers: Tensor) -> Tensor:
    return numbers[codes] * scales[:, None]
