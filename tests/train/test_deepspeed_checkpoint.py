"""A training that began under DeepSpeed alone goes on here: from its checkpoint, under another engine, stage and number
of ranks, with the losses that DeepSpeed's own continuation has."""

from __future__ import annotations

import json
import math
import shutil
from collections import OrderedDict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from plain import write_examples
from running import Ran, run_ranks, write_plan
from torch import Tensor

from tightfit.train.deepspeed_checkpoint import MASTER, MOMENTS, WEIGHT, open_deepspeed
from tightfit.types import ConfigError, UserError

STEPS, SAVED = 4, 2
JOB: dict[str, Any] = {
    "model": "tiny_llama",
    "precision": "fp32",
    "seq": 64,
    "effective_batch": 4,
    "max_steps": STEPS,
    "learning_rate": 3e-3,
}
TOLERANCE = {"fp32": 1e-5, "bf16": 2e-3}
"""As between our engines: see `test_same_losses`."""


# --- for real ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Begun:
    """What the other program left."""

    checkpoint: Path
    losses: list[float]
    data: Path


_begun: dict[tuple[int, str, str], Begun] = {}
LORA = {"method": "lora", "lora_rank": 4, "learning_rate": 3e-2}


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Any:
    def begin(stage: int, precision: str, method: str = "full") -> Begun:
        if (stage, precision, method) not in _begun:
            folder = tmp_path_factory.mktemp(f"zero{stage}")
            data = write_examples(folder / "examples.jsonl")
            flags = {**JOB, "precision": precision, "data": str(data), **(LORA if method == "lora" else {})}
            plan = write_plan(folder / "plan", 2, **flags, engine="zero2", micro_batch=2)
            saved = folder / "saved"
            program = Path(__file__).with_name("other_program.py")
            words = [str(each) for each in (program, plan, stage, SAVED, saved)]
            instead = f"import os, runpy, sys\nsys.argv = {words!r}\nrunpy.run_path(sys.argv[0], run_name='__main__')"
            ran = run_ranks(plan, cache=folder / "cache", first=f"{instead}\nsys.stdout.flush()\nos._exit(0)")
            assert ran.codes == [0, 0], ran.stderr
            _begun[stage, precision, method] = Begun(saved, json.loads((saved / "losses.json").read_text()), data)
        return _begun[stage, precision, method]

    return begin


def gone_on(folder: Path, begun: Begun, world: int, *options: str, **flags: Any) -> Ran:
    micro = JOB["effective_batch"] // world
    plan = write_plan(folder, world, **{**JOB, "data": str(begun.data), "micro_batch": micro, **flags})
    ran = run_ranks(plan, "--resume", str(begun.checkpoint), *options)
    assert ran.codes == [0] * world, "\n".join(ran.stderr)
    return ran


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("stage", "precision", "engine", "world"),
    [
        pytest.param(2, "fp32", "fsdp2", 2, marks=pytest.mark.slow),
        pytest.param(3, "fp32", "zero2", 2, marks=pytest.mark.slow),
        pytest.param(2, "bf16", "zero3", 2, marks=pytest.mark.slow),
        (2, "bf16", "zero0", 1),
    ],
)
def test_the_losses_are_those_of_deepspeeds_own_continuation(
    begun: Any, tmp_path: Path, stage: int, precision: str, engine: str, world: int
) -> None:
    before: Begun = begun(stage, precision)
    ran = gone_on(tmp_path, before, world, engine=engine, precision=precision)
    (resumed,) = ran.of("resumed")
    assert (resumed["step"], resumed["from_engine"], resumed["from_world"]) == (SAVED, f"zero{stage}", 2)
    assert [each["step"] for each in ran.of("step")] == [3, 4]
    assert ran.losses == pytest.approx(before.losses[SAVED:], rel=TOLERANCE[precision])
    if world == 1:
        without_the_optimizers_files_it_begins_with_the_weights_alone(tmp_path, before, precision)


