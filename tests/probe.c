/* probe.c - does this build, on this machine, give the promised bits? Prints one line per group of cases, NAME HASH, and
   at the end `all HASH`; tests/golden.txt holds the lines that must come out, tests/probe.py computes them from
   docs/numerics.md alone.

       void probe(void (*put)(const char *line));          put receives each line, with its '\n'

   Needs no library and about 6 KB of memory. C99 or C++. Configuration (define before):
       PROBE_NO_MAIN    there is no main(): something else calls probe(), e.g. the start-up code of a microcontroller
       PROBE_ISA        a kopt_isa that is forced instead of the best one, e.g. KOPT_ISA_SCALAR
       KAHAN_OPT_*      as usual
   Arguments of main(), in any order:
       scalar | sse2 | avx2 | ...   forces that ISA; exit status 3 if it is not usable here
       ftz                          as if a game had changed the floating-point environment: subnormals flushed to zero
                                    on input and output, rounding toward zero
       isas                         prints the names of the usable ISAs and does nothing else

   Where `double` has 32 bits (AVR), the line of the group `scalars` is `scalars skipped`, and the one per-step scalar
   that needs binary64, root_scale, comes from a table. `all` covers every line but `scalars`, so it is the same there. */
#define KAHAN_OPT_IMPLEMENTATION
#include "../kahan_opt.h"

#ifdef __cplusplus
extern "C" void probe(void (*put)(const char *line));
#else
void probe(void (*put)(const char *line));
#endif

/* ---- The cases: one line for a rule or for a store adds all its combinations ------------------------------------- */

typedef struct rule_row {
    const char *name;
    kopt_rule rule;
    kopt_decay decay;
    int nesterov;
    double lr, weight_decay, momentum, dampening;
} rule_row;

/* These, and all numbers of the steps below, are exact in binary32, and their products too. */

static const rule_row rules[] = {
    {"sgd",      KOPT_SGD,  KOPT_L2,              0, 3.0 / 256,  5.0 / 512, 0,         0},
    {"momentum", KOPT_SGD,  KOPT_L2,              0, 3.0 / 256,  0,         13.0 / 16, 0.25},
    {"nesterov", KOPT_SGD,  KOPT_DECOUPLED,       1, 3.0 / 256,  5.0 / 512, 13.0 / 16, 0},
    {"adam",     KOPT_ADAM, KOPT_L2,              0, 3.0 / 4096, 5.0 / 512, 0,         0},
    {"adamw",    KOPT_ADAM, KOPT_DECOUPLED,       0, 3.0 / 4096, 5.0 / 512, 0,         0},
    {"fully",    KOPT_ADAM, KOPT_FULLY_DECOUPLED, 0, 3.0 / 4096, 5.0 / 512, 0,         0}
};

typedef struct store_row {
    const char *name;
    kopt_format format;
    kopt_rounding rounding, compensation;
} store_row;

static const store_row stores[] = {
    {"f32",                  KOPT_F32,  KOPT_NEAREST,    KOPT_STOCHASTIC},
    {"bf16-nearest",         KOPT_BF16, KOPT_NEAREST,    KOPT_STOCHASTIC},
    {"bf16-stochastic",      KOPT_BF16, KOPT_STOCHASTIC, KOPT_STOCHASTIC},
    {"bf16-kahan",           KOPT_BF16, KOPT_KAHAN,      KOPT_STOCHASTIC},
    {"bf16-kahan-nearest",   KOPT_BF16, KOPT_KAHAN,      KOPT_NEAREST},
    {"bf16-compact",         KOPT_BF16, KOPT_COMPACT,    KOPT_STOCHASTIC},
    {"bf16-compact-nearest", KOPT_BF16, KOPT_COMPACT,    KOPT_NEAREST},
    {"bf16-exact",           KOPT_BF16, KOPT_EXACT,      KOPT_STOCHASTIC},
    {"fp16-nearest",         KOPT_FP16, KOPT_NEAREST,    KOPT_STOCHASTIC},
    {"fp16-stochastic",      KOPT_FP16, KOPT_STOCHASTIC, KOPT_STOCHASTIC},
    {"fp16-kahan",           KOPT_FP16, KOPT_KAHAN,      KOPT_STOCHASTIC},
    {"fp16-kahan-nearest",   KOPT_FP16, KOPT_KAHAN,      KOPT_NEAREST},
    {"fp16-compact",         KOPT_FP16, KOPT_COMPACT,    KOPT_STOCHASTIC},
    {"fp16-compact-nearest", KOPT_FP16, KOPT_COMPACT,    KOPT_NEAREST},
    {"fp16-exact",           KOPT_FP16, KOPT_EXACT,      KOPT_STOCHASTIC}
};

