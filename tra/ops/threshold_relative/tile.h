// Keys and values of one stretch as the rows meet them.
#pragma once

#include "plan.h"

namespace {

constexpr int64_t kMostBlocks = 3, kLargeTile = kMostBlocks * kBlock;

// Valid keys of one stretch, nearest first, packed as fp32 rows.
struct Tile {
    int64_t low, high;  // the stretch [low, high)
    bool ends_span;
    int64_t count;
    int64_t blocks, block_end[kMostBlocks];  // its blocks, and the first key after each
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
        const float* center = plan.center.empty() ? nullptr : plan.center_of(batch, head);
        count = bad_count = blocks = 0;
        int64_t block = high;
        for (int64_t key = high - 1; key >= low; key--) {
            if (!plan.valid(batch, key)) continue;
            if (key < block) {
                if (count) block_end[blocks++] = count;
                block = plan.block_start(batch, key);
            }
            plan.expect(p.key, batch, head, key - kBlock, p.width);
            plan.expect(p.value, batch, head, key - kBlock, p.value_width);
            float* row = keys.data + count * plan.key_stride;
            if (!plan.read_finite(p.key, batch, head, key, p.width, row)) continue;  // as if it were padding
            if (with_values) {
                float* value = values.data + count * plan.value_stride;
                if (!plan.read_finite(p.value, batch, head, key, p.value_width, value)) {
                    std::memset(value, 0, p.value_width * sizeof(float));
                    bad[bad_count++] = int32_t(count);
                }
                for (int64_t d = 0; d < p.value_width && center; d++) value[d] -= center[d];
            }
            index[count] = int32_t(key);
            segment[count] = plan.segment(batch, key);
            count++;
        }
        if (count) block_end[blocks++] = count;
    }
};

}  // namespace
