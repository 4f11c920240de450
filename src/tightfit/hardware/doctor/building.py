"""What DeepSpeed and others need to build their kernels here: compilers, ninja, headers, a toolkit that fits torch."""

from __future__ import annotations

import re
import shutil
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from tightfit.hardware.doctor.packages import TorchBuild
from tightfit.hardware.doctor.row import Light, Row
from tightfit.hardware.probes.tools import Silent, ask, place_of, run
from tightfit.inputs.versions import release

_LIBRARIES = ("usr/lib", "usr/lib64", "usr/lib/x86_64-linux-gnu", "usr/lib/aarch64-linux-gnu", "usr/local/lib")
_ROCM = ("opt/rocm/lib", "opt/dtk/lib", "opt/dtk/rccl/lib")
_SAME_ENOUGH = (10, 11, 12)
"""Major releases of CUDA whose minor ones DeepSpeed's builder takes for each other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Toolkit:
    """The compilers that were found. None: not there, or silent."""

    cxx: str | None = None
    nvcc: str | None = None
    hipcc: str | None = None


def toolkit(env: Mapping[str, str]) -> Toolkit:
    """Ask the compilers for their versions."""
    return Toolkit(cxx=_cxx(env), nvcc=_nvcc(env), hipcc=_first_line("hipcc", r"HIP version:\s*([0-9][\w.]*)"))


def _cxx(env: Mapping[str, str]) -> str | None:
    for name in (env.get("CXX", "").strip(), "c++", "g++", "clang++"):
        if name and shutil.which(name) and (version := _first_line(name, r"([0-9]+\.[0-9]+(?:\.[0-9]+)?)")):
            return f"{name} {version}"
    return None


def _nvcc(env: Mapping[str, str]) -> str | None:
    """The one that a build would take: CUDA_HOME's before PATH's."""
    home = Path(env.get("CUDA_HOME") or env.get("CUDA_PATH") or "/nowhere") / "bin/nvcc"
    try:
        text = run("nvcc", [str(home), "--version"]) if home.is_file() else ask("nvcc", "--version")
    except Silent:
        return None
    found = re.search(r"release ([0-9]{1,2}\.[0-9]{1,2})", text)
    return found[1] if found else None


def _first_line(tool: str, pattern: str) -> str | None:
    if place_of(tool) is None:
        return None
    try:
        found = re.search(pattern, ask(tool, "--version"))
    except Silent:
        return None
    return found[1] if found else None


def building_rows(found: Toolkit, build: TorchBuild | None, env: Mapping[str, str], cards: int) -> list[Row]:
    return [_compilers(found), *_cuda(found, build, env, cards), *_arch_list(env, cards), *_hip(build), *_headers()]


def _compilers(found: Toolkit) -> Row:
    ninja = shutil.which("ninja") is not None or find_spec("ninja") is not None
    include = Path(sysconfig.get_paths()["include"]) / "Python.h"
    missing = [
        name
        for name, there in (("a C++ compiler", found.cxx), ("ninja", ninja), ("Python's headers", include.is_file()))
        if not there
    ]
    if not missing:
        what = f"{found.cxx}, ninja and Python's headers are there: DeepSpeed can build its CPU optimizers"
        return Row(id="compilers", group="building", light="green", what=what)
    return Row(
        id="compilers",
        group="building",
        light="yellow",
        what=f"not found: {', '.join(missing)}; without it DeepSpeed cannot build its CPU optimizers",
        fix="install them",
        commands=("sudo apt install build-essential python3-dev", "pip install ninja"),
    )


def _cuda(found: Toolkit, build: TorchBuild | None, env: Mapping[str, str], cards: int) -> list[Row]:
    """The toolkit against torch, as DeepSpeed's builder compares them."""
    home = env.get("CUDA_HOME")
    if home and not (Path(home) / "bin/nvcc").is_file():
        what = f"CUDA_HOME is {home}, and there is no bin/nvcc below it"
        fix = "point it to the toolkit, or unset it"
        return [
            Row(id="cuda-home", group="building", light="yellow", what=what, fix=fix, commands=("unset CUDA_HOME",))
        ]
    if build is None or build.cuda is None:
        return []
    wants = release(build.cuda)[:2]
    words = f"torch is built for CUDA {build.cuda}"
    if found.nvcc is None:
        what = f"{words}, and no nvcc is found: kernels that are built here cannot be (DeepSpeed's fused Adam, for one)"
        fix = f"install the CUDA {wants[0]} toolkit and set CUDA_HOME"
        return [Row(id="nvcc", group="building", light="yellow" if cards else "green", what=what, fix=fix)]
    has = release(found.nvcc)[:2]
    what = f"nvcc {found.nvcc}; {words}"
    if has == wants or (has[0] == wants[0] and has[0] in _SAME_ENOUGH):
        return [Row(id="nvcc", group="building", light="green", what=what)]
    return [
        Row(
            id="nvcc",
            group="building",
            light="yellow",
            what=f"{what}: DeepSpeed refuses to build kernels with another one",
            fix=f"install the CUDA {wants[0]}.{wants[1]} toolkit and point CUDA_HOME to it; where no kernel fails, "
            "DS_SKIP_CUDA_CHECK=1 lets it try",
        )
    ]


