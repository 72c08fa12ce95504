"""The clients against the OpenAPI document: each call has a method, or stands here with its reason; and their types."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from torpor.service import AsyncClient, Client

ROOT = Path(__file__).parents[2]
METHODS = {
    "POST /sleep": "sleep",
    "POST /models/{model}/sleep": "sleep",
    "POST /wake": "wake",
    "POST /models/{model}/wake": "wake",
    "GET /models": "models",
    "GET /models/{model}": "model",
    "DELETE /models/{model}": "delete",
    "POST /models/{model}/recover": "recover",
    "POST /models/{model}/pause": "pause",
    "POST /models/{model}/unpause": "unpause",
    "POST /models/{model}/update_weights": "update_weights",
    "POST /models/{model}/trim": "trim",
    "GET /operations": "operations",
    "GET /operations/{operation_id}": "operation",
    "POST /operations/{operation_id}/cancel": "cancel",
    "POST /operations/{operation_id}/renew": "renew",
    "GET /events": "events",
    "GET /audit": "audit",
    "POST /v1/chat/completions": "chat",
    "POST /v1/completions": "complete",
}
OF_OTHERS = {"drop-in", "health"}  # other engines' clients and probes have their own ways to call these
LEFT_OUT = {"GET /v1/models", "GET /v1/models/{name}"}  # `models` and `model` say more
OWN = {"asleep", "close", "from_ray"}  # no call, or several
SNIPPET = """
from torpor.service import AsyncClient, Client, Freed

def train(client: Client) -> int:
    with client.asleep("chat", restore={"kv_cache": "pinned"}) as freed:
        held: Freed = freed
    record: dict[str, object] = client.sleep("chat", tags=["weights"], drain={"mode": "abort"})
    return sum(held.bytes.values()) + len(record)

async def watch(client: AsyncClient) -> str:
    async for event in client.events("chat"):
        return event.kind
    return (await client.chat("chat", "Hello?")).text
"""


def calls() -> dict[str, set[str]]:
    paths = json.loads((ROOT / "docs" / "openapi.json").read_text(encoding="utf-8"))["paths"]
    return {
        f"{verb.upper()} {path}": set(one["tags"]) for path, at in paths.items() for verb, one in at.items()
    }


def test_every_call_has_a_method_of_both_clients_or_a_reason() -> None:
    wanted = {name for name, tags in calls().items() if not tags & OF_OTHERS} - LEFT_OUT
    assert wanted == set(METHODS)
    for kind in (Client, AsyncClient):
        there = {name for name, _ in inspect.getmembers(kind, inspect.isfunction) if not name.startswith("_")}
        assert there - OWN == set(METHODS.values()), kind


def test_every_method_says_what_it_does_in_types_and_words() -> None:
    terse = {"models", "model", "operation", "cancel", "close"}
    for kind in (Client, AsyncClient):
        for name, method in inspect.getmembers(kind, inspect.isfunction):
            if name.startswith("_"):
                continue
            hints = set(inspect.signature(method).parameters) - {"self"} | {"return"}
            assert hints <= set(method.__annotations__), name
            assert method.__doc__ or name in terse, name


@pytest.mark.parametrize(
    ("wrong", "says"), [("", ""), ("client.sleep(7)", "arg-type"), ("client.slep()", "attr-defined")]
)
def test_a_users_program_is_checked_strictly_against_the_clients(
    tmp_path: Path, wrong: str, says: str
) -> None:
    program = tmp_path / "program.py"
    program.write_text(SNIPPET + (f"\ndef wrong(client: Client) -> None:\n    {wrong}\n" if wrong else ""))
    config = tmp_path / "mypy.ini"
    config.write_text("[mypy]\nstrict = true\nfollow_imports = silent\n")
    command = [sys.executable, "-m", "mypy", "--config-file", config, "--cache-dir", CACHE, program]
    # What is installed is found by its marker py.typed; a tree of sources must be named.
    trees = [part for part in sys.path if (Path(part) / "torpor").is_dir() and "site-packages" not in part]
    path = os.pathsep.join(trees)
    done = subprocess.run(
        command, env=os.environ | {"MYPYPATH": path}, capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode == 0) == (not wrong), done.stdout + done.stderr
    assert says in done.stdout


CACHE = ROOT / "build" / "mypy-of-users"
