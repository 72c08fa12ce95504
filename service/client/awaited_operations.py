"""What `AsyncClient` can ask of a model, as of blocking_operations.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torpor.service.client.calls import Call, operation_call


class AwaitedOperations:
    """Each answers with the operation's record: finished with `wait`, else as it begins.

    idempotency_key: the same one gives the same operation. generation: refused where the model has changed since.
    """

    async def _send(self, call: Call, timeout_s: float | None = None) -> dict[str, Any]:
        raise NotImplementedError

    async def sleep(
        self,
        model: str | None = None,
        *,
        tags: Sequence[str] | None = None,
        restore: Mapping[str, str] | None = None,
        drain: Mapping[str, Any] | None = None,
        overflow: str | None = None,
        timeout_s: float | None = None,
        dry_run: bool | None = None,
        on_conflict: str | None = None,
        verify: bool | None = None,
        wake_on_request: bool | None = None,
        lease_s: float | None = None,
        on_expiry: str | None = None,
        wait: bool = True,
        idempotency_key: str | None = None,
        generation: int | None = None,
    ) -> dict[str, Any]:
        """The operation's record, finished (with wait) or begun. drain: {"mode", "timeout_s"}.

        overflow "evict": reusable prefixes that find no room are dropped, and `prefix_tokens_lost` says how many.
        It is a hold, unless wake_on_request; with lease_s it wants renewing (`renew`), or `on_expiry` comes about.
        """
        fields = {
            "tags": tags,
            "restore": restore,
            "drain": drain,
            "overflow": overflow,
            "timeout_s": timeout_s,
            "dry_run": dry_run,
        }
        fields |= {"on_conflict": on_conflict, "verify": verify, "wake_on_request": wake_on_request}
        fields |= {"lease_s": lease_s, "on_expiry": on_expiry}
        return await self._send(
            operation_call(
                "sleep", model, wait=wait, idempotency_key=idempotency_key, generation=generation, **fields
            )
        )

    async def wake(
        self,
        model: str | None = None,
        *,
        tags: Sequence[str] | None = None,
        timeout_s: float | None = None,
        dry_run: bool | None = None,
        on_conflict: str | None = None,
        verify: bool | None = None,
        make_room: str | None = None,
        on_discard: str | None = None,
        accept_stale_weights: bool | None = None,
        releases: str | None = None,
        wait: bool = True,
        idempotency_key: str | None = None,
        generation: int | None = None,
    ) -> dict[str, Any]:
        """make_room "idle": neighbours that nobody uses may be put to sleep for it.

        on_discard "reload" or "wait": whether weights without contents are read from their source again, which
        those that were updated since are only with accept_stale_weights. releases: a sleep's operation, whose hold
        alone is ended; the model wakes when nobody else holds it.
        """
        fields = {"tags": tags, "timeout_s": timeout_s, "dry_run": dry_run, "releases": releases}
        fields |= {"on_conflict": on_conflict, "verify": verify, "make_room": make_room}
        fields |= {"on_discard": on_discard, "accept_stale_weights": accept_stale_weights}
        return await self._send(
            operation_call(
                "wake", model, wait=wait, idempotency_key=idempotency_key, generation=generation, **fields
            )
        )

    async def pause(
        self,
        model: str,
        *,
        drain: Mapping[str, Any] | None = None,
        on_conflict: str | None = None,
        timeout_s: float | None = None,
        wait: bool = True,
        idempotency_key: str | None = None,
        generation: int | None = None,
    ) -> dict[str, Any]:
        """Let no request in until an `unpause`; no memory is touched. drain: {"mode", "timeout_s"} of what runs."""
        fields = {"drain": drain, "on_conflict": on_conflict, "timeout_s": timeout_s}
        return await self._send(
            operation_call(
                "pause", model, wait=wait, idempotency_key=idempotency_key, generation=generation, **fields
            )
        )

    async def unpause(
        self,
        model: str,
        *,
        on_conflict: str | None = None,
        timeout_s: float | None = None,
        wait: bool = True,
        idempotency_key: str | None = None,
        generation: int | None = None,
    ) -> dict[str, Any]:
        """Let requests in again, unless something sleeps; what the pause has frozen goes on."""
        fields = {"on_conflict": on_conflict, "timeout_s": timeout_s}
        return await self._send(
            operation_call(
                "unpause", model, wait=wait, idempotency_key=idempotency_key, generation=generation, **fields
            )
        )

    async def recover(
        self,
        model: str,
        *,
        to: str | None = None,
        accept_stale_weights: bool | None = None,
        on_conflict: str | None = None,
        wait: bool = True,
        idempotency_key: str | None = None,
        generation: int | None = None,
    ) -> dict[str, Any]:
        """Replace the ranks of a failed model. to: "awake" or "asleep"; by default as it was last."""
        fields = {"to": to, "accept_stale_weights": accept_stale_weights, "on_conflict": on_conflict}
        return await self._send(
            operation_call(
                "recover", model, wait=wait, idempotency_key=idempotency_key, generation=generation, **fields
            )
        )

    async def delete(
        self,
        model: str,
        *,
        drain: Mapping[str, Any] | None = None,
        on_conflict: str | None = None,
        wait: bool = True,
        idempotency_key: str | None = None,
        generation: int | None = None,
    ) -> dict[str, Any]:
        """End the model and forget it, once what runs has ended. drain: {"mode", "timeout_s"}."""
        fields = {"drain": drain, "on_conflict": on_conflict}
        return await self._send(
            operation_call(
                "delete", model, wait=wait, idempotency_key=idempotency_key, generation=generation, **fields
            )
        )

    async def update_weights(
        self,
        model: str,
        path: str,
        *,
        drain: Mapping[str, Any] | None = None,
        timeout_s: float | None = None,
        dry_run: bool | None = None,
        on_conflict: str | None = None,
        wait: bool = True,
        idempotency_key: str | None = None,
        generation: int | None = None,
    ) -> dict[str, Any]:
        """Write other weights into the model where it lies; the record tells their version.

        path: a safetensors folder or GGUF file of the ranks' nodes, under weights_roots. drain: {"mode", "timeout_s"}.
        """
        fields = {"path": path, "drain": drain, "timeout_s": timeout_s, "dry_run": dry_run}
        fields |= {"on_conflict": on_conflict}
        return await self._send(
            operation_call(
                "update_weights",
                model,
                wait=wait,
                idempotency_key=idempotency_key,
                generation=generation,
                **fields,
            )
        )
