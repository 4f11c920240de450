# ruff: noqa
import subprocess
import sys

sys.exit(subprocess.run([sys.executable, "-m", "tightfit", "train", "--model", "no-such-model-anywhere"]).returncode)
