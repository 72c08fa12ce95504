"""What `torpor apply` would do: which differences need new ranks, which do not, and which nobody can change."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from torpor.actors.changes import IN_PLACE, differences
from torpor.actors.config import ClusterConfig, GateConfig, KvCacheConfig, ModelConfig, PlacementConfig
from torpor.actors.messages import RestoreMode
from torpor.service.apply.plan import Action, make_plan
from torpor.service.settings.load import load_settings
from torpor.service.settings.shape import Settings, cluster_config

CHAT = ModelConfig("chat")
DRAFT = ModelConfig("draft")


def settings_of(**variables: str) -> Settings:
    return load_settings(None, {"TORPOR_MODELS": '[{"name": "chat"}]'} | variables)


def plan_of(
    current: tuple[ModelConfig, ...], wanted: tuple[ModelConfig, ...], prune: bool = False
) -> list[tuple[str, Action]]:
    made = make_plan(ClusterConfig(current), ClusterConfig(wanted), settings_of(), prune)
    return [(step.model.name, step.action) for step in made.steps]


def test_what_is_missing_is_created_and_what_is_equal_is_left_alone() -> None:
    assert plan_of((CHAT,), (CHAT, DRAFT)) == [("chat", Action.KEEP), ("draft", Action.CREATE)]


def test_what_is_not_in_the_file_goes_only_when_asked_for() -> None:
    assert plan_of((CHAT, DRAFT), (CHAT,)) == [("chat", Action.KEEP), ("draft", Action.LEAVE)]
    assert plan_of((CHAT, DRAFT), (CHAT,), prune=True) == [("chat", Action.KEEP), ("draft", Action.PRUNE)]


def test_without_a_coordinator_everything_is_created_and_nothing_is_fixed() -> None:
    plan = make_plan(None, ClusterConfig((CHAT, DRAFT)), settings_of(TORPOR_DEVICE__COUNT="7"), prune=True)
    assert [step.action for step in plan.steps] == [Action.CREATE, Action.CREATE]
    assert plan.fixed == ()


@pytest.mark.parametrize(
    ("wanted", "key", "action"),
    [
        (replace(CHAT, tensor_parallel=2), "tensor_parallel", Action.RECREATE),
        (replace(CHAT, kv_cache=KvCacheConfig(gpu_bytes=1)), "kv_cache.gpu_bytes", Action.RECREATE),
        (replace(CHAT, placement=PlacementConfig("lent")), "placement.group", Action.RECREATE),
        (
            replace(CHAT, restore_modes={"kv_cache": RestoreMode.CPU, "weights": RestoreMode.PINNED}),
            "restore_modes.kv_cache",
            Action.RECREATE,
        ),
        (replace(CHAT, gate=GateConfig(retry_after_s=9)), "gate.retry_after_s", Action.CHANGE),
        (replace(CHAT, prefill_backup=True), "prefill_backup", Action.CHANGE),
    ],
)
def test_a_policy_changes_in_place_and_a_shape_needs_new_ranks(
    wanted: ModelConfig, key: str, action: Action
) -> None:
    (step,) = make_plan(ClusterConfig((CHAT,)), ClusterConfig((wanted,)), settings_of(), False).steps
    assert step.action is action
    assert [difference.key for difference in step.differences] == [key]


def test_one_shape_among_policies_recreates() -> None:
    both = replace(CHAT, gate=GateConfig(retry_after_s=9), tensor_parallel=2)
    assert plan_of((CHAT,), (both,)) == [("chat", Action.RECREATE)]


def test_every_policy_is_a_key_of_models() -> None:
    """A new key is shape until somebody has made it changeable."""
    assert {field.name for field in fields(ModelConfig)} >= IN_PLACE


def test_a_tag_that_only_one_of_them_names_is_a_difference() -> None:
    more = replace(CHAT, restore_modes={**CHAT.restore_modes, "workspace": RestoreMode.NONE})
    assert [(each.key, each.old, each.new) for each in differences(CHAT, more)] == [
        ("restore_modes.workspace", None, RestoreMode.NONE)
    ]


def test_what_is_fixed_while_the_cluster_runs_is_told_when_the_file_sets_it_otherwise() -> None:
    told = settings_of(
        TORPOR_DEVICE__COUNT="3",
        TORPOR_DEADLINES__DRAIN_S="5",
        TORPOR_HOST_POOL__PREFILL="true",
        TORPOR_HTTP__PORT="1",
    )
    running = cluster_config(settings_of(TORPOR_HOST_POOL__BYTES="1MiB", TORPOR_DEVICE__NAME="lab"))
    plan = make_plan(running, cluster_config(told), told, False)
    found = {each.key: (each.old, each.new) for each in plan.fixed}
    assert found == {
        "device.count": (1, 3),
        "deadlines.drain_s": (30.0, 5.0),
        "host_pool.bytes": (1 << 20, 1 << 30),
        "host_pool.prefill": (False, True),
    }


def test_what_a_file_leaves_out_is_as_the_cluster_has_it() -> None:
    told = Settings.model_validate({"models": [{"name": "chat"}]})
    running = cluster_config(settings_of(TORPOR_DEVICE__COUNT="3", TORPOR_DEADLINES__DRAIN_S="5"))
    assert make_plan(running, cluster_config(told), told, False).fixed == ()
