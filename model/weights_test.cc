// Broken checkpoints, one fault at a time, as an operator meets them: through Target::Load and
// Drafter::Load.
#include "model/weights.h"

#include <cmath>
#include <filesystem>
#include <limits>
#include <map>
#include <numeric>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "model/drafter.h"
#include "model/golden_files.h"
#include "model/target.h"
#include "nlohmann/json.hpp"

namespace coppice {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr char kModel[] = "tests/goldens/models/int4";
constexpr char kDrafter[] = "tests/goldens/models/int4/drafter";
constexpr char kLayer1[] = "language_model.model.layers.1.";

struct EditableTensor {
  std::string dtype;
  std::vector<int64_t> shape;
  std::string bytes;
};

// A checkpoint in memory, to be changed and written as one file.
class EditableCheckpoint {
 public:
  explicit EditableCheckpoint(const std::string& dir) : dir_(dir) {
    const auto checkpoint = Checkpoint::Open(dir).value();
    for (const TensorView& t : checkpoint->tensors()) {
      tensors[t.name] = {DTypeName(t.dtype), t.shape,
                         std::string(reinterpret_cast<const char*>(t.data), t.bytes)};
    }
  }

  // The config is the original's.
  void Write(const TempDir& to) const {
    nlohmann::json header;
    std::string data;
    for (const auto& [name, tensor] : tensors) {
      header[name] = {{"dtype", tensor.dtype},
                      {"shape", tensor.shape},
                      {"data_offsets", {data.size(), data.size() + tensor.bytes.size()}}};
      data += tensor.bytes;
    }
    to.Write("model.safetensors", SafetensorsImage(header.dump(), data));
    to.Write("config.json", ReadTestFile(dir_ + "/config.json"));
  }

  EditableTensor& operator[](const std::string& name) {
    EXPECT_TRUE(tensors.count(name)) << name;
    return tensors[name];
  }

  std::map<std::string, EditableTensor> tensors;

