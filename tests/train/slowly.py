"""The worker on a slow disk: every fsync takes a while, so that a save can be interrupted in its middle."""

from __future__ import annotations

import sys
import time

from tightfit.runs import disk
from tightfit.train.__main__ import main

SLOW_S = 0.3
_sync = disk.sync


def sync(descriptor: int) -> None:
    time.sleep(SLOW_S)
    _sync(descriptor)


disk.sync = sync
main(sys.argv[1:])
