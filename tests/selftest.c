/* selftest.c - is the library that YOUR compiler makes with YOUR flags the promised one? In under a second:

       cc YOUR-FLAGS -o selftest tests/selftest.c && ./selftest

   Says in words what is off; exit status 0: nothing. C or C++; needs kahan_opt.h and tests/probe.c where they are. Give
   it the KAHAN_OPT_ macros of your program, too: what they leave out is not asked for.
       -DSELFTEST_LINK       the implementation is in another file, say your program's: link its object. So files that
                             lay structs out differently are found
       -DSELFTEST_REFERENCE  for tests/selftest.sh: prints what `cases` must be, by tests/reference.h */
#ifdef SELFTEST_LINK
#define KOPT_IMPLEMENTED_ /* and so left out here */
#endif
#define PROBE_NO_MAIN
#include "probe.c"

#include <float.h>
#include <stdio.h>
#include <string.h>

#ifdef SELFTEST_REFERENCE
#include "reference.h"
#endif

#ifdef KAHAN_OPT_ONLY
#define ONLY ((uint32_t)(KAHAN_OPT_ONLY))
#else
#define ONLY KOPT_WITH_ALL
#endif

/* The hashes of tests/golden.txt, in their order; tests/selftest.sh compares. */
static const uint32_t golden[] = {
    0x53a80c85u, 0xa5b613bdu, 0xe901b2b0u, 0x2b137314u, 0xb0bf92d8u, 0x037d2c15u, 0x9852d932u, 0xb7bf971fu, 0xd591af15u,
    0x0f6c2fe0u, 0xbd0b31d6u, 0x8220963eu, 0x1975cfadu, 0x3cfd2b50u, 0xdf167b31u, 0x45e077c2u, 0x7cf1433eu, 0x83ece078u,
    0xfdb8d1b5u, 0x5b274210u, 0x4966959eu, 0xf57e9db1u, 0x9e499647u, 0xc0dac68fu, 0x48bbae20u, 0xbad0c81du, 0x89b41901u,
    0x3acf0129u, 0x6d7a418cu, 0x0bee006cu, 0x779b55f0u, 0xaf919529u, 0x577dbe82u, 0xfeec93c6u, 0xfb7eeac0u, 0x8551f020u,
    0x6bb6454fu, 0xab89979eu, 0x2a025342u, 0x23300699u, 0xbdc107d5u, 0x0f18848au, 0x7f9cab33u, 0xefb46419u, 0x01c93f5du,
    0xd951dadbu, 0x8c0da69cu, 0xc77c1496u, 0x36200039u, 0xf908ab51u, 0xbc1497ecu, 0x4301f9f7u, 0x7862d9dfu, 0x1ac15746u,
    0xf67cbb3du, 0x25e3744cu, 0x075efbcfu, 0xa4114843u, 0x3150e65cu, 0x212ce9b8u, 0x6040a572u, 0x8bd08d9eu, 0x55f4df7bu,
    0x414f1b64u, 0x5b6d2b0eu, 0xf4f6b43cu, 0x17e2d4b6u, 0x9a710f13u, 0x21c4a964u, 0x5c861406u, 0x58fcdec3u, 0x05677639u,
    0x0b470094u, 0x796b7349u, 0xcc54e03bu, 0xe7a8b018u, 0x04c15c6fu, 0x6c49151au, 0x9caa063cu, 0x7f496d00u, 0x5cc62445u,
    0xe0747f4eu, 0xb4616680u, 0x15ba2b7au, 0xaa144925u, 0x17847704u, 0x6c3628c6u, 0xcdc8b313u, 0x67dd730au, 0xa3c20581u,
    0x8039e579u, 0x18588c20u, 0x2406298fu, 0x8ea818f8u, 0x6d6cc63bu, 0x97810936u, 0x1d713cb4u, 0x900c08cbu, 0xe9a4b608u,
    0xa8836c2au, 0x927dfcb3u, 0xced10e38u, 0x0afa1e54u, 0xbf29421cu, 0xf7e4b70fu, 0x4461f8f4u, 0x4eecfd8bu, 0x2a1629b3u,
    0xea0fa3d2u, 0x3986d829u, 0x1ba3e081u, 0xb5fd11f1u, 0x93cb4cddu, 0xee1f6923u, 0x0737fc07u, 0x42839e53u, 0xc963a1b3u,
    0xa1266fd5u, 0xdd4f8f22u, 0xc3368412u, 0x49a45180u, 0x62d52637u, 0x7894bb02u, 0x0223301eu, 0xce6e4b2fu, 0xfbe97e95u,
    0x4ba998f8u, 0x774b4169u, 0xb260c602u, 0xd118b7a3u, 0x4689a827u, 0xa70dfb7fu, 0xdb173609u, 0x41ea0e00u, 0x5be0f1a0u,
    0x06ecb040u, 0x6acc3288u, 0x62e7b77eu, 0xf522d9c0u, 0x20de864au, 0x3a5bf8e0u, 0xd174dd45u, 0x61ed9958u, 0x91d54bb8u,
    0x2e897a96u, 0xd38c7fbfu, 0x30a3557au, 0x9f17c5f9u, 0x759dba07u, 0x2994c968u, 0x11ad8eddu, 0x45adbad4u, 0x88a95cc6u,
    0xd7544e15u, 0xe4cd197du, 0xfd2f9966u, 0xc928a284u, 0x98657e41u, 0xfb63c4cbu, 0x64a91653u, 0x6ac9b23fu, 0xdd0d564fu,
    0x28b3226du, 0xe237def5u, 0xa6bb8a6fu, 0x4566ae33u, 0x2f6241b8u, 0x1bbf8d99u, 0x8e14060du, 0x8360834eu, 0x656ad7b0u,
    0xb1b3b176u, 0x3d28ea2au, 0x049a1d51u, 0x9eb21a55u, 0x88ed4313u, 0x415b1c65u, 0xd597f7ccu, 0x6d88b6bbu, 0xfe09f3fcu,
    0x529710b6u, 0xd511ed8au, 0x03a14efbu, 0x8765a77fu, 0xa2850a49u, 0xefb32d3fu, 0x0f11cceau, 0xddd28faau, 0x7dc64ddbu,
    0xa3fe527eu, 0x2484cc0fu, 0xc6f99fc9u, 0x43ce9370u, 0xb2643e6cu, 0x649bc01eu, 0x8eb98a76u, 0x4487bb72u, 0xb205deb5u,
    0x66b07dfdu, 0xc8eb3e64u, 0xe964beb5u, 0xb1c008abu, 0x9010175bu, 0xbe3dbd85u, 0xac859dacu, 0x1f7074f2u, 0x0bb68782u,
    0xed1da874u, 0x61bfb0a1u, 0x20ccc98bu, 0xe8900ccau, 0x71906642u, 0x3b2cd3bbu, 0xf0777245u, 0xecce7c3au, 0xe7785be5u,
    0x007348c6u, 0x15d7ffefu, 0x18aaab7du, 0x7893a584u, 0x932dec0fu, 0xa98e82c7u, 0x140ced10u, 0xea2b6afau
};

