/* selftest.c - is the library that YOUR compiler makes with YOUR flags the promised one? In under a second:

       cc YOUR-FLAGS -o selftest tests/selftest.c && ./selftest

   Says in words what is off; exit status 0: nothing. C or C++; needs kahan_opt.h and tests/probe.c where they are. Give
   it the KAHAN_OPT_ macros of your program, too.
       -DSELFTEST_LINK       the implementation is in another file, say your program's: link its object. So files that
                             lay structs out differently are found
       -DSELFTEST_REFERENCE  for tests/selftest.sh: prints what `cases` must be, by tests/reference.h */
#ifdef SELFTEST_LINK
#define KOPT_IMPLEMENTED_ /* and so left out here */
#elif !defined(KAHAN_OPT_STATIC) && !defined(KAHAN_OPT_API)
#define KAHAN_OPT_STATIC
#endif
#define PROBE_NO_MAIN
#include "probe.c"

#include <float.h>
#include <stdio.h>
#include <string.h>

#ifdef SELFTEST_REFERENCE
#include "reference.h"
#endif

/* The hashes of tests/golden.txt, in their order; tests/selftest.sh compares. */
/* clang-format off */
static const uint32_t golden[] = {
    0x53a80c85u, 0xa5b613bdu, 0xe901b2b0u, 0x2b137314u, 0xb0bf92d8u, 0x037d2c15u, 0x9852d932u, 0xb7bf971fu, 0xd591af15u,
    0x0f6c2fe0u, 0x286c71eau, 0x4ec4ae85u, 0x3a4f2798u, 0x41723228u, 0xcbba062au, 0x45e077c2u, 0x7cf1433eu, 0x30045028u,
    0x12ba4b92u, 0xeab283dau, 0xd15b527eu, 0x0a6e041eu, 0x6fde9a7eu, 0x3c79c094u, 0x937a0718u, 0x31473565u, 0x2e1df8ceu,
    0x832fb658u, 0xbb355114u, 0x01458f69u, 0x33c370fbu, 0x472a2e1cu, 0xdb29c4f8u, 0xe8f168c8u, 0xbd37969au, 0x3a3fda2bu,
    0xaf4dbf2eu, 0x266bbb51u, 0x3552763fu, 0x8fe00b6eu, 0x1c5818dfu, 0xfcafd4e7u, 0x6e1d4a2du, 0x13845084u, 0x250ae0e0u,
    0xba10ed4au, 0x69bdad97u, 0x3bf13717u, 0x22de131au, 0x84ea485bu, 0x86ad3e3eu, 0x081db217u, 0xed8528fau, 0x1e4fa0f7u,
    0x541417bfu, 0x74a50a05u, 0x8e321e4bu, 0xe20976a9u, 0xde77b0d3u, 0xa4ab37e2u, 0xe1b9c877u, 0x3d8f7fadu, 0xb697299du,
    0x352f41b2u, 0x44dc2068u, 0x3cacdd62u, 0x880372c3u, 0xedaf6b2cu, 0x32196cb7u, 0xcd09033bu, 0x268d76bfu, 0xca5a9a70u,
    0x4752b367u, 0x1487fc45u, 0xaf763d88u, 0x1f4929a3u, 0x2d007da1u, 0xabccea48u, 0x30c0c1c8u, 0x05e274a0u, 0x6d00ec15u,
    0x82dcf5d5u, 0x658dffc4u, 0x87d52ae6u, 0x535e2898u, 0xba9bc535u, 0xf9470bcdu, 0xf656bde5u, 0x74595cf1u, 0x85a38dcbu,
    0x94cc5e1cu, 0x257f8dd9u, 0x291e3715u, 0xd6a20c4bu, 0x8b97dc5au, 0x5066d34bu, 0xb12da6e0u, 0x6fb16940u, 0xb9838150u,
    0x8fe42af3u, 0x8ac8e13bu, 0xe426568cu, 0x30fa737eu, 0xdda15e59u, 0xce07cb5cu, 0xa9421014u, 0xf9c76fb9u, 0x5be81cc8u,
    0x94220304u, 0xa1595f1au, 0xdae44957u, 0xa2a4a693u, 0xdf6c37ebu, 0x0ce2ee8eu, 0xcdcaeca4u, 0x13a492dau, 0x19c5ac61u,
    0x464ecb3au, 0x0f73b357u, 0x49cfa22bu, 0x298f2d2bu, 0xf10a7b90u, 0x6c685871u, 0x47fa082fu, 0x489b9ac2u, 0x57b435c7u,
    0xab5febf1u, 0xc53c3497u, 0xb235f703u, 0x606ac92eu, 0x7c77f288u, 0x2ebd0ad8u, 0x26d6bc8bu, 0x7d2b0459u, 0x722bdbbcu,
    0xf667d67eu, 0xaacee840u, 0xa0ccd215u, 0xff9d22e7u, 0x235e199fu, 0xa031fd2eu, 0xb8bcf91bu, 0x198ea493u, 0x25086cc8u,
    0x27f4d4eau, 0xd85bb5b4u, 0x07fe1893u, 0x7664cd5au, 0x36053b40u, 0x08dcd041u, 0x492bf2bbu, 0x18cff51bu, 0x269dbb50u,
    0xf2c84a08u, 0x1d4b2bb0u, 0x413b7fbdu, 0x1b5f8ccdu, 0xa6ea917fu, 0xf6585dbeu, 0x5a0b10efu, 0xf01c958eu, 0x68b2b42du,
    0x7c1b6b78u, 0xdbec751bu, 0xfeda1aa2u, 0x669a334cu, 0xef135cefu, 0x1cf5325bu, 0xed260726u, 0x22d6d993u, 0xaf6e5b41u,
    0xef78d29cu, 0xfc47a55au, 0x19ad089eu, 0xa8d7e64bu, 0xbffb71b0u, 0x8d8d7a28u, 0x7fd780f7u, 0xeefbd09bu, 0x4608a6b4u,
    0xba6ec819u, 0x06aaf15bu, 0x798c83f7u, 0xc3f7383au, 0xab449f70u, 0x0e22c09eu, 0xc72ed810u, 0xddd28faau, 0x7dc64ddbu,
    0xa3fe527eu, 0x5d84b310u, 0xb4bf30e1u, 0xf2f8222au, 0x8d70577du, 0x299bdb5au, 0x8eb98a76u, 0x4487bb72u, 0x04fcfc32u,
    0xf72e1b65u, 0xa89555e7u, 0xa1b5d800u, 0xe0a2c35fu, 0x2f61e6bau, 0x440ba81eu, 0xbafa8444u, 0xe30c81d9u, 0x9eeb5e74u,
    0xa3bf2cbeu, 0x6abc21dfu, 0xe315e2bbu, 0x6c31a241u, 0x5058da46u, 0x9a1f775fu, 0x09b7dfc8u, 0xcd722fc8u, 0xe7785be5u,
    0x9c820463u, 0x15d7ffefu, 0x18aaab7du, 0x7893a584u, 0x4e72a22eu, 0xa98e82c7u, 0x140ced10u, 0xea2b6afau
};
/* clang-format on */

