// Attention of one query row a sequence over FP8 pages of 64 tokens, heads of 128 (split over the context).
//
// A warp is a worker of its own: it walks pieces of contexts, page after page, through a ring of shared memory that bulk
// copies fill ahead of it, across the borders of pieces. That keeps some 200 KB a multiprocessor in flight, which is
// what the memory's bandwidth asks for. Products are m16n8k16 in half precision: S = Q K^T with the query heads of one
// KV head as rows, O^T = V^T P^T, whose right operand is S's accumulator as it lies. Both sums run over an order of
// head_dim and tokens that lets a lane take 16 bytes of shared memory at a time. E4M3 becomes half precision by one
// instruction a pair; K's scale multiplies the logits; V's logarithm is added to them, so that no factor exceeds 1.

typedef unsigned int u32;
typedef unsigned short u16;
typedef long long i64;

constexpr int PAGE = 64, DIM = 128, WARPS = 4, STAGES = 3, MAX_SHARE = 8, MAX_PIECES = 32, MAX_SEQUENCES = 256;
constexpr int TILE_BYTES = PAGE * DIM, SCALE_BYTES = PAGE * 4, STAGE_BYTES = 2 * (TILE_BYTES + SCALE_BYTES);
constexpr int PARTIAL = MAX_SHARE * (DIM + 2);  // floats of one piece's result: rows, then (maximum, sum) of each
constexpr float NEVER = -1e30f;

struct Step {  // one page of one piece of one sequence and KV head
  int sequence, head, piece, pieces, page, last_page;
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

// Pieces depend on a sequence's own length alone, so that its sums do not depend on the batch.
__device__ __forceinline__ int pages_a_piece(int pages, int least) {
  int needed = (pages + MAX_PIECES - 1) / MAX_PIECES;
  return needed > least ? needed : least;
}

struct Walk {  // the steps of one warp, in order: items item, item + stride, ...; an item is (piece, KV head)
  int item, stride, items, kv_heads, sequences, least_pages;
  const int *contexts, *starts;  // starts[s]: pieces of all sequences before s
  Step step;

  __device__ __forceinline__ bool open() {  // find the item's place; false when there is none left
    if (item >= items) return false;
    int piece = item / kv_heads, low = 0, high = sequences;
    while (high - low > 1) {
      int middle = (low + high) >> 1;
      if (starts[middle] <= piece) low = middle; else high = middle;
    }
    int pages = (contexts[low] + PAGE - 1) / PAGE, size = pages_a_piece(pages, least_pages);
    step.sequence = low;
    step.head = item - piece * kv_heads;
    step.piece = piece - starts[low];
    step.pieces = starts[low + 1] - starts[low];
    step.page = step.piece * size;
    step.last_page = min(pages, step.page + size) - 1;
    return true;
  }
  __device__ __forceinline__ bool advance() {
    if (step.page < step.last_page) { step.page++; return true; }
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
                 int* arrivals,                        // [sequences, kv_heads], zero before and after
                 i64 num_pages, i64 table_stride, int sequences, int heads, int kv_heads, int least_pages, float scale) {
  extern __shared__ __align__(128) unsigned char ring_memory[];
  __shared__ __align__(8) unsigned long long barriers[WARPS][STAGES];
  __shared__ int starts[MAX_SEQUENCES + 1], lengths[MAX_SEQUENCES], rows[MAX_SEQUENCES];
  asm volatile("griddepcontrol.launch_dependents;");
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3, share = heads / kv_heads;

  for (int s = threadIdx.x; s < sequences; s += WARPS * 32) {
    int first = query_starts[s];
    lengths[s] = query_starts[s + 1] - first == 1 ? contexts[s] : 0;  // longer queries are another kernel's
    rows[s] = first;
  }
  if (lane < STAGES)
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(&barriers[warp][lane])));
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  __syncthreads();
  if (warp == 0) {  // exclusive sums of the pieces
    int before = 0;
    for (int base = 0; base < sequences; base += 32) {
      int s = base + lane, pages = s < sequences ? (lengths[s] + PAGE - 1) / PAGE : 0;
      int count = pages ? (pages + pages_a_piece(pages, least_pages) - 1) / pages_a_piece(pages, least_pages) : 0, sum = count;
      for (int d = 1; d < 32; d <<= 1) {
        int other = __shfl_up_sync(~0u, sum, d);
        if (lane >= d) sum += other;
      }
      if (s < sequences) starts[s] = before + sum - count;
      before += __shfl_sync(~0u, sum, 31);
    }
    if (lane == 0) starts[sequences] = before;
  }
  __syncthreads();

