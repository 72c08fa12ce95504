"""What the device, the driver and the kernel say of memory: read, compared, shown."""

from __future__ import annotations

import shutil
import subprocess
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table


@dataclass(frozen=True, slots=True)
class Reading:
    """Bytes at one moment. page_bytes is the kernel's count; None on cuda, where the driver's count is it."""

    by_tag_bytes: Mapping[str, int]
    device_free_bytes: Mapping[str, int]  # by device, as its driver sees it
    page_bytes: int | None
    smi_free_bytes: int | None  # nvidia-smi's, an eye of its own

    @property
    def mapped_bytes(self) -> int:
        return sum(self.by_tag_bytes.values())

    def freed_since(self, before: Reading, slack_bytes: int) -> bool:
        """Device and kernel both have got back what was unmapped, but for the slack."""
        due = before.mapped_bytes - self.mapped_bytes - slack_bytes
        device = sum(self.device_free_bytes.values()) - sum(before.device_free_bytes.values())
        if before.page_bytes is None or self.page_bytes is None:
            return device >= due
        return device >= due and before.page_bytes - self.page_bytes >= due

    def describe(self, before: Reading) -> str:
        device = sum(self.device_free_bytes.values()) - sum(before.device_free_bytes.values())
        text = (
            f"mapped before {before.mapped_bytes}, now {self.mapped_bytes}; the device has {device} more free"
        )
        if before.page_bytes is not None and self.page_bytes is not None:
            text += f"; the ranks' pages in the kernel's count fell by {before.page_bytes - self.page_bytes}"
        return text


def read_memory(model: Mapping[str, Any]) -> Reading:
    """`model` is an answer of GET /models/{m}."""
    by_tag: Counter[str] = Counter()
    free: dict[str, int] = {}
    kinds = set()
    for rank in model["ranks"]:
        device = rank["device"]
        kinds.add(device["kind"])
        free[device["id"]] = device["free_bytes"]
        for row in rank["memory"]:
            by_tag[row["tag"]] += row["device_bytes"]
    on_cuda = kinds == {"cuda"}
    pages = None if on_cuda else page_bytes({rank["pid"] for rank in model["ranks"]})
    return Reading(dict(by_tag), free, pages, smi_free_bytes() if on_cuda else None)


def page_bytes(pids: Iterable[int]) -> int:
    """What the kernel has committed for the memfd files that these processes hold: a host device's pages."""
    files: dict[tuple[int, int], int] = {}
    for pid in pids:
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            try:
                if str(entry.readlink()).startswith("/memfd:"):
                    status = entry.stat()
                    files[status.st_dev, status.st_ino] = status.st_blocks * 512
            except OSError:
                continue  # closed meanwhile
    return sum(files.values())


def smi_free_bytes() -> int | None:
    """Free bytes of all GPUs together as nvidia-smi sees them; None without it."""
    smi = shutil.which("nvidia-smi")
    if smi is None:
        return None
    command = [smi, "--query-gpu=memory.free", "--format=csv,noheader,nounits"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = done.stdout.split()
    return sum(int(line) << 20 for line in lines) if done.returncode == 0 and lines else None


def _mib(size_bytes: int) -> str:
    """One unit for the whole table, so that columns add up."""
    return f"{size_bytes / (1 << 20):,.1f} MiB"


def free_table(before: Reading, after: Reading) -> Table:
    table = Table(title="Memory before and during the sleep", title_justify="left")
    table.add_column("what")
    for column in ("awake", "asleep", "given back"):
        table.add_column(column, justify="right")

    def row(what: str, awake: int, asleep: int, back: int) -> None:
        table.add_row(what, _mib(awake), _mib(asleep), _mib(back))

    for tag in sorted(before.by_tag_bytes):
        awake, asleep = before.by_tag_bytes[tag], after.by_tag_bytes.get(tag, 0)
        row(f"tag {tag}, mapped on the device", awake, asleep, awake - asleep)
    row("all tags", before.mapped_bytes, after.mapped_bytes, before.mapped_bytes - after.mapped_bytes)
    table.add_section()
    for number, device in enumerate(sorted(before.device_free_bytes)):
        awake, asleep = before.device_free_bytes[device], after.device_free_bytes[device]
        row(f"device {number}: free", awake, asleep, asleep - awake)
    if before.page_bytes is not None and after.page_bytes is not None:
        awake, asleep = before.page_bytes, after.page_bytes
        row("kernel: pages of the ranks' memfd files", awake, asleep, awake - asleep)
    if before.smi_free_bytes is not None and after.smi_free_bytes is not None:
        row(
            "nvidia-smi: free",
            before.smi_free_bytes,
            after.smi_free_bytes,
            after.smi_free_bytes - before.smi_free_bytes,
        )
    return table
