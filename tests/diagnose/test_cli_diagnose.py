"""`tightfit diagnose` and `tightfit explain` as a user types them."""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from sample_logs import CORPUS, HEALTHY

from tightfit.cli import main
from tightfit.runs.cause import rank_of
from tightfit.runs.processes import this_host
from tightfit.runs.records import AttemptRecord, RunRecord, write_attempt

OOM = CORPUS / "oom-logits--eight-ranks-and-a-watchdog.log"
CALM = HEALTHY / "hf-trainer.log"


@pytest.fixture(autouse=True)
def plain_screen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("NO_COLOR", "1")


def said(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = main(["diagnose", *words])
    out, err = capsys.readouterr()
    return code, out, err


def as_tree(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    _, out, _ = said(capsys, *words, "--json")
    tree = json.loads(out)
    assert isinstance(tree, dict)
    return tree


def test_a_cause(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = said(capsys, str(OOM))
    assert (code, err) == (1, "")
    assert out.startswith("The GPU ran out of memory in the loss")
    assert "Rank 5 was the first." in out
    assert "tightfit explain oom-logits" in out
    assert "9.28 GiB" in out


def test_nothing_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = said(capsys, str(CALM))
    assert code == 0
    assert out.startswith("Nothing is wrong in ")


def test_json_has_what_was_promised(capsys: pytest.CaptureFixture[str]) -> None:
    tree = as_tree(capsys, str(OOM))
    assert set(tree) == {"verdict", "also"}
    verdict = tree["verdict"]
    assert {"id", "kind", "cause", "confidence", "evidence", "fixes", "rank", "phase", "oom"} == set(verdict)
    assert verdict["id"] == "oom-logits"
    assert verdict["oom"]["asked"] == int(9.28 * 2**30)
    assert set(verdict["evidence"][0]) == {"source", "number", "text"}
    assert set(verdict["fixes"][0]) == {"text", "command", "costly"}
    assert tree["also"][0]["id"] == "watchdog-timeout"
    assert as_tree(capsys, str(CALM)) == {"verdict": None, "also": []}


def test_several_files_are_several_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    folder = CORPUS / "oom-logits--a-file-a-rank"
    verdict = as_tree(capsys, *sorted(map(str, folder.iterdir())))["verdict"]
    assert (verdict["id"], verdict["rank"]) == ("oom-logits", 3)


@pytest.mark.parametrize(
    ("name", "rank"),
    [
        ("rank-3.log", 3),
        ("log_rank12.txt", 12),
        ("attempt_0/2/stderr.log", 2),
        ("worker.1.log", 1),
        ("train.log", None),
    ],
)
def test_ranks_in_names(name: str, rank: int | None) -> None:
    assert rank_of(Path(name)) == rank


@pytest.mark.thorough
def test_a_config_chooses_the_fixes(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    config = tmp_path / "x.yaml"
    config.write_text("model_name_or_path: x\nstage: sft\nfinetuning_type: lora\ntemplate: qwen\n")
    fixes = as_tree(capsys, str(OOM), "--config", str(config))["verdict"]["fixes"]
    assert "enable_liger_kernel: true" in [fix["command"] for fix in fixes]
    config.write_text(config.read_text() + "enable_liger_kernel: true\n")
    fixes = as_tree(capsys, str(OOM), "--config", str(config))["verdict"]["fixes"]
    assert not any("fused loss" in fix["text"] for fix in fixes)


def test_an_exit_code_alone(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    empty = tmp_path / "a.log"
    empty.write_text("")
    assert as_tree(capsys, str(empty), "--exit-code", "137")["verdict"]["id"] == "killed"
    assert as_tree(capsys, str(empty), "--exit-code=-7")["verdict"]["id"] == "bus-error"
    assert as_tree(capsys, str(OOM), "--exit-code", "0")["verdict"] is None


def test_standard_input(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(OOM.read_bytes())))
    code, out, _ = said(capsys, "-")
    assert code == 1
    assert "standard input:" in out


@pytest.mark.thorough
def test_a_pipe_for_real() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tightfit", "diagnose", "-", "--json"],
        input=OOM.read_bytes(), capture_output=True, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert json.loads(done.stdout)["verdict"]["id"] == "oom-logits"
    assert done.stderr == b""


# --- a run's folder -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("planned") / "plan"
    assert main(["plan", "--model", "tiny_llama", "--gpus", "2x24GB", "--write", str(folder)]) == 0
    return folder


@pytest.fixture
def run(tmp_path: Path, plan: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    """A run of ours whose rank 1 found no memory for its loss."""
    capsys.readouterr()  # what the plan has printed
    folder = tmp_path / "run"
    shutil.copytree(plan, folder / "plan")
    (folder / "logs").mkdir()
    (folder / "logs" / "rank-0.log").write_text("step 1 loss 2.0\n")
    (folder / "logs" / "rank-1.log").write_text(
        'Traceback (most recent call last):\n  File "/job/loss.py", line 3, in loss\n'
        "    loss = F.cross_entropy(x, y)\n"
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 1 has a total capacity of "
        "23.69 GiB of which 1.20 GiB is free. Of the allocated memory 21.90 GiB is allocated by PyTorch, "
        "and 5.00 MiB is reserved "
        "by PyTorch but unallocated.\n"
    )
    RunRecord.begin(("tightfit", "train")).write(folder, state="failed", exit_code=1)
    return folder


def attempted(run: Path, number: int, *exit_codes: int) -> None:
    record = AttemptRecord(
        number=number, started="2026-01-01T00:00:00+00:00", plan="", ranks=2, effective_batch=8, exit_codes=exit_codes
    )
    assert write_attempt(run, record)


@pytest.mark.thorough
def test_a_run_is_held_against_its_plan(capsys: pytest.CaptureFixture[str], run: Path) -> None:
    tree = as_tree(capsys, str(run))
    assert (tree["verdict"]["id"], tree["verdict"]["rank"]) == ("oom-logits", 1)
    assert tree["verdict"]["evidence"][0]["source"] == "logs/rank-1.log"
    assert tree["predicted"]["phase"] == "loss"
    assert dict(tree["predicted"]["components"])["logits"] > 0
    assert "Predicted in the loss" in said(capsys, str(run))[1]


def test_a_run_that_is_done(capsys: pytest.CaptureFixture[str], run: Path) -> None:
    RunRecord.begin(("tightfit", "train")).write(run, state="done", exit_code=0)
    assert as_tree(capsys, str(run))["verdict"] is None


def test_the_last_words_of_a_rank(capsys: pytest.CaptureFixture[str], run: Path) -> None:
    (run / "logs" / "rank-1.log").write_text("")
    (run / "errors").mkdir()
    words = {"rank": 1, "kind": "user", "text": "the data hold no samples: name another --data", "time": 5.0}
    (run / "errors" / "rank-1.json").write_text(json.dumps(words))
    verdict = as_tree(capsys, str(run))["verdict"]
    assert verdict["id"] == "tightfit-user"
    assert "the data hold no samples" in verdict["cause"]


def test_the_exit_codes_of_the_last_attempt(capsys: pytest.CaptureFixture[str], run: Path) -> None:
    attempted(run, 1, 0, 0)
    attempted(run, 2, 1, -9)
    lost = "RuntimeError: [gloo/pair.cc:553] Connection closed by peer [127.0.0.1]:7841"
    (run / "logs" / "rank-0.log").write_text(f"step 1 loss 2.0\n{lost}\n")
    (run / "logs" / "rank-1.log").write_text("ready\n")
    tree = as_tree(capsys, str(run))
    assert (tree["verdict"]["id"], tree["verdict"]["rank"]) == ("killed", 1)
    assert [each["id"] for each in tree["also"]] == ["peer-lost"]


def test_torn_files_of_a_run_are_no_obstacle(capsys: pytest.CaptureFixture[str], run: Path) -> None:
    (run / "run.json").write_text('{"state": ')
    (run / "plan" / "worker.json").write_text("{}")
    tree = as_tree(capsys, str(run))
    assert tree["verdict"]["id"] == "oom-logits"
    assert "predicted" not in tree


# --- what the user has to mend ------------------------------------------------------------------


def one_sentence(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    code, out, err = said(capsys, *words)
    assert (code, out) == (2, "")
    assert err.startswith("tightfit: ")
    assert err.count("\n") == 1
    return err


def test_a_file_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert "there is no file 'nowhere.log'" in one_sentence(capsys, "nowhere.log")


def test_an_empty_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "a.log").touch()
    assert "is empty" in one_sentence(capsys, str(tmp_path / "a.log"))


def test_a_config_is_no_log_in_which_nothing_is_wrong(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "ds_config.json").write_text('{"train_batch_size": 8, "fp16": {"enabled": true}}')
    assert "no program seems to have printed" in one_sentence(capsys, str(tmp_path / "ds_config.json"))


def test_a_binary_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "a.log").write_bytes(bytes(range(32)) * 100)
    assert "is not a log" in one_sentence(capsys, str(tmp_path / "a.log"))
    (tmp_path / "a.log").write_bytes(hashlib.shake_256(b"noise").digest(4096))
    assert "is not a log" in one_sentence(capsys, str(tmp_path / "a.log"))


def test_a_packed_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "a.log.gz").write_bytes(b"\x1f\x8b\x08")
    assert "zcat" in one_sentence(capsys, str(tmp_path / "a.log.gz"))


def test_a_folder_that_is_no_run(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert "is no run's folder" in one_sentence(capsys, str(tmp_path))
    (tmp_path / "a.log").touch()
    assert "a.log …" in one_sentence(capsys, str(tmp_path))
    assert "is a folder" in one_sentence(capsys, str(OOM), str(tmp_path))


AS_NOBODY = """
import os, sys
from tightfit.cli import main
main(["diagnose", sys.argv[1]])  # so that everything is loaded before the rights are gone
if os.geteuid() == 0:
    os.setuid(65534)
sys.exit(str([main(["diagnose", log]) for log in sys.argv[2:]]))
"""


@pytest.mark.thorough
def test_what_may_not_be_read() -> None:
    folder = Path(tempfile.mkdtemp(prefix="tightfit-test-"))
    try:
        folder.chmod(0o755)
        logs = [folder / "a.log", folder / "closed" / "a.log"]
        logs[1].parent.mkdir()
        for log in logs:
            log.write_text("x")
            log.chmod(0)
        logs[1].parent.chmod(0)
        words = [sys.executable, "-c", AS_NOBODY, str(CALM), *map(str, logs)]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        said = "".join(f"tightfit: {log} cannot be read: permission denied\n" for log in logs)
        assert done.stderr == f"{said}[2, 2]\n"
    finally:
        logs[1].parent.chmod(0o755)
        shutil.rmtree(folder)


@pytest.mark.parametrize("word", ["a\0b", "x" * 5000, ""])
def test_names_that_no_file_has(capsys: pytest.CaptureFixture[str], word: str) -> None:
    one_sentence(capsys, word)


def test_a_hole_of_five_gigabytes(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with (tmp_path / "a.log").open("wb") as file:
        file.truncate(5 * 10**9)
    assert "is not a log" in one_sentence(capsys, str(tmp_path / "a.log"))


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["--exit-code", "x"], "--exit-code takes a number"),
        (["--exit-code", "999"], "--exit-code takes a number"),
        (["--config", "nowhere.json"], "cannot read nowhere.json"),
        (["--exitcode", "1"], "did you mean --exit-code?"),
    ],
)
def test_flags_that_are_wrong(capsys: pytest.CaptureFixture[str], words: list[str], part: str) -> None:
    assert part in one_sentence(capsys, str(OOM), *words)


# --- explain ------------------------------------------------------------------------------------


def test_explain(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "oom-logits"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("oom-logits: The logits do not fit")
    assert "A special case of device-oom." in out


@pytest.mark.thorough
def test_explain_all(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "list"]) == 0
    assert capsys.readouterr().out.count("device-oom ") > 10
    assert main(["explain", "list", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)) > 60


def test_explain_a_misspelt_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "oom-logit"]) == 2
    assert "did you mean oom-logits?" in capsys.readouterr().err


