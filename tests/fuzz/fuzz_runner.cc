// Runs a fuzz target as an ordinary test: its seeds, then mutations of them from a fixed random
// seed.
//   COPPICE_FUZZ_SECONDS=60   goes on that long instead of a fixed number of inputs
//   COPPICE_FUZZ_SEED=n       other mutations
//   COPPICE_FUZZ_INPUT=path   runs one file's bytes, and nothing else
// Where an input ends the process, it is left in ./fuzz-input-PID.
#include <fcntl.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <random>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "tests/fuzz/fuzz_target.h"

// Read by UndefinedBehaviorSanitizer's runtime, which has death callbacks of its own.
extern "C" const char* __ubsan_default_options() { return "abort_on_error=1:print_stacktrace=1"; }

// Present where AddressSanitizer is linked.
extern "C" void __sanitizer_set_death_callback(void (*callback)()) __attribute__((weak));

namespace coppice {
namespace {

constexpr int kInputs = 20000;
constexpr size_t kMaxBytes = 1 << 16;

const std::string* g_running = nullptr;
char g_kept_path[64];

// Only async-signal-safe calls.
void KeepInput() {
  if (g_running == nullptr) return;
  const int fd = open(g_kept_path, O_CREAT | O_TRUNC | O_WRONLY, 0644);
  if (fd < 0) return;
  const bool kept = write(fd, g_running->data(), g_running->size()) >= 0;
  close(fd);
  constexpr char kText[] = "the input is kept in ";
  if (!kept || write(STDERR_FILENO, kText, sizeof(kText) - 1) < 0 ||
      write(STDERR_FILENO, g_kept_path, std::char_traits<char>::length(g_kept_path)) < 0 ||
      write(STDERR_FILENO, "\n", 1) < 0) {
    return;
  }
}

void OnSignal(int signal) {
  KeepInput();
  std::signal(signal, SIG_DFL);
  std::raise(signal);
}

void KeepInputOfACrash() {
  std::snprintf(g_kept_path, sizeof(g_kept_path), "fuzz-input-%d", static_cast<int>(getpid()));
  if (__sanitizer_set_death_callback != nullptr) __sanitizer_set_death_callback(KeepInput);
  for (const int signal : {SIGABRT, SIGBUS, SIGFPE, SIGSEGV}) {
    if (__sanitizer_set_death_callback == nullptr || signal == SIGABRT)
      std::signal(signal, OnSignal);
  }
}

void RunOne(const std::string& input) {
  g_running = &input;
  LLVMFuzzerTestOneInput(reinterpret_cast<const uint8_t*>(input.data()), input.size());
  g_running = nullptr;
}

class Mutator {
 public:
  Mutator(std::vector<std::string> corpus, uint64_t seed)
      : corpus_(std::move(corpus)), random_(seed) {}

  std::string Next() {
    std::string text = corpus_[Below(corpus_.size())];
    for (size_t i = 1 + Below(4); i > 0; --i) Mutate(&text);
    if (text.size() > kMaxBytes) text.resize(kMaxBytes);
    return text;
  }

 private:
  size_t Below(size_t n) { return n == 0 ? 0 : random_() % n; }

  void Mutate(std::string* text) {
    const size_t at = Below(text->size() + 1);
    const size_t length = 1 + Below(16);
    switch (Below(9)) {
      case 0:
        if (at < text->size()) (*text)[at] ^= static_cast<char>(1 << Below(8));
        break;
      case 1:
        if (at < text->size()) (*text)[at] = static_cast<char>(random_());
        break;
      case 2:
        text->erase(at, length);
        break;
      case 3:
        text->resize(at);
        break;
      case 4:
        text->insert(at, text->substr(Below(text->size() + 1), length));
        break;
      case 5: {
        const std::string& other = corpus_[Below(corpus_.size())];
        const size_t from = Below(other.size() + 1);
        text->replace(at, length, other, from, 1 + Below(64));
        break;
      }
      case 6: {
        static const std::vector<std::string> kWords = {"0",
                                                        "-1",
                                                        "1e999",
                                                        "18446744073709551615",
                                                        "9223372036854775807",
                                                        "4294967296",
                                                        "null",
                                                        "true",
                                                        "[]",
                                                        "{}",
                                                        "\"\"",
                                                        ",",
                                                        ":",
                                                        "[[[[",
                                                        "}",
                                                        "\"a\":",
                                                        "\\u0000",
                                                        "\\ud800",
                                                        "\xFF",
                                                        "\xE4\xB8",
                                                        " ",
                                                        "\n",
                                                        "1.5",
                                                        "NaN"};
        text->insert(at, kWords[Below(kWords.size())]);
        break;
      }
      case 7: {
        // Another number in a number's place.
        const size_t digit = text->find_first_of("0123456789", at);
        if (digit == std::string::npos) break;
        const size_t end = text->find_first_not_of("0123456789", digit);
        static const std::vector<std::string> kNumbers = {
            "0",  "1",   "2", "255", "256", "65536", "2147483648", "9223372036854775808",
            "-3", "1e30"};
        text->replace(digit, end == std::string::npos ? end : end - digit,
                      kNumbers[Below(kNumbers.size())]);
        break;
      }
      case 8:
        for (size_t i = at; i < std::min(text->size(), at + length); ++i)
          (*text)[i] = static_cast<char>(random_());
        break;
    }
  }

  std::vector<std::string> corpus_;
  std::mt19937_64 random_;
};

const char* Env(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr || *value == '\0' ? nullptr : value;
}

TEST(Fuzz, SurvivesSeedsAndMutations) {
  KeepInputOfACrash();
  if (const char* path = Env("COPPICE_FUZZ_INPUT")) {
    std::ifstream file(path, std::ios::binary);
    ASSERT_TRUE(file.good()) << path;
    return RunOne(std::string(std::istreambuf_iterator<char>(file), {}));
  }
  const std::vector<std::string> seeds = FuzzSeeds();
  ASSERT_FALSE(seeds.empty());
  for (const std::string& seed : seeds) RunOne(seed);
  RunOne("");

  const char* seed = Env("COPPICE_FUZZ_SEED");
  const char* seconds = Env("COPPICE_FUZZ_SECONDS");
  Mutator mutator(seeds, seed == nullptr ? 1 : std::strtoull(seed, nullptr, 10));
  const auto start = std::chrono::steady_clock::now();
  const auto limit =
      std::chrono::seconds(seconds == nullptr ? 0 : std::strtoll(seconds, nullptr, 10));
  int inputs = 0;
  while (seconds == nullptr ? inputs < kInputs : std::chrono::steady_clock::now() - start < limit) {
    RunOne(mutator.Next());
    ++inputs;
  }
  RecordProperty("inputs", inputs);
}

}  // namespace
}  // namespace coppice
