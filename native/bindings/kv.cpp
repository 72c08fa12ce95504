#include "bindings.hpp"

namespace torpor {

// Place of KvManager, Sequence and Ledger.create_kv_manager, which are to come: the names exist so that the
// package can be imported, and nothing can be made of them.
void bind_kv(nanobind::module_& module, nanobind::class_<Ledger>&) {
  module.attr("KvManager") = nanobind::none();
  module.attr("Sequence") = nanobind::none();
}

}  // namespace torpor
