# ruff: noqa
from pathlib import Path

import torch
from safetensors.torch import load_file

Path("model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:12\nsize 4976698672\n")
load_file("model.safetensors")
