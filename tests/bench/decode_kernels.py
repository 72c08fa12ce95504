"""What the GPU does in a step that only decodes: milliseconds of its kernels, by kind, as CUPTI saw them."""

from __future__ import annotations

import re
import time
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

# By a kernel's name; the first that fits.
KINDS = {
    "attention": re.compile(r"attend|join_parts"),
    "matrix products": re.compile(r"gemm|gemv|cutlass|nvjet|splitk|xmma", re.IGNORECASE),
    "others": re.compile(""),
}
ANSWER_TOKENS = 160  # of which the last ones run under the profiler's eyes


def kinds_of(kernels: Sequence[tuple[str, float]]) -> dict[str, float]:
    """kernels: name and time of each."""
    sums: dict[str, float] = defaultdict(float)
    for name, time_us in kernels:
        sums[next(kind for kind, pattern in KINDS.items() if pattern.search(name))] += time_us
    return dict(sums)


def kernels_of(host: Any, prompts: Sequence[list[int]]) -> tuple[dict[str, float], str]:
    """Milliseconds a step by kind, and a text on the longest kernels. host: a Served that has nothing to do."""
    with profile(activities=[ProfilerActivity.CUDA]):  # makes the profiler ready, which takes long
        torch.zeros(1, device="cuda")
    loop = host.engine._loop
    asked = [host.ask(prompt, max_tokens=ANSWER_TOKENS, ignore_eos=True) for prompt in prompts]
    while not all(id(said) in host.first_s for said in asked):
        time.sleep(0.001)
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        first = loop._number
        for said in asked:
            said.wait()
        steps = loop._number - first
    kernels = [(event.key, event.self_device_time_total, event.count) for event in seen.key_averages()]
    kernels.sort(key=lambda kernel: -kernel[1])
    longest = "\n".join(
        f"{time_us / 1e3 / steps:8.4f} ms a step, {count / steps:6.1f} times: {name[:120]}"
        for name, time_us, count in kernels[:16]
    )
    sums = kinds_of([kernel[:2] for kernel in kernels])
    return {kind: time_us / 1e3 / steps for kind, time_us in sums.items()}, f"{steps} steps\n{longest}"
