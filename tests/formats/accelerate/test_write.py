"""accelerate's files: read by accelerate's own loader, and by its DeepSpeed and FSDP plugins."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

import warm_desk
from tightfit.formats.accelerate.check import LAYER_CLASSES
from tightfit.formats.accelerate.write import accelerate_notes, accelerate_yaml
from tightfit.formats.deepspeed.write import deepspeed_json
from tightfit.formats.target import Target
from tightfit.hardware.words import parse_hardware
from tightfit.job import Job
from tightfit.model.families import FAMILIES
from tightfit.planner.plan import Plan
from tightfit.types import Checkpointing, ConfigError, Levers, Lora

MakePlan = Callable[..., Plan]

NEW = Target()
FSDP2 = Levers(engine="fsdp2")

needs_train = pytest.mark.skipif(find_spec("accelerate") is None, reason="needs the [train] extra")

# What `accelerate launch` does with the file before it starts anything: load it, lay it over the flags, pass the
# result on in the environment; then what an Accelerator makes of that environment.
ASK = """
import json, os, sys, warnings
warnings.simplefilter("ignore")
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils import DeepSpeedPlugin, FullyShardedDataParallelPlugin
from accelerate.utils import launch
import torch, yaml
yaml.SafeLoader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # in Python alone it takes ten times as long
torch.cuda.device_count = lambda: 8
launch.is_port_in_use = lambda port: False  # other tests may be using it
answers, parser = [], launch_command_parser()
for path in json.loads(sys.argv[1]):
    try:
        config = load_config_from_file(path)
        kept = dict(os.environ)
        os.chdir(os.path.dirname(path))
        args, defaults, mixed = _validate_launch_command(parser.parse_args(["--config_file", path, "train.py"]))
        answer = {"type": config.distributed_type.value, "processes": args.num_processes, "gpu_ids": args.gpu_ids,
                  "port": args.main_process_port, "machines": args.num_machines, "mixed": config.mixed_precision}
        if args.use_deepspeed:
            fields = list(defaults.deepspeed_config) + (["mixed_precision"] if mixed else [])
            os.environ["ACCELERATE_CONFIG_DS_FIELDS"] = ",".join(fields)
            os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
            os.environ["ACCELERATE_DEEPSPEED_ZERO3_INIT"] = str(args.zero3_init_flag).lower()
            plugin = DeepSpeedPlugin(hf_ds_config=args.deepspeed_config_file)
            plugin.set_mixed_precision("no")
            answer |= {"stage": plugin.zero_stage, "init": plugin.zero3_init_flag,
                       "accumulation": plugin.gradient_accumulation_steps,
                       "bf16": plugin.deepspeed_config["bf16"]["enabled"],
                       "launcher": args.deepspeed_multinode_launcher}
        else:
            os.environ.update({k: v for k, v in launch.prepare_multi_gpu_env(args).items() if k.startswith("FSDP_")})
            plugin = FullyShardedDataParallelPlugin()
            answer |= {"version": plugin.fsdp_version, "reshard": plugin.reshard_after_forward,
                       "offload": type(plugin.cpu_offload).__name__, "wrap": plugin.transformer_cls_names_to_wrap,
                       "recompute": plugin.activation_checkpointing, "save": plugin.state_dict_type.name,
                       "once": plugin.cpu_ram_efficient_loading}
        answers.append(answer)
    except Exception as error:
        answers.append({"error": f"{type(error).__name__}: {error}"})
    finally:
        os.environ.clear()
        os.environ.update(kept)
