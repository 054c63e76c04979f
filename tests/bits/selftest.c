/* selftest.c - is the library that YOUR compiler makes with YOUR flags the promised one? In under a second:

       cc YOUR-FLAGS -o selftest tests/bits/selftest.c && ./selftest

   Says in words what is off; exit status 0: nothing. C or C++; needs kahan_opt.h, probe.c and begun.h where they
   are. Give it the KAHAN_OPT_ macros of your program, too.
       -DSELFTEST_LINK   the implementation is in another file, say your program's: link its object. So files that lay
                         structs out differently are found */
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

/* The hashes of tests/bits/golden.txt, in their order; tests/bits/selftest.sh compares. */
/* clang-format off */
static const uint32_t golden[] = {
    0x53a80c85u, 0xa5b613bdu, 0xe901b2b0u, 0x2b137314u, 0xb0bf92d8u, 0x037d2c15u, 0x9852d932u, 0xb398a16du, 0xf2131671u,
    0x98693019u, 0x67caeb12u, 0x355c270cu, 0x4975420cu, 0x3e0dff85u, 0x1eaa7905u, 0x80cd231eu, 0x28b4819cu, 0xba1eb0d7u,
    0x0790af80u, 0xf63deffdu, 0x9bfff5f1u, 0x472f4369u, 0x0d0e58ebu, 0xf97b696cu, 0x8928206au, 0x19a4268du, 0x27ed1bcbu,
    0xb054f0c6u, 0x0b65544cu, 0xe63bb54du, 0x0b33cd0fu, 0xa65ec8e9u, 0x5096de3cu, 0x3ae60a9au, 0xac541bd0u, 0xf928918au,
    0x71341a52u, 0x8032be82u, 0xa5961e24u, 0x9796ac11u, 0x7566a047u, 0x71a2537au, 0x6552f24eu, 0xdd6ee278u, 0x7509ca46u,
    0x420efc82u, 0x069e8ed6u, 0x37839792u, 0xe75deb49u, 0xcdfe6617u, 0x2cd3bc0fu, 0x8b94ee79u, 0x4565cc60u, 0xd03d2623u,
    0x83aa1e11u, 0x93286eebu, 0xb357fd0du, 0x12579d20u, 0xacb892dfu, 0xfff803a0u, 0xfc06d6d5u, 0x007f9fe8u, 0xf0d217d2u,
    0x11764622u, 0x03c5813du, 0x907c77a8u, 0x71c564beu, 0x062c5d6cu, 0x09fa469eu, 0x054bfec3u, 0x5d82a3c8u, 0xfeffa3d6u,
    0xc953a05au, 0x7128f103u, 0x1d942484u, 0xf8b99950u, 0x063480a1u, 0x71553430u, 0xbdef2dc0u, 0xb5513024u, 0x2884ba75u,
    0x74024966u, 0xc0ca9253u, 0x085c6cfbu, 0x2a31d64cu, 0xd6f79ad1u, 0x3f537637u, 0x5efca9d7u, 0x34a5fca3u, 0x581513b3u,
    0xf343a028u, 0x879ed34au, 0xe24c180eu, 0x90e85e93u, 0xfb80d0f0u, 0xc464c75fu, 0xb53ccb3au, 0xeaf9d7c7u, 0x4a168819u,
    0x3ff014b4u, 0x0f348ca3u, 0xe632b27fu, 0x60f5048du, 0x883dc5aeu, 0x732123efu, 0x186c3ab4u, 0x4d985962u, 0x39f356a1u,
    0x094b538eu, 0x44fec53eu, 0xba9515cbu, 0xcf74ada5u, 0xb168149du, 0xef2a399du, 0xff95bd6bu, 0x5b2f41fbu, 0xbce93864u,
    0x3f69b8a4u, 0x479fe650u, 0x267fa6aau, 0xb8b12932u, 0x6d50f992u, 0x35a0d638u, 0xbb020fd5u, 0x898cef37u, 0x3e533a61u,
    0xf291e463u, 0xa73a9799u, 0x361f7965u, 0xf66fd34eu, 0xbef2b789u, 0x6cc980a5u, 0xf5738afeu, 0x0f5b6873u, 0x9415196cu,
    0xeec8e482u, 0x4b438accu, 0x56a3216du, 0xd1f26e17u, 0x587cb4f8u, 0xffb15a42u, 0x95c8990fu, 0xed11c233u, 0xc8c2c75au,
    0xf4aa4f49u, 0x6dbba903u, 0x16fa4438u, 0x85314423u, 0x76a69623u, 0xf5c24c7cu, 0x67fac060u, 0x9545dcfeu, 0x1872e63du,
    0x25cb8905u, 0xac5f1ef7u, 0xa50bb18cu, 0xe022c7e1u, 0x2e8d1c8du, 0x84a00b80u, 0x3ced3e78u, 0x69e8d637u, 0xe3d2d6f4u,
    0x5a90912bu, 0x4ac6fcc2u, 0xee42b3f8u, 0xd81d0169u, 0xd157c00fu, 0x4ecb7b03u, 0xb722898du, 0x9203d195u, 0x9038e5e4u,
    0x2f200514u, 0xa38035ccu, 0x235f5eeeu, 0x5c36241eu, 0xf368d361u, 0x2c929412u, 0xb848cc92u, 0x81506b4eu, 0xa76bb0f1u,
    0xae3d4e1eu, 0x41d29f7eu, 0xbabf6b4du, 0x7747e3b9u, 0x2fa323b3u, 0xb0da72aau, 0x54db967bu, 0x1e19e077u, 0x88613db6u,
    0x9b37b1eeu, 0xd582d006u, 0xf1525a11u, 0x52e956dfu, 0x34aa5e47u, 0x85cd055du, 0xa1c04788u, 0x31bf8107u, 0x6f25d359u,
    0x372302f9u, 0x2c161508u, 0xa23041fdu, 0x4a718f6cu, 0x23c8d47du, 0xeecff106u, 0xd1fb94edu, 0xe36f1839u, 0x3472ec0au,
    0x05827e14u, 0x97be0ce9u, 0x9c6074f9u, 0x43abb57bu, 0x4026521cu, 0xb63ed6f0u, 0x564bd03bu, 0x650d94a4u, 0xe7785be5u,
    0x45d1bfecu, 0x15d7ffefu, 0x18aaab7du, 0x7893a584u, 0x4e72a22eu, 0xa98e82c7u, 0x140ced10u, 0xea2b6afau
};
/* clang-format on */

