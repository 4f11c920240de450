"""Existing DeepSpeed files: what they mean, what is wrong with them, and that our tables are DeepSpeed's own."""

from __future__ import annotations

import inspect
import json
from collections import defaultdict
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tightfit.formats.deepspeed import keys
from tightfit.formats.deepspeed.keys import KEYS, LOUD
from tightfit.formats.deepspeed.read import DeepSpeedSettings, read_deepspeed, to_levers
from tightfit.types import Buckets, Checkpointing, ConfigError, Levers, Lora

HUGGING_FACE_ZERO3 = """{
    "fp16": {"enabled": "auto", "loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 16},
    "bf16": {"enabled": "auto"},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": "auto", "warmup_num_steps": "auto"}},
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": true},
        "offload_param": {"device": "cpu", "pin_memory": true},
        "overlap_comm": true,
        "contiguous_gradients": true,
        "sub_group_size": 1e9,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
        "stage3_max_live_parameters": 1e9,
        "stage3_max_reuse_distance": 1e9,
        "stage3_gather_16bit_weights_on_model_save": true
    },
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "steps_per_print": 2000,
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "wall_clock_breakdown": false
}"""


def read(values: object, hidden_size: int | None = 64, version: str = "0.19.8") -> DeepSpeedSettings:
    """The settings of a small file called ds.json; text goes in as it is."""
    with TemporaryDirectory() as folder:
        path = Path(folder, "ds.json")
        path.write_text(values if isinstance(values, str) else json.dumps(values), encoding="utf-8")
        return read_deepspeed(path, hidden_size=hidden_size, version=version)


def refused(values: object, **options: Any) -> str:
    """The one line that the user gets."""
    with pytest.raises(ConfigError) as caught:
        read(values, **options)
    message = str(caught.value)
    assert len(message.splitlines()) == 1
    return message


# --- what the file means ------------------------------------------------------------------------


def test_the_usual_hugging_face_file() -> None:
    said = read(HUGGING_FACE_ZERO3, hidden_size=3584)
    assert said.engine == "zero3"
    assert (said.offload_optimizer, said.offload_param) == ("cpu", "cpu")
    assert said.buckets == Buckets(
        reduce_bucket=3584 * 3584,
        prefetch_bucket=int(0.9 * 3584 * 3584),
        persistence_threshold=35840,
        overlap_comm=True,
        param_buffer_size=100_000_000,
    )
    assert said.optimizer == "adamw"
    for left_to_the_trainer in ("precision", "micro_batch", "accumulation", "train_batch", "gradient_clipping"):
        assert getattr(said, left_to_the_trainer) is None
    assert any("reduce_bucket_size in ds.json is auto: 12,845,056" in str(sentence) for sentence in said.because)
    assert any("gather_16bit_weights_on_model_save in ds.json is not priced" in str(each) for each in said.because)


def test_an_empty_object_is_deepspeed_unsharded() -> None:
    said = read({})
    assert (said.engine, said.offload_optimizer, said.offload_param) == ("zero0", "none", "none")
    assert said.buckets == Buckets()
    assert said.master_weights


def test_every_bucket_is_read() -> None:
    said = read(
        {
            "zero_optimization": {
                "stage": 3,
                "reduce_bucket_size": 1,
                "allgather_bucket_size": 2,
                "prefetch_bucket_size": 3,
                "stage3_param_persistence_threshold": 4,
                "max_live_parameters": 5,
                "stage3_max_reuse_distance": 6,
                "sub_group_size": 7,
                "overlap_comm": False,
                "contiguous_gradients": False,
                "offload_param": {"device": "nvme", "nvme_path": "/x", "buffer_count": 8, "buffer_size": 9},
                "offload_optimizer": {"device": "nvme", "nvme_path": "/x", "buffer_count": 10, "pin_memory": False},
            }
        }
    )
    assert said.buckets == Buckets(
        reduce_bucket=1,
        allgather_bucket=2,
        prefetch_bucket=3,
        persistence_threshold=4,
        max_live_parameters=5,
        max_reuse_distance=6,
        sub_group_size=7,
        overlap_comm=False,
        contiguous_gradients=False,
        pin_memory=False,
        param_buffer_count=8,
        param_buffer_size=9,
        optimizer_buffer_count=10,
    )
    assert (said.offload_param, said.offload_optimizer) == ("nvme", "nvme")


