// Attention of a packed batch over paged keys and values, and writing into the pages.
//
// Contract: a query's result is a function of its own row alone, the same bits in any batch, in prompt, chunk or decode,
// with any number of threads. Scores and sums are float32. Slots past a row's length are never read into a result.
//
// One layer's cache, block by block (keys transposed: the slots of a block then fill one register, and a score
// needs no sum across lanes):
//
//            block 0                                                   block 1 ...
//   keys     [ head 0: head_dim x block_size ][ head 1 ] ...           [ head 0 ] ...
//   values   [ head 0: block_size x head_dim ][ head 1 ] ...           [ head 0 ] ...
#include "vector_lanes.h"

#include <algorithm>
#include <vector>

namespace {

using namespace lanes;

constexpr int kGroup = 4;        // queries that share one load of a key or value
constexpr int kStrip = 4;        // blocks that share a step of the softmax
constexpr int kTileQueries = 32;  // queries (tokens x heads of one KV head) that share a block while it is in L1

// What stays for a layer's life; paged_attention.py has the same structure.
struct Layer {
  void *keys, *values;
  const void* rope;  // [max_len, 2, head_dim] of (cos, cos) and (-sin, sin); null: nothing is to be rotated
  int64_t is_bf16, num_heads, num_kv_heads, head_dim, block_size;
  int64_t window;  // tokens that a query sees, its own counted
  double scale;

