#include "bindings.hpp"

NB_MODULE(_core, module) {
  module.doc() = "The native core; see _core.pyi.";
  torpor::bind_errors(module);
  torpor::bind_device(module);
  torpor::bind_region(module);
  auto ledger = torpor::bind_ledger(module);
  torpor::bind_kv(module, ledger);
}
