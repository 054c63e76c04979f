/* inputs.h - what the tests share beside reference.h and tap.h: pseudo-random generators, special values, hashes,
   loops over the instruction sets of this machine, entries for tables of vector mathematics, damaged blocks. Include it
   after kahan_opt.h. The sequences stay as they are: expected hashes depend on them. probe.c and selftest.c do without
   it: they compile anywhere, by themselves. */
#ifndef INPUTS_H
#define INPUTS_H

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__GNUC__) /* tests look at what a call has done, not always at its result */
#pragma GCC diagnostic ignored "-Wunused-result"
#endif

/* ---- Generators: the argument is the state, at first the seed --------------------------------------------------- */

/* Linear congruence modulo 2^32 (Numerical Recipes): the lower bits repeat soon. */
static inline uint32_t lcg32(uint32_t *state) { return *state = *state * 1664525u + 1013904223u; }

/* The same with the upper bits mixed into the lower ones. */
static inline uint32_t mixed32(uint32_t *state) {
    const uint32_t x = lcg32(state);
    return x ^ x >> 15;
}

/* Linear congruence modulo 2^64 (Knuth's MMIX): use the upper bits. */
static inline uint64_t lcg64(uint64_t *state) {
    return *state = *state * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
}

/* The upper half of it, the lowest bits mixed with the highest. */
static inline uint32_t upper64(uint64_t *state) {
    const uint64_t x = lcg64(state);
    return (uint32_t)(x >> 32) ^ (uint32_t)(x >> 59);
}

/* splitmix64 (Steele, Lea, Flood 2014): all 64 bits are good. */
static inline uint64_t splitmix64(uint64_t *state) {
    uint64_t z = *state += UINT64_C(0x9e3779b97f4a7c15);
    z = (z ^ z >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ z >> 27) * UINT64_C(0x94d049bb133111eb);
    return z ^ z >> 31;
}

/* An integer in [0, n) from a random word, by the word's upper bits. */
static inline uint32_t scaled_to(uint32_t word, uint32_t n) { return (uint32_t)((uint64_t)word * n >> 32); }

/* A float in [0, 1) by lcg32: a multiple of 2^-24. */
static inline float uniform32(uint32_t *state) { return (float)(lcg32(state) >> 8) / 16777216.0f; }

/* A float with the standard normal distribution, by Box and Muller from two of these. */
static inline float normal32(uint32_t *state) {
    const double radius = sqrt(-2 * log(1 - (double)uniform32(state)));
    return (float)(radius * cos(6.283185307179586 * (double)uniform32(state)));
}

/* A double in (0, 1) by splitmix64: an odd multiple of 2^-33. */
static inline double uniform64(uint64_t *state) {
    return ((double)(uint32_t)(splitmix64(state) >> 32) + 0.5) / 4294967296.0;
}

/* A double with the standard normal distribution, from two of these. */
static inline double normal64(uint64_t *state) {
    const double radius = sqrt(-2 * log(uniform64(state)));
    return radius * cos(6.283185307179586 * uniform64(state));
}

/* ---- Values ------------------------------------------------------------------------------------------------------ */

/* Doubles written as bits: with -Ofast a compiler knows neither NaN nor infinity. */
static inline double double_of(uint64_t bits) {
    double x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

static inline uint64_t bits_of(double x) {
    uint64_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

/* By bits: with -Ofast a compiler knows no NaN. */
static inline int is_nan(double x) { return bits_of(x) << 1 > UINT64_C(0xffe) << 52; }

/* fp32 words at which something happens, in one of the formats or in a step. */
static const uint32_t special_words[] = {
    0x00000000, 0x80000000, 0x7f800000, 0xff800000, 0x7fc00000, 0xffc00001, 0x7f800001, 0xffc12345, /* 0 inf NaN */
    0x00000001, 0x80000001, 0x00007fff, 0x00008000, 0x00008001, 0x00018000, 0x00400000, 0x80012345, /* subnormal  */
    0x007fffff, 0x00800000, 0x80800000, 0x00ffffff, 0x7f7fffff, 0xff7fffff, 0x7f7f0000, 0x7f7f7fff, /* the ends   */
    0x7f7f8000, 0x477fe000, 0x477fefff, 0x477ff000, 0xc77ff000, 0x47800000, 0x38800000, 0x387fffff, /* of formats */
    0x37000000, 0x36ffffff, 0x33800000, 0x33000000, 0x33000001, 0x2b800000, 0x2b000000, 0x0b800000, /* 2^-24, -40 */
    0x3f800000, 0xbf800000, 0x3f808000, 0x3f818000, 0x3f807fff, 0xbf808000, 0x3f801000, 0x3f803000, /* 1 and ties */
    0x3f8000ff, 0x3f800080, 0x3f807f80, 0x20000000, 0x1f800000, 0x5f800000, 0x60000000, 0x65000000, /* roots      */
    0x7d800000, 0x0d000000, 0x01000000, 0x03ffffff, 0x47000000, 0x3b800000, 0xbb800000, 0x49800000,
};
enum { SPECIAL_WORDS = sizeof special_words / sizeof *special_words };

/* What fesetround() takes, the default first, where <fenv.h> has all four. WebAssembly has only the default. */
#ifdef __wasm__
#define ROUNDING_DIRECTIONS {FE_TONEAREST, FE_TONEAREST, FE_TONEAREST, FE_TONEAREST}
#else
#define ROUNDING_DIRECTIONS {FE_TONEAREST, FE_UPWARD, FE_DOWNWARD, FE_TOWARDZERO}
#endif

static const char *const format_name[] = {"fp32", "bf16", "fp16", "8-bit", "1-bit"};
static const char *const rounding_name[] = {"nearest", "stochastic", "Kahan", "compact", "exact", "feedback"};
enum { ROUNDINGS = KOPT_FEEDBACK + 1 };

/* ---- Hashes ------------------------------------------------------------------------------------------------------ */

/* FNV-1a in 64 bits, one value at a time; published for bytes. */
#define FNV_START UINT64_C(0xcbf29ce484222325)
static inline uint64_t fnv(uint64_t hash, uint64_t value) { return (hash ^ value) * UINT64_C(0x100000001b3); }

static inline uint64_t fnv_bytes(uint64_t hash, const void *bytes, size_t size) {
    const unsigned char *p = (const unsigned char *)bytes;
    for (; size > 0; --size) hash = fnv(hash, *p++);
    return hash;
}

/* ---- Instruction sets -------------------------------------------------------------------------------------------- */

/* The first usable one from `isa` on, which is then in force; after the last: KOPT_ISA_AUTO, the automatic choice. */
static inline int force_isa_from(int isa) {
    while (kopt_isa_force((kopt_isa)isa) != KOPT_OK) ++isa;
    return isa;
}

/* Each of this machine, in force for the body; the automatic choice afterwards (but not after a break). */
#define FOR_EACH_ISA(isa) for (isa = force_isa_from(0); isa < (int)KOPT_ISA_AUTO; isa = force_isa_from(isa + 1))

/* A list of them, for tests that take turns; their number. */
enum { ISAS = 16 }; /* room for all that there are */
static inline int usable_isas(kopt_isa isas[ISAS]) {
    int isa, count = 0;
    for (isa = 0; isa < ISAS; ++isa)
        if (kopt_isa_usable((kopt_isa)isa)) isas[count++] = (kopt_isa)isa;
    return count;
}

#endif
