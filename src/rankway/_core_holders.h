/* Sets of slots per block, and per slot the size and digest of its set of blocks.
 *
 * A block's table word holds its slots. Low two bits 1 … 3: that many slots inline, ascending, 20 bits each. Low bits 0: the
 * address of a Row, a sparse bitmap for four slots and more. Outside slots map to dense inside ids, so rows stay short whatever
 * numbers the owner hands out, and `clear` is O(1): the slot's id dies and is swept from the table by later calls, a few
 * segments each (membership lists per slot would cost 8 to 16 bytes a block and a cache miss a removal).
 */
#ifndef RANKWAY_CORE_HOLDERS_H
#define RANKWAY_CORE_HOLDERS_H

#include "_core_table.h"

#define MAX_SLOTS (1u << 20)
#define NOBODY UINT32_MAX

/* ---- Rows: chunks of 64 slots, only those that aren't empty: ascending numbers, then (8-aligned) a mask each. */

typedef struct {
    uint16_t used, room;
    uint16_t chunk[];
} Row;

#define ROW_CLASSES 16
#define POOLED_CLASSES 7
static const uint16_t ROW_ROOM[ROW_CLASSES] = {1, 2, 4, 6, 10, 18, 34, 66, 130, 258, 514, 1026, 2050, 4098, 8194, 16384};

static inline size_t row_masks_at(unsigned room) { return (sizeof(Row) + 2 * room + 7) & ~(size_t)7; }
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

static inline bool is_row(uint64_t word) { return !(word & 3); }
static inline Row *row_of(uint64_t word) { return (Row *)(uintptr_t)word; }
static inline uint32_t inline_slot(uint64_t word, unsigned i) { return (word >> (2 + 20 * i)) & (MAX_SLOTS - 1); }
static inline uint64_t inline_word(const uint32_t *ids, unsigned count)
{
    uint64_t word = count;
    for (unsigned i = 0; i < count; i++)
        word |= (uint64_t)ids[i] << (2 + 20 * i);
    return word;
}

static bool word_has(uint64_t word, uint32_t id)
{
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

/* The row with one more slot (it may have moved); 0: no memory. */
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
    return (uintptr_t)row;
}

/* A set with one more slot, which it lacks; 0: no memory, and the old word stands. */
static uint64_t word_add(RowPool *pool, uint64_t word, uint32_t id)
{
    if (is_row(word))
        return row_add(pool, row_of(word), id);
    uint32_t ids[4];
    unsigned count = word & 3, at = 0;
    for (; at < count && inline_slot(word, at) < id; at++)
        ids[at] = inline_slot(word, at);
    ids[at] = id;
    for (unsigned i = at; i < count; i++)
        ids[i + 1] = inline_slot(word, i);
    if (count < 3)
        return inline_word(ids, count + 1);
    unsigned chunks = 1; /* room for all four at once: row_add can't fail below */
    for (unsigned i = 1; i < 4; i++)
        chunks += ids[i] / 64 != ids[i - 1] / 64;
    Row *row = row_new(pool, chunks);
    for (unsigned i = 0; row && i < 4; i++)
        row_add(pool, row, ids[i]);
    return (uintptr_t)row;
}

/* What a row's word becomes after slots left it: 0, inline for up to three, or a row that fits. */
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
    if (!(mask[at] &= ~((uint64_t)1 << id % 64)))
        row_drop_chunk(row, at);
    return row_settle(pool, row);
}

/* ---- Holders: the table, its slots, and the sweep that removes dead ids from it. */

enum { FREE, LIVE, SWEPT, WAITING }; /* SWEPT: this pass of the sweep removes it; WAITING: the next one */

typedef struct {
    uint64_t digest;
    uint32_t size;
    uint32_t outside; /* NOBODY: dead or free */
} Slot;

