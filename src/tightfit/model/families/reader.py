"""Typed reading of a config that somebody else wrote.

A Hugging Face `config.json` is a loose bag of JSON. Every value that a family needs goes through one
of these readers, so that a wrong one is named in a sentence and never reaches the arithmetic. The
readers remember which keys were asked for: what a hand-written block of shape fields holds besides
those is a misspelling.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar, cast

from tightfit.inputs.spelling import nearest, shown
from tightfit.messages import Message
from tightfit.types import ModelError

MAX_SIZE = 2**31 - 1
MAX_LAYERS = 10_000
MAX_HEADS = 65_536
MAX_WIDTH = 2**20
MAX_VOCABULARY = 2**24
MAX_PARAMETERS = 100 * 10**12
MOST = {"vocab_size": MAX_VOCABULARY} | dict.fromkeys(
    """hidden_size n_embd n_inner intermediate_size moe_intermediate_size shared_expert_intermediate_size head_dim
    state_size time_step_rank""".split(),
    MAX_WIDTH,
)
"""What no model comes near; the other sizes are held by the parameters that they would give."""

ACTIVATIONS = frozenset(
    "gelu gelu_10 gelu_accurate gelu_fast gelu_new gelu_python gelu_python_tanh gelu_pytorch_tanh hardswish laplace "
    "leaky_relu linear mish quick_gelu relu relu2 relu6 sigmoid silu sqrtsoftplus swish tanh".split()
)
"""The names in transformers' ACT2FN, less `prelu` and `xielu`, which bring parameters of their own."""


Value = TypeVar("Value")


class NotByName(ModelError):
    """A model that may well exist but that no formula here describes; a trace can measure it."""

    def __init__(self, model: str, what: Message) -> None:
        super().__init__(Message("model.about", model=shown(model), problem=Message("model.not-by-name", what=what)))


def did_you_mean(word: object, known: Iterable[str]) -> Message | str:
    """` (did you mean 'X'?)`, or nothing where nothing is close."""
    close = nearest(word, known) if isinstance(word, str) else None
    return Message("model.did-you-mean", close=close) if close else ""


ALIASES: Mapping[str, Mapping[str, str]] = {
    "gpt2": {
        "hidden_size": "n_embd",
        "max_position_embeddings": "n_positions",
        "num_attention_heads": "n_head",
        "num_hidden_layers": "n_layer",
    },
    "mixtral": {"num_experts": "num_local_experts"},
    "qwen3_moe": {"num_local_experts": "num_experts"},
}
"""By `model_type`: names that transformers maps onto the real one. They win, as there."""


class ConfigReader:
    """A config with readers."""

    def __init__(self, config: Mapping[str, object], *, model: str, model_type: str) -> None:
        self.model, self.model_type = model, model_type
        self.aliases = ALIASES.get(model_type, {})
        self.asked: set[str] = set()
        self._values = dict(config)
        for alias, real in self.aliases.items():
            if alias in self._values:
                self._values[real] = self._values[alias]

    def fail(self, problem: str, **fields: object) -> ModelError:
        return ModelError(Message("model.about", model=shown(self.model), problem=Message(problem, **fields)))

    def check_multiple(self, key: str, size: int, other: str, number: int, given: Message | str = "") -> None:
        if size % number:
            raise self.fail("model.not-a-multiple", key=key, size=size, other=other, number=number, given=given)

    def has(self, key: str) -> bool:
        self.asked.add(key)
        return key in self._values

    def is_null(self, key: str) -> bool:
        """Written down as null, which some families read as 'none' and not as 'the default'."""
        return self.has(key) and self._values[key] is None

    def require(self, *keys: str) -> None:
        """Sizes without which there is no model, although transformers would fill in a checkpoint's numbers."""
        for key in keys:
            if not self.has(key) or self._values[key] is None:
                raise self.fail("model.missing-key", key=key, model_type=self.model_type)

    def count(self, key: str, default: int, *, least: int = 1, most: int | None = None) -> int:
        """A whole number; null is read as absent."""
        value: int | None = self._typed(key, int, "model.not-a-whole-number", None)
        most = MOST.get(key, MAX_SIZE) if most is None else most
        if value is None:
            return default
        if value < least:
            raise self.fail("model.too-small", key=key, value=shown(value), least=least)
        if value > most:
            raise self.fail("model.too-large", key=key, value=shown(value), most=most)
        return value

    def optional_count(self, key: str, default: int | None) -> int | None:
        """Like `count`, but null means none."""
        if self.is_null(key) or (default is None and not self.has(key)):
            return None
        return self.count(key, default or 1)

    def number(self, key: str, default: float) -> float:
        """A finite number above zero."""
        value = self._typed(key, int | float, "model.not-a-number", default)
        if not 0 < value <= MAX_SIZE:
            raise self.fail("model.not-positive", key=key, value=shown(value), max_size=MAX_SIZE)
        return float(value)

    def share(self, key: str, default: float) -> float:
        """A number from 0 to 1, such as a dropout's."""
        value = self._typed(key, int | float, "model.not-a-share", default)
        if not 0 <= value <= 1:
            raise self.fail("model.not-a-share", key=key, value=shown(value))
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        return self._typed(key, bool, "model.not-a-switch", default)

    def activation(self, key: str, default: str) -> str:
        value = self._get(key)
        if value is None:
            return default
        if not isinstance(value, str) or value not in ACTIVATIONS:
            hint = did_you_mean(value, ACTIVATIONS)
            raise self.fail("model.unknown-activation", key=key, value=shown(value), hint=hint)
        return value

    def is_word(self, key: str, word: str) -> bool:
        """Whether the value is this very word ('auto', say)."""
        return self._get(key) == word

    def words(self, key: str, length: int) -> list[str] | None:
        """A list of `length` strings, one a layer; None where absent or null."""
        value: Sequence[str] | None = self._typed(key, list | tuple, "model.not-a-list", None)
        if value is None:
            return None
        if len(value) != length:
            raise self.fail("model.entries-for-layers", key=key, entries=len(value), layers=length)
        if not all(isinstance(item, str) for item in value):
            raise self.fail("model.not-words", key=key, value=shown(list(value)))
        return list(value)

    def whole_numbers(self, key: str) -> list[int] | None:
        """A list of non-negative whole numbers; None where absent or null."""
        value: Sequence[int] | None = self._typed(key, list | tuple, "model.not-a-list", None)
        if value is None:
            return None
        if not all(isinstance(item, int) and item >= 0 for item in value):
            raise self.fail("model.not-whole-numbers", key=key, value=shown(list(value)))
        return list(value)

    def section(self, key: str) -> Mapping[str, object] | None:
        """A nested object; None where absent or null."""
        return self._typed(key, Mapping, "model.not-an-object", None)

    def unasked(self) -> list[str]:
        """Keys that no reader wanted."""
        return sorted(str(key) for key in self._values if key not in self.asked and key not in self.aliases)

    def _get(self, key: str) -> object:
        self.asked.add(key)
        return self._values.get(key)

    def _typed(self, key: str, kind: Any, problem: str, default: Value) -> Value:
        """The value if it is of this kind, the default where absent or null; true and false are no numbers."""
        value = self._get(key)
        if value is not None and (not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool)):
            raise self.fail(problem, key=key, value=shown(value))
        return default if value is None else cast(Value, value)
