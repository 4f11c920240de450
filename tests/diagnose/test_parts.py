"""The parts that reading a log is made of: prefixes, encodings, tracebacks, numbers, secrets."""

from __future__ import annotations

import base64
import hashlib
import re
from dataclasses import asdict
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tightfit.diagnose.judge import judge
from tightfit.diagnose.lines import message_of, moment_of
from tightfit.diagnose.masks import masked
from tightfit.diagnose.oom import GIB, MIB, read_oom
from tightfit.diagnose.reading import PIECE_BYTES, is_printed, looks_like_log, pieces
from tightfit.diagnose.tracebacks import phase_of
from tightfit.diagnose.verdict import Evidence, LogSource
from tightfit.formats.recognise import read_known_config
from tightfit.job.known import KnownConfig

SAID = "RuntimeError: no such thing"


@pytest.mark.parametrize(
    ("line", "rank", "level"),
    [
        (SAID, None, None),
        (f"[rank3]: {SAID}", 3, None),
        (f"[default12]:{SAID}", 12, None),
        (f"3: {SAID}", 3, None),
        (f"rank7: {SAID}", 7, None),
        (f"[1,2]<stderr>:{SAID}", 2, None),
        (f"worker-1: [rank5]: {SAID}", 5, None),
        (f"10.0.0.7: {SAID}", None, None),
        (f"(TrainWorker pid=41, ip=10.0.0.7) {SAID}", None, None),
        (f"(VllmWorker rank=1 pid=254) {SAID}", 1, None),
        (f"trainer-0  | {SAID}", None, None),
        (f"2026-11-05T12:00:01.123Z {SAID}", None, None),
        (f"[2026-11-05 12:00:01,123] [ERROR] [a.py:3:f] {SAID}", None, "error"),
        (f"[ERROR|trainer.py:812] 2026-11-05 12:00:01,123 >> {SAID}", None, "error"),
        (f"2026-11-05 12:00:01,123 - ERROR - __main__ - {SAID}", None, "error"),
        (f"2026-11-05 12:00:01.123 | ERROR    | mod:f:7 - {SAID}", None, "error"),
        (f"ERROR:root:{SAID}", None, "error"),
        (f"E1105 12:00:01.123456 41 torch/a.py:7] {SAID}", None, "error"),
        (f"[rank1]:[E626 06:24:44.903881913 ProcessGroupNCCL.cpp:616] [Rank 1] {SAID}", 1, "error"),
        (f"Nov  5 03:02:11 node-0 kernel: [81.1] {SAID}", None, None),
        (f"  3%|#  | 12/400 [00:10<01:00,  1.2s/it]{SAID}", None, None),
        (f"node:12:14 [0] enqueue.cc:1085 {SAID}", None, None),
    ],
)
def test_what_stands_before_a_message(line: str, rank: int | None, level: str | None) -> None:
    message = message_of(line, 1)
    assert message.text == SAID
    assert (message.rank, message.level) == (rank, level)


def test_indentation_stays() -> None:
    assert message_of('[rank3]:   File "a.py", line 1, in f', 1).text.startswith("  File")


@pytest.mark.parametrize("line", ["RuntimeError: x", "torch.cuda.OutOfMemoryError: x", "a.b2.MyError: x", "  File x"])
def test_an_exception_is_no_prefix(line: str) -> None:
    assert message_of(line, 1).text == line


def test_the_last_moment_in_a_text() -> None:
    first, second = moment_of("2026-05-02 10:00:01,500 x"), moment_of("a 2026-05-02 10:00:00 b 2026-05-02T10:00:02.5 c")
    assert first is not None
    assert second is not None
    assert second - first == 1.0
    assert moment_of("2026-13-41 10:00:00") is None
    assert moment_of("no time") is None


# --- reading ------------------------------------------------------------------------------------


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32", "latin-1"])
def test_encodings(tmp_path: Path, encoding: str) -> None:
    log = tmp_path / "a.log"
    log.write_bytes(("Größe\nstep 1 loss 2.0\n" + "RuntimeError: CUDA error: out of memory\n").encode(encoding))
    found = judge(Evidence(logs=(LogSource(name="a.log", path=log),))).verdict
    assert found is not None
    assert found.kind == "device-oom"
    assert found.evidence[-1].number == 3


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_lines_are_numbered_as_an_editor_does(end: str) -> None:
    text = end.join(["a", "bar 1%|\rbar 2%|\rbar 3%|", "", "RuntimeError: CUDA error: out of memory", ""])
    found = judge(Evidence(logs=(LogSource(name="x", text=text),))).verdict
    assert found is not None
    assert found.evidence[-1].number == 4


