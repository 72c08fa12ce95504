"""Where an actor's spans go: as OpenTelemetry's own variables say, read in the actor's process.

They are those of the node's Ray, whose environment its workers inherit. What cannot be set up is told in the log,
and nothing else: spans are worth no actor.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

log = logging.getLogger(__name__)
SERVICE = "torpor"
_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_EXPORTERS = {"http/protobuf": "otlp_proto_http", "grpc": "otlp_proto_grpc"}  # by protocol of OTLP


def set_up(environ: Mapping[str, str]) -> None:
    """For this process, unless it has a provider already, or the variables name no exporter."""
    try:
        provider = provider_of(environ)
        if provider is not None:
            from opentelemetry import trace

            if isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider):
                trace.set_tracer_provider(provider)
    except Exception as error:
        log.warning("no spans are sent: %s: %s; see the OTEL_ variables", type(error).__name__, error)


def provider_of(environ: Mapping[str, str]) -> TracerProvider | None:
    """None: no exporter is named. Raises ImportError without the package, LookupError where an exporter lacks.

    The SDK reads the rest (sampler, limits, batches, resource attributes) from the process's variables by itself.
    """
    names = exporters_of(environ)
    if not names:
        return None
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    named = "OTEL_SERVICE_NAME" in environ or "service.name=" in environ.get("OTEL_RESOURCE_ATTRIBUTES", "")
    exporters = [_exporter(name) for name in names]
    provider = TracerProvider(resource=Resource.create({} if named else {"service.name": SERVICE}))
    for exporter in exporters:
        provider.add_span_processor(BatchSpanProcessor(exporter))
    return provider


def exporters_of(environ: Mapping[str, str]) -> list[str]:
    """As packages name them. An endpoint alone means OTLP, over HTTP unless a protocol is named."""
    if environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return []
    default = "otlp" if any(environ.get(name) for name in _ENDPOINTS) else ""
    asked = (environ.get("OTEL_TRACES_EXPORTER") or default).split(",")
    protocol = next((environ[name] for name in _PROTOCOLS if environ.get(name)), "http/protobuf").strip()
    names = [name.strip() for name in asked]
    otlp = _EXPORTERS.get(protocol, protocol)
    return [otlp if name == "otlp" else name for name in names if name not in ("", "none")]


def _exporter(name: str) -> Any:
    found = list(entry_points(group="opentelemetry_traces_exporter", name=name))
    if not found:
        raise LookupError(f"no installed package exports traces as {name!r}; install torpor[otel]")
    return found[0].load()()
