"""`slurm.sbatch`: the same training under SLURM, on one node or several.

One task a node, which is torchrun; torchrun starts a rank on each GPU, DeepSpeed's engines included, so no node
needs ssh to another. SLURM copies the script away before it runs it, so unlike `launch.sh` it cannot look where
it lies: it runs in the folder that it was submitted from.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from tightfit.planner.plan import Plan
from tightfit.priced import GIB, strategy_name
from tightfit.render.environment import environment, launcher_of
from tightfit.render.launch import comment, dtk, exports
from tightfit.render.target import Target
from tightfit.render.worker import chosen_way, time_limit_s

_GRACE_S = 1800
"""What SLURM adds to the job's own limit, so that the run can save and end by itself."""


def slurm_sbatch(plan: Plan, target: Target) -> str:
    """The batch file: `sbatch slurm.sbatch`, from its own folder."""
    way = chosen_way(plan)
    variables = [
        variable
        for variable in environment(plan, target)
        # SLURM hands each job its own GPUs, and one port is read by all nodes below.
        if not variable.name.endswith("VISIBLE_DEVICES") and variable.name not in ("CUDA_DEVICE_ORDER", "MASTER_PORT")
    ]
    lines = [
        "#!/usr/bin/env bash",
        *_directives(plan),
        "",
        *comment(
            f"The training of PLAN.md: {strategy_name(way.levers)} on {way.hardware.nodes} × "
            f"{way.hardware.gpus_per_node} {way.hardware.gpu.name}. Submit it from this folder: sbatch slurm.sbatch"
        ),
        "set -euo pipefail",
        'cd -- "${SLURM_SUBMIT_DIR:?submit this file with sbatch}"',
        "",
        *(dtk() if way.hardware.gpu.vendor == "hygon" else ()),
        *exports(variables),
        "",
        "# The ranks meet on the first node.",
        'MASTER_ADDR="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)"',
        f'MASTER_PORT="${{MASTER_PORT:-{target.port}}}"',
        "export MASTER_ADDR MASTER_PORT",
        "",
        *_command(plan, target),
    ]
    return "\n".join(lines) + "\n"


def _directives(plan: Plan) -> Iterator[str]:
    way = chosen_way(plan)
    kind = "dcu" if way.hardware.gpu.vendor == "hygon" else "gpu"
    need = math.ceil(way.footprint.host.peak_bytes_per_node / GIB)
    yield "#SBATCH --job-name=tightfit"
    yield f"#SBATCH --nodes={way.hardware.nodes}"
    yield "#SBATCH --ntasks-per-node=1"
    yield f"#SBATCH --gres={kind}:{way.hardware.gpus_per_node}"
    yield "#SBATCH --exclusive"
    yield f"# All of a node's memory; the plan needs {need} GiB of it."
    yield "#SBATCH --mem=0"
    limit = time_limit_s(plan.job)
    if limit is not None:
        yield f"# The job's own limit is {plan.job.timeout}; the rest is for saving."
        yield f"#SBATCH --time={math.ceil((limit + _GRACE_S) / 60)}"
    yield "#SBATCH --output=slurm-%j.out"


def _command(plan: Plan, target: Target) -> Iterator[str]:
    way = chosen_way(plan)
    if launcher_of(plan, target) == "llamafactory":
        yield "# Each node takes its number from SLURM."
        yield "# shellcheck disable=SC2016"
        yield "exec srun --kill-on-bad-exit=1 bash -c \\"
        yield '  \'NODE_RANK="$SLURM_NODEID" exec llamafactory-cli train llamafactory.yaml "$@"\' launch "$@"'
        return
    yield "exec srun --kill-on-bad-exit=1 torchrun \\"
    yield f"  --nnodes {way.hardware.nodes} --nproc_per_node {way.hardware.gpus_per_node} \\"
    yield '  --rdzv_id "$SLURM_JOB_ID" --rdzv_backend c10d --rdzv_endpoint "$MASTER_ADDR:$MASTER_PORT" \\'
    yield '  --module tightfit.train worker.json "$@"'
