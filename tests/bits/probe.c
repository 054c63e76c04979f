/* probe.c - does this build, on this machine, give the promised bits? Prints one line per group of cases, NAME HASH,
   and at the end `all HASH`; golden.txt holds the lines that must come out, probe.py computes them from
   docs/numerics.md alone.

       void probe(void (*put)(const char *line));          put receives each line, with its '\n'

   Needs no library and 11 KB of memory, stack included. C99 or C++. Configuration (define before):
       PROBE_NO_MAIN    there is no main(): something else calls probe(), e.g. the start-up code of a microcontroller
       PROBE_ISA        a kopt_isa that is forced instead of the best one, e.g. KOPT_ISA_SCALAR
       PROBE_FTZ        as the argument ftz
       KAHAN_OPT_*      as usual
   Arguments of main(), in any order:
       scalar | sse2 | avx2 | ...   forces that ISA
       up | down | zero             as if the program had changed the rounding direction
       ftz                          the same as zero, and subnormals are flushed to zero on input and output
       isas                         prints the names of the usable ISAs and does nothing else
   Exit status 77: this machine or this build has no such thing. */
#define KAHAN_OPT_IMPLEMENTATION
#include "../../kahan_opt.h"
#include "begun.h"

#if defined(__GNUC__) /* the hashes show what a call has done */
#pragma GCC diagnostic ignored "-Wunused-result"
#endif

#ifdef __cplusplus
extern "C" void probe(void (*put)(const char *line));
#else
void probe(void (*put)(const char *line));
#endif

/* ---- The cases: one line for a rule or for a store adds all its combinations ------------------------------------- */

typedef struct rule_row {
    const char *name;
    kopt_rule rule;
    kopt_decay_mode decay;
    int nesterov, amsgrad, stable;
    double lr, weight_decay, momentum, dampening;
    uint32_t before; /* steps that are done before those of the probe */
} rule_row;

/* These, and all numbers of the steps below, are exact in binary32. */
static const rule_row rules[] = {
    {"sgd", KOPT_RULE_SGD, KOPT_DECAY_L2, 0, 0, 0, 3.0 / 256, 5.0 / 512, 0, 0, 0},
    {"momentum", KOPT_RULE_SGD, KOPT_DECAY_L2, 0, 0, 0, 3.0 / 256, 0, 13.0 / 16, 0.25, 0},
    {"nesterov", KOPT_RULE_SGD, KOPT_DECAY_DECOUPLED, 1, 0, 0, 3.0 / 256, 5.0 / 512, 13.0 / 16, 0, 0},
    {"adam", KOPT_RULE_ADAM, KOPT_DECAY_L2, 0, 0, 0, 3.0 / 4096, 5.0 / 512, 0, 0, 0},
    {"adamw", KOPT_RULE_ADAM, KOPT_DECAY_DECOUPLED, 0, 0, 0, 3.0 / 4096, 5.0 / 512, 0, 0, 0},
    {"fully", KOPT_RULE_ADAM, KOPT_DECAY_FULLY_DECOUPLED, 0, 0, 0, 3.0 / 4096, 5.0 / 512, 0, 0, 0},
    {"amsgrad", KOPT_RULE_ADAM, KOPT_DECAY_DECOUPLED, 0, 1, 0, 3.0 / 4096, 5.0 / 512, 0, 0, 0},
    {"stable", KOPT_RULE_ADAM, KOPT_DECAY_DECOUPLED, 0, 0, 1, 3.0 / 4096, 5.0 / 512, 0, 0, 0},
    {"lion", KOPT_RULE_LION, KOPT_DECAY_DECOUPLED, 0, 0, 0, 3.0 / 4096, 5.0 / 512, 0, 0, 0},
    {"adan", KOPT_RULE_ADAN, KOPT_DECAY_DECOUPLED, 0, 0, 0, 3.0 / 4096, 5.0 / 512, 0, 0, 0},
    {"radam", KOPT_RULE_RADAM, KOPT_DECAY_L2, 0, 0, 0, 3.0 / 4096, 5.0 / 512, 0, 0, 4},
    {"ranger", KOPT_RULE_RANGER, KOPT_DECAY_DECOUPLED, 0, 0, 0, 3.0 / 4096, 5.0 / 512, 0, 0, 4},
    {"ema", KOPT_RULE_EMA, KOPT_DECAY_L2, 0, 0, 0, 3.0 / 256, 0, 0, 0, 0},
};

/* Those that KOPT_FEEDBACK takes. */
static int pays(const rule_row *r) {
    return r->rule == KOPT_RULE_SGD
               ? r->momentum > 0
               : r->rule == KOPT_RULE_ADAM || r->rule == KOPT_RULE_ADAN || r->rule == KOPT_RULE_RADAM;
}

typedef struct store_row {
    const char *name;
    kopt_format format;
    kopt_rounding rounding, compensation;
} store_row;

static const store_row stores[] = {
    {"f32", KOPT_F32, KOPT_NEAREST, KOPT_STOCHASTIC},
    {"bf16-nearest", KOPT_BF16, KOPT_NEAREST, KOPT_STOCHASTIC},
    {"bf16-stochastic", KOPT_BF16, KOPT_STOCHASTIC, KOPT_STOCHASTIC},
    {"bf16-kahan", KOPT_BF16, KOPT_KAHAN, KOPT_STOCHASTIC},
    {"bf16-kahan-nearest", KOPT_BF16, KOPT_KAHAN, KOPT_NEAREST},
    {"bf16-compact", KOPT_BF16, KOPT_COMPACT, KOPT_STOCHASTIC},
    {"bf16-compact-nearest", KOPT_BF16, KOPT_COMPACT, KOPT_NEAREST},
    {"bf16-exact", KOPT_BF16, KOPT_EXACT, KOPT_STOCHASTIC},
    {"fp16-nearest", KOPT_FP16, KOPT_NEAREST, KOPT_STOCHASTIC},
    {"fp16-stochastic", KOPT_FP16, KOPT_STOCHASTIC, KOPT_STOCHASTIC},
    {"fp16-kahan", KOPT_FP16, KOPT_KAHAN, KOPT_STOCHASTIC},
    {"fp16-kahan-nearest", KOPT_FP16, KOPT_KAHAN, KOPT_NEAREST},
    {"fp16-compact", KOPT_FP16, KOPT_COMPACT, KOPT_STOCHASTIC},
    {"fp16-compact-nearest", KOPT_FP16, KOPT_COMPACT, KOPT_NEAREST},
    {"fp16-exact", KOPT_FP16, KOPT_EXACT, KOPT_STOCHASTIC},
};

typedef struct moment_row {
    kopt_format format;
    kopt_rounding rounding;
} moment_row;

static const moment_row moments[] = {
    {KOPT_F32, KOPT_STOCHASTIC}, {KOPT_BF16, KOPT_STOCHASTIC}, {KOPT_BF16, KOPT_NEAREST}, {KOPT_FP16, KOPT_STOCHASTIC},
    {KOPT_FP16, KOPT_NEAREST},   {KOPT_Q8, KOPT_STOCHASTIC},   {KOPT_Q8, KOPT_NEAREST}};

static const kopt_format formats[] = {KOPT_F32, KOPT_BF16, KOPT_FP16};

#define COUNT(array) ((int)(sizeof(array) / sizeof((array)[0])))

