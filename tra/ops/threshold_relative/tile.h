// Keys and values of one stretch as the rows meet them, and the gradients that they get.
#pragma once

#include "plan.h"

namespace {

constexpr int64_t kLargeTile = 8 * kKeys, kSmallTile = 3 * kKeys;

// Valid keys of one stretch, nearest first, packed as fp32 rows.
struct Tile {
    int64_t low, high;  // the stretch [low, high)
    bool ends_span;
    int64_t count;
    int32_t index[kLargeTile];
    int32_t segment[kLargeTile];
    int64_t bad_count;  // keys whose value is not finite; it is packed as zero
    int32_t bad[kLargeTile];
    Buffer keys, values;

    explicit Tile(const Plan& plan) {
        const int64_t slack = 64;
        keys.reserve((kLargeTile + kKeys) * plan.key_stride + slack);
        values.reserve((kLargeTile + kKeys) * plan.value_stride + slack);
    }

    void load_keys(const Plan& plan, int64_t batch, int64_t head, bool with_values) {
        const TraProblem& p = plan.problem;
        count = bad_count = 0;
        for (int64_t key = high - 1; key >= low; key--) {
            if (!plan.valid(batch, key)) continue;
            plan.expect(p.key, batch, head, key - kSmallTile, p.width);
            plan.expect(p.value, batch, head, key - kSmallTile, p.value_width);
            float* row = keys.data + count * plan.key_stride;
            if (!plan.read_finite(p.key, batch, head, key, p.width, row)) continue;  // as if it were padding
            if (with_values) {
                float* value = values.data + count * plan.value_stride;
                if (!plan.read_finite(p.value, batch, head, key, p.value_width, value)) {
                    std::memset(value, 0, p.value_width * sizeof(float));
                    bad[bad_count++] = int32_t(count);
                }
            }
            index[count] = int32_t(key);
            segment[count] = plan.segment(batch, key);
            count++;
        }
    }
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

}  // namespace
