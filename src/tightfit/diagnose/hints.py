"""What a log says in passing about the settings and the model."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from tightfit.job.known import KnownConfig, completed

_DEVICE = rb"['\"]?\s*[:=]\s*\{?\s*['\"]?device['\"]?\s*[:=]\s*['\"]?(cpu|nvme)"
_HYGON = (b"dtk", b"dcu", b"hygon", b"gfx")
_TABLE = {
    "stage": (
        (b"zero_optimization_stage", b"zero_optimization"),
        rb"zero_optimization_stage\W+(\d)\b|zero_optimization['\"]?\s*[:=]\s*\{\s*['\"]stage['\"]\s*:\s*([0-3])\b",
    ),
    "micro_batch": ((b"instantaneous",), rb"(?i)instantaneous batch size per device\s*=\s*(\d{1,9})\b"),
    "accumulation": ((b"accumulation",), rb"(?i)gradient accumulation steps\s*=\s*(\d{1,9})\b"),
    "vocabulary": ((b"vocab_size",), rb"['\"]?vocab_size['\"]?\s*[:=]\s*(\d{3,7})"),
    "world": ((b"world_size",), rb"world_size\W{1,12}(\d{1,5})\b"),
    "checkpointing": (
        (b"checkpointing", b"gradient_checkpointing"),
        rb"(?i)gradient checkpointing (enabled|is enabled)|gradient_checkpointing['\"]?\s*[:=]\s*(true)",
    ),
    "offload_optimizer": ((b"offload_optimizer",), rb"(?i)offload_optimizer" + _DEVICE),
    "offload_param": ((b"offload_param",), rb"(?i)offload_param" + _DEVICE),
    "precision": (
        (b"compute", b"_enabled"),
        rb"(?i)compute dtype: torch\.(bfloat16|float16)|(fp16|bfloat16|bf16)_enabled\W+true",
    ),
    "trainer": (
        (b"llamafactory", b"axolotl"),
        rb"[\\/](llamafactory|axolotl)[\\/]|\b(llamafactory|axolotl)(?:-cli|\.\w+)\b",
    ),
    "vendor": (
        (b"hip", b"rocm", b"rccl", b"miopen", *_HYGON, b"npu", b"torch_npu", b"hccl", b"ascend", b"cann"),
        rb"(?i)[./](dtk)[-\d/]|\b(dcu|hygon)\b|\b(gfx9(?:26|28|36))\b|\b(hip) (?:out of memory|error|gpus)|"
        rb"\b(rccl|miopen)\b|\+(rocm)\d|\b(npu)(?: out of memory| error| function|:\d)|\b(torch_npu)[/.\\]|\b(hccl)\b|"
        rb"\b(ascend)[ /]?(?:910|310|npu|cann|toolkit)|\b(cann) error\b",
    ),
    "method": ((b"trainable",), rb"(?i)(trainable)%: (?:[0-9]|[1-4][0-9])(?:\.\d+)?\b"),
}
_COMPILED = {name: (frozenset(words), re.compile(text)) for name, (words, text) in _TABLE.items()}
_MEANT: dict[str, object] = {
    "enabled": True, "is enabled": True, "true": True, "float16": "fp16", "bfloat16": "bf16", "trainable": "lora",
    "hip": "amd", "rccl": "amd", "miopen": "amd", "rocm": "amd", "dtk": "hygon", "dcu": "hygon",
    "gfx926": "hygon", "gfx928": "hygon", "gfx936": "hygon", "npu": "ascend", "torch_npu": "ascend", "hccl": "ascend",
    "cann": "ascend",
}  # fmt: skip


def look_for_settings(known: KnownConfig, data: bytes, words: set[bytes]) -> KnownConfig:
    """What is known, and what one piece of a log, whose words are these, adds to it. The first that is said counts; but
    Hygon's cards speak as AMD's until one of them is named."""
    for name, (wanted, pattern) in _COMPILED.items():
        before = getattr(known, name)
        may_be_hygon = before == "amd" and not words.isdisjoint(_HYGON)
        if wanted.isdisjoint(words) or (before is not None and not may_be_hygon):
            continue
        groups = [group for found in pattern.finditer(data) for group in found.groups() if group]
        texts = [group.decode("ascii", errors="replace").lower() for group in groups]
        told: list[Any] = [int(text) if text.isdigit() else _MEANT.get(text, text) for text in texts]
        if told:
            value: Any = "hygon" if "hygon" in told else told[0]
            known = replace(known, **{name: value})
    return known


def merged(given: KnownConfig | None, seen: list[KnownConfig]) -> KnownConfig:
    """What was given, and what the logs add to it."""
    result = given or KnownConfig()
    if result.vendor == "unknown":  # cards that are known by their size alone
        result = replace(result, vendor=None)
    for other in seen:
        result = completed(result, other)
    return result