enum {
    SMALL = 21, /* elements: whole vectors and parts of them */
    LONG = 276, /* two rows of random numbers and two parts */
    POOL = 7000 /* bytes: LONG elements of Adan in fp32 */
};

/* ---- Lines and hashes: FNV-1a, 32 bits, over the bytes of little-endian numbers ---------------------------------- */

static void (*put_line)(const char *line);
static uint32_t hash, all;

static void hash_number(uint32_t x, int bytes) {
    for (; bytes > 0; bytes--, x >>= 8) hash = (hash ^ (x & 0xFFu)) * 16777619u;
}

static char line[48];
static int length;

static void say(const char *text) {
    while (*text != 0) line[length++] = *text++;
}

static void end_line(void) {
    say("\n");
    line[length] = 0;
    put_line(line);
    length = 0;
}

static void say_hash(uint32_t x) {
    int i;
    say(" ");
    for (i = 28; i >= 0; i -= 4) line[length++] = "0123456789abcdef"[x >> i & 15];
    end_line();
}

/* ---- Inputs: xorshift32 (Marsaglia 2003: 13, 17, 5), started in each group from the hash of its name ------------- */

static uint32_t state, rarity; /* 1 value in rarity + 1 is special */

static uint32_t draw(void) {
    state ^= state << 13;
    state ^= state >> 17;
    state ^= state << 5;
    return state;
}

static const char *name1, *name2; /* of the group: NAME1 or NAME1-NAME2 */

static void begin_group(const char *first, const char *second) {
    const char *p;
    name1 = first, name2 = second;
    state = 2166136261u;
    for (p = name1; *p != 0; p++) state = (state ^ (unsigned char)*p) * 16777619u;
    for (p = name2; *p != 0; p++) state = (state ^ (unsigned char)*p) * 16777619u;
    hash = 2166136261u;
    rarity = 15;
}

static void end_group(void) {
    const uint32_t result = hash;
    say(name1);
    if (*name2 != 0) say("-");
    say(name2);
    say_hash(result);
    hash = all; /* `all` is the hash of the hashes */
    hash_number(result, 4);
    all = hash;
}

/* fp32 words at which something happens; the sign is drawn. */
static const uint32_t special[] = {
    0x00000000u, 0x00000001u, 0x007FFFFFu, 0x00008000u, 0x00800000u, 0x7F800000u, 0x7FC00000u, 0x7F800001u,
    0x7FFFFFFFu, 0x7F7FFFFFu, 0x7F7F0000u, 0x7F7F7FFFu, 0x7F7F8000u, 0x7F7E8000u, 0x3F808000u, 0x3F818000u,
    0x477FE000u, 0x477FEFFFu, 0x477FF000u, 0x477FFFFFu, 0x47800000u, 0x38800000u, 0x387FFFFFu, 0x38000000u,
    0x33800000u, 0x33000000u, 0x33000001u, 0x33C00000u, 0x2B800000u, 0x2B000000u, 0x2B000001u, 0x3F801000u};

/* An fp32 word: a special one; else exponent low + [0, span), 1 in 4 a tie of bf16, 1 in 4 a tie of fp16. */
static uint32_t value(uint32_t low, uint32_t span) {
    const uint32_t a = draw(), b = draw(), sign = a & 0x80000000u;
    uint32_t word;
    if ((a >> 8 & rarity) == 0) return sign | special[b >> 8 & 31u];
    word = sign | (low + ((a >> 16 & 255u) * span >> 8)) << 23 | (b & 0x007FFFFFu);
    if ((b >> 28 & 3u) == 1) word = (word & 0xFFFF0000u) | 0x8000u;
    if ((b >> 28 & 3u) == 2) word = (word & 0xFFFFE000u) | 0x1000u;
    return word;
}

/* The same, cut off to a format; fp16 ends at its largest number and its smallest subnormals. */
static uint32_t value_of(kopt_format format, uint32_t low, uint32_t span) {
    const uint32_t word = value(low, span), exponent = word >> 23 & 255u, sign = word >> 16 & 0x8000u;
    const uint32_t fraction = word >> 13 & 0x3FFu;
    if (format == KOPT_F32) return word;
    if (format == KOPT_BF16) return word >> 16;
    if (exponent == 255) return sign | 0x7C00u | fraction;
    if (exponent > 142) return sign | 0x7BFFu;
    if (exponent < 113) return sign | fraction;
    return sign | (exponent - 112) << 10 | fraction;
}

/* ---- Memory: numbers of 1, 2 or 4 bytes in the machine's order, at any address ----------------------------------- */

typedef unsigned char byte;
static uint32_t pool_words[POOL / 4];
static byte saved[POOL + 256]; /* a checkpoint */
static float numbers[SMALL];
static const uint16_t one = 1;

static int width_of(kopt_format format) { return format == KOPT_F32 ? 4 : format == KOPT_Q8 ? 1 : 2; }

static void set(byte *array, int width, int i, uint32_t x) {
    const int little = *(const byte *)&one;
    int k;
    array += i * width;
    for (k = 0; k < width; k++, x >>= 8) array[little ? k : width - 1 - k] = (byte)(x & 0xFFu);
}

static uint32_t get(const byte *array, int width, int i) {
    const int little = *(const byte *)&one;
    uint32_t x = 0;
    int k;
    array += i * width;
    for (k = width - 1; k >= 0; k--) x = x << 8 | array[little ? k : width - 1 - k];
    return x;
}

static void hash_array(const byte *array, int width, int n) {
    int i;
    for (i = 0; i < n; i++) hash_number(get(array, width, i), width);
}

/* A NaN keeps its sign and nothing else: its payload is not part of the promise. */
static uint32_t without_payload(kopt_format format, uint32_t x) {
    const uint32_t infinity = format == KOPT_F32 ? 0x7F800000u : format == KOPT_BF16 ? 0x7F80u : 0x7C00u;
    const uint32_t sign = format == KOPT_F32 ? 0x80000000u : 0x8000u;
    if ((x & (sign - 1)) <= infinity) return x;
    return (x & sign) | (sign - 1);
}

static void hash_numbers(const byte *array, kopt_format format, int n) {
    int i;
    for (i = 0; i < n; i++) hash_number(without_payload(format, get(array, width_of(format), i)), width_of(format));
}

static void fill(byte *array, kopt_format format, int n, uint32_t low, uint32_t span) {
    int i;
    for (i = 0; i < n; i++) set(array, width_of(format), i, value_of(format, low, span));
}

static void hash_float(float x) { hash_number(without_payload(KOPT_F32, get((const byte *)&x, 4, 0)), 4); }

static float float_of(uint32_t word) {
    float x;
    set((byte *)&x, 4, 0, word);
    return x;
}

static uint64_t wide(uint32_t high, uint32_t low) { return (uint64_t)high << 32 | low; }

static kopt_random_key random_key(uint64_t seed, uint32_t step, uint32_t id, uint64_t first_index) {
    kopt_random_key key;
    key.seed = seed;
    key.step = step;
    key.id = id;
    key.first_index = first_index;
    return key;
}

/* ---- Conversions, random bits ------------------------------------------------------------------------------------ */