static int failures;

static void fail(const char *what) {
    printf("FAILED: %s\n", what);
    failures++;
}

static int has(uint32_t bits) { return (bits & ~ONLY) == 0; }

static uint32_t word_of(float x) { return get((const byte *)&x, 4, 0); }

/* ---- The floating-point environment, by what it does: rounding, flushing of results, of inputs ------------------- */

static int environment(void) {
    volatile float one_ = 1, minus = -1, small = 1.0f / 1073741824, least = FLT_MIN, half = 0.5f, two = 2;
    volatile float up, down, inward, result, input = float_of(0x00400000u); /* 2^-127 */
    up = one_ + small;
    down = minus - small;
    inward = one_ - small;
    result = least * half;
    input = input * two;
    return (word_of(up) != 0x3F800000u ? 1 : 0) | (word_of(down) != 0xBF800000u ? 2 : 0) |
           (word_of(inward) != 0x3F800000u ? 4 : 0) | (word_of(result) == 0 ? 8 : 0) | (word_of(input) == 0 ? 16 : 0);
}

static const char *const direction_name[] = {"nearest", "down", "up", "zero"};

static const char *name_of(int e) {
    static char text[64];
    static const char *const flushing[] = {"kept", "flushed in results", "flushed in inputs", "flushed"};
    const char *const rounding = direction_name[e & 1 ? UP : e & 2 ? DOWN : e & 4 ? ZERO : TO_NEAREST];
    snprintf(text, sizeof text, "rounding to %s, subnormals %s", rounding, flushing[e >> 3 & 3]);
    return text;
}

