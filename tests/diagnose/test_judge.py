"""What counts before what: ranks, clocks, exit codes, the kernel's record, the user's settings."""

from __future__ import annotations

from pathlib import Path

import pytest

from tightfit.diagnose.judge import judge
from tightfit.diagnose.verdict import Diagnosis, Evidence, LogSource, RankExit, Verdict
from tightfit.job.known import KnownConfig
from tightfit.messages import Message

OOM = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 23.69 GiB "
    "of which 1.20 GiB is free. Including non-PyTorch memory, this process has 22.48 GiB memory in use. "
    "Of the allocated "
    "memory 21.90 GiB is allocated by PyTorch, and 105.00 MiB is reserved by PyTorch but unallocated."
)
BUG = 'Traceback (most recent call last):\n  File "/job/a.py", line 1, in f\n    g()\nAttributeError: no such thing\n'


def told(*texts: str, exits: tuple[RankExit, ...] = (), **more: object) -> Diagnosis:
    logs = tuple(LogSource(name=f"rank-{rank}.log", text=text, rank=rank) for rank, text in enumerate(texts))
    return judge(Evidence(logs=logs, exits=exits, **more))  # type: ignore[arg-type]


def verdict(*texts: str, exits: tuple[RankExit, ...] = (), **more: object) -> Verdict:
    found = told(*texts, exits=exits, **more).verdict
    assert found is not None
    return found


def test_nothing_is_wrong_where_nothing_is_said() -> None:
    assert told("") == Diagnosis(verdict=None)
    assert judge(Evidence(logs=())) == Diagnosis(verdict=None)
    assert told("step 1 loss 2.0\n", exits=(RankExit(rank=0, code=0, at=1.0),)).verdict is None


def test_a_process_that_ended_well_had_no_fault() -> None:
    well = (RankExit(rank=0, code=0, at=1.0),)
    assert told(BUG, exits=well).verdict is None
    assert told(BUG).verdict is not None


@pytest.mark.parametrize(
    "said",
    ["bitsandbytes", "The 'bitsandbytes>=0.39.0' distribution was not found and is required by it."],
)
def test_a_missing_package_is_named_as_both_libraries_say_it(said: str) -> None:
    error = f"importlib.metadata.PackageNotFoundError: No package metadata was found for {said}"
    found = verdict(BUG.replace("AttributeError: no such thing", error))
    assert (found.id, found.fixes[0].command) == ("module-missing", "pip install bitsandbytes")


def test_numbers_that_are_none_count_however_it_ended() -> None:
    text = "{'loss': nan, 'grad_norm': nan, 'epoch': 0.1}\n{'loss': nan, 'grad_norm': nan, 'epoch': 0.2}\n"
    assert verdict(text, exits=(RankExit(rank=0, code=0, at=1.0),)).kind == "not-finite"


@pytest.mark.parametrize(
    ("code", "symptom", "kind"),
    [
        (-9, "killed", "host-oom"),
        (137, "killed", "host-oom"),
        (247, "killed", "host-oom"),
        (-7, "bus-error", "shared-memory"),
        (135, "bus-error", "shared-memory"),
        (-11, "segfault", "code"),
        (139, "segfault", "code"),
        (-15, "terminated", "preempted"),
        (143, "terminated", "preempted"),
        (-6, "aborted", "code"),
        (130, "interrupted", "preempted"),
        (1, "silent-exit", "unknown"),
        (77, "silent-exit", "unknown"),
        (-63, "silent-exit", "unknown"),
    ],
)
def test_exit_codes_where_no_text_says_more(code: int, symptom: str, kind: str) -> None:
    found = verdict("starting\n", exits=(RankExit(rank=0, code=code, at=1.0),))
    assert (found.id, found.kind) == (symptom, kind)
    assert found.evidence[-1].source == Message("diagnose.exit-code")
    assert str(code) in str(found.evidence[-1].text)


