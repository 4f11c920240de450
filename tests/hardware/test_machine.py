"""What this machine says about itself, through stand-ins for the makers' tools.

Each stand-in is a real executable on PATH that replays lines recorded from such a tool.
"""

from __future__ import annotations

import json
import os
import stat
import sys
from pathlib import Path

import pytest

import patience
from tightfit.hardware import machine
from tightfit.hardware.catalogue import GIB, MIB
from tightfit.hardware.machine import fp16_here, this_machine
from tightfit.hardware.probes import tools
from tightfit.types import HardwareError

UUID = "GPU-5ad1a1f0-7a0c-4c3e-8b60-0d5a6a0c5a0"

H200 = f"0, {UUID}0, 143771, 9.0, NVIDIA H200\n"
FOUR_4090 = "".join(f"{i}, {UUID}{i}, 24564, 8.9, NVIDIA GeForce RTX 4090\n" for i in range(4))
MIXED = f"0, {UUID}0, 24576, 8.6, NVIDIA GeForce RTX 3090\n1, {UUID}1, 16376, 8.9, NVIDIA GeForce RTX 4080\n"

K100_AI = json.dumps(
    {
        f"card{i}": {
            "Device ID": "0x6210",
            "Card Series": "K100_AI",
            "Average Graphics Package Power (W)": "77.0",
            "HCU use (%)": "0.0",
            "vram Total Memory (MiB)": "65520",
            "vram Total Used Memory (MiB)": "2",
        }
        for i in range(8)
    }
)
NO_COMMAS = (
    '{"card0":{"Average Graphics Package Power (W)":"80.0""Average GFX Core Power (W)":"9.0"'
    '"Average Memory Power (W)":"35.0","HCU use (%)":"0.0","vram Total Used Memory (MiB)":"1166",'
    '"vram Total Memory (MiB)":"65520"}}'
)
OLDER_DCU = (
    '{"card0":{"DCU use (%)":"92","VRAM Total Memory (B)":"34359738368","VRAM Total Used Memory (B)":"8589934592"},'
    '"card1":{"DCU use (%)":"0"}}'
)
NUMBERS = '{"card1":{"HCU use (%)":7,"vram Total Memory (B)":68702699520,"Card Series":"K100_AI"}}'
RX_7900_XT = json.dumps(
    {
        "card0": {
            "GPU use (%)": "0",
            "VRAM Total Memory (B)": "21458059264",
            "VRAM Total Used Memory (B)": "27856896",
            "Card Series": "Radeon RX 7900 XT",
            "Card Model": "0x744c",
            "Card Vendor": "Advanced Micro Devices, Inc. [AMD/ATI]",
            "GFX Version": "gfx1100",
        },
        "system": {"Driver version": "6.8.5"},
    }
)