 private:
  std::string dir_;
};

// Sets element `i` of a BF16 or F32 tensor.
void SetBf16(EditableTensor& tensor, size_t i, uint16_t bits) {
  ASSERT_EQ(tensor.dtype, "BF16");
  std::memcpy(tensor.bytes.data() + 2 * i, &bits, 2);
}
void SetF32(EditableTensor& tensor, size_t i, float value) {
  ASSERT_EQ(tensor.dtype, "F32");
  std::memcpy(tensor.bytes.data() + 4 * i, &value, 4);
}
constexpr uint16_t kNanBf16 = 0x7FC0;
constexpr uint16_t kInfBf16 = 0x7F80;

float FromBf16(uint16_t bits) {
  const uint32_t word = static_cast<uint32_t>(bits) << 16;
  float value;
  std::memcpy(&value, &word, 4);
  return value;
}
uint16_t ToBf16(float value) {  // to nearest even
  uint32_t word;
  std::memcpy(&word, &value, 4);
  return static_cast<uint16_t>((word + 0x7FFF + ((word >> 16) & 1)) >> 16);
}

absl::StatusOr<std::unique_ptr<Target>> LoadTarget(const std::string& dir,
                                                   const std::string& drafter = "", int tp = 1) {
  return Target::Load({.model_dir = dir,
                       .drafter_dir = drafter,
                       .tp = tp,
                       .page_size = 64,
                       .pages = 4,
                       .max_rows = 64,
                       .progress = nullptr});
}

absl::Status LoadEdited(const EditableCheckpoint& checkpoint, int tp = 1) {
  TempDir dir;
  checkpoint.Write(dir);
  return LoadTarget(dir.path(), "", tp).status();
}

absl::StatusOr<std::unique_ptr<Drafter>> LoadDrafter(const std::string& dir) {
  return Drafter::Load(
      {.drafter_dir = dir, .target_dir = kModel, .tp = 1, .slots = 1, .window = 16});
}

std::vector<float> Logits(Target& target) {
  std::vector<int32_t> tokens(20);
  std::iota(tokens.begin(), tokens.end(), 40);
  const std::vector<int32_t> pages = {1};
  std::vector<int32_t> rows(tokens.size());
  std::iota(rows.begin(), rows.end(), 0);
  ForwardResult result;
  const absl::Status status = target.Forward({{{.context_len = 0,
                                                .tokens = tokens,
                                                .depths = {},
                                                .ancestors = {},
                                                .page_table = pages,
                                                .logit_rows = rows}}},
                                             &result);
  EXPECT_TRUE(status.ok()) << status;
  return result.logits;
}

class BrokenTarget : public ::testing::Test {
 protected:
  EditableCheckpoint checkpoint_{kModel};
};

TEST_F(BrokenTarget, UnchangedLoads) { EXPECT_TRUE(LoadEdited(checkpoint_).ok()); }

TEST_F(BrokenTarget, EveryMissingTensorIsNamed) {
  for (const char* name :
       {"model.embed_tokens.weight", "lm_head.weight", "model.norm.weight",
        "model.layers.0.input_layernorm.weight", "model.layers.0.post_attention_layernorm.weight",
        "model.layers.0.mlp.gate_proj.weight", "model.layers.0.mlp.down_proj.weight",
        "model.layers.1.self_attn.q_a_proj.weight", "model.layers.1.self_attn.q_a_layernorm.weight",
        "model.layers.1.self_attn.q_b_proj.weight",
        "model.layers.1.self_attn.kv_a_proj_with_mqa.weight",
        "model.layers.1.self_attn.kv_a_layernorm.weight",
        "model.layers.1.self_attn.kv_b_proj.weight", "model.layers.1.self_attn.o_proj.weight",
        "model.layers.2.mlp.gate.weight", "model.layers.2.mlp.gate.e_score_correction_bias",
        "model.layers.2.mlp.experts.15.down_proj.weight_packed",
        "model.layers.2.mlp.experts.3.up_proj.weight_scale",
        "model.layers.2.mlp.shared_experts.up_proj.weight"}) {
    EditableCheckpoint broken = checkpoint_;
    ASSERT_EQ(broken.tensors.erase(absl::StrCat("language_model.", name)), 1u) << name;
    TempDir dir;
    broken.Write(dir);
    const absl::Status status = LoadTarget(dir.path()).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kNotFound) << status;
    // Where the packed form is missing, either name would do.
    std::string named = name;
    if (named.ends_with("_packed")) named.resize(named.size() - 7);
    EXPECT_THAT(std::string(status.message()), AllOf(HasSubstr(named), HasSubstr(dir.path())));
  }
}

TEST_F(BrokenTarget, WrongShapeNamesFileTensorAndBothShapes) {
  EditableTensor& tensor = checkpoint_[absl::StrCat(kLayer1, "self_attn.kv_b_proj.weight")];
  std::swap(tensor.shape[0], tensor.shape[1]);
  const absl::Status status = LoadEdited(checkpoint_);
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()), AllOf(HasSubstr("model.safetensors"),
                                                   HasSubstr("layers.1.self_attn.kv_b_proj.weight"),
                                                   HasSubstr("[64,256]"), HasSubstr("[256,64]")));
}

TEST_F(BrokenTarget, WrongShapesOfPackedTensors) {
  const std::string expert = absl::StrCat(kLayer1, "mlp.experts.2.gate_proj.");
  for (const char* part : {"weight_packed", "weight_scale"}) {
    EditableCheckpoint broken = checkpoint_;
    EditableTensor& tensor = broken[expert + part];
    tensor.shape = {tensor.shape[0] / 2, tensor.shape[1] * 2};
    const absl::Status status = LoadEdited(broken);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(status.message()), HasSubstr(expert + part));
  }
}

TEST_F(BrokenTarget, WrongDtype) {
  for (const auto& [name, dtype] : {std::pair{"self_attn.o_proj.weight", "F16"},
                                    {"input_layernorm.weight", "F16"},
                                    {"mlp.experts.0.up_proj.weight_scale", "F16"},
                                    {"mlp.experts.0.up_proj.weight_packed", "F32"},
                                    {"mlp.gate.e_score_correction_bias", "I32"}}) {
    EditableCheckpoint broken = checkpoint_;
    broken[absl::StrCat(kLayer1, name)].dtype = dtype;
    const absl::Status status = LoadEdited(broken);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(status.message()), AllOf(HasSubstr(name), HasSubstr(dtype)));
  }
  EditableTensor& embedding = checkpoint_["language_model.model.embed_tokens.weight"];
  embedding.dtype = "F32";
  embedding.bytes.resize(embedding.bytes.size() * 2);
  EXPECT_THAT(std::string(LoadEdited(checkpoint_).message()),
              AllOf(HasSubstr("embed_tokens"), HasSubstr("expected BF16")));
}