typedef struct moment_row {
    kopt_format format;
    kopt_rounding rounding;
} moment_row;

static const moment_row moments[] = {
    {KOPT_F32, KOPT_STOCHASTIC},
    {KOPT_BF16, KOPT_STOCHASTIC}, {KOPT_BF16, KOPT_NEAREST},
    {KOPT_FP16, KOPT_STOCHASTIC}, {KOPT_FP16, KOPT_NEAREST}
};

static const kopt_format formats[] = {KOPT_F32, KOPT_BF16, KOPT_FP16};

#define COUNT(array) ((int)(sizeof(array) / sizeof((array)[0])))

enum {
    SMALL = 37, /* elements: whole vectors and parts of them */
    LONG = 276, /* a whole block of random bits and two parts */
    POOL = 4600 /* bytes: LONG elements in fp32 */
};

/* 1 / sqrt(1 - beta2^t) as binary32, beta2 = 1021 / 1024, for t = 1, 2, 3; tests/probe.py checks the group `scalars`. */
static const uint32_t root_scales[] = {0x4193CD3Au, 0x41512D28u, 0x412AEABFu};

/* ---- Lines and hashes: FNV-1a, 32 bits, over the bytes of little-endian numbers ----------------------------------- */

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

/* ---- Inputs: xorshift32 (Marsaglia 2003: 13, 17, 5), started anew for each group --------------------------------- */

static uint32_t state, rarity; /* 1 value in rarity + 1 is special */

static uint32_t draw(void) {
    state ^= state << 13;
    state ^= state >> 17;
    state ^= state << 5;
    return state;
}

static void begin_group(void) {
    hash = 2166136261u;
    state = 0x2545F491u;
    rarity = 15;
}

static void end_group(const char *name, const char *more) {
    const uint32_t result = hash;
    say(name);
    say(more);
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
    0x33800000u, 0x33000000u, 0x33000001u, 0x33C00000u, 0x2B800000u, 0x2B000000u, 0x2B000001u, 0x3F801000u
};

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
static float numbers[SMALL];
static const uint16_t one = 1;

static int width_of(kopt_format format) { return format == KOPT_F32 ? 4 : 2; }

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

/* ---- Conversions, random bits ------------------------------------------------------------------------------------- */

static void probe_widen(void) { /* all 65,536 of both formats, one by one and in bulk */
    byte *from = (byte *)pool_words, *to = from + 515;
    uint32_t word;
    int i, f;
    begin_group();
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
    end_group("widen", "");
}

static void probe_narrow(void) { /* one by one */
    int i;
    begin_group();
    for (i = 0; i < 4096; i++) {
        const float x = float_of(value(0, i & 1 ? 255 : 150));
        const uint32_t bits = draw(), r = bits >> 30 == 0 ? bits | 0xFFFFu : bits;
        hash_number(without_payload(KOPT_BF16, kopt_bf16_from_f32(x)), 2);
        hash_number(without_payload(KOPT_FP16, kopt_fp16_from_f32(x)), 2);
        hash_number(kopt_bf16_from_f32_stochastic(x, r), 2);
        hash_number(kopt_fp16_from_f32_stochastic(x, r), 2);
    }
    end_group("narrow", "");
}

static void probe_convert(int stochastic) { /* every format to every other, odd lengths and addresses */
    byte *from = (byte *)pool_words;
    int f, g, k;
    begin_group();
    rarity = 3;
    for (f = 0; f < 3; f++)
        for (g = 0; g < 3; g++)
            for (k = 0; k < 24; k++) {
                const int n = k < 20 ? k + 1 : 276;
                byte *to = from + n * width_of(formats[f]) + k % 4;
                fill(from, formats[f], n, k & 1 ? 0 : 90, k & 1 ? 255 : 60);
                if (stochastic) {
                    const uint32_t high = draw() & 0x7FFFFFFFu, low = draw(), step = draw(), id = draw();
                    kopt_convert_stochastic(to, formats[g], from, formats[f], (size_t)n, wide(step, high), step, id,
                                            wide(k & 2 ? high : 0, low));
                } else {
                    kopt_convert(to, formats[g], from, formats[f], (size_t)n);
                }
                hash_numbers(to, formats[g], n);
            }
    end_group(stochastic ? "convert-stochastic" : "convert", "");
}

