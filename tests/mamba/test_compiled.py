"""Mamba's layers under torch.compile: one graph each, whose outputs and gradients are those of the layer itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

pytest.importorskip("transformers")

from transformers import FalconMambaConfig, FalconMambaModel, MambaConfig, MambaModel

from tightfit.mamba import install
from tightfit.mamba.install import Documents

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # PyTorch's own, of its compiler

BACKEND = "aot_eager_decomp_partition"  # traces and cuts as the compiler does, and runs PyTorch's own kernels
SIZES = {"hidden_size": 16, "num_hidden_layers": 1, "state_size": 4, "vocab_size": 32, "time_step_rank": 2}
MODELS = {"mamba": (MambaConfig, MambaModel), "falcon": (FalconMambaConfig, FalconMambaModel)}


@pytest.fixture(autouse=True)
def ours() -> Iterator[None]:
    install.install()
    yield
    install.uninstall()
    torch.compiler.reset()


class Scaled(nn.Module):
    """As an adapter is: a module that is not PyTorch's own, so that the mixer calls each."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.inner(x) * 1.5
        return result


def make_layer(family: str) -> nn.Module:
    torch.manual_seed(0)
    config, model = MODELS[family]
    layer: nn.Module = model(config(**SIZES)).layers[0]
    return layer.train()


def compare(layer: nn.Module, call: Callable[[Any, Tensor], Tensor]) -> None:
    """By the layer as it is, and compiled in one graph."""
    hidden = torch.randn(2, 9, SIZES["hidden_size"])

    def gradients(run: Any) -> list[Tensor]:
        x = hidden.clone().requires_grad_()
        out = call(run, x)
        assert isinstance(out, Tensor)
        return [out, *torch.autograd.grad(out.square().sum(), [x, *layer.parameters()])]

    compiled = torch.compile(layer, backend=BACKEND, fullgraph=True)
    for got, wanted in zip(gradients(compiled), gradients(layer), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("family", MODELS)
def test_a_layer_is_one_graph(family: str) -> None:
    compare(make_layer(family), lambda run, x: run(x))


@pytest.mark.thorough
@pytest.mark.parametrize("family", MODELS)
def test_so_it_is_where_every_module_is_called(family: str) -> None:
    layer = make_layer(family)
    layer.mixer.x_proj = Scaled(layer.mixer.x_proj)
    compare(layer, lambda run, x: run(x))


def test_so_it_is_of_packed_documents() -> None:
    documents = Documents(torch.rand(2, 9) < 0.3, torch.ones(2, 9, dtype=torch.int64))
    compare(make_layer("mamba"), lambda run, x: run(x, attention_mask=documents))


def test_so_it_is_when_the_layer_is_computed_again() -> None:
    compare(make_layer("mamba"), lambda run, x: checkpoint(run, x, use_reentrant=False))