TEST_F(BrokenTarget, ValuesThatAreNotFinite) {
  const std::string layer = kLayer1;
  const struct {
    std::string name;
    bool bf16;
  } cases[] = {{layer + "mlp.experts.7.down_proj.weight_scale", true},
               {layer + "mlp.shared_experts.gate_proj.weight", true},
               {layer + "self_attn.kv_b_proj.weight", true},
               {layer + "self_attn.q_a_layernorm.weight", true},
               {layer + "mlp.gate.e_score_correction_bias", false},
               {"language_model.model.embed_tokens.weight", true},
               {"language_model.lm_head.weight", true},
               {"language_model.model.norm.weight", true}};
  for (const auto& [name, bf16] : cases) {
    for (const bool nan : {true, false}) {
      EditableCheckpoint broken = checkpoint_;
      EditableTensor& tensor = broken[name];
      const size_t last = tensor.bytes.size() / (bf16 ? 2 : 4) - 1;
      if (bf16) {
        SetBf16(tensor, last, nan ? kNanBf16 : kInfBf16);
      } else {
        SetF32(tensor, last, nan ? NAN : INFINITY);
      }
      for (const int tp : {1, 4}) {
        const absl::Status status = LoadEdited(broken, tp);
        EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << name;
        EXPECT_THAT(std::string(status.message()),
                    AllOf(HasSubstr("model.safetensors"), HasSubstr(name)));
      }
    }
  }
}

TEST_F(BrokenTarget, WeightShapeMustAgree) {
  const std::string name = absl::StrCat(kLayer1, "mlp.experts.4.down_proj.weight_shape");
  const int32_t wrong[2] = {64, 32};
  checkpoint_[name].bytes = std::string(reinterpret_cast<const char*>(wrong), sizeof(wrong));
  EXPECT_THAT(std::string(LoadEdited(checkpoint_).message()),
              AllOf(HasSubstr(name), HasSubstr("[64, 32]"), HasSubstr("expected [64, 64]")));
  // compressed-tensors itself writes 64-bit shapes, and nothing needs them.
  const int64_t wide[2] = {64, 64};
  checkpoint_[name] = {"I64", {2}, std::string(reinterpret_cast<const char*>(wide), sizeof(wide))};
  EXPECT_TRUE(LoadEdited(checkpoint_).ok());
  checkpoint_.tensors.erase(name);
  EXPECT_TRUE(LoadEdited(checkpoint_).ok());
}

TEST_F(BrokenTarget, AWeightStoredTwice) {
  checkpoint_.tensors[absl::StrCat(kLayer1, "mlp.experts.4.down_proj.weight")] = {
      "BF16", {64, 64}, std::string(64 * 64 * 2, '\0')};
  EXPECT_THAT(std::string(LoadEdited(checkpoint_).message()),
              AllOf(HasSubstr("experts.4.down_proj.weight"), HasSubstr("stored once")));
}

// Replaces the packed weight `name` by what it stands for in bf16.
void Unpack(EditableCheckpoint& checkpoint, const std::string& name) {
  const EditableTensor packed = checkpoint[name + ".weight_packed"];
  const EditableTensor scales = checkpoint[name + ".weight_scale"];
  const int64_t rows = packed.shape[0];
  const int64_t cols = packed.shape[1] * 8;
  EditableTensor plain{"BF16", {rows, cols}, std::string(rows * cols * 2, '\0')};
  for (int64_t i = 0; i < rows * cols; ++i) {
    uint32_t word;
    uint16_t scale;
    std::memcpy(&word, packed.bytes.data() + i / 8 * 4, 4);
    std::memcpy(&scale, scales.bytes.data() + i / 32 * 2, 2);
    const int code = static_cast<int>((word >> (4 * (i % 8))) & 15) - 8;
    SetBf16(plain, i, ToBf16(static_cast<float>(code) * FromBf16(scale)));
  }
  for (const char* part : {".weight_packed", ".weight_scale", ".weight_shape"}) {
    checkpoint.tensors.erase(name + part);
  }
  checkpoint.tensors[name + ".weight"] = plain;
}

