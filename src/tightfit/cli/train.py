"""`tightfit train`: plan for this machine, start a process on every GPU, follow it to the end.

A failure that need not come again is followed by another attempt: see `runs/supervise.py`.

Exit codes: 0 the training is done; 2 something that the user has to change, in one sentence; 3 the training failed, and
to start it again would not help; 4 it was asked to stop (SIGTERM, SIGUSR1, Ctrl-C, the job's timeout) and has saved a
checkpoint, from which the same command goes on; 130 and 143 it was interrupted before it could, by Ctrl-C or SIGTERM.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, fields, replace
from typing import Any

from tightfit.cli.flags import Parser, hang_timeout_s, pick, print_json, read_options
from tightfit.cli.plan import FLAGS, add_flags, job_parser
from tightfit.desk.report import pace_report, plan_report
from tightfit.desk.request import Request, each_stage, pick_stage, read_request
from tightfit.formats.worker.read import WORKER_FILE
from tightfit.hardware.machine import free_ram, occupancy, this_machine
from tightfit.hardware.probes.card import CardProcess
from tightfit.inputs.flags import flags_from_levers, spelt
from tightfit.job.file import folder_of_merged_model, job_from_text, model_left_by
from tightfit.messages import Listing, Message, text
from tightfit.planner.plan import Plan
from tightfit.runs import wire
from tightfit.runs.events import Event
from tightfit.runs.folder import AUTO, NONE, ClaimedFolder, check_folder
from tightfit.runs.follower import FollowingDesk, Led, Node, Work
from tightfit.runs.launch import WORKER, Meeting
from tightfit.runs.leader import Leader
from tightfit.runs.own import OwnTrainer, Resume
from tightfit.runs.records import RunFolder, RunRecord, placed, put_aside, read_run
from tightfit.runs.reservations import Reservation, check_port, free_port
from tightfit.runs.run import FAILED, STOPPED, USER, Outcome, Signals
from tightfit.runs.supervise import Policy, RunResult, Supervisor
from tightfit.runs.wire import Facts
from tightfit.screen import open_console, open_errors, say
from tightfit.screen.plan import draw_plan, draw_shortages, waiting
from tightfit.screen.train import Board, draw_failure, draw_occupancy, draw_start, draw_summary
from tightfit.start import train as start
from tightfit.start.machine import Busy, Nodes, reservations, wait_while_busy
from tightfit.start.train import Ready, TrainCourse, TrainOptions
from tightfit.types import ConfigError, UserError

RUN_FLAGS = (
    "output=DIR overwrite take_over plan=DIR dry_run check_memory no_probe tensorboard wandb "
    "save_every=500|10m|1h|none keep_last=N keep_every=N resume=auto|none|PATH trust_pickle resume_anyway "
    "max_attempts=N hang_timeout=300s|10m|1h wait_for_gpu deepspeed_config=FILE port=N"
)
INTERRUPTED = 130
WORKER_FLAGS = ("no_probe", "tensorboard", "wandb")  # what is passed on to the worker
PREDICTED = ("low_s", "high_s", "causes", "rates")  # what is told of the predicted pace beside its figures
WITH_PLAN = {field.name for field in fields(TrainOptions)} - {"deepspeed_config", "max_gpus"}
WITH_PLAN |= {"output", "port", "gpu_ids", "hostfile", "no_calibration"}
"""What may be said beside a plan that is written already."""


def train(argv: Sequence[str]) -> int:
    given = vars(parser().parse(argv))
    request, options = read_request(given), _read_train_options(given)
    if options.check_memory:
        return _check_memory(request, options)
    nodes = start.nodes_of(request, options)
    if nodes.rank > 0 and not options.dry_run:
        return _follow_leader(request, options, argv, nodes)
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
            code = _train(request, options, argv, more=stage.number < stage.count)
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
    example = "tightfit train --model tiny_mamba --seq 128 --max-steps 50 --output runs/first"
    made = job_parser("train", usage, example, "JOB.yaml")
    group = made.takes(RUN_FLAGS, "the run")
    group.add_argument("--no-async-save", dest="async_save", action="store_false", help=text("help.no-async-save"))
    machine = f"{FLAGS['the machine'].replace(' world=N', '')} max_gpus=N"
    question = re.sub(r"max=\S+ ", "", FLAGS["the question"])
    several = "hostfile=FILE nodes=N node_rank=K master_addr=HOST"
    add_flags(made, {**FLAGS, "the machine": machine, "the question": question, "several machines": several})
    return made.ends_with("0", "2", "3", "4", "130, 143")


def _read_train_options(given: Mapping[str, Any]) -> TrainOptions:
    """What was given, unless flags contradict each other."""
    options = read_options(TrainOptions, given)
    more = sorted(set(given) - WITH_PLAN) if "plan" in given else []
    if more:
        what = text("cli.job-file") if more[0] == "file" else spelt(more[0])
        raise ConfigError(Message("cli.plan-decided-already", plan=options.plan, what=what))
    for name in ("max_gpus", "nodes"):
        if given.get(name, 1) < 1:
            raise ConfigError(Message("cli.at-least-one", name=spelt(name), given=given[name]))
    others = [spelt(name) for name in ("num_gpus", "gpu_ids") if name in given]
    if "max_gpus" in given and others:
        raise ConfigError(Message("cli.max-gpus-both-say", other=others[0]))
    if options.max_attempts < 1:
        raise ConfigError(Message("cli.attempts-at-least-one", given=options.max_attempts))
    hang_timeout_s(options.hang_timeout)
    nodes, rank, port = options.nodes or 1, options.node_rank, given.get("port", 1)
    together = [spelt(name) for name in ("nodes", "node_rank", "master_addr") if name in given]
    alone = "master_addr" not in given
    wrong = {
        Message("cli.port-must-1", given=port): not 1 <= port <= 65_535,
        Message("cli.hostfile-starts-every", together="".join(together[:1])): together and "hostfile" in given,
        Message("cli.node-rank-needs-master-addr", given=rank): alone and rank != 0,
        Message("cli.node-rank-needs-nodes"): "node_rank" in given and "nodes" not in given,
        Message("cli.nodes-needs-node-rank", nodes=nodes, nodes2=nodes - 1): nodes > 1 and "node_rank" not in given,
        Message("cli.node-rank-must-0", nodes=nodes - 1, rank=rank): not 0 <= rank < nodes,
        Message("cli.nodes-needs-master-addr"): nodes > 1 and alone,
    }
    for problem, is_there in wrong.items():
        if is_there:
            raise ConfigError(problem)
    return options


# --- one run after another ----------------------------------------------------------------------


def _train(request: Request, options: TrainOptions, argv: Sequence[str], *, more: bool = False) -> int:
    """One run; `more`: another stage of the job follows."""
    nodes = start.nodes_of(request, options)
    if nodes.count == 1 or nodes.hostfile is not None or options.dry_run:
        return _train_here(request, options, argv)
    assert nodes.port is not None, "several nodes meet at one that all of them know"
    leader, code = Leader(nodes.count, nodes.address, nodes.port), FAILED
    try:
        code = _train_here(request, options, argv, leader)
        return code
    except UserError:
        code = USER
        raise
    except KeyboardInterrupt:
        code = INTERRUPTED
        raise
    finally:
        leader.close(code, more=more and code == 0)


def _train_here(request: Request, options: TrainOptions, argv: Sequence[str], leader: Leader | None = None) -> int:
    """Plan and supervise it from this machine."""
    resume = start.resume_of(options)

    def plan() -> Ready:
        with waiting(text("cli.planning"), quiet=options.json):
            return start.prepare(request, options)

    try:
        ready = plan() if not options.wait_for_gpu else wait_while_busy(plan, _warn)
        assert ready is not None, "nobody gives up but by a signal"
    except start.NothingFits as error:
        if options.dry_run:
            # What was priced and how far each is from fitting; the error that follows says what would help.
            if options.json:
                print_json({"folder": None, "plan": plan_report(error.plan)}, allow_nan=False)
            else:
                console = open_console()
                draw_plan(console, error.plan)
                draw_shortages(console, error.plan)
        raise
    more = not options.overwrite and start.asks_for_more(ready.folder, ready.files[WORKER_FILE])
    check_folder(ready.folder, overwrite=options.overwrite, resume=resume.place, more=more)
    ready = replace(ready, said=(*ready.said, *filter(None, [start.describe_resume(resume, ready.folder, more=more)])))
    if request.port is not None and ready.nodes.rank == 0:
        check_port(request.port)
    if options.dry_run:
        if options.json:
            plain = {} if ready.plan is None else plan_report(ready.plan)
            print_json({"folder": str(ready.folder), "plan": plain}, allow_nan=False)
            return 0
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
        ready.folder, overwrite=options.overwrite, resume=resume.place, take_over=options.take_over, more=more
    )
    record = RunRecord.begin(("tightfit", "train", *argv))
    switches = tuple(spelt(name) for name in WORKER_FLAGS if getattr(options, name))
    try:
        claimed.begin(ready.files, record)
        if leader is not None:
            leader.open(claimed.folder.path)
        with _reserve(ready) as meet:
            course = TrainCourse(
                request=request,
                ready=ready,
                folder=claimed.folder,
                options=switches,
                worker=WORKER,
                meet=meet,
                patient=options.wait_for_gpu,
                leader=leader,
            )
            ended = _follow(course, options, resume)
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
    is_done = outcome.state == "done"
    if outcome.state in ("user error", "interrupted") and ended.in_vain:
        claimed.discard()
    else:
        claimed.release(done=is_done)
    if outcome.state == "user error":
        assert outcome.failure is not None
        raise ConfigError(outcome.failure.sentence)
    faster = start.way_up(ready.plan, outcome.tally, course.bounds) if is_done else None
    if options.json:
        print_json({**report(ready, outcome, faster), "attempts": [asdict(each) for each in ended.records]})
    _say_end(ready, ended, resume, as_json=options.json)
    if not options.json:
        say_way_up(faster)
    return outcome.exit_code


def _follow_leader(request: Request, options: TrainOptions, argv: Sequence[str], nodes: Nodes) -> int:
    """The part of a node other than the first: its ranks, as the desk of the first says."""
    assert nodes.port is not None
    record, registered = RunRecord.begin(("tightfit", "train", *argv)), ExitStack()
    claimed: ClaimedFolder | None = None
    course: TrainCourse | None = None
    is_own = False  # whether the run has a folder of its own on this node's disk

    def begin(led: Led, order: wire.Start, interface: str | None) -> Work:
        nonlocal claimed, course, is_own
        folder = start.find_own_folder(request, led.folder, is_seen=led.is_seen)
        is_own = folder is not None
        folder = folder or led.folder
        if is_own:
            files = {**order.files, WORKER_FILE: placed(order.files[WORKER_FILE], folder)}
            order = replace(order, files=files)
        if course is not None and course.ready.folder != folder:  # another stage of the job
            leave(0)
        if claimed is None:
            own = folder if is_own else start.node_folder(folder, nodes.rank)
            # Parts of checkpoints that lie here stay: the ranks find out which of them are wanted.
            anew = order.attempt == 1 and (options.overwrite or options.resume.lower() == NONE)
            resume = AUTO if is_own and not anew else NONE
            claimed = ClaimedFolder.claim(own, overwrite=is_own and anew, resume=resume, take_over=options.take_over)
            claimed.begin(order.files, record)
        if course is None:
            ready = start.prepare_node(request, options, order.files, folder)
            meet = registered.enter_context(_reserve(ready))
            course = TrainCourse(
                request=request,
                ready=ready,
                folder=claimed.folder,
                options=(),
                worker=WORKER,
                meet=meet,
                patient=False,
            )
        put_aside(claimed.folder, order.attempt - 1, sorted((claimed.folder.path / "logs").glob("rank-*.log")))
        return Work(starts=course.follow(order, interface), cwd=claimed.folder.plan, folder=folder, is_apart=is_own)

    def leave(code: int) -> None:
        """What the leader's folder has not got is kept where the run failed."""
        nonlocal claimed, course
        registered.close()
        if claimed is not None and code == 0 and not is_own:
            claimed.discard()
        elif claimed is not None:
            state = {0: "done", STOPPED: "stopped", FAILED: "failed", USER: "failed"}.get(code, "interrupted")
            record.close(claimed.folder.path, state=state, exit_code=code)
            claimed.release(done=code == 0)
        claimed = course = None

    code = FAILED
    with Signals() as signals:
        follower = FollowingDesk(
            node=Node(rank=nodes.rank, count=nodes.count, address=nodes.address, port=nodes.port),
            look=lambda: Facts.here(occupancy()),
            begin=begin,
            signals=signals,
            say=lambda said: _warn(str(said)),
        )
        try:
            code = follower.follow().exit_code
        except KeyboardInterrupt:
            code = signals.exit_code if signals.caught else INTERRUPTED
        finally:
            leave(code)
    if code in (FAILED, USER):
        _warn(text("cli.leader-says-why", address=nodes.address))
    return code


