"""What a wrong configuration is told: the key, plain words, and nothing that is not so."""

from __future__ import annotations

from pathlib import Path

import pytest

from torpor.service.settings.load import SettingsError, load_settings


def problems(tmp_path: Path, text: str) -> list[str]:
    file = tmp_path / "torpor.yaml"
    file.write_text(text)
    with pytest.raises(SettingsError) as caught:
        load_settings(file, {})
    return caught.value.problems


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("models: []", "models: is empty; it needs at least 1 entry"),
        ("models: 5", "models: must be a list, one entry each"),
        ("models: [5]", "models.0: must hold keys of its own, as the README shows"),
        ("models: [{name: 5}]", "models.0.name: must be text; put it in quotes"),
        (
            "models: [{name: m, bogus: 1}]",
            "models.0.bogus: no such key; remove it or correct its spelling",
        ),
        ("models: [{name: m}]\nhttp: {port: x}", "http.port: must be an integer"),
    ],
)
def test_a_fault_is_told_once_and_in_plain_words(tmp_path: Path, text: str, line: str) -> None:
    assert problems(tmp_path, text) == [line]
