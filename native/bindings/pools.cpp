#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <variant>
#include <vector>

#include "bindings.hpp"
#include "torpor/kv/kv_manager.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace torpor {
namespace {

using kv::KvManager;
using Counts = nb::typed<nb::dict, nb::str, nb::int_>;
using Pools = nb::typed<nb::list, Counts>;

Pools pools(const KvManager& self) {
  Pools rows;
  for (const kv::PoolStats& now : released([&] { return self.pool_stats(); })) {
    Counts row;
    row["page_bytes"] = now.page_bytes;
    row["slots"] = now.slots;
    row["free_slots"] = now.free_slots;
    row["locked_pages"] = now.locked_pages;
    row["held_pages"] = now.held_pages;
    row["droppable_pages"] = now.droppable_pages;
    row["host_pages"] = now.host_pages;
    row["host_slots"] = now.host_slots;
    row["size_bytes"] = now.size_bytes;
    row["reserved_bytes"] = now.reserved_bytes;
    rows.append(row);
  }
  return rows;
}

Pools resize_pools(KvManager& self, const std::variant<std::size_t, std::vector<std::size_t>>& gpu_bytes,
                   std::optional<std::size_t> host_bytes) {
  released([&] { std::visit([&](const auto& sizes) { self.resize_pools(sizes, host_bytes); }, gpu_bytes); });
  return pools(self);
}

Pools rebalance(KvManager& self, const std::optional<std::vector<double>>& shares) {
  released([&] { self.rebalance(shares.value_or(std::vector<double>{})); });
  return pools(self);
}

}  // namespace

void bind_pools(nb::class_<KvManager>& manager) {
  manager
      .def("pools", &pools,
           "[{page_bytes, slots, free_slots, locked_pages, held_pages, droppable_pages, host_pages, "
           "host_slots,"
           "\nsize_bytes, reserved_bytes}] by pool. size_bytes: on the GPU when awake. reserved_bytes: of "
           "addresses, how far it\ncan grow.")
      .def("resize_pools", &resize_pools, "gpu_bytes"_a, nb::kw_only(), "host_bytes"_a = nb::none(),
           R"(Change how much memory the pools have on the GPU; returns pools() afterwards.

gpu_bytes: of all pools, divided as at the start, or one number a pool in the order of pools(). Rounded down to
whole granules; a pool that shrinks gives whole chunks (a sixteenth of the first gpu_bytes, or less), so that it
may keep more. host_bytes: a new ceiling of the host tier, divided over the pools as gpu_bytes are then; None
leaves it.

Addresses never change (S1). Pages behind the new end of a pool move into other slots or colder tiers; reusable
ones that find no room are dropped, as for any other room. After growth take page_view anew: an old view ends
where it did. All or nothing: an error leaves sizes, pages and free memory as they were.

Misuse: a sequence is active, anything of the ledger is asleep, an operation is under way (K12), memory of the
tag is registered (K10), a size holds no page or is beyond max_gpu_bytes, or a sequence could never resume.
OutOfDeviceMemory, OutOfHostMemory: suspended sequences hold more than would be left, or the device has less.)")
      .def("rebalance", &rebalance, "shares"_a = nb::none(),
           R"(Let pools give each other memory, all bytes together as before; returns pools() afterwards.

shares: of the memory, one a pool in the order of pools(), in any unit. None: what the pages of each pool take,
those in colder tiers too. Comes as near as whole chunks allow, and takes no pool what suspended sequences need
there. Pages move as for resize_pools, and Misuse and errors are the same.)");
}

}  // namespace torpor
