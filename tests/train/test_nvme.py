"""Weights and optimizer states in files: real DeepSpeed, a real disk, two ranks.

DeepSpeed swaps what has at least a mebibyte on a rank, so the model is larger here than elsewhere: its MLP is on the
disk and its attention is not. The optimizer works on several sub groups, one of them too small for a file. Nothing else
differs from what is rendered.
"""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from plain import write_examples
from running import GIB, LIMIT_S, Ran, edit, run_ranks
from safetensors.torch import load_file
from small_models import config_of
from test_resume import cut_off

import warm_desk
from compiling import compile_part
from tightfit.formats.render import render
from tightfit.formats.target import Target
from tightfit.job.file import job_from_flags
from tightfit.planner import plan
from tightfit.types import Gpu, Hardware

TOLERANCE = {"fp32": 1e-5, "bf16": 2e-3, "fp16": 2e-3}
STEPS = 4
LEARNT = 0.05
FLAGS: dict[str, Any] = {
    "engine": "zero3",
    "precision": "bf16",
    "seq": 64,
    "effective_batch": 8,
    "micro_batch": 2,
    "max_steps": STEPS,
    "learning_rate": 3e-3,
    "checkpointing": "layers:1",
}
BOTH = {"offload_optimizer": "nvme", "offload_param": "nvme"}
SUB_GROUP = 1_200_000

ASK = "from deepspeed.ops.op_builder import AsyncIOBuilder; raise SystemExit(not AsyncIOBuilder().is_compatible())"


pytestmark = pytest.mark.thorough
needs_libaio = pytest.mark.usefixtures("libaio")


@pytest.fixture(scope="module", autouse=True)
def compiled() -> bool:
    """Whether DeepSpeed's file operations are there: what can be compiled is, before the first test."""
    can_be = warm_desk.python(ASK, ranks=True).returncode == 0
    if can_be:
        compile_part("async_io")
    return can_be


@pytest.fixture(scope="module")
def libaio(compiled: bool) -> None:
    if not compiled:
        pytest.skip("DeepSpeed's async_io needs libaio-dev and a compiler")


def write(folder: Path, layers: int = 2, **flags: Any) -> Path:
    """The files of a job on two CPU ranks that have a disk."""
    folder.mkdir()
    wide = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": layers, "tie_word_embeddings": True}
    config_of("llama", **wide).save_pretrained(folder / "shape")
    hardware = Hardware(
        gpu=Gpu(name="CPU", vendor="cpu", memory_bytes=12 * GIB),
        gpus_per_node=2,
        host_ram_bytes=24 * GIB,
        nvme_bytes=100 * GIB,
    )
    told = {
        "output": str(folder / "run"),
        "model": str(folder / "shape"),
        "data": str(write_examples(folder / "examples.jsonl")),
        "nvme": "100GB",
        "nvme_path": str(folder / "disk"),
    }
    found = plan(job_from_flags({**told, **FLAGS, **flags}), None, hardware)
    for name, text in render(found, Target()).items():
        (folder / name).write_text(text)
    _cut_finer(folder)
    return edit(folder, training__weight_decay=0.1)


def _cut_finer(folder: Path) -> None:
    """Several sub groups although the model is small."""
    path = folder / "deepspeed.json"
    config = json.loads(path.read_text())
    config["zero_optimization"]["sub_group_size"] = SUB_GROUP
    path.write_text(json.dumps(config))


def run_well(folder: Path, *options: str) -> Ran:
    ran = run_ranks(folder, *options)
    assert ran.codes == [0, 0], "\n".join(ran.stderr)
    assert len(ran.losses) == STEPS
    return ran


def saved(ran: Ran, method: str = "full") -> dict[str, torch.Tensor]:
    return load_file(ran.folder / "model" / f"{'model' if method == 'full' else 'adapter_model'}.safetensors")


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


class Watch:
    """The swap files that were there while something ran."""

    def __init__(self, disk: Path) -> None:
        self._disk, self._over = disk, threading.Event()
        self.seen: set[str] = set()
        self._thread = threading.Thread(target=self._look)

    def _look(self) -> None:
        while not self._over.wait(0.1):
            self.seen |= {str(path.relative_to(self._disk)) for path in self._disk.rglob("*.swp")}

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()


