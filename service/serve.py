"""Runs the service: checks first, then the cluster, then HTTP until a signal; and leaves nothing behind."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import math
import signal
import socket
import threading
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Protocol

import uvicorn
from structlog.typing import FilteringBoundLogger

from torpor.actors.config import ClusterConfig
from torpor.actors.ports import Control, ControlUnreachable, InferenceAtLeaders, Loss
from torpor.service.app import create_app
from torpor.service.auth.tokens import TokensError
from torpor.service.auth.tokens_file import TokensFile
from torpor.service.ending import SIGNALS, TOLD_S, Ending, EndTimes, park
from torpor.service.gate.gates import Gates
from torpor.service.gate.patience import PatientInference
from torpor.service.limits.bounds import Bounds
from torpor.service.loading import tell_states, until_loaded
from torpor.service.settings.load import SettingsError
from torpor.service.settings.shape import Settings, cluster_config

_REFUSED_S = 0.5  # how long those who were on their way still hear why a lost cluster is
_DESCRIBE_S = (
    120  # a coordinator that restarts is waited for: Ray itself may take a minute to see that one is dead
)
_SILENT_S = 5  # until whoever has started the front end is told what it waits for


class ServeError(Exception):
    """The service cannot run; one line that says what to do."""


class Cluster(Protocol):
    """A started or joined cluster; its models may still be loading."""

    @property
    def control(self) -> Control: ...
    @property
    def inference(self) -> InferenceAtLeaders: ...
    async def until_lost(self) -> Loss:
        """Until this front end cannot go on, and why. Whoever asks its coordinator is told so from then on."""

    def shutdown(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What `serve` needs of the outside: how to get at a cluster, who is told of progress, where logs go."""

    start_cluster: Callable[[ClusterConfig], Cluster]
    say: Callable[[str], None]
    logger: FilteringBoundLogger
    cuda_device_count: Callable[[], int]


def serve(settings: Settings, around: Surroundings, joins: bool = False, source: str = "settings") -> int:
    """Until SIGINT or SIGTERM; 0, or 1 when the models could not be loaded.

    source: where the settings stand. joins: the cluster is there already, with models of its own, and goes on when
    this front end ends. Raises ServeError before it is open, and SettingsError where files are missing.
    """
    if not joins:
        check_models(settings, source)
        check_devices(settings, around.cuda_device_count)
    tokens = read_tokens(settings, around.logger)
    with bind(settings.http.host, settings.http.port) as listener:
        config = cluster_config(settings)
        if joins:
            around.say(f"Joining the Ray cluster at {settings.ray.address}, namespace {config.namespace}")
        if not joins:
            warn_of_small_host_tiers(config, around.logger)
        for model in () if joins else config.models:
            around.say(f"Starting {model.name} ({model.engine.model}), {model.tensor_parallel} rank(s)")
        try:
            with _signals_held() as interrupted:
                cluster = around.start_cluster(config)
        except (KeyboardInterrupt, SystemExit):
            # The second signal; or a SIGTERM that the cluster, half started, answers with an exit of its own.
            raise ServeError("interrupted while starting") from None
        try:
            if interrupted():
                return 0
            return asyncio.run(_serve(cluster, None if joins else config, listener, tokens, settings, around))
        finally:
            others = (
                "this front end; models live on without it"
                if joins
                else "the ranks end, their memory is given back"
            )
            around.say(f"Stopping: {others}")
            _shut_down(cluster)


def _shut_down(cluster: Cluster) -> None:
    """Ends at once with another signal, whose sender has seen for long enough that it does not."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    try:
        with _handling(interrupt):
            cluster.shutdown()
    except KeyboardInterrupt:
        raise ServeError(
            "interrupted while stopping; what it has started may need to be ended by hand"
        ) from None


def check_models(settings: Settings, source: str = "settings") -> None:
    """source: where they stand. Raises SettingsError, of all whose files are missing."""
    missing = [
        f"models.{index}.engine.model: {model.engine.model} does not exist; "
        "give a GGUF file or a folder with safetensors"
        for index, model in enumerate(settings.models)
        if not Path(model.engine.model).exists()
    ]
    if missing:
        raise SettingsError(source, missing)


def read_tokens(settings: Settings, logger: FilteringBoundLogger) -> TokensFile | None:
    """Before anything costly starts: a service without usable tokens is not to be open to everybody instead."""
    if settings.auth.tokens_file is None:
        return None
    try:
        return TokensFile(Path(settings.auth.tokens_file), logger)
    except TokensError as error:
        raise ServeError(f"auth.tokens_file: {error}") from None


def warn_of_small_host_tiers(config: ClusterConfig, logger: FilteringBoundLogger) -> None:
    """K8: no fault, since a sleep that keeps more than the tier holds says so. Without a tier there is none to fill."""
    for model in config.models:
        cache = model.kv_cache
        if 0 < cache.host_bytes < cache.gpu_bytes:
            logger.warning(
                "the host tier is smaller than the GPU pool: a sleep that keeps a full KV cache will not fit",
                model=model.name,
                host_bytes=cache.host_bytes,
                gpu_bytes=cache.gpu_bytes,
            )


def check_devices(settings: Settings, cuda_device_count: Callable[[], int]) -> None:
    if settings.device.kind != "cuda":
        return
    found, needed = cuda_device_count(), max(model.tensor_parallel for model in settings.models)
    if found == 0:
        raise ServeError(
            "device.kind: cuda was asked for, and there is no usable NVIDIA GPU here; "
            "check `nvidia-smi`, or set device.kind to host or auto"
        )
    if found < needed:
        raise ServeError(
            f"device.kind: {found} CUDA device(s) found, and a model has {needed} ranks; lower tensor_parallel"
        )


def bind(host: str, port: int) -> socket.socket:
    """Bound before anything costly starts, so that a busy port is told at once."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(1)  # SO_REUSEADDR lets two bind; only one can listen
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise ServeError(
                f"http.port: {port} on {host} is in use; stop what listens there, or choose another with --port"
            ) from None
        raise ServeError(f"http: cannot listen on {host}:{port} ({error.strerror}); choose another") from None
    return listener


