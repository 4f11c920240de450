"""Our own worker, as another launcher starts it."""

from __future__ import annotations

from tightfit.messages import text

WORKER = "--module tightfit.train worker.json"


def node_flag(flag: str, variable: str) -> str:
    """A flag whose value differs from node to node, or is known on the cluster only."""
    return f'--{flag} "${{{variable}:?{text("launch.set-on-node")}}}"'
