// PieceMaker: pieces made ahead, on several threads, and what becomes of them when something fails.
#include "ledger_rig.hpp"
#include "piece_maker.hpp"

using namespace rig;

namespace {

const std::size_t piece = 4 * grain;

struct Made {
  explicit Made(std::size_t total_bytes)
      : faulty(make_faulty_device(make_host_device(fresh_name(), capacity, grain))),
        pool(faulty, 1 << 30),
        maker(std::make_unique<PieceMaker>(pool, true, total_bytes, piece)) {}
  std::shared_ptr<FaultyDevice> faulty;
  HostPool pool;
  std::unique_ptr<PieceMaker> maker;
};

std::size_t made(const FaultyDevice& device) {
  const std::vector<std::string> log = device.log();
  return static_cast<std::size_t>(std::ranges::count(log, "create_host"));
}

}  // namespace

CASE("pieces come in their sizes, no more are made than were asked for, and none is shared") {
  Made rig(5 * piece + 100);
  std::vector<HostBuffer> pieces;
  for (int i = 0; i < 6; ++i) pieces.push_back(rig.maker->next());
  for (std::size_t i = 0; i < pieces.size(); ++i) {
    CHECK(pieces[i].size_bytes() == (i < 5 ? piece : 100));
    std::memset(reinterpret_cast<void*>(pieces[i].base()), static_cast<int>(i) + 1, pieces[i].size_bytes());
  }
  for (std::size_t i = 0; i < pieces.size(); ++i) {
    CHECK(*reinterpret_cast<const std::uint8_t*>(pieces[i].base()) == i + 1);
  }
  CHECK(made(*rig.faulty) == 6);
}

CASE("what was made ahead and is not wanted goes back to the pool, and a single piece makes nothing ahead") {
  Made rig(5 * piece);
  {
    const HostBuffer first = rig.maker->next();
  }
  rig.maker.reset();
  // A thread that comes late takes what the others gave back.
  CHECK(made(*rig.faulty) <= 3 && rig.pool.idle_bytes() == (made(*rig.faulty) - 1) * piece);
  Made single(piece);
  (void)single.maker->next();
  single.maker.reset();
  CHECK(made(*single.faulty) == 1 && single.pool.idle_bytes() == 0);
}

CASE("a piece that cannot be made says so to who asks for it, and the others are not lost (M3)") {
  for (std::uint64_t k = 1; k <= 5; ++k) {
    Made rig(5 * piece);
    rig.faulty->fail_at(k);
    std::vector<HostBuffer> pieces;
    int failed = 0;
    for (int i = 0; i < 5; ++i) {
      try {
        pieces.push_back(rig.maker->next());
      } catch (const DeviceError&) {
        ++failed;
      }
    }
    CHECK(failed == 1 && pieces.size() == 4 && made(*rig.faulty) == 5);
  }
}
