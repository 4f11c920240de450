# run: torchrun
# ruff: noqa
import ctypes
import os
import time

if os.environ["RANK"] == "1":
    time.sleep(1)
    ctypes.string_at(0)
time.sleep(60)
