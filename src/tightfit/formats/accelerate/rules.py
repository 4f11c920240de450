"""What lint looks for in an accelerate config."""

from __future__ import annotations

from tightfit.formats.rules import rules

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
