// What this GPU can do at most, measured: the roofs that a kernel's figures are held against.
#ifndef COPPICE_BENCH_VERIFY_KERNEL_ROOFS_H_
#define COPPICE_BENCH_VERIFY_KERNEL_ROOFS_H_

namespace coppice::bench {

struct Roofs {
  double copy_gbps = 0;   // device-to-device copy of 2 GiB, bytes read plus bytes written
  double read_gbps = 0;   // a kernel that only reads
  double mma_tflops = 0;  // mma.sync bf16 into fp32, operands in registers
  double wgmma_tflops =
      0;  // wgmma bf16 into fp32, A in registers, B in shared memory; 0 where there is none
};

// Each the best of a few runs of some milliseconds.  All zero where a CUDA call failed.
Roofs MeasureRoofs();

}  // namespace coppice::bench

#endif  // COPPICE_BENCH_VERIFY_KERNEL_ROOFS_H_
