#include "kernels/cuda/mla_verify.h"

#include <cuda_runtime.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <vector>

#include "kernels/cuda/mla_verify_internal.cuh"

namespace coppice::mla {
namespace {

thread_local char last_error[512] = "";

[[gnu::format(printf, 2, 3)]] coppice_mla_status Fail(coppice_mla_status status, const char* format,
                                                      ...) {
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(last_error, sizeof(last_error), format, arguments);
  va_end(arguments);
  return status;
}

coppice_mla_status FailCuda(const char* what, cudaError_t error) {
  return Fail(COPPICE_MLA_CUDA_ERROR, "%s: %s (%s)", what, cudaGetErrorString(error),
              cudaGetErrorName(error));
}

#define COPPICE_MLA_TRY(expression)                                    \
  do {                                                                 \
    const coppice_mla_status coppice_mla_tried = (expression);         \
    if (coppice_mla_tried != COPPICE_MLA_OK) return coppice_mla_tried; \
  } while (false)

constexpr int kDefaultFixedParts =
    64;  // bound on the parts of a request where split_tokens asks for a fixed length
constexpr int kSplitUnit = 64;  // every instance's step divides it

// COPPICE_NSPLIT, read once: 0 where it is not set, −1 where it is no number from 1 to 4096.
int NsplitFromEnvironment() {
  static const int value = [] {
    const char* text = std::getenv("COPPICE_NSPLIT");
    if (text == nullptr || *text == '\0') return 0;
    char* end = nullptr;
    const long parsed = std::strtol(text, &end, 10);
    return *end == '\0' && parsed >= 1 && parsed <= 4096 ? static_cast<int>(parsed) : -1;
  }();
  return value;
}

coppice_mla_status CheckShape(const coppice_mla_shape* shape) {
  if (shape == nullptr) return Fail(COPPICE_MLA_INVALID_ARGUMENT, "shape is null");
  const coppice_mla_shape& s = *shape;
  const auto in_range = [](const char* name, int value, int low, int high) {
    if (value >= low && value <= high) return COPPICE_MLA_OK;
    return Fail(COPPICE_MLA_INVALID_ARGUMENT, "shape.%s is %d; it must be %d … %d", name, value,
                low, high);
  };
  COPPICE_MLA_TRY(in_range("batch", s.batch, 1, COPPICE_MLA_MAX_BATCH));
  COPPICE_MLA_TRY(in_range("nodes", s.nodes, 1, COPPICE_MLA_MAX_NODES));
  COPPICE_MLA_TRY(in_range("heads", s.heads, 1, COPPICE_MLA_MAX_HEADS));
  COPPICE_MLA_TRY(in_range("page_size", s.page_size, 1, COPPICE_MLA_MAX_PAGE));
  if ((s.page_size & (s.page_size - 1)) != 0) {
    return Fail(COPPICE_MLA_INVALID_ARGUMENT, "shape.page_size is %d; it must be a power of two",
                s.page_size);
  }
  if (s.cache_type != COPPICE_MLA_BF16 && s.cache_type != COPPICE_MLA_FP8) {
    return Fail(COPPICE_MLA_INVALID_ARGUMENT,
                "shape.cache_type is %d; it must be COPPICE_MLA_BF16 (0) or COPPICE_MLA_FP8 (1)",
                static_cast<int>(s.cache_type));
  }
  COPPICE_MLA_TRY(in_range("instance", s.instance, COPPICE_MLA_AUTO, COPPICE_MLA_COMMON_SMALL));
  COPPICE_MLA_TRY(in_range("max_splits", s.max_splits, 0, 4096));
  COPPICE_MLA_TRY(in_range("split_tokens", s.split_tokens, 0, COPPICE_MLA_MAX_CONTEXT));
  if (s.split_tokens % kSplitUnit != 0) {
    return Fail(COPPICE_MLA_INVALID_ARGUMENT,
                "shape.split_tokens is %d; it must be 0 or a multiple of %d", s.split_tokens,
                kSplitUnit);
  }
  if (!std::isfinite(s.softmax_scale) || s.softmax_scale <= 0.f) {
    return Fail(COPPICE_MLA_INVALID_ARGUMENT,
                "shape.softmax_scale is %g; it must be finite and above 0",
                static_cast<double>(s.softmax_scale));
  }
  if (s.max_splits == 0 && NsplitFromEnvironment() < 0) {
    return Fail(COPPICE_MLA_INVALID_ARGUMENT, "COPPICE_NSPLIT is '%s'; it must be 1 … 4096",
                std::getenv("COPPICE_NSPLIT"));
  }
  return COPPICE_MLA_OK;
}

struct Device {
  int index = 0, major = 0, minor = 0, multiprocessors = 0;
};

coppice_mla_status CurrentDevice(Device* device) {
  cudaError_t error = cudaGetDevice(&device->index);
  const auto read = [&](int* value, cudaDeviceAttr attribute) {
    if (error == cudaSuccess) error = cudaDeviceGetAttribute(value, attribute, device->index);
  };
  read(&device->major, cudaDevAttrComputeCapabilityMajor);
  read(&device->minor, cudaDevAttrComputeCapabilityMinor);
  read(&device->multiprocessors, cudaDevAttrMultiProcessorCount);
  if (error != cudaSuccess) return FailCuda("reading the current CUDA device", error);
  const bool known = (device->major == 9 && device->minor == 0) || device->major == 12;
  if (!known) {
    return Fail(
        COPPICE_MLA_UNSUPPORTED_DEVICE,
        "device %d has compute capability %d.%d; this library is built for 9.0 (Hopper) and "
        "12.x (Blackwell workstations)",
        device->index, device->major, device->minor);
  }
  return COPPICE_MLA_OK;
}

bool UsesHopper(const coppice_mla_shape& shape, const Device& device) {
  return (shape.instance == COPPICE_MLA_AUTO || shape.instance == COPPICE_MLA_HOPPER) &&
         device.major == 9 && HopperRuns(shape);
}

// Allows each kernel its dynamic shared memory: once per device.
coppice_mla_status Prepare(const Device& device) {
  constexpr int kMaxDevices = 64;
  static std::once_flag once[kMaxDevices];
  static cudaError_t results[kMaxDevices];
  if (device.index >= kMaxDevices) {
    return Fail(COPPICE_MLA_UNSUPPORTED_DEVICE, "device %d: at most %d devices are supported",
                device.index, kMaxDevices);
  }
  std::call_once(once[device.index], [&] {
    cudaError_t error = PrepareCommon(device.major);
    if (error == cudaSuccess && device.major == 9) error = PrepareHopper();
    results[device.index] = error;
  });
  if (results[device.index] != cudaSuccess) {
    return FailCuda("allowing the kernels their shared memory on this device",
                    results[device.index]);
  }
  return COPPICE_MLA_OK;
}

struct Plan {
  AttentionArguments arguments = {};
  Device device;
  bool hopper = false;
  // Workspace: offsets of its parts, and bytes in all.
  size_t fragment_begin = 0, fragments = 0, tiles = 0, partial_lse = 0, partial_output = 0;
  size_t bytes = 0;
};

coppice_mla_status MakePlan(const coppice_mla_shape* shape, Plan* plan) {
  COPPICE_MLA_TRY(CheckShape(shape));
  COPPICE_MLA_TRY(CurrentDevice(&plan->device));
  COPPICE_MLA_TRY(Prepare(plan->device));
  const coppice_mla_shape& s = *shape;
  plan->hopper = UsesHopper(s, plan->device);
  if (s.instance == COPPICE_MLA_HOPPER && !plan->hopper) {
    return Fail(
        COPPICE_MLA_UNSUPPORTED_DEVICE,
        "shape.instance is COPPICE_MLA_HOPPER, which runs on compute capability 9.0 where it "
        "was built and serves the shape; this device has %d.%d (COPPICE_MLA_AUTO takes what "
        "there is)",
        plan->device.major, plan->device.minor);
  }
  AttentionArguments& a = plan->arguments;
  a.shape = s;
  a.instance = plan->hopper ? HopperInstance(s) : CommonInstance(s, plan->device.major);
  a.page_shift = std::countr_zero(static_cast<unsigned>(s.page_size));
  a.scale_log2 = s.softmax_scale * 1.4426950408889634f;
  a.blocks = std::min(plan->device.multiprocessors * a.instance.blocks_per_sm, kMostBlocks);
  const int groups = s.nodes * GroupsPerNode(s.heads);
  const int tiles = CeilDivide(groups, a.instance.tile_groups);
  a.max_tiles = a.instance.narrowest_groups > 0 ? std::min(groups, tiles * kMostNarrowing) : tiles;
  a.max_parts = s.max_splits > 0 ? s.max_splits : NsplitFromEnvironment();
  if (s.split_tokens > 0 && a.max_parts == 0) a.max_parts = kDefaultFixedParts;

  const size_t items = static_cast<size_t>(s.batch) * tiles;
  const size_t fixed_parts =
      s.split_tokens > 0
          ? std::min(a.max_parts, CeilDivide(COPPICE_MLA_MAX_CONTEXT, s.split_tokens))
          : 0;
  // Every cut adds a fragment to the whole tiles: one cut per block, or the fixed ones.  Narrowed
  // tiles fit one wave.
  const size_t slots = std::max(a.blocks + items, items * fixed_parts);
  const size_t rows = static_cast<size_t>(a.instance.tile_groups) * kGroupRows;
  const auto take = [plan](size_t bytes) {
    const size_t at = plan->bytes;
    plan->bytes += (bytes + 255) / 256 * 256;
    return at;
  };
  plan->fragment_begin = take((a.blocks + 1) * sizeof(int32_t));
  plan->fragments = take(slots * sizeof(Fragment));
  plan->tiles = take(static_cast<size_t>(s.batch) * a.max_tiles * sizeof(Tile));
  plan->partial_lse = take(slots * rows * sizeof(float));
  plan->partial_output = take(slots * rows * COPPICE_MLA_LATENT * sizeof(__half));
  return COPPICE_MLA_OK;
}

coppice_mla_status CheckPointer(const char* name, const void* pointer, size_t alignment) {
  if (pointer == nullptr) return Fail(COPPICE_MLA_INVALID_ARGUMENT, "tensors.%s is null", name);
  if (reinterpret_cast<uintptr_t>(pointer) % alignment != 0) {
    return Fail(COPPICE_MLA_INVALID_ARGUMENT, "tensors.%s is %p; it must be aligned to %zu bytes",
                name, pointer, alignment);
  }
  return COPPICE_MLA_OK;
}

coppice_mla_status CheckTensors(const coppice_mla_shape& s, const coppice_mla_tensors* tensors) {
  if (tensors == nullptr) return Fail(COPPICE_MLA_INVALID_ARGUMENT, "tensors is null");
  const coppice_mla_tensors& t = *tensors;
  COPPICE_MLA_TRY(CheckPointer("query", t.query, 16));
  COPPICE_MLA_TRY(CheckPointer("cache", t.cache, 16));
  COPPICE_MLA_TRY(CheckPointer("page_table", t.page_table, alignof(int32_t)));
  COPPICE_MLA_TRY(CheckPointer("context_lengths", t.context_lengths, alignof(int32_t)));
  COPPICE_MLA_TRY(CheckPointer("node_counts", t.node_counts, alignof(int32_t)));
  COPPICE_MLA_TRY(CheckPointer("ancestor_words", t.ancestor_words, alignof(uint64_t)));
  COPPICE_MLA_TRY(CheckPointer("output", t.output, 16));
  COPPICE_MLA_TRY(CheckPointer("workspace", t.workspace, 16));
  if (t.lse != nullptr) COPPICE_MLA_TRY(CheckPointer("lse", t.lse, alignof(float)));
  const int64_t page_bytes = static_cast<int64_t>(s.page_size) * RowBytes(s.cache_type);
  if (t.page_stride < page_bytes || t.page_stride % 16 != 0) {
    return Fail(
        COPPICE_MLA_INVALID_ARGUMENT,
        "tensors.page_stride is %lld bytes; it must be a multiple of 16 and at least the %lld "
        "of a page of %d rows of %d",
        static_cast<long long>(t.page_stride), static_cast<long long>(page_bytes), s.page_size,
        RowBytes(s.cache_type));
  }
  if (t.table_stride < 1) {
    return Fail(COPPICE_MLA_INVALID_ARGUMENT, "tensors.table_stride is %lld; it must be at least 1",
                static_cast<long long>(t.table_stride));
  }
  return COPPICE_MLA_OK;
}

coppice_mla_status Bind(const coppice_mla_tensors& t, Plan* plan) {
  if (t.workspace_bytes < plan->bytes) {
    return Fail(COPPICE_MLA_INVALID_ARGUMENT,
                "tensors.workspace_bytes is %zu; this shape needs %zu on this device "
                "(coppice_mla_verify_workspace)",
                t.workspace_bytes, plan->bytes);
  }
  AttentionArguments& a = plan->arguments;
  a.tensors = t;
  char* base = static_cast<char*>(t.workspace);
  a.workspace.fragment_begin = reinterpret_cast<int32_t*>(base + plan->fragment_begin);
  a.workspace.fragments = reinterpret_cast<Fragment*>(base + plan->fragments);
  a.workspace.tiles = reinterpret_cast<Tile*>(base + plan->tiles);
  a.workspace.partial_lse = reinterpret_cast<float*>(base + plan->partial_lse);
  a.workspace.partial_output = reinterpret_cast<__half*>(base + plan->partial_output);
  return COPPICE_MLA_OK;
}

// Everything the caller can get wrong is found before the device is asked for anything.
coppice_mla_status MakeBoundPlan(const coppice_mla_shape* shape, const coppice_mla_tensors* tensors,
                                 Plan* plan) {
  COPPICE_MLA_TRY(CheckShape(shape));
  COPPICE_MLA_TRY(CheckTensors(*shape, tensors));
  COPPICE_MLA_TRY(MakePlan(shape, plan));
  return Bind(*tensors, plan);
}

coppice_mla_status Check(const Plan& plan, int64_t pages, cudaStream_t stream) {
  const coppice_mla_shape& s = plan.arguments.shape;
  const coppice_mla_tensors& t = plan.arguments.tensors;
  if (pages < 1) {
    return Fail(COPPICE_MLA_INVALID_ARGUMENT, "pages is %lld; it must be at least 1",
                static_cast<long long>(pages));
  }
  std::vector<int32_t> lengths(s.batch), counts(s.batch), table;
  std::vector<uint64_t> words(static_cast<size_t>(s.batch) * s.nodes);
  cudaError_t error = cudaSuccess;
  const auto copy = [&](auto* host, const auto* from, size_t n) {
    if (error != cudaSuccess) return;
    error = cudaMemcpyAsync(host, from, n * sizeof(*host), cudaMemcpyDeviceToHost, stream);
    if (error == cudaSuccess) error = cudaStreamSynchronize(stream);
  };
  copy(lengths.data(), t.context_lengths, lengths.size());
  copy(counts.data(), t.node_counts, counts.size());
  copy(words.data(), t.ancestor_words, words.size());
  if (error != cudaSuccess) return FailCuda("copying lengths, counts and words", error);
  for (int b = 0; b < s.batch; ++b) {
    if (counts[b] < 0 || counts[b] > s.nodes) {
      return Fail(COPPICE_MLA_INVALID_ARGUMENT, "node_counts[%d] is %d; it must be 0 … %d", b,
                  counts[b], s.nodes);
    }
    if (counts[b] == 0) continue;
    if (lengths[b] < 0 || lengths[b] > COPPICE_MLA_MAX_CONTEXT - counts[b]) {
      return Fail(COPPICE_MLA_INVALID_ARGUMENT,
                  "context_lengths[%d] is %d; with %d nodes it must be 0 … %d", b, lengths[b],
                  counts[b], COPPICE_MLA_MAX_CONTEXT - counts[b]);
    }
    const int64_t entries = CeilDivide(lengths[b] + counts[b], s.page_size);
    if (entries > t.table_stride) {
      return Fail(COPPICE_MLA_INVALID_ARGUMENT,
                  "request %d has %d positions, %lld pages; the page table has room for %lld", b,
                  lengths[b] + counts[b], static_cast<long long>(entries),
                  static_cast<long long>(t.table_stride));
    }
    table.resize(entries);
    copy(table.data(), t.page_table + b * t.table_stride, table.size());
    if (error != cudaSuccess) return FailCuda("copying the page table", error);
    for (int64_t i = 0; i < entries; ++i) {
      if (table[i] < 0 || table[i] >= pages) {
        return Fail(COPPICE_MLA_INVALID_ARGUMENT, "page_table[%d][%lld] is %d; it must be 0 … %lld",
                    b, static_cast<long long>(i), table[i], static_cast<long long>(pages - 1));
      }
    }
    for (int i = 0; i < counts[b]; ++i) {
      const uint64_t word = words[static_cast<size_t>(b) * s.nodes + i];
      const uint64_t own = uint64_t{1} << i;
      if ((word & own) == 0) {
        return Fail(COPPICE_MLA_INVALID_ARGUMENT,
                    "ancestor_words[%d][%d] is %#llx; its own bit %d is not set", b, i,
                    static_cast<unsigned long long>(word), i);
      }
      if ((word & ~(own | (own - 1))) != 0) {
        return Fail(COPPICE_MLA_INVALID_ARGUMENT,
                    "ancestor_words[%d][%d] is %#llx; bit %d points forward, ancestors come before "
                    "their descendants",
                    b, i, static_cast<unsigned long long>(word), 63 - std::countl_zero(word));
      }
      for (uint64_t rest = word & ~own; rest != 0; rest &= rest - 1) {
        const int j = std::countr_zero(rest);
        const uint64_t missing = words[static_cast<size_t>(b) * s.nodes + j] & ~word;
        if (missing != 0) {
          return Fail(COPPICE_MLA_INVALID_ARGUMENT,
                      "ancestor_words[%d][%d] is %#llx; it names node %d but not that node's "
                      "ancestor %d",
                      b, i, static_cast<unsigned long long>(word), j, std::countr_zero(missing));
        }
      }
    }
  }
  return COPPICE_MLA_OK;
}

}  // namespace
}  // namespace coppice::mla

