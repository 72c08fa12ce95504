"""Ports for ranks to meet at are still free when a model has loaded."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from torpor.actors.rank import addresses
from torpor.actors.rank.addresses import EPHEMERAL, LOWEST, free_addresses


def ports(count: int) -> list[int]:
    return [int(address.removeprefix("127.0.0.1:")) for address in free_addresses("127.0.0.1", count)]


def test_they_differ_and_are_given_to_nobody_who_connects_or_listens_anywhere() -> None:
    first, last = map(int, EPHEMERAL.read_text().split())
    if first <= LOWEST and last == 65535:
        pytest.skip("this kernel gives all ports away")
    found = ports(50)
    assert len(set(found)) == 50 and not any(first <= port <= last for port in found)
    for port in found:
        with socket.socket() as one:
            one.bind(("127.0.0.1", port))


@pytest.mark.parametrize("told", ["1024 65535\n", "", "no numbers here"])
def test_where_all_may_be_given_away_they_are_free_now_at_least(
    told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "range"
    file.write_text(told)
    monkeypatch.setattr(addresses, "EPHEMERAL", file)
    assert len(set(ports(4))) == 4


def test_a_port_that_another_has_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        taken = other.getsockname()[1]
        monkeypatch.setattr(addresses, "_outside", lambda: iter([taken]))
        (found,) = ports(1)
        assert found != taken
