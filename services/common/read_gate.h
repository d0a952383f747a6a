// When a callback reactor reads its next message: once the last one has been dealt with.
#ifndef COPPICE_SERVICES_COMMON_READ_GATE_H_
#define COPPICE_SERVICES_COMMON_READ_GATE_H_

#include <functional>
#include <memory>
#include <mutex>
#include <utility>

namespace coppice {

// Travels with what came of a message; the stream is read on when it is gone.
using ReadTicket = std::shared_ptr<const void>;

// One message at a time, so that what waits for an owner thread is bounded, and so that reading
// costs a round nothing: a reader that asks for the next message at once makes gRPC send a window
// update at once, a packet and four thread switches for each message; asked for after the answer
// was written, the update travels with that.
//
// Held by shared_ptr.  `read` begins one read (StartRead); it is called from whatever thread drops
// a ticket, never at the same time, and never after Close.
class ReadGate : public std::enable_shared_from_this<ReadGate> {
 public:
  explicit ReadGate(std::function<void()> read) : read_(std::move(read)) {}

  // A message has been read and its buffer is free again.  Null after Free: the reaction that reads
  // must read on itself.
  ReadTicket Took() {
    std::lock_guard<std::mutex> lock(mutex_);
    if (free_) return nullptr;
    waiting_ = true;
    return std::make_shared<Ticket>(shared_from_this());
  }
  // No read waits for a ticket any more.
  void Free() {
    std::lock_guard<std::mutex> lock(mutex_);
    free_ = true;
    Read();
  }
  void Close() {
    std::lock_guard<std::mutex> lock(mutex_);
    closed_ = true;
  }

 private:
  struct Ticket {
    explicit Ticket(std::shared_ptr<ReadGate> g) : gate(std::move(g)) {}
    ~Ticket() {
      std::lock_guard<std::mutex> lock(gate->mutex_);
      gate->Read();
    }
    const std::shared_ptr<ReadGate> gate;
  };

  void Read() {
    if (std::exchange(waiting_, false) && !closed_) read_();
  }

  const std::function<void()> read_;
  std::mutex mutex_;
  bool waiting_ = false;  // for a ticket
  bool free_ = false;
  bool closed_ = false;
};

}  // namespace coppice

#endif  // COPPICE_SERVICES_COMMON_READ_GATE_H_
