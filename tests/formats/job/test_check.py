"""Job files: everything that is wrong at once, each with its field, what is wrong and what it takes."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from tightfit.cli.lint import lint as lint_verb
from tightfit.formats.lint import lint
from tightfit.job.file import job_faults, read_job
from tightfit.types import ConfigError


def file(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(textwrap.dedent(text).lstrip("\n"), encoding="utf-8")
    return path


def said(folder: Path, text: str, name: str = "job.yaml") -> list[tuple[str, str, str]]:
    return [(found.place, str(found.what), str(found.fix)) for found in lint(file(folder, name, text), kind="job")]


def test_all_that_is_wrong_is_said_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = """
        model: 7b_mamba
        timeout: 5 apples
        sequenc: 12
        epochs: 0
        lora: {rank: x, rnk: 4}
        levers: {engin: zero3, micro_batch: 0, seq: 12}
    """
    path = file(tmp_path, "job.yaml", text)
    places = [(found.line, found.place) for found in lint(path)]
    assert places == [
        (2, "timeout"),
        (3, "sequenc"),
        (4, "epochs"),
        (5, "lora.rnk"),
        (5, "lora.rank"),
        (6, "levers.engin"),
        (6, "levers.micro_batch"),
        (6, "levers.seq"),
    ]
    assert lint_verb([str(path)]) == 1
    printed = capsys.readouterr().out
    assert "`timeout`: '5 apples' is no time.\n  Fix: write 12h, 90m or 1h30m." in printed
    assert "`epochs` must be a number above 0, not 0.\n  Fix: write a number above 0." in printed
    assert "Unknown field 'lora.rnk'.\n  Fix: write lora.rank." in printed
    with pytest.raises(ConfigError) as raised:
        read_job(path)
    assert str(raised.value) in map(str, job_faults(path))


def test_the_other_form_of_job_file_too(tmp_path: Path) -> None:
    text = """
        model_type: mamba
        num_gpus: 4
        model: {d_model: 64, n_layers: 2, vocab_size: 100}
        training: {batch_size: 0, learnig_rate: 1, foo_bar: 3}
    """
    assert said(tmp_path, text) == [
        ("training.learnig_rate", "unknown field 'training.learnig_rate'", "write training.learning_rate"),
        ("training.foo_bar", "unknown field 'training.foo_bar'", "leave it out, or see `tightfit schema --table`"),
        (
            "training.batch_size",
            "`training.batch_size` must be at least 1, not 0",
            "write a number of at least 1",
        ),
    ]


@pytest.mark.parametrize(
    ("line", "what", "fix"),
    [
        ("method: fully", "`method` knows no 'fully'", "write full"),
        ("method: quux", "`method` knows no 'quux'", "write full, lora or qlora"),
        ("master_weights: 12", "`master_weights` must be true or false, not 12", "write true or false"),
        ("lora: 12", "`lora` must be a block of fields, not 12", "write a block of fields"),
        ("hardware: {gpu_ids: [0, 0]}", "`hardware.gpu_ids` is [0, 0] and names a GPU twice", "name each once"),
        ("learning_rate: .inf", "`learning_rate` has inf, which no job can have", "write a plain number or text"),
    ],
)
def test_a_fix_names_what_the_field_takes(tmp_path: Path, line: str, what: str, fix: str) -> None:
    assert [each[1:] for each in said(tmp_path, f"model: 7b_mamba\n{line}")] == [(what, fix)]


def test_fields_keep_their_spelling_at_the_beginning_of_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lint_verb([str(file(tmp_path, "m.yaml", "model: 7b_mamba\nmethod: full\nlora: {rank: 4}\n"))])
    assert "\n  `lora` is without effect: full training has no adapters.\n" in capsys.readouterr().out


def test_what_is_no_job_at_all(tmp_path: Path) -> None:
    path = file(tmp_path, "job.json", '{"model": "7b_mamba",\n "method": "full" // all\n}')
    (found,) = lint(path, kind="job")
    assert (found.rule, found.severity) == ("json-comments", "error")
    assert str(found.fix) == "take out the comments and the commas before a closing bracket, first in line 2"
    assert said(tmp_path, "sequence: 12")[0][2].startswith("add `model:` with a preset")


def test_a_right_job_has_no_faults(tmp_path: Path) -> None:
    path = file(tmp_path, "job.yaml", textwrap.dedent("model: 7b_mamba\nhardware: {gpus: 6x32GB}\n"))
    assert job_faults(path) == ()
