// Paged MLA attention of draft trees: every node of a request's draft tree attends to the request's
// whole context in the paged latent cache and to its own ancestors in the tree, in one pass over
// the cache.  A C interface of its own: it needs nothing else of Coppice, and every pointer it
// takes is the caller's.
//
//   out[b,i,h] = Σ_t softmax_t(scale · q[b,i,h] · k[b,t]) · k[b,t][0:512]     over the visible
//   positions t
//
// MLA in absorbed form (DeepSeek-V2, arXiv:2405.04434, 2.1.2): one latent row of 512 + 64 values
// per token serves all heads, its first 512 values are also the value vector.  Position t of
// request b is visible to node i where t < context_lengths[b], or t = context_lengths[b] + j with
// bit j of ancestor_words[b][i] set.  A chain is the tree with words 2^(i+1) − 1, a plain decode
// step the tree of one node.
//
// Usage, per captured graph (all shapes fixed) and replay:
//   1. once:       coppice_mla_verify_workspace(&shape, &bytes), allocate, bind tensors;
//   2. per step:   coppice_mla_verify_schedule(&shape, &tensors, stream), after lengths and counts
//   are written;
//   3. per layer:  coppice_mla_verify_run(&shape, &tensors, stream).
// Steps 2 and 3 launch kernels and do nothing else: no allocation, no memset, no host read, no
// synchronisation. Lengths, counts, words and page tables are read on the device, so a graph
// captured at one set of them is right at any other within the shape.
#ifndef COPPICE_KERNELS_CUDA_MLA_VERIFY_H_
#define COPPICE_KERNELS_CUDA_MLA_VERIFY_H_

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct CUstream_st* coppice_stream_t;  // cudaStream_t

typedef enum {
  COPPICE_MLA_OK = 0,
  COPPICE_MLA_INVALID_ARGUMENT = 1,  // the caller's mistake; nothing was launched
  COPPICE_MLA_UNSUPPORTED_DEVICE = 2,
  COPPICE_MLA_CUDA_ERROR = 3,
} coppice_mla_status;

typedef enum {
  COPPICE_MLA_BF16 = 0,  // a row of 576 bf16: 1,152 bytes
  COPPICE_MLA_FP8 =
      1,  // a row of 656 bytes: 512 e4m3, one fp32 scale, 12 bytes unused, 64 bf16 (the RoPE part)
} coppice_mla_cache_type;

// Which kernel runs: AUTO takes the fastest that this device has.
typedef enum {
  COPPICE_MLA_AUTO = 0,
  COPPICE_MLA_COMMON = 1,        // mma.sync: sm_90 and sm_120
  COPPICE_MLA_HOPPER = 2,        // wgmma: sm_90a
  COPPICE_MLA_COMMON_SMALL = 3,  // the common kernel in the layout that sm_120 uses, on any device
} coppice_mla_instance;

enum {
  COPPICE_MLA_LATENT = 512,
  COPPICE_MLA_ROPE = 64,
  COPPICE_MLA_ROW = COPPICE_MLA_LATENT + COPPICE_MLA_ROPE,
  COPPICE_MLA_MAX_BATCH = 64,
  COPPICE_MLA_MAX_NODES = 64,
  COPPICE_MLA_MAX_HEADS = 64,
  COPPICE_MLA_MAX_CONTEXT = 262144,
  COPPICE_MLA_MAX_PAGE = 64,
};

// What is fixed when a graph is captured.
typedef struct {
  int batch;      // requests, 1 … 64
  int nodes;      // nodes per request that the tensors have room for, 1 … 64
  int heads;      // query heads of this rank, 1 … 64
  int page_size;  // tokens per page: 1, 2, 4 … 64
  coppice_mla_cache_type cache_type;
  coppice_mla_instance instance;
  int max_splits;    // at most this many parts of one request's context; 0: COPPICE_NSPLIT, or as
                     // many as pay
  int split_tokens;  // > 0: parts of exactly this many tokens (a multiple of 64), so that a
                     // request's sums do not depend on its batch; doubled for a request that would
                     // have more than max_splits (64 where that is 0) parts; 0: whatever fills one
                     // wave
  float softmax_scale;
} coppice_mla_shape;

// Device memory of the caller, static while a graph that names it lives.  Alignment: 16 bytes for
// query, cache, output, workspace and page_stride; natural for the rest.
typedef struct {
  const void* query;    // bf16 [batch][nodes][heads][576]: latent part (512), then RoPE part (64)
  const void* cache;    // pages of page_size rows
  int64_t page_stride;  // bytes from page to page, at least page_size rows
  const int32_t* page_table;       // [batch][table_stride]: entry t / page_size holds position t;
                                   // entries past a request's
  int64_t table_stride;            //   last position are never read
  const int32_t* context_lengths;  // [batch]: positions before the tree, 0 … 262,144 − nodes
  const int32_t* node_counts;  // [batch]: live nodes, 0 … nodes; 0 is a padded request: not even
                               // its table is read
  const uint64_t* ancestor_words;  // [batch][nodes]: bit j of word i: node j is i or an ancestor of
                                   // i; no bit above i
  void* output;     // bf16 [batch][nodes][heads][512]; rows past node_counts are not written
  float* lse;       // [batch][nodes][heads], natural logarithm; null where not wanted
  void* workspace;  // coppice_mla_verify_workspace bytes; needs no initialisation
  size_t workspace_bytes;
} coppice_mla_tensors;

// Bytes of workspace that this shape needs on the current device.
coppice_mla_status coppice_mla_verify_workspace(const coppice_mla_shape* shape, size_t* bytes);

// One small kernel: reads lengths and counts, writes the step's schedule into the workspace.
coppice_mla_status coppice_mla_verify_schedule(const coppice_mla_shape* shape,
                                               const coppice_mla_tensors* tensors,
                                               coppice_stream_t stream);

// The attention of one layer by the schedule in the workspace.
coppice_mla_status coppice_mla_verify_run(const coppice_mla_shape* shape,
                                          const coppice_mla_tensors* tensors,
                                          coppice_stream_t stream);

// Checks on the host what the kernels trust: counts, lengths, table entries (0 … pages − 1) and
// words (own bit set, none above it, ancestors' ancestors included).  Copies them from the device
// and synchronises: for tests and first use.
coppice_mla_status coppice_mla_verify_check(const coppice_mla_shape* shape,
                                            const coppice_mla_tensors* tensors, int64_t pages,
                                            coppice_stream_t stream);

// The sentence for this thread's last status that was not OK.
const char* coppice_mla_error(void);

#ifdef __cplusplus
}
#endif

#endif  // COPPICE_KERNELS_CUDA_MLA_VERIFY_H_
