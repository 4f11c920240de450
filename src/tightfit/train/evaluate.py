"""The loss on held-back samples, one micro batch at a time; no logits outlive their micro batch."""

from __future__ import annotations

import numpy as np
import torch

from tightfit.train.data import Samples
from tightfit.train.engines import Engine
from tightfit.train.place import Place, total
from tightfit.train.windows import Windows


def evaluate(engine: Engine, held: Samples, windows: Windows, micro_batch: int, place: Place) -> float:
    """Mean loss of a token. Every rank makes the same number of passes: sharded weights are gathered by all."""
    stride = micro_batch * place.world
    passes = -(-len(held) // stride)
    added = 0.0
    engine.train(False)
    with torch.no_grad():
        for number in range(passes):
            begin = number * stride + place.rank * micro_batch
            indices = np.arange(begin, begin + micro_batch)
            inputs = windows.tensors(np.minimum(indices, len(held) - 1), unheard=indices >= len(held))
            # A share of a window of one token: the sum of the micro batch's losses, times the ranks.
            added += float(engine.forward(inputs, 1.0)) / place.world
    engine.train(True)
    tokens = max(1, int(held.loss_tokens.sum()))
    return total(place, added) / tokens
