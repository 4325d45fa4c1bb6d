/* Sets of slots in a 64-bit word: what the table keeps for each block.
 *
 * 0: the empty set. Up to three slots stand inline, ascending, 20 bits each; the low two bits are their number. Four and more below
 * MASK_SLOTS are a bit each, under the MASK bit. All other sets are the address of a Row, a sparse bitmap (addresses here have
 * neither the MASK bit nor low bits). Each set has one form only.
 */
#ifndef RANKWAY_CORE_ROWS_H
#define RANKWAY_CORE_ROWS_H

#include <stdbool.h>
#include <stdlib.h>

#include "_core_hash.h"

#define MAX_SLOTS (1u << 20)

/* ---- Rows: chunks of 64 slots, only those that aren't empty: ascending numbers, then (8-aligned) a mask each. */

typedef struct {
    uint64_t digest; /* XOR of the slots' marks: rows of the same slots are known for such by their first cache line */
    uint16_t used, room;
    uint16_t chunk[];
} Row;

static uint64_t marks_secret; /* of the process: so that nobody can make two sets with one digest; by accident it is 2^-64 */

static inline uint64_t slot_mark(uint32_t id) { return splitmix((uint64_t)id + marks_secret); }

/* XOR of the marks of a chunk's slots. */
static inline uint64_t chunk_marks(unsigned chunk, uint64_t bits)
{
    uint64_t marks = 0;
    for (; bits; bits &= bits - 1)
        marks ^= slot_mark(64 * chunk + (unsigned)__builtin_ctzll(bits));
    return marks;
}

#define ROW_CLASSES 16
#define POOLED_CLASSES 7
static const uint16_t ROW_ROOM[ROW_CLASSES] = {1, 2, 4, 6, 10, 18, 34, 66, 130, 258, 514, 1026, 2050, 4098, 8194, 16384};

static inline size_t row_masks_at(unsigned room) { return (offsetof(Row, chunk) + 2 * room + 7) & ~(size_t)7; }
static inline uint64_t *row_mask(Row *r) { return (uint64_t *)((byte *)r + row_masks_at(r->room)); }
static inline size_t row_bytes(unsigned room) { return row_masks_at(room) + 8 * room; }

#define POOL_PAGE_BYTES 65536

typedef struct PoolPage {
    struct PoolPage *next;
} PoolPage;

/* Rows of the small classes come from pages that are freed when no row is left, large ones from malloc. */
typedef struct {
    void *vacant[POOLED_CLASSES];
    PoolPage *pages;
    size_t page_used;
    size_t rows, bytes;
} RowPool;

static unsigned row_class(unsigned room)
{
    unsigned c = 0;
    while (ROW_ROOM[c] < room)
        c++;
    return c;
}

static void pool_drop_pages(RowPool *pool)
{
    while (pool->pages) {
        PoolPage *page = pool->pages;
        pool->pages = page->next;
        free(page);
        pool->bytes -= POOL_PAGE_BYTES;
    }
    memset(pool->vacant, 0, sizeof pool->vacant);
}

static Row *row_new(RowPool *pool, unsigned room)
{
    unsigned c = row_class(room);
    size_t bytes = row_bytes(ROW_ROOM[c]);
    Row *row;
    bool pooled = c < POOLED_CLASSES;
#ifdef __SANITIZE_ADDRESS__
    pooled = false;
#endif
    if (!pooled) {
        row = malloc(bytes);
        if (!row)
            return NULL;
        pool->bytes += bytes;
    } else if (pool->vacant[c]) {
        row = pool->vacant[c];
        memcpy(&pool->vacant[c], row, sizeof(void *));
    } else {
        if (!pool->pages || pool->page_used + bytes > POOL_PAGE_BYTES) {
            PoolPage *page = malloc(POOL_PAGE_BYTES);
            if (!page)
                return NULL;
            page->next = pool->pages;
            pool->pages = page;
            pool->page_used = sizeof(PoolPage);
            pool->bytes += POOL_PAGE_BYTES;
        }
        row = (Row *)((byte *)pool->pages + pool->page_used);
        pool->page_used += bytes;
    }
    pool->rows++;
    row->digest = 0;
    row->used = 0;
    row->room = ROW_ROOM[c];
    return row;
}

