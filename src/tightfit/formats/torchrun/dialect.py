"""`torchrun`, which starts ranks and reads no file of its own."""

from __future__ import annotations

from collections.abc import Iterator

from tightfit.formats.dialect import Dialect, Launcher, Variable
from tightfit.formats.target import Target
from tightfit.formats.worker.write import WORKER, node_flag, require_way, time_to_save_s
from tightfit.messages import Message, text
from tightfit.planner.plan import Plan


def torchrun_command(plan: Plan, target: Target) -> Iterator[str]:
    hardware = require_way(plan).hardware
    where = "--master_addr 127.0.0.1"
    if hardware.nodes > 1:
        where = f"{node_flag('node_rank', 'NODE_RANK')} {node_flag('master_addr', 'MASTER_ADDR')}"
    if target.cluster != "kubernetes":  # there a variable says how long it waits
        yield from (f"# {line}" for line in text("launch.torchrun-kills").splitlines())
    yield "exec torchrun \\"
    yield f"  --nnodes {hardware.nodes} --nproc_per_node {hardware.gpus_per_node} {where} \\"
    yield f'  --master_port "${{MASTER_PORT:-{target.port}}}" \\'
    yield f'  {WORKER} "$@"'


def torchrun_variables(plan: Plan, target: Target) -> tuple[Variable, ...]:
    if target.cluster != "kubernetes":
        return ()
    patience, reason = str(time_to_save_s(plan)), Message("launch.shutdown-timeout")
    return (Variable(name="TORCH_ELASTIC_SHUTDOWN_TIMEOUT", value=patience, reason=reason),)


DIALECT = Dialect(
    name="torchrun",
    launcher=Launcher(
        program="torchrun",
        reads=("worker.json", "deepspeed.json"),
        command=torchrun_command,
        variables=torchrun_variables,
    ),
)
