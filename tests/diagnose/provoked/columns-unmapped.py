# ruff: noqa
"""A column whose name was never set, in a map over several processes."""

from datasets import Dataset

columns = {"prompt": "instruction", "response": None}
data = Dataset.from_dict({"instruction": ["a"] * 8, "output": ["b"] * 8})


def convert(row: dict) -> dict:
    return {"text": row[columns["prompt"]] + row[columns["response"]]}


data.map(convert, num_proc=2)