def test_auto_that_hugging_face_does_not_fill_is_deepspeeds_default() -> None:
    zero = {"stage": 2, "stage3_prefetch_bucket_size": "auto", "allgather_bucket_size": "auto", "overlap_comm": "auto"}
    assert read({"zero_optimization": zero}).buckets == Buckets()
    assert read({"zero_optimization": {"stage": 3, "prefetch_bucket_size": "auto"}}).buckets == Buckets()


def test_sequential_allgather_has_no_prefetch_bucket() -> None:
    assert read({"zero_optimization": {"stage": 3, "stage3_allgather_sequential": True}}).buckets.prefetch_bucket == 1


@pytest.mark.parametrize(
    ("values", "precision"),
    [
        ({"bf16": {"enabled": True}}, "bf16"),
        ({"bfloat16": {"enabled": True}}, "bf16"),
        ({"fp16": {"enabled": True}}, "fp16"),
        ({"fp16": {"enabled": "auto"}, "bf16": {"enabled": True}}, "bf16"),
        ({"fp16": {"enabled": "auto"}}, None),
        ({"fp16": {"enabled": False}}, "fp32"),
        ({}, None),
    ],
)
def test_precision(values: object, precision: str | None) -> None:
    assert read(values).precision == precision


@pytest.mark.parametrize(("kind", "optimizer"), [("Adam", "adamw"), ("ADAMW", "adamw"), ("SGD", "sgd")])
def test_optimizer(kind: str, optimizer: str) -> None:
    assert read({"optimizer": {"type": kind}}).optimizer == optimizer


def test_old_offload_switches() -> None:
    assert read({"zero_optimization": {"stage": 2, "cpu_offload": True}}).offload_optimizer == "cpu"
    assert read({"zero_optimization": {"stage": 3, "cpu_offload_param": True}}).offload_param == "cpu"
    assert read({"zero_optimization": {"stage": 2, "cpu_offload": False}}).offload_optimizer == "none"


def test_sixteen_bit_master_weights() -> None:
    zero = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
    bf16 = {"enabled": True, "bf16_master_weights_and_grads": True}
    assert not read({"zero_optimization": zero, "bf16": bf16}).master_weights
    assert "needs stage 1, 2 or 3" in refused({"bf16": bf16})
    assert "needs offload_optimizer" in refused({"zero_optimization": {"stage": 2}, "bf16": bf16})
    states = {"enabled": True, "bf16_optimizer_states": True}
    assert "needs bf16_master_weights_and_grads as well" in refused({"zero_optimization": zero, "bf16": states})
    said = read({"zero_optimization": {"stage": 1}, "bf16": bf16 | states})
    assert any("bf16_optimizer_states in ds.json is not priced yet" in str(sentence) for sentence in said.because)


def test_pinned_by_default_only_since_a_certain_release() -> None:
    offload = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}
    assert read(offload).buckets.pin_memory
    assert not read(offload, version="0.14.2").buckets.pin_memory


def test_comments_are_read_and_reported() -> None:
    said = read('{\n  // three\n  "zero_optimization": {"stage": 3,},  # yes\n}')
    assert said.engine == "zero3"
    assert "ds.json is Hjson" in str(said.because[0])


def test_plain_json_leaves_comments_in_underscored_keys() -> None:
    assert read({"_comment": "made by hand", "zero_optimization": {"stage": 1}}).engine == "zero1"


def test_a_file_with_a_byte_order_mark() -> None:
    assert read("\ufeff{}").engine == "zero0"


def test_deepspeeds_own_checkpointing_does_not_reach_hugging_face_models() -> None:
    said = read({"activation_checkpointing": {"cpu_checkpointing": True}})
    assert to_levers(said, Levers()).checkpointing == Checkpointing(layers=None)
    assert any("deepspeed.checkpointing" in str(sentence) for sentence in said.because)


@pytest.mark.parametrize(("stage", "size", "group"), [(3, 8, 8), (3, 1, 0), (2, 8, 0)])
def test_a_second_copy_is_shared_by_a_group(stage: int, size: int, group: int) -> None:
    said = read({"zero_optimization": {"stage": stage, "zero_hpz_partition_size": size}})
    assert to_levers(said, Levers()).shard_within == group


