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
from tightfit.hardware.machine import read_text
from tightfit.hardware.probes.tools import Silent, ask, run
from tightfit.inputs.versions import release
from tightfit.messages import Listing, Message, Said

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
    compilers = (
        f"{name} {version}"
        for name in (env.get("CXX", "").strip(), "c++", "g++", "clang++")
        if name and shutil.which(name) and (version := _ask_version(name, r"([0-9]+\.[0-9]+(?:\.[0-9]+)?)"))
    )
    # The nvcc that a build would take: CUDA_HOME's before PATH's.
    home = Path(env.get("CUDA_HOME") or env.get("CUDA_PATH") or "/nowhere") / "bin/nvcc"
    nvcc = _ask_version("nvcc", r"release ([0-9]{1,2}\.[0-9]{1,2})", home if home.is_file() else None)
    return Toolkit(cxx=next(compilers, None), nvcc=nvcc, hipcc=_ask_version("hipcc", r"HIP version:\s*([0-9][\w.]*)"))


def _ask_version(tool: str, pattern: str, place: Path | None = None) -> str | None:
    try:
        text = ask(tool, "--version") if place is None else run(tool, [str(place), "--version"])
    except Silent:
        return None
    found = re.search(pattern, text)
    return found[1] if found else None


def building_rows(found: Toolkit, build: TorchBuild | None, env: Mapping[str, str], cards: int) -> list[Row]:
    return [_compilers(found), *_cuda(found, build, env, cards), *_arch_list(env, cards), *_hip(build), *_headers()]


def _compilers(found: Toolkit) -> Row:
    ninja = shutil.which("ninja") is not None or find_spec("ninja") is not None
    include = Path(sysconfig.get_paths()["include"]) / "Python.h"
    missing: list[Said] = [
        name
        for name, there in (
            (Message("doctor.cxx"), found.cxx),
            ("ninja", ninja),
            (Message("doctor.python-headers"), include.is_file()),
        )
        if not there
    ]
    if not missing:
        what = Message("doctor.compilers", cxx=found.cxx)
        return Row(id="compilers", group="building", light="green", what=what)
    return Row(
        id="compilers",
        group="building",
        light="yellow",
        what=Message("doctor.no-compilers", missing=Listing(missing)),
        fix=Message("doctor.install-them"),
        commands=("sudo apt install build-essential python3-dev", "pip install ninja"),
    )


def _cuda(found: Toolkit, build: TorchBuild | None, env: Mapping[str, str], cards: int) -> list[Row]:
    """The toolkit against torch, as DeepSpeed's builder compares them."""
    home = env.get("CUDA_HOME")
    if home and not (Path(home) / "bin/nvcc").is_file():
        what, fix = Message("doctor.cuda-home", home=home), Message("doctor.cuda-home-fix")
        return [
            Row(id="cuda-home", group="building", light="yellow", what=what, fix=fix, commands=("unset CUDA_HOME",))
        ]
    if build is None or build.cuda is None:
        return []
    wants = release(build.cuda)[:2]
    if found.nvcc is None:
        what, fix = Message("doctor.no-nvcc", cuda=build.cuda), Message("doctor.no-nvcc-fix", major=wants[0])
        return [Row(id="nvcc", group="building", light="yellow" if cards else "green", what=what, fix=fix)]
    has = release(found.nvcc)[:2]
    if has == wants or (has[0] == wants[0] and has[0] in _SAME_ENOUGH):
        what = Message("doctor.nvcc", nvcc=found.nvcc, cuda=build.cuda)
        return [Row(id="nvcc", group="building", light="green", what=what)]
    what = Message("doctor.other-nvcc", nvcc=found.nvcc, cuda=build.cuda)
    fix = Message("doctor.other-nvcc-fix", cuda=f"{wants[0]}.{wants[1]}")
    return [Row(id="nvcc", group="building", light="yellow", what=what, fix=fix)]


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
            what=Message("doctor.arch-list", value=said, odd=Listing(odd)),
            fix=Message("doctor.arch-list-fix"),
            commands=(f"export TORCH_CUDA_ARCH_LIST='{plain}'" if good else "unset TORCH_CUDA_ARCH_LIST",),
        )
    ]


def _hip(build: TorchBuild | None, root: Path = Path("/")) -> list[Row]:
    """The toolkit of AMD or Hygon against the one that torch was built with, as far as both say it."""
    if build is None or build.hip is None:
        return []
    dtk = re.sub("[^0-9]", "", read_text(root / "opt/dtk/.dtk_version"))
    tag = re.search(r"dtk([0-9]{4,6})", build.version)
    if dtk and tag:
        same, has, wants = dtk.startswith(tag[1][:4]), f"DTK {_add_dots(dtk)}", f"DTK {_add_dots(tag[1])}"
    else:
        rocm = re.match(r"[0-9]+\.[0-9]+", read_text(root / "opt/rocm/.info/version").strip())
        if rocm is None:
            return []
        same, has = release(rocm[0])[:2] == release(build.hip)[:2], f"ROCm {rocm[0]}"
        wants = f"ROCm {'.'.join(map(str, release(build.hip)[:2]))}"
    what = Message("doctor.hip-toolkit", has=has, wants=wants)
    if same:
        return [Row(id="hip-toolkit", group="building", light="green", what=what)]
    return [Row(id="hip-toolkit", group="building", light="yellow", what=what, fix=Message("doctor.hip-toolkit-fix"))]


def _add_dots(digits: str) -> str:
    """`25041` → 25.04.1."""
    return ".".join(part for part in (digits[:2], digits[2:4], digits[4:]) if part)


def _headers(root: Path = Path("/")) -> list[Row]:
    if (root / "usr/include/libaio.h").is_file():
        return []
    what, fix = Message("doctor.libaio"), Message("doctor.libaio-fix")
    command = ("sudo apt install libaio-dev",)
    return [Row(id="libaio", group="building", light="green", what=what, fix=fix, commands=command)]


# --- what the GPUs talk with --------------------------------------------------------------------


def collectives(build: TorchBuild | None, versions: Mapping[str, str], cards: int, root: Path = Path("/")) -> list[Row]:
    """NCCL, or RCCL on AMD's and Hygon's cards."""
    if build is None or not build.for_gpus:
        if cards:
            return []
        return [Row(id="collectives", group="software", light="green", what=Message("doctor.gloo"))]
    name = "RCCL" if build.hip else "NCCL"
    packaged = next((f"{name} {version} ({package})" for package, version in versions.items()), None)
    folders = [*([build.folder / "lib"] if build.folder else []), *(root / each for each in (*_LIBRARIES, *_ROCM))]
    libraries = (str(path) for folder in folders for path in sorted(folder.glob(f"lib{name.lower()}.so*")))
    if where := packaged or next(libraries, None):
        what = Message("doctor.collectives", where=where)
        return [Row(id="collectives", group="software", light="green", what=what)]
    light: Light = "yellow" if cards > 1 else "green"
    what, fix = Message("doctor.no-collectives", name=name), Message("doctor.no-collectives-fix", name=name)
    return [Row(id="collectives", group="software", light=light, what=what, fix=fix)]