// The form of each tensor is decided by what is there, and the forms agree to the bit.
TEST_F(BrokenTarget, PackedAndPlainExpertsMayMix) {
  const std::vector<float> expected = Logits(**LoadTarget(kModel));
  for (int expert = 0; expert < 16; expert += 2) {
    const std::string name = absl::StrCat(kLayer1, "mlp.experts.", expert, ".");
    Unpack(checkpoint_, name + "gate_proj");
    Unpack(checkpoint_, name + "up_proj");
    if (expert % 4 == 0) Unpack(checkpoint_, name + "down_proj");
  }
  TempDir dir;
  checkpoint_.Write(dir);
  for (const int tp : {1, 8}) {
    const auto target = LoadTarget(dir.path(), "", tp);
    ASSERT_TRUE(target.ok()) << target.status();
    EXPECT_EQ(Logits(**target), expected) << "tp " << tp;
  }
  Unpack(checkpoint_, absl::StrCat(kLayer1, "mlp.experts.1.gate_proj"));
  EXPECT_THAT(std::string(LoadEdited(checkpoint_).message()),
              AllOf(HasSubstr("experts.1.gate_proj"), HasSubstr("stored differently")));
}

TEST_F(BrokenTarget, Fp32WeightsGiveTheSameBits) {
  const std::vector<float> expected = Logits(**LoadTarget(kModel));
  for (auto& [name, tensor] : checkpoint_.tensors) {
    if (tensor.dtype != "BF16" || name.ends_with("weight_scale") ||
        name.ends_with("embed_tokens.weight")) {
      continue;
    }
    std::string wide(tensor.bytes.size() * 2, '\0');
    for (size_t i = 0; i < tensor.bytes.size() / 2; ++i) {
      std::memcpy(wide.data() + 4 * i + 2, tensor.bytes.data() + 2 * i, 2);
    }
    tensor.dtype = "F32";
    tensor.bytes = wide;
  }
  TempDir dir;
  checkpoint_.Write(dir);
  const auto target = LoadTarget(dir.path());
  ASSERT_TRUE(target.ok()) << target.status();
  EXPECT_EQ(Logits(**target), expected);
}

// A tensor of odd length in front puts every bf16 value at an odd address.
TEST_F(BrokenTarget, OddAddresses) {
  const std::vector<float> expected = Logits(**LoadTarget(kModel));
  checkpoint_.tensors["a"] = {"U8", {1}, std::string(1, '\0')};
  TempDir dir;
  checkpoint_.Write(dir);
  const auto target = LoadTarget(dir.path());
  ASSERT_TRUE(target.ok()) << target.status();
  EXPECT_EQ(Logits(**target), expected);
}

TEST_F(BrokenTarget, BrokenShards) {
  const auto status_after = [](const std::function<void(const std::string&)>& damage) {
    TempDir dir;
    for (const auto& file : std::filesystem::directory_iterator(kModel)) {
      if (file.is_regular_file()) {
        std::filesystem::copy(file.path(), dir.File(file.path().filename().string()));
      }
    }
    const std::string shard = dir.File("model-00002-of-00002.safetensors");
    std::filesystem::permissions(shard, std::filesystem::perms::owner_all);
    damage(shard);
    return LoadTarget(dir.path()).status();
  };
  EXPECT_TRUE(status_after([](const std::string&) {}).ok());
  EXPECT_THAT(std::string(status_after([](const std::string& shard) {
                            std::filesystem::remove(shard);
                          }).message()),
              HasSubstr("model-00002-of-00002.safetensors"));
  for (const int change : {-1, +1}) {
    EXPECT_THAT(std::string(status_after([change](const std::string& shard) {
                              std::filesystem::resize_file(
                                  shard, std::filesystem::file_size(shard) + change);
                            }).message()),
                HasSubstr("model-00002-of-00002.safetensors"));
  }
}

