# ruff: noqa
from datasets import Dataset


def rows():
    yield {"number": 1}
    raise RuntimeError("the second row is not there")


Dataset.from_generator(rows, cache_dir="cache")
