# Sets COPPICE_HAVE_CUDA and enables the language where nvcc >= 13 is at hand.  Every GPU source is built for Hopper
# and for Blackwell workstations.
set(COPPICE_HAVE_CUDA OFF)
if(NOT COPPICE_CUDA STREQUAL "OFF")
  include(CheckLanguage)
  set(CMAKE_CUDA_ARCHITECTURES 90a 120)
  check_language(CUDA)
  if(CMAKE_CUDA_COMPILER)
    enable_language(CUDA)
    if(CMAKE_CUDA_COMPILER_VERSION VERSION_GREATER_EQUAL 13)
      set(COPPICE_HAVE_CUDA ON)
      # Debian 12's CMake (3.25.1) does not know nvcc's flag for C++20.
      set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION "-std=c++20")
      set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION "-std=c++20")
      set(CMAKE_CUDA_STANDARD 20)
    endif()
  endif()
  if(NOT COPPICE_HAVE_CUDA AND COPPICE_CUDA STREQUAL "ON")
    message(FATAL_ERROR "COPPICE_CUDA=ON needs nvcc >= 13, and there is "
                        "${CMAKE_CUDA_COMPILER} ${CMAKE_CUDA_COMPILER_VERSION}.  "
                        "`scripts/bootstrap --cuda` installs one.")
  endif()
endif()
message(STATUS "CUDA: ${COPPICE_HAVE_CUDA} ${CMAKE_CUDA_COMPILER_VERSION}")
