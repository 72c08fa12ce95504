"""A Ray cluster as the chart makes it, on this machine: a head without CPUs that keeps the journal, a worker, a token."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
from e2e.serving import free_port

ALONE = ("unshare", "--map-root-user", "--pid", "--fork", "--mount-proc", "--kill-child=SIGKILL")
STORE_BYTES = str(80 << 20)
JOB_S = 240


class Machine:
    """Processes of one test, each a group of its own that is ended at last; `folder` stands for the pods' root."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="tc"))  # short: sockets are in it
        self.ray_variables: dict[str, str] = {}  # of all containers of Ray's, besides its token
        self.ray_token = secrets.token_hex(32)
        self.mark = f"torpor-{secrets.token_hex(8)}"
        self.processes: list[subprocess.Popen[bytes]] = []
        self.port, self.jobs_port = free_port(), free_port()
        for name in ("etc/ray-token", "etc/torpor", "etc/torpor-tokens", "var/lib/torpor", "tmp/home", "bin"):
            (self.folder / name).mkdir(parents=True)
        (self.folder / "etc/ray-token/auth_token").write_text(self.ray_token)
        command = self.folder / "bin/torpor"  # of these sources, whether they are installed or not
        command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m torpor.service.cli "$@"\n')
        command.chmod(0o755)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def moved(self, text: str) -> str:
        """A text of the chart's, with the pods' paths and names as they are here."""
        for path in ("/etc/", "/var/lib/", "/tmp/home"):
            text = text.replace(path, f"{self.folder}{path}")
        return text.replace("rel-head-svc:6379", self.address)

    def environment(self, **more: str) -> dict[str, str]:
        known = {
            name: value for name, value in os.environ.items() if not name.startswith(("TORPOR_", "RAY_"))
        }
        return known | {
            "PATH": os.pathsep.join(
                [f"{self.folder}/bin", str(Path(sys.executable).parent), os.environ["PATH"]]
            ),
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            "PYTHONWARNINGS": "ignore",
            "MARK": self.mark,
            **more,
        }

    def inside(self, **more: str) -> dict[str, str]:
        """Of a container of Ray's, as KubeRay makes it."""
        mine = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": self.ray_token, "RAY_USAGE_STATS_ENABLED": "0"}
        return self.environment(**(mine | self.ray_variables | more))

    def start(
        self, *words: str, environment: dict[str, str], log: str, as_pod: bool = False
    ) -> subprocess.Popen[bytes]:
        """as_pod: it sees its own processes alone, as its container's first one, and ends with what is returned."""
        words = (*ALONE, *words) if as_pod else words
        with (self.folder / log).open("wb") as out:
            started = subprocess.Popen(
                words, env=environment, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
            )
        self.processes.append(started)
        return started

    def start_ray(self, head: dict[str, str], worker: dict[str, str]) -> None:
        """head, worker: `rayStartParams` of the chart; object stores are as small as Ray takes them here."""
        self.start_head(head)
        joins = {"address": self.address, "num-cpus": "1", "num-gpus": "0", "node-ip-address": "127.0.0.1"}
        self._start_ray("worker", **(worker | joins))

    def start_head(self, params: dict[str, str]) -> None:
        """The first one, or one that comes after another's end; with a root of its own, as every pod."""
        options = {
            "port": str(self.port),
            "dashboard-port": str(self.jobs_port),
            "node-ip-address": "127.0.0.1",
        }
        options |= {"temp-dir": tempfile.mkdtemp(prefix="r", dir=self.folder), "include-dashboard": "true"}
        self._start_ray("head", "--head", **(params | options))
        until(lambda: httpx.get(self.jobs, headers=self.bearer).status_code == 200, 90)

    def kill_head(self) -> None:
        """All that is in its pod, at once: Ray's head, and the coordinator."""
        for pid in list(_marked(f"{self.mark}-head")):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _start_ray(self, name: str, *words: str, **options: str) -> None:
        options |= {"object-store-memory": STORE_BYTES, "dashboard-agent-listen-port": str(free_port())}
        options = {key: value.strip('"').replace("\\", "") for key, value in options.items()}
        listed = [f"--{key}={value}" for key, value in options.items()]
        self.start(
            "ray",
            "start",
            "--block",
            *words,
            *listed,
            environment=self.inside(MARK=f"{self.mark}-{name}"),
            log=f"{name}.log",
        )

    @property
    def jobs(self) -> str:
        return f"http://127.0.0.1:{self.jobs_port}/api/jobs/"

    @property
    def bearer(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.ray_token}"}

    def submit(self, entrypoint: str) -> str:
        """As KubeRay does it for a RayJob in its HTTPMode: the job's id."""
        answer = httpx.post(self.jobs, json={"entrypoint": entrypoint}, headers=self.bearer, timeout=60)
        answer.raise_for_status()
        return str(answer.json()["submission_id"])

    def job(self, name: str) -> dict[str, Any]:
        return dict(httpx.get(self.jobs + name, headers=self.bearer, timeout=60).raise_for_status().json())

    def finished(self, name: str) -> str:
        """Its log, once it has succeeded."""
        until(lambda: self.job(name)["status"] in ("SUCCEEDED", "FAILED", "STOPPED"), JOB_S)
        log = str(httpx.get(f"{self.jobs}{name}/logs", headers=self.bearer).json()["logs"])
        assert self.job(name)["status"] == "SUCCEEDED", log
        return log

    def end(self) -> None:
        """All that bears this machine's mark."""
        for _ in range(3):
            for pid in _marked(self.mark):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.2)
        for process in self.processes:
            process.kill()  # one may have overwritten its variables, as redis does
            process.wait(10)
        shutil.rmtree(self.folder, ignore_errors=True)


def pods_can_be_made() -> bool:
    """Containers, and some machines, let nobody make namespaces of processes."""
    return (
        shutil.which("unshare") is not None and not subprocess.run([*ALONE, "true"], check=False).returncode
    )


def until(holds: Any, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while True:
        with contextlib.suppress(httpx.TransportError):
            if holds():
                return
        assert time.monotonic() < deadline, "it does not come true"
        time.sleep(0.3)


def _marked(mark: str) -> Iterator[int]:
    wanted = f"MARK={mark}".encode()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):
                if wanted in (entry / "environ").read_bytes():
                    yield int(entry.name)
