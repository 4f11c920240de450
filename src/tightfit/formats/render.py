"""A plan becomes files that other programs read. `render` makes the texts; `plan_folder.py` puts them on disk.

A file that cannot say what the plan says is left out, and PLAN.md says why; unless it is the one that the
launcher starts from, or DeepSpeed's own, without which there is nothing to start: then it is an error.
"""

from __future__ import annotations

from tightfit.formats.launch.environment import launcher_of
from tightfit.formats.plan_md import plan_md
from tightfit.formats.registry import dialects, launchers
from tightfit.formats.target import Target
from tightfit.messages import Said
from tightfit.planner.plan import Plan
from tightfit.types import ConfigError


def render(plan: Plan, target: Target) -> dict[str, str]:
    """Every file of a plan, by name."""
    files: dict[str, str] = {}
    left_out: dict[str, Said] = {}
    starts_from = launchers()[launcher_of(plan, target)].needs
    for dialect in dialects():
        for file in dialect.files:
            try:
                text = file.write(plan, target, files)
            except ConfigError as error:
                if not file.is_optional or file.name == starts_from or dialect.trainer == plan.job.trainer:
                    raise
                left_out[file.name] = error.said
            else:
                files |= {} if text is None else {file.name: text}
    files["PLAN.md"] = plan_md(plan, target, files, left_out)
    return files
