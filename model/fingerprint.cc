#include "model/fingerprint.h"

#include <bit>
#include <cstring>

#include "absl/strings/str_format.h"

namespace coppice {
namespace {

static_assert(std::endian::native == std::endian::little, "words are read as they lie in memory");

// SplitMix64's finaliser (Steele, Lea, Flood 2014): a bijection in which every input bit moves
// every output bit.
uint64_t Mix(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
  return x ^ (x >> 31);
}

uint64_t Load(const unsigned char* p, size_t size) {
  uint64_t word = 0;
  std::memcpy(&word, p, size);
  return word;
}

}  // namespace

Fingerprint& Fingerprint::Add(int64_t value) { return AddBytes(&value, sizeof(value)); }

Fingerprint& Fingerprint::AddBytes(const void* data, size_t size) {
  const auto* p = static_cast<const unsigned char*>(data);
  constexpr uint64_t kOdd = 0xD6E8FEB86659FD93ull;
  state_ = Mix(state_ ^ size);
  // Four independent chains hide the multiplication's latency.  Each step is a bijection of its
  // chain, so no difference in one word is ever lost.
  uint64_t lane[4] = {state_, state_ + 1, state_ + 2, state_ + 3};
  for (; size >= 32; p += 32, size -= 32) {
    for (int i = 0; i < 4; ++i) lane[i] = std::rotl((lane[i] ^ Load(p + 8 * i, 8)) * kOdd, 29);
  }
  for (int i = 0; i < 4; ++i) state_ = Mix(state_ ^ lane[i]) + kOdd;
  for (; size > 0;) {
    const size_t n = size < 8 ? size : 8;
    state_ = Mix(state_ ^ Load(p, n)) + kOdd;
    p += n;
    size -= n;
  }
  return *this;
}

uint64_t Fingerprint::value() const { return Mix(state_); }

std::string Fingerprint::Hex() const { return absl::StrFormat("%016x", value()); }

}  // namespace coppice
