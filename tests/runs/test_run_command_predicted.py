"""`tightfit run`: what it says of a command's memory before the start, and what it does not pretend to know."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tightfit.hardware.words import parse_hardware
from tightfit.runs.external.command import recognise
from tightfit.runs.external.config import read_training
from tightfit.start.external import KnownTraining, Planner, prediction

TRAINER = "args, = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()\n"
SCRIPT = "t.py --model_name_or_path Qwen/Qwen2.5-7B --max_length 1024 --per_device_train_batch_size 1"
LORA = {
    "model_name_or_path": "Qwen/Qwen2.5-7B",
    "stage": "sft",
    "do_train": True,
    "finetuning_type": "lora",
    "dataset": "mine",
    "template": "qwen",
    "per_device_train_batch_size": 1,
    "bf16": True,
}
FSDP2 = {"distributed_type": "FSDP", "mixed_precision": "bf16", "num_processes": 8, "fsdp_config": {"fsdp_version": 2}}
PLAIN = {"distributed_type": "MULTI_GPU", "mixed_precision": "bf16", "num_processes": 4}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("CUDA_VISIBLE_DEVICES", "NPROC_PER_NODE", "NNODES"):
        monkeypatch.delenv(name, raising=False)
    put("t.py", TRAINER)
    put("x.yaml", LORA)
    return tmp_path


def put(name: str, content: str | dict[str, Any]) -> None:
    path = Path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(content, dict):
        content = json.dumps(content) if path.suffix == ".json" else yaml.safe_dump(content)
    path.write_text(content, encoding="utf-8")


def known(line: str, gpus: str = "8x80GB", **said: Any) -> KnownTraining | str:
    planner = Planner(hardware=parse_hardware(gpus), **said)
    return planner.known(read_training(recognise(tuple(line.split()))))


def priced(line: str, gpus: str = "8x80GB", **said: Any) -> KnownTraining:
    found = known(line, gpus, **said)
    assert isinstance(found, KnownTraining), found
    return found


# --- which ranks --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "machines", "on_each"),
    [
        ("llamafactory-cli train x.yaml", 1, 8),
        ("env CUDA_VISIBLE_DEVICES=0,3 llamafactory-cli train x.yaml", 1, 2),
        ("env NPROC_PER_NODE=4 llamafactory-cli train x.yaml", 1, 4),
        ("env NNODES=2 NODE_RANK=0 llamafactory-cli train x.yaml", 2, 8),
        ("torchrun --nproc_per_node 4 --nnodes 2 src/train.py x.yaml", 2, 4),
        ("torchrun --nproc-per-node=gpu src/train.py x.yaml", 1, 8),
        ("python src/train.py x.yaml", 1, 1),
        ("accelerate launch --config_file plain.yaml src/train.py x.yaml", 1, 4),
        ("accelerate launch --num_processes 16 --num_machines 2 src/train.py x.yaml", 2, 8),
        ("deepspeed --num_nodes 2 --num_gpus 6 src/train.py x.yaml", 2, 6),
        ("deepspeed --include a:0,1@b:0,1 src/train.py x.yaml", 2, 2),
        ("deepspeed --hostfile hosts src/train.py x.yaml", 3, 4),
    ],
)
def test_as_many_ranks_as_the_launcher_starts(here: Path, line: str, machines: int, on_each: int) -> None:
    put("plain.yaml", PLAIN)
    put("src/train.py", "")
    put("hosts", "# ours\na slots=4\nb slots=4\nc slots=8\n")
    hardware = priced(line).hardware
    assert (hardware.nodes, hardware.gpus_per_node) == (machines, on_each)


def test_variables_of_the_shell_count_too(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NPROC_PER_NODE", "2")
    assert priced("llamafactory-cli train x.yaml").hardware.world == 2
    assert priced("env NPROC_PER_NODE=3 llamafactory-cli train x.yaml").hardware.world == 3
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    assert "hides every GPU" in str(known("llamafactory-cli train x.yaml"))


# --- accelerate ---------------------------------------------------------------------------------


def test_accelerates_precision_is_that_of_a_flag(here: Path) -> None:
    put("plain.yaml", PLAIN)
    put("no.yaml", PLAIN | {"mixed_precision": "no"})
    flag = priced(f"torchrun --nproc_per_node 4 {SCRIPT} --bf16 True")
    for line in ("--config_file plain.yaml", "--config_file no.yaml --mixed_precision bf16"):
        found = priced(f"accelerate launch {line} {SCRIPT}")
        assert found.levers == flag.levers
        assert found.priced.footprint == flag.priced.footprint
    assert priced(f"accelerate launch --config_file no.yaml {SCRIPT}").levers.precision == "fp32"
    put("y.yaml", {key: value for key, value in LORA.items() if key != "bf16"} | {"finetuning_type": "full"})
    put("src/train.py", "")
    assert priced("accelerate launch --config_file plain.yaml src/train.py y.yaml").levers.precision == "bf16"


def test_a_block_of_deepspeed_in_accelerates_file_shards_llamafactory_too(here: Path) -> None:
    put("src/train.py", "")
    block = {"zero_stage": 3, "offload_optimizer_device": "cpu"}
    put("ds.yaml", PLAIN | {"distributed_type": "DEEPSPEED", "deepspeed_config": block})
    levers = priced("accelerate launch --config_file ds.yaml src/train.py x.yaml").levers
    assert (levers.engine, levers.offload_optimizer) == ("zero3", "cpu")


# --- what is not known --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (
            "accelerate launch --config_file fsdp.yaml src/train.py x.yaml",
            "FSDP as accelerate sets it up is not priced",
        ),
        (f"accelerate launch --use_fsdp {SCRIPT}", "FSDP as accelerate sets it up is not priced"),
        (f"torchrun {SCRIPT} --fsdp full_shard", "FSDP as accelerate sets it up is not priced"),
        (f"torchrun {SCRIPT.replace('t.py', 'dpo.py')}", "DPOTrainer holds more than one text and one model"),
        (f"torchrun {SCRIPT.replace('t.py', 'sft.py')}", "TRL chooses the dtype"),
        (f"torchrun {SCRIPT} --optim galore_adamw", "optim galore_adamw is not priced"),
        (f"python {SCRIPT}", "start it with torchrun --nproc_per_node 8"),
        ("llamafactory-cli train dpo.yaml", "stage dpo in dpo.yaml is not priced yet"),
        ("llamafactory-cli train merge.yaml", "merge.yaml merges or exports a model"),
        ("llamafactory-cli train infer.yaml", "infer.yaml is for inference"),
        ("llamafactory-cli train predict.yaml", "predict.yaml evaluates and does not train"),
        (f"accelerate launch --use_deepspeed --zero_stage 3 {SCRIPT}", "put them into a file"),
    ],
)
def test_what_is_not_priced_is_not_predicted(here: Path, line: str, reason: str) -> None:
    put("fsdp.yaml", FSDP2)
    put("src/train.py", "")
    put("dpo.py", TRAINER + "from trl import DPOTrainer\n")
    put("sft.py", TRAINER + "from trl import SFTTrainer\n")
    put("dpo.yaml", LORA | {"stage": "dpo"})
    model = {"model_name_or_path": "Qwen/Qwen2.5-7B", "template": "qwen"}
    put("merge.yaml", model | {"export_dir": "merged", "adapter_name_or_path": "saves"})
    put("infer.yaml", model | {"infer_backend": "huggingface"})
    put("predict.yaml", LORA | {"do_train": False, "do_predict": True})
    found = known(line)
    assert isinstance(found, str)
    assert found.startswith("nothing is predicted: ")
    assert reason in found


# --- scripts with flags of their own --------------------------------------------------------------

ZERO3 = {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "zero_optimization": {"stage": 3}}


def test_a_preset_among_the_scripts_flags_is_its_model(here: Path) -> None:
    put("own.py", "import deepspeed\n")
    put("ds.json", ZERO3)
    line = "deepspeed --num_gpus=4 own.py --preset 7b_mamba --deepspeed_config ds.json"
    assert "add --seq before the --" in str(known(line))
    found = priced(f"{line} --max_seq_length 256")
    assert (found.levers.engine, found.levers.sequence, found.hardware.world) == ("zero3", 256, 4)
    assert "mamba_ssm" in prediction(found)
    assert priced(line, sequence=256).priced.footprint == found.priced.footprint


def test_what_a_config_of_the_script_hints_at_is_enough_for_a_prediction(here: Path) -> None:
    put("own.py", "import deepspeed\n")
    put("ds.json", ZERO3)
    put("config.json", {"model": {"name": "x"}, "training": {"batch_size": 2, "max_length": 512}})
    line = "deepspeed --num_gpus=4 own.py --config config.json"
    assert "add --model before the --" in str(known(line))
    found = priced(line, model="gemma-3-27b")
    assert (found.levers.sequence, found.levers.micro_batch) == (512, 2)
    put("config.json", {"model_name": "gemma-3-27b", "training": {"max_length": 512}})
    assert "add --micro-batch before the --" in str(known(line))
    assert priced(f"{line} --deepspeed ds.json").levers.engine == "zero3"
    assert priced(line, micro_batch=2).priced.footprint == found.priced.footprint


def test_a_deepspeed_file_may_be_called_config(here: Path) -> None:
    put("own.py", "import deepspeed\n")
    put("ds.json", ZERO3)
    line = "deepspeed --num_gpus=4 own.py --config ds.json --model_name Qwen/Qwen2.5-7B --seq_length 512"
    assert priced(line).levers.engine == "zero3"


@pytest.mark.parametrize(
    ("line", "gpus", "warned"),
    [
        ("python own.py --deepspeed ds.json", "4x80GB", True),
        ("env CUDA_VISIBLE_DEVICES=1 python own.py --deepspeed ds.json", "4x80GB", False),
        ("python own.py --deepspeed ds.json", "1x80GB", False),
        ("python spawns.py --deepspeed ds.json", "4x80GB", False),
        ("deepspeed own.py --deepspeed ds.json", "4x80GB", False),
        ("python own.py", "4x80GB", False),
    ],
)
def test_plain_python_with_a_deepspeed_file_is_warned_of(here: Path, line: str, gpus: str, warned: bool) -> None:
    put("own.py", "import deepspeed\n")
    put("spawns.py", "import torch.multiprocessing as mp\nmp.spawn(main)\n")
    put("ds.json", ZERO3)
    said = Planner(hardware=parse_hardware(gpus)).warning(read_training(recognise(tuple(line.split()))))
    assert (said is not None) == warned
    if said is not None:
        assert "3 of 4 GPUs stay idle" in said
        assert "`deepspeed --num_gpus 4 own.py --deepspeed ds.json`" in said