def without_the_optimizers_files_it_begins_with_the_weights_alone(folder: Path, before: Begun, precision: str) -> None:
    stripped = folder / "stripped"
    shutil.copytree(before.checkpoint, stripped)
    for path in stripped.glob("*/*_optim_states.pt"):
        path.unlink()
    flags = {"engine": "zero2", "precision": precision, "max_steps": 1}
    ran = gone_on(folder / "plan", Begun(stripped, [], before.data), 1, "--no-probe", **flags)
    assert not ran.of("resumed")
    (said,) = [each["text"] for each in ran.of("warning") if "taken over" in each["text"]]
    at = stripped / f"global_step{SAVED}"
    assert said.startswith(f"Only the weights of {at} were taken over, and training begins at")
    assert [each["step"] for each in ran.of("step")] == [1]
    assert ran.losses[0] < before.losses[0] - 0.05, "the weights are those of the checkpoint, and not drawn anew"


@pytest.mark.thorough
def test_adapters_go_on_too(begun: Any, tmp_path: Path) -> None:
    before: Begun = begun(3, "fp32", "lora")
    ran = gone_on(tmp_path, before, 2, engine="zero2", **LORA)
    assert [each["step"] for each in ran.of("resumed")] == [SAVED]
    assert ran.losses == pytest.approx(before.losses[SAVED:], rel=TOLERANCE["fp32"])


# --- what lies where -----------------------------------------------------------------------------


SHAPES = [{"a": (5, 3), "b": (7,), "tiny": (1,)}, {"c": (2, 2, 3), "d": (11,)}]


