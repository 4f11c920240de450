"""Answers of the makers' tools in the shapes that their releases have: true formats, invented machines."""

from __future__ import annotations

import json

# --- hy-smi -------------------------------------------------------------------------------------

HY_JSON = json.dumps(
    {
        f"card{i}": {
            "Device ID": "0x6210",
            "Serial Number": f"TKXA0000{i}",
            "Unique ID": f"0x41f0a{i}",
            "Card Series": "K100_AI",
            "PCI Bus": f"0000:0{i + 1}:00.0",
            "Average Graphics Package Power (W)": "77.0",
            "Temperature (Sensor edge) (C)": "37.0",
            "HCU use (%)": f"{10 * i}.0",
            "vram Total Memory (MiB)": "65520",
            "vram Total Used Memory (MiB)": str(2 + 1000 * i),
        }
        for i in range(2)
    }
)
HY_NO_COMMAS = (
    '{"card0":{"Average Graphics Package Power (W)":"81.5""Average GFX Core Power (W)":"9.0"'
    '"Average Memory Power (W)":"35.0","HCU use (%)":"12.0""vram Total Used Memory (MiB)":"1166",'
    '"vram Total Memory (MiB)":"65520"}"card1":{"HCU use (%)":7"vram Total Memory (MiB)":"65520"}}'
)
HY_OLDER = (
    '{"card0":{"DCU use (%)":"92","VRAM Total Memory (B)":"34359738368","VRAM Total Used Memory (B)":"8589934592"},'
    '"card1":{"DCU use (%)":"0"}}'
)
HY_NUMBERS = (
    '{"card1":{"HCU use (%)":7,"vram Total Memory (B)":68702699520,"vram Total Used Memory (B)":"512",'
    '"Temperature (Sensor core) (C)":"50.0"}}'
)
HY_TEXT = (
    "============================ System Management Interface =============================\n"
    "HCU[3]\t\t: Card Series: K100_AI\n"
    "HCU[3]\t\t: PCI Bus: 0000:09:00.0\n"
    "HCU[3]\t\t: HCU use (%): 15.0\n"
    "HCU[3]\t\t: vram Total Memory (MiB): 65520\n"
    "HCU[3]\t\t: vram Total Used Memory (MiB): 12058\n"
    "HCU[5]\t\t: HCU use (%): N/A\n"
    "================================ End of SMI Log ======================================\n"
)
HY_TEXT_OLD = "DCU[0] : DCU use (%): 75\nDCU[0] : GPU Memory Allocated (VRAM%): 60\nDCU[1] : DCU use (%): -1\n"
HY_CSV = (
    "WARNING: some banner, with a comma\n"
    "device,HCU use (%),vram Total Memory (MiB),vram Total Used Memory (MiB),Card Series,"
    "Temperature (Sensor edge) (C)\n"
    "card0,10,65520,1024,K100_AI,41.0\n"
    'card1,0,65520,N/A,"K100_AI, second",40.0\n'
    "card2,0,65520\n"
)
HY_TABLE = (
    "=================== DCU System Management Interface =====================\n"
    "==========================================================================\n"
    "DCU  Temp   AvgPwr  SCLK    MCLK     Fan  Perf  PwrCap  VRAM%  DCU%\n"
    "0    46.0c  32.0W   700Mhz  1200Mhz  0%   auto  300W    20%    84%\n"
    "1    47.0c  N/A     700Mhz  1200Mhz  0%   auto  300W    N/A    0%\n"
    "==========================================================================\n"
)
HY_FREE = (
    '{"card0":{"Available memory size (MiB)":"45027","vram Total Memory (MiB)":"65520","HCU memory use (%)":"31"}}'
)
HY_PIDS = (
    "PIDs for KFD processes:\n"
    "PID: 4711\n\tPASID: 32770\n\tHCU Node(Include CPU sort): ['8']\n\tHCU Index: ['0']\n"
    "\tPCI BUS: ['0000:01:00.0']\n\tVRAM USED(MiB): 12058\n\tVRAM USED(%): 18\n"
    "PID: 4712\n\tPCI BUS: ['0000:02:00.0']\n\tVRAM USED(MiB): 7\n\tVRAM USED(%): 0\n"
)

# --- rocm-smi -----------------------------------------------------------------------------------

ROCM_JSON = json.dumps(
    {
        "card0": {
            "GPU use (%)": "3",
            "VRAM Total Memory (B)": "21458059264",
            "VRAM Total Used Memory (B)": "27856896",
            "Card Series": "Radeon RX 7900 XT",
            "Card Model": "0x744c",
            "Card Vendor": "Advanced Micro Devices, Inc. [AMD/ATI]",
            "PCI Bus": "0000:03:00.0",
            "GFX Version": "gfx1100",
            "Current Socket Graphics Package Power (W)": "25.0",
        },
        "system": {"Driver version": "6.8.5", "PID4711": "python, 1, 1073741824, 0, 0"},
    },
    indent=4,
)
ROCM_TEXT = (
    "GPU[0]\t\t: VRAM Total Memory (B): 34342961152\n"
    "GPU[0]\t\t: VRAM Total Used Memory (B): 7028736\n"
    "ERROR: GPU[1] : Unable to get GPU memory use.\n"
)
ROCM_CSV = (
    "device,GPU use (%),VRAM Total Memory (B),VRAM Total Used Memory (B),Card Series\n"
    "card0,0,34342961152,7028736,AMD Instinct MI100\n"
)
ROCM_TABLE = (
    "======================== ROCm System Management Interface ========================\n"
    "Device  Node  IDs              Temp        Power     Partitions          SCLK    MCLK    Fan  Perf  PwrCap  VRAM%"
    "  GPU%\n"
    "              (DID,     GUID)  (Junction)  (Socket)  (Mem, Compute, ID)\n"
    "0       2     0x74a1,   28851  48.0°C      135.0W    NPS1, SPX, 0        124Mhz  900Mhz  0%   auto  750.0W  3%"
    "     95%\n"
)
ROCM_PIDS = (
    "PID    PROCESS NAME  GPU(s)  VRAM USED   SDMA USED  CU OCCUPANCY\n"
    "4711   python        1       1073741824  0          0\n"
    "4712   UNKNOWN       0       0           0          UNKNOWN\n"
)