@pytest.mark.parametrize(
    ("stage", "quantized", "compress"), [(3, True, "zeropp"), (3, False, "none"), (2, True, "none")]
)
def test_weights_of_eight_bits_are_zeropp(stage: int, quantized: bool, compress: str) -> None:
    said = read({"zero_optimization": {"stage": stage, "zero_quantized_weights": quantized}})
    assert to_levers(said, Levers()).compress == compress


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 0.3}}}, "ratio"),
        ({"zero_optimization": {"stage": 3, "zero_quantized_gradients": True}}, "zero_quantized_gradients"),
        ({"tensor_parallel": {"autotp_size": 4}}, "autotp_size"),
        ({"communication_data_type": "fp32"}, "communication_data_type"),
    ],
)
def test_what_is_not_priced_is_said(values: object, named: str) -> None:
    assert any(f"{named} in ds.json is not priced yet" in str(sentence) for sentence in read(values).because)


def test_what_is_off_is_not_mentioned() -> None:
    zero = {"stage": 3, "zero_hpz_partition_size": 1, "zero_quantized_weights": False, "zenflow": None}
    assert read({"zero_optimization": zero, "bf16": {"enabled": True}}).because == ()


# --- levers -------------------------------------------------------------------------------------


def test_levers_keep_what_the_file_leaves_open() -> None:
    base = Levers(sequence=4096, micro_batch=3, accumulation=5, precision="fp16", gradient_clipping=False)
    levers = to_levers(read(HUGGING_FACE_ZERO3), base, world=8)
    assert levers.engine == "zero3"
    assert (levers.sequence, levers.micro_batch, levers.accumulation) == (4096, 3, 5)
    assert (levers.precision, levers.gradient_clipping) == ("fp16", False)


def test_levers_take_what_the_file_says() -> None:
    said = read(
        {
            "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
            "bf16": {"enabled": True},
            "gradient_clipping": 0.0,
            "train_micro_batch_size_per_gpu": 4,
            "gradient_accumulation_steps": 2,
            "optimizer": {"type": "SGD"},
        }
    )
    levers = to_levers(said, Levers(precision="fp32"))
    assert (levers.engine, levers.offload_optimizer, levers.precision) == ("zero2", "cpu", "bf16")
    assert (levers.micro_batch, levers.accumulation, levers.optimizer) == (4, 2, "sgd")
    assert not levers.gradient_clipping


def test_deepspeed_casts_adapters_unless_zero_init_holds_them() -> None:
    base = Levers(method="lora", lora=Lora(dtype="fp32"))
    for stage, dtype in ((0, "bf16"), (2, "bf16"), (3, "fp32")):
        lora = to_levers(read({"zero_optimization": {"stage": stage}, "bf16": {"enabled": True}}), base).lora
        assert lora is not None
        assert lora.dtype == dtype


def test_batch_sizes_that_do_not_multiply() -> None:
    said = read({"train_batch_size": 30, "train_micro_batch_size_per_gpu": 4})
    assert to_levers(said, Levers()).micro_batch == 4
    with pytest.raises(ConfigError, match=r"train_batch_size 30 in ds\.json is not .*: 4 × 0 × 8 GPUs = 0"):
        to_levers(said, Levers(), world=8)
    assert to_levers(read({"train_batch_size": 32}), Levers(accumulation=9), world=8).micro_batch == 4


