// One row: what is known of it before its walk, what is written after it, and the walk of a row alone.
#pragma once

#include "plan.h"

namespace {

// With this few rows on one key head, lanes would stay empty: take one row at a time.
constexpr int64_t kFewRows = 4;

struct Row {
    int64_t batch, head, query;  // indices
    int32_t position, segment = 0;
    int32_t first_key = 0;      // of its document; negative: in a piece farther away
    float gate;
    float threshold = 0;        // kept scores are greater
    float largest_score = 0;    // and by the caller's word not greater than this
    float limit = 0;            // kept keys beyond this count weigh nothing
    float limit_left_out = 0;   // straight-through, keys that are left out have no gradient beyond this one,
    float limit_behind = 0;     // and beyond this one none for what lies behind them
    float offset = 0;           // subtracted from its logits,
    bool safe = true;           // unless a first walk must find a better one
    TraRowState* state;
    float* carried;             // its state of TraPiece; null: the row has all its keys in this call
    uint32_t random_low = 0, random_high = 0;  // words of the dropout generator
};

// Finds the query's components, in `room` if they must be converted. False: one of them, the gate or the
// threshold is not finite.
bool open_row(const Plan& plan, int64_t batch, int64_t head, int64_t query, float* room,
              const float*& components, Row& row) {
    const TraProblem& p = plan.problem;
    const int64_t index = (batch * p.query_heads + head) * p.query_length + query;
    row.batch = batch;
    row.head = head;
    row.query = query;
    row.position = int32_t(query + p.first_position);
    row.state = p.row_state + index;
    row.carried = p.piece ? p.piece->state + index * p.piece->state_size : nullptr;
    row.gate = plan.number(p.log_gate, batch, head, query);
    Scores scores = plan.same_scores ? plan.scores : plan.scores_of(batch, head, query);
    row.threshold = scores.threshold;
    components = plan.look(p.query, batch, head, query, p.width, room);
    if (!all_finite(components, p.width) || !std::isfinite(row.gate) || !std::isfinite(row.threshold)) return false;
    if (row.position < 0) return true;  // before the first key
    row.largest_score = kInfinity;
    if (plan.has_bounds()) {
        row.largest_score = float(scores.bound * kTypeSlack[plan.type]);
    } else {
        scores.bound = std::fabs(p.scale) * std::sqrt(dot(components, components, p.width)) * kBoundSlack;
        if (scores.bound > 0)  // 0 bounds the scores of a query of zeros even where a key's norm is infinite
            scores.bound *= plan.largest_norm[(batch * p.key_heads + head / plan.group) * p.key_length + row.position];
    }
    row.safe = scores.spread() <= kSafeSpread;
    row.offset = float(scores.least());
    const bool same = plan.same_scores;
    row.limit = count_after(same ? plan.decay : decay_needed(p, scores, p.tolerance), row.gate);
    if (p.straight_through > 0) {
        const double behind = same ? plan.decay_behind : decay_needed(p, scores, plan.behind_tolerance());
        row.limit_behind = count_after(behind, row.gate);
        row.limit_left_out = count_after(plan.decay_left_out[batch], row.gate);
    }
    if (p.piece) {
        const int64_t at = batch * p.query_length + query;
        row.segment = p.piece->row_segment ? p.piece->row_segment[at] : 0;
        row.first_key = int32_t((p.piece->row_segment ? p.piece->row_start[at] : 0) - p.piece->first_key);
    } else {
        row.segment = plan.segment(batch, row.position);
        row.first_key = p.segment_ids ? plan.segment_start[batch * p.key_length + row.position] : 0;
    }
    if (p.dropout > 0) {
        uint32_t seed_low = uint32_t(p.seed), seed_high = uint32_t(p.seed >> 32);
        const uint32_t word = plan.row_word(batch, head, query);
        row.random_low = mix(mix(mix(seed_low) ^ seed_high) ^ word);
        row.random_high = mix(mix(mix(seed_high ^ 0x9e3779b9u) ^ seed_low) ^ word);
    }
    return true;
}

// What rounding takes from the output: backward subtracts numbers that are nearly equal to it.
void write_residual(const Plan& plan, const Row& row, const float* values, double factor) {
    const TraProblem& p = plan.problem;
    Components room, residual;
    const float* output = plan.look(p.output, row.batch, row.head, row.query, p.value_width, room);
    for (int64_t d = 0; d < p.value_width; d++) residual[d] = float(values[d] * factor - output[d]);
    write_row(p.residual.data, plan.place(p.residual, row.batch, row.head, row.query), p.residual.stride[3],
              p.value_width, kBFloat16, residual);
}

// Divides the weighted sum of values by that of weights, in place, and writes it.
void finish_forward(const Plan& plan, const Row& row, TraRowState state, float sum, float* output) {
    const TraProblem& p = plan.problem;
    *row.state = state;
    Components values;
    if (p.residual.data) std::memcpy(values, output, p.value_width * sizeof(float));
    // A product with 1 / sum would round once more. -0 becomes 0.
    plan.write(p.output, row.batch, row.head, row.query, p.value_width, output,
               [&](float value) { return value * plan.drop_scale / sum + 0.0f; });
    if (p.residual.data) write_residual(plan, row, values, double(plan.drop_scale) / sum);
}

// The same for a row as it was walked, whose largest visible score is needed if it kept nothing. False: its sum
// overflowed, and nothing is written.
bool finish_forward(const Plan& plan, const Row& row, float offset, float sum, float largest_score, float* output) {
    if (!all_finite(output, plan.problem.value_width)) return false;
    if (sum == 0) finish_forward(plan, row, {std::isfinite(largest_score) ? largest_score : 0, 0}, 1, output);
    else finish_forward(plan, row, {offset, sum}, sum, output);
    return true;
}

// A row that keeps nothing.
void empty_forward(const Plan& plan, const Row& row) {
    Components zeros = {};
    finish_forward(plan, row, {0, 0}, 1, zeros);
}

// A row that is not finite.
void spoil_forward(const Plan& plan, const Row& row) {
    Components zeros = {};
    finish_forward(plan, row, {0, kNaN}, kNaN, zeros);
}

// The gradient of the output, and delta = gradient . (output - center). False: not finite.
bool open_backward(const Plan& plan, const Row& row, float* grad, float& delta) {
    const TraProblem& p = plan.problem;
    Components room;
    plan.read(p.grad_output, row.batch, row.head, row.query, p.value_width, grad);
    const float* output = plan.look(p.output, row.batch, row.head, row.query, p.value_width, room);
    double product = dot(grad, output, p.value_width);
    if (p.residual.data) {
        read_row(p.residual.data, plan.place(p.residual, row.batch, row.head, row.query), p.residual.stride[3],
                 p.value_width, kBFloat16, room);
        product += dot(grad, room, p.value_width);
    }
    product -= dot(grad, plan.center_of(row.batch, row.head / plan.group), p.value_width);
    delta = float(product);
    return all_finite(grad, p.value_width) && std::isfinite(delta) && std::isfinite(row.state->sum);
}

// Gradients of what a row has one number of.
struct RowGradients {
    float gate, threshold;
};

void write_backward(const Plan& plan, const Row& row, float* grad_query, RowGradients grads, float scale) {
    const TraProblem& p = plan.problem;
    if (p.grad_query.data)
        plan.write(p.grad_query, row.batch, row.head, row.query, p.width, grad_query,
                   [&](float grad) { return grad * scale + 0.0f; });
    plan.number(p.grad_log_gate, row.batch, row.head, row.query) = grads.gate + 0.0f;
    if (p.grad_threshold.data) plan.number(p.grad_threshold, row.batch, row.head, row.query) = grads.threshold + 0.0f;
}

// Scales the sum of gradients of scores times keys, in place, and writes it.
void finish_backward(const Plan& plan, const Row& row, float* grad_query, RowGradients grads) {
    const TraProblem& p = plan.problem;
    write_backward(plan, row, grad_query, grads, p.scale);
}

// Scales the gradient of a key and writes it and that of its value. Both may be changed.
void finish_key(const Plan& plan, int64_t batch, int64_t head, int64_t key, float* grad_key, float* grad_value) {
    const TraProblem& p = plan.problem;
    if (p.grad_key.data)
        plan.write(p.grad_key, batch, head, key, p.width, grad_key, [&](float grad) { return grad * p.scale + 0.0f; });
    if (p.grad_value.data)
        plan.write(p.grad_value, batch, head, key, p.value_width, grad_value, [](float grad) { return grad; });
}

// A key that is masked or beyond every row's reach.
void skip_key(const Plan& plan, int64_t batch, int64_t head, int64_t key) {
    Components zeros = {};
    finish_key(plan, batch, head, key, zeros, zeros);
}

// A row without a walk: all its gradients are `value`, 0 or NaN.
void fill_backward(const Plan& plan, const Row& row, float value) {
    Components grad_query;
    std::fill_n(grad_query, plan.problem.width, value);
    write_backward(plan, row, grad_query, {value, value}, 1);
}

// Forward of one row at a time: values are read only where their key is kept.
class SingleRow {
   public:
    explicit SingleRow(const Plan& plan) : plan_(plan), problem_(plan.problem) {}

