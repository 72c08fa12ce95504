"""The words of inference: a request, what became of it at the gate, and its events. Nothing here does anything."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torpor.actors.messages import GateReason


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Sampling:
    max_tokens: int | None = None  # None: what the context leaves (bounded by the engine)
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # of the likeliest tokens; 0: of all
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()  # end the text as the model's own end does
    ignore_eos: bool = False
    min_tokens: int = 0  # before that, nothing that ends the text is chosen
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, what is added to its logit)
    logprobs: int | None = None  # of the chosen token and so many of the likeliest; None: of none


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """Exactly one of prompt, token_ids, messages. scope: whose prefixes may be shared (K: security boundary).

    probe: it is to show whether the model answers; it keeps none from being idle, and is no request to abort.
    """

    id: str
    prompt: str | None = None
    token_ids: tuple[int, ...] | None = None
    messages: tuple[Mapping[str, object], ...] | None = None
    sampling: Sampling = field(default_factory=Sampling)
    scope: str = ""
    traceparent: str = ""  # W3C, of the span beneath which it is traced
    probe: bool = False


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Natural logarithm of a token's probability as the model gave it, before temperature and penalties.

    text: of this token alone; top: the likeliest in its place, likeliest first.
    """

    token_id: int
    text: str
    logprob: float
    top: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """Some new text of one request; the last one has finish_reason set and the counts filled."""

    request: str
    text: str = ""
    token_ids: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    error: str = ""
    logprobs: tuple[TokenLogprob, ...] = ()  # of token_ids, where they were asked for

    @property
    def silent(self) -> bool:
        """It only tells that the request is alive."""
        return not (self.text or self.token_ids or self.finish_reason)


@dataclass(frozen=True, slots=True)
class AbortOrder:
    """Told to a front end: some other one was asked to end requests, and this one's may wait outside the gate.

    request: those whose id is this, or begins with it and a `/`; None: all.
    """

    id: str
    request: str | None


def is_meant(request_id: str, request: str | None) -> bool:
    """Whether an abort of `request` means this one; its id begins with the name that its client knows."""
    return request is None or request_id == request or request_id.startswith(f"{request}/")


class Admission(StrEnum):
    ADMITTED = "admitted"
    CLOSED = "closed"
    INVALID = "invalid"  # `detail` says so
    TOO_LONG = "too_long"  # for the context; `detail` says by how much
    FULL = "full"  # the engine's waiting list is at its bound


@dataclass(frozen=True, slots=True)
class AdmissionReply:
    request: str
    admission: Admission
    gate_reason: GateReason | None = None
    detail: str = ""