# --- bad input ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"zero_optimisation": {"stage": 3}},
            "unknown key 'zero_optimisation' in ds.json; did you mean 'zero_optimization'? "
            "(DeepSpeed itself would ignore it silently)",
        ),
        (
            {"zero_optimization": {"stage": 3, "reduce_bucket": 1}},
            "unknown key 'reduce_bucket' in zero_optimization of ds.json; did you mean 'reduce_bucket_size'? "
            "(DeepSpeed would refuse it)",
        ),
        (
            {"zero_optimization": {"offload_param": {"divice": "cpu"}}},
            "unknown key 'divice' in zero_optimization.offload_param of ds.json; did you mean 'device'? "
            "(DeepSpeed would refuse it)",
        ),
        (
            {"activation_checkpointing": {"partitioned_activations": True}},
            "unknown key 'partitioned_activations' in activation_checkpointing of ds.json; "
            "did you mean 'partition_activations'? (DeepSpeed itself would ignore it silently)",
        ),
        (
            {"aio": {"blocksize": 1}},
            "unknown key 'blocksize' in aio of ds.json; did you mean 'block_size'? "
            "(DeepSpeed itself would ignore it silently)",
        ),
        (
            {"offload_optimizer": {"device": "cpu"}},
            "unknown key 'offload_optimizer' in ds.json; it belongs in 'zero_optimization' "
            "(DeepSpeed itself would ignore it silently)",
        ),
        (
            {"zero_optimization": {"gradient_clipping": 1.0}},
            "unknown key 'gradient_clipping' in zero_optimization of ds.json; it belongs at the top level "
            "(DeepSpeed would refuse it)",
        ),
        (
            {"optimizer": {"type": "AdamW", "params": {"weight_deacy": 0.1}}},
            "unknown key 'weight_deacy' in optimizer.params of ds.json; did you mean 'weight_decay'? "
            "(DeepSpeed would refuse it)",
        ),
        (
            {"elasticity": {"enabled": False}},
            "elasticity in ds.json was removed from DeepSpeed, and 0.19.8 refuses it: delete it",
        ),
        (
            {"zero_optimization": {"mics_shard_size": 8}},
            "zero_optimization.mics_shard_size in ds.json was removed from DeepSpeed, and 0.19.8 refuses it: delete it",
        ),
        ({"zero_optimization": True}, "zero_optimization in ds.json must be a block in braces, not true"),
        ({"fp16": "auto"}, "fp16 in ds.json must be a block in braces, not 'auto'"),
        ({"zero_optimization": {"stage": 4}}, "zero_optimization.stage in ds.json must be 0, 1, 2 or 3, not 4"),
        (
            {"zero_optimization": {"stage": "3"}},
            "zero_optimization.stage in ds.json must be a whole number, not '3': write it without quotes",
        ),
        (
            {"zero_optimization": {"stage": "auto"}},
            "zero_optimization.stage in ds.json is 'auto', and nobody fills it: write 0, 1, 2 or 3",
        ),
        (
            {"zero_optimization": {"reduce_bucket_size": "5e8"}},
            "zero_optimization.reduce_bucket_size in ds.json must be a whole number, not '5e8': "
            "write it without quotes",
        ),
        (
            {"zero_optimization": {"reduce_bucket_size": 0}},
            "zero_optimization.reduce_bucket_size in ds.json must be at least 1, not 0",
        ),
        (
            {"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}},
            "zero_optimization.offload_param cpu in ds.json needs stage 3: "
            "stage 2 keeps whole weights on every GPU and ignores it",
        ),
        (
            {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}},
            "zero_optimization.offload_optimizer cpu in ds.json needs stage 1, 2 or 3: "
            "stage 0 has no sharded optimizer to offload",
        ),
        (
            {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "nvme", "nvme_path": "/x"}}},
            "zero_optimization.offload_optimizer nvme in ds.json needs stage 3: "
            "stage 2 would put it into host memory without a word",
        ),
        (
            {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme"}}},
            "zero_optimization.offload_optimizer nvme in ds.json needs nvme_path, the folder on the disk",
        ),
        (
            {"zero_optimization": {"stage": 3, "offload_param": {"device": "gpu"}}},
            "zero_optimization.offload_param.device in ds.json knows no 'gpu'; did you mean 'cpu'?",
        ),
        (
            {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "super_offload": True}}},
            "zero_optimization.offload_optimizer.super_offload in ds.json needs stage 3, not stage 2",
        ),
        (
            {"zero_optimization": {"max_live_parameters": 1, "stage3_max_live_parameters": 1}},
            "max_live_parameters and stage3_max_live_parameters in ds.json are the same key: keep one",
        ),
        (
            {"zero_optimization": {"stage": 2, "cpu_offload": True, "offload_optimizer": {"device": "cpu"}}},
            "zero_optimization.cpu_offload and offload_optimizer in ds.json say the same thing: keep offload_optimizer",
        ),
        (
            {"fp16": {"enabled": True}, "bf16": {"enabled": True}},
            "bf16 and fp16 are both enabled in ds.json: keep one",
        ),
        ({"bf16": {}, "bfloat16": {}}, "bf16 and bfloat16 in ds.json are the same block: keep bf16"),
        (
            {"bf16": {"enabled": "true"}},
            "bf16.enabled in ds.json must be true or false, not 'true': write it without quotes",
        ),
        ({"train_batch_size": 0}, "train_batch_size in ds.json must be at least 1, not 0"),
        ({"gradient_clipping": -1}, "gradient_clipping in ds.json must be at least 0, not -1"),
        (
            {"optimizer": {"type": "Lion"}},
            "optimizer.type 'Lion' in ds.json is unknown or not priced yet; it takes AdamW, Adam, SGD or Adafactor",
        ),
        (
            {"optimizer": {"type": "sgd"}},
            "optimizer.type 'sgd' in ds.json is unknown or not priced yet; did you mean 'SGD'?",
        ),
        ("{", "ds.json is not JSON: close the bracket that is open, in line 1"),
        ("", "ds.json is not JSON: a DeepSpeed config is one object in braces"),
        ("stage three please", "ds.json is not JSON: a DeepSpeed config is one object in braces"),
        ("[1, 2]", "ds.json is not JSON: a DeepSpeed config is one object in braces"),
        (
            '{"train_batch_size": 1, "train_batch_size": 2}',
            "the key 'train_batch_size' stands twice in one block of the DeepSpeed file: keep one",
        ),
    ],
)
def test_bad_input(values: object, message: str) -> None:
    assert refused(values) == message


