"""What GPUs that hand micro batches on to each other wait for.

In the middle of a step every GPU of the row has work, and the slowest sets the pace. At its ends they wait: for the
first micro batch to come up to them, and for the last gradients to come back. On the slowest GPU that is as long as
the others take for one micro batch; with several stages on each GPU it is that share of it, since a part of the layers
is passed as often sooner. Between two passes a GPU hands hidden states or their gradient on, and waits for the next:
nothing is computed meanwhile (as `train/pipeline.py` runs it, a receive is waited for where it is needed).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from tightfit.memory.activations import setting_of
from tightfit.memory.layers import layer_input_bytes
from tightfit.pace.rates import Rates, hand_over_s
from tightfit.types import Hardware, Levers, ModelShape


class RowTime(NamedTuple):
    """Seconds of a GPU's own step, with all that it waits for by itself."""

    place: int  # in the row
    whole: float
    update: float  # of that, the optimizer's
    alike: int  # GPUs of the row that take as long


class Waits(NamedTuple):
    """What the slowest GPU of the row adds to its own step."""

    slowest: int
    handed_s: float
    bubble_s: float

    def sum(self, times: Sequence[RowTime]) -> float:
        return times[self.slowest].whole + self.handed_s + self.bubble_s


def hand_over_each_s(shape: ModelShape, levers: Levers, hardware: Hardware, rates: Rates) -> float:
    """Of a micro batch, up and down. `levers`: of the whole model."""
    setting = setting_of(levers, hardware.gpu, shape.model_type)
    handed = layer_input_bytes(shape.blocks[shape.pattern[-1]], shape.hidden_size, setting)
    return 2 * levers.stages_per_gpu * hand_over_s(rates, hardware, levers.pipeline_parallel, handed)


def find_waits(levers: Levers, each_s: float, times: Sequence[RowTime]) -> Waits:
    """`each_s`: of `hand_over_each_s`."""
    gpus, stages, micro_batches = levers.pipeline_parallel, levers.stages_per_gpu, levers.accumulation
    slowest = max(range(len(times)), key=lambda at: times[at].whole)
    others = [(one.whole - one.update) / micro_batches * one.alike for one in times]
    own = others[slowest] / times[slowest].alike
    return Waits(slowest, micro_batches * each_s, (sum(others) - own + (gpus - 1) * each_s) / stages)
