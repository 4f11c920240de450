"""Tokenizers: loading one, the byte-level one that ships, and what turns an example into the tokens of samples.

A build runs in several processes, and none of them should load transformers (and with it, sooner or later, torch) to
turn text into numbers. `Codec` is what they get instead: the tokenizer's own JSON for the Rust library that does the
work anyway, its special tokens and the chat template. It is plain text, and travels as such.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from tightfit.messages import Message, Said
from tightfit.train.data.chat import TEMPLATES, ChatTemplate, Rendered, choose_template
from tightfit.train.data.examples import Example
from tightfit.types import ConfigError, ModelError

END, PAD, TURN_START, TURN_END = "<|end|>", "<|pad|>", "<|im_start|>", "<|im_end|>"
SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


@dataclass(frozen=True, kw_only=True)
class Codec:
    """Text to tokens and back, without transformers."""

    tokenizer_json: str
    special: Mapping[str, str]  # `eos_token` … → its text, as chat templates want them
    template: str  # the chat template's Jinja source
    template_name: Said
    bos_id: int | None  # set where the tokenizer itself puts one before a text
    eos_id: int | None
    said: tuple[Said, ...] = ()  # what was chosen for the user, a sentence each

    @cached_property
    def backend(self) -> Any:
        from tokenizers import Tokenizer

        made = Tokenizer.from_str(self.tokenizer_json)
        made.no_truncation()  # some tokenizers ship with a limit set
        made.no_padding()
        return made

    @cached_property
    def vocabulary(self) -> int:
        return int(max(self.backend.get_vocab(with_added_tokens=True).values())) + 1

    @property
    def dtype(self) -> np.dtype[Any]:
        """The narrowest numbers that hold every token."""
        return np.dtype("<u2") if self.vocabulary <= 2**16 else np.dtype("<u4")

    @cached_property
    def digest(self) -> str:
        """Of everything that changes tokens."""
        parts = json.dumps([self.tokenizer_json, dict(self.special), self.template, self.bos_id, self.eos_id])
        return hashlib.sha256(parts.encode()).hexdigest()

    def encode(self, text: str) -> list[int]:
        """The tokens of a text, without any that the tokenizer would add around it."""
        return list(self._plain(text).ids)

    def encode_with_places(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """The same, and where in the text each token comes from."""
        made = self.backend.encode(text, add_special_tokens=False)
        return list(made.ids), list(made.offsets)

    def count(self, text: str) -> int:
        return len(self._plain(text)) if text else 0

    def encode_with_spans(self, text: str, spans: Sequence[tuple[int, int]]) -> tuple[list[int], list[tuple[int, int]]]:
        """The same, and for each part of the text the tokens that lie wholly within it."""
        made = self.backend.encode(text, add_special_tokens=False)

        def token_at(place: int) -> int:
            found = (made.char_to_token(at) for at in range(place, len(text)))  # blanks may have no token
            return next((token for token in found if token is not None), len(made.ids))

        within = []
        for first, last in spans:
            start = token_at(first)
            if start < len(made.ids) and made.token_to_chars(start)[0] < first:
                start += 1
            within.append((start, max(start, token_at(last))))
        return list(made.ids), within

    def _plain(self, text: str) -> Any:
        """Without places in the text, which take half of the time."""
        return self.backend.encode_batch_fast([text], add_special_tokens=False)[0]

    def decode(self, ids: Any) -> str:
        return str(self.backend.decode([int(each) for each in ids], skip_special_tokens=False))


def codec_of(tokenizer: Any, template: str | None) -> Codec:
    """What a build needs of a transformers tokenizer. `template`: a name, a file, or None for the tokenizer's own."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise ConfigError(Message("data.not-fast", tokenizer=tokenizer.name_or_path or type(tokenizer).__name__))
    special = {name: str(value) for name in SPECIAL if (value := getattr(tokenizer, name, None)) is not None}
    # Some tokenizers have several templates by name; `default` is for plain chat.
    own = tokenizer.chat_template
    name, source, said = choose_template(template, own.get("default") if isinstance(own, dict) else own)
    bos = tokenizer.bos_token_id
    return Codec(
        tokenizer_json=backend.to_str(),
        special=special,
        template=source,
        template_name=name,
        bos_id=bos if bos is not None and tokenizer("a")["input_ids"][:1] == [bos] else None,
        eos_id=tokenizer.eos_token_id,
        said=said,
    )


