#include "model/weights.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <utility>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "glog/logging.h"
#include "model/fingerprint.h"

namespace coppice {
namespace {

using kernels::kSegments;

constexpr int64_t kGroup = 32;   // inputs per scale of INT4
constexpr int64_t kBlock = 128;  // rows and columns per scale of FP8

constexpr std::array<DType, 2> kFloats = {DType::kBF16, DType::kF32};
constexpr std::array<DType, 3> kWeights = {DType::kBF16, DType::kF32, DType::kF8E4M3};

int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

// The 256 values of float8_e4m3fn: bias 7, subnormals in steps of 2^-9, no infinity, NaN all ones.
const std::array<float, 256>& Fp8Values() {
  static const std::array<float, 256> values = [] {
    std::array<float, 256> table;
    for (int bits = 0; bits < 256; ++bits) {
      const int exponent = (bits >> 3) & 15;
      const int mantissa = bits & 7;
      float value = exponent == 0 ? std::ldexp(static_cast<float>(mantissa), -9)
                                  : std::ldexp(static_cast<float>(8 + mantissa), exponent - 10);
      if ((bits & 0x7F) == 0x7F) value = std::nanf("");
      table[bits] = (bits & 0x80) != 0 ? -value : value;
    }
    return table;
  }();
  return values;
}

// To nearest even; `value` is finite or overflows to infinity.
uint16_t ToBf16(float value) {
  uint32_t word;
  std::memcpy(&word, &value, sizeof(word));
  return static_cast<uint16_t>((word + 0x7FFF + ((word >> 16) & 1)) >> 16);
}

// Resolves tensors by name and keeps the first fault, so that a model reads like a list of its
// tensors.
class Finder {
 public:
  // `prefix` stands before every name asked for.
  Finder(const Checkpoint& checkpoint, std::string prefix)
      : checkpoint_(checkpoint), prefix_(std::move(prefix)) {}

  const absl::Status& status() const { return status_; }

  TensorView Vector(const std::string& name, int64_t size) { return Get(name, kFloats, {size}); }

  CheckpointMatrix Matrix(const std::string& name, int64_t rows, int64_t cols) {
    CheckpointMatrix matrix{.rows = rows, .cols = cols, .weight = {}, .scales = {}};
    const std::string packed = name + ".weight_packed";
    const std::string plain = name + ".weight";
    if (!checkpoint_.Contains(prefix_ + packed)) {
      if (!checkpoint_.Contains(prefix_ + plain)) {
        Fail(absl::NotFoundError(absl::StrCat(
            checkpoint_.dir(), ": tensor ", prefix_, plain, " is missing (and there is no ", packed,
            "); the checkpoint is incomplete or not of this model")));
        return matrix;
      }
      matrix.weight = Get(plain, kWeights, {rows, cols});
      const std::string scale_inv = plain + "_scale_inv";
      if (!status_.ok()) return matrix;
      if (matrix.weight.dtype == DType::kF8E4M3) {
        matrix.scales =
            Get(scale_inv, {DType::kF32}, {CeilDiv(rows, kBlock), CeilDiv(cols, kBlock)});
      } else if (checkpoint_.Contains(prefix_ + scale_inv)) {
        Fail(absl::InvalidArgumentError(absl::StrCat(
            matrix.weight.file, ": tensor ", matrix.weight.name, " is ",
            DTypeName(matrix.weight.dtype), ", but there is a ", scale_inv,
            "; only F8_E4M3 weights have one, so it is not known whether it was applied")));
      }
      return matrix;
    }
    if (checkpoint_.Contains(prefix_ + plain)) {
      Fail(absl::InvalidArgumentError(absl::StrCat(checkpoint_.dir(), ": both ", prefix_, plain,
                                                   " and ", packed,
                                                   " exist; a weight must be stored once")));
      return matrix;
    }
    if (cols % kGroup != 0) {
      Fail(absl::InvalidArgumentError(
          absl::StrCat(checkpoint_.dir(), ": tensor ", prefix_, packed, " has ", cols,
                       " inputs; INT4 weights need a multiple of ", kGroup)));
      return matrix;
    }
    matrix.weight = Get(packed, {DType::kI32}, {rows, cols / 8});
    matrix.scales = Get(name + ".weight_scale", {DType::kBF16}, {rows, cols / kGroup});
    CheckShapeTensor(name + ".weight_shape", rows, cols);
    return matrix;
  }

  MlpTensors Mlp(const std::string& name, int64_t hidden, int64_t intermediate) {
    MlpTensors mlp{.gate = Matrix(name + ".gate_proj", intermediate, hidden),
                   .up = Matrix(name + ".up_proj", intermediate, hidden),
                   .down = Matrix(name + ".down_proj", hidden, intermediate)};
    CheckAlike({&mlp.gate, &mlp.up}, absl::StrCat(prefix_, name, ".gate_proj and .up_proj"));
    return mlp;
  }

