"""What is wrong with rendered documents: yamllint, the Kubernetes API's schemas, KubeRay's. A line a fault."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
from yamllint import linter
from yamllint.config import YamlLintConfig

KUBERNETES = "1.34"
_RULES = """
rules:
  anchors: enable
  colons: enable
  commas: enable
  indentation: {spaces: consistent, indent-sequences: whatever}
  key-duplicates: enable
  new-line-at-end-of-file: enable
  octal-values: {forbid-implicit-octal: false}
  trailing-spaces: enable
  truthy: {check-keys: false}
"""
_WITHOUT_SCHEMA = {"ServiceMonitor", "PrometheusRule", "HTTPRoute"}  # test_shapes.py looks at them by hand
_RAY = {"RayCluster": "raycluster-v1", "RayJob": "rayjob-v1"}


def lint(text: str) -> list[str]:
    return [f"line {fault.line}: {fault.desc}" for fault in linter.run(text, YamlLintConfig(_RULES))]


def faults(document: dict[str, Any]) -> list[str]:
    kind = document["kind"]
    if kind in _RAY:
        return [*_ray_faults(document), *(fault for pod in pods_of(document) for fault in _core_faults(pod))]
    return [] if kind in _WITHOUT_SCHEMA else _core_faults(document)


def pods_of(cluster: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Each group's template as a Pod of its own: KubeRay's schema knows little of what may stand in one."""
    if cluster["kind"] != "RayCluster":
        return
    for group in (cluster["spec"]["headGroupSpec"], *cluster["spec"]["workerGroupSpecs"]):
        name = group.get("groupName", "head")
        template = group["template"]
        yield {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {**template["metadata"], "name": name},
            "spec": template["spec"],
        }


def _core_faults(document: dict[str, Any]) -> list[str]:
    try:
        kubernetes_validate.validate(document, KUBERNETES, strict=True)
    except kubernetes_validate.ValidationError as error:
        where = ".".join(map(str, error.path))
        return [f"{document['kind']} {document['metadata']['name']} {where}: {error.message}"]
    return []


def _ray_faults(document: dict[str, Any]) -> list[str]:
    folder = os.environ.get("TORPOR_KUBERAY_SCHEMAS")
    if not folder:
        return []
    validator = jsonschema.Draft202012Validator(_schema(Path(folder), document["kind"]))
    return [
        f"{document['kind']} {error.json_path}: {error.message}" for error in validator.iter_errors(document)
    ]


@cache
def _schema(folder: Path, kind: str) -> dict[str, Any]:
    schema: dict[str, Any] = json.loads((folder / f"{_RAY[kind]}.schema.json").read_text())
    return schema
