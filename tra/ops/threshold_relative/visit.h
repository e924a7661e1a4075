// One group of rows meets the keys of one tile: scores, weights, and what the rows sum up.
#pragma once

#include "groups.h"
#include "rule.h"

namespace {

// Gradients are differences of nearly equal products when one key dominates. Nothing but accuracy
// depends on their bits, so they are summed in short chains.
constexpr int64_t kShortChain = 32;

template <Mode kMode>
class TileVisitor {
   public:
    TileVisitor(const Plan& plan, const Tile& tile, Groups<kMode>& groups)
        : plan_(plan), problem_(plan.problem), tile_(tile), groups_(groups) {}

    // All keys of the tile against one group of rows.
    template <int kCount>
    void visit(size_t index) {
        Group<kMode>& group = groups_[index];
        float* base = groups_.data(index);
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
        products<kCount>(plan_.key_stride, base, problem_.width, problem_.width, tile_.keys.data, first, weights);
        if (kMode == Mode::kBackward)
            products<kCount>(plan_.value_stride, base + groups_.grad_at, problem_.value_width, kShortChain,
                             tile_.values.data, first, grads);

        const bool masked = problem_.segment_ids || (count && tile_.index[0] > group.lowest);
        const bool drops = plan_.drop_below && kMode != Mode::kMaximum;
        const bool straight = kMode == Mode::kBackward && straight_through();
        float counted[kLanes];
        std::memcpy(counted, group.lanes.count, sizeof counted);
        uint64_t beyond = 0;
        for (int n = 0; n < kCount; n++) {
            if constexpr (kMode == Mode::kForward)
                if (straight_through()) track_largest(group.lanes, n, first, weights);
        }
        // Only forward takes the tile block by block.
        const int64_t pieces = kMode == Mode::kForward ? tile_.blocks : 1;
        for (int64_t piece = 0, begin = first; piece < pieces; piece++) {
            const int64_t end = kMode == Mode::kForward ? tile_.block_end[piece] : count;
            if (end <= begin) continue;
            for (int n = 0; n < kCount; n++) {
                const Part part{n, begin, end, weights, grads};
                if (straight) {
                    if constexpr (kMode == Mode::kBackward) {
                        if (drops) weigh<true, true, true>(group.lanes, part);
                        else if (masked) weigh<true, false, true>(group.lanes, part);
                        else weigh<false, false, true>(group.lanes, part);
                    }
                } else if (masked && drops) beyond |= weigh<true, true, false>(group.lanes, part);
                else if (masked) beyond |= weigh<true, false, false>(group.lanes, part);
                else if (drops) beyond |= weigh<false, true, false>(group.lanes, part);
                else beyond |= weigh<false, false, false>(group.lanes, part);
            }
            if constexpr (kMode == Mode::kForward)
                add_keys(group.active, begin, end, weights, tile_.values.data, plan_.value_stride,
                         base + groups_.result_at);
            begin = end;
        }
        if constexpr (kMode == Mode::kForward) {
            if (__builtin_expect(beyond != 0, 0)) check_bound<kCount>(group, base, first, counted);
            if (tile_.ends_span) groups_.settle(index);
        } else if (kMode == Mode::kBackward) {
            if (problem_.grad_query.data)
                add_keys(group.active, first, count, grads, tile_.keys.data, plan_.key_stride,
                         base + groups_.result_at);
            if (tile_.ends_span) groups_.settle(index);
            std::memset(weights, 0, first * kLanes * sizeof(float));
            std::memset(grads, 0, first * kLanes * sizeof(float));
        }
    }

    // What backward finds out about the tile, by group, key and lane: weights, and gradients of scores.
    const float* weights() const { return weights_.data; }
    const float* grads() const { return grads_.data; }

   private:
    bool straight_through() const { return problem_.straight_through > 0; }

