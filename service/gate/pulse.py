"""Whether a model answers: by a token of a probe's, or by one that somebody else gets meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Protocol

from torpor.actors.messages import FinishReason, GenerateRequest, Sampling, TokenEvent
from torpor.actors.ports import GateClosed, InvalidRequest, QueueFull

# One token of any vocabulary, as text that no tokenizer has to read; what ends a text ends no probe.
PROMPT = (0,)
ONE_TOKEN = Sampling(max_tokens=1, temperature=0.0, ignore_eos=True)


class Mute(Exception):
    """It has said nothing; the text says why."""


class Pulse:
    """Tells when a model has said something, to anybody of this front end."""

    def __init__(self) -> None:
        self._next: dict[str, asyncio.Future[None]] = {}

    def beat(self, model: str) -> None:
        """A token has come."""
        coming = self._next.pop(model, None)
        if coming is not None and not coming.done():
            coming.set_result(None)

    async def wait(self, model: str) -> None:
        """For the next one."""
        coming = self._next.get(model)
        if coming is None:
            coming = self._next[model] = asyncio.get_running_loop().create_future()
        await asyncio.shield(coming)


class Probed(Protocol):
    def generate(self, model: str, request: GenerateRequest) -> AsyncGenerator[TokenEvent, None]: ...

    @property
    def pulse(self) -> Pulse: ...


async def make_token(inference: Probed, model: str, request_id: str, timeout_s: float) -> None:
    """Return once the model has made a token. Raises Mute, and GateClosed where nobody is let in.

    A model with much to do shows by its other requests' tokens that it lives: the probe's turn is not waited for.
    """
    asking = asyncio.ensure_future(_ask(inference, model, request_id))
    beating = asyncio.ensure_future(inference.pulse.wait(model))
    try:
        async with asyncio.timeout(timeout_s):
            await asyncio.wait((asking, beating), return_when=asyncio.FIRST_COMPLETED)
            if not beating.done() and not asking.result():
                await beating  # as many requests are inside as may be
    except TimeoutError:
        raise Mute(f"it made no token within {timeout_s:g} s") from None
    finally:
        for task in (asking, beating):
            task.cancel()
        await asyncio.gather(asking, beating, return_exceptions=True)


async def _ask(inference: Probed, model: str, request_id: str) -> bool:
    """False: there is no room for it."""
    request = GenerateRequest(request_id, token_ids=PROMPT, sampling=ONE_TOKEN, probe=True)
    try:
        async with aclosing(inference.generate(model, request)) as events:
            async for event in events:
                if event.finish_reason in (FinishReason.ERROR, FinishReason.ABORT):
                    raise Mute(event.error or "its generation was ended")
                if not event.silent:
                    return True
    except QueueFull:
        return False
    except InvalidRequest as error:
        raise Mute(str(error)) from None
    except KeyError:
        raise GateClosed("deleted", f"there is no model {model!r} any more") from None
    raise Mute("its stream ended without a token")
