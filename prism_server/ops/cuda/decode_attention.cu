// Attention of one query row a sequence over FP8 pages of 64 tokens, heads of 128 (split over the context).
//
// All pages of all sequences and KV heads lie in one line, which is cut into as many ranges of equal length as there are
// warps: whatever lengths meet in a batch, no warp works longer than the others. A warp walks its range, page after
// page, through a ring of shared memory that bulk copies fill ahead of it, across the borders of sequences. That keeps
// some 200 KB a multiprocessor in flight; so nothing else may wait for memory: whatever asks now comes behind all that.
// Hence queries travel with the pages, and page numbers are looked up a step early.
//
// Sums do not depend on where the ranges are cut, nor so on the batch: a context consists of parts of a few pages, each
// added up from zero; PARTS of them, in order, make a piece; the pieces, in order, make the result. Ranges begin and end
// between parts. What of a piece a warp has from its beginning on it adds up itself, other parts it leaves one by one to
// `combine_parts`, which goes on in the same order with the same arithmetic (`merge`).
//
// Products are m16n8k16 in half precision: S = Q K^T with the query heads of one KV head as rows, O^T = V^T P^T, whose
// right operand is S's accumulator as it lies. Both sums run over an order of head_dim and tokens that lets a lane take
// 16 bytes of shared memory at a time. E4M3 becomes half precision by one instruction a pair; K's scale multiplies the
// logits; V's logarithm is added to them, so that no factor exceeds 1.
//
// While the pages are on their way, one more warp asks the L2 for the weights of the product that follows, little by
// little: with few sequences the memory would be idle for most of the time.

#include "decode_line.cuh"
#include "decode_result.cuh"

constexpr int STAGES = 3, MAX_SHARE = 8, MAX_SEQUENCES = 256;
constexpr int TILE_BYTES = PAGE * DIM, SCALE_BYTES = PAGE * 4, PAGE_BYTES = 2 * (TILE_BYTES + SCALE_BYTES);
constexpr int ROW_BYTES = DIM * 2, STAGE_BYTES = PAGE_BYTES + MAX_SHARE * ROW_BYTES;
constexpr int AHEAD_BYTES = 4096;  // of the weights, asked for at a time


__device__ __forceinline__ u32 halves(u32 word, int upper) {
  u32 pair;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(pair) : "h"((u16)(upper ? word >> 16 : word)));
  return pair;
}
__device__ __forceinline__ u32 pack(float low, float high) {
  u32 pair;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}
__device__ __forceinline__ u32 pick(const uint4& v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }
__device__ __forceinline__ float wide(u16 bfloat) { return __uint_as_float((u32)bfloat << 16); }
__device__ __forceinline__ void multiply(float* c, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }
__device__ __forceinline__ void bulk_copy(void* to, const void* from, int bytes, void* barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   shared_address(to)), "l"(from), "r"(bytes), "r"(shared_address(barrier)) : "memory");
}
__device__ __forceinline__ void wait_for(void* barrier, u32 parity) {
  asm volatile(
      "{\n.reg .pred done;\nagain:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n@!done bra again;\n}" ::"r"(
          shared_address(barrier)), "r"(parity) : "memory");
}

