"""Where the examples lie: the files that a path means, their kinds, and their hashes."""

from __future__ import annotations

import codecs
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tightfit.inputs.records import find_json, parse_json
from tightfit.inputs.spelling import nearest, read_text
from tightfit.messages import Listing, Message
from tightfit.owned import replace_file
from tightfit.train.data.layouts import TEXT, Layout, layout_of_entry
from tightfit.types import ConfigError

FileKind = Literal["text", "lines", "array"]

SHIPPED = Path(__file__).parent / "shipped"
SHIPPED_WORDS = {"shipped:text": "stories.txt", "shipped:dialogues": "dialogues.json"}

TEXT_ENDINGS = (".txt", ".text", ".md")
LINE_ENDINGS = (".jsonl", ".ndjson")
INFO = "dataset_info.json"

BLOCK_BYTES = 8 * 2**20
LONGEST_ITEM = 2**26
"""Letters in one example of a JSON list. Without an end, a torn file would be read whole into memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceFile:
    """One file of examples."""

    path: Path
    kind: FileKind
    """text: one long document; lines: an example a line; array: one JSON list."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSource:
    """All the files of a data set."""

    files: tuple[SourceFile, ...]
    layout: Layout | None
    """None: told from the first example."""
    limit: int | None = None
    """The most examples to use, where an entry of dataset_info.json says so."""


def find_source(path: str, format_name: str) -> DataSource:
    """The files that the job's path names."""
    if path in SHIPPED_WORDS:
        return DataSource(files=(SourceFile(path=SHIPPED / SHIPPED_WORDS[path], kind="text"),), layout=None)
    if path.startswith("shipped:"):
        raise ConfigError(Message("data.no-shipped-data", path=path, known=Listing(SHIPPED_WORDS, "and")))
    here = Path(path).expanduser()
    if here.is_dir():
        return DataSource(files=_files_in(here, format_name), layout=_layout_named_by(format_name))
    if here.is_file():
        return DataSource(files=(one_file(here, format_name),), layout=_layout_named_by(format_name))
    info = _info_of(path)
    if info is not None:
        return _from_info(*info, format_name)
    hint = "" if "/" in path or "." in path else Message("data.download-first")
    raise ConfigError(Message("data.no-data", path=path, hint=hint))


def _layout_named_by(format_name: str) -> Layout | None:
    return TEXT if format_name == "text" else None


def one_file(path: Path, format_name: str) -> SourceFile:
    """One file of examples, by its name and its first letter."""
    if path.name == INFO:
        names = ", ".join(list(_read_info(path))[:5])
        raise ConfigError(Message("data.which-data-set", file=path, names=names))
    if path.suffix.lower() in (".parquet", ".csv", ".arrow", ".zip", ".gz", ".xlsx"):
        raise ConfigError(Message("data.save-as-jsonl", path=path))
    return SourceFile(path=path, kind=_detect_kind(path, _kind(path.name, format_name)))


def _detect_kind(path: Path, kind: FileKind) -> FileKind:
    """`.json` is a list by custom, but often an object a line."""
    if kind != "array":
        return kind
    try:
        with path.open("rb") as file:
            first = file.read(4096).removeprefix(b"\xef\xbb\xbf").lstrip()[:1]
    except OSError as error:
        raise ConfigError(Message("data.cannot-read", path=path, why=(error.strerror or str(error)).lower())) from None
    return "lines" if first == b"{" else "array"


def _kind(name: str, format_name: str) -> FileKind:
    ending = os.path.splitext(name)[1].lower()
    if ending in LINE_ENDINGS:
        return "lines"
    if ending == ".json":
        return "array"
    if ending in TEXT_ENDINGS or format_name in ("auto", "text"):
        return "text"
    return "lines"


def _files_in(folder: Path, format_name: str) -> tuple[SourceFile, ...]:
    if (folder / INFO).is_file():
        names = ", ".join(list(_read_info(folder / INFO))[:5])
        raise ConfigError(Message("data.folder-of-data-sets", folder=folder, names=names))
    known = (*TEXT_ENDINGS, *LINE_ENDINGS, ".json")
    found = sorted(
        path
        for path in folder.rglob("*")
        if path.is_file()
        and path.suffix.lower() in known
        and not any(part.startswith(".") for part in path.relative_to(folder).parts)
    )
    if not found:
        raise ConfigError(Message("data.folder-without-data", folder=folder))
    return tuple(SourceFile(path=path, kind=_detect_kind(path, _kind(path.name, format_name))) for path in found)


# --- dataset_info.json ----------------------------------------------------------------------------


def _info_of(path: str) -> tuple[Path, str] | None:
    before, colon, name = path.rpartition(":")
    if not colon or not before:
        return None
    here = Path(before).expanduser()
    file = here / INFO if here.is_dir() else here
    return (file, name) if file.is_file() and file.suffix == ".json" else None


def _read_info(path: Path) -> Mapping[str, Any]:
    try:
        tree = parse_json(read_text(path, "JSON"))
    except ValueError as error:
        raise ConfigError(Message("data.unreadable-json", path=path, why=error)) from None
    if not isinstance(tree, dict):
        raise ConfigError(Message("data.info-no-object", path=path))
    return tree


