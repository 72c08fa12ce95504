"""Each promised metric moves when what it tells of happens; those of memory over real ledgers in this process."""

from __future__ import annotations

import asyncio
import io
import re
from dataclasses import replace
from pathlib import Path

import httpx
from prometheus_client.parser import text_string_to_metric_families
from service_fakes import MemoryInference
from service_native_rig import caching_model, native_rig
from service_rig import GATE, Rig, app_over, client_of, config_of, make_rig
from test_access import FILE, bearer

from torpor.service.metrics import Metrics

LABELS = {
    *("model", "rank", "device", "tag", "tier", "phase", "outcome"),  # the documented ones
    *("kind", "state", "result", "reason", "limit", "le"),  # words of closed lists
}


class Scrape(dict[str, float]):
    """Samples by name and labels' values, the model's first, then by the labels' names: `model_state chat awake`."""

    def of(self, key: str) -> float:
        return self.get(f"torpor_{key}", 0.0)


async def scrape(http: httpx.AsyncClient, **headers: str) -> Scrape:
    answer = await http.get("/metrics", headers=headers)
    assert answer.status_code == 200
    found = Scrape()
    for family in text_string_to_metric_families(answer.text):
        for sample in family.samples:
            assert sample.name.startswith("torpor_"), sample
            assert set(sample.labels) <= LABELS, sample
            labels = sorted(sample.labels.items(), key=lambda one: (one[0] != "model", one[0]))
            values = [value for name, value in labels if value and name not in ("device", "le")]
            found[" ".join([sample.name, *values])] = sample.value
            for value in sample.labels.values():
                assert not re.search(r"op-|incarnation|[0-9a-f]{32}", value), f"an id is a label: {sample}"
    return found


async def test_memory_phases_bytes_and_prefixes_move_with_a_sleep_and_a_wake(tmp_path: Path) -> None:
    async with native_rig(tmp_path, caching_model()) as rig:
        asked = {"model": "toy", "prompt": "x"}
        before = await scrape(rig.http)
        free = rig.free_bytes()
        assert before.of("device_free_bytes toy 0") == free
        assert before.of("memory_bytes toy 0 weights device") == 2 << 20
        assert before.of("prefix_tokens toy 0") > 0
        assert (await rig.http.post("/v1/completions", json=asked)).status_code == 200
        slept = (await rig.http.post("/sleep", json={"restore": {"kv_cache": "pinned"}})).json()
        asleep = await scrape(rig.http)
        # The device's own numbers, and not the books alone.
        assert asleep.of("device_free_bytes toy 0") == rig.free_bytes() > free
        assert asleep.of("memory_bytes toy 0 weights device") == 0
        assert asleep.of("memory_bytes toy 0 weights host") == 2 << 20
        kept = sum(asleep.of(f"memory_bytes toy 0 {tag} host") for tag in ("weights", "kv_cache"))
        assert kept == slept["ranks"][0]["kept_bytes"] > 2 << 20
        assert [asleep.of(f"model_state toy {state}") for state in ("awake", "asleep")] == [0, 1]
        assert (asleep.of("gate_open toy"), asleep.of("model_held toy")) == (0, 1)
        assert asleep.of("operations_total toy sleep succeeded") == 1
        assert asleep.of("operation_duration_seconds_count toy sleep succeeded") == 1
        for phase in slept["phases"]:
            where = f"toy sleep {phase['name']}"
            assert asleep.of(f"operation_phase_duration_seconds_count {where}") == 1
            seconds = asleep.of(f"operation_phase_duration_seconds_sum {where}")
            assert abs(seconds - phase["seconds"]) < 1e-9
            assert asleep.of(f"phase_bytes_total {where}") == phase["bytes"]
        assert asleep.of("phase_bytes_total toy sleep stage") > 2 << 20
        assert asleep.of("admissions_total toy admitted") == 1
        assert (asleep.of("prompt_tokens_total toy"), asleep.of("prefix_hit_tokens_total toy")) == (9, 7)
        assert asleep.of("prefix_lookups_total toy hit") == 1
        assert asleep.of("completion_tokens_total toy") == 3
        await rig.http.post("/wake")
        awake = await scrape(rig.http)
        assert awake.of("device_free_bytes toy 0") == free
        assert awake.of("memory_bytes toy 0 weights device") == 2 << 20
        assert [awake.of(f"model_state toy {state}") for state in ("awake", "asleep")] == [1, 0]
        assert (awake.of("gate_open toy"), awake.of("model_held toy")) == (1, 0)
        assert awake.of("operations_total toy wake succeeded") == 1
        assert awake.of("phase_bytes_total toy wake stage") > 2 << 20


