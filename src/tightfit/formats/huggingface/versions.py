"""Which fields transformers' releases no longer take."""

from __future__ import annotations

EVALUATION_STRATEGY_GONE = "4.46"
"""transformers' release that no longer takes `evaluation_strategy`."""

OLDER_ARGUMENTS_GONE = "5.22"
"""A release of transformers that takes none of the older fields any more; some left earlier."""
