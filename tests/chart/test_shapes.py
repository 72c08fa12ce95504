"""Every shape of the chart is what Kubernetes and KubeRay accept, and what the service reads."""

from __future__ import annotations

import copy
import hashlib
import os
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from chart.rendering import CHART, SHAPES, Rendered, helm, needs_helm, render, shape_name

from torpor.service.settings.load import load_settings
from torpor.service.settings.shape import cluster_config

pytestmark = needs_helm
every_shape = pytest.mark.parametrize("shape", SHAPES, ids=shape_name)


def test_there_is_a_shape_for_each_kind_of_use() -> None:
    assert [shape_name(path) for path in SHAPES] == [
        "high-availability",
        "minimal-cpu",
        "one-gpu",
        "several-models",
        "tensor-parallel",
        "tls-and-auth",
    ]


@every_shape
def test_a_shape_passes_helms_lint(shape: Path) -> None:
    helm("lint", "--strict", str(CHART), "-f", str(shape))


@every_shape
def test_a_shape_is_what_kubernetes_accepts(shape: Path) -> None:
    from chart.checking import faults, lint  # what make setup installs; without helm nobody needs it

    rendered = render(shape)
    assert lint(rendered.text) == []
    assert [fault for document in rendered.documents for fault in faults(document)] == []


@pytest.mark.skipif(
    not os.environ.get("TORPOR_KUBERAY_SCHEMAS"), reason="TORPOR_KUBERAY_SCHEMAS names no folder of schemas"
)
def test_kuberays_schemas_are_looked_into() -> None:
    from chart.checking import faults

    cluster = copy.deepcopy(render(SHAPES[0]).of_kind("RayCluster"))
    cluster["spec"]["rayVersoin"] = cluster["spec"].pop("rayVersion")
    assert "rayVersoin" in "".join(faults(cluster))


@every_shape
def test_the_service_reads_the_configuration_of_a_shape(shape: Path, tmp_path: Path) -> None:
    rendered, values = render(shape), yaml.safe_load(shape.read_text())
    file = tmp_path / "torpor.yaml"
    file.write_text(rendered.config_text)
    settings = load_settings(file, {})
    wanted = values["config"]["models"]
    assert [model.name for model in settings.models] == [model["name"] for model in wanted]
    assert [model.engine.model for model in settings.models] == [model["engine"]["model"] for model in wanted]
    assert (settings.http.host, settings.http.port) == ("0.0.0.0", 8700)
    assert settings.auth.tokens_file == f"/etc/torpor-tokens/{values['auth'].get('key', 'tokens')}"
    head = rendered.of_kind("RayCluster")["metadata"]["name"] + "-head-svc:6379"
    assert settings.ray.address == head
    config = cluster_config(settings)
    (journal,) = (
        mount["mountPath"]
        for mount in container(rendered, "head")["volumeMounts"]
        if mount["name"] == "journal"
    )
    assert Path(config.journal_path).parent == Path(journal)


@every_shape
def test_the_job_waits_for_the_very_file_that_the_head_gets(shape: Path) -> None:
    rendered = render(shape)
    digest = hashlib.sha256(rendered.config_text.encode()).hexdigest()
    assert (
        f'echo "{digest}  /etc/torpor/torpor.yaml" | sha256sum'
        in rendered.of_kind("RayJob")["spec"]["entrypoint"]
    )
    pod = rendered.of_kind("Deployment")["spec"]["template"]
    assert pod["metadata"]["annotations"]["checksum/config"] == digest


@every_shape
def test_ray_is_of_one_version_everywhere(shape: Path) -> None:
    project = tomllib.loads((CHART.parents[1] / "pyproject.toml").read_text())["project"]
    version = render(shape).of_kind("RayCluster")["spec"]["rayVersion"]
    assert f"ray[default]=={version}" in project["dependencies"]
    assert yaml.safe_load((CHART / "Chart.yaml").read_text())["appVersion"] == project["version"]


