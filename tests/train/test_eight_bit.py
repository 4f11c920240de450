"""8-bit optimizers: on FSDP2's shards they follow a plain program, and their states can be read and written.

The plain program is one process with bitsandbytes' own AdamW8bit. Where shards are whole blocks of states, two ranks
round as one process does, and fp32 differs by the order of sums: one part in a hundred thousand of the loss. Three
ranks cut matrices elsewhere, so that blocks and their scales are others: five parts in ten thousand. bf16: two parts in
a thousand, as with every optimizer.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import bitsandbytes.functional as native
import plain
import pytest
import torch
from bitsandbytes.optim import AdamW8bit
from running import run_ranks, write_plan
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from tightfit.train import optimizers
from tightfit.train.config import read_worker_config
from tightfit.train.optimizers import BLOCK, PIECE, Which, is_eight_bit, quantise, read_8bit, write_8bit

RATE = 1e-2
MOMENTS: tuple[Which, ...] = (1, 2)


def stepped(optimizer: Any, params: list[Any], steps: int, seed: int = 0) -> None:
    """So many steps with gradients of very different sizes; some blocks get none at all."""
    made = torch.Generator().manual_seed(seed)
    optimizers.set_rate(optimizer, RATE)
    for _ in range(steps):
        for param in params:
            grad = torch.randn(param.shape, generator=made) * torch.logspace(-6, 2, param.numel()).view(param.shape)
            grad.view(-1)[BLOCK : 3 * BLOCK] = 0
            param.grad = distribute_tensor(grad, param.device_mesh, [Shard(0)]) if isinstance(param, DTensor) else grad
        optimizer.step()


def eight_bit(*shapes: tuple[int, ...], seed: int = 0) -> tuple[Any, list[nn.Parameter]]:
    torch.manual_seed(seed)
    params = [nn.Parameter(torch.randn(shape)) for shape in shapes]
    return optimizers.make_optimizer("adamw8bit", [{"params": params, "weight_decay": 0.1}], fused=False), params


# --- reading and writing ------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(300, 50), (64, 64), (4099,), (7, 3, 501)], ids=str)
def test_what_is_read_can_be_written_bit_for_bit(shape: tuple[int, ...]) -> None:
    optimizer, (param,) = eight_bit(shape)
    stepped(optimizer, [param], 5)
    state = optimizer.state[param]
    for which in MOMENTS:
        codes, scales = state[f"state{which}"].clone(), state[f"absmax{which}"].clone()
        values = read_8bit(state, which)
        assert values.dtype == torch.float32
        state[f"state{which}"].fill_(77)
        state[f"absmax{which}"].fill_(77)
        write_8bit(state, which, values)
        assert torch.equal(read_8bit(state, which), values)
        assert torch.equal(state[f"absmax{which}"], scales)
        held = scales.repeat_interleave(BLOCK)[: codes.numel()] > 0  # without a scale, a code says nothing
        assert torch.equal(state[f"state{which}"].view(-1)[held], codes.view(-1)[held])


def test_bitsandbytes_alone_would_not_be_exact() -> None:
    """What the recognised blocks are for: the scale of a block whose largest value is negative."""
    optimizer, (param,) = eight_bit((300, 50))
    stepped(optimizer, [param], 5)
    state = optimizer.state[param]
    _, again = native.quantize_blockwise(read_8bit(state, 1), code=state["qmap1"], blocksize=BLOCK)
    assert not torch.equal(again.absmax, state["absmax1"])


def test_a_training_goes_on_as_if_nothing_had_happened() -> None:
    ends = []
    for saved in (False, True):
        optimizer, params = eight_bit((300, 50), (10, 10))
        stepped(optimizer, params, 4)
        if saved:
            held = [[read_8bit(optimizer.state[param], which) for which in MOMENTS] for param in params]
            weights = [param.detach().clone() for param in params]
            optimizer, params = eight_bit((300, 50), (10, 10), seed=1)
            optimizers.make_states(optimizer)
            for param, weight, moments in zip(params, weights, held, strict=True):
                param.data.copy_(weight)
                optimizer.state[param]["step"] = 4
                for which in MOMENTS:
                    write_8bit(optimizer.state[param], which, moments[which - 1])
        stepped(optimizer, params, 4, seed=1)
        ends.append([*params, *(read_8bit(optimizer.state[param], which) for param in params for which in MOMENTS)])
    assert all(torch.equal(one, other) for one, other in zip(*ends, strict=True))


@pytest.mark.parametrize("signed", [True, False])
def test_other_values_are_rounded_no_worse_than_bitsandbytes_does(signed: bool) -> None:
    """The same scales; of the map's numbers the nearest, for which bitsandbytes looks in a shorter table on the CPU."""
    numbers = native.create_dynamic_map(signed=signed)
    torch.manual_seed(3)
    blocks = torch.randn(512, BLOCK) * torch.logspace(-9, 3, 512)[:, None]
    blocks = blocks if signed else blocks.square()
    codes, scales = quantise(blocks, numbers)
    theirs, state = native.quantize_blockwise(blocks, code=numbers, blocksize=BLOCK)
    assert torch.equal(scales, state.absmax)
    errors = [(numbers[each.int()] * scales[:, None] - blocks).abs() / scales[:, None] for each in (codes, theirs)]
    assert (errors[0] <= errors[1] + 1e-7).all()


