#include "model/checkpoint.h"

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "model/test_files.h"

namespace coppice {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

// Two shards: a in the first; b and c in the second.
class CheckpointTest : public ::testing::Test {
 protected:
  void SetUp() override {
    dir_.Write("one.safetensors", SafetensorsOf({{"a", {1, 2, 3}}}));
    dir_.Write("two.safetensors", SafetensorsOf({{"b", {4}}, {"c", {5, 6}}}));
    Index(R"("a":"one.safetensors","b":"two.safetensors","c":"two.safetensors")");
  }
  void Index(const std::string& map) {
    dir_.Write("model.safetensors.index.json",
               R"({"metadata":{"total_size":24},"weight_map":{)" + map + "}}");
  }
  absl::Status OpenStatus() { return Checkpoint::Open(dir_.path()).status(); }
  std::string OpenMessage() { return std::string(OpenStatus().message()); }

  TempDir dir_;
};

TEST_F(CheckpointTest, FindsTensorsThroughTheIndex) {
  const auto checkpoint = Checkpoint::Open(dir_.path());
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  EXPECT_THAT((*checkpoint)->names(), ElementsAre("a", "b", "c"));
  EXPECT_EQ((*checkpoint)->total_bytes(), 24u);
  EXPECT_EQ((*checkpoint)->num_files(), 2u);
  const auto c = (*checkpoint)->Find("c");
  ASSERT_TRUE(c.ok());
  EXPECT_THAT(c->shape, ElementsAre(2));
  EXPECT_EQ(c->file, dir_.File("two.safetensors"));
  float values[2];
  std::memcpy(values, c->data, sizeof(values));
  EXPECT_THAT(values, ElementsAre(5, 6));
  EXPECT_TRUE((*checkpoint)->Contains("a"));
  EXPECT_FALSE((*checkpoint)->Contains("d"));
  const absl::Status missing = (*checkpoint)->Find("d").status();
  EXPECT_EQ(missing.code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(std::string(missing.message()),
              AllOf(HasSubstr(dir_.path()), HasSubstr("no tensor d")));
}

TEST_F(CheckpointTest, ReadsASingleFile) {
  TempDir dir;
  dir.Write("model.safetensors", SafetensorsOf({{"z", {1}}, {"y", {2}}}));
  const auto checkpoint = Checkpoint::Open(dir.path());
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  EXPECT_THAT((*checkpoint)->names(), ElementsAre("y", "z"));
}

TEST_F(CheckpointTest, HidesWhatTheIndexDoesNotName) {
  Index(R"("a":"one.safetensors","c":"two.safetensors")");
  const auto checkpoint = Checkpoint::Open(dir_.path());
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  EXPECT_THAT((*checkpoint)->names(), ElementsAre("a", "c"));
}

TEST_F(CheckpointTest, NamesAMissingShard) {
  std::filesystem::remove(dir_.File("two.safetensors"));
  EXPECT_EQ(OpenStatus().code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(OpenMessage(), AllOf(HasSubstr("two.safetensors does not exist"),
                                   HasSubstr("2 tensors"), HasSubstr("shard is missing")));
}

TEST_F(CheckpointTest, NamesATruncatedShard) {
  const std::string image = SafetensorsOf({{"b", {4}}, {"c", {5, 6}}});
  for (size_t length = 0; length < image.size(); ++length) {
    dir_.Write("two.safetensors", image.substr(0, length));
    EXPECT_EQ(OpenStatus().code(), absl::StatusCode::kDataLoss) << length;
    EXPECT_THAT(OpenMessage(), HasSubstr("two.safetensors")) << length;
  }
  dir_.Write("two.safetensors", image.substr(0, image.size() - 1));
  EXPECT_THAT(OpenMessage(), AllOf(HasSubstr("tensor c"), HasSubstr("truncated")));
}

TEST_F(CheckpointTest, NamesAnOversizedShard) {
  dir_.Write("two.safetensors", SafetensorsOf({{"b", {4}}, {"c", {5, 6}}}) + "x");
  EXPECT_EQ(OpenStatus().code(), absl::StatusCode::kDataLoss);
  EXPECT_THAT(OpenMessage(), AllOf(HasSubstr("two.safetensors"), HasSubstr("oversized")));
}

TEST_F(CheckpointTest, NamesATensorThatIsAbsent) {
  Index(R"("a":"one.safetensors","d":"two.safetensors")");
  EXPECT_EQ(OpenStatus().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(OpenMessage(), AllOf(HasSubstr("index.json names tensor d"),
                                   HasSubstr("two.safetensors has no such tensor")));
}

TEST_F(CheckpointTest, NamesATensorThatIsInAnotherShard) {
  Index(R"("a":"two.safetensors","b":"one.safetensors","c":"two.safetensors")");
  EXPECT_EQ(OpenStatus().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(OpenMessage(),
              HasSubstr("places tensor b in one.safetensors, but it is in two.safetensors"));
}

TEST_F(CheckpointTest, RefusesFilesOutsideTheDirectory) {
  for (const char* name :
       {"../one.safetensors", "/etc/passwd", "sub/one.safetensors", "..", ".", ""}) {
    Index(std::string(R"("a":")") + name + "\"");
    EXPECT_EQ(OpenStatus().code(), absl::StatusCode::kInvalidArgument) << name;
    EXPECT_THAT(OpenMessage(), AllOf(HasSubstr("tensor a"), HasSubstr("beside the index"))) << name;
  }
}

TEST_F(CheckpointTest, RefusesABadIndex) {
  const struct {
    const char* text;
    const char* message;
  } cases[] = {
      {"", "not valid JSON"},
      {"[]", "not a JSON object"},
      {"{}", "has no weight_map"},
      {R"({"weight_map":[]})", "has no weight_map"},
      {R"({"weight_map":{}})", "has no weight_map"},
      {R"({"weight_map":{"a":1}})", "names no file for tensor a"},
      {R"({"weight_map":{"a":"one.safetensors","a":"two.safetensors"}})",
       "has the key \"a\" twice"},
  };
  for (const auto& [text, message] : cases) {
    dir_.Write("model.safetensors.index.json", text);
    EXPECT_EQ(OpenStatus().code(), absl::StatusCode::kInvalidArgument) << text;
    EXPECT_THAT(OpenMessage(),
                AllOf(HasSubstr("model.safetensors.index.json"), HasSubstr(message)));
  }
}

TEST_F(CheckpointTest, SaysWhereThereIsNoCheckpoint) {
  TempDir empty;
  EXPECT_THAT(Checkpoint::Open(empty.path()).status().ToString(),
              AllOf(HasSubstr("NOT_FOUND"), HasSubstr(empty.path()), HasSubstr("no checkpoint")));
  EXPECT_EQ(Checkpoint::Open(empty.File("absent")).status().code(), absl::StatusCode::kNotFound);
}

TEST_F(CheckpointTest, RefusesAShardThatIsADirectory) {
  std::filesystem::remove(dir_.File("two.safetensors"));
  std::filesystem::create_directory(dir_.File("two.safetensors"));
  EXPECT_THAT(OpenMessage(), HasSubstr("two.safetensors is not a regular file"));
}

}  // namespace
}  // namespace coppice
