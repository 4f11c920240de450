"""`tightfit run`: whose command it is, what is written beside a config, and where a trainer can go on."""

from __future__ import annotations

import json
import struct
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml

from tightfit.formats.beside import beside, json_with, write_beside, yaml_text_with
from tightfit.runs.external.command import recognise
from tightfit.runs.external.config import (
    Edits,
    ExternalTraining,
    Knobs,
    batch_of,
    edits_of,
    knobs_of,
    read_training,
    rungs,
    written,
)
from tightfit.runs.external.trainer import kept_by, means_of
from tightfit.types import ConfigError


@pytest.mark.parametrize(
    ("line", "launcher", "script", "settings"),
    [
        ("llamafactory-cli train x.yaml", "llamafactory", None, "x.yaml"),
        ("/opt/bin/llamafactory-cli train x.yaml learning_rate=1e-5", "llamafactory", None, "x.yaml"),
        ("python -m llamafactory.cli train x.yaml", "llamafactory", None, "x.yaml"),
        ("python src/train.py x.yaml", "llamafactory", "src/train.py", "x.yaml"),
        ("torchrun --nproc_per_node 8 src/train.py x.yaml", "llamafactory", "src/train.py", "x.yaml"),
        ("llamafactory-cli webui", "other", None, None),
        ("deepspeed --include localhost:0,1 train.py --deepspeed d.json", "deepspeed", "train.py", None),
        ("deepspeed --no_local_rank train.py --deepspeed d.json", "deepspeed", "train.py", None),
        ("accelerate launch --config_file a.yaml train.py --x 1", "accelerate", "train.py", None),
        ("accelerate launch --multi_gpu train.py", "accelerate", "train.py", None),
        ("torchrun --standalone --nproc_per_node=2 train.py --deepspeed d.json", "torchrun", "train.py", None),
        ("python -m torch.distributed.run --nproc_per_node 2 train.py", "torchrun", "train.py", None),
        ("env A=1 nohup python3.11 -u train.py --lr -1e-3", "python", "train.py", None),
        ("uv run train.py", "python", "train.py", None),
        ("python -c print(1)", "python", None, None),
        ("./run.sh train.py", "other", None, None),
    ],
)
def test_whose_command(line: str, launcher: str, script: str | None, settings: str | None) -> None:
    found = recognise(tuple(line.split()))
    assert (found.launcher, found.script, found.settings) == (launcher, script, settings)


def test_flags_of_launcher_and_trainer_are_kept_apart() -> None:
    found = recognise(tuple("torchrun --nproc_per_node 2 t.py --deepspeed d.json --lr=-1 --bf16 --wd -0.1".split()))
    assert {flag.name: flag.value for flag in found.own} == {"nproc_per_node": "2"}
    assert {flag.name: flag.value for flag in found.flags} == {
        "deepspeed": "d.json", "lr": "-1", "bf16": None, "wd": "-0.1"
    }  # fmt: skip


@pytest.mark.parametrize(
    ("line", "after"),
    [
        ("python t.py --n 4 --x", "python t.py --n 2 --x"),
        ("python t.py --n=4", "python t.py --n=2"),
        ("python t.py", "python t.py --n 2"),
        ("llamafactory-cli train x.yaml n=4", "llamafactory-cli train x.yaml n=2"),
    ],
)
def test_a_flag_is_set_where_it_stands(line: str, after: str) -> None:
    assert recognise(tuple(line.split())).with_flag("n", "2").words == tuple(after.split())