  // Matrices that are multiplied together must reach the backend in one encoding.
  void CheckAlike(std::initializer_list<const CheckpointMatrix*> matrices,
                  const std::string& what) {
    if (!status_.ok()) return;
    const auto encoding = [](const CheckpointMatrix& matrix) {
      using Form = CheckpointMatrix::Form;
      return matrix.form() == Form::kFp8 ? Form::kBf16 : matrix.form();
    };
    for (const CheckpointMatrix* matrix : matrices) {
      if (encoding(*matrix) == encoding(**matrices.begin())) continue;
      Fail(absl::InvalidArgumentError(
          absl::StrCat(checkpoint_.dir(), ": ", what,
                       " are stored differently; all must be packed, or all of one dtype (FP8 and "
                       "BF16 count as one)")));
    }
  }

  void Fail(absl::Status status) {
    if (status_.ok()) status_ = std::move(status);
  }

  // One log line for what the file holds beyond the tensors asked for.
  void ReportUnused() const {
    std::string first;
    int64_t count = 0;
    for (const TensorView& tensor : checkpoint_.tensors()) {
      if (used_.contains(tensor.name) || IsKnownExtra(tensor.name)) continue;
      if (count++ == 0) first = tensor.name;
    }
    if (count > 0) {
      LOG(WARNING) << checkpoint_.dir() << ": ignored " << count
                   << " tensor(s) this model does not have, e.g. " << first;
    }
  }

 private:
  static bool IsKnownExtra(const std::string& name) {
    return absl::StartsWith(name, "vision_tower.") || absl::StartsWith(name, "mm_projector.") ||
           absl::StrContains(name, "rotary_emb.");
  }

  TensorView Get(const std::string& name, absl::Span<const DType> dtypes,
                 std::initializer_list<int64_t> shape) {
    const std::string full = prefix_ + name;
    absl::StatusOr<TensorView> tensor = checkpoint_.Find(full);
    if (!tensor.ok()) {
      Fail(tensor.status());
      return {};
    }
    Fail(CheckTensor(*tensor, dtypes, absl::MakeConstSpan(shape.begin(), shape.size())));
    used_.insert(full);
    return *std::move(tensor);
  }

  // The geometry is that of the packed words; a weight_shape that says otherwise is a broken file.
  void CheckShapeTensor(const std::string& name, int64_t rows, int64_t cols) {
    if (!checkpoint_.Contains(prefix_ + name)) return;
    const TensorView tensor = Get(name, {DType::kI32, DType::kI64}, {2});
    if (!status_.ok()) return;
    int64_t found[2];
    if (tensor.dtype == DType::kI64) {
      std::memcpy(found, tensor.data, sizeof(found));
    } else {
      int32_t narrow[2];
      std::memcpy(narrow, tensor.data, sizeof(narrow));
      found[0] = narrow[0];
      found[1] = narrow[1];
    }
    if (found[0] != rows || found[1] != cols) {
      Fail(absl::InvalidArgumentError(absl::StrCat(tensor.file, ": tensor ", tensor.name, " says [",
                                                   found[0], ", ", found[1], "]; expected [", rows,
                                                   ", ", cols, "]")));
    }
  }

