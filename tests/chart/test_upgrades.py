"""What an upgrade changes, object by object, and what that does: pods that roll, a cluster that stays or is made anew.

Kubernetes rolls a Deployment whose pod template differs. KubeRay makes a RayCluster anew whose pod templates differ
where `upgradeStrategy` is Recreate, and leaves its pods alone where it is None. Helm deletes what is not rendered any
more: so each apply job goes with the upgrade after it, and a rollback makes it again.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from chart.rendering import CHART, SHAPES, Rendered, needs_helm, render, shape_name

pytestmark = needs_helm
SHAPE = CHART / "ci" / "high-availability-values.yaml"
DOOR, CONFIG, CLUSTER = "Deployment", "ConfigMap", "RayCluster"
KEPT = {"PersistentVolumeClaim", "Service", "ServiceAccount"}  # no upgrade touches what is in them

# What is set; the kinds of objects that differ then; the pods that are replaced, and whether a new job applies.
UPGRADES: dict[str, tuple[str, set[str], set[str], bool]] = {
    "a new image": ("image.digest=sha256:{digest}", {DOOR, CLUSTER}, {"doors"}, True),
    "a new image, and all of Ray at once": (
        "image.digest=sha256:{digest},ray.upgrade=Recreate",
        {DOOR, CLUSTER},
        {"doors", "cluster"},
        True,
    ),
    "a policy": ("config.models[0].gate.retry_after_s=9", {DOOR, CONFIG}, {"doors"}, True),
    "a shape": ("config.models[0].kv_cache.gpu_bytes=8GiB", {DOOR, CONFIG}, {"doors"}, True),
    "how doors end": ("config.shutdown.park=true", {DOOR, CONFIG}, {"doors"}, True),
    "more doors": ("frontDoor.replicas=5", {DOOR}, set(), False),
    "more workers": ("workers[0].replicas=3", {CLUSTER}, set(), False),
    "other workers": ("workers[0].cpu=16", {CLUSTER}, set(), False),
    "other workers, at once": (
        "workers[0].cpu=16,ray.upgrade=Recreate",
        {CLUSTER},
        {"cluster"},
        False,
    ),
    "another time": ("apply.revision=again", set(), set(), True),
}


@dataclass(frozen=True)
class Change:
    before: Rendered
    after: Rendered

    @property
    def differing(self) -> set[str]:
        """Kinds of which an object is there before and after, and is not the same."""
        old, new = objects(self.before), objects(self.after)
        return {kind for kind, name in old.keys() & new.keys() if old[kind, name] != new[kind, name]}

    @property
    def gone_and_come(self) -> tuple[set[str], set[str]]:
        old, new = objects(self.before).keys(), objects(self.after).keys()
        return {kind for kind, _ in old - new}, {kind for kind, _ in new - old}

    @property
    def replaced(self) -> set[str]:
        before, after = self.before.of_kind(CLUSTER)["spec"], self.after.of_kind(CLUSTER)["spec"]
        found = set()
        if templates(before) != templates(after) and after["upgradeStrategy"]["type"] == "Recreate":
            found.add("cluster")
        doors = [each.of_kind(DOOR)["spec"]["template"] for each in (self.before, self.after)]
        return found | ({"doors"} if doors[0] != doors[1] else set())


def objects(rendered: Rendered) -> dict[tuple[str, str], dict[str, Any]]:
    return {(each["kind"], each["metadata"]["name"]): each for each in rendered.documents}


def templates(cluster: dict[str, Any]) -> list[dict[str, Any]]:
    return [group["template"] for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"])]


def upgrade(setting: str, shape: Path = SHAPE, chart: Path = CHART) -> Change:
    words = ("--set", setting.format(digest="f" * 64)) if setting else ()
    return Change(render(shape), render(shape, *words, chart=chart))


@pytest.mark.parametrize("case", UPGRADES)
def test_an_upgrade_changes_what_it_must_and_nothing_else(case: str) -> None:
    setting, differing, replaced, applies = UPGRADES[case]
    change = upgrade(setting)
    assert change.differing == differing
    assert change.replaced == replaced
    jobs = {"RayJob"} if applies else set()
    assert change.gone_and_come == (jobs, jobs)


@pytest.mark.parametrize("case", UPGRADES)
def test_a_rollback_renders_the_very_objects_of_before(case: str) -> None:
    """Nothing is rendered by chance, by the time, or by what was there; the job of before is made again."""
    setting, _, replaced, applies = UPGRADES[case]
    there = upgrade(setting)
    render.cache_clear()
    back = Change(there.after, render(SHAPE))
    assert back.after.text == there.before.text
    assert back.gone_and_come == there.gone_and_come
    assert ("RayJob" in back.gone_and_come[1]) is applies
    # A cluster that was made anew by Recreate is not made anew on the way back, where the old values say None.
    assert back.replaced == replaced - {"cluster"}


@pytest.mark.parametrize("shape", SHAPES, ids=shape_name)
def test_a_new_version_of_the_chart_replaces_no_pod_but_by_its_image(shape: Path, tmp_path: Path) -> None:
    """Else every upgrade of the chart would end what sleeps; and a Deployment's selector cannot be changed at all."""
    newer = tmp_path / "torpor"
    shutil.copytree(CHART, newer)
    file = newer / "Chart.yaml"
    text = file.read_text()
    file.write_text(text.replace("version: 0.1.0", "version: 9.9.9").replace('"0.1.0"', '"9.9.9"'))
    assert file.read_text().count("9.9.9") == 2
    change = upgrade("", shape, newer)
    assert DOOR in change.differing, "the labels of the objects tell the version"
    for kind in (DOOR, "Service"):
        before, after = (each.of_kind(kind)["spec"]["selector"] for each in _both(change))
        assert before == after
    texts = [str(_templates(each)).replace(":0.1.0", ":9.9.9") for each in _both(change)]
    assert texts[0] == texts[1]


@pytest.mark.parametrize("case", UPGRADES)
def test_no_upgrade_touches_the_journals_volume_or_who_finds_the_doors(case: str) -> None:
    change = upgrade(UPGRADES[case][0])
    assert not change.differing & KEPT
    (claim,) = (each for each in change.after.documents if each["kind"] == "PersistentVolumeClaim")
    assert claim["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep", (
        "also when all is uninstalled"
    )


def test_doors_roll_one_by_one_each_ready_before_another_ends_and_ends_as_the_values_say() -> None:
    quick = upgrade("config.shutdown.notice_s=1,config.shutdown.drain_s=2").after
    slow = upgrade("config.shutdown.notice_s=9,config.shutdown.drain_s=600,config.shutdown.park=true").after
    for rendered in (quick, slow):
        strategy = rendered.of_kind(DOOR)["spec"]["strategy"]["rollingUpdate"]
        assert strategy == {"maxUnavailable": 0, "maxSurge": 1}
    grace_s = [
        each.of_kind(DOOR)["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
        for each in (quick, slow)
    ]
    assert grace_s == [1 + 2 + 15, 9 + 600 + 60 + 15], "notice, drain, parking, and what is left"


def _both(change: Change) -> tuple[Rendered, Rendered]:
    return change.before, change.after


def _templates(rendered: Rendered) -> list[dict[str, Any]]:
    return [*templates(rendered.of_kind(CLUSTER)["spec"]), rendered.of_kind(DOOR)["spec"]["template"]]
