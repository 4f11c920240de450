"""Rules for an accelerate config.

accelerate refuses an unknown key at the top level. The keys of its blocks it copies onto the launcher's flags without
a look, so a misspelt one is a flag that nobody reads. FSDP's settings then travel through the environment, where what
belongs to the other version of FSDP is dropped in silence.
"""

from __future__ import annotations

from collections.abc import Iterable

from tightfit.formats.accelerate.keys import BLOCKS, DEEPSPEED_AT, KEYS, TYPES
from tightfit.formats.deepspeed.check import check_deepspeed, deepspeed_beside
from tightfit.formats.sheet import Sheet
from tightfit.inputs.spelling import misspelt, nearest, shown

_OF_THE_FILE = """gradient_accumulation_steps gradient_clipping zero_stage offload_optimizer_device offload_param_device
    offload_param_nvme_path offload_optimizer_nvme_path zero3_save_16bit_model""".split()
"""What accelerate refuses beside `deepspeed_config_file`."""

_FSDP1_ONLY = ("sharding_strategy", "forward_prefetch", "backward_prefetch")
_OFF = (None, False, "no", "NO", "false")


def check_accelerate(sheet: Sheet) -> Sheet | None:
    """Every rule for the file, and for the DeepSpeed file that it names, which is returned."""
    _check_alone(sheet)
    if sheet.get("distributed_type") != "DEEPSPEED":
        return None
    deepspeed = deepspeed_beside(sheet, DEEPSPEED_AT)
    if deepspeed is None:
        return None
    if not deepspeed.has("zero_optimization"):
        file = deepspeed.document.path.name
        what = f"accelerate refuses a DeepSpeed file without zero_optimization, and {file} has none"
        sheet.say("pair-no-zero", DEEPSPEED_AT, what, f'add it to {file}, {{"stage": 0}} at least')
    check_deepspeed(deepspeed)
    return deepspeed


def _check_alone(sheet: Sheet) -> None:
    for place in sheet.document.doubles:
        sheet.say("key-twice", place, "the last one counts and the other is forgotten without a word", "keep one")
    if sheet.get("compute_environment") not in (None, "LOCAL_MACHINE"):
        return
    _check_keys(sheet)
    kind = _check_type(sheet)
    _check_precision(sheet)
    _check_machines(sheet, kind)
    if kind == "DEEPSPEED":
        _check_deepspeed(sheet)
    if kind == "FSDP":
        _check_fsdp(sheet)


def _check_keys(sheet: Sheet) -> None:
    for key in sheet.document.values:
        if key not in KEYS:
            close = misspelt(key, KEYS)
            what = f"accelerate knows no {key} at the top level and refuses the file"
            sheet.say("acc-unknown", key, what, f"write {close}" if close else "delete it")
    for block, known in BLOCKS.items():
        prefix = block.removesuffix("config")
        takes = {*known, *(key.removeprefix(prefix) for key in known)} if block != "deepspeed_config" else set(known)
        for key in sheet.block(block):
            if key not in takes:
                what = f"nobody reads {key}: accelerate checks no keys in {block}, and the setting is lost in silence"
                sheet.say("acc-typo", f"{block}.{key}", what, _meant(key, known))


def _meant(key: str, known: Iterable[str]) -> str:
    close = misspelt(key, known)
    return f"write {close}" if close else "delete it"


def _check_type(sheet: Sheet) -> str | None:
    kind = sheet.get("distributed_type")
    if kind is False:  # a bare NO
        kind = "NO"
        sheet.say("acc-bare-no", "distributed_type", _bare_no("distributed_type"), "write 'NO' in quotes")
    if kind not in TYPES:
        close = nearest(kind, TYPES) if isinstance(kind, str) else None
        what = f"accelerate refuses distributed_type {shown(kind)}" if kind else "accelerate needs a distributed_type"
        sheet.say("acc-distributed-type", "distributed_type", what, f"write {close or 'DEEPSPEED, FSDP or MULTI_GPU'}")
        return None
    for block, owner in (("deepspeed_config", "DEEPSPEED"), ("fsdp_config", "FSDP")):
        if sheet.block(block) and kind != owner:
            what = f"distributed_type {kind} leaves {block} unused: the training is not sharded by it"
            sheet.say("acc-block-unused", block, what, f"write distributed_type: {owner}, or delete {block}")
    return str(kind)


def _bare_no(key: str) -> str:
    return f"YAML reads a bare no as false: accelerate takes text for {key} and dies with an AttributeError"


def _check_precision(sheet: Sheet) -> None:
    precision = sheet.get("mixed_precision")
    if precision is False:
        sheet.say("acc-bare-no", "mixed_precision", _bare_no("mixed_precision"), "write 'no' in quotes")
    elif precision is not None and str(precision).lower() not in ("no", "fp16", "bf16", "fp8"):
        what = f"accelerate refuses mixed_precision {shown(precision)}"
        sheet.say("acc-mixed-precision", "mixed_precision", what, "write bf16, fp16, fp8 or 'no'")
    for place in ("dynamo_config.dynamo_backend", "dynamo_config.backend"):
        if sheet.get(place) is False:
            sheet.say("acc-bare-no", place, _bare_no("dynamo_backend"), "write 'NO' in quotes")


