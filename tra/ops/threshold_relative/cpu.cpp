// Threshold relative attention on the CPU: forward, backward and decoding.
//
// Rows (queries) lie in the lanes of vectors and keys are walked from the nearest to the farthest, so
// a row's contextualised distance is a running count. A row is done when its count reaches a limit
// that certifies the tolerance; its lane then goes to the next row of the same head. Far keys bind
// no row causally, so any rows may share lanes, and the cost follows the sum of the rows' own reaches.
//
// One order of summation everywhere: scores are one chain of multiply_add() over the components,
// rows add keys from near to far, keys add rows from the last to the first, always one at a time.
// Tiles, lanes, threads, batch and padding then only decide what is skipped, never what is computed.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <new>
#include <thread>
#include <unordered_map>
#include <vector>

#include "simd.h"

#ifndef TRA_VARIANT
#define TRA_VARIANT generic
#endif
#define TRA_JOIN_(a, b) a##b
#define TRA_JOIN(a, b) TRA_JOIN_(a, b)

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
    int64_t head, query;   // indices
    int32_t position, segment, first_key;
    float gate, limit, offset;
    bool safe;             // needs no offset
    float* state;
    uint32_t low, high;    // words of the dropout generator
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
    if (row.position < 0) {  // before the first key
        row.limit = 0;
        row.safe = true;
        return true;
    }
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

// ---------------------------------------------------------------------------------------------
// Many rows: rows in lanes

enum class Mode { kMaximum, kForward, kBackward };

// The state of the rows in one group of lanes.
struct Lanes {
    alignas(64) float gate[kLanes];
    alignas(64) float limit[kLanes];   // the count at which the row is done; -1 in a free lane
    alignas(64) float count[kLanes];   // kept keys so far
    alignas(64) float sum[kLanes];     // of weights; the largest logit under kMaximum
    alignas(64) float offset[kLanes];  // subtracted from every logit
    alignas(64) float poison[kLanes];  // NaN once the row has kept a value that is not finite
    alignas(64) float delta[kLanes];
    alignas(64) float inverse[kLanes];  // one over the sum that forward found
    alignas(64) float carry[kLanes];   // what the sum, or grad_gate, lost by rounding
    alignas(64) float grad_gate[kLanes];  // of the gate: sums of gradients times distances,
    alignas(64) float grad_sum[kLanes];   // of gradients, zero but for rounding,
    alignas(64) float mean[kLanes];       // and of weights times distances
    alignas(64) int32_t position[kLanes];
    alignas(64) int32_t segment[kLanes];
    alignas(64) int32_t first_key[kLanes];
    alignas(64) uint32_t low[kLanes];
    alignas(64) uint32_t high[kLanes];
    Row row[kLanes];
    uint64_t active;
    int32_t lowest, highest;  // positions seen since the group was last empty
};

// Valid keys of one stretch, nearest first, packed as fp32 rows.
struct Tile {
    int64_t low, high;  // the stretch [low, high)
    int64_t count;
    int32_t index[kLargeTile];
    int32_t segment[kLargeTile];
    int64_t bad_count;  // keys whose value is not finite; it is packed as zero
    int32_t bad[kLargeTile];
};

template <Mode kMode>
class Walk {
   public:
    explicit Walk(const Plan& plan) : plan_(plan), problem_(plan.problem) {
        const bool backward = kMode == Mode::kBackward;
        sums_width_ = backward ? plan.width_lanes : kMode == Mode::kForward ? plan.value_lanes : 0;
        grad_at_ = problem_.width * kLanes;
        sums_at_ = grad_at_ + (backward ? problem_.value_width * kLanes : 0);
        query_rows_at_ = sums_at_ + sums_width_ * round_up(kLanes, kKeys);
        grad_rows_at_ = query_rows_at_ + (backward ? plan.width_lanes * kLanes : 0);
        group_size_ = grad_rows_at_ + (backward ? plan.value_lanes * kLanes : 0);
        group_size_ = round_up(group_size_, 64);
        const int64_t slack = 64;
        keys_.reserve((kLargeTile + kKeys) * plan.key_stride + slack);
        values_.reserve((kLargeTile + kKeys) * plan.value_stride + slack);
        if (kMode == Mode::kBackward) {
            grad_keys_.reserve(kLargeTile * plan.width_lanes);
            grad_values_.reserve(kLargeTile * plan.value_lanes);
        }
    }