  const Checkpoint& checkpoint_;
  const std::string prefix_;
  absl::flat_hash_set<std::string> used_;
  absl::Status status_;
};

EmbeddingTensors FindEmbedding(Finder& find, const ModelConfig& config) {
  EmbeddingTensors tensors{
      .embedding = find.Matrix("model.embed_tokens", config.vocab_size, config.hidden_size),
      .lm_head = find.Matrix("lm_head", config.vocab_size, config.hidden_size)};
  if (find.status().ok() && tensors.embedding.weight.dtype != DType::kBF16) {
    find.Fail(absl::InvalidArgumentError(
        absl::StrCat(tensors.embedding.weight.file, ": tensor ", tensors.embedding.weight.name,
                     " is ", DTypeName(tensors.embedding.weight.dtype), "; expected BF16")));
  }
  return tensors;
}

// Exports of drafters differ in whether names begin with "model.".
std::string DraftPrefix(const Checkpoint& checkpoint) {
  return checkpoint.Contains("model.fc.weight") ? "model." : "";
}

FeatureTensors FindFeatures(Finder& find, const DraftConfig& config) {
  return {.fc = find.Matrix("fc", config.hidden_size,
                            static_cast<int64_t>(config.num_taps()) * config.hidden_size),
          .hidden_norm = find.Vector("hidden_norm.weight", config.hidden_size)};
}

// --- fingerprints ---

void AddTensor(Fingerprint& fingerprint, const TensorView& tensor) {
  constexpr size_t kWhole = 64 << 10;
  constexpr size_t kBlock = 1 << 10;
  constexpr size_t kBlocks = 4;
  fingerprint.Add(DTypeName(tensor.dtype));
  for (const int64_t size : tensor.shape) fingerprint.Add(size);
  if (tensor.bytes <= kWhole) {
    fingerprint.AddBytes(tensor.data, tensor.bytes);
    return;
  }
  for (size_t i = 0; i < kBlocks; ++i) {
    fingerprint.AddBytes(tensor.data + (tensor.bytes - kBlock) / (kBlocks - 1) * i, kBlock);
  }
}

void AddMatrix(Fingerprint& fingerprint, const CheckpointMatrix& matrix) {
  AddTensor(fingerprint, matrix.weight);
  if (matrix.scales.has_value()) AddTensor(fingerprint, *matrix.scales);
}

void AddReal(Fingerprint& fingerprint, double value) {
  fingerprint.AddBytes(&value, sizeof(value));
}

// --- slicing ---

struct Range {
  int64_t begin = 0;
  int64_t count = 0;
};

Range Share(int64_t size, const kernels::Ops& ops) {
  const int64_t count = size / ops.ranks();
  return {ops.rank() * count, count};
}

// Matrices under each other as one.  All parts have the same encoding and columns and begin at
// column 0.
absl::StatusOr<std::unique_ptr<kernels::Matrix>> Stack(kernels::Ops& ops,
                                                       absl::Span<const MatrixPart> parts) {
  using Encoding = kernels::HostMatrix::Encoding;
  if (parts.size() == 1) return ops.Prepare(parts[0].matrix);
  kernels::HostMatrix whole = parts[0].matrix;
  for (const MatrixPart& part : parts) {
    if (part.matrix.encoding != whole.encoding) {
      return absl::InvalidArgumentError(
          "weights that are multiplied together are stored in different dtypes");
    }
  }
  const bool packed = whole.encoding == Encoding::kInt4Group32;
  const int64_t row_bytes =
      packed ? whole.cols / 2 : whole.cols * (whole.encoding == Encoding::kF32 ? 4 : 2);
  const int64_t scale_row_bytes = packed ? whole.cols / kGroup * 2 : 0;
  whole.rows = 0;
  for (const MatrixPart& part : parts) whole.rows += part.matrix.rows;
  std::vector<std::byte> data(whole.rows * row_bytes);
  std::vector<std::byte> scales(whole.rows * scale_row_bytes);
  int64_t row = 0;
  for (const auto& [part, decoded] : parts) {
    for (int64_t i = 0; i < part.rows; ++i, ++row) {
      std::memcpy(data.data() + row * row_bytes,
                  static_cast<const std::byte*>(part.data) + i * part.row_bytes, row_bytes);
      if (packed) {
        std::memcpy(scales.data() + row * scale_row_bytes,
                    static_cast<const std::byte*>(part.scales) + i * part.scale_row_bytes,
                    scale_row_bytes);
      }
    }
  }
  whole.data = data.data();
  whole.row_bytes = row_bytes;
  whole.scales = packed ? scales.data() : nullptr;
  whole.scale_row_bytes = scale_row_bytes;
  return ops.Prepare(whole);
}

// INVALID_ARGUMENT where a scale is so large that a weight it is multiplied with would leave bf16's
// range, which only a damaged file has.
absl::Status CheckScales(const TensorView& tensor) {
  constexpr float kMax = 3.3895314e38f;  // of bf16
  const bool fp8 = absl::EndsWith(tensor.name, ".weight_scale_inv");
  if (!fp8 && !absl::EndsWith(tensor.name, ".weight_scale")) return absl::OkStatus();
  const float limit = fp8 ? kMax / 448 : kMax / 8;
  for (int64_t i = 0; i < tensor.num_elements(); ++i) {
    float scale;
    if (tensor.dtype == DType::kF32) {
      std::memcpy(&scale, tensor.data + i * 4, sizeof(scale));
    } else {
      uint16_t half;
      std::memcpy(&half, tensor.data + i * 2, sizeof(half));
      const uint32_t word = static_cast<uint32_t>(half) << 16;
      std::memcpy(&scale, &word, sizeof(scale));
    }
    if (std::abs(scale) > limit) {
      return absl::InvalidArgumentError(
          absl::StrCat(tensor.file, ": tensor ", tensor.name, " has the scale ", scale,
                       " (element ", i, " of ", tensor.num_elements(),
                       "), beyond which weights are not finite: the checkpoint is damaged"));
    }
  }
  return absl::OkStatus();
}

// Prepares one rank's weights and keeps the first fault.
class Loader {
 public:
  explicit Loader(kernels::Ops& ops) : ops_(ops) {}

  const absl::Status& status() const { return status_; }

  // Looks for NaN and infinity in this rank's share of `tensors`; returns the bytes looked at.
  int64_t Check(absl::Span<const TensorView* const> tensors) {
    int64_t bytes = 0;
    for (size_t i = ops_.rank(); i < tensors.size(); i += ops_.ranks()) {
      if (!status_.ok()) return bytes;
      Fail(CheckFinite(*tensors[i]));
      Fail(CheckScales(*tensors[i]));
      bytes += static_cast<int64_t>(tensors[i]->bytes);
    }
    return bytes;
  }

  DeviceTensor Vector(const TensorView& tensor) {
    if (!status_.ok()) return {};
    const int64_t size = tensor.num_elements();
    std::vector<float> values(size);
    if (tensor.dtype == DType::kF32) {
      std::memcpy(values.data(), tensor.data, size * sizeof(float));
    } else {
      for (int64_t i = 0; i < size; ++i) {
        uint16_t half;
        std::memcpy(&half, tensor.data + 2 * i, sizeof(half));
        const uint32_t word = static_cast<uint32_t>(half) << 16;
        std::memcpy(&values[i], &word, sizeof(word));
      }
    }
    DeviceTensor result = Value(AllocateTensor(ops_, kernels::DType::kF32, 1, size));
    if (status_.ok()) ops_.Upload(values.data(), result.view.data, size * sizeof(float));
    ops_.Synchronize();  // `values` is about to go
    return result;
  }

