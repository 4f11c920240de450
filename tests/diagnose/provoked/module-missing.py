# ruff: noqa
import sgl_kernel_plus