def load_tokenizer(source: str | None, vocab_size: int, *, trust_remote_code: bool) -> Any:
    """A fast tokenizer whose tokens the model knows. `source`: a folder or a name; None: the shipped byte-level one."""
    if source is None:
        tokenizer = byte_tokenizer()
        name = Message("data.byte-tokenizer")
    else:
        from transformers import AutoTokenizer

        try:
            tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=trust_remote_code)
        except (OSError, ValueError, KeyError, TypeError, ImportError) as error:
            reason = " ".join(str(error).split())[:200].rstrip(".")
            raise ModelError(Message("data.no-tokenizer", source=source, why=reason)) from None
        if not getattr(tokenizer, "is_fast", False):
            raise ConfigError(Message("data.tokenizer-not-fast", source=source))
        name = Message("data.tokenizer-of", source=source)
    largest = max(len(tokenizer), 1 + max(tokenizer.get_vocab().values(), default=0))
    if largest > vocab_size:
        raise ConfigError(Message("data.vocabulary-too-small", tokenizer=name, tokens=largest, vocab_size=vocab_size))
    return tokenizer


def pad_id(tokenizer: Any) -> int:
    """What rows are filled up with. Its labels never count, so any token will do."""
    known = (tokenizer.pad_token_id, tokenizer.eos_token_id)
    return int(next((token for token in known if token is not None), 0))


def byte_tokenizer() -> Any:
    """One token a byte: for models made from scratch that have no tokenizer of their own."""
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    fast: Any = transformers.PreTrainedTokenizerFast  # untyped
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    made = fast(
        tokenizer_object=backend,
        eos_token=END,
        pad_token=PAD,
        extra_special_tokens=[TURN_START, TURN_END],
        clean_up_tokenization_spaces=False,
    )
    made.chat_template = TEMPLATES["chatml"]
    return made


TEXT_BLOCK = 2**16  # letters that are given to the tokenizer at a time: its bookkeeping is a hundred times the text


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoded:
    """One sample: its tokens, and for each whether the model must write it. The first never counts."""

    ids: npt.NDArray[Any]
    learned: npt.NDArray[np.uint8]
    cut: bool = False  # it was longer

    @property
    def loss_tokens(self) -> int:
        return int(self.learned[1:].sum())


@dataclass(frozen=True)
class Encoder:
    """What turns examples into samples."""

    codec: Codec
    sequence: int
    overlong: Literal["skip", "cut"]

    @cached_property
    def template(self) -> ChatTemplate:
        codec = self.codec
        return ChatTemplate(source=codec.template, name=codec.template_name, special=tuple(codec.special.items()))

    def samples(self, example: Example) -> list[Encoded]:
        """A text becomes as many samples as it fills; a chat becomes one, or none where it does not fit."""
        if isinstance(example, str):
            ids = np.concatenate([np.empty(0, dtype=self.codec.dtype), *self.document(example)])
            rows = (ids[at : at + self.sequence] for at in range(0, len(ids), self.sequence))
            return [
                Encoded(ids=row, learned=(np.arange(len(row)) > 0).astype(np.uint8)) for row in rows if len(row) > 1
            ]
        made = self.chat(self.template.render_pieces(example))
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
        at = 0
        while at < len(text):  # in blocks that end with lines where there are any: no token may reach over a border
            end = min(at + TEXT_BLOCK, len(text))
            if end < len(text):
                end = text.rfind("\n", at, end) + 1 or end
            yield np.asarray(codec.encode(text[at:end]), dtype=codec.dtype)
            at = end
        if ends and codec.eos_id is not None:
            yield np.asarray([codec.eos_id], dtype=codec.dtype)
