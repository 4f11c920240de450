"""`tightfit train` and its checkpoints: where it begins, what is passed on, how it goes on after it was stopped."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "runs"))

from stored import store
from train_shell import TINY, Shell, shell, told

from tightfit.cli import main
from tightfit.runs.checkpoints import MANIFEST
from tightfit.start.train import asks_for_more

pytestmark = pytest.mark.thorough

__all__ = ["shell"]

OLD = '{"event": "step", "step": 99, "loss": 1.0}\n'


def unfinished(shell: Shell, name: str = "output", *steps: int) -> Path:
    run = shell.folder / name
    for step in steps or (100, 200):
        store(run, step)
    (run / "run.json").write_text("{}")
    (run / "events.jsonl").write_text(OLD)
    return run


def flat(text: str) -> str:
    return " ".join(text.split())


# --- where it begins ----------------------------------------------------------------------------


def test_a_run_with_checkpoints_goes_on(shell: Shell) -> None:
    run = unfinished(shell)
    out = shell.run("options", *TINY)
    assert f"{run} holds checkpoints up to step 200: the run goes on from the newest whole one; --resume none" in flat(
        out
    )
    assert told(run)["arguments"] == ["--resume", "auto"]
    assert (run / "events.jsonl").read_text().startswith(OLD)
    assert sorted(os.listdir(run / "checkpoints")) == ["step-00000100", "step-00000200"]
    assert (run / "earlier/1/run.json").read_text() == "{}"
    assert "step 99" not in out, "the events of the earlier start are not shown again"


def from_deepspeed(folder: Path, *tags: str, latest: str | None = None) -> Path:
    """A checkpoint of another program, as far as its names go."""
    for tag in tags:
        (folder / tag).mkdir(parents=True)
        (folder / tag / "mp_rank_00_model_states.pt").touch()
    (folder / "zero_to_fp32.py").touch()
    if latest is not None:
        (folder / "latest").write_text(f"{latest}\n")
    return folder


@pytest.mark.parametrize("latest", ["global_step50", "../../etc", None])
def test_a_deepspeed_checkpoint_of_another_program(shell: Shell, latest: str | None) -> None:
    saved = from_deepspeed(shell.folder / "theirs", "global_step50", "global_step100", latest=latest)
    newest = saved / ("global_step50" if latest == "global_step50" else "global_step100")
    out = shell.run("options", *TINY, "--load_checkpoint", str(saved), "--trust-pickle")
    assert f"The run goes on from {newest}" in flat(out)
    assert told(shell.folder / "output")["arguments"] == ["--resume", str(newest), "--trust-pickle"]


def test_one_of_several_deepspeed_checkpoints(shell: Shell) -> None:
    one = from_deepspeed(shell.folder / "theirs", "global_step50", "global_step100") / "global_step50"
    assert f"The run goes on from {one}" in flat(shell.run("options", *TINY, "--resume", str(one)))
    assert told(shell.folder / "output")["arguments"] == ["--resume", str(one)]


def test_trust_without_a_checkpoint_to_trust(shell: Shell) -> None:
    assert "--trust-pickle is for a DeepSpeed checkpoint: name one with --resume" in shell.refused(
        *TINY, "--trust-pickle"
    )


def test_a_new_run_says_nothing_about_it(shell: Shell) -> None:
    assert "goes on" not in shell.run("options", *TINY)
    assert told(shell.folder / "output")["arguments"] == ["--resume", "auto"]


def test_begun_anew(shell: Shell) -> None:
    run = unfinished(shell)
    assert "goes on" not in shell.run("options", *TINY, "--resume", "none")
    assert told(run)["arguments"] == ["--resume", "none"]
    assert not (run / "checkpoints").exists()
    assert sorted(os.listdir(run / "earlier/1/checkpoints")) == ["step-00000100", "step-00000200"]


@pytest.mark.parametrize(
    ("words", "passed"),
    [
        (("--resume", "other"), "other"),
        (("--resume", "other/checkpoints"), "other"),
        (("--load_checkpoint", "other/checkpoints/step-00000100"), "other/checkpoints/step-00000100"),
        (("--load-checkpoint=other/checkpoints/step-00000100/",), "other/checkpoints/step-00000100"),
    ],
)
def test_a_checkpoint_by_its_path(shell: Shell, words: tuple[str, ...], passed: str) -> None:
    unfinished(shell, "other")
    out = shell.run("options", *TINY, *words, "--resume_anyway")
    path = shell.folder / passed
    assert f"The run goes on from {path}." in flat(out)
    assert told(shell.folder / "output")["arguments"] == ["--resume", str(path), "--resume-anyway"]


def test_a_copied_checkpoint_needs_its_name(shell: Shell) -> None:
    copied = store(shell.folder / "other", 100).rename(shell.folder / "copied")
    assert "under another name: rename it to step-00000100" in shell.refused(*TINY, "--resume", "copied")
    named = copied.rename(shell.folder / "step-00000100")
    shell.run("options", *TINY, "--resume", named.name)
    assert told(shell.folder / "output")["arguments"] == ["--resume", str(named)]


def test_paths_that_lead_nowhere(shell: Shell) -> None:
    (store(shell.folder / "torn", 100) / MANIFEST).unlink()
    (shell.folder / "empty").mkdir()
    before = sorted(os.listdir(shell.folder))
    assert "there is nothing at" in shell.refused(*TINY, "--resume", "nowhere")
    assert "`tightfit checkpoints" in shell.refused(*TINY, "--resume", "torn")
    one = shell.refused(*TINY, "--resume", "torn/checkpoints/step-00000100")
    assert "has no manifest.json, so it was never finished" in one
    assert "is no checkpoint and no run with checkpoints" in shell.refused(*TINY, "--resume", "empty")
    assert "not nothing" in shell.refused(*TINY, "--resume", " ")
    assert sorted(os.listdir(shell.folder)) == before


def test_a_finished_run_is_refused_whatever_its_checkpoints(shell: Shell) -> None:
    run = unfinished(shell)
    (run / "model").mkdir()
    assert "holds a finished run" in shell.refused(*TINY)
    unfinished(shell, "other")
    assert "holds a finished run" in shell.refused(*TINY, "--resume", "other")
    shell.run("options", *TINY, "--resume", str(run), "--output", "new")
    assert told(shell.folder / "new")["arguments"] == ["--resume", str(run)]


def test_a_start_in_vain_leaves_checkpoints_and_events(shell: Shell) -> None:
    run = unfinished(shell)
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    code, _, err = shell.train("user", *TINY)
    assert (code, err) == (2, "tightfit: line 17 of data.jsonl is not JSON: mend it\n")
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


def test_a_dry_run_says_it_and_writes_nothing(shell: Shell) -> None:
    run = unfinished(shell)
    before = sorted(run.rglob("*"))
    assert "holds checkpoints up to step 200" in flat(shell.run("good", *TINY, "--dry-run"))
    assert sorted(run.rglob("*")) == before


def test_a_written_plan_goes_on_too(shell: Shell) -> None:
    assert main(["plan", *TINY, "--scan", "torch", "--write", "planned"]) == 0
    unfinished(shell, "elsewhere")
    out = shell.run("options", "--plan", "planned", "--output", "elsewhere", "--resume-anyway")
    assert "holds checkpoints up to step 200" in flat(out)
    assert told(shell.folder / "elsewhere")["arguments"] == ["--resume", "auto", "--resume-anyway"]
    assert "--save-every" in shell.refused("--plan", "planned", "--save-every", "5")


# --- how often ----------------------------------------------------------------------------------


def test_what_is_written_for_the_worker(shell: Shell) -> None:
    words = ("--save_every", "10m", "--keep-last", "3", "--keep_every", "100", "--no-async-save")
    shell.run("good", *TINY, *words)
    saving = json.loads((shell.folder / "output/plan/worker.json").read_text())["saving"]
    assert saving == {
        "folder": str(shell.folder / "output"),
        "every_steps": None,
        "every_minutes": 10.0,
        "keep_last": 3,
        "keep_every": 100,
        "async_save": False,
    }


def test_flags_win_over_the_job_file(shell: Shell) -> None:
    Path("job.yaml").write_text("model: tiny_llama\nsequence: 32\nmax_steps: 6\nsaving: {every: 1h, keep: 5}\n")
    shell.run("good", "job.yaml", "--save-every", "50")
    saving = json.loads((shell.folder / "output/plan/worker.json").read_text())["saving"]
    assert (saving["every_steps"], saving["every_minutes"], saving["keep_last"]) == (50, None, 5)
    assert saving["async_save"] is True


# --- how it ends --------------------------------------------------------------------------------


def test_events_of_checkpoints_are_shown(shell: Shell) -> None:
    unfinished(shell)
    out = shell.run("resuming", *TINY)
    for line in (
        "! step-00000200 was passed over: model.safetensors is missing",
        "✓ going on from step 100 (step-00000100, written by zero2 on 4 ranks; changed since: 2 ranks instead of 4)",
        "✓ checkpoint at step 102, 1.00 GiB in 9 s, of which the training waited 0.5 s",
        "✗ NO CHECKPOINT at step 104: the disk is full; the training goes on",
        "from step 100 on in this start",
    ):
        assert line in flat(out), line


def test_the_summary_for_programs_names_them(shell: Shell) -> None:
    unfinished(shell)
    report = json.loads(shell.run("resuming", *TINY, "--json"))
    assert report["resumed_from"] == {"step": 100, "folder": "step-00000100"}
    assert report["checkpoint"] == {"step": 102, "folder": "step-00000102"}


@pytest.mark.parametrize(
    ("words", "how"),
    [((), "the same command goes on"), (("--resume", "none"), "the same command without --resume none goes on")],
)
def test_a_run_that_stopped_says_how_to_go_on(shell: Shell, words: tuple[str, ...], how: str) -> None:
    code, _, err = shell.train("stopped", *TINY, *words)
    assert code == 4
    assert err == f"tightfit: stopped after step 2 and saved a checkpoint: {how} from there\n"
    run = shell.folder / "output"
    record = json.loads((run / "run.json").read_text())
    assert (record["state"], record["exit_code"]) == ("stopped", 4)
    assert "holds checkpoints up to step 2:" in flat(shell.run("options", *TINY))


def test_a_run_that_failed_says_what_is_safe(shell: Shell) -> None:
    code, _, err = shell.train("failing", *TINY)
    assert code == 3
    last = "tightfit: there is a checkpoint of step 2, and the same command goes on from there"
    assert err.splitlines()[-1] == last
    code, _, err = shell.train("die", *TINY, "--output", "other")
    assert "checkpoint" not in err


def test_the_help_has_the_flags_and_the_codes(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    text = flat(capsys.readouterr().out)
    for flag in ("--save-every 500|10m|1h|none", "--keep-last N", "--keep-every N", "--no-async-save"):
        assert flag in text
    assert "--resume auto|none|PATH" in text
    assert "4 asked to stop (SIGTERM, SIGUSR1, Ctrl-C, or the job's timeout) and saved a checkpoint" in text


@pytest.mark.parametrize(
    ("then", "now", "more"),
    [
        ((12, None), (16, None), True),
        ((12, None), (12, None), False),
        ((12, None), (8, None), False),
        ((None, 1), (None, 2), True),
        ((None, None), (None, 1), False),
        ((None, 1), (101, None), True),
        ((None, 1), (100, None), False),
        ((12, None), (None, 3), False),
        (("x", "y"), (None, 1), False),
    ],
)
def test_when_more_is_asked_of_a_finished_run(
    tmp_path: Path, then: tuple[object, object], now: tuple[object, object], more: bool
) -> None:
    store(tmp_path, 100)
    (tmp_path / "plan").mkdir()
    text = {
        "then": json.dumps({"schema": 1, "training": {"max_steps": then[0], "epochs": then[1]}}),
        "now": json.dumps({"schema": 1, "training": {"max_steps": now[0], "epochs": now[1]}}),
    }
    assert not asks_for_more(tmp_path, text["now"])
    (tmp_path / "plan" / "worker.json").write_text(text["then"])
    assert asks_for_more(tmp_path, text["now"]) is more


def test_a_finished_run_goes_on_when_more_steps_are_asked_for(shell: Shell) -> None:
    run = unfinished(shell)
    (run / "plan").mkdir(exist_ok=True)
    (run / "plan" / "worker.json").write_text('{"schema": 1, "training": {"max_steps": 6, "epochs": null}}')
    (run / "model").mkdir()
    assert "or ask for more steps" in shell.refused(*TINY)
    (run / "plan" / "worker.json").write_text('{"schema": 1, "training": {"max_steps": 5, "epochs": null}}')
    _, out, _ = shell.train("options", *TINY)
    assert "holds a finished run with checkpoints up to step 200, and more is asked for" in " ".join(out.split())
    assert told(run)["arguments"] == ["--resume", "auto"]
    assert (run / "earlier/1/model").is_dir()
