// What a fuzz target provides: libFuzzer's entry point, and seeds for the runner that works without
// libFuzzer.
#ifndef COPPICE_TESTS_FUZZ_FUZZ_TARGET_H_
#define COPPICE_TESTS_FUZZ_FUZZ_TARGET_H_

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

namespace coppice {

// Well-formed inputs, from which mutations start.
std::vector<std::string> FuzzSeeds();

}  // namespace coppice

// Ends the process, as libFuzzer expects of a failed property.
#define FUZZ_CHECK(condition)                                                                    \
  do {                                                                                           \
    if (!(condition)) {                                                                          \
      std::fprintf(stderr, "%s:%d: fuzz property failed: %s\n", __FILE__, __LINE__, #condition); \
      std::abort();                                                                              \
    }                                                                                            \
  } while (false)

#endif  // COPPICE_TESTS_FUZZ_FUZZ_TARGET_H_
