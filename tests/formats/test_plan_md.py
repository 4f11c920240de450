"""PLAN.md and the set of files: what was chosen, why, what is left out, and the same bytes every time."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tightfit.formats.launch.environment import environment
from tightfit.formats.plan_folder import write
from tightfit.formats.render import render
from tightfit.formats.target import Target
from tightfit.hardware.words import parse_hardware
from tightfit.job import Data, Job, Limits
from tightfit.model.load import load_model
from tightfit.planner import plan as planned
from tightfit.planner import plan_tier
from tightfit.planner.plan import Plan
from tightfit.types import Checkpointing, ConfigError, Levers, Lora

MakePlan = Callable[..., Plan]

ZERO3 = Levers(engine="zero3", offload_optimizer="cpu", checkpointing=Checkpointing(layers=10))


@pytest.fixture
def plan_of(make_plan: MakePlan) -> MakePlan:
    def make(levers: Levers = ZERO3, gpus: str = "4xRTX4090", **job: Any) -> Plan:
        plan = make_plan(levers, parse_hardware(gpus), Job(**({"model": "qwen2.5-7b"} | job)))
        assert plan.chosen is not None
        faster = replace(
            plan.chosen,
            levers=replace(levers, engine="zero2", offload_optimizer="none"),
            fits=False,
            because=("it needs 2.1 GiB more than the card has at the optimizer step",),
        )
        return replace(plan, alternatives=(faster,), considered=2345, because=("ZeRO-2 does not fit",), hours=3.25)

    return make


def text_of(plan: Plan, target: Target | None = None) -> str:
    return render(plan, target or Target())["PLAN.md"]


def section(text: str, title: str) -> str:
    return text.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


# --- the page -----------------------------------------------------------------------------------


def test_the_page_says_what_was_chosen_and_what_else_there_was(plan_of: MakePlan) -> None:
    plan = plan_of()
    text = text_of(plan)
    assert plan.chosen is not None
    assert text.startswith("# qwen2.5-7b on 4 × RTX 4090: ZeRO-3, optimizer on CPU\n")
    assert f"- GPU: {plan.chosen.footprint.gpu.required_bytes / 2**30:.1f} of 24.0 GiB on each" in text
    assert "- Time to finish: about 3.2 hours" in text
    assert section(text, "Why this one").strip() == "- ZeRO-2 does not fit."
    rows = [line for line in section(text, "What else there was").splitlines() if line.startswith("| ")]
    assert [row.split(" | ")[1] for row in rows[1:]] == ["ZeRO-3, optimizer on CPU", "ZeRO-2"]
    assert [row.endswith("| yes |") for row in rows[1:]] == [True, False]
    assert "2,345 ways were compared" in text
    assert "- ZeRO-2: It needs 2.1 GiB more than the card has at the optimizer step." in text


def test_every_variable_is_there_with_its_reason(plan_of: MakePlan) -> None:
    plan = plan_of()
    table = section(text_of(plan), "Environment variables")
    for variable in environment(plan, Target()):
        shown = "*left out*" if variable.value is None else f"`{variable.value}`"
        assert f"| `{variable.name}` | {shown} | {variable.reason} |" in table


def test_costly_changes_stand_out(plan_of: MakePlan) -> None:
    plan = plan_of()
    assert plan.chosen is not None
    assert "Nothing of this changes the result of the training" in text_of(plan)
    changed = replace(plan, chosen=replace(plan.chosen, changes=("sequences are cut at 512 tokens instead of 2048",)))
    text = text_of(changed)
    assert "- **Sequences are cut at 512 tokens instead of 2048.**" in section(
        text, "It changes the result of the training"
    )
    assert "Nothing of this changes" not in text


@pytest.mark.parametrize(
    ("engine", "asked", "says"),
    [
        ("zero0", {"optimizer": "adamw8bit"}, "The optimizer's states have 8 bits instead of 32"),
        ("stream", {"states": "8bit"}, "The optimizer's moments on the host are kept in 8bit instead of fp32"),
        ("zero2", {"master_weights": False}, "Pure bf16: updates below its precision are lost"),
        ("stream", {"master_weights": False}, "Pure bf16: no fp32 copies of the weights are kept, and each update"),
        ("ddp", {"compress": "powersgd"}, "What GPUs send each other is compressed (powersgd)"),
    ],
)
def test_what_was_asked_for_and_changes_the_result_is_named(
    engine: Any, asked: dict[str, Any], says: str, plan_of: MakePlan
) -> None:
    plan = plan_of(replace(Levers(engine=engine), **asked), gpus="2x80GB", model="tiny_llama", **asked)
    text = text_of(plan)
    assert "Nothing of this changes" not in text
    changed = section(text, "It changes the result of the training")
    assert f"- **{says}" in changed
    assert "all else that was chosen is only how" in changed
    assert plan.chosen is not None
    both = text_of(replace(plan, chosen=replace(plan.chosen, changes=("sequences are cut at 512 tokens",))))
    changed = section(both, "It changes the result of the training")
    assert changed.index("You allowed these") < changed.index("cut at 512") < changed.index("You asked for these:")
    assert f"- **{says}" in changed
    assert "all else that was chosen is only how" not in changed


def test_what_was_never_run_is_said(plan_of: MakePlan) -> None:
    assert "What we never ran" not in text_of(plan_of())
    plan = replace(plan_of(gpus="2x4xRTX4090"), unproven=("several nodes were rendered, never run by us",))
    assert "- Several nodes were rendered, never run by us." in section(text_of(plan), "What we never ran")


def test_tables_are_tables(plan_of: MakePlan) -> None:
    text = text_of(plan_of(gpus="2x4xRTX4090"))
    blocks = re.findall(r"(?:^\|.*\n)+", text, flags=re.MULTILINE)
    assert len(blocks) == 3
    for block in blocks:
        widths = {len(re.findall(r"(?<!\\)\|", line)) for line in block.splitlines()}
        assert len(widths) == 1, block


# --- the set of files ---------------------------------------------------------------------------


TRAINED = {
    "tightfit": {"worker.json", "deepspeed.json"},
    "llamafactory": {"llamafactory.yaml", "dataset_info.json", "deepspeed.json"},
    "trainer": {"training_args.json", "accelerate.yaml", "deepspeed.json"},
}


@pytest.mark.parametrize("trainer", TRAINED)
def test_a_plan_has_the_files_of_its_trainer_and_no_others(trainer: str, plan_of: MakePlan) -> None:
    """What another trainer would hold in memory is another plan, whose bytes are not those that were promised."""
    files = render(plan_of(replace(ZERO3, checkpointing=Checkpointing(layers=None)), trainer=trainer), Target())
    assert set(files) == TRAINED[trainer] | {"launch.sh", "PLAN.md"}
    listed = set(re.findall(r"^\| `([^`]+)` \| ", section(files["PLAN.md"], "The files"), flags=re.MULTILINE))
    assert listed == set(files)
    assert ("`--for llamafactory`" in files["PLAN.md"]) is (trainer == "tightfit")


def test_the_launcher_has_the_file_that_it_starts_from(plan_of: MakePlan) -> None:
    assert "accelerate.yaml" in render(plan_of(), Target(launcher="accelerate"))


def test_several_nodes_have_a_hostfile_and_a_batch_file(plan_of: MakePlan) -> None:
    files = render(plan_of(gpus="2x4xRTX4090"), Target())
    assert {"hostfile", "slurm.sbatch"} <= set(files)
    assert files["hostfile"].endswith("node-1 slots=4\nnode-2 slots=4\n")
    assert "placeholders" in files["PLAN.md"]
    named = render(plan_of(gpus="2x4xRTX4090"), Target(hostfile="a slots=8\nb slots=8\nc slots=8"))
    assert named["hostfile"] == "a slots=8\nb slots=8\n"
    assert "placeholders" not in named["PLAN.md"].partition("## The files")[0]


def test_fsdp2_has_no_deepspeed_file(plan_of: MakePlan) -> None:
    files = render(plan_of(Levers(engine="fsdp2"), "8x80GB"), Target())
    assert set(files) == {"worker.json", "launch.sh", "PLAN.md"}
    assert "torchrun" in files["launch.sh"]


def test_what_a_trainer_cannot_do_is_refused(plan_of: MakePlan) -> None:
    with pytest.raises(ConfigError, match="no Mamba kernels"):
        render(plan_of(Levers(engine="zero3"), model="tiny_mamba", trainer="llamafactory"), Target())


def test_nothing_is_rendered_for_a_plan_that_does_not_fit(plan_of: MakePlan) -> None:
    with pytest.raises(ConfigError, match="nothing that was allowed fits"):
        render(replace(plan_of(), chosen=None), Target())


def test_the_notes_dcu_situation(plan_of: MakePlan) -> None:
    lora = Levers(engine="zero3", method="lora", lora=Lora(), deepspeed_version="0.14.2", sequence=1024)
    plan = plan_of(lora, "8xK100-64GB", model="qwen2.5-32b", method="lora", trainer="llamafactory")
    named = replace(plan, job=replace(plan.job, model="deepseek-ai/DeepSeek-R1-Distill-Qwen-32B"))
    target = Target(
        deepspeed_version="0.14.2",
        llamafactory_version="0.9.2",
        transformers_version="4.49.0",
    )
    files = render(named, target)
    assert "template: deepseek3\n" in files["llamafactory.yaml"]
    assert "expandable_segments" not in files["launch.sh"]
    assert "exec llamafactory-cli train llamafactory.yaml" in files["launch.sh"]


@pytest.mark.thorough
def test_every_plan_of_the_grid_renders_twice_alike(plans: tuple[Plan, ...]) -> None:
    rendered = 0
    for plan in plans:
        assert plan.chosen is not None
        try:
            files = render(plan, Target())
        except ConfigError:  # what DeepSpeed itself would refuse
            continue
        rendered += 1
        assert rendered % 5 or render(plan, Target()) == files
        assert all(text.endswith("\n") and not text.endswith("\n\n") for text in files.values())
        assert not re.search(r"\d{4}-\d\d-\d\d|/root|/home|/tmp", files["PLAN.md"])
    assert rendered > 0.8 * len(plans)


@pytest.mark.thorough
def test_another_process_renders_the_same_bytes(tmp_path: Path) -> None:
    """Nothing hangs on the order of a set: two processes with different hash seeds agree."""
    script = """
