# run: torchrun-hup
# ruff: noqa
import time

print("step 1 loss 2.5", flush=True)
time.sleep(60)
