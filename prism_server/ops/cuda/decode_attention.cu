// Attention of one query row a sequence over FP8 pages of 64 tokens, heads of 128 (split over the context).
//
// A warp is a worker of its own: it walks pieces of contexts, half a page a step, through a ring of shared memory that
// bulk copies fill ahead of it, across the borders of pieces. That keeps some 200 KB a multiprocessor in flight; so
// nothing else of a piece may wait for memory: whatever asks now comes behind all that. Hence queries travel with the
// pages, page numbers are looked up a step early, and another kernel adds the pieces. Two warps share a scheduler: what a
// step costs is a chain of latencies, and one warp alone would leave the memory waiting for it.
//
// Pieces of full length come first; what is left of contexts is cut finer, so that warps end at nearly the same time.
//
// Products are m16n8k16 in half precision: S = Q K^T with the query heads of one KV head as rows, O^T = V^T P^T, whose
// right operand is S's accumulator as it lies. Both sums run over an order of head_dim and tokens that lets a lane take
// 16 bytes of shared memory at a time. E4M3 becomes half precision by one instruction a pair; K's scale multiplies the
// logits; V's logarithm is added to them, so that no factor exceeds 1.
//
// Compiled with SHARE, the query heads of a KV head; STAGES, the ring's length; TOKENS of a step, WARPS and ADDERS of a
// block, MAX_PIECES of a context and MAX_SEQUENCES: see decode_attention.py.

typedef unsigned int u32;
typedef unsigned short u16;
typedef long long i64;

constexpr int PAGE = 64, DIM = 128;  // tokens; numbers of a head
constexpr int MAX_RESTS = 4, MAX_FULL_PIECES = MAX_PIECES - MAX_RESTS + 1;  // of a context
constexpr int TILE_BYTES = TOKENS * DIM, SCALE_BYTES = TOKENS * 4, STEP_BYTES = 2 * (TILE_BYTES + SCALE_BYTES);
constexpr int ROW_BYTES = DIM * 2, QUERY_BYTES = SHARE * ROW_BYTES, STAGE_BYTES = STEP_BYTES + QUERY_BYTES;
constexpr int PARTIAL = (SHARE * (DIM + 2) + 3) / 4 * 4;  // floats of a piece's result: rows, then (maximum, sum) of each
constexpr float NEVER = -1e30f;

struct Step {  // half a page of one piece of one sequence and KV head
  int sequence, head, piece, pieces, place, last;  // of the context's halves: this one, and the piece's last
  bool first;
};

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
__device__ __forceinline__ u32 narrow2(float low, float high) {
  u32 pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}
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

// Pieces depend on a sequence's own length alone, so that its sums do not depend on the batch, within a class of these.
__device__ __forceinline__ int pages_of(int length) { return (length + PAGE - 1) / PAGE; }
__device__ __forceinline__ int pages_a_piece(int pages, int least) {
  return max(least, (pages + MAX_FULL_PIECES - 1) / MAX_FULL_PIECES);
}
__device__ __forceinline__ int pages_a_rest(int size) { return (size + MAX_RESTS - 1) / MAX_RESTS; }  // of a context's last pages
__device__ __forceinline__ int full_pieces(int length, int least) {
  int pages = pages_of(length);
  return pages / pages_a_piece(pages, least);
}
__device__ __forceinline__ int rest_pieces(int length, int least) {
  int pages = pages_of(length), size = pages_a_piece(pages, least), rest = pages_a_rest(size);
  return (pages % size + rest - 1) / rest;
}

struct Walk {  // the steps of one warp, in order: items item, item + stride, ...; an item is (piece, KV head)
  int item, stride, items, kv_heads, sequences, least_pages;
  const int* contexts;
  const u16* starts;  // starts[s]: full pieces of all sequences before s; behind those, all of these and the rests before s
  Step step;

  __device__ __forceinline__ bool open() {  // find the item's place; false when there is none left
    if (item >= items) return false;
    int piece = item / kv_heads, low = 0, high = 2 * sequences;
    while (high - low > 1) {
      int middle = (low + high) >> 1;
      if (starts[middle] <= piece) low = middle; else high = middle;
    }
    const bool rest = low >= sequences;
    step.sequence = rest ? low - sequences : low;
    const int length = contexts[step.sequence], pages = pages_of(length), size = pages_a_piece(pages, least_pages);
    const int full = pages / size, number = piece - starts[low], own_pages = rest ? pages_a_rest(size) : size;
    step.head = item - piece * kv_heads;
    step.piece = rest ? full + number : number;
    step.pieces = full + rest_pieces(length, least_pages);
    step.place = ((rest ? full * size : 0) + number * own_pages) * (PAGE / TOKENS);
    step.first = true;
    step.last = min((length + TOKENS - 1) / TOKENS, step.place + own_pages * (PAGE / TOKENS)) - 1;
    return true;
  }
  __device__ __forceinline__ bool advance() {
    if (step.place < step.last) { step.place++; step.first = false; return true; }
    item += stride;
    return open();
  }
};

