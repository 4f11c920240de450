"""Times as people write them: `12h`, `90m`, `1h30m`."""

from __future__ import annotations

import re

_UNITS_S = {"d": 86_400, "h": 3_600, "m": 60, "s": 1}


def seconds_in(text: str) -> float | None:
    """Seconds in such a text; None: it is no time."""
    found = re.findall(r"(\d+(?:\.\d+)?)\s*([dhms])", text.lower())
    units = [unit for _, unit in found]
    whole = "".join(count + unit for count, unit in found) == re.sub(r"\s+", "", text.lower())
    if not found or not whole or units != sorted(set(units), key=list(_UNITS_S).index):
        return None
    return sum(float(count) * _UNITS_S[unit] for count, unit in found)
