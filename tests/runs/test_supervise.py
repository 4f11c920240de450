"""The loop that starts again, as a user of `tightfit train` meets it, with a stand-in for the worker."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from train_shell import TINY, Shell, desk, shell

import patience
import warm_desk
from tightfit.cli import main
from tightfit.cli import train as cli_train
from tightfit.runs import hang, launch, own, supervise
from tightfit.runs.cause import KernelSaid
from tightfit.runs.processes import is_alive
from tightfit.runs.records import AttemptRecord, read_attempts
from tightfit.train import stop

pytestmark = pytest.mark.thorough

__all__ = ["shell"]

UNSTEADY = Path(__file__).with_name("unsteady.py")
LONG = ("--seq", "2048")
"""Activations are most of what is held, so that a smaller micro batch holds less."""


class Unsteady:
    """`tightfit train` with a worker that breaks down as a script says."""

    def __init__(self, shell: Shell) -> None:
        self.shell, self.folder = shell, shell.folder / "output"

    def train(self, script: str, *words: str) -> tuple[int, str, str]:
        self.shell.monkeypatch.setattr(cli_train, "WORKER", (sys.executable, str(UNSTEADY), script))
        code = main(["train", *TINY, *words])
        out, err = self.shell.capsys.readouterr()
        return code, out, err

    @property
    def records(self) -> tuple[AttemptRecord, ...]:
        return read_attempts(self.folder)

    @property
    def events(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / "events.jsonl").read_text().splitlines()]

    @property
    def actions(self) -> list[str | None]:
        return [None if record.next is None else record.next.action for record in self.records]

    def left_nothing(self) -> bool:
        cache = self.shell.folder.parent / "cache"
        return not (self.folder / "lock").exists() and not list(cache.rglob("reservations/*.json"))


@pytest.fixture
def unsteady(shell: Shell) -> Unsteady:
    """With ranks that are silent by the tests' clock, which hardly moves while they wait for a processor."""
    shell.monkeypatch.setattr(own, "Watch", partial(own.Watch, clock=patience.now))
    shell.monkeypatch.setattr(supervise, "FIRST_WAIT_S", 0.1)
    shell.monkeypatch.setattr(launch, "INSIST_S", 0.3)
    shell.monkeypatch.setattr(stop, "SAME_S", 0.1)  # of ranks, which are forked
    return Unsteady(shell)


def test_a_killed_rank_is_started_again_from_the_newest_checkpoint(unsteady: Unsteady) -> None:
    unsteady.shell.monkeypatch.setattr(supervise, "FIRST_WAIT_S", 1.0)
    code, out, err = unsteady.train("kill@6/good")
    assert (code, err) == (0, "")
    first, second = unsteady.records
    assert (first.state, first.first_step, first.last_step, first.kept_step) == ("failed", 0, 5, 4)
    assert first.exit_codes[1] == -9
    assert first.cause is not None
    assert first.cause.rank == 1
    assert (second.state, second.first_step, second.last_step, second.cause) == ("done", 4, 8, None)
    assert first.lost_steps == 1
    assert "✗ attempt 1 failed after step 5 (the checkpoint of step 4 is kept): " in out
    assert " → same plan, in 1 s: " in out
    assert "→ attempt 2: " in out
    assert "It took 2 attempts" in out
    assert unsteady.left_nothing()


@pytest.mark.parametrize(("readable", "kind"), [(True, "preempted"), (False, "host-oom")])
def test_the_kernel_is_asked_why_a_rank_was_killed(unsteady: Unsteady, readable: bool, kind: str) -> None:
    """Where its record can be read and says nothing of memory, it was not for want of it."""
    record = SimpleNamespace(said=lambda pids: KernelSaid(readable=readable), close=lambda: None)
    unsteady.shell.monkeypatch.setattr(own, "KernelRecord", lambda: record)
    unsteady.train("kill@6/good", "--max-attempts", "1")
    assert unsteady.records[0].cause is not None
    assert unsteady.records[0].cause.kind == kind


