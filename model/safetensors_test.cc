#include "model/safetensors.h"

#include <cmath>
#include <limits>
#include <random>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "model/test_files.h"

namespace coppice {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::SizeIs;

absl::StatusOr<std::vector<TensorView>> Parse(const std::string& image) {
  return ParseSafetensors(
      absl::MakeConstSpan(reinterpret_cast<const std::byte*>(image.data()), image.size()),
      "shard.safetensors");
}

absl::Status ParseStatus(std::string_view header, size_t data_bytes) {
  return Parse(SafetensorsImage(header, std::string(data_bytes, '\0'))).status();
}

TEST(ParseSafetensors, ReadsTensorsInOrderOfOffsets) {
  const std::string image =
      SafetensorsImage(R"({"__metadata__":{"format":"pt"},)"
                       R"("b":{"dtype":"BF16","shape":[2,3],"data_offsets":[8,20]},)"
                       R"("a":{"dtype":"I32","shape":[2],"data_offsets":[0,8]},)"
                       R"("none":{"dtype":"F32","shape":[0,7],"data_offsets":[8,8]},)"
                       R"("scalar":{"dtype":"F8_E4M3","shape":[],"data_offsets":[20,21]}}   )",
                       std::string("\1\0\0\0\2\0\0\0", 8) + std::string(13, 'x'));
  const auto tensors = Parse(image);
  ASSERT_TRUE(tensors.ok()) << tensors.status();
  ASSERT_THAT(*tensors, SizeIs(4));
  EXPECT_EQ((*tensors)[0].name, "a");
  EXPECT_EQ((*tensors)[0].dtype, DType::kI32);
  EXPECT_EQ(std::memcmp((*tensors)[0].data, "\1\0\0\0\2\0\0\0", 8), 0);
  EXPECT_EQ((*tensors)[1].name, "none");
  EXPECT_EQ((*tensors)[1].num_elements(), 0);
  EXPECT_EQ((*tensors)[2].name, "b");
  EXPECT_THAT((*tensors)[2].shape, ElementsAre(2, 3));
  EXPECT_EQ((*tensors)[2].bytes, 12u);
  EXPECT_EQ((*tensors)[2].file, "shard.safetensors");
  EXPECT_EQ((*tensors)[3].num_elements(), 1);
}

TEST(ParseSafetensors, RefusesWhatIsTooShort) {
  EXPECT_EQ(Parse("").status().code(), absl::StatusCode::kDataLoss);
  EXPECT_THAT(std::string(Parse("1234567").status().message()),
              AllOf(HasSubstr("shard.safetensors"), HasSubstr("too short")));
}

TEST(ParseSafetensors, RefusesHeaderLengths) {
  std::string image = SafetensorsImage("{}", "");
  const uint64_t huge = ~uint64_t{0};
  std::memcpy(image.data(), &huge, sizeof(huge));
  EXPECT_THAT(std::string(Parse(image).status().message()),
              HasSubstr("claims a header of 18446744073709551615"));
  const uint64_t beyond = 3;
  std::memcpy(image.data(), &beyond, sizeof(beyond));
  EXPECT_EQ(Parse(image).status().code(), absl::StatusCode::kDataLoss);
  EXPECT_THAT(std::string(Parse(image).status().message()), HasSubstr("ends inside its header"));
}

struct BadHeader {
  const char* what;
  const char* header;
  size_t data_bytes;
  const char* message;
};

class ParseSafetensorsBad : public ::testing::TestWithParam<BadHeader> {};

TEST_P(ParseSafetensorsBad, SaysWhy) {
  const absl::Status status = ParseStatus(GetParam().header, GetParam().data_bytes);
  ASSERT_FALSE(status.ok());
  EXPECT_THAT(std::string(status.message()),
              AllOf(HasSubstr("shard.safetensors"), HasSubstr(GetParam().message)));
}

INSTANTIATE_TEST_SUITE_P(
    All, ParseSafetensorsBad,
    ::testing::Values(
        BadHeader{"NotJson", "{", 0, "not valid JSON"}, BadHeader{"Empty", "", 0, "not valid JSON"},
        BadHeader{"Array", "[]", 0, "not a JSON object"},
        BadHeader{"BadUtf8", "{\"\xff\":1}", 0, "not valid JSON"},
        BadHeader{"Deep",
                  "{\"a\":[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[", 0,
                  "nests deeper than 64"},
        BadHeader{"Duplicate",
                  R"({"w":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},)"
                  R"("w":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}})",
                  1, "has the key \"w\" twice"},
        BadHeader{"EntryNotObject", R"({"w":3})", 0,
                  "tensor w has a header entry that is not an object"},
        BadHeader{"NoDtype", R"({"w":{"shape":[1],"data_offsets":[0,1]}})", 1,
                  "tensor w has no dtype"},
        BadHeader{"UnknownDtype", R"({"w":{"dtype":"F4","shape":[1],"data_offsets":[0,1]}})", 1,
                  "tensor w has the unknown dtype \"F4\""},
        BadHeader{"NoShape", R"({"w":{"dtype":"U8","data_offsets":[0,1]}})", 1,
                  "tensor w has no shape"},
        BadHeader{"NegativeSize", R"({"w":{"dtype":"U8","shape":[-1],"data_offsets":[0,1]}})", 1,
                  "tensor w has a size in its shape"},
        BadHeader{"FractionalSize", R"({"w":{"dtype":"U8","shape":[1.5],"data_offsets":[0,1]}})", 1,
                  "tensor w has a size in its shape"},
        BadHeader{"Overflow",
                  R"({"w":{"dtype":"F64","shape":[4294967296,4294967296],"data_offsets":[0,0]}})",
                  0, "tensor w has a shape whose byte count overflows"},
        BadHeader{"NoOffsets", R"({"w":{"dtype":"U8","shape":[1]}})", 1,
                  "tensor w has no data_offsets"},
        BadHeader{"ThreeOffsets", R"({"w":{"dtype":"U8","shape":[1],"data_offsets":[0,1,2]}})", 1,
                  "tensor w has no data_offsets"},
        BadHeader{"Descending", R"({"w":{"dtype":"U8","shape":[1],"data_offsets":[1,0]}})", 1,
                  "tensor w has data_offsets that are not two ascending"},
        BadHeader{"HugeOffset",
                  R"({"w":{"dtype":"U8","shape":[1],"data_offsets":[18446744073709551615,0]}})", 1,
                  "tensor w has data_offsets"},
        BadHeader{"ByteCount", R"({"w":{"dtype":"BF16","shape":[3],"data_offsets":[0,4]}})", 4,
                  "tensor w takes 4 bytes in the header, but BF16 [3] takes 6"},
        BadHeader{
            "Truncated", R"({"w":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}})", 3,
            "tensor w ends at byte 4 of the data, but the file holds 3: the file is truncated"},
        BadHeader{"Oversized", R"({"w":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}})", 5,
                  "holds 5 bytes of data, but its header accounts for 4: the file is oversized"},
        BadHeader{"Overlap",
                  R"({"v":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},)"
                  R"("w":{"dtype":"U8","shape":[2],"data_offsets":[1,3]}})",
                  3, "tensor w overlaps tensor v"},
        BadHeader{"Hole",
                  R"({"v":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},)"
                  R"("w":{"dtype":"U8","shape":[1],"data_offsets":[2,3]}})",
                  3, "tensor w begins at byte 2, which leaves a hole after byte 1"}),
    [](const auto& info) { return std::string(info.param.what); });

TensorView View(DType dtype, const void* data, size_t bytes) {
  TensorView view;
  view.name = "w";
  view.file = "shard.safetensors";
  view.dtype = dtype;
  view.shape = {static_cast<int64_t>(bytes / DTypeSize(dtype))};
  view.data = static_cast<const std::byte*>(data);
  view.bytes = bytes;
  return view;
}

TEST(CheckTensor, NamesWhatIsAndWhatWasExpected) {
  const uint16_t values[6] = {};
  TensorView view = View(DType::kBF16, values, sizeof(values));
  view.shape = {2, 3};
  EXPECT_TRUE(CheckTensor(view, {DType::kF32, DType::kBF16}, {2, 3}).ok());
  EXPECT_EQ(CheckTensor(view, {DType::kBF16}, {3, 2}).message(),
            "shard.safetensors: tensor w is BF16 [2,3]; expected BF16 [3,2]");
  EXPECT_EQ(CheckTensor(view, {DType::kI32, DType::kI64}, {2, 3}).message(),
            "shard.safetensors: tensor w is BF16 [2,3]; expected I32 or I64 [2,3]");
  EXPECT_FALSE(CheckTensor(view, {DType::kBF16}, {6}).ok());
}

template <typename Word>
void CheckScan(DType dtype, Word finite, std::initializer_list<Word> bad) {
  std::mt19937 random(7);
  for (const size_t n : {0, 1, 7, 255, 256, 257, 1000, 5000}) {
    // One byte off, so that nothing is aligned.
    std::vector<char> buffer(n * sizeof(Word) + 1);
    const auto put = [&](size_t i, Word value) {
      std::memcpy(buffer.data() + 1 + i * sizeof(Word), &value, sizeof(value));
    };
    for (size_t i = 0; i < n; ++i) put(i, finite);
    const TensorView view = View(dtype, buffer.data() + 1, n * sizeof(Word));
    EXPECT_EQ(FirstNonFinite(view), std::nullopt) << DTypeName(dtype) << " " << n;
    EXPECT_TRUE(CheckFinite(view).ok());
    if (n == 0) continue;
    for (const Word value : bad) {
      const size_t second = random() % n;
      const size_t first = random() % (second + 1);
      put(second, value);
      put(first, value);
      EXPECT_EQ(FirstNonFinite(view), first) << DTypeName(dtype) << " " << n;
      put(second, finite);
      put(first, finite);
    }
  }
}

TEST(FirstNonFinite, FindsTheFirstOne) {
  // The largest finite value of either sign is the hardest to tell from infinity.
  CheckScan<uint16_t>(DType::kBF16, 0xFF7F, {0x7F80, 0xFF80, 0x7FC0, 0xFFFF, 0x7F81});
  CheckScan<uint16_t>(DType::kBF16, 0x7F7F, {0x7F80, 0xFF80});
  CheckScan<uint16_t>(DType::kF16, 0x7BFF, {0x7C00, 0xFC00, 0x7E00});
  CheckScan<uint32_t>(DType::kF32, 0xFF7FFFFF, {0x7F800000, 0xFF800000, 0x7FC00000, 0x7F800001});
  CheckScan<uint64_t>(DType::kF64, 0x7FEFFFFFFFFFFFFF, {0x7FF0000000000000, 0xFFF8000000000000});
  CheckScan<uint8_t>(DType::kF8E4M3, 0xFE, {0x7F, 0xFF});
  CheckScan<uint8_t>(DType::kF8E5M2, 0x7B, {0x7C, 0xFF});
}

TEST(FirstNonFinite, AgreesWithTheLibraryOnAllBf16Values) {
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    const uint16_t value = static_cast<uint16_t>(bits);
    const uint32_t wide = bits << 16;
    float number;
    std::memcpy(&number, &wide, sizeof(number));
    std::vector<uint16_t> values(300, 0x3F80);
    values[17] = value;
    const bool found =
        FirstNonFinite(View(DType::kBF16, values.data(), values.size() * 2)).has_value();
    ASSERT_EQ(found, !std::isfinite(number)) << bits;
  }
}

TEST(FirstNonFinite, IntegersAreFinite) {
  const std::vector<uint32_t> ones(999, ~0u);
  EXPECT_EQ(FirstNonFinite(View(DType::kI32, ones.data(), ones.size() * 4)), std::nullopt);
}

TEST(CheckFinite, NamesTheElement) {
  std::vector<float> values(100, 1.0f);
  values[42] = std::numeric_limits<float>::quiet_NaN();
  const absl::Status status = CheckFinite(View(DType::kF32, values.data(), 400));
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(
      std::string(status.message()),
      HasSubstr("shard.safetensors: tensor w has a value that is not finite (element 42 of 100)"));
}

}  // namespace
}  // namespace coppice
