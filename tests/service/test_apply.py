"""`torpor apply` from the file to the ranks of an in-memory cluster: what it does, says and exits with."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from service_memory_cluster import JoinedCluster

from torpor.actors.config import ClusterConfig, GateConfig
from torpor.service.cli.apply_command import DONE, FAILED, REJECTED, Wishes, run_apply
from torpor.service.serve import ServeError

CHAT = "{name: chat, engine: {model: m}, tensor_parallel: 2}"
DRAFT = "{name: draft, engine: {model: m}}"
Apply = Callable[..., int]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[JoinedCluster]:
    made = JoinedCluster(tmp_path)
    yield made
    made.end()


@pytest.fixture
def apply(tmp_path: Path, cluster: JoinedCluster, monkeypatch: pytest.MonkeyPatch) -> Apply:
    """The exit code of an apply of these models and other lines."""
    monkeypatch.setenv("COLUMNS", "200")

    def run(*models: str, more: str = "", console: Console | None = None, **wishes: Any) -> int:
        file = tmp_path / "torpor.yaml"
        file.write_text(f"models: [{', '.join(models)}]\n{more}")
        return run_apply(Wishes(file, timeout_s=20, **wishes), lambda namespace, address: cluster, console)

    return run


def incarnations(cluster: JoinedCluster) -> dict[str, list[str]]:
    """Of the ranks that live, by model."""
    ranks = cluster.maker.cluster.ranks
    return {model: [rank.incarnation for rank in each if not rank.dead] for model, each in ranks.items()}


def test_the_first_apply_starts_the_coordinator_and_the_second_changes_nothing(
    apply: Apply, cluster: JoinedCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    assert apply(CHAT, DRAFT) == DONE
    assert "Plan; coordinator to be started" in capsys.readouterr().out
    before = incarnations(cluster)
    assert {model: len(ranks) for model, ranks in before.items()} == {"chat": 2, "draft": 1}
    assert apply(CHAT, DRAFT) == DONE
    assert incarnations(cluster) == before
    assert len(cluster.started) == 1
    assert "create" not in capsys.readouterr().out
    assert cluster.left == 2, "it joins, and leaves again"


def test_a_changed_shape_makes_new_ranks_of_this_model_only(
    apply: Apply, cluster: JoinedCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    apply(CHAT, DRAFT)
    before = incarnations(cluster)
    bigger = "{name: draft, engine: {model: m}, kv_cache: {gpu_bytes: 1MiB}}"
    assert apply(CHAT, bigger) == DONE
    assert "kv_cache.gpu_bytes: 536870912 → 1048576" in capsys.readouterr().out
    after = incarnations(cluster)
    assert after["chat"] == before["chat"]
    assert after["draft"] != before["draft"]


def test_a_changed_policy_is_taken_over_without_touching_a_rank_and_is_known_afterwards(
    apply: Apply, cluster: JoinedCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    apply(DRAFT)
    before = incarnations(cluster)
    patient = "{name: draft, engine: {model: m}, gate: {retry_after_s: 9}}"
    assert apply(patient) == DONE
    assert "change in place" in capsys.readouterr().out
    assert incarnations(cluster) == before
    assert cluster.coordinator is not None
    (model,) = cluster.do(cluster.coordinator.describe()).models
    assert model.gate.retry_after_s == 9
    assert apply(patient, as_json=True) == DONE
    assert json.loads(capsys.readouterr().out)["steps"][0]["action"] == "keep"


def test_a_model_that_is_not_in_the_file_goes_when_asked_for_only(
    apply: Apply, cluster: JoinedCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    apply(CHAT, DRAFT)
    assert apply(CHAT) == DONE
    assert "not in the file; --prune deletes it" in capsys.readouterr().out
    assert set(incarnations(cluster)) == {"chat", "draft"}
    assert apply(CHAT, prune=True) == DONE
    assert set(incarnations(cluster)) == {"chat"}


def test_a_dry_run_says_all_and_does_nothing(
    apply: Apply, cluster: JoinedCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    assert apply(CHAT, dry_run=True) == DONE
    assert not cluster.has_coordinator()
    apply(CHAT)
    before = incarnations(cluster)
    capsys.readouterr()
    assert apply(DRAFT, dry_run=True, prune=True, as_json=True) == DONE
    report = json.loads(capsys.readouterr().out)
    assert [(step["model"], step["action"]) for step in report["steps"]] == [
        ("draft", "create"),
        ("chat", "prune"),
    ]
    assert incarnations(cluster) == before


def test_what_is_fixed_while_the_cluster_runs_is_refused_before_anything_is_done(
    apply: Apply, cluster: JoinedCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    apply(CHAT)
    assert apply(CHAT, DRAFT, more="device: {count: 9}") == REJECTED
    err = capsys.readouterr().err
    assert "device.count is 2 in the running cluster and 9 here" in err
    assert "end that cluster (`ray stop`) and apply again" in err
    assert set(incarnations(cluster)) == {"chat"}


def test_a_model_that_does_not_load_fails_the_apply_with_its_reason_and_the_others_come_up(
    apply: Apply, cluster: JoinedCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    apply(CHAT)
    cluster.maker.errors["load"].append(RuntimeError("the checkpoint has no tensor 'lm_head'"))
    assert apply(CHAT, DRAFT) == FAILED
    assert "draft: failed: " in (err := capsys.readouterr().err)
    assert "no tensor 'lm_head'" in err
    assert "change its entry and apply again" in err
    assert apply(CHAT, DRAFT) == FAILED, "a failed model is not as the file says"
    assert "`torpor recover draft` makes its ranks anew" in capsys.readouterr().err
    assert apply(CHAT, DRAFT.replace("m}", "n}")) == DONE


@pytest.mark.parametrize("dry_run", [True, False])
def test_a_running_model_is_not_deleted_for_a_path_where_nothing_is(
    apply: Apply, cluster: JoinedCluster, tmp_path: Path, capsys: pytest.CaptureFixture[str], dry_run: bool
) -> None:
    (tmp_path / "first").mkdir()
    (tmp_path / "second").mkdir()
    assert apply("{name: chat, engine: {model: first}}") == DONE
    before = incarnations(cluster)
    assert apply("{name: chat, engine: {model: misspelt}}", DRAFT, dry_run=dry_run) == REJECTED
    err = capsys.readouterr().err
    assert f"chat: its engine.model would be {tmp_path / 'misspelt'}, which is not on this machine" in err
    assert incarnations(cluster) == before
    assert apply("{name: chat, engine: {model: second}}") == DONE
    assert incarnations(cluster) != before


def test_a_deletion_that_is_rejected_leaves_the_model_as_it_was(
    apply: Apply, cluster: JoinedCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its requests do not end in time: the file's other changes are made, and the exit code says that not all were."""
    apply(CHAT, DRAFT, more="deadlines: {drain_s: 200ms}")
    before = incarnations(cluster)
    cluster.maker.cluster.ranks["chat"][0].gate.running = 1
    other = "{name: chat, engine: {model: m}, tensor_parallel: 1}"
    assert apply(other, DRAFT, "{name: third, engine: {model: m}}") == REJECTED
    assert "chat: rejected: it was not deleted (op-" in capsys.readouterr().err
    after = incarnations(cluster)
    assert after["chat"] == before["chat"] and len(after["third"]) == 1
    cluster.maker.cluster.ranks["chat"][0].gate.running = 0
    assert apply(other, DRAFT, "{name: third, engine: {model: m}}") == DONE
    assert len(incarnations(cluster)["chat"]) == 1