/* ---- The groups of the probe ------------------------------------------------------------------------------------- */

static const char *isa_name = "";
static int place_in_golden, said, compared;

static const struct {
    const char *group, *words;
} topics[] = {
    {"widen", "16-bit numbers made fp32"}, {"narrow", "fp32 numbers rounded to 16 bits"},
    {"convert", "conversion of arrays"}, {"finite", "the check for infinities and NaN"}, {"random", "random bits"},
    {"kahan-add", "one-element updates"}, {"norm", "the norm of gradients, and clipping"}, {"state", "state blocks"},
    {"scalars", "the scalars of a step, such as its rate"}, {"compress", "compressed gradients"},
    {"reduce", "the sum of shards"}
};

static void differs(const char *group, uint32_t got, uint32_t want) {
    const char *words = "steps of an optimizer";
    int i;
    failures++;
    if (said++ == 8) puts("        ... and more");
    if (said > 8) return;
    for (i = 0; i < COUNT(topics); i++)
        if (strncmp(group, topics[i].group, strlen(topics[i].group)) == 0) words = topics[i].words;
    printf("FAILED: %s: other bits than promised: %s: got %08lx, want %08lx (%s; the caller rounds to %s%s)\n", words,
           group, (unsigned long)got, (unsigned long)want, isa_name, direction_name[direction],
           flush ? " and flushes" : "");
}

/* A line of the probe: "GROUP HASH\n", or "scalars skipped\n". */
static void compare(const char *text) {
    static char group[48];
    uint32_t got = 0;
    size_t i, k;
    for (k = 0; text[k] != ' '; k++) group[k] = text[k];
    group[k] = 0;
    for (i = k + 1; i < k + 9; i++) {
        const char digit = text[i];
        if (!((digit >= '0' && digit <= '9') || (digit >= 'a' && digit <= 'f'))) return;
        got = got << 4 | (uint32_t)(digit <= '9' ? digit - '0' : digit - 'a' + 10);
    }
    compared++;
    if (got != golden[place_in_golden]) differs(group, got, golden[place_in_golden]);
}

static const uint32_t all_formats = KOPT_WITH_F32 | KOPT_WITH_BF16 | KOPT_WITH_FP16 | KOPT_WITH_Q8;
static const uint32_t both_states = KOPT_WITH_NEAREST_STATE | KOPT_WITH_STOCHASTIC_STATE;

static uint32_t need_of_rule(const kopt_optimizer *o) {
    static const uint32_t bits[] = {KOPT_WITH_SGD, KOPT_WITH_ADAM, KOPT_WITH_LION, KOPT_WITH_ADAN, KOPT_WITH_RADAM,
                                    KOPT_WITH_RANGER, KOPT_WITH_EMA};
    static const uint32_t decays[] = {KOPT_WITH_L2, KOPT_WITH_DECOUPLED, KOPT_WITH_FULLY_DECOUPLED};
    return bits[o->rule] | (o->weight_decay > 0 ? decays[o->decay] : 0) |
           (o->rule == KOPT_SGD && o->momentum > 0 ? KOPT_WITH_MOMENTUM : 0) |
           (o->amsgrad || o->stable ? KOPT_WITH_EXTRAS : 0);
}

