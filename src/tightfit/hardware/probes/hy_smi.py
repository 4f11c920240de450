"""`hy-smi`: Hygon's edition of rocm-smi, with keys and shapes of its own that `shapes.py` and `smi.py` know.

It is believed before rocm-smi: Hygon's toolkit installs the same program under both names.
"""

from __future__ import annotations

from tightfit.hardware.probes.card import Answer
from tightfit.hardware.probes.rocm_smi import probe


def hy_smi(deadline: float, *, whole: bool = True) -> Answer:
    return probe("hy-smi", "hygon", deadline, whole=whole)
