"""P11: tokens a second of the default engine, beside transformers' `generate` on a model of the same weights.

    python tests/bench/p11_decode.py --json FOLDER [--model FOLDER] [--limit-s 145] [--ways generate,static]

A Llama of 8 B parameters with random weights in bfloat16; each request has 1,000 random tokens that nobody has seen and
gets 256 greedy ones, whatever they are. The seconds are those from the first request's arrival to the last answer's end,
prompts included, for everybody; "decode_tokens_per_s" of ours counts from the last first token on. transformers' own runs
are in the same process, after ours: `generate` with its dynamic cache, and with a static cache and a forward compiled in
mode reduce-overhead, in turns over the batch sizes. Five of each, or as many as the limit allows: a turn that would not
end in time is not begun, and when the limit comes, what was measured is kept and the process ends; without `generate`
that is P11-static. `--host` rehearses it with a small model on a host device; there the compiled forward is only traced.
"""

from __future__ import annotations

import argparse
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from cycles import gpu_name
from decode_kernels import kernels_of
from first_token_parts import Parts
from limit import Budget, keep_at
from record import Result
from served import EIGHT_BILLION, SMALL, Served, make_model, text, write_checkpoint
from transformers import CompileConfig

ROUNDS = 5
PROMPT_TOKENS, ANSWER_TOKENS = 1000, 256
WARM_TOKENS = 8
HOST_SIZES = 20, 6, (1, 3)
STEP_TOKENS = 8192
COMPILE_S = 45.0  # at least, until the first answer of a compiled forward
WAYS = ("generate", "static")


@dataclass
class Load:
    """Prompts, each a new one. prompt_tokens, answer_tokens: of one request."""

    vocabulary: int
    prompt_tokens: int
    answer_tokens: int
    batches: tuple[int, ...] = (1, 32)
    seed: int = 0

    def prompts(self, count: int) -> list[list[int]]:
        self.seed += count
        seeds = range(self.seed - count, self.seed)
        return [text(self.prompt_tokens, self.vocabulary, seed) for seed in seeds]


def ours(host: Served, load: Load, batch: int, answer_tokens: int) -> tuple[float, float]:
    """Tokens a second over all, and from the last first token on."""
    prompts = load.prompts(batch)
    began = time.perf_counter()
    asked = [host.ask(prompt, max_tokens=answer_tokens, ignore_eos=True) for prompt in prompts]
    for said in asked:
        said.wait()
    ended = time.perf_counter()
    if any(len(said.tokens) != answer_tokens or said.cached for said in asked):
        raise SystemExit("an answer was cut short, or a prompt was known")
    last_first = max(host.first_s[id(said)] for said in asked)
    after = sum(1 for said in asked for _ in said.tokens) - batch
    return batch * answer_tokens / (ended - began), after / (ended - last_first)


def theirs(model: Any, load: Load, batch: int, answer_tokens: int, **options: Any) -> float:
    """Tokens a second over all."""
    prompts = torch.tensor(load.prompts(batch), device=model.device)
    began = time.perf_counter()
    answer = model.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        min_new_tokens=answer_tokens,
        max_new_tokens=answer_tokens,
        do_sample=False,
        pad_token_id=0,
        **options,
    )
    counted = answer.shape[1] - prompts.shape[1]
    answer[0, -1].item()
    seconds = time.perf_counter() - began
    if counted != answer_tokens:
        raise SystemExit(f"generate answered {counted} tokens")
    return batch * answer_tokens / seconds


def in_turns(
    budget: Budget,
    result: Result,
    subject: str,
    batches: Sequence[int],
    turn: Callable[[int], None],
    warm: Callable[[int], None],
    warm_s: float = 0.0,
) -> None:
    """Each batch size warms up, then all take turns, ROUNDS of each at most. Says in the notes what was left out."""
    ready = [
        batch for batch in batches if budget.take(f"{subject} warm {batch}", lambda b=batch: warm(b), warm_s)
    ]  # type: ignore[misc]
    done = dict.fromkeys(batches, 0)
    for _ in range(ROUNDS):
        for batch in ready:
            done[batch] += budget.take(f"{subject} {batch}", lambda b=batch: turn(b))  # type: ignore[misc]
    for batch, count in done.items():
        if count < ROUNDS:
            result.notes += f"; {subject} at batch {batch}: {count} of {ROUNDS} turns within the limit"


def play_ours(folder: Path, on_host: bool, load: Load, result: Result, budget: Budget) -> None:
    with Served(folder, on_host, step_tokens=STEP_TOKENS) as host:
        result.notes += f"; attention by {host.attention}, CUDA graphs {host.graphs}"

        def turn(batch: int) -> None:
            over_all, after = ours(host, load, batch, load.answer_tokens)
            result.add("torpor", f"batch {batch}", "tokens_per_s", "1/s", over_all)
            result.add("torpor", f"batch {batch}", "decode_tokens_per_s", "1/s", after)

        in_turns(
            budget, result, "torpor", load.batches, turn, lambda batch: ours(host, load, batch, WARM_TOKENS)
        )
        parts = Parts(host)  # slows down a little, so that it comes last
        for batch in load.batches:
            budget.take(f"parts {batch}", lambda b=batch: parts_of(host, parts, load, b, result))  # type: ignore[misc]
            if not on_host:
                add_kernels(host, load, batch, result)