# --- processes and machines ---------------------------------------------------------------------


def _check_machines(sheet: Sheet, kind: str | None) -> None:
    machines = int(sheet.number("num_machines") or 1)
    processes = sheet.number("num_processes")
    if processes is None and kind not in ("NO", None):
        what = "num_processes is left out: accelerate refuses to start unless the command line gives it"
        sheet.say("acc-no-processes", "num_processes", what, "write the number of all GPUs, or add --num_processes")
    if processes is not None and machines > 1 and processes % machines:
        what = f"each of {machines} machines starts {int(processes // machines)} processes: {processes:g} never come up"
        sheet.say("acc-processes", "num_processes", what, f"write a multiple of {machines}, the total of all machines")
    if sheet.world is not None and processes is not None and processes != sheet.world:
        what = f"num_processes is {processes:g}, and the job is for {sheet.world} GPUs"
        sheet.say("acc-processes", "num_processes", what, f"write {sheet.world}")
    if machines > 1:
        _check_several(sheet, kind, machines)
    if sheet.has("gpu_ids"):
        _check_gpu_ids(sheet, processes, machines)


def _check_several(sheet: Sheet, kind: str | None, machines: int) -> None:
    rank = sheet.number("machine_rank") or 0
    if rank >= machines:
        what = f"ranks run from 0 to {machines - 1}: this machine would wait for ever"
        sheet.say("acc-machines", "machine_rank", what, f"write 0 to {machines - 1}")
    launcher = sheet.get("deepspeed_config.deepspeed_multinode_launcher") or "pdsh"
    if kind == "DEEPSPEED" and launcher != "standard":
        if not sheet.get("deepspeed_config.deepspeed_hostfile"):
            what = "without a hostfile DeepSpeed's launcher trains on this machine alone, and only warns"
            fix = "add deepspeed_hostfile, or deepspeed_multinode_launcher: standard"
            sheet.say("acc-hostfile", "deepspeed_config.deepspeed_hostfile", what, fix)
    elif not sheet.get("main_process_ip"):
        what = "the machines look for each other at the address 'None'"
        sheet.say("acc-machines", "main_process_ip", what, "write the address of the machine with machine_rank 0")