TEST(Ranks, WhatCannotBeShared) {
  ModelConfig config = LoadModelConfig(kModel).value();
  for (const int tp : {1, 2, 4, 8}) EXPECT_TRUE(CheckTargetRanks(config, tp).ok());
  const auto message = [](const absl::Status& status) {
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    return std::string(status.message());
  };
  for (const int tp : {-1, 0, 3, 16}) {
    EXPECT_THAT(message(CheckTargetRanks(config, tp)), HasSubstr("must be 1, 2, 4 or 8"));
  }
  ModelConfig bad = config;
  bad.num_attention_heads = 12;
  EXPECT_TRUE(CheckTargetRanks(bad, 4).ok());
  EXPECT_THAT(message(CheckTargetRanks(bad, 8)),
              HasSubstr("num_attention_heads is 12, which 8 does not divide"));
  bad = config;
  bad.vocab_size = 257;
  EXPECT_THAT(message(CheckTargetRanks(bad, 2)), HasSubstr("vocab_size is 257"));
  bad = config;
  bad.moe_intermediate_size = 36;
  EXPECT_THAT(message(CheckTargetRanks(bad, 1)), HasSubstr("moe_intermediate_size is 36"));
  bad = config;
  bad.intermediate_size = 100;
  EXPECT_THAT(message(CheckTargetRanks(bad, 1)), HasSubstr("intermediate_size is 100"));

  DraftConfig draft = LoadDraftConfig(kDrafter).value();
  for (const int tp : {1, 2, 4, 8}) EXPECT_TRUE(CheckDraftRanks(draft, tp).ok());
  DraftConfig bad_draft = draft;
  bad_draft.num_attention_heads = 4;
  EXPECT_THAT(message(CheckDraftRanks(bad_draft, 8)),
              HasSubstr("num_attention_heads of the drafter is 4"));
  bad_draft = draft;
  bad_draft.num_attention_heads = 24;
  bad_draft.num_key_value_heads = 3;
  EXPECT_THAT(message(CheckDraftRanks(bad_draft, 8)), HasSubstr("num_key_value_heads"));
  bad_draft = draft;
  bad_draft.intermediate_size = 90;
  EXPECT_THAT(message(CheckDraftRanks(bad_draft, 1)),
              HasSubstr("intermediate_size of the drafter"));
}

constexpr char kFp8Model[] = "tests/goldens/models/instruct";

class BrokenFp8 : public ::testing::Test {
 protected:
  EditableCheckpoint checkpoint_{kFp8Model};
};

TEST_F(BrokenFp8, ScalesAreMissingMisshapenOrOfAnotherDtype) {
  for (const char* name :
       {"model.layers.1.self_attn.kv_a_proj_with_mqa.weight", "model.layers.0.mlp.up_proj.weight",
        "model.layers.1.mlp.experts.3.down_proj.weight"}) {
    const std::string scales = absl::StrCat(name, "_scale_inv");
    EditableCheckpoint broken = checkpoint_;
    broken.tensors.erase(scales);
    EXPECT_THAT(std::string(LoadEdited(broken).message()), HasSubstr(scales));
    broken = checkpoint_;
    std::swap(broken[scales].shape[0], broken[scales].shape[1]);
    broken[scales].shape.push_back(1);
    EXPECT_THAT(std::string(LoadEdited(broken).message()),
                AllOf(HasSubstr(scales), HasSubstr("expected F32 [")));
    broken = checkpoint_;
    broken[scales].dtype = "I32";
    EXPECT_THAT(std::string(LoadEdited(broken).message()),
                AllOf(HasSubstr(scales), HasSubstr("I32")));
  }
}

// Blocks of a matrix whose rows are no multiple of 128: [80, 136] has [1, 2] of them.
TEST_F(BrokenFp8, RaggedBlocksAreRoundedUp) {
  EXPECT_EQ(checkpoint_["model.layers.1.self_attn.kv_a_proj_with_mqa.weight_scale_inv"].shape,
            (std::vector<int64_t>{1, 2}));
  EXPECT_EQ(checkpoint_["model.layers.0.mlp.gate_proj.weight_scale_inv"].shape,
            (std::vector<int64_t>{2, 2}));
}

