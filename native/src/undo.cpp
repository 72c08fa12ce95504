// UndoStack, and the names of the restore modes.
#include <array>

#include "torpor/errors.hpp"
#include "torpor/participant.hpp"

namespace torpor {

namespace {
constexpr std::array<const char*, 5> mode_names{"none", "memset", "cpu", "pinned", "disk"};
}  // namespace

void UndoStack::unwind() noexcept {
  while (!steps_.empty()) steps_.pop_back();
}

void UndoStack::dismiss() noexcept {
  for (const std::unique_ptr<Step>& step : steps_) step->armed = false;
  steps_.clear();
}

const char* to_string(RestoreMode mode) noexcept {
  return mode_names[static_cast<std::size_t>(mode)];
}

RestoreMode parse_restore_mode(const std::string& text) {
  for (std::size_t i = 0; i < mode_names.size(); ++i) {
    if (text == mode_names[i]) return static_cast<RestoreMode>(i);
  }
  throw Misuse("unknown restore mode '" + text + "'; choose none, memset, cpu, pinned or disk");
}

}  // namespace torpor
