"""A record of a recipe to one prompt that fits, with its answer.

Room is made for the answer first: how much is left for the prompt depends on the answer and the template alone, never
on the ablation, so that all ablations keep the same answers. Then each section is brought within its own budget, and
while the whole is still too long, the section with the lowest `drop` gives way. A list of lines loses its oldest; a
text loses its end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tightfit.inputs.records import parse_json
from tightfit.messages import Message
from tightfit.train.data.chat import STAND_IN, Rendered, Turn
from tightfit.train.data.encode import Encoded, Encoder
from tightfit.train.data.layouts import ExampleError

TRIES = 24
LAST = 10**9


@dataclass(frozen=True, slots=True, kw_only=True)
class SectionCount:
    """How a section fared, in one example or over many."""

    field: str
    examples: int = 0
    """In which the field holds something."""
    tokens: int = 0
    """Kept, with the section's template."""
    lost: int = 0
    cut: int = 0
    """Examples in which it was shortened."""
    dropped: int = 0
    """Examples in which nothing of it was left."""

    def plus(self, other: SectionCount) -> SectionCount:
        return SectionCount(
            field=self.field,
            examples=self.examples + other.examples,
            tokens=self.tokens + other.tokens,
            lost=self.lost + other.lost,
            cut=self.cut + other.cut,
            dropped=self.dropped + other.dropped,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompted:
    """What became of a record."""

    encoded: Encoded | None
    """None: its answer does not fit."""
    rendered: Rendered | None
    name: str
    target: str
    groups: tuple[int, int]
    sections: tuple[SectionCount, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _PromptPart:
    """A section of one example while it is being shortened."""

    field: str
    role: str
    template: str
    drop: int
    value: str | tuple[str, ...]
    whole_tokens: int
    tokens: int


@dataclass(frozen=True, kw_only=True)
class Prompter:
    """A recipe's sections with what encodes them."""

    sections: tuple[Mapping[str, Any], ...]
    encoder: Encoder

    def prompt(self, record: Mapping[str, Any]) -> Prompted:
        """The prompt and answer of one record."""
        target, cut = self._target(str(record["target"]))
        parts = self._parts(record)
        groups = (int(record["groups"][0]), int(record["groups"][1]))
        name = str(record["name"])
        if target is None:
            return Prompted(encoded=None, rendered=None, name=name, target="", groups=groups, sections=())
        for _ in range(TRIES):
            rendered = self._render(parts, target)
            encoded = self.encoder.whole(rendered)
            excess = len(encoded.ids) - self.encoder.sequence
            if excess <= 0:
                break
            parts = self._shorten(parts, excess)
        else:
            raise ExampleError(Message("data.prompt-too-long"))
        return Prompted(
            encoded=replace(encoded, cut=cut) if encoded.loss_tokens else None,
            rendered=rendered,
            name=name,
            target=target,
            groups=groups,
            sections=tuple(_count(part) for part in parts if part.whole_tokens),
        )

    def _target(self, target: str) -> tuple[str | None, bool]:
        """The answer, cut where even the emptiest prompt leaves no room for all of it; None: leave the example out."""
        least = len(self.encoder.whole(self._render((), target)).ids)
        if least <= self.encoder.sequence:
            return target, False
        ids, places = self.encoder.codec.encode_with_places(target)
        keep = len(ids) - (least - self.encoder.sequence)
        if self.encoder.overlong == "skip" or keep < 1:
            return None, False
        for count in range(keep, max(0, keep - 8), -1):  # a cut can split a word into more tokens than it was
            shorter = target[: places[count][0]]
            if shorter and len(self.encoder.whole(self._render((), shorter)).ids) <= self.encoder.sequence:
                return shorter, True
        return None, False

    def _parts(self, record: Mapping[str, Any]) -> tuple[_PromptPart, ...]:
        made = []
        for order, section in enumerate(self.sections):
            value = record["fields"].get(section["field"])
            names = {"{speaker}": str(record["speaker"]), "{partner}": str(record["partner"])}
            template = str(section["template"])
            for mark, name in names.items():
                template = template.replace(mark, name)
            part = _PromptPart(
                field=section["field"],
                role=section["role"],
                template=template,
                # What has no number goes after all that have, the last first.
                drop=section["drop"] or LAST - order,
                value=tuple(value) if isinstance(value, list) else str(value or ""),
                whole_tokens=0,
                tokens=0,
            )
            tokens = self._tokens(part)
            part = replace(part, whole_tokens=tokens, tokens=tokens)
            budget = section["budget_tokens"]
            made.append(self._within(part, budget) if budget is not None and tokens > budget else part)
        return tuple(made)

    def _shorten(self, parts: Sequence[_PromptPart], excess: int) -> tuple[_PromptPart, ...]:
        made = list(parts)
        for at in sorted(range(len(made)), key=lambda at: made[at].drop):
            if excess <= 0:
                break
            before = made[at].tokens
            if before:
                made[at] = self._within(made[at], max(0, before - excess))
                excess -= before - made[at].tokens
        return tuple(made)

    def _within(self, part: _PromptPart, budget: int) -> _PromptPart:
        """As much of a section as fits into `budget` tokens, its template included."""
        while part.value and part.tokens > budget:
            over = part.tokens - budget
            value = (
                self._fewer_lines(part.value, over) if isinstance(part.value, tuple) else self._less(part.value, over)
            )
            part = replace(part, value=value)
            part = replace(part, tokens=self._tokens(part))
        return part

    def _fewer_lines(self, lines: tuple[str, ...], over: int) -> tuple[str, ...]:
        at = 0
        while at < len(lines) and over > 0:
            over -= self.encoder.codec.count(lines[at])
            at += 1
        return lines[max(1, at) :]

    def _less(self, text: str, over: int) -> str:
        """Up to where the first token to go begins: a letter may be several tokens, and goes as a whole."""
        _, places = self.encoder.codec.encode_with_places(text)
        return text[: places[-over][0]].rstrip() if over < len(places) else ""

    def _tokens(self, part: _PromptPart) -> int:
        return self.encoder.codec.count(_section_text(part))

    def _render(self, parts: Sequence[_PromptPart], target: str) -> Rendered:
        texts = {
            role: [_section_text(part) for part in parts if part.role == role and part.value]
            for role in ("system", "user")
        }
        turns = [Turn("system", "\n\n".join(texts["system"]))] if texts["system"] else []
        turns += [Turn("user", "\n\n".join(texts["user"]) or STAND_IN), Turn("assistant", target)]
        return self.encoder.template.render_pieces(turns, last_only=True)


def prompter_of(recipe: str, encoder: Encoder) -> Prompter:
    return Prompter(sections=tuple(parse_json(recipe)["sections"]), encoder=encoder)


def _section_text(part: _PromptPart) -> str:
    if not part.value:
        return ""
    text = "\n".join(part.value) if isinstance(part.value, tuple) else part.value
    return part.template.replace("{text}", text)


def _count(part: _PromptPart) -> SectionCount:
    lost = part.whole_tokens - part.tokens
    return SectionCount(
        field=part.field,
        examples=1,
        tokens=part.tokens,
        lost=max(0, lost),
        cut=int(lost > 0 and part.tokens > 0),
        dropped=int(part.tokens == 0),
    )
