// Products equal a plain loop of fused multiply-adds, bit by bit: whatever the instruction set, the
// batch, the layout of the activations or the number of ranks.
#include "kernels/cpu/test_support.h"

namespace coppice::kernels::cpu {
namespace {

using Encoding = HostMatrix::Encoding;

class ProductTest : public ::testing::TestWithParam<std::string> {};

TEST_P(ProductTest, LinearSumsInputsInOrder) {
  Random random(1);
  std::unique_ptr<CpuGroup> group = MakeGroup(1, GetParam());
  std::unique_ptr<Ops> ops = group->CreateOps(0);
  struct Shape {
    int64_t rows, inputs, outputs;
  };
  // Every row count of a block, more rows than are staged at once, inputs of several chunks, odd
  // sizes.
  std::vector<Shape> shapes = {{0, 32, 16},   {1, 1, 1},     {1, 259, 300}, {2, 33, 17},
                               {3, 256, 64},  {5, 257, 31},  {9, 512, 130}, {17, 96, 48},
                               {33, 513, 16}, {70, 40, 100}, {100, 64, 20}, {200, 300, 8}};
  for (int64_t rows = 1; rows <= 26; ++rows) shapes.push_back({rows, 18, 144});
  for (const Shape& shape : shapes) {
    for (Encoding encoding : {Encoding::kBf16, Encoding::kF32, Encoding::kInt4Group32}) {
      const Weight w = RandomWeight(random, encoding, shape.outputs, shape.inputs);
      const std::unique_ptr<Matrix> matrix = Prepare(*ops, w.Whole());
      ASSERT_EQ(matrix->inputs(), shape.inputs);
      ASSERT_EQ(matrix->outputs(), shape.outputs);
      // Rows lie apart, and what lies between them stays.
      const int64_t x_stride = shape.inputs + 3, y_stride = shape.outputs + 5;
      std::vector<float> x = random.Normals(shape.rows * x_stride + 1);
      std::vector<float> y(shape.rows * y_stride + 1, 7.0f), want = y;
      for (int64_t r = 0; r < shape.rows; ++r) {
        for (int64_t o = 0; o < shape.outputs; ++o) {
          want[r * y_stride + o] = ReferenceDot(x.data() + r * x_stride, w, o, 0, shape.inputs);
        }
      }
      ops->Linear(View(x, shape.rows, shape.inputs, x_stride), *matrix,
                  View(y, shape.rows, shape.outputs, y_stride));
      EXPECT_TRUE(SameBits(y, want))
          << shape.rows << " x " << shape.inputs << " -> " << shape.outputs << ", encoding "
          << static_cast<int>(encoding);
    }
  }
}

TEST_P(ProductTest, ARowDoesNotDependOnItsBatch) {
  Random random(2);
  std::unique_ptr<CpuGroup> group = MakeGroup(1, GetParam());
  std::unique_ptr<Ops> ops = group->CreateOps(0);
  const int64_t inputs = 300, outputs = 75;
  const std::unique_ptr<Matrix> matrix =
      Prepare(*ops, RandomWeight(random, Encoding::kBf16, outputs, inputs).Whole());
  std::vector<float> x = random.Normals(70 * inputs), alone(70 * outputs);
  for (int64_t r = 0; r < 70; ++r) {
    ops->Linear(View(x, 70, inputs).Rows(r, 1), *matrix, View(alone, 70, outputs).Rows(r, 1));
  }
  for (int64_t rows = 2; rows <= 70; ++rows) {
    std::vector<float> y(rows * outputs);
    ops->Linear(View(x, rows, inputs), *matrix, View(y, rows, outputs));
    EXPECT_EQ(std::memcmp(y.data(), alone.data(), y.size() * 4), 0) << rows;
  }
}

TEST_P(ProductTest, NonFiniteRowsStayApart) {
  Random random(3);
  std::unique_ptr<CpuGroup> group = MakeGroup(1, GetParam());
  std::unique_ptr<Ops> ops = group->CreateOps(0);
  const Weight w = RandomWeight(random, Encoding::kBf16, 40, 33);
  const std::unique_ptr<Matrix> matrix = Prepare(*ops, w.Whole());
  std::vector<float> x = random.Normals(6 * 33), y(6 * 40);
  for (int64_t k = 0; k < 33; ++k) x[2 * 33 + k] = NAN;
  x[4 * 33] = INFINITY;
  ops->Linear(View(x, 6, 33), *matrix, View(y, 6, 40));
  for (int64_t r : {0, 1, 3, 5}) {
    for (int64_t o = 0; o < 40; ++o) {
      EXPECT_EQ(y[r * 40 + o], ReferenceDot(x.data() + r * 33, w, o, 0, 33));
    }
  }
  EXPECT_TRUE(std::isnan(y[2 * 40]));
}

TEST_P(ProductTest, HeadLinearIsOneProductPerHead) {
  Random random(4);
  std::unique_ptr<CpuGroup> group = MakeGroup(1, GetParam());
  std::unique_ptr<Ops> ops = group->CreateOps(0);
  const int64_t heads = 3, inputs = 24, outputs = 40, rows = 5;
  std::vector<Weight> weights;
  std::vector<std::unique_ptr<Matrix>> matrices;
  for (int64_t h = 0; h < heads; ++h) {
    // Stored as [inputs, outputs]: the head is multiplied by the transpose.
    weights.push_back(RandomWeight(random, Encoding::kBf16, inputs, outputs));
    HostMatrix m = weights.back().Whole();
    m.transposed = true;
    matrices.push_back(Prepare(*ops, m));
  }
  std::vector<float> x = random.Normals(rows * heads * inputs), y(rows * heads * outputs);
  ops->HeadLinear(View(x, rows, heads * inputs), matrices, View(y, rows, heads * outputs));
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t h = 0; h < heads; ++h) {
      for (int64_t o = 0; o < outputs; ++o) {
        float sum = 0;
        for (int64_t k = 0; k < inputs; ++k) {
          sum = std::fma(weights[h].At(k, o), x[r * heads * inputs + h * inputs + k], sum);
        }
        EXPECT_EQ(y[r * heads * outputs + h * outputs + o], sum);
      }
    }
  }
}