extern "C" __global__ void __launch_bounds__(WARPS * 32, 1)
decode_attention(const u16* __restrict__ q,           // bf16 [rows, heads, DIM]
                 const unsigned char* payload,         // E4M3 [2, pages, kv_heads, PAGE, DIM] of the layer
                 const float* scales,                  // [2, pages, kv_heads, PAGE]
                 const int* __restrict__ query_starts, // [sequences + 1]
                 const int* __restrict__ contexts,     // [sequences]
                 const int* __restrict__ tables,       // [holders, table_stride]
                 const int* __restrict__ table_rows,   // [sequences]
                 u16* out,                             // bf16 [rows, heads, DIM]
                 float* partials,                      // [sequences, kv_heads, MAX_PIECES, PARTIAL]
                 i64 num_pages, i64 table_stride, int sequences, int heads, int kv_heads, int least_pages, float scale) {
  extern __shared__ __align__(128) unsigned char ring_memory[];
  __shared__ __align__(8) unsigned long long barriers[WARPS][STAGES];
  __shared__ int lengths[MAX_SEQUENCES];
  __shared__ u16 starts[2 * MAX_SEQUENCES + 1], rows[MAX_SEQUENCES], holders[MAX_SEQUENCES];
  asm volatile("griddepcontrol.launch_dependents;");
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;

  for (int s = threadIdx.x; s < sequences; s += WARPS * 32) {
    int first = query_starts[s];
    lengths[s] = query_starts[s + 1] - first == 1 ? contexts[s] : 0;  // longer queries are another kernel's
    rows[s] = first;
    holders[s] = table_rows[s];
  }
  if (lane < STAGES)
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(&barriers[warp][lane])));
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  __syncthreads();
  if (warp == 0) {  // exclusive sums of the full pieces, then of the rests
    int before = 0;
    for (int base = 0; base < 2 * sequences; base += 32) {
      const int i = base + lane, s = i < sequences ? i : i - sequences;
      int count = 0;
      if (i < 2 * sequences)
        count = i < sequences ? full_pieces(lengths[s], least_pages) : rest_pieces(lengths[s], least_pages);
      int sum = count;
      for (int d = 1; d < 32; d <<= 1) {
        int other = __shfl_up_sync(~0u, sum, d);
        if (lane >= d) sum += other;
      }
      if (i < 2 * sequences) starts[i] = before + sum - count;
      before += __shfl_sync(~0u, sum, 31);
    }
    if (lane == 0) starts[2 * sequences] = before;
  }
  __syncthreads();

  Walk ahead{(int)(blockIdx.x + gridDim.x * warp), (int)(gridDim.x * WARPS), starts[2 * sequences] * kv_heads, kv_heads,
             sequences, least_pages, lengths, starts, {}};
  bool more_ahead = ahead.open();
  Walk walk = ahead;
  bool more = more_ahead;
  unsigned char* ring = ring_memory + warp * (STAGES * STAGE_BYTES);
  int page_ahead = 0;  // its number is looked up a step early: a look-up waits as long as everything that is on its way
  auto look_up = [&] {
    if (more_ahead) page_ahead = tables[holders[ahead.step.sequence] * table_stride + ahead.step.place / (PAGE / TOKENS)];
  };
  auto request_query = [&](int slot, const Step& step) {
    const u16* from = q + ((i64)rows[step.sequence] * heads + step.head * SHARE) * DIM;
    bulk_copy(ring + slot * STAGE_BYTES + STEP_BYTES, from, QUERY_BYTES, &barriers[warp][slot]);
  };
  auto request_step = [&](int slot, const Step& step) {
    i64 k = ((i64)page_ahead * kv_heads + step.head) * (PAGE / TOKENS) + step.place % (PAGE / TOKENS);
    i64 v = k + num_pages * kv_heads * (PAGE / TOKENS);
    unsigned char* to = ring + slot * STAGE_BYTES;
    void* barrier = &barriers[warp][slot];
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)),
                 "r"(STEP_BYTES + (step.first ? QUERY_BYTES : 0)) : "memory");
    bulk_copy(to, payload + k * TILE_BYTES, TILE_BYTES, barrier);
    bulk_copy(to + TILE_BYTES, payload + v * TILE_BYTES, TILE_BYTES, barrier);
    bulk_copy(to + 2 * TILE_BYTES, scales + k * TOKENS, SCALE_BYTES, barrier);
    bulk_copy(to + 2 * TILE_BYTES + SCALE_BYTES, scales + v * TOKENS, SCALE_BYTES, barrier);
  };

  // The row of the newest token is written by the kernel before this one, as the queries are; all others were long ago.
  look_up();
  Step early[STAGES];
  int num_early = 0;
