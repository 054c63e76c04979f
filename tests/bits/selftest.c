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
    0x53a80c85u, 0xa5b613bdu, 0xe901b2b0u, 0x2b137314u, 0xb0bf92d8u, 0x037d2c15u, 0x9852d932u, 0x3d5d2f77u, 0xc92815cfu,
    0xed848237u, 0xc7c16e6cu, 0x004f5062u, 0xc9b01106u, 0x336c44c7u, 0xc6024d4fu, 0xa89a3780u, 0x47bad1deu, 0x4d4c00d1u,
    0x934b7d76u, 0x2b410387u, 0xed0778a7u, 0x0f30a393u, 0x53585d11u, 0x7579b862u, 0x973363beu, 0xa92795c2u, 0xf993a0a4u,
    0x606fce7au, 0x43d78743u, 0x5c237b76u, 0x9c6efefeu, 0x0084d03au, 0x255971b0u, 0xb5d8e313u, 0x8d6b7ec1u, 0x8b294df1u,
    0x5572718cu, 0x57e58700u, 0x50959ab4u, 0xcc8d43f4u, 0xfb0e3eaeu, 0xd994e4b0u, 0x7be67238u, 0x6ae77c2du, 0x4ef2ffd5u,
    0xe3898376u, 0x86a9d6eau, 0xa34e1c40u, 0xde4281b8u, 0x9f39e4d8u, 0x850ccb9cu, 0xcf7550f4u, 0x46a5997eu, 0xb139e4ddu,
    0x6455e379u, 0x5088dae0u, 0x233962a5u, 0xcc065440u, 0xdebcb93au, 0x71c2cbc1u, 0x8d81f80eu, 0xad51a1c8u, 0x2ba9ccfcu,
    0xace05ad1u, 0x81e1cee5u, 0x5983cf20u, 0x9fd2a8dbu, 0x59a24a0du, 0xb1e04d47u, 0xba67e100u, 0x3b26791du, 0xfd93919du,
    0x1da366c0u, 0x0d670840u, 0xea2397e0u, 0x41532f2cu, 0x42b45a76u, 0x5d75a145u, 0x59c871afu, 0x5eaa3d79u, 0x1126becau,
    0xd2ed5ab2u, 0x6330487eu, 0x64a10588u, 0x77c449dfu, 0x67d94397u, 0xe7437690u, 0x20c8d0bau, 0x643b4c50u, 0x7131f9e3u,
    0xb319efe8u, 0xb2c40267u, 0xcb63da8eu, 0xae3fac70u, 0x696d253bu, 0x71515e05u, 0xef6a8a02u, 0xd41d7e4fu, 0xb15eb917u,
    0x4400fdcau, 0x7797d066u, 0x63863cefu, 0xe5e2aa5du, 0xc571a2dbu, 0xc605e815u, 0x2453b9d5u, 0xffd92b88u, 0x19d99440u,
    0x4dcc7e61u, 0xb7275589u, 0x1e8619f9u, 0x01ff0cdau, 0xb2069406u, 0xbd525e98u, 0x8e623a8bu, 0x2e5cf613u, 0x0dfbe0efu,
    0x590450bfu, 0xa25f3affu, 0x2c6e6f6bu, 0xe75e810fu, 0x93e543f4u, 0x27a95ec6u, 0x88683e47u, 0x5870112cu, 0xec9782ddu,
    0x4a92aa62u, 0x4fe2d492u, 0xa9d92178u, 0x457774d2u, 0x95acd920u, 0x43fa5acbu, 0xad8f2982u, 0xa7e55533u, 0xfd49ff73u,
    0x8202dcc8u, 0x7e4f0723u, 0xacc5ed29u, 0x3bd38bdfu, 0x2c9252e4u, 0x19e5f276u, 0x055c43f4u, 0x23568df0u, 0x63450004u,
    0xc0f354bau, 0xd9c2e346u, 0xe383501au, 0xb3ebfc39u, 0x15519cacu, 0xa63d538cu, 0x08755d86u, 0xbf1fc799u, 0x8a1b6389u,
    0x1a9fa0c7u, 0xa0387fd7u, 0xafda5ef8u, 0x54e2a458u, 0xc802789du, 0x06e80196u, 0xd4db913bu, 0xffca3dc0u, 0x2e91bdd0u,
    0x02322a4fu, 0x8225642au, 0x3bfa88dfu, 0x956a0e3bu, 0xfdabb183u, 0x70dcb1ebu, 0x3eae72e3u, 0x16d685b0u, 0x439ace53u,
    0x25adc7feu, 0x4cb4ae73u, 0x24f43afbu, 0x525c7f07u, 0xc53664bbu, 0x84ffd8c7u, 0x3ae36fa9u, 0xe21535abu, 0x40346523u,
    0x3ceada8du, 0x2634e499u, 0x85f8a33du, 0xff86c1d1u, 0xf8086cccu, 0x2c22db94u, 0x9326e678u, 0x13637c25u, 0x134a83f8u,
    0x4653fde4u, 0x4b032598u, 0x677fb2cbu, 0xb194fc31u, 0xd7cdc0fdu, 0x40c89617u, 0x296fc76eu, 0x7e466905u, 0x100f32a7u,
    0x90ae6cabu, 0x86d9a96au, 0x05fd4747u, 0xd355507eu, 0x9d11c89au, 0x52aff0a1u, 0x81353b39u, 0x3c95d0c7u, 0xfe57e871u,
    0xe2844456u, 0x9d2b462eu, 0x428736b8u, 0xa978d44bu, 0x0880d555u, 0xf4091d8eu, 0x93380e1bu, 0x7b44660fu, 0xe7785be5u,
    0x9c41fe45u, 0x15d7ffefu, 0x18aaab7du, 0x7893a584u, 0x125ced8du, 0xa98e82c7u, 0x140ced10u, 0xea2b6afau, 0x854fe9ddu,
    0x90c746cfu, 0xc73751cdu, 0xeee6221du, 0xaf18de3au, 0x2b963682u, 0x0906f59bu, 0x78c1235du, 0x1aaaf6b9u
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
    for (r = 0; r < COUNT(rules); r++)
        if (pays(&rules[r])) place_in_golden++, probe_feedback(r);
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
        if (!can_disturb) puts("other floating-point environments: not tested");
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
