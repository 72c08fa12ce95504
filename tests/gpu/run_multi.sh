#!/usr/bin/env bash
# Everything that wants several GPUs, one rank a GPU over NCCL, in less than eight minutes:
#   tests/gpu/run_multi.sh [--device cuda|host] [--ranks "2 4"] [--cycles 50] [--limit-s 470] [PART…]
# PARTs: ranks protocol p7 p3 (default: all). Ranks: 2, and 4 where there are as many GPUs. `--device host` rehearses it
# over gloo on host devices. Needs what tests/gpu/run.sh needs; protocol and p7 also ray, fastapi, httpx and structlog.
# OUT names a folder for logs; what is to be kept lies in OUT/results by the names that it has in tests/bench/results.
set -euo pipefail
cd "$(dirname "$0")/../.."
device=cuda ranks="" cycles=50 whole_s=470 slow=1
while [[ ${1:-} == --* ]]; do
  case $1 in
    --device) device=$2 ;;
    --ranks) ranks=$2 ;;
    --cycles) cycles=$2 ;;
    --limit-s) whole_s=$2 ;;
    *) sed -n 2,6p "$0" >&2; exit 2 ;;
  esac
  shift 2
done
picked=" $* "
OUT=${OUT:-build/gpu-multi-out}
failures=()
export OUT TORPOR_RESULTS=$OUT/results PYTHONUNBUFFERED=1 TORPOR_MULTI_DEVICE=$device
# Multicast over NVLink belongs to the host's fabric manager; whoever may use it says so by these variables.
export NCCL_NVLS_ENABLE=${NCCL_NVLS_ENABLE:-0} TORCH_SYMM_MEM_DISABLE_MULTICAST=${TORCH_SYMM_MEM_DISABLE_MULTICAST:-1}
export NVSHMEM_DISABLE_NVLS=${NVSHMEM_DISABLE_NVLS:-1}
export PYTHONPATH="$PWD/build/py:$PWD/tests${PYTHONPATH:+:$PYTHONPATH}"
mkdir -p "$TORPOR_RESULTS"
python=${PYTHON:-python3}

picks() { [[ $picked =~ ^\ +$ || $picked == *" $1 "* ]]; }

# part PART NAME SECONDS COMMAND…: its output into OUT/NAME.log, the end of that here. The next runs in any case, while
# there is time.
part() {
  local part=$1 name=$2 limit_s=$3 start=$SECONDS left_s=$((whole_s - SECONDS)) status=0
  shift 3
  picks "$part" || return 0
  if ((left_s < 20)); then
    failures+=("$name: NOT RUN: the $whole_s s were over")
    return 0
  fi
  limit_s=$((limit_s * slow < left_s ? limit_s * slow : left_s))
  timeout -k 10 "$limit_s" "$@" >"$OUT/$name.log" 2>&1 || status=$?
  tail -n "$([[ $status == 0 ]] && echo 4 || echo 40)" "$OUT/$name.log" | cut -c -240
  echo "== $name: status $status after $((SECONDS - start)) s"
  [[ $status == 0 ]] || failures+=("$name: status $status; see $OUT/$name.log")
}

pytest=("$python" -m pytest -q -c tests/gpu/pytest.ini -p no:cacheprovider --durations=5)

gpus=0
if [[ $device == cuda ]]; then
  gpus=$("$python" -c 'import torch; print(torch.cuda.device_count())')
  ((gpus >= 2)) || { echo "this machine shows $gpus GPU(s); two at least are wanted, or --device host" >&2; exit 2; }
  nvidia-smi --query-gpu=index,name,driver_version,memory.used --format=csv,noheader | tee "$OUT/machine.txt"
  nvidia-smi topo -m >>"$OUT/machine.txt" 2>&1 || true
  "$python" -c 'import torch; print("torch", torch.__version__, "NCCL", torch.cuda.nccl.version())' | tee -a "$OUT/machine.txt"
else
  date >"$OUT/machine.txt"
  slow=4 # ranks that share a few cores
fi
mkdir -p build/py/torpor
for folder in service actors native; do ln -sfn "../../../$folder" "build/py/torpor/$folder"; done
if [[ $device == cuda ]]; then
  cmake -S . -B build/gpu-multi -G Ninja -DCMAKE_BUILD_TYPE=Release -DPython_EXECUTABLE="$(command -v "$python")" >"$OUT/build.log"
  cmake --build build/gpu-multi >>"$OUT/build.log" || { tail -n 40 "$OUT/build.log"; exit 1; }
  cp --remove-destination build/gpu-multi/_core*.so native/
  echo "built after $SECONDS s"
fi
ranks=${ranks:-$( ((gpus >= 4)) && echo "2 4" || echo 2)}
for number in $ranks; do
  export TORPOR_MULTI_RANKS=$number TORPOR_MULTI_CYCLES=$cycles
  part ranks "ranks-$number" 230 "${pytest[@]}" tests/multi/test_ranks.py
  part protocol "protocol-$number" 150 "${pytest[@]}" tests/multi/test_protocol.py
  part p7 "p7-$number" 60 "$python" tests/bench/p7_protocol.py --device "$device" --ranks "$number" --json "$TORPOR_RESULTS"
  [[ $number != "${ranks%% *}" ]] || part p3 p3 100 "$python" tests/bench/p3_all_devices.py --device "$device" --json "$TORPOR_RESULTS"
  cycles=$((cycles < 10 ? cycles : cycles / 5)) # what follows is of the same kind
done
for failure in "${failures[@]}"; do echo "FAILED $failure"; done
mapfile -t written < <(find "$TORPOR_RESULTS" -name '*.json' -newer "$OUT/machine.txt" | sort)
[[ ${#written[@]} == 0 ]] || "$python" tests/bench/record.py "${written[@]}" | cut -c -240
[[ ${#failures[@]} == 0 ]]
