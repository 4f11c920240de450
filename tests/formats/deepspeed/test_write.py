"""DeepSpeed's files: accepted by DeepSpeed itself, old and new, and holding the numbers that were priced."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import warm_desk
from tightfit.formats.deepspeed.keys import ARRIVED, DEFAULTS, GONE, MOVED, NEWEST, OLDEST, knows
from tightfit.formats.deepspeed.read import read_deepspeed, to_levers
from tightfit.formats.deepspeed.write import deepspeed_json, deepspeed_notes
from tightfit.formats.target import Target
from tightfit.hardware.words import parse_hardware
from tightfit.inputs.flags import released_at_once
from tightfit.job import Job, Machine
from tightfit.memory import estimate
from tightfit.planner.plan import Plan
from tightfit.types import Buckets, ConfigError, Levers

MakePlan = Callable[..., Plan]

VERSIONS = (
    "0.14.0",
    "0.14.2",
    "0.15.4",
    "0.16.9",
    "0.17.0",
    "0.17.6",
    "0.18.2",
    "0.19.0",
    "0.19.3",
    "0.19.5",
    "0.19.8",
)

NEW = Target(deepspeed_version=NEWEST)
DCU = Target(deepspeed_version="0.14.2+das.opt1.dtk25041")

# Asks the real config class about many files in one process; the number of ranks is what a launcher would set up.
ASK = """
import json, logging, sys
logging.disable(logging.CRITICAL)
if sys.argv[1] == "old":
    import numpy, torch.distributed.elastic.agent.server.api as api
    numpy.BUFSIZE = 8192
    api._get_socket_with_port = None
import deepspeed
from deepspeed.runtime.config import DeepSpeedConfig
answers = []
for path, world in json.loads(sys.argv[2]):
    deepspeed.comm.get_rank = lambda group=None: 0
    deepspeed.comm.get_world_size = lambda group=None: world
    try:
        c = DeepSpeedConfig(path)
        z = c.zero_config
        old = hasattr(c, "fp16_enabled")
        place = lambda block: "none" if block is None else getattr(block.device, "value", block.device)
        answers.append({
            "stage": int(z.stage), "reduce": z.reduce_bucket_size, "allgather": z.allgather_bucket_size,
            "prefetch": z.prefetch_bucket_size, "persist": z.param_persistence_threshold, "overlap": z.overlap_comm,
            "optimizer": place(z.offload_optimizer), "param": place(z.offload_param),
            "pinned": None if z.offload_optimizer is None else z.offload_optimizer.pin_memory,
            "micro": c.train_micro_batch_size_per_gpu, "accumulation": c.gradient_accumulation_steps,
            "batch": c.train_batch_size, "clip": c.gradient_clipping,
            "fp16": c.fp16_enabled if old else c.float16_config.enabled,
            "bf16": c.bfloat16_enabled if old else c.bfloat16_config.enabled,
        })
    except Exception as error:
        answers.append({"error": f"{type(error).__name__}: {error}"})
