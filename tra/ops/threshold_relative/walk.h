// Many rows of one head: rows in lanes, keys from near to far, finished rows replaced.
#pragma once

#include "row.h"

namespace {

// Rows of one head in one work item when everything is visited: their state stays in L2.
constexpr int64_t kFullVisitRows = 512;
// With an early stop an item has at least this many: every item packs its keys anew.
constexpr int64_t kLeastRows = 2048;
// Rows of one head in one block of backward, at least: every block ends with few of them under way.
constexpr int64_t kLeastBackwardRows = 8192;
constexpr int64_t kMostBackwardBlocks = 8;
constexpr int64_t kLargeTile = 8 * kKeys, kSmallTile = 3 * kKeys;
// Rows are asked for this long before they enter: they come backwards, which the machine does not foresee.
constexpr int64_t kAhead = 8;
// With this many rows under way a large tile's traffic matters more than its ragged ends.
constexpr int64_t kManyRows = 768;
// Gradients are differences of nearly equal products when one key dominates. Nothing but accuracy
// depends on their bits, so they are summed in short chains.
constexpr int64_t kShortChain = 32;

// kMaximum goes before kForward where scores may be too large to be exponentiated as they are, and
// finds the offsets of such rows.
enum class Mode { kMaximum, kForward, kBackward };

// A sum for each lane, span by span.
struct LaneSums {
    float partial[kLanes], total[kLanes], lost[kLanes];
    void settle() { ::settle(partial, total, lost, kLanes); }
    float result(int lane) const {
        float whole = total[lane], rest = lost[lane];
        add_term(whole, rest, partial[lane]);
        return whole + rest;
    }
};

// What rows carry along on their walk, a lane for each. Every member is an array of kLanes numbers of
// four bytes: move_lane() and clear_lane() take a struct of them as the matrix that it is.
struct alignas(64) CommonLanes {
    float gate[kLanes];
    float limit[kLanes];   // the count at which the row is done; -1 in a free lane
    float count[kLanes];   // kept keys so far
    float offset[kLanes];  // subtracted from every logit
    int32_t position[kLanes];
    int32_t segment[kLanes];
    int32_t first_key[kLanes];
    uint32_t random_low[kLanes];
    uint32_t random_high[kLanes];
};

template <Mode kMode>
struct Lanes;

template <>
struct Lanes<Mode::kMaximum> : CommonLanes {
    float largest[kLanes];  // logit so far
};

template <>
struct Lanes<Mode::kForward> : CommonLanes {
    LaneSums sum;          // of weights
    float poison[kLanes];  // NaN once the row has kept a value that is not finite
};

template <>
struct Lanes<Mode::kBackward> : CommonLanes {
    float delta[kLanes];
    float inverse[kLanes];  // one over the sum that forward found
    LaneSums grad_gate;     // of gradients times distances
    LaneSums grad_sum;      // of gradients: zero but for rounding
    LaneSums mean;          // distance: sum of weights times distances
};

template <class Struct>
void move_lane(const Struct& source, int from, Struct& target, int to) {
    static_assert(sizeof(Struct) % (4 * kLanes) == 0, "only arrays of kLanes numbers of four bytes");
    const char* old_lane = reinterpret_cast<const char*>(&source) + 4 * from;
    char* new_lane = reinterpret_cast<char*>(&target) + 4 * to;
    for (size_t at = 0; at < sizeof(Struct); at += 4 * kLanes) std::memcpy(new_lane + at, old_lane + at, 4);
}
template <class Struct>
void clear_lane(Struct& lanes, int lane) {
    static const Struct zeros = {};
    move_lane(zeros, lane, lanes, lane);
}

// Rows that share the lanes of vectors.
template <Mode kMode>
struct Group {
    static constexpr uint64_t kFull = ~uint64_t(0) >> (64 - kLanes);
    Lanes<kMode> lanes;
    Row row[kLanes];
    uint64_t active;          // one bit per lane
    uint64_t settled;         // rows whose results have totals
    int32_t lowest, highest;  // positions seen since the group was last empty

