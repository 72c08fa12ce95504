"""`torpor serve`: settings from file, environment and options; then the real cluster."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from torpor.actors.config import ClusterConfig
from torpor.service.default_model import ensure_default_model
from torpor.service.logs import make_logger
from torpor.service.serve import Cluster, ServeError, Surroundings, serve
from torpor.service.settings.load import load_settings
from torpor.service.settings.shape import Settings


def run_serve(config: Path | None, host: str | None, port: int | None, join: str | None = None) -> int:
    """join: the address of the Ray cluster to be a front end of, "" = the configured one; None: start one."""
    environment = dict(os.environ)
    # Options are the environment's nearer relations: they win over it, and are checked alike.
    if host is not None:
        environment["TORPOR_HTTP__HOST"] = host
    if port is not None:
        environment["TORPOR_HTTP__PORT"] = str(port)
    if join:
        environment["TORPOR_RAY__ADDRESS"] = join
    settings = load_settings(config, environment)
    if join is None:
        settings = with_default_model(settings, environment)
    address = settings.ray.address
    around = Surroundings(
        start_cluster=start_ray_cluster if join is None else lambda wanted: join_ray_cluster(wanted, address),
        say=say,
        logger=make_logger(sys.stderr),
        cuda_device_count=count_cuda_devices,
    )
    return serve(settings, around, joins=join is not None, source=str(config) if config else "settings")


def say(text: str) -> None:
    print(f"torpor: {text}", file=sys.stderr, flush=True)


def with_default_model(settings: Settings, environment: dict[str, str]) -> Settings:
    """engine.model left out means the default small model, fetched when it is nowhere yet."""
    if all(model.engine.model for model in settings.models):
        return settings
    path = str(ensure_default_model(environment, say=say))
    models = [
        model
        if model.engine.model
        else model.model_copy(update={"engine": model.engine.model_copy(update={"model": path})})
        for model in settings.models
    ]
    return settings.model_copy(update={"models": tuple(models)})


def count_cuda_devices() -> int:
    try:
        from torpor.native import cuda_device_count
    except ImportError as error:
        raise ServeError(f"the native core is not built ({error}); run `make setup`") from None
    return cuda_device_count()


def start_ray_cluster(config: ClusterConfig) -> Cluster:
    # Here, so that the other commands start without waiting for Ray's import.
    from torpor.actors.cluster import NoCluster, start_local

    try:
        cluster: Cluster = start_local(config)
    except NoCluster as error:
        raise ServeError(str(error)) from None
    return cluster


def join_ray_cluster(config: ClusterConfig, address: str) -> Cluster:
    from torpor.actors.cluster import NoCluster, connect

    try:
        cluster: Cluster = connect(config.namespace, address)
    except NoCluster as error:
        raise ServeError(str(error)) from None
    return cluster
