// From a checkpoint's tensors to the weights that one rank computes with.
//
// Two steps.  Find… resolves every tensor that a model needs and checks presence, dtype and shape,
// from headers alone.  Load… slices those tensors for one rank and hands them to the backend;
// between them the ranks also look at every floating-point value once and refuse NaN and infinity.
// Errors name file and tensor.
#ifndef COPPICE_MODEL_WEIGHTS_H_
#define COPPICE_MODEL_WEIGHTS_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/ops.h"
#include "model/checkpoint.h"
#include "model/config.h"

namespace coppice {

// ---- In the files

// A rectangle of a weight, ready for Ops::Prepare.  It points into the file's mapping or, where the
// file's form is none that backends multiply, into `decoded`, which copies share.
struct MatrixPart {
  kernels::HostMatrix matrix;
  std::shared_ptr<const std::vector<uint16_t>> decoded;
};

// A weight matrix [rows, cols] as the files hold it.  The tensors that are there decide the form,
// tensor by tensor; no pattern of quantization_config is evaluated.
struct CheckpointMatrix {
  enum class Form {
    kBf16,
    kF32,
    kInt4,  // pack-quantized, with one bf16 scale per 32 inputs
    kFp8,   // E4M3 with one fp32 scale per block of 128 x 128, which the value is multiplied by
  };
  int64_t rows = 0;
  int64_t cols = 0;
  TensorView weight;                 // NAME.weight or NAME.weight_packed
  std::optional<TensorView> scales;  // NAME.weight_scale (kInt4) or NAME.weight_scale_inv (kFp8)

