"""Updates ahead of the gradients' norm, in real workers: to the bit the runs whose updates wait, whether a step is
clipped, is not, or overflows; also after a kill."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from forking import Forked, Kill, Server, checkpoints_of, contents, small_plan
from running import edit

pytestmark = pytest.mark.thorough
STEPS = 6

COUNT = """
import os
from tightfit.train.host_states import HostStates
accept = HostStates.accept
def count(self):
    with open(os.path.join({folder!r}, "accepted"), "a") as file:
        file.write("x")
    accept(self)
HostStates.accept = count
"""


@pytest.fixture(scope="module")
def server() -> Server:
    return Server()


def run(server: Server, folder: Path, world: int, precision: str, clip: float, update: str, kill: bool) -> Forked:
    folder.mkdir()
    plan = small_plan(folder, world, steps=STEPS, engine="stream", update=update)
    scale = {"training__first_scale_power": 19} if precision == "fp16" else {}
    edit(plan, training__clip=clip, levers__precision=precision, **scale)
    meddle = COUNT.format(folder=str(folder))
    if kill:
        killed = server.run(plan, "--no-probe", kill=Kill(0, 300), meddle=meddle)
        assert killed.codes[0] == -signal.SIGKILL
        assert 0 < len(checkpoints_of(killed.folder)) < STEPS
    ran = server.run(plan, "--no-probe", meddle=meddle)
    assert ran.codes == [0] * world, ran.stderr
    assert bool(ran.of("resumed")) == kill
    return ran


@pytest.mark.parametrize(
    ("world", "precision"),
    [
        pytest.param(1, "bf16", marks=pytest.mark.slow),
        (2, "bf16"),
        pytest.param(1, "fp16", marks=pytest.mark.slow),
        pytest.param(2, "fp16", marks=pytest.mark.slow),
        pytest.param(2, "fp32", marks=pytest.mark.slow),
    ],
)
def test_a_run_is_the_one_that_waits(tmp_path: Path, server: Server, world: int, precision: str) -> None:
    free = run(server, tmp_path / "free", world, precision, 1e9, "waits", kill=False)
    norms = sorted(step["grad_norm"] for step in free.of("step") if step["grad_norm"] is not None)
    clip = norms[len(norms) // 2]
    waiting, hasty = (
        run(server, tmp_path / update, world, precision, clip, update, kill=update == "ahead" and world == 1)
        for update in ("waits", "ahead")
    )
    steps = waiting.of("step")
    for each in hasty.of("step"):  # some twice, where it was killed between a step and its checkpoint
        expected = steps[each["step"] - 1]
        assert (each["loss"], each["grad_norm"]) == (expected["loss"], expected["grad_norm"])
    assert len(steps) == STEPS
    if precision == "fp16":
        assert steps[0]["skipped"]
    clipped = [each["grad_norm"] > clip for each in steps if not each["skipped"]]
    assert {*clipped} == {False, True}
    for step, folder in checkpoints_of(waiting.folder).items():
        made = contents(checkpoints_of(hasty.folder)[step])
        assert {*made} == {*contents(folder)}
        for name, data in contents(folder).items():
            assert made[name] == data or not name.endswith(".safetensors"), (step, name)
    assert (tmp_path / "ahead" / "accepted").stat().st_size > 0
    assert not (tmp_path / "waits" / "accepted").exists()


def test_a_run_whose_steps_are_clipped_says_that_it_waits(tmp_path: Path, server: Server) -> None:
    ran = run(server, tmp_path / "clipped", 1, "bf16", 1e-6, "ahead", kill=False)
    (said,) = (each["text"] for each in ran.of("warning") if "were clipped" in each["text"])
    assert said.startswith("5 of the last 8 steps were clipped")
    assert not (tmp_path / "clipped" / "accepted").exists()
