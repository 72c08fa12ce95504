#include "torpor/ledger.hpp"

#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "bindings.hpp"
#include "torpor/errors.hpp"

namespace nb = nanobind;
using namespace nb::literals;
using Free = nb::call_guard<nb::gil_scoped_release>;

namespace torpor {

namespace {

nb::dict as_dict(const Refusal& refusal) {
  nb::dict row;
  row["code"] = refusal.code;
  row["tag"] = refusal.tag;
  row["reason"] = refusal.reason;
  row["needed_bytes"] = refusal.needed_bytes;
  row["free_bytes"] = refusal.free_bytes;
  return row;
}

nb::dict as_dict(const Item& item) {
  nb::dict row;
  row["tag"] = item.tag;
  row["name"] = item.name;
  row["noop"] = item.noop;
  row["mode"] = to_string(item.mode);
  row["free_bytes"] = item.free_bytes;
  row["device_bytes"] = item.device_bytes;
  row["keep_bytes"] = item.keep_bytes;
  row["host_bytes"] = item.host_bytes;
  row["disk_bytes"] = item.disk_bytes;
  return row;
}

nb::dict as_dict(const Usage& usage) {
  nb::dict row;
  row["tag"] = usage.tag;
  row["name"] = usage.name;
  row["parked"] = usage.parked;
  row["mode"] = to_string(usage.mode);
  row["reserved_bytes"] = usage.reserved_bytes;
  row["device_bytes"] = usage.device_bytes;
  row["live_bytes"] = usage.live_bytes;
  row["host_bytes"] = usage.host_bytes;
  row["residual_bytes"] = usage.residual_bytes;
  row["disk_bytes"] = usage.disk_bytes;
  return row;
}

template <typename T>
nb::list as_list(const std::vector<T>& rows) {
  nb::list list;
  for (const T& row : rows) list.append(as_dict(row));
  return list;
}

nb::dict as_dict(const LedgerStatus& status) {
  nb::dict row;
  row["phase"] = to_string(status.phase);
  row["operation"] = status.operation.empty() ? nb::none() : nb::cast(status.operation);
  row["kind"] = status.kind ? nb::cast(to_string(*status.kind)) : nb::none();
  row["mutated"] = status.mutated;
  row["parked_tags"] = nb::cast(status.parked_tags);
  return row;
}

// Runs without the GIL and gives back what came of it.
template <typename F>
auto released(F work) {
  const nb::gil_scoped_release free;
  return work();
}

using Tags = std::optional<std::vector<std::string>>;
using Modes = std::optional<std::map<std::string, std::string>>;

Plan preflight(Ledger& self, const std::string& kind, const std::string& operation, const Tags& tags,
               const Modes& restore, bool verify, const std::string& overflow) {
  Request request{.kind = parse_action(kind), .operation = operation, .tags = tags, .restore = {}};
  request.verify = verify;
  request.overflow = parse_overflow(overflow);
  for (const auto& [tag, mode] : restore.value_or(std::map<std::string, std::string>{})) {
    request.restore.emplace(tag, parse_restore_mode(mode));
  }
  return released([&] { return self.preflight(std::move(request)); });
}

nb::dict stage(Ledger& self, const Plan& plan, double timeout_s) {
  const StageReport report =
      released([&] { return self.stage(plan, std::chrono::duration<double>(timeout_s)); });
  nb::dict row;
  row["seconds"] = report.seconds;
  row["moved_bytes"] = report.moved_bytes;
  row["digest"] = report.digest;
  return row;
}

nb::dict commit(Ledger& self) {
  const CommitReport report = released([&] { return self.commit(); });
  nb::dict row;
  row["freed_bytes"] = report.freed_bytes;
  row["device_bytes"] = report.device_bytes;
  row["seconds"] = report.seconds;
  return row;
}

std::shared_ptr<Region> create_region(Ledger& self, const std::string& tag, std::size_t size_bytes,
                                      const std::string& name, const std::string& restore, bool immutable,
                                      bool preserve_always, bool zero_on_wake) {
  return self.create_region({.tag = tag,
                             .size_bytes = size_bytes,
                             .name = name,
                             .restore = parse_restore_mode(restore),
                             .immutable = immutable,
                             .preserve_always = preserve_always,
                             .zero_on_wake = zero_on_wake});
}

std::shared_ptr<Ledger> make_ledger(const std::shared_ptr<Device>& device, std::size_t host_pool_bytes,
                                    std::shared_ptr<HostPool> host_pool,
                                    const std::optional<std::string>& disk_path, std::size_t disk_bytes) {
  if (host_pool && host_pool_bytes > 0) throw Misuse("give host_pool_bytes or host_pool, not both");
  if (disk_path.has_value() != (disk_bytes > 0)) throw Misuse("a disk needs both disk_path and disk_bytes");
  LedgerStorage storage{.host_pool = std::move(host_pool), .disk = nullptr};
  if (!storage.host_pool) storage.host_pool = std::make_shared<HostPool>(device, host_pool_bytes);
  if (disk_path) storage.disk = std::make_shared<DiskFile>(*disk_path, disk_bytes);
  return std::make_shared<Ledger>(device, std::move(storage));
}

void bind_host_pool(nb::module_& module) {
  nb::class_<HostPool>(module, "HostPool")
      .def(nb::init<std::shared_ptr<Device>, std::size_t>(), "device"_a, "bound_bytes"_a)
      .def_prop_ro("bound_bytes", &HostPool::bound_bytes)
      .def_prop_ro("idle_bytes", &HostPool::idle_bytes)
      .def_prop_ro("retained_bytes", &HostPool::retained_bytes)
      .def("resize", &HostPool::resize, "bound_bytes"_a, Free())
      .def("trim", &HostPool::trim, "target_bytes"_a = 0, Free());
}

void bind_plan(nb::module_& module) {
  nb::class_<Plan>(module, "Plan")
      .def_prop_ro("kind", [](const Plan& self) { return to_string(self.request.kind); })
      .def_prop_ro("operation", [](const Plan& self) { return self.request.operation; })
      .def_prop_ro("digest", [](const Plan& self) { return self.digest; })
      .def_prop_ro("refusals", [](const Plan& self) { return as_list(self.refusals); })
      .def_prop_ro("items", [](const Plan& self) { return as_list(self.items); })
      .def_ro("free_bytes", &Plan::free_bytes)
      .def_ro("device_bytes", &Plan::device_bytes)
      .def_ro("keep_bytes", &Plan::keep_bytes)
      .def_ro("host_bytes", &Plan::host_bytes)
      .def_ro("disk_bytes", &Plan::disk_bytes);
}

}  // namespace

nb::class_<Ledger> bind_ledger(nb::module_& module) {
  bind_plan(module);
  bind_host_pool(module);
  nb::class_<Registration>(module, "Registration")
      .def("close", &Registration::close)
      .def(
          "__enter__", [](Registration& self) -> Registration& { return self; }, nb::rv_policy::reference)
      .def("__exit__", [](Registration& self, const nb::args&) { self.close(); });
  nb::class_<Ledger> ledger(module, "Ledger");
  ledger
      .def(nb::new_(&make_ledger), "device"_a, "host_pool_bytes"_a = 0, nb::kw_only(),
           "host_pool"_a = nb::none(), "disk_path"_a = nb::none(), "disk_bytes"_a = 0)
      .def_prop_ro("device", [](const Ledger& self) { return self.device(); })
      .def_prop_ro("tags", &Ledger::tags)
      .def_prop_ro("parked_tags", &Ledger::parked_tags)
      .def("create_region", &create_region, "tag"_a, "size_bytes"_a, nb::kw_only(), "name"_a = "",
           "restore"_a = "pinned", "immutable"_a = false, "preserve_always"_a = false,
           "zero_on_wake"_a = false, Free())
      .def("register_external", &Ledger::register_external, "name"_a, "tag"_a = "kv_cache",
           "moves_kv"_a = true, Free())
      .def_prop_ro("registrations", &Ledger::registrations)
      .def(
          "prefill_backups",
          [](Ledger& self, double timeout_s) {
            return self.prefill_backups(std::chrono::duration<double>(timeout_s));
          },
          "timeout_s"_a, Free())
      .def("trim_host", &Ledger::trim_host, "target_bytes"_a = 0, Free())
      .def("preflight", &preflight, "kind"_a, "operation"_a, "tags"_a = nb::none(), "restore"_a = nb::none(),
           nb::kw_only(), "verify"_a = false, "overflow"_a = "reject")
      .def("stage", &stage, "plan"_a, "timeout_s"_a)
      .def("commit", &commit)
      .def("publish", &Ledger::publish, Free())
      .def("abort", &Ledger::abort, Free())
      .def("stop", &Ledger::stop)
      .def("status", [](const Ledger& self) { return as_dict(self.status()); })
      .def("memory", [](const Ledger& self) { return as_list(released([&] { return self.memory(); })); });
  return ledger;
}

}  // namespace torpor
