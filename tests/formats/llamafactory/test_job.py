"""A LLaMA-Factory file as a job."""

from __future__ import annotations

from pathlib import Path

import pytest

from tightfit.formats.llamafactory.read import llamafactory_job_from
from tightfit.job.text import read_job_text


@pytest.mark.parametrize("name", ["train.yaml", "from-checkpoint-500.yaml", "zero0.yaml"])
def test_what_is_not_priced_is_said_whatever_the_file_is_called(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_text(
        "model_name_or_path: Qwen/Qwen2.5-7B\nfinetuning_type: lora\nbf16: true\nupcast_layernorm: true\n"
        "gradient_checkpointing: false\n"
    )
    said = tuple(map(str, llamafactory_job_from(read_job_text(path), None, stays=True).said))
    assert said == (f"upcast_layernorm in {name} is not priced yet: the estimate is as if it were not there.",)