    Group() { clear(); }
    bool full() const { return active == kFull; }
    void clear() {
        lanes = {};
        std::fill_n(lanes.limit, kLanes, -1.0f);
        active = settled = 0;
        lowest = std::numeric_limits<int32_t>::max();
        highest = -1;
    }
    // The lane that the row gets; what it carries is still to be filled in.
    int take(const Row& entering) {
        if (!active) clear();
        int lane = __builtin_ctzll(~active);
        active |= uint64_t(1) << lane;
        settled &= ~(uint64_t(1) << lane);
        row[lane] = entering;
        lowest = std::min(lowest, entering.position);
        highest = std::max(highest, entering.position);
        return lane;
    }
    void release(int lane) {
        active &= ~(uint64_t(1) << lane);
        lanes.limit[lane] = -1;
    }
};

// Valid keys of one stretch, nearest first, packed as fp32 rows.
struct Tile {
    int64_t low, high;  // the stretch [low, high)
    bool ends_span;
    int64_t count;
    int32_t index[kLargeTile];
    int32_t segment[kLargeTile];
    int64_t bad_count;  // keys whose value is not finite; it is packed as zero
    int32_t bad[kLargeTile];
};

// Gradients of the keys before `high` and of their values that some rows leave for others to add: from the nearest
// key to the farthest that was visited, each key's before its value's.
struct KeyGradients {
    int64_t high = 0, count = 0, width = 0;
    Buffer rows;

    // Keys come in decreasing order; those between them have gradients of zero.
    float* add(int64_t key) {
        const int64_t place = high - 1 - key;
        rows.reserve((place + 1) * width);
        std::memset(rows.data + count * width, 0, (place - count) * width * sizeof(float));
        count = place + 1;
        return rows.data + place * width;
    }
    bool has(int64_t key) const { return key < high && key >= high - count; }
    const float* find(int64_t key) const { return rows.data + (high - 1 - key) * width; }
};

// What a vector of rows makes of one key after another from the tile's `first` on, with its sums in registers. A key `counts`
// where it is kept and within the row's limit; `distance` is the count before it. Forward and backward
// leave the key's weight in `place`; backward finds in `grads` the products of the output's gradient and
// the tile's values, and leaves the gradients of the scores there.
template <Mode kMode, bool kDrops>
struct Rule;

inline Floats weight_of(Ints counts, Floats logit) {
    logit = logit > kLeastExponent ? logit : splat(kLeastExponent);
    return counts ? exponential(logit) : Floats{};
}

template <bool kDrops>
struct Rule<Mode::kMaximum, kDrops> {
    Lanes<Mode::kMaximum>& lanes;
    const int at;
    Floats largest;

    Rule(const Plan&, const Tile&, int64_t, float*, Lanes<Mode::kMaximum>& of, int lane)
        : lanes(of), at(lane), largest(load(of.largest + lane)) {}
    void meet(int64_t, Ints counts, Floats logit, Floats, float*) {
        largest = (counts & (logit > largest)) ? logit : largest;
    }
    void save() { store(lanes.largest + at, largest); }
};

template <bool kDrops>
struct Rule<Mode::kForward, kDrops> {
    const Plan& plan;
    const Tile& tile;
    Lanes<Mode::kForward>& lanes;
    const int at;
    const Words random_low, random_high;
    Floats sum;
    int64_t bad = 0;  // how many of the tile's bad values are behind us

    Rule(const Plan& p, const Tile& t, int64_t first, float*, Lanes<Mode::kForward>& of, int lane)
        : plan(p), tile(t), lanes(of), at(lane), random_low(load(of.random_low + lane)),
          random_high(load(of.random_high + lane)), sum(load(of.sum.partial + lane)) {
        while (bad < tile.bad_count && tile.bad[bad] < first) bad++;
    }
    void meet(int64_t k, Ints counts, Floats logit, Floats, float* place) {
        Floats weight = weight_of(counts, logit);
        sum += weight;
        if (__builtin_expect(bad < tile.bad_count && tile.bad[bad] == k, 0)) {
            store(lanes.poison + at, counts ? splat(kNaN) : load(lanes.poison + at));
            bad++;
        }
        if (kDrops) {
            Ints stays = random_bits(uint32_t(tile.index[k]), random_low, random_high) >= plan.drop_below;
            weight = stays ? weight : Floats{};
        }
        store(place, weight);
    }
    void save() { store(lanes.sum.partial + at, sum); }
};

template <bool kDrops>
struct Rule<Mode::kBackward, kDrops> {
    const Plan& plan;
    const Tile& tile;
    float* const grads;
    Lanes<Mode::kBackward>& lanes;
    const int at;
    const Words random_low, random_high;
    const Floats delta, inverse;
    Floats grad_gate, grad_sum, mean;