  std::unique_ptr<kernels::Matrix> Rows(const CheckpointMatrix& matrix, Range rows) {
    return Stacked({matrix.Part(rows.begin, rows.count, 0, matrix.cols)});
  }
  std::unique_ptr<kernels::Matrix> Stacked(std::initializer_list<MatrixPart> parts) {
    return Stacked(absl::MakeConstSpan(parts.begin(), parts.size()));
  }
  std::unique_ptr<kernels::Matrix> Stacked(absl::Span<const MatrixPart> parts) {
    if (!status_.ok()) return nullptr;
    return Value(Stack(ops_, parts));
  }

  // This rank's segments of a row-parallel weight.
  kernels::SegmentedMatrix Segments(const CheckpointMatrix& matrix) {
    kernels::SegmentedMatrix segments;
    const int64_t width = matrix.cols / kSegments;
    const Range mine = Share(kSegments, ops_);
    for (int64_t s = mine.begin; s < mine.begin + mine.count; ++s) {
      segments.push_back(Stacked({matrix.Part(0, matrix.rows, s * width, width)}));
    }
    return segments;
  }

  std::unique_ptr<kernels::Matrix> GateUp(const MlpTensors& mlp) {
    const Range slice = Share(mlp.gate.rows, ops_);
    return Stacked({mlp.gate.Part(slice.begin, slice.count, 0, mlp.gate.cols),
                    mlp.up.Part(slice.begin, slice.count, 0, mlp.up.cols)});
  }

  template <typename T>
  T Value(absl::StatusOr<T> value) {
    if (value.ok()) return *std::move(value);
    Fail(value.status());
    return {};
  }
  void Fail(absl::Status status) {
    if (status_.ok()) status_ = std::move(status);
  }

 private:
  kernels::Ops& ops_;
  absl::Status status_;
};

void List(const CheckpointMatrix& matrix, std::vector<const TensorView*>& out) {
  out.push_back(&matrix.weight);
  if (matrix.scales.has_value()) out.push_back(&*matrix.scales);
}

void List(const MlpTensors& mlp, std::vector<const TensorView*>& out) {
  List(mlp.gate, out);
  List(mlp.up, out);
  List(mlp.down, out);
}

std::vector<const TensorView*> List(const TargetLayerTensors& layer) {
  std::vector<const TensorView*> all = {&layer.input_norm, &layer.q_a_norm, &layer.kv_a_norm,
                                        &layer.post_norm};
  for (const CheckpointMatrix* matrix :
       {&layer.q_a, &layer.q_b, &layer.kv_a, &layer.kv_b, &layer.o}) {
    List(*matrix, all);
  }
  if (layer.dense.has_value()) List(*layer.dense, all);
  if (layer.router.has_value()) List(*layer.router, all);
  if (layer.router_bias.has_value()) all.push_back(&*layer.router_bias);
  for (const MlpTensors& expert : layer.experts) List(expert, all);
  if (layer.shared.has_value()) List(*layer.shared, all);
  return all;
}

std::vector<const TensorView*> ListOutside(const TargetTensors& tensors) {
  std::vector<const TensorView*> all = {&tensors.final_norm};
  List(tensors.shared.embedding, all);
  List(tensors.shared.lm_head, all);
  return all;
}

int64_t Bytes(absl::Span<const TensorView* const> tensors) {
  int64_t bytes = 0;
  for (const TensorView* tensor : tensors) bytes += static_cast<int64_t>(tensor->bytes);
  return bytes;
}

absl::Status CheckDivides(const char* what, int64_t value, int64_t divisor,
                          const std::string& why) {
  if (value % divisor == 0) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(what, " is ", value, ", which ", divisor, " does not divide; ", why));
}

absl::Status CheckTp(int tp) {
  if (tp >= 1 && kSegments % tp == 0) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("tp is ", tp, "; the number of ranks must be 1, 2, 4 or 8"));
}

}  // namespace

CheckpointMatrix::Form CheckpointMatrix::form() const {
  switch (weight.dtype) {
    case DType::kF32:
      return Form::kF32;
    case DType::kI32:
      return Form::kInt4;
    case DType::kF8E4M3:
      return Form::kFp8;
    default:
      return Form::kBf16;
  }
}

MatrixPart CheckpointMatrix::Part(int64_t row, int64_t row_count, int64_t col,
                                  int64_t col_count) const {
  using Encoding = kernels::HostMatrix::Encoding;
  MatrixPart result;
  kernels::HostMatrix& part = result.matrix;
  part.rows = row_count;
  part.cols = col_count;
  switch (form()) {
    case Form::kInt4: {
      const int64_t group = col / kGroup;
      part.encoding = Encoding::kInt4Group32;
      part.row_bytes = cols / 2;
      part.data = weight.data + row * part.row_bytes + group * (kGroup / 2);
      part.scale_row_bytes = cols / kGroup * 2;
      part.scales = scales->data + row * part.scale_row_bytes + group * 2;
      part.first_col = col % kGroup;
      break;
    }
    case Form::kFp8: {
      const std::array<float, 256>& values = Fp8Values();
      const int64_t blocks = CeilDiv(cols, kBlock);  // of one row
      auto decoded = std::make_shared<std::vector<uint16_t>>(row_count * col_count);
      uint16_t* out = decoded->data();
      for (int64_t r = row; r < row + row_count; ++r) {
        const std::byte* in = weight.data + r * cols;
        const std::byte* row_scales = scales->data + r / kBlock * blocks * sizeof(float);
        for (int64_t c = col; c < col + col_count;) {
          float scale;
          std::memcpy(&scale, row_scales + c / kBlock * sizeof(float), sizeof(scale));
          const int64_t end = std::min((c / kBlock + 1) * kBlock, col + col_count);
          for (; c < end; ++c) *out++ = ToBf16(values[std::to_integer<uint8_t>(in[c])] * scale);
        }
      }
      part.encoding = Encoding::kBf16;
      part.row_bytes = col_count * static_cast<int64_t>(sizeof(uint16_t));
      part.data = decoded->data();
      result.decoded = std::move(decoded);
      break;
    }
    case Form::kBf16:
    case Form::kF32: {
      const int64_t size = form() == Form::kF32 ? 4 : 2;
      part.encoding = form() == Form::kF32 ? Encoding::kF32 : Encoding::kBf16;
      part.row_bytes = cols * size;
      part.data = weight.data + row * part.row_bytes + col * size;
      break;
    }
  }
  return result;
}

