/* test_convert.c - kopt_convert against integer references: every fp32 to both 16-bit formats, every 16-bit number to
   every format, on every instruction set of this machine. Argument "quick": 2^26 of the 2^32, and all neighbourhoods
   of special values; and the table of instruction sets. "hash" and "reference" print the hash of all 2^32, or with K
   N of every Nth chunk from K on. */
#include <stddef.h>
#include <stdlib.h>
static size_t stream_from = 64;
#define KOPT_NT_THRESHOLD_ stream_from /* bytes: results are written past the caches, and not, in turn */
#define KAHAN_OPT_IMPLEMENTATION
#include "../../kahan_opt.h"

#include "tap.h"
#include "reference.h"
#include "inputs.h"

enum { CHUNK = 1 << 16 };

/* Equal words, or both NaN with the same sign. */
static int same(kopt_format f, uint32_t a, uint32_t b) {
    uint32_t sign = f == KOPT_F32 ? 0x80000000u : 0x8000u;
    return a == b || (ref_is_nan(f, a) && ref_is_nan(f, b) && (a & sign) == (b & sign));
}

static float inline_widen(kopt_format f, uint32_t h) {
    return f == KOPT_BF16 ? kopt_f32_from_bf16((kopt_bf16)h) : kopt_f32_from_fp16((kopt_fp16)h);
}

/* ---- fp32 to 16 bits -------------------------------------------------------------------------------------------- */

static uint32_t input[CHUNK];
static uint16_t expected[3][CHUNK], actual[CHUNK];
static unsigned long long wrong[3][ISAS + 1]; /* the last column: the inline functions */

static void count_differences(kopt_format f, int column) {
    int i;
    if (!memcmp(actual, expected[f], sizeof actual)) return;
    for (i = 0; i < CHUNK; ++i)
        if (!same(f, actual[i], expected[f][i]) && wrong[f][column]++ == 0)
            note("%08x to %s, column %d: %04x, not %04x", (unsigned)input[i], format_name[f], column,
                 (unsigned)actual[i], (unsigned)expected[f][i]);
}

static void compare_chunk(void) {
    int f, isa, i;
    stream_from = stream_from == 64 ? SIZE_MAX : 64;
    for (f = KOPT_BF16; f <= KOPT_FP16; ++f) FOR_EACH_ISA(isa) {
            kopt_convert(actual, (kopt_format)f, input, KOPT_F32, CHUNK);
            count_differences((kopt_format)f, isa);
        }
    for (i = 0; i < CHUNK; ++i) actual[i] = kopt_bf16_from_f32(ref_float(input[i]));
    count_differences(KOPT_BF16, ISAS);
    for (i = 0; i < CHUNK; ++i) actual[i] = kopt_fp16_from_f32(ref_float(input[i]));
    count_differences(KOPT_FP16, ISAS);
}

/* The positive words of `input`, then the same with the other sign. */
static void check_chunk(void) {
    int i;
    for (i = 0; i < CHUNK; ++i) expected[KOPT_BF16][i] = (uint16_t)ref_narrow(KOPT_BF16, input[i]);
    for (i = 0; i < CHUNK; ++i) expected[KOPT_FP16][i] = (uint16_t)ref_narrow(KOPT_FP16, input[i]);
    compare_chunk();
    for (i = 0; i < CHUNK; ++i)
        input[i] ^= 0x80000000u, expected[KOPT_BF16][i] ^= 0x8000, expected[KOPT_FP16][i] ^= 0x8000;
    compare_chunk();
}

