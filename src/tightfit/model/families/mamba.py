"""Mamba, FalconMamba and Mamba-2: a norm, a state-space mixer, a residual; no attention, no MLP.

A mixer's bare parameters (A_log, D, dt_bias) come before those of its submodules, whatever the order in
which the source assigns them.
"""

from __future__ import annotations

from math import ceil

from tightfit.model.families.parts import assemble, linear, norm, read_layers
from tightfit.model.families.reader import MAX_HEADS, MAX_SIZE, ConfigReader
from tightfit.types import Block, Mamba1, Mamba2, ModelShape, Tensor


def shape(config: ConfigReader) -> ModelShape:
    """mamba and falcon_mamba."""
    config.require("hidden_size", "num_hidden_layers", "vocab_size")
    hidden = config.count("hidden_size", 768)
    # transformers computes it from `expand`, then lets a written `intermediate_size` overrule the product
    expanded = int(config.number("expand", 2) * hidden)
    if not 1 <= expanded <= MAX_SIZE:
        raise config.fail("model.implausible-width", expanded=expanded)
    inner = config.count("intermediate_size", expanded)
    state = config.count("state_size", 16)
    # A file may say "auto", which is also the default.
    dt_rank = ceil(hidden / 16) if config.is_word("time_step_rank", "auto") else None
    dt_rank = dt_rank or config.count("time_step_rank", ceil(hidden / 16))
    conv = config.count("conv_kernel", 4)
    bias = config.flag("use_bias", False)
    tensors = [
        Tensor("mixer.A_log", (inner, state)),
        Tensor("mixer.D", (inner,)),
        *_convolution(config, inner, conv),
        *linear("mixer.in_proj", 2 * inner, hidden, bias=bias),
        *linear("mixer.x_proj", dt_rank + 2 * state, inner),
        *linear("mixer.dt_proj", inner, dt_rank, bias=True),
        *linear("mixer.out_proj", hidden, inner, bias=bias),
    ]
    normed = config.model_type == "falcon_mamba"
    mixer = Mamba1(inner=inner, state=state, conv=conv, dt_rank=dt_rank, normed_bcdt=normed)
    return _assemble(config, hidden, mixer, tensors, tied=True)


def shape2(config: ConfigReader) -> ModelShape:
    """mamba2."""
    config.require("hidden_size", "num_hidden_layers", "vocab_size")
    hidden = config.count("hidden_size", 4096)
    inner = int(config.number("expand", 2) * hidden)
    state = config.count("state_size", 128)
    heads = config.count("num_heads", 128, most=MAX_HEADS)
    head_dim = config.count("head_dim", 64)
    groups = config.count("n_groups", 8)
    conv = config.count("conv_kernel", 4)
    bias = config.flag("use_bias", False)
    if heads * head_dim != inner:
        raise config.fail("model.heads-do-not-fill-width", heads=heads, head_dim=head_dim, inner=inner)
    config.check_multiple("num_heads", heads, "n_groups", groups)
    channels = inner + 2 * groups * state
    tensors = [
        Tensor("mixer.dt_bias", (heads,)),
        Tensor("mixer.A_log", (heads,)),
        Tensor("mixer.D", (heads,)),
        *_convolution(config, channels, conv),
        *linear("mixer.in_proj", inner + channels + heads, hidden, bias=bias),
        *norm("mixer.norm", inner, "rms"),
        *linear("mixer.out_proj", hidden, inner, bias=bias),
    ]
    chunk = config.count("chunk_size", 256)
    mixer = Mamba2(inner=inner, state=state, conv=conv, heads=heads, head_dim=head_dim, groups=groups, chunk=chunk)
    return _assemble(config, hidden, mixer, tensors, tied=False)


def _convolution(config: ConfigReader, channels: int, kernel: int) -> list[Tensor]:
    weight = Tensor("mixer.conv1d.weight", (channels, 1, kernel))
    has_bias = config.flag("use_conv_bias", True)
    return [weight, Tensor("mixer.conv1d.bias", (channels,))] if has_bias else [weight]


def _assemble(
    config: ConfigReader, hidden: int, mixer: Mamba1 | Mamba2, tensors: list[Tensor], *, tied: bool
) -> ModelShape:
    block = Block(
        mixer=mixer,
        mlp=None,
        norm="rms",
        arrangement="single",
        tensors=(*norm("norm", hidden, "rms"), *tensors),
        residual_fp32=config.flag("residual_in_fp32", True),
    )
    layers = [block] * read_layers(config, 32)
    names = ("backbone.embeddings.weight", "backbone.layers.{i}.", "backbone.norm_f")
    return assemble(config, layers, hidden=hidden, vocab=50280, tied=tied, positions=None, names=names)
