"""From what a caller asks to a request that the step thread can serve, or a refusal in words."""

from __future__ import annotations

import secrets

from torpor.actors.engine.detokenizer import IncrementalDetokenizer, StopStrings
from torpor.actors.engine.loader import LoadedModel
from torpor.actors.engine.protocol import InvalidPrompt, PromptTooLong
from torpor.actors.engine.request import Request
from torpor.actors.engine.sampling import Sampler, check_sampling, check_token_ids
from torpor.actors.messages import GenerateRequest


def prepare(asked: GenerateRequest, model: LoadedModel, pool_tokens: int | None) -> Request:
    """Tokenise and check; called from any thread. Raises InvalidPrompt.

    pool_tokens: the longest text that fits the KV cache; None: any.
    """
    check_sampling(asked.sampling)
    check_token_ids(asked.sampling, int(model.config.vocab_size))
    prompt = _tokens(asked, model)
    most, bound = min(
        (model.context_tokens, "the model's context"),
        (
            model.context_tokens if pool_tokens is None else pool_tokens,
            "the KV pool (raise kv_cache.gpu_bytes)",
        ),
    )
    left = most - len(prompt)
    wanted = asked.sampling.max_tokens
    if left < 1 or (wanted is not None and wanted > left):
        more = f" and max_tokens {wanted}" if wanted is not None else ""
        raise PromptTooLong(f"the prompt's {len(prompt)} tokens{more} exceed the {most} tokens of {bound}")
    ends = model.eos_token_ids if not asked.sampling.ignore_eos else frozenset[int]()
    ends |= frozenset(asked.sampling.stop_token_ids)
    seed = asked.sampling.seed if asked.sampling.seed is not None else secrets.randbits(63)
    return Request(
        id=asked.id,
        scope=asked.scope,
        prompt=prompt,
        max_tokens=wanted if wanted is not None else left,
        end_token_ids=ends,
        sampler=Sampler(asked.sampling, seed, ends),
        detokenizer=IncrementalDetokenizer(model.tokenizer, prompt),
        stops=StopStrings(asked.sampling.stop),
    )


def _tokens(asked: GenerateRequest, model: LoadedModel) -> tuple[int, ...]:
    given = [part for part in (asked.prompt, asked.token_ids, asked.messages) if part is not None]
    if len(given) != 1:
        raise InvalidPrompt("give exactly one of prompt, token_ids and messages")
    if asked.prompt is not None:
        tokens = tuple(model.tokenizer.encode(asked.prompt))
    elif asked.messages is not None:
        tokens = tuple(model.tokenizer.encode_messages(asked.messages))
    else:
        tokens = tuple(asked.token_ids or ())
    if not tokens:
        raise InvalidPrompt("the prompt is empty; give at least one token")
    vocabulary = int(model.config.vocab_size)
    if min(tokens) < 0 or max(tokens) >= vocabulary:
        wrong = next(token for token in tokens if not 0 <= token < vocabulary)
        raise InvalidPrompt(f"token id {wrong} is not in the model's vocabulary of {vocabulary}")
    return tokens
