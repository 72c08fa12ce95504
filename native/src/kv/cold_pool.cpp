#include "torpor/kv/cold_pool.hpp"

#include "torpor/errors.hpp"

namespace torpor::kv {

void ColdPool::ensure(std::size_t places) {
  if (places <= pool_.free_slots()) return;
  const std::size_t place_bytes = pool_.size_bytes() / pool_.slots();
  throw OutOfDeviceMemory("the cold tier of the GPU has no room; raise cold_gpu_bytes", places * place_bytes,
                          pool_.free_slots() * place_bytes);
}

}  // namespace torpor::kv
