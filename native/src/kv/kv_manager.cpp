#include "torpor/kv/kv_manager.hpp"

#include <algorithm>
#include <ranges>
#include <string>
#include <utility>

#include "torpor/errors.hpp"

namespace torpor::kv {
namespace {

constexpr std::size_t default_sequence_tokens = std::size_t{1} << 20;
// Each sequence has tables of max_sequence_tokens, and the events kept are allocated at once.
constexpr std::size_t most_sequence_tokens = std::size_t{1} << 26;
constexpr std::size_t most_events = std::size_t{1} << 24;

constexpr std::size_t least_chunks = 16;

// The device's chunk, but small enough that a pool can give a sixteenth of them all away.
std::size_t pool_chunk_bytes(const Device& device, std::size_t gpu_bytes) {
  const std::size_t granule = device.granularity_bytes();
  return std::min(device.chunk_bytes(), round_up(std::max(gpu_bytes / least_chunks, granule), granule));
}

KvSpec checked(KvSpec spec) {
  if (spec.layout.layers().empty()) throw Misuse("a KV cache needs at least one layer");
  if (spec.tag.empty()) throw Misuse("a KV cache needs a tag, e.g. \"kv_cache\"");
  if (!(spec.max_utilisation > 0 && spec.max_utilisation <= 1)) {
    throw Misuse("max_utilisation must be more than 0 and at most 1");
  }
  if (spec.sequence_tokens == 0) throw Misuse("sequence_tokens must be at least 1");
  if (spec.max_sequence_tokens > most_sequence_tokens) {
    throw Misuse("max_sequence_tokens must be at most " + std::to_string(most_sequence_tokens));
  }
  if (spec.event_count > most_events) {
    throw Misuse("event_count must be at most " + std::to_string(most_events));
  }
  if (spec.own_codec == nullptr) spec.own_codec = make_codec(spec.codec);
  const bool makes_file = spec.disk_file == nullptr && !spec.disk_path.empty();
  if (makes_file) spec.disk_file = std::make_shared<DiskFile>(spec.disk_path, SIZE_MAX);
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
      events_(spec_.event_count),
      prefixes_(spec_.layout.tokens_per_block()) {
  prefixes_.tell(events_);
  const Layout& layout = spec_.layout;
  const auto gpu = layout.divide(spec_.gpu_bytes, spec_.sequence_tokens, device_->granularity_bytes());
  for (std::size_t group = 0; group < layout.groups().size(); ++group) {
    caches_.emplace_back(device_, host_pool_, limits_of(group, gpu[group], gpu.size()),
                         static_cast<PageWatcher&>(*this));
  }
  max_blocks_ =
      blocks_for(spec_.max_sequence_tokens != 0 ? spec_.max_sequence_tokens : default_sequence_tokens);
  for (const LifeCycle& one : layout.life_cycles()) {
    if (spec_.max_sequence_tokens != 0 || one.kind != LayerKind::full) continue;
    const PageCache& cache = caches_[one.group];
    max_blocks_ = std::min(max_blocks_, cache.gpu().reserved_bytes() / cache.page_bytes());
  }
}

std::size_t KvManager::slots(std::size_t group) const {
  const std::lock_guard guard(mutex_);
  return caches_[group].gpu().slots();
}

void KvManager::joins(const std::weak_ptr<Maintenance>& ledger) {
  const std::lock_guard guard(mutex_);
  ledger_ = ledger;
}

CacheLimits KvManager::limits_of(std::size_t group, std::size_t gpu_bytes, std::size_t groups) const {
  const double part = static_cast<double>(gpu_bytes) / static_cast<double>(spec_.gpu_bytes);
  const auto share = [&](std::size_t whole_bytes) {
    return groups == 1 ? whole_bytes : static_cast<std::size_t>(part * static_cast<double>(whole_bytes));
  };
  return {.page_bytes = spec_.layout.groups()[group].page_bytes,
          .gpu_bytes = gpu_bytes,
          .host_bytes = share(spec_.host_bytes),
          .seed = spec_.seed,
          .disk_bytes = share(spec_.disk_bytes),
          .disk = spec_.disk_file,
          .cold_gpu_bytes = share(spec_.cold_gpu_bytes),
          .codec = spec_.own_codec,
          .room = {.reserved_bytes = groups == 1 && spec_.max_gpu_bytes == 0
                                         ? 0
                                         : std::max(spec_.max_gpu_bytes, spec_.gpu_bytes),
                   .chunk_bytes = pool_chunk_bytes(*device_, spec_.gpu_bytes)}};
}

Address KvManager::address(std::size_t layer, const std::string& role) const {
  const Placement place = spec_.layout.place(layer, role);
  return caches_[place.group].gpu().base() + place.offset_bytes;
}

PrefixMatch KvManager::match(const std::string& scope, std::span<const Token> prompt) const {
  // One token at least is left to compute: its logits give the next one.
  if (prompt.empty()) return {};
  // With colder tiers more may be known than the slots could ever hold, or a page table has entries.
  std::size_t blocks = max_blocks_;
  for (const LifeCycle& one : spec_.layout.life_cycles()) {
    if (one.kind == LayerKind::full) blocks = std::min(blocks, caches_[one.group].gpu().slots());
  }
  return longest_prefix(prefixes_, spec_.layout, scope, prompt.first(prompt.size() - 1), blocks,
                        spec_.partial_blocks);
}

std::size_t KvManager::probe(const std::string& scope, std::span<const Token> prompt) const {
  const std::lock_guard guard(mutex_);
  return match(scope, prompt).tokens;
}

std::vector<std::uint64_t> KvManager::block_hashes(const std::string& scope,
                                                   std::span<const Token> tokens) const {
  return prefixes_.hashes(scope, tokens);
}

EventLog::Batch KvManager::events(std::uint64_t after) const {
  const std::lock_guard guard(mutex_);
  return events_.after(after);
}

std::shared_ptr<Sequence> KvManager::create_sequence(const std::string& scope, std::span<const Token> prompt,
                                                     std::size_t priority) {
  if (priority >= priority_levels) {
    throw Misuse("create_sequence: priority " + std::to_string(priority) + " is not one of 0 to " +
                 std::to_string(priority_levels - 1) + "; pages of 0 leave first");
  }
  const std::lock_guard guard(mutex_);
  require_settled("create_sequence");
  const PrefixMatch known = match(scope, prompt);
  auto record = std::make_shared<SequenceRecord>();
  record->id = ++last_id_;
  record->scope = scope;
  record->priority = static_cast<std::uint8_t>(priority);
  record->matched_tokens = known.tokens;
  record->history.assign(prompt.begin(), prompt.begin() + static_cast<std::ptrdiff_t>(known.tokens));
  record->epoch = epoch_;
  record->published_blocks = known.chain.size();
  if (!known.chain.empty()) record->tip = NodeRef(*known.chain.back());
  adopt(*record, known);
  lookup_tokens_ += prompt.size();
  hits_tokens_ += record->matched_tokens;
  return open(std::move(record));
}

// The pages that a new sequence begins with. Holds none of them yet.
void KvManager::adopt(SequenceRecord& record, const PrefixMatch& known) const {
  record.blocks = known.chain.size() + (known.tail != nullptr ? 1 : 0);
  record.capacity_tokens = record.blocks * spec_.layout.tokens_per_block();
  for (std::size_t index = 0; index < spec_.layout.life_cycles().size(); ++index) {
    Strand& one = record.strands.emplace_back();
    const bool state = cycle(index).kind == LayerKind::state;
    one.entries = state ? 1 : max_blocks_;
    one.table = std::shared_ptr<std::int32_t[]>(new std::int32_t[one.entries]);
    std::fill_n(one.table.get(), one.entries, no_slot);
    if (state) {
      one.pages.reserve(1);
      one.borrowed = !known.chain.empty();
      if (one.borrowed) one.pages.push_back(known.chain.back()->page(index));
      continue;
    }
    for (std::size_t block = 0; block < known.chain.size(); ++block) {
      one.pages.push_back(stale(index, block, known.tokens) ? nullptr : known.chain[block]->page(index));
    }
    one.borrowed = known.tail != nullptr;
    if (one.borrowed) one.pages.push_back(known.tail->page(index));
  }
}

const Strand& KvManager::strand(const SequenceRecord& record, std::size_t life_cycle) const {
  if (life_cycle >= record.strands.size()) {
    throw Misuse("life cycle " + std::to_string(life_cycle) + " does not exist; there are " +
                 std::to_string(record.strands.size()));
  }
  return record.strands[life_cycle];
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
  for (const Strand& one : record->strands) {
    for (Page* page : std::views::reverse(one.pages)) {
      if (page == nullptr) continue;
      cache_of(*page).raise_priority(*page, record->priority);
      cache_of(*page).hold(*page);
    }
  }
  return handle;
}

// K and V that are older than this moment never become reusable, whoever commits the block they are in.
void KvManager::begin_epoch() noexcept {
  ++epoch_;
  for (auto& [id, record] : sequences_) {
    if (!record->has_pages()) record->epoch = epoch_;
  }
}

KvStats KvManager::stats() const {
  const std::lock_guard guard(mutex_);
  KvStats all{};
  for (const PageCache& cache : caches_) {
    const CacheCounters& counters = cache.counters();
    all.slots += cache.gpu().slots();
    all.free_slots += parked_ ? 0 : cache.gpu().free_slots();
    all.locked_pages += cache.pages_with(Status::locked);
    all.held_pages += cache.pages_with(Status::held);
    all.droppable_pages += cache.pages_with(Status::droppable);
    all.host_pages += cache.pages_in(Tier::host);
    all.host_bytes += cache.host().committed_bytes();
    all.host_slots += cache.host().ceiling_places();
    all.evicted_pages += counters.evicted_pages;
    all.forgotten_pages += counters.forgotten_pages;
    all.moved_out_pages += counters.moved_out_pages;
    all.moved_in_pages += counters.moved_in_pages;
    all.moved_down_pages += counters.moved_down_pages;
    all.cold_gpu_pages += cache.pages_in(Tier::cold_gpu);
    all.disk_pages += cache.pages_in(Tier::disk);
    if (cache.cold_gpu() != nullptr) all.cold_gpu_slots += cache.cold_gpu()->ceiling_places();
    if (cache.disk() == nullptr) continue;
    all.disk_bytes += cache.disk()->committed_bytes();
    all.disk_slots += cache.disk()->ceiling_places();
  }
  all.sequences = sequences_.size();
  all.prefix_tokens = prefixes_.tokens();
  all.lookup_tokens = lookup_tokens_;
  all.hits_tokens = hits_tokens_;
  return all;
}

std::vector<PoolStats> KvManager::pool_stats() const {
  const std::lock_guard guard(mutex_);
  std::vector<PoolStats> rows;
  rows.reserve(caches_.size());
  for (const PageCache& cache : caches_) {
    rows.push_back({.page_bytes = cache.page_bytes(),
                    .slots = cache.gpu().slots(),
                    .free_slots = parked_ ? 0 : cache.gpu().free_slots(),
                    .locked_pages = cache.pages_with(Status::locked),
                    .held_pages = cache.pages_with(Status::held),
                    .droppable_pages = cache.pages_with(Status::droppable),
                    .host_pages = cache.pages_in(Tier::host),
                    .size_bytes = cache.gpu().size_bytes(),
                    .reserved_bytes = cache.gpu().reserved_bytes(),
                    .host_slots = cache.host().ceiling_places()});
  }
  return rows;
}

void KvManager::trim() noexcept {
  for (PageCache& cache : caches_) cache.trim();
}

}  // namespace torpor::kv
