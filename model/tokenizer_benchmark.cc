// Encoding and decoding on one core: English prose and code (this repository's own), Han text, and
// random Unicode, with the demo's vocabulary of 4,096 tokens and with one of about the released
// size, in which whole words are tokens as they are in the released one.
#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "benchmark/benchmark.h"
#include "model/config.h"
#include "model/tokenizer.h"

namespace coppice {
namespace {

constexpr size_t kBytes = 1 << 20;

std::string ReadAll(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  return std::string(std::istreambuf_iterator<char>(file), {});
}

// The texts of `files` below `rooms`, one after another, to kBytes.
std::string Corpus(const std::vector<std::string>& rooms, const std::vector<std::string>& kinds) {
  std::vector<std::string> paths;
  for (const std::string& room : rooms) {
    for (const auto& entry : std::filesystem::recursive_directory_iterator(room)) {
      const std::string kind = entry.path().extension().string();
      if (std::find(kinds.begin(), kinds.end(), kind) != kinds.end()) {
        paths.push_back(entry.path().string());
      }
    }
  }
  std::sort(paths.begin(), paths.end());
  std::string text;
  for (const std::string& path : paths) text += ReadAll(path);
  if (text.empty()) return text;
  while (text.size() < kBytes) text += text;
  size_t end = kBytes;
  while ((text[end] & 0xC0) == 0x80) --end;
  return text.substr(0, end);
}

void AppendUtf8(char32_t c, std::string* out) {
  if (c < 0x80) {
    *out += static_cast<char>(c);
  } else if (c < 0x800) {
    *out += static_cast<char>(0xC0 | c >> 6);
    *out += static_cast<char>(0x80 | (c & 63));
  } else {
    *out += static_cast<char>(0xE0 | c >> 12);
    *out += static_cast<char>(0x80 | (c >> 6 & 63));
    *out += static_cast<char>(0x80 | (c & 63));
  }
}

// Sentences of the 3,000 first Han characters, the lower ones more often.
std::string Han() {
  std::mt19937 random(1);
  std::geometric_distribution<int> rank(0.004);
  std::string text;
  while (text.size() < kBytes) {
    for (int n = 4 + static_cast<int>(random() % 20); n > 0; --n) {
      AppendUtf8(0x4E00 + static_cast<char32_t>(rank(random) % 3000), &text);
    }
    text += random() % 4 == 0 ? "。\n" : "，";
  }
  return text;
}

// Characters of the whole basic plane: what no cache and no vocabulary helps with.
std::string Unicode() {
  std::mt19937 random(2);
  std::string text;
  while (text.size() < kBytes) {
    const char32_t c = random() % 0xFFFE;
    if (c >= 0xD800 && c < 0xE000) continue;
    AppendUtf8(c, &text);
  }
  return text;
}

const std::string& Text(const std::string& name) {
  static const auto* const texts = new std::map<std::string, std::string>{
      {"prose", Corpus({"docs", "models/demo"}, {".md", ".jsonl"})},
      {"code", Corpus({"model", "kernels", "services"}, {".cc", ".h"})},
      {"han", Han()},
      {"unicode", Unicode()}};
  return texts->at(name);
}

std::unique_ptr<Tokenizer> Demo() {
  const int vocab_size = LoadModelConfig("models/demo").value().vocab_size;
  return Tokenizer::Load("models/demo", vocab_size).value();
}

// 256 bytes; of pre-tokens in ASCII all prefixes, so that words are tokens; of the others their
// characters, the starts of these, and pairs of neighbours, as in vocabularies of much Chinese.
// Shorter ones first.
std::unique_ptr<Tokenizer> Large() {
  std::set<std::pair<size_t, std::string>> tokens;
  for (const char* name : {"prose", "code", "han"}) {
    const std::vector<std::string_view> pieces = PreTokenize(Text(name)).value();
    for (const std::string_view piece : pieces) {
      const auto add = [&](size_t begin, size_t end) {
        tokens.insert({end - begin, std::string(piece.substr(begin, end - begin))});
      };
      if (std::all_of(piece.begin(), piece.end(), [](char c) { return c >= 0; })) {
        for (size_t n = 2; n <= piece.size() && n <= 24; ++n) add(0, n);
        continue;
      }
      size_t before = piece.size();  // where the character before begins
      for (size_t i = 0; i < piece.size();) {
        size_t end = i + 1;
        while (end < piece.size() && (piece[end] & 0xC0) == 0x80) add(i, ++end);
        if (before < i) add(before, end);
        before = i;
        i = end;
      }
    }
  }
  std::vector<std::string> ranks;
  for (int byte = 0; byte < 256; ++byte) ranks.emplace_back(1, static_cast<char>(byte));
  for (const auto& [size, token] : tokens) {
    if (ranks.size() == 163584) break;
    ranks.push_back(token);
  }
  return Tokenizer::Create(ranks, {}, static_cast<int>(ranks.size()) + 256, "benchmark").value();
}

const Tokenizer& TokenizerNamed(const std::string& name) {
  static const auto* const demo = Demo().release();
  static const auto* const large = Large().release();
  return name == "demo" ? *demo : *large;
}

void Encode(benchmark::State& state, const std::string& vocabulary, const std::string& name) {
  const Tokenizer& tokenizer = TokenizerNamed(vocabulary);
  const std::string& text = Text(name);
  size_t tokens = 0;
  for (auto _ : state) {
    tokens = tokenizer.Encode(text)->size();
    benchmark::DoNotOptimize(tokens);
  }
  state.counters["vocab"] = tokenizer.vocab_size();
  state.counters["bytes_per_token"] = static_cast<double>(text.size()) / tokens;
  state.counters["mb_s"] = benchmark::Counter(static_cast<double>(text.size()) / 1e6,
                                              benchmark::Counter::kIsIterationInvariantRate);
}

void Decode(benchmark::State& state, const std::string& vocabulary, const std::string& name) {
  const Tokenizer& tokenizer = TokenizerNamed(vocabulary);
  const std::vector<int32_t> ids = tokenizer.Encode(Text(name)).value();
  for (auto _ : state) benchmark::DoNotOptimize(tokenizer.Decode(ids)->data());
  state.counters["mb_s"] = benchmark::Counter(static_cast<double>(Text(name).size()) / 1e6,
                                              benchmark::Counter::kIsIterationInvariantRate);
}

// Registered before main: the texts and vocabularies are made when first used.
const bool kRegistered = [] {
  for (const char* vocabulary : {"demo", "large"}) {
    for (const char* name : {"prose", "code", "han", "unicode"}) {
      benchmark::RegisterBenchmark(
          absl::StrCat("Encode/", vocabulary, "/", name).c_str(),
          [=](benchmark::State& state) { Encode(state, vocabulary, name); })
          ->Unit(benchmark::kMillisecond);
    }
    benchmark::RegisterBenchmark(
        absl::StrCat("Decode/", vocabulary, "/code").c_str(),
        [=](benchmark::State& state) { Decode(state, vocabulary, "code"); })
        ->Unit(benchmark::kMillisecond);
  }
  return true;
}();

}  // namespace
}  // namespace coppice
