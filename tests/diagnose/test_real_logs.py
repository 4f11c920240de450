"""Logs retold after public threads in which the cause was established: each is taken for what it was.

`real_logs/NUMBER.json` has the `source` and its `title`, `cause` and `remedy` as the thread told them, and the `log`.
The logs are retold, not copied: the programs' own messages in their order, with values, paths and frames changed or
left out. `symptom` is what it must be diagnosed as (null: nothing is wrong), `first_try` how the answer was before any
rule was written for it. `docs/diagnose.md` shows the sums.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from sample_logs import REAL

from tables import table
from tightfit.diagnose.judge import judge
from tightfit.diagnose.masks import masked
from tightfit.diagnose.verdict import Evidence, LogSource

THREADS: dict[str, dict[str, Any]] = {
    path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(REAL.glob("*.json"))
}
PAGE = Path(__file__).parents[2] / "docs" / "diagnose.md"


@pytest.mark.thorough
@table("thread", THREADS.values(), ids=lambda thread: thread["cause"])
def test_a_retold_log_gets_the_cause_that_its_thread_established(thread: dict[str, Any]) -> None:
    found = judge(Evidence(logs=(LogSource(name="log", text=thread["log"]),))).verdict
    assert (found and found.id) == thread["symptom"], thread["cause"]


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("015", "SFTConfig"),
        ("033", "['text', 'meta']"),
        ("043", "installed 12.2, torch 11.3"),
        ("073", "pretraining_dataset: Input should be a valid list"),
        ("077", "gradient_accumulation_steps"),
        ("095", "the batch is 1 x 1, and 16 answers"),
        ("121", "Instruction"),
        ("123", "for cpu_adam.so"),
    ],
)
def test_a_cause_names_what_the_log_names(name: str, told: str) -> None:
    found = judge(Evidence(logs=(LogSource(name="log", text=THREADS[name]["log"]),))).verdict
    assert found is not None
    assert told in str(found.cause)


def test_no_secret_is_left_in_them() -> None:
    assert [
        name for name, thread in THREADS.items() for line in thread["log"].splitlines() if masked(line) != line
    ] == []


def test_the_page_has_the_score_of_the_first_try() -> None:
    """Seen logs have even numbers; the others were kept aside until the rules were done."""
    page = PAGE.read_text(encoding="utf-8")
    for half, numbers in (("seen", (0,)), ("unseen", (1,))):
        scores = Counter(thread["first_try"] for name, thread in THREADS.items() if int(name) % 2 in numbers)
        if scores:
            row = re.search(rf"\| {half} \|(.*)\|", page)
            assert row is not None, half
            shown = [int(cell) for cell in row[1].split("|")]
            assert shown == [scores.total(), *(scores[word] for word in ("right", "partly", "wrong", "nothing"))]
