"""A weight update on one rank: where its weights come from, and how far it has come. The ledger has no part in it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torpor.actors.engine.protocol import (
    Engine,
    HandedTensors,
    StagedWeights,
    WeightsRefused,
    WeightsSource,
)
from torpor.actors.messages import LedgerPhase, OperationRequest, Refusal, RejectCode
from torpor.actors.rank.reload import TAG
from torpor.actors.rank.transaction import Planned, Transaction

LATE = "the weights could not be read in time; allow more with timeout_s"
OpenHanded = Callable[[str], HandedTensors]


def nobody_hands_over(name: str) -> HandedTensors:
    raise WeightsRefused("this rank takes weights from paths only; update them from a path")


@dataclass(frozen=True, slots=True)
class Sources:
    """What weights may come from: folders of this node, and tensors that other processes hand over by a name."""

    roots: Sequence[str] = ()
    open_handed: OpenHanded = nobody_hands_over

    def find(self, request: OperationRequest) -> WeightsSource:
        """Raises WeightsRefused."""
        if bool(request.weights_path) == bool(request.weights_handed):
            raise WeightsRefused("an update takes weights from one source; give a path, or hand tensors over")
        return (
            self.path(request.weights_path)
            if request.weights_path
            else self.open_handed(request.weights_handed)
        )

    def path(self, text: str) -> Path:
        """The file or folder, links followed. Raises WeightsRefused where anything of it is outside of the roots."""
        if not self.roots:
            raise WeightsRefused(
                "no weights_roots are configured; name the folders that updates may read there"
            )
        path = Path(text)
        if not path.is_absolute():
            raise WeightsRefused(f"{text!r} is not an absolute path; give one under weights_roots")
        roots = [Path(root).resolve() for root in self.roots]

        def inside(path: Path) -> Path:
            found = path.resolve()
            if not any(found.is_relative_to(root) for root in roots):
                listed = ", ".join(self.roots)
                raise WeightsRefused(
                    f"{path} is outside of weights_roots ({listed}); move it there, or add its folder"
                )
            return found

        try:
            found = inside(path)  # before anything is said of what is there
            for child in found.iterdir() if found.is_dir() else ():
                inside(child)
            if not found.exists():
                raise WeightsRefused(
                    f"there is nothing at {path} on this rank's node; put the weights there first"
                )
        except (OSError, RuntimeError, ValueError) as error:  # no right to look, links in a circle, a NUL
            raise WeightsRefused(f"{text!r} cannot be looked at: {error}; correct it") from error
        return found


def _why_not(parked_tags: Sequence[str]) -> Refusal | None:
    if TAG not in parked_tags:
        return None
    text = f"the tag {TAG!r} is asleep and cannot be written to; wake it first, kv_cache may stay asleep"
    return Refusal(RejectCode.WRONG_STATE, text, TAG)


class Update:
    """One update from its stage to its end."""

    def __init__(self, operation: str, engine: Engine, staged: StagedWeights) -> None:
        self.operation = operation
        self.phase = LedgerPhase.STAGED
        self._engine = engine
        self._staged: StagedWeights | None = staged

    def commit(self) -> dict[str, Any]:
        """May be repeated after a failure. The numbers of a reply."""
        assert self._staged is not None
        self.phase = LedgerPhase.COMMITTING
        self._engine.write_weights(self._staged)
        self.phase = LedgerPhase.COMMITTED
        return {"digest": self._staged.digest, "device_bytes": self._staged.size_bytes}

    def abort(self) -> None:
        """Raises RuntimeError after the first write: there is no way back."""
        if self.phase is not LedgerPhase.STAGED:
            raise RuntimeError("the weights are being written; it can only go forward")
        self._staged = None


class Updates:
    """The update that this rank is in, from its stage to its publish."""

    def __init__(self, engine: Engine, sources: Sources) -> None:
        self.current: Update | None = None
        self._engine = engine
        self._sources = sources

    def in_the_way(self) -> tuple[Refusal, ...]:
        if self.current is None:
            return ()
        text = f"operation {self.current.operation} is {self.current.phase} here; wait for it"
        return (Refusal(RejectCode.CONFLICT, text),)

    def plan(self, request: OperationRequest, phase: str, parked_tags: Sequence[str]) -> Planned:
        """Reads only. phase: the ledger's. Raises WeightsRefused."""
        if refusals := self.in_the_way():
            return Planned(None, refusals)
        if phase != "idle":
            text = f"another operation is {phase} here; wait for it"
            return Planned(None, (Refusal(RejectCode.CONFLICT, text),))
        if (refusal := _why_not(parked_tags)) is not None:
            return Planned(None, (refusal,))
        digest, size_bytes = self._engine.check_weights(self._sources.find(request))
        # They lie in host memory from the stage to the commit.
        return Planned(None, (), {"digest": digest, "host_bytes": size_bytes})

    def stage(self, tx: Transaction, deadline: float) -> Planned:
        """At rest. Raises WeightsRefused, Stopped, TimeoutError."""
        assert tx.request is not None
        go_on = tx.going_on(deadline, LATE)
        go_on()
        staged = self._engine.stage_weights(self._sources.find(tx.request), go_on)
        go_on()
        self.current = Update(tx.operation, self._engine, staged)
        return Planned(None, (), {"digest": staged.digest, "device_bytes": staged.size_bytes})

    def commit(self, tx: Transaction) -> dict[str, Any]:
        """The numbers of a reply."""
        assert self.current is not None and self.current.operation == tx.operation
        return self.current.commit()

    def abort(self, operation: str) -> bool:
        """False: another operation's is here, and stays. Raises RuntimeError after the first write."""
        if self.current is None:
            return True
        if self.current.operation != operation:
            return False
        self.current.abort()
        self.current = None
        return True
