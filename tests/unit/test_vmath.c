/* test_vmath.c - vector mathematics: the 16-bit functions at all inputs against hashes that bits/vmath.py made with
   MPFR; the fp32 functions against libm's double ones and the same bits on every instruction set; lengths, overlap,
   refusals. With KAHAN_OPT_SLEEF the fp32 functions are SLEEF's. Argument "quick": 2^16 instead of 2^24 inputs per fp32
   function. "every": all 2^32 inputs of the unary ones, minutes. For tests/bits/vmath.py: "dump" and "values". */
#define KAHAN_OPT_VMATH
#define KAHAN_OPT_IMPLEMENTATION
#include "../../kahan_opt.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>
#if defined(__SSE2__) && !defined(__TINYC__)
#include <xmmintrin.h>
#endif

/* With it only the library computes as IEEE wants it: the bits are compared, with what other builds prove. Asked
   here, as reference.h switches it off for itself, and gcc does not define the macro again. */
#ifdef __FAST_MATH__
#define REFERENCE 0
#else
#define REFERENCE 1
#endif
#ifdef KAHAN_OPT_SLEEF
enum { SLEEF = 1 };
#else
enum { SLEEF = 0 };
#endif

#include "tap.h"
#include "reference.h"
#include "inputs.h"

enum { ALL = 65536, FUNCTIONS = 13, CHUNK = 1 << 14, UNARY = 5, FLOATS = 7 };

static const char *const function_name[FUNCTIONS] = {
    "exp",      "log",        "tanh",          "sigmoid",    "silu",       "gelu",           "gelu_tanh",
    "softplus", "tanh_slope", "sigmoid_slope", "silu_slope", "gelu_slope", "gelu_tanh_slope"};
static const char *const float_name[FLOATS + 1] = {"exp", "log", "tanh", "erf", "erfc", "atan2", "sinpi", "cospi"};

/* FNV-1a over the 65,536 results of each function, bf16 then fp16: printed by `tests/bits/vmath.py hashes`. */
static const uint64_t golden[FUNCTIONS][2] = {
    {0x2f0338f6cb02a675u, 0xd720e0c9549fb68eu}, /* exp */
    {0xd7acb6237090231au, 0x53012cdbd3a646d4u}, /* log */
    {0xd9a66b7026211b89u, 0xec5bee069d2d49d5u}, /* tanh */
    {0x9f478685cf8211feu, 0x5bda09d946e60a90u}, /* sigmoid */
    {0x7156af1fcfd181b1u, 0xdcd1dfa57b11a4ecu}, /* silu */
    {0x0cb8e91bec0946cdu, 0x549228d12f43c1c9u}, /* gelu */
    {0x866ef8403a06d60bu, 0xc0e0c6a7653f8e71u}, /* gelu_tanh */
    {0xf569fec329399851u, 0xa6d8ac68365984b8u}, /* softplus */
    {0x9c5302acaae95365u, 0xb8fec163d61d1129u}, /* tanh_slope */
    {0x4aaab058816e8f35u, 0x3758edeac32b82e5u}, /* sigmoid_slope */
    {0xa04bcd8ab731169cu, 0x5ee9023b71213420u}, /* silu_slope */
    {0x9571680e774b754fu, 0x90ddabe6b8f0c43du}, /* gelu_slope */
    {0x714fe01d79b76601u, 0x986fc15dc963f5d4u}, /* gelu_tanh_slope */
};
static const uint64_t golden_backward = 0x6ea12ffc7a60f721u; /* and kopt_map_backward's */
/* The fp32 functions' bits, what they have been: of the built-in and of SLEEF 3.5.1. */
static const uint64_t golden_floats[2] = {0x31439485ab5c3d5du, 0x086e40bd3a77f664u};

/* And those of random numbers; test_noise.c says that they are right. */
static const uint64_t golden_more = 0x93b93dda817d3ca2u;

/* The longest way off, in ulp, that docs/numerics.md promises: built-in, SLEEF. */
static const double bound[FLOATS + 1][2] = {{1, 1},   {1, 1}, {1, 1.01},  {1.5, 2.1},
                                            {4, 2.1}, {2, 2}, {1.5, 1.5}, {1.5, 1.5}};

