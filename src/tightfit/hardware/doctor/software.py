"""What is installed, by its metadata and never by importing it, and which of it does not go together; and what
DeepSpeed and others need to build their kernels here: compilers, ninja, headers, a toolkit that fits torch.

Two sources say what does not go together: the packages' own requirements, and a table of pairs that import or install
without a complaint and fail later.
"""

from __future__ import annotations

import re
import shutil
import sysconfig
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution, distributions
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from tightfit.hardware.doctor.row import Check, Light
from tightfit.hardware.machine import read_text
from tightfit.hardware.probes.tools import Silent, ask, run
from tightfit.inputs.versions import release
from tightfit.messages import Listing, Message, Said

NEEDED = ("torch", "transformers", "deepspeed", "accelerate", "peft", "datasets", "safetensors")
OPTIONAL = ("bitsandbytes", "flash-attn", "mamba-ssm", "causal-conv1d", "triton", "liger-kernel")
_FROM_VENDOR = ("torch", "triton", "flash-attn", "deepspeed", "mamba-ssm", "causal-conv1d", "bitsandbytes")
"""What Hygon builds itself, and pip would replace by something that its cards cannot run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchBuild:
    """What torch was built for, as its own version file says."""

    version: str
    cuda: str | None = None
    hip: str | None = None
    folder: Path | None = None

    @property
    def for_gpus(self) -> bool:
        return self.cuda is not None or self.hip is not None


class BadPair(NamedTuple):
    """A package before a release does not work, with another from a release on, or by itself."""

    package: str
    below: tuple[int, ...]
    other: str | None
    other_from: tuple[int, ...]
    light: Light
    what: Message
    fix: Said
    source: str

    @property
    def id(self) -> str:
        return self.what.id.removeprefix("doctor.")


# fmt: off
BAD_PAIRS: tuple[BadPair, ...] = (
    BadPair("peft", (0, 18), "transformers", (5, 0), "red", Message("doctor.peft-transformers"),
            "pip install 'peft>=0.18'", "huggingface/transformers#44351"),
    BadPair("torch", (2, 6), None, (), "yellow", Message("doctor.torch-load"),
            Message("doctor.torch-load-fix"), "CVE-2025-32434"),
    BadPair("deepspeed", (0, 17), None, (), "yellow", Message("doctor.deepspeed-offload"),
            Message("doctor.deepspeed-offload-fix"), "deepspeedai/DeepSpeed#7309"),
    BadPair("torch", (2, 3), "numpy", (2, 0), "red", Message("doctor.numpy-torch"),
            "pip install 'numpy<2'", "pytorch/pytorch#107302"),
    BadPair("bitsandbytes", (0, 45, 1), "triton", (3, 2), "red", Message("doctor.bitsandbytes-triton"),
            "pip install 'bitsandbytes>=0.45.1'", "bitsandbytes-foundation/bitsandbytes#1493"),
    BadPair("deepspeed", (0, 14, 4), "torch", (2, 4), "red", Message("doctor.deepspeed-torch"),
            "pip install 'deepspeed>=0.14.4'", "deepspeedai/DeepSpeed#5603"),
    BadPair("deepspeed", (0, 14, 4), "numpy", (2, 0), "red", Message("doctor.deepspeed-numpy"),
            Message("doctor.deepspeed-numpy-fix"), "deepspeedai/DeepSpeed#5671"),
    BadPair("accelerate", (1, 3), "transformers", (4, 52), "red", Message("doctor.accelerate-transformers"),
            "pip install 'accelerate>=1.3'", "huggingface/transformers#38339"),
    BadPair("transformers", (4, 47), "deepspeed", (0, 16), "yellow", Message("doctor.transformers-deepspeed"),
            Message("doctor.transformers-deepspeed-fix"), "deepspeedai/DeepSpeed#6793"),
    BadPair("transformers", (4, 42), "peft", (0, 14), "red", Message("doctor.transformers-peft"),
            Message("doctor.transformers-peft-fix"), "huggingface/peft#2292"),
)
# fmt: on


def installed(names: tuple[str, ...] = (*NEEDED, *OPTIONAL, "numpy", "tightfit")) -> dict[str, str]:
    """Package → version, of those that are there."""
    found = {}
    for name in names:
        try:
            version = distribution(name).version
        except (PackageNotFoundError, ValueError, OSError):
            continue
        if isinstance(version, str) and re.match(r"\d", version):
            found[name] = version
    return found


def torch_build(version: str | None) -> TorchBuild | None:
    """From torch's own `version.py`, which is text to us; None: torch is not installed."""
    if version is None:
        return None
    try:
        spec = find_spec("torch")
        folder = Path(spec.origin).parent if spec and spec.origin else None
        text = (folder / "version.py").read_text(encoding="utf-8", errors="replace") if folder else ""
    except (ImportError, OSError, ValueError):
        folder, text = None, ""
    return TorchBuild(version=version, folder=folder, **read_version_file(text))