    // Rows [begin, end) of all query heads that share one key head.
    void run(int64_t batch, int64_t key_head, int64_t begin, int64_t end) {
        batch_ = batch;
        key_head_ = key_head;
        lanes_.clear();
        order_.clear();
        active_ = 0;
        next_ = end - 1;
        next_member_ = plan_.group - 1;
        last_ = begin;
        while (true) {
            if (!active_) {  // nothing to carry on: jump to the next row
                if (next_ < last_) break;
                tile_.low = position_of(next_) + 1;
                if (tile_.low <= 0) {  // it sees no key, nor do those after it
                    while (next_ >= last_) enter(0);
                    break;
                }
                admit_all(next_low());
                if (!active_) continue;
            }
            tile_.high = tile_.low;
            tile_.low = low_;
            pack_tile();
            const int64_t low = next_low();
            const size_t groups = lanes_.size();
            for (size_t group = 0; group < groups; group++) {
                if (!lanes_[group].active) continue;
                if (lanes_[group].active >> kWidth) visit<kVectors>(group);
                else visit<1>(group);
                retire(group);
                // The next tile's rows come in while the group is in the nearest cache. Backward
                // must wait: finish_keys() still needs the rows that left.
                if (kMode != Mode::kBackward) admit(low, group);
            }
            if (kMode == Mode::kBackward) finish_keys();
            admit_all(low);
            while (!lanes_.empty() && int64_t(lanes_.size() - 1) * kLanes >= active_ + spare()) fold();
        }
    }

   private:
    int64_t position_of(int64_t query) const { return query + problem_.key_length - problem_.query_length; }
    // Where the tile after this one ends.
    int64_t next_low() {
        bool large = !(problem_.tolerance > 0) || active_ > kManyRows;
        return low_ = std::max<int64_t>(0, tile_.low - (large ? kLargeTile : kSmallTile));
    }
    // Rows at or after `low` take free lanes.
    void admit(int64_t low, size_t group) {
        while (next_ >= last_ && position_of(next_) >= low && lanes_[group].active != kFull) enter(group);
    }
    void admit_all(int64_t low) {
        for (size_t group = 0; next_ >= last_ && position_of(next_) >= low; group++) {
            if (group == lanes_.size()) add_group();
            admit(low, group);
        }
    }
    // Lanes to keep free for rows to come, so that groups do not come and go.
    int64_t spare() const { return next_ < last_ ? 0 : kWidth / 2; }
    float* data(size_t group) { return arena_.data + group * group_size_; }

    void add_group() {
        const size_t group = lanes_.size();
        lanes_.emplace_back();
        clear(lanes_.back());
        arena_.reserve((group + 1) * group_size_);
        std::memset(data(group), 0, group_size_ * sizeof(float));
    }

    // Puts the next row into a free lane of the group, unless there is nothing to walk for it.
    void enter(size_t group) {
        Row row;
        float room[256], grad[256];
        float delta = 0;
        const float* query;
        bool fine = open_row(plan_, batch_, key_head_ * plan_.group + next_member_, next_, room, query, row);
        if (--next_member_ < 0) {
            next_member_ = plan_.group - 1;
            next_--;
        }
        if (kMode == Mode::kMaximum) {
            if (!fine || row.safe) return;
            row.offset = 0;
        } else if (kMode == Mode::kForward) {
            row.offset = row.safe ? 0 : row.state[0];
            if (!fine || !std::isfinite(row.offset)) return spoil_forward(plan_, batch_, row);
            if (row.position < 0) {
                float zeros[256] = {};
                return finish_forward(plan_, batch_, row, 0, 0, 0, zeros);
            }
        } else {
            row.offset = row.state[0];
            if (fine) fine = open_gradient(row, grad, delta);
            if (!fine || row.position < 0 || row.state[1] == 0)
                return write_gradient(row, nullptr, fine ? 0 : kNaN);
        }

        Lanes& lanes = lanes_[group];
        if (!lanes.active) clear(lanes);
        int lane = __builtin_ctzll(~lanes.active);
        lanes.active |= uint64_t(1) << lane;
        active_++;
        lanes.gate[lane] = row.gate;
        lanes.limit[lane] = row.limit;
        lanes.count[lane] = 0;
        lanes.sum[lane] = kMode == Mode::kMaximum ? -kInfinity : 0;
        lanes.inverse[lane] = kMode == Mode::kBackward ? 1 / row.state[1] : 0;
        lanes.offset[lane] = row.offset;
        lanes.poison[lane] = 0;
        lanes.delta[lane] = delta;
        lanes.carry[lane] = lanes.grad_gate[lane] = lanes.grad_sum[lane] = lanes.mean[lane] = 0;
        lanes.position[lane] = row.position;
        lanes.segment[lane] = row.segment;
        lanes.first_key[lane] = row.first_key;
        lanes.low[lane] = row.low;
        lanes.high[lane] = row.high;
        lanes.row[lane] = row;
        lanes.lowest = std::min(lanes.lowest, row.position);
        lanes.highest = std::max(lanes.highest, row.position);

        float* base = data(group);
        scatter(base + lane, query, problem_.width);
        std::memset(base + sums_at_ + lane * sums_width_, 0, sums_width_ * sizeof(float));
        if (kMode == Mode::kBackward) {
            scatter(base + grad_at_ + lane, grad, problem_.value_width);
            std::memcpy(base + query_rows_at_ + lane * plan_.width_lanes, query, problem_.width * 4);
            std::memcpy(base + grad_rows_at_ + lane * plan_.value_lanes, grad, problem_.value_width * 4);
            order_.push_back(int64_t(group) * kLanes + lane);
        }
    }

