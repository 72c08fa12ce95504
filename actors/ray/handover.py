"""Tensors handed over through Ray: an actor that knows where they are, for as long as an update needs them.

Ranks in other processes find it by name, so that the request of an update stays plain text and can be journaled.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError

from torpor.actors.engine.protocol import HandedTensors, TensorSpec, WeightsRefused

ASK_S = 30.0
FETCH_S = 600.0  # of one tensor, over a network; the stage has a deadline of its own


class Handover:
    """Lives where the tensors' owner is. references: by name, each in a list of its own, so that Ray leaves it be."""

    def __init__(self, specs: Mapping[str, TensorSpec], references: Mapping[str, list[Any]]) -> None:
        self._specs = dict(specs)
        self._references = dict(references)

    def specs(self) -> dict[str, TensorSpec]:
        return self._specs

    def reference(self, name: str) -> list[Any]:
        return self._references[name]


class _Handed:
    """engine.protocol.HandedTensors over a Handover."""

    def __init__(self, actor: ActorHandle) -> None:
        self._actor = actor
        self._specs: dict[str, TensorSpec] | None = None

    def specs(self) -> Mapping[str, TensorSpec]:
        if self._specs is None:
            self._specs = _ask(self._actor.specs.remote(), ASK_S)
        return self._specs

    def get(self, name: str) -> Any:
        (reference,) = _ask(self._actor.reference.remote(name), ASK_S)
        tensor = _ask(reference, FETCH_S)
        told = self.specs()[name]
        if spec_of(name, tensor) != told:
            raise WeightsRefused(f"{name!r} is not the tensor that was announced; hand it over again")
        return tensor


def _ask(reference: Any, timeout_s: float) -> Any:
    try:
        return ray.get(reference, timeout=timeout_s)
    except RayError as error:
        text = f"the tensors that were handed over cannot be had ({type(error).__name__})"
        raise WeightsRefused(f"{text}; hand them over again, and wait for the update's end") from error


def open_handed(name: str) -> HandedTensors:
    """name: as `hand_over` gave it. Raises WeightsRefused when whoever handed them over has gone."""
    namespace, _, actor = name.partition("/")
    try:
        return _Handed(ray.get_actor(actor, namespace))
    except ValueError:
        raise WeightsRefused(f"nobody hands over {name!r} any more; hand the tensors over again") from None


@contextmanager
def hand_over(namespace: str, tensors: Mapping[str, Any]) -> Iterator[str]:
    """Yields the name by which ranks find them inside the block. tensors: torch tensors, or references to such.

    Ray must be connected. Raises WeightsRefused.
    """
    specs, references = {}, {}
    for name, given in tensors.items():
        is_reference = isinstance(given, ray.ObjectRef)
        tensor = _ask(given, FETCH_S) if is_reference else given
        specs[name] = spec_of(name, tensor)
        references[name] = [given if is_reference else ray.put(tensor.detach().cpu().clone())]
    actor = f"torpor-handover:{uuid.uuid4().hex}"
    options = {"name": actor, "namespace": namespace, "num_cpus": 0, "max_restarts": 0}
    handle = ray.remote(Handover).options(**options).remote(specs, references)
    try:
        yield f"{namespace}/{actor}"
    finally:
        ray.kill(handle)


def spec_of(name: str, tensor: Any) -> TensorSpec:
    shape, dtype = getattr(tensor, "shape", None), getattr(tensor, "dtype", None)
    if shape is None or not str(dtype).startswith("torch."):
        raise WeightsRefused(
            f"{name!r} is a {type(tensor).__name__}; give torch tensors, or references to them"
        )
    return TensorSpec(tuple(int(size) for size in shape), str(dtype).removeprefix("torch."))