def run_watched(folder: Path) -> tuple[Ran, set[str]]:
    with Watch(folder / "disk") as watch:
        ran = run_well(folder)
    return ran, watch.seen


@pytest.fixture(scope="module")
def swapped(tmp_path_factory: pytest.TempPathFactory) -> tuple[Ran, set[str]]:
    """The training with weights and states on the disk, and the files that it used."""
    return run_watched(write(tmp_path_factory.mktemp("nvme") / "files", **BOTH))


@needs_libaio
@pytest.mark.slow  # the first time DeepSpeed compiles its file operations, for minutes
def test_a_training_from_files_is_the_same_training(tmp_path: Path, swapped: tuple[Ran, set[str]]) -> None:
    ran, files = swapped
    plain = run_well(write(tmp_path / "plain"))
    assert ran.losses == pytest.approx(plain.losses, rel=TOLERANCE["bf16"])
    assert ran.losses[-1] < ran.losses[0] - LEARNT
    host = run_well(write(tmp_path / "host", offload_optimizer="cpu", offload_param="cpu"))
    assert ran.losses == host.losses
    assert same(saved(ran), saved(host))
    for kind in ("bfloat16params/rank0/", "bfloat16params/rank1/", "optimizer/rank0/exp_avg_sq-"):
        assert any(name.startswith(f"zero_stage_3/{kind}") for name in files), kind


@needs_libaio
@pytest.mark.slow
def test_nothing_is_left_on_the_disk(swapped: tuple[Ran, set[str]]) -> None:
    ran, files = swapped
    assert files
    assert not list((ran.folder.parent / "disk").rglob("*.swp"))


@needs_libaio
@pytest.mark.slow
def test_the_trial_of_the_largest_batch_leaves_nothing_behind(tmp_path: Path, swapped: tuple[Ran, set[str]]) -> None:
    ran, _ = swapped
    untried = run_well(write(tmp_path / "untried", **BOTH), "--no-probe")
    assert ran.of("probe")
    assert not untried.of("probe")
    assert untried.losses == ran.losses
    assert same(saved(untried), saved(ran))


@needs_libaio
@pytest.mark.parametrize(
    ("precision", "places"),
    [
        pytest.param("fp32", BOTH, marks=pytest.mark.slow),
        pytest.param("fp16", BOTH, marks=pytest.mark.slow),
        pytest.param("bf16", {"offload_optimizer": "nvme", "offload_param": "none"}, marks=pytest.mark.slow),
        pytest.param("bf16", {"offload_optimizer": "none", "offload_param": "nvme"}, marks=pytest.mark.slow),
    ],
)
def test_each_part_may_be_on_the_disk(tmp_path: Path, precision: str, places: dict[str, str]) -> None:
    ran, files = run_watched(write(tmp_path / "files", precision=precision, **places))
    host = {name: "cpu" if place == "nvme" else place for name, place in places.items()}
    other = run_well(write(tmp_path / "host", precision=precision, **host))
    assert ran.losses == pytest.approx(other.losses, rel=TOLERANCE[precision])
    assert same(saved(ran), saved(other))
    assert any("params/rank" in name for name in files) == (places["offload_param"] == "nvme")
    assert any("optimizer/rank" in name for name in files) == (places["offload_optimizer"] == "nvme")


@needs_libaio
@pytest.mark.slow
def test_adapters_train_over_weights_on_the_disk(tmp_path: Path) -> None:
    flags = {"method": "lora", "lora_rank": 4, "learning_rate": 3e-2}
    ran, files = run_watched(write(tmp_path / "files", **BOTH, **flags))
    host = run_well(write(tmp_path / "host", offload_optimizer="cpu", offload_param="cpu", **flags))
    assert ran.losses == host.losses
    assert same(saved(ran, "lora"), saved(host, "lora"))
    assert any("params/rank" in name for name in files)


# --- checkpoints ---------------------------------------------------------------------------------

MIDDLE = 2


def write_saving(folder: Path, **flags: Any) -> Path:
    return edit(write(folder, **flags), saving__every_steps=MIDDLE, saving__keep_last=9)


def checkpoint(ran: Ran) -> dict[str, dict[str, torch.Tensor]]:
    """Every tensor of the checkpoint in the middle, by file."""
    folder = ran.folder / "checkpoints" / f"step-{MIDDLE:08d}"
    found = {str(path.relative_to(folder)): load_file(path) for path in folder.rglob("*.safetensors")}
    assert any("exp_avg_sq" in name for name in found["optimizer/states.safetensors"])
    return found


