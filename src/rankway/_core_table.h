/* A hash table from a 64-bit key to a 64-bit word that is never 0, whose every operation takes bounded time.
 *
 * Extendible hashing (Fagin et al., 1979): a directory of 16 KiB segments, indexed by the leading bits of the spread key. A segment
 * that overflows is split into two (about 10 µs, whatever the table's size); buddies that have become sparse are merged. Inside
 * a segment, cache-line buckets of four entries with linear probing over at most MAX_PROBE of them, and no tombstones.
 * Entries fill a bucket from the front, so a bucket whose last word is 0 ends a search.
 */
#ifndef RANKWAY_CORE_TABLE_H
#define RANKWAY_CORE_TABLE_H

#include <stdbool.h>
#include <stdlib.h>
#include <sys/mman.h>
#ifdef __x86_64__
#include <immintrin.h>
#endif

#include "_core_hash.h"

#define BUCKET_ENTRIES 4
#define SEGMENT_BUCKETS 256
#define SEGMENT_ENTRIES (BUCKET_ENTRIES * SEGMENT_BUCKETS)
#define MAX_PROBE 32 /* a segment splits at about 89 % */
#define MAX_DEPTH 32

typedef struct {
    uint64_t key[BUCKET_ENTRIES];
    uint64_t word[BUCKET_ENTRIES]; /* 0: free */
} Bucket;

#define SEGMENT_BYTES (SEGMENT_BUCKETS * sizeof(Bucket))
#define SLAB_BYTES ((size_t)2 << 20)
#define SLAB_SEGMENTS (SLAB_BYTES / SEGMENT_BYTES - 1)

/* 2 MiB, aligned to its size (one huge page, where the system has them): this header, then segments. */
typedef struct Slab {
    struct Slab *next, *previous; /* the table's slabs that have vacant segments */
    uint16_t vacant;
    byte vacancy[SLAB_SEGMENTS]; /* numbers of the vacant segments, which are all zeros; a stack */
} Slab;

typedef struct {
    uintptr_t *directory; /* 2^depth of: segment address | local depth (segments are aligned, depth < 64) */
    unsigned depth, shift; /* shift = 64 - depth */
    size_t at_depth[MAX_DEPTH + 1]; /* segments of each local depth */
    size_t segments;
    size_t entries;
    Slab *roomy;
    size_t slabs;
    unsigned epoch;     /* counts splits and merges: homes found before are void */
    uint64_t secret[2]; /* so that no input can aim at one segment */
    uint64_t tag_mask;  /* bits of the word that belong to the key; 0: none */
} Table;

/* Where a key's entry is, or where it would go. */
typedef struct {
    Bucket *bucket;
    unsigned entry;
    bool found;
    bool room; /* not found, and the entry is free */
} Spot;

/* Where a key lies: the leading bits choose the segment, some of the trailing ones the bucket. */
static inline uint64_t spread(const Table *t, uint64_t key, uint64_t tag)
{
    unsigned __int128 product = (unsigned __int128)(key ^ tag * PRIME3 ^ t->secret[0]) * t->secret[1];
    // One multiplication leaves keys that follow each other clustered; the second, of its folded result, spreads those too.
    uint64_t folded = ((uint64_t)product ^ (uint64_t)(product >> 64)) * PRIME2;
    return folded;
}

static inline uintptr_t *directory_entry(const Table *t, uint64_t place) { return &t->directory[place >> t->shift]; }
static inline Bucket *segment_of(uintptr_t entry) { return (Bucket *)(entry & ~(uintptr_t)63); }
static inline unsigned local_depth(uintptr_t entry) { return entry & 63; }

/* The bucket of a place in its segment: bits 6 to 13 of the place, so that masking gives its offset in bytes. */
static inline unsigned home_number(uint64_t place) { return place / sizeof(Bucket) % SEGMENT_BUCKETS; }
static inline Bucket *home_bucket(Bucket *segment, uint64_t place)
{
    return (Bucket *)((byte *)segment + (place & (SEGMENT_BYTES - sizeof(Bucket))));
}

static inline Bucket *bucket_at(const Table *t, uint64_t place)
{
    return home_bucket(segment_of(*directory_entry(t, place)), place);
}

