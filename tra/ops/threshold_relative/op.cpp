// The kernel as an operator of PyTorch, on its stable ABI: one library for every torch from 2.10 on.
//
// Built once per variant of the kernel, whose name is part of the operator's. registration.py defines the schemas and
// everything that is not a number on a CPU: fake kernels, gradients, what is refused.
#include <pthread.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <unordered_map>
#include <vector>

#include "problem.h"

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using Maybe = std::optional<Tensor>;

// libgomp's threads do not survive a fork: the child starts plain ones.
std::atomic<bool> forked{false};
const int watches_forks = pthread_atfork(nullptr, nullptr, [] { forked = true; });

// PyTorch's threads: a second pool would fight it for the cores.
void run_together(void (*part)(void*), void* team, unsigned threads, unsigned) {
    torch::stable::parallel_for(0, threads, 1, [&](int64_t begin, int64_t end) {
        for (int64_t n = begin; n < end; n++) part(team);
    });
}

int32_t code_of(ScalarType type) {
    switch (type) {
        case ScalarType::Float: return aoti_torch_dtype_float32();
        case ScalarType::BFloat16: return aoti_torch_dtype_bfloat16();
        case ScalarType::Half: return aoti_torch_dtype_float16();
        default: throw std::runtime_error("threshold_relative_attention has no results of that dtype");
    }
}

// Not torch::stable::empty, which takes as long as a new token.
Tensor new_tensor(std::initializer_list<int64_t> sizes, ScalarType type) {
    std::vector<int64_t> strides(sizes.size(), 1);
    for (size_t n = sizes.size() - 1; n > 0; n--) strides[n - 1] = strides[n] * std::max<int64_t>(sizes.begin()[n], 1);
    AtenTensorHandle handle;
    if (aoti_torch_empty_strided(int64_t(sizes.size()), sizes.begin(), strides.data(),
                                 code_of(type), aoti_torch_device_type_cpu(), 0, &handle)) {
        int64_t count = 1;
        for (int64_t size : sizes) count *= size;
        throw std::runtime_error("threshold_relative_attention: the CPU ran out of memory for a result of " +
                                 std::to_string(count) + " numbers");
    }
    Tensor result(handle);
#ifdef TRA_POISON  // `make sanitize`: what is never written is NaN
    if (result.numel()) std::memset(result.data_ptr(), 0xff, size_t(result.numel()) * (type == ScalarType::Float ? 4 : 2));
#endif
    return result;
}
Tensor absent() { return new_tensor({0}, ScalarType::Float); }
Tensor new_like(const Tensor& tensor, ScalarType type) {
    auto size = [&](int64_t n) { return tensor.size(n); };
    if (tensor.dim() == 3) return new_tensor({size(0), size(1), size(2)}, type);
    return new_tensor({size(0), size(1), size(2), size(3)}, type);
}

Tensor as_type(const Tensor& tensor, ScalarType type) {
    return tensor.scalar_type() == type ? tensor : torch::stable::to(tensor, type);
}
Maybe as_type(const Maybe& tensor, ScalarType type) { return tensor ? Maybe(as_type(*tensor, type)) : tensor; }

TraTensor view(const Tensor& tensor) {
    TraTensor result = {tensor.data_ptr(), {}};
    for (int64_t n = 0; n < tensor.dim(); n++) result.stride[n] = tensor.stride(n);
    return result;
}
TraTensor view(const Maybe& tensor) { return tensor ? view(*tensor) : TraTensor{}; }

void check(const char* name, const Tensor& tensor, std::initializer_list<int64_t> sizes) {
    bool fits = tensor.dim() == int64_t(sizes.size());
    for (size_t n = 0; fits && n < sizes.size(); n++) fits = tensor.size(int64_t(n)) == sizes.begin()[n];
    if (fits) return;
    std::string text = std::string(name) + " must have the shape [";
    for (int64_t size : sizes) text += (text.back() == '[' ? "" : ", ") + std::to_string(size);
    throw std::runtime_error(text + "]");
}
void check(const char* name, const Maybe& tensor, std::initializer_list<int64_t> sizes) {
    if (tensor) check(name, *tensor, sizes);
}

