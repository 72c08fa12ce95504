"""The command line against a running service: output, and exit codes 0 done, 1 failed, 2 usage, 3 rejected."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from service_process import ServiceProcess, free_port, running

from torpor.service.cli import main

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceProcess]:
    with running(tmp_path_factory.mktemp("cli")) as process:
        yield process


@pytest.fixture
def torpor(
    service: ServiceProcess, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Run:
    """Runs a command in this process against the service; (exit code, stdout, stderr)."""
    monkeypatch.setenv("TORPOR_URL", service.url)
    monkeypatch.setenv("COLUMNS", "200")

    def run(*arguments: str) -> tuple[int, str, str]:
        code = main(list(arguments))
        captured = capsys.readouterr()
        assert "Traceback" not in captured.err
        return code, captured.out, captured.err

    return run


def test_sleep_status_and_wake_show_tables(torpor: Run) -> None:
    code, out, _ = torpor(
        "sleep", "chat", "--restore", "kv_cache=cpu", "--tag", "kv_cache", "--tag", "weights"
    )
    assert code == 0
    assert "sleep of chat: succeeded" in out
    assert "150.0 MiB" in out
    code, out, _ = torpor("status")
    assert code == 0
    assert "closed: asleep" in out
    assert "kv_cache, weights" in out
    assert "1.0 GiB of 1.0 GiB" in out
    assert torpor("wake", "chat", "--tag", "weights")[0] == 0
    assert torpor("wake")[0] == 0
    assert "open" in torpor("status", "chat")[1]


def test_update_weights_tells_the_version(torpor: Run) -> None:
    """C10."""
    code, out, _ = torpor("update-weights", "chat", "/weights/new", "--drain", "abort")
    assert code == 0
    assert "update of chat: succeeded, weights version 1" in out
    code, _, err = torpor("update-weights", "nobody", "/weights/new")
    assert (code, "no model 'nobody'" in err) == (2, True)


def test_json_is_for_scripts(torpor: Run) -> None:
    assert json.loads(torpor("status", "--json")[1])["models"][0]["name"] == "chat"
    assert json.loads(torpor("sleep", "--json")[1])["state"] == "succeeded"
    assert json.loads(torpor("ops", "--json")[1])["operations"][0]["kind"] == "sleep"
    assert json.loads(torpor("wake", "--json")[1])["state"] == "succeeded"
    assert "wake" in torpor("ops", "--limit", "1")[1]


def test_a_dry_run_changes_nothing(torpor: Run) -> None:
    code, out, _ = torpor("sleep", "--dry-run")
    assert code == 0
    assert "plan of sleep of chat" in out
    assert "open" in torpor("status")[1]


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (("sleep", "nobody"), 2, "Known models: chat"),
        (("sleep", "chat", "--tag", "wieghts"), 2, "weights"),
        (("sleep", "--restore", "weights=tape"), 2, "none, memset, cpu, pinned"),
        (("sleep", "--restore", "weights"), 2, "TAG=MODE"),
        (("sleep", "--drain", "melt"), 2, "freeze"),
        (("sleep", "--timeout", "soon"), 2, "--timeout"),
        (("status", "nobody"), 2, "Known models: chat"),
        (("frobnicate",), 2, "No such command"),
        (("sleep", "--url", "http://127.0.0.1:1"), 1, "is `torpor serve` running there?"),
        (("serve", "--host", "0.0.0.0"), 2, "http.host"),
        (("serve", "--config", "/nowhere/torpor.yaml"), 2, "give an existing file"),
        (("serve", "--port", "99999"), 2, "--port"),
        (("serve", "10.0.0.7:6379"), 2, "for --connect only"),
        (("status", "--url", "http://[::1"), 1, "is `torpor serve` running there?"),
        (("status", ""), 1, "the name is empty"),
        (("sleep", "--timeout", "inf"), 1, "not JSON compliant"),
        (("sleep", "--freeze-timeout", "3"), 2, "torpor: drain: freeze_timeout_s goes with mode freeze"),
        (("delete", "chat?"), 2, "There is no model 'chat?'."),
        (("sleep", ".."), 2, "There is no model '..'."),
        (("events", "--since", "\u00e9"), 1, "no answer from"),
        (("apply",), 2, "--file"),
        (("apply", "-f", "/nowhere/torpor.yaml"), 2, "give an existing file"),
    ],
)
def test_a_wrong_command_is_one_clear_line_and_its_exit_code(
    torpor: Run, arguments: tuple[str, ...], code: int, says: str
) -> None:
    done, out, err = torpor(*arguments)
    assert done == code, err
    assert says in " ".join(err.replace("│", " ").split())
    assert out == ""
    if err.startswith("torpor: "):
        assert err.count("\n") == 1


def test_a_rejected_operation_exits_with_3_and_its_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with running(tmp_path, "--refuses") as refusing:
        assert main(["sleep", "--url", refusing.url]) == 3
    err = capsys.readouterr().err
    assert "rejected: " in err
    assert "rank 0 refuses, as scripted" in err


def test_the_version_is_printed(torpor: Run) -> None:
    assert torpor("version")[1].startswith("0.1.0")
    assert json.loads(torpor("version", "--json")[1])["version"].startswith("0.1.0")


def run_serve(folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """`torpor serve` as its own process, with nothing of the surrounding configuration."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TORPOR_")}
    environment |= {"TORPOR_JOURNAL__PATH": str(folder / "journal.db")} | variables
    command = [sys.executable, "-m", "torpor.service.cli", "serve"]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)


@pytest.fixture
def model(tmp_path: Path) -> str:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF")
    return str(path)


def test_serve_on_a_busy_port_is_one_line_before_anything_starts(tmp_path: Path, model: str) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = str(other.getsockname()[1])
        done = run_serve(tmp_path, TORPOR_HTTP__PORT=port, TORPOR_DEFAULT_MODEL=model)
    assert done.returncode == 1
    assert done.stderr == f"torpor: http.port: {port} on 127.0.0.1 is in use; " + (
        "stop what listens there, or choose another with --port\n"
    )


def test_serve_without_its_model_file_is_one_line(tmp_path: Path) -> None:
    missing = str(tmp_path / "gone.gguf")
    done = run_serve(tmp_path, TORPOR_MODELS__0__ENGINE__MODEL=missing, TORPOR_HTTP__PORT=str(free_port()))
    assert done.returncode == 2
    assert done.stderr.startswith(
        f"torpor: settings: models.0.engine.model: {missing} does not exist; give a GGUF file"
    )
    assert done.stderr.count("\n") == 1


def test_serve_with_cuda_and_no_gpu_is_one_line(tmp_path: Path, model: str) -> None:
    variables = {"TORPOR_DEVICE__KIND": "cuda", "TORPOR_DEFAULT_MODEL": model}
    # Hides the GPUs of a machine that has some.
    done = run_serve(tmp_path, CUDA_VISIBLE_DEVICES="", TORPOR_HTTP__PORT=str(free_port()), **variables)
    assert done.returncode == 1
    assert "no usable NVIDIA GPU here" in done.stderr
    assert done.stderr.count("\n") == 1
