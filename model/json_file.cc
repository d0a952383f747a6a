#include "model/json_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace coppice {
namespace {

using nlohmann::json;

constexpr size_t kMaxDepth = 64;

// Builds the document and stops at the first fault, so that a hostile text costs what was read of
// it.
class ObjectBuilder final : public nlohmann::json_sax<json> {
 public:
  json& root() { return root_; }
  const std::string& error() const { return error_; }

  bool null() override { return Put(nullptr) != nullptr; }
  bool boolean(bool value) override { return Put(value) != nullptr; }
  bool number_integer(number_integer_t value) override { return Put(value) != nullptr; }
  bool number_unsigned(number_unsigned_t value) override { return Put(value) != nullptr; }
  bool number_float(number_float_t value, const string_t&) override {
    return Put(value) != nullptr;
  }
  bool string(string_t& value) override { return Put(std::move(value)) != nullptr; }
  bool binary(binary_t&) override { return Fail("holds binary data"); }
  bool start_object(std::size_t) override { return Open(json::object()); }
  bool start_array(std::size_t) override { return Open(json::array()); }
  bool end_object() override { return Close(); }
  bool end_array() override { return Close(); }

  bool key(string_t& name) override {
    json& object = *open_.back();
    if (object.contains(name)) {
      return Fail(absl::StrCat("has the key \"", name, "\" twice in one object"));
    }
    key_ = std::move(name);
    return true;
  }

  bool parse_error(std::size_t position, const std::string&,
                   const nlohmann::detail::exception&) override {
    return Fail(absl::StrCat("is not valid JSON (byte ", position, ")"));
  }

 private:
  bool Fail(std::string message) {
    error_ = std::move(message);
    return false;
  }

  json* Put(json value) {
    if (open_.empty()) {
      root_ = std::move(value);
      return &root_;
    }
    json& parent = *open_.back();
    if (parent.is_array()) {
      parent.push_back(std::move(value));
      return &parent.back();
    }
    json& slot = parent[key_];
    slot = std::move(value);
    return &slot;
  }

  bool Open(json container) {
    if (open_.size() == kMaxDepth) {
      return Fail(absl::StrCat("nests deeper than ", kMaxDepth, " levels"));
    }
    // A container's address stays put while it is open: only its innermost open descendant grows.
    open_.push_back(Put(std::move(container)));
    return true;
  }

  bool Close() {
    open_.pop_back();
    return true;
  }

  json root_;
  std::vector<json*> open_;
  std::string key_;
  std::string error_;
};

}  // namespace

absl::StatusOr<std::string> ReadSmallFile(const std::string& path, size_t max_bytes) {
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (fd < 0) {
    const int error = errno;
    if (error == ENOENT || error == ENOTDIR) {
      return absl::NotFoundError(absl::StrCat(path, " does not exist"));
    }
    return absl::PermissionDeniedError(
        absl::StrCat(path, " cannot be opened: ", std::strerror(error)));
  }
  struct stat info;
  std::string text;
  absl::Status status;
  if (fstat(fd, &info) != 0 || !S_ISREG(info.st_mode)) {
    status = absl::InvalidArgumentError(absl::StrCat(path, " is not a regular file"));
  } else if (static_cast<size_t>(info.st_size) > max_bytes) {
    status =
        absl::InvalidArgumentError(absl::StrCat(path, " is ", info.st_size, " bytes long; at most ",
                                                max_bytes, " are expected of such a file"));
  } else {
    text.resize(static_cast<size_t>(info.st_size));
    size_t done = 0;
    while (done < text.size()) {
      const ssize_t n = read(fd, text.data() + done, text.size() - done);
      if (n < 0 && errno == EINTR) continue;
      if (n <= 0) {
        status = absl::DataLossError(absl::StrCat(path, " ended after ", done, " of ", text.size(),
                                                  " bytes while it was read"));
        break;
      }
      done += static_cast<size_t>(n);
    }
  }
  close(fd);
  if (!status.ok()) return status;
  return text;
}

absl::StatusOr<json> ParseJsonObject(std::string_view text, const std::string& source) {
  ObjectBuilder builder;
  if (!json::sax_parse(text.begin(), text.end(), &builder)) {
    return absl::InvalidArgumentError(absl::StrCat(source, " ", builder.error()));
  }
  if (!builder.root().is_object()) {
    return absl::InvalidArgumentError(absl::StrCat(source, " is not a JSON object"));
  }
  return std::move(builder.root());
}

}  // namespace coppice
