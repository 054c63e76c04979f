/* cuda_fake.h - what the C of tests/gpu/ptx.py uses: a thread, checked memory, and PTX operations that C lacks. */
#ifndef CUDA_FAKE_H
#define CUDA_FAKE_H

#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

typedef __int128 int128_t;
typedef unsigned __int128 uint128_t;

/* What a thread can wait for, and with which operation. */
enum {
    RUNNING_,
    ENDED_,
    BLOCK_,
    BLOCK_POPC_,
    BLOCK_AND_,
    BLOCK_OR_,
    WARP_, /* this and all after it: the lanes of a mask */
    SHUFFLE_UP_,
    SHUFFLE_DOWN_,
    SHUFFLE_BFLY_,
    SHUFFLE_IDX_,
    VOTE_ANY_,
    VOTE_ALL_,
    VOTE_UNI_,
    VOTE_BALLOT_,
    MATCH_ANY_,
    MATCH_ALL_,
    REDUCE_ADD_,
    REDUCE_MIN_,
    REDUCE_MAX_,
    REDUCE_AND_,
    REDUCE_OR_,
    REDUCE_XOR_
};

enum { LOAD_, STORE_, ATOMIC_ };

typedef struct thread_ {
    uint32_t tid, ctaid, ntid, nctaid;
    unsigned char *shared, **param, *local;
    uint32_t local_size; /* of the frames of all functions that run */
    uint64_t instructions;
    uint32_t segment; /* what it did since its last barrier; 0: nothing yet */
    uint8_t fenced, saw_release, acquired, valid;
    int state;           /* RUNNING_, ENDED_ or what it waits for */
    uint32_t mask, b, c; /* the operands of what it waits for, ... */
    uint64_t x, result;  /* ... the value that it gives, and the one that it gets */
} thread_;

/* The runtime: see cuda_fake.c. */
void kernel_(const char *name, void (*run)(thread_ *), int params, const uint32_t *sizes, uint32_t shared, int waits);
void variable_(void *start, size_t size);
void profile_of_(uint64_t *counts, const uint32_t (*lines)[2], size_t n);
unsigned char *global_(thread_ *t, uint64_t address, uint32_t size, int what);
unsigned char *shared_(thread_ *t, uint64_t address, uint32_t size, int what);
unsigned char *generic_(thread_ *t, uint64_t address, uint32_t size, int what);
unsigned char *local_(thread_ *t, uint64_t address, uint32_t size, int what);
unsigned char *param_(thread_ *t, uint64_t address, uint32_t size, int what);
unsigned char *const_(thread_ *t, uint64_t address, uint32_t size, int what);
unsigned char *frame_(thread_ *t, uint32_t size);
void fence_(thread_ *t);
uint64_t wait_(thread_ *t, int what, uint32_t mask, uint64_t x, uint32_t b, uint32_t c);

/* Since the program began: the texts that the driver has loaded, and the instructions of all threads. Of the last
   launch of a kernel: the most of one thread. */
int ptx_loads(void);
uint64_t ptx_instructions(void);
uint64_t ptx_longest_thread(const char *kernel);

/* How often each basic block ran since the last call: "FIRST-LINE LAST-LINE COUNT" of the PTX file, in lines of `file`,
   if it is not NULL. */
void ptx_profile(FILE *file);

/* Faults: no kernel is loaded any more; loading one fails with this code of CUDA from now on (0: works again); the n-th
   launch from now fails. */
void ptx_unload(void);
void ptx_fail_loads(int code);
void ptx_fail_launch(int n);

/* From now on, only the last n blocks of a launch run. */
void ptx_last_blocks(uint32_t n);

#define ACCESS_(bits)                                                    \
    static inline uint##bits##_t load##bits##_(const unsigned char *p) { \
        uint##bits##_t x;                                                \
        memcpy(&x, p, sizeof x);                                         \
        return x;                                                        \
    }                                                                    \
    static inline void store##bits##_(unsigned char *p, uint##bits##_t x) { memcpy(p, &x, sizeof x); }
ACCESS_(8)
ACCESS_(16)
ACCESS_(32)
ACCESS_(64)

/* Numbers and their bits. A GPU's arithmetic gives this one NaN. */
static inline float f32_(uint64_t bits) {
    const uint32_t u = (uint32_t)bits;
    float x;
    memcpy(&x, &u, 4);
    return x;
}
static inline double f64_(uint64_t bits) {
    double x;
    memcpy(&x, &bits, 8);
    return x;
}
static inline uint32_t bits_f32_(float x) {
    uint32_t u;
    memcpy(&u, &x, 4);
    return x != x ? 0x7fffffff : u;
}
static inline uint64_t bits_f64_(double x) {
    uint64_t u;
    memcpy(&u, &x, 8);
    return x != x ? 0x7fffffffffffffff : u;
}
static inline uint32_t flush_(uint32_t u) { return u & 0x7f800000 ? u : u & 0x80000000; }
static inline float single_(uint16_t u) {
    _Float16 h;
    memcpy(&h, &u, 2);
    return (float)h;
}
static inline uint16_t half_(float x) {
    const _Float16 h = (_Float16)x;
    uint16_t u;
    memcpy(&u, &h, 2);
    return x != x ? 0x7fff : u;
}