/* That of vector mathematics, as it has been: tests/unit/test_vmath.c and test_atan.c say that it is right. */
static const uint32_t golden_functions = 0xbc3d7561u;

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
              {"reduce", "the sum of shards"},
              {"functions", "vector mathematics"}};

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
    const uint32_t want = place_in_golden < COUNT(golden) ? golden[place_in_golden] : golden_functions;
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
    if (got != want) differs(group, got, want);
}

#if defined(KAHAN_OPT_VMATH) && !defined(KAHAN_OPT_SLEEF)
/* Vector mathematics, which the probe leaves out: functions, random numbers, and the rules that need it. */
static void compare_functions(void) {
    enum { N = 1024, MANY = 9000 };
    static float x[2][N], y[2][N];
    static kopt_bf16 from[MANY], to[MANY], ones[MANY];
    const kopt_optimizer before = w.opt; /* set_optimizer() knows not all of its fields */
    int f, i, k;
    begin_group("functions", "");
    rarity = 1;
    memset(y, 0, sizeof y);
    fill((byte *)x[0], KOPT_F32, N, 0, 255);
    fill((byte *)x[1], KOPT_F32, N, 117, 16);
    for (f = 0; f < 14; f++) {
        const float *const a = x[f & 1], *const b = x[1 - (f & 1)];
        const kopt_result result = f < 2    ? kopt_vmath_exp(y[0], a, N)
                                   : f < 4  ? kopt_vmath_log(y[0], a, N)
                                   : f < 6  ? kopt_vmath_tanh(y[0], a, N)
                                   : f < 8  ? kopt_vmath_erf(y[0], a, N)
                                   : f < 10 ? kopt_vmath_erfc(y[0], a, N)
                                   : f < 12 ? kopt_vmath_atan2(y[0], a, b, N)
                                            : kopt_vmath_sincospi(y[0], y[1], a, N);
        hash_number((uint32_t)result, 1);
        for (i = 0; i < 2 * N; i++) {
            const uint32_t word = word_of(y[i / N][i % N]);
            hash_number((word & 0x7FFFFFFFu) > 0x7F800000u ? 0x7FC00000u : word, 4);
        }
    }
    for (i = 0; i < MANY; i++) from[i] = (kopt_bf16)(i * 7);
    for (f = 0; f < 13; f++) /* then the slopes of five of them: the backward pass of ones */
        for (k = 1; k < 3; k++) {
            static const kopt_function of[] = {KOPT_FN_TANH, KOPT_FN_SIGMOID, KOPT_FN_SILU, KOPT_FN_GELU,
                                               KOPT_FN_GELU_TANH};
            for (i = 0; i < MANY; i++) ones[i] = k == 1 ? 0x3F80 : 0x3C00;
            hash_number((uint32_t)(f < 8 ? kopt_map(to, from, formats[k], MANY, (kopt_function)f)
                                         : kopt_map_backward(to, ones, from, formats[k], MANY, of[f - 8])),
                        1);
            hash_array((const byte *)to, 2, MANY);
        }
    for (k = 0; k < 3; k++) {
        hash_number((uint32_t)kopt_normal(y, formats[k], N, 0.5, 2, random_key(1, 2, 3, 4)), 1);
        hash_array((const byte *)y, width_of(formats[k]), N);
        hash_number((uint32_t)kopt_uniform(y, formats[k], N, -1, 3, random_key(5, 6, 7, 8)), 1);
        hash_array((const byte *)y, width_of(formats[k]), N);
    }
    w.counts.wanted = w.counts.still = w.counts.stuck = 0;
    for (i = 0; i < 2; i++) {
        w.opt = i == 0 ? kopt_adam_atan2(1.0 / 256) : kopt_smooth_lion(1.0 / 256, 8);
        w.t.weight_format = KOPT_BF16;
        place(KOPT_F32, LONG, 0);
        fill(w.weight, KOPT_BF16, LONG, 118, 12);
        hash_number((uint32_t)kopt_state_init(&w.opt, &w.t, 1, NULL), 1);
        for (k = 0; k < 3; k++) {
            fill(w.grad, KOPT_F32, LONG, 105, 24);
            step(k);
            hash_state();
        }
    }
    w.opt = before;
    end_group();
}
#endif

