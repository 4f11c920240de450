"""accelerate's YAML."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tightfit.formats.accelerate.check import check_accelerate
from tightfit.formats.accelerate.keys import DEEPSPEED_AT, KEYS
from tightfit.formats.accelerate.rules import RULES
from tightfit.formats.dialect import Dialect
from tightfit.formats.known import KnownConfig, block_in, whole, word
from tightfit.formats.rules import BESIDE, JSON_COMMENTS, KEY_TWICE, NOT_FINITE


def known(values: Mapping[str, Any]) -> KnownConfig:
    block = block_in(values, "deepspeed_config")
    precision = word(values.get("mixed_precision"))
    return KnownConfig(
        stage=whole(block.get("zero_stage")),
        offload_optimizer=word(block.get("offload_optimizer_device")),
        offload_param=word(block.get("offload_param_device")),
        accumulation=whole(block.get("gradient_accumulation_steps")),
        precision="fp32" if precision == "no" else precision,
        world=whole(values.get("num_processes")),
    )


DIALECT = Dialect(
    name="accelerate",
    title="accelerate's",
    one="an accelerate YAML",
    keys=KEYS,
    telling=("distributed_type", "compute_environment", "deepspeed_config", "fsdp_config"),
    rules=(KEY_TWICE, NOT_FINITE, JSON_COMMENTS, *BESIDE, *RULES),
    check=check_accelerate,
    known=known,
    deepspeed_at=DEEPSPEED_AT,
)
