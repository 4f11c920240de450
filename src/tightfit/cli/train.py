"""`tightfit train`: plan for this machine, start a process on every GPU, follow it to the end.

A failure that need not come again is followed by another attempt: see `runs/supervise.py`.

Exit codes: 0 the training is done; 2 something that the user has to change, in one sentence; 3 the training failed, and
to start it again would not help; 4 it was asked to stop (SIGTERM, SIGUSR1, Ctrl-C, the job's timeout) and has saved a
checkpoint, from which the same command goes on; 130 and 143 it was interrupted before it could, by Ctrl-C or SIGTERM.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from typing import Any

from tightfit.cli.flags import ALIASES, CHANGE, GROUPS, Parser, hang_timeout_s, print_json, read_options
from tightfit.cli.plan import FLAGS, WHOLE, add_data_flags, add_flags
from tightfit.desk.request import Request, each_stage, pick_stage, read_request
from tightfit.formats.worker.read import WORKER_FILE
from tightfit.hardware.probes.card import CardProcess
from tightfit.inputs.flags import flags_from_levers, spelt
from tightfit.job.file import folder_of_merged_model, job_from_text, model_left_by
from tightfit.messages import Listing, Message, text
from tightfit.planner.plan import Plan
from tightfit.runs.events import Checkpointed, Event, Resumed
from tightfit.runs.folder import ClaimedFolder, check_folder
from tightfit.runs.heartbeat import clear_beats
from tightfit.runs.launch import WORKER, Meeting
from tightfit.runs.own import OwnTrainer, Resume
from tightfit.runs.records import RunFolder, RunRecord, read_run
from tightfit.runs.reservations import Reservation, check_port, free_port
from tightfit.runs.run import Outcome, Signals, run
from tightfit.runs.supervise import Policy, RunResult, Supervisor
from tightfit.start.course import Manner, TrainCourse, way_up
from tightfit.start.machine import Busy, reservations, wait_while_busy
from tightfit.start.train import (
    NothingFits,
    Ready,
    TrainOptions,
    asks_for_more,
    describe_resume,
    how_to_go_on,
    machine_for,
    prepare,
    resume_of,
)
from tightfit.types import ConfigError, UserError

EXAMPLE = "tightfit train --model tiny_mamba --seq 128 --max-steps 50 --output runs/first"
RUN = "the run"
RUN_FLAGS: dict[str, tuple[str | None, Message]] = {
    "output": ("DIR", Message("help.output")),
    "overwrite": (None, Message("help.overwrite")),
    "take_over": (None, Message("help.take-over")),
    "plan": ("DIR", Message("help.plan")),
    "dry_run": (None, Message("help.dry-run")),
    "check_memory": (None, Message("help.check-memory")),
    "no_probe": (None, Message("help.no-probe")),
    "tensorboard": (None, Message("help.tensorboard")),
    "wandb": (None, Message("help.wandb")),
    "save_every": ("500|10m|1h|none", Message("help.save-every")),
    "keep_last": ("N", Message("help.keep-last")),
    "keep_every": ("N", Message("help.keep-every")),
    "resume": ("auto|none|PATH", Message("help.resume")),
    "trust_pickle": (None, Message("help.trust-pickle")),
    "resume_anyway": (None, Message("help.resume-anyway")),
    "max_attempts": ("N", Message("help.max-attempts")),
    "hang_timeout": ("300s|10m|1h", Message("help.hang-timeout")),
    "wait_for_gpu": (None, Message("help.wait-for-gpu")),
    "deepspeed_config": ("FILE", Message("help.deepspeed-config")),
    "port": ("N", Message("help.train-port")),
}
NODE_FLAGS: dict[str, tuple[str | None, Message]] = {
    "hostfile": ("FILE", Message("help.train-hostfile")),
    "nodes": ("N", Message("help.nodes")),
    "node_rank": ("K", Message("help.node-rank")),
    "master_addr": ("HOST", Message("help.master-addr")),
}
EXIT_CODES = {
    "0": Message("help.train-exit-0"),
    **CHANGE,
    "3": Message("help.train-exit-3"),
    "4": Message("help.train-exit-4"),
    "130, 143": Message("help.train-exit-130-143"),
}
NUMBERS = WHOLE | {"max_gpus", "nodes", "node_rank", "keep_last", "keep_every", "max_attempts"}
WORKER_FLAGS = ("no_probe", "tensorboard", "wandb")
"""What is passed on to the worker."""
WITH_PLAN = {
    *("plan", "output", "overwrite", "dry_run", "check_memory", "no_probe", "tensorboard", "wandb", "port", "json"),
    *("take_over", "gpu_ids", "nodes", "node_rank", "master_addr", "hostfile", "resume", "resume_anyway"),
    *("trust_pickle", "max_attempts", "hang_timeout", "wait_for_gpu", "no_calibration"),
}
"""What may be said beside a plan that is written already."""


def train(argv: Sequence[str]) -> int:
    """The verb."""
    given = vars(parser().parse(argv))
    request, options = read_request(given), _read_train_options(given)
    if options.check_memory:
        return _check_memory(request, options)
    stages = each_stage(request)
    if not stages:
        return _train(request, options, argv)

    # Every stage that is not done yet, from the model that the one before it left; the exit code of the last that
    # ran. The same command goes on after an end: stages that are done are passed over, the one under way resumes.
    def say(said: str) -> None:
        print(said, file=sys.stderr if options.json else sys.stdout, flush=True)

    for request in stages:
        assert request.file is not None
        stage = pick_stage(request, job_from_text(request.file.read(), model=request.model).job)
        assert stage is not None
        record, merged = read_run(stage.folder), folder_of_merged_model(stage.root, stage.number)
        if record is not None and record.state == "done" and not options.overwrite:
            say(text("cli.done-already", words=stage.words, folder=stage.folder))
        elif stage.model is not None and not stage.model.exists():
            assert options.dry_run, "every stage before it is done"
            say(text("cli.planned-when-stage", words=stage.words, number=stage.number - 1))
            continue
        else:
            if options.overwrite and merged.exists():
                raise ConfigError(Message("cli.holds-what-stage", merged=merged, number=stage.number))
            say(text("cli.stage-in", words=stage.words, folder=stage.folder))
            code = _train(request, options, argv)
            if code != 0:
                return code
        if stage.number < stage.count and not options.dry_run and model_left_by(stage.root, stage.number) is None:
            # A stage that trained adapters leaves them beside the model: the next one starts from both in one.
            from tightfit.cli.export import export

            if export([str(stage.folder), "--to", str(merged)]) != 0:
                raise ConfigError(Message("cli.adapters-stage-could", number=stage.number))
    return 0


# --- the command line ---------------------------------------------------------------------------


def parser() -> Parser:
    usage = "[JOB.yaml] [--model MODEL] [--data DATA] [--output DIR] [flags]"
    made = Parser("train", text("help.train-does"), EXAMPLE, usage)
    made.add_file("JOB.yaml", text("help.plan-file"))
    made.add_argument("--model", metavar="MODEL", help=text("help.model"))
    made.add_argument("--trace", action="store_true", help=text("help.trace"))
    add_data_flags(made)
    table = {title: dict(flags) for title, flags in FLAGS.items() if title != "the files"}
    del table["the machine"]["world"], table["the question"]["max"]
    table["the machine"]["max_gpus"] = ("N", Message("help.max-gpus"))
    add_flags(made, {RUN: RUN_FLAGS, **table, "several machines": NODE_FLAGS}, NUMBERS)
    group = next(group for group in made._action_groups if group.title == str(GROUPS[RUN]))
    group.add_argument("--no-async-save", dest="async_save", action="store_false", help=text("help.no-async-save"))
    made.knows_as(ALIASES)
    return made.ends_with(EXIT_CODES, Message("help.train-writes"))


def _read_train_options(given: Mapping[str, Any]) -> TrainOptions:
    """What was given, unless flags contradict each other."""
    options = read_options(TrainOptions, given)
    if "plan" in given:
        more = sorted(set(given) - WITH_PLAN)
        if more:
            what = text("cli.job-file") if more[0] == "file" else spelt(more[0])
            raise ConfigError(Message("cli.plan-decided-already", plan=options.plan, what=what))
    for name in ("max_gpus", "nodes"):
        if given.get(name, 1) < 1:
            raise ConfigError(Message("cli.at-least-one", name=spelt(name), given=given[name]))
    if "max_gpus" in given and ("num_gpus" in given or "gpu_ids" in given):
        other = "num_gpus" if "num_gpus" in given else "gpu_ids"
        raise ConfigError(Message("cli.max-gpus-both-say", other=spelt(other)))
    if options.max_attempts < 1:
        raise ConfigError(Message("cli.attempts-at-least-one", given=options.max_attempts))
    hang_timeout_s(options.hang_timeout)
    if not 1 <= given.get("port", 1) <= 65_535:
        raise ConfigError(Message("cli.port-must-1", given=given["port"]))
    together = [name for name in ("nodes", "node_rank", "master_addr") if name in given]
    if together and "hostfile" in given:
        raise ConfigError(Message("cli.hostfile-starts-every", together=spelt(together[0])))
    nodes, rank = options.nodes or 1, options.node_rank
    if "master_addr" not in given and rank != 0:
        raise ConfigError(Message("cli.node-rank-needs-master-addr", given=rank))
    if "node_rank" in given and "nodes" not in given:
        raise ConfigError(Message("cli.node-rank-needs-nodes"))
    if nodes > 1 and "node_rank" not in given:
        raise ConfigError(Message("cli.nodes-needs-node-rank", nodes=nodes, nodes2=nodes - 1))
    if not 0 <= rank < nodes:
        raise ConfigError(Message("cli.node-rank-must-0", nodes=nodes - 1, rank=rank))
    if nodes > 1 and given.get("max_attempts", 1) != 1:
        raise ConfigError(Message("cli.max-attempts-starts-again"))
    if nodes > 1 and "master_addr" not in given:
        raise ConfigError(Message("cli.nodes-needs-master-addr"))
    return options


# --- one run after another ----------------------------------------------------------------------


def _train(request: Request, options: TrainOptions, argv: Sequence[str]) -> int:
    """One run."""
    resume = resume_of(options)
    try:
        if options.wait_for_gpu:
            awaited = wait_while_busy(
                lambda: _plan(request, options), lambda said: print(f"tightfit: {said}", file=sys.stderr)
            )
            assert awaited is not None, "nobody gives up but by a signal"
            ready = awaited
        else:
            ready = _plan(request, options)
    except NothingFits as error:
        if options.dry_run:
            # What was priced and how far each is from fitting; the error that follows says what would help.
            if options.json:
                from tightfit.desk.report import plan_report

                print_json({"folder": None, "plan": plan_report(error.plan)}, allow_nan=False)
            else:
                from tightfit.screen import open_console
                from tightfit.screen.plan import draw_plan, draw_shortages

                console = open_console()
                draw_plan(console, error.plan)
                draw_shortages(console, error.plan)
        raise
    more = not options.overwrite and asks_for_more(ready.folder, ready.files[WORKER_FILE])
    check_folder(ready.own_folder, overwrite=options.overwrite, resume=resume.place, more=more)
    ready = replace(ready, said=(*ready.said, *filter(None, [describe_resume(resume, ready.folder, more=more)])))
    if request.port is not None and ready.nodes.rank == 0:
        check_port(request.port)
    if options.dry_run:
        if options.json:
            from tightfit.desk.report import plan_report

            plain = {} if ready.plan is None else plan_report(ready.plan)
            print_json({"folder": str(ready.folder), "plan": plain}, allow_nan=False)
            return 0
        from tightfit.screen import open_console, say
        from tightfit.screen.plan import draw_plan

        console = open_console()
        if ready.plan is not None:
            draw_plan(console, ready.plan)
        for sentence in ready.said:
            say(console, sentence)
        console.print()
        numbers = ", ".join(str(device.number) for device in ready.devices)
        where = f"GPU {numbers}" if numbers else text("cli.the-cpu")
        say(console, text("cli.nothing-started-written", ranks=ready.worker.ranks, where=where, folder=ready.folder))
        return 0
    claimed = ClaimedFolder.claim(
        ready.own_folder, overwrite=options.overwrite, resume=resume.place, take_over=options.take_over, more=more
    )
    record = RunRecord.begin(("tightfit", "train", *argv))
    switches = tuple(spelt(name) for name in WORKER_FLAGS if getattr(options, name))
    try:
        claimed.begin(ready.files, record)
        with _reserve(ready) as meet:
            manner = Manner(options=switches, worker=WORKER, meet=meet, patient=options.wait_for_gpu)
            course = TrainCourse(request, ready, claimed.folder, manner)
            ended = _follow(course, options, resume, claimed.folder)
    except (UserError, KeyboardInterrupt):
        claimed.discard()
        raise
    except BaseException:
        record.close(claimed.folder.path, state="failed", exit_code=1)
        claimed.release()
        raise
    record.close(claimed.folder.path, state=ended.outcome.state, exit_code=ended.outcome.exit_code)
    # Leave what is worth keeping, and say how it went.
    outcome, ready = ended.outcome, course.ready
    is_done, speaks = outcome.state == "done", ready.nodes.rank == 0
    in_vain = outcome.state in ("user error", "interrupted") and ended.in_vain
    if in_vain or (is_done and not speaks):
        claimed.discard()
    else:
        claimed.release(done=is_done)
    if outcome.state == "user error":
        assert outcome.failure is not None
        raise ConfigError(outcome.failure.sentence)
    faster = way_up(ready.plan, outcome.tally, course.bounds) if is_done else None
    if options.json and speaks:
        print_json({**report(ready, outcome, faster), "attempts": [asdict(each) for each in ended.records]})
    _say_end(ready, ended, resume, as_json=options.json)
    if not options.json and speaks:
        say_way_up(faster)
    return outcome.exit_code


def _plan(request: Request, options: TrainOptions) -> Ready:
    from tightfit.screen.plan import waiting

    with waiting(text("cli.planning"), quiet=options.json):
        return prepare(request, options)


# --- without running ----------------------------------------------------------------------------


def _check_memory(request: Request, options: TrainOptions) -> int:
    from tightfit.hardware.machine import free_ram, this_machine

    machine = machine_for(request, options)
    total, free = this_machine().host_ram_bytes, free_ram()
    if not options.json:
        from tightfit.screen import open_console
        from tightfit.screen.train import draw_occupancy

        draw_occupancy(open_console(), machine.occupancy, machine.live, total, free)
        return 0

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
    ram = {"total_bytes": total, "free_bytes": free, "reserved": runs}
    print_json({"gpus": gpus, "holders_of_some_gpu": plain(machine.occupancy.unplaced), "host_ram": ram})
    return 0


# --- running ------------------------------------------------------------------------------------


@contextmanager
def _reserve(first: Ready) -> Iterator[Callable[[Ready], Meeting]]:
    """What the run takes of this machine, written down for others anew with every plan; and where its ranks meet."""
    registry, held = reservations(), list[Reservation]()

    def meet(ready: Ready) -> Meeting:
        nodes, keys = ready.nodes, tuple(device.key for device in ready.devices)
        with registry.alone():
            others = [entry for entry in registry.live() if entry not in held]
            for device in ready.devices:  # another run may have started while this one was planned
                for entry in others:
                    if device.key in entry.gpus:
                        problem = Message("cli.gpu-just-taken-2", number=device.number, words=entry.words)
                        raise Busy(problem, Message("cli.start-again-or-choose"))
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


def _follow(course: TrainCourse, options: TrainOptions, resume: Resume, folder: RunFolder) -> RunResult:
    ready = course.ready
    if options.json or ready.nodes.rank:
        return _supervise(course, options, resume, folder, lambda event: None)
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

        return _supervise(course, options, resume, folder, show)


def _supervise(
    course: TrainCourse, options: TrainOptions, resume: Resume, folder: RunFolder, show: Callable[[Event], None]
) -> RunResult:
    ready = course.ready
    run_folder = RunFolder(ready.folder)
    if ready.nodes.count > 1 and ready.nodes.hostfile is None:  # each machine has a desk, and none decides for all
        starts = course.starts(resume.options)
        outcome = run(starts, run_folder, show, cwd=folder.plan)
        clear_beats(run_folder.path, [start.rank for start in starts])
        return RunResult(outcome=outcome)
    policy = Policy(max_attempts=options.max_attempts, hang_timeout_s=hang_timeout_s(options.hang_timeout))
    if ready.plan is not None:
        policy = replace(policy, allow=frozenset[str](ready.plan.job.limits.allow))
    with Signals() as signals:
        trainer = OwnTrainer(
            course=course,
            folder=run_folder,
            show=show,
            policy=policy,
            resume=resume,
            signals=signals,
            cwd=folder.plan,
        )
        return Supervisor(trainer=trainer, folder=run_folder.path, policy=policy, signals=signals).run()


# --- the end ------------------------------------------------------------------------------------


def _say_end(ready: Ready, ended: RunResult, resume: Resume, *, as_json: bool) -> None:
    from tightfit.screen import open_console, open_errors
    from tightfit.screen.train import draw_attempts, draw_failure, draw_summary

    outcome, tally = ended.outcome, ended.outcome.tally
    safe = ""  # what of a run that ended in distress is not lost, as far as its events say
    if tally.safe_step is not None:
        on = how_to_go_on(resume, wrote=tally.checkpoint is not None)
        safe = text("cli.there-checkpoint-step", step=tally.safe_step, resume=on)
    if outcome.failure is not None:
        console = open_errors()
        draw_failure(console, outcome.failure, ended.verdict)
        draw_attempts(console, outcome.failure, ended.records, ended.verdict)
        if safe:
            print(f"tightfit: {safe}", file=sys.stderr)
    elif outcome.state in ("interrupted", "stopped"):
        done = text("cli.before-first-step") if tally.last is None else text("cli.after-step", step=tally.last.step)
        if outcome.state == "stopped":
            said = text("cli.stopped-saved-checkpoint", done=done, resume=how_to_go_on(resume, wrote=True))
        else:
            parts = [text("cli.interrupted", done=done), safe, text("cli.every-process-ended")]
            said = str(Listing(filter(None, parts), ";"))
        with suppress(OSError):  # closing the terminal may be what stopped it
            print(f"tightfit: {said}", file=sys.stderr)
    elif not as_json and ready.nodes.rank == 0:
        attempts = max(1, len(ended.records))
        draw_summary(open_console(), ready.worker, tally, str(ready.folder), attempts=attempts)


def say_way_up(faster: Plan | None) -> None:
    """At the end of what people read."""
    if faster is None:
        return
    from tightfit.screen import open_console, say

    console = open_console()
    console.print()
    say(console, faster.because[0])


def report(ready: Ready, outcome: Outcome, faster: Plan | None = None) -> dict[str, Any]:
    """How it went. A loss that is no number is null. `faster`: see `way_up`.

    The contract with programs: the keys here are promised, further ones may come.
    """
    worker, tally, last = ready.worker, outcome.tally, outcome.tally.last

    def place(event: Resumed | Checkpointed | None) -> dict[str, Any] | None:
        return None if event is None else {"step": event.step, "folder": event.folder}

    def finite(value: float | None) -> float | None:
        return value if value is not None and math.isfinite(value) else None

    return {
        "state": outcome.state,
        "exit_code": outcome.exit_code,
        "error": None if outcome.failure is None else str(outcome.failure.sentence),
        "folder": str(ready.folder),
        "model": str(ready.folder / "model") if outcome.state == "done" else None,
        "pictures": list(tally.pictures),
        "steps": None if last is None else last.step,
        "resumed_from": place(tally.resumed),
        "checkpoint": place(tally.checkpoint),
        "loss": {"first": finite(tally.first_loss), "last": finite(last.loss if last else None)},
        "memory": {
            "predicted_peak_bytes": worker.peak_bytes,
            "peak_bytes": tally.peak_bytes,
            "milestones": [
                {name: getattr(mark, name) for name in ("milestone", "predicted_bytes", "measured_bytes", "host_bytes")}
                for mark in tally.marks
            ],
        },
        "pace": {
            "predicted_step_s": worker.step_s,
            "step_s": tally.step_s,
            "predicted_tokens_per_s": worker.tokens_per_s,
            "tokens_per_s": tally.tokens_per_s,
        },
        "way_up": _way_up_report(faster),
        "summary": {} if tally.ended is None else dict(tally.ended.summary),
    }


def _way_up_report(faster: Plan | None) -> dict[str, Any] | None:
    if faster is None or faster.chosen is None:
        return None
    return {
        "text": str(faster.because[0]),
        "levers": flags_from_levers(faster.chosen.levers),
        "world": faster.chosen.world,
        "tokens_per_s": faster.chosen.pace.tokens_per_s,
    }
