// What a call knows of its problem, and of a row before its walk: bounds, limits, offsets.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <new>
#include <unordered_map>
#include <vector>

#include "simd.h"

extern "C" {

// [batch, head, position, component], strides in elements. log_gate has no component.
struct TraTensor {
    void* data;
    int64_t stride[4];
};

struct TraProblem {
    TraTensor query, key, value, output, grad_output, grad_query, grad_key, grad_value;
    TraTensor log_gate, grad_log_gate;  // always fp32
    float* row_state;                   // [batch, query_heads, query_length, 2]: offset, sum
    const uint8_t* key_mask;            // null, or nonzero where a key may be attended
    int64_t key_mask_stride[2];
    const int32_t* segment_ids;  // null, or the document a key belongs to
    int64_t segment_stride[2];
    int64_t batch, query_heads, key_heads, query_length, key_length, width, value_width;
    double dropout, tolerance;
    double score_bound;  // negative: not known, take it from norms
    uint64_t seed;
    float scale, threshold;
    int32_t type, threads;
    void (*parallel)(void (*)(void*), void*, unsigned, unsigned);  // libgomp's GOMP_parallel or null
};

}  // extern "C"

namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

// Scores within this bound are exponentiated as they are; beyond it a first walk finds the row's
// largest logit. Leaves e^40 * 2^24 keys * any sensible value inside fp32.
constexpr double kSafeBound = 40.0;
// Computed scores and norms may pass their exact bounds by rounding.
constexpr double kBoundSlack = 1.001;
// Rows of one head in one work item when everything is visited: their state stays in L2.
constexpr int64_t kFullVisitRows = 512;
constexpr int64_t kLargeTile = 8 * kKeys, kSmallTile = 3 * kKeys;
// With this many rows under way a large tile's traffic matters more than its ragged ends.
constexpr int64_t kManyRows = 768;
// Gradients are differences of nearly equal products when one key dominates. Nothing but accuracy
// depends on their bits, so they are summed in short chains.
constexpr int64_t kShortChain = 32;
// Results of this many bytes are worth huge pages.
constexpr int64_t kLargeResult = 16 << 20;
// Multiplications that are worth another thread: some 50 microseconds.
constexpr double kThreadWork = 5e5;
// With this few rows on one key head, lanes would stay empty: take one row at a time.
constexpr int64_t kFewRows = 4;

int64_t round_up(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }

