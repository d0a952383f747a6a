// The C++ client of a Coppice cluster.
//
//   coppice::Client client({.routers = {"127.0.0.1:7000"}});
//   coppice::v1::GenerateRequest request;
//   request.set_text("The capital of France is");
//   absl::StatusOr<coppice::Completion> done = client.Generate(
//       request, [](const coppice::v1::GenerateDelta& delta) { std::cout << delta.text(); return
//       true; });
#ifndef COPPICE_CLIENT_CLIENT_H_
#define COPPICE_CLIENT_CLIENT_H_

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "coppice/v1/cluster.pb.h"
#include "coppice/v1/inference.pb.h"

namespace coppice {

struct ClientOptions {
  // host:port of each; the first that answers is used, the others when it goes away.
  std::vector<std::string> routers;
  // How often to try, in a row and without a new token, before giving up: for a request that has
  // received nothing yet (per router), and for one that has.  The latter covers a standby router's
  // taking over.
  int attempts_before_first = 2;
  int attempts_to_resume = 24;
  // Between attempts; doubles each time up to the maximum.
  std::chrono::milliseconds first_backoff{100};
  std::chrono::milliseconds max_backoff{2000};
  // For calls other than Generate.
  std::chrono::milliseconds call_timeout{30'000};
};

// A finished generation.
struct Completion {
  std::string request_id;
  uint64_t seed = 0;
  std::vector<uint32_t> token_ids;
  std::string text;
  std::vector<v1::PositionLogProbs> logprobs;
  v1::Final final;
  int resumes = 0;  // times that the stream broke and was taken up again
  // Seen from here: from the call to the first token, and to the end.
  double ttft_ms = 0;
  double total_ms = 0;
};

// One generation under way, read by one thread.  Tokens come once each and in order, whatever
// happens to routers in between: a stream that ends UNAVAILABLE, or before its last delta, is
// resumed on the next router from the tokens received, with the seed of the first delta, and what
// comes twice is dropped.  Destruction cancels.
class GenerateStream {
 public:
  virtual ~GenerateStream() = default;
  // Waits for the next delta.  False at the end, good or bad: see Finish.
  virtual bool Next(v1::GenerateDelta* delta) = 0;
  // After Next returned false: all of it, or why it ended.  CANCELLED after Cancel; UNAVAILABLE
  // where no router could be reached, naming them; else the router's own status.
  virtual absl::StatusOr<Completion> Finish() = 0;
  // From any thread: Next returns false soon.
  virtual void Cancel() = 0;
};

// Thread-safe.
class Client {
 public:
  explicit Client(ClientOptions options);
  ~Client();

  // `deadline`, where given, is the whole generation's.
  std::unique_ptr<GenerateStream> StartGenerate(
      const v1::GenerateRequest& request,
      std::optional<std::chrono::system_clock::time_point> deadline = std::nullopt);

  // Runs a generation to its end.  `on_delta` (may be empty) sees every delta; it returns false to
  // cancel.
  absl::StatusOr<Completion> Generate(
      const v1::GenerateRequest& request,
      const std::function<bool(const v1::GenerateDelta&)>& on_delta = nullptr);

  // The following try each router once, in order, until one is there.
  // True where one of the routers knew the request.
  absl::StatusOr<bool> Cancel(const std::string& request_id);
  absl::StatusOr<std::vector<uint32_t>> Tokenize(const std::string& text);
  absl::StatusOr<std::vector<uint32_t>> Tokenize(const v1::Chat& chat);
  absl::StatusOr<std::string> Detokenize(const std::vector<uint32_t>& ids);
  absl::StatusOr<v1::Model> GetModel();
  absl::StatusOr<v1::ClusterState> GetState();

 private:
  class Routers;
  class Stream;
  absl::StatusOr<std::vector<uint32_t>> Tokenize(const v1::TokenizeRequest& request);

  std::shared_ptr<Routers> routers_;
};

}  // namespace coppice

#endif  // COPPICE_CLIENT_CLIENT_H_