static void row_free(RowPool *pool, Row *row)
{
    unsigned c = row_class(row->room);
    bool pooled = c < POOLED_CLASSES;
#ifdef __SANITIZE_ADDRESS__
    pooled = false;
#endif
    pool->rows--;
    if (!pooled) {
        pool->bytes -= row_bytes(row->room);
        free(row);
    } else {
        memcpy(row, &pool->vacant[c], sizeof(void *));
        pool->vacant[c] = row;
    }
    if (!pool->rows)
        pool_drop_pages(pool);
}

/* The row with other room, its content kept; NULL: no memory, and the old one stands. */
static Row *row_resize(RowPool *pool, Row *row, unsigned room)
{
    Row *other = row_new(pool, room);
    if (!other)
        return NULL;
    other->digest = row->digest;
    other->used = row->used;
    memcpy(other->chunk, row->chunk, 2 * row->used);
    memcpy(row_mask(other), row_mask(row), 8 * row->used);
    row_free(pool, row);
    return other;
}

/* First position whose chunk number is not below `chunk`. */
static inline unsigned row_position(const uint16_t *chunks, unsigned used, unsigned chunk)
{
    unsigned low = 0;
    while (used > 8) { /* halve to a short stretch */
        unsigned half = used / 2;
        if (chunks[low + half] < chunk) {
            low += half + 1;
            used -= half + 1;
        } else {
            used = half;
        }
    }
    while (used && chunks[low] < chunk) {
        low++;
        used--;
    }
    return low;
}

/* ---- Words. */

#define MASK ((uint64_t)1 << 63)
#define MASK_SLOTS 63

static inline bool is_mask(uint64_t word) { return word >> 63; }
static inline bool is_row(uint64_t word) { return !(word & (MASK | 3)); }
static inline Row *row_of(uint64_t word) { return (Row *)(uintptr_t)word; }
static inline unsigned inline_count(uint64_t word) { return is_mask(word) ? 0 : word & 3; }
static inline uint32_t inline_slot(uint64_t word, unsigned i) { return (word >> (2 + 20 * i)) & (MAX_SLOTS - 1); }
static inline uint64_t inline_word(const uint32_t *ids, unsigned count)
{
    uint64_t word = count;
    for (unsigned i = 0; i < count; i++)
        word |= (uint64_t)ids[i] << (2 + 20 * i);
    return word;
}

/* The word of slots below MASK_SLOTS, a bit each. */
static inline uint64_t mask_word(uint64_t bits)
{
    unsigned count = (unsigned)__builtin_popcountll(bits);
    if (count > 3)
        return bits | MASK;
    uint32_t ids[3];
    for (unsigned i = 0; i < count; i++, bits &= bits - 1)
        ids[i] = (uint32_t)__builtin_ctzll(bits);
    return count ? inline_word(ids, count) : 0;
}

static bool word_has(uint64_t word, uint32_t id)
{
    if (is_mask(word))
        return id < MASK_SLOTS && word >> id & 1;
    if (!is_row(word)) {
        for (unsigned i = 0; i < (word & 3); i++)
            if (inline_slot(word, i) == id)
                return true;
        return false;
    }
    Row *row = row_of(word);
    unsigned at = row_position(row->chunk, row->used, id / 64);
    return at < row->used && row->chunk[at] == id / 64 && row_mask(row)[at] >> id % 64 & 1;
}

/* The row with one more slot, which it lacks (it may have moved); 0: no memory. */
static uint64_t row_add(RowPool *pool, Row *row, uint32_t id)
{
    unsigned at = row_position(row->chunk, row->used, id / 64);
    if (at == row->used || row->chunk[at] != id / 64) {
        if (row->used == row->room && !(row = row_resize(pool, row, row->room + 1)))
            return 0;
        uint64_t *mask = row_mask(row);
        memmove(&row->chunk[at + 1], &row->chunk[at], 2 * (row->used - at));
        memmove(&mask[at + 1], &mask[at], 8 * (row->used - at));
        row->chunk[at] = (uint16_t)(id / 64);
        mask[at] = 0;
        row->used++;
    }
    row_mask(row)[at] |= (uint64_t)1 << id % 64;
    row->digest ^= slot_mark(id);
    return (uintptr_t)row;
}

