"""The requests of the OpenAI surface, and the engine requests that they become."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator

from torpor.actors.messages import GenerateRequest, Sampling
from torpor.service.auth.roles import LOCAL, Caller
from torpor.service.bodies import dotted, most_telling
from torpor.service.problems import Code, Problem

MAX_CHOICES = 16
COMPLETION_MAX_TOKENS = 16  # what OpenAI's completions take when a request names none
# Fields that would change the answer in a way that this version cannot, with the values that ask for nothing.
UNSUPPORTED: Mapping[str, tuple[object, ...]] = {
    "tools": (None, []),
    "functions": (None, []),
    "response_format": (None, {"type": "text"}),
    "suffix": (None, ""),
}
LIKELIEST = 20  # what `top_logprobs` may be at most
Penalty = Annotated[float, Field(ge=-2, le=2)]


def _has_bool(value: object) -> bool:
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return isinstance(value, bool) or any(_has_bool(part) for part in parts)


def _types_in(annotation: Any) -> set[Any]:
    """int of `dict[str, Annotated[int, …]] | None`, say."""
    parts = get_args(annotation)
    return {annotation}.union(*(_types_in(part) for part in parts)) if parts else {annotation}


class StreamOptions(BaseModel):
    include_usage: bool = False


class _Generation(BaseModel):
    model_config = ConfigDict(extra="allow")
    model: str
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    seed: int | None = None
    stop: str | Annotated[list[str], Field(max_length=16)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache_salt: str | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    logit_bias: dict[int, Annotated[float, Field(ge=-100, le=100)]] | None = None
    # What other engines' clients and load generators send beyond OpenAI's own.
    top_k: Annotated[int, Field(ge=-1)] | None = None  # -1 and 0: of all tokens
    min_tokens: Annotated[int, Field(ge=0)] = 0
    ignore_eos: bool = False
    stop_token_ids: Annotated[list[int], Field(max_length=16)] | None = None
    return_token_ids: bool = False  # also give each choice's token ids
    rid: Annotated[str, Field(min_length=1, max_length=128)] | None = None  # the answer's id, to abort it by

    @field_validator("*", mode="before")
    @classmethod
    def _no_truth_for_a_number(cls, value: object, info: ValidationInfo) -> object:
        """To Python and pydantic, true is 1. Only completions' `logprobs` may be it: some send it as to chats."""
        name = str(info.field_name)
        types = _types_in(cls.model_fields[name].annotation)
        if types & {int, float} and bool not in types and name != "logprobs" and _has_bool(value):
            raise ValueError("Input should be a number, not true or false")
        return value

    @property
    def choices_per_prompt(self) -> int:
        return self.n or 1

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def ignored(self) -> list[str]:
        return sorted(set(self.model_extra or {}) - set(UNSUPPORTED))

    @property
    def likeliest(self) -> int | None:
        """Of how many tokens in each place the logprobs are wanted, beside the chosen one's; None: of none."""
        return None

    def sampling(self, choice: int, max_tokens: int | None) -> Sampling:
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        return Sampling(
            max_tokens=max_tokens,
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            # One seed for several choices would give the same answer several times.
            seed=None if self.seed is None else self.seed + choice,
            stop=tuple(text for text in stop if text),
            top_k=max(self.top_k or 0, 0),
            stop_token_ids=tuple(self.stop_token_ids or ()),
            ignore_eos=self.ignore_eos,
            min_tokens=self.min_tokens,
            frequency_penalty=self.frequency_penalty or 0.0,
            presence_penalty=self.presence_penalty or 0.0,
            logit_bias=tuple((self.logit_bias or {}).items()),
            logprobs=self.likeliest,
        )


class TextPart(BaseModel):
    type: str
    text: str | None = None


class Message(BaseModel):
    role: str
    content: str | list[TextPart] | None = None


class ChatBody(_Generation):
    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=LIKELIEST)] | None = None

    @property
    def likeliest(self) -> int | None:
        return self.top_logprobs or 0 if self.logprobs else None

    def refuse(self) -> None:
        if self.top_logprobs and not self.logprobs:
            raise _unsupported("`top_logprobs` without `logprobs`", "Set `logprobs` to true.", "top_logprobs")

    def echoes(self) -> list[str]:
        return []

    def requests(self, new_id: Callable[[], str], caller: Caller = LOCAL) -> list[GenerateRequest]:
        messages = tuple(
            {"role": one.role, "content": _text(one, at)} for at, one in enumerate(self.messages)
        )
        limit = self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens
        return [
            GenerateRequest(
                id=new_id(),
                messages=messages,
                sampling=self.sampling(choice, limit),
                scope=caller.prefix_scope(self.cache_salt or ""),
            )
            for choice in range(self.choices_per_prompt)
        ]