@every_shape
def test_no_pod_may_more_than_it_must(shape: Path) -> None:
    from chart.checking import pods_of

    rendered = render(shape)
    pods = [*pods_of(rendered.of_kind("RayCluster"))]
    pods += [rendered.of_kind("Deployment")["spec"]["template"]]
    pods += [each for each in rendered.documents if each["kind"] == "Pod"]
    assert len(pods) >= 3
    for pod in pods:
        spec = pod["spec"]
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert spec["automountServiceAccountToken"] is False
        for each in spec["containers"]:
            assert each["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
            assert "/tmp" in [mount["mountPath"] for mount in each["volumeMounts"]]
            values = [str(variable.get("value", "")) for variable in each["env"]]
            assert not [value for value in values if "sha256:" in value]
            assert not [variable for variable in each["env"] if "valueFrom" in variable], "tokens are files"


@every_shape
def test_a_front_door_has_the_time_to_end(shape: Path, tmp_path: Path) -> None:
    rendered = render(shape)
    file = tmp_path / "torpor.yaml"
    file.write_text(rendered.config_text)
    times = load_settings(file, {}).shutdown
    grace_s = rendered.of_kind("Deployment")["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
    assert grace_s >= times.notice_s + times.drain_s + (times.park_timeout_s if times.park else 0) + 5


def test_monitoring_is_left_out_where_nobody_would_read_it() -> None:
    shape = CHART / "ci" / "high-availability-values.yaml"
    text = helm("template", "rel", str(CHART), "-f", str(shape))
    kinds = {document["kind"] for document in Rendered(text).documents}
    assert not kinds & {"ServiceMonitor", "PrometheusRule"}
    with_it = render(shape)
    monitor = with_it.of_kind("ServiceMonitor")["spec"]
    labels = with_it.of_kind("Service")["metadata"]["labels"]
    assert monitor["selector"]["matchLabels"].items() <= labels.items()
    assert monitor["endpoints"][0]["authorization"]["credentials"] == {
        "name": "torpor-viewer",
        "key": "token",
    }
    rules: list[dict[str, Any]] = with_it.of_kind("PrometheusRule")["spec"]["groups"][0]["rules"]
    assert {rule["alert"] for rule in rules} >= {"TorporModelFailed", "TorporRankInDoubt"}


def test_ray_pods_have_what_kuberay_does_not_add() -> None:
    cluster = render(CHART / "ci" / "one-gpu-values.yaml").of_kind("RayCluster")["spec"]
    head = cluster["headGroupSpec"]["rayStartParams"]
    assert head["num-cpus"] == "0", "models would be placed on the head"
    assert head["resources"] == '"{\\"torpor_journal\\": 1}"', "the coordinator must stay with its journal"
    (worker,) = cluster["workerGroupSpecs"]
    resources = worker["template"]["spec"]["containers"][0]["resources"]
    assert resources["requests"] == resources["limits"] == {"cpu": "8", "memory": "64Gi", "nvidia.com/gpu": 1}
    groups = (cluster["headGroupSpec"], worker)
    assert all(isinstance(value, str) for group in groups for value in group["rayStartParams"].values())
    mounts = [mount["mountPath"] for mount in worker["template"]["spec"]["containers"][0]["volumeMounts"]]
    assert "/dev/shm" not in mounts, "the operator adds it"
    assert cluster["authOptions"] == {"mode": "token", "secretName": "ray-token"}


@every_shape
def test_what_selects_pods_selects_those_that_it_is_for(shape: Path) -> None:
    from chart.checking import pods_of

    rendered = render(shape)
    labels = [pod["metadata"]["labels"] for pod in pods_of(rendered.of_kind("RayCluster"))]
    assert not [each for each in labels if "app.kubernetes.io/name" in each], "KubeRay's own label"
    labels += [rendered.of_kind("Deployment")["spec"]["template"]["metadata"]["labels"]]

    def components(selector: dict[str, str]) -> set[str]:
        return {each["app.kubernetes.io/component"] for each in labels if selector.items() <= each.items()}

    def policy(suffix: str) -> set[str]:
        name = rendered.of_kind("RayCluster")["metadata"]["name"] + suffix
        (found,) = (
            each["spec"]
            for each in rendered.documents
            if each["kind"] == "NetworkPolicy" and each["metadata"]["name"] == name
        )
        return components(found["podSelector"]["matchLabels"])

    everybody = {"head", "worker", "front-door"}
    assert [policy(suffix) for suffix in ("", "-front-door", "-operator")] == [
        everybody,
        {"front-door"},
        {"head"},
    ]
    assert components(rendered.of_kind("Service")["spec"]["selector"]) == {"front-door"}
    for component in ("front-door", "worker"):
        budget = rendered.of_kind("PodDisruptionBudget", component)["spec"]["selector"]["matchLabels"]
        assert components(budget) == {component}


def container(rendered: Rendered, group: str) -> dict[str, Any]:
    spec = rendered.of_kind("RayCluster")["spec"]
    chosen = spec["headGroupSpec"] if group == "head" else spec["workerGroupSpecs"][0]
    found: dict[str, Any] = chosen["template"]["spec"]["containers"][0]
    return found