typedef struct {
    Table table;
    Table *counts; /* a second table whose entries are tagged with ids, or NULL; swept along */
    RowPool rows;
    uint32_t *inside; /* outside slot -> id, or NOBODY */
    size_t outsides;
    Slot *slot; /* by id */
    byte *state;
    uint64_t *dead; /* a bit an id */
    uint32_t *vacant; /* ids to reuse, a stack */
    size_t slots, slot_room, vacancies;
    size_t dying; /* ids that are SWEPT or WAITING */
    uint64_t cursor; /* how far the pass has come in the space of places */
    bool in_counts; /* which table the cursor is in */
} Holders;

static bool holders_open(Holders *h, const uint64_t secret[2], Table *counts)
{
    memset(h, 0, sizeof *h);
    h->counts = counts;
    return table_open(&h->table, secret, 0);
}

static void holders_close(Holders *h)
{
    if (h->table.directory)
        for (size_t i = 0; i < directory_size(&h->table); i += directory_span(&h->table, h->table.directory[i])) {
            Bucket *segment = segment_of(h->table.directory[i]);
            for (unsigned at = 0; at < SEGMENT_BUCKETS; at++)
                for (unsigned e = 0; e < BUCKET_ENTRIES && segment[at].word[e]; e++)
                    if (is_row(segment[at].word[e]))
                        row_free(&h->rows, row_of(segment[at].word[e]));
        }
    table_close(&h->table);
    free(h->inside);
    free(h->slot);
    free(h->state);
    free(h->dead);
    free(h->vacant);
}

static size_t holders_bytes(const Holders *h)
{
    return table_bytes(&h->table) + h->rows.bytes + h->outsides * sizeof *h->inside +
           h->slot_room * (sizeof *h->slot + sizeof *h->state + sizeof *h->vacant) + h->slot_room / 8;
}

static inline uint32_t id_of(const Holders *h, uint32_t outside) { return outside < h->outsides ? h->inside[outside] : NOBODY; }
static inline bool is_dead(const Holders *h, uint32_t id) { return h->dead[id / 64] >> id % 64 & 1; }

/* A set without its dead ids; 0: empty. */
static uint64_t word_purge(Holders *h, uint64_t word)
{
    if (!is_row(word)) {
        uint32_t ids[3];
        unsigned count = 0;
        for (unsigned i = 0; i < (word & 3); i++)
            if (!is_dead(h, inline_slot(word, i)))
                ids[count++] = inline_slot(word, i);
        return count ? inline_word(ids, count) : 0;
    }
    Row *row = row_of(word);
    uint64_t *mask = row_mask(row), gone = 0;
    for (unsigned i = row->used; i-- > 0;) {
        gone |= mask[i] & h->dead[row->chunk[i]];
        if (!(mask[i] &= ~h->dead[row->chunk[i]]))
            row_drop_chunk(row, i);
    }
    return gone ? row_settle(&h->rows, row) : word;
}

static void sweep_segment(Holders *h, Table *t, Bucket *segment)
{
    for (unsigned at = 0; at < SEGMENT_BUCKETS; at++)
        for (unsigned e = 0; e < BUCKET_ENTRIES && segment[at].word[e];) {
            uint64_t *word = &segment[at].word[e];
            if (t == h->counts)
                *word = is_dead(h, *word & t->tag_mask) ? 0 : *word;
            else
                *word = word_purge(h, *word);
            if (*word) {
                e++;
                continue;
            }
            *word = ~(uint64_t)0; /* anything but free, until it is erased: another entry may take its place */
            table_erase(t, (Spot){&segment[at], e, true, false});
        }
}

static void end_pass(Holders *h)
{
    for (size_t id = 0; h->dying && id < h->slots; id++)
        if (h->state[id] == SWEPT) {
            h->state[id] = FREE;
            h->dead[id / 64] &= ~((uint64_t)1 << id % 64);
            h->vacant[h->vacancies++] = (uint32_t)id;
            h->dying--;
        } else if (h->state[id] == WAITING) {
            h->state[id] = SWEPT;
        }
}

static inline bool needs_upkeep(const Holders *h)
{
    return h->dying || table_sparse(&h->table) || (h->counts && table_sparse(h->counts));
}

