"""LLaMA-Factory's YAML."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any

from tightfit.formats.dialect import Dialect, Launcher, PlanFile, Variable
from tightfit.formats.huggingface.check import DEEPSPEED_AT, IN_ANY_TRAINER
from tightfit.formats.huggingface.dialect import known as known_arguments
from tightfit.formats.launch.environment import HIP
from tightfit.formats.llamafactory.check import RULES, check_llamafactory
from tightfit.formats.llamafactory.keys import KNOWN
from tightfit.formats.llamafactory.write import (
    dataset_info_json,
    llamafactory_notes,
    llamafactory_wanted,
    llamafactory_yaml,
    names_its_data,
)
from tightfit.formats.rules import BESIDE_DEEPSPEED
from tightfit.formats.target import Target
from tightfit.formats.worker.write import deepspeed_file_of, require_way
from tightfit.inputs.versions import release
from tightfit.job.known import KnownConfig, word
from tightfit.messages import Message, text
from tightfit.planner.plan import Plan


def known(values: Mapping[str, Any]) -> KnownConfig:
    said = known_arguments(values)
    on = values.get("gradient_checkpointing")
    if on is None and "finetuning_type" in values:
        on = values.get("disable_gradient_checkpointing") is not True
    method = word(values.get("finetuning_type"))
    if method == "lora" and values.get("quantization_bit"):
        method = "qlora"
    liger = values.get("enable_liger_kernel", values.get("use_liger_kernel"))
    return replace(
        said,
        method=method if method in ("full", "lora", "qlora") else None,
        checkpointing=on if isinstance(on, bool) else None,
        attention=word(values.get("flash_attn")),
        loss="fused" if liger is True else None,
    )


FILE = "llamafactory.yaml"


def write(plan: Plan, target: Target, files: Collection[str]) -> str | None:
    return llamafactory_yaml(plan, target, deepspeed_file_of(plan))


def write_dataset_info(plan: Plan, target: Target, files: Collection[str]) -> str | None:
    return dataset_info_json(plan) if FILE in files and not names_its_data(plan, target) else None


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


DIALECT = Dialect(
    name="llamafactory",
    trainer="llamafactory",
    title=Message("llamafactory.title"),
    one=Message("llamafactory.one"),
    keys=KNOWN,
    telling=("finetuning_type", "template", "cutoff_len", "stage", "dataset", "model_name_or_path"),
    extends="huggingface",
    is_mixed=True,
    rules=BESIDE_DEEPSPEED | RULES | IN_ANY_TRAINER,
    check=check_llamafactory,
    known=known,
    deepspeed_at=DEEPSPEED_AT,
    files=(
        PlanFile(
            name=FILE,
            what=Message("llamafactory.file"),
            write=write,
            notes=llamafactory_notes,
            version=lambda plan, target: llamafactory_wanted(target),
        ),
        PlanFile(name="dataset_info.json", what=Message("llamafactory.dataset-info"), write=write_dataset_info),
    ),
    launcher=Launcher(
        program="llamafactory-cli",
        reads=("deepspeed.json", FILE, "dataset_info.json"),
        needs=FILE,
        command=llamafactory_command,
        variables=llamafactory_variables,
    ),
)