def test_pieces_make_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tightfit.train.optimizers.PIECE", 2 * BLOCK)
    optimizer, (param, twin) = eight_bit((123, 45), (123, 45))
    stepped(optimizer, [param, twin], 3)
    numel = param.numel()
    for which in MOMENTS:
        state, other = optimizer.state[param], optimizer.state[twin]
        whole = read_8bit(state, which)
        assert torch.equal(torch.cat([read_8bit(state, which, 0, 700), read_8bit(state, which, 700)]), whole)
        for start in range(0, numel, 3 * BLOCK):
            write_8bit(other, which, whole[start : start + 3 * BLOCK], start)
        assert torch.equal(read_8bit(other, which), whole)
        with pytest.raises(ValueError, match="no whole blocks"):
            write_8bit(other, which, whole[:100])
    assert PIECE % BLOCK == 0


def test_small_parameters_have_plain_states() -> None:
    optimizer, (param,) = eight_bit((50, 50))
    stepped(optimizer, [param], 3)
    state = optimizer.state[param]
    assert not is_eight_bit(state)
    values = read_8bit(state, 2)
    assert torch.equal(values.view(50, 50), state["state2"])
    write_8bit(state, 1, values)
    assert torch.equal(state["state1"], state["state2"])


# --- states before the first step, and after being forgotten ------------------------------------


def of_kind(kind: Any, mesh: Any = None, fused: bool = False) -> tuple[Any, list[Any]]:
    torch.manual_seed(0)
    params: list[Any] = [nn.Parameter(torch.randn(shape)) for shape in ((300, 50), (10, 10))]
    if mesh is not None:
        params = [nn.Parameter(distribute_tensor(param.data, mesh, [Shard(0)])) for param in params]
    groups = [{"params": params[:1], "weight_decay": 0.1}, {"params": params[1:], "weight_decay": 0.0}]
    return optimizers.make_optimizer(kind, groups, fused=fused), params


