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

import shlex
import textwrap
from collections.abc import Collection, Iterable, Iterator
from pathlib import PurePosixPath

from tightfit.formats.launch.environment import HIP, Variable, environment, gpu_ids_of, launcher_of
from tightfit.formats.launch.hostfile import hosts_for
from tightfit.formats.llamafactory.write import DATASET_INFO, PLACEHOLDER_DATA, listed, names_a_file
from tightfit.formats.target import Launcher, Target
from tightfit.formats.worker.write import chosen_way, untrained
from tightfit.planner.plan import Plan
from tightfit.priced import strategy_name
from tightfit.types import ConfigError

PROGRAMS: dict[Launcher, str] = {
    "deepspeed": "deepspeed",
    "torchrun": "torchrun",
    "accelerate": "accelerate",
    "llamafactory": "llamafactory-cli",
}
NEEDS: dict[Launcher, str | None] = {
    "deepspeed": None,
    "torchrun": None,
    "accelerate": "accelerate.yaml",
    "llamafactory": "llamafactory.yaml",
}
"""The file without which a launcher cannot start."""

_CONFIGS = ("worker.json", "deepspeed.json", "accelerate.yaml", "llamafactory.yaml", "dataset_info.json", "hostfile")
_WORKER = "--module tightfit.train worker.json"


def launch_sh(plan: Plan, target: Target, files: Collection[str]) -> str:
    """The script that starts the ranks with the right environment. `files` are those that lie beside it."""
    way, launcher = chosen_way(plan), launcher_of(plan, target)
    needed = NEEDS[launcher]
    if needed is not None and needed not in files:
        raise ConfigError(f"launcher {launcher} needs {needed}, which this plan has not: take another launcher")
    gpu_ids_of(plan, target)
    several = way.hardware.nodes > 1
    lines = [
        "#!/usr/bin/env bash",
        *comment(
            f"Starts the training of PLAN.md: {strategy_name(way.levers)} on {way.world} × {way.hardware.gpu.name}"
        ),
        "# Arguments are passed on to the trainer.",
        *(line for sentence in _before(plan) for line in comment(sentence.rstrip("."))),
        *(_several_nodes(launcher) if several else ()),
        "set -euo pipefail",
        "",
        "# The files name each other without a folder.",
        'cd -- "$(dirname -- "${BASH_SOURCE[0]}")"',
        "",
        *preflight(plan, launcher, files),
        "",
        *(dtk() if way.hardware.gpu.vendor == "hygon" else ()),
        *exports(environment(plan, target)),
        *(_visible(plan) if _sees(plan, target, launcher) else ()),
    ]
    if several and launcher == "deepspeed":
        lines += _deepspeed_env(environment(plan, target))
    lines += ["", *_command(plan, target, launcher)]
    return "\n".join(lines) + "\n"


def _before(plan: Plan) -> tuple[str, ...]:
    """On what our worker would train, where that is not what its reader expects."""
    return untrained(plan.job) if plan.job.trainer == "tightfit" else ()


def preflight(plan: Plan, launcher: Launcher, files: Collection[str]) -> Iterator[str]:
    """What is cheaper to ask now than to find out later."""
    used = _used(launcher, files)
    yield f"for file in {' '.join(used)}; do"
    yield '  [[ -f "$file" ]] || { echo "launch.sh: $file is missing: copy the whole folder" >&2; exit 2; }'
    yield "done"
    data = plan.job.data.path or (PLACEHOLDER_DATA if "dataset_info.json" in used else None)
    if (entry := listed(data)) is not None:
        data = str(PurePosixPath(entry[0]) / DATASET_INFO)
    if data is not None and names_a_file(data) and not data.startswith("~"):
        # As a variable, so that no character of the name can be read as shell.
        yield f"data={shlex.quote(data)}"
        yield '[[ -e "$data" ]] || { echo "launch.sh: no data at $data, counted from $PWD: put it there" >&2; exit 2; }'
    program = PROGRAMS[launcher]
    hint = f"launch.sh: {program} is not on PATH: activate the environment that has it"
    yield f'command -v {program} >/dev/null || {{ echo "{hint}" >&2; exit 2; }}'


