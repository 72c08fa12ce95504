// PrefixTree alone: matching, scopes, collisions, removal.
#include <algorithm>
#include <random>
#include <set>

#include "check.hpp"
#include "torpor/kv/prefix_tree.hpp"

using torpor::kv::Node;
using torpor::kv::NodeRef;
using torpor::kv::Page;
using torpor::kv::PrefixTree;
using torpor::kv::Token;

namespace {

using Tokens = std::vector<Token>;
constexpr std::size_t block = 2;

// Inserts the whole blocks of `tokens` that are unknown, each with the next of the pages.
Node* insert_chain(PrefixTree& tree, const std::string& scope, const Tokens& tokens,
                   std::deque<Page>& pages) {
  Node* parent = &tree.root(scope);
  for (std::size_t at = 0; at + block <= tokens.size(); at += block) {
    const auto part = std::span(tokens).subspan(at, block);
    Node* node = tree.find(*parent, part);
    parent = node != nullptr ? node : &tree.insert(*parent, part, pages.emplace_back());
  }
  return parent;
}

std::size_t matched(const PrefixTree& tree, const std::string& scope, const Tokens& tokens) {
  return tree.match(scope, tokens).size();
}

}  // namespace

CASE("the longest chain of whole blocks is found, and gives its pages in order") {
  PrefixTree tree(block);
  std::deque<Page> pages;
  insert_chain(tree, "a", {1, 2, 3, 4, 5, 6}, pages);
  const auto chain = tree.match("a", Tokens{1, 2, 3, 4, 5, 9});
  CHECK(chain.size() == 2);
  CHECK(chain[0]->page() == &pages[0] && chain[1]->page() == &pages[1]);
  CHECK(pages[0].node == chain[0]);
  CHECK(matched(tree, "a", {1, 2, 3}) == 1);
  CHECK(matched(tree, "a", {1}) == 0);
  CHECK(matched(tree, "a", {3, 4}) == 0);  // known, but only behind {1, 2}
  CHECK(matched(tree, "a", {}) == 0);
}

CASE(
    "a match ends with the known blocks, however many there are, at a block that differs or at the prompt's "
    "end") {
  constexpr Token known = 300;
  PrefixTree tree(block);
  std::deque<Page> pages;
  Tokens tokens(std::size_t{2} * known);
  for (Token at = 0; at < 2 * known; ++at) tokens[static_cast<std::size_t>(at)] = at;
  insert_chain(tree, "a", tokens, pages);
  for (std::size_t blocks = 0; blocks < known; ++blocks) {
    Tokens prompt = tokens;
    prompt[2 * blocks + 1] = -1;
    CHECK(matched(tree, "a", prompt) == blocks);
    prompt.resize(2 * blocks + 1);
    const auto chain = tree.match("a", prompt);
    CHECK(chain.size() == blocks);
    for (std::size_t at = 0; at < blocks; ++at) CHECK(chain[at]->page() == &pages[at]);
  }
  CHECK(matched(tree, "a", tokens) == known);
}

CASE("two scopes never share a block") {
  PrefixTree tree(block);
  std::deque<Page> pages;
  insert_chain(tree, "tenant one", {1, 2, 3, 4}, pages);
  CHECK(matched(tree, "tenant two", {1, 2, 3, 4}) == 0);
  CHECK(matched(tree, "", {1, 2, 3, 4}) == 0);
  insert_chain(tree, "tenant two", {1, 2}, pages);
  CHECK(tree.match("tenant two", Tokens{1, 2})[0]->page() !=
        tree.match("tenant one", Tokens{1, 2})[0]->page());
}

CASE("when every hash collides the right block is found, and no wrong one") {
  PrefixTree tree(block, 0);
  std::deque<Page> pages;
  for (Token first = 0; first < 20; ++first) {
    insert_chain(tree, first % 2 == 0 ? "even" : "odd", {first, 1, first, 2}, pages);
  }
  CHECK(tree.blocks() == 40);
  for (Token first = 0; first < 20; ++first) {
    const auto chain = tree.match(first % 2 == 0 ? "even" : "odd", Tokens{first, 1, first, 2});
    CHECK(chain.size() == 2);
    CHECK(chain[0]->page() == &pages[static_cast<std::size_t>(2 * first)]);
    CHECK(chain[1]->page() == &pages[static_cast<std::size_t>(2 * first + 1)]);
    CHECK(matched(tree, first % 2 == 0 ? "odd" : "even", {first, 1}) == 0);
    // The second block of another chain is known to this hash, and not below this parent.
    CHECK(matched(tree, first % 2 == 0 ? "even" : "odd", {first, 1, first + 2, 2}) == 1);
  }
}

