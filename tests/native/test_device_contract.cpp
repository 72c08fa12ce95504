// The device contract over every device that this machine has.
#include <unistd.h>

#include "device_contract.hpp"

using namespace torpor;

int main(int argc, char** argv) {
  const auto host = [] {
    return make_host_device("contract-" + std::to_string(getpid()), std::size_t{128} << 20);
  };
  contract::run_all(host, "host");
  contract::run_all([host] { return make_faulty_device(host()); }, "faulty(host)");
  contract::run_all(
      [] {
        return make_host_device("contract-small-" + std::to_string(getpid()), std::size_t{4} << 20, 1 << 16);
      },
      "host of 64 KiB");
  if (cuda_device_count() > 0) {
    auto cuda = make_cuda_device(0);
    contract::warm_up(cuda);
    contract::run_all([cuda] { return cuda; }, "cuda");
    contract::run_all([cuda] { return make_faulty_device(cuda); }, "faulty(cuda)");
  } else {
    std::printf("no CUDA device here: the contract ran over host devices only\n");
  }
  return check::run("", argc > 1 ? argv[1] : "");
}
