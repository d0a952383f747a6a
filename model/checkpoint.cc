#include "model/checkpoint.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <map>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "model/json_file.h"

namespace coppice {
namespace {

using nlohmann::json;

constexpr size_t kMaxIndexBytes = 256 << 20;

bool IsFile(const std::string& path) {
  struct stat info;
  return stat(path.c_str(), &info) == 0 && S_ISREG(info.st_mode);
}

// shard file name → the tensors that the index places in it.
absl::StatusOr<std::map<std::string, std::vector<std::string>>> ReadIndex(const std::string& path) {
  absl::StatusOr<std::string> text = ReadSmallFile(path, kMaxIndexBytes);
  if (!text.ok()) return text.status();
  absl::StatusOr<json> index = ParseJsonObject(*text, path);
  if (!index.ok()) return index.status();
  const auto weight_map = index->find("weight_map");
  if (weight_map == index->end() || !weight_map->is_object() || weight_map->empty()) {
    return absl::InvalidArgumentError(
        absl::StrCat(path, " has no weight_map (an object from tensor names to file names)"));
  }
  std::map<std::string, std::vector<std::string>> shards;
  for (const auto& [tensor, file] : weight_map->items()) {
    if (!file.is_string()) {
      return absl::InvalidArgumentError(
          absl::StrCat(path, ": weight_map names no file for tensor ", tensor));
    }
    const std::string& name = file.get_ref<const std::string&>();
    // Only files of this directory: a checkpoint must not reach elsewhere.
    if (name.empty() || name == "." || name == ".." || name.find('/') != std::string::npos ||
        name.find('\0') != std::string::npos) {
      return absl::InvalidArgumentError(
          absl::StrCat(path, ": weight_map places tensor ", tensor, " in \"", name,
                       "\", which is not the name of a file beside the index"));
    }
    shards[name].push_back(tensor);
  }
  return shards;
}

}  // namespace

Checkpoint::~Checkpoint() {
  for (const Mapping& mapping : mappings_) munmap(mapping.address, mapping.length);
}

absl::StatusOr<std::vector<TensorView>> Checkpoint::MapFile(const std::string& path) {
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (fd < 0) {
    const int error = errno;
    if (error == ENOENT) return absl::NotFoundError(absl::StrCat(path, " does not exist"));
    return absl::PermissionDeniedError(
        absl::StrCat(path, " cannot be opened: ", std::strerror(error)));
  }
  struct stat info;
  if (fstat(fd, &info) != 0 || !S_ISREG(info.st_mode)) {
    close(fd);
    return absl::InvalidArgumentError(absl::StrCat(path, " is not a regular file"));
  }
  const size_t length = static_cast<size_t>(info.st_size);
  if (length == 0) {
    close(fd);
    return absl::DataLossError(absl::StrCat(path, " is empty (copy it again)"));
  }
  void* address = mmap(nullptr, length, PROT_READ, MAP_SHARED, fd, 0);
  const int error = errno;
  close(fd);
  if (address == MAP_FAILED) {
    return absl::ResourceExhaustedError(
        absl::StrCat(path, " (", length, " bytes) cannot be mapped: ", std::strerror(error)));
  }
  mappings_.push_back({address, length});
  return ParseSafetensors(absl::MakeConstSpan(static_cast<const std::byte*>(address), length),
                          path);
}

absl::StatusOr<std::unique_ptr<Checkpoint>> Checkpoint::Open(const std::string& dir) {
  std::unique_ptr<Checkpoint> checkpoint(new Checkpoint(dir));
  const std::string index_path = absl::StrCat(dir, "/model.safetensors.index.json");
  const std::string single_path = absl::StrCat(dir, "/model.safetensors");
  if (IsFile(index_path)) {
    absl::StatusOr<std::map<std::string, std::vector<std::string>>> shards = ReadIndex(index_path);
    if (!shards.ok()) return shards.status();
    // What every shard holds is needed before a tensor that its shard lacks can be said to be
    // elsewhere.
    std::map<std::string, absl::flat_hash_map<std::string, TensorView>> held;
    for (const auto& [file, tensors] : *shards) {
      const std::string path = absl::StrCat(dir, "/", file);
      absl::StatusOr<std::vector<TensorView>> views = checkpoint->MapFile(path);
      if (absl::IsNotFound(views.status())) {
        return absl::NotFoundError(absl::StrCat(path, " does not exist, but ", index_path,
                                                " places ", tensors.size(), " tensors in it (",
                                                tensors.front(), ", …): a shard is missing"));
      }
      if (!views.ok()) return views.status();
      auto& by_name = held[file];
      for (TensorView& view : *views) {
        std::string name = view.name;
        by_name.emplace(std::move(name), std::move(view));
      }
    }
    for (const auto& [file, tensors] : *shards) {
      auto& by_name = held[file];
      for (const std::string& tensor : tensors) {
        const auto it = by_name.find(tensor);
        if (it != by_name.end()) {
          checkpoint->tensors_.push_back(std::move(it->second));
          continue;
        }
        for (const auto& [other, others] : held) {
          if (other != file && others.contains(tensor)) {
            return absl::InvalidArgumentError(absl::StrCat(index_path, " places tensor ", tensor,
                                                           " in ", file, ", but it is in ", other));
          }
        }
        return absl::InvalidArgumentError(absl::StrCat(
            index_path, " names tensor ", tensor, ", but ", dir, "/", file, " has no such tensor"));
      }
    }
  } else if (IsFile(single_path)) {
    absl::StatusOr<std::vector<TensorView>> views = checkpoint->MapFile(single_path);
    if (!views.ok()) return views.status();
    checkpoint->tensors_ = *std::move(views);
  } else {
    return absl::NotFoundError(
        absl::StrCat(dir,
                     " holds no checkpoint: neither model.safetensors.index.json nor "
                     "model.safetensors is there"));
  }

  std::vector<TensorView>& tensors = checkpoint->tensors_;
  std::sort(tensors.begin(), tensors.end(),
            [](const TensorView& a, const TensorView& b) { return a.name < b.name; });
  checkpoint->by_name_.reserve(tensors.size());
  for (size_t i = 0; i < tensors.size(); ++i) {
    checkpoint->by_name_.emplace(tensors[i].name, i);
    checkpoint->total_bytes_ += tensors[i].bytes;
  }
  return checkpoint;
}

absl::StatusOr<TensorView> Checkpoint::Find(std::string_view name) const {
  const auto it = by_name_.find(absl::string_view(name.data(), name.size()));
  if (it == by_name_.end()) {
    return absl::NotFoundError(absl::StrCat("the checkpoint in ", dir_, " has no tensor ",
                                            absl::string_view(name.data(), name.size())));
  }
  return tensors_[it->second];
}

bool Checkpoint::Contains(std::string_view name) const {
  return by_name_.contains(absl::string_view(name.data(), name.size()));
}

std::vector<std::string> Checkpoint::names() const {
  std::vector<std::string> names;
  names.reserve(tensors_.size());
  for (const TensorView& tensor : tensors_) names.push_back(tensor.name);
  return names;
}

}  // namespace coppice
