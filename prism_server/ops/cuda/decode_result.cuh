// What a part of a context gives for the query heads of one KV head: sums, their maximum logit, their weight.

typedef unsigned int u32;
typedef unsigned short u16;
typedef long long i64;

constexpr int DIM = 128, WARPS = 4;  // of a head; of a block
constexpr float NEVER = -1e30f;

__device__ __forceinline__ int result_floats(int share) { return (share * (DIM + 2) + 3) & ~3; }  // float4 may be read

__device__ __forceinline__ u32 narrow2(float low, float high) {
  u32 pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}
// Two results of the same query, one behind the other in the context, become one. Both kernels do just this.
__device__ __forceinline__ float merged(float before, float x, float behind, float y) {
  return __fmaf_rn(before, x, __fmul_rn(behind, y));
}
