"""A process that is asked to stop, by real signals; what it waits in comes back to Python for none of them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from tightfit.train.stop import SAME_S, Stop

pytestmark = pytest.mark.thorough

PROGRAM = """
import os, signal, subprocess, sys, threading, time
from tightfit.train.stop import Stop

stop = Stop().install()


def say(word):
    print(word, flush=True)


def stuck():
    reading, _ = os.pipe()
    os.read(reading, 1)


def tell():
    while not stop.is_asked:
        time.sleep(0.01)
    say(f"asked by {stop.why}")


"""
STARTING = "print('half a line', end=''); sys.stderr.write('ready\\n'); stuck()"
TRAINING = "stop.arm(); threading.Thread(target=tell, daemon=True).start(); sys.stderr.write('ready\\n'); stuck()"
STOPPING = """
stop.arm()
sys.stderr.write("ready\\n")
while not stop.is_asked:
    time.sleep(0.01)
stop.deaf()
say("safe")
time.sleep(1.5)
os._exit(4)
"""
FORKING = """
if (child := os.fork()) == 0:
    os.write(2, b"ready\\n")
    stuck()
say(child)
_, status = os.waitpid(child, 0)
say(f"{os.WTERMSIG(status)} {stop.is_asked}")
"""
SPAWNING = """
child = subprocess.Popen(["sleep", "60"])
say(child.pid)
sys.stderr.write("ready\\n")
say(f"{child.wait()} {stop.is_asked}")
"""


DUTIES = """
from tightfit.train.stop import do_before_leaving
do_before_leaving(lambda: 1 / 0)
do_before_leaving(lambda: say("tidied up"))
sys.stderr.write("ready\\n")
stuck()
"""


def started(program: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM + program]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stderr is not None
    assert process.stderr.readline() == "ready\n"
    time.sleep(0.1)
    return process


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    out, err = process.communicate(timeout=20)
    assert err == ""
    return process.returncode, out.strip()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_before_there_is_anything_to_save_it_leaves_at_once(number: signal.Signals) -> None:
    process = started(STARTING)
    process.send_signal(number)
    assert ended(process) == (128 + number, "half a line")


def test_what_has_to_be_tidied_up_is_tidied_up_by_whoever_leaves() -> None:
    """Also if one of several fails at that."""
    process = started(DUTIES)
    process.send_signal(signal.SIGTERM)
    assert ended(process) == (143, "tidied up")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_once_it_trains_the_first_is_noted_and_the_second_ends_it(number: signal.Signals) -> None:
    process = started(TRAINING)
    process.send_signal(number)
    assert process.stdout is not None
    assert process.stdout.readline() == f"asked by {number.name}\n"
    time.sleep(SAME_S + 0.1)
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    assert ended(process) == (143, "")


def test_the_same_wish_by_two_ways_is_one() -> None:
    process = started(TRAINING)
    process.send_signal(signal.SIGTERM)
    assert process.stdout is not None
    process.stdout.readline()
    process.send_signal(signal.SIGTERM)
    time.sleep(SAME_S + 0.1)
    assert process.poll() is None
    process.kill()
    process.communicate()


def test_what_is_saved_is_not_spoilt_on_the_way_out() -> None:
    process = started(STOPPING)
    process.send_signal(signal.SIGTERM)
    assert process.stdout is not None
    assert process.stdout.readline() == "safe\n"
    time.sleep(SAME_S)
    process.send_signal(signal.SIGTERM)
    assert ended(process) == (4, "")


def test_a_forked_child_ends_and_says_nothing_to_its_parent() -> None:
    process = started(FORKING)
    assert process.stdout is not None
    os.kill(int(process.stdout.readline()), signal.SIGTERM)
    assert ended(process) == (0, "15 False")


def test_a_program_that_it_starts_can_be_ended() -> None:
    process = started(SPAWNING)
    assert process.stdout is not None
    os.kill(int(process.stdout.readline()), signal.SIGTERM)
    assert ended(process) == (0, "-15 False")


def test_a_signal_that_is_ignored_stays_so() -> None:
    """As a shell leaves SIGINT for what it starts in the background."""
    program = PROGRAM.replace("stop = Stop()", "signal.signal(signal.SIGINT, signal.SIG_IGN)\nstop = Stop()")
    code = program + "os.kill(os.getpid(), signal.SIGINT); time.sleep(0.3); say(stop.is_asked)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=20)
    assert (done.returncode, done.stdout, done.stderr) == (0, "False\n", "")


def test_one_that_is_not_installed_hears_what_it_is_told() -> None:
    left: list[int] = []
    now = 0.0
    stop = Stop(left.append, clock=lambda: now)
    stop.arm()
    assert (stop.is_asked, stop.why) == (False, None)
    stop.hear(signal.SIGCHLD)
    assert not stop.is_asked
    stop.hear(signal.SIGUSR1)
    assert (stop.is_asked, stop.why, left) == (True, "SIGUSR1", [])
    now = SAME_S
    stop.hear(signal.SIGTERM)
    assert (stop.why, left) == ("SIGUSR1", [143])
    stop.deaf()