class CompletionBody(_Generation):
    prompt: str | list[int] | list[str] | list[list[int]]
    logprobs: Annotated[int, Field(ge=0, le=LIKELIEST)] | None = None
    echo: bool | None = None
    best_of: int | None = None

    @property
    def likeliest(self) -> int | None:
        return self.logprobs

    def refuse(self) -> None:
        if self.best_of not in (None, self.choices_per_prompt):
            raise _unsupported("`best_of` beyond `n`", "Leave it out.", "best_of")
        if self.echo and self.logprobs is not None:
            raise _unsupported("`echo` with `logprobs`", "Leave one of them out.", "echo")
        if self.echo and not all(isinstance(prompt, str) for prompt in _prompts(self.prompt)):
            raise _unsupported("`echo` of a prompt of token ids", "Send the prompt as text.", "echo")

    def echoes(self) -> list[str]:
        """What each choice's text begins with; none: with nothing."""
        if not self.echo:
            return []
        return [str(prompt) for prompt in _prompts(self.prompt) for _ in range(self.choices_per_prompt)]

    def requests(self, new_id: Callable[[], str], caller: Caller = LOCAL) -> list[GenerateRequest]:
        limit = COMPLETION_MAX_TOKENS if self.max_tokens is None else self.max_tokens
        made = []
        scope = caller.prefix_scope(self.cache_salt or "")
        for prompt in _prompts(self.prompt):
            for choice in range(self.choices_per_prompt):
                asked = {"prompt": prompt} if isinstance(prompt, str) else {"token_ids": tuple(prompt)}
                sampling = self.sampling(choice, limit)
                made.append(GenerateRequest(id=new_id(), sampling=sampling, scope=scope, **asked))
        if len(made) > MAX_CHOICES:
            detail = f"prompts times `n` is {len(made)}; at most {MAX_CHOICES} in one request."
            raise Problem(400, Code.INVALID_REQUEST, detail, hint="Send several requests.", param="n")
        return made


BodyT = TypeVar("BodyT", ChatBody, CompletionBody)


def parse_generation(shape: type[BodyT], tree: dict[str, Any] | None) -> BodyT:
    """Unknown fields are kept as `ignored`; fields that would change the answer are refused by name."""
    for name, neutral in UNSUPPORTED.items():
        value = (tree or {}).get(name)
        if not any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in neutral):
            raise _unsupported(f"`{name}`", "Leave it out.", name)
    try:
        body = shape.model_validate(tree or {})
    except ValidationError as error:
        fault = most_telling(error.errors())
        where = dotted(fault["loc"])
        missing = fault["type"] == "missing"
        hint = f"Set `{where}`." if missing else f"Correct `{where}`."
        raise Problem(400, Code.INVALID_REQUEST, f"{where}: {fault['msg']}", hint=hint, param=where) from None
    body.refuse()
    return body


def _unsupported(what: str, hint: str, param: str) -> Problem:
    detail = f"{what} is not supported by this version."
    return Problem(400, Code.UNSUPPORTED_PARAMETER, detail, hint=hint, param=param)


def _prompts(prompt: str | list[int] | list[str] | list[list[int]]) -> list[str | list[int]]:
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise Problem(400, Code.INVALID_REQUEST, "`prompt` is empty.", hint="Send a text.", param="prompt")
    if isinstance(prompt[0], int):
        return [[int(token) for token in prompt]]
    return [one if isinstance(one, str) else [int(token) for token in one] for one in prompt]


def _text(message: Message, at: int) -> str:
    if not isinstance(message.content, list):
        return message.content or ""
    for part in message.content:
        if part.type != "text":
            detail = f"messages.{at}.content has a part of type {part.type!r}; this model reads text only."
            raise Problem(400, Code.UNSUPPORTED_PARAMETER, detail, hint="Send text parts.", param="messages")
    return "".join(part.text or "" for part in message.content)