    static void scatter(float* column, const float* from, int64_t count) {
        for (int64_t d = 0; d < count; d++) column[d * kLanes] = from[d];
    }
    static void clear(Lanes& lanes) {
        std::memset(static_cast<void*>(&lanes), 0, sizeof lanes);
        for (float& limit : lanes.limit) limit = -1;
        lanes.lowest = std::numeric_limits<int32_t>::max();
        lanes.highest = -1;
    }

    // The gradient of the output, and delta = gradient . output. False: not finite.
    bool open_gradient(const Row& row, float* grad, float& delta) {
        float room[256];
        const int64_t width = problem_.value_width;
        plan_.read(problem_.grad_output, batch_, row.head, row.query, width, grad);
        delta = float(dot(grad, plan_.look(problem_.output, batch_, row.head, row.query, width, room), width));
        return all_finite(grad, width) && std::isfinite(delta) && std::isfinite(row.state[1]);
    }

    // Distances are taken from their mean: an error in delta, which shifts all gradients of a row in
    // proportion to their weights, then cancels instead of being multiplied by the mean distance.
    static float gate_gradient(const Lanes& lanes, int lane) {
        return lanes.grad_gate[lane] + (lanes.carry[lane] - lanes.mean[lane] * lanes.grad_sum[lane]);
    }
    void write_gradient(const Row& row, const float* sums, float grad_gate) {
        float grad[256];
        for (int64_t d = 0; d < problem_.width; d++)
            grad[d] = sums ? sums[d] * problem_.scale + 0.0f : grad_gate;
        plan_.write(problem_.grad_query, batch_, row.head, row.query, problem_.width, grad);
        const TraTensor& gate = problem_.grad_log_gate;
        static_cast<float*>(gate.data)[plan_.offset(gate, batch_, row.head, row.query)] = grad_gate + 0.0f;
    }

    void pack_tile() {
        Tile& tile = tile_;
        tile.count = tile.bad_count = 0;
        for (int64_t key = tile.high - 1; key >= tile.low; key--) {
            if (!plan_.valid(batch_, key)) continue;
            float* row = keys_.data + tile.count * plan_.key_stride;
            plan_.read(problem_.key, batch_, key_head_, key, problem_.width, row);
            if (!all_finite(row, problem_.width)) continue;  // as if it were padding
            if (kMode != Mode::kMaximum) {
                float* value = values_.data + tile.count * plan_.value_stride;
                plan_.read(problem_.value, batch_, key_head_, key, problem_.value_width, value);
                if (!all_finite(value, problem_.value_width)) {
                    std::memset(value, 0, problem_.value_width * sizeof(float));
                    tile.bad[tile.bad_count++] = int32_t(tile.count);
                }
            }
            tile.index[tile.count] = int32_t(key);
            tile.segment[tile.count] = plan_.segment(batch_, key);
            tile.count++;
        }
    }

    // Products of the rows in lanes with the packed rows of the tile from `first` on, as sums of chains
    // of at most `chain` terms.
    template <int kStride, int kCount>
    void products(const float* lanes, int64_t width, int64_t chain, const float* rows, int64_t first, float* to) {
        for (int64_t k = first; k < tile_.count; k += kKeys)
            for (int64_t d = 0; d < width; d += chain)
                multiply<kCount, kStride, false>(
                    {std::min(chain, width - d), lanes + d * kLanes, kLanes, rows + k * kStride + d, 1},
                    to + k * kLanes, kLanes, d ? Onto::kTotal : Onto::kNothing);
    }
    template <int kCount>
    void products(int64_t stride, const float* lanes, int64_t width, int64_t chain, const float* rows, int64_t first,
                  float* to) {
        if (stride == 64) products<64, kCount>(lanes, width, chain, rows, first, to);
        else if (stride == 128) products<128, kCount>(lanes, width, chain, rows, first, to);
        else products<256, kCount>(lanes, width, chain, rows, first, to);
    }

