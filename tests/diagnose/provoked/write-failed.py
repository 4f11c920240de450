# ruff: noqa
import torch
from safetensors.torch import save_file

save_file({"weight": torch.ones(4)}, "nowhere/model.safetensors")
