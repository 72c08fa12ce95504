#include "torpor/kv/kv_manager.hpp"

#include <algorithm>
#include <ranges>
#include <utility>

#include "torpor/errors.hpp"

namespace torpor::kv {
namespace {

KvSpec checked(KvSpec spec) {
  spec.layout.check();
  if (spec.tag.empty()) throw Misuse("a KV manager needs a tag, e.g. \"kv_cache\"");
  return spec;
}

}  // namespace

std::shared_ptr<KvManager> KvManager::make(std::shared_ptr<Device> device,
                                           std::shared_ptr<HostPool> host_pool, KvSpec spec) {
  return std::make_shared<KvManager>(std::move(device), std::move(host_pool), std::move(spec));
}

KvManager::KvManager(std::shared_ptr<Device> device, std::shared_ptr<HostPool> host_pool, KvSpec spec)
    : device_(std::move(device)),
      spec_(checked(std::move(spec))),
      host_pool_(std::move(host_pool)),
      prefixes_(spec_.layout.tokens_per_block),
      cache_(device_, host_pool_,
             {.page_bytes = spec_.layout.page_bytes(),
              .gpu_bytes = spec_.gpu_bytes,
              .host_bytes = spec_.host_bytes,
              .seed = spec_.seed},
             *this) {}

Address KvManager::address(std::size_t layer, Role role) const {
  return cache_.gpu().base() + spec_.layout.offset_bytes(layer, role);
}

std::vector<Node*> KvManager::match(const std::string& scope, std::span<const Token> prompt) const {
  // One token at least is left to compute: its logits give the next one.
  if (prompt.empty()) return {};
  std::vector<Node*> known = prefixes_.match(scope, prompt.first(prompt.size() - 1));
  // With the host tier more may be known than a page table has entries.
  if (known.size() > slots()) known.resize(slots());
  return known;
}

std::size_t KvManager::probe(const std::string& scope, std::span<const Token> prompt) const {
  const std::lock_guard guard(mutex_);
  return match(scope, prompt).size() * spec_.layout.tokens_per_block;
}

std::shared_ptr<Sequence> KvManager::create_sequence(const std::string& scope,
                                                     std::span<const Token> prompt) {
  const std::lock_guard guard(mutex_);
  require_settled("create_sequence");
  const std::vector<Node*> known = match(scope, prompt);
  auto record = std::make_shared<SequenceRecord>();
  record->id = ++last_id_;
  record->scope = scope;
  record->matched_tokens = known.size() * spec_.layout.tokens_per_block;
  record->history.assign(prompt.begin(),
                         prompt.begin() + static_cast<std::ptrdiff_t>(record->matched_tokens));
  record->table = std::shared_ptr<std::int32_t[]>(new std::int32_t[slots()]);
  std::fill_n(record->table.get(), slots(), no_slot);
  for (const Node* node : known) record->pages.push_back(node->page());
  record->epoch = epoch_;
  record->published_blocks = known.size();
  if (!known.empty()) record->tip = NodeRef(*known.back());
  lookup_tokens_ += prompt.size();
  hits_tokens_ += record->matched_tokens;
  return open(std::move(record));
}

std::shared_ptr<Sequence> KvManager::open(std::shared_ptr<SequenceRecord> record) {
  // close() must not allocate.
  if (pending_.capacity() <= sequences_.size()) pending_.reserve(2 * sequences_.size() + 8);
  sequences_.emplace(record->id, record);
  std::shared_ptr<Sequence> handle;
  try {
    handle = std::make_shared<Sequence>(shared_from_this(), record);
  } catch (...) {
    sequences_.erase(record->id);
    throw;
  }
  // The last block first: of a chain the first block is always the one used latest.
  for (Page* page : std::views::reverse(record->pages)) cache_.hold(*page);
  return handle;
}

std::size_t KvManager::forget_prefixes() {
  const std::lock_guard guard(mutex_);
  require_settled("forget_prefixes");
  begin_epoch();
  return forget_all();
}

std::size_t KvManager::forget_all() noexcept {
  const std::size_t tokens = prefixes_.tokens();
  prefixes_.clear([this](Page& page) { cache_.unlink(page, PageCache::Why::all_forgotten); });
  cache_.host().trim();
  return tokens;
}

// Blocks below it cannot be found any more: those that nobody uses go with it, the others become private.
void KvManager::drop(Page& page) noexcept {
  prefixes_.remove(*page.node, [this](Page& gone) { cache_.unlink(gone, PageCache::Why::room); });
}

void KvManager::moved(const Page&) noexcept {}

// K and V that are older than this moment never become reusable, whoever commits the block they are in.
void KvManager::begin_epoch() noexcept {
  ++epoch_;
  for (auto& [id, record] : sequences_) {
    if (record->pages.empty()) record->epoch = epoch_;
  }
}

KvStats KvManager::stats() const {
  const std::lock_guard guard(mutex_);
  const CacheCounters& counters = cache_.counters();
  return {.slots = slots(),
          .free_slots = parked_ ? 0 : cache_.gpu().free_slots(),
          .locked_pages = cache_.pages_with(Status::locked),
          .held_pages = cache_.pages_with(Status::held),
          .droppable_pages = cache_.pages_with(Status::droppable),
          .host_pages = cache_.pages_in(Tier::host),
          .host_bytes = cache_.host().committed_bytes(),
          .host_slots = cache_.host().ceiling_places(),
          .sequences = sequences_.size(),
          .prefix_tokens = prefixes_.tokens(),
          .lookup_tokens = lookup_tokens_,
          .hits_tokens = hits_tokens_,
          .evicted_pages = counters.evicted_pages,
          .forgotten_pages = counters.forgotten_pages,
          .moved_out_pages = counters.moved_out_pages,
          .moved_in_pages = counters.moved_in_pages};
}

}  // namespace torpor::kv
