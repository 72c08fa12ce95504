"""From a stream of tokens to a stream of text: whole characters only, and nothing of a stop string."""

from __future__ import annotations

from collections.abc import Sequence

from torpor.actors.engine.tokenizer import Tokenizer

REPLACEMENT = "\ufffd"
CONTEXT_TOKENS = 6  # of the prompt: some tokenizers drop the space of a text's first token
MAX_PENDING_TOKENS = 16  # a longer run of undecodable bytes is given out as it is


class IncrementalDetokenizer:
    """Text of the newest tokens, once it can no longer change.

    A tokenizer's text for a token depends on its neighbours, so each step decodes a short window twice: with and
    without the new tokens. The difference is the new text.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._window = list(prompt[-CONTEXT_TOKENS:])
        self._given = len(self._window)  # tokens at the head of the window whose text has been given out

    def add(self, token_id: int) -> str:
        self._window.append(token_id)
        before = self._tokenizer.decode(self._window[: self._given])
        after = self._tokenizer.decode(self._window)
        pending = len(self._window) - self._given
        if after.endswith(REPLACEMENT) and pending < MAX_PENDING_TOKENS:
            return ""
        self._window = self._window[self._given :]
        self._given = len(self._window)
        return after[len(before) :]

    def alone(self, token_id: int) -> str:
        """A token's text without its neighbours; U+FFFD where it is but a part of a character."""
        return self._tokenizer.decode([token_id])

    def flush(self) -> str:
        """What is still pending, incomplete characters as U+FFFD."""
        before = self._tokenizer.decode(self._window[: self._given])
        after = self._tokenizer.decode(self._window)
        self._given = len(self._window)
        return after[len(before) :]


class StopStrings:
    """Holds back text that may become a stop string, and cuts at the first one that does."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.stopped = False

    def add(self, text: str) -> str:
        """Text that is safe to give out. Sets `stopped` when a stop string was met."""
        if self.stopped:
            return ""
        self._held += text
        found = [at for at in (self._held.find(stop) for stop in self._stops) if at >= 0]
        if found:
            self.stopped = True
            safe, self._held = self._held[: min(found)], ""
            return safe
        keep = self._longest_beginning()
        cut = len(self._held) - keep
        safe, self._held = self._held[:cut], self._held[cut:]
        return safe

    def flush(self) -> str:
        held, self._held = self._held, ""
        return held

    def _longest_beginning(self) -> int:
        """Length of the longest end of the held text that begins some stop string."""
        longest = max((len(stop) for stop in self._stops), default=0)
        for length in range(min(longest - 1, len(self._held)), 0, -1):
            if any(stop.startswith(self._held[-length:]) for stop in self._stops):
                return length
        return 0
