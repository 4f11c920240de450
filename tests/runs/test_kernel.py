"""What the kernel has said since an attempt began, as it was recorded, and what this user may not read."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import patience
from tightfit.runs.cause import KMSG, KernelRecord

OOM = (
    "6,901,88001,-;oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),task=python,pid={pid},uid=0\n"
    "3,902,88002,-;Memory cgroup out of memory: Killed process {pid} (python) total-vm:1959900kB, anon-rss:410624kB\n"
    " SUBSYSTEM=memory\n"
)
XID = "3,903,88003,-;NVRM: Xid (PCI:0000:3b:00): 79, pid=1, GPU has fallen off the bus.\n"
NOISE = "6,904,88004,-;idle-reclaim (72): drop_caches: 1\n"


class Machine:
    """Files that stand for the kernel's."""

    def __init__(self, folder: Path) -> None:
        self.log, self.groups, self.own = folder / "kmsg", folder / "cgroup", folder / "self"
        self.log.write_text(NOISE + OOM.format(pid=4711))  # of before
        self.own.write_text("")

    def listen(self) -> KernelRecord:
        return KernelRecord(self.log, self.groups, self.own)

    def say(self, text: str) -> None:
        with self.log.open("a") as file:
            file.write(text)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_only_what_comes_later_counts(machine: Machine) -> None:
    record = machine.listen()
    said = record.said([4711])
    assert (said.lines, said.readable) == ((), True)
    record.close()


def test_a_rank_that_was_killed_for_want_of_memory(machine: Machine) -> None:
    record = machine.listen()
    machine.say(NOISE + OOM.format(pid=4712))
    said = record.said([4712, 4713])
    assert [line[:30] for line in said.lines] == ["oom-kill:constraint=CONSTRAINT", "Memory cgroup out of memory: K"]
    record.close()


def test_somebody_elses_end_is_not_ours(machine: Machine) -> None:
    record = machine.listen()
    machine.say(OOM.format(pid=os.getpid()))  # a process that lives cannot be the one that was killed
    assert record.said([4712]).lines == ()
    machine.say(OOM.format(pid=999_999_999).replace("(python)", "(chrome)"))
    assert record.said([4712]).lines == ()
    record.close()


def test_in_a_container_numbers_differ_and_the_name_has_to_do(machine: Machine) -> None:
    record = machine.listen()
    machine.say(OOM.format(pid=999_999_999))
    assert len(record.said([12]).lines) == 2
    record.close()


def test_drivers_are_heard(machine: Machine) -> None:
    record = machine.listen()
    machine.say(XID)
    assert record.said([]).lines == ("NVRM: Xid (PCI:0000:3b:00): 79, pid=1, GPU has fallen off the bus.",)
    record.close()


@pytest.mark.parametrize(
    ("membership", "place", "text"),
    [
        ("0::/job/4", "job/4/memory.events", "low 0\noom 1\noom_kill {}\n"),
        ("4:memory:/job/4\n0::/", "memory/job/4/memory.oom_control", "under_oom 0\noom_kill {}\n"),
        ("0::/outer/name", "memory.events", "oom_kill {}\n"),  # a container sees its own group as the root
    ],
)
def test_the_counter_of_the_memory_group(machine: Machine, membership: str, place: str, text: str) -> None:
    machine.log.unlink()
    machine.own.write_text(membership)
    counter = machine.groups / place
    counter.parent.mkdir(parents=True)
    counter.write_text(text.format(3))
    record = machine.listen()
    assert (record.said([1]).lines, record.said([1]).readable) == ((), True)
    counter.write_text(text.format(5))
    assert "detected 2 oom_kill events" in record.said([1]).lines[0]
    record.close()


def test_nothing_may_be_read(machine: Machine) -> None:
    machine.log.unlink()
    record = machine.listen()
    assert record.said([1]).readable is False
    record.close()
    record.close()


@pytest.mark.skipif(not os.access(KMSG, os.R_OK), reason="most users may not read the kernel's log")
def test_the_true_log_of_this_machine_is_read_without_waiting() -> None:
    record = KernelRecord()
    began = patience.now()
    assert record.said([]).readable
    assert patience.now() - began < 1
    record.close()