// The arguments of every operator, in the order of call.py's Inputs and Options: here, in declarations and in calls.
#define TRA_ARGUMENTS(AS)                                                                                   \
    AS(const Tensor&, query), AS(const Tensor&, key), AS(const Tensor&, value), AS(const Tensor&, log_gate), \
    AS(const Maybe&, key_mask), AS(const Maybe&, segment_ids), AS(const Maybe&, dropout_seed),               \
    AS(const Maybe&, row_threshold), AS(const Maybe&, row_bound), AS(const Maybe&, key_lengths),             \
    AS(double, scale), AS(double, threshold), AS(double, straight_through), AS(double, dropout),             \
    AS(double, tolerance), AS(std::optional<double>, score_bound)
#define TRA_DECLARED(type, name) type name
#define TRA_PASSED(type, name) name
// Where a piece of a sequence lies.
#define TRA_PLACE(AS)                                                                                      \
    AS(const Maybe&, row_segments), AS(const Maybe&, row_starts), AS(const Maybe&, valid_keys),             \
    AS(int64_t, first_query), AS(int64_t, all_queries), AS(int64_t, first_key), AS(int64_t, all_keys)

// A call as the kernel reads it, and the tensors that it was converted from, which must outlive it.
struct Call {
    TraProblem problem = {};
    TraPiece piece = {};
    Tensor gate;
    Maybe thresholds, bounds;  // of rows
    std::vector<int32_t> segments;
    std::vector<int64_t> lengths;  // of each sequence, if they differ

    explicit Call(TRA_ARGUMENTS(TRA_DECLARED))
        : gate(as_type(log_gate, ScalarType::Float)), thresholds(as_type(row_threshold, ScalarType::Float)),
          bounds(as_type(row_bound, ScalarType::Double)) {
        // api.py has checked all this, but graphs that were traced or stored do not pass there.
        const ScalarType type = query.scalar_type();
        const bool known = type == ScalarType::Float || type == ScalarType::BFloat16 || type == ScalarType::Half;
        if (!known || key.scalar_type() != type || value.scalar_type() != type)
            throw std::runtime_error("query, key and value must have one dtype of float32, bfloat16 and float16");
        const auto is = [](const Maybe& tensor, ScalarType one, ScalarType other) {
            return !tensor || tensor->scalar_type() == one || tensor->scalar_type() == other;
        };
        if (!is(key_mask, ScalarType::Bool, ScalarType::Bool)) throw std::runtime_error("key_mask must be boolean");
        if (!is(segment_ids, ScalarType::Int, ScalarType::Long) || !is(key_lengths, ScalarType::Int, ScalarType::Long) ||
            !is(dropout_seed, ScalarType::Long, ScalarType::Long))
            throw std::runtime_error("segment_ids and key_lengths must be int32 or int64, and dropout_seed int64");
        if (query.dim() != 4 || key.dim() != 4 || value.dim() != 4 || key.size(1) < 1 || query.size(1) % key.size(1))
            throw std::runtime_error("query, key and value must be [B, H, L, D], with a multiple of the heads of key");
        const int64_t batch = query.size(0), heads = query.size(1), rows = query.size(2), keys = key.size(2);
        check("key", key, {batch, key.size(1), keys, query.size(3)});
        check("value", value, {batch, key.size(1), keys, value.size(3)});
        check("log_gate", log_gate, {batch, heads, rows});
        check("key_mask", key_mask, {batch, keys});
        check("segment_ids", segment_ids, {batch, keys});
        check("row_threshold", row_threshold, {batch, heads, rows});
        check("row_bound", row_bound, {batch, heads, rows});
        check("key_lengths", key_lengths, {batch});
        check("dropout_seed", dropout_seed, {1});
        TraProblem& p = problem;
        p.query = view(query);
        p.key = view(key);
        p.value = view(value);
        p.log_gate = view(gate);
        p.row_threshold = view(thresholds);
        p.row_bound = view(bounds);
        if (key_mask) {
            p.key_mask = static_cast<const uint8_t*>(key_mask->data_ptr());
            p.key_mask_stride[0] = key_mask->stride(0);
            p.key_mask_stride[1] = key_mask->stride(1);
        }
        p.batch = query.size(0);
        p.query_heads = query.size(1);
        p.query_length = query.size(2);
        p.width = query.size(3);
        p.key_heads = key.size(1);
        p.key_length = key.size(2);
        p.value_width = value.size(3);
        p.first_position = p.key_length - p.query_length;
        p.all_keys = p.key_length;
        if (segment_ids) read_segments(*segment_ids);
        if (key_lengths) read_lengths(*key_lengths);
        p.dropout = dropout;
        p.tolerance = tolerance;
        p.score_bound = score_bound.value_or(-1);
        p.seed = dropout_seed ? uint64_t(*static_cast<const int64_t*>(dropout_seed->data_ptr())) : 0;
        p.scale = float(scale);
        p.threshold = float(threshold);
        p.straight_through = float(straight_through);
        p.type = type == ScalarType::Float ? 0 : type == ScalarType::BFloat16 ? 1 : 2;
        p.threads = int32_t(torch::stable::get_num_threads());
        p.parallel = forked ? nullptr : run_together;
    }

