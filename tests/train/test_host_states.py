"""AdamW over flat states on the host, against torch's own over parameters, and against bitsandbytes' with 8 bits."""

from __future__ import annotations

import re
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import bitsandbytes.functional as native
import pytest
import torch
from torch import Tensor, nn

from tightfit.train import host_states, optimizers
from tightfit.train.engines import MASTER
from tightfit.train.host_adam import Step, find_host_adam
from tightfit.train.host_states import FIRST, SECOND, CardRoom, HostStates, Workbench
from tightfit.train.optimizers import BETAS, BLOCK, EPS, Which, clip, quantise, read_8bit, write_8bit
from tightfit.train.place import Place
from tightfit.train.updates import updates_on_card
from tightfit.types import Levers, States

SHAPES = {(64, 64): 0.1, (512,): 0.0, (40, 80): 0.1, (32,): 0.0}  # with their weight decay
SIZES = [torch.Size(shape).numel() for shape in SHAPES]
ELEMENTS = sum(SIZES)
STEPS, RATE = 4, 3e-3
HOST = torch.device("cpu")
FORMATS: tuple[States, ...] = ("fp32", "bf16", "8bit")
WEIGHTS = {"masters": torch.bfloat16, "none": torch.bfloat16, "none, fp16": torch.float16, "none, fp32": torch.float32}


@pytest.fixture(autouse=True)
def in_small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several of them, across segments."""
    monkeypatch.setattr(host_states, "PIECE", 4 * BLOCK)
    monkeypatch.setattr(host_states, "STAGED", 8 * BLOCK)
    monkeypatch.setattr(host_states, "STRETCH", 4 * BLOCK)
    host_states._noise.cache_clear()
    yield
    host_states._noise.cache_clear()


def allocate(size: int) -> Tensor:
    return torch.full((size,), 77, dtype=torch.uint8)  # a state that nobody wrote would show


def make(states: States = "fp32", *, master: bool = True, **more: Any) -> HostStates:
    decays = list(zip(SIZES, SHAPES.values(), strict=True))
    return HostStates(decays, states, master=master, allocate=allocate, **more)


def gradients_of(step: int) -> Tensor:
    made = torch.Generator().manual_seed(step)
    return torch.randn(ELEMENTS, generator=made) * torch.logspace(-6, 1, ELEMENTS)


def weights_of(dtype: torch.dtype) -> Tensor:
    return torch.randn(ELEMENTS, generator=torch.Generator().manual_seed(99)).to(dtype)


def train(held: HostStates, weights: Tensor, cuts: list[int] | None = None, first: int = 1, last: int = STEPS) -> None:
    for step in range(first, last + 1):
        for begin, end in reversed(list(pairwise(cuts or [0, ELEMENTS]))):
            held.update(gradients_of(step), weights, Step(RATE, step, 0.5), begin=begin, end=end)


def read_all(held: HostStates) -> dict[str, Tensor]:
    return {kind: held.read(kind, 0, ELEMENTS) for kind in held.kinds}


# --- fp32: torch's own update ---------------------------------------------------------------------


def follow_torch(start: Tensor, *, most: float = 0.0) -> tuple[Tensor, dict[str, Tensor]]:
    """The weights, and the moments by kind, flat, after so many steps of torch's AdamW."""
    params = [part.clone().view(shape) for part, shape in zip(start.float().split(SIZES), SHAPES, strict=True)]
    groups = [{"params": [param], "weight_decay": decay} for param, decay in zip(params, SHAPES.values(), strict=True)]
    optimizer = torch.optim.AdamW(groups, lr=RATE, betas=BETAS, eps=EPS, fused=True)
    for step in range(1, STEPS + 1):
        for param, part in zip(params, gradients_of(step).split(SIZES), strict=True):
            param.grad = part.view(param.shape)
        clip([param.grad for param in params if param.grad is not None], most, None)
        optimizer.step()
    states = {kind: torch.cat([optimizer.state[param][kind].view(-1) for param in params]) for kind in (FIRST, SECOND)}
    return torch.cat([param.view(-1) for param in params]), states


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("most", [0.0, 1.0])
def test_steps_are_torchs_bit_for_bit(dtype: torch.dtype, most: float) -> None:
    weights = weights_of(dtype)
    expected, expected_moments = follow_torch(weights, most=most)
    held = make(master=dtype != torch.float32)
    held.start(weights)
    for step in range(1, STEPS + 1):
        gradients = gradients_of(step)
        norm = clip(list(gradients.split(SIZES)), 0.0, None)
        factor = float((most / (norm + 1e-6)).clamp(max=1.0)) if most else 1.0
        held.update(gradients, weights, Step(RATE, step, factor))
        assert torch.equal(gradients, gradients_of(step))  # they are read alone
    for kind, values in expected_moments.items():
        assert torch.equal(held.read(kind, 0, ELEMENTS), values)
    assert torch.equal(weights, expected.to(dtype))
    if dtype != torch.float32:
        assert torch.equal(held.read(MASTER, 0, ELEMENTS), expected)


