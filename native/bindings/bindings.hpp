// The parts of the Python module, and what they share. `make stub` writes _core.pyi from what is bound here:
// docstrings give shapes, units, errors and where a figure comes from.
#pragma once

#include <nanobind/nanobind.h>

#include "torpor/kv/kv_manager.hpp"
#include "torpor/ledger.hpp"

namespace torpor {

// Other Python threads run meanwhile: waits for a lock or a device must not stop them.
using Free = nanobind::call_guard<nanobind::gil_scoped_release>;

// The same for a part of a function.
template <typename F>
auto released(F work) {
  const nanobind::gil_scoped_release free;
  return work();
}

using Row = nanobind::typed<nanobind::dict, nanobind::str, nanobind::any>;
using Rows = nanobind::typed<nanobind::list, Row>;

void bind_errors(nanobind::module_& module);
void bind_device(nanobind::module_& module);
void bind_region(nanobind::module_& module);
// Adds create_arena to the ledger.
void bind_arena(nanobind::module_& module, nanobind::class_<Ledger>& ledger);
// Plan, HostPool, Registration and Ledger; bind_kv adds create_kv_cache and create_kv_manager to the latter.
[[nodiscard]] nanobind::class_<Ledger> bind_ledger(nanobind::module_& module);
void bind_layout(nanobind::module_& module);
void bind_kv(nanobind::module_& module, nanobind::class_<Ledger>& ledger);
// pools() of the KvManager, and how they change.
void bind_pools(nanobind::class_<kv::KvManager>& manager);
void bind_sequence(nanobind::module_& module);

}  // namespace torpor
