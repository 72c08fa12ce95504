"""P6: the first token of a prompt of 8k tokens that was seen before sleep: after a preserving wake, beside never slept.

    python tests/bench/p6_first_token.py --json FOLDER [--model FOLDER] [--limit-s 145]

A Llama of 8 B parameters with random weights in bfloat16, served by the default engine in this process. "never slept"
and "woken" are the same request over the same known prefix, in turns: before the one the engine is idle for as long as it
takes, before the other, that weights and KV cache sleep in page-locked memory and wake; right after another request, a
machine that is warm answers sooner than either ("never slept, back to back"). "discarded" slept without its KV cache's
contents and reads the prompt again. Answers must be the same, with as many known tokens as the case says.

Beside each first token stand its parts (first_token_parts.py), and beside each wake those of its stages. What makes a
first token after a wake slower is told apart by further cases: "woken, then idle" (does it pass by itself?), "woken, then
read" (the GPU has read all weights and pages once: is it the memory that is mapped anew?) and "woken, then another"
(another request came before: is it the CPU's and the GPU's rest?).

`--host` rehearses it with a small model on a host device.
"""

from __future__ import annotations

import argparse
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from cycles import gpu_name
from first_token_parts import Parts
from limit import Budget, keep_at
from record import Result
from served import EIGHT_BILLION, SMALL, Served, text, write_checkpoint

ANSWER_TOKENS = 4
ROUNDS, SLOW_ROUNDS = 7, 5
STEP_TOKENS = 2048
PAUSE_S = 0.5  # while the driver scrubs what was freed
USUAL_CYCLE_S = 0.4
BUSY, NEVER, WOKEN, DISCARDED = "never slept, back to back", "never slept", "woken", "discarded"
IDLE, READ, ANOTHER = "woken, then idle", "woken, then read", "woken, then another"
OTHER_TOKENS = 700
STAGE_PARTS = ("planning_s", "mapping_s", "copying_s")


class Case:
    """One prompt, and what it is to be answered."""

    def __init__(self, result: Result, host: Served, prompt: list[int], answer: list[int]) -> None:
        self.result, self.host, self.prompt, self.answer = result, host, prompt, answer
        self.parts = Parts(host)

    def ask(self, case: str, knows: bool) -> None:
        """knows: whether the prompt must be known."""
        seconds, answer, known, parts = self.parts.ask(self.prompt, ANSWER_TOKENS)
        if knows != (known > len(self.prompt) - 64):
            raise SystemExit(f"{case}: {known} tokens of {len(self.prompt)} were known")
        if answer != self.answer and knows:
            raise SystemExit(f"{case}: the answer {answer} is not {self.answer}")
        self.result.add("torpor", case, "first_token_s", "s", seconds)
        for name, part_s in parts.items():
            self.result.add("torpor", case, f"{name.replace(' ', '_')}_s", "s", part_s)

    def cycle(self, case: str, modes: dict[str, str]) -> None:
        """Sleep and wake, each whole. modes: by tag."""
        began = time.perf_counter()
        for tag, mode in modes.items():
            self.host.sleep([tag], mode)
        slept = time.perf_counter()
        time.sleep(PAUSE_S)
        again = time.perf_counter()
        self.host.wake(list(modes))
        woken = time.perf_counter()
        self.result.add("torpor", case, "sleep_s", "s", slept - began)
        self.result.add("torpor", case, "wake_s", "s", woken - again)
        stage: dict[str, Any] = self.host.stages[-1]
        self.result.add("torpor", case, "wake_stage_s", "s", stage["seconds"])
        for part in STAGE_PARTS:
            self.result.add("torpor", case, f"wake_{part}", "s", stage[part])


def probes(case: Case, other: list[int]) -> dict[str, Callable[[], None]]:
    """By case: what happens between the wake and the request."""

    def idle() -> None:
        time.sleep(PAUSE_S + USUAL_CYCLE_S)

    def another() -> None:
        case.host.first_token(other, ANSWER_TOKENS)

    return {IDLE: idle, READ: lambda: read_all(case.host), ANOTHER: another}


def read_all(host: Served) -> None:
    """Weights and pages, once, by a kernel of torch's."""
    runner = host.engine._loop._runner  # type: ignore[attr-defined]
    pages = [*runner._pages.keys.values(), *runner._pages.values.values()]
    for tensor in (*runner._module.parameters(), *pages):
        tensor.amax()
    if runner._pages.device.type == "cuda":
        torch.cuda.synchronize()


