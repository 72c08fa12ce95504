"""Where a model comes from, checked before anything large is read or taken."""

from __future__ import annotations

import enum
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torpor.actors.config import EngineConfig
from torpor.actors.engine.errors import ModelRefused

GGUF_MAGIC = b"GGUF"


class LoadFormat(enum.StrEnum):
    GGUF = "gguf"
    SAFETENSORS = "safetensors"
    DUMMY = "dummy"


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A checked place. folder holds config (and tokenizer); gguf_file is a name inside it."""

    format: LoadFormat
    folder: Path
    gguf_file: str | None = None
    config_file: Path | None = None

    def pretrained_kwargs(self) -> dict[str, Any]:
        """Keyword arguments for transformers' from_pretrained; nothing is ever fetched."""
        kwargs: dict[str, Any] = {"local_files_only": True}
        if self.gguf_file is not None:
            kwargs["gguf_file"] = self.gguf_file
        return kwargs


def resolve(engine: EngineConfig) -> ModelSource:
    """Find and check the model's files. Raises ModelRefused with what to do next."""
    if not engine.model:
        raise ModelRefused("engine.model is empty; give a GGUF file or a safetensors folder")
    path = Path(engine.model).expanduser()
    if not path.exists():
        raise ModelRefused(f"there is no model at {path}; correct engine.model or download it first")
    load_format = _load_format(engine.load_format, path)
    if load_format is LoadFormat.GGUF:
        return _gguf(path)
    if load_format is LoadFormat.SAFETENSORS:
        return _safetensors(path)
    return _dummy(path)


def _load_format(wanted: str, path: Path) -> LoadFormat:
    if wanted == "auto":
        return LoadFormat.SAFETENSORS if path.is_dir() else LoadFormat.GGUF
    try:
        return LoadFormat(wanted)
    except ValueError:
        known = ", ".join(["auto", *LoadFormat])
        raise ModelRefused(f"engine.load_format {wanted!r} is unknown; known: {known}") from None


def _gguf(path: Path) -> ModelSource:
    if path.is_dir():
        raise ModelRefused(f"{path} is a folder; for load_format gguf name the .gguf file in it")
    try:
        with path.open("rb") as file:
            magic = file.read(len(GGUF_MAGIC))
    except OSError as error:
        raise ModelRefused(f"{path} cannot be read: {error}") from error
    if magic != GGUF_MAGIC:
        raise ModelRefused(f"{path} is not a GGUF file (it begins with {magic!r}); download it again")
    return ModelSource(LoadFormat.GGUF, path.parent, gguf_file=path.name)


def _safetensors(path: Path) -> ModelSource:
    if not path.is_dir():
        raise ModelRefused(f"{path} is a file; for load_format safetensors name its folder")
    _check_json(path / "config.json")
    if not any(path.glob("*.safetensors")):
        raise ModelRefused(
            f"{path} holds no .safetensors file; download the weights or use load_format dummy"
        )
    return ModelSource(LoadFormat.SAFETENSORS, path)


def _dummy(path: Path) -> ModelSource:
    config_file = path / "config.json" if path.is_dir() else path
    try:
        _check_json(config_file)
    except ModelRefused as error:
        raise ModelRefused(
            f"{error}; load_format dummy reads a config.json, or the one in a folder"
        ) from error
    return ModelSource(LoadFormat.DUMMY, config_file.parent, config_file=config_file)


def _check_json(path: Path) -> None:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelRefused(f"there is no {path}; a model folder needs its config.json") from None
    except (OSError, ValueError) as error:
        raise ModelRefused(f"{path} is not readable JSON: {error}") from error
    if not isinstance(content, dict) or "model_type" not in content:
        raise ModelRefused(f"{path} names no model_type; it is not a transformers config")