  Form form() const;
  // The rectangle of `row_count` × `col_count` elements from (row, col).  FP8 is decoded to bf16
  // here (value * scale in fp32, rounded to nearest even, as the reference dequantises), so it
  // costs two bytes an element for as long as the part lives.
  MatrixPart Part(int64_t row, int64_t row_count, int64_t col, int64_t col_count) const;
  MatrixPart Whole() const { return Part(0, rows, 0, cols); }
};

struct MlpTensors {
  CheckpointMatrix gate;
  CheckpointMatrix up;
  CheckpointMatrix down;
};

struct TargetLayerTensors {
  TensorView input_norm;
  CheckpointMatrix q_a;
  TensorView q_a_norm;
  CheckpointMatrix q_b;
  CheckpointMatrix kv_a;
  TensorView kv_a_norm;
  CheckpointMatrix kv_b;
  CheckpointMatrix o;
  TensorView post_norm;
  // A dense layer has `dense`; a mixture-of-experts layer has the others.
  std::optional<MlpTensors> dense;
  std::optional<CheckpointMatrix> router;
  std::optional<TensorView> router_bias;
  std::vector<MlpTensors> experts;
  std::optional<MlpTensors> shared;
};

// What target and drafter share.  The embedding is bf16.
struct EmbeddingTensors {
  CheckpointMatrix embedding;  // [vocab, hidden]
  CheckpointMatrix lm_head;    // [vocab, hidden]
};

// The embedding's values where they are mapped; copied into `copy` where the file holds them at an
// odd address.
const uint16_t* EmbeddingTable(const EmbeddingTensors& tensors, std::vector<uint16_t>& copy);

struct TargetTensors {
  EmbeddingTensors shared;
  std::vector<TargetLayerTensors> layers;
  TensorView final_norm;
};

struct DraftLayerTensors {
  TensorView input_norm;
  CheckpointMatrix q;
  CheckpointMatrix k;
  CheckpointMatrix v;
  TensorView q_norm;
  TensorView k_norm;
  CheckpointMatrix o;
  TensorView post_norm;
  MlpTensors mlp;
};

// The part of a drafter that the target runs: from tapped hidden states to features.
struct FeatureTensors {
  CheckpointMatrix fc;  // [hidden, taps * hidden]
  TensorView hidden_norm;
};

struct DraftTensors {
  FeatureTensors features;
  std::vector<DraftLayerTensors> layers;
  TensorView final_norm;
};

// NOT_FOUND names the directory and the tensor; INVALID_ARGUMENT the file, the tensor, what was
// found and what was expected.  Tensors that the model does not have are ignored: vision towers
// silently, others with a log line.
absl::StatusOr<EmbeddingTensors> FindEmbeddingTensors(const Checkpoint& checkpoint,
                                                      const ModelConfig& config);
absl::StatusOr<TargetTensors> FindTargetTensors(const Checkpoint& checkpoint,
                                                const ModelConfig& config);
absl::StatusOr<FeatureTensors> FindFeatureTensors(const Checkpoint& checkpoint,
                                                  const DraftConfig& config);
absl::StatusOr<DraftTensors> FindDraftTensors(const Checkpoint& checkpoint,
                                              const DraftConfig& config);

// Fingerprints hash names, dtypes, shapes and bytes: all bytes of a tensor of at most 64 KiB, else
// four blocks of 1 KiB spread over it, first and last included, so that a checkpoint of 600 GB
// costs a few reads per tensor.  They tell different models and fine-tunes apart; they do not prove
// that every byte is equal.
uint64_t TargetFingerprint(const Checkpoint& checkpoint, const ModelConfig& config);
uint64_t EmbeddingFingerprint(const EmbeddingTensors& tensors);
uint64_t DraftFingerprint(const FeatureTensors& tensors, const DraftConfig& config);

// INVALID_ARGUMENT, naming the dimension, unless `tp` ranks can share the model.
absl::Status CheckTargetRanks(const ModelConfig& config, int tp);
absl::Status CheckDraftRanks(const DraftConfig& config, int tp);

// ---- On a device

// Device memory with a shape.
struct DeviceTensor {
  std::unique_ptr<kernels::Buffer> buffer;
  kernels::Tensor view;
};
absl::StatusOr<DeviceTensor> AllocateTensor(kernels::Ops& ops, kernels::DType dtype, int64_t rows,
                                            int64_t cols);

// cos and sin of positions 0 … positions - 1, times `amplitude`, [positions, pairs] each.  The
// angle is the fp32 product of position and frequency, as in the reference implementations.
struct HostRope {
  HostRope(const std::vector<float>& inv_freq, int64_t positions, double amplitude);
  int64_t pairs;
  std::vector<float> cos;
  std::vector<float> sin;
};

struct DeviceRope {
  DeviceTensor cos;
  DeviceTensor sin;
  kernels::RopeTable table() const { return {cos.view, sin.view}; }
};
absl::StatusOr<DeviceRope> UploadRope(kernels::Ops& ops, const HostRope& rope);

struct MlpWeights {
  std::unique_ptr<kernels::Matrix> gate_up;  // [2 * slice, hidden]
  kernels::SegmentedMatrix down;
};

struct TargetLayerWeights {
  DeviceTensor input_norm;
  std::unique_ptr<kernels::Matrix> qkv_a;  // [q_lora + kv_lora + rope, hidden]: q_a, then kv_a
  DeviceTensor q_a_norm;
  std::unique_ptr<kernels::Matrix> q_b;                // this rank's heads
  std::vector<std::unique_ptr<kernels::Matrix>> w_uk;  // per head: nope → kv_lora
  std::vector<std::unique_ptr<kernels::Matrix>> w_uv;  // per head: kv_lora → v
  DeviceTensor kv_a_norm;
  kernels::SegmentedMatrix o;
  DeviceTensor post_norm;
  std::optional<MlpWeights> dense;
  std::unique_ptr<kernels::Matrix> router;
  DeviceTensor router_bias;
  kernels::ExpertWeights experts;
};

struct TargetWeights {
  std::vector<TargetLayerWeights> layers;
  DeviceTensor final_norm;
  std::unique_ptr<kernels::Matrix> lm_head;  // this rank's vocab / ranks rows
};

struct FeatureWeights {
  std::unique_ptr<kernels::Matrix> fc;  // this rank's hidden / ranks rows
  DeviceTensor hidden_norm;
  double rms_norm_eps = 0;
};

struct DraftLayerWeights {
  DeviceTensor input_norm;
  std::unique_ptr<kernels::Matrix>
      qkv;  // this rank's query heads, then key heads, then value heads
  DeviceTensor q_norm;
  DeviceTensor k_norm;
  kernels::SegmentedMatrix o;
  DeviceTensor post_norm;
  MlpWeights mlp;
};

struct DraftWeights {
  // [layers * 2 * kv_heads * head_dim, hidden]: per layer this rank's key heads, then value heads.
  std::unique_ptr<kernels::Matrix> context_kv;
  std::vector<DraftLayerWeights> layers;
  DeviceTensor final_norm;
  std::unique_ptr<kernels::Matrix> lm_head;  // this rank's vocab / ranks rows
};

// Key/value heads of the drafter that a rank holds: [first, first + count).  Replicated where ranks
// exceed them.
struct KvHeads {
  int first = 0;
  int count = 0;
};
KvHeads DraftKvHeads(const DraftConfig& config, int rank, int ranks);

// Counts the bytes that the ranks of one load have checked, for a progress callback.  Thread-safe;
// the callback is never called concurrently.
class LoadProgress {
 public:
  LoadProgress(int64_t total, std::function<void(int64_t, int64_t)> callback)
      : total_(total), callback_(std::move(callback)) {}
  void Add(int64_t bytes);

 private:
  const int64_t total_;
  std::mutex mutex_;  // of all below
  int64_t done_ = 0;
  const std::function<void(int64_t, int64_t)> callback_;
};

// Bytes that Load… of all ranks together report to `progress`.
int64_t LoadBytes(const TargetTensors& tensors);

// Tensors of the checkpoint that the model does not have.
int64_t CountUnused(const Checkpoint& checkpoint, const TargetTensors& tensors);

// What loading refuses of the tensors' values: INVALID_ARGUMENT names file, tensor and element.
absl::Status CheckValues(const TargetTensors& tensors);

// Called once per rank, by all ranks of the group at the same time or one after another: each
// checks the values of its share of the tensors, layer by layer, just before the layer is sliced,
// so that files are read once.
absl::StatusOr<TargetWeights> LoadTargetWeights(const TargetTensors& tensors,
                                                const ModelConfig& config, kernels::Ops& ops,
                                                LoadProgress& progress);
absl::StatusOr<FeatureWeights> LoadFeatureWeights(const FeatureTensors& tensors,
                                                  const DraftConfig& config, kernels::Ops& ops);
absl::StatusOr<DraftWeights> LoadDraftWeights(const DraftTensors& tensors,
                                              const EmbeddingTensors& target,
                                              const DraftConfig& config, kernels::Ops& ops);

}  // namespace coppice

#endif  // COPPICE_MODEL_WEIGHTS_H_
