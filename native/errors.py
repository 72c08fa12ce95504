"""The exceptions of the native core; `_core` raises these very classes (see native/include/torpor/errors.hpp)."""

from __future__ import annotations


class TorporError(Exception):
    """Base of everything that torpor raises on purpose."""


class OutOfMemory(TorporError):
    """No room. `needed_bytes` and `free_bytes` are those of the moment of the refusal."""

    def __init__(self, message: str, needed_bytes: int = 0, free_bytes: int = 0) -> None:
        super().__init__(message)
        self.needed_bytes = needed_bytes
        self.free_bytes = free_bytes


class OutOfDeviceMemory(OutOfMemory):
    """The device has no room."""


class OutOfHostMemory(OutOfMemory):
    """The host has no room."""


class OutOfDisk(OutOfMemory):
    """The disk has no room, or the limit on what may lie there is reached."""


class ContentsCorrupt(TorporError):
    """What was saved of `tag` is not what came back: a wake with checksums has failed, and the saved copy stays."""

    def __init__(self, message: str, tag: str = "") -> None:
        super().__init__(message)
        self.tag = tag


class DeviceError(TorporError):
    """A call of the driver or kernel failed: `call`, `code`, `size_bytes`; `sticky` when the context is lost."""

    def __init__(
        self, message: str, call: str = "", code: int = 0, size_bytes: int = 0, sticky: bool = False
    ) -> None:
        super().__init__(message)
        self.call = call
        self.code = code
        self.size_bytes = size_bytes
        self.sticky = sticky


class CodecRefused(TorporError):
    """The codec of a cold tier would not encode or decode a page; the page is where it was."""


class DeviceBusy(TorporError):
    """Work on the device did not end within the deadline."""


class Stopped(TorporError):
    """Long work ended because its stop flag was raised."""


class Misuse(TorporError):
    """A caller's mistake; nothing was changed."""
