"""Lets a small region sleep and wake on a device of this machine, as a rank would."""

from __future__ import annotations

import os

from torpor.native import Device, Ledger, OutOfMemory, TorporError, cuda_device_count
from torpor.service.doctor.facts import CoreFacts

SIZE_BYTES = 4 << 20
TIMEOUT_S = 10.0


def core_facts() -> CoreFacts:
    kind = "cuda" if cuda_device_count() > 0 else "host"
    kernels = ""
    try:
        device = Device.cuda(0) if kind == "cuda" else Device.host(f"doctor-{os.getpid()}", 4 * SIZE_BYTES)
        kernels = device.kernels
        _sleep_and_wake(device)
    except OutOfMemory as error:
        return CoreFacts(kind, str(error), full=True, kernels=kernels)
    except TorporError as error:
        return CoreFacts(kind, str(error), kernels=kernels)
    return CoreFacts(kind, kernels=kernels)


def _sleep_and_wake(device: Device) -> None:
    """With checksums, so that contents which came back wrong are an error."""
    ledger = Ledger(device)
    region = ledger.create_region("doctor", SIZE_BYTES, restore="cpu")  # unmapped when it is forgotten
    _operate(ledger, "sleep")
    free_bytes, total_bytes = device.memory_info()
    # A GPU's free bytes are also other processes': there the ledger's books must do.
    if ledger.memory()[0]["device_bytes"] or (device.kind == "host" and free_bytes != total_bytes):
        raise TorporError("a region that sleeps still has memory of the device")
    _operate(ledger, "wake")
    if region.parked:
        raise TorporError("a region that woke has no memory of the device")


def _operate(ledger: Ledger, kind: str) -> None:
    plan = ledger.preflight(kind, f"doctor-{kind}", verify=True)
    for refusal in plan.refusals:
        raise TorporError(f"{kind} is refused: {refusal['reason']}")
    ledger.stage(plan, TIMEOUT_S)
    ledger.commit()
    ledger.publish()
