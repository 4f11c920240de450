# ruff: noqa
from deepspeed.ops.op_builder import AsyncIOBuilder


class Missing(AsyncIOBuilder):
    def is_compatible(self, verbose=False):
        return False


Missing().jit_load(verbose=True)
