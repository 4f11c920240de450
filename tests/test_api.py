"""tightfit from Python: the command line's answers, as objects that a notebook draws."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from operator import attrgetter
from pathlib import Path

import pytest

import tightfit
import warm_desk
from tightfit.job.file import JOB_FLAGS
from tightfit.types import ConfigError, UserError

pytestmark = pytest.mark.thorough

MAMBA = {"model": "1b_mamba", "gpus": "2x24GB", "host_ram": "64GB"}


def from_the_command_line(verb: str, **flags: object) -> dict[str, object]:
    words = [word for name, value in flags.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    found: dict[str, object] = json.loads(warm_desk.run(verb, "--json", *words).stdout)
    return found


def without_time(report: dict[str, object]) -> dict[str, object]:
    return {name: value for name, value in report.items() if name != "search_s"}


def test_a_plan_is_the_command_lines() -> None:
    planned = tightfit.plan(**MAMBA, seq=1024)
    assert without_time(json.loads(json.dumps(planned.report()))) == without_time(
        from_the_command_line("plan", **MAMBA, seq=1024)
    )
    assert planned.fits
    assert planned.chosen is not None
    assert planned.because


def test_an_estimate_is_the_command_lines() -> None:
    flags = {"model": "llama-3.1-8b", "engine": "zero3", "gpus": "8x24GB", "seq": 2048}
    estimated = tightfit.estimate(**flags)
    assert json.loads(json.dumps(estimated.report())) == from_the_command_line("estimate", **flags)
    assert estimated.fits is True


def test_a_job_file_and_flags_over_it(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text("model: 7b_mamba\nhardware: {gpus: 6x32GB, host_ram: 256GB}\n")
    planned = tightfit.plan(tmp_path / "job.yaml", seq=512)
    assert planned.plan.job.sequence == 512
    assert tightfit.estimate(tmp_path / "job.yaml").priced.shape.name == "7b_mamba"


def test_a_job_object() -> None:
    job = tightfit.Job(model="tiny_mamba", hardware=tightfit.Machine(gpus="2x4GB", host_ram="16GB"))
    assert tightfit.plan(job).fits
    with pytest.raises(ConfigError, match="says everything itself"):
        tightfit.plan(job, seq=1)


def test_a_job_object_is_planned_for_the_deepspeed_of_its_cards() -> None:
    job = tightfit.Job(model="qwen1.5-1.8b", hardware=tightfit.Machine(gpus="8xK100-64GB", host_ram="512GB"))
    planned = tightfit.plan(job)
    assert planned.chosen is not None
    assert planned.chosen.levers.deepspeed_version == "0.14.2"
    assert any("DeepSpeed 0.14.2, which Hygon's stack ships" in sentence for sentence in planned.because)


def test_nothing_fits_and_what_would_help() -> None:
    planned = tightfit.plan(model="1b_mamba", gpus="1x8GB", host_ram="8GB", engine="zero2")
    assert not planned.fits
    assert planned.remedies
    with pytest.raises(ConfigError, match="nothing to write"):
        planned.write("nowhere")


def test_files_are_written(tmp_path: Path) -> None:
    files = tightfit.plan(model="tiny_llama", gpus="2x24GB", host_ram="64GB").write(tmp_path / "plan")
    assert {path.name for path in files} >= {"PLAN.md", "worker.json"}


@pytest.mark.parametrize("answer", ["plan", "estimate"])
def test_a_notebook_draws_it_and_a_terminal_says_it(answer: str) -> None:
    made = getattr(tightfit, answer)(**MAMBA)
    drawn = ElementTree.fromstring(made._repr_html_())  # noqa: S314 (our own text)
    assert drawn.find(".//{http://www.w3.org/2000/svg}pattern") is not None
    assert "style=" not in made._repr_html_()
    assert "1b_mamba" in str(made)
    assert repr(made) == str(made)


def test_no_is_an_answer_too(tmp_path: Path) -> None:
    """A field of a job that is true or false, in the file and over it."""
    asked = {"packing": False, "async_save": False, "master_weights": False}
    fields = {each: attrgetter(JOB_FLAGS[each]) for each in asked}
    (tmp_path / "job.yaml").write_text(
        "model: tiny_llama\nhardware: {gpus: 2x24GB, host_ram: 64GB}\ndata: {packing: true}\n"
        "saving: {async_save: true}\nmaster_weights: true\n"
    )
    for flags, wanted in (({}, True), (asked, False), (dict.fromkeys(asked), True)):
        job = tightfit.plan(tmp_path / "job.yaml", **flags).plan.job
        assert {each: of(job) for each, of in fields.items()} == dict.fromkeys(asked, wanted)


@pytest.mark.parametrize(
    ("verb", "flags", "sentence"),
    [
        ("plan", {"modle": "x"}, "tightfit.plan has no modle: did you mean model?"),
        ("estimate", {"effective_batch": 3}, "tightfit.estimate has no effective_batch"),
        ("plan", {"model": "no-such-model-here.json"}, "there is no file or folder"),
        ("plan", {**MAMBA, "tier": "all"}, "is a comparison"),
        ("plan", {**MAMBA, "world": 0}, "--world must be at least 1"),
    ],
)
def test_mistakes_are_one_sentence(verb: str, flags: dict[str, object], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence.replace("?", r"\?")):
        getattr(tightfit, verb)(**flags)
