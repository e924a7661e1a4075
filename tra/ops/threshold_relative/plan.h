// What a call finds out about its problem before any row is walked.
#pragma once

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <new>
#include <unordered_map>
#include <utility>
#include <vector>

#include "problem.h"
#include "simd.h"

namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

// The most components of a query, key or value. Packed rows lie this far apart or, if they fit, a half
// or a quarter of it.
constexpr int64_t kWidest = 256;
// One row of any kind, in fp32.
typedef float Components[kWidest];
// Where the kept scores of a row span no more than this, the least of them is its offset, and weights
// lie between 1 and e^40; otherwise a first walk finds the row's largest logit.
constexpr double kSafeSpread = 40.0;
// A row sums its weights and values over one block of keys after another, the blocks over spans, and adds each span to
// its totals with what rounding takes away: chains of additions stay short, however long the row. Blocks and spans are
// counted from the first key that is not padding, so that they are the same for every row and call. Where products are
// rounded as well, shorter spans keep to the promised accuracy.
constexpr int64_t kBlock = 3 * kKeys, kSpan = (kFuses ? 8 : 3) * kBlock;
// Computed scores and norms may pass their exact bounds by rounding.
constexpr double kBoundSlack = 1.001;
// And where queries and keys were rounded to their type, by this much more.
constexpr double kTypeSlack[] = {1 + 0x1p-23, 1 + 0x1p-7, 1 + 0x1p-10};

int64_t round_up(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }

struct Buffer {  // aligned floats that grow and keep their content
    static constexpr int64_t kAlignment = 256;  // bytes
    float* data = nullptr;
    int64_t size = 0;
    Buffer() = default;
    Buffer(const Buffer&) = delete;
    Buffer& operator=(const Buffer&) = delete;
    Buffer(Buffer&& other) noexcept : data(std::exchange(other.data, nullptr)), size(std::exchange(other.size, 0)) {}
    Buffer& operator=(Buffer&& other) noexcept {
        std::swap(data, other.data);
        std::swap(size, other.size);
        return *this;
    }
    ~Buffer() { std::free(data); }
    float* reserve(int64_t count) {
        if (count > size) {
            int64_t grown = round_up(std::max(count, 2 * size), kAlignment / int64_t(sizeof(float)));
            float* fresh = static_cast<float*>(std::aligned_alloc(kAlignment, grown * sizeof(float)));
            if (!fresh) throw std::bad_alloc();
            if (size) std::memcpy(fresh, data, size * sizeof(float));
            std::free(data);
            data = fresh;
            size = grown;
        }
        return data;
    }
};

bool all_finite(const float* row, int64_t count) {
    uint32_t largest = 0;
    for (int64_t d = 0; d < count; d++) largest = std::max(largest, to_bits(row[d]) & 0x7fffffffu);
    return largest < 0x7f800000u;
}

// Copies a row. False: one of its numbers is not finite.
bool copy_finite(const float* __restrict from, int64_t count, float* __restrict to) {
    uint32_t largest = 0;
    for (int64_t d = 0; d < count; d++) {
        to[d] = from[d];
        largest = std::max(largest, to_bits(from[d]) & 0x7fffffffu);
    }
    return largest < 0x7f800000u;
}

double dot(const float* a, const float* b, int64_t count) {
    double sum[8] = {};
    int64_t d = 0;
    for (; d + 8 <= count; d += 8)
        for (int64_t n = 0; n < 8; n++) sum[n] += double(a[d + n]) * b[d + n];
    for (; d < count; d++) sum[0] += double(a[d]) * b[d];
    return ((sum[0] + sum[1]) + (sum[2] + sum[3])) + ((sum[4] + sum[5]) + (sum[6] + sum[7]));
}

// What is known of a row's scores: the threshold that the kept ones exceed, and a bound on their size.
struct Scores {
    float threshold;
    double bound;
    // The least that a kept key can have.
    double least() const { return std::max(double(threshold), -bound); }
    double spread() const { return bound - least(); }
};

// Keys beyond count C weigh at most sum_{c > C} e^(U + g (c - 1)) = e^(U + g C) / (1 - e^g), while
// the first C weigh at least sum_{c <= C} e^(T + g (c - 1)) = e^T (1 - e^(g C)) / (1 - e^g), with
// U and T the largest and least possible kept score. Dropping a mass of r times the rest moves the
// output by at most 2 r max|v|, so C must satisfy 2 e^(U - T) x / (1 - x) <= tolerance, x = e^(g C).
// Returns the least such -g C.
double decay_needed(const TraProblem& p, const Scores& scores, double tolerance) {
    tolerance *= 1 - p.dropout;  // dropout scales what is left of the weights
    if (!(tolerance > 0)) return kInfinity;
    double odds = std::max(scores.spread(), 0.0) + std::log(2 / tolerance);  // ln((1 - x) / x)
    return (odds > 0 ? odds + std::log1p(std::exp(-odds)) : std::log1p(std::exp(odds))) * (1 + 1e-9);
}