const uint16_t* EmbeddingTable(const EmbeddingTensors& tensors, std::vector<uint16_t>& copy) {
  const TensorView& table = tensors.embedding.weight;
  if (reinterpret_cast<uintptr_t>(table.data) % alignof(uint16_t) == 0) {
    return reinterpret_cast<const uint16_t*>(table.data);
  }
  copy.resize(table.bytes / sizeof(uint16_t));
  std::memcpy(copy.data(), table.data, table.bytes);
  return copy.data();
}

absl::StatusOr<EmbeddingTensors> FindEmbeddingTensors(const Checkpoint& checkpoint,
                                                      const ModelConfig& config) {
  Finder find(checkpoint, config.tensor_prefix);
  EmbeddingTensors tensors = FindEmbedding(find, config);
  if (!find.status().ok()) return find.status();
  return tensors;
}

absl::StatusOr<TargetTensors> FindTargetTensors(const Checkpoint& checkpoint,
                                                const ModelConfig& config) {
  Finder find(checkpoint, config.tensor_prefix);
  TargetTensors tensors;
  tensors.shared = FindEmbedding(find, config);
  const int64_t hidden = config.hidden_size;
  const int64_t heads = config.num_attention_heads;
  for (int l = 0; l < config.num_hidden_layers && find.status().ok(); ++l) {
    const std::string layer = absl::StrCat("model.layers.", l, ".");
    const std::string attention = layer + "self_attn.";
    const std::string mlp = layer + "mlp";
    TargetLayerTensors& t = tensors.layers.emplace_back();
    t.input_norm = find.Vector(layer + "input_layernorm.weight", hidden);
    t.q_a = find.Matrix(attention + "q_a_proj", config.q_lora_rank, hidden);
    t.q_a_norm = find.Vector(attention + "q_a_layernorm.weight", config.q_lora_rank);
    t.q_b = find.Matrix(attention + "q_b_proj", heads * config.qk_head_dim(), config.q_lora_rank);
    t.kv_a = find.Matrix(attention + "kv_a_proj_with_mqa", config.latent_dim(), hidden);
    t.kv_a_norm = find.Vector(attention + "kv_a_layernorm.weight", config.kv_lora_rank);
    t.kv_b =
        find.Matrix(attention + "kv_b_proj", heads * (config.qk_nope_head_dim + config.v_head_dim),
                    config.kv_lora_rank);
    t.o = find.Matrix(attention + "o_proj", hidden, heads * config.v_head_dim);
    t.post_norm = find.Vector(layer + "post_attention_layernorm.weight", hidden);
    find.CheckAlike({&t.q_a, &t.kv_a},
                    absl::StrCat("q_a_proj and kv_a_proj_with_mqa of layer ", l));
    if (!config.is_moe_layer(l)) {
      t.dense = find.Mlp(mlp, hidden, config.intermediate_size);
      continue;
    }
    t.router = find.Matrix(mlp + ".gate", config.n_routed_experts, hidden);
    t.router_bias = find.Vector(mlp + ".gate.e_score_correction_bias", config.n_routed_experts);
    for (int e = 0; e < config.n_routed_experts && find.status().ok(); ++e) {
      t.experts.push_back(
          find.Mlp(absl::StrCat(mlp, ".experts.", e), hidden, config.moe_intermediate_size));
    }
    t.shared =
        find.Mlp(mlp + ".shared_experts", hidden,
                 static_cast<int64_t>(config.n_shared_experts) * config.moe_intermediate_size);
  }
  tensors.final_norm = find.Vector("model.norm.weight", hidden);
  if (!find.status().ok()) return find.status();
  find.ReportUnused();
  return tensors;
}

absl::StatusOr<FeatureTensors> FindFeatureTensors(const Checkpoint& checkpoint,
                                                  const DraftConfig& config) {
  Finder find(checkpoint, DraftPrefix(checkpoint));
  FeatureTensors tensors = FindFeatures(find, config);
  if (!find.status().ok()) return find.status();
  return tensors;
}