def test_a_coordinator_that_cannot_work_is_told_and_not_left_behind(
    apply: Apply, cluster: JoinedCluster
) -> None:
    cluster.unusable = (
        "journal /x is locked: another coordinator uses it; stop that one, or name another path"
    )
    with pytest.raises(ServeError, match="stop that one, or name another path"):
        apply(CHAT)
    assert cluster.dropped
    assert cluster.left == 1


def test_somebody_elses_change_meanwhile_is_told_and_nothing_is_changed(
    apply: Apply, cluster: JoinedCluster, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the plan and the change, another apply has made another model of it."""
    apply(DRAFT)
    coordinator = cluster.coordinator
    assert coordinator is not None
    described = cluster.do(coordinator.describe())
    (draft,) = described.models
    old = replace(described, models=(replace(draft, gate=GateConfig(retry_after_s=7)),))
    monkeypatch.setattr(coordinator, "describe", lambda: answer(old))
    cluster.do(coordinator.adapt(replace(draft, gate=GateConfig(retry_after_s=8))))
    monkeypatch.setattr(coordinator._models["draft"], "deleting", True)
    before = incarnations(cluster)
    assert apply(DRAFT) == REJECTED
    assert (
        "somebody else changes this cluster too (\"no model 'draft'\"); apply again"
        in capsys.readouterr().err
    )
    assert incarnations(cluster) == before


async def answer(config: ClusterConfig) -> ClusterConfig:
    return config


BIGGER = "{name: chat, engine: {model: m}, tensor_parallel: 2, kv_cache: {gpu_bytes: 1MiB}}"


@pytest.mark.parametrize("terminal", [True, False])
def test_progress_shows_what_is_deleted_and_which_ranks_have_loaded(
    apply: Apply, cluster: JoinedCluster, capsys: pytest.CaptureFixture[str], terminal: bool
) -> None:
    """Bars that are gone afterwards on a terminal, lines elsewhere; the plan goes to stdout all the same."""
    apply(CHAT)
    capsys.readouterr()
    cluster.maker.delay_s |= {"end": 0.8, "load": 0.8}
    drawn = io.StringIO()
    console = Console(file=drawn, force_terminal=terminal, width=100)
    assert apply(BIGGER, console=console) == DONE
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", drawn.getvalue())
    for said in ("torpor: chat: deleting", "delete chat: end", "chat: creating", "torpor: chat: awake"):
        assert said in text, text
    if terminal:
        assert "chat: loading, 0 of 2 ranks" in text
        assert "\x1b[2K" in drawn.getvalue()[-12:], "the last that is drawn takes it away"
    else:
        assert "\x1b" not in drawn.getvalue()
        lines = text.splitlines()
        assert lines.count("torpor: chat: loading") == 1 and lines[-1] == "torpor: chat: awake"
        assert all(line.startswith("torpor: ") for line in lines)
    captured = capsys.readouterr()
    assert "delete and create" in captured.out
    assert captured.err == ""


def test_progress_draws_nothing_for_scripts(
    apply: Apply, cluster: JoinedCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    apply(CHAT)
    capsys.readouterr()
    cluster.maker.delay_s["load"] = 0.5
    drawn = io.StringIO()
    assert apply(BIGGER, as_json=True, console=Console(file=drawn, force_terminal=True, width=100)) == DONE
    assert json.loads(capsys.readouterr().out)["results"][0]["outcome"] == "done"
    assert "\x1b" not in drawn.getvalue()
