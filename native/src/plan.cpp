// Preflight: what an operation will do, and what forbids it. Reads only.
#include "torpor/plan.hpp"

#include <algorithm>
#include <array>
#include <cstdio>
#include <set>

#include "externals.hpp"
#include "text.hpp"
#include "torpor/errors.hpp"
#include "torpor/ledger.hpp"

namespace torpor {

namespace {

// FNV-1a, twice from different starts: enough to tell ranks that disagree apart; no defence against malice
// needed.
class Digest final {
 public:
  void add(const std::string& word) {
    for (const char letter : word) mix(static_cast<unsigned char>(letter));
    mix(0x100);  // no letter: "ab"+"c" is not "a"+"bc"
  }
  [[nodiscard]] std::string hex() const {
    std::array<char, 33> text{};
    std::snprintf(text.data(), text.size(), "%016llx%016llx", static_cast<unsigned long long>(first_),
                  static_cast<unsigned long long>(second_));
    return text.data();
  }

 private:
  void mix(std::uint64_t value) noexcept {
    first_ = (first_ ^ value) * prime;
    second_ = (second_ ^ (value + 0x9E3779B9U)) * prime;
  }
  static constexpr std::uint64_t prime = 0x100000001B3;
  std::uint64_t first_ = 0xCBF29CE484222325;
  std::uint64_t second_ = 0x84222325CBF29CE4;
};

std::string digest_of(const Plan& plan) {
  Digest digest;
  digest.add(to_string(plan.request.kind));
  for (const Item& item : plan.items) {
    for (const std::string& word : {item.tag, item.name, std::string(item.noop ? "noop" : "act"),
                                    std::string(to_string(item.mode)), item.digest}) {
      digest.add(word);
    }
  }
  return digest.hex();
}

std::string join(const std::vector<std::string>& words) {
  std::string text;
  for (const std::string& word : words) text += (text.empty() ? "" : ", ") + word;
  return text.empty() ? "none" : text;
}

Refusal refuse_registered(const std::string& tag, const std::vector<std::string>& names) {
  return {.code = "external_registration",
          .tag = tag,
          .reason = "memory of '" + tag + "' is registered with " + join(names) +
                    ", which cannot follow a remap; close the registration, or leave '" + tag +
                    "' out of the sleep"};
}

}  // namespace

const char* to_string(Action action) noexcept {
  return action == Action::sleep ? "sleep" : "wake";
}

Action parse_action(const std::string& text) {
  if (text == "sleep") return Action::sleep;
  if (text == "wake") return Action::wake;
  throw Misuse("unknown kind of operation '" + text + "'; choose sleep or wake");
}

Overflow parse_overflow(const std::string& text) {
  if (text == "reject") return Overflow::reject;
  if (text == "evict") return Overflow::evict;
  throw Misuse("unknown overflow '" + text + "'; choose reject or evict");
}

std::vector<std::shared_ptr<Participant>> Ledger::chosen(const Request& request, Plan& plan) const {
  std::set<std::string> known;
  for (const auto& one : participants_) known.insert(one->tag());
  std::set<std::string> asked = known;
  if (request.tags) asked = {request.tags->begin(), request.tags->end()};
  std::set<std::string> named = asked;
  for (const auto& [tag, mode] : request.restore) named.insert(tag);
  for (const std::string& tag : named) {
    if (known.contains(tag)) continue;
    plan.refusals.push_back({.code = "unknown_tag",
                             .tag = tag,
                             .reason = "there is no tag '" + tag +
                                       "'; the tags here are: " + join({known.begin(), known.end()})});
  }
  std::vector<std::shared_ptr<Participant>> those;
  for (const auto& one : participants_) {
    if (asked.contains(one->tag())) those.push_back(one);
  }
  return those;
}

Plan Ledger::make_plan(Request request) const {
  Plan plan;
  const auto those = chosen(request, plan);
  for (const auto& one : those) {
    const auto asked = request.restore.find(one->tag());
    const RestoreMode mode = asked == request.restore.end() ? one->default_mode() : asked->second;
    plan.items.push_back(request.kind == Action::sleep ? one->plan_sleep(mode) : one->plan_wake());
  }
  if (request.kind == Action::sleep && request.overflow == Overflow::evict) plan_evictions(those, plan);
  std::set<std::string> tags_to_move;
  for (std::size_t i = 0; i < those.size(); ++i) {
    const Item& item = plan.items[i];
    if (!item.noop && !those[i]->parked()) tags_to_move.insert(item.tag);
    refuse_what_cannot_be(*those[i], item, request.verify, plan);
    plan.refusals.insert(plan.refusals.end(), item.refusals.begin(), item.refusals.end());
  }
  total(plan);
  for (const std::string& tag : tags_to_move) {
    const std::vector<std::string> names = externals_->blocking(tag);
    if (names.empty()) continue;
    plan.refusals.push_back(refuse_registered(tag, names));
  }
  plan.request = std::move(request);
  refuse_without_room(plan);
  plan.digest = digest_of(plan);
  return plan;
}

void Ledger::total(Plan& plan) const {
  std::size_t buffer_bytes = 0;  // one after another: they are never there together
  plan.free_bytes = plan.device_bytes = plan.keep_bytes = plan.host_bytes = plan.disk_bytes = 0;
  plan.evicts = {};
  for (const Item& item : plan.items) {
    plan.free_bytes += item.free_bytes;
    plan.device_bytes += item.device_bytes;
    plan.keep_bytes += item.keep_bytes;
    plan.host_bytes += item.host_bytes;
    plan.disk_bytes += item.disk_bytes;
    plan.evicts.pages += item.evicts.pages;
    plan.evicts.prefix_tokens += item.evicts.prefix_tokens;
    buffer_bytes = std::max(buffer_bytes, item.buffer_bytes);
  }
  plan.host_bytes += buffer_bytes;
  plan.host_bytes -= std::min(plan.host_bytes, host_pool_->idle_bytes());
}

void Ledger::plan_evictions(const std::vector<std::shared_ptr<Participant>>& those, Plan& plan) const {
  const std::size_t host_room_bytes = device_->free_host_bytes();
  const std::size_t disk_room_bytes = disk_ ? disk_->free_bytes() : 0;
  // What is left for one when all others have what they want.
  const auto rest = [](std::size_t room_bytes, std::size_t all_bytes, std::size_t own_bytes) {
    const std::size_t others_bytes = all_bytes - std::min(all_bytes, own_bytes);
    return room_bytes - std::min(room_bytes, others_bytes);
  };
  for (std::size_t i = 0; i < those.size(); ++i) {
    Item& item = plan.items[i];
    if (item.noop || !preserves(item.mode)) continue;
    total(plan);
    item = those[i]->plan_sleep_within(
        item.mode, {.host_bytes = rest(host_room_bytes, plan.host_bytes, item.host_bytes),
                    .disk_bytes = rest(disk_room_bytes, plan.disk_bytes, item.disk_bytes)});
  }
}

void Ledger::refuse_what_cannot_be(const Participant& one, const Item& item, bool verify, Plan& plan) const {
  if (item.noop || !preserves(item.mode)) return;
  const auto refuse = [&](const std::string& reason) {
    plan.refusals.push_back(
        {.code = "refused", .tag = item.tag, .reason = "tag '" + item.tag + "' " + reason});
  };
  if (item.action == Action::sleep && item.mode == RestoreMode::disk && !disk_) {
    refuse(
        "cannot sleep on a disk: this ledger has none; make it with disk_path and disk_bytes (of a service: "
        "node.disk_path), or choose "
        "another restore mode");
  } else if (item.action == Action::sleep && !one.supports(item.mode)) {
    refuse(std::string("does not know restore mode ") + to_string(item.mode) + "; choose another one");
  }
  if (verify && !one.can_verify(item.action)) {
    refuse(item.action == Action::sleep ? "cannot record checksums; leave verify off"
                                        : "went to sleep without checksums; wake it with verify off");
  }
}

void Ledger::refuse_without_room(Plan& plan) const {
  if (plan.device_bytes > 0) {
    const std::size_t free_bytes = device_->memory_info().free_bytes;
    if (plan.device_bytes > free_bytes) {
      plan.refusals.push_back({.code = "device_memory",
                               .tag = "",
                               .reason = "needed " + bytes_text(plan.device_bytes) + ", free " +
                                         bytes_text(free_bytes) + " on " + device_text(*device_) +
                                         "; put another model on it to sleep, or wake fewer tags",
                               .needed_bytes = plan.device_bytes,
                               .free_bytes = free_bytes});
    }
  }
  if (plan.disk_bytes > 0 && disk_) {
    const std::size_t free_bytes = disk_->free_bytes();
    if (plan.disk_bytes > free_bytes) {
      plan.refusals.push_back(
          {.code = "disk",
           .tag = "",
           .reason = "needed " + bytes_text(plan.disk_bytes) + " on the disk, free " +
                     bytes_text(free_bytes) +
                     "; free room there, raise disk_bytes, or choose another restore mode",
           .needed_bytes = plan.disk_bytes,
           .free_bytes = free_bytes});
    }
  }
  if (plan.host_bytes > 0) {
    const std::size_t free_bytes = device_->free_host_bytes();
    if (plan.host_bytes > free_bytes) {
      plan.refusals.push_back({.code = "host_memory",
                               .tag = "",
                               .reason = "needed " + bytes_text(plan.host_bytes) + " of host memory, free " +
                                         bytes_text(free_bytes) +
                                         "; free host memory, or choose restore mode none for a large tag",
                               .needed_bytes = plan.host_bytes,
                               .free_bytes = free_bytes});
    }
  }
}

}  // namespace torpor
