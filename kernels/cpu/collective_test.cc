// Ranks meet, read what the others published, and go on; run under ThreadSanitizer too.
#include "kernels/cpu/collective.h"

#include <thread>
#include <vector>

#include "gtest/gtest.h"

namespace coppice::kernels::cpu {
namespace {

TEST(HostCollectiveTest, EveryoneReadsEveryonesLatest) {
  for (int ranks : {1, 2, 4, 8}) {
    HostCollective collective(ranks);
    std::vector<std::thread> threads;
    for (int rank = 0; rank < ranks; ++rank) {
      threads.emplace_back([&, rank] {
        uint32_t noise = static_cast<uint32_t>(rank + 1) * 2654435761u;
        for (int call = 0; call < 500; ++call) {
          // Sizes differ from call to call, so memory grows while the group runs.
          const int n = 1 + call * 7 % 64;
          float* mine = collective.Memory(rank).Get(n);
          for (int i = 0; i < n; ++i) mine[i] = static_cast<float>(call * 1000 + rank * 100 + i);
          const HostCollective::All& all = collective.Exchange(rank, {mine, nullptr});
          noise = noise * 1664525u + 1013904223u;
          if (noise >> 30 == 0) std::this_thread::yield();
          for (int other = 0; other < ranks; ++other) {
            const float* theirs = static_cast<const float*>(all[other].data);
            for (int i = 0; i < n; ++i) {
              ASSERT_EQ(theirs[i], static_cast<float>(call * 1000 + other * 100 + i));
            }
          }
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
  }
}

}  // namespace
}  // namespace coppice::kernels::cpu