def play(host: Served, result: Result, tokens: int, vocabulary: int, budget: Budget) -> None:
    warm, prompt = text(tokens, vocabulary, 1), text(tokens, vocabulary, 2)
    other = text(min(tokens, OTHER_TOKENS), vocabulary, 3)
    for known in (
        warm,
        warm,
        other,
        other,
    ):  # compiles what there is to compile, with nothing known and with all
        host.first_token(known, ANSWER_TOKENS)
    host.first_token(prompt, ANSWER_TOKENS)
    # With the prefix known, rounding may be another.
    case = Case(result, host, prompt, host.first_token(prompt, ANSWER_TOKENS)[1])
    kept = dict.fromkeys(host.ledger.tags, "none") | {"weights": "pinned", "kv_cache": "pinned"}

    def both() -> None:
        time.sleep(PAUSE_S + USUAL_CYCLE_S)
        case.ask(NEVER, knows=True)
        case.cycle(WOKEN, kept)
        case.ask(WOKEN, knows=True)

    def discard() -> None:
        case.cycle(DISCARDED, {"kv_cache": "none"})
        case.ask(DISCARDED, knows=False)

    def probe() -> None:
        for name, between in probes(case, other).items():
            case.cycle(name, kept)
            between()
            case.ask(name, knows=True)

    for _ in range(ROUNDS):
        case.ask(BUSY, knows=True)
    for turn, rounds in ((both, ROUNDS), (discard, SLOW_ROUNDS), (probe, SLOW_ROUNDS)):
        done = sum(budget.take(turn.__name__, turn) for _ in range(rounds))
        if done < rounds:
            result.notes += f"; {turn.__name__}: {done} of {rounds} turns within the limit"


def compare(result: Result) -> None:
    """Each case's first token to that of the idle engine that never slept; where the woken one's more seconds went."""
    cases = {key[1] for key in result.samples if key[2] == "first_token_s"}
    if NEVER not in cases:
        return
    never_s = result.median("torpor", NEVER, "first_token_s")
    for name in (WOKEN, DISCARDED, IDLE, READ, ANOTHER):
        if name in cases:
            ratio = result.median("torpor", name, "first_token_s") / never_s
            result.add("torpor", name, "ttft_ratio", "1", ratio)
    asked = [metric for _, case, metric, unit in result.samples if case == NEVER and unit == "s"]
    if WOKEN in cases:
        for metric in asked:
            more_s = result.median("torpor", WOKEN, metric) - result.median("torpor", NEVER, metric)
            result.add("torpor", "woken less never slept", metric, "s", more_s)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, required=True, help="folder for the result")
    parser.add_argument(
        "--model", type=Path, default=Path("build/dummy-8b"), help="its checkpoint, made where missing"
    )
    parser.add_argument("--tokens", type=int, default=8192, help="of the prompt")
    parser.add_argument("--limit-s", type=float, default=145.0, help="the process has ended by then")
    parser.add_argument("--host", action="store_true", help="on a host device, with a small model")
    options = parser.parse_args(arguments)
    budget = Budget(options.limit_s)
    shape, where = (SMALL, "cpu") if options.host else (EIGHT_BILLION, "cuda")
    notes = f"{options.tokens} tokens of prompt, bfloat16; weights and KV cache sleep in mode pinned"
    result = Result("P6", notes=notes)
    lock = threading.Lock()

    def keep(cut: str = "; cut off by the limit") -> None:
        with lock:
            result.notes += cut
            compare(result)
            result.save(options.json, "host" if options.host else gpu_name())
            print(result.notes, result.table(), sep="\n", flush=True)

    timer = keep_at(options.limit_s, keep)
    folder = write_checkpoint(options.model, shape, where)
    began = time.perf_counter()
    with Served(folder, options.host, step_tokens=STEP_TOKENS) as host:
        result.notes += f"; loaded in {time.perf_counter() - began:.1f} s; attention by {host.attention}"
        result.notes += f"; CUDA graphs {host.graphs}"
        play(host, result, options.tokens, int(shape["vocab_size"]), budget)
    timer.cancel()
    keep("")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
