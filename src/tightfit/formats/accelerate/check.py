"""Rules for an accelerate config.

accelerate refuses an unknown key at the top level. The keys of its blocks it copies onto the launcher's flags without
a look, so a misspelt one is a flag that nobody reads. FSDP's settings then travel through the environment, where what
belongs to the other version of FSDP is dropped in silence.
"""

from __future__ import annotations

from tightfit.formats.deepspeed.check import check_deepspeed, deepspeed_beside
from tightfit.formats.rules import rules
from tightfit.formats.sheet import DELETE, KEEP_ONE, Sheet, propose
from tightfit.inputs.spelling import find_slip, nearest, shown
from tightfit.messages import Choice, Message

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
        what = Message("accelerate.file-without-zero", file=file)
        sheet.say("pair-no-zero", DEEPSPEED_AT, what, Message("accelerate.add-zero", file=file))
    check_deepspeed(deepspeed)
    return deepspeed


def _check_alone(sheet: Sheet) -> None:
    for place in sheet.document.doubles:
        sheet.note("key-twice", place, "accelerate.last-counts", KEEP_ONE)
    if sheet.get("compute_environment") not in (None, "LOCAL_MACHINE"):
        return
    for key in sheet.document.values:
        if key not in KEYS:
            close = find_slip(key, KEYS)
            sheet.note("acc-unknown", key, "accelerate.unknown-key", propose(close), key=key)
    for block, known in BLOCKS.items():
        prefix = block.removesuffix("config")
        takes = {*known, *(key.removeprefix(prefix) for key in known)} if block != "deepspeed_config" else set(known)
        for key in sheet.block(block):
            if key not in takes:
                what = Message("accelerate.nobody-reads", key=key, block=block)
                sheet.say("acc-typo", f"{block}.{key}", what, propose(find_slip(key, known)))
    kind = _check_type(sheet)
    precision = sheet.get("mixed_precision")
    if precision is False:
        sheet.say(
            "acc-bare-no", "mixed_precision", _bare_no("mixed_precision"), Message("lint.write-quoted", what="'no'")
        )
    elif precision is not None and str(precision).lower() not in ("no", "fp16", "bf16", "fp8"):
        what = Message("accelerate.refuses-precision", precision=shown(precision))
        sheet.say(
            "acc-mixed-precision",
            "mixed_precision",
            what,
            propose(Choice(("bf16", "fp16", "fp8", "'no'"))),
        )
    for place in ("dynamo_config.dynamo_backend", "dynamo_config.backend"):
        if sheet.get(place) is False:
            sheet.say("acc-bare-no", place, _bare_no("dynamo_backend"), Message("lint.write-quoted", what="'NO'"))
    machines = int(sheet.number("num_machines") or 1)
    processes = sheet.number("num_processes")
    if processes is None and kind not in ("NO", None):
        sheet.note("acc-no-processes", "num_processes", "accelerate.no-processes", "accelerate.write-all-gpus")
    if processes is not None and machines > 1 and processes % machines:
        sheet.note(
            "acc-processes",
            "num_processes",
            "accelerate.processes-never-come",
            Message("accelerate.write-multiple", machines=machines),
            machines=machines,
            each=int(processes // machines),
            processes=processes,
        )
    if sheet.world is not None and processes is not None and processes != sheet.world:
        what = Message("accelerate.processes-differ", processes=processes, world=sheet.world)
        sheet.say("acc-processes", "num_processes", what, propose(sheet.world))
    if machines > 1:
        rank = sheet.number("machine_rank") or 0
        if rank >= machines:
            what = Message("accelerate.rank-too-high", last=machines - 1)
            sheet.say("acc-machines", "machine_rank", what, Message("accelerate.write-rank", last=machines - 1))
        launcher = sheet.get("deepspeed_config.deepspeed_multinode_launcher") or "pdsh"
        if kind == "DEEPSPEED" and launcher != "standard":
            if not sheet.get("deepspeed_config.deepspeed_hostfile"):
                what = Message("accelerate.no-hostfile")
                sheet.say(
                    "acc-hostfile", "deepspeed_config.deepspeed_hostfile", what, Message("accelerate.add-hostfile")
                )
        elif not sheet.get("main_process_ip"):
            sheet.note("acc-machines", "main_process_ip", "accelerate.no-address", "accelerate.write-address")
    ids = sheet.get("gpu_ids")
    if ids is not None and not isinstance(ids, str):
        what = Message("accelerate.takes-text", ids=shown(ids))
        words = ",".join(map(str, ids)) if isinstance(ids, list) else str(ids)
        sheet.say("acc-gpu-ids", "gpu_ids", what, Message("lint.write-quoted", what=f"'{words}'"))
    elif ids not in (None, "all") and processes is not None:
        count = len([word for word in ids.split(",") if word.strip()])
        here = int(processes // machines)
        if here > count:
            sheet.note(
                "acc-gpu-ids",
                "gpu_ids",
                "accelerate.too-few-ids",
                Message("accelerate.name-more-gpus", here=here, count=count * machines),
                here=here,
                count=count,
            )
        elif here < count:
            what = Message("accelerate.idle-gpus", here=here, count=count)
            sheet.say("acc-idle-gpus", "gpu_ids", what, propose(f"num_processes: {count * machines}"))
    if kind == "DEEPSPEED":
        _check_deepspeed(sheet)
    if kind == "FSDP":
        version = 2 if str(_fsdp(sheet, "version")[1]) == "2" else 1
        if version == 1:
            place, value = _fsdp(sheet, "reshard_after_forward")
            if value is not None:
                sheet.note("acc-fsdp1-key", place, "accelerate.fsdp1-default", "accelerate.version2-or-strategy")
            place, value = _fsdp(sheet, "activation_checkpointing_offload")
            if value not in _OFF:
                sheet.note("acc-fsdp-value", place, "accelerate.refused-with-fsdp1", propose("fsdp_version: 2"))
        else:
            for key in _FSDP1_ONLY:
                place, value = _fsdp(sheet, key)
                if value not in (*_OFF, "NO_PREFETCH", "FULL_SHARD"):
                    what = Message("accelerate.fsdp2-has-not", key=key)
                    fix = propose("fsdp_reshard_after_forward") if key == "sharding_strategy" else DELETE
                    sheet.say("acc-fsdp2-key", place, what, fix)
            place, value = _fsdp(sheet, "reshard_after_forward")
            if value is not None and str(value).lower() not in ("true", "false", "yes", "no", "1", "0", "on", "off"):
                what = Message("accelerate.fsdp2-takes-switch", value=shown(value))
                sheet.say("acc-fsdp-value", place, what, Message("accelerate.write-reshard"))
            place, value = _fsdp(sheet, "state_dict_type")
            if value == "LOCAL_STATE_DICT":
                sheet.note("acc-fsdp-value", place, "accelerate.refuses-local-dict", propose("SHARDED_STATE_DICT"))
            place, value = _fsdp(sheet, "activation_checkpointing_offload")
            if value not in _OFF and _fsdp(sheet, "activation_checkpointing")[1] in _OFF:
                what = Message("accelerate.needs-checkpointing")
                sheet.say("acc-fsdp-value", place, what, propose("fsdp_activation_checkpointing: true"))
        sync, wanted = _fsdp(sheet, "sync_module_states")
        if wanted in (False, "false") and _fsdp(sheet, "cpu_ram_efficient_loading")[1] not in (False, "false"):
            sheet.note("acc-fsdp-sync", sync, "accelerate.sync-refused", "accelerate.sync-fix")
        wrap, policy = _fsdp(sheet, "auto_wrap_policy")
        if policy in (*_OFF, "NO_WRAP"):
            sheet.note(
                "acc-fsdp-unwrapped",
                wrap,
                "accelerate.unwrapped",
                propose("fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP"),
            )
        elif policy not in ("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP"):
            sheet.note(
                "acc-fsdp-value",
                wrap,
                "accelerate.refuses-policy",
                propose(Choice(("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP"))),
                policy=shown(policy),
            )
        size, least = _fsdp(sheet, "min_num_params")
        if policy == "SIZE_BASED_WRAP" and isinstance(least, str) and not least.isdigit():
            sheet.note(
                "acc-fsdp-value", size, "accelerate.number-as-text", "accelerate.write-plain-number", least=least
            )


def _check_type(sheet: Sheet) -> str | None:
    kind = sheet.get("distributed_type")
    if kind is False:  # a bare NO
        kind = "NO"
        sheet.say(
            "acc-bare-no", "distributed_type", _bare_no("distributed_type"), Message("lint.write-quoted", what="'NO'")
        )
    if kind not in TYPES:
        close = nearest(kind, TYPES) if isinstance(kind, str) else None
        what = Message("accelerate.no-such-type", kind=shown(kind)) if kind else Message("accelerate.needs-type")
        sheet.say(
            "acc-distributed-type",
            "distributed_type",
            what,
            propose(close or Choice(("DEEPSPEED", "FSDP", "MULTI_GPU"))),
        )
        return None
    for block, owner in (("deepspeed_config", "DEEPSPEED"), ("fsdp_config", "FSDP")):
        if sheet.block(block) and kind != owner:
            what = Message("accelerate.block-unused", kind=kind, block=block)
            sheet.say("acc-block-unused", block, what, Message("accelerate.type-or-delete", owner=owner, block=block))
    return str(kind)


def _bare_no(key: str) -> Message:
    return Message("accelerate.bare-no", key=key)


# --- DeepSpeed ----------------------------------------------------------------------------------


def _check_deepspeed(sheet: Sheet) -> None:
    block = sheet.block("deepspeed_config")
    if block.get("deepspeed_config_file"):
        clashing = [f"deepspeed_config.{key}" for key in _OF_THE_FILE if key in block]
        if sheet.get("mixed_precision") is not None:
            clashing.append("mixed_precision")
        for place in clashing:
            what = Message("accelerate.refuses-beside-file", key=place.rpartition(".")[2])
            sheet.say("acc-config-file", place, what, Message("accelerate.set-in-file"))
        return
    stage = sheet.number("deepspeed_config.zero_stage")
    stage = 2 if stage is None else int(stage)
    for kind, needs in (("param", 3), ("optimizer", 1)):
        place = f"deepspeed_config.offload_{kind}_device"
        device = sheet.get(place)
        if device in (*_OFF, "none"):
            continue
        if stage < needs or (device == "nvme" and stage < 3):
            what = Message("accelerate.offload-ignored", stage=stage, kind=kind, device=device)
            sheet.say("acc-offload-stage", place, what, Message("lint.write-or-delete", what="zero_stage: 3"))
        elif device == "nvme":
            what = Message("accelerate.path-not-passed")
            fix = Message("accelerate.use-config-file")
            sheet.say("acc-nvme-path", f"deepspeed_config.offload_{kind}_nvme_path", what, fix)
    if stage == 3:
        if not sheet.on("deepspeed_config.zero3_save_16bit_model"):
            sheet.note(
                "acc-save-16bit",
                "deepspeed_config.zero3_save_16bit_model",
                "accelerate.cannot-gather",
                propose("zero3_save_16bit_model: true"),
            )
        if sheet.get("deepspeed_config.zero3_init_flag") is False:
            sheet.note(
                "acc-zero-init",
                "deepspeed_config.zero3_init_flag",
                "accelerate.loads-whole",
                propose("zero3_init_flag: true"),
            )


# --- FSDP ---------------------------------------------------------------------------------------


def _fsdp(sheet: Sheet, key: str) -> tuple[str, object]:
    """Where a setting of FSDP stands, with `fsdp_` in front or without, and its value."""
    block = sheet.block("fsdp_config")
    name = key if key in block else f"fsdp_{key}"
    return f"fsdp_config.{name}", block.get(name)


KEYS = frozenset(
    """compute_environment distributed_type mixed_precision use_cpu debug num_processes machine_rank num_machines
    gpu_ids main_process_ip main_process_port rdzv_backend same_network main_training_function enable_cpu_affinity
    fp8_config deepspeed_config fsdp_config parallelism_config megatron_lm_config mpirun_config downcast_bf16
    tpu_name tpu_zone tpu_use_cluster tpu_use_sudo command_file commands tpu_vm tpu_env dynamo_config fp16
    dynamo_backend""".split()
)
"""What ClusterConfig takes, and two old keys that it converts."""

TYPES = tuple(
    """NO MULTI_CPU MULTI_GPU MULTI_NPU MULTI_MLU MULTI_SDAA MULTI_MUSA MULTI_XPU DEEPSPEED FSDP XLA MEGATRON_LM
    MULTI_HPU MULTI_NEURON""".split()
)

BLOCKS = {
    "deepspeed_config": """deepspeed_config_file zero_stage offload_optimizer_device offload_param_device
        offload_optimizer_nvme_path offload_param_nvme_path gradient_accumulation_steps gradient_clipping
        zero3_init_flag zero3_save_16bit_model deepspeed_hostfile deepspeed_exclusion_filter deepspeed_inclusion_filter
        deepspeed_multinode_launcher deepspeed_moe_layer_cls_names""".split(),
    "fsdp_config": """fsdp_version fsdp_offload_params fsdp_min_num_params fsdp_sharding_strategy
        fsdp_reshard_after_forward fsdp_auto_wrap_policy fsdp_transformer_layer_cls_to_wrap fsdp_backward_prefetch
        fsdp_state_dict_type fsdp_forward_prefetch fsdp_use_orig_params fsdp_cpu_ram_efficient_loading
        fsdp_sync_module_states fsdp_activation_checkpointing fsdp_activation_checkpointing_offload
        fsdp_ignored_modules""".split(),
    "dynamo_config": """dynamo_backend dynamo_mode dynamo_use_fullgraph dynamo_use_dynamic
        dynamo_use_regional_compilation""".split(),
}
"""The keys of the blocks that are checked."""

DEEPSPEED_AT = "deepspeed_config.deepspeed_config_file"
"""Where it names a DeepSpeed file."""


RULES = rules(
    ("acc-unknown", "error", "an unknown key at the top level: refused"),
    ("acc-typo", "error", "a misspelt key in a block: ignored without a word"),
    ("acc-distributed-type", "error", "no `distributed_type`, or one that does not exist"),
    ("acc-block-unused", "error", "a DeepSpeed or FSDP block that `distributed_type` leaves unused"),
    ("acc-bare-no", "error", "a bare `no`, which YAML reads as false and accelerate dies on"),
    ("acc-mixed-precision", "error", "a `mixed_precision` that does not exist"),
    ("acc-gpu-ids", "error", "`gpu_ids` that is no text, or does not match the number of processes"),
    ("acc-idle-gpus", "warning", "more `gpu_ids` than processes"),
    ("acc-processes", "error", "a `num_processes` that the machines do not divide, or not that of the job"),
    ("acc-no-processes", "note", "no `num_processes`: the command line must give it"),
    ("acc-machines", "error", "several machines without an address, or a rank beyond their number"),
    ("acc-hostfile", "error", "DeepSpeed on several machines without a hostfile: runs on one, silently"),
    ("acc-config-file", "error", "`deepspeed_config_file` beside keys or a precision that it must hold itself"),
    ("acc-nvme-path", "error", "an NVMe path, which accelerate does not pass on"),
    ("acc-offload-stage", "error", "an offload that the stage ignores"),
    ("acc-save-16bit", "warning", "ZeRO-3 without `zero3_save_16bit_model`: saving the model fails"),
    ("acc-zero-init", "warning", "ZeRO-3 with `zero3_init_flag: false`: every process loads the whole model"),
    ("acc-fsdp1-key", "warning", "a key of FSDP2 where FSDP1 runs: ignored"),
    ("acc-fsdp2-key", "warning", "a key of FSDP1 where FSDP2 runs: ignored"),
    ("acc-fsdp-value", "error", "a value that FSDP refuses"),
    ("acc-fsdp-sync", "error", "`fsdp_sync_module_states: false` with efficient loading, which is the default"),
    ("acc-fsdp-unwrapped", "warning", "FSDP without a wrap policy: the whole model is gathered at once"),
    ("pair-no-zero", "error", "a DeepSpeed file without `zero_optimization`, which accelerate refuses"),
)