class Bench:
    """A PATH with nothing on it but the stand-ins that a test puts there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()

    def install(self, tool: str, output: str, *, code: int = 0, refuse: str = "") -> None:
        """A tool that prints `output`; with `refuse`, it fails when an argument holds that word."""
        path = self.folder / tool
        path.write_text(
            f"#!{sys.executable} -SE\n"
            "import sys\n"
            f"if {refuse!r} and {refuse!r} in ' '.join(sys.argv[1:]):\n"
            f"    print('Field \"{refuse}\" is not a valid field to query.')\n"
            "    sys.exit(2)\n"
            f"sys.stdout.write({output!r})\n"
            f"sys.exit({code})\n"
        )
        path.chmod(path.stat().st_mode | stat.S_IXUSR)


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setattr(tools, "BESIDE_PATH", {})
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    return Bench(tmp_path / "bin")


# --- NVIDIA -------------------------------------------------------------------------------------


def test_nvidia_smi_shows_one_h200(bench: Bench) -> None:
    bench.install("nvidia-smi", H200)
    hardware = this_machine()
    assert hardware.gpu.name == "H200"
    assert hardware.gpu.memory_bytes == 143771 * MIB
    assert hardware.gpu.arch == "sm_90"
    assert hardware.world == 1
    assert str(hardware.because[0]) == "nvidia-smi shows 1 × NVIDIA H200."
    assert hardware.host_ram_bytes is not None


def test_an_old_driver_does_not_know_compute_cap(bench: Bench) -> None:
    bench.install("nvidia-smi", f"0, {UUID}0, 32510, Tesla V100-SXM2-32GB\n", refuse="compute_cap")
    hardware = this_machine()
    assert (hardware.gpu.name, hardware.gpu.arch) == ("V100 32GB SXM", "sm_70")
    assert hardware.gpu.memory_bytes == 32510 * MIB


@pytest.mark.parametrize("name", ['"NVIDIA Quadro, Custom"', "NVIDIA Quadro, Custom"])
def test_a_name_may_hold_commas_quoted_or_not(bench: Bench, name: str) -> None:
    bench.install("nvidia-smi", f"0, {UUID}0, 8192, 7.5, {name}\n")
    hardware = this_machine()
    assert hardware.gpu.name == "NVIDIA Quadro, Custom"
    assert (hardware.gpu.vendor, hardware.gpu.memory_bytes) == ("nvidia", 8192 * MIB)
    assert "NVIDIA Quadro, Custom is not in our catalogue, so its rates are unknown." in map(str, hardware.because)


@pytest.mark.parametrize("unknown", ["[N/A]", "[Not Supported]", "N/A", "[Unknown Error]", "", "0", "-1"])
def test_unknown_memory_is_not_zero(bench: Bench, unknown: str) -> None:
    bench.install("nvidia-smi", f"0, {UUID}0, {unknown}, 12.1, NVIDIA GB10\n")
    with pytest.raises(HardwareError, match="does not say how much memory NVIDIA GB10 has: say it with --gpus"):
        this_machine()


def test_an_unreadable_card_is_like_its_neighbours(bench: Bench) -> None:
    bench.install("nvidia-smi", f"0, {UUID}0, 10240, 8.6, NVIDIA GeForce RTX 3080\n1, {UUID}1, [N/A], [N/A], [N/A]\n")
    hardware = this_machine()
    assert (hardware.world, hardware.gpu.name) == (2, "RTX 3080 10GB")
    assert "1 of 2 GPUs report no memory size: taken to be like the others." in map(str, hardware.because)


def test_a_known_card_with_one_size_needs_no_report(bench: Bench) -> None:
    bench.install("nvidia-smi", f"0, {UUID}0, [N/A], 8.9, NVIDIA GeForce RTX 4090\n")
    assert this_machine().gpu.memory_bytes == 24564 * MIB


def test_mixed_cards_take_the_smallest_memory_and_the_slowest_rate(bench: Bench) -> None:
    bench.install("nvidia-smi", MIXED)
    hardware = this_machine()
    assert hardware.world == 2
    assert hardware.gpu.memory_bytes == 16376 * MIB
    assert hardware.gpu.bf16_flops == pytest.approx(71.2e12), "the RTX 3090's, which is the slower one"
    assert any("not alike" in line and "16.0 GiB of RTX 4080" in line for line in map(str, hardware.because))


@pytest.mark.parametrize(
    ("wanted", "left"),
    [
        ("0,2", 2),
        (f"{UUID}1", 1),
        (f" {UUID}3 , 0", 2),
        ("1,1", 1),
        ("0,9,1", 1),
        ("3,-1,2", 1),
    ],
)
def test_cuda_visible_devices(bench: Bench, monkeypatch: pytest.MonkeyPatch, wanted: str, left: int) -> None:
    bench.install("nvidia-smi", FOUR_4090)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", wanted)
    hardware = this_machine()
    assert hardware.world == left
    assert f"CUDA_VISIBLE_DEVICES={wanted} leaves {left} of 4 GPUs." in map(str, hardware.because)


@pytest.mark.parametrize("wanted", ["", "-1", "NoDevFiles", "GPU-", "17"])
def test_hidden_gpus_leave_the_cpu_and_the_reason(bench: Bench, monkeypatch: pytest.MonkeyPatch, wanted: str) -> None:
    bench.install("nvidia-smi", FOUR_4090)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", wanted)
    hardware = this_machine()
    assert hardware.gpu.vendor == "cpu"
    assert str(hardware.because[0]) == f"CUDA_VISIBLE_DEVICES={wanted} leaves 0 of 4 GPUs."


def test_leaving_the_small_card_out(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.install("nvidia-smi", MIXED)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert this_machine().gpu.name == "RTX 3090"


def test_a_mig_slice_is_asked_of_the_user(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.install("nvidia-smi", H200)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-41b3359c-e721-56e5-8009-12e5797ed514")
    with pytest.raises(HardwareError, match="MIG slice"):
        this_machine()


def test_nvml_is_asked_first(bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module that answers as nvidia-ml-py 13 does, refusing one field of the second card."""
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "pynvml.py").write_text(
        "class NVMLError(Exception): pass\n"
        "class Memory:\n"
        f"    total, free, used = {81559 * MIB}, 0, 0\n"
        "def nvmlInit(): pass\n"
        "def nvmlShutdown(): pass\n"
        "def nvmlDeviceGetCount(): return 2\n"
        "def nvmlDeviceGetHandleByIndex(index): return index\n"
        "def nvmlDeviceGetName(handle): return b'NVIDIA H100 80GB HBM3'\n"
        "def nvmlDeviceGetUUID(handle): return f'GPU-{handle}'\n"
        "def nvmlDeviceGetMemoryInfo(handle): return Memory()\n"
        "def nvmlDeviceGetCudaComputeCapability(handle):\n"
        "    if handle: raise NVMLError('Not Supported')\n"
        "    return (9, 0)\n"
    )
    monkeypatch.delitem(sys.modules, "pynvml")
    monkeypatch.syspath_prepend(str(tmp_path / "lib"))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "lib"))
    bench.install("nvidia-smi", FOUR_4090)
    hardware = this_machine()
    assert (hardware.world, hardware.gpu.name) == (2, "H100 SXM")
    assert str(hardware.because[0]) == "NVML shows 2 × NVIDIA H100 80GB HBM3."


