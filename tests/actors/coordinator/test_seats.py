"""Which device each rank gets: by load, never two ranks of a model on one GPU, and never what is somebody else's."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from torpor.actors.coordinator.journal import Journal
from torpor.actors.coordinator.seating import Seating
from torpor.actors.seats import NotSeated, Offer, Seat, Wish, choose

GPUS = ("GPU-b", "GPU-a", "GPU-c")


def offers(ranks: int, given: str = "", node: str = "n1", devices: tuple[str, ...] = GPUS) -> list[Offer]:
    return [Offer(node, devices, given) for _ in range(ranks)]


def devices(wish: Wish, made: list[Offer], load: dict[tuple[str, str], float] | None = None) -> list[str]:
    return [seat.device for seat in choose(wish, made, load or {})]


def test_ranks_of_a_model_get_devices_of_their_own_where_ray_packs_them_on_one() -> None:
    """STRICT_PACK with half a GPU each puts two ranks on one."""
    assert devices(Wish("m", 0.5, alone=True), offers(2, given="GPU-a")) == ["GPU-a", "GPU-b"]


def test_the_device_with_the_least_load_is_taken_and_another_node_is_another_place() -> None:
    load = {("n1", "GPU-a"): 0.5, ("n1", "GPU-b"): 0.5, ("n2", "GPU-c"): 1.0}
    assert devices(Wish("m", 0.5, alone=True), offers(1, given="GPU-a"), load) == ["GPU-c"]
    assert devices(Wish("m", 0.5, alone=True), offers(3), load) == ["GPU-c", "GPU-b", "GPU-a"]


def test_a_whole_gpu_is_the_one_that_ray_has_set_aside() -> None:
    """The others may be somebody else's, e.g. a trainer's, of whom the coordinator knows nothing."""
    given = [Offer("n1", GPUS, "GPU-c"), Offer("n1", GPUS, "GPU-a")]
    assert devices(Wish("m", alone=True, given_only=True), given) == ["GPU-c", "GPU-a"]


def test_a_rank_that_has_its_device_keeps_it_whatever_the_load() -> None:
    made = [Offer("n1", GPUS, held="GPU-c"), Offer("n1", GPUS)]
    load = {("n1", "GPU-c"): 9.0}
    assert devices(Wish("m", 0.5, alone=True), made, load) == ["GPU-c", "GPU-b"]


def test_two_ranks_in_one_lent_gpu_are_refused_with_what_to_do() -> None:
    with pytest.raises(
        NotSeated, match=r"rank 1 on node n1.*never share one: lower tensor_parallel, or give"
    ):
        choose(Wish("m", 0.1, alone=True, given_only=True), offers(2, given="GPU-a"), {})


def test_more_ranks_than_gpus_are_refused() -> None:
    with pytest.raises(NotSeated, match="rank 3 on node n1, which offers GPU-b, GPU-a, GPU-c"):
        choose(Wish("m", 0.25, alone=True), offers(4), {})


def test_a_lent_group_that_lends_no_gpu_is_refused_where_the_node_has_several() -> None:
    wish = Wish("m", 0.0, alone=True, given_only=True)
    with pytest.raises(NotSeated, match=r"node n1 has 3; set gpus_per_rank to a share.*such as 0\.1"):
        choose(wish, offers(1), {})
    assert devices(wish, offers(1, devices=("GPU-a",))) == ["GPU-a"]


def test_ranks_share_host_devices_once_there_are_no_more() -> None:
    host = ("host:lab-0", "host:lab-1")
    assert devices(Wish("m"), offers(3, devices=host)) == ["host:lab-0", "host:lab-1", "host:lab-0"]


async def test_seats_outlive_their_coordinator_for_the_models_that_are_still_there(tmp_path: Path) -> None:
    journal = await Journal.open(tmp_path / "journal.db")
    seating = Seating()
    await seating.open(journal, ())
    taken = await asyncio.gather(
        *(seating.take(Wish(model, 0.5, alone=True), offers(1)) for model in ("one", "two", "three"))
    )
    assert sorted(seats[0].device for seats in taken) == sorted(GPUS), "each has found the load of the others"
    again = Seating()
    await again.open(journal, ("one", "three"))
    assert await again.take(Wish("four", 0.5), offers(1)) == (Seat(0, "n1", taken[1][0].device, 0.5),)
    seating.forget("one")
    assert (await seating.take(Wish("five", 0.5), offers(1)))[0].device == taken[0][0].device
    await journal.close()
