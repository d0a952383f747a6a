#include "services/verifier/pool_size.h"

#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <limits>
#include <string>

#include "absl/strings/str_cat.h"

namespace coppice::verifier {

int64_t BytesPerToken(const ModelConfig& config, int tp, bool features) {
  const int64_t latent =
      int64_t{4} * config.num_hidden_layers * (config.kv_lora_rank + config.qk_rope_head_dim);
  return latent * tp + (features ? int64_t{2} * config.hidden_size : 0);
}

int64_t DefaultPoolTokens(int64_t bytes_per_token, int64_t available_bytes, int64_t page_size) {
  const int64_t fits = available_bytes / 4 / std::max<int64_t>(bytes_per_token, 1);
  return std::max<int64_t>(1, std::min(kDefaultPoolTokens, fits) / page_size) * page_size;
}

int64_t AvailableMemory() {
  std::ifstream info("/proc/meminfo");
  for (std::string key, rest; info >> key; std::getline(info, rest)) {
    int64_t kib = 0;
    if (key == "MemAvailable:" && info >> kib) return kib * 1024;
  }
  return static_cast<int64_t>(sysconf(_SC_AVPHYS_PAGES)) * sysconf(_SC_PAGESIZE);
}

absl::StatusOr<int64_t> PoolPages(int64_t tokens, int64_t page_size, int64_t bytes_per_token,
                                  int64_t memory_bytes) {
  if (tokens < page_size) {
    return absl::InvalidArgumentError(absl::StrCat("--pool-tokens ", tokens,
                                                   " is less than one page of ", page_size,
                                                   " tokens; give at least ", page_size));
  }
  const int64_t pages = tokens / page_size;
  if (tokens > std::numeric_limits<int32_t>::max() - page_size) {
    return absl::InvalidArgumentError(
        absl::StrCat("--pool-tokens ", tokens,
                     " is more than slot numbers reach; give less "
                     "than ",
                     std::numeric_limits<int32_t>::max() - page_size));
  }
  if (tokens > memory_bytes / bytes_per_token) {
    return absl::ResourceExhaustedError(absl::StrCat(
        "--pool-tokens ", tokens, " at ", bytes_per_token, " bytes a token needs more than the ",
        memory_bytes, " bytes of memory this machine has; give at most ",
        memory_bytes / bytes_per_token));
  }
  return pages + 1;
}

}  // namespace coppice::verifier
