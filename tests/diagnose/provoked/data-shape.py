# ruff: noqa
from torch.utils.data import DataLoader


class Samples:
    def __len__(self):
        return 4

    def __getitem__(self, at):
        return {"text": None}["text"].strip()


for row in DataLoader(Samples()):
    print(row)
