# Writes OUTPUT, the source that knows version and revision, where it would change.
# Run at build time: cmake -DSOURCE_DIR=… -DVERSION=… -DOUTPUT=… -P build_info.cmake
execute_process(COMMAND git -C ${SOURCE_DIR} rev-parse --short=12 HEAD
                OUTPUT_VARIABLE REVISION OUTPUT_STRIP_TRAILING_WHITESPACE RESULT_VARIABLE RC ERROR_QUIET)
if(NOT RC EQUAL 0)
  set(REVISION unknown)
else()
  execute_process(COMMAND git -C ${SOURCE_DIR} status --porcelain --untracked-files=no
                  OUTPUT_VARIABLE CHANGES OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
  if(NOT CHANGES STREQUAL "")
    string(APPEND REVISION "-dirty")
  endif()
endif()
file(CONFIGURE OUTPUT ${OUTPUT} @ONLY CONTENT [[
#include "services/common/build_info.h"

namespace coppice {

const char* BuildVersion() { return "@VERSION@"; }
const char* BuildGitRevision() { return "@REVISION@"; }

std::string VersionLine(const std::string& binary) {
  return binary + " " + BuildVersion() + " (" + BuildGitRevision() + ")";
}

}  // namespace coppice
]])
