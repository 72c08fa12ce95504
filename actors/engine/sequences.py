"""A rank's sequences by key: the leader acts and records, followers replay and compare."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

import numpy as np
from numpy.typing import NDArray

from torpor.actors.engine.errors import RanksDisagree
from torpor.actors.engine.plan import Act, Operation
from torpor.native import KvManager, Sequence


class SequenceBook:
    """Every change to a sequence goes through `_act`, on all ranks alike. Used from the step thread only."""

    def __init__(self, manager: KvManager, record: bool) -> None:
        self._manager = manager
        self._record = record
        self._cycles = len(manager.life_cycles)
        self._sequences: dict[int, Sequence] = {}
        self._log: list[Operation] = []

    def __len__(self) -> int:
        return len(self._sequences)

    def create(self, key: int, scope: str, tokens: SequenceOf[int]) -> int:
        """A suspended sequence; returns how many leading tokens its pages already hold."""
        return self._act(Operation(Act.CREATE, key, scope=scope, tokens=tuple(tokens)))

    def resume(self, key: int) -> bool:
        return bool(self._act(Operation(Act.RESUME, key)))

    def resize(self, key: int, capacity_tokens: int) -> bool:
        """Room for at least this many tokens; True at once where it is there already."""
        if self._sequences[key].capacity_tokens >= capacity_tokens:
            return True
        return bool(self._act(Operation(Act.RESIZE, key, capacity_tokens=capacity_tokens)))

    def commit(self, key: int, tokens: SequenceOf[int]) -> None:
        self._act(Operation(Act.COMMIT, key, tokens=tuple(tokens)))

    def snapshot(self, key: int) -> bool:
        """Keep its states as they are, after a multiple of the block's tokens, for prompts that begin like it."""
        return bool(self._act(Operation(Act.SNAPSHOT, key)))

    def suspend(self, key: int) -> None:
        self._act(Operation(Act.SUSPEND, key))

    def close(self, key: int) -> None:
        self._act(Operation(Act.CLOSE, key))

    def contents_lost(self, key: int) -> bool:
        """Whether a sleep has discarded K and V that it had."""
        return self._sequences[key].contents_lost

    def tables(self, key: int) -> list[NDArray[np.int32]]:
        """Its page tables, in the order of the manager's life cycles."""
        sequence = self._sequences[key]
        return [sequence.table(cycle) for cycle in range(self._cycles)]

    def take_log(self) -> tuple[Operation, ...]:
        """The operations since the last call."""
        log, self._log = tuple(self._log), []
        return log

    def replay(self, operations: SequenceOf[Operation]) -> None:
        """Do what the leader did. Raises RanksDisagree at the first different answer."""
        for operation in operations:
            outcome = self._perform(operation)
            if outcome != operation.outcome:
                raise RanksDisagree(
                    f"{operation.act} of sequence {operation.key} answered {outcome} here "
                    f"and {operation.outcome} on the leader"
                )

    def close_all(self) -> None:
        """Let go of every sequence without telling anybody: the rank is ending."""
        for sequence in self._sequences.values():
            sequence.close()
        self._sequences.clear()
        self._log.clear()

    def _act(self, operation: Operation) -> int:
        outcome = self._perform(operation)
        if self._record:
            self._log.append(
                Operation(
                    operation.act,
                    operation.key,
                    outcome,
                    operation.scope,
                    operation.tokens,
                    operation.capacity_tokens,
                )
            )
        return outcome

    def _perform(self, operation: Operation) -> int:
        if operation.act is Act.CREATE:
            sequence = self._manager.create_sequence(operation.scope, operation.tokens)
            self._sequences[operation.key] = sequence
            return sequence.matched_tokens
        sequence = self._sequences[operation.key]
        if operation.act is Act.RESUME:
            return int(sequence.resume())
        if operation.act is Act.RESIZE:
            return int(sequence.resize(operation.capacity_tokens))
        if operation.act is Act.SNAPSHOT:
            return int(sequence.snapshot())
        if operation.act is Act.COMMIT:
            sequence.commit(operation.tokens)
        elif operation.act is Act.SUSPEND:
            sequence.suspend()
        elif operation.act is Act.CLOSE:
            sequence.close()
            del self._sequences[operation.key]
        return 0
