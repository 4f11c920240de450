"""A group of ranks that does not move any more: every one says where it stands, before they are ended."""

from __future__ import annotations

import time
from dataclasses import dataclass

from tightfit.messages import Message
from tightfit.runs.heartbeat import Beat, Quiet
from tightfit.runs.launch import LOOK_S, Ranks
from tightfit.runs.stacks import Frame, Stand, odd_one, read_stand

DUMP_S = 3.0
"""For all ranks to write down their stacks; one that the kernel holds never does."""
_SETTLE_S = 0.3


@dataclass(frozen=True, slots=True, kw_only=True)
class Hung:
    """Who hangs, and where everybody stands."""

    quiet: Quiet
    stands: tuple[Stand, ...]
    """Of the ranks that said it."""

    @property
    def rank(self) -> int:
        """The one that the others wait for: alone behind, alone not waiting, or alone without an answer."""
        behind = [beat.rank for beat in self.quiet.beats if beat.progress == self.beat_of(self.quiet.rank).progress]
        if len(behind) == 1 and len(self.quiet.beats) > 1:
            return behind[0]
        mute = [beat.rank for beat in self.quiet.beats if beat.rank not in {stand.rank for stand in self.stands}]
        if len(mute) == 1 and self.stands and all(stand.waits for stand in self.stands):
            return mute[0]  # stopped, or held by the kernel
        found = odd_one(self.stands)
        return self.quiet.rank if found is None else found

    @property
    def beat(self) -> Beat:
        return self.beat_of(self.rank)

    @property
    def place(self) -> Frame | None:
        """The frame in which that rank stands; None: it did not say."""
        return next((stand.place for stand in self.stands if stand.rank == self.rank), None)

    @property
    def sentence(self) -> Message:
        said = {"rank": self.rank, "silent_s": self.quiet.silent_s, "where": self.beat.where}
        if self.place is not None:
            return Message("runs.hangs-at", place=self.place.words, **said)
        return Message("runs.hangs-mute" if self.stands else "runs.hangs", **said)

    def beat_of(self, rank: int) -> Beat:
        return next(beat for beat in self.quiet.beats if beat.rank == rank)


def ask_for_stacks(ranks: Ranks, quiet: Quiet) -> Hung:
    """Ask every rank that can hear it for its stacks, and read them."""
    listening = {beat.rank for beat in quiet.beats}
    logs = {start.rank: start.log for start in ranks.starts if start.rank in listening}
    sizes = {rank: log.stat().st_size if log.exists() else 0 for rank, log in logs.items()}
    ranks.dump(listening)
    deadline, stands = time.monotonic() + DUMP_S, dict[int, Stand]()
    while time.monotonic() < deadline and len(stands) < len(logs):
        time.sleep(LOOK_S)
        for rank in set(logs) - set(stands):
            if (found := read_stand(rank, logs[rank], sizes[rank])) is not None:
                stands[rank] = found
    time.sleep(_SETTLE_S)  # a dump is written line by line, the thread that trains last
    whole = [read_stand(rank, logs[rank], sizes[rank]) or stand for rank, stand in sorted(stands.items())]
    return Hung(quiet=quiet, stands=tuple(whole))
