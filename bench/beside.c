/* What is beside the headline: steps of kahan_opt beside the loop that one would write, in turns; ns per weight, and
   the median of the ratios of the rounds.

     ./build.sh bench beside average     an average of weights (EMA), beside a plain loop of fp32
     ./build.sh bench beside fp16        AdamW with fp16 weights and fp32 moments, beside intrinsics of AVX-512 with FMA
     ./build.sh bench beside odd         lists of tensors of n - 1 weights, beside those of n
     ./build.sh bench beside bytes       AdamW with bf16 weights at 9.02 to 6.03 bytes (bytes.h), beside KAHAN at 10
     ./build.sh bench beside compress    a step of AdamW, beside gradient compression and kopt_state_read()
     ./build.sh bench beside norm        the exact norm of gradients, beside a plain loop of double

   Without a word: all of them. */
#include "timing.h"

#define KAHAN_OPT_IMPLEMENTATION
#include "../kahan_opt.h"
#include "bytes.h"
#include "room.h"

#include <stdio.h>
#include <stdlib.h>

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#define X86 1
#define TARGET(what) __attribute__((target(what)))
#else
#define X86 0
#define TARGET(what)
#endif
#if defined(__GNUC__) && !defined(__clang__)
#define O3 __attribute__((optimize("O3"))) /* the header is compiled by -O2 */
#else
#define O3
#endif

enum { ROUNDS = 31, MOST = 32000000, TENSORS = 64 };

static kopt_optimizer opt;
static kopt_tensor list[TENSORS];
static size_t tensors, n;
static unsigned char *room;
static float *average, *other, *first, *second;
static uint16_t *half_weight, *half_grad;

static void step(void) {
    if (kopt_optimizer_step(&opt, list, tensors) != KOPT_OK) exit(fprintf(stderr, "beside: a step was refused\n"));
}
static void (*ours)(void) = step;

O3 TARGET("avx2") static void average_loop(void) {
    float *const a = average;
    const float *const x = other;
    size_t i;
    for (i = 0; i < n; i++) a[i] += 0.001f * (x[i] - a[i]);
}

#if X86
TARGET("avx512f,avx512bw,avx512vl,f16c") static void fp16_loop(void) {
    const __m512 beta1 = _mm512_set1_ps(0.9f), gain1 = _mm512_set1_ps(0.1f), scale = _mm512_set1_ps(1.2f);
    const __m512 beta2 = _mm512_set1_ps(0.999f), gain2 = _mm512_set1_ps(0.001f), eps = _mm512_set1_ps(1e-8f);
    const __m512 rate = _mm512_set1_ps(-1e-3f), decay = _mm512_set1_ps(-1e-5f);
    size_t i;
    for (i = 0; i < n; i += 16) {
        const __m512 g = _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(half_grad + i)));
        const __m512 w = _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(half_weight + i)));
        const __m512 m = _mm512_fmadd_ps(g, gain1, _mm512_mul_ps(_mm512_loadu_ps(first + i), beta1));
        const __m512 v = _mm512_fmadd_ps(_mm512_mul_ps(g, g), gain2, _mm512_mul_ps(_mm512_loadu_ps(second + i), beta2));
        const __m512 x = _mm512_div_ps(m, _mm512_fmadd_ps(_mm512_sqrt_ps(v), scale, eps));
        const __m512 moved = _mm512_fmadd_ps(x, rate, _mm512_fmadd_ps(w, decay, w));
        _mm256_storeu_si256((__m256i *)(half_weight + i), _mm512_cvtps_ph(moved, 0));
        _mm512_storeu_ps(first + i, m);
        _mm512_storeu_ps(second + i, v);
    }
}
#endif

/* `count` tensors of `length` weights each, all in this format. */
static void make(kopt_optimizer o, kopt_format format, size_t count, size_t length) {
    const size_t size = format == KOPT_F32 ? 4 : 2;
    unsigned char *next = room;
    size_t i, k;
    opt = o, tensors = count, n = count * length;
    for (k = 0; k < count; k++) {
        kopt_tensor *const t = &list[k];
        unsigned char *const weight = take(&next, size * length), *const grad = take(&next, size * length);
        *t = kopt_tensor_of(weight, format, grad, format, length, NULL, 0);
        t->state_size = kopt_state_size(&opt, t);
        t->state = take(&next, t->state_size);
        for (i = 0; i < length; i++) {
            const float w = (float)(i * 2654435761u % 1999) / 1000 - 1, g = (float)(i % 977) / 977 - 0.5f;
            if (kopt_convert(weight + size * i, format, &w, KOPT_F32, 1) != KOPT_OK ||
                kopt_convert(grad + size * i, format, &g, KOPT_F32, 1) != KOPT_OK)
                exit(1);
        }
    }
    if (kopt_list_set_ids(list, count, 0) != KOPT_OK || kopt_state_init(&opt, list, count, NULL) != KOPT_OK)
        exit(fprintf(stderr, "beside: a state was refused\n"));
    average = (float *)take(&next, 4 * n), other = (float *)take(&next, 4 * n);
    if (format == KOPT_F32 && count == 1) average = list[0].weight, other = list[0].grad; /* the same memory */
    first = (float *)take(&next, 4 * n), second = (float *)take(&next, 4 * n);
    half_weight = (uint16_t *)take(&next, 2 * n), half_grad = (uint16_t *)take(&next, 2 * n);
    for (i = 0; i < n; i++) {
        average[i] = first[i] = second[i] = 0;
        other[i] = (float)(i % 977) / 977 - 0.5f;
        half_weight[i] = 0, half_grad[i] = kopt_fp16_from_f32(other[i]);
    }
}

