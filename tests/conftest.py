"""What every test may use: modules beside this file and the benchmarks' can be imported by name, signals mean what they
usually do, limits are by a clock that stands while the machine is busy, and what DeepSpeed compiles is compiled once,
before the first training."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import zlib
from importlib.util import find_spec
from pathlib import Path
from shutil import which

import pytest
from hypothesis import HealthCheck, settings

from tightfit.runs.build_lock import build_folder

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
sys.path.insert(0, str(Path(__file__).parent))

import patience
from compiling import compile_part

patience.count_in_subprocess()

# How long an example takes says something of what else the machine does, and nothing of the property.
untimed = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
# What `make test` tries is little, and the same in every clone; `make test-all` goes on looking.
settings.register_profile("few", untimed, max_examples=15, derandomize=True)
settings.register_profile("many", untimed, max_examples=300)

# Behind nohup, or in the background of a script, these two are ignored, and so they would be in every process that a
# test starts and interrupts.
for number, usual in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, usual)

# Who may not keep what Python compiles, as many a container says, compiles the package anew in every process that a
# test starts: a second each.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# What tests compare is English, on a Chinese machine too.
os.environ["TIGHTFIT_LANG"] = "en"

# What was measured on this machine is not what a test counts on, and nothing can be kept in this folder.
os.environ["XDG_DATA_HOME"] = "/dev/null/nothing"

# Tests have caches of their own; a compilation costs a minute. One ninja for all: another would compile anew, and so
# would another environment's DeepSpeed, each in turn.
if "TORCH_EXTENSIONS_DIR" not in os.environ:
    installed = zlib.crc32(str(getattr(find_spec("deepspeed"), "origin", "")).encode())
    os.environ["TORCH_EXTENSIONS_DIR"] = str(build_folder(os.environ) / f"tests-{installed:08x}")
if which("c++"):
    os.environ["PATH"] = f"{Path(__file__).parent / 'assets' / 'bin'}{os.pathsep}{os.environ['PATH']}"
if str(Path(sys.executable).parent) not in os.environ["PATH"].split(os.pathsep):
    os.environ["PATH"] += os.pathsep + str(Path(sys.executable).parent)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--hide-fp16", action="store_true", help="run as on a processor that computes neither fp16 nor bf16 itself"
    )


def pytest_configure(config: pytest.Config) -> None:
    settings.load_profile("few" if "not slow" in config.option.markexpr else "many")
    if config.getoption("--hide-fp16"):
        os.environ["ONEDNN_MAX_CPU_ISA"] = "AVX512_CORE"  # what torch and DeepSpeed go by, in every process


def pytest_collection_finish(session: pytest.Session) -> None:
    """Each worker of pytest has a processor, not all of them: threads that wait for one another would only spin. What
    is there by now stays to the end, and is not to be looked through for garbage again and again."""
    gc.freeze()
    gc.set_threshold(50_000)
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)
    start_compiling(session.items)


def pytest_unconfigure() -> None:
    gc.unfreeze()  # libraries count at the end what was not let go


def start_compiling(items: list[pytest.Item]) -> None:
    """What most trainings need, beside the first tests; who needs it waits for it."""
    if any(item.get_closest_marker(name) for item in items for name in ("thorough", "slow")):
        threading.Thread(target=compile_part, args=("cpu_adam",), daemon=True).start()