    // The keys are a piece of a sequence of `all_keys`.
    void take_piece(const Tensor& state, TRA_PLACE(TRA_DECLARED)) {
        TraProblem& p = problem;
        if (!lengths.empty()) throw std::runtime_error("key_lengths must not be given with pieces of a sequence");
        if (state.size(3) != state_size(p.grad_output.data)) throw std::runtime_error("state must have another size");
        if (!p.row_bound.data && p.score_bound < 0)
            throw std::runtime_error("score_bound must be given: a piece does not know the keys of the others");
        p.first_position = first_query + all_keys - all_queries - first_key;
        p.all_keys = all_keys;
        piece.state = static_cast<float*>(state.data_ptr());
        piece.state_size = state.size(3);
        piece.first_key = first_key;
        piece.first_query = first_query;
        piece.query_count = all_queries;
        if (row_segments) piece.row_segment = static_cast<const int32_t*>(row_segments->data_ptr());
        if (row_starts) piece.row_start = static_cast<const int32_t*>(row_starts->data_ptr());
        if (valid_keys) {
            check("valid_keys", *valid_keys, {p.batch});
            piece.valid_keys = static_cast<const int64_t*>(valid_keys->data_ptr());
        }
        p.piece = &piece;
    }
    int64_t state_size(bool backward) const { return backward ? 14 + 2 * problem.width : 6 + 2 * problem.value_width; }

    void read_segments(const Tensor& ids) {
        TraProblem& p = problem;
        if (ids.scalar_type() == ScalarType::Int) {
            p.segment_ids = static_cast<const int32_t*>(ids.data_ptr());
            p.segment_stride[0] = ids.stride(0);
            p.segment_stride[1] = ids.stride(1);
            return;
        }
        // Renumbered, not truncated: two ids must not become one.
        const int64_t* from = static_cast<const int64_t*>(ids.data_ptr());
        std::unordered_map<int64_t, int32_t> numbers;
        segments.reserve(p.batch * p.key_length);
        for (int64_t batch = 0; batch < p.batch; batch++)
            for (int64_t key = 0; key < p.key_length; key++)
                segments.push_back(numbers.emplace(from[batch * ids.stride(0) + key * ids.stride(1)],
                                                   int32_t(numbers.size())).first->second);
        p.segment_ids = segments.data();
        p.segment_stride[0] = p.key_length;
        p.segment_stride[1] = 1;
    }

    void read_lengths(const Tensor& given) {
        TraProblem& p = problem;
        const bool narrow = given.scalar_type() == ScalarType::Int;
        for (int64_t batch = 0; batch < p.batch; batch++) {
            const int64_t at = batch * given.stride(0);
            const int64_t length = narrow ? static_cast<const int32_t*>(given.data_ptr())[at]
                                          : static_cast<const int64_t*>(given.data_ptr())[at];
            if (length < p.query_length || length > p.key_length)
                throw std::runtime_error("key_lengths must lie between the " + std::to_string(p.query_length) +
                                         " queries and the " + std::to_string(p.key_length) + " keys, got " +
                                         std::to_string(length));
            lengths.push_back(length);
        }
    }