# --- AMD and Hygon ------------------------------------------------------------------------------


def test_hy_smi_shows_eight_k100_ai(bench: Bench) -> None:
    bench.install("hy-smi", K100_AI)
    bench.install("rocm-smi", K100_AI)
    hardware = this_machine()
    assert hardware.world == 8, "both tools list the same cards"
    assert (hardware.gpu.name, hardware.gpu.vendor, hardware.gpu.arch) == ("K100-AI", "hygon", "gfx928")
    assert hardware.gpu.memory_bytes == 65520 * MIB
    assert hardware.gpu.bf16_flops is None


@pytest.mark.parametrize(
    ("output", "world", "mib"),
    [
        (NO_COMMAS, 1, 65520),
        (OLDER_DCU, 2, 32768),
        (NUMBERS, 1, 65520),
        ("==== ROCm SMI ====\n" + K100_AI + "\n==== End ====\n", 8, 65520),
    ],
)
def test_the_shapes_of_hy_smi(bench: Bench, output: str, world: int, mib: int) -> None:
    bench.install("hy-smi", output)
    hardware = this_machine()
    assert (hardware.world, hardware.gpu.vendor, hardware.gpu.memory_bytes) == (world, "hygon", mib * MIB)


def test_a_dcu_behind_the_compatible_name_is_still_hygon(bench: Bench) -> None:
    bench.install("rocm-smi", OLDER_DCU)
    assert this_machine().gpu.vendor == "hygon"


def test_rocm_smi(bench: Bench) -> None:
    bench.install("rocm-smi", RX_7900_XT)
    hardware = this_machine()
    assert (hardware.gpu.name, hardware.gpu.vendor, hardware.gpu.arch) == ("RX 7900 XT", "amd", "gfx1100")
    assert hardware.gpu.memory_bytes == 21458059264


@pytest.mark.thorough
@pytest.mark.parametrize("output", ["", "ERROR: GPU[0] : Unable to get GPU memory use.\n", "[1, 2]", "{", '{"a": 1}'])
def test_a_tool_that_talks_nonsense_leaves_the_cpu(bench: Bench, output: str) -> None:
    bench.install("rocm-smi", output)
    hardware = this_machine()
    assert hardware.gpu.vendor == "cpu"
    assert str(hardware.because[0]).startswith("rocm-smi ")