def test_auto_without_a_model() -> None:
    message = refused(HUGGING_FACE_ZERO3, hidden_size=None)
    assert message == "reduce_bucket_size in ds.json is 'auto', which needs the model's hidden size: name a model"


def test_removed_keys_are_fine_where_they_still_exist() -> None:
    assert read({"elasticity": {"enabled": False}}, version="0.14.2").engine == "zero0"


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*missing\.json: no such file"):
        read_deepspeed(tmp_path / "missing.json", hidden_size=None)


def test_nesting_that_would_break_the_parser() -> None:
    assert "ds.json is not JSON" in refused('{"a":' + "[" * 100_000)
    assert "ds.json is not JSON" in refused('{"train_batch_size": ' + "9" * 10_000 + "}")


# --- properties ---------------------------------------------------------------------------------

SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.sampled_from(["auto", "cpu", "nvme", "5e8", "x"])
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=5), inner, max_size=2),
    max_leaves=4,
)


@st.composite
def blocks(draw: st.DrawFn, path: str = "") -> dict[str, Any]:
    """An object with mostly right keys and mostly wrong values."""
    keys = draw(st.lists(st.sampled_from(sorted(KEYS[path])) | st.text(max_size=8), max_size=4, unique=True))
    made = {}
    for key in keys:
        child = f"{path}.{key}" if path else key
        made[key] = draw(blocks(child) | VALUES if child in KEYS else VALUES)
    return made


def complaint(values: object) -> str:
    """What the user gets to hear; nothing if all is well."""
    try:
        to_levers(read(values), Levers(), world=4)
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.thorough
@given(blocks())
@example({"scheduler": {"params": {}, "type": []}})
def test_any_object_is_read_or_refused_in_one_line(values: dict[str, Any]) -> None:
    assert len(complaint(values).splitlines()) <= 1


@given(st.text(max_size=40))
def test_any_text_is_read_or_refused_in_one_line(text: str) -> None:
    assert len(complaint(text.encode("utf-8", "replace").decode()).splitlines()) <= 1


# --- DeepSpeed's own word -----------------------------------------------------------------------

own = pytest.mark.filterwarnings("ignore")
"""Importing DeepSpeed and transformers warns about things that are not ours."""


class Watched(dict[str, Any]):
    """A config that notes every key that it is asked for, by block."""

    asked: dict[str, set[str]]

    def __init__(self, values: dict[str, Any], asked: dict[str, set[str]], path: str = "") -> None:
        super().__init__({key: self._wrapped(key, value, asked, path) for key, value in values.items()})
        self.asked, self.path = asked, path

    @classmethod
    def _wrapped(cls, key: str, value: Any, asked: dict[str, set[str]], path: str) -> Any:
        return cls(value, asked, f"{path}.{key}" if path else key) if isinstance(value, dict) else value

    def __reduce__(self) -> Any:
        return Watched, (dict(self.items()), self.asked, self.path)

    def _note(self, key: object) -> None:
        self.asked[self.path].add(str(key))

    def get(self, key: str, default: Any = None) -> Any:
        self._note(key)
        return super().get(key, default)

    def __getitem__(self, key: str) -> Any:
        self._note(key)
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        self._note(key)
        return super().__contains__(key)

    def keys(self) -> Any:
        return self