def dtk() -> Iterator[str]:
    """Hygon's libraries are found through a script of the toolkit, which knows nothing of `set -u`."""
    yield "# The toolkit's libraries."
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


def comment(reason: str) -> Iterator[str]:
    """A sentence that no character of it can end."""
    yield from textwrap.wrap(
        reason[:1].upper() + reason[1:] + ".", 100, initial_indent="# ", subsequent_indent="# ", break_on_hyphens=False
    )


def _used(launcher: Launcher, files: Collection[str]) -> list[str]:
    """The configs that this launcher's command will read."""
    unread = {"llamafactory.yaml", "dataset_info.json"} if launcher != "llamafactory" else {"worker.json"}
    if launcher != "accelerate":
        unread.add("accelerate.yaml")
    if launcher != "deepspeed":
        unread.add("hostfile")
    return [name for name in _CONFIGS if name in files and name not in unread]


def _several_nodes(launcher: Launcher) -> Iterator[str]:
    if launcher == "deepspeed":
        yield "# Run it on one node: DeepSpeed reaches the others by ssh (pdsh), in this same folder on shared disk."
    else:
        yield "# Run it on every node, with NODE_RANK from 0 up and MASTER_ADDR the name of node 0."


def _deepspeed_env(variables: Iterable[Variable]) -> Iterator[str]:
    names = "|".join(variable.name for variable in variables if variable.value is not None)
    yield ""
    yield "# DeepSpeed sends other nodes only the variables that it finds in this file."
    yield f"env | grep -E '^({names})=' > .deepspeed_env"


def _command(plan: Plan, target: Target, launcher: Launcher) -> list[str]:
    makers = {
        "deepspeed": _deepspeed,
        "torchrun": _torchrun,
        "accelerate": _accelerate,
        "llamafactory": _llamafactory,
    }
    return list(makers[launcher](plan, target))


def _deepspeed(plan: Plan, target: Target) -> Iterator[str]:
    hardware, ids = chosen_way(plan).hardware, gpu_ids_of(plan, target)
    listed = ",".join(map(str, ids))
    hosts = hosts_for(target.hostfile, hardware.nodes, ids) if hardware.nodes > 1 else ()
    if hosts and target.gpu_ids is None:
        where = f"--hostfile hostfile --num_nodes {hardware.nodes} --num_gpus {hardware.gpus_per_node}"
    elif hosts:
        if target.hostfile is None:
            yield "# The machines of the file `hostfile`; replace the names in both."
        include = "@".join(f"{name}:{listed}" for name, _ in hosts)
        where = f'--hostfile hostfile --include "{include}"'
    elif _sees(plan, target, "deepspeed"):
        yield from _slots(plan)
        where = '--include "localhost:$slots"'
    else:
        where = f'--include "localhost:{listed}"'
    yield "# Asked to stop, this launcher ends its ranks at once; `tightfit train --plan` lets them save first."
    yield "exec deepspeed \\"
    yield f"  {where} \\"
    yield f'  --master_port "${{MASTER_PORT:-{target.port}}}" --no_local_rank \\'
    yield f'  {_WORKER} "$@"'


def _sees(plan: Plan, target: Target, launcher: Launcher) -> bool:
    """Whether the user's own choice of visible GPUs decides where the ranks run."""
    hardware = chosen_way(plan).hardware
    by_ssh = launcher == "deepspeed" and hardware.nodes > 1
    return target.gpu_ids is None and hardware.gpu.vendor != "cpu" and not by_ssh


