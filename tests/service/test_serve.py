"""The running service: its start, its end, and clients that go away."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from service_process import ServiceProcess, running

from torpor.actors.config import ClusterConfig
from torpor.actors.ports import ControlUnreachable
from torpor.service.cli.serve_command import start_ray_cluster
from torpor.service.loading import tell_states
from torpor.service.logs import make_logger
from torpor.service.serve import ServeError, Surroundings, bind, check_devices, check_models, serve
from torpor.service.settings.load import SettingsError, load_settings

HELLO = {"model": "chat", "messages": [{"role": "user", "content": "Go on."}], "stream": True}


@pytest.fixture(scope="module")
def endless(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceProcess]:
    """A service whose model never comes to an end."""
    with running(tmp_path_factory.mktemp("endless"), "--endless") as service:
        yield service


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_in_order_with_0_and_tells_of_progress(tmp_path: Path, number: int) -> None:
    with running(tmp_path) as service:
        time.sleep(0.6)  # progress is told every quarter of a second
        code, out, err = service.end(number)
    assert code == 0, err
    assert "requests left: 0" in out  # the cluster was shut down, once, after the last request
    for line in ("Starting chat", f"Listening on {service.url}", "chat: loading", "chat: awake, 1 of 1"):
        assert line in err
    assert "Traceback" not in err
    with pytest.raises(httpx.ConnectError):
        httpx.get(service.url)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_the_cluster_starts_ends_it_whole_once_it_can_be_ended(
    tmp_path: Path, number: int
) -> None:
    service = ServiceProcess(tmp_path, "--slow-start")
    assert service.process.stdout is not None
    assert service.process.stdout.readline() == "starting\n"
    code, out, err = service.end(number)
    assert code == 0, err
    assert "requests left: 0" in out  # shut down, though it never served
    assert "Listening" not in err
    assert "Traceback" not in err


def test_it_is_alive_but_not_ready_while_models_load(tmp_path: Path) -> None:
    service = ServiceProcess(tmp_path, "--loads-on-word")
    seen = set()
    try:
        for _ in range(1500):
            try:
                alive = httpx.get(f"{service.url}/livez").status_code
                seen.add((alive, httpx.get(f"{service.url}/readyz").status_code))
            except httpx.TransportError:
                pass
            if (200, 503) in seen:
                (tmp_path / "load").touch()
            if (200, 200) in seen:
                break
            time.sleep(0.02)
    finally:
        code, _, err = service.end(signal.SIGTERM)
    assert seen == {(200, 503), (200, 200)}
    assert code == 0, err


def test_a_model_that_cannot_be_loaded_ends_it_with_1_and_the_reason(tmp_path: Path) -> None:
    service = ServiceProcess(tmp_path, "--loading-fails")
    out, err = service.process.communicate(timeout=60)
    assert service.process.returncode == 1
    assert "chat: loading failed: the checkpoint has no tensor 'lm_head'" in err
    assert "requests left: 0" in out
    assert "Traceback" not in err


def test_a_client_that_leaves_a_stream_closes_its_generator(endless: ServiceProcess) -> None:
    """G4: seen by the model, not by the socket alone."""
    with httpx.stream("POST", f"{endless.url}/v1/chat/completions", json=HELLO, timeout=10) as answer:
        assert answer.status_code == 200
        lines = answer.iter_lines()
        words = [json.loads(next(line for line in lines if line)[6:]) for _ in range(3)]
        assert words[1]["choices"][0]["delta"]["content"] == "Par"
    assert admitted_and_closed(endless, 1)


def test_a_client_that_leaves_before_a_whole_answer_closes_its_generator(endless: ServiceProcess) -> None:
    """G4: nothing is sent before the end, so only watching the connection finds out."""
    with httpx.Client(base_url=endless.url, timeout=0.5) as client, pytest.raises(httpx.ReadTimeout):
        client.post("/v1/chat/completions", json=HELLO | {"stream": False})
    assert admitted_and_closed(endless, 2)


def admitted_and_closed(service: ServiceProcess, admitted: int) -> bool:
    """So many were admitted, and no generator is open any more."""
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        text = httpx.get(f"{service.url}/metrics").text
        if f'torpor_admissions_total{{model="chat",reason="",result="admitted"}} {admitted}.0' in text and (
            'torpor_open_requests{model="chat"} 0.0' in text
        ):
            return True
        time.sleep(0.05)
    return False


def test_a_signal_ends_open_streams_with_an_error_event_after_a_while(tmp_path: Path) -> None:
    """G3: no request ends in silence."""
    with (
        running(tmp_path, "--endless", environment={"TORPOR_SHUTDOWN": "{drain_s: 0.5}"}) as service,
        httpx.stream("POST", f"{service.url}/v1/chat/completions", json=HELLO, timeout=10) as answer,
    ):
        lines = answer.iter_lines()
        next(lines)
        began = time.monotonic()
        service.process.send_signal(signal.SIGTERM)
        told = [line for line in lines if line]
        out, err = service.process.communicate(timeout=30)
    assert service.process.returncode == 0, err
    assert 0.4 < time.monotonic() - began < 4
    assert "requests left: 0" in out
    assert "Traceback" not in err
    assert "this front end is ending" in json.loads(told[-2][6:])["error"]["message"]
    assert told[-1] == "data: [DONE]"


def test_a_cluster_that_is_lost_under_it_ends_open_streams_and_then_it_with_1_and_the_reason(
    tmp_path: Path,
) -> None:
    """M6, G3."""
    with (
        running(tmp_path, "--endless") as service,
        httpx.stream("POST", f"{service.url}/v1/chat/completions", json=HELLO, timeout=10) as answer,
    ):
        lines = answer.iter_lines()
        next(lines)
        began = time.monotonic()
        lose(tmp_path / "lost", "Ray's head has died; start again.")
        told = [line for line in lines if line]
        out, err = service.process.communicate(timeout=30)
    assert service.process.returncode == 1, err
    assert time.monotonic() - began < 5
    assert "torpor: Ray's head has died; start again." in err
    assert "requests left: 0" in out
    assert "Traceback" not in err
    assert "Ray's head has died; start again." in json.loads(told[-2][6:])["error"]["message"]


def test_a_front_end_that_has_to_start_anew_lets_answers_end_and_ends_with_1_and_the_reason(
    tmp_path: Path,
) -> None:
    """M6: nothing is lost by it, and whoever sends requests is told by /readyz. The supervisor's signal is heeded."""
    times = {"TORPOR_SHUTDOWN": json.dumps({"notice_s": 2, "drain_s": 3})}
    with (
        running(tmp_path, "--joins", "--endless", environment=times) as service,
        httpx.stream("POST", f"{service.url}/v1/chat/completions", json=HELLO, timeout=20) as answer,
    ):
        lines = answer.iter_lines()
        next(lines)
        began = time.monotonic()
        lose(tmp_path / "lost-only-here", "the raylet has died; start again.")
        while httpx.get(f"{service.url}/readyz").status_code == 200:
            assert time.monotonic() - began < 2
        assert httpx.get(f"{service.url}/readyz").json() == {"status": "ending"}
        with httpx.stream("POST", f"{service.url}/v1/chat/completions", json=HELLO, timeout=20) as late:
            next(late.iter_lines())  # who has not heard of the end yet is served
        service.process.send_signal(signal.SIGTERM)
        told = [line for line in lines if line]
        _, err = service.process.communicate(timeout=30)
    assert service.process.returncode == 1, err
    assert time.monotonic() - began > 4.9, "the signal has cut it short"
    assert "torpor: the raylet has died; start again." in err
    assert "this front end is ending" in json.loads(told[-2][6:])["error"]["message"]
    assert "Traceback" not in err