    Rule(const Plan& p, const Tile& t, int64_t, float* products, Lanes<Mode::kBackward>& of, int lane)
        : plan(p), tile(t), grads(products), lanes(of), at(lane), random_low(load(of.random_low + lane)),
          random_high(load(of.random_high + lane)), delta(load(of.delta + lane)), inverse(load(of.inverse + lane)),
          grad_gate(load(of.grad_gate.partial + lane)), grad_sum(load(of.grad_sum.partial + lane)),
          mean(load(of.mean.partial + lane)) {}
    void meet(int64_t k, Ints counts, Floats logit, Floats distance, float* place) {
        float* grad_place = grads + k * kLanes + at;
        Floats weight = weight_of(counts, logit) * inverse, dropped = weight, grad_weight = load(grad_place);
        if (kDrops) {
            Ints stays = random_bits(uint32_t(tile.index[k]), random_low, random_high) >= plan.drop_below;
            dropped = (stays ? weight : Floats{}) * plan.drop_scale;
            grad_weight = stays ? grad_weight * plan.drop_scale : Floats{};
        }
        Floats grad = weight * (grad_weight - delta);
        grad_gate = multiply_add(grad, distance, grad_gate);
        grad_sum += grad;
        mean = multiply_add(weight, distance, mean);
        store(place, dropped);
        store(grad_place, grad);
    }
    void save() {
        store(lanes.grad_gate.partial + at, grad_gate);
        store(lanes.grad_sum.partial + at, grad_sum);
        store(lanes.mean.partial + at, mean);
    }
};

template <Mode kMode>
class Walk {
   public:
    explicit Walk(const Plan& plan) : plan_(plan), problem_(plan.problem) {
        const bool backward = kMode == Mode::kBackward;
        result_width_ = backward ? plan.width_lanes : kMode == Mode::kForward ? plan.value_lanes : 0;
        grad_at_ = problem_.width * kLanes;
        result_at_ = grad_at_ + (backward ? problem_.value_width * kLanes : 0);
        total_at_ = result_at_ + result_width_ * round_up(kLanes, kKeys);
        lost_at_ = total_at_ + result_width_ * kLanes;
        query_rows_at_ = lost_at_ + result_width_ * kLanes;
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

    // Rows [begin, end) of all query heads that share one key head. Backward leaves the gradients of keys before
    // apart->high there: other rows have a part in them too.
    void run(int64_t batch, int64_t key_head, int64_t begin, int64_t end, KeyGradients* apart = nullptr) {
        apart_ = apart;
        batch_ = batch;
        key_head_ = key_head;
        groups_.clear();
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
                admit_all(choose_next_low());
                if (!active_) continue;
            }
            tile_.high = tile_.low;
            tile_.low = next_low_;
            tile_.ends_span = tile_.low == span_;
            pack_tile();
            const int64_t low = choose_next_low();
            const size_t groups = groups_.size();
            for (size_t group = 0; group < groups; group++) {
                if (!groups_[group].active) continue;
                if (groups_[group].active >> kWidth) visit<kVectors>(group);
                else visit<1>(group);
                retire(group);
                // The next tile's rows come in while the group is in the nearest cache. Backward
                // must wait: finish_keys() still needs the rows that left.
                if (kMode != Mode::kBackward) admit(low, group);
            }
            if (kMode == Mode::kBackward) finish_keys();
            admit_all(low);
            while (!groups_.empty() && int64_t(groups_.size() - 1) * kLanes >= active_ + spare()) fold();
        }
    }

   private:
    int64_t position_of(int64_t query) const { return query + problem_.key_length - problem_.query_length; }
    int64_t choose_next_low() {
        if (!tile_.low) return next_low_ = 0;
        bool large = !(problem_.tolerance > 0) || active_ > kManyRows;
        span_ = plan_.span_start(batch_, tile_.low - 1);
        return next_low_ = std::max(span_, tile_.low - (large ? kLargeTile : kSmallTile));
    }
    // Rows at or after `low` take free lanes.
    void admit(int64_t low, size_t group) {
        while (next_ >= last_ && position_of(next_) >= low && !groups_[group].full()) enter(group);
    }
    void admit_all(int64_t low) {
        for (size_t group = 0; next_ >= last_ && position_of(next_) >= low; group++) {
            if (group == groups_.size()) add_group();
            admit(low, group);
        }
    }
    // Lanes to keep free for rows to come, so that groups do not come and go.
    int64_t spare() const { return next_ < last_ ? 0 : kWidth / 2; }
    float* data(size_t group) { return arena_.data + group * group_size_; }

    void add_group() {
        const size_t group = groups_.size();
        groups_.emplace_back();
        arena_.reserve((group + 1) * group_size_);
        std::memset(data(group), 0, group_size_ * sizeof(float));
    }

