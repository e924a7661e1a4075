// Threads: PyTorch's own where the caller hands over their pool, otherwise plain ones.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

#include "plan.h"

namespace {

// Multiplications that are worth another thread: some 50 microseconds.
constexpr double kThreadWork = 5e5;

// Items are handed out one by one; no result depends on who takes which. Every thread makes a worker
// of its own, which holds its scratch memory and is called with each item.
template <class MakeWorker>
struct Team {
    const MakeWorker& make_worker;
    int64_t items;
    std::atomic<int64_t> next{0};
    std::atomic<bool> failed{false};

    static void take_part(void* self) {
        Team& team = *static_cast<Team*>(self);
        try {
            int64_t item = team.next++;
            if (item >= team.items) return;
            auto worker = team.make_worker();
            for (; item < team.items && !team.failed; item = team.next++) worker(item);
        } catch (...) {
            team.failed = true;
        }
    }
};

// `work` is about how many multiplications there are. False: memory ran out.
template <class MakeWorker>
bool run_team(const TraProblem& problem, int64_t items, double work, const MakeWorker& make_worker) {
    Team<MakeWorker> team{make_worker, items};
    double worth = std::min(1 + work / kThreadWork, 1e6);  // waking a thread costs time too
    int64_t threads = std::min({int64_t(problem.threads), items, int64_t(worth)});
    if (threads <= 1) {
        team.take_part(&team);
    } else if (problem.parallel) {
        problem.parallel(&team.take_part, &team, unsigned(threads), 0);
    } else {
        std::vector<std::thread> others;
        try {
            for (int64_t t = 1; t < threads; t++) others.emplace_back(&team.take_part, &team);
        } catch (...) {  // fewer threads then
        }
        team.take_part(&team);
        for (std::thread& other : others) other.join();
    }
    return !team.failed;
}

}  // namespace
