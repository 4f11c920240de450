"""`tightfit train`: plan for this machine, start a process on every GPU, follow it to the end.

A failure that need not come again is followed by another attempt: see `runs/supervise.py`.

Exit codes: 0 the training is done; 2 something that the user has to change, in one sentence; 3 the training failed, and
to start it again would not help; 4 it was asked to stop (SIGTERM, SIGUSR1, Ctrl-C, the job's timeout) and has saved a
checkpoint, from which the same command goes on; 130 and 143 it was interrupted before it could, by Ctrl-C or SIGTERM.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

from tightfit.cli.train_again import Manner, TrainCourse
from tightfit.cli.train_flags import TrainOptions, hang_timeout_s, parser, read_train_options
from tightfit.cli.train_machine import Busy, TrainingMachine, machine_for, nodes_of, reservations, wait_while_busy
from tightfit.cli.train_report import report, say_way_up, way_up
from tightfit.cli.train_request import NothingFits, Ready, prepare
from tightfit.cli.train_resume import asks_for_more, how_to_go_on, resume_of, sentence_of
from tightfit.cli.train_stages import train_stages
from tightfit.desk.request import Request, read_request
from tightfit.desk.stages import each_stage
from tightfit.formats.worker.read import WORKER_FILE
from tightfit.hardware.probes.card import CardProcess
from tightfit.messages import Listing, Message, text
from tightfit.planner.plan import Plan
from tightfit.runs.events import Event
from tightfit.runs.folder import ClaimedFolder, check_folder
from tightfit.runs.heartbeat import clear_beats
from tightfit.runs.launch import WORKER, Meeting
from tightfit.runs.own import OwnTrainer, Resume
from tightfit.runs.records import RunFolder, RunRecord
from tightfit.runs.reservations import Reservation, check_port, free_port
from tightfit.runs.run import Outcome, Signals, run
from tightfit.runs.supervise import Orders, Policy, RunResult, Supervisor
from tightfit.types import ConfigError, UserError

WORKER_FLAGS = ("no_probe", "tensorboard", "wandb")
"""What is passed on to the worker."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What the command line says about the run itself."""

    command: tuple[str, ...]
    """Of `run.json`."""
    options: tuple[str, ...]
    """Of the worker."""
    overwrite: bool
    take_over: bool
    resume: Resume
    as_json: bool
    worker: tuple[str, ...]
    """What starts one rank."""
    orders: Orders
    """For the supervisor."""
    more: bool = False
    """More steps or epochs than a finished run in the folder made."""


def train(argv: Sequence[str]) -> int:
    """The verb."""
    given = vars(parser().parse(argv))
    request, options = read_request(given), read_train_options(given)
    if options.check_memory:
        return _check_memory(request, options)
    stages = each_stage(request)
    if not stages:
        return _train(request, options, argv)
    return train_stages(stages, options, lambda each: _train(each, options, argv))


def _train(request: Request, options: TrainOptions, argv: Sequence[str]) -> int:
    """One run."""
    resume = resume_of(options)
    switches = tuple("--" + name.replace("_", "-") for name in WORKER_FLAGS if getattr(options, name))
    asked = Asked(
        command=("tightfit", "train", *argv),
        options=switches,
        overwrite=options.overwrite,
        take_over=options.take_over,
        resume=resume,
        as_json=options.json,
        worker=WORKER,
        orders=Orders(
            policy=Policy(max_attempts=options.max_attempts),
            hang_timeout_s=hang_timeout_s(options.hang_timeout),
        ),
    )
    try:
        ready = _prepare(request, options)
    except NothingFits as error:
        if options.dry_run:
            _show_shortages(error.plan, as_json=asked.as_json)
        raise
    more = not asked.overwrite and asks_for_more(ready.folder, ready.files[WORKER_FILE])
    asked = replace(asked, more=more)
    check_folder(ready.own_folder, overwrite=asked.overwrite, resume=resume.place, more=more)
    ready = replace(ready, said=(*ready.said, *filter(None, [sentence_of(resume, ready.folder, more=more)])))
    if request.port is not None and ready.nodes.rank == 0:
        check_port(request.port)
    if options.dry_run:
        return _dry_run(ready, asked)
    return _run(request, options, ready, asked)


def _prepare(request: Request, options: TrainOptions) -> Ready:
    """The run that was asked for; with --wait-for-gpu, once nobody else has what it needs."""
    if not options.wait_for_gpu:
        return _plan(request, options)
    ready = wait_while_busy(lambda: _plan(request, options), lambda text: print(f"tightfit: {text}", file=sys.stderr))
    assert ready is not None, "nobody gives up but by a signal"
    return ready


def _plan(request: Request, options: TrainOptions) -> Ready:
    if options.json:
        return prepare(request, options)
    from tightfit.screen.plan import waiting

    with waiting(text("cli.planning")):
        return prepare(request, options)


# --- without running ----------------------------------------------------------------------------


