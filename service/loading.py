"""Tells whoever started the service how its models come up."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from torpor.actors.config import ClusterConfig
from torpor.actors.messages import ModelState
from torpor.actors.ports import Control, ControlUnreachable

_POLL_S = 0.25
_ON_THE_WAY = (ModelState.LOADING, ModelState.RECOVERING)  # a rank that dies while it loads is replaced


async def tell_states(control: Control, say: Callable[[str], None]) -> bool:
    """Of a cluster that was there before: what its models are now. True, for none of it ends a front end."""
    try:
        for view in await control.models():
            say(f"{view.name}: {view.state}")
    except ControlUnreachable as error:
        say(f"which models there are is not known yet: {error}")
    return True


async def until_loaded(control: Control, config: ClusterConfig, say: Callable[[str], None]) -> bool:
    """Tells of progress; True when every model is loaded, False when one has failed."""
    told: dict[str, str] = {}
    while True:
        try:
            views = await control.models(detail=True)
        except ControlUnreachable as error:  # e.g. its journal cannot be used
            say(f"nothing can be loaded: {error}")
            return False
        for view in views:
            ready = sum(status.loaded for status in view.ranks)
            news = f"{view.name}: {view.state}, {ready} of {view.tensor_parallel} rank(s) loaded"
            if view.state is ModelState.FAILED:
                reason = view.error or next(
                    (rank.error for rank in view.ranks if rank.error), "no reason given"
                )
                say(f"{view.name}: loading failed: {reason}{_load_hint(reason)}")
                return False
            if told.get(view.name) != news:
                told[view.name] = news
                say(news)
        if len(views) == len(config.models) and all(view.state not in _ON_THE_WAY for view in views):
            return True
        await asyncio.sleep(_POLL_S)


# What a person can change when loading ends with such an error.
_LOAD_HINTS = {
    "OutOfDeviceMemory": (
        "lower kv_cache.gpu_bytes, raise device.host_capacity, use more ranks, or, where models share a device, let "
        "idle ones give way to those that load or wake: gate.make_room: idle"
    ),
    "OutOfHostMemory": "lower kv_cache.host_bytes or host_pool.bytes, or raise node.host_bytes",
}


def _load_hint(reason: str) -> str:
    return next((f". What helps: {hint}" for error, hint in _LOAD_HINTS.items() if error in reason), "")