known = []
if sys.argv[1] != "old":
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    known = [field.alias or name for name, field in DeepSpeedZeroConfig.model_fields.items()]
print("FOUND " + json.dumps({"version": deepspeed.__version__, "answers": answers, "known": known}))
"""


def ask(cases: Sequence[tuple[Path, int]], old: Path | None = None) -> dict[str, Any]:
    environment, asked = os.environ | {"DS_ACCELERATOR": "cpu"}, json.dumps([[str(path), n] for path, n in cases])
    if old:
        command, environment = [sys.executable, "-c", ASK, "old", asked], environment | {"PYTHONPATH": str(old)}
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment, check=False)
    else:
        done = warm_desk.python(ASK, "new", asked, env=environment, ranks=True)
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, Any] = json.loads(done.stdout.partition("FOUND ")[2].splitlines()[0])
    return found


def deepspeed_plans(plans: Iterable[Plan]) -> list[Plan]:
    return [plan for plan in plans if plan.chosen and plan.chosen.levers.engine != "fsdp2"]


def written(plans: Iterable[Plan], target: Target, folder: Path) -> list[tuple[Path, int]]:
    cases = []
    folder.mkdir(exist_ok=True)
    for number, plan in enumerate(plans):
        path = folder / f"{target.deepspeed_version}-{number}.json"
        path.write_text(deepspeed_json(plan, target))
        assert plan.chosen
        cases.append((path, plan.chosen.world))
    return cases


def expected(plan: Plan) -> dict[str, object]:
    assert plan.chosen
    levers = plan.chosen.levers
    stage = int(levers.engine[-1])
    return {
        "stage": stage,
        "reduce": levers.buckets.reduce_bucket,
        "allgather": levers.buckets.allgather_bucket,
        "prefetch": levers.buckets.prefetch_bucket,
        "persist": levers.buckets.persistence_threshold,
        "overlap": stage == 3,
        "optimizer": levers.offload_optimizer,
        "param": levers.offload_param,
        "pinned": None if levers.offload_optimizer == "none" else levers.buckets.pin_memory,
        "micro": levers.micro_batch,
        "accumulation": levers.accumulation,
        "batch": levers.micro_batch * levers.accumulation * plan.chosen.world,
        "clip": 1.0,
        "fp16": levers.precision == "fp16",
        "bf16": levers.precision == "bf16",
    }


TUNED = Buckets(
    reduce_bucket=7_000_000,
    allgather_bucket=9_000_000,
    prefetch_bucket=3_000_000,
    persistence_threshold=20_000,
    max_live_parameters=40_000_000,
    max_reuse_distance=50_000_000,
    sub_group_size=60_000_000,
    contiguous_gradients=False,
    pin_memory=False,
    param_buffer_count=6,
    param_buffer_size=80_000_000,
    optimizer_buffer_count=5,
)
ALL_TUNED = Levers(engine="zero3", offload_optimizer="nvme", offload_param="nvme", buckets=TUNED)


# --- DeepSpeed itself ---------------------------------------------------------------------------


@pytest.mark.thorough
@pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs the [train] extra")
def test_the_installed_deepspeed_takes_the_whole_grid_and_holds_our_numbers(
    plans: tuple[Plan, ...], make_plan: MakePlan, tmp_path: Path
) -> None:
    asked = deepspeed_plans(plans)
    asked += [
        make_plan(Levers(engine="zero3", offload_optimizer=place, offload_param=place, buckets=TUNED))
        for place in ("none", "cpu", "nvme")
    ]
    cases = written(asked, NEW, tmp_path)
    few = asked[:: len(asked) // 12]
    older = [case for version in VERSIONS for case in written(few, Target(deepspeed_version=version), tmp_path / "few")]
    wrong = tmp_path / "wrong.json"
    wrong.write_text(cases[0][0].read_text().replace('"stage"', '"reduce_scater": true, "stage"'))
    found = ask([*cases, *older, (wrong, 1)])
    *answers, refused = found["answers"]
    assert "reduce_scater" in refused["error"]
    assert answers == [expected(plan) for plan in asked] + [expected(plan) for _ in VERSIONS for plan in few]


@pytest.mark.slow
@pytest.mark.skipif(find_spec("torch") is None, reason="needs the [train] extra")
def test_deepspeed_0_14_2_takes_what_is_written_for_it_and_refuses_what_was_left_out(
    plans: tuple[Plan, ...], tmp_path: Path
) -> None:
    aside = tmp_path / "aside"
    pip = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "--target",
        str(aside),
    ]
    done = subprocess.run([*pip, "deepspeed==0.14.2"], capture_output=True, text=True, timeout=600, check=False)
    if done.returncode:
        pytest.skip(f"deepspeed 0.14.2 cannot be installed here: {done.stderr.strip()[-200:]}")
    asked = deepspeed_plans(plans)
    cases = written(asked, DCU, tmp_path)
    stage3 = next(json.loads(path.read_text()) for path, _ in cases if '"stage": 3' in path.read_text())
    put_back = []
    for name in ("log_trace_cache_warnings", "stage3_allgather_sequential", "stage3_use_all_reduce_for_fetch_params"):
        path = tmp_path / f"{name}.json"
        zero = stage3["zero_optimization"]
        assert name not in zero
        path.write_text(json.dumps(stage3 | {"zero_optimization": zero | {name: False}}))
        put_back.append((path, stage3["train_batch_size"]))
    found = ask([*cases, *put_back], aside)
    assert found["version"].startswith("0.14.2")
    assert found["answers"][: len(cases)] == [expected(plan) for plan in asked]
    for answer in found["answers"][len(cases) :]:
        assert "extra" in answer["error"].lower(), answer


# --- back through our own door ------------------------------------------------------------------


def opened(levers: Levers) -> Levers:
    """What the user's flags would say without the file: all that the file decides is as if nobody had said it."""
    return replace(
        Levers(),
        method=levers.method,
        sequence=levers.sequence,
        checkpointing=levers.checkpointing,
        optimizer=levers.optimizer,
        lora=levers.lora,
    )