/* The smaller one; -0 is below 0; a NaN only of two NaN, or (keep) of one. */
#define LEAST_(type, name)                                                                              \
    static inline type min_##name##_(type a, type b, int keep) {                                        \
        if (isnan(a) || isnan(b)) return (isnan(a) && isnan(b)) || keep ? (type)NAN : isnan(a) ? b : a; \
        return a < b || (a == b && signbit(a)) ? a : b;                                                 \
    }                                                                                                   \
    static inline type max_##name##_(type a, type b, int keep) { return -min_##name##_(-a, -b, keep); }
LEAST_(float, f32)
LEAST_(double, f64)

/* A whole number as an integer, saturated; 0 of a NaN. */
static inline uint64_t whole_(double x, int bits, int is_signed) {
    const double end = ldexp(1, bits - is_signed);
    if (x != x) return 0;
    if (x >= end) return ~(uint64_t)0 >> (64 - bits + is_signed);
    if (!is_signed) return x < 0 ? 0 : (uint64_t)x;
    return x < -end ? (uint64_t)-1 << (bits - 1) : (uint64_t)(int64_t)x;
}

static inline uint32_t shift_count_(uint32_t n, int clamp) { return clamp && n > 32 ? 32 : clamp ? n : n & 31; }
static inline uint32_t popc32_(uint32_t x) { return (uint32_t)__builtin_popcount(x); }
static inline uint32_t popc64_(uint64_t x) { return (uint32_t)__builtin_popcountll(x); }
static inline uint32_t clz32_(uint32_t x) { return x ? (uint32_t)__builtin_clz(x) : 32; }
static inline uint32_t clz64_(uint64_t x) { return x ? (uint32_t)__builtin_clzll(x) : 64; }
static inline uint64_t brev64_(uint64_t x) {
    uint64_t r = 0;
    for (int i = 0; i < 64; ++i) r |= (x >> i & 1) << (63 - i);
    return r;
}
static inline uint32_t brev32_(uint32_t x) { return (uint32_t)(brev64_(x) >> 32); }
static inline uint32_t prmt_(uint32_t a, uint32_t b, uint32_t selector) {
    uint32_t r = 0;
    for (int i = 0; i < 4; ++i) {
        const uint32_t s = selector >> 4 * i, byte = (uint32_t)((((uint64_t)b << 32) | a) >> 8 * (s & 7)) & 255;
        r |= (s & 8 ? (byte >> 7) * 255 : byte) << 8 * i;
    }
    return r;
}
static inline uint32_t lop3_(uint32_t a, uint32_t b, uint32_t c, uint32_t table) {
    uint32_t r = 0;
    for (int i = 0; i < 8; ++i)
        if (table >> i & 1) r |= (i & 4 ? a : ~a) & (i & 2 ? b : ~b) & (i & 1 ? c : ~c);
    return r;
}
static inline uint64_t field_(uint32_t length) { return length >= 64 ? ~(uint64_t)0 : ((uint64_t)1 << length) - 1; }
static inline uint64_t bfi_(uint64_t a, uint64_t b, uint32_t at, uint32_t length, int bits) {
    const uint64_t mask = (at & 255) < 64 ? field_(length & 255) << (at & 255) : 0;
    return (b & ~mask) | ((at & 255) < 64 ? a << (at & 255) & mask & field_((uint32_t)bits) : 0);
}
static inline uint64_t bfe_(uint64_t a, uint32_t at, uint32_t length, int bits, int is_signed) {
    const uint32_t last = (at & 255) + (length & 255) - 1;
    const uint64_t x = a & field_((uint32_t)bits), sign_at = last < (uint32_t)bits ? last : (uint32_t)bits - 1;
    const uint64_t sign = is_signed && (length & 255) ? x >> sign_at & 1 : 0;
    const uint64_t low = (at & 255) >= (uint32_t)bits ? 0 : x >> (at & 255);
    const uint64_t known = (at & 255) >= (uint32_t)bits ? 0 : field_((uint32_t)bits - (at & 255));
    const uint64_t value = (low & known) | (sign ? ~known : 0), wanted = field_(length & 255);
    return (value & wanted) | (sign ? ~wanted : 0);
}

#endif
