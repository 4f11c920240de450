"""The tests' own faults: when they come, and that they are what they are called."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import injected_faults
import warm_desk
from injected_faults import happen, read_faults
from tightfit.runs import disk
from tightfit.runs.heartbeat import Heartbeat, read_beat
from tightfit.train.engines import Diverged, Stepped
from tightfit.train.events import Events, RankHeartbeat
from tightfit.train.loop import Loop
from tightfit.types import ConfigError


def test_a_fault_comes_once_at_its_rank_stage_and_step(tmp_path: Path) -> None:
    text = "bug@rank=1,stage=forward,step=3; nccl@rank=0,stage=step,step=2"
    other, rank = read_faults(text, tmp_path, 0), read_faults(text, tmp_path, 1)
    for stage, step in (("forward", 2), ("backward", 3), ("step", 2)):
        rank.at(stage, step)
    other.at("forward", 3)
    with pytest.raises(KeyError):
        rank.at("forward", 3)
    rank.at("forward", 3)
    read_faults(text, tmp_path, 1).at("forward", 3)  # nor in the next attempt
    with pytest.raises(dist.DistBackendError):
        other.at("step", 2)


def test_a_fault_that_repeats(tmp_path: Path) -> None:
    faults = read_faults("bug@rank=0,stage=save,step=3,repeat", tmp_path, 0)
    for _ in range(2):
        with pytest.raises(KeyError):
            faults.at("save", 3)


@pytest.mark.parametrize(
    "text", ["dance@rank=0,stage=save,step=3", "bug", "bug@rank=x,stage=save,step=3", "bug@rank=0,stage=a,step=1,b=2"]
)
def test_a_fault_that_nobody_knows_is_said(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match="fault"):
        read_faults(text, tmp_path, 0)


@pytest.mark.parametrize(
    ("what", "error", "words"),
    [
        ("device-oom", torch.OutOfMemoryError, "CUDA out of memory. Tried to allocate"),
        ("fragmentation", torch.OutOfMemoryError, "reserved by PyTorch but unallocated"),
        ("other-process", torch.OutOfMemoryError, "Process 4711 has"),
        ("pinned", RuntimeError, "CUDA error: out of memory"),
        ("shared-memory", RuntimeError, "DataLoader worker"),
        ("nccl", dist.DistBackendError, "unhandled system error"),
        ("nccl-timeout", dist.DistBackendError, "Watchdog caught collective operation timeout"),
        ("ecc", RuntimeError, "uncorrectable ECC error"),
        ("gpu-lost", RuntimeError, "GPU is lost"),
        ("cuda", RuntimeError, "unknown error"),
        ("host-oom", RuntimeError, "can't allocate memory|not enough memory"),
    ],
)
def test_exceptions_have_the_types_and_words_of_the_real_ones(
    tmp_path: Path, what: str, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        happen(what, tmp_path, None)


def test_a_large_disk_is_not_filled(tmp_path: Path) -> None:
    if disk.room(tmp_path) < 2**30:
        pytest.skip("this disk is full already")
    with pytest.raises(ConfigError, match="nothing was filled"):
        happen("disk-full", tmp_path, None)


def test_numbers_that_are_none_flow_through_the_model_once(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    small = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, **small))
    ids = torch.arange(8)[None]
    happen("nan", tmp_path, model)
    assert not torch.isfinite(model(input_ids=ids, labels=ids).loss)
    assert torch.isfinite(model(input_ids=ids, labels=ids).loss)


@pytest.mark.thorough
def test_a_fault_in_the_middle_of_writing_comes_after_bytes_are_on_the_disk(tmp_path: Path) -> None:
    code = (
        "import sys\nfrom pathlib import Path\nfrom tightfit.runs import disk\n"
        f"sys.path.insert(0, {str(Path(injected_faults.__file__).parent)!r})\nfrom injected_faults import read_faults\n"
        "faults = read_faults('kill@rank=0,stage=write,step=4', Path(sys.argv[1]), 0)\n"
        "disk.write_text(Path(sys.argv[1]) / 'before', 'x')\n"
        "faults.at('save', 4)\n"
        "disk.write_text(Path(sys.argv[1]) / 'during', 'x')\n"
    )
    assert warm_desk.python(code, str(tmp_path), ranks=True).returncode == -signal.SIGKILL
    assert (tmp_path / "before").read_text() == (tmp_path / "during").read_text() == "x"


# --- where a rank stands ----------------------------------------------------------------------------


def test_every_event_is_a_sign_of_life_on_ranks_that_say_nothing_too(tmp_path: Path) -> None:
    heartbeat = RankHeartbeat(Heartbeat(tmp_path, 1))
    events = Events(tmp_path, speaks=False, heartbeat=heartbeat)
    heartbeat.at("init")
    before = read_beat(tmp_path, 1)
    events.report("weights", 1, 2)
    after = read_beat(tmp_path, 1)
    assert before is not None
    assert after is not None
    assert (after.stage, after.count) == ("init", before.count + 1)
    RankHeartbeat().at("forward", 1)
    RankHeartbeat().beat()


def test_a_beat_costs_next_to_nothing(tmp_path: Path) -> None:
    heartbeat, count = RankHeartbeat(Heartbeat(tmp_path, 0)), 2000
    began = time.process_time()
    for step in range(count):
        heartbeat.at("forward", step)
    assert (time.process_time() - began) / count < 1e-3


@pytest.mark.parametrize(
    ("loss", "norm", "skipped", "scale", "words"),
    [
        (1.0, 1.0, False, None, None),
        (1.0, None, False, None, None),
        (float("nan"), 1.0, False, None, "the loss of step 7 is nan"),
        (1.0, float("inf"), False, None, "the gradients of step 7 are inf"),
        (1.0, float("nan"), True, None, None),  # nothing was updated
        (float("inf"), float("inf"), True, 4096.0, None),  # fp16 looks for its scale
        (1.0, 1.0, True, 0.5, "step 7 overflowed at a loss scale of 0.5"),
    ],
)
def test_weights_that_were_ruined_are_never_saved(
    loss: float, norm: float | None, skipped: bool, scale: float | None, words: str | None
) -> None:
    """The check comes before the checkpoint of its step."""
    window: Any = SimpleNamespace(samples=[3, 1, 4])
    stepped = Stepped(grad_norm=norm, skipped=skipped, loss_scale=scale)
    check: Any = Loop._check
    if words is None:
        check(None, 6, loss, stepped, window)
        return
    with pytest.raises(Diverged, match=words) as caught:
        check(None, 6, loss, stepped, window)
    assert "samples 3, 1, 4" in str(caught.value) or "scale" in words