static uint64_t hash16(const uint16_t *x) /* the same on big-endian machines */
{
    uint64_t hash = FNV_START;
    int i;
    for (i = 0; i < ALL; ++i) hash = fnv(fnv(hash, x[i] & 0xff), x[i] >> 8);
    return hash;
}

static int is_nan_word(uint32_t u) { return ref_is_nan(KOPT_F32, u); } /* -Ofast has no isnan */

/* ---- 16 bits ---------------------------------------------------------------------------------------------------- */

static uint16_t inputs[ALL], outputs[ALL], slopes[ALL], factors[ALL], products[ALL];

/* f of function_name: those from 8 on are slopes, which the backward pass gives for a dy of ones. */
static kopt_result map_all(uint16_t *out, kopt_format format, int f) {
    static const kopt_function of[] = {KOPT_FN_TANH, KOPT_FN_SIGMOID, KOPT_FN_SILU, KOPT_FN_GELU, KOPT_FN_GELU_TANH};
    static uint16_t ones[ALL];
    int i;
    if (f <= KOPT_FN_SOFTPLUS) return kopt_map(out, inputs, format, ALL, (kopt_function)f);
    for (i = 0; i < ALL; ++i) ones[i] = format == KOPT_BF16 ? 0x3f80 : 0x3c00;
    return kopt_map_backward(out, ones, inputs, format, ALL, of[f - 8]);
}

static void check_tables(const char *name) {
    int f, format, wrong = 0;
    for (f = 0; f < FUNCTIONS; ++f)
        for (format = KOPT_BF16; format <= KOPT_FP16; ++format) {
            int good = map_all(outputs, (kopt_format)format, f) == KOPT_OK;
            if (!good || hash16(outputs) != golden[f][format - 1]) {
                note("%s in %s is wrong; tests/bits/vmath.py test PROGRAM tells where", function_name[f],
                     format == KOPT_BF16 ? "bf16" : "fp16");
                ++wrong;
            }
        }
    ok(!wrong, "13 functions of all bf16 and fp16, correctly rounded: %s, %d tables wrong", name, wrong);
}

/* dy times the slope, by C's float arithmetic: such a product is exact. */
static void check_backward(const char *name) {
    static const int slope_of[] = {KOPT_FN_EXP, -1, 8, 9, 10, 11, 12, KOPT_FN_SIGMOID};
    int f, format, i, wrong = 0;
    uint64_t hash = 0;
    for (i = 0; i < ALL; ++i) factors[i] = (uint16_t)((unsigned)i * 40503u);
    for (f = 0; f <= KOPT_FN_SOFTPLUS; ++f)
        for (format = KOPT_BF16; format <= KOPT_FP16; ++format) {
            if (f == KOPT_FN_LOG) continue;
            wrong += map_all(slopes, (kopt_format)format, slope_of[f]) != KOPT_OK;
            wrong +=
                kopt_map_backward(products, factors, inputs, (kopt_format)format, ALL, (kopt_function)f) != KOPT_OK;
            hash = hash * 31 + hash16(products);
            for (i = 0; REFERENCE && i < ALL; ++i) {
                uint32_t nan = format == KOPT_BF16 ? 0x7f80 : 0x7c00;
                volatile float a =
                    format == KOPT_BF16 ? kopt_f32_from_bf16(factors[i]) : kopt_f32_from_fp16(factors[i]);
                volatile float b = format == KOPT_BF16 ? kopt_f32_from_bf16(slopes[i]) : kopt_f32_from_fp16(slopes[i]);
                volatile float c = a * b;
                uint32_t want = format == KOPT_BF16 ? kopt_bf16_from_f32(c) : kopt_fp16_from_f32(c);
                if ((want & 0x7fff) > nan ? (products[i] & 0x7fffu) <= nan : products[i] != want) ++wrong;
            }
        }
    ok(!wrong && hash == golden_backward, "backward is dy times the slope: %s, %d wrong, bits %016llx", name, wrong,
       (unsigned long long)hash);
}

/* ---- fp32 ------------------------------------------------------------------------------------------------------- */

static uint32_t noise = 1;
static uint32_t draw(void) { return mixed32(&noise); }