def test_colours_are_taken_out() -> None:
    text = "\x1b[1;31mRuntimeError\x1b[0m: \x1b]0;title\x07CUDA error: \x1b[4mout of memory\x1b[0m\n"
    found = judge(Evidence(logs=(LogSource(name="x", text=text),))).verdict
    assert found is not None
    assert found.evidence[-1].text == "RuntimeError: CUDA error: out of memory"


@pytest.mark.thorough
def test_a_line_of_megabytes() -> None:
    text = "x" * (5 * PIECE_BYTES) + "\nRuntimeError: CUDA error: out of memory " + "y" * (3 * PIECE_BYTES)
    found = judge(Evidence(logs=(LogSource(name="x", text=text),))).verdict
    assert found is not None
    assert len(str(found.evidence[-1].text)) < 1000


@given(st.binary(max_size=300_000), st.integers(1, 4))
def test_pieces_lose_nothing(data: bytes, times: int) -> None:
    text = (data.translate(None, b"\x00\x1b") * times).decode("latin-1")  # without colours, and zeros: those of UTF-16
    whole = b"".join(piece.data for piece in pieces(LogSource(name="x", text=text)))
    assert whole == text.encode().replace(b"\r\n", b"\n")


_NOISE = hashlib.shake_256(b"more").digest(70_000)


@pytest.mark.parametrize(
    ("data", "is_log"),
    [
        (b"", True),
        (b"step 1\n", True),
        (b"Killed\n", True),
        (b"\x7fELF\x02\x01", False),
        (bytes(1000), False),
        (b"%PDF-1.7\n1 0 obj\n", False),
        (_NOISE, False),
        (_NOISE[:64], False),
        (_NOISE.decode("utf-8", "replace").encode(), False),
        (_NOISE.decode("latin-1").encode(), False),  # as a browser may paste it
        (bytes(32 + byte % 95 for byte in _NOISE), False),
        (bytes(128 + byte % 128 for byte in _NOISE[:200]), False),
        (base64.encodebytes(_NOISE), False),
        ("错误 显存不足\n".encode("gb18030"), True),
        ("メモリ不足\n".encode("shift_jis"), True),
        ("Erreur : mémoire insuffisante\n".encode("latin-1"), True),
        (("步骤 1 损失 2.0\n" * 9000).encode(), True),
    ],
)
def test_what_is_no_log(tmp_path: Path, data: bytes, is_log: bool) -> None:
    path = tmp_path / "a"
    path.write_bytes(data)
    assert looks_like_log(LogSource(name="a", path=path)) is is_log


def test_a_log_that_was_emptied_while_it_was_written_begins_with_zeros() -> None:
    log = LogSource(name="a", text=bytes(200_000) + b"step 1 loss 2.0\ntorch.OutOfMemoryError: CUDA out of memory.\n")
    assert looks_like_log(log)
    verdict = judge(Evidence(logs=(log,))).verdict
    assert verdict is not None
    assert verdict.kind == "device-oom"


@pytest.mark.parametrize(
    ("text", "printed"),
    [
        ("step 1 loss 3.2\n", True),
        ("{'loss': 2.3, 'epoch': 0.1}\n", True),
        ('{"step": 3, "loss": 2.1}\n', True),
        ("45%|████▌     | 450/1000 [07:30<09:10,  1.00s/it]\n", True),
        ("训练开始\n第 3 步，损失 2.1\n", True),
        ('{\n  "train_batch_size": 8,\n  "optimizer": {"type": "AdamW"}\n}\n', False),
        ("model: qwen2.5-7b\nnum_train_epochs: 3\nlearning_rate: 1.0e-4\n", False),
        ("cd runs\nnvidia-smi\npython train.py --lr 1e-4\n", False),
        (": 1700000000:0;ls -la\n: 1700000004:0;vim train.py\n", False),
        ("<!doctype html><html><body><p>Hello</p></body></html>\n", False),
    ],
)
def test_what_no_program_has_printed(text: str, printed: bool) -> None:
    for encoding in ("utf-8", "gb18030", "utf-16"):
        assert is_printed(LogSource(name="a", text=text.encode(encoding))) is printed


def test_healthy_logs_are_printed() -> None:
    logs = list((Path(__file__).parent / "healthy").rglob("*.log"))
    assert len(logs) > 20
    assert [path.name for path in logs if not is_printed(LogSource(name="a", path=path))] == []


