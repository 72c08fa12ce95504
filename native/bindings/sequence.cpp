#include "torpor/kv/sequence.hpp"

#include <nanobind/ndarray.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/vector.h>

#include <array>

#include "bindings.hpp"
#include "owner.hpp"
#include "torpor/kv/kv_manager.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace torpor {
namespace {

using kv::Sequence;

nb::object page_table(const Sequence& self, std::size_t life_cycle) {
  const std::array<std::size_t, 1> shape{self.table_entries(life_cycle)};
  const auto table = self.table(life_cycle);
  const nb::ndarray<nb::numpy, std::int32_t> view(table.get(), 1, shape.data(), owner_of(table));
  return nb::cast(view, nb::rv_policy::reference);
}

}  // namespace

void bind_sequence(nb::module_& module) {
  nb::class_<Sequence>(
      module, "Sequence",
      "suspended ↔ active → closed. Made by `KvManager.create_sequence`; thread-safe.\n\n"
      "Changes are Misuse while a sleep or wake runs, but `close`. C++: torpor/kv/sequence.hpp.")
      .def_prop_ro("id", &Sequence::id)
      .def_prop_ro(
          "state", [](const Sequence& self) { return kv::to_string(released([&] { return self.state(); })); },
          "\"suspended\", \"active\" or \"closed\".")
      .def_prop_ro("matched_tokens", &Sequence::matched_tokens,
                   "Tokens found in the prefix tree at creation; their K and V need no computing.")
      .def_prop_ro("history_tokens", &Sequence::history_tokens, Free(),
                   "Tokens committed so far, matched ones included.")
      .def_prop_ro("capacity_tokens", &Sequence::capacity_tokens, Free(),
                   "Tokens that its pages have room for.")
      .def_prop_ro("contents_lost", &Sequence::contents_lost, Free(),
                   "A discarding sleep took K and V of its history: they must be computed again, in a new "
                   "sequence.")
      .def_prop_ro(
          "page_table", [](const Sequence& self) { return page_table(self, 0); },
          nb::for_getter(nb::sig("def page_table(self) -> numpy.typing.NDArray[numpy.int32]")), "table(0).")
      .def("table", &page_table, "life_cycle"_a,
           nb::sig("def table(self, life_cycle: int) -> numpy.typing.NDArray[numpy.int32]"),
           "int32, shape (blocks that fit,): slot of each block of a life cycle, -1 where none (stale "
           "too).\n\n"
           "Of a state shape (1,): its slot. A live view at a stable address; all -1 while suspended or "
           "asleep.")
      .def("snapshot", &Sequence::snapshot, Free(),
           "Keep a copy of the states after the history, a multiple of tokens_per_block, for prompts that "
           "begin "
           "so.\n\nFalse when there is no room, or the history is older than the last forget_prefixes.")
      .def("resume", &Sequence::resume, Free(),
           "Bring all pages to the GPU and lock them; a new state reads zero, or is a copy of the matched "
           "snapshot.\n\nFalse when there is no room or more than max_utilisation of a pool would be locked; "
           "then nothing changed.")
      .def("suspend", &Sequence::suspend, Free(),
           "Unlock: pages may move to the host, and are never dropped.")
      .def("resize", &Sequence::resize, "capacity_tokens"_a, Free(),
           "Grow (or shrink, not below history) while active. False when there is no room; then nothing "
           "changed.")
      .def(
          "commit",
          [](Sequence& self, const std::vector<kv::Token>& tokens) {
            released([&] { self.commit(tokens); });
          },
          "tokens"_a,
          "These tokens' K and V now lie in the pages, behind the history. Full blocks become reusable.\n\n"
          "Misuse for more than the capacity has room for, and while suspended.")
      .def("close", &Sequence::close, Free(),
           "Committed full blocks stay as droppable prefixes; the rest is freed. Repeating it does nothing.");
}

}  // namespace torpor
