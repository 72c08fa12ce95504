// Whole sleeps and wakes of a test rig's KV cache, and their steps one by one, for every rig with a `ledger`.
#pragma once

#include <chrono>

#include "check.hpp"
#include "torpor/ledger.hpp"

template <typename Rig>
class KvTransactions {
 public:
  [[nodiscard]] torpor::Plan plan(torpor::Action kind,
                                  torpor::RestoreMode mode = torpor::RestoreMode::none) const {
    torpor::Request request;
    request.kind = kind;
    request.operation = "test";
    if (kind == torpor::Action::sleep) request.restore = {{"kv_cache", mode}};
    return ledger().preflight(request);
  }
  void stage(const torpor::Plan& what) { ledger().stage(what, std::chrono::seconds(20)); }
  void run(const torpor::Plan& what) {
    for (const torpor::Refusal& refusal : what.refusals) check::fail(__FILE__, __LINE__, refusal.reason);
    stage(what);
    ledger().commit();
    ledger().publish();
  }
  void sleep(torpor::RestoreMode mode) { run(plan(torpor::Action::sleep, mode)); }
  void wake() { run(plan(torpor::Action::wake)); }

 private:
  [[nodiscard]] torpor::Ledger& ledger() const { return *static_cast<const Rig&>(*this).ledger; }
};