static void check_narrowing(int quick) {
    uint32_t chunk, i, fill = 0, exponent, k, stride = quick ? 64 : 1, noise = 0;
    int f, isa;
    for (chunk = 0; chunk < 0x8000 / stride; ++chunk) {
        for (i = 0; i < CHUNK; ++i) {
            if (quick) lcg32(&noise);
            input[i] = (chunk * CHUNK + i) * stride + (noise >> 16) % stride;
        }
        check_chunk();
    }
    /* Around every power of two and 31 places between: all that is special, and the midpoints near it. */
    for (exponent = 0; quick && exponent < 256; ++exponent)
        for (k = 0; k < 1024; ++k) {
            input[fill++] = ((exponent << 23) + (k & 31) * 0x40000 + (k >> 5) - 16) & 0x7fffffff;
            if (fill == CHUNK) check_chunk(), fill = 0;
        }
    for (f = KOPT_BF16; f <= KOPT_FP16; ++f) {
        FOR_EACH_ISA(isa)
        ok(!wrong[f][isa], "fp32 to %s, %s: %s numbers, %llu wrong", format_name[f], kopt_isa_name((kopt_isa)isa),
           quick ? "2^26" : "all 2^32", wrong[f][isa]);
        ok(!wrong[f][ISAS], "fp32 to %s, inline: %llu wrong", format_name[f], wrong[f][ISAS]);
    }
}

static void print_hash(int of_reference, uint32_t first, uint32_t every) {
    uint64_t hash = FNV_START, four;
    uint32_t chunk, i;
    int f;
    for (chunk = first; chunk < 0x10000; chunk += every) {
        for (i = 0; i < CHUNK; ++i) input[i] = chunk * CHUNK + i;
        for (f = KOPT_BF16; f <= KOPT_FP16; ++f) {
            if (of_reference)
                for (i = 0; i < CHUNK; ++i) actual[i] = (uint16_t)ref_narrow((kopt_format)f, input[i]);
            else
                kopt_convert(actual, (kopt_format)f, input, KOPT_F32, CHUNK);
            for (i = 0; (chunk & 0x7fff) >= 0x7f80 && i < CHUNK; ++i) /* any NaN of the right sign will do */
                if (ref_is_nan((kopt_format)f, actual[i])) actual[i] |= 0x7fff;
            for (i = 0; i < CHUNK; i += 4) {
                memcpy(&four, actual + i, sizeof four);
                hash = fnv(hash, four);
            }
        }
    }
    printf("%016llx\n", (unsigned long long)hash);
}

/* ---- Between the other formats, all 2^16 ------------------------------------------------------------------------ */

static void check_other_pairs(void) {
    static uint16_t from[CHUNK];
    static uint32_t to[CHUNK];
    int source, target, isa, wide;
    uint32_t i;
    for (i = 0; i < CHUNK; ++i) from[i] = (uint16_t)i;
    for (source = KOPT_BF16; source <= KOPT_FP16; ++source) {
        unsigned bad = 0;
        for (target = KOPT_F32; target <= KOPT_FP16; ++target) FOR_EACH_ISA(isa) {
                bad = 0;
                kopt_convert(to, (kopt_format)target, from, (kopt_format)source, CHUNK);
                for (i = 0; i < CHUNK; ++i)
                    bad += !same((kopt_format)target, ref_get(to, ref_width((kopt_format)target), i),
                                 ref_narrow((kopt_format)target, ref_widen((kopt_format)source, i)));
                ok(!bad, "%s to %s, %s: all 2^16, %u wrong", format_name[source], format_name[target],
                   kopt_isa_name((kopt_isa)isa), bad);
            }
        for (bad = 0, i = 0; i < CHUNK; ++i)
            bad += !same(KOPT_F32, ref_bits(inline_widen((kopt_format)source, i)), ref_widen((kopt_format)source, i));
        ok(!bad, "%s to fp32, inline: %u wrong", format_name[source], bad);
    }
    FOR_EACH_ISA(isa) {
        for (wide = 0, i = 0; i < CHUNK; ++i) input[i] = i * 0x10001u;
        kopt_convert(to, KOPT_F32, input, KOPT_F32, CHUNK);
        for (i = 0; i < CHUNK; ++i) wide += !same(KOPT_F32, to[i], input[i]);
        ok(!wide, "fp32 to fp32 is a copy, %s: %d wrong", kopt_isa_name((kopt_isa)isa), wide);
    }
}

