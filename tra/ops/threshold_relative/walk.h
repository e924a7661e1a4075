// Many rows of one head: rows in lanes, keys from near to far, finished rows replaced.
#pragma once

#include "plan.h"

namespace {

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
            for (auto field : {&Lanes::gate, &Lanes::limit, &Lanes::count, &Lanes::sum, &Lanes::carry, &Lanes::offset,
                               &Lanes::poison, &Lanes::delta, &Lanes::inverse, &Lanes::grad_gate, &Lanes::grad_sum,
                               &Lanes::mean})
                (target.*field)[free] = (source.*field)[lane];
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

}  // namespace
