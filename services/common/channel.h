// Client channels, with the settings that pair with server.h's.
#ifndef COPPICE_SERVICES_COMMON_CHANNEL_H_
#define COPPICE_SERVICES_COMMON_CHANNEL_H_

#include <grpcpp/grpcpp.h>

#include <chrono>
#include <memory>
#include <string>

namespace coppice {

// Explicit on both ends (the default, 4 MiB, is too little for long prompts).
inline constexpr int kControlMessageBytes = 16 << 20;
inline constexpr int kFeatureMessageBytes = 64 << 20;

// The client pings a silent connection this often; the server allows pings twice as often
// (otherwise it would hang up with "too_many_pings").
inline constexpr std::chrono::milliseconds kKeepaliveTime{30'000};
inline constexpr std::chrono::milliseconds kKeepaliveTimeout{10'000};
inline constexpr std::chrono::milliseconds kMinPingInterval = kKeepaliveTime / 2;

struct ChannelOptions {
  int max_message_bytes = kControlMessageBytes;  // either way
  // A connection of its own rather than one shared with the process's other channels to the same
  // address: for streams that must not wait behind another's bulk.
  bool own_connection = false;
};

// Connects when first used and again, within 2 s of the peer's return, after every loss.  `address`
// is host:port.
std::shared_ptr<grpc::Channel> MakeChannel(const std::string& address,
                                           const ChannelOptions& options = {});

}  // namespace coppice

#endif  // COPPICE_SERVICES_COMMON_CHANNEL_H_
