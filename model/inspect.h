// What a checkpoint directory is, what it needs, and what of it Coppice would refuse.
#ifndef COPPICE_MODEL_INSPECT_H_
#define COPPICE_MODEL_INSPECT_H_

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "model/config.h"
#include "nlohmann/json.hpp"

namespace coppice {

struct InspectOptions {
  std::string drafter_dir;  // empty: DIR/drafter where that exists
  // Look at every value of every tensor for NaN and infinity, as loading does; reads the whole
  // checkpoint.
  bool check_values = false;
};

// The bytes of one part of the model in one form.
struct PartSize {
  std::string part;  // "routed experts", …
  std::string form;  // "INT4", "FP8", "BF16" or "F32"
  int64_t matrices = 0;
  int64_t parameters = 0;
  int64_t bytes = 0;  // in the files, scales included
};

// What one of `tp` ranks holds of the weights: INT4 as it is stored, FP8 decoded to bf16.  The
// embedding is not among it: it stays mapped from the file, once per machine.
struct RankSize {
  int tp = 1;
  int64_t bytes = 0;
  std::string refused;  // why so many ranks cannot share the model; empty: they can
};

struct Inspection {
  std::string dir;
  std::string release;  // "Kimi-K2.6", or what else it is
  std::optional<ModelConfig> config;
  int64_t files = 0;
  int64_t tensors = 0;
  int64_t bytes = 0;   // of all tensors
  int64_t unused = 0;  // tensors that the text model does not have
  int64_t unused_bytes = 0;
  std::vector<PartSize> parts;
  int64_t embedding_bytes = 0;
  std::vector<RankSize> ranks;  // 1, 2, 4 and 8
  std::string chat_template;    // its release's name; empty: not known
  int64_t base_tokens = 0;
  int64_t named_special_tokens = 0;
  std::string drafter;  // what it is; empty: none
  // A sentence for each thing that Coppice would refuse, with file and tensor or key.
  std::vector<std::string> refused;

  // Of the latent cache, per token and rank (every rank holds all of it).  An fp8 row has the
  // latent part in e4m3, 16 bytes for its scale, and the RoPE part in bf16.
  enum class Cache { kBf16, kFp8, kF32 };
  int64_t CacheBytesPerToken(Cache cache) const;
};

// Never fails as a whole: what cannot be read is among `refused`, and the rest is told.
Inspection Inspect(const std::string& dir, const InspectOptions& options = {});

std::string InspectionText(const Inspection& inspection);
nlohmann::ordered_json InspectionJson(const Inspection& inspection);

}  // namespace coppice

#endif  // COPPICE_MODEL_INSPECT_H_