#pragma unroll
  for (int slot = 0; slot < STAGES; slot++) {
    bool complete = more_ahead && num_early == slot && (ahead.step.place + 1) * TOKENS < lengths[ahead.step.sequence];
    if (complete) {
      early[slot] = ahead.step;
      if (lane == 0) request_step(slot, ahead.step);
      more_ahead = ahead.advance();
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
        request_step(slot, ahead.step);
        if (ahead.step.first) request_query(slot, ahead.step);
      }
      more_ahead = ahead.advance();
      look_up();
    }
  }

  u32 query[16];
  float o[8][4], maximum = NEVER, sum = 0.f, factor = 0.f;
  int slot = 0;
  u32 parity = 0;
  while (more) {
    const Step& at = walk.step;
    wait_for(&barriers[warp][slot], parity);
    unsigned char* tile = ring + slot * STAGE_BYTES;
    if (at.first) {  // a new piece: its query rows, scaled by a power of two so that half precision holds them
      float row[32], largest = 0.f;
      const unsigned char* from = tile + STEP_BYTES + min(g, SHARE - 1) * ROW_BYTES;
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
#pragma unroll
      for (int j = 0; j < 8; j++) o[j][0] = o[j][1] = o[j][2] = o[j][3] = 0.f;
      maximum = NEVER;
      sum = 0.f;
    }
    const unsigned char *keys = tile, *values = tile + TILE_BYTES;
    const float2* key_scales = (const float2*)(tile + 2 * TILE_BYTES);
    const float2* value_scales = (const float2*)(tile + 2 * TILE_BYTES + SCALE_BYTES);
    const int left = lengths[at.sequence] - at.place * TOKENS;
    if (left < TOKENS) {  // beyond the context anything may lie, NaN too
      for (int i = left * (DIM / 16) + lane; i < TOKENS * (DIM / 16); i += 32) ((uint4*)values)[i] = make_uint4(0, 0, 0, 0);
      asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
      __syncwarp();
    }

    float s[TOKENS / 8][2], with_value[TOKENS / 8][2], highest = NEVER;
#pragma unroll
    for (int n = 0; n < TOKENS / 8; n++) {
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
      bool first = n * 8 + 2 * t < left, second = n * 8 + 2 * t + 1 < left;
      s[n][0] = first ? c[0] * (ks.x * factor) : NEVER;
      s[n][1] = second ? c[1] * (ks.y * factor) : NEVER;
      with_value[n][0] = first ? s[n][0] + __log2f(vs.x) : NEVER;
      with_value[n][1] = second ? s[n][1] + __log2f(vs.y) : NEVER;
      highest = fmaxf(highest, fmaxf(with_value[n][0], with_value[n][1]));
    }
    highest = fmaxf(highest, __shfl_xor_sync(~0u, highest, 1));
    highest = fmaxf(highest, __shfl_xor_sync(~0u, highest, 2));
    highest = fmaxf(highest, maximum);
    float shrink = exp2f(maximum - highest), added = 0.f;
    maximum = highest;
    u32 weights[TOKENS / 8];
#pragma unroll
    for (int n = 0; n < TOKENS / 8; n++) {
      added += exp2f(s[n][0] - highest) + exp2f(s[n][1] - highest);
      weights[n] = pack(exp2f(with_value[n][0] - highest), exp2f(with_value[n][1] - highest));
    }
    added += __shfl_xor_sync(~0u, added, 1);
    added += __shfl_xor_sync(~0u, added, 2);
    sum = sum * shrink + added;
    float even = __shfl_sync(~0u, shrink, 8 * t), odd = __shfl_sync(~0u, shrink, 8 * t + 4);  // of columns 2t, 2t + 1
#pragma unroll
    for (int j = 0; j < 8; j++) { o[j][0] *= even; o[j][1] *= odd; o[j][2] *= even; o[j][3] *= odd; }
#pragma unroll
    for (int c = 0; c < TOKENS / 16; c++) {
      const unsigned char* from = values + (c * 16 + 2 * t) * DIM + 16 * g;
      uint4 v0 = *(const uint4*)from, v1 = *(const uint4*)(from + DIM);
      uint4 v8 = *(const uint4*)(from + 8 * DIM), v9 = *(const uint4*)(from + 9 * DIM);
#pragma unroll
      for (int j = 0; j < 8; j++) {
        u32 x0 = halves(pick(v0, j >> 1), j & 1), x1 = halves(pick(v1, j >> 1), j & 1);
        u32 x8 = halves(pick(v8, j >> 1), j & 1), x9 = halves(pick(v9, j >> 1), j & 1);
        multiply(o[j], __byte_perm(x0, x1, 0x5410), __byte_perm(x0, x1, 0x7632), __byte_perm(x8, x9, 0x5410),
                 __byte_perm(x8, x9, 0x7632), weights[2 * c], weights[2 * c + 1]);
      }
    }
    __syncwarp();
    if (more_ahead) {
      if (lane == 0) {
        request_step(slot, ahead.step);
        if (ahead.step.first) request_query(slot, ahead.step);
      }
      more_ahead = ahead.advance();
      look_up();
    }
    if (++slot == STAGES) { slot = 0; parity ^= 1; }

    if (at.place == at.last) {  // o[j][0..1]: column 16 g + 2 j of rows 2 t, 2 t + 1; o[j][2..3]: the column beside it
      if (at.pieces == 1) {
        u16* to = out + ((i64)rows[at.sequence] * heads + at.head * SHARE) * DIM;
        float even_down = 1.f / __shfl_sync(~0u, sum, 8 * t), odd_down = 1.f / __shfl_sync(~0u, sum, 8 * t + 4);
#pragma unroll
        for (int j = 0; j < 8; j++) {
          u32* pair = (u32*)(to + (2 * t) * DIM + 16 * g + 2 * j);
          if (2 * t < SHARE) pair[0] = narrow2(o[j][0] * even_down, o[j][2] * even_down);
          if (2 * t + 1 < SHARE) pair[DIM / 2] = narrow2(o[j][1] * odd_down, o[j][3] * odd_down);
        }
      } else {
        float* own = partials + (((i64)at.sequence * kv_heads + at.head) * MAX_PIECES + at.piece) * PARTIAL;
#pragma unroll
        for (int j = 0; j < 8; j++) {
          float* pair = own + (2 * t) * DIM + 16 * g + 2 * j;
          if (2 * t < SHARE) __stcg((float2*)pair, make_float2(o[j][0], o[j][2]));
          if (2 * t + 1 < SHARE) __stcg((float2*)(pair + DIM), make_float2(o[j][1], o[j][3]));
        }
        if (t == 0 && g < SHARE) __stcg((float2*)(own + SHARE * DIM + 2 * g), make_float2(maximum, sum));
      }
    }
    more = walk.advance();
  }
}

