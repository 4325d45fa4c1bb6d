/* Matching a chain of blocks: the slots that hold every block so far, and for those that left, how far they came. */
#ifndef RANKWAY_CORE_MATCH_H
#define RANKWAY_CORE_MATCH_H

#include "_core_holders.h"

typedef struct {
    uint32_t slot; /* outside */
    uint32_t depth;
} Run;

#define ROW_HEADER 0x0000FFFFFFFCFFFFULL /* used, room / 4, chunk[0] */
#define FEW_CHUNKS 32
#define FEW_RUNS 128

typedef struct {
    Holders *holders;
    uint64_t word; /* the slots still running, inline; 0: in the chunks below */
    unsigned chunks; /* 0 with word 0: nobody runs any more */
    uint16_t *chunk;
    uint64_t *mask;
    uint64_t digest; /* of the slots in chunks, if they are just those of a row that was met; 0: unknown */
    uint32_t depth; /* blocks matched so far */
    size_t runs; /* finished, in `run` */
    Run *run;
    bool failed; /* no memory */
    uint16_t few_chunk[FEW_CHUNKS];
    uint64_t few_mask[FEW_CHUNKS];
    Run few_run[FEW_RUNS];
} Match;

static void match_open(Match *m, Holders *h)
{
    m->holders = h;
    m->word = 0;
    m->chunks = 0;
    m->chunk = m->few_chunk;
    m->mask = m->few_mask;
    m->digest = 0;
    m->depth = 0;
    m->runs = 0;
    m->run = m->few_run;
    m->failed = false;
}

static void match_close(Match *m)
{
    if (m->chunk != m->few_chunk)
        free(m->chunk);
    if (m->mask != m->few_mask)
        free(m->mask);
    if (m->run != m->few_run)
        free(m->run);
}

static inline void match_leave(Match *m, uint32_t id)
{
    uint32_t outside = m->holders->slot[id].outside;
    if (outside != NOBODY)
        m->run[m->runs++] = (Run){outside, m->depth};
}

static void match_leave_mask(Match *m, unsigned chunk, uint64_t bits)
{
    for (; bits; bits &= bits - 1)
        match_leave(m, 64 * chunk + (unsigned)__builtin_ctzll(bits));
}

/* The holders of the first block start to run. */
static void match_start(Match *m, uint64_t word)
{
    if (is_mask(word)) {
        m->chunks = 1;
        m->chunk[0] = 0;
        m->mask[0] = word & ~MASK;
        return;
    }
    if (!is_row(word)) {
        m->word = word;
        return;
    }
    Row *row = row_of(word);
    size_t slots = 0;
    for (unsigned i = 0; i < row->used; i++)
        slots += (size_t)__builtin_popcountll(row_mask(row)[i]);
    if (slots > FEW_RUNS)
        m->run = malloc(slots * sizeof *m->run);
    if (row->used > FEW_CHUNKS) {
        m->chunk = malloc(row->used * sizeof *m->chunk);
        m->mask = malloc(row->used * sizeof *m->mask);
    }
    if (!m->run || !m->chunk || !m->mask) {
        m->failed = true;
        return;
    }
    m->digest = row->digest;
    m->chunks = row->used;
    memcpy(m->chunk, row->chunk, row->used * sizeof *m->chunk);
    memcpy(m->mask, row_mask(row), row->used * sizeof *m->mask);
}

/* Of the runners in chunks, only those of an inline set go on. */
static void match_narrow(Match *m, uint64_t word)
{
    uint32_t ids[3];
    unsigned count = 0;
    for (unsigned i = 0; i < (word & 3); i++) {
        uint32_t id = inline_slot(word, i);
        unsigned at = row_position(m->chunk, m->chunks, id / 64);
        if (at < m->chunks && m->chunk[at] == id / 64 && m->mask[at] >> id % 64 & 1) {
            ids[count++] = id;
            m->mask[at] &= ~((uint64_t)1 << id % 64);
        }
    }
    for (unsigned i = 0; i < m->chunks; i++)
        match_leave_mask(m, m->chunk[i], m->mask[i]);
    m->chunks = 0;
    m->digest = 0;
    m->word = count ? inline_word(ids, count) : 0;
}

/* Whether all who run are in a set of the same chunks. */
static inline bool chunks_cover_all(unsigned used, const uint16_t *chunk, const uint64_t *mask, const Match *m)
{
    if (used != m->chunks || memcmp(chunk, m->chunk, m->chunks * sizeof *m->chunk))
        return false;
    uint64_t missing = 0;
    for (unsigned i = 0; i < m->chunks; i++)
        missing |= m->mask[i] & ~mask[i];
    return !missing;
}

