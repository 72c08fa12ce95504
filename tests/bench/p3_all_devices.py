"""P2 and P3 on every device of a machine: weights sleep and wake on one alone, and on all at once.

    python tests/bench/p3_all_devices.py --json FOLDER [--device cuda|host] [--gib 16] [--seconds 80]

One process a device. A round is first one device alone and then all in the same instant: a first cycle with its backup
made in advance, and one unchanged since; both sleeps only unmap. Each operation is begun in all processes before any is
waited for; "all at once" is the slowest one's seconds. "limit" is one copy of the same bytes over the link, alone and all
at once. Rounds begin until there are five, or until another one would end past `--seconds`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from load import GIB, Load
from record import Result

ROUNDS = 5
PAUSE_S = 0.5  # while the driver scrubs what was freed
HOST_BYTES, HOST_DEVICES = 8 << 20, 2
SUBJECTS = Path(__file__).with_name("subjects.py")
FIRST, UNCHANGED = "backup made before", "unchanged since"


class Process:
    """A subject of subjects.py on one device. Its program is told by `begin`, and answers by `end`."""

    def __init__(self, subject: str, number: int, load: Load, on_gpu: bool) -> None:
        environment = os.environ | ({"CUDA_VISIBLE_DEVICES": str(number)} if on_gpu else {})
        self.popen = subprocess.Popen(
            [sys.executable, str(SUBJECTS), subject, load.text()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        self.end()

    def begin(self, what: str) -> None:
        assert self.popen.stdin is not None
        self.popen.stdin.write(json.dumps({"do": what}) + "\n")
        self.popen.stdin.flush()

    def end(self) -> dict[str, Any]:
        assert self.popen.stdout is not None
        line = self.popen.stdout.readline()
        answer: dict[str, Any] = json.loads(line) if line else {"error": "its process ended"}
        if "error" in answer:
            raise SystemExit(answer["error"])
        return answer

    def close(self) -> None:
        if self.popen.stdin is not None:
            self.popen.stdin.close()
        self.popen.wait(30)


def together(processes: Sequence[Process], what: str) -> list[dict[str, Any]]:
    for process in processes:
        process.begin(what)
    return [process.end() for process in processes]


def cycle(result: Result, subject: str, case: str, processes: Sequence[Process]) -> None:
    """One sleep and wake of all of them at once; contents as before."""
    for what in ("sleep", "wake"):
        seconds = [answer["seconds"] for answer in together(processes, what)]
        for number, one_s in enumerate(seconds):
            if len(processes) > 1:
                result.add(
                    subject, f"{case}, device {number} of {len(processes)} at once", f"{what}_s", "s", one_s
                )
        name = "one alone" if len(processes) == 1 else f"all {len(processes)} at once"
        result.add(subject, f"{case}, {name}", f"{what}_s", "s", max(seconds))
        time.sleep(PAUSE_S)
    if not all(answer["right"] for answer in together(processes, "right")):
        raise SystemExit(f"{subject}, {case}: the contents that came back are not those that went")


def play_round(result: Result, ours: Sequence[Process], links: Sequence[Process]) -> None:
    for count in (1, len(ours)):
        together(ours[:count], "renew")
        cycle(result, "torpor", FIRST, ours[:count])
        cycle(result, "torpor", UNCHANGED, ours[:count])
        if links:
            cycle(result, "limit", "one copy", links[:count])


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, required=True, help="folder for the result")
    parser.add_argument("--device", choices=("host", "cuda"), default="cuda")
    parser.add_argument("--gib", type=int, default=16, help="of weights, on each GPU")
    parser.add_argument("--seconds", type=float, default=80.0, help="no round begins that would end later")
    options = parser.parse_args(arguments)
    on_gpu, count, name = options.device == "cuda", HOST_DEVICES, "host"
    if on_gpu:
        import torch
        from cycles import gpu_name

        count, name = torch.cuda.device_count(), gpu_name()
    size_bytes = options.gib * GIB if on_gpu else HOST_BYTES
    result = Result("P3", f"{size_bytes / GIB:g} GiB of weights on each of {count} devices, mode pinned")
    loads = [
        Load(size_bytes, keep="pinned", host_device="" if on_gpu else f"bench-{os.getpid()}-{number}")
        for number in range(count)
    ]
    began, last_s = time.monotonic(), 0.0
    with ExitStack() as stack:

        def start(subject: str) -> list[Process]:
            made = [Process(subject, number, load, on_gpu) for number, load in enumerate(loads)]
            for process in made:
                stack.callback(process.close)
            together(made, "load")
            return made

        ours, links = start("torpor"), start("link") if on_gpu else []
        for number in range(ROUNDS):
            if time.monotonic() - began + last_s > options.seconds:
                result.notes += f"; {number} rounds of {ROUNDS}: the time was over"
                break
            round_began = time.monotonic()
            play_round(result, ours, links)
            last_s = time.monotonic() - round_began
            result.save(options.json, f"{name}-x{count}")
        together([*ours, *links], "end")
    print(result.table())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
