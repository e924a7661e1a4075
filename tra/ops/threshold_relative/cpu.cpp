// Threshold relative attention on the CPU: forward, backward and decoding.
//
// Rows (queries) lie in the lanes of vectors and keys are walked from the nearest to the farthest, so
// a row's contextualised distance is a running count. A row is done when its count reaches a limit
// that certifies the tolerance; its lane then goes to the next row of the same head. Far keys bind
// no row causally, so any rows may share lanes, and the cost follows the sum of the rows' own reaches.
//
// One order of summation everywhere: scores are one chain of multiply_add() over the components,
// rows add keys from near to far, keys add rows from the last to the first, always one at a time.
// Tiles, lanes, threads, batch and padding then only decide what is skipped, never what is computed.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <thread>
#include <vector>
#ifdef __linux__
#include <sys/mman.h>
#endif

#include "plan.h"
#include "walk.h"

#ifndef TRA_VARIANT
#define TRA_VARIANT generic
#endif
#define TRA_JOIN_(a, b) a##b
#define TRA_JOIN(a, b) TRA_JOIN_(a, b)

namespace {

// ---------------------------------------------------------------------------------------------
// Few rows: one row at a time, values read only where kept

class SingleRow {
   public:
    explicit SingleRow(const Plan& plan) : plan_(plan), problem_(plan.problem) {}

    void run(int64_t batch, int64_t head, int64_t query) {
        const TraProblem& p = problem_;
        Row row;
        const float* components;
        float room[256], sums[256] = {};
        if (!open_row(plan_, batch, head, query, room, components, row)) return spoil_forward(plan_, batch, row);
        if (row.position < 0) return finish_forward(plan_, batch, row, 0, 0, 0, sums);
        const int64_t key_head = head / plan_.group;
        collect(batch, key_head, row, components);

        const int64_t count = int64_t(kept_.size());
        logits_.resize(round_up(count, kWidth));
        float offset = -kInfinity;
        for (int64_t c = 0; c < count; c++) {
            logits_[c] = multiply_add(row.gate, float(c), scores_[c]);
            offset = std::max(offset, logits_[c]);
        }
        if (row.safe || !count) offset = 0;
        if (!std::isfinite(offset)) return spoil_forward(plan_, batch, row);
        for (int64_t c = 0; c < count; c += kWidth) {
            Floats logit;
            std::memcpy(&logit, &logits_[c], sizeof logit);
            logit = logit - offset;
            logit = logit > kLeastExponent ? logit : splat(kLeastExponent);
            Floats weight = exponential(logit);
            std::memcpy(&logits_[c], &weight, sizeof weight);
        }
        float sum = 0, carry = 0, poison = 0, converted[256];
        for (int64_t c = 0; c < count; c++) {
            float weight = logits_[c], larger = sum + weight;
            carry += weight - (larger - sum);
            sum = larger;
            const float* value = plan_.look(p.value, batch, key_head, kept_[c], p.value_width, converted);
            if (!all_finite(value, p.value_width)) {
                poison = kNaN;
                continue;
            }
            if (plan_.drop_below && random_bits(uint32_t(kept_[c]), row.low, row.high) < plan_.drop_below) continue;
            for (int64_t d = 0; d < p.value_width; d++) sums[d] = multiply_add(weight, value[d], sums[d]);
        }
        finish_forward(plan_, batch, row, offset, sum + carry, poison, sums);
    }

   private:
    // The kept keys and their scores from near to far, up to the row's limit.
    void collect(int64_t batch, int64_t head, const Row& row, const float* query) {
        constexpr int kTogether = 8;  // chains under way at once, to hide the latency of each
        const TraProblem& p = problem_;
        float converted[kTogether][256];
        kept_.clear();
        scores_.clear();
        int64_t key = row.position;
        while (key >= row.first_key) {
            const float* keys[kTogether];
            int64_t index[kTogether];
            int count = 0;
            for (; key >= row.first_key && count < kTogether; key--) {
                if (!plan_.valid(batch, key) || plan_.segment(batch, key) != row.segment) continue;
                keys[count] = plan_.look(p.key, batch, head, key, p.width, converted[count]);
                index[count++] = key;
            }
            if (!count) break;
            for (int u = count; u < kTogether; u++) keys[u] = keys[0];
            float sum[kTogether] = {};
            for (int64_t d = 0; d < p.width; d++)
                for (int u = 0; u < kTogether; u++) sum[u] = multiply_add(query[d], keys[u][d], sum[u]);
            for (int u = 0; u < count; u++) {
                float score = sum[u] * p.scale;
                if (!(score > p.threshold)) continue;
                if (!std::isfinite(score) && !all_finite(keys[u], p.width)) continue;
                kept_.push_back(index[u]);
                scores_.push_back(score);
                if (float(kept_.size()) >= row.limit) return;
            }
        }
    }