def whole(tensor: Any) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@pytest.mark.parametrize("sharded", [False, True], ids=["plain", "sharded"])
@pytest.mark.parametrize(
    ("kind", "fused"),
    [("adamw", False), ("adamw", True), ("sgd", False), ("adamw8bit", False), ("paged_adamw8bit", False)],
)
def test_states_are_made_as_the_first_step_makes_them(kind: str, fused: bool, sharded: bool, mesh: Any) -> None:
    made, params = of_kind(kind, mesh if sharded else None, fused)
    before = [whole(param).clone() for param in params]
    optimizers.make_states(made)
    assert all(torch.equal(whole(param), value) for param, value in zip(params, before, strict=True))
    other, others = of_kind(kind, mesh if sharded else None, fused)
    stepped(other, others, 1)
    optimizers.forget(other)
    for param, twin in zip(params, others, strict=True):
        ours, theirs = made.state[param], other.state[twin]
        assert list(ours) == list(theirs) if kind != "sgd" else not ours
        for name, value in ours.items():
            assert type(value) is type(theirs[name])
            if isinstance(value, Tensor):
                assert (value.dtype, value.device, value.shape) == (
                    theirs[name].dtype,
                    theirs[name].device,
                    theirs[name].shape,
                )
                assert torch.equal(whole(value), whole(theirs[name]))
            else:
                assert value == theirs[name] == 0
    fresh, unmade = of_kind(kind, mesh if sharded else None, fused)
    for optimizer, trained in ((made, params), (fresh, unmade)):
        stepped(optimizer, trained, 3)
    assert all(torch.equal(whole(one), whole(two)) for one, two in zip(params, unmade, strict=True))


def test_states_that_are_there_stay() -> None:
    optimizer, (param,) = eight_bit((300, 50))
    stepped(optimizer, [param], 2)
    held = read_8bit(optimizer.state[param], 1)
    optimizers.make_states(optimizer)
    assert torch.equal(read_8bit(optimizer.state[param], 1), held)


def test_what_was_forgotten_leaves_no_trace() -> None:
    ends = []
    for tried in (False, True):
        optimizer, params = eight_bit((300, 50), (10, 10))
        if tried:
            kept = [param.detach().clone() for param in params]
            stepped(optimizer, params, 2, seed=9)
            optimizers.forget(optimizer)
            for param, value in zip(params, kept, strict=True):
                param.data.copy_(value)
        stepped(optimizer, params, 3)
        ends.append(params)
    assert all(torch.equal(one, other) for one, other in zip(*ends, strict=True))


# --- on shards ----------------------------------------------------------------------------------


def test_local_parts_are_the_weights(mesh: Any) -> None:
    """A shard that moves, as at the first forward pass, is followed; nothing of a gradient stays behind."""
    ours, params = of_kind("adamw8bit", mesh)
    assert isinstance(ours, optimizers.LocalParts)
    theirs, plainly = of_kind("adamw8bit")
    for moved in (False, True):
        if moved:
            for param in params:
                param._local_tensor = param._local_tensor.clone()
        stepped(ours, params, 2, seed=int(moved))
        stepped(theirs, plainly, 2, seed=int(moved))
        assert all(torch.equal(whole(one), two) for one, two in zip(params, plainly, strict=True))
    assert all(local.grad is None for local in ours.locals.values())
    assert ours.inner.state[ours.locals[params[0]]] is ours.state[params[0]]
    ours.zero_grad()
    assert all(param.grad is None for param in params)


def test_a_rank_without_rows_steps_nothing(mesh: Any) -> None:
    empty = nn.Parameter(DTensor.from_local(torch.empty(0, 8), mesh, [Shard(0)], shape=(2, 8), stride=(8, 1)))
    full = nn.Parameter(distribute_tensor(torch.ones(300, 50), mesh, [Shard(0)]))
    optimizer = optimizers.make_optimizer("adamw8bit", [{"params": [empty, full], "weight_decay": 0.0}], fused=True)
    optimizers.make_states(optimizer)
    empty.grad, full.grad = empty.detach().clone(), full.detach().clone()
    optimizers.set_rate(optimizer, RATE)
    optimizer.step()
    assert not optimizer.state[empty]
    assert optimizer.state[full]["step"] == 1
    assert float(whole(full.data).max()) < 1


# --- whole trainings ----------------------------------------------------------------------------