    // Puts the next row into a free lane of the group, unless there is nothing to walk for it.
    void enter(size_t group) {
        Row row;
        Components room, grad;
        float offset = 0, delta = 0;
        const float* query;
        const int64_t head = key_head_ * plan_.group + next_member_;
        bool fine = open_row(plan_, batch_, head, next_, room, query, row);
        expect_row(head, next_ - kAhead);
        if (--next_member_ < 0) {
            next_member_ = plan_.group - 1;
            next_--;
        }
        if (kMode == Mode::kMaximum) {
            if (!fine || row.safe) return;
        } else if (kMode == Mode::kForward) {
            offset = row.safe ? row.offset : row.state->offset;
            if (!fine || !std::isfinite(offset)) return spoil_forward(plan_, row);
            if (row.position < 0) return empty_forward(plan_, row);
        } else {
            if (!fine || !open_backward(plan_, row, grad, delta)) return fill_backward(plan_, row, kNaN);
            if (row.position < 0 || row.state->sum == 0) return fill_backward(plan_, row, 0);
            offset = row.state->offset;
        }

        const int lane = groups_[group].take(row);
        active_++;
        Lanes<kMode>& lanes = groups_[group].lanes;
        clear_lane(lanes, lane);
        lanes.gate[lane] = row.gate;
        lanes.limit[lane] = row.limit;
        lanes.offset[lane] = offset;
        lanes.position[lane] = row.position;
        lanes.segment[lane] = row.segment;
        lanes.first_key[lane] = row.first_key;
        lanes.random_low[lane] = row.random_low;
        lanes.random_high[lane] = row.random_high;
        if constexpr (kMode == Mode::kMaximum) lanes.largest[lane] = -kInfinity;

        float* base = data(group);
        scatter(base + lane, query, problem_.width);
        std::memset(base + result_at_ + lane * result_width_, 0, result_width_ * sizeof(float));
        if constexpr (kMode == Mode::kBackward) {
            lanes.delta[lane] = delta;
            lanes.inverse[lane] = 1 / row.state->sum;
            scatter(base + grad_at_ + lane, grad, problem_.value_width);
            std::memcpy(base + query_rows_at_ + lane * plan_.width_lanes, query, problem_.width * 4);
            std::memcpy(base + grad_rows_at_ + lane * plan_.value_lanes, grad, problem_.value_width * 4);
            order_.push_back(int64_t(group) * kLanes + lane);
        }
    }

    void expect_row(int64_t head, int64_t query) {
        plan_.expect(problem_.query, batch_, head, query, problem_.width);
        if (kMode != Mode::kBackward) return;
        plan_.expect(problem_.output, batch_, head, query, problem_.value_width);
        plan_.expect(problem_.grad_output, batch_, head, query, problem_.value_width);
    }

    static void scatter(float* column, const float* from, int64_t count) {
        for (int64_t d = 0; d < count; d++) column[d * kLanes] = from[d];
    }

