"""Our own job files, and what a plan wrote for our own worker."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import fields
from typing import Any

from tightfit.formats.dialect import Dialect
from tightfit.formats.job.check import check_job
from tightfit.formats.job.rules import RULES
from tightfit.formats.rules import JSON_COMMENTS, KEY_TWICE
from tightfit.job import Job
from tightfit.job.known import KnownConfig, block_in, whole, word
from tightfit.job.training import MARKS, translate
from tightfit.messages import Message
from tightfit.types import UserError


def known(values: Mapping[str, Any]) -> KnownConfig:
    with suppress(UserError):  # what is wrong in it is the job's own reader's to say
        values = translate(values, "").tree
    levers = block_in(values, "levers")
    engine = word(levers.get("engine")) or ""
    recompute = levers.get("checkpointing")
    return KnownConfig(
        stage=int(engine[-1]) if engine[:-1] == "zero" and engine[-1].isdigit() else None,
        offload_optimizer=word(levers.get("offload_optimizer")),
        offload_param=word(levers.get("offload_param")),
        micro_batch=whole(levers.get("micro_batch")),
        accumulation=whole(levers.get("accum")),
        sequence=whole(values.get("sequence")),
        precision=word(values.get("precision")),
        method=word(values.get("method")),
        checkpointing=None if recompute is None else recompute != "none",
        attention=word(levers.get("attention")),
        loss=word(levers.get("loss")),
    )


DIALECT = Dialect(
    name="job",
    title=Message("lint.job-title"),
    one=Message("lint.job-one"),
    keys=frozenset(field.name for field in fields(Job)) | set(MARKS),
    telling=("hardware", "effective_batch", "levers", "limits", "training", "saving", "preset"),
    hinting=("model",),
    rules=(KEY_TWICE, JSON_COMMENTS, *RULES),
    check=check_job,
    known=known,
)