struct Buffer {  // aligned floats that grow and keep their content
    float* data = nullptr;
    int64_t size = 0;
    Buffer() = default;
    Buffer(const Buffer&) = delete;
    Buffer& operator=(const Buffer&) = delete;
    ~Buffer() { std::free(data); }
    float* reserve(int64_t count) {
        if (count > size) {
            int64_t grown = round_up(std::max(count, 2 * size), 64);
            float* fresh = static_cast<float*>(std::aligned_alloc(256, grown * sizeof(float)));
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

double dot(const float* a, const float* b, int64_t count) {
    double sum[8] = {};
    int64_t d = 0;
    for (; d + 8 <= count; d += 8)
        for (int64_t n = 0; n < 8; n++) sum[n] += double(a[d + n]) * b[d + n];
    for (; d < count; d++) sum[0] += double(a[d]) * b[d];
    return ((sum[0] + sum[1]) + (sum[2] + sum[3])) + ((sum[4] + sum[5]) + (sum[6] + sum[7]));
}

// Keys beyond count C weigh at most sum_{c > C} e^(U + g (c - 1)) = e^(U + g C) / (1 - e^g), while
// the first C weigh at least sum_{c <= C} e^(T + g (c - 1)) = e^T (1 - e^(g C)) / (1 - e^g), with
// U and T the largest and least possible kept score. Dropping a mass of r times the rest moves the
// output by at most 2 r max|v|, so C must satisfy 2 e^(U - T) x / (1 - x) <= tolerance, x = e^(g C).
// Returns the least such -g C.
double decay_needed(const TraProblem& p, double bound) {
    double tolerance = p.tolerance * (1 - p.dropout);  // dropout scales what is left of the weights
    if (!(tolerance > 0)) return kInfinity;
    double spread = std::max(bound - std::max(double(p.threshold), -bound), 0.0);
    double odds = spread + std::log(2 / tolerance);  // ln((1 - x) / x)
    return (odds > 0 ? odds + std::log1p(std::exp(-odds)) : std::log1p(std::exp(odds))) * (1 + 1e-9);
}

// What a call knows about the problem beyond its arguments.
struct Plan {
    const TraProblem& problem;
    Type type;
    int64_t group;       // query heads per key head
    int64_t key_stride;  // of packed key and value rows: a constant of multiply()
    int64_t value_stride;
    int64_t width_lanes, value_lanes;    // rounded up to whole vectors
    uint32_t drop_below;                 // a weight is dropped when its random bits are less
    float drop_scale;                    // what the others are multiplied by
    double decay;                        // decay_needed() if the bound is the same for all rows
    std::vector<float> largest_norm;     // [batch, key head, key]: over this key and all before it
    std::vector<int32_t> segment_start;  // [batch, key]: the first key of the same document

    explicit Plan(const TraProblem& p) : problem(p), type(Type(p.type)) {
        auto stride = [](int64_t width) { return width <= 64 ? 64 : width <= 128 ? 128 : 256; };
        group = p.key_heads ? p.query_heads / p.key_heads : 1;
        key_stride = stride(p.width);
        value_stride = stride(p.value_width);
        width_lanes = round_up(p.width, kWidth);
        value_lanes = round_up(p.value_width, kWidth);
        drop_below = uint32_t(std::floor(p.dropout * 4294967296.0));
        drop_scale = p.dropout > 0 ? float(1 / (1 - p.dropout)) : 1.0f;
        decay = decay_needed(p, p.score_bound * kBoundSlack);
        if (p.segment_ids) find_segments();
        if (p.score_bound < 0) largest_norm.resize(p.batch * p.key_heads * p.key_length);
    }

    bool valid(int64_t batch, int64_t key) const {
        const TraProblem& p = problem;
        return !p.key_mask || p.key_mask[batch * p.key_mask_stride[0] + key * p.key_mask_stride[1]];
    }
    int32_t segment(int64_t batch, int64_t key) const {
        const TraProblem& p = problem;
        return p.segment_ids ? p.segment_ids[batch * p.segment_stride[0] + key * p.segment_stride[1]] : 0;
    }
    int64_t offset(const TraTensor& tensor, int64_t batch, int64_t head, int64_t position) const {
        return batch * tensor.stride[0] + head * tensor.stride[1] + position * tensor.stride[2];
    }
    void read(const TraTensor& tensor, int64_t batch, int64_t head, int64_t position, int64_t count,
              float* to) const {
        read_row(tensor.data, offset(tensor, batch, head, position), tensor.stride[3], count, type, to);
    }
    // The row in place if it can be read as it is, otherwise a copy in `room`.
    const float* look(const TraTensor& tensor, int64_t batch, int64_t head, int64_t position, int64_t count,
                      float* room) const {
        if (type == kFloat32 && tensor.stride[3] == 1)
            return static_cast<const float*>(tensor.data) + offset(tensor, batch, head, position);
        read(tensor, batch, head, position, count, room);
        return room;
    }
    void write(const TraTensor& tensor, int64_t batch, int64_t head, int64_t position, int64_t count,
               const float* from) const {
        write_row(tensor.data, offset(tensor, batch, head, position), tensor.stride[3], count, type, from);
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
    // A maximum over the visible keys alone: the bound of a row is then the same decoded or
    // prefilled, padded or not.
    void find_norms(int64_t batch, int64_t head) {
        const TraProblem& p = problem;
        float row[256];
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

// What the walk must know of a row before it starts.
struct Row {
    int64_t head, query;  // indices
    int32_t position, segment = 0, first_key = 0;
    float gate, limit = 0, offset = 0;
    bool safe = true;  // needs no offset
    float* state;
    uint32_t low = 0, high = 0;  // words of the dropout generator
};

// Finds the query's components, in `room` if they must be converted. False: one of them or the gate
// is not finite.
bool open_row(const Plan& plan, int64_t batch, int64_t head, int64_t query, float* room,
              const float*& components, Row& row) {
    const TraProblem& p = plan.problem;
    row.head = head;
    row.query = query;
    row.position = int32_t(query + p.key_length - p.query_length);
    row.state = p.row_state + 2 * ((batch * p.query_heads + head) * p.query_length + query);
    row.gate = static_cast<const float*>(p.log_gate.data)[plan.offset(p.log_gate, batch, head, query)];
    components = plan.look(p.query, batch, head, query, p.width, room);
    if (!all_finite(components, p.width) || !std::isfinite(row.gate)) return false;
    if (row.position < 0) return true;  // before the first key
    double bound = p.score_bound * kBoundSlack;
    if (p.score_bound < 0)
        bound = std::fabs(p.scale) * std::sqrt(dot(components, components, p.width)) * kBoundSlack *
                plan.largest_norm[(batch * p.key_heads + head / plan.group) * p.key_length + row.position];
    double least = std::max(double(p.threshold), -bound);
    row.safe = bound <= kSafeBound && least >= -kSafeBound;
    double exponent = p.score_bound < 0 ? decay_needed(p, bound) : plan.decay;
    row.limit = row.gate < 0 ? float(std::min(std::ceil(exponent / -row.gate), 1e9)) : kInfinity;
    row.segment = plan.segment(batch, row.position);
    row.first_key = p.segment_ids ? plan.segment_start[batch * p.key_length + row.position] : 0;
    if (p.dropout > 0) {
        uint32_t seed_low = uint32_t(p.seed), seed_high = uint32_t(p.seed >> 32);
        uint32_t index = uint32_t((batch * p.query_heads + head) * p.query_length + query);
        row.low = mix(mix(mix(seed_low) ^ seed_high) ^ index);
        row.high = mix(mix(mix(seed_high ^ 0x9e3779b9u) ^ seed_low) ^ index);
    }
    return true;
}

void finish_forward(const Plan& plan, int64_t batch, const Row& row, float offset, float sum, float poison,
                    float* sums) {
    const TraProblem& p = plan.problem;
    row.state[0] = offset;
    row.state[1] = sum + poison;
    float inverse = (sum == 0 ? 0.0f : plan.drop_scale / sum) + poison;
    for (int64_t d = 0; d < p.value_width; d++) sums[d] = sums[d] * inverse + 0.0f;  // -0 becomes 0
    plan.write(p.output, batch, row.head, row.query, p.value_width, sums);
}

void spoil_forward(const Plan& plan, int64_t batch, const Row& row) {
    float sums[256] = {};
    finish_forward(plan, batch, row, 0, 1, kNaN, sums);
}

}  // namespace
