"""P2 and P3: preserve weights in page-locked host memory, beside the link's own speed and rivals in the same minutes.

    python tests/bench/p2_weights.py --json FOLDER [--gib 16] [--seconds 280]

"limit" is one copy of the same bytes from and to page-locked memory that is already there. Torpor's rows are the whole
transaction, preflight to publish: the first cycle of a process (whose sleep must make the host memory), one unchanged
since (M9: only unmapped), one with changed contents (the host memory is there), and the first with a backup that was
made in advance. A round is a fresh process for each subject, one after the other in an order drawn by a seed, each
given its turn until it has ended and its memory is back. Contents are looked at after each first wake. Rounds begin until
there are five, or until another one would end past `--seconds`; what is slow of the rivals is played in the
first `--slow-rounds` only.

`--host MIB` rehearses the same on host devices, without limit and rivals.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import torch
from cycles import Link, gpu_name
from load import GIB, Load
from record import Result
from rivals import find_saver
from turns import Entry, Failed, Player, Turns

from torpor.native import Device

ROUNDS = 5
QUICK = ("saver_retain",)  # whose later cycles are played in every round
PAUSE_S = 0.5
UNCHANGED = "unchanged since"


def entries(load: Load, slow: bool, result: Result) -> list[Entry]:
    ours = [Entry("torpor", "torpor", load)]
    if load.host_device:
        return ours
    if slow:
        ours += [Entry("tensor.cpu()", "cpu_copy", load), Entry("cuCheckpointProcess", "checkpoint", load)]
    try:
        saver, preload = find_saver()
    except LookupError as reason:
        result.notes += f"; {reason}" if slow else ""
        return ours
    return [
        *ours,
        Entry(saver, "saver", load, preload=preload),
        Entry(f"{saver}, backup retained", "saver_retain", load, preload=preload),
    ]


def cycle(turns: Turns, player: Player, case: str) -> None:
    before = turns.free_bytes()
    sleep_s = player.seconds("sleep")
    given = turns.free_bytes() - before
    if given < player.entry.load.size_bytes - (64 << 20):
        raise Failed(f"{player.entry}: {case}: only {given} bytes were free after its sleep")
    time.sleep(PAUSE_S)
    wake_s = player.seconds("wake")
    if not player.ask("right")["right"]:
        raise Failed(f"{player.entry}: {case}: the contents that came back are not those that went")
    turns.add_pair(player.entry, case, sleep_s, wake_s)
    time.sleep(PAUSE_S)


def ours(turns: Turns, player: Player) -> None:
    cycle(turns, player, "first cycle")
    cycle(turns, player, UNCHANGED)
    player.ask("change")
    cycle(turns, player, "changed, host memory there")
    case = "first, backup made before"
    turns.add(player.entry, case, "backup_s", player.seconds("renew"))
    cycle(turns, player, case)


def theirs(turns: Turns, player: Player, later: bool) -> None:
    cycle(turns, player, "first cycle")
    if later:
        player.ask("change")
        cycle(turns, player, "changed, later")


def play_round(turns: Turns, slow: bool, number: int, load: Load, link: Link | None) -> None:
    if link is not None:
        for metric, seconds in zip(("sleep_s", "wake_s"), link.copy(), strict=True):
            turns.result.add("limit", "one copy, host memory there", metric, "s", seconds)
    with turns.playing(entries(load, slow, turns.result)):
        for player in turns.shuffled(number):
            with turns.turn(player):
                player.ask("load")
                time.sleep(PAUSE_S)
                if player.entry.program == "torpor":
                    ours(turns, player)
                else:
                    theirs(turns, player, later=slow or player.entry.program in QUICK)
                player.ask("end")
            player.end()
            with turns.turn(player):
                turns.all_free(player)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, required=True, help="folder for the result")
    parser.add_argument("--gib", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=280.0, help="no round begins that would end later")
    parser.add_argument("--slow-rounds", type=int, default=1, help="in so many, what is slow plays too")
    parser.add_argument("--host", type=int, default=0, metavar="MIB", help="on host devices, so many MiB")
    options = parser.parse_args()
    size_bytes = options.host << 20 if options.host else options.gib * GIB
    host = f"bench-{os.getpid()}" if options.host else ""
    device = Device.host(host, 4 * size_bytes) if host else Device.cuda(0)
    if not host:
        torch.zeros(1, device="cuda")
    link = None if host else Link(size_bytes)
    notes = f"{size_bytes / GIB:g} GiB of weights, mode pinned; P3 is '{UNCHANGED}' and 'backup made before'"
    turns = Turns(Result("P2", notes=notes), lambda: device.memory_info()[0])
    load = Load(size_bytes, keep="pinned", host_device=host)
    name = "host" if host else gpu_name()
    began, last_s = time.monotonic(), 0.0
    for number in range(ROUNDS):
        start = time.monotonic()
        if start - began + last_s > options.seconds:
            turns.result.notes += f"; {number} rounds of {ROUNDS}: the time was over"
            break
        play_round(turns, number < options.slow_rounds, number, load, link)
        last_s = time.monotonic() - start
        turns.result.save(options.json, name)  # a run that is cut off has its whole rounds
    return turns.conclude(options.json, name)


if __name__ == "__main__":
    raise SystemExit(main())
