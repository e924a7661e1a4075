// What rows make of a key: its weight in forward, its gradients in backward.
#pragma once

#include "lanes.h"
#include "tile.h"

namespace {

// What a vector of rows finds out about one key.
struct Meeting {
    int64_t key;    // in the tile
    Truth visible;  // to the row, wherever its walk ends
    Truth counts;   // kept, and within the row's limit
    Floats score, logit, distance;  // the last one is the count before this key
};

// What a vector of rows makes of one key after another from the tile's `first` on, with its sums in registers.
// Forward and backward leave the key's weight in `place`; backward finds in `grads` the products of the output's
// gradient and the tile's values, and leaves the gradients of the scores there.
template <Mode kMode, bool kDrops, bool kStraight>
struct Rule;

// e^logit, which no weight falls below.
inline Floats bounded_exponential(Floats logit) {
    return exponential(larger(logit, splat(kLeastExponent)));
}
// Whether dropout leaves a key's weight.
inline Truth stays(const Plan& plan, int32_t key, Words random_low, Words random_high) {
    return at_least(random_bits(plan.key_word(key), random_low, random_high), splat(plan.drop_below));
}
inline Floats magnitude(Floats x) { return (Floats)((Ints)x & 0x7fffffff); }

template <bool kDrops, bool kStraight>
struct Rule<Mode::kMaximum, kDrops, kStraight> {
    Lanes<Mode::kMaximum>& lanes;
    const int at;
    Floats largest;

    Rule(const Plan&, const Tile&, int64_t, float*, Lanes<Mode::kMaximum>& of, int lane)
        : lanes(of), at(lane), largest(load(of.largest + lane)) {}
    void meet(const Meeting& met, float*) {
        largest = choose(met.counts, larger(met.logit, largest), largest);
    }
    void save() { store(lanes.largest + at, largest); }
};

template <bool kDrops, bool kStraight>
struct Rule<Mode::kForward, kDrops, kStraight> {
    const Plan& plan;
    const Tile& tile;
    Lanes<Mode::kForward>& lanes;
    const int at;
    const Words random_low, random_high;
    Floats sum;
    int64_t bad = 0;  // how many of the tile's bad values are behind us

    Rule(const Plan& p, const Tile& t, int64_t first, float*, Lanes<Mode::kForward>& of, int lane)
        : plan(p), tile(t), lanes(of), at(lane), random_low(load(of.random_low + lane)),
          random_high(load(of.random_high + lane)), sum{} {
        while (bad < tile.bad_count && tile.bad[bad] < first) bad++;
    }
    void meet(const Meeting& met, float* place) {
        Floats weight = where(met.counts, bounded_exponential(met.logit));
        sum += weight;
        if (__builtin_expect(bad < tile.bad_count && tile.bad[bad] == met.key, 0)) {
            store(lanes.poison + at, choose(met.counts, splat(kNaN), load(lanes.poison + at)));
            bad++;
        }
        if (kDrops) {
            weight = where(stays(plan, tile.index[met.key], random_low, random_high), weight);
        }
        store(place, weight);
    }
    void save() { store(lanes.sum.partial + at, load(lanes.sum.partial + at) + sum); }
};

template <bool kDrops, bool kStraight>
struct Rule<Mode::kBackward, kDrops, kStraight> {
    const Plan& plan;
    const Tile& tile;
    float* const grads;
    Lanes<Mode::kBackward>& lanes;
    const int at;
    const Words random_low, random_high;
    const Floats delta, inverse, gate, behind_limit, reach, threshold, temperature;  // the last one's inverse
    const Floats nearer_spans, nearer_mass;  // gradients and weights of keys of those
    Floats grad_gate, grad_sum, mean, grad_threshold, mass, delta_slope;

    Rule(const Plan& p, const Tile& t, int64_t, float* products, Lanes<Mode::kBackward>& of, int lane)
        : plan(p), tile(t), grads(products), lanes(of), at(lane), random_low(load(of.random_low + lane)),
          random_high(load(of.random_high + lane)), delta(load(of.delta + lane)), inverse(load(of.inverse + lane)),
          gate(load(of.gate + lane)), behind_limit(load(of.behind + lane)), reach(load(of.reach + lane)),
          threshold(load(of.threshold + lane)), temperature(splat(1 / p.problem.straight_through)),
          nearer_spans(load(of.grad_sum.total + lane) + load(of.grad_sum.lost + lane)),
          nearer_mass(load(of.mass.total + lane)),
          grad_gate(load(of.grad_gate.partial + lane)), grad_sum(load(of.grad_sum.partial + lane)),
          mean(load(of.mean.partial + lane)), grad_threshold(load(of.grad_threshold.partial + lane)),
          mass(load(of.mass.partial + lane)), delta_slope(load(of.slope.partial + lane)) {}
    void meet(const Meeting& met, float* place) {
        float* grad_place = grads + met.key * kLanes + at;
        // What the key weighs, or would weigh if it were kept.
        const Truth has_part = kStraight ? both(met.visible, less(met.distance, reach)) : met.counts;
        Floats full = where(has_part, bounded_exponential(met.logit) * inverse), grad_weight = load(grad_place);
        Floats weight = where(met.counts, full), dropped = weight;
        if (kDrops) {
            const Truth stay = stays(plan, tile.index[met.key], random_low, random_high);
            dropped = where(stay, weight) * plan.drop_scale;
            grad_weight = where(stay, grad_weight * plan.drop_scale);
        }
        Floats full_grad = full * (grad_weight - delta), grad = where(met.counts, full_grad);
        grad_gate = multiply_add(grad, met.distance, grad_gate);
        mean = multiply_add(weight, met.distance, mean);
        store(place, dropped);
        store(grad_place, kStraight ? grad + through(met, has_part, full, full_grad) : grad);
        grad_sum += grad;
        if (kStraight) mass += weight;
    }
    // The gradient that passes the threshold: a key that is kept weighs something, and moves all keys behind it one
    // step away. Gradients of a row's scores sum to 0, so that those behind are what the nearer ones lack.
    Floats through(const Meeting& met, Truth has_part, Floats full, Floats full_grad) {
        const Truth within = less(met.distance, behind_limit);
        Floats behind = where(within, nearer_spans + grad_sum), mass_before = where(within, nearer_mass + mass);
        Floats falling = bounded_exponential(-magnitude((met.score - threshold) * temperature));
        Floats slope = falling / ((1.0f + falling) * (1.0f + falling)) * temperature;
        slope = where(has_part, slope);
        Floats passed = slope * multiply_add(gate, -behind, full_grad);
        grad_threshold -= passed;
        delta_slope = multiply_add(slope, multiply_add(gate, -mass_before, full), delta_slope);
        return passed;
    }
    void save() {
        store(lanes.grad_gate.partial + at, grad_gate);
        store(lanes.grad_sum.partial + at, grad_sum);
        store(lanes.mean.partial + at, mean);
        if (!kStraight) return;
        store(lanes.grad_threshold.partial + at, grad_threshold);
        store(lanes.mass.partial + at, mass);
        store(lanes.slope.partial + at, delta_slope);
    }
};

}  // namespace
