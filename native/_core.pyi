"""The native core's Python surface.

Sizes are bytes, times seconds. Everything that touches a device or copies releases the GIL. Errors: torpor.native.errors.
"""

from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from typing import Any

import numpy as np
from numpy.typing import NDArray

class Device:
    """One GPU's memory. Make one with `host` or `cuda`."""

    @staticmethod
    def host(name: str, capacity_bytes: int, granularity_bytes: int = 2 << 20) -> Device:
        """A GPU played by RAM. Processes of this user that give the same name share the capacity."""
    @staticmethod
    def cuda(ordinal: int = 0) -> Device:
        """The GPU with this ordinal. Raises DeviceError where there is no driver or no such GPU."""
    @property
    def kind(self) -> str:
        """ "host" or "cuda"."""
    @property
    def id(self) -> str:
        """GPU UUID, or "host:<name>"."""
    @property
    def ordinal(self) -> int: ...
    @property
    def granularity_bytes(self) -> int: ...
    def memory_info(self) -> tuple[int, int]:
        """(free, total) in bytes, as the driver or the host device's books over all processes see it."""

class FaultyDevice(Device):
    """Wraps a device and makes chosen calls fail. For tests."""
    def __init__(self, inner: Device) -> None: ...
    def fail_at(self, k: int, forever: bool = False) -> None:
        """The k-th call from now fails (1 is the next, 0 none); once, unless `forever`."""
    def delay(self, call: str, seconds: float) -> None:
        """Sleep before each call of this name ("" is every call)."""
    def corrupt_copy(self, k: int) -> None:
        """One byte of what the k-th copy from now writes is flipped behind its back; 0: none."""
    @property
    def calls(self) -> int: ...
    def log(self) -> list[str]: ...

class DeviceEvent:
    """Held while your own work on the device's memory runs: a sleep waits for it, up to its deadline (M5).

    For the host device; a GPU's driver knows what runs. A context manager.
    """

    def __init__(self, device: Device) -> None: ...
    def complete(self) -> None:
        """The work is done. Repeating it does nothing."""
    def __enter__(self) -> DeviceEvent: ...
    def __exit__(self, *args: object) -> None: ...

def cuda_device_count() -> int: ...

