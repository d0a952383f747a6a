// A directory of safetensors shards, memory-mapped read-only.
#ifndef COPPICE_MODEL_CHECKPOINT_H_
#define COPPICE_MODEL_CHECKPOINT_H_

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "model/safetensors.h"

namespace coppice {

// Immutable and thread-safe after Open.  Opening reads headers only: weights are paged in by
// whoever reads them, so the cost is that of the headers (0.2 s for a 200,000-tensor checkpoint in
// page cache).
class Checkpoint {
 public:
  // Opens DIR/model.safetensors.index.json and every shard it names or, where there is no index,
  // DIR/model.safetensors.  With an index, exactly the tensors it names are visible.
  // Errors: NOT_FOUND (no checkpoint, a shard missing), DATA_LOSS (truncated or oversized file),
  // INVALID_ARGUMENT (malformed header or index; a tensor that is absent or in another shard).
  static absl::StatusOr<std::unique_ptr<Checkpoint>> Open(const std::string& dir);
  ~Checkpoint();
  Checkpoint(const Checkpoint&) = delete;
  Checkpoint& operator=(const Checkpoint&) = delete;

  // The returned view points into the mapping.  NOT_FOUND names the tensor and the directory.
  absl::StatusOr<TensorView> Find(std::string_view name) const;
  bool Contains(std::string_view name) const;

  const std::string& dir() const { return dir_; }
  // All tensors, ascending by name.
  const std::vector<TensorView>& tensors() const { return tensors_; }
  std::vector<std::string> names() const;
  uint64_t total_bytes() const { return total_bytes_; }  // of tensor data
  size_t num_files() const { return mappings_.size(); }

 private:
  struct Mapping {
    void* address;
    size_t length;
  };

  explicit Checkpoint(std::string dir) : dir_(std::move(dir)) {}
  absl::StatusOr<std::vector<TensorView>> MapFile(const std::string& path);

  std::string dir_;
  std::vector<Mapping> mappings_;
  std::vector<TensorView> tensors_;
  absl::flat_hash_map<std::string, size_t> by_name_;
  uint64_t total_bytes_ = 0;
};

}  // namespace coppice

#endif  // COPPICE_MODEL_CHECKPOINT_H_
