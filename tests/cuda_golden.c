/* cuda_golden.c - the lines of tests/golden.txt, made on a GPU: tests/probe.c, whose steps, conversions, norms, clipped
   values, compressions and reductions come from kahan_opt_cuda.cuh. Ranges of a step, functions of one element and
   state blocks stay on the CPU: both take turns with the same state. Linked with the object that nvcc made. */
#define KAHAN_OPT_IMPLEMENTATION
#define KAHAN_OPT_VMATH
#include "../kahan_opt.h"
#include "../kahan_opt_cuda.cuh"

#include "cuda_device.h"

/* The probe has all its arrays in one pool. The pool's image on the GPU is exchanged before and after each call. */
static unsigned char *pool, *image, *saved, *expected;
static size_t pool_size;

static void begin_with(void *memory, size_t size) {
    pool = memory, pool_size = size;
    image = device_new(size), saved = malloc(size), expected = malloc(size);
}
static void *on_device(const void *p) { return p ? image + ((const unsigned char *)p - pool) : NULL; }
static void upload(void) { to_device(image, pool, pool_size); }
static void download(void) { from_device(pool, image, pool_size); }

/* Of a NaN in these results only that it is one is specified: where the CPU has one as well, its bits are taken.
   Call save(), the CPU's function, keep_results(), and after the GPU's take_payloads(). */
static void save(void) { memcpy(saved, pool, pool_size); }
static void keep_results(void) { memcpy(expected, pool, pool_size), memcpy(pool, saved, pool_size); }
static void take_payloads(void *results, kopt_format f, size_t n) {
    const size_t width = f == KOPT_F32 ? 4 : 2;
    const uint32_t infinity = f == KOPT_F32 ? 0x7F800000u : f == KOPT_BF16 ? 0x7F80u : 0x7C00u;
    const uint32_t magnitude = f == KOPT_F32 ? 0x7FFFFFFFu : 0x7FFFu;
    unsigned char *p = results;
    for (; n; --n, p += width) {
        const unsigned char *const q = expected + (p - pool);
        uint32_t a, b;
        uint16_t c, d;
        memcpy(&c, p, 2), memcpy(&d, q, 2), a = c, b = d;
        if (width == 4) memcpy(&a, p, 4), memcpy(&b, q, 4);
        if ((a & magnitude) > infinity && (b & magnitude) > infinity) memcpy(p, q, width);
    }
}

static kopt_result gpu_step(kopt_optimizer *opt, kopt_tensor *tensor) {
    kopt_tensor t = *tensor;
    const kopt_cuda_group group = {opt, &t, 1};
    kopt_counts *const counts = device_new(sizeof *counts);
    kopt_cuda_status status;
    kopt_cuda_plan plan;
    void *bytes, *device;
    size_t size;
    t.weight = on_device(t.weight), t.grad = on_device(t.grad);
    t.state = on_device(t.state), t.copy = on_device(t.copy);
    if (t.counts) to_device(counts, t.counts, sizeof *counts), t.counts = counts;
    size = kopt_cuda_plan_size(&group, 1);
    bytes = malloc(size), device = device_new(size);
    DONE(kopt_cuda_plan_build(&plan, bytes, size, &group, 1));
    DONE(kopt_cuda_plan_upload(&plan, device, bytes, stream));
    plan.blocks = 2;
    upload();
    DONE(kopt_cuda_plan_step(&plan, stream));
    download();
    from_device(&status, kopt_cuda_plan_status(&plan), sizeof status);
    if (t.counts) from_device(tensor->counts, counts, sizeof *counts);
    opt->step++;
    device_free(counts), device_free(device), free(bytes);
    return (kopt_result)status.result;
}

static kopt_result gpu_convert(void *dst, kopt_format f, const void *src, kopt_format g, size_t n) {
    kopt_result result;
    save(), kopt_convert(dst, f, src, g, n), keep_results();
    upload();
    result = kopt_cuda_convert(on_device(dst), f, on_device(src), g, n, stream);
    download(), take_payloads(dst, f, n);
    return result;
}

