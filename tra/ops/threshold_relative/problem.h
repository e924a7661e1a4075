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

// What a call knows beyond its own keys when they are one piece of a longer sequence. Pieces come from near to far; a row
// begins in one of them, carries its state from there to the next, and ends where it is done.
struct TraPiece {
    float* state;                // [batch, query_heads, query_length, state_size]: of each row whether it is done,
    int64_t state_size;          // carried() of lanes.h, its result and what rounding took from that
    int64_t first_key;           // the place of the first key in the sequence
    int64_t first_query;         // and of the first query among all queries, of which there are
    int64_t query_count;         // this many in each head
    const int32_t* row_segment;  // [batch, query_length]: null, or the document a row belongs to,
    const int32_t* row_start;    // and the place of its first key in the sequence
    const int64_t* valid_keys;   // [batch]: null, or how many keys of the sequence are no padding
    const float* center;         // backward: [batch, key_heads, value_width], find_center() of the whole sequence
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
    int64_t first_position;  // of the first query among the keys; behind them all if it comes after them
    int64_t all_keys;        // of the sequence
    const TraPiece* piece;   // null: the keys are the whole sequence
    double dropout, tolerance;
    double score_bound;  // on the kept scores; negative: not known, take it from norms
    uint64_t seed;
    float scale, threshold;
    float straight_through;  // temperature of the sigmoid through which gradients pass the threshold; 0: they do not
    int32_t type, threads;
    // Calls its first argument with its second on so many threads; null: start threads.
    void (*parallel)(void (*)(void*), void*, unsigned, unsigned);
};

enum TraStatus : int { kTraDone = 0, kTraNoMemory = 1, kTraBoundBroken = 2, kTraNotInPieces = 3 };

int TRA_ENTRY(forward)(const TraProblem*);
int TRA_ENTRY(backward)(const TraProblem*);
// Pieces of a sequence are cut between spans of this many keys, counted from the first one that is not padding.
int TRA_ENTRY(span)();

}  // extern "C"