def _arch_list(env: Mapping[str, str], cards: int) -> list[Row]:
    """`9.0a` is a number to torch and a crash to DeepSpeed, which splits at the point and calls int()."""
    said = env.get("TORCH_CUDA_ARCH_LIST", "").strip()
    odd = [word for word in re.split(r"[;\s]+", said) if word and not re.fullmatch(r"[0-9]+\.[0-9]+(\+PTX)?", word)]
    if not odd:
        return []
    plain = ";".join(
        dict.fromkeys(re.sub(r"^([0-9]+\.[0-9]+)[a-z]+", r"\1", word) for word in re.split(r"[;\s]+", said))
    )
    good = re.fullmatch(r"[0-9.;+PTX]+", plain) is not None
    return [
        Row(
            id="arch-list",
            group="building",
            light="red" if cards else "yellow",
            what=f"TORCH_CUDA_ARCH_LIST={said} has {', '.join(odd)}, which DeepSpeed's builder cannot read",
            fix="write plain numbers, or leave the choice to torch",
            commands=(f"export TORCH_CUDA_ARCH_LIST='{plain}'" if good else "unset TORCH_CUDA_ARCH_LIST",),
        )
    ]


def _hip(build: TorchBuild | None, root: Path = Path("/")) -> list[Row]:
    """The toolkit of AMD or Hygon against the one that torch was built with, as far as both say it."""
    if build is None or build.hip is None:
        return []
    dtk = re.sub("[^0-9]", "", _read(root / "opt/dtk/.dtk_version"))
    tag = re.search(r"dtk([0-9]{4,6})", build.version)
    if dtk and tag:
        same, has, wants = dtk.startswith(tag[1][:4]), f"DTK {_dotted(dtk)}", f"DTK {_dotted(tag[1])}"
    else:
        rocm = re.match(r"[0-9]+\.[0-9]+", _read(root / "opt/rocm/.info/version"))
        if rocm is None:
            return []
        same, has = release(rocm[0])[:2] == release(build.hip)[:2], f"ROCm {rocm[0]}"
        wants = f"ROCm {'.'.join(map(str, release(build.hip)[:2]))}"
    what = f"{has} is installed, and torch is built for {wants}"
    if same:
        return [Row(id="hip-toolkit", group="building", light="green", what=what)]
    fix = (
        "install torch's wheel for this toolkit, or the toolkit of this torch: kernels that are built here may not load"
    )
    return [Row(id="hip-toolkit", group="building", light="yellow", what=what, fix=fix)]


def _dotted(digits: str) -> str:
    """`25041` → 25.04.1."""
    return ".".join(part for part in (digits[:2], digits[2:4], digits[4:]) if part)


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def _headers(root: Path = Path("/")) -> list[Row]:
    if (root / "usr/include/libaio.h").is_file():
        return []
    what = "libaio's headers are not there: offload to NVMe cannot be built"
    fix = "install them if you offload to NVMe"
    command = ("sudo apt install libaio-dev",)
    return [Row(id="libaio", group="building", light="green", what=what, fix=fix, commands=command)]


# --- what the GPUs talk with --------------------------------------------------------------------


def collectives(build: TorchBuild | None, versions: Mapping[str, str], cards: int, root: Path = Path("/")) -> list[Row]:
    """NCCL, or RCCL on AMD's and Hygon's cards."""
    if build is None or not build.for_gpus:
        if cards:
            return []
        what = "collectives: gloo, which torch brings; NCCL and RCCL are for GPUs"
        return [Row(id="collectives", group="software", light="green", what=what)]
    name = "RCCL" if build.hip else "NCCL"
    packaged = next((f"{name} {version} ({package})" for package, version in versions.items()), None)
    where = packaged or _library("librccl.so*" if build.hip else "libnccl.so*", build, root)
    if where:
        return [Row(id="collectives", group="software", light="green", what=f"collectives: {where}")]
    light: Light = "yellow" if cards > 1 else "green"
    what = f"{name} is not found beside torch or in the system's folders; a torch that has it built in needs no other"
    fix = f"if several GPUs cannot start together, install {name}, or another build of torch"
    return [Row(id="collectives", group="software", light=light, what=what, fix=fix)]


def _library(pattern: str, build: TorchBuild, root: Path) -> str | None:
    folders = [*([build.folder / "lib"] if build.folder else []), *(root / each for each in (*_LIBRARIES, *_ROCM))]
    for folder in folders:
        if found := sorted(folder.glob(pattern)):
            return str(found[0])
    return None
