// Which build this binary is.
#ifndef COPPICE_SERVICES_COMMON_BUILD_INFO_H_
#define COPPICE_SERVICES_COMMON_BUILD_INFO_H_

#include <string>

namespace coppice {

// "0.1.0"
const char* BuildVersion();
// The revision's first 12 digits, with "-dirty" where the tree differed from it; "unknown" outside
// a git checkout.
const char* BuildGitRevision();
// "coppice-drafter 0.1.0 (8594643a1b2c)"
std::string VersionLine(const std::string& binary);

}  // namespace coppice

#endif  // COPPICE_SERVICES_COMMON_BUILD_INFO_H_
