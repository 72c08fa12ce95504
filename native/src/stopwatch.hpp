// Seconds of this thread, added to a sum while it lives.
#pragma once

#include <chrono>

#include "torpor/device.hpp"

namespace torpor {

class Stopwatch final {
 public:
  explicit Stopwatch(double& sum_s) noexcept : sum_s_(sum_s), start_(Clock::now()) {}
  Stopwatch(const Stopwatch&) = delete;
  Stopwatch& operator=(const Stopwatch&) = delete;
  ~Stopwatch() { sum_s_ += std::chrono::duration<double>(Clock::now() - start_).count(); }

 private:
  double& sum_s_;
  Clock::time_point start_;
};

}  // namespace torpor