TEST_F(BrokenFp8, ValuesThatAreNotFinite) {
  const std::string weight = "model.layers.1.mlp.experts.5.up_proj.weight";
  for (const char nan : {'\x7F', '\xFF'}) {
    EditableCheckpoint broken = checkpoint_;
    broken[weight].bytes.back() = nan;
    EXPECT_THAT(std::string(LoadEdited(broken, 2).message()),
                AllOf(HasSubstr(weight), HasSubstr("not finite")));
  }
  for (const float scale : {NAN, INFINITY, 1e37f, -1e37f}) {
    EditableCheckpoint broken = checkpoint_;
    SetF32(broken[weight + "_scale_inv"], 1, scale);
    EXPECT_THAT(std::string(LoadEdited(broken, 2).message()), HasSubstr(weight + "_scale_inv"));
  }
}

// The values of E4M3, each as bf16: decoding is checked against an independent reading of the bits.
TEST_F(BrokenFp8, DecodesEveryValue) {
  std::string codes(256, '\0');
  for (int i = 0; i < 256; ++i) codes[i] = static_cast<char>(i);
  const float scales[2] = {0.37f, -3.0f};
  CheckpointMatrix matrix{.rows = 1, .cols = 256, .weight = {}, .scales = TensorView()};
  matrix.weight.dtype = DType::kF8E4M3;
  matrix.weight.data = reinterpret_cast<const std::byte*>(codes.data());
  matrix.scales->data = reinterpret_cast<const std::byte*>(scales);
  ASSERT_EQ(matrix.form(), CheckpointMatrix::Form::kFp8);
  const MatrixPart part = matrix.Part(0, 1, 3, 250);
  ASSERT_EQ(part.decoded->size(), 250u);
  for (int i = 3; i < 253; ++i) {
    if ((i & 127) == 127) continue;  // NaN
    const int exponent = i >> 3 & 15;
    const double magnitude =
        exponent == 0 ? (i & 7) / 512.0 : (1 + (i & 7) / 8.0) * std::pow(2.0, exponent - 7);
    const float value = static_cast<float>(i >= 128 ? -magnitude : magnitude);
    EXPECT_EQ((*part.decoded)[i - 3], ToBf16(value * scales[i / 128])) << i;
  }
}

TEST_F(BrokenFp8, AScaleBesideAWeightThatNeedsNone) {
  const std::string name = "model.layers.1.mlp.gate.weight";
  checkpoint_.tensors[name + "_scale_inv"] = {"F32", {1, 2}, std::string(8, '\0')};
  EXPECT_THAT(std::string(LoadEdited(checkpoint_).message()),
              AllOf(HasSubstr(name), HasSubstr("is BF16, but there is a"),
                    HasSubstr("not known whether it was applied")));
}

TEST_F(BrokenTarget, ScalesBeyondBf16) {
  const std::string name = absl::StrCat(kLayer1, "mlp.experts.7.down_proj.weight_scale");
  SetBf16(checkpoint_[name], 3, 0x7F7F);
  EXPECT_THAT(std::string(LoadEdited(checkpoint_).message()),
              AllOf(HasSubstr(name), HasSubstr("element 3 of 128")));
}

TEST(LoraNormEps, IsASettingThatTheFingerprintSees) {
  TargetOptions options{.model_dir = "tests/goldens/models/experts384",
                        .drafter_dir = "",
                        .tp = 1,
                        .page_size = 64,
                        .pages = 4,
                        .max_rows = 64,
                        .progress = nullptr};
  const auto engines = Target::Load(options);
  options.lora_norm_eps = 1e-6;
  const auto transformers = Target::Load(options);
  ASSERT_TRUE(engines.ok() && transformers.ok());
  EXPECT_EQ((*engines)->config().lora_norm_eps, 1e-3);
  EXPECT_EQ((*transformers)->config().lora_norm_eps, 1e-6);
  EXPECT_NE((*engines)->fingerprint(), (*transformers)->fingerprint());
  EXPECT_NE(Logits(**engines), Logits(**transformers));
  for (const double bad : {0.0, -1.0, 2.0, static_cast<double>(NAN)}) {
    options.lora_norm_eps = bad;
    EXPECT_THAT(std::string(Target::Load(options).status().message()), HasSubstr("lora_norm_eps"));
  }
}