@pytest.fixture(scope="module")
def asked() -> dict[str, set[str]]:
    """Which keys DeepSpeed's config asks of which block, when every block is there."""
    config = pytest.importorskip("deepspeed.runtime.config")
    asked: dict[str, set[str]] = defaultdict(set)
    silent = [path for path in KEYS if path and path not in LOUD and path != "bfloat16"]
    values: dict[str, Any] = {"train_batch_size": 1}
    for path in silent:
        block = values
        for key in path.split("."):
            block = block.setdefault(key, {})
    values["expert_parallel"] = {"enabled": False}
    values["optimizer"] = {"type": "AdamW"}
    values["scheduler"] = {"type": "WarmupLR"}
    values["data_efficiency"]["data_sampling"]["dynamic_batching"] = {"enabled": True, "max_tokens": 1}
    config.DeepSpeedConfig(Watched(values, asked))
    return asked


@own
def test_top_level_keys_are_deepspeeds(asked: dict[str, set[str]]) -> None:
    only_in_a_process_group = {"data_parallel_size", "sequence_parallel_size"}
    old_form = {"allgather_size"}  # read when zero_optimization is a plain true, which we refuse
    assert asked[""] - keys.REMOVED - old_form == KEYS[""] - only_in_a_process_group


@own
def test_silent_blocks_are_deepspeeds(asked: dict[str, set[str]]) -> None:
    elsewhere = {
        "pipeline": KEYS["pipeline"],  # copied whole: see the next test
        "data_efficiency.data_sampling.dynamic_batching": {"metrics_path"},  # read by the data sampler
    }
    for path in KEYS:
        if path and path not in LOUD and path != "bfloat16":
            assert asked[path] == KEYS[path] - set(elsewhere.get(path, ())), path


@own
def test_pipeline_keys_are_deepspeeds() -> None:
    config = pytest.importorskip("deepspeed.runtime.config")
    assert set(config.get_pipeline_config({})) | {"use_reentrant"} == KEYS["pipeline"]


@own
def test_loud_blocks_are_deepspeeds() -> None:
    pytest.importorskip("deepspeed")
    from deepspeed.comm.config import CommsLoggerConfig
    from deepspeed.compile.config import CompileConfig
    from deepspeed.inference.config import WeightQuantConfig
    from deepspeed.monitor.config import CometConfig, CSVConfig, TensorBoardConfig, WandbConfig
    from deepspeed.runtime.config import HybridEngineConfig
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
    from deepspeed.runtime.tensor_parallel.config import TPConfig, TPTrainingConfig
    from deepspeed.runtime.zenflow.zenflow_config import ZenFlowConfig
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    from deepspeed.runtime.zero.leaf_module_config import DeepSpeedZeroLeafModuleConfig
    from deepspeed.runtime.zero.offload_config import (
        DeepSpeedZeroOffloadOptimizerConfig,
        DeepSpeedZeroOffloadParamConfig,
    )
    from deepspeed.utils.config import DeepSpeedThroughputTimerConfig

    models: dict[str, Any] = {
        "zero_optimization": DeepSpeedZeroConfig,
        "zero_optimization.offload_param": DeepSpeedZeroOffloadParamConfig,
        "zero_optimization.offload_optimizer": DeepSpeedZeroOffloadOptimizerConfig,
        "zero_optimization.zenflow": ZenFlowConfig,
        "zero_optimization.leaf_module": DeepSpeedZeroLeafModuleConfig,
        "fp16": DeepSpeedFP16Config,
        "bf16": DeepSpeedBF16Config,
        "bfloat16": DeepSpeedBF16Config,
        "compile": CompileConfig,
        "tensor_parallel": TPTrainingConfig,
        "tensor_parallel.tp": TPConfig,
        "tensor_parallel.tensor_parallel": TPConfig,
        "hybrid_engine": HybridEngineConfig,
        "weight_quantization": WeightQuantConfig,
        "timers.throughput": DeepSpeedThroughputTimerConfig,
        "comms_logger": CommsLoggerConfig,
        "tensorboard": TensorBoardConfig,
        "csv_monitor": CSVConfig,
        "wandb": WandbConfig,
        "comet": CometConfig,
    }
    assert set(models) == LOUD - {"optimizer.params", "scheduler.params"}
    for path, model in models.items():
        fields = model.model_fields.items()
        assert {name for name, _ in fields} | {field.alias for _, field in fields if field.alias} == KEYS[path], path
        assert model.model_config["extra"] == "forbid"
    prefixed = {name for name, field in DeepSpeedZeroConfig.model_fields.items() if field.alias}
    assert prefixed == set(keys.PREFIXED)


