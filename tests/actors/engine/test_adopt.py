"""A module's tensors in ledger regions: contents, ties, views, addresses."""

from __future__ import annotations

import uuid

import pytest
import torch

from torpor.native import Device, Ledger, Misuse, OutOfDeviceMemory
from torpor.native.adopt import check_adopted

MIB = 1 << 20


def make_ledger(capacity_bytes: int = 32 * MIB) -> Ledger:
    return Ledger(Device.host(f"adopt-{uuid.uuid4().hex[:12]}", capacity_bytes))


class Mixed(torch.nn.Module):
    """A tie by object, a tie by storage, a transposed view, odd sizes, buffers of other types, a plain tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.one = torch.nn.Linear(7, 5)
        self.two = torch.nn.Linear(7, 5)
        self.two.weight = self.one.weight
        shared = torch.randn(4, 6)
        self.rows = torch.nn.Parameter(shared[1:3])
        self.turned = torch.nn.Parameter(shared.t())
        self.tail = torch.nn.Parameter(torch.randn(1000)[501:600])
        self.narrow = torch.nn.Parameter(torch.randn(33).to(torch.bfloat16))
        self.register_buffer("count", torch.tensor(5, dtype=torch.int64))
        self.register_buffer("table", torch.randn(9), persistent=False)
        self.register_buffer("empty", torch.empty(0))
        self.plain = torch.arange(3, dtype=torch.uint8)


def named(module: Mixed) -> dict[str, torch.Tensor]:
    found = {name: tensor.detach() for name, tensor in module.named_parameters(remove_duplicate=False)}
    return found | dict(module.named_buffers()) | {"plain": module.plain}


def test_contents_shapes_strides_and_ties_stay() -> None:
    """F28."""
    module, ledger = Mixed(), make_ledger()
    before = {name: tensor.clone() for name, tensor in named(module).items()}
    strides = {name: tensor.stride() for name, tensor in named(module).items()}
    adopted = ledger.adopt(module)
    for name, tensor in named(module).items():
        assert torch.equal(tensor, before[name]), name
        assert tensor.stride() == strides[name], name
    assert adopted.weights is not None and adopted.buffers is not None
    assert module.one.weight is module.two.weight
    with torch.no_grad():
        module.rows[0, 0] = 42.0
    assert module.turned[0, 1] == 42.0
    check_adopted(module, adopted)
    assert set(adopted.tensors) >= {
        "one.weight",
        "two.weight",
        "rows",
        "turned",
        "narrow",
        "count",
        "table",
        "plain",
    }


def test_parameters_sleep_and_buffers_stay() -> None:
    """S3."""
    module, ledger = Mixed(), make_ledger()
    adopted = ledger.adopt(module)
    weights = {name: tensor.detach().clone() for name, tensor in module.named_parameters()}
    plan = ledger.preflight("sleep", "one", ["weights"], {"weights": "pinned"})
    ledger.stage(plan, 10.0)
    ledger.commit()
    ledger.publish()
    assert adopted.weights is not None and adopted.weights.parked
    assert (int(module.count), module.plain.tolist()) == (5, [0, 1, 2])
    ledger.stage(ledger.preflight("wake", "two", ["weights"]), 10.0)
    ledger.commit()
    ledger.publish()
    for name, tensor in module.named_parameters():
        assert torch.equal(tensor, weights[name]), name


def test_a_tensor_that_was_replaced_after_adoption_is_found() -> None:
    module, ledger = Mixed(), make_ledger()
    adopted = ledger.adopt(module)
    module.one.bias.data = torch.zeros(5)
    with pytest.raises(Misuse, match=r"one\.bias does not lie"):
        check_adopted(module, adopted)


def test_a_module_that_has_no_bytes_is_refused_by_the_tensors_name() -> None:
    with pytest.raises(Misuse, match=r"weight .* no plain storage"):
        make_ledger().adopt(torch.nn.Linear(2, 2, device="meta"))


def test_a_module_without_room_is_refused_and_stays_where_it_was() -> None:
    module, ledger = torch.nn.Linear(1024, 2048), make_ledger(4 * MIB)
    place, before = module.weight.data_ptr(), module.weight.detach().clone()
    with pytest.raises(OutOfDeviceMemory):
        ledger.adopt(module)
    assert module.weight.data_ptr() == place
    assert torch.equal(module.weight, before)


def test_a_dtensors_own_shard_is_moved() -> None:
    """F28: setting `.data` on the DTensor itself would silently change nothing."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Shard, distribute_tensor
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        mesh = DeviceMesh("cpu", [0, 1])
        module = torch.nn.Linear(4, 6, bias=False)
        whole = module.weight.detach().clone()
        sharded = distribute_tensor(module.weight.detach(), mesh, [Shard(0)], src_data_rank=None)
        module.weight = torch.nn.Parameter(sharded)
        adopted = make_ledger().adopt(module)
        assert adopted.weights is not None
        local = module.weight.to_local()  # type: ignore[operator]
        assert local.data_ptr() == adopted.weights.address
        assert torch.equal(local, whole[:3])
    finally:
        dist.destroy_process_group()
