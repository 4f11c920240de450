"""Compiled layers: one code for all layers of a kind, the same losses, and the plain way wherever compiling fails."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from running import run_ranks, write_plan
from small_models import config_of, real
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func

import patience
from tightfit.inputs import surroundings
from tightfit.train import compile as compiling
from tightfit.train.events import Events, RankHeartbeat
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
        self.heartbeat = RankHeartbeat()

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
    assert compiler.compile(model, how, CPU) == {0: 0, None: 8, 2: 2}[how.layers]
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
    assert compiler.is_at_work
    assert not compiler.untold


def test_a_layer_that_cannot_be_compiled_runs_as_it_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise ValueError("no such kernel")

    model, counter, said = real(config_of("llama")), Counter(fail), Said()
    expected, _ = train_once(model)
    monkeypatch.setattr(compiling, "BACKEND", counter)
    compiler = compiling.Compiler(said)
    compiler.compile(model, Checkpointing(layers=None), CPU)
    assert compiler.is_at_work
    assert train_once(model)[0] == expected
    assert counter.graphs == 1
    (text,) = said.told["warning"]
    assert text.startswith("LlamaDecoderLayer runs without torch.compile")
    assert text.endswith("ValueError: no such kernel")
    assert said.told["progress"] == ["compiling layers"]  # and not that they were
    assert not compiler.is_at_work
    assert compiler.take_seconds() > 0
    assert (compiler.untold, list(map(str, compiler.take_said())), compiler.untold) == (1, [text], 0)


def test_a_later_variant_whose_code_fails_when_it_first_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another length of rows, or an evaluation: the first variant has run, and its code is not at fault."""

    class SecondFails(Counter):
        def __call__(self, graph: Any, inputs: Any) -> Any:
            made = super().__call__(graph, inputs)
            return made if self.graphs == 1 else self.launch

        def launch(self, *_: Any) -> Any:
            raise RuntimeError("invalid device function")

    model, said = real(config_of("llama")), Said()
    expected, _ = train_once(model, length=16)
    monkeypatch.setattr(compiling, "BACKEND", SecondFails())
    compiling.Compiler(said).compile(model, Checkpointing(), CPU)
    train_once(model)
    assert not said.told["warning"]
    assert train_once(model, length=16)[0] == expected
    (text,) = said.told["warning"]
    assert text.endswith("RuntimeError: invalid device function")
    assert [each for each in said.told["progress"] if each.endswith("variants: 2")] == []


def test_an_error_of_code_that_has_run_is_not_the_compilers(monkeypatch: pytest.MonkeyPatch) -> None:
    class ThirdRunFails(Counter):
        runs = 0

        def __call__(self, graph: Any, inputs: Any) -> Any:
            made = super().__call__(graph, inputs)

            def launch(*given: Any) -> Any:
                self.runs += 1
                if self.runs == 3:
                    raise RuntimeError("the device is gone")
                return made(*given)

            return launch

    model, said = real(config_of("llama")), Said()
    monkeypatch.setattr(compiling, "BACKEND", ThirdRunFails())
    compiling.Compiler(said).compile(model, Checkpointing(), CPU)
    train_once(model)
    with pytest.raises(RuntimeError, match="the device is gone"):
        train_once(model)
    assert not said.told["warning"]


def test_a_long_compilation_gives_signs_of_life(monkeypatch: pytest.MonkeyPatch) -> None:
    beats: list[None] = []
    model, said = real(config_of("llama")), Said()
    said.heartbeat.beat = lambda last_word="": beats.append(None)  # type: ignore[method-assign]

    def wait() -> None:
        end, seen = patience.now() + 20, len(beats)
        while len(beats) < seen + 3 and patience.now() < end:
            time.sleep(0.01)
        assert len(beats) >= seen + 3

    monkeypatch.setattr(compiling, "BEAT_S", 0.01)
    monkeypatch.setattr(compiling, "BACKEND", Counter(wait))
    compiling.Compiler(said).compile(model, Checkpointing(), CPU)
    train_once(model)
    assert not said.told["warning"]
    threads = [each for each in threading.enumerate() if "_beat" in each.name]
    for each in threads:
        each.join(20)
    assert not any(each.is_alive() for each in threads), "it ends with the compilation"


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


