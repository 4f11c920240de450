"""`tightfit measure`: real processes that measure, and what becomes of parts that fail."""

from __future__ import annotations

import json
import re
import stat
import sys
from pathlib import Path
from typing import Any

import pytest

from tightfit.cli import main
from tightfit.hardware import measured as measured_room
from tightfit.hardware.measured import PARTS, MeasuredPart
from tightfit.hardware.probes import tools
from tightfit.messages import Message
from tightfit.start import measure
from tightfit.start.measure import MeasuredSoFar, MeasuringNode, find_node, measure_machine
from tightfit.types import HardwareError

sys.path.insert(0, str(Path(__file__).parents[1] / "hardware" / "probes"))

import recorded

TESTS = Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def _own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    for name in ("DATA", "CACHE"):
        monkeypatch.setenv(f"XDG_{name}_HOME", str(tmp_path / name.lower()))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))  # the cards of the machine itself stay out of sight
    monkeypatch.setattr(tools, "BESIDE_PATH", {})
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setattr(measure, "_load", lambda: 0.0)  # whatever else this machine does
    (tmp_path / "bin").mkdir()


# --- real processes -------------------------------------------------------------------------------


@pytest.mark.thorough
def test_a_part_that_hangs_is_given_up_and_the_rest_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    patient = {name: replace_seconds(part, 100) for name, part in PARTS.items()}
    patient["host_memory"] = replace_seconds(PARTS["host_memory"], 0)
    monkeypatch.setattr(measure, "PARTS", patient)
    monkeypatch.setattr(measure, "MOST_S", {True: 600.0})
    monkeypatch.setattr(measure, "GRACE_S", 1.0)
    monkeypatch.setenv("PYTHONPATH", str(TESTS))
    monkeypatch.setenv("TIGHTFIT_FAULTS", "hang@rank=1,stage=host_memory,step=0,repeat")
    begun = []
    found, said, interrupted = measure_machine(
        quick=True,
        node=MeasuringNode(),
        tell=lambda part, *_: begun.append(part),
        parts=["launch", "host_memory", "collectives"],
    )
    assert begun == ["launch", "host_memory", "collectives"]
    assert not said
    assert not interrupted
    assert set(found.rates) == {"launch_s", "link", "link_latency_s"}
    assert all(rate > 0 for rate in found.rates.values())
    assert [why.id for why in found.missing.values() if isinstance(why, Message)] == ["measure.took-too-long"]
    assert [row["kind"] for row in found.raw["collectives"][0]][:3] == ["all_gather", "reduce_scatter", "all_reduce"]
    assert found.machine.vendor == "cpu"


def replace_seconds(part: MeasuredPart, seconds: float) -> MeasuredPart:
    return part._replace(budget_s=seconds, quick_s=seconds)


@pytest.mark.slow
def test_a_cpu_is_measured_whole(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(measure, "PARTS", {name: replace_seconds(part, 100) for name, part in PARTS.items()})
    monkeypatch.setattr(measure, "MOST_S", {True: 600.0})
    assert main(["measure", "--quick", "--json"]) == 0
    tree = json.loads(capsys.readouterr().out)
    assert not tree["missing"]
    assert {"products.bf16", "products.fp32", "attention.math.back", "memory", "host_optimizer"} <= set(tree["rates"])
    assert main(["plan", "--model", "tiny_llama", "--json"]) == 0
    assert f"Measured here on {tree['on']}." in capsys.readouterr().out


@pytest.mark.slow
def test_a_rank_that_dies_costs_its_part_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "MOST_S", {True: 600.0})
    monkeypatch.setenv("PYTHONPATH", str(TESTS))
    monkeypatch.setenv("TIGHTFIT_FAULTS", "kill@rank=0,stage=launch,step=0,repeat")
    found, _, _ = measure_machine(
        quick=True, node=MeasuringNode(), tell=lambda *_: None, parts=["launch", "host_memory"]
    )
    assert set(found.rates) == {"host_memory"}
    assert [why.id for why in found.missing.values() if isinstance(why, Message)] == ["measure.ended-early"]


# --- what becomes of it ---------------------------------------------------------------------------


def found_by(monkeypatch: pytest.MonkeyPatch, **finding: Any) -> None:
    """The processes have found this."""
    monkeypatch.setattr(measure, "_run", lambda *_, **__: MeasuredSoFar(**finding))


