"""Every GPU has everything, and torch alone computes it.

Engines that cut a model up have hooks for that, tens of microseconds of the host's time for each parameter and step:
more than the GPU's work on a small batch, and for nothing where the model fits, as with adapters it mostly does. Here
autograd leaves its gradients where they are, and the optimizer works on fp32 copies of what trains. Gradients are
widened all at once: before the step or, with accumulation, after each micro batch, so that nothing is added up in 16
bits. Then the ranks add them up, in one message. In fp32, and in pure 16 bits, there are no copies.

Where that message is to be compressed, gradients lie side by side in fp32 too. Whether one of them is not finite is
asked first: what error feedback has once taken up it keeps.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tightfit.inputs.flags import find_ddp_obstacle
from tightfit.train import optimizers
from tightfit.train.compression import OneBit, PowerSgd, count_warm_up, step_by_signs
from tightfit.train.config import OptimizerConfig
from tightfit.train.engines import MASTER, Counters, Launched, Shapes, State, moments
from tightfit.train.engines.scaled import ScaledEngine
from tightfit.train.place import Place
from tightfit.types import ConfigError, Levers


class Ddp(ScaledEngine):
    def __init__(self, model: Any, levers: Levers, place: Place, training: OptimizerConfig) -> None:
        if (obstacle := find_ddp_obstacle(levers)) is not None:
            raise ConfigError(obstacle)
        super().__init__(model, levers, place, training)
        groups = optimizers.groups(model, training.weight_decay)
        self._trained: list[Tensor] = [param for group in groups for param in group["params"]]
        has_copies = levers.master_weights and levers.precision != "fp32"
        self._copies = [param.detach().float() for param in self._trained] if has_copies else self._trained
        worked_on = iter(self._copies)
        for group in groups:
            group["params"] = [next(worked_on) for _ in group["params"]]
        self._optimizer = optimizers.make_optimizer(levers.optimizer, groups, fused=True)
        self._has_copies, self._accumulates = has_copies, has_copies and levers.accumulation > 1
        self._wide: Tensor | None = None  # all gradients in fp32, from the first micro batch to the step
        self._compressor: PowerSgd | OneBit | None = None
        if levers.compress == "powersgd":
            self._compressor = PowerSgd([copy.shape for copy in self._copies], place)
        elif levers.compress == "onebit":
            self._compressor = OneBit(sum(copy.numel() for copy in self._copies), place)
        self._taken = 0  # steps, without those whose gradients overflowed
        self._exact = 1  # so many of them send all; a probe and a rehearsal are to see both kinds

    def expect(self, steps: int) -> None:
        if self._levers.compress in ("powersgd", "onebit") and not self._place.rehearsal:
            self._exact = count_warm_up(self._levers.compress, steps)

    def backward(self, loss: Tensor, *, last: bool) -> None:
        super().backward(loss, last=last)
        if self._accumulates:
            self._widen()

    @torch.no_grad()
    def step(self, learning_rate: float) -> Launched:
        optimizers.set_rate(self._optimizer, learning_rate)
        if (self._has_copies or self._compressor is not None) and not self._accumulates:
            self._widen()
        self._taken += 1
        if self._compressor is None or self._is_exact(self._compressor):
            self._share()
            self._scaler.unscale_(self._optimizer)
            launched = self._launch(self._shared_grads())
            if self._compressor is not None and self._scaler.is_enabled():
                self._taken -= int(launched.skipped)  # the host waits, as it does in compressed steps
        else:
            launched = self._step_compressed(self._compressor)
        self._wide = None
        if self._has_copies:
            torch._foreach_copy_(self._trained, self._copies)
        return launched

    def _shared_grads(self) -> list[Tensor]:
        return [copy.grad for copy in self._copies if copy.grad is not None]

    def _is_exact(self, compressor: PowerSgd | OneBit) -> bool:
        """Whether this step sends all. A second moment that was frozen stays so, and one without any update must not
        be: nothing would move."""
        if isinstance(compressor, PowerSgd):
            return self._taken <= self._exact
        if not compressor.settled and self._taken > self._exact:
            compressor.settled.fill_(optimizers.count_steps(self._optimizer))
        return not compressor.settled

    def _step_compressed(self, compressor: PowerSgd | OneBit) -> Launched:
        assert self._wide is not None
        largest = torch.linalg.vector_norm(self._wide, float("inf"))
        spoilt = largest.isfinite().logical_not().float()
        dist.all_reduce(spoilt)
        if is_spoilt := bool(spoilt):
            self._wide.fill_(torch.nan)  # on every rank alike, as the loss scale must be
        self._scaler.unscale_(self._optimizer)
        if is_spoilt:
            self._taken -= 1
            return self._launch(self._shared_grads())
        if isinstance(compressor, PowerSgd):
            compressor.share(self._wide)
            return self._launch(self._shared_grads())
        norm = compressor.measure(self._wide, seed=self._taken)
        if self._clip > 0:
            self._wide.mul_((self._clip / (norm + 1e-6)).clamp(max=1.0))
        step_by_signs(self._optimizer, self._wide, compressor)
        return self._finish(norm, torch.zeros_like(spoilt))

    @torch.no_grad()
    def _widen(self) -> None:
        """Every gradient in fp32, to the copy of its parameter; the narrow ones go."""
        narrow = self._take_grads()
        if self._wide is None:
            self._make_wide()
            torch._foreach_copy_([_grad(copy) for copy in self._copies], narrow)
        else:
            torch._foreach_add_([_grad(copy) for copy in self._copies], narrow)

    def _make_wide(self) -> Tensor:
        """Memory for them."""
        sizes = [copy.numel() for copy in self._copies]
        self._wide = torch.empty(sum(sizes), dtype=torch.float32, device=self._place.device)
        for copy, part in zip(self._copies, torch.split(self._wide, sizes), strict=True):
            copy.grad = part.view(copy.shape)
        return self._wide

    def _take_grads(self) -> list[Tensor]:
        """Zeros where a batch reached nothing, such as an expert: every rank must have something to add up."""
        taken = [torch.zeros_like(param) if param.grad is None else param.grad for param in self._trained]
        for param in self._trained:
            param.grad = None
        return taken

    def _share(self) -> None:
        """The mean over the ranks. Widened gradients lie side by side, and go in one message."""
        if self._place.is_alone:
            return
        if self._wide is None:
            for param, grad in zip(self._trained, self._take_grads(), strict=True):
                param.grad = grad
        for each in [_grad(param) for param in self._trained] if self._wide is None else [self._wide]:
            dist.all_reduce(each)
            each.div_(self._place.world)

    def forget(self) -> None:
        super().forget()
        self._taken = 0
        if self._compressor is not None:
            self._compressor.forget()

    def go_on(self, counters: Counters, step: int) -> None:
        super().go_on(counters, step)
        self._taken = counters.optimizer_steps

    def own_states(self) -> Mapping[str, Tensor]:
        return {} if self._compressor is None else self._compressor.states()

    def states(self, *, write: bool) -> Iterator[State]:
        optimizers.make_states(self._optimizer)
        copies = {id(param): copy for param, copy in zip(self._trained, self._copies, strict=True)}
        return self._states_per_parameter(self._optimizer.state, copies, write=write)

    def shapes(self) -> Shapes:
        whole = {shard.path: shard.shape for shard in self._trainable()}
        kinds = moments(self._levers.optimizer)
        return dict.fromkeys((MASTER, *kinds) if self._has_copies else kinds, whole)

    def _weigh_optimizer(self) -> tuple[Iterable[Tensor], int, str, float]:
        elements = sum(copy.numel() for copy in self._copies)
        return iter(self._copies), elements, self._place.device.type, float(elements)


def _grad(tensor: Tensor) -> Tensor:
    assert tensor.grad is not None
    return tensor.grad