    void pack_tile() {
        Tile& tile = tile_;
        tile.count = tile.bad_count = 0;
        for (int64_t key = tile.high - 1; key >= tile.low; key--) {
            if (!plan_.valid(batch_, key)) continue;
            plan_.expect(problem_.key, batch_, key_head_, key - kSmallTile, problem_.width);
            plan_.expect(problem_.value, batch_, key_head_, key - kSmallTile, problem_.value_width);
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
        for (int64_t k = first; k < tile_.count; k += kKeys) {
            int64_t d = 0;
            do {  // once even without components: their sum is 0
                multiply<kCount, kStride, false>(
                    {std::min(chain, width - d), lanes + d * kLanes, kLanes, rows + k * kStride + d, 1},
                    to + k * kLanes, kLanes, d ? Onto::kTotal : Onto::kNothing);
                d += chain;
            } while (d < width);
        }
    }
    template <int kCount>
    void products(int64_t stride, const float* lanes, int64_t width, int64_t chain, const float* rows, int64_t first,
                  float* to) {
        if (stride == kWidest / 4) products<kWidest / 4, kCount>(lanes, width, chain, rows, first, to);
        else if (stride == kWidest / 2) products<kWidest / 2, kCount>(lanes, width, chain, rows, first, to);
        else products<kWidest, kCount>(lanes, width, chain, rows, first, to);
    }

    // All keys of the tile against one group of rows.
    template <int kCount>
    void visit(size_t index) {
        Group<kMode>& group = groups_[index];
        float* base = data(index);
        const int64_t count = tile_.count, tile_size = kLargeTile * kLanes;
        float* weights = weights_.reserve((kMode == Mode::kBackward ? index + 1 : 1) * tile_size + kKeys);
        float* grads = nullptr;
        if (kMode == Mode::kBackward) {
            weights += index * tile_size;
            grads = grads_.reserve((index + 1) * tile_size + kKeys) + index * tile_size;
        }
        int64_t first = 0;  // skip keys that lie after all rows of the group
        while (first < count && tile_.index[first] > group.highest) first++;
        first -= first % kKeys;
        products<kCount>(plan_.key_stride, base, problem_.width, problem_.width, keys_.data, first, weights);
        if (kMode == Mode::kBackward)
            products<kCount>(plan_.value_stride, base + grad_at_, problem_.value_width, kShortChain, values_.data,
                             first, grads);

        const bool masked = problem_.segment_ids || (count && tile_.index[0] > group.lowest);
        const bool drops = plan_.drop_below && kMode != Mode::kMaximum;
        float counted[kLanes];
        std::memcpy(counted, group.lanes.count, sizeof counted);
        uint64_t beyond = 0;
        for (int n = 0; n < kCount; n++) {
            if (masked && drops) beyond |= weigh<true, true>(group.lanes, n, first, weights, grads);
            else if (masked) beyond |= weigh<true, false>(group.lanes, n, first, weights, grads);
            else if (drops) beyond |= weigh<false, true>(group.lanes, n, first, weights, grads);
            else beyond |= weigh<false, false>(group.lanes, n, first, weights, grads);
        }
        if (kMode == Mode::kForward) {
            if (__builtin_expect(beyond != 0, 0)) check_bound<kCount>(group, base, first, counted);
            add_keys(group.active, first, weights, values_.data, plan_.value_stride, base + result_at_);
            if (tile_.ends_span) settle(group, base);
        } else if (kMode == Mode::kBackward) {
            add_keys(group.active, first, grads, keys_.data, plan_.key_stride, base + result_at_);
            if (tile_.ends_span) settle(group, base);
            std::memset(weights, 0, first * kLanes * sizeof(float));
            std::memset(grads, 0, first * kLanes * sizeof(float));
        }
    }

    // Every row of the group adds the packed rows of the tile, weighted.
    void add_keys(uint64_t active, int64_t first, const float* weights, const float* rows, int64_t stride,
                  float* results) {
        for (int lane = 0; lane < kLanes; lane += kKeys, active >>= kKeys) {
            if (!(active & ((1u << kKeys) - 1))) continue;
            Terms terms{tile_.count - first, rows + first * stride, stride, weights + first * kLanes + lane, kLanes};
            float* to = results + lane * result_width_;
            int64_t d = 0;
            for (; d + kLanes <= result_width_; d += kLanes, terms.a += kLanes)
                multiply<kVectors, 1, false>(terms, to + d, result_width_, Onto::kSum);
            for (; d < result_width_; d += kWidth, terms.a += kWidth)
                multiply<1, 1, false>(terms, to + d, result_width_, Onto::kSum);
        }
    }

    // At the end of a span, the sums over it go to their totals.
    void settle(Group<kMode>& group, float* base) {
        if constexpr (kMode == Mode::kForward) group.lanes.sum.settle();
        if constexpr (kMode == Mode::kBackward)
            for (LaneSums* sums : {&group.lanes.grad_gate, &group.lanes.grad_sum, &group.lanes.mean}) sums->settle();
        for (uint64_t left = group.active; left; left &= left - 1) settle_row(group, base, __builtin_ctzll(left));
    }
    // Totals are not even cleared for rows that end within their first span.
    void settle_row(Group<kMode>& group, float* base, int lane) {
        const int64_t at = lane * result_width_;
        float *partial = base + result_at_ + at, *total = base + total_at_ + at, *lost = base + lost_at_ + at;
        if (!(group.settled >> lane & 1))
            for (float* sums : {total, lost}) std::memset(sums, 0, result_width_ * sizeof(float));
        group.settled |= uint64_t(1) << lane;
        ::settle(partial, total, lost, result_width_);
    }
    // What a row has summed up, in place.
    float* result(Group<kMode>& group, float* base, int lane) {
        const int64_t at = lane * result_width_;
        if (!(group.settled >> lane & 1)) return base + result_at_ + at;
        settle_row(group, base, lane);
        float *total = base + total_at_ + at, *lost = base + lost_at_ + at;
        for (int64_t d = 0; d < result_width_; d++) total[d] += lost[d];
        return total;
    }

    // Walks one vector of rows past the keys of the tile: which are kept, and at what distance. As a call
    // of its own it would take a few percent more time. Nonzero: forward met a score, kept or not, beyond
    // the caller's bound.
    template <bool kMasked, bool kDrops>
    __attribute__((always_inline)) inline uint64_t weigh(Lanes<kMode>& lanes, int n, int64_t first, float* weights,
                                                         float* grads) {
        const int at = n * kWidth;
        const Floats gate = load(lanes.gate + at), limit = load(lanes.limit + at), offset = load(lanes.offset + at);
        const Floats scale = splat(problem_.scale), threshold = splat(problem_.threshold);
        const Ints position = load(lanes.position + at), segment = load(lanes.segment + at);
        Floats largest = {};  // magnitude of a score
        Floats count = load(lanes.count + at);
        Rule<kMode, kDrops> rule(plan_, tile_, first, grads, lanes, at);
        for (int64_t k = first; k < tile_.count; k++) {
            float* place = weights + k * kLanes + at;
            Floats score = load(place) * scale;
            Ints keep = score > threshold;
            if (kMasked) keep &= (position >= tile_.index[k]) & (segment == tile_.segment[k]);
            Ints counts = keep & (count < limit);
            if (kMode == Mode::kForward) largest = larger((Floats)((Ints)score & 0x7fffffff), largest);
            Floats logit = multiply_add(gate, count, score) - offset;
            Floats distance = count;
            count = keep ? count + 1.0f : count;
            rule.meet(k, counts, logit, distance, place);
        }
        store(lanes.count + at, count);
        rule.save();
        return bits_of(largest > splat(plan_.largest_score));
    }

    // Is one of the scores beyond the caller's bound that of a kept key, within its row's limit? Weights have taken
    // the scores' place, so they are computed again; `counted` is what the rows had counted before the tile.
    template <int kCount>
    __attribute__((noinline, cold)) void check_bound(const Group<kMode>& group, const float* base, int64_t first,
                                                     const float* counted) {
        const Lanes<kMode>& lanes = group.lanes;
        float* scores = scores_.reserve(kLargeTile * kLanes + kKeys);
        products<kCount>(plan_.key_stride, base, problem_.width, problem_.width, keys_.data, first, scores);
        for (uint64_t left = group.active; left; left &= left - 1) {
            const int lane = __builtin_ctzll(left);
            float count = counted[lane];
            for (int64_t k = first; k < tile_.count && count < lanes.limit[lane]; k++) {
                if (lanes.position[lane] < tile_.index[k] || lanes.segment[lane] != tile_.segment[k]) continue;
                const float score = scores[k * kLanes + lane] * problem_.scale;
                if (!(score > problem_.threshold)) continue;
                if (std::fabs(score) > plan_.largest_score) plan_.bound_broken = true;
                count++;
            }
        }
    }

    // Gradients of the tile's keys and values: every row that sees them is under way, so they are
    // complete after this. Rows are taken in order of entry, wherever their lanes are.
    void finish_keys() {
        // Chains of this many rows keep sums over thousands of them exact. Who is in a chain depends on the tiles,
        // but those rows are walked by one thread, whatever the others do.
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
            float* grad_key = grad_keys_.data + k * plan_.width_lanes;
            const float* grad_value = grad_values_.data + k * plan_.value_lanes;
            if (tile_.index[k] >= apart_->high) {
                finish_key(plan_, batch_, key_head_, tile_.index[k], grad_key, grad_value);
                continue;
            }
            float* row = apart_->add(tile_.index[k]);
            std::memcpy(row, grad_key, problem_.width * sizeof(float));
            std::memcpy(row + problem_.width, grad_value, problem_.value_width * sizeof(float));
        }
        filter_order();
    }
    void filter_order() {  // rows that have left
        if (int64_t(order_.size()) == active_) return;
        auto gone = [&](int64_t slot) { return !(groups_[slot / kLanes].active >> (slot % kLanes) & 1); };
        order_.erase(std::remove_if(order_.begin(), order_.end(), gone), order_.end());
    }
    void add_rows(int64_t begin, int64_t count, const float* weights, const std::vector<int64_t>& index,
                  int64_t width, float* to) {
        const Onto onto = begin ? Onto::kTotal : Onto::kNothing;
        for (int64_t k = 0; k < tile_.count; k += kKeys) {
            int64_t d = 0;
            Terms terms{count, arena_.data, 0, weights + k * kLanes, 0, index.data() + begin,
                        weight_index_.data() + begin};
            for (; d + kLanes <= width; d += kLanes, terms.a += kLanes)
                multiply<kVectors, kLanes, true>(terms, to + k * width + d, width, onto);
            for (; d < width; d += kWidth, terms.a += kWidth)
                multiply<1, kLanes, true>(terms, to + k * width + d, width, onto);
        }
    }

