# ruff: noqa
import os
import signal

from datasets import Dataset


def tokenise(row):
    if row["number"] == 5:
        os.kill(os.getpid(), signal.SIGKILL)
    return row


if __name__ == "__main__":
    Dataset.from_dict({"number": list(range(8))}).map(tokenise, num_proc=2, desc="Running tokenizer on dataset")