static uint32_t need_of_store(const store_row *s) {
    static const uint32_t bits[] = {KOPT_WITH_NEAREST, KOPT_WITH_STOCHASTIC, KOPT_WITH_KAHAN, KOPT_WITH_COMPACT,
                                    KOPT_WITH_EXACT};
    if (s->format == KOPT_F32) return 0;
    if (s->rounding != KOPT_KAHAN && s->rounding != KOPT_COMPACT) return bits[s->rounding];
    return bits[s->rounding] | (s->compensation == KOPT_NEAREST ? KOPT_WITH_NEAREST_STATE : KOPT_WITH_STOCHASTIC_STATE);
}

/* Every group that this build has whole, with the instruction set that is forced. The steps of a build without a format
   have no group of their own: see `cases`. */
static void compare_groups(void) {
    const uint32_t everything = KOPT_WITH_ALL & ~(uint32_t)KOPT_WITH_CHECKS;
    int r, s;
    put_line = compare;
    disturb(1);
    place_in_golden = 0, probe_widen();
    place_in_golden = 1, probe_narrow();
    place_in_golden = 2, probe_convert(0);
    place_in_golden = 3, probe_convert(1);
    place_in_golden = 4, probe_finite();
    place_in_golden = 5, probe_random();
    place_in_golden = 6, probe_kahan_add();
    for (r = 0; r < COUNT(rules); r++) {
        uint32_t need = KOPT_WITH_EXTRAS | both_states | all_formats, roundings = 0;
        set_optimizer(&rules[r], &stores[0], &moments[0]);
        need |= need_of_rule(&w.opt);
        for (s = 0; s < COUNT(stores); s++) {
            place_in_golden = 7 + r * COUNT(stores) + s;
            if (has(need | need_of_store(&stores[s]))) probe_steps(r, s);
            roundings |= need_of_store(&stores[s]);
        }
        place_in_golden = 7 + COUNT(rules) * COUNT(stores) + r;
        if (has(need | roundings)) probe_long(r);
    }
    place_in_golden = 7 + COUNT(rules) * (COUNT(stores) + 1);
    probe_norm();
    place_in_golden++;
    if (has(everything)) probe_state();
    place_in_golden++;
    if (has(everything)) probe_exact_scalars();
    for (r = 0; r < 4; r++) {
        place_in_golden++;
        if (has(everything)) probe_compress(r);
    }
    place_in_golden++;
    if (has(everything)) probe_reduce();
    place_in_golden++;
    if (has(everything)) probe_scalars();
    disturb(0);
}

/* ---- Steps one by one, for builds that leave something out ------------------------------------------------------- */

enum { FEW = 37 };

static void hash_block(const kopt_optimizer *o) {
    const int width = width_of(o->weight_format), moment = width_of(o->moment_format);
    const int kept = o->weight_format == KOPT_F32 || o->rounding < KOPT_KAHAN ? 0 : o->rounding == KOPT_COMPACT ? 1 : 2;
    int count = o->rule == KOPT_EMA ? 0 : o->rule == KOPT_SGD ? o->momentum > 0 : o->rule == KOPT_LION ? 1
                : o->rule == KOPT_ADAN ? 4 : o->amsgrad ? 3 : 2;
    const byte *p = w.block + 64;
    hash_array(w.weight, width, FEW);
    hash_array(p, kept, FEW), p += (kept * FEW + 3) / 4 * 4;
    for (; count > 0; count--) {
        hash_array(p, moment, FEW), p += (moment * FEW + 3) / 4 * 4;
        if (o->moment_format == KOPT_Q8) hash_array(p, 4, 1), p += 4;
    }
    if (o->rule != KOPT_RANGER) return;
    hash_array(p, width, FEW), p += (width * FEW + 3) / 4 * 4;
    hash_array(p, kept, FEW);
}

/* The hash of three steps by a rule (the one behind the last: SGD with decoupled decay), a store, moments and a format
   of gradients. 0: not in this build; 1: refused. */
