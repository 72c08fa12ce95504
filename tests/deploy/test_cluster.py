"""What the chart and deploy/jobs run in their pods, run here: the apply job, a front door, its probes and its end."""

from __future__ import annotations

import shlex
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from chart.rendering import Rendered, needs_helm
from deploy.clusters import Machine, until
from deploy.doors import MODEL, TOKEN, Door, caller, job_of, render_small

pytestmark = [needs_helm, pytest.mark.long]
JOBS = Path(__file__).resolve().parents[2] / "deploy" / "jobs"


@pytest.fixture(scope="module")
def rendered(tmp_path_factory: pytest.TempPathFactory) -> Rendered:
    return render_small(tmp_path_factory.mktemp("values"), "--set", "test.tokenSecret=operator")


@pytest.fixture(scope="module")
def machine(rendered: Rendered) -> Iterator[Machine]:
    made = Machine()
    try:
        cluster = rendered.of_kind("RayCluster")["spec"]
        made.start_ray(
            cluster["headGroupSpec"]["rayStartParams"], cluster["workerGroupSpecs"][0]["rayStartParams"]
        )
        yield made
    finally:
        made.end()


@pytest.fixture(scope="module")
def applied(machine: Machine, rendered: Rendered) -> str:
    """The chart's job, begun before the head has the file that it waits for: its log."""
    text, entrypoint = job_of(machine, rendered)
    file = machine.folder / "etc/torpor/torpor.yaml"
    file.write_text("models: []\n")  # what was there before an upgrade
    job = machine.submit(entrypoint)
    until(lambda: machine.job(job)["status"] == "RUNNING", 60)
    time.sleep(3)
    assert machine.job(job)["status"] == "RUNNING"
    file.write_text(text)
    return machine.finished(job)


@pytest.fixture(scope="module")
def door(machine: Machine, rendered: Rendered, applied: str) -> Iterator[Door]:
    made = Door(machine, rendered)
    try:
        assert made.probe("readinessProbe") == 0, "nobody sends requests to a door that has not joined"
        made.wait_until_ready()
        yield made
    finally:
        made.process.kill()


def test_the_job_applies_the_file_that_it_has_waited_for(applied: str) -> None:
    assert f"{MODEL}: awake" in applied


def test_the_door_is_alive_and_ready_while_its_model_sleeps(door: Door) -> None:
    with caller(door) as client:
        client.post("/sleep", json={}).raise_for_status()
        assert client.get(f"/models/{MODEL}").json()["state"] == "asleep"
        assert (door.probe("livenessProbe"), door.probe("readinessProbe")) == (200, 200)
        client.post("/wake", json={}).raise_for_status()
    assert httpx.get(f"{door.url}/models").status_code == 401, "tokens are asked for"


def test_what_helm_test_runs_succeeds(door: Door, machine: Machine, rendered: Rendered) -> None:
    pod = rendered.of_kind("Pod", "-test")["spec"]["containers"][0]
    (machine.folder / "etc/torpor-token").mkdir()
    (machine.folder / "etc/torpor-token/token").write_text(TOKEN)
    variables = {each["name"]: machine.moved(each["value"]) for each in pod["env"]}
    variables["TORPOR_URL"] = door.url
    command = [*pod["command"], *pod["args"]]
    done = subprocess.run(
        command,
        env=machine.environment(**variables),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    wrong = machine.environment(**(variables | {"MODEL": "nobody"}))
    assert subprocess.run(command, env=wrong, capture_output=True, timeout=120, check=False).returncode != 0


def by_script(machine: Machine, name: str) -> str:
    variables = machine.inside() | {"RAY_ADDRESS": f"http://127.0.0.1:{machine.jobs_port}"}
    config = str(machine.folder / "etc/torpor/torpor.yaml")
    words = [str(JOBS / name), *([config] if name == "apply.sh" else [])]
    done = subprocess.run(words, env=variables, capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_jobs_of_deploy_run(machine: Machine, door: Door) -> None:
    assert f"{MODEL} awake" in by_script(machine, "status.sh")
    assert "Plan; coordinator running" in by_script(machine, "apply.sh"), "it compares first"
    log = machine.finished(machine.submit(f"python3 {shlex.quote(str(JOBS / 'train.py'))} {MODEL}"))
    assert "trained, the loss is" in log and f"{MODEL} is awake again" in log
    with caller(door) as client:
        assert client.get(f"/models/{MODEL}").json()["state"] == "awake"


def test_the_end_of_a_door_loses_no_request_and_fits_into_its_grace(door: Door, rendered: Rendered) -> None:
    """It ends the door."""
    answers: list[httpx.Response] = []
    body = {"model": MODEL, "prompt": "1, 2, 3, 4, 5, 6,", "max_tokens": 120, "temperature": 0}

    def ask() -> None:
        with caller(door) as client:
            answers.append(client.post("/v1/completions", json=body))

    asking = threading.Thread(target=ask)
    asking.start()
    with caller(door) as client:
        until(lambda: client.get(f"/models/{MODEL}").json()["ranks"][0]["live_sequences"] > 0, 30)
        door.process.send_signal(signal.SIGTERM)
        asked_at = time.monotonic()
        until(lambda: door.probe("readinessProbe") == 503, 3)
        assert door.probe("livenessProbe") == 200
        late = client.post("/v1/completions", json=body | {"max_tokens": 1})
        assert late.status_code == 200, "who has not heard of the end yet is served"
    asking.join()
    assert door.process.wait(door.grace_s) == 0, door.log.read_text()
    assert time.monotonic() - asked_at < door.grace_s
    assert answers[0].status_code == 200
    assert answers[0].json()["choices"][0]["finish_reason"] in ("length", "stop")


def test_a_door_of_an_upgrade_that_drops_what_runs_and_parks_does_so_within_its_grace(
    machine: Machine, rendered: Rendered, door: Door, tmp_path: Path
) -> None:
    """What the values say: no notice, a second for what runs, which is told, and the model asleep at last."""
    assert door.process.poll() is not None, "the test before has ended it"
    times = ("notice_s=0", "drain_s=1", "park=true", "park_timeout_s=30")
    values = [word for each in times for word in ("--set", f"config.shutdown.{each}")]
    quick = render_small(tmp_path, *values)
    file = machine.folder / "etc/torpor/torpor.yaml"
    port = door.url.rpartition(":")[2]
    file.write_text(machine.moved(quick.config_text).replace("port: 8700", f"port: {port}"))
    parking = Door(machine, quick)
    try:
        parking.wait_until_ready()
        assert parking.grace_s < door.grace_s
        body = {"model": MODEL, "prompt": "1, 2, 3,", "max_tokens": 2000, "stream": True}
        with caller(parking) as client, client.stream("POST", "/v1/completions", json=body) as answer:
            lines = answer.iter_lines()
            next(lines)
            parking.process.send_signal(signal.SIGTERM)
            told = [line for line in lines if line]
        assert parking.process.wait(parking.grace_s) == 0, parking.log.read_text()
    finally:
        parking.process.kill()
    assert "this front end is ending" in told[-2], "whoever is cut off is told why"
    assert f"{MODEL}: parked" in parking.log.read_text()
    assert f"{MODEL} asleep" in by_script(machine, "status.sh")
