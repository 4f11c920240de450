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

from tightfit.formats.dialect import Variable
from tightfit.formats.launch.environment import HIP, environment, gpu_ids_of, launcher_of, obeys_visible
from tightfit.formats.llamafactory.write import DATASET_INFO, PLACEHOLDER_DATA, listed, names_a_file
from tightfit.formats.registry import launchers
from tightfit.formats.target import Target
from tightfit.formats.worker.write import chosen_way, untrained
from tightfit.planner.plan import Plan
from tightfit.priced import strategy_name
from tightfit.types import ConfigError


def launch_sh(plan: Plan, target: Target, files: Collection[str]) -> str:
    """The script that starts the ranks with the right environment. `files` are those that lie beside it."""
    way, launcher = chosen_way(plan), launcher_of(plan, target)
    needed = launchers()[launcher].needs
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
        *(_visible(plan) if obeys_visible(plan, target, launcher) else ()),
    ]
    if several and launcher == "deepspeed":
        lines += _deepspeed_env(environment(plan, target))
    lines += ["", *launchers()[launcher].command(plan, target)]
    return "\n".join(lines) + "\n"


def _before(plan: Plan) -> tuple[str, ...]:
    """On what our worker would train, where that is not what its reader expects."""
    return untrained(plan.job) if plan.job.trainer == "tightfit" else ()


def preflight(plan: Plan, launcher: str, files: Collection[str]) -> Iterator[str]:
    """What is cheaper to ask now than to find out later."""
    used = [name for name in launchers()[launcher].reads if name in files]
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
    program = launchers()[launcher].program
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


def _several_nodes(launcher: str) -> Iterator[str]:
    if launcher == "deepspeed":
        yield "# Run it on one node: DeepSpeed reaches the others by ssh (pdsh), in this same folder on shared disk."
    else:
        yield "# Run it on every node, with NODE_RANK from 0 up and MASTER_ADDR the name of node 0."


def _deepspeed_env(variables: Iterable[Variable]) -> Iterator[str]:
    names = "|".join(variable.name for variable in variables if variable.value is not None)
    yield ""
    yield "# DeepSpeed sends other nodes only the variables that it finds in this file."
    yield f"env | grep -E '^({names})=' > .deepspeed_env"


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
