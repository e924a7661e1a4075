// Threshold relative attention on the CPU: forward, backward and decoding.
//
// Rows (queries) lie in the lanes of vectors and keys are walked from the nearest to the farthest, so
// a row's contextualised distance is a running count. A row is done when its count reaches a limit
// that certifies the tolerance; its lane then goes to the next row of the same head. Far keys bind
// no row causally, so any rows may share lanes, and the cost follows the sum of the rows' own reaches.
//
// One order of summation everywhere: scores are one chain of multiply_add() over the components,
// rows add keys from near to far, one at a time within spans that are the same for all (kSpan), and keys
// add rows from the last to the first. Tiles, lanes, threads, batch and padding then only decide what is
// skipped, never what is computed.
#include <algorithm>
#include <cstdint>
#ifdef __linux__
#include <sys/mman.h>
#endif

#include "plan.h"
#include "row.h"
#include "team.h"
#include "share.h"

namespace {

// Results of this many bytes are worth huge pages.
constexpr int64_t kLargeResult = 16 << 20;

// A large result comes as untouched memory, and its page faults would cost as much as the walk.
void expect_large(const Plan& plan, const TraTensor& tensor, int64_t heads, int64_t length, int64_t width) {
#ifdef __linux__
    const int64_t sizes[] = {plan.problem.batch, heads, length, width}, page = 4096;
    int64_t last = 0;
    for (int n = 0; n < 4; n++) last += (sizes[n] - 1) * tensor.stride[n];
    const int64_t bytes = (last + 1) * (plan.type == kFloat32 ? 4 : 2);
    if (!tensor.data || bytes < kLargeResult) return;
    const uintptr_t begin = uintptr_t(tensor.data) / page * page;
    madvise(reinterpret_cast<void*>(begin), size_t(bytes), MADV_HUGEPAGE);  // a hint: may fail
#else
    (void)plan, (void)tensor, (void)heads, (void)length, (void)width;
#endif
}

// The norms that bound the scores where the caller knows no bound.
bool find_norms(Plan& plan) {
    const TraProblem& p = plan.problem;
    if (plan.has_bounds()) return true;
    const int64_t heads = p.batch * p.key_heads;
    return run_team(p, heads, double(heads) * p.key_length * p.width, [&] {
        return [&](int64_t item) { plan.find_norms(item / p.key_heads, item % p.key_heads); };
    });
}

// What all values of a head have in common.
bool find_centers(Plan& plan) {
    const TraProblem& p = plan.problem;
    const int64_t heads = p.batch * p.key_heads, size = heads * p.value_width;
    if (p.piece && p.dropout == 0) return plan.center.assign(p.piece->center, p.piece->center + size), true;
    plan.center.assign(size, 0.0f);
    if (p.dropout > 0) return true;
    return run_team(p, heads, double(size) * p.key_length, [&] {
        return [&](int64_t item) { plan.find_center(item / p.key_heads, item % p.key_heads); };
    });
}

TraStatus forward(const TraProblem& p) {
    Plan plan(p);
    expect_large(plan, p.output, p.query_heads, p.query_length, p.value_width);
    if (!find_norms(plan)) return kTraNoMemory;
    double work = double(p.batch * p.query_heads) * p.query_length * p.key_length * p.width;
    bool enough;
    if (p.query_length * plan.group <= kFewRows && !p.piece) {
        work = std::min(work, single_row_work(plan));
        enough = run_team(p, p.batch * p.query_heads * p.query_length, work, [&] {
            return [&, single = SingleRow(plan)](int64_t item) mutable {
                int64_t head = item / p.query_length;
                single.run(head / p.query_heads, head % p.query_heads, item % p.query_length);
            };
        });
    } else {
        enough = run_team(p, forward_items(plan), work, [&] { return ForwardWorker(plan); });
    }
    if (!enough) return kTraNoMemory;
    return plan.bound_broken ? kTraBoundBroken : plan.not_in_pieces ? kTraNotInPieces : kTraDone;
}

TraStatus backward(const TraProblem& p) {
    Plan plan(p);
    expect_large(plan, p.grad_query, p.query_heads, p.query_length, p.width);
    expect_large(plan, p.grad_key, p.key_heads, p.key_length, p.width);
    expect_large(plan, p.grad_value, p.key_heads, p.key_length, p.value_width);
    if (!find_norms(plan)) return kTraNoMemory;
    if (!find_centers(plan)) return kTraNoMemory;
    double work = 2 * double(p.batch * p.query_heads) * p.query_length * p.key_length * p.width;
    BackwardShare share(plan);
    return run_team(p, share.items(), work, [&] { return BackwardWorker(plan, share); }) ? kTraDone : kTraNoMemory;
}

TraStatus guarded(TraStatus (*function)(const TraProblem&), const TraProblem& problem) {
    try {
        return function(problem);
    } catch (...) {
        return kTraNoMemory;
    }
}

}  // namespace

extern "C" int TRA_ENTRY(forward)(const TraProblem* problem) { return guarded(forward, *problem); }
extern "C" int TRA_ENTRY(span)() { return int(kSpan); }
extern "C" int TRA_ENTRY(backward)(const TraProblem* problem) { return guarded(backward, *problem); }