/* ---- Stochastic, where all 16 random bits decide ---------------------------------------------------------------- */

/* What is cut off and the random number add up to 2^16: one up; to 2^16 - 1: not. In fp16 below 2^-16, where all 16
   bits of what is cut off can be there: the number is a multiple of 2^-40. */
static void check_lowest_bit(void) {
    enum { MANY = 4000 };
    static uint32_t from[MANY], random16[MANY];
    static uint16_t to[MANY];
    const uint64_t seed = 99, first = 1000;
    int f, isa, less;
    uint32_t i, bad;
    for (i = 0; i < MANY; ++i) random16[i] = ref_number(ref_random(seed, 5, 6, 1, first + i), 0);
    for (f = KOPT_BF16; f <= KOPT_FP16; ++f) {
        for (bad = 0, isa = 0; isa <= ISAS; ++isa) /* the last: the inline functions */
            for (less = 0; less < 2; ++less) {
                if (isa < ISAS && kopt_isa_force((kopt_isa)isa) != KOPT_OK) continue;
                for (i = 0; i < MANY; ++i) {
                    const uint32_t u = (f == KOPT_BF16 ? 0x3f800000 + i % 64 * 0x00810000 : (1 + i % 255) << 16) +
                                       ((uint32_t)(65536 - less) - random16[i]);
                    from[i] = f == KOPT_BF16 ? u : ref_bits((float)u * ref_float(0x2b800000)); /* 2^-40, exact */
                    from[i] |= (i & 1) << 31;
                }
                if (isa < ISAS)
                    bad += kopt_convert_stochastic(to, (kopt_format)f, from, KOPT_F32, MANY,
                                                   (kopt_random_key){seed, 5, 6, first}) != KOPT_OK;
                for (i = 0; i < MANY && isa == ISAS; ++i)
                    to[i] = f == KOPT_BF16 ? kopt_bf16_from_f32_stochastic(ref_float(from[i]), random16[i] | 0x10000)
                                           : kopt_fp16_from_f32_stochastic(ref_float(from[i]), random16[i] | 0x10000);
                for (i = 0; i < MANY; ++i) {
                    const uint32_t low = f == KOPT_BF16 ? 0x3f80 + i % 64 * 0x81 : 1 + i % 255;
                    bad += to[i] != ((low + (uint32_t)!less) | (i & 1) << 15);
                }
            }
        kopt_isa_force(KOPT_ISA_AUTO);
        ok(!bad, "fp32 to %s, stochastic: the lowest random bit counts, %u wrong", format_name[f], (unsigned)bad);
    }
}

/* From the largest finite number on, random bits do not count; just below it they do. Of an fp16 number this large,
   only the upper 13 of the 16 bits that are cut off can be there. */
static void check_last_step(void) {
    static const struct {
        uint32_t from, random16, to;
    } bf16[] = {{0x7f7effff, 0, 0x7f7e},      {0x7f7effff, 1, 0x7f7f},      {0x7f7f7fff, 0xffff, 0x7f7f},
                {0x7f7f8000, 0, 0x7f80},      {0x7f800000, 0xffff, 0x7f80}, {0xff7effff, 0, 0xff7e},
                {0xff7f7fff, 0xffff, 0xff7f}, {0xff800000, 0xffff, 0xff80}},
      fp16[] = {{0x477fdfff, 7, 0x7bfe}, {0x477fdfff, 8, 0x7bff},      {0x477fefff, 0xffff, 0x7bff},
                {0x477ff000, 0, 0x7c00}, {0x477fffff, 0, 0x7c00},      {0x47800000, 0, 0x7c00},
                {0xc77fdfff, 7, 0xfbfe}, {0xc77fefff, 0xffff, 0xfbff}, {0xff800000, 0xffff, 0xfc00}};
    unsigned i, bad = 0;
    for (i = 0; i < sizeof bf16 / sizeof bf16[0]; ++i)
        bad += kopt_bf16_from_f32_stochastic(ref_float(bf16[i].from), bf16[i].random16) != bf16[i].to;
    ok(!bad, "fp32 to bf16, stochastic: the last step before infinity is to nearest, %u wrong", bad);
    for (bad = 0, i = 0; i < sizeof fp16 / sizeof fp16[0]; ++i)
        bad += kopt_fp16_from_f32_stochastic(ref_float(fp16[i].from), fp16[i].random16) != fp16[i].to;
    ok(!bad, "fp32 to fp16, stochastic: the last step before infinity is to nearest, %u wrong", bad);
}

