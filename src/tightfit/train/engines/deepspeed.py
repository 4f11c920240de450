"""DeepSpeed's engine, stages 0 to 3, with the file that the plan wrote.

Three habits of it are met here. Stage 0 takes a step while it starts: the optimizer begins at learning rate zero, so
nothing moves, and its counters are set back. `backward` would divide by the accumulation and the reduction divides by
the ranks: the loss arrives as a share of the window's mean already, so the first is switched off and the second made
good. ZeRO-3 wants the model built under its own context, the other stages take it whole.
"""

from __future__ import annotations

import copy
import logging
import shutil
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from tightfit.mamba.install import whole_mixers
from tightfit.messages import Message
from tightfit.train import optimizers
from tightfit.train.engines import AGAINST_OVERFLOWS, HeldHere, ScaleExhausted, Stepped, precisions
from tightfit.train.engines.deepspeed_states import (
    deepspeed_shapes,
    deepspeed_states,
    gather_again,
    scale_of,
    set_scale,
)
from tightfit.train.engines.states import Counters, Shapes, State
from tightfit.train.loss import WindowLoss
from tightfit.train.nvme import MOMENTS, is_on_nvme, nvme_states
from tightfit.train.place import Place
from tightfit.train.shards import Shard, outline
from tightfit.types import ConfigError, Levers

NVME_BUFFERS = 5
"""DeepSpeed's own number, where a file says none."""


