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
        (
            "models: [{name: a b}]",
            "models.0.name: must be at most 64 letters, digits, '.', '_' and '-', a letter or digit first",
        ),
        (
            "models: [{name: m, engine: {kind: vllm}}]",
            "models.0.engine.kind: 'vllm' is no engine; transformers is the one that comes along, and module:factory "
            "names your own",
        ),
        (
            "models: [{name: m, restore_modes: {weights: cpu, kvcache: pinned}}]",
            "models.0.restore_modes.kvcache: no such tag; the engine's are cuda_graph, kv_cache, weights, workspace",
        ),
    ],
)
def test_a_fault_is_told_once_and_in_plain_words(tmp_path: Path, text: str, line: str) -> None:
    assert problems(tmp_path, text) == [line]


HUGE = "9" * 400


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (f"models: [{{name: m, kv_cache: {{gpu_bytes: '{HUGE}.5GB'}}}}]", "is out of range: a size is"),
        (f"models: [{{name: m, kv_cache: {{gpu_bytes: {HUGE}}}}}]", "is out of range: a size is"),
        ("models: [{name: m, kv_cache: {host_bytes: 8388608TiB}}]", "is out of range: a size is"),
        ("models: [{name: m, sleep_after_idle_s: 1.0e+300}]", "is out of range: a duration is"),
        ("models: [{name: m, sleep_after_idle_s: .nan}]", "is out of range: a duration is"),
        ("deadlines: {drain_s: .inf}", "is out of range: a duration is"),
        ("models: [{name: 2026-99-99}]", "is not valid YAML"),
        ("[" * 3000, "is not valid YAML"),
    ],
)
def test_a_value_that_nothing_can_count_with_is_refused_in_words(
    tmp_path: Path, text: str, says: str
) -> None:
    assert any(says in line for line in problems(tmp_path, text))


def test_an_engine_of_ones_own_has_tags_of_its_own(tmp_path: Path) -> None:
    file = tmp_path / "torpor.yaml"
    file.write_text("models: [{name: m, engine: {kind: 'lab:make'}, restore_modes: {adapters: pinned}}]")
    assert load_settings(file, {}).models[0].restore_modes == {"adapters": "pinned"}


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ('[{"name": "m"', "TORPOR_MODELS: is not valid YAML in line 1: expected ',' or '}'"),
        ("[{name: m, verify: true, verify: false}]", "the key 'verify' stands twice; keep one of them"),
        ("[{name: 2026-99-99}]", "TORPOR_MODELS: is not valid YAML: "),
    ],
)
def test_a_variable_that_is_no_yaml_is_refused_in_one_line_as_a_file_is(value: str, says: str) -> None:
    with pytest.raises(SettingsError) as caught:
        load_settings(None, {"TORPOR_MODELS": value})
    assert says in str(caught.value) and "\n" not in str(caught.value)
