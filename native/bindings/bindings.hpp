// The parts of the Python module. Each bind_* adds what _core.pyi says of its classes.
#pragma once

#include <nanobind/nanobind.h>

#include "torpor/ledger.hpp"

namespace torpor {

void bind_errors(nanobind::module_& module);
void bind_device(nanobind::module_& module);
void bind_region(nanobind::module_& module);
// Plan, Registration and Ledger; bind_kv adds create_kv_manager to the latter.
[[nodiscard]] nanobind::class_<Ledger> bind_ledger(nanobind::module_& module);
void bind_kv(nanobind::module_& module, nanobind::class_<Ledger>& ledger);

}  // namespace torpor