/* Half any bits at all, half of ordinary size; for atan2 both, and pairs like those of an optimizer. */
static void make_inputs(float *x, float *y, int n) {
    int i;
    for (i = 0; i < n; ++i) {
        x[i] = ref_float(draw()), y[i] = ref_float(draw());
        if (i & 1)
            x[i] = ((float)(int32_t)draw()) * (1.0f / (float)(1u << (26 + (i >> 1 & 3)))),
            y[i] = ((float)(int32_t)draw()) * 0x1p-27f;
        if ((i & 7) == 3) x[i] = ref_float((ref_bits(x[i]) & 0x807fffffu) | (0x78u + (draw() & 15)) << 23);
        if ((i & 7) == 5) y[i] = x[i] * ((float)(int32_t)draw() * 0x1p-31f);
        if (is_nan_word(ref_bits(x[i]))) x[i] = 1;
        if (is_nan_word(ref_bits(y[i]))) y[i] = 1;
    }
}

static void run_float(int f, float *out, const float *x, const float *y, int count) {
    static float other[CHUNK];
    kopt_result result = KOPT_OK;
    size_t n = (size_t)count;
    switch (f) {
    case 0: result = kopt_vmath_exp(out, x, n); break;
    case 1: result = kopt_vmath_log(out, x, n); break;
    case 2: result = kopt_vmath_tanh(out, x, n); break;
    case 3: result = kopt_vmath_erf(out, x, n); break;
    case 4: result = kopt_vmath_erfc(out, x, n); break;
    case 5: result = kopt_vmath_atan2(out, y, x, n); break;
    case 6: result = kopt_vmath_sincospi(out, other, x, n); break;
    default: result = kopt_vmath_sincospi(other, out, x, n); break;
    }
    if (result != KOPT_OK) ok(0, "%s: %s", float_name[f], kopt_result_string(result));
}

static double pi_reduced(double x, int cosine) /* sin or cos of pi x, x reduced to [-1/4, 1/4] exactly */
{
    double n, f, pi = 3.14159265358979323846;
    int k;
    x = fmod(x, 2);
    n = floor(2 * x + 0.5);
    f = x - n / 2;
    k = ((int)n + cosine) & 3;
    return (k & 2 ? -1 : 1) * (k & 1 ? cos(pi * f) : sin(pi * f));
}

static double truth(int f, float x, float y) {
    switch (f) {
    case 0: return exp((double)x);
    case 1: return log((double)x);
    case 2: return tanh((double)x);
    case 3: return erf((double)x);
    case 4: return erfc((double)x);
    case 5: return atan2((double)y, (double)x);
    default: return pi_reduced((double)x, f == 7);
    }
}

/* |got - want| in units of the last place of want as fp32; infinite and NaN by their words alone. */
static double ulps(float got, double want) {
    uint32_t u = ref_bits(got);
    uint64_t w;
    int exponent, top;
    memcpy(&w, &want, sizeof w);
    top = (int)(w >> 52 & 2047);
    if (top == 2047 && (w << 12) != 0) return is_nan_word(u) ? 0 : 1e9;
    if (is_nan_word(u)) return 1e9;
    if (top == 2047 || top > 1023 + 127) return u == ((uint32_t)(w >> 63) << 31 | 0x7f800000u) ? 0 : 1e9;
    if ((u & 0x7f800000u) == 0x7f800000u) return top == 1023 + 127 && (w >> 28 & 0xffffff) == 0xffffff ? 0.5 : 1e9;
    exponent = top - 1023 < -126 ? -126 : top - 1023;
    return ldexp(fabs((double)got - want), 23 - exponent);
}

static void check_accuracy(long count) {
    static float x[CHUNK], y[CHUNK], out[CHUNK];
    double worst[FLOATS + 1] = {0};
    float where[FLOATS + 1] = {0}, beside[FLOATS + 1] = {0};
    long done_so_far;
    int f, i;
    if (!REFERENCE) return;
    noise = 1;
    for (done_so_far = 0; done_so_far < count; done_so_far += CHUNK) {
        make_inputs(x, y, CHUNK);
        for (f = 0; f <= FLOATS; ++f) {
            run_float(f, out, x, y, CHUNK);
            for (i = 0; i < CHUNK; ++i) {
                double off;
                if (f >= 6 && (ref_bits(x[i]) & 0x7f800000u) == 0x7f800000u) continue;
                off = ulps(out[i], truth(f, x[i], y[i]));
                if (off > worst[f]) worst[f] = off, where[f] = x[i], beside[f] = y[i];
            }
        }
    }
    for (f = 0; f <= FLOATS; ++f)
        ok(worst[f] <= bound[f][SLEEF], "%s: %.3f ulp off at most, at %a (%a); promised %g", float_name[f], worst[f],
           (double)where[f], (double)beside[f], bound[f][SLEEF]);
}