static void probe_widen(void) { /* all 65,536 of both formats, one by one and in bulk */
    byte *from = (byte *)pool_words, *to = from + 515;
    uint32_t word;
    int i, f;
    begin_group("widen", "");
    for (f = 1; f < 3; f++)
        for (word = 0; word < 0x10000u; word += 256) {
            for (i = 0; i < 256; i++) {
                const uint16_t x = (uint16_t)(word + (uint32_t)i);
                set(from, 2, i, x);
                hash_float(f == 1 ? kopt_f32_from_bf16(x) : kopt_f32_from_fp16(x));
            }
            kopt_convert(to, KOPT_F32, from, formats[f], 256);
            hash_numbers(to, KOPT_F32, 256);
        }
    end_group();
}

static void probe_narrow(void) { /* one by one */
    int i;
    begin_group("narrow", "");
    for (i = 0; i < 4096; i++) {
        const float x = float_of(value(0, i & 1 ? 255 : 150));
        const uint32_t bits = draw(), r = bits >> 30 == 0 ? bits | 0xFFFFu : bits;
        hash_number(without_payload(KOPT_BF16, kopt_bf16_from_f32(x)), 2);
        hash_number(without_payload(KOPT_FP16, kopt_fp16_from_f32(x)), 2);
        hash_number(kopt_bf16_from_f32_stochastic(x, r), 2);
        hash_number(kopt_fp16_from_f32_stochastic(x, r), 2);
    }
    end_group();
}

static void probe_convert(int stochastic) { /* every format to every other, odd lengths and addresses */
    byte *from = (byte *)pool_words;
    int f, g, k;
    begin_group("convert", stochastic ? "stochastic" : "");
    rarity = 3;
    for (f = 0; f < 3; f++)
        for (g = 0; g < 3; g++)
            for (k = 0; k < 24; k++) {
                const int n = k < 20 ? k + 1 : 276;
                byte *to = from + n * width_of(formats[f]) + k % 4;
                fill(from, formats[f], n, k & 1 ? 0 : 90, k & 1 ? 255 : 60);
                if (stochastic) {
                    const uint32_t high = draw() & 0x7FFFFFFFu, low = draw(), step = draw(), id = draw();
                    kopt_convert_stochastic(to, formats[g], from, formats[f], (size_t)n,
                                            random_key(wide(step, high), step, id, wide(k & 2 ? high : 0, low)));
                } else {
                    kopt_convert(to, formats[g], from, formats[f], (size_t)n);
                }
                hash_numbers(to, formats[g], n);
            }
    end_group();
}

static void probe_finite(void) { /* nothing, or one infinity or NaN, or a subnormal at every place */
    byte *array = (byte *)pool_words;
    int f, i, n;
    begin_group("finite", "");
    for (f = 0; f < 3; f++)
        for (n = 0; n < 37; n += 3) {
            for (i = 0; i < n; i++) set(array, width_of(formats[f]), i, draw() & 0x0F0F0F0Fu);
            hash_number((uint32_t)kopt_all_finite(array, formats[f], (size_t)n), 1);
            for (i = 0; i < n; i++) {
                const uint32_t old = get(array, width_of(formats[f]), i);
                set(array, width_of(formats[f]), i, value_of(formats[f], 250, 6));
                hash_number((uint32_t)kopt_all_finite(array, formats[f], (size_t)n), 1);
                set(array, width_of(formats[f]), i, old);
            }
        }
    end_group();
}

static void probe_random(void) {
    int i;
    uint32_t k;
    begin_group("random", "");
    for (i = 0; i < 32; i++) {
        const uint32_t a = draw(), b = draw(), step = draw(), id = draw(), high = draw() & 0x7FFFFFFFu, low = draw();
        for (k = 0; k < 40; k++)
            hash_number(
                kopt_random(random_key(wide(a, b), step, id, 0), (uint32_t)i & 15u, wide(i & 1 ? high : 0, low) + k),
                4);
        for (k = 0; k < 256; k++)
            hash_number(kopt_random(random_key(0, (uint32_t)i, 0, 0), 0, wide((uint32_t)i >> 4, 0xFFFFFF00u + k)), 4);
    }
    end_group();
}

/* ---- The caller's floating-point environment --------------------------------------------------------------------- */

enum { TO_NEAREST, DOWN, UP, ZERO };
#ifdef PROBE_FTZ
static int direction = ZERO, flush = 1;
#else
static int direction = TO_NEAREST, flush;
#endif

/* on: the rounding direction is changed, and subnormals are flushed on input and output. off: the default. */
#if (defined(__GNUC__) || defined(__TINYC__)) && (defined(KOPT_X86_64_) || defined(__i386__))
enum { can_disturb = 1 };
static void disturb(int on) {
    const uint32_t sse = on ? 0x1F80u | (uint32_t)direction << 13 | (flush ? 0x8040u : 0u) : 0x1F80u;
    const uint16_t x87 = (uint16_t)(on ? 0x037Fu | (uint32_t)direction << 10 : 0x037Fu);
    if (direction == TO_NEAREST && !flush) return;
#ifdef KOPT_X86_64_
    __asm__ __volatile__(".byte 0x0F, 0xAE, 0x10" : : "a"(&sse) : "memory"); /* ldmxcsr (%rax): tcc does not know it */
#else
    if (kopt_isa_usable(KOPT_ISA_SSE2)) __asm__ __volatile__(".byte 0x0F, 0xAE, 0x10" : : "a"(&sse) : "memory");
#endif
    __asm__ __volatile__("fldcw %0" : : "m"(x87));
}
#elif defined(__GNUC__) && !defined(__TINYC__) && (defined(KOPT_AARCH64_) || (defined(__arm__) && defined(__ARM_FP)))
enum { can_disturb = 1 };
static void disturb(int on) { /* flushing: also fp16, and NaNs become the default one */
    const uint32_t code = direction == UP ? 1 : direction == DOWN ? 2 : direction == ZERO ? 3 : 0;
    const uint32_t word = on ? code << 22 | (flush ? 0x03080000u : 0u) : 0;
    if (direction == TO_NEAREST && !flush) return;
#ifdef KOPT_AARCH64_
    __asm__ __volatile__("msr fpcr, %0" : : "r"((uint64_t)word));
#else
    __asm__ __volatile__("vmsr fpscr, %0" : : "r"(word));
#endif
}
#elif defined(__GNUC__) && !defined(__TINYC__) &&                                                                    \
    (defined(__riscv_flen) || defined(__s390x__) || defined(__mips_hard_float) || defined(__loongarch_hard_float) || \
     (defined(__powerpc__) && !defined(_SOFT_FLOAT)))
