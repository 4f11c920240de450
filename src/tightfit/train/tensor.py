"""Layers that several ranks share: tensor parallel.

Each rank has some of the heads of attention and some of the width of the MLP, so the matrices in front of them are cut
into rows (`colwise` in the plans of transformers, which think of outputs as columns) and those behind them into columns
(`rowwise`). Outside of these blocks a rank has a part of the tokens (`row_parts.py`): embedding, norms, residual
stream, head and loss. Where a block begins the ranks gather their tokens; at its end each has a share of every sum, and
a reduction leaves each rank the sums of its own tokens. Backwards it is the other way round.

Which matrix is cut how, transformers says (`base_model_tp_plan`). The cut ones are DTensors on the mesh of these ranks,
so FSDP2 cuts them further, and their placements say what a rank holds. They are multiplied as the plain tensors that
they are on each rank. PyTorch's own styles (`ColwiseParallel` …) send DTensors through every operation, at tens of
microseconds of the host's time each; they gather the input of q, k and v three times; and adapters, fused kernels and
the choice of what to recompute would meet DTensors in places where they know of none.

What is not cut (norms, also those of heads; half of each adapter) has on each rank the gradient of what this rank
computed with it, and the sum over all ranks is its gradient, as with everything outside of layers. So FSDP2 cuts it
over all ranks. Adapters need no message of their own: of a matrix cut into rows, the first of the two is whole and the
second is cut likewise; of one cut into columns, the first is cut likewise, and what the second makes of its share is
reduced together with the share of the matrix itself.

Shapes: B rows, T tokens of a part, L of whole rows, H hidden; N ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from tightfit.messages import Message
from tightfit.train.build import body_of, layers_of
from tightfit.train.place import gather_into, scatter_sum_into
from tightfit.types import ModelError

ROWS, COLUMNS = "colwise", "rowwise"
"""How plans call matrices that are cut into rows, and into columns."""
IN_LAYERS = "layers.*."
"""What plans put before the name of a module inside of each layer."""


LIBRARY = torch.library.Library("tightfit", "FRAGMENT")  # type: ignore[no-untyped-call]
LIBRARY.define("add_up(Tensor share, str group) -> Tensor")  # type: ignore[no-untyped-call]
ADD_UP = torch.ops.tightfit.add_up.default
"""The reduction as one operation, so that a layer of which some parts are computed again can keep what it leaves."""


def share_layers(model: Any, mesh: DeviceMesh) -> None:
    """Cut the layers of a model on the meta device, in place, and put the exchanges around their blocks."""
    body, group = body_of(model), mesh.get_group()
    plan = getattr(body.config, "base_model_tp_plan", None) or {}
    styles = {name.removeprefix(IN_LAYERS): style for name, style in plan.items() if name.startswith(IN_LAYERS)}
    cuts = {name: style for name, style in styles.items() if style in (ROWS, COLUMNS)}
    for layer in layers_of(model):
        for name in find_uncut(layer, cuts):
            raise ModelError(Message("train.not-in-plan", name=name, model=type(body).__name__, size=mesh.size()))
        for name, style in cuts.items():
            _cut(layer.get_submodule(name), style, mesh)
        for block in {name.rpartition(".")[0] for name in cuts}:
            gather_first = partial(_gather_first, group)
            layer.get_submodule(block).register_forward_pre_hook(gather_first, with_kwargs=True)


def find_uncut(layer: nn.Module, cuts: dict[str, str]) -> Iterator[str]:
    """What of a layer a plan does not tell how to share, by name."""
    blocks = {name.rpartition(".")[0] for name in cuts}
    if not blocks or "" in blocks:
        yield type(layer).__name__
    named = dict(layer.named_modules())
    known: set[nn.Module] = set()
    for name, style in cuts.items():
        linear = getattr(named.get(name), "base_layer", named.get(name))
        if not isinstance(linear, nn.Linear) or (style == COLUMNS and linear.bias is not None):
            yield name
        else:
            known |= {linear, *_adapters(named[name], "lora_A"), *_adapters(named[name], "lora_B")}
    for name, module in named.items():
        for leaf, param in module.named_parameters(recurse=False):
            # A norm over each head has the same weights for all of them.
            block = next((each for each in blocks if name.startswith(f"{each}.")), None)
            heads_own = block is not None and tuple(param.shape) != (getattr(named[block], "head_dim", None),)
            if module not in known and (param.dim() > 1 or heads_own):
                yield f"{name}.{leaf}"


def uncut_modules(layer: nn.Module) -> list[nn.Module]:
    """Those of a shared layer whose parameters every rank has whole."""
    return [
        module
        for module in layer.modules()
        if any(not isinstance(param, DTensor) for param in module.parameters(recurse=False))
    ]


def _adapters(module: nn.Module, name: str) -> list[nn.Module]:
    return list(getattr(module, name, nn.ModuleDict()).values())


def _cut(module: Any, style: str, mesh: DeviceMesh) -> None:
    """`module`: a linear layer, or PEFT's around one."""
    linear = getattr(module, "base_layer", module)
    dim = 0 if style == ROWS else 1
    for each in (linear, *_adapters(module, "lora_B" if style == ROWS else "lora_A")):
        for leaf, param in each.named_parameters(recurse=False):
            cut = distribute_tensor(param.detach(), mesh, [Shard(dim)])
            each._parameters[leaf] = nn.Parameter(cut, requires_grad=param.requires_grad)
        each.forward = MethodType(multiply_part, each)
    if style == COLUMNS:
        module.forward = MethodType(partial(_reduce_after, module.forward, mesh.get_group()), module)
        module.has_shares = True


