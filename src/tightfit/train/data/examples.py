"""Where the examples lie and how each is laid out: the files that a path means, and the text or turns in them.

`text`, `alpaca`, `sharegpt` and `messages` are the layouts that people have. Which keys hold what is a value
(`Layout`), since an entry of LLaMA-Factory's `dataset_info.json` may rename every one of them.
"""

from __future__ import annotations

import codecs
import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from tightfit.inputs.records import find_json, parse_json
from tightfit.inputs.spelling import read_text, shown
from tightfit.messages import Listing, Message, message_of, say_why
from tightfit.owned import replace_file
from tightfit.train.data.chat import SHIPPED, Turn, hint_at
from tightfit.types import ConfigError

Kind = Literal["text", "alpaca", "sharegpt", "recipe"]

ROLES = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "bot", "bing", "bard", "model", "function_call"), "assistant"),
    **dict.fromkeys(("system", "developer"), "system"),
    **dict.fromkeys(("observation", "tool"), "user"),
}
"""What files call the speakers. What a tool answers is read like a user's turn: the model does not write it."""


class ExampleError(Exception):
    """An example that cannot be used; the text follows its place in the file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Which keys hold what. None: there is no such key."""

    kind: Kind
    prompt: str | None = "instruction"
    query: str | None = "input"
    response: str | None = "output"
    history: str | None = "history"
    system: str | None = "system"
    turns: str = "conversations"
    role: str = "from"
    content: str = "value"
    roles: tuple[tuple[str, str], ...] = tuple(ROLES.items())


TEXT = Layout(kind="text", prompt="text")
ALPACA = Layout(kind="alpaca")
SHAREGPT = Layout(kind="sharegpt")
MESSAGES = Layout(kind="sharegpt", turns="messages", role="role", content="content")
RECIPE = Layout(kind="recipe")
BY_FORMAT = {"text": TEXT, "alpaca": ALPACA, "sharegpt": SHAREGPT, "messages": MESSAGES}


Example = str | tuple[Turn, ...]  # what one example is trained on as: text, or a chat


def layout_of(tree: Any, format_name: str) -> Layout:
    """The layout of a file, told from its first example unless the format was named."""
    if not isinstance(tree, Mapping):
        raise ExampleError(Message("data.no-object", found=shown(tree)))
    layout = BY_FORMAT.get(format_name)  # None: auto
    if layout is None and ("messages" in tree or "conversations" in tree):
        layout = MESSAGES if "messages" in tree else SHAREGPT
    elif layout is None and "instruction" in tree:
        layout = ALPACA
    elif layout is None and "text" in tree:
        layout = TEXT
    if layout is None:
        raise ExampleError(Message("data.unknown-fields", fields=", ".join(map(str, list(tree)[:8])) or "(none)"))
    if layout.kind != "sharegpt":
        return layout
    # Files mix the two: `conversations` of role and content are common.
    key = next((key for key in (layout.turns, "messages", "conversations") if key in tree), layout.turns)
    turns = tree.get(key)
    first = turns[0] if isinstance(turns, list) and turns and isinstance(turns[0], Mapping) else {}
    for role, content in (("role", "content"), ("from", "value")):
        if role in first and content in first:
            return replace(layout, turns=key, role=role, content=content)
    return replace(layout, turns=key)