    // All keys of the tile against one group of rows.
    template <int kCount>
    void visit(size_t group) {
        Lanes& lanes = lanes_[group];
        float* base = data(group);
        const int64_t count = tile_.count, tile_size = kLargeTile * kLanes;
        float* weights = weights_.reserve((kMode == Mode::kBackward ? group + 1 : 1) * tile_size + kKeys);
        float* grads = nullptr;
        if (kMode == Mode::kBackward) {
            weights += group * tile_size;
            grads = grads_.reserve((group + 1) * tile_size + kKeys) + group * tile_size;
        }
        int64_t first = 0;  // skip keys that lie after all rows of the group
        while (first < count && tile_.index[first] > lanes.highest) first++;
        first -= first % kKeys;
        products<kCount>(plan_.key_stride, base, problem_.width, problem_.width, keys_.data, first, weights);
        if (kMode == Mode::kBackward)
            products<kCount>(plan_.value_stride, base + grad_at_, problem_.value_width, kShortChain, values_.data, first,
                             grads);

        const bool masked = problem_.segment_ids || (count && tile_.index[0] > lanes.lowest);
        const bool drops = plan_.drop_below && kMode != Mode::kMaximum;
        for (int n = 0; n < kCount; n++) {
            if (masked && drops) weigh<true, true>(lanes, n, first, weights, grads);
            else if (masked) weigh<true, false>(lanes, n, first, weights, grads);
            else if (drops) weigh<false, true>(lanes, n, first, weights, grads);
            else weigh<false, false>(lanes, n, first, weights, grads);
        }
        if (kMode == Mode::kForward) {
            add_keys(lanes.active, first, weights, values_.data, plan_.value_stride, base + sums_at_);
        } else if (kMode == Mode::kBackward) {
            add_keys(lanes.active, first, grads, keys_.data, plan_.key_stride, base + sums_at_);
            std::memset(weights, 0, first * kLanes * sizeof(float));
            std::memset(grads, 0, first * kLanes * sizeof(float));
        }
    }

    // Every row of the group adds the packed rows of the tile, weighted.
    void add_keys(uint64_t active, int64_t first, const float* weights, const float* rows, int64_t stride, float* sums) {
        for (int lane = 0; lane < kLanes; lane += kKeys, active >>= kKeys) {
            if (!(active & ((1u << kKeys) - 1))) continue;
            Terms terms{tile_.count - first, rows + first * stride, stride, weights + first * kLanes + lane, kLanes};
            float* to = sums + lane * sums_width_;
            int64_t d = 0;
            for (; d + kLanes <= sums_width_; d += kLanes, terms.a += kLanes)
                multiply<kVectors, 1, false>(terms, to + d, sums_width_, Onto::kSum);
            for (; d < sums_width_; d += kWidth, terms.a += kWidth)
                multiply<1, 1, false>(terms, to + d, sums_width_, Onto::kSum);
        }
    }

    // Turns dot products into weights, in place, for one vector of rows; in backward also products
    // of gradients and values into gradients of scores.
    template <bool kMasked, bool kDrops>
    void weigh(Lanes& lanes, int n, int64_t first, float* weights, float* grads) {
        const int at = n * kWidth;
        const Floats gate = load(lanes.gate + at), limit = load(lanes.limit + at);
        const Floats offset = load(lanes.offset + at), delta = load(lanes.delta + at);
        const Floats inverse = load(lanes.inverse + at);
        const Floats zero = {}, scale = splat(problem_.scale), threshold = splat(problem_.threshold);
        const Ints position = load(lanes.position + at), segment = load(lanes.segment + at);
        const Words low = load(lanes.low + at), high = load(lanes.high + at);
        Floats count = load(lanes.count + at), sum = load(lanes.sum + at), carry = load(lanes.carry + at);
        Floats grad_gate = load(lanes.grad_gate + at), grad_sum = load(lanes.grad_sum + at), mean = load(lanes.mean + at);
        int64_t bad = 0;
        for (int64_t k = first; k < tile_.count; k++) {
            float* place = weights + k * kLanes + at;
            Floats score = load(place) * scale;
            Ints keep = score > threshold;
            if (kMasked) keep &= (position >= tile_.index[k]) & (segment == tile_.segment[k]);
            Ints counts = keep & (count < limit);
            Floats logit = multiply_add(gate, count, score) - offset;
            Floats distance = count;
            count = keep ? count + 1.0f : count;
            if (kMode == Mode::kMaximum) {
                sum = counts & (logit > sum) ? logit : sum;
                continue;
            }
            logit = logit > kLeastExponent ? logit : splat(kLeastExponent);
            Floats weight = counts ? exponential(logit) : zero;
            if (kMode == Mode::kForward) {
                Floats larger = sum + weight;
                carry += weight - (larger - sum);
                sum = larger;
            }
            if (kMode == Mode::kForward && __builtin_expect(bad < tile_.bad_count && tile_.bad[bad] == k, 0)) {
                store(lanes.poison + at, counts ? splat(kNaN) : load(lanes.poison + at));
                bad++;
            }
            if (kMode == Mode::kBackward) weight *= inverse;
            Floats dropped = weight;
            if (kDrops) {
                Ints stays = random_bits(uint32_t(tile_.index[k]), low, high) >= plan_.drop_below;
                dropped = stays ? weight : zero;
                if (kMode == Mode::kBackward) {
                    dropped *= plan_.drop_scale;
                    Floats product = load(grads + k * kLanes + at);
                    store(grads + k * kLanes + at, stays ? product * plan_.drop_scale : zero);
                }
            }
            store(place, dropped);
            if (kMode == Mode::kBackward) {
                float* grad_place = grads + k * kLanes + at;
                Floats grad = weight * (load(grad_place) - delta);
                Floats term = grad * distance, larger = grad_gate + term;
                carry += term - (larger - grad_gate);
                grad_gate = larger;
                grad_sum += grad;
                mean = multiply_add(weight, distance, mean);
                store(grad_place, grad);
            }
        }
        store(lanes.count + at, count);
        store(lanes.sum + at, sum);
        store(lanes.carry + at, carry);
        store(lanes.grad_gate + at, grad_gate);
        store(lanes.grad_sum + at, grad_sum);
        store(lanes.mean + at, mean);
    }