@pytest.mark.parametrize("version", VERSIONS)
def test_reading_our_file_back_gives_the_same_footprint(
    version: str, plans: tuple[Plan, ...], make_plan: MakePlan, tmp_path: Path
) -> None:
    asked = [*deepspeed_plans(plans)[::7], make_plan(ALL_TUNED)]
    for plan, (path, world) in zip(asked, written(asked, Target(deepspeed_version=version), tmp_path), strict=True):
        assert plan.chosen
        levers = plan.chosen.levers
        settings = read_deepspeed(path, hidden_size=None, version=version)
        back = to_levers(settings, opened(levers), world=world)
        assert replace(back, buckets=levers.buckets) == levers
        said = levers.buckets
        if (levers.offload_optimizer, levers.offload_param) == ("none", "none"):
            said = replace(said, pin_memory=back.buckets.pin_memory)  # nothing there to pin
        elif levers.buckets.param_buffer_size is None:
            said = replace(said, param_buffer_size=back.buckets.param_buffer_size)  # the number that it stands for
        assert back.buckets == said
        hardware = plan.chosen.hardware
        assert estimate(plan.shape, back, world, hardware) == plan.chosen.footprint


def test_clipping_follows_the_job(make_plan: MakePlan) -> None:
    job = Job(model="tiny_llama", clip=0.5)
    assert json.loads(deepspeed_json(make_plan(Levers(), job=job), NEW))["gradient_clipping"] == 0.5
    off = make_plan(Levers(gradient_clipping=False), job=job)
    assert json.loads(deepspeed_json(off, NEW))["gradient_clipping"] == 0.0


def test_the_same_plan_gives_the_same_bytes(make_plan: MakePlan) -> None:
    first, again = (deepspeed_json(make_plan(Levers(engine="zero3")), NEW) for _ in range(2))
    assert first == again
    assert first.endswith("}\n")


def test_a_key_at_its_default_is_not_written(make_plan: MakePlan) -> None:
    """Each would only tie the file to the releases that know it."""
    plan = make_plan(Levers(engine="zero2"))
    for version in ("0.18.4", NEWEST):
        values = json.loads(deepspeed_json(plan, Target(deepspeed_version=version)))
        assert values["zero_optimization"] == {"stage": 2}
        assert "fp16" not in values
    tuned = json.loads(deepspeed_json(make_plan(ALL_TUNED), NEW))["zero_optimization"]
    assert tuned["reduce_bucket_size"] == TUNED.reduce_bucket
    assert tuned["offload_param"]["buffer_count"] == TUNED.param_buffer_count


@pytest.mark.thorough
@pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs the [train] extra")
def test_the_defaults_are_deepspeeds() -> None:
    code = """
import json, sys
from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
zero = DeepSpeedZeroConfig(stage=3, offload_optimizer={"device": "cpu"}, offload_param={"device": "cpu"})
blocks = {"zero_optimization": zero, "bf16": DeepSpeedBF16Config(), "fp16": DeepSpeedFP16Config()}
print(json.dumps({name: json.loads(block.model_dump_json(by_alias=True)) for name, block in blocks.items()}))
"""
    theirs = json.loads(warm_desk.python(code, ranks=True).stdout.splitlines()[-1])
    for path, value in DEFAULTS.items():
        found: Any = theirs
        if "." in path:
            for part in path.split("."):
                found = found[part]
            assert found == value, path


def test_every_default_that_moved_is_written_out(make_plan: MakePlan) -> None:
    plan = make_plan(Levers(engine="zero3", offload_optimizer="cpu", offload_param="cpu"))
    for version in VERSIONS:
        values = json.loads(deepspeed_json(plan, Target(deepspeed_version=version)))
        for path in (path for path in MOVED if knows(version, path)):
            found: Any = values
            for part in path.split("."):
                assert part in found, (version, path)
                found = found[part]


