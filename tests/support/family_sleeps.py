"""One family's rank through one sleep: a restore mode for all its tags, a drain mode, and all that must be as before."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

import torch
from support.engine_host import Oracle
from support.engine_rank import WAIT_S, EngineRank

from torpor.actors.engine.engine import TransformersEngine
from torpor.actors.engine.plan import Chunk
from torpor.actors.messages import (
    DrainMode,
    DrainSpec,
    FinishReason,
    GateReason,
    Kind,
    OnDiscard,
    OperationRequest,
    Phase,
    PhaseCall,
    RejectCode,
)
from torpor.native.adopt import check_adopted

RESTORES = ("none", "memset", "cpu", "pinned", "disk")
DISCARDING = ("none", "memset")
DRAINS = tuple(DrainMode)
TAGS = ("kv_cache", "weights")
KNOWN = [random.Random(f"known {i}").randrange(256) for i in range(50)]
RUNNING = [random.Random(f"running {i}").randrange(256) for i in range(20)]
# Of the text that runs when the sleep comes; enough for it to run still, however slow the machine is.
TOKENS = {DrainMode.FINISH: 30, DrainMode.ABORT: 400, DrainMode.FREEZE: 100, DrainMode.IF_IDLE: 100}
REUSED_TOKENS = 48  # of KNOWN, when it is found again


@dataclass(frozen=True)
class Case:
    restore: str
    drain: DrainMode

    @property
    def name(self) -> str:
        return f"{self.restore}-{self.drain}"

    @property
    def discards(self) -> bool:
        return self.restore in DISCARDING


def probe(engine: TransformersEngine) -> torch.Tensor:
    """(vocabulary,) logits after KNOWN, computed between two steps over pages that are given back at once."""
    engine.quiesce(WAIT_S)
    try:
        book, runner, key = engine._book, engine._loop._runner, 10**6  # type: ignore[union-attr]
        assert book is not None
        book.create(key, "a scope of its own", KNOWN)
        assert book.resume(key) and book.resize(key, len(KNOWN))
        rows = runner.forward([Chunk(key, 0, tuple(KNOWN), True)])
        book.close(key)
    finally:
        engine.resume()
    assert rows is not None
    return rows[0]


@dataclass
class Before:
    logits: torch.Tensor
    addresses: dict[str, int]
    buffers: dict[str, torch.Tensor]


class FamilySleeps:
    """checkpoint: a safetensors folder with the model's own weights, which heals a wake that has none."""

    def __init__(self, rank: EngineRank, oracle: Oracle, checkpoint: Path) -> None:
        self.rank = rank
        self.oracle = oracle
        self.checkpoint = checkpoint
        self.compared_tokens = 0

    @property
    def module(self) -> torch.nn.Module:
        assert self.rank.engine._model is not None
        return self.rank.engine._model.module

    async def run(self, case: Case) -> None:
        """Raises AssertionError where anything is not as before."""
        await self._say(f"{case.name} first", KNOWN, case, 0)
        before = self._look()
        running = f"{case.name} running"
        await self.rank.ask(running, RUNNING, case.name, max_tokens=TOKENS[case.drain])
        await self.rank.until(lambda: len(self.rank.tokens(running)) >= 2)
        await self._sleep(case, running)
        await self._wake(case)
        await self.rank.ended(running)
        said = self.rank.last(running)
        aborted = case.drain is DrainMode.ABORT
        assert said.finish_reason is (FinishReason.ABORT if aborted else FinishReason.LENGTH), said
        self._check(RUNNING, self.rank.tokens(running))
        await self._say(f"{case.name} again", KNOWN, case, 0 if case.discards else REUSED_TOKENS)
        self._compare(before)

    async def _say(self, name: str, prompt: list[int], case: Case, cached: int) -> None:
        await self.rank.ask(name, prompt, case.name, max_tokens=8)
        await self.rank.ended(name)
        self._check(prompt, self.rank.tokens(name))
        assert self.rank.last(name).cached_tokens == cached, (name, self.rank.last(name).cached_tokens)

    def _check(self, prompt: list[int], tokens: list[int]) -> None:
        assert self.oracle.agrees(prompt, tokens), (prompt, tokens)
        self.compared_tokens += len(tokens)

    async def _sleep(self, case: Case, running: str) -> None:
        rank, modes = self.rank, dict.fromkeys(TAGS, case.restore)
        if case.drain is DrainMode.IF_IDLE:
            await self._refused(case)
            await rank.ended(running)
        free_bytes = rank.free_bytes()
        reply = await rank.sleep(*TAGS, restore=modes, drain=DrainSpec(case.drain))
        status = await rank.core.status()
        assert status.gate_reason is GateReason.ASLEEP
        assert status.frozen_requests == (case.drain is DrainMode.FREEZE)
        assert rank.free_bytes() == free_bytes + reply.freed_bytes > free_bytes

    async def _refused(self, case: Case) -> None:
        """While something runs."""
        core, call = self.rank.core, PhaseCall(f"busy {case.name}", Phase.PREFLIGHT, 1)
        drain = DrainSpec(case.drain)
        request = OperationRequest(Kind.SLEEP, "tiny", TAGS, {}, drain)
        assert (await core.preflight(call, request)).ok
        call = PhaseCall(call.operation, Phase.DRAIN, 1)
        reply = await core.drain(call, drain, WAIT_S, WAIT_S)
        assert (reply.ok, reply.refusals[0].code) == (False, RejectCode.NOT_IDLE), reply
        assert (await core.abort(call)).ok

    async def _wake(self, case: Case) -> None:
        """What was zeroed is read again within the wake, what is undefined written after it."""
        rank = self.rank
        if case.restore == "memset":
            await rank.wake(on_discard=OnDiscard.RELOAD, accept_stale_weights=True)
        else:
            await rank.wake()
        if case.restore == "none":
            assert (await rank.core.status()).gate_reason is GateReason.CONTENTS_UNDEFINED
            await rank.update(self.checkpoint)
        assert (await rank.core.status()).gate_open

    def _look(self) -> Before:
        """Between two steps."""
        engine = self.rank.engine
        assert engine._loop is not None
        pages = engine._loop._runner._pages
        addresses = {name: tensor.data_ptr() for name, tensor in self._tensors().items()}
        for layer in range(len(pages.keys) + len(pages.states)):
            views = pages.states.get(layer) or {"k": pages.keys[layer], "v": pages.values[layer]}
            addresses |= {f"{role} of layer {layer}": view.data_ptr() for role, view in views.items()}
        buffers = {name: tensor.clone() for name, tensor in self.module.named_buffers()}
        return Before(probe(engine), addresses, buffers)

    def _tensors(self) -> dict[str, torch.Tensor]:
        return dict(self.module.named_parameters()) | dict(self.module.named_buffers())

    def _compare(self, before: Before) -> None:
        """F13, F28, S1, S3."""
        now = self._look()
        assert torch.equal(now.logits, before.logits)
        assert now.addresses == before.addresses
        assert now.buffers.keys() == before.buffers.keys()
        for name, buffer in now.buffers.items():
            assert torch.equal(buffer, before.buffers[name]), name
        adopted = self.rank.engine._adopted
        assert adopted is not None and adopted.weights is not None
        regions = [region for region in (adopted.weights, adopted.buffers) if region is not None]
        for name, tensor in self._tensors().items():
            start, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
            assert any(r.address <= start and end <= r.address + r.size_bytes for r in regions), name
        check_adopted(self.module, adopted)
        stats = self.rank.stats()
        assert (stats["sequences"], stats["locked_pages"]) == (0, 0)
