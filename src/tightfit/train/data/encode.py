"""One example to the tokens of one or more samples, with the part of them that is learned."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from tightfit.train.data.chat import ChatTemplate, Rendered
from tightfit.train.data.layouts import Example
from tightfit.train.data.tokens import Codec

TEXT_BLOCK = 2**16
"""Letters that are given to the tokenizer at a time: its bookkeeping is a hundred times the text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoded:
    """One sample: its tokens, and for each whether the model must write it. The first never counts."""

    ids: npt.NDArray[Any]
    learned: npt.NDArray[np.uint8]
    cut: bool = False
    """It was longer."""

    @property
    def loss_tokens(self) -> int:
        return int(self.learned[1:].sum())


@dataclass(frozen=True, kw_only=True)
class Encoder:
    """What turns examples into samples."""

    codec: Codec
    template: ChatTemplate
    sequence: int
    overlong: Literal["skip", "cut"]

    def samples(self, example: Example) -> list[Encoded]:
        """A text becomes as many samples as it fills; a chat becomes one, or none where it does not fit."""
        if example.text is not None:
            ids = np.concatenate([np.empty(0, dtype=self.codec.dtype), *self.document(example.text)])
            cuts = range(0, len(ids), self.sequence)
            chunks = [_learn_all(ids[at : at + self.sequence]) for at in cuts]
            return [each for each in chunks if each.loss_tokens]
        made = self.chat(self.template.render_pieces(example.turns))
        return [made] if made is not None else []

    def chat(self, rendered: Rendered) -> Encoded | None:
        """A chat within the sequence; None: nothing of it can be learned, or it is too long and not to be cut."""
        made = self.whole(rendered)
        if len(made.ids) > self.sequence:
            if self.overlong == "skip":
                return None
            made = Encoded(ids=made.ids[: self.sequence], learned=made.learned[: self.sequence], cut=True)
        return made if made.loss_tokens else None

    def whole(self, rendered: Rendered) -> Encoded:
        """A chat, however long. A token that reaches back before an answer belongs to the prompt."""
        ids, spans = self.codec.encode_with_spans(rendered.text, rendered.answers)
        learned = np.zeros(len(ids), dtype=np.uint8)
        for first, last in spans:
            learned[first:last] = 1
        learned[:1] = 0
        return Encoded(ids=np.asarray(ids, dtype=self.codec.dtype), learned=learned)

    def document(self, text: str, *, begins: bool = True, ends: bool = True) -> Iterator[npt.NDArray[Any]]:
        """The tokens of a text of any length, block by block; with those of its beginning and its end."""
        codec = self.codec
        if begins and codec.bos_id is not None:
            yield np.asarray([codec.bos_id], dtype=codec.dtype)
        for block in blocks_of(text):
            yield np.asarray(codec.encode(block), dtype=codec.dtype)
        if ends and codec.eos_id is not None:
            yield np.asarray([codec.eos_id], dtype=codec.dtype)


def encoder_of(codec: Codec, sequence: int, overlong: Literal["skip", "cut"]) -> Encoder:
    template = ChatTemplate(source=codec.template, name=codec.template_name, special=tuple(codec.special.items()))
    return Encoder(codec=codec, template=template, sequence=sequence, overlong=overlong)


def blocks_of(text: str) -> list[str]:
    """A text in blocks that end with lines where it has lines: no token may reach over their borders."""
    blocks, at = [], 0
    while len(text) - at > TEXT_BLOCK:
        end = text.rfind("\n", at, at + TEXT_BLOCK) + 1
        if end <= at:
            end = at + TEXT_BLOCK
        blocks.append(text[at:end])
        at = end
    return [*blocks, text[at:]] if at < len(text) else blocks


def _learn_all(ids: npt.NDArray[Any]) -> Encoded:
    learned = np.ones(len(ids), dtype=np.uint8)
    learned[:1] = 0
    return Encoded(ids=ids, learned=learned)