def test_text_says_more_than_an_exit_code() -> None:
    assert verdict(OOM, exits=(RankExit(rank=0, code=-9, at=1.0),)).kind == "device-oom"


def test_the_rank_that_fell_first() -> None:
    exits = (RankExit(rank=0, code=1, at=9.0), RankExit(rank=1, code=-9, at=5.0), RankExit(rank=2, code=-15, at=4.0))
    found = verdict("ready\n", "ready\n", "ready\n", exits=exits)
    assert (found.id, found.rank) == ("killed", 1)
    both = (RankExit(rank=0, code=1, at=9.0), RankExit(rank=1, code=1, at=5.0))
    assert verdict(BUG, OOM, exits=both).rank == 1
    assert verdict(OOM, BUG, exits=both).rank == 1


def test_clocks_tell_who_was_first() -> None:
    early, late = f"2026-05-02 10:00:01,000 x\n{BUG}", f"2026-05-02 10:00:09,000 x\n{OOM}"
    assert verdict(early, late).id == "exception"
    assert verdict(late.replace(":09", ":00"), early).kind == "device-oom"


def test_without_clocks_what_is_known_counts_before_what_is_not() -> None:
    assert verdict(BUG, OOM).kind == "device-oom"


def test_the_kernels_record() -> None:
    line = "Out of memory: Killed process 4101 (python) total-vm:1kB"
    exits = (RankExit(rank=0, code=-9, at=1.0),)
    found = verdict("step 1 loss 2.0\n", exits=exits, kernel=(line,))
    assert (found.id, found.confidence) == ("host-oom-kernel", "certain")
    assert found.evidence[0].source == Message("diagnose.kernel-log")
    # Another process was killed as well, and ours says itself what it died of.
    assert verdict(OOM, kernel=(line,)).kind == "device-oom"


def test_a_failure_that_was_survived_is_none() -> None:
    goes_on = "".join(f"step {step} loss 2.{step}\n" for step in range(1, 6))
    assert told(f"{BUG}{goes_on}").verdict is None
    assert told(f"{goes_on}{BUG}").verdict is not None
    # A step or two that were under way when a neighbour fell prove nothing.
    assert told(f"{BUG}step 6 loss 2.0\nstep 7 loss 2.0\n").verdict is not None


def test_what_followed_is_said_beside() -> None:
    echo = "[Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=1, Timeout(ms)=1) ran for 2 ms"
    found = told(f"[rank0]: {OOM}\n[rank1]: {echo}\n")
    assert found.verdict is not None
    assert found.verdict.kind == "device-oom"
    assert [each.id for each in found.also] == ["watchdog-timeout"]


def test_fixes_fit_the_users_settings() -> None:
    small = KnownConfig(trainer="llamafactory", micro_batch=1, checkpointing=True, stage=3, method="lora")
    texts = [str(fix.text) for fix in verdict(OOM, config=small).fixes]
    assert not any("micro batch" in text or "gradient checkpointing" in text for text in texts)
    assert not any("ZeRO-3 or FSDP2" in text for text in texts)
    commands = [fix.command for fix in verdict(OOM, config=KnownConfig(trainer="llamafactory")).fixes]
    assert "per_device_train_batch_size: 1" in commands
    assert not any(command and command.startswith("--per_device") for command in commands)
    costly = [fix.is_costly for fix in verdict(OOM).fixes]
    assert costly == sorted(costly)


def test_the_log_tells_settings_in_passing() -> None:
    text = "  Instantaneous batch size per device = 1\n" + OOM
    assert not any("micro batch" in str(fix.text) for fix in verdict(text).fixes)
    killed = '"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}\nKilled\n'
    assert verdict(killed).id == "killed-offload"


def test_secrets_are_struck_out() -> None:
    secret = "hf_abcdefghijklmnopqrstuvwxyz012345"
    found = verdict(f"OSError: You are trying to access a gated repo. token={secret} https://me:pw@host/x\n")
    assert secret not in str(found.evidence[0].text)
    assert "pw" not in str(found.evidence[0].text)


