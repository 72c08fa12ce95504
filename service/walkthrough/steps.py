"""The steps of the walk-through, each checked."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from torpor.service.client.blocking import Client
from torpor.service.client.calls import ChatAnswer
from torpor.service.client.errors import Unavailable
from torpor.service.units import show_bytes
from torpor.service.walkthrough.child import StepFailed
from torpor.service.walkthrough.memory import Reading, free_table, read_memory

MODEL = "smollm2"
QUESTION = (
    "What is the capital of France? Name the city, and tell in two short sentences what it is famous for."
)
MAX_TOKENS = 32
# Module buffers keep their contents in every mode (S3); one allocation granule of the device holds them.
RESIDUAL_LIMIT_BYTES = 16 << 20
# What the kernel's own count may differ by: it counts the whole machine.
SLACK_BYTES = 48 << 20
SETTLE_S = 5.0


@dataclass
class Walk:
    client: Client
    console: Console
    step: int = 0

    def say(self, text: str) -> None:
        self.step += 1
        self.console.print(f"\n[bold]{self.step}. {text}[/bold]")

    def held(self, claim: str, value: bool, detail: str = "") -> None:
        if not value:
            raise StepFailed(f"step {self.step}: not so: {claim}. {detail}".strip())
        self.console.print(f"   [green]ok[/green] {claim}", highlight=False, soft_wrap=True)

    def ask(self) -> ChatAnswer:
        answer = self.client.chat(
            MODEL, QUESTION, temperature=0, max_tokens=MAX_TOKENS, return_token_ids=True
        )
        shown = " ".join(answer.text.split())
        counts = f"{answer.prompt_tokens} prompt tokens, {answer.cached_tokens} of them from the prefix cache"
        self.console.print(f"   → {shown}", markup=False, highlight=False)
        self.console.print(f"   ({answer.completion_tokens} tokens; {counts})", highlight=False)
        return answer

    def same_answer(self, now: ChatAnswer, before: ChatAnswer) -> None:
        same = bool(now.token_ids) and now.token_ids == before.token_ids and now.text == before.text
        self.held(
            f"the same {len(now.token_ids)} tokens as before", same, f"was {before.text!r}, is {now.text!r}"
        )


def walk(client: Client, console: Console) -> None:
    """All steps. Raises StepFailed or a ClientError at the first that does not hold."""
    steps = Walk(client, console)
    steps.say("Ask a question, twice: the second time its prefix is in the KV cache")
    first = steps.ask()
    again = steps.ask()
    steps.same_answer(again, first)
    steps.held("the prefix was reused", again.cached_tokens > 0)

    steps.say("Sleep: weights kept in pinned host memory, KV cache kept in the host tier")
    before, after = sleep_and_measure(steps, {"weights": "pinned", "kv_cache": "cpu"})
    console.print(free_table(before, after))

    steps.say("Ask while it sleeps")
    refused(steps)

    steps.say("Wake, and ask again: the prefix was kept")
    wake(steps, before)
    kept = steps.ask()
    steps.same_answer(kept, first)
    claim = f"as many cached tokens as before the sleep: {again.cached_tokens}"
    steps.held(claim, kept.cached_tokens == again.cached_tokens, f"now {kept.cached_tokens}")

    steps.say("Sleep again, this time the KV cache is discarded")
    before, after = sleep_and_measure(steps, {"weights": "pinned", "kv_cache": "none"})
    console.print(free_table(before, after))
    refused(steps)

    steps.say("Wake, and ask again: nothing is left of the prefix")
    wake(steps, before)
    anew = steps.ask()
    steps.same_answer(anew, first)
    steps.held("no cached tokens", anew.cached_tokens == 0, f"there were {anew.cached_tokens}")


def sleep_and_measure(steps: Walk, restore: Mapping[str, str]) -> tuple[Reading, Reading]:
    before = read_memory(steps.client.model(MODEL))
    record = steps.client.sleep(MODEL, restore=restore)
    steps.held("the operation succeeded", record["state"] == "succeeded", str(record["reason"]))
    show_seconds(steps, record)
    model = steps.client.model(MODEL)
    after = read_memory(model)
    parked = model["state"] == "asleep" and set(model["parked_tags"]) == set(model["tags"])
    steps.held("the model is asleep, all tags parked", parked)
    told = sum(sum(rank["residual"].values()) for rank in record["ranks"])
    steps.held(
        f"nothing but {show_bytes(told)} of module buffers, which never sleep, is left on the device",
        after.mapped_bytes == told <= RESIDUAL_LIMIT_BYTES * len(record["ranks"]),
        f"{after.mapped_bytes} bytes are mapped",
    )
    freed = sum(rank["freed_bytes"] for rank in record["ranks"])
    due = before.mapped_bytes - after.mapped_bytes
    steps.held(f"the ranks freed {show_bytes(freed)}, all the rest", freed == due, f"{due} were due")
    # The driver counts for everybody on the machine, and lags a moment behind.
    deadline = time.monotonic() + SETTLE_S
    while not after.freed_since(before, SLACK_BYTES) and time.monotonic() < deadline:
        time.sleep(0.2)
        after = read_memory(steps.client.model(MODEL))
    witness = "the driver" if before.page_bytes is None else "the kernel"
    steps.held(
        f"{witness} says that the memory is free",
        after.freed_since(before, SLACK_BYTES),
        after.describe(before),
    )
    return before, after


def refused(steps: Walk) -> None:
    try:
        answer = steps.client.chat(MODEL, QUESTION, max_tokens=1)
    except Unavailable as error:
        reason = error.body.get("reason")
        steps.console.print(
            f"   {error.status} {error.code}: {error.detail} Retry-After: {error.retry_after_s:g} s"
        )
        steps.held(
            "refused with 503 while asleep",
            (error.status, error.code, reason) == (503, "gate_closed", "asleep"),
        )
        steps.held("told when to ask again", "retry-after" in error.headers)
        return
    raise StepFailed(f"step {steps.step}: a sleeping model answered {answer.text!r}")


def wake(steps: Walk, before: Reading) -> None:
    record = steps.client.wake(MODEL)
    steps.held("the operation succeeded", record["state"] == "succeeded", str(record["reason"]))
    show_seconds(steps, record)
    model = steps.client.model(MODEL)
    steps.held("the model is awake, its gate open", model["state"] == "awake" and model["gate"]["open"])
    now = read_memory(model)
    steps.held(
        "every tag has its memory again", now.by_tag_bytes == before.by_tag_bytes, now.describe(before)
    )


def show_seconds(steps: Walk, record: Mapping[str, Any]) -> None:
    phases = ", ".join(f"{phase['name']} {phase['seconds'] * 1000:.0f} ms" for phase in record["phases"])
    steps.console.print(f"   {record['kind']}: {phases}", highlight=False)