TEST_P(ProductTest, RowLinearAddsEightSegmentsWhateverTheRanks) {
  Random random(5);
  struct Shape {
    int64_t rows, inputs, outputs;
  };
  for (const Shape& s : {Shape{1, 64, 48},
                         {9, 256, 64},
                         {3, 8, 5},
                         {40, 72, 33},
                         {2, 8 * 300, 20},
                         {130, 16, 40},
                         {150, 16, 240}}) {
    const Weight w = RandomWeight(random, Encoding::kBf16, s.outputs, s.inputs);
    std::vector<float> x = random.Normals(s.rows * s.inputs);
    const std::vector<float> before = random.Normals(s.rows * s.outputs);
    std::vector<float> want = before;
    const int64_t segment = s.inputs / kSegments;
    for (int64_t r = 0; r < s.rows; ++r) {
      for (int64_t o = 0; o < s.outputs; ++o) {
        float sum = ReferenceDot(x.data() + r * s.inputs, w, o, 0, segment);
        for (int i = 1; i < kSegments; ++i) {
          sum += ReferenceDot(x.data() + r * s.inputs + i * segment, w, o, i * segment, segment);
        }
        want[r * s.outputs + o] += sum;
      }
    }
    for (int ranks : {1, 2, 4, 8}) {
      RunRanks(ranks, GetParam(), [&](Ops& ops) {
        const int local = kSegments / ranks;
        SegmentedMatrix segments;
        for (int i = 0; i < local; ++i) {
          segments.push_back(
              Prepare(ops, w.Rectangle(0, s.outputs, (ops.rank() * local + i) * segment, segment)));
        }
        std::vector<float> residual = before;
        ops.RowLinear(View(x, s.rows, s.inputs).Cols(ops.rank() * local * segment, local * segment),
                      segments, View(residual, s.rows, s.outputs));
        EXPECT_TRUE(SameBits(residual, want))
            << s.rows << " rows, rank " << ops.rank() << " of " << ranks;
      });
    }
  }
}

TEST_P(ProductTest, AllGatherPutsRanksSideBySide) {
  for (int ranks : {1, 2, 4, 8}) {
    RunRanks(ranks, GetParam(), [&](Ops& ops) {
      for (int64_t rows : {1, 3, 40}) {
        const int64_t cols = 5;
        std::vector<float> x(rows * cols), out(rows * cols * ranks);
        for (int64_t i = 0; i < rows * cols; ++i) x[i] = static_cast<float>(ops.rank() * 1000 + i);
        ops.AllGatherColumns(View(x, rows, cols), View(out, rows, cols * ranks));
        x.assign(x.size(), -1);  // the caller may reuse its memory at once
        for (int64_t r = 0; r < rows; ++r) {
          for (int64_t c = 0; c < cols * ranks; ++c) {
            ASSERT_EQ(out[r * cols * ranks + c],
                      static_cast<float>(c / cols * 1000 + r * cols + c % cols));
          }
        }
      }
    });
  }
}

INSTANTIATE_TEST_SUITE_P(Isas, ProductTest, ::testing::ValuesIn(Isas()),
                         [](const auto& info) { return info.param; });

}  // namespace
}  // namespace coppice::kernels::cpu