def add_kernels(host: Served, load: Load, batch: int, result: Result) -> None:
    """Of steps that only decode."""
    seconds, longest = kernels_of(host, load.prompts(batch))
    print(f"batch {batch}: {longest}", flush=True)
    for kind, ms in seconds.items():
        metric = f"{kind.replace(' ', '_')}_ms_a_step"
        result.add("torpor", f"batch {batch}, kernels while decoding", metric, "ms", ms)


def parts_of(host: Served, parts: Parts, load: Load, batch: int, result: Result) -> None:
    """Where a step's milliseconds go, prompts included; "gpu" overlaps the others."""
    loop = host.engine._loop  # type: ignore[attr-defined]
    steps = loop._number
    seconds = parts.while_doing(lambda: ours(host, load, batch, load.answer_tokens) and None)
    for name, part_s in seconds.items():
        metric = f"{name.replace(' ', '_')}_ms_a_step"
        result.add("torpor", f"batch {batch}, parts", metric, "ms", 1e3 * part_s / (loop._number - steps))


def options_of(way: str, on_host: bool) -> dict[str, Any]:
    """Of `generate`."""
    if way == "generate":
        return {}
    # As generate's own choice for static caches on a GPU.
    config = (
        CompileConfig(backend="eager", mode="default") if on_host else CompileConfig(mode="reduce-overhead")
    )
    config._compile_all_devices = on_host
    return {"cache_implementation": "static", "compile_config": config}


def play_theirs(
    model: Any, ways: Sequence[str], on_host: bool, load: Load, result: Result, budget: Budget
) -> None:
    for way in ways:
        name = f"transformers {transformers.__version__} {'generate' if way == 'generate' else 'static, compiled'}"
        options = options_of(way, on_host)

        def turn(batch: int, name: str = name, options: dict[str, Any] = options) -> None:
            speed = theirs(model, load, batch, load.answer_tokens, **options)
            result.add(name, f"batch {batch}", "tokens_per_s", "1/s", speed)

        def warm(batch: int, way: str = way, options: dict[str, Any] = options) -> None:
            # A static cache is as long as the answer, and compiled for that.
            theirs(model, load, batch, WARM_TOKENS if way == "generate" else load.answer_tokens, **options)

        compiles = way == "static" and not on_host
        in_turns(budget, result, name, load.batches, turn, warm, COMPILE_S if compiles else 0.0)


def ratios(result: Result, batches: Sequence[int]) -> None:
    """Of ours to each rival's, by medians."""
    subjects = {key[0] for key in result.samples} - {"torpor"}
    for batch in batches:
        case = f"batch {batch}"
        for subject in sorted(subjects):
            if any(key[:2] == (subject, case) for key in result.samples):
                ratio = result.median("torpor", case, "tokens_per_s") / result.median(
                    subject, case, "tokens_per_s"
                )
                result.add("torpor", case, f"ratio_to_{subject.rsplit(' ', 1)[-1]}", "1", ratio)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, required=True, help="folder for the result")
    parser.add_argument(
        "--model", type=Path, default=Path("build/dummy-8b"), help="its checkpoint, made where missing"
    )
    parser.add_argument("--limit-s", type=float, default=145.0, help="the process has ended by then")
    parser.add_argument("--ways", default=",".join(WAYS), help="of transformers, the most wanted first")
    parser.add_argument("--host", action="store_true", help="on a host device, with a small model")
    options = parser.parse_args(arguments)
    options.ways = [way for way in options.ways.split(",") if way]
    if unknown := sorted(set(options.ways) - set(WAYS)):
        parser.error(f"unknown ways {unknown}; known: {', '.join(WAYS)}")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    budget = Budget(options.limit_s)
    shape, where = (SMALL, "cpu") if options.host else (EIGHT_BILLION, "cuda")
    sizes = HOST_SIZES if options.host else (PROMPT_TOKENS, ANSWER_TOKENS)
    load = Load(int(shape["vocab_size"]), *sizes)
    named = "P11" if "generate" in options.ways else "P11-static"  # both ways take longer than most limits
    result = Result(named, f"{load.prompt_tokens} tokens in, {load.answer_tokens} out, bfloat16, greedy")
    name = "host" if options.host else gpu_name()
    lock = threading.Lock()

    def keep(cut: str = "; cut off by the limit") -> None:
        with lock:
            result.notes += cut
            ratios(result, load.batches)
            result.save(options.json, name)
            print(result.notes, result.table(), sep="\n", flush=True)

    timer = keep_at(options.limit_s, keep)
    folder = write_checkpoint(options.model, shape, where)
    play_ours(folder, options.host, load, result, budget)
    play_theirs(make_model(shape, where), options.ways, options.host, load, result, budget)
    timer.cancel()
    keep("")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
