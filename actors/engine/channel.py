"""The CPU channel over which the leader sends its steps: one connection a follower, each message acknowledged.

A forward begins on no rank before every rank has agreed to its plan: one that disagrees leaves nobody in a collective.
"""

from __future__ import annotations

import time
from multiprocessing.connection import Client, Connection, Listener

from torpor.actors.engine.errors import RanksDisagree, StepLoopDied
from torpor.actors.engine.plan import Go, Message
from torpor.native.errors import TorporError

CONNECT_RETRY_S = 0.05


def parse_address(text: str) -> tuple[str, int]:
    """ "host:port" to a pair. Raises ValueError."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit():
        raise ValueError(f"{text!r} is not host:port")
    return host, int(port)


def _listen(address: str, key: bytes, followers: int) -> Listener:
    try:
        return Listener(parse_address(address), backlog=followers, authkey=key)
    except OSError as error:
        raise TorporError(f"the leader cannot listen at {address} for its followers: {error}") from error


class LeaderChannel:
    """Rank 0's end. With no followers every call is free."""

    def __init__(self, address: str, key: bytes, followers: int, timeout_s: float) -> None:
        self._followers = followers
        self._timeout_s = timeout_s
        self._listener = (
            Listener(parse_address(address), backlog=followers, authkey=key) if followers else None
        )
        self._connections: dict[int, Connection] = {}

    def connect(self) -> None:
        """Wait for every follower. Raises TimeoutError."""
        if self._listener is None:
            return
        socket = self._listener._listener._socket  # type: ignore[attr-defined]  # Listener has no deadline
        socket.settimeout(self._timeout_s)
        try:
            while len(self._connections) < self._followers:
                connection = self._listener.accept()
                self._connections[int(connection.recv())] = connection
        except TimeoutError:
            missing = sorted(set(range(1, self._followers + 1)) - set(self._connections))
            raise TimeoutError(f"ranks {missing} did not join within {self._timeout_s:.0f} s") from None
        finally:
            self._listener.close()

    def send(self, message: Message) -> None:
        """Returns when every follower has taken it. Raises RanksDisagree or StepLoopDied."""
        self._post(message)
        for rank, connection in self._connections.items():
            self._acknowledgement(rank, connection)

    def go(self) -> None:
        """Let every follower run the forward of the plan that it took. Returns at once."""
        self._post(Go())

    def close(self) -> None:
        if self._listener is not None:
            self._listener.close()
        for connection in self._connections.values():
            connection.close()

    def _post(self, message: Message) -> None:
        for rank, connection in self._connections.items():
            try:
                connection.send(message)
            except OSError as error:
                raise StepLoopDied(f"follower rank {rank} is gone: {error}") from error

    def _acknowledgement(self, rank: int, connection: Connection) -> None:
        try:
            if not connection.poll(self._timeout_s):
                raise StepLoopDied(f"follower rank {rank} did not answer within {self._timeout_s:.0f} s")
            problem = connection.recv()
        except (EOFError, OSError) as error:
            raise StepLoopDied(f"follower rank {rank} is gone") from error
        if problem:
            raise RanksDisagree(f"follower rank {rank}: {problem}")


class FollowerChannel:
    """A follower's end."""

    def __init__(self, address: str, key: bytes, rank: int, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                self._connection = Client(parse_address(address), authkey=key)
                break
            except OSError as error:
                if time.monotonic() >= deadline:
                    raise TimeoutError(f"the leader does not listen at {address}: {error}") from error
                time.sleep(CONNECT_RETRY_S)
        self._connection.send(rank)

    def receive(self, timeout_s: float) -> Message | None:
        """The next message, or None after timeout_s. Raises StepLoopDied when the leader is gone."""
        try:
            if not self._connection.poll(timeout_s):
                return None
            message: Message = self._connection.recv()
            return message
        except (EOFError, OSError) as error:
            raise StepLoopDied("the leader rank is gone") from error

    def acknowledge(self, problem: str = "") -> None:
        try:
            self._connection.send(problem)
        except OSError as error:
            raise StepLoopDied("the leader rank is gone") from error

    def close(self) -> None:
        self._connection.close()
