// Many rows of one head: rows in lanes, keys from near to far, finished rows replaced.
#pragma once

#include <type_traits>

#include "key_gradients.h"
#include "visit.h"

namespace {

// Rows are asked for this long before they enter: they come backwards, which the machine does not foresee.
constexpr int64_t kAhead = 8;
// With this many rows under way a large tile's traffic matters more than its ragged ends.
constexpr int64_t kManyRows = 768;

struct Nothing {
    explicit Nothing(const Plan&) {}
};

template <Mode kMode>
class Walk {
   public:
    explicit Walk(const Plan& plan)
        : plan_(plan), problem_(plan.problem), tile_(plan), groups_(plan), visitor_(plan, tile_, groups_),
          keys_(plan) {}
    Walk(const Walk&) = delete;  // the visitor knows where the others are

    // Rows [begin, end) of all query heads that share one key head. Backward leaves the gradients of keys before
    // apart->high there: other rows have a part in them too.
    void run(int64_t batch, int64_t key_head, int64_t begin, int64_t end, KeyGradients* apart = nullptr) {
        batch_ = batch;
        key_head_ = key_head;
        groups_.clear();
        active_ = 0;
        next_ = end - 1;
        next_member_ = plan_.group - 1;
        last_ = begin;
        if constexpr (kBackward) {
            const bool whole = end == problem_.query_length;
            keys_.begin(batch, key_head, whole ? problem_.key_length : keys_before(position_of(end)), apart);
        }
        while (true) {
            if (!active_) {  // nothing to carry on: jump to the next row
                if (next_ < last_) break;
                tile_.low = keys_before(position_of(next_) + 1);
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
            tile_.load_keys(plan_, batch_, key_head_, kMode != Mode::kMaximum);
            const int64_t low = choose_next_low();
            const size_t groups = groups_.size();
            for (size_t group = 0; group < groups; group++) {
                if (!groups_[group].active) continue;
                if (groups_[group].active >> kWidth) visitor_.template visit<kVectors>(group);
                else visitor_.template visit<1>(group);
                retire(group);
                // The next tile's rows come in while the group is in the nearest cache. Backward
                // must wait: the gradients of keys still need the rows that left.
                if (!kBackward) admit(low, group);
            }
            if constexpr (kBackward) {
                keys_.add_tile(tile_, groups_, visitor_.weights(), visitor_.grads());
                keys_.forget(groups_, active_);
            }
            admit_all(low);
            while (groups_.size() && int64_t(groups_.size() - 1) * kLanes >= active_ + spare()) fold();
        }
    }
    // Backward: all keys from here to the last row's have their gradients.
    int64_t finished() const { return keys_.finished(); }

   private:
    static constexpr bool kBackward = kMode == Mode::kBackward;

    int64_t position_of(int64_t query) const { return query + problem_.first_position; }
    // Of a piece, rows may come after the last key.
    int64_t keys_before(int64_t position) const { return std::min(position, problem_.key_length); }
    int64_t choose_next_low() {
        if (!tile_.low) return next_low_ = 0;
        bool large = !(problem_.tolerance > 0) || active_ > kManyRows;
        span_ = plan_.span_start(batch_, tile_.low - 1);
        next_low_ = plan_.block_start(batch_, tile_.low - 1);
        for (int64_t blocks = 1; large && blocks < kMostBlocks && next_low_ > span_; blocks++)
            next_low_ = plan_.block_start(batch_, next_low_ - 1);
        return next_low_;
    }
    // Rows at or after `low` take free lanes.
    void admit(int64_t low, size_t group) {
        while (next_ >= last_ && position_of(next_) >= low && !groups_[group].full()) enter(group);
    }
    void admit_all(int64_t low) {
        for (size_t group = 0; next_ >= last_ && position_of(next_) >= low; group++) {
            if (group == groups_.size()) groups_.add();
            admit(low, group);
        }
    }
    // Lanes to keep free for rows to come, so that groups do not come and go.
    int64_t spare() const { return next_ < last_ ? 0 : kWidth / 2; }
    static int64_t slot(size_t group, int lane) { return int64_t(group) * kLanes + lane; }

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
        float inverse = 0;
        if (row.carried) {
            // Nothing is written for a row that is done, nor for one that begins in a piece farther away.
            if (*row.carried != 0 || (fine && row.position < 0)) return;
            *row.carried = 1;  // until it is suspended
            if (!row.safe) plan_.not_in_pieces = true;
        }
        if (kMode == Mode::kMaximum) {
            if (!fine || row.safe) return;
        } else if (kMode == Mode::kForward) {
            offset = row.safe ? row.offset : row.state->offset;
            if (!fine || !std::isfinite(offset)) return spoil_forward(plan_, row);
            if (row.position < 0) return empty_forward(plan_, row);
        } else {
            if (!fine || !open_backward(plan_, row, grad, delta)) return fill_backward(plan_, row, kNaN);
            const bool empty = row.state->sum == 0;
            if (row.position < 0 || (empty && !(problem_.straight_through > 0))) return fill_backward(plan_, row, 0);
            offset = row.state->offset;
            inverse = empty ? 1 : 1 / row.state->sum;
        }

        const int lane = groups_[group].take(row);
        active_++;
        Lanes<kMode>& lanes = groups_[group].lanes;
        clear_lane(lanes, lane);
        lanes.gate[lane] = row.gate;
        lanes.threshold[lane] = row.threshold;
        lanes.limit[lane] = row.limit;
        lanes.offset[lane] = offset;
        lanes.position[lane] = row.position;
        lanes.segment[lane] = row.segment;
        lanes.first_key[lane] = std::max(row.first_key, 0);
        lanes.random_low[lane] = row.random_low;
        lanes.random_high[lane] = row.random_high;
        if constexpr (kMode == Mode::kMaximum) lanes.largest[lane] = -kInfinity;
        if constexpr (kMode == Mode::kForward) {
            lanes.largest_allowed[lane] = row.largest_score;
            lanes.largest_score[lane] = -kInfinity;
        }

        groups_.fill(group, lane, query, grad);
        if constexpr (kBackward) {
            lanes.delta[lane] = delta;
            lanes.inverse[lane] = inverse;
            lanes.reach[lane] = std::max(row.limit, row.limit_left_out);
            lanes.behind[lane] = row.limit_behind;
            keys_.enter(slot(group, lane));
        }
        if constexpr (kMode != Mode::kMaximum)
            if (row.carried) groups_.resume(group, lane);
    }
    bool goes_on(const Group<kMode>& group, int lane) const {
        return group.row[lane].carried && group.row[lane].first_key < 0 &&
               group.lanes.count[lane] < end_of_walk(group.lanes)[lane];
    }

