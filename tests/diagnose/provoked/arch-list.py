# ruff: noqa
import os

os.environ["TORCH_CUDA_ARCH_LIST"] = "9.0a"
from deepspeed.ops.op_builder.builder import CUDAOpBuilder


class Builder(CUDAOpBuilder):
    BUILD_VAR, NAME = "DS_BUILD_X", "x"

    def __init__(self):
        super().__init__(self.NAME)
        self.jit_mode = False

    def absolute_name(self):
        return "x"

    def sources(self):
        return []


print(Builder().compute_capability_args())
