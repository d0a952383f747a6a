// Weights are what the checkpoint says: multiplied by unit vectors they come back bit by bit.
#include "kernels/cpu/packed_matrix.h"

#include "gmock/gmock.h"
#include "kernels/cpu/test_support.h"

namespace coppice::kernels::cpu {
namespace {

using Encoding = HostMatrix::Encoding;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

// [inputs][outputs] of what the backend made of `m`.
std::vector<float> ReadBack(const HostMatrix& m) {
  std::unique_ptr<CpuGroup> group = MakeGroup(1);
  std::unique_ptr<Ops> ops = group->CreateOps(0);
  std::unique_ptr<Matrix> matrix = Prepare(*ops, m);
  const int64_t n = matrix->inputs();
  std::vector<float> x(n * n), y(n * matrix->outputs());
  for (int64_t i = 0; i < n; ++i) x[i * n + i] = 1;
  ops->Linear(View(x, n, n), *matrix, View(y, n, matrix->outputs()));
  return y;
}

std::vector<float> ReadWord(uint32_t word, float scale) {
  Weight w;
  w.encoding = Encoding::kInt4Group32;
  w.rows = 1;
  w.cols = 8;
  w.words = {word};
  w.scales = {FloatToBf16(scale)};
  return ReadBack(w.Whole());
}

TEST(PackedMatrixTest, NibblesAreLowestFirstAndOffsetByEight) {
  EXPECT_THAT(ReadWord(0x76543210u, 1), ElementsAre(-8, -7, -6, -5, -4, -3, -2, -1));
  EXPECT_THAT(ReadWord(0xFEDCBA98u, 1), ElementsAre(0, 1, 2, 3, 4, 5, 6, 7));
  EXPECT_THAT(ReadWord(0x1F5B6A79u, 1), ElementsAre(1, -1, 2, -2, 3, -3, 7, -7));
}

TEST(PackedMatrixTest, Int4WeightsAreRoundedToBf16) {
  // 7 · 0.0123291016 = 0.0863037109, which bf16 cannot hold.
  EXPECT_EQ(ReadWord(0xFFFFFFFFu, 0.0123291016f)[0], 0.0864257813f);
}

TEST(PackedMatrixTest, RectanglesOfEveryEncodingComeBack) {
  Random random(1);
  for (Encoding encoding : {Encoding::kBf16, Encoding::kF32, Encoding::kInt4Group32}) {
    const Weight w = RandomWeight(random, encoding, 37, 96);
    for (bool transposed : {false, true}) {
      for (auto [row, rows, col, cols] : {std::array<int64_t, 4>{0, 37, 0, 96},
                                          {5, 17, 32, 64},
                                          {36, 1, 0, 96},
                                          {0, 37, 40, 8},
                                          {3, 20, 13, 51},
                                          {0, 16, 95, 1}}) {
        HostMatrix m = w.Rectangle(row, rows, col, cols);
        m.transposed = transposed;
        const std::vector<float> got = ReadBack(m);
        for (int64_t r = 0; r < rows; ++r) {
          for (int64_t c = 0; c < cols; ++c) {
            ASSERT_EQ(got[transposed ? r * cols + c : c * rows + r], w.At(row + r, col + c))
                << "encoding " << static_cast<int>(encoding) << " at " << r << ", " << c;
          }
        }
      }
    }
  }
}

TEST(PackedMatrixTest, SourcesNeedNoAlignment) {
  Random random(2);
  for (Encoding encoding : {Encoding::kBf16, Encoding::kF32, Encoding::kInt4Group32}) {
    const Weight w = RandomWeight(random, encoding, 9, 64);
    HostMatrix m = w.Whole();
    std::vector<char> data(m.rows * m.row_bytes + 1), scales(m.rows * m.scale_row_bytes + 1);
    std::memcpy(data.data() + 1, m.data, data.size() - 1);
    if (m.scales != nullptr) std::memcpy(scales.data() + 1, m.scales, scales.size() - 1);
    const std::vector<float> aligned = ReadBack(m);
    m.data = data.data() + 1;
    if (m.scales != nullptr) m.scales = scales.data() + 1;
    EXPECT_TRUE(SameBits(ReadBack(m), aligned));
  }
}

TEST(PackedMatrixTest, RefusesWhatCannotBe) {
  Random random(3);
  const Weight bf16 = RandomWeight(random, Encoding::kBf16, 4, 32);
  const Weight int4 = RandomWeight(random, Encoding::kInt4Group32, 4, 64);
  auto refused = [](const HostMatrix& m, const char* why) {
    const auto result = PackedMatrix::Pack(m);
    EXPECT_EQ(result.status().code(), absl::StatusCode::kInvalidArgument) << why;
    EXPECT_THAT(std::string(result.status().message()), HasSubstr(why));
  };
  HostMatrix m = bf16.Whole();
  m.rows = 0;
  refused(m, "0 x 32");
  m = bf16.Whole();
  m.data = nullptr;
  refused(m, "no data");
  m = bf16.Whole();
  m.row_bytes = 63;
  refused(m, "need 64 bytes");
  m = int4.Whole();
  m.scales = nullptr;
  refused(m, "no scales");
  m = int4.Whole();
  m.first_col = 32;
  refused(m, "column 32");
  m = int4.Whole();
  m.scale_row_bytes = 2;
  refused(m, "bytes of scales");
}

}  // namespace
}  // namespace coppice::kernels::cpu
