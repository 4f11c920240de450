"""Packed documents in transformers' Mamba: with our path in it each is what it is alone, and no gradient crosses."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import FalconMambaConfig, FalconMambaForCausalLM, MambaConfig, MambaForCausalLM
from transformers.models.mamba import modeling_mamba

from tightfit.mamba.arguments import ScanError
from tightfit.mamba.install import install, uninstall

SMALL = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 3, "state_size": 4, "time_step_rank": 3}
LENGTHS = (9, 2, 14)
"""Of the documents in a row; one is shorter than the convolution is wide."""
ROUNDING = 1e-5
"""Of fp32, in the norm: some hundred operations of 6e-8, in another order."""

families = pytest.mark.parametrize("family", ["mamba", "falcon_mamba"])


@pytest.fixture(autouse=True)
def _ours() -> Iterator[None]:
    install()
    yield
    uninstall()


def model_of(family: str) -> Any:
    torch.manual_seed(0)
    model: nn.Module = (
        MambaForCausalLM(MambaConfig(**SMALL))
        if family == "mamba"
        else FalconMambaForCausalLM(FalconMambaConfig(**SMALL))
    )
    with torch.no_grad():  # as they come, some weights are zero or all alike, and hide mistakes
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight), alpha=0.1)
    return model.train()


def packed(rows: int = 2) -> tuple[Tensor, Tensor]:
    """Tokens and positions; the documents of the second row come in another order."""
    drawn = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 64, (rows, sum(LENGTHS)), generator=drawn)
    orders = [LENGTHS, LENGTHS[::-1]]
    places = torch.stack([torch.cat([torch.arange(each) for each in orders[row % 2]]) for row in range(rows)])
    return ids, places


def token_losses(model: Any, ids: Tensor, **more: Any) -> Tensor:
    """(rows, length - 1): of each next token."""
    logits = model(input_ids=ids, use_cache=False, **more).logits
    return F.cross_entropy(logits[:, :-1].transpose(1, 2), ids[:, 1:], reduction="none")


def pieces(places: Tensor) -> list[tuple[int, slice]]:
    """Row and steps of every document."""
    found = []
    for row, each in enumerate(places):
        borders = [*(each == 0).nonzero().flatten().tolist(), places.shape[1]]
        found += [(row, slice(first, last)) for first, last in pairwise(borders)]
    return found


def error(got: Tensor, wanted: Tensor) -> float:
    return float(((got - wanted).norm() / wanted.norm()).detach())


def recomputing(model: Any, how: str) -> Any:
    if how != "none":
        model.gradient_checkpointing_enable({"use_reentrant": how == "reentrant"})
        model.enable_input_require_grads()
    return model


checkpoints = pytest.mark.parametrize("how", ["none", "recomputed", "reentrant"])


@pytest.mark.thorough
@families
@checkpoints
def test_losses_and_gradients_are_those_of_the_documents_alone(family: str, how: str) -> None:
    model, (ids, places) = recomputing(model_of(family), how), packed()
    together = token_losses(model, ids, position_ids=places)
    inside = places[:, 1:] != 0  # what predicts the first token of a document belongs to none
    together[inside].sum().backward()
    grads = {name: each.grad for name, each in model.named_parameters()}
    model.zero_grad()
    for row, part in pieces(places):
        alone = token_losses(model, ids[row : row + 1, part])
        assert error(together[row, part.start : part.stop - 1], alone[0]) < ROUNDING
        alone.sum().backward()
    found = {name: error(grads[name], each.grad) for name, each in model.named_parameters()}
    assert max(found.values()) < ROUNDING, found


@families
@checkpoints
def test_no_gradient_crosses_a_border(family: str, how: str) -> None:
    """Exactly none, not a rounding of one."""
    model, (ids, places) = recomputing(model_of(family), how), packed(rows=1)
    embedded = model.get_input_embeddings()(ids).detach().requires_grad_()
    logits = model(inputs_embeds=embedded, position_ids=places, use_cache=False).logits
    (_, _), (_, second), (_, third) = pieces(places)
    logits[0, second].square().sum().backward()
    assert embedded.grad is not None
    touched = embedded.grad[0].abs().sum(-1) > 0
    assert touched[second].all()
    assert not touched[: second.start].any()
    assert not touched[third].any()


@pytest.mark.thorough
@families
def test_a_second_batch_before_the_first_ones_backward(family: str) -> None:
    """What recomputes in the backward pass sees the borders of its own rows, not of those that came last."""
    model, (ids, places) = model_of(family), packed()
    wanted = gradients(model, [(ids[:1], places[:1]), (ids[1:], places[1:])])
    recomputing(model, "recomputed")
    got = gradients(model, [(ids[:1], places[:1]), (ids[1:], places[1:])])
    assert all(torch.equal(got[name], each) for name, each in wanted.items())


def gradients(model: Any, batches: list[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    model.zero_grad()
    losses = [token_losses(model, ids, position_ids=places).sum() for ids, places in batches]
    for loss in losses:
        loss.backward()
    return {name: each.grad.clone() for name, each in model.named_parameters()}


@families
def test_without_positions_documents_do_leak(family: str) -> None:
    """Or the tests above would prove nothing."""
    model, (ids, places) = model_of(family), packed()
    apart, leaking = token_losses(model, ids, position_ids=places), token_losses(model, ids)
    assert error(leaking[:, : LENGTHS[1]], apart[:, : LENGTHS[1]]) < ROUNDING
    second = slice(LENGTHS[0], LENGTHS[0] + LENGTHS[1] - 1)
    assert error(leaking[0, second], apart[0, second]) > 100 * ROUNDING


@families
def test_the_model_without_its_head_takes_them_too(family: str) -> None:
    model, (ids, places) = model_of(family), packed()
    whole = model(input_ids=ids, position_ids=places, use_cache=False, output_hidden_states=True).hidden_states[-1]
    assert torch.equal(model.backbone(ids, position_ids=places, use_cache=False)[0], whole)
    one_for_all = model.backbone(ids, position_ids=places[:1], use_cache=False)[0]
    assert torch.equal(one_for_all[0], whole[0])
    assert not torch.equal(one_for_all[1], whole[1])


@families
@pytest.mark.skipif(not hasattr(modeling_mamba, "mamba_selective_scan"), reason="transformers 4 masks otherwise")
def test_a_mask_goes_beside_them(family: str) -> None:
    model, (ids, places) = model_of(family), packed()
    padded, later = F.pad(ids, (5, 0)), F.pad(places, (5, 0), value=1)
    mask = F.pad(torch.ones_like(ids), (5, 0))
    got = model(padded, mask, position_ids=later, use_cache=False).logits[:, 5:]
    wanted = model(input_ids=ids, position_ids=places, use_cache=False).logits
    assert error(got, wanted) < ROUNDING


@families
def test_an_adapter_takes_them(family: str) -> None:
    from peft import LoraConfig, get_peft_model

    settings = LoraConfig(r=2, target_modules=["in_proj", "x_proj"], init_lora_weights=False)
    model, (ids, places) = get_peft_model(model_of(family), settings), packed()
    together = token_losses(model, ids, position_ids=places)
    for row, part in pieces(places):
        alone = token_losses(model, ids[row : row + 1, part])
        assert error(together[row, part.start : part.stop - 1], alone[0]) < ROUNDING


@families
def test_with_a_cache_borders_are_refused_and_plain_positions_change_nothing(family: str) -> None:
    model, (ids, places) = model_of(family).eval(), packed()
    with torch.no_grad():
        wanted = model(ids, use_cache=True).logits
        counted = torch.arange(ids.shape[1])[None]
        assert torch.equal(model(ids, position_ids=counted, use_cache=True).logits, wanted)
        with pytest.raises(ScanError, match="only without a cache: use_cache=False"):
            model(ids, position_ids=places, use_cache=True)


def test_positions_of_another_shape_are_named() -> None:
    model, (ids, places) = model_of("mamba"), packed()
    for wrong in (places[:, :-1], places[0], places.repeat(2, 1)):
        with pytest.raises(ScanError, match=r"position_ids must be \[2, 25\] as the tokens are, not \["):
            model(ids, position_ids=wrong, use_cache=False)


def test_out_again_they_are_transformers_own() -> None:
    before = MambaForCausalLM.forward
    uninstall()
    assert MambaForCausalLM.forward is not before
    model, (ids, places) = model_of("mamba"), packed()
    with torch.no_grad():
        assert torch.equal(model(ids, position_ids=places).logits, model(ids).logits)
