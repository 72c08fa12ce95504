"""What becomes of a tag's contents when a sleep names no mode: as the model is configured, whatever the tag."""

from __future__ import annotations

from dataclasses import replace

from ranks.bench import make_bench, sleep, spec, wake
from ranks.toys import WEIGHTS_BYTES

from torpor.actors.messages import RestoreMode


async def test_the_configured_mode_of_each_tag_counts_where_a_sleep_names_none(device_name: str) -> None:
    """The contract's defaults: the model's configuration can set others, of the weights as of the KV cache."""
    model = spec(device_name).model
    configured = {"weights": RestoreMode.NONE, "kv_cache": RestoreMode.CPU, "nobody_has_it": RestoreMode.CPU}
    bench = await make_bench(device_name, model=replace(model, restore_modes=configured))
    reply = await bench.whole(sleep(), "as configured")
    assert reply.modes == {"weights": "none", "kv_cache": "cpu"}
    await bench.whole(wake(), "up")
    assert (await bench.status()).undefined_tags == ("weights",)
    reply = await bench.whole(sleep("weights", weights=RestoreMode.PINNED), "as asked")
    assert (reply.modes, reply.kept_bytes) == ({"weights": "pinned"}, WEIGHTS_BYTES)
    await bench.core.close()
