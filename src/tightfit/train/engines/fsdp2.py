"""PyTorch's `fully_shard`: fp32 shards of what trains, 16-bit computation, fp32 reductions.

Groups are what the footprint prices: the embedding, each layer, the final norm with the head; a tied embedding stays
with the root. Every micro batch reduces its gradients: to wait for the last one would hold whole fp32 gradients on each
rank. Where groups of ranks have a copy of the model each (`shard_within`), a group reduces its own so, and adds those
of the other groups to the sum of the window.

Where ranks share experts (`expert_parallel`), those of a layer are a group of their own within it, which only the ranks
that own the same ones cut up among themselves.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import nullcontext, suppress
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.amp.grad_scaler import OptState
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.profiler import record_function

from tightfit.messages import Message
from tightfit.train import optimizers
from tightfit.train.build import DTYPES, body_of, layers_of
from tightfit.train.config import OptimizerConfig
from tightfit.train.engines import Launched, Shapes, State, moments
from tightfit.train.engines.scaled import ScaledEngine
from tightfit.train.experts import find_experts
from tightfit.train.mesh import COPIES, OWNERS, TENSOR, make_mesh_of_all, share_mesh
from tightfit.train.place import Place
from tightfit.train.tensor import share_layers, uncut_modules
from tightfit.types import ConfigError, Levers

UNMARKED = nullcontext()
"""In place of a mark that nobody reads."""


def shard(model: Any, levers: Levers, mesh: DeviceMesh, place: Place, expert_mesh: DeviceMesh | None = None) -> None:
    """Shard in place; the model may be on the meta device, and then has its values yet to come. `mesh`: the grid of all
    ranks. `expert_mesh`: likewise as experts see it, where these have been shared out."""
    all_of_copy = shares = share_mesh(mesh)
    if levers.tensor_parallel > 1:
        share_layers(model, mesh[TENSOR])
        all_of_copy = share_mesh(make_mesh_of_all(levers, place))
    has_copies = COPIES in (shares.mesh_dim_names or ())
    # Inputs stay as the model hands them on, as under DeepSpeed and as they are priced: torch may cast them in the
    # forward pass and not in the recomputation, and then fp32 rotary tables end the backward pass.
    working, wide = DTYPES[levers.precision], torch.float32
    policy = MixedPrecisionPolicy(param_dtype=working, reduce_dtype=wide, cast_forward_inputs=False)
    options: dict[str, Any] = {"mp_policy": policy}
    if levers.offload_param != "none":
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=place.on_gpu and levers.buckets.pin_memory)
    body, layers = body_of(model), layers_of(model)
    if levers.tensor_parallel > 1:
        for layer in layers:  # little, and so gathered once for both passes
            fully_shard(uncut_modules(layer), mesh=all_of_copy, reshard_after_forward=False, **options)
    head, embedding = body.get_output_embeddings(), body.get_input_embeddings()
    groups: list[tuple[Any, DeviceMesh]] = [(layer, shares) for layer in layers]
    weight, tied = (getattr(each, "weight", None) for each in (head, embedding))  # another GPU may have either
    if weight is not tied:
        inner = getattr(body, body.base_model_prefix)
        norms = [child for name, child in inner.named_children() if "norm" in name or name == "ln_f"]
        below, above = [] if tied is None else [embedding], [] if weight is None else [[*norms, head]]
        groups = [*((each, all_of_copy) for each in below), *groups, *((each, all_of_copy) for each in above)]
    if expert_mesh is not None:
        owners = expert_mesh[COPIES, OWNERS] if has_copies else expert_mesh[OWNERS]
        groups = [*((module, owners) for module in find_experts(model)), *groups]  # inside of layers, so before them
    for group, ranks in (*groups, (model, all_of_copy)):
        fully_shard(group, mesh=ranks, **options)
    # Of groups, what is summed up between their turns is freed while it is read.
    if place.on_gpu and not has_copies:
        reduce_into_common_pool(model)
    mark_for_profilers()


def reduce_into_common_pool(model: Any) -> None:
    """torch's allocator has a pool for each stream, and FSDP2 reduces gradients on a stream of its own. So a rank's
    share of them lies beside the activations for ever, instead of where the backward pass has freed these: 3.5 GiB on
    each of 8 ranks for a 7.6B model. Here it comes from the pool of the stream that computes. The other stream has
    waited for all that this one was given (`foreach_reduce`); and this one for the other when the backward pass ends,
    before the optimizer reads the gradients, which are freed after that. What is only added to the gradients of earlier
    micro batches, or to those of other groups with the same shards, or cast, is freed at once: that stays in a pool of
    its own."""
    with suppress(ImportError, AttributeError):  # of older releases
        private: Any = import_module("torch.distributed.fsdp._fully_shard._fsdp_collectives")

        class CommonPool(private.DefaultReduceScatter):  # type: ignore[misc]
            def __init__(self, group: Any) -> None:
                self.group = group

            def allocate(self, size: Iterable[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
                parameters = [each.sharded_param for each in self.group.fsdp_params]
                stays = self.group.all_reduce_grads and all(
                    each.grad is None and each.dtype == dtype and each.device == device
                    for each in parameters
                    if each.requires_grad
                )
                with torch.cuda.stream(torch.cuda.default_stream(device) if stays else None):
                    return torch.empty(*size, dtype=dtype, device=device)

        for module in model.modules():
            group = module._get_fsdp_state()._fsdp_param_group if isinstance(module, FSDPModule) else None
            if group is not None:
                module.set_custom_reduce_scatter(CommonPool(group))


def mark_for_profilers() -> None:
    """FSDP2 marks a dozen ranges of each group and step for profilers. A mark takes the host as long as launching five
    kernels, whether anybody profiles or not: so now only if."""
    watched: Any = import_module("torch.autograd")._profiler_enabled
    with suppress(ImportError):
        inside: Any = import_module("torch.distributed.fsdp._fully_shard._fsdp_param_group")
        inside.record_function = lambda name: record_function(name) if watched() else UNMARKED


class Fsdp2(ScaledEngine):
    def __init__(self, model: Any, levers: Levers, place: Place, training: OptimizerConfig) -> None:
        super().__init__(model, levers, place, training)
        if levers.optimizer == "adafactor":
            raise ConfigError(Message("engine.adafactor-fsdp2"))
        groups = optimizers.groups(model, training.weight_decay)
        made = optimizers.make_optimizer(levers.optimizer, groups, fused=True)
        assert isinstance(made, optimizers.LocalParts)
        self._optimizer: optimizers.LocalParts = made
        params: list[Any] = list(model.parameters())
        self._shared = [each for each in params if {TENSOR, OWNERS} & {*each.device_mesh.mesh_dim_names}]
        # Of shared layers, what is not cut within them is cut over all ranks that together have all of them.
        mesh = next(each.device_mesh for each in params if not {TENSOR, OWNERS} & {*each.device_mesh.mesh_dim_names})
        self._has_copies = mesh.ndim > 1
        self._sharing = mesh.get_group(mesh.ndim - 1)  # ranks that share a copy of these layers

    def backward(self, loss: Tensor, *, last: bool) -> None:
        self._set_reduction(last=last)
        super().backward(loss, last=last)

    def _set_reduction(self, *, last: bool) -> None:
        if self._has_copies:  # what others have of the same is added once, to the sum of the window
            self.model.set_requires_all_reduce(last)

    def step(self, learning_rate: float) -> Launched:
        optimizers.set_rate(self._optimizer, learning_rate)
        self._average_shared()
        if self._levers.tensor_parallel * self._levers.expert_parallel > 1:
            self._unscale_parts()
        else:
            self._scaler.unscale_(self._optimizer)
        return self._launch(self._optimizer.grads(), None if self._place.is_alone else self._add_up)

    def _unscale_parts(self) -> None:
        """As the scaler does it, which hands all gradients to one operation: of several meshes older releases of torch
        refuse them, and newer ones ask the ranks of the first mesh alone whether something overflowed."""
        scaler: Any = self._scaler
        if not scaler.is_enabled():
            return
        scale: Tensor = scaler._scale
        overflowed = torch.zeros_like(scale)
        parts = [grad for grad in self._optimizer.grads() if grad.numel()]
        torch._amp_foreach_non_finite_check_and_unscale_(parts, overflowed, scale.double().reciprocal().float())
        dist.all_reduce(overflowed, dist.ReduceOp.MAX, group=self._sharing)
        state = scaler._per_optimizer_states[id(self._optimizer)]
        state |= {"stage": OptState.UNSCALED, "found_inf_per_device": {overflowed.device: overflowed}}

    def _add_up(self, norm: Tensor) -> None:
        """Over the ranks that together have all of the model, once."""
        dist.all_reduce(norm, group=self._sharing)

    def _average_shared(self) -> None:
        """The loss is scaled for a mean over all ranks. What ranks that share layers or experts have cut is reduced
        over the others alone: each of them has the gradient of all of their tokens. FSDP2 could divide by another
        number, but with gloo not by any."""
        held: list[Any] = [param.grad for param in self._shared if param.grad is not None]
        if held:
            ranks = self._levers.tensor_parallel * self._levers.expert_parallel
            torch._foreach_div_([grad._local_tensor for grad in held], float(ranks))

    def train(self, mode: bool) -> None:
        super().train(mode)
        if mode:  # what an evaluation has left gathered
            for module in self.model.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()

    def states(self, *, write: bool) -> Iterator[State]:
        optimizers.make_states(self._optimizer)
        return self._states_per_parameter(self._optimizer.state, {}, write=write)

    def shapes(self) -> Shapes:
        return dict.fromkeys(moments(self._levers.optimizer), self.trained())

    def _weigh_optimizer(self) -> tuple[Iterable[Tensor], int, str, float]:
        shards = self._trainable()
        # Whole rows are shared out: of few of them a rank has more than an even share.
        ranks = self._levers.shards(self._place.world) * self._levers.tensor_parallel
        fair = sum(-(-shard.shape[0] // ranks) * (shard.numel // shard.shape[0]) for shard in shards)
        worked_on = (param for group in self._optimizer.param_groups for param in group["params"])
        return worked_on, sum(shard.size for shard in shards), self._rests_on, fair
