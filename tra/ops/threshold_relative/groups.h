// Groups of rows under way: where their numbers lie, and what each row sums up.
#pragma once

#include "lanes.h"

namespace {

// The parts of a group: components by lane, for backward also row by row, and row by row what the walk sums up for the
// row: its output in forward, its query's gradient in backward.
template <Mode kMode>
struct Groups {
    const Plan& plan;
    const TraProblem& problem;
    int64_t result_width;  // of what a row sums up
    int64_t grad_at, result_at, total_at, lost_at, query_rows_at, grad_rows_at, group_size;

    explicit Groups(const Plan& of) : plan(of), problem(of.problem) {
        const bool backward = kMode == Mode::kBackward;
        result_width = backward ? plan.width_lanes : kMode == Mode::kForward ? plan.value_lanes : 0;
        grad_at = problem.width * kLanes;
        result_at = grad_at + (backward ? problem.value_width * kLanes : 0);
        total_at = result_at + result_width * round_up(kLanes, kKeys);
        lost_at = total_at + result_width * kLanes;
        query_rows_at = lost_at + result_width * kLanes;
        grad_rows_at = query_rows_at + (backward ? plan.width_lanes * kLanes : 0);
        group_size = grad_rows_at + (backward ? plan.value_lanes * kLanes : 0);
        group_size = round_up(group_size, 64);
    }

    size_t size() const { return groups_.size(); }
    Group<kMode>& operator[](size_t group) { return groups_[group]; }
    float* data(size_t group) { return arena_.data + group * group_size; }
    const float* arena() const { return arena_.data; }

    void clear() { groups_.clear(); }
    void add() {
        const size_t group = groups_.size();
        groups_.emplace_back();
        arena_.reserve((group + 1) * group_size);
        std::memset(data(group), 0, group_size * sizeof(float));
    }

    // A row that enters a lane has its components there, and sums of 0.
    void fill(size_t group, int lane, const float* query, const float* grad) {
        float* base = data(group);
        scatter(base + lane, query, problem.width);
        std::memset(base + result_at + lane * result_width, 0, result_width * sizeof(float));
        if constexpr (kMode == Mode::kBackward) {
            scatter(base + grad_at + lane, grad, problem.value_width);
            std::memcpy(base + query_rows_at + lane * plan.width_lanes, query, problem.width * 4);
            std::memcpy(base + grad_rows_at + lane * plan.value_lanes, grad, problem.value_width * 4);
        }
    }

    // At the end of a span, the sums over it go to their totals.
    void settle(size_t index) {
        Group<kMode>& group = groups_[index];
        float* base = data(index);
        if constexpr (kMode == Mode::kForward) group.lanes.sum.settle();
        if constexpr (kMode == Mode::kBackward) group.lanes.settle();
        for (uint64_t left = group.active; left; left &= left - 1) settle_row(group, base, __builtin_ctzll(left));
    }
    // What a row has summed up, in place.
    float* result(size_t index, int lane) {
        Group<kMode>& group = groups_[index];
        float* base = data(index);
        const int64_t at = lane * result_width;
        if (!(group.settled >> lane & 1)) return base + result_at + at;
        float *partial = base + result_at + at, *total = base + total_at + at, *lost = base + lost_at + at;
        for (int64_t d = 0; d < result_width; d += kWidth) {
            Floats whole = load(total + d), rest = load(lost + d);
            add_term(whole, rest, load(partial + d));
            store(partial + d, whole + rest);
        }
        return partial;
    }

    // A row goes on with what it carried from the piece before.
    void resume(size_t index, int lane) {
        Group<kMode>& group = groups_[index];
        float* base = data(index);
        const float* from = group.row[lane].carried + 1;
        for (float* lanes : carried(group.lanes)) lanes[lane] = *from++;
        for (int64_t part : {total_at, lost_at}) {
            float* to = base + part + lane * result_width;
            std::memset(to, 0, result_width * sizeof(float));
            std::memcpy(to, from, carried_width() * sizeof(float));
            from += carried_width();
        }
        group.settled |= uint64_t(1) << lane;
    }
    // At the end of the piece.
    void suspend(size_t index, int lane) {
        Group<kMode>& group = groups_[index];
        const float* base = data(index);
        float* to = group.row[lane].carried;
        *to++ = 0;
        for (const float* lanes : carried(group.lanes)) *to++ = lanes[lane];
        for (int64_t part : {total_at, lost_at}) {
            std::memcpy(to, base + part + lane * result_width, carried_width() * sizeof(float));
            to += carried_width();
        }
    }

    // Moves a row of the last group into a free lane of another one; returns the lane.
    int move_last(int lane, size_t to) {
        const size_t from = groups_.size() - 1;
        Group<kMode> &source = groups_[from], &target = groups_[to];
        const int free = target.take(source.row[lane]);
        target.settled |= (source.settled >> lane & 1) << free;
        move_lane(source.lanes, lane, target.lanes, free);
        float *old_base = data(from), *new_base = data(to);
        auto move_row = [&](int64_t at, int64_t width) {
            std::memcpy(new_base + at + free * width, old_base + at + lane * width, width * sizeof(float));
        };
        for (int64_t at = 0; at < result_at; at += kLanes) new_base[at + free] = old_base[at + lane];
        for (int64_t at : {result_at, total_at, lost_at}) move_row(at, result_width);
        if (kMode == Mode::kBackward) {
            move_row(query_rows_at, plan.width_lanes);
            move_row(grad_rows_at, plan.value_lanes);
        }
        return free;
    }
    void remove_last() { groups_.pop_back(); }

   private:
    // Totals are not even cleared for rows that end within their first span.
    void settle_row(Group<kMode>& group, float* base, int lane) {
        const int64_t at = lane * result_width;
        float *partial = base + result_at + at, *total = base + total_at + at, *lost = base + lost_at + at;
        if (group.settled >> lane & 1) return ::settle(partial, total, lost, result_width);
        group.settled |= uint64_t(1) << lane;
        for (int64_t d = 0; d < result_width; d += kWidth) {
            store(total + d, load(partial + d));
            store(lost + d, Floats{});
            store(partial + d, Floats{});
        }
    }
    int64_t carried_width() const { return kMode == Mode::kBackward ? problem.width : problem.value_width; }
    static void scatter(float* column, const float* from, int64_t count) {
        for (int64_t d = 0; d < count; d++) column[d * kLanes] = from[d];
    }

    std::vector<Group<kMode>> groups_;
    Buffer arena_;
};

}  // namespace
