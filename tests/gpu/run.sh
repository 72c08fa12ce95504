#!/usr/bin/env bash
# Everything that wants a GPU, on any machine that has one:
#
#   tests/gpu/run.sh VERB [PART…] [VERB [PART…]]…      VERB: build, test, bench or sanitize
#
# The verbs run in this order; PARTs pick some of a verb's parts by name. Needs Python 3.11+ with torch (CUDA),
# nanobind, cmake and ninja; installs nothing. What torpor needs beyond that is taken from the running Python; a part
# that lacks it says so and fails. TORPOR_DEFAULT_MODEL names the small model for the walk-through.
#
# TORPOR_LIMIT_S is how long all of it may take. A part gets what is left of it at most; one that cannot begin is told
# as not run. OUT names a folder for logs; what is to be kept lies in OUT/results by the names that it has in
# tests/bench/results, and all of OUT is in OUT/all.tar.gz after each part. At the end, whatever ended it, there is a
# line on each part, and the figures come last of all.
set -euo pipefail
cd "$(dirname "$0")/../.."
OUT=${OUT:-build/gpu-out}
limit_s=${TORPOR_LIMIT_S:-86400}
reserve_s=20 # for the end: a part that does not stop is killed after 10 s, then comes the packing
least_s=10   # a part with less time than this need not begin
parts=()
declare -A outcome
child=
packed=$(mktemp -u)
export OUT TORPOR_RESULTS=$OUT/results PYTHONUNBUFFERED=1
export PYTHONPATH="$PWD/build/py:$PWD/tests${PYTHONPATH:+:$PYTHONPATH}"
mkdir -p "$TORPOR_RESULTS"

describe() {
  nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader
  python3 -c 'import os, platform, torch; print(platform.release(), os.cpu_count(), "cores, torch", torch.__version__)'
}

# --- what there is to run, by verb: NAME:SECONDS, and NAME is a function ---
parts_of() {
  local offers=()
  case $1 in
    build) ;;
    test) offers=(native-gpu:200 pytest:400 walkthrough:200 native-host:240) ;;
    bench) offers=(p1:200 p2:330 p5:120 p6:160 p11:160 p11-static:220) ;;
    sanitize) offers=(memcheck:150 racecheck:150 initcheck:150) ;;
    *) return 1 ;;
  esac
  echo "${offers[@]}"
}

build() {
  mkdir -p build/py/torpor
  for folder in service actors native; do ln -sfn "../../../$folder" "build/py/torpor/$folder"; done
  cmake -S . -B build/gpu -G Ninja -DCMAKE_BUILD_TYPE=Release -DTORPOR_TESTS=ON -DPython_EXECUTABLE="$(command -v python3)"
  cmake --build build/gpu
  cp --remove-destination build/gpu/_core*.so native/
  ls native/_core*.so
}

native() { ctest --test-dir build/gpu --output-on-failure "$@"; }
native-gpu() { native -R '_cuda$|^test_device_contract$'; }
native-host() { native -E '_cuda$|^test_device_contract$' -j 4; }
# What is `long` goes over host devices: it needs no GPU. TORPOR_PYTEST: words that pick from the rest.
pytest() {
  local words=(-v -c tests/gpu/pytest.ini -p gpu.at_once -p no:cacheprovider -m "not long" --durations=8)
  python3 -m pytest "${words[@]}" ${TORPOR_PYTEST:+-k "$TORPOR_PYTEST"} tests/gpu
}
walkthrough() {
  if ! python3 -c 'import ray, fastapi, structlog' || [[ ! -f ${TORPOR_DEFAULT_MODEL:-} ]]; then
    echo "it wants ray, fastapi, structlog and TORPOR_DEFAULT_MODEL"
    return 1
  fi
  python3 -m torpor.service.walkthrough --device cuda
}

p1() { python3 tests/bench/p1_discard.py --json "$TORPOR_RESULTS"; }
p2() { python3 tests/bench/p2_weights.py --json "$TORPOR_RESULTS"; }
p5() { python3 tests/bench/p5_pages.py --json "$TORPOR_RESULTS"; }
# These keep what they have when their time is over.
p6() { python3 tests/bench/p6_first_token.py --json "$TORPOR_RESULTS" --limit-s "$((TORPOR_PART_S - 15))"; }
p11() { python3 tests/bench/p11_decode.py --json "$TORPOR_RESULTS" --limit-s "$((TORPOR_PART_S - 15))" --ways generate; }
p11-static() { python3 tests/bench/p11_decode.py --json "$TORPOR_RESULTS" --limit-s "$((TORPOR_PART_S - 15))" --ways static; }