    void run(int64_t batch, int64_t head, int64_t query) {
        const TraProblem& p = problem_;
        Row row;
        const float* components;
        Components query_room;
        if (!open_row(plan_, batch, head, query, query_room, components, row)) return spoil_forward(plan_, row);
        if (row.position < 0) return empty_forward(plan_, row);
        const int64_t key_head = head / plan_.group;
        collect(key_head, row, components);

        const int64_t count = int64_t(kept_.size());
        float largest = -kInfinity;
        weights_.resize(round_up(count, kWidth));
        for (int64_t c = 0; c < count; c++) {
            weights_[c] = multiply_add(row.gate, float(c), scores_[c]);
            largest = std::max(largest, weights_[c]);
        }
        const float offset = row.safe || !count ? row.offset : largest;
        if (!std::isfinite(offset)) return spoil_forward(plan_, row);
        for (int64_t c = 0; c < count; c += kWidth) {
            Floats logit;
            std::memcpy(&logit, &weights_[c], sizeof logit);
            logit = logit - offset;
            logit = logit > kLeastExponent ? logit : splat(kLeastExponent);
            Floats weight = exponential(logit);
            std::memcpy(&weights_[c], &weight, sizeof weight);
        }
        if (!add_up(row, key_head)) return spoil_forward(plan_, row);
        const float sum = total_[p.value_width];
        if (finish_forward(plan_, row, offset, sum, largest_score_, total_)) return;
        // Values near the largest number: their sum has no place, but their mean has.
        for (float& weight : weights_) weight /= sum;
        add_up(row, key_head);
        finish_forward(plan_, row, {offset, sum}, 1, total_);
    }

