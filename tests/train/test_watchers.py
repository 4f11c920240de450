"""TensorBoard files and wandb, on request."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tightfit.train.events import watchers
from tightfit.types import ConfigError

STEP: dict[str, Any] = {
    "step": 3,
    "loss": 2.5,
    "learning_rate": 1e-4,
    "grad_norm": None,
    "loss_scale": None,
    "tokens_per_s": 1200.0,
    "step_s": 0.5,
    "skipped": False,
    "memory": {"now_bytes": 2**30, "peak_bytes": 2**31, "host_bytes": None},
}
LATER = {**STEP, "step": 4, "loss": 2.25}
EVALUATION = {"step": 3, "loss": 2.0, "perplexity": math.exp(2.0), "samples": 7}
TOLD = [("step", STEP), ("step", LATER), ("eval", EVALUATION)]
FACTS = {"model": "tiny_llama", "engine": "zero2", "world": 2}

FAKE_WANDB = """
import json, pathlib
class Run:
    def __init__(self, **settings):
        self.path = pathlib.Path(settings["dir"], "wandb.jsonl")
        self.tell(init={key: settings[key] for key in ("project", "name", "config")})
    def tell(self, **what):
        with self.path.open("a") as file:
            file.write(json.dumps(what) + "\\n")
    def log(self, values, step):
        self.tell(log=values, step=step)
    def finish(self):
        self.tell(finished=True)
def init(**settings):
    if settings["config"].get("fail"):
        raise RuntimeError("no API key\\nconfigured.")
    return Run(**settings)
"""


def test_nothing_asked_does_nothing(tmp_path: Path) -> None:
    watcher = watchers(tmp_path, False, False, FACTS)
    watcher.tell("step", {})
    watcher.tell("eval", {})
    watcher.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.thorough
def test_tensorboard_reads_what_was_written(tmp_path: Path) -> None:
    """In processes of their own: the library warns while it is imported, and warnings are errors here."""
    if find_spec("tensorboard") is None:
        pytest.skip("tensorboard is not installed")
    write = (
        "import sys; from pathlib import Path; from tightfit.train.events import watchers\n"
        f"watcher = watchers(Path(sys.argv[1]), True, False, {FACTS!r})\n"
        f"for what, of in {TOLD!r}: watcher.tell(what, of)\nwatcher.close()\n"
    )
    read = (
        "import json, sys; from tensorboard.backend.event_processing.event_accumulator import EventAccumulator\n"
        "found = EventAccumulator(sys.argv[1] + '/tensorboard'); found.Reload()\n"
        "tags = found.Tags()\n"
        "print(json.dumps({tag: [[e.step, e.value] for e in found.Scalars(tag)] for tag in tags['scalars']}))\n"
        "assert 'run/text_summary' in tags['tensors'], tags\n"
    )
    for script in (write, read):
        done = subprocess.run(
            [sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["train/loss"] == [[3, 2.5], [4, 2.25]]
    assert found["memory/peak_gib"] == [[3, 2.0], [4, 2.0]]
    assert found["eval/loss"] == [[3, 2.0]]
    assert "train/grad_norm" not in found
    assert "memory/host_gib" not in found


def test_tensorboard_missing_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ConfigError, match="pip install tensorboard"):
        watchers(tmp_path, True, False, FACTS)


@pytest.fixture
def fake_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """wandb's three calls, which write down what they were given."""
    place = tmp_path / "packages"
    place.mkdir()
    (place / "wandb.py").write_text(FAKE_WANDB)
    monkeypatch.syspath_prepend(place)
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    run = tmp_path / "first"
    run.mkdir()
    yield run
    sys.modules.pop("wandb", None)


def test_wandb_gets_every_step(fake_wandb: Path) -> None:
    watcher = watchers(fake_wandb, False, True, FACTS)
    watcher.tell("step", STEP)
    watcher.tell("eval", EVALUATION)
    watcher.close()
    watcher.close()
    begun, step, evaluation, ended = map(json.loads, (fake_wandb / "wandb.jsonl").read_text().splitlines())
    assert begun["init"] == {"project": "tightfit", "name": "first", "config": FACTS}
    assert step["step"] == 3
    assert step["log"]["train/loss"] == 2.5
    assert evaluation["log"] == {"eval/loss": 2.0, "eval/perplexity": math.exp(2.0)}
    assert ended == {"finished": True}


def test_wandb_that_does_not_start_is_one_sentence(fake_wandb: Path) -> None:
    with pytest.raises(ConfigError, match=r"^wandb does not start \(no API key configured\): run `wandb login`, or"):
        watchers(fake_wandb, False, True, {**FACTS, "fail": True})


def test_wandb_missing_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match="pip install wandb"):
        watchers(tmp_path, False, True, FACTS)


@pytest.mark.thorough
def test_the_real_wandb_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if find_spec("wandb") is None:
        pytest.skip("wandb is not installed")
    monkeypatch.setenv("WANDB_MODE", "offline")
    script = (
        "import sys; from pathlib import Path; from tightfit.train.events import watchers\n"
        f"watcher = watchers(Path(sys.argv[1]), False, True, {FACTS!r})\n"
        f"for what, of in {TOLD!r}: watcher.tell(what, of)\nwatcher.close()\n"
    )
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert list((tmp_path / "wandb").glob("offline-run-*/*.wandb"))
