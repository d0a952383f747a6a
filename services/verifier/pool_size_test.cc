#include "services/verifier/pool_size.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace coppice::verifier {
namespace {

using ::testing::HasSubstr;

TEST(PoolSize, CountsLatentsOfEveryRankAndFeaturesOnce) {
  ModelConfig config;
  config.num_hidden_layers = 4;
  config.kv_lora_rank = 512;
  config.qk_rope_head_dim = 64;
  config.hidden_size = 256;
  EXPECT_EQ(BytesPerToken(config, 1, false), 4 * 4 * 576);
  EXPECT_EQ(BytesPerToken(config, 8, true), 8 * 4 * 4 * 576 + 512);
}

TEST(PoolSize, TheDefaultFitsIntoAQuarterOfMemoryInWholePages) {
  EXPECT_EQ(DefaultPoolTokens(10'000, int64_t{64} << 30, 64), kDefaultPoolTokens);
  EXPECT_EQ(DefaultPoolTokens(10'000, 40'000'000, 64), 960);  // 1000 tokens
  EXPECT_EQ(DefaultPoolTokens(10'000, 1, 64), 64);
}

TEST(PoolSize, RefusesWhatCannotBe) {
  EXPECT_EQ(*PoolPages(65536, 64, 10'000, int64_t{1} << 40), 1025);
  EXPECT_EQ(*PoolPages(100, 64, 10'000, int64_t{1} << 40), 2);
  EXPECT_THAT(std::string(PoolPages(63, 64, 1, 1 << 30).status().message()),
              HasSubstr("less than one page of 64"));
  EXPECT_EQ(PoolPages(int64_t{1} << 31, 64, 1, int64_t{1} << 50).status().code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(PoolPages(65536, 64, 10'000, 1'000'000).status().message()),
              HasSubstr("give at most 100"));
}

TEST(PoolSize, ThisMachineHasMemory) { EXPECT_GT(AvailableMemory(), 1 << 20); }

}  // namespace
}  // namespace coppice::verifier