def _check_memory(request: Request, options: TrainOptions) -> int:
    from tightfit.hardware.machine import free_ram, this_machine

    machine = machine_for(request, options, nodes_of(request, options))
    total, free = this_machine().host_ram_bytes, free_ram()
    if options.json:
        print(json.dumps(_memory_report(machine, total, free), indent=2, default=str, ensure_ascii=False))
        return 0
    from tightfit.screen import open_console
    from tightfit.screen.train import draw_occupancy

    draw_occupancy(open_console(), machine.occupancy, machine.live, total, free)
    return 0


def _memory_report(machine: TrainingMachine, total: int | None, free: int | None) -> dict[str, Any]:

    def plain(holders: Sequence[CardProcess]) -> list[dict[str, Any]]:
        return [
            {"pid": each.pid, "user": each.user, "command": each.command, "bytes": each.held_bytes} for each in holders
        ]

    gpus = [
        {
            "number": device.number,
            "name": device.name,
            "total_bytes": device.total_bytes,
            "free_bytes": device.free_bytes,
            "run": machine.taken[device.key].folder if device.key in machine.taken else None,
            "holders": plain(device.holders),
        }
        for device in machine.occupancy.devices
    ]
    runs = [{"pid": each.pid, "folder": each.folder, "bytes": each.host_bytes} for each in machine.live]
    return {
        "gpus": gpus,
        "holders_of_some_gpu": plain(machine.occupancy.unplaced),
        "host_ram": {"total_bytes": total, "free_bytes": free, "reserved": runs},
    }


def _show_shortages(plan: Plan, *, as_json: bool) -> None:
    """What was priced and how far each is from fitting; the error that follows says what would help."""
    if as_json:
        from tightfit.desk.plan_report import plan_report

        print(
            json.dumps(
                {"folder": None, "plan": plan_report(plan)}, indent=2, default=str, ensure_ascii=False, allow_nan=False
            )
        )
        return
    from tightfit.screen import open_console
    from tightfit.screen.plan import draw_plan, draw_shortages

    console = open_console()
    draw_plan(console, plan)
    draw_shortages(console, plan)


def _dry_run(ready: Ready, asked: Asked) -> int:
    if asked.as_json:
        from tightfit.desk.plan_report import plan_report

        plain = {} if ready.plan is None else plan_report(ready.plan)
        print(
            json.dumps(
                {"folder": str(ready.folder), "plan": plain}, indent=2, default=str, ensure_ascii=False, allow_nan=False
            )
        )
        return 0
    from tightfit.screen import open_console, say
    from tightfit.screen.plan import draw_plan

    console = open_console()
    if ready.plan is not None:
        draw_plan(console, ready.plan)
    for sentence in ready.said:
        say(console, sentence)
    console.print()
    where = f"GPU {', '.join(str(device.number) for device in ready.devices)}" if ready.devices else text("cli.the-cpu")
    say(console, text("cli.nothing-started-written", ranks=ready.worker.ranks, where=where, folder=ready.folder))
    return 0


# --- running ------------------------------------------------------------------------------------


def _run(request: Request, options: TrainOptions, ready: Ready, asked: Asked) -> int:
    claimed = ClaimedFolder.claim(
        ready.own_folder,
        overwrite=asked.overwrite,
        resume=asked.resume.place,
        take_over=asked.take_over,
        more=asked.more,
    )
    record = RunRecord.begin(asked.command)
    try:
        claimed.begin(ready.files, record)
        with _reserve(ready) as meet:
            manner = Manner(options=asked.options, worker=asked.worker, meet=meet, patient=options.wait_for_gpu)
            course = TrainCourse(request, ready, claimed.folder, manner)
            ended = _follow(course, asked, claimed.folder)
    except (UserError, KeyboardInterrupt):
        claimed.discard()
        raise
    except BaseException:
        record.close(claimed.folder.path, state="failed", exit_code=1)
        claimed.release()
        raise
    return _report_end(course, asked, ended, claimed, record)


def _report_end(course: TrainCourse, asked: Asked, ended: RunResult, claimed: ClaimedFolder, record: RunRecord) -> int:
    """Leave what is worth keeping, and say how it went."""
    folder, outcome, ready = claimed.folder, ended.outcome, course.ready
    record.close(folder.path, state=outcome.state, exit_code=outcome.exit_code)
    in_vain = outcome.state in ("user error", "interrupted") and ended.in_vain
    if in_vain or (ready.nodes.rank and outcome.state == "done"):
        claimed.discard()
    else:
        claimed.release(done=outcome.state == "done")
    if outcome.state == "user error":
        assert outcome.failure is not None
        raise ConfigError(outcome.failure.sentence)
    faster = way_up(ready.plan, outcome.tally, course.bounds) if outcome.state == "done" else None
    if asked.as_json and ready.nodes.rank == 0:
        plain = report(ready, outcome, faster)
        print(
            json.dumps(
                {**plain, "attempts": [asdict(each) for each in ended.records]},
                indent=2,
                default=str,
                ensure_ascii=False,
            )
        )
    _say_end(ready, asked, ended)
    if not asked.as_json and ready.nodes.rank == 0:
        say_way_up(faster)
    return outcome.exit_code


