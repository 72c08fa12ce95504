// The cuda device: copies, fills, and waiting for them.
#include <algorithm>
#include <thread>

#include "cuda_device.hpp"
#include "text.hpp"
#include "torpor/checksum.hpp"
#include "torpor/errors.hpp"

namespace torpor {

namespace {

constexpr std::size_t checksum_part_bytes = std::size_t{256} << 10;
constexpr std::size_t fewest_by_kernel = 4;  // below, calls of the driver take no longer
constexpr std::chrono::microseconds eager_polling{300};
constexpr std::chrono::microseconds polling_pause{50};

class OwnedEvent final {
 public:
  explicit OwnedEvent(const cuda::Driver& driver) : driver_(driver) {
    driver_.check(driver_.event_create(&event_, cuda::event_disable_timing), "cuEventCreate");
  }
  OwnedEvent(const OwnedEvent&) = delete;
  OwnedEvent& operator=(const OwnedEvent&) = delete;
  ~OwnedEvent() { driver_.event_destroy(event_); }
  [[nodiscard]] cuda::Event get() const noexcept { return event_; }

 private:
  const cuda::Driver& driver_;
  cuda::Event event_ = nullptr;
};

}  // namespace

void CudaDevice::copy(std::span<const Copy> batch, StreamId stream) {
  const CurrentContext current = enter();
  Batches batches;
  {
    const std::lock_guard<std::mutex> guard(mutex_);
    batches = prepare(batch, host_);
  }
  if (kernels_) copy_small(batches.pinned, stream_of(stream));
  copy_pinned(batches.pinned, stream_of(stream));
  for (const Copy& one : batches.pageable) {
    driver_->check(driver_->copy_async(one.destination, one.source, one.size_bytes, stream_of(stream)),
                   "cuMemcpyAsync", one.size_bytes);
  }
}

// Takes out of the batch what goes by kernel. The copies of a batch do not depend on each other.
void CudaDevice::copy_small(std::vector<Copy>& batch, cuda::Stream stream) {
  const auto large = std::ranges::partition(
      batch, [](const Copy& one) { return one.size_bytes < kernels::KernelSet::small_copy_bytes; });
  const std::span<const Copy> small(batch.begin(), large.begin());
  if (small.size() < fewest_by_kernel) return;
  const std::size_t taken = kernels_->copy(small, stream);
  batch.erase(batch.begin(), batch.begin() + static_cast<std::ptrdiff_t>(taken));
}

void CudaDevice::copy_pinned(std::span<const Copy> batch, cuda::Stream stream) {
  if (batch.size() < 2 || driver_->copy_batch_async == nullptr) {
    for (const Copy& one : batch) {
      driver_->check(driver_->copy_async(one.destination, one.source, one.size_bytes, stream),
                     "cuMemcpyAsync", one.size_bytes);
    }
    return;
  }
  std::vector<cuda::Pointer> destinations;
  std::vector<cuda::Pointer> sources;
  std::vector<std::size_t> sizes;
  std::size_t total_bytes = 0;
  for (const Copy& one : batch) {
    destinations.push_back(one.destination);
    sources.push_back(one.source);
    sizes.push_back(one.size_bytes);
    total_bytes += one.size_bytes;
  }
  cuda::CopyAttributes attributes{};
  attributes.source_access_order = 1;
  std::size_t from_the_first_on = 0;
  driver_->check(driver_->copy_batch_async(destinations.data(), sources.data(), sizes.data(), sizes.size(),
                                           &attributes, &from_the_first_on, 1, stream),
                 "cuMemcpyBatchAsync", total_bytes);
}

void CudaDevice::fill(Address at, std::uint8_t value, std::size_t size_bytes, StreamId stream) {
  const CurrentContext current = enter();
  driver_->check(driver_->fill_async(at, value, size_bytes, stream_of(stream)), "cuMemsetD8Async",
                 size_bytes);
}

void CudaDevice::poll(cuda::Event event, Deadline deadline, const StopFlag* stop, const char* what) {
  const Clock::time_point start = Clock::now();
  for (;;) {
    if (stop != nullptr && stop->load()) throw Stopped(std::string("stopped while waiting for ") + what);
    const cuda::Status status = driver_->event_query(event);
    if (status == cuda::success) return;
    if (status != cuda::not_ready) driver_->check(status, "cuEventQuery");
    const Clock::time_point now = Clock::now();
    if (now > deadline) {
      throw DeviceBusy(device_text(*this) + ": " + what +
                       " did not end within the deadline; wait for running kernels, " + "or give more time");
    }
    if (now - start < eager_polling) {
      std::this_thread::yield();
    } else {
      std::this_thread::sleep_for(polling_pause);
    }
  }
}

void CudaDevice::wait(StreamId stream, Deadline deadline, const StopFlag* stop) {
  const CurrentContext current = enter();
  const OwnedEvent event(*driver_);
  driver_->check(driver_->event_record(event.get(), stream_of(stream)), "cuEventRecord");
  poll(event.get(), deadline, stop, "copies");
}

Device::Mark CudaDevice::mark(StreamId stream) {
  const CurrentContext current = enter();
  Marks& marks = marks_[static_cast<std::size_t>(stream)];
  const Mark here = marks.next++;
  driver_->check(driver_->event_record(marks.events[here % marks.events.size()], stream_of(stream)),
                 "cuEventRecord");
  return here;
}

void CudaDevice::wait_for(Mark mark, StreamId stream, Deadline deadline, const StopFlag* stop) {
  const CurrentContext current = enter();
  const Marks& marks = marks_[static_cast<std::size_t>(stream)];
  poll(marks.events[mark % marks.events.size()], deadline, stop, "copies");
}

// A launch for as many parts as a table holds, and a wait before the next: a stop is heard every 2 GiB.
std::vector<std::uint64_t> CudaDevice::checksum_by_kernel(std::span<const ByteRange> ranges, StreamId stream,
                                                          Deadline deadline, const StopFlag* stop) {
  if (!kernels_) return checksum_by_copying(*this, ranges, stream, deadline, stop);
  const std::vector<ChecksumPart> parts = checksum_parts(ranges, checksum_part_bytes);
  const CurrentContext current = enter();
  std::vector<std::uint64_t> sums(ranges.size());
  for (std::size_t first = 0; first < parts.size(); first += kernels::KernelSet::table_entries) {
    const auto some = std::span(parts).subspan(first).first(
        std::min(kernels::KernelSet::table_entries, parts.size() - first));
    const auto launched = kernels_->checksum(some, stream_of(stream));
    if (!launched) return checksum_by_copying(*this, ranges, stream, deadline, stop);
    poll(launched->done(), deadline, stop, "checksums");
    for (std::size_t i = 0; i < some.size(); ++i) sums[some[i].owner] += launched->values()[i];
  }
  return sums;
}

// Ranges of host memory are summed where they are, the others by the GPU.
std::vector<std::uint64_t> CudaDevice::checksum(std::span<const ByteRange> ranges, StreamId stream,
                                                Deadline deadline, const StopFlag* stop) {
  std::vector<ByteRange> here;
  std::vector<ByteRange> there;
  std::vector<bool> is_here;
  {
    const std::lock_guard<std::mutex> guard(mutex_);
    HostRanges::Reader host(host_);
    for (const ByteRange& range : ranges) {
      is_here.push_back(host.room_at(range.at).has_value());
      (is_here.back() ? here : there).push_back(range);
    }
  }
  if (!here.empty()) wait(stream, deadline, stop);
  const std::vector<std::uint64_t> near = checksum_in_place(here, deadline, stop);
  const std::vector<std::uint64_t> far = checksum_by_kernel(there, stream, deadline, stop);
  std::vector<std::uint64_t> sums;
  for (std::size_t i = 0, from_near = 0, from_far = 0; i < is_here.size(); ++i) {
    sums.push_back(is_here[i] ? near[from_near++] : far[from_far++]);
  }
  return sums;
}

void CudaDevice::quiesce(Deadline deadline) {
  const CurrentContext current = enter();
  const OwnedEvent event(*driver_);
  if (driver_->context_record_event != nullptr) {
    const cuda::Status status = driver_->context_record_event(context_, event.get());
    if (status == cuda::capture_unsupported) {
      throw DeviceBusy(device_text(*this) + ": a stream is capturing a graph; end the capture and try again");
    }
    driver_->check(status, "cuCtxRecordEvent");
    poll(event.get(), deadline, nullptr, "work on the GPU");
    return;
  }
  // Without it the NULL stream stands for all blocking streams, and ours are asked one by one.
  driver_->check(driver_->event_record(event.get(), nullptr), "cuEventRecord");
  poll(event.get(), deadline, nullptr, "work on the GPU");
  wait(StreamId::out, deadline, nullptr);
  wait(StreamId::in, deadline, nullptr);
}

}  // namespace torpor
