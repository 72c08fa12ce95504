"""The default engine with a tiny Llama of random weights, over real ranks: the whole way below HTTP."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from ranks.torpors import CAPACITY_BYTES, MIB, MakeTorpor, read
from support.engine_host import write_config

from torpor.actors.config import EngineConfig, KvCacheConfig, NodeBudget
from torpor.actors.messages import (
    GenerateRequest,
    Kind,
    OperationRequest,
    OperationState,
    RestoreMode,
    Sampling,
    TokenEvent,
)
from torpor.actors.ports import Inference

PROMPT = tuple(range(3, 43))
CACHE = KvCacheConfig(tokens_per_block=8, gpu_bytes=4 * MIB, host_bytes=4 * MIB)


async def ask(inference: Inference, request: str) -> tuple[tuple[int, ...], TokenEvent]:
    """Greedy tokens of the same prompt, and the last event."""
    sampling = Sampling(max_tokens=24, temperature=0.0)
    wanted = GenerateRequest(request, token_ids=PROMPT, sampling=sampling)
    events = await read(inference, wanted)
    return tuple(token for event in events for token in event.token_ids), events[-1]


@pytest.mark.parametrize("ranks", [1, 3])
async def test_the_same_tokens_come_after_a_sleep_and_the_prefix_lives_as_the_mode_says(
    make_torpor: MakeTorpor, tmp_path: Path, ranks: int
) -> None:
    """K1, K3, M1, F11, over one rank and over three tensor-parallel ones."""
    engine = EngineConfig(model=str(write_config(tmp_path)), load_format="dummy")
    torpor = await make_torpor(
        ranks=ranks,
        engine=engine,
        kv_cache=CACHE,
        adapt=lambda config: replace(config, node=NodeBudget(disk_path=str(tmp_path))),
    ).loaded()
    inference = torpor.cluster.inference
    tokens, last = await ask(inference, "first")
    assert len(tokens) == 24 and last.cached_tokens == 0
    again, last = await ask(inference, "second")
    assert again == tokens
    cached = last.cached_tokens
    assert cached >= 32
    awake = [torpor.free_bytes(rank) for rank in range(ranks)]
    assert max(awake) <= CAPACITY_BYTES - 4 * MIB

    held = [status.prefix_tokens for status in (await torpor.view()).ranks]
    assert held == [held[0]] * ranks and held[0] >= cached
    kept, disk, lost = RestoreMode.PINNED, RestoreMode.DISK, RestoreMode.NONE
    for mode, weights, cached_after in ((kept, kept, cached), (disk, disk, cached), (lost, kept, 0)):
        restore = {"kv_cache": mode, "weights": weights}
        request = OperationRequest(Kind.SLEEP, "toy", restore=restore, verify=True)
        operation = await torpor.control.wait((await torpor.control.submit(request)).id, 60)
        assert operation.state is OperationState.SUCCEEDED, operation
        freed = [rank.freed_bytes for rank in operation.ranks]
        asleep = [torpor.free_bytes(rank) for rank in range(ranks)]
        assert [before + size for before, size in zip(awake, freed, strict=True)] == asleep
        assert min(freed) >= 4 * MIB
        assert operation.prefix_tokens_lost == (0 if mode.preserves else held[0])
        on_disk = [
            sum(int(str(row["disk_bytes"])) for row in status.memory)
            for status in (await torpor.view()).ranks
        ]
        assert all(size > 0 for size in on_disk) == (mode is disk), "unlinked files, that no listing shows"
        operation = await torpor.wake()
        assert operation.state is OperationState.SUCCEEDED, operation
        assert [torpor.free_bytes(rank) for rank in range(ranks)] == awake
        after, last = await ask(inference, f"after {mode}")
        assert after == tokens
        assert last.cached_tokens == cached_after


async def test_a_model_file_that_is_missing_fails_the_load_in_words(
    make_torpor: MakeTorpor, tmp_path: Path
) -> None:
    missing = EngineConfig(model=str(tmp_path / "nothing.gguf"))
    torpor = make_torpor(engine=missing)
    view = await torpor.until(lambda view: bool(view.error), 60)
    assert "nothing.gguf" in view.error
