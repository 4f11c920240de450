"""A plan whose layers stream: our own worker is told, and no other program's file can say it."""

from __future__ import annotations

import json

import pytest

from tightfit.formats.accelerate.write import accelerate_yaml
from tightfit.formats.deepspeed.write import deepspeed_json
from tightfit.formats.huggingface.write import training_args_json
from tightfit.formats.llamafactory.write import llamafactory_yaml
from tightfit.formats.render import render
from tightfit.formats.target import Target
from tightfit.inputs.flags import levers_as_written
from tightfit.job.file import job_from_flags
from tightfit.planner import plan
from tightfit.planner.plan import Plan
from tightfit.types import ConfigError


@pytest.fixture(scope="module")
def streamed() -> Plan:
    flags = {"model": "qwen2.5-7b", "gpus": "1x24GB", "host_ram": "256GB", "engine": "stream", "states": "bf16"}
    return plan(job_from_flags({**flags, "compile": "off", "checkpointing": "full", "seq": 1024}))


def test_our_worker_is_told(streamed: Plan) -> None:
    assert streamed.chosen is not None
    files = render(streamed, Target())
    told = levers_as_written(json.loads(files["worker.json"]))
    assert told.streams
    assert told.states == "bf16"
    assert told.resident == streamed.chosen.levers.resident
    assert not {"ds_config.json", "accelerate.yaml", "llamafactory.yaml"} & set(files)


def test_states_on_nvme_need_a_folder_there() -> None:
    flags = {"model": "tiny_llama", "gpus": "1x24GB", "host_ram": "8GB", "nvme": "1GB", "engine": "stream", "seq": 64}
    with pytest.raises(ConfigError, match="name a folder on it"):
        render(plan(job_from_flags({**flags, "offload_optimizer": "nvme"})), Target())
    planned = plan(job_from_flags({**flags, "offload_optimizer": "nvme", "nvme_path": "/nvme"}))
    assert planned.chosen is not None
    told = json.loads(render(planned, Target())["worker.json"])
    assert told["nvme_path"] == "/nvme"
    assert told["predicted"]["host"]["nvme_bytes_per_node"] > 0
    assert levers_as_written(told) == planned.chosen.levers


def test_other_programs_have_no_word_for_it(streamed: Plan) -> None:
    for write in (accelerate_yaml, llamafactory_yaml, training_args_json):
        with pytest.raises(ConfigError, match="train with tightfit's own worker, or plan with another --engine"):
            write(streamed, Target(), None)
    with pytest.raises(ConfigError, match="DeepSpeed has no engine that streams"):
        deepspeed_json(streamed, Target())
