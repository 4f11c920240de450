# run: faulthandler
# ruff: noqa
import ctypes

print("first forward pass", flush=True)
ctypes.string_at(0)
