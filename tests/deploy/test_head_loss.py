"""Ray's head is killed and comes back, with its state in redis (Debian's redis-server): awake models go on serving."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
from chart.rendering import Rendered, needs_helm
from deploy.clusters import Machine, pods_can_be_made, until
from deploy.doors import MODEL, Door, caller, job_of, render_small
from e2e.serving import free_port

pytestmark = [
    needs_helm,
    pytest.mark.long,
    pytest.mark.skipif(shutil.which("redis-server") is None, reason="this machine has no redis-server"),
    pytest.mark.skipif(not pods_can_be_made(), reason="this machine lets nobody make a process namespace"),
]
BODY = {"model": MODEL, "prompt": "1, 2, 3, 4, 5, 6,", "max_tokens": 100, "temperature": 0}
BACK_S = 90.0  # from the new head's start; Ray needs 20 of them to see that the old one's node is dead
ENDED_S = 30.0  # from when it is known: notice of 5 s, and what runs


@dataclass
class House:
    """What KubeRay does for gcsFaultToleranceOptions is done by hand here. One door at a time."""

    machine: Machine
    rendered: Rendered
    doors: list[Door] = field(default_factory=list)

    @property
    def cluster(self) -> dict[str, Any]:
        return dict(self.rendered.of_kind("RayCluster")["spec"])

    @property
    def head(self) -> dict[str, str]:
        return dict(self.cluster["headGroupSpec"]["rayStartParams"])

    def set_up(self, redis_port: int) -> None:
        machine, here = self.machine, str(redis_port)
        redis = ("redis-server", "--port", here, "--bind", "127.0.0.1", "--save", "", "--appendonly", "no")
        machine.start(*redis, environment=machine.environment(), log="redis.log")
        machine.ray_variables = {
            "RAY_REDIS_ADDRESS": self.cluster["gcsFaultToleranceOptions"]["redisAddress"],
            "RAY_external_storage_namespace": machine.mark,
            "RAY_gcs_rpc_server_reconnect_timeout_s": "600",
        }
        machine.start_ray(self.head, self.cluster["workerGroupSpecs"][0]["rayStartParams"])
        text, entrypoint = job_of(machine, self.rendered)
        (machine.folder / "etc/torpor/torpor.yaml").write_text(text)
        machine.finished(machine.submit(entrypoint))

    def open_door(self, as_pod: bool) -> Door:
        """A new one, after the end of the one before."""
        self.close_door()
        self.doors.append(Door(self.machine, self.rendered, as_pod))
        self.doors[-1].wait_until_ready()
        return self.doors[-1]

    def close_door(self) -> None:
        for door in self.doors[-1:]:
            door.process.kill()
            door.process.wait(10)


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    port = free_port()
    rendered = render_small(
        tmp_path_factory.mktemp("values"),
        *("--set", "ray.gcsFaultTolerance.enabled=true"),
        *("--set", f"ray.gcsFaultTolerance.redisAddress=127.0.0.1:{port}"),
    )
    made = House(Machine(), rendered)
    try:
        made.set_up(port)
        yield made
    finally:
        made.machine.end()


@contextmanager
def a_request_that_runs(door: Door) -> Iterator[Callable[[], httpx.Response]]:
    """Begun, and not at its end. Yields what waits for its answer."""
    answers: list[httpx.Response] = []

    def ask() -> None:
        with caller(door) as client:
            answers.append(client.post("/v1/completions", json=BODY))

    def answer() -> httpx.Response:
        asking.join()
        (got,) = answers
        return got

    asking = threading.Thread(target=ask)
    asking.start()
    with caller(door) as client:
        until(lambda: client.get(f"/models/{MODEL}").json()["ranks"][0]["live_sequences"] > 0, 30)
    yield answer
    asking.join()


def obeys(door: Door, rank_pid: int) -> None:
    """The rank, which is the same process as before, sleeps and wakes when it is told to."""
    with caller(door) as client:
        for call, state in (("/sleep", "asleep"), ("/wake", "awake")):
            client.post(call, json={}).raise_for_status()
            view = client.get(f"/models/{MODEL}").json()
            assert (view["state"], view["ranks"][0]["pid"]) == (state, rank_pid)


def rank_pid(door: Door) -> int:
    with caller(door) as client:
        return int(client.get(f"/models/{MODEL}").json()["ranks"][0]["pid"])


def ended_in_order(door: Door, timeout_s: float) -> None:
    assert door.process.wait(timeout_s) == 1, door.log.read_text()
    log = door.log.read_text()
    assert "the raylet by which this front end was in Ray's cluster has died" in log
    assert "Traceback" not in log


def test_a_door_whose_raylet_dies_lets_answers_end_and_gives_way_to_another(house: House) -> None:
    """Else it would not hear of the coordinator any more once that has moved, and never be ready again."""
    door = house.open_door(as_pod=True)
    with a_request_that_runs(door) as answer:
        door.kill_raylet()
        assert door.probe("livenessProbe") == 200
        assert answer().status_code == 200, answer().text
    ended_in_order(door, ENDED_S)
    obeys(new := house.open_door(as_pod=True), rank_pid(new))


def test_a_door_serves_on_while_the_head_is_gone_and_is_ready_again_when_it_is_back(house: House) -> None:
    door = house.open_door(as_pod=True)
    before = rank_pid(door)
    with a_request_that_runs(door) as answer:
        house.machine.kill_head()
        assert answer().status_code == 200, answer().text
    with pytest.raises(httpx.TransportError):
        httpx.get(house.machine.jobs)
    with caller(door) as client:
        while_gone = client.post("/v1/completions", json=BODY | {"max_tokens": 4})
        assert while_gone.status_code == 200, while_gone.text
        until(lambda: door.probe("readinessProbe") == 503, 10)
        assert door.probe("livenessProbe") == 200, "restarting the door would mend nothing"
    began_s = time.monotonic()
    house.machine.start_head(house.head)
    until(lambda: door.probe("readinessProbe") == 200, BACK_S)
    print(f"ready again {time.monotonic() - began_s:.1f} s after the head's start")
    assert door.process.poll() is None
    obeys(door, before)
    with caller(door) as client:
        again = client.post("/v1/completions", json=BODY)
    assert again.json()["choices"] == answer().json()["choices"]


def test_a_door_whose_raylet_was_the_heads_serves_on_until_the_head_is_back_and_gives_way(
    house: House,
) -> None:
    """As on one machine without pods, where Ray lets drivers join by the head's raylet. Nobody has asked it before."""
    door = house.open_door(as_pod=False)
    before = rank_pid(door)
    time.sleep(5)  # it has connected to the leader, whom nobody has asked by it
    with caller(door) as client:
        house.machine.kill_head()
        time.sleep(10)  # its raylet is known to be dead by then
        while_gone = client.post("/v1/completions", json=BODY | {"max_tokens": 4})
        assert while_gone.status_code == 200, while_gone.text + door.log.read_text()
    began_s = time.monotonic()
    house.machine.start_head(house.head)
    ended_in_order(door, BACK_S)
    obeys(house.open_door(as_pod=False), before)
    print(f"a new one was ready {time.monotonic() - began_s:.1f} s after the head's start")
