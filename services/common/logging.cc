#include "services/common/logging.h"

#include <glog/logging.h>
#include <grpc/support/log.h>

namespace coppice {

const std::vector<std::string>& LogLevels() {
  static const auto* levels = new std::vector<std::string>{"debug", "info", "warning", "error"};
  return *levels;
}

void InitLogging(const std::string& binary, const std::string& level) {
  FLAGS_logtostderr = true;
  FLAGS_minloglevel = level == "error"     ? google::GLOG_ERROR
                      : level == "warning" ? google::GLOG_WARNING
                                           : google::GLOG_INFO;
  if (level == "debug") FLAGS_v = 1;
  // glog keeps the pointer.
  static const auto* name = new std::string(binary);
  google::InitGoogleLogging(name->c_str());
  // What gRPC calls errors are mostly a peer's comings and goings, which we report ourselves.
  gpr_set_log_verbosity(GPR_LOG_SEVERITY_ERROR);
  gpr_set_log_function([](gpr_log_func_args* args) {
    VLOG(1) << "grpc: " << args->file << ":" << args->line << ": " << args->message;
  });
}

}  // namespace coppice
