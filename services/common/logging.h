// Logs go to standard error, through glog.
#ifndef COPPICE_SERVICES_COMMON_LOGGING_H_
#define COPPICE_SERVICES_COMMON_LOGGING_H_

#include <string>
#include <vector>

namespace coppice {

// What --log-level takes.  "debug" turns VLOG(1) on and lets gRPC's own messages through.
const std::vector<std::string>& LogLevels();

// Call once, after the flags are parsed.  `level` is one of LogLevels().
void InitLogging(const std::string& binary, const std::string& level);

}  // namespace coppice

#endif  // COPPICE_SERVICES_COMMON_LOGGING_H_
