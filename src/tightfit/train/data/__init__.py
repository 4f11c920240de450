"""The data of a training: from files to batches.

    spec ─► prepare (one process) ─► cache on disk ─► open_samples (every rank) ─► Order ─► batch

Readers (`examples`), what makes text of them (`chat`, `recipes`), what makes tokens of that (`tokens`, `cache`), and
what a loop sees (`samples`, `order`).
"""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from tightfit.messages import Message, Said
from tightfit.train.data.cache import Progress, build_store, identify, lock
from tightfit.train.data.order import Order
from tightfit.train.data.recipes import resolve
from tightfit.train.data.samples import (
    Description,
    GeneratedRows,
    Sample,
    Samples,
    Split,
    TokenBatch,
    batch,
    build_view,
    describe,
    flatten,
    open_view,
    worst,
)
from tightfit.train.data.spec import GENERATED_SAMPLES, DataSpec, check_spec
from tightfit.train.data.tokens import byte_tokenizer, codec_of, load_tokenizer, pad_id

__all__ = [
    "DataSpec",
    "Description",
    "Order",
    "Sample",
    "Samples",
    "Split",
    "TokenBatch",
    "batch",
    "byte_tokenizer",
    "describe",
    "explain",
    "flatten",
    "load_tokenizer",
    "open_samples",
    "pad_id",
    "prepare",
    "worst",
]


def prepare(spec: DataSpec, tokenizer: Any, cache: Path, progress: Progress) -> None:
    """Build what `open_samples` maps, unless it is there. One process of a node calls it."""
    check_spec(spec)
    if spec.is_generated:
        return
    want = identify(spec, codec_of(tokenizer, spec.template), cache)
    with lock(cache, want.key):
        build_store(want, cache, progress)
        build_view(want, cache)


def open_samples(spec: DataSpec, tokenizer: Any, cache: Path) -> Split:
    """The samples of a prepared data set; every rank maps the same files."""
    check_spec(spec)
    if spec.is_generated:
        count = min(spec.samples or GENERATED_SAMPLES, spec.max_samples or 2**62)
        held = 0
        if spec.evaluation_split and count > 1:
            held = min(count - 1, max(1, round(spec.evaluation_split * count)))

        def generate(first: int, count: int) -> Samples:
            length, words = spec.sequence, len(tokenizer)
            rows = GeneratedRows(count=count, sequence=length, vocabulary=words, seed=spec.seed, first=first)
            return Samples(
                rows=rows,
                lengths=np.full(count, length, dtype=np.int32),
                loss_tokens=np.full(count, length - 1, dtype=np.int64),
                fingerprint=sha256(repr(("generated", rows)).encode()).hexdigest(),
                sequence=length,
                documents=count,
            )

        return Split(train=generate(0, count - held), held=generate(count - held, held) if held else None)
    return open_view(identify(spec, codec_of(tokenizer, spec.template), cache), cache)


def explain(spec: DataSpec, tokenizer: Any) -> tuple[Said, ...]:
    """What was chosen for the user and has to be known, a sentence each: to be shown once."""
    if spec.is_generated:
        return (Message("data.random-samples"),)
    resolved = resolve(spec) if spec.by_recipe else None
    return (*codec_of(tokenizer, spec.template).said, *(resolved.talks.said if resolved else ()))
