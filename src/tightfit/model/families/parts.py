"""The pieces that the families share: named tensors of linear layers and norms, heads, and the whole model.

Order matters here. ZeRO partitions and FSDP groups follow `model.named_parameters()`, so every list of
tensors stands in the order in which transformers registers them: a module's own parameters come before
those of its children, children in the order of their assignment.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from tightfit.messages import Message
from tightfit.model.families.reader import MAX_HEADS, MAX_LAYERS, ConfigReader
from tightfit.types import Block, ModelShape, NormKind, Tensor

Key = TypeVar("Key", bound=Hashable)

FULL = "full_attention"
SLIDING = "sliding_attention"


def linear(name: str, out_features: int, in_features: int, *, bias: bool = False) -> list[Tensor]:
    """torch's nn.Linear: the weight is (out, in)."""
    tensors = [Tensor(f"{name}.weight", (out_features, in_features))]
    return [*tensors, Tensor(f"{name}.bias", (out_features,))] if bias else tensors


def conv1d_linear(name: str, in_features: int, out_features: int) -> list[Tensor]:
    """transformers' Conv1D, gpt2's linear layer: the weight is (in, out), the bias is always there."""
    return [Tensor(f"{name}.weight", (in_features, out_features)), Tensor(f"{name}.bias", (out_features,))]


def norm(name: str, width: int, kind: NormKind) -> list[Tensor]:
    """Only torch's LayerNorm has a bias."""
    tensors = [Tensor(f"{name}.weight", (width,))]
    return [*tensors, Tensor(f"{name}.bias", (width,))] if kind == "layer" else tensors


@dataclass(frozen=True, slots=True)
class Heads:
    """How the attention is cut."""

    heads: int
    kv_heads: int
    head_dim: int

    @property
    def q_width(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        return self.kv_heads * self.head_dim


def read_layers(config: ConfigReader, default: int) -> int:
    return config.count("num_hidden_layers", default, most=MAX_LAYERS)


def read_heads(  # the seven things that families do differently about the same three numbers
    config: ConfigReader,
    hidden: int,
    *,
    heads_default: int,
    kv_default: int | None,
    head_dim_default: int | None,
    head_dim_readable: bool = True,
    must_divide: bool = False,
) -> Heads:
    """Heads, key/value heads and head width. A `kv_default` or `head_dim_default` of None: derived."""
    heads = config.count("num_attention_heads", heads_default, most=MAX_HEADS)
    # Absent is transformers' default of this family; null is 'as many as heads'.
    kv_heads = config.optional_count("num_key_value_heads", kv_default) or heads
    head_dim = config.optional_count("head_dim", head_dim_default) if head_dim_readable else None
    if head_dim is None or must_divide:
        config.check_multiple("hidden_size", hidden, "num_attention_heads", heads)
    given = "" if config.has("num_key_value_heads") else Message("model.default-kv", model_type=config.model_type)
    config.check_multiple("num_attention_heads", heads, "num_key_value_heads", kv_heads, given)
    return Heads(heads, kv_heads, head_dim or hidden // heads)


def rotary_width(config: ConfigReader, head_dim: int, key: str, default: float) -> int | None:
    """The rotated part of a head, None for all of it; the new `rope_parameters` win over the old top-level key."""
    fraction = config.number(key, default)
    for section in ("rope_parameters", "rope_scaling"):
        nested = config.section(section)
        if nested is not None and nested.get("partial_rotary_factor") is not None:
            inner = ConfigReader(nested, model=config.model, model_type=config.model_type)
            fraction = inner.number("partial_rotary_factor", default)
            break
    if fraction > 1:
        raise config.fail("model.rotates-too-much", key=key, fraction=fraction)
    width = int(head_dim * fraction)
    return None if width == head_dim else width


def layer_kinds(keys: Sequence[Key], make: Callable[[Key], Block]) -> tuple[tuple[Block, ...], tuple[int, ...]]:
    """`blocks` and `pattern` from what distinguishes each layer, bottom to top."""
    index: dict[Key, int] = {}
    pattern = tuple(index.setdefault(key, len(index)) for key in keys)
    return tuple(make(key) for key in index), pattern


@dataclass(frozen=True, slots=True, kw_only=True)
class Skeleton:
    """Where a family keeps its embedding, layers, final norm and head."""

    embedding: str = "model.embed_tokens.weight"
    layers: str = "model.layers.{i}."
    final_norm: str = "model.norm"
    head: str = "lm_head.weight"

    def assemble(  # what is left when names are known; one call a family
        self,
        config: ConfigReader,
        *,
        hidden: int,
        vocab: int,
        kinds: tuple[tuple[Block, ...], tuple[int, ...]],
        tied: bool,
        positions: int | None,
        final: NormKind,
    ) -> ModelShape:
        head = [] if tied else [Tensor(self.head, (vocab, hidden))]
        return ModelShape(
            name=config.model,
            model_type=config.model_type,
            hidden_size=hidden,
            vocab_size=vocab,
            blocks=kinds[0],
            pattern=kinds[1],
            layer_prefix=self.layers,
            before=(Tensor(self.embedding, (vocab, hidden)),),
            after=(*norm(self.final_norm, hidden, final), *head),
            tied=tied,
            final_norm=final,
            max_positions=positions,
        )
