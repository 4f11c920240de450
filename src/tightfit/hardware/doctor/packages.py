"""What is installed, by its metadata and never by importing it, and which of it does not go together.

Two sources say what does not: the packages' own requirements, and a table of pairs that import or install without a
complaint and fail later.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import find_spec
from pathlib import Path

from tightfit.hardware.doctor.row import Light, Row
from tightfit.inputs.versions import release

NEEDED = ("torch", "transformers", "deepspeed", "accelerate", "peft", "datasets", "safetensors")
OPTIONAL = ("bitsandbytes", "flash-attn", "mamba-ssm", "causal-conv1d", "triton", "liger-kernel")
FROM_VENDOR = ("torch", "triton", "flash-attn", "deepspeed", "mamba-ssm", "causal-conv1d", "bitsandbytes")
"""What Hygon builds itself, and pip would replace by something that its cards cannot run."""
_BUILT_FOR = re.compile(r"torch(\d+)\.(\d+)")


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


@dataclass(frozen=True, slots=True, kw_only=True)
class BadPair:
    """Two packages, or one, that do not go together; bounds are releases, None: none."""

    id: str
    package: str
    below: tuple[int, ...] | None
    other: str | None
    other_from: tuple[int, ...] | None
    light: Light
    what: str
    fix: str
    source: str


BAD_PAIRS: tuple[BadPair, ...] = (
    BadPair(
        id="peft-transformers",
        package="peft",
        below=(0, 18),
        other="transformers",
        other_from=(5, 0),
        light="red",
        what="peft before 0.18 imports a class that transformers 5 no longer has",
        fix="pip install 'peft>=0.18'",
        source="huggingface/transformers#44351",
    ),
    BadPair(
        id="torch-load",
        package="torch",
        below=(2, 6),
        other=None,
        other_from=None,
        light="yellow",
        what="torch before 2.6 runs code that a weight file brings, even when asked not to (CVE-2025-32434)",
        fix="load safetensors files only, or take torch 2.6 or later",
        source="CVE-2025-32434",
    ),
    BadPair(
        id="deepspeed-offload",
        package="deepspeed",
        below=(0, 17),
        other=None,
        other_from=None,
        light="yellow",
        what="DeepSpeed before 0.17 keeps fp32 copies on the GPU while it offloads the optimizer at stages 1 and 2",
        fix="pip install 'deepspeed>=0.17', or offload at stage 3",
        source="deepspeedai/DeepSpeed#7309",
    ),
    BadPair(
        id="numpy-torch",
        package="torch",
        below=(2, 3),
        other="numpy",
        other_from=(2, 0),
        light="red",
        what="torch before 2.3 was built against NumPy 1 and cannot exchange arrays with NumPy 2",
        fix="pip install 'numpy<2'",
        source="pytorch/pytorch#107302",
    ),
    BadPair(
        id="bitsandbytes-triton",
        package="bitsandbytes",
        below=(0, 45, 1),
        other="triton",
        other_from=(3, 2),
        light="red",
        what="bitsandbytes before 0.45.1 imports triton.ops, which triton 3.2 (torch 2.6) no longer has",
        fix="pip install 'bitsandbytes>=0.45.1'",
        source="bitsandbytes-foundation/bitsandbytes#1493",
    ),
    BadPair(
        id="deepspeed-torch",
        package="deepspeed",
        below=(0, 14, 4),
        other="torch",
        other_from=(2, 4),
        light="red",
        what="DeepSpeed before 0.14.4 imports names of torch's elastic agent that torch 2.4 no longer has",
        fix="pip install 'deepspeed>=0.14.4'",
        source="deepspeedai/DeepSpeed#5603",
    ),
    BadPair(
        id="deepspeed-numpy",
        package="deepspeed",
        below=(0, 14, 4),
        other="numpy",
        other_from=(2, 0),
        light="red",
        what="DeepSpeed before 0.14.4 imports BUFSIZE, which NumPy 2 no longer has",
        fix="pip install 'deepspeed>=0.14.4', or 'numpy<2'",
        source="deepspeedai/DeepSpeed#5671",
    ),
    BadPair(
        id="accelerate-transformers",
        package="accelerate",
        below=(1, 3),
        other="transformers",
        other_from=(4, 52),
        light="red",
        what="the Trainer of transformers 4.52 passes accelerate an argument that it knows from 1.3 on",
        fix="pip install 'accelerate>=1.3'",
        source="huggingface/transformers#38339",
    ),
    BadPair(
        id="transformers-deepspeed",
        package="transformers",
        below=(4, 47),
        other="deepspeed",
        other_from=(0, 16),
        light="yellow",
        what="transformers before 4.47 accumulates with no_sync, which DeepSpeed 0.16 refuses at ZeRO-2 and 3",
        fix="pip install -U transformers, or 'deepspeed<0.16'",
        source="deepspeedai/DeepSpeed#6793",
    ),
    BadPair(
        id="transformers-peft",
        package="transformers",
        below=(4, 42),
        other="peft",
        other_from=(0, 14),
        light="red",
        what="peft 0.14 imports EncoderDecoderCache, which transformers 4.41 and older do not have",
        fix="pip install -U transformers, or 'peft<0.14'",
        source="huggingface/peft#2292",
    ),
)


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
    return TorchBuild(version=version, cuda=_said(text, "cuda"), hip=_said(text, "hip"), folder=folder)


def _said(text: str, name: str) -> str | None:
    found = re.search(rf"^{name}\b[^=\n]*=\s*['\"]([0-9][\w.\-]*)['\"]", text, re.MULTILINE)
    return found[1] if found else None


def package_rows(found: Mapping[str, str], build: TorchBuild | None) -> list[Row]:
    """Versions, and what of them does not go together."""
    rows = [_listed(found)]
    rows += [_bad(pair, found) for pair in BAD_PAIRS if _applies(pair, found)]
    rows += _unmet(found)
    rows += _built_for_another(found)
    rows += _replaced(found, build)
    return rows


def _listed(found: Mapping[str, str]) -> Row:
    there = ", ".join(f"{name} {found[name]}" for name in (*NEEDED, *OPTIONAL) if name in found)
    missing = [name for name in NEEDED if name not in found]
    absent = [name for name in OPTIONAL if name not in found]
    tail = f" (not here, and needed by some trainings alone: {', '.join(absent)})" if absent else ""
    if missing:
        what = (
            f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not installed: planning works, training not"
        )
        return Row(
            id="packages",
            group="software",
            light="yellow",
            what=what + (f"; there are {there}" if there else ""),
            fix="install what training needs",
            commands=("pip install 'tightfit[train]'",),
        )
    return Row(id="packages", group="software", light="green", what=there + tail)


def _applies(pair: BadPair, found: Mapping[str, str]) -> bool:
    if pair.package not in found or (pair.below and release(found[pair.package]) >= pair.below):
        return False
    if pair.other is None:
        return True
    return pair.other in found and (pair.other_from is None or release(found[pair.other]) >= pair.other_from)


def _bad(pair: BadPair, found: Mapping[str, str]) -> Row:
    here = " and ".join(f"{name} {found[name]}" for name in (pair.package, pair.other) if name)
    return Row(id=pair.id, group="software", light=pair.light, what=f"{pair.what} (here: {here})", fix=pair.fix)


def _unmet(found: Mapping[str, str]) -> list[Row]:
    """What the packages themselves ask of each other, as pip knows it."""
    from packaging.requirements import InvalidRequirement, Requirement

    rows = []
    for name, version in found.items():
        for text in _requirements(name):
            try:
                wanted = Requirement(text)
                extras = ("train", "qlora") if name == "tightfit" else ("",)
                marker = wanted.marker
                if marker is not None and not any(marker.evaluate({"extra": extra}) for extra in extras):
                    continue
                other = re.sub(r"[-_.]+", "-", wanted.name).lower()
                fine = other not in found or wanted.specifier.contains(found[other], prereleases=True)
            except (InvalidRequirement, ValueError, KeyError):
                continue
            if not fine:
                rows.append(_unmet_row(name, version, other, found[other], str(wanted.specifier)))
    return rows


def _unmet_row(name: str, version: str, other: str, has: str, wanted: str) -> Row:
    return Row(
        id=f"needs-{name}-{other}",
        group="software",
        light="yellow",
        what=f"{name} {version} asks for {other} {wanted}, and {has} is installed",
        fix="install the version that it asks for",
        commands=(f"pip install '{other}{wanted}'",),
    )


def _requirements(name: str) -> list[str]:
    try:
        return list(distribution(name).requires or ())
    except (PackageNotFoundError, ValueError, OSError):
        return []


def _built_for_another(found: Mapping[str, str]) -> list[Row]:
    """Wheels of compiled kernels say in their version which torch they were built for."""
    rows = []
    for name in ("flash-attn", "mamba-ssm", "causal-conv1d"):
        tag = _BUILT_FOR.search(found.get(name, ""))
        has = found.get("torch")
        if tag and has and release(has)[:2] != (int(tag[1]), int(tag[2])):
            rows.append(
                Row(
                    id=f"built-for-{name}",
                    group="software",
                    light="red",
                    what=f"{name} {found[name]} was built for torch {tag[1]}.{tag[2]}, and {has} is installed",
                    fix=f"install the wheel of {name} for this torch, or build it here",
                    commands=(f"pip install --no-build-isolation --force-reinstall --no-deps {name}",),
                )
            )
    return rows


def _replaced(found: Mapping[str, str], build: TorchBuild | None) -> list[Row]:
    """Hygon's wheels carry `das` in their version; beside them pip's own do not run."""
    tagged = [name for name in FROM_VENDOR if "das" in found.get(name, "").partition("+")[2]]
    if not tagged or build is None:
        return []
    plain = [name for name in FROM_VENDOR if name in found and name not in tagged]
    if not plain:
        return []
    strangers = ", ".join(f"{name} {found[name]}" for name in plain)
    return [
        Row(
            id="vendor-wheels",
            group="software",
            light="red" if "torch" in plain else "yellow",
            what=f"from Hygon come {', '.join(tagged)}, and from elsewhere {strangers}",
            fix="install Hygon's own wheels of the same DTK release, with --no-deps",
        )
    ]