import sys
from tightfit.hardware.words import parse_hardware
from tightfit.model.load import load_model
from tightfit.job import Job
from tightfit.memory import estimate
from tightfit.planner.plan import Plan, Way
from tightfit.formats.render import render
from tightfit.formats.target import Target
from tightfit.types import Levers, Pace
shape, hardware, levers = load_model("qwen2.5-7b"), parse_hardware("2x4xRTX4090"), Levers(engine="zero3")
way = Way(shape=shape, levers=levers, hardware=hardware, footprint=estimate(shape, levers, 8, hardware),
          pace=Pace(step_s=1.0, tokens_per_s=1.0, causes={}), fits=True, gpu_limit_bytes=24 * 2**30)
plan = Plan(job=Job(model="qwen2.5-7b"), shape=shape, hardware=hardware, effective_batch=8, chosen=way,
            alternatives=(), considered=1, search_s=0.0, because=())
for name, text in render(plan, Target()).items():
    print(name, text)
assert not {"torch", "deepspeed", "transformers", "accelerate"} & set(sys.modules)
"""
    outputs = []
    for seed in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-c", script],
            capture_output=True,
            text=True,
            check=False,
            env={"PYTHONHASHSEED": seed, "HOME": str(tmp_path)},
        )
        assert done.returncode == 0, done.stderr
        outputs.append(done.stdout)
    assert outputs[0] == outputs[1]


def test_what_is_written_is_what_was_rendered(plan_of: MakePlan, tmp_path: Path) -> None:
    files = render(plan_of(data=Data(path="données.jsonl")), Target())
    paths = write(files, tmp_path / "plan", force=False)
    assert {path.name: path.read_bytes().decode() for path in paths} == files
    assert {path.name for path in (tmp_path / "plan").iterdir()} == set(files)


# --- tiers, time, versions ----------------------------------------------------------------------


def tier_plan(name: str, **limits: Any) -> Plan:
    job = Job(model="tiny_llama", limits=Limits(**limits))
    answer = plan_tier(name, job, load_model("tiny_llama"), parse_hardware("2xRTX4090"), frozenset())
    assert answer.plan is not None
    assert answer.costs
    return answer.plan


@pytest.mark.thorough
def test_what_a_tier_changes_is_said_in_every_file_that_people_read() -> None:
    plan = tier_plan("extreme")
    files = render(plan, Target())
    text = files["PLAN.md"]
    assert "- Tier: extreme (ZeRO-3 with everything on the host" in text
    assert "Nothing of this changes" not in text
    changed = section(text, "It changes the result of the training")
    assert "The tier extreme brings these where you said nothing:" in changed
    for cost in ("Sequences of 512 tokens instead of 2048", "fp16 instead of bf16", "An effective batch of 2"):
        assert f"- **{cost}.**" in changed
    worker = json.loads(files["worker.json"])
    assert worker["tier"] == "extreme"
    assert worker["changes"] == [
        "sequences of 512 tokens instead of 2048",
        "fp16 instead of bf16",
        "an effective batch of 2",
    ]


@pytest.mark.thorough
def test_a_tier_beside_allowed_changes_does_not_claim_them_all() -> None:
    assert ", or you allowed them and without them nothing fits:" in text_of(tier_plan("extreme", allow=("lora",)))


@pytest.mark.parametrize(("tier", "power"), [("extreme", 8), ("fp16_safe", 8), ("standard", 12), (None, 12)])
def test_tiers_that_promise_a_low_loss_scale_have_one(make_plan: MakePlan, tier: str | None, power: int) -> None:
    plan = make_plan(Levers(engine="zero3", precision="fp16"), job=Job(model="tiny_llama", tier=tier))  # type: ignore[arg-type]
    written = json.loads(render(plan, Target())["deepspeed.json"])
    assert written["fp16"]["initial_scale_power"] == power


@pytest.mark.thorough
def test_the_real_tiers_reach_the_deepspeed_file() -> None:
    for name in ("extreme", "fp16_safe"):
        fp16 = json.loads(render(tier_plan(name), Target())["deepspeed.json"])["fp16"]
        assert (fp16["enabled"], fp16["initial_scale_power"]) == (True, 8)


@pytest.mark.thorough
def test_nothing_is_said_twice() -> None:
    job = Job(model="3b_mamba", limits=Limits(margin=0.05))
    text = text_of(planned(job, load_model("3b_mamba"), parse_hardware("4x24GB")))
    lines = [line for line in text.splitlines() if line.startswith("- ")]
    assert len(lines) == len(set(lines))
    assumed = section(text, "What was assumed")
    assert "- The shape of state-spaces/mamba-2.8b-hf." in assumed
    assert "tensors can use" in assumed
    assert "No rates of the 24GB card are known" in assumed
    for reason in ("Needs ", "layers recompute", "fused loss", "Of each step", "The peak is"):
        assert reason not in assumed
    assert "- Needs " in section(text, "Why this one")


def test_the_page_says_how_to_start_the_worker(plan_of: MakePlan) -> None:
    assert "`tightfit train --plan`" in section(text_of(plan_of()), "How to start it")
    other = text_of(plan_of(trainer="llamafactory"))
    assert "tightfit train" not in section(other, "How to start it")


@pytest.mark.parametrize(
    ("timeout", "said"),
    [
        (None, None),
        ("4h", None),
        ("1h", "cuts the training off at about 31% of its steps"),
        ("1m", "cuts the training off at less than 1% of its steps"),
    ],
)
def test_a_time_limit_that_is_too_short_is_said(plan_of: MakePlan, timeout: str | None, said: str | None) -> None:
    head = text_of(plan_of(timeout=timeout)).partition("\n## ")[0]
    assert ("Time limit" in head) == (said is not None)
    assert said is None or said in head
    if said is not None:
        factory = text_of(plan_of(timeout=timeout, trainer="llamafactory")).partition("\n## ")[0]
        assert "LLaMA-Factory does not keep it" in factory
        assert "cuts the training off" not in factory


def test_a_minute_is_one_minute(plan_of: MakePlan) -> None:
    assert "- Time to finish: about 1 minute\n" in text_of(replace(plan_of(), hours=0.01))


def versions(plan: Plan, target: Target) -> str:
    return section(text_of(plan, target), "The files").partition("Which versions they are for:")[2]


@pytest.mark.thorough
def test_each_file_names_its_version(plan_of: MakePlan) -> None:
    lora = Levers(engine="zero3", method="lora", lora=Lora(), deepspeed_version="0.14.2")
    old = Target(deepspeed_version="0.14.2", llamafactory_version="0.9.2")
    mine, theirs = (
        plan_of(lora, "8xK100-64GB", method="lora", trainer=trainer) for trainer in ("trainer", "llamafactory")
    )
    apart = versions(mine, old)
    assert "- `deepspeed.json`: DeepSpeed 0.14.2." in apart
    assert "- `training_args.json`: transformers 5.22.2, which wants a newer PyTorch than the 2.4" in apart
    assert "`--transformers-version`" in apart
    assert "- `training_args.json`: transformers 4.49.0.\n" in versions(
        mine, replace(old, transformers_version="4.49.0")
    )
    assert "- `llamafactory.yaml`: LLaMA-Factory 0.9.2, which takes transformers up to 4.49.0" in versions(theirs, old)
    assert "LLaMA-Factory" not in versions(plan_of(Levers(engine="fsdp2")), Target())