async def test_the_queue_s_length_and_waits_are_told(tmp_path: Path) -> None:
    async with make_rig(tmp_path, {"chat": 1}, gate=replace(GATE, when_closed="queue")) as rig:
        await rig.http.post("/sleep")
        asking = asyncio.create_task(rig.http.post("/v1/completions", json={"model": "chat", "prompt": "x"}))
        await asyncio.sleep(0.1)
        assert (await scrape(rig.http)).of("queue_length chat") == 1
        await rig.http.post("/wake")
        assert (await asking).status_code == 200
        after = await scrape(rig.http)
    assert (after.of("queue_length chat"), after.of("open_requests chat")) == (0, 0)
    assert after.of("queue_wait_seconds_count chat") == 1
    assert 0.1 <= after.of("queue_wait_seconds_sum chat") < 5


async def test_ranks_that_came_after_others_are_counted(tmp_path: Path) -> None:
    async with make_rig(tmp_path, {"chat": 2}, making=True) as rig:
        before = await scrape(rig.http)
        assert before["torpor_rank_restarts_total chat 1"] == 0  # there from the start, for rates to begin at
        assert before.of("rank_up chat 1") == 1
        await rig.coordinator.fail("chat", "rank 1 is gone")
        assert (await scrape(rig.http)).of("model_state chat failed") == 1
        assert (await rig.http.post("/models/chat/recover")).status_code == 200
        after = await scrape(rig.http)
    assert [after.of(f"rank_restarts_total chat {rank}") for rank in (0, 1)] == [1, 1]
    assert after.of("operations_total chat recover succeeded") == 1
    assert after.of("coordinator_epoch") >= 1


async def test_the_version_of_the_weights_is_told(rig: Rig) -> None:
    metrics = Metrics()
    for version in (0, 3):
        view = replace(await rig.coordinator.model("chat"), weights_version=version)
        metrics.show_models([view])
        assert f'torpor_weights_version{{model="chat"}} {version}.0' in metrics.text().decode()


async def test_a_front_end_that_begins_anew_does_not_count_what_was_before_it(rig: Rig) -> None:
    """A counter that begins at what another has counted would be taken for so much more."""
    await rig.http.post("/sleep")
    log, config = io.StringIO(), config_of({"chat": 1}, Path("unused"))
    app = app_over(rig.coordinator, MemoryInference(), config, log)
    async with client_of(app) as http:
        assert (await scrape(http)).of("operations_total chat sleep succeeded") == 0
        await http.post("/wake")
        assert (await scrape(http)).of("operations_total chat wake succeeded") == 1
    assert (await scrape(rig.http)).of("operations_total chat sleep succeeded") == 1


async def test_a_tokens_file_that_cannot_be_used_is_told(tmp_path: Path) -> None:
    async with make_rig(tmp_path, {"chat": 1}, tokens=FILE) as rig:
        assert (await scrape(rig.http, **bearer("viewer"))).of("tokens_file_broken") == 0
        (tmp_path / "tokens").write_text("broken")
        await asyncio.sleep(1.1)
        assert (await scrape(rig.http, **bearer("viewer"))).of("tokens_file_broken") == 1
