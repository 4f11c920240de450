"""What does not go together: versions, builds, compilers, environment variables, cards."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest

from tightfit.hardware.doctor import software
from tightfit.hardware.doctor.environment import environment_rows
from tightfit.hardware.doctor.gpus import gpu_rows
from tightfit.hardware.doctor.row import Check
from tightfit.hardware.doctor.software import (
    BAD_PAIRS,
    TorchBuild,
    building_rows,
    collectives,
    installed,
    package_rows,
)
from tightfit.hardware.probes.card import Card, CardProcess, Cards, Driver
from tightfit.hardware.probes.readings import GIB

CUDA = TorchBuild(version="2.8.0+cu128", cuda="12.8")
HIP = TorchBuild(version="2.4.1+das.opt1.dtk25041", hip="6.3.25141")
H200 = Card(index=0, vendor="nvidia", name="NVIDIA H200", arch="sm_90", total_bytes=140 * GIB, free_bytes=139 * GIB)
K100 = Card(index=0, vendor="hygon", name="K100_AI", total_bytes=64 * GIB, free_bytes=60 * GIB)
ALL = dict.fromkeys(software.NEEDED, "9.0") | {"torch": "2.13.0", "transformers": "5.22.2"}


def by_id(rows: Iterable[Check]) -> dict[str, Check]:
    return {row.id: row for row in rows}


# --- packages -----------------------------------------------------------------------------------


def test_without_torch_planning_still_works() -> None:
    row = next(package_rows({"tightfit": "0.1.0"}, None))
    assert row.light == "yellow"
    assert "planning works, training not" in str(row.what)
    assert row.commands == ("pip install 'tightfit[train]'",)


@pytest.mark.thorough
def test_known_bad_pairs() -> None:
    bad = by_id(package_rows(ALL | {"peft": "0.17.1"}, CUDA))
    assert bad["peft-transformers"].light == "red"
    assert "here: peft 0.17.1 and transformers 5.22.2" in str(bad["peft-transformers"].what)
    fine = by_id(package_rows(ALL | {"peft": "0.17.1", "transformers": "4.57.0"}, CUDA))
    assert "peft-transformers" not in fine
    assert "deepspeed-offload" in by_id(package_rows(ALL | {"deepspeed": "0.16.9"}, CUDA))
    assert all(pair.fix and pair.source for pair in BAD_PAIRS)


@pytest.mark.parametrize(
    ("pair", "bad", "fine"),
    [
        ("bitsandbytes-triton", {"bitsandbytes": "0.45.0", "triton": "3.2.0"}, {"bitsandbytes": "0.45.1"}),
        ("bitsandbytes-triton", {"bitsandbytes": "0.44.1", "triton": "3.2.0"}, {"triton": "3.1.0"}),
        ("deepspeed-torch", {"deepspeed": "0.14.2", "torch": "2.4.0+cu121"}, {"deepspeed": "0.14.4"}),
        ("deepspeed-torch", {"deepspeed": "0.14.0", "torch": "2.4.0"}, {"torch": "2.3.1"}),
        ("deepspeed-numpy", {"deepspeed": "0.12.0", "numpy": "2.0.0"}, {"numpy": "1.26.4"}),
        ("accelerate-transformers", {"accelerate": "1.2.1", "transformers": "4.52.4"}, {"accelerate": "1.3.0"}),
        ("accelerate-transformers", {"accelerate": "1.2.1", "transformers": "4.52.4"}, {"transformers": "4.51.3"}),
        ("transformers-deepspeed", {"transformers": "4.46.1", "deepspeed": "0.16.0"}, {"deepspeed": "0.15.4"}),
        ("transformers-peft", {"transformers": "4.41.2", "peft": "0.14.0"}, {"peft": "0.13.2"}),
        ("transformers-peft", {"transformers": "4.39.3", "peft": "0.14.0"}, {"transformers": "4.46.3"}),
    ],
)
def test_a_pair_that_is_known_to_fail(pair: str, bad: dict[str, str], fine: dict[str, str]) -> None:
    assert pair in by_id(package_rows(ALL | bad, CUDA))
    assert pair not in by_id(package_rows(ALL | bad | fine, CUDA))


def test_what_we_develop_with_goes_together() -> None:
    assert not {row.id for row in package_rows(installed(), CUDA)} & {pair.id for pair in BAD_PAIRS}


def test_kernels_of_another_torch() -> None:
    bad = by_id(package_rows(ALL | {"flash-attn": "2.8.3+cu12torch2.6cxx11abiFALSE"}, CUDA))
    assert bad["built-for-flash-attn"].light == "red"
    assert "built-for-flash-attn" not in by_id(package_rows(ALL | {"flash-attn": "2.8.3+cu12torch2.13"}, CUDA))


def test_pip_has_replaced_a_wheel_of_hygon() -> None:
    mixed = ALL | {"torch": HIP.version, "triton": "3.1.0", "deepspeed": "0.14.2+das.opt1.dtk25041"}
    assert "triton 3.1.0" in str(by_id(package_rows(mixed, HIP))["vendor-wheels"].what)
    assert by_id(package_rows(mixed | {"torch": "2.6.0"}, HIP))["vendor-wheels"].light == "red"


def test_requirements_that_packages_state(monkeypatch: pytest.MonkeyPatch) -> None:
    told = {"torch": ["triton==3.9.0; platform_system == 'Linux'", "not a requirement ]["], "peft": ["torch>=1.13.0"]}
    monkeypatch.setattr(software, "requirements", lambda name: told.get(name, []))
    row = by_id(package_rows(ALL | {"triton": "3.2.0"}, CUDA))["needs-torch-triton"]
    assert str(row.what) == "torch 2.13.0 asks for triton ==3.9.0, and 3.2.0 is installed"


@pytest.mark.thorough
def test_versions_are_read_without_importing() -> None:
    import subprocess
    import sys

    script = (
        "import sys\nfrom tightfit.hardware.doctor.software import installed, torch_build\n"
        "found = installed(); print(torch_build(found.get('torch')), 'torch' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.rstrip().endswith("False")


@pytest.mark.parametrize("text", ["", "cuda = None\nhip: str | None = None\n", "cuda = 'rm -rf'\n"])
def test_a_version_file_that_says_little(text: str) -> None:
    assert not software.read_version_file(text)


# --- driver and torch ---------------------------------------------------------------------------


def gpus(cards: tuple[Card, ...], build: TorchBuild | None, runtime: str | None = "12.8") -> dict[str, Check]:
    driver = Driver(version="570.1", runtime=runtime)
    return by_id(gpu_rows(Cards(cards=cards, driver=driver), build, Path("/nonexistent")))


def test_a_driver_that_runs_torch() -> None:
    assert gpus((H200,), CUDA)["torch-build"].light == "green"
    assert gpus((H200,), replace(CUDA, cuda="12.9"))["torch-build"].light == "yellow"
    assert gpus((H200,), replace(CUDA, cuda="13.0"))["torch-build"].light == "red"
    assert gpus((H200,), CUDA, runtime="13.0")["torch-build"].light == "green"
    assert gpus((H200,), CUDA, runtime=None)["torch-build"].light == "green"


def test_a_torch_for_other_cards() -> None:
    assert "CPU alone" in str(gpus((H200,), TorchBuild(version="2.8.0+cpu"))["torch-build"].what)
    assert gpus((H200,), HIP)["torch-build"].light == "red"
    assert gpus((K100,), CUDA)["torch-build"].light == "red"
    assert gpus((K100,), HIP)["torch-build"].light == "green"
    assert gpus((H200,), None)["torch-build"].light == "yellow"


def test_cards_that_are_newer_than_torch() -> None:
    blackwell = replace(H200, arch="sm_120")
    assert gpus((blackwell,), TorchBuild(version="2.6.0+cu126", cuda="12.6"))["arch-sm_120"].light == "red"
    assert "arch-sm_120" not in gpus((blackwell,), CUDA)


def test_who_holds_a_card() -> None:
    process = CardProcess(pid=4711, user="anna", command="python train.py", held_bytes=100 * GIB)
    row = gpus((replace(H200, free_bytes=40 * GIB, processes=(process,)),), CUDA)["gpu-0"]
    assert row.light == "yellow"
    assert "40.0 GiB of 140 GiB free, used by 4711 (anna, python train.py, 100 GiB)" in str(row.what)
    row = gpus((replace(H200, free_bytes=40 * GIB, processes=()),), CUDA)["gpu-0"]
    assert "another container" in str(row.fix)
    assert str(gpus((replace(H200, processes=()),), CUDA)["gpu-0"].what).endswith("used by nobody")


def test_what_is_unknown_is_said_and_not_zero() -> None:
    row = gpus((Card(index=0, vendor="hygon", memory_percent=20),), HIP)["gpu-0"]
    assert str(row.what) == "GPU 0: a card without a name, its memory is not told, 20 % of it used"
    assert "--gpus" in str(row.fix)


def test_hardware_without_a_driver(tmp_path: Path) -> None:
    place = tmp_path / "sys/bus/pci/devices/0000:01:00.0"
    place.mkdir(parents=True)
    (place / "class").write_text("0x030200\n")
    (place / "vendor").write_text("0x10de\n")
    (row,) = gpu_rows(Cards(), None, tmp_path)
    assert (row.id, row.light) == ("no-driver", "red")
    assert "--gpus all" in str(row.fix)
    (row,) = gpu_rows(Cards(), None, tmp_path / "none")
    assert (row.id, row.light) == ("no-gpu", "yellow")
    (row,) = gpu_rows(Cards(problems=("nvidia-smi failed: no driver.",)), None, tmp_path)
    assert (row.id, row.light) == ("gpu-tool", "red")


# --- building -----------------------------------------------------------------------------------


def built(
    env: dict[str, str],
    build: TorchBuild | None = CUDA,
    cards: int = 1,
    nvcc: str | None = "12.4",
    root: Path = Path("/"),
) -> dict[str, Check]:
    return by_id(building_rows(("c++ 12.2.0", nvcc), build, env, cards, root))


def test_the_arch_list_that_deepspeed_cannot_read() -> None:
    row = built({"TORCH_CUDA_ARCH_LIST": "8.0;9.0a 10.0+PTX"})["arch-list"]
    assert row.light == "red"
    assert row.commands == ("export TORCH_CUDA_ARCH_LIST='8.0;9.0;10.0+PTX'",)
    assert built({"TORCH_CUDA_ARCH_LIST": "Hopper"})["arch-list"].commands == ("unset TORCH_CUDA_ARCH_LIST",)
    assert "arch-list" not in built({"TORCH_CUDA_ARCH_LIST": "8.0 9.0+PTX"})


def test_a_toolkit_against_torch() -> None:
    assert built({})["nvcc"].light == "green", "DeepSpeed takes one CUDA 12 for another"
    assert built({}, nvcc="11.8")["nvcc"].light == "yellow"
    thirteen = replace(CUDA, cuda="13.0")
    assert built({}, thirteen, nvcc="13.1")["nvcc"].light == "yellow", "its list ends with CUDA 12"
    assert built({}, thirteen, nvcc="13.0")["nvcc"].light == "green"
    assert built({}, nvcc=None)["nvcc"].light == "yellow"
    assert built({"CUDA_HOME": "/nowhere"})["cuda-home"].commands == ("unset CUDA_HOME",)


def test_a_toolkit_of_hygon(tmp_path: Path) -> None:
    (tmp_path / "opt/dtk").mkdir(parents=True)
    (tmp_path / "opt/dtk/.dtk_version").write_text("25.04.1\n")
    row = built({}, HIP, root=tmp_path)["hip-toolkit"]
    assert (row.light, str(row.what)) == ("green", "DTK 25.04.1 is installed, and torch is built for DTK 25.04.1")
    other = built({}, replace(HIP, version="2.4.1+das.dtk2604"), root=tmp_path)
    assert other["hip-toolkit"].light == "yellow"
    assert "hip-toolkit" not in built({}, HIP, root=tmp_path / "none")


def test_collectives(tmp_path: Path) -> None:
    (row,) = collectives(CUDA, {"nvidia-nccl-cu12": "2.27.3"}, 8, tmp_path)
    assert str(row.what) == "collectives: NCCL 2.27.3 (nvidia-nccl-cu12)"
    (row,) = collectives(HIP, {}, 8, tmp_path)
    assert row.light == "yellow"
    (tmp_path / "opt/dtk/lib").mkdir(parents=True)
    (tmp_path / "opt/dtk/lib/librccl.so.1").write_text("")
    (row,) = collectives(HIP, {}, 8, tmp_path)
    assert row.light == "green"


# --- the environment ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("env", "cards", "name", "light"),
    [
        ({"CUDA_VISIBLE_DEVICES": "0", "HIP_VISIBLE_DEVICES": "1"}, [K100], "visible-devices", "red"),
        ({"HIP_VISIBLE_DEVICES": "0,1", "ROCR_VISIBLE_DEVICES": "3"}, [K100], "visible-rocr", "red"),
        ({"CUDA_VISIBLE_DEVICES": "0,7"}, [H200], "visible-unknown", "red"),
        ({"CUDA_VISIBLE_DEVICES": ""}, [H200], "visible-none", "yellow"),
        ({"CUDA_VISIBLE_DEVICES": "1"}, [H200, replace(H200, index=1, name="RTX 4090")], "device-order", "yellow"),
        (
            {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", "PYTORCH_ALLOC_CONF": "max_split_size_mb:64"},
            [H200],
            "allocator-twice",
            "yellow",
        ),
        ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments=True"}, [H200], "allocator-option", "red"),
        ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}, [K100], "allocator-hip", "red"),
        ({"PYTORCH_ALLOC_CONF": "roundup_power2_divisions:16"}, [H200], "allocator-rounding", "yellow"),
        ({"PYTORCH_ALLOC_CONF": "roundup_power2_divisions:[256:1,>:4]"}, [], "allocator-rounding", "yellow"),
        ({"NCCL_P2P_DISABLE": "1"}, [H200], "slow-nccl_p2p_disable", "yellow"),
        ({"NCCL_SOCKET_IFNAME": "nosuch0"}, [H200], "interface-nccl", "red"),
        ({"RANK": "0", "WORLD_SIZE": "8"}, [], "launcher-variables", "yellow"),
        ({"OMP_NUM_THREADS": "1"}, [], "threads", "yellow"),
    ],
)
def test_variables_that_contradict(
    env: dict[str, str], cards: list[Card], name: str, light: str, tmp_path: Path
) -> None:
    (tmp_path / "sys/class/net/eth0").mkdir(parents=True)
    found = by_id(environment_rows(env, cards, tmp_path))
    assert found[name].light == light
    assert found[name].fix


@pytest.mark.parametrize(
    ("value", "percent", "command"),
    [
        ("expandable_segments:True,roundup_power2_divisions:16", "6 %", "export {}=expandable_segments:True"),
        ("roundup_power2_divisions:[256:1,512:2,>:8],max_split_size_mb:64", "50 %", "export {}=max_split_size_mb:64"),
        ("roundup_power2_divisions: 4", "25 %", "unset {}"),
    ],
)
def test_rounding_says_what_it_costs_and_how_to_leave_it_out(value: str, percent: str, command: str) -> None:
    name = "PYTORCH_CUDA_ALLOC_CONF"
    row = by_id(environment_rows({name: value}, [H200]))["allocator-rounding"]
    assert f"by up to {percent}" in str(row.what)
    assert row.commands == (command.format(name),)


@pytest.mark.parametrize(
    ("env", "cards"),
    [
        ({}, []),
        ({"CUDA_VISIBLE_DEVICES": "0"}, [H200]),
        ({"CUDA_VISIBLE_DEVICES": "0", "HIP_VISIBLE_DEVICES": " 0"}, [K100]),
        ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True,roundup_power2_divisions:[256:1,512:0]"}, [H200]),
        ({"PYTORCH_CUDA_ALLOC_CONF": "roundup_power2_divisions:1"}, [H200]),
        ({"NCCL_P2P_DISABLE": "0", "NCCL_SOCKET_IFNAME": "eth"}, [H200]),
        ({"NCCL_SOCKET_IFNAME": "^lo,docker", "MASTER_ADDR": "here"}, [H200]),
    ],
)
def test_variables_that_are_fine(env: dict[str, str], cards: list[Card], tmp_path: Path) -> None:
    (tmp_path / "sys/class/net/eth0").mkdir(parents=True)
    (row,) = environment_rows(env, cards, tmp_path)
    assert (row.id, row.light) == ("environment", "green")