/* One segment's worth of the work that `clear` and removals have put off: dead ids leave, sparse segments merge. */
static void upkeep_step(Holders *h)
{
    Table *t = h->in_counts ? h->counts : &h->table;
    size_t at = h->cursor >> (64 - t->depth);
    size_t span = directory_span(t, t->directory[at]);
    size_t first = at & ~(span - 1);
    unsigned depth = t->depth;
    if (h->dying)
        sweep_segment(h, t, segment_of(t->directory[first]));
    if (table_sparse(t))
        table_merge(t, first); /* may halve the directory: `first` and `span` are of the old depth */
    h->cursor = (uint64_t)(first + span) << (64 - depth); /* past the last segment: 0 */
    if (h->cursor)
        return;
    if (h->counts)
        h->in_counts = !h->in_counts;
    if (!h->in_counts)
        end_pass(h);
}

/* Before every change: a share of the upkeep in proportion to the change, so that none of it is long. */
static inline void upkeep(Holders *h, size_t changes)
{
    for (size_t steps = 1 + changes / 64; steps && needs_upkeep(h); steps--)
        upkeep_step(h);
}

static void finish_sweep(Holders *h)
{
    while (h->dying)
        upkeep_step(h);
}

/* A new array of `room` items with the first `used` of the old one, which is freed; false: no memory. */
static bool widen(void *array, size_t item, size_t room)
{
    void *old, *wider;
    memcpy(&old, array, sizeof old);
    wider = realloc(old, room * item);
    if (!wider)
        return false;
    memcpy(array, &wider, sizeof wider);
    return true;
}

static bool more_ids(Holders *h)
{
    size_t room = h->slot_room ? 2 * h->slot_room : 64;
    if (!widen(&h->slot, sizeof *h->slot, room) || !widen(&h->state, 1, room) || !widen(&h->vacant, sizeof *h->vacant, room) ||
        !widen(&h->dead, 1, room / 8))
        return false;
    memset((byte *)h->dead + h->slot_room / 8, 0, (room - h->slot_room) / 8);
    h->slot_room = room;
    return true;
}

/* The id of a slot, a new one at need; NOBODY: no memory. */
static uint32_t id_for(Holders *h, uint32_t outside)
{
    uint32_t id = id_of(h, outside);
    if (id != NOBODY)
        return id;
    if (outside >= h->outsides) {
        size_t room = outside + 1 > 2 * h->outsides ? outside + 1 : 2 * h->outsides;
        if (!widen(&h->inside, sizeof *h->inside, room))
            return NOBODY;
        memset(h->inside + h->outsides, 0xFF, (room - h->outsides) * sizeof *h->inside);
        h->outsides = room;
    }
    if (!h->vacancies && h->slots == MAX_SLOTS)
        finish_sweep(h);
    if (h->vacancies) {
        id = h->vacant[--h->vacancies];
    } else {
        if (h->slots == h->slot_room && !more_ids(h))
            return NOBODY;
        id = (uint32_t)h->slots++;
    }
    h->slot[id] = (Slot){0, 0, outside};
    h->state[id] = LIVE;
    h->inside[outside] = id;
    return id;
}

/* Makes a slot empty; returns how many blocks it held. */
static size_t holders_clear(Holders *h, uint32_t outside)
{
    uint32_t id = id_of(h, outside);
    if (id == NOBODY)
        return 0;
    size_t held = h->slot[id].size;
    h->inside[outside] = NOBODY;
    h->slot[id] = (Slot){0, 0, NOBODY};
    h->dead[id / 64] |= (uint64_t)1 << id % 64;
    bool in_pass = h->cursor || h->in_counts;
    h->state[id] = in_pass ? WAITING : SWEPT;
    h->dying++;
    return held;
}

enum change { FAILED, UNCHANGED, CHANGED };

