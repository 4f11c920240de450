"""Paths that come from outside: only ordinary files of a sane size are read, and only finite numbers are taken."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tightfit.cli import main
from tightfit.inputs.spelling import MOST_TEXT_BYTES, as_number, read_text
from tightfit.types import ConfigError

COMMANDS = (
    "estimate --model {}",
    "estimate {}",
    "plan {}",
    "plan --model {}",
    "lint {}",
    "train {}",
    "diagnose {}",
    "diagnose --config {}",
    "estimate --model tiny_llama --deepspeed {}",
    "rehearse {}",
)


@pytest.fixture
def pipe(tmp_path: Path) -> Path:
    """One that nobody writes into: whoever opens it as a file waits without end."""
    path = tmp_path / "pipe.yaml"
    os.mkfifo(path)
    return path


@pytest.mark.parametrize("command", COMMANDS)
def test_devices_and_pipes_are_not_read(command: str, pipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path in ("/dev/zero", "/dev/full", str(pipe)):
        assert main(command.format(path).split()) == 2
        said = capsys.readouterr().err
        assert "a pipe or a device" in said
        assert said.count("\n") == 1


def test_a_job_that_names_a_device_as_its_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = tmp_path / "job.yaml"
    job.write_text("model: /dev/full\n", encoding="utf-8")
    assert main(["plan", str(job)]) == 2
    assert "/dev/full: it is a pipe or a device" in capsys.readouterr().err


def test_a_file_beyond_any_config_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "huge.json"
    with path.open("wb") as file:
        file.truncate(1 << 40)  # takes no room on the disk
    with pytest.raises(ConfigError, match="larger than"):
        read_text(path, "JSON")
    path.write_bytes(b" " * (MOST_TEXT_BYTES - 2) + b"{}")
    assert read_text(path, "JSON").strip() == "{}"


@pytest.mark.parametrize(
    ("name", "text", "key"),
    [
        ("a.yaml", "stage: sft\ndo_train: true\nmodel_name_or_path: x\nseed: .inf\n", "seed"),
        (
            "a.json",
            '{"train_batch_size": 8, "zero_optimization": {"stage": 2, "reduce_bucket_size": NaN}}',
            "bucket_size",
        ),
        ("b.json", '{"train_batch_size": -Infinity}', "train_batch_size"),
    ],
)
def test_numbers_that_are_not_finite(
    name: str, text: str, key: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / name).write_text(text, encoding="utf-8")
    assert main(["lint", str(tmp_path / name)]) == 1
    said = capsys.readouterr().out
    assert key in said
    assert "write a finite number" in said


def test_an_infinity_as_text_is_not_a_number() -> None:
    assert as_number("Infinity") is None
    assert as_number("1e-4") == 1e-4


def test_a_seed_that_is_infinite_as_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "arguments.json"
    path.write_text('{"output_dir": "x", "seed": "Infinity", "per_device_train_batch_size": 1}', encoding="utf-8")
    assert main(["lint", str(path)]) in (0, 1)
    assert "arguments.json" in capsys.readouterr().out
