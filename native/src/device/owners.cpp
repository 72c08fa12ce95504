// The move-only owners over a device's primitives, and what all devices have in common.
#include <utility>

#include "device/host_memory.hpp"
#include "text.hpp"
#include "torpor/device.hpp"
#include "torpor/errors.hpp"

namespace torpor {

std::size_t Device::free_host_bytes() const {
  return available_host_bytes();
}

Reservation::Reservation(std::shared_ptr<Device> device, std::size_t size_bytes)
    : device_(std::move(device)), base_(device_->reserve_range(size_bytes)), size_bytes_(size_bytes) {}

Reservation::Reservation(Reservation&& other) noexcept
    : device_(std::move(other.device_)),
      base_(std::exchange(other.base_, 0)),
      size_bytes_(std::exchange(other.size_bytes_, 0)) {}

Reservation& Reservation::operator=(Reservation&& other) noexcept {
  Reservation taken(std::move(other));
  std::swap(device_, taken.device_);
  std::swap(base_, taken.base_);
  std::swap(size_bytes_, taken.size_bytes_);
  return *this;
}

Reservation::~Reservation() {
  if (base_ != 0) device_->unreserve_range(base_, size_bytes_);
}

Physical::Physical(std::shared_ptr<Device> device, std::size_t size_bytes)
    : device_(std::move(device)), handle_(device_->create_physical(size_bytes)), size_bytes_(size_bytes) {}

Physical::Physical(Physical&& other) noexcept
    : device_(std::move(other.device_)),
      handle_(std::exchange(other.handle_, 0)),
      size_bytes_(std::exchange(other.size_bytes_, 0)) {}

Physical& Physical::operator=(Physical&& other) noexcept {
  Physical taken(std::move(other));
  std::swap(device_, taken.device_);
  std::swap(handle_, taken.handle_);
  std::swap(size_bytes_, taken.size_bytes_);
  return *this;
}

Physical::~Physical() {
  if (handle_ != 0) device_->destroy_physical(handle_);
}

Mapping::Mapping(std::shared_ptr<Device> device, Address at, Physical physical)
    : device_(std::move(device)), physical_(std::move(physical)) {
  device_->map_range(at, physical_.handle(), physical_.size_bytes());
  at_ = at;
}

Mapping::Mapping(Mapping&& other) noexcept
    : device_(std::move(other.device_)),
      at_(std::exchange(other.at_, 0)),
      physical_(std::move(other.physical_)) {}

Mapping& Mapping::operator=(Mapping&& other) noexcept {
  Mapping taken(std::move(other));
  std::swap(device_, taken.device_);
  std::swap(at_, taken.at_);
  std::swap(physical_, taken.physical_);
  return *this;
}

Mapping::~Mapping() {
  try {
    release();
  } catch (...) {
    // The Physical goes now, and destroy_physical takes the mapping that is left along with it.
  }
}

Mapping Mapping::over(std::shared_ptr<Device> device, Address at, Physical& physical) {
  device->map_range(at, physical.handle(), physical.size_bytes());
  Mapping mapping;
  mapping.device_ = std::move(device);
  mapping.at_ = at;
  mapping.physical_ = std::move(physical);
  return mapping;
}

void Mapping::release() {
  if (at_ != 0) (void)take_off();
}

Physical Mapping::take_off() {
  device_->unmap_range(at_, physical_.size_bytes());
  at_ = 0;
  return std::move(physical_);
}

HostBuffer::HostBuffer(std::shared_ptr<Device> device, std::size_t size_bytes, bool pinned)
    : device_(std::move(device)),
      base_(device_->create_host(size_bytes, pinned)),
      size_bytes_(size_bytes),
      pinned_(pinned) {}

HostBuffer::HostBuffer(HostBuffer&& other) noexcept
    : device_(std::move(other.device_)),
      base_(std::exchange(other.base_, 0)),
      size_bytes_(std::exchange(other.size_bytes_, 0)),
      pinned_(std::exchange(other.pinned_, false)) {}

HostBuffer& HostBuffer::operator=(HostBuffer&& other) noexcept {
  HostBuffer taken(std::move(other));
  std::swap(device_, taken.device_);
  std::swap(base_, taken.base_);
  std::swap(size_bytes_, taken.size_bytes_);
  std::swap(pinned_, taken.pinned_);
  return *this;
}

HostBuffer::~HostBuffer() {
  if (base_ != 0) device_->destroy_host(base_, size_bytes_);
}

std::vector<Mapping> map_chunks(const std::shared_ptr<Device>& device, Address base, std::size_t size_bytes,
                                std::size_t chunk_bytes) {
  if (size_bytes == 0 || size_bytes % device->granularity_bytes() != 0) {
    throw Misuse("cannot map " + std::to_string(size_bytes) +
                 " bytes: round up to a multiple of the granularity, " +
                 std::to_string(device->granularity_bytes()));
  }
  if (chunk_bytes == 0) chunk_bytes = device->chunk_bytes();
  std::vector<Mapping> mappings;
  mappings.reserve((size_bytes + chunk_bytes - 1) / chunk_bytes);
  for (std::size_t done = 0; done < size_bytes; done += chunk_bytes) {
    const std::size_t part_bytes = std::min(chunk_bytes, size_bytes - done);
    mappings.emplace_back(device, base + done, Physical(device, part_bytes));
  }
  return mappings;
}

std::size_t round_up(std::size_t size_bytes, std::size_t multiple) noexcept {
  return (size_bytes + multiple - 1) / multiple * multiple;
}

}  // namespace torpor
