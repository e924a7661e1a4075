// Rows in the lanes of vectors: what they carry along on their walk.
#pragma once

#include <array>

#include "row.h"

namespace {

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
    float threshold[kLanes];
    float limit[kLanes];   // kept keys beyond this count weigh nothing; -1 in a free lane
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
    LaneSums sum;                  // of weights
    float poison[kLanes];          // NaN once the row has kept a value that is not finite
    float largest_allowed[kLanes]; // score of a kept key by the caller's word
    float largest_score[kLanes];   // straight-through: of a visible key, while the row has kept none
};

template <>
struct Lanes<Mode::kBackward> : CommonLanes {
    float delta[kLanes];
    float inverse[kLanes];    // one over the sum that forward found
    float reach[kLanes];      // the count at which the row is done: straight-through it may be beyond the limit
    float behind[kLanes];     // straight-through: the count beyond which nothing is behind a key
    LaneSums grad_gate;       // of gradients times distances
    LaneSums grad_sum;        // of gradients: zero but for rounding
    LaneSums mean;            // distance: sum of weights times distances
    LaneSums grad_threshold;  // straight-through,
    LaneSums mass;            // the sum of weights so far,
    LaneSums slope;           // and how the threshold's gradient changes with delta
    std::array<LaneSums*, 6> sums() { return {&grad_gate, &grad_sum, &mean, &grad_threshold, &mass, &slope}; }
    void settle() {
        for (LaneSums* each : sums()) each->settle();
    }
};

// What a row hands over from one piece of the sequence to the next. Pieces end where spans do, so that sums over spans are
// in their totals.
inline std::array<float*, 5> carried(Lanes<Mode::kForward>& lanes) {
    return {lanes.count, lanes.largest_score, lanes.poison, lanes.sum.total, lanes.sum.lost};
}
inline std::array<float*, 13> carried(Lanes<Mode::kBackward>& lanes) {
    std::array<float*, 13> found = {lanes.count};
    int at = 1;
    for (LaneSums* sums : lanes.sums()) {
        found[at++] = sums->total;
        found[at++] = sums->lost;
    }
    return found;
}

inline const float* end_of_walk(const CommonLanes& lanes) { return lanes.limit; }
inline const float* end_of_walk(const Lanes<Mode::kBackward>& lanes) { return lanes.reach; }

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

}  // namespace