struct Result {  // of 8 query rows, in a warp: o[j][0..1]: column 16 g + 2 j of rows 2 t, 2 t + 1; [2..3]: the one beside it
  float o[8][4], maximum, sum;  // of row g

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int j = 0; j < 8; j++) o[j][0] = o[j][1] = o[j][2] = o[j][3] = 0.f;
    maximum = NEVER;
    sum = 0.f;
  }
  __device__ __forceinline__ void merge(const Result& behind, int t) {
    const float top = fmaxf(maximum, behind.maximum), x = exp2f(maximum - top), y = exp2f(behind.maximum - top);
    const float even_x = __shfl_sync(~0u, x, 8 * t), odd_x = __shfl_sync(~0u, x, 8 * t + 4);
    const float even_y = __shfl_sync(~0u, y, 8 * t), odd_y = __shfl_sync(~0u, y, 8 * t + 4);
#pragma unroll
    for (int j = 0; j < 8; j++) {
      o[j][0] = merged(o[j][0], even_x, behind.o[j][0], even_y);
      o[j][1] = merged(o[j][1], odd_x, behind.o[j][1], odd_y);
      o[j][2] = merged(o[j][2], even_x, behind.o[j][2], even_y);
      o[j][3] = merged(o[j][3], odd_x, behind.o[j][3], odd_y);
    }
    sum = merged(sum, x, behind.sum, y);
    maximum = top;
  }
  __device__ __forceinline__ void leave(float* own, int share, int g, int t) const {  // rows, then (maximum, sum) of each
#pragma unroll
    for (int j = 0; j < 8; j++) {
      float* pair = own + (2 * t) * DIM + 16 * g + 2 * j;
      if (2 * t < share) __stcg((float2*)pair, make_float2(o[j][0], o[j][2]));
      if (2 * t + 1 < share) __stcg((float2*)(pair + DIM), make_float2(o[j][1], o[j][3]));
    }
    if (t == 0 && g < share) __stcg((float2*)(own + share * DIM + 2 * g), make_float2(maximum, sum));
  }
  __device__ __forceinline__ void write(u16* to, int share, int g, int t) const {
    const float even_down = 1.f / __shfl_sync(~0u, sum, 8 * t), odd_down = 1.f / __shfl_sync(~0u, sum, 8 * t + 4);
#pragma unroll
    for (int j = 0; j < 8; j++) {
      u32* pair = (u32*)(to + (2 * t) * DIM + 16 * g + 2 * j);
      if (2 * t < share) pair[0] = narrow2(o[j][0] * even_down, o[j][2] * even_down);
      if (2 * t + 1 < share) pair[DIM / 2] = narrow2(o[j][1] * odd_down, o[j][3] * odd_down);
    }
  }
};

// Exclusive sums of what the sequences take of the line, by one warp; the total comes back.
__device__ __forceinline__ int sum_up(int lane, int sequences, int least, const int* lengths, int* starts) {
  int before = 0;
  for (int base = 0; base < sequences; base += 32) {
    int s = base + lane, count = s < sequences ? line_pages(lengths[s], least) : 0, sum = count;
    for (int d = 1; d < 32; d <<= 1) {
      int other = __shfl_up_sync(~0u, sum, d);
      if (lane >= d) sum += other;
    }
    if (s < sequences) starts[s] = before + sum - count;
    before += __shfl_sync(~0u, sum, 31);
  }
  return before;
}

// Asks the L2 for this block's part of the weights that come next, `pace` clocks a bite, until the block is done.
__device__ __forceinline__ void ask_ahead(const char* ahead, i64 ahead_bytes, int pace, const volatile int* working) {
  const i64 bites = ahead_bytes / AHEAD_BYTES, begin = bites * blockIdx.x / gridDim.x,
            end = bites * (blockIdx.x + 1) / gridDim.x;
  i64 next = clock64();
  for (i64 bite = begin; bite < end && *working; bite++, next += pace) {
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(ahead + bite * AHEAD_BYTES), "r"(AHEAD_BYTES));
    while (clock64() < next + pace) __nanosleep(40);
  }
}