def example_of(tree: Any, layout: Layout) -> Example:
    """One example, or an `ExampleError` that says what it lacks."""
    if not isinstance(tree, Mapping):
        raise ExampleError(Message("data.no-object", found=shown(tree)))
    if layout.kind == "text":
        return _text(tree, layout.prompt)
    listed = tree.get(layout.turns)
    if layout.kind == "sharegpt" and (not isinstance(listed, list) or not listed):
        raise ExampleError(Message("data.no-turns", turns=layout.turns))
    turns = [Turn("system", text)] if (text := _optional(tree, layout.system)) else []
    if layout.kind == "alpaca":
        for pair in (tree.get(layout.history) or []) if layout.history else []:
            if not isinstance(pair, list | tuple) or len(pair) != 2 or not all(isinstance(each, str) for each in pair):
                raise ExampleError(Message("data.history-no-pairs", history=layout.history))
            turns += [Turn("user", pair[0]), Turn("assistant", pair[1])]
        asked = [_text(tree, layout.prompt), _optional(tree, layout.query)]
        turns.append(Turn("user", "\n".join(part for part in asked if part)))
        turns.append(Turn("assistant", _text(tree, layout.response)))
        return tuple(turns)
    roles, key = dict(layout.roles), layout.content
    for number, turn in enumerate(listed or (), start=1):
        if not isinstance(turn, Mapping):
            fault = Message("data.turn-no-object", turn=shown(turn), number=number, role=layout.role, content=key)
            raise ExampleError(fault)
        role = turn.get(layout.role)
        if not isinstance(role, str) or role not in roles:
            known = ", ".join(roles)
            fault = Message("data.unknown-role", found=shown(role), key=layout.role, number=number, roles=known)
            raise ExampleError(fault)
        content = turn.get(key)
        parts: list[Any] = content if isinstance(content, list) else [None]
        if all(isinstance(part, Mapping) and part.get("type") == "text" for part in parts):  # some files have it so
            content = "".join(str(part.get("text", "")) for part in parts)
        if not isinstance(content, str):
            raise ExampleError(Message("data.turn-no-text", key=key, number=number))
        turns.append(Turn(roles[role], content))
    if not any(turn.role == "assistant" for turn in turns):
        raise ExampleError(Message("data.no-assistant-turn"))
    return tuple(turns)


def _text(tree: Mapping[str, Any], key: str | None) -> str:
    if key is None or tree.get(key) is None:
        raise ExampleError(Message("data.no-text", key=key))
    return _optional(tree, key)


def _optional(tree: Mapping[str, Any], key: str | None) -> str:
    value = tree.get(key) if key else None
    if value is not None and not isinstance(value, str):
        raise ExampleError(Message("data.field-no-text", value=shown(value), key=key))
    return value or ""


# --- LLaMA-Factory's dataset_info.json ------------------------------------------------------------

_TAGS = {
    "user_tag": ("human", "user"),
    "assistant_tag": ("gpt", "assistant"),
    "observation_tag": ("observation", "user"),
    "function_tag": ("function_call", "assistant"),
    "system_tag": ("system", "system"),
}


def layout_of_entry(entry: Mapping[str, Any], name: str) -> Layout:
    """The layout that an entry of `dataset_info.json` describes."""
    if entry.get("ranking"):
        raise ConfigError(Message("data.rankings", name=name))
    formatting = entry.get("formatting", "alpaca")
    columns, tags = entry.get("columns"), entry.get("tags") or {}
    if not isinstance(columns, Mapping | None) or not isinstance(tags, Mapping):
        raise ConfigError(Message("data.columns-no-objects", name=name))
    if formatting == "alpaca":
        if columns is None:
            return replace(ALPACA, history=None, system=None)
        if columns.get("prompt") and not columns.get("response"):
            return replace(TEXT, prompt=str(columns["prompt"]))
        # Where columns are given, those that are not are none: so LLaMA-Factory reads them.
        prompt, query, response = columns.get("prompt"), columns.get("query"), columns.get("response")
        history, system = columns.get("history"), columns.get("system")
        return replace(ALPACA, prompt=prompt, query=query, response=response, history=history, system=system)
    if formatting in ("sharegpt", "openai"):
        roles = {str(tags.get(tag, usual)): role for tag, (usual, role) in _TAGS.items()}
        base = SHAREGPT if formatting == "sharegpt" else MESSAGES
        known = tuple((dict(base.roles) | roles).items()) if not tags else tuple(roles.items())
        return replace(
            base,
            turns=str((columns or {}).get("messages", base.turns)),
            system=(columns or {}).get("system"),
            role=str(tags.get("role_tag", base.role)),
            content=str(tags.get("content_tag", base.content)),
            roles=known,
        )
    raise ConfigError(Message("data.unknown-formatting", name=name, formatting=shown(formatting)))


