// Ten thousand random corruptions of a small checkpoint: each is refused by name or loads to what
// it says, and none crashes or asks for memory that its files do not account for.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <iterator>
#include <map>
#include <new>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "model/inspect.h"
#include "model/target.h"
#include "model/test_files.h"
#include "nlohmann/json.hpp"

namespace {

// The largest single allocation since the last reset.
std::atomic<size_t> largest{0};

void* Allocate(size_t size, size_t alignment) {
  size_t seen = largest.load(std::memory_order_relaxed);
  while (size > seen && !largest.compare_exchange_weak(seen, size)) {
  }
  void* p = alignment <= alignof(std::max_align_t)
                ? std::malloc(size)
                : std::aligned_alloc(alignment, (size + alignment - 1) / alignment * alignment);
  if (p == nullptr) throw std::bad_alloc();
  return p;
}

}  // namespace

void* operator new(size_t size) { return Allocate(size, 1); }
void* operator new[](size_t size) { return Allocate(size, 1); }
void* operator new(size_t size, std::align_val_t a) { return Allocate(size, size_t(a)); }
void* operator new[](size_t size, std::align_val_t a) { return Allocate(size, size_t(a)); }
void operator delete(void* p) noexcept { std::free(p); }
void operator delete[](void* p) noexcept { std::free(p); }
void operator delete(void* p, size_t) noexcept { std::free(p); }
void operator delete[](void* p, size_t) noexcept { std::free(p); }
void operator delete(void* p, std::align_val_t) noexcept { std::free(p); }
void operator delete[](void* p, std::align_val_t) noexcept { std::free(p); }
void operator delete(void* p, size_t, std::align_val_t) noexcept { std::free(p); }
void operator delete[](void* p, size_t, std::align_val_t) noexcept { std::free(p); }

