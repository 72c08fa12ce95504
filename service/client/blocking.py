"""`Client`: the service from Python, over HTTP."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import httpx

from torpor.service.client.asleep import DEFAULT_LEASE_S, Freed, LeaseThread
from torpor.service.client.blocking_operations import Operations
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

if TYPE_CHECKING:
    from torpor.service.client.from_ray import RayClient


class Client(Operations):
    """Blocking. Raises ConnectionFailed, or a ProblemError of the class that the status stands for."""

    def __init__(
        self,
        url: str = DEFAULT_URL,
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        token: str | None = None,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        """token: None = that of the environment, TORPOR_TOKEN, if any."""
        self.url = url
        self._timeout_s = timeout_s
        try:
            self._http = httpx.Client(base_url=url, headers=standing_headers(token), transport=transport)
        except httpx.InvalidURL as error:
            raise unreachable(url, error) from None

    @staticmethod
    def from_ray(namespace: str = "torpor", address: str = "auto") -> RayClient:
        """For a program in the Ray cluster itself, which can hand tensors over. Raises ConnectionFailed."""
        # Here, not above: Ray takes seconds to import, and HTTP clients need none of it.
        from torpor.service.client.from_ray import RayClient

        return RayClient(namespace, address)

    def events(self, model: str | None = None, last_event_id: str | None = None) -> Iterator[Event]:
        """As they happen, until the service ends. last_event_id: first what has come since that one."""
        call, reader = events_call(model, last_event_id), EventReader()
        try:
            with self._http.stream(
                call.method, call.path, headers=dict(call.headers), params=dict(call.query), timeout=QUIET_S
            ) as response:
                if response.is_error:
                    response.read()
                    raise problem_error(response)
                for line in response.iter_lines():
                    if (event := reader.feed(line)) is not None:
                        yield event
        except UNSENT as error:
            raise unreachable(self.url, error) from None

    def models(self) -> list[dict[str, Any]]:
        return list(self._send(Call("GET", "/models"))["models"])

    def model(self, name: str) -> dict[str, Any]:
        return self._send(Call("GET", path_of("models", name)))

    def operations(self, model: str | None = None, limit: int = 100) -> list[dict[str, Any]]:
        """Newest first."""
        query = {"limit": limit} | ({"model": model} if model is not None else {})
        return list(self._send(Call("GET", "/operations", query=query))["operations"])

    def operation(self, operation_id: str) -> dict[str, Any]:
        return self._send(Call("GET", path_of("operations", operation_id)))

    def audit(self, limit: int = 100) -> list[dict[str, Any]]:
        """Who has changed what, newest first; for administrators."""
        return list(self._send(Call("GET", "/audit", query={"limit": limit}))["audit"])

    def cancel(self, operation_id: str) -> dict[str, Any]:
        return self._send(Call("POST", path_of("operations", operation_id, "cancel")))

    def trim(self, model: str, target_bytes: int = 0) -> dict[str, Any]:
        """Have each rank give back host memory that it keeps for speed alone, until this much is left."""
        body = {"target_bytes": target_bytes}
        return self._send(Call("POST", path_of("models", model, "trim"), body))

    def renew(self, operation_id: str) -> dict[str, Any]:
        """Renew the lease of the hold that this sleep is. Rejected when it holds no lease any more."""
        return self._send(Call("POST", path_of("operations", operation_id, "renew")), RENEW_TIMEOUT_S)

    @contextmanager
    def asleep(
        self,
        model: str | None = None,
        *,
        tags: Sequence[str] | None = None,
        restore: Mapping[str, str] | None = None,
        lease_s: float = DEFAULT_LEASE_S,
        on_expiry: str = "keep",
        **fields: Any,
    ) -> Iterator[Freed]:
        """Asleep for the length of the block: the memory is the caller's, and no request wakes the model.

        Yields what was freed, in bytes by device. The end of the block ends this hold alone: the model wakes, with all
        its tags, when nobody else holds it. A thread renews the lease;
        when this process dies, `on_expiry` comes about at most lease_s later: keep (asleep, still held) or wake.
        fields: as of `sleep`.
        """
        fields = {"on_conflict": "wait"} | fields
        record = self.sleep(model, tags=tags, restore=restore, lease_s=lease_s, on_expiry=on_expiry, **fields)
        freed = Freed.by(record)
        lease = LeaseThread(freed, lease_s, lambda: self.renew(record["id"]))
        try:
            yield freed
        finally:
            lease.end()
            self.wake(record["model"], releases=record["id"], on_conflict="wait")

    def chat(self, model: str, messages: str | Sequence[Mapping[str, Any]], **fields: Any) -> ChatAnswer:
        """fields: temperature, max_tokens, seed, cache_salt, … as of /v1/chat/completions, not streamed."""
        return chat_answer(self._send(chat_call(model, messages, fields)))

    def complete(
        self, model: str, prompt: str | Sequence[int] | Sequence[str], **fields: Any
    ) -> dict[str, Any]:
        """The whole answer to a prompt, a text or token ids; fields: as of /v1/completions, not streamed."""
        body = {"model": model, "prompt": prompt, **fields}
        return self._send(Call("POST", "/v1/completions", body))

    def close(self) -> None:
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _send(self, call: Call, timeout_s: float | None = None) -> dict[str, Any]:
        try:
            response = self._http.request(
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