# --- files ----------------------------------------------------------------------------------------

FileKind = Literal["text", "lines", "array"]

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
    kind: FileKind  # text: one long document; lines: an example a line; array: one JSON list


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSource:
    """All the files of a data set."""

    files: tuple[SourceFile, ...]
    layout: Layout | None  # None: told from the first example
    limit: int | None = None  # the most examples to use, where an entry of dataset_info.json says so


def find_source(path: str, format_name: str) -> DataSource:
    """The files that the job's path names."""
    if path in SHIPPED_WORDS:
        return DataSource(files=(SourceFile(path=SHIPPED / SHIPPED_WORDS[path], kind="text"),), layout=None)
    if path.startswith("shipped:"):
        raise ConfigError(Message("data.no-shipped-data", path=path, known=Listing(SHIPPED_WORDS, "and")))
    here = Path(path).expanduser()
    layout = TEXT if format_name == "text" else None
    if here.is_dir():
        return DataSource(files=_files_in(here, format_name), layout=layout)
    if here.is_file():
        return DataSource(files=(one_file(here, format_name),), layout=layout)
    before, _, name = path.rpartition(":")
    info = Path(before).expanduser()
    info = info / INFO if info.is_dir() else info
    if not before or not info.is_file() or info.suffix != ".json":
        hint = "" if "/" in path or "." in path else Message("data.download-first")
        raise ConfigError(Message("data.no-data", path=path, hint=hint))
    entries = _read_info(info)
    entry = entries.get(name)
    if not isinstance(entry, Mapping):
        hint = hint_at(name, entries, Message("data.it-has", known=", ".join(list(entries)[:8])))
        raise ConfigError(Message("data.no-data-set", path=info, name=name, hint=hint))
    file = entry.get("file_name")
    if not isinstance(file, str):
        raise ConfigError(Message("data.not-local", name=name, path=info))
    layout = layout_of_entry(entry, name)
    here = info.parent / file
    if here.is_dir():
        files = _files_in(here, "alpaca")
    elif here.is_file():
        files = (one_file(here, format_name if format_name != "auto" else "alpaca"),)
    else:
        raise ConfigError(Message("data.no-data-file", file=here, name=name, path=info))
    count = entry.get("num_samples")
    return DataSource(files=files, layout=layout, limit=count if isinstance(count, int) and count > 0 else None)


def one_file(path: Path, format_name: str) -> SourceFile:
    """One file of examples, by its name and its first letter."""
    if path.name == INFO:
        names = ", ".join(list(_read_info(path))[:5])
        raise ConfigError(Message("data.which-data-set", file=path, names=names))
    if path.suffix.lower() in (".parquet", ".csv", ".arrow", ".zip", ".gz", ".xlsx"):
        raise ConfigError(Message("data.save-as-jsonl", path=path))
    return SourceFile(path=path, kind=_kind(path, format_name))


def _kind(path: Path, format_name: str) -> FileKind:
    ending = path.suffix.lower()
    if ending in LINE_ENDINGS:
        return "lines"
    if ending != ".json":
        return "text" if ending in TEXT_ENDINGS or format_name in ("auto", "text") else "lines"
    try:  # a list by custom, but often an object a line
        with path.open("rb") as file:
            first = file.read(4096).removeprefix(b"\xef\xbb\xbf").lstrip()[:1]
    except OSError as error:
        raise ConfigError(Message("data.cannot-read", path=path, why=say_why(error))) from None
    return "lines" if first == b"{" else "array"


def _files_in(folder: Path, format_name: str) -> tuple[SourceFile, ...]:
    if (folder / INFO).is_file():
        names = ", ".join(list(_read_info(folder / INFO))[:5])
        raise ConfigError(Message("data.folder-of-data-sets", folder=folder, names=names))
    found = sorted(
        path
        for path in folder.rglob("*")
        if path.is_file()
        and path.suffix.lower() in (*TEXT_ENDINGS, *LINE_ENDINGS, ".json")
        and not any(part.startswith(".") for part in path.relative_to(folder).parts)
    )
    if not found:
        raise ConfigError(Message("data.folder-without-data", folder=folder))
    return tuple(SourceFile(path=path, kind=_kind(path, format_name)) for path in found)