namespace coppice {
namespace {

using nlohmann::json;

constexpr int kMutations = 10'000;
constexpr int kVocab = 16;
constexpr char kIndex[] = "model.safetensors.index.json";
constexpr char kShards[][40] = {"model-00001-of-00002.safetensors",
                                "model-00002-of-00002.safetensors"};

using Files = std::map<std::string, std::string>;

struct Shard {
  json header = json::object();
  std::string data;
};

uint16_t Bf16(float value) {
  uint32_t word;
  std::memcpy(&word, &value, 4);
  return static_cast<uint16_t>(word >> 16);
}

// One dense layer in bf16, one of experts in INT4 with attention in FP8; two shards and an index.
Files MakeModel() {
  const int hidden = 32, heads = 8, q_lora = 16, kv_lora = 32, nope = 4, rope = 4, v = 4;
  const int dense = 32, expert = 32, experts = 4;
  std::mt19937 random(3);
  std::normal_distribution<float> normal;
  Shard shards[2];
  json weight_map;
  Shard* shard = &shards[0];
  const auto put = [&](const std::string& name, const char* dtype, std::vector<int64_t> shape,
                       const std::string& bytes) {
    shard->header[name] = {
        {"dtype", dtype},
        {"shape", shape},
        {"data_offsets", {shard->data.size(), shard->data.size() + bytes.size()}}};
    shard->data += bytes;
    weight_map[name] = kShards[shard - shards];
  };
  const auto bf16 = [&](const std::string& name, std::vector<int64_t> shape, float mean,
                        float deviation) {
    int64_t count = 1;
    for (const int64_t n : shape) count *= n;
    std::string bytes;
    for (int64_t i = 0; i < count; ++i) {
      const uint16_t half = Bf16(mean + deviation * normal(random));
      bytes.append(reinterpret_cast<const char*>(&half), 2);
    }
    put(name, "BF16", shape, bytes);
  };
  const auto f32 = [&](const std::string& name, std::vector<int64_t> shape, float value) {
    int64_t count = 1;
    for (const int64_t n : shape) count *= n;
    std::string bytes;
    for (int64_t i = 0; i < count; ++i) {
      const float x = value * (1 + 0.3f * normal(random));
      bytes.append(reinterpret_cast<const char*>(&x), 4);
    }
    put(name, "F32", shape, bytes);
  };
  const auto plain = [&](const std::string& name, int64_t rows, int64_t cols) {
    bf16(name + ".weight", {rows, cols}, 0, 1.5f / std::sqrt(static_cast<float>(cols)));
  };
  const auto norm = [&](const std::string& name, int64_t size) {
    bf16(name + ".weight", {size}, 1, 0.2f);
  };
  const auto fp8 = [&](const std::string& name, int64_t rows, int64_t cols) {
    std::string bytes(rows * cols, '\0');
    for (char& c : bytes) c = static_cast<char>(random() % 2 * 0x80 + random() % 0x60);
    put(name + ".weight", "F8_E4M3", {rows, cols}, bytes);
    f32(name + ".weight_scale_inv", {(rows + 127) / 128, (cols + 127) / 128}, 0.01f);
  };
  const auto int4 = [&](const std::string& name, int32_t rows, int32_t cols) {
    std::string bytes(rows * cols / 2, '\0');
    for (char& c : bytes) c = static_cast<char>(random());
    put(name + ".weight_packed", "I32", {rows, cols / 8}, bytes);
    bf16(name + ".weight_scale", {rows, cols / 32}, 0.05f, 0.01f);
    const int32_t shape[2] = {rows, cols};
    put(name + ".weight_shape", "I32", {2}, std::string(reinterpret_cast<const char*>(shape), 8));
  };
  bf16("model.embed_tokens.weight", {kVocab, hidden}, 0, 1);
  for (int layer = 0; layer < 2; ++layer) {
    shard = &shards[layer];
    const std::string p = absl::StrCat("model.layers.", layer, ".");
    const auto attention = [&](const char* name, int64_t rows, int64_t cols) {
      if (layer == 1) {
        fp8(absl::StrCat(p, "self_attn.", name), rows, cols);
      } else {
        plain(absl::StrCat(p, "self_attn.", name), rows, cols);
      }
    };
    norm(p + "input_layernorm", hidden);
    norm(p + "post_attention_layernorm", hidden);
    attention("q_a_proj", q_lora, hidden);
    norm(p + "self_attn.q_a_layernorm", q_lora);
    attention("q_b_proj", heads * (nope + rope), q_lora);
    attention("kv_a_proj_with_mqa", kv_lora + rope, hidden);
    norm(p + "self_attn.kv_a_layernorm", kv_lora);
    attention("kv_b_proj", heads * (nope + v), kv_lora);
    attention("o_proj", hidden, heads * v);
    if (layer == 0) {
      for (const char* name : {"gate_proj", "up_proj"}) plain(p + "mlp." + name, dense, hidden);
      plain(p + "mlp.down_proj", hidden, dense);
      continue;
    }
    plain(p + "mlp.gate", experts, hidden);
    f32(p + "mlp.gate.e_score_correction_bias", {experts}, 0.2f);
    for (int e = 0; e < experts; ++e) {
      const std::string name = absl::StrCat(p, "mlp.experts.", e, ".");
      int4(name + "gate_proj", expert, hidden);
      int4(name + "up_proj", expert, hidden);
      int4(name + "down_proj", hidden, expert);
    }
    for (const char* name : {"gate_proj", "up_proj"}) {
      plain(p + "mlp.shared_experts." + name, expert, hidden);
    }
    plain(p + "mlp.shared_experts.down_proj", hidden, expert);
  }
  norm("model.norm", hidden);
  plain("lm_head", kVocab, hidden);

  Files files;
  for (int i = 0; i < 2; ++i) {
    files[kShards[i]] = SafetensorsImage(shards[i].header.dump(), shards[i].data);
  }
  files[kIndex] = json{{"metadata", {{"total_size", 1}}}, {"weight_map", weight_map}}.dump();
  files["config.json"] = TinyTargetConfig({.vocab = kVocab,
                                           .hidden = hidden,
                                           .heads = heads,
                                           .q_lora = q_lora,
                                           .kv_lora = kv_lora,
                                           .nope = nope,
                                           .rope = rope,
                                           .v = v,
                                           .dense = dense,
                                           .experts = experts,
                                           .expert = expert})
                             .dump();
  return files;
}

absl::StatusOr<std::vector<float>> Logits(const std::string& dir) {
  absl::StatusOr<std::unique_ptr<Target>> target = Target::Load({.model_dir = dir,
                                                                 .drafter_dir = "",
                                                                 .tp = 1,
                                                                 .page_size = 8,
                                                                 .pages = 2,
                                                                 .max_rows = 4,
                                                                 .progress = nullptr});
  if (!target.ok()) return target.status();
  const std::vector<int32_t> tokens = {0, 1, 0, 1};
  const std::vector<int32_t> pages = {1};
  const std::vector<int32_t> rows = {3};
  ForwardResult result;
  const absl::Status status = (*target)->Forward({{{.context_len = 0,
                                                    .tokens = tokens,
                                                    .depths = {},
                                                    .ancestors = {},
                                                    .page_table = pages,
                                                    .logit_rows = rows}}},
                                                 &result);
  if (!status.ok()) return status;
  return result.logits;
}

// A corruption, and whether a checkpoint that still loads must give the same logits: where only
// the description of the tensors is touched.  A changed value or setting may be a legal one.
struct Mutation {
  std::string what;
  bool same = true;
};

class Mutator {
 public:
  explicit Mutator(uint32_t seed) : random_(seed) {}