absl::StatusOr<DraftTensors> FindDraftTensors(const Checkpoint& checkpoint,
                                              const DraftConfig& config) {
  Finder find(checkpoint, DraftPrefix(checkpoint));
  DraftTensors tensors;
  tensors.features = FindFeatures(find, config);
  const int64_t hidden = config.hidden_size;
  const int64_t q_dim = static_cast<int64_t>(config.num_attention_heads) * config.head_dim;
  const int64_t kv_dim = static_cast<int64_t>(config.num_key_value_heads) * config.head_dim;
  for (int l = 0; l < config.num_hidden_layers && find.status().ok(); ++l) {
    const std::string layer = absl::StrCat("layers.", l, ".");
    const std::string attention = layer + "self_attn.";
    DraftLayerTensors& t = tensors.layers.emplace_back();
    t.input_norm = find.Vector(layer + "input_layernorm.weight", hidden);
    t.q = find.Matrix(attention + "q_proj", q_dim, hidden);
    t.k = find.Matrix(attention + "k_proj", kv_dim, hidden);
    t.v = find.Matrix(attention + "v_proj", kv_dim, hidden);
    t.q_norm = find.Vector(attention + "q_norm.weight", config.head_dim);
    t.k_norm = find.Vector(attention + "k_norm.weight", config.head_dim);
    t.o = find.Matrix(attention + "o_proj", hidden, q_dim);
    t.post_norm = find.Vector(layer + "post_attention_layernorm.weight", hidden);
    t.mlp = find.Mlp(layer + "mlp", hidden, config.intermediate_size);
    find.CheckAlike({&t.q, &t.k, &t.v}, absl::StrCat("q_proj, k_proj and v_proj of layer ", l));
  }
  tensors.final_norm = find.Vector("norm.weight", hidden);
  if (!find.status().ok()) return find.status();
  find.ReportUnused();
  return tensors;
}

uint64_t TargetFingerprint(const Checkpoint& checkpoint, const ModelConfig& config) {
  Fingerprint fingerprint;
  for (const int64_t value :
       {config.vocab_size, config.hidden_size, config.num_hidden_layers,
        config.max_position_embeddings, config.first_k_dense_replace, config.intermediate_size,
        config.moe_intermediate_size, config.n_routed_experts, config.num_experts_per_tok,
        config.n_shared_experts, config.n_group, config.topk_group,
        static_cast<int>(config.norm_topk_prob), config.num_attention_heads, config.q_lora_rank,
        config.kv_lora_rank, config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim}) {
    fingerprint.Add(value);
  }
  for (const double value :
       {config.rms_norm_eps, config.lora_norm_eps, config.routed_scaling_factor, config.rope.theta,
        config.rope.factor, static_cast<double>(config.rope.original_max_position_embeddings),
        config.rope.beta_fast, config.rope.beta_slow, config.rope.mscale,
        config.rope.mscale_all_dim}) {
    AddReal(fingerprint, value);
  }
  for (const TensorView& tensor : checkpoint.tensors()) {
    fingerprint.Add(std::string_view(tensor.name));
    AddTensor(fingerprint, tensor);
  }
  return fingerprint.value();
}

uint64_t EmbeddingFingerprint(const EmbeddingTensors& tensors) {
  Fingerprint fingerprint;
  AddMatrix(fingerprint, tensors.embedding);
  AddMatrix(fingerprint, tensors.lm_head);
  return fingerprint.value();
}

uint64_t DraftFingerprint(const FeatureTensors& tensors, const DraftConfig& config) {
  Fingerprint fingerprint;
  for (const int tap : config.target_layer_ids) fingerprint.Add(static_cast<int64_t>(tap));
  AddReal(fingerprint, config.rms_norm_eps);
  AddMatrix(fingerprint, tensors.fc);
  AddTensor(fingerprint, tensors.hidden_norm);
  return fingerprint.value();
}

absl::Status CheckTargetRanks(const ModelConfig& config, int tp) {
  const std::string ranks = absl::StrCat("the target cannot be shared by tp = ", tp, " ranks");
  const std::string segments =
      absl::StrCat("row-parallel weights are summed in ", kSegments, " equal segments");
  absl::Status status = CheckTp(tp);
  if (!status.ok()) return status;
  status.Update(CheckDivides("num_attention_heads", config.num_attention_heads, tp, ranks));
  status.Update(CheckDivides("vocab_size", config.vocab_size, tp, ranks));
  status.Update(CheckDivides("hidden_size", config.hidden_size, tp, ranks));
  status.Update(CheckDivides("num_attention_heads * v_head_dim",
                             static_cast<int64_t>(config.num_attention_heads) * config.v_head_dim,
                             kSegments, segments));
  if (config.first_k_dense_replace > 0) {
    status.Update(CheckDivides("intermediate_size", config.intermediate_size, kSegments, segments));
  }
  if (config.first_k_dense_replace < config.num_hidden_layers) {
    status.Update(
        CheckDivides("moe_intermediate_size", config.moe_intermediate_size, kSegments, segments));
  }
  return status;
}

