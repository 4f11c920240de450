"""Our own worker's `worker.json`, which is written and never checked: nobody else makes one."""

from __future__ import annotations

from tightfit.formats.dialect import Dialect, PlanFile
from tightfit.formats.worker.write import worker_json
from tightfit.messages import Message

DIALECT = Dialect(
    name="worker",
    trainer="tightfit",
    files=(
        PlanFile(
            name="worker.json",
            what=Message("planfile.worker-file"),
            write=lambda plan, target, _: worker_json(plan),
        ),
    ),
)