def lose(file: Path, why: str) -> None:
    """Whole at once."""
    file.with_suffix(".new").write_text(why)
    file.with_suffix(".new").rename(file)


def test_a_journal_that_cannot_be_used_ends_it_with_1_and_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "journal.db").write_bytes(b"no journal at all" * 100)
    service = ServiceProcess(tmp_path)
    _, err = service.process.communicate(timeout=60)
    assert service.process.returncode == 1
    assert "journal.db is not readable; move it away" in err
    assert "Traceback" not in err


def test_a_busy_port_is_told_at_once_with_what_to_do() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(ServeError, match=rf"http\.port: {port} on 127\.0\.0\.1 is in use; .*--port"):
            bind("127.0.0.1", port)


def test_a_missing_model_file_is_told_with_its_key(tmp_path: Path) -> None:
    settings = load_settings(None, {"TORPOR_MODELS__0__ENGINE__MODEL": str(tmp_path / "gone.gguf")})
    with pytest.raises(
        SettingsError, match=r"^here\.yaml: models\.0\.engine\.model: .*gone\.gguf does not exist; give"
    ):
        check_models(settings, "here.yaml")


@pytest.mark.parametrize(
    ("found", "ranks", "says"),
    [
        (0, 1, "no usable NVIDIA GPU here.*nvidia-smi.*host or auto"),
        (1, 3, "1 CUDA device.*3 ranks.*tensor_parallel"),
    ],
)
def test_cuda_without_enough_gpus_is_told(found: int, ranks: int, says: str) -> None:
    environment = {"TORPOR_DEVICE__KIND": "cuda", "TORPOR_MODELS__0__TENSOR_PARALLEL": str(ranks)}
    with pytest.raises(ServeError, match=says):
        check_devices(load_settings(None, environment), lambda: found)


