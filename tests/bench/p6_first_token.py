"""P6: the first token of a prompt of 8k tokens that was seen before sleep: after a preserving wake, beside never slept.

    python tests/bench/p6_first_token.py --json FOLDER [--model FOLDER]

A Llama of 8 B parameters with random weights in bfloat16, served by the default engine in this process. "never slept"
and "woken" are the same request over the same known prefix, in turns: before the one the engine is idle for as long as it
takes, before the other, that weights and KV cache sleep in page-locked memory and wake; right after another request, a
machine that is warm answers sooner than either. "discarded" slept without its KV cache's contents and reads the prompt
again. Answers must be the same, with as many known tokens as the case says.

`--host` rehearses it with a small model on a host device.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from cycles import gpu_name
from record import Result
from served import EIGHT_BILLION, SMALL, Served, text, write_checkpoint

ANSWER_TOKENS = 4
ROUNDS = 7
SLOW_ROUNDS = 5
STEP_TOKENS = 2048
PAUSE_S = 0.5  # while the driver scrubs what was freed
USUAL_CYCLE_S = 0.4
BUSY, NEVER, WOKEN, DISCARDED = "never slept, back to back", "never slept", "woken", "discarded"


class Case:
    """One prompt, and what it is to be answered."""

    def __init__(self, result: Result, host: Served, prompt: list[int], answer: list[int]) -> None:
        self.result, self.host, self.prompt, self.answer = result, host, prompt, answer

    def ask(self, case: str, knows: bool) -> None:
        """knows: whether the prompt must be known."""
        seconds, answer, known = self.host.first_token(self.prompt, ANSWER_TOKENS)
        if knows != (known > len(self.prompt) - 64):
            raise SystemExit(f"{case}: {known} tokens of {len(self.prompt)} were known")
        if answer != self.answer and knows:
            raise SystemExit(f"{case}: the answer {answer} is not {self.answer}")
        self.result.add("torpor", case, "first_token_s", "s", seconds)

    def cycle(self, case: str, modes: dict[str, str]) -> None:
        """Sleep and wake, each whole. modes: by tag."""
        began = time.perf_counter()
        for tag, mode in modes.items():
            self.host.sleep([tag], mode)
        slept = time.perf_counter()
        time.sleep(PAUSE_S)
        again = time.perf_counter()
        self.host.wake(list(modes))
        self.result.add("torpor", case, "sleep_s", "s", slept - began)
        self.result.add("torpor", case, "wake_s", "s", time.perf_counter() - again)


def play(host: Served, result: Result, tokens: int, vocabulary: int) -> None:
    warm, prompt = text(tokens, vocabulary, 1), text(tokens, vocabulary, 2)
    for _ in range(2):  # compiles what there is to compile, with nothing known and with all
        host.first_token(warm, ANSWER_TOKENS)
    host.first_token(prompt, ANSWER_TOKENS)
    # With the prefix known, rounding may be another.
    case = Case(result, host, prompt, host.first_token(prompt, ANSWER_TOKENS)[1])
    kept = dict.fromkeys(host.ledger.tags, "none") | {"weights": "pinned", "kv_cache": "pinned"}
    for _ in range(ROUNDS):
        case.ask(BUSY, knows=True)
    for _ in range(ROUNDS):
        time.sleep(PAUSE_S + USUAL_CYCLE_S)
        case.ask(NEVER, knows=True)
        case.cycle(WOKEN, kept)
        case.ask(WOKEN, knows=True)
    for _ in range(SLOW_ROUNDS):
        case.cycle(DISCARDED, {"kv_cache": "none"})
        case.ask(DISCARDED, knows=False)
    never_s = result.median("torpor", NEVER, "first_token_s")
    for name in (WOKEN, DISCARDED):
        ratio = result.median("torpor", name, "first_token_s") / never_s
        result.add("torpor", name, "ttft_ratio", "1", ratio)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, required=True, help="folder for the result")
    parser.add_argument(
        "--model", type=Path, default=Path("build/dummy-8b"), help="its checkpoint, made where missing"
    )
    parser.add_argument("--tokens", type=int, default=8192, help="of the prompt")
    parser.add_argument("--host", action="store_true", help="on a host device, with a small model")
    options = parser.parse_args()
    shape, where = (SMALL, "cpu") if options.host else (EIGHT_BILLION, "cuda")
    folder = write_checkpoint(options.model, shape, where)
    notes = f"{options.tokens} tokens of prompt, bfloat16; weights and KV cache sleep in mode pinned"
    result = Result("P6", notes=notes)
    began = time.perf_counter()
    with Served(folder, options.host, step_tokens=STEP_TOKENS) as host:
        result.notes += f"; loaded in {time.perf_counter() - began:.1f} s; attention by {host.attention}"
        play(host, result, options.tokens, int(shape["vocab_size"]))
    result.save(options.json, "host" if options.host else gpu_name())
    print(result.table())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