# --- how a run ended, where its logs do not say it ------------------------------------------------


def ended(run: Path, state: str, pid: int, code: int | None) -> None:
    """Beside logs without a fault and one checkpoint, the record of such an end."""
    for log in (run / "logs").iterdir():
        log.write_text("step 1 loss 2.0\n")
    attempted(run, 1, code or 1, code or 1)
    checkpoint = run / "checkpoints" / "step-00000040"
    checkpoint.mkdir(parents=True)
    (checkpoint / "manifest.json").write_text("{}")
    record = {"command": ["tightfit", "train"], "pid": pid, "host": this_host(), "state": state, "exit_code": code}
    times = {"started": "2026-01-01T00:00:00+00:00", "ended": "2026-01-01T00:01:00+00:00" if code else None}
    (run / "run.json").write_text(json.dumps(record | times))


def test_a_run_that_was_asked_to_stop(capsys: pytest.CaptureFixture[str], run: Path) -> None:
    ended(run, "stopped", 1, 4)
    code, out, _ = said(capsys, str(run))
    assert code == 0
    assert "The run was asked to stop, and did: the checkpoint of step 40 is kept" in " ".join(out.split())
    assert as_tree(capsys, str(run))["run"]["well"] is True


def test_a_run_whose_own_process_was_killed(capsys: pytest.CaptureFixture[str], run: Path) -> None:
    gone = subprocess.Popen([sys.executable, "-c", "pass"])
    gone.wait()
    ended(run, "running", gone.pid, None)
    code, out, _ = said(capsys, str(run))
    assert code == 1
    assert f"process {gone.pid} has gone without a word" in " ".join(out.split())
    assert "the same command goes on from there" in " ".join(out.split())
    assert "Nothing is wrong" not in out


def test_a_run_that_still_goes(capsys: pytest.CaptureFixture[str], run: Path) -> None:
    ended(run, "running", os.getpid(), None)
    record = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps(record | {"started": "2099-01-01T00:00:00+00:00"}))
    code, out, _ = said(capsys, str(run))
    assert (code, out.splitlines()[0]) == (0, "The run is still going.")
