"""Rules for an accelerate config.

accelerate refuses an unknown key at the top level. The keys of its blocks it copies onto the launcher's flags without
a look, so a misspelt one is a flag that nobody reads. FSDP's settings then travel through the environment, where what
belongs to the other version of FSDP is dropped in silence.
"""

from __future__ import annotations

from pathlib import Path

from tightfit.formats.deepspeed.check import check_deepspeed, deepspeed_beside
from tightfit.formats.rules import DELETE, KEEP_ONE, Sheet, propose, rules
from tightfit.inputs.spelling import find_slip, nearest, read_tables, shown
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
        _say_bare_no(sheet, "mixed_precision", "'no'")
    elif precision is not None and str(precision).lower() not in ("no", "fp16", "bf16", "fp8"):
        what = Message("accelerate.refuses-precision", precision=shown(precision))
        fix = propose(Choice(("bf16", "fp16", "fp8", "'no'")))
        sheet.say("acc-mixed-precision", "mixed_precision", what, fix)
    for place in ("dynamo_config.dynamo_backend", "dynamo_config.backend"):
        if sheet.get(place) is False:
            _say_bare_no(sheet, place, "'NO'", key="dynamo_backend")
    machines = int(sheet.number("num_machines") or 1)
    processes = sheet.number("num_processes")
    if processes is None and kind not in ("NO", None):
        sheet.note("acc-no-processes", "num_processes", "accelerate.no-processes", "accelerate.write-all-gpus")
    if processes is not None and machines > 1 and processes % machines:
        each = int(processes // machines)
        what = Message("accelerate.processes-never-come", machines=machines, each=each, processes=processes)
        sheet.say("acc-processes", "num_processes", what, Message("accelerate.write-multiple", machines=machines))
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
                place = "deepspeed_config.deepspeed_hostfile"
                sheet.note("acc-hostfile", place, "accelerate.no-hostfile", "accelerate.add-hostfile")
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
            fix = Message("accelerate.name-more-gpus", here=here, count=count * machines)
            sheet.note("acc-gpu-ids", "gpu_ids", "accelerate.too-few-ids", fix, here=here, count=count)
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
            fix = propose("fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP")
            sheet.note("acc-fsdp-unwrapped", wrap, "accelerate.unwrapped", fix)
        elif policy not in ("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP"):
            fix = propose(Choice(("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP")))
            sheet.note("acc-fsdp-value", wrap, "accelerate.refuses-policy", fix, policy=shown(policy))
        size, least = _fsdp(sheet, "min_num_params")
        if policy == "SIZE_BASED_WRAP" and isinstance(least, str) and not least.isdigit():
            fix = Message("accelerate.write-plain-number")
            sheet.note("acc-fsdp-value", size, "accelerate.number-as-text", fix, least=least)


def _check_type(sheet: Sheet) -> str | None:
    kind = sheet.get("distributed_type")
    if kind is False:  # a bare NO
        kind = "NO"
        _say_bare_no(sheet, "distributed_type", "'NO'")
    if kind not in TYPES:
        close = nearest(kind, TYPES) if isinstance(kind, str) else None
        what = Message("accelerate.no-such-type", kind=shown(kind)) if kind else Message("accelerate.needs-type")
        fix = propose(close or Choice(("DEEPSPEED", "FSDP", "MULTI_GPU")))
        sheet.say("acc-distributed-type", "distributed_type", what, fix)
        return None
    for block, owner in (("deepspeed_config", "DEEPSPEED"), ("fsdp_config", "FSDP")):
        if sheet.block(block) and kind != owner:
            what = Message("accelerate.block-unused", kind=kind, block=block)
            sheet.say("acc-block-unused", block, what, Message("accelerate.type-or-delete", owner=owner, block=block))
    return str(kind)


def _say_bare_no(sheet: Sheet, place: str, right: str, key: str | None = None) -> None:
    fix = Message("lint.write-quoted", what=right)
    sheet.note("acc-bare-no", place, "accelerate.bare-no", fix, key=key or place)


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
            place, fix = "deepspeed_config.zero3_save_16bit_model", propose("zero3_save_16bit_model: true")
            sheet.note("acc-save-16bit", place, "accelerate.cannot-gather", fix)
        if sheet.get("deepspeed_config.zero3_init_flag") is False:
            place, fix = "deepspeed_config.zero3_init_flag", propose("zero3_init_flag: true")
            sheet.note("acc-zero-init", place, "accelerate.loads-whole", fix)


# --- FSDP ---------------------------------------------------------------------------------------


def _fsdp(sheet: Sheet, key: str) -> tuple[str, object]:
    """Where a setting of FSDP stands, with `fsdp_` in front or without, and its value."""
    block = sheet.block("fsdp_config")
    name = key if key in block else f"fsdp_{key}"
    return f"fsdp_config.{name}", block.get(name)


_TABLES = read_tables(Path(__file__).with_name("keys.txt"))
KEYS, TYPES = frozenset(_TABLES[""]), tuple(_TABLES["distributed_type"])
BLOCKS = {block: list(_TABLES[block]) for block in ("deepspeed_config", "fsdp_config", "dynamo_config")}
LAYER_CLASSES = _TABLES["layers"]
DEEPSPEED_AT = "deepspeed_config.deepspeed_config_file"  # where it names a DeepSpeed file


RULES = rules(
    """acc-unknown! acc-typo! acc-distributed-type! acc-block-unused! acc-bare-no! acc-mixed-precision! acc-gpu-ids!
    acc-idle-gpus? acc-processes! acc-no-processes. acc-machines! acc-hostfile! acc-config-file! acc-nvme-path!
    acc-offload-stage! acc-save-16bit? acc-zero-init? acc-fsdp1-key? acc-fsdp2-key? acc-fsdp-value! acc-fsdp-sync!
    acc-fsdp-unwrapped? pair-no-zero!"""
)