static kopt_result gpu_convert_stochastic(void *dst, kopt_format f, const void *src, kopt_format g, size_t n,
                                          kopt_random_key key) {
    kopt_result result;
    save(), kopt_convert_stochastic(dst, f, src, g, n, key), keep_results();
    upload();
    result = kopt_cuda_convert_stochastic(on_device(dst), f, on_device(src), g, n, key, stream);
    download(), take_payloads(dst, f, n);
    return result;
}

/* As the statistics of a plan of one tensor. */
static kopt_result gpu_norm_add(kopt_norm *sum, const void *x, kopt_format f, size_t n) {
    kopt_optimizer o = kopt_sgd(0.1, 0);
    kopt_tensor t = kopt_tensor_of(device_new(2 * n), on_device(x), f, n, NULL, 0);
    const kopt_cuda_group group = {&o, &t, 1};
    kopt_cuda_plan plan;
    kopt_norm norm;
    void *bytes, *device;
    size_t size;
    o.rounding = KOPT_NEAREST;
    size = kopt_cuda_plan_size(&group, 1);
    bytes = malloc(size), device = device_new(size);
    DONE(kopt_cuda_plan_build(&plan, bytes, size, &group, 1));
    DONE(kopt_cuda_plan_upload(&plan, device, bytes, stream));
    upload();
    DONE(kopt_cuda_plan_measure(&plan, stream));
    from_device(&norm, kopt_cuda_plan_norm(&plan, NULL), sizeof norm);
    device_free(t.weight), device_free(device), free(bytes);
    return kopt_norm_merge(sum, &norm);
}

static kopt_result gpu_clip_value(void *x, kopt_format f, size_t n, double limit) {
    kopt_result result;
    upload();
    result = kopt_cuda_clip_value(on_device(x), f, n, limit, stream);
    download();
    return result;
}

static kopt_result gpu_compress(kopt_compressor *c, void *out, size_t size, const void *grad, kopt_format f) {
    kopt_compressor d = *c, e = *c;
    kopt_result result;
    save(), kopt_compress(&e, out, size, grad, f), keep_results();
    d.residual = on_device(c->residual);
    upload();
    result = kopt_cuda_compress(&d, on_device(out), size, on_device(grad), f, NULL, stream);
    download();
    if (c->code == KOPT_BF16 || c->code == KOPT_FP16) take_payloads(out, c->code, c->n);
    c->step = d.step;
    return result;
}

static kopt_result gpu_decompress_add(void *sum, kopt_format f, const void *in, size_t size, kopt_format code, size_t n,
                                      double scale) {
    kopt_result result;
    save(), kopt_decompress_add(sum, f, in, size, code, n, scale), keep_results();
    upload();
    result = kopt_cuda_decompress_add(on_device(sum), f, on_device(in), size, code, n, scale, stream);
    download(), take_payloads(sum, f, n);
    return result;
}

/* The probe's shards are at equal distances. */
static kopt_result gpu_reduce(void *out, kopt_format f, const void *const *shards, size_t count, kopt_format g,
                              size_t n, double scale) {
    const size_t apart = count > 1 ? (size_t)((const unsigned char *)shards[1] - (const unsigned char *)shards[0]) : 0;
    const size_t stride = count > 1 ? apart / (g == KOPT_F32 ? 4 : 2) : n;
    kopt_result result;
    upload();
    result = kopt_cuda_reduce(on_device(out), f, on_device(shards[0]), stride, count, g, n, scale, stream);
    download();
    return result;
}

#define kopt_optimizer_step(o, t, count) gpu_step(o, t)
#define kopt_step_run(s, t) (w.opt.step--, gpu_step(&w.opt, t)) /* kopt_step_begin() has counted */
#define kopt_convert gpu_convert
#define kopt_convert_stochastic gpu_convert_stochastic
#define kopt_norm_add gpu_norm_add
#define kopt_clip_value gpu_clip_value
#define kopt_compress gpu_compress
#define kopt_decompress_add gpu_decompress_add
#define kopt_reduce gpu_reduce
#define PROBE_NO_MAIN
#include "probe.c"

static void put_text(const char *text) { fputs(text, stdout); }

int main(void) {
    if (!device_begin()) return 77;
    begin_with(pool_words, sizeof pool_words);
    probe(put_text);
    return 0;
}
