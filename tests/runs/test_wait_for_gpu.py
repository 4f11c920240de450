"""Others hold the GPU: who it is, is said; the run waits if it is asked to, and nobody's process is touched.

The GPUs are those that a stand-in for nvidia-smi shows, which reads what is free from a file.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from datetime import datetime, timezone
from pathlib import Path

import pytest
from train_shell import TINY, Shell, shell

import warm_desk
from tightfit.cli import main
from tightfit.cli import train as cli_train
from tightfit.runs.records import read_attempts
from tightfit.runs.reservations import Reservation, Reservations
from tightfit.start import machine as start_machine
from tightfit.start import train as start_train

pytestmark = pytest.mark.thorough

__all__ = ["shell"]

UUID = "GPU-5ad1a1f0-7a0c-4c3e-8b60-0d5a6a0c5a00"
STAND_IN, UNSTEADY = Path(__file__).with_name("stand_in.py"), Path(__file__).with_name("unsteady.py")
PINNED = (*TINY, "--engine", "zero2", "--micro-batch", "1", "--accum", "1", "--effective-batch", "1")


class Card:
    """One card whose free memory can be changed, and a process of somebody's that holds the rest."""

    def __init__(self, folder: Path) -> None:
        self.free, self.holder = folder / "free", subprocess.Popen(["sleep", "600"])
        self.asked = folder / "asked"
        self.asked.touch()
        row = f"0, {UUID}, 24564, 8.9, NVIDIA GeForce RTX 4090\n"
        (folder / "nvidia-smi").write_text(
            f"#!{sys.executable} -SE\nimport sys\nfree = open({str(self.free)!r}).read()\n"
            f"print(end='.', file=open({str(self.asked)!r}, 'a'))\n"
            f"apps = '' if int(free) > 800 else '{UUID}, {self.holder.pid}, 23000\\n'\n"
            f"whole = f'0, 00000000:01:00.0, {UUID}, 24564, 0, {{free}}, 0, 41, 31.50, 550.54.15, 8.9, RTX 4090\\n'\n"
            f"answers = {{'--query-gpu=index,uuid': {row!r}, '--query-gpu=index,pci': whole, "
            "'--query-compute': apps}\n"
            "print(next(text for key, text in answers.items() if sys.argv[1].startswith(key)), end='')\n"
        )
        (folder / "nvidia-smi").chmod(0o755)
        self.hold()

    def hold(self) -> None:
        self.free.write_text("800")

    def leave(self) -> None:
        """The process is not listed any more, the driver has yet to clear what it held."""
        self._set("900")

    def give_back(self) -> None:
        self._set("24100")

    def wait_for_looks(self, questions: int = 9) -> None:
        """Until whoever waits has found it as it is now: a look has four questions, or two where nothing is planned."""
        before = self.asked.stat().st_size
        while self.asked.stat().st_size < before + questions:
            time.sleep(0.02)

    def _set(self, free: str) -> None:
        self.free.with_suffix(".new").write_text(free)
        self.free.with_suffix(".new").replace(self.free)


@pytest.fixture
def card(shell: Shell) -> object:
    folder = shell.folder.parent / "tools"
    folder.mkdir()
    shell.monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    shell.monkeypatch.setattr("tightfit.hardware.probes.tools.BESIDE_PATH", {})
    shell.monkeypatch.setattr(start_machine, "WAIT_S", 0.05)
    made = Card(folder)
    yield made
    assert made.holder.poll() is None, "it was not ours to end"
    made.holder.kill()
    made.holder.wait()


def later(seconds: float, what: object) -> threading.Timer:
    timer = threading.Timer(seconds, what)  # type: ignore[arg-type]
    timer.start()
    return timer


def test_without_being_asked_to_wait_it_says_who_holds_the_memory(shell: Shell, card: Card) -> None:
    err = shell.refused(*PINNED, "--gpu-ids", "0")
    assert "GPU 0 has 0.8 GiB free" in err
    assert f"process {card.holder.pid} (" in err
    assert "sleep 600) holds the rest: wait with --wait-for-gpu" in err


