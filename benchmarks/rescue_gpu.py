"""Two trainings whose plans are too optimistic, on a GPU that is made a small one, and a kernel that never ends.

    python benchmarks/rescue_gpu.py [--only loss,step,hang] [--out rescue.jsonl] [--keep DIR]
    python benchmarks/rescue_gpu.py --dry-run        the plans alone, on any machine

The first fails in the loss, the second in the optimizer step. Nothing is injected there: a calibration in a cache of
its own claims that earlier runs held far less, the planner believes it, and PyTorch refuses what is beyond the cap.
Then `tightfit train` has to see the cause, correct the prediction, step down once and finish. The third waits inside
the driver, as for a peer that never comes: every rank's stacks are written, and the same plan goes on. Models are drawn
at random from their shapes and data is generated, so nothing is downloaded; torch, transformers and DeepSpeed are
needed.

A line of JSON for each attempt and one for each run; exit code 1 where a run was not rescued once and finished.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from tightfit.cli import train as cli_train
from tightfit.desk.calibration import Calibrations
from tightfit.desk.plan import bounds_of
from tightfit.desk.plan_request import PlanInput, resolve_request
from tightfit.desk.request import read_request
from tightfit.formats.target import Target
from tightfit.memory import estimate
from tightfit.planner import plan_within
from tightfit.planner.calibration import Entry, MeasuredPhase, data_mark, training_of, way_mark
from tightfit.planner.plan import Plan, Way
from tightfit.planner.step_down import NoWay, Shortfall, step_down
from tightfit.priced import strategy_name
from tightfit.runs.calibration import learn_from_failure
from tightfit.runs.records import read_attempts
from tightfit.types import Checkpointing, Engine, Levers, Phase, PhaseName

GIB = 2**30
CARD_GIB = 24
PHASES: tuple[PhaseName, ...] = ("init", "forward", "loss", "backward", "step")
LIMIT_S = 540
DESK = (
    "import sys\n"
    "from tightfit import cli\n"
    "from tightfit.cli import train\n"
    "train.WORKER = (*train.WORKER, '--cap-bytes', sys.argv[1])\n"
    "sys.exit(cli.main(['train', *sys.argv[2:]]))\n"
)
"""The worker's own switch of rehearsals makes the card a smaller one."""


@dataclass(frozen=True, kw_only=True)
class Case:
    name: str
    phase: PhaseName
    """Where it fails."""
    config: dict[str, Any]
    words: tuple[str, ...]
    engine: Engine
    micro_batch: int
    """The way about which the calibration lies: the one that is to be planned."""
    fault: str = ""
    """What the worker's own switch of the tests is told; then nothing is said about any way."""
    maligned: tuple[Engine, ...] = ()
    """Those about which it lies the other way round, so that they are not planned instead."""

    @property
    def kind(self) -> str:
        return "hang" if self.fault else "device-oom"