/* Every fp32 number in turn; not part of the test: minutes. */
static void check_every(int f) {
    static float x[CHUNK], out[CHUNK];
    double worst = 0;
    uint32_t word = 0, where = 0;
    do {
        int i;
        for (i = 0; i < CHUNK; ++i) x[i] = ref_float(word + (uint32_t)i);
        run_float(f, out, x, x, CHUNK);
        for (i = 0; i < CHUNK; ++i) {
            double off = is_nan_word(ref_bits(x[i])) ? 0 : ulps(out[i], truth(f, x[i], x[i]));
            if (off > worst) worst = off, where = word + (uint32_t)i;
        }
    } while ((word += CHUNK) != 0);
    ok(worst <= bound[f][SLEEF], "%s of all 2^32: %.4f ulp off at most, at %08x", float_name[f], worst,
       (unsigned)where);
}

/* Special values, by their words. */
static void check_specials(void) {
    static const uint32_t inf = 0x7f800000u, zero = 0, top = 0x80000000u, nan = 0x7fc00000u, one = 0x3f800000u;
    struct {
        int f;
        uint32_t y, x, want;
    } given[] = {{0, 0, 0, 0},
                 {1, 0, 0, 0},
                 {2, 0, 0, 0},
                 {3, 0, 0, 0},
                 {4, 0, 0, 0},
                 {6, 0, 0, 0},
                 {7, 0, 0, 0}, /* NaN */
                 {0, 0, 0, 0x3f800000u},
                 {0, 0, 0x7f800000u, 0x7f800000u},
                 {0, 0, 0xff800000u, 0},
                 {0, 0, 0x42b17218u, 0x7f800000u},
                 {0, 0, 0xc2d00000u, 0},
                 {0, 0, 0xc2cf0000u, 1},
                 {0, 0, 1, 0x3f800000u},
                 {1, 0, 0, 0xff800000u},
                 {1, 0, 0x80000000u, 0xff800000u},
                 {1, 0, 0x3f800000u, 0},
                 {1, 0, 0x7f800000u, 0x7f800000u},
                 {1, 0, 0xbf800000u, 0x7fc00000u},
                 {1, 0, 0xff800000u, 0x7fc00000u},
                 {1, 0, 1, 0xc2ce8ed0u},
                 {2, 0, 0, 0},
                 {2, 0, 0x80000000u, 0x80000000u},
                 {2, 0, 0x7f800000u, 0x3f800000u},
                 {2, 0, 0xff800000u, 0xbf800000u},
                 {2, 0, 1, 1},
                 {3, 0, 0x80000000u, 0x80000000u},
                 {3, 0, 0x7f800000u, 0x3f800000u},
                 {3, 0, 0xff800000u, 0xbf800000u},
                 {4, 0, 0, 0x3f800000u},
                 {4, 0, 0x7f800000u, 0},
                 {4, 0, 0xff800000u, 0x40000000u},
                 {5, 0, 0, 0},
                 {5, 0x80000000u, 0, 0x80000000u},
                 {5, 0, 0x80000000u, 0x40490fdbu},
                 {5, 0x80000000u, 0x80000000u, 0xc0490fdbu},
                 {5, 0, 0x3f800000u, 0},
                 {5, 0x3f800000u, 0, 0x3fc90fdbu},
                 {5, 0xbf800000u, 0, 0xbfc90fdbu},
                 {5, 0, 0xbf800000u, 0x40490fdbu},
                 {5, 0x7f800000u, 0x7f800000u, 0x3f490fdbu},
                 {5, 0x7f800000u, 0xff800000u, 0x4016cbe4u},
                 {5, 0xff800000u, 0xff800000u, 0xc016cbe4u},
                 {5, 0x3f800000u, 0x7f800000u, 0},
                 {5, 0xbf800000u, 0xff800000u, 0xc0490fdbu},
                 {5, 0x7f800000u, 0x3f800000u, 0x3fc90fdbu},
                 {5, 0x7fc00000u, 0x3f800000u, 0x7fc00000u},
                 {5, 0x3f800000u, 0x7fc00000u, 0x7fc00000u},
                 {6, 0, 0x3f000000u, 0x3f800000u},
                 {6, 0, 0x3fc00000u, 0xbf800000u},
                 {6, 0, 0x80000000u, 0x80000000u},
                 {6, 0, 0x3f800000u, 0},
                 {6, 0, 0xbf800000u, 0x80000000u},
                 {6, 0, 0x7f800000u, 0x7fc00000u},
                 {6, 0, 0x4b7fffffu, 0},
                 {6, 0, 0x4a800001u, 0x3f800000u},
                 {7, 0, 0x3f000000u, 0},
                 {7, 0, 0x3f800000u, 0xbf800000u},
                 {7, 0, 0x4b7fffffu, 0xbf800000u},
                 {7, 0, 0x4b800000u, 0x3f800000u},
                 {7, 0, 0xff800000u, 0x7fc00000u},
                 {7, 0, 0x4a800001u, 0}};
    size_t i;
    int wrong = 0;
    (void)inf, (void)zero, (void)top, (void)one;
    for (i = 0; i < 7; ++i) given[i].x = given[i].want = nan;
    for (i = 0; i < sizeof given / sizeof given[0]; ++i) {
        float x = ref_float(given[i].x), y = ref_float(given[i].y), got;
        uint32_t word;
        run_float(given[i].f, &got, &x, &y, 1);
        word = ref_bits(got);
        if (word == given[i].want || (is_nan_word(word) && is_nan_word(given[i].want))) continue;
        if (SLEEF && abs((int)(word - given[i].want)) <= 1) continue;
        note("%s(%08x, %08x) is %08x, not %08x", float_name[given[i].f], (unsigned)given[i].y, (unsigned)given[i].x,
             (unsigned)word, (unsigned)given[i].want);
        ++wrong;
    }
    ok(!wrong, "zeros, infinities, NaN and exact values: %d wrong", wrong);
}

