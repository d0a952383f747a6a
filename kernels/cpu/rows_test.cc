// Row operations against double precision, and against themselves on every instruction set.
#include <algorithm>
#include <limits>
#include <numeric>

#include "kernels/cpu/test_support.h"

namespace coppice::kernels::cpu {
namespace {

class RowsTest : public ::testing::TestWithParam<std::string> {
 protected:
  std::unique_ptr<CpuGroup> group_ = MakeGroup(1, GetParam());
  std::unique_ptr<Ops> ops_ = group_->CreateOps(0);
  std::unique_ptr<CpuGroup> generic_group_ = MakeGroup(1, "generic");
  std::unique_ptr<Ops> generic_ = generic_group_->CreateOps(0);
};

TEST_P(RowsTest, RmsNorm) {
  Random random(1);
  for (int64_t cols : {1, 7, 16, 64, 131, 512}) {
    for (int64_t rows : {0, 1, 5}) {
      const int64_t stride = cols + 3;
      std::vector<float> x = random.Normals(rows * stride + 1, 3), weight = random.Normals(cols);
      std::vector<float> out(rows * stride + 1, 7), again = out;
      ops_->RmsNorm(View(x, rows, cols, stride), View(weight, 1, cols), 1e-5f,
                    View(out, rows, cols, stride));
      generic_->RmsNorm(View(x, rows, cols, stride), View(weight, 1, cols), 1e-5f,
                        View(again, rows, cols, stride));
      EXPECT_TRUE(SameBits(out, again));
      for (int64_t r = 0; r < rows; ++r) {
        double squares = 0;
        for (int64_t c = 0; c < cols; ++c) squares += double{x[r * stride + c]} * x[r * stride + c];
        for (int64_t c = 0; c < cols; ++c) {
          const double want = x[r * stride + c] / std::sqrt(squares / cols + 1e-5) * weight[c];
          EXPECT_NEAR(out[r * stride + c], want, 1e-6 * (1 + std::abs(want)));
        }
        EXPECT_EQ(out[r * stride + cols], 7);
      }
      ops_->RmsNorm(View(x, rows, cols, stride), View(weight, 1, cols), 1e-5f,
                    View(x, rows, cols, stride));
      for (int64_t r = 0; r < rows; ++r) {
        for (int64_t c = 0; c < cols; ++c) EXPECT_EQ(x[r * stride + c], out[r * stride + c]);
      }
    }
  }
}

TEST_P(RowsTest, SwiGluOverTheWholeRange) {
  // From where the exponential vanishes to where it overflows.
  std::vector<float> gate;
  for (float g = -110; g < 110; g += 0.173f) gate.push_back(g);
  for (float g : {0.0f, -0.0f, 1e-30f, -1e-30f, 1e30f, -1e30f}) gate.push_back(g);
  const int64_t n = gate.size();
  std::vector<float> both = gate, out(n), again(n);
  for (int64_t i = 0; i < n; ++i) both.push_back(1.5f);
  ops_->SwiGlu(View(both, 1, 2 * n), View(out, 1, n));
  generic_->SwiGlu(View(both, 1, 2 * n), View(again, 1, n));
  EXPECT_TRUE(SameBits(out, again));
  for (int64_t i = 0; i < n; ++i) {
    const double want = 1.5 * gate[i] / (1 + std::exp(-double{gate[i]}));
    EXPECT_NEAR(out[i], want, 5e-7 * std::abs(want) + 1e-35) << gate[i];
  }
  std::vector<float> bad = {NAN, INFINITY, -INFINITY, 1, 1, 1}, result(3);
  ops_->SwiGlu(View(bad, 1, 6), View(result, 1, 3));
  EXPECT_TRUE(std::isnan(result[0]));
  EXPECT_EQ(result[1], INFINITY);
}

TEST_P(RowsTest, EmbedReadsUnalignedTables) {
  std::vector<uint16_t> table(4 * 3);
  for (size_t i = 0; i < table.size(); ++i) table[i] = FloatToBf16(static_cast<float>(i));
  std::vector<char> bytes(table.size() * 2 + 1);
  std::memcpy(bytes.data() + 1, table.data(), table.size() * 2);
  std::vector<int32_t> ids = {3, 0, 3};
  std::vector<float> out(9);
  ops_->Embed(View(ids, 3), reinterpret_cast<const uint16_t*>(bytes.data() + 1), View(out, 3, 3));
  EXPECT_EQ(out, (std::vector<float>{9, 10, 11, 0, 1, 2, 9, 10, 11}));
}

TEST_P(RowsTest, Bf16RoundsToNearestEven) {
  std::vector<float> x = {1.0f,    1.00390625f, 1.01171875f, -1.00390625f,
                          3.4e38f, 1e-40f,      INFINITY,    NAN};
  std::vector<uint16_t> bits(x.size());
  std::vector<float> back(x.size());
  ops_->ToBf16(View(x, 1, 8), View(bits, 1, 8));
  ops_->FromBf16(View(bits, 1, 8), View(back, 1, 8));
  EXPECT_EQ(back[0], 1.0f);
  EXPECT_EQ(back[1], 1.0f);       // halfway, to even
  EXPECT_EQ(back[2], 1.015625f);  // halfway, to even
  EXPECT_EQ(back[3], -1.0f);
  EXPECT_EQ(back[4], INFINITY);  // beyond the largest bf16
  EXPECT_NEAR(back[5], 1e-40f, 1e-40f);
  EXPECT_EQ(back[6], INFINITY);
  EXPECT_TRUE(std::isnan(back[7]));
}

TEST_P(RowsTest, CopiesGathersScattersAndMoves) {
  std::vector<float> x(5 * 4);
  std::iota(x.begin(), x.end(), 0.0f);
  std::vector<int32_t> pick = {4, 0, 4};
  std::vector<float> got(3 * 2);
  ops_->GatherRows(View(x, 5, 4).Cols(1, 2), View(pick, 3), View(got, 3, 2));
  EXPECT_EQ(got, (std::vector<float>{17, 18, 1, 2, 17, 18}));
  std::vector<float> copy(5 * 2);
  ops_->Copy(View(x, 5, 4).Cols(2, 2), View(copy, 5, 2));
  EXPECT_EQ(copy, (std::vector<float>{2, 3, 6, 7, 10, 11, 14, 15, 18, 19}));
  std::vector<int32_t> to = {2, 0, 1};
  ops_->ScatterRows(View(got, 3, 2), View(to, 3), View(copy, 5, 2));
  EXPECT_EQ(copy, (std::vector<float>{1, 2, 17, 18, 17, 18, 14, 15, 18, 19}));
  // A chain and a swap: everything is read before anything is written.
  std::vector<float> cache = {0, 1, 2, 3, 4};
  std::vector<int32_t> src = {0, 1, 4, 3}, dst = {1, 2, 3, 4};
  ops_->MoveRows(View(cache, 5, 1), View(src, 4), View(dst, 4));
  EXPECT_EQ(cache, (std::vector<float>{0, 0, 1, 4, 3}));
  ops_->MoveRows(View(cache, 5, 1), View(src, 0), View(dst, 0));
  EXPECT_EQ(cache, (std::vector<float>{0, 0, 1, 4, 3}));
}

TEST_P(RowsTest, TopKLogProbs) {
  Random random(2);
  for (int64_t cols : {1, 15, 16, 17, 100, 4096}) {
    for (int k : {1, 2, 8, 15}) {
      const int64_t rows = 3;
      std::vector<float> logits = random.Normals(rows * cols, 4);
      // Coarse values make ties.
      for (int64_t c = 0; c < cols; ++c) logits[cols + c] = std::round(logits[cols + c]);
      std::vector<int32_t> ids(rows * k);
      std::vector<float> got(rows * k);
      ops_->TopKLogProbs(View(logits, rows, cols), k, View(ids, rows, k), View(got, rows, k));
      for (int64_t r = 0; r < rows; ++r) {
        const float* x = logits.data() + r * cols;
        std::vector<int32_t> order(cols);
        std::iota(order.begin(), order.end(), 0);
        std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return x[a] > x[b]; });
        double sum = 0;
        for (int64_t c = 0; c < cols; ++c) sum += std::exp(double{x[c]} - x[order[0]]);
        for (int j = 0; j < k; ++j) {
          if (j >= cols) {
            EXPECT_EQ(ids[r * k + j], -1);
            EXPECT_EQ(got[r * k + j], -INFINITY);
            continue;
          }
          EXPECT_EQ(ids[r * k + j], order[j]) << cols << " columns, row " << r << ", place " << j;
          EXPECT_NEAR(got[r * k + j], x[order[j]] - x[order[0]] - std::log(sum), 2e-6);
        }
      }
      std::vector<int32_t> ids2(rows * k);
      std::vector<float> got2(rows * k);
      generic_->TopKLogProbs(View(logits, rows, cols), k, View(ids2, rows, k), View(got2, rows, k));
      EXPECT_TRUE(SameBits(got, got2));
      EXPECT_EQ(ids, ids2);
    }
  }
}

