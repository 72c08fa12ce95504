"""Holds: sleeps that were asked for. What begins and ends them, and what they keep from others (G6)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping

from torpor.actors.coordinator.budget import Budget, Place
from torpor.actors.coordinator.records import Published, makes_hold
from torpor.actors.coordinator.runtime import ModelRuntime
from torpor.actors.messages import (
    Hold,
    Kind,
    OnExpiry,
    Operation,
    OperationRequest,
    Origin,
    RankStatus,
    Refusal,
    RejectCode,
)

MAX_LEASES = 64  # a model


def holds_after(
    before: tuple[Hold, ...], request: OperationRequest, operation: Operation, parked: bool, now: float
) -> tuple[Hold, ...]:
    """The holds once this operation has succeeded. They end together with the last parked tag."""
    if not parked:
        return ()
    if not makes_hold(request) or any(hold.operation == operation.id for hold in before):
        return before  # the same sleep again, brought to its end by another coordinator
    made = Hold(operation.id, request.caller, now, request.lease_s, request.on_expiry)
    if made.lease_s is not None:
        return (*before, with_lease_until(made, now + made.lease_s))
    # One hold without a lease says all; the leases of others go on, since they end by themselves.
    return before if any(hold.lease_s is None for hold in before) else (made, *before)


def with_lease_until(hold: Hold, expires_at: float) -> Hold:
    return Hold(hold.operation, hold.by, hold.since, hold.lease_s, hold.on_expiry, expires_at)


def without_lease(holds: tuple[Hold, ...], operation: str) -> tuple[Hold, ...]:
    """That hold's lease has ended: it stays as one without a lease, or goes, as was asked for."""
    rest = without(holds, operation)
    (ended,) = [hold for hold in holds if hold.operation == operation]
    if ended.on_expiry is OnExpiry.WAKE or any(hold.lease_s is None for hold in rest):
        return rest
    return (Hold(ended.operation, ended.by, ended.since), *rest)


def without(holds: tuple[Hold, ...], operation: str) -> tuple[Hold, ...]:
    """Those that are left when the hold of this operation is given up."""
    return tuple(hold for hold in holds if hold.operation != operation)


def only_releases(published: Published, request: OperationRequest) -> bool:
    """A wake that is to end one hold leaves the model asleep: others hold it, or its own hold is gone already."""
    held = any(hold.operation == request.releases for hold in published.holds)
    return bool(request.releases) and not (held and len(published.holds) == 1)


def refusal(published: Published, request: OperationRequest) -> Refusal | None:
    """Why a hold does not let this operation be. Those that somebody asked for always may."""
    if request.kind is Kind.WAKE and request.origin.automatic:
        in_the_way = [hold for hold in published.holds if not _is_ended_by(hold, request)]
        if in_the_way:
            why = f"{request.model!r} is asleep by a hold{_whose(in_the_way[0])}; an explicit wake ends it"
            return Refusal(RejectCode.HELD, why)
    leases = sum(hold.lease_s is not None for hold in published.holds)
    if makes_hold(request) and request.lease_s is not None and leases >= MAX_LEASES:
        why = f"{MAX_LEASES} leases hold {request.model!r} asleep already; wait until some end, or wake it"
        return Refusal(RejectCode.CONFLICT, why)
    return None


def _is_ended_by(hold: Hold, request: OperationRequest) -> bool:
    # The wake at a lease's end names the hold that it is for.
    return request.origin is Origin.LEASE and request.caller == hold.operation


def _whose(hold: Hold) -> str:
    return f" ({hold.by}, operation {hold.operation})" if hold.operation else ""


class HeldBytes:
    """What automatic wakes must leave free on a device: what holds have parked there, and nobody else has taken yet.

    Whoever asked for a hold may use its bytes outside of this service's sight. So the bytes that are in use on a
    device, and that no model of ours has, are noted when a hold begins: by how much they grow is what was taken up.
    """

    def __init__(self, models: Mapping[str, ModelRuntime], budget: Budget) -> None:
        self._models = models
        self._budget = budget
        self._others_bytes: dict[
            tuple[str, Place], int
        ] = {}  # (held model, place): in use by others at its begin

    def look(self, runtime: ModelRuntime) -> None:
        """To be called when the model's published state has changed, with its ranks' newest statuses."""
        name = runtime.config.name
        if not runtime.published.hold:
            self._others_bytes = {key: size for key, size in self._others_bytes.items() if key[0] != name}
            return
        ours = self._ours_bytes()
        for status in runtime.statuses.values():
            key = name, Place.of(status)
            if key not in self._others_bytes:
                self._others_bytes[key] = _others_bytes(status, ours)

    def spare_bytes(self, request: OperationRequest) -> Callable[[RankStatus], int]:
        """What this operation must leave free on a rank's device, by the rank's status of just now."""
        if request.kind is not Kind.WAKE or not request.origin.automatic:
            return lambda _: 0
        ours, held = self._ours_bytes(), self._held_bytes(request.model)

        def spare(status: RankStatus) -> int:
            place = Place.of(status)
            others_bytes = _others_bytes(status, ours)
            parked = [(name, parked[place]) for name, parked in held.items() if parked[place]]
            begun = [self._others_bytes.get((name, place), others_bytes) for name, _ in parked]
            taken_up_bytes = max(0, others_bytes - min(begun, default=others_bytes))
            return max(0, sum(size for _, size in parked) - taken_up_bytes)

        return spare

    def _held_bytes(self, waking: str) -> dict[str, Counter[Place]]:
        """What held models have parked; one that wakes has its bytes promised, and counts no more."""
        return {
            name: runtime.bytes_by_place("reserved_bytes", parked_only=True)
            for name, runtime in self._models.items()
            if name != waking and runtime.published.hold and not self._wakes(runtime)
        }

    def _wakes(self, runtime: ModelRuntime) -> bool:
        return runtime.running is not None and self._budget.has_promise(runtime.running.operation.id)

    def _ours_bytes(self) -> Counter[Place]:
        return sum((runtime.bytes_by_place() for runtime in self._models.values()), Counter[Place]())


def _others_bytes(status: RankStatus, ours: Counter[Place]) -> int:
    """In use on a rank's device by no model of ours."""
    return max(0, status.device_total_bytes - status.device_free_bytes - ours[Place.of(status)])
