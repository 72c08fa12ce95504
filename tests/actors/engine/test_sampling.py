"""What a request may ask of its tokens: their probabilities, biases, penalties, and when the text ends."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from support.engine_host import EngineHost, Oracle, dummy_spec, write_config

from torpor.actors.engine import InvalidPrompt
from torpor.actors.engine.protocol import PromptTooLong
from torpor.actors.engine.sampling import Likeliest, Sampler
from torpor.actors.messages import FinishReason, Sampling

PROMPT = [65, 12, 90, 33, 7, 250, 18, 44, 101]


def test_logprobs_are_the_full_forwards_and_do_not_change_the_text(host: EngineHost, oracle: Oracle) -> None:
    said = host.tell(PROMPT, max_tokens=6, logprobs=3)
    assert said.tokens == oracle.greedy(PROMPT, 6)
    told = [one for event in said.events for one in event.logprobs]
    assert [one.token_id for one in told] == said.tokens
    expected = torch.log_softmax(oracle.logits([*PROMPT, *said.tokens[:-1]])[len(PROMPT) - 1 :], dim=-1)
    for row, one in zip(expected, told, strict=True):
        assert math.isclose(one.logprob, float(row[one.token_id]), abs_tol=1e-4)
        likeliest = torch.topk(row, 3)
        assert [other.token_id for other in one.top] == likeliest.indices.tolist()
        torch.testing.assert_close(
            torch.tensor([other.logprob for other in one.top]), likeliest.values, atol=1e-4, rtol=0
        )
        assert one.text == bytes([one.token_id] if one.token_id < 256 else []).decode(errors="replace")


def test_logprobs_of_none_beside_the_chosen_token_and_none_at_all(host: EngineHost) -> None:
    alone = host.tell(PROMPT, max_tokens=2, logprobs=0)
    assert [len(event.logprobs) for event in alone.events] == [1, 1]
    assert all(one.top == () for event in alone.events for one in event.logprobs)
    plain = host.tell(PROMPT, max_tokens=2)
    assert all(event.logprobs == () for event in plain.events)


def test_a_bias_brings_a_token_or_keeps_it_away(host: EngineHost, oracle: Oracle) -> None:
    first = oracle.greedy(PROMPT, 1)[0]
    assert host.tell(PROMPT, max_tokens=3, logit_bias=((77, 100.0),)).tokens == [77] * 3
    assert first not in host.tell(PROMPT, max_tokens=8, logit_bias=((first, -100.0),)).tokens


def test_penalties_keep_tokens_from_coming_again() -> None:
    """By the formula that OpenAI documents: logit - count * frequency - (count > 0) * presence."""
    logits = torch.tensor([2.0, 1.5, 0.0])
    often = Sampler(Sampling(temperature=0.0, frequency_penalty=0.3), 0)
    output: list[int] = []
    for _ in range(4):
        output.append(often.choose(logits, output).token_id)
    assert output == [0, 0, 1, 0]  # 2.0, 1.7, then 1.4 < 1.5, then 1.4 > 1.2
    once = Sampler(Sampling(temperature=0.0, presence_penalty=0.6), 0)
    output = []
    for _ in range(4):
        output.append(once.choose(logits, output).token_id)
    assert output == [0, 1, 0, 0]  # 2.0, then 1.5 > 1.4, then both are lowered once for all
    assert logits.tolist() == [2.0, 1.5, 0.0]  # the model's own are not written to


def test_top_k_leaves_the_likeliest_alone() -> None:
    logits = torch.tensor([0.0, 3.0, 2.0, -1.0])
    drawn = {Sampler(Sampling(temperature=5.0, top_k=2), seed).choose(logits).token_id for seed in range(200)}
    assert drawn == {1, 2}


def test_a_stop_token_ends_the_text_but_not_before_the_least_length(host: EngineHost, oracle: Oracle) -> None:
    expected = oracle.greedy(PROMPT, 12)
    stop = expected[3]
    ended = host.tell(PROMPT, max_tokens=12, stop_token_ids=(stop,))
    assert ended.tokens == expected[: expected.index(stop) + 1]
    assert ended.last.finish_reason is FinishReason.STOP
    longer = host.tell(PROMPT, max_tokens=12, min_tokens=8, stop_token_ids=(stop,))
    assert len(longer.tokens) >= 8
    assert stop not in longer.tokens[:8]


def test_the_models_own_end_can_be_ignored(tmp_path: Path, oracle: Oracle) -> None:
    expected = oracle.greedy(PROMPT, 12)
    with EngineHost(dummy_spec(write_config(tmp_path, eos_token_id=expected[4]))) as host:
        assert len(host.tell(PROMPT, max_tokens=12).tokens) < 12
        said = host.tell(PROMPT, max_tokens=12, ignore_eos=True)
    assert (said.tokens, said.last.finish_reason) == (expected, FinishReason.LENGTH)


@pytest.mark.parametrize(
    ("sampling", "says"),
    [
        ({"logprobs": 21}, "between 0 and 20"),
        ({"top_k": -1}, "top_k"),
        ({"frequency_penalty": 2.5}, "frequency_penalty is 2.5"),
        ({"presence_penalty": -3.0}, "presence_penalty"),
        ({"logit_bias": ((320, 1.0),)}, "vocabulary of 320"),
        ({"logit_bias": ((1, 101.0),)}, "between -100.0 and 100.0"),
        ({"stop_token_ids": (-1,)}, "vocabulary of 320"),
    ],
)
def test_what_means_nothing_is_refused(host: EngineHost, sampling: dict[str, object], says: str) -> None:
    with pytest.raises(InvalidPrompt, match=says):
        host.ask(PROMPT, **sampling)
    assert host.engine.running() == 0


def test_too_long_a_text_is_told_from_other_refusals(host: EngineHost) -> None:
    with pytest.raises(PromptTooLong, match="exceed the 512 tokens"):
        host.ask(PROMPT, max_tokens=600)


def test_rows_are_searched_at_once_only_for_those_who_want_the_likeliest_token_and_nothing_else() -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0], [5.0, 1.0, 2.0]])
    likeliest = Likeliest(logits)
    greedy = Sampler(Sampling(temperature=0.0), seed=0)
    assert [likeliest[row] for row in (0, 1)] == [greedy.choose(row).token_id for row in logits] == [1, 0]
    assert greedy.is_greedy
    for other in (
        Sampling(temperature=0.5),
        Sampling(temperature=0.0, logprobs=0),
        Sampling(temperature=0.0, frequency_penalty=0.1),
        Sampling(temperature=0.0, presence_penalty=-0.1),
        Sampling(temperature=0.0, logit_bias=((1, 1.0),)),
        Sampling(temperature=0.0, min_tokens=2),
    ):
        assert not Sampler(other, seed=0, ends=[1]).is_greedy