STEPS = 5
LEARNT = 0.05
BASE: dict[str, Any] = {
    "model": "tiny_llama",
    "precision": "fp32",
    "optimizer": "adamw8bit",
    "seq": 128,
    "effective_batch": 6,
    "micro_batch": 1,
    "max_steps": STEPS,
    "learning_rate": 3e-3,
}
LORA = {"method": "lora", "lora_rank": 4, "learning_rate": 3e-2}
WAYS: dict[str, tuple[int, dict[str, Any], float]] = {
    "fsdp2": (2, {"engine": "fsdp2"}, 1e-5),
    "fsdp2, other blocks": (3, {"engine": "fsdp2"}, 5e-4),
    "fsdp2 bf16": (2, {"engine": "fsdp2", "precision": "bf16"}, 2e-3),
    "fsdp2 lora, a rank without rows": (3, {"engine": "fsdp2", **LORA}, 1e-5),
    "zero0": (2, {"engine": "zero0"}, 1e-5),
    "zero0 bf16": (2, {"engine": "zero0", "precision": "bf16"}, 2e-3),
}
"""Ranks, flags, and how close the losses are."""


def plain_losses(folder: Path) -> list[float]:
    """As the plain program has it, with bitsandbytes' optimizer instead of torch's."""
    torch.set_num_threads(1)
    config = read_worker_config(folder / "worker.json")
    model, trainable = plain._model(config)
    masters = [param.detach().float().clone() for param in trainable]
    decays = [config.training.weight_decay if param.dim() >= 2 else 0.0 for param in trainable]
    groups = [{"params": [m], "weight_decay": decay} for m, decay in zip(masters, decays, strict=True)]
    optimizer = AdamW8bit(groups, lr=0.0)
    losses = []
    for step, windows in enumerate(plain._windows(config, STEPS)):
        tokens, total = sum(int((labels[:, 1:] != -100).sum()) for _, labels in windows), 0.0
        for param in trainable:
            param.grad = None
        for ids, labels in windows:
            logits = model(input_ids=ids, use_cache=False).logits.float()
            flat = logits[:, :-1].reshape(-1, logits.shape[-1])
            loss = nn.functional.cross_entropy(flat, labels[:, 1:].reshape(-1), ignore_index=-100, reduction="sum")
            (loss / tokens).backward()
            total += float(loss.detach()) / tokens
        losses.append(total)
        plain._update(config, step, STEPS, trainable, masters, optimizer)
    return losses


def run(folder: Path, world: int, flags: dict[str, Any], *options: str) -> list[float]:
    folder.mkdir(exist_ok=True)
    data = plain.write_examples(folder / "examples.jsonl")
    ran = run_ranks(write_plan(folder, world, **{**BASE, "data": str(data), **flags}), *options)
    assert ran.codes == [0] * world, "\n".join(ran.stderr)
    assert len(ran.losses) == STEPS
    return ran.losses


@pytest.mark.thorough
@pytest.mark.parametrize("way", [pytest.param(way, marks=[pytest.mark.slow]) for way in WAYS])
def test_8_bit_states_follow_a_plain_program(tmp_path: Path, way: str) -> None:
    world, flags, close = WAYS[way]
    found = run(tmp_path, world, flags)
    expected = plain_losses(tmp_path)
    assert found == pytest.approx(expected, rel=close)
    assert expected[-1] < expected[0] - LEARNT


@pytest.mark.thorough
@pytest.mark.slow
def test_the_probe_leaves_nothing_in_8_bit_states(tmp_path: Path) -> None:
    flags = {"engine": "fsdp2", "optimizer": "paged_adamw8bit"}
    probed = run(tmp_path / "probed", 2, flags)
    assert run(tmp_path / "not", 2, flags, "--no-probe") == probed


@pytest.mark.thorough
@pytest.mark.parametrize(
    "flags", [{"precision": "fp16"}, {"method": "qlora", "lora_rank": 4, "learning_rate": 3e-2, "precision": "bf16"}]
)
@pytest.mark.slow
def test_8_bit_states_train_under_a_loss_scale_and_on_4_bit_weights(tmp_path: Path, flags: dict[str, Any]) -> None:
    losses = run(tmp_path, 2, {"engine": "fsdp2", **flags})
    assert losses[-1] < losses[0] - LEARNT