/* Results that change with the last place of a coefficient, up or down: for each coefficient whose last place was seen
   to change any. By the formulas of docs/numerics.md in NumPy, with what `tests/bits/vmath.py coefficients` prints. */
static void check_coefficients(void) {
    static const struct {
        int f;
        uint32_t x, want;
    } c[] = {{0, 0x410d893e, 0x45d914bb}, {0, 0xc18d569e, 0x32b67747}, {1, 0x3fb09b28, 0x3ea4cef4},
             {1, 0x3f34df31, 0xbeb1dcef}, {1, 0x3fb7fee3, 0x3eb9cba6}, {2, 0x3f406379, 0x3f22d469},
             {2, 0x3f49ab1b, 0x3f283a79}, {2, 0x3f49665e, 0x3f281364}, {3, 0x3f7ff0de, 0x3f57b4f5},
             {3, 0x3f5fc8e7, 0x3f489c35}, {3, 0x3f726c0d, 0x3f51ca81}, {3, 0x3f6b521d, 0x3f4e6f9f},
             {4, 0x40ad3201, 0x28af2c95}, {4, 0x40f29187, 0x142239e2}, {4, 0x40fad8d2, 0x113a0562},
             {4, 0x40b9dd71, 0x257658c2}, {5, 0x3f718ec8, 0x3f41a21f}, {5, 0x3f76e488, 0x3f446d23}, /* over 1 */
             {6, 0x3e771289, 0x3f2ffe79}, {6, 0x3e7f73ce, 0x3f34b706}, {6, 0x3e7a2b05, 0x3f31c06f},
             {7, 0x3e7fd9ac, 0x3f351a3b}, {7, 0x3e52dd21, 0x3f4c45fb}, {7, 0x3e6fcb38, 0x3f3dcacd},
             {7, 0x3e7951b1, 0x3f38b0fd}};
    size_t i;
    int wrong = 0;
    for (i = 0; i < sizeof c / sizeof *c; ++i) {
        const float x = ref_float(c[i].x), one = 1;
        float got = 0;
        run_float(c[i].f, &got, c[i].f == 5 ? &one : &x, &x, 1);
        if (ref_bits(got) == c[i].want) continue;
        note("%s(%08x) is %08x", float_name[c[i].f], (unsigned)c[i].x, (unsigned)ref_bits(got));
        ++wrong;
    }
    ok(!wrong, "results that hang on the last place of a coefficient: %d of %d wrong", wrong, (int)i);
}

