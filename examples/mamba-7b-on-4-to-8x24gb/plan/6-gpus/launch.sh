#!/usr/bin/env bash
# Starts the training of PLAN.md: ZeRO-3, optimizer + weights on CPU on 6 × RTX 4090.
# Arguments are passed on to the trainer.
# 7b_mamba is a shape without weights, so they are drawn from the seed: --model with a folder or a
# Hugging Face id starts from trained ones.
set -euo pipefail

# The files name each other without a folder.
cd -- "$(dirname -- "${BASH_SOURCE[0]}")"

for file in worker.json deepspeed.json; do
  [[ -f "$file" ]] || { echo "launch.sh: $file is missing: copy the whole folder" >&2; exit 2; }
done
command -v deepspeed >/dev/null || { echo "launch.sh: deepspeed is not on PATH: activate the environment that has it" >&2; exit 2; }

# Segments that can grow leave little unusable memory between them; the margin of the plan counts on
# it.
export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True
# Tokenizers' threads and forked data loaders lock each other out.
export TOKENIZERS_PARALLELISM=false
# The optimizer steps on the CPU, so the cores are shared out among the ranks: torchrun would give
# each one thread, DeepSpeed's launcher each all of them.
OMP_NUM_THREADS=$(( ($(env -u OMP_NUM_THREADS nproc) + 5) / 6 ))
export OMP_NUM_THREADS

# The GPUs that may be seen; the ranks take the first ones.
visible=CUDA_VISIBLE_DEVICES
IFS=", " read -r -a gpus <<< "${!visible-0,1,2,3,4,5}"
(( ${#gpus[@]} >= 6 )) || { echo "launch.sh: $visible names ${#gpus[@]} of the 6 GPUs that the plan uses: name more, or unset it" >&2; exit 2; }

# Beside --include DeepSpeed ignores what is visible, so it is handed on here.
slots=""
for gpu in "${gpus[@]:0:6}"; do
  [[ "$gpu" =~ ^[0-9]+$ && ",$slots," != *",$gpu,"* ]] ||
    { echo "launch.sh: DeepSpeed takes GPUs by different numbers, and $visible is ${!visible}: write numbers, or plan with --launcher torchrun" >&2; exit 2; }
  slots="${slots:+$slots,}$gpu"
done
# Asked to stop, this launcher ends its ranks at once; `tightfit train --plan` lets them save first.
exec deepspeed \
  --include "localhost:$slots" \
  --master_port "${MASTER_PORT:-29500}" --no_local_rank \
  --module tightfit.train worker.json "$@"
