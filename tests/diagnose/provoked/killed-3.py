# run: shell
# ruff: noqa
import os
import signal

print("step 12 loss 2.31", flush=True)
os.kill(os.getpid(), signal.SIGKILL)
