"""How often a checkpoint is written and how many stay, in the words that people have for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tightfit.job import Job, Saving
from tightfit.job.file import dump_job, job_faults, job_from_flags, read_job
from tightfit.types import ConfigError


def saving_of(tmp_path: Path, text: str) -> Saving:
    path = tmp_path / "job.yaml"
    path.write_text(f"model: tiny_llama\n{text}")
    read = read_job(path)
    assert read.said == ()
    return read.job.saving


def refusal(tmp_path: Path, text: str) -> str:
    with pytest.raises(ConfigError) as refused:
        saving_of(tmp_path, text)
    assert [str(fault) for fault in job_faults(tmp_path / "job.yaml")] == [str(refused.value)]
    return str(refused.value)


@pytest.mark.parametrize(
    ("block", "saving"),
    [
        ("{every: 200}", Saving(every_steps=200)),
        ("{every: '200'}", Saving(every_steps=200)),
        ("{every: 1_000}", Saving(every_steps=1000)),
        ("{every: 10m}", Saving(every_steps=None, every_minutes=10.0)),
        ("{every: 1h}", Saving(every_steps=None, every_minutes=60.0)),
        ("{every: 1h 30m}", Saving(every_steps=None, every_minutes=90.0)),
        ("{every: 90s}", Saving(every_steps=None, every_minutes=1.5)),
        ("{every: none}", Saving(every_steps=None)),
        ("{every: null}", Saving(every_steps=None)),
        ("{every_minutes: 5}", Saving(every_steps=500, every_minutes=5.0)),
        ("{every_steps: null, every_minutes: 2.5}", Saving(every_steps=None, every_minutes=2.5)),
        ("{keep: 5}", Saving(keep_last=5)),
        ("{keep_last: 5, keep_every: 1000}", Saving(keep_last=5, keep_every=1000)),
        ("{save_total_limit: 4}", Saving(keep_last=4)),
        ("{async_save: false}", Saving(async_save=False)),
    ],
)
def test_words_of_a_job_file(tmp_path: Path, block: str, saving: Saving) -> None:
    assert saving_of(tmp_path, f"saving: {block}\n") == saving


def test_words_of_the_form_of_training_scripts(tmp_path: Path) -> None:
    text = "training:\n  save_every: 15m\n  save_total_limit: 3\n  keep_every: 100\n"
    assert saving_of(tmp_path, text) == Saving(every_steps=None, every_minutes=15.0, keep_last=3, keep_every=100)
    assert saving_of(tmp_path, "training: {save_steps: 50, keep_last: 1}\n") == Saving(every_steps=50, keep_last=1)


FORMS = "must be a number of steps such as 500, a time such as 10m, or none, not"


@pytest.mark.parametrize(
    ("block", "sentence"),
    [
        ("{every: often}", f"saving.every in job.yaml {FORMS} 'often'"),
        ("{every: 0}", f"saving.every in job.yaml {FORMS} 0"),
        ("{every: 2.5}", f"saving.every in job.yaml {FORMS} 2.5"),
        ("{every: -5}", f"saving.every in job.yaml {FORMS} -5"),
        ("{every: 0s}", f"saving.every in job.yaml {FORMS} '0s'"),
        ("{every: true}", f"saving.every in job.yaml {FORMS} true"),
        ("{every: [1]}", f"saving.every in job.yaml {FORMS} [1]"),
        ("{every: 5, every_steps: 5}", "saving.every and saving.every_steps in job.yaml say the same thing: keep one"),
        ("{keep: 5, keep_last: 5}", "saving.keep and saving.keep_last in job.yaml say the same thing: keep one"),
        ("{keep: 5, save_total_limit: 5}", "saving.save_total_limit and saving.keep in job.yaml say the same thing"),
        ("{keep: 0}", "saving.keep in job.yaml must be a whole number of at least 1, not 0"),
        ("{every_minutes: 0}", "saving.every_minutes in job.yaml must be a number above 0, not 0"),
        ("{keep_every: 0}", "saving.keep_every in job.yaml must be a whole number of at least 1, not 0"),
        ("{kept: 3}", "unknown field 'saving.kept' in job.yaml"),
    ],
)
def test_what_is_wrong_names_the_word_that_was_written(tmp_path: Path, block: str, sentence: str) -> None:
    assert sentence in refusal(tmp_path, f"saving: {block}\n")


@pytest.mark.parametrize(
    ("lines", "faults"),
    [
        ("sequence: x\nsaving: {every: often}", ["saving.every", "sequence"]),
        ("num_gpus: training.epochs\ntraining: {epochs: 2}", ["num_gpus"]),
        (
            "training: {learning-rate: 1, foo_bar: 3}",
            ["unknown field 'training.learning-rate'", "unknown field 'training.foo_bar'"],
        ),
    ],
)
def test_a_fault_hides_no_other_and_is_said_once(tmp_path: Path, lines: str, faults: list[str]) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(f"model: tiny_llama\n{lines}\n")
    assert [str(fault).partition(" in ")[0] for fault in job_faults(path)] == faults


def test_flags_win_over_a_file_and_speak_of_themselves() -> None:
    base = Job(model="tiny_llama", saving=Saving(every_steps=200, every_minutes=3.0, keep_last=7))
    job = job_from_flags({"save_every": "1h", "keep_every": 50, "async_save": False}, base)
    assert job.saving == Saving(every_steps=None, every_minutes=60.0, keep_last=7, keep_every=50, async_save=False)
    assert job_from_flags({"save_every": "none"}, base).saving == Saving(every_steps=None, keep_last=7)
    assert job_from_flags({}, base).saving == base.saving
    with pytest.raises(ConfigError, match=r"^--save-every must be a number of steps"):
        job_from_flags({"save_every": "often"}, base)
    with pytest.raises(ConfigError, match=r"^--keep-last must be a whole number of at least 1, not 0"):
        job_from_flags({"keep_last": 0}, base)


def test_a_job_comes_back_from_what_is_written_down() -> None:
    job = job_from_flags({"model": "tiny_llama", "save_every": "10m"})
    assert dump_job(job)["saving"] == {"every_steps": None, "every_minutes": 10.0}
