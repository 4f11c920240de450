"""The pieces that the families share: named tensors of linear layers and norms, and the whole model.

Order matters here. ZeRO partitions and FSDP groups follow `model.named_parameters()`, so every list of
tensors stands in the order in which transformers registers them: a module's own parameters come before
those of its children, children in the order of their assignment.
"""

from __future__ import annotations

from collections.abc import Sequence

from tightfit.model.families.reader import MAX_LAYERS, ConfigReader
from tightfit.types import Block, ModelShape, NormKind, Tensor


def linear(name: str, out_features: int, in_features: int, *, bias: bool = False) -> list[Tensor]:
    """torch's nn.Linear: the weight is (out, in)."""
    tensors = [Tensor(f"{name}.weight", (out_features, in_features))]
    return [*tensors, Tensor(f"{name}.bias", (out_features,))] if bias else tensors


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


LLAMA_NAMES = ("model.embed_tokens.weight", "model.layers.{i}.", "model.norm")
"""Of the embedding, the layers and the final norm."""


def assemble(
    config: ConfigReader,
    layers: Sequence[Block],
    *,
    hidden: int,
    vocab: int,
    tied: bool,
    positions: int | None,
    names: tuple[str, str, str] = LLAMA_NAMES,
) -> ModelShape:
    """The model of these layers, bottom to top, between its embedding and its head.

    `vocab` and `tied` are what the family takes where the config does not say.
    """
    vocab, tied = config.count("vocab_size", vocab), config.flag("tie_word_embeddings", tied)
    embedding, prefix, final_norm = names
    blocks = tuple(dict.fromkeys(layers))
    head = [] if tied else [Tensor("lm_head.weight", (vocab, hidden))]
    return ModelShape(
        name=config.model,
        model_type=config.model_type,
        hidden_size=hidden,
        vocab_size=vocab,
        blocks=blocks,
        pattern=tuple(map(blocks.index, layers)),
        layer_prefix=prefix,
        before=(Tensor(embedding, (vocab, hidden)),),
        after=(*norm(final_norm, hidden, blocks[0].norm), *head),
        tied=tied,
        final_norm=blocks[0].norm,
        max_positions=positions,
    )