@pytest.mark.parametrize(("words", "sentence"), [((), "after --"), (("A=1", "python"), "env A=1")])
def test_what_is_no_command(words: tuple[str, ...], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        recognise(words)


# --- writing beside -----------------------------------------------------------------------------

YAML = """# my notes
model_name_or_path: m   # the model
learning_rate: 1e-4
target: [a, b]
nested:
  inside: 1
  more: 'no'

# the batch
per_device_train_batch_size: 4
output_dir: out
"""


def test_yaml_keeps_every_byte_that_is_not_changed() -> None:
    text = yaml_text_with(YAML, {"per_device_train_batch_size": 2, "quantization_bit": 4, "nested": None})
    assert "learning_rate: 1e-4\n" in text
    assert "model_name_or_path: m   # the model\n" in text
    assert "per_device_train_batch_size: 2\n" in text
    expected = yaml.safe_load(YAML) | {"per_device_train_batch_size": 2, "quantization_bit": 4}
    del expected["nested"]
    assert yaml.safe_load(text) == expected


@pytest.mark.parametrize("key", list(yaml.safe_load(YAML)))
@pytest.mark.parametrize("value", [3, "a: b", True, [1], None])
def test_any_key_can_take_any_value(key: str, value: Any) -> None:
    expected = yaml.safe_load(YAML) | {key: value}
    if value is None:
        del expected[key]
    assert yaml.safe_load(yaml_text_with(YAML, {key: value})) == expected


def test_json_keeps_keys_and_their_order() -> None:
    values = {"b": 1e-5, "a": {"x": "auto", "y": [1, None]}, "c": None}
    made = json.loads(json_with(values, {"a.x": 2, "a.z.q": 1, "b": None, "n.m": None}))
    assert made == {"a": {"x": 2, "y": [1, None], "z": {"q": 1}}, "c": None}
    assert list(made) == ["a", "c"]


def test_names_beside_are_new_and_never_taken(tmp_path: Path) -> None:
    file = tmp_path / "x.yaml"
    second = write_beside(beside(file), "a")
    assert second.name == "x.tightfit-2.yaml"
    assert beside(second).name == beside(file).name == "x.tightfit-3.yaml"
    with pytest.raises(ConfigError, match="cannot be written"):
        write_beside(second, "b")
    assert second.read_text(encoding="utf-8") == "a"


# --- configs ------------------------------------------------------------------------------------


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def put(path: Path, text: str | dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text if isinstance(text, str) else json.dumps(text), encoding="utf-8")


def external(line: str) -> ExternalTraining:
    return read_training(recognise(tuple(line.split())))


def descend(now: ExternalTraining, allow: frozenset[str] = frozenset(), most: int = 12) -> list[str]:
    """Every rung down to the last, each written and read back."""
    said = []
    for _ in range(most):
        rung = next(iter(rungs(now, knobs_of(now), allow)), None)
        if rung is None:
            return said
        said += map(str, rung.changed)
        before = knobs_of(now)
        now, files = written(now, edits_of(now, before, rung.knobs))
        assert all(file.exists() for file in files)
        after = knobs_of(now)
        if before.micro_batch and after.micro_batch:
            assert before.micro_batch * before.accumulation == after.micro_batch * after.accumulation  # type: ignore[operator]
    return said


def test_a_deepspeed_file_goes_down_the_whole_ladder(here: Path) -> None:
    put(here / "t.py", "import deepspeed\ndeepspeed.initialize(config=args.deepspeed_config, training_data=data)\n")
    config = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 1}, "wandb": {"enabled": False}}
    put(here / "d.json", config)
    said = descend(external("deepspeed t.py --deepspeed --deepspeed_config d.json"))
    assert said == [
        "micro batch × accumulation 4 × 1 → 2 × 2",
        "micro batch × accumulation 2 × 2 → 1 × 4",
        "ZeRO stage 1 → 2",
        "optimizer on the host",
        "ZeRO stage 2 → 3",
        "weights on the host",
        "little gathered at a time (optimized)",
    ]
    last = json.loads((here / "d.tightfit-8.json").read_text(encoding="utf-8"))
    assert last["wandb"] == {"enabled": False}
    assert last["zero_optimization"]["offload_param"] == {"device": "cpu", "pin_memory": True}
    assert last["zero_force_ds_cpu_optimizer"] is False
    assert json.loads((here / "d.json").read_text(encoding="utf-8")) == config


@pytest.mark.parametrize(
    ("knobs", "survives"),
    [
        (Knobs(micro_batch=4, accumulation=1), True),
        (Knobs(checkpointing=False), True),
        (Knobs(stage=1), False),
        (Knobs(stage=2, offload_optimizer="none"), False),
        (Knobs(stage=2, offload_optimizer="cpu"), False),
        (Knobs(stage=3, offload_optimizer="cpu", offload_param="none"), False),
        (Knobs(quantised=False), False),
        (Knobs(sequence=1024), True),
    ],
)
def test_whether_a_checkpoint_survives_is_told_by_the_settings_that_change(
    here: Path, knobs: Knobs, survives: bool
) -> None:
    put(here / "x.yaml", "model_name_or_path: m\n")
    now = external("llamafactory-cli train x.yaml")
    (step,) = rungs(now, knobs, frozenset({"quantize", "shorter-seq"}))
    assert step.crosses is not survives