def test_every_log_of_ours_looks_like_one() -> None:
    logs = [path for kind in ("*.log", "*.txt") for path in Path(__file__).parent.rglob(kind)]
    assert len(logs) > 400
    assert [path.name for path in logs if not looks_like_log(LogSource(name="a", path=path))] == []


# --- tracebacks ---------------------------------------------------------------------------------


def test_tracebacks_of_two_processes_mixed_up() -> None:
    lines = [
        "Traceback (most recent call last):",
        "Traceback (most recent call last):",
        '  File "/job/a.py", line 1, in f',
        '  File "/job/a.py", line 2, in g',
        "    loss.backward()",
        "    dist.barrier()",
        "RuntimeError: [gloo/pair.cc:534] Connection closed by peer [127.0.0.1]:1",
        "RuntimeError: CUDA error: out of memory",
    ]
    found = judge(Evidence(logs=(LogSource(name="x", text="\n".join(lines)),)))
    assert found.verdict is not None
    assert found.verdict.kind == "device-oom"
    assert [each.id for each in found.also] == ["peer-lost"]


def test_a_loss_in_a_function_called_step_is_no_optimizer_step() -> None:
    loss = ['  File "/job/train.py", line 15, in step', "    loss = F.cross_entropy(logits.float(), labels)"]
    assert phase_of(loss) == "loss"
    assert phase_of(['  File "/x/torch/optim/adamw.py", line 9, in step', "    return self._step()"]) == "step"


def test_a_chain_of_exceptions_is_one_case() -> None:
    text = (
        'Traceback (most recent call last):\n  File "/job/a.py", line 1, in f\n    x["a"]\nKeyError: 17\n\n'
        "During handling of the above exception, another exception occurred:\n\n"
        'Traceback (most recent call last):\n  File "/job/a.py", line 3, in g\n    f()\n'
        "ModuleNotFoundError: No module named 'trl'\n"
    )
    found = judge(Evidence(logs=(LogSource(name="x", text=text),)))
    assert found.verdict is not None
    assert found.verdict.id == "module-missing"
    assert found.also == ()
    assert any("KeyError" in str(line.text) for line in found.verdict.evidence)
    assert any(fix.command == "pip install trl" for fix in found.verdict.fixes)


# --- numbers ------------------------------------------------------------------------------------


def test_the_numbers_of_the_old_wording() -> None:
    numbers = read_oom(
        "RuntimeError: CUDA out of memory. Tried to allocate 20.00 MiB (GPU 0; 15.78 GiB total capacity; 14.56 GiB "
        "already allocated; 19.75 MiB free; 14.60 GiB reserved in total by PyTorch)"
    ).numbers
    assert numbers.asked == 20 * MIB
    assert numbers.total == int(15.78 * GIB)
    assert numbers.free == int(19.75 * MIB)
    assert numbers.allocated == int(14.56 * GIB)
    assert numbers.reserved_unused == int(14.60 * GIB) - int(14.56 * GIB)
    assert numbers.others == 0


def test_the_numbers_of_the_new_wording() -> None:
    told = read_oom(
        "HIP out of memory. Tried to allocate 2.00 GiB. GPU 3 has a total capacty of 63.98 GiB of which 1.20 GiB is "
        "free. Process 17 has 22.48 GiB memory in use. Including non-PyTorch memory, this process has 40.20 GiB memory "
        "in use. Of the allocated memory 39.00 GiB is allocated by PyTorch, with 1.00 GiB allocated in private pools, "
        "and 1.05 GiB is reserved by PyTorch but unallocated."
    )
    assert told.numbers.others == int(22.48 * GIB)
    assert told.numbers.reserved_unused == int(1.05 * GIB)
    assert told.shapes == {"others"}


def test_in_a_container_ones_own_process_is_listed_as_a_stranger() -> None:
    told = read_oom(
        "CUDA out of memory. Tried to allocate 256.00 MiB. GPU 0 has a total capacity of 47.53 GiB of which 16.88 MiB "
        "is free. Process 3652628 has 47.51 GiB memory in use. Of the allocated memory 47.14 GiB is "
        "allocated by PyTorch, "
        "and 57.79 MiB is reserved by PyTorch but unallocated."
    )
    assert told.numbers.others == 0
    assert told.shapes == frozenset()


@pytest.mark.parametrize(
    ("asked", "rows", "tokens"),
    [("18.55 GiB", None, 32768), ("2.32 GiB", 4096, 4096), ("2.32 GiB", 8192, 8192), ("136.00 MiB", None, None)],
)
def test_logits(asked: str, rows: int | None, tokens: int | None) -> None:
    text = f"CUDA out of memory. Tried to allocate {asked}."
    found = read_oom(text, vocabulary=151936, rows=rows).tokens
    assert found == tokens or (asked == "2.32 GiB" and rows == 8192)


