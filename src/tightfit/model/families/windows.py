"""Which layers see only a sliding window.

Each rule is one family's reading of `sliding_window`, `layer_types` and their older relatives; it returns
the window of every layer, None for full attention.
"""

from __future__ import annotations

from collections.abc import Callable

from tightfit.model.families.reader import ConfigReader

FULL, SLIDING = "full_attention", "sliding_attention"
Window = int | None
Rule = Callable[[ConfigReader, int], list[Window]]


def never(config: ConfigReader, layers: int) -> list[Window]:
    return [None] * layers


def every_layer(default: Window) -> Rule:
    """mistral, mixtral, phi3, starcoder2: one window for all, null switches it off."""
    return lambda config, layers: [config.optional_count("sliding_window", default)] * layers


def every_layer_if_asked(config: ConfigReader, layers: int) -> list[Window]:
    """qwen3_moe: `use_sliding_window` decides."""
    return [_window_if_used(config, 4096)] * layers


def by_place(slides: Callable[[int], bool]) -> Rule:
    """ministral, gemma2, olmo3: one window, for the layers of these numbers."""
    return lambda config, layers: _read_types(config, layers, config.optional_count("sliding_window", 4096), slides)


def upper_layers(config: ConfigReader, layers: int) -> list[Window]:
    """qwen2, qwen3: the layers from `max_window_layers` up, if `use_sliding_window`."""
    window, first = _window_if_used(config, 4096), config.count("max_window_layers", 28, least=0)
    return _read_types(config, layers, window, lambda i: i >= first)


def even_lower_layers(config: ConfigReader, layers: int) -> list[Window]:
    """qwen2_moe: every other layer below `max_window_layers`, if `use_sliding_window`."""
    window, last = _window_if_used(config, 4096), config.count("max_window_layers", 28, least=0)
    return _read_types(config, layers, window, lambda i: i % 2 == 0 and i < last)


def gemma3(config: ConfigReader, layers: int) -> list[Window]:
    """All but every sixth; attention to both sides halves the window and keeps the middle."""
    window = config.optional_count("sliding_window", 4096)
    if window is not None and config.flag("use_bidirectional_attention", False):
        window = window // 2 + 1
    every = config.count("sliding_window_pattern", 6)
    return _read_types(config, layers, window, lambda i: (i + 1) % every != 0)


def without_rope(config: ConfigReader, layers: int) -> list[Window]:
    """smollm3: the layers without rotary positions, if `use_sliding_window`."""
    window, rotary = _window_if_used(config, None), rotary_layers(config, layers)
    return _read_types(config, layers, window, lambda i: not rotary[i])


def rotary_layers(config: ConfigReader, layers: int) -> list[bool]:
    """smollm3: which layers rotate. `no_rope_layers` holds 1 where they do, whatever its name says."""
    given = config.whole_numbers("no_rope_layers")
    if given is None:
        every = config.count("no_rope_layer_interval", 4)
        return [(i + 1) % every != 0 for i in range(layers)]
    if len(given) != layers:
        raise config.fail("model.entries-for-layers", key="no_rope_layers", entries=len(given), layers=layers)
    return [bool(flag) for flag in given]


def _window_if_used(config: ConfigReader, default: Window) -> Window:
    """Unused, the value may be anything: transformers itself saves a 0 there."""
    config.has("sliding_window")
    return config.optional_count("sliding_window", default) if config.flag("use_sliding_window", False) else None


def _read_types(config: ConfigReader, layers: int, window: Window, slides: Callable[[int], bool]) -> list[Window]:
    """`layer_types` where the config has it, else the family's own pattern."""
    types = config.words("layer_types", layers) or [SLIDING if slides(i) else FULL for i in range(layers)]
    for word in types:
        if word not in (FULL, SLIDING):
            names = {"word": word, "model_type": config.model_type, "full": FULL, "sliding": SLIDING}
            raise config.fail("model.unknown-layer-type", **names)
    return [window if word == SLIDING else None for word in types]
