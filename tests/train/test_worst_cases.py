"""Cases that come late in a run, or to few models: they are cheap to meet here."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from running import run_ranks, write_plan
from safetensors.torch import load_file
from small_models import config_of, real
from torch import nn

from tightfit.train.assemble import fill_buffers
from tightfit.train.data.order import Order
from tightfit.train.data.samples import GeneratedRows, Samples
from tightfit.train.engines import Engine, Launched
from tightfit.train.loop import Windows
from tightfit.train.place import Place
from tightfit.train.probe import PASSES, probe
from tightfit.types import Levers

ALONE = Place(rank=0, local_rank=0, world=1, device=torch.device("cpu"), launcher="tests")


def dealt(*, packed: bool = False, micro_batch: int = 2) -> Windows:
    samples = Samples(
        row=GeneratedRows(count=4, sequence=16, vocabulary=300, seed=0).row,
        lengths=np.full(4, 16, dtype=np.int32),
        loss_tokens=np.full(4, 15, dtype=np.int64),
        fingerprint="",
        sequence=16,
        packed=packed,
    )
    levers = Levers(micro_batch=micro_batch, sequence=16, attention="flash")
    return Windows(samples, Order(4, 4, 0), levers, ALONE, pad_id=0)


@pytest.mark.parametrize(("works", "width"), [(True, 32), (False, 24)])
def test_rows_have_fixed_widths_only_while_layers_run_compiled(works: bool, width: int) -> None:
    """A compiler that is planned may find an obstacle, or give up."""
    samples = Samples(
        row=GeneratedRows(count=4, sequence=20, vocabulary=300, seed=0).row,
        lengths=np.full(4, 20, dtype=np.int32),
        loss_tokens=np.full(4, 19, dtype=np.int64),
        fingerprint="",
        sequence=64,
        packed=False,
    )
    compiler: Any = SimpleNamespace(is_at_work=works)
    levers = Levers(micro_batch=2, sequence=64, compile="layers")
    windows = Windows(samples, Order(4, 4, 0), levers, ALONE, pad_id=0, compiler=compiler)
    assert windows.tensors(np.arange(2))["input_ids"].shape == (2, width)
    unplanned = Windows(samples, Order(4, 4, 0), levers, ALONE, pad_id=0)
    assert unplanned.tensors(np.arange(2))["input_ids"].shape == (2, 24)


def test_rows_are_laid_end_to_end_only_for_a_kernel_that_runs() -> None:
    assert dealt(packed=True).tensors(np.arange(2))["input_ids"].shape == (2, 16)  # flash is asked for, sdpa is used


def test_rows_that_fill_up_an_evaluation_are_unheard_in_one_row_too() -> None:
    windows = dealt(packed=True)
    windows._one_row = True
    labels = windows.tensors(np.array([3, 3]), unheard=np.array([False, True]))["labels"]
    assert labels.shape == (1, 32)
    assert bool((labels[0, 16:] == -100).all())
    assert not bool((labels[0, :16] == -100).all())


class Overflowing:
    """An engine whose first steps overflow, as those of fp16 do under a large loss scale."""

    _place, accumulate, runs_in_step = ALONE, Engine.accumulate, Engine.runs_in_step

    def __init__(self, overflows: int) -> None:
        self.model, self.overflows, self.steps = real(config_of("llama")).train(), overflows, 0

    def forward(self, inputs: dict[str, torch.Tensor], divisor: float) -> torch.Tensor:
        return self.model(**inputs, use_cache=False).loss / divisor

    def backward(self, loss: torch.Tensor, *, last: bool) -> None:
        loss.backward()

    def step(self, learning_rate: float) -> Launched:
        self.steps += 1
        return Launched(grad_norm=None, skipped=self.steps <= self.overflows, loss_scale=2.0**16)

    def forget(self) -> None:
        pass


@pytest.mark.parametrize("overflows", [0, 3])
def test_the_probe_goes_on_until_steps_were_taken(overflows: int) -> None:
    engine: Any = Overflowing(overflows)
    windows = dealt()
    milestones: Any = SimpleNamespace(measure=lambda _: None)
    probe(engine, windows, windows.window(0), milestones, ALONE)
    assert engine.steps == overflows + PASSES


class Router(nn.Module):
    _keep_in_fp32_modules_strict = ("correction",)

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("correction", torch.zeros(4, dtype=torch.bfloat16))
        self.register_buffer("steps", torch.zeros(2, dtype=torch.int64))
        self.register_buffer("frequencies", torch.ones(3), persistent=False)


class Stored:
    def read(self, name: str, shape: tuple[int, ...], start: int, stop: int) -> torch.Tensor:
        return {"correction": torch.full((4,), 0.1), "steps": torch.tensor([7, 8])}[name]


def test_buffers_that_a_checkpoint_holds_are_read_from_it() -> None:
    model = Router()
    fill_buffers(model, Stored())
    assert model.correction.dtype == torch.float32
    assert torch.equal(model.correction, torch.full((4,), 0.1))
    assert model.steps.tolist() == [7, 8]
    assert model.frequencies.tolist() == [1, 1, 1]


@pytest.mark.thorough
def test_a_matrix_of_one_row_is_saved(tmp_path: Path) -> None:
    """FSDP2 gives the row to one rank, which then has the whole matrix, and is the only one that has any of it."""
    flags = {"model": "tiny_llama", "seq": 64, "effective_batch": 4, "max_steps": 1, "data": "shipped:text"}
    ran = run_ranks(write_plan(tmp_path, 2, **flags, method="lora", lora_rank=1, engine="fsdp2"))
    assert ran.codes == [0, 0], "\n".join(ran.stderr)
    saved = load_file(ran.folder / "model" / "adapter_model.safetensors")
    assert all(tensor.shape[0] == 1 for name, tensor in saved.items() if "lora_A" in name)