def _read_info(path: Path) -> Mapping[str, Any]:
    try:
        tree = parse_json(read_text(path, "JSON"))
    except ValueError as error:
        raise ConfigError(Message("data.unreadable-json", path=path, why=error)) from None
    if not isinstance(tree, dict):
        raise ConfigError(Message("data.info-no-object", path=path))
    return tree


# --- hashes ---------------------------------------------------------------------------------------


def hash_files(cache: Path, paths: Iterable[Path]) -> list[str]:
    """The hashes of files, kept in the cache: a file with the same path, size and time is not read again."""
    kept = cache / "hashes.json"
    tree = find_json(kept)
    known: dict[str, list[Any]] = dict(tree) if isinstance(tree, dict) else {}
    found = []
    for path in paths:
        here = path.resolve()
        seen = os.stat(here)
        mark = [seen.st_size, seen.st_mtime_ns]
        if known.get(str(here), [])[:2] != mark:
            digest = hashlib.sha256()
            for block in _blocks(here):
                digest.update(block)
            known[str(here)] = [*mark, digest.hexdigest()]
        found.append(str(known[str(here)][2]))
    if known != tree:
        with suppress(OSError):  # without a place to write, the next start hashes again
            cache.mkdir(parents=True, exist_ok=True)
            replace_file(kept, json.dumps(known).encode())
    return found


def _blocks(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while block := file.read(BLOCK_BYTES):
            yield block


# --- examples as they lie -------------------------------------------------------------------------


def trees_in(file: SourceFile) -> Iterator[tuple[Message, Any]]:
    """Every example of a file with its place: `line 17`, or `example 17` of a list."""
    if file.kind == "array":
        items = enumerate(array_items(file.path), start=1)
        yield from ((Message("data.example", number=number), item) for number, item in items)
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
                why = json_fault(error)
                raise ConfigError(Message("data.line-not-json", number=number, path=file.path, why=why)) from None


def first_layout(file: SourceFile, format_name: str) -> Layout:
    """The layout of a file's first example."""
    for name, tree in trees_in(file):
        try:
            return layout_of(tree, format_name)
        except ExampleError as error:
            problem = message_of(error)
            raise ConfigError(Message("data.bad-example", name=name, path=file.path, problem=problem)) from None
    raise ConfigError(Message("data.empty", path=file.path))


def json_fault(error: ValueError) -> str:
    """What is wrong, without the place within the line."""
    return str(error).partition(": line")[0].lower()


def array_items(path: Path) -> Iterator[Any]:
    """The items of a JSON list, one by one: the file may be larger than the memory."""
    decoder = json.JSONDecoder()
    number, at, step = 0, 1, BLOCK_BYTES // 8
    try:
        with path.open(encoding="utf-8-sig") as file:
            buffer = file.read(step).lstrip()
            if buffer[:1] != "[":
                raise ConfigError(Message("data.not-a-list", path=path))
            while True:
                more = file.read(step)
                buffer, at = buffer[at:] + more, 0
                while True:
                    between = " \t\r\n," if number else " \t\r\n"
                    start = next((i for i in range(at, len(buffer)) if buffer[i] not in between), len(buffer))
                    if buffer[start : start + 1] == "]":
                        return
                    try:
                        item, end = decoder.raw_decode(buffer, start)
                    except ValueError as error:
                        if more and len(buffer) - start < LONGEST_ITEM:
                            break
                        why = json_fault(error)
                        fault = Message("data.example-not-json", number=number + 1, path=path, why=why)
                        raise ConfigError(fault) from None
                    number, at = number + 1, end
                    yield item
                step = max(step, len(buffer) - at)  # an item longer than the buffer: read twice as much
    except UnicodeDecodeError:
        raise not_utf8(path) from None


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