// Straight-through, a key that is left out has a gradient of at most 2 h e^(g C) M behind count C, with h <= 1 / (4
// temperature) the slope of its sigmoid and M the largest |dout . v|: the nearest kept key has a larger score. There may
// be as many of them as there are keys. Returns the least -g C at which they have together at most tolerance M.
double decay_needed_left_out(const TraProblem& p, int64_t keys) {
    double tolerance = p.tolerance * (1 - p.dropout);
    if (!(tolerance > 0)) return kInfinity;
    return std::max(std::log(double(keys) / (2 * double(p.straight_through) * tolerance)), 0.0) * (1 + 1e-9);
}

// The count at which a row has decayed that much.
float count_after(double decay, float gate) {
    return gate < 0 ? float(std::min(std::ceil(decay / -gate), 1e9)) : kInfinity;
}

struct Plan {
    const TraProblem& problem;
    Type type;
    int64_t group;       // query heads per key head
    int64_t key_stride;  // of packed key and value rows: a constant of multiply()
    int64_t value_stride;
    int64_t width_lanes, value_lanes;    // rounded up to whole vectors
    uint32_t drop_below;                 // a weight is dropped when its random bits are less
    float drop_scale;                    // what the others are multiplied by
    Scores scores;                       // of every row, if they are the same for all
    bool same_scores;
    double decay, decay_behind;          // then decay_needed() for the tolerance and for behind_tolerance()
    std::vector<double> decay_left_out;  // [batch]: decay_needed_left_out()
    bool all_safe;                       // no row needs a first walk
    mutable std::atomic<bool> bound_broken{false};  // one had a larger one
    mutable std::atomic<bool> not_in_pieces{false}; // a row of a piece needs all its keys at once
    std::vector<float> largest_norm;     // [batch, key head, key]: over this key and all before it
    std::vector<float> center;           // backward: [batch, key head, component], what the values have in common
    std::vector<int32_t> segment_start;  // [batch, key]: the first key of the same document
    std::vector<std::vector<int32_t>> span_starts;  // [batch]: of padded sequences, the first key of each span

    explicit Plan(const TraProblem& p) : problem(p), type(Type(p.type)) {
        auto stride = [](int64_t width) {
            return width <= kWidest / 4 ? kWidest / 4 : width <= kWidest / 2 ? kWidest / 2 : kWidest;
        };
        group = p.key_heads ? p.query_heads / p.key_heads : 1;
        key_stride = stride(p.width);
        value_stride = stride(p.value_width);
        width_lanes = round_up(p.width, kWidth);
        value_lanes = round_up(p.value_width, kWidth);
        drop_below = uint32_t(std::floor(p.dropout * 4294967296.0));
        drop_scale = p.dropout > 0 ? float(1 / (1 - p.dropout)) : 1.0f;
        scores = {p.threshold, p.score_bound * kBoundSlack};
        same_scores = !p.row_threshold.data && !p.row_bound.data && p.score_bound >= 0;
        decay = decay_needed(p, scores, p.tolerance);
        decay_behind = decay_needed(p, scores, behind_tolerance());
        all_safe = same_scores ? scores.spread() <= kSafeSpread : has_bounds() && every_row_is_safe();
        if (p.segment_ids && !p.piece) find_segments();
        if (p.key_mask) find_spans();
        if (p.straight_through > 0)
            for (int64_t batch = 0; batch < p.batch; batch++)
                decay_left_out.push_back(decay_needed_left_out(p, valid_keys(batch)));
        if (!has_bounds()) largest_norm.resize(p.batch * p.key_heads * p.key_length);
    }

