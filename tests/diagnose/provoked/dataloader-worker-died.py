# ruff: noqa
import os

from torch.utils.data import DataLoader


class Samples:
    def __len__(self):
        return 8

    def __getitem__(self, at):
        if at == 3:
            os._exit(1)
        return at


if __name__ == "__main__":
    for batch in DataLoader(Samples(), num_workers=1):
        print(batch)
