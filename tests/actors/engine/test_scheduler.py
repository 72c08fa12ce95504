"""Who computes what in a step, against a pool that is a plain number."""

from __future__ import annotations

from collections.abc import Sequence

from torpor.actors.engine.detokenizer import IncrementalDetokenizer, StopStrings
from torpor.actors.engine.plan import Chunk
from torpor.actors.engine.request import Place, Request
from torpor.actors.engine.sampling import Chosen, Sampler
from torpor.actors.engine.scheduler import Limits, Scheduler
from torpor.actors.engine.tokenizer import ByteTokenizer
from torpor.actors.messages import FinishReason, Sampling


class CountingBook:
    """Room for `places` tokens on the device, and a host with or without room for those who are suspended."""

    def __init__(self, places: int, host: bool) -> None:
        self.places = places
        self.host = host
        self.capacity: dict[int, int] = {}
        self.active: set[int] = set()
        self.closed: list[int] = []
        self.committed: dict[int, int] = {}
        self.snapshots: list[tuple[int, int]] = []

    def used(self) -> int:
        return sum(size for key, size in self.capacity.items() if key in self.active or not self.host)

    def create(self, key: int, scope: str, tokens: Sequence[int]) -> int:
        assert key not in self.capacity
        self.capacity[key] = 0
        return 0

    def resume(self, key: int) -> bool:
        assert key not in self.active
        self.active.add(key)
        if self.used() > self.places:
            self.active.remove(key)
            return False
        return True

    def suspend(self, key: int) -> None:
        self.active.remove(key)

    def resize(self, key: int, capacity_tokens: int) -> bool:
        assert key in self.active
        more = max(capacity_tokens - self.capacity[key], 0)
        if self.used() + more > self.places:
            return False
        self.capacity[key] += more
        return True

    def commit(self, key: int, tokens: Sequence[int]) -> None:
        assert key in self.active
        self.committed[key] = self.committed.get(key, 0) + len(tokens)

    def snapshot(self, key: int) -> bool:
        self.snapshots.append((key, self.committed[key]))
        return True

    def close(self, key: int) -> None:
        del self.capacity[key]
        self.active.discard(key)
        self.closed.append(key)


def request(key: int, prompt: int, max_tokens: int) -> Request:
    return Request(
        id=f"r{key}",
        scope="",
        prompt=tuple(range(prompt)),
        max_tokens=max_tokens,
        end_token_ids=frozenset(),
        sampler=Sampler(Sampling(temperature=0.0), 0),
        detokenizer=IncrementalDetokenizer(ByteTokenizer(256)),
        stops=StopStrings(()),
        key=key,
    )


def scheduler(
    book: CountingBook, *requests: Request, max_running: int = 8, step_tokens: int = 100
) -> Scheduler:
    made = Scheduler(book, Limits(max_running, step_tokens))  # type: ignore[arg-type]
    for one in requests:
        made.add(one)
    return made


def step(made: Scheduler) -> list[Chunk]:
    chunks, ended = made.schedule()
    assert not ended
    made.complete(chunks, lambda *_: Chosen(65))
    return chunks


def shape(chunks: Sequence[Chunk]) -> list[tuple[int, int, int]]:
    return [(chunk.key, chunk.start, len(chunk.tokens)) for chunk in chunks]


def test_long_prompts_are_cut_and_decodes_go_on_beside_them() -> None:
    made = scheduler(CountingBook(1000, True), request(0, 4, 9), request(1, 25, 9), step_tokens=10)
    assert shape(step(made)) == [(0, 0, 4), (1, 0, 6)]
    assert shape(step(made)) == [(0, 4, 1), (1, 6, 10)]
    assert shape(step(made)) == [(0, 5, 1), (1, 16, 9)]
    assert shape(step(made)) == [(0, 6, 1), (1, 25, 1)]


def test_prompts_are_cut_where_states_are_kept_at_the_last_border_and_every_so_often() -> None:
    book = CountingBook(1000, True)
    made = Scheduler(book, Limits(8, 10, state_block=4))  # type: ignore[arg-type]
    made.add(request(0, 15, 9))
    cuts = [shape(step(made)) for _ in range(10)]
    assert [cut[0][1:] for cut in cuts[:4]] == [(0, 8), (8, 4), (12, 3), (15, 1)]
    assert book.snapshots == [(0, 8), (0, 12), (0, 16)]
    assert all(place % 4 == 0 for _, place in book.snapshots)


