"""Lines that something wrapped: in JSON, behind a mark that no list has, in torchrun's summary, at the width of a
terminal; and fixes in the words of the trainer, and for the card, that the log shows."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tightfit.diagnose.judge import judge
from tightfit.diagnose.lines import message_of, prefix_of
from tightfit.diagnose.reading import unwrapped
from tightfit.diagnose.verdict import Evidence, LogSource, Verdict
from tightfit.job.known import KnownConfig

TRACEBACK = """Traceback (most recent call last):
  File "/job/train.py", line 88, in <module>
    trainer.train()
OSError: [Errno 28] No space left on device
"""
OOM = (
    "OutOfMemoryError: {device} out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 63.98 GiB of "
    "which 1.00 GiB is free. Of the allocated memory 60.71 GiB is allocated by PyTorch, and 1.33 GiB is reserved by "
    "PyTorch but unallocated.\n"
)


def verdict_of(text: str, config: KnownConfig | None = None) -> Verdict:
    found = judge(Evidence(logs=(LogSource(name="log", text=text),), config=config)).verdict
    assert found is not None
    return found


def commands(verdict: Verdict) -> list[str]:
    return [fix.command for fix in verdict.fixes if fix.command]


def test_docker_keeps_its_line_numbers() -> None:
    lines = ["step 1", *TRACEBACK.splitlines()]
    text = "".join(json.dumps({"log": f"{line}\n", "stream": "stderr", "time": "x"}) + "\n" for line in lines)
    found = verdict_of(text)
    assert found.id == "disk-full"
    assert [line.number for line in found.evidence] == [3, 4, 5]
    assert found.evidence[-1].text == "OSError: [Errno 28] No space left on device"


def test_a_structured_line_is_one_line_however_much_is_in_it() -> None:
    wrapped = {"severity": "ERROR", "rank": 3, "message": "Uncaught exception", "exception": TRACEBACK}
    found = verdict_of('{"message": "step 1", "loss": 2.0}\n' + json.dumps(wrapped) + "\n")
    assert (found.id, found.rank) == ("disk-full", 3)
    assert {line.number for line in found.evidence} == {2}


def test_what_tells_of_no_failure_is_left_as_it_is() -> None:
    for line in (
        b'{"level": "info", "msg": "CUDA out of memory is unlikely", "loss": 2.0}\n',
        b'{"msg": "half a line',
        b'{"loss": 2.0, "step": 3}\n',
        b'["msg", "x"]\n',
        b'{"msg": "a", "b": ' + b"[" * 3000 + b"]" * 3000 + b"}\n",
    ):
        assert unwrapped(line) == line


@pytest.mark.thorough
@given(st.lists(st.text(max_size=40), max_size=6))
def test_as_many_lines_come_out_as_go_in(texts: list[str]) -> None:
    data = "".join(json.dumps({"log": text, "stream": "stdout"}) + "\n" for text in texts).encode()
    assert unwrapped(data).count(b"\n") == len(texts)


@pytest.mark.parametrize(
    "mark",
    [
        "<pool-a/job 17> ",
        "<14>1 2026-03-11T12:00:00.123Z gpu-7 train 4123 - - ",
        "<node3> ",
        "[job-worker-2 pytorch] ",
        "2026-03-11 12:00:00.000 UTC ",
        "(train, pid=2231) ",
    ],
)
def test_a_mark_before_every_line(mark: str) -> None:
    assert verdict_of("".join(f"{mark}{line}\n" for line in TRACEBACK.splitlines())).id == "disk-full"


def test_a_mark_is_learnt_from_a_traceback_and_its_numbers_may_change() -> None:
    message = message_of("<pool-a/job 17> Traceback (most recent call last):", 1)
    learnt = prefix_of(message, message.text.index("Traceback"))
    assert learnt is not None
    assert message_of("<pool-a/job 204>   File x", 2, None, learnt).text == "  File x"
    said = message_of("training stopped with an error: Traceback (most recent call last):", 1)
    assert prefix_of(said, said.text.index("Traceback")) is None


def test_torchruns_summary_names_the_rank() -> None:
    inside = TRACEBACK.replace("\n", "\n  ").rstrip()
    found = verdict_of(
        "Root Cause (first observed failure):\n[0]:\n  time      : 2026-11-16_02:46:31\n"
        f"  rank      : 5 (local_rank: 5)\n  exitcode  : 1 (pid: 13396)\n  traceback : {inside}\n  \n====\n"
    )
    assert (found.id, found.rank) == ("disk-full", 5)


def test_an_exception_that_begins_with_an_empty_line_is_still_told() -> None:
    assert "weights are upside down" in str(
        verdict_of(TRACEBACK[:80] + "ImportError: \nweights are upside down\n").cause
    )


def test_fixes_for_cards_of_other_makers() -> None:
    nvidia, amd = (commands(verdict_of(OOM.format(device=device))) for device in ("CUDA", "HIP"))
    assert [each for each in nvidia if "expandable_segments" not in each] == amd
    others = "Process 18823 has 40.00 GiB memory in use. Including non-PyTorch memory, this process has 2.00 GiB "
    held = OOM.replace("Of the allocated", others + "memory in use. Of the allocated").replace("60.71", "1.71")
    assert any("nvidia-smi" in each for each in commands(verdict_of(held.format(device="CUDA"))))
    shown = commands(verdict_of(held.format(device="HIP")))
    assert any("rocm-smi" in each for each in shown)
    assert not any("nvidia-smi" in each or "CUDA_VISIBLE" in each for each in shown)


@pytest.mark.parametrize(
    ("said", "tool", "segments"),
    [
        ("torch 2.5.1+cu124\n", "nvidia-smi", "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"),
        ("torch 2.5.1+rocm6.2\n", "rocm-smi", None),
        ("RCCL version 2.18\ntorch 2.1.0.dtk2404\n", "hy-smi", None),
        ("gfx928 K100_AI, RCCL\n", "hy-smi", None),
        ("/usr/lib/torch_npu/__init__.py\n", "npu-smi", "PYTORCH_NPU_ALLOC_CONF=expandable_segments:True"),
    ],
)
def test_remedies_know_the_vendor(said: str, tool: str, segments: str | None) -> None:
    """What hangs on a DCU is not advised there, and a tool is the one that the machine has."""
    pieces = OOM.format(device="GPU").replace("60.71", "56.00").replace("1.33 GiB is", "6.90 GiB is")
    fragmented = verdict_of(said + pieces)
    assert fragmented.id == "device-oom-fragmented"
    told = [each for each in commands(fragmented) if "expandable_segments" in each]
    assert told == ([] if segments is None else [f"export {segments}"])
    others = "Process 18823 has 40.00 GiB memory in use. Including non-PyTorch memory, this process has 2.00 GiB "
    held = OOM.replace("Of the allocated", others + "memory in use. Of the allocated").replace("60.71", "1.71")
    assert any(each.startswith(tool) for each in commands(verdict_of(said + held.format(device="GPU"))))


def test_a_card_of_unknown_make_is_the_one_that_the_log_names() -> None:
    told = verdict_of(OOM.format(device="HIP"), KnownConfig(vendor="unknown"))
    assert not any("expandable_segments" in each for each in commands(told))


@pytest.mark.parametrize(
    ("said", "wanted"),
    [
        ("[INFO|parser.py] llamafactory.hparams.parser:373 >> Process rank: 0\n", "cutoff_len: N"),
        ('  File "/workspace/axolotl/src/axolotl/cli/train.py", line 59, in do_train\n', "sequence_len: N"),
        ("", "--max_length N"),
    ],
)
def test_fixes_in_the_words_of_the_trainer_that_the_log_shows(said: str, wanted: str) -> None:
    shown = commands(verdict_of(said + OOM.format(device="CUDA")))
    assert wanted in shown
    assert '"zero_optimization": {"stage": 3}' in shown


def test_the_config_that_was_given_counts_before_the_log() -> None:
    given_one = KnownConfig(trainer="job")
    shown = commands(verdict_of("llamafactory.hparams.parser:373 >> x\n" + OOM.format(device="CUDA"), given_one))
    assert "levers: {sequence: N}" in shown
    assert not any("zero_optimization" in each for each in shown)


@pytest.mark.parametrize("encoding", ["utf-8", "gb18030"])
@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("已杀死", "killed"),
        ("./train.sh: 第 3 行: 4711 已杀死               python train.py", "killed"),
        ("./train.sh：行 3： 4711 已杀死", None),
        ("段错误 (核心已转储)", "segfault"),
        ("总线错误 (核心已转储)", "bus-error"),
        ("./train.sh: Zeile 3: 4711 Getötet                python train.py", "killed"),
        ("Speicherzugriffsfehler (Speicherabzug geschrieben)", "segfault"),
        ("样本 3：他已杀死了那条龙，随后段错误", None),
    ],
)
def test_what_shells_of_other_languages_say(tmp_path: Path, line: str, wanted: str | None, encoding: str) -> None:
    log = tmp_path / "train.log"
    log.write_bytes(f"训练开始\n{line}\n".encode(encoding))
    found = judge(Evidence(logs=(LogSource(name="log", path=log),))).verdict
    assert (found and found.id) == wanted


@pytest.mark.parametrize(
    ("read", "symptom"),
    [
        (
            'Traceback (most recent cal1 last):\n  Fi1e "/root/train.py", 1ine 120, in <modu1e>\n    trainer.train()\n'
            "torch.cuda.OutOfMemoryError: CUDA out of memory . Tried to a1locate 2.OO GiB (GPU O; 23.69 GiB tota1 "
            "capacity; 20.OO GiB a1ready a1located; 1.20 GiB free; 21.00 GiB reserved in tota1 by PyTorch)\n",
            "device-oom",
        ),
        (
            'Traceback ( most recent call last ) :\nFile " /root/train . py " , line 120 , in < module >\n'
            "ModuleNotFoundError : No module named ' wandb '\n",
            "module-missing",
        ),
        (
            "Traceback (most recent call last):\n  File \u201ca.py\u201d, line 1\nKeyError: \u2018chosen\u2019\n",
            "data-field",
        ),
        ("ModuleNotFoundError\uff1a No module named \u2018wandb\u2019\n", "module-missing"),
    ],
)
def test_a_log_that_a_machine_read_from_a_picture(read: str, symptom: str) -> None:
    assert verdict_of(read).id == symptom


def test_figures_are_read_from_a_picture_too() -> None:
    text = "torch.OutOfMemoryError: CUDA out of memory. Tried to a1locate 2.OO GiB (GPU 0; 23.69 GiB tota1 capacity)\n"
    found = verdict_of(text).oom
    assert found is not None
    assert (found.asked, found.total) == (2 * 2**30, int(23.69 * 2**30))


def test_a_one_between_letters_is_a_one_elsewhere() -> None:
    found = verdict_of("Traceback (most recent call last):\n  File \"/job/l1ne.py\", line 1, in f1x\nKeyError: 'a1b'\n")
    assert "a1b" in str(found.cause)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[W socket.cpp:426] The server socket has failed to bind to [::]:29871 (errno: 98 - Address already in use).\n"
         "RuntimeError: The server socket has failed to listen on any local network address. port: 29871\n", "29871"),
        ("ModuleNotFoundError: No module named 'wandb'\n", "wandb"),
        ("FileNotFoundError: [Errno 2] No such file or directory: '/data/train.jsonl'\n", "/data/train.jsonl"),
        ("ImportError: /opt/venv/lib/python3.10/site-packages/flash_attn_2_cuda.cpython-310-x86_64-linux-gnu.so: "
         "undefined symbol: _ZN3c10\n", "flash_attn"),
        ("TypeError: TrainingArguments.__init__() got an unexpected keyword argument 'evaluation_strategy'\n",
         "evaluation_strategy"),
        ("ValueError: Undefined dataset mydata in dataset_info.json.\n", "mydata"),
        ("ValueError: Can't find a valid checkpoint at ./out/checkpoint-500\n", "./out/checkpoint-500"),
        ("OSError: [Errno 28] No space left on device: '/out/model.safetensors'\n", "/out/model.safetensors"),
        ("PermissionError: [Errno 13] Permission denied: '/cache/hub'\n", "/cache/hub"),
    ],
)  # fmt: skip
def test_a_verdict_names_what_the_log_names(text: str, told: str) -> None:
    """The port, the package, the file: in the sentence, and in the command where there is a place for it."""
    found = verdict_of(text)
    assert told in str(found.cause)
    assert not any("PACKAGE" in each or "grep 29500" in each for each in commands(found))


def test_what_a_log_does_not_name_is_left_out() -> None:
    assert str(verdict_of("RuntimeError: Address already in use\n").cause).endswith("a left-over process.")


@pytest.mark.parametrize("is_hard", [False, True], ids=["between words", "anywhere"])
@pytest.mark.parametrize("head", ["", 'Traceback (most recent call last):\n  File "/job/train.py", line 3, in main\n'])
@pytest.mark.parametrize(
    ("symptom", "line"),
    [
        ("no-grad", "RuntimeError: element 0 of tensors does not require grad and does not have a grad_fn"),
        ("backward-twice", "RuntimeError: Trying to backward through the graph a second time (or directly access …"),
        ("import-version", "ImportError: cannot import name 'is_npu_available' from 'transformers.utils' (/opt/x.py)"),
    ],
)
def test_a_message_that_a_terminal_broke_into_lines(symptom: str, line: str, head: str, is_hard: bool) -> None:
    broken = [line[at : at + 50] for at in range(0, len(line), 50)] if is_hard else textwrap.wrap(line, 40)
    assert verdict_of(head + "\n".join(broken) + "\n").id == symptom


@pytest.mark.parametrize("then", ["ERROR:root:require grad", "ValueError: require grad", "\nrequire grad"])
def test_what_another_says_does_not_belong_to_a_message(then: str) -> None:
    assert (
        verdict_of(f"RuntimeError: element 0 of tensors does not\n{then} and does not have a grad_fn\n").id != "no-grad"
    )
