"""Experts that several ranks share: expert parallel.

Neighbouring ranks read samples of their own, and each owns as many experts of every layer. A token's row travels to the
owners of its experts, once for each of them, and what they make of it travels back, to be weighted and added up where
the token is. The experts themselves are computed by transformers' own code, on the owner's experts alone: to it the
rows that arrive are tokens with one expert each, of weight one.

How many rows each rank sends to which is known on the device alone, and a collective wants the numbers on the host: so
every layer waits once for them. Where it recomputes, it routes and exchanges again, on all ranks in the same order.

The gradient of an expert is complete on its owner, as far as the group's tokens go. FSDP2 cuts experts up among the
ranks that own the same ones, and averages over these alone (`Fsdp2._average_shared`).

torch's tensor-parallel plans could cut the parameters too (torchtitan does so), and would hand DTensors to code that
expects plain ones. transformers' own expert parallel has every rank of a group read the same tokens.

Shapes: T tokens, K experts of each, R rows that arrive, H width; E experts of a layer, e of this rank, N ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from tightfit.memory.feedforward import busiest_load
from tightfit.messages import Message
from tightfit.train.build import body_of
from tightfit.train.exchange import Splits, exchange
from tightfit.train.mesh import EXPERTS
from tightfit.train.shards import OWNED, OwnedRows
from tightfit.types import ConfigError, ModelError

WEIGHTS = ("gate_up_proj", "down_proj")
"""The parameters of a module of experts, as transformers 5 has them: all experts of a layer in each."""


def find_experts(model: Any) -> Iterator[Any]:
    """The modules that hold the experts of a layer."""
    for module in body_of(model).modules():
        if all(getattr(getattr(module, name, None), "ndim", 0) == 3 for name in WEIGHTS):
            yield module


def own_experts(model: Any, mesh: DeviceMesh, *, is_rehearsal: bool = False) -> None:
    """Leave this rank's experts in the model, whose parameters may be on the meta device, and let their rows travel.
    `mesh`: with a dimension for the ranks among which experts are shared out. In a rehearsal this rank gets the rows of
    the busiest of them, as is priced."""
    group, size, index = mesh.get_group(EXPERTS), mesh[EXPERTS].size(), mesh.get_local_rank(EXPERTS)
    adapted = [module for module in model.modules() if type(module).__name__ == "ParamWrapper"]
    if adapted:
        raise ConfigError(Message("inputs.experts-adapted", size=size, model=type(body_of(model)).__name__))
    found = list(find_experts(model))
    named = (name for name, _ in body_of(model).named_modules())
    if not found and any(name.endswith(".experts") for name in named):  # each in a module, as transformers had them
        raise ModelError(Message("train.experts-apart", model=type(body_of(model)).__name__))
    for module in found:
        total = module.num_experts
        own = total // size
        for name in WEIGHTS:
            whole = getattr(module, name)
            part = whole.detach()[index * own : (index + 1) * own].clone()
            setattr(module, name, nn.Parameter(part, requires_grad=whole.requires_grad))
        module.num_experts = own
        setattr(module, OWNED, OwnedRows(index * own, total))
        load = busiest_load(total, size) if is_rehearsal else 1.0
        module.forward = partial(run_experts, module.forward, ExpertOwners(group, size, own, load))


@dataclass(frozen=True, slots=True)
class ExpertOwners:
    """The ranks that share experts."""

    group: Any
    size: int
    own: int  # experts of each
    load: float = 1.0  # in a rehearsal, rows that arrive for each one that is sent


Compute = Callable[[Tensor, Tensor, Tensor], Tensor]
"""What transformers has: rows, the numbers of their experts, and the weights of these → what they add up to."""


def run_experts(
    compute: Compute, owners: ExpertOwners, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """What `compute` returns of this rank's tokens, if it had all experts. It has this rank's."""
    count_T, top_k = top_k_index.shape
    order = torch.argsort(top_k_index.reshape(-1), stable=True)
    travel = plan_travel(top_k_index, owners)
    sent_SH = hidden_states[order // top_k]
    arrived_RH = exchange(sent_SH, owners.group, travel.there)
    del sent_SH
    made_RH = _compute_own(compute, arrived_RH, travel.experts_R)
    del arrived_RH
    back_SH = exchange(made_RH, owners.group, travel.back)
    del made_RH
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order), device=order.device)
    # As transformers adds them up: sums over a token's experts, in the wider of both precisions.
    weights_S1 = top_k_weights.reshape(-1)[order].unsqueeze(-1)
    return (back_SH * weights_S1)[place].view(count_T, top_k, -1).sum(dim=1).to(hidden_states.dtype)


def _compute_own(compute: Compute, arrived_RH: Tensor, experts_R: Tensor) -> Tensor:
    rows = len(arrived_RH)
    if not rows:
        # Others wait for this rank's part of the backward pass: a gradient of its experts, and of the rows, of which it
        # has none. One of zeros keeps both in the graph.
        arrived_RH = torch.cat((arrived_RH, arrived_RH.new_zeros(1, arrived_RH.shape[1])))
        experts_R = experts_R.new_zeros(1)
    ones = arrived_RH.new_ones(len(arrived_RH), 1)
    return compute(arrived_RH, experts_R.unsqueeze(-1), ones)[:rows]


@dataclass(frozen=True, slots=True)
class Travel:
    there: Splits
    experts_R: Tensor  # by which of this rank's experts a row that arrives is computed

    @property
    def back(self) -> Splits:
        return self.there.reverse()


def plan_travel(top_k_index: Tensor, owners: ExpertOwners) -> Travel:
    """Of rows that are sorted by expert."""
    chosen = top_k_index.reshape(-1)
    counts = chosen.new_zeros(owners.size * owners.own, dtype=torch.int64)
    counts.index_add_(0, chosen, torch.ones_like(chosen, dtype=torch.int64))  # for `bincount` the host would wait
    counts_Ne = counts.view(owners.size, -1)
    arriving_Ne = torch.empty_like(counts_Ne)
    dist.all_to_all_single(arriving_Ne, counts_Ne, group=owners.group)
    if owners.load > 1:
        arriving_Ne = (arriving_Ne * owners.load).round().long()
    sent, received = torch.stack((counts_Ne.sum(1), arriving_Ne.sum(1))).tolist()  # the host waits for the device
    numbers = torch.arange(owners.own, device=top_k_index.device).repeat(owners.size)
    experts_R = torch.repeat_interleave(numbers, arriving_Ne.view(-1), output_size=sum(received))
    return Travel(Splits(sent, received), experts_R)