    // Takes out the rows of a group that are done.
    void retire(size_t group) {
        const Lanes<kMode>& lanes = groups_[group].lanes;
        uint64_t done = 0;
        for (int n = 0; n < kVectors; n++) {
            const int at = n * kWidth;
            Ints over = (load(lanes.count + at) >= load(lanes.limit + at)) |
                        (load(lanes.first_key + at) >= int32_t(tile_.low));
            done |= bits_of(over) << at;
        }
        for (done &= groups_[group].active; done; done &= done - 1) leave(group, __builtin_ctzll(done));
    }

    // Moves the rows of the last group into free lanes of the others.
    void fold() {
        const size_t from = groups_.size() - 1;
        size_t to = 0;
        for (uint64_t left = groups_[from].active; left; left &= left - 1) {
            const int lane = __builtin_ctzll(left);
            while (groups_[to].full()) to++;
            Group<kMode> &source = groups_[from], &target = groups_[to];
            const int free = target.take(source.row[lane]);
            target.settled |= (source.settled >> lane & 1) << free;
            move_lane(source.lanes, lane, target.lanes, free);
            float *old_base = data(from), *new_base = data(to);
            auto move_row = [&](int64_t at, int64_t width) {
                std::memcpy(new_base + at + free * width, old_base + at + lane * width, width * sizeof(float));
            };
            for (int64_t at = 0; at < result_at_; at += kLanes) new_base[at + free] = old_base[at + lane];
            for (int64_t at : {result_at_, total_at_, lost_at_}) move_row(at, result_width_);
            if (kMode == Mode::kBackward) {
                move_row(query_rows_at_, plan_.width_lanes);
                move_row(grad_rows_at_, plan_.value_lanes);
                std::replace(order_.begin(), order_.end(), int64_t(from) * kLanes + lane, int64_t(to) * kLanes + free);
            }
        }
        groups_.pop_back();
    }