  Mutation Apply(Files* files) {
    switch (Below(10)) {
      case 0:
      case 1:
        return Config(&(*files)["config.json"]);
      case 2:
        return Index(&(*files)[kIndex]);
      case 3:
        files->erase(Below(2) == 0 ? kShards[Below(2)] : kIndex);
        return {"a missing file"};
      default:
        break;
    }
    std::string* shard = &(*files)[kShards[Below(2)]];
    switch (Below(10)) {
      case 0:
        return Bytes(shard, "a byte of a shard", false);
      case 1:
        shard->resize(Below(shard->size()));
        return {"a truncated shard"};
      case 2:
        shard->append(1 + Below(40), static_cast<char>(Below(256)));
        return {"a shard with more at its end"};
      case 3: {
        const uint64_t length = Below(2) == 0 ? Any() : Any() >> Below(64);
        std::memcpy(shard->data(), &length, sizeof(length));
        return {"another length of the header"};
      }
      default:
        return Header(shard);
    }
  }

 private:
  uint64_t Any() { return random_(); }
  size_t Below(size_t n) { return n == 0 ? 0 : random_() % n; }

  json Value() {
    static const json kValues = json::parse(
        R"([0, 1, -1, 2, 7, 31, 1000000, 1048576, 16777216, 2147483647, 4294967296,
            18446744073709551615, 1e308, -1e-300, 0.5, true, false, null, "", "x", "BF16", [], {},
            [[]], {"a": 1}])");
    return kValues[Below(kValues.size())];
  }

  Mutation Bytes(std::string* text, const char* what, bool same) {
    for (size_t n = 1 + Below(3); n > 0; --n) {
      (*text)[Below(text->size())] = static_cast<char>(Below(256));
    }
    return {what, same};
  }

  Mutation Config(std::string* text) {
    if (Below(4) == 0) return Bytes(text, "bytes of the configuration", false);
    json config = json::parse(*text);
    json& object = Below(4) == 0 ? config["rope_scaling"] : config;
    auto it = object.begin();
    std::advance(it, Below(object.size()));
    const std::string what = "configuration, " + it.key();
    if (Below(4) == 0) {
      object.erase(it);
    } else {
      *it = it->is_number() && Below(2) == 0 ? json(it->get<double>() * (Below(2) == 0 ? 2 : 0.5))
                                             : Value();
      if (it->is_number_float() && it->get<double>() == std::floor(it->get<double>()) &&
          std::abs(it->get<double>()) < 1e9) {
        *it = static_cast<int64_t>(it->get<double>());
      }
    }
    *text = config.dump();
    return {what, false};
  }

  Mutation Index(std::string* text) {
    if (Below(3) == 0) return Bytes(text, "bytes of the index", true);
    json index = json::parse(*text);
    json& map = index["weight_map"];
    auto it = map.begin();
    std::advance(it, Below(map.size()));
    switch (Below(5)) {
      case 0:
        *it = kShards[Below(2)];
        break;
      case 1:
        *it = Value();
        break;
      case 2:
        *it = Below(2) == 0 ? "../config.json" : "config.json";
        break;
      case 3:
        map[it.key() + "x"] = *it;
        break;
      default:
        map.erase(it);
    }
    *text = index.dump();
    return {"the index"};
  }

