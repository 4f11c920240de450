# ruff: noqa
from torch.utils.data import DataLoader


def collate_fn(rows):
    return max(len(word) for row in rows for word in row)


for batch in DataLoader([["a"], []], batch_size=1, collate_fn=collate_fn):
    print(batch)
