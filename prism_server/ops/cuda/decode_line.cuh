// How the pages of a batch are shared out among workers (the warps of a grid): a line, cut into ranges of equal length.

typedef unsigned long long u64;

constexpr int PAGE = 64;
constexpr int PARTS = 4, MAX_PARTS = 128;         // parts of a piece, of a context
constexpr int SLOTS = 2 + 3 + MAX_PARTS / PARTS;  // results that a worker may leave

// Where the parts lie. A context of W pages takes a multiple of its part's pages of the line, for each KV head.
__device__ __forceinline__ int pages_of(int length) { return (length + PAGE - 1) / PAGE; }
__device__ __forceinline__ int part_pages(int pages, int least) { return max(least, (pages + MAX_PARTS - 1) / MAX_PARTS); }
__device__ __forceinline__ int parts_of(int pages, int part) { return (pages + part - 1) / part; }
__device__ __forceinline__ int line_pages(int length, int least) {
  int pages = pages_of(length), part = part_pages(pages, least);
  return parts_of(pages, part) * part;
}
__device__ __forceinline__ int range_begin(int worker, int workers, int line) { return (int)((u64)worker * line / workers); }
__device__ __forceinline__ int worker_of(int place, int workers, int line) {  // the last whose range begins there or before
  return (int)((((u64)place + 1) * workers - 1) / line);
}

// What a warp leaves for `combine_parts`. Of the sequence with which its range ends: all complete pieces as one (slot
// LEFT_WHOLE), and the beginning of the next (LEFT_BEGUN). Of the one in whose midst it begins: parts up to the next
// piece one by one, then pieces, the last of which may be begun only (LEFT_FIRST and following).
constexpr int LEFT_WHOLE = 0, LEFT_BEGUN = 1, LEFT_FIRST = 2;

struct Step {  // one page; a sequence's first one brings the query
  int sequence, head, part, parts, part_pages, page, last_page;
  bool first, fresh;  // of a sequence and head in this range; of a part
};

struct Walk {  // the pages of one warp, in order
  int place, end, kv_heads, sequences, least;  // place in the line: of the part that `step` is in
  const int *lengths, *starts;  // starts[s]: pages in the line before sequence s, for one head
  Step step;

  __device__ __forceinline__ bool open() {  // the first part that begins at `place` or behind it
    while (place < end) {
      int low = 0, high = sequences;
      while (high - low > 1) {
        int middle = (low + high) >> 1;
        if (starts[middle] * kv_heads <= place) low = middle; else high = middle;
      }
      const int pages = pages_of(lengths[low]), part = part_pages(pages, least), parts = parts_of(pages, part);
      const int within = place - starts[low] * kv_heads, head = within / (parts * part);
      const int number = (within - head * parts * part + part - 1) / part;
      place = starts[low] * kv_heads + (head * parts + number) * part;
      if (number < parts) {
        step = Step{low, head, number, parts, part, number * part, min(pages, (number + 1) * part) - 1, true, true};
        break;
      }
    }
    return place < end;
  }
  __device__ __forceinline__ bool ends_sequence() const { return step.part == step.parts - 1; }
  __device__ __forceinline__ bool ends_range() const { return place + step.part_pages >= end; }
  __device__ __forceinline__ bool advance() {
    step.first = step.fresh = false;
    if (step.page < step.last_page) { step.page++; return true; }
    place += step.part_pages;
    if (place >= end) return false;
    if (ends_sequence()) return open();
    step.part++;
    step.page++;
    step.last_page = min(pages_of(lengths[step.sequence]), (step.part + 1) * step.part_pages) - 1;
    step.fresh = true;
    return true;
  }
};