   private:
    static constexpr int kTogether = kWidth;  // keys that meet the row at once

    // The kept keys and their scores from near to far, up to the row's limit.
    void collect(int64_t key_head, const Row& row, const float* query) {
        constexpr int kAhead = 16;  // keys are asked for this long before they are read
        const TraProblem& p = problem_;
        Components converted[kTogether];
        kept_.clear();
        scores_.clear();
        largest_score_ = -kInfinity;
        int64_t key = row.position;
        while (key >= row.first_key) {
            const float* keys[kTogether];
            int64_t index[kTogether];
            int count = 0;
            for (; key >= row.first_key && count < kTogether; key--) {
                if (!plan_.valid(row.batch, key) || plan_.segment(row.batch, key) != row.segment) continue;
                plan_.expect(p.key, row.batch, key_head, key - kAhead, p.width);
                keys[count] = plan_.look(p.key, row.batch, key_head, key, p.width, converted[count]);
                index[count++] = key;
            }
            if (!count) break;
            for (int u = count; u < kTogether; u++) keys[u] = keys[0];
            float sum[kTogether];
            dot_keys(query, keys, sum);
            for (int u = 0; u < count; u++) {
                const float score = sum[u] * p.scale;
                if (!std::isfinite(score) && !all_finite(keys[u], p.width)) continue;
                largest_score_ = std::max(largest_score_, score);
                if (!(score > row.threshold)) continue;
                if (std::fabs(score) > row.largest_score) plan_.bound_broken = true;
                plan_.expect(p.value, row.batch, key_head, index[u], p.value_width);
                kept_.push_back(index[u]);
                scores_.push_back(score);
                if (float(kept_.size()) >= row.limit) return;
            }
        }
    }

