"""`slurm.sbatch`: the same training under SLURM, on one node or several.

One task a GPU, which is a rank: SLURM signals the tasks that it started and nothing below them, and torchrun would kill
its ranks half a minute after a SIGTERM, in the middle of a large checkpoint. So a rank hears of the time limit, of a
preemption and of `scancel` from SLURM itself, and no node needs ssh to another. LLaMA-Factory starts its ranks through
torchrun, one task a node, and saves on no signal.

SLURM tells the batch shell of a preemption or a `scancel` too, and `srun` kills its tasks at a SIGTERM of its own: the
shell stays in front of it, and waits.

SLURM copies the script away before it runs it, so unlike `launch.sh` it cannot look where it lies: it runs in the
folder that it was submitted from.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from tightfit.formats.launch.environment import environment, launcher_of
from tightfit.formats.launch.script import comment, dtk, exports
from tightfit.formats.target import Target
from tightfit.formats.worker.write import require_way, time_limit_s
from tightfit.messages import Message, text
from tightfit.planner.plan import Plan
from tightfit.priced import GIB, strategy_name

_GRACE_S = 1800
"""What SLURM adds to the job's own limit, so that the run can save and end by itself."""
_WARNING_S = 300
"""How long before its limit SLURM asks for a checkpoint, beside the steps that may have to end first."""
_LONGEST_WARNING_S = 65_535
"""What `--signal` takes."""


def slurm_sbatch(plan: Plan, target: Target) -> str:
    """The batch file: `sbatch slurm.sbatch`, from its own folder."""
    way = require_way(plan)
    variables = [
        variable
        for variable in environment(plan, target)
        # SLURM hands each job its own GPUs, and one port is read by all nodes below.
        if not variable.name.endswith("VISIBLE_DEVICES") and variable.name not in ("CUDA_DEVICE_ORDER", "MASTER_PORT")
    ]
    lines = [
        "#!/usr/bin/env bash",
        *_directives(plan, target),
        "",
        *comment(
            Message(
                "launch.sbatch",
                strategy=strategy_name(way.levers),
                nodes=way.hardware.nodes,
                gpus=way.hardware.gpus_per_node,
                gpu=way.hardware.gpu.name,
            )
        ),
        "set -euo pipefail",
        f'cd -- "${{SLURM_SUBMIT_DIR:?{text("launch.submit")}}}"',
        "",
        *(dtk() if way.hardware.gpu.vendor == "hygon" else ()),
        *exports(variables),
        "",
        f"# {text('launch.first-node')}",
        'MASTER_ADDR="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)"',
        f'MASTER_PORT="${{MASTER_PORT:-{target.port}}}"',
        "export MASTER_ADDR MASTER_PORT",
        "",
        *_command(plan, target),
    ]
    return "\n".join(lines) + "\n"


def _directives(plan: Plan, target: Target) -> Iterator[str]:
    way = require_way(plan)
    kind = "dcu" if way.hardware.gpu.vendor == "hygon" else "gpu"
    need = math.ceil(way.footprint.host.peak_bytes_per_node / GIB)
    ours = launcher_of(plan, target) != "llamafactory"
    yield "#SBATCH --job-name=tightfit"
    yield f"#SBATCH --nodes={way.hardware.nodes}"
    yield f"#SBATCH --ntasks-per-node={way.hardware.gpus_per_node if ours else 1}"
    yield f"#SBATCH --gres={kind}:{way.hardware.gpus_per_node}"
    yield "#SBATCH --exclusive"
    yield f"# {text('launch.all-memory', need=need)}"
    yield "#SBATCH --mem=0"
    limit = time_limit_s(plan.job)
    if limit is not None:
        yield f"# {text('launch.own-limit', limit=plan.job.timeout)}"
        yield f"#SBATCH --time={math.ceil((limit + _GRACE_S) / 60)}"
    if ours:
        yield from (f"# {line}" for line in text("launch.signal").splitlines())
        yield f"#SBATCH --signal=USR1@{min(_WARNING_S + math.ceil(2 * way.pace.step_s), _LONGEST_WARNING_S)}"
    yield "#SBATCH --output=slurm-%j.out"


def _command(plan: Plan, target: Target) -> Iterator[str]:
    if launcher_of(plan, target) == "llamafactory":
        yield f"# {text('launch.node-number')}"
        yield "# shellcheck disable=SC2016"
        yield "exec srun --kill-on-bad-exit=1 bash -c \\"
        yield '  \'NODE_RANK="$SLURM_NODEID" exec llamafactory-cli train llamafactory.yaml "$@"\' launch "$@"'
        return
    yield from (f"# {line}" for line in text("launch.sigterm").splitlines())
    yield "trap : TERM"
    yield """trap '[[ -z "${ranks:-}" ]] || kill -USR1 "$ranks" || true' USR1"""
    yield ""
    yield f"# {text('launch.all-cores')}"
    yield 'srun --kill-on-bad-exit=1 --cpu-bind=none python -m tightfit.train worker.json "$@" &'
    yield "ranks=$!"
    yield f"# {text('launch.wait')}"
    yield 'while kill -0 "$ranks" 2>/dev/null; do wait "$ranks" || true; done'
    yield 'wait "$ranks"'
