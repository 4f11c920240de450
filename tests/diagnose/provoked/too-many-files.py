# ruff: noqa
import resource

resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
files = [open(__file__) for _ in range(100)]  # noqa: SIM115
