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

namespace torpor {

namespace {

Row as_dict(const Refusal& refusal) {
  Row row;
  row["code"] = refusal.code;
  row["tag"] = refusal.tag;
  row["reason"] = refusal.reason;
  row["needed_bytes"] = refusal.needed_bytes;
  row["free_bytes"] = refusal.free_bytes;
  return row;
}

Row as_dict(const Evicted& evicted) {
  Row row;
  row["pages"] = evicted.pages;
  row["prefix_tokens"] = evicted.prefix_tokens;
  return row;
}

Row as_dict(const Item& item) {
  Row row;
  row["tag"] = item.tag;
  row["name"] = item.name;
  row["noop"] = item.noop;
  row["mode"] = to_string(item.mode);
  row["free_bytes"] = item.free_bytes;
  row["device_bytes"] = item.device_bytes;
  row["keep_bytes"] = item.keep_bytes;
  row["host_bytes"] = item.host_bytes;
  row["disk_bytes"] = item.disk_bytes;
  row["evicts"] = as_dict(item.evicts);
  return row;
}

Row as_dict(const Usage& usage) {
  Row row;
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
Rows as_list(const std::vector<T>& rows) {
  Rows list;
  for (const T& row : rows) list.append(as_dict(row));
  return list;
}

Row as_dict(const LedgerStatus& status) {
  Row row;
  row["phase"] = to_string(status.phase);
  row["operation"] = status.operation.empty() ? nb::none() : nb::cast(status.operation);
  row["kind"] = status.kind ? nb::cast(to_string(*status.kind)) : nb::none();
  row["mutated"] = status.mutated;
  row["parked_tags"] = nb::cast(status.parked_tags);
  row["evicted"] = as_dict(status.evicted);
  return row;
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

Row stage(Ledger& self, const Plan& plan, double timeout_s) {
  const StageReport report =
      released([&] { return self.stage(plan, std::chrono::duration<double>(timeout_s)); });
  Row row;
  row["seconds"] = report.seconds;
  row["moved_bytes"] = report.moved_bytes;
  row["planning_s"] = report.parts.planning_s;
  row["mapping_s"] = report.parts.mapping_s;
  row["copying_s"] = report.parts.copying_s;
  row["waiting_s"] = report.parts.waiting_s;
  row["ahead_s"] = report.parts.ahead_s;
  row["digest"] = report.digest;
  row["evicted"] = as_dict(report.evicted);
  return row;
}

Row commit(Ledger& self) {
  const CommitReport report = released([&] { return self.commit(); });
  Row row;
  row["freed_bytes"] = report.freed_bytes;
  row["device_bytes"] = report.device_bytes;
  row["seconds"] = report.seconds;
  row["evicted"] = as_dict(report.evicted);
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
  nb::class_<HostPool>(module, "HostPool",
                       "Host memory kept between cycles, under one bound (M8); thread-safe. Ledgers of one "
                       "Device may share it.\n\nIts figures are its own books. C++: torpor/host_pool.hpp.")
      .def(nb::init<std::shared_ptr<Device>, std::size_t>(), "device"_a, "bound_bytes"_a)
      .def_prop_ro("bound_bytes", &HostPool::bound_bytes)
      .def_prop_ro("idle_bytes", &HostPool::idle_bytes, "Kept for the next sleep, in nobody's use.")
      .def_prop_ro("retained_bytes", &HostPool::retained_bytes,
                   "Backups of awake regions; they count under the bound.")
      .def("resize", &HostPool::resize, "bound_bytes"_a, Free(),
           "A new bound; idle memory over it is freed at once.")
      .def("trim", &HostPool::trim, "target_bytes"_a = 0, Free(),
           "Free idle memory until at most this much of it is left; returns the bytes freed.");
}

void bind_plan(nb::module_& module) {
  nb::class_<Plan>(module, "Plan",
                   "What an operation will do on this rank, and what forbids it. Reading only; made by "
                   "`Ledger.preflight`.\n\nAll bytes are of this rank. C++: torpor/plan.hpp.")
      .def_prop_ro(
          "kind", [](const Plan& self) { return to_string(self.request.kind); }, "\"sleep\" or \"wake\".")
      .def_prop_ro("operation", [](const Plan& self) { return self.request.operation; })
      .def_prop_ro(
          "digest", [](const Plan& self) { return self.digest; },
          "Equal on all ranks that would do logically the same; nothing of addresses or slots (M7).")
      .def_prop_ro(
          "refusals", [](const Plan& self) { return as_list(self.refusals); },
          "[{code, tag, reason, needed_bytes, free_bytes}]; empty when the plan can be staged.")
      .def_prop_ro(
          "items", [](const Plan& self) { return as_list(self.items); },
          "[{tag, name, noop, mode, free_bytes, device_bytes, keep_bytes, host_bytes, disk_bytes, "
          "evicts}].\n\nevicts: as of the whole plan.")
      .def_prop_ro(
          "evicts", [](const Plan& self) { return as_dict(self.evicts); },
          "{pages, prefix_tokens} that a sleep with overflow evict drops: reusable pages that find no "
          "room,\nand the tokens that no new sequence finds any more (K9).")
      .def_ro("free_bytes", &Plan::free_bytes, "Device bytes that a sleep gives back.")
      .def_ro("device_bytes", &Plan::device_bytes, "Device bytes that a wake needs.")
      .def_ro("keep_bytes", &Plan::keep_bytes, "Bytes copied to (sleep) or from (wake) the host.")
      .def_ro("host_bytes", &Plan::host_bytes, "Host memory to be newly committed.")
      .def_ro("disk_bytes", &Plan::disk_bytes, "Room on the disk to be newly taken.");
}

void bind_registration(nb::module_& module) {
  nb::class_<Registration>(
      module, "Registration",
      "Something outside that remembers addresses or slots: registered until `close`, also "
      "when forgotten.\n\nA context manager. C++: torpor/ledger.hpp.")
      .def("close", &Registration::close, "Repeating it does nothing.")
      .def(
          "__enter__", [](Registration& self) -> Registration& { return self; }, nb::rv_policy::reference)
      .def(
          "__exit__", [](Registration& self, const nb::args&) { self.close(); },
          nb::sig("def __exit__(self, *args: object) -> None"));
}

void bind_ownership(nb::class_<Ledger>& ledger) {
  ledger
      .def(nb::new_(&make_ledger), "device"_a, "host_pool_bytes"_a = 0, nb::kw_only(),
           "host_pool"_a = nb::none(), "disk_path"_a = nb::none(), "disk_bytes"_a = 0,
           "host_pool_bytes: bound of a pool of its own; or host_pool, shared with other ledgers of the "
           "Device.\n\ndisk_path: a folder, for restore mode disk, with at most disk_bytes in it. Misuse for "
           "both pools,\nor for half a disk.")
      .def_prop_ro("device", [](const Ledger& self) { return self.device(); })
      .def_prop_ro("tags", &Ledger::tags, "Sorted, without repeats.")
      .def_prop_ro("parked_tags", &Ledger::parked_tags, "Sorted: tags of which anything is parked.")
      .def(
          "create_region", &create_region, "tag"_a, "size_bytes"_a, nb::kw_only(), "name"_a = "",
          "restore"_a = "pinned", "immutable"_a = false, "preserve_always"_a = false,
          "zero_on_wake"_a = false, Free(),
          "Reserve and map; `restore` is the default mode.\n\npreserve_always: stays mapped asleep (S3). "
          "zero_on_wake: reads zero after a wake from `none` too (S4).\nMisuse while an operation is staged, "
          "or for a tag and name that are taken; OutOfDeviceMemory.")
      .def(
          "register_external", &Ledger::register_external, "name"_a, "tag"_a = "kv_cache",
          "moves_kv"_a = true, Free(),
          "Until `close` (and if moves_kv) sleep of the tag is refused by name (K10).\n\nWaits for a running "
          "operation; Misuse when it does not end within half a minute.")
      .def_prop_ro("registrations", &Ledger::registrations, "Names of what is registered, oldest first.")
      .def(
          "prefill_backups",
          [](Ledger& self, double timeout_s, std::optional<std::size_t> room_bytes) {
            return self.prefill_backups(std::chrono::duration<double>(timeout_s),
                                        room_bytes.value_or(SIZE_MAX));
          },
          "timeout_s"_a, "room_bytes"_a = nb::none(), Free(),
          "Save awake immutable regions ahead of time, within the host pool's bound (M9); returns the bytes "
          "saved.\n\nFor a thread of your own. An operation goes first: then this ends early, and nothing is "
          "half done. Regions\nthat would take more than room_bytes are left out.")
      .def(
          "fill_host_pool",
          [](Ledger& self, double timeout_s, std::optional<std::size_t> room_bytes) {
            return self.fill_host_pool(std::chrono::duration<double>(timeout_s),
                                       room_bytes.value_or(SIZE_MAX));
          },
          "timeout_s"_a, "room_bytes"_a = nb::none(), Free(),
          "Make idle host memory in advance, as the next sleep would take it; returns the bytes made.\n\nAt "
          "most room_bytes, and within the host pool's bound. For a thread of your own: an operation goes "
          "first.\nOutOfHostMemory.")
      .def("stop_prefilling", &Ledger::stop_prefilling,
           "End `prefill_backups` and `fill_host_pool`, for good.")
      .def_prop_ro(
          "host_idle_bytes", [](const Ledger& self) { return self.host_pool()->idle_bytes(); },
          "Of its host pool: kept for the next sleep, in nobody's use.")
      .def("trim_host", &Ledger::trim_host, "target_bytes"_a = 0, Free(),
           "Give back idle host memory and backups of awake regions until this much is left; returns bytes "
           "(M8).");
}

void bind_transaction(nb::class_<Ledger>& ledger) {
  ledger
      .def("preflight", &preflight, "kind"_a, "operation"_a, "tags"_a = nb::none(), "restore"_a = nb::none(),
           nb::kw_only(), "verify"_a = false, "overflow"_a = "reject",
           "No mutation. tags None = all. Tags that the ledger lacks give a refusal, code "
           "\"unknown_tag\".\n\nrestore: mode by tag (none, memset, cpu, pinned, disk), else each one's "
           "default. overflow, where too little\nroom is for what is to be kept: reject, or evict (drop "
           "reusable prefixes, never what sequences hold).\nverify: a sleep records checksums of all that it "
           "preserves; a "
           "wake is refused where none were recorded.\nEvery wake compares what was recorded: "
           "ContentsCorrupt, and the tag stays asleep (K13).\nRegions made with preserve_always "
           "are checked when they are immutable: others may be written to\nwhile they sleep.")
      .def(
          "stage", &stage, "plan"_a, "timeout_s"_a,
          "All that can fail or take long; {seconds, moved_bytes, digest, evicted, planning_s, mapping_s, "
          "copying_s,\nwaiting_s, ahead_s}. The last five tell the seconds of KV caches apart: books, "
          "memory, "
          "copies; of the\ncopies, waiting; of the former two, what came before the first copy. On a throw "
          "everything is as before,\nbut for what is evicted already; `status` tells that.\n\nIt plans again "
          "first, so that the digest is that of the moment, after a drain; what has become impossible\nsince "
          "preflight is raised: Misuse, OutOfMemory. DeviceBusy past the deadline, Stopped after `stop`.")
      .def("commit", &commit,
           "{freed_bytes, device_bytes, seconds, evicted: {pages, prefix_tokens}}. Idempotent; after a "
           "DeviceError call\nagain to go on.")
      .def("publish", &Ledger::publish, Free(),
           "Ends the transaction: drops what a wake no longer needs. Misuse before commit.")
      .def("abort", &Ledger::abort, Free(),
           "Takes a stage back. Nothing to do without one; Misuse after commit has begun.")
      .def("stop", &Ledger::stop,
           "From another thread: the running stage ends with Stopped at its next chunk.")
      .def(
          "status", [](const Ledger& self) { return as_dict(self.status()); },
          "{phase: idle|staged|committing|committed, operation, kind, mutated, parked_tags, evicted}. Never "
          "waits.\n\nevicted: {pages, prefix_tokens} by `operation` up to now, also when its stage failed or "
          "was taken back (K9).")
      .def(
          "memory", [](const Ledger& self) { return as_list(released([&] { return self.memory(); })); },
          "[{tag, name, parked, mode, reserved_bytes, device_bytes, live_bytes, host_bytes, residual_bytes, "
          "disk_bytes}].\n\nThe ledger's books, as of the last finished step while one is running; "
          "`Device.memory_info` is the driver's word.");
}

}  // namespace

nb::class_<Ledger> bind_ledger(nb::module_& module) {
  bind_plan(module);
  bind_host_pool(module);
  bind_registration(module);
  nb::class_<Ledger> ledger(
      module, "Ledger",
      "All regions and KV managers of one rank, under one transaction at a time.\n\n"
      "preflight → stage → commit → publish, or abort at any time before commit. Thread-safe. C++: "
      "torpor/ledger.hpp.");
  bind_ownership(ledger);
  bind_transaction(ledger);
  return ledger;
}

}  // namespace torpor