def _warn(said: str) -> None:
    print(f"tightfit: {said}", file=sys.stderr)


# --- without running ----------------------------------------------------------------------------


def _check_memory(request: Request, options: TrainOptions) -> int:
    machine = start.machine_for(request, options)
    total, free = this_machine().host_ram_bytes, free_ram()
    if not options.json:
        draw_occupancy(open_console(), machine.occupancy, machine.live, total, free)
        return 0

    def plain(holders: Sequence[CardProcess]) -> list[dict[str, Any]]:
        return [{**pick(each, "pid", "user", "command"), "bytes": each.held_bytes} for each in holders]

    gpus = []
    for device in machine.occupancy.devices:
        run = machine.taken[device.key].folder if device.key in machine.taken else None
        told = pick(device, "number", "name", "total_bytes", "free_bytes")
        gpus.append({**told, "run": run, "holders": plain(device.holders)})
    runs = [{**pick(each, "pid", "folder"), "bytes": each.host_bytes} for each in machine.live]
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


def _follow(course: TrainCourse, options: TrainOptions, resume: Resume) -> RunResult:
    ready = course.ready
    run_folder, board = RunFolder(ready.folder), None
    with ExitStack() as stack:
        if not options.json:
            console = open_console()
            if ready.plan is not None:
                draw_start(console, ready.plan, str(ready.folder))
            for sentence in ready.said:
                print(sentence)
            console.print()
            board = stack.enter_context(Board(console, ready.worker))

        def show(event: Event) -> None:
            if board is not None:
                board.expect(course.ready.worker)
                board.show(event)

        allow = () if ready.plan is None else ready.plan.job.limits.allow
        hang_s = hang_timeout_s(options.hang_timeout)
        policy = Policy(max_attempts=options.max_attempts, allow=frozenset(allow), hang_timeout_s=hang_s)
        signals = stack.enter_context(Signals() if course.leader is None else course.leader.signals)
        trainer = OwnTrainer(
            course=course,
            folder=run_folder,
            show=show,
            policy=policy,
            resume=resume,
            signals=signals,
            cwd=course.folder.plan,
            leader=course.leader,
            facts=None if course.leader is None else Facts.here(ready.occupancy),
        )
        return Supervisor(trainer=trainer, folder=run_folder.path, policy=policy, signals=signals).run()


