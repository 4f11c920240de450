"""What pip is told about us."""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
VENDORS = ("2.1.0+das.opt2.dtk2404", "2.4.1+das.opt1.dtk2504", "2.5.1+rocm6.2", "2.9.0a0+nv25.9", "2.13.0")


def needs(package: str, extras: frozenset[str], seen: set[str]) -> list[Requirement]:
    """Everything that comes along, of what is installed here."""
    if package.lower() in seen:
        return []
    seen.add(package.lower())
    try:
        named = [Requirement(line) for line in requires(package) or ()]
    except PackageNotFoundError:
        return []
    here = [
        each
        for each in named
        if each.marker is None or any(each.marker.evaluate({"extra": extra}) for extra in extras | {""})
    ]
    return here + [far for each in here for far in needs(each.name, frozenset(each.extras), seen)]


@pytest.mark.thorough
@pytest.mark.parametrize("version", VENDORS)
def test_a_vendors_torch_is_never_replaced(version: str) -> None:
    """Hygon's and AMD's builds carry their mark after the `+`; any demand that they do not meet would replace them."""
    asked = needs("tightfit", frozenset({"train", "web", "tensorboard"}), set())
    torch = [each for each in asked if each.name == "torch"]
    assert len(torch) >= 3  # ours, accelerate's, peft's
    for each in torch:
        assert each.specifier.contains(version, prereleases=True), f"{each} would replace torch {version}"


def test_a_torch_that_is_too_old_for_the_worker_is_named() -> None:
    from tightfit.start.train import check_torch
    from tightfit.types import ConfigError

    for fine in ("2.5.1+rocm6.2", "2.13.0", "3.0", "unknown"):
        check_torch(fine)
    with pytest.raises(
        ConfigError, match=r"torch 2\.4\.1\+das\.opt1\.dtk2504 is older than our worker, which needs 2\.5"
    ):
        check_torch("2.4.1+das.opt1.dtk2504")


@pytest.mark.thorough
def test_the_desk_asks_for_nothing_large() -> None:
    names = {each.name.lower() for each in needs("tightfit", frozenset(), set())}
    assert not names & {"torch", "deepspeed", "transformers", "numpy", "pandas", "triton", "accelerate"}


@pytest.mark.thorough
def test_the_wheel_holds_what_is_needed_without_the_repository(tmp_path: Path) -> None:
    copy = tmp_path / "source"
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True).stdout.split(
        "\n"
    )
    for name in listed:
        if name.startswith("src/") or name in ("pyproject.toml", "README.md", "LICENSE"):
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            (copy / name).write_bytes((ROOT / name).read_bytes())
    # As pip asks the backend that pyproject.toml names, without pip's own seconds.
    script = "from setuptools.build_meta import build_wheel; build_wheel(sys.argv[1])"
    command = [sys.executable, "-c", f"import sys; {script}", str(tmp_path / "built")]
    subprocess.run(command, cwd=copy, check=True, capture_output=True)
    (wheel,) = (tmp_path / "built").glob("*.whl")
    held = set(zipfile.ZipFile(wheel).namelist())
    wanted = {name.removeprefix("src/") for name in listed if name.startswith("src/")}
    assert wanted <= held, sorted(wanted - held)
    unpacked = tmp_path / "unpacked"
    zipfile.ZipFile(wheel).extractall(unpacked)
    verbs = (["plan", "--model", "tiny_mamba", "--gpus", "2x4GB", "--json"], ["explain", "list"], ["ui", "--help"])
    script = (
        f"import sys; sys.path.insert(0, {str(unpacked)!r}); from tightfit.cli import main\n"
        f"for verb in {verbs!r}: assert main(verb) == 0, verb\n"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-c", script], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_one_version_everywhere() -> None:
    import tightfit

    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    found = re.search(r'^version = "(.*)"$', text, re.MULTILINE)
    assert found is not None
    assert found[1] == tightfit.__version__
    assert f"## {found[1]}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
