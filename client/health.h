// Asks a service, by the standard health protocol, whether it can work.
#ifndef COPPICE_CLIENT_HEALTH_H_
#define COPPICE_CLIENT_HEALTH_H_

#include <string>

namespace coppice {

// Waits up to half a second for an answer; no answer is a no.
bool IsServing(const std::string& address);

}  // namespace coppice

#endif  // COPPICE_CLIENT_HEALTH_H_