class Region:
    """Opaque tagged bytes at a fixed address. Made by `Ledger.create_region`."""

    @property
    def tag(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def address(self) -> int: ...
    @property
    def size_bytes(self) -> int: ...
    @property
    def parked(self) -> bool: ...
    def contents_changed(self) -> None:
        """An immutable region was written to: the next sleep saves it anew. Misuse while parked."""
    def __dlpack__(self, **kwargs: Any) -> Any:
        """uint8, shape (size_bytes,), on the region's device. The memory outlives the Region object."""
    def __dlpack_device__(self) -> tuple[int, int]: ...

class Plan:
    """What an operation will do on this rank, and what forbids it. Reading only."""

    @property
    def kind(self) -> str:
        """ "sleep" or "wake"."""
    @property
    def operation(self) -> str: ...
    @property
    def digest(self) -> str:
        """Equal on all ranks that would do logically the same; nothing of addresses or slots."""
    @property
    def refusals(self) -> list[dict[str, Any]]:
        """[{code, tag, reason, needed_bytes, free_bytes}]; empty when the plan can be staged."""
    @property
    def items(self) -> list[dict[str, Any]]:
        """[{tag, name, noop, mode, free_bytes, device_bytes, keep_bytes, host_bytes, disk_bytes}]."""
    @property
    def free_bytes(self) -> int:
        """Device bytes that a sleep gives back."""
    @property
    def device_bytes(self) -> int:
        """Device bytes that a wake needs."""
    @property
    def keep_bytes(self) -> int:
        """Bytes copied to (sleep) or from (wake) the host."""
    @property
    def host_bytes(self) -> int:
        """Host memory to be newly committed."""
    @property
    def disk_bytes(self) -> int:
        """Room on the disk to be newly taken."""

class HostPool:
    """Host memory kept between cycles, under one bound. Ledgers of one Device may share it."""

    def __init__(self, device: Device, bound_bytes: int) -> None: ...
    @property
    def bound_bytes(self) -> int: ...
    @property
    def idle_bytes(self) -> int: ...
    @property
    def retained_bytes(self) -> int:
        """Backups of awake regions; they count under the bound."""
    def resize(self, bound_bytes: int) -> None:
        """A new bound; idle memory over it is freed at once."""
    def trim(self, target_bytes: int = 0) -> int:
        """Free idle memory until at most this much of it is left; returns the bytes freed."""

class Ledger:
    """All regions and KV managers of one rank, under one transaction at a time.

    preflight → stage → commit → publish, or abort at any time before commit. Thread-safe.
    """

    def __init__(
        self,
        device: Device,
        host_pool_bytes: int = 0,
        *,
        host_pool: HostPool | None = None,
        disk_path: str | None = None,
        disk_bytes: int = 0,
    ) -> None:
        """host_pool: shared with other ledgers of the Device. disk_path: a folder, for restore mode disk."""
    @property
    def device(self) -> Device: ...
    @property
    def tags(self) -> list[str]:
        """Sorted, without repeats."""
    @property
    def parked_tags(self) -> list[str]:
        """Sorted: tags of which anything is parked."""
    def create_region(
        self,
        tag: str,
        size_bytes: int,
        *,
        name: str = "",
        restore: str = "pinned",
        immutable: bool = False,
        preserve_always: bool = False,
        zero_on_wake: bool = False,
    ) -> Region:
        """Reserve and map; `restore` is the default mode. Misuse while an operation is staged.

        preserve_always: stays mapped asleep (S3). zero_on_wake: reads zero after a wake from `none` too (S4).
        """
    def create_kv_manager(
        self,
        layers: int,
        kv_heads: int,
        head_dim: int,
        dtype: str,
        tokens_per_block: int,
        gpu_bytes: int,
        host_bytes: int = 0,
        *,
        tag: str = "kv_cache",
        name: str = "",
        restore: str = "none",
        seed: int | None = None,
        disk_bytes: int = 0,
        disk_path: str = "",
        cold_gpu_bytes: int = 0,
        codec: str = "identity",
    ) -> KvManager:
        """A paged KV pool of at most gpu_bytes. dtype: float32, float16, bfloat16. seed: random slot order (tests).

        Pages that leave it fall into the tiers that there are: cold_gpu_bytes on the GPU, host_bytes, disk_bytes (in
        an unlinked file in the folder disk_path; without one, in the ledger's). codec, of pages in those tiers:
        identity, checked (with a checksum).
        """
    def create_kv_cache(
        self,
        layers: SequenceOf[LayerSpec],
        tokens_per_block: int,
        gpu_bytes: int,
        host_bytes: int = 0,
        *,
        tag: str = "kv_cache",
        name: str = "",
        restore: str = "none",
        sequence_tokens: int = 4096,
        max_sequence_tokens: int = 0,
        max_utilisation: float = 1.0,
        partial_blocks: bool = False,
        event_count: int = 1024,
        seed: int | None = None,
        disk_bytes: int = 0,
        disk_path: str = "",
        cold_gpu_bytes: int = 0,
        codec: str = "identity",
    ) -> KvManager:
        """A paged cache of layers of several kinds; `create_kv_manager` is the short form for K and V alone.

        Layers of one kind (the same window and sinks) are a life cycle; life cycles with equal page sizes share a
        pool. gpu_bytes and host_bytes are divided over the pools in proportion to what a sequence of sequence_tokens
        takes in each, in whole granules. max_sequence_tokens bounds page tables (0: what fits the pools of full
        attention; without such, 2**20). `resume` locks at most max_utilisation of each pool. partial_blocks: prompts
        also match the beginning of a block, at the price of one page copied on resume; matched_tokens is then any
        number. event_count: how many events are kept. Misuse when a layer or a size is impossible."""
    def register_external(self, name: str, tag: str = "kv_cache", moves_kv: bool = True) -> Registration:
        """Until `close` (and if moves_kv) sleep of the tag is refused by name (K10). Waits for a running operation."""
    @property
    def registrations(self) -> list[str]:
        """Names of what is registered, oldest first."""
    def prefill_backups(self, timeout_s: float) -> int:
        """Save awake immutable regions ahead of time, within the host pool's bound (M9); returns the bytes saved.

        For a thread of your own. An operation goes first: then this ends early, and nothing is half done.
        """
    def trim_host(self, target_bytes: int = 0) -> int:
        """Give back idle host memory and backups of awake regions until this much is left; returns bytes (M8)."""
    def preflight(
        self,
        kind: str,
        operation: str,
        tags: SequenceOf[str] | None = None,
        restore: Mapping[str, str] | None = None,
        *,
        verify: bool = False,
        overflow: str = "reject",
    ) -> Plan:
        """No mutation. tags None = all. Tags that the ledger lacks give a refusal, code "unknown_tag".

        verify: a sleep records checksums of all that it preserves; a wake is refused where none were recorded.
        Every wake compares what was recorded: ContentsCorrupt, and the tag stays asleep (K13).
        """
    def stage(self, plan: Plan, timeout_s: float) -> dict[str, Any]:
        """All that can fail or take long; {seconds, moved_bytes, digest}. On a throw everything is as before.

        It plans again first, so that the digest is that of the moment, after a drain; what has become impossible
        since preflight is raised.
        """
    def commit(self) -> dict[str, Any]:
        """{freed_bytes, device_bytes, seconds}. Idempotent; after a throw call again to go on."""
    def publish(self) -> None:
        """Ends the transaction: drops what a wake no longer needs."""
    def abort(self) -> None:
        """Takes a stage back. Nothing to do without one; Misuse after commit has begun."""
    def stop(self) -> None:
        """From another thread: the running stage ends with Stopped at its next chunk."""
    def status(self) -> dict[str, Any]:
        """{phase: idle|staged|committing|committed, operation, kind, mutated, parked_tags}."""
    def memory(self) -> list[dict[str, Any]]:
        """[{tag, name, parked, mode, reserved_bytes, device_bytes, live_bytes, host_bytes, residual_bytes,
        disk_bytes}]."""

class Registration:
    """A context manager too."""

    def close(self) -> None: ...
    def __enter__(self) -> Registration: ...
    def __exit__(self, *args: object) -> None: ...

class Buffer:
    """One tensor of a layer. shape: of one token ("full", "window"), or of the whole state ("state").

    dtype: float32, float16, bfloat16, uint8."""

    def __init__(self, role: str, shape: SequenceOf[int], dtype: str) -> None: ...
    @property
    def role(self) -> str: ...
    @property
    def shape(self) -> list[int]: ...

class LayerSpec:
    """kind: "full" attention, a sliding "window", or a recurrent "state". window and sinks are tokens.

    A window keeps the blocks of the last `window` tokens of the history and of the first `sinks` ones. Its other
    blocks are stale: their pages go back and their page-table entries are -1."""

    def __init__(
        self, kind: str, buffers: SequenceOf[Buffer], *, window: int = 0, sinks: int = 0
    ) -> None: ...
    @property
    def kind(self) -> str: ...
    @property
    def window(self) -> int: ...
    @property
    def sinks(self) -> int: ...
    @property
    def buffers(self) -> list[Buffer]: ...

class KvManager:
    """Bytes whose meaning is known: K and V of every layer, paged. One slot holds all layers of a token block."""

    @property
    def tokens_per_block(self) -> int: ...
    @property
    def slots(self) -> int:
        """GPU slots of the first pool, those in use included."""
    @property
    def page_bytes(self) -> int:
        """Of the first pool: its slots are so many bytes apart."""
    @property
    def life_cycles(self) -> list[dict[str, Any]]:
        """[{kind, window, sinks, layers, pool, page_bytes}]; their order is that of Sequence.table."""
    @property
    def parked(self) -> bool: ...
    def page_view(self, layer: int, role: str) -> Any:
        """DLPack object over all slots of the layer's pool, strided; the address never changes (S1).

        Shape: (slots, tokens_per_block, *shape of the buffer); for a state (slots, *shape). In the short form roles
        are "k" and "v", and their shape is (kv_heads, head_dim)."""
    def probe(self, scope: str, tokens: SequenceOf[int]) -> int:
        """How many leading tokens a new sequence would find. Reads only.

        Something must be there for every layer: all blocks in full attention, sinks and window in a window, a
        snapshot at exactly that many tokens in a state."""
    def create_sequence(self, scope: str, prompt: SequenceOf[int]) -> Sequence:
        """Suspended; holds the longest known prefix of whole blocks, at most len(prompt) - 1 tokens."""
    def forget_prefixes(self) -> int:
        """Drops every reusable page on every tier; returns the tokens lost."""
    def block_hashes(self, scope: str, tokens: SequenceOf[int]) -> list[int]:
        """The hash of each whole block, chained over the scope and all tokens up to it: how events name blocks."""
    def events(self, after: int = 0) -> dict[str, Any]:
        """{events: [{number, kind, block, parent, tokens, …}], next, lost}: what became of known blocks since.

        kind: "stored", "removed", or "moved" with {life_cycle, tier: "gpu" | "host"}. Ask with `next` the next time.
        lost: some were overwritten before they were read (or `after` is not of this cache): begin anew."""
    def pools(self) -> list[dict[str, int]]:
        """[{page_bytes, slots, free_slots, locked_pages, held_pages, droppable_pages, host_pages}] by pool."""
    def stats(self) -> dict[str, int]:
        """Over all pools:

        {slots, free_slots, locked_pages, held_pages, droppable_pages, host_pages, host_bytes, host_slots,
        sequences, prefix_tokens; since the start: lookup_tokens, hits_tokens, evicted_pages (for room),
        forgotten_pages (with all prefixes), moved_out_pages, moved_in_pages,
        moved_down_pages (from one cold tier into a colder one), cold_gpu_pages, cold_gpu_slots, disk_pages, disk_bytes,
        disk_slots}."""

class Sequence:
    """suspended ↔ active → closed."""

    @property
    def id(self) -> int: ...
    @property
    def state(self) -> str: ...
    @property
    def matched_tokens(self) -> int:
        """Tokens found in the prefix tree at creation; their K and V need no computing."""
    @property
    def history_tokens(self) -> int:
        """Tokens committed so far, matched ones included."""
    @property
    def capacity_tokens(self) -> int: ...
    @property
    def contents_lost(self) -> bool:
        """A discarding sleep took K and V of its history: they must be computed again, in a new sequence."""
    @property
    def page_table(self) -> NDArray[np.int32]:
        """table(0)."""
    def table(self, life_cycle: int) -> NDArray[np.int32]:
        """Slot of each block of a life cycle, -1 where none (stale too); of a state shape (1,): its slot.

        A live view at a stable address; all -1 while suspended or asleep."""
    def snapshot(self) -> bool:
        """Keep a copy of the states after the history, a multiple of tokens_per_block, for prompts that begin so.

        False when there is no room, or the history is older than the last forget_prefixes."""
    def resume(self) -> bool:
        """Bring all pages to the GPU and lock them; a new state reads zero, or is a copy of the matched snapshot.

        False when there is no room or more than max_utilisation of a pool would be locked; then nothing changed."""
    def suspend(self) -> None:
        """Unlock: pages may move to the host, and are never dropped."""
    def resize(self, capacity_tokens: int) -> bool:
        """Grow (or shrink, not below history) while active. False when there is no room; then nothing changed."""
    def commit(self, tokens: SequenceOf[int]) -> None:
        """These tokens' K and V now lie in the pages, behind the history. Full blocks become reusable."""
    def close(self) -> None:
        """Committed full blocks stay as droppable prefixes; the rest is freed."""
