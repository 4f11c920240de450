"""The loss of a window where it is easily wrong: fp16's range, evaluation, heads and models with ways of their own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from small_models import config_of, real
from torch.utils._python_dispatch import TorchDispatchMode

from tightfit.train.loss import WindowLoss, linear_cross_entropy
from tightfit.types import ConfigError, ModelError

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


@pytest.mark.parametrize("power", [10, 14, 16])
def test_fp16_gradients_of_a_small_share_are_not_lost(power: int) -> None:
    for wanted, found in zip(gradients(torch.float32, 1.0), gradients(torch.float16, 2.0**power), strict=True):
        # A few roundings of 2^-11 each; before the loss scale they would round to zero.
        assert float((wanted - found).norm() / wanted.norm()) < 2e-3


class Made(TorchDispatchMode):
    """Notes the shapes of tensors of zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if "zeros_like" in str(func):
            self.shapes.append(tuple(out.shape))
        return out


def test_evaluation_makes_no_gradient_of_the_head() -> None:
    weight = torch.randn(VOCABULARY, HIDDEN, requires_grad=True)
    with torch.no_grad(), Made() as made:
        linear_cross_entropy(torch.randn(1, 8, HIDDEN), weight, torch.zeros(1, 8, dtype=torch.int64), 1.0)
    assert made.shapes == []


@pytest.mark.parametrize("field", ["logits_scaling", "logit_scale", "lm_head_multiplier", "final_logit_softcapping"])
def test_a_head_whose_logits_are_altered_is_not_fused(field: str) -> None:
    model = real(config_of("llama"))
    setattr(model.config, field, 30.0)
    with pytest.raises(ConfigError, match="use --loss plain"):
        WindowLoss(model, "fused")


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
