"""A layer of which some parts run again, operation by operation: what it keeps and holds (`train/recompute.py`).

Kept are the layer's input, which is counted elsewhere, and what the parts that do not run again have computed. In the
second pass these are handed in where they were made, so that it makes only the rest; from then on the layer holds what
one holds that keeps everything.
"""

from __future__ import annotations

from tightfit.memory.graph import follow_tags, read_graph
from tightfit.memory.tape import LayerCost, Slot, Tape, measure


def measure_parts(tape: Tape, layer_input: Slot, layer_output: Slot, select: tuple[str, ...]) -> LayerCost:
    graph = read_graph(tape, layer_input)
    follow_tags(graph, select)
    made = [slot for op in tape.ops for slot in (*op.outputs, *op.makes, *op.keeps) if slot.storage is slot]
    handed = {id(slot): slot for slot in made if graph.of(slot).saved}
    return measure(tape, layer_input, layer_output, handed=handed)