def read_version_file(text: str) -> dict[str, str]:
    """The `cuda` and `hip` of torch's `version.py`, as far as they are versions."""
    return dict(re.findall(r"^(cuda|hip)\b[^=\n]*=\s*['\"]([0-9][\w.\-]*)['\"]", text, re.MULTILINE))


def requirements(name: str) -> list[str]:
    """What a package asks of others, as pip knows it."""
    try:
        return list(distribution(name).requires or ())
    except (PackageNotFoundError, ValueError, OSError):
        return []


def package_rows(found: Mapping[str, str], build: TorchBuild | None) -> Iterator[Check]:
    """Versions, and what of them does not go together."""
    there = Listing(f"{name} {found[name]}" for name in (*NEEDED, *OPTIONAL) if name in found)
    missing = [name for name in NEEDED if name not in found]
    absent = [name for name in OPTIONAL if name not in found]
    if missing:
        names, known = Listing(missing), there if there.parts else None
        what = Message("doctor.packages-missing", names=names, count=len(missing), there=known)
        fix = Message("doctor.packages-missing-fix")
        yield Check("packages", "software", "yellow", what, fix, ("pip install 'tightfit[train]'",))
    else:
        what = Message("doctor.packages", there=there, absent=Listing(absent) if absent else None)
        yield Check("packages", "software", "green", what)
    versions = {name: release(version) for name, version in found.items()}
    for pair in BAD_PAIRS:
        is_old = pair.package in found and versions[pair.package] < pair.below
        if is_old and (pair.other is None or (pair.other in found and versions[pair.other] >= pair.other_from)):
            here = Listing((f"{name} {found[name]}" for name in (pair.package, pair.other) if name), "and")
            what = Message("doctor.bad-pair", what=pair.what, here=here)
            yield Check(pair.id, "software", pair.light, what, pair.fix)
    yield from _check_requirements(found)
    # Wheels of compiled kernels say in their version which torch they were built for.
    for name in ("flash-attn", "mamba-ssm", "causal-conv1d"):
        tag = re.search(r"torch(\d+)\.(\d+)", found.get(name, ""))
        if tag and "torch" in found and versions["torch"][:2] != (int(tag[1]), int(tag[2])):
            built_for, has = f"{tag[1]}.{tag[2]}", found["torch"]
            what = Message("doctor.built-for", name=name, version=found[name], torch=built_for, has=has)
            command = f"pip install --no-build-isolation --force-reinstall --no-deps {name}"
            fix = Message("doctor.built-for-fix", name=name)
            yield Check(f"built-for-{name}", "software", "red", what, fix, (command,))
    # Hygon's wheels carry `das` there; beside them pip's own do not run.
    hygons = [name for name in _FROM_VENDOR if "das" in found.get(name, "").partition("+")[2]]
    plain = [name for name in _FROM_VENDOR if name in found and name not in hygons]
    if hygons and plain and build is not None:
        others = Listing(f"{name} {found[name]}" for name in plain)
        what = Message("doctor.vendor-wheels", hygons=Listing(hygons), others=others)
        light: Light = "red" if "torch" in plain else "yellow"
        yield Check("vendor-wheels", "software", light, what, Message("doctor.vendor-wheels-fix"))