class Silent:
    """A cluster whose coordinator does not answer at first, and then that it is not to be reached."""

    left = False

    async def describe(self) -> None:
        await asyncio.sleep(0.2)
        raise ControlUnreachable("Ray's head has not answered for 5 s")

    async def models(self) -> None:
        await self.describe()

    def shutdown(self) -> None:
        self.left = True

    control = inference = property(lambda self: self)


def test_a_front_end_says_that_it_waits_for_a_coordinator(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that starts right after Ray's head came back would end before Ray has seen that the old one is dead."""
    monkeypatch.setattr("torpor.service.serve._SILENT_S", 0.05)
    cluster, said = Silent(), []
    around = Surroundings(lambda config: cluster, said.append, make_logger(sys.stderr), lambda: 0)
    with pytest.raises(ServeError, match="head has not answered"):
        serve(load_settings(None, {"TORPOR_HTTP__PORT": "0"}), around, joins=True)
    assert "The coordinator does not answer yet; waiting up to 120 s" in said
    assert cluster.left


async def test_a_coordinator_that_goes_while_a_front_end_starts_does_not_end_it() -> None:
    said: list[str] = []
    assert await tell_states(Silent(), said.append)  # type: ignore[arg-type]
    assert said == ["which models there are is not known yet: Ray's head has not answered for 5 s"]


class WithoutCoordinator:
    """A Ray cluster that was joined, and has no coordinator."""

    left = False

    async def describe(self) -> None:
        raise ControlUnreachable("no coordinator in the namespace 'lab'; start one with `torpor apply`")

    def shutdown(self) -> None:
        self.left = True

    control = inference = property(lambda self: self)


def test_a_front_end_of_a_cluster_without_coordinator_says_how_to_start_one(tmp_path: Path) -> None:
    """Its own models are not looked at: it has none."""
    settings = load_settings(
        None, {"TORPOR_HTTP__PORT": "0", "TORPOR_MODELS__0__ENGINE__MODEL": str(tmp_path / "gone.gguf")}
    )
    cluster, said = WithoutCoordinator(), []
    around = Surroundings(lambda config: cluster, said.append, make_logger(sys.stderr), lambda: 0)
    with pytest.raises(ServeError, match="no coordinator in the namespace 'lab'; start one with"):
        serve(settings, around, joins=True)
    assert cluster.left
    assert said == [
        "Joining the Ray cluster at auto, namespace torpor",
        "Stopping: this front end; models live on without it",
    ]


def test_a_ray_that_does_not_start_is_told_in_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray raises a bare Exception after half a minute, e.g. on a busy machine."""

    def late(**options: object) -> None:
        raise Exception("The current node timed out during startup. This could happen.\nAnd more.")

    monkeypatch.setattr("torpor.actors.cluster.ray.init", late)
    monkeypatch.setattr("torpor.actors.cluster._quiet_ray", lambda environment: None)
    with pytest.raises(
        ServeError, match=r"^Ray cannot be started on this machine: The current node timed out .*again$"
    ):
        start_ray_cluster(ClusterConfig(()))