/* Adds a block to an id. */
static inline enum change hold(Holders *h, uint32_t id, Bucket *home, uint64_t key)
{
    Spot spot = table_find(home, key, 0, 0);
    if (!spot.found) {
        if (!table_insert(&h->table, spot, key, inline_word(&id, 1)))
            return FAILED;
    } else {
        uint64_t *word = &spot.bucket->word[spot.entry];
        if (word_has(*word, id))
            return UNCHANGED;
        uint64_t wider = word_add(&h->rows, *word, id);
        if (!wider)
            return FAILED;
        *word = wider;
    }
    h->slot[id].size++;
    h->slot[id].digest ^= mix(key);
    return CHANGED;
}

/* Takes a block from an id. */
static inline enum change let_go(Holders *h, uint32_t id, Bucket *home, uint64_t key)
{
    Spot spot = table_find(home, key, 0, 0);
    if (!spot.found || !word_has(spot.bucket->word[spot.entry], id))
        return UNCHANGED;
    uint64_t word = word_remove(&h->rows, spot.bucket->word[spot.entry], id);
    if (word)
        spot.bucket->word[spot.entry] = word;
    else
        table_erase(&h->table, spot);
    h->slot[id].size--;
    h->slot[id].digest ^= mix(key);
    return CHANGED;
}

#define AHEAD 16 /* blocks between a prefetch and its use: about a memory latency's worth of work */

/* The homes of the next blocks of a batch, fetched ahead of their use. */
typedef struct {
    const byte *hashes;
    size_t count, next; /* `next`: the first block whose home isn't known */
    unsigned epoch;
    Bucket *home[AHEAD];
} Ahead;

static inline void ahead_fetch(Ahead *a, const Table *t, size_t until)
{
    for (; a->next < a->count && a->next < until; a->next++)
        __builtin_prefetch(a->home[a->next % AHEAD] = table_home(t, load64(a->hashes + 8 * a->next), 0));
}

static inline void ahead_open(Ahead *a, const Table *t, const byte *hashes, size_t count)
{
    a->hashes = hashes;
    a->count = count;
    a->next = 0;
    a->epoch = t->epoch;
    ahead_fetch(a, t, AHEAD);
}

/* The home of block i, which follows the block of the last call. */
static inline Bucket *ahead_home(Ahead *a, const Table *t, size_t i)
{
    if (a->epoch != t->epoch) { /* a split: what was found before is void */
        a->epoch = t->epoch;
        a->next = i;
        ahead_fetch(a, t, i + AHEAD);
    }
    Bucket *home = a->home[i % AHEAD];
    ahead_fetch(a, t, i + AHEAD + 1);
    return home;
}

/* Adds blocks to a slot; -1: no memory (those before are added). `hashes` are packed. */
static int64_t holders_store(Holders *h, uint32_t outside, const byte *hashes, size_t count)
{
    int64_t added = 0;
    Ahead ahead;
    upkeep(h, count);
    uint32_t id = id_for(h, outside);
    if (id == NOBODY)
        return -1;
    ahead_open(&ahead, &h->table, hashes, count);
    for (size_t i = 0; i < count; i++) {
        enum change change = hold(h, id, ahead_home(&ahead, &h->table, i), load64(hashes + 8 * i));
        if (change == FAILED)
            return -1;
        added += change == CHANGED;
    }
    return added;
}

/* Takes blocks from a slot; returns how many it held. */
static int64_t holders_remove(Holders *h, uint32_t outside, const byte *hashes, size_t count)
{
    int64_t removed = 0;
    Ahead ahead;
    upkeep(h, count);
    uint32_t id = id_of(h, outside);
    if (id == NOBODY)
        return 0;
    ahead_open(&ahead, &h->table, hashes, count);
    for (size_t i = 0; i < count; i++)
        removed += let_go(h, id, ahead_home(&ahead, &h->table, i), load64(hashes + 8 * i)) == CHANGED;
    return removed;
}

static inline bool holds(const Holders *h, uint32_t id, uint64_t key)
{
    uint64_t word = id == NOBODY ? 0 : table_word(table_home(&h->table, key, 0), key);
    return word && word_has(word, id);
}