static void probe_finite(void) { /* nothing, or one infinity or NaN, or a subnormal at every place */
    byte *array = (byte *)pool_words;
    int f, i, n;
    begin_group();
    for (f = 0; f < 3; f++)
        for (n = 0; n < SMALL; n += 3) {
            for (i = 0; i < n; i++) set(array, width_of(formats[f]), i, draw() & 0x0F0F0F0Fu);
            hash_number((uint32_t)kopt_all_finite(array, formats[f], (size_t)n), 1);
            for (i = 0; i < n; i++) {
                const uint32_t old = get(array, width_of(formats[f]), i);
                set(array, width_of(formats[f]), i, value_of(formats[f], 250, 6));
                hash_number((uint32_t)kopt_all_finite(array, formats[f], (size_t)n), 1);
                set(array, width_of(formats[f]), i, old);
            }
        }
    end_group("finite", "");
}

static void probe_random(void) {
    int i;
    uint32_t k;
    begin_group();
    for (i = 0; i < 32; i++) {
        const uint32_t a = draw(), b = draw(), step = draw(), id = draw(), high = draw() & 0x7FFFFFFFu, low = draw();
        for (k = 0; k < 40; k++)
            hash_number(kopt_random(wide(a, b), step, id, (uint32_t)i & 15u, wide(i & 1 ? high : 0, low) + k), 2);
        for (k = 0; k < 256; k++)
            hash_number(kopt_random(0, (uint32_t)i, 0, 0, wide((uint32_t)i >> 4, 0xFFFFFF00u + k)), 2);
    }
    end_group("random", "");
}

/* ---- One-element updates. They run in the caller's floating-point environment, so that the inputs here are such that
        flushing does not matter: what is tiny in between becomes zero in the end. -------------------------------------- */

static void (*environment)(int disturbed); /* set by main() for the argument ftz */

static void probe_kahan_add(void) {
    int i, k;
    if (environment != NULL) environment(0);
    begin_group();
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
    end_group("kahan-add", "");
    if (environment != NULL) environment(1);
}

/* ---- Steps -------------------------------------------------------------------------------------------------------- */

typedef struct world {
    kopt_optimizer opt;
    kopt_tensor t;
    byte *weight, *grad, *block, *copy;
    int tiny, huge;
} world;

static world w;

static void set_optimizer(const rule_row *rule, const store_row *store, const moment_row *moment) {
    kopt_optimizer *o = &w.opt;
    o->rule = rule->rule;
    o->weight_format = store->format;
    o->rounding = store->rounding;
    o->compensation_rounding = store->compensation;
    o->moment_format = moment->format;
    o->moment_rounding = moment->rounding;
    o->decay = rule->decay;
    o->nesterov = rule->nesterov;
    o->lr = rule->lr;
    o->max_lr = 1.0 / 256;
    o->weight_decay = rule->weight_decay;
    o->beta1 = 13.0 / 16;
    o->beta2 = 1021.0 / 1024;
    o->eps = 5.0 / 536870912; /* 2^29 */
    o->momentum = rule->momentum;
    o->dampening = rule->dampening;
    o->step = 0;
}

/* The options that no table has, drawn. Two cases in four are at the ends of a format: weights and updates at the
   smallest numbers, or at the largest, where SGD can reach them. */
static void draw_options(void) {
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
    w.tiny = (f >> 16 & 3u) == 0;
    w.huge = (f >> 16 & 3u) == 1 && w.opt.rule == KOPT_SGD;
    if (w.tiny && w.opt.rule == KOPT_ADAM && w.opt.weight_format != KOPT_FP16) w.opt.grad_scale = 1.0 / 1048576;
}

static void fill_weights(byte *array, kopt_format format, int n) {
    const int fp16 = w.opt.weight_format == KOPT_FP16;
    if (w.tiny)
        fill(array, format, n, fp16 ? 95 : 1, fp16 ? 24 : 6);
    else if (w.huge)
        fill(array, format, n, fp16 ? 138 : 249, fp16 ? 5 : 6);
    else
        fill(array, format, n, 118, 12);
}

static void fill_grad(int n) {
    const int fp16 = w.opt.weight_format == KOPT_FP16, adam = w.opt.rule == KOPT_ADAM;
    if (w.tiny)
        fill(w.grad, w.t.grad_format, n, !fp16 ? 4 : adam ? 82 : 100, fp16 ? 24 : 8);
    else if (w.huge)
        fill(w.grad, w.t.grad_format, n, fp16 ? 138 : 248, 6);
    else
        fill(w.grad, w.t.grad_format, n, 105, 24);
}