print("FOUND " + json.dumps(answers))
"""


def ask(paths: list[str]) -> Any:
    done = warm_desk.python(ASK, json.dumps(paths), env=os.environ | {"DS_ACCELERATOR": "cpu"}, ranks=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.partition("FOUND ")[2].splitlines()[0])


def write_pair(plan: Plan, target: Target, folder: Path) -> Path:
    folder.mkdir()
    assert plan.chosen
    name = None
    if plan.chosen.levers.engine != "fsdp2":
        name = "deepspeed.json"
        (folder / name).write_text(deepspeed_json(plan, target))
    path = folder / "accelerate.yaml"
    path.write_text(accelerate_yaml(plan, target, name))
    return path


def expected(plan: Plan) -> dict[str, object]:
    way = plan.chosen
    assert way
    levers = way.levers
    common: dict[str, object] = {
        "processes": way.world,
        "port": 29500,
        "gpu_ids": "all",  # of the visible ones, so the user's CUDA_VISIBLE_DEVICES holds
        "machines": way.hardware.nodes,
    }
    if levers.engine == "fsdp2":
        return common | {
            "type": "FSDP",
            "mixed": "no" if levers.precision == "fp32" else levers.precision,
            "version": 2,
            "reshard": True,
            "offload": "CPUOffloadPolicy" if levers.offload_param == "cpu" else "OffloadPolicy",
            "wrap": ["LlamaDecoderLayer"],
            "recompute": levers.checkpointing.layers != 0,
            "save": "SHARDED_STATE_DICT",
            "once": levers.method != "qlora",
        }
    return common | {
        "type": "DEEPSPEED",
        "mixed": None,
        "stage": int(levers.engine[-1]),
        "init": levers.engine == "zero3" and levers.method != "qlora",
        "accumulation": levers.accumulation,
        "bf16": levers.precision == "bf16",
        "launcher": "standard" if way.hardware.nodes > 1 else None,
    }


@pytest.mark.thorough
@needs_train
def test_accelerate_takes_the_whole_grid(plans: tuple[Plan, ...], tmp_path: Path) -> None:
    asked = [plan for plan in plans if plan.chosen]
    paths = [write_pair(plan, NEW, tmp_path / str(number)) for number, plan in enumerate(asked)]
    wrong = write_pair(asked[0], NEW, tmp_path / "wrong")
    wrong.write_text(wrong.read_text() + "mixed_precision: bf16\n")
    unknown = write_pair(asked[0], NEW, tmp_path / "unknown")
    unknown.write_text(unknown.read_text() + "num_gpus: 2\n")
    *answers, refused, misspelt = ask([str(path) for path in (*paths, wrong, unknown)])
    assert "deepspeed_config_file" in refused["error"]
    assert "num_gpus" in misspelt["error"]
    assert answers == [expected(plan) for plan in asked]


def stacked(model_type: str) -> set[str]:
    """The classes of which transformers' modelling file of this family makes lists, read without importing it."""
    spec = find_spec("transformers")
    assert spec
    assert spec.submodule_search_locations
    family = model_type.removesuffix("_text")
    source = Path(spec.submodule_search_locations[0], "models", family, f"modeling_{family}.py").read_text()
    return set(re.findall(r"nn\.ModuleList\(\s*\[\s*(\w+)\(", source))


@needs_train
@pytest.mark.parametrize("model_type", sorted(FAMILIES))
def test_every_familys_layer_class_is_what_transformers_stacks(model_type: str) -> None:
    assert LAYER_CLASSES[model_type] in stacked(model_type)


def test_no_layer_class_is_of_a_family_that_is_gone() -> None:
    assert set(LAYER_CLASSES) <= set(FAMILIES)


# --- what is written ----------------------------------------------------------------------------


def read(plan: Plan, target: Target = NEW, file: str | None = None) -> dict[str, Any]:
    values: dict[str, Any] = yaml.safe_load(accelerate_yaml(plan, target, file))
    return values


def test_beside_a_deepspeed_file_nothing_stands_twice(make_plan: MakePlan) -> None:
    values = read(make_plan(Levers(engine="zero3", offload_optimizer="cpu")), file="deepspeed.json")
    assert values["deepspeed_config"] == {"deepspeed_config_file": "deepspeed.json", "zero3_init_flag": True}
    assert "mixed_precision" not in values


def test_chosen_gpus_and_port(make_plan: MakePlan) -> None:
    target = Target(gpu_ids=(1, 3), port=29511)
    values = read(make_plan(FSDP2), target)
    assert (values["gpu_ids"], values["main_process_port"], values["num_processes"]) == ("1,3", 29511, 2)
    assert "gpu_ids" not in read(make_plan(FSDP2)), "a number that nobody chose would overrule CUDA_VISIBLE_DEVICES"


