"""The worker's entry: `python -m tightfit.train worker.json`, one process a GPU.

Also the other work that needs torch and is asked for by the desk: `preview`, `export`.

Exit codes: 0 done; 2 the input is wrong; 3 out of memory; 4 stopped before the end with a checkpoint saved, because a
signal (SIGTERM, SIGUSR1, SIGINT) or the job's time limit asked for it; 128 + its number after a signal that came before
the first step, or a second time; 1 anything else. What ended a rank is left in the run's folder under `errors/`; a
user's mistake is said by one rank alone.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import NoReturn

from tightfit.inputs.surroundings import cache_folder, choose_language, note_variables
from tightfit.messages import text
from tightfit.train.stop import Stop, leave
from tightfit.types import TightfitError, UserError

USER_ERROR, STOPPED = 2, 4
CODES = {"finished": 0, "stopped": STOPPED, "timeout": STOPPED}
"""By how a run ended. One that stopped can go on from its checkpoint."""
OTHER_WORK = {"preview": "tightfit.train.data.preview", "export": "tightfit.train.export"}
FAULTS = "TIGHTFIT_FAULTS"  # the tests' own variable: see `tests/injected_faults.py`


def main(argv: Sequence[str]) -> int:
    try:
        choose_language()
        if argv and argv[0] in OTHER_WORK:
            return int(import_module(OTHER_WORK[argv[0]]).main(argv[1]))
    except UserError as error:
        print(f"tightfit: {' '.join(str(error).split())}", file=sys.stderr)  # noqa: T201
        return USER_ERROR
    _work(argv)


def read_options(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tightfit.train", description=text("train.help-rank"))
    parser.add_argument("worker", type=Path, help=text("train.help-worker"))
    parser.add_argument("--no-probe", dest="probe", action="store_false", help=text("train.help-no-probe"))
    parser.add_argument("--rehearse", action="store_true", help=text("train.help-rehearse"))
    parser.add_argument("--cap-bytes", type=int, help=text("train.help-cap"))
    parser.add_argument(
        "--steps", dest="rehearse_steps", metavar="STEPS", type=int, default=3, help=text("train.help-steps")
    )
    parser.add_argument("--tensorboard", action="store_true")
    parser.add_argument("--wandb", action="store_true")
    parser.add_argument("--resume", default="auto", help=text("train.help-resume"))
    parser.add_argument("--resume-anyway", action="store_true", help=text("train.help-resume-anyway"))
    parser.add_argument("--trust-pickle", action="store_true", help=text("train.help-trust-pickle"))
    parser.add_argument("--skip-steps", default="", help=text("train.help-skip-steps"))
    args = parser.parse_args(argv)
    args.skip_steps = frozenset(int(word) for word in args.skip_steps.split(",") if word)
    return args


def _work(argv: Sequence[str]) -> NoReturn:
    args = read_options(argv)
    stop = Stop().install()
    from tightfit.runs.heartbeat import DISK_FULL, DUMP, Heartbeat
    from tightfit.runs.processes import PARENT_FD, end_with_parent

    # The stacks of all threads go to the log: when the supervisor asks for them, and at a crash in native code.
    faulthandler.enable()
    faulthandler.register(DUMP, all_threads=True)
    if PARENT_FD in os.environ:  # end when whoever started this rank is gone
        end_with_parent(int(os.environ.pop(PARENT_FD)))
    set_environment()
    from tightfit.runs.lock import InUse
    from tightfit.runs.records import USERS, write_last_words
    from tightfit.train.config import Options, read_worker_config
    from tightfit.train.distress import is_disk_full, last_words
    from tightfit.train.events import RankHeartbeat

    rank = int(os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")))
    folder, heartbeat = None, RankHeartbeat()
    try:
        config = read_worker_config(args.worker)
        folder = config.folder
        options = Options(**{name: getattr(args, name) for name in Options.__slots__})
        from tightfit.train.place import place_of
        from tightfit.train.worker import run

        place = place_of(os.environ, config, options)
        # DeepSpeed asks the environment, whoever started this process.
        os.environ.update(RANK=str(place.rank), LOCAL_RANK=str(place.device_number), WORLD_SIZE=str(place.world))
        beats, faults = Heartbeat(folder, place.rank) if place.launcher == "tightfit" else None, None
        if named := os.environ.get(FAULTS):
            faults = import_module("injected_faults").read_faults(named, folder, place.rank)
        heartbeat = RankHeartbeat(beats, faults)
        ending = run(config, options, place, cache_folder(), stop, heartbeat)
        stop.deaf()
        leave(CODES[ending])
    except BaseException as error:
        code, words = last_words(error, rank, heartbeat.stage, heartbeat.step)
        if is_disk_full(error):
            heartbeat.beat(DISK_FULL)  # such a disk takes no other word
        if folder is not None and words.text and not isinstance(error, InUse):  # or another run would take it
            write_last_words(folder, words)
        with suppress(OSError):  # the log's disk may be what is full; the exit code says it then
            if words.kind not in USERS and not isinstance(error, TightfitError):
                traceback.print_exc()
            elif words.text and (rank == 0 or words.kind not in USERS):
                print(f"tightfit: {' '.join(str(words.text).split())}", file=sys.stderr)  # noqa: T201
        # No orderly farewell: the others may wait in a collective that never comes.
        leave(code)


def set_environment() -> None:
    """What must be set before torch is loaded, and what DeepSpeed looks for. What the user set stays."""
    from tightfit.hardware.slurm import slurm_rank

    note_variables()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    # DeepSpeed compiles with ninja. It came with this Python, and nobody need have activated its environment.
    programs, places = str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath).split(os.pathsep)
    if programs not in places:
        os.environ["PATH"] = os.pathsep.join([*places, programs])
    found = slurm_rank(os.environ) if "RANK" not in os.environ else None
    if found is not None:
        os.environ.setdefault("MASTER_ADDR", found.address)
        os.environ.setdefault("MASTER_PORT", str(found.port))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