    // Gradients of the tile's keys and values: every row that sees them is under way, so they are
    // complete after this. Rows are taken in order of entry, wherever their lanes are.
    void finish_keys() {
        const int64_t rows = int64_t(order_.size()), batch_rows = 128, keys = tile_.count;
        if (!keys) return filter_order();
        query_index_.resize(rows);
        grad_index_.resize(rows);
        weight_index_.resize(rows);
        for (int64_t t = 0; t < rows; t++) {
            int64_t group = order_[t] / kLanes, lane = order_[t] % kLanes;
            query_index_[t] = group * group_size_ + query_rows_at_ + lane * plan_.width_lanes;
            grad_index_[t] = group * group_size_ + grad_rows_at_ + lane * plan_.value_lanes;
            weight_index_[t] = group * kLargeTile * kLanes + lane;
        }
        for (int64_t begin = 0; begin < rows; begin += batch_rows) {
            int64_t count = std::min(batch_rows, rows - begin);
            add_rows(begin, count, grads_.data, query_index_, plan_.width_lanes, grad_keys_.data);
            add_rows(begin, count, weights_.data, grad_index_, plan_.value_lanes, grad_values_.data);
        }
        for (int64_t k = 0; k < keys; k++) {
            float* row = grad_keys_.data + k * plan_.width_lanes;
            for (int64_t d = 0; d < problem_.width; d++) row[d] = row[d] * problem_.scale + 0.0f;
            plan_.write(problem_.grad_key, batch_, key_head_, tile_.index[k], problem_.width, row);
            plan_.write(problem_.grad_value, batch_, key_head_, tile_.index[k], problem_.value_width,
                        grad_values_.data + k * plan_.value_lanes);
        }
        filter_order();
    }
    void filter_order() {  // rows that have left
        if (int64_t(order_.size()) == active_) return;
        auto gone = [&](int64_t slot) { return !(lanes_[slot / kLanes].active >> (slot % kLanes) & 1); };
        order_.erase(std::remove_if(order_.begin(), order_.end(), gone), order_.end());
    }
    void add_rows(int64_t begin, int64_t count, const float* weights, const std::vector<int64_t>& index,
                  int64_t width, float* to) {
        for (int64_t k = 0; k < tile_.count; k += kKeys) {
            int64_t d = 0;
            Terms terms{count, arena_.data, 0, weights + k * kLanes, 0, index.data() + begin, weight_index_.data() + begin};
            for (; d + kLanes <= width; d += kLanes, terms.a += kLanes)
                multiply<kVectors, kLanes, true>(terms, to + k * width + d, width, begin ? Onto::kSum : Onto::kNothing);
            for (; d < width; d += kWidth, terms.a += kWidth)
                multiply<1, kLanes, true>(terms, to + k * width + d, width, begin ? Onto::kSum : Onto::kNothing);
        }
    }

    // Takes out the rows of a group that are done.
    void retire(size_t group) {
        Lanes& lanes = lanes_[group];
        uint64_t done = 0;
        for (int n = 0; n < kVectors; n++) {
            const int at = n * kWidth;
            Ints over = (load(lanes.count + at) >= load(lanes.limit + at)) |
                        (load(lanes.first_key + at) >= int32_t(tile_.low));
            done |= bits_of(over) << at;
        }
        for (done &= lanes.active; done; done &= done - 1) leave(group, __builtin_ctzll(done));
    }

