# ruff: noqa
import torch


def backend(graph, inputs):
    raise RuntimeError("PassManager::run failed")


torch.compile(lambda x: x + 1, backend=backend)(torch.ones(2))