    const Plan& plan_;
    const TraProblem& problem_;
    std::vector<int64_t> kept_;
    std::vector<float> scores_, logits_;
};

// ---------------------------------------------------------------------------------------------
// Threads

// Items are handed out one by one; no result depends on who takes which. `Worker` is made once per
// thread and holds its scratch memory.
template <class Worker>
struct Team {
    const Plan& plan;
    int64_t items;
    double work;  // about how many multiplications there are
    std::atomic<int64_t> next{0};
    std::atomic<bool> failed{false};

    static void take_part(void* self) {
        Team& team = *static_cast<Team*>(self);
        try {
            int64_t item = team.next++;
            if (item >= team.items) return;
            Worker worker(team.plan);
            for (; item < team.items && !team.failed; item = team.next++) worker(item);
        } catch (...) {
            team.failed = true;
        }
    }
    bool run() {
        double worth = std::min(1 + work / kThreadWork, 1e6);  // waking a thread costs time too
        int64_t threads = std::min({int64_t(plan.problem.threads), items, int64_t(worth)});
        if (threads <= 1) {
            take_part(this);
        } else if (plan.problem.parallel) {
            plan.problem.parallel(&take_part, this, unsigned(threads), 0);
        } else {
            std::vector<std::thread> others;
            try {
                for (int64_t t = 1; t < threads; t++) others.emplace_back(&take_part, this);
            } catch (...) {  // fewer threads then
            }
            take_part(this);
            for (std::thread& other : others) other.join();
        }
        return !failed;
    }
};

// What decoding is likely to cost if half of the keys are kept.
double row_work(const Plan& plan) {
    const TraProblem& p = plan.problem;
    if (p.score_bound < 0) return kInfinity;
    const float* gates = static_cast<const float*>(p.log_gate.data);
    double keys = 0;
    for (int64_t row = 0; row < p.batch * p.query_heads * p.query_length; row++) {
        int64_t query = row % p.query_length, head = row / p.query_length;
        keys -= 2 * plan.decay / gates[plan.offset(p.log_gate, head / p.query_heads, head % p.query_heads, query)];
    }
    return keys >= 0 ? keys * p.width : kInfinity;
}

struct NormWorker {
    Plan& plan;
    explicit NormWorker(const Plan& p) : plan(const_cast<Plan&>(p)) {}
    void operator()(int64_t item) { plan.find_norms(item / plan.problem.key_heads, item % plan.problem.key_heads); }
};

struct RowWorker {
    const TraProblem& p;
    SingleRow single;
    explicit RowWorker(const Plan& plan) : p(plan.problem), single(plan) {}
    void operator()(int64_t item) {
        single.run(item / p.query_length / p.query_heads, item / p.query_length % p.query_heads, item % p.query_length);
    }
};

int64_t rows_per_item(const Plan& plan) {
    const TraProblem& p = plan.problem;
    if (!(p.tolerance > 0)) return std::max<int64_t>(1, kFullVisitRows / plan.group);
    int64_t heads = std::max<int64_t>(1, p.batch * p.key_heads), wanted = p.threads > 1 ? 2 * p.threads : 1;
    if (heads >= wanted) return p.query_length;
    return std::max<int64_t>(2048 / plan.group + 1, p.query_length * heads / wanted + 1);
}

struct ForwardWorker {
    const Plan& plan;
    Walk<Mode::kMaximum> maximum;
    Walk<Mode::kForward> forward;
    explicit ForwardWorker(const Plan& p) : plan(p), maximum(p), forward(p) {}
    void operator()(int64_t item) {
        const TraProblem& p = plan.problem;
        // The last rows of a head are the dearest: they come first.
        int64_t size = rows_per_item(plan), heads = p.batch * p.key_heads;
        int64_t blocks = (p.query_length + size - 1) / size;
        int64_t block = blocks - 1 - item / heads, head = item % heads;
        int64_t begin = block * size, end = std::min(p.query_length, begin + size);
        if (p.score_bound < 0 || p.score_bound * kBoundSlack > kSafeBound || p.threshold < -kSafeBound)
            maximum.run(head / p.key_heads, head % p.key_heads, begin, end);
        forward.run(head / p.key_heads, head % p.key_heads, begin, end);
    }
};

struct BackwardWorker {
    const Plan& plan;
    Walk<Mode::kBackward> walk;
    explicit BackwardWorker(const Plan& p) : plan(p), walk(p) {}
    void operator()(int64_t item) {
        const TraProblem& p = plan.problem;
        const float zeros[256] = {};
        int64_t batch = item / p.key_heads, head = item % p.key_heads;
        for (int64_t key = 0; key < p.key_length; key++) {  // some are masked or beyond every row's reach
            plan.write(p.grad_key, batch, head, key, p.width, zeros);
            plan.write(p.grad_value, batch, head, key, p.value_width, zeros);
        }
        walk.run(batch, head, 0, p.query_length);
    }
};

template <class Worker>
int run_team(const Plan& plan, int64_t items, double work) {
    Team<Worker> team{plan, items, work};
    return team.run() ? 0 : 1;
}

// A large result comes as untouched memory, and its page faults would cost as much as the walk.
void expect_large(const Plan& plan, const TraTensor& tensor, int64_t heads, int64_t length, int64_t width) {
#ifdef __linux__
    const int64_t sizes[] = {plan.problem.batch, heads, length, width}, page = 4096;
    int64_t last = 0;
    for (int n = 0; n < 4; n++) last += (sizes[n] - 1) * tensor.stride[n];
    const int64_t bytes = (last + 1) * (plan.type == kFloat32 ? 4 : 2);
    if (bytes < kLargeResult) return;
    const uintptr_t begin = uintptr_t(tensor.data) / page * page;
    madvise(reinterpret_cast<void*>(begin), size_t(bytes), MADV_HUGEPAGE);  // a hint: may fail
#else
    (void)plan, (void)tensor, (void)heads, (void)length, (void)width;
#endif
}

template <class Function>
int guarded(Function function) {
    try {
        return function();
    } catch (...) {
        return 1;
    }
}

}  // namespace

