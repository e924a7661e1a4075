// Many rows of one head: rows in lanes, keys from near to far, finished rows replaced.
#pragma once

#include "rule.h"

namespace {

// Rows are asked for this long before they enter: they come backwards, which the machine does not foresee.
constexpr int64_t kAhead = 8;
// With this many rows under way a large tile's traffic matters more than its ragged ends.
constexpr int64_t kManyRows = 768;
// Gradients are differences of nearly equal products when one key dominates. Nothing but accuracy
// depends on their bits, so they are summed in short chains.
constexpr int64_t kShortChain = 32;

template <Mode kMode>
class Walk {
   public:
    explicit Walk(const Plan& plan) : plan_(plan), problem_(plan.problem), tile_(plan) {
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
        if (kMode == Mode::kBackward) {
            grad_keys_.reserve(kLargeTile * plan.width_lanes);
            grad_values_.reserve(kLargeTile * plan.value_lanes);
        }
    }

    // Rows [begin, end) of all query heads that share one key head. Backward leaves the gradients of keys before
    // apart->high there: other rows have a part in them too. Returns the first of the keys whose gradients it has
    // written: all from there to the last row's.
    int64_t run(int64_t batch, int64_t key_head, int64_t begin, int64_t end, KeyGradients* apart = nullptr) {
        apart_ = apart;
        batch_ = batch;
        key_head_ = key_head;
        groups_.clear();
        order_.clear();
        active_ = 0;
        next_ = end - 1;
        next_member_ = plan_.group - 1;
        last_ = begin;
        finished_ = end == problem_.query_length ? problem_.key_length : keys_before(position_of(end));
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
        return finished_;
    }

