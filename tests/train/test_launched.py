"""The host launches a step and asks afterwards, once: nothing in between waits for the device.

On a processor nothing waits either, so the questions themselves are looked for: a tensor whose value goes to the host.
"""

from __future__ import annotations

from importlib import import_module
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from small_models import config_of, real
from test_worst_cases import ALONE, dealt
from torch import Tensor, nn
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tightfit.train import optimizers
from tightfit.train.config import OptimizerConfig
from tightfit.train.documents import Told
from tightfit.train.engines import Launched, Stepped
from tightfit.train.engines.deepspeed import look_at_once
from tightfit.train.engines.fsdp2 import UNMARKED, Fsdp2, shard
from tightfit.train.mesh import make_mesh
from tightfit.types import Levers


class Questions(TorchDispatchMode):
    """Counts the values that the host reads."""

    asked = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.asked += function is torch.ops.aten._local_scalar_dense.default
        return function(*args, **(kwargs or {}))


def on_shards(kind: Any, mesh: Any) -> tuple[Any, list[Any]]:
    torch.manual_seed(0)
    params = [nn.Parameter(distribute_tensor(torch.randn(shape), mesh, [Shard(0)])) for shape in ((30, 50), (7,))]
    made = optimizers.make_optimizer(kind, [{"params": params, "weight_decay": 0.1}], fused=True)
    optimizers.set_rate(made, 1e-2)
    return made, params


def give_gradients(params: list[Any], value: float | None = None) -> None:
    for param in params:
        grad = torch.randn(param.shape)
        if value is not None:
            grad.view(-1)[3] = value
        param.grad = distribute_tensor(grad, param.device_mesh, [Shard(0)])


@pytest.mark.parametrize("kind", ["adamw", "sgd", "adamw8bit"])
def test_a_spoilt_step_leaves_weights_moments_and_counters_as_they_were(kind: str, mesh: Any) -> None:
    made, params = on_shards(kind, mesh)
    give_gradients(params)
    optimizers.step_unless(made, torch.zeros(()))
    before = [param.full_tensor().clone() for param in params]
    held = [{name: torch.as_tensor(each).clone() for name, each in made.state[param].items()} for param in params]
    for value in (float("nan"), float("inf")):
        give_gradients(params, value)
        norm = optimizers.clip(made.grads(), 1.0, None)
        assert not torch.isfinite(norm)
        with Questions() as questions:
            optimizers.step_unless(made, torch.isfinite(norm).logical_not().float())
        assert questions.asked == ("8bit" in kind)
    for param, weight, states in zip(params, before, held, strict=True):
        assert torch.equal(param.full_tensor(), weight)
        assert all(torch.equal(torch.as_tensor(each), states[name]) for name, each in made.state[param].items())
    give_gradients(params)
    optimizers.step_unless(made, torch.zeros(()))
    assert not torch.equal(params[0].full_tensor(), before[0])


@pytest.mark.parametrize("most", [0.5, 1e9, 0.0])
def test_gradients_are_clipped_as_torch_clips_them(most: float, mesh: Any) -> None:
    made, params = on_shards("adamw", mesh)
    give_gradients(params)
    plain = [nn.Parameter(torch.zeros(param.shape)) for param in params]
    for param, twin in zip(params, plain, strict=True):
        twin.grad = param.grad.full_tensor().clone()
    added: list[Tensor] = []
    with pytest.MonkeyPatch.context() as older:  # torch before 2.6
        older.delattr(nn.utils, "get_total_norm", raising=False)
        norm = optimizers.clip(made.grads(), most, added.append)
        assert optimizers.clip([], most, None) == 0
    assert torch.equal(norm, added[0])  # squared, added up over ranks, and its root: in place
    torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(plain, most or float("inf")))
    for param, twin in zip(params, plain, strict=True):
        torch.testing.assert_close(param.grad.full_tensor(), twin.grad)


def test_what_a_step_did_is_read_at_once() -> None:
    launched = Launched(grad_norm=torch.tensor(2.5), skipped=torch.tensor(1.0), loss_scale=None)
    with Questions() as questions:
        assert launched.read(torch.tensor(7.0)) == (7.0, Stepped(grad_norm=2.5, skipped=True, loss_scale=None))
    assert questions.asked == 0  # as one list
    plain = Launched(grad_norm=None, skipped=False, loss_scale=4.0).read(torch.tensor(float("nan")))
    assert np.isnan(plain[0])
    assert plain[1] == Stepped(grad_norm=None, skipped=False, loss_scale=4.0)