enum { can_disturb = 1 };
static void disturb(int on) {
    const uint32_t code = !on || direction == TO_NEAREST ? 0 : direction == ZERO ? 1 : direction == UP ? 2 : 3;
    if (direction == TO_NEAREST && !flush) return;
#if defined(__riscv_flen)             /* never flushes; down is 2, up 3 */
    __asm__ __volatile__("fsrm %0" : : "r"(code > 1 ? 5 - code : code));
#elif defined(__s390x__)              /* never flushes */
    __asm__ __volatile__("sfpc %0" : : "d"(code));
#elif defined(__loongarch_hard_float) /* never flushes */
    __asm__ __volatile__("movgr2fcsr $fcsr0, %0" : : "r"(code << 8));
#elif defined(__mips_hard_float)
    __asm__ __volatile__("ctc1 %0, $31" : : "r"(code | (on && flush ? 0x01000000u : 0u)));
#else
    if (on && flush)
        __asm__ __volatile__("mtfsfi 7, 5"); /* zero is the only direction that comes with flushing */
    else if (code == 0)
        __asm__ __volatile__("mtfsfi 7, 0");
    else if (code == 1)
        __asm__ __volatile__("mtfsfi 7, 1");
    else if (code == 2)
        __asm__ __volatile__("mtfsfi 7, 2");
    else
        __asm__ __volatile__("mtfsfi 7, 3");
#endif
}
#elif defined(_MSC_VER) && ((defined(_M_X64) && !defined(_M_ARM64EC)) || (defined(_M_IX86_FP) && _M_IX86_FP == 2))
#include <intrin.h>
enum { can_disturb = 1 };
static void disturb(int on) {
    if (direction == TO_NEAREST && !flush) return;
    _mm_setcsr(on ? 0x1F80u | (uint32_t)direction << 13 | (flush ? 0x8040u : 0u) : 0x1F80u);
}
#else
enum { can_disturb = 0 };
static void disturb(int on) { (void)on; }
#endif

/* ---- One-element updates. They run in the caller's floating-point environment, so that the inputs here are such that
        flushing does not matter: what is tiny in between becomes zero in the end. ---------------------------------- */

/* Does a product as argument count as the rounded number that it is, in each function of one value? A compiler that may
   fuse (FMA) would add it unrounded. Here the first addition cancels most of the product, so that this would show. The
   factors are volatile: each call has a product of its own, which no other use keeps from being fused. */
static int products_are_rounded(void) {
    volatile float x, y, memory;
    int i, bad = 0;
    for (i = 0; i < 64; i++) {
        const uint32_t r = draw();
        kopt_bf16 w[2] = {0, 0}, c[2];
        kopt_fp16 v[2] = {0, 0}, d[2];
        float product;
        x = float_of((draw() & 0x807FFFFFu) | 0x3F000000u);
        y = float_of((draw() & 0x807FFFFFu) | 0x3F000000u);
        memory = x * y;
        product = memory;
        c[0] = c[1] = (kopt_bf16)(kopt_bf16_from_f32(product) ^ 0x8000u);
        d[0] = d[1] = (kopt_fp16)(kopt_fp16_from_f32(product * 2048) ^ 0x8000u);
        kopt_kahan_add_bf16(&w[0], &c[0], product, r);
        kopt_kahan_add_bf16(&w[1], &c[1], x * y, r);
        kopt_kahan_add_fp16(&v[0], &d[0], product, r);
        kopt_kahan_add_fp16(&v[1], &d[1], x * y, r);
        bad += w[0] != w[1] || c[0] != c[1] || v[0] != v[1] || d[0] != d[1];
        bad += kopt_bf16_from_f32(product) != kopt_bf16_from_f32(x * y);
        bad += kopt_fp16_from_f32(product) != kopt_fp16_from_f32(x * y);
        bad += kopt_bf16_from_f32_stochastic(product, r) != kopt_bf16_from_f32_stochastic(x * y, r);
        bad += kopt_fp16_from_f32_stochastic(product, r) != kopt_fp16_from_f32_stochastic(x * y, r);
    }
    return bad == 0;
}

static void probe_kahan_add(void) {
    int i, k;
    disturb(0);
    begin_group("kahan-add", "");
    for (i = 0; i < 96; i++) {
        const uint32_t start = draw(), size = draw() % 20u;
        const int huge = i % 16 == 7, zero = i % 16 == 8, tiny = i % 16 > 11; /* tiny: 2^-115, updates 2^-118 */
        kopt_bf16 w = (kopt_bf16)((start & 0x807Fu) | (huge ? 0x7F00u : tiny ? 0x0600u : 0x3E80u)), c = 0;
        kopt_fp16 v = (kopt_fp16)((start & 0x83FFu) | (huge ? 0x7800u : zero ? 0 : 0x3400u)), d = 0;
        if (zero) w = 0;
        for (k = 0; k < 12; k++) {
            const uint32_t a = draw(), r = draw();
            uint32_t delta = (a & 0x80000000u) | (104u + size + (a >> 24 & 3u)) << 23 | (a & 0x7FFFFFu);
            if (tiny) delta = (delta & 0x807FFFFFu) | 0x04800000u;
            if (huge) delta = (delta & 0xFF800000u) + 0x3F800000u + ((a & 1u) << 22);
            if (i == 95 && k == 6) delta = 0x7F800000u;
            if (i == 94 && k == 6) delta = 0xFFC12345u;
            if ((a & 31u) == 0) delta = 0;
            kopt_kahan_add_bf16(&w, &c, float_of(delta), k & 1 ? r : 0x8000u);
            kopt_kahan_add_fp16(&v, &d, float_of(delta), k & 1 ? r : 0x8000u);
            hash_number(w, 2), hash_number(c, 2), hash_number(v, 2), hash_number(d, 2);
        }
    }
    if (!products_are_rounded()) hash = 0;
    end_group();
    disturb(1);
}

/* ---- Steps ------------------------------------------------------------------------------------------------------- */

typedef struct world {
    kopt_optimizer opt;
    kopt_tensor t;
    kopt_counts counts;
    byte *weight, *grad, *block, *copy;
    int tiny, huge;
} world;

static world w;
static kopt_norm norm;

static void clear(kopt_norm *sum) {
    volatile uint64_t *digit = sum->digit; /* or the loop becomes a call of memset */
    int i;
    for (i = 0; i < 20; i++) digit[i] = 0;
    sum->nonfinite = 0;
}

static void set_optimizer(const rule_row *rule, const store_row *store, const moment_row *moment) {
    const kopt_optimizer made = kopt_sgd(0, 0); /* not assigned as a whole: that may call memcpy */
    kopt_optimizer *o = &w.opt;
    o->made_ = made.made_;
    o->rule = rule->rule;
    w.t.weight_format = store->format;
    o->rounding = store->rounding;
    o->residual_rounding = store->compensation;
    o->first_moment_format = o->second_moment_format = moment->format;
    o->moment_rounding = moment->rounding;
    o->decay_mode = rule->decay;
    o->nesterov = rule->nesterov;
    o->amsgrad = rule->amsgrad;
    o->stable = rule->stable;
    o->lookahead = 3;
    o->lookahead_rate = 0.625;
    o->lr = rule->rule == KOPT_RULE_EMA ? 13.0 / 16 : rule->lr; /* not read */
    o->max_lr = 1.0 / 256;
    o->weight_decay = rule->weight_decay;
    o->beta1 = rule->rule == KOPT_RULE_EMA ? 1 - rule->lr : 13.0 / 16;
    o->beta2 = 1021.0 / 1024;
    o->beta3 = 253.0 / 256;
    o->eps = 5.0 / 536870912; /* 2^29 */
    o->momentum = rule->momentum;
    o->dampening = rule->dampening;
    o->step = rule->before;
    o->maximize = o->zero_grad = o->moments_only = 0;
    o->grad_scale = o->clip = 1;
    o->seed = 0;
}

/* The rules that divide by the root of a mean of squares. */
static int divides(void) {
    return w.opt.rule != KOPT_RULE_SGD && w.opt.rule != KOPT_RULE_LION && w.opt.rule != KOPT_RULE_EMA;
}

/* Weights and updates in the middle of a format, at its smallest numbers, or at its largest if the rule gets there. */
enum { ORDINARY, TINY, HUGE_, ANY };