    // Moves the rows of the last group into free lanes of the others.
    void fold() {
        const size_t from = lanes_.size() - 1;
        size_t to = 0;
        for (uint64_t left = lanes_[from].active; left; left &= left - 1) {
            int lane = __builtin_ctzll(left);
            while (lanes_[to].active == kFull) to++;
            Lanes &source = lanes_[from], &target = lanes_[to];
            if (!target.active) clear(target);
            int free = __builtin_ctzll(~target.active);
            target.active |= uint64_t(1) << free;
            float *const fields[] = {source.gate, source.limit, source.count, source.sum, source.offset,
                                     source.poison, source.delta, source.inverse, source.carry, source.grad_gate,
                                     source.grad_sum, source.mean};
            for (float* field : fields) (field - source.gate + target.gate)[free] = field[lane];
            target.position[free] = source.position[lane];
            target.segment[free] = source.segment[lane];
            target.first_key[free] = source.first_key[lane];
            target.low[free] = source.low[lane];
            target.high[free] = source.high[lane];
            target.row[free] = source.row[lane];
            target.lowest = std::min(target.lowest, source.position[lane]);
            target.highest = std::max(target.highest, source.position[lane]);
            float *old_base = data(from), *new_base = data(to);
            auto move_row = [&](int64_t at, int64_t width) {
                std::memcpy(new_base + at + free * width, old_base + at + lane * width, width * sizeof(float));
            };
            for (int64_t at = 0; at < sums_at_; at += kLanes) new_base[at + free] = old_base[at + lane];
            move_row(sums_at_, sums_width_);
            if (kMode == Mode::kBackward) {
                move_row(query_rows_at_, plan_.width_lanes);
                move_row(grad_rows_at_, plan_.value_lanes);
                std::replace(order_.begin(), order_.end(), int64_t(from) * kLanes + lane, int64_t(to) * kLanes + free);
            }
        }
        lanes_.pop_back();
    }

    void leave(size_t group, int lane) {
        Lanes& lanes = lanes_[group];
        const Row& row = lanes.row[lane];
        float* sums = data(group) + sums_at_ + lane * sums_width_;
        if (kMode == Mode::kMaximum) row.state[0] = lanes.count[lane] > 0 ? lanes.sum[lane] : 0;
        else if (kMode == Mode::kBackward) write_gradient(row, sums, gate_gradient(lanes, lane));
        else finish_forward(plan_, batch_, row, lanes.offset[lane], lanes.sum[lane] + lanes.carry[lane],
                            lanes.poison[lane], sums);
        lanes.active &= ~(uint64_t(1) << lane);
        lanes.limit[lane] = -1;
        active_--;
    }

    static constexpr uint64_t kFull = ~uint64_t(0) >> (64 - kLanes);
    const Plan& plan_;
    const TraProblem& problem_;
    int64_t batch_ = 0, key_head_ = 0;
    int64_t low_ = 0;  // of the next tile
    int64_t active_ = 0;                              // rows under way
    int64_t next_ = 0, next_member_ = 0, last_ = 0;   // the next to enter, its head in the group; the last
    std::vector<Lanes> lanes_;
    std::vector<int64_t> order_;  // backward: lanes of the rows under way, in order of entry
    std::vector<int64_t> query_index_, grad_index_, weight_index_;
    // Parts of a group in the arena: components by lane, and for backward also row by row.
    int64_t grad_at_, sums_at_, sums_width_, query_rows_at_, grad_rows_at_, group_size_;
    Buffer arena_, keys_, values_, weights_, grads_, grad_keys_, grad_values_;
    Tile tile_;
};

// ---------------------------------------------------------------------------------------------
// Few rows: one row at a time, values read only where kept

class SingleRow {
   public:
    explicit SingleRow(const Plan& plan) : plan_(plan), problem_(plan.problem) {}

