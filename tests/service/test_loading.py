"""What whoever starts the service is told of its models, until they are up or one has failed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, cast

import pytest

from torpor.actors.config import ClusterConfig, ModelConfig
from torpor.actors.messages import GateReason, ModelState, ModelView
from torpor.actors.ports import Control
from torpor.service import loading

CONFIG = ClusterConfig(models=(ModelConfig("chat"),))
VIEW = ModelView(
    name="chat",
    state=ModelState.LOADING,
    gate_open=False,
    gate_reason=GateReason.LOADING,
    generation=0,
    parked_tags=[],
    tags=[],
    hold=False,
    weights_version=0,
    tensor_parallel=1,
)


class Scripted:
    def __init__(self, *views: ModelView) -> None:
        self._views: Iterator[ModelView] = iter(views)

    async def models(self, detail: bool = False) -> list[ModelView]:
        return [next(self._views)]


async def told(monkeypatch: pytest.MonkeyPatch, *views: ModelView) -> tuple[bool, list[str]]:
    monkeypatch.setattr(loading, "_POLL_S", 0.0)
    lines: list[str] = []
    done = await loading.until_loaded(cast(Control, Scripted(*views)), CONFIG, lines.append)
    return done, lines


def of(state: ModelState, **changes: Any) -> ModelView:
    return replace(VIEW, state=state, **changes)


async def test_a_model_whose_rank_died_as_it_loaded_is_followed_until_it_is_awake(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    views = (of(ModelState.LOADING), of(ModelState.RECOVERING), of(ModelState.AWAKE))
    done, lines = await told(monkeypatch, *views)
    assert done and [line.split(",")[0] for line in lines] == [
        "chat: loading",
        "chat: recovering",
        "chat: awake",
    ]


async def test_one_that_does_not_recover_ends_the_start_with_its_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    failed = of(ModelState.FAILED, error="rank 0 is gone: killed")
    done, lines = await told(monkeypatch, of(ModelState.LOADING), of(ModelState.RECOVERING), failed)
    assert not done and lines[-1] == "chat: loading failed: rank 0 is gone: killed"
