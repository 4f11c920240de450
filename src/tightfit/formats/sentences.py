"""The sentences of our own doors, taken apart into findings: which key, what is wrong, what to write."""

from __future__ import annotations

import re

from tightfit.formats.document import Document


def place_in(sentence: str, document: Document) -> str:
    """The key of the file that a sentence is about: the longest one that it names."""
    words = {word.strip("`'\",.:;()") for word in sentence.split()}
    named = [place for place in document.lines if place in words or place.rpartition(".")[2] in words]
    return max(named, key=lambda place: (place in words, len(place)), default="")


def begun(sentence: str, document: Document) -> str:
    """Without the file's name, which stands above it, and with a key at its beginning marked as one."""
    plain = sentence.replace(f" in {document.path.name}", "", 1).removeprefix(f"{document.path.name}: ")
    first, space, rest = plain.partition(" ")
    key = first.rstrip(":")
    segments = {segment for place in document.lines for segment in (place, *place.split("."))}
    return f"`{key}`{first[len(key) :]}{space}{rest}" if key in segments else plain


def parted(sentence: str) -> tuple[str, str]:
    """What is wrong, and the fix, empty where the sentence has none.

    Our errors have both in one sentence, with a colon or a semicolon between, or say what the field must be.
    """
    aside = re.search(r" \([^()]*\)$", sentence)
    if aside:
        sentence = sentence[: aside.start()]
    must = re.search(r" must be (.+), not [^:]*$", sentence)
    if must:
        noun = {"at": "a number of ", "below": "a number ", "from": "a number "}.get(must[1].split()[0], "")
        return sentence.rstrip("."), f"write {noun}{must[1]}"
    for mark in ("; ", ": "):
        what, found, fix = sentence.rpartition(mark)
        if found:
            meant = re.fullmatch(r"did you mean '?(.+?)'?\?", fix)
            takes = re.fullmatch(r"\S+ takes (.+)", fix)
            return what, f"write {meant[1]}" if meant else f"write {takes[1]}" if takes else fix.rstrip(".")
    needs = re.search(r" needs (?!stage)(.+)$", sentence)
    return sentence.rstrip("."), f"add {needs[1]}" if needs else ""