def _check_gpu_ids(sheet: Sheet, processes: float | None, machines: int) -> None:
    ids = sheet.get("gpu_ids")
    if ids in (None, "all"):
        return
    if not isinstance(ids, str):
        what = f"accelerate takes text here and dies on {shown(ids)} with an AttributeError"
        words = ",".join(map(str, ids)) if isinstance(ids, list) else str(ids)
        sheet.say("acc-gpu-ids", "gpu_ids", what, f"write '{words}' in quotes")
        return
    count = len([word for word in ids.split(",") if word.strip()])
    here = None if processes is None else int(processes // machines)
    if here is not None and here > count:
        what = f"{here} processes start on {count} GPUs: those without one fail with 'invalid device ordinal'"
        sheet.say("acc-gpu-ids", "gpu_ids", what, f"name {here} GPUs, or write num_processes: {count * machines}")
    elif here is not None and here < count:
        what = f"{here} processes start on {count} GPUs: the others stay idle"
        sheet.say("acc-idle-gpus", "gpu_ids", what, f"write num_processes: {count * machines}")


# --- DeepSpeed ----------------------------------------------------------------------------------


def _check_deepspeed(sheet: Sheet) -> None:
    block = sheet.block("deepspeed_config")
    if block.get("deepspeed_config_file"):
        clashing = [f"deepspeed_config.{key}" for key in _OF_THE_FILE if key in block]
        if sheet.get("mixed_precision") is not None:
            clashing.append("mixed_precision")
        for place in clashing:
            what = f"accelerate refuses {place.rpartition('.')[2]} beside deepspeed_config_file"
            sheet.say("acc-config-file", place, what, "delete it, and set it in the DeepSpeed file")
        return
    stage = sheet.number("deepspeed_config.zero_stage")
    stage = 2 if stage is None else int(stage)
    for kind, needs in (("param", 3), ("optimizer", 1)):
        place = f"deepspeed_config.offload_{kind}_device"
        device = sheet.get(place)
        if device in (*_OFF, "none"):
            continue
        if stage < needs or (device == "nvme" and stage < 3):
            what = f"stage {stage} ignores offload_{kind}_device {device}, or uses host memory instead"
            sheet.say("acc-offload-stage", place, what, "write zero_stage: 3, or delete it")
        elif device == "nvme":
            what = "accelerate does not pass the path on: the files go into a folder 'none' of the working directory"
            fix = "use a deepspeed_config_file, with nvme_path in it"
            sheet.say("acc-nvme-path", f"deepspeed_config.offload_{kind}_nvme_path", what, fix)
    if stage == 3:
        _check_stage3(sheet)


def _check_stage3(sheet: Sheet) -> None:
    if not sheet.on("deepspeed_config.zero3_save_16bit_model"):
        what = "accelerate cannot gather the weights on saving: get_state_dict fails, and Trainer saves shards only"
        sheet.say(
            "acc-save-16bit", "deepspeed_config.zero3_save_16bit_model", what, "write zero3_save_16bit_model: true"
        )
    if sheet.get("deepspeed_config.zero3_init_flag") is False:
        what = "every process loads the whole model into host memory before ZeRO-3 splits it"
        sheet.say("acc-zero-init", "deepspeed_config.zero3_init_flag", what, "write zero3_init_flag: true")


# --- FSDP ---------------------------------------------------------------------------------------


def _fsdp(sheet: Sheet, key: str) -> tuple[str, object]:
    """Where a setting of FSDP stands, with `fsdp_` in front or without, and its value."""
    block = sheet.block("fsdp_config")
    name = key if key in block else f"fsdp_{key}"
    return f"fsdp_config.{name}", block.get(name)


def _check_fsdp(sheet: Sheet) -> None:
    version = 2 if str(_fsdp(sheet, "version")[1]) == "2" else 1
    if version == 1:
        _check_fsdp1(sheet)
    else:
        _check_fsdp2(sheet)
    sync, wanted = _fsdp(sheet, "sync_module_states")
    if wanted in (False, "false") and _fsdp(sheet, "cpu_ram_efficient_loading")[1] not in (False, "false"):
        what = "accelerate refuses it while fsdp_cpu_ram_efficient_loading is on, which is the default"
        sheet.say("acc-fsdp-sync", sync, what, "delete it, or write fsdp_cpu_ram_efficient_loading: false as well")
    wrap, policy = _fsdp(sheet, "auto_wrap_policy")
    if policy in (*_OFF, "NO_WRAP"):
        what = "without a policy the model is one unit: the whole of it is gathered on every GPU"
        sheet.say("acc-fsdp-unwrapped", wrap, what, "write fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP")
    elif policy not in ("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP"):
        what = f"accelerate refuses the policy {shown(policy)}"
        sheet.say("acc-fsdp-value", wrap, what, "write TRANSFORMER_BASED_WRAP, SIZE_BASED_WRAP or NO_WRAP")
    size, least = _fsdp(sheet, "min_num_params")
    if policy == "SIZE_BASED_WRAP" and isinstance(least, str) and not least.isdigit():
        what = f"YAML reads {least} as text, and accelerate fails to make a whole number of it"
        sheet.say("acc-fsdp-value", size, what, "write 100000000, without an exponent")


def _check_fsdp1(sheet: Sheet) -> None:
    place, value = _fsdp(sheet, "reshard_after_forward")
    if value is not None:
        what = "fsdp_version is 1 unless you say 2, and FSDP1 goes by fsdp_sharding_strategy alone"
        sheet.say("acc-fsdp1-key", place, what, "write fsdp_version: 2, or fsdp_sharding_strategy")
    place, value = _fsdp(sheet, "activation_checkpointing_offload")
    if value not in _OFF:
        what = "accelerate refuses it with FSDP1, which is the default"
        sheet.say("acc-fsdp-value", place, what, "write fsdp_version: 2")


def _check_fsdp2(sheet: Sheet) -> None:
    for key in _FSDP1_ONLY:
        place, value = _fsdp(sheet, key)
        if value not in (*_OFF, "NO_PREFETCH", "FULL_SHARD"):
            what = f"FSDP2 has no {key}: the setting is dropped"
            fix = "write fsdp_reshard_after_forward" if key == "sharding_strategy" else "delete it"
            sheet.say("acc-fsdp2-key", place, what, fix)
    place, value = _fsdp(sheet, "reshard_after_forward")
    if value is not None and str(value).lower() not in ("true", "false", "yes", "no", "1", "0", "on", "off"):
        what = f"FSDP2 takes true or false here and refuses {shown(value)}"
        sheet.say("acc-fsdp-value", place, what, "write true (as FULL_SHARD) or false (as SHARD_GRAD_OP)")
    place, value = _fsdp(sheet, "state_dict_type")
    if value == "LOCAL_STATE_DICT":
        what = "FSDP2 refuses LOCAL_STATE_DICT"
        sheet.say("acc-fsdp-value", place, what, "write SHARDED_STATE_DICT")
    place, value = _fsdp(sheet, "activation_checkpointing_offload")
    if value not in _OFF and _fsdp(sheet, "activation_checkpointing")[1] in _OFF:
        what = "accelerate refuses it without fsdp_activation_checkpointing"
        sheet.say("acc-fsdp-value", place, what, "write fsdp_activation_checkpointing: true")