    // Straight-through, a row's sum of gradients is 0 but for rounding when this little is left of its weights.
    double behind_tolerance() const { return std::max(problem.tolerance, 0x1p-23); }
    // Whether the caller vouches for bounds of the scores.
    bool has_bounds() const { return problem.row_bound.data || problem.score_bound >= 0; }
    // The caller's threshold and bound of a row. Without a bound it is negative.
    Scores scores_of(int64_t batch, int64_t head, int64_t query) const {
        const TraProblem& p = problem;
        Scores found = scores;
        if (p.row_threshold.data) found.threshold = number(p.row_threshold, batch, head, query);
        if (p.row_bound.data) {
            const double bound =
                static_cast<const double*>(p.row_bound.data)[place(p.row_bound, batch, head, query)];
            found.bound = std::isfinite(bound) ? bound * kBoundSlack : kInfinity;
        }
        return found;
    }
    bool every_row_is_safe() const {
        const TraProblem& p = problem;
        for (int64_t batch = 0; batch < p.batch; batch++)
            for (int64_t head = 0; head < p.query_heads; head++)
                for (int64_t query = 0; query < p.query_length; query++)
                    if (!(scores_of(batch, head, query).spread() <= kSafeSpread)) return false;
        return true;
    }

    // Where dropout finds a key and a row: their places in the whole sequence.
    uint32_t key_word(int64_t key) const { return uint32_t(key + (problem.piece ? problem.piece->first_key : 0)); }
    uint32_t row_word(int64_t batch, int64_t head, int64_t query) const {
        const TraProblem& p = problem;
        const int64_t queries = p.piece ? p.piece->query_count : p.query_length;
        return uint32_t((batch * p.query_heads + head) * queries + query + (p.piece ? p.piece->first_query : 0));
    }
    bool valid(int64_t batch, int64_t key) const {
        const TraProblem& p = problem;
        return !p.key_mask || p.key_mask[batch * p.key_mask_stride[0] + key * p.key_mask_stride[1]];
    }
    int32_t segment(int64_t batch, int64_t key) const {
        const TraProblem& p = problem;
        return p.segment_ids ? p.segment_ids[batch * p.segment_stride[0] + key * p.segment_stride[1]] : 0;
    }
    // The first key of the span that `key` belongs to.
    int64_t span_start(int64_t batch, int64_t key) const {
        if (!problem.key_mask) return key - key % kSpan;
        const std::vector<int32_t>& starts = span_starts[batch];
        auto after = std::upper_bound(starts.begin(), starts.end(), key);
        return after == starts.begin() ? 0 : *(after - 1);
    }
    // The same of its block.
    int64_t block_start(int64_t batch, int64_t key) const {
        if (!problem.key_mask) return key - key % kBlock;
        int64_t start = span_start(batch, key), before = 0;
        for (int64_t other = start; other <= key; other++) {
            if (!valid(batch, other)) continue;
            if (before++ % kBlock == 0) start = other;
        }
        return start;
    }
    // Where a row of the tensor begins, in elements.
    int64_t place(const TraTensor& tensor, int64_t batch, int64_t head, int64_t position) const {
        return batch * tensor.stride[0] + head * tensor.stride[1] + position * tensor.stride[2];
    }
    // Of a tensor that has one number a row.
    float& number(const TraTensor& tensor, int64_t batch, int64_t head, int64_t position) const {
        return static_cast<float*>(tensor.data)[place(tensor, batch, head, position)];
    }
    void read(const TraTensor& tensor, int64_t batch, int64_t head, int64_t position, int64_t count,
              float* to) const {
        read_row(tensor.data, place(tensor, batch, head, position), tensor.stride[3], count, type, to);
    }
    // The same. False: one of the numbers is not finite.
    bool read_finite(const TraTensor& tensor, int64_t batch, int64_t head, int64_t position, int64_t count,
                     float* to) const {
        if (type == kFloat32 && tensor.stride[3] == 1)
            return copy_finite(static_cast<const float*>(tensor.data) + place(tensor, batch, head, position), count, to);
        read(tensor, batch, head, position, count, to);
        return all_finite(to, count);
    }
    // The row in place if it can be read as it is, otherwise a copy in `room`.
    const float* look(const TraTensor& tensor, int64_t batch, int64_t head, int64_t position, int64_t count,
                      float* room) const {
        if (type == kFloat32 && tensor.stride[3] == 1)
            return static_cast<const float*>(tensor.data) + place(tensor, batch, head, position);
        read(tensor, batch, head, position, count, room);
        return room;
    }
    // Asks for a row that will be read soon.
    void expect(const TraTensor& tensor, int64_t batch, int64_t head, int64_t position, int64_t count) const {
        if (position < 0 || tensor.stride[3] != 1) return;
        const int64_t size = type == kFloat32 ? 4 : 2;
        const char* row = static_cast<const char*>(tensor.data) + place(tensor, batch, head, position) * size;
        for (int64_t at = 0; at < count * size; at += 64) __builtin_prefetch(row + at);
        __asm__ volatile("");  // or GCC takes the function for one without effects and leaves its calls out
    }
    // What a function makes of the numbers of a row, in place if they must be converted.
    template <class Function>
    void write(const TraTensor& tensor, int64_t batch, int64_t head, int64_t position, int64_t count, float* from,
               const Function& function) const {
        const int64_t at = place(tensor, batch, head, position);
        const bool direct = type == kFloat32 && tensor.stride[3] == 1;
        float* to = direct ? static_cast<float*>(tensor.data) + at : from;
        for (int64_t d = 0; d < count; d++) to[d] = function(from[d]);
        if (!direct) write_row(tensor.data, at, tensor.stride[3], count, type, from);
    }

