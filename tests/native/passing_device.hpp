// Passes everything on to another device: what wrappers for tests and benchmarks begin with.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "torpor/device.hpp"

class PassingDevice : public torpor::Device {
 public:
  explicit PassingDevice(std::shared_ptr<torpor::Device> inner) : inner_(std::move(inner)) {}

  torpor::DeviceKind kind() const noexcept override { return inner_->kind(); }
  std::string id() const override { return inner_->id(); }
  int ordinal() const noexcept override { return inner_->ordinal(); }
  std::size_t granularity_bytes() const noexcept override { return inner_->granularity_bytes(); }
  std::size_t chunk_bytes() const noexcept override { return inner_->chunk_bytes(); }
  bool can_pin() const noexcept override { return inner_->can_pin(); }
  std::string kernels() const override { return inner_->kernels(); }
  std::size_t kernel_copy_bytes() const noexcept override { return inner_->kernel_copy_bytes(); }
  torpor::MemoryInfo memory_info() override { return inner_->memory_info(); }
  std::size_t free_host_bytes() const override { return inner_->free_host_bytes(); }

  torpor::Address reserve_range(std::size_t size) override { return inner_->reserve_range(size); }
  void unreserve_range(torpor::Address base, std::size_t size) noexcept override {
    inner_->unreserve_range(base, size);
  }
  torpor::PhysicalHandle create_physical(std::size_t size) override { return inner_->create_physical(size); }
  void destroy_physical(torpor::PhysicalHandle handle) noexcept override { inner_->destroy_physical(handle); }
  void map_range(torpor::Address at, torpor::PhysicalHandle handle, std::size_t size) override {
    inner_->map_range(at, handle, size);
  }
  void unmap_range(torpor::Address at, std::size_t size) override { inner_->unmap_range(at, size); }
  torpor::Address create_host(std::size_t size, bool pinned) override {
    return inner_->create_host(size, pinned);
  }
  void destroy_host(torpor::Address base, std::size_t size) noexcept override {
    inner_->destroy_host(base, size);
  }
  void copy(std::span<const torpor::Copy> batch, torpor::StreamId stream) override {
    inner_->copy(batch, stream);
  }
  void fill(torpor::Address at, std::uint8_t value, std::size_t size, torpor::StreamId stream) override {
    inner_->fill(at, value, size, stream);
  }
  void wait(torpor::StreamId stream, torpor::Deadline deadline, const torpor::StopFlag* stop) override {
    inner_->wait(stream, deadline, stop);
  }
  Mark mark(torpor::StreamId stream) override { return inner_->mark(stream); }
  void wait_for(Mark mark, torpor::StreamId stream, torpor::Deadline deadline,
                const torpor::StopFlag* stop) override {
    inner_->wait_for(mark, stream, deadline, stop);
  }
  std::vector<std::uint64_t> checksum(std::span<const torpor::ByteRange> ranges, torpor::StreamId stream,
                                      torpor::Deadline deadline, const torpor::StopFlag* stop) override {
    return inner_->checksum(ranges, stream, deadline, stop);
  }
  void quiesce(torpor::Deadline deadline) override { inner_->quiesce(deadline); }
  void begin_work() noexcept override { inner_->begin_work(); }
  void end_work() noexcept override { inner_->end_work(); }

 protected:
  [[nodiscard]] torpor::Device& inner() const noexcept { return *inner_; }

 private:
  std::shared_ptr<torpor::Device> inner_;
};
