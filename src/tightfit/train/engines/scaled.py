"""What engines share whose optimizer is torch's own: the loss scale, clipping and the step. The host waits for none of
them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tightfit.train import optimizers
from tightfit.train.config import OptimizerConfig
from tightfit.train.engines import Counters, Engine, Launched, LossScale
from tightfit.train.place import Place
from tightfit.types import Levers

GROWTH_INTERVAL = 1000
"""Steps without an overflow after which the loss scale doubles, as in the DeepSpeed files that we write."""


class ScaledEngine(Engine):
    """Whoever inherits makes `_optimizer`."""

    _optimizer: torch.optim.Optimizer

    def __init__(self, model: Any, levers: Levers, place: Place, training: OptimizerConfig) -> None:
        super().__init__(model, levers, place)
        self._clip, self._first_power = training.clip, training.first_scale_power
        self._rests_on = "cpu" if levers.offload_param != "none" else place.device.type
        self._scaler = self._fresh_scaler()

    def _fresh_scaler(self) -> torch.amp.GradScaler:
        """Without fp16, one that changes nothing."""
        first, is_fp16 = 2.0 ** (self._first_power or 0), self._first_power is not None
        return torch.amp.GradScaler(self._rests_on, first, growth_interval=GROWTH_INTERVAL, enabled=is_fp16)

    def backward(self, loss: Tensor, *, last: bool) -> None:
        with self._inside():
            self._scaler.scale(loss).backward()  # type: ignore[no-untyped-call]

    def _launch(self, grads: list[Tensor], reduce: Callable[[Tensor], Any] | None = None, copies: int = 0) -> Launched:
        """Clip these gradients and take a step with them, unless they are not finite. `reduce` adds up the ranks'
        numbers in place; None: there is one rank. `copies`: how many, of the last ones, another rank counts."""
        norm = optimizers.clip(grads, self._clip, reduce, copies)
        spoilt = torch.isfinite(norm).logical_not().float()
        optimizers.step_unless(self._optimizer, spoilt)
        return self._finish(norm, spoilt)

    def _finish(self, norm: Tensor, spoilt: Tensor) -> Launched:
        self._scaler.update()
        self._optimizer.zero_grad()
        scale = self._scaler._get_scale_async() if self._scaler.is_enabled() else None
        return Launched(grad_norm=norm, skipped=spoilt, loss_scale=scale)

    def forget(self) -> None:
        optimizers.forget(self._optimizer)
        self._scaler = self._fresh_scaler()

    def counters(self) -> Counters:
        return Counters(optimizer_steps=optimizers.count_steps(self._optimizer), scale=self._read_scale())

    def go_on(self, counters: Counters, step: int) -> None:
        optimizers.set_steps(self._optimizer, counters.optimizer_steps)
        self._set_scale(counters)

    def _read_scale(self) -> LossScale | None:
        if not (tracked := self._scaler.state_dict()):
            return None
        return LossScale(value=tracked["scale"], good_steps=tracked["_growth_tracker"], hysteresis=None)

    def _set_scale(self, counters: Counters) -> None:
        if (tracked := self._scaler.state_dict()) and counters.scale is not None:
            tracked |= {"scale": counters.scale.value, "_growth_tracker": counters.scale.good_steps % GROWTH_INTERVAL}
            self._scaler.load_state_dict(tracked)