class BrokenDrafter : public ::testing::Test {
 protected:
  EditableCheckpoint checkpoint_{kDrafter};
};

TEST_F(BrokenDrafter, EveryMissingTensorIsNamed) {
  for (const auto& [name, tensor] : checkpoint_.tensors) {
    EditableCheckpoint broken = checkpoint_;
    broken.tensors.erase(name);
    TempDir dir;
    broken.Write(dir);
    const absl::Status status = LoadDrafter(dir.path()).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kNotFound) << status;
    EXPECT_THAT(std::string(status.message()), AllOf(HasSubstr(name), HasSubstr(dir.path())));
  }
}

TEST_F(BrokenDrafter, FcOfAnotherNumberOfTaps) {
  EditableTensor& fc = checkpoint_["fc.weight"];
  fc.shape[1] *= 2;
  fc.bytes.resize(fc.bytes.size() * 2);
  TempDir dir;
  checkpoint_.Write(dir);
  // The target refuses it as the drafter does.
  for (const absl::Status& status :
       {LoadDrafter(dir.path()).status(), LoadTarget(kModel, dir.path()).status()}) {
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(status.message()),
                AllOf(HasSubstr("fc.weight"), HasSubstr("256"), HasSubstr("[64,128]")));
  }
}

TEST_F(BrokenDrafter, ValuesThatAreNotFinite) {
  for (const char* name : {"fc.weight", "hidden_norm.weight"}) {
    EditableCheckpoint broken = checkpoint_;
    SetBf16(broken[name], 5, kNanBf16);
    TempDir dir;
    broken.Write(dir);
    EXPECT_THAT(std::string(LoadTarget(kModel, dir.path()).status().message()), HasSubstr(name));
  }
  for (const char* name : {"layers.1.self_attn.k_norm.weight", "layers.0.mlp.down_proj.weight",
                           "norm.weight", "layers.0.self_attn.v_proj.weight"}) {
    EditableCheckpoint broken = checkpoint_;
    SetBf16(broken[name], 5, kInfBf16);
    TempDir dir;
    broken.Write(dir);
    EXPECT_THAT(std::string(LoadDrafter(dir.path()).status().message()), HasSubstr(name));
  }
}

TEST_F(BrokenDrafter, NamesMayBeginWithModel) {
  EditableCheckpoint renamed = checkpoint_;
  renamed.tensors.clear();
  for (const auto& [name, tensor] : checkpoint_.tensors) renamed.tensors["model." + name] = tensor;
  TempDir dir;
  renamed.Write(dir);
  const auto drafter = LoadDrafter(dir.path());
  ASSERT_TRUE(drafter.ok()) << drafter.status();
  EXPECT_EQ((*drafter)->drafter_fingerprint(), (*LoadDrafter(kDrafter))->drafter_fingerprint());
}

TEST_F(BrokenDrafter, FingerprintSeesFcAndTaps) {
  const uint64_t original = (*LoadDrafter(kDrafter))->drafter_fingerprint();
  EditableCheckpoint other = checkpoint_;
  SetBf16(other["fc.weight"], 0, 0x3F80);
  TempDir dir;
  other.Write(dir);
  EXPECT_NE((*LoadDrafter(dir.path()))->drafter_fingerprint(), original);
  TempDir swapped;
  checkpoint_.Write(swapped);
  nlohmann::json config = nlohmann::json::parse(ReadTestFile(swapped.File("config.json")));
  config["dflash_config"]["target_layer_ids"] = {2, 0};
  swapped.Write("config.json", config.dump());
  EXPECT_NE((*LoadDrafter(swapped.path()))->drafter_fingerprint(), original);
  config["dflash_config"]["target_layer_ids"] = {0, 3};
  swapped.Write("config.json", config.dump());
  EXPECT_THAT(std::string(LoadDrafter(swapped.path()).status().message()),
              HasSubstr("target_layer_ids"));
}

}  // namespace
}  // namespace coppice
