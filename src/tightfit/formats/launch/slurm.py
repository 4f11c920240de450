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
from tightfit.formats.worker.write import chosen_way, time_limit_s
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
    way = chosen_way(plan)
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


def _directives(plan: Plan, target: Target) -> Iterator[str]:
    way = chosen_way(plan)
    kind = "dcu" if way.hardware.gpu.vendor == "hygon" else "gpu"
    need = math.ceil(way.footprint.host.peak_bytes_per_node / GIB)
    ours = launcher_of(plan, target) != "llamafactory"
    yield "#SBATCH --job-name=tightfit"
    yield f"#SBATCH --nodes={way.hardware.nodes}"
    yield f"#SBATCH --ntasks-per-node={way.hardware.gpus_per_node if ours else 1}"
    yield f"#SBATCH --gres={kind}:{way.hardware.gpus_per_node}"
    yield "#SBATCH --exclusive"
    yield f"# All of a node's memory; the plan needs {need} GiB of it."
    yield "#SBATCH --mem=0"
    limit = time_limit_s(plan.job)
    if limit is not None:
        yield f"# The job's own limit is {plan.job.timeout}; the rest is for saving."
        yield f"#SBATCH --time={math.ceil((limit + _GRACE_S) / 60)}"
    if ours:
        yield from _signal(way.pace.step_s)
    yield "#SBATCH --output=slurm-%j.out"


def _signal(step_s: float) -> Iterator[str]:
    warning_s = min(_WARNING_S + math.ceil(2 * step_s), _LONGEST_WARNING_S)
    yield "# So many seconds before its limit SLURM asks the ranks to save a checkpoint and to leave, with exit"
    yield "# code 4; a slow disk needs more. Submitted again the training goes on from there, and with"
    yield "# `sbatch --requeue` SLURM itself starts it again after a preemption or the loss of a node."
    yield f"#SBATCH --signal=USR1@{warning_s}"


def _command(plan: Plan, target: Target) -> Iterator[str]:
    if launcher_of(plan, target) == "llamafactory":
        yield "# Each node takes its number from SLURM."
        yield "# shellcheck disable=SC2016"
        yield "exec srun --kill-on-bad-exit=1 bash -c \\"
        yield '  \'NODE_RANK="$SLURM_NODEID" exec llamafactory-cli train llamafactory.yaml "$@"\' launch "$@"'
        return
    yield "# The ranks hear SIGTERM from SLURM, and srun would kill them at one of its own: it ends here. SIGUSR1"
    yield "# comes here only with --signal=B:USR1, and is passed on."
    yield "trap : TERM"
    yield """trap '[[ -z "${ranks:-}" ]] || kill -USR1 "$ranks" || true' USR1"""
    yield ""
    yield "# Every rank may use all cores of its node: the data and the optimizer's share run on them."
    yield 'srun --kill-on-bad-exit=1 --cpu-bind=none python -m tightfit.train worker.json "$@" &'
    yield "ranks=$!"
    yield "# A signal ends a wait, not the ranks; the last one says how they ended."
    yield 'while kill -0 "$ranks" 2>/dev/null; do wait "$ranks" || true; done'
    yield 'wait "$ranks"'
