"""Kill -9 after every call to the disk that a save makes, on any rank: the next start loses nothing.

The run that is killed goes on from a checkpoint, finds a torn one of the step that it saves next and what another
killed run left half-written and half-removed, keeps one checkpoint only, and saves its model in the end. So every way
in which a save touches the disk is among the calls. What is whole afterwards is told by comparing bytes with a run that
nobody interrupted, not by asking the code that is tested.
"""

from __future__ import annotations

import os
import shutil
import signal
from dataclasses import dataclass
from pathlib import Path

import pytest
from forking import Call, Forked, Kill, Server, checkpoints_of, contents, small_plan
from running import edit

STEPS = 3
PARTS = 8
"""Tests that the complete sweep of one rank is cut into."""
ENDS = (".partial", ".old", ".gone", "model")


@dataclass(frozen=True)
class Ground:
    """A plan for so many ranks, what it comes to if nobody interrupts it, and how the interrupted one begins."""

    plan: Path
    reference: Path
    losses: list[float]
    base: Path
    server: Server

    def begin(self, *, fresh: bool, background: bool) -> Path:
        run = self.plan / "run"
        shutil.rmtree(run, ignore_errors=True)
        if not fresh:
            shutil.copytree(self.base, run)
        edit(self.plan, saving__async_save=background)
        return run

    def start(self, kill: Kill | None = None) -> Forked:
        return self.server.run(self.plan, "--no-probe", kill=kill)


@pytest.fixture(scope="module")
def server() -> Server:
    return Server()


@pytest.fixture(
    scope="module",
    params=[(1, "fsdp2"), *(pytest.param((2, each), marks=pytest.mark.slow) for each in ("fsdp2", "stream"))],
    ids=["one", "two", "two that stream"],
)
def ground(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, server: Server) -> Ground:
    return make_ground(tmp_path_factory.mktemp("ground"), *request.param, server)


def make_ground(folder: Path, world: int, engine: str, server: Server) -> Ground:
    plan = small_plan(folder, world, steps=STEPS, engine=engine)
    edit(plan, saving__every_steps=1, saving__keep_last=99, saving__async_save=False)
    ran = server.run(plan, "--no-probe")
    assert ran.codes == [0] * world, ran.stderr
    reference = ran.folder.rename(folder / "reference")
    edit(plan, saving__keep_last=1)
    return Ground(plan, reference, ran.losses, make_base(folder / "base", reference), server)


def make_base(base: Path, reference: Path) -> Path:
    """Step 1 is whole, step 2 is torn, and others were killed before."""
    names = checkpoints_of(reference)
    assert sorted(names) == [1, 2, 3]
    for step in (1, 2):
        shutil.copytree(names[step], base / "checkpoints" / names[step].name)
    os.truncate(base / "checkpoints" / names[2].name / "optimizer/states.safetensors", 1000)
    shutil.copytree(names[1], base / "checkpoints/.step-00000002.partial")
    shutil.copytree(names[1], base / "checkpoints/.step-00000002.old")
    (base / "checkpoints/.step-00000001.gone").mkdir()
    return base


# --- what is whole -------------------------------------------------------------------------------


def newest_whole(run: Path, reference: Path) -> int:
    """The newest checkpoint with the bytes of the uninterrupted run; 0: there is none."""
    known = checkpoints_of(reference)
    return max(
        (step for step, folder in checkpoints_of(run).items() if contents(folder) == contents(known[step])), default=0
    )


def committed(calls: list[Call], before: int) -> int:
    """The checkpoint that must be the newest, as the killed rank 0's own calls tell it."""
    for call in reversed(calls):
        if call.kind == "rename" and "/step-" in (target := call.path.split()[1]):
            return int(target[-8:])
    return before


# --- one crash -----------------------------------------------------------------------------------


def crash(ground: Ground, kill: Kill, *, fresh: bool, background: bool) -> None:
    """Kill a rank there, look, start again, and compare with the run that nobody interrupted."""
    run = ground.begin(fresh=fresh, background=background)
    killed = ground.start(kill)
    assert killed.codes[kill.rank] == -signal.SIGKILL, killed.stderr
    others = [code for rank, code in enumerate(killed.codes) if rank != kill.rank]
    assert -signal.SIGKILL not in others, "a rank that is left ends by itself"
    before = 0 if fresh else 1
    told = max((each["step"] for each in killed.of("checkpoint")), default=before)
    newest = newest_whole(run, ground.reference)
    assert newest >= told, f"the checkpoint of step {told} was announced, and {newest} is the newest whole one"
    if kill.rank == 0:
        assert newest == committed(killed.calls[0], before)
    if (run / "model").exists():
        assert contents(run / "model") == contents(ground.reference / "model")
        assert newest == STEPS
        return
    again(ground, run, newest, len(killed.events))


def again(ground: Ground, run: Path, newest: int, seen: int) -> None:
    resumed = ground.start()
    assert resumed.codes == [0] * len(resumed.codes), resumed.stderr
    events = resumed.events[seen:]
    assert [each["step"] for each in events if each["event"] == "resumed"] == ([newest] if newest else [])
    steps = [(each["step"], each["loss"]) for each in events if each["event"] == "step"]
    assert steps == list(enumerate(ground.losses, start=1))[newest:]
    first = [(each["step"], each["loss"]) for each in resumed.events[:seen] if each["event"] == "step"]
    assert all(ground.losses[step - 1] == loss for step, loss in first)
    assert newest_whole(run, ground.reference) == STEPS
    assert contents(run / "model") == contents(ground.reference / "model")
    hidden = [path.name for path in (*run.iterdir(), *(run / "checkpoints").iterdir()) if path.name.startswith(".")]
    assert hidden == []


