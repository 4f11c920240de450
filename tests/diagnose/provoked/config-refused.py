# ruff: noqa
import yaml
from pydantic import BaseModel, ConfigDict


class TrainConfig(BaseModel):
    model_config = ConfigDict(extra="forbid")
    micro_batch_size: int


TrainConfig(**yaml.safe_load("micro_batch_size: two"))
