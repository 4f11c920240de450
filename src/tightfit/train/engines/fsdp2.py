"""PyTorch's `fully_shard`: fp32 shards of what trains, 16-bit computation, fp32 reductions.

Groups are what the footprint prices: the embedding, each layer, the final norm with the head; a tied embedding stays
with the root. Every micro batch reduces its gradients: to wait for the last one would hold whole fp32 gradients on each
rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

from tightfit.messages import Message
from tightfit.train import optimizers
from tightfit.train.build import DTYPES, body_of, layers_of
from tightfit.train.config import OptimizerConfig
from tightfit.train.engines import Counters, Engine, LossScale, Shapes, State, Stepped, moments
from tightfit.train.place import Place
from tightfit.types import ConfigError, Levers

GROWTH_INTERVAL = 1000
"""Steps without an overflow after which the loss scale doubles, as in the DeepSpeed files that we write."""


def shard(model: Any, levers: Levers, place: Place) -> None:
    """Shard in place; the model may be on the meta device, and then has its values yet to come."""
    mesh = init_device_mesh(place.device.type, (place.world,))
    # Inputs stay as the model hands them on, as under DeepSpeed and as they are priced: torch may cast them in the
    # forward pass and not in the recomputation, and then fp32 rotary tables end the backward pass.
    working, wide = DTYPES[levers.precision], torch.float32
    policy = MixedPrecisionPolicy(param_dtype=working, reduce_dtype=wide, cast_forward_inputs=False)
    options: dict[str, Any] = {"mesh": mesh, "mp_policy": policy}
    if levers.offload_param != "none":
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=place.on_gpu and levers.buckets.pin_memory)
    body, groups = body_of(model), list[Any](layers_of(model))
    head, embedding = body.get_output_embeddings(), body.get_input_embeddings()
    if head.weight is not embedding.weight:
        inner = getattr(body, body.base_model_prefix)
        norms = [child for name, child in inner.named_children() if "norm" in name or name == "ln_f"]
        groups = [embedding, *groups, [*norms, head]]
    for group in (*groups, model):
        fully_shard(group, **options)


class Fsdp2(Engine):
    def __init__(self, model: Any, levers: Levers, place: Place, training: OptimizerConfig) -> None:
        super().__init__(model, levers, place)
        if levers.optimizer == "adafactor":
            raise ConfigError(Message("engine.adafactor-fsdp2"))
        self._clip = training.clip
        groups = optimizers.groups(model, training.weight_decay)
        self._optimizer = optimizers.make_optimizer(levers.optimizer, groups, fused=True)
        self._rests_on = "cpu" if levers.offload_param != "none" else place.device.type
        self._first_power = training.first_scale_power
        self._scaler = self._fresh_scaler()

    def _fresh_scaler(self) -> torch.amp.GradScaler:
        """Without fp16, one that changes nothing."""
        first, is_fp16 = 2.0 ** (self._first_power or 0), self._first_power is not None
        return torch.amp.GradScaler(self._rests_on, first, growth_interval=GROWTH_INTERVAL, enabled=is_fp16)

    def backward(self, loss: Tensor, *, last: bool) -> None:
        self._scaler.scale(loss).backward()  # type: ignore[no-untyped-call]

    def step(self, learning_rate: float) -> Stepped:
        optimizers.set_rate(self._optimizer, learning_rate)
        self._scaler.unscale_(self._optimizer)
        trained = [param for param in self.model.parameters() if param.requires_grad]
        norm = nn.utils.clip_grad_norm_(trained, self._clip if self._clip > 0 else float("inf"))
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        skipped = not bool(torch.isfinite(norm))
        if self._scaler.is_enabled() or not skipped:
            self._scaler.step(self._optimizer)
            self._scaler.update()
        self._optimizer.zero_grad()
        scale = float(self._scaler.get_scale()) if self._scaler.is_enabled() else None
        return Stepped(grad_norm=float(norm), skipped=skipped, loss_scale=scale)

    def forget(self) -> None:
        optimizers.forget(self._optimizer)
        self._scaler = self._fresh_scaler()

    def states(self, *, write: bool) -> Iterator[State]:
        optimizers.make_states(self._optimizer)
        return self._states_per_parameter(self._optimizer.state, {}, write=write)

    def shapes(self) -> Shapes:
        whole = {shard.path: shard.shape for shard in self._trainable()}
        return dict.fromkeys(moments(self._levers.optimizer), whole)

    def counters(self) -> Counters:
        scale = None
        if tracked := self._scaler.state_dict():
            scale = LossScale(value=tracked["scale"], good_steps=tracked["_growth_tracker"], hysteresis=None)
        return Counters(optimizer_steps=optimizers.count_steps(self._optimizer), scale=scale)

    def go_on(self, counters: Counters, step: int) -> None:
        optimizers.set_steps(self._optimizer, counters.optimizer_steps)
        if (tracked := self._scaler.state_dict()) and counters.scale is not None:
            tracked |= {"scale": counters.scale.value, "_growth_tracker": counters.scale.good_steps % GROWTH_INTERVAL}
            self._scaler.load_state_dict(tracked)

    def _weigh_optimizer(self) -> tuple[Iterable[Tensor], int, str, float]:
        shards = self._trainable()
        # Whole rows are shared out: of few of them a rank has more than an even share.
        fair = sum(-(-shard.shape[0] // self._place.world) * (shard.numel // shard.shape[0]) for shard in shards)
        worked_on = (param for group in self._optimizer.param_groups for param in group["params"])
        return worked_on, sum(shard.size for shard in shards), self._rests_on, fair