@own
def test_removed_keys_are_deepspeeds() -> None:
    config = pytest.importorskip("deepspeed.runtime.config")
    assert set(config._REMOVED_TOP_LEVEL_CONFIG_KEYS) == keys.REMOVED
    assert set(config._REMOVED_ZERO_CONFIG_KEYS) == {
        key.rpartition(".")[2] for key in keys.GONE if key.startswith("zero_optimization.")
    }


@own
def test_parameters_of_optimizers_and_schedulers_are_theirs() -> None:
    schedules = pytest.importorskip("deepspeed.runtime.lr_schedules")
    import torch
    from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam

    def parameters(*classes: Any) -> set[str]:
        names = {name for cls in classes for name in inspect.signature(cls).parameters}
        return names - {"self", "params", "model_params", "optimizer"}

    adam = parameters(FusedAdam, DeepSpeedCPUAdam, torch.optim.AdamW) - {"adamw_mode"} | {"torch_adam"}
    assert adam | parameters(torch.optim.SGD, torch.optim.Adafactor) == KEYS["optimizer.params"]
    assert set(schedules.VALID_LR_SCHEDULES) == set(keys.SCHEDULER_PARAMS)
    classes = [getattr(schedules, name) for name in schedules.VALID_LR_SCHEDULES]
    assert parameters(*classes) == KEYS["scheduler.params"]


@own
def test_defaults_are_deepspeeds() -> None:
    zero = pytest.importorskip("deepspeed.runtime.zero.config").DeepSpeedZeroConfig()
    offload = pytest.importorskip("deepspeed.runtime.zero.offload_config")
    assert _buckets_of(zero, offload) == Buckets()
    assert offload.DeepSpeedZeroOffloadParamConfig().buffer_size == 100_000_000


def _buckets_of(zero: Any, offload: Any) -> Buckets:
    """DeepSpeed's own values in our words."""
    param = zero.offload_param or offload.DeepSpeedZeroOffloadParamConfig()
    optimizer = zero.offload_optimizer or offload.DeepSpeedZeroOffloadOptimizerConfig()
    return Buckets(
        reduce_bucket=zero.reduce_bucket_size,
        allgather_bucket=zero.allgather_bucket_size,
        prefetch_bucket=zero.prefetch_bucket_size,
        persistence_threshold=zero.param_persistence_threshold,
        max_live_parameters=zero.max_live_parameters,
        max_reuse_distance=zero.max_reuse_distance,
        sub_group_size=zero.sub_group_size,
        overlap_comm=None,  # DeepSpeed has made its choice by now
        contiguous_gradients=zero.contiguous_gradients,
        pin_memory=optimizer.pin_memory,
        param_buffer_count=param.buffer_count,
        param_buffer_size=param.buffer_size if zero.offload_param else None,
        optimizer_buffer_count=optimizer.buffer_count,
    )


SIZES = st.integers(-2, 10**12) | st.floats() | st.sampled_from(["auto", "5e8", "7", None, True, 5e8])
DEVICES = st.sampled_from(["none", "cpu", "nvme", "auto", "CPU", None])


