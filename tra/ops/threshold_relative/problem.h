// One call of the kernel as a plain structure: what op.cpp fills in and the kernel's entry points take.
#pragma once

#include <cstdint>

#ifndef TRA_VARIANT
#define TRA_VARIANT generic
#endif
#define TRA_JOIN_(a, b) a##b
#define TRA_JOIN(a, b) TRA_JOIN_(a, b)
#define TRA_ENTRY(name) TRA_JOIN(tra_##name##_, TRA_VARIANT)

extern "C" {

// [batch, head, position, component], strides in elements. Those of one number a row have no component.
struct TraTensor {
    void* data;  // null: absent
    int64_t stride[4];
};

// What backward must know of a row.
struct TraRowState {
    float offset;  // subtracted from every logit; of a row that keeps nothing its largest visible score
    float sum;     // of weights: 0 for a row that keeps nothing, NaN for one that is not finite
};

struct TraProblem {
    TraTensor query, key, value, output, grad_output;
    TraTensor grad_query, grad_key, grad_value;  // those that are absent are not computed
    TraTensor log_gate, grad_log_gate;           // [batch, query_heads, query_length], always fp32
    TraTensor row_threshold, grad_threshold;     // the same; absent: `threshold` holds for every row, and no gradient
    TraTensor row_bound;                         // the same, but double, so that no bit of a stop depends on who says
                                                 // the bound; absent: `score_bound` does
    TraTensor residual;                          // like output, always bf16: what rounding took from it
    TraRowState* row_state;                      // [batch, query_heads, query_length]
    const uint8_t* key_mask;                     // null, or nonzero where a key may be attended
    int64_t key_mask_stride[2];
    const int32_t* segment_ids;  // null, or the document a key belongs to
    int64_t segment_stride[2];
    int64_t batch, query_heads, key_heads, query_length, key_length, width, value_width;
    double dropout, tolerance;
    double score_bound;  // on the kept scores; negative: not known, take it from norms
    uint64_t seed;
    float scale, threshold;
    float straight_through;  // temperature of the sigmoid through which gradients pass the threshold; 0: they do not
    int32_t type, threads;
    // Calls its first argument with its second on so many threads; null: start threads.
    void (*parallel)(void (*)(void*), void*, unsigned, unsigned);
};

enum TraStatus : int { kTraDone = 0, kTraNoMemory = 1, kTraBoundBroken = 2 };

int TRA_ENTRY(forward)(const TraProblem*);
int TRA_ENTRY(backward)(const TraProblem*);

}  // extern "C"