def test_a_batch_that_cannot_be_made_up_for_stays(here: Path) -> None:
    """The script takes the one flag and not the other: half a batch would be another training."""
    put(here / "t.py", "parser.add_argument('--per_device_train_batch_size')\n")
    assert descend(external("python t.py --per_device_train_batch_size 8")) == []


TRL = """from trl import SFTConfig, SFTTrainer, TrlParser
args, = TrlParser((SFTConfig,)).parse_args_and_config()
SFTTrainer(args=args).train(resume_from_checkpoint=args.resume_from_checkpoint)
"""
BATCH = "per_device_train_batch_size: 2  # fits\ngradient_accumulation_steps: 16\nlearning_rate: 2e-5\n"


@pytest.mark.parametrize("line", ["python t.py --config c/x.yaml --bf16 True", "torchrun t.py --config c/x.yaml"])
def test_a_batch_in_trls_config_file_is_read_and_changed_there(here: Path, line: str) -> None:
    put(here / "t.py", TRL)
    put(here / "c/x.yaml", BATCH)
    now = external(line)
    assert descend(now) == ["micro batch × accumulation 2 × 16 → 1 × 32"]
    assert (here / "c/x.yaml").read_text(encoding="utf-8") == BATCH
    assert (here / "c/x.tightfit-2.yaml").read_text(encoding="utf-8") == BATCH.replace(": 2 ", ": 1 ").replace(
        "16", "32"
    )


def test_a_flag_wins_over_trls_config_file(here: Path) -> None:
    put(here / "t.py", TRL)
    put(here / "x.yaml", BATCH)
    now = external("python t.py --config x.yaml --per_device_train_batch_size 4")
    assert (knobs_of(now).micro_batch, knobs_of(now).accumulation) == (4, 16)
    after, _ = written(now, Edits(trainer={"per_device_train_batch_size": 2, "gradient_accumulation_steps": 32}))
    assert (knobs_of(after).micro_batch, knobs_of(after).accumulation) == (2, 32)
    assert after.command.words[-2:] == ("--per_device_train_batch_size", "2")


HF = "args, = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()\n"
FLAGS = "--per_device_train_batch_size 8 --gradient_accumulation_steps 2"


@pytest.mark.parametrize(
    ("source", "line", "why"),
    [
        ("cfg = load(args.config)\nTrainingArguments(**cfg)", "--config x.yaml", "reads x.yaml in a way of its own"),
        (TRL, "--config=x.yaml", "reads x.yaml in a way of its own"),  # TRL itself does not look there
        (HF, f"{FLAGS} --recipe x.yaml", "reads x.yaml in a way of its own"),
        (HF + "args.gradient_accumulation_steps = 64 // world", FLAGS, "sets gradient_accumulation_steps itself"),
        ("TrainingArguments(per_device_train_batch_size=16)", "", "sets per_device_train_batch_size itself"),
        (HF + "class A(TrainingArguments):\n    per_device_train_batch_size: int = 2", "", "t.py sets per_device"),
        (HF + "class T(Trainer):\n    def compute_loss(self): ...", FLAGS, "a loss of its own"),
        (TRL + "KTOTrainer(args)", FLAGS, "the loss of KTOTrainer depends on the micro batch"),
        (TRL + "GRPOTrainer(args)", f"{FLAGS} --steps_per_generation 4", "depends on the micro batch"),
        (HF, f"{FLAGS} --auto_find_batch_size True", "auto_find_batch_size looks for the batch itself"),
        (HF, "--per_device_train_batch_size $B", "which is no whole number"),
        (
            "add('--per_device_train_batch_size', default=4)",
            "--per_device_train_batch_size 8",
            "does not say gradient_acc",
        ),
        ("import deepspeed\nDataLoader(data, batch_size=4)", "--deepspeed_config d.json", "does not take its batch"),
        ("not Python: per_device_train_batch_size = 4; HfArgumentParser", FLAGS, "sets per_device_train_batch_size"),
    ],
)
def test_a_batch_that_is_not_known_is_never_changed(here: Path, source: str, line: str, why: str) -> None:
    put(here / "t.py", source)
    put(here / "x.yaml", BATCH)
    put(here / "d.json", {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 1}})
    now = external(f"python t.py {line}")
    assert why in str(batch_of(now).because)
    assert not any("batch" in rung for rung in descend(now))


