"""One operation of a ledger, whole."""

from __future__ import annotations

from typing import Any

from torpor.native import Ledger

TIMEOUT_S = 60.0


def transact(ledger: Ledger, kind: str, restore: dict[str, str] | None = None, **more: Any) -> dict[str, Any]:
    """Preflight to publish; what the commit reports."""
    plan = ledger.preflight(kind, kind, restore=restore, **more)
    assert plan.refusals == []
    ledger.stage(plan, TIMEOUT_S)
    report = ledger.commit()
    ledger.publish()
    return report
