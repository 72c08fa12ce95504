"""The coordinator: a pure state machine, a journal, and Ray at the edge."""

from torpor.actors.coordinator.coordinator import Coordinator
from torpor.actors.coordinator.journal import Journal, JournalError
from torpor.actors.coordinator.memory import Fault, MemoryCluster, MemoryRank
from torpor.actors.coordinator.memory_maker import MemoryMaker

__all__ = [
    "Coordinator",
    "Fault",
    "Journal",
    "JournalError",
    "MemoryCluster",
    "MemoryMaker",
    "MemoryRank",
]
