# ruff: noqa
import os

os.environ["PATH"] = "/nowhere"
from torch.utils.cpp_extension import verify_ninja_availability

verify_ninja_availability()
