# ruff: noqa
from datasets import load_dataset

load_dataset("./data/that-is-not-there")