    void run(int64_t batch, int64_t head, int64_t query) {
        const TraProblem& p = problem_;
        Row row;
        const float* components;
        float room[256], sums[256] = {};
        if (!open_row(plan_, batch, head, query, room, components, row)) return spoil_forward(plan_, batch, row);
        if (row.position < 0) return finish_forward(plan_, batch, row, 0, 0, 0, sums);
        const int64_t key_head = head / plan_.group;
        collect(batch, key_head, row, components);

        const int64_t count = int64_t(kept_.size());
        logits_.resize(round_up(count, kWidth));
        float offset = -kInfinity;
        for (int64_t c = 0; c < count; c++) {
            logits_[c] = multiply_add(row.gate, float(c), scores_[c]);
            offset = std::max(offset, logits_[c]);
        }
        if (row.safe || !count) offset = 0;
        if (!std::isfinite(offset)) return spoil_forward(plan_, batch, row);
        for (int64_t c = 0; c < count; c += kWidth) {
            Floats logit;
            std::memcpy(&logit, &logits_[c], sizeof logit);
            logit = logit - offset;
            logit = logit > kLeastExponent ? logit : splat(kLeastExponent);
            Floats weight = exponential(logit);
            std::memcpy(&logits_[c], &weight, sizeof weight);
        }
        float sum = 0, carry = 0, poison = 0, converted[256];
        for (int64_t c = 0; c < count; c++) {
            float weight = logits_[c], larger = sum + weight;
            carry += weight - (larger - sum);
            sum = larger;
            const float* value = plan_.look(p.value, batch, key_head, kept_[c], p.value_width, converted);
            if (!all_finite(value, p.value_width)) {
                poison = kNaN;
                continue;
            }
            if (plan_.drop_below && random_bits(uint32_t(kept_[c]), row.low, row.high) < plan_.drop_below) continue;
            for (int64_t d = 0; d < p.value_width; d++) sums[d] = multiply_add(weight, value[d], sums[d]);
        }
        finish_forward(plan_, batch, row, offset, sum + carry, poison, sums);
    }

   private:
    // The kept keys and their scores from near to far, up to the row's limit.
    void collect(int64_t batch, int64_t head, const Row& row, const float* query) {
        constexpr int kTogether = 8;  // chains under way at once, to hide the latency of each
        const TraProblem& p = problem_;
        float converted[kTogether][256];
        kept_.clear();
        scores_.clear();
        int64_t key = row.position;
        while (key >= row.first_key) {
            const float* keys[kTogether];
            int64_t index[kTogether];
            int count = 0;
            for (; key >= row.first_key && count < kTogether; key--) {
                if (!plan_.valid(batch, key) || plan_.segment(batch, key) != row.segment) continue;
                keys[count] = plan_.look(p.key, batch, head, key, p.width, converted[count]);
                index[count++] = key;
            }
            if (!count) break;
            for (int u = count; u < kTogether; u++) keys[u] = keys[0];
            float sum[kTogether] = {};
            for (int64_t d = 0; d < p.width; d++)
                for (int u = 0; u < kTogether; u++) sum[u] = multiply_add(query[d], keys[u][d], sum[u]);
            for (int u = 0; u < count; u++) {
                float score = sum[u] * p.scale;
                if (!(score > p.threshold)) continue;
                if (!std::isfinite(score) && !all_finite(keys[u], p.width)) continue;
                kept_.push_back(index[u]);
                scores_.push_back(score);
                if (float(kept_.size()) >= row.limit) return;
            }
        }
    }

    const Plan& plan_;
    const TraProblem& problem_;
    std::vector<int64_t> kept_;
    std::vector<float> scores_, logits_;
};

// ---------------------------------------------------------------------------------------------
// Threads

// Items are handed out one by one; no result depends on who takes which. `Worker` is made once per
// thread and holds its scratch memory.
template <class Worker>
struct Team {
    const Plan& plan;
    int64_t items;
    double work;  // about how many multiplications there are
    std::atomic<int64_t> next{0};
    std::atomic<bool> failed{false};

    static void take_part(void* self) {
        Team& team = *static_cast<Team*>(self);
        try {
            int64_t item = team.next++;
            if (item >= team.items) return;
            Worker worker(team.plan);
            for (; item < team.items && !team.failed; item = team.next++) worker(item);
        } catch (...) {
            team.failed = true;
        }
    }
    bool run() {
        double worth = std::min(1 + work / kThreadWork, 1e6);  // waking a thread costs time too
        int64_t threads = std::min({int64_t(plan.problem.threads), items, int64_t(worth)});
        if (threads <= 1) {
            take_part(this);
        } else if (plan.problem.parallel) {
            plan.problem.parallel(&take_part, this, unsigned(threads), 0);
        } else {
            std::vector<std::thread> others;
            try {
                for (int64_t t = 1; t < threads; t++) others.emplace_back(&take_part, this);
            } catch (...) {  // fewer threads then
            }
            take_part(this);
            for (std::thread& other : others) other.join();
        }
        return !failed;
    }
};

// What decoding is likely to cost if half of the keys are kept.
double row_work(const Plan& plan) {
    const TraProblem& p = plan.problem;
    if (p.score_bound < 0) return kInfinity;
    const float* gates = static_cast<const float*>(p.log_gate.data);
    double keys = 0;
    for (int64_t row = 0; row < p.batch * p.query_heads * p.query_length; row++) {
        int64_t query = row % p.query_length, head = row / p.query_length;
        keys -= 2 * plan.decay / gates[plan.offset(p.log_gate, head / p.query_heads, head % p.query_heads, query)];
    }
    return keys >= 0 ? keys * p.width : kInfinity;
}