    // A sequence of the batch with as many keys as it has.
    TraProblem sequence(int64_t batch) const {
        TraProblem p = problem;
        const int64_t size = p.type ? 2 : 4;
        auto begin = [&](TraTensor& tensor, int64_t bytes) {
            if (tensor.data) tensor.data = static_cast<char*>(tensor.data) + batch * tensor.stride[0] * bytes;
        };
        for (TraTensor* tensor : {&p.query, &p.key, &p.value, &p.output, &p.grad_output, &p.grad_query, &p.grad_key,
                                  &p.grad_value})
            begin(*tensor, size);
        for (TraTensor* tensor : {&p.log_gate, &p.grad_log_gate, &p.row_threshold, &p.grad_threshold}) begin(*tensor, 4);
        begin(p.row_bound, 8);
        begin(p.residual, 2);
        p.row_state += batch * p.query_heads * p.query_length;
        if (p.key_mask) p.key_mask += batch * p.key_mask_stride[0];
        if (p.segment_ids) p.segment_ids += batch * p.segment_stride[0];
        p.batch = 1;
        p.key_length = p.all_keys = lengths[batch];
        p.first_position = p.key_length - p.query_length;
        return p;
    }

    void run(int (*entry)(const TraProblem*)) const {
        if (lengths.empty()) return run(entry, problem);
        for (int64_t batch = 0; batch < problem.batch; batch++) run(entry, sequence(batch));
    }

    // cpu.py makes Python's errors of these texts.
    void run(int (*entry)(const TraProblem*), const TraProblem& p) const {
        switch (entry(&p)) {
            case kTraDone: return;
            case kTraBoundBroken:
                throw std::runtime_error("score_bound must bound the absolute scores of all kept keys, got " +
                                         (bounds ? "a tensor" : shortest(problem.score_bound)) + " and a larger score");
            case kTraNotInPieces:
                throw std::runtime_error("score_bound must be finite and values must not overflow when they are summed, "
                                         "or rows cannot be walked in pieces");
            default: throw std::runtime_error("threshold_relative_attention: the CPU kernel ran out of memory");
        }
    }
    static std::string shortest(double number) {
        char text[32];
        snprintf(text, sizeof text, "%g", number);
        return text;
    }

    void check_gate() const {
        const TraProblem& p = problem;
        float largest = 0;
        for (int64_t batch = 0; batch < p.batch; batch++)
            for (int64_t head = 0; head < p.query_heads; head++)
                for (int64_t query = 0; query < p.query_length; query++)
                    largest = std::max(largest, static_cast<const float*>(p.log_gate.data)[
                        batch * p.log_gate.stride[0] + head * p.log_gate.stride[1] + query * p.log_gate.stride[2]]);
        if (largest > 0)
            throw std::runtime_error("log_gate must never be positive, got a maximum of " + shortest(largest));
    }
};