TEST_P(RowsTest, TopKPassesOverNans) {
  std::vector<float> logits = {NAN, 1, NAN, 3, 2};
  std::vector<int32_t> ids(4);
  std::vector<float> log_probs(4);
  ops_->TopKLogProbs(View(logits, 1, 5), 4, View(ids, 1, 4), View(log_probs, 1, 4));
  EXPECT_EQ(ids, (std::vector<int32_t>{3, 4, 1, -1}));
  EXPECT_TRUE(std::isnan(log_probs[0]));  // and says that something is wrong
}

TEST_P(RowsTest, MemoryIsZeroedAlignedAndBounded) {
  for (size_t bytes : {size_t{0}, size_t{1}, size_t{1000}, size_t{4} << 20}) {
    auto buffer = ops_->Allocate(bytes);
    ASSERT_TRUE(buffer.ok());
    EXPECT_EQ((*buffer)->bytes(), bytes);
    EXPECT_EQ(reinterpret_cast<uintptr_t>((*buffer)->data()) % 64, 0u);
    const char* data = static_cast<const char*>((*buffer)->data());
    EXPECT_TRUE(std::all_of(data, data + bytes, [](char c) { return c == 0; }));
  }
  const auto refused = ops_->Allocate(size_t{1} << 60);
  EXPECT_EQ(refused.status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_NE(std::string(refused.status().message()).find("1152921504606846976"), std::string::npos);
}

INSTANTIATE_TEST_SUITE_P(Isas, RowsTest, ::testing::ValuesIn(Isas()),
                         [](const auto& info) { return info.param; });

TEST(GroupTest, RefusesUnevenRanksAndUnknownInstructionSets) {
  for (int ranks : {-1, 0, 3, 16}) {
    EXPECT_EQ(CreateCpuGroup(ranks).status().code(), absl::StatusCode::kInvalidArgument) << ranks;
  }
  setenv("COPPICE_CPU_ISA", "sse9", 1);
  const absl::Status status = CreateCpuGroup(1).status();
  unsetenv("COPPICE_CPU_ISA");
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_NE(std::string(status.message()).find("sse9"), std::string::npos);
}

TEST(TensorTest, ViewsOfRowsAndColumns) {
  std::vector<float> x(6 * 5);
  std::iota(x.begin(), x.end(), 0.0f);
  const Tensor t = View(x, 6, 5).Rows(2, 3).Cols(1, 2);
  EXPECT_EQ(t.rows, 3);
  EXPECT_EQ(t.cols, 2);
  EXPECT_EQ(t.stride, 5);
  EXPECT_EQ(t.f32()[0], 11);
  EXPECT_EQ(t.f32()[t.stride + 1], 17);
}

}  // namespace
}  // namespace coppice::kernels::cpu