    void find_segments() {
        const TraProblem& p = problem;
        segment_start.resize(p.batch * p.key_length);
        for (int64_t batch = 0; batch < p.batch; batch++) {
            std::unordered_map<int32_t, int32_t> first;
            for (int64_t key = 0; key < p.key_length; key++)
                segment_start[batch * p.key_length + key] =
                    first.emplace(segment(batch, key), int32_t(key)).first->second;
        }
    }
    void find_spans() {
        const TraProblem& p = problem;
        span_starts.resize(p.batch);
        for (int64_t batch = 0; batch < p.batch; batch++) {
            int64_t before = 0;  // keys that are not padding
            for (int64_t begin = 0; begin < p.key_length; begin += kSpan) {
                // At most one span starts in a stretch of this many keys.
                const int64_t end = std::min(begin + kSpan, p.key_length);
                const int64_t until = before + count_valid(batch, begin, end);
                int64_t start = round_up(before, kSpan) - before, key = begin;
                if (before + start < until) {
                    for (; start || !valid(batch, key); key++) start -= valid(batch, key);
                    span_starts[batch].push_back(int32_t(key));
                }
                before = until;
            }
        }
    }
    // Of the sequence, so that the stop is the same padded or not, and in pieces.
    int64_t valid_keys(int64_t batch) const {
        const TraProblem& p = problem;
        if (p.piece) return p.piece->valid_keys ? p.piece->valid_keys[batch] : p.all_keys;
        return p.key_mask ? count_valid(batch, 0, p.key_length) : p.key_length;
    }
    int64_t count_valid(int64_t batch, int64_t begin, int64_t end) const {
        const int64_t stride = problem.key_mask_stride[1];
        const uint8_t* mask = problem.key_mask + batch * problem.key_mask_stride[0] + begin * stride;
        int32_t count = 0;
        if (stride == 1) for (int64_t n = 0; n < end - begin; n++) count += mask[n] != 0;  // in vectors
        else for (int64_t n = 0; n < end - begin; n++) count += mask[n * stride] != 0;
        return count;
    }
    // Gradients of scores are differences of products with values, in which what all values have in common cancels, but
    // not its rounding: backward takes it away before. Of each component it is the value nearest to 0 where all have one
    // sign, so that no value becomes larger and a row keeps its precision whatever the values of others are. Dropout
    // multiplies each product by another factor, and nothing cancels.
    void find_center(int64_t batch, int64_t head) {
        const TraProblem& p = problem;
        Components least, greatest, row;
        std::fill_n(least, p.value_width, kInfinity);
        std::fill_n(greatest, p.value_width, -kInfinity);
        for (int64_t key = 0; key < p.key_length; key++) {
            if (!valid(batch, key) || !read_finite(p.value, batch, head, key, p.value_width, row)) continue;
            for (int64_t d = 0; d < p.value_width; d++) {
                least[d] = std::min(least[d], row[d]);
                greatest[d] = std::max(greatest[d], row[d]);
            }
        }
        float* found = center.data() + (batch * p.key_heads + head) * p.value_width;
        for (int64_t d = 0; d < p.value_width; d++)
            if (least[d] <= greatest[d]) found[d] = std::max(least[d], 0.0f) + std::min(greatest[d], 0.0f);
    }
    const float* center_of(int64_t batch, int64_t key_head) const {
        return center.data() + (batch * problem.key_heads + key_head) * problem.value_width;
    }
    // A maximum over the visible keys alone: the bound of a row is then the same decoded or
    // prefilled, padded or not.
    void find_norms(int64_t batch, int64_t head) {
        const TraProblem& p = problem;
        Components row;
        float largest = 0;
        for (int64_t key = 0; key < p.key_length; key++) {
            if (valid(batch, key)) {
                read(p.key, batch, head, key, p.width, row);
                if (all_finite(row, p.width)) largest = std::max(largest, float(std::sqrt(dot(row, row, p.width))));
            }
            largest_norm[(batch * p.key_heads + head) * p.key_length + key] = largest;
        }
    }
};

}  // namespace