  Mutation Header(std::string* shard) {
    uint64_t length = 0;
    std::memcpy(&length, shard->data(), sizeof(length));
    std::string text = shard->substr(8, length);
    const std::string data = shard->substr(8 + length);
    if (Below(3) == 0) {
      // What a flipped digit or letter may still spell: another tensor's place or form, never both
      // of a pair, so a file that loads means what it meant.
      Mutation mutation = Bytes(&text, "bytes of a header", true);
      *shard = SafetensorsImage(text, data);
      return mutation;
    }
    json header = json::parse(text);
    auto it = header.begin();
    std::advance(it, Below(header.size()));
    const std::string name = it.key();
    json& entry = *it;
    std::string what = name;
    switch (Below(7)) {
      case 0: {
        static const char* const kDTypes[] = {"BF16", "F16", "F32", "F64",     "I8",      "U8",
                                              "I16",  "I32", "I64", "F8_E4M3", "F8_E5M2", "U16"};
        entry["dtype"] = Below(4) == 0 ? Value() : json(kDTypes[Below(std::size(kDTypes))]);
        what += ", dtype";
        break;
      }
      case 1:
        entry["shape"][Below(entry["shape"].size())] = Value();
        what += ", a size";
        break;
      case 2:
        entry["shape"] = Below(2) == 0 ? json::array() : Value();
        what += ", shape";
        break;
      case 3:
        std::reverse(entry["shape"].begin(), entry["shape"].end());
        what += ", shape reversed";
        break;
      case 4: {
        json& offset = entry["data_offsets"][Below(2)];
        offset = Below(2) == 0 ? Value()
                               : json(offset.get<int64_t>() + static_cast<int64_t>(Below(9)) - 4);
        what += ", an offset";
        break;
      }
      case 5: {
        const json moved = entry;
        header.erase(it);
        std::string other = name;
        other[Below(other.size())] = static_cast<char>('a' + Below(26));
        header[Below(4) == 0 ? "" : other] = moved;
        what += ", name";
        break;
      }
      default:
        entry.erase(Below(2) == 0 ? "dtype" : Below(2) == 0 ? "shape" : "data_offsets");
        what += ", a key of its entry";
    }
    *shard = SafetensorsImage(header.dump(), data);
    return {what};
  }

  std::mt19937_64 random_;
};

TEST(MutatedCheckpoint, LoadsToTheSameOrIsRefusedByName) {
  const Files original = MakeModel();
  const TempDir dir;
  size_t total = 0;
  for (const auto& [name, content] : original) {
    dir.Write(name, content);
    total += content.size();
  }
  largest = 0;
  const absl::StatusOr<std::vector<float>> expected = Logits(dir.path());
  ASSERT_TRUE(expected.ok()) << expected.status();
  // Nothing an unbroken checkpoint needs is larger than its files: their copies in memory, and
  // tables of fixed size.
  const size_t allowed = std::max<size_t>(largest, total);
  ASSERT_LE(allowed, 2 * total);

  std::map<std::string, int> outcomes;
  for (int i = 0; i < kMutations; ++i) {
    Mutator mutator(static_cast<uint32_t>(i));
    Files files = original;
    const Mutation mutation = mutator.Apply(&files);
    SCOPED_TRACE(absl::StrCat("mutation ", i, ": ", mutation.what));
    for (const auto& [name, content] : original) {
      const auto it = files.find(name);
      if (it == files.end()) {
        std::filesystem::remove(dir.File(name));
      } else if (it->second != content) {
        dir.Write(name, it->second);
      }
    }
    largest = 0;
    const absl::StatusOr<std::vector<float>> logits = Logits(dir.path());
    EXPECT_LE(largest, allowed);
    if (i % 20 == 0) {
      // Whoever inspects a checkpoint is told what loading it would be.  A forward that fails, on
      // finite weights, is not seen without running.
      const Inspection inspection = Inspect(dir.path(), {.drafter_dir = "", .check_values = true});
      const bool forward_failed = absl::IsInternal(logits.status());
      bool about_weights = false;
      for (const std::string& sentence : inspection.refused) {
        about_weights = about_weights || (!absl::StrContains(sentence, "tiktoken.model") &&
                                          !absl::StrContains(sentence, "chat template"));
      }
      EXPECT_EQ(about_weights, !logits.ok() && !forward_failed) << logits.status() << "\n"
                                                                << InspectionText(inspection);
    }
    if (!logits.ok()) {
      ++outcomes["refused"];
      const std::string message(logits.status().message());
      // A forward's error names the sequence; every other one file and tensor or key, or the sizes
      // that ranks cannot share.
      EXPECT_TRUE(absl::StrContains(message, dir.path()) ||
                  absl::StrContains(message, "sequence 0 of the step") ||
                  absl::StrContains(message, " does not divide"))
          << message;
    } else if (*logits == *expected) {
      ++outcomes["the same logits"];
    } else {
      ++outcomes["other logits"];
      EXPECT_FALSE(mutation.same);
      for (const float logit : *logits) ASSERT_TRUE(std::isfinite(logit));
    }
    if (HasFailure()) break;
    for (const auto& [name, content] : original) {
      const auto it = files.find(name);
      if (it == files.end() || it->second != content) dir.Write(name, content);
    }
  }
  for (const auto& [outcome, count] : outcomes) {
    std::printf("%s: %d\n", outcome.c_str(), count);
    EXPECT_GT(count, kMutations / 100);
  }
  EXPECT_EQ(outcomes.size(), 3u);
}

}  // namespace
}  // namespace coppice