static uint32_t step_case(int rule, int store, int moment, kopt_format grad_format) {
    static const uint32_t format_bits[] = {KOPT_WITH_F32, KOPT_WITH_BF16, KOPT_WITH_FP16, KOPT_WITH_Q8};
    const store_row *const s = &stores[store];
    const moment_row *const m = &moments[moment];
    int i, good = 1, has_moments;
    uint32_t need;
    begin_group("selftest", "");
    set_optimizer(&rules[rule == COUNT(rules) ? 0 : rule], s, m);
    if (rule == COUNT(rules)) w.opt.decay = KOPT_DECOUPLED;
    need = need_of_rule(&w.opt) | need_of_store(s) | format_bits[s->format] | format_bits[grad_format];
    has_moments = w.opt.rule != KOPT_EMA && !(w.opt.rule == KOPT_SGD && w.opt.momentum <= 0);
    if (has_moments) need |= format_bits[m->format];
    if (has_moments && m->format != KOPT_F32)
        need |= m->rounding == KOPT_NEAREST ? KOPT_WITH_NEAREST_STATE : KOPT_WITH_STOCHASTIC_STATE;
    if (!has(need)) return 0;
    w.opt.seed = 42;
    w.tiny = w.huge = 0;
    place(grad_format, FEW, 1);
    w.t.id = 7;
    fill_weights(w.weight, s->format, FEW);
#ifdef SELFTEST_REFERENCE
    {
        const ref_layout l = ref_layout_of(&w.opt, FEW);
        if (l.size != 0) memset(w.block, 0, l.size);
        memcpy(w.block + l.slow, w.weight, FEW * l.slow_width);
    }
#else
    good = kopt_state_init(&w.opt, &w.t, NULL) == KOPT_OK;
#endif
    for (i = 0; i < 3; i++) {
#ifndef SELFTEST_REFERENCE
        kopt_step begun;
#endif
        fill_grad(FEW);
#ifdef SELFTEST_REFERENCE
        ref_step_tensor(&w.opt, &w.t);
        w.opt.step++;
#else
        good &= kopt_step_begin(&w.opt, &begun) == KOPT_OK && kopt_step_run(&begun, &w.t) == KOPT_OK;
#endif
    }
    if (!good) return 1;
    hash_block(&w.opt);
    return hash;
}

/* Each rule with each format of weights, each store by AdamW and SGD, each kind of moments, each format of gradients.
   The hashes are those of tests/reference.h: see tests/selftest.sh. */
static const int plain_store[] = {0, 3, 10}, plain_moment[] = {0, 1, 3};
static const uint32_t cases[] = {
    0x51b85b99u, 0x93914806u, 0x6c1b2738u, 0x1bde6f8cu, 0xc536919cu, 0xddfef7b9u, 0x2dbbfa10u, 0xedd7d215u, 0xb032f11au,
    0x9ede1e99u, 0xaa78641eu, 0x9a542834u, 0x5c2777b8u, 0x1b1e035bu, 0x3b544dabu, 0x834532b3u, 0xa9aea5dfu, 0x21fa0cbcu,
    0x9db4c970u, 0x015277aeu, 0x28cfdc87u, 0xeaf1f652u, 0xee8d5ceau, 0x4acaeb98u, 0x75b9c5acu, 0x87c7aa43u, 0xfe305315u,
    0x3b544dabu, 0x8309949fu, 0x92ed03d9u, 0x3260f40bu, 0x90e432d5u, 0x1a8c3a34u, 0x49417923u, 0xdb9b783cu, 0x0f6a6511u,
    0xb8f6f842u, 0x58da97d7u, 0x5a427e79u, 0x9c1628afu, 0x83d59517u, 0xe0e8af99u, 0xc536919cu, 0x75f0ff8du, 0x26791827u,
    0x9db4c970u, 0x2cc87a23u, 0x1cf8b3cau, 0x8fb107a3u, 0xb93be88du, 0x51f5da6eu, 0xa1d5bc84u, 0x1a8c3a34u, 0x644c2143u,
    0x9a0ae355u, 0x712f3dc9u, 0xf6805f52u, 0x1b1e035bu, 0x097cc03eu, 0xa395d74fu, 0x3b544dabu, 0xe0b149c3u, 0x796234dbu,
    0x1452bcd0u, 0x3dd17569u, 0x17a915cdu, 0xc9226a31u, 0xe0e8af99u, 0x733cce4cu, 0xcc67e261u, 0x02c197f1u, 0x9c0cbb6au,
    0xc99f6bc2u, 0x9db4c970u, 0x9cdf1c3bu, 0xc0e27904u, 0xdba3c504u, 0xb576b4c1u, 0xb576b4c1u, 0xd6121d98u, 0x9db4c970u,
    0x0abf9368u
};