static uint64_t hash_floats(void) {
    static float x[CHUNK], y[CHUNK], out[CHUNK];
    static unsigned char bytes[4 * CHUNK];
    uint64_t hash = 0;
    int f, i, k, round;
    noise = 7;
    for (round = 0; round < 8; ++round) {
        make_inputs(x, y, CHUNK);
        for (f = 0; f <= FLOATS; ++f) {
            run_float(f, out, x, y, CHUNK);
            for (i = 0; i < CHUNK; ++i) {
                uint32_t u = ref_bits(out[i]);
                if (is_nan_word(u)) u = 0x7fc00000u;
                for (k = 0; k < 4; ++k) bytes[4 * i + k] = (unsigned char)(u >> 8 * k);
            }
            hash = hash * 31 + fnv_bytes(FNV_START, bytes, sizeof bytes);
        }
    }
    return hash;
}

/* Random numbers, for the machines on which test_noise.c does not run. */
static uint64_t hash_more(void) {
    enum { MOST = 3 * 300 };
    static const size_t lengths[] = {3, 15, 48, 99, MOST};
    static uint32_t words[MOST];
    static unsigned char bytes[4 * MOST];
    uint64_t hash = 0;
    int format, kind;
    size_t k, i;
    for (format = KOPT_F32; format <= KOPT_FP16; ++format)
        for (k = 0; k < 5; ++k)
            for (kind = 0; kind < 2; ++kind) {
                const kopt_random_key key = {1, 2, (uint32_t)k, 100};
                const size_t n = lengths[k];
                const kopt_result result = kind ? kopt_uniform(words, (kopt_format)format, n, -3, 5, key)
                                                : kopt_normal(words, (kopt_format)format, n, 0, 4, key);
                for (i = 0; i < n; ++i) { /* as little-endian bytes */
                    uint32_t u = words[i];
                    uint16_t half;
                    memcpy(&half, (const unsigned char *)words + 2 * i, 2);
                    if (format != KOPT_F32) u = half;
                    bytes[4 * i] = (unsigned char)u, bytes[4 * i + 1] = (unsigned char)(u >> 8);
                    bytes[4 * i + 2] = (unsigned char)(u >> 16), bytes[4 * i + 3] = (unsigned char)(u >> 24);
                }
                hash = hash * 31 + fnv_bytes(FNV_START, bytes, 4 * n) + (uint64_t)(result != KOPT_OK);
            }
    return hash;
}

/* ---- lengths, places, refusals ---------------------------------------------------------------------------------- */

static void check_edges(void) {
    enum { MOST = 70, ROOM = MOST + 32 };
    static float x[ROOM], y[ROOM], out[ROOM], other[ROOM], want[ROOM], more[ROOM];
    static uint16_t in16[600 + 32], out16[600 + 32], want16[600];
    int f, i, n, wrong = 0;
    noise = 3;
    make_inputs(x, y, ROOM);
    for (f = 0; f <= FLOATS; ++f) {
        run_float(f, want, x, y, MOST);
        for (n = 0; n <= MOST; ++n) {
            int at = n % 5;
            for (i = 0; i < ROOM; ++i) out[i] = 12345.0f;
            run_float(f, out + at, x, y, n);
            for (i = 0; i < ROOM; ++i)
                wrong += i < at || i >= at + n
                             ? ref_bits(out[i]) != ref_bits(12345.0f)
                             : ref_bits(out[i]) != ref_bits(want[i - at]) && !is_nan_word(ref_bits(want[i - at]));
            memcpy(out, x, sizeof out); /* in place */
            run_float(f, out, out, y, n);
            for (i = 0; i < n; ++i) wrong += ref_bits(out[i]) != ref_bits(want[i]) && !is_nan_word(ref_bits(want[i]));
        }
    }
    memcpy(out, y, sizeof out);
    run_float(5, want, x, y, MOST);
    kopt_vmath_atan2(out, out, x, MOST);
    wrong += memcmp(out, want, MOST * sizeof *out) != 0;
    run_float(6, want, x, y, MOST);
    run_float(7, more, x, y, MOST);
    memcpy(other, x, sizeof other);
    kopt_vmath_sincospi(out, other, other, MOST);
    for (i = 0; i < MOST; ++i)
        wrong += !is_nan_word(ref_bits(want[i])) &&
                 (ref_bits(out[i]) != ref_bits(want[i]) || ref_bits(other[i]) != ref_bits(more[i]));
    ok(!wrong, "any n, in place, nothing outside: %d wrong", wrong);
    for (wrong = 0, i = 0; i < 600 + 32; ++i) in16[i] = (uint16_t)(i * 1103);
    for (f = 0; f <= KOPT_FN_SOFTPLUS; ++f) {
        kopt_map(want16, in16, KOPT_BF16, 600, (kopt_function)f);
        for (n = 0; n < 600; n += n < 40 ? 1 : 79) {
            for (i = 0; i < 600 + 32; ++i) out16[i] = 0x1234;
            kopt_map(out16 + n % 3, in16, KOPT_BF16, (size_t)n, (kopt_function)f);
            for (i = 0; i < 600 + 32; ++i)
                wrong += out16[i] != (i < n % 3 || i >= n % 3 + n ? 0x1234 : want16[i - n % 3]);
            memcpy(out16, in16, sizeof out16);
            kopt_map(out16, out16, KOPT_BF16, (size_t)n, (kopt_function)f);
            wrong += memcmp(out16, want16, (size_t)n * 2) != 0;
        }
    }
    ok(!wrong, "16 bits: any n, in place, nothing outside: %d wrong", wrong);
}

