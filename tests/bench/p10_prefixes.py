"""P10: prefix lookup, and insert with eviction, beside a Python dict of block hashes of the same size.

    cmake --build build/native --target p10_prefix_tree  # configured by `make test-native`, without sanitizers
    python tests/bench/p10_prefixes.py --program build/native/tests/bench/p10_prefix_tree --json FOLDER

The dict's keys are 64-bit hashes that are known already; the tree is asked with tokens, hashes them and compares them.
Both follow chains of 64 blocks in a random order; seconds are those of CPU time. `--blocks` takes other sizes; 10**7
blocks need about 4 GiB.
Goals (docs/performance.md): more lookups than the dict at every size, at 10**7 blocks at least a third of those at
10**4, and at least a quarter as many turnovers (one block inserted and one evicted) as lookups.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import time
from pathlib import Path

from record import Result

CHAIN_BLOCKS, MEASURED_CHAINS, REPEATS = 64, 2048, 7


def tree(result: Result, program: Path, blocks: int) -> None:
    lines = subprocess.run(
        [program, str(blocks), str(REPEATS)], stdout=subprocess.PIPE, text=True, check=True
    ).stdout
    for line in lines.splitlines():
        row = json.loads(line)
        case = f"{blocks:.0e} blocks"
        result.add("torpor", case, "lookups_per_s", "1/s", row["lookups_per_s"])
        result.add("torpor", case, "turnovers_per_s", "1/s", row["turnovers_per_s"])
        result.add("torpor", case, "block_bytes", "B", row["block_bytes"])


def python_dict(result: Result, blocks: int) -> None:
    choose = random.Random(1)
    chains = blocks // CHAIN_BLOCKS
    keys = [choose.getrandbits(63) for _ in range(chains * CHAIN_BLOCKS)]
    known = dict.fromkeys(keys, 0)
    case = f"{blocks:.0e} blocks"
    for _ in range(REPEATS):
        prompts = []
        for _ in range(MEASURED_CHAINS):
            at = choose.randrange(chains) * CHAIN_BLOCKS
            prompts.append([key + 0 for key in keys[at : at + CHAIN_BLOCKS]])
        found = 0
        start = time.thread_time()
        for prompt in prompts:
            for key in prompt:
                if key not in known:
                    break
                found += 1
        seconds = time.thread_time() - start
        assert found == MEASURED_CHAINS * CHAIN_BLOCKS
        result.add("dict", case, "lookups_per_s", "1/s", found / seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--program", type=Path, required=True, help="the built p10_prefix_tree")
    parser.add_argument("--json", type=Path, help="folder for the result")
    parser.add_argument("--blocks", type=int, nargs="+", default=[10**4, 10**5, 10**6, 10**7])
    options = parser.parse_args()
    result = Result("P10", notes="16 tokens a block, chains of 64; a CPU shared with other work")
    for blocks in options.blocks:
        tree(result, options.program, blocks)
        python_dict(result, blocks)
    print(result.table())
    if options.json:
        options.json.mkdir(parents=True, exist_ok=True)
        print("kept in", result.save(options.json, "host"))


if __name__ == "__main__":
    main()
