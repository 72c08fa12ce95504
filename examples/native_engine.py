"""An engine's memory on torpor.native alone: weights, a paged KV cache, and both asleep in between.

python examples/native_engine.py          on a GPU played by RAM; pass "cuda" for GPU 0
"""

from __future__ import annotations

import os
import sys

import torch

from torpor.native import Device, KvManager, Ledger, Sequence

MIB = 1 << 20
LAYERS, KV_HEADS, HEAD_DIM, TOKENS_PER_BLOCK = 2, 4, 64, 16


def transition(ledger: Ledger, kind: str, **asked: object) -> dict[str, int]:
    """One transaction. Nothing is touched before stage; all that can fail happens there, and is undone on a throw."""
    plan = ledger.preflight(kind, f"{kind}-1", verify=True, **asked)  # type: ignore[arg-type]
    if plan.refusals:
        raise SystemExit(f"{kind} refused: {plan.refusals[0]['reason']}")
    ledger.stage(plan, timeout_s=30.0)
    report = ledger.commit()
    ledger.publish()
    return report


def prefill(kv: KvManager, prompt: list[int]) -> Sequence:
    """Writes K and V of each token where the page table says; a real engine's kernels do the same."""
    sequence = kv.create_sequence("tenant-1", prompt)
    if not sequence.resume() or not sequence.resize(len(prompt)):
        raise SystemExit("no room: suspend a sequence, or give the cache more gpu_bytes")
    for layer in range(LAYERS):
        for role in ("k", "v"):  # shape (slots, tokens_per_block, kv_heads, head_dim)
            pages = torch.from_dlpack(kv.page_view(layer, role))
            for at in range(sequence.matched_tokens, len(prompt)):
                pages[int(sequence.page_table[at // TOKENS_PER_BLOCK]), at % TOKENS_PER_BLOCK] = prompt[at]
    sequence.commit(prompt[sequence.matched_tokens :])
    return sequence


def main() -> None:
    device = Device.cuda(0) if "cuda" in sys.argv else Device.host(f"engine-{os.getpid()}", 64 * MIB)
    ledger = Ledger(device)
    weights = torch.from_dlpack(ledger.create_region("weights", 8 * MIB)).view(torch.float32).fill_(0.5)
    kv = ledger.create_kv_manager(LAYERS, KV_HEADS, HEAD_DIM, "float32", TOKENS_PER_BLOCK, gpu_bytes=16 * MIB)
    prompt = list(range(100))
    prefill(kv, prompt).close()  # its full blocks stay, for whoever has the same prefix
    slept = transition(ledger, "sleep", restore={"weights": "pinned", "kv_cache": "pinned"})
    print(f"asleep: {slept['freed_bytes'] // MIB} MiB given back, {device.memory_info()[0] // MIB} MiB free")
    transition(ledger, "wake")
    print(
        f"awake: weights whole: {bool((weights == 0.5).all())}, known prefix: {kv.probe('tenant-1', prompt)}"
    )


if __name__ == "__main__":
    main()