/* ---- Lengths, alignments, and what lies around ------------------------------------------------------------------ */

static void check_edges(void) {
    enum { LONGEST = 300, GUARD = 64, ROOM = 4 * LONGEST + 3 * GUARD };
    static unsigned char from[ROOM], to[ROOM], plain[ROOM];
    int isa, source, target;
    size_t n, i;
    for (i = 0; i < ROOM; ++i) from[i] = (unsigned char)(i * 151 + (i >> 3) * 29);
    FOR_EACH_ISA(isa) {
        unsigned outside = 0, inside = 0, refused = 0;
        for (source = KOPT_F32; source <= KOPT_FP16; ++source)
            for (target = KOPT_F32; target <= KOPT_FP16; ++target)
                for (n = 0; n <= LONGEST; ++n) {
                    size_t s = n * 7 % 64, t = GUARD + n * 13 % 64, width = ref_width((kopt_format)target);
                    stream_from = n % 5 ? 64 : SIZE_MAX;
                    memset(to, 0xa5, ROOM);
                    memset(plain, 0xa5, ROOM);
                    refused += kopt_convert(to + t, (kopt_format)target, from + s, (kopt_format)source, n) != KOPT_OK;
                    for (i = 0; i < n; ++i) {
                        uint32_t x = ref_get(from + s, ref_width((kopt_format)source), i);
                        uint32_t got = ref_get(to + t, width, i);
                        x = ref_narrow((kopt_format)target, ref_widen((kopt_format)source, x));
                        inside += !same((kopt_format)target, got, x);
                        ref_set(plain + t, width, i, got);
                    }
                    outside += memcmp(to, plain, ROOM) != 0;
                }
        ok(!outside && !inside && !refused,
           "9 pairs, n = 0..300, all alignments, %s: %u values wrong, %u times outside, %u refused",
           kopt_isa_name((kopt_isa)isa), inside, outside, refused);
    }
}

/* An entry of the table at another place would give the right bits, by other code. Only this file sees the table. */
static void check_table(void) {
    int wrong_place = kopt_table_[KOPT_ISA_SCALAR].convert != kopt_convert_scalar_;
#define HAS(isa, name) wrong_place += kopt_table_[isa].convert != kopt_convert_##name##_;
#ifdef KOPT_SSE2_
    HAS(KOPT_ISA_SSE2, sse2)
#endif
#ifdef KOPT_AVX2_
    HAS(KOPT_ISA_AVX2, avx2)
#endif
#ifdef KOPT_X86_
    HAS(KOPT_ISA_AVX512, avx512)
#endif
#ifdef KOPT_NEON_
    HAS(KOPT_ISA_NEON, neon)
#endif
#ifdef KOPT_SIMD128_
    HAS(KOPT_ISA_SIMD128, simd128)
#endif
    ok(!wrong_place, "each entry of the table is at the place of its instruction set");
}

int main(int count, char **arguments) {
    const char *mode = count > 1 ? arguments[1] : "full";
    if (!strcmp(mode, "hash") || !strcmp(mode, "reference")) {
        print_hash(!strcmp(mode, "reference"), count > 3 ? (uint32_t)atoi(arguments[2]) : 0,
                   count > 3 ? (uint32_t)atoi(arguments[3]) : 1);
        return 0;
    }
    check_narrowing(!strcmp(mode, "quick"));
    check_other_pairs();
    check_lowest_bit();
    check_last_step();
    check_edges();
    check_table();
    return done();
}
