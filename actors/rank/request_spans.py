"""Requests inside the model as spans: from the leader's door to their last event, with counts and nothing of the text."""

from __future__ import annotations

from torpor.actors.messages import FinishReason, GenerateRequest, TokenEvent
from torpor.actors.tracing import Mark, begin


class RequestSpans:
    """Begun at the leader's event loop, ended where the engine's step thread puts its events."""

    def __init__(self) -> None:
        self._marks: dict[str, Mark] = {}  # by request; each call is one step of the dictionary

    def begin(self, request: GenerateRequest) -> None:
        self._marks[request.id] = begin(
            "torpor generate", request.traceparent, attributes={"request": request.id}
        )

    def drop(self, request: str) -> None:
        """It was not let in after all."""
        self._marks.pop(request, None)

    def end(self, last: TokenEvent) -> None:
        """Of one that nobody has begun: nothing."""
        mark = self._marks.pop(last.request, None)
        if mark is None:
            return
        mark.tell(
            {
                "finish_reason": str(last.finish_reason),
                "prompt_tokens": last.prompt_tokens,
                "completion_tokens": last.completion_tokens,
                "cached_tokens": last.cached_tokens,
            }
        )
        if last.finish_reason is FinishReason.ERROR:
            mark.fail()
        mark.end()