absl::Status CheckDraftRanks(const DraftConfig& config, int tp) {
  const std::string ranks = absl::StrCat("the drafter cannot be shared by tp = ", tp, " ranks");
  const std::string segments =
      absl::StrCat("row-parallel weights are summed in ", kSegments, " equal segments");
  absl::Status status = CheckTp(tp);
  if (!status.ok()) return status;
  status.Update(
      CheckDivides("num_attention_heads of the drafter", config.num_attention_heads, tp, ranks));
  status.Update(CheckDivides("vocab_size", config.vocab_size, tp, ranks));
  status.Update(CheckDivides("num_attention_heads of the drafter", config.num_attention_heads,
                             config.num_key_value_heads,
                             "each key/value head serves equally many query heads"));
  if (status.ok() && config.num_key_value_heads % tp != 0 && tp % config.num_key_value_heads != 0) {
    status = absl::InvalidArgumentError(
        absl::StrCat("num_key_value_heads of the drafter is ", config.num_key_value_heads,
                     ", which neither divides tp = ", tp, " nor is a multiple of it; ", ranks));
  }
  status.Update(CheckDivides("num_attention_heads * head_dim of the drafter",
                             static_cast<int64_t>(config.num_attention_heads) * config.head_dim,
                             kSegments, segments));
  status.Update(CheckDivides("intermediate_size of the drafter", config.intermediate_size,
                             kSegments, segments));
  return status;
}

absl::StatusOr<DeviceTensor> AllocateTensor(kernels::Ops& ops, kernels::DType dtype, int64_t rows,
                                            int64_t cols) {
  absl::StatusOr<std::unique_ptr<kernels::Buffer>> buffer =
      ops.Allocate(static_cast<size_t>(rows * cols * kernels::SizeOf(dtype)));
  if (!buffer.ok()) return buffer.status();
  DeviceTensor tensor;
  tensor.view = {
      .data = (*buffer)->data(), .dtype = dtype, .rows = rows, .cols = cols, .stride = cols};
  tensor.buffer = *std::move(buffer);
  return tensor;
}

HostRope::HostRope(const std::vector<float>& inv_freq, int64_t positions, double amplitude)
    : pairs(static_cast<int64_t>(inv_freq.size())), cos(positions * pairs), sin(positions * pairs) {
  for (int64_t p = 0; p < positions; ++p) {
    for (int64_t i = 0; i < pairs; ++i) {
      const double angle = static_cast<float>(p) * inv_freq[i];
      cos[p * pairs + i] = static_cast<float>(amplitude * std::cos(angle));
      sin[p * pairs + i] = static_cast<float>(amplitude * std::sin(angle));
    }
  }
}

absl::StatusOr<DeviceRope> UploadRope(kernels::Ops& ops, const HostRope& rope) {
  DeviceRope device;
  for (const auto& [values, tensor] :
       {std::pair<const std::vector<float>*, DeviceTensor*>{&rope.cos, &device.cos},
        {&rope.sin, &device.sin}}) {
    const int64_t positions = static_cast<int64_t>(values->size()) / rope.pairs;
    absl::StatusOr<DeviceTensor> table =
        AllocateTensor(ops, kernels::DType::kF32, positions, rope.pairs);
    if (!table.ok()) return table.status();
    *tensor = *std::move(table);
    ops.Upload(values->data(), tensor->view.data, values->size() * sizeof(float));
  }
  ops.Synchronize();  // the caller may let `rope` go
  return device;
}

KvHeads DraftKvHeads(const DraftConfig& config, int rank, int ranks) {
  const int heads = config.num_key_value_heads;
  if (heads % ranks == 0) return {.first = rank * heads / ranks, .count = heads / ranks};
  return {.first = rank * heads / ranks, .count = 1};
}

void LoadProgress::Add(int64_t bytes) {
  std::lock_guard<std::mutex> lock(mutex_);
  done_ += bytes;
  if (callback_) callback_(done_, total_);
}

int64_t LoadBytes(const TargetTensors& tensors) {
  int64_t bytes = Bytes(ListOutside(tensors));
  for (const TargetLayerTensors& layer : tensors.layers) bytes += Bytes(List(layer));
  return bytes;
}

int64_t CountUnused(const Checkpoint& checkpoint, const TargetTensors& tensors) {
  absl::flat_hash_set<std::string> used;
  const auto use = [&](absl::Span<const TensorView* const> all) {
    for (const TensorView* tensor : all) {
      used.insert(tensor->name);
      // Read while tensors are found, and not kept.
      if (absl::EndsWith(tensor->name, ".weight_packed")) {
        used.insert(absl::StrCat(tensor->name.substr(0, tensor->name.size() - 6), "shape"));
      }
    }
  };
  use(ListOutside(tensors));
  for (const TargetLayerTensors& layer : tensors.layers) use(List(layer));
  int64_t unused = 0;
  for (const TensorView& tensor : checkpoint.tensors()) unused += !used.contains(tensor.name);
  return unused;
}

absl::Status CheckValues(const TargetTensors& tensors) {
  const auto check = [](absl::Span<const TensorView* const> all) {
    for (const TensorView* tensor : all) {
      absl::Status status = CheckFinite(*tensor);
      if (status.ok()) status = CheckScales(*tensor);
      if (!status.ok()) return status;
    }
    return absl::OkStatus();
  };
  absl::Status status = check(ListOutside(tensors));
  for (const TargetLayerTensors& layer : tensors.layers) {
    if (status.ok()) status = check(List(layer));
  }
  return status;
}

