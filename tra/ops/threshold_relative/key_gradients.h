// Backward: the gradients of keys and values, summed over the rows that see them.
#pragma once

#include "groups.h"
#include "tile.h"

namespace {

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

// Sums over rows under way, tile by tile. A row is known by its slot: its group times kLanes, and its lane.
class KeySums {
   public:
    explicit KeySums(const Plan& plan) : plan_(plan), problem_(plan.problem) {
        grad_keys_.reserve(kLargeTile * plan.width_lanes);
        grad_values_.reserve(kLargeTile * plan.value_lanes);
    }

    // Gradients of keys before `finished` are still to be written; those of keys before apart->high are left there.
    void begin(int64_t batch, int64_t key_head, int64_t finished, KeyGradients* apart) {
        batch_ = batch;
        key_head_ = key_head;
        finished_ = finished;
        apart_ = apart;
        order_.clear();
    }
    int64_t finished() const { return finished_; }

    void enter(int64_t slot) { order_.push_back(slot); }
    void move(int64_t from, int64_t to) { std::replace(order_.begin(), order_.end(), from, to); }
    // Rows that have left; `active` are left.
    void forget(Groups<Mode::kBackward>& groups, int64_t active) {
        if (int64_t(order_.size()) == active) return;
        auto gone = [&](int64_t slot) { return !(groups[slot / kLanes].active >> (slot % kLanes) & 1); };
        order_.erase(std::remove_if(order_.begin(), order_.end(), gone), order_.end());
    }

    // Gradients of the tile's keys and values: every row that sees them is under way, so they are
    // complete after this. Rows are taken in order of entry, wherever their lanes are.
    void add_tile(const Tile& tile, Groups<Mode::kBackward>& groups, const float* weights, const float* grads) {
        // Chains of this many rows keep sums over thousands of them exact. Who is in a chain depends on the tiles,
        // but those rows are walked by one thread, whatever the others do.
        const int64_t rows = int64_t(order_.size()), batch_rows = 128, keys = tile.count;
        if (!keys) return;
        query_index_.resize(rows);
        grad_index_.resize(rows);
        weight_index_.resize(rows);
        for (int64_t t = 0; t < rows; t++) {
            int64_t group = order_[t] / kLanes, lane = order_[t] % kLanes;
            query_index_[t] = group * groups.group_size + groups.query_rows_at + lane * plan_.width_lanes;
            grad_index_[t] = group * groups.group_size + groups.grad_rows_at + lane * plan_.value_lanes;
            weight_index_[t] = group * kLargeTile * kLanes + lane;
        }
        for (int64_t begin = 0; begin < rows; begin += batch_rows) {
            int64_t count = std::min(batch_rows, rows - begin);
            if (problem_.grad_key.data)
                add_rows(begin, count, keys, groups.arena(), query_index_, grads, plan_.width_lanes, grad_keys_.data);
            if (problem_.grad_value.data)
                add_rows(begin, count, keys, groups.arena(), grad_index_, weights, plan_.value_lanes,
                         grad_values_.data);
        }
        for (int64_t k = 0; k < keys; k++) {
            float* grad_key = grad_keys_.data + k * plan_.width_lanes;
            float* grad_value = grad_values_.data + k * plan_.value_lanes;
            if (tile.index[k] >= apart_->high) {
                while (finished_ > tile.index[k] + 1) skip_key(plan_, batch_, key_head_, --finished_);
                finish_key(plan_, batch_, key_head_, --finished_, grad_key, grad_value);
                continue;
            }
            float* row = apart_->add(tile.index[k]);
            std::memcpy(row, grad_key, problem_.width * sizeof(float));
            std::memcpy(row + problem_.width, grad_value, problem_.value_width * sizeof(float));
        }
    }

   private:
    void add_rows(int64_t begin, int64_t count, int64_t keys, const float* rows, const std::vector<int64_t>& index,
                  const float* weights, int64_t width, float* to) {
        const Onto onto = begin ? Onto::kTotal : Onto::kNothing;
        for (int64_t k = 0; k < keys; k += kKeys) {
            int64_t d = 0;
            Terms terms{count, rows, 0, weights + k * kLanes, 0, index.data() + begin, weight_index_.data() + begin};
            for (; d + kLanes <= width; d += kLanes, terms.a += kLanes)
                multiply<kVectors, kLanes, true>(terms, to + k * width + d, width, onto);
            for (; d < width; d += kWidth, terms.a += kWidth)
                multiply<1, kLanes, true>(terms, to + k * width + d, width, onto);
        }
    }

    const Plan& plan_;
    const TraProblem& problem_;
    int64_t batch_ = 0, key_head_ = 0;
    KeyGradients* apart_ = nullptr;
    int64_t finished_ = 0;        // gradients of this key and those after it are written
    std::vector<int64_t> order_;  // slots of the rows under way, in order of entry
    std::vector<int64_t> query_index_, grad_index_, weight_index_;
    Buffer grad_keys_, grad_values_;
};

}  // namespace
