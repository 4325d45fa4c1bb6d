/* The choice, as in rankway/choice.py: the same arithmetic in the same order, so that both give the same bits. */
#ifndef RANKWAY_CORE_CHOICE_H
#define RANKWAY_CORE_CHOICE_H

#include <math.h>

#include "_core_match.h"

/* `rankway.choice.LoadTable`, `Weights` and the prompt. */
typedef struct {
    size_t slots;
    const byte *eligible, *known;
    const int64_t *prefill_tokens, *decode_blocks;
    const double *recent;
    double overlap_weight, temperature;
    int64_t prompt_tokens, block_size, own_blocks;
    uint64_t seed;
} Prompt;

typedef struct {
    uint32_t slot;
    uint32_t overlap;
    double cost;
} Candidate;

/* By slot: overlaps of the index and of the active blocks, and costs (of slots that aren't eligible: anything). */
typedef struct {
    uint32_t *cached, *active;
    double *cost;
} Score;

/* 64-bit sums that wrap instead of being undefined; real values are far below. */
static inline int64_t plus(int64_t a, int64_t b) { return (int64_t)((uint64_t)a + (uint64_t)b); }
static inline int64_t minus(int64_t a, int64_t b) { return (int64_t)((uint64_t)a - (uint64_t)b); }

/* Blocks of a prompt that can be cached at all: an engine computes one token at least. */
static inline int64_t most_overlap(const Prompt *p) { return p->prompt_tokens > 0 ? (p->prompt_tokens - 1) / p->block_size : 0; }

static inline int64_t overlap_of(bool known, uint32_t cached, int64_t most)
{
    int64_t overlap = (int64_t)cached & -(int64_t)known;
    return overlap < most ? overlap : most;
}

/* Without branches and calls, so that the compiler makes vectors of it where it may. */
static inline __attribute__((always_inline)) void score_by(const Prompt *p, const Score *s)
{
    const byte *restrict known = p->known;
    const int64_t *restrict prefill_tokens = p->prefill_tokens, *restrict decode_blocks = p->decode_blocks;
    const uint32_t *restrict cached = s->cached, *restrict active = s->active;
    const double *restrict recent = p->recent, weight = p->overlap_weight, block_size = (double)p->block_size;
    const int64_t most = most_overlap(p), tokens = p->prompt_tokens, blocks = p->own_blocks, size = p->block_size;
    double *restrict cost = s->cost;
    for (size_t slot = 0; slot < p->slots; slot++) {
        int64_t overlap = overlap_of(known[slot] != 0, cached[slot], most);
        double prefill = (double)minus(plus(prefill_tokens[slot], tokens), overlap * size) / block_size;
        double decode = (double)minus(plus(decode_blocks[slot], blocks), active[slot]);
        cost[slot] = weight * prefill + decode + recent[slot];
    }
}

typedef void ScoreAll(const Prompt *p, const Score *s);

static void score_all_plain(const Prompt *p, const Score *s) { score_by(p, s); }

static ScoreAll *score_all = score_all_plain;

#ifdef __x86_64__
static __attribute__((target("avx512f,avx512dq,avx512vl,prefer-vector-width=512"), optimize("O3"))) void score_all_avx512(const Prompt *p, const Score *s)
{
    score_by(p, s);
}
#endif

static uint32_t tree_size(const Holders *h, uint32_t outside)
{
    uint32_t id = id_of(h, outside);
    return id == NOBODY ? 0 : h->slot[id].size;
}

/* The eligible slot of the least cost; among equals that of the smallest tree, among those any. `slots`: there is none. */
static size_t cheapest(const Prompt *p, const Score *s, const Holders *index)
{
    size_t best = p->slots;
    uint64_t ties = 1, random = p->seed;
    uint32_t best_size = 0;
    bool sized = false; /* a tree's size is a random read: only for ties */
    for (size_t slot = 0; slot < p->slots; slot++) {
        if (!p->eligible[slot])
            continue;
        if (best == p->slots || s->cost[slot] < s->cost[best]) {
            best = slot;
            ties = 1;
            sized = false;
        } else if (s->cost[slot] == s->cost[best]) {
            uint32_t size = tree_size(index, (uint32_t)slot);
            if (!sized)
                best_size = tree_size(index, (uint32_t)best);
            sized = true;
            if (size < best_size) {
                best = slot;
                best_size = size;
                ties = 1;
            } else if (size == best_size && next_random(&random) % ++ties == 0) {
                best = slot;
            }
        }
    }
    return best;
}

/* Draws an eligible slot from softmax(-cost / temperature). `shares` has room for a number a slot. `slots`: there is none. */
static size_t sample(const Prompt *p, const Score *s, const Holders *index, double *shares)
{
    uint64_t random = p->seed;
    size_t first = 0, last = p->slots;
    while (first < p->slots && !p->eligible[first])
        first++;
    if (first == p->slots)
        return first;
    double low = s->cost[first], high = low, total = 0;
    for (size_t slot = first; slot < p->slots; slot++) {
        if (!p->eligible[slot])
            continue;
        low = s->cost[slot] < low ? s->cost[slot] : low;
        high = s->cost[slot] > high ? s->cost[slot] : high;
    }
    double range = high - low;
    if (range == 0)
        return cheapest(p, s, index);
    for (size_t slot = first; slot < p->slots; slot++) {
        shares[slot] = p->eligible[slot] ? exp(-(s->cost[slot] - low) / range / p->temperature) : 0;
        total += shares[slot];
    }
    double point = (double)(next_random(&random) >> 11) * 0x1p-53 * total;
    for (size_t slot = first; slot < p->slots; slot++) {
        if (!p->eligible[slot])
            continue;
        last = slot;
        point -= shares[slot];
        if (point < 0)
            break;
    }
    return last;
}

/* Picks what this processor does fastest; once, before any match. */
static void choose_instructions(void)
{
#ifdef __x86_64__
    if (__builtin_cpu_supports("avx2")) {
        look_up = look_up_avx2;
        covered = covered_avx2;
    }
    if (__builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
        score_all = score_all_avx512;
#endif
}

#endif