// Both return 0, or 1 when memory ran out.
extern "C" int TRA_JOIN(tra_forward_, TRA_VARIANT)(const TraProblem* problem) {
    return guarded([&] {
        const TraProblem& p = *problem;
        Plan plan(p);
        expect_large(plan, p.output, p.query_heads, p.query_length, p.value_width);
        int64_t heads = p.batch * p.key_heads;
        double keys = double(heads) * p.key_length * p.width, work = keys * p.query_length * plan.group;
        if (p.score_bound < 0 && run_team<NormWorker>(plan, heads, keys)) return 1;
        if (p.query_length * plan.group <= kFewRows)
            return run_team<RowWorker>(plan, p.batch * p.query_heads * p.query_length, std::min(work, row_work(plan)));
        int64_t size = rows_per_item(plan);
        return run_team<ForwardWorker>(plan, heads * ((p.query_length + size - 1) / size), work);
    });
}

extern "C" int TRA_JOIN(tra_backward_, TRA_VARIANT)(const TraProblem* problem) {
    return guarded([&] {
        const TraProblem& p = *problem;
        Plan plan(p);
        expect_large(plan, p.grad_query, p.query_heads, p.query_length, p.width);
        expect_large(plan, p.grad_key, p.key_heads, p.key_length, p.width);
        expect_large(plan, p.grad_value, p.key_heads, p.key_length, p.value_width);
        int64_t heads = p.batch * p.key_heads;
        double keys = double(heads) * p.key_length * p.width, work = 2 * keys * p.query_length * plan.group;
        if (p.score_bound < 0 && run_team<NormWorker>(plan, heads, keys)) return 1;
        return run_team<BackwardWorker>(plan, heads, work);
    });
}

#ifdef TRA_DISPATCH  // in one of the variants only: the best one this machine runs
extern "C" const char* tra_variant() {
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
        return "avx512";
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return "avx2";
#endif
    return "generic";
}
#endif