static int next_case;

static void one_case(int rule, int store, int moment, kopt_format grad_format) {
    static const char *const format_name[] = {"f32", "bf16", "fp16", "q8"};
    const uint32_t got = step_case(rule, store, moment, grad_format);
#ifdef SELFTEST_REFERENCE
    printf("0x%08lxu,\n", (unsigned long)got);
#endif
    if (got != 0) compared++;
    if (got != 0 && got != cases[next_case]) {
        char group[96];
        const char *const name = rules[rule == COUNT(rules) ? 0 : rule].name;
        snprintf(group, sizeof group, "%s, weights %s, moments %s, gradients %s", name, stores[store].name,
                 format_name[moments[moment].format], format_name[grad_format]);
        differs(group, got, cases[next_case]);
    }
    next_case++;
}

static void compare_cases(void) {
    int r, s, k;
    next_case = 0;
    for (k = 0; k < 3; k++)
        for (r = 0; r <= COUNT(rules); r++) one_case(r, plain_store[k], plain_moment[k], formats[k]);
    for (r = 4; r <= COUNT(rules); r += COUNT(rules) - 4)
        for (s = 0; s < COUNT(stores); s++)
            for (k = 0; k < 3; k++)
                if (stores[s].format == formats[k]) one_case(r, s, plain_moment[k], formats[k]);
    for (k = 0; k < COUNT(moments); k++) one_case(4, 3, k, KOPT_BF16);
    for (k = 0; k < 3; k++) one_case(4, 3, 1, formats[k]);
}

/* ---- Structs, as this file and as the implementation see them ---------------------------------------------------- */

#define SHOW(type, field) printf(" %s %lu", #field, (unsigned long)offsetof(type, field))

static void laid_out_otherwise(const char *structs, kopt_result result) {
    printf("FAILED: %s is laid out otherwise in the implementation (%s)\n        Compile both files with the same "
           "enums (-fshort-enums), packing (-fpack-struct, #pragma pack) and KAHAN_OPT_VMATH.\n", structs,
           kopt_result_string(result));
    failures++;
}