static int reaches_huge(void) { return w.opt.rule == KOPT_RULE_SGD || w.opt.rule == KOPT_RULE_EMA; }

/* The options that no table has, drawn. */
static void draw_options(int size) {
    const uint32_t f = draw(), a = draw(), b = draw(), id = draw(), high = draw() & 0x7FFFFFFFu, low = draw();
    w.opt.maximize = (int)(f >> 8 & 1u);
    w.opt.zero_grad = (int)(f >> 9 & 1u);
    w.opt.grad_scale = f >> 10 & 1u ? 0.125 : 1;
    w.opt.clip = f >> 11 & 1u ? 0.75 : 1;
    w.opt.seed = wide(a, b);
    w.t.id = id;
    w.t.first_index = f >> 12 & 1u ? wide(high, low) : low & 0xFFFu;
    w.t.copy = (f >> 13 & 3u) == 3 ? NULL : w.copy;
    w.t.copy_format = formats[(f >> 13 & 3u) % 3u];
    if (size == ANY) size = (f >> 16 & 3u) == 0 ? TINY : (f >> 16 & 3u) == 1 ? HUGE_ : ORDINARY;
    w.tiny = size == TINY;
    w.huge = size == HUGE_ && reaches_huge();
    if (w.tiny && divides() && w.t.weight_format != KOPT_FP16) w.opt.grad_scale = 1.0 / 1048576;
    if ((f >> 18 & 3u) == 0) w.t.rate_scale = w.opt.stable ? 0.5 : 0.75;
    if (w.tiny && w.opt.rule == KOPT_RULE_LION) /* 2^-14, 2^-118 */
        w.t.rate_scale = 1 / (w.t.weight_format == KOPT_FP16 ? 16384.0 : 332306998946228968225951765070086144.0);
    w.opt.moments_only = (f >> 20 & 7u) == 0;
    w.counts.wanted = w.counts.still = w.counts.stuck = 0;
    if ((f >> 23 & 3u) == 0) w.t.counts = &w.counts;
    if (w.opt.rule == KOPT_RULE_EMA) w.opt.maximize = w.opt.zero_grad = w.opt.moments_only = 0;
}

static void fill_weights(byte *array, kopt_format format, int n) {
    const int fp16 = w.t.weight_format == KOPT_FP16;
    if (w.tiny)
        fill(array, format, n, fp16 ? 95 : 1, fp16 ? 24 : 6);
    else if (w.huge)
        fill(array, format, n, fp16 ? 140 : 252, 3);
    else
        fill(array, format, n, 118, 12);
}

static void fill_grad(int n) {
    const int fp16 = w.t.weight_format == KOPT_FP16;
    if (w.tiny)
        fill(w.grad, w.t.grad_format, n, !fp16 ? 4 : divides() ? 82 : 100, fp16 ? 24 : 8);
    else if (w.huge)
        fill(w.grad, w.t.grad_format, n, fp16 ? 138 : 250, 4);
    else
        fill(w.grad, w.t.grad_format, n, 105, 24);
}

/* Four arrays in a row, each at any address. */
static void place(kopt_format grad_format, int n, uint32_t offsets) {
    const kopt_format format = w.t.weight_format;
    const int width = width_of(format);
    w.weight = (byte *)pool_words + (offsets & 3u);
    w.grad = w.weight + n * width + (offsets >> 2 & 3u);
    w.block = w.grad + n * width_of(grad_format) + (offsets >> 4 & 3u);
    w.t = kopt_tensor_of(w.weight, format, w.grad, grad_format, (size_t)n, w.block, 0);
    w.t.state_size = kopt_state_size(&w.opt, &w.t);
    w.copy = w.block + w.t.state_size;
}

/* One step: in one call (0), in three ranges (1), by begin and run (2). */
static void step(int how) {
    const int n = (int)w.t.n,
              q8 = w.opt.first_moment_format == KOPT_Q8; /* 8-bit moments are cut between blocks of 64 */
    const int first = q8 ? 0 : 3, cut = q8 ? n - n % 64 : n - 17;
    kopt_step s;
    hash_number((uint32_t)kopt_step_begin(&s, &w.opt), 1);
    if (how == 1) {
        if (w.opt.stable) { /* a range cannot measure the whole */
            clear(&norm);
            hash_number((uint32_t)kopt_norm_add_stable(&norm, &s, &w.t, (size_t)first, (size_t)n), 1);
            hash_number((uint32_t)kopt_norm_add_stable(&norm, &s, &w.t, 0, (size_t)first), 1);
            w.t.stable_scale = kopt_norm_stable_scale(&norm, (uint64_t)n);
        }
        hash_number((uint32_t)kopt_step_range(&s, &w.t, 1, (size_t)cut, (size_t)n), 1);
        hash_number((uint32_t)kopt_step_range(&s, &w.t, 1, 0, (size_t)first), 1);
        hash_number((uint32_t)kopt_step_range(&s, &w.t, 1, (size_t)first, (size_t)cut), 1);
        w.t.stable_scale = 0;
    } else if (how == 0) {
        w.opt.step--;
        hash_number((uint32_t)kopt_optimizer_step(&w.opt, &w.t, 1), 1);
    } else {
        hash_number((uint32_t)kopt_step_run(&s, &w.t, 1), 1);
    }
    hash_array(w.grad, width_of(w.t.grad_format), n);
    hash_array(w.weight, width_of(w.t.weight_format), n);
    if (w.t.copy != NULL && !w.opt.moments_only) hash_numbers(w.copy, w.t.copy_format, n);
    hash_number((uint32_t)w.counts.wanted, 4);
    hash_number((uint32_t)w.counts.still, 4);
    hash_number((uint32_t)w.counts.stuck, 4);
}

/* The tensor in its checkpoint: header, weights and arrays. */
enum { BEFORE = 176, AFTER = 4 }; /* bytes of the checkpoint */
static void hash_state(void) {
    const size_t size = kopt_save_size(&w.opt, &w.t, 1);
    hash_number((uint32_t)kopt_save(&w.opt, &w.t, 1, saved, sizeof saved), 1);
    hash_array(saved + BEFORE, 1, (int)size - BEFORE - AFTER);
    hash_number((uint32_t)kopt_load(&w.opt, &w.t, 1, saved, size), 1);
}

/* One rule with one store: all formats of moments, those of gradients in turn, three steps each. */
static void probe_steps(int rule, int store) {
    int m, i;
    begin_group(rules[rule].name, stores[store].name);
    for (m = 0; m < COUNT(moments); m++) {
        const kopt_format grad_format = formats[(rule + store + m) % 3];
        set_optimizer(&rules[rule], &stores[store], &moments[m]);
        place(grad_format, SMALL, draw() >> 8);
        draw_options(ANY);
        fill_weights((byte *)numbers, KOPT_F32, SMALL);
        hash_number((uint32_t)kopt_state_init(&w.opt, &w.t, 1, numbers), 1);
        for (i = 0; i < 3; i++) {
            fill_grad(SMALL);
            step(i);
        }
        hash_state();
    }
    end_group();
}

static byte *residual_of(void) { return w.block + 64; }

/* Any bits: for what a step reads, every word has a meaning. */
static byte *fill_bits(byte *array, int width, int n) {
    int i;
    for (i = 0; i < n; i++) set(array, width, i, draw());
    return array + (n * width + 15) / 16 * 16;
}

