#include "kernel_set.hpp"

#include <algorithm>
#include <exception>
#include <utility>

#include "image.hpp"
#include "torpor/errors.hpp"
#include "work.hpp"

namespace torpor::kernels {

namespace {

constexpr unsigned threads_per_block = 256;
// Enough to fill the link both ways, few enough that a model's own kernels still find room.
constexpr unsigned copy_blocks = 128;
constexpr unsigned checksum_blocks = 1024;
// What a block copies at a time: small, so that few copies spread over many blocks as well.
constexpr std::size_t copy_piece_bytes = std::size_t{16} << 10;

constexpr std::size_t table_bytes = KernelSet::table_entries * std::max(sizeof(CopyPiece), sizeof(SumPiece));
constexpr std::size_t slot_bytes = table_bytes + KernelSet::table_entries * sizeof(std::uint64_t);

void* pointer(Address at) noexcept {
  return reinterpret_cast<void*>(at);
}

}  // namespace

std::unique_ptr<KernelSet> KernelSet::load(const cuda::Driver& driver, HostReservation& memory,
                                           cuda::Stream stream, std::string& why) {
  const std::span<const std::byte> image = kernels::image();
  if (image.empty()) {
    why = "built without nvcc";
    return nullptr;
  }
  try {
    std::unique_ptr<KernelSet> set(new KernelSet(driver, memory));
    set->make(image, stream);
    return set;
  } catch (const std::exception& error) {
    why = error.what();
    return nullptr;
  }
}

void KernelSet::make(std::span<const std::byte> image, cuda::Stream stream) {
  driver_.check(driver_.module_load_data(&module_, image.data()), "cuModuleLoadData", image.size());
  driver_.check(driver_.module_get_function(&copy_, module_, "torpor_copy"), "cuModuleGetFunction");
  driver_.check(driver_.module_get_function(&checksum_, module_, "torpor_checksum"), "cuModuleGetFunction");
  memory_ = host_memory_.commit(slots_.size() * slot_bytes);
  driver_.check(
      driver_.host_register(pointer(memory_), slots_.size() * slot_bytes, cuda::host_register_portable),
      "cuMemHostRegister", slots_.size() * slot_bytes);
  registered_ = true;
  for (std::size_t i = 0; i < slots_.size(); ++i) {
    Slot& slot = slots_[i];
    slot.table = pointer(memory_ + i * slot_bytes);
    slot.sums = reinterpret_cast<std::uint64_t*>(memory_ + i * slot_bytes + table_bytes);
    driver_.check(driver_.event_create(&slot.done, cuda::event_disable_timing), "cuEventCreate");
  }
  unsigned none = 0;
  std::array<void*, 3> arguments{&slots_[0].table, &none, &slots_[0].sums};
  launch(copy_, 1, stream, arguments.data());
  launch(checksum_, 1, stream, arguments.data());
}

KernelSet::~KernelSet() {
  for (Slot& slot : slots_) {
    if (slot.done != nullptr) driver_.event_destroy(slot.done);
  }
  if (registered_) driver_.host_unregister(pointer(memory_));
  if (memory_ != 0) host_memory_.release(memory_);
  if (module_ != nullptr) driver_.module_unload(module_);
}

void KernelSet::launch(cuda::Function kernel, unsigned blocks, cuda::Stream stream, void** arguments) {
  driver_.check(
      driver_.launch_kernel(kernel, blocks, 1, 1, threads_per_block, 1, 1, 0, stream, arguments, nullptr),
      "cuLaunchKernel");
}

KernelSet::Slot* KernelSet::free_slot() {
  for (Slot& slot : slots_) {
    if (!slot.taken.load() && driver_.event_query(slot.done) == cuda::success) return &slot;
  }
  return nullptr;
}

std::size_t KernelSet::copy(std::span<const Copy> batch, cuda::Stream stream) {
  const std::lock_guard<std::mutex> guard(mutex_);
  std::size_t taken = 0;
  while (taken < batch.size()) {
    Slot* slot = free_slot();
    if (slot == nullptr) break;
    auto* table = static_cast<CopyPiece*>(slot->table);
    unsigned count = 0;
    for (; taken < batch.size(); ++taken) {
      const Copy& one = batch[taken];
      if (count + (one.size_bytes + copy_piece_bytes - 1) / copy_piece_bytes > table_entries) break;
      for (std::size_t done = 0; done < one.size_bytes; done += copy_piece_bytes) {
        table[count++] = {one.destination + done, one.source + done,
                          std::min(copy_piece_bytes, one.size_bytes - done)};
      }
    }
    if (count == 0) break;  // a single copy larger than a table holds
    std::array<void*, 2> arguments{&slot->table, &count};
    launch(copy_, std::min(count, copy_blocks), stream, arguments.data());
    driver_.check(driver_.event_record(slot->done, stream), "cuEventRecord");
  }
  return taken;
}

std::unique_ptr<KernelSet::Sums> KernelSet::checksum(std::span<const ChecksumPart> parts,
                                                     cuda::Stream stream) {
  if (parts.size() > table_entries) throw Misuse("too many parts for one launch of checksums");
  const std::lock_guard<std::mutex> guard(mutex_);
  Slot* slot = free_slot();
  if (slot == nullptr) return nullptr;
  auto* table = static_cast<SumPiece*>(slot->table);
  for (std::size_t i = 0; i < parts.size(); ++i) {
    table[i] = {parts[i].range.at, parts[i].range.size_bytes, parts[i].position};
  }
  auto count = static_cast<unsigned>(parts.size());
  auto sums = std::make_unique<Sums>(*this, static_cast<std::size_t>(slot - slots_.data()), parts.size());
  std::array<void*, 3> arguments{&slot->table, &count, &slot->sums};
  launch(checksum_, std::min(count, checksum_blocks), stream, arguments.data());
  slot->taken.store(true);
  driver_.check(driver_.event_record(slot->done, stream), "cuEventRecord");
  return sums;
}

}  // namespace torpor::kernels
