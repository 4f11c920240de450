# ruff: noqa
import numpy as np

np.ones((2**25, 2**25))
