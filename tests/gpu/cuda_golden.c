/* cuda_golden.c - the lines of bits/golden.txt, made on a GPU: bits/probe.c, whose steps and norms come from
   kahan_opt_cuda.cuh. Ranges of a step, steps with counts, functions of arrays and state blocks stay on the CPU: both
   take turns with the same state. Linked with the object that nvcc made. */
#define KAHAN_OPT_IMPLEMENTATION
#define KAHAN_OPT_VMATH
#include "../../kahan_opt.h"
#include "../../kahan_opt_cuda.cuh"

#include "cuda_device.h"

/* The probe has all its arrays in one pool. The pool's image on the GPU is exchanged before and after each call. */
static unsigned char *pool, *image;
static size_t pool_size;

static void begin_with(void *memory, size_t size) {
    pool = memory, pool_size = size;
    image = device_new(size);
}
static void *on_device(const void *p) { return p ? image + ((const unsigned char *)p - pool) : NULL; }
static void upload(void) { to_device(image, pool, pool_size); }
static void download(void) { from_device(pool, image, pool_size); }

static kopt_result gpu_step(kopt_optimizer *opt, kopt_tensor *tensor) {
    kopt_tensor t = *tensor;
    const kopt_cuda_group group = {opt, &t, 1};
    kopt_cuda_status status;
    kopt_cuda_plan plan;
    void *bytes, *device;
    size_t size;
    if (t.counts) return kopt_optimizer_step(opt, tensor, 1);
    t.weight = on_device(t.weight), t.grad = on_device(t.grad);
    t.state = on_device(t.state), t.copy = on_device(t.copy);
    size = kopt_cuda_plan_size(&group, 1);
    bytes = malloc(size), device = device_new(size);
    DONE(kopt_cuda_plan_build(&plan, bytes, size, &group, 1));
    DONE(kopt_cuda_plan_upload(&plan, device, stream));
    plan.blocks = 2;
    upload();
    DONE(kopt_cuda_plan_step(&plan, stream));
    download();
    from_device(&status, kopt_cuda_plan_status(&plan), sizeof status);
    opt->step++;
    device_free(device), free(bytes);
    return (kopt_result)status.result;
}

/* As the statistics of a plan of one tensor. */
static kopt_result gpu_norm_add(kopt_norm *sum, const void *x, kopt_format f, size_t n) {
    kopt_optimizer o = kopt_sgd(0.1, 0);
    kopt_tensor t = kopt_tensor_of(device_new(2 * n), KOPT_BF16, on_device(x), f, n, NULL, 0);
    const kopt_cuda_group group = {&o, &t, 1};
    kopt_cuda_plan plan;
    kopt_norm norm;
    void *bytes, *device;
    size_t size;
    o.rounding = KOPT_NEAREST;
    size = kopt_cuda_plan_size(&group, 1);
    bytes = malloc(size), device = device_new(size);
    DONE(kopt_cuda_plan_build(&plan, bytes, size, &group, 1));
    DONE(kopt_cuda_plan_upload(&plan, device, stream));
    upload();
    DONE(kopt_cuda_plan_measure(&plan, stream));
    from_device(&norm, kopt_cuda_plan_norm(&plan, NULL), sizeof norm);
    device_free(t.weight), device_free(device), free(bytes);
    return kopt_norm_merge(sum, &norm);
}

#define kopt_optimizer_step(o, t, count) gpu_step(o, t)
#define kopt_step_run(s, t, count) (w.opt.step--, gpu_step(&w.opt, t)) /* kopt_step_begin() has counted */
#define kopt_norm_add gpu_norm_add
#define PROBE_NO_MAIN
#include "../bits/probe.c"

static void put_text(const char *text) { fputs(text, stdout); }

int main(void) {
    if (!device_begin()) return 77;
    begin_with(pool_words, sizeof pool_words);
    probe(put_text);
    return 0;
}
