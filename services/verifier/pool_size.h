// How large a KV pool to make where nobody said.
#ifndef COPPICE_SERVICES_VERIFIER_POOL_SIZE_H_
#define COPPICE_SERVICES_VERIFIER_POOL_SIZE_H_

#include <cstdint>

#include "absl/status/statusor.h"
#include "model/config.h"

namespace coppice::verifier {

inline constexpr int64_t kDefaultPoolTokens = 65536;

// Bytes that one cached token takes over all ranks: every rank keeps the whole fp32 latent of each
// layer, and a share of the token's bf16 features.
int64_t BytesPerToken(const ModelConfig& config, int tp, bool features);

// kDefaultPoolTokens, or what fits into a quarter of `available_bytes` if that is less, in whole
// pages (at least one).
int64_t DefaultPoolTokens(int64_t bytes_per_token, int64_t available_bytes, int64_t page_size);

// Memory that can be had without swapping, as the system says.
int64_t AvailableMemory();

// Pages for a pool of `tokens`, page 0 included.  INVALID_ARGUMENT where it would have none to hand
// out or more than page numbers reach; RESOURCE_EXHAUSTED where its bytes exceed the machine's
// memory.
absl::StatusOr<int64_t> PoolPages(int64_t tokens, int64_t page_size, int64_t bytes_per_token,
                                  int64_t memory_bytes);

}  // namespace coppice::verifier

#endif  // COPPICE_SERVICES_VERIFIER_POOL_SIZE_H_
