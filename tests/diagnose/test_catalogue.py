"""The catalogue's own rules: what a contributor may write, and what is said where it is wrong."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from sample_logs import CORPUS, FIXTURES, sections

import tightfit
from tightfit.diagnose.catalogue import (
    PATTERNS,
    PLAIN,
    SEVERAL,
    VENDORS,
    OomShape,
    Role,
    Symptom,
    catalogue,
    read_catalogue,
    read_text,
)
from tightfit.diagnose.doing import Doing
from tightfit.diagnose.gate import WORDS, alternatives, marks_of
from tightfit.diagnose.verdict import Confidence, Kind
from tightfit.inputs.spelling import nearest
from tightfit.job.known import KnownConfig
from tightfit.messages.symptoms import SHARED, read_files

GOOD = """
- id: a-b
  kind: code
  title: A title
  title_zh: 标题
  lines: '\\bsome words here\\b'
  cause: A cause
  cause_zh: 原因
  fixes: [{text: Do this, text_zh: 这样做}]
"""

SEEDS = {
    1: "killed", 2: "zero3-not-in-time", 3: "zero3-lora-whole", 4: "killed-resuming", 5: "oom-resume", 6: "bus-error",
    7: "nccl-shm", 8: "killed-nvme", 9: "pinned-frames", 10: "killed-converting", 11: "map-died", 12: "oom-logits",
    13: "oom-preference", 14: "oom-second-step", 15: "oom-evaluation", 16: "oom-eager-attention",
    17: "oom-optimizer-step", 18: "oom-buckets", 19: "oom-offload-copy", 20: "cache-flushes", 21: "oom-saving",
    22: "small-model", 23: "recompute-zero3-peft", 24: "reduced-twice", 25: "not-sharded-weight", 26: "force-torchrun",
    27: "moe-hang", 28: "batch-sizes", 29: "config-mismatch", 30: "world-size-changed", 31: "device-map-zero3",
    32: "quantised-moved", 33: "ptq-zero3", 34: "oom-kbit", 35: "oom-modules-to-save", 36: "unscale-fp16",
    37: "no-grad", 38: "dtype-mismatch", 39: "loss-scale-floor", 40: "nccl-oom", 41: "watchdog-timeout", 42: "exabyte",
    43: "op-build", 44: "libaio", 45: "stray-contexts", 46: "oom-later", 47: "oom-logits-size", 48: "oom-packing",
    49: "oom-mamba-slow", 50: "oom-roomy", 51: "memory-fraction",
}  # fmt: skip
"""The rows of the table of symptoms that users are known to meet, and under which name each is here."""


NEEDED = ("id", "kind", "title", "title_zh", "cause", "cause_zh", "fixes")
KEYS = {*NEEDED, *PLAIN, *PATTERNS, *SEVERAL, "lines", "names", "settings"}
REMEDY_KEYS = {"text", "text_zh", "command", "sets", "costly", "where", "unless", *VENDORS}
CHOICES = {"kind": Kind, "role": Role, "confidence": Confidence, "doing": Doing, "oom": OomShape}
TRAINERS = {"axolotl", *(path.parent.name for path in Path(tightfit.__file__).parent.glob("formats/*/dialect.py"))}
"""The programs whose keys a remedy may set."""
SETTINGS = {field.name for field in fields(KnownConfig)} - {"file"}
ALWAYS = {"steps", "tokens", "error"}
"""Names that the engine fills in."""


def faults_in(trees: Mapping[str, Any]) -> Iterator[str]:
    """What is wrong in the files of a catalogue, with its place; what hangs on it is left out."""
    shared = trees.get(SHARED, {})
    for name, entry in shared.items():
        yield from faults_in_remedy(f"{SHARED}: {name}", entry, {})
    seen: set[str] = set()
    bases: list[tuple[str, str]] = []
    for file, tree in trees.items():
        if file == SHARED:
            continue
        if not isinstance(tree, list) or not all(isinstance(entry, dict) for entry in tree):
            yield f"{file} is no list of symptoms"
            continue
        for entry in tree:
            place = f"{file}: {entry.get('id', '?')}"
            found = list(faults_in_entry(place, entry, shared))
            yield from found
            if found:
                continue
            try:
                (symptom,) = read_catalogue({file: [entry], SHARED: shared}).symptoms
            except (ValueError, IndexError) as error:
                yield f"{place}: {error}"
                continue
            yield from faults_in_symptom(place, symptom)
            if symptom.id in seen:
                yield f"{file}: there are two symptoms {symptom.id!r}"
            seen.add(symptom.id)
            bases += [(place, base) for base in symptom.refines]
    yield from (f"{place} refines {base!r}, which there is not" for place, base in bases if base not in seen)


def unknown_keys(place: str, values: Mapping[str, Any], known: set[str]) -> Iterator[str]:
    for key in values:
        if key not in known:
            yield f"{place} has an unknown key {key!r}: {nearest(str(key), known)}"


def faults_in_entry(place: str, entry: Mapping[str, Any], shared: Mapping[str, Any]) -> Iterator[str]:
    yield from unknown_keys(place, entry, KEYS)
    missing = [key for key in NEEDED if not entry.get(key)]
    yield from (f"{place} has no {key}" for key in missing)
    if missing:
        return
    if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", entry["id"]):
        yield f"{place}: an id is small letters and digits, with hyphens between"
    for key, choice in CHOICES.items():
        said = entry.get(key, [])
        for word in said if isinstance(said, list) else [said]:
            if word not in get_args(choice):
                yield f"{place}: {key} is {word!r}, and knows {get_args(choice)}"
    for key in ("title", "cause"):
        yield from faults_in_names(place, entry, key)
    yield from unknown_keys(place, entry.get("settings", {}), SETTINGS)
    for fix in entry["fixes"]:
        yield from faults_in_remedy(place, fix, shared)


def faults_in_remedy(place: str, values: Any, shared: Mapping[str, Any]) -> Iterator[str]:
    if isinstance(values, str):
        if values not in shared:
            yield f"{place}: there is no remedy {values!r}"
    elif not isinstance(values, dict) or not values.get("text") or not values.get("text_zh"):
        yield f"{place}: a fix is the name of a remedy, or a block with a text and a text_zh"
    else:
        yield from unknown_keys(place, values, REMEDY_KEYS)
        yield from faults_in_names(place, values, "text")
        yield from (f"{place}: sets is {each!r}" for each in values.get("sets", {}) if each not in TRAINERS)
        for key in ("where", "unless"):
            yield from unknown_keys(place, values.get(key, {}), SETTINGS)


def faults_in_names(place: str, values: Mapping[str, Any], key: str) -> Iterator[str]:
    if read_text(values, key, "") != read_text(values, f"{key}_zh", ""):
        yield f"{place}: {key} and {key}_zh name different things in braces"


def faults_in_symptom(place: str, symptom: Symptom) -> Iterator[str]:
    # What the cause has in braces must be known whenever the symptom is found, but for what may be left out.
    always = ALWAYS | (SETTINGS if symptom.settings or symptom.oom else set())
    if symptom.lines:
        always |= set.intersection(*(set(pattern.compiled.groupindex) for pattern in symptom.lines))
    for name in symptom.cause.names:
        if name not in always:
            yield f"{place}: not every line of it tells the {{{name}}} of its cause"
    if not (symptom.lines or symptom.exits or symptom.refines or symptom.catches):
        yield f"{place} has neither lines, nor exits, nor refines: nothing would ever find it"


@pytest.mark.thorough
def test_nothing_is_wrong_in_the_catalogue() -> None:
    assert not list(faults_in(read_files()))
    assert len(catalogue().symptoms) == len(catalogue().by_id) > 300


def test_every_known_trap_has_its_entry() -> None:
    assert sorted(SEEDS) == list(range(1, 52))
    assert set(SEEDS.values()) <= set(catalogue().by_id)


@pytest.mark.thorough
def test_every_expression_compiles_and_has_its_words() -> None:
    for symptom in catalogue().symptoms:
        for pattern in (
            *symptom.lines,
            *symptom.names,
            symptom.without,
            symptom.follows,
            symptom.precedes,
            symptom.around,
            symptom.frames,
        ):
            assert pattern is None or re.compile(pattern.text)
        assert len(symptom.lines) == len(symptom.marks)
        assert all(symptom.marks)


def test_every_entry_reads_well() -> None:
    for symptom in catalogue().symptoms:
        assert symptom.sources, symptom.id
        fixes = [remedy.text.fill_any() for remedy in symptom.remedies]
        for language, stop in (("en", "."), ("zh", "。")):
            assert not symptom.cause.fill_any().text(language).endswith(stop), symptom.id
            assert all(fix.text(language).endswith(stop) for fix in fixes), symptom.id


@pytest.mark.thorough
@pytest.mark.parametrize("whose", ["its own", pytest.param("all", marks=pytest.mark.slow)])
def test_no_line_that_fits_is_sieved_out(whose: str) -> None:
    """Whatever an expression matches has its word as a whole word, and all of its runs. What fits stands among the
    lines of the symptom itself; a few of the others' fit as well."""
    own: dict[str, set[str]] = defaultdict(set)
    for section in (section for path in FIXTURES.glob("*.txt") for section in sections(path)):
        own[section.symptom].update((section.evidence.logs[0].text or "").splitlines())
    every = {line for path in CORPUS.glob("*.log") for line in path.read_text(encoding="utf-8").splitlines()}
    every = every.union(*own.values())
    tried = 0
    for symptom in catalogue().symptoms:
        for pattern, marks in zip(symptom.lines, symptom.marks, strict=True):
            for line in filter(pattern.compiled.search, own[symptom.id] if whose == "its own" else every):
                flat = line.lower().encode()
                words = set(flat.translate(WORDS).split())
                near = [mark for mark in marks if mark.word.encode() in words]
                assert any(all(run in flat for run in mark.runs) for mark in near), (symptom.id, pattern.text, line)
                for digits in (mark.digits for mark in near if mark.digits):
                    assert any(number in flat for number in digits), (symptom.id, pattern.text, line)
                tried += 1
    assert tried > 400


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        (r"\bout of memory\b", {"memory"}),
        (r"\bfailed \(exitcode: -9\)", {"exitcode"}),
        (r"\b(?:killed|dead)\b by", {"killed", "dead"}),
        (r"^Killed$", {"killed"}),
        (r"\bexit(?:ed)? with\b", {"exit", "exited"}),
        (r"\bwatchdog\s*: x", {"watchdog"}),
    ],
)
def test_the_word_of_an_expression(pattern: str, words: set[str]) -> None:
    assert {mark.word for mark in marks_of(pattern)} == words