# --- the end ------------------------------------------------------------------------------------


def _say_end(ready: Ready, ended: RunResult, resume: Resume, *, as_json: bool) -> None:
    outcome, tally = ended.outcome, ended.outcome.tally
    safe = ""  # what of a run that ended in distress is not lost, as far as its events say
    if tally.safe_step is not None:
        on = start.how_to_go_on(resume, wrote=tally.checkpoint is not None)
        safe = text("cli.there-checkpoint-step", step=tally.safe_step, resume=on)
    if outcome.failure is not None:
        draw_failure(open_errors(), outcome.failure, ended.records, ended.verdict)
        if safe:
            _warn(safe)
    elif outcome.state in ("interrupted", "stopped"):
        done = text("cli.before-first-step") if tally.last is None else text("cli.after-step", step=tally.last.step)
        if outcome.state == "stopped":
            said = text("cli.stopped-saved-checkpoint", done=done, resume=start.how_to_go_on(resume, wrote=True))
        else:
            parts = [text("cli.interrupted", done=done), safe, text("cli.every-process-ended")]
            said = str(Listing(filter(None, parts), ";"))
        with suppress(OSError):  # closing the terminal may be what stopped it
            _warn(said)
    elif not as_json:
        attempts = max(1, len(ended.records))
        draw_summary(open_console(), ready.worker, tally, str(ready.folder), attempts=attempts)


