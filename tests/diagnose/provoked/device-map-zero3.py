# ruff: noqa
import os

os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29882", "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
import deepspeed
from small import model
from transformers import AutoModelForCausalLM
from transformers.integrations import HfDeepSpeedConfig

deepspeed.init_distributed()
model().save_pretrained("tiny")
kept = HfDeepSpeedConfig({"train_batch_size": 1, "zero_optimization": {"stage": 3}})
AutoModelForCausalLM.from_pretrained("tiny", device_map="auto")
