"""What lint says the tools do is what they do: the installed DeepSpeed, accelerate and transformers are asked.

One process for all of them, apart from the tests' own: they read the environment when they are imported.
"""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tightfit.formats.accelerate import check as accelerate
from tightfit.formats.deepspeed import check as deepspeed
from tightfit.formats.deepspeed.keys import LOUD
from tightfit.formats.huggingface import check as arguments
from tightfit.formats.lint import lint
from tightfit.formats.llamafactory.keys import LLAMAFACTORY_ADDED, LLAMAFACTORY_GONE, templates

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def truth(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    out = tmp_path_factory.mktemp("truth") / "truth.json"
    script = Path(__file__).with_name("truth.py")
    done = subprocess.run([sys.executable, str(script), str(out)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    return found


@pytest.mark.parametrize(
    ("file", "stage"),
    [
        ("typo", 0),
        ("typo in a silent block", 0),
        ("offload_param at stage 2", 2),
        ("super_offload at stage 2", 2),
        ("nvme without a path", 3),
        ("nvme at stage 2", 2),
        ("round robin at stage 3", 3),
        ("stage3 keys at stage 2", 2),
        ("stage as text", 3),
        ("stage auto", 0),
        ("zero true", 1),
        ("micro batch 1.5", 0),
        ("switch as yes", 3),
    ],
)
def test_deepspeed_accepts_without_a_word(truth: dict[str, Any], file: str, stage: int) -> None:
    answer = truth["deepspeed"]["files"][file]
    assert answer["accepted"], answer
    assert answer["value"]["stage"] == stage


@pytest.mark.parametrize(
    ("file", "complaint"),
    [
        ("typo in a loud block", "Extra inputs"),
        ("ratio at stage 2", "Partial offloading"),
        ("both precisions", "cannot be simultaneously enabled"),
        ("old and new offload", "deprecated parameter"),
        ("bucket as 5e8 text", "valid integer"),
        ("micro batch as text", "TypeError"),
        ("micro batch auto", "TypeError"),
        ("zero null", "TypeError"),
        ("no batch", "needs to be provided"),
        ("batch", "Check batch related parameters"),
        ("elasticity", "removed"),
        ("mics", "removed"),
        ("both spellings", "max_live_parameters"),
        ("micro batch 0", "greater than 0"),
        ("accumulation 0", "greater than 0"),
        ("gradients in fp8", "communication_data_type"),
        ("optimizer 1", "AttributeError"),
    ],
)
def test_deepspeed_refuses(truth: dict[str, Any], file: str, complaint: str) -> None:
    answer = truth["deepspeed"]["files"][file]
    assert not answer["accepted"], answer
    assert complaint in answer["value"]


STRICT = sorted(place for place in deepspeed.TAKES if place.rpartition(".")[0] in LOUD)


@pytest.mark.parametrize("place", STRICT)
def test_values_that_deepspeed_takes_and_refuses(truth: dict[str, Any], tmp_path: Path, place: str) -> None:
    """One file a value: lint has an error where, and only where, DeepSpeed refuses it."""
    script = runpy.run_path(str(Path(__file__).with_name("truth.py")), run_name="truth")
    for value, accepted in zip(script["VALUES"], truth["deepspeed"]["values"][place], strict=True):
        path = tmp_path / "a.json"
        path.write_text(json.dumps(script["laid_out"](place, value)), encoding="utf-8")
        rules = {found.rule for found in lint(path) if found.place == place and found.severity == "error"}
        slip = isinstance(value, bool) and deepspeed.TAKES[place].kind != "switch"  # taken for 0 or 1
        if accepted and not slip:
            assert not rules & {"ds-value", "ds-number-text", "ds-text-switch"}, value
        else:
            assert rules, value


def test_every_number_and_switch_of_those_blocks_is_known(truth: dict[str, Any]) -> None:
    kinds = {"<class 'bool'>": "switch", "<class 'int'>": "whole", "<class 'float'>": "number"}
    fields = truth["deepspeed"]["fields"]
    assert len(fields) > 80
    for place, annotation in fields.items():
        if annotation in kinds:
            assert deepspeed.TAKES[place].kind == kinds[annotation], place


@pytest.mark.parametrize(
    ("file", "complaint"),
    [
        ("without params", "must be a mapping"),
        ("without total_num_steps", "total_num_steps"),
        ("with a parameter of another", "warmup_max_lr"),
        ("without warmup", "warmup_num_steps must be a positive integer"),
    ],
)
def test_schedulers_that_cannot_be_made(truth: dict[str, Any], file: str, complaint: str) -> None:
    answers = truth["deepspeed"]["scheduler files"]
    assert answers["right"]["accepted"]
    assert not answers[file]["accepted"]
    assert complaint in answers[file]["value"]


def test_parameters_of_the_schedulers(truth: dict[str, Any]) -> None:
    real = truth["deepspeed"]["scheduler params"]
    assert set(deepspeed.SCHEDULER_PARAMS) == set(real)
    for kind, takes in deepspeed.SCHEDULER_PARAMS.items():
        assert set(takes) == set(real[kind]), kind
        assert {name for name, mark in takes.items() if mark} == {name for name, must in real[kind].items() if must}, (
            kind
        )


def test_plain_json_only(truth: dict[str, Any]) -> None:
    assert [answer["accepted"] for answer in truth["transformers"]["json"].values()] == [True, False, False]


def test_transformers_fills_in_clipping_only_where_it_is_written(truth: dict[str, Any]) -> None:
    left = {name: answer["value"] for name, answer in truth["transformers"]["clipping"].items()}
    assert left["left out"] == [None, []]
    assert left["auto"] == [0.5, []]
    assert left["another"][0] == 1.0
    assert "gradient_clipping" in left["another"][1][0]


def test_deepspeeds_clipping_is_on_by_default(truth: dict[str, Any]) -> None:
    assert truth["deepspeed"]["files"]["clipping left out"]["value"]["clipping"] == 1.0


def test_optimizers_and_schedulers_are_theirs(truth: dict[str, Any]) -> None:
    real = truth["deepspeed"]
    assert set(deepspeed.DEEPSPEED_OPTIMIZERS) == set(real["optimizers"])
    assert set(deepspeed.TORCH_OPTIMIZERS) == set(real["torch optimizers"]) - {"Optimizer"}
    assert set(deepspeed.TORCH_SCHEDULERS) <= set(real["torch schedulers"])
    assert set(deepspeed.SCHEDULER_PARAMS) == set(real["schedulers"])


@pytest.mark.parametrize("file", ["typo in deepspeed_config", "typo in fsdp_config", "a block unused", "nvme path"])
def test_accelerate_accepts_without_a_word(truth: dict[str, Any], file: str) -> None:
    assert truth["accelerate"]["files"][file]["accepted"]


def test_what_accelerate_makes_of_them(truth: dict[str, Any]) -> None:
    made = {name: answer["value"] for name, answer in truth["accelerate"]["files"].items()}
    assert "ACCELERATE_DEEPSPEED_ZERO_STAGE" not in made["typo in deepspeed_config"]
    assert made["typo in fsdp_config"]["FSDP_OFFLOAD_PARAMS"] == "false"
    assert "ACCELERATE_USE_DEEPSPEED" not in made["a block unused"]
    assert not [key for key in made["nvme path"] if "NVME_PATH" in key]


@pytest.mark.parametrize(
    ("file", "complaint"),
    [
        ("unknown at the top", "unknown keys"),
        ("bare no", "AttributeError"),
        ("gpu_ids a number", "AttributeError"),
        ("no processes", "num_processes"),
        ("sync off", "fsdp_sync_module_states"),
        ("a type that is none", "DistributedType"),
        ("a precision that is none", "Unknown mixed_precision"),
    ],
)
def test_accelerate_refuses(truth: dict[str, Any], file: str, complaint: str) -> None:
    answer = truth["accelerate"]["files"][file]
    assert not answer["accepted"], answer
    assert complaint in answer["value"]


def test_accelerates_keys_are_its_own(truth: dict[str, Any]) -> None:
    real = truth["accelerate"]
    converted = {"fp16", "dynamo_backend"}
    assert set(real["keys"]) == accelerate.KEYS - converted
    assert set(accelerate.TYPES) == set(real["types"])
    read_elsewhere = {"fsdp_ignored_modules"}
    for block, prefixes in (
        ("deepspeed_config", ("deepspeed_", "zero", "offload_", "gradient_")),
        ("fsdp_config", ("fsdp_",)),
        ("dynamo_config", ("dynamo_",)),
    ):
        flags = {flag for flag in real["flags"] if flag.startswith(prefixes)}
        assert set(accelerate.BLOCKS[block]) - read_elsewhere == flags, block


def test_transformers_keeps_text_as_it_is(truth: dict[str, Any]) -> None:
    assert truth["transformers"]["files"]["learning rate as text"] == {"accepted": True, "value": "1e-4"}


@pytest.mark.parametrize(
    ("file", "complaint"),
    [
        ("evaluation_strategy", "not used by the HfArgumentParser"),
        ("warmup_ratio", "not used by the HfArgumentParser"),
        ("both precisions", "At most one of fp16 and bf16"),
        ("best model", "save and eval strategy to match"),
    ],
)
def test_transformers_refuses(truth: dict[str, Any], file: str, complaint: str) -> None:
    answer = truth["transformers"]["files"][file]
    assert not answer["accepted"], answer
    assert complaint in answer["value"]


def test_kinds_of_fields_are_transformers(truth: dict[str, Any]) -> None:
    kinds = truth["transformers"]["kinds"]
    marks = {"#": "int", "~": "float", "?": "bool"}
    marked = {name: marks[mark] for name, mark in arguments.ARGUMENT_MARKS.items() if mark}
    assert len(marked) > 40
    for name, kind in marked.items():
        assert kind in kinds[name], name


# --- LLaMA-Factory ------------------------------------------------------------------------------


def wheel(folder: Path, version: str) -> Path:
    """Its wheel, unpacked. Its pins clash with ours, so it is read and never imported."""
    import zipfile

    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "-q",
        "-d",
        str(folder),
        f"llamafactory=={version}",
    ]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("no package index at hand")
    (archive,) = folder.glob(f"llamafactory-{version}-*.whl")
    with zipfile.ZipFile(archive) as packed:
        packed.extractall(folder / version)
    return folder / version / "llamafactory"


@pytest.mark.parametrize("version", ["0.9.2", "0.9.3", "0.9.4", "0.9.5"])
def test_llamafactorys_keys_and_templates(tmp_path: Path, version: str) -> None:
    import re

    root = wheel(tmp_path, version)
    fields = "\n".join(path.read_text(encoding="utf-8") for path in (root / "hparams").glob("*.py"))
    keys = set(re.findall(r"^    (\w+): .*field\($", fields, re.MULTILINE))
    since = {key: first for first, words in LLAMAFACTORY_ADDED.items() for key in words}
    for key, first in since.items():
        assert (key in keys) == (version >= first), key
    for key, (gone, instead) in LLAMAFACTORY_GONE.items():
        assert key not in keys or version < gone, key
        assert instead is None or version < gone or instead in keys
    text = (root / "data" / "template.py").read_text(encoding="utf-8")
    assert templates(version) == set(re.findall(r'register_template\(\s*name="([^"]+)"', text))
    parser = (root / "hparams" / "parser.py").read_text(encoding="utf-8")
    assert ("OmegaConf.load(" in parser) == (version >= "0.9.4")
    assert ("json.load(Path(" in parser) == (version >= "0.9.5")