std::tuple<Tensor, Tensor, Tensor> forward(TRA_ARGUMENTS(TRA_DECLARED), bool training) {
    Call call(TRA_ARGUMENTS(TRA_PASSED));
    call.check_gate();
    TraProblem& p = call.problem;
    Tensor out = new_tensor({p.batch, p.query_heads, p.query_length, p.value_width}, query.scalar_type());
    Tensor row_state = new_tensor({p.batch, p.query_heads, p.query_length, 2}, ScalarType::Float);
    const bool rounds = training && query.scalar_type() != ScalarType::Float;  // cpu.RESIDUAL
    Tensor residual = rounds ? new_like(out, ScalarType::BFloat16) : new_tensor({0}, ScalarType::BFloat16);
    p.output = view(out);
    p.row_state = static_cast<TraRowState*>(row_state.data_ptr());
    if (rounds) p.residual = view(residual);
    call.run(TRA_ENTRY(forward));
    return {out, row_state, residual};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> backward(
    const Tensor& grad_out, const Tensor& out, const Tensor& row_state, const Tensor& residual, bool wants_query,
    bool wants_key, bool wants_value, TRA_ARGUMENTS(TRA_DECLARED)) {
    Call call(TRA_ARGUMENTS(TRA_PASSED));
    if (grad_out.scalar_type() != query.scalar_type() || out.scalar_type() != query.scalar_type())
        throw std::runtime_error("grad_out and out must have the dtype of query");
    TraProblem& p = call.problem;
    check("grad_out", grad_out, {p.batch, p.query_heads, p.query_length, p.value_width});
    check("out", out, {p.batch, p.query_heads, p.query_length, p.value_width});
    check("row_state", row_state, {p.batch, p.query_heads, p.query_length, 2});
    if (residual.dim() == 4) check("residual", residual, {p.batch, p.query_heads, p.query_length, p.value_width});
    p.output = view(out);
    p.grad_output = view(grad_out);
    p.row_state = static_cast<TraRowState*>(row_state.data_ptr());
    if (residual.dim() == 4) p.residual = view(residual);
    auto wanted = [has_lengths = bool(key_lengths)](bool wants, const Tensor& like, TraTensor& place) {
        if (!wants) return absent();
        Tensor gradient = new_like(like, like.scalar_type());
        if (has_lengths) torch::stable::zero_(gradient);  // keys that are not there have a gradient of 0
        place = view(gradient);
        return gradient;
    };
    Tensor grad_query = wanted(wants_query, query, p.grad_query), grad_key = wanted(wants_key, key, p.grad_key);
    Tensor grad_value = wanted(wants_value, value, p.grad_value);
    Tensor grad_gate = wanted(true, call.gate, p.grad_log_gate);
    const bool passes = row_threshold && straight_through > 0;
    Tensor grad_threshold = wanted(passes, passes ? *call.thresholds : call.gate, p.grad_threshold);
    call.run(TRA_ENTRY(backward));
    if (passes) grad_threshold = as_type(grad_threshold, row_threshold->scalar_type());
    return {grad_query, grad_key, grad_value, as_type(grad_gate, log_gate.scalar_type()), grad_threshold};
}

// One piece of forward: rows that end in it are written to `out`, `row_state` and `residual`.
void forward_piece(const Tensor& state, const Tensor& out, const Tensor& row_state, const Tensor& residual,
                   TRA_PLACE(TRA_DECLARED), TRA_ARGUMENTS(TRA_DECLARED)) {
    Call call(TRA_ARGUMENTS(TRA_PASSED));
    call.check_gate();
    call.take_piece(state, TRA_PLACE(TRA_PASSED));
    TraProblem& p = call.problem;
    p.output = view(out);
    p.row_state = static_cast<TraRowState*>(row_state.data_ptr());
    if (residual.dim() == 4) p.residual = view(residual);
    call.run(TRA_ENTRY(forward));
}

// The same of backward, with the gradients of the piece's keys and values.
std::tuple<Tensor, Tensor> backward_piece(
    const Tensor& state, const Tensor& grad_query, const Tensor& grad_gate, const Maybe& grad_threshold,
    const Tensor& center, const Tensor& grad_out, const Tensor& out, const Tensor& row_state, const Tensor& residual,
    TRA_PLACE(TRA_DECLARED), TRA_ARGUMENTS(TRA_DECLARED)) {
    Call call(TRA_ARGUMENTS(TRA_PASSED));
    TraProblem& p = call.problem;
    p.output = view(out);
    p.grad_output = view(grad_out);
    p.row_state = static_cast<TraRowState*>(row_state.data_ptr());
    if (residual.dim() == 4) p.residual = view(residual);
    call.take_piece(state, TRA_PLACE(TRA_PASSED));
    call.piece.center = static_cast<const float*>(center.data_ptr());
    p.grad_query = view(grad_query);
    p.grad_log_gate = view(grad_gate);
    p.grad_threshold = view(grad_threshold);
    Tensor grad_key = new_like(key, key.scalar_type()), grad_value = new_like(value, value.scalar_type());
    p.grad_key = view(grad_key);
    p.grad_value = view(grad_value);
    call.run(TRA_ENTRY(backward));
    return {grad_key, grad_value};
}

// Dispatched by its argument, of which nothing is read.
int64_t span(const Tensor&) { return TRA_ENTRY(span)(); }

}  // namespace

#define TRA_TEXT_(name) #name
#define TRA_TEXT(name) TRA_TEXT_(name)
#define TRA_OPERATOR "threshold_relative_attention_" TRA_TEXT(TRA_VARIANT)

STABLE_TORCH_LIBRARY_IMPL(tra, CPU, library) {
    library.impl(TRA_OPERATOR, TORCH_BOX(&forward));
    library.impl(TRA_OPERATOR "_backward", TORCH_BOX(&backward));
    library.impl(TRA_OPERATOR "_piece", TORCH_BOX(&forward_piece));
    library.impl(TRA_OPERATOR "_piece_backward", TORCH_BOX(&backward_piece));
    library.impl(TRA_OPERATOR "_span", TORCH_BOX(&span));
}
