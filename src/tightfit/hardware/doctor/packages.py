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
from tightfit.messages import Listing, Message, Said

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
    what: Message
    fix: Said
    source: str


BAD_PAIRS: tuple[BadPair, ...] = (
    BadPair(
        id="peft-transformers",
        package="peft",
        below=(0, 18),
        other="transformers",
        other_from=(5, 0),
        light="red",
        what=Message("doctor.peft-transformers"),
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
        what=Message("doctor.torch-load"),
        fix=Message("doctor.torch-load-fix"),
        source="CVE-2025-32434",
    ),
    BadPair(
        id="deepspeed-offload",
        package="deepspeed",
        below=(0, 17),
        other=None,
        other_from=None,
        light="yellow",
        what=Message("doctor.deepspeed-offload"),
        fix=Message("doctor.deepspeed-offload-fix"),
        source="deepspeedai/DeepSpeed#7309",
    ),
    BadPair(
        id="numpy-torch",
        package="torch",
        below=(2, 3),
        other="numpy",
        other_from=(2, 0),
        light="red",
        what=Message("doctor.numpy-torch"),
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
        what=Message("doctor.bitsandbytes-triton"),
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
        what=Message("doctor.deepspeed-torch"),
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
        what=Message("doctor.deepspeed-numpy"),
        fix=Message("doctor.deepspeed-numpy-fix"),
        source="deepspeedai/DeepSpeed#5671",
    ),
    BadPair(
        id="accelerate-transformers",
        package="accelerate",
        below=(1, 3),
        other="transformers",
        other_from=(4, 52),
        light="red",
        what=Message("doctor.accelerate-transformers"),
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
        what=Message("doctor.transformers-deepspeed"),
        fix=Message("doctor.transformers-deepspeed-fix"),
        source="deepspeedai/DeepSpeed#6793",
    ),
    BadPair(
        id="transformers-peft",
        package="transformers",
        below=(4, 42),
        other="peft",
        other_from=(0, 14),
        light="red",
        what=Message("doctor.transformers-peft"),
        fix=Message("doctor.transformers-peft-fix"),
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
    told = read_version_file(text)
    return TorchBuild(version=version, cuda=told.get("cuda"), hip=told.get("hip"), folder=folder)


def read_version_file(text: str) -> dict[str, str]:
    """The `cuda` and `hip` of torch's `version.py`, as far as they are versions."""
    return dict(re.findall(r"^(cuda|hip)\b[^=\n]*=\s*['\"]([0-9][\w.\-]*)['\"]", text, re.MULTILINE))


def package_rows(found: Mapping[str, str], build: TorchBuild | None) -> list[Row]:
    """Versions, and what of them does not go together."""
    return [_list(found), *_check_pairs(found), *_check_requirements(found), *_check_wheels(found, build)]


def _list(found: Mapping[str, str]) -> Row:
    there = Listing(f"{name} {found[name]}" for name in (*NEEDED, *OPTIONAL) if name in found)
    missing = [name for name in NEEDED if name not in found]
    absent = [name for name in OPTIONAL if name not in found]
    if missing:
        return Row(
            id="packages",
            group="software",
            light="yellow",
            what=Message(
                "doctor.packages-missing",
                names=Listing(missing),
                count=len(missing),
                there=there if there.parts else None,
            ),
            fix=Message("doctor.packages-missing-fix"),
            commands=("pip install 'tightfit[train]'",),
        )
    what = Message("doctor.packages", there=there, absent=Listing(absent) if absent else None)
    return Row(id="packages", group="software", light="green", what=what)


def _applies(pair: BadPair, found: Mapping[str, str]) -> bool:
    if pair.package not in found or (pair.below and release(found[pair.package]) >= pair.below):
        return False
    if pair.other is None:
        return True
    return pair.other in found and (pair.other_from is None or release(found[pair.other]) >= pair.other_from)


def _check_pairs(found: Mapping[str, str]) -> list[Row]:
    rows = []
    for pair in BAD_PAIRS:
        if _applies(pair, found):
            here = Listing((f"{name} {found[name]}" for name in (pair.package, pair.other) if name), "and")
            what = Message("doctor.bad-pair", what=pair.what, here=here)
            rows.append(Row(id=pair.id, group="software", light=pair.light, what=what, fix=pair.fix))
    return rows


def _check_requirements(found: Mapping[str, str]) -> list[Row]:
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
                wants = str(wanted.specifier)
                what = Message("doctor.needs", name=name, version=version, other=other, wants=wants, has=found[other])
                rows.append(
                    Row(
                        id=f"needs-{name}-{other}",
                        group="software",
                        light="yellow",
                        what=what,
                        fix=Message("doctor.needs-fix"),
                        commands=(f"pip install '{other}{wants}'",),
                    )
                )
    return rows


def _requirements(name: str) -> list[str]:
    try:
        return list(distribution(name).requires or ())
    except (PackageNotFoundError, ValueError, OSError):
        return []


def _check_wheels(found: Mapping[str, str], build: TorchBuild | None) -> list[Row]:
    """Wheels of compiled kernels say in their version which torch they were built for. Hygon's carry `das` there;
    beside them pip's own do not run."""
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
                    what=Message(
                        "doctor.built-for", name=name, version=found[name], torch=f"{tag[1]}.{tag[2]}", has=has
                    ),
                    fix=Message("doctor.built-for-fix", name=name),
                    commands=(f"pip install --no-build-isolation --force-reinstall --no-deps {name}",),
                )
            )
    hygons = [name for name in FROM_VENDOR if "das" in found.get(name, "").partition("+")[2]]
    plain = [name for name in FROM_VENDOR if name in found and name not in hygons]
    if hygons and plain and build is not None:
        others = Listing(f"{name} {found[name]}" for name in plain)
        rows.append(
            Row(
                id="vendor-wheels",
                group="software",
                light="red" if "torch" in plain else "yellow",
                what=Message("doctor.vendor-wheels", hygons=Listing(hygons), others=others),
                fix=Message("doctor.vendor-wheels-fix"),
            )
        )
    return rows
