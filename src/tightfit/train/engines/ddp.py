"""Every GPU has everything, and torch alone computes it.

Engines that cut a model up have hooks for that, tens of microseconds of the host's time for each parameter and step:
more than the GPU's work on a small batch, and for nothing where the model fits, as with adapters it mostly does. Here
autograd leaves its gradients where they are, and the optimizer works on fp32 copies of what trains. Gradients are
widened all at once: before the step or, with accumulation, after each micro batch, so that nothing is added up in 16
bits. Then the ranks add them up, in one message. In fp32, and in pure 16 bits, there are no copies.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tightfit.inputs.flags import find_ddp_obstacle
from tightfit.train import optimizers
from tightfit.train.config import OptimizerConfig
from tightfit.train.engines import MASTER, Launched, Shapes, State, moments
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

    def backward(self, loss: Tensor, *, last: bool) -> None:
        super().backward(loss, last=last)
        if self._accumulates:
            self._widen()

    @torch.no_grad()
    def step(self, learning_rate: float) -> Launched:
        optimizers.set_rate(self._optimizer, learning_rate)
        if self._has_copies and not self._accumulates:
            self._widen()
        self._share()
        self._scaler.unscale_(self._optimizer)
        launched = self._launch([copy.grad for copy in self._copies if copy.grad is not None])
        self._wide = None
        if self._has_copies:
            torch._foreach_copy_(self._trained, self._copies)
        return launched

    @torch.no_grad()
    def _widen(self) -> None:
        """Every gradient in fp32, to the copy of its parameter; the narrow ones go."""
        narrow = self._take_grads()
        if self._wide is None:
            sizes = [copy.numel() for copy in self._copies]
            self._wide = torch.empty(sum(sizes), dtype=torch.float32, device=self._place.device)
            for copy, part in zip(self._copies, torch.split(self._wide, sizes), strict=True):
                copy.grad = part.view(copy.shape)
            torch._foreach_copy_([_grad(copy) for copy in self._copies], narrow)
        else:
            torch._foreach_add_([_grad(copy) for copy in self._copies], narrow)

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
