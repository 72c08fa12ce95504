// P10, the tree's side: seconds for looking prefixes up, and for inserting some while evicting the oldest.
//
//   p10_prefix_tree BLOCKS REPEATS   prints a JSON object a repeat; p10_prefixes.py runs it and keeps the
//   result
//
// Prompts are chains of chain_blocks blocks with a beginning of their own, as of BLOCKS / chain_blocks users.
#include <malloc.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <deque>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "torpor/kv/page.hpp"
#include "torpor/kv/prefix_tree.hpp"

namespace {

using torpor::kv::EvictionQueue;
using torpor::kv::Node;
using torpor::kv::Page;
using torpor::kv::PageList;
using torpor::kv::PrefixTree;
using torpor::kv::Status;
using torpor::kv::Token;

constexpr std::size_t block_tokens = 16;
constexpr std::size_t chain_blocks = 64;
constexpr std::size_t measured_chains = 2048;
constexpr const char* scope = "model, adapter, salt";

// Of this thread's own work: others may use the machine too.
double cpu_seconds() {
  timespec now{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

// The tokens of a chain follow from its number, so that 10^7 blocks need no second copy of theirs.
std::vector<Token> prompt_of(std::uint64_t chain) {
  std::mt19937_64 random(chain);
  std::vector<Token> tokens(chain_blocks * block_tokens);
  for (Token& token : tokens) token = static_cast<Token>(random() % 128'000);
  return tokens;
}

// A tree of droppable blocks and the order in which they would leave it, as the KV manager has them.
class Cache {
 public:
  void insert(std::span<const Token> tokens) {
    Node* parent = &tree_.root(scope);
    for (; tokens.size() >= block_tokens; tokens = tokens.subspan(block_tokens)) {
      Page& page = fresh();
      parent = &tree_.insert(*parent, tokens.first(block_tokens), page);
      page.status = Status::droppable;
      queue_.push_newest(page);
    }
  }
  void evict_oldest_chain() {
    tree_.remove(*queue_.first()->node, [this](Page& gone) {
      gone.list->remove(gone);
      gone.status = Status::unused;
      spare_.push_back(&gone);
    });
  }
  [[nodiscard]] const PrefixTree& tree() const { return tree_; }

 private:
  Page& fresh() {
    if (spare_.empty()) return pages_.emplace_back();
    Page& page = *spare_.back();
    spare_.pop_back();
    return page;
  }
  PrefixTree tree_{block_tokens};
  std::deque<Page> pages_;
  std::vector<Page*> spare_;
  EvictionQueue queue_;
};

std::size_t heap_bytes() {
  const auto now = mallinfo2();
  return now.uordblks + now.hblkhd;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) {
    std::fprintf(stderr, "usage: p10_prefix_tree BLOCKS REPEATS\n");
    return 2;
  }
  const std::uint64_t chains = std::strtoull(argv[1], nullptr, 10) / chain_blocks;
  const std::uint64_t repeats = std::strtoull(argv[2], nullptr, 10);
  if (chains == 0 || repeats == 0) {
    std::fprintf(stderr, "give at least %zu blocks and one repeat\n", chain_blocks);
    return 2;
  }
  const std::size_t empty_bytes = heap_bytes();
  Cache cache;
  for (std::uint64_t chain = 0; chain < chains; ++chain) cache.insert(prompt_of(chain));
  const double block_bytes =
      static_cast<double>(heap_bytes() - empty_bytes) / static_cast<double>(cache.tree().blocks());

  std::uint64_t oldest = 0;
  std::mt19937_64 random(1);
  for (std::uint64_t repeat = 0; repeat < repeats; ++repeat) {
    std::vector<std::vector<Token>> known;
    std::vector<std::vector<Token>> unknown;
    for (std::size_t one = 0; one < measured_chains; ++one) {
      known.push_back(prompt_of(oldest + random() % chains));
      unknown.push_back(prompt_of(oldest + chains + one));
    }
    std::size_t found = 0;
    const double lookup = cpu_seconds();
    for (const auto& prompt : known) found += cache.tree().match(scope, prompt).size();
    const double lookup_s = cpu_seconds() - lookup;
    if (found != measured_chains * chain_blocks) return 1;

    const std::size_t turned = std::min<std::size_t>(measured_chains, chains);
    const double turnover = cpu_seconds();
    for (std::size_t one = 0; one < turned; ++one) {
      cache.evict_oldest_chain();
      cache.insert(unknown[one]);
    }
    const double turnover_s = cpu_seconds() - turnover;
    oldest += turned;
    std::printf(
        "{\"blocks\": %zu, \"lookups_per_s\": %.1f, \"turnovers_per_s\": %.1f, \"block_bytes\": %.1f}\n",
        cache.tree().blocks(), static_cast<double>(found) / lookup_s,
        static_cast<double>(turned * chain_blocks) / turnover_s, block_bytes);
    std::fflush(stdout);
  }
  return 0;
}
