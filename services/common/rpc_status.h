// Between absl::Status, which our code speaks, and grpc::Status, which the wire speaks.  The codes
// are the same.
#ifndef COPPICE_SERVICES_COMMON_RPC_STATUS_H_
#define COPPICE_SERVICES_COMMON_RPC_STATUS_H_

#include <grpcpp/support/status.h>

#include <string>

#include "absl/status/status.h"

namespace coppice {

inline grpc::Status ToGrpcStatus(const absl::Status& status) {
  if (status.ok()) return grpc::Status::OK;
  return grpc::Status(static_cast<grpc::StatusCode>(status.code()), std::string(status.message()));
}

inline absl::Status FromGrpcStatus(const grpc::Status& status) {
  if (status.ok()) return absl::OkStatus();
  return absl::Status(static_cast<absl::StatusCode>(status.error_code()), status.error_message());
}

}  // namespace coppice

#endif  // COPPICE_SERVICES_COMMON_RPC_STATUS_H_
