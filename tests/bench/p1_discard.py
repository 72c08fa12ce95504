"""P1: discard a large region, sleep and wake, beside the driver's own calls and a rival in the same minutes.

    python tests/bench/p1_discard.py --json FOLDER [--gib 64]

"limit" maps and unmaps the same bytes by bare driver calls with 1 GiB chunks; "torpor" goes through the ledger's
whole transaction, over one region and over a model's 291 tensors; torch_memory_saver with its default hook and its
other one. Each lives in a process of its own and sleeps while the others have their turns (turns.py); the order of each
round is drawn by a seed. A turn with a pause is 1 s asleep, wake, 0.3 s awake, sleep. A turn back to back is a burst of
pairs: the driver scrubs freed memory in the background, and a create right after a release waits for it, but for the
first of a burst, which finds other memory clean: it is a case of its own.

`--host MIB` rehearses the same on host devices, without limit and rivals.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from pathlib import Path

import torch
from cycles import gpu_name
from load import GIB, MODEL_TENSORS, Load
from record import Result
from rivals import find_saver
from turns import Entry, Player, Turns

from torpor.native import Device

ASLEEP_S, AWAKE_S = 1.0, 0.3
ROUNDS = 7
BURSTS = 3
BURST_PAIRS = 6


def entries(size_bytes: int, host: str, result: Result) -> list[Entry]:
    one, model = Load(size_bytes, host_device=host), Load(size_bytes, MODEL_TENSORS, host_device=host)
    many = f"{MODEL_TENSORS} tensors"
    ours = [Entry("torpor", "torpor", one), Entry("torpor", "torpor", model, many)]
    if host:
        return ours
    ours.insert(0, Entry("limit", "limit", one))
    try:
        saver, preload = find_saver()
    except LookupError as reason:
        result.notes += f"; {reason}"
        return ours
    return [
        *ours,
        Entry(saver, "saver", one, preload=preload),
        Entry(saver, "saver", model, many, preload),
        Entry(f"{saver}, torch hook", "saver_torch", one),
        Entry(f"{saver}, torch hook", "saver_torch", model, many),
    ]


def paused(turns: Turns, player: Player) -> None:
    time.sleep(ASLEEP_S)
    wake_s = player.seconds("wake")
    time.sleep(AWAKE_S)
    sleep_s = player.seconds("sleep")
    turns.all_free(player)
    turns.add_pair(player.entry, f"pause {ASLEEP_S:g} s", sleep_s, wake_s)


def burst(turns: Turns, player: Player) -> None:
    time.sleep(ASLEEP_S)
    player.ask("wake")
    time.sleep(AWAKE_S)
    pairs = player.ask("pairs", count=BURST_PAIRS)["pairs"]
    player.ask("sleep")
    turns.all_free(player)
    for number, (sleep_s, wake_s) in enumerate(pairs):
        case = "back to back" if number else "back to back, first of a burst"
        turns.add_pair(player.entry, case, sleep_s, wake_s)


def play(turns: Turns, save: Callable[[], object]) -> None:
    turns.load()
    for kind, rounds in ((paused, ROUNDS), (burst, BURSTS)):
        for number in range(rounds):
            for player in turns.shuffled(number):
                with turns.turn(player):
                    kind(turns, player)
            save()  # a run that is cut off has its whole rounds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, required=True, help="folder for the result")
    parser.add_argument("--gib", type=int, default=64)
    parser.add_argument("--host", type=int, default=0, metavar="MIB", help="on host devices, so many MiB")
    options = parser.parse_args()
    size_bytes = options.host << 20 if options.host else options.gib * GIB
    host = f"bench-{os.getpid()}" if options.host else ""
    device = Device.host(host, 4 * size_bytes) if host else Device.cuda(0)
    if not host:
        torch.zeros(1, device="cuda")
    result = Result("P1", notes=f"{size_bytes / GIB:g} GiB, mode none; 1 GiB chunks for the limit")
    turns = Turns(result, lambda: device.memory_info()[0])
    name = "host" if host else gpu_name()
    with turns.playing(entries(size_bytes, host, result)):
        play(turns, lambda: result.save(options.json, name))
    return turns.conclude(options.json, name)


if __name__ == "__main__":
    raise SystemExit(main())
