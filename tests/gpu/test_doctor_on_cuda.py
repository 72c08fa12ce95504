"""`torpor doctor` on a machine that has a GPU: nothing of the GPU's is a fault, and each thing was really asked."""

from __future__ import annotations

import pytest

pytest.importorskip("httpx", reason="torpor.service wants it")

from torpor.service.doctor import gpu
from torpor.service.doctor.findings import Level
from torpor.service.doctor.probe import probe

pytestmark = pytest.mark.gpu


def test_the_gpus_checks_are_well_here_and_were_not_guessed() -> None:
    facts = probe({})
    assert facts.driver.gpus and facts.driver.version is not None and facts.driver.bindings
    assert facts.core.device == "cuda" and facts.core.error == ""
    for check in (gpu.driver, gpu.virtual_memory, gpu.sharing, gpu.sleep_and_wake, gpu.kernels, gpu.torch):
        finding = check(facts)
        assert finding.level is Level.OK, finding
