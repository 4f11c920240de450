"""What every test may use: the benchmarks' modules can be imported by name, and signals mean what they usually do."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

# Behind nohup, or in the background of a script, these two are ignored, and so they would be in every process that a
# test starts and interrupts.
for number, usual in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, usual)
