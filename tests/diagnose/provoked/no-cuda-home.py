# ruff: noqa
from torch.utils.cpp_extension import CUDAExtension

CUDAExtension("scan", ["scan.cu"])
