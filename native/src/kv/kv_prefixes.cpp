// KvManager: what others may find of its sequences. The lock is held in all of these but forget_prefixes.
#include <algorithm>
#include <string>
#include <utility>

#include "torpor/errors.hpp"
#include "torpor/kv/kv_manager.hpp"

namespace torpor::kv {

std::size_t KvManager::forget_prefixes() {
  const std::lock_guard guard(mutex_);
  require_settled("forget_prefixes");
  begin_epoch();
  return forget_all();
}

std::size_t KvManager::forget_all() noexcept {
  const std::size_t tokens = prefixes_.tokens();
  prefixes_.clear([this](Page& page) { cache_of(page).unlink(page, PageCache::Why::all_forgotten); });
  trim();
  return tokens;
}

// In full attention the blocks below it cannot be found any more: those that nobody uses go with it, the
// others become private. Without a window's page or a snapshot just its block is the poorer.
void KvManager::drop(Page& page) noexcept {
  if (cycle(page.life_cycle).kind == LayerKind::full) {
    prefixes_.remove(*page.node, [this](Page& gone) { cache_of(gone).unlink(gone, PageCache::Why::room); });
    return;
  }
  prefixes_.detach(page);
  cache_of(page).unlink(page, PageCache::Why::room);
}

void KvManager::moved(const Page& page) noexcept {
  events_.moved(page);
}

// By life cycle: what this sequence has of a block and nobody finds yet.
std::vector<Page*> KvManager::pages_to_publish(const SequenceRecord& record, std::size_t block) const {
  std::vector<Page*> pages(record.strands.size(), nullptr);
  for (std::size_t index = 0; index < record.strands.size(); ++index) {
    if (cycle(index).kind == LayerKind::state) continue;
    Page* const page = record.strands[index].pages[block];
    if (page != nullptr && !page->scratch && page->node == nullptr) pages[index] = page;
  }
  return pages;
}

// Makes full blocks findable. Where an equal block is known already the sequence keeps its own page, which
// nobody else finds: its page table must not change under a running kernel. The page goes when the sequence
// closes.
void KvManager::publish_blocks(SequenceRecord& record) {
  if (record.epoch != epoch_) return;
  const std::size_t size = spec_.layout.tokens_per_block();
  const std::size_t full = record.history.size() / size;
  Node* parent = record.tip.get();
  if (full == 0 || (full == record.published_blocks && parent != nullptr)) return;
  if (parent == nullptr) {
    // Nothing published yet, or a block above the tip was dropped: begin again at the root, and mend the
    // chain.
    record.published_blocks = 0;
    parent = &prefixes_.root(record.scope);
  }
  while (record.published_blocks < full) {
    const auto block = std::span(record.history).subspan(record.published_blocks * size, size);
    const std::vector<Page*> pages = pages_to_publish(record, record.published_blocks);
    Node* node = prefixes_.find(*parent, block);
    if (node == nullptr) {
      node = &prefixes_.insert(*parent, block, pages);
    } else {
      for (Page* page : pages) {
        if (page != nullptr && node->page(page->life_cycle) == nullptr) prefixes_.attach(*node, *page);
      }
      for (Page* page : node->pages) {
        if (page != nullptr) cache_of(*page).raise_priority(*page, record.priority);
      }
    }
    parent = node;
    record.tip = NodeRef(*node);
    ++record.published_blocks;
  }
}

// Of a sequence that is closed: the last block, not full, becomes findable too.
void KvManager::publish_partial(SequenceRecord& record) noexcept {
  const std::size_t size = spec_.layout.tokens_per_block();
  const std::size_t full = record.history.size() / size;
  const auto rest = std::span(record.history).subspan(full * size);
  if (!spec_.partial_blocks || rest.empty() || record.epoch != epoch_ || spec_.layout.has(LayerKind::state))
    return;
  if (std::ranges::any_of(record.strands, &Strand::borrowed)) return;  // still the block that it was found in
  try {
    publish_blocks(record);
    Node* const above = full > 0 ? record.tip.get() : &prefixes_.root(record.scope);
    const auto shared = prefixes_.longest_shared(*above, rest, [](const Node&) { return true; }).second;
    const std::vector<Page*> pages = pages_to_publish(record, full);
    const bool whole = std::ranges::none_of(pages, [](const Page* page) { return page == nullptr; });
    if (shared < rest.size() && whole) {
      prefixes_.insert(*above, rest, pages);
    } else {
      prefixes_.prune(above);
    }
  } catch (const std::bad_alloc&) {
    // What is not found is computed again.
  }
}

bool KvManager::snapshot(SequenceRecord& record) {
  require_open(record, "snapshot");
  require_settled("snapshot");
  if (!spec_.layout.has(LayerKind::state)) throw Misuse("snapshot: no layer has a state");
  if (record.state != SequenceState::active)
    throw Misuse("snapshot: the sequence is suspended; resume it first");
  const std::size_t size = spec_.layout.tokens_per_block();
  if (record.history.empty() || record.history.size() % size != 0) {
    throw Misuse("snapshot: the history has " + std::to_string(record.history.size()) +
                 " tokens; snapshots are of multiples of " + std::to_string(size));
  }
  if (parked_ || record.epoch != epoch_) return false;
  std::vector<FreshPage> fresh;
  std::vector<Arrivals> arrivals(caches_.size());
  for (std::size_t index = 0; index < record.strands.size(); ++index) {
    if (cycle(index).kind != LayerKind::state) continue;
    fresh.push_back({.life_cycle = index, .source = record.strands[index].pages[0]});
    ++arrivals[cycle(index).group].fresh;
  }
  // Known already: the same tokens give the same state.
  if (const Node* tip = record.tip.get();
      tip != nullptr && std::ranges::all_of(fresh, [&](const FreshPage& one) {
        return tip->page(one.life_cycle) != nullptr;
      })) {
    return true;
  }
  // Room first: what it drops may be of this sequence's own chain.
  if (!gather(arrivals)) return false;
  take(fresh, record.priority);
  try {
    publish_blocks(record);
    for (const FreshPage& one : fresh) {
      if (record.tip.get()->page(one.life_cycle) == nullptr) prefixes_.attach(*record.tip.get(), *one.page);
    }
  } catch (...) {
    give_back(fresh);
    throw;
  }
  give_back(fresh);
  return true;
}

}  // namespace torpor::kv
