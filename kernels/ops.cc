#include "kernels/ops.h"

namespace coppice::kernels {

int64_t SizeOf(DType dtype) {
  switch (dtype) {
    case DType::kBf16:
      return 2;
    case DType::kF32:
    case DType::kI32:
      return 4;
    case DType::kU64:
      return 8;
  }
  return 0;
}

Tensor Tensor::Rows(int64_t begin, int64_t count) const {
  Tensor view = *this;
  view.data = static_cast<char*>(data) + begin * stride * SizeOf(dtype);
  view.rows = count;
  return view;
}

Tensor Tensor::Cols(int64_t begin, int64_t count) const {
  Tensor view = *this;
  view.data = static_cast<char*>(data) + begin * SizeOf(dtype);
  view.cols = count;
  return view;
}

}  // namespace coppice::kernels