static int failures;

static void fail(const char *what) {
    printf("FAILED: %s\n", what);
    failures++;
}

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
} topics[] = {{"widen", "16-bit numbers made fp32"},
              {"narrow", "fp32 numbers rounded to 16 bits"},
              {"convert", "conversion of arrays"},
              {"finite", "the check for infinities and NaN"},
              {"random", "random bits"},
              {"kahan-add", "one-element updates"},
              {"norm", "the norm of gradients, and clipping"},
              {"state", "state blocks"},
              {"scalars", "the scalars of a step, such as its rate"},
              {"compress", "compressed gradients"},
              {"reduce", "the sum of shards"}};

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

/* A line of the probe: "GROUP HASH\n". */
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

/* Every group, with the instruction set that is forced. */
static void compare_groups(void) {
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
        for (s = 0; s < COUNT(stores); s++) {
            place_in_golden = 7 + r * COUNT(stores) + s;
            probe_steps(r, s);
        }
        place_in_golden = 7 + COUNT(rules) * COUNT(stores) + r;
        probe_long(r);
    }
    place_in_golden = 7 + COUNT(rules) * (COUNT(stores) + 1);
    probe_norm();
    place_in_golden++, probe_state();
    place_in_golden++, probe_exact_scalars();
    for (r = 0; r < 4; r++) place_in_golden++, probe_compress(r);
    place_in_golden++, probe_reduce();
    place_in_golden++, probe_scalars();
    disturb(0);
}