def test_without_a_total_the_user_is_asked(bench: Bench) -> None:
    bench.install("hy-smi", '{"card0": {"HCU use (%)": "0.0", "vram Total Memory (MiB)": "N/A"}}')
    with pytest.raises(HardwareError, match="hy-smi does not say how much memory Hygon DCU has"):
        this_machine()


@pytest.mark.parametrize(
    ("env", "left"),
    [
        ({"HIP_VISIBLE_DEVICES": "0,1,2"}, 3),
        ({"CUDA_VISIBLE_DEVICES": "0,1"}, 2),
        ({"HIP_VISIBLE_DEVICES": "0,1,2", "CUDA_VISIBLE_DEVICES": "0"}, 3),
        ({"ROCR_VISIBLE_DEVICES": "4,5,6,7", "HIP_VISIBLE_DEVICES": "0,3"}, 2),
        ({"ROCR_VISIBLE_DEVICES": "4,5", "HIP_VISIBLE_DEVICES": "0,3"}, 1),
    ],
)
def test_hip_visibility(bench: Bench, monkeypatch: pytest.MonkeyPatch, env: dict[str, str], left: int) -> None:
    bench.install("hy-smi", K100_AI)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    assert this_machine().world == left


# --- no GPU, and the host -----------------------------------------------------------------------


def test_without_a_gpu_the_cpu_is_two_ranks(bench: Bench) -> None:
    hardware = this_machine(host_ram="64GB", nvme="1TB")
    assert (hardware.gpu.name, hardware.gpu.vendor, hardware.world) == ("CPU", "cpu", 2)
    assert hardware.gpu.memory_bytes == 32 * GIB
    assert (hardware.host_ram_bytes, hardware.nvme_bytes) == (64 * GIB, 1024 * GIB)
    assert tuple(map(str, hardware.because)) == (
        "There is no GPU to use, so the CPU stands in as two ranks with 32.0 GiB of host RAM each.",
    )


def test_a_broken_driver_is_named(bench: Bench) -> None:
    said = "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.\nMake sure …\n"
    bench.install("nvidia-smi", said, code=9)
    hardware = this_machine()
    assert hardware.gpu.vendor == "cpu"
    assert str(hardware.because[0]) == f"nvidia-smi failed: {said.splitlines()[0]}"