/* A set with one more slot, which it lacks; 0: no memory, and the old word stands. */
static uint64_t word_add(RowPool *pool, uint64_t word, uint32_t id)
{
    if (is_row(word))
        return row_add(pool, row_of(word), id);
    if (is_mask(word) && id < MASK_SLOTS)
        return word | (uint64_t)1 << id;
    if (is_mask(word)) {
        Row *wider = row_new(pool, id < 64 ? 1 : 2);
        if (!wider)
            return 0;
        wider->digest = chunk_marks(0, word & ~MASK);
        wider->used = 1;
        wider->chunk[0] = 0;
        row_mask(wider)[0] = word & ~MASK;
        return row_add(pool, wider, id); /* which has room */
    }
    uint32_t ids[4];
    unsigned count = word & 3, at = 0;
    for (; at < count && inline_slot(word, at) < id; at++)
        ids[at] = inline_slot(word, at);
    ids[at] = id;
    for (unsigned i = at; i < count; i++)
        ids[i + 1] = inline_slot(word, i);
    if (count < 3)
        return inline_word(ids, count + 1);
    if (ids[3] < MASK_SLOTS)
        return MASK | (uint64_t)1 << ids[0] | (uint64_t)1 << ids[1] | (uint64_t)1 << ids[2] | (uint64_t)1 << ids[3];
    unsigned chunks = 1; /* room for all four at once: row_add can't fail below */
    for (unsigned i = 1; i < 4; i++)
        chunks += ids[i] / 64 != ids[i - 1] / 64;
    Row *row = row_new(pool, chunks);
    for (unsigned i = 0; row && i < 4; i++)
        row_add(pool, row, ids[i]);
    return (uintptr_t)row;
}

/* What a row's word becomes after slots left it: 0, inline, a mask, or a row that fits. */
static uint64_t row_settle(RowPool *pool, Row *row)
{
    uint64_t *mask = row_mask(row);
    if (row->used <= 3) {
        uint32_t ids[3];
        unsigned count = 0;
        for (unsigned i = 0; i < row->used; i++)
            count += (unsigned)__builtin_popcountll(mask[i]);
        if (count <= 3) {
            count = 0;
            for (unsigned i = 0; i < row->used; i++)
                for (uint64_t bits = mask[i]; bits; bits &= bits - 1)
                    ids[count++] = 64 * row->chunk[i] + (unsigned)__builtin_ctzll(bits);
            row_free(pool, row);
            return count ? inline_word(ids, count) : 0;
        }
    }
    if (row->used == 1 && !row->chunk[0] && !(mask[0] & MASK)) {
        uint64_t bits = mask[0];
        row_free(pool, row);
        return mask_word(bits);
    }
    unsigned c = row_class(row->room);
    if (c >= 2 && row->used <= ROW_ROOM[c - 2]) {
        Row *smaller = row_resize(pool, row, ROW_ROOM[c - 2]);
        row = smaller ? smaller : row;
    }
    return (uintptr_t)row;
}

static void row_drop_chunk(Row *row, unsigned at)
{
    uint64_t *mask = row_mask(row);
    row->used--;
    memmove(&row->chunk[at], &row->chunk[at + 1], 2 * (row->used - at));
    memmove(&mask[at], &mask[at + 1], 8 * (row->used - at));
}

/* A set without one slot, which it has; 0: empty. */
static uint64_t word_remove(RowPool *pool, uint64_t word, uint32_t id)
{
    if (is_mask(word))
        return mask_word(word & ~(MASK | (uint64_t)1 << id));
    if (!is_row(word)) {
        uint32_t ids[3];
        unsigned count = 0;
        for (unsigned i = 0; i < (word & 3); i++)
            if (inline_slot(word, i) != id)
                ids[count++] = inline_slot(word, i);
        return count ? inline_word(ids, count) : 0;
    }
    Row *row = row_of(word);
    unsigned at = row_position(row->chunk, row->used, id / 64);
    uint64_t *mask = row_mask(row);
    row->digest ^= slot_mark(id);
    if (!(mask[at] &= ~((uint64_t)1 << id % 64)))
        row_drop_chunk(row, at);
    return row_settle(pool, row);
}

#endif