/* Writes the blocks of a slot to `out`, which has room for all of them. */
static void holders_blocks(const Holders *h, uint32_t id, byte *out)
{
    const Table *t = &h->table;
    for (size_t i = 0; i < directory_size(t); i += directory_span(t, t->directory[i])) {
        const Bucket *segment = segment_of(t->directory[i]);
        for (unsigned at = 0; at < SEGMENT_BUCKETS; at++)
            for (unsigned e = 0; e < BUCKET_ENTRIES && segment[at].word[e]; e++)
                if (word_has(segment[at].word[e], id)) {
                    store64(out, segment[at].key[e]);
                    out += 8;
                }
    }
}

/* ---- Matching: the slots that hold every block so far, and for those that left, how far they came. */

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
    m->word = count ? inline_word(ids, count) : 0;
}

/* Whether all who run are in a row of the same chunks. */
static inline bool row_covers_all(const Row *row, const uint64_t *mask, const Match *m)
{
    if (row->used != m->chunks || memcmp(row->chunk, m->chunk, m->chunks * sizeof *m->chunk))
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
    if (!is_row(word)) {
        match_narrow(m, word);
        return;
    }
    Row *row = row_of(word);
    const uint64_t *mask = row_mask(row);
    if (row_covers_all(row, mask, m))
        return;
    unsigned kept = 0;
    for (unsigned i = 0, j = 0; i < m->chunks; i++) {
        while (j < row->used && row->chunk[j] < m->chunk[i])
            j++;
        uint64_t both = j < row->used && row->chunk[j] == m->chunk[i] ? m->mask[i] & mask[j] : 0;
        if (both != m->mask[i])
            match_leave_mask(m, m->chunk[i], m->mask[i] & ~both);
        if (both) {
            m->chunk[kept] = m->chunk[i];
            m->mask[kept++] = both;
        }
    }
    m->chunks = kept;
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

/* Whether a block's holders include all of a mask in one chunk; true only where that is seen at once: a row of one chunk whose
 * mask follows the first eight bytes. `header` is those bytes without `room`, which is 1 or 2. */
static inline bool row_covers(uint64_t word, uint64_t header, uint64_t mask)
{
    if (!is_row(word))
        return false;
    const byte *row = (const byte *)row_of(word);
    return (load64(row) & ROW_HEADER) == header && !(mask & ~load64(row + 8));
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
            uint64_t header = 1 | (uint64_t)m->chunk[0] << 32, mask = m->mask[0];
            while (i < count && row_covers(word[i], header, mask))
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
    for (size_t i = 0; i < count; i++) {
        word[i] = table_word_by(by, home[i], load64(hashes + 8 * i));
        if (!word[i])
            return i;
        if (!is_row(word[i]))
            continue;
        const byte *row = (const byte *)row_of(word[i]);
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

/* Picks what this processor does fastest; once, before any match. */
static void choose_instructions(void)
{
#ifdef __x86_64__
    if (__builtin_cpu_supports("avx2"))
        look_up = look_up_avx2;
#endif
}

/* Finds the homes of blocks and fetches them. */
static inline void match_fetch(const Match *m, const byte *hashes, size_t count, Bucket **home)
{
    const Table table = m->holders->table; /* a copy that no store can change: its fields stay in registers */
    for (size_t i = 0; i < count; i++)
        __builtin_prefetch(home[i] = table_home(&table, load64(hashes + 8 * i), 0));
}

static inline size_t at_most(size_t a, size_t b) { return a < b ? a : b; }

/* Matches the next blocks of a chain, up to AHEAD of them, which `match_fetch` has been given before. False: nothing more to find. */
static bool match_group(Match *m, Bucket *const *home, const byte *hashes, size_t count)
{
    uint64_t word[AHEAD];
    bool wide_rows = m->holders->slots > 384; /* a row can pass a cache line, at 10 bytes a chunk */
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