/* One rule with a third of the stores of fp32 and bf16, in the formats and at the places that the hot loops take: a
   whole block of 256 random numbers or a half, and parts around it. Ordinary values, extreme ones, and with 8-bit
   moments; but among extreme ones, special values are few: each makes a detour. */
static void probe_long(int rule) {
    int s, i, k;
    begin_group(rules[rule].name, "long");
    for (s = rule % 3; s < COUNT(stores); s += 3)
        for (k = 0; k < (s < 3 ? 3 : 2); k++) {
            const kopt_format format = stores[s].format;
            moment_row moment;
            if (format == KOPT_FP16) continue;
            rarity = k == 1 ? 15 : 255;
            moment.format = k == 2 ? KOPT_Q8 : format;
            moment.rounding = stores[s].compensation;
            set_optimizer(&rules[rule], &stores[s], &moment);
            place(format, LONG, draw() >> 8);
            draw_options(k != 1 ? ORDINARY : s % 2 == 0 && reaches_huge() ? HUGE_ : TINY);
            w.t.first_index =
                (w.t.first_index | (draw() >> 8 & 1u ? 2047u : 127u)) - 9u; /* a span, or a row, begins at 10 */
            w.t.copy = NULL;
            w.t.counts = NULL;
            w.opt.moments_only = 0;
            fill_weights(w.weight, format, LONG);
            hash_number((uint32_t)kopt_state_init(&w.opt, &w.t, 1, NULL), 1);
            if (stores[s].rounding == KOPT_COMPACT) fill_bits(residual_of(), 1, LONG);
            if (stores[s].rounding == KOPT_EXACT) fill_bits(residual_of(), 2, LONG);
            for (i = 1; i < 3; i++) {
                fill_grad(LONG);
                step(i);
            }
            hash_state();
        }
    end_group();
}

/* FEEDBACK by one rule: three steps of few elements, two of many, in which the rate rises and falls. */
static void probe_feedback(int rule) {
    static const store_row row[] = {{"feedback", KOPT_BF16, KOPT_FEEDBACK, KOPT_STOCHASTIC},
                                    {"feedback", KOPT_FP16, KOPT_FEEDBACK, KOPT_STOCHASTIC}};
    static const moment_row moment[] = {
        {KOPT_F32, KOPT_STOCHASTIC}, {KOPT_BF16, KOPT_STOCHASTIC}, {KOPT_Q8, KOPT_STOCHASTIC}};
    const uint32_t before = all;
    int s, m, i;
    begin_group(rules[rule].name, row[0].name);
    for (s = 0; s < 4; s++)
        for (m = 0; m < COUNT(moment); m++) {
            const int n = s < 2 ? SMALL : LONG;
            rarity = s < 2 ? 15 : 255;
            set_optimizer(&rules[rule], &row[s % 2], &moment[m]);
            place(formats[(rule + s + m) % 3], n, draw() >> 8);
            draw_options(s < 2 ? ANY : ORDINARY);
            fill_weights(w.weight, row[s % 2].format, n);
            hash_number((uint32_t)kopt_state_init(&w.opt, &w.t, 1, NULL), 1);
            for (i = s / 2; i < 3; i++) {
                w.opt.lr = rules[rule].lr * (i == 1 ? 1 : i == 2 ? 3 : 2);
                fill_grad(n);
                step(i);
            }
            hash_state();
        }
    end_group();
    all = before;
}

static void hash_double(double x) {
    const uint32_t low = get((const byte *)&x, 4, 0), high = get((const byte *)&x, 4, 1);
    hash_number(*(const byte *)&one ? low : high, 4);
    hash_number(*(const byte *)&one ? high : low, 4);
}

/* Hashes a double above 0 that is a float, as that float. A conversion would flush what is subnormal as a float, in a
   program that was linked with -Ofast. */
static void hash_double_as_float(double x) {
    const int first = *(const byte *)&one;
    uint32_t low = get((const byte *)&x, 4, 0), high = low, shift;
    if (sizeof x > 4) {
        high = get((const byte *)&x, 4, first), low = get((const byte *)&x, 4, !first);
        shift = high >> 20 < 897 ? 897 - (high >> 20) : 0; /* 897: the exponent of the smallest normal float */
        high = high >> 20 < 874 ? 0
                                : ((high & 0xFFFFFu) << 3 | low >> 29 | (shift ? 0x800000u : 0)) >> shift |
                                      (shift ? 0 : ((high >> 20) - 896) << 23);
    }
    hash_number(high, 4);
}

/* The exact norm of gradients and what is made of it. Sums of arrays, merged; values clipped. */
static void hash_norm(void) {
    const double scales[] = {kopt_norm_stable_scale(&norm, 1), kopt_norm_stable_scale(&norm, 276),
                             kopt_norm_stable_scale(&norm, wide(1000, 1))};
    int i;
    for (i = 0; i < 20; i++) hash_number((uint32_t)norm.digit[i], 4), hash_number((uint32_t)(norm.digit[i] >> 32), 4);
    hash_number((uint32_t)norm.nonfinite, 4);
    for (i = 0; i < 3; i++) hash_double_as_float(scales[i]);
}

/* With `how` 1 the doubles that only a program with 64-bit doubles sees. */
static void add_norms(int how) {
    byte *array = (byte *)pool_words + 1;
    int f, k, n;
    for (f = 0; f < 3; f++)
        for (k = 0; k < 16; k++) {
            static kopt_norm other;
            n = k < 12 ? 3 * k : LONG;
            rarity = k & 1 ? 15 : 0xFFFFFFu; /* hardly any */
            fill(array, formats[f], n, k & 2 ? 0 : 100, k & 2 ? 255 : 30);
            clear(&other);
            hash_number((uint32_t)kopt_norm_add(&other, array, formats[f], (size_t)n), 1);
            if (k % 5 == 0) clear(&norm);
            hash_number((uint32_t)kopt_norm_merge(&norm, &other), 1);
            if (how == 0) {
                hash_norm();
                hash_number((uint32_t)kopt_clip_value(array, formats[f], (size_t)n, k & 4 ? 1.001953125 : 1000), 1);
                hash_numbers(array, formats[f], n);
            } else {
                hash_double(kopt_norm_value(&norm));
                hash_double(norm.nonfinite != 0 ? 0 : kopt_norm_clip(&norm, 1.25, k & 4 ? -0.125 : 1)); /* else NaN */
            }
        }
}

static void probe_norm(void) {
    begin_group("norm", "");
    clear(&norm);
    add_norms(0);
    end_group();
}

/* Compressed gradients, and what is made of them: each code with each rounding, formats and residuals in turn, two
   steps, of ordinary gradients and of any numbers; 276 are a block and a part of one. */
