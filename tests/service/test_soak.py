"""Many clients at once while a model sleeps and wakes: every request ends as it should, and nothing is left behind."""

from __future__ import annotations

import asyncio
import gc
import os
import time
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from service_rig import Rig, make_rig
from support.kept_rows import keep_row

from torpor.actors.messages import FinishReason
from torpor.service.limits.bounds import Bounds

CLIENTS = 64
LEAST_CYCLES = 3
# All of them ask from one address, as fast as they can.
UNBOUND = Bounds(requests_per_s=None)
BODY = {"model": "chat", "prompt": "go on", "max_tokens": 3, "temperature": 0}


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    async with make_rig(tmp_path, {"chat": 1}, bounds=UNBOUND) as made:
        yield made


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


async def client(http: httpx.AsyncClient, number: int, until_s: float, ends: Counter[str]) -> None:
    """Whole and streamed answers in turn; a closed gate is no loss, silence and half an answer are."""
    while time.monotonic() < until_s:
        streams = (number := number + 1) % 2 == 0
        answer = await http.post("/v1/completions", json=BODY | {"stream": streams})
        if answer.status_code == 503:
            assert answer.json()["code"] == "gate_closed", answer.text
            assert answer.headers["retry-after"]
            ends["refused"] += 1
            await asyncio.sleep(0.02)
        elif streams:
            assert answer.text.rstrip().endswith("data: [DONE]"), answer.text
            ends["streamed"] += f'"finish_reason":"{FinishReason.STOP}"' in answer.text
        else:
            assert answer.json()["choices"][0]["text"] == "Paris.", answer.text
            ends["whole"] += 1


async def sleeper(http: httpx.AsyncClient, until_s: float) -> int:
    """Until then, and a few times at least however slow the machine is."""
    cycles = 0
    while time.monotonic() < until_s or cycles < LEAST_CYCLES:
        await asyncio.sleep(0.1)
        (await http.post("/sleep", json={"model": "chat"})).raise_for_status()
        await asyncio.sleep(0.05)
        (await http.post("/wake", json={"model": "chat"})).raise_for_status()
        cycles += 1
    return cycles


async def soak(rig: Rig, seconds: float) -> tuple[Counter[str], int]:
    ends: Counter[str] = Counter()
    until_s = time.monotonic() + seconds
    clients = [client(rig.http, number, until_s, ends) for number in range(CLIENTS)]
    cycles, *_ = await asyncio.gather(sleeper(rig.http, until_s), *clients)
    return ends, cycles


async def measured(rig: Rig, warm_s: float, seconds: float) -> tuple[Counter[str], int, int]:
    """After a while that fills what is kept on purpose: how requests ended, cycles, and bytes that came to stay."""
    await soak(rig, warm_s)
    rig.inference.seen.clear()
    gc.collect()
    tasks, files, before = len(asyncio.all_tasks()), open_files(), resident_bytes()
    ends, cycles = await soak(rig, seconds)
    answered = ends["whole"] + ends["streamed"]
    # Some are refused before they reach the model's door, some wait there and come again: none is answered without.
    assert answered <= len({one.id for one in rig.inference.seen}) <= sum(ends.values())
    assert rig.inference.running == set()
    assert rig.inference.closed == [], "no answer was cut off"
    assert answered > 0
    assert ends["refused"] > 0, "no request came while it slept: nothing was tested"
    assert cycles >= LEAST_CYCLES
    rig.inference.seen.clear()
    rig.log.truncate(rig.log.seek(0))
    gc.collect()
    assert len(asyncio.all_tasks()) <= tasks + 1, asyncio.all_tasks()
    assert open_files() <= files
    return ends, cycles, resident_bytes() - before


async def test_64_clients_lose_no_request_and_leave_nothing_while_a_model_sleeps_and_wakes(rig: Rig) -> None:
    """G3, M2: six seconds of it."""
    _, _, grown_bytes = await measured(rig, 1.0, 4.0)
    assert grown_bytes < 64 << 20


@pytest.mark.long
@pytest.mark.timeout(900)
async def test_nor_in_ten_minutes(rig: Rig) -> None:
    """G3, M2."""
    ends, cycles, grown_bytes = await measured(rig, 20.0, 600.0)
    answered = ends["whole"] + ends["streamed"]
    row: dict[str, object] = {
        "clients": CLIENTS,
        "seconds": 600,
        "answered": answered,
        "refused": ends["refused"],
    }
    row |= {"cycles": cycles, "lost": 0, "grown_mib": round(grown_bytes / (1 << 20), 1)}
    keep_row("soak", ("clients", "seconds"), row, "the front door over ranks in memory, in one process")
    assert grown_bytes < 256 << 20