  int64_t queries_per_key() const { return num_heads / num_kv_heads; }
  int64_t head() const { return head_dim * block_size; }
  // Where the numbers of one head in one block begin.
  int64_t at(int64_t block, int64_t kv_head) const { return (block * num_kv_heads + kv_head) * head(); }
};

// What stays for a step, the same for all layers of a group.
struct Batch {
  const int64_t *slot_mapping, *positions;
  const int32_t *block_table, *seq_lens, *cu_seqlens_q;
  int64_t table_stride, num_rows, num_tokens;
  int64_t longest;  // rows of more queries are left out; their output is not touched
  int64_t threads;
};

// A token's head, converted, and rotated if that is asked for; N divides half of its numbers, or is 1.
template <class T, int N>
void read_head(const T* from, const Layer& layer, int64_t position, float* to) {
  int64_t d = layer.head_dim, half = d / 2;
  if (!layer.rope) {
    for (int64_t i = 0; i < d; i += N) store<N>(to + i, load<N>(from + i));
    return;
  }
  const T *cos = (const T*)layer.rope + position * 2 * d, *sin = cos + d;
  for (int64_t i = 0; i < half; i += N) {
    Vec<N> low = load<N>(from + i), high = load<N>(from + i + half);
    store<N>(to + i, low * load<N>(cos + i) + high * load<N>(sin + i));
    store<N>(to + i + half, high * load<N>(cos + i + half) + low * load<N>(sin + i + half));
  }
}

template <class T>
void write_token(const T* key, const T* value, const Layer& layer, int64_t slot, int64_t position) {
  thread_local lanes::Room<float> head;
  head.resize(layer.head_dim);
  int64_t block = slot / layer.block_size, offset = slot % layer.block_size;
  for (int64_t h = 0; h < layer.num_kv_heads; h++) {
    layer.head_dim % 16 == 0 ? read_head<T, 8>(key + h * layer.head_dim, layer, position, head.data())
                             : read_head<T, 1>(key + h * layer.head_dim, layer, position, head.data());
    T* keys = (T*)layer.keys + layer.at(block, h) + offset;
    for (int64_t i = 0; i < layer.head_dim; i++) put(keys + i * layer.block_size, head[i]);
    T* values = (T*)layer.values + layer.at(block, h) + offset * layer.head_dim;
    std::memcpy(values, value + h * layer.head_dim, layer.head_dim * sizeof(T));
  }
}

template <class T>
void write_all(const Batch& b, const Layer& layer, const T* key, int64_t key_stride, const T* value, int64_t value_stride) {
#pragma omp parallel for num_threads(b.threads) if (b.threads > 1 && b.num_tokens >= 64) schedule(static)
  for (int64_t i = 0; i < b.num_tokens; i++)
    write_token(key + i * key_stride, value + i * value_stride, layer, b.slot_mapping[i], b.positions[i]);
}

// Queries [first, first + count) of one row and the query heads of one KV head.
struct Tile {
  int64_t row, kv_head, first, count, position;
};

struct Scratch {
  lanes::Room<float> query, out, weights, maxima, sums;
};

// Blocks that share a step of the softmax. They begin at a multiple of kStrip, so that a token's numbers do not depend on
// where its tile's window begins. A block that is not there (the null block) is null.
template <class T>
struct Strip {
  int64_t start, count;  // the first slot's position; blocks
  const T *keys[kStrip], *values[kStrip];
};

// Blocks are scattered, so the hardware cannot guess what is read next: the first group of queries to meet a strip's keys
// fetches its values, line by line as it goes, and on its values the next strip's keys. `ahead` is null for the others.

// scores[r][block][slot] = query[r] . key[block][slot] of B blocks; two chains of sums hide the latency of an FMA.
template <class T, int NS, int R, int B>
inline void dot_blocks(const Layer& layer, const float* query, const T* const* keys, const T* const* ahead, float* scores,
                       int64_t stride) {
  int64_t d = layer.head_dim, bs = layer.block_size;
  for (int64_t s = 0; s < bs; s += NS) {
    Vec<NS> even[R][B] = {}, odd[R][B] = {};
    int64_t i = 0;
    for (; i + 1 < d; i += 2)
      for (int j = 0; j < B; j++) {
        Vec<NS> k0 = load<NS>(keys[j] + i * bs + s), k1 = load<NS>(keys[j] + (i + 1) * bs + s);
        if (ahead) {
          __builtin_prefetch(ahead[j] + i * bs + s);
          __builtin_prefetch(ahead[j] + (i + 1) * bs + s);
        }
        for (int r = 0; r < R; r++) {
          even[r][j] += k0 * query[r * d + i];
          odd[r][j] += k1 * query[r * d + i + 1];
        }
      }
    for (; i < d; i++)
      for (int j = 0; j < B; j++)
        for (int r = 0; r < R; r++) even[r][j] += load<NS>(keys[j] + i * bs + s) * query[r * d + i];
    for (int r = 0; r < R; r++)
      for (int j = 0; j < B; j++) store<NS>(scores + r * stride + j * bs + s, even[r][j] + odd[r][j]);
  }
}

// Scores of a whole strip, -inf for blocks that are not there.
template <class T, int NS, int R>
inline void dot_strip(const Layer& layer, const float* query, const Strip<T>& strip, bool is_first, float* scores) {
  constexpr int kPair = R * 4 <= kRegisters / 2 ? 2 : 1;
  int64_t bs = layer.block_size, stride = strip.count * bs;
  for (int64_t j = 0; j < strip.count;) {
    const T* const* ahead = is_first ? strip.values + j : nullptr;
    bool pair = kPair == 2 && j + 1 < strip.count && strip.keys[j] && strip.keys[j + 1];
    if (pair)
      dot_blocks<T, NS, R, kPair>(layer, query, strip.keys + j, ahead, scores + j * bs, stride);
    else if (strip.keys[j])
      dot_blocks<T, NS, R, 1>(layer, query, strip.keys + j, ahead, scores + j * bs, stride);
    else
      for (int r = 0; r < R; r++) std::fill_n(scores + r * stride + j * bs, bs, -__builtin_inff());
    j += pair ? 2 : 1;
  }
}

// out[r] = out[r] * keep[r] + sum over slots [begin, end) of weights[r][slot] * value[slot], columns [at, at + ND * C).
template <class T, int ND, int C, int R>
inline void add_values(const Layer& layer, float* out, const Strip<T>& strip, const T* const* ahead, const float* weights,
                       const float* keep, int64_t begin, int64_t end, int64_t at) {
  int64_t d = layer.head_dim, bs = layer.block_size, stride = strip.count * bs;
  Vec<ND> sums[R][C];
  for (int r = 0; r < R; r++)
    for (int c = 0; c < C; c++) sums[r][c] = load<ND>(out + r * d + at + c * ND) * keep[r];
  for (int64_t j = begin / bs; j * bs < end; j++) {
    if (!strip.values[j]) continue;
    const T* value = strip.values[j] + at;
    const float* w = weights + j * bs;
    for (int64_t s = std::max<int64_t>(begin - j * bs, 0); s < std::min(end - j * bs, bs); s++) {
      Vec<ND> v[C];
      for (int c = 0; c < C; c++) {
        v[c] = load<ND>(value + s * d + c * ND);
        if (ahead) __builtin_prefetch(ahead[j] + s * d + at + c * ND);
      }
      for (int r = 0; r < R; r++)
        for (int c = 0; c < C; c++) sums[r][c] += v[c] * w[r * stride + s];
    }
  }
  for (int r = 0; r < R; r++)
    for (int c = 0; c < C; c++) store<ND>(out + r * d + at + c * ND, sums[r][c]);
}

// R queries against one strip: scores, running softmax (Milakov and Gimelshein, arXiv 1805.02867), values.
template <class T, int NS, int ND, int R>
void step(const Layer& layer, const Tile& tile, int64_t q, const Strip<T>& strip, const Strip<T>& next,
          Scratch& scratch) {
  int64_t d = layer.head_dim, slots = strip.count * layer.block_size;
  float* weights = scratch.weights.data();
  dot_strip<T, NS, R>(layer, scratch.query.data() + q * d, strip, q == 0, weights);
  int64_t begin = slots, end = 0;
  float keep[R];
  for (int r = 0; r < R; r++) {
    int64_t position = tile.position + (q + r) / layer.queries_per_key();
    int64_t low = std::clamp<int64_t>(position - layer.window + 1 - strip.start, 0, slots);
    int64_t high = std::clamp<int64_t>(position + 1 - strip.start, 0, slots);
    float* w = weights + r * slots;
    std::fill(w, w + low, -__builtin_inff());
    std::fill(w + high, w + slots, -__builtin_inff());
    if (low < high) begin = std::min(begin, low), end = std::max(end, high);
    Vec<NS> tops = fill<NS>(scratch.maxima[q + r]);
    for (int64_t s = 0; s < slots; s += NS) {
      Vec<NS> found = load<NS>(w + s);
      tops = found > tops ? found : tops;
    }
    float top = max<NS>(tops);
    keep[r] = exp<1>(fill<1>(scratch.maxima[q + r] - top))[0];
    scratch.maxima[q + r] = top;
    float* sums = scratch.sums.data() + (q + r) * NS;
    Vec<NS> total = load<NS>(sums) * keep[r];
    for (int64_t s = 0; s < slots; s += NS) {
      Vec<NS> e = exp<NS>(load<NS>(w + s) - top);
      store<NS>(w + s, e);
      total += e;
    }
    store<NS>(sums, total);
  }
  if (begin >= end) return;
  float* out = scratch.out.data() + q * d;
  const T* const* ahead = q == 0 ? next.keys : nullptr;
  constexpr int kChunks = kRegisters >= 32 ? 4 : 2;
  int64_t at = 0;
  for (; at + ND * kChunks <= d; at += ND * kChunks)
    add_values<T, ND, kChunks, R>(layer, out, strip, ahead, weights, keep, begin, end, at);
  for (; at < d; at += ND) add_values<T, ND, 1, R>(layer, out, strip, ahead, weights, keep, begin, end, at);
}

// Blocks [first, last] of a tile's row that lie in the strip of block `first`.
template <class T>
Strip<T> strip_at(const Batch& b, const Layer& layer, const Tile& tile, int64_t first, int64_t last) {
  Strip<T> strip{};
  const int32_t* table = b.block_table + tile.row * b.table_stride;
  int64_t begin = first / kStrip * kStrip;
  strip.start = begin * layer.block_size;
  strip.count = std::min<int64_t>(kStrip, last + 1 - begin);
  for (int64_t j = first - begin; j < strip.count; j++) {
    if (table[begin + j] == 0) continue;  // nothing real is in the null block
    int64_t at = layer.at(table[begin + j], tile.kv_head);
    strip.keys[j] = (const T*)layer.keys + at;
    strip.values[j] = (const T*)layer.values + at;
  }
  return strip;
}

template <class T, int NS, int ND>
void attend_tile(const Batch& b, const Layer& layer, const Tile& tile, const T* query, int64_t query_stride, T* out,
                 Scratch& scratch) {
  int64_t d = layer.head_dim, bs = layer.block_size, heads = layer.queries_per_key(), queries = tile.count * heads;
  scratch.query.resize(queries * d);
  scratch.out.assign(queries * d, 0.f);
  scratch.weights.resize(kGroup * kStrip * bs);
  scratch.maxima.assign(queries, -1e30f);  // finite, so that a wholly masked strip gives exp(-inf), not NaN
  scratch.sums.assign(queries * NS, 0.f);
  constexpr int kHalf = ND > 1 ? ND / 2 : 1;  // ND divides the head, so this divides its half
  int64_t last = (tile.position + tile.count - 1) / bs;
  int64_t first = std::max<int64_t>(0, tile.position - layer.window + 1) / bs;
  Strip<T> strip = strip_at<T>(b, layer, tile, first, last);
  for (int64_t q = 0; q < queries; q++) {
    int64_t token = tile.first + q / heads, head = tile.kv_head * heads + q % heads;
    float* to = scratch.query.data() + q * d;
    read_head<T, kHalf>(query + token * query_stride + head * d, layer, b.positions[token], to);
    for (int64_t i = 0; i < d; i += ND) store<ND>(to + i, load<ND>(to + i) * (float)layer.scale);
  }
  while (first <= last) {
    first = first / kStrip * kStrip + kStrip;
    Strip<T> next = first <= last ? strip_at<T>(b, layer, tile, first, last) : Strip<T>{};
    for (int64_t q = 0; q < queries; q += kGroup) switch (std::min<int64_t>(kGroup, queries - q)) {
        case 1: step<T, NS, ND, 1>(layer, tile, q, strip, next, scratch); break;
        case 2: step<T, NS, ND, 2>(layer, tile, q, strip, next, scratch); break;
        case 3: step<T, NS, ND, 3>(layer, tile, q, strip, next, scratch); break;
        case 4: step<T, NS, ND, 4>(layer, tile, q, strip, next, scratch); break;
      }
    strip = next;
  }
  for (int64_t q = 0; q < queries; q++) {
    int64_t token = tile.first + q / heads, head = tile.kv_head * heads + q % heads;
    T* to = out + (token * layer.num_heads + head) * d;
    float total = sum<NS>(load<NS>(scratch.sums.data() + q * NS)), scale = total == 0.f ? 0.f : 1.f / total;
    for (int64_t i = 0; i < d; i += ND) store<ND>(to + i, load<ND>(scratch.out.data() + q * d + i) * scale);
  }
}

template <class T, int NS, int ND>
void attend_all(const Batch& b, const Layer& layer, const T* query, int64_t query_stride, T* out) {
  int64_t tall = std::max<int64_t>(1, kTileQueries / layer.queries_per_key()), width = layer.num_heads * layer.head_dim;
  std::vector<Tile> tiles;
  for (int64_t row = 0; row < b.num_rows; row++) {
    int64_t begin = b.cu_seqlens_q[row], end = b.cu_seqlens_q[row + 1];
    if (end - begin > b.longest) continue;
    int64_t shift = b.seq_lens[row] - end;          // position of a token less its index
    int64_t real = std::clamp(-shift, begin, end);  // tokens before it have no position: padding
    std::memset(out + begin * width, 0, (real - begin) * width * sizeof(T));
    for (int64_t first = real; first < end; first += tall)
      for (int64_t h = 0; h < layer.num_kv_heads; h++)
        tiles.push_back({row, h, first, std::min(tall, end - first), first + shift});
  }
  int64_t rest = b.cu_seqlens_q[b.num_rows];
  std::memset(out + rest * width, 0, (b.num_tokens - rest) * width * sizeof(T));
#pragma omp parallel num_threads(b.threads) if (b.threads > 1 && tiles.size() > 1)
  {
    thread_local Scratch scratch;
#pragma omp for schedule(dynamic)
    for (size_t i = 0; i < tiles.size(); i++) attend_tile<T, NS, ND>(b, layer, tiles[i], query, query_stride, out, scratch);
  }
}

// Lanes must divide both sizes: a register's width, or 8, or one at a time for odd shapes.
template <class T>
void attend_any(const Batch& b, const Layer& layer, const void* query, int64_t query_stride, void* out) {
  auto fits = [&](int n) { return layer.block_size % n == 0 && layer.head_dim % n == 0; };
  auto* attend_as = fits(kWidth) ? attend_all<T, kWidth, kWidth> : fits(8) ? attend_all<T, 8, 8> : attend_all<T, 1, 1>;
  attend_as(b, layer, (const T*)query, query_stride, (T*)out);
}

}  // namespace

extern "C" {

// key, value: [num_tokens, num_kv_heads, head_dim], tokens key_stride and value_stride numbers apart.
void write_kv(const Batch* b, const Layer* layer, const void* key, int64_t key_stride, const void* value,
              int64_t value_stride) {
  if (layer->is_bf16)
    write_all(*b, *layer, (const bf16*)key, key_stride, (const bf16*)value, value_stride);
  else
    write_all(*b, *layer, (const float*)key, key_stride, (const float*)value, value_stride);
}

// query: [num_tokens, num_heads, head_dim], tokens query_stride numbers apart; out: the same shape, contiguous.
void attend(const Batch* b, const Layer* layer, const void* query, int64_t query_stride, void* out) {
  if (layer->is_bf16)
    attend_any<bf16>(*b, *layer, query, query_stride, out);
  else
    attend_any<float>(*b, *layer, query, query_stride, out);
}

}  // extern "C"
