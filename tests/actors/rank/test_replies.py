"""What the native core's refusals become on their way out."""

from __future__ import annotations

from pathlib import Path

from torpor.actors.messages import RejectCode
from torpor.actors.rank.replies import refusal_of, refusals_of
from torpor.native import Device, Ledger, OutOfDisk


def test_a_full_disk_is_told_as_such_with_its_bytes_k9() -> None:
    refusal = refusal_of(OutOfDisk("needed 2 B on the disk, free 1 B"))
    assert refusal.code is RejectCode.DISK_SPACE


def test_a_plan_without_room_on_the_disk_has_the_same_code(tmp_path: Path) -> None:
    ledger = Ledger(Device.host("replies-disk", 8 << 20), disk_path=str(tmp_path), disk_bytes=1 << 20)
    ledger.create_region("weights", 4 << 20)
    (refusal,) = refusals_of(ledger.preflight("sleep", "op", restore={"weights": "disk"}))
    assert refusal.code is RejectCode.DISK_SPACE
    assert (refusal.needed_bytes, refusal.free_bytes) == (4 << 20, 1 << 20)