static void probe_compress(int c) {
    static const char *const names[] = {"bf16", "fp16", "q8", "sign"};
    const kopt_format code = c < 2 ? formats[c + 1] : c == 2 ? KOPT_Q8 : KOPT_Q1;
    int how, k, i, step;
    begin_group("compress", names[c]);
    for (how = 0; how < 2; how++)
        for (k = 0; k < 9; k++) {
            const kopt_format f = formats[k % 3], g = formats[(k / 3 + how) % 3];
            const int n = k == 4 ? LONG : 9 + k, feedback = !(code == KOPT_Q1 && how == 1) && k != 8;
            const uint32_t high = draw() & 0x7FFFFFFFu, low = draw();
            byte *const grad = (byte *)pool_words + k % 4, *const sum = grad + n * width_of(f) + 1;
            byte *const residual = sum + n * width_of(g) + 1, *const out = residual + n * width_of(g);
            const size_t size = kopt_format_size(code, (size_t)n);
            kopt_compressor x = kopt_compressor_of(code, feedback ? residual : NULL, (size_t)n);
            x.rounding = how == 1 ? KOPT_STOCHASTIC : KOPT_NEAREST;
            x.residual_format = g;
            x.residual_rounding = k & 1 ? KOPT_NEAREST : KOPT_STOCHASTIC;
            x.seed = wide(low, high);
            x.id = low;
            x.first_index = c < 2 ? wide(high, low) : wide(k & 1 ? high : 0, low & 0xFFFFFF00u);
            rarity = k & 1 ? 0xFFFFFFu : 31;
            fill(sum, g, n, 100, 30);
            for (step = 0; step < 2; step++) {
                fill(grad, f, n, k % 5 == 2 ? 0 : 110, k % 5 == 2 ? 255 : 12);
                hash_number((uint32_t)kopt_compress(&x, out, size, grad, f), 1);
                hash_number((uint32_t)size, 4);
                if (c < 2)
                    hash_array(out, 2, n);
                else
                    hash_array(out, 1, (int)size);
                if (feedback) hash_array(residual, width_of(g), n);
                hash_number((uint32_t)kopt_decompress_add(sum, g, out, size, code, (size_t)n, k & 2 ? 1 : -0.375), 1);
                hash_array(sum, width_of(g), n);
            }
            for (i = 0; i < (c < 2 ? n : (int)size); i++) set(out, c < 2 ? 2 : 1, i, draw()); /* all have a meaning */
            hash_number((uint32_t)kopt_decompress_add(sum, g, out, size, code, (size_t)n, 1), 1);
            hash_array(sum, width_of(g), n);
        }
    end_group();
}

static void probe_reduce(void) {
    int f, g, k;
    begin_group("reduce", "");
    for (f = 0; f < 3; f++)
        for (g = 0; g < 3; g++)
            for (k = 0; k < 6; k++) {
                const int n = k == 5 ? 61 : 4 * k + 1, count = 1 + (k + f) % 5;
                byte *at = (byte *)pool_words + k % 4, *out;
                const void *shards[5];
                int i;
                rarity = k & 1 ? 31 : 7;
                for (i = 0; i < count; i++, at += n * width_of(formats[f])) {
                    fill(at, formats[f], n, k & 2 ? 0 : 110, k & 2 ? 255 : 20);
                    shards[i] = at;
                }
                out = f == g && k & 1 ? (byte *)pool_words + k % 4 : at; /* in place */
                hash_number((uint32_t)kopt_reduce(out, formats[g], shards, (size_t)count, formats[f], (size_t)n,
                                                  k & 1 ? 1 : 0.28125),
                            1);
                hash_array(out, width_of(formats[g]), n);
                if (f == 0) continue;
                i = n;
                fill(at, formats[f], n, 110, 20);
                shards[0] = (byte *)pool_words + k % 4, shards[1] = at;
                kopt_reduce((byte *)pool_words + k % 4, formats[f], shards, 2, formats[f], (size_t)i, 1);
                hash_array((byte *)pool_words + k % 4, width_of(formats[f]), n);
            }
    end_group();
}

/* Inputs of kopt_state_init and kopt_state_write. NaNs are quiet: an x87 makes them so on the way through a float. */
static void fill_numbers(int around_one) {
    byte *array = (byte *)numbers;
    int i;
    for (i = 0; i < SMALL; i++) {
        const uint32_t x = around_one ? value(90, 60) : value(0, 255);
        set(array, 4, i, (x & 0x7FFFFFFFu) > 0x7F800000u ? x | 0x00400000u : x);
    }
}

/* Every array that can be read; the number of moments. Reading computes, so a NaN has no sign here. */
static int hash_streams(void) {
    byte *array = (byte *)numbers;
    int i, k, found = 0;
    for (k = 0; k < 5; k++) {
        const kopt_result result = kopt_state_read(&w.opt, &w.t, (kopt_slot)k, numbers);
        hash_number((uint32_t)result, 1);
        if (result != KOPT_OK) continue; /* KOPT_ERROR_OPTION */
        for (i = 0; i < SMALL; i++) {
            const uint32_t x = without_payload(KOPT_F32, get(array, 4, i));
            hash_number(x == 0xFFFFFFFFu ? 0x7FFFFFFFu : x, 4);
        }
        found = k;
    }
    return found;
}

/* State blocks: what is written, read, saved, damaged. Every store, every moment, the rules in turn. */
static void probe_state(void) {
    int s, m, k, found;
    begin_group("state", "");
    for (s = 0; s < COUNT(stores); s++)
        for (m = 0; m < COUNT(moments); m++) {
            const uint32_t place_of_damage = draw() >> 8;
            const rule_row *rule = &rules[(s * COUNT(moments) + m) % COUNT(rules)];
            const kopt_rounding rounding = stores[s].format == KOPT_F32 ? KOPT_NEAREST : stores[s].rounding;
            const int kept = rounding < KOPT_KAHAN ? 0 : rounding == KOPT_COMPACT ? 1 : 2;
            size_t size;
            byte *array;
            set_optimizer(rule, &stores[s], &moments[m]);
            place(KOPT_F32, SMALL, draw() >> 8);
            draw_options(ANY);
            fill_numbers(m & 1);
            hash_number((uint32_t)kopt_state_init(&w.opt, &w.t, 1, numbers), 1);
            hash_array(w.weight, width_of(stores[s].format), SMALL);
            hash_state();
            found = hash_streams();
            for (k = 0; k <= found; k++) {
                fill_numbers(~m & 1);
                hash_number((uint32_t)kopt_state_write(&w.opt, &w.t, (kopt_slot)k, numbers), 1);
            }
            hash_array(w.weight, width_of(stores[s].format), SMALL);
            hash_streams();
            w.opt.step = 0x01020304u;
            hash_state();

            array = fill_bits(residual_of(), kept, w.t.state_size == 0 ? 0 : SMALL);
            for (k = 0; k < found; k++) {
                array = fill_bits(array, width_of(moments[m].format), SMALL);
                if (moments[m].format == KOPT_Q8) array = fill_bits(array, 1, 1);
            }
            if (rule->rule == KOPT_RULE_RANGER)
                fill_bits(fill_bits(array, width_of(stores[s].format), SMALL), kept, SMALL);
            hash_streams();
            w.opt.step = rule->before;
            fill_grad(SMALL);
            step(2);
            hash_state();

            size = kopt_save_size(&w.opt, &w.t, 1);
            saved[BEFORE + place_of_damage % (uint32_t)(size - BEFORE)] ^= 16;
            hash_number(kopt_load(&w.opt, &w.t, 1, saved, size) != KOPT_OK, 1);
        }
    end_group();
}