@pytest.mark.parametrize("precision", ["fp32", pytest.param("fp16", marks=pytest.mark.thorough)])
def test_no_value_is_read_between_the_first_kernel_and_the_last(precision: Any, mesh: Any) -> None:
    model = real(config_of("llama")).train()
    levers = Levers(engine="fsdp2", precision=precision, sequence=16)
    shard(model, levers, make_mesh(levers, ALONE), ALONE)
    training = OptimizerConfig(
        **{"learning_rate": 1e-3, "schedule": "constant", "warmup": 0.0, "epochs": None, "max_steps": 2, "seed": 0},
        **{"weight_decay": 0.0, "clip": 1.0, "first_scale_power": 4 if precision == "fp16" else None},
    )
    engine = Fsdp2(model, levers, ALONE, training)
    windows = dealt()
    losses = []
    for step in range(2):
        window = windows.window(step)
        for turn, inputs in enumerate(windows.inputs(window)):
            with Questions() as questions:
                loss = engine.forward(inputs, window.divisor)
                engine.backward(loss, last=turn == 1)
            assert questions.asked == 0
        with Questions() as questions:
            launched = engine.step(1e-3)
        assert questions.asked == 0
        windows.make_ahead(step + 1)
        value, stepped = launched.read(loss)
        losses.append(value)
        assert stepped.grad_norm
        assert not stepped.skipped
    assert losses[1] < losses[0]
    inside: Any = import_module("torch.distributed.fsdp._fully_shard._fsdp_param_group")
    assert inside.record_function("FSDP::pre_forward") is UNMARKED
    with torch.profiler.profile() as seen, torch.no_grad():
        engine.forward(next(windows.inputs(windows.window(0))), 1.0)
    assert any("FSDP::pre_forward" in event.key for event in seen.key_averages())


def test_transformers_is_told_what_it_would_ask() -> None:
    model = real(config_of("llama"))
    ids = torch.randint(0, 250, (2, 16))
    places = torch.arange(16).repeat(2, 1)
    apart = places.clone()
    apart[1, 9:] -= 9
    for position_ids in (None, apart):
        inputs: dict[str, Any] = {"input_ids": ids, "use_cache": False}
        if position_ids is not None:
            inputs["position_ids"] = position_ids
        with Questions() as questions:
            asked = model(**inputs).logits
        assert questions.asked > 0  # or there is nothing to be spared
        told = Told()
        told.several = position_ids is not None
        with Questions() as questions, told:
            assert torch.equal(model(**inputs).logits, asked)
        assert questions.asked == 0


def test_a_transformers_that_asks_for_no_documents_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    masks = import_module("transformers.masking_utils")
    monkeypatch.delattr(masks, "find_packed_sequence_indices", raising=False)
    Told()
    assert not hasattr(masks, "find_packed_sequence_indices")


def test_the_window_made_ahead_is_the_same() -> None:
    one, other = dealt(packed=True), dealt(packed=True)
    for step in range(3):
        one.make_ahead(step)
        ours, theirs = one.window(step), other.window(step)
        assert ours.samples.tolist() == theirs.samples.tolist()
        for mine, yours in zip(one.inputs(ours), other.inputs(theirs), strict=True):
            assert mine.keys() == yours.keys() == {"input_ids", "labels"}  # each row is one document
            assert all(torch.equal(mine[name], yours[name]) for name in mine)


@pytest.mark.parametrize("engine", ["zero0", "zero2"])
def test_deepspeed_looks_at_all_gradients_together(engine: str) -> None:
    """Without ZeRO it would ask the device once for each parameter."""
    from deepspeed.runtime.utils import CheckOverflow
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    params = [nn.Parameter(torch.ones(size, dtype=torch.bfloat16)) for size in (3, 0, 5)]
    unused = nn.Parameter(torch.ones(2))
    if engine == "zero0":
        checker = CheckOverflow([params])
        wrapper: Any = SimpleNamespace(overflow_checker=checker)
        check: Any = lambda: checker.has_overflow([*params, unused])  # noqa: E731
    else:
        wrapper = object.__new__(DeepSpeedZeroOptimizer)
        wrapper.bit16_groups = [params]
        check = wrapper.has_overflow_partitioned_grads_serial
    for turn in range(2):
        if turn:
            look_at_once(wrapper)
            check = check if engine == "zero0" else wrapper.has_overflow_partitioned_grads_serial
        found = []
        for value in (1.0, 3e38, float("nan"), float("inf"), float("-inf")):
            for param in params:
                param.grad = torch.ones_like(param)
            params[2].grad[4] = value  # type: ignore[index]
            wrapper.averaged_gradients = {0: [*(param.grad for param in params), None]}
            with Questions() as questions:
                answer = check()
            assert turn == 0 or questions.asked <= 2 * (engine == "zero0")
            found.append(bool(answer))
        assert found == [False, False, True, True, True]
