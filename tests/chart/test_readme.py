"""The chart's README says what its values say."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "helm" / "torpor"


def test_the_table_of_values_is_fresh() -> None:
    command = [sys.executable, str(ROOT / "deploy" / "chart_table.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def test_every_value_has_a_place_in_the_closed_schema() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    _closed(schema, yaml.safe_load((CHART / "values.yaml").read_text()), "values")


def _closed(schema: dict[str, object], value: object, at: str) -> None:
    properties = schema.get("properties")
    if not isinstance(properties, dict) or not isinstance(value, dict):
        return
    assert schema["additionalProperties"] is False, f"{at} takes any key"
    for key, inner in value.items():
        assert key in properties, f"{at}.{key} is not in the schema"
        _closed(properties[key], inner, f"{at}.{key}")
