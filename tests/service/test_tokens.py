"""The tokens file: its lines, its faults, and its changes while the service runs."""

from __future__ import annotations

import hashlib
import io
import json
from pathlib import Path

import pytest

from torpor.service.auth.roles import Role
from torpor.service.auth.tokens import TokensError, parse_tokens
from torpor.service.auth.tokens_file import LOOK_EVERY_S, TokensFile
from torpor.service.logs import make_logger

OLD, NEW, OTHER = "old-old-old-old-old", "new-new-new-new-new", "other-other-other-other"


def roles(text: str, token: str) -> set[Role] | None:
    caller = parse_tokens(text, "tokens").find(token)
    return set(caller.roles) if caller is not None else None


@pytest.mark.parametrize(
    ("listed", "has"),
    [
        ("viewer", {Role.VIEWER}),
        ("inference", {Role.INFERENCE}),
        ("operator", {Role.OPERATOR, Role.VIEWER}),
        ("admin", {Role.ADMIN, Role.OPERATOR, Role.VIEWER}),
        ("operator,inference", {Role.OPERATOR, Role.VIEWER, Role.INFERENCE}),
    ],
)
def test_a_token_has_its_roles_and_those_that_they_include(listed: str, has: set[Role]) -> None:
    assert roles(f"# name roles token\n\n  lab {listed}\t{OLD}  \n", OLD) == has


def test_a_token_may_be_given_by_its_hash_and_the_hash_is_no_token() -> None:
    digest = hashlib.sha256(OLD.encode()).hexdigest()
    text = f"lab viewer sha256:{digest}\n"
    assert roles(text, OLD) == {Role.VIEWER}
    assert roles(text, digest) is roles(text, f"sha256:{digest}") is None


def test_nearly_a_token_is_none() -> None:
    for wrong in ("", OLD[:-1], OLD + "x", OLD.upper(), "ö" * 20, "\udcff" * 20):
        assert roles(f"lab viewer {OLD}", wrong) is None


def test_while_a_token_is_replaced_both_are_the_same_caller() -> None:
    tokens = parse_tokens(f"lab viewer {OLD}\nlab viewer {NEW}\n", "tokens")
    assert tokens.find(OLD) == tokens.find(NEW) is not None


BAD = [
    (f"lab {OLD}", "line 1: has 2 words, not 3; write NAME ROLE"),
    (f"lab viewer operator {OLD}", "line 1: has 4 words"),
    (f"# x\nla/b viewer {OLD}", "line 2: the name may have"),
    (f"lab boss {OLD}", "line 1: the second word is no list of roles; known roles: viewer, inference"),
    (f"lab {OLD} viewer", "line 1: the second word is no list of roles"),
    (f"lab viewer,, {OLD}", "line 1: the second word is no list of roles"),
    ("lab viewer short", "line 1: the token must have 16 to 512"),
    (f"lab viewer {OLD}ö", "line 1: the token must have 16 to 512"),
    (f"lab viewer sha256:{OLD}", "line 1: after `sha256:` 64"),
    (f"a viewer {OLD}\nb viewer {OLD}", "line 2: the token is that of line 1"),
    (f"a viewer {OLD}\na admin {NEW}", "line 2: 'a' has other roles than in line 1"),
    ("\n# nothing\n", "holds no tokens"),
]


@pytest.mark.parametrize(("text", "says"), BAD)
def test_a_bad_line_is_told_by_its_number_with_what_to_do_and_never_with_a_token(
    text: str, says: str
) -> None:
    with pytest.raises(TokensError) as caught:
        parse_tokens(text, "tokens")
    assert f"tokens: {says}" in str(caught.value)
    assert not any(token in str(caught.value) for token in (OLD, NEW, "short"))


def test_all_bad_lines_are_told_at_once() -> None:
    with pytest.raises(TokensError) as caught:
        parse_tokens(f"a viewer {OLD}\nb nothing {NEW}\nc\n", "tokens")
    assert [problem.split(":")[0] for problem in caught.value.problems] == ["line 2", "line 3"]


class Mounted:
    """A Secret as a cluster mounts it: a link to a file behind a link to a folder, which is swapped."""

    def __init__(self, folder: Path, text: str) -> None:
        self._folder = folder
        self._times = 0
        self.now_s = 0.0
        self.log = io.StringIO()
        self.swap(text)
        self.path = folder / "tokens"
        self.path.symlink_to("..data/tokens")
        self.file = TokensFile(self.path, make_logger(self.log), lambda: self.now_s)

    def swap(self, text: str | bytes) -> None:
        self._times += 1
        behind = self._folder / f"..{self._times}"
        behind.mkdir()
        raw = text.encode() if isinstance(text, str) else text
        (behind / "tokens").write_bytes(raw)
        fresh = self._folder / "..fresh"
        fresh.symlink_to(behind.name)
        fresh.replace(self._folder / "..data")

    def later(self) -> None:
        self.now_s += LOOK_EVERY_S

    def knows(self) -> list[str]:
        return [token for token in (OLD, NEW, OTHER) if self.file.find(token) is not None]

    def logged(self) -> list[str]:
        assert not any(token in self.log.getvalue() for token in (OLD, NEW, OTHER))
        return [json.loads(line)["event"] for line in self.log.getvalue().splitlines()]


def test_a_secret_that_is_swapped_is_in_force_a_second_later(tmp_path: Path) -> None:
    mounted = Mounted(tmp_path, f"lab viewer {OLD}")
    mounted.swap(f"lab viewer {NEW}")
    assert mounted.knows() == [OLD]  # it is not read for every request
    mounted.later()
    assert mounted.knows() == [NEW]
    assert mounted.logged() == ["the tokens file was read again"]


@pytest.mark.parametrize("broken", ["lab viewer", "", b"\xff\xfe", "x" * (2 << 20)])
def test_a_broken_file_keeps_the_tokens_of_before_and_says_so_once(
    tmp_path: Path, broken: str | bytes
) -> None:
    mounted = Mounted(tmp_path, f"lab viewer {OLD}")
    mounted.swap(broken)
    for _ in range(3):
        mounted.later()
        assert mounted.knows() == [OLD]
    assert mounted.file.fault.startswith(str(mounted.path))
    assert mounted.logged() == ["the tokens stay as they were: their file is unusable"]
    mounted.swap(f"lab viewer {NEW}")
    mounted.later()
    assert (mounted.knows(), mounted.file.fault) == ([NEW], "")


def test_a_file_that_is_gone_keeps_the_tokens_and_is_used_again_when_it_is_back(tmp_path: Path) -> None:
    mounted = Mounted(tmp_path, f"lab viewer {OLD}")
    text = mounted.path.read_text()
    mounted.path.unlink()
    mounted.later()
    assert mounted.knows() == [OLD]
    assert "cannot be read (No such file or directory)" in mounted.file.fault
    mounted.path.write_text(text)
    mounted.later()
    assert (mounted.knows(), mounted.file.fault) == ([OLD], "")


def test_a_rewrite_in_place_of_the_same_length_and_time_is_seen(tmp_path: Path) -> None:
    mounted = Mounted(tmp_path, f"lab viewer {OLD}")
    mounted.path.write_text(f"lab viewer {NEW}")
    mounted.later()
    assert mounted.knows() == [NEW]