    void leave(size_t group, int lane) {
        const Lanes<kMode>& lanes = groups_[group].lanes;
        const Row& row = groups_[group].row[lane];
        float* sums = result(groups_[group], data(group), lane);
        if constexpr (kMode == Mode::kMaximum) {
            row.state->offset = lanes.count[lane] > 0 ? lanes.largest[lane] : 0;
        } else if constexpr (kMode == Mode::kForward) {
            if (std::isnan(lanes.poison[lane])) spoil_forward(plan_, row);
            else if (!finish_forward(plan_, row, lanes.offset[lane], lanes.sum.result(lane), sums))
                SingleRow(plan_).run(row.batch, row.head, row.query);
        } else {
            // Distances are taken from their mean: an error in delta, which shifts all gradients of a row in
            // proportion to their weights, then cancels instead of being multiplied by the mean distance.
            float shift = lanes.mean.result(lane) * lanes.grad_sum.result(lane);
            finish_backward(plan_, row, sums, lanes.grad_gate.result(lane) - shift);
        }
        groups_[group].release(lane);
        active_--;
    }

    const Plan& plan_;
    const TraProblem& problem_;
    int64_t batch_ = 0, key_head_ = 0;
    KeyGradients* apart_ = nullptr;
    int64_t next_low_ = 0, span_ = 0;                // where the tile after this one ends, and its span
    int64_t active_ = 0;                             // rows under way
    int64_t next_ = 0, next_member_ = 0, last_ = 0;  // the next to enter, its head in the group; the last
    std::vector<Group<kMode>> groups_;
    std::vector<int64_t> order_;  // backward: lanes of the rows under way, in order of entry
    std::vector<int64_t> query_index_, grad_index_, weight_index_;
    // Parts of a group in the arena: components by lane, for backward also row by row, and row by row
    // what the walk sums up for the row: its output in forward, its query's gradient in backward.
    int64_t grad_at_, result_at_, total_at_, lost_at_, result_width_, query_rows_at_, grad_rows_at_, group_size_;
    Buffer arena_, keys_, values_, scores_, weights_, grads_, grad_keys_, grad_values_;
    Tile tile_;
};

