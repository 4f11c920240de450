"""`launch.sh`: one script that starts the plan, whichever launcher does it.

It runs in its own folder, because the files beside it name each other without a path: DeepSpeed's JSON in the
YAMLs, the data in `dataset_info.json`. What would fail only after minutes of loading (a file that was not
copied along, a launcher that is not installed, data that is not there) is asked first, one sentence each.
Arguments of the script go to the trainer.

The launchers differ in how they are told the GPUs, the port and the machines:

- `deepspeed` takes `--include` and then ignores CUDA_VISIBLE_DEVICES, so the script hands that on itself, as many
  as the plan uses: a rank starts on each. It counts slots, so they must be numbers, and HIP_VISIBLE_DEVICES must be
  gone by then, or it would count what that leaves. On several nodes it goes by ssh from one, and passes on no
  variables but NCCL's and Python's: the others go through its `.deepspeed_env`. It would add `--local_rank` to the
  trainer's arguments; `--no_local_rank` stops that;
- `accelerate` overrules CUDA_VISIBLE_DEVICES by `gpu_ids`, which it is told only where GPUs were chosen by number;
- `torchrun` and `accelerate` are started on every node, with NODE_RANK and MASTER_ADDR telling them apart;
- `llamafactory-cli` reads everything from variables, and starts torchrun itself.
"""

from __future__ import annotations

import math
import shlex
import textwrap
from collections.abc import Collection, Iterable, Iterator
from pathlib import PurePosixPath

from tightfit.formats.dialect import Variable, launchers
from tightfit.formats.launch.environment import HIP, environment, gpu_ids_of, launcher_of, obeys_visible
from tightfit.formats.llamafactory.write import DATASET_INFO, PLACEHOLDER_DATA, listed, names_a_file
from tightfit.formats.target import Target
from tightfit.formats.worker.write import require_way, time_limit_s, time_to_save_s, untrained
from tightfit.messages import Message, Said, end_sentence, text
from tightfit.planner.plan import Plan
from tightfit.priced import GIB, strategy_name
from tightfit.types import ConfigError


def launch_sh(plan: Plan, target: Target, files: Collection[str]) -> str:
    """The script that starts the ranks with the right environment. `files` are those that lie beside it."""
    way, launcher = require_way(plan), launcher_of(plan, target)
    needed = launchers()[launcher].needs
    if needed is not None and needed not in files:
        raise ConfigError(Message("launch.needs-file", launcher=launcher, needed=needed))
    gpu_ids_of(plan, target)
    several = way.hardware.nodes > 1
    lines = [
        "#!/usr/bin/env bash",
        *comment(
            Message("launch.starts", strategy=strategy_name(way.levers), world=way.world, gpu=way.hardware.gpu.name)
        ),
        f"# {text('launch.arguments')}",
        # On what our worker would train, where that is not what its reader expects.
        *(line for said in (untrained(plan.job) if plan.job.trainer == "tightfit" else ()) for line in comment(said)),
        *([f"# {text('launch.one-node' if launcher == 'deepspeed' else 'launch.every-node')}"] if several else ()),
        "set -euo pipefail",
        "",
        f"# {text('launch.no-folder')}",
        'cd -- "$(dirname -- "${BASH_SOURCE[0]}")"',
        "",
        *preflight(plan, launcher, files),
        "",
        *(dtk() if way.hardware.gpu.vendor == "hygon" else ()),
        *exports(environment(plan, target)),
        *(_visible(plan) if obeys_visible(plan, target, launcher) else ()),
    ]
    if several and launcher == "deepspeed":
        names = "|".join(variable.name for variable in environment(plan, target) if variable.value is not None)
        lines += ["", f"# {text('launch.deepspeed-env')}", f"env | grep -E '^({names})=' > .deepspeed_env"]
    lines += ["", *launchers()[launcher].command(plan, target)]
    return "\n".join(lines) + "\n"


def or_stop(problem: str) -> str:
    """What a line of the script ends with that may fail."""
    return f'|| {{ echo "launch.sh: {problem}" >&2; exit 2; }}'