@pytest.mark.thorough
def test_the_record_keeps_logs_and_words_of_what_failed(unsteady: Unsteady) -> None:
    unsteady.train("bug@1/good")
    assert len(unsteady.records) == 1
    code, _, _ = unsteady.train("nccl@3/good")
    assert code == 0
    kept = unsteady.folder / "attempts/001"
    assert "DistBackendError" in (kept / "rank-1.log").read_text()
    assert (kept / "errors/rank-1.json").exists()
    assert sorted(os.listdir(unsteady.folder / "logs")) == ["rank-0.log", "rank-1.log"]
    assert not (unsteady.folder / "errors").exists()
    assert not (unsteady.folder / "heartbeats").exists()
    assert [event["event"] for event in unsteady.events if event["event"].startswith("attempt")] == [
        "attempt_failed",
        "attempt",
    ]
    assert (unsteady.folder / "earlier/1/attempts/001.json").exists(), "the first start's records made way with it"


def test_a_bug_ends_it_at_once_with_its_traceback(unsteady: Unsteady) -> None:
    code, _, err = unsteady.train("bug@5/good")
    assert code == 3
    assert unsteady.actions == ["stop"]
    assert "  Traceback (most recent call last):" in err
    assert "  KeyError: 'no_such_field'" in err
    assert "there is a checkpoint of step 4" in err


def test_what_the_user_has_to_change_is_one_sentence_still(unsteady: Unsteady) -> None:
    code, _, err = unsteady.train("kill@3/user@5")
    assert (code, err) == (2, "tightfit: line 17 of data.jsonl is not JSON: mend it\n")
    assert unsteady.actions == ["same plan", "stop"]
    assert unsteady.folder.exists()


def test_no_progress_twice_is_enough(unsteady: Unsteady) -> None:
    code, _, err = unsteady.train("kill@3")
    assert code == 3
    assert unsteady.actions == ["same plan", "stop"]
    assert "What was tried:" in err
    assert "Attempt 1, " in err
    assert "Nothing more was tried: " in err
    assert unsteady.left_nothing()


@pytest.mark.thorough
def test_progress_between_failures_is_no_reason_to_stop(unsteady: Unsteady) -> None:
    code, _, _ = unsteady.train("kill@3/kill@5/kill@7/good", "--max-attempts", "2")
    assert code == 0
    assert [record.first_step for record in unsteady.records] == [0, 2, 4, 6]


def test_one_attempt_alone(unsteady: Unsteady) -> None:
    code, _, err = unsteady.train("kill@3/good", "--max-attempts", "1")
    assert code == 3
    assert len(unsteady.records) == 1
    assert "--max-attempts 1 allows no second one" in " ".join(err.split())


def test_memory_that_is_missing_changes_the_plan_and_not_the_batch(unsteady: Unsteady) -> None:
    code, out, err = unsteady.train("oom@6/good", *LONG)
    assert (code, err) == (0, "")
    first, second = unsteady.records
    assert first.cause is not None
    assert first.cause.kind == "device-oom"
    assert first.next is not None
    assert first.next.action == "smaller plan"
    assert first.next.changed
    assert (first.effective_batch, second.effective_batch) == (8, 8)
    assert second.first_step == 4
    before = json.loads((unsteady.folder / "attempts/001/plan/worker.json").read_text())
    after = json.loads((unsteady.folder / "plan/worker.json").read_text())
    assert before["levers"] != after["levers"]
    assert before["training"] == after["training"]
    assert after["predicted"]["gpu"]["peak_bytes"] < before["predicted"]["gpu"]["peak_bytes"]
    assert f"→ attempt 2: {second.plan}; {first.next.changed[0]}" in out


@pytest.mark.thorough
def test_what_is_pinned_is_not_unpinned(unsteady: Unsteady) -> None:
    pins = ("--engine", "zero0", "--micro-batch", "1", "--accum", "4", "--checkpointing", "full", "--loss", "fused")
    code, _, err = unsteady.train("oom@6", *pins)
    assert code == 3
    assert "pinned" in " ".join(err.split())
    assert "same plan" not in unsteady.actions or len(unsteady.records) == 2


def of_a_written_plan(unsteady: Unsteady, *words: str) -> tuple[int, str]:
    assert main(["plan", *TINY, *LONG, *words, "--write", "planned"]) == 0
    unsteady.shell.capsys.readouterr()
    unsteady.shell.monkeypatch.setattr(cli_train, "WORKER", (sys.executable, str(UNSTEADY), "oom@6/good"))
    code = main(["train", "--plan", "planned", "--output", "output"])
    return code, " ".join(unsteady.shell.capsys.readouterr().err.split())