using coppice::mla::Plan;

extern "C" {

coppice_mla_status coppice_mla_verify_workspace(const coppice_mla_shape* shape, size_t* bytes) {
  if (bytes == nullptr) {
    return coppice::mla::Fail(COPPICE_MLA_INVALID_ARGUMENT, "bytes is null");
  }
  Plan plan;
  COPPICE_MLA_TRY(coppice::mla::MakePlan(shape, &plan));
  *bytes = plan.bytes;
  return COPPICE_MLA_OK;
}

coppice_mla_status coppice_mla_verify_schedule(const coppice_mla_shape* shape,
                                               const coppice_mla_tensors* tensors,
                                               coppice_stream_t stream) {
  Plan plan;
  COPPICE_MLA_TRY(coppice::mla::MakeBoundPlan(shape, tensors, &plan));
  const cudaError_t error = coppice::mla::LaunchSchedule(plan.arguments, stream);
  if (error != cudaSuccess) return coppice::mla::FailCuda("launching the schedule", error);
  return COPPICE_MLA_OK;
}

coppice_mla_status coppice_mla_verify_run(const coppice_mla_shape* shape,
                                          const coppice_mla_tensors* tensors,
                                          coppice_stream_t stream) {
  Plan plan;
  COPPICE_MLA_TRY(coppice::mla::MakeBoundPlan(shape, tensors, &plan));
  cudaError_t error;
  error = plan.hopper ? coppice::mla::LaunchHopper(plan.arguments, stream)
                      : coppice::mla::LaunchCommon(plan.arguments, plan.device.major, stream);
  if (error != cudaSuccess) return coppice::mla::FailCuda("launching the attention", error);
  error = coppice::mla::LaunchCombine(plan.arguments, stream);
  if (error != cudaSuccess) return coppice::mla::FailCuda("launching the combine", error);
  return COPPICE_MLA_OK;
}

coppice_mla_status coppice_mla_verify_check(const coppice_mla_shape* shape,
                                            const coppice_mla_tensors* tensors, int64_t pages,
                                            coppice_stream_t stream) {
  Plan plan;
  COPPICE_MLA_TRY(coppice::mla::MakeBoundPlan(shape, tensors, &plan));
  return coppice::mla::Check(plan, pages, stream);
}

const char* coppice_mla_error(void) { return coppice::mla::last_error; }

}  // extern "C"
