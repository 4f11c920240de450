#!/usr/bin/env bash
# Starts the training of PLAN.md: streamed on 1 × 4GB card.
# Arguments are passed on to the trainer.
set -euo pipefail

# The files name each other without a folder.
cd -- "$(dirname -- "${BASH_SOURCE[0]}")"

for file in worker.json; do
  [[ -f "$file" ]] || { echo "launch.sh: $file is missing: copy the whole folder" >&2; exit 2; }
done
command -v torchrun >/dev/null || { echo "launch.sh: torchrun is not on PATH: activate the environment that has it" >&2; exit 2; }

# Segments that can grow leave little unusable memory between them; the margin of the plan counts on
# it (a card given by its size is taken to be NVIDIA's; on DTK take this line out).
export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True
# Tokenizers' threads and forked data loaders lock each other out.
export TOKENIZERS_PARALLELISM=false

# The GPUs that may be seen; the ranks take the first ones.
visible=CUDA_VISIBLE_DEVICES
IFS=", " read -r -a gpus <<< "${!visible-0}"
(( ${#gpus[@]} >= 1 )) || { echo "launch.sh: $visible names ${#gpus[@]} of the 1 GPUs that the plan uses: name more, or unset it" >&2; exit 2; }

# torchrun passes a SIGTERM on and kills the ranks 30 s after it, and it knows no SIGUSR1: a checkpoint that
# takes longer is lost. `tightfit train --plan` starts the ranks itself and waits for them.
exec torchrun \
  --nnodes 1 --nproc_per_node 1 --master_addr 127.0.0.1 \
  --master_port "${MASTER_PORT:-29500}" \
  --module tightfit.train worker.json "$@"
