#include "kernels/cpu/weight_memory.h"

#include <cstdint>
#include <cstring>
#include <memory>
#include <random>
#include <vector>

#include "gmock/gmock.h"

namespace coppice::kernels::cpu {
namespace {

// Blocks of all sizes come and go in any order, and none ever sees another's bytes.
TEST(WeightMemoryTest, BlocksAreZeroedAlignedAndTheirOwn) {
  struct Block {
    std::shared_ptr<void> memory;
    size_t bytes;
    uint8_t mark;
  };
  std::mt19937 random(5);
  std::vector<Block> blocks;
  const auto check = [](const Block& block) {
    const auto* bytes = static_cast<const uint8_t*>(block.memory.get());
    size_t wrong = 0;
    for (size_t i = 0; i < block.bytes; ++i) wrong += bytes[i] != block.mark;
    EXPECT_EQ(wrong, 0u);
  };
  for (int step = 0; step < 400; ++step) {
    if (!blocks.empty() && random() % 3 == 0) {
      const size_t i = random() % blocks.size();
      check(blocks[i]);
      blocks.erase(blocks.begin() + static_cast<std::ptrdiff_t>(i));
      continue;
    }
    Block block;
    block.bytes = 1 + random() % (size_t{1} << (random() % 24));
    block.mark = 0;
    block.memory = AllocateWeight(block.bytes);
    ASSERT_NE(block.memory, nullptr);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(block.memory.get()) % 64, 0u);
    check(block);
    block.mark = static_cast<uint8_t>(1 + random() % 255);
    std::memset(block.memory.get(), block.mark, block.bytes);
    blocks.push_back(std::move(block));
    if (step % 100 == 99) blocks.clear();
  }
  for (const Block& block : blocks) check(block);
}

}  // namespace
}  // namespace coppice::kernels::cpu
