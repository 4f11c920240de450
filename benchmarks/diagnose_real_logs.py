"""What `tightfit diagnose` says of logs from public threads, beside the cause that their threads established.

    python benchmarks/diagnose_real_logs.py FOLDER
    python benchmarks/diagnose_real_logs.py FOLDER SCORES

FOLDER holds JSON files with `source`, `title`, `cause`, `remedy` and `log`. Whether an answer is right, partly right or
wrong is for a person to say: this prints both sides. `nothing` means that no cause was found. With SCORES, a file of
lines such as `041 right` (or partly, wrong, nothing), the logs are kept as cases of tests/diagnose/test_real_logs.py,
each with that score as its first try and with what is said of it now; what is wrong must be mended there first.
"""

from __future__ import annotations

import json
import sys
import textwrap
from pathlib import Path

from tightfit.diagnose.judge import judge
from tightfit.diagnose.masks import masked
from tightfit.diagnose.verdict import Evidence, LogSource

KEPT = Path(__file__).parents[1] / "tests" / "diagnose" / "real_logs"


def main() -> int:
    if len(sys.argv) not in (2, 3):
        print("usage: diagnose_real_logs.py FOLDER [SCORES]", file=sys.stderr)
        return 2
    lines = Path(sys.argv[2]).read_text(encoding="utf-8").splitlines() if len(sys.argv) == 3 else []
    scores = dict(line.split() for line in lines if line.strip())
    for path in sorted(Path(sys.argv[1]).glob("*.json")):
        thread = json.loads(path.read_text(encoding="utf-8"))
        thread["log"] = "\n".join(masked(line) for line in thread["log"].splitlines()) + "\n"
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
        if path.stem in scores:
            kept = {name: thread[name] for name in ("source", "title", "cause", "remedy")}
            kept |= {"symptom": told and told.id, "first_try": scores[path.stem], "log": thread["log"]}
            text = json.dumps(kept, indent=2, ensure_ascii=False) + "\n"
            (KEPT / path.name).write_text(text, encoding="utf-8")
    return 0


def _show(name: str, text: str) -> None:
    print(textwrap.fill(" ".join(text.split()), 118, initial_indent=f"  {name:7} ", subsequent_indent=" " * 10))


if __name__ == "__main__":
    sys.exit(main())
