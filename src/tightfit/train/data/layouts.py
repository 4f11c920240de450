"""How one example is laid out in a file, and what it becomes: a text, or the turns of a chat.

`text`, `alpaca`, `sharegpt` and `messages` are the layouts that people have. Which keys hold what is a value
(`Layout`), since an entry of LLaMA-Factory's `dataset_info.json` may rename every one of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from tightfit.inputs.spelling import shown
from tightfit.messages import Message
from tightfit.train.data.chat import Turn
from tightfit.types import ConfigError

Kind = Literal["text", "alpaca", "sharegpt", "recipe"]

ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "model": "assistant",
    "function_call": "assistant",
    "system": "system",
    "developer": "system",
    "observation": "user",
    "tool": "user",
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """What one example is to be trained on as: one of the two is set."""

    text: str | None = None
    turns: tuple[Turn, ...] = ()


def layout_of(tree: Any, format_name: str) -> Layout:
    """The layout of a file, told from its first example unless the format was named."""
    if not isinstance(tree, Mapping):
        raise ExampleError(Message("data.no-object", found=shown(tree)))
    if format_name != "auto":
        layout = BY_FORMAT[format_name]
        return _turns_as_they_are(tree, layout) if layout.kind == "sharegpt" else layout
    if "messages" in tree or "conversations" in tree:
        return _turns_as_they_are(tree, MESSAGES if "messages" in tree else SHAREGPT)
    if "instruction" in tree:
        return ALPACA
    if "text" in tree:
        return TEXT
    raise ExampleError(Message("data.unknown-fields", fields=", ".join(map(str, list(tree)[:8])) or "(none)"))


def _turns_as_they_are(tree: Mapping[str, Any], layout: Layout) -> Layout:
    """Files mix the two: `conversations` of role and content are common."""
    key = next((key for key in (layout.turns, "messages", "conversations") if key in tree), layout.turns)
    turns = tree.get(key)
    first = turns[0] if isinstance(turns, list) and turns and isinstance(turns[0], Mapping) else {}
    if "role" in first and "content" in first:
        return replace(layout, turns=key, role="role", content="content")
    if "from" in first and "value" in first:
        return replace(layout, turns=key, role="from", content="value")
    return replace(layout, turns=key)


def example_of(tree: Any, layout: Layout) -> Example:
    """One example, or an `ExampleError` that says what it lacks."""
    if not isinstance(tree, Mapping):
        raise ExampleError(Message("data.no-object", found=shown(tree)))
    if layout.kind == "text":
        assert layout.prompt is not None
        return Example(text=_text(tree, layout.prompt))
    turns = _alpaca(tree, layout) if layout.kind == "alpaca" else _conversation(tree, layout)
    if not any(turn.role == "assistant" for turn in turns):
        raise ExampleError(Message("data.no-assistant-turn"))
    return Example(turns=turns)


def _alpaca(tree: Mapping[str, Any], layout: Layout) -> tuple[Turn, ...]:
    made = [Turn("system", text)] if (text := _optional(tree, layout.system)) else []
    for pair in (tree.get(layout.history) or []) if layout.history else []:
        if not isinstance(pair, list | tuple) or len(pair) != 2 or not all(isinstance(each, str) for each in pair):
            raise ExampleError(Message("data.history-no-pairs", history=layout.history))
        made += [Turn("user", pair[0]), Turn("assistant", pair[1])]
    assert layout.prompt is not None
    assert layout.response is not None
    asked = [_text(tree, layout.prompt), _optional(tree, layout.query)]
    made.append(Turn("user", "\n".join(part for part in asked if part)))
    made.append(Turn("assistant", _text(tree, layout.response)))
    return tuple(made)


def _conversation(tree: Mapping[str, Any], layout: Layout) -> tuple[Turn, ...]:
    turns = tree.get(layout.turns)
    if not isinstance(turns, list) or not turns:
        raise ExampleError(Message("data.no-turns", turns=layout.turns))
    roles = dict(layout.roles)
    made = [Turn("system", text)] if (text := _optional(tree, layout.system)) else []
    for number, turn in enumerate(turns, start=1):
        if not isinstance(turn, Mapping):
            raise ExampleError(
                Message(
                    "data.turn-no-object", turn=shown(turn), number=number, role=layout.role, content=layout.content
                )
            )
        role = turn.get(layout.role)
        if not isinstance(role, str) or role not in roles:
            raise ExampleError(
                Message("data.unknown-role", found=shown(role), key=layout.role, number=number, roles=", ".join(roles))
            )
        made.append(Turn(roles[role], _content(turn, layout.content, number)))
    return tuple(made)


def _content(turn: Mapping[str, Any], key: str, number: int) -> str:
    """A turn's text; parts of type text, as some files have them, are joined."""
    value = turn.get(key)
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(isinstance(part, Mapping) and part.get("type") == "text" for part in value):
        return "".join(str(part.get("text", "")) for part in value)
    raise ExampleError(Message("data.turn-no-text", key=key, number=number))


def _text(tree: Mapping[str, Any], key: str) -> str:
    value = tree.get(key)
    if not isinstance(value, str):
        if value is None:
            raise ExampleError(Message("data.no-text", key=key))
        raise ExampleError(Message("data.field-no-text", value=shown(value), key=key))
    return value


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
        return replace(
            ALPACA,
            prompt=columns.get("prompt"),
            query=columns.get("query"),
            response=columns.get("response"),
            history=columns.get("history"),
            system=columns.get("system"),
        )
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