def preflight(plan: Plan, launcher: str, files: Collection[str]) -> Iterator[str]:
    """What is cheaper to ask now than to find out later."""
    used = [name for name in launchers()[launcher].reads if name in files]
    yield f"for file in {' '.join(used)}; do"
    yield f'  [[ -f "$file" ]] {or_stop(text("launch.file-missing"))}'
    yield "done"
    data = plan.job.data.path or (PLACEHOLDER_DATA if "dataset_info.json" in used else None)
    if (entry := listed(data)) is not None:
        data = str(PurePosixPath(entry[0]) / DATASET_INFO)
    if data is not None and names_a_file(data) and not data.startswith("~"):
        # As a variable, so that no character of the name can be read as shell.
        yield f"data={shlex.quote(data)}"
        yield f'[[ -e "$data" ]] {or_stop(text("launch.no-data"))}'
    program = launchers()[launcher].program
    yield f"command -v {program} >/dev/null {or_stop(text('launch.not-on-path', program=program))}"


def dtk() -> Iterator[str]:
    """Hygon's libraries are found through a script of the toolkit, which knows nothing of `set -u`."""
    yield f"# {text('launch.toolkit')}"
    yield 'if [[ -f "${DTK_ROOT:-/opt/dtk}/env.sh" ]]; then'
    yield "  set +u"
    yield "  # shellcheck disable=SC1091"
    yield '  source "${DTK_ROOT:-/opt/dtk}/env.sh"'
    yield "  set -u"
    yield "fi"
    yield ""


def exports(variables: Iterable[Variable]) -> Iterator[str]:
    """The table as shell. What is left out is in PLAN.md."""
    for variable in variables:
        if variable.unset:
            yield from comment(variable.reason)
            yield f"unset {variable.name}"
        elif variable.value is not None:
            yield from comment(variable.reason)
            if "$(" in variable.value:  # a failing command inside export would go unnoticed
                yield f"{variable.name}={variable.value}"
                yield f"export {variable.name}"
            else:
                yield f"export {variable.name}={variable.value}"


def comment(said: Said) -> list[str]:
    """A sentence that no character of it can end."""
    sentence = end_sentence(said)
    is_chinese = sentence.endswith("。")
    return textwrap.wrap(
        sentence if is_chinese else sentence[:1].upper() + sentence[1:],
        50 if is_chinese else 100,  # a Chinese character is as wide as two letters
        initial_indent="# ",
        subsequent_indent="# ",
        break_on_hyphens=False,
    )


def _visible(plan: Plan) -> Iterator[str]:
    """The visible GPUs, in `gpus`, and that there are enough."""
    hardware = require_way(plan).hardware
    wanted, listed = hardware.gpus_per_node, ",".join(map(str, range(hardware.gpus_per_node)))
    yield ""
    yield f"# {text('launch.visible')}"
    yield "visible=CUDA_VISIBLE_DEVICES"
    if hardware.gpu.vendor in HIP:
        yield "if [[ -v HIP_VISIBLE_DEVICES ]]; then visible=HIP_VISIBLE_DEVICES; fi"
    yield f'IFS=", " read -r -a gpus <<< "${{!visible-{listed}}}"'
    yield f"(( ${{#gpus[@]}} >= {wanted} )) {or_stop(text('launch.too-few-visible', wanted=wanted))}"


# --------------------------------------------------------------------------------------------------
# `slurm.sbatch`: the same training under SLURM, on one node or several.
#
# One task a GPU, which is a rank: SLURM signals the tasks that it started and nothing below them, and torchrun would
# kill its ranks half a minute after a SIGTERM, in the middle of a large checkpoint. So a rank hears of the time
# limit, of a preemption and of `scancel` from SLURM itself, and no node needs ssh to another. LLaMA-Factory starts
# its ranks through torchrun, one task a node, and saves on no signal.
#
# SLURM tells the batch shell of a preemption or a `scancel` too, and `srun` kills its tasks at a SIGTERM of its own:
# the shell stays in front of it, and waits.
#
# SLURM copies the script away before it runs it, so unlike `launch.sh` it cannot look where it lies: it runs in the
# folder that it was submitted from.

_GRACE_S = 1800  # what SLURM adds to the job's own limit, so that the run can save and end by itself
_LONGEST_WARNING_S = 65_535  # what `--signal` takes


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
        yield f"#SBATCH --signal=USR1@{min(time_to_save_s(plan), _LONGEST_WARNING_S)}"
        yield from (f"# {line}" for line in text("launch.requeue").splitlines())
        yield "#SBATCH --requeue"
    yield "#SBATCH --output=slurm-%j.out"
    yield "#SBATCH --open-mode=append"


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
