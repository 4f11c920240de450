"""Who holds the memory of the GPUs, through stand-ins for the makers' tools on PATH."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from tightfit.hardware.catalogue import GIB, MIB
from tightfit.hardware.machine import free_ram, occupancy

UUID = "GPU-5ad1a1f0-7a0c-4c3e-8b60-0d5a6a0c5a0"


def install(folder: Path, tool: str, answers: dict[str, str]) -> None:
    """A tool that prints the answer whose key is among its arguments, and fails without one."""
    path = folder / tool
    path.write_text(
        f"#!{sys.executable} -SE\n"
        "import sys\n"
        f"for key, answer in {answers!r}.items():\n"
        "    if any(word.startswith(key) for word in sys.argv[1:]):\n"
        "        sys.stdout.write(answer)\n"
        "        sys.exit(0)\n"
        "sys.exit('not known')\n"
    )
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setattr("tightfit.hardware.probes.tools.BESIDE_PATH", {})
    for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    return folder


def row(number: int, free: int) -> str:
    card = f"{number}, 00000000:0{number}:00.0, {UUID}{number}, 24564, {24564 - free}"
    return f"{card}, {free}, 0, 41, 31.50, 550.54.15, 8.9, NVIDIA GeForce RTX 4090\n"


def nvidia(folder: Path, apps: str = "", gpus: int = 4) -> None:
    install(
        folder,
        "nvidia-smi",
        {
            "--query-gpu=index,pci": "".join(row(i, 24000 - 1000 * i) for i in range(gpus)),
            "--query-compute-apps": apps,
        },
    )


def test_no_gpu(tools: Path) -> None:
    assert occupancy().devices == ()


def test_free_memory_and_who_holds_the_rest(tools: Path) -> None:
    nvidia(tools, f"{UUID}1, {os.getpid()}, 1024\n{UUID}1, 4000000, [N/A]\nGPU-other, 1, 5\nnonsense\n")
    found = occupancy()
    assert [device.free_bytes for device in found.devices] == [(24000 - 1000 * i) * MIB for i in range(4)]
    assert [device.word for device in found.devices] == ["0", "1", "2", "3"]
    assert not found.chosen_by_user
    ours, unknown = found.devices[1].holders
    assert (ours.pid, ours.held_bytes) == (os.getpid(), 1024 * MIB)
    assert ours.user
    assert "py" in str(ours.command)
    assert len(str(ours.command)) <= 60
    assert (unknown.pid, unknown.user, unknown.command, unknown.held_bytes) == (4000000, None, None, None)


def test_only_what_a_job_may_see_in_its_own_words(tools: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nvidia(tools)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", f"3, {UUID}1")
    found = occupancy()
    assert found.chosen_by_user
    assert [(device.number, device.word) for device in found.devices] == [(3, "3"), (1, f"{UUID}1")]
    assert [device.key for device in found.devices] == [f"{UUID}3", f"{UUID}1"]


def test_a_tool_that_fails_at_the_second_question_leaves_it_unknown(tools: Path) -> None:
    install(tools, "nvidia-smi", {"--query-gpu=index,pci": row(0, 24000)})
    (device,) = occupancy().devices
    assert device.free_bytes == 24000 * MIB
    assert device.holders == ()


def test_hygon_cards(tools: Path) -> None:
    card = {"Card Series": "K100_AI", "vram Total Memory (MiB)": "65520", "vram Total Used Memory (MiB)": "520"}
    install(tools, "hy-smi", {"--show": json.dumps({"card0": card, "card1": card})})
    found = occupancy()
    assert found.variable == "HIP_VISIBLE_DEVICES"
    assert [device.free_bytes for device in found.devices] == [65000 * MIB] * 2
    assert [device.key for device in found.devices] == ["hygon-0", "hygon-1"]


def hygon_with(folder: Path, pids: str) -> None:
    cards = {
        f"card{i}": {
            "Card Series": "K100_AI",
            "PCI Bus": f"0000:0{i + 1}:00.0",
            "vram Total Memory (MiB)": "65520",
            "vram Total Used Memory (MiB)": "520",
        }
        for i in range(2)
    }
    install(folder, "hy-smi", {"--showpids": pids, "--show": json.dumps(cards)})


def test_hygon_names_who_holds_which_card(tools: Path) -> None:
    held = f"PID: {os.getpid()}\n\tPCI BUS: ['0000:02:00.0']\n\tVRAM USED(MiB): 500\n"
    both = "PID: 4000000\n\tPCI BUS: ['0000:01:00.0', '0000:02:00.0']\n\tVRAM USED(MiB): 30\n"
    hygon_with(tools, held + both)
    found = occupancy()
    assert [[(each.pid, each.held_bytes) for each in device.holders] for device in found.devices] == [
        [(4000000, None)],
        [(os.getpid(), 500 * MIB), (4000000, None)],
    ]
    assert found.devices[1].holders[0].user
    assert found.unplaced == ()


def test_hygon_names_who_holds_some_card(tools: Path) -> None:
    hygon_with(tools, f"PID: {os.getpid()}\n\tHCU Index: []\n\tPCI BUS: []\n\tVRAM USED(MiB): 500\n")
    found = occupancy()
    assert [device.holders for device in found.devices] == [(), ()]
    assert [(each.pid, each.held_bytes) for each in found.unplaced] == [(os.getpid(), 500 * MIB)]


def test_the_only_card_of_amd_has_its_processes_listed(tools: Path) -> None:
    card = {"Card Series": "Radeon RX 7900 XT", "VRAM Total Memory (B)": str(20 * GIB)}
    used = {"VRAM Total Used Memory (B)": str(GIB)}
    pids = f"PID   PROCESS NAME  GPU(s)  VRAM USED  SDMA USED  CU OCCUPANCY\n{os.getpid()}  python  1  {GIB}  0  0\n"
    answers = {"--showproductname": json.dumps({"card0": card | used}), "--showpids": pids}
    install(tools, "rocm-smi", answers | {"--showmeminfo": json.dumps({"card0": card | used})})
    (device,) = occupancy().devices
    assert device.free_bytes == 19 * GIB
    assert [(holder.pid, holder.held_bytes) for holder in device.holders] == [(os.getpid(), GIB)]


def test_amd_by_its_newer_tool_alone(tools: Path) -> None:
    card = {"gpu": 0, "mem_usage": {"total_vram": {"value": 20464, "unit": "MB"}, "used_vram": "N/A"}}
    other = {
        "gpu": 1,
        "mem_usage": {"total_vram": {"value": 20464, "unit": "MB"}, "used_vram": {"value": 464, "unit": "MB"}},
    }
    named = {"gpu": 0, "asic": {"market_name": "Radeon RX 7900 XT"}}
    install(tools, "amd-smi", {"metric": json.dumps([card, other]), "static": json.dumps([named])})
    first, second = occupancy().devices
    assert (first.name, first.total_bytes, first.free_bytes) == ("Radeon RX 7900 XT", 20464 * MIB, None)
    assert second.free_bytes == 20000 * MIB


def test_free_ram(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal:       24682740 kB\nMemAvailable:   1024 kB\n")
    assert free_ram(tmp_path) == MIB
    assert free_ram(tmp_path / "none") is None


def test_a_command_without_letters_of_its_own(tools: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()", "\x1b[2J\n" * 50], stdin=subprocess.PIPE) as process:
        nvidia(tools, f"{UUID}0, {process.pid}, 7\n")
        (holder,) = occupancy().devices[0].holders
        process.communicate()
    assert holder.command is not None
    assert holder.command.isprintable()