   private:
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
            if (group == groups_.size()) add_group();
            admit(low, group);
        }
    }
    bool straight_through() const { return problem_.straight_through > 0; }
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
            if (row.position < 0 || (empty && !straight_through())) return fill_backward(plan_, row, 0);
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

        float* base = data(group);
        scatter(base + lane, query, problem_.width);
        std::memset(base + result_at_ + lane * result_width_, 0, result_width_ * sizeof(float));
        if constexpr (kMode == Mode::kBackward) {
            lanes.delta[lane] = delta;
            lanes.inverse[lane] = inverse;
            lanes.reach[lane] = std::max(row.limit, row.limit_left_out);
            lanes.behind[lane] = row.limit_behind;
            scatter(base + grad_at_ + lane, grad, problem_.value_width);
            std::memcpy(base + query_rows_at_ + lane * plan_.width_lanes, query, problem_.width * 4);
            std::memcpy(base + grad_rows_at_ + lane * plan_.value_lanes, grad, problem_.value_width * 4);
            order_.push_back(int64_t(group) * kLanes + lane);
        }
        if constexpr (kMode != Mode::kMaximum)
            if (row.carried) resume(groups_[group], base, lane);
    }

    // A row goes on with what it carried from the piece before.
    void resume(Group<kMode>& group, float* base, int lane) {
        const float* from = group.row[lane].carried + 1;
        for (float* lanes : carried(group.lanes)) lanes[lane] = *from++;
        for (int64_t part : {total_at_, lost_at_}) {
            float* to = base + part + lane * result_width_;
            std::memset(to, 0, result_width_ * sizeof(float));
            std::memcpy(to, from, carried_width() * sizeof(float));
            from += carried_width();
        }
        group.settled |= uint64_t(1) << lane;
    }
    // At the end of the piece.
    void suspend(Group<kMode>& group, const float* base, int lane) {
        float* to = group.row[lane].carried;
        *to++ = 0;
        for (const float* lanes : carried(group.lanes)) *to++ = lanes[lane];
        for (int64_t part : {total_at_, lost_at_}) {
            std::memcpy(to, base + part + lane * result_width_, carried_width() * sizeof(float));
            to += carried_width();
        }
    }
    int64_t carried_width() const { return kMode == Mode::kBackward ? problem_.width : problem_.value_width; }
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

    static void scatter(float* column, const float* from, int64_t count) {
        for (int64_t d = 0; d < count; d++) column[d * kLanes] = from[d];
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
        products<kCount>(plan_.key_stride, base, problem_.width, problem_.width, tile_.keys.data, first, weights);
        if (kMode == Mode::kBackward)
            products<kCount>(plan_.value_stride, base + grad_at_, problem_.value_width, kShortChain, tile_.values.data,
                             first, grads);

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
                add_keys(group.active, begin, end, weights, tile_.values.data, plan_.value_stride, base + result_at_);
            begin = end;
        }
        if constexpr (kMode == Mode::kForward) {
            if (__builtin_expect(beyond != 0, 0)) check_bound<kCount>(group, base, first, counted);
            if (tile_.ends_span) settle(group, base);
        } else if (kMode == Mode::kBackward) {
            if (problem_.grad_query.data)
                add_keys(group.active, first, count, grads, tile_.keys.data, plan_.key_stride, base + result_at_);
            if (tile_.ends_span) settle(group, base);
            std::memset(weights, 0, first * kLanes * sizeof(float));
            std::memset(grads, 0, first * kLanes * sizeof(float));
        }
    }

    // Every row of the group adds packed rows of the tile, weighted.
    void add_keys(uint64_t active, int64_t begin, int64_t end, const float* weights, const float* rows, int64_t stride,
                  float* results) {
        constexpr Onto onto = kMode == Mode::kForward ? Onto::kTotal : Onto::kSum;
        for (int lane = 0; lane < kLanes; lane += kKeys, active >>= kKeys) {
            if (!(active & ((1u << kKeys) - 1))) continue;
            Terms terms{end - begin, rows + begin * stride, stride, weights + begin * kLanes + lane, kLanes};
            float* to = results + lane * result_width_;
            int64_t d = 0;
            for (; d + kLanes <= result_width_; d += kLanes, terms.a += kLanes)
                multiply<kVectors, 1, false>(terms, to + d, result_width_, onto);
            for (; d < result_width_; d += kWidth, terms.a += kWidth)
                multiply<1, 1, false>(terms, to + d, result_width_, onto);
        }
    }

    // At the end of a span, the sums over it go to their totals.
    void settle(Group<kMode>& group, float* base) {
        if constexpr (kMode == Mode::kForward) group.lanes.sum.settle();
        if constexpr (kMode == Mode::kBackward) group.lanes.settle();
        for (uint64_t left = group.active; left; left &= left - 1) settle_row(group, base, __builtin_ctzll(left));
    }
    // Totals are not even cleared for rows that end within their first span.
    void settle_row(Group<kMode>& group, float* base, int lane) {
        const int64_t at = lane * result_width_;
        float *partial = base + result_at_ + at, *total = base + total_at_ + at, *lost = base + lost_at_ + at;
        if (group.settled >> lane & 1) return ::settle(partial, total, lost, result_width_);
        group.settled |= uint64_t(1) << lane;
        for (int64_t d = 0; d < result_width_; d += kWidth) {
            store(total + d, load(partial + d));
            store(lost + d, Floats{});
            store(partial + d, Floats{});
        }
    }
    // What a row has summed up, in place.
    float* result(Group<kMode>& group, float* base, int lane) {
        const int64_t at = lane * result_width_;
        if (!(group.settled >> lane & 1)) return base + result_at_ + at;
        float *partial = base + result_at_ + at, *total = base + total_at_ + at, *lost = base + lost_at_ + at;
        for (int64_t d = 0; d < result_width_; d += kWidth) {
            Floats whole = load(total + d), rest = load(lost + d);
            add_term(whole, rest, load(partial + d));
            store(partial + d, whole + rest);
        }
        return partial;
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
        Rule<kMode, kDrops, kStraight> rule(plan_, tile_, part.begin, part.grads, lanes, at);
        for (int64_t k = part.begin; k < part.end; k++) {
            float* place = part.weights + k * kLanes + at;
            Floats score = load(place) * scale;
            Truth visible = kEverywhere, keep = greater(score, threshold);
            if (kMasked) {
                visible = both(at_least(position, splat(tile_.index[k])), equal(segment, splat(tile_.segment[k])));
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
            if (problem_.grad_key.data)
                add_rows(begin, count, grads_.data, query_index_, plan_.width_lanes, grad_keys_.data);
            if (problem_.grad_value.data)
                add_rows(begin, count, weights_.data, grad_index_, plan_.value_lanes, grad_values_.data);
        }
        for (int64_t k = 0; k < keys; k++) {
            float* grad_key = grad_keys_.data + k * plan_.width_lanes;
            float* grad_value = grad_values_.data + k * plan_.value_lanes;
            if (tile_.index[k] >= apart_->high) {
                while (finished_ > tile_.index[k] + 1) skip_key(plan_, batch_, key_head_, --finished_);
                finish_key(plan_, batch_, key_head_, --finished_, grad_key, grad_value);
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
        if constexpr (kMode != Mode::kMaximum) {
            if (goes_on(groups_[group], lane)) {
                suspend(groups_[group], data(group), lane);
                groups_[group].release(lane);
                active_--;
                return;
            }
        }
        float* sums = result(groups_[group], data(group), lane);
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
    KeyGradients* apart_ = nullptr;
    int64_t finished_ = 0;                           // backward: gradients of this key and those after it are written
    int64_t next_low_ = 0, span_ = 0;                // where the tile after this one ends, and its span
    int64_t active_ = 0;                             // rows under way
    int64_t next_ = 0, next_member_ = 0, last_ = 0;  // the next to enter, its head in the group; the last
    std::vector<Group<kMode>> groups_;
    std::vector<int64_t> order_;  // backward: lanes of the rows under way, in order of entry
    std::vector<int64_t> query_index_, grad_index_, weight_index_;
    // Parts of a group in the arena: components by lane, for backward also row by row, and row by row
    // what the walk sums up for the row: its output in forward, its query's gradient in backward.
    int64_t grad_at_, result_at_, total_at_, lost_at_, result_width_, query_rows_at_, grad_rows_at_, group_size_;
    Buffer arena_, scores_, weights_, grads_, grad_keys_, grad_values_;
    Tile tile_;
};

}  // namespace
