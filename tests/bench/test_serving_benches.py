"""The benchmarks of the default engine, rehearsed with a small model on a host device: a GPU's time is short."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.fixture(autouse=True)
def _their_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(HERE))


def rows_of(folder: Path, name: str) -> dict[tuple[str, str, str], list[float]]:
    kept = json.loads((folder / f"{name}-host.json").read_text())
    return {(row["subject"], row["case"], row["metric"]): row["samples"] for row in kept["rows"]}


def test_decoding_is_measured_beside_generate_and_a_compiled_forward(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import p11_decode
    import torch._dynamo.utils as dynamo

    monkeypatch.setattr(p11_decode, "ROUNDS", 1)
    dynamo.counters.clear()
    words = ["--host", "--json", str(tmp_path), "--model", str(tmp_path / "model"), "--limit-s", "1000"]
    assert p11_decode.main(words) == 0
    assert dynamo.counters["stats"]["unique_graphs"] > 0, "the compiled forward was not compiled"
    rows = rows_of(tmp_path, "P11")
    speeds = {key[:2]: samples for key, samples in rows.items() if key[2] == "tokens_per_s"}
    assert len(speeds) == 6 and all(len(samples) == 1 for samples in speeds.values())
    assert all(min(samples) > 0 for samples in speeds.values())
    parts = {metric for _, case, metric in rows if case == "batch 3, parts"}
    assert {"launch_ms_a_step", "sampling_ms_a_step", "rest_ms_a_step"} <= parts
    for rival in ("generate", "compiled"):
        assert ("torpor", "batch 1", f"ratio_to_{rival}") in rows


def test_a_turn_that_would_not_end_in_time_is_not_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    import p11_decode
    from limit import Budget
    from record import Result

    clock, result, began = [100.0], Result("P0"), []

    def turn(batch: int) -> None:
        began.append(batch)
        clock[0] += 3.0 * batch

    budget = Budget(20.0, lambda: clock[0])
    p11_decode.in_turns(budget, result, "a", (1, 2), turn, warm=turn)
    # Both warm up (9 s) and have a turn (9 s); of what is left (2 s) none is enough for another.
    assert began == [1, 2, 1, 2]
    assert (
        result.notes
        == "; a at batch 1: 1 of 5 turns within the limit; a at batch 2: 1 of 5 turns within the limit"
    )
    p11_decode.in_turns(budget, result, "b", (1,), turn, warm=turn, warm_s=5.0)
    assert began == [1, 2, 1, 2] and "b at batch 1: 0 of 5" in result.notes


CUT = """
import time
from limit import keep_at
keep_at(0.2, lambda: print("kept", flush=True))
time.sleep(30)
"""


def test_what_was_measured_is_kept_when_the_limit_comes_in_the_middle() -> None:
    words = [sys.executable, "-c", CUT]
    ended = subprocess.run(words, cwd=HERE, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout) == (0, "kept\n"), ended.stderr


def test_the_parts_of_a_first_token_are_its_whole_and_every_case_is_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import p6_first_token
    from first_token_parts import PARTS

    for name, value in (("ROUNDS", 1), ("SLOW_ROUNDS", 1), ("PAUSE_S", 0.0), ("USUAL_CYCLE_S", 0.0)):
        monkeypatch.setattr(p6_first_token, name, value)
    words = ["--host", "--json", str(tmp_path), "--model", str(tmp_path / "model"), "--limit-s", "1000"]
    assert p6_first_token.main([*words, "--tokens", "200"]) == 0
    rows = rows_of(tmp_path, "P6")
    cases = {case for _, case, metric in rows if metric == "first_token_s"}
    assert len(cases) == 8, cases
    for case in cases - {"woken less never slept"}:
        whole = rows["torpor", case, "first_token_s"][0]
        parts = [rows["torpor", case, f"{name.replace(' ', '_')}_s"][0] for name in (*PARTS, "rest")]
        assert sum(parts) == pytest.approx(whole)
        launch, lookup = (rows["torpor", case, f"{name}_s"][0] for name in ("launch", "prefix_lookup"))
        assert min(parts[:-1]) >= 0.0 and launch > 0.0 and lookup > 0.0, dict(zip(PARTS, parts, strict=False))
    assert rows["torpor", "woken", "ttft_ratio"][0] > 0.0