def _check_requirements(found: Mapping[str, str]) -> Iterator[Check]:
    """What the packages themselves ask of each other."""
    from packaging.requirements import InvalidRequirement, Requirement

    for name, version in found.items():
        for text in requirements(name):
            other = re.sub(r"[-_.]+", "-", re.split(r"[^\w.-]", text, maxsplit=1)[0]).lower()
            if other not in found:
                continue
            try:
                wanted = Requirement(text)
                extras = ("train", "qlora") if name == "tightfit" else ("",)
                is_asked = not (rule := wanted.marker) or any(rule.evaluate({"extra": extra}) for extra in extras)
                if not is_asked or wanted.specifier.contains(found[other], prereleases=True):
                    continue
            except (InvalidRequirement, ValueError, KeyError):
                continue
            wants = str(wanted.specifier)
            what = Message("doctor.needs", name=name, version=version, other=other, wants=wants, has=found[other])
            command = f"pip install '{other}{wants}'"
            yield Check(f"needs-{name}-{other}", "software", "yellow", what, Message("doctor.needs-fix"), (command,))


# --- what the GPUs talk with --------------------------------------------------------------------

_LIBRARIES = ("usr/lib", "usr/lib64", "usr/lib/x86_64-linux-gnu", "usr/lib/aarch64-linux-gnu", "usr/local/lib")
_ROCM = ("opt/rocm/lib", "opt/dtk/lib", "opt/dtk/rccl/lib")


def collective_packages() -> dict[str, str]:
    """`nvidia-nccl-cu12` and its like."""
    heads = ((each.read_text("METADATA") or "").partition("\n\n")[0] for each in distributions())
    found = ({"Name": "", "Version": ""} | dict(re.findall(r"^(Name|Version): *(\S+)", head, re.M)) for head in heads)
    return {x["Name"].lower(): x["Version"] for x in found if re.match("(?i)nvidia-nccl-|rccl", x["Name"])}


def collectives(
    build: TorchBuild | None, versions: Mapping[str, str], cards: int, root: Path = Path("/")
) -> list[Check]:
    """NCCL, or RCCL on AMD's and Hygon's cards."""
    if build is None or not build.for_gpus:
        return [] if cards else [Check("collectives", "software", "green", Message("doctor.gloo"))]
    name = "RCCL" if build.hip else "NCCL"
    packaged = next((f"{name} {version} ({package})" for package, version in versions.items()), None)
    folders = [*([build.folder / "lib"] if build.folder else []), *(root / each for each in (*_LIBRARIES, *_ROCM))]
    libraries = (str(path) for folder in folders for path in sorted(folder.glob(f"lib{name.lower()}.so*")))
    if where := packaged or next(libraries, None):
        return [Check("collectives", "software", "green", Message("doctor.collectives", where=where))]
    what, fix = Message("doctor.no-collectives", name=name), Message("doctor.no-collectives-fix", name=name)
    return [Check("collectives", "software", "yellow" if cards > 1 else "green", what, fix)]


# --- building -----------------------------------------------------------------------------------

_SAME_ENOUGH = (10, 11, 12)  # major releases of CUDA whose minor ones DeepSpeed's builder takes for each other

Compilers = tuple[str | None, str | None]  # the C++ compiler and the version of nvcc. None: not there, or silent.


def find_compilers(env: Mapping[str, str]) -> Compilers:
    """Ask the compilers for their versions."""
    compilers = (
        f"{name} {version}"
        for name in (env.get("CXX", "").strip(), "c++", "g++", "clang++")
        if name and shutil.which(name) and (version := _ask_version(name, r"([0-9]+\.[0-9]+(?:\.[0-9]+)?)"))
    )
    # The nvcc that a build would take: CUDA_HOME's before PATH's.
    home = Path(env.get("CUDA_HOME") or env.get("CUDA_PATH") or "/nowhere") / "bin/nvcc"
    nvcc = _ask_version("nvcc", r"release ([0-9]{1,2}\.[0-9]{1,2})", home if home.is_file() else None)
    return next(compilers, None), nvcc


def _ask_version(tool: str, pattern: str, place: Path | None = None) -> str | None:
    try:
        text = ask(tool, "--version") if place is None else run(tool, [str(place), "--version"])
    except Silent:
        return None
    return found[1] if (found := re.search(pattern, text)) else None