static void check_layout(void) {
    enum { ROOM = 1024 };
    static union { kopt_step step; byte bytes[ROOM]; uint64_t align; } drawn[2];
    kopt_tensor t;
    int k, end = 0;
    kopt_result result = KOPT_OK;
    printf("int %lu, enum %lu, size_t %lu, pointer %lu, double %lu bytes; %s-endian\n", (unsigned long)sizeof(int),
           (unsigned long)sizeof(kopt_rule), (unsigned long)sizeof(size_t), (unsigned long)sizeof(void *),
           (unsigned long)sizeof(double), *(const byte *)&one ? "little" : "big");
    printf("kopt_optimizer %lu bytes:", (unsigned long)sizeof(kopt_optimizer));
    SHOW(kopt_optimizer, decay), SHOW(kopt_optimizer, lr), SHOW(kopt_optimizer, beta1), SHOW(kopt_optimizer, seed);
    SHOW(kopt_optimizer, step);
    printf("\nkopt_tensor %lu bytes:", (unsigned long)sizeof(kopt_tensor));
    SHOW(kopt_tensor, n), SHOW(kopt_tensor, state_size), SHOW(kopt_tensor, id), SHOW(kopt_tensor, first_index);
    SHOW(kopt_tensor, counts);
    printf("\nkopt_step %lu bytes:", (unsigned long)sizeof(kopt_step));
    SHOW(kopt_step, moments), SHOW(kopt_step, rate), SHOW(kopt_step, eps), SHOW(kopt_step, step), SHOW(kopt_step, seed);
    printf("\n");
    if (sizeof(kopt_rule) != sizeof(int))
        puts("note: enums are not int here (-fshort-enums?): every file that includes kahan_opt.h must be compiled so");
    if (sizeof(float) != 4 || word_of(1.5f) != 0x3FC00000u) fail("float is not IEEE binary32 here");
#if defined(__BYTE_ORDER__) && defined(__ORDER_LITTLE_ENDIAN__)
    if ((__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__) != *(const byte *)&one)
        fail("the machine has another byte order than the compiler says");
#endif
    if (kopt_version() != KOPT_VERSION) {
        printf("FAILED: the implementation is of version %d, this header of %d\n", kopt_version(), KOPT_VERSION);
        failures++;
        return;
    }

    /* A step that begins twice, over two patterns: what it has written differs from one of them. */
    set_optimizer(&rules[4], &stores[3], &moments[1]);
    if (has(KOPT_TINY | KOPT_WITH_CHECKS)) {
        memset(&drawn[0], 0x00, sizeof drawn[0]), memset(&drawn[1], 0xFF, sizeof drawn[1]);
        for (k = 0; k < 2 && result == KOPT_OK; k++) {
            w.opt.step = 0x01020304u, w.opt.seed = wide(0x05060708u, 0x090A0B0Cu);
            result = kopt_step_begin(&w.opt, &drawn[k].step);
        }
        for (k = 0; k < ROOM; k++)
            if (drawn[0].bytes[k] != 0x00 || drawn[1].bytes[k] != 0xFF) end = k + 1;
        if (result != KOPT_OK || w.opt.step != 0x01020305u || drawn[0].step.step != 0x01020305u ||
            drawn[0].step.seed != w.opt.seed || drawn[0].step.rule != KOPT_ADAM || drawn[0].step.moments != 2 ||
            end > (int)sizeof(kopt_step)) {
            laid_out_otherwise("kopt_optimizer or kopt_step", result);
            return;
        }
    }
    if (!has(KOPT_WITH_ALL)) return;
    /* The header of a state block is written from both structs. */
    place(KOPT_BF16, FEW, 0);
    t = w.t;
    t.id = 0x11121314u, t.first_index = 0x15161718u;
    w.opt.step = 0x01020304u;
    fill(w.weight, KOPT_BF16, FEW, 118, 12);
    result = kopt_state_init(&w.opt, &t, NULL);
    if (result == KOPT_OK) result = kopt_state_seal(&w.opt, &t);
    if (result != KOPT_OK || memcmp(w.block, "KOPT", 4) != 0 || w.block[5] != KOPT_ADAM || w.block[6] != KOPT_BF16 ||
        w.block[7] != KOPT_KAHAN || w.block[8] != KOPT_BF16 || w.block[12] != 0x14 || w.block[16] != FEW ||
        w.block[24] != 0x18 || w.block[32] != 0x0C || w.block[40] != 0x04) {
        laid_out_otherwise("kopt_optimizer or kopt_tensor", result);
    }
}

/* ---- Stack: a pattern below this frame, and what of it is gone afterwards ---------------------------------------- */

#if defined(__SANITIZE_ADDRESS__) || defined(__wasm__)
#define PAINT 0
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define PAINT 0
#endif
#endif
#ifndef PAINT
#define PAINT 49152
#endif

/* The CONTRACT of kahan_opt.h; what probe.c itself takes. */
enum { STACK = 24 * 1024, STACK_SCALAR = 6 * 1024, STACK_PROBE = 1024 };

#if PAINT > 0
static volatile uintptr_t painted;