@pytest.mark.parametrize("words", [(), ("--method", "lora", "--lora-rank", "4", "--learning-rate", "3e-4")])
def test_a_plan_that_was_written_before_gives_way_too(unsteady: Unsteady, words: tuple[str, ...]) -> None:
    code, err = of_a_written_plan(unsteady, *words)
    assert (code, err) == (0, "")
    assert unsteady.actions == ["smaller plan", None]
    assert [record.effective_batch for record in unsteady.records] == [8, 8]
    before = json.loads((unsteady.shell.folder / "planned/worker.json").read_text())
    after = json.loads((unsteady.folder / "plan/worker.json").read_text())
    less = [tree["predicted"]["gpu"].pop("peak_bytes") for tree in (after, before)]
    assert less[0] < less[1]
    assert after["saving"].pop("folder") == str(unsteady.folder)
    assert before["saving"].pop("folder") != str(unsteady.folder)
    for same in ("model", "training", "data", "lora", "evaluation", "saving", "timeout_s", "effective_batch", "tier"):
        assert after[same] == before[same]


def test_a_written_plan_whose_model_has_gone_says_what_to_type(unsteady: Unsteady) -> None:
    assert main(["plan", *TINY, "--write", "planned"]) == 0
    place = unsteady.shell.folder / "planned/worker.json"
    tree = json.loads(place.read_text())
    tree["model"]["source"] = "gone/config.json"
    place.write_text(json.dumps(tree))
    unsteady.shell.capsys.readouterr()
    unsteady.shell.monkeypatch.setattr(cli_train, "WORKER", (sys.executable, str(UNSTEADY), "oom@6/good"))
    assert main(["train", "--plan", "planned", "--output", "output"]) == 3
    err = " ".join(unsteady.shell.capsys.readouterr().err.split())
    assert "gone/config.json" in err
    assert "plan again for less memory with `tightfit plan … --write`" in err


@pytest.mark.thorough
def test_a_hang_is_seen_and_ended(unsteady: Unsteady) -> None:
    unsteady.shell.monkeypatch.setattr(hang, "DUMP_S", 30.0)
    began = patience.now()
    code, out, err = unsteady.train("hang@5/good", "--hang-timeout", "2s")
    assert (code, err) == (0, "")
    assert patience.now() - began < 30
    cause = unsteady.records[0].cause
    assert cause is not None
    assert (cause.kind, cause.rank, cause.phase) == ("hang", 1, "forward")
    assert any("unsteady.py" in line and "break_down" in line for line in cause.evidence)
    assert "Rank 1 gave no sign of life for 2 s in the forward pass of step 5" in out
    assert "break_down" in (unsteady.folder / "attempts/001/rank-1.log").read_text()


@pytest.mark.slow
@pytest.mark.thorough
def test_a_rank_that_is_stopped_from_outside_cannot_even_answer(unsteady: Unsteady) -> None:
    code, _, err = unsteady.train("stopped@5/good", "--hang-timeout", "2s")
    assert (code, err) == (0, "")
    cause = unsteady.records[0].cause
    assert cause is not None
    assert cause.kind == "hang"
    assert unsteady.records[0].exit_codes == (143, -9)


def test_a_disk_that_has_room_again_is_tried_again(unsteady: Unsteady) -> None:
    code, out, _ = unsteady.train("disk@5/good")
    assert code == 0
    assert unsteady.actions == ["make room", None]
    assert "there is room again" in out


def test_numbers_that_are_none_stop_it_with_the_samples(unsteady: Unsteady) -> None:
    code, _, err = unsteady.train("nan@5")
    assert code == 3
    assert unsteady.actions == ["stop"]
    assert "look at samples 3, 1, 4" in err
    assert "--allow skip-data leaves these samples out" in " ".join(err.split())


def test_a_window_is_left_out_where_that_is_allowed(unsteady: Unsteady) -> None:
    code, out, _ = unsteady.train("nan@5", "--allow", "skip-data")
    assert code == 0
    assert unsteady.actions == ["skip data", None]
    assert "! step 5 is left out" in out
    assert 5 not in [event["step"] for event in unsteady.events if event["event"] == "step" and event.get("loss")]


def test_a_ruined_checkpoint_is_not_gone_on_from(unsteady: Unsteady) -> None:
    code, _, _ = unsteady.train("nan@5/nan@6/good", "--allow", "skip-data")
    assert code == 0
    assert unsteady.actions == ["skip data", "older checkpoint", None]
    assert [record.first_step for record in unsteady.records] == [0, 4, 2]


