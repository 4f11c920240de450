"""LLaMA-Factory's YAML."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tightfit.formats.dialect import Dialect
from tightfit.formats.huggingface.check import DEEPSPEED_AT
from tightfit.formats.huggingface.dialect import known as known_arguments
from tightfit.formats.huggingface.rules import IN_ANY_TRAINER
from tightfit.formats.known import KnownConfig, word
from tightfit.formats.llamafactory.check import check_llamafactory
from tightfit.formats.llamafactory.keys import KNOWN
from tightfit.formats.llamafactory.rules import RULES
from tightfit.formats.rules import BESIDE, JSON_COMMENTS, KEY_TWICE, NOT_FINITE


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


DIALECT = Dialect(
    name="llamafactory",
    trainer="llamafactory",
    title="LLaMA-Factory's",
    one="a LLaMA-Factory YAML",
    keys=KNOWN,
    telling=("finetuning_type", "template", "cutoff_len", "stage", "dataset", "model_name_or_path"),
    extends="huggingface",
    is_mixed=True,
    rules=(KEY_TWICE, NOT_FINITE, JSON_COMMENTS, *BESIDE, *RULES, *IN_ANY_TRAINER),
    check=check_llamafactory,
    known=known,
    deepspeed_at=DEEPSPEED_AT,
)