CASE("removing a block removes what is below it, deepest first, and nothing else") {
  PrefixTree tree(block);
  std::deque<Page> pages;
  insert_chain(tree, "a", {1, 2, 3, 4, 5, 6}, pages);
  insert_chain(tree, "a", {1, 2, 3, 4, 7, 8}, pages);
  insert_chain(tree, "a", {1, 2, 9, 9}, pages);
  std::vector<Page*> gone;
  tree.remove(*tree.match("a", Tokens{1, 2, 3, 4})[1], [&](Page& page) {
    CHECK(page.node == nullptr);
    gone.push_back(&page);
  });
  CHECK(gone.size() == 3);
  CHECK(gone.back() == &pages[1]);
  CHECK(tree.blocks() == 2);
  CHECK(matched(tree, "a", {1, 2, 3, 4}) == 1);
  CHECK(matched(tree, "a", {1, 2, 9, 9}) == 2);
}

CASE("a reference to a node that is gone says so, also when its record was used again") {
  PrefixTree tree(block);
  std::deque<Page> pages;
  const NodeRef ref(*insert_chain(tree, "a", {1, 2}, pages));
  CHECK(ref.get() != nullptr);
  tree.remove(*ref.get(), [](Page&) {});
  CHECK(ref.get() == nullptr);
  insert_chain(tree, "a", {1, 2}, pages);
  CHECK(ref.get() == nullptr);
  CHECK(NodeRef().get() == nullptr);
}

CASE("clear forgets every scope and gives every page once") {
  PrefixTree tree(block);
  std::deque<Page> pages;
  insert_chain(tree, "a", {1, 2, 3, 4}, pages);
  insert_chain(tree, "b", {1, 2, 5, 6, 7, 8}, pages);
  std::set<Page*> gone;
  tree.clear([&](Page& page) { gone.insert(&page); });
  CHECK(gone.size() == pages.size());
  CHECK(tree.blocks() == 0 && tree.scopes() == 0);
  CHECK(matched(tree, "a", {1, 2}) == 0);
}

CASE("a scope without blocks leaves no trace") {
  PrefixTree tree(block);
  std::deque<Page> pages;
  for (int round = 0; round < 100; ++round) {
    Node* leaf = insert_chain(tree, "tenant " + std::to_string(round), {1, 2}, pages);
    tree.remove(*leaf, [](Page&) {});
  }
  CHECK(tree.scopes() == 0);
}

CASE("a table of huge pages begins at one, keeps what is written, and moves when it grows") {
  std::vector<std::uint32_t, torpor::kv::HugePages<std::uint32_t>> table(16, 7);
  table.resize(std::size_t{1} << 20, 9);
  CHECK(reinterpret_cast<std::uintptr_t>(table.data()) % (std::size_t{2} << 20) == 0);
  CHECK(std::count(table.begin(), table.end(), 7U) == 16);
  CHECK(std::count(table.begin(), table.end(), 9U) == (1 << 20) - 16);
}

CASE("thousands of blocks in random order are found as a plain set would say") {
  PrefixTree tree(block);
  std::deque<Page> pages;
  std::set<Tokens> known;  // every prefix of whole blocks
  std::mt19937 random(7);
  const auto draw = [&] {
    Tokens tokens(2 * (1 + random() % 6));
    for (Token& token : tokens) token = static_cast<Token>(random() % 3);
    return tokens;
  };
  const auto expected = [&](const Tokens& tokens) {
    std::size_t blocks = 0;
    while (blocks * block < tokens.size() &&
           known.contains(
               Tokens(tokens.begin(), tokens.begin() + static_cast<std::ptrdiff_t>((blocks + 1) * block)))) {
      ++blocks;
    }
    return blocks;
  };
  for (int step = 0; step < 4000; ++step) {
    const Tokens tokens = draw();
    CHECK(matched(tree, "a", tokens) == expected(tokens));
    if (step % 3 == 2) {
      const auto chain = tree.match("a", tokens);
      if (chain.empty()) continue;
      const Tokens top(tokens.begin(), tokens.begin() + static_cast<std::ptrdiff_t>(chain.size() * block));
      tree.remove(*chain.back(), [](Page&) {});
      std::erase_if(known, [&](const Tokens& one) {
        return one.size() >= top.size() && std::equal(top.begin(), top.end(), one.begin());
      });
    } else {
      insert_chain(tree, "a", tokens, pages);
      for (auto end = tokens.begin() + 2;; end += 2) {
        known.insert(Tokens(tokens.begin(), end));
        if (end == tokens.end()) break;
      }
    }
    CHECK(tree.blocks() == known.size());
  }
}