def building_rows(
    compilers: Compilers, build: TorchBuild | None, env: Mapping[str, str], cards: int, root: Path = Path("/")
) -> Iterator[Check]:
    cxx, nvcc = compilers
    parts: dict[Said, object] = {
        Message("doctor.cxx"): cxx,
        "ninja": shutil.which("ninja") or find_spec("ninja"),
        Message("doctor.python-headers"): (Path(sysconfig.get_paths()["include"]) / "Python.h").is_file(),
    }
    if missing := [name for name, there in parts.items() if not there]:
        what, fix = Message("doctor.no-compilers", missing=Listing(missing)), Message("doctor.install-them")
        commands = ("sudo apt install build-essential python3-dev", "pip install ninja")
        yield Check("compilers", "building", "yellow", what, fix, commands)
    else:
        yield Check("compilers", "building", "green", Message("doctor.compilers", cxx=cxx))

    # The toolkit against torch, as DeepSpeed's builder compares them.
    home = env.get("CUDA_HOME")
    if home and not (Path(home) / "bin/nvcc").is_file():
        what, fix = Message("doctor.cuda-home", home=home), Message("doctor.cuda-home-fix")
        yield Check("cuda-home", "building", "yellow", what, fix, ("unset CUDA_HOME",))
    elif build is not None and build.cuda is not None:
        wants, has = release(build.cuda)[:2], None if nvcc is None else release(nvcc)[:2]
        if has is None:
            what, fix = Message("doctor.no-nvcc", cuda=build.cuda), Message("doctor.no-nvcc-fix", major=wants[0])
            yield Check("nvcc", "building", "yellow" if cards else "green", what, fix)
        elif has == wants or (has[0] == wants[0] and has[0] in _SAME_ENOUGH):
            yield Check("nvcc", "building", "green", Message("doctor.nvcc", nvcc=nvcc, cuda=build.cuda))
        else:
            what = Message("doctor.other-nvcc", nvcc=nvcc, cuda=build.cuda)
            fix = Message("doctor.other-nvcc-fix", cuda=f"{wants[0]}.{wants[1]}")
            yield Check("nvcc", "building", "yellow", what, fix)

    # `9.0a` is a number to torch and a crash to DeepSpeed, which splits at the point and calls int().
    said = env.get("TORCH_CUDA_ARCH_LIST", "").strip()
    words = re.split(r"[;\s]+", said)
    if odd := [word for word in words if word and not re.fullmatch(r"[0-9]+\.[0-9]+(\+PTX)?", word)]:
        plain = ";".join(dict.fromkeys(re.sub(r"^([0-9]+\.[0-9]+)[a-z]+", r"\1", word) for word in words))
        is_good = re.fullmatch(r"[0-9.;+PTX]+", plain) is not None
        command = f"export TORCH_CUDA_ARCH_LIST='{plain}'" if is_good else "unset TORCH_CUDA_ARCH_LIST"
        what, fix = Message("doctor.arch-list", value=said, odd=Listing(odd)), Message("doctor.arch-list-fix")
        yield Check("arch-list", "building", "red" if cards else "yellow", what, fix, (command,))

    if build is not None and build.hip is not None:
        yield from _hip_rows(build.version, build.hip, root)
    if not (root / "usr/include/libaio.h").is_file():
        command = "sudo apt install libaio-dev"
        yield Check("libaio", "building", "green", Message("doctor.libaio"), Message("doctor.libaio-fix"), (command,))


def _hip_rows(torch: str, hip: str, root: Path) -> Iterator[Check]:
    """The toolkit of AMD or Hygon against the one that torch was built with, as far as both say it."""
    dtk = re.sub("[^0-9]", "", read_text(root / "opt/dtk/.dtk_version"))
    tag = re.search(r"dtk([0-9]{4,6})", torch)
    rocm = re.match(r"[0-9]+\.[0-9]+", read_text(root / "opt/rocm/.info/version").strip())
    if dtk and tag:
        # `25041` → 25.04.1
        has, wants = ("DTK " + re.sub(r"^(..)(..)(.*)", r"\1.\2.\3", each).rstrip(".") for each in (dtk, tag[1]))
        same = dtk.startswith(tag[1][:4])
    elif rocm is not None:
        has, wants = f"ROCm {rocm[0]}", f"ROCm {'.'.join(map(str, release(hip)[:2]))}"
        same = release(rocm[0])[:2] == release(hip)[:2]
    else:
        return
    what, fix = Message("doctor.hip-toolkit", has=has, wants=wants), Message("doctor.hip-toolkit-fix")
    yield Check("hip-toolkit", "building", "green" if same else "yellow", what, None if same else fix)
