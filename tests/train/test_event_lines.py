"""What a worker prints that another launcher started: the lines that the desk would show."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest
import torch

import warm_desk
from tightfit.train.events import Events, lines_of
from tightfit.train.place import Place

STEP = {"steps": 3, "tokens_per_s": 1234.4, "seconds_left": 8.0, "memory": {"host_bytes": 2**30}}


def place(*, rank: int = 0, launcher: str = "torchrun", rehearsal: bool = False) -> Place:
    cpu = torch.device("cpu")
    return Place(rank=rank, local_rank=rank, world=2, device=cpu, launcher=launcher, rehearsal=rehearsal)


@pytest.mark.parametrize(
    ("where", "prints"),
    [
        (place(), True),
        (place(launcher="srun"), True),
        (place(rank=1), False),
        (place(launcher="tightfit"), False),
        (place(launcher="rehearsal", rehearsal=True), False),
    ],
)
def test_rank_0_prints_where_nobody_follows(where: Place, prints: bool) -> None:
    assert (lines_of(where, 0) is not None) is prints


def test_milestones_warnings_and_few_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    events = Events(tmp_path, speaks=True, lines=lines_of(place(), 3 * 2**30))
    events.write("proof", name="world", ok=True, text="2 ranks, started by torchrun")
    events.write("memory", milestone="init", predicted_bytes=2**30, measured_bytes=2**31, ranks=2)
    events.write("warning", text="something to know")
    for step in (1, 2, 3):
        events.write("step", step=step, loss=5.0 - step, **STEP)
    events.close()
    assert capsys.readouterr().out.splitlines() == [
        "✓ 2 ranks, started by torchrun",
        "  memory, engine ready: 2.00 GiB (planned 1.00 GiB)",
        "! something to know",
        "step 1/3  loss 4.0000  1,234 tokens/s  8 s left  1.00 GiB of RAM",
        "step 3/3  loss 2.0000  1,234 tokens/s  8 s left  1.00 GiB of RAM",
    ]
    assert len(events.path.read_text().splitlines()) == 6


def test_milestones_on_a_cpu_say_the_ram(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    events = Events(tmp_path, speaks=True, lines=lines_of(place(), 3 * 2**30))
    held = {"predicted_bytes": 2**20, "measured_bytes": None, "host_bytes": 2**30, "where": "host"}
    for milestone in ("init", "forward", "backward", "step"):
        events.write("memory", milestone=milestone, **held)
    events.close()
    assert capsys.readouterr().out.splitlines() == [
        "  memory, engine ready: 1.00 GiB of RAM",
        "  memory, first forward: 1.00 GiB of RAM",
        "  memory, first backward: 1.00 GiB of RAM",
        "  memory, first optimizer step: 1.00 GiB of RAM",
    ]


def test_a_terminal_without_our_signs_stops_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", out)
    events = Events(tmp_path, speaks=True, lines=lines_of(place(), 0))
    events.write("proof", name="world", ok=True, text="two ranks")
    events.close()
    assert out.buffer.getvalue() == b"? two ranks\n"  # type: ignore[attr-defined]


@pytest.mark.thorough
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_log_stops_nothing(tmp_path: Path) -> None:
    code = (
        "import os, pathlib, sys, torch; from tightfit.train.events import Events, lines_of;"
        "from tightfit.train.place import Place;"
        "os.dup2(os.open('/dev/full', os.O_WRONLY), 1); sys.stdout = open(1, 'w', closefd=False);"
        "where = Place(rank=0, local_rank=0, world=2, device=torch.device('cpu'), launcher='torchrun');"
        "events = Events(pathlib.Path(sys.argv[1]), speaks=True, lines=lines_of(where, 0));"
        "events.write('warning', text='one'); events.write('warning', text='two'); events.close();"
        "os._exit(0)"
    )
    done = warm_desk.python(code, str(tmp_path), ranks=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert len((tmp_path / "events.jsonl").read_text().splitlines()) == 2
