#!/usr/bin/env bash
# Starts the training of PLAN.md: ZeRO-3 on 8 × K100.
# Arguments are passed on to the trainer.
set -euo pipefail

# The files name each other without a folder.
cd -- "$(dirname -- "${BASH_SOURCE[0]}")"

for file in deepspeed.json llamafactory.yaml dataset_info.json; do
  [[ -f "$file" ]] || { echo "launch.sh: $file is missing: copy the whole folder" >&2; exit 2; }
done
data=alpaca.json
[[ -e "$data" ]] || { echo "launch.sh: no data at $data, counted from $PWD: put it there" >&2; exit 2; }
command -v llamafactory-cli >/dev/null || { echo "launch.sh: llamafactory-cli is not on PATH: activate the environment that has it" >&2; exit 2; }

# The toolkit's libraries.
if [[ -f "${DTK_ROOT:-/opt/dtk}/env.sh" ]]; then
  set +u
  # shellcheck disable=SC1091
  source "${DTK_ROOT:-/opt/dtk}/env.sh"
  set -u
fi

# Tokenizers' threads and forked data loaders lock each other out.
export TOKENIZERS_PARALLELISM=false
# LLaMA-Factory refuses DeepSpeed without torchrun.
export FORCE_TORCHRUN=1
# LLaMA-Factory would start a rank on every GPU that it sees.
export NPROC_PER_NODE=8
# The number of machines, for its torchrun.
export NNODES=1
# Where the ranks meet; LLaMA-Factory would take any free port.
export MASTER_PORT="${MASTER_PORT:-29500}"

# The GPUs that may be seen; the ranks take the first ones.
visible=CUDA_VISIBLE_DEVICES
if [[ -v HIP_VISIBLE_DEVICES ]]; then visible=HIP_VISIBLE_DEVICES; fi
IFS=", " read -r -a gpus <<< "${!visible-0,1,2,3,4,5,6,7}"
(( ${#gpus[@]} >= 8 )) || { echo "launch.sh: $visible names ${#gpus[@]} of the 8 GPUs that the plan uses: name more, or unset it" >&2; exit 2; }

exec llamafactory-cli train llamafactory.yaml "$@"