extern "C" __global__ void __launch_bounds__((WARPS + 1) * 32, 1)
decode_attention(const u16* __restrict__ q,           // bf16 [rows, heads, DIM]
                 const unsigned char* payload,         // E4M3 [2, pages, kv_heads, PAGE, DIM] of the layer
                 const float* scales,                  // [2, pages, kv_heads, PAGE]
                 const int* __restrict__ query_starts, // [sequences + 1]
                 const int* __restrict__ contexts,     // [sequences]
                 const int* __restrict__ tables,       // [holders, table_stride]
                 const int* __restrict__ table_rows,   // [sequences]
                 u16* out,                             // bf16 [rows, heads, DIM]
                 float* left,                          // [workers, SLOTS, result_floats], a worker a warp
                 const char* ahead,                    // weights of the product that follows
                 i64 ahead_bytes, i64 num_pages, i64 table_stride, int sequences, int heads, int kv_heads, int least,
                 int pace, float scale) {
  extern __shared__ __align__(128) unsigned char ring_memory[];
  __shared__ __align__(8) unsigned long long barriers[WARPS][STAGES];
  __shared__ int starts[MAX_SEQUENCES], lengths[MAX_SEQUENCES], line, working;
  __shared__ u16 rows[MAX_SEQUENCES], holders[MAX_SEQUENCES];
  asm volatile("griddepcontrol.launch_dependents;");
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3, share = heads / kv_heads;

  for (int s = threadIdx.x; s < sequences; s += (WARPS + 1) * 32) {
    int first = query_starts[s];
    lengths[s] = query_starts[s + 1] - first == 1 ? contexts[s] : 0;  // longer queries are another kernel's
    rows[s] = first;
    holders[s] = table_rows[s];
  }
  if (warp < WARPS && lane < STAGES)
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(&barriers[warp][lane])));
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  __syncthreads();
  if (warp == 0) {
    int sum = sum_up(lane, sequences, least, lengths, starts);
    if (lane == 0) { line = sum * kv_heads; working = WARPS; }
  }
  __syncthreads();
  if (warp == WARPS) {
    if (lane == 0) ask_ahead(ahead, ahead_bytes, pace, &working);
    return;
  }

  const int worker = blockIdx.x * WARPS + warp, workers = gridDim.x * WARPS;
  Walk ahead_walk{range_begin(worker, workers, line), range_begin(worker + 1, workers, line), kv_heads, sequences, least,
                  lengths, starts, {}};
  bool more_ahead = ahead_walk.open();
  Walk walk = ahead_walk;
  bool more = more_ahead;
  unsigned char* ring = ring_memory + warp * (STAGES * STAGE_BYTES);
  const int query_bytes = share * ROW_BYTES;
  int page_ahead = 0;  // its number is looked up a step early: a look-up waits as long as everything that is on its way
  auto look_up = [&] {
    if (more_ahead) page_ahead = tables[holders[ahead_walk.step.sequence] * table_stride + ahead_walk.step.page];
  };
  auto request_query = [&](int slot, const Step& step) {
    const u16* from = q + ((i64)rows[step.sequence] * heads + step.head * share) * DIM;
    bulk_copy(ring + slot * STAGE_BYTES + PAGE_BYTES, from, query_bytes, &barriers[warp][slot]);
  };
  auto request_page = [&](int slot, const Step& step) {
    i64 k = (i64)page_ahead * kv_heads + step.head, v = k + num_pages * kv_heads;
    unsigned char* to = ring + slot * STAGE_BYTES;
    void* barrier = &barriers[warp][slot];
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)),
                 "r"(PAGE_BYTES + (step.first ? query_bytes : 0)) : "memory");
    bulk_copy(to, payload + k * TILE_BYTES, TILE_BYTES, barrier);
    bulk_copy(to + TILE_BYTES, payload + v * TILE_BYTES, TILE_BYTES, barrier);
    bulk_copy(to + 2 * TILE_BYTES, scales + k * PAGE, SCALE_BYTES, barrier);
    bulk_copy(to + 2 * TILE_BYTES + SCALE_BYTES, scales + v * PAGE, SCALE_BYTES, barrier);
  };

  // The page of the newest token is written by the kernel before this one, as the queries are; all others were long ago.
  look_up();
  Step early[STAGES];
  int num_early = 0;
#pragma unroll
  for (int slot = 0; slot < STAGES; slot++) {
    bool complete = more_ahead && num_early == slot && (ahead_walk.step.page + 1) * PAGE < lengths[ahead_walk.step.sequence];
    if (complete) {
      early[slot] = ahead_walk.step;
      if (lane == 0) request_page(slot, ahead_walk.step);
      more_ahead = ahead_walk.advance();
      look_up();
      num_early++;
    }
  }
  asm volatile("griddepcontrol.wait;" ::: "memory");
