"""What `tightfit diagnose` says of real logs, beside the cause that their threads established.

    python benchmarks/diagnose_real_logs.py FOLDER

FOLDER holds JSON files with `source`, `title`, `cause`, `remedy` and `log`. Whether an answer is right, partly right or
wrong is for a person to say: this prints both sides. `nothing` means that no cause was found.
"""

from __future__ import annotations

import json
import sys
import textwrap
from pathlib import Path

from tightfit.diagnose.evidence import Evidence, LogSource
from tightfit.diagnose.judge import judge


def main() -> int:
    if len(sys.argv) != 2:
        print("usage: diagnose_real_logs.py FOLDER", file=sys.stderr)
        return 2
    for path in sorted(Path(sys.argv[1]).glob("*.json")):
        thread = json.loads(path.read_text(encoding="utf-8"))
        found = judge(Evidence(logs=(LogSource(name=path.name, text=thread["log"]),)))
        told = found.verdict
        print(f"=== {path.stem}  {thread['source']}  {thread['title']}")
        _show("thread", thread["cause"])
        _show("remedy", thread["remedy"])
        _show("ours", "nothing" if told is None else f"[{told.id}, {told.confidence}] {told.cause}")
        for fix in told.fixes[:3] if told else ():
            _show("", f"- {fix.text}{f'  `{fix.command}`' if fix.command else ''}")
        if found.also:
            _show("also", ", ".join(verdict.id for verdict in found.also))
    return 0


def _show(name: str, text: str) -> None:
    print(textwrap.fill(" ".join(text.split()), 118, initial_indent=f"  {name:7} ", subsequent_indent=" " * 10))


if __name__ == "__main__":
    sys.exit(main())
