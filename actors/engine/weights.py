"""Other weights for a model that has loaded: what a source offers, and what of it fits this rank's parameters."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from transformers.conversion_mapping import get_checkpoint_conversion_mapping

from torpor.actors.config import EngineConfig
from torpor.actors.engine.errors import ModelRefused
from torpor.actors.engine.loader import DTYPES, LoadedModel, read_config, read_module
from torpor.actors.engine.protocol import StagedWeights, TensorSpec, WeightsRefused, WeightsSource
from torpor.actors.engine.shard import Shares
from torpor.actors.engine.source import LoadFormat, resolve

# What a configuration says of the computation itself: weights of another one would fit, and mean something else.
COMPUTED_BY = (
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "rms_norm_eps",
    "rope_parameters",
    "hidden_act",
    "hidden_activation",
    "layer_types",
    "sliding_window",
    "query_pre_attn_scalar",
    "final_logit_softcapping",
    "num_experts_per_tok",
    "norm_topk_prob",
    "embedding_multiplier",
    "residual_multiplier",
    "attention_multiplier",
    "logits_scaling",
    "mamba_n_groups",
    "position_embedding_type",
)
PIECE_BYTES = 64 << 20
DERIVED = ".rotary_emb.inv_freq"  # buffers that old checkpoints carry along
SAFETENSORS_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


class Reader(Protocol):
    """A source of whole tensors by the checkpoint's names."""

    def specs(self) -> Mapping[str, TensorSpec]: ...

    def get(self, name: str) -> torch.Tensor: ...


