"""The walk-through passes when all is as promised, and fails by name at whatever is not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from rich.console import Console

from torpor.service.client import Client
from torpor.service.walkthrough import steps
from torpor.service.walkthrough.child import ChildService, StepFailed
from torpor.service.walkthrough.processes import alive, descendants

MIB = 1 << 20
SIZES = {"weights": 64 * MIB, "kv_cache": 96 * MIB}
RESIDUAL = {"weights": 2 * MIB, "kv_cache": 0}
FREED_BYTES = sum(SIZES.values()) - sum(RESIDUAL.values())


@dataclass
class Service:
    """Answers as the service does; `broken` names one promise that it does not keep."""

    pages: int  # a memfd of this very process, whose size plays the device's memory
    broken: str = ""
    asleep: bool = False
    cached: int = 0
    asked: int = 0
    kernel_bytes: int = sum(SIZES.values())
    seen: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._kernel(self.kernel_bytes)

    def _kernel(self, size_bytes: int) -> None:
        os.truncate(self.pages, 0)
        os.posix_fallocate(self.pages, 0, size_bytes)

    def __call__(self, request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content) if request.content else {}
        self.seen.append(request.url.path)
        match request.url.path:
            case "/v1/chat/completions":
                return self.chat()
            case "/models/smollm2/sleep":
                return self.sleep(body)
            case "/models/smollm2/wake":
                return self.wake()
        return httpx.Response(200, json=self.model())

    def chat(self) -> httpx.Response:
        if self.asleep and self.broken != "answers":
            headers = {} if self.broken == "retry" else {"Retry-After": "5"}
            reason = "draining" if self.broken == "reason" else "asleep"
            return httpx.Response(503, json={"code": "gate_closed", "reason": reason}, headers=headers)
        self.asked += 1
        tokens = [1, 2, 3] if self.broken != "tokens" or self.asked < 3 else [1, 2, 4]
        cached, self.cached = self.cached, 0 if self.broken == "prefix" else 64
        choice = {"message": {"content": "180 km."}, "finish_reason": "stop", "token_ids": tokens}
        usage = {
            "prompt_tokens": 70,
            "completion_tokens": 3,
            "prompt_tokens_details": {"cached_tokens": cached},
        }
        return httpx.Response(200, json={"choices": [choice], "usage": usage})

    def sleep(self, body: dict[str, Any]) -> httpx.Response:
        self.asleep = True
        if body["restore"]["kv_cache"] == "none":
            self.cached = 32 if self.broken == "forgets" else 0
        elif self.broken == "keeps":
            self.cached = 0
        if self.broken != "kernel":
            self._kernel(sum(RESIDUAL.values()))
        return httpx.Response(200, json=self.operation("sleep", FREED_BYTES))

    def wake(self) -> httpx.Response:
        self.asleep = False
        self._kernel(self.kernel_bytes)
        return httpx.Response(200, json=self.operation("wake", 0))

    def operation(self, kind: str, freed_bytes: int) -> dict[str, Any]:
        freed = freed_bytes // 2 if self.broken == "freed" else freed_bytes
        phases = [{"name": "stage", "seconds": 0.1, "bytes": 0}]
        return {
            "kind": kind,
            "state": "succeeded",
            "reason": None,
            "phases": phases,
            "ranks": [{"freed_bytes": freed, "residual": RESIDUAL}],
        }

    def model(self) -> dict[str, Any]:
        mapped = dict(RESIDUAL if self.asleep else SIZES)
        if self.asleep and self.broken == "mapped":
            mapped["kv_cache"] += 2 * MIB
        rows = [{"tag": tag, "device_bytes": size} for tag, size in mapped.items()]
        free = (2 << 30) - (0 if self.broken == "device" else sum(mapped.values()))
        device = {"kind": "host", "id": "host:x-0", "free_bytes": free, "total_bytes": 4 << 30}
        return {
            "state": "asleep" if self.asleep else "awake",
            "parked_tags": ["kv_cache", "weights"] if self.asleep and self.broken != "parked" else [],
            "tags": ["kv_cache", "weights"],
            "gate": {"open": not self.asleep},
            "ranks": [{"pid": os.getpid(), "device": device, "memory": rows}],
        }


def walk(service: Service) -> str:
    """What was shown."""
    console = Console(record=True, width=160, file=open(os.devnull, "w"))  # noqa: SIM115, PTH123
    with console.file, Client("http://x", transport=httpx.MockTransport(service)) as client:
        steps.walk(client, console)
    return console.export_text()


@pytest.fixture
def pages(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    monkeypatch.setattr(steps, "SETTLE_S", 0.0)
    file = os.memfd_create("pages")
    yield file
    os.close(file)


def test_a_service_that_keeps_its_promises_passes_and_shows_what_is_free(pages: int) -> None:
    shown = walk(Service(pages))
    for text in (
        "tag kv_cache",
        "96.0 MiB",
        "kernel: pages of the ranks' memfd files",
        "158.0 MiB",
        "Retry-After: 5 s",
    ):
        assert text in shown


@pytest.mark.parametrize(
    ("broken", "says"),
    [
        ("tokens", "the same 3 tokens"),
        ("prefix", "the prefix was reused"),
        ("keeps", "as many cached tokens as before"),
        ("forgets", "no cached tokens"),
        ("mapped", "nothing but 2.0 MiB of module buffers"),
        ("freed", "all the rest"),
        ("device", "the kernel says that the memory is free"),
        ("kernel", "the kernel says that the memory is free"),
        ("parked", "all tags parked"),
        ("answers", "a sleeping model answered"),
        ("retry", "told when to ask again"),
        ("reason", "refused with 503 while asleep"),
    ],
)
def test_a_promise_that_is_not_kept_is_named(pages: int, broken: str, says: str) -> None:
    with pytest.raises(StepFailed, match=says):
        walk(Service(pages, broken))


def test_a_service_that_cannot_start_is_told_with_its_log_and_leaves_no_child(tmp_path: Path) -> None:
    console = Console(file=(tmp_path / "out").open("w"))
    with console.file:
        service = ChildService(tmp_path, "smollm2", tmp_path / "gone.gguf", 1, "host", console)
        with pytest.raises(StepFailed, match=r"(?s)ended with 2 while starting.*gone\.gguf does not exist"):
            service.start()
        service.kill()
    assert not Path(f"/proc/{service.pid}").exists()


def test_descendants_are_found_and_known_to_be_gone() -> None:
    """Grandchildren too."""
    command = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'input()'], stdin=sys.stdin)"
    parent = subprocess.Popen([sys.executable, "-c", command], stdin=subprocess.PIPE)
    try:
        while len(descendants(parent.pid)) < 1:
            assert parent.poll() is None
        (grandchild,) = descendants(parent.pid)
        assert alive(grandchild)
        assert grandchild in descendants(os.getpid())
    finally:
        parent.communicate(b"\n", timeout=20)
    assert not alive(grandchild)


def test_a_process_that_only_waits_to_be_collected_does_not_count_as_alive() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    assert child.stdin is not None
    (record,) = [one for one in descendants(os.getpid()) if one.pid == child.pid]
    assert alive(record)
    child.stdin.write(b"\n")
    child.stdin.close()
    deadline = time.monotonic() + 20
    while alive(record) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not alive(record)
    assert Path(f"/proc/{child.pid}").exists()  # still there for its parent
    child.wait()
