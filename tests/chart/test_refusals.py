"""Values that cannot work are refused before anything is installed, in words that say what to do."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import yaml
from chart.rendering import CHART, needs_helm, refusal, render

pytestmark = needs_helm
GPU = CHART / "ci" / "one-gpu-values.yaml"
CPU = CHART / "ci" / "minimal-cpu-values.yaml"

REFUSED = {
    "no tokens": ("auth.existingSecret=", "auth.existingSecret is empty"),
    "no token of Ray's": ("ray.authSecret=", "ray.authSecret is empty"),
    "no models": ("config.models=null", "config.models is empty"),
    "no workers": ("workers=null", "workers is empty"),
    "a relative path": ("config.models[0].engine.model=chat", "give the absolute path"),
    "no name": ("config.models[0].name=", "minLength: got 0, want 1"),
    "an unknown model": (
        "workers[0].models[0]=chta",
        'names the model "chta", and config.models has chat only',
    ),
    "a name that KubeRay refuses": ("fullnameOverride=7b", "begin with a letter"),
    "redis nowhere": ("ray.gcsFaultTolerance.enabled=true", "redisAddress is empty"),
    "an Ingress without TLS": ("ingress.enabled=true", "tokens travel in the clear"),
    "metrics without a token": ("monitoring.serviceMonitor=true", "monitoring.tokenSecret is empty"),
    "a disk without a volume": ("config.node.disk_path=/cache", "no diskSize"),
    "too short an end": ("frontDoor.terminationGracePeriodSeconds=20", "needs 40 s"),
    "a model's key beside the models": ("config.kv_cache.host_bytes=1", "'kv_cache' not allowed"),
    "a size without sense": ("config.models[0].kv_cache.host_bytes=lots", '"lots" is no size'),
    "a duration without sense": ("config.shutdown.drain_s=soon", '"soon" is no duration'),
    "a key that is none": ("frontDoor.replcias=2", "additional properties 'replcias' not allowed"),
    "a key of the chart's own": ("config.journal.path=/x", "additional properties 'journal' not allowed"),
    "a section that is none": ("frontdoor.replicas=2", "additional properties 'frontdoor' not allowed"),
    "a word for a number": ("frontDoor.replicas=two", "got string, want integer"),
    "a policy that is none": ("ray.upgrade=Always", "value must be one of 'None', 'Recreate'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_values_that_cannot_work_are_refused_in_plain_words(case: str) -> None:
    setting, words = REFUSED[case]
    said = refusal(GPU, "--set", setting)
    assert words in said


def test_the_longest_name_is_one_that_kuberay_takes() -> None:
    rendered = render(GPU, "--set", f"fullnameOverride={'n' * 32}")
    assert len(rendered.of_kind("RayJob")["metadata"]["name"]) == 47
    assert "maxLength: got 33, want 32" in refusal(GPU, "--set", f"fullnameOverride={'n' * 33}")


def test_a_limit_below_what_sleeps_in_host_memory_is_refused_with_the_numbers() -> None:
    # 8 base + (16 cache + 8 pool + 16 weights) kept + 2 shm
    said = refusal(GPU, "--set", "workers[0].memory.limit=49Gi")
    assert 'the group "gpu" has memory.limit 49.00 GiB, and needs 50.00 GiB: 8.00 GiB base' in said
    assert "+ 40.00 GiB kept in host memory + 2.00 GiB shm." in said
    render(GPU, "--set", "workers[0].memory.limit=50Gi")


def test_the_memory_rule_counts_ranks_of_a_pod_pools_of_models_and_host_devices(tmp_path: Path) -> None:
    # A pod with two of four ranks: 2 x 10 of caches and half a pool of 1 GiB, without node.host_bytes.
    wide = CHART / "ci" / "tensor-parallel-values.yaml"
    few = (
        "--set",
        "workers[0].gpus=2",
        "--set",
        "workers[0].memory.weights=0",
        "--set",
        "config.node.host_bytes=null",
    )
    assert "+ 20.50 GiB kept in host memory" in refusal(wide, *few, "--set", "workers[0].memory.limit=1Gi")
    # A budget is what is kept, however much the models might.
    assert "+ 200.00 GiB kept" in refusal(wide, "--set", "workers[0].memory.limit=1Gi")
    # Two models, each with a pool of its own; the third is elsewhere.
    several = CHART / "ci" / "several-models-values.yaml"
    assert "+ 50.00 GiB kept" in refusal(several, "--set", "workers[0].memory.limit=1Gi")
    # Host devices are shared memory of the pod.
    said = refusal(CPU, "--set", "workers[0].memory.limit=1Gi")
    assert "+ 3.00 GiB of host devices" in said
    values = yaml.safe_load(CPU.read_text())
    del values["config"]["device"]["count"]
    values["config"]["models"][0]["tensor_parallel"] = 3
    values["workers"][0]["memory"]["limit"] = "1Gi"
    file = tmp_path / "values.yaml"
    file.write_text(yaml.safe_dump(values))
    assert "+ 9.00 GiB of host devices" in refusal(file)


TYPOS = {
    "a pod of the head": ("raycluster.yaml", "imagePullPolicy:", "imagePullPolcy:"),
    "the front door": ("front-door.yaml", "readinessProbe:", "readynessProbe:"),
    "the network policy": ("networkpolicy.yaml", "podSelector:", "podSelecter:"),
    "the disruption budget": ("pdb.yaml", "maxUnavailable:", "maxUnavailible:"),
    "a key that stands twice": ("service.yaml", "spec:\n", "spec:\n  type: ClusterIP\n"),
    "the test's pod": ("tests/sleep-wake.yaml", "restartPolicy:", "restartPolice:"),
    "the RayCluster": ("raycluster.yaml", "rayStartParams:", "rayStartParms:"),
    "the RayJob": ("apply.yaml", "submissionMode:", "submissionmode:"),
}
_BY_KUBERAYS_SCHEMA = {"the RayCluster", "the RayJob"}


def test_a_typo_in_each_of_many_places_is_found(tmp_path: Path) -> None:
    from chart.checking import faults, lint

    chart = tmp_path / "torpor"
    shutil.copytree(CHART, chart)
    for name, right, wrong in TYPOS.values():
        template = chart / "templates" / name
        text = template.read_text()
        assert right in text
        template.write_text(text.replace(right, wrong))
    rendered = render(GPU, chart=chart)
    told = "\n".join(lint(rendered.text) + [fault for each in rendered.documents for fault in faults(each)])
    found = {place for place, (_, _, wrong) in TYPOS.items() if wrong.strip(": ") in told}
    found |= {
        place for place in TYPOS if place == "a key that stands twice" and 'duplication of key "type"' in told
    }
    unseen = set() if os.environ.get("TORPOR_KUBERAY_SCHEMAS") else _BY_KUBERAYS_SCHEMA
    assert found == TYPOS.keys() - unseen, told
