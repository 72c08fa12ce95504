"""`Client`: the service from Python, over HTTP."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import httpx

from torpor.service.client.calls import (
    DEFAULT_TIMEOUT_S,
    DEFAULT_URL,
    Call,
    ChatAnswer,
    chat_answer,
    chat_call,
    operation_call,
    unreachable,
)
from torpor.service.client.errors import problem_error


class Client:
    """Blocking. Raises ConnectionFailed, or a ProblemError of the class that the status stands for."""

    def __init__(
        self,
        url: str = DEFAULT_URL,
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        self.url = url
        self._http = httpx.Client(base_url=url, timeout=timeout_s, transport=transport)

    def sleep(
        self,
        model: str | None = None,
        *,
        tags: Sequence[str] | None = None,
        restore: Mapping[str, str] | None = None,
        drain: Mapping[str, Any] | None = None,
        timeout_s: float | None = None,
        dry_run: bool | None = None,
        on_conflict: str | None = None,
        verify: bool | None = None,
        wait: bool = True,
        idempotency_key: str | None = None,
        generation: int | None = None,
    ) -> dict[str, Any]:
        """The operation's record, finished (with wait) or begun. drain: {"mode", "timeout_s"}."""
        fields = {
            "tags": tags,
            "restore": restore,
            "drain": drain,
            "timeout_s": timeout_s,
            "dry_run": dry_run,
        }
        fields |= {"on_conflict": on_conflict, "verify": verify}
        return self._send(
            operation_call(
                "sleep", model, wait=wait, idempotency_key=idempotency_key, generation=generation, **fields
            )
        )

    def wake(
        self,
        model: str | None = None,
        *,
        tags: Sequence[str] | None = None,
        timeout_s: float | None = None,
        dry_run: bool | None = None,
        on_conflict: str | None = None,
        verify: bool | None = None,
        wait: bool = True,
        idempotency_key: str | None = None,
        generation: int | None = None,
    ) -> dict[str, Any]:
        fields = {"tags": tags, "timeout_s": timeout_s, "dry_run": dry_run}
        fields |= {"on_conflict": on_conflict, "verify": verify}
        return self._send(
            operation_call(
                "wake", model, wait=wait, idempotency_key=idempotency_key, generation=generation, **fields
            )
        )

    def models(self) -> list[dict[str, Any]]:
        return list(self._send(Call("GET", "/models"))["models"])

    def model(self, name: str) -> dict[str, Any]:
        return self._send(Call("GET", f"/models/{name}"))

    def operations(self, model: str | None = None, limit: int = 100) -> list[dict[str, Any]]:
        """Newest first."""
        query = {"limit": limit} | ({"model": model} if model is not None else {})
        return list(self._send(Call("GET", "/operations", query=query))["operations"])

    def operation(self, operation_id: str) -> dict[str, Any]:
        return self._send(Call("GET", f"/operations/{operation_id}"))

    def cancel(self, operation_id: str) -> dict[str, Any]:
        return self._send(Call("POST", f"/operations/{operation_id}/cancel"))

    def chat(self, model: str, messages: str | Sequence[Mapping[str, Any]], **fields: Any) -> ChatAnswer:
        """fields: temperature, max_tokens, seed, cache_salt, … as of /v1/chat/completions, not streamed."""
        return chat_answer(self._send(chat_call(model, messages, fields)))

    def close(self) -> None:
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _send(self, call: Call) -> dict[str, Any]:
        try:
            response = self._http.request(
                call.method, call.path, json=call.body, headers=dict(call.headers), params=dict(call.query)
            )
        except httpx.TransportError as error:
            raise unreachable(self.url, error) from None
        if response.is_error:
            raise problem_error(response)
        body: dict[str, Any] = response.json()
        return body
