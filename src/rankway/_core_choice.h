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

/* Overlaps by slot: of the index, and of the active blocks. Zeroed room for both, then the slots' candidates. */
typedef struct {
    uint32_t *cached, *active;
    Candidate *candidate;
    size_t candidates;
} Score;

/* 64-bit sums that wrap instead of being undefined; real values are far below. */
static inline int64_t plus(int64_t a, int64_t b) { return (int64_t)((uint64_t)a + (uint64_t)b); }
static inline int64_t minus(int64_t a, int64_t b) { return (int64_t)((uint64_t)a - (uint64_t)b); }

static void score_all(const Prompt *p, Score *s)
{
    int64_t most = p->prompt_tokens > 0 ? (p->prompt_tokens - 1) / p->block_size : 0;
    s->candidates = 0;
    for (size_t slot = 0; slot < p->slots; slot++) {
        if (!p->eligible[slot])
            continue;
        int64_t overlap = p->known[slot] ? s->cached[slot] : 0;
        overlap = overlap < most ? overlap : most;
        int64_t to_prefill = minus(plus(p->prefill_tokens[slot], p->prompt_tokens), overlap * p->block_size);
        double prefill = (double)to_prefill / (double)p->block_size;
        double decode = (double)minus(plus(p->decode_blocks[slot], p->own_blocks), s->active[slot]);
        double cost = p->overlap_weight * prefill + decode + p->recent[slot];
        s->candidate[s->candidates++] = (Candidate){(uint32_t)slot, (uint32_t)overlap, cost};
    }
}

static uint32_t tree_size(const Holders *h, uint32_t outside)
{
    uint32_t id = id_of(h, outside);
    return id == NOBODY ? 0 : h->slot[id].size;
}

static const Candidate *cheapest(const Score *s, const Holders *index, uint64_t seed)
{
    const Candidate *best = &s->candidate[0];
    uint32_t best_size = 0;
    bool sized = false; /* a tree's size is a random read: only for ties */
    uint64_t ties = 1;
    for (size_t i = 1; i < s->candidates; i++) {
        const Candidate *c = &s->candidate[i];
        if (c->cost < best->cost) {
            best = c;
            ties = 1;
            sized = false;
        } else if (c->cost == best->cost) {
            uint32_t size = tree_size(index, c->slot);
            if (!sized)
                best_size = tree_size(index, best->slot);
            sized = true;
            if (size < best_size) {
                best = c;
                best_size = size;
                ties = 1;
            } else if (size == best_size && next_random(&seed) % ++ties == 0) {
                best = c;
            }
        }
    }
    return best;
}

/* Draws one from softmax(-cost / temperature). `shares` has room for a number a candidate. */
static const Candidate *sample(const Score *s, const Holders *index, double temperature, uint64_t seed, double *shares)
{
    double low = s->candidate[0].cost, high = low, total = 0;
    for (size_t i = 1; i < s->candidates; i++) {
        low = s->candidate[i].cost < low ? s->candidate[i].cost : low;
        high = s->candidate[i].cost > high ? s->candidate[i].cost : high;
    }
    double range = high - low;
    if (range == 0)
        return cheapest(s, index, seed);
    for (size_t i = 0; i < s->candidates; i++) {
        shares[i] = exp(-(s->candidate[i].cost - low) / range / temperature);
        total += shares[i];
    }
    double point = (double)(next_random(&seed) >> 11) * 0x1p-53 * total;
    for (size_t i = 0; i < s->candidates; i++) {
        point -= shares[i];
        if (point < 0)
            return &s->candidate[i];
    }
    return &s->candidate[s->candidates - 1];
}

#endif
