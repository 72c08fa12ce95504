// The cuda device: context, addresses, physical memory, host memory.
#include <algorithm>
#include <cstdio>

#include "cuda_device.hpp"
#include "host_memory.hpp"
#include "text.hpp"
#include "torpor/errors.hpp"

namespace torpor {

namespace {

void* pointer(Address at) noexcept {
  return reinterpret_cast<void*>(at);
}

std::string text_of(const cuda::Uuid& uuid) {
  std::string text = "GPU-";
  for (std::size_t i = 0; i < sizeof(uuid.bytes); ++i) {
    std::array<char, 3> hex{};
    std::snprintf(hex.data(), hex.size(), "%02x", uuid.bytes[i]);
    if (i == 4 || i == 6 || i == 8 || i == 10) text += '-';
    text += hex.data();
  }
  return text;
}

}  // namespace

CudaDevice::CudaDevice(std::shared_ptr<const cuda::Driver> driver, int ordinal)
    : driver_(std::move(driver)), ordinal_(ordinal), owner_pid_(getpid()) {
  int count = 0;
  driver_->check(driver_->device_get_count(&count), "cuDeviceGetCount");
  if (ordinal < 0 || ordinal >= count) {
    throw DeviceError("there is no GPU " + std::to_string(ordinal) + "; this process sees " +
                          std::to_string(count) + " (ordinals from 0; see CUDA_VISIBLE_DEVICES)",
                      "cuDeviceGet", 101, 0);
  }
  driver_->check(driver_->device_get(&index_, ordinal), "cuDeviceGet");
  cuda::Uuid uuid{};
  driver_->check(driver_->device_get_uuid(&uuid, index_), "cuDeviceGetUuid");
  id_ = text_of(uuid);
  driver_->check(driver_->primary_context_retain(&context_, index_), "cuDevicePrimaryCtxRetain");
  try {
    const CurrentContext current = enter();
    for (cuda::Stream& stream : streams_) {
      driver_->check(driver_->stream_create(&stream, cuda::stream_non_blocking), "cuStreamCreate");
    }
    for (Marks& marks : marks_) {
      for (cuda::Event& event : marks.events) {
        driver_->check(driver_->event_create(&event, cuda::event_disable_timing), "cuEventCreate");
      }
    }
    const cuda::AllocationProperties wanted = properties();
    driver_->check(driver_->mem_granularity(&granularity_bytes_, &wanted, cuda::granularity_minimum),
                   "cuMemGetAllocationGranularity");
    kernels_ = kernels::KernelSet::load(*driver_, host_memory_, stream_of(StreamId::in), why_no_kernels_);
  } catch (...) {
    release_all();
    throw;
  }
}

CudaDevice::~CudaDevice() {
  if (!foreign()) release_all();
}

void CudaDevice::release_all() noexcept {
  {
    const CurrentContext current = enter();
    kernels_.reset();
    for (const Marks& marks : marks_) {
      for (const cuda::Event event : marks.events) {
        if (event != nullptr) driver_->event_destroy(event);
      }
    }
    for (const cuda::Stream stream : streams_) {
      if (stream != nullptr) driver_->stream_destroy(stream);
    }
  }
  driver_->primary_context_release(index_);
}

cuda::AllocationProperties CudaDevice::properties() const noexcept {
  cuda::AllocationProperties wanted{};
  wanted.type = 1;
  wanted.location = {.type = 1, .id = index_};
  return wanted;
}

void CudaDevice::check_size(std::size_t size_bytes, const char* call) const {
  if (size_bytes > 0 && size_bytes % granularity_bytes_ == 0) return;
  throw Misuse(std::string(call) + ": " + std::to_string(size_bytes) +
               " bytes is not a positive multiple of the " + "granularity, " +
               std::to_string(granularity_bytes_) + "; round up");
}

MemoryInfo CudaDevice::memory_info() {
  const CurrentContext current = enter();
  MemoryInfo info{};
  driver_->check(driver_->mem_get_info(&info.free_bytes, &info.total_bytes), "cuMemGetInfo");
  return info;
}

Address CudaDevice::reserve_range(std::size_t size_bytes) {
  check_size(size_bytes, "reserve_range");
  const CurrentContext current = enter();
  cuda::Pointer base = 0;
  driver_->check(driver_->address_reserve(&base, size_bytes, 0, 0, 0), "cuMemAddressReserve", size_bytes);
  return static_cast<Address>(base);
}

void CudaDevice::unreserve_range(Address base, std::size_t size_bytes) noexcept {
  if (foreign()) return;
  const CurrentContext current = enter();
  driver_->address_free(base, size_bytes);
}

PhysicalHandle CudaDevice::create_physical(std::size_t size_bytes) {
  check_size(size_bytes, "create_physical");
  const CurrentContext current = enter();
  const cuda::AllocationProperties wanted = properties();
  cuda::Handle handle = 0;
  const cuda::Status status = driver_->mem_create(&handle, size_bytes, &wanted, 0);
  if (status != cuda::success) {
    const MemoryInfo info = memory_info();
    if (status == cuda::out_of_memory || (status == cuda::invalid_value && size_bytes > info.total_bytes)) {
      throw OutOfDeviceMemory("needed " + bytes_text(size_bytes) + ", free " + bytes_text(info.free_bytes) +
                                  " on " + device_text(*this) +
                                  "; put something on it to sleep, or ask for less",
                              size_bytes, info.free_bytes);
    }
    driver_->check(status, "cuMemCreate", size_bytes);
  }
  const std::lock_guard<std::mutex> guard(mutex_);
  const PhysicalHandle id = next_handle_++;
  pages_.emplace(id, Pages{handle, size_bytes, 0});
  return id;
}

void CudaDevice::destroy_physical(PhysicalHandle handle) noexcept {
  if (foreign()) return;
  const CurrentContext current = enter();
  const std::lock_guard<std::mutex> guard(mutex_);
  const auto found = pages_.find(handle);
  if (found == pages_.end()) return;
  const Pages& pages = found->second;
  if (pages.mapped_at != 0) {
    driver_->mem_unmap(pages.mapped_at, pages.size_bytes);
    mapped_.erase(pages.mapped_at);
  }
  driver_->mem_release(pages.handle);
  pages_.erase(found);
}

void CudaDevice::map_range(Address at, PhysicalHandle handle, std::size_t size_bytes) {
  check_size(size_bytes, "map_range");
  const CurrentContext current = enter();
  const std::lock_guard<std::mutex> guard(mutex_);
  const auto found = pages_.find(handle);
  if (found == pages_.end()) throw Misuse("map_range: no such physical memory");
  Pages& pages = found->second;
  if (pages.size_bytes != size_bytes)
    throw Misuse("map_range: map the whole of a physical memory, or nothing");
  if (pages.mapped_at != 0) throw Misuse("map_range: this physical memory is mapped already; unmap it first");
  driver_->check(driver_->mem_map(at, size_bytes, 0, pages.handle, 0), "cuMemMap", size_bytes);
  const cuda::AccessDescription access{.location = {.type = 1, .id = index_}, .flags = 3};
  const cuda::Status status = driver_->mem_set_access(at, size_bytes, &access, 1);
  if (status != cuda::success) {
    driver_->mem_unmap(at, size_bytes);
    driver_->check(status, "cuMemSetAccess", size_bytes);
  }
  pages.mapped_at = at;
  mapped_.emplace(at, handle);
}

void CudaDevice::unmap_range(Address at, std::size_t size_bytes) {
  if (foreign()) return;  // a fork has none of the driver's mappings
  const CurrentContext current = enter();
  const std::lock_guard<std::mutex> guard(mutex_);
  const auto found = mapped_.find(at);
  if (found == mapped_.end() || pages_.at(found->second).size_bytes != size_bytes) {
    throw Misuse("unmap_range: no mapping of that address and size");
  }
  driver_->check(driver_->mem_unmap(at, size_bytes), "cuMemUnmap", size_bytes);
  pages_.at(found->second).mapped_at = 0;
  mapped_.erase(found);
}

Address CudaDevice::create_host(std::size_t size_bytes, bool pinned) {
  const Address base = host_memory_.commit(size_bytes);
  const CurrentContext current = enter();
  for (std::size_t done = 0; pinned && done < size_bytes; done += HostRanges::piece_bytes) {
    const std::size_t part_bytes = std::min(HostRanges::piece_bytes, size_bytes - done);
    const cuda::Status status =
        driver_->host_register(pointer(base + done), part_bytes, cuda::host_register_portable);
    if (status == cuda::success) continue;
    for (std::size_t back = 0; back < done; back += HostRanges::piece_bytes) {
      driver_->host_unregister(pointer(base + back));
    }
    host_memory_.release(base);
    if (status == cuda::out_of_memory) {
      throw OutOfHostMemory("the driver cannot page-lock " + bytes_text(size_bytes) +
                                "; raise the memlock limit, or choose restore mode cpu",
                            size_bytes, available_host_bytes());
    }
    driver_->check(status, "cuMemHostRegister", part_bytes);
  }
  const std::lock_guard<std::mutex> guard(mutex_);
  host_.add(base, {size_bytes, pinned});
  return base;
}

void CudaDevice::destroy_host(Address base, std::size_t size_bytes) noexcept {
  if (foreign()) return;  // MADV_DONTFORK: there is nothing here to free
  const CurrentContext current = enter();
  HostRanges::Range range{0, false};
  {
    const std::lock_guard<std::mutex> guard(mutex_);
    range = host_.remove(base);
  }
  for (std::size_t done = 0; range.pinned && done < size_bytes; done += HostRanges::piece_bytes) {
    driver_->host_unregister(pointer(base + done));
  }
  host_memory_.release(base);
}

std::shared_ptr<Device> make_cuda_device(int ordinal) {
  return std::make_shared<CudaDevice>(cuda::load_driver(), ordinal);
}

int cuda_device_count() noexcept {
  try {
    int count = 0;
    const std::shared_ptr<const cuda::Driver> driver = cuda::load_driver();
    return driver->device_get_count(&count) == cuda::success ? count : 0;
  } catch (...) {
    return 0;
  }
}

}  // namespace torpor