// Adds the pieces of each (sequence, KV head), in order: a block each, a warp a query head.
extern "C" __global__ void __launch_bounds__(ADDERS * 32)
combine_pieces(const int* __restrict__ query_starts, const int* __restrict__ contexts, const float* partials, u16* out,
               int heads, int kv_heads, int least_pages) {
  asm volatile("griddepcontrol.launch_dependents;");
  const int sequence = blockIdx.x / kv_heads, head = blockIdx.x % kv_heads;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const int row = query_starts[sequence], length = contexts[sequence];
  const int pieces = full_pieces(length, least_pages) + rest_pieces(length, least_pages);
  const bool ours = query_starts[sequence + 1] - row == 1 && pieces > 1;
  asm volatile("griddepcontrol.wait;" ::: "memory");
  if (!ours) return;
  const float* all = partials + (i64)blockIdx.x * (MAX_PIECES * PARTIAL);
  for (int r = warp; r < SHARE; r += ADDERS) {
    float2 own = make_float2(NEVER, 0.f);
    if (lane < pieces) own = __ldcg((const float2*)(all + lane * PARTIAL + SHARE * DIM + 2 * r));
    float top = own.x, total = 0.f;
    for (int d = 16; d; d >>= 1) top = fmaxf(top, __shfl_xor_sync(~0u, top, d));
    const float weight = exp2f(own.x - top);
    float4 acc = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll 8
    for (int p = 0; p < pieces; p++) {
      float w = __shfl_sync(~0u, weight, p);
      float4 v = __ldcg((const float4*)(all + p * PARTIAL + r * DIM + 4 * lane));
      total += w * __shfl_sync(~0u, own.y, p);
      acc.x += w * v.x; acc.y += w * v.y; acc.z += w * v.z; acc.w += w * v.w;
    }
    const float down = 1.f / total;
    u16* to = out + ((i64)row * heads + head * SHARE + r) * DIM + 4 * lane;
    *(uint2*)to = make_uint2(narrow2(acc.x * down, acc.y * down), narrow2(acc.z * down, acc.w * down));
  }
}
