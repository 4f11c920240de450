# run: torchrun
# ruff: noqa
import os
import signal
import time

if os.environ["RANK"] == "0":
    time.sleep(1)
    os.kill(os.getpid(), signal.SIGFPE)
time.sleep(60)