def test_arguments_beside_the_script_leave_a_doubt(here: Path) -> None:
    """HfArgumentParser also reads t.args, where it is there."""
    put(here / "t.py", HF)
    assert knobs_of(external("python t.py")).micro_batch == 8
    put(here / "t.args", "--per_device_train_batch_size 2")
    assert "t.args" in str(batch_of(external("python t.py")).because)


def test_llamafactory_goes_down_to_the_limit(here: Path) -> None:
    put(here / "x.yaml", YAML.replace("output_dir: out", "cutoff_len: 512\ndisable_gradient_checkpointing: true"))
    said = descend(external("llamafactory-cli train x.yaml"), frozenset({"quantize", "shorter-seq"}))
    assert said == [
        "micro batch × accumulation 4 × 1 → 2 × 2",
        "micro batch × accumulation 2 × 2 → 1 × 4",
        "activations are computed again (checkpointing)",
        "4-bit weights (quantized)",
        "sequence 512 → 256 (limit)",
        "sequence 256 → 128 (limit)",
    ]
    text = (here / "x.tightfit-7.yaml").read_text(encoding="utf-8")
    assert "learning_rate: 1e-4\n" in text
    assert yaml.safe_load(text)["disable_gradient_checkpointing"] is False


def test_nothing_costly_without_leave(here: Path) -> None:
    put(here / "x.yaml", "model_name_or_path: m\nper_device_train_batch_size: 1\n")
    assert descend(external("llamafactory-cli train x.yaml")) == []


def test_an_accelerate_file_with_a_block(here: Path) -> None:
    put(here / "t.py", "from transformers import TrainingArguments\n")
    put(here / "a.yaml", "distributed_type: DEEPSPEED\nmixed_precision: 'no'\ndeepspeed_config:\n  zero_stage: 2\n")
    line = "accelerate launch --config_file a.yaml t.py --per_device_train_batch_size 1 --gradient_checkpointing True"
    said = descend(external(line))
    assert said == ["optimizer on the host", "ZeRO stage 2 → 3", "weights on the host"]
    last = yaml.safe_load((here / "a.tightfit-4.yaml").read_text(encoding="utf-8"))
    assert last["mixed_precision"] == "no"
    assert last["deepspeed_config"] == {
        "zero_stage": 3, "offload_optimizer_device": "cpu", "zero3_init_flag": True, "offload_param_device": "cpu"
    }  # fmt: skip


@pytest.mark.parametrize(("said", "stage"), [("zero_stage: 0", 0), ("zero_stage: 1", 1), ("gradient_clipping: 1.0", 2)])
def test_the_stage_of_an_accelerate_file_is_as_it_says(here: Path, said: str, stage: int) -> None:
    """Only where it says nothing is it accelerate's own default."""
    put(here / "t.py", "from transformers import TrainingArguments\n")
    put(here / "a.yaml", f"distributed_type: DEEPSPEED\ndeepspeed_config:\n  {said}\n")
    assert knobs_of(external("accelerate launch --config_file a.yaml t.py")).stage == stage


def test_an_accelerate_file_that_names_a_deepspeed_file(here: Path) -> None:
    put(here / "t.py", "")
    put(here / "c/a.yaml", "distributed_type: DEEPSPEED\ndeepspeed_config:\n  deepspeed_config_file: c/d.json\n")
    put(here / "c/d.json", {"zero_optimization": {"stage": 2}})
    now = external("accelerate launch --config_file c/a.yaml t.py")
    rung = next(iter(rungs(now, knobs_of(now), frozenset())))
    after, files = written(now, edits_of(now, knobs_of(now), rung.knobs))
    assert {str(file) for file in files} >= {"c/d.tightfit-2.json"}
    assert "c/a.tightfit-2.yaml" in after.command.words
    assert knobs_of(after).offload_optimizer == "cpu"


def test_a_switch_of_the_trainer_on_the_command_line(here: Path) -> None:
    put(here / "t.py", "HfArgumentParser")
    after, files = written(
        external("python t.py --gradient_checkpointing False"), Edits(trainer={"gradient_checkpointing": True})
    )
    assert after.command.words[-2:] == ("--gradient_checkpointing", "True")
    assert files == ()