def test_what_is_found_is_kept_and_shown(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found_by(
        monkeypatch,
        rates={"products.bf16": 7e14, "memory": 3e12, "launch_s": 2e-5},
        missing={"nvme": Message("measure.took-too-long", seconds=20.0)},
    )
    assert main(["measure", "--out", str(tmp_path / "here.json")]) == 0
    said = " ".join(capsys.readouterr().out.split())
    for words in ("700 TFLOP/s", "3 TB/s", "20 µs", "Not measured: the disk (it did not end within 20 s)."):
        assert words in said
    (kept,) = (tmp_path / "data" / "tightfit" / "measured").glob("*.json")
    assert kept.read_bytes() == (tmp_path / "here.json").read_bytes()
    assert main(["estimate", "--model", "tiny_llama", "--gpus", str(tmp_path / "here.json")]) == 0
    assert "here.json was measured on" in " ".join(capsys.readouterr().out.split())
    assert main(["doctor", "--json", "--output", "/proc/self/runs"]) in (0, 1)
    rows = {row["id"]: row["what"] for row in json.loads(capsys.readouterr().out)["rows"]}
    assert rows["measured"].startswith("what this machine reaches was measured on")


def test_a_cpu_has_a_pace_only_where_it_was_measured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["plan", "--model", "tiny_llama", "--seq", "128", "--max-steps", "10"]
    assert main(asked) == 0
    said = capsys.readouterr().out
    assert "No pace is claimed" in said
    assert not re.search(r"\d tokens/s|10 steps|% longer", said)
    assert main([*asked, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert {way["pace"] is None for way in (told["chosen"], *told["alternatives"])} == {True}
    found_by(monkeypatch, rates={"products.bf16": 1e9, "memory": 1e10, "launch_s": 5e-5})
    assert main(["measure", "--out", str(tmp_path / "here.json")]) == 0
    capsys.readouterr()
    for model, is_paced in (("tiny_llama", True), ("tiny_mamba", False)):
        assert main(["estimate", "--model", model, "--gpus", str(tmp_path / "here.json"), "--json"]) == 0
        told = json.loads(capsys.readouterr().out)
        assert (told["pace"] is not None) == is_paced
        assert any("No pace is claimed" in why for why in told["because"]) != is_paced
    assert main(asked) == 0
    said = capsys.readouterr().out
    assert "No pace is claimed" not in said
    assert re.search(r"\d tokens/s in .* 10 steps", said)


def test_nothing_is_no_success(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    found_by(monkeypatch, missing={"memory": "CUDA error: unknown error"})
    assert main(["measure"]) == 3
    assert "nothing could be measured: the memory of the device (CUDA error" in capsys.readouterr().err
    assert not (measured_room.data_folder() / "measured").exists()


def test_an_interrupted_one_keeps_what_was_found(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = dict.fromkeys(("launch", "nvme"), Message("measure.interrupted"))
    found_by(monkeypatch, rates={"memory": 3e12}, missing=missing, interrupted=True)
    assert main(["measure"]) == 130
    said = capsys.readouterr()
    assert "what was found until then is kept" in said.err
    assert "Not measured: launches, the disk (it was interrupted)." in " ".join(said.out.split())
    assert main(["plan", "--model", "tiny_llama", "--seq", "128"]) == 0
    assert "No pace is claimed" in capsys.readouterr().out
    assert len([*(tmp_path / "data" / "tightfit" / "measured").glob("*.json")]) == 1


def test_without_torch_it_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(measure, "is_installed", lambda _: False)
    assert main(["measure"]) == 2
    assert "pip install 'tightfit[train]'" in capsys.readouterr().err


@pytest.mark.parametrize("out", [".", "/dev/null", "nowhere/here.json"])
def test_a_folder_is_no_file(out: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["measure", "--out", out]) == 2
    assert "--out takes the name of a file" in capsys.readouterr().err


def test_what_cannot_be_written_is_said_and_the_rest_is_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found_by(monkeypatch, rates={"memory": 3e12})
    assert main(["measure", "--out", "/proc/here.json"]) == 2
    told = capsys.readouterr()
    assert re.fullmatch(
        r"tightfit: /proc/here\.json cannot be written \(.+\): name another file with --out\n", told.err
    )
    assert "Kept in" in told.out
    (tmp_path / "data" / "tightfit" / "measured").rename(tmp_path / "before")
    (tmp_path / "data" / "tightfit" / "measured").write_text("no folder", encoding="utf-8")
    assert main(["measure"]) == 2
    capsys.readouterr()
    assert main(["measure", "--json", "--out", str(tmp_path / "here.json")]) == 0, "this one was asked for"
    told = capsys.readouterr()
    assert json.loads(told.out)["rates"] == {"memory": 3e12}
    assert "name another folder with XDG_DATA_HOME" in told.err
    assert {path.name for path in tmp_path.glob("*here*")} == {"here.json"}


def test_an_early_interrupt_is_one_short_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found_by(monkeypatch, missing={"memory": Message("measure.interrupted")}, interrupted=True)
    assert main(["measure"]) == 130
    assert capsys.readouterr().err == "tightfit: interrupted before anything was measured\n"


def test_ranks_that_cannot_start_say_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "WORKER", (sys.executable, "-c", "raise SystemExit('libcudart.so is missing')"))
    found, _, _ = measure_machine(quick=True, node=MeasuringNode(), tell=lambda *_: None, parts=["launch"])
    assert "ended with code 1: libcudart.so is missing" in str(found.missing["launch"])


def test_a_torch_without_gpus_is_told_though_not_every_rank_has_spoken(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    h200s(tmp_path, "")
    first = (
        "import os, sys, time\n"
        "if os.environ['RANK'] == '1': time.sleep(60)\n"
        "with open(sys.argv[sys.argv.index('--found') + 1], 'w') as file:\n"
        """    file.write('{"gpus": 0, "torch": "2.11+cpu", "cuda": null, "hip": null}\\n')\n"""
    )
    monkeypatch.setattr(measure, "WORKER", (sys.executable, "-c", first))
    with pytest.raises(HardwareError, match="sees no GPU"):
        measure_machine(quick=True, node=MeasuringNode(), tell=lambda *_: None, parts=["launch"])


def h200s(folder: Path, apps: str, use: str = "0") -> None:
    """Two H200 by stand-ins of the maker's tool, with these processes on them."""
    rows = "".join(recorded.NVIDIA_ROWS.splitlines(keepends=True)[:2])
    short = "".join(f"{i}, {recorded.UUID}{i}, 143771, 9.0, NVIDIA H200\n" for i in range(2))
    answers = [
        ("--query-gpu=index,pci", rows),
        ("--query-gpu=index,uuid", short),
        ("--query-compute", apps),
        ("", recorded.NVIDIA_HEAD),
    ]
    tool = folder / "bin" / "nvidia-smi"
    tool.write_text(
        f"#!{sys.executable} -SE\nimport sys\nline = ' '.join(sys.argv[1:])\n"
        f"for key, text in {answers!r}:\n"
        "    if key in line:\n        sys.stdout.write(text)\n        sys.exit(0)\n"
    )
    tool.chmod(tool.stat().st_mode | stat.S_IXUSR)


def test_a_gpu_that_is_busy_is_said_and_its_figures_are_marked(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    h200s(tmp_path, recorded.NVIDIA_APPS)
    found_by(monkeypatch, rates={"products.bf16": 7e14, "host_memory": 1e11})
    assert main(["measure"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert re.search(r"700 TFLOP/s \* \d+ TFLOP/s", said), "beside what would be assumed"
    assert "100 GB/s *" not in said
    assert "Somebody else is on the GPUs (4711" in said
    (kept,) = (tmp_path / "data" / "tightfit" / "measured").glob("2x-nvidia-h200-*.json")
    assert json.loads(kept.read_text(encoding="utf-8"))["marked"] == ["products.bf16"]


def test_a_host_that_is_busy_is_said_too(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(measure, "_load", lambda: 4096.0)
    found_by(monkeypatch, rates={"products.bf16": 1e12, "host_memory": 1e11})
    assert main(["measure", "--json"]) == 0
    tree = json.loads(capsys.readouterr().out)
    assert tree["marked"] == ["products.bf16", "host_memory"], "on a CPU everything is the host's"
    assert "The host is busy (4096.0 processes" in tree["said"][0]


# --- several nodes --------------------------------------------------------------------------------

TORCHRUN = {"MASTER_ADDR": "n1", "MASTER_PORT": "29400", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "1"}
SLURM = {
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_NODEID": "1",
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
}


@pytest.mark.parametrize(
    ("env", "node"),
    [
        ({}, MeasuringNode()),
        ({"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}, MeasuringNode()),
        ({**TORCHRUN, "LOCAL_RANK": "0"}, MeasuringNode(number=1, count=2, address="n1:29401")),
        ({**TORCHRUN, "LOCAL_RANK": "1"}, None),
        (SLURM, MeasuringNode(number=1, count=2, address="gpu07:20007")),
    ],
)
def test_each_node_measures_once(env: dict[str, str], node: MeasuringNode | None) -> None:
    assert find_node(env) == node