@pytest.mark.parametrize("pattern", [r"\w+error", r"x.*y", r"\d+", r"(?:a|bcd)?"])
def test_an_expression_without_a_word_is_refused(pattern: str) -> None:
    with pytest.raises(ValueError, match="no whole plain word"):
        marks_of(pattern)


@pytest.mark.thorough
@given(st.lists(st.sampled_from(["alpha", "beta gamma", "delta[0-9]", r"e\|f", "(g|h) iota"]), min_size=1, max_size=4))
def test_alternatives_come_apart(parts: list[str]) -> None:
    assert alternatives("|".join(parts)) == parts


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (("kind: code", "kind: codes"), "kind is 'codes', and knows"),
        (("  kind: code\n", ""), "has no kind"),
        (("id: a-b", "id: A b"), "an id is small letters"),
        (("title: A title", "titel: A title"), "unknown key 'titel': title"),
        (("  lines: '\\bsome words here\\b'\n", ""), "neither lines, nor exits"),
        (("'\\bsome words here\\b'", "'x.*'"), "no whole plain word"),
        (("A cause\n  cause_zh: 原因", "A {thing}\n  cause_zh: '{thing}'"), "not every line of it tells the {thing}"),
        (("[{text: Do this, text_zh: 这样做}]", "[do-that]"), "there is no remedy 'do-that'"),
        ((", text_zh: 这样做", ""), "a block with a text and a text_zh"),
        (("  title_zh: 标题\n", ""), "has no title_zh"),
        (("A cause", "A {thing}"), "cause and cause_zh name different things"),
        (("Do this,", "Do this, sets: {me: y},"), "sets is 'me'"),
        (("fixes:", "settings: {stages: 3}\n  fixes:"), "unknown key 'stages': stage"),
        (("fixes:", "refines: nothing\n  fixes:"), "refines 'nothing', which there is not"),
        (("fixes:", "doing: sleeping\n  fixes:"), "doing is 'sleeping'"),
        (("- id", "  id"), "is no list"),
    ],
)
def test_a_wrong_entry_is_told_with_its_place(change: tuple[str, str], complaint: str) -> None:
    assert len(read_catalogue({"a.yaml": yaml.safe_load(GOOD)}).symptoms) == 1
    assert not list(faults_in({"a.yaml": yaml.safe_load(GOOD)}))
    told = list(faults_in({"a.yaml": yaml.safe_load(GOOD.replace(*change))}))
    assert any(re.search(complaint, each) and "a.yaml" in each for each in told), told


def test_two_of_one_name() -> None:
    (told,) = faults_in({"a.yaml": yaml.safe_load(GOOD), "b.yaml": yaml.safe_load(GOOD)})
    assert "two symptoms 'a-b'" in told
