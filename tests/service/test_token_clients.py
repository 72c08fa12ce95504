"""Tokens from the side of those who bring them: the Python clients, the command line, and the service's own start."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from service_process import ServiceProcess, running
from service_rig import make_rig

from torpor.service import AsyncClient, Client, ClientError, Denied
from torpor.service.cli.main import main
from torpor.service.client.calls import standing_headers
from torpor.service.logs import make_logger
from torpor.service.serve import ServeError, Surroundings, serve
from torpor.service.settings.load import load_settings

OPERATOR, VIEWER = "operator-token-0123456789", "viewer-token-0123456789"
FILE = f"lab operator {OPERATOR}\nwall viewer {VIEWER}\n"


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceProcess]:
    folder = tmp_path_factory.mktemp("tokens")
    (folder / "tokens").write_text(FILE)
    with running(folder) as process:
        yield process


def test_the_blocking_client_brings_its_token_and_says_what_it_may_not(service: ServiceProcess) -> None:
    with Client(service.url, token=VIEWER) as client:
        assert [model["name"] for model in client.models()] == ["chat"]
        with pytest.raises(Denied, match="wants the role operator") as denied:
            client.sleep()
        assert denied.value.status == 403
    with Client(service.url, token="") as client, pytest.raises(Denied) as unknown:
        client.models()
    assert unknown.value.status == 401


async def test_the_awaited_client_does_the_same(tmp_path: Path) -> None:
    async with make_rig(tmp_path, {"chat": 1}, tokens=FILE) as rig:
        transport = httpx.ASGITransport(rig.app, raise_app_exceptions=False)
        async with AsyncClient("http://torpor.test", token=OPERATOR, transport=transport) as client:
            assert (await client.sleep())["state"] == "succeeded"
        async with AsyncClient("http://torpor.test", transport=transport) as client:
            with pytest.raises(Denied):
                await client.models()


def test_a_token_that_is_not_given_is_that_of_the_environment() -> None:
    environment = {"TORPOR_TOKEN": OPERATOR}
    assert standing_headers(None, environment)["Authorization"] == f"Bearer {OPERATOR}"
    assert standing_headers(VIEWER, environment)["Authorization"] == f"Bearer {VIEWER}"
    assert "Authorization" not in standing_headers("", environment)
    assert "Authorization" not in standing_headers(None, {})


@pytest.mark.parametrize("token", [f"{VIEWER}\n", f"{VIEWER}\nX-Other: 1", f"Bearer {VIEWER}", "ö" * 20])
def test_a_token_that_no_header_can_carry_is_refused_without_being_repeated(token: str) -> None:
    with pytest.raises(ClientError, match="give it alone") as caught:
        Client(token=token)
    assert token not in str(caught.value) and VIEWER not in str(caught.value)


def test_the_command_line_takes_its_token_from_a_file_or_the_environment(
    service: ServiceProcess,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    file = tmp_path / "token"
    file.write_text(f"{OPERATOR}\n")
    status = ["status", "--json", "--url", service.url]
    assert main([*status, "--token-file", str(file)]) == 0
    assert json.loads(capsys.readouterr().out)["models"][0]["name"] == "chat"
    monkeypatch.setenv("TORPOR_TOKEN", VIEWER)
    assert main(status) == 0
    capsys.readouterr()
    assert main(["sleep", "--url", service.url]) == 3
    assert "'wall' may not POST /sleep: it wants the role operator" in capsys.readouterr().err
    assert main([*status, "--token-file", str(tmp_path / "gone")]) == 2
    assert "--token-file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (None, r"tokens: cannot be read \(No such file or directory\)"),
        ("lab viewer", "tokens: line 1: has 2 words"),
        ("", "tokens: holds no tokens, and nobody could come in"),
    ],
)
def test_a_service_whose_tokens_cannot_be_used_does_not_start_and_says_why(
    tmp_path: Path, text: str | None, says: str
) -> None:
    """It must not be open to everybody instead; and it is told before anything costly starts."""
    if text is not None:
        (tmp_path / "tokens").write_text(text)
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    environment = {
        "TORPOR_HTTP__PORT": "0",
        "TORPOR_MODELS__0__ENGINE__MODEL": str(tmp_path / "model.gguf"),
        "TORPOR_AUTH__TOKENS_FILE": str(tmp_path / "tokens"),
    }

    def start(config: object) -> None:
        raise AssertionError("started")

    around = Surroundings(start, print, make_logger(sys.stderr), lambda: 0)  # type: ignore[arg-type]
    with pytest.raises(ServeError, match=f"auth.tokens_file: .*{says}"):
        serve(load_settings(None, environment), around)
