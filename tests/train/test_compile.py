"""Compiled layers: one code for all layers of a kind, the same losses, and the plain way wherever compiling fails."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from small_models import config_of, real
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func

from tightfit.train import compile as compiling
from tightfit.train.events import Events
from tightfit.types import Checkpointing, Levers

# Torch's compiler uses what torch itself has deprecated.
pytestmark = [pytest.mark.thorough, pytest.mark.filterwarnings("ignore::DeprecationWarning")]
WITHOUT_CODE = "aot_eager_decomp_partition"  # splits and recomputes as inductor does, and makes no code of it
ROUNDING = 1e-5  # fp32, where sums are taken in another order
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def plain_backend(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(compiling, "BACKEND", WITHOUT_CODE)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Counter:
    """A compiler that counts what it is given."""

    def __init__(self, fail: Callable[[], None] = lambda: None) -> None:
        self.graphs, self._fail = 0, fail

    def __call__(self, graph: Any, inputs: Any) -> Any:
        self.graphs += 1
        self._fail()
        return torch._dynamo.lookup_backend(WITHOUT_CODE)(graph, inputs)


class Said(Events):
    """What is told, by the kind of event."""

    def __init__(self) -> None:
        self.told: dict[str, list[str]] = {"warning": [], "progress": []}

    def write(self, event: str, **fields: Any) -> None:
        self.told[event].append(str(fields["text" if event == "warning" else "what"]))


def train_once(model: nn.Module, length: int = 32) -> tuple[float, dict[str, torch.Tensor]]:
    ids = torch.arange(2 * length).reshape(2, length) * 5 % 300
    model.zero_grad()
    loss = model.train()(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    gradients = {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}
    return float(loss.detach()), gradients


@pytest.mark.parametrize("how", [Checkpointing(), Checkpointing(layers=None), Checkpointing(layers=2)])
def test_all_layers_of_a_kind_share_one_code(monkeypatch: pytest.MonkeyPatch, how: Checkpointing) -> None:
    model, counter, said = real(config_of("llama", num_hidden_layers=8)), Counter(), Said()
    expected, gradients = train_once(model)
    monkeypatch.setattr(compiling, "BACKEND", counter)
    compiler = compiling.Compiler(said)
    compiler.compile(model, how, CPU)
    for _ in range(2):
        loss, found = train_once(model)
    assert loss == pytest.approx(expected, rel=ROUNDING)
    for name, gradient in gradients.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-6)
    assert not said.told["warning"]
    assert counter.graphs == (2 if how.layers == 2 else 1)
    assert len(said.told["progress"]) == 2 * counter.graphs  # when it begins, and how long it took
    assert compiler.take_seconds() > 0
    assert compiler.take_seconds() == 0


def test_a_layer_that_cannot_be_compiled_runs_as_it_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise ValueError("no such kernel")

    model, counter, said = real(config_of("llama")), Counter(fail), Said()
    expected, _ = train_once(model)
    monkeypatch.setattr(compiling, "BACKEND", counter)
    compiling.Compiler(said).compile(model, Checkpointing(layers=None), CPU)
    assert train_once(model)[0] == expected
    assert counter.graphs == 1
    (text,) = said.told["warning"]
    assert text.startswith("LlamaDecoderLayer runs without torch.compile")
    assert text.endswith("ValueError: no such kernel")


def test_more_variants_than_torch_keeps_run_as_they_are_written(monkeypatch: pytest.MonkeyPatch) -> None:
    model, said = real(config_of("llama")), Said()
    expected, _ = train_once(model, length=16)
    monkeypatch.setattr(compiling, "MOST_VARIANTS", 1)
    with torch._dynamo.config.patch(recompile_limit=1):
        compiling.Compiler(said).compile(model, Checkpointing(), CPU)
        train_once(model)
        assert not said.told["warning"]
        assert train_once(model, length=16)[0] == expected
    (text,) = said.told["warning"]
    assert text.endswith("more kinds of input than torch keeps code for")


def test_a_backward_pass_that_cannot_be_compiled_is_found_in_the_forward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(graph: Any, inputs: Any) -> Any:
        raise ValueError("no such kernel")

    model, said = real(config_of("llama")), Said()
    expected, _ = train_once(model)
    backend = aot_autograd(fw_compiler=lambda graph, _: make_boxed_func(graph.forward), bw_compiler=fail)
    monkeypatch.setattr(compiling, "BACKEND", backend)
    compiling.Compiler(said).compile(model, Checkpointing(), CPU)
    assert train_once(model)[0] == expected
    assert len(said.told["warning"]) == 1


def test_out_of_memory_while_compiling_stays_out_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    model, said = real(config_of("llama")), Said()
    monkeypatch.setattr(compiling, "BACKEND", Counter(fail))
    compiling.Compiler(said).compile(model, Checkpointing(), CPU)
    with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate"):
        train_once(model)
    assert not said.told["warning"]


def test_a_machine_that_cannot_compile_is_told_beforehand(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, cpu = (SimpleNamespace(on_gpu=on_gpu, device=torch.device("cpu")) for on_gpu in (True, False))
    monkeypatch.setattr(compiling, "BACKEND", "inductor")
    monkeypatch.setattr(compiling, "is_installed", lambda package: False)
    levers = Levers(engine="zero1")
    assert "ZeRO-3" in str(compiling.find_obstacle(Levers(engine="zero3"), cpu))
    assert str(compiling.find_obstacle(levers, gpu)).startswith("Triton is missing")
    monkeypatch.setattr(compiling, "inherited", lambda changes: {})
    monkeypatch.setattr(shutil, "which", lambda program: None)
    assert str(compiling.find_obstacle(levers, cpu)).startswith("there is no C++ compiler")

    def refuse() -> None:
        raise RuntimeError("Python 3.20+ not yet supported for torch.compile")

    monkeypatch.setattr(torch._dynamo.eval_frame, "check_if_dynamo_supported", refuse)
    assert "3.20+ not yet supported" in str(compiling.find_obstacle(levers, cpu))


def test_code_lies_only_where_nobody_else_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place, told = SimpleNamespace(on_gpu=False, device=torch.device("cpu")), dict[str, str]()
    monkeypatch.setattr(compiling, "set_variable", told.setdefault)
    assert compiling.keep_code(tmp_path, place, 2) is None
    folder = Path(told[compiling.FOLDER])
    assert folder.parent == tmp_path / "compiled"
    assert folder.stat().st_mode & 0o777 == 0o700
    told.clear()
    folder.chmod(0o777)
    assert str(compiling.keep_code(tmp_path, place, 2)).endswith("others can write there")
    folder.chmod(0o700)
    monkeypatch.setattr(compiling, "room", lambda folder: 2**20)
    assert str(compiling.keep_code(tmp_path, place, 2)).endswith("the disk is nearly full")
    (tmp_path / "file").touch()
    assert str(compiling.keep_code(tmp_path / "file", place, 2)).endswith("not a directory")
    assert compiling.FOLDER not in told


ALONE = """
import json, sys
from types import SimpleNamespace
sys.path.insert(0, sys.argv[1])
import torch
from small_models import config_of, real
from tightfit.train.compile import Compiler
from tightfit.types import Checkpointing, Levers