/* The per-step scalars. */
static void hash_scalars(kopt_optimizer *o) {
    static const uint32_t steps[] = {1, 2, 3, 10, 100, 1000, 12345, 1000000, 0xFFFFFFFFu};
    static kopt_step step; /* zero where the build refuses the rule */
    step_scalars s;
    int i;
    for (i = 0; i < COUNT(steps); i++) {
        o->step = steps[i] - 1;
        hash_number((uint32_t)kopt_step_begin(&step, o), 1);
        s = scalars_of(&step);
        hash_number(s.step, 4);
        hash_float(s.grad_scale), hash_float(s.l2), hash_float(s.weight_decay), hash_float(s.rate);
        if (o->rule == KOPT_RULE_EMA) continue; /* and from here on what the rule reads */
        hash_float(s.beta1), hash_float(s.gain1);
        if (o->rule == KOPT_RULE_SGD || o->rule == KOPT_RULE_ADAN) hash_float(s.extrapolation);
        if (o->rule == KOPT_RULE_SGD) continue;
        if (o->rule == KOPT_RULE_ADAN)
            hash_float(s.beta3), hash_float(s.gain3); /* of the second moment first */
        else
            hash_float(s.beta2), hash_float(s.gain2);
        if (o->rule == KOPT_RULE_LION) continue;
        hash_number((uint32_t)s.unrectified, 1), hash_number((uint32_t)s.sync, 1);
        if (!s.unrectified) hash_float(s.root_scale);
        hash_float(s.eps);
        if (o->rule == KOPT_RULE_ADAN) hash_float(s.beta2), hash_float(s.gain2), hash_float(s.third_scale);
        if (o->rule == KOPT_RULE_RANGER) hash_float(s.slow_scale);
    }
}

static double fraction(void) { return (draw() >> 16) * (1.0 / 65536); }

static void probe_exact_scalars(void) { /* all of these are exact in binary32 */
    int i;
    begin_group("scalars-exact", "");
    for (i = 0; i < 32; i++) {
        w.opt = kopt_adamw(0);
        w.opt.rule = i & 1 ? KOPT_RULE_ADAN : i & 2 ? KOPT_RULE_RANGER : KOPT_RULE_ADAM;
        w.opt.decay_mode = i & 4 ? KOPT_DECAY_DECOUPLED : KOPT_DECAY_FULLY_DECOUPLED;
        w.opt.lr = fraction();
        w.opt.max_lr = fraction() + 1;
        w.opt.weight_decay = fraction();
        w.opt.beta1 = fraction();
        w.opt.beta2 = 1 - fraction() / 256;
        w.opt.beta3 = fraction();
        w.opt.eps = fraction() + 1;
        w.opt.grad_scale = fraction();
        w.opt.clip = fraction();
        hash_scalars(&w.opt);
    }
    end_group();
}

static void probe_scalars(void) { /* from ordinary decimal numbers */
    /* Quotients in initializers: -fsingle-precision-constant would round literals to binary32, and -frounding-math
       divides elsewhere when the program runs. */
    static const double ten_thousandth = 1 / (double)10000, thousandth = 1 / (double)1000, tenth = 1 / (double)10;
    static const double third = 1 / (double)3, three_1e4ths = 3 / (double)10000, seven_1e3ths = 7 / (double)1000;
    static const double seven_10ths = 7 / (double)10, nine_10ths = 9 / (double)10, nineteen_20ths = 19 / (double)20;
    static const double one_but_1e3th = 999 / (double)1000;
    const uint32_t before = all;
    begin_group("scalars", "");
    w.opt = kopt_sgd(tenth, nine_10ths);
    w.opt.weight_decay = ten_thousandth;
    w.opt.grad_scale = third;
    w.opt.clip = seven_10ths;
    w.opt.maximize = 1;
    hash_scalars(&w.opt);
    w.opt.dampening = tenth;
    w.opt.decay_mode = KOPT_DECAY_DECOUPLED;
    hash_scalars(&w.opt);
    w.opt = kopt_adam(thousandth);
    hash_scalars(&w.opt);
    w.opt = kopt_adamw(three_1e4ths);
    w.opt.beta2 = nineteen_20ths;
    hash_scalars(&w.opt);
    w.opt = kopt_adamw(thousandth);
    w.opt.decay_mode = KOPT_DECAY_FULLY_DECOUPLED;
    w.opt.max_lr = seven_1e3ths;
    hash_scalars(&w.opt);
    w.opt = kopt_lion(ten_thousandth);
    hash_scalars(&w.opt);
    w.opt = kopt_adan(thousandth);
    hash_scalars(&w.opt);
    w.opt = kopt_radam(thousandth);
    hash_scalars(&w.opt);
    w.opt = kopt_ranger(thousandth);
    hash_scalars(&w.opt);
    w.opt = kopt_ema(one_but_1e3th);
    hash_scalars(&w.opt);
    clear(&norm);
    add_norms(1);
    end_group();
    all = before;
}

void probe(void (*put)(const char *line)) {
    int r, s;
    put_line = put;
    all = 2166136261u;
#ifdef PROBE_ISA
    if (kopt_isa_force(PROBE_ISA) != KOPT_OK) say("the ISA is not usable"), end_line();
#endif
    disturb(1);
    probe_widen();
    probe_narrow();
    probe_convert(0);
    probe_convert(1);
    probe_finite();
    probe_random();
    probe_kahan_add();
    for (r = 0; r < COUNT(rules); r++)
        for (s = 0; s < COUNT(stores); s++) probe_steps(r, s);
    for (r = 0; r < COUNT(rules); r++) probe_long(r);
    probe_norm();
    probe_state();
    probe_exact_scalars();
    for (r = 0; r < 4; r++) probe_compress(r);
    probe_reduce();
    probe_scalars();
    for (r = 0; r < COUNT(rules); r++)
        if (pays(&rules[r])) probe_feedback(r);
    say("all");
    say_hash(all);
    disturb(0);
}

/* Has the library a name for it? The others are "unknown", the only name with a u in front. bare.c has no strcmp(). */
static inline int is_isa(int isa) { return kopt_isa_name((kopt_isa)isa)[0] != 'u'; }

#ifndef PROBE_NO_MAIN
#include <stdio.h>
#include <string.h>

static void put_text(const char *text) { fputs(text, stdout); }

int main(int count, char **arguments) {
    int i, isa;
    for (i = 1; i < count; i++) {
        if (strcmp(arguments[i], "isas") == 0) {
            for (isa = 0; is_isa(isa); isa++)
                if (kopt_isa_usable((kopt_isa)isa)) puts(kopt_isa_name((kopt_isa)isa));
            return 0;
        }
        if (strcmp(arguments[i], "up") == 0 && can_disturb) {
            direction = UP;
            continue;
        }
        if (strcmp(arguments[i], "down") == 0 && can_disturb) {
            direction = DOWN;
            continue;
        }
        if (strcmp(arguments[i], "zero") == 0 && can_disturb) {
            direction = ZERO;
            continue;
        }
        if (strcmp(arguments[i], "ftz") == 0 && can_disturb) {
            direction = ZERO, flush = 1;
            continue;
        }
        for (isa = 0; is_isa(isa); isa++)
            if (strcmp(arguments[i], kopt_isa_name((kopt_isa)isa)) == 0) break;
        if (!is_isa(isa) || kopt_isa_force((kopt_isa)isa) != KOPT_OK) {
            fprintf(stderr, "probe: %s is not usable here\n", arguments[i]);
            return 77;
        }
    }
    probe(put_text);
    return 0;
}
#endif
