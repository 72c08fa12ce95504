"""What the coordinator makes of what Ray gives, where Ray has GPUs."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.long
def test_ranks_get_gpus_of_their_own_by_uuid_where_ray_packs_them_and_lenders_decide(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    environment |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    command = [sys.executable, "-W", "ignore", Path(__file__).with_name("imaginary_gpus.py"), str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["one by Ray"] == ["GPU-a", "GPU-a"], "Ray packs halves, which is why the coordinator chooses"
    assert sorted(found["one"]) == sorted(found["two"]) == ["GPU-a", "GPU-b"]
    assert found["three"] + found["four"] == found["three by Ray"] + found["four by Ray"]
    assert sorted(found["three"] + found["four"]) == ["GPU-a", "GPU-b"]
    assert found["borrower"] == found["borrower by Ray"]
    assert sorted(found["borrower"]) == ["GPU-a", "GPU-b"]
    assert "set gpus_per_rank to a share of a GPU that the group's owner leaves free" in found["untold"][0]