int64_t rows_per_item(const Plan& plan) {
    const TraProblem& p = plan.problem;
    if (!(p.tolerance > 0)) return std::max<int64_t>(1, kFullVisitRows / plan.group);
    int64_t heads = std::max<int64_t>(1, p.batch * p.key_heads), wanted = p.threads > 1 ? 2 * p.threads : 1;
    if (heads >= wanted) return p.query_length;
    return std::max<int64_t>(kLeastRows / plan.group + 1, p.query_length * heads / wanted + 1);
}

int64_t forward_items(const Plan& plan) {
    const TraProblem& p = plan.problem;
    int64_t size = rows_per_item(plan);
    return p.batch * p.key_heads * ((p.query_length + size - 1) / size);
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
        if (!plan.all_safe)
            maximum.run(head / p.key_heads, head % p.key_heads, begin, end);
        forward.run(head / p.key_heads, head % p.key_heads, begin, end);
    }
};

// Backward walks a head in blocks of rows. Which rows form a block depends on the length alone, so that bits do not
// depend on who walks them. A key gets its gradients from several blocks; what they leave for each other takes memory,
// so there must not be many.
struct BackwardShare {
    const TraProblem& problem;
    const int64_t size, blocks, heads;
    std::vector<KeyGradients> apart;         // of each block of each head
    std::vector<std::atomic<int64_t>> left;  // blocks of each head that are not finished

    explicit BackwardShare(const Plan& plan)
        : problem(plan.problem), size(block_size(plan)),
          blocks(std::max<int64_t>(1, (problem.query_length + size - 1) / size)),
          heads(problem.batch * problem.key_heads), apart(heads * blocks), left(heads) {
        for (auto& count : left) count = blocks;
    }
    static int64_t block_size(const Plan& plan) {
        const int64_t rows = plan.problem.tolerance > 0 ? kLeastBackwardRows : kLeastRows;
        return std::max(rows / plan.group, plan.problem.query_length / kMostBackwardBlocks) + 1;
    }
    int64_t items() const { return heads * blocks; }
    // The first key that no row before the block sees.
    int64_t first_key(int64_t block) const {
        return block ? block * size + problem.key_length - problem.query_length : 0;
    }
};

struct BackwardWorker {
    const Plan& plan;
    BackwardShare& share;
    Walk<Mode::kBackward> walk;
    BackwardWorker(const Plan& p, BackwardShare& with) : plan(p), share(with), walk(p) {}

    void operator()(int64_t item) {
        const TraProblem& p = plan.problem;
        // The last rows of a head are the dearest: they come first.
        const int64_t head = item / share.blocks, block = share.blocks - 1 - item % share.blocks;
        const int64_t batch = head / p.key_heads, key_head = head % p.key_heads;
        const int64_t begin = block * share.size, end = std::min(p.query_length, begin + share.size);
        const int64_t low = share.first_key(block);
        const int64_t high = end < p.query_length ? share.first_key(block + 1) : p.key_length;
        Components zeros = {};
        for (int64_t key = low; key < high; key++)  // some are masked or beyond every row's reach
            finish_key(plan, batch, key_head, key, zeros, zeros);
        KeyGradients* parts = &share.apart[head * share.blocks];
        // A gradient in half precision is rounded once, when it is complete.
        parts[block].high = share.blocks > 1 && plan.type != kFloat32 ? high : low;
        parts[block].width = p.width + p.value_width;
        walk.run(batch, key_head, begin, end, &parts[block]);
        if (--share.left[head] == 0) join(batch, key_head, parts);
    }

    // Adds what the blocks of a head have left, from the last to the first, to what is written.
    void join(int64_t batch, int64_t key_head, KeyGradients* parts) {
        const TraProblem& p = plan.problem;
        Components grad_key, grad_value;
        for (int64_t key = 0; key < p.key_length; key++) {
            bool read = false;
            for (int64_t block = share.blocks - 1; block >= 0; block--) {
                if (!parts[block].has(key)) continue;
                if (!read) {
                    plan.read(p.grad_key, batch, key_head, key, p.width, grad_key);
                    plan.read(p.grad_value, batch, key_head, key, p.value_width, grad_value);
                    read = true;
                }
                const float* part = parts[block].find(key);
                for (int64_t d = 0; d < p.width; d++) grad_key[d] += part[d] * p.scale;
                for (int64_t d = 0; d < p.value_width; d++) grad_value[d] += part[p.width + d];
            }
            if (!read) continue;
            plan.write(p.grad_key, batch, key_head, key, p.width, grad_key);
            plan.write(p.grad_value, batch, key_head, key, p.value_width, grad_value);
        }
        for (int64_t block = 0; block < share.blocks; block++) parts[block].rows = {};
    }
};

}  // namespace
