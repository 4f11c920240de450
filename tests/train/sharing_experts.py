"""One rank of four that share the experts of a layer: for each way to route below, what it computes of its own tokens
and all gradients, against a layer that has all experts, in float64. Rank 0 prints for each how far they are from each
other, against the largest of each.
"""

from __future__ import annotations

import json
import os
import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import AutoConfig
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

from tightfit.train.experts import own_experts
from tightfit.train.mesh import make_expert_mesh
from tightfit.train.place import Place
from tightfit.types import Levers

RANKS, EXPERTS, TOKENS, TOP_K, HIDDEN = 4, 8, 12, 2, 16
WAYS = ("by chance", "to a single rank", "one rank gets nothing", "each keeps its own", "one expert alone")


def route(way: str, rank: int) -> Tensor:
    """The experts of each token. Ranks own two experts each."""
    chance = torch.argsort(torch.rand(TOKENS, EXPERTS), dim=1)[:, :TOP_K]
    return {
        "by chance": chance,
        "to a single rank": chance % 2 + 4,
        "one rank gets nothing": chance % 6 + 2,
        "each keeps its own": torch.tensor([[2 * rank, 2 * rank + 1]]).repeat(TOKENS, 1),
        "one expert alone": torch.full((TOKENS, TOP_K), 7),
    }[way]


def compare(way: str, place: Place) -> float:
    hf = AutoConfig.for_model(
        "mixtral", num_local_experts=EXPERTS, hidden_size=HIDDEN, intermediate_size=24, num_hidden_layers=1
    )
    hf._experts_implementation = "eager"  # the others know no float64
    torch.manual_seed(0)
    whole = MixtralExperts(hf).double()
    for param in whole.parameters():
        nn.init.normal_(param)
    shared = MixtralExperts(hf).double()
    shared.load_state_dict(whole.state_dict())
    own_experts(shared, make_expert_mesh(Levers(engine="fsdp2", expert_parallel=RANKS), place))
    torch.manual_seed(1 + place.rank)  # tokens of its own
    hidden, weights = torch.randn(TOKENS, HIDDEN).double(), torch.rand(TOKENS, TOP_K).double()
    chosen, asked = route(way, place.rank), torch.randn(TOKENS, HIDDEN).double()
    found: dict[nn.Module, list[Tensor]] = {}
    for layer in (whole, shared):
        given = [each.clone().requires_grad_() for each in (hidden, weights)]
        made = layer(given[0], chosen, given[1])
        (made * asked).sum().backward()
        found[layer] = [made.detach(), *(each.grad for each in given if each.grad is not None)]
    for mine, its in zip(shared.parameters(), whole.parameters(), strict=True):
        wanted = torch.zeros_like(its) if its.grad is None else its.grad
        dist.all_reduce(wanted)
        found[whole].append(wanted[place.rank * 2 : place.rank * 2 + 2])
        assert mine.grad is not None, "ranks that own the same experts would wait for it"
        found[shared].append(mine.grad)
    assert len(found[whole]) == len(found[shared]) == 5
    pairs = zip(found[whole], found[shared], strict=True)
    return max(float((one - other).abs().max() / one.abs().max().clamp(min=1)) for one, other in pairs)


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    place = Place(rank=rank, local_rank=rank, world=RANKS, device=torch.device("cpu"), launcher="tests")
    apart = torch.tensor([compare(way, place) for way in WAYS], dtype=torch.float64)
    dist.all_reduce(apart, dist.ReduceOp.MAX)
    if rank == 0:
        sys.stdout.write(json.dumps(dict(zip(WAYS, apart.tolist(), strict=True))) + "\n")
    dist.destroy_process_group()