def test_a_setting_can_be_taken_away(here: Path) -> None:
    put(here / "t.py", "HfArgumentParser")
    gone = Edits(trainer={"resume_from_checkpoint": None})
    after, _ = written(external("python t.py --resume_from_checkpoint out/checkpoint-2 --lr 1"), gone)
    assert after.command.words == ("python", "t.py", "--lr", "1")
    assert written(external("python t.py --lr 1"), gone)[0].command.words == ("python", "t.py", "--lr", "1")


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("llamafactory-cli train missing.yaml", "missing.yaml"),
        ("llamafactory-cli train broken.yaml", "is not YAML"),
        ("deepspeed t.py --deepspeed_config broken.json", "is not JSON"),
        ("deepspeed t.py --deepspeed_config missing.json", "which is not there"),
        ("python missing.py", "there is no script"),
    ],
)
def test_what_cannot_be_read_is_one_sentence(here: Path, line: str, sentence: str) -> None:
    put(here / "t.py", "")
    put(here / "broken.yaml", "a: [1\n")
    put(here / "broken.json", '{"a": ')
    with pytest.raises(ConfigError, match=sentence):
        external(line)


# --- going on -----------------------------------------------------------------------------------


def save(folder: Path, step: int, *, torn: bool = False, adapter: bool = False) -> None:
    place = folder / f"checkpoint-{step}"
    place.mkdir(parents=True)
    head = json.dumps({"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
    body = struct.pack("<Q", len(head)) + head + b"\0" * (4 if torn else 8)
    (place / ("adapter_model.safetensors" if adapter else "model.safetensors")).write_bytes(body)
    with zipfile.ZipFile(place / "optimizer.pt", "w") as packed:
        packed.writestr("a", "b")
    put(place / "trainer_state.json", {"global_step": step, "max_steps": 20})
    if adapter:
        put(place / "adapter_config.json", {})


def test_the_newest_whole_checkpoint_counts(here: Path) -> None:
    put(here / "t.py", "trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)")
    now = external("python t.py --output_dir out")
    assert kept_by(now) is None
    save(here / "out", 9)
    save(here / "out", 10, adapter=True)
    save(here / "out", 11, torn=True)
    (here / "out/checkpoint-12").mkdir()
    save(here / "out", 13)
    (here / "out/checkpoint-13/optimizer.pt").write_bytes(b"half")
    kept = kept_by(now)
    assert kept is not None
    assert (kept.step, kept.max_steps, kept.has_optimizer, kept.adapter) == (10, 20, True, True)


@pytest.mark.parametrize("line", ["python t.py --output_dir 20240501", "llamafactory-cli train sft.yaml"])
def test_a_folder_may_look_like_a_number(here: Path, line: str) -> None:
    put(here / "t.py", "trainer.train()")
    put(here / "sft.yaml", "output_dir: 20240501\n")
    save(here / "20240501", 9)
    kept = kept_by(external(line))
    assert kept is not None
    assert kept.path == Path("20240501/checkpoint-9")


@pytest.mark.parametrize(
    ("source", "means"),
    [
        ("a('--resume_from_checkpoint')\ntrainer.train(resume_from_checkpoint=args.resume_from_checkpoint)", "told"),
        ("last = get_last_checkpoint(out)", "by itself"),
        ("engine.load_checkpoint(out)", "by itself"),
        ("trainer.train()", "none"),
        ("if args.resume_from_checkpoint:\n    print('ignored')\ntrainer.train()", "none"),
        ("# resume_from_checkpoint\nfrom x import get_last_checkpoint\ntrainer.train()", "none"),
        ("trainer.train(resume_from_checkpoint=True)", "by itself"),
        ("trainer.train(resume_from_checkpoint=args.resume)", "none"),
        ("parser.add_argument('--resume_from_checkpoint')\ntrainer.train(args.resume_from_checkpoint)", "told"),
        ("HfArgumentParser(A)\nmodel.train()\ntrainer.train(args.resume_from_checkpoint)", "told"),
        ("run_elsewhere()", "none"),
    ],
)
def test_how_a_script_goes_on(here: Path, source: str, means: str) -> None:
    put(here / "t.py", source)
    assert means_of(external("python t.py --output_dir out")) == means


def test_a_flag_that_the_script_does_not_hand_on_tells_it_nothing(here: Path) -> None:
    put(here / "t.py", TRL.replace("resume_from_checkpoint=args.resume_from_checkpoint", ""))
    put(here / "u.py", "from mine import main\nmain()\n")
    line = "--output_dir out --resume_from_checkpoint out/checkpoint-2"
    assert means_of(external(f"python t.py {line}")) == "none"
    assert means_of(external(f"python u.py {line}")) == "told"
