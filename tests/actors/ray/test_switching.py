"""Two models want the one place on a device: idle ones give way to those that are asked (F23, G3, G6, make_room)."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from ranks.front_doors import patient
from ranks.torpors import CAPACITY_BYTES, MakeTorpor, request
from ranks.toys import KV_BYTES, WEIGHTS_BYTES

from torpor.actors.config import ClusterConfig, GateConfig
from torpor.actors.messages import Kind, OperationRequest, OperationState, Origin
from torpor.native import Device, Ledger

ALL_BYTES = WEIGHTS_BYTES + KV_BYTES
NAMES = ("one", "two")


def giving_way(config: ClusterConfig) -> ClusterConfig:
    gate = GateConfig(make_room="idle", queue_timeout_s=600.0)
    return replace(config, models=tuple(replace(model, gate=gate) for model in config.models))


async def switch(make_torpor: MakeTorpor, clients: int, switches: int) -> None:
    """Each client asks both models in turn until they have been woken so often for it."""
    torpor = await make_torpor(models=NAMES, adapt=giving_way).loaded()
    for name in NAMES:  # either may be the one that fits
        idle = OperationRequest(Kind.SLEEP, name, origin=Origin.IDLENESS)
        assert (await torpor.control.wait((await torpor.control.submit(idle)).id)).state == "succeeded"
    # Another process, as far as the ranks can tell, leaves room for one and a half.
    ledger = Ledger(Device.host(torpor.device_name(0), CAPACITY_BYTES))
    region = ledger.create_region("other", CAPACITY_BYTES - ALL_BYTES - ALL_BYTES // 2)
    front_ends = [patient(torpor) for _ in range(2)]

    enough = asyncio.Event()

    async def count() -> None:
        woken = 0
        while woken < switches:
            await asyncio.sleep(0.5)
            operations = await torpor.control.operations(None, 10_000)
            assert not [one for one in operations if one.state is OperationState.FAILED]
            woken = sum(one.kind is Kind.WAKE and one.state is OperationState.SUCCEEDED for one in operations)
        enough.set()

    async def ask(client: int) -> None:
        turn = client
        while not enough.is_set():
            turn += 1
            name = NAMES[turn % 2]
            async with asyncio.timeout(600):
                events = [
                    event async for event in front_ends[client % 2].generate(name, request(5, f"{client}"))
                ]
            assert "".join(event.text for event in events) == "xxxxx"

    await asyncio.gather(count(), *(ask(client) for client in range(clients)))
    assert torpor.free_bytes(0) == ALL_BYTES // 2, "one of them is awake, the other has left nothing behind"
    for front_end in front_ends:
        await front_end.close()
    del region


async def test_models_of_which_one_fits_all_load_and_are_answered(make_torpor: MakeTorpor) -> None:
    """Each loads when those before it are idle, which sleep for it as they do for a wake."""

    def crowded(config: ClusterConfig) -> ClusterConfig:
        device = replace(config.device, host_capacity_bytes=ALL_BYTES + ALL_BYTES // 2)
        return replace(giving_way(config), device=device)

    names = ("one", "two", "three")
    torpor = await make_torpor(models=names, adapt=crowded).loaded()
    states = [view.state for view in await torpor.control.models()]
    assert sorted(states) == ["asleep", "asleep", "awake"]
    front_end = patient(torpor)
    for name in (*names, *names):
        async with asyncio.timeout(120):
            events = [event async for event in front_end.generate(name, request(5, name))]
        assert "".join(event.text for event in events) == "xxxxx"
    await front_end.close()


async def test_two_models_take_turns_on_a_device_and_all_are_answered(make_torpor: MakeTorpor) -> None:
    await switch(make_torpor, clients=16, switches=5)


@pytest.mark.long
@pytest.mark.timeout(1200)
async def test_two_models_take_200_turns_on_a_device_for_64_clients(make_torpor: MakeTorpor) -> None:
    await switch(make_torpor, clients=64, switches=200)