/* The caller rounds up, flushes subnormals and takes them for zero; then nothing differs and all that is back. */
static void check_environment(void) {
#if defined(__SSE2__) && !defined(__TINYC__)
    static const float x[4] = {-95.5f, 0.3f, 1.7f, -100.25f};
    float want[2][4], got[2][4];
    unsigned before = _mm_getcsr(), after[3], hostile = 0xdfc0u; /* masks, FTZ, DAZ, upwards */
    int i, wrong = 0;
    kopt_vmath_exp(want[0], x, 4);
    kopt_vmath_atan2(want[1], x, x, 4);
    kopt_map(slopes, inputs, KOPT_BF16, ALL, KOPT_FN_SILU);
    _mm_setcsr(hostile);
    kopt_vmath_exp(got[0], x, 4);
    after[0] = _mm_getcsr();
    kopt_vmath_atan2(got[1], x, x, 4);
    after[1] = _mm_getcsr();
    kopt_map(outputs, inputs, KOPT_BF16, ALL, KOPT_FN_SILU);
    after[2] = _mm_getcsr();
    _mm_setcsr(before);
    for (i = 0; i < 3; ++i) wrong += (after[i] | 0x3f) != (hostile | 0x3f);
    ok(!wrong && !memcmp(want, got, sizeof want) && !memcmp(slopes, outputs, sizeof slopes),
       "the caller's FP environment changes nothing and is put back");
#else
    skip("the caller's FP environment: this machine has no MXCSR");
#endif
}

