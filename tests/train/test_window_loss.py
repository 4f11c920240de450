"""The loss of a window where it is easily wrong: fp16's range, evaluation, heads and models with ways of their own."""

from __future__ import annotations

import copy
import weakref
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from small_models import FAMILIES, config_of, real
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig

from tightfit.train.engines import Engine
from tightfit.train.loss import WindowLoss, linear_cross_entropy
from tightfit.types import Loss, ModelError

TOKENS, HIDDEN, VOCABULARY = 512, 32, 5000
LARGE_WINDOW = 78_000.0
"""Tokens of a window of many micro batches: a token's share is far below what fp16 can tell from zero."""


def gradients(dtype: torch.dtype, loss_scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    hidden = torch.randn(1, TOKENS, HIDDEN).to(dtype).requires_grad_()
    weight = (torch.randn(VOCABULARY, HIDDEN) * 0.05).to(dtype).requires_grad_()
    hidden.retain_grad()
    weight.retain_grad()
    labels = torch.randint(0, VOCABULARY, (1, TOKENS))
    (linear_cross_entropy(hidden, weight, labels, LARGE_WINDOW) * loss_scale).backward()
    assert hidden.grad is not None
    assert weight.grad is not None
    return hidden.grad.float() / loss_scale, weight.grad.float() / loss_scale


@pytest.mark.thorough
@pytest.mark.parametrize("power", [10, 14, 16])
def test_fp16_gradients_of_a_small_share_are_not_lost(power: int) -> None:
    for wanted, found in zip(gradients(torch.float32, 1.0), gradients(torch.float16, 2.0**power), strict=True):
        # A few roundings of 2^-11 each; before the loss scale they would round to zero.
        assert float((wanted - found).norm() / wanted.norm()) < 2e-3


class Made(TorchDispatchMode):
    """Notes the shapes of what is made to be filled."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if "zeros_like" in str(func) or "empty_like" in str(func):
            self.shapes.append(tuple(out.shape))
        return out


def test_evaluation_makes_no_gradient_of_the_head() -> None:
    weight = torch.randn(VOCABULARY, HIDDEN, requires_grad=True)
    with torch.no_grad(), Made() as made:
        linear_cross_entropy(torch.randn(1, 8, HIDDEN), weight, torch.zeros(1, 8, dtype=torch.int64), 1.0)
    assert tuple(weight.shape) not in made.shapes


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("granite", {"logits_scaling": 0.5}),
        ("cohere", {"logit_scale": 0.5}),
        ("gemma2", {"final_logit_softcapping": 0.2, "head_dim": 8, "attn_implementation": "eager"}),
        ("phi", {}),  # a head with a bias
    ],
)
def test_logits_that_are_scaled_capped_or_shifted_are_fused_too(family: str, fields: dict[str, Any]) -> None:
    plain = real(AutoConfig.for_model(family, **{**FAMILIES["llama"], **fields}))
    fused = copy.deepcopy(plain)
    ids = torch.randint(0, plain.config.vocab_size, (2, 12))
    losses = []
    for model, kind in ((plain, "plain"), (fused, "fused")):
        loss = WindowLoss(model, cast("Loss", kind))
        loss.divisor = 22.0
        losses.append(model(input_ids=ids, labels=ids, use_cache=False).loss)
        losses[-1].backward()
    torch.testing.assert_close(losses[1], losses[0])
    for (name, wanted), found in zip(plain.named_parameters(), fused.parameters(), strict=True):
        torch.testing.assert_close(found.grad, wanted.grad, msg=name)


def test_a_model_that_computes_its_own_loss_is_refused() -> None:
    model = real(config_of("llama"))
    ids = torch.zeros(1, 8, dtype=torch.int64)
    WindowLoss(model, "plain")
    assert model(input_ids=ids, labels=ids).loss is not None
    stubborn = real(config_of("llama"))
    WindowLoss(stubborn, "plain")
    stubborn.loss_function = lambda logits, labels, **_: logits.mean()  # it never asks for ours
    with pytest.raises(ModelError, match="computes its own loss"):
        stubborn(input_ids=ids, labels=ids)


def test_nothing_of_a_micro_batch_is_there_beside_the_next() -> None:
    """What its graph still holds would be added to the peak, which comes in the next one's passes."""
    made: list[weakref.ref[torch.Tensor]] = []
    alive: list[int] = []

    def forward(inputs: dict[str, torch.Tensor], divisor: float) -> torch.Tensor:
        alive.append(sum(each() is not None for each in made))
        loss = inputs["input_ids"].float().sum().requires_grad_() * divisor
        made.extend([weakref.ref(loss), weakref.ref(inputs["input_ids"])])
        return loss

    engine = SimpleNamespace(
        forward=forward, backward=lambda loss, last: loss.backward(), _place=SimpleNamespace(device="cpu")
    )
    inputs = ({"input_ids": torch.ones(1, 2)} for _ in range(3))
    assert float(Engine.accumulate(cast("Engine", engine), inputs, 3, 2.0, lambda *_: None)) == 12.0
    assert alive == [0, 0, 0]