def test_several_machines(make_plan: MakePlan) -> None:
    plan = make_plan(Levers(engine="zero3"), parse_hardware("2x4x80GB"))
    named = read(plan, Target(hostfile="big-1 slots=4\nbig-2 slots=4\n"), "deepspeed.json")
    assert (named["main_process_ip"], named["num_machines"], named["num_processes"]) == ("big-1", 2, 8)
    assert any("placeholder" in str(note) for note in accelerate_notes(plan, NEW))


def test_fp16_without_masters_trains_in_the_models_own_precision(make_plan: MakePlan) -> None:
    plan = make_plan(Levers(engine="fsdp2", master_weights=False))
    assert read(plan)["mixed_precision"] == "no"
    assert any("load the model in bf16" in str(note) for note in accelerate_notes(plan, NEW))


def test_some_layers_become_all_and_it_is_said(make_plan: MakePlan) -> None:
    plan = make_plan(Levers(engine="fsdp2", checkpointing=Checkpointing(layers=1)))
    assert read(plan)["fsdp_config"]["fsdp_activation_checkpointing"] is True
    assert any("all or none" in str(note) for note in accelerate_notes(plan, NEW))
    none = make_plan(Levers(engine="fsdp2", checkpointing=Checkpointing(layers=0)))
    assert read(none)["fsdp_config"]["fsdp_activation_checkpointing"] is False
    assert not any("all or none" in str(note) for note in accelerate_notes(none, NEW))


def test_layer_inputs_on_the_host(make_plan: MakePlan) -> None:
    plan = make_plan(Levers(engine="fsdp2", checkpointing=Checkpointing(layers=None, offload=True)))
    assert read(plan)["fsdp_config"]["fsdp_activation_checkpointing_offload"] is True


def test_a_low_loss_scale_that_accelerate_cannot_start_with_is_said(make_plan: MakePlan) -> None:
    levers = Levers(engine="fsdp2", precision="fp16")
    for tier, told in (("fp16_safe", True), ("standard", False), (None, False)):
        plan = make_plan(levers, job=Job(model="tiny_llama", tier=tier))
        assert any("loss scale" in str(note) for note in accelerate_notes(plan, NEW)) == told


def test_a_mamba_is_wrapped_by_its_own_layer(make_plan: MakePlan) -> None:
    plan = make_plan(FSDP2, job=Job(model="tiny_mamba"))
    assert read(plan)["fsdp_config"]["fsdp_transformer_layer_cls_to_wrap"] == "MambaBlock"


def test_experts_are_gathered_together_where_each_is_a_module(make_plan: MakePlan, tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config.write_text(json.dumps({"model_type": "mixtral", "vocab_size": 128, "num_key_value_heads": 4, **sizes}))
    plan = make_plan(Levers(engine="zero3"), job=Job(model=str(config)))
    old = read(plan, Target(transformers_version="4.51.3"), "deepspeed.json")["deepspeed_config"]
    assert old["deepspeed_moe_layer_cls_names"] == "MixtralSparseMoeBlock"
    assert "deepspeed_moe_layer_cls_names" not in read(plan, NEW, "deepspeed.json")["deepspeed_config"]


def test_a_4bit_model_is_loaded_whole(make_plan: MakePlan) -> None:
    plan = make_plan(Levers(engine="zero3", method="qlora", lora=Lora()))
    assert read(plan, file="deepspeed.json")["deepspeed_config"]["zero3_init_flag"] is False
    assert any("zero3_init_flag" in str(note) for note in accelerate_notes(plan, NEW))


def test_the_deepspeed_file_belongs_to_deepspeeds_engines(make_plan: MakePlan) -> None:
    with pytest.raises(ConfigError, match="fsdp2"):
        accelerate_yaml(make_plan(FSDP2), NEW, "deepspeed.json")
    with pytest.raises(ConfigError, match="zero2"):
        accelerate_yaml(make_plan(Levers(engine="zero2")), NEW, None)


def test_the_same_plan_gives_the_same_bytes(make_plan: MakePlan) -> None:
    first, again = (accelerate_yaml(make_plan(FSDP2), NEW, None) for _ in range(2))
    assert first == again
    assert first.endswith("\n")