static void check_refusals(void) {
    static float a[64], b[64];
    static uint16_t h[64];
    size_t huge = ~(size_t)0 / 4;
    unsigned i;
    a[0] = 3;
    ok(kopt_vmath_exp(NULL, NULL, 0) == KOPT_OK && kopt_vmath_exp(a, NULL, 1) == KOPT_ERROR_NULL &&
           kopt_vmath_log(NULL, a, 1) == KOPT_ERROR_NULL && kopt_vmath_atan2(a, b, NULL, 1) == KOPT_ERROR_NULL &&
           kopt_vmath_sincospi(a, NULL, b, 1) == KOPT_ERROR_NULL,
       "NULL is refused, but for n = 0");
    ok(kopt_vmath_exp(a + 1, a, 32) == KOPT_ERROR_OVERLAP && kopt_vmath_tanh(a, a + 31, 32) == KOPT_ERROR_OVERLAP &&
           kopt_vmath_erf(a, a + 1, 2) == KOPT_ERROR_OVERLAP && kopt_vmath_erfc(a, a + 1, 2) == KOPT_ERROR_OVERLAP &&
           kopt_vmath_atan2(a, b, a + 1, 8) == KOPT_ERROR_OVERLAP &&
           kopt_vmath_sincospi(a, a, b, 8) == KOPT_ERROR_OVERLAP &&
           kopt_vmath_sincospi(a, a, b, 1) == KOPT_ERROR_OVERLAP &&
           kopt_vmath_sincospi(a, a + 7, b, 8) == KOPT_ERROR_OVERLAP &&
           kopt_map(h + 1, h, KOPT_BF16, 8, KOPT_FN_EXP) == KOPT_ERROR_OVERLAP &&
           kopt_map_backward(h, h + 8, h + 1, KOPT_BF16, 8, KOPT_FN_EXP) == KOPT_ERROR_OVERLAP,
       "partial overlap is refused");
    ok(kopt_map(h, h, KOPT_BF16, 8, (kopt_function)8) == KOPT_ERROR_OPTION &&
           kopt_map(h, h, KOPT_BF16, 8, (kopt_function)-1) == KOPT_ERROR_OPTION &&
           kopt_map(h, h, KOPT_F32, 8, KOPT_FN_EXP) == KOPT_ERROR_OPTION &&
           kopt_map(h, h, KOPT_Q8, 8, KOPT_FN_EXP) == KOPT_ERROR_OPTION &&
           kopt_map_backward(h, h, h, KOPT_BF16, 8, KOPT_FN_LOG) == KOPT_ERROR_OPTION &&
           kopt_map_backward(h, h, h, KOPT_BF16, 8, (kopt_function)8) == KOPT_ERROR_OPTION,
       "functions and formats that are none");
    ok(kopt_vmath_exp(a, a, huge) == KOPT_ERROR_BOUNDS &&
           kopt_map(h, h, KOPT_BF16, huge, KOPT_FN_EXP) == KOPT_ERROR_BOUNDS,
       "n too large");
    for (i = 0; i < 64; ++i) h[i] = 0;
    ok(ref_bits(a[0]) == ref_bits(3.0f) && a[1] == 0, "and nothing was written");
    ok(kopt_vmath_sincospi(a, a + 8, b, 8) == KOPT_OK && kopt_vmath_sincospi(a + 8, a, b, 8) == KOPT_OK,
       "an array right behind another is no overlap");
}

/* ---- every instruction set -------------------------------------------------------------------------------------- */

static void check_all(long count) {
    int isa;
    FOR_EACH_ISA(isa) {
        const char *const name = kopt_isa_name((kopt_isa)isa);
        uint64_t hash;
        check_tables(name);
        check_backward(name);
        hash = hash_floats();
        ok(hash == golden_floats[SLEEF], "the fp32 functions' bits%s: %s, %016llx", SLEEF ? " with SLEEF 3.5.1" : "",
           name, (unsigned long long)hash);
        hash = hash_more();
        ok(hash == golden_more, "the bits of random numbers: %s, %016llx", name, (unsigned long long)hash);
        if (!SLEEF) check_coefficients();
        check_specials();
        check_edges();
    }
    check_accuracy(count);
}

int main(int count, char **arguments) {
    const char *mode = count > 1 ? arguments[1] : "full";
    int f, i, format;
    for (i = 0; i < ALL; ++i) inputs[i] = (uint16_t)i;
    if (!strcmp(mode, "dump")) { /* 13 * 2 * 65536 uint16_t, this machine's order */
        for (f = 0; f < FUNCTIONS; ++f)
            for (format = KOPT_BF16; format <= KOPT_FP16; ++format) {
                map_all(outputs, (kopt_format)format, f);
                fwrite(outputs, sizeof outputs, 1, stdout);
            }
        return 0;
    }
    if (!strcmp(mode, "values") && count > 3) { /* values FUNCTION CHUNKS: x, y, out by chunks */
        static float x[CHUNK], y[CHUNK], out[CHUNK];
        noise = 5;
        for (i = 0; i < atoi(arguments[3]); ++i) {
            make_inputs(x, y, CHUNK);
            run_float(atoi(arguments[2]), out, x, y, CHUNK);
            fwrite(x, sizeof x, 1, stdout);
            fwrite(y, sizeof y, 1, stdout);
            fwrite(out, sizeof out, 1, stdout);
        }
        return 0;
    }
    if (!strcmp(mode, "every")) {
        for (f = 0; f < 5; ++f) check_every(f);
        return done();
    }
    check_all(strcmp(mode, "quick") ? 1L << 24 : 1L << 16);
    check_environment();
    check_refusals();
    return done();
}
