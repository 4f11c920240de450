# ruff: noqa
"""A launcher's variable that nobody set."""

import os

print(os.environ["CHECKPOINT_ROOT"])