/* ---- Steps one by one, which say more precisely what is wrong ---------------------------------------------------- */

enum { FEW = 37 };

static void hash_block(const kopt_optimizer *o) {
    const int width = width_of(o->weight_format), moment = width_of(o->moment_format);
    const int kept = o->weight_format == KOPT_F32 || o->rounding < KOPT_KAHAN ? 0 : o->rounding == KOPT_COMPACT ? 1 : 2;
    int count = o->rule == KOPT_EMA    ? 0
                : o->rule == KOPT_SGD  ? o->momentum > 0
                : o->rule == KOPT_LION ? 1
                : o->rule == KOPT_ADAN ? 4
                : o->amsgrad           ? 3
                                       : 2;
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
   of gradients. 1: refused. */
static uint32_t step_case(int rule, int store, int moment, kopt_format grad_format) {
    const store_row *const s = &stores[store];
    int i, good = 1;
    begin_group("selftest", "");
    set_optimizer(&rules[rule == COUNT(rules) ? 0 : rule], s, &moments[moment]);
    if (rule == COUNT(rules)) w.opt.decay_mode = KOPT_DECOUPLED;
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
/* clang-format off */
static const uint32_t cases[] = {
    0x51b85b99u, 0x93914806u, 0x6c1b2738u, 0x1bde6f8cu, 0xc536919cu, 0xddfef7b9u, 0x2dbbfa10u, 0xedd7d215u, 0xb032f11au,
    0x9ede1e99u, 0xaa78641eu, 0x9a542834u, 0x5c2777b8u, 0x1b1e035bu, 0x3b544dabu, 0x834532b3u, 0xa9aea5dfu, 0x21fa0cbcu,
    0x9db4c970u, 0x015277aeu, 0x28cfdc87u, 0xeaf1f652u, 0xee8d5ceau, 0x4acaeb98u, 0x75b9c5acu, 0x87c7aa43u, 0xfe305315u,
    0x3b544dabu, 0x8309949fu, 0x92ed03d9u, 0x3260f40bu, 0x90e432d5u, 0x1a8c3a34u, 0x49417923u, 0xdb9b783cu, 0x0f6a6511u,
    0xb8f6f842u, 0x58da97d7u, 0x5a427e79u, 0x9c1628afu, 0x83d59517u, 0xe0e8af99u, 0xc536919cu, 0x75f0ff8du, 0x26791827u,
    0x9db4c970u, 0x2cc87a23u, 0x2ad2643bu, 0x8fb107a3u, 0xb93be88du, 0x51f5da6eu, 0xa1d5bc84u, 0x1a8c3a34u, 0x644c2143u,
    0x8e1280e2u, 0x712f3dc9u, 0xf6805f52u, 0x1b1e035bu, 0x097cc03eu, 0xa395d74fu, 0x3b544dabu, 0xe0b149c3u, 0xdb4b4bc7u,
    0x1452bcd0u, 0x3dd17569u, 0x17a915cdu, 0xc9226a31u, 0xe0e8af99u, 0x733cce4cu, 0xc0d0d4e0u, 0x02c197f1u, 0x9c0cbb6au,
    0xc99f6bc2u, 0x9db4c970u, 0x9cdf1c3bu, 0xc0e27904u, 0xdba3c504u, 0x3104424eu, 0x3104424eu, 0xd6121d98u, 0x9db4c970u,
    0x0abf9368u
};
/* clang-format on */

static int next_case;

static void one_case(int rule, int store, int moment, kopt_format grad_format) {
    static const char *const format_name[] = {"f32", "bf16", "fp16", "q8"};
    const uint32_t got = step_case(rule, store, moment, grad_format);
#ifdef SELFTEST_REFERENCE
    printf("0x%08lxu,\n", (unsigned long)got);
#endif
    compared++;
    if (got != cases[next_case]) {
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
           "enums (-fshort-enums), packing (-fpack-struct, #pragma pack).\n",
           structs, kopt_result_string(result));
    failures++;
}

static void check_layout(void) {
    enum { ROOM = 1024 };
    static union {
        kopt_step step;
        byte bytes[ROOM];
        uint64_t align;
    } drawn[2];
    kopt_tensor t;
    int k, end = 0;
    kopt_result result = KOPT_OK;
    printf("int %lu, enum %lu, size_t %lu, pointer %lu, double %lu bytes; %s-endian\n", (unsigned long)sizeof(int),
           (unsigned long)sizeof(kopt_rule), (unsigned long)sizeof(size_t), (unsigned long)sizeof(void *),
           (unsigned long)sizeof(double), *(const byte *)&one ? "little" : "big");
    printf("kopt_optimizer %lu bytes:", (unsigned long)sizeof(kopt_optimizer));
    SHOW(kopt_optimizer, decay_mode), SHOW(kopt_optimizer, lr), SHOW(kopt_optimizer, beta1), SHOW(kopt_optimizer, seed);
    SHOW(kopt_optimizer, step);
    printf("\nkopt_tensor %lu bytes:", (unsigned long)sizeof(kopt_tensor));
    SHOW(kopt_tensor, n), SHOW(kopt_tensor, state_size), SHOW(kopt_tensor, id), SHOW(kopt_tensor, first_index);
    SHOW(kopt_tensor, counts);
    printf("\nkopt_step %lu bytes:", (unsigned long)sizeof(kopt_step));
    SHOW(kopt_step, moment_count), SHOW(kopt_step, rate), SHOW(kopt_step, eps), SHOW(kopt_step, step),
        SHOW(kopt_step, seed);
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
    memset(&drawn[0], 0x00, sizeof drawn[0]), memset(&drawn[1], 0xFF, sizeof drawn[1]);
    for (k = 0; k < 2 && result == KOPT_OK; k++) {
        w.opt.step = 0x01020304u, w.opt.seed = wide(0x05060708u, 0x090A0B0Cu);
        result = kopt_step_begin(&w.opt, &drawn[k].step);
    }
    for (k = 0; k < ROOM; k++)
        if (drawn[0].bytes[k] != 0x00 || drawn[1].bytes[k] != 0xFF) end = k + 1;
    if (result != KOPT_OK || w.opt.step != 0x01020305u || drawn[0].step.step != 0x01020305u ||
        drawn[0].step.seed != w.opt.seed || drawn[0].step.rule != KOPT_ADAM || drawn[0].step.moment_count != 2 ||
        end > (int)sizeof(kopt_step)) {
        laid_out_otherwise("kopt_optimizer or kopt_step", result);
        return;
    }
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
    for (i = 0; i < PAINT && area[i] == 0xA5; i++) {
    }
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
        if (before != 0)
            puts("note: it is not the default: the program is linked with -Ofast, -ffast-math or "
                 "-funsafe-math-optimizations\n      (crtfastmath.o). The library does not mind; one-element updates "
                 "and your own code run in it.");
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
        for (e = DOWN; can_disturb && e <= ZERO + 1; e++)
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
