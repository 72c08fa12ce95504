"""Tensor-parallel ranks of one engine, a process each, driven over pipes: on host devices, or each on its own GPU."""

from __future__ import annotations

import multiprocessing
import traceback
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from gpu.eyes import driver_free_bytes
from support.engine_host import EngineHost

from torpor.actors.config import RankSpec
from torpor.actors.rank.addresses import free_addresses
from torpor.native import Device

ANSWER_S = 120.0


def _serve(spec: RankSpec, pipe: Connection, disk: Path | None, options: dict[str, float]) -> None:
    torch.set_num_threads(1)
    try:
        device = None
        if spec.device.kind == "cuda":
            torch.cuda.set_device(spec.rank)
            torch.zeros(1, device="cuda")
            device = Device.cuda(spec.rank)
        host = EngineHost(spec, device=device, disk=disk, **options)
        with host:
            pipe.send(("ready", None))
            while True:
                call, arguments, keywords = pipe.recv()
                if call == "exit":
                    break
                try:
                    pipe.send(("answer", _answer(host, call, arguments, keywords)))
                except Exception as error:
                    pipe.send(("raised", f"{type(error).__name__}: {error}"))
        pipe.send(("closed", None))
    except BaseException:
        pipe.send(("died", traceback.format_exc()))


def _answer(host: EngineHost, call: str, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    if call == "tell":
        said = host.tell(*arguments, **keywords)
        return said.tokens, said.cached
    if call == "tell_all":
        asked = [host.ask(prompt, **keywords) for prompt in arguments[0]]
        return [said.wait().tokens for said in asked]
    if call == "ask":
        said = host.ask(*arguments, **keywords)
        return next(request for request, known in host.said.items() if known is said)
    if call == "events":
        return host.said[arguments[0]].events
    if call == "stats":
        return host.engine._manager.stats()  # type: ignore[attr-defined]
    if call in ("sleep", "wake"):
        return getattr(host, call)(*arguments, **keywords)
    if call == "free_bytes":  # as the kernel or the driver has it
        return host.device.memory_info()[0] if host.device.kind == "host" else driver_free_bytes()
    if call == "tags":
        return host.ledger.tags
    if call == "replays":
        graphs = host.engine._loop._runner._graphs  # type: ignore[attr-defined]
        return graphs.replays if graphs is not None else 0
    if call == "value":
        return getattr(host.engine, *arguments)
    if call == "skew":  # make this rank's manager unlike the others'
        return host.engine._manager.forget_prefixes()  # type: ignore[attr-defined]
    return getattr(host.engine, call)(*arguments, **keywords)


class Ranks:
    """All ranks of one model; rank 0 leads. On device kind cuda, rank n has GPU n."""

    def __init__(self, spec: RankSpec, disk: Path | None = None, **options: float) -> None:
        """disk: a folder for sleeps to disk. options: the engine's time-outs."""
        context = multiprocessing.get_context("spawn")
        process_group, step_channel = free_addresses("127.0.0.1")
        spec = replace(
            spec,
            process_group=process_group,
            step_channel=step_channel,
            channel_key=b"a key of this test",
        )
        self.pipes: list[Connection] = []
        self.processes = []
        for rank in range(spec.model.tensor_parallel):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(replace(spec, rank=rank), theirs, disk, options), daemon=True
            )
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    def __enter__(self) -> Ranks:
        for rank in range(len(self.pipes)):
            assert self._receive(rank) == ("ready", None)
        return self

    def __exit__(self, *_: object) -> None:
        for rank, process in enumerate(self.processes):
            if process.is_alive():
                self.pipes[rank].send(("exit", (), {}))
        for process in self.processes:
            process.join(30)
            if process.is_alive():
                process.kill()
                process.join()

    def begin(self, rank: int, call: str, *arguments: Any, **keywords: Any) -> None:
        self.pipes[rank].send((call, arguments, keywords))

    def end(self, rank: int) -> Any:
        kind, value = self._receive(rank)
        if kind != "answer":
            raise RuntimeError(value)
        return value

    def call(self, rank: int, call: str, *arguments: Any, **keywords: Any) -> Any:
        self.begin(rank, call, *arguments, **keywords)
        return self.end(rank)

    def call_all(self, call: str, *arguments: Any, **keywords: Any) -> list[Any]:
        """On all ranks at once."""
        for rank in range(len(self.pipes)):
            self.begin(rank, call, *arguments, **keywords)
        return [self.end(rank) for rank in range(len(self.pipes))]

    def _receive(self, rank: int) -> tuple[str, Any]:
        assert self.pipes[rank].poll(ANSWER_S), f"rank {rank} said nothing for {ANSWER_S} s"
        kind, value = self.pipes[rank].recv()
        assert kind != "died", value
        return kind, value
