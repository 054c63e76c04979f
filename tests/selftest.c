/* selftest.c - is the library that YOUR compiler makes with YOUR flags the promised one? In under a second:

       cc YOUR-FLAGS -o selftest tests/selftest.c && ./selftest

   Says in words what is off; exit status 0: nothing. C or C++; needs kahan_opt.h and tests/probe.c where they are. Give
   it the KAHAN_OPT_ macros of your program, too: what they leave out is not asked for.
       -DSELFTEST_LINK       the implementation is in another file, say your program's: link its object. So files that
                             lay structs out differently are found
       -DSELFTEST_REFERENCE  for tests/selftest.sh: prints what `cases` must be, by tests/reference.h */
#ifdef SELFTEST_LINK
#define KOPT_IMPLEMENTED_ /* and so left out here */
#elif !defined(KAHAN_OPT_STATIC) && !defined(KAHAN_OPT_API)
#define KAHAN_OPT_STATIC /* with the constructors of rules that a small build leaves out, too */
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
    0x0f6c2fe0u, 0x903132d4u, 0x5c6cff83u, 0xfe4cb584u, 0x6c9b7960u, 0x5a41c77cu, 0x45e077c2u, 0x7cf1433eu, 0x9f75ac1au,
    0x7bda6038u, 0xeae263feu, 0x644dd52eu, 0x62544c00u, 0xdcebc02eu, 0xa90611b2u, 0x733cf7b9u, 0xc6418a6fu, 0xd4371789u,
    0x66890647u, 0xfdb9172au, 0x0cee7384u, 0x8959a35du, 0x776fa8f0u, 0xe328fbecu, 0xa36da1b2u, 0xbb3a6dd9u, 0xf99c24dau,
    0xc8df30fbu, 0xfad6525bu, 0x04554ce3u, 0xb6d3b9e4u, 0x8972469cu, 0x1101f661u, 0xb4b4230du, 0x8a4fbefdu, 0x99189876u,
    0x76b6697au, 0x3418eba9u, 0x0ae5cd1fu, 0x0ba0747au, 0x9fdeb1f6u, 0xd579ca54u, 0x0b932a88u, 0xd3435572u, 0xf2ff628fu,
    0x6474d3a4u, 0xe0c86aa6u, 0xc96f5644u, 0x820a961fu, 0x64207ec1u, 0x8ebb0f5bu, 0xd522a767u, 0x8eefe377u, 0xee1844f1u,
    0x32279db7u, 0x98ac0da3u, 0x3c534795u, 0xe5a2d581u, 0xea9985d7u, 0xaca7f36cu, 0x2eb7f79eu, 0x4c9741f1u, 0x296c0c0eu,
    0xa6880683u, 0xa407ccd5u, 0x576f33ecu, 0x71fd0718u, 0x8bbec91bu, 0x9ea55f80u, 0xe93b5b0bu, 0x7a2cc9e6u, 0xb90256b5u,
    0x5e94d8f5u, 0xce7ecf85u, 0x301bb5a7u, 0x4825646cu, 0x659868f1u, 0x8aab0a0au, 0x11b8bfd5u, 0x1ebfb5bdu, 0x700a68f5u,
    0xa6bc43b4u, 0x4e8c51b5u, 0x7057e31au, 0xa11a7c68u, 0x49bef8abu, 0xc5d51265u, 0x38f393a4u, 0xd51a5bbfu, 0x81207cd4u,
    0x1a0bd14au, 0x1a23ce94u, 0xfbb88776u, 0x8bd59f8eu, 0x0ce6ab6fu, 0x550ac0d9u, 0x35a924f0u, 0x79d545efu, 0xbbbd3f7cu,
    0x71c1bd00u, 0xec37a6f0u, 0x0cf0b4a2u, 0x3f021cebu, 0x3c41a927u, 0x6fcaad2du, 0xbdf17a19u, 0xf7b8d1a8u, 0x8435c635u,
    0x6605e17au, 0xcf8c8f5du, 0x12ea46ecu, 0x2da2f606u, 0x4b1c7de5u, 0x1eccd09du, 0x8f26553cu, 0xcaa69c3cu, 0x742ec85eu,
    0x1ff38b3eu, 0x2ebda6f9u, 0x76870cd6u, 0x51f100b3u, 0xc1146f71u, 0x27f73ddbu, 0x401b6f4eu, 0x49f75c93u, 0xf233f47cu,
    0x169a9e48u, 0x05d3f128u, 0x21e6d9fcu, 0xd83d6688u, 0x441eb28au, 0x0b8e78efu, 0xb7137c71u, 0x011e1b51u, 0x166ad8c5u,
    0xafd7a25fu, 0xfa5d3db3u, 0xfcdb2e3du, 0x2413a5bcu, 0x34059c8du, 0x3ef22bbbu, 0xdf551e90u, 0x9af08289u, 0x437c9f62u,
    0x02cdf4ceu, 0x7d86c901u, 0x6f25477cu, 0x648a182bu, 0x18aec75cu, 0xd75a087eu, 0xc7b50e2eu, 0xa7475d01u, 0x0f73e404u,
    0x5ea82cc6u, 0xb8ada314u, 0x26e6f4e4u, 0x208c36f2u, 0x4ef0b881u, 0xfeaa276bu, 0xbf0e633au, 0xc142640eu, 0x741e0eb1u,
    0xa6007a29u, 0x840f5751u, 0xb5bc166au, 0xe5fc6d6eu, 0xbb5f23a2u, 0x8c34c00du, 0xff4705d0u, 0x1873ce89u, 0xe3c347e0u,
    0xea9603ddu, 0xd544e3e5u, 0xf950f87au, 0x127aeb6bu, 0xbe85ccb7u, 0xd31ca709u, 0x91cccdaeu, 0xddd28faau, 0x7dc64ddbu,
    0xa3fe527eu, 0x65b2215au, 0xaf85d8afu, 0x611a6d62u, 0x263787d5u, 0x370e3378u, 0x8eb98a76u, 0x4487bb72u, 0x7f4482dcu,
    0x774fe99bu, 0xcc72246bu, 0x571d0134u, 0x71683735u, 0x4c02d22bu, 0x3de4858eu, 0x2481ab15u, 0x470b1ccbu, 0x7d4abff2u,
    0x32515e01u, 0x59409089u, 0x64a230d4u, 0xc565b5fdu, 0xf38d0bc5u, 0xdfaf136eu, 0xf605dc12u, 0x2cae1a36u, 0xe7785be5u,
    0x1d391ba7u, 0x15d7ffefu, 0x18aaab7du, 0x7893a584u, 0x932dec0fu, 0xa98e82c7u, 0x140ced10u, 0xea2b6afau
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
    0x9db4c970u, 0x2cc87a23u, 0x2ad2643bu, 0x8fb107a3u, 0xb93be88du, 0x51f5da6eu, 0xa1d5bc84u, 0x1a8c3a34u, 0x644c2143u,
    0x8e1280e2u, 0x712f3dc9u, 0xf6805f52u, 0x1b1e035bu, 0x097cc03eu, 0xa395d74fu, 0x3b544dabu, 0xe0b149c3u, 0xdb4b4bc7u,
    0x1452bcd0u, 0x3dd17569u, 0x17a915cdu, 0xc9226a31u, 0xe0e8af99u, 0x733cce4cu, 0xc0d0d4e0u, 0x02c197f1u, 0x9c0cbb6au,
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
           "enums (-fshort-enums), packing (-fpack-struct, #pragma pack).\n", structs,
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
    if (has(KOPT_BARE | KOPT_WITH_CHECKS)) {
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
        (w.block[7] & 15) != KOPT_KAHAN || w.block[8] != KOPT_BF16 || w.block[12] != 0x14 || w.block[16] != FEW ||
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