@dataclass
class Written:
    """A checkpoint in DeepSpeed's layout, with sizes that no number of ranks divides."""

    folder: Path
    stage: int
    world: int
    values: dict[str, dict[str, Tensor]] = field(default_factory=dict)

    def write(self, **client_state: Any) -> Path:
        torch.manual_seed(self.stage)
        for kind in (MASTER, *MOMENTS):
            self.values[kind] = {name: torch.randn(shape) for group in SHAPES for name, shape in group.items()}
        vectors = {kind: [self._dealt(held, group) for group in SHAPES] for kind, held in self.values.items()}
        self.folder.mkdir(parents=True)
        shapes = [OrderedDict((name, torch.Size(shape)) for name, shape in group.items()) for group in SHAPES]
        head = {
            "param_shapes": shapes,
            "buffer_names": ["steps"],
            "shared_params": {},
            "global_steps": 40,
            "global_samples": 320,
            "skipped_steps": 1,
            **client_state,
        }
        for rank in range(self.world if self.stage == 3 else 1):
            module = {"steps": torch.tensor([7]), "frozen": torch.arange(5.0)}
            if self.stage == 3:
                share = -(-5 // self.world)
                padded = torch.cat([torch.arange(5.0), torch.zeros(share * self.world - 5)])
                module["frozen"] = torch.empty(0)
                head["frozen_param_shapes"] = {"frozen": torch.Size([5])}
                head["frozen_param_fragments"] = {"frozen": padded[rank * share : (rank + 1) * share]}
            name = f"zero_pp_rank_{rank}_mp_rank_00" if self.stage == 3 else "mp_rank_00"
            torch.save({"module": module, **head}, self.folder / f"{name}_model_states.pt")
        for rank in range(self.world):
            torch.save({"optimizer_state_dict": self._rank(vectors, rank)}, self._path(rank))
        return self.folder

    def _path(self, rank: int) -> Path:
        return self.folder / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"

    def _dealt(self, held: dict[str, Tensor], group: dict[str, Any]) -> list[Tensor]:
        """The vectors of all ranks of one group."""
        if self.stage == 3:
            cut: list[list[Tensor]] = [[] for _ in range(self.world)]
            for name in group:
                flat = held[name].reshape(-1)
                share = -(-flat.numel() // self.world)
                padded = torch.cat([flat, torch.zeros(share * self.world - flat.numel())])
                for rank, part in enumerate(padded.split(share)):
                    cut[rank].append(part)
            return [torch.cat(parts) for parts in cut]
        whole = torch.cat([held[name].reshape(-1) for name in group])
        aligned = 2 * self.world * math.ceil(whole.numel() / (2 * self.world))
        whole = torch.cat([whole, torch.zeros(aligned - whole.numel())])
        return list(whole.split(aligned // self.world))

    def _rank(self, vectors: dict[str, list[list[Tensor]]], rank: int) -> dict[str, Any]:
        groups = range(len(SHAPES))
        masters = [vectors[MASTER][index][rank] for index in groups]
        states = {
            "state": {
                index: {kind: vectors[kind][index][rank] for kind in vectors if kind != MASTER} for index in groups
            },
            "param_groups": [{"params": [index], "step": 39} for index in groups],
        }
        if self.stage == 3:
            return {
                "zero_stage": 3,
                "partition_count": self.world,
                "optimizer_state_dict": states,
                "fp32_flat_groups": masters,
            }
        if rank == self.world - 1:  # DeepSpeed leaves the padding out of the weights, and not of the moments
            left = [sum(math.prod(shape) for shape in group.values()) for group in SHAPES]
            left = [size - (self.world - 1) * master.numel() for size, master in zip(left, masters, strict=True)]
            masters = [master[:size] for master, size in zip(masters, left, strict=True)]
        return {
            "zero_stage": self.stage,
            "partition_count": [self.world] * len(SHAPES),
            "base_optimizer_state": states,
            "single_partition_of_fp32_groups": masters,
        }


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_every_number_is_found_whatever_the_number_of_ranks(tmp_path: Path, stage: int, world: int) -> None:
    written = Written(tmp_path / "global_step40", stage, world)
    opened = open_deepspeed(written.write(), trust_pickle=False)
    assert (opened.stage, opened.world, opened.step, opened.optimizer_steps) == (stage, world, 40, 39)
    assert (opened.effective_batch, opened.trained_elements) == (8, 46)
    for kind, held in written.values.items():
        for name, tensor in held.items():
            parts, flat = opened.tensors[kind][name], tensor.reshape(-1)
            assert parts.shape == tuple(tensor.shape)
            for start in range(flat.numel()):
                assert torch.equal(
                    parts.read(start, flat.numel() - start // 2), flat[start : flat.numel() - start // 2]
                )
    assert torch.equal(opened.tensors[WEIGHT]["frozen"].read(1, 5), torch.arange(1.0, 5.0))
    assert opened.tensors[WEIGHT]["steps"].read(0, 1).item() == 7
    assert opened.missing_for("adamw", 46) is None


@pytest.mark.parametrize(
    ("optimizer", "trained", "why"),
    [("adamw", 45, "it trained 46 numbers, and this job trains 45"), ("adafactor", 46, "not those of adafactor")],
)
def test_why_only_the_weights_are_taken_over(tmp_path: Path, optimizer: Any, trained: int, why: str) -> None:
    opened = open_deepspeed(Written(tmp_path / "a", 2, 2).write(), trust_pickle=False)
    assert why in str(opened.missing_for(optimizer, trained))


# --- what cannot be trusted, or is not whole -----------------------------------------------------


class Bomb:
    """A pickle that runs a program when it is opened."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def test_nothing_that_a_file_asks_for_is_run_unless_it_is_trusted(tmp_path: Path) -> None:
    proof = tmp_path / "it ran"
    folder = Written(tmp_path / "a", 2, 1).write(more=Bomb(proof))
    with pytest.raises(ConfigError, match=r"mp_rank_00_model_states.pt holds more than .* add --trust-pickle if you"):
        open_deepspeed(folder, trust_pickle=False)
    assert not proof.exists()
    assert open_deepspeed(folder, trust_pickle=True).step == 40
    assert proof.exists()


def test_what_is_not_whole_is_said(tmp_path: Path) -> None:
    folder = Written(tmp_path / "a", 3, 2).write()
    second = folder / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    whole = second.read_bytes()
    for damaged in (whole[:-100], whole[: len(whole) // 2], b"", b"not a file of torch"):
        second.write_bytes(damaged)
        with pytest.raises(UserError, match=r"optim_states\.pt cannot be read"):
            open_deepspeed(folder, trust_pickle=False)
    second.unlink()
    with pytest.raises(ConfigError, match="2 ranks wrote it, and there are files of 1"):
        open_deepspeed(folder, trust_pickle=False)
    (folder / "zero_pp_rank_0_mp_rank_00_optim_states.pt").unlink()
    with pytest.raises(ConfigError, match=r"do not fit together .*tightfit export"):
        open_deepspeed(folder, trust_pickle=False)
    (folder / "zero_pp_rank_0_mp_rank_01_model_states.pt").touch()
    with pytest.raises(ConfigError, match="tensor, pipeline or expert parallel"):
        open_deepspeed(folder, trust_pickle=False)