@needs_libaio
@pytest.mark.slow
@pytest.mark.parametrize("method", ["full", "lora"])
def test_what_was_cut_off_goes_on_bit_for_bit_and_saves_what_the_host_would(tmp_path: Path, method: str) -> None:
    flags = {"method": method, "learning_rate": 3e-2 if method == "lora" else 3e-3}
    plan = write_saving(tmp_path / "files", **BOTH, **flags)
    whole = run_well(plan)
    host = run_well(write_saving(tmp_path / "host", offload_optimizer="cpu", offload_param="cpu", **flags))
    ours, theirs = checkpoint(whole), checkpoint(host)
    assert ours.keys() == theirs.keys()
    assert all(same(ours[name], theirs[name]) for name in ours)
    end = saved(whole, method)
    cut_off(whole.folder, MIDDLE)
    rest = run_ranks(plan)
    assert rest.codes == [0, 0], "\n".join(rest.stderr)
    assert rest.of("resumed")[0]["step"] == MIDDLE
    assert rest.losses == whole.losses[MIDDLE:]
    assert same(saved(rest, method), end)


STATES = """
import sys
import deepspeed, torch
from deepspeed.ops.adam import DeepSpeedCPUAdam
from torch import nn
from tightfit.train.nvme import nvme_states
from tightfit.train.shards import outline, shards

disk, pipelined = sys.argv[1], sys.argv[2] == "True"
place = {"device": "nvme", "nvme_path": disk, "pin_memory": False}
config = {
    "train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "zero_force_ds_cpu_optimizer": True,
    "aio": {"block_size": 1048576, "queue_depth": 8, "intra_op_parallelism": 1},
    "zero_optimization": {
        "stage": 3, "sub_group_size": 1_000_000, "stage3_max_reuse_distance": 0,
        "offload_param": {**place, "buffer_count": 3, "buffer_size": 2_000_000, "max_in_cpu": 0},
        "offload_optimizer": {**place, "buffer_count": 12, "pipeline_read": pipelined, "pipeline_write": pipelined},
    },
}
torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
deepspeed.init_distributed(dist_init_required=False)
with deepspeed.zero.Init(config_dict_or_path=config, dtype=torch.bfloat16):
    model = nn.Sequential(*(nn.Linear(1024, 1024, bias=last) for last in (False, False, True)))
for number, shard in enumerate(shards(model, 0, write=True)):
    shard.tensor.fill_(number + 1)
held = list(outline(model, 0))
assert [shard.size for shard in held] == [1024**2] * 3 + [1024]
for shard in held[:3]:
    try:
        shard.tensor
    except AssertionError:
        continue
    raise SystemExit("a stand-in was given out")
engine, *_ = deepspeed.initialize(model=model, config=config, optimizer=DeepSpeedCPUAdam(model.parameters(), lr=1e-3))
wrapper = engine.optimizer

def seen(name):
    return [states[name].mean().item() for _, states in nvme_states(wrapper, False)]

assert [sorted(states) for _, states in nvme_states(wrapper, False)] == [["master"]] * 4
assert seen("master") == [1, 2, 3, 4]  # the last one, a bias, is in memory
for number, states in nvme_states(wrapper, True):
    assert sorted(states) == ["exp_avg", "exp_avg_sq", "master"]
    assert not states["exp_avg"].any() and not states["exp_avg_sq"].any()
    states["master"].fill_(10 + number)
    states["exp_avg"].fill_(number + 0.5)
    states["exp_avg_sq"].fill_(number + 0.25)
for number, states in nvme_states(wrapper, True):
    states["master"].fill_(99)
    break  # what was not finished is not written
for number, states in nvme_states(wrapper, False):
    if number < 3:
        states["exp_avg"].fill_(99)
assert seen("master") == [10, 11, 12, 13], seen("master")
assert seen("exp_avg") == [0.5, 1.5, 2.5, 3.5]
assert seen("exp_avg_sq") == [0.25, 1.25, 2.25, 3.25]
loss = engine(torch.ones(1, 1024, dtype=torch.bfloat16)).float().mean() * 0
engine.backward(loss)
engine.step()
assert torch.allclose(torch.tensor(seen("exp_avg")), 0.9 * torch.tensor([0.5, 1.5, 2.5, 3.5]))
assert [round(shard.tensor.float().mean().item()) for shard in shards(model, 0)] == [10, 11, 12, 13]
print("as it should be")
"""


