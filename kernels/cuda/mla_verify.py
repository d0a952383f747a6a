"""mla_verify.h for torch tensors, through ctypes: no build step, nothing to install.

    library = MlaVerify("build/release/kernels/cuda/libcoppice_mla_verify.so")
    plan = library.plan(batch=1, nodes=9, heads=8, page_size=64, softmax_scale=scale)
    plan.schedule(tensors); plan.run(tensors)

Both calls launch kernels on torch's current stream and do nothing else, so they may be captured in a torch.cuda.graph.
"""

import ctypes

import torch

BF16, FP8 = 0, 1
AUTO, COMMON, HOPPER, COMMON_SMALL = 0, 1, 2, 3


class Shape(ctypes.Structure):
    _fields_ = [
        ("batch", ctypes.c_int),
        ("nodes", ctypes.c_int),
        ("heads", ctypes.c_int),
        ("page_size", ctypes.c_int),
        ("cache_type", ctypes.c_int),
        ("instance", ctypes.c_int),
        ("max_splits", ctypes.c_int),
        ("split_tokens", ctypes.c_int),
        ("softmax_scale", ctypes.c_float),
    ]


class Tensors(ctypes.Structure):
    _fields_ = [
        ("query", ctypes.c_void_p),
        ("cache", ctypes.c_void_p),
        ("page_stride", ctypes.c_int64),
        ("page_table", ctypes.c_void_p),
        ("table_stride", ctypes.c_int64),
        ("context_lengths", ctypes.c_void_p),
        ("node_counts", ctypes.c_void_p),
        ("ancestor_words", ctypes.c_void_p),
        ("output", ctypes.c_void_p),
        ("lse", ctypes.c_void_p),
        ("workspace", ctypes.c_void_p),
        ("workspace_bytes", ctypes.c_size_t),
    ]


class MlaVerify:
    """The shared library."""

    def __init__(self, path):
        self._lib = ctypes.CDLL(path)
        self._lib.coppice_mla_error.restype = ctypes.c_char_p
        for name in ("schedule", "run"):
            getattr(self._lib, "coppice_mla_verify_" + name).argtypes = [
                ctypes.POINTER(Shape), ctypes.POINTER(Tensors), ctypes.c_void_p]

    def _check(self, status):
        if status != 0:
            raise RuntimeError(self._lib.coppice_mla_error().decode())

    def plan(self, **fields):
        """A shape (mla_verify.h's fields; those left out are 0) and its workspace."""
        return Plan(self, Shape(**fields))

    def workspace_bytes(self, shape):
        size = ctypes.c_size_t()
        self._check(self._lib.coppice_mla_verify_workspace(ctypes.byref(shape), ctypes.byref(size)))
        return size.value

    def schedule(self, shape, tensors):
        self._check(self._lib.coppice_mla_verify_schedule(
            ctypes.byref(shape), ctypes.byref(tensors), torch.cuda.current_stream().cuda_stream))

    def run(self, shape, tensors):
        self._check(self._lib.coppice_mla_verify_run(
            ctypes.byref(shape), ctypes.byref(tensors), torch.cuda.current_stream().cuda_stream))

    def check(self, shape, tensors, pages):
        self._check(self._lib.coppice_mla_verify_check(
            ctypes.byref(shape), ctypes.byref(tensors), ctypes.c_int64(pages),
            ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)))


class Plan:
    """One captured shape.  Keeps its workspace; the caller keeps the tensors that it binds."""

    def __init__(self, library, shape):
        self.library = library
        self.shape = shape
        self.workspace = torch.empty(library.workspace_bytes(shape), dtype=torch.uint8, device="cuda")

    def bind(self, query, cache, page_table, context_lengths, node_counts, ancestor_words, output, lse=None):
        """The C struct of these CUDA tensors.

        query bf16 [batch, nodes, heads, 576]; cache bf16 [pages, page_size, 576] or uint8 [pages, page_size, 656], pages
        may be apart; page_table int32 [batch, entries]; context_lengths and node_counts int32 [batch]; ancestor_words
        int64 [batch, nodes]; output bf16 [batch, nodes, heads, 512]; lse fp32 [batch, nodes, heads] or None.
        """
        for name, tensor, kind in (("query", query, torch.bfloat16), ("page_table", page_table, torch.int32),
                                   ("context_lengths", context_lengths, torch.int32),
                                   ("node_counts", node_counts, torch.int32),
                                   ("ancestor_words", ancestor_words, torch.int64), ("output", output, torch.bfloat16)):
            if tensor.dtype != kind or not tensor.is_cuda or not tensor.is_contiguous():
                raise ValueError(f"{name} must be a contiguous CUDA tensor of {kind}, not {tensor.dtype} on {tensor.device}")
        return Tensors(
            query.data_ptr(), cache.data_ptr(), cache.stride(0) * cache.element_size(), page_table.data_ptr(),
            page_table.stride(0), context_lengths.data_ptr(), node_counts.data_ptr(), ancestor_words.data_ptr(),
            output.data_ptr(), lse.data_ptr() if lse is not None else None, self.workspace.data_ptr(),
            self.workspace.numel())

    def check(self, tensors, pages):
        """Raises with a sentence where lengths, counts, words or table entries are wrong.  Synchronises."""
        self.library.check(self.shape, tensors, pages)

    def schedule(self, tensors):
        self.library.schedule(self.shape, tensors)

    def run(self, tensors):
        self.library.run(self.shape, tensors)