struct NormWorker {
    Plan& plan;
    explicit NormWorker(const Plan& p) : plan(const_cast<Plan&>(p)) {}
    void operator()(int64_t item) { plan.find_norms(item / plan.problem.key_heads, item % plan.problem.key_heads); }
};

struct RowWorker {
    const TraProblem& p;
    SingleRow single;
    explicit RowWorker(const Plan& plan) : p(plan.problem), single(plan) {}
    void operator()(int64_t item) {
        single.run(item / p.query_length / p.query_heads, item / p.query_length % p.query_heads, item % p.query_length);
    }
};

int64_t rows_per_item(const Plan& plan) {
    const TraProblem& p = plan.problem;
    if (!(p.tolerance > 0)) return std::max<int64_t>(1, kFullVisitRows / plan.group);
    int64_t heads = std::max<int64_t>(1, p.batch * p.key_heads), wanted = p.threads > 1 ? 2 * p.threads : 1;
    if (heads >= wanted) return p.query_length;
    return std::max<int64_t>(2048 / plan.group + 1, p.query_length * heads / wanted + 1);
}

struct ForwardWorker {
    const Plan& plan;
    Walk<Mode::kMaximum> maximum;
    Walk<Mode::kForward> forward;
    explicit ForwardWorker(const Plan& p) : plan(p), maximum(p), forward(p) {}
    void operator()(int64_t item) {
        const TraProblem& p = plan.problem;
        // The last rows of a head are the dearest: they come first.
        int64_t size = rows_per_item(plan), heads = p.batch * p.key_heads;
        int64_t blocks = (p.query_length + size - 1) / size;
        int64_t block = blocks - 1 - item / heads, head = item % heads;
        int64_t begin = block * size, end = std::min(p.query_length, begin + size);
        if (p.score_bound < 0 || p.score_bound * kBoundSlack > kSafeBound || p.threshold < -kSafeBound)
            maximum.run(head / p.key_heads, head % p.key_heads, begin, end);
        forward.run(head / p.key_heads, head % p.key_heads, begin, end);
    }
};

struct BackwardWorker {
    const Plan& plan;
    Walk<Mode::kBackward> walk;
    explicit BackwardWorker(const Plan& p) : plan(p), walk(p) {}
    void operator()(int64_t item) {
        const TraProblem& p = plan.problem;
        const float zeros[256] = {};
        int64_t batch = item / p.key_heads, head = item % p.key_heads;
        for (int64_t key = 0; key < p.key_length; key++) {  // some are masked or beyond every row's reach
            plan.write(p.grad_key, batch, head, key, p.width, zeros);
            plan.write(p.grad_value, batch, head, key, p.value_width, zeros);
        }
        walk.run(batch, head, 0, p.query_length);
    }
};

template <class Worker>
int run_team(const Plan& plan, int64_t items, double work) {
    Team<Worker> team{plan, items, work};
    return team.run() ? 0 : 1;
}

template <class Function>
int guarded(Function function) {
    try {
        return function();
    } catch (...) {
        return 1;
    }
}

}  // namespace

// Both return 0, or 1 when memory ran out.
extern "C" int TRA_JOIN(tra_forward_, TRA_VARIANT)(const TraProblem* problem) {
    return guarded([&] {
        const TraProblem& p = *problem;
        Plan plan(p);
        int64_t heads = p.batch * p.key_heads;
        double keys = double(heads) * p.key_length * p.width, work = keys * p.query_length * plan.group;
        if (p.score_bound < 0 && run_team<NormWorker>(plan, heads, keys)) return 1;
        if (p.query_length * plan.group <= kFewRows)
            return run_team<RowWorker>(plan, p.batch * p.query_heads * p.query_length, std::min(work, row_work(plan)));
        int64_t size = rows_per_item(plan);
        return run_team<ForwardWorker>(plan, heads * ((p.query_length + size - 1) / size), work);
    });
}

extern "C" int TRA_JOIN(tra_backward_, TRA_VARIANT)(const TraProblem* problem) {
    return guarded([&] {
        const TraProblem& p = *problem;
        Plan plan(p);
        int64_t heads = p.batch * p.key_heads;
        double keys = double(heads) * p.key_length * p.width, work = 2 * keys * p.query_length * plan.group;
        if (p.score_bound < 0 && run_team<NormWorker>(plan, heads, keys)) return 1;
        return run_team<BackwardWorker>(plan, heads, work);
    });
}

#ifdef TRA_DISPATCH  // in one of the variants only: the best one this machine runs
extern "C" const char* tra_variant() {
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
        return "avx512";
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return "avx2";
#endif
    return "generic";
}
#endif
