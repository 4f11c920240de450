"""`tightfit checkpoints` as a user meets it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "runs"))

from stored import WEIGHTS, flip, left_behind, store

from tightfit.cli import main
from tightfit.cli.checkpoints import verify
from tightfit.cli.progress import ProgressLine
from tightfit.runs.checkpoints import MANIFEST, STATE, StoredFile, digest, inventory, read_manifest

Capsys = pytest.CaptureFixture[str]

HOLD = (
    "import sys, time\n"
    "from pathlib import Path\n"
    "from tightfit.runs.lock import FolderLock\n"
    "lock = FolderLock.take(Path(sys.argv[1]))\n"
    "print('held', flush=True)\n"
    "time.sleep(600)\n"
)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Three checkpoints."""
    monkeypatch.setenv("COLUMNS", "100")
    for step in (100, 200, 300):
        store(tmp_path / "run", step, plan={"engine": "fsdp2", "world": 4, "precision": "bf16", "method": "lora"})
    return tmp_path / "run"


def said(capsys: Capsys, *words: object, code: int = 0) -> str:
    assert main(["checkpoints", *map(str, words)]) == code
    out, err = capsys.readouterr()
    assert err == ""
    return out


def refused(capsys: Capsys, *words: object) -> str:
    assert main(["checkpoints", *map(str, words)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("tightfit: ")
    assert err.count("\n") == 1
    return err


def steps(run: Path) -> list[str]:
    return sorted(os.listdir(run / "checkpoints"))


# --- the list -----------------------------------------------------------------------------------


def test_the_list(run: Path, capsys: Capsys) -> None:
    out = said(capsys, run)
    rows = [line.split() for line in out.splitlines() if line[:1].isdigit() and "checkpoints" not in line]
    assert [row[0] for row in rows] == ["300", "200", "100"]
    assert "2026-02-03 04:05:06+00:00  fsdp2 × 4, bf16, lora  complete" in out
    assert "3 checkpoints, 18.3 KiB in all." in out
    assert said(capsys, run / "checkpoints") == out


def test_the_list_names_what_is_wrong_and_still_answers(run: Path, capsys: Capsys) -> None:
    (run / "checkpoints/step-00000300" / MANIFEST).unlink()
    os.truncate(run / "checkpoints/step-00000200" / WEIGHTS, 5)
    left_behind(run, ".step-00000400.partial")
    out = said(capsys, run)
    assert out.count("NOT WHOLE") == 2
    assert "step-00000300: it has no manifest.json: its writing did not come to an end." in out
    assert "step-00000200: model.safetensors has 5 bytes instead of 4,096." in out
    assert "2 cannot be resumed" in out
    assert ".step-00000400.partial (1.0 KiB): left by a process that was killed." in out


def test_json(run: Path, capsys: Capsys) -> None:
    (run / "checkpoints/step-00000100" / STATE).unlink()
    left_behind(run, ".step-00000400.partial")
    told = json.loads(said(capsys, run, "--json"))
    assert told["run"] == str(run)
    first, _, last = told["checkpoints"]
    assert first["plan"] == {"engine": "fsdp2", "world": 4, "precision": "bf16", "method": "lora"}
    assert (first["step"], first["complete"], first["problem"], first["verified"]) == (300, True, None, False)
    assert (last["complete"], last["problem"]) == (False, "state.json is missing")
    assert told["orphans"] == [{"path": str(run / "checkpoints/.step-00000400.partial"), "bytes": 1000}]
    assert told["bytes"] == sum(each["bytes"] for each in (*told["checkpoints"], *told["orphans"]))
    assert "pruned" not in told


@pytest.mark.parametrize("plan", [None, 7, {}, {"engine": 3, "world": True}, {"engine": "\x1b[2J"}])
def test_a_plan_that_says_nothing(tmp_path: Path, capsys: Capsys, plan: object) -> None:
    store(tmp_path, 5, plan=plan)
    assert "?  complete" in said(capsys, tmp_path)


def test_a_state_that_is_no_json_is_a_problem(run: Path, capsys: Capsys) -> None:
    path = run / "checkpoints/step-00000300" / STATE
    path.write_bytes(b"{" * path.stat().st_size)
    assert "step-00000300: its state.json cannot be read." in said(capsys, run)


def test_a_run_without_checkpoints(tmp_path: Path, capsys: Capsys) -> None:
    (tmp_path / "run.json").write_text("{}")
    assert " ".join(said(capsys, tmp_path).split()) == f"There are no checkpoints in {tmp_path}."
    assert json.loads(said(capsys, tmp_path, "--json"))["checkpoints"] == []
    assert "Nothing to remove: 0 checkpoints stay." in said(capsys, tmp_path, "--prune")
    said(capsys, tmp_path, "--verify")


# --- verifying ----------------------------------------------------------------------------------


def test_verifying_what_is_whole(run: Path, capsys: Capsys) -> None:
    assert said(capsys, run, "--verify").count("verified") == 3


def test_verifying_finds_a_flipped_bit(run: Path, capsys: Capsys) -> None:
    flip(run / "checkpoints/step-00000200" / WEIGHTS)
    assert "NOT WHOLE" not in said(capsys, run)
    out = said(capsys, run, "--verify", code=1)
    assert (out.count("verified"), out.count("NOT WHOLE")) == (2, 1)
    assert "step-00000200: model.safetensors is damaged between bytes 0 and 1,365." in out
    told = json.loads(said(capsys, run, "--verify", "--json", code=1))
    assert [each["verified"] for each in told["checkpoints"]] == [True, False, True]


def test_progress_is_in_bytes_and_said_now_and_then(run: Path, capsys: Capsys) -> None:
    there, now = inventory(run), iter(range(0, 1000, 5))
    with ProgressLine(clock=lambda: next(now)) as line:
        verify(there, line)
    err = capsys.readouterr().err.splitlines()
    assert err
    assert all(re.fullmatch(r"verifying step-00000\d+: [\d.]+ KiB of [\d.]+ KiB", each) for each in err)
    with ProgressLine(quiet=True, clock=lambda: next(now)) as line:
        verify(there, line)
    assert capsys.readouterr().err == ""


# --- pruning ------------------------------------------------------------------------------------


def test_pruning_keeps_two_where_nobody_says_otherwise(run: Path, capsys: Capsys) -> None:
    before = steps(run)
    dry = said(capsys, run, "--prune", "--dry-run")
    assert "Would go (--dry-run):" in dry
    assert "step-00000100 (6.1 KiB): older than the 2 that stay." in dry
    assert "6.1 KiB would be freed; 2 checkpoints stay." in dry
    assert steps(run) == before
    out = said(capsys, run, "--prune")
    assert "Removed:" in out
    assert "6.1 KiB were freed; 2 checkpoints stay." in out
    assert steps(run) == ["step-00000200", "step-00000300"]
    assert os.listdir(run) == ["checkpoints"]
    assert "Nothing to remove: 2 checkpoints stay." in said(capsys, run, "--prune")


def test_pruning_removes_what_is_torn_and_left_and_not_whole_ones_for_it(run: Path, capsys: Capsys) -> None:
    (run / "checkpoints/step-00000300" / MANIFEST).unlink()
    left_behind(run, ".step-00000400.partial")
    (run / "checkpoints/notes.txt").write_text("mine")
    told = json.loads(said(capsys, run, "--prune", "--json"))["pruned"]
    assert [Path(each["path"]).name for each in told["removed"]] == [".step-00000400.partial", "step-00000300"]
    assert told["freed_bytes"] == sum(each["bytes"] for each in told["removed"])
    assert told["dry_run"] is False
    assert steps(run) == ["notes.txt", "step-00000100", "step-00000200"]


def test_pruning_and_verifying_together_spare_the_last_good_one(run: Path, capsys: Capsys) -> None:
    for step in (200, 300):
        flip(run / f"checkpoints/step-00000{step}" / WEIGHTS)
    said(capsys, run, "--verify", "--prune", "--keep-last", "1", code=1)
    assert steps(run) == ["step-00000100"]


@pytest.mark.parametrize(
    ("worker", "words", "left"),
    [
        ({"saving": {"keep_last": 1, "keep_every": None}}, (), ["300"]),
        ({"saving": {"keep_last": 1, "keep_every": 100}}, (), ["100", "200", "300"]),
        ({"saving": {"keep": 3}}, (), ["100", "200", "300"]),
        ({"saving": {"keep_last": 3}}, ("--keep-last", "1"), ["300"]),
        ({"saving": {"keep_last": 1}}, ("--keep_every", "200"), ["200", "300"]),
        ({"saving": {"keep_last": "many"}}, (), ["200", "300"]),
        ({"saving": []}, (), ["200", "300"]),
        ([], (), ["200", "300"]),
    ],
)
def test_what_the_run_was_told_to_keep(
    run: Path, capsys: Capsys, worker: object, words: tuple[str, ...], left: list[str]
) -> None:
    (run / "plan").mkdir()
    (run / "plan/worker.json").write_text(json.dumps(worker))
    said(capsys, run, "--prune", *words)
    assert steps(run) == [f"step-00000{step}" for step in left]


def test_a_newer_versions_checkpoint_is_not_pruned(run: Path, capsys: Capsys) -> None:
    path = run / "checkpoints/step-00000100" / MANIFEST
    tree = json.loads(path.read_text())
    del tree["itself"]
    tree["schema"] = 9
    own = digest(json.dumps(tree, sort_keys=True, separators=(",", ":")).encode())
    path.write_text(json.dumps({**tree, "itself": own}))
    out = said(capsys, run, "--prune", "--keep-last", "1")
    assert "UNKNOWN" in out
    assert steps(run) == ["step-00000100", "step-00000300"]


@pytest.mark.thorough
def test_a_run_that_lives_is_not_pruned_and_can_be_listed(run: Path, capsys: Capsys) -> None:
    left_behind(run, ".step-00000400.partial")
    with subprocess.Popen([sys.executable, "-c", HOLD, str(run)], stdout=subprocess.PIPE, text=True) as holder:
        try:
            assert holder.stdout is not None
            assert holder.stdout.readline() == "held\n"
            for words in (("--prune",), ("--prune", "--dry-run")):
                sentence = refused(capsys, run, *words)
                assert f"is in use by the run of process {holder.pid} on " in sentence
                assert sentence.endswith(": wait for it to end\n")
            out = " ".join(said(capsys, run).split())
            assert "being written or removed by the run that lives" in out
            assert f"is in use by the run of process {holder.pid}" in out
        finally:
            holder.kill()
    assert len(steps(run)) == 4


# --- refusals -----------------------------------------------------------------------------------


def test_wrong_places(run: Path, tmp_path: Path, capsys: Capsys) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "thesis").mkdir()
    assert "there is nothing at" in refused(capsys, tmp_path / "nowhere")
    assert "is a file" in refused(capsys, tmp_path / "file")
    assert "is no run's folder" in refused(capsys, tmp_path / "thesis")
    assert f"name its run's folder, {run}" in refused(capsys, run / "checkpoints/step-00000100")


def test_flags_that_need_another(run: Path, capsys: Capsys) -> None:
    for words in (("--dry-run",), ("--keep-last", "2"), ("--keep-every", "2")):
        assert f"{words[0]} needs --prune" in refused(capsys, run, *words)
    assert "--keep-last must be at least 1, not 0" in refused(capsys, run, "--prune", "--keep-last", "0")
    assert "--verify" in refused(capsys, run, "--verfy")
    assert "RUN" in refused(capsys)


def test_a_file_of_many_pieces_is_counted_once(run: Path) -> None:
    manifest = read_manifest(run / "checkpoints/step-00000100")
    assert isinstance(manifest.files[WEIGHTS], StoredFile)
    assert inventory(run).checkpoints[-1].bytes == manifest.bytes


@pytest.mark.thorough
def test_neither_torch_nor_numpy_is_loaded(run: Path) -> None:
    script = (
        "import sys\n"
        "from tightfit.cli import main\n"
        "assert main(['checkpoints', sys.argv[1], '--verify']) == 0\n"
        "assert not {'torch', 'numpy', 'transformers'} & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", script, str(run)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
