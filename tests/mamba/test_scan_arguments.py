"""What a scan is asked for wrongly is one sentence that names the argument, or the slow path with one warning."""

from __future__ import annotations

import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from scans import NAMES, Shape, make, results
from torch._subclasses.fake_tensor import FakeTensorMode

from tightfit.mamba import selective_scan
from tightfit.mamba.arguments import FLOATS, Scan, ScanError
from tightfit.mamba.scan import _say, fitting

SHAPE = Shape(batch=2, channels=5, length=7, states=3)
EVERY = (*NAMES, "starts")
SIZES = {
    "delta": r"\[2, 5, 7\]",
    "A": r"\(5 channels, states\)",
    "B": r"\[2, 3, 7\]",
    "C": r"\[2, 3, 7\]",
    "D": r"\[5\]",
    "z": r"\[2, 5, 7\]",
    "delta_bias": r"\[5\]",
    "initial_state": r"\[2, 5, 3\]",
    "starts": r"\[2, 7\]",
}


def given() -> dict[str, Any]:
    return {**make(SHAPE), "starts": torch.zeros(2, 7, dtype=torch.bool)}


def test_these_are_right() -> None:
    assert set(given()) == set(EVERY)
    assert selective_scan(**given(), delta_softplus=True).shape == (2, 5, 7)


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("dim", [0, -1])
def test_another_size(name: str, dim: int) -> None:
    inputs = given()
    if name == "A":
        dim = 0  # its last is the number of states: whatever it is, B and C are wrong then
    short = inputs[name].narrow(dim, 0, inputs[name].shape[dim] - 1)
    with pytest.raises(ScanError, match=rf"^{name} must be {SIZES[name]}.*, not \["):
        selective_scan(**inputs | {name: short})


@pytest.mark.parametrize("name", EVERY)
def test_another_number_of_dimensions(name: str) -> None:
    inputs = given()
    for wrong in (inputs[name][0], inputs[name][None]):
        with pytest.raises(ScanError, match=rf"^{name} must be .*, not \["):
            selective_scan(**inputs | {name: wrong})


def test_another_number_of_states_is_told_by_what_stands_beside() -> None:
    inputs = given()
    with pytest.raises(ScanError, match=r"^B must be \[2, 4, 7\] beside u \[2, 5, 7\] and A \[5, 4\], not \[2, 3, 7\]"):
        selective_scan(**inputs | {"A": torch.ones(5, 4)})


@pytest.mark.parametrize("groups", [1, 2])
def test_one_group_of_channels_is_the_usual_case_and_more_are_refused(groups: int) -> None:
    inputs = given()
    grouped = inputs["B"][:, None].expand(2, groups, 3, 7)
    if groups == 1:
        assert torch.equal(selective_scan(**inputs | {"B": grouped}), selective_scan(**inputs))
    else:
        with pytest.raises(ScanError, match=r"B must be \[2, 3, 7\].*, not \[2, 2, 3, 7\]"):
            selective_scan(**inputs | {"B": grouped})


@pytest.mark.parametrize("size", [(0, 5, 7), (2, 0, 7), (2, 5, 0)])
def test_nothing(size: tuple[int, ...]) -> None:
    with pytest.raises(ScanError, match="is empty"):
        selective_scan(**given() | {"u": torch.zeros(size), "A": torch.zeros(size[1], 3)})


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "dtype", [torch.complex64, torch.int64, torch.int32, torch.uint8, torch.bool, torch.float8_e4m3fn]
)
def test_another_dtype(name: str, dtype: torch.dtype) -> None:
    """A complex A is among them: the official kernel has one, Mamba does not."""
    inputs = given()
    with pytest.raises(ScanError, match=f"^{name} is {dtype}: the scan takes bf16, fp16, fp32 and fp64$"):
        selective_scan(**inputs | {name: inputs[name].to(dtype)})


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.float32])
def test_starts_are_bool(dtype: torch.dtype) -> None:
    with pytest.raises(ScanError, match=f"^starts must be bool, true where a document starts, not {dtype}$"):
        selective_scan(**given() | {"starts": torch.zeros(2, 7, dtype=dtype)})


@pytest.mark.parametrize("name", [name for name in EVERY if name != "u"])
def test_another_device(name: str) -> None:
    inputs = given()
    with pytest.raises(ScanError, match=f"^{name} is on meta and u on cpu: put them on one device$"):
        selective_scan(**inputs | {name: inputs[name].to("meta")})


@pytest.mark.parametrize("name", EVERY)
def test_no_tensor(name: str) -> None:
    for wrong, kind in ((0.5, "float"), ([1.0], "list")):
        with pytest.raises(ScanError, match=f"^{name} must be a tensor, not {kind}$"):
            selective_scan(**given() | {name: wrong})


@pytest.mark.parametrize("name", ["u", "delta", "A", "B", "C"])
def test_what_must_be_there(name: str) -> None:
    with pytest.raises(ScanError, match=f"^{name} must be a tensor, not NoneType$"):
        selective_scan(**given() | {name: None})


@pytest.mark.parametrize("dtype", FLOATS)
def test_what_may_differ_from_the_others(dtype: torch.dtype) -> None:
    """Each argument may have a dtype of its own; the output has that of u."""
    inputs = given()
    for name in NAMES:
        mixed = inputs | {name: inputs[name].to(dtype)}
        assert selective_scan(**mixed, delta_softplus=True).dtype == mixed["u"].dtype


