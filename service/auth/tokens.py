"""The tokens file: one line a token, strict. A token itself is kept nowhere; only its hash is compared."""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Sequence
from dataclasses import dataclass

from torpor.service.auth.roles import Caller, Role, with_included

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_TOKEN = re.compile(r"[A-Za-z0-9._~+/-]{16,512}={0,2}")  # what a Bearer header can carry
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_SHAPE = "NAME ROLE[,ROLE…] TOKEN"


class TokensError(Exception):
    """The file cannot be used; each problem names its line and what to do, and none of them a token."""

    def __init__(self, source: str, problems: Sequence[str]) -> None:
        super().__init__(f"{source}: " + "; ".join(problems))
        self.problems = tuple(problems)


@dataclass(frozen=True, slots=True)
class Tokens:
    """Callers by the SHA-256 of their tokens."""

    callers: tuple[tuple[bytes, Caller], ...]

    def find(self, token: str) -> Caller | None:
        """In a time that does not tell how near a wrong one comes: all are compared, and hashes only."""
        asked = hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()
        found: Caller | None = None
        for digest, caller in self.callers:
            if hmac.compare_digest(digest, asked):
                found = caller
        return found


def parse_tokens(text: str, source: str) -> Tokens:
    """Lines of NAME ROLE[,ROLE…] TOKEN; a `#` begins a comment at the begin of a line.

    TOKEN may be given as sha256:HEX, its hash. A name may stand in several lines, with the same roles: while a token
    is being replaced, both work. Raises TokensError.
    """
    callers: dict[bytes, Caller] = {}
    lines: dict[bytes, int] = {}
    roles_of: dict[str, tuple[int, frozenset[Role]]] = {}
    problems = []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        try:
            name, roles, digest = _parse_line(words)
            at, known = roles_of.setdefault(name, (number, roles))
            if known != roles:
                raise ValueError(f"{name!r} has other roles than in line {at}; give it the same ones")
            if lines.setdefault(digest, number) != number:
                raise ValueError(
                    f"the token is that of line {lines[digest]}; give each caller one of its own"
                )
        except ValueError as error:
            problems.append(f"line {number}: {error}")
        else:
            callers[digest] = Caller(name, with_included(roles))
    if not callers and not problems:
        problems.append(f"holds no tokens, and nobody could come in; write lines of {_SHAPE}")
    if problems:
        raise TokensError(source, problems)
    return Tokens(tuple(callers.items()))


def _parse_line(words: list[str]) -> tuple[str, frozenset[Role], bytes]:
    """Whatever is wrong, the last words may be a token: none but name and roles are ever repeated."""
    if len(words) != 3:
        raise ValueError(f"has {len(words)} words, not 3; write {_SHAPE}, without spaces in any of them")
    name, listed, token = words
    if not _NAME.fullmatch(name):
        raise ValueError("the name may have letters, digits, `.`, `_`, `-`, and 64 of them; correct it")
    known = {role.value: role for role in Role}
    names = listed.split(",")
    if any(one not in known for one in names):
        raise ValueError(f"the second word is no list of roles; known roles: {', '.join(known)}")
    roles = frozenset(known[one] for one in names)
    if token.startswith("sha256:"):
        if not _DIGEST.fullmatch(token):
            raise ValueError("after `sha256:` 64 small hexadecimal digits must come; `sha256sum` writes them")
        return name, roles, bytes.fromhex(token.removeprefix("sha256:"))
    if not _TOKEN.fullmatch(token):
        raise ValueError(
            "the token must have 16 to 512 letters, digits or `-._~+/`; `openssl rand -hex 32` makes one"
        )
    return name, roles, hashlib.sha256(token.encode()).digest()
