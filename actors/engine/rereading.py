"""A loaded model's own weights, read again from where they came: the same bytes, or a refusal."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

from torpor.actors.config import EngineConfig
from torpor.actors.engine.errors import ModelRefused
from torpor.actors.engine.loader import DTYPES, load_again
from torpor.actors.engine.protocol import OwnSource, TensorSpec, WeightsRefused
from torpor.actors.engine.source import LoadFormat, ModelSource, resolve
from torpor.actors.engine.weights import ModuleReader, Reader, SafetensorsReader, Target

Stamp = tuple[tuple[str, int, int], ...]  # (file, bytes, nanoseconds of its last change), for each file


class Rereading:
    """Made just before the model is loaded, so that a file that changes meanwhile has changed since."""

    def __init__(self, engine: EngineConfig) -> None:
        """Raises ModelRefused."""
        self._engine = engine
        self._stamp = _stamp(resolve(engine))

    def check(self, target: Target) -> OwnSource:
        """Reads no contents. Raises WeightsRefused."""
        source = self._source()
        reader = _tensors_of(source, target)
        largest = max((_size_bytes(spec) for spec in reader.specs().values()), default=0) if reader else 0
        return OwnSource(
            place=str(source.folder / source.gguf_file if source.gguf_file else source.folder),
            digest=target.check(reader),
            size_bytes=target.size_bytes,
            host_bytes=largest if reader else target.whole_bytes,
            changed=_stamp(source) != self._stamp,
        )

    def write(self, target: Target, go_on: Callable[[], None]) -> str:
        """This rank's share into its parameters; a digest. Raises WeightsRefused, and what go_on raises."""
        source = self._source()
        reader: Reader | None = _tensors_of(source, target)
        if reader is None:
            try:
                module = load_again(source, target.model.dtype, self._engine.seed, go_on)
            except ModelRefused as error:
                raise WeightsRefused(str(error)) from error
            reader = ModuleReader(module)
        return target.write(reader, go_on)

    def _source(self) -> ModelSource:
        try:
            return resolve(self._engine)
        except ModelRefused as error:
            raise WeightsRefused(str(error)) from error


def _tensors_of(source: ModelSource, target: Target) -> SafetensorsReader | None:
    """To be read one by one; None where loading converts more than the dtype, or makes them."""
    if source.format is not LoadFormat.SAFETENSORS:
        return None
    try:
        reader = SafetensorsReader(source.folder)
        target.check(reader)
    except WeightsRefused:
        return None
    return reader


def _size_bytes(spec: TensorSpec) -> int:
    return math.prod(spec.shape) * DTYPES[spec.dtype].itemsize


def _stamp(source: ModelSource) -> Stamp:
    """Raises ModelRefused."""
    try:
        return tuple((str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in _files(source))
    except OSError as error:
        raise ModelRefused(f"the model's files cannot be looked at: {error}; correct it") from error


def _files(source: ModelSource) -> list[Path]:
    if source.gguf_file is not None:
        return [source.folder / source.gguf_file]
    if source.config_file is not None:
        return [source.config_file]
    return sorted([*source.folder.glob("*.safetensors*"), source.folder / "config.json"])