def _visible(plan: Plan) -> Iterator[str]:
    """The visible GPUs, in `gpus`, and that there are enough."""
    hardware = chosen_way(plan).hardware
    wanted, listed = hardware.gpus_per_node, ",".join(map(str, range(hardware.gpus_per_node)))
    yield ""
    yield "# The GPUs that may be seen; the ranks take the first ones."
    yield "visible=CUDA_VISIBLE_DEVICES"
    if hardware.gpu.vendor in HIP:
        yield "if [[ -v HIP_VISIBLE_DEVICES ]]; then visible=HIP_VISIBLE_DEVICES; fi"
    yield f'IFS=", " read -r -a gpus <<< "${{!visible-{listed}}}"'
    hint = f"launch.sh: $visible names ${{#gpus[@]}} of the {wanted} GPUs that the plan uses: name more, or unset it"
    yield f'(( ${{#gpus[@]}} >= {wanted} )) || {{ echo "{hint}" >&2; exit 2; }}'


def _slots(plan: Plan) -> Iterator[str]:
    """The first of `gpus` as DeepSpeed's slots, in `slots`."""
    hardware = chosen_way(plan).hardware
    hint = (
        "launch.sh: DeepSpeed takes GPUs by different numbers, and $visible is ${!visible}: write numbers, or plan "
        "with --launcher torchrun"
    )
    yield "# Beside --include DeepSpeed ignores what is visible, so it is handed on here."
    yield 'slots=""'
    yield f'for gpu in "${{gpus[@]:0:{hardware.gpus_per_node}}}"; do'
    yield '  [[ "$gpu" =~ ^[0-9]+$ && ",$slots," != *",$gpu,"* ]] ||'
    yield f'    {{ echo "{hint}" >&2; exit 2; }}'
    yield '  slots="${slots:+$slots,}$gpu"'
    yield "done"
    if hardware.gpu.vendor in HIP:
        yield "unset HIP_VISIBLE_DEVICES"


def _torchrun(plan: Plan, target: Target) -> Iterator[str]:
    hardware = chosen_way(plan).hardware
    where = "--master_addr 127.0.0.1"
    if hardware.nodes > 1:
        where = f"{_node('node_rank', 'NODE_RANK')} {_node('master_addr', 'MASTER_ADDR')}"
    yield "# torchrun passes a SIGTERM on and kills the ranks 30 s after it, and it knows no SIGUSR1: a checkpoint that"
    yield "# takes longer is lost. `tightfit train --plan` starts the ranks itself and waits for them."
    yield "exec torchrun \\"
    yield f"  --nnodes {hardware.nodes} --nproc_per_node {hardware.gpus_per_node} {where} \\"
    yield f'  --master_port "${{MASTER_PORT:-{target.port}}}" \\'
    yield f'  {_WORKER} "$@"'


def _accelerate(plan: Plan, target: Target) -> Iterator[str]:
    way, ours = chosen_way(plan), plan.job.trainer == "tightfit"
    if not ours:
        yield '(( $# > 0 )) || { echo "launch.sh: name your training script: launch.sh train.py" >&2; exit 2; }'
    yield "exec accelerate launch \\"
    yield "  --config_file accelerate.yaml \\"
    if way.hardware.gpu.vendor != "cpu" and target.gpu_ids is not None:
        yield f"  --gpu_ids {','.join(map(str, gpu_ids_of(plan, target)))} \\"
    if way.hardware.nodes > 1:
        yield f"  {_node('machine_rank', 'NODE_RANK')} {_node('main_process_ip', 'MASTER_ADDR')} \\"
        if not way.levers.is_fsdp2:
            yield "  --deepspeed_multinode_launcher standard \\"
    yield f'  --main_process_port "${{MASTER_PORT:-{target.port}}}" \\'
    yield f'  {_WORKER} "$@"' if ours else '  "$@"'


def _llamafactory(plan: Plan, target: Target) -> Iterator[str]:
    if chosen_way(plan).hardware.nodes > 1:
        for name in ("NODE_RANK", "MASTER_ADDR"):
            yield f'export {name}="${{{name}:?set it for each node}}"'
    yield 'exec llamafactory-cli train llamafactory.yaml "$@"'


def _node(flag: str, variable: str) -> str:
    """A flag whose value differs from node to node, or is known on the cluster only."""
    return f'--{flag} "${{{variable}:?set it for each node}}"'
