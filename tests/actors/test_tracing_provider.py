"""Where an actor's spans go, by OpenTelemetry's own variables."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import ConsoleSpanExporter, SpanExportResult

from torpor.actors.tracing.provider import exporters_of, provider_of, set_up

ENDPOINT = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:4318"}
CONSOLE = {"OTEL_TRACES_EXPORTER": "console"}


@pytest.mark.parametrize(
    ("environ", "names"),
    [
        ({}, []),
        (ENDPOINT, ["otlp_proto_http"]),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://127.0.0.1:4318"}, ["otlp_proto_http"]),
        ({**ENDPOINT, "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, ["otlp_proto_grpc"]),
        ({**ENDPOINT, "OTEL_TRACES_EXPORTER": "none"}, []),
        ({**ENDPOINT, "OTEL_SDK_DISABLED": "True"}, []),
        ({"OTEL_TRACES_EXPORTER": "console, otlp"}, ["console", "otlp_proto_http"]),
    ],
)
def test_exporters_are_those_that_the_variables_name(environ: Mapping[str, str], names: list[str]) -> None:
    assert exporters_of(environ) == names


def test_spans_reach_the_exporter_under_the_service_s_name(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[ReadableSpan] = []

    def export(self: ConsoleSpanExporter, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        sent.extend(spans)
        return SpanExportResult.SUCCESS

    monkeypatch.setattr(ConsoleSpanExporter, "export", export)
    provider = provider_of(CONSOLE)
    assert provider is not None
    provider.get_tracer("test").start_span("a span of the test").end()
    provider.shutdown()
    (span,) = sent
    assert (span.name, span.resource.attributes["service.name"]) == ("a span of the test", "torpor")


def test_without_variables_there_is_no_provider() -> None:
    assert provider_of({}) is None


def test_an_exporter_that_is_not_installed_is_told_and_ends_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        set_up({"OTEL_TRACES_EXPORTER": "pigeons"})
    assert "pigeons" in caplog.text and "torpor[otel]" in caplog.text
