# run: deepspeed
# ruff: noqa
import argparse

parser = argparse.ArgumentParser()
parser.add_argument("--model")
parser.parse_args()
