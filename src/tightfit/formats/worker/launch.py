"""Our own worker, as another launcher starts it."""

from __future__ import annotations

WORKER = "--module tightfit.train worker.json"


def node_flag(flag: str, variable: str) -> str:
    """A flag whose value differs from node to node, or is known on the cluster only."""
    return f'--{flag} "${{{variable}:?set it for each node}}"'