# --- the path -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "dtype", "said"),
    [
        (Shape(states=65), torch.float32, "A has 65 states and the triton path takes 64: use path='chunked'"),
        (SHAPE, torch.float64, "u is fp64 and the triton path computes in fp32: use path='chunked'"),
        (SHAPE, torch.float32, "u is on cpu and path='triton' needs a GPU: leave path out"),
    ],
)
def test_what_the_gpus_path_cannot(shape: Shape, dtype: torch.dtype, said: str) -> None:
    pytest.importorskip("triton")
    with pytest.raises(ScanError, match=f"^{said}$"):
        selective_scan(**make(shape, dtype), path="triton")


def test_a_path_that_is_not_there() -> None:
    with pytest.raises(ScanError, match="there is no path 'cuda': there are reference, chunked, triton"):
        selective_scan(**given(), path="cuda")  # type: ignore[arg-type]


def elsewhere(shape: Shape, device: str, dtype: torch.dtype = torch.float32) -> Scan:
    """Tensors that say they are on that device, and hold nothing."""
    with FakeTensorMode():
        made = {
            name: torch.empty(each.shape, dtype=each.dtype, device=device) for name, each in make(shape, dtype).items()
        }
    return Scan(**made, delta_softplus=True, starts=None)


@pytest.mark.thorough
def test_which_path_is_taken_without_a_word() -> None:
    assert fitting(elsewhere(Shape(states=64), "cpu")) == "chunked"
    assert fitting(elsewhere(Shape(states=65), "cpu")) == "chunked"
    assert fitting(elsewhere(SHAPE, "cuda", torch.float64)) == "chunked"
    pytest.importorskip("triton")
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert fitting(elsewhere(Shape(states=64), "cuda", dtype)) == "triton"


@pytest.mark.parametrize(
    ("device", "states", "said"),
    [
        ("cuda", 65, "a selective scan of more than 64 states takes its slow path"),
        ("xpu", 16, "on xpu the selective scan takes its slow path: the fast one needs CUDA or ROCm"),
    ],
)
def test_the_slow_path_is_said_once(device: str, states: int, said: str) -> None:
    if device == "cuda":
        pytest.importorskip("triton")
    _say.cache_clear()
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        for _ in range(3):
            assert fitting(elsewhere(Shape(states=states), device)) == "chunked"
    assert [str(each.message) for each in heard] == [said]


@pytest.mark.thorough
def test_a_gpu_without_triton() -> None:
    """In a process that cannot import it."""
    script = (
        "import sys, warnings\n"
        f"sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "sys.modules['triton'] = None\n"
        "from test_scan_arguments import SHAPE, ScanError, elsewhere, fitting, given, selective_scan\n"
        "with warnings.catch_warnings(record=True) as heard:\n"
        "    warnings.simplefilter('always')\n"
        "    assert [fitting(elsewhere(SHAPE, 'cuda')) for _ in range(3)] == ['chunked'] * 3\n"
        "print(*(each.message for each in heard), sep='\\n')\n"
        "try:\n"
        "    selective_scan(**given(), path='triton')\n"
        "except ScanError as error:\n"
        "    print(error)\n"
    )
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.splitlines() == [
        "the triton package is not installed: the selective scan takes its slow path",
        "path='triton' needs the triton package: leave path out, and one that works here is taken",
    ]


# --- not a number ---------------------------------------------------------------------------------

NAN: dict[str, tuple[tuple[int, ...], slice, slice]] = {
    "u": ((0, 1, 3), slice(1, 2), slice(3, None)),
    "delta": ((0, 1, 3), slice(1, 2), slice(3, None)),
    "A": ((1, 2), slice(1, 2), slice(None)),
    "B": ((0, 2, 3), slice(None), slice(3, None)),
    "C": ((0, 2, 3), slice(None), slice(3, 4)),
    "D": ((1,), slice(1, 2), slice(None)),
    "z": ((0, 1, 3), slice(1, 2), slice(3, 4)),
    "delta_bias": ((1,), slice(1, 2), slice(None)),
    "initial_state": ((0, 1, 2), slice(1, 2), slice(None)),
}
"""Where one is put in, and the channels and steps of the output that have to show it."""
PRODUCTS = {"C": ("u", "B"), "D": ("u",), "z": ("u", "C"), "initial_state": ("A", "C")}
"""Gradients that it is a factor of; of all others: those of A, C and delta."""


@pytest.mark.parametrize("name", NAN)
@pytest.mark.parametrize("path", ["reference", "chunked"])
def test_nan_in_gives_nan_out_and_nowhere_else(name: str, path: Any) -> None:
    place, channels, steps = NAN[name]
    inputs = make(SHAPE)
    inputs[name][place] = float("nan")
    found = results(inputs, path)
    wanted = torch.zeros(2, 5, 7, dtype=torch.bool)
    rows = slice(0, 1) if place[0] == 0 and len(place) == 3 else slice(None)
    wanted[rows, channels, steps] = True
    assert torch.equal(found["out"].isnan(), wanted)
    assert all(bool(found[f"d{each}"].isnan().any()) for each in PRODUCTS.get(name, ("A", "C", "delta")))
