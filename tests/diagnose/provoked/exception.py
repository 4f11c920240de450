# ruff: noqa
class Head:
    pass


def forward(batch):
    return Head().project(batch)


forward([1, 2])
