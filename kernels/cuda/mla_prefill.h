// MLA attention of a prefill chunk in the expanded form: keys and values are rebuilt from the paged
// latent cache through kv_b, then every new token attends to the whole context before the chunk and
// causally to the chunk itself.
//
//   k[t,h] = (kv_b[h][0:128] · c[t], r[t])    v[t,h] = kv_b[h][128:256] · c[t]    c: latent part
//   (512), r: RoPE part (64) out[i,h] = Σ_t softmax_t(scale · q[i,h] · k[t,h]) · v[t,h]    over t ≤
//   context + i
//
// A key costs 2 · (192 + 128) FLOPs per query and head, against 2 · (576 + 512) in absorbed form
// (mla_verify.h): 3.4 times fewer (DeepSeek-V2, arXiv:2405.04434, 2.1.2).  The rebuilding, 2 · 512
// · 256 per key and head, is done once per chunk, slab by slab of the context, and not once per
// block of queries.
//
// The chunk's own latent rows are in the cache already, at positions context … context + tokens
// − 1.  One request a call. Usage: coppice_mla_prefill_workspace once, then coppice_mla_prefill_run
// per layer: launches kernels and does nothing else.
#ifndef COPPICE_KERNELS_CUDA_MLA_PREFILL_H_
#define COPPICE_KERNELS_CUDA_MLA_PREFILL_H_

#include "kernels/cuda/mla_verify.h"

#ifdef __cplusplus
extern "C" {
#endif

enum {
  COPPICE_MLA_HEAD = 128,  // a head's width without RoPE, and of its values
  COPPICE_MLA_QUERY = COPPICE_MLA_HEAD + COPPICE_MLA_ROPE,  // an expanded query or key
  COPPICE_MLA_MAX_CHUNK = 2048,
};

// What the launches depend on; lengths up to these are read on the device.
typedef struct {
  int tokens;       // new tokens that the tensors have room for, 1 … 2048
  int heads;        // of this rank, 1 … 64
  int page_size;    // tokens per page: 1, 2, 4 … 64
  int max_context;  // positions before the chunk at most, 0 … 262,144 − tokens
  coppice_mla_cache_type cache_type;
  float softmax_scale;
} coppice_mla_prefill_shape;

// Device memory of the caller.  Alignment: 16 bytes for query, kv_b, cache, output, workspace and
// page_stride; natural for the rest.
typedef struct {
  const void* query;              // bf16 [tokens][heads][192]: 128 without RoPE, then 64 with
  const void* kv_b;               // bf16 [heads][256][512]: 128 rows of keys, then 128 of values
  const void* cache;              // as in mla_verify.h
  int64_t page_stride;            // bytes
  const int32_t* page_table;      // of the request; entries past its last position are never read
  const int32_t* context_length;  // [1]: positions before the chunk
  const int32_t* token_count;     // [1]: live new tokens, 0 … tokens
  void* output;     // bf16 [tokens][heads][128]; rows past token_count are not written
  float* lse;       // [tokens][heads], natural logarithm; null where not wanted
  void* workspace;  // coppice_mla_prefill_workspace bytes; needs no initialisation
  size_t workspace_bytes;
} coppice_mla_prefill_tensors;

// Bytes of workspace that this shape needs on the current device: at most 512 MB of rebuilt keys
// and values, and the partial results.
coppice_mla_status coppice_mla_prefill_workspace(const coppice_mla_prefill_shape* shape,
                                                 size_t* bytes);

coppice_mla_status coppice_mla_prefill_run(const coppice_mla_prefill_shape* shape,
                                           const coppice_mla_prefill_tensors* tensors,
                                           coppice_stream_t stream);

// The sentence for this thread's last status of the two calls above that was not OK.
const char* coppice_mla_prefill_error(void);

#ifdef __cplusplus
}
#endif

#endif  // COPPICE_KERNELS_CUDA_MLA_PREFILL_H_