absl::StatusOr<TargetWeights> LoadTargetWeights(const TargetTensors& tensors,
                                                const ModelConfig& config, kernels::Ops& ops,
                                                LoadProgress& progress) {
  TargetWeights weights;
  Loader load(ops);
  for (const TargetLayerTensors& t : tensors.layers) {
    progress.Add(load.Check(List(t)));
    if (!load.status().ok()) return load.status();
    TargetLayerWeights& w = weights.layers.emplace_back();
    w.input_norm = load.Vector(t.input_norm);
    w.qkv_a = load.Stacked({t.q_a.Whole(), t.kv_a.Whole()});
    w.q_a_norm = load.Vector(t.q_a_norm);
    w.q_b = load.Rows(t.q_b, Share(t.q_b.rows, ops));
    const int64_t nope = config.qk_nope_head_dim;
    const int64_t head_rows = nope + config.v_head_dim;
    const Range heads = Share(config.num_attention_heads, ops);
    for (int64_t h = heads.begin; h < heads.begin + heads.count; ++h) {
      MatrixPart w_uk = t.kv_b.Part(h * head_rows, nope, 0, t.kv_b.cols);
      w_uk.matrix.transposed = true;
      w.w_uk.push_back(load.Stacked({w_uk}));
      w.w_uv.push_back(load.Rows(t.kv_b, {h * head_rows + nope, config.v_head_dim}));
    }
    w.kv_a_norm = load.Vector(t.kv_a_norm);
    w.o = load.Segments(t.o);
    w.post_norm = load.Vector(t.post_norm);
    if (t.dense.has_value()) {
      w.dense.emplace();
      w.dense->gate_up = load.GateUp(*t.dense);
      w.dense->down = load.Segments(t.dense->down);
      continue;
    }
    w.router = load.Stacked({t.router->Whole()});
    w.router_bias = load.Vector(*t.router_bias);
    for (const MlpTensors& expert : t.experts) {
      if (!load.status().ok()) return load.status();
      w.experts.experts.push_back({load.GateUp(expert), load.Segments(expert.down)});
    }
    w.experts.shared = {load.GateUp(*t.shared), load.Segments(t.shared->down)};
  }
  progress.Add(load.Check(ListOutside(tensors)));
  weights.final_norm = load.Vector(tensors.final_norm);
  weights.lm_head = load.Rows(tensors.shared.lm_head, Share(config.vocab_size, ops));
  if (!load.status().ok()) return load.status();
  return weights;
}

absl::StatusOr<FeatureWeights> LoadFeatureWeights(const FeatureTensors& tensors,
                                                  const DraftConfig& config, kernels::Ops& ops) {
  Loader load(ops);
  std::vector<const TensorView*> all = {&tensors.hidden_norm};
  List(tensors.fc, all);
  load.Check(all);
  FeatureWeights weights;
  weights.fc = load.Rows(tensors.fc, Share(config.hidden_size, ops));
  weights.hidden_norm = load.Vector(tensors.hidden_norm);
  weights.rms_norm_eps = config.rms_norm_eps;
  if (!load.status().ok()) return load.status();
  return weights;
}

absl::StatusOr<DraftWeights> LoadDraftWeights(const DraftTensors& tensors,
                                              const EmbeddingTensors& target,
                                              const DraftConfig& config, kernels::Ops& ops) {
  Loader load(ops);
  std::vector<const TensorView*> all = {&tensors.final_norm};
  List(target.embedding, all);
  List(target.lm_head, all);
  for (const DraftLayerTensors& t : tensors.layers) {
    for (const TensorView* vector : {&t.input_norm, &t.q_norm, &t.k_norm, &t.post_norm}) {
      all.push_back(vector);
    }
    for (const CheckpointMatrix* matrix : {&t.q, &t.k, &t.v, &t.o}) List(*matrix, all);
    List(t.mlp, all);
  }
  load.Check(all);
  if (!load.status().ok()) return load.status();

  DraftWeights weights;
  const Range heads = Share(config.num_attention_heads, ops);
  const KvHeads kv = DraftKvHeads(config, ops.rank(), ops.ranks());
  const int64_t dim = config.head_dim;
  const auto kv_part = [&](const CheckpointMatrix& matrix) {
    return matrix.Part(kv.first * dim, kv.count * dim, 0, matrix.cols);
  };
  std::vector<MatrixPart> context;
  for (const DraftLayerTensors& t : tensors.layers) {
    context.push_back(kv_part(t.k));
    context.push_back(kv_part(t.v));
    DraftLayerWeights& w = weights.layers.emplace_back();
    w.input_norm = load.Vector(t.input_norm);
    w.qkv = load.Stacked(
        {t.q.Part(heads.begin * dim, heads.count * dim, 0, t.q.cols), kv_part(t.k), kv_part(t.v)});
    w.q_norm = load.Vector(t.q_norm);
    w.k_norm = load.Vector(t.k_norm);
    w.o = load.Segments(t.o);
    w.post_norm = load.Vector(t.post_norm);
    w.mlp.gate_up = load.GateUp(t.mlp);
    w.mlp.down = load.Segments(t.mlp.down);
  }
  weights.context_kv = load.Stacked(context);
  weights.final_norm = load.Vector(tensors.final_norm);
  weights.lm_head = load.Rows(target.lm_head, Share(config.vocab_size, ops));
  if (!load.status().ok()) return load.status();
  return weights;
}

}  // namespace coppice
