# ruff: noqa
from filelock import FileLock

with FileLock("model.lock"):
    FileLock("model.lock").acquire(timeout=0.1)
