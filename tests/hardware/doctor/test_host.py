"""RAM, swap, limits and control groups, from folders that look like /proc and /sys; and a real disk."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tightfit.hardware.doctor import host
from tightfit.hardware.doctor.gpus import link_rows
from tightfit.hardware.doctor.host import MeasuredDisk, disk_rows, measure_disk
from tightfit.hardware.doctor.row import Check
from tightfit.hardware.probes.card import Card
from tightfit.hardware.probes.readings import GIB, MIB

MEMINFO = "MemTotal: 65000000 kB\nMemAvailable: 60000000 kB\nSwapTotal: {swap} kB\nSwapFree: {swap} kB\n"


def machine(root: Path, files: dict[str, str]) -> Path:
    for name, text in ({"proc/meminfo": MEMINFO.format(swap=0)} | files).items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def rows(root: Path, cards: int = 0) -> dict[str, Check]:
    return {row.id: row for row in host.host_rows(cards, root)}


def test_swap_is_explained_and_its_commands_are_only_shown(tmp_path: Path) -> None:
    found = rows(machine(tmp_path, {}))["swap"]
    assert "pinned buffers" in str(found.what)
    assert "cannot be swapped" in str(found.what)
    assert any("swapon" in command for command in found.commands)
    assert rows(machine(tmp_path, {"proc/meminfo": MEMINFO.format(swap=1048576)}))["swap"].commands == ()


def test_little_free_ram(tmp_path: Path) -> None:
    text = "MemTotal: 65000000 kB\nMemAvailable: 1000000 kB\n"
    assert rows(machine(tmp_path, {"proc/meminfo": text}))["ram"].light == "yellow"
    assert rows(machine(tmp_path, {}))["ram"].light == "green"


@pytest.mark.parametrize(
    "files",
    [
        {"proc/self/cgroup": "0::/job\n", "sys/fs/cgroup/job/memory.max": f"{8 * GIB}\n"},
        {
            "proc/self/cgroup": "5:cpuset:/\n4:memory:/docker/abc\n0::/\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{8 * GIB}\n",
        },
    ],
)
def test_ram_is_what_the_control_group_allows(tmp_path: Path, files: dict[str, str]) -> None:
    assert str(rows(machine(tmp_path, files))["ram"].what).startswith(
        "host RAM: 8.0 GiB (what this process's control group"
    )


@pytest.mark.parametrize(
    "files",
    [
        {
            "proc/self/cgroup": "0::/a/b\n",
            "sys/fs/cgroup/a/cpu.max": "50000 100000\n",
            "sys/fs/cgroup/a/b/cpu.max": "max 1\n",
        },
        {
            "proc/self/cgroup": "3:cpu,cpuacct:/x\n",
            "sys/fs/cgroup/cpu/x/cpu.cfs_quota_us": "50000\n",
            "sys/fs/cgroup/cpu/x/cpu.cfs_period_us": "100000\n",
        },
    ],
)
def test_a_share_of_the_cores(tmp_path: Path, files: dict[str, str]) -> None:
    found = rows(machine(tmp_path, files))["cpu-limit"]
    assert found.light == "yellow"
    assert "allows 0.5 of" in str(found.what)


@pytest.mark.parametrize(
    "files",
    [
        {},
        {"proc/self/cgroup": "garbage\n::\n0::/../..\n"},
        {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "max 100000\n", "sys/fs/cgroup/pids.max": "max\n"},
        {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "x y z\n", "sys/fs/cgroup/pids.max": "-5\n"},
        {"proc/self/cgroup": "2:cpu:/\n", "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n"},
        {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "5 0\n"},
    ],
)
def test_no_limit_where_none_can_be_read(tmp_path: Path, files: dict[str, str]) -> None:
    found = rows(machine(tmp_path, files))
    assert found["cpu-limit"].light == "green"
    assert "pids-limit" not in found


def test_few_processes(tmp_path: Path) -> None:
    files = {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/pids.max": "100\n"}
    assert "100 processes" in str(rows(machine(tmp_path, files))["pids-limit"].what)


def test_shared_memory_of_a_container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "dev/shm").mkdir(parents=True)
    small = os.statvfs_result((4096, 4096, 64 * MIB // 4096, 0, 60 * MIB // 4096, 0, 0, 0, 0, 255))
    monkeypatch.setattr(host.os, "statvfs", lambda path: small)
    assert rows(machine(tmp_path, {}), cards=8)["shm"].light == "red"
    found = rows(tmp_path, cards=1)["shm"]
    assert found.light == "yellow"
    assert "--shm-size" in str(found.fix)


def test_locked_memory_matters_beside_infiniband(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host.resource, "getrlimit", lambda which: (8 * MIB, 8 * MIB))
    assert rows(machine(tmp_path, {}))["memlock"].light == "green"
    assert rows(machine(tmp_path, {"sys/class/infiniband/mlx5_0/node_type": "1"}))["memlock"].light == "red"


def test_two_sockets(tmp_path: Path) -> None:
    files = {f"sys/devices/system/node/node{i}/cpulist": "0-7" for i in range(2)}
    assert "2 nodes" in str(rows(machine(tmp_path, files))["numa"].what)


# --- the disk -----------------------------------------------------------------------------------


@pytest.mark.thorough
def test_a_real_folder_is_measured_and_left_as_it_was(tmp_path: Path) -> None:
    found = measure_disk(tmp_path / "not" / "there" / "yet")
    assert found.folder == tmp_path
    assert found.problem is None
    assert found.free_bytes is not None
    assert list(tmp_path.iterdir()) == []


@pytest.mark.thorough
def test_a_folder_that_may_not_be_written_to() -> None:
    found = next(disk_rows(measure_disk(Path("/proc/self"))))
    assert found.light == "red"
    assert "cannot be written to" in str(found.what)


def test_lights_of_a_disk(tmp_path: Path) -> None:
    def lights(free: int, speed: float | None = None, mounts: str = "") -> list[str]:
        root = machine(tmp_path, {"proc/mounts": mounts})
        found = MeasuredDisk(folder=Path("/data/runs"), free_bytes=free, bytes_per_s=speed)
        return [row.light for row in disk_rows(found, root) if row.id != "nvme"]

    assert lights(500 * GIB, 2e9) == ["green", "green"]
    assert lights(500 * GIB, 20e6) == ["green", "yellow"]
    assert lights(5 * GIB) == ["yellow"]
    assert lights(100 * MIB) == ["red"]
    assert lights(500 * GIB, mounts="/dev/a / ext4 rw 0 0\ntmpfs /data tmpfs rw 0 0\nbroken\n") == ["yellow"]


def test_nvme_drives(tmp_path: Path) -> None:
    files = {"sys/block/nvme0n1/size": "3750748848\n", "sys/block/nvme0n1/device/model": "Fast Drive   \n"}
    root = machine(tmp_path, files | {"sys/block/nvme1n1/size": "nonsense\n"})
    (found,) = (row for row in disk_rows(MeasuredDisk(folder=root), root) if row.id == "nvme")
    assert str(found.what) == "NVMe: nvme0n1 1,788 GiB Fast Drive"


# --- links --------------------------------------------------------------------------------------


def pcie(root: Path, lanes: str) -> Path:
    place = "sys/bus/pci/devices/0000:1b:00.0/"
    told = {"current_link_width": lanes, "max_link_width": "16", "max_link_speed": "32.0 GT/s PCIe", "numa_node": "1"}
    return machine(root, {place + name: text + "\n" for name, text in told.items()})


def test_a_card_in_a_narrow_slot(tmp_path: Path) -> None:
    card = Card(index=0, vendor="nvidia", pci="0000:1b:00.0")
    (row,) = link_rows([card], (), pcie(tmp_path, "4"))
    assert (row.light, "GPU 0 has 4 of 16 lanes" in str(row.what)) == ("yellow", True)
    (row,) = link_rows([card], (), pcie(tmp_path, "16"))
    assert str(row.what) == "PCIe to the host: 1 × 32.0 GT/s with 16 lanes; NUMA node 1"
    assert link_rows([card], (), tmp_path / "nowhere") == []


def test_cards_on_two_sockets() -> None:
    cards = [Card(index=i, vendor="nvidia") for i in range(2)]
    assert str(link_rows(cards, [("GPU0", "GPU1", "NV18")])[0].what) == "1 pair of GPUs: 1 × NVLink (18 links)"
    assert link_rows(cards, [("GPU0", "GPU1", "SYS")])[0].light == "yellow"
