"""Weight updates of three tensor-parallel ranks in processes of their own: from a path, and handed over through Ray."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
import ray
from ranks.torpors import MIB, MakeTorpor, Torpor, read
from safetensors.torch import save_file
from support.engine_host import Oracle, write_config

from torpor.actors.config import Deadlines, EngineConfig, KvCacheConfig
from torpor.actors.messages import (
    GenerateRequest,
    Kind,
    Operation,
    OperationRequest,
    OperationState,
    RejectCode,
    RestoreMode,
    Sampling,
)
from torpor.service import BadRequest, Client

PROMPT = tuple(range(3, 43))
CACHE = KvCacheConfig(tokens_per_block=8, gpu_bytes=4 * MIB, host_bytes=4 * MIB)


async def say(torpor: Torpor, name: str) -> list[int]:
    sampling = Sampling(max_tokens=16, temperature=0.0)
    wanted = GenerateRequest(name, token_ids=PROMPT, sampling=sampling)
    events = await read(torpor.cluster.inference, wanted)
    return [token for event in events for token in event.token_ids]


async def do(torpor: Torpor, request: OperationRequest) -> Operation:
    return await torpor.control.wait((await torpor.control.submit(request)).id, 60)


async def test_three_ranks_take_new_weights_from_a_path_and_from_a_trainer_in_ray(
    make_torpor: MakeTorpor, tmp_path: Path
) -> None:
    """C10, C9, M9: each rank keeps its share, token for token as one that was loaded with them."""
    config = write_config(tmp_path)
    old, first, second = Oracle(config), Oracle(config, seed=7), Oracle(config, seed=8)
    save_file({n: t.clone() for n, t in first.model.named_parameters()}, tmp_path / "model.safetensors")
    torpor = make_torpor(
        ranks=3,
        engine=EngineConfig(model=str(config), load_format="dummy"),
        kv_cache=CACHE,
        adapt=lambda config: replace(config, weights_roots=(str(tmp_path),)),
        deadlines=Deadlines(preflight_s=30, load_s=300),
    )
    await torpor.cluster.wait_until_loaded(300)
    assert await say(torpor, "old") == old.greedy(PROMPT, 16)
    none = {"weights": RestoreMode.NONE}
    slept = await do(torpor, OperationRequest(Kind.SLEEP, "toy", restore=none))
    assert slept.state is OperationState.SUCCEEDED, slept
    woken = await torpor.wake()  # each reads its share of the source again
    assert (woken.state, woken.reloaded_bytes > 0) == (OperationState.SUCCEEDED, True), woken
    assert await say(torpor, "read again") == old.greedy(PROMPT, 16)
    update = OperationRequest(Kind.UPDATE, "toy", ("weights",), weights_path=str(tmp_path))
    done = await do(torpor, update)
    assert (done.state, done.weights_version) == (OperationState.SUCCEEDED, 1), done
    assert await say(torpor, "from a path") == first.greedy(PROMPT, 16)

    client = Client.from_ray(torpor.config.namespace)
    tensors: dict[str, object] = {n: t.detach() for n, t in second.model.named_parameters()}
    name = "model.layers.0.self_attn.q_proj.weight"
    tensors[name] = ray.put(tensors[name])
    missing = {n: t for n, t in tensors.items() if n != "model.norm.weight"}
    with pytest.raises(BadRequest, match=r"missing, the first 'model\.norm\.weight'") as refused:
        await asyncio.to_thread(client.update_weights, "toy", missing)
    assert refused.value.code == "weights_refused"
    assert (
        await do(torpor, OperationRequest(Kind.SLEEP, "toy", restore=none))
    ).state is OperationState.SUCCEEDED
    assert (
        await do(torpor, OperationRequest(Kind.WAKE, "toy", ("weights",)))
    ).state is OperationState.SUCCEEDED
    record = await asyncio.to_thread(client.update_weights, "toy", tensors)
    assert record["weights_version"] == 2
    view = await torpor.view()
    assert (view.parked_tags, [rank.undefined_tags for rank in view.ranks]) == (["kv_cache"], [()] * 3)
    assert (await torpor.wake()).state is OperationState.SUCCEEDED
    assert await say(torpor, "from ray") == second.greedy(PROMPT, 16)

    assert (await torpor.sleep()).state is OperationState.SUCCEEDED  # weights pinned
    assert (await torpor.wake()).state is OperationState.SUCCEEDED
    assert await say(torpor, "later") == second.greedy(PROMPT, 16)
    gone = OperationRequest(
        Kind.UPDATE, "toy", ("weights",), weights_handed=f"{torpor.config.namespace}/nobody"
    )
    done = await do(torpor, gone)
    assert (done.state, done.code) == (OperationState.REJECTED, RejectCode.WEIGHTS_REFUSED)
    assert (await torpor.view()).weights_version == 2
