// What is asked of a ledger, and what it answers before anything is touched.
#pragma once

#include <cstddef>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "torpor/participant.hpp"

namespace torpor {

enum class Overflow : std::uint8_t { reject, evict };

struct Request {
  Action kind = Action::sleep;
  std::string operation;
  std::optional<std::vector<std::string>> tags;  // none: all
  std::map<std::string, RestoreMode> restore;    // by tag; missing: the participant's default. Sleeps only
  bool verify = false;                           // checksums of all that is preserved (K13)
  Overflow overflow = Overflow::reject;          // of a sleep that does not fit: refuse, or drop (K9)
};

struct Plan {
  Request request;
  std::vector<Item> items;        // in the order of (tag, name)
  std::vector<Refusal> refusals;  // of the ledger and of every item; empty: can be staged
  std::string digest;             // equal on all ranks that would do logically the same (M7)
  std::size_t free_bytes = 0;     // sums over the items
  std::size_t device_bytes = 0;
  std::size_t keep_bytes = 0;
  std::size_t host_bytes = 0;  // with the largest buffer, less what the host pool holds idle
  std::size_t disk_bytes = 0;
  Evicted evicts;
};

[[nodiscard]] const char* to_string(Action action) noexcept;
// Throws Misuse for anything but "sleep" and "wake".
[[nodiscard]] Action parse_action(const std::string& text);
// Throws Misuse for anything but "reject" and "evict".
[[nodiscard]] Overflow parse_overflow(const std::string& text);

}  // namespace torpor
