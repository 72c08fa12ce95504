"""Ray's head is killed and comes back, with its state in redis (Debian's redis-server): awake models go on serving."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from chart.rendering import needs_helm
from deploy.clusters import Machine, until
from deploy.doors import MODEL, Door, caller, job_of, render_small
from e2e.serving import free_port

pytestmark = [
    needs_helm,
    pytest.mark.long,
    pytest.mark.skipif(shutil.which("redis-server") is None, reason="this machine has no redis-server"),
]


@pytest.fixture
def machine() -> Iterator[Machine]:
    made = Machine()
    try:
        yield made
    finally:
        made.end()


def test_awake_models_serve_while_the_head_is_gone_and_obey_when_it_is_back(
    machine: Machine, tmp_path: Path
) -> None:
    """What KubeRay does for gcsFaultToleranceOptions is done by hand here."""
    port = free_port()
    rendered = render_small(
        tmp_path,
        *("--set", "ray.gcsFaultTolerance.enabled=true"),
        *("--set", f"ray.gcsFaultTolerance.redisAddress=127.0.0.1:{port}"),
    )
    redis = ("redis-server", "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no")
    machine.start(*redis, environment=machine.environment(), log="redis.log")
    cluster = rendered.of_kind("RayCluster")["spec"]
    machine.ray_variables = {
        "RAY_REDIS_ADDRESS": cluster["gcsFaultToleranceOptions"]["redisAddress"],
        "RAY_external_storage_namespace": machine.mark,
        "RAY_gcs_rpc_server_reconnect_timeout_s": "600",
    }
    head = cluster["headGroupSpec"]["rayStartParams"]
    machine.start_ray(head, cluster["workerGroupSpecs"][0]["rayStartParams"])
    text, entrypoint = job_of(machine, rendered)
    (machine.folder / "etc/torpor/torpor.yaml").write_text(text)
    machine.finished(machine.submit(entrypoint))
    door = Door(machine, rendered)
    door.wait_until_ready()

    body = {"model": MODEL, "prompt": "1, 2, 3, 4, 5, 6,", "max_tokens": 100, "temperature": 0}
    answers: list[httpx.Response] = []

    def ask() -> None:
        with caller(door) as client:
            answers.append(client.post("/v1/completions", json=body))

    with caller(door) as client:
        before = client.get(f"/models/{MODEL}").json()
        asking = threading.Thread(target=ask)
        asking.start()
        until(lambda: client.get(f"/models/{MODEL}").json()["ranks"][0]["live_sequences"] > 0, 30)
        machine.kill_head()
        asking.join()
        assert answers[0].status_code == 200, answers[0].text
        with pytest.raises(httpx.TransportError):
            httpx.get(machine.jobs)
        while_gone = client.post("/v1/completions", json=body | {"max_tokens": 4})
        assert while_gone.status_code == 200, while_gone.text
        assert door.probe("livenessProbe") == 200, "restarting the door would mend nothing"

        machine.start_head(head)
    door.process.kill()
    door.process.wait(10)
    new = Door(
        machine, rendered
    )  # as `kubectl rollout restart` makes one: the old one does not find the coordinator
    new.wait_until_ready()
    with caller(new) as client:
        after = client.get(f"/models/{MODEL}").json()
        assert after["ranks"][0]["pid"] == before["ranks"][0]["pid"], "the rank is the same process"
        for call, state in (("/sleep", "asleep"), ("/wake", "awake")):
            client.post(call, json={}).raise_for_status()
            assert client.get(f"/models/{MODEL}").json()["state"] == state
        again = client.post("/v1/completions", json=body)
        assert again.json()["choices"] == answers[0].json()["choices"]