/* Four arrays in a row, each at any address. */
static void place(kopt_format grad_format, int n, uint32_t offsets) {
    const int width = width_of(w.opt.weight_format);
    w.weight = (byte *)pool_words + (offsets & 3u);
    w.grad = w.weight + n * width + (offsets >> 2 & 3u);
    w.block = w.grad + n * width_of(grad_format) + (offsets >> 4 & 3u);
    w.copy = w.block + kopt_state_size(&w.opt, (size_t)n);
    w.t = kopt_tensor_of(w.weight, w.grad, grad_format, (size_t)n, w.block, kopt_state_size(&w.opt, (size_t)n));
}

/* One step: in one call (0), in three ranges (1), by begin and run (2). */
static void step(int how) {
    const int n = (int)w.t.n;
    kopt_step s;
    hash_number((uint32_t)kopt_step_begin(&w.opt, &s), 1);
    if (sizeof(double) != 8 && w.opt.rule == KOPT_ADAM) s.root_scale = float_of(root_scales[s.step - 1]);
    if (how == 1) {
        hash_number((uint32_t)kopt_step_range(&s, &w.t, (size_t)(n - 17), (size_t)n), 1);
        hash_number((uint32_t)kopt_step_range(&s, &w.t, 0, 3), 1);
        hash_number((uint32_t)kopt_step_range(&s, &w.t, 3, (size_t)(n - 17)), 1);
    } else if (how == 0 && sizeof(double) == 8) {
        w.opt.step--;
        hash_number((uint32_t)kopt_optimizer_step(&w.opt, &w.t, 1), 1);
    } else {
        hash_number((uint32_t)kopt_step_run(&s, &w.t), 1);
    }
    hash_array(w.grad, width_of(w.t.grad_format), n);
    hash_array(w.weight, width_of(w.opt.weight_format), n);
    if (w.t.copy != NULL) hash_numbers(w.copy, w.t.copy_format, n);
}

/* The block as it would be saved. */
static void hash_state(void) {
    const size_t size = kopt_state_size(&w.opt, w.t.n);
    hash_number((uint32_t)size, 4);
    hash_number((uint32_t)kopt_state_seal(&w.opt, &w.t), 1);
    hash_array(w.block, 1, (int)size);
    hash_number((uint32_t)kopt_state_open(&w.opt, &w.t), 1);
}

static void name_group(const char *name) {
    say(name);
    say("-");
}

/* One rule with one store: all formats of gradients and moments, three steps each. */
static void probe_steps(const rule_row *rule, const store_row *store) {
    int g, m, i;
    begin_group();
    for (g = 0; g < COUNT(formats); g++)
        for (m = 0; m < COUNT(moments); m++) {
            set_optimizer(rule, store, &moments[m]);
            place(formats[g], SMALL, draw() >> 8);
            draw_options();
            fill_weights((byte *)numbers, KOPT_F32, SMALL);
            hash_number((uint32_t)kopt_state_init(&w.opt, &w.t, numbers), 1);
            for (i = 0; i < 3; i++) {
                fill_grad(SMALL);
                step(i);
            }
            hash_state();
        }
    name_group(rule->name);
    end_group(store->name, "");
}

static byte *residual_of(void) { return w.block + 64; }

/* Any bits: for what a step reads, every word has a meaning. */
static byte *fill_bits(byte *array, int width, int n) {
    int i;
    for (i = 0; i < n; i++) set(array, width, i, draw());
    return array + (n * width + 3) / 4 * 4;
}

/* One rule with every store, in the formats and at the places that the hot loops take: a whole block of 256 random
   numbers or a half, and parts around it; few special values, each of which makes a detour. */