# --- whatever the format --------------------------------------------------------------------------


@pytest.mark.parametrize(("states", "kept"), list(product(FORMATS, WEIGHTS)))
def test_ranges_and_pieces_make_up_the_whole(states: States, kept: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ends = []
    for cuts, piece in ((None, 100 * BLOCK), ([0, 3 * BLOCK, 4 * BLOCK, 11 * BLOCK, ELEMENTS], 2 * BLOCK)):
        monkeypatch.setattr(host_states, "PIECE", piece)
        held, weights = make(states, master=kept == "masters"), weights_of(WEIGHTS[kept])
        held.start(weights)
        train(held, weights, cuts)
        ends.append({"weights": weights, **read_all(held)})
    for kind, values in ends[0].items():
        assert torch.equal(values, ends[1][kind]), kind
    assert not torch.equal(ends[0]["weights"], weights_of(WEIGHTS[kept]))


@pytest.mark.parametrize("how", ["in pieces", "compiled", "through a card"])
@pytest.mark.parametrize(("states", "kept"), list(product(FORMATS, WEIGHTS)))
def test_a_step_that_went_ahead_can_count_be_made_again_or_never_have_been(states: States, kept: str, how: str) -> None:
    """Bit for bit as if each step had been made when it was known."""
    dtype, master = WEIGHTS[kept], kept == "masters"
    more: dict[str, Any] = {}
    if how == "compiled" and (kernel := find_host_adam(2)) is None:
        pytest.skip("there is no C compiler")
    elif how == "compiled":
        more["kernel"] = kernel
    elif how == "through a card":
        more["through"] = CardRoom(HOST, states, master=master, dtype=dtype)
    waiting, hasty = make(states, master=master, **more), make(states, master=master, **more)
    hasty.make_other(dtype, allocate)
    weights, hastys = weights_of(dtype), weights_of(dtype)
    waiting.start(weights)
    hasty.start(hastys)
    step = 0
    for factor in (1.0, 0.3, None, 1.0, 1.0, None, 0.7):
        hasty.update(gradients_of(step), hastys, Step(RATE, step + 1, 1.0), ahead=True)
        assert not torch.equal(weights, hastys)
        if factor is None:  # not finite
            hasty.drop(hastys)
        else:
            made = Step(RATE, step + 1, factor)
            waiting.update(gradients_of(step), weights, made)
            if hasty.ahead == made:
                hasty.accept()
            else:
                hasty.update(gradients_of(step), hastys, made)
            step += 1
        assert hasty.ahead is None
        assert torch.equal(weights, hastys)
        for kind, values in read_all(waiting).items():
            assert torch.equal(values, hasty.read(kind, 0, ELEMENTS)), kind
    assert step == 5


@pytest.mark.parametrize(("states", "kept"), list(product(FORMATS, WEIGHTS)))
def test_through_a_cards_room_all_is_the_same(states: States, kept: str) -> None:
    """Here the card is the processor: all but its streams."""
    dtype, master = WEIGHTS[kept], kept == "masters"
    ends = []
    for through in (None, CardRoom(HOST, states, master=master, dtype=dtype)):
        held, weights = make(states, master=master, through=through), weights_of(dtype)
        held.start(weights)
        train(held, weights, [0, 11 * BLOCK, ELEMENTS])
        ends.append({"weights": weights, **read_all(held)})
    for kind, values in ends[0].items():
        assert torch.equal(values, ends[1][kind]), kind


@pytest.mark.gpu
@pytest.mark.parametrize(("states", "kept"), list(product(FORMATS, WEIGHTS)))
def test_through_a_real_card_all_is_nearly_the_same(states: States, kept: str) -> None:
    """Its kernel rounds in another order, so that a moment may be the next of its format's numbers, and a weight that
    is rounded stochastically may go the other way. What is taken of a squared gradient, 1 - beta2, it works out in
    fp32, which tells such a difference no better than by `coarse`. As far as moments are apart, so far are updates."""
    if not torch.cuda.is_available():
        pytest.skip("there is no GPU")
    dtype, master = WEIGHTS[kept], kept == "masters"
    ends = []
    for through in (None, CardRoom(torch.device("cuda", 0), states, master=master, dtype=dtype)):
        held = HostStates(
            list(zip(SIZES, SHAPES.values(), strict=True)),
            states,
            master=master,
            allocate=lambda size: torch.empty(size, dtype=torch.uint8, pin_memory=True),
            through=through,
        )
        weights = weights_of(dtype).pin_memory()
        held.start(weights)
        for step in range(1, STEPS + 1):
            held.update(gradients_of(step).pin_memory(), weights, Step(RATE, step, 0.5))
        ends.append((weights.float(), held.read(FIRST, 0, ELEMENTS), held.read(SECOND, 0, ELEMENTS)))
    coarse, eps = torch.finfo(torch.float32).eps / (1 - BETAS[1]), torch.finfo(dtype).eps
    spacing = {"fp32": coarse, "bf16": 2.0**-7, "8bit": 0.03}[states]
    for one, other, part, beside in zip(*ends, (eps, spacing, spacing), (RATE * spacing, 0.0, 0.0), strict=True):
        torch.testing.assert_close(one, other, rtol=2 * part, atol=part * float(one.abs().max()) + beside)


@pytest.mark.parametrize(("states", "kept"), list(product(FORMATS, WEIGHTS)))
def test_a_training_goes_on_from_what_was_read(states: States, kept: str) -> None:
    master = kept == "masters"
    first, second = make(states, master=master), make(states, master=master)
    weights = weights_of(WEIGHTS[kept])
    first.start(weights)
    train(first, weights, last=2)
    moved = weights.clone()
    second.start(moved)
    for kind in first.kinds:
        starts = [sum(SIZES[:number]) for number in range(len(SIZES) + 1)]
        for begin, end in pairwise(starts):
            second.write(kind, begin, first.read(kind, begin, end))
    train(first, weights, first=3)
    train(second, moved, first=3)
    assert torch.equal(weights, moved)
    for kind, values in read_all(first).items():
        assert torch.equal(values, second.read(kind, 0, ELEMENTS))


def test_a_part_of_a_block_can_be_written() -> None:
    held = make("8bit")
    held.start(weights_of(torch.bfloat16))
    values = torch.randn(ELEMENTS, generator=torch.Generator().manual_seed(1))
    for begin in range(0, ELEMENTS, 100):
        held.write(FIRST, begin, values[begin : begin + 100])
    # Numbers near the largest are 1.4 % of it apart; a block is rounded up to four times.
    torch.testing.assert_close(held.read(FIRST, 0, ELEMENTS), values, rtol=0, atol=float(values.abs().max()) * 0.03)


def test_a_range_within_a_block_is_refused() -> None:
    held, weights = make(), weights_of(torch.bfloat16)
    held.start(weights)
    with pytest.raises(ValueError, match="no whole blocks"):
        held.update(gradients_of(1), weights, Step(RATE, 1, 1.0), end=BLOCK + 1)


@pytest.mark.parametrize("states", FORMATS)
def test_what_is_forgotten_is_as_before_the_first_step(states: States) -> None:
    held, weights = make(states), weights_of(torch.bfloat16)
    held.start(weights)
    train(held, weights)
    expected = weights.clone()
    held.forget()
    held.write(MASTER, 0, weights_of(torch.bfloat16).float())
    train(held, weights)
    assert torch.equal(weights, expected)


# --- bf16, and rounding ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "value"),
    [(torch.bfloat16, 1.0), (torch.bfloat16, -3e-20), (torch.float16, 0.3), (torch.float16, -5e-6)],
    ids=str,
)
def test_rounding_keeps_the_mean(dtype: torch.dtype, value: float) -> None:
    count, exact = 2**16, torch.tensor(value) * 1.0007
    noise = torch.randint(0, 2**16, (count,), dtype=torch.int32, generator=torch.Generator().manual_seed(3))
    rounded = torch.empty(count, dtype=dtype)
    host_states.round_stochastically(exact.repeat(count), noise, rounded)
    lower, upper = (float(each) for each in rounded.unique().double())  # two neighbours
    assert lower < exact < upper
    # The mean of so many is within four of its standard deviations.
    assert abs(float(rounded.double().mean()) - float(exact)) < 4 * (upper - lower) / 2 / count**0.5


