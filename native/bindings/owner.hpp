// What arrays over native memory share.
#pragma once

#include <nanobind/nanobind.h>

#include <memory>
#include <utility>

namespace torpor {

// Keeps what it points to alive for as long as any array over it lives.
template <typename T>
nanobind::capsule owner_of(std::shared_ptr<T> kept) {
  auto box = std::make_unique<std::shared_ptr<T>>(std::move(kept));
  const nanobind::capsule owner(box.get(),
                                [](void* held) noexcept { delete static_cast<std::shared_ptr<T>*>(held); });
  (void)box.release();
  return owner;
}

}  // namespace torpor
