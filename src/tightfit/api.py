"""tightfit from Python: what `tightfit plan` and `tightfit estimate` answer, as objects that a notebook draws.

    import tightfit
    tightfit.plan(model="7b_mamba", gpus="6x32GB", host_ram="256GB")
    tightfit.estimate(model="7b_mamba", engine="zero3", gpus="6x32GB", seq=1024)

The names are those of the command line's flags, with `_` for `-`; a job file is the one thing that needs no name.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tightfit.desk import estimate as estimates
from tightfit.desk import plan as plans
from tightfit.desk.plan import files_of, plan_of
from tightfit.desk.report import answer_report, estimate_report
from tightfit.desk.request import Request, read_request
from tightfit.formats.llamafactory.read import Original
from tightfit.inputs.flags import LEVERS
from tightfit.inputs.spelling import nearest
from tightfit.inputs.surroundings import choose_language
from tightfit.job import Job
from tightfit.job.file import JOB_FLAGS
from tightfit.messages import Message
from tightfit.planner import Tiered
from tightfit.planner.limits import Limit
from tightfit.planner.plan import Plan, Remedy, Way
from tightfit.priced import Priced
from tightfit.types import ConfigError, Footprint

if TYPE_CHECKING:
    from rich.console import Console

OTHER_WORD = {"trainer": "for"}  # arguments whose flag Python keeps for itself
PLAN_FLAGS = (frozenset(JOB_FLAGS) - {*OTHER_WORD.values()}) | {
    *OTHER_WORD,
    *("num_gpus", "world", "max", "trace", "no_calibration", "launcher"),
}
ESTIMATE_FLAGS = (
    frozenset(LEVERS) | {*("model", "deepspeed", "trace", "gpus", "world", "host_ram", "nvme")} | {"network", "link"}
)
WIDTH = 100  # columns of the text form


@dataclass(frozen=True, slots=True)
class Planned:
    """What `tightfit plan` answers. In a notebook it is drawn, as text it is what a terminal shows."""

    answer: Plan | Tiered | Limit
    original: Original | None = None  # the LLaMA-Factory file that it was made from

    @property
    def plan(self) -> Plan:
        """The plan that the answer comes down to."""
        return plan_of(self.answer)

    @property
    def fits(self) -> bool:
        return self.plan.fits

    @property
    def chosen(self) -> Way | None:
        """None: nothing that was allowed fits."""
        return self.plan.chosen

    @property
    def alternatives(self) -> tuple[Way, ...]:
        return self.plan.alternatives

    @property
    def because(self) -> tuple[str, ...]:
        return tuple(map(str, self.plan.because))

    @property
    def remedies(self) -> tuple[Remedy, ...]:
        """Where nothing fits: the changes of the training that would make it fit."""
        return self.plan.remedies

    def report(self) -> dict[str, Any]:
        """The same as `tightfit plan --json`."""
        return answer_report(self.answer, None)

    def write(self, folder: str | Path, *, force: bool = False) -> list[Path]:
        """Configs, launch script and reasons into a folder, as `--write` does."""
        from tightfit.formats.plan_folder import write

        if self.plan.chosen is None:
            raise ConfigError(Message("cli.nothing-fits-so-3"))
        return write(files_of(self.plan, original=self.original), Path(folder), force)

    def __str__(self) -> str:
        from tightfit.screen.plan import draw_answer

        return _draw_text(lambda console: draw_answer(console, self.answer))

    __repr__ = __str__

    def _repr_html_(self) -> str:
        from tightfit.desk.svg_bars import plan_bars

        return plan_bars(self.plan)


@dataclass(frozen=True, slots=True)
class Estimated:
    """What `tightfit estimate` answers. In a notebook it is drawn, as text it is what a terminal shows."""

    priced: Priced

    @property
    def fits(self) -> bool | None:
        """None: no machine was named."""
        return self.priced.fits

    @property
    def footprint(self) -> Footprint:
        return self.priced.footprint

    def report(self) -> dict[str, Any]:
        """The same as `tightfit estimate --json`."""
        return estimate_report(self.priced)

    def __str__(self) -> str:
        from tightfit.screen import draw_estimate

        return _draw_text(lambda console: draw_estimate(console, self.priced, ()))

    __repr__ = __str__

    def _repr_html_(self) -> str:
        from tightfit.desk.svg_bars import phase_bars

        return phase_bars(self.priced)


def plan(job: Job | str | Path | None = None, /, **flags: Any) -> Planned:
    """The fastest way that fits: for a job, a job file, or the flags of `tightfit plan`, which win over a file's."""
    choose_language()
    if isinstance(job, Job):
        if flags:
            raise ConfigError(Message("cli.job-says-everything"))
        request = read_request({}, job)
    else:
        request = _read_flags(job, flags, PLAN_FLAGS, "plan")
    if request.flags.get("tier", request.job and request.job.tier) == "all":
        raise ConfigError(Message("cli.tier-all-comparison-2"))
    answer, _ = plans.answered(request)
    assert not isinstance(answer, list)
    return Planned(answer, plans.original_for(request))


def estimate(file: str | Path | None = None, /, **flags: Any) -> Estimated:
    """What every GPU and the host will hold: for a job file, a LLaMA-Factory YAML, or the flags of `estimate`."""
    choose_language()
    return Estimated(estimates.estimated(_read_flags(file, flags, ESTIMATE_FLAGS, "estimate")))


def _read_flags(file: str | Path | None, flags: dict[str, Any], known: frozenset[str], verb: str) -> Request:
    """The request. What is None was not said, nor is what is False, unless that is a value of a job's field."""
    for name in flags:
        if name not in known:
            close = nearest(name, sorted(known))
            hint = Message("cli.meant", close=close) if close else ""
            raise ConfigError(Message("cli.no-argument", verb=verb, name=name, hint=hint))
    given = {}
    for name, value in flags.items():
        field: object = Job(model="")
        for part in JOB_FLAGS.get(name, "").split("."):
            field = getattr(field, part, None)
        if value is not None and (value is not False or isinstance(field, bool)):
            given[OTHER_WORD.get(name, name)] = value
    if file is not None:
        given["file"] = str(file)
    return read_request(given)


def _draw_text(draw: Callable[[Console], None]) -> str:
    from rich.console import Console

    drawn = io.StringIO()
    draw(Console(file=drawn, width=WIDTH, color_system=None))
    return "\n".join(line.rstrip() for line in drawn.getvalue().splitlines())
