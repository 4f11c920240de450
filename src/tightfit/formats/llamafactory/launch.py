"""`llamafactory-cli train`."""

from __future__ import annotations

from collections.abc import Iterator

from tightfit.formats.dialect import Variable
from tightfit.formats.launch.environment import HIP
from tightfit.formats.target import Target
from tightfit.formats.worker.write import require_way
from tightfit.inputs.versions import release
from tightfit.messages import Message, text
from tightfit.planner.plan import Plan


def llamafactory_command(plan: Plan, target: Target) -> Iterator[str]:
    if require_way(plan).hardware.nodes > 1:
        for name in ("NODE_RANK", "MASTER_ADDR"):
            yield f'export {name}="${{{name}:?{text("launch.set-on-node")}}}"'
    yield 'exec llamafactory-cli train llamafactory.yaml "$@"'


def llamafactory_variables(plan: Plan, target: Target) -> tuple[Variable, ...]:
    """It starts torchrun itself, and reads everything about it from variables."""
    hardware = require_way(plan).hardware
    rows = [
        Variable(name="FORCE_TORCHRUN", value="1", reason=Message("launch.force-torchrun")),
        Variable(
            name="NPROC_PER_NODE",
            value=str(hardware.gpus_per_node),
            reason=Message("launch.nproc"),
        ),
        Variable(name="NNODES", value=str(hardware.nodes), reason=Message("launch.nnodes")),
        Variable(
            name="MASTER_PORT",
            value=f'"${{MASTER_PORT:-{target.port}}}"',
            reason=Message("launch.master-port"),
        ),
    ]
    if hardware.gpu.vendor in HIP and release(target.llamafactory_version) >= (0, 9, 3):
        rows.append(Variable(name="OPTIM_TORCH", value="0", reason=Message("launch.optim-torch")))
    return tuple(rows)