def _say_end(ready: Ready, asked: Asked, ended: RunResult) -> None:
    from rich.console import Console

    from tightfit.screen import open_console
    from tightfit.screen.train import draw_attempts, draw_failure, draw_summary

    outcome = ended.outcome
    if outcome.failure is not None:
        console = Console(stderr=True, highlight=False, emoji=False, markup=False)
        draw_failure(console, outcome.failure, ended.verdict)
        draw_attempts(console, outcome.failure, ended.records, ended.verdict)
        if safe := _safe(asked, outcome):
            print(f"tightfit: {safe}", file=sys.stderr)
    elif outcome.state in ("interrupted", "stopped"):
        with suppress(OSError):  # closing the terminal may be what stopped it
            print(f"tightfit: {_describe_stop(asked, outcome)}", file=sys.stderr)
    elif not asked.as_json and ready.nodes.rank == 0:
        draw_summary(
            open_console(), ready.worker, outcome.tally, str(ready.folder), attempts=max(1, len(ended.records))
        )


def _describe_stop(asked: Asked, outcome: Outcome) -> str:
    """How far it came, and how to go on."""
    tally = outcome.tally
    done = text("cli.before-first-step") if tally.last is None else text("cli.after-step", step=tally.last.step)
    if outcome.state == "stopped":
        return text("cli.stopped-saved-checkpoint", done=done, resume=how_to_go_on(asked.resume, wrote=True))
    said = [text("cli.interrupted", done=done), _safe(asked, outcome), text("cli.every-process-ended")]
    return str(Listing(filter(None, said), ";"))


def _safe(asked: Asked, outcome: Outcome) -> str:
    """What of a run that ended in distress is not lost; empty: nothing, as far as its events say."""
    step, wrote = outcome.tally.safe_step, outcome.tally.checkpoint is not None
    if step is None:
        return ""
    return text("cli.there-checkpoint-step", step=step, resume=how_to_go_on(asked.resume, wrote=wrote))


def _follow(course: TrainCourse, asked: Asked, folder: RunFolder) -> RunResult:
    ready = course.ready
    if asked.as_json or ready.nodes.rank:
        return _supervise(course, asked, folder, _nothing)
    from tightfit.screen import open_console
    from tightfit.screen.train import Board, draw_start

    console = open_console()
    if ready.plan is not None:
        draw_start(console, ready.plan, str(ready.folder))
    for sentence in ready.said:
        print(sentence)
    console.print()
    with Board(console, ready.worker) as board:

        def show(event: Event) -> None:
            board.expect(course.ready.worker)
            board.show(event)

        return _supervise(course, asked, folder, show)


def _supervise(course: TrainCourse, asked: Asked, folder: RunFolder, show: Callable[[Event], None]) -> RunResult:
    ready, orders = course.ready, asked.orders
    run_folder = RunFolder(ready.folder)
    if ready.nodes.count > 1 and ready.nodes.hostfile is None:  # each machine has a desk, and none decides for all
        starts = course.starts(asked.resume.options)
        outcome = run(starts, run_folder, show, cwd=folder.plan)
        clear_beats(run_folder.path, [start.rank for start in starts])
        return RunResult(outcome=outcome)
    if ready.plan is not None:
        allow = frozenset[str](ready.plan.job.limits.allow)
        orders = replace(orders, policy=replace(orders.policy, allow=allow))
    with Signals() as signals:
        trainer = OwnTrainer(
            course=course,
            folder=run_folder,
            show=show,
            orders=orders,
            resume=asked.resume,
            signals=signals,
            cwd=folder.plan,
        )
        return Supervisor(trainer=trainer, folder=run_folder.path, policy=orders.policy, signals=signals).run()


def _nothing(event: Event) -> None:
    """Nobody looks."""


@contextmanager
def _reserve(first: Ready) -> Iterator[Callable[[Ready], Meeting]]:
    """What the run takes of this machine, written down for others anew with every plan; and where its ranks meet."""
    registry, held = reservations(), list[Reservation]()

    def meet(ready: Ready) -> Meeting:
        nodes, keys = ready.nodes, tuple(device.key for device in ready.devices)
        with registry.alone():
            others = [entry for entry in registry.live() if entry not in held]
            _check_taken(ready, others)
            port = nodes.port or free_port([entry.port for entry in others if entry.port is not None])
            ram = 0 if nodes.hostfile is not None else ready.worker.ram_bytes_per_node
            ours = Reservation.ours(ready.folder, ram, keys, port)
            registry.add(ours)
            held[:] = [ours]
        return Meeting(node=nodes.rank, nodes=nodes.count, address=nodes.address, port=port)

    meet(first)
    try:
        yield meet
    finally:
        registry.remove(held[0])


def _check_taken(ready: Ready, live: Sequence[Reservation]) -> None:
    """Another run may have started while this one was planned."""
    for device in ready.devices:
        for entry in live:
            if device.key in entry.gpus:
                raise Busy(
                    Message("cli.gpu-just-taken-2", number=device.number, words=entry.words),
                    Message("cli.start-again-or-choose"),
                )
