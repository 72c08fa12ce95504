"""The calls of both clients as data, so that both send the same, and read the answers alike."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

import httpx

from torpor.service.client.errors import ClientError, ConnectionFailed, problem_error

TOKEN_VARIABLE = "TORPOR_TOKEN"
DEFAULT_URL = "http://127.0.0.1:8700"
# An operation has deadlines of its own; this only ends a wait for a service that is gone.
DEFAULT_TIMEOUT_S = 600.0
RENEW_TIMEOUT_S = 5.0  # of the renewal of a lease: it is short work, and comes again


@dataclass(frozen=True, slots=True)
class Call:
    method: str
    path: str
    body: Mapping[str, Any] | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    query: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ChatAnswer:
    """`body` is the whole answer. token_ids is empty unless they were asked for."""

    text: str
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    token_ids: tuple[int, ...]
    body: Mapping[str, Any]


def program_name() -> str:
    """What the service shows of whoever holds a model asleep."""
    return f"torpor-client (process {os.getpid()} on {socket.gethostname()})"


def standing_headers(token: str | None, environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Of every request. Raises ClientError for a token that no header can carry, without repeating it."""
    headers = {"User-Agent": program_name()}
    token = environment.get(TOKEN_VARIABLE) if token is None else token
    if token:
        if not (token.isascii() and token.isprintable()) or " " in token:
            raise ClientError(
                "the token has spaces, line ends or other signs that no token has; give it alone"
            )
        headers["Authorization"] = f"Bearer {token}"
    return headers


def path_of(*parts: str) -> str:
    """A path of these parts, whatever is in them: a `?`, a `/` or a `..` must not name something else than was meant."""
    if not all(parts):
        raise ClientError("the name is empty, and names nothing; leave it out where it may be, or give one")
    quoted = (quote(part, safe="") if part.strip(".") else "%2E" * len(part) for part in parts)
    return "".join(f"/{part}" for part in quoted)


def operation_call(
    kind: str,
    model: str | None,
    *,
    wait: bool,
    idempotency_key: str | None,
    generation: int | None,
    **fields: Any,
) -> Call:
    body = {name: value for name, value in fields.items() if value is not None}
    headers = {} if wait else {"Prefer": "respond-async"}
    if idempotency_key is not None:
        headers["Idempotency-Key"] = idempotency_key
    if generation is not None:
        headers["If-Match"] = f'"{generation}"'
    if kind == "delete":
        return Call("DELETE", path_of("models", str(model)), body, headers)
    path = path_of(kind) if model is None else path_of("models", model, kind)
    return Call("POST", path, body, headers)


def chat_call(model: str, messages: str | Sequence[Mapping[str, Any]], fields: Mapping[str, Any]) -> Call:
    talk = [{"role": "user", "content": messages}] if isinstance(messages, str) else list(messages)
    return Call("POST", "/v1/chat/completions", {"model": model, "messages": talk, **fields})


def chat_answer(body: Mapping[str, Any]) -> ChatAnswer:
    choice, usage = body["choices"][0], body["usage"]
    return ChatAnswer(
        text=choice["message"]["content"],
        finish_reason=choice["finish_reason"],
        prompt_tokens=usage["prompt_tokens"],
        completion_tokens=usage["completion_tokens"],
        cached_tokens=usage["prompt_tokens_details"]["cached_tokens"],
        token_ids=tuple(choice.get("token_ids", ())),
        body=body,
    )


def answer_of(url: str, response: httpx.Response) -> dict[str, Any]:
    """The body of a read answer. Raises a ProblemError, or ConnectionFailed where something else answers."""
    if response.is_error:
        raise problem_error(response)
    try:
        body = response.json()
    except ValueError:
        body = None
    if response.is_redirect or not isinstance(body, dict):
        raise ConnectionFailed(f"what answers at {url} is not torpor; is `torpor serve` running there?")
    return body


# What a request fails with that got no answer: nobody there; or an address, a header or a number (infinity) that
# cannot be sent.
UNSENT = (httpx.TransportError, httpx.InvalidURL, ValueError)


def unreachable(url: str, error: Exception) -> ConnectionFailed:
    reason = str(error) or type(error).__name__
    return ConnectionFailed(f"no answer from {url} ({reason}); is `torpor serve` running there?")
