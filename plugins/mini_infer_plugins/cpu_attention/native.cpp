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

// A token's heads, converted, and rotated if that is asked for.
template <class T>
void read_head(const T* from, const Layer& layer, int64_t position, float* to) {
  int64_t d = layer.head_dim, half = d / 2;
  if (!layer.rope) {
    for (int64_t i = 0; i < d; i++) to[i] = get(from + i);
    return;
  }
  const T *cos = (const T*)layer.rope + position * 2 * d, *sin = cos + d;
  for (int64_t i = 0; i < half; i++) {
    float low = get(from + i), high = get(from + i + half);
    to[i] = low * get(cos + i) + high * get(sin + i);
    to[i + half] = high * get(cos + i + half) + low * get(sin + i + half);
  }
}

template <class T>
void write_token(const T* key, const T* value, const Layer& layer, int64_t slot, int64_t position) {
  thread_local std::vector<float> head;
  head.resize(layer.head_dim);
  int64_t block = slot / layer.block_size, offset = slot % layer.block_size;
  for (int64_t h = 0; h < layer.num_kv_heads; h++) {
    read_head(key + h * layer.head_dim, layer, position, head.data());
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
  std::vector<float> query, out, weights, maxima, sums;
};

// scores[r][slot] = query[r] . key[slot] over the whole block; two chains of sums hide the latency of an FMA.
template <class T, int NS, int R>
inline void dot_block(const float* query, const T* key, const Layer& layer, float* scores) {
  int64_t d = layer.head_dim, bs = layer.block_size;
  for (int64_t s = 0; s < bs; s += NS) {
    Vec<NS> even[R] = {}, odd[R] = {};
    int64_t i = 0;
    for (; i + 1 < d; i += 2) {
      Vec<NS> k0 = load<NS>(key + i * bs + s), k1 = load<NS>(key + (i + 1) * bs + s);
      for (int r = 0; r < R; r++) {
        even[r] += k0 * query[r * d + i];
        odd[r] += k1 * query[r * d + i + 1];
      }
    }
    for (; i < d; i++) {
      Vec<NS> k0 = load<NS>(key + i * bs + s);
      for (int r = 0; r < R; r++) even[r] += k0 * query[r * d + i];
    }
    for (int r = 0; r < R; r++) store<NS>(scores + r * bs + s, even[r] + odd[r]);
  }
}

// out[r] = out[r] * keep[r] + sum over slots [begin, end) of weights[r][slot] * value[slot], columns [at, at + ND * C).
template <class T, int ND, int C, int R>
inline void add_values(float* out, const T* value, const Layer& layer, const float* weights, const float* keep, int64_t begin,
                       int64_t end, int64_t at) {
  int64_t d = layer.head_dim;
  Vec<ND> sums[R][C];
  for (int r = 0; r < R; r++)
    for (int j = 0; j < C; j++) sums[r][j] = load<ND>(out + r * d + at + j * ND) * keep[r];
  for (int64_t s = begin; s < end; s++) {
    Vec<ND> v[C];
    for (int j = 0; j < C; j++) v[j] = load<ND>(value + s * d + at + j * ND);
    for (int r = 0; r < R; r++)
      for (int j = 0; j < C; j++) sums[r][j] += v[j] * weights[r * layer.block_size + s];
  }
  for (int r = 0; r < R; r++)
    for (int j = 0; j < C; j++) store<ND>(out + r * d + at + j * ND, sums[r][j]);
}

// R queries against one block: scores, running softmax (Milakov and Gimelshein, arXiv 1805.02867), values.
template <class T, int NS, int ND, int R>
void step(const Layer& layer, const Tile& tile, int64_t q, int64_t block_start, const T* key, const T* value,
          Scratch& scratch) {
  int64_t d = layer.head_dim, bs = layer.block_size;
  float* weights = scratch.weights.data();
  float keep[R];
  dot_block<T, NS, R>(scratch.query.data() + q * d, key, layer, weights);
  int64_t begin = bs, end = 0;
  for (int r = 0; r < R; r++) {
    int64_t position = tile.position + (q + r) / layer.queries_per_key();
    int64_t low = std::clamp<int64_t>(position - layer.window + 1 - block_start, 0, bs);
    int64_t high = std::clamp<int64_t>(position + 1 - block_start, 0, bs);
    float* w = weights + r * bs;
    std::fill(w, w + low, -__builtin_inff());
    std::fill(w + high, w + bs, -__builtin_inff());
    if (low < high) begin = std::min(begin, low), end = std::max(end, high);
    float top = scratch.maxima[q + r];
    for (int64_t s = 0; s < bs; s += NS) top = std::max(top, max<NS>(load<NS>(w + s)));
    keep[r] = exp<1>(fill<1>(scratch.maxima[q + r] - top))[0];
    scratch.maxima[q + r] = top;
    float* sums = scratch.sums.data() + (q + r) * NS;
    Vec<NS> total = load<NS>(sums) * keep[r];
    for (int64_t s = 0; s < bs; s += NS) {
      Vec<NS> e = exp<NS>(load<NS>(w + s) - top);
      store<NS>(w + s, e);
      total += e;
    }
    store<NS>(sums, total);
  }
  float* out = scratch.out.data() + q * d;
  constexpr int kChunks = kRegisters >= 32 ? 4 : 2;
  int64_t at = 0;
  for (; at + ND * kChunks <= d; at += ND * kChunks)
    add_values<T, ND, kChunks, R>(out, value, layer, weights, keep, begin, end, at);
  for (; at < d; at += ND) add_values<T, ND, 1, R>(out, value, layer, weights, keep, begin, end, at);
}

template <class T, int NS, int ND>
void attend_tile(const Batch& b, const Layer& layer, const Tile& tile, const T* query, int64_t query_stride, T* out,
                 Scratch& scratch) {
  int64_t d = layer.head_dim, bs = layer.block_size, heads = layer.queries_per_key(), queries = tile.count * heads;
  scratch.query.resize(queries * d);
  scratch.out.assign(queries * d, 0.f);
  scratch.weights.resize(kGroup * bs);
  scratch.maxima.assign(queries, -1e30f);  // finite, so that a wholly masked block gives exp(-inf), not NaN
  scratch.sums.assign(queries * NS, 0.f);
  for (int64_t q = 0; q < queries; q++) {
    int64_t token = tile.first + q / heads, head = tile.kv_head * heads + q % heads;
    float* to = scratch.query.data() + q * d;
    read_head(query + token * query_stride + head * d, layer, b.positions[token], to);
    for (int64_t i = 0; i < d; i++) to[i] *= (float)layer.scale;
  }
  const int32_t* table = b.block_table + tile.row * b.table_stride;
  int64_t last = tile.position + tile.count - 1;
  for (int64_t i = std::max<int64_t>(0, tile.position - layer.window + 1) / bs; i <= last / bs; i++) {
    if (table[i] == 0) continue;  // nothing real is in the null block
    const T* key = (const T*)layer.keys + layer.at(table[i], tile.kv_head);
    const T* value = (const T*)layer.values + layer.at(table[i], tile.kv_head);
    for (int64_t q = 0; q < queries; q += kGroup) switch (std::min<int64_t>(kGroup, queries - q)) {
        case 1: step<T, NS, ND, 1>(layer, tile, q, i * bs, key, value, scratch); break;
        case 2: step<T, NS, ND, 2>(layer, tile, q, i * bs, key, value, scratch); break;
        case 3: step<T, NS, ND, 3>(layer, tile, q, i * bs, key, value, scratch); break;
        case 4: step<T, NS, ND, 4>(layer, tile, q, i * bs, key, value, scratch); break;
      }
  }
  for (int64_t q = 0; q < queries; q++) {
    int64_t token = tile.first + q / heads, head = tile.kv_head * heads + q % heads;
    T* to = out + (token * layer.num_heads + head) * d;
    float total = sum<NS>(load<NS>(scratch.sums.data() + q * NS)), scale = total == 0.f ? 0.f : 1.f / total;
    for (int64_t i = 0; i < d; i++) put(to + i, scratch.out[q * d + i] * scale);
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
