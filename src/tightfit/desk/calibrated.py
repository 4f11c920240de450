"""What earlier runs on this account have taught, for verbs that plan; `--no-calibration` leaves it out."""

from __future__ import annotations

import argparse

from tightfit.inputs.surroundings import cache_folder
from tightfit.job import Job
from tightfit.planner.calibration import Calibration
from tightfit.runs.calibration import Calibrations


def calibration_of(args: argparse.Namespace, job: Job) -> Calibration | None:
    """None: it is not wanted, so nothing is written down at the end either."""
    return None if hasattr(args, "no_calibration") else Calibrations(cache_folder()).read(job)