@pytest.mark.thorough
@own
@given(
    stage=st.sampled_from([0, 1, 2, 3, 3, 3, 2.0, "3", 4, None]),
    sizes=st.dictionaries(
        st.sampled_from(
            """reduce_bucket_size allgather_bucket_size sub_group_size stage3_prefetch_bucket_size
            prefetch_bucket_size max_live_parameters stage3_max_reuse_distance param_persistence_threshold""".split()
        ),
        SIZES,
        max_size=3,
    ),
    param=st.none()
    | st.fixed_dictionaries({"device": DEVICES}, optional={"nvme_path": st.just("/x"), "buffer_count": SIZES}),
    optimizer=st.none()
    | st.fixed_dictionaries({"device": DEVICES}, optional={"ratio": st.floats(), "buffer_count": SIZES}),
    overlap=st.sampled_from([None, True, False, "auto", "true"]),
)
def test_what_we_accept_deepspeed_accepts_with_the_same_values(
    stage: Any, sizes: dict[str, Any], param: Any, optimizer: Any, overlap: Any
) -> None:
    model = pytest.importorskip("deepspeed.runtime.zero.config").DeepSpeedZeroConfig
    offload = pytest.importorskip("deepspeed.runtime.zero.offload_config")
    zero = {"stage": stage, "offload_param": param, "offload_optimizer": optimizer, "overlap_comm": overlap, **sizes}
    try:
        said = read({"zero_optimization": zero}, hidden_size=64)
    except ConfigError:
        return
    filled = {"reduce_bucket_size": 64 * 64, "stage3_prefetch_bucket_size": int(0.9 * 64 * 64)}
    for key, value in filled.items():
        if zero.get(key) == "auto" and (said.engine == "zero3" or not key.startswith("stage3_")):
            zero[key] = value
    theirs = model(**zero)
    assert said.engine == f"zero{theirs.stage}"
    assert said.offload_param == (theirs.offload_param.device if theirs.offload_param else "none")
    assert said.offload_optimizer == (theirs.offload_optimizer.device if theirs.offload_optimizer else "none")
    overlap_comm = said.buckets.overlap_comm
    assert theirs.overlap_comm == (said.engine == "zero3" if overlap_comm is None else overlap_comm)
    expected = _buckets_of(theirs, offload)
    assert {**_plain(said.buckets), "overlap_comm": None} == _plain(expected)


def _plain(buckets: Buckets) -> dict[str, object]:
    return {name: getattr(buckets, name) for name in buckets.__dataclass_fields__}


@own
@given(
    total=st.none() | st.integers(1, 64),
    micro=st.none() | st.integers(1, 8),
    accumulation=st.none() | st.integers(1, 8),
)
def test_batch_sizes_are_completed_as_deepspeed_does(
    total: int | None, micro: int | None, accumulation: int | None
) -> None:
    config = pytest.importorskip("deepspeed.runtime.config").DeepSpeedConfig
    theirs = object.__new__(config)
    theirs.train_batch_size, theirs.train_micro_batch_size_per_gpu = total, micro
    theirs.gradient_accumulation_steps, theirs.world_size = accumulation, 4
    try:
        theirs._configure_train_batch_size()
        right = (theirs.train_micro_batch_size_per_gpu, theirs.gradient_accumulation_steps)
    except AssertionError:
        right = None
    values = {
        "train_batch_size": total,
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": accumulation,
    }
    try:
        levers = to_levers(read(values), Levers(), world=4)
    except ConfigError:
        assert right is None
        return
    if total is None and micro is None:
        return  # DeepSpeed wants one of them; here the flags may still bring it
    assert (levers.micro_batch, levers.accumulation) == right


@pytest.mark.thorough
@own
@given(hidden_size=st.integers(1, 20_000), stage=st.sampled_from([0, 1, 2, 3]))
def test_auto_is_filled_as_transformers_does(hidden_size: int, stage: int) -> None:
    integration = pytest.importorskip("transformers.integrations.deepspeed")
    zero = {
        "stage": stage,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
    }
    theirs = integration.HfTrainerDeepSpeedConfig({"zero_optimization": dict(zero)})
    args = SimpleNamespace(get_warmup_steps=lambda steps: 1)
    theirs.trainer_config_finalize(args, SimpleNamespace(config=SimpleNamespace(hidden_size=hidden_size)), 10)
    right = pytest.importorskip("deepspeed.runtime.zero.config").DeepSpeedZeroConfig(
        **theirs.config["zero_optimization"]
    )
    ours = read({"zero_optimization": zero}, hidden_size=hidden_size).buckets
    assert ours.reduce_bucket == right.reduce_bucket_size
    assert ours.prefetch_bucket == right.prefetch_bucket_size
    assert ours.persistence_threshold == right.param_persistence_threshold
