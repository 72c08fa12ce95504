"""From tokens to text: whole characters, stop strings, samplers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch
from support.engine_host import EngineHost, Oracle

from torpor.actors.engine.detokenizer import IncrementalDetokenizer, StopStrings
from torpor.actors.engine.protocol import InvalidPrompt
from torpor.actors.engine.sampling import Sampler
from torpor.actors.engine.tokenizer import ByteTokenizer
from torpor.actors.messages import FinishReason, Sampling

TEXT = "Grüße, 世界 🙂👩‍👩‍👧 e\u0301nd"


def test_characters_of_several_tokens_come_out_whole_and_in_order() -> None:
    tokenizer = ByteTokenizer(256)
    detokenizer = IncrementalDetokenizer(tokenizer)
    pieces = [detokenizer.add(token) for token in tokenizer.encode(TEXT)]
    assert "".join(pieces) == TEXT
    assert all("\ufffd" not in piece for piece in pieces)
    assert detokenizer.flush() == ""


def test_an_unfinished_character_comes_out_at_the_end_only() -> None:
    detokenizer = IncrementalDetokenizer(ByteTokenizer(256))
    assert [detokenizer.add(token) for token in "a🙂".encode()[:-1]] == ["a", "", "", ""]
    assert detokenizer.flush() == "\ufffd"
    assert detokenizer.flush() == ""


class SpaceDropping:
    """Like SentencePiece: the first token of a text loses its leading space."""

    def encode(self, text: str) -> list[int]:
        raise NotImplementedError

    def encode_messages(self, messages: Sequence[Mapping[str, object]]) -> list[int]:
        raise NotImplementedError

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join(f" word{token}" for token in token_ids)[1:]


def test_the_space_between_prompt_and_text_survives() -> None:
    detokenizer = IncrementalDetokenizer(SpaceDropping(), prompt=[1, 2, 3])
    assert [detokenizer.add(4), detokenizer.add(5)] == [" word4", " word5"]


@pytest.mark.parametrize(
    ("pieces", "stops", "given", "stopped"),
    [
        (["hello ", "wor", "ld"], ("world",), ["hello ", "", ""], True),
        (["a", "b", "c"], ("bd",), ["a", "", "bc"], False),
        (["aaa", "ab"], ("aab",), ["a", "a"], True),
        (["one STOP two"], ("STOP", "one S"), [""], True),
        (["xy"], (), ["xy"], False),
        (["12", "3", "4"], ("34", "2345"), ["1", "", "2"], True),
    ],
)
def test_nothing_of_a_stop_string_is_ever_given_out(
    pieces: list[str], stops: tuple[str, ...], given: list[str], stopped: bool
) -> None:
    held = StopStrings(stops)
    assert [held.add(piece) for piece in pieces] == given
    assert held.stopped is stopped


def test_text_held_back_for_a_stop_string_comes_out_when_the_request_ends(
    host: EngineHost, oracle: Oracle
) -> None:
    plain = host.tell([65] * 9, max_tokens=16).text
    held = host.tell([65] * 9, max_tokens=16, stop=(plain[-2:] + "never",))
    assert held.text == plain
    assert held.last.finish_reason is FinishReason.LENGTH


def test_a_request_stops_before_its_stop_string(host: EngineHost) -> None:
    plain = host.tell([65] * 9, max_tokens=40)
    stop = plain.text[6:9]
    said = host.tell([65] * 9, max_tokens=40, stop=(stop,))
    assert said.text == plain.text[: plain.text.index(stop)]
    assert said.last.finish_reason is FinishReason.STOP
    assert said.last.completion_tokens < 40
    assert said.tokens == plain.tokens[: len(said.tokens)]


def test_temperature_0_is_greedy_and_top_p_cuts_the_tail() -> None:
    logits = torch.tensor([0.0, 3.0, 2.0, -1.0])
    assert Sampler(Sampling(temperature=0.0), 1).choose(logits).token_id == 1
    assert {
        Sampler(Sampling(temperature=1.0, top_p=0.5), seed).choose(logits).token_id for seed in range(200)
    } == {1}
    assert {
        Sampler(Sampling(temperature=1.0, top_p=0.9), seed).choose(logits).token_id for seed in range(200)
    } == {
        1,
        2,
    }
    assert Sampler(Sampling(temperature=1e-9), 3).choose(logits).token_id == 1


def test_samples_follow_the_distribution() -> None:
    probabilities = torch.tensor([0.5, 0.25, 0.15, 0.1])
    sampler = Sampler(Sampling(temperature=1.0), 11)
    drawn = torch.bincount(
        torch.tensor([sampler.choose(probabilities.log()).token_id for _ in range(4000)]), minlength=4
    )
    torch.testing.assert_close(drawn / 4000, probabilities, atol=0.03, rtol=0)


def test_messages_without_a_tokenizer_become_plain_turns_and_bad_ones_are_refused(host: EngineHost) -> None:
    said = host.tell(messages=({"role": "user", "content": "hi"},), max_tokens=2)
    assert said.last.prompt_tokens == len("user: hi\nassistant: ")
    for messages, says in [((), "empty"), (({"content": "x"},), "no role"), (({"role": "user"},), "no text")]:
        with pytest.raises(InvalidPrompt, match=says):
            host.ask(messages=messages)


def test_a_prompt_of_text_is_encoded(host: EngineHost, tiny: Path) -> None:
    assert host.tell("né", max_tokens=1).last.prompt_tokens == 3
