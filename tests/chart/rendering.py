"""The chart through the real helm. Its place is in TORPOR_HELM."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import pytest
import yaml

CHART = Path(__file__).resolve().parents[2] / "helm" / "torpor"
SHAPES = sorted(CHART.glob("ci/*-values.yaml"))
OPERATORS = "monitoring.coreos.com/v1"  # what a cluster has besides Kubernetes' own kinds

needs_helm = pytest.mark.skipif(
    not os.environ.get("TORPOR_HELM"), reason="TORPOR_HELM does not name a helm 4 program"
)


def shape_name(path: Path) -> str:
    return path.name.removesuffix("-values.yaml")


def helm(*words: str, expect: int = 0) -> str:
    """What it says: on stdout, or of a refusal on stderr."""
    done = subprocess.run(
        [os.environ["TORPOR_HELM"], *words], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == expect, done.stdout + done.stderr
    return done.stderr if expect else done.stdout


@dataclass(frozen=True)
class Rendered:
    text: str

    @cached_property
    def documents(self) -> list[dict[str, Any]]:
        return [document for document in yaml.load_all(self.text, yaml.CSafeLoader) if document]

    def of_kind(self, kind: str, suffix: str = "") -> dict[str, Any]:
        """The only one of this kind whose name ends so."""
        (found,) = (
            each
            for each in self.documents
            if each["kind"] == kind and each["metadata"]["name"].endswith(suffix)
        )
        return found

    @property
    def config_text(self) -> str:
        text: str = self.of_kind("ConfigMap")["data"]["torpor.yaml"]
        return text


@cache
def render(values: Path, *words: str, chart: Path = CHART) -> Rendered:
    return Rendered(
        helm("template", "rel", str(chart), "-f", str(values), "--api-versions", OPERATORS, *words)
    )


def refusal(values: Path, *words: str) -> str:
    return helm("template", "rel", str(CHART), "-f", str(values), *words, expect=1)
