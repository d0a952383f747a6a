// JSON from files that nobody vouches for: no exceptions, no repeated keys.
#ifndef COPPICE_MODEL_JSON_FILE_H_
#define COPPICE_MODEL_JSON_FILE_H_

#include <cstddef>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"
#include "nlohmann/json.hpp"

namespace coppice {

// The whole file.  NOT_FOUND where it does not exist, INVALID_ARGUMENT where it is longer than
// `max_bytes` or not a regular file.
absl::StatusOr<std::string> ReadSmallFile(const std::string& path, size_t max_bytes);

// A JSON object.  INVALID_ARGUMENT, naming `source`, where `text` is not JSON, is not an object,
// nests deeper than 64 levels or repeats a key.
absl::StatusOr<nlohmann::json> ParseJsonObject(std::string_view text, const std::string& source);

}  // namespace coppice

#endif  // COPPICE_MODEL_JSON_FILE_H_
