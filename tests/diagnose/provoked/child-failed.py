# run: torchrun
# ruff: noqa
import os
import sys
import time

if os.environ["RANK"] == "1":
    sys.exit(3)
time.sleep(60)
