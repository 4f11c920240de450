"""What earlier runs on this account have taught, for verbs that plan; `--no-calibration` leaves it out."""

from __future__ import annotations

from tightfit.desk.request import Request
from tightfit.inputs.surroundings import cache_folder
from tightfit.job import Job
from tightfit.planner.calibration import Calibration
from tightfit.runs.calibration import Calibrations


def calibration_of(request: Request, job: Job) -> Calibration | None:
    """None: it is not wanted, so nothing is written down at the end either."""
    return Calibrations(cache_folder()).read(job) if request.calibrates else None
