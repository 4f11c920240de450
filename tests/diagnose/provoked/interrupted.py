# run: interrupted
# ruff: noqa
import signal
import time

signal.signal(signal.SIGINT, signal.default_int_handler)
print("step 1 loss 2.5", flush=True)
time.sleep(60)
