"""A log that is pasted gets the verdict of the command line, and whatever is in it stays text."""

from __future__ import annotations

import html
import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tables import table

sys.path.insert(0, str(Path(__file__).parent))

from visits import HTML, client

import warm_desk
from tightfit.diagnose.judge import judge
from tightfit.diagnose.verdict import Evidence, LogSource
from tightfit.web import diagnose_view

CAPTURED = sorted((Path(__file__).parents[1] / "diagnose" / "captured").glob("*.log"))
OOM = (
    "step 1\ntorch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of "
    "23.65 GiB of which 1.00 GiB is free. Of the allocated memory 20.00 GiB is allocated by PyTorch, and 1.00 GiB is "
    "reserved by PyTorch but unallocated.\n"
)


def asked(log: bytes, tmp_path: Path, path: str = "/diagnose/answer", **headers: str) -> tuple[int, str]:
    answer = client(tmp_path).post(path, content=log, headers=headers)
    return answer.status_code, answer.text


@pytest.mark.thorough
@table("path", CAPTURED[::7], ids=lambda path: path.stem)
def test_the_page_says_what_the_command_line_says(path: Path, tmp_path: Path) -> None:
    status, text = asked(path.read_bytes(), tmp_path)
    assert status == 200
    done = warm_desk.run("diagnose", str(path), "--json")
    found, shown = json.loads(done.stdout), html.unescape(text)
    told = found["verdict"] or found["also"][0]
    assert told["cause"] in shown
    assert f"tightfit explain {told['id']}" in shown
    assert all(fix["text"] in shown for fix in told["fixes"])
    assert all(line["text"][:400] in shown for line in told["evidence"][:12])


@pytest.mark.thorough
@table("path", CAPTURED, ids=lambda path: path.stem)
def test_every_captured_log_gets_the_verdict_of_its_file(path: Path) -> None:
    found = diagnose_view.diagnose_log(path.read_bytes(), path.name).verdict
    wanted = judge(Evidence(logs=(LogSource(name=path.name, path=path),))).verdict
    assert found == wanted


def test_figures_of_memory_and_what_else_is_worth_mending(tmp_path: Path) -> None:
    _, text = asked(OOM.encode(), tmp_path)
    assert "asked for" in text
    assert "2.00 GiB" in text
    assert "23.65 GiB" in text


def test_a_log_is_text_and_its_secrets_are_struck_out(tmp_path: Path) -> None:
    evil = f"<script>alert(1)</script> HF_TOKEN=hf_abcdefghijklmnopqrstuvwxyz {OOM.splitlines()[1]}\n"
    _, text = asked(evil.encode(), tmp_path)
    assert "<script>" not in text
    assert "hf_abcdef" not in text
    assert "{{" not in asked(b"{{ 7*7 }} RuntimeError: {{ 7*7 }}\n", tmp_path)[1].replace("{{ 7*7 }}", "")
    assert "49" not in asked(b"RuntimeError: {{ 7*7 }}\n", tmp_path)[1]


def test_nothing_is_wrong(tmp_path: Path) -> None:
    assert "Nothing is wrong in this log." in asked(b"step 1 loss 3.2\nstep 2 loss 3.1\n", tmp_path)[1]


def test_a_form_without_a_script_gets_a_page(tmp_path: Path) -> None:
    status, text = asked(b"log=" + OOM.encode(), tmp_path, "/diagnose", **HTML)
    assert status == 200
    assert "<!doctype html>" in text
    assert "GPU" in text
    assert "log=step" not in text


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "is empty"),
        (b" \n\t\n", "is empty"),
        (b'{\n  "train_batch_size": 8,\n  "fp16": {"enabled": true}\n}\n', "no program seems to have printed"),
        (b"cd runs\nnvidia-smi\npython train.py --lr 1e-4\n", "no program seems to have printed"),
        (b"\x7fELF" + bytes(range(256)), "is not a log"),
        (b"\x1f\x8b\x08\x00abc", "is not a log"),
        (bytes(5000), "is not a log"),
        (random.Random(1).randbytes(3000).decode("latin-1").encode(), "is not a log"),  # noqa: S311
    ],
)
def test_what_is_no_log_is_answered_with_a_sentence(data: bytes, said: str, tmp_path: Path) -> None:
    status, text = asked(data, tmp_path)
    assert status == 400
    assert said in text
    assert text.count("\n") == 1
    status, text = asked(data, tmp_path, "/diagnose", **HTML)
    assert status == 400
    assert said in text
    assert "<h1>" in text


@pytest.mark.parametrize("encoding", ["utf-16", "utf-8-sig", "utf-32", "gbk"])
def test_other_encodings(encoding: str, tmp_path: Path) -> None:
    assert "GPU" in asked(("训练\n" + OOM).encode(encoding), tmp_path)[1]


@pytest.mark.thorough
def test_too_long_is_refused_before_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diagnose_view, "MOST_BYTES", 100_000)
    status, text = asked(b"x", tmp_path, **{"Content-Length": str(2 * 2**30)})
    assert status == 413
    assert "tightfit diagnose train.log" in text
    status, _ = asked(b"x", tmp_path, **{"Content-Length": "9" * 30})
    assert status == 413
    taken = 0

    def endless() -> Iterator[bytes]:
        nonlocal taken
        while taken < 50_000_000:
            taken += 10_000
            yield b"x" * 10_000

    answer = client(tmp_path).post("/diagnose/answer", content=endless())
    assert answer.status_code == 413