def say_way_up(faster: Plan | None) -> None:
    """At the end of what people read."""
    if faster is None:
        return
    console = open_console()
    console.print()
    say(console, faster.because[0])


def report(ready: Ready, outcome: Outcome, faster: Plan | None = None) -> dict[str, Any]:
    """How it went. A loss that is no number is null. `faster`: see `way_up`.

    The contract with programs: the keys here are promised, further ones may come.
    """
    worker, tally, last = ready.worker, outcome.tally, outcome.tally.last
    way = None if ready.plan is None else ready.plan.chosen
    predicted = pace_report(way.pace) if way is not None and way.is_paced else {}

    def finite(value: float | None) -> float | None:
        return value if value is not None and math.isfinite(value) else None

    return {
        "state": outcome.state,
        "exit_code": outcome.exit_code,
        "error": outcome.failure and outcome.failure.sentence,
        "folder": str(ready.folder),
        "model": str(ready.folder / "model") if outcome.state == "done" else None,
        "pictures": tally.pictures,
        "steps": None if last is None else last.step,
        "resumed_from": tally.resumed and pick(tally.resumed, "step", "folder"),
        "checkpoint": tally.checkpoint and pick(tally.checkpoint, "step", "folder"),
        "loss": {"first": finite(tally.first_loss), "last": finite(last.loss if last else None)},
        "memory": {
            "predicted_peak_bytes": worker.peak_bytes,
            "peak_bytes": tally.peak_bytes,
            "milestones": [
                pick(mark, "milestone", "predicted_bytes", "measured_bytes", "host_bytes") for mark in tally.marks
            ],
        },
        "pace": {
            "predicted_step_s": worker.step_s,
            "step_s": tally.step_s,
            "predicted_tokens_per_s": worker.tokens_per_s,
            "tokens_per_s": tally.tokens_per_s,
            **{name: predicted.get(name) for name in PREDICTED},
        },
        "way_up": _way_up_report(faster),
        "summary": dict(tally.ended.summary) if tally.ended else {},
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
