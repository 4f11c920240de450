"""What a rank's exception and the place where it stood become in its last words."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from injected_faults import happen
from tightfit.runs.heartbeat import Stage
from tightfit.train.distress import last_words
from tightfit.train.engines import Diverged, ScaleExhausted
from tightfit.train.worker import NotAsPlanned, OthersFailed
from tightfit.types import ConfigError, UserError

MIB = 2**20


def raised(what: str, folder: Path) -> BaseException:
    with pytest.raises(Exception) as caught:  # noqa: PT011 - each kind has its own type
        happen(what, folder, None)
    return caught.value


@pytest.mark.parametrize(
    ("what", "kind", "code", "numbers"),
    [
        ("device-oom", "device-oom", 3, (24 * MIB, int(3.9 * 2**30), 16 * MIB)),
        ("other-process", "device-oom", 3, (512 * MIB, 400 * MIB, 96 * MIB)),
        ("pinned", "pinned-memory", 3, (None, None, None)),
        ("host-oom", "host-oom", 1, (4096 * MIB, None, None)),
        ("nccl", "bug", 1, (None, None, None)),
        ("bug", "bug", 1, (None, None, None)),
    ],
)
def test_faults_are_told_by_type_and_numbers(
    tmp_path: Path, what: str, kind: str, code: int, numbers: tuple[int | None, ...]
) -> None:
    found, words = last_words(raised(what, tmp_path), 1, "backward", 3)
    assert (found, words.kind, words.phase, words.step) == (code, kind, "backward", 3)
    assert (words.asked, words.allocated, words.free) == numbers


def full(path: str | None = None) -> OSError:
    return OSError(errno.ENOSPC, "No space left on device", path)


def caused(error: Exception) -> Exception:
    error.__cause__ = full()
    return error


@pytest.mark.parametrize(
    ("error", "kind", "code", "text"),
    [
        (ConfigError("mend it"), "user", 2, "mend it"),
        (OthersFailed(), "user", 2, ""),
        (full("/a/b"), "disk-full", 2, "the disk is full (/a/b): make room, or name another folder with --output"),
        (caused(UserError("there is no room")), "disk-full", 2, "there is no room"),
        (caused(RuntimeError("x")), "bug", 1, "RuntimeError: x"),
        (MemoryError(), "host-oom", 3, "MemoryError"),
        (RuntimeError("NPU out of memory"), "device-oom", 1, "RuntimeError: NPU out of memory"),
        (RuntimeError("CUBLAS_STATUS_ALLOC_FAILED"), "device-oom", 1, "RuntimeError: CUBLAS_STATUS_ALLOC_FAILED"),
        (Diverged("the loss is nan"), "not-finite", 1, "the loss is nan"),
        (ScaleExhausted("it overflowed"), "loss-scale", 1, "it overflowed"),
        (NotAsPlanned("the plan is not what runs"), "notasplanned", 1, "the plan is not what runs"),
        (KeyError("x"), "bug", 1, "KeyError: 'x'"),
    ],
)
def test_errors_have_their_kind_code_and_sentence(error: Exception, kind: str, code: int, text: str) -> None:
    found, words = last_words(error, 0, "prepare", 0)
    assert (found, words.kind, str(words.text), words.phase, words.step) == (code, kind, text, None, None)


@pytest.mark.parametrize(
    ("stage", "phase"),
    [("prepare", None), ("init", "init"), ("forward", "forward"), ("vote", "step"), ("save", "save"), ("end", None)],
)
def test_a_rank_knows_its_phase(stage: Stage, phase: str | None) -> None:
    assert last_words(KeyError("x"), 0, stage, 1)[1].phase == phase


def test_the_loss_is_a_part_of_the_forward_pass() -> None:
    def cross_entropy() -> None:
        raise RuntimeError("too large")

    with pytest.raises(RuntimeError) as caught:
        cross_entropy()
    assert last_words(caught.value, 0, "forward", 2)[1].phase == "loss"
    assert last_words(caught.value, 0, "backward", 2)[1].phase == "backward"


@pytest.mark.parametrize(("name", "phase"), [("backward", "backward"), ("elsewhere", None)])
def test_of_the_worst_batch_that_is_tried_first_the_frames_tell(name: str, phase: str | None) -> None:
    """It is tried while the rank says that it is still building."""
    code = f"def {name}():\n    raise RuntimeError('x')\ndef probe():\n    {name}()\nprobe()\n"
    with pytest.raises(RuntimeError) as caught:
        exec(compile(code, "/site-packages/tightfit/train/probe.py", "exec"), {})  # noqa: S102 - a file of that name
    assert last_words(caught.value, 0, "init", 0)[1].phase == phase
