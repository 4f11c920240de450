# ruff: noqa
import resource

resource.setrlimit(resource.RLIMIT_AS, (2**30, 2**30))
rows = [bytearray(2**20) for _ in range(4096)]