def test_a_log_that_cannot_be_read_is_no_log(tmp_path: Path) -> None:
    gone = LogSource(name="gone.log", path=tmp_path / "gone.log")
    assert judge(Evidence(logs=(gone,))).verdict is None
    found = judge(Evidence(logs=(gone, LogSource(name="a", text=OOM)))).verdict
    assert found is not None
    assert found.kind == "device-oom"


@pytest.mark.parametrize(
    ("place", "phase"),
    [
        ("optimizer.step()", "step"),
        ("loss.backward()", "backward"),
        ("loss = F.cross_entropy(logits, labels)", "loss"),
        ("model = AutoModel.from_pretrained(name)", "init"),
        ("trainer.save_pretrained(out)", "save"),
        ("self.evaluation_loop(loader)", "eval"),
        ("out = model(**batch)", "forward"),
        ("self.mystery()", None),
    ],
)
def test_the_phase_is_told_by_the_frames(place: str, phase: str | None) -> None:
    text = f'Traceback (most recent call last):\n  File "/job/a.py", line 1, in main\n    {place}\n{OOM}\n'
    assert verdict(text).phase == phase


def test_logits_are_known_by_their_size() -> None:
    text = OOM.replace("2.00 GiB. GPU", "18.55 GiB. GPU")
    found = verdict(text, vocabulary=151936)
    assert found.id == "oom-logits-size"
    assert "32,768 tokens" in str(found.cause)


TRACED = f'Traceback (most recent call last):\n  File "/job/a.py", line 1, in f\n    g()\n{OOM}\n'
REMARKS = (
    "Installed CUDA version 11.3 does not match the version torch was compiled with 11.7 but since the APIs are "
    "compatible, accepting this combination",
    "The installed version of bitsandbytes was compiled without GPU support. 8-bit optimizers, 8-bit multiplication, "
    "and GPU quantization are unavailable.",
    "CUDA_HOME environment variable is not set. Please set it to your CUDA install root.",
    "/bin/sh: line 1: nvcc: command not found",
    "ImportError: libcudart.so.11.0: cannot open shared object file: No such file or directory",
    "[WARNING] [real_accelerator.py:12:f] ModuleNotFoundError: No module named 'apex'",
)


@pytest.mark.parametrize("remark", REMARKS)
def test_a_remark_does_not_beat_the_cause(remark: str) -> None:
    found = verdict(f"{remark}\n{TRACED}")
    assert (found.id, found.kind) == ("device-oom", "device-oom")


@pytest.mark.parametrize("remark", REMARKS[:4])
def test_a_remark_does_not_beat_an_exception_whose_traceback_was_cut_off(remark: str) -> None:
    assert verdict(f"{remark}\n{OOM}\n").id == "device-oom"


@pytest.mark.parametrize("remark", REMARKS)
def test_what_a_training_went_on_after_was_a_remark(remark: str) -> None:
    found = verdict(f"{remark}\n{{'loss': 1.2, 'epoch': 0.1}}\n{BUG}")
    assert found.id == "exception"


def test_a_line_that_the_failure_follows_from_is_no_remark() -> None:
    compiler = "python_headers.h:12:10: fatal error: Python.h: No such file or directory\n"
    built = BUG.replace("AttributeError: no such thing", "RuntimeError: Error building extension 'cpu_adam'")
    assert verdict(f"{REMARKS[0]}\n{compiler}{built}").id == "python-headers"
    assert verdict(f"Host key verification failed.\n{BUG.replace('AttributeError: no such thing', RENDEZVOUS)}").id == (
        "ssh-failed"
    )


RENDEZVOUS = "torch.distributed.DistStoreError: Timed out after 601 seconds waiting for clients. 1/2 clients joined."