def _from_info(path: Path, name: str, format_name: str) -> DataSource:
    entries = _read_info(path)
    entry = entries.get(name)
    if not isinstance(entry, Mapping):
        close = nearest(name, entries)
        hint = (
            Message("data.did-you-mean", close=close)
            if close
            else Message("data.it-has", known=", ".join(list(entries)[:8]))
        )
        raise ConfigError(Message("data.no-data-set", path=path, name=name, hint=hint))
    file = entry.get("file_name")
    if not isinstance(file, str):
        raise ConfigError(Message("data.not-local", name=name, path=path))
    layout = layout_of_entry(entry, name)
    here = path.parent / file
    if here.is_dir():
        files = _files_in(here, "alpaca")
    elif here.is_file():
        files = (one_file(here, format_name if format_name != "auto" else "alpaca"),)
    else:
        raise ConfigError(Message("data.no-data-file", file=here, name=name, path=path))
    count = entry.get("num_samples")
    return DataSource(files=files, layout=layout, limit=count if isinstance(count, int) and count > 0 else None)


# --- hashes ---------------------------------------------------------------------------------------


class Hashes:
    """The hashes of files, kept in the cache: a file with the same path, size and time is not read again."""

    def __init__(self, cache: Path) -> None:
        self.path = cache / "hashes.json"
        self.changed = False
        tree = find_json(self.path)
        self.known: dict[str, list[Any]] = tree if isinstance(tree, dict) else {}

    def of(self, path: Path) -> str:
        here = path.resolve()
        seen = os.stat(here)
        mark = [seen.st_size, seen.st_mtime_ns]
        entry = self.known.get(str(here))
        if entry is not None and entry[:2] == mark:
            return str(entry[2])
        digest = hashlib.sha256()
        for block in _blocks(here):
            digest.update(block)
        self.known[str(here)] = [*mark, digest.hexdigest()]
        self.changed = True
        return digest.hexdigest()

    def save(self) -> None:
        """Kept for the next start; without a place to write, that one hashes again."""
        if not self.changed:
            return
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(self.path, json.dumps(self.known).encode())
            self.changed = False
        except OSError:
            pass


def _blocks(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while block := file.read(BLOCK_BYTES):
            yield block


# --- examples as they lie -------------------------------------------------------------------------


def trees_in(file: SourceFile) -> Iterator[tuple[Message, Any]]:
    """Every example of a file with its place: `line 17`, or `example 17` of a list."""
    if file.kind == "array":
        for number, item in enumerate(array_items(file.path), start=1):
            yield Message("data.example", number=number), item
        return
    with file.path.open("rb") as lines:
        for number, raw in enumerate(lines, start=1):
            if not raw.strip():
                continue
            try:
                yield Message("data.line", number=number), parse_json(raw.decode("utf-8-sig"))
            except UnicodeDecodeError:
                raise not_utf8(file.path) from None
            except ValueError as error:
                raise ConfigError(
                    Message("data.line-not-json", number=number, path=file.path, why=json_fault(error))
                ) from None


def json_fault(error: ValueError) -> str:
    """What is wrong, without the place within the line."""
    return str(error).partition(": line")[0].lower()


# --- JSON lists -----------------------------------------------------------------------------------


def array_items(path: Path) -> Iterator[Any]:
    """The items of a JSON list, one by one: the file may be larger than the memory."""
    decoder = json.JSONDecoder()
    number, at, step = 0, 0, BLOCK_BYTES // 8
    with path.open(encoding="utf-8-sig") as file:
        buffer = _read(file, step, path).lstrip()
        if buffer[:1] != "[":
            raise ConfigError(Message("data.not-a-list", path=path))
        at = 1
        while True:
            more = _read(file, step, path)
            buffer, at = buffer[at:] + more, 0
            while True:
                start = _next_item(buffer, at, number > 0)
                if buffer[start : start + 1] == "]":
                    return
                try:
                    item, end = decoder.raw_decode(buffer, start)
                except ValueError as error:
                    if more and len(buffer) - start < LONGEST_ITEM:
                        break
                    raise ConfigError(
                        Message("data.example-not-json", number=number + 1, path=path, why=json_fault(error))
                    ) from None
                number, at = number + 1, end
                yield item
            step = max(step, len(buffer) - at)  # an item longer than the buffer: read twice as much


def _read(file: Any, size: int, path: Path) -> str:
    try:
        return str(file.read(size))
    except UnicodeDecodeError:
        raise not_utf8(path) from None


def _next_item(text: str, at: int, after_another: bool) -> int:
    while at < len(text) and (text[at] in " \t\r\n" or (after_another and text[at] == ",")):
        at += 1
    return at


def not_utf8(path: Path) -> ConfigError:
    """The sentence for a file that is no text: where its first wrong byte is."""
    line, before = 1, 0
    decoder = codecs.getincrementaldecoder("utf-8")()
    for block in _blocks(path):
        held = len(decoder.getstate()[0])
        try:
            decoder.decode(block)
        except UnicodeDecodeError as error:
            at = before - held + error.start
            line += block[: max(0, error.start - held)].count(b"\n")
            return ConfigError(Message("data.not-utf8", path=path, line=line, at=at))
        line += block.count(b"\n")
        before += len(block)
    return ConfigError(Message("data.utf8-cut-off", path=path, at=before))
