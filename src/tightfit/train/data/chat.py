"""Chats to text, and which of the text is an answer; and chat templates by name, for tokenizers that have none.

A chat template is a program that may do anything: fold the system turn into the user's, refuse two turns of one role,
drop the thoughts of earlier answers, add an empty thought to the last. So the answers are not searched for by their
markers. The template is asked: what it prints for the turns before an answer, with the prompt to answer, is what the
model will be given; what it prints beyond that, up to the end of the turn, is what the model must write. Both must be
found in the rendered whole, or the template cannot be trained with and we say so. Templates that mark their answers
themselves (`{% generation %}`) are believed.

Rendering is Hugging Face's in all that matters (a sandbox, trimmed blocks, `raise_exception`, `tojson`), but for the
date: a template that asks for today's would give other tokens every day, so it gets a fixed one.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tightfit.inputs.spelling import nearest, read_text
from tightfit.messages import Message, Said, text
from tightfit.types import ConfigError

OPEN, CLOSE = "\ue0f0", "\ue0f1"
"""Private characters around what a template marks as generated. They never reach the tokenizer."""

STAND_IN = "…"  # a user's turn where a template wants one and the chat has none
DATE = "26 Jul 2024"

REFUSALS = (TemplateError, TypeError, ValueError, KeyError, IndexError)
"""What a template raises that does not take some turns."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of a chat."""

    role: str
    content: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendered:
    """A chat as text."""

    text: str
    answers: tuple[tuple[int, int], ...]  # from where to where the model must write


class _Generation(Extension):
    """`{% generation %}` … `{% endgeneration %}`."""

    tags = {"generation"}  # noqa: RUF012 (jinja2's own interface)

    def parse(self, parser: Any) -> Any:
        line = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

    def _mark(self, caller: Any) -> str:
        return f"{OPEN}{caller()}{CLOSE}"


