# run: deepspeed
# ruff: noqa
import os
import signal
import time

if os.environ["LOCAL_RANK"] == "0":
    time.sleep(1)
    os.kill(os.getpid(), signal.SIGILL)
time.sleep(60)