def test_what_needs_no_rounding_stays() -> None:
    for dtype in (torch.bfloat16, torch.float16):
        values = weights_of(dtype)
        rounded = torch.empty_like(values)
        noise = torch.full((ELEMENTS,), 2**16 - 1, dtype=torch.int32)
        host_states.round_stochastically(values.float(), noise, rounded)
        assert torch.equal(rounded, values)


def test_noise_differs_by_step_unit_use_and_place() -> None:
    place = slice(BLOCK, 3 * BLOCK)
    keys = [(seed, use, step) for seed in (0, 1) for use in (0, 1) for step in (1, 2)]
    seen = [host_states.make_noise(key, place, HOST) for key in keys]
    seen.append(host_states.make_noise(keys[0], slice(5 * BLOCK, 7 * BLOCK), HOST))
    assert all(not torch.equal(one, other) for number, one in enumerate(seen) for other in seen[:number])
    assert torch.equal(host_states.make_noise(keys[0], slice(2 * BLOCK, 3 * BLOCK), HOST), seen[0][BLOCK:])


def test_small_updates_are_not_lost_without_masters(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hundredth of a step of bf16 each: rounded to nearest, the weights would stand still."""
    monkeypatch.setattr(host_states, "STRETCH", 2**18)  # the odds are as fine as the table is long
    means = []
    for dtype in (torch.float32, torch.bfloat16):
        held, weights = make(master=False), torch.ones(ELEMENTS, dtype=dtype)
        held.start(weights)
        for step in range(1, 201):
            held.update(torch.ones(ELEMENTS), weights, Step(2.0**-8 / 100, step, 1.0))
        means.append(1 - float(weights.double().mean()))
    assert means[0] == pytest.approx(means[1], rel=0.02)


def test_a_second_moment_of_16_bits_comes_down() -> None:
    held, weights = make("bf16"), weights_of(torch.bfloat16)
    held.start(weights)
    held.write(SECOND, 0, torch.ones(ELEMENTS))
    for step in range(1, 201):
        held.update(torch.zeros(ELEMENTS), weights, Step(0.0, step, 1.0))
    assert float(held.read(SECOND, 0, ELEMENTS).mean()) == pytest.approx(BETAS[1] ** 200, rel=2e-3)


# --- 8 bits ---------------------------------------------------------------------------------------


def test_the_numbers_are_those_of_bitsandbytes() -> None:
    assert torch.equal(host_states.numbers_of(FIRST, HOST), native.create_dynamic_map(signed=True))
    assert torch.equal(host_states.numbers_of(SECOND, HOST), native.create_dynamic_map(signed=False))


@pytest.mark.parametrize("kind", [FIRST, SECOND])
def test_the_table_finds_what_a_search_finds(kind: str) -> None:
    numbers = host_states.numbers_of(kind, HOST)
    borders = ((numbers[1:].double() + numbers[:-1].double()) / 2).float()
    up, down = torch.full_like(borders, 2.0), torch.full_like(borders, -2.0)
    near = [borders, torch.nextafter(borders, up), torch.nextafter(borders, down), numbers, -numbers]
    anywhere = torch.rand(2**16, generator=torch.Generator().manual_seed(5)) * 2 - 1
    values = torch.cat([*near, anywhere, anywhere * 1e-5, anywhere * 1e-30, torch.tensor([-0.0, 0.0, 1.0, -1.0])])
    values = nn.functional.pad(values.abs() if kind == SECOND else values, (0, -values.numel() % BLOCK))
    codes = torch.empty(values.numel(), dtype=torch.uint8)
    host_states.find_nearest(values.clone(), codes, kind, Workbench(values.numel(), HOST))
    assert torch.equal(codes.long(), torch.bucketize(values, borders))


def test_8_bits_are_the_nearest_to_what_fp32_has() -> None:
    held, weights = make("8bit"), weights_of(torch.bfloat16)
    held.start(weights)
    train(held, weights, last=1)
    exact = make()
    exact.start(moved := weights_of(torch.bfloat16))
    train(exact, moved, last=1)
    assert torch.equal(weights, moved)  # the first step reads no moment
    for kind in (FIRST, SECOND):
        values = nn.functional.pad(exact.read(kind, 0, ELEMENTS), (0, -ELEMENTS % BLOCK)).view(-1, BLOCK)
        codes, scales = quantise(values, numbers := host_states.numbers_of(kind, HOST))
        expected = (numbers[codes] * scales[:, None]).view(-1)[:ELEMENTS]
        assert torch.equal(held.read(kind, 0, ELEMENTS), expected)


def bitsandbytes_states(param: nn.Parameter, optimizer: Any) -> dict[str, Tensor]:
    whiches: dict[str, Which] = {FIRST: 1, SECOND: 2}
    return {kind: read_8bit(optimizer.state[param], which) for kind, which in whiches.items()}


def test_states_cross_to_bitsandbytes_and_back() -> None:
    param = nn.Parameter(weights_of(torch.float32)[: SIZES[0]].clone())
    optimizer: Any = optimizers.make_optimizer("adamw8bit", [{"params": [param], "weight_decay": 0.1}], fused=False)
    optimizers.set_rate(optimizer, RATE)
    held = HostStates([(SIZES[0], 0.1)], "8bit", master=True, allocate=allocate)
    weights = param.detach().to(torch.bfloat16)
    held.start(weights)
    held.write(MASTER, 0, param.detach())
    for step in range(1, STEPS + 1):
        held.update(gradients_of(step), weights, Step(RATE, step, 1.0))
        param.grad = gradients_of(step)[: SIZES[0]]
        optimizer.step()
    # The same arithmetic in another order, and so, here and there, the next of the 256 numbers.
    scales = {kind: float(held.read(kind, 0, SIZES[0]).abs().max()) for kind in (FIRST, SECOND)}
    for kind, values in bitsandbytes_states(param, optimizer).items():
        torch.testing.assert_close(held.read(kind, 0, SIZES[0]), values, rtol=0, atol=scales[kind] * 0.015)
    torch.testing.assert_close(held.read(MASTER, 0, SIZES[0]), param.detach(), rtol=0, atol=RATE / 10)
    mine = {kind: held.read(kind, 0, SIZES[0]) for kind in (FIRST, SECOND)}
    theirs = bitsandbytes_states(param, optimizer)
    write_8bit(optimizer.state[param], 1, mine[FIRST])
    write_8bit(optimizer.state[param], 2, mine[SECOND])
    for kind, values in bitsandbytes_states(param, optimizer).items():
        assert torch.equal(values, mine[kind])
    for kind, values in theirs.items():
        held.write(kind, 0, values)
        assert torch.equal(held.read(kind, 0, SIZES[0]), values)


@pytest.mark.parametrize("states", ["fp32", "bf16"])
@pytest.mark.parametrize(("dtype", "master"), [(torch.bfloat16, True), (torch.bfloat16, False), (torch.float32, False)])
def test_the_compiled_kernel_computes_what_torch_does(states: States, dtype: torch.dtype, master: bool) -> None:
    """But for the noise of what is rounded at random, which is its own, and the last bit of fp32."""
    kernel = find_host_adam(2)
    if kernel is None:
        pytest.skip("there is no C compiler")
    decays, random = [(512, 0.1), (1024, 0.0)], torch.Generator().manual_seed(3)
    gradients = torch.randn(1536, generator=random)
    begun = torch.randn(1536, generator=random).to(dtype)
    found = []
    for chosen in (None, kernel):
        held = HostStates(decays, states, master=master, allocate=allocate, kernel=chosen)
        weights = begun.clone()
        held.start(weights)
        for step in (1, 2, 3):
            held.update(gradients, weights, Step(1e-2, step, 0.5))
        found.append([weights.float(), *(held.read(kind, 0, 1536) for kind in held.kinds)])
    is_narrow = states == "bf16" or (dtype == torch.bfloat16 and not master)
    for torchs, ours in zip(*found, strict=True):
        # What is rounded at random is off by a few steps of bf16, a hundred and twenty-eighth each, and in the mean by
        # nothing.
        torch.testing.assert_close(ours, torchs, rtol=0.03 if is_narrow else 1e-6, atol=0.02 if is_narrow else 1e-6)
        assert ours.mean().item() == pytest.approx(torchs.mean().item(), rel=1e-3, abs=2e-4)
    assert not torch.equal(found[0][0], begun.float())


def test_the_kernel_rounds_at_random_as_often_as_it_should() -> None:
    """A weight of 1 that is to lose a tenth of bf16's step to its neighbour does so for a tenth of the elements, and
    for others at another step or with another seed; ranges make no difference."""
    kernel = find_host_adam(2)
    if kernel is None:
        pytest.skip("there is no C compiler")
    count = 256 * 256
    gap = 2.0**-8  # of bf16 below 1

    def run(seed: int, step: int, *ranges: tuple[int, int]) -> Tensor:
        held = HostStates([(count, 0.0)], "fp32", master=False, allocate=allocate, kernel=kernel, seed=seed)
        weights = torch.ones(count, dtype=torch.bfloat16)
        held.start(weights)
        for begin, end in ranges or ((0, count),):
            held.update(torch.ones(count), weights, Step(gap / 10, step, 1.0), begin=begin, end=end)
        return weights

    moved = run(0, 1) < 1
    assert moved.float().mean().item() == pytest.approx(0.1, abs=0.01)
    assert torch.equal(run(0, 1), run(0, 1, (0, 1024), (1024, count)))
    assert not torch.equal(run(0, 1), run(1, 1))


@pytest.mark.parametrize(
    ("page", "few", "words"),
    [
        (
            "states.md",
            r"fewer than (\d+) on Hopper and later cards, fewer than (\d+) on others",
            "fp32 and bf16 moments",
        ),
        ("zh/states.md", r"Hopper 及更新的卡少于 (\d+) 个、其他卡少于 (\d+) 个", "fp32 和 bf16 动量"),
    ],
)
def test_the_page_says_where_updates_run(page: str, few: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    said = (Path(__file__).parents[2] / "docs" / page).read_text(encoding="utf-8")
    assert words in said
    numbers = re.search(few, said)
    assert numbers is not None
    there = Place(rank=0, local_rank=0, world=1, device=torch.device("cuda"), launcher="python")
    for capability, enough in zip(((9, 0), (8, 9)), map(int, numbers.groups()), strict=True):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, found=capability: found)
        for states in FORMATS:
            passes = [updates_on_card(Levers(states=states), there, cores) for cores in (enough - 1, enough)]
            assert passes == [True, states == "8bit"]
