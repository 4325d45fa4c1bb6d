/* The arithmetic of block hashes: XXH64, and splitmix64 as a finaliser and as a generator.
 *
 * Written from the public specification of XXH64 (github.com/Cyan4973/xxHash, doc/xxhash_spec.md) and from Steele, Lea, Flood,
 * "Fast splittable pseudorandom number generators", 2014. Little-endian machines only; elsewhere the pure twins serve.
 */
#ifndef RANKWAY_CORE_HASH_H
#define RANKWAY_CORE_HASH_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if !defined(__BYTE_ORDER__) || __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "packed numbers are little-endian; on other machines the pure-Python twins serve"
#endif

typedef unsigned char byte;

#define PRIME1 0x9E3779B185EBCA87ULL
#define PRIME2 0xC2B2AE3D27D4EB4FULL
#define PRIME3 0x165667B19E3779F9ULL
#define PRIME4 0x85EBCA77C2B2AE63ULL
#define PRIME5 0x27D4EB2F165667C5ULL

static inline uint64_t load64(const byte *p) { uint64_t v; memcpy(&v, p, 8); return v; }
static inline uint32_t load32(const byte *p) { uint32_t v; memcpy(&v, p, 4); return v; }
static inline void store64(byte *p, uint64_t v) { memcpy(p, &v, 8); }

static inline uint64_t rotate(uint64_t x, int bits) { return (x << bits) | (x >> (64 - bits)); }

static inline uint64_t xxh_round(uint64_t lane, uint64_t input) { return rotate(lane + input * PRIME2, 31) * PRIME1; }

static inline uint64_t xxh_merge(uint64_t h, uint64_t lane) { return (h ^ xxh_round(0, lane)) * PRIME1 + PRIME4; }

/* XXH64 of `length` bytes. Inlined so that a constant length unrolls: a chain waits for each hash, so latency is all. */
static inline __attribute__((always_inline)) uint64_t xxh64(const byte *p, size_t length, uint64_t seed)
{
    const byte *end = p + length;
    uint64_t h;
    if (length >= 32) {
        /* The first round's input is summed apart from the seed, which arrives last. */
        uint64_t a = rotate(seed + (load64(p) * PRIME2 + (PRIME1 + PRIME2)), 31) * PRIME1;
        uint64_t b = rotate(seed + (load64(p + 8) * PRIME2 + PRIME2), 31) * PRIME1;
        uint64_t c = rotate(seed + load64(p + 16) * PRIME2, 31) * PRIME1;
        uint64_t d = rotate(seed + (load64(p + 24) * PRIME2 - PRIME1), 31) * PRIME1;
        for (p += 32; end - p >= 32; p += 32) {
            a = xxh_round(a, load64(p));
            b = xxh_round(b, load64(p + 8));
            c = xxh_round(c, load64(p + 16));
            d = xxh_round(d, load64(p + 24));
        }
        h = rotate(a, 1) + rotate(b, 7) + rotate(c, 12) + rotate(d, 18);
        h = xxh_merge(xxh_merge(xxh_merge(xxh_merge(h, a), b), c), d);
    } else {
        h = seed + PRIME5;
    }
    h += (uint64_t)length;
    for (; end - p >= 8; p += 8)
        h = rotate(h ^ xxh_round(0, load64(p)), 27) * PRIME1 + PRIME4;
    if (end - p >= 4) {
        h = rotate(h ^ (load32(p) * PRIME1), 23) * PRIME2 + PRIME3;
        p += 4;
    }
    for (; p < end; p++)
        h = rotate(h ^ (*p * PRIME5), 11) * PRIME1;
    h = (h ^ (h >> 33)) * PRIME2;
    h = (h ^ (h >> 29)) * PRIME3;
    return h ^ (h >> 32);
}

static inline uint64_t splitmix(uint64_t z)
{
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ULL;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBULL;
    return z ^ (z >> 31);
}

/* `rankway.blocks.mix`: what a block adds to a digest. */
static inline uint64_t mix(uint64_t block_hash) { return splitmix(block_hash + 0x9E3779B97F4A7C15ULL); }

/* `rankway.choice.next_random`. */
static inline uint64_t next_random(uint64_t *state)
{
    *state += 0x9E3779B97F4A7C15ULL;
    return splitmix(*state);
}

#endif