@pytest.mark.thorough
def test_a_hung_driver_is_given_up(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.install("nvidia-smi", "")
    script = bench.folder / "nvidia-smi"
    script.write_text(f"#!{sys.executable} -SE\nimport time\ntime.sleep(60)\n")
    monkeypatch.setattr(machine, "_TIMEOUT_S", 0.5)
    assert str(this_machine().because[0]) == "nvidia-smi did not answer within 0.5 s."


@pytest.mark.thorough
def test_a_tool_that_hung_is_not_asked_again_for_a_while(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.install("nvidia-smi", "")
    (bench.folder / "nvidia-smi").write_text(f"#!{sys.executable} -SE\nimport time\ntime.sleep(60)\n")
    monkeypatch.setattr(machine, "_TIMEOUT_S", 0.5)
    this_machine()
    begun = patience.now()
    assert str(this_machine().because[0]) == "nvidia-smi did not answer a moment ago."
    assert patience.now() - begun < 0.5
    monkeypatch.setattr(tools, "FORGIVE_S", 0)
    assert str(this_machine().because[0]) == "nvidia-smi did not answer within 0.5 s."


@pytest.mark.parametrize(
    ("output", "mib"),
    [
        ("HCU[0]\t\t: Card Series: K100_AI\nHCU[0]\t\t: vram Total Memory (MiB): 65520\n", 65520),
        ("device,Card Series,vram Total Memory (MiB)\ncard0,K100_AI,65520\n", 65520),
    ],
)
def test_a_hy_smi_that_knows_no_json(bench: Bench, output: str, mib: int) -> None:
    bench.install("hy-smi", output, refuse="--json")
    hardware = this_machine()
    assert (hardware.gpu.name, hardware.gpu.memory_bytes) == ("K100-AI", mib * MIB)


@pytest.mark.skipif(os.name != "posix", reason="a script without an interpreter is a Unix thing")
def test_a_tool_that_cannot_start(bench: Bench) -> None:
    bench.install("nvidia-smi", "")
    (bench.folder / "nvidia-smi").write_text("#!/nonexistent/interpreter\n")
    assert str(this_machine().because[0]).startswith("nvidia-smi cannot be started: ")


def host(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


FLAGS = "processor\t: 0\nflags\t\t: fpu avx2 avx512f {}\n"


@pytest.mark.parametrize(
    ("cpuinfo", "most", "fp16"),
    [
        (FLAGS.format("avx512_fp16"), None, True),
        (FLAGS.format("avx512_fp16"), "AVX512_CORE_AMX", True),
        (FLAGS.format("avx512_fp16"), "avx512_core", False),
        (FLAGS.format("avx512_bf16"), None, False),
        ("processor\t: 0\nFeatures\t: fp asimd asimdhp\n", None, None),
        ("", None, None),
    ],
)
def test_a_processor_computes_fp16_as_torch_sees_it(
    tmp_path: Path, cpuinfo: str, most: str | None, fp16: bool | None
) -> None:
    env = {} if most is None else {"ONEDNN_MAX_CPU_ISA": most}
    assert fp16_here(host(tmp_path, {"proc/cpuinfo": cpuinfo}), env) is fp16


MEMINFO = {"proc/meminfo": "MemTotal:       65000000 kB\nMemFree:  1 kB\n"}
TOTAL = 65000000 * 1024


@pytest.mark.parametrize(
    ("files", "ram"),
    [
        ({}, TOTAL),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": "max\n"}, TOTAL),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": "8589934592\n"}, 8 * GIB),
        (
            {
                "proc/self/cgroup": "0::/user.slice/job_7/step_0\n",
                "sys/fs/cgroup/user.slice/job_7/memory.max": "17179869184\n",
                "sys/fs/cgroup/user.slice/job_7/step_0/memory.max": "max\n",
            },
            16 * GIB,
        ),
        (
            {
                "proc/self/cgroup": "5:cpuset:/\n4:hugetlb,memory:/docker/abc\n0::/\n",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": "4294967296\n",
            },
            4 * GIB,
        ),
        (
            {
                "proc/self/cgroup": "4:memory:/job\n",
                "sys/fs/cgroup/memory/job/memory.limit_in_bytes": "9223372036854771712\n",
            },
            TOTAL,
        ),
        ({"proc/self/cgroup": "garbage\n::\n4:memory\n"}, TOTAL),
    ],
)
def test_host_ram_is_what_the_control_group_allows(tmp_path: Path, files: dict[str, str], ram: int) -> None:
    found, because = machine.ram_here(host(tmp_path, MEMINFO | files))
    assert found == ram
    assert bool(because) == (ram < TOTAL)


def test_host_ram_without_proc(tmp_path: Path) -> None:
    found, _ = machine.ram_here(tmp_path)
    assert found is None or found > GIB


def test_free_ram_is_what_the_control_group_has_left(tmp_path: Path) -> None:
    files = {
        "proc/meminfo": "MemTotal: 65000000 kB\nMemAvailable: 50000000 kB\n",
        "proc/self/cgroup": "0::/job\n",
        "sys/fs/cgroup/job/memory.max": f"{8 * GIB}\n",
        "sys/fs/cgroup/job/memory.current": f"{7 * GIB}\n",
        "sys/fs/cgroup/job/memory.stat": f"anon {4 * GIB}\nfile {3 * GIB}\ninactive_file {2 * GIB}\n",
    }
    root = host(tmp_path, files)
    assert machine.free_ram(root) == 3 * GIB  # files that are kept in memory make way
    (root / "sys/fs/cgroup/job/memory.current").write_text(f"{11 * GIB}\n")
    assert machine.free_ram(root) == 0