/* The runners that a block's holders don't include leave. */
static inline void match_meet(Match *m, uint64_t word)
{
    if (m->word) {
        uint32_t ids[3];
        unsigned count = 0;
        for (unsigned i = 0; i < (m->word & 3); i++) {
            uint32_t id = inline_slot(m->word, i);
            if (word_has(word, id))
                ids[count++] = id;
            else
                match_leave(m, id);
        }
        m->word = count ? inline_word(ids, count) : 0;
        return;
    }
    static const uint16_t first_chunk = 0;
    const uint64_t bits = word & ~MASK, *mask = &bits;
    const uint16_t *chunk = &first_chunk;
    unsigned used = 1;
    if (is_row(word)) {
        mask = row_mask(row_of(word));
        chunk = row_of(word)->chunk;
        used = row_of(word)->used;
    } else if (!is_mask(word)) {
        match_narrow(m, word);
        return;
    }
    if (chunks_cover_all(used, chunk, mask, m))
        return;
    unsigned kept = 0, same = 0;
    for (unsigned i = 0, j = 0; i < m->chunks; i++) {
        while (j < used && chunk[j] < m->chunk[i])
            j++;
        uint64_t both = j < used && chunk[j] == m->chunk[i] ? m->mask[i] & mask[j] : 0;
        same += both && both == mask[j];
        if (both != m->mask[i])
            match_leave_mask(m, m->chunk[i], m->mask[i] & ~both);
        if (both) {
            m->chunk[kept] = m->chunk[i];
            m->mask[kept++] = both;
        }
    }
    m->chunks = kept;
    m->digest = is_row(word) && same == used ? row_of(word)->digest : 0;
}

/* All who still run leave: the chain ends here, or has a hole. */
static void match_end(Match *m)
{
    for (unsigned i = 0; i < (m->word & 3); i++)
        match_leave(m, inline_slot(m->word, i));
    for (unsigned i = 0; i < m->chunks; i++)
        match_leave_mask(m, m->chunk[i], m->mask[i]);
    m->word = 0;
    m->chunks = 0;
}

static inline bool match_running(const Match *m) { return m->word || m->chunks; }

/* The holders of the next block of the chain; false: nobody runs any more, and further blocks change nothing. */
static inline bool match_feed(Match *m, uint64_t word)
{
    if (!m->depth)
        match_start(m, word);
    else if (word != m->word)
        match_meet(m, word);
    if (!match_running(m))
        return false;
    m->depth++;
    return true;
}

/* How many of the words, from the first on, are rows of one chunk that include all of a mask: seen at once, since in such a row the
 * mask follows the first chunk's number. `header` is the eight bytes before it without `room`, which is 1 or 2. */
typedef size_t Covered(const uint64_t *word, size_t count, uint64_t header, uint64_t mask);

static size_t covered_plain(const uint64_t *word, size_t count, uint64_t header, uint64_t mask)
{
    size_t i = 0;
    for (; i < count && is_row(word[i]); i++) {
        const byte *row = (const byte *)&row_of(word[i])->used;
        if ((load64(row) & ROW_HEADER) != header || mask & ~load64(row + 8))
            break;
    }
    return i;
}

#ifdef __x86_64__
static __attribute__((target("avx2"))) size_t covered_avx2(const uint64_t *word, size_t count, uint64_t header, uint64_t mask)
{
    __m128i wrong = _mm_set_epi64x(-1, (long long)header), matters = _mm_set_epi64x((long long)mask, (long long)ROW_HEADER);
    size_t i = 0;
#pragma GCC unroll 4
    for (; i < count; i++)
        if (!is_row(word[i]) || !_mm_testz_si128(_mm_xor_si128(_mm_loadu_si128((const __m128i *)&row_of(word[i])->used), wrong), matters))
            break;
    return i;
}
#endif

static Covered *covered = covered_plain;

/* How many of the words, from the first on, are masks that include all bits of `needed`, of which MASK is one. */
static inline size_t covered_by_masks(const uint64_t *word, size_t count, uint64_t needed)
{
    size_t i = 0;
    while (i + 4 <= count && (word[i] & word[i + 1] & word[i + 2] & word[i + 3] & needed) == needed)
        i += 4;
    while (i < count && (word[i] & needed) == needed)
        i++;
    return i;
}