/* The bucket where a key's search begins. Holds until `epoch` changes. */
static inline Bucket *table_home(const Table *t, uint64_t key, uint64_t tag) { return bucket_at(t, spread(t, key, tag)); }

/* Segments are aligned to their size: a bucket's address tells its segment and its number. */
static inline Bucket *segment_around(Bucket *b) { return (Bucket *)((uintptr_t)b & ~(uintptr_t)(SEGMENT_BYTES - 1)); }
static inline unsigned bucket_number(Bucket *b) { return ((uintptr_t)b & (SEGMENT_BYTES - 1)) / sizeof(Bucket); }
static inline Bucket *bucket_after(Bucket *b, unsigned steps)
{
    return &segment_around(b)[(bucket_number(b) + steps) % SEGMENT_BUCKETS];
}

/* Lane i's word if its key is the one sought, else 0: without a branch, since an entry's position can't be predicted. */
#define LANE(b, i, sought) ((b)->word[i] & -(uint64_t)((b)->key[i] == (sought)))

/* The word of an untagged key in a bucket, 0 if it isn't there (free entries have word 0, whatever their key). */
static inline uint64_t bucket_word(const Bucket *b, uint64_t key)
{
    return LANE(b, 0, key) | LANE(b, 1, key) | LANE(b, 2, key) | LANE(b, 3, key);
}