    // Products of the query with keys, each one chain over the components.
    void dot_keys(const float* query, const float* const (&keys)[kTogether], float (&products)[kTogether]) {
        const int64_t width = problem_.width;
        Floats sum = {}, square[kTogether];
        int64_t d = 0;
        for (; d + kWidth <= width; d += kWidth) {
            for (int u = 0; u < kTogether; u++) std::memcpy(&square[u], keys[u] + d, sizeof square[u]);
            transpose(square);
            for (int n = 0; n < kWidth; n++) sum = multiply_add(splat(query[d + n]), square[n], sum);
        }
        std::memcpy(products, &sum, sizeof sum);
        for (; d < width; d++)
            for (int u = 0; u < kTogether; u++) products[u] = multiply_add(query[d], keys[u][d], products[u]);
    }

    // The sum of values by weight and, behind it, that of weights: block by block, from near to far. False: one of
    // the values is not finite.
    bool add_up(const Row& row, int64_t key_head) {
        const TraProblem& p = problem_;
        const int64_t width = p.value_width, count = int64_t(kept_.size());
        Components room;
        float block[kWidest + 1], partial[kWidest + 1], lost[kWidest + 1];
        for (float* sums : {block, partial, lost, total_}) std::fill_n(sums, width + 1, 0.0f);
        auto end_block = [&] {
            for (int64_t d = 0; d <= width; d++) {
                partial[d] += block[d];
                block[d] = 0;
            }
        };
        int64_t span = problem_.key_length, first = span;  // of the span and of the block
        for (int64_t c = 0; c < count; c++) {
            if (kept_[c] < first) {
                end_block();
                first = plan_.block_start(row.batch, kept_[c]);
            }
            if (kept_[c] < span) {
                settle(partial, total_, lost, width + 1);
                span = plan_.span_start(row.batch, kept_[c]);
            }
            const float weight = weights_[c];
            block[width] += weight;
            const float* value = plan_.look(p.value, row.batch, key_head, kept_[c], width, room);
            if (!all_finite(value, width)) return false;
            if (plan_.drop_below &&
                random_bits(plan_.key_word(kept_[c]), row.random_low, row.random_high) < plan_.drop_below)
                continue;
            for (int64_t d = 0; d < width; d++) block[d] = multiply_add(weight, value[d], block[d]);
        }
        end_block();
        settle(partial, total_, lost, width + 1);
        for (int64_t d = 0; d <= width; d++) total_[d] += lost[d];
        return true;
    }

    const Plan& plan_;
    const TraProblem& problem_;
    std::vector<int64_t> kept_;
    std::vector<float> scores_, weights_;  // of the kept keys; weights_ holds their logits first
    float largest_score_ = 0;              // of a visible key
    float total_[kWidest + 1];
};

// About how many multiplications single rows will take, if half of the keys are kept.
double single_row_work(const Plan& plan) {
    const TraProblem& p = plan.problem;
    if (!plan.has_bounds()) return kInfinity;
    double keys = 0;
    for (int64_t row = 0; row < p.batch * p.query_heads * p.query_length; row++) {
        const int64_t query = row % p.query_length, head = row / p.query_length % p.query_heads;
        const int64_t batch = row / p.query_length / p.query_heads;
        const double decay = plan.same_scores ? plan.decay : decay_needed(p, plan.scores_of(batch, head, query), p.tolerance);
        keys -= 2 * decay / plan.number(p.log_gate, batch, head, query);
    }
    return keys >= 0 ? keys * p.width : kInfinity;
}

}  // namespace
