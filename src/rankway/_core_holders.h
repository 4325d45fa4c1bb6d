/* Who holds which block: a set of slots per block, and per slot the size and digest of its set of blocks.
 *
 * Outside slots map to dense inside ids, so rows stay short whatever numbers the owner hands out, and `clear` is O(1): the slot's
 * id dies and is swept from the table by later calls, a few segments each. (Lists of each slot's blocks would cost 8 to 16 bytes a
 * block and a cache miss a removal; so `holders_blocks` reads the whole table, for many slots at once.)
 */
#ifndef RANKWAY_CORE_HOLDERS_H
#define RANKWAY_CORE_HOLDERS_H

#include "_core_rows.h"
#include "_core_table.h"

#define NOBODY UINT32_MAX

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
    if (is_mask(word))
        return mask_word(word & ~(MASK | h->dead[0]));
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
        row->digest ^= chunk_marks(row->chunk[i], mask[i] & h->dead[row->chunk[i]]);
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
        if (!table_insert(&h->table, home, spot, key, inline_word(&id, 1)))
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

static inline void write_block(byte **out, uint32_t id, uint64_t key)
{
    if (out[id]) {
        store64(out[id], key);
        out[id] += 8;
    }
}

/* Writes the blocks of some ids, each to its place in `out` (by id; NULL: not wanted), which moves on. */
static void holders_blocks(const Holders *h, byte **out)
{
    const Table *t = &h->table;
    for (size_t at = 0; at < directory_size(t); at += directory_span(t, t->directory[at])) {
        const Bucket *segment = segment_of(t->directory[at]);
        for (const Bucket *b = segment; b < segment + SEGMENT_BUCKETS; b++)
            for (unsigned e = 0; e < BUCKET_ENTRIES && b->word[e]; e++) {
                uint64_t word = b->word[e];
                for (unsigned i = 0; i < inline_count(word); i++)
                    write_block(out, inline_slot(word, i), b->key[e]);
                for (uint64_t bits = is_mask(word) ? word & ~MASK : 0; bits; bits &= bits - 1)
                    write_block(out, (uint32_t)__builtin_ctzll(bits), b->key[e]);
                for (unsigned i = 0; is_row(word) && i < row_of(word)->used; i++)
                    for (uint64_t bits = row_mask(row_of(word))[i]; bits; bits &= bits - 1)
                        write_block(out, 64 * row_of(word)->chunk[i] + (unsigned)__builtin_ctzll(bits), b->key[e]);
            }
    }
}

#endif