#pragma unroll
  for (int slot = 0; slot < STAGES; slot++) {
    if (slot < num_early) {
      if (lane == 0 && early[slot].first) request_query(slot, early[slot]);
    } else if (more_ahead) {
      if (lane == 0) {
        request_page(slot, ahead_walk.step);
        if (ahead_walk.step.first) request_query(slot, ahead_walk.step);
      }
      more_ahead = ahead_walk.advance();
      look_up();
    }
  }

  u32 query[16];
  Result part, piece, whole;
  float factor = 0.f;
  bool from_start = false;  // whether the range has this sequence from its beginning on
  int first_part = 0, slot = 0, next_left = LEFT_FIRST;
  float* own = left + (i64)worker * SLOTS * result_floats(share);
  auto leave = [&](const Result& result, int where) { result.leave(own + where * result_floats(share), share, g, t); };
  u32 parity = 0;
  while (more) {
    const Step& at = walk.step;
    wait_for(&barriers[warp][slot], parity);
    unsigned char* tile = ring + slot * STAGE_BYTES;
    if (at.first) {  // its query rows, scaled by a power of two so that half precision holds them
      float row[32], largest = 0.f;
      const unsigned char* from = tile + PAGE_BYTES + min(g, share - 1) * ROW_BYTES;
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const uint4 low = *(const uint4*)(from + 128 * i + 32 * t), high = *(const uint4*)(from + 128 * i + 32 * t + 16);
#pragma unroll
        for (int x = 0; x < 8; x++) {
          u32 two = pick(x < 4 ? low : high, x & 3);
          row[i * 16 + 2 * x] = wide((u16)two);
          row[i * 16 + 2 * x + 1] = wide((u16)(two >> 16));
        }
      }
#pragma unroll
      for (int x = 0; x < 32; x++) largest = fmaxf(largest, fabsf(row[x]));
      largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
      largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
      u32 exponent = __float_as_uint(fmaxf(largest, 1e-30f)) & 0x7f800000u;
      float down = __uint_as_float(0x7f000000u - exponent);  // 2^-exponent
#pragma unroll
      for (int x = 0; x < 16; x++) query[x] = pack(row[2 * x] * down, row[2 * x + 1] * down);
      factor = __uint_as_float(exponent) * scale * 1.4426950408889634f;
      from_start = at.part == 0;
      first_part = at.part;
    }
    if (at.fresh) part.clear();
    const unsigned char *keys = tile, *values = tile + TILE_BYTES;
    const float2* key_scales = (const float2*)(tile + 2 * TILE_BYTES);
    const float2* value_scales = (const float2*)(tile + 2 * TILE_BYTES + SCALE_BYTES);
    const int inside = lengths[at.sequence] - at.page * PAGE;
    if (inside < PAGE) {  // beyond the context anything may lie, NaN too
      for (int i = inside * (DIM / 16) + lane; i < PAGE * (DIM / 16); i += 32) ((uint4*)values)[i] = make_uint4(0, 0, 0, 0);
      asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
      __syncwarp();
    }

    float s[8][2], with_value[8][2], highest = NEVER;
