# ruff: noqa
import torch
from small import samples


def main():
    collate = lambda rows: rows[0]
    for batch in torch.utils.data.DataLoader(
        samples(), num_workers=1, collate_fn=collate, multiprocessing_context="spawn"
    ):
        print(batch)


if __name__ == "__main__":
    main()
