"""The scan on a CPU against its definition in float64: outputs and all gradients.

Bounds are norms of errors over norms. Everything is computed in fp32, whose unit is 6e-8; sums over a sequence of some
thousand steps and a few dozen operations a step lose up to two digits of it: 1e-5. Outputs and gradients that are
stored in 16 bits are rounded once more: half a unit of bf16 is 2e-3, of fp16 2.4e-4.
"""

from __future__ import annotations

import random
import secrets

import pytest
import torch
from scans import NAMES, Shape, error, make, results

from tightfit.mamba import selective_scan
from tightfit.mamba.scan import Path

BOUND = {torch.float32: 1e-5, torch.bfloat16: 4e-3, torch.float16: 5e-4}


def too_large(shape: Shape, dtype: torch.dtype = torch.float32, **drawn: float) -> dict[str, float]:
    """Errors of the CPU's path that are not below their bound, by what they are of."""
    inputs = make(shape, dtype, **drawn)
    expected, found = results(inputs, "reference", wide=True), results(inputs, "chunked")
    assert len(expected) == 2 + len(NAMES)  # both outputs, and the gradient of every input
    errors = {name: error(found[name], expected[name]) for name in expected}
    return {name: size for name, size in errors.items() if not size < BOUND[dtype]}


@pytest.mark.thorough
@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 255, 1000, pytest.param(4097, marks=pytest.mark.slow)])
@pytest.mark.parametrize("batch", [1, 3])
def test_lengths(length: int, batch: int) -> None:
    assert too_large(Shape(batch=batch, channels=3, length=length, states=8)) == {}


@pytest.mark.thorough
@pytest.mark.parametrize("states", [1, 8, 16, 64, 65])
@pytest.mark.parametrize("channels", [1, 31, 64, 1536])
def test_channels_and_states(channels: int, states: int) -> None:
    assert too_large(Shape(channels=channels, length=70, states=states)) == {}


@pytest.mark.thorough
@pytest.mark.parametrize("shift", [-15.0, -8.0, 2.0, 20.0])
def test_time_steps_from_tiny_to_large(shift: float) -> None:
    """From one in a million, where states never fade, to twenty, where none outlives a step."""
    assert too_large(Shape(batch=2, channels=16, length=200, states=16), spread=1.0, shift=shift) == {}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bits(dtype: torch.dtype) -> None:
    assert too_large(Shape(batch=2, channels=33, length=130, states=16), dtype) == {}


@pytest.mark.slow
def test_a_long_sequence_in_which_products_underflow() -> None:
    assert too_large(Shape(channels=4, length=4097, states=16), spread=6.0) == {}


@pytest.mark.thorough
def test_inputs_that_nobody_has_seen() -> None:
    for _ in range(20):
        seed = secrets.randbits(32)
        drawn = random.Random(seed)  # noqa: S311 - no secret hangs on it
        shape = Shape(drawn.randint(1, 3), drawn.randint(4, 70), drawn.randint(8, 300), drawn.randint(1, 64))
        wrong = too_large(shape, seed=seed, spread=drawn.uniform(0.1, 5), shift=drawn.uniform(-8, 2))
        assert wrong == {}, (seed, shape)


@pytest.mark.parametrize("left_out", ["D", "z", "delta_bias", "initial_state"])
def test_what_may_be_left_out(left_out: str) -> None:
    inputs = make(Shape())
    del inputs[left_out]
    expected, found = results(inputs, "reference", wide=True), results(inputs, "chunked")
    assert all(error(found[name], expected[name]) < BOUND[torch.float32] for name in expected)


def test_without_a_softplus() -> None:
    inputs = make(Shape())
    inputs["delta"] = inputs["delta"].abs() * 0.1
    del inputs["delta_bias"]
    expected = results(inputs, "reference", wide=True, softplus=False)
    found = results(inputs, "chunked", softplus=False)
    assert all(error(found[name], expected[name]) < BOUND[torch.float32] for name in expected)


@pytest.mark.thorough
def test_documents_that_start_remember_nothing() -> None:
    inputs = make(Shape(batch=2, length=200))
    starts = torch.rand(2, 200, generator=torch.Generator().manual_seed(1)) < 0.05
    expected = results(inputs, "reference", wide=True, starts=starts)
    found = results(inputs, "chunked", starts=starts)
    assert all(error(found[name], expected[name]) < BOUND[torch.float32] for name in expected)
    first = int(starts[0].nonzero()[0])
    alone = {name: tensor[:1] if tensor.shape[0] == 2 and name not in ("A", "D", "delta_bias") else tensor
             for name, tensor in inputs.items() if name != "initial_state"}  # fmt: skip
    alone = {name: tensor[..., first:] if tensor.dim() == 3 else tensor for name, tensor in alone.items()}
    cut = results(alone, "chunked", starts=starts[:1, first:])
    assert torch.allclose(cut["out"], found["out"][:1, :, first:], rtol=1e-5, atol=1e-6)


@pytest.mark.thorough
@pytest.mark.parametrize("path", ["chunked", pytest.param("reference", marks=pytest.mark.slow)])
@pytest.mark.parametrize(("softplus", "packed"), [(True, False), (False, True)])
def test_gradcheck(path: Path, softplus: bool, packed: bool) -> None:
    inputs = {name: tensor.double() for name, tensor in make(Shape(2, 3, 11, 3)).items()}
    if not softplus:  # which would have made them positive
        inputs |= {name: 0.1 * inputs[name].abs() + 0.01 for name in ("delta", "delta_bias")}
    inputs = {name: tensor.requires_grad_() for name, tensor in inputs.items()}
    starts = torch.rand(2, 11, generator=torch.Generator().manual_seed(0)) < 0.3 if packed else None

    def both(*tensors: torch.Tensor) -> object:
        own = dict(zip(inputs, tensors, strict=True))
        return selective_scan(**own, delta_softplus=softplus, return_last_state=True, starts=starts, path=path)

    assert torch.autograd.gradcheck(both, tuple(inputs.values()))


def test_strides_make_no_difference() -> None:
    inputs = make(Shape(batch=2, channels=6, length=50))
    turned = {
        name: tensor.transpose(1, 2).contiguous().transpose(1, 2) if tensor.dim() == 3 else tensor
        for name, tensor in inputs.items()
    }
    straight, other = results(inputs, "chunked"), results(turned, "chunked")
    assert all(error(other[name], straight[name]) < BOUND[torch.float32] / 10 for name in straight)


def test_the_same_inputs_give_the_same_bits() -> None:
    inputs = make(Shape(batch=2, channels=40, length=300, states=16), torch.bfloat16)
    first, second = results(inputs, "chunked"), results(inputs, "chunked")
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_little_is_kept() -> None:
    """The inputs, and a state every so many steps: under a tenth of what all states would take."""
    inputs = {name: tensor.requires_grad_() for name, tensor in make(Shape(1, 256, 1024, 16)).items()}
    kept: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        initial = inputs.pop("initial_state")
        selective_scan(**inputs, delta_softplus=True, initial_state=initial)
    given = sum(tensor.untyped_storage().nbytes() for tensor in (*inputs.values(), initial))
    assert sum(kept.values()) - given < 256 * 1024 * 16 * 4 / 10
