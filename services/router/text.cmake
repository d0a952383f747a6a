# From token ids to text; free of gRPC, so that it is tested without it.
coppice_library(coppice_router_text
  SRCS ${CMAKE_CURRENT_LIST_DIR}/detokenizer.cc
  DEPS coppice_model_text absl::span absl::status absl::statusor absl::strings)

coppice_test(router_detokenizer_test
  SRCS ${CMAKE_CURRENT_LIST_DIR}/detokenizer_test.cc
  DEPS coppice_router_text)