def test_a_rank_that_falls_behind_the_saved_model_costs_nothing(unsteady: Unsteady) -> None:
    code, out, _ = unsteady.train("after@9")
    assert code == 0
    assert len(unsteady.records) == 1
    assert "the model is saved, and then not every rank left in order" in out


def test_json_has_the_attempts(unsteady: Unsteady) -> None:
    code, out, err = unsteady.train("kill@3/good", "--json")
    assert (code, err) == (0, "")
    told = json.loads(out)
    assert [each["state"] for each in told["attempts"]] == ["failed", "done"]
    assert told["attempts"][0]["cause"]["kind"] in ("preempted", "host-oom")
    assert told["steps"] == 8


@pytest.mark.thorough
def test_resuming_from_elsewhere_is_for_the_first_attempt(unsteady: Unsteady) -> None:
    """What this run has saved itself comes before what it was told to begin with."""
    from stored import store

    store(unsteady.shell.folder / "other", 2)
    code, _, _ = unsteady.train("kill@3/kill@7/good", "--resume", "other")
    assert code == 0
    assert [record.first_step for record in unsteady.records] == [2, 2, 6]


# --- signals and a desk that dies ---------------------------------------------------------------------


def desk_of(unsteady: Unsteady, script: str) -> AbstractContextManager[warm_desk.Process]:
    return desk(script, *TINY, cache=unsteady.shell.folder / "cache", worker=UNSTEADY)


def wait_until(condition: Any) -> None:
    deadline = patience.now() + 30
    while not condition():
        assert patience.now() < deadline
        time.sleep(0.02)


def test_ctrl_c_while_it_waits_for_the_next_attempt(unsteady: Unsteady) -> None:
    with desk_of(unsteady, "kill@3/kill@3/kill@4") as process:
        wait_until(lambda: [record.state for record in unsteady.records] == ["failed"])
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=20)
    assert process.returncode == 130
    assert err.startswith("tightfit: interrupted after step 2; there is a checkpoint of step 2")
    assert not (unsteady.folder / "lock").exists()


@pytest.mark.thorough
def test_ctrl_c_in_a_later_attempt_saves_as_in_the_first(unsteady: Unsteady) -> None:
    with desk_of(unsteady, "kill@3/slow") as process:
        wait_until(lambda: len(unsteady.records) == 2 and "resumed" in [event["event"] for event in unsteady.events])
        time.sleep(0.15)
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=20)
    assert process.returncode == 4, err
    assert [record.state for record in unsteady.records] == ["failed", "stopped"]


def ranks_of(process: warm_desk.Process) -> list[int]:
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return [int(child) for child in children]


@pytest.mark.thorough
def test_a_desk_that_is_killed_takes_its_ranks_along_and_another_takes_over(unsteady: Unsteady) -> None:
    with desk_of(unsteady, "kill@3/hang@5") as process:
        wait_until(lambda: len(unsteady.records) == 2 and len(ranks_of(process)) == 2)
        wait_until((unsteady.folder / "checkpoints/step-00000004/manifest.json").exists)
        ranks = ranks_of(process)
        process.send_signal(signal.SIGKILL)
        process.wait(20)
    wait_until(lambda: not any(is_alive(rank, None) for rank in ranks))
    code, _, err = unsteady.train("good")
    assert (code, err) == (0, "")
    assert [(record.state, record.first_step) for record in unsteady.records] == [("done", 4)]
    assert [record.state for record in read_attempts(unsteady.folder / "earlier/1")] == ["failed", "running"]
    assert unsteady.left_nothing()


# --- bad input ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--max-attempts", "0"), "--max-attempts must be at least 1, a single start, not 0"),
        (("--max-attempts", "many"), "--max-attempts"),
        (("--hang-timeout", "soon"), "--hang-timeout takes a time such as 300s, 10m or 1h, not 'soon'"),
        (("--hang-timeout", "0"), "--hang-timeout takes a time"),
        (
            ("--nodes", "2", "--node-rank", "0", "--master-addr", "no.such.machine.invalid", "--max-attempts", "3"),
            "--master-addr no.such.machine.invalid is no machine that this one knows",
        ),
    ],
)
def test_one_sentence_for_what_makes_no_sense(unsteady: Unsteady, words: tuple[str, ...], sentence: str) -> None:
    code, out, err = unsteady.train("good", *words)
    assert (code, out) == (2, "")
    assert sentence in err
    assert err.count("\n") == 1
    assert not unsteady.folder.exists()
