# run: torchrun
# ruff: noqa
import os
import time

if os.environ["RANK"] == "0":
    time.sleep(1)
    os.abort()
time.sleep(60)