said, ids = [], torch.arange(64).reshape(2, 32) * 5 % 300
events = SimpleNamespace(write=lambda _, text: said.append(str(text)), doing=print, report=lambda *_: None)
model = real(config_of("llama", num_hidden_layers=2)).train()
Compiler(events).compile(model, Checkpointing(layers=None), ids.device)
loss = model(input_ids=ids, labels=ids, use_cache=False).loss
loss.backward()
found = dict(torch._dynamo.utils.counters["aot_autograd"])
print(json.dumps([float(loss.detach()), found.get("autograd_cache_hit", 0), said]))
"""


@pytest.mark.slow
@pytest.mark.skipif(not any(map(shutil.which, compiling.CXX_COMPILERS[1:])), reason="no C++ compiler")
def test_the_next_start_finds_the_code_and_does_without_it_where_it_is_torn(tmp_path: Path) -> None:
    """With the code that a user's machine makes."""

    def start() -> tuple[float, int, list[str]]:
        command = [sys.executable, "-c", ALONE, str(Path(__file__).parent)]
        environment = {**os.environ, compiling.FOLDER: str(tmp_path), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        loss, hits, said = json.loads(done.stdout.splitlines()[-1])
        assert not said
        return loss, hits, said

    expected, _ = train_once(real(config_of("llama", num_hidden_layers=2)))
    first, second = start(), start()
    assert first[0] == pytest.approx(expected, rel=ROUNDING)
    assert (first[1], second[1]) == (0, 1)
    for path in filter(Path.is_file, tmp_path.rglob("*")):
        os.truncate(path, path.stat().st_size // 2)
    assert start()[0] == pytest.approx(expected, rel=ROUNDING)


def test_rows_have_few_lengths() -> None:
    widths = {compiling.fix_width(longest, 2000) for longest in range(1, 2001)}
    assert widths == {128, 256, 504, 1000, 2000}
    assert all(compiling.fix_width(longest, 2000) >= longest for longest in range(1, 2001))
    assert compiling.fix_width(5, 12) == 8
    assert compiling.fix_width(9, 12) == 12
