#!/usr/bin/env bash
# Everything that wants a GPU, on any machine that has one:  tests/gpu/run.sh build|test|bench|sanitize
# Needs Python 3.11+ with torch (CUDA), transformers, nanobind, cmake and ninja; installs nothing. What torpor needs
# beyond that is taken from the running Python. TORPOR_DEFAULT_MODEL names the small model for the walk-through; OUT
# names a folder for logs and results.
set -euo pipefail
cd "$(dirname "$0")/../.."
OUT=${OUT:-build/gpu-out}
mkdir -p "$OUT"
export PYTHONPATH="$PWD/build/py${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1

describe() {
  nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader
  python3 -c 'import os, platform, torch; print(platform.release(), os.cpu_count(), "cores, torch", torch.__version__)'
}

build() {
  mkdir -p build/py/torpor
  for part in service actors native; do ln -sfn "../../../$part" "build/py/torpor/$part"; done
  cmake -S . -B build/gpu -G Ninja -DCMAKE_BUILD_TYPE=Release -DTORPOR_TESTS=ON -DPython_EXECUTABLE="$(command -v python3)" >"$OUT/cmake.log"
  cmake --build build/gpu >"$OUT/build.log" || { tail -40 "$OUT/build.log"; return 1; }
  cp build/gpu/_core*.so native/
  echo "built: $(ls native/_core*.so)"
}

# Each part runs whatever became of the one before; the status is that of all.
run_tests() {
  local status=0
  ctest --test-dir build/gpu --output-on-failure 2>&1 | tee "$OUT/ctest.log" | tail -25 || status=1
  TORPOR_RESULTS=$OUT python3 -m pytest -q -c tests/gpu/pytest.ini -p no:cacheprovider tests/gpu 2>&1 | tee "$OUT/pytest.log" | tail -25 || status=1
  walk || status=1
  return $status
}

# The walk-through on the real small model.
walk() {
  if ! python3 -c 'import ray, fastapi, structlog' || [[ ! -f ${TORPOR_DEFAULT_MODEL:-} ]]; then
    echo "walk-through NOT RUN: it wants ray, fastapi, structlog and TORPOR_DEFAULT_MODEL"
    return 1
  fi
  python3 -m torpor.service.walkthrough --device cuda 2>&1 | tee "$OUT/walkthrough.log" | tail -90
}

bench() {
  local status=0
  for script in p1_discard p2_weights p5_pages; do
    python3 "tests/bench/$script.py" --json "$OUT" 2>&1 | tee "$OUT/$script.log" || status=1
  done
  return $status
}

sanitize() {
  if ! compute-sanitizer --version >"$OUT/sanitizer.log" 2>&1; then
    echo "compute-sanitizer is not on this machine: nothing was checked"
    return 1
  fi
  local status=0
  for tool in memcheck racecheck initcheck; do
    echo "$tool:"
    compute-sanitizer --tool $tool --report-api-errors no --error-exitcode 9 build/gpu/tests/native/test_device_contract 2>&1 | tee -a "$OUT/sanitizer.log" | tail -6 || status=1
  done
  return $status
}

describe | tee "$OUT/machine.txt"
case ${1:-} in
  build) build ;;
  test) build && run_tests ;;
  bench) build && bench ;;
  sanitize) build && sanitize ;;
  *) echo "usage: tests/gpu/run.sh build|test|bench|sanitize" >&2; exit 2 ;;
esac