    void expect_row(int64_t head, int64_t query) {
        plan_.expect(problem_.query, batch_, head, query, problem_.width);
        if (kMode != Mode::kBackward) return;
        plan_.expect(problem_.output, batch_, head, query, problem_.value_width);
        plan_.expect(problem_.grad_output, batch_, head, query, problem_.value_width);
    }

    // Takes out the rows of a group that are done.
    void retire(size_t group) {
        const Lanes<kMode>& lanes = groups_[group].lanes;
        uint64_t done = 0;
        for (int n = 0; n < kVectors; n++) {
            const int at = n * kWidth;
            const uint64_t more = bits_of(less(load(lanes.count + at), load(end_of_walk(lanes) + at)));
            done |= (Group<kMode>::kFull >> (kLanes - kWidth) & ~more) << at;
            done |= bits_of(at_least(load(lanes.first_key + at), splat(int32_t(tile_.low)))) << at;
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
            const int free = groups_.move_last(lane, to);
            if constexpr (kBackward) keys_.move(slot(from, lane), slot(to, free));
        }
        groups_.remove_last();
    }

    void leave(size_t group, int lane) {
        const Lanes<kMode>& lanes = groups_[group].lanes;
        const Row& row = groups_[group].row[lane];
        if constexpr (kMode != Mode::kMaximum) {
            if (goes_on(groups_[group], lane)) {
                groups_.suspend(group, lane);
                groups_[group].release(lane);
                active_--;
                return;
            }
        }
        float* sums = groups_.result(group, lane);
        if constexpr (kMode == Mode::kMaximum) {
            row.state->offset = lanes.count[lane] > 0 ? lanes.largest[lane] : 0;
        } else if constexpr (kMode == Mode::kForward) {
            if (std::isnan(lanes.poison[lane])) spoil_forward(plan_, row);
            else if (!finish_forward(plan_, row, lanes.offset[lane], lanes.sum.result(lane), lanes.largest_score[lane], sums))
                row.carried ? void(plan_.not_in_pieces = true) : SingleRow(plan_).run(row.batch, row.head, row.query);
        } else {
            // Gradients of the scores sum to 0 but for an error in delta, which shifts all of them in proportion to
            // their weights: what it does to sums over all of them is taken back.
            const float error = lanes.grad_sum.result(lane);
            finish_backward(plan_, row, sums,
                            {lanes.grad_gate.result(lane) - error * lanes.mean.result(lane),
                             lanes.grad_threshold.result(lane) + error * lanes.slope.result(lane)});
        }
        groups_[group].release(lane);
        active_--;
    }

    const Plan& plan_;
    const TraProblem& problem_;
    int64_t batch_ = 0, key_head_ = 0;
    int64_t next_low_ = 0, span_ = 0;                // where the tile after this one ends, and its span
    int64_t active_ = 0;                             // rows under way
    int64_t next_ = 0, next_member_ = 0, last_ = 0;  // the next to enter, its head in the group; the last
    Tile tile_;
    Groups<kMode> groups_;
    TileVisitor<kMode> visitor_;
    std::conditional_t<kBackward, KeySums, Nothing> keys_;
};

}  // namespace