def test_it_waits_for_room_and_says_once_for_whom(shell: Shell, card: Card) -> None:
    def go() -> None:
        card.wait_for_looks()
        card.leave()
        card.wait_for_looks()
        card.give_back()

    going = later(0, go)
    code, _, err = shell.train("good", *PINNED, "--gpu-ids", "0", "--wait-for-gpu", "--json")
    going.join()
    assert code == 0, err
    assert err.count("\n") == 1
    assert err.startswith("tightfit: waiting: GPU 0 has 0.8 GiB free and the plan needs ")
    assert f"process {card.holder.pid} (" in err


def test_it_waits_for_another_run_of_ours(shell: Shell, card: Card) -> None:
    card.give_back()
    registry = Reservations(shell.folder.parent / "cache/tightfit/reservations")
    entry = Reservation.ours(Path("/runs/other"), 0, (UUID,), None)
    registry._folder.mkdir(parents=True)
    registry.add(entry)
    timer = later(0, lambda: (card.wait_for_looks(), registry.remove(entry)))
    code, _, err = shell.train("good", *PINNED, "--wait-for-gpu", "--json")
    timer.join()
    assert code == 0, err
    assert err.startswith("tightfit: waiting: every GPU is in use, the first by the run in /runs/other")


def test_ctrl_c_ends_the_wait(shell: Shell, card: Card) -> None:
    code = (
        "import sys\nfrom tightfit import cli\nfrom tightfit.start import machine\n"
        "machine.WAIT_S = 0.05\nsys.exit(cli.main(['train', *sys.argv[1:]]))\n"
    )
    words = [*PINNED, "--gpu-ids", "0", "--wait-for-gpu"]
    process = warm_desk.Process(*words, code=code)
    try:
        card.wait_for_looks()
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=20)
    finally:
        process.kill()
    assert process.returncode == 130
    assert "waiting: GPU 0" in err
    assert not Path("output").exists()


def test_somebody_who_comes_in_the_middle_is_waited_for_too(shell: Shell, card: Card) -> None:
    """The ranks say that others hold the memory; the next attempt comes when they do not any more."""
    card.give_back()
    shell.monkeypatch.setattr(cli_train, "WORKER", (sys.executable, str(UNSTEADY), "others@5/good"))
    events = Path("output/events.jsonl")

    def come_and_go() -> None:
        while not events.exists():
            time.sleep(0.02)
        card.hold()
        while read_attempts(events.parent)[0].state == "running":
            time.sleep(0.02)
        card.wait_for_looks()
        gone.append(datetime.now(tz=timezone.utc))
        card.give_back()

    gone: list[datetime] = []
    thread = threading.Thread(target=come_and_go)
    thread.start()
    code = main(["train", *PINNED, "--wait-for-gpu"])
    out, err = shell.capsys.readouterr()
    thread.join()
    assert code == 0, err + out
    assert "! waiting: GPU 0 has 0.8 GiB free" in out
    first, second = read_attempts(Path("output"))
    assert first.cause is not None
    assert (first.cause.kind, first.next and first.next.action) == ("other-process", "wait")
    assert second.first_step == 4
    assert datetime.fromisoformat(second.started) >= gone[0].replace(microsecond=0)


def test_and_not_for_ever_without_being_asked(shell: Shell, card: Card) -> None:
    card.give_back()
    shell.monkeypatch.setattr(start_train, "WAITS_S", 0.5)
    shell.monkeypatch.setattr(cli_train, "WORKER", (sys.executable, str(UNSTEADY), "others@5/good"))
    events = Path("output/events.jsonl")
    thread = threading.Thread(target=lambda: ([time.sleep(0.02) for _ in iter(events.exists, True)], card.hold()))
    thread.start()
    code = main(["train", *PINNED, "--json"])
    out, err = shell.capsys.readouterr()
    thread.join()
    assert code == 3
    assert "wait with --wait-for-gpu" in " ".join(err.split())
    assert json.loads(out)["attempts"][0]["next"]["action"] == "stop"
