"""The pieces that the families share: named tensors of linear layers and norms, and the whole model.

Order matters here. ZeRO partitions and FSDP groups follow `model.named_parameters()`, so every list of
tensors stands in the order in which transformers registers them: a module's own parameters come before
those of its children, children in the order of their assignment.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from tightfit.model.families.reader import MAX_LAYERS, ConfigReader
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


def read_layers(config: ConfigReader, default: int) -> int:
    return config.count("num_hidden_layers", default, most=MAX_LAYERS)


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
