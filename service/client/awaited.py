"""`AsyncClient`: the calls of `Client`, to be awaited."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Any, Self

import httpx

from torpor.service.client.asleep import DEFAULT_LEASE_S, Freed, keep_lease
from torpor.service.client.awaited_operations import AwaitedOperations
from torpor.service.client.calls import (
    DEFAULT_TIMEOUT_S,
    DEFAULT_URL,
    RENEW_TIMEOUT_S,
    UNSENT,
    Call,
    ChatAnswer,
    answer_of,
    chat_answer,
    chat_call,
    path_of,
    standing_headers,
    unreachable,
)
from torpor.service.client.errors import problem_error
from torpor.service.client.events import QUIET_S, Event, EventReader, events_call


class AsyncClient(AwaitedOperations):
    """To be awaited. Raises ConnectionFailed, or a ProblemError of the class that the status stands for."""

    def __init__(
        self,
        url: str = DEFAULT_URL,
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        token: str | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        """token: None = that of the environment, TORPOR_TOKEN, if any."""
        self.url = url
        self._timeout_s = timeout_s
        try:
            self._http = httpx.AsyncClient(base_url=url, headers=standing_headers(token), transport=transport)
        except httpx.InvalidURL as error:
            raise unreachable(url, error) from None

    async def events(
        self, model: str | None = None, last_event_id: str | None = None
    ) -> AsyncIterator[Event]:
        """As they happen, until the service ends. last_event_id: first what has come since that one."""
        call, reader = events_call(model, last_event_id), EventReader()
        try:
            async with self._http.stream(
                call.method, call.path, headers=dict(call.headers), params=dict(call.query), timeout=QUIET_S
            ) as response:
                if response.is_error:
                    await response.aread()
                    raise problem_error(response)
                async for line in response.aiter_lines():
                    if (event := reader.feed(line)) is not None:
                        yield event
        except UNSENT as error:
            raise unreachable(self.url, error) from None

    async def models(self) -> list[dict[str, Any]]:
        return list((await self._send(Call("GET", "/models")))["models"])

    async def model(self, name: str) -> dict[str, Any]:
        return await self._send(Call("GET", path_of("models", name)))

    async def operations(self, model: str | None = None, limit: int = 100) -> list[dict[str, Any]]:
        """Newest first."""
        query = {"limit": limit} | ({"model": model} if model is not None else {})
        return list((await self._send(Call("GET", "/operations", query=query)))["operations"])

    async def operation(self, operation_id: str) -> dict[str, Any]:
        return await self._send(Call("GET", path_of("operations", operation_id)))

    async def audit(self, limit: int = 100) -> list[dict[str, Any]]:
        """Who has changed what, newest first; for administrators."""
        return list((await self._send(Call("GET", "/audit", query={"limit": limit})))["audit"])

    async def cancel(self, operation_id: str) -> dict[str, Any]:
        return await self._send(Call("POST", path_of("operations", operation_id, "cancel")))

    async def trim(self, model: str, target_bytes: int = 0) -> dict[str, Any]:
        """Have each rank give back host memory that it keeps for speed alone, until this much is left."""
        body = {"target_bytes": target_bytes}
        return await self._send(Call("POST", path_of("models", model, "trim"), body))

    async def renew(self, operation_id: str) -> dict[str, Any]:
        """Renew the lease of the hold that this sleep is. Rejected when it holds no lease any more."""
        return await self._send(Call("POST", path_of("operations", operation_id, "renew")), RENEW_TIMEOUT_S)

    @asynccontextmanager
    async def asleep(
        self,
        model: str | None = None,
        *,
        tags: Sequence[str] | None = None,
        restore: Mapping[str, str] | None = None,
        lease_s: float = DEFAULT_LEASE_S,
        on_expiry: str = "keep",
        **fields: Any,
    ) -> AsyncIterator[Freed]:
        """Asleep for the length of the block, as of `Client.asleep`; a task of this event loop renews the lease."""
        fields = {"on_conflict": "wait"} | fields
        record = await self.sleep(
            model, tags=tags, restore=restore, lease_s=lease_s, on_expiry=on_expiry, **fields
        )
        freed = Freed.by(record)
        keeping = asyncio.create_task(keep_lease(freed, lease_s, lambda: self.renew(record["id"])))
        try:
            yield freed
        finally:
            keeping.cancel()
            await asyncio.gather(keeping, return_exceptions=True)
            await self.wake(record["model"], releases=record["id"], on_conflict="wait")

    async def chat(
        self, model: str, messages: str | Sequence[Mapping[str, Any]], **fields: Any
    ) -> ChatAnswer:
        """fields: temperature, max_tokens, seed, cache_salt, … as of /v1/chat/completions, not streamed."""
        return chat_answer(await self._send(chat_call(model, messages, fields)))

    async def complete(
        self, model: str, prompt: str | Sequence[int] | Sequence[str], **fields: Any
    ) -> dict[str, Any]:
        """The whole answer to a prompt, a text or token ids; fields: as of /v1/completions, not streamed."""
        body = {"model": model, "prompt": prompt, **fields}
        return await self._send(Call("POST", "/v1/completions", body))

    async def close(self) -> None:
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _send(self, call: Call, timeout_s: float | None = None) -> dict[str, Any]:
        try:
            response = await self._http.request(
                call.method,
                call.path,
                json=call.body,
                headers=dict(call.headers),
                params=dict(call.query),
                timeout=self._timeout_s if timeout_s is None else timeout_s,
            )
        except UNSENT as error:
            raise unreachable(self.url, error) from None
        return answer_of(self.url, response)
