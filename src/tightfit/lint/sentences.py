"""The sentences of our own doors, taken apart into findings: which key, what is wrong, what to write."""

from __future__ import annotations

import re

from tightfit.lint.document import Document


def place_in(sentence: str, document: Document) -> str:
    """The key of the file that a sentence is about: the longest one that it names."""
    words = {word.strip("`'\",.:;()") for word in sentence.split()}
    named = [place for place in document.lines if place in words or place.rpartition(".")[2] in words]
    return max(named, key=lambda place: (place in words, len(place)), default="")


def parted(sentence: str) -> tuple[str, str]:
    """What is wrong, and the fix: our errors have them in one sentence, with a colon or a semicolon between."""
    aside = re.search(r" \([^()]*\)$", sentence)
    if aside:
        sentence = sentence[: aside.start()]
    for mark in ("; ", ": "):
        what, found, fix = sentence.rpartition(mark)
        if found:
            meant = re.fullmatch(r"did you mean '?(.+?)'?\?", fix)
            return what, f"write {meant[1]}" if meant else fix.rstrip(".")
    return sentence.rstrip("."), "correct it"
