#include "services/common/stream_writer.h"

#include <gtest/gtest.h>

#include <atomic>
#include <string>
#include <thread>
#include <vector>

namespace coppice {
namespace {

struct Text {
  std::string text;
  size_t ByteSizeLong() const { return text.size(); }
};

using Writer = StreamWriter<Text>;

// Stands for the reactor: remembers the write that was started and fails on a second one.
struct Wire {
  const Text* current = nullptr;
  std::vector<std::string> sent;
  int finished = 0;

  std::function<void(const Text&)> Start() {
    return [this](const Text& t) {
      ASSERT_EQ(current, nullptr) << "a second write while one is outstanding";
      ASSERT_EQ(finished, 0) << "a write after the finish";
      current = &t;
    };
  }
  std::function<void()> Finish() {
    return [this] { ++finished; };
  }
  void Done(Writer* writer, bool ok = true) {
    ASSERT_NE(current, nullptr);
    if (ok) sent.push_back(current->text);
    current = nullptr;
    writer->OnWriteDone(ok);
  }
};

TEST(StreamWriterTest, OneWriteAtATimeInOrder) {
  Wire wire;
  Writer writer(wire.Start());
  for (const char* s : {"a", "b", "c"}) {
    EXPECT_EQ(writer.Write({s}), Writer::Result::kQueued);
  }
  while (wire.current) wire.Done(&writer);
  EXPECT_EQ(wire.sent, (std::vector<std::string>{"a", "b", "c"}));
  EXPECT_EQ(writer.bytes(), 0u);
}

TEST(StreamWriterTest, FinishWaitsForWhatIsQueued) {
  Wire wire;
  Writer writer(wire.Start());
  writer.Write({"a"});
  writer.Write({"b"});
  writer.Finish(wire.Finish());
  writer.Finish(wire.Finish());
  EXPECT_EQ(writer.Write({"late"}), Writer::Result::kClosed);
  EXPECT_EQ(wire.finished, 0);
  wire.Done(&writer);
  EXPECT_EQ(wire.finished, 0);
  wire.Done(&writer);
  EXPECT_EQ(wire.finished, 1);
  EXPECT_EQ(wire.sent, (std::vector<std::string>{"a", "b"}));
}

TEST(StreamWriterTest, FinishNowDropsWhatWaitsButNotTheWriteUnderWay) {
  Wire wire;
  Writer writer(wire.Start());
  writer.Write({"a"});
  writer.Write({"b"});
  writer.FinishNow(wire.Finish());
  EXPECT_EQ(wire.finished, 0);
  EXPECT_EQ(writer.bytes(), 1u);
  wire.Done(&writer);
  EXPECT_EQ(wire.finished, 1);
  EXPECT_EQ(wire.sent, (std::vector<std::string>{"a"}));
}

TEST(StreamWriterTest, IdleFinishIsImmediate) {
  Wire wire;
  Writer writer(wire.Start());
  writer.Finish(wire.Finish());
  EXPECT_EQ(wire.finished, 1);
}

TEST(StreamWriterTest, AFailedWriteDropsTheRestAndStillFinishesOnce) {
  Wire wire;
  Writer writer(wire.Start());
  writer.Write({"a"});
  writer.Write({"b"});
  wire.Done(&writer, false);
  EXPECT_EQ(wire.current, nullptr);
  EXPECT_EQ(writer.Write({"c"}), Writer::Result::kClosed);
  EXPECT_EQ(writer.bytes(), 0u);
  writer.Finish(wire.Finish());
  EXPECT_EQ(wire.finished, 1);
}

TEST(StreamWriterTest, RefusesBeyondItsByteLimit) {
  Wire wire;
  Writer::Options options;
  options.max_bytes = 10;
  Writer writer(wire.Start(), options);
  EXPECT_EQ(writer.Write({std::string(25, 'x')}), Writer::Result::kQueued);  // alone, any size goes
  EXPECT_EQ(writer.Write({"y"}), Writer::Result::kFull);
  wire.Done(&writer);
  EXPECT_EQ(writer.Write({"123456"}), Writer::Result::kQueued);
  EXPECT_EQ(writer.Write({"7890"}), Writer::Result::kQueued);
  EXPECT_EQ(writer.Write({"1"}), Writer::Result::kFull);
}

TEST(StreamWriterTest, CoalescesOnlyBehindTheWriteUnderWay) {
  Wire wire;
  Writer::Options options;
  options.coalesce = [](Text* last, const Text& next) {
    if (next.text == "|") return false;
    last->text += next.text;
    return true;
  };
  Writer writer(wire.Start(), options);
  for (const char* s : {"a", "b", "c", "|", "d"}) writer.Write({s});
  EXPECT_EQ(writer.bytes(), 5u);
  while (wire.current) wire.Done(&writer);
  EXPECT_EQ(wire.sent, (std::vector<std::string>{"a", "bc", "|d"}));
  EXPECT_EQ(writer.bytes(), 0u);
}

TEST(StreamWriterTest, ManyThreadsOneOutstandingWrite) {
  std::atomic<const Text*> current = nullptr;
  std::atomic<int> sent = 0;
  std::atomic<bool> finished = false;
  Writer writer([&](const Text& t) {
    const Text* expected = nullptr;
    ASSERT_TRUE(current.compare_exchange_strong(expected, &t));
  });
  constexpr int kThreads = 4, kEach = 500;
  std::thread reactor([&] {
    while (!finished) {
      if (current.exchange(nullptr) != nullptr) {
        ++sent;
        writer.OnWriteDone(true);
      }
    }
  });
  std::vector<std::thread> writers;
  for (int t = 0; t < kThreads; ++t) {
    writers.emplace_back([&] {
      for (int i = 0; i < kEach; ++i) ASSERT_EQ(writer.Write({"x"}), Writer::Result::kQueued);
    });
  }
  for (std::thread& t : writers) t.join();
  writer.Finish([&] { finished = true; });
  reactor.join();
  EXPECT_EQ(sent, kThreads * kEach);
}

}  // namespace
}  // namespace coppice