# --- the optimizer ------------------------------------------------------------------------------


def test_the_trainer_makes_the_optimizer_but_for_16_bit_moments_on_the_host(make_plan: MakePlan) -> None:
    job = Job(model="tiny_llama", learning_rate=3e-4, weight_decay=0.1)
    plan = make_plan(Levers(engine="zero2"), job=job)
    assert "optimizer" not in json.loads(deepspeed_json(plan, NEW))
    pure = make_plan(Levers(engine="zero2", master_weights=False, offload_optimizer="cpu"), job=job)
    block = json.loads(deepspeed_json(pure, NEW))["optimizer"]
    assert block["type"] == "AdamW"
    assert (block["params"]["lr"], block["params"]["weight_decay"]) == (3e-4, 0.1)
    assert block["params"]["fp32_optimizer_states"] is False


def test_offloaded_adamw_is_deepspeeds_host_adam(make_plan: MakePlan) -> None:
    plan = make_plan(Levers(engine="zero2", offload_optimizer="cpu"))
    values = json.loads(deepspeed_json(plan, NEW))
    assert "zero_force_ds_cpu_optimizer" not in values, "which is what DeepSpeed does anyway"


@pytest.mark.parametrize("optimizer", ["adamw8bit", "paged_adamw8bit", "adafactor", "sgd"])
def test_other_optimizers_need_permission(make_plan: MakePlan, optimizer: str) -> None:
    values = json.loads(deepspeed_json(make_plan(Levers(engine="zero2", optimizer=optimizer)), NEW))
    assert values["zero_allow_untested_optimizer"] is True
    assert values["zero_force_ds_cpu_optimizer"] is False


# --- pure 16-bit --------------------------------------------------------------------------------


def test_pure_bf16(make_plan: MakePlan, tmp_path: Path) -> None:
    plan = make_plan(Levers(engine="zero2", master_weights=False))
    ((path, world),) = written([plan], NEW, tmp_path)
    assert json.loads(path.read_text())["bf16"]["bf16_optimizer_states"] is True
    back = to_levers(read_deepspeed(path, hidden_size=None), Levers(), world=world)
    assert not back.master_weights
    with pytest.raises(ConfigError, match=r"0\.18\.3"):
        deepspeed_json(plan, DCU)


def test_pure_16bit_with_offload_leaves_the_optimizer_to_deepspeed(make_plan: MakePlan) -> None:
    plan = make_plan(Levers(engine="zero2", master_weights=False, precision="fp16", offload_optimizer="cpu"))
    values = json.loads(deepspeed_json(plan, DCU))
    assert values["fp16"]["fp16_master_weights_and_grads"] is True
    assert values["optimizer"]["params"]["fp32_optimizer_states"] is False
    assert any("optimizer block" in str(note) for note in deepspeed_notes(plan, DCU))


