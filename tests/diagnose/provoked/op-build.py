# ruff: noqa
from torch.utils.cpp_extension import load_inline

load_inline(
    name="cpu_adam_like",
    cpp_sources="#include <no_such_header.h>\nint f() { return 1; }",
    functions=["f"],
    verbose=True,
)