@needs_libaio
@pytest.mark.slow
@pytest.mark.parametrize("pipelined", [False, True])
def test_states_are_read_and_written_where_they_lie(tmp_path: Path, pipelined: bool) -> None:
    told = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    ran = subprocess.run(
        [sys.executable, "-c", STATES, str(tmp_path), str(pipelined)],
        env={**os.environ, **told, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert ran.stdout.endswith("as it should be\n"), ran.stderr


# --- what is missing is said in one sentence -----------------------------------------------------


def refused(folder: Path) -> str:
    ran = run_ranks(folder)
    assert ran.codes == [2, 2], "\n".join(ran.stderr)
    said = [line for line in ran.stderr[0].splitlines() if line.startswith("tightfit: ")]
    assert len(said) == 1
    assert "Traceback" not in "".join(ran.stderr)
    assert not (ran.folder / "model").exists()
    assert not list((folder / "disk").rglob("*.swp"))
    return said[0]


def test_a_machine_without_libaio_is_told_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write(tmp_path / "files", **BOTH)
    monkeypatch.setenv("LDFLAGS", "-lnot_there")  # nothing can be linked, libaio neither
    assert refused(folder) == "tightfit: NVMe offload needs libaio: apt install libaio-dev"


def test_a_folder_that_another_run_uses_is_refused(tmp_path: Path) -> None:
    folder = write(tmp_path / "files", **BOTH)
    (folder / "disk").mkdir()
    taken = [open(folder / "disk" / f".rank{rank}.lock", "w") for rank in (0, 1)]  # noqa: SIM115 - held to the end
    for each in taken:
        fcntl.flock(each, fcntl.LOCK_EX)
    assert "another run swaps to" in refused(folder)
    for each in taken:
        each.close()


@pytest.mark.parametrize("linked", [False, True])
def test_somebodys_file_among_the_swap_files_is_not_removed(tmp_path: Path, linked: bool) -> None:
    """DeepSpeed empties those folders when it starts."""
    folder = write(tmp_path / "files", **BOTH)
    place = tmp_path / "elsewhere" if linked else folder / "disk" / "zero_stage_3"
    mine = place / "float32params" / "rank0" / "thesis.tex"
    mine.parent.mkdir(parents=True)
    mine.write_text("mine")
    if linked:
        (folder / "disk").mkdir()
        (folder / "disk" / "zero_stage_3").symlink_to(place)
    assert ("zero_stage_3 is a link" if linked else f"{mine} is no swap file") in refused(folder)
    assert mine.read_text() == "mine"


def test_a_disk_that_is_too_small_is_said(tmp_path: Path) -> None:
    folder = edit(write(tmp_path / "files", **BOTH), predicted__host__nvme_bytes_per_node=2**50)
    said = refused(folder)
    assert "the swap files need 1,048,576.0 GiB and nvme_path" in said
    assert "GiB free: make room" in said


LOCK = """
import ctypes, resource, sys
libc, asked, held = ctypes.CDLL(None), (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
assert libc.capget(asked, held) == 0
held[0] &= ~(1 << 14)  # CAP_IPC_LOCK: root may lock all it likes
assert libc.capset(asked, held) == 0
from tightfit.train.nvme import NvmeError, check
resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 65536))
place = {"device": "nvme", "nvme_path": sys.argv[1], "buffer_count": 4, "buffer_size": 100}
try:
    zero = {"sub_group_size": 10**9, "offload_optimizer": place}
    check({"zero_optimization": zero}, 0, trained=2**20, world=2, file_bytes=0)
except NvmeError as error:
    print(error)
"""


def test_a_limit_of_locked_memory_is_said(tmp_path: Path) -> None:
    done = warm_desk.python(LOCK, str(tmp_path), ranks=True)
    assert done.returncode == 0, done.stderr
    assert "NVMe offload locks 16 MiB of memory and 0.1 may be locked here: run `ulimit -l unlimited`" in done.stdout


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    folder = write(tmp_path / "files", **BOTH)
    (folder / "disk").write_text("a file stands where the folder should be")
    assert "cannot write to nvme_path" in refused(folder)
