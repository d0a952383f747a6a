// A fast 64-bit hash by which two processes find out that they read the same files.
#ifndef COPPICE_MODEL_FINGERPRINT_H_
#define COPPICE_MODEL_FINGERPRINT_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace coppice {

// Order-sensitive, the same on every machine, not cryptographic.  Each Add is length-prefixed, so
// that Add("ab"), Add("c") differs from Add("a"), Add("bc").
class Fingerprint {
 public:
  Fingerprint& Add(std::string_view text) { return AddBytes(text.data(), text.size()); }
  Fingerprint& Add(int64_t value);
  Fingerprint& AddBytes(const void* data, size_t size);

  uint64_t value() const;
  std::string Hex() const;  // 16 lower-case digits

 private:
  uint64_t state_ = 0x9E3779B97F4A7C15ull;
};

}  // namespace coppice

#endif  // COPPICE_MODEL_FINGERPRINT_H_
