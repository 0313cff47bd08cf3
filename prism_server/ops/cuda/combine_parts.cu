#include "decode_line.cuh"
#include "decode_result.cuh"

// Goes on where the warps left off, for each (sequence, KV head) that more than one has a part of: a block each, a warp a
// query head.
extern "C" __global__ void __launch_bounds__(WARPS * 32)
combine_parts(const int* __restrict__ query_starts, const int* __restrict__ contexts, const float* left, u16* out,
              int sequences, int heads, int kv_heads, int least, int workers) {
  constexpr u32 CONTINUES = 1u << 30, COMPLETES = 1u << 31, WHERE = CONTINUES - 1;
  __shared__ u32 found[MAX_PARTS + 8];  // where results lie, in order, and what they do to their piece
  __shared__ int num_found;
  asm volatile("griddepcontrol.launch_dependents;");
  const int sequence = blockIdx.x / kv_heads, head = blockIdx.x % kv_heads, share = heads / kv_heads;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const int row = query_starts[sequence], pages = pages_of(contexts[sequence]);
  if (warp == 0) {
    int before = 0, line = 0;
    for (int s = lane; s < sequences; s += 32) {
      int count = query_starts[s + 1] - query_starts[s] == 1 ? line_pages(contexts[s], least) : 0;
      line += count;
      if (s < sequence) before += count;
    }
    for (int d = 16; d; d >>= 1) {
      before += __shfl_xor_sync(~0u, before, d);
      line += __shfl_xor_sync(~0u, line, d);
    }
    int count = 0;
    if (query_starts[sequence + 1] - row == 1 && pages > 0) {
      line *= kv_heads;
      const int size = part_pages(pages, least), parts = parts_of(pages, size);
      const int base = before * kv_heads + head * parts * size;
      const int first = worker_of(base, workers, line), last = worker_of(base + (parts - 1) * size, workers, line);
      auto part_at = [&](int place) { return place <= base ? 0 : min(parts, (place - base + size - 1) / size); };
      for (int group = first; group <= last && first < last; group += 32) {
        const int worker = group + lane;
        int a = 0, b = 0;
        if (worker <= last) {
          a = part_at(range_begin(worker, workers, line));
          b = part_at(range_begin(worker + 1, workers, line));
        }
        // From the beginning on: pieces as one, then one that is begun. Else: parts up to a piece, then pieces.
        const int singles = a == 0 ? min(1, b / PARTS) : min((PARTS - a % PARTS) % PARTS, b - a);
        const int pieces_from = a == 0 ? b - b % PARTS : a + singles;
        const int mine = a < b ? singles + (b - pieces_from + PARTS - 1) / PARTS : 0;
        int sum = mine;
        for (int d = 1; d < 32; d <<= 1) {
          int other = __shfl_up_sync(~0u, sum, d);
          if (lane >= d) sum += other;
        }
        u32* to = found + count + sum - mine;
        for (int i = 0; i < mine; i++) {
          int from, until, where;  // parts, slot
          if (i < singles) {
            from = a == 0 ? 0 : a + i;
            until = a == 0 ? pieces_from : from + 1;
            where = a == 0 ? LEFT_WHOLE : LEFT_FIRST + i;
          } else {
            from = pieces_from + (i - singles) * PARTS;
            until = min(from + PARTS, b);
            where = a == 0 ? LEFT_BEGUN : LEFT_FIRST + i;
          }
          to[i] = (u32)(worker * SLOTS + where) | (from % PARTS ? CONTINUES : 0) |
                  (until % PARTS == 0 || until == parts ? COMPLETES : 0);
        }
        count += __shfl_sync(~0u, sum, 31);
      }
    }
    if (lane == 0) num_found = count;
  }
  __syncthreads();
  asm volatile("griddepcontrol.wait;" ::: "memory");
  const int results = num_found;
  if (results == 0) return;
  constexpr int AT_ONCE = 8;
  for (int r = warp; r < share; r += WARPS) {
    float4 piece = make_float4(0.f, 0.f, 0.f, 0.f), whole = piece;
    float2 piece_stats = make_float2(NEVER, 0.f), whole_stats = piece_stats;
    auto merge = [](float4& v, float2& stats, const float4& w, const float2& behind) {
      const float top = fmaxf(stats.x, behind.x), x = exp2f(stats.x - top), y = exp2f(behind.x - top);
      v = make_float4(merged(v.x, x, w.x, y), merged(v.y, x, w.y, y), merged(v.z, x, w.z, y), merged(v.w, x, w.w, y));
      stats = make_float2(top, merged(stats.y, x, behind.y, y));
    };
    bool any = false;
    for (int base = 0; base < results; base += AT_ONCE) {
      float4 values[AT_ONCE];
      float2 stats[AT_ONCE];
#pragma unroll
      for (int i = 0; i < AT_ONCE; i++) {
        const float* from = left + (i64)(found[min(base + i, results - 1)] & WHERE) * result_floats(share);
        values[i] = __ldcg((const float4*)(from + r * DIM + 4 * lane));
        stats[i] = __ldcg((const float2*)(from + share * DIM + 2 * r));
      }
#pragma unroll
      for (int i = 0; i < AT_ONCE; i++) {
        if (base + i < results) {
          const u32 entry = found[base + i];
          if (entry & CONTINUES) merge(piece, piece_stats, values[i], stats[i]);
          else { piece = values[i]; piece_stats = stats[i]; }
          if (entry & COMPLETES) {
            if (any) merge(whole, whole_stats, piece, piece_stats);
            else { whole = piece; whole_stats = piece_stats; any = true; }
          }
        }
      }
    }
    const float down = 1.f / whole_stats.y;
    u16* to = out + ((i64)row * heads + head * share + r) * DIM + 4 * lane;
    *(uint2*)to = make_uint2(narrow2(whole.x * down, whole.y * down), narrow2(whole.z * down, whole.w * down));
  }
}
