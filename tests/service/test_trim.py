"""POST /models/{model}/trim gives host memory back that is kept for speed alone (M8)."""

from __future__ import annotations

import gc
from pathlib import Path

from service_native_rig import MIB, caching_model, native_rig
from service_rig import Rig

from torpor.actors.config import KvCacheConfig
from torpor.actors.coordinator.memory import Fault


def resident_bytes() -> int:
    """Of this process, as the kernel counts it; what plays the GPU is shared memory, and not among it."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status["RssAnon"].split()[0]) << 10


async def test_what_a_sleep_has_left_for_the_next_one_is_given_back_and_what_sleeps_is_kept(
    tmp_path: Path,
) -> None:
    model = caching_model(kv_cache=KvCacheConfig(host_bytes=4 * MIB))
    async with native_rig(tmp_path, model) as rig:
        contents = rig.engine.contents()
        await rig.http.post("/sleep", json={"restore": {"kv_cache": "cpu"}})
        asleep = await rig.http.post("/models/toy/trim")
        assert (asleep.status_code, asleep.json()["model"]) == (200, "toy")
        assert (await rig.http.post("/wake", json={})).status_code == 200
        assert rig.engine.contents() == contents
        gc.collect()
        before = resident_bytes()
        freed = (await rig.http.post("/models/toy/trim", json={"target_bytes": 0})).json()
        assert freed["freed_bytes"] == sum(rank["freed_bytes"] for rank in freed["ranks"])
        assert freed["freed_bytes"] >= 2 * MIB, "the weights' copy at least"
        assert before - resident_bytes() > freed["freed_bytes"] // 2
        assert (await rig.http.post("/models/toy/trim")).json()["freed_bytes"] == 0
        await rig.http.post("/sleep", json={"restore": {"kv_cache": "cpu"}})
        assert (await rig.http.post("/wake", json={})).status_code == 200
        assert rig.engine.contents() == contents


async def test_every_rank_goes_on_keeping_what_is_named(wide_rig: Rig) -> None:
    for rank, spare in enumerate((10, 4, 7)):
        wide_rig.rank(rank=rank).spare_host_bytes = spare
    answer = await wide_rig.http.post("/models/chat/trim", json={"target_bytes": 5})
    assert answer.json() == {
        "model": "chat",
        "freed_bytes": 7,
        "ranks": [{"rank": rank, "freed_bytes": freed, "error": ""} for rank, freed in enumerate((5, 0, 2))],
    }
    assert (await wide_rig.http.get("/operations")).json()["operations"] == []


async def test_a_rank_that_does_not_answer_is_named_and_the_others_trim_all_the_same(wide_rig: Rig) -> None:
    for rank in range(3):
        wide_rig.rank(rank=rank).spare_host_bytes = 10
    wide_rig.rank(rank=1).die()
    answer = await wide_rig.http.post("/models/chat/trim")
    assert (answer.status_code, answer.json()["code"]) == (409, "rank_failed")
    assert "rank 1" in answer.json()["detail"] and "20 bytes were given back" in answer.json()["detail"]
    assert [bool(rank["error"]) for rank in answer.json()["ranks"]] == [False, True, False]


async def test_a_wrong_trim_is_refused(rig: Rig) -> None:
    rig.rank().fault("status", Fault.RAISE)
    for body, status in (({"target_bytes": -1}, 422), ({"target_bytes": "all"}, 422), ({"bytes": 1}, 422)):
        assert (await rig.http.post("/models/chat/trim", json=body)).status_code == status
    unknown = await rig.http.post("/models/nobody/trim")
    assert (unknown.status_code, unknown.json()["known_models"]) == (404, ["chat"])