@pytest.mark.parametrize(
    ("levers", "named"),
    [
        (Levers(engine="zero0", master_weights=False), "engine zero1"),
        (Levers(engine="zero2", master_weights=False, precision="fp16"), "offload_optimizer"),
        (Levers(engine="zero2", master_weights=False, offload_optimizer="cpu", optimizer="sgd"), "adamw"),
        (Levers(engine="fsdp2"), "accelerate"),
    ],
)
def test_what_deepspeed_cannot_do(make_plan: MakePlan, levers: Levers, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        deepspeed_json(make_plan(levers), NEW)


# --- places and versions ------------------------------------------------------------------------


def test_nvme_without_a_folder(make_plan: MakePlan) -> None:
    plan = make_plan(Levers(engine="zero3", offload_param="nvme"), job=Job(model="tiny_llama"))
    with pytest.raises(ConfigError, match=r"hardware\.nvme_path"):
        deepspeed_json(plan, NEW)


def test_weights_on_nvme_have_the_buffers_that_they_need(make_plan: MakePlan) -> None:
    """The largest part of a rank fits into one, nothing stays in host RAM or waits there for its next use."""
    job = Job(model="7b_mamba", hardware=Machine(nvme_path="/nvme"))
    levers = released_at_once(Levers(engine="zero3", offload_optimizer="nvme", offload_param="nvme"))
    plan = make_plan(levers, hardware=parse_hardware("3x24GB"), job=job)
    zero = json.loads(deepspeed_json(plan, NEW))["zero_optimization"]
    largest = plan.shape.vocab_size * plan.shape.hidden_size
    buffer = zero["offload_param"]["buffer_size"]
    assert largest / 3 <= buffer < largest / 3 + 512
    assert buffer % 512 == 0
    assert zero["offload_param"]["max_in_cpu"] == 0
    assert zero["stage3_max_reuse_distance"] == 0


def test_nvme_stands_only_where_it_is_used(make_plan: MakePlan) -> None:
    job = Job(model="tiny_llama", hardware=Machine(nvme_path="/nvme"))
    mixed = json.loads(
        deepspeed_json(make_plan(Levers(engine="zero3", offload_optimizer="cpu", offload_param="nvme"), job=job), NEW)
    )
    zero = mixed["zero_optimization"]
    assert zero["offload_param"]["nvme_path"] == "/nvme"
    assert "nvme_path" not in zero["offload_optimizer"]


def test_a_whole_model_is_gathered_on_saving_only_where_the_host_has_room(make_plan: MakePlan) -> None:
    levers, key = Levers(engine="zero3"), "stage3_gather_16bit_weights_on_model_save"
    roomy = make_plan(levers, parse_hardware("2x24GB", host_ram="64GB"))
    tight = make_plan(levers, parse_hardware("2x24GB", host_ram="1MB"))
    assert json.loads(deepspeed_json(roomy, NEW))["zero_optimization"][key] is True
    assert key not in json.loads(deepspeed_json(tight, NEW))["zero_optimization"]
    assert any(key in str(note) for note in deepspeed_notes(tight, NEW))
    assert not any(key in str(note) for note in deepspeed_notes(roomy, NEW))


def test_keys_of_stage_3_stand_at_stage_3_alone(make_plan: MakePlan) -> None:
    zero = json.loads(deepspeed_json(make_plan(Levers(engine="zero2")), NEW))["zero_optimization"]
    assert not [key for key in zero if key.startswith("stage3_") or key == "sub_group_size"]


@pytest.mark.parametrize(
    ("version", "named"), [("0.13.5", "too old"), ("1.0.0", "unknown"), ("new", "is not a version")]
)
def test_versions_out_of_range(make_plan: MakePlan, version: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        deepspeed_json(make_plan(Levers()), Target(deepspeed_version=version))


def test_a_newer_release_is_written_as_the_newest_known_and_says_so(make_plan: MakePlan) -> None:
    plan, newer = make_plan(Levers(engine="zero3")), Target(deepspeed_version="0.20.1")
    assert deepspeed_json(plan, newer) == deepspeed_json(plan, NEW)
    assert any("0.20.1 is newer" in str(note) for note in deepspeed_notes(plan, newer))
    assert not any("newer" in str(note) for note in deepspeed_notes(plan, NEW))


def test_a_release_between_two_known_ones_is_the_lower() -> None:
    gate = "zero_optimization.leaf_module"
    assert [knows(version, gate) for version in ("0.17.6", "0.17.99", "0.18.0", "0.18.2")] == [False, False, True, True]
    assert all(knows(OLDEST, path) == (path not in ARRIVED) for path in {*ARRIVED, *GONE, *MOVED})
    assert all(knows(NEWEST, path) == (path not in GONE) for path in {*ARRIVED, *GONE, *MOVED})


def test_rocm_is_told_about_fp32_reductions(make_plan: MakePlan) -> None:
    dcu = make_plan(Levers(engine="zero2"), parse_hardware("8xK100-64GB"))
    assert any("ROCm" in str(note) for note in deepspeed_notes(dcu, DCU))
    assert not any("ROCm" in str(note) for note in deepspeed_notes(make_plan(Levers(engine="zero2")), NEW))


def test_nothing_chosen_nothing_written(make_plan: MakePlan) -> None:
    with pytest.raises(ConfigError, match="nothing"):
        deepspeed_json(replace(make_plan(Levers()), chosen=None), NEW)