    // Products of the rows in lanes with the packed rows of the tile from `first` on, as sums of chains
    // of at most `chain` terms.
    template <int kStride, int kCount>
    void products(const float* lanes, int64_t width, int64_t chain, const float* rows, int64_t first, float* to) {
        const int64_t count = tile_.count;
        for (int64_t k = first; k < count; k += kKeys) {
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

    // Every row of the group adds packed rows of the tile, weighted.
    void add_keys(uint64_t active, int64_t begin, int64_t end, const float* weights, const float* rows, int64_t stride,
                  float* results) {
        constexpr Onto onto = kMode == Mode::kForward ? Onto::kTotal : Onto::kSum;
        const int64_t width = groups_.result_width;
        for (int lane = 0; lane < kLanes; lane += kKeys, active >>= kKeys) {
            if (!(active & ((1u << kKeys) - 1))) continue;
            Terms terms{end - begin, rows + begin * stride, stride, weights + begin * kLanes + lane, kLanes};
            float* to = results + lane * width;
            int64_t d = 0;
            for (; d + kLanes <= width; d += kLanes, terms.a += kLanes)
                multiply<kVectors, 1, false>(terms, to + d, width, onto);
            for (; d < width; d += kWidth, terms.a += kWidth)
                multiply<1, 1, false>(terms, to + d, width, onto);
        }
    }

    // What one vector of rows meets at once.
    struct Part {
        int vector;
        int64_t begin, end;     // keys of the tile
        float *weights, *grads; // of the whole tile
    };
    // Walks one vector of rows past keys of the tile: which are kept, and at what distance. As a call
    // of its own it would take a few percent more time. Nonzero: forward met a score, kept or not, beyond
    // the caller's bound.
    template <bool kMasked, bool kDrops, bool kStraight>
    __attribute__((always_inline)) inline uint64_t weigh(Lanes<kMode>& lanes, const Part& part) {
        const int at = part.vector * kWidth;
        const Floats gate = load(lanes.gate + at), limit = load(lanes.limit + at), offset = load(lanes.offset + at);
        const Floats scale = splat(problem_.scale), threshold = load(lanes.threshold + at);
        const Ints position = load(lanes.position + at), segment = load(lanes.segment + at);
        Floats largest = {};  // magnitude of a score
        Floats count = load(lanes.count + at);
        const Tile& tile = tile_;
        Rule<kMode, kDrops, kStraight> rule(plan_, tile, part.begin, part.grads, lanes, at);
        for (int64_t k = part.begin; k < part.end; k++) {
            float* place = part.weights + k * kLanes + at;
            Floats score = load(place) * scale;
            Truth visible = kEverywhere, keep = greater(score, threshold);
            if (kMasked) {
                visible = both(at_least(position, splat(tile.index[k])), equal(segment, splat(tile.segment[k])));
                keep = both(keep, visible);
            }
            const Truth counts = both(keep, less(count, limit));
            if (kMode == Mode::kForward) largest = larger(magnitude(score), largest);
            Floats logit = multiply_add(gate, count, score) - offset;
            Floats distance = count;
            count = choose(keep, count + 1.0f, count);
            rule.meet({k, visible, counts, score, logit, distance}, place);
        }
        store(lanes.count + at, count);
        rule.save();
        if constexpr (kMode == Mode::kForward) return bits_of(greater(largest, load(lanes.largest_allowed + at)));
        return 0;
    }

    // The largest visible score of rows that have kept nothing, for backward.
    __attribute__((noinline)) void track_largest(Lanes<kMode>& lanes, int n, int64_t first, const float* scores) {
        const int at = n * kWidth;
        if (!bits_of(less(load(lanes.count + at), splat(1.0f)))) return;
        const Ints position = load(lanes.position + at), segment = load(lanes.segment + at);
        Floats largest = load(lanes.largest_score + at);
        for (int64_t k = first; k < tile_.count; k++) {
            Floats score = load(scores + k * kLanes + at) * problem_.scale;
            const Truth visible =
                both(at_least(position, splat(tile_.index[k])), equal(segment, splat(tile_.segment[k])));
            largest = choose(visible, larger(score, largest), largest);
        }
        store(lanes.largest_score + at, largest);
    }

    // Is one of the scores beyond the caller's bound that of a kept key, within its row's limit? Weights have taken
    // the scores' place, so they are computed again; `counted` is what the rows had counted before the tile.
    template <int kCount>
    __attribute__((noinline, cold)) void check_bound(const Group<Mode::kForward>& group, const float* base, int64_t first,
                                                     const float* counted) {
        const Lanes<Mode::kForward>& lanes = group.lanes;
        float* scores = scores_.reserve(kLargeTile * kLanes + kKeys);
        products<kCount>(plan_.key_stride, base, problem_.width, problem_.width, tile_.keys.data, first, scores);
        for (uint64_t left = group.active; left; left &= left - 1) {
            const int lane = __builtin_ctzll(left);
            float count = counted[lane];
            for (int64_t k = first; k < tile_.count && count < lanes.limit[lane]; k++) {
                if (lanes.position[lane] < tile_.index[k] || lanes.segment[lane] != tile_.segment[k]) continue;
                const float score = scores[k * kLanes + lane] * problem_.scale;
                if (!(score > lanes.threshold[lane])) continue;
                if (std::fabs(score) > lanes.largest_allowed[lane]) plan_.bound_broken = true;
                count++;
            }
        }
    }

    const Plan& plan_;
    const TraProblem& problem_;
    const Tile& tile_;
    Groups<kMode>& groups_;
    Buffer scores_, weights_, grads_;
};

}  // namespace
