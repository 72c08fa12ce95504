"""Roles, and what each of them includes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum


class Role(StrEnum):
    VIEWER = "viewer"  # looks
    INFERENCE = "inference"  # asks models; apart from the others
    OPERATOR = "operator"  # lets models sleep and wake
    ADMIN = "admin"  # replaces, changes and ends them


INCLUDES: Mapping[Role, frozenset[Role]] = {
    Role.VIEWER: frozenset({Role.VIEWER}),
    Role.INFERENCE: frozenset({Role.INFERENCE}),
    Role.OPERATOR: frozenset({Role.OPERATOR, Role.VIEWER}),
    Role.ADMIN: frozenset({Role.ADMIN, Role.OPERATOR, Role.VIEWER}),
}


def with_included(roles: Iterable[Role]) -> frozenset[Role]:
    return frozenset().union(*(INCLUDES[role] for role in roles))


@dataclass(frozen=True, slots=True)
class Caller:
    """name: of the token, never the token. has_token False: the service has no tokens, and everybody is this one."""

    name: str
    roles: frozenset[Role]
    has_token: bool = True

    def prefix_scope(self, salt: str) -> str:
        """Whose reusable prefixes a request shares: those of its salt, else the caller's own.

        A salt cannot name the scope that other callers have by default.
        """
        if not self.has_token:
            return salt
        return f"salt:{salt}" if salt else f"caller:{self.name}"


LOCAL = Caller("local", frozenset(Role), has_token=False)
ANYBODY = Caller("anybody", frozenset(), has_token=False)  # of calls that are open
