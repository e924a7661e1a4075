// Who walks which rows, and how several walks add to the gradients of one key.
#pragma once

#include "walk.h"

namespace {

// Rows of one head in one work item when everything is visited: their state stays in L2.
constexpr int64_t kFullVisitRows = 512;
// With an early stop an item has at least this many: every item packs its keys anew.
constexpr int64_t kLeastRows = 2048;
// Rows of one head in one block of backward, at least: every block ends with few of them under way.
constexpr int64_t kLeastBackwardRows = 8192;
constexpr int64_t kMostBackwardBlocks = 8;

int64_t rows_per_item(const Plan& plan) {
    const TraProblem& p = plan.problem;
    if (!(p.tolerance > 0)) return std::max<int64_t>(1, kFullVisitRows / plan.group);
    int64_t heads = std::max<int64_t>(1, p.batch * p.key_heads), wanted = p.threads > 1 ? 2 * p.threads : 1;
    if (heads >= wanted) return p.query_length;
    return std::max<int64_t>(kLeastRows / plan.group + 1, p.query_length * heads / wanted + 1);
}

int64_t forward_items(const Plan& plan) {
    const TraProblem& p = plan.problem;
    int64_t size = rows_per_item(plan);
    return p.batch * p.key_heads * ((p.query_length + size - 1) / size);
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
        if (!plan.all_safe && !p.piece)
            maximum.run(head / p.key_heads, head % p.key_heads, begin, end);
        forward.run(head / p.key_heads, head % p.key_heads, begin, end);
    }
};

// Backward walks a head in blocks of rows. Which rows form a block depends on the length alone, so that bits do not
// depend on who walks them. A key gets its gradients from several blocks; what they leave for each other takes memory,
// so there must not be many.
struct BackwardShare {
    const TraProblem& problem;
    const int64_t size, blocks, heads;
    std::vector<KeyGradients> apart;         // of each block of each head
    std::vector<std::atomic<int64_t>> left;  // blocks of each head that are not finished

    explicit BackwardShare(const Plan& plan)
        : problem(plan.problem), size(block_size(plan)),
          blocks(std::max<int64_t>(1, (problem.query_length + size - 1) / size)),
          heads(problem.batch * problem.key_heads), apart(heads * blocks), left(heads) {
        for (auto& count : left) count = blocks;
    }
    static int64_t block_size(const Plan& plan) {
        const int64_t rows = plan.problem.tolerance > 0 ? kLeastBackwardRows : kLeastRows;
        return std::max(rows / plan.group, plan.problem.query_length / kMostBackwardBlocks) + 1;
    }
    int64_t items() const { return heads * blocks; }
    // The first key that no row before the block sees. Of a piece, all rows may come after its keys, or before them.
    int64_t first_key(int64_t block) const {
        return block ? std::clamp<int64_t>(block * size + problem.first_position, 0, problem.key_length) : 0;
    }
};

struct BackwardWorker {
    const Plan& plan;
    BackwardShare& share;
    Walk<Mode::kBackward> walk;
    BackwardWorker(const Plan& p, BackwardShare& with) : plan(p), share(with), walk(p) {}

    void operator()(int64_t item) {
        const TraProblem& p = plan.problem;
        // The last rows of a head are the dearest: they come first.
        const int64_t head = item / share.blocks, block = share.blocks - 1 - item % share.blocks;
        const int64_t batch = head / p.key_heads, key_head = head % p.key_heads;
        const int64_t begin = block * share.size, end = std::min(p.query_length, begin + share.size);
        const int64_t low = share.first_key(block);
        const int64_t high = end < p.query_length ? share.first_key(block + 1) : p.key_length;
        KeyGradients* parts = &share.apart[head * share.blocks];
        // A gradient in half precision is rounded once, when it is complete.
        parts[block].high = share.blocks > 1 && plan.type != kFloat32 ? high : low;
        parts[block].width = p.width + p.value_width;
        walk.run(batch, key_head, begin, end, &parts[block]);
        int64_t finished = walk.finished();
        while (finished > low) skip_key(plan, batch, key_head, --finished);
        if (--share.left[head] == 0) join(batch, key_head, parts);
    }

    // Adds what the blocks of a head have left, from the last to the first, to what is written.
    void join(int64_t batch, int64_t key_head, KeyGradients* parts) {
        const TraProblem& p = plan.problem;
        Components grad_key, grad_value;
        for (int64_t key = 0; key < p.key_length; key++) {
            bool read = false;
            for (int64_t block = share.blocks - 1; block >= 0; block--) {
                if (!parts[block].has(key)) continue;
                if (!read) {
                    if (p.grad_key.data) plan.read(p.grad_key, batch, key_head, key, p.width, grad_key);
                    if (p.grad_value.data) plan.read(p.grad_value, batch, key_head, key, p.value_width, grad_value);
                    read = true;
                }
                const float* part = parts[block].find(key);
                for (int64_t d = 0; d < p.width; d++) grad_key[d] += part[d] * p.scale;
                for (int64_t d = 0; d < p.value_width; d++) grad_value[d] += part[p.width + d];
            }
            if (!read) continue;
            auto as_it_is = [](float grad) { return grad; };
            if (p.grad_key.data) plan.write(p.grad_key, batch, key_head, key, p.width, grad_key, as_it_is);
            if (p.grad_value.data)
                plan.write(p.grad_value, batch, key_head, key, p.value_width, grad_value, as_it_is);
        }
        for (int64_t block = 0; block < share.blocks; block++) parts[block].rows = {};
    }
};

}  // namespace