# The program must succeed under the tool, and the tool must have said what it has found.
sanitized() {
  local tool=$1 status=0
  if ! compute-sanitizer --version >/dev/null; then
    echo "compute-sanitizer is not on this machine: nothing was checked"
    return 1
  fi
  compute-sanitizer --tool "$tool" --report-api-errors no --error-exitcode 9 build/gpu/tests/native/test_device_contract \
    2>&1 | tee "$OUT/$tool.txt" || status=$?
  python3 tests/gpu/sanitized.py "$tool" "$OUT/$tool.txt" || status=$?
  return $status
}
memcheck() { sanitized memcheck; }
racecheck() { sanitized racecheck; }
initcheck() { sanitized initcheck; }

# A part runs in a process of its own, which can be stopped.
if [[ ${1:-} == part ]]; then
  "$2"
  exit
fi

# --- running it ---
# part NAME SECONDS: its output into OUT/NAME.log, the end of that here. Whatever becomes of one, the next runs.
part() {
  local name=$1 most_s=$2 start=$SECONDS status=0
  local left_s=$((limit_s - reserve_s - SECONDS))
  ((left_s >= least_s)) || return 0
  ((most_s <= left_s)) || most_s=$left_s
  outcome[$name]="failed: cut off; see $OUT/$name.log"
  # In the background, so that a signal is heard while it runs.
  TORPOR_PART_S=$most_s timeout -k 10 "$most_s" tests/gpu/run.sh part "$name" >"$OUT/$name.log" 2>&1 &
  child=$!
  wait "$child" || status=$?
  child=
  tail -n "$([[ $status == 0 ]] && echo 4 || echo 30)" "$OUT/$name.log" | cut -c -240
  case $status in
    0) outcome[$name]="passed after $((SECONDS - start)) s" ;;
    124 | 137) outcome[$name]="failed: not ready after $most_s s; see $OUT/$name.log" ;;
    *) outcome[$name]="failed: status $status after $((SECONDS - start)) s; see $OUT/$name.log" ;;
  esac
  echo "== $name: ${outcome[$name]}"
  pack
}

pack() {
  tar --exclude=./all.tar.gz -C "$OUT" -czf "$packed" . && mv "$packed" "$OUT/all.tar.gz"
}

# The results that this run has written.
figures() {
  local written
  mapfile -t written < <(find "$TORPOR_RESULTS" -name '*.json' -newer "$OUT/machine.txt" | sort)
  [[ ${#written[@]} == 0 ]] || python3 tests/bench/record.py "${written[@]}" | cut -c -240
}

finish() {
  local status=$? name
  [[ -z $child ]] || kill "$child" || true
  for one in "${parts[@]}"; do
    name=${one%:*}
    echo "${name}: ${outcome[$name]:=not run for lack of time}"
    [[ ${outcome[$name]} == passed* ]] || status=1
  done | tee "$OUT/outcome.txt"
  ! grep -qv ': passed' "$OUT/outcome.txt" || status=1
  figures || status=1
  pack
  exit "$status"
}

# Words that are verbs begin a verb; the others pick from its parts.
verb='' picked=''
add_parts() {
  local one known=''
  [[ -n $verb ]] || return 0
  for one in $(parts_of "$verb"); do
    known+=" ${one%:*} "
    [[ -n $picked && $picked != *" ${one%:*} "* ]] || parts+=("$one")
  done
  for one in $picked; do
    [[ $known == *" $one "* ]] || { echo "$verb has no part $one: it has$known" >&2; exit 2; }
  done
}
for word in "$@"; do
  if parts_of "$word" >/dev/null; then
    add_parts
    verb=$word picked=''
  elif [[ -n $verb ]]; then
    picked+=" $word "
  else
    break
  fi
done
[[ -n $verb ]] || { echo "usage: tests/gpu/run.sh build|test|bench|sanitize [PART…] [VERB [PART…]]…" >&2; exit 2; }
add_parts
parts=(build:400 "${parts[@]}")

describe | tee "$OUT/machine.txt"
trap finish EXIT
trap 'exit 143' TERM INT
# Tables that gain a row have their others already.
for table in tests/bench/results/[a-z]*.json; do
  [[ -e $TORPOR_RESULTS/${table##*/} ]] || cp --preserve=timestamps "$table" "$TORPOR_RESULTS/"
done
for one in "${parts[@]}"; do
  part "${one%:*}" "${one#*:}"
  [[ ${outcome[build]-} == passed* ]] || exit 1
done