def counted(ground: Ground, *, fresh: bool) -> list[list[Call]]:
    """The calls of each rank of a run that is not killed."""
    ground.begin(fresh=fresh, background=False)
    ran = ground.start()
    assert ran.codes == [0] * len(ran.codes), ran.stderr
    return ran.calls


def kind_of(call: Call) -> str:
    """What a call does, and to which kind of folder."""
    if call.kind == "rename":
        return f"rename to {next((end for end in ENDS if call.path.endswith(end)), 'its place')}"
    if call.kind.startswith("remove_folder"):
        return f"{call.kind} in {next(end for end in ENDS if f'{end}/' in call.path)}"
    return call.kind


def first_and_last(calls: list[Call]) -> list[tuple[int, int]]:
    """Of each kind of call the numbers of its first and its last."""
    kinds: dict[str, list[int]] = {}
    for call in calls:
        kinds.setdefault(kind_of(call), []).append(call.number)
    return [(numbers[0], numbers[-1]) for numbers in kinds.values()]


def first_save(calls: list[Call]) -> list[Call]:
    """Those up to the moment from which on there is a checkpoint."""
    end = next(place for place, call in enumerate(calls) if kind_of(call) == "rename to its place")
    return calls[: end + 2]


# --- tests ---------------------------------------------------------------------------------------


@pytest.mark.slow
def test_every_kind_of_call(ground: Ground) -> None:
    """The first and the last of each kind, in the background and not; on rank 0 of two, where the calls are those of
    a rank alone, the one or the other by turns."""
    ranks = counted(ground, fresh=False)
    for rank, calls in enumerate(ranks):
        for turn, (first, last) in enumerate(first_and_last(calls)):
            by_turns = rank == 0 and len(ranks) > 1
            if not by_turns or turn % 2 == 0:
                crash(ground, Kill(rank, first), fresh=False, background=True)
            if first != last and (not by_turns or turn % 2 == 1):
                crash(ground, Kill(rank, last), fresh=False, background=False)


@pytest.mark.slow
def test_the_first_save_of_all(ground: Ground) -> None:
    """Before it stands the next start begins anew, and just after it does not."""
    calls = first_save(counted(ground, fresh=True)[0])
    for call in (calls[0], calls[len(calls) // 2], *calls[-3:]):
        crash(ground, Kill(0, call.number), fresh=True, background=call.number % 2 == 0)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_every_call(ground: Ground, part: int) -> None:
    """On one rank in both ways; on two in the one or the other, by turns."""
    both = len(counted(ground, fresh=False)) == 1
    for fresh in (False, True):
        for rank, calls in enumerate(counted(ground, fresh=fresh)):
            if fresh:
                calls = first_save(calls) if rank == 0 else []  # noqa: PLW2901
            for call in calls[part::PARTS]:
                for background in (False, True) if both else (call.number // PARTS % 2 == 0,):
                    crash(ground, Kill(rank, call.number), fresh=fresh, background=background)


@pytest.mark.thorough
def test_all_is_on_the_disk_before_it_counts(ground: Ground) -> None:
    """Against a machine that loses its power: what was not synced may be lost, and the order of what was not."""
    calls = counted(ground, fresh=False)[0]
    renames = [place for place, call in enumerate(calls) if kind_of(call) == "rename to its place"]
    assert len(renames) == 2
    for place in renames:
        staging, target = calls[place].path.split()
        known = checkpoints_of(ground.reference)[int(target[-8:])]
        names = [path.relative_to(known).as_posix() for path in known.rglob("*")]
        for name in ("", *names):
            of_one = [call.kind for call in calls[:place] if call.path == os.path.normpath(f"{staging}/{name}")]
            assert of_one[-1] == "sync", f"{name}: {of_one}"
        assert (calls[place + 1].kind, calls[place + 1].path) == ("sync", os.path.dirname(target))
    removed = [place for place, call in enumerate(calls) if kind_of(call) == "rename to .gone"]
    assert [place > other + 1 for place, other in zip(removed, renames, strict=True)] == [True, True]


AROUND = """
import os, sys
run, notes = {run!r}, {notes!r}
changing = ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate", "os.link", "os.symlink", "shutil.rmtree")
def hook(event, args):
    if event not in changing and not (event == "open" and args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)):
        return
    path = os.fspath(args[0]) if isinstance(args[0], (str, os.PathLike)) else ""
    if not path.startswith((run + "/checkpoints", run + "/model", run + "/.model")):
        return
    frame = sys._getframe()
    while frame is not None and frame.f_globals.get("__name__") != "tightfit.runs.disk":
        frame = frame.f_back
    file = os.open(notes, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.write(file, f"{{'through' if frame else 'around'}} {{event}} {{path}}\\n".encode())
    os.close(file)
sys.addaudithook(hook)
"""


@pytest.mark.thorough
def test_nothing_goes_around_the_calls_that_are_counted(ground: Ground, tmp_path: Path) -> None:
    """As the interpreter sees it: what changes the folders of a run's checkpoints is called by `tightfit.runs.disk`."""
    run, notes = ground.begin(fresh=False, background=True), tmp_path / "notes"
    meddle = AROUND.format(run=str(run), notes=str(notes))
    ran = ground.server.run(ground.plan, "--no-probe", meddle=meddle)
    assert ran.codes == [0] * len(ran.codes), ran.stderr
    told = notes.read_text().splitlines()
    assert [line for line in told if line.startswith("around")] == []
    assert {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir"} <= {line.split()[1] for line in told}
