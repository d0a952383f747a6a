// For test programs, which start and stop servers and channels by the dozen: holds one server from
// first to last.
//
// gRPC 1.51 serves the callback calls of a process from one completion queue, which goes when its
// last user goes (CompletionQueue::ReleaseCallbackAlternativeCQ); a new user that comes at that
// moment aborts the process ("ref_counted.h: assertion failed: prior > 0"), once in some hundred
// runs of a test program.  A service has users as long as it runs.
#include <gtest/gtest.h>

#include <memory>

#include "services/common/server.h"

namespace coppice {
namespace {

class HeldGrpc : public ::testing::Environment {
 public:
  void SetUp() override {
    ServerOptions options;
    options.listen = "127.0.0.1:0";
    server_ = RpcServer::Start(options, {}).value();
  }
  void TearDown() override { server_.reset(); }

 private:
  std::unique_ptr<RpcServer> server_;
};

[[maybe_unused]] const ::testing::Environment* const held =
    ::testing::AddGlobalTestEnvironment(new HeldGrpc);

}  // namespace
}  // namespace coppice
