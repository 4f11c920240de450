# ruff: noqa
from transformers import HfArgumentParser, TrainingArguments

HfArgumentParser(TrainingArguments).parse_dict({"output_dir": "out", "per_device_batch_size": 4})