  Walk ahead{(int)(blockIdx.x + gridDim.x * warp), (int)(gridDim.x * WARPS), starts[sequences] * kv_heads, kv_heads,
             sequences, least_pages, lengths, starts, {}};
  bool more_ahead = ahead.open();
  Walk walk = ahead;
  bool more = more_ahead, waited = false;
  unsigned char* ring = ring_memory + warp * (STAGES * STAGE_BYTES);

  auto request = [&](int slot) {  // the next page on its way into a slot of the ring; one lane asks
    if (!more_ahead) return;
    // The page of the newest token is written by the kernel before this one, all others long before it.
    if (!waited && (ahead.step.page + 1) * PAGE >= lengths[ahead.step.sequence]) {
      asm volatile("griddepcontrol.wait;" ::: "memory");
      waited = true;
    }
    if (lane == 0) {
      i64 page = tables[table_rows[ahead.step.sequence] * table_stride + ahead.step.page];
      i64 k = page * kv_heads + ahead.step.head, v = k + num_pages * kv_heads;
      unsigned char* to = ring + slot * STAGE_BYTES;
      void* barrier = &barriers[warp][slot];
      asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(STAGE_BYTES) : "memory");
      bulk_copy(to, payload + k * TILE_BYTES, TILE_BYTES, barrier);
      bulk_copy(to + TILE_BYTES, payload + v * TILE_BYTES, TILE_BYTES, barrier);
      bulk_copy(to + 2 * TILE_BYTES, scales + k * PAGE, SCALE_BYTES, barrier);
      bulk_copy(to + 2 * TILE_BYTES + SCALE_BYTES, scales + v * PAGE, SCALE_BYTES, barrier);
    }
    more_ahead = ahead.advance();
  };
  for (int slot = 0; slot < STAGES; slot++) request(slot);
  if (!waited) asm volatile("griddepcontrol.wait;" ::: "memory");

  u32 query[16];
  float o[8][4], maximum = NEVER, sum = 0.f, factor = 0.f;
  bool fresh = true;
  int slot = 0;
  u32 parity = 0;
  while (more) {
    const Step& at = walk.step;
    if (fresh) {  // a new piece: its query rows, scaled by a power of two so that half precision holds them
      float row[32], largest = 0.f;
      const u16* from = q + ((i64)rows[at.sequence] * heads + at.head * share + min(g, share - 1)) * DIM;
#pragma unroll
      for (int i = 0; i < 2; i++) {
        uint4 part[2] = {*(const uint4*)(from + 64 * i + 16 * t), *(const uint4*)(from + 64 * i + 16 * t + 8)};
#pragma unroll
        for (int x = 0; x < 8; x++) {
          u32 two = pick(part[x >> 2], x & 3);
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
    wait_for(&barriers[warp][slot], parity);
    unsigned char* tile = ring + slot * STAGE_BYTES;
    const unsigned char *keys = tile, *values = tile + TILE_BYTES;
    const float2* key_scales = (const float2*)(tile + 2 * TILE_BYTES);
    const float2* value_scales = (const float2*)(tile + 2 * TILE_BYTES + SCALE_BYTES);
    const int left = lengths[at.sequence] - at.page * PAGE;
    if (left < PAGE) {  // beyond the context anything may lie, NaN too
      for (int i = left * (DIM / 16) + lane; i < PAGE * (DIM / 16); i += 32) ((uint4*)values)[i] = make_uint4(0, 0, 0, 0);
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
    u32 weights[8];
#pragma unroll
    for (int n = 0; n < 8; n++) {
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
    for (int c = 0; c < 4; c++) {
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
    request(slot);
    if (++slot == STAGES) { slot = 0; parity ^= 1; }

    fresh = at.page == at.last_page;
    if (fresh) {  // o[j][0..1] are columns 16 g + 2 j of rows 2 t, 2 t + 1; o[j][2..3] the columns beside them
      i64 pair = (i64)at.sequence * kv_heads + at.head;
      u16* to = out + ((i64)rows[at.sequence] * heads + at.head * share) * DIM;
      if (at.pieces == 1) {
        float even_sum = __shfl_sync(~0u, sum, 8 * t), odd_sum = __shfl_sync(~0u, sum, 8 * t + 4);
        float even_down = 1.f / even_sum, odd_down = 1.f / odd_sum;
#pragma unroll
        for (int j = 0; j < 8; j++) {
          if (2 * t < share) *(u32*)(to + (2 * t) * DIM + 16 * g + 2 * j) = narrow2(o[j][0] * even_down, o[j][2] * even_down);
          if (2 * t + 1 < share)
            *(u32*)(to + (2 * t + 1) * DIM + 16 * g + 2 * j) = narrow2(o[j][1] * odd_down, o[j][3] * odd_down);
        }
      } else {
        float* all = partials + pair * (MAX_PIECES * PARTIAL);
        float* own = all + at.piece * PARTIAL;
#pragma unroll
        for (int j = 0; j < 8; j++) {
          if (2 * t < share) __stcg((float2*)(own + (2 * t) * DIM + 16 * g + 2 * j), make_float2(o[j][0], o[j][2]));
          if (2 * t + 1 < share) __stcg((float2*)(own + (2 * t + 1) * DIM + 16 * g + 2 * j), make_float2(o[j][1], o[j][3]));
        }
        if (t == 0 && g < share) __stcg((float2*)(own + MAX_SHARE * DIM + 2 * g), make_float2(maximum, sum));
        __threadfence();
        __syncwarp();
        int arrived = 0;
        if (lane == 0) arrived = atomicAdd(arrivals + pair, 1);
        if (__shfl_sync(~0u, arrived, 0) == at.pieces - 1) {  // the last to come adds all pieces, in order
          __threadfence();
          if (lane == 0) arrivals[pair] = 0;
          for (int r = 0; r < share; r++) {
            float top = NEVER, total = 0.f;
            float2 mine = lane < at.pieces ? __ldcg((const float2*)(all + lane * PARTIAL + MAX_SHARE * DIM + 2 * r)) : make_float2(NEVER, 0.f);
            top = mine.x;
            for (int d = 16; d; d >>= 1) top = fmaxf(top, __shfl_xor_sync(~0u, top, d));
            float weight = exp2f(mine.x - top);
            float4 acc = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll 8
            for (int p = 0; p < at.pieces; p++) {
              float w = __shfl_sync(~0u, weight, p), l = __shfl_sync(~0u, mine.y, p);
              float4 v = __ldcg((const float4*)(all + p * PARTIAL + r * DIM + 4 * lane));
              total += w * l;
              acc.x += w * v.x; acc.y += w * v.y; acc.z += w * v.z; acc.w += w * v.w;
            }
            float down = 1.f / total;
            *(uint2*)(to + r * DIM + 4 * lane) = make_uint2(narrow2(acc.x * down, acc.y * down), narrow2(acc.z * down, acc.w * down));
          }
        }
      }
    }
    more = walk.advance();
  }
}
