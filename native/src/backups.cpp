// What a ledger keeps between cycles for speed: made ahead of time, and given back on request.
#include <algorithm>
#include <thread>

#include "externals.hpp"
#include "torpor/ledger.hpp"

namespace torpor {

namespace {
constexpr std::chrono::microseconds lock_pause{100};
}  // namespace

std::size_t Ledger::prefill_backups(std::chrono::duration<double> timeout, std::size_t room_bytes) {
  const Deadline deadline = Clock::now() + std::chrono::duration_cast<Clock::duration>(timeout);
  std::size_t saved_bytes = 0;
  for (std::size_t next = 0;;) {
    // The lock is given up after every piece, and for long enough that whoever waits for it gets it.
    do std::this_thread::sleep_for(lock_pause);
    while (wanting_.load() > 0);
    const std::lock_guard<std::mutex> working(work_);
    const bool late = no_prefilling_.load() || Clock::now() > deadline;
    if (late || status().phase != LedgerPhase::idle || next >= regions_.size()) return saved_bytes;
    StageContext context{
        .device = device_, .host_pool = host_pool_.get(), .deadline = deadline, .stop = nullptr};
    const bool more = regions_[next]->prefill_piece(context, room_bytes);
    saved_bytes += context.moved_bytes;
    if (!more) ++next;
  }
}

std::size_t Ledger::fill_host_pool(std::chrono::duration<double> timeout, std::size_t room_bytes) {
  const Deadline deadline = Clock::now() + std::chrono::duration_cast<Clock::duration>(timeout);
  std::vector<HostPiece> wanted;
  {
    const std::lock_guard<std::mutex> working(work_);
    for (const auto& one : participants_) {
      for (const HostPiece& piece : one->host_pieces()) wanted.push_back(piece);
    }
  }
  std::size_t idle_bytes = host_pool_->idle_bytes();  // what is there need not be made
  std::size_t made_bytes = 0;
  for (const HostPiece& piece : wanted) {
    if (piece.size_bytes <= idle_bytes) {
      idle_bytes -= piece.size_bytes;
      continue;
    }
    const std::size_t kept_bytes = host_pool_->idle_bytes() + host_pool_->retained_bytes();
    const std::size_t left_bytes =
        host_pool_->bound_bytes() - std::min(host_pool_->bound_bytes(), kept_bytes);
    const bool late = no_prefilling_.load() || Clock::now() > deadline;
    if (late || wanting_.load() > 0 || status().phase != LedgerPhase::idle) break;
    const std::size_t most_bytes = std::min(left_bytes, room_bytes - made_bytes);
    std::size_t size_bytes = piece.size_bytes;
    if (size_bytes > most_bytes && piece.granule_bytes > 0)
      size_bytes = most_bytes / piece.granule_bytes * piece.granule_bytes;
    if (size_bytes == 0 || size_bytes > most_bytes) continue;
    // Not under the lock: clearing and page-locking it takes a while.
    host_pool_->give_back(HostBuffer(device_, size_bytes, piece.pinned));
    made_bytes += size_bytes;
  }
  return made_bytes;
}

void Ledger::stop_prefilling() noexcept {
  no_prefilling_.store(true);
}

std::size_t Ledger::trim_host(std::size_t target_bytes) {
  const std::lock_guard<std::mutex> working(work_);
  std::size_t freed_bytes = 0;
  const auto trim_idle = [&] {
    const std::size_t retained_bytes = host_pool_->retained_bytes();
    freed_bytes += host_pool_->trim(target_bytes - std::min(target_bytes, retained_bytes));
    return host_pool_->idle_bytes() + host_pool_->retained_bytes() <= target_bytes;
  };
  for (const std::shared_ptr<Region>& region : regions_) {
    if (trim_idle()) break;
    (void)region->drop_backup();  // into the pool, as idle memory
  }
  (void)trim_idle();
  remember();
  return freed_bytes;
}

std::vector<std::string> Ledger::registrations() const {
  return externals_->names();
}

}  // namespace torpor