static double turn(void (*run)(void), unsigned repeat) {
    const double begin = cpu_seconds();
    unsigned i;
    for (i = 0; i < repeat; i++) run();
    return (cpu_seconds() - begin) / repeat / (double)n * 1e9;
}

static void compare(const char *name, void (*plain)(void)) {
    const unsigned repeat = (unsigned)(2000000 / n) + 1;
    double time[2][ROUNDS], ratio[ROUNDS];
    int r;
    for (r = 0; r < ROUNDS; r++) {
        time[r % 2][r] = turn(r % 2 ? plain : ours, repeat);
        time[1 - r % 2][r] = turn(r % 2 ? ours : plain, repeat);
        ratio[r] = time[0][r] / time[1][r];
    }
    printf("%-42s %9zu weights %7.3f %7.3f %6.2f\n", name, n, median(time[0], ROUNDS), median(time[1], ROUNDS),
           median(ratio, ROUNDS));
    fflush(stdout);
}

static const size_t lengths[] = {8192, 262144, MOST};

static void bench_average(void) {
    size_t i;
    printf("%-42s %17s %7s %7s %6s\n", "EMA beside a loop of fp32", "", "ours", "loop", "ratio");
    for (i = 0; i < sizeof lengths / sizeof *lengths; i++) {
        make(kopt_ema(0.999), KOPT_F32, 1, lengths[i]), compare("fp32", average_loop);
        make(kopt_ema(0.999), KOPT_BF16, 1, lengths[i]), compare("bf16 KAHAN", average_loop);
    }
}

static void bench_fp16(void) {
#if X86
    size_t i;
    kopt_optimizer o = kopt_adamw(1e-3);
    if (!__builtin_cpu_supports("avx512bw") || !__builtin_cpu_supports("avx512vl")) {
        printf("fp16: this machine has no AVX-512\n");
        return;
    }
    o.first_moment_format = o.second_moment_format = KOPT_F32;
    printf("%-42s %17s %7s %7s %6s\n", "AdamW, fp16, fp32 moments, beside AVX-512", "", "ours", "loop", "ratio");
    for (i = 0; i < sizeof lengths / sizeof *lengths; i++) {
        o.rounding = KOPT_NEAREST, make(o, KOPT_FP16, 1, lengths[i]), compare("nearest", fp16_loop);
        o.rounding = KOPT_KAHAN, make(o, KOPT_FP16, 1, lengths[i]), compare("KAHAN", fp16_loop);
    }
#else
    printf("fp16: this machine has no AVX-512\n");
#endif
}

/* Both lists of 64 tensors are made first: the shorter ones are those of n weights with the last one left out. */
static void odd(const char *name, kopt_optimizer o, kopt_format format, size_t length) {
    double time[2][ROUNDS], ratio[ROUNDS];
    const unsigned repeat = (unsigned)(400000 / (length * TENSORS)) + 1;
    int r, side, k;
    make(o, format, TENSORS, length);
    for (r = 0; r < ROUNDS; r++) {
        for (side = 0; side < 2; side++) {
            const size_t part = length - (size_t)(r + side) % 2;
            for (k = 0; k < TENSORS; k++) list[k].n = part;
            if (kopt_state_init(&opt, list, tensors, NULL) != KOPT_OK) exit(1);
            n = TENSORS * part;
            ours();
            time[(r + side) % 2][r] = turn(ours, repeat);
        }
        ratio[r] = time[1][r] / time[0][r];
    }
    printf("%-42s %9zu weights %7.2f %7.2f %6.2f\n", name, length, median(time[1], ROUNDS), median(time[0], ROUNDS),
           median(ratio, ROUNDS));
}

static void bench_odd(void) {
    static const size_t even[] = {32, 64, 128, 256, 1024};
    kopt_optimizer f32 = kopt_adamw(1e-3);
    size_t i;
    f32.first_moment_format = f32.second_moment_format = KOPT_F32;
    printf("%-42s %17s %7s %7s %6s\n", "tensors of n - 1 weights beside n", "", "n - 1", "n", "ratio");
    for (i = 0; i < sizeof even / sizeof *even; i++) {
        odd("AdamW bf16 KAHAN", kopt_adamw(1e-3), KOPT_BF16, even[i]);
        odd("AdamW fp32", f32, KOPT_F32, even[i]);
    }
}

