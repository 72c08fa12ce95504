"""The tokens file while the service runs: read again when it changes, such as a mounted Secret does."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from structlog.typing import FilteringBoundLogger

from torpor.service.auth.roles import Caller
from torpor.service.auth.tokens import Tokens, TokensError, parse_tokens

LOOK_EVERY_S = 1.0  # a token that was taken out is refused after so long
_MOST_BYTES = 1 << 20


class TokensFile:
    """What it holds now. A change that cannot be used leaves the tokens as they were, and says so.

    It is read by its contents, not by its time and place: a Secret is a link to a link that is swapped, and two
    writes may fall into one tick of a file system's clock.
    """

    def __init__(
        self, path: Path, logger: FilteringBoundLogger, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Raises TokensError."""
        self._path = path
        self._logger = logger
        self._clock = clock
        self._raw = _read(path)
        self._tokens = _parsed(self._raw, path)
        self._looked_s = clock()
        self.fault = ""  # why what is there now is not in force

    def find(self, token: str) -> Caller | None:
        self.look()
        return self._tokens.find(token)

    def look(self) -> None:
        """Read it again, if that is some time ago."""
        now_s = self._clock()
        if now_s - self._looked_s < LOOK_EVERY_S:
            return
        self._looked_s = now_s
        try:
            raw = _read(self._path)
            tokens = self._tokens if raw == self._raw else _parsed(raw, self._path)
        except TokensError as error:
            if self.fault != str(error):
                self.fault = str(error)
                self._logger.error("the tokens stay as they were: their file is unusable", fault=self.fault)
            return
        if self.fault or raw != self._raw:
            names = sorted({caller.name for _, caller in tokens.callers})
            self._logger.info("the tokens file was read again", callers=names)
        self._raw, self._tokens, self.fault = raw, tokens, ""


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            raw = file.read(_MOST_BYTES + 1)
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise TokensError(str(path), [f"cannot be read ({reason}); name a file that can"]) from None
    if len(raw) > _MOST_BYTES:
        raise TokensError(str(path), [f"is larger than {_MOST_BYTES >> 20} MiB; is it the right file?"])
    return raw


def _parsed(raw: bytes, path: Path) -> Tokens:
    try:
        text = raw.decode()
    except UnicodeDecodeError:
        raise TokensError(str(path), ["is not UTF-8 text; write lines as the README shows"]) from None
    return parse_tokens(text, str(path))