def multiply_part(linear: Any, inputs: Tensor) -> Tensor:
    """What a linear layer computes, with this rank's part of its matrix."""
    bias = None if linear.bias is None else linear.bias.to_local()
    return nn.functional.linear(inputs, linear.weight.to_local(), bias)


def _gather_first(
    group: Any, _: nn.Module, words: tuple[Any, ...], named: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Before a block, whose first argument is what it reads."""
    if words:
        return (GatherTokens.apply(words[0], group), *words[1:]), named  # type: ignore[no-untyped-call]
    return words, {**named, "hidden_states": GatherTokens.apply(named["hidden_states"], group)}  # type: ignore[no-untyped-call]


def _reduce_after(forward: Callable[..., Tensor], group: Any, _: nn.Module, *words: Any, **named: Any) -> Any:
    return Reduce.apply(forward(*words, **named), group)  # type: ignore[no-untyped-call]


class GatherTokens(torch.autograd.Function):
    """(B, T, H) → (B, L, H)."""

    @staticmethod
    def forward(ctx: Any, part_BTH: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return gather(part_BTH, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return reduce(grads[0], ctx.group), None


class Reduce(torch.autograd.Function):
    """(B, L, H) → (B, T, H), summed over the ranks."""

    @staticmethod
    def forward(ctx: Any, share_BLH: Tensor, group: Any) -> Tensor:
        ctx.group = group
        summed: Tensor = ADD_UP(share_BLH, group.group_name)
        return summed

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return gather(grads[0], ctx.group), None


def gather(part_BTH: Tensor, group: Any) -> Tensor:
    (rows, *rest), size = part_BTH.shape, group.size()
    arrived = part_BTH.new_empty(size * rows, *rest)
    gather_into(arrived, part_BTH.contiguous(), group)
    return arrived.view(size, rows, *rest).transpose(0, 1).flatten(1, 2)  # of one row without a copy


def reduce(share_BLH: Tensor, group: Any) -> Tensor:
    (rows, tokens, hidden), size = share_BLH.shape, group.size()
    sent_NBTH = share_BLH.view(rows, size, tokens // size, hidden).transpose(0, 1).contiguous()
    summed_BTH = torch.empty_like(sent_NBTH[0])
    scatter_sum_into(summed_BTH, sent_NBTH.flatten(0, 1), group)
    return summed_BTH


@torch.library.impl(LIBRARY, "add_up", "CompositeExplicitAutograd")
def _add_up(share_BLH: Tensor, group: str) -> Tensor:
    groups: Any = dist.distributed_c10d
    return reduce(share_BLH, groups._resolve_process_group(group))
