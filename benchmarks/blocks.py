"""Pages of which scripts write parts: what stands between `<!-- name -->` and `<!-- /name -->`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

_BLOCK = re.compile(r"(<!-- (\w+) -->\n).*?(<!-- /\2 -->)", re.DOTALL)


def fill(text: str, parts: Mapping[str, str], page: Path) -> str:
    """The page with everything between its markers made anew."""
    missing = parts.keys() - {found[1] for found in _BLOCK.findall(text)}
    if missing:
        raise SystemExit(f"{page.name} has no <!-- {min(missing)} --> … <!-- /{min(missing)} --> block")
    return _BLOCK.sub(lambda found: f"{found[1]}{parts[found[2]]}\n{found[3]}", text)


def write_or_check(page: Path, old: str, new: str, script: str, *, check: bool) -> int:
    """Write what has changed, or only say that it has; the exit code."""
    if new == old:
        return 0
    if check:
        print(f"docs/{page.name} is stale: run benchmarks/{Path(script).name}")
        return 1
    page.write_text(new, encoding="utf-8")
    print(f"docs/{page.name} written")
    return 0


def write_parts(page: Path, parts: Mapping[str, str], script: str, *, check: bool) -> int:
    """Write the parts that have changed, or only say that some have; the exit code."""
    text = page.read_text(encoding="utf-8")
    return write_or_check(page, text, fill(text, parts, page), script, check=check)