# --- amd-smi ------------------------------------------------------------------------------------

_AMD_CARD = {
    "gpu": 0,
    "usage": {
        "gfx_activity": {"value": 94, "unit": "%"},
        "umc_activity": {"value": 61, "unit": "%"},
        "mm_activity": "N/A",
    },
    "power": {"socket_power": {"value": 612, "unit": "W"}},
    "temperature": {"edge": "N/A", "hotspot": {"value": 71, "unit": "C"}},
    "mem_usage": {"total_vram": {"value": 196592, "unit": "MB"}, "used_vram": {"value": 17153, "unit": "MB"}},
}
AMD_WRAPPED = json.dumps({"gpu_data": [_AMD_CARD]})
AMD_LIST = "WARNING: User is missing the following required groups: render, video [see docs].\n" + json.dumps(
    [_AMD_CARD, {"gpu": 1, "mem_usage": {"total_vram": 196592, "used_vram": "N/A"}, "usage": "N/A"}], indent=4
)
AMD_ONE = json.dumps(_AMD_CARD | {"gpu": 3})
AMD_TEXT = (
    "GPU: 0\n    USAGE:\n        GFX_ACTIVITY: 94 %\n        UMC_ACTIVITY: N/A\n"
    "    POWER:\n        SOCKET_POWER: 612 W\n"
    "    MEM_USAGE:\n        TOTAL_VRAM: 196592 MB\n        USED_VRAM: 17153 MB\n\nGPU: 1\n    USAGE:\n"
    "        GFX_ACTIVITY: N/A\n"
)
AMD_STATIC = json.dumps(
    {
        "gpu_data": [
            {
                "gpu": 0,
                "asic": {"market_name": "AMD Instinct MI300X", "target_graphics_version": "gfx942"},
                "bus": {"bdf": "0000:C5:00.0"},
            }
        ]
    }
)
AMD_PROCESS = json.dumps(
    [
        {
            "gpu": 0,
            "process_list": [
                {
                    "process_info": {
                        "name": "python",
                        "pid": 4711,
                        "memory_usage": {"vram_mem": {"value": 5, "unit": "B"}},
                    }
                },
                {"process_info": "N/A"},
            ],
        },
        {"gpu": 1, "process_list": [{"process_info": "No running processes detected"}]},
    ]
)

# --- NVIDIA -------------------------------------------------------------------------------------

UUID = "GPU-5ad1a1f0-7a0c-4c3e-8b60-0d5a6a0c5a0"
NVIDIA_ROWS = (
    f"0, 00000000:1B:00.0, {UUID}0, 143771, 4, 143155, 0, 31, 76.20, 570.124.06, 9.0, NVIDIA H200\n"
    f"1, 00000000:43:00.0, {UUID}1, 143771, 120000, 23159, 99, 64, 612.75, 570.124.06, 9.0, NVIDIA H200\n"
    f"2, 00000000:52:00.0, {UUID}2, [N/A], [Not Supported], [N/A], [N/A], N/A, [Unknown Error], 570.124.06, [N/A], "
    '"Odd, card"\n'
)
NVIDIA_APPS = f"{UUID}1, 4711, 119500\n{UUID}1, 4000000, [N/A]\nGPU-other, 1, 5\nnonsense\n"
NVIDIA_HEAD = (
    "+-----------------------------------------------------------------------------------------+\n"
    "| NVIDIA-SMI 570.124.06             Driver Version: 570.124.06     CUDA Version: 12.8     |\n"
    "+-----------------------------------------------------------------------------------------+\n"
)
NVIDIA_TOPO = (
    "\t\x1b[4mGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m\n"
    "GPU0\t X \tNV18\tSYS\tPIX\t0-47\t0\t\tN/A\n"
    "GPU1\tNV18\t X \tNODE\tSYS\t0-47\t0\t\tN/A\n"
    "GPU2\tSYS\tNODE\t X \tSYS\t48-95\t1\t\tN/A\n"
    "NIC0\tPIX\tSYS\tSYS\t X \t\t\t\t\n\nLegend:\n\n  X    = Self\n"
)
NVML = json.dumps(
    {
        "cards": [
            {
                "index": 0,
                "name": "NVIDIA H200",
                "uuid": f"{UUID}0",
                "pci": "00000000:1B:00.0",
                "total_bytes": 150754820096,
                "used_bytes": 4194304,
                "free_bytes": 150750625792,
                "use_percent": 0,
                "temperature_c": 31,
                "power_w": 76.2,
                "arch": "sm_90",
                "processes": [[4711, 5], [4712, None]],
            }
        ],
        "driver": "570.124.06",
        "cuda": 12080,
    }
)
TORCH = json.dumps(
    {
        "hip": None,
        "cards": [
            {"index": 0, "name": "NVIDIA H200", "total_bytes": 150754820096, "free_bytes": 4096, "arch": "sm_90"}
        ],
    }
)
TORCH_DTK = json.dumps(
    {
        "hip": "6.3.0",
        "cards": [
            {"index": 0, "name": "K100_AI", "total_bytes": 68702699520, "free_bytes": None, "arch": "gfx928:sramecc+"}
        ],
    }
)