@pytest.mark.thorough
@given(st.text(max_size=300))
def test_any_text_can_be_asked_for_numbers(text: str) -> None:
    assert all(value is None or value >= 0 for value in asdict(read_oom(text, 32000).numbers).values())
    assert masked(text) == text or "***" in masked(text)
    assert text.endswith(message_of(text, 1).text)
    assert moment_of(text) is None or re.search(r"\d:\d", text)


# --- secrets ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "token=SECRETSECRET12",
        "HF_TOKEN: 'hf_SECRETSECRETSECRET12'",
        "using hf_SECRETSECRETSECRETSECRET12 to log in",
        "wandb api_key=0123456789abcdef0123456789abcdefSECRET12",
        "WANDB_API_KEY 0123456789abcdef0123456789abcdef01234567",
        "https://user:SECRETSECRET@host/path",
        "https://host/path?sig=SECRETSECRET&x=1",
        "Authorization: Bearer SECRETSECRETSECRET",
        "password: SECRETSECRET",
        '{"api_key": "SECRETSECRET1"}',
        "AWS AKIASECRETSECRET1234",
        "sk-proj-SECRETSECRETSECRET1",
        "ghp_SECRETSECRETSECRETSECRET12",
        "--hub_token SECRETSECRET99",
    ],
)
def test_secrets_are_struck_out(text: str) -> None:
    shown = masked(text)
    assert "SECRET" not in shown
    assert "0123456789abcdef0123456789abcdef01234567" not in shown
    assert "***" in shown


@pytest.mark.parametrize(
    "text",
    [
        "pad_token_id: 151643",
        "num_input_tokens_seen: 1234567",
        'eos_token: "<|im_end|>"',
        "Target modules {'q_proj'} not found in the base model",
        "RuntimeError: CUDA out of memory. Tried to allocate 2.00 GiB (GPU 0; 15.78 GiB total capacity)",
        "tokenizer.model: loaded",
        "max_tokens=4096 token_type_ids missing",
    ],
)
def test_what_is_no_secret_stays(text: str) -> None:
    assert masked(text) == text


# --- settings -----------------------------------------------------------------------------------


def test_settings_of_a_trainers_file_and_the_file_that_it_names(tmp_path: Path) -> None:
    (tmp_path / "zero3.json").write_text(
        '{"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "pin_memory": true}}}'
    )
    path = tmp_path / "train.yaml"
    path.write_text(
        "model_name_or_path: x\nstage: sft\nfinetuning_type: lora\nquantization_bit: 4\ntemplate: qwen\n"
        "cutoff_len: 512\nper_device_train_batch_size: 2\nbf16: true\ndeepspeed: zero3.json\nflash_attn: fa2\n"
    )
    assert read_known_config(path) == KnownConfig(
        trainer="llamafactory", file=str(path), stage=3, offload_optimizer="cpu", offload_param="none", pin_memory=True,
        micro_batch=2, sequence=512, precision="bf16", method="qlora", checkpointing=True, attention="fa2",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("text", "name", "known"),
    [
        ('{"zero_optimization": {"stage": 2}, "fp16": {"enabled": true}}', "a.json", {"stage": 2, "precision": "fp16"}),
        (
            "distributed_type: DEEPSPEED\nmixed_precision: bf16\nnum_processes: 8\ndeepspeed_config: {zero_stage: 3}",
            "a.yaml",
            {"stage": 3, "precision": "bf16", "world": 8},
        ),
        ("output_dir: x\ngradient_checkpointing: true\nfp16: true", "a.yaml", {"checkpointing": True}),
        (
            "model: 7b_mamba\nmethod: full\nsequence: 512\nprecision: fp16\nlevers: {engine: zero2, micro_batch: 4}",
            "a.yaml",
            {"stage": 2, "micro_batch": 4, "sequence": 512, "precision": "fp16", "method": "full"},
        ),
        (
            "preset: 7b_mamba\ntraining: {max_seq_length: 512, deepspeed_stage: 2, batch_size: 4}",
            "a.yaml",
            {"stage": 2, "sequence": 512, "micro_batch": 4},
        ),
    ],
)
def test_settings_of_others(tmp_path: Path, text: str, name: str, known: dict[str, object]) -> None:
    path = tmp_path / name
    path.write_text(text)
    found = read_known_config(path)
    assert {key: getattr(found, key) for key in known} == known