static void paint(void) {
    volatile byte area[PAINT];
    int i;
    for (i = 0; i < PAINT; i++) area[i] = 0xA5;
    painted = (uintptr_t)&area[0];
}

static int used(void) {
    const volatile byte *const area = (const volatile byte *)painted;
    int i;
    for (i = 0; i < PAINT && area[i] == 0xA5; i++) {}
    return PAINT - i;
}

static void (*volatile paint_below)(void) = paint;
static int (*volatile used_below)(void) = used;
#endif

static void (*volatile groups_below)(void) = compare_groups; /* through pointers, or they share the caller's frame */

/* ---- All --------------------------------------------------------------------------------------------------------- */

int main(void) {
    const int before = environment();
    kopt_isa best;
    int isa, e, stack = 0;
#ifdef SELFTEST_REFERENCE
    compare_cases();
    return failures != 0;
#endif
    printf("kahan_opt %d.%d.%d, %s\n", KOPT_VERSION / 10000, KOPT_VERSION / 100 % 100, KOPT_VERSION % 100,
#ifdef __VERSION__
           "compiler " __VERSION__
#else
           "unknown compiler"
#endif
    );
    check_layout();
    if (failures == 0) {
        best = kopt_isa_current();
        printf("instruction sets:");
        for (isa = 0; isa < KOPT_ISA_COUNT; isa++)
            if (kopt_isa_usable((kopt_isa)isa)) printf(" %s", kopt_isa_name((kopt_isa)isa));
        printf("\nfloating-point environment at the start: %s\n", name_of(before));
        if (before != 0 && has(KOPT_WITH_CHECKS))
            puts("note: it is not the default: the program is linked with -Ofast, -ffast-math or "
                 "-funsafe-math-optimizations\n      (crtfastmath.o). The library does not mind; one-element updates "
                 "and your own code run in it.");
        if (before != 0 && !has(KOPT_WITH_CHECKS))
            fail("without KOPT_WITH_CHECKS that must be the default; -Ofast and -ffast-math change it when they link a "
                 "program: link without them");
        for (isa = 0; isa < KOPT_ISA_COUNT; isa++) {
            if (kopt_isa_force((kopt_isa)isa) != KOPT_OK) continue;
            isa_name = kopt_isa_name((kopt_isa)isa);
            said = 0;
#if PAINT > 0
            paint_below();
            groups_below();
            stack = used_below();
            printf("stack, %s: %d bytes, up to %d of the test itself among them\n", isa_name, stack, (int)STACK_PROBE);
#ifdef __OPTIMIZE__
            if (stack > (isa == KOPT_ISA_SCALAR ? STACK_SCALAR : STACK) + STACK_PROBE)
                puts("note: that is more than the CONTRACT of kahan_opt.h says; please report it");
#endif
#else
            groups_below(), (void)stack;
#endif
            compare_cases();
            if (environment() != before) fail("a call has changed the caller's floating-point environment"), disturb(0);
        }
        /* Other environments of the caller: the best instruction set and the scalar one. */
        for (e = DOWN; can_disturb && has(KOPT_WITH_CHECKS) && e <= ZERO + 1; e++)
            for (isa = 0; isa < 2; isa++) {
                int disturbed;
                if (kopt_isa_force(isa == 0 ? best : KOPT_ISA_SCALAR) != KOPT_OK) continue;
                isa_name = kopt_isa_name(kopt_isa_current());
                said = 0;
                direction = e > ZERO ? ZERO : e;
                flush = e > ZERO;
                disturb(1);
                disturbed = environment();
                compare_cases();
                if (environment() != disturbed) fail("a call has changed the caller's floating-point environment");
                disturb(0);
                compare_groups();
            }
    }
    printf("%d comparisons\n", compared);
    if (failures == 0) {
        puts("All is well: this build gives the promised bits.");
        return 0;
    }
    printf("%d failures. Build again with -O2 and no other flags: if all is well then, your compiler flags break the "
           "arithmetic;\nif not, the compiler or the machine does. Please report this: these lines and your flags.\n",
           failures);
    return 1;
}