static void probe_long(const rule_row *rule) {
    int s, i, whole;
    begin_group();
    rarity = 255;
    for (s = 0; s < COUNT(stores); s++)
        for (whole = 0; whole < 2; whole++) {
            moment_row moment;
            moment.format = stores[s].format;
            moment.rounding = stores[s].compensation;
            set_optimizer(rule, &stores[s], &moment);
            place(stores[s].format, LONG, draw() >> 8);
            draw_options();
            w.t.first_index = (w.t.first_index | (whole ? 255u : 127u)) - 9u; /* the block begins at element 10 */
            w.t.copy = NULL;
            fill_weights(w.weight, stores[s].format, LONG);
            hash_number((uint32_t)kopt_state_init(&w.opt, &w.t, NULL), 1);
            if (stores[s].rounding == KOPT_COMPACT) fill_bits(residual_of(), 1, LONG);
            if (stores[s].rounding == KOPT_EXACT) fill_bits(residual_of(), 2, LONG);
            for (i = 1; i < 3; i++) {
                fill_grad(LONG);
                step(i);
            }
            hash_state();
        }
    name_group(rule->name);
    end_group("long", "");
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

/* State blocks: what is written, read, saved, damaged. Every store, every moment. */
static void probe_state(void) {
    int s, m, k;
    begin_group();
    for (s = 0; s < COUNT(stores); s++)
        for (m = 0; m < COUNT(moments); m++) {
            const uint32_t place_of_damage = draw() >> 8;
            const kopt_rounding rounding = stores[s].format == KOPT_F32 ? KOPT_NEAREST : stores[s].rounding;
            const int kept = rounding < KOPT_KAHAN ? 0 : rounding == KOPT_COMPACT ? 1 : 2;
            const int moment = width_of(moments[m].format);
            set_optimizer(&rules[COUNT(rules) - 1], &stores[s], &moments[m]);
            place(KOPT_F32, SMALL, draw() >> 8);
            draw_options();
            fill_numbers(m & 1);
            hash_number((uint32_t)kopt_state_init(&w.opt, &w.t, numbers), 1);
            hash_array(w.weight, width_of(stores[s].format), SMALL);
            hash_state();
            for (k = 0; k < 3; k++) { /* weights, first, second moment */
                hash_number((uint32_t)kopt_state_read(&w.opt, &w.t, (kopt_stream)k, numbers), 1);
                hash_numbers((byte *)numbers, KOPT_F32, SMALL);
                fill_numbers(~m & 1);
                hash_number((uint32_t)kopt_state_write(&w.opt, &w.t, (kopt_stream)k, numbers), 1);
                hash_number((uint32_t)kopt_state_read(&w.opt, &w.t, (kopt_stream)k, numbers), 1);
                hash_numbers((byte *)numbers, KOPT_F32, SMALL);
            }
            hash_array(w.weight, width_of(stores[s].format), SMALL);
            w.opt.step = 0x01020304u;
            hash_state();

            fill_bits(fill_bits(fill_bits(residual_of(), kept, SMALL), moment, SMALL), moment, SMALL);
            for (k = 0; k < 3; k++) {
                hash_number((uint32_t)kopt_state_read(&w.opt, &w.t, (kopt_stream)k, numbers), 1);
                hash_numbers((byte *)numbers, KOPT_F32, SMALL);
            }
            w.opt.step = 0;
            fill_grad(SMALL);
            step(2);
            hash_state();

            kopt_state_seal(&w.opt, &w.t);
            w.block[64 + place_of_damage % (uint32_t)(w.t.state_size - 64)] ^= 16;
            hash_number((uint32_t)kopt_state_open(&w.opt, &w.t), 1); /* KOPT_ERROR_CHECKSUM */
        }
    end_group("state", "");
}

/* The per-step scalars from ordinary decimal numbers. */
static void hash_scalars(kopt_optimizer *o) {
    static const uint32_t steps[] = {1, 2, 3, 10, 100, 1000, 12345, 1000000, 0xFFFFFFFFu};
    kopt_step s;
    int i;
    for (i = 0; i < COUNT(steps); i++) {
        o->step = steps[i] - 1;
        hash_number((uint32_t)kopt_step_begin(o, &s), 1);
        hash_float(s.grad_scale), hash_float(s.l2), hash_float(s.decay);
        hash_float(s.beta1), hash_float(s.one_minus_beta1), hash_float(s.beta2), hash_float(s.one_minus_beta2);
        hash_float(s.momentum), hash_float(s.rate), hash_float(s.root_scale), hash_float(s.eps);
        hash_number(s.step, 4);
    }
}

static double fraction(void) { return (draw() >> 8) * (1.0 / 16777216); } /* exact, in [0, 1) */

static void probe_scalars(void) {
    const uint32_t before = all;
    int i;
    if (sizeof(double) != 8) {
        say("scalars skipped");
        end_line();
        return;
    }
    begin_group();
    w.opt = kopt_sgd(0.1, 0.9);
    w.opt.weight_decay = 1e-4;
    w.opt.grad_scale = 1.0 / 3;
    w.opt.clip = 0.7;
    w.opt.maximize = 1;
    hash_scalars(&w.opt);
    w.opt.dampening = 0.1;
    w.opt.decay = KOPT_DECOUPLED;
    hash_scalars(&w.opt);
    w.opt = kopt_adam(1e-3);
    hash_scalars(&w.opt);
    w.opt = kopt_adamw(3e-4);
    w.opt.beta2 = 0.95;
    hash_scalars(&w.opt);
    w.opt = kopt_adamw(1e-3);
    w.opt.decay = KOPT_FULLY_DECOUPLED;
    w.opt.max_lr = 0.007;
    hash_scalars(&w.opt);
    for (i = 0; i < 32; i++) {
        w.opt.lr = fraction();
        w.opt.max_lr = fraction() + 1;
        w.opt.weight_decay = fraction();
        w.opt.beta1 = fraction();
        w.opt.beta2 = 1 - fraction() / 1024;
        w.opt.eps = fraction() + 1;
        w.opt.grad_scale = fraction();
        w.opt.clip = fraction();
        hash_scalars(&w.opt);
    }
    for (i = 0; i < COUNT(root_scales); i++) hash_number(root_scales[i], 4);
    end_group("scalars", "");
    all = before;
}

void probe(void (*put)(const char *line)) {
    int r, s;
    put_line = put;
    all = 2166136261u;
#ifdef PROBE_ISA
    if (kopt_isa_force(PROBE_ISA) != KOPT_OK) say("the ISA is not usable"), end_line();
#endif
    probe_widen();
    probe_narrow();
    probe_convert(0);
    probe_convert(1);
    probe_finite();
    probe_random();
    probe_kahan_add();
    for (r = 0; r < COUNT(rules); r++)
        for (s = 0; s < COUNT(stores); s++) probe_steps(&rules[r], &stores[s]);
    for (r = 0; r < COUNT(rules); r++) probe_long(&rules[r]);
    probe_state();
    probe_scalars();
    say("all");
    say_hash(all);
}

#ifndef PROBE_NO_MAIN
#include <stdio.h>
#include <string.h>

/* Subnormals flushed on input and output, rounding toward zero; or the default. */
#if defined(__GNUC__) && !defined(__TINYC__) && (defined(__x86_64__) || defined(__i386__))
#define PROBE_DISTURB
static void disturb(int disturbed) {
    const uint32_t sse = disturbed ? 0xFFC0u : 0x1F80u;
    const uint16_t x87 = disturbed ? 0x0F7Fu : 0x037Fu;
#ifdef __SSE__
    __asm__ __volatile__("ldmxcsr %0" : : "m"(sse));
#endif
    __asm__ __volatile__("fldcw %0" : : "m"(x87));
    (void)sse;
}
#elif defined(__GNUC__) && defined(__aarch64__)
#define PROBE_DISTURB
static void disturb(int disturbed) { /* and default NaNs, and fp16 flushed too */
    __asm__ __volatile__("msr fpcr, %0" : : "r"((uint64_t)(disturbed ? 0x03C80000u : 0)));
}
#elif defined(__GNUC__) && defined(__arm__) && defined(__ARM_FP)
#define PROBE_DISTURB
static void disturb(int disturbed) {
    __asm__ __volatile__("vmsr fpscr, %0" : : "r"(disturbed ? 0x03C00000u : 0));
}
#endif

static void put_text(const char *text) { fputs(text, stdout); }

int main(int count, char **arguments) {
    int i, isa;
    for (i = 1; i < count; i++) {
        if (strcmp(arguments[i], "isas") == 0) {
            for (isa = 0; isa < KOPT_ISA_COUNT; isa++)
                if (kopt_isa_usable((kopt_isa)isa)) puts(kopt_isa_name((kopt_isa)isa));
            return 0;
        }
#ifdef PROBE_DISTURB
        if (strcmp(arguments[i], "ftz") == 0) {
            environment = disturb;
            continue;
        }
#endif
        for (isa = 0; isa < KOPT_ISA_COUNT; isa++)
            if (strcmp(arguments[i], kopt_isa_name((kopt_isa)isa)) == 0) break;
        if (isa == KOPT_ISA_COUNT || kopt_isa_force((kopt_isa)isa) != KOPT_OK) {
            fprintf(stderr, "probe: %s is not usable here\n", arguments[i]);
            return 3;
        }
    }
    if (environment != NULL) environment(1);
    probe(put_text);
    if (environment != NULL) environment(0);
    return 0;
}
#endif
