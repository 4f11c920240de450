# ruff: noqa
from small import model, samples
from transformers import Trainer, TrainingArguments

arguments = TrainingArguments(output_dir="out-that-is-empty", use_cpu=True, report_to="none")
Trainer(model(), arguments, train_dataset=samples()).train(resume_from_checkpoint=True)
