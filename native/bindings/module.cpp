#include "bindings.hpp"

NB_MODULE(_core, module) {
  module.doc() =
      "The native core's Python surface.\n\n"
      "Sizes are bytes, times seconds. Everything that touches a device or copies releases the GIL. What is "
      "raised on\npurpose is a torpor.native.errors.TorporError: Misuse for a caller's mistake, and what a "
      "device, "
      "the host or a disk\nrefuses. Each class says by which C++ header, under native/include, it is "
      "described.";
  torpor::bind_errors(module);
  torpor::bind_device(module);
  torpor::bind_region(module);
  auto ledger = torpor::bind_ledger(module);
  torpor::bind_arena(module, ledger);
  torpor::bind_layout(module);
  torpor::bind_kv(module, ledger);
  torpor::bind_sequence(module);
}