def test_a_torch_that_compiles_the_backward_pass_too_late_compiles_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "EAGER_BACKWARD", "no_such_switch")
    cpu = SimpleNamespace(on_gpu=False, device=CPU)
    assert str(compiling.find_obstacle(Levers(engine="zero1"), cpu)).startswith("this torch compiles the backward pass")


def test_torchs_limit_is_raised_by_whichever_name_it_has() -> None:
    for name in ("recompile_limit", "cache_size_limit"):
        for limit, raised in ((8, compiling.MOST_VARIANTS), (1000, 1000)):
            config = SimpleNamespace(**{name: limit})
            compiling.allow_variants(config)
            assert vars(config) == {name: raised}


@pytest.fixture
def nobody_set(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Torch has been loaded here, and has set its folder."""
    from torch._inductor import codecache

    monkeypatch.setattr(surroundings, "_noted", frozenset())
    for variable in (surroundings.CODE_FOLDER, compiling.PROCESSES):
        monkeypatch.setenv(variable, "of somebody")
    for name in ("_HEADER_DIR", "_HEADER_LOCK_DIR"):
        monkeypatch.setattr(codecache, name, getattr(codecache, name))
    with torch._inductor.config.patch(compile_threads=7):
        yield


@pytest.mark.usefixtures("nobody_set")
def test_code_lies_only_where_nobody_else_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place, duties = SimpleNamespace(on_gpu=False, device=CPU), list[Callable[[], object]]()
    monkeypatch.setattr(compiling, "do_before_leaving", duties.append)
    assert compiling.keep_code(tmp_path, place, 1) is None
    folder = Path(os.environ[surroundings.CODE_FOLDER])
    assert folder.parent == tmp_path / "compiled"
    assert folder.stat().st_mode & 0o777 == 0o700
    assert not duties
    assert int(os.environ[compiling.PROCESSES]) == torch._inductor.config.compile_threads <= compiling.MOST_PROCESSES

    def refuse(cache: Path, why: str) -> None:
        assert str(compiling.keep_code(cache, place, 1)).endswith(why)
        private = Path(os.environ[surroundings.CODE_FOLDER])
        assert private.stat().st_mode & 0o777 == 0o700
        assert private.name.startswith("tightfit-")
        assert not list(private.iterdir())
        duties.pop()()
        assert not private.exists()

    folder.chmod(0o777)
    refuse(tmp_path, "others can write there")
    folder.chmod(0o700)
    monkeypatch.setattr(compiling, "room", lambda folder: 2**20)
    refuse(tmp_path, "the disk is nearly full")
    (tmp_path / "file").touch()
    refuse(tmp_path / "file", "not a directory")
    assert not duties


@pytest.mark.usefixtures("nobody_set")
def test_what_the_user_says_of_folder_and_processes_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = SimpleNamespace(on_gpu=False, device=CPU)
    monkeypatch.setattr(surroundings, "_noted", frozenset({surroundings.CODE_FOLDER, compiling.PROCESSES}))
    assert compiling.keep_code(tmp_path, place, 1) is None
    assert os.environ[surroundings.CODE_FOLDER] == os.environ[compiling.PROCESSES] == "of somebody"
    assert torch._inductor.config.compile_threads == 7
    assert not list(tmp_path.iterdir())


STARTS = """
import json, os, sys
from pathlib import Path
from types import SimpleNamespace
from tightfit.train.__main__ import set_environment
set_environment()
import peft
import torch
from tightfit.train.compile import PROCESSES, find_obstacle, keep_code
from tightfit.train.stop import leave
from tightfit.types import Levers

place, compiles = SimpleNamespace(on_gpu=False, device=torch.device("cpu")), sys.argv[2] == "compiles"
assert find_obstacle(Levers(engine="zero1"), place) is None
said = keep_code(Path(sys.argv[1]), place, 1)
if compiles:
    torch.compile(lambda x: (x.sin() * 2).sum())(torch.ones(64, requires_grad=True)).backward()
from torch._inductor.codecache import _HEADER_DIR
from torch._inductor.runtime.runtime_utils import cache_dir
folder = Path(cache_dir())
files = [str(path) for path in folder.rglob("*") if path.is_file()]
found = {"folder": str(folder), "headers": _HEADER_DIR, "files": files, "said": str(said)}
found |= {"processes": torch._inductor.config.compile_threads, "told": os.environ[PROCESSES]}
print(json.dumps(found | {"mode": folder.stat().st_mode & 0o777}), flush=True)
leave(0)
"""


def start(cache: Path, temporary: Path, how: str, **variables: str) -> dict[str, Any]:
    """As a worker starts, with a library that loads torch's compiler before we come to it."""
    temporary.mkdir(exist_ok=True)
    environment = {**os.environ, "TMPDIR": str(temporary), "OMP_NUM_THREADS": "1", **variables}
    for name in {surroundings.CODE_FOLDER, compiling.PROCESSES} - variables.keys():
        environment.pop(name, None)
    command = [sys.executable, "-c", STARTS, str(cache), how]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert not [path for path in temporary.rglob("*") if path.is_file()], "files where others may write"
    return found


def test_the_compiler_is_told_though_a_library_has_loaded_it(tmp_path: Path) -> None:
    """Even where whoever started the worker has loaded it too, and hands on the folder that torch chose."""
    temporary = tmp_path / "temporary"
    handed_on = {surroundings.CODE_FOLDER: str(temporary / "torchinductor_somebody")}
    found = start(tmp_path / "cache", temporary, "only looks", **handed_on)
    assert Path(found["folder"]).parent == tmp_path / "cache" / "compiled"
    assert found["headers"].startswith(found["folder"])
    assert found["said"] == "None"
    assert found["processes"] == int(found["told"]) <= compiling.MOST_PROCESSES


@pytest.mark.slow
@pytest.mark.skipif(not any(map(shutil.which, compiling.CXX_COMPILERS[1:])), reason="no C++ compiler")
@pytest.mark.parametrize("kept", [True, False])
def test_all_code_lies_in_a_folder_of_ours(tmp_path: Path, kept: bool) -> None:
    cache, temporary = tmp_path / "cache", tmp_path / "temporary"
    if not kept:
        cache.touch()
    found = start(cache, temporary, "compiles")
    kinds = {Path(path).suffix for path in found["files"]}
    assert {".so", ".cpp", ".py", ".gch"} <= kinds
    assert found["mode"] == 0o700
    assert Path(found["folder"]).is_relative_to(cache if kept else temporary)
    assert Path(found["folder"]).exists() is kept
    assert found["said"].endswith("not a directory") is not kept


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
events.heartbeat = SimpleNamespace(beat=lambda: None)
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
        environment = {**os.environ, surroundings.CODE_FOLDER: str(tmp_path), "OMP_NUM_THREADS": "1"}
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


SECOND_RANK = """
import os
import tightfit.train.compile as each
from tightfit.messages import Message
from tightfit.train import assemble
each.BACKEND = "aot_eager_decomp_partition"
if os.environ["RANK"] == "1":
    {}
"""


def lack_folders(*_: Any) -> None:
    raise FileNotFoundError(2, "No usable temporary directory found")


def fail_to_compile(graph: Any, inputs: Any) -> Any:
    raise ValueError("no such kernel")


@pytest.mark.parametrize(
    ("fault", "sentence"),
    [
        ("assemble.find_obstacle = lambda *_: Message('train.no-triton')", "layers run without torch.compile"),
        pytest.param(
            "from test_compile import lack_folders as lack; assemble.keep_code = lack",
            "layers run without torch.compile",
            marks=pytest.mark.slow,
        ),
        ("from test_compile import fail_to_compile as fail; each.BACKEND = fail", "LlamaDecoderLayer runs without"),
    ],
    ids=["beforehand", "no folder for code", "while it compiles"],
)
def test_another_rank_that_cannot_compile_is_named(tmp_path: Path, fault: str, sentence: str) -> None:
    flags = {"model": "tiny_llama", "precision": "fp32", "seq": 64, "effective_batch": 4, "max_steps": 2}
    folder = write_plan(tmp_path, 2, **flags, engine="zero1", compile="layers", checkpointing="none")
    path = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
    ran = run_ranks(folder, "--no-probe", first=path + SECOND_RANK.format(fault))
    assert ran.codes == [0, 0], "\n".join(ran.stderr)
    (text,) = [each["text"] for each in ran.of("warning") if "torch.compile" in each["text"]]
    assert text.startswith(f"rank 1: {sentence}")
    (end,) = ran.of("end")
    assert any("compiled" in each for each in ran.of("step"))
    assert end["summary"]["steps"] == 2, "those too in which layers were compiled"
