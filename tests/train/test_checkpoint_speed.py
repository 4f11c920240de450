"""The benchmark of checkpoints runs from end to end at a tiny size, and its page is what its rows say."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import checkpoint_gpu
import checkpoint_speed
import pytest

SCRIPT = str(Path(checkpoint_speed.__file__))
LIMIT_S = 300


def run(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, SCRIPT, *arguments], check=False, capture_output=True, text=True, timeout=LIMIT_S
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_the_page_is_what_the_rows_say() -> None:
    rows = [checkpoint_speed.stored(path) for path in (checkpoint_speed.CPU_ROWS, checkpoint_speed.GPU_ROWS)]
    text = checkpoint_speed.PAGE.read_text(encoding="utf-8")
    assert text == checkpoint_speed.page(*rows), "run: python benchmarks/checkpoint_speed.py page"


def test_the_buffer_is_counted_once() -> None:
    first = {"host_grown_bytes": 150, "staging_bytes": 100}
    second = {"host_grown_bytes": 20, "staging_bytes": 100}
    assert checkpoint_speed.beyond_buffer([first, second]) == [50, 20]


@pytest.mark.slow
def test_two_ranks_save_and_load_by_every_way(tmp_path: Path) -> None:
    """Each load is compared bit for bit with what was saved, by the ranks themselves."""
    out = tmp_path / "rows.jsonl"
    said = run("cpu", str(tmp_path), "--bytes", "3e6", "--rounds", "1", "--json", "--out", str(out))
    row = json.loads(said)
    assert row == json.loads(out.read_text(encoding="utf-8"))
    assert [len(seconds) for seconds in row["wall_s"].values()] == [1] * len(row["wall_s"])
    assert set(checkpoint_speed.SYNCED) < set(row["wall_s"])
    assert checkpoint_speed.cpu_tables(row).count("\n| ours") == 5
    assert [path.name for path in tmp_path.iterdir()] == ["rows.jsonl"]


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["zero2", "zero3", "fsdp2"])
def test_a_rank_of_many_saves_its_share_and_reads_it_back(tmp_path: Path, engine: str) -> None:
    checkpoint_gpu.prepare(tmp_path, engine, checkpoint_gpu.TINY)
    out = tmp_path / "rows.jsonl"
    run("gpu", str(tmp_path), "--out", str(out), "--limit-s", str(LIMIT_S))
    row: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    assert "error" not in row, row
    assert row["loads"]["same"] is True
    assert max(row["share_bytes"], row["disk_bytes"]) < row["file_bytes"] / 3  # the others' bytes are holes
    assert [each["steps_beside"] >= 0 and each["blocked_s"] > 0 for each in row["behind"]] == [True, True]
    assert row["id"].replace("_", " ") in checkpoint_speed.gpu_tables([row])


def test_saving_holds_what_the_footprint_says(tmp_path: Path) -> None:
    """The save phase of the present model, against what was measured."""
    rows = checkpoint_speed.stored(checkpoint_speed.GPU_ROWS)
    assert len(rows) >= 2
    for row in rows:
        checkpoint_gpu.prepare(tmp_path, row["id"])
        orders = json.loads((tmp_path / row["id"] / "worker.json").read_text(encoding="utf-8"))
        predicted = orders["predicted"]["gpu"]["phases"]["save"]
        assert predicted == pytest.approx(row["sync"]["gpu_peak_bytes"], rel=0.01)
        assert predicted == row["predicted_save_bytes"]
        assert row["sync"]["gpu_over_rest_bytes"] < 256 * 2**20
