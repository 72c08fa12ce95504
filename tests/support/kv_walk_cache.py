"""The caches of the random walk (kv_walk.py), and what it knows of a sequence."""

from __future__ import annotations

from dataclasses import dataclass

from torpor.native import Buffer, KvManager, LayerSpec, Ledger, Sequence

BLOCK, WINDOW, SINKS = 4, 6, 3
GRANULE_BYTES = 64 << 10
CAPACITY_BYTES = 32 * GRANULE_BYTES
FULL, SLIDING, STATE = 0, 1, 2

Prefix = tuple[str, tuple[int, ...]]


def stale(block: int, history: int) -> bool:
    return block >= -(-SINKS // BLOCK) and history > WINDOW and block < (history - WINDOW) // BLOCK


def make_cache(ledger: Ledger, kind: str, seed: int) -> KvManager:
    """kind: roomy, tight, or partial: as tight, without a state, and it matches inside of blocks."""
    layers = [
        LayerSpec("full", [Buffer("k", [256], "float32"), Buffer("v", [256], "float32")]),
        LayerSpec("window", [Buffer("k", [512], "float32")], window=WINDOW, sinks=SINKS),
        LayerSpec("state", [Buffer("ssm", [1024], "float32")]),
    ]
    granules = 16 if kind == "roomy" else 2  # of 8 slots, of each kind of page
    return ledger.create_kv_cache(
        layers[:2] if kind == "partial" else layers,
        BLOCK,
        (granules + 1) * GRANULE_BYTES,
        0 if kind == "roomy" else 2 * GRANULE_BYTES,
        sequence_tokens=32,
        max_sequence_tokens=64,
        max_gpu_bytes=(granules + 8) * GRANULE_BYTES,
        partial_blocks=kind == "partial",
        event_count=256,
        seed=seed,
    )


@dataclass
class Walker:
    real: Sequence
    scope: str
    tokens: list[int]
    epoch: int
    kept: set[int]  # blocks of the window with a page of their own that is not scratch
    has_pages: bool
    values: list[float]  # by token: what its rows hold
    active: bool = False
    sound_from: int = 0  # rows before it were lost to a discard
    state_sound: bool = True