/* Feeds a group of blocks. Mostly nobody leaves, so that is a loop of its own. */
static inline bool match_feed_all(Match *m, const uint64_t *word, size_t count)
{
    for (size_t i = 0; i < count;) {
        size_t first = i;
        if (m->word) {
            for (uint64_t same = m->word; i < count && word[i] == same;)
                i++;
        } else if (m->chunks == 1) {
            if (!m->chunk[0] && !(m->mask[0] & MASK)) /* otherwise no mask has them all */
                i += covered_by_masks(word + i, count - i, m->mask[0] | MASK);
            i += covered(word + i, count - i, 1 | (uint64_t)m->chunk[0] << 32, m->mask[0]);
        } else if (m->digest) {
            while (i < count && is_row(word[i]) && row_of(word[i])->digest == m->digest)
                i++;
        }
        m->depth += (uint32_t)(i - first);
        if (i < count && !match_feed(m, word[i++]))
            return false;
    }
    return true;
}

/* Looks up the holders of blocks whose homes are known, and fetches their rows, three cache lines of them if they are wide; returns how
 * many blocks there are before a hole. */
static inline __attribute__((always_inline)) size_t look_up_by(BucketWord *by, Bucket *const *home, const byte *hashes,
                                                               size_t count, bool wide_rows, uint64_t *word)
{
#pragma GCC unroll 4
    for (size_t i = 0; i < count; i++) {
        uint64_t key = load64(hashes + 8 * i), found = by(home[i], key);
        if (__builtin_expect(!found, 0) && !(found = table_word(home[i], key)))
            return i;
        word[i] = found;
        if (!is_row(found))
            continue;
        const byte *row = (const byte *)row_of(found);
        __builtin_prefetch(row);
        if (wide_rows) {
            __builtin_prefetch(row + 64);
            __builtin_prefetch(row + 128);
        }
    }
    return count;
}

typedef size_t LookUp(Bucket *const *home, const byte *hashes, size_t count, bool wide_rows, uint64_t *word);

static size_t look_up_plain(Bucket *const *home, const byte *hashes, size_t count, bool wide_rows, uint64_t *word)
{
    return look_up_by(bucket_word, home, hashes, count, wide_rows, word);
}

static LookUp *look_up = look_up_plain;

#ifdef __x86_64__
static __attribute__((target("avx2"))) size_t look_up_avx2(Bucket *const *home, const byte *hashes, size_t count,
                                                           bool wide_rows, uint64_t *word)
{
    return look_up_by(bucket_word_avx2, home, hashes, count, wide_rows, word);
}
#endif

/* Finds the homes of blocks and fetches them. */
static inline void match_fetch(const Match *m, const byte *hashes, size_t count, Bucket **home)
{
    const Table table = m->holders->table; /* a copy that no store can change: its fields stay in registers */
#pragma GCC unroll 4
    for (size_t i = 0; i < count; i++)
        __builtin_prefetch(home[i] = table_home(&table, load64(hashes + 8 * i), 0));
}

static inline size_t at_most(size_t a, size_t b) { return a < b ? a : b; }

/* Matches the next blocks of a chain, up to AHEAD of them, which `match_fetch` has been given before. False: nothing more to find. */
static bool match_group(Match *m, Bucket *const *home, const byte *hashes, size_t count)
{
    uint64_t word[AHEAD];
    bool wide_rows = m->holders->slots > 320 && !m->digest; /* a row can pass a cache line, at 10 bytes a chunk */
    size_t found = look_up(home, hashes, count, wide_rows, word);
    bool running = match_feed_all(m, word, found);
    if (running && found < count) {
        match_end(m);
        running = false;
    }
    return running;
}

/* Matches a whole chain, a group at a time: the buckets of one are on the way while the one before is looked up. */
static void match_all(Match *m, const byte *hashes, size_t count)
{
    Bucket *home[2][AHEAD];
    match_fetch(m, hashes, at_most(count, AHEAD), home[0]);
    for (size_t first = 0; first < count; first += AHEAD) {
        size_t group = at_most(count - first, AHEAD), after = first + group;
        match_fetch(m, hashes + 8 * after, at_most(count - after, AHEAD), home[after / AHEAD % 2]);
        if (!match_group(m, home[first / AHEAD % 2], hashes + 8 * first, group))
            return;
    }
    match_end(m);
}

#endif
