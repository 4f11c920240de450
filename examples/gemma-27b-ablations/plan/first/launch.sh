#!/usr/bin/env bash
# Starts the training of PLAN.md: streamed on 4 × A100 80GB SXM.
# Arguments are passed on to the trainer.
set -euo pipefail

# The files name each other without a folder.
cd -- "$(dirname -- "${BASH_SOURCE[0]}")"

for file in worker.json; do
  [[ -f "$file" ]] || { echo "launch.sh: $file is missing: copy the whole folder" >&2; exit 2; }
done
command -v torchrun >/dev/null || { echo "launch.sh: torchrun is not on PATH: activate the environment that has it" >&2; exit 2; }

# Segments that can grow leave little unusable memory between them; the margin of the plan counts on
# it.
export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True
# The numbers are those of nvidia-smi; CUDA by itself counts the fastest card first.
export CUDA_DEVICE_ORDER=PCI_BUS_ID
# The GPUs that were asked for; no second variable may say more.
export CUDA_VISIBLE_DEVICES=0,1,2,3
# Tokenizers' threads and forked data loaders lock each other out.
export TOKENIZERS_PARALLELISM=false
# The optimizer steps on the CPU, so the cores are shared out among the ranks: torchrun would give
# each one thread, DeepSpeed's launcher each all of them; 8 GPUs are in the machine, and a run on
# the others needs its share.
OMP_NUM_THREADS=$(( ($(env -u OMP_NUM_THREADS nproc) + 7) / 8 ))
export OMP_NUM_THREADS

# torchrun passes a SIGTERM on and kills the ranks 30 s after it, and it knows no SIGUSR1: a checkpoint that
# takes longer is lost. `tightfit train --plan` starts the ranks itself and waits for them.
exec torchrun \
  --nnodes 1 --nproc_per_node 4 --master_addr 127.0.0.1 \
  --master_port "${MASTER_PORT:-29500}" \
  --module tightfit.train worker.json "$@"
