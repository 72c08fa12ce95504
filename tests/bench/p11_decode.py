"""P11: tokens a second of the default engine, beside transformers' `generate` on a model of the same shape.

    python tests/bench/p11_decode.py --json FOLDER [--model FOLDER] [--seconds 150]

A Llama of 8 B parameters with random weights in bfloat16; each request has 1,000 random tokens that nobody has seen and
gets 256 greedy ones, whatever they are. The seconds are those from the first request's arrival to the last answer's end,
prompts included, for everybody; "decode_tokens_per_s" of ours counts from the last first token on. transformers' own runs
are in the same process, after ours: `generate` with its dynamic cache, and, if time is left, with its static cache, which
compiles. `--host` rehearses it with a small model on a host device.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from cycles import gpu_name
from record import Result
from served import EIGHT_BILLION, SMALL, Served, text, write_checkpoint
from transformers import AutoModelForCausalLM

BATCHES = (1, 32)
ROUNDS = 3
PROMPT_TOKENS, ANSWER_TOKENS = 1000, 256
STEP_TOKENS = 8192


class Load:
    """Prompts, each a new one. prompt_tokens, answer_tokens: of one request."""

    def __init__(self, vocabulary: int, prompt_tokens: int, answer_tokens: int) -> None:
        self.vocabulary, self.prompt_tokens, self.answer_tokens = vocabulary, prompt_tokens, answer_tokens
        self._seed = 0

    def prompts(self, count: int) -> list[list[int]]:
        self._seed += count
        return [text(self.prompt_tokens, self.vocabulary, self._seed + i) for i in range(count)]


def ours(host: Served, load: Load, batch: int) -> tuple[float, float]:
    """Tokens a second over all, and from the last first token on."""
    prompts = load.prompts(batch)
    began = time.perf_counter()
    asked = [host.ask(prompt, max_tokens=load.answer_tokens, ignore_eos=True) for prompt in prompts]
    for said in asked:
        said.wait()
    ended = time.perf_counter()
    if any(len(said.tokens) != load.answer_tokens or said.cached for said in asked):
        raise SystemExit("an answer was cut short, or a prompt was known")
    last_first = max(host.first_s[id(said)] for said in asked)
    after = sum(1 for said in asked for _ in said.tokens) - batch
    return batch * load.answer_tokens / (ended - began), after / (ended - last_first)


@torch.inference_mode()
def theirs(model: Any, load: Load, batch: int, **options: Any) -> float:
    prompts = torch.tensor(load.prompts(batch), device=model.device)
    began = time.perf_counter()
    answer = model.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        min_new_tokens=load.answer_tokens,
        max_new_tokens=load.answer_tokens,
        do_sample=False,
        pad_token_id=0,
        **options,
    )
    counted = answer.shape[1] - prompts.shape[1]
    answer[0, -1].item()
    seconds = time.perf_counter() - began
    if counted != load.answer_tokens:
        raise SystemExit(f"generate answered {counted} tokens")
    return batch * load.answer_tokens / seconds


def play_ours(folder: Path, on_host: bool, load: Load, result: Result) -> None:
    with Served(folder, on_host, step_tokens=STEP_TOKENS) as host:
        result.notes += f"; attention by {host.attention}, CUDA graphs {host.graphs}"
        for batch in BATCHES:
            ours(host, load, batch)
            for _ in range(ROUNDS):
                over_all, after = ours(host, load, batch)
                result.add("torpor", f"batch {batch}", "tokens_per_s", "1/s", over_all)
                result.add("torpor", f"batch {batch}", "decode_tokens_per_s", "1/s", after)


def play_theirs(
    folder: Path, where: str, load: Load, result: Result, until: float, save: Callable[[], object]
) -> None:
    name = f"transformers {transformers.__version__}"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).to(where).eval()
    ways: list[tuple[str, dict[str, Any]]] = [("generate", {})]
    if where == "cuda":
        ways.append(("static cache, compiled", {"cache_implementation": "static"}))
    for way, options in ways:
        for batch in BATCHES:
            if time.monotonic() > until:
                result.notes += f"; {way} at batch {batch} not run: the time was over"
                continue
            theirs(model, load, batch, **options)  # warms up, and compiles
            for _ in range(ROUNDS):
                speed = theirs(model, load, batch, **options)
                result.add(f"{name} {way}", f"batch {batch}", "tokens_per_s", "1/s", speed)
                save()  # a run that is cut off has what was measured
                if time.monotonic() > until:
                    break


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, required=True, help="folder for the result")
    parser.add_argument(
        "--model", type=Path, default=Path("build/dummy-8b"), help="its checkpoint, made where missing"
    )
    parser.add_argument("--seconds", type=float, default=150.0, help="nothing of transformers' begins later")
    parser.add_argument("--host", action="store_true", help="on a host device, with a small model")
    options = parser.parse_args()
    until = time.monotonic() + options.seconds
    shape, where = (SMALL, "cpu") if options.host else (EIGHT_BILLION, "cuda")
    folder = write_checkpoint(options.model, shape, where)
    load = Load(int(shape["vocab_size"]), *((50, 8) if options.host else (PROMPT_TOKENS, ANSWER_TOKENS)))
    result = Result(
        "P11", notes=f"{load.prompt_tokens} tokens in, {load.answer_tokens} out, bfloat16, greedy"
    )
    name = "host" if options.host else gpu_name()
    play_ours(folder, options.host, load, result)
    result.save(options.json, name)
    play_theirs(folder, where, load, result, until, lambda: result.save(options.json, name))
    result.save(options.json, name)
    print(result.table())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