def test_where_windows_give_pages_back_a_prompt_begins_with_room_for_its_first_chunk() -> None:
    """And a chunk that finds no room is halved, down to one token."""
    book = CountingBook(7, True)
    made = Scheduler(book, Limits(8, 10, whole_prompts=False))  # type: ignore[arg-type]
    made.add(request(0, 30, 9))
    assert shape(step(made)) == [(0, 0, 5)]
    assert shape(step(made)) == [(0, 5, 2)]
    chunks, (ended,) = made.schedule()
    assert (chunks, ended.finish_reason) == ([], FinishReason.ERROR)


def test_no_more_run_at_once_than_allowed() -> None:
    made = scheduler(CountingBook(1000, True), *(request(key, 4, 2) for key in range(5)), max_running=2)
    assert [chunk.key for chunk in step(made)] == [0, 1]
    assert [chunk.key for chunk in step(made)] == [0, 1]  # their last tokens
    assert [chunk.key for chunk in step(made)] == [2, 3]


def test_the_youngest_gives_way_and_comes_back_before_anybody_new_begins() -> None:
    requests = [request(0, 8, 4), request(1, 8, 4), request(2, 8, 4)]
    book = CountingBook(18, host=True)
    made = scheduler(book, *requests)
    assert [chunk.key for chunk in step(made)] == [0, 1]  # the third does not fit
    assert [chunk.key for chunk in step(made)] == [0, 1]
    assert [chunk.key for chunk in step(made)] == [0]  # 10 and 10 are too many
    assert (requests[1].place, requests[2].place) == (Place.SUSPENDED, Place.WAITING)
    assert [chunk.key for chunk in step(made)] == [0]
    assert requests[0].finish is FinishReason.LENGTH
    assert shape(step(made)) == [(1, 9, 1), (2, 0, 8)]
    assert 1 not in book.closed  # what it had computed was kept
    assert made.preemptions == 1


def test_without_a_host_the_youngest_is_let_go_and_computed_again_with_what_it_said() -> None:
    requests = [request(0, 8, 4), request(1, 8, 4)]
    book = CountingBook(18, host=False)
    made = scheduler(book, *requests)
    step(made)
    step(made)
    assert [chunk.key for chunk in step(made)] == [0]
    assert (requests[1].place, book.closed) == (Place.WAITING, [1])
    step(made)
    assert shape(step(made)) == [(1, 0, 10)]
    assert len(requests[1].output) == 3


def test_a_place_that_comes_free_is_taken_while_others_still_run() -> None:
    requests = [request(0, 8, 2), request(1, 8, 9), request(2, 8, 2)]
    made = scheduler(CountingBook(26, host=True), *requests)
    assert [chunk.key for chunk in step(made)] == [0, 1, 2]
    made = scheduler(CountingBook(20, host=True), request(0, 8, 2), request(1, 8, 9), request(2, 8, 2))
    assert [chunk.key for chunk in step(made)] == [0, 1]
    assert [chunk.key for chunk in step(made)] == [0, 1]
    assert [chunk.key for chunk in step(made)] == [1, 2]


def test_a_text_that_outgrows_the_whole_pool_ends_with_an_error_that_says_what_to_raise() -> None:
    made = scheduler(CountingBook(10, host=True), request(0, 8, 9))
    while True:
        chunks, ended = made.schedule()
        if ended:
            break
        made.complete(chunks, lambda *_: Chosen(65))
    assert (ended[0].finish_reason, ended[0].completion_tokens) == (FinishReason.ERROR, 3)
    assert "raise kv_cache.gpu_bytes" in ended[0].error
    assert len(made) == 0


def test_a_cancel_reaches_a_request_wherever_it_is() -> None:
    requests = [request(0, 8, 4), request(1, 8, 4), request(2, 8, 4)]
    book = CountingBook(18, host=True)
    made = scheduler(book, *requests)
    for _ in range(3):
        step(made)
    assert [one.place for one in requests] == [Place.RUNNING, Place.SUSPENDED, Place.WAITING]
    ended = made.cancel(["r0", "r1", "r2", "unknown"])
    assert [event.finish_reason for event in ended] == [FinishReason.ABORT] * 3
    assert (len(made), book.capacity) == (0, {})