@dataclass(frozen=True, kw_only=True)
class ChatTemplate:
    """A compiled template that knows its own limits."""

    source: str
    name: Said
    special: tuple[tuple[str, str], ...]

    @cached_property
    def compiled(self) -> Any:
        def tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **more: Any) -> str:
            return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **more)

        def refuse(message: str) -> None:
            raise TemplateError(message)

        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = tojson
        environment.globals["raise_exception"] = refuse
        if "strftime_now is defined" not in self.source:
            environment.globals["strftime_now"] = lambda form: DATE
        try:
            return environment.from_string(self.source)
        except TemplateError as error:
            raise ConfigError(Message("data.template-invalid", name=self.name, why=error)) from None

    def render(self, turns: Sequence[Turn], *, prompt: bool = False) -> str:
        """The text, with marks where the template has them. Raises jinja2's error where it refuses."""
        messages = [{"role": turn.role, "content": turn.content} for turn in turns]
        values = {"bos_token": "", "eos_token": "", **dict(self.special), "add_generation_prompt": prompt}
        return str(self.compiled.render(messages=messages, tools=None, documents=None, **values))

    @cached_property
    def takes_system(self) -> bool:
        return self._shows(Turn("system", "s-y-s"), Turn("user", "u-s-r"), Turn("assistant", "a-n-s"))

    @cached_property
    def takes_answer_first(self) -> bool:
        return self._shows(Turn("assistant", "a-n-s"), Turn("user", "u-s-r"), Turn("assistant", "a-g-n"))

    @cached_property
    def takes_repeats(self) -> bool:
        users = Turn("user", "u-s-r"), Turn("user", "v-s-r")
        return self._shows(*users, Turn("assistant", "a-n-s"), Turn("assistant", "b-n-s"))

    def _shows(self, *turns: Turn) -> bool:
        """Whether it accepts these turns and leaves none out."""
        try:
            text = self.render(turns)
        except REFUSALS:
            return False
        return all(turn.content in text for turn in turns)

    def arrange(self, turns: Sequence[Turn]) -> tuple[Turn, ...]:
        """The same chat in a form that the template takes; what follows the last answer is left out."""
        last = max((at for at, turn in enumerate(turns) if turn.role == "assistant"), default=-1)
        made = list(turns[: last + 1])
        if not self.takes_system:  # then it becomes the beginning of the user's turn that follows
            made, waiting = [], ""
            for turn in turns[: last + 1]:
                if turn.role == "system":
                    waiting = f"{waiting}\n\n{turn.content}".strip()
                    continue
                if waiting and turn.role == "user":
                    made.append(Turn("user", f"{waiting}\n\n{turn.content}".strip()))
                else:
                    made += [Turn("user", waiting), turn] if waiting else [turn]
                waiting = ""
        first = 1 if made and made[0].role == "system" else 0
        if made and made[first].role == "assistant" and not self.takes_answer_first:
            made.insert(first, Turn("user", STAND_IN))
        if self.takes_repeats:
            return tuple(made)
        neighbours = groupby(made, key=lambda turn: turn.role)
        return tuple(Turn(role, "\n".join(turn.content for turn in same)) for role, same in neighbours)

    def render_pieces(self, turns: Sequence[Turn], *, last_only: bool = False) -> Rendered:
        """The chat as text with its answers, of which `last_only` keeps one."""
        turns = tuple(
            replace(turn, content=turn.content.replace(OPEN, "").replace(CLOSE, "")) for turn in self.arrange(turns)
        )
        try:
            whole = self.render(turns)
            if OPEN in whole:
                text, answers = "", []
                for part in whole.split(OPEN):
                    inside, mark, after = part.partition(CLOSE)
                    if mark:
                        answers.append((len(text), len(text) + len(inside)))
                    text += inside + after
            else:
                text = whole
                answers = [self._answer(text, turns, at) for at, turn in enumerate(turns) if turn.role == "assistant"]
        except REFUSALS as error:
            raise ConfigError(Message("data.template-refuses", name=self.name, why=error)) from None
        return Rendered(text=text, answers=tuple(answers[-1:] if last_only else answers))

    def _answer(self, text: str, turns: Sequence[Turn], at: int) -> tuple[int, int]:
        """From the end of the prompt to the end of the turn."""
        before = self.render(turns[:at], prompt=True)
        content = turns[at].content.strip()
        shown = content if content in text[len(before) :] else content.rpartition("</think>")[2].strip()
        found = text.find(shown, len(before))
        if not text.startswith(before) or found < 0:
            raise ConfigError(Message("data.template-rewrites", name=self.name))
        alone = self.render(turns[: at + 1])
        if text.startswith(alone):
            end = len(alone)
        else:  # a last turn may be dressed otherwise than an earlier one: only its closing marks are common
            end = found + len(shown)
            closing = alone[alone.rfind(shown) + len(shown) :]
            end += len(closing) if text.startswith(closing, end) else 0
        # Line ends after the closing mark belong to the layout; those of an answer without one are no loss.
        return len(before), len(before) + len(text[len(before) : end].rstrip())


SHIPPED = Path(__file__).parent / "shipped"

TEMPLATES = {
    name: (SHIPPED / "templates" / f"{name}.jinja").read_text(encoding="utf-8")
    for name in ("chatml", "llama3", "gemma", "alpaca", "plain")
}

OTHER_NAMES = {"qwen": "chatml", "gemma2": "gemma", "gemma3": "gemma", "llama-3": "llama3", "default": "plain"}
"""What LLaMA-Factory calls the same turns."""

FALLBACK = "plain"


def choose_template(asked: str | None, own: str | None) -> tuple[Said, str, tuple[Message, ...]]:
    """Name and source of the template asked for, else of the tokenizer's own, else of a simple one; and why so."""
    if asked is None:
        if own:
            return Message("data.own-template"), own, ()
        return FALLBACK, TEMPLATES[FALLBACK], (Message("data.fallback-template", fallback=FALLBACK),)
    name = OTHER_NAMES.get(asked.lower(), asked.lower())
    if name in TEMPLATES:
        return name, TEMPLATES[name], ()
    path = Path(asked).expanduser()
    if path.is_file():
        return path.name, read_text(path, text("data.jinja-template")), ()
    known = ", ".join(TEMPLATES)
    if path.suffix in (".jinja", ".j2") or "/" in asked:
        raise ConfigError(Message("data.no-template-file", asked=asked, known=known))
    hint = hint_at(asked, TEMPLATES, Message("data.known-templates", known=known))
    raise ConfigError(Message("data.no-template", asked=asked, hint=hint))


def hint_at(word: str, known: Collection[str], otherwise: Message) -> Message:
    """Which known word was probably meant; where none is close, `otherwise`."""
    close = nearest(word, known)
    return Message("data.did-you-mean", close=close) if close else otherwise