static kopt_optimizer kahan;
static kopt_tensor kahan_tensor;
static void kahan_step(void) {
    if (kopt_optimizer_step(&kahan, &kahan_tensor, 1) != KOPT_OK) exit(1);
}

static void bench_bytes(void) {
    static const size_t sizes[] = {8192, 16000000};
    unsigned char *const all = room;
    size_t i, k;
    printf("%-42s %17s %7s %7s %6s\n", "AdamW, bf16, beside KAHAN: 10 bytes", "", "this", "KAHAN", "ratio");
    for (k = 0; k < sizeof sizes / sizeof *sizes; k++, room = all) {
        make(kopt_adamw(1e-3), KOPT_BF16, 1, sizes[k]);
        kahan = opt, kahan_tensor = list[0];
        room = all + 32 * sizes[k] + 64 * SPARE;
        for (i = 2; i < ARMS; i++) { /* without fp32, and KAHAN at 10 bytes */
            kopt_optimizer o = kopt_adamw(1e-3);
            o.rounding = arms[i].rounding;
            o.first_moment_format = arms[i].first, o.second_moment_format = arms[i].second;
            make(o, arms[i].weight, 1, sizes[k]), compare(arms[i].name, kahan_step);
        }
    }
}

static kopt_compressor compressor;
static void compress(void) {
    if (kopt_compress(&compressor, first, 2 * n, other, KOPT_F32) != KOPT_OK) exit(1);
}
static void decompress(void) {
    if (kopt_decompress_add(average, KOPT_F32, first, 2 * n, KOPT_Q8, n, 1) != KOPT_OK) exit(1);
}
static void read_weights(void) {
    if (kopt_state_read(&opt, list, KOPT_SLOT_WEIGHT, average) != KOPT_OK) exit(1);
}
static void read_moment(void) {
    if (kopt_state_read(&opt, list, KOPT_SLOT_FIRST_MOMENT, average) != KOPT_OK) exit(1);
}

static void bench_compress(void) {
    kopt_optimizer o = kopt_adamw(1e-3);
    printf("%-42s %17s %7s %7s %6s\n", "a step of AdamW, bf16 KAHAN, beside", "", "step", "this", "ratio");
    make(o, KOPT_BF16, 1, 16384);
    compressor = kopt_compressor_of(KOPT_Q8, half_weight, n), compare("to 8 bits, with residual", compress);
    compressor = kopt_compressor_of(KOPT_Q8, NULL, n), compare("to 8 bits, stochastic", compress);
    compare("8 bits added to a sum", decompress);
    compare("kopt_state_read: weights", read_weights), compare("kopt_state_read: first moment", read_moment);
    o.first_moment_format = o.second_moment_format = KOPT_Q8;
    make(o, KOPT_BF16, 1, 16384), compare("kopt_state_read: 8-bit first moment", read_moment);
}

static kopt_norm norm;
static double sum;
static void norm_ours(void) {
    if (kopt_norm_add_grads(&norm, list, 1) != KOPT_OK) exit(1);
}
O3 TARGET("avx2") static void norm_loop(void) { /* of other, whose values all gradients have */
    double part[16] = {0};
    size_t i, k;
    for (i = 0; i + 16 <= n; i += 16)
        for (k = 0; k < 16; k++) part[k] += (double)other[i + k] * other[i + k];
    for (k = 0; k < 16; k++) sum += part[k];
}

static void bench_norm(void) {
    static const char *const name[] = {"fp32", "bf16", "fp16"};
    size_t i, format;
    printf("%-42s %17s %7s %7s %6s\n", "the norm beside a loop of fp32 in double", "", "ours", "loop", "ratio");
    ours = norm_ours;
    for (i = 0; i < sizeof lengths / sizeof *lengths; i++)
        for (format = 0; format < 3; format++)
            make(kopt_sgd(0.1, 0), (kopt_format)format, 1, lengths[i]), compare(name[format], norm_loop);
    ours = step;
}

int main(int count, char **arguments) {
    const char *const word = count > 1 ? arguments[1] : "";
    if ((room = malloc((size_t)32 * MOST + 64 * SPARE * (size_t)TENSORS)) == NULL) return 1;
    if (*word == 0 || strcmp(word, "average") == 0) bench_average();
    if (*word == 0 || strcmp(word, "fp16") == 0) bench_fp16();
    if (*word == 0 || strcmp(word, "odd") == 0) bench_odd();
    if (*word == 0 || strcmp(word, "bytes") == 0) bench_bytes();
    if (*word == 0 || strcmp(word, "compress") == 0) bench_compress();
    if (*word == 0 || strcmp(word, "norm") == 0) bench_norm();
    return 0;
}