#pragma unroll
    for (int n = 0; n < 8; n++) {
      const uint4* row = (const uint4*)(keys + (n * 8 + g) * DIM);
      const bool swap = g & 1;  // odd rows begin with their other half: no two lanes want one bank
      const uint4 one = row[(swap ? 4 : 0) + t], other = row[(swap ? 0 : 4) + t];
      const uint4 low = swap ? other : one, high = swap ? one : other;
      float c[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
      for (int k = 0; k < 8; k++) {
        u32 word = pick(k < 4 ? low : high, k & 3);
        multiply(c, query[2 * k], 0u, query[2 * k + 1], 0u, halves(word, 0), halves(word, 1));
      }
      float2 ks = key_scales[n * 4 + t], vs = value_scales[n * 4 + t];
      bool first = n * 8 + 2 * t < inside, second = n * 8 + 2 * t + 1 < inside;
      s[n][0] = first ? c[0] * (ks.x * factor) : NEVER;
      s[n][1] = second ? c[1] * (ks.y * factor) : NEVER;
      with_value[n][0] = first ? s[n][0] + __log2f(vs.x) : NEVER;
      with_value[n][1] = second ? s[n][1] + __log2f(vs.y) : NEVER;
      highest = fmaxf(highest, fmaxf(with_value[n][0], with_value[n][1]));
    }
    highest = fmaxf(highest, __shfl_xor_sync(~0u, highest, 1));
    highest = fmaxf(highest, __shfl_xor_sync(~0u, highest, 2));
    highest = fmaxf(highest, part.maximum);
    float shrink = exp2f(part.maximum - highest), added = 0.f;
    part.maximum = highest;
    u32 weights[8];
#pragma unroll
    for (int n = 0; n < 8; n++) {
      added += exp2f(s[n][0] - highest) + exp2f(s[n][1] - highest);
      weights[n] = pack(exp2f(with_value[n][0] - highest), exp2f(with_value[n][1] - highest));
    }
    added += __shfl_xor_sync(~0u, added, 1);
    added += __shfl_xor_sync(~0u, added, 2);
    part.sum = part.sum * shrink + added;
    float even = __shfl_sync(~0u, shrink, 8 * t), odd = __shfl_sync(~0u, shrink, 8 * t + 4);  // of columns 2t, 2t + 1
#pragma unroll
    for (int j = 0; j < 8; j++) { part.o[j][0] *= even; part.o[j][1] *= odd; part.o[j][2] *= even; part.o[j][3] *= odd; }
#pragma unroll
    for (int c = 0; c < 4; c++) {
      const unsigned char* from = values + (c * 16 + 2 * t) * DIM + 16 * g;
      uint4 v0 = *(const uint4*)from, v1 = *(const uint4*)(from + DIM);
      uint4 v8 = *(const uint4*)(from + 8 * DIM), v9 = *(const uint4*)(from + 9 * DIM);
#pragma unroll
      for (int j = 0; j < 8; j++) {
        u32 x0 = halves(pick(v0, j >> 1), j & 1), x1 = halves(pick(v1, j >> 1), j & 1);
        u32 x8 = halves(pick(v8, j >> 1), j & 1), x9 = halves(pick(v9, j >> 1), j & 1);
        multiply(part.o[j], __byte_perm(x0, x1, 0x5410), __byte_perm(x0, x1, 0x7632), __byte_perm(x8, x9, 0x5410),
                 __byte_perm(x8, x9, 0x7632), weights[2 * c], weights[2 * c + 1]);
      }
    }
    __syncwarp();
    if (more_ahead) {
      if (lane == 0) {
        request_page(slot, ahead_walk.step);
        if (ahead_walk.step.first) request_query(slot, ahead_walk.step);
      }
      more_ahead = ahead_walk.advance();
      look_up();
    }
    if (++slot == STAGES) { slot = 0; parity ^= 1; }

    if (at.page == at.last_page) {
      const int place = at.part % PARTS;
      const bool sequence_ends = walk.ends_sequence(), range_ends = walk.ends_range();
      if (at.part - place < first_part) {  // its piece began in the range before
        leave(part, next_left++);
      } else {
        if (place == 0) piece = part; else piece.merge(part, t);
        const bool complete = place == PARTS - 1 || sequence_ends;
        if (from_start && complete) {
          if (at.part < PARTS) whole = piece; else whole.merge(piece, t);
        } else if (complete || range_ends) {
          leave(piece, from_start ? LEFT_BEGUN : next_left++);
        }
        if (from_start && sequence_ends)
          whole.write(out + ((i64)rows[at.sequence] * heads + at.head * share) * DIM, share, g, t);
        else if (from_start && range_ends && at.part >= PARTS - 1)
          leave(whole, LEFT_WHOLE);
      }
    }
    more = walk.advance();
  }
  __syncwarp();
  if (lane == 0) atomicSub(&working, 1);
}
