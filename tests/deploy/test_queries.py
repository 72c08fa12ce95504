"""Alerts and dashboard ask only for what the service exports: names, labels, and values of labels that are enums.

Their syntax, functions and types are promql-parser's to judge: Prometheus' own promtool is no package.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import promql_parser
import pytest
import yaml
from prometheus_client.metrics import Gauge, MetricWrapperBase

from torpor.actors.messages import Kind, ModelState, OperationState
from torpor.service.metrics.whole import Metrics
from torpor.service.wire import TIERS

ROOT = Path(__file__).resolve().parents[2]
ALERTS = ROOT / "deploy" / "alerts.yaml"
DASHBOARD = ROOT / "deploy" / "grafana" / "torpor.json"
VALUES = {"state": set(ModelState), "outcome": set(OperationState), "kind": set(Kind), "tier": set(TIERS)}
_SERIES = re.compile(r"\b(torpor_\w+)(?:\{([^}]*)\})?")
_MATCHER = re.compile(r'(\w+)\s*(=~|!~|!=|=)\s*"([^"]*)"')
_GRAFANAS = re.compile(r"\$__\w+")  # spans of time that Grafana puts in
_BY = re.compile(r"\bby \(([^)]*)\)")


def exported() -> dict[str, set[str]]:
    """Labels of each series that the service may export."""
    metrics = Metrics()
    metrics.watch_tokens_file(lambda: False)
    found: dict[str, set[str]] = {}
    for collector, names in metrics.registry._collector_to_names.items():
        assert isinstance(collector, MetricWrapperBase)
        bare = (
            set() if isinstance(collector, Gauge) else {collector._name}
        )  # of a counter or histogram no series
        for name in set(names) - bare:
            found[name] = set(collector._labelnames) | ({"le"} if name.endswith("_bucket") else set())
    return found


def alert_queries() -> Iterator[tuple[str, str, str]]:
    """(where, query, text in which labels are put)."""
    for group in yaml.safe_load(ALERTS.read_text())["groups"]:
        for rule in group["rules"]:
            yield rule["alert"], rule["expr"], " ".join(rule["annotations"].values())


def panel_queries() -> Iterator[tuple[str, str, str]]:
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        for target in panel["targets"]:
            yield panel["title"], target["expr"], target["legendFormat"]


def faults(query: str, text: str, known: dict[str, set[str]]) -> list[str]:
    found: list[str] = []
    series = _SERIES.findall(query)
    labels: set[str] = set()
    if not series:
        found.append(f"no query: {query}")
    try:
        promql_parser.parse(_GRAFANAS.sub("5m", query))
    except ValueError as error:
        found.append(f"no PromQL: {error}")
    for name, matchers in series:
        if name not in known:
            found.append(f"{name} is not exported")
            continue
        labels |= known[name]
        for label, operator, value in _MATCHER.findall(matchers):
            if label not in known[name]:
                found.append(f"{name} has no label {label}")
            wanted = set(value.split("|")) if "~" in operator else {value}
            if label in VALUES and wanted - VALUES[label]:
                found.append(f"{label} is never {wanted - VALUES[label]}")
    grouped = [{label.strip() for label in group.split(",")} for group in _BY.findall(query)]
    found += [f"no label {label} to group by" for group in grouped for label in group - labels]
    left = grouped[0] if grouped else labels
    shown = set(re.findall(r"\{\{\s*\$labels\.(\w+)\s*\}\}|\{\{(\w+)\}\}", text))
    found += [
        f"{label} is not left by the query" for pair in shown for label in pair if label and label not in left
    ]
    return found


@pytest.mark.parametrize("queries", [alert_queries, panel_queries])
def test_queries_ask_for_what_the_service_exports(queries: object) -> None:
    known = exported()
    assert callable(queries)
    listed = list(queries())
    assert len(listed) > 10
    wrong = {where: found for where, query, text in listed if (found := faults(query, text, known))}
    assert not wrong


@pytest.mark.parametrize(
    ("query", "fault"),
    [
        ("max(torpor_model_stat)", "torpor_model_stat is not exported"),
        ('torpor_model_state{state="dead"} == 1', "state is never {'dead'}"),
        ('torpor_memory_bytes{tier="gpu"}', "tier is never {'gpu'}"),
        ('torpor_gate_open{modell="x"}', "torpor_gate_open has no label modell"),
        ("sum by (rank) (torpor_gate_open)", "no label rank to group by"),
        ("rate(torpor_operations[5m])", "torpor_operations is not exported"),
        ("sum(up)", "no query: sum(up)"),
        ("sum(torpor_gate_open", "no PromQL: unclosed left parenthesis"),
        ("rte(torpor_operations_total[5m])", "no PromQL: unknown function with name 'rte'"),
        (
            "rate(torpor_operations_total)",
            "no PromQL: expected type matrix in call to function 'rate', got vector",
        ),
        ("rate(torpor_operations_total[5x])", "no PromQL: bad number or duration syntax: 5x"),
    ],
)
def test_a_query_for_what_is_not_there_is_found(query: str, fault: str) -> None:
    assert fault in faults(query, "", exported())


def test_a_text_names_only_labels_that_its_query_leaves() -> None:
    assert faults("max by (model) (torpor_rank_up)", "{{ $labels.rank }}", exported()) == [
        "rank is not left by the query"
    ]
