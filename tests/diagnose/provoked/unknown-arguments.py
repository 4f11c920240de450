# run: python --evaluation_strategy steps
# ruff: noqa
import argparse

parser = argparse.ArgumentParser()
parser.add_argument("--eval_strategy")
parser.parse_args()
