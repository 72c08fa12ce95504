#!/usr/bin/env bash
# Everything that wants a GPU, on any machine that has one:  tests/gpu/run.sh build|test|bench|sanitize [PART…]
# Needs Python 3.11+ with torch (CUDA), nanobind, cmake and ninja; installs nothing. What torpor needs beyond that is
# taken from the running Python; a part that lacks it says so and fails. PARTs pick some of a verb's parts by name.
# TORPOR_DEFAULT_MODEL names the small model for the walk-through. OUT names a folder for logs; what is to be kept lies in
# OUT/results by the names that it has in tests/bench/results. Failures are told at the end, and figures last of all.
set -euo pipefail
cd "$(dirname "$0")/../.."
OUT=${OUT:-build/gpu-out}
verb=${1:-}
picked=" ${*:2} "
failures=()
export TORPOR_RESULTS=$OUT/results PYTHONUNBUFFERED=1
export PYTHONPATH="$PWD/build/py:$PWD/tests${PYTHONPATH:+:$PYTHONPATH}"
mkdir -p "$TORPOR_RESULTS"

describe() {
  nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader
  python3 -c 'import os, platform, torch; print(platform.release(), os.cpu_count(), "cores, torch", torch.__version__)'
}

picks() { [[ $picked == "  " || $picked == *" $1 "* ]]; }

# part NAME SECONDS COMMAND…: its output into OUT/NAME.log, the end of that here. Whatever becomes of one, the next runs.
part() {
  local name=$1 limit_s=$2 start=$SECONDS status=0
  shift 2
  picks "$name" || return 0
  timeout -k 10 "$limit_s" bash -c 'set -euo pipefail; "$@"' "$name" "$@" >"$OUT/$name.log" 2>&1 || status=$?
  tail -n "$([[ $status == 0 ]] && echo 4 || echo 30)" "$OUT/$name.log" | cut -c -240
  echo "== $name: status $status after $((SECONDS - start)) s"
  [[ $status == 0 ]] || failures+=("$name: status $status$([[ $status != 124 ]] || echo ": not ready after $limit_s s"); see $OUT/$name.log")
}

build() {
  mkdir -p build/py/torpor
  for folder in service actors native; do ln -sfn "../../../$folder" "build/py/torpor/$folder"; done
  cmake -S . -B build/gpu -G Ninja -DCMAKE_BUILD_TYPE=Release -DTORPOR_TESTS=ON -DPython_EXECUTABLE="$(command -v python3)" >"$OUT/cmake.log"
  cmake --build build/gpu >"$OUT/build.log" || { tail -40 "$OUT/build.log"; return 1; }
  cp --remove-destination build/gpu/_core*.so native/
  echo "built: $(ls native/_core*.so) after $SECONDS s"
}

run_tests() {
  part ctest 240 ctest --test-dir build/gpu -j 4 --output-on-failure
  part pytest 240 python3 -m pytest -q -c tests/gpu/pytest.ini -p no:cacheprovider --durations=8 tests/gpu
  picks walkthrough || return 0
  if python3 -c 'import ray, fastapi, structlog' && [[ -f ${TORPOR_DEFAULT_MODEL:-} ]]; then
    part walkthrough 200 python3 -m torpor.service.walkthrough --device cuda
  else
    failures+=("walkthrough: NOT RUN: it wants ray, fastapi, structlog and TORPOR_DEFAULT_MODEL")
  fi
}

bench() {
  part p1 200 python3 tests/bench/p1_discard.py --json "$TORPOR_RESULTS"
  part p2 330 python3 tests/bench/p2_weights.py --json "$TORPOR_RESULTS"
  part p5 120 python3 tests/bench/p5_pages.py --json "$TORPOR_RESULTS"
  part p6 160 python3 tests/bench/p6_first_token.py --json "$TORPOR_RESULTS"
  part p11 160 python3 tests/bench/p11_decode.py --json "$TORPOR_RESULTS"
}

# TOOL COMMAND…: the program must succeed under the tool, and the tool must have said what it has found.
sanitized() {
  local tool=$1 status=0
  shift
  "$@" 2>&1 | tee "$OUT/$tool.txt" || status=$?
  python3 tests/gpu/sanitized.py "$tool" "$OUT/$tool.txt" || status=$?
  return $status
}

sanitize() {
  if ! compute-sanitizer --version >"$OUT/sanitizer.log" 2>&1; then
    failures+=("compute-sanitizer is not on this machine: nothing was checked")
    return
  fi
  for tool in memcheck racecheck initcheck; do
    part $tool 150 sanitized $tool compute-sanitizer --tool $tool --report-api-errors no --error-exitcode 9 build/gpu/tests/native/test_device_contract
  done
}

# The results that this run has written.
figures() {
  local written
  mapfile -t written < <(find "$TORPOR_RESULTS" -name '*.json' -newer "$OUT/machine.txt" | sort)
  [[ ${#written[@]} == 0 ]] || python3 tests/bench/record.py "${written[@]}" | cut -c -240
}

case $verb in
  build | test | bench | sanitize) ;;
  *) echo "usage: tests/gpu/run.sh build|test|bench|sanitize [PART…]" >&2; exit 2 ;;
esac
export OUT
export -f sanitized
describe | tee "$OUT/machine.txt"
build
# Tables that gain a row have their others already.
for table in tests/bench/results/[a-z]*.json; do
  [[ -e $TORPOR_RESULTS/${table##*/} ]] || cp --preserve=timestamps "$table" "$TORPOR_RESULTS/"
done
case $verb in
  test) run_tests ;;
  bench) bench ;;
  sanitize) sanitize ;;
esac
for failure in "${failures[@]}"; do echo "FAILED $failure"; done
figures
[[ ${#failures[@]} == 0 ]]