class Target:
    """This rank's parameters, and what whole tensors they are shares of."""

    def __init__(self, model: LoadedModel, rank: int, ranks: int) -> None:
        self.model = model
        self.parameters: dict[str, torch.Tensor] = dict(model.module.named_parameters())
        self._shares = Shares(model.module, rank, ranks)
        first = {id(parameter): name for name, parameter in self.parameters.items()}
        # Names by which a checkpoint may call them: tied parameters have several.
        self._named = {
            name: first[id(parameter)]
            for name, parameter in model.module.named_parameters(remove_duplicate=False)
        }

    @property
    def size_bytes(self) -> int:
        return sum(parameter.nbytes for parameter in self.parameters.values())

    def check(self, reader: Reader | None) -> str:
        """Names, shapes and dtypes; a digest of them. None: they are known only when it is read."""
        if reader is None:
            return ""
        specs = {name: spec for name, spec in reader.specs().items() if not name.endswith(DERIVED)}
        missing = set(self.parameters) - {self._named.get(name) for name in specs}
        if missing:
            raise WeightsRefused(
                f"{len(missing)} tensors are missing, the first {min(missing)!r}; give all tensors of the model"
            )
        for name in sorted(specs):
            self._check_one(name, specs[name])
        return hashlib.sha256(repr(sorted(specs.items())).encode()).hexdigest()[:16]

    def is_converted(self, reader: Reader) -> bool:
        """Whether the names are those of a family whose checkpoints keep apart what the model has as one tensor."""
        own = set(self._named) & set(reader.specs())
        mapping = get_checkpoint_conversion_mapping(self.model.config.model_type)
        return mapping is not None and not set(self.parameters) <= {self._named[name] for name in own}

    def _check_one(self, name: str, spec: TensorSpec) -> None:
        if name not in self._named:
            raise WeightsRefused(
                f"the model has no tensor {name!r}; use its own names, such as {self._example()!r}"
            )
        own = self._named[name]
        wanted = self._shares.whole_shape(own, self.parameters[own].shape)
        if spec.shape != wanted:
            raise WeightsRefused(
                f"{name!r} has the shape {list(spec.shape)}, the model's is {list(wanted)}; give it whole"
            )
        if spec.dtype not in DTYPES:
            raise WeightsRefused(f"{name!r} has the dtype {spec.dtype}; taken: {', '.join(DTYPES)}")

    def _example(self) -> str:
        return next(iter(self.parameters))

    @property
    def whole_bytes(self) -> int:
        """Of all ranks' shares together, as they would be loaded on one."""
        shapes = {
            name: self._shares.whole_shape(name, value.shape) for name, value in self.parameters.items()
        }
        return sum(math.prod(shapes[name]) * value.itemsize for name, value in self.parameters.items())

    def stage(self, reader: Reader | None, go_on: Callable[[], None]) -> StagedWeights:
        """Check once more, as a source may have changed since, and read this rank's share."""
        assert reader is not None
        digest = hashlib.sha256(self.check(reader).encode())
        staged = {
            own: share.to(self.parameters[own].dtype, copy=True)
            for own, share in self._read_shares(reader, go_on, digest, ties=True)
        }
        size_bytes = sum(value.nbytes for value in staged.values())
        return StagedWeights(digest.hexdigest()[:16], size_bytes, staged)

    def write(self, reader: Reader, go_on: Callable[[], None]) -> str:
        """Read this rank's share straight into its parameters, in pieces. A digest as of what is staged."""
        digest = hashlib.sha256(self.check(reader).encode())
        for own, share in self._read_shares(reader, go_on, digest, ties=False):
            _copy_in_pieces(self.parameters[own], share, go_on)
        return digest.hexdigest()[:16]

    def _read_shares(
        self, reader: Reader, go_on: Callable[[], None], digest: Any, ties: bool
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """By parameter, in the source's dtype. ties: refuse tensors that are one here, and differ in the source."""
        aliases = {self._named[name]: name for name in reader.specs() if name in self._named}
        for own, parameter in self.parameters.items():
            go_on()
            names = [name for name in reader.specs() if self._named.get(name) == own]
            whole = _read(reader, own if own in names else aliases[own])
            for name in names if ties else ():
                if name != own and own in names and not torch.equal(whole, _read(reader, name)):
                    raise WeightsRefused(
                        f"{name!r} and {own!r} are one tensor here, and differ in these weights"
                    )
            if whole.dim() == 1 and not self._shares.is_cut(own):
                # Small, and the same on every rank: ranks that read different files differ in it (M7).
                small = whole.to(parameter.dtype).contiguous()
                digest.update(small.view(torch.uint8).numpy().tobytes())
            yield own, self._shares.cut(own, whole)


def open_reader(source: WeightsSource, target: Target, whole: bool) -> Reader | None:
    """None where only reading it `whole` would tell what is in it. Raises WeightsRefused."""
    if not isinstance(source, Path):
        return source
    try:
        found = resolve(EngineConfig(model=str(source)))
        if found.format is LoadFormat.SAFETENSORS:
            _check_config(target.model.config, read_config(found))
            reader = SafetensorsReader(found.folder)
            if not target.is_converted(reader):
                return reader
        if not whole:
            return None
        config = read_config(found)
        _check_config(target.model.config, config)
        return ModuleReader(read_module(found, config, target.model.dtype))
    except ModelRefused as error:
        raise WeightsRefused(str(error)) from error


class SafetensorsReader:
    """The files of a folder that hold its tensors; dtypes that nobody takes keep the file's name for them."""

    def __init__(self, folder: Path) -> None:
        self._files: dict[str, Any] = {}
        self._specs: dict[str, TensorSpec] = {}
        self._open = ExitStack()
        for path in _files_of(folder):
            try:
                file = self._open.enter_context(safe_open(str(path), framework="pt"))
            except (OSError, SafetensorError) as error:
                raise WeightsRefused(f"{path} cannot be read: {error}; write it again") from error
            for name in file.keys():  # noqa: SIM118 - not a mapping
                if name in self._files:
                    raise WeightsRefused(f"{folder} has {name!r} in two files; remove one of them")
                header = file.get_slice(name)
                dtype = SAFETENSORS_DTYPES.get(header.get_dtype(), header.get_dtype())
                self._files[name], self._specs[name] = file, TensorSpec(tuple(header.get_shape()), dtype)

    def specs(self) -> Mapping[str, TensorSpec]:
        return self._specs

    def get(self, name: str) -> torch.Tensor:
        tensor: torch.Tensor = self._files[name].get_tensor(name)
        return tensor


class ModuleReader:
    """All tensors of a module that was loaded whole, under the model's names and in its dtype."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._tensors: dict[str, torch.Tensor] = module.state_dict()

    def specs(self) -> Mapping[str, TensorSpec]:
        return {
            name: TensorSpec(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
            for name, tensor in self._tensors.items()
        }

    def get(self, name: str) -> torch.Tensor:
        return self._tensors[name]


def _copy_in_pieces(parameter: torch.Tensor, share: torch.Tensor, go_on: Callable[[], None]) -> None:
    """By whole rows: the share may lie in its tensor with gaps, and may be of another dtype."""
    if not share.dim():
        share, parameter = share.reshape(1), parameter.view(1)
    row_bytes = max(1, share.nbytes // max(1, share.shape[0]))
    rows = max(1, PIECE_BYTES // row_bytes)
    with torch.no_grad():
        for begin in range(0, share.shape[0], rows):
            go_on()
            parameter[begin : begin + rows].copy_(share[begin : begin + rows])


def _read(reader: Reader, name: str) -> torch.Tensor:
    try:
        return reader.get(name)
    except (OSError, SafetensorError) as error:
        raise WeightsRefused(f"{name!r} cannot be read: {error}; write the weights again") from error


def _files_of(folder: Path) -> list[Path]:
    """As checkpoints are written: one file, or those that the index names; else all there are."""
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.exists():
        return [single]
    if not index.exists():
        return sorted(folder.glob("*.safetensors"))
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise WeightsRefused(f"{index} is no index of weights: {error!r}; write it again") from error
    outside = [name for name in names if not isinstance(name, str) or Path(name).name != name]
    if outside:
        raise WeightsRefused(f"{index} names {outside[0]!r}, which is not a file of its folder; correct it")
    return [folder / name for name in names]


def _alike(one: Any, other: Any) -> bool:
    """Equal, but for the rounding of a format that keeps single precision."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_alike(one[key], other[key]) for key in one)
    if isinstance(one, float) and isinstance(other, float | int):
        return math.isclose(one, other, rel_tol=1e-6)
    return bool(one == other)


def _check_config(ours: Any, theirs: Any) -> None:
    for name in COMPUTED_BY:
        own, other = getattr(ours, name, None), getattr(theirs, name, None)
        if not _alike(own, other):
            raise WeightsRefused(
                f"these weights are of a model with {name} {other!r}, this one has {own!r}; create a model for them"
            )
