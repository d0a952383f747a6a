# The few helpers every directory's CMakeLists.txt uses.  Includes are written from the repository root:
#   #include "model/tokenizer.h"

# What every target of ours is compiled with; third-party and generated code is not held to the warnings.
add_library(coppice_options INTERFACE)
target_include_directories(coppice_options INTERFACE ${CMAKE_SOURCE_DIR} ${CMAKE_BINARY_DIR})
target_compile_options(coppice_options INTERFACE -Wall -Wextra -Werror)
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
  # g++ 12 reports overflows inside libstdc++ that are not there (GCC bugs 105329, 105651).
  target_compile_options(coppice_options INTERFACE -Wno-restrict -Wno-stringop-overread)
endif()
if(COPPICE_SANITIZE)
  target_compile_options(coppice_options INTERFACE -fsanitize=${COPPICE_SANITIZE} -fno-omit-frame-pointer)
  target_link_options(coppice_options INTERFACE -fsanitize=${COPPICE_SANITIZE})
  if(COPPICE_SANITIZE MATCHES "undefined")
    target_compile_options(coppice_options INTERFACE -fno-sanitize-recover=undefined)
  endif()
endif()

# coppice_library(NAME SRCS a.cc … [DEPS target …])
function(coppice_library NAME)
  cmake_parse_arguments(A "" "" "SRCS;DEPS" ${ARGN})
  add_library(${NAME} STATIC ${A_SRCS})
  target_link_libraries(${NAME} PUBLIC coppice_options ${A_DEPS})
endfunction()

# coppice_binary(NAME SRCS main.cc … [DEPS target …]): lands in build/<preset>/bin and is installed.
function(coppice_binary NAME)
  cmake_parse_arguments(A "" "" "SRCS;DEPS" ${ARGN})
  add_executable(${NAME} ${A_SRCS})
  target_link_libraries(${NAME} PRIVATE coppice_options ${A_DEPS})
  install(TARGETS ${NAME} RUNTIME)
endfunction()

# coppice_test(NAME SRCS x_test.cc … [DEPS target …] [LABELS …] [TIMEOUT seconds] [ENV k=v …])
# Tests run from the repository root, so that they can name models/demo and tests/goldens.
function(coppice_test NAME)
  if(NOT COPPICE_TESTS)
    return()
  endif()
  cmake_parse_arguments(A "" "TIMEOUT" "SRCS;DEPS;LABELS;ENV" ${ARGN})
  if(NOT A_TIMEOUT)
    set(A_TIMEOUT 300)
  endif()
  add_executable(${NAME} ${A_SRCS})
  target_link_libraries(${NAME} PRIVATE coppice_options ${A_DEPS} GTest::gmock_main)
  set_target_properties(${NAME} PROPERTIES RUNTIME_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/tests)
  add_test(NAME ${NAME} COMMAND ${NAME} WORKING_DIRECTORY ${CMAKE_SOURCE_DIR})
  set_tests_properties(${NAME} PROPERTIES TIMEOUT ${A_TIMEOUT} LABELS "${A_LABELS}"
                       ENVIRONMENT "COPPICE_BIN=${CMAKE_BINARY_DIR}/bin;${A_ENV}")
endfunction()

# coppice_benchmark(NAME SRCS x_benchmark.cc … [DEPS target …]): a Google Benchmark program in build/<preset>/bench, which
# writes a record when called with --out=DIR.
function(coppice_benchmark NAME)
  if(NOT COPPICE_BENCHMARKS)
    return()
  endif()
  cmake_parse_arguments(A "" "" "SRCS;DEPS" ${ARGN})
  add_executable(${NAME} ${A_SRCS})
  target_link_libraries(${NAME} PRIVATE coppice_options ${A_DEPS} coppice_benchmark_main)
  set_target_properties(${NAME} PROPERTIES RUNTIME_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/bench)
endfunction()
