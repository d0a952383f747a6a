// The shipped pair, models/demo, read as a user's checkpoint is.
#include "gtest/gtest.h"
#include "model/checkpoint.h"
#include "model/config.h"
#include "model/tokenizer.h"

namespace coppice {
namespace {

constexpr char kTarget[] = "models/demo";
constexpr char kDrafter[] = "models/demo/drafter";

TEST(DemoPair, ConfigurationsBelongTogether) {
  const auto model = LoadModelConfig(kTarget);
  ASSERT_TRUE(model.ok()) << model.status();
  const auto draft = LoadDraftConfig(kDrafter);
  ASSERT_TRUE(draft.ok()) << draft.status();
  EXPECT_TRUE(CheckDraftMatchesModel(*draft, *model, kDrafter).ok());
  const auto tokenizer = Tokenizer::Load(kTarget, model->vocab_size);
  ASSERT_TRUE(tokenizer.ok()) << tokenizer.status();
  // The ids that end a generation are control tokens; <think> and </think> are text.
  for (const int32_t id : model->eos_token_ids) EXPECT_TRUE((*tokenizer)->IsControl(id)) << id;
  ASSERT_TRUE((*tokenizer)->IdOf("</think>").has_value());
  EXPECT_FALSE((*tokenizer)->IsControl(*(*tokenizer)->IdOf("</think>")));
}

TEST(DemoPair, TensorsAreFinite) {
  for (const char* dir : {kTarget, kDrafter}) {
    const auto checkpoint = Checkpoint::Open(dir);
    ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
    for (const TensorView& tensor : (*checkpoint)->tensors()) {
      const absl::Status status = CheckFinite(tensor);
      EXPECT_TRUE(status.ok()) << status;
    }
  }
}

TEST(DemoPair, TargetHasKimisTensors) {
  const auto model = LoadModelConfig(kTarget);
  ASSERT_TRUE(model.ok()) << model.status();
  const auto checkpoint = Checkpoint::Open(kTarget);
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  const auto check = [&](const std::string& name, DType dtype, std::vector<int64_t> shape) {
    const auto tensor = (*checkpoint)->Find(model->tensor_prefix + name);
    ASSERT_TRUE(tensor.ok()) << tensor.status();
    const absl::Status status = CheckTensor(*tensor, {dtype}, shape);
    EXPECT_TRUE(status.ok()) << status;
  };
  EXPECT_EQ(model->tensor_prefix, "language_model.");
  check("model.embed_tokens.weight", DType::kBF16, {model->vocab_size, model->hidden_size});
  check("lm_head.weight", DType::kBF16, {model->vocab_size, model->hidden_size});
  const std::string mlp = "model.layers." + std::to_string(model->num_hidden_layers - 1) + ".mlp.";
  check(mlp + "gate.e_score_correction_bias", DType::kF32, {model->n_routed_experts});
  check(mlp + "experts.0.down_proj.weight_packed", DType::kI32,
        {model->hidden_size, model->moe_intermediate_size / 8});
  check(mlp + "experts.0.down_proj.weight_scale", DType::kBF16,
        {model->hidden_size, model->moe_intermediate_size / model->expert_group_size});
}

}  // namespace
}  // namespace coppice