class DeepSpeed:
    def __init__(
        self, model: Any, config: Mapping[str, Any], levers: Levers, place: Place, weight_decay: float
    ) -> None:
        import deepspeed

        self.model, self._levers, self._place = model, levers, place
        self._loss = WindowLoss(model, levers.loss)
        made = None if "optimizer" in config else self._optimizer(model, weight_decay)
        options: dict[str, Any] = {"model": model, "config": copy.deepcopy(dict(config))}
        if made is None:
            options["model_parameters"] = optimizers.groups(model, weight_decay)
            options["config"]["optimizer"]["params"]["lr"] = 0.0
        else:
            options["optimizer"] = made
        buffers = [
            (module, name, buffer)
            for module in model.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None and buffer.is_floating_point()
        ]
        if self.stage == 3 and levers.scan == "tightfit":
            gather_mixers_whole(model, config)
        self._engine, *_ = deepspeed.initialize(**options)
        # DeepSpeed rounds buffers to 16 bits with the weights; rotary frequencies do not survive that.
        for module, name, buffer in buffers:
            module._buffers[name] = buffer.to(place.device)
        self._wrapper = self._engine.optimizer
        self._basic = self._engine.basic_optimizer
        self._scaler = copy.deepcopy(getattr(getattr(self._wrapper, "loss_scaler", None), "__dict__", {}))
        if self.stage == 0:
            optimizers.forget(self._basic)

    @property
    def stage(self) -> int:
        return self._levers.stage or 0

    def _optimizer(self, model: nn.Module, weight_decay: float) -> torch.optim.Optimizer:
        groups = optimizers.groups(model, weight_decay)
        if self.stage and "8bit" in self._levers.optimizer:
            raise ConfigError(
                Message("engine.states-of-no-parameter", engine=self._levers.engine, optimizer=self._levers.optimizer)
            )
        kind, offloaded = self._levers.optimizer, self._levers.offload_optimizer != "none"
        if kind == "adamw" and offloaded:
            from deepspeed.ops.adam import DeepSpeedCPUAdam

            made: torch.optim.Optimizer = DeepSpeedCPUAdam(
                groups, lr=0.0, betas=optimizers.BETAS, eps=optimizers.EPS, adamw_mode=True
            )
            return made
        if kind == "adamw" and self.stage == 0 and self._place.on_gpu and shutil.which("nvcc"):
            from deepspeed.ops.adam import FusedAdam  # flat states, as they are priced; it has to be compiled

            fused: torch.optim.Optimizer = FusedAdam(groups, lr=0.0, betas=optimizers.BETAS, eps=optimizers.EPS)
            return fused
        return optimizers.make_optimizer(kind, groups, fused=self._place.on_gpu)

    def forward(self, inputs: dict[str, Tensor], divisor: float) -> Tensor:
        self._loss.divisor = divisor / self._place.world  # the reduction divides by the ranks
        loss: Tensor = self._engine(**inputs, use_cache=False).loss
        return loss

    def backward(self, loss: Tensor, *, last: bool) -> None:
        self._engine.backward(loss, scale_wrt_gas=False)
        if not last:
            self._engine.step()  # which only counts the micro batches

    def step(self, learning_rate: float) -> Stepped:
        optimizers.set_rate(self._basic, learning_rate)
        skipped_before = self._engine.skipped_steps
        try:
            self._engine.step()
        except Exception as error:
            if "loss scale already at minimum" not in str(error):
                raise
            raise ScaleExhausted(Message("engine.smallest-scale", advice=AGAINST_OVERFLOWS)) from None
        norm = self._engine.get_global_grad_norm()
        scale = self._engine.optimizer.loss_scale if self._levers.precision == "fp16" else None
        return Stepped(
            grad_norm=None if norm is None else float(norm),
            skipped=self._engine.skipped_steps > skipped_before,
            loss_scale=None if scale is None else float(scale),
        )

    def forget(self) -> None:
        if self._levers.offload_optimizer == "nvme":
            for _, states in nvme_states(self._wrapper, write=True):
                for name in MOMENTS & states.keys():
                    states[name].zero_()
        optimizers.forget(self._basic)
        scaler = getattr(self._wrapper, "loss_scaler", None)
        if scaler is not None:
            scaler.__dict__.update(copy.deepcopy(self._scaler))
        for counter in ("global_steps", "micro_steps", "global_samples", "skipped_steps"):
            setattr(self._engine, counter, 0)

    def _trainable(self) -> list[Shard]:
        return [shard for shard in outline(self.model, self._place.rank) if shard.parameter.requires_grad]

    def states(self, *, write: bool) -> Iterator[State]:
        return deepspeed_states(self._trainable(), self._wrapper, self._basic, write=write)

    def shapes(self) -> Shapes:
        return deepspeed_shapes(self._trainable(), self._wrapper, self._basic, self._levers.optimizer)

    def counters(self) -> Counters:
        scaler = self._wrapper.loss_scaler if self._levers.precision == "fp16" else None
        return Counters(
            optimizer_steps=optimizers.count_steps(self._basic), scale=None if scaler is None else scale_of(scaler)
        )

    def go_on(self, counters: Counters, step: int) -> None:
        optimizers.set_steps(self._basic, counters.optimizer_steps)
        if counters.scale is not None and self._levers.precision == "fp16":
            set_scale(self._wrapper.loss_scaler, counters.scale)
        self._engine.global_steps = step
        self._engine.skipped_steps = max(0, step - counters.optimizer_steps)
        self._engine.micro_steps = step * self._levers.accumulation
        self._engine.global_samples = step * self._engine.train_batch_size()
        gather_again(self._wrapper)

    def train(self, mode: bool) -> None:
        self._engine.train(mode)

    def holdings(self) -> HeldHere:
        here = whole = 0
        devices = set()
        frozen: list[Tensor] = []
        trained: list[Tensor] = []
        for param in self.model.parameters():
            part: Tensor = getattr(param, "ds_tensor", param.data)
            (trained if param.requires_grad else frozen).append(part)
            here += getattr(part, "ds_numel", part.numel()) * param.element_size()  # a part in a file has a stand-in
            whole += getattr(param, "ds_numel", param.numel()) * param.element_size()
            devices.add("nvme" if is_on_nvme(param) else part.device.type)
        masters = list(self._masters())
        elements, places = [tensor.numel() for tensor in masters], [tensor.device.type for tensor in masters]
        if self._levers.offload_optimizer == "nvme":  # they are in files, and the tensors empty
            in_file = self._wrapper._swappable_optimizer_subgroup
            elements = [int(numel) for numel in self._wrapper.fp16_partitioned_groups_flat_numel]
            places = ["nvme" if in_file(number) else place for number, place in enumerate(places)]
        return HeldHere(
            weight_bytes=here,
            whole_weight_bytes=whole,
            state_elements=sum(elements),
            trainable_elements=sum(
                getattr(param, "ds_numel", param.numel()) for param in self.model.parameters() if param.requires_grad
            ),
            weights_on=",".join(sorted(devices)),
            optimizer_on=",".join(sorted(set(places))),
            frozen_in=precisions(frozen),
            trained_in=precisions(trained),
            optimizer_in=precisions(masters),
        )

    def _masters(self) -> list[Tensor]:
        """The fp32 copies that this rank's optimizer works on, or what it works on instead."""
        for name in ("single_partition_of_fp32_groups", "fp32_partitioned_groups_flat", "fp32_groups_flat"):
            found = getattr(self._wrapper, name, None)
            if found:
                return [tensor for tensor in found if isinstance(tensor, Tensor)]
        return [param for group in self._basic.param_groups for param in group["params"]]


def gather_mixers_whole(model: nn.Module, config: Mapping[str, Any]) -> None:
    """ZeRO-3's hooks on the inside of a Mamba mixer would keep it from being computed as one function. Of a leaf the
    whole is gathered at once, and its gradients are reduced together, when that of its input is there: the norm below
    each mixer trains with it, so there always is one."""
    from deepspeed.utils import set_z3_leaf_modules

    classes = whole_mixers(model)
    if not classes:
        return
    # From NVMe each parameter comes through a buffer of its own, and Mamba's head holds one from start to end.
    offload = config["zero_optimization"].get("offload_param") or {}
    mixers = [module for module in model.modules() if type(module) in classes]
    if max(sum(map(is_on_nvme, mixer.parameters())) for mixer in mixers) < offload.get("buffer_count", NVME_BUFFERS):
        set_z3_leaf_modules(model, classes)


def quiet() -> None:
    """DeepSpeed logs every choice that it makes; what matters of them is proved and said by us."""
    import deepspeed

    deepspeed.utils.logger.setLevel(logging.ERROR)


def join(place: Place) -> None:
    """Tell DeepSpeed of the group that is there already."""
    import deepspeed

    quiet()
    deepspeed.init_distributed(
        dist_backend="fake" if place.rehearsal else None, dist_init_required=False, verbose=False
    )