#ifdef __x86_64__
/* The same in a quarter of the instructions, where the processor can. */
static inline __attribute__((target("avx2"))) uint64_t bucket_word_avx2(const Bucket *b, uint64_t key)
{
    __m256i equal = _mm256_cmpeq_epi64(_mm256_load_si256((const __m256i *)b->key), _mm256_set1_epi64x((long long)key));
    __m256i words = _mm256_and_si256(equal, _mm256_load_si256((const __m256i *)b->word));
    __m128i half = _mm_or_si128(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
    return (uint64_t)_mm_cvtsi128_si64(half) | (uint64_t)_mm_extract_epi64(half, 1);
}
#endif

typedef uint64_t BucketWord(const Bucket *, uint64_t key);

/* The word of an untagged key, 0 if it isn't there. */
static uint64_t table_word(Bucket *home, uint64_t key)
{
    uint64_t word = bucket_word(home, key);
    for (unsigned step = 1; !word && step < MAX_PROBE && bucket_after(home, step - 1)->word[BUCKET_ENTRIES - 1]; step++)
        word = bucket_word(bucket_after(home, step), key);
    return word;
}

/* Lane i's bit if it has the key and the tag. */
#define LANE_BIT(b, i, sought) (unsigned)(((b)->key[i] == (sought)) & (((b)->word[i] & tag_mask) == tag)) << i

static inline unsigned bucket_used(const Bucket *b)
{
    return (b->word[0] != 0) + (b->word[1] != 0) + (b->word[2] != 0) + (b->word[3] != 0);
}

static inline __attribute__((always_inline)) Spot table_find(Bucket *home, uint64_t key, uint64_t tag, uint64_t tag_mask)
{
    Spot spot = {home, 0, false, false};
    for (unsigned step = 1; step <= MAX_PROBE; step++) {
        const Bucket *b = spot.bucket;
        unsigned hits = LANE_BIT(b, 0, key) | LANE_BIT(b, 1, key) | LANE_BIT(b, 2, key) | LANE_BIT(b, 3, key);
        if (hits) {
            spot.entry = (unsigned)__builtin_ctz(hits);
            spot.found = b->word[spot.entry] != 0; /* free entries have key 0 */
            spot.room = !spot.found;
            return spot;
        }
        if (!b->word[BUCKET_ENTRIES - 1]) {
            spot.entry = bucket_used(b);
            spot.room = true;
            return spot;
        }
        spot.bucket = bucket_after(home, step);
    }
    return spot;
}

/* ---- Segments: from slabs, so that 10,000 of them lie on huge pages and go back to the system one by one. */

#ifdef __SANITIZE_ADDRESS__ /* one allocation each, so that the sanitizer sees their edges */
static Bucket *segment_new(Table *t)
{
    void *segment = NULL;
    if (posix_memalign(&segment, SEGMENT_BYTES, SEGMENT_BYTES))
        return NULL;
    memset(segment, 0, SEGMENT_BYTES);
    t->segments++;
    return segment;
}

static void segment_free(Table *t, Bucket *segment)
{
    free(segment);
    t->segments--;
}
#else
static void slab_list(Table *t, Slab *slab)
{
    slab->previous = NULL;
    slab->next = t->roomy;
    if (slab->next)
        slab->next->previous = slab;
    t->roomy = slab;
}

static void slab_unlist(Table *t, Slab *slab)
{
    if (slab->previous)
        slab->previous->next = slab->next;
    else
        t->roomy = slab->next;
    if (slab->next)
        slab->next->previous = slab->previous;
}

static Slab *slab_new(Table *t)
{
    byte *base = mmap(NULL, 2 * SLAB_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (base == MAP_FAILED)
        return NULL;
    size_t before = -(uintptr_t)base % SLAB_BYTES;
    if (before)
        munmap(base, before);
    Slab *slab = (Slab *)(base + before);
    munmap((byte *)slab + SLAB_BYTES, SLAB_BYTES - before);
#ifdef MADV_HUGEPAGE
    if (t->slabs) /* a small table keeps to small pages */
        madvise(slab, SLAB_BYTES, MADV_HUGEPAGE);
#endif
    for (unsigned i = 0; i < SLAB_SEGMENTS; i++)
        slab->vacancy[i] = (byte)(SLAB_SEGMENTS - 1 - i);
    slab->vacant = SLAB_SEGMENTS;
    t->slabs++;
    slab_list(t, slab);
    return slab;
}

static Bucket *segment_new(Table *t)
{
    Slab *slab = t->roomy ? t->roomy : slab_new(t);
    if (!slab)
        return NULL;
    unsigned number = slab->vacancy[--slab->vacant];
    if (!slab->vacant)
        slab_unlist(t, slab);
    t->segments++;
    return (Bucket *)((byte *)slab + (1 + number) * SEGMENT_BYTES);
}

static void segment_free(Table *t, Bucket *segment)
{
    Slab *slab = (Slab *)((uintptr_t)segment & ~(uintptr_t)(SLAB_BYTES - 1));
    t->segments--;
#ifdef __linux__
    madvise(segment, SEGMENT_BYTES, MADV_DONTNEED); /* back to the system; reads as zeros again */
#else
    memset(segment, 0, SEGMENT_BYTES);
#endif
    if (!slab->vacant)
        slab_list(t, slab);
    slab->vacancy[slab->vacant++] = (byte)(((byte *)segment - (byte *)slab) / SEGMENT_BYTES - 1);
    if (slab->vacant == SLAB_SEGMENTS) {
        slab_unlist(t, slab);
        munmap(slab, SLAB_BYTES);
        t->slabs--;
    }
}
#endif

/* ---- Life and growth. */

static bool table_open(Table *t, const uint64_t secret[2], uint64_t tag_mask)
{
    memset(t, 0, sizeof *t);
    t->secret[0] = secret[0];
    t->secret[1] = secret[1] | 1;
    t->tag_mask = tag_mask;
    t->depth = 1; /* never 0: a shift by 64 is undefined */
    t->shift = 63;
    t->directory = malloc(2 * sizeof *t->directory);
    Bucket *segment = t->directory ? segment_new(t) : NULL;
    if (!segment) {
        free(t->directory);
        t->directory = NULL;
        return false;
    }
    t->directory[0] = t->directory[1] = (uintptr_t)segment;
    t->at_depth[0] = 1;
    return true;
}

static size_t directory_size(const Table *t) { return (size_t)1 << t->depth; }

/* How many directory entries lead to a segment. */
static size_t directory_span(const Table *t, uintptr_t entry) { return (size_t)1 << (t->depth - local_depth(entry)); }

static void table_close(Table *t)
{
    if (!t->directory)
        return;
    for (size_t i = 0; i < directory_size(t);) {
        uintptr_t entry = t->directory[i];
        i += directory_span(t, entry);
        segment_free(t, segment_of(entry));
    }
    free(t->directory);
    t->directory = NULL;
}

static size_t table_bytes(const Table *t)
{
    return t->segments * SEGMENT_BYTES + t->slabs * sizeof(Slab) + directory_size(t) * sizeof *t->directory;
}

static inline void bucket_set(Bucket *b, unsigned entry, uint64_t key, uint64_t word)
{
    b->key[entry] = key;
    b->word[entry] = word;
}

/* Puts an entry whose key the segment lacks; false: no room within MAX_PROBE buckets. */
static bool segment_put(Bucket *home, uint64_t key, uint64_t word)
{
    for (unsigned step = 0; step < MAX_PROBE; step++) {
        Bucket *b = bucket_after(home, step);
        if (b->word[BUCKET_ENTRIES - 1])
            continue;
        unsigned i = 0;
        while (b->word[i])
            i++;
        bucket_set(b, i, key, word);
        return true;
    }
    return false;
}

static bool directory_double(Table *t)
{
    size_t size = directory_size(t);
    uintptr_t *wider = t->depth < MAX_DEPTH ? realloc(t->directory, 2 * size * sizeof *wider) : NULL;
    if (!wider)
        return false;
    for (size_t i = size; i-- > 0;)
        wider[2 * i] = wider[2 * i + 1] = wider[i];
    t->directory = wider;
    t->depth++;
    t->shift--;
    return true;
}

static void directory_halve(Table *t)
{
    size_t size = directory_size(t) / 2;
    for (size_t i = 0; i < size; i++)
        t->directory[i] = t->directory[2 * i];
    t->depth--;
    t->shift++;
    uintptr_t *narrower = realloc(t->directory, size * sizeof *narrower);
    if (narrower)
        t->directory = narrower;
}

/* Adds the entries of `from` to sides[1] where the bit of their place is set, else to sides[0]; false: no room for one.
 * `used` counts the entries of the sides' buckets. */
static bool segment_deal(const Table *t, const Bucket *from, Bucket *const sides[2], byte used[2][SEGMENT_BUCKETS], uint64_t bit)
{
    for (unsigned at = 0; at < SEGMENT_BUCKETS; at++)
        for (unsigned i = 0; i < BUCKET_ENTRIES && from[at].word[i]; i++) {
            uint64_t key = from[at].key[i], word = from[at].word[i], place = spread(t, key, word & t->tag_mask);
            unsigned side = (place & bit) != 0, home = home_number(place), step = 0;
            while (used[side][(home + step) % SEGMENT_BUCKETS] == BUCKET_ENTRIES)
                if (++step == MAX_PROBE)
                    return false;
            home = (home + step) % SEGMENT_BUCKETS;
            bucket_set(&sides[side][home], used[side][home]++, key, word);
        }
    return true;
}

/* Splits the segment of a place; false: no memory (or, with odds that keyed spreading makes nil, all its entries on one side). */
static bool table_split(Table *t, uint64_t place)
{
    uintptr_t entry = *directory_entry(t, place);
    unsigned depth = local_depth(entry);
    if (depth == t->depth && !directory_double(t))
        return false;
    Bucket *low = segment_of(entry), *high = segment_new(t), before[SEGMENT_BUCKETS];
    byte used[2][SEGMENT_BUCKETS] = {{0}};
    if (!high)
        return false;
    memcpy(before, low, sizeof before);
    memset(low, 0, SEGMENT_BYTES);
    if (!segment_deal(t, before, (Bucket *[2]){low, high}, used, (uint64_t)1 << (63 - depth))) {
        memcpy(low, before, sizeof before);
        segment_free(t, high);
        return false;
    }
    size_t span = (size_t)1 << (t->depth - depth);
    size_t first = (directory_entry(t, place) - t->directory) & ~(span - 1);
    for (size_t i = 0; i < span; i++)
        t->directory[first + i] = (uintptr_t)(i < span / 2 ? low : high) | (depth + 1);
    t->at_depth[depth]--;
    t->at_depth[depth + 1] += 2;
    t->epoch++;
    return true;
}

/* Puts an entry into its home bucket, which is full: one that is there goes on to `free`, the first place behind it. What is new
 * is what will be asked for, and a bucket that isn't its home costs a wait for memory. False: none may go so far. */
static bool bucket_swap_in(const Table *t, Bucket *home, Spot free, uint64_t key, uint64_t word)
{
    unsigned entry = key % BUCKET_ENTRIES;
    uint64_t old_key = home->key[entry], old_word = home->word[entry];
    unsigned old_home = home_number(spread(t, old_key, old_word & t->tag_mask));
    if ((bucket_number(free.bucket) - old_home) % SEGMENT_BUCKETS >= MAX_PROBE)
        return false;
    bucket_set(free.bucket, free.entry, old_key, old_word);
    bucket_set(home, entry, key, word);
    return true;
}

/* Adds an entry where `table_find` has missed it, or after splits; false: no memory. */
static inline bool table_insert(Table *t, Bucket *home, Spot spot, uint64_t key, uint64_t word)
{
    if (spot.room) {
        if (spot.bucket == home || !bucket_swap_in(t, home, spot, key, word))
            bucket_set(spot.bucket, spot.entry, key, word);
    } else {
        uint64_t place = spread(t, key, word & t->tag_mask);
        do {
            if (!table_split(t, place))
                return false;
        } while (!segment_put(bucket_at(t, place), key, word));
    }
    t->entries++;
    return true;
}

/* Finds an entry that was pushed past a bucket while it was full. */
static bool find_pushed(const Table *t, Bucket *past, Spot *spot)
{
    for (unsigned step = 1; step < MAX_PROBE; step++) {
        Bucket *b = bucket_after(past, step);
        for (unsigned i = 0; i < BUCKET_ENTRIES && b->word[i]; i++) {
            unsigned home = home_number(spread(t, b->key[i], b->word[i] & t->tag_mask));
            if ((bucket_number(b) - home) % SEGMENT_BUCKETS >= step) {
                *spot = (Spot){b, i, true, false};
                return true;
            }
        }
        if (!b->word[BUCKET_ENTRIES - 1])
            return false;
    }
    return false;
}

/* Removes an entry. Others move up to its place, from its bucket or from later ones. */
static void table_erase(Table *t, Spot spot)
{
    t->entries--;
    for (;;) {
        Bucket *b = spot.bucket;
        unsigned last = bucket_used(b) - 1;
        bucket_set(b, spot.entry, b->key[last], b->word[last]);
        bucket_set(b, last, 0, 0);
        if (last < BUCKET_ENTRIES - 1 || !find_pushed(t, b, &spot))
            return;
        bucket_set(b, last, spot.bucket->key[spot.entry], spot.bucket->word[spot.entry]);
    }
}

static bool table_sparse(const Table *t) { return t->segments > 1 && t->entries < t->segments * (SEGMENT_ENTRIES / 4); }

/* Merges the segment whose directory entries start at `first` with its buddy, if both are sparse and it is the later one. */
static void table_merge(Table *t, size_t first)
{
    uintptr_t entry = t->directory[first];
    size_t span = directory_span(t, entry);
    if (!local_depth(entry) || !(first & span) || local_depth(t->directory[first - span]) != local_depth(entry))
        return;
    Bucket *low = segment_of(t->directory[first - span]), *high = segment_of(entry), before[SEGMENT_BUCKETS];
    byte used[2][SEGMENT_BUCKETS];
    size_t count = 0;
    for (unsigned at = 0; at < SEGMENT_BUCKETS; at++)
        count += (used[0][at] = (byte)bucket_used(&low[at])) + bucket_used(&high[at]);
    if (count > SEGMENT_ENTRIES / 2)
        return;
    memcpy(before, low, sizeof before);
    if (!segment_deal(t, high, (Bucket *[2]){low, low}, used, 0)) {
        memcpy(low, before, sizeof before);
        return;
    }
    unsigned depth = local_depth(entry);
    for (size_t i = 0; i < 2 * span; i++)
        t->directory[first - span + i] = (uintptr_t)low | (depth - 1);
    segment_free(t, high);
    t->at_depth[depth] -= 2;
    t->at_depth[depth - 1]++;
    t->epoch++;
    while (t->depth > 1 && !t->at_depth[t->depth])
        directory_halve(t);
}

#endif
