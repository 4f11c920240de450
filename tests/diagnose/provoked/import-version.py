# ruff: noqa
from transformers import AutoModelWithNothing
