"""The fused loss and all its gradients against float64: by torch, by the kernel as Triton interprets it, and by the
kernel on a GPU."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from small_models import config_of, real
from torch.nn.functional import cross_entropy, linear, pad

from tightfit.train import loss as ours
from tightfit.train.loss import Shaping, WindowLoss, linear_cross_entropy
from tightfit.types import ConfigError

WINDOW = 50.0
BOUNDS = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}
"""Norm of the difference over the norm of the result. 16 bits: logits, their gradients and the sums of each chunk are
rounded once each, to 2^-9 and 2^-12 at most; fp32: what sums in another order differ by."""
CASES = {
    "as they are": (Shaping(), False),
    "scaled": (Shaping(times=0.25), False),
    "capped": (Shaping(cap=2.0), False),
    "scaled, capped, with a bias": (Shaping(times=-0.5, cap=3.0), True),
}
TRAINS = {"all": (True, True), "the head is frozen": (True, False), "only the head": (False, True)}


def errors(
    dtype: torch.dtype, case: str, trains: str = "all", *, vocab: int = 83, chunk: int = 6, device: str = "cpu"
) -> dict[str, float]:
    """Of the loss, of the gradients, and of the loss without them. The last chunk is not full, and a whole one is
    ignored."""
    shaping, biased = CASES[case]
    torch.manual_seed(1)
    values = [torch.randn(2, 10, 8), torch.randn(vocab, 8), torch.randn(vocab)]
    labels = torch.randint(0, vocab, (2, 10), device=device)
    labels[0, 1:8] = -100
    labels[1, -1], labels[1, -2] = vocab - 1, 0
    wants = (*TRAINS[trains], TRAINS[trains][1])
    scale = 2.0**16 if dtype == torch.float16 else 3.0  # fp16's own scale, at which a gradient of 1 overflows

    def exact(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        logits = linear(hidden, weight, bias).reshape(-1, vocab) * shaping.times
        logits = logits if shaping.cap is None else shaping.cap * torch.tanh(logits / shaping.cap)
        shifted = pad(labels, (0, 1), value=-100)[:, 1:].reshape(-1)
        return cross_entropy(logits, shifted, reduction="sum") / WINDOW

    def fused(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return linear_cross_entropy(hidden, weight, labels, WINDOW, bias_V=bias, shaping=shaping)

    found = []
    for compute, precision in ((exact, torch.float64), (fused, dtype)):
        own = [
            value.to(device, dtype).to(precision).requires_grad_(want)
            for value, want in zip(values[: 2 + biased], wants, strict=False)
        ]
        given = [*own, None][:3]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ours, "fused_chunk_tokens", lambda *_, **__: chunk)
            loss = compute(*given)
            grads = torch.autograd.grad(loss * scale, [each for each in own if each.requires_grad])
            with torch.no_grad():
                alone = compute(*given)
        found.append([loss.detach(), alone, *grads])
    names = ["loss", "alone", *(f"grad {number}" for number in range(3))]
    pairs = zip(names, *found, strict=False)
    return {name: float((got.double() - want).norm() / want.norm()) for name, want, got in pairs}


def check(dtype: torch.dtype, case: str, trains: str = "all", *, chunk: int = 6, device: str = "cpu") -> None:
    found = errors(dtype, case, trains, chunk=chunk, device=device)
    assert {name: error for name, error in found.items() if not error <= BOUNDS[dtype]} == {}, (dtype, case, trains)


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_torchs_path(dtype: torch.dtype, case: str) -> None:
    check(dtype, case)


@pytest.mark.parametrize("trains", TRAINS)
@pytest.mark.parametrize("chunk", [1, 19, 20, 21])
def test_chunks_and_heads(trains: str, chunk: int) -> None:
    check(torch.float64, "scaled, capped, with a bias", trains, chunk=chunk)


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Kernels that fail as they are told."""
    kernels: Any = ModuleType("tightfit.train.loss_kernels")

    def losses_in_place(*_: Any, **__: Any) -> None:
        raise kernels.error

    kernels.losses_in_place = losses_in_place
    import tightfit.train

    monkeypatch.setitem(sys.modules, kernels.__name__, kernels)
    monkeypatch.setattr(tightfit.train, "loss_kernels", kernels, raising=False)
    monkeypatch.setattr(torch.Tensor, "cuda", lambda tensor: tensor)
    ours.try_kernels.cache_clear()
    yield kernels
    ours.try_kernels.cache_clear()


def test_a_kernel_that_cannot_be_compiled_is_a_sentence(broken: Any) -> None:
    broken.error = RuntimeError("Failed to find C compiler.\nPlease specify via CC")
    found, said = ours.try_kernels()
    assert found is None
    assert str(said).startswith("Triton cannot compile the fused loss here")
    assert str(said).endswith("Failed to find C compiler.")


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB."),
        RuntimeError("Triton Error [CUDA]: out of memory"),
        RuntimeError("CUDA error: out of memory"),
    ],
)
def test_a_full_card_is_not_told_as_a_kernel_that_cannot_be_compiled(broken: Any, error: Exception) -> None:
    broken.error = error
    with pytest.raises(type(error), match="out of memory"):
        ours.try_kernels()


@pytest.mark.thorough
def test_an_adapter_on_the_head_is_refused() -> None:
    """The fused loss reads the head's matrix, which is not all that such a head computes."""
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(real(config_of("llama")), LoraConfig(target_modules=["lm_head", "q_proj"]))
    with pytest.raises(ConfigError, match="--loss plain"):
        WindowLoss(model, "fused")
    WindowLoss(model, "plain")
    WindowLoss(get_peft_model(real(config_of("llama")), LoraConfig(target_modules=["q_proj"])), "fused")


@pytest.mark.thorough
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_the_kernel_as_it_is_interpreted() -> None:
    done = subprocess.run(
        [sys.executable, __file__],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
def test_the_kernel_on_a_gpu(dtype: torch.dtype) -> None:
    for case in CASES:
        for trains in TRAINS:
            check(dtype, case, trains, device="cuda")


def interpret() -> None:
    """As on a GPU, though the tensors are elsewhere, with blocks of which a row has several."""
    from tightfit.train import loss_kernels

    torch.set_num_threads(1)  # such small tensors would only wait for one another
    loss_kernels.BLOCK, loss_kernels.WARPS = 32, 1
    ours.find_kernels = lambda tensor: loss_kernels
    loss_kernels.PROGRAMS = 2
    for case in CASES:
        check(torch.float32, case)
    check(torch.bfloat16, "as they are")
    check(torch.float16, "capped")
    logits, labels = torch.zeros(2, 8), torch.tensor([8, -1])
    found = loss_kernels.losses_in_place(logits, labels, torch.ones(()), Shaping(), gradients=True)
    assert found.isnan().all(), "a label that is not in the vocabulary"


if __name__ == "__main__":
    interpret()