/* Every group, with the instruction set that is forced. */
static void compare_groups(void) {
    int r, s;
    put_line = compare;
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
#if defined(KAHAN_OPT_VMATH) && !defined(KAHAN_OPT_SLEEF)
    place_in_golden++, compare_functions();
#endif
}

/* ---- Structs, as this file and as the implementation see them ---------------------------------------------------- */

#define SHOW(type, field) printf(" %s %lu", #field, (unsigned long)offsetof(type, field))

static void laid_out_otherwise(const char *structs, kopt_result result) {
    printf("FAILED: %s is laid out otherwise in the implementation (%s)\n        Compile both files with the same "
           "enums (-fshort-enums) and the same copy of kahan_opt.h.\n",
           structs, kopt_result_string(result));
    failures++;
}

static void check_layout(void) {
    enum { FEW = 37 };
    const byte *const h = saved + BEFORE;
    static kopt_step step;
    kopt_tensor t;
    kopt_result result;
    printf("int %lu, enum %lu, size_t %lu, pointer %lu, double %lu bytes; %s-endian\n", (unsigned long)sizeof(int),
           (unsigned long)sizeof(kopt_rule), (unsigned long)sizeof(size_t), (unsigned long)sizeof(void *),
           (unsigned long)sizeof(double), *(const byte *)&one ? "little" : "big");
    printf("kopt_optimizer %lu bytes:", (unsigned long)sizeof(kopt_optimizer));
    SHOW(kopt_optimizer, decay_mode), SHOW(kopt_optimizer, lr), SHOW(kopt_optimizer, beta1), SHOW(kopt_optimizer, seed);
    SHOW(kopt_optimizer, step);
    printf("\nkopt_tensor %lu bytes:", (unsigned long)sizeof(kopt_tensor));
    SHOW(kopt_tensor, n), SHOW(kopt_tensor, state_size), SHOW(kopt_tensor, id), SHOW(kopt_tensor, first_index);
    SHOW(kopt_tensor, counts);
    printf("\nkopt_step %lu bytes\n", (unsigned long)sizeof(kopt_step));
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

    set_optimizer(&rules[4], &stores[3], &moments[1]);
    w.opt.step = 0x01020304u, w.opt.seed = wide(0x05060708u, 0x090A0B0Cu);
    result = kopt_step_begin(&step, &w.opt); /* KOPT_ERROR_VERSION if the sizes of the two structs differ */
    if (result != KOPT_OK || w.opt.step != 0x01020305u) {
        laid_out_otherwise("kopt_optimizer or kopt_tensor", result);
        return;
    }
    /* The header of a tensor in a checkpoint is written from both structs. */
    place(KOPT_BF16, FEW, 0);
    t = w.t;
    t.id = 0x11121314u, t.first_index = 0x15161718u;
    w.opt.step = 0x01020304u;
    fill(w.weight, KOPT_BF16, FEW, 118, 12);
    result = kopt_state_init(&w.opt, &t, 1, NULL);
    if (result == KOPT_OK) result = kopt_save(&w.opt, &t, 1, saved, sizeof saved);
    if (result != KOPT_OK || memcmp(h, "KOPT", 4) != 0 || h[5] != KOPT_RULE_ADAM || h[6] != KOPT_BF16 ||
        (h[7] & 15) != KOPT_KAHAN || h[8] != KOPT_BF16 || h[12] != 0x14 || h[16] != FEW || h[24] != 0x18 ||
        h[32] != 0x0C || h[40] != 0x04) {
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
enum { STACK = 16 * 1024, STACK_SCALAR = 7 * 1024, STACK_PROBE = 1024 };

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
        for (isa = 0; is_isa(isa); isa++)
            if (kopt_isa_usable((kopt_isa)isa)) printf(" %s", kopt_isa_name((kopt_isa)isa));
        printf("\nfloating-point environment at the start: %s\n", name_of(before));
        if (before != 0)
            puts("note: it is not the default: the program is linked with -Ofast, -ffast-math or "
                 "-funsafe-math-optimizations\n      (crtfastmath.o). The library does not mind; one-element updates "
                 "and your own code run in it.");
        for (isa = 0; is_isa(isa); isa++) {
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
                compare_groups();
                if (environment() != disturbed) fail("a call has changed the caller's floating-point environment");
                disturb(0);
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
