#include "services/common/metrics.h"

#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

namespace coppice {
namespace {

using ::testing::HasSubstr;

// A listening socket on a free port of the loopback.
class Occupied {
 public:
  Occupied() : fd_(socket(AF_INET, SOCK_STREAM, 0)) {
    sockaddr_in at = {};
    at.sin_family = AF_INET;
    at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t size = sizeof at;
    bind(fd_, reinterpret_cast<sockaddr*>(&at), size);
    listen(fd_, 1);
    getsockname(fd_, reinterpret_cast<sockaddr*>(&at), &size);
    port_ = ntohs(at.sin_port);
  }
  ~Occupied() { Free(); }
  void Free() {
    if (fd_ >= 0) close(fd_);
    fd_ = -1;
  }
  int port() const { return port_; }

 private:
  int fd_, port_ = 0;
};

std::string Get(int port) {
  const int fd = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in at = {};
  at.sin_family = AF_INET;
  at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  at.sin_port = htons(static_cast<uint16_t>(port));
  std::string out;
  if (connect(fd, reinterpret_cast<sockaddr*>(&at), sizeof at) == 0) {
    const std::string request = "GET /metrics HTTP/1.0\r\n\r\n";
    EXPECT_EQ(send(fd, request.data(), request.size(), 0), static_cast<ssize_t>(request.size()));
    char buffer[4096];
    for (ssize_t n; (n = recv(fd, buffer, sizeof buffer, 0)) > 0;) out.append(buffer, n);
  }
  close(fd);
  return out;
}

TEST(MetricsTest, ServesWhatWasCounted) {
  Occupied place;
  const int port = place.port();
  place.Free();
  auto metrics = Metrics::Create("127.0.0.1:0", port);
  ASSERT_TRUE(metrics.ok()) << metrics.status();
  (*metrics)->Counter("things_total", "things", {{"kind", "a"}}).Increment(3);
  (*metrics)->Histogram("wait_seconds", "waits", Metrics::ExponentialBuckets(1, 2, 2)).Observe(1.5);
  const std::string page = Get(port);
  EXPECT_THAT(page, HasSubstr("things_total{kind=\"a\"} 3"));
  EXPECT_THAT(page, HasSubstr("wait_seconds_bucket{le=\"1\"} 0"));
  EXPECT_THAT(page, HasSubstr("wait_seconds_bucket{le=\"2\"} 1"));
}

TEST(MetricsTest, PortInUseIsSaid) {
  Occupied place;
  const auto metrics = Metrics::Create("127.0.0.1:0", place.port());
  ASSERT_EQ(metrics.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(metrics.status().message()),
              HasSubstr("127.0.0.1:" + std::to_string(place.port())));
}

TEST(MetricsTest, WhereTheServiceListensAndNowhereElse) {
  Occupied place;
  const int port = place.port();
  place.Free();
  const auto metrics = Metrics::Create("127.0.0.2:7000", port);
  ASSERT_TRUE(metrics.ok()) << metrics.status();
  EXPECT_EQ(Get(port), "") << "127.0.0.1 is not where it listens";
}

TEST(MetricsTest, PortZeroServesNowhere) {
  auto metrics = Metrics::Create("127.0.0.1:0", 0);
  ASSERT_TRUE(metrics.ok());
  (*metrics)->Gauge("level", "level").Set(2);
  EXPECT_EQ((*metrics)->registry().Collect().size(), 1u);
}

}  // namespace
}  // namespace coppice
