"""Every symptom is found where it is, and not where it only looks alike; whole logs get their first cause, and healthy
ones get none."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from sample_logs import CAPTURED, CORPUS, FIXTURES, HEALTHY, REAL, Section, evidence_of, sections

from tables import table
from tightfit.diagnose.catalogue import catalogue
from tightfit.diagnose.judge import judge
from tightfit.diagnose.verdict import Diagnosis, Evidence, LogSource

SECTIONS = [section for path in sorted(FIXTURES.glob("*.txt")) for section in sections(path)]
WORTH_KNOWING = {symptom.id for symptom in catalogue().symptoms if symptom.role == "note"}


def found_in(section: Section) -> tuple[str | None, list[str]]:
    found = judge(section.evidence)
    return found.verdict and found.verdict.id, [verdict.id for verdict in found.also]


@pytest.mark.thorough
@table("section", [each for each in SECTIONS if each.is_it])
def test_a_symptom_is_found(section: Section) -> None:
    verdict, also = found_in(section)
    assert section.is_note == (section.symptom in WORTH_KNOWING)
    if section.is_note:
        assert verdict is None
        assert section.symptom in also
    else:
        assert verdict == section.symptom


@pytest.mark.thorough
@table("section", [each for each in SECTIONS if not each.is_it])
def test_what_only_looks_alike_is_something_else(section: Section) -> None:
    verdict, also = found_in(section)
    assert verdict == section.other
    assert section.other is not None or section.symptom not in also


def test_every_symptom_has_both() -> None:
    known = {symptom.id for symptom in catalogue().symptoms}
    assert {each.symptom for each in SECTIONS if each.is_it} == known
    assert {each.symptom for each in SECTIONS if not each.is_it} == known


@pytest.mark.thorough
@table("log", sorted(CAPTURED.glob("*.log")), ids=lambda log: log.stem)
def test_failures_that_were_provoked(log: Path) -> None:
    expected = re.sub(r"-\d+$", "", log.stem)
    found = judge(evidence_of(log))
    if expected in WORTH_KNOWING:
        assert found.verdict is None
        assert [verdict.id for verdict in found.also] == [expected]
    else:
        assert found.verdict is not None
        assert found.verdict.id == expected


def test_half_of_what_is_found_was_provoked_or_met() -> None:
    """By a program that really failed, or in somebody's log. The rest needs a GPU, a scheduler or a broken card, and is
    written in their true words."""
    provoked = {re.sub(r"-\d+$", "", log.stem) for log in CAPTURED.glob("*.log")}
    provoked |= {json.loads(log.read_text(encoding="utf-8"))["symptom"] for log in REAL.glob("*.json")}
    without_gpu = {
        symptom.id
        for symptom in catalogue().symptoms
        if symptom.kind not in ("device-oom", "fragmentation", "other-process", "hardware", "pinned-memory")
    }
    assert len(provoked & without_gpu) >= len(without_gpu) / 2


@pytest.mark.thorough
@table("log", sorted(CORPUS.iterdir()), ids=lambda log: log.name)
def test_the_first_cause_and_not_the_cascade(log: Path) -> None:
    found = judge(evidence_of(log))
    assert found.verdict is not None
    assert found.verdict.id == log.name.partition("--")[0]
    assert found.verdict.evidence
    assert found.verdict.fixes


@table("log", sorted(HEALTHY.glob("*.log")), ids=lambda log: log.stem)
def test_healthy_logs_with_words_that_scare(log: Path) -> None:
    found = judge(evidence_of(log))
    assert found.verdict is None
    assert found.also == ()


HARMLESS = (Path(__file__).parent / "harmless_lines.txt").read_text(encoding="utf-8").splitlines()


@table("line", HARMLESS)
def test_a_harmless_line_is_harmless_wherever_the_log_ends(line: str) -> None:
    source = LogSource(name="x", text=f"Loading the model\n{line}\n")
    assert judge(Evidence(logs=(source,))) == Diagnosis(verdict=None)


def test_there_are_enough_of_each() -> None:
    assert len(catalogue().symptoms) >= 60
    assert len(list(HEALTHY.glob("*.log"))) >= 40
