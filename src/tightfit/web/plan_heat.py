"""The map of sequence × micro batch: what the chosen way would need at each, and where another way would fit.

More tokens never need less memory, so what fits is a staircase: whether another way fits is asked only along its edge.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from tightfit.desk.calibration import calibration_of
from tightfit.inputs.flags import MOST_BATCH
from tightfit.job.file import pinned
from tightfit.planner import SEQUENCES_A_GPU
from tightfit.planner.question import Question, excess_bytes, weigh
from tightfit.planner.search import something_fits
from tightfit.web.plan_answer import Answered

MICRO_BATCHES = (1, 2, 4, 8, 16, 32, 64)
SEQUENCES = tuple(2**power for power in range(7, 18))
COLUMNS, BEFORE = 8, 4
STEPS = 10  # shades of a cell


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    sequence: int
    micro_batch: int
    share: float  # of the card, that the chosen way needs here
    fits: bool
    fits_otherwise: bool | None  # another way would; None: nobody asked
    is_chosen: bool
    address: str  # the question with these values

    @property
    def shade(self) -> int:
        return min(int(self.share * STEPS), STEPS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Heat:
    sequences: tuple[int, ...]
    rows: tuple[tuple[int, tuple[Cell, ...]], ...]  # by micro batch
    is_whole: bool  # other ways were asked as well


def heat_of(answer: Answered, *, others: bool) -> Heat | None:
    """None: no engine runs what was asked for. `others`: ask for other ways as well, which takes a while."""
    if not answer.ways:
        return None
    way = answer.ways[0]
    # Powers of two around the one that is asked for, and that one.
    below = sum(length < way.levers.sequence for length in SEQUENCES)
    first = max(0, min(below - BEFORE, len(SEQUENCES) - COLUMNS))
    columns = tuple(sorted({*SEQUENCES[first : first + COLUMNS], way.levers.sequence}))
    lines = tuple(sorted({*MICRO_BATCHES, way.levers.micro_batch}))
    question = Question(
        shape=way.shape,
        base=way.levers,
        pinned=pinned(answer.plan.job) | {"micro_batch"},
        hardware=answer.plan.hardware,
        effective_batch=way.effective_batch,
        margin=answer.plan.job.limits.margin,
        calibration=calibration_of(answer.asked.request(), answer.plan.job),
    )
    asked = replace(question, hardware=way.hardware)
    here: dict[tuple[int, int], tuple[float, bool]] = {}  # the share of the card that the chosen way needs; if it fits
    for size in lines:
        for length in columns:
            footprint = weigh(asked, replace(way.levers, sequence=length, micro_batch=size))
            share = footprint.gpu.required_bytes / way.hardware.gpu.memory_bytes
            here[size, length] = share, excess_bytes(asked, footprint) == 0
    edge: dict[int, int] = {}  # for each sequence the largest micro batch with which any way fits; 0: none does
    top = len(lines)
    for length in columns if others else ():
        while top and not here[lines[top - 1], length][1] and not _fits_otherwise(question, length, lines[top - 1]):
            top -= 1
        edge[length] = lines[top - 1] if top else 0

    def cell(length: int, size: int) -> Cell:
        share, fits = here[size, length]
        # A batch that was asked for grows to the next one that the micro batch divides.
        changes = {"seq": str(length), "micro_batch": str(size), "accum": ""}
        if answer.asked.get("effective_batch"):
            steps = size * answer.plan.hardware.world
            changes["effective_batch"] = str(steps * max(1, -(-answer.plan.effective_batch // steps)))
        return Cell(
            sequence=length,
            micro_batch=size,
            share=share,
            fits=fits,
            fits_otherwise=not fits and size <= edge[length] if others else None,
            is_chosen=(length, size) == (way.levers.sequence, way.levers.micro_batch),
            address=answer.asked.address(**changes),
        )

    rows = tuple((size, tuple(cell(length, size) for length in columns)) for size in lines)
    return Heat(sequences=columns, rows=rows, is_whole=others)


def _fits_otherwise(question: Question, length: int, size: int) -> bool:
    """A step is as many sequences as `plan` would take where none were asked for."""
    batch = question.hardware.world * size * -(-SEQUENCES_A_GPU // size)
    if batch > MOST_BATCH:
        return False
    base = replace(question.base, sequence=length, micro_batch=size, accumulation=1)
    fixed = question.pinned - {"accumulation"}
    return something_fits(replace(question, base=base, pinned=fixed, effective_batch=batch))