@contextlib.contextmanager
def _signals_held() -> Iterator[Callable[[], bool]]:
    """SIGINT and SIGTERM wait until what was begun is whole, so that it can be ended in order; a second one does not.

    Yields whether one came.
    """
    came: list[int] = []

    def hold(number: int, frame: FrameType | None) -> None:
        if came:
            raise KeyboardInterrupt
        came.append(number)

    with _handling(hold):
        yield lambda: bool(came)


@contextlib.contextmanager
def _handling(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Of signals, by this; as far as this thread is the one to which they come."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number in SIGNALS}
    try:
        yield
    finally:
        for number, known in before.items():
            signal.signal(number, known)


class _Server(uvicorn.Server):
    """Leaves signals to `_serve`: the cluster's own handlers must not be run after ours."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


async def _described(control: Control, say: Callable[[str], None]) -> ClusterConfig:
    asking = asyncio.ensure_future(control.describe())
    try:
        async with asyncio.timeout(_DESCRIBE_S):
            if not (await asyncio.wait((asking,), timeout=_SILENT_S))[0]:
                say(f"The coordinator does not answer yet; waiting up to {_DESCRIBE_S} s")
            return await asking
    except ControlUnreachable as error:
        raise ServeError(str(error)) from None
    except TimeoutError:
        raise ServeError(f"the coordinator did not answer within {_DESCRIBE_S} s; look at its logs") from None


async def _serve(
    cluster: Cluster,
    started: ClusterConfig | None,
    listener: socket.socket,
    tokens: TokensFile | None,
    settings: Settings,
    around: Surroundings,
) -> int:
    """started: what is being loaded; None = a joined cluster, which tells by itself what it has."""
    config = started or await _described(cluster.control, around.say)
    times = EndTimes(**settings.shutdown.model_dump())
    app = create_app(
        cluster.control,
        cluster.inference,
        logger=around.logger,
        gates=Gates(config, cluster.control),
        tokens=tokens,
        bounds=Bounds(**settings.limits.model_dump()),
    )
    inference: PatientInference = app.state.context.inference
    options = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        lifespan="on",
        proxy_headers=bool(settings.http.trusted_proxies),
        forwarded_allow_ips=list(settings.http.trusted_proxies),
        timeout_graceful_shutdown=math.ceil(times.drain_s + TOLD_S),
    )
    server = _Server(options)
    end = Ending(server, app.state.context.ending, inference.close, times)
    end.on_signals()
    ending = asyncio.create_task(end.run())
    loading = asyncio.create_task(
        until_loaded(cluster.control, started, around.say)
        if started is not None
        else tell_states(cluster.control, around.say)
    )
    host, port = listener.getsockname()[:2]
    around.say(f"Listening on http://{f'[{host}]' if ':' in host else host}:{port} (calls: /docs)")
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    amiss = asyncio.create_task(_until_amiss(cluster, loading, inference, around.say))
    await asyncio.wait((serving, amiss), return_when=asyncio.FIRST_COMPLETED)
    code = 0
    if amiss.done():
        code = 1
        if amiss.result():
            end.begin()
        else:
            end.now()
    await serving
    if server.force_exit:
        await server.lifespan.shutdown()  # left out then, and cancelled with a traceback
    for task in (loading, ending, amiss):
        task.cancel()
    await asyncio.gather(loading, ending, amiss, return_exceptions=True)
    await inference.close()
    if times.park and started is None and not (server.force_exit or code):
        await park(cluster.control, times.park_timeout_s, around.say)
    return code


async def _until_amiss(
    cluster: Cluster, loading: asyncio.Task[bool], inference: PatientInference, say: Callable[[str], None]
) -> bool:
    """Until the service is of no use any more: its models do not load, or the cluster is lost under it.

    True: what runs may end in order.
    """
    lost = asyncio.create_task(cluster.until_lost())
    try:
        await asyncio.wait((loading, lost), return_when=asyncio.FIRST_COMPLETED)
        if not lost.done() and not loading.result():
            return False
        loss = await lost
        say(loss.why)
        if not loss.serves_on:
            await inference.close(loss.why)
            await asyncio.sleep(_REFUSED_S)
        return loss.serves_on
    finally:
        lost.cancel()