LLAMA = {"model_type": "llama", "max_position_embeddings": 4096, "tie_word_embeddings": True}
CASES = (
    Case(
        name="loss",
        phase="loss",
        config=LLAMA
        | {"vocab_size": 128_256, "hidden_size": 1536, "intermediate_size": 4096, "num_hidden_layers": 16}
        | {"num_attention_heads": 12, "num_key_value_heads": 4},
        words=(
            *("--seq", "2048", "--effective-batch", "8", "--save-every", "none"),
            *("--engine", "zero0", "--loss", "plain", "--checkpointing", "full"),
        ),
        engine="zero0",
        micro_batch=8,
    ),
    Case(
        name="step",
        phase="step",
        config=LLAMA
        | {"vocab_size": 32_000, "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 26}
        | {"num_attention_heads": 16, "num_key_value_heads": 4},
        words=(
            *("--seq", "1024", "--effective-batch", "4", "--save-every", "none"),
            *("--micro-batch", "4", "--accum", "1"),
        ),
        engine="zero0",
        micro_batch=4,
        maligned=("fsdp2",),
    ),
    Case(
        name="hang",
        phase="backward",
        config=LLAMA
        | {"vocab_size": 32_000, "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 4}
        | {"num_attention_heads": 8, "num_key_value_heads": 4},
        words=("--seq", "256", "--effective-batch", "4", "--save-every", "1", "--hang-timeout", "20s"),
        engine="zero0",
        micro_batch=4,
        fault="gpu-hang@rank=0,stage=backward,step=2",
    ),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--keep", type=Path, help="where the runs are kept; left out: nowhere")
    parser.add_argument("--dry-run", action="store_true", help="print the plans that are expected, and start nothing")
    args = parser.parse_args()
    wanted = {word for word in args.only.split(",") if word}
    good = True
    with tempfile.TemporaryDirectory(prefix="rescue-") as scratch:
        for case in CASES:
            if (wanted and case.name not in wanted) or (case.fault and args.dry_run):
                continue
            folder = (args.keep or Path(scratch)) / case.name
            folder.mkdir(parents=True, exist_ok=True)
            for row in dry(case, folder) if args.dry_run else run(case, folder):
                good &= row.get("as_expected", True)
                text = json.dumps(row, ensure_ascii=False)
                print(text, flush=True)
                if args.out is not None:
                    with args.out.open("a", encoding="utf-8") as file:
                        file.write(text + "\n")
    return 0 if good else 1


# --- the plan that is too optimistic ------------------------------------------------------------


def words_of(case: Case, folder: Path) -> list[str]:
    (folder / "config.json").write_text(json.dumps(case.config), encoding="utf-8")
    return [
        *("--model", str(folder / "config.json"), "--gpus", f"1x{CARD_GIB}GB", "--host-ram", "100GB"),
        *("--precision", "bf16", "--max-steps", "3", "--output", str(folder / "run")),
        *case.words,
    ]


def asked(words: list[str]) -> PlanInput:
    return resolve_request(read_request(vars(cli_train.parser().parse(words))), lambda job, hardware: hardware)


def lies(case: Case, request: PlanInput) -> Iterator[Entry]:
    """What no run ever measured. The last one is the newest: that no more was measured there counts for all others."""
    if case.fault:
        return
    good = lied_about(case, request)
    for engine in case.maligned:
        for layers in (0, None):
            levers = replace(good, engine=engine, checkpointing=Checkpointing(layers=layers))
            yield entry(request, levers, dict.fromkeys(PHASES, CARD_GIB * GIB))
    held = {name: phase.total_bytes for name, phase in phases_of(request, good).items()}
    yield entry(request, good, {case.phase: CARD_GIB * GIB * 3 // 4 - held[case.phase]})


def entry(request: PlanInput, levers: Levers, errors: Mapping[PhaseName, int]) -> Entry:
    held = {name: phase.total_bytes for name, phase in phases_of(request, levers).items()}
    return Entry(
        training=training_of(request.shape, levers, request.hardware),
        way=way_mark(levers),
        data=data_mark(request.job),
        sequence=levers.sequence,
        day=datetime.now(timezone.utc).date().isoformat(),
        measured=tuple(
            MeasuredPhase(
                where="gpu", phase=name, predicted_bytes=held[name], measured_bytes=held[name] + errors.get(name, 0)
            )
            for name in PHASES
        ),
    )


def lied_about(case: Case, request: PlanInput) -> Levers:
    job = request.job
    return replace(
        Levers(),
        engine=case.engine,
        sequence=job.sequence,
        precision=job.precision,
        micro_batch=case.micro_batch,
        accumulation=(job.effective_batch or case.micro_batch) // case.micro_batch,
        checkpointing=Checkpointing(layers=None),
    )


def phases_of(request: PlanInput, levers: Levers) -> Mapping[PhaseName, Phase]:
    return estimate(request.shape, levers, 1, request.hardware).gpu.phases


# --- what would happen --------------------------------------------------------------------------


def dry(case: Case, folder: Path) -> Iterator[dict[str, Any]]:
    request = asked(words_of(case, folder))
    cache = Calibrations(folder / "cache/tightfit")
    honest = planned(request, cache)
    for each in lies(case, request):
        cache.add(each)
    believed = planned(request, cache)
    way = way_of(believed)
    true = {
        name: phase.total_bytes for name, phase in estimate(way.shape, way.levers, 1, way.hardware).gpu.phases.items()
    }
    others = [size for name, size in true.items() if name in PHASES and name != case.phase]
    fails = true[case.phase] > CARD_GIB * GIB and max(others) < CARD_GIB * GIB * 0.97
    yield {"job": case.name, "plan": "without the lie", **told(way_of(honest))}
    yield {
        "job": case.name,
        "plan": "with the lie",
        **told(way),
        "true_gib": {name: round(size / GIB, 2) for name, size in true.items()},
        "as_expected": fails,
    }
    yield {"job": case.name, "plan": "after the failure", **stepped(case, believed, true[case.phase], request, cache)}


def planned(request: PlanInput, cache: Calibrations) -> Plan:
    return plan_within(
        bounds_of(request.job, Target(), cache.read(request.job)), request.job, request.shape, request.hardware
    )


def way_of(plan: Plan) -> Way:
    if plan.chosen is None:
        raise SystemExit("nothing fits: the case is not what it should be")
    return plan.chosen


def told(way: Way) -> dict[str, Any]:
    levers = way.levers
    return {
        "strategy": str(strategy_name(levers)),
        "micro_batch": levers.micro_batch,
        "accumulation": levers.accumulation,
        "believed_peak_gib": round(way.footprint.gpu.peak_bytes / GIB, 2),
        "required_gib": round(way.footprint.gpu.required_bytes / GIB, 2),
    }


def stepped(case: Case, last: Plan, held: int, request: PlanInput, cache: Calibrations) -> dict[str, Any]:
    """The next plan, were the failure's numbers those of the true prediction."""
    missing = max(GIB, held - CARD_GIB * GIB)
    shortfall = Shortfall(where="gpu", phase=case.phase, missing_bytes=missing, room_bytes=CARD_GIB * GIB)
    known = cache.read(request.job).after_failure(learn_from_failure(last, shortfall, held))
    bounds = bounds_of(request.job, Target(), known)
    found = step_down(last, shortfall, bounds=bounds)
    if isinstance(found, NoWay):
        return {"because": list(map(str, found.because)), "as_expected": False}
    way = way_of(found.plan)
    true = estimate(way.shape, way.levers, way.hardware.world, way.hardware).gpu.required_bytes
    return {
        **told(way),
        "changed": list(found.changed),
        "true_required_gib": round(true / GIB, 2),
        "as_expected": true < CARD_GIB * GIB,
    }


# --- what happens -------------------------------------------------------------------------------


def run(case: Case, folder: Path) -> Iterator[dict[str, Any]]:
    words = words_of(case, folder)
    for each in lies(case, asked(words)):
        Calibrations(folder / "cache/tightfit").add(each)
    environment = {**os.environ, "XDG_CACHE_HOME": str(folder / "cache"), "COLUMNS": "120"}
    if case.fault:
        tests = str(Path(__file__).parents[1] / "tests")
        path = os.pathsep.join([tests, *filter(None, [os.environ.get("PYTHONPATH")])])
        environment |= {"TIGHTFIT_FAULTS": case.fault, "PYTHONPATH": path}
    command = [sys.executable, "-c", DESK, str(CARD_GIB * GIB), *words, "--json"]
    began = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=LIMIT_S)
    records = read_attempts(folder / "run")
    for record in records:
        plain = asdict(record)
        cause, following = plain.pop("cause"), plain.pop("next")
        yield {
            "job": case.name,
            **{key: plain[key] for key in ("number", "plan", "state", "effective_batch", "last_step", "exit_codes")},
            "cause": None if cause is None else {key: cause[key] for key in ("id", "kind", "phase", "sentence")},
            "next": None if following is None else {key: following[key] for key in ("action", "changed", "because")},
        }
    first = records[0].cause if records else None
    finished = done.returncode == 0
    as_expected = finished and len(records) == 2 and first is not None
    as_expected = as_expected and first is not None and (first.kind, first.phase) == (case.kind, case.phase)
    yield {
        "job": case.name,
        "finished": finished,
        "exit_code": done.returncode,
        "attempts": len(records),
        "expected_phase": case.phase,
        "phase": None if first is None else first.phase,
        "seconds": round(time.monotonic() - began, 1),
        "as_expected": as_expected,
        **({} if as_expected else {"stderr": done.stderr[-2000:]}),
    }


if __name__ == "__main__":
    sys.exit(main())
