"""A front door's container and the apply job's command, as they stand in the chart, on a `Machine`."""

from __future__ import annotations

import hashlib
import os
import signal
from pathlib import Path
from typing import Any

import httpx
from chart.rendering import CHART, Rendered, render
from deploy.clusters import Machine, until
from e2e.serving import free_port
from support.processes import children_of

from torpor.service.cli.serve_command import say
from torpor.service.default_model import ensure_default_model

MODEL = "smollm2"
TOKEN = "t" * 40


def render_small(folder: Path, *words: str) -> Rendered:
    """The smallest shape, with the small model where this machine has it."""
    values = folder / "values.yaml"
    shape = (CHART / "ci" / "minimal-cpu-values.yaml").read_text()
    model = str(ensure_default_model(dict(os.environ), say=say))
    values.write_text(shape.replace("/models/SmolLM2-135M-Instruct.Q4_1.gguf", model))
    return render(values, *words)


def job_of(machine: Machine, rendered: Rendered) -> tuple[str, str]:
    """(the ConfigMap's file, the RayJob's entrypoint that waits for it), with paths and ports as they are here."""
    text = machine.moved(rendered.config_text).replace("port: 8700", f"port: {free_port()}")
    entrypoint = machine.moved(rendered.of_kind("RayJob")["spec"]["entrypoint"])
    of_pods = hashlib.sha256(rendered.config_text.encode()).hexdigest()
    assert of_pods in entrypoint
    return text, entrypoint.replace(of_pods, hashlib.sha256(text.encode()).hexdigest())


class Door:
    """The front door's container: its command, its variables, its probes, as they stand in the chart."""

    def __init__(self, machine: Machine, rendered: Rendered, as_pod: bool = False) -> None:
        """as_pod: its processes see no others; else its driver finds the head's raylet on this machine, not its own."""
        (machine.folder / "etc/torpor-tokens/tokens").write_text(f"test operator,inference {TOKEN}\n")
        pod = rendered.of_kind("Deployment")["spec"]["template"]["spec"]
        self.container: dict[str, Any] = pod["containers"][0]
        self.grace_s: float = pod["terminationGracePeriodSeconds"]
        variables = {each["name"]: machine.moved(each["value"]) for each in self.container["env"]}
        words = [*self.container["command"], *map(machine.moved, self.container["args"])]
        config = (machine.folder / "etc/torpor/torpor.yaml").read_text()
        self.url = f"http://127.0.0.1:{config.partition('port: ')[2].split()[0]}"
        self.log = machine.folder / "door.log"
        self.process = machine.start(
            *words, environment=machine.environment(**variables), log="door.log", as_pod=as_pod
        )

    def kill_raylet(self) -> None:
        """Its own: of a pod."""
        (raylet,) = (pid for pid, line in children_of(self.process.pid).items() if "/raylet/raylet " in line)
        os.kill(raylet, signal.SIGKILL)

    def probe(self, name: str) -> int:
        """As the kubelet sees it; 0 = no answer."""
        path = self.container[name]["httpGet"]["path"]
        try:
            return httpx.get(
                self.url + path, timeout=self.container[name].get("timeoutSeconds", 1)
            ).status_code
        except httpx.TransportError:
            return 0

    def wait_until_ready(self) -> None:
        startup = self.container["startupProbe"]
        until(
            lambda: self.process.poll() is not None or self.probe("startupProbe") == 200,
            startup["failureThreshold"] * startup["periodSeconds"],
        )
        assert self.process.poll() is None, self.log.read_text()
        until(lambda: self.probe("readinessProbe") == 200, 30)


def caller(door: Door) -> httpx.Client:
    return httpx.Client(base_url=door.url, headers={"Authorization": f"Bearer {TOKEN}"}, timeout=120)
