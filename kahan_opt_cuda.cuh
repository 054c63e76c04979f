/* kahan_opt_cuda.cuh - the steps of kahan_opt.h on a GPU: the same bits, many tensors in one launch - MIT-0 or public
   domain

   DO THIS ONCE: in one .cu file, compiled by nvcc. That file gets a private copy of the parts of kahan_opt.h that it
   needs.

       #define KAHAN_OPT_CUDA_IMPLEMENTATION
       #include "kahan_opt_cuda.cuh"

   QUICK START, from C or C++. tensors is an array of kopt_tensor as on the CPU, but with device addresses; state has
   kopt_state_size() bytes of GPU memory (cudaMalloc).

       int begin(kopt_cuda_plan *plan, const kopt_optimizer *opt, const kopt_tensor *tensors, size_t count) {
           kopt_cuda_group all = {opt, tensors, count};
           size_t size = kopt_cuda_plan_size(&all, 1), i;
           void *bytes = malloc(size), *device = NULL;
           for (i = 0; i < count; i++)
               if (kopt_cuda_state_init(opt, &tensors[i], NULL, NULL) != KOPT_OK) return 0;
           return cudaMalloc(&device, size) == cudaSuccess &&
                  kopt_cuda_plan_build(plan, bytes, size, &all, 1) == KOPT_OK &&
                  kopt_cuda_plan_upload(plan, device, bytes, NULL) == KOPT_OK;
       }

   After each backward pass, on the same stream: kopt_cuda_plan_step(&plan, stream). docs/gpu.md shows graphs, clipping,
   checkpoints, NCCL and PyTorch.

   NAMES              kopt_cuda_plan_X acts on a plan. Every other kopt_cuda_X does on device memory, on a stream, what
                      kopt_X does on the CPU.

   STREAMS            A stream is a cudaStream_t; NULL is the default stream. A function that takes one is asynchronous:
                      it returns when the work is enqueued. Its result is about its arguments and the launch; errors
                      that the GPU finds later are in the status of the plan. Each call with a plan writes the plan, so
                      use a plan and its tensors on one stream at a time: with two, the result is undefined. To change
                      streams, let the new one wait for an event of the old one (cudaEventRecord, cudaStreamWaitEvent).
                      To step on several streams at once, give each a plan with tensors of its own.

   CAPTURE            All of these functions can be captured in a CUDA graph, except three that would undo the training
                      at every replay: kopt_cuda_state_init(), kopt_cuda_state_load() and kopt_cuda_plan_upload(). They
                      refuse a stream that is being captured with KOPT_ERROR_CAPTURE. A captured call keeps its
                      arguments: each replay passes them again, as they were.

   WHAT IT DOES NOT   It never allocates, synchronises, exits or prints, and it never reads or clears the program's CUDA
                      error.

   CONFIGURATION
   KAHAN_OPT_CUDA_IMPLEMENTATION   create the implementation: in one .cu file, before that file includes kahan_opt.h.
   KAHAN_OPT_CUDA_SELF             the name of this file, with quotes, if you renamed it: the file includes itself.

   CONTENTS   PLAN   STEP   STATISTICS   STATE   CONVERSIONS   ACCUMULATION   VECTOR MATHEMATICS   COMPRESSION
              (implementation)   VOCABULARY   KERNELS   PUBLIC FUNCTIONS
*/
#ifndef KOPT_PASS_ /* everything except the vocabulary, for which kahan_opt.h includes this file */
#ifdef __CUDACC__
#pragma nv_diagnostic push
#pragma nv_diag_suppress 177 /* unused static functions */
#endif
#ifndef KAHAN_OPT_CUDA_CUH
#define KAHAN_OPT_CUDA_CUH

#if defined(KAHAN_OPT_STATIC)
#define KOPT_CUDA_API_ static KOPT_UNUSED_
#elif defined(KAHAN_OPT_API)
#define KOPT_CUDA_API_ KAHAN_OPT_API
#else
#define KOPT_CUDA_API_ KOPT_EXTERN_
#endif

/* The implementation needs private parts of kahan_opt.h. It makes them static, so that they do not collide with the
   program's own copy at link time. */
#if defined(KAHAN_OPT_CUDA_IMPLEMENTATION) && !defined(KAHAN_OPT_IMPLEMENTATION)
#ifdef KAHAN_OPT_H
#error "in this file, include kahan_opt_cuda.cuh before kahan_opt.h, or define KAHAN_OPT_IMPLEMENTATION as well"
#endif
#ifdef KAHAN_OPT_API
#undef KAHAN_OPT_API
#endif
#ifndef KAHAN_OPT_STATIC
#define KAHAN_OPT_STATIC
#endif
#define KAHAN_OPT_IMPLEMENTATION
#endif

#ifndef KAHAN_OPT_SELF
#define KAHAN_OPT_SELF "kahan_opt.h"
#endif
#ifndef KAHAN_OPT_CUDA_SELF
#define KAHAN_OPT_CUDA_SELF "kahan_opt_cuda.cuh"
#endif
#include KAHAN_OPT_SELF

/* ---- PLAN: the tensors and their optimizers. Built once on the host, kept on the GPU, used by every step --------- */

/* A parameter group: one optimizer and the tensors that it steps. All pointers in the tensors are device addresses.
   Each group counts its own steps. A tensor that joins later than the others needs a group of its own in a new plan,
   with a copy of their optimizer whose step is 0: see kopt_optimizer_step(). */
typedef struct kopt_cuda_group {
    const kopt_optimizer *opt;
    const kopt_tensor *tensors;
    size_t count;
} kopt_cuda_group;

enum { KOPT_CUDA_KERNELS_ = 28 };

/* A handle: a plain struct that owns no memory. The plan itself is a block of bytes that you keep in GPU memory. */
typedef struct kopt_cuda_plan {
    /* Yours: set them at any time after kopt_cuda_plan_build(). */
    void *device;    /* the plan on the GPU. kopt_cuda_plan_upload() sets it; or copy the bytes and set it yourself   */
    uint32_t blocks; /* upper limit on the thread blocks of a launch; 0: no limit. Does not change results            */
    /* Only read it. */
    size_t size; /* bytes at device                                                                               */
    /* Only the library uses these: their names end in _. */
    size_t groups_, at_tensors_, at_tasks_, at_ratios_, at_rounds_;
    uint32_t width_, grad_format_, first_[KOPT_CUDA_KERNELS_ + 1], stable_, rounds_;
} kopt_cuda_plan;

/* The size of a plan in bytes: about 500 per group, 200 per tensor, 4 per 512 elements. 0 if a group is invalid. */
KOPT_CUDA_API_ size_t kopt_cuda_plan_size(const kopt_cuda_group *groups, size_t count);

/* Checks everything that can be checked without reading device memory, and writes the plan to bytes: size bytes of host
   memory, aligned to 16. Needs no GPU. Keeps no pointer to its arguments. Each group begins at its opt->step. Refuses
   Adam-atan2 and smooth Lion with KOPT_ERROR_OPTION if opt.vmath is not NULL: the functions of a table are host
   functions. In each tensor, counts must be aligned to 8 bytes and stable_scale must be 0 (the GPU measures it itself);
   otherwise KOPT_ERROR_OPTION. A tensor must have fewer than 2^40 elements, with StableAdamW fewer than 2^36 in all its
   shards together, and all tensors of the plan together fewer than 2^40; otherwise KOPT_ERROR_BOUNDS (elements on other
   GPUs are not checked). */
KOPT_CUDA_API_ KOPT_RESULT_ kopt_cuda_plan_build(kopt_cuda_plan *plan, void *bytes, size_t size,
                                                 const kopt_cuda_group *groups, size_t count);

/* Copies the plan, kopt_cuda_plan_size() bytes, to device memory aligned to 16. Do not change bytes until the copy is
   done. KOPT_ERROR_CAPTURE: each replay would set the step counts and options back. */
KOPT_CUDA_API_ KOPT_RESULT_ kopt_cuda_plan_upload(kopt_cuda_plan *plan, void *device, const void *bytes, void *stream);

/* ---- STEP ------------------------------------------------------------------------------------------------------- */

/* Makes one step of every tensor of the plan: counts the step, computes its scalars, and writes weights, state and
   copies. The bits are those of kopt_optimizer_step() for each group. kopt_tensor.counts is a device address, too;
   several tensors may share one. */
KOPT_CUDA_API_ KOPT_RESULT_ kopt_cuda_plan_step(const kopt_cuda_plan *plan, void *stream);

/* kopt_cuda_plan_step() in two calls, for StableAdamW over several GPUs: there all shards of a tensor need the same
   factor. Between the two calls, sum the words at kopt_cuda_plan_ratios(), a device address, as uint64 over all GPUs
   (ncclSum). *words becomes their number, 0 if no tensor has StableAdamW. It must be the same on all GPUs, so all plans
   must list the same tensors (a shard may have no elements). */
KOPT_CUDA_API_ KOPT_RESULT_ kopt_cuda_plan_step_begin(const kopt_cuda_plan *plan, void *stream);
KOPT_CUDA_API_ uint64_t *kopt_cuda_plan_ratios(const kopt_cuda_plan *plan, size_t *words);
KOPT_CUDA_API_ KOPT_RESULT_ kopt_cuda_plan_step_end(const kopt_cuda_plan *plan, void *stream);

/* The settings below hold for all following steps on the stream. They are copied when they are called; in a graph, each
   replay sets the captured values again. */

/* Options. kopt_cuda_plan_set_options() copies them into the plan on the GPU. All zero at first. */
typedef struct kopt_cuda_options {
    int check_finite;        /* 1: skip the step if a gradient is not finite       (needs kopt_cuda_plan_measure())   */
    double max_norm;         /* > 0: clip the norm of all gradients together to it (needs kopt_cuda_plan_measure())   */
    const float *lr;         /* NULL, or the device address of the learning rate of all groups                        */
    const float *loss_scale; /* NULL, or the device address of a number that divides the gradients                    */
    const float *found_inf;  /* NULL, or the device address of a flag: if it is not zero, the step is skipped         */
} kopt_cuda_options;
KOPT_CUDA_API_ KOPT_RESULT_ kopt_cuda_plan_set_options(const kopt_cuda_plan *plan, const kopt_cuda_options *options,
                                                       void *stream);

/* Sets new hyper-parameters of a group, e.g. for a learning rate schedule. Rule, formats, roundings, stable and the
   number of moments must stay the same; otherwise the status says KOPT_ERROR_MISMATCH. Ignores opt->step: the GPU
   counts the steps. */
KOPT_CUDA_API_ KOPT_RESULT_ kopt_cuda_plan_set_optimizer(const kopt_cuda_plan *plan, size_t group,
                                                         const kopt_optimizer *opt, void *stream);

/* Sets the number of steps that all groups have begun so far. */
KOPT_CUDA_API_ KOPT_RESULT_ kopt_cuda_plan_set_step(const kopt_cuda_plan *plan, uint32_t step, void *stream);

/* The device address of the number of steps that a group has begun so far: kopt_optimizer.step. Copy it to the host
   when you need it; kopt_cuda_state_save() does. NULL if there is no such group. */
KOPT_CUDA_API_ const uint32_t *kopt_cuda_plan_steps(const kopt_cuda_plan *plan, size_t group);

/* What the GPU reports. A skipped step changes nothing: no weight, no state, no gradient, no step count. */
typedef struct kopt_cuda_status {
    uint32_t result;       /* a kopt_result: KOPT_OK, or why the last step was refused, as a CPU step would be        */
    uint32_t skipped;      /* 1 if the last step was skipped                                                          */
    uint64_t steps, skips; /* numbers of steps made and skipped since kopt_cuda_plan_upload()                         */
    double norm;           /* of the gradients in memory, unscaled, by the last kopt_cuda_plan_measure() that a step
                              used                                                                                    */
} kopt_cuda_status;

/* The device address of the status. Copy it to the host when you need it. */
KOPT_CUDA_API_ const kopt_cuda_status *kopt_cuda_plan_status(const kopt_cuda_plan *plan);

/* ---- STATISTICS: one pass over all gradients. Exact: the same bits in any order and for any sharding ------------- */

/* Measures all gradients. Call it before each kopt_cuda_plan_step() if the options have check_finite or max_norm;
   without it the step is refused: the status says KOPT_ERROR_STEP. */
KOPT_CUDA_API_ KOPT_RESULT_ kopt_cuda_plan_measure(const kopt_cuda_plan *plan, void *stream);

/* The device address of the result: the kopt_norm of all gradients, bit for bit as from kopt_norm_add(). With several
   GPUs, sum its *words words as uint64 over all GPUs (ncclSum) between kopt_cuda_plan_measure() and
   kopt_cuda_plan_step(). words may be NULL. */
KOPT_CUDA_API_ kopt_norm *kopt_cuda_plan_norm(const kopt_cuda_plan *plan, size_t *words);

/* ---- STATE: blocks on the GPU. They are those of kahan_opt.h, byte for byte. All pointers in a tensor are device
        addresses -------------------------------------------------------------------------------------------------- */

/* kopt_state_init() on device memory: the same block, weights and copy, and the same errors. weights is NULL or the
   device address of n fp32 values. KOPT_ERROR_CAPTURE: each replay would erase the moments. */
KOPT_CUDA_API_ KOPT_RESULT_ kopt_cuda_state_init(const kopt_optimizer *opt, const kopt_tensor *t, const float *weights,
                                                 void *stream);

/* Saving takes two calls. The first copies size bytes of the block, kopt_state_size(), to host memory (page-locked, if
   the host is not to wait for the copy), with the step and the seed of the tensor's group. When the stream has come
   that far (cudaStreamSynchronize), the second seals the copy, as kopt_state_seal() does: it can go to a file. The
   second needs no GPU; opt and t are those of the tensor. Copy the weights yourself, in the same place of the stream.
   KOPT_ERROR_BOUNDS: there is no such group. KOPT_ERROR_SIZE: size is less than 64 (but 0 is valid, and does nothing)
   or more than t->state_size; the second: less than kopt_state_size(). */
KOPT_CUDA_API_ KOPT_RESULT_ kopt_cuda_state_save(const kopt_cuda_plan *plan, size_t group, const kopt_tensor *t,
                                                 void *block, size_t size, void *stream);
KOPT_CUDA_API_ KOPT_RESULT_ kopt_cuda_state_seal(const kopt_optimizer *opt, const kopt_tensor *t, void *block,
                                                 size_t size);

/* Loads a sealed block of size bytes from host memory in place of kopt_cuda_state_init(). Opens it there as
   kopt_state_open() does, with the same errors, which also sets opt->step and opt->seed; then copies it to t->state and
   sets t->copy to the weights. So load the weights first, on the same stream. After an error the block is still sealed
   and opt unchanged. Do not change the block until the copy is done. Then build a plan, which begins at
   opt->step; a plan that exists already needs kopt_cuda_plan_set_optimizer() and kopt_cuda_plan_set_step().
   KOPT_ERROR_CAPTURE: each replay would load the block again. */
KOPT_CUDA_API_ KOPT_RESULT_ kopt_cuda_state_load(kopt_optimizer *opt, const kopt_tensor *t, void *block, size_t size,
                                                 void *stream);

/* ---- CONVERSIONS: kopt_convert() and kopt_convert_stochastic() on device memory ---------------------------------- */

KOPT_CUDA_API_ KOPT_RESULT_ kopt_cuda_convert(void *dst, kopt_format dst_format, const void *src,
                                              kopt_format src_format, size_t n, void *stream);
KOPT_CUDA_API_ KOPT_RESULT_ kopt_cuda_convert_stochastic(void *dst, kopt_format dst_format, const void *src,
                                                         kopt_format src_format, size_t n, kopt_random_key key,
                                                         void *stream);

/* ---- ACCUMULATION AND CLIPPING BY VALUE on device memory. Arrays have any alignment; 16 bytes is fastest --------- */

/* kopt_accumulate() on device memory: sum += grad * scale. The struct a is on the host, its arrays sum and residual are
   on the GPU. grad has a->n values and must not overlap either of them. If counts is NULL, the call itself increments
   a->count and a->step. Otherwise counts is the device address, aligned to 4, of two words that replace a->count and
   a->step. Set both to 0 at first; each addition increments both when the GPU runs it, so that a captured call can be
   replayed. To begin a new sum, set the first to 0 (cudaMemsetAsync). At a count of 2^32 - 1 the call is refused with
   KOPT_ERROR_STEP; if the counts are on the GPU, the addition does nothing and reports no error. */
KOPT_CUDA_API_ KOPT_RESULT_ kopt_cuda_accumulate(kopt_accumulator *a, const void *grad, kopt_format grad_format,
                                                 double scale, uint32_t *counts, void *stream);

/* kopt_accumulator_read() on device memory: out becomes the sum with its residual, a->n fp32 values; zeros while the
   count is 0. */
KOPT_CUDA_API_ KOPT_RESULT_ kopt_cuda_accumulator_read(const kopt_accumulator *a, float *out, const uint32_t *counts,
                                                       void *stream);

/* kopt_clip_value() on device memory, in place: reduces every |x| above limit >= 0 to limit; infinity becomes limit,
   NaN stays. */
KOPT_CUDA_API_ KOPT_RESULT_ kopt_cuda_clip_value(void *x, kopt_format format, size_t n, double limit, void *stream);

#ifdef KAHAN_OPT_VMATH
/* ---- VECTOR MATHEMATICS (with KAHAN_OPT_VMATH) on device memory: kopt_map(), kopt_map_backward() and the functions of
        kopt_vmath_builtin(), with the same bits, no matter which table the host uses. An output may be the same array
        as an input; partial overlap is refused (KOPT_ERROR_OVERLAP) ----------------------------------------------- */

KOPT_CUDA_API_ KOPT_RESULT_ kopt_cuda_vmath_exp(float *out, const float *x, size_t n, void *stream);
KOPT_CUDA_API_ KOPT_RESULT_ kopt_cuda_vmath_log(float *out, const float *x, size_t n, void *stream);
KOPT_CUDA_API_ KOPT_RESULT_ kopt_cuda_vmath_tanh(float *out, const float *x, size_t n, void *stream);
KOPT_CUDA_API_ KOPT_RESULT_ kopt_cuda_vmath_erf(float *out, const float *x, size_t n, void *stream);
KOPT_CUDA_API_ KOPT_RESULT_ kopt_cuda_vmath_erfc(float *out, const float *x, size_t n, void *stream);
KOPT_CUDA_API_ KOPT_RESULT_ kopt_cuda_vmath_atan2(float *out, const float *y, const float *x, size_t n, void *stream);
KOPT_CUDA_API_ KOPT_RESULT_ kopt_cuda_vmath_sincospi(float *sine, float *cosine, const float *x, size_t n,
                                                     void *stream);

/* n values of format (KOPT_BF16 or KOPT_FP16), correctly rounded. */
KOPT_CUDA_API_ KOPT_RESULT_ kopt_cuda_map(kopt_function f, void *out, const void *x, kopt_format format, size_t n,
                                          void *stream);
KOPT_CUDA_API_ KOPT_RESULT_ kopt_cuda_map_backward(kopt_function f, void *dx, const void *dy, const void *x,
                                                   kopt_format format, size_t n, void *stream);
#endif

/* ---- COMPRESSION AND REDUCTION: kopt_compress(), kopt_decompress_add() and kopt_reduce() on device memory; the
        struct c is on the host ------------------------------------------------------------------------------------ */

/* steps is NULL, or the device address of a count that replaces c->step. Set it to 0 at first; each call increments it
   when the GPU runs it, so that a captured call can be replayed. At a count of 2^32 - 1 a call does nothing. */
KOPT_CUDA_API_ KOPT_RESULT_ kopt_cuda_compress(kopt_compressor *c, void *out, size_t out_size, const void *grad,
                                               kopt_format grad_format, uint32_t *steps, void *stream);
KOPT_CUDA_API_ KOPT_RESULT_ kopt_cuda_decompress_add(void *sum, kopt_format format, const void *in, size_t in_size,
                                                     kopt_format code, size_t n, double scale, void *stream);

/* The shards are in one buffer, as an all-to-all leaves them: shard k begins at element k * stride. out may be one of
   the shards if the formats are equal. */
KOPT_CUDA_API_ KOPT_RESULT_ kopt_cuda_reduce(void *out, kopt_format out_format, const void *shards, size_t stride,
                                             size_t count, kopt_format format, size_t n, double scale, void *stream);

#endif /* KAHAN_OPT_CUDA_CUH */

/* ================================================================================================================== */
/* IMPLEMENTATION                                                                                                     */
/* ================================================================================================================== */
#if defined(KAHAN_OPT_CUDA_IMPLEMENTATION) && !defined(KOPT_CUDA_IMPLEMENTED_)
#define KOPT_CUDA_IMPLEMENTED_

#include <cuda_runtime.h>
#ifdef __CUDA_ARCH__
#define KOPT_UNROLL_ _Pragma("unroll")
#define KOPT_ROLL_ _Pragma("unroll 1")
#else
#define KOPT_UNROLL_
#define KOPT_ROLL_
#endif
#define KOPT_CUDA_ALIGNED_ __align__(16)
#define KOPT_CUDA_FN_ static KOPT_FORCE_INLINE_ __device__

/* The kernel section of kahan_opt.h in the vocabulary at the end of this file: one lane, everything inlined, no
   prefetch. Twice: the scalar code (kopt_..._cuda_), which takes any value, and the arithmetic of vectors
   (kopt_..._octet_), which takes ordinary numbers only. */
#undef KOPT_NOINLINE_
#define KOPT_NOINLINE_ KOPT_FORCE_INLINE_
#undef KOPT_PREFETCH_
#define KOPT_PREFETCH_(p) ((void)0)
#define KOPT_PASS_ KOPT_PASS_CUDA_
#include KAHAN_OPT_SELF
#undef KOPT_PASS_
#define KOPT_PASS_ KOPT_PASS_CUDA_OCTET_
#include KAHAN_OPT_SELF
#undef KOPT_PASS_

/* ---- the data structures in GPU memory ---- */

typedef struct KOPT_CUDA_ALIGNED_ kopt_cuda_group_ {
    kopt_scalars_cuda_ k; /* of the current step. Kernels load its first 16 words as vectors */
    uint32_t step_number, unused;
    kopt_step step;
    kopt_optimizer opt;
    uint32_t result;
} kopt_cuda_group_;

/* StableAdamW: the exact sum of the squares of a tensor's ratios, and their number n. 22 words, which may be summed
   over GPUs. */
typedef struct kopt_cuda_ratio_ {
    kopt_norm norm;
    uint64_t n;
} kopt_cuda_ratio_;

typedef struct kopt_cuda_control_ {
    kopt_cuda_options options;
    kopt_cuda_status status;
    kopt_norm norm;
    /* The sums of a pass of the statistics. The launch clears norm, bins and arrived first. */
    uint64_t bins[2][256];
    uint32_t arrived;
    uint32_t ready; /* norm is complete, and no step has used it yet */
    uint32_t skip;
    uint64_t groups;
} kopt_cuda_control_;

/* Element i of a tensor has position x = i + pad. Eight elements whose first position is a multiple of 8 are an octet;
   one thread steps an octet at a time. Except with 8-bit moments, where pad is 0, the position of an element is
   congruent to its global index modulo 256, so the 8 elements of an octet share one Philox block. */
typedef struct KOPT_CUDA_ALIGNED_ kopt_cuda_tensor_ {
    kopt_byte_ *weight, *grad, *residual, *moment[4], *slow, *slow_residual, *copy;
    kopt_byte_ *scale[4]; /* of 8-bit moments. Tensors with 8-bit moments have pad 0 */
    kopt_counts *counts;
    uint64_t pad, end; /* position of the first element, and the position after the last */
    uint64_t complete; /* an octet is complete if the index of its first element, modulo 2^64, is below this */
    uint64_t first;    /* global index of position 0, modulo 2^64 */
    uint32_t id, first_task, group;
    /* base_scale is rate_scale without StableAdamW's factor, which changes with each step. */
    float rate_scale, base_scale;
    uint32_t ratio_plus_1, first_round; /* StableAdamW: index of its ratio + 1, or 0; number of its first round */
    /* natural: the elements of all arrays are aligned to their size; wide: all arrays are aligned for vector loads */
    uint8_t grad_format, copy_format, natural, wide;
    /* 1: the rule is Adam, with stochastic stores of moments and compensation; 2: with nearest ones; 0: all others */
    uint8_t usual;
} kopt_cuda_tensor_;

typedef struct kopt_cuda_arguments_ {
    kopt_cuda_control_ *control;
    const kopt_cuda_group_ *groups;
    kopt_cuda_tensor_ *tensors;
    const uint32_t *tasks;        /* the index of each task's tensor */
    uint32_t first, count, width; /* the tasks of this launch: first, number; positions per task */
    uint32_t grad_format;         /* statistics: the gradient format of all tensors, or 3 if they differ */
    /* StableAdamW: one ratio for each of its tensors; for each round the index of its tensor. */
    kopt_cuda_ratio_ *ratios;
    const uint32_t *rounds;
    uint32_t round_count;
} kopt_cuda_arguments_;

enum { KOPT_THREADS_ = 256, KOPT_WARPS_ = 8, KOPT_WARP_STRIDE_ = 512 /* positions that a warp takes per iteration */ };

/* Hides from the compiler that x keeps its value. So the compiler recomputes or reloads what depends on x and keeps
   nothing of it in registers. */
#define KOPT_CUDA_OPAQUE_(x, letter) asm volatile("" : "+" letter(x))

/* ---- loads and stores ---- */

/* Loads and stores of global memory in PTX, with exactly this width and in exactly this order. */

/* bytes: 8, with alignment 8; or a multiple of 16, with alignment 16. */
KOPT_CUDA_FN_ void kopt_cuda_load_words_(uint32_t *to, const kopt_byte_ *from, size_t bytes) {
    if (bytes == 8) {
        asm volatile("ld.global.v2.u32 {%0, %1}, [%2];" : "=r"(to[0]), "=r"(to[1]) : "l"(from));
    } else {
        KOPT_UNROLL_
        for (size_t i = 0; i < bytes / 16; i++)
            asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                         : "=r"(to[4 * i]), "=r"(to[4 * i + 1]), "=r"(to[4 * i + 2]), "=r"(to[4 * i + 3])
                         : "l"(from + 16 * i));
    }
}

KOPT_CUDA_FN_ void kopt_cuda_store_words_(kopt_byte_ *to, const uint32_t *from, size_t bytes) {
    if (bytes == 8) {
        asm volatile("st.global.v2.u32 [%0], {%1, %2};" : : "l"(to), "r"(from[0]), "r"(from[1]) : "memory");
    } else {
        KOPT_UNROLL_
        for (size_t i = 0; i < bytes / 16; i++)
            asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};"
                         :
                         : "l"(to + 16 * i), "r"(from[4 * i]), "r"(from[4 * i + 1]), "r"(from[4 * i + 2]),
                           "r"(from[4 * i + 3])
                         : "memory");
    }
}

/* Returns an element of 1, 2 or 4 bytes in the low bits. With `natural` it is aligned to its size, otherwise it may
   have any alignment. */
KOPT_CUDA_FN_ uint32_t kopt_cuda_load_one_as_(int natural, const kopt_byte_ *p, size_t size) {
    uint32_t a = 0, byte;
    if (size == 4 && (natural || (reinterpret_cast<uintptr_t>(p) & 3) == 0)) {
        asm volatile("ld.global.u32 %0, [%1];" : "=r"(a) : "l"(p));
    } else if (size == 2 && (natural || (reinterpret_cast<uintptr_t>(p) & 1) == 0)) {
        asm volatile("ld.global.u16 %0, [%1];" : "=r"(a) : "l"(p));
    } else {
        for (size_t i = 0; i < size; i++) {
            asm volatile("ld.global.u8 %0, [%1];" : "=r"(byte) : "l"(p + i));
            a |= byte << (8 * i);
        }
    }
    return a;
}

KOPT_CUDA_FN_ void kopt_cuda_store_one_as_(int natural, kopt_byte_ *p, size_t size, uint32_t a) {
    if (size == 4 && (natural || (reinterpret_cast<uintptr_t>(p) & 3) == 0)) {
        asm volatile("st.global.u32 [%0], %1;" : : "l"(p), "r"(a) : "memory");
    } else if (size == 2 && (natural || (reinterpret_cast<uintptr_t>(p) & 1) == 0)) {
        asm volatile("st.global.u16 [%0], %1;" : : "l"(p), "r"(a) : "memory");
    } else {
        for (size_t i = 0; i < size; i++)
            asm volatile("st.global.u8 [%0], %1;" : : "l"(p + i), "r"(a >> (8 * i)) : "memory");
    }
}

/* Any alignment. */
KOPT_CUDA_FN_ uint32_t kopt_cuda_load_one_(const kopt_byte_ *p, size_t size) {
    return kopt_cuda_load_one_as_(0, p, size);
}
KOPT_CUDA_FN_ void kopt_cuda_store_one_(kopt_byte_ *p, size_t size, uint32_t a) {
    kopt_cuda_store_one_as_(0, p, size, a);
}

/* The part of an array that one thread takes: elements i + skip .. i + n - 1, where 0 <= skip < n <= 8. i is modulo
   2^64: it may be negative, at the beginning of a tensor. */
typedef struct kopt_cuda_part_ {
    uint64_t i;
    int skip, n;
} kopt_cuda_part_;

/* Part number `octet` of an array of n elements whose first element has position pad < 8. */
KOPT_CUDA_FN_ kopt_cuda_part_ kopt_cuda_part_of_(uint64_t n, uint32_t pad, uint64_t octet) {
    const uint64_t remaining = n + pad - 8 * octet;
    kopt_cuda_part_ p;
    p.i = 8 * octet - pad;
    p.skip = octet == 0 ? (int)pad : 0;
    p.n = remaining < 8 ? (int)remaining : 8;
    return p;
}

/* extract: element q of 8 elements that are packed as in memory. insert: sets element q; elements must be set in
   ascending order, because the first element of a word overwrites the word and the others are or-ed into it. */
KOPT_CUDA_FN_ uint32_t kopt_cuda_extract_(const uint32_t *packed, size_t size, int q) {
    if (size == 4) return packed[q];
    return size == 2 ? packed[q >> 1] >> 16 * (q & 1) & 0xFFFFu : packed[q >> 2] >> 8 * (q & 3) & 0xFFu;
}

KOPT_CUDA_FN_ void kopt_cuda_insert_(uint32_t *packed, size_t size, int q, uint32_t a) {
    if (size == 4)
        packed[q] = a;
    else if (size == 2)
        packed[q >> 1] = (q & 1) == 0 ? a : packed[q >> 1] | a << 16;
    else
        packed[q >> 2] = (q & 3) == 0 ? a : packed[q >> 2] | a << 8 * (q & 3);
}

/* Extends a residual to 32 bits: the 1-byte residuals of COMPACT are signed. */
KOPT_CUDA_FN_ uint32_t kopt_cuda_sign_extend_(uint32_t a, size_t size) { return size == 1 ? (a ^ 0x80u) - 0x80u : a; }
KOPT_CUDA_FN_ uint32_t kopt_cuda_extract_signed_(const uint32_t *packed, size_t size, int q) {
    return kopt_cuda_sign_extend_(kopt_cuda_extract_(packed, size, q), size);
}

/* Is the part complete, and aligned for vector loads? 1-byte elements need 4 bytes only: two words are loaded. */
KOPT_CUDA_FN_ int kopt_cuda_wide_part_(const kopt_byte_ *base, size_t size, kopt_cuda_part_ p) {
    const uint64_t address = (uintptr_t)base + p.i * size;
    return p.skip == 0 && p.n == 8 && (address & (size == 1 ? 3 : 15)) == 0;
}

/* Loads a part of an array of elements of 1, 2 or 4 bytes at any alignment, packed; elements outside of the part
   become 0. */
KOPT_CUDA_FN_ void kopt_cuda_load_part_(uint32_t *packed, const kopt_byte_ *base, size_t size, kopt_cuda_part_ p) {
    const kopt_byte_ *const from = base + p.i * size;
    int q;
    if (kopt_cuda_wide_part_(base, size, p)) {
        if (size == 1) {
            packed[0] = kopt_cuda_load_one_as_(1, from, 4);
            packed[1] = kopt_cuda_load_one_as_(1, from + 4, 4);
        } else {
            kopt_cuda_load_words_(packed, from, 8 * size);
        }
        return;
    }
    KOPT_UNROLL_
    for (q = 0; q < 8; q++)
        kopt_cuda_insert_(packed, size, q,
                          p.skip <= q && q < p.n ? kopt_cuda_load_one_(from + (uint64_t)q * size, size) : 0);
}

KOPT_CUDA_FN_ void kopt_cuda_store_part_(kopt_byte_ *base, size_t size, kopt_cuda_part_ p, const uint32_t *packed) {
    kopt_byte_ *const to = base + p.i * size;
    int q;
    if (kopt_cuda_wide_part_(base, size, p)) {
        if (size == 1) {
            kopt_cuda_store_one_as_(1, to, 4, packed[0]);
            kopt_cuda_store_one_as_(1, to + 4, 4, packed[1]);
        } else {
            kopt_cuda_store_words_(to, packed, 8 * size);
        }
        return;
    }
    KOPT_UNROLL_
    for (q = 0; q < 8; q++)
        if (p.skip <= q && q < p.n)
            kopt_cuda_store_one_(to + (uint64_t)q * size, size, kopt_cuda_extract_(packed, size, q));
}

/* ---- random bits ---- */

/* r (see kopt_random_combine_) of the 8 elements from global index e on, for any e: they may belong to two Philox
   blocks, because an array may begin anywhere. */
KOPT_CUDA_FN_ void kopt_cuda_random_across_(uint32_t r[8], const kopt_philox_key_ *key, uint64_t e) {
    uint32_t w[8];
    int q;
    kopt_philox_cuda_(w, key, kopt_philox_block_(e));
    kopt_philox_cuda_(w + 4, key, kopt_philox_block_(e + 7));
    KOPT_UNROLL_
    for (q = 0; q < 6; q++) w[q] = (e & 4) != 0 ? w[q + 2] : w[q];
    KOPT_UNROLL_
    for (q = 0; q < 5; q++) w[q] = (e & 2) != 0 ? w[q + 1] : w[q];
    KOPT_UNROLL_
    for (q = 0; q < 8; q++) { /* the word of element e + q; if e + q is odd, its halves change places */
        const uint32_t halves = (e & 1) != 0 ? w[(q + 1) >> 1] : w[q >> 1];
        r[q] =
            kopt_random_combine_(((e ^ (uint32_t)q) & 1) != 0 ? halves >> 16 | halves << 16 : halves, e + (uint64_t)q);
    }
}

/* r of 8 elements, for any e; faster if e is a multiple of 8. */
KOPT_CUDA_FN_ void kopt_cuda_random_octet_(uint32_t r[8], const kopt_philox_key_ *key, uint64_t e) {
    if ((e & 7) == 0) {
        uint32_t w[4];
        int q;
        kopt_philox_cuda_(w, key, kopt_philox_block_(e));
        KOPT_UNROLL_
        for (q = 0; q < 8; q++)
            r[q] = kopt_random_combine_((q & 1) != 0 ? w[q >> 1] >> 16 | w[q >> 1] << 16 : w[q >> 1], e);
    } else {
        kopt_cuda_random_across_(r, key, e);
    }
}

/* r of one element. */
KOPT_CUDA_FN_ uint32_t kopt_cuda_random_one_(const kopt_philox_key_ *key, uint64_t e) {
    uint32_t w[4], halves;
    kopt_philox_cuda_(w, key, kopt_philox_block_(e));
    halves = (e & 4) != 0 ? ((e & 2) != 0 ? w[3] : w[2]) : ((e & 2) != 0 ? w[1] : w[0]);
    return kopt_random_combine_((e & 1) != 0 ? halves >> 16 | halves << 16 : halves, e);
}

/* ---- 8-bit moments: a warp steps the 256 elements of a block, which share a scale. First its lanes decode the moments
        and step; the new moments (of means of squares: their roots) of complete octets stay in registers, all others
        wait in slots in shared memory. When the largest magnitudes are known, the lanes encode the new moments ---- */

/* Words per moment. Element p of a block is in slot p + p / 32, so that the lanes use different memory banks. */
enum { KOPT_SLOTS_ = 256 + 8 };

typedef struct kopt_cuda_block_ {
    uint32_t *slots;     /* KOPT_SLOTS_ for each moment */
    uint64_t first;      /* index of the block's first element */
    uint32_t largest[4]; /* of each moment: the bits of the largest magnitude in the slots */
} kopt_cuda_block_;

/* The 8-bit code of x. If stochastic, r is a 16-bit random number. */
KOPT_CUDA_FN_ uint32_t kopt_cuda_encode_(float x, uint32_t scale, int square, int stochastic, uint32_t r) {
    const float y = kopt_mul_cuda_(x, kopt_inverse_scale_q8_cuda_(scale, square));
    return kopt_encode_q8_scalar_cuda_(kopt_codes_are_zero_(scale) ? 0 : y, square,
                                       stochastic ? r : 0x8000u); /* code 0 if the scale is 0 */
}

/* The number that an 8-bit code stands for; the code is sign-extended. */
KOPT_CUDA_FN_ float kopt_cuda_decode_(uint32_t code, uint32_t scale, int square) {
    float y = kopt_decode_q8_cuda_(code, square);
    KOPT_OPAQUE_FLOAT_(y); /* see kopt_decode_number_ */
    return kopt_mul_cuda_(y, kopt_as_f32_(scale));
}

/* The bits of the scale of element i's block. */
KOPT_CUDA_FN_ uint32_t kopt_cuda_scale_(const kopt_cuda_tensor_ *t, int m, uint64_t i, int natural) {
    return kopt_cuda_load_one_as_(natural, t->scale[m] + (i >> 8) * 4, 4);
}

/* The bits of an 8-bit moment as fp32; of a mean of squares: of its root. */
KOPT_CUDA_FN_ uint32_t kopt_cuda_moment_(kopt_rule rule, int m, uint32_t code, uint32_t scale) {
    return kopt_as_u32_(kopt_cuda_decode_(kopt_cuda_sign_extend_(code, 1), scale, kopt_is_square_(rule, m)));
}

KOPT_CUDA_FN_ uint32_t *kopt_cuda_slot_(const kopt_cuda_block_ *b, int m, uint64_t i) {
    const uint32_t p = (uint32_t)(i - b->first);
    return b->slots + m * KOPT_SLOTS_ + (p + (p >> 5));
}

KOPT_CUDA_FN_ void kopt_cuda_store_slot_(kopt_cuda_block_ *b, int m, uint64_t i, uint32_t moment) {
    const uint32_t magnitude = moment & 0x7FFFFFFFu;
    *kopt_cuda_slot_(b, m, i) = moment;
    b->largest[m] = magnitude > b->largest[m] ? magnitude : b->largest[m];
}

/* ---- complete octets: the arithmetic of vectors, in registers ---- */

/* A complete octet is loaded, stepped in registers and stored. It is stepped as vectors are on the CPU: as ordinary
   numbers. If one of its numbers is special (docs/numerics.md, section 2), nothing is stored, and the octet is stepped
   element by element, as are the incomplete octets at both ends of a tensor. */

/* Loads 8 elements of 1, 2 or 4 bytes, packed as in memory. The elements are aligned to their size. */
KOPT_CUDA_FN_ void kopt_cuda_load_octet_(int wide, uint32_t *packed, const kopt_byte_ *p, size_t size) {
    size_t i;
    if (wide || ((uintptr_t)p & (size == 1 ? 7 : 15)) == 0) {
        kopt_cuda_load_words_(packed, p, 8 * size);
    } else if (size == 4 || ((uintptr_t)p & 3) == 0) {
        KOPT_UNROLL_
        for (i = 0; i < 2 * size; i++) packed[i] = kopt_cuda_load_one_as_(1, p + 4 * i, 4);
    } else {
        KOPT_UNROLL_
        for (i = 0; i < 8; i++) kopt_cuda_insert_(packed, size, (int)i, kopt_cuda_load_one_as_(1, p + i * size, size));
    }
}

KOPT_CUDA_FN_ void kopt_cuda_store_octet_(int wide, kopt_byte_ *p, size_t size, const uint32_t *packed) {
    size_t i;
    if (wide || ((uintptr_t)p & (size == 1 ? 7 : 15)) == 0) {
        kopt_cuda_store_words_(p, packed, 8 * size);
    } else if (size == 4 || ((uintptr_t)p & 3) == 0) {
        KOPT_UNROLL_
        for (i = 0; i < 2 * size; i++) kopt_cuda_store_one_as_(1, p + 4 * i, 4, packed[i]);
    } else {
        KOPT_UNROLL_
        for (i = 0; i < 8; i++)
            kopt_cuda_store_one_as_(1, p + i * size, size, kopt_cuda_extract_(packed, size, (int)i));
    }
}

/* The random numbers of a pair of elements, 2 * k and 2 * k + 1 of an octet (see kopt_random_combine_): number 0, and
   2 * other, each modulo 2^16 with any bits above. word: that of the pair. multiplier: of the octet. */
typedef struct kopt_cuda_random_ {
    uint32_t number[2], stride[2];
} kopt_cuda_random_;

KOPT_CUDA_FN_ kopt_cuda_random_ kopt_cuda_random_of_(uint32_t word, uint32_t multiplier) {
    kopt_cuda_random_ r;
    const uint32_t low = word & 0xFFFFu, high = word >> 16;
    r.stride[0] = 2 * high;
    r.stride[1] = 2 * low;
    r.number[0] = low + high * (2 * multiplier);
    r.number[1] = high + low * (2 * multiplier);
    return r;
}

/* Stores the copy of an octet of fp32 weights. */
KOPT_CUDA_FN_ void kopt_cuda_store_copy_(const kopt_cuda_tensor_ *t, uint64_t i, const uint32_t *weight) {
    uint32_t copy[4];
    int q;
    if (t->copy_format == KOPT_F32) {
        kopt_cuda_store_octet_(0, t->copy + i * 4, 4, weight);
        return;
    }
    KOPT_UNROLL_
    for (q = 0; q < 8; q++)
        kopt_cuda_insert_(copy, 2, q, kopt_round_nearest16_cuda_(kopt_as_f32_(weight[q]), (kopt_format)t->copy_format));
    kopt_cuda_store_octet_(0, t->copy + i * 2, 2, copy);
}

/* An octet of each array that a step writes, packed. */
typedef struct kopt_cuda_octet_ {
    uint32_t weight[8], residual[4], moment[2][8];
} kopt_cuda_octet_;

/* Puts the upper halves of the results for elements 2 * k (low) and 2 * k + 1 (high) into a word. */
KOPT_CUDA_FN_ uint32_t kopt_cuda_pack_(uint32_t low, uint32_t high) { return __byte_perm(low, high, 0x7632); }

/* A bf16 in the upper half, as a step stores it: +0 below 2^-126. */
KOPT_CUDA_FN_ uint32_t kopt_cuda_flush_bf16_(uint32_t u) { return kopt_flush_octet_(u); }

/* Loads an octet of each array; buffered moments are not in memory. */
KOPT_CUDA_FN_ void kopt_cuda_load_arrays_(int wide, kopt_cuda_octet_ *x, const kopt_cuda_tensor_ *t, kopt_kind_ kind,
                                          uint64_t i) {
    const size_t weight_size = kopt_bytes_of_(kind.weight), moment_size = kopt_bytes_of_(kind.moment);
    const size_t residual_size = kopt_bytes_of_residual_(kind.weight, kind.rounding);
    kopt_cuda_load_octet_(wide, x->weight, t->weight + i * weight_size, weight_size);
    if (residual_size != 0) kopt_cuda_load_octet_(wide, x->residual, t->residual + i * residual_size, residual_size);
    if (!kind.buffered && kind.moment_count > 0)
        kopt_cuda_load_octet_(wide, x->moment[0], t->moment[0] + i * moment_size, moment_size);
    if (!kind.buffered && kind.moment_count > 1)
        kopt_cuda_load_octet_(wide, x->moment[1], t->moment[1] + i * moment_size, moment_size);
}

KOPT_CUDA_FN_ void kopt_cuda_store_arrays_(int wide, const kopt_cuda_octet_ *x, const kopt_cuda_tensor_ *t,
                                           kopt_kind_ kind, uint64_t i, int moments_only) {
    const size_t weight_size = kopt_bytes_of_(kind.weight), moment_size = kopt_bytes_of_(kind.moment);
    const size_t residual_size = kopt_bytes_of_residual_(kind.weight, kind.rounding);
    if (!moments_only) {
        kopt_cuda_store_octet_(wide, t->weight + i * weight_size, weight_size, x->weight);
        if (residual_size != 0)
            kopt_cuda_store_octet_(wide, t->residual + i * residual_size, residual_size, x->residual);
    }
    if (!kind.buffered && kind.moment_count > 0)
        kopt_cuda_store_octet_(wide, t->moment[0] + i * moment_size, moment_size, x->moment[0]);
    if (!kind.buffered && kind.moment_count > 1)
        kopt_cuda_store_octet_(wide, t->moment[1] + i * moment_size, moment_size, x->moment[1]);
}

/* Loads the gradients of an octet as fp32. Each format has a load of its own: otherwise nvcc converts from all formats
   and selects. */
KOPT_CUDA_FN_ void kopt_cuda_load_grads_(int wide, kopt_vf32_octet_ g[8], const kopt_cuda_tensor_ *t, uint64_t i) {
    uint32_t packed[8];
    int q;
    if (t->grad_format == KOPT_BF16) {
        kopt_cuda_load_octet_(wide, packed, t->grad + i * 2, 2);
        KOPT_UNROLL_
        for (q = 0; q < 8; q++) g[q] = kopt_widen_octet_(kopt_cuda_extract_(packed, 2, q), KOPT_BF16);
    } else if (t->grad_format == KOPT_FP16) {
        kopt_cuda_load_octet_(wide, packed, t->grad + i * 2, 2);
        KOPT_UNROLL_
        for (q = 0; q < 8; q++) g[q] = kopt_widen_octet_(kopt_cuda_extract_(packed, 2, q), KOPT_FP16);
    } else {
        kopt_cuda_load_octet_(wide, packed, t->grad + i * 4, 4);
        KOPT_UNROLL_
        for (q = 0; q < 8; q++) g[q] = packed[q];
    }
}

/* rule_function, which has scalar code only. */
KOPT_CUDA_FN_ kopt_vf32_octet_ kopt_cuda_rule_function_(kopt_kind_ kind, const kopt_cuda_group_ *group,
                                                        kopt_vf32_octet_ x, kopt_vf32_octet_ y) {
    return kopt_as_u32_(kopt_rule_function_cuda_(kind, &group->k, kopt_as_f32_(x), kopt_as_f32_(y)));
}

KOPT_ROUNDINGS_UP_TO_(KOPT_EXACT, kopt_cuda_step_octet_)
/* Both stages of the 8 elements of an octet, in registers. w: the words of its Philox block, with the octet's
   multiplier. buffer: NULL, or moments in fp32 (of means of squares the roots), in which case kind.buffered is 1.
   largest: the largest magnitudes, before rounding, of weights and of moments. */
KOPT_CUDA_FN_ void kopt_cuda_step_octet_(kopt_cuda_octet_ *x, const kopt_vf32_octet_ g[8], kopt_kind_ kind,
                                         const kopt_cuda_group_ *group, const kopt_scalars_octet_ *k,
                                         const uint32_t w[4], uint32_t multiplier, kopt_vf32_octet_ (*buffer)[8],
                                         uint32_t largest[2]) {
    const size_t weight_size = kopt_bytes_of_(kind.weight), moment_size = kopt_bytes_of_(kind.moment);
    const size_t residual_size = kopt_bytes_of_residual_(kind.weight, kind.rounding);
    const kopt_constants_octet_ c = kopt_make_constants_octet_();
    uint32_t *const largest_moment = kind.moment == kind.weight ? largest : largest + 1;
    int q, m, half;
    KOPT_UNROLL_
    for (q = 0; q < 8; q += 2) {
        const kopt_cuda_random_ r = kopt_cuda_random_of_(w[q >> 1], multiplier);
        uint32_t weight[2], residual[2], moment[2][2];
        KOPT_UNROLL_
        for (half = 0; half < 2; half++) {
            const uint32_t number = r.number[half] & 0xFFFFu;
            const uint32_t stored_residual =
                residual_size == 0 ? 0 : kopt_cuda_extract_signed_(x->residual, residual_size, q + half);
            kopt_half_pair_octet_ h;
            kopt_vf32_octet_ compensation, y, update;
            const kopt_vf32_octet_ old = kopt_load_weight_octet_(
                kind, kopt_cuda_extract_(x->weight, weight_size, q + half), stored_residual, &compensation, largest);
            h.moments.m = h.moments.v = 0;
            KOPT_UNROLL_
            for (m = 0; m < 2; m++) {
                kopt_vf32_octet_ value;
                if (m >= kind.moment_count) continue;
                value = kind.buffered
                            ? buffer[m][q + half]
                            : kopt_widen_octet_(kopt_cuda_extract_(x->moment[m], moment_size, q + half), kind.moment);
                value = kopt_square_if_octet_(value, kopt_stores_root_(kind, m));
                if (m == 0) h.moments.m = value;
                if (m == 1) h.moments.v = value;
            }
            update = kopt_direction_half_octet_(kind, k, &c, old, compensation, g[q + half], number, r.stride[half], 0,
                                                2 /* RANDOM_ZERO_EXTENDED_ */, &h, &y);
            *largest_moment = kopt_imax_octet_(*largest_moment, h.largest);
            update = kopt_update_octet_(k, kopt_cuda_rule_function_(kind, group, update, y), old);
            KOPT_UNROLL_
            for (m = 0; m < 2; m++) {
                const int rooted = kopt_stores_root_(kind, m);
                const kopt_vf32_octet_ value =
                    rooted ? kopt_root_at_octet_(h.moments, m) : kopt_moment_at_octet_(h.moments, m);
                if (m >= kind.moment_count) continue;
                if (kind.buffered)
                    buffer[m][q + half] = value;
                else if (kind.moment == KOPT_F32)
                    x->moment[m][q + half] = kopt_flush_f32_octet_(value);
                else
                    moment[m][half] = kind.moment == KOPT_BF16 ? kopt_cuda_flush_bf16_(h.u[m]) : h.u[m];
            }
            if (kind.weight == KOPT_F32) {
                x->weight[q + half] = kopt_flush_f32_octet_(kopt_sub_octet_(old, update));
            } else {
                uint32_t rest = 0, u = kopt_commit_octet_(kind, old, compensation, update, number, &c, &rest, largest);
                if (kind.weight == KOPT_BF16 && kind.rounding < KOPT_COMPACT) u = kopt_cuda_flush_bf16_(u);
                if (kind.weight == KOPT_BF16 && kind.rounding == KOPT_KAHAN) rest = kopt_cuda_flush_bf16_(rest);
                weight[half] = u;
                residual[half] = rest;
            }
        }
        KOPT_UNROLL_
        for (m = 0; m < 2; m++)
            if (m < kind.moment_count && !kind.buffered && kind.moment != KOPT_F32)
                x->moment[m][q >> 1] = kopt_cuda_pack_(moment[m][0], moment[m][1]);
        if (kind.weight != KOPT_F32) x->weight[q >> 1] = kopt_cuda_pack_(weight[0], weight[1]);
        if (residual_size == 2) x->residual[q >> 1] = kopt_cuda_pack_(residual[0], residual[1]);
        if (residual_size == 1) /* the residuals are bytes 0 and 2 of the packed word */
            x->residual[q >> 2] = __byte_perm(x->residual[q >> 2], kopt_cuda_pack_(residual[0], residual[1]),
                                              (q & 2) == 0 ? 0x3264 : 0x6410);
    }
}

/* ---- elements: any kind, any value, any alignment ---- */

/* Both stages for one element. Returns the update, which the weight is reduced by. */
KOPT_CUDA_FN_ float kopt_cuda_step_element_(kopt_kind_ kind, const kopt_scalars_cuda_ *k, kopt_element_cuda_ *e,
                                            uint32_t r) {
    float compensation, y;
    const float w = kopt_load_weight_cuda_(kind, e->weight, e->residual, &compensation, NULL);
    const float x = kopt_direction_cuda_(kind, k, w, compensation, e, r, &y);
    return kopt_commit_element_cuda_(kind, k, kopt_rule_function_cuda_(kind, k, x, y), w, compensation, e, r, k->sync);
}

/* Steps one element from memory to memory. b: the block that receives the new 8-bit moments, or NULL. */
KOPT_CUDA_FN_ void kopt_cuda_element_(const kopt_cuda_tensor_ *t, kopt_kind_ kind, int copies,
                                      const kopt_scalars_cuda_ *scalars, uint64_t i, uint32_t r, kopt_counts *counts,
                                      kopt_cuda_block_ *b) {
    const size_t weight_size = kopt_bytes_of_(kind.weight), grad_size = kopt_bytes_of_(kind.grad);
    const size_t moment_size = kopt_bytes_of_(kind.moment);
    const size_t residual_size = kopt_bytes_of_residual_(kind.weight, kind.rounding);
    const size_t copy_size = t->copy_format == KOPT_F32 ? 4 : 2;
    kopt_scalars_cuda_ k = *scalars;
    kopt_element_cuda_ e, before;
    float update;
    int m;
    k.rate = kopt_mul_cuda_(k.rate, t->rate_scale);
    k.weight_decay = kopt_mul_cuda_(k.weight_decay, t->rate_scale);
    k.use_decay = kopt_as_u32_(k.weight_decay) != 0;
    e.weight = kopt_cuda_load_one_(t->weight + i * weight_size, weight_size);
    e.grad = kopt_cuda_load_one_(t->grad + i * grad_size, grad_size);
    e.residual = e.slow = e.slow_residual = 0;
    if (residual_size != 0)
        e.residual =
            kopt_cuda_sign_extend_(kopt_cuda_load_one_(t->residual + i * residual_size, residual_size), residual_size);
    KOPT_UNROLL_
    for (m = 0; m < 4; m++) {
        e.moment[m] = 0;
        if (m < kind.moment_count && b == NULL)
            e.moment[m] = kopt_cuda_load_one_(t->moment[m] + i * moment_size, moment_size);
        if (m < kind.moment_count && b != NULL)
            e.moment[m] =
                kopt_cuda_moment_(kind.rule, m, kopt_cuda_load_one_(t->moment[m] + i, 1), kopt_cuda_scale_(t, m, i, 0));
    }
    if (k.sync) {
        e.slow = kopt_cuda_load_one_(t->slow + i * weight_size, weight_size);
        if (residual_size != 0)
            e.slow_residual = kopt_cuda_sign_extend_(
                kopt_cuda_load_one_(t->slow_residual + i * residual_size, residual_size), residual_size);
    }
    before = e;
    update = kopt_cuda_step_element_(kind, &k, &e, r);
    kopt_count_element_cuda_(kind, counts, &before, &e, update);
    if (!k.moments_only) {
        kopt_cuda_store_one_(t->weight + i * weight_size, weight_size, e.weight);
        if (residual_size != 0) kopt_cuda_store_one_(t->residual + i * residual_size, residual_size, e.residual);
        if (copies && t->copy != NULL)
            kopt_cuda_store_one_(t->copy + i * copy_size, copy_size,
                                 kopt_encode_copy_cuda_(kind, &e, (kopt_format)t->copy_format));
        if (k.sync) kopt_cuda_store_one_(t->slow + i * weight_size, weight_size, e.weight);
        if (k.sync && residual_size != 0)
            kopt_cuda_store_one_(t->slow_residual + i * residual_size, residual_size, e.residual);
    }
    KOPT_UNROLL_
    for (m = 0; m < 4; m++)
        if (m < kind.moment_count) {
            if (b == NULL)
                kopt_cuda_store_one_(t->moment[m] + i * moment_size, moment_size, e.moment[m]);
            else
                kopt_cuda_store_slot_(b, m, i, e.moment[m]);
        }
    if (k.zero_grad) kopt_cuda_store_one_(t->grad + i * grad_size, grad_size, 0);
}

/* Position x relative to the first position of a task, clamped to 0 .. width. */
KOPT_CUDA_FN_ int kopt_cuda_clamp_(uint64_t x, uint64_t from, int width) {
    return x <= from ? 0 : x - from < (uint64_t)width ? (int)(x - from) : width;
}

/* The kind of a step: the constants of a kernel, and where a constant is negative, the options of the optimizer. 8-bit
   moments count as fp32, because they are stepped in fp32. */
KOPT_CUDA_FN_ kopt_kind_ kopt_cuda_kind_(const kopt_cuda_tensor_ *t, const kopt_step *s, int weight, int moment,
                                         int rounding) {
    kopt_kind_ kind;
    kind.rule = s->rule == KOPT_RADAM || s->rule == KOPT_RANGER ? KOPT_ADAM : s->rule; /* as in kopt_kind_of_() */
    kind.weight = weight < 0 ? s->weight_format : (kopt_format)weight;
    kind.grad = (kopt_format)t->grad_format;
    kind.moment = moment < 0 ? s->moment_format : moment == KOPT_Q8 ? KOPT_F32 : (kopt_format)moment;
    kind.rounding = rounding < 0 ? s->rounding : (kopt_rounding)rounding;
    kind.moment_rounding = s->moment_rounding;
    kind.compensation_rounding = s->compensation_rounding;
    kind.moment_count = s->moment_count;
    kind.nesterov = s->nesterov;
    kind.buffered = moment == KOPT_Q8;
    return kind;
}

KOPT_CUDA_FN_ void kopt_cuda_add_(uint64_t *to, uint64_t x) {
    atomicAdd(reinterpret_cast<unsigned long long *>(to), static_cast<unsigned long long>(x));
}

/* The sum and the maximum over the lanes of a warp, which must all call it. */
KOPT_CUDA_FN_ uint32_t kopt_cuda_warp_sum_(uint32_t x) {
    int distance;
    for (distance = 16; distance > 0; distance >>= 1) x += __shfl_xor_sync(0xFFFFFFFFu, x, distance);
    return x;
}

KOPT_CUDA_FN_ uint32_t kopt_cuda_warp_largest_(uint32_t x) {
    int distance;
    for (distance = 16; distance > 0; distance >>= 1) {
        const uint32_t other = __shfl_xor_sync(0xFFFFFFFFu, x, distance);
        x = other > x ? other : x;
    }
    return x;
}

/* Adds a warp's counts to those of a tensor, if it has any. All lanes of the warp must call it. The general kernels
   always count: a pointer that may be NULL would keep the counts out of registers. */
KOPT_CUDA_FN_ void kopt_cuda_add_counts_(const kopt_cuda_tensor_ *t, const kopt_counts *counts, uint32_t lane) {
    uint32_t wanted, still, stuck;
    if (t->counts == NULL) return;
    wanted = kopt_cuda_warp_sum_((uint32_t)counts->wanted);
    still = kopt_cuda_warp_sum_((uint32_t)counts->still);
    stuck = kopt_cuda_warp_sum_((uint32_t)counts->stuck);
    if (lane != 0) return;
    if (wanted != 0) kopt_cuda_add_(&t->counts->wanted, wanted);
    if (still != 0) kopt_cuda_add_(&t->counts->still, still);
    if (stuck != 0) kopt_cuda_add_(&t->counts->stuck, stuck);
}

/* ---- the steps of one lane ---- */

/* The scalars of a step for octets, with the rates of a tensor. */
KOPT_CUDA_FN_ kopt_scalars_octet_ kopt_cuda_scalars_(const kopt_cuda_tensor_ *t, const kopt_cuda_group_ *g) {
    union {
        uint32_t words[sizeof(kopt_scalars_octet_) / 4];
        kopt_scalars_octet_ k;
    } local;
    size_t i;
    kopt_cuda_load_words_(local.words, (const kopt_byte_ *)(&g->k), 64); /* all that octets use */
    KOPT_UNROLL_
    for (i = 16; i < sizeof local.words / 4; i++) local.words[i] = 0;
    local.k.rate = kopt_mul_octet_(local.k.rate, kopt_as_u32_(t->rate_scale));
    local.k.weight_decay = kopt_mul_octet_(local.k.weight_decay, kopt_as_u32_(t->rate_scale));
    local.k.use_scale = 1; /* the factor 1 changes no number */
    local.k.use_l2 = local.k.l2 != 0;
    local.k.use_decay = local.k.weight_decay != 0;
    local.k.unrectified = g->k.unrectified;
    return local.k;
}

KOPT_RULES_UP_TO_(KOPT_ADAM_ATAN2, kopt_cuda_step_complete_)
/* Steps a complete octet from memory to memory. index: of its tensor; i: of its first element. weight, moment,
   rounding: the constants of the kernel. Returns 0, with nothing stored, if a number is special. Rules are constants,
   and in the usual steps so are the roundings of moments. */
KOPT_CUDA_FN_ int kopt_cuda_step_complete_(const kopt_cuda_arguments_ *a, uint32_t index, int weight, int moment,
                                           int rounding, uint64_t i, const uint32_t w[4], int copies,
                                           kopt_vf32_octet_ (*buffer)[8]) {
    const kopt_cuda_tensor_ *t = a->tensors + index;
    const kopt_cuda_group_ *g = a->groups + t->group;
    const uint32_t multiplier = kopt_random_multiplier_(t->first + t->pad + i);
    kopt_scalars_octet_ k = kopt_cuda_scalars_(t, g);
    kopt_kind_ kind = kopt_cuda_kind_(t, &g->step, weight, moment, rounding), fixed;
    uint32_t largest[2] = {0, 0};
    kopt_cuda_octet_ x;
    kopt_vf32_octet_ grad[8];
    int q;
    if (t->usual) kind.moment_count = 2;
    if (t->wide) {
        kopt_cuda_load_arrays_(1, &x, t, kind, i);
        kopt_cuda_load_grads_(1, grad, t, i);
    } else {
        kopt_cuda_load_arrays_(0, &x, t, kind, i);
        kopt_cuda_load_grads_(0, grad, t, i);
    }
    fixed = kind;
#define KOPT_CUDA_STEP_(constant, count)             \
    fixed.rule = (constant);                         \
    fixed.moment_count = (count);                    \
    if ((constant) == KOPT_ADAM) fixed.nesterov = 0; \
    kopt_cuda_step_octet_(&x, grad, fixed, g, &k, w, multiplier, buffer, largest)
    if (t->usual == 1) {
        fixed.moment_rounding = fixed.compensation_rounding = KOPT_STOCHASTIC;
        k.unrectified = 0;
        KOPT_CUDA_STEP_(KOPT_ADAM, 2);
    } else if (t->usual == 2) {
        fixed.moment_rounding = fixed.compensation_rounding = KOPT_NEAREST;
        k.unrectified = 0;
        KOPT_CUDA_STEP_(KOPT_ADAM, 2);
    } else if (kind.rule == KOPT_ADAM) {
        KOPT_CUDA_STEP_(KOPT_ADAM, 2);
    } else if (kind.rule == KOPT_LION) {
        KOPT_CUDA_STEP_(KOPT_LION, 1);
#ifdef KAHAN_OPT_VMATH
    } else if (kind.rule == KOPT_ADAM_ATAN2) {
        KOPT_CUDA_STEP_(KOPT_ADAM_ATAN2, 2);
#endif
    } else if (kind.moment_count != 0) {
        KOPT_CUDA_STEP_(KOPT_SGD, 1);
    } else {
        KOPT_CUDA_STEP_(KOPT_SGD, 0);
    }
#undef KOPT_CUDA_STEP_
    if (kind.weight != KOPT_F32 && largest[0] > (kind.weight == KOPT_BF16 ? 0x7F7EFFFFu : 0x477FDFFFu)) return 0;
    if (kind.moment != KOPT_F32 && largest[1] > (kind.moment == KOPT_BF16 ? 0x7F7EFFFFu : 0x477FDFFFu)) return 0;
    KOPT_CUDA_OPAQUE_(index, "r"); /* what is used again is loaded again */
    t = a->tensors + index;
    g = a->groups + t->group;
    if (t->wide)
        kopt_cuda_store_arrays_(1, &x, t, kind, i, g->k.moments_only);
    else
        kopt_cuda_store_arrays_(0, &x, t, kind, i, g->k.moments_only);
    if (copies && t->copy != NULL && !g->k.moments_only) kopt_cuda_store_copy_(t, i, x.weight);
    if (g->k.zero_grad) {
        const size_t size = t->grad_format == KOPT_F32 ? 4 : 2;
        KOPT_ROLL_
        for (q = 0; q < 8; q++) kopt_cuda_store_one_as_(1, t->grad + (i + (uint64_t)q) * size, size, 0);
    }
    return 1;
}

/* The number of elements of a tensor. */
KOPT_CUDA_FN_ uint64_t kopt_cuda_n_(const kopt_cuda_tensor_ *t) { return t->end - t->pad; }

/* r of element i of a step. */
KOPT_CUDA_FN_ uint32_t kopt_cuda_step_random_(const kopt_cuda_tensor_ *t, const kopt_cuda_group_ *g, uint64_t i) {
    const kopt_philox_key_ key = kopt_make_philox_key_(g->step.seed, g->step_number, t->id, KOPT_RANDOM_STEP_);
    return kopt_cuda_random_one_(&key, t->first + t->pad + i);
}

/* Steps the elements of the octet at this position one by one, as far as the tensor has them. What they need is loaded
   again for each, which takes fewer registers. */
KOPT_CUDA_FN_ void kopt_cuda_step_octet_slowly_(const kopt_cuda_tensor_ *t, const kopt_cuda_group_ *g, int weight,
                                                int moment, int rounding, uint64_t position, int copies) {
    kopt_counts counts = {0, 0, 0};
    int q;
    KOPT_ROLL_
    for (q = 0; q < 8; q++, position++) {
        KOPT_CUDA_OPAQUE_(t, "l");
        KOPT_CUDA_OPAQUE_(g, "l");
        if (position - t->pad < kopt_cuda_n_(t)) {
            const kopt_kind_ kind = kopt_cuda_kind_(t, &g->step, weight, moment, rounding);
            const uint32_t r = kopt_needs_random_(kind) ? kopt_cuda_step_random_(t, g, position - t->pad) : 0;
            kopt_cuda_element_(t, kind, copies, &g->k, position - t->pad, r, &counts, NULL);
        }
    }
}

/* The position of the first element of an octet of a lane. Octets 2 * k and 2 * k + 1 share a Philox block. */
KOPT_CUDA_FN_ uint64_t kopt_cuda_position_(const kopt_cuda_arguments_ *a, const kopt_cuda_tensor_ *t, uint32_t task,
                                           uint32_t lane, uint32_t octet) {
    return (uint64_t)(a->first + task - t->first_task) * a->width +
           ((octet >> 1) * KOPT_WARP_STRIDE_ + (octet & 1) * 128 + (lane >> 4) * 256 + (lane & 15) * 8);
}

/* All steps of one lane. What an octet needs is loaded again for each octet, which takes fewer registers. */
KOPT_CUDA_FN_ void kopt_cuda_step_lane_(const kopt_cuda_arguments_ *a, uint32_t warp, uint32_t warps, uint32_t lane,
                                        int weight, int moment, int rounding, int copies) {
    uint32_t task;
    if (a->control->skip) return;
    for (task = warp; task < a->count; task += warps) {
        const kopt_cuda_tensor_ *t = a->tensors + a->tasks[a->first + task];
        const kopt_cuda_group_ *g = a->groups + t->group;
        const kopt_kind_ kind = kopt_cuda_kind_(t, &g->step, weight, moment, rounding);
        const int random = kopt_needs_random_(kind);
        if (weight >= 0) {
            uint32_t index = a->tasks[a->first + task];
            uint32_t w[4] = {0, 0, 0, 0}, left = 0, octet; /* left: those that must be stepped element by element */
            KOPT_ROLL_
            for (octet = 0; octet < 2 * a->width / KOPT_WARP_STRIDE_; octet++) {
                uint64_t position;
                KOPT_CUDA_OPAQUE_(index, "r");
                t = a->tensors + index;
                g = a->groups + t->group;
                position = kopt_cuda_position_(a, t, task, lane, octet);
                if (position >= t->end) break;
                if (random && (octet & 1) == 0) {
                    const kopt_philox_key_ key =
                        kopt_make_philox_key_(g->step.seed, g->step_number, t->id, KOPT_RANDOM_STEP_);
                    kopt_philox_cuda_(w, &key, kopt_philox_block_(t->first + position));
                }
                if (position - t->pad >= t->complete ||
                    !kopt_cuda_step_complete_(a, index, weight, moment, rounding, position - t->pad, w, copies, NULL))
                    left |= 1u << octet;
            }
            for (octet = 0; left >> octet != 0; octet++)
                if ((left >> octet & 1) != 0) {
                    t = a->tensors + a->tasks[a->first + task];
                    kopt_cuda_step_octet_slowly_(t, a->groups + t->group, weight, moment, rounding,
                                                 kopt_cuda_position_(a, t, task, lane, octet), copies);
                }
        } else {
            const uint64_t from = (uint64_t)(a->first + task - t->first_task) * a->width;
            const int limit = kopt_cuda_clamp_(t->end, from, (int)a->width);
            const kopt_philox_key_ key = kopt_make_philox_key_(g->step.seed, g->step_number, t->id, KOPT_RANDOM_STEP_);
            kopt_counts counts = {0, 0, 0};
            uint32_t x = lane;
            if (from < t->pad) x += (uint32_t)((t->pad - from + 31 - lane) & ~(uint64_t)31);
            for (; (int)x < limit; x += 32) {
                const uint64_t position = from + x;
                kopt_cuda_element_(t, kind, copies, &g->k, position - t->pad,
                                   random ? kopt_cuda_random_one_(&key, t->first + position) : 0, &counts, NULL);
            }
            kopt_cuda_add_counts_(t, &counts, lane);
        }
    }
}

/* Elements [p, end) of a block, with this stride: steps them, and leaves their moments in the slots. */
KOPT_CUDA_FN_ void kopt_cuda_block_step_(const kopt_cuda_tensor_ *t, const kopt_cuda_group_ *g, kopt_kind_ kind,
                                         uint32_t p, uint32_t end, uint32_t stride, int copies, kopt_counts *counts,
                                         kopt_cuda_block_ *b) {
    KOPT_ROLL_
    for (; p < end; p += stride) {
        KOPT_CUDA_OPAQUE_(t, "l");
        KOPT_CUDA_OPAQUE_(g, "l");
        kopt_cuda_element_(t, kind, copies, &g->k, b->first + p,
                           kopt_needs_random_(kind) ? kopt_cuda_step_random_(t, g, b->first + p) : 0, counts, b);
    }
}

/* The same elements: encodes the moments in the slots. A lane reads the slots that it wrote itself. */
KOPT_CUDA_FN_ void kopt_cuda_block_store_(const kopt_cuda_tensor_ *t, const kopt_cuda_group_ *g, kopt_kind_ kind,
                                          uint32_t p, uint32_t end, uint32_t stride, int moments,
                                          const kopt_cuda_block_ *b) {
    const int stochastic = kind.moment_rounding == KOPT_STOCHASTIC;
    int m;
    KOPT_ROLL_
    for (; p < end; p += stride) {
        const uint64_t i = b->first + p;
        const uint32_t r = stochastic ? kopt_cuda_step_random_(t, g, i) : 0;
        KOPT_UNROLL_
        for (m = 0; m < moments; m++) {
            const int square = kopt_is_square_(kind.rule, m);
            if (m >= kind.moment_count) continue;
            kopt_cuda_store_one_(t->moment[m] + i, 1,
                                 kopt_cuda_encode_(kopt_as_f32_(*kopt_cuda_slot_(b, m, i)),
                                                   kopt_scale_q8_(b->largest[m], square), square,
                                                   kopt_moment_rounding_(kind, m) == KOPT_STOCHASTIC,
                                                   KOPT_RANDOM_STORE(r, (uint32_t)m + 1)));
        }
    }
}

/* Decodes an octet of codes. scale: that of their block. */
KOPT_CUDA_FN_ void kopt_cuda_decode_octet_(kopt_vf32_octet_ *moment, const uint32_t codes[2], uint32_t scale,
                                           int square) {
    int q;
    KOPT_UNROLL_
    for (q = 0; q < 8; q++)
        moment[q] = kopt_mul_octet_(kopt_decode_q8_octet_(kopt_cuda_extract_signed_(codes, 1, q), square), scale);
}

/* Encodes the octets of `count` moments. scale: those of their blocks. w and multiplier as for step_octet. */
KOPT_CUDA_FN_ void kopt_cuda_encode_octets_(uint32_t codes[2][2], const kopt_vf32_octet_ moment[2][8], int count,
                                            kopt_rule rule, const uint32_t scale[2], int stochastic,
                                            const uint32_t w[4], uint32_t multiplier) {
    kopt_vf32_octet_ inverse[2];
    int q, m, half;
    KOPT_UNROLL_
    for (m = 0; m < count; m++) inverse[m] = kopt_inverse_scale_q8_octet_(scale[m], kopt_is_square_(rule, m));
    KOPT_UNROLL_
    for (q = 0; q < 8; q += 2) {
        const kopt_cuda_random_ r = kopt_cuda_random_of_(w[q >> 1], multiplier);
        KOPT_UNROLL_
        for (m = 0; m < count; m++) {
            const int square = kopt_is_square_(rule, m);
            uint32_t u[2], both;
            KOPT_UNROLL_
            for (half = 0; half < 2; half++) {
                const uint32_t number = r.number[half] + ((uint32_t)m + 1) * r.stride[half];
                u[half] = kopt_encode_q8_octet_(kopt_mul_octet_(moment[m][q + half], inverse[m]), square,
                                                stochastic ? number & 0xFFFFu : 0x8000u);
            }
            both = kopt_cuda_pack_(u[0], u[1]);
            if (!square) both |= both >> 8; /* encode_q8 leaves the sign in bit 15: it belongs into bit 7 */
            codes[m][q >> 2] =
                (q & 2) == 0 ? __byte_perm(both, 0, 0x4420) : __byte_perm(codes[m][q >> 2], both, 0x6410);
        }
    }
    KOPT_UNROLL_
    for (m = 0; m < count; m++)
        if (kopt_codes_are_zero_(scale[m])) codes[m][0] = codes[m][1] = 0;
}

/* The same with constants: the rule that most use, and how it rounds. */
KOPT_CUDA_FN_ void kopt_cuda_encode_octets_of_(uint32_t codes[2][2], const kopt_vf32_octet_ moment[2][8],
                                               kopt_kind_ kind, const uint32_t scale[2], const uint32_t w[4],
                                               uint32_t multiplier) {
    const int stochastic = kind.moment_rounding == KOPT_STOCHASTIC;
    if (kind.moment_count == 2 && stochastic)
        kopt_cuda_encode_octets_(codes, moment, 2, KOPT_ADAM, scale, 1, w, multiplier);
    else if (kind.moment_count == 2)
        kopt_cuda_encode_octets_(codes, moment, 2, KOPT_ADAM, scale, 0, w, multiplier);
    else
        kopt_cuda_encode_octets_(codes, moment, 1, KOPT_SGD, scale, stochastic, w, multiplier);
}

/* All steps of one lane with 8-bit moments. An octet is stepped with its moments in registers; the elements of other
   lanes have theirs in slots. */
KOPT_CUDA_FN_ void kopt_cuda_step_blocks_(const kopt_cuda_arguments_ *a, uint32_t warp, uint32_t warps, uint32_t lane,
                                          uint32_t *slots, int weight, int rounding, int copies) {
    const int moments = weight < 0 ? 4 : 2; /* at most */
    uint32_t task;
    if (a->control->skip) return;
    for (task = warp; task < a->count; task += warps) {
        const kopt_cuda_tensor_ *const t = a->tensors + a->tasks[a->first + task];
        const kopt_cuda_group_ *const g = a->groups + t->group;
        const kopt_kind_ kind = kopt_cuda_kind_(t, &g->step, weight, KOPT_Q8, rounding);
        const uint64_t from = (uint64_t)(a->first + task - t->first_task) * a->width;
        const int limit = kopt_cuda_clamp_(t->end, from, (int)a->width);
        const int random = kind.moment_rounding == KOPT_STOCHASTIC || kopt_needs_random_(kind);
        const kopt_philox_key_ key = kopt_make_philox_key_(g->step.seed, g->step_number, t->id, KOPT_RANDOM_STEP_);
        kopt_counts counts = {0, 0, 0};
        uint32_t w[4] = {0, 0, 0, 0};
        uint64_t block = 0; /* the Philox block of w: that of the next octet, too, unless a span of 2048 ends */
        int x, m;
        KOPT_ROLL_
        for (x = 0; x < limit; x += 256) {
            const uint32_t n = (uint32_t)(limit - x < 256 ? limit - x : 256);
            const uint64_t i = from + (uint64_t)x + 8 * lane, e = t->first + i;
            const uint32_t multiplier = kopt_random_multiplier_(e);
            /* is the lane's octet complete, and has it one Philox block? If not, lane by lane, 8 elements one by one */
            const int octet = weight >= 0 && i < t->complete && (e & 7) == 0;
            const uint32_t p = weight < 0 ? lane : 8 * lane, stride = weight < 0 ? 32 : 1;
            const uint32_t end = weight < 0 || 8 * lane + 8 > n ? n : 8 * lane + 8;
            uint32_t codes[2], q;
            kopt_vf32_octet_ moment[2][8];
            int done = 0;
            kopt_cuda_block_ b;
            b.slots = slots;
            b.first = from + (uint64_t)x;
            b.largest[0] = b.largest[1] = b.largest[2] = b.largest[3] = 0;
            __syncwarp(); /* all lanes are done with the previous block */
            if (octet) {
                const uint64_t words = kopt_philox_block_(e);
                if (random && (x == 0 || words != block)) kopt_philox_cuda_(w, &key, words);
                block = words;
                KOPT_UNROLL_
                for (m = 0; m < 2; m++)
                    if (m < kind.moment_count) {
                        kopt_cuda_load_octet_(0, codes, t->moment[m] + i, 1);
                        kopt_cuda_decode_octet_(moment[m], codes, kopt_cuda_scale_(t, m, i, 1),
                                                kopt_is_square_(kind.rule, m));
                    }
                done = kopt_cuda_step_complete_(a, a->tasks[a->first + task], weight, KOPT_Q8, rounding, i, w, copies,
                                                moment);
            }
            if (!done) kopt_cuda_block_step_(t, g, kind, p, end, stride, copies, &counts, &b);
            if (octet) {
                KOPT_UNROLL_
                for (m = 0; m < 2; m++) {
                    KOPT_UNROLL_
                    for (q = 0; q < 8; q++)
                        if (m < kind.moment_count) {
                            if (!done) moment[m][q] = *kopt_cuda_slot_(&b, m, i + q);
                            b.largest[m] = max(b.largest[m], moment[m][q] & 0x7FFFFFFFu);
                        }
                }
            }
            KOPT_UNROLL_
            for (m = 0; m < moments; m++) b.largest[m] = kopt_cuda_warp_largest_(b.largest[m]);
            __syncwarp(); /* all lanes have read the old scales, which lane 0 overwrites now */
            KOPT_UNROLL_
            for (m = 0; m < moments; m++)
                if (lane == 0 && m < kind.moment_count)
                    kopt_cuda_store_one_(t->scale[m] + (b.first >> 8) * 4, 4,
                                         kopt_scale_q8_(b.largest[m], kopt_is_square_(kind.rule, m)));
            if (octet) {
                uint32_t codes[2][2], scale[2];
                KOPT_UNROLL_
                for (m = 0; m < 2; m++) scale[m] = kopt_scale_q8_(b.largest[m], kopt_is_square_(kind.rule, m));
                if (kind.moment_count > 0) kopt_cuda_encode_octets_of_(codes, moment, kind, scale, w, multiplier);
                KOPT_UNROLL_
                for (m = 0; m < 2; m++)
                    if (m < kind.moment_count) kopt_cuda_store_octet_(0, t->moment[m] + i, 1, codes[m]);
            } else {
                kopt_cuda_block_store_(t, g, kind, p, end, stride, moments, &b);
            }
        }
        if (weight < 0) kopt_cuda_add_counts_(t, &counts, lane);
    }
}

/* The kernels, and what is constant in each: the formats of weights and moments, the rounding, whether there are
   copies; -1: the option of the optimizer decides at run time. A tensor takes the first kernel that fits. The last
   kernel of each list fits every tensor; in it a thread steps one element at a time. */
#define KOPT_CUDA_ALL_(KERNEL)                                               \
    KERNEL(0, kahan_bf16, KOPT_BF16, KOPT_BF16, KOPT_KAHAN, 0)               \
    KERNEL(1, exact_bf16, KOPT_BF16, KOPT_BF16, KOPT_EXACT, 0)               \
    KERNEL(2, compact_bf16, KOPT_BF16, KOPT_BF16, KOPT_COMPACT, 0)           \
    KERNEL(3, stochastic_bf16, KOPT_BF16, KOPT_BF16, KOPT_STOCHASTIC, 0)     \
    KERNEL(4, nearest_bf16, KOPT_BF16, KOPT_BF16, KOPT_NEAREST, 0)           \
    KERNEL(5, kahan_bf16_f32, KOPT_BF16, KOPT_F32, KOPT_KAHAN, 0)            \
    KERNEL(6, exact_bf16_f32, KOPT_BF16, KOPT_F32, KOPT_EXACT, 0)            \
    KERNEL(7, compact_bf16_f32, KOPT_BF16, KOPT_F32, KOPT_COMPACT, 0)        \
    KERNEL(8, stochastic_bf16_f32, KOPT_BF16, KOPT_F32, KOPT_STOCHASTIC, 0)  \
    KERNEL(9, nearest_bf16_f32, KOPT_BF16, KOPT_F32, KOPT_NEAREST, 0)        \
    KERNEL(10, kahan_fp16, KOPT_FP16, KOPT_FP16, KOPT_KAHAN, 0)              \
    KERNEL(11, exact_fp16, KOPT_FP16, KOPT_FP16, KOPT_EXACT, 0)              \
    KERNEL(12, compact_fp16, KOPT_FP16, KOPT_FP16, KOPT_COMPACT, 0)          \
    KERNEL(13, stochastic_fp16, KOPT_FP16, KOPT_FP16, KOPT_STOCHASTIC, 0)    \
    KERNEL(14, nearest_fp16, KOPT_FP16, KOPT_FP16, KOPT_NEAREST, 0)          \
    KERNEL(15, kahan_fp16_f32, KOPT_FP16, KOPT_F32, KOPT_KAHAN, 0)           \
    KERNEL(16, exact_fp16_f32, KOPT_FP16, KOPT_F32, KOPT_EXACT, 0)           \
    KERNEL(17, compact_fp16_f32, KOPT_FP16, KOPT_F32, KOPT_COMPACT, 0)       \
    KERNEL(18, stochastic_fp16_f32, KOPT_FP16, KOPT_F32, KOPT_STOCHASTIC, 0) \
    KERNEL(19, nearest_fp16_f32, KOPT_FP16, KOPT_F32, KOPT_NEAREST, 0)       \
    KERNEL(20, f32, KOPT_F32, KOPT_F32, KOPT_NEAREST, 1)                     \
    KERNEL(21, general, -1, -1, -1, 1)
#define KOPT_CUDA_ALL_BLOCKS_(KERNEL)                                      \
    KERNEL(22, kahan_bf16_q8, KOPT_BF16, KOPT_Q8, KOPT_KAHAN, 0)           \
    KERNEL(23, exact_bf16_q8, KOPT_BF16, KOPT_Q8, KOPT_EXACT, 0)           \
    KERNEL(24, compact_bf16_q8, KOPT_BF16, KOPT_Q8, KOPT_COMPACT, 0)       \
    KERNEL(25, stochastic_bf16_q8, KOPT_BF16, KOPT_Q8, KOPT_STOCHASTIC, 0) \
    KERNEL(26, nearest_bf16_q8, KOPT_BF16, KOPT_Q8, KOPT_NEAREST, 0)       \
    KERNEL(27, general_q8, -1, KOPT_Q8, -1, 1)

/* ---- the prologue of a step: its scalars, and whether it is made. One thread block. A pair of lanes takes one group
        at a time; the last warp takes what all groups share ---- */

enum { KOPT_PROLOGUE_PAIRS_ = 64, KOPT_PROLOGUE_THREADS_ = 2 * KOPT_PROLOGUE_PAIRS_ + 32 };

/* What all groups share, in shared memory. */
typedef struct kopt_cuda_shared_ {
    double norm;
    uint32_t result, skip;
} kopt_cuda_shared_;

/* As kopt_clip_coefficient(), for a known norm: max_norm / (norm * |grad_scale| + 1e-6), at most 1. */
KOPT_CUDA_FN_ double kopt_cuda_clip_coefficient_(double norm, double max_norm, double grad_scale) {
    const double scale = kopt_bits_to_f64_(kopt_bits64_(grad_scale) & ~((uint64_t)1 << 63));
    const double clip = kopt_div64_(max_norm, kopt_add64_(kopt_mul64_(norm, scale), KOPT_1E_MINUS_6_));
    return kopt_less64_(clip, 1) ? clip : 1;
}

KOPT_CUDA_FN_ double kopt_cuda_read_(const float *p) {
    double x;
    asm("cvt.f64.f32 %0, %1;" : "=d"(x) : "f"(*p));
    return x;
}

/* As kopt_norm_root_(), by all lanes of a warp. Lane i has limb i. An estimate of the first 54 bits of the root is at
   most 4 off; their exact remainder corrects it. */
KOPT_CUDA_FN_ double kopt_cuda_norm_root_(const kopt_norm *norm, uint32_t lane) {
    const uint32_t all = 0xFFFFFFFFu;
    uint64_t digit = lane < 20 ? norm->digit[lane] : 0, a, b, c, high, low, root;
    uint32_t limbs, below[4], top, shift, i;
    int64_t remainder;
    double estimate;
    if (norm->nonfinite != 0) return kopt_bits_to_f64_((uint64_t)0x7FF << 52);
    while (__any_sync(all, lane < 19 && digit >> 32 != 0)) { /* propagate carries */
        const uint32_t carry = lane < 19 ? (uint32_t)(digit >> 32) : 0;
        if (lane < 19) digit &= 0xFFFFFFFFu;
        digit += __shfl_sync(all, carry, (lane + 31) & 31);
    }
    limbs = __ballot_sync(all, digit != 0);
    if (limbs == 0) return 0;
    top = 31 - (uint32_t)(__clz((int)limbs));
    a = __shfl_sync(all, (unsigned long long)digit, (int)top);
    KOPT_UNROLL_
    for (i = 0; i < 4; i++) /* lanes 28 to 31 have 0 */
        below[i] = __shfl_sync(all, (uint32_t)(digit & 0xFFFFFFFFu), (top + 31 - i) & 31);
    limbs &= top > 4 ? (1u << (top - 4)) - 1 : 0; /* those that follow */
    b = (uint64_t)below[0] << 32 | below[1];
    c = (uint64_t)below[2] << 32 | below[3];
    /* Left-justify the pairs of bits. The first 54 pairs, 108 bits, determine 54 bits of the root. */
    shift = (uint32_t)(__clzll((long long)a)) & ~1u;
    high = a << shift | b >> 1 >> (63 - shift);
    low = b << shift | c >> 1 >> (63 - shift);
    asm("{ .reg .f64 x; cvt.rn.f64.u64 x, %1; sqrt.rn.f64 %0, x; }" : "=d"(estimate) : "l"(high));
    estimate = kopt_mul64_(estimate, 4194304);
    asm("cvt.rzi.u64.f64 %0, %1;" : "=l"(root) : "d"(estimate));
    remainder = (int64_t)((high << 44 | low >> 20) - root * root); /* below 2^58: the high bits cancel */
    while (remainder < 0) remainder += (int64_t)(2 * --root + 1);
    while (remainder > (int64_t)(2 * root)) remainder -= (int64_t)(2 * root++ + 1);
    i = remainder != 0 || (low & 0xFFFFFu) != 0 || c << shift != 0 || limbs != 0; /* is the root inexact? */
    root = (root >> 1) + ((root & 1u) != 0 && (i != 0 || (root & 2u) != 0));
    return kopt_bits_to_f64_(((uint64_t)(16 * top + 32 - shift / 2 + 872) << 52) + root);
}

/* By all lanes of one warp. */
KOPT_CUDA_FN_ void kopt_cuda_share_(kopt_cuda_control_ *c, uint32_t lane, kopt_cuda_shared_ *shared) {
    const float *const found_inf = c->options.found_inf;
    const int needs_stats = c->options.check_finite || c->options.max_norm > 0;
    const int ready = lane == 0 && c->ready != 0; /* the lane that resets it */
    const int nonfinite = c->norm.nonfinite != 0;
    const double norm = needs_stats ? kopt_cuda_norm_root_(&c->norm, lane) : 0;
    if (lane != 0) return;
    shared->norm = norm;
    shared->result = needs_stats && !ready ? KOPT_ERROR_STEP : KOPT_OK;
    shared->skip = (needs_stats && nonfinite) || (found_inf != NULL && (kopt_as_u32_(*found_inf) & 0x7FFFFFFFu) != 0);
    if (needs_stats) c->status.norm = norm;
    c->ready = 0;
}

/* Loads all of the optimizer at once, so that the prologue waits for memory once. */
KOPT_CUDA_FN_ kopt_optimizer kopt_cuda_load_optimizer_(const kopt_cuda_group_ *group) {
    enum { BYTES = offsetof(kopt_cuda_group_, opt) % 16 == 0 && sizeof(kopt_optimizer) % 16 == 0 ? 16 : 8 };
    union {
        uint32_t words[sizeof(kopt_optimizer) / 4];
        kopt_optimizer opt;
    } local;
    size_t i;
    KOPT_UNROLL_
    for (i = 0; i < sizeof local; i += BYTES)
        kopt_cuda_load_words_(local.words + i / 4, (const kopt_byte_ *)(&group->opt) + i, BYTES);
    return local.opt;
}

/* The scalars of a group's step, by a pair of lanes. The norm is not known yet: with max_norm the clip is 0 here.
   Returns 0 if one of the scalars overflows. */
KOPT_CUDA_FN_ int kopt_cuda_begin_(const kopt_cuda_options *options, kopt_optimizer *opt, kopt_step *s) {
    const double clip = opt->clip;
    int valid = 1;
    if (options->lr != NULL) {
        opt->lr = kopt_cuda_read_(options->lr);
        valid = kopt_within_(opt->lr, 0, KOPT_3E38_);
    }
    if (options->loss_scale != NULL)
        opt->grad_scale = kopt_div64_(opt->grad_scale, kopt_cuda_read_(options->loss_scale));
    if (options->max_norm > 0) opt->clip = 0;
    kopt_copy_options_(opt, s);
    valid &= kopt_compute_scalars_(opt, s);
    opt->clip = clip;
    return valid;
}

/* The scale of the gradients with max_norm, as in kopt_compute_scalars_(). Returns 0 if it overflows. */
KOPT_CUDA_FN_ int kopt_cuda_clip_(double norm, double max_norm, const kopt_optimizer *opt, kopt_step *s) {
    const double clip = kopt_mul64_(opt->clip, kopt_cuda_clip_coefficient_(norm, max_norm, opt->grad_scale));
    s->grad_scale = kopt_mul_(kopt_narrow64_(opt->grad_scale), kopt_narrow64_(clip));
    if (opt->maximize) s->grad_scale = kopt_as_f32_(kopt_as_u32_(s->grad_scale) ^ 0x80000000u);
    return kopt_finite_(s->grad_scale);
}

/* What the kernels of a step read, except for the options that never change, which kopt_cuda_plan_build() stores. */
KOPT_CUDA_FN_ void kopt_cuda_store_step_(kopt_cuda_group_ *group, const kopt_step *s, uint32_t result) {
    kopt_scalars_cuda_ k = kopt_splat_step_cuda_(s, s->rate, s->weight_decay);
    /* Not -0: the kernels test the bits of l2 and weight_decay instead of the flags. */
    if (!k.use_l2) k.l2 = 0;
    if (!k.use_decay) k.weight_decay = 0;
    group->k = k;
    group->step_number = s->step;
    group->step.nesterov = s->nesterov;
    group->step.seed = s->seed;
    group->result = result;
}

KOPT_CUDA_FN_ void kopt_cuda_prologue_(kopt_cuda_control_ *c, kopt_cuda_group_ *groups, uint64_t count, uint32_t thread,
                                       kopt_cuda_shared_ *shared) {
    const kopt_cuda_options options = c->options;
    const int shares = thread >= 2 * KOPT_PROLOGUE_PAIRS_;
    uint64_t first = 0, g;
    int failed = 0, skip;
    do {
        kopt_optimizer opt;
        kopt_step s;
        int valid = 1;
        g = first + thread / 2;
        if (shares) {
            if (first == 0) kopt_cuda_share_(c, thread & 31, shared);
        } else if (g < count) {
            opt = kopt_cuda_load_optimizer_(&groups[g]);
            valid = kopt_cuda_begin_(&options, &opt, &s);
        }
        __syncthreads();
        if (!shares && g < count) {
            uint32_t result;
            if (options.max_norm > 0) valid &= kopt_cuda_clip_(shared->norm, options.max_norm, &opt, &s);
            result = opt.step == 0xFFFFFFFFu ? KOPT_ERROR_STEP : valid ? KOPT_OK : KOPT_ERROR_RANGE;
            if ((thread & 1) == 0) kopt_cuda_store_step_(&groups[g], &s, result);
            failed |= result != KOPT_OK;
        }
        first += KOPT_PROLOGUE_PAIRS_;
    } while (first < count);
    failed = __syncthreads_or(failed);
    skip = failed || shared->skip != 0 || shared->result != KOPT_OK;
    if (thread == 0) { /* is the step made? */
        uint32_t result = shared->result;
        for (g = 0; failed && shared->skip == 0 && g < count; g++)
            if (groups[g].result != KOPT_OK) result = groups[g].result;
        c->skip = c->status.skipped = (uint32_t)skip;
        c->status.result = result;
        kopt_cuda_add_(skip ? &c->status.skips : &c->status.steps, 1);
    }
    for (g = thread; g < count && !skip; g += KOPT_PROLOGUE_THREADS_) atomicAdd(&groups[g].opt.step, 1u);
}

/* ---- statistics: a gradient's square, an integer, is added to a counter (slot) in shared memory. There is a bin for
        each exponent, and in it a slot for each of 32 lanes; that of the largest exponent counts infinities and NaNs.
        The exponents are those of the gradients' format if all have the same 16-bit format. Otherwise they are those of
        fp32, two lanes share their slots, and each bin has two for them: for the upper and the lower 24 bits of a
        square ---- */

KOPT_CUDA_FN_ int kopt_cuda_is16_(uint32_t all) { return all == KOPT_BF16 || all == KOPT_FP16; }

/* The address in shared memory of a lane's slot in bin 0. */
KOPT_CUDA_FN_ uint32_t kopt_cuda_column_(const uint32_t *slots, uint32_t lane, uint32_t all) {
    return (uint32_t)(__cvta_generic_to_shared(slots)) + 4 * (kopt_cuda_is16_(all) ? lane : lane & 15);
}

KOPT_CUDA_FN_ void kopt_cuda_add_slot_(uint32_t address, uint32_t x) {
    asm volatile("red.shared.add.u32 [%0], %1;" : : "r"(address), "r"(x) : "memory");
}

/* (x & mask) | bits */
KOPT_CUDA_FN_ uint32_t kopt_cuda_and_or_(uint32_t x, uint32_t mask, uint32_t bits) {
    uint32_t r;
    asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(r) : "r"(x), "r"(mask), "r"(bits));
    return r;
}

/* Adds the square of a gradient to the slots of a column. x: its bits. finite: it is known to be. */
KOPT_CUDA_FN_ void kopt_cuda_add_square16_(uint32_t column, uint32_t x, uint32_t all, int finite) {
    const uint32_t mask = all == KOPT_BF16 ? 0x7F80u : 0x7C00u, one = all == KOPT_BF16 ? 0x80u : 0x400u;
    const uint32_t exponent = x & mask;
    const uint32_t digits =
        kopt_cuda_and_or_(x, one - 1, min(exponent, one)); /* with the leading 1 of a normal number */
    kopt_cuda_add_slot_(column + (all == KOPT_BF16 ? exponent : exponent >> 3), /* 128 bytes per bin */
                        finite || exponent != mask ? digits * digits : 1);
}

KOPT_CUDA_FN_ void kopt_cuda_add_square32_(uint32_t column, uint32_t x, int finite) {
    const uint32_t exponent = x & 0x7F800000u, address = column + (exponent >> 17); /* 64 bytes per bin */
    const uint32_t digits = kopt_cuda_and_or_(x, 0x007FFFFFu, min(exponent, 0x00800000u));
    const uint64_t square = (uint64_t)digits * digits;
    if (!finite && exponent == 0x7F800000u) {
        kopt_cuda_add_slot_(address, 1);
        return;
    }
    kopt_cuda_add_slot_(address, (uint32_t)(square >> 24));
    kopt_cuda_add_slot_(address + 256 * 64, (uint32_t)square & 0xFFFFFFu);
}

/* A gradient of any format, as stored. */
KOPT_CUDA_FN_ void kopt_cuda_add_square_(uint32_t column, uint32_t x, kopt_format format, uint32_t all) {
    if (kopt_cuda_is16_(all))
        kopt_cuda_add_square16_(column, x, all, 0);
    else
        kopt_cuda_add_square32_(column, kopt_as_u32_(kopt_widen_cuda_(x, format)), 0);
}

/* An octet of 16-bit gradients, packed. One test finds infinities and NaNs. */
KOPT_CUDA_FN_ void kopt_cuda_add_octet16_(uint32_t column, const uint32_t packed[4], uint32_t all) {
    const uint32_t masks = all == KOPT_BF16 ? 0x7F807F80u : 0x7C007C00u,
                   ones = all == KOPT_BF16 ? 0x00800080u : 0x04000400u;
    uint32_t carries = 0;
    int q;
    KOPT_UNROLL_
    for (q = 0; q < 4; q++) carries |= (packed[q] & masks) + ones;
    if ((carries & 0x80008000u) != 0) { /* the largest exponent, and 1 */
        KOPT_UNROLL_
        for (q = 0; q < 4; q++) {
            kopt_cuda_add_square16_(column, packed[q], all, 0);
            kopt_cuda_add_square16_(column, packed[q] >> 16, all, 0);
        }
        return;
    }
    KOPT_UNROLL_
    for (q = 0; q < 4; q++) {
        kopt_cuda_add_square16_(column, packed[q], all, 1);
        kopt_cuda_add_square16_(column, packed[q] >> 16, all, 1);
    }
}

/* An octet of fp32 numbers. */
KOPT_CUDA_FN_ void kopt_cuda_add_octet32_(uint32_t column, const uint32_t x[8]) {
    uint32_t largest = 0;
    int q;
    KOPT_UNROLL_
    for (q = 0; q < 8; q++) largest = max(largest, x[q] & 0x7F800000u);
    if (largest == 0x7F800000u) {
        KOPT_UNROLL_
        for (q = 0; q < 8; q++) kopt_cuda_add_square32_(column, x[q], 0);
        return;
    }
    KOPT_UNROLL_
    for (q = 0; q < 8; q++) kopt_cuda_add_square32_(column, x[q], 1);
}

/* Measures one lane's part of a task: at most width / 32 elements. */
KOPT_CUDA_FN_ void kopt_cuda_stats_lane_(const kopt_cuda_arguments_ *a, uint32_t task, uint32_t lane, uint32_t column,
                                         uint32_t all) {
    const kopt_cuda_tensor_ *const t = a->tensors + a->tasks[task];
    const uint64_t from = (uint64_t)(task - t->first_task) * a->width;
    const kopt_format format = (kopt_format)(kopt_cuda_is16_(all) ? all : t->grad_format);
    const size_t size = kopt_bytes_of_(format);
    const uint64_t n = t->end - t->pad, complete = t->natural ? t->complete : 0;
    uint32_t x, half, q;
    KOPT_ROLL_
    for (x = (lane >> 4) * 256 + (lane & 15) * 8; x < a->width; x += KOPT_WARP_STRIDE_) {
        KOPT_UNROLL_
        for (half = 0; half < 2; half++) {
            const uint64_t i = from + x + 128 * half - t->pad;
            uint32_t packed[8];
            if (i < complete && size == 2) {
                kopt_cuda_load_octet_(0, packed, t->grad + i * 2, 2);
                if (kopt_cuda_is16_(all)) {
                    kopt_cuda_add_octet16_(column, packed, all);
                    continue;
                }
                KOPT_UNROLL_
                for (q = 0; q < 8; q++)
                    kopt_cuda_add_square_(column, kopt_cuda_extract_(packed, 2, (int)q), format, all);
            } else if (i < complete) {
                kopt_cuda_load_octet_(0, packed, t->grad + i * 4, 4);
                kopt_cuda_add_octet32_(column, packed);
            } else {
                KOPT_ROLL_
                for (q = 0; q < 8; q++)
                    if (i + q < n)
                        kopt_cuda_add_square_(column, kopt_cuda_load_one_(t->grad + (i + q) * size, size), format, all);
            }
        }
    }
}

KOPT_CUDA_FN_ void kopt_cuda_clear_(uint32_t *slots, uint32_t thread) {
    uint4 *const four = reinterpret_cast<uint4 *>(slots);
    uint32_t i;
    KOPT_UNROLL_
    for (i = 0; i < 256 * 32 / 4; i += KOPT_THREADS_) four[i + thread] = make_uint4(0, 0, 0, 0);
}

/* Adds the slots of bin number `thread` to its two sums, and clears them, four slots at a time. The thread begins at a
   column that depends on its number, so that 8 threads use different memory banks. */
KOPT_CUDA_FN_ void kopt_cuda_collect_(uint64_t sums[2], uint32_t *slots, uint32_t thread, uint32_t all) {
    const uint32_t fours = kopt_cuda_is16_(all) ? 8 : 4, parts = kopt_cuda_is16_(all) ? 1 : 2; /* of a bin */
    uint32_t part, i;
    KOPT_UNROLL_
    for (part = 0; part < parts; part++) {
        uint4 *const bin = reinterpret_cast<uint4 *>(slots) + (256 * part + thread) * fours;
        KOPT_UNROLL_
        for (i = 0; i < fours; i++) {
            uint4 *const slot = bin + ((i + thread) & (fours - 1));
            const uint4 x = *slot;
            *slot = make_uint4(0, 0, 0, 0);
            sums[part] += (uint64_t)x.x + x.y + ((uint64_t)x.z + x.w);
        }
    }
}

/* Adds the two sums of a bin to the digits of a norm. The digits do not overflow with fewer than 2^36 elements in each
   call: a round adds less than 2^40 to a digit. */
KOPT_CUDA_FN_ void kopt_cuda_deliver_(kopt_norm *norm, uint64_t sums[2], uint32_t bin, uint32_t all) {
    uint32_t part, i;
    KOPT_UNROLL_
    for (part = 0; part < 2; part++) {
        const uint32_t place = bin == 0 ? 0 : 2 * bin - 2; /* of squares of fp32, as in kopt_norm_add_values_ */
        const uint32_t bit = all == KOPT_BF16   ? place + 32
                             : all == KOPT_FP16 ? 248 + 2 * (bin == 0 ? 1 : bin)
                             : part == 0        ? place + 24
                                                : place;
        kopt_norm digits;
        if (sums[part] == 0) continue;
        digits.digit[0] = digits.digit[1] = digits.digit[2] = 0;
        if (bin == (all == KOPT_FP16 ? 31u : 255u)) {
            kopt_cuda_add_(&norm->nonfinite, sums[part]);
        } else {
            kopt_norm_accumulate_(&digits, sums[part], bit & 31);
            KOPT_UNROLL_
            for (i = 0; i < 3; i++)
                if (digits.digit[i] != 0) kopt_cuda_add_(&norm->digit[(bit >> 5) + i], digits.digit[i]);
        }
        sums[part] = 0;
    }
}

/* The last thread block to finish makes the norm from the bins, one bin per thread. */
KOPT_CUDA_FN_ void kopt_cuda_arrive_(kopt_cuda_control_ *c, uint32_t blocks, uint32_t thread, uint32_t all) {
    __shared__ uint32_t last;
    uint64_t sums[2];
    __threadfence();
    __syncthreads();
    if (thread == 0) {
        last = atomicAdd(&c->arrived, 1u) == blocks - 1;
        __threadfence();
    }
    __syncthreads();
    if (!last) return;
    sums[0] = c->bins[0][thread];
    sums[1] = c->bins[1][thread];
    kopt_cuda_deliver_(&c->norm, sums, thread, all);
    __threadfence();
    __syncthreads();
    if (thread != 0) return;
    kopt_norm_carry_(&c->norm);
    c->ready = 1;
}

/* A round is 8 tasks, one for each warp. It adds at most 8 * width / 32 = 256 numbers to a slot (with fp32: half the
   width but two lanes). Each number is below 2^24; for fp16 at most 2047^2, for bf16 at most 255^2. So the sum of 1, 4
   or 256 rounds fits into 32 bits. */
KOPT_CUDA_FN_ void kopt_cuda_stats_block_(const kopt_cuda_arguments_ *a, uint32_t all, uint32_t block, uint32_t blocks,
                                          uint32_t thread, uint32_t *slots) {
    const uint32_t max_rounds = all == KOPT_BF16 ? 256 : all == KOPT_FP16 ? 4 : 1;
    const uint32_t column = kopt_cuda_column_(slots, thread & 31, all);
    uint64_t sums[2] = {0, 0}; /* of bin number `thread` */
    uint32_t rounds = 0, base;
    kopt_cuda_clear_(slots, thread);
    __syncthreads();
    for (base = block * KOPT_WARPS_; base < a->count; base += blocks * KOPT_WARPS_) {
        if (base + (thread >> 5) < a->count) kopt_cuda_stats_lane_(a, base + (thread >> 5), thread & 31, column, all);
        if (++rounds == max_rounds) {
            __syncthreads();
            kopt_cuda_collect_(sums, slots, thread, all);
            __syncthreads();
            rounds = 0;
        }
    }
    __syncthreads();
    kopt_cuda_collect_(sums, slots, thread, all);
    if (sums[0] != 0) kopt_cuda_add_(&a->control->bins[0][thread], sums[0]);
    if (sums[1] != 0) kopt_cuda_add_(&a->control->bins[1][thread], sums[1]);
    kopt_cuda_arrive_(a->control, blocks, thread, all);
}

/* ---- StableAdamW: the sum of the squares of each tensor's ratios, before the step. A round is 4096 elements of one
        tensor, 512 for each warp. Its slots are those of the statistics for fp32. Each thread has the two sums of one
        bin, which it keeps until the tensor changes ---- */

enum { KOPT_ROUND_ = KOPT_WARP_STRIDE_ * KOPT_WARPS_ };

/* The ratios of a complete octet. scale: that of its second moments if they have 8 bits. */
KOPT_CUDA_FN_ void kopt_cuda_measure_octet_(const kopt_cuda_tensor_ *t, const kopt_cuda_group_ *g, uint64_t i,
                                            uint32_t ratios[8]) {
    const kopt_format format = g->step.moment_format;
    kopt_scalars_octet_ k = kopt_cuda_scalars_(t, g);
    uint32_t packed[8];
    kopt_vf32_octet_ grad[8], v[8];
    int q;
    kopt_cuda_load_grads_(0, grad, t, i);
    if (format == KOPT_F32) {
        kopt_cuda_load_octet_(0, packed, t->moment[1] + i * 4, 4);
        KOPT_UNROLL_
        for (q = 0; q < 8; q++) v[q] = packed[q];
    } else if (format == KOPT_Q8) {
        kopt_vf32_octet_ roots[8];
        kopt_cuda_load_octet_(0, packed, t->moment[1] + i, 1);
        kopt_cuda_decode_octet_(roots, packed, kopt_cuda_scale_(t, 1, i, 1), 1);
        KOPT_UNROLL_
        for (q = 0; q < 8; q++) v[q] = kopt_square_if_octet_(roots[q], 1);
    } else {
        kopt_cuda_load_octet_(0, packed, t->moment[1] + i * 2, 2);
        if (format == KOPT_BF16) {
            KOPT_UNROLL_
            for (q = 0; q < 8; q++) v[q] = kopt_widen_octet_(kopt_cuda_extract_(packed, 2, q), KOPT_BF16);
        } else {
            KOPT_UNROLL_
            for (q = 0; q < 8; q++)
                v[q] = kopt_square_if_octet_(kopt_widen_octet_(kopt_cuda_extract_(packed, 2, q), KOPT_FP16), 1);
        }
    }
    KOPT_UNROLL_
    for (q = 0; q < 8; q++) ratios[q] = kopt_stable_ratio_of_octet_(&k, kopt_mul_octet_(grad[q], k.grad_scale), v[q]);
}

/* The ratio of one element, at any alignment and with L2. */
KOPT_CUDA_FN_ uint32_t kopt_cuda_measure_element_(const kopt_cuda_tensor_ *t, const kopt_cuda_group_ *g, uint64_t i) {
    kopt_kind_ kind = kopt_cuda_kind_(t, &g->step, -1, g->step.moment_format == KOPT_Q8 ? KOPT_Q8 : -1, -1);
    const size_t weight_size = kopt_bytes_of_(kind.weight), grad_size = kopt_bytes_of_(kind.grad);
    const size_t residual_size = kopt_bytes_of_residual_(kind.weight, kind.rounding);
    kopt_element_cuda_ e;
    e.weight = e.residual = 0;
    e.grad = kopt_cuda_load_one_(t->grad + i * grad_size, grad_size);
    if (kind.buffered)
        e.moment[1] =
            kopt_cuda_moment_(kind.rule, 1, kopt_cuda_load_one_(t->moment[1] + i, 1), kopt_cuda_scale_(t, 1, i, 0));
    else
        e.moment[1] = kopt_cuda_load_one_(t->moment[1] + i * kopt_bytes_of_(kind.moment), kopt_bytes_of_(kind.moment));
    if (g->k.use_l2) e.weight = kopt_cuda_load_one_(t->weight + i * weight_size, weight_size);
    if (g->k.use_l2 && residual_size != 0)
        e.residual =
            kopt_cuda_sign_extend_(kopt_cuda_load_one_(t->residual + i * residual_size, residual_size), residual_size);
    return kopt_as_u32_(kopt_stable_ratio_cuda_(kind, &g->k, &e));
}

KOPT_CUDA_FN_ void kopt_cuda_measure_lane_(const kopt_cuda_arguments_ *a, uint32_t round, uint32_t thread,
                                           uint32_t column) {
    const kopt_cuda_tensor_ *t = a->tensors + a->rounds[round];
    const kopt_cuda_group_ *g = a->groups + t->group;
    const uint64_t n = t->end - t->pad, from = (uint64_t)(round - t->first_round) * KOPT_ROUND_;
    uint64_t i = from + (thread >> 5) * (uint64_t)KOPT_WARP_STRIDE_ + 8 * (thread & 31);
    uint32_t half, q;
    if (from == 0 && thread == 0) a->ratios[t->ratio_plus_1 - 1].n = n;
    KOPT_ROLL_
    for (half = 0; half < 2; half++, i += 256) {
        KOPT_CUDA_OPAQUE_(t, "l");
        KOPT_CUDA_OPAQUE_(g, "l");
        if (i < t->complete && t->natural && !g->k.use_l2) {
            uint32_t ratios[8];
            kopt_cuda_measure_octet_(t, g, i, ratios);
            kopt_cuda_add_octet32_(column, ratios);
            continue;
        }
        KOPT_ROLL_
        for (q = 0; q < 8; q++)
            if (i + q < n) kopt_cuda_add_square32_(column, kopt_cuda_measure_element_(t, g, i + q), 0);
    }
}

KOPT_CUDA_FN_ void kopt_cuda_measure_block_(const kopt_cuda_arguments_ *a, uint32_t block, uint32_t blocks,
                                            uint32_t thread, uint32_t *slots) {
    const uint32_t count = a->control->skip ? 0 : a->round_count;
    uint64_t sums[2] = {0, 0}; /* of this thread's bin */
    uint32_t round;
    kopt_cuda_clear_(slots, thread);
    __syncthreads();
    for (round = block; round < count; round += blocks) {
        const uint32_t tensor = a->rounds[round], next = round + blocks;
        kopt_cuda_measure_lane_(a, round, thread, kopt_cuda_column_(slots, thread & 31, KOPT_F32));
        __syncthreads();
        kopt_cuda_collect_(sums, slots, thread, KOPT_F32);
        __syncthreads();
        if (next >= count || a->rounds[next] != tensor)
            kopt_cuda_deliver_(&a->ratios[a->tensors[tensor].ratio_plus_1 - 1].norm, sums, thread, KOPT_F32);
    }
}

/* Computes rate_scale of tensor `index` if it belongs to StableAdamW. */
KOPT_CUDA_FN_ void kopt_cuda_factor_(const kopt_cuda_arguments_ *a, uint32_t index) {
    kopt_cuda_tensor_ *const t = a->tensors + index;
    const kopt_cuda_ratio_ *ratio;
    if (t->ratio_plus_1 == 0) return;
    ratio = a->ratios + t->ratio_plus_1 - 1;
    t->rate_scale = kopt_mul_cuda_(t->base_scale, kopt_stable_from_norm_(&ratio->norm, ratio->n));
}

/* ---- arrays, 8 elements at a time: conversion, clipping, accumulation ---- */

/* Converts x. If stochastic, r is a 16-bit random number. */
KOPT_CUDA_FN_ uint32_t kopt_cuda_converted_(float x, kopt_format to, int stochastic, uint32_t r) {
    if (to == KOPT_F32) return kopt_as_u32_(x); /* tested first, so that nvcc tests it once for 8 elements */
    return stochastic ? kopt_round_stochastic_cuda_(x, to, r, NULL) >> 16 : kopt_convert_value_cuda_(x, to);
}

KOPT_CUDA_FN_ void kopt_cuda_convert_octet_(const kopt_conversion_ *c, kopt_cuda_part_ p) {
    const size_t to_size = kopt_bytes_of_(c->dst_format), from_size = kopt_bytes_of_(c->src_format);
    const kopt_philox_key_ key = kopt_make_philox_key_(c->seed, c->step, c->id, KOPT_RANDOM_CONVERT_);
    uint32_t from[8], to[8], r[8] = {0, 0, 0, 0, 0, 0, 0, 0};
    int q;
    kopt_cuda_load_part_(from, c->src, from_size, p);
    if (c->stochastic) kopt_cuda_random_octet_(r, &key, c->first + p.i);
    KOPT_UNROLL_
    for (q = 0; q < 8; q++)
        kopt_cuda_insert_(to, to_size, q,
                          kopt_cuda_converted_(kopt_widen_cuda_(kopt_cuda_extract_(from, from_size, q), c->src_format),
                                               c->dst_format, c->stochastic, r[q]));
    kopt_cuda_store_part_(c->dst, to_size, p, to);
}

KOPT_CUDA_FN_ void kopt_cuda_clip_octet_(const kopt_tool_ *t, kopt_cuda_part_ p) {
    const size_t size = kopt_bytes_of_(t->dst_format);
    uint32_t x[8], y[8];
    int q;
    kopt_cuda_load_part_(x, t->dst, size, p);
    KOPT_UNROLL_
    for (q = 0; q < 8; q++)
        kopt_cuda_insert_(y, size, q, kopt_clip_value_cuda_(kopt_cuda_extract_(x, size, q), t->dst_format, t->limit));
    kopt_cuda_store_part_(t->dst, size, p, y);
}

/* An addition to a sum, or reading the sum into `out`. */
typedef struct kopt_cuda_accumulation_ {
    kopt_accumulator a; /* its count is the one before this addition, its step that of this addition */
    const kopt_byte_ *grad;
    kopt_byte_ *out;
    const uint32_t *counts; /* NULL, or the count and the step before this addition, on the GPU */
    kopt_format grad_format;
    float scale; /* negated: an addition is a step of SGD with rate 1 */
} kopt_cuda_accumulation_;

KOPT_CUDA_FN_ kopt_kind_ kopt_cuda_sum_kind_(const kopt_cuda_accumulation_ *k) {
    kopt_kind_ kind;
    kind.rule = KOPT_SGD;
    kind.weight = kind.moment = k->a.format;
    kind.grad = k->grad_format;
    kind.rounding = k->a.rounding;
    kind.moment_rounding = kind.compensation_rounding = k->a.compensation_rounding;
    kind.moment_count = kind.nesterov = kind.buffered = 0;
    return kind;
}

KOPT_CUDA_FN_ void kopt_cuda_accumulate_octet_(const kopt_cuda_accumulation_ *k, kopt_cuda_part_ p) {
    const kopt_kind_ kind = kopt_cuda_sum_kind_(k);
    const size_t size = kopt_bytes_of_(kind.weight), grad_size = kopt_bytes_of_(kind.grad);
    const size_t residual_size = kopt_bytes_of_residual_(kind.weight, kind.rounding);
    kopt_byte_ *const sums = (kopt_byte_ *)k->a.sum, *const residuals = (kopt_byte_ *)k->a.residual;
    uint32_t sum[8] = {0, 0, 0, 0, 0, 0, 0, 0}, residual_words[4] = {0, 0, 0, 0}, grad[8],
             r[8] = {0, 0, 0, 0, 0, 0, 0, 0};
    uint32_t new_sum[8], new_residual[4];
    uint32_t count = k->a.count, step = k->a.step;
    kopt_scalars_cuda_ scalars;
    int q;
    if (k->counts != NULL) {
        count = k->counts[0];
        step = k->counts[1] + 1;
        if (step == 0 || count == 0xFFFFFFFFu) return;
    }
    kopt_cuda_load_part_(grad, k->grad, grad_size, p);
    if (count != 0) kopt_cuda_load_part_(sum, sums, size, p);
    if (count != 0 && residual_size == 1) kopt_cuda_load_part_(residual_words, residuals, 1, p);
    if (count != 0 && residual_size == 2) kopt_cuda_load_part_(residual_words, residuals, 2, p);
    if (kopt_needs_random_(kind)) {
        const kopt_philox_key_ key = kopt_make_philox_key_(k->a.seed, step, k->a.id, KOPT_RANDOM_ACCUMULATE_);
        kopt_cuda_random_octet_(r, &key, k->a.first_index + p.i);
    }
    scalars.grad_scale = k->scale;
    scalars.rate = 1;
    scalars.use_scale = 1;
    scalars.use_l2 = scalars.use_decay = scalars.moments_only = scalars.sync = scalars.zero_grad = 0;
    scalars.unrectified = scalars.first_step = 0;
    KOPT_UNROLL_
    for (q = 0; q < 8; q++) {
        kopt_element_cuda_ e;
        e.weight = kopt_cuda_extract_(sum, size, q);
        e.residual = kopt_cuda_extract_signed_(residual_words, residual_size == 1 ? 1 : 2, q);
        e.grad = kopt_cuda_extract_(grad, grad_size, q);
        kopt_cuda_step_element_(kind, &scalars, &e, r[q]);
        kopt_cuda_insert_(new_sum, size, q, e.weight);
        if (residual_size == 1) e.residual &= 0xFFu;
        kopt_cuda_insert_(new_residual, residual_size == 1 ? 1 : 2, q, e.residual);
    }
    kopt_cuda_store_part_(sums, size, p, new_sum);
    if (residual_size == 1) kopt_cuda_store_part_(residuals, 1, p, new_residual);
    if (residual_size == 2) kopt_cuda_store_part_(residuals, 2, p, new_residual);
}

KOPT_CUDA_FN_ void kopt_cuda_read_sum_octet_(const kopt_cuda_accumulation_ *k, kopt_cuda_part_ p) {
    const kopt_kind_ kind = kopt_cuda_sum_kind_(k);
    const size_t size = kopt_bytes_of_(kind.weight),
                 residual_size = kopt_bytes_of_residual_(kind.weight, kind.rounding);
    const kopt_byte_ *const residuals = (const kopt_byte_ *)k->a.residual;
    const int empty = (k->counts != NULL ? k->counts[0] : k->a.count) == 0;
    uint32_t sum[8], residual_words[4] = {0, 0, 0, 0}, out[8];
    int q;
    kopt_cuda_load_part_(sum, (const kopt_byte_ *)k->a.sum, size, p);
    if (residual_size == 1) kopt_cuda_load_part_(residual_words, residuals, 1, p);
    if (residual_size == 2) kopt_cuda_load_part_(residual_words, residuals, 2, p);
    KOPT_UNROLL_
    for (q = 0; q < 8; q++) {
        const uint32_t residual = kopt_cuda_extract_signed_(residual_words, residual_size == 1 ? 1 : 2, q);
        float compensation, x;
        x = kopt_load_weight_cuda_(kind, kopt_cuda_extract_(sum, size, q), residual, &compensation, NULL);
        if (residual_size == 2 && kind.rounding == KOPT_KAHAN) x = kopt_add_(x, compensation);
        out[q] = empty ? 0 : kopt_as_u32_(x);
    }
    kopt_cuda_store_part_(k->out, 4, p, out);
}

#ifdef KAHAN_OPT_VMATH
/* ---- vector mathematics: functions of fp32, bf16 and fp16 ---- */

typedef struct kopt_cuda_function_ {
    kopt_byte_ *out, *out2;
    const kopt_byte_ *x, *y; /* y: the second argument of atan2, or the factor of kopt_map_backward, or NULL */
} kopt_cuda_function_;

typedef struct kopt_cuda_map_ {
    kopt_cuda_function_ arrays;
    kopt_function f;
    kopt_format format;
    uint32_t patches[128], count; /* arguments of kopt_map_exception_ */
} kopt_cuda_map_;

#define KOPT_CUDA_FLOATS_(name, formula)                                                            \
    KOPT_CUDA_FN_ void kopt_cuda_##name##_octet_(const kopt_cuda_function_ *k, kopt_cuda_part_ p) { \
        uint32_t in[8], in2[8], out[8], out2[8];                                                    \
        int q;                                                                                      \
        kopt_cuda_load_part_(in, k->x, 4, p);                                                       \
        if (k->y != NULL) kopt_cuda_load_part_(in2, k->y, 4, p);                                    \
        KOPT_UNROLL_                                                                                \
        for (q = 0; q < 8; q++) {                                                                   \
            const float x = kopt_as_f32_(in[q]);                                                    \
            float y = k->y != NULL ? kopt_as_f32_(in2[q]) : 0;                                      \
            out[q] = kopt_as_u32_(formula);                                                         \
            out2[q] = kopt_as_u32_(y);                                                              \
        }                                                                                           \
        kopt_cuda_store_part_(k->out, 4, p, out);                                                   \
        if (k->out2 != NULL) kopt_cuda_store_part_(k->out2, 4, p, out2);                            \
    }
KOPT_CUDA_FLOATS_(exp, kopt_vmath_exp_cuda_(x, 0))
KOPT_CUDA_FLOATS_(log, kopt_vmath_log_cuda_(x))
KOPT_CUDA_FLOATS_(tanh, kopt_vmath_tanh_cuda_(x))
KOPT_CUDA_FLOATS_(erf, kopt_vmath_erf_cuda_(x))
KOPT_CUDA_FLOATS_(erfc, kopt_vmath_erfc_cuda_(x))
KOPT_CUDA_FLOATS_(atan2, kopt_vmath_atan2_cuda_(x, y))
KOPT_CUDA_FLOATS_(sincospi, kopt_vmath_sincospi_cuda_(x, &y))
#undef KOPT_CUDA_FLOATS_

/* The function f of one number x of 16 bits, as in kopt_map_tile_. */
KOPT_CUDA_FN_ uint32_t kopt_cuda_mapped_(const kopt_cuda_map_ *k, uint32_t x) {
    const float argument = kopt_map_argument_cuda_(k->f, kopt_widen_cuda_(x, k->format));
    float q, l;
    uint32_t y;
    int doubt;
    if (k->f == KOPT_LOG)
        q = kopt_vmath_log_cuda_(argument);
    else if (k->f == KOPT_TANH)
        q = kopt_vmath_tanh_cuda_(argument);
    else
        q = kopt_vmath_exp_cuda_(argument, 0);
    l = k->f == KOPT_SOFTPLUS ? kopt_vmath_log_cuda_(kopt_add_(q, 1)) : q;
    y = kopt_map_result16_cuda_(k->f, k->format, x, q, l, &doubt);
    return doubt ? kopt_map_exception_(k->patches, k->count, x, y) : y;
}

/* The 8 elements rotate through the 4 words of x: a rolled loop with constant indices, because eight copies of 13
   functions would be too much code. */
KOPT_CUDA_FN_ void kopt_cuda_map_octet_(const kopt_cuda_map_ *k, kopt_cuda_part_ p) {
    uint32_t x[4], y[4] = {0, 0, 0, 0};
    int q;
    kopt_cuda_load_part_(x, k->arrays.x, 2, p);
    if (k->arrays.y != NULL) kopt_cuda_load_part_(y, k->arrays.y, 2, p);
    KOPT_ROLL_
    for (q = 0; q < 8; q++) {
        uint32_t z = kopt_cuda_mapped_(k, x[0] & 0xFFFFu);
        if (k->arrays.y != NULL)
            z = kopt_round_nearest16_cuda_(
                kopt_mul_(kopt_widen_cuda_(z, k->format), kopt_widen_cuda_(y[0] & 0xFFFFu, k->format)), k->format);
        x[0] = x[0] >> 16 | x[1] << 16;
        x[1] = x[1] >> 16 | x[2] << 16;
        x[2] = x[2] >> 16 | x[3] << 16;
        x[3] = x[3] >> 16 | z << 16;
        y[0] = y[0] >> 16 | y[1] << 16;
        y[1] = y[1] >> 16 | y[2] << 16;
        y[2] = y[2] >> 16 | y[3] << 16;
        y[3] = y[3] >> 16;
    }
    kopt_cuda_store_part_(k->arrays.out, 2, p, x);
}
#endif

/* ---- compression: a warp compresses blocks of 256 elements, 8 elements per lane. The numbers stay in shared memory
        until the scale of the block is known ---- */

typedef struct kopt_cuda_compression_ {
    kopt_compressor c;
    kopt_byte_ *out;
    const kopt_byte_ *grad;
    kopt_format grad_format;
    uint32_t *steps;
} kopt_cuda_compression_;

/* The shared memory of a warp, in words: element p is in slot p + p / 32; the last word is the mean for KOPT_SIGN. */
enum { KOPT_MEAN_ = KOPT_SLOTS_, KOPT_WAITING_ };

typedef struct kopt_cuda_packing_ {
    uint32_t *slots;
    uint64_t first;
    uint32_t n, step, largest;
} kopt_cuda_packing_;

/* A lane's part of the block: up to 8 elements; n <= 0 if there is none. */
KOPT_CUDA_FN_ kopt_cuda_part_ kopt_cuda_lane_part_(const kopt_cuda_packing_ *b, uint32_t lane) {
    kopt_cuda_part_ p;
    p.i = b->first + 8 * lane;
    p.skip = 0;
    p.n = (int)b->n - (int)(8 * lane);
    if (p.n > 8) p.n = 8;
    return p;
}

KOPT_CUDA_FN_ void kopt_cuda_gather_lane_(const kopt_cuda_compression_ *k, kopt_cuda_packing_ *b, uint32_t lane) {
    const size_t size = kopt_bytes_of_(k->grad_format), residual_size = kopt_bytes_of_(k->c.residual_format);
    const kopt_byte_ *const residual = (const kopt_byte_ *)k->c.residual;
    const kopt_cuda_part_ part = kopt_cuda_lane_part_(b, lane);
    const int feedback = residual != NULL && b->step > 1;
    uint32_t grad[8], residual_words[8];
    float x[8];
    int q;
    if (part.n <= 0) return;
    kopt_cuda_load_part_(grad, k->grad, size, part);
    if (feedback) kopt_cuda_load_part_(residual_words, residual, residual_size, part);
    KOPT_UNROLL_
    for (q = 0; q < 8; q++) x[q] = kopt_widen_cuda_(kopt_cuda_extract_(grad, size, q), k->grad_format);
    if (feedback) {
        KOPT_UNROLL_
        for (q = 0; q < 8; q++)
            x[q] = kopt_add_(
                x[q], kopt_widen_cuda_(kopt_cuda_extract_(residual_words, residual_size, q), k->c.residual_format));
    }
    KOPT_UNROLL_
    for (q = 0; q < 8; q++) { /* elements outside of the part are 0 */
        const uint32_t p = 8 * lane + (uint32_t)q, u = kopt_as_u32_(kopt_canonical_nan_(x[q]));
        b->slots[p + (p >> 5)] = u;
        if ((u & 0x7FFFFFFFu) > b->largest) b->largest = u & 0x7FFFFFFFu;
    }
}

/* One lane adds the magnitudes, in the order of the elements, because the sum is rounded. */
KOPT_CUDA_FN_ void kopt_cuda_mean_lane_(const kopt_cuda_compression_ *k, const kopt_cuda_packing_ *b, uint32_t lane) {
    float mean = 0;
    uint32_t p;
    if (lane != 0 || k->c.code != KOPT_SIGN || k->c.rounding == KOPT_STOCHASTIC) return;
    for (p = 0; p < b->n; p++) mean = kopt_more_(mean, b->slots[p + (p >> 5)] & 0x7FFFFFFFu);
    b->slots[KOPT_MEAN_] = kopt_as_u32_(mean);
}

KOPT_CUDA_FN_ void kopt_cuda_pack_lane_(const kopt_cuda_compression_ *k, const kopt_cuda_packing_ *b, uint32_t lane) {
    const kopt_philox_key_ key = kopt_make_philox_key_(k->c.seed, b->step, k->c.id, KOPT_RANDOM_COMPRESS_);
    const kopt_philox_key_ residual_key = kopt_make_philox_key_(k->c.seed, b->step, k->c.id, KOPT_RANDOM_RESIDUAL_);
    const int stochastic = k->c.rounding == KOPT_STOCHASTIC, scaled = k->c.code == KOPT_Q8 || k->c.code == KOPT_SIGN;
    const int noisy = k->c.residual_rounding == KOPT_STOCHASTIC && k->c.residual_format != KOPT_F32;
    kopt_byte_ *const to = k->out + kopt_code_bytes_(k->c.code, (size_t)b->first);
    kopt_byte_ *const residual = (kopt_byte_ *)k->c.residual;
    const size_t residual_size = kopt_bytes_of_(k->c.residual_format);
    const kopt_cuda_part_ part = kopt_cuda_lane_part_(b, lane);
    kopt_cuda_part_ of_block = part; /* the same part; i relative to the block */
    uint32_t scale = 0, bits = 0, r[8] = {0, 0, 0, 0, 0, 0, 0, 0}, residual_r[8] = {0, 0, 0, 0, 0, 0, 0, 0};
    uint32_t codes[4] = {0, 0, 0, 0}, new_residual[8];
    int q;
    if (scaled) scale = kopt_block_scale_(k->c.code, b->largest, kopt_as_f32_(b->slots[KOPT_MEAN_]), b->n, stochastic);
    if (scaled && lane == 0) kopt_cuda_store_one_(to, 4, scale);
    if (part.n <= 0) return;
    of_block.i = 8 * lane;
    if (stochastic) kopt_cuda_random_octet_(r, &key, k->c.first_index + part.i);
    if (noisy && residual != NULL) kopt_cuda_random_octet_(residual_r, &residual_key, k->c.first_index + part.i);
    KOPT_UNROLL_
    for (q = 0; q < 8; q++) {
        const uint32_t p = 8 * lane + (uint32_t)q, random16 = r[q] & 0xFFFFu;
        const float x = kopt_as_f32_(b->slots[p + (p >> 5)]);
        uint32_t code;
        float y;
        if (k->c.code == KOPT_Q8) {
            code = kopt_cuda_encode_(x, scale, 0, stochastic, random16);
            kopt_cuda_insert_(codes, 1, q, code);
            y = kopt_cuda_decode_(kopt_cuda_sign_extend_(code, 1), scale, 0);
        } else if (k->c.code == KOPT_SIGN) {
            code = kopt_sign_bit_(x, scale, stochastic, random16);
            if (q < part.n) bits |= code << q;
            y = kopt_as_f32_(scale ^ code << 31);
        } else {
            code = kopt_cuda_converted_(x, k->c.code, stochastic, random16);
            kopt_cuda_insert_(codes, 2, q, code);
            y = kopt_widen_cuda_(code, k->c.code);
        }
        kopt_cuda_insert_(new_residual, residual_size, q,
                          kopt_cuda_converted_(kopt_residual_of_(x, y, k->c.residual_format), k->c.residual_format,
                                               noisy, residual_r[q]));
    }
    if (k->c.code == KOPT_SIGN)
        kopt_cuda_store_one_(to + 4 + lane, 1, bits);
    else if (k->c.code == KOPT_Q8)
        kopt_cuda_store_part_(to + 4, 1, of_block, codes);
    else
        kopt_cuda_store_part_(to, 2, of_block, codes);
    if (residual != NULL) kopt_cuda_store_part_(residual, residual_size, part, new_residual);
}

KOPT_CUDA_FN_ void kopt_cuda_compress_blocks_(const kopt_cuda_compression_ *k, uint64_t warp, uint64_t warps,
                                              uint32_t lane, uint32_t *slots) {
    kopt_cuda_packing_ b;
    b.slots = slots;
    b.step = k->steps == NULL ? k->c.step : *k->steps + 1;
    if (b.step == 0) return; /* the count is at its limit */
    for (b.first = warp * 256; b.first < k->c.n; b.first += warps * 256) {
        b.n = k->c.n - b.first < 256 ? (uint32_t)(k->c.n - b.first) : 256;
        b.largest = 0;
        __syncwarp(); /* all lanes are done with the previous block */
        kopt_cuda_gather_lane_(k, &b, lane);
        b.largest = kopt_cuda_warp_largest_(b.largest);
        __syncwarp();
        kopt_cuda_mean_lane_(k, &b, lane);
        __syncwarp();
        kopt_cuda_pack_lane_(k, &b, lane);
    }
}

typedef struct kopt_cuda_sum_ {
    kopt_byte_ *to;
    const kopt_byte_ *from;
    kopt_format to_format, from_format;
    size_t n, stride, count; /* count: of shards; stride: in bytes */
    float scale;
} kopt_cuda_sum_;

/* sum += decoded * scale. Parts begin at multiples of 8 elements, so that each belongs to one block of codes. */
KOPT_CUDA_FN_ void kopt_cuda_decompress_octet_(const kopt_cuda_sum_ *k, kopt_cuda_part_ p) {
    const size_t size = kopt_bytes_of_(k->to_format);
    const kopt_byte_ *const from = k->from + kopt_code_bytes_(k->from_format, p.i - (p.i & 255));
    kopt_cuda_part_ of_block = p;
    uint32_t sum[8], code[4] = {0, 0, 0, 0}, out[8], scale = 0;
    int q;
    of_block.i = p.i & 255;
    kopt_cuda_load_part_(sum, k->to, size, p);
    if (k->from_format == KOPT_Q8 || k->from_format == KOPT_SIGN) scale = kopt_cuda_load_one_(from, 4);
    if (k->from_format == KOPT_Q8)
        kopt_cuda_load_part_(code, from + 4, 1, of_block);
    else if (k->from_format == KOPT_SIGN)
        code[0] = kopt_cuda_load_one_(from + 4 + (of_block.i >> 3), 1);
    else
        kopt_cuda_load_part_(code, from, 2, of_block);
    KOPT_UNROLL_
    for (q = 0; q < 8; q++) {
        float y;
        if (k->from_format == KOPT_Q8)
            y = kopt_cuda_decode_(kopt_cuda_extract_signed_(code, 1, q), scale, 0);
        else if (k->from_format == KOPT_SIGN)
            y = kopt_as_f32_(scale ^ code[0] >> q << 31);
        else
            y = kopt_widen_cuda_(kopt_cuda_extract_(code, 2, q), k->from_format);
        y = kopt_add_scaled_(kopt_widen_cuda_(kopt_cuda_extract_(sum, size, q), k->to_format), y, k->scale);
        kopt_cuda_insert_(out, size, q, kopt_convert_value_cuda_(y, k->to_format));
    }
    kopt_cuda_store_part_(k->to, size, p, out);
}

/* The sum of all shards, in their order. */
KOPT_CUDA_FN_ void kopt_cuda_reduce_octet_(const kopt_cuda_sum_ *k, kopt_cuda_part_ p) {
    const size_t to_size = kopt_bytes_of_(k->to_format), size = kopt_bytes_of_(k->from_format);
    const kopt_byte_ *from = k->from;
    uint32_t x[8], out[8];
    float sum[8];
    size_t shard;
    int q;
    for (shard = 0; shard < k->count; shard++, from += k->stride) {
        kopt_cuda_load_part_(x, from, size, p);
        KOPT_UNROLL_
        for (q = 0; q < 8; q++) {
            const float next = kopt_widen_cuda_(kopt_cuda_extract_(x, size, q), k->from_format);
            sum[q] = shard == 0 ? next : kopt_add_cuda_(sum[q], next);
        }
    }
    KOPT_UNROLL_
    for (q = 0; q < 8; q++) kopt_cuda_insert_(out, to_size, q, kopt_reduce_value_cuda_(sum[q], k->scale, k->to_format));
    kopt_cuda_store_part_(k->to, to_size, p, out);
}

/* Increments the counts of a call that may be replayed; but if one of them is 2^32 - 1, all stay as they are. */
KOPT_CUDA_FN_ void kopt_cuda_count_(uint32_t *counts, uint32_t n) {
    uint32_t i;
    for (i = 0; i < n; i++)
        if (counts[i] == 0xFFFFFFFFu) return;
    for (i = 0; i < n; i++) counts[i]++;
}

typedef struct kopt_cuda_setting_ {
    kopt_cuda_control_ *control;
    kopt_cuda_group_ *group; /* the group of this setting, or the first of all groups */
    kopt_cuda_options options;
    kopt_optimizer opt;
    uint32_t step;
    int which; /* 0: options, 1: optimizer, 2: step */
} kopt_cuda_setting_;

KOPT_CUDA_FN_ void kopt_cuda_set_(const kopt_cuda_setting_ *s) {
    if (s->which == 0) {
        s->control->options = s->options;
    } else if (s->which == 1) {
        kopt_optimizer *const to = &s->group->opt;
        const kopt_optimizer *const from = &s->opt;
        const uint32_t step = to->step;
        if (to->rule != from->rule || to->weight_format != from->weight_format || to->rounding != from->rounding ||
            to->moment_format != from->moment_format || to->moment_rounding != from->moment_rounding ||
            to->compensation_rounding != from->compensation_rounding || kopt_moments_(to) != kopt_moments_(from) ||
            (to->rule == KOPT_ADAM && !to->stable != !from->stable)) {
            s->control->status.result = KOPT_ERROR_MISMATCH;
            return;
        }
        *to = *from;
        to->step = step;
    } else {
        uint64_t g;
        for (g = 0; g < s->control->groups; g++) s->group[g].opt.step = s->step;
    }
}

/* ---- kernels and their launch ---- */

#define KOPT_CUDA_CLEARED_ (offsetof(kopt_cuda_control_, arrived) + 4 - offsetof(kopt_cuda_control_, norm))

/* The functions of arrays: name, type of the argument. */
#ifdef KAHAN_OPT_VMATH
#define KOPT_CUDA_FUNCTIONS_(KERNEL)      \
    KERNEL(exp, kopt_cuda_function_)      \
    KERNEL(log, kopt_cuda_function_)      \
    KERNEL(tanh, kopt_cuda_function_)     \
    KERNEL(erf, kopt_cuda_function_)      \
    KERNEL(erfc, kopt_cuda_function_)     \
    KERNEL(atan2, kopt_cuda_function_)    \
    KERNEL(sincospi, kopt_cuda_function_) \
    KERNEL(map, kopt_cuda_map_)
#else
#define KOPT_CUDA_FUNCTIONS_(KERNEL)
#endif
#define KOPT_CUDA_ARRAYS_(KERNEL)               \
    KERNEL(convert, kopt_conversion_)           \
    KERNEL(clip, kopt_tool_)                    \
    KERNEL(accumulate, kopt_cuda_accumulation_) \
    KERNEL(read_sum, kopt_cuda_accumulation_)   \
    KERNEL(reduce, kopt_cuda_sum_)              \
    KERNEL(decompress, kopt_cuda_sum_)          \
    KOPT_CUDA_FUNCTIONS_(KERNEL)

/* The pad of an array (see kopt_cuda_part_of_) with which every octet but the first begins at a multiple of 8 elements
   in memory. 0 if the elements are not aligned to their size. */
static uint32_t kopt_cuda_pad_(const void *p, size_t size) {
    return (uintptr_t)p % size != 0 ? 0 : (uint32_t)((uintptr_t)p / size % 8);
}

/* Numbers of the kernels that are not in the lists above. A launch of them has no more thread blocks than the GPU runs
   at once, because each thread block clears shared memory first and ends with atomic additions. */
enum { KOPT_CUDA_STATS_ = KOPT_CUDA_KERNELS_, KOPT_CUDA_MEASURE_ };

/* Thread blocks that a multiprocessor runs at once. It limits the registers: 3 to 80, 2 to 128. */
#ifdef KAHAN_OPT_VMATH
#define KOPT_CUDA_RESIDENT_(weight, moment, rounding) \
    (weight < 0 || moment == KOPT_F32 || rounding == KOPT_COMPACT ? 2 : 3)
#else
#define KOPT_CUDA_RESIDENT_(weight, moment, rounding) (weight < 0 || (weight != KOPT_F32 && moment == KOPT_F32) ? 2 : 3)
#endif

#define KOPT_CUDA_KERNEL_(i, name, weight, moment, rounding, copies)                                       \
    static __global__ void __launch_bounds__(KOPT_THREADS_, KOPT_CUDA_RESIDENT_(weight, moment, rounding)) \
        kopt_cuda_##name##_(const kopt_cuda_arguments_ a) {                                                \
        kopt_cuda_step_lane_(&a, blockIdx.x *KOPT_WARPS_ + (threadIdx.x >> 5), gridDim.x * KOPT_WARPS_,    \
                             threadIdx.x & 31, weight, moment, rounding, copies);                          \
    }
KOPT_CUDA_ALL_(KOPT_CUDA_KERNEL_)

#define KOPT_CUDA_BLOCKS_KERNEL_(i, name, weight, moment, rounding, copies)                                        \
    static __global__ void __launch_bounds__(KOPT_THREADS_, 2) kopt_cuda_##name##_(const kopt_cuda_arguments_ a) { \
        enum { SLOTS = (weight < 0 ? 4 : 2) * KOPT_SLOTS_ };                                                       \
        __shared__ uint32_t slots[KOPT_WARPS_ * SLOTS];                                                            \
        const uint32_t warp = threadIdx.x >> 5;                                                                    \
        kopt_cuda_step_blocks_(&a, blockIdx.x *KOPT_WARPS_ + warp, gridDim.x * KOPT_WARPS_, threadIdx.x & 31,      \
                               slots + warp * SLOTS, weight, rounding, copies);                                    \
    }
KOPT_CUDA_ALL_BLOCKS_(KOPT_CUDA_BLOCKS_KERNEL_)

static __global__ void __launch_bounds__(KOPT_THREADS_, 2) kopt_cuda_measure_kernel_(const kopt_cuda_arguments_ a) {
    __shared__ __align__(16) uint32_t slots[256 * 32];
    kopt_cuda_measure_block_(&a, blockIdx.x, gridDim.x, threadIdx.x, slots);
}

static __global__ void __launch_bounds__(KOPT_THREADS_)
    kopt_cuda_factor_kernel_(const kopt_cuda_arguments_ a, uint32_t tensors) {
    for (uint32_t i = blockIdx.x * KOPT_THREADS_ + threadIdx.x; i < tensors; i += gridDim.x * KOPT_THREADS_)
        kopt_cuda_factor_(&a, i);
}

static __global__ void __launch_bounds__(KOPT_PROLOGUE_THREADS_)
    kopt_cuda_prologue_kernel_(kopt_cuda_control_ *c, kopt_cuda_group_ *groups, uint64_t count) {
    __shared__ kopt_cuda_shared_ shared;
    kopt_cuda_prologue_(c, groups, count, threadIdx.x, &shared);
}

static __global__ void __launch_bounds__(KOPT_THREADS_, 4) kopt_cuda_stats_kernel_(const kopt_cuda_arguments_ a) {
    __shared__ __align__(16) uint32_t slots[256 * 32];
    if (a.grad_format == KOPT_BF16) /* the format is a constant in each call */
        kopt_cuda_stats_block_(&a, KOPT_BF16, blockIdx.x, gridDim.x, threadIdx.x, slots);
    else if (a.grad_format == KOPT_FP16)
        kopt_cuda_stats_block_(&a, KOPT_FP16, blockIdx.x, gridDim.x, threadIdx.x, slots);
    else
        kopt_cuda_stats_block_(&a, 3, blockIdx.x, gridDim.x, threadIdx.x, slots);
}

static __global__ void kopt_cuda_setting_kernel_(const kopt_cuda_setting_ s) { kopt_cuda_set_(&s); }

static __global__ void __launch_bounds__(KOPT_THREADS_, 3) kopt_cuda_compress_kernel_(const kopt_cuda_compression_ k) {
    __shared__ uint32_t slots[KOPT_WARPS_ * KOPT_WAITING_];
    const uint32_t warp = threadIdx.x >> 5;
    kopt_cuda_compress_blocks_(&k, static_cast<uint64_t>(blockIdx.x) * KOPT_WARPS_ + warp,
                               static_cast<uint64_t>(gridDim.x) * KOPT_WARPS_, threadIdx.x & 31,
                               slots + warp * KOPT_WAITING_);
}

static __global__ void kopt_cuda_setting_count_kernel_(uint32_t *counts, uint32_t n) { kopt_cuda_count_(counts, n); }

#define KOPT_CUDA_ARRAY_KERNEL_(name, type)                                                                           \
    static __global__ void __launch_bounds__(KOPT_THREADS_, 3)                                                        \
        kopt_cuda_##name##_kernel_(const type job, uint64_t n, uint32_t pad) {                                        \
        const uint64_t all = static_cast<uint64_t>(gridDim.x) * KOPT_THREADS_;                                        \
        uint64_t octet = static_cast<uint64_t>(blockIdx.x) * KOPT_THREADS_ + threadIdx.x;                             \
        for (; 8 * octet < n + pad; octet += all) kopt_cuda_##name##_octet_(&job, kopt_cuda_part_of_(n, pad, octet)); \
    }
KOPT_CUDA_ARRAYS_(KOPT_CUDA_ARRAY_KERNEL_)

static kopt_result kopt_cuda_result_(cudaError_t error) {
    switch (error) {
    case cudaSuccess: return KOPT_OK;
    case cudaErrorNoDevice:
    case cudaErrorInsufficientDriver:
    case cudaErrorSystemDriverMismatch:
    case cudaErrorStubLibrary:
    case cudaErrorInvalidDeviceFunction:
    case cudaErrorNoKernelImageForDevice: return KOPT_ERROR_ISA;
    default: return KOPT_ERROR_DEVICE;
    }
}

static kopt_result kopt_cuda_launch_(const void *kernel, uint32_t blocks, uint32_t threads, void **arguments,
                                     void *stream) {
    return kopt_cuda_result_(
        cudaLaunchKernel(kernel, dim3(blocks), dim3(threads), arguments, 0, static_cast<cudaStream_t>(stream)));
}

#define KOPT_CUDA_NAME_(i, name, weight, moment, rounding, copies) reinterpret_cast<const void *>(kopt_cuda_##name##_),
static const void *kopt_cuda_entry_(int kernel) {
    const void *const table[] = {KOPT_CUDA_ALL_(KOPT_CUDA_NAME_) KOPT_CUDA_ALL_BLOCKS_(
                                     KOPT_CUDA_NAME_) reinterpret_cast<const void *>(kopt_cuda_stats_kernel_),
                                 reinterpret_cast<const void *>(kopt_cuda_measure_kernel_)};
    return table[kernel];
}

/* The number of thread blocks of a kernel that the GPU runs at once. 1024 if CUDA does not say. */
static uint32_t kopt_cuda_resident_(int kernel) {
    int device = 0, processors = 0, each = 0;
    if (cudaGetDevice(&device) != cudaSuccess ||
        cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device) != cudaSuccess ||
        cudaOccupancyMaxActiveBlocksPerMultiprocessor(&each, kopt_cuda_entry_(kernel), KOPT_THREADS_, 0) != cudaSuccess)
        return 1024;
    return processors > 0 && each > 0 ? static_cast<uint32_t>(processors) * static_cast<uint32_t>(each) : 1024;
}

static kopt_result kopt_cuda_launch_step_(int kernel, kopt_cuda_arguments_ *a, uint32_t blocks, void *stream) {
    void *arguments[] = {a};
    return kopt_cuda_launch_(kopt_cuda_entry_(kernel), blocks, KOPT_THREADS_, arguments, stream);
}

static kopt_result kopt_cuda_launch_measure_(kopt_cuda_arguments_ *a, size_t size, uint32_t blocks, void *stream) {
    void *arguments[] = {a};
    const kopt_result result =
        kopt_cuda_result_(cudaMemsetAsync(a->ratios, 0, size, static_cast<cudaStream_t>(stream)));
    if (result != KOPT_OK) return result;
    return kopt_cuda_launch_(kopt_cuda_entry_(KOPT_CUDA_MEASURE_), blocks, KOPT_THREADS_, arguments, stream);
}

static kopt_result kopt_cuda_launch_factors_(kopt_cuda_arguments_ *a, uint32_t tensors, void *stream) {
    void *arguments[] = {a, &tensors};
    return kopt_cuda_launch_(reinterpret_cast<const void *>(kopt_cuda_factor_kernel_),
                             (tensors + KOPT_THREADS_ - 1) / KOPT_THREADS_, KOPT_THREADS_, arguments, stream);
}

static kopt_result kopt_cuda_launch_prologue_(kopt_cuda_control_ *c, kopt_cuda_group_ *groups, uint64_t count,
                                              void *stream) {
    void *arguments[] = {&c, &groups, &count};
    return kopt_cuda_launch_(reinterpret_cast<const void *>(kopt_cuda_prologue_kernel_), 1, KOPT_PROLOGUE_THREADS_,
                             arguments, stream);
}

static kopt_result kopt_cuda_launch_stats_(kopt_cuda_arguments_ *a, uint32_t blocks, void *stream) {
    void *arguments[] = {a};
    const kopt_result result =
        kopt_cuda_result_(cudaMemsetAsync(&a->control->norm, 0, KOPT_CUDA_CLEARED_, static_cast<cudaStream_t>(stream)));
    if (result != KOPT_OK) return result;
    return kopt_cuda_launch_(reinterpret_cast<const void *>(kopt_cuda_stats_kernel_), blocks, KOPT_THREADS_, arguments,
                             stream);
}

static kopt_result kopt_cuda_launch_setting_(kopt_cuda_setting_ *s, void *stream) {
    void *arguments[] = {s};
    return kopt_cuda_launch_(reinterpret_cast<const void *>(kopt_cuda_setting_kernel_), 1, 1, arguments, stream);
}

/* The number of thread blocks with one thread per part. */
static uint32_t kopt_cuda_blocks_for_(uint64_t n) {
    const uint64_t blocks = (n + 8 * KOPT_THREADS_ - 1) / (8 * KOPT_THREADS_);
    return blocks < 0x7FFFFFFFu ? static_cast<uint32_t>(blocks) : 0x7FFFFFFFu;
}

#define KOPT_CUDA_ARRAY_LAUNCH_(name, type)                                                            \
    static kopt_result kopt_cuda_launch_##name##_(type *job, uint64_t n, uint32_t pad, void *stream) { \
        void *arguments[] = {job, &n, &pad};                                                           \
        return kopt_cuda_launch_(reinterpret_cast<const void *>(kopt_cuda_##name##_kernel_),           \
                                 kopt_cuda_blocks_for_(n + pad), KOPT_THREADS_, arguments, stream);    \
    }
KOPT_CUDA_ARRAYS_(KOPT_CUDA_ARRAY_LAUNCH_)

static kopt_result kopt_cuda_launch_count_(uint32_t *counts, uint32_t n, void *stream) {
    void *arguments[] = {&counts, &n};
    return kopt_cuda_launch_(reinterpret_cast<const void *>(kopt_cuda_setting_count_kernel_), 1, 1, arguments, stream);
}

static kopt_result kopt_cuda_launch_compress_(kopt_cuda_compression_ *k, void *stream) {
    void *arguments[] = {k};
    kopt_result result = KOPT_OK;
    if (k->c.n != 0)
        result = kopt_cuda_launch_(reinterpret_cast<const void *>(kopt_cuda_compress_kernel_),
                                   kopt_cuda_blocks_for_(k->c.n), KOPT_THREADS_, arguments, stream);
    if (result != KOPT_OK || k->steps == NULL) return result;
    return kopt_cuda_launch_count_(k->steps, 1, stream);
}

static kopt_result kopt_cuda_copy_(void *to, const void *from, size_t size, void *stream) {
    return kopt_cuda_result_(
        cudaMemcpyAsync(to, from, size, cudaMemcpyHostToDevice, static_cast<cudaStream_t>(stream)));
}

/* ---- state blocks: one thread for each element ---- */

typedef struct kopt_cuda_init_ {
    kopt_byte_ *state, *weight, *copy; /* state: NULL if the tensor has no block */
    kopt_byte_ *residual, *slow, *slow_residual;
    const kopt_byte_ *weights; /* fp32, or NULL: the weights stay as they are */
    uint64_t n;
    size_t residual_size;
    kopt_format format, copy_format;
    kopt_rounding rounding;
    uint32_t header[KOPT_HEADER_ / 4];
} kopt_cuda_init_;

KOPT_ROUNDINGS_UP_TO_(KOPT_EXACT, kopt_cuda_init_weight_)
/* As kopt_write_weight_(): rounds the fp32 value with these bits. Returns the weight. */
KOPT_CUDA_FN_ uint32_t kopt_cuda_init_weight_(const kopt_cuda_init_ *k, uint32_t bits, uint32_t *residual) {
    const uint32_t infinity = k->format == KOPT_BF16 ? 0x7F80u : 0x7C00u;
    const float x = kopt_as_f32_(bits);
    uint32_t u;
    *residual = 0;
    if (k->format == KOPT_F32) return bits;
    if (k->rounding == KOPT_EXACT || k->rounding == KOPT_COMPACT) {
        u = kopt_extended_cuda_(x, k->format, NULL);
        if (k->rounding == KOPT_COMPACT) u = (u + 0x80u) & 0xFFFFFF00u;
        *residual = k->rounding == KOPT_COMPACT ? u >> 8 & 0xFFu : u & 0xFFFFu;
        u = (u + 0x8000u) >> 16;
    } else if (k->rounding == KOPT_KAHAN) {
        float compensation;
        u = kopt_round_kahan16_cuda_(x, k->format);
        compensation = kopt_sub_(x, kopt_widen_cuda_(u, k->format));
        if (k->format == KOPT_FP16) compensation = kopt_mul_(compensation, 2048);
        *residual = kopt_round_nearest16_cuda_(compensation, k->format);
    } else {
        return kopt_round_nearest16_cuda_(x, k->format);
    }
    if ((u & infinity) == infinity) *residual = 0;
    return u;
}

KOPT_CUDA_FN_ void kopt_cuda_init_element_(const kopt_cuda_init_ *k, uint64_t i) {
    const size_t size = kopt_bytes_of_(k->format);
    uint32_t weight, residual = 0;
    if (k->weights != NULL) {
        weight = kopt_cuda_init_weight_(k, kopt_cuda_load_one_(k->weights + 4 * i, 4), &residual);
        kopt_cuda_store_one_(k->weight + i * size, size, weight);
    } else {
        weight = kopt_cuda_load_one_(k->weight + i * size, size);
    }
    if (k->residual != NULL) kopt_cuda_store_one_(k->residual + i * k->residual_size, k->residual_size, residual);
    if (k->slow != NULL) kopt_cuda_store_one_(k->slow + i * size, size, weight);
    if (k->slow_residual != NULL)
        kopt_cuda_store_one_(k->slow_residual + i * k->residual_size, k->residual_size, residual);
    if (k->copy != NULL) {
        const size_t copy_size = kopt_bytes_of_(k->copy_format);
        kopt_cuda_store_one_(k->copy + i * copy_size, copy_size,
                             k->copy_format == k->format
                                 ? weight
                                 : kopt_convert_value_cuda_(kopt_widen_cuda_(weight, k->format), k->copy_format));
    }
}

static __global__ void __launch_bounds__(KOPT_THREADS_) kopt_cuda_init_kernel_(const kopt_cuda_init_ k) {
    const uint64_t all = static_cast<uint64_t>(gridDim.x) * KOPT_THREADS_;
    uint64_t i = static_cast<uint64_t>(blockIdx.x) * KOPT_THREADS_ + threadIdx.x;
    if (k.state != NULL && i < KOPT_HEADER_ / 4) kopt_cuda_store_one_(k.state + 4 * i, 4, k.header[i]);
    for (; i < k.n; i += all) kopt_cuda_init_element_(&k, i);
}

/* total: bytes of the block, 0 if there is none. */
static kopt_result kopt_cuda_launch_init_(kopt_cuda_init_ *k, size_t total, void *stream) {
    void *arguments[] = {k};
    const uint64_t blocks = (k->n + KOPT_THREADS_ - 1) / KOPT_THREADS_;
    if (total != 0) {
        const kopt_result result =
            kopt_cuda_result_(cudaMemsetAsync(k->state, 0, total, static_cast<cudaStream_t>(stream)));
        if (result != KOPT_OK) return result;
    }
    return kopt_cuda_launch_(reinterpret_cast<const void *>(kopt_cuda_init_kernel_),
                             blocks < 0x7FFFFFFFu ? static_cast<uint32_t>(blocks) : 0x7FFFFFFFu, KOPT_THREADS_,
                             arguments, stream);
}

static kopt_result kopt_cuda_copy_back_(void *to, const void *from, size_t size, void *stream) {
    return kopt_cuda_result_(
        cudaMemcpyAsync(to, from, size, cudaMemcpyDeviceToHost, static_cast<cudaStream_t>(stream)));
}

/* For calls that no graph should repeat. */
static kopt_result kopt_cuda_refuse_capture_(void *stream) {
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    const kopt_result result = kopt_cuda_result_(cudaStreamIsCapturing(static_cast<cudaStream_t>(stream), &status));
    return result == KOPT_OK && status != cudaStreamCaptureStatusNone ? KOPT_ERROR_CAPTURE : result;
}

/* ---- PUBLIC FUNCTIONS -------------------------------------------------------------------------------------------- */

static size_t kopt_cuda_align16_(size_t x) { return (x + 15) & ~(size_t)15; }

/* Does a constant of a kernel fit this value? -1 fits every value. */
static int kopt_cuda_matches_(int constant, unsigned value) { return constant < 0 || (unsigned)constant == value; }

/* Does the rule have specialized kernels? */
static int kopt_cuda_has_kernels_(kopt_rule rule) {
#ifdef KAHAN_OPT_VMATH
    if (rule == KOPT_ADAM_ATAN2) return 1;
#endif
    return rule == KOPT_SGD || rule == KOPT_ADAM || rule == KOPT_LION || rule == KOPT_RADAM;
}

/* Are the elements of all arrays of a tensor aligned to their size? Other tensors take the general kernels. */
static int kopt_cuda_natural_(const kopt_optimizer *opt, const kopt_tensor *t) {
    const size_t weight_size = kopt_bytes_of_(opt->weight_format), grad_size = kopt_bytes_of_(t->grad_format);
    const size_t copy_size = kopt_bytes_of_(t->copy_format);
    const size_t residual_size = kopt_bytes_of_residual_(opt->weight_format, opt->rounding);
    /* The alignment that the state needs, with 8-bit moments that of their scales. */
    size_t state_size = residual_size > weight_size ? residual_size : weight_size;
    if (kopt_moments_(opt) > 0 && (opt->moment_format == KOPT_F32 || opt->moment_format == KOPT_Q8)) state_size = 4;
    return (uintptr_t)t->weight % weight_size == 0 && (uintptr_t)t->grad % grad_size == 0 &&
           (uintptr_t)t->state % state_size == 0 && (t->copy == NULL || (uintptr_t)t->copy % copy_size == 0);
}

/* The number of the first kernel that fits. */
static int kopt_cuda_kernel_of_(const kopt_optimizer *opt, const kopt_tensor *t) {
    const int moments = kopt_moments_(opt);
    const int common = moments <= 2 && kopt_cuda_has_kernels_(opt->rule) && kopt_cuda_natural_(opt, t);
    const kopt_format moment = moments == 0 ? opt->weight_format : opt->moment_format;
    const kopt_rounding rounding = opt->weight_format == KOPT_F32 ? KOPT_NEAREST : opt->rounding;
#define KOPT_CUDA_FITS_(i, name, kernel_weight, kernel_moment, kernel_rounding, copies)                       \
    if (kopt_cuda_matches_(kernel_weight, opt->weight_format) && kopt_cuda_matches_(kernel_moment, moment) && \
        (kernel_moment == KOPT_Q8) == (moment == KOPT_Q8) && kopt_cuda_matches_(kernel_rounding, rounding) && \
        (kernel_weight < 0 || (common && t->counts == NULL)) && (copies || t->copy == NULL))                  \
        return i;
    KOPT_CUDA_ALL_(KOPT_CUDA_FITS_)
    KOPT_CUDA_ALL_BLOCKS_(KOPT_CUDA_FITS_)
#undef KOPT_CUDA_FITS_
    return KOPT_CUDA_KERNELS_ - 1;
}

/* Refuses rules that have no kernel here, and rules that would call the functions of a table: those are host
   functions. */
static kopt_result kopt_cuda_check_options_(const kopt_optimizer *opt) {
    const kopt_result result = kopt_check_options_(opt);
    if (result != KOPT_OK) return result;
#ifdef KAHAN_OPT_VMATH
    if (opt->vmath != NULL &&
        (opt->rule == KOPT_ADAM_ATAN2 || (opt->rule == KOPT_LION && kopt_less_(0, opt->sharpness))))
        return KOPT_ERROR_OPTION;
    return (int)opt->rule > KOPT_ADAM_ATAN2 ? KOPT_ERROR_OPTION : KOPT_OK;
#else
    return (int)opt->rule > KOPT_EMA ? KOPT_ERROR_OPTION : KOPT_OK;
#endif
}

static int kopt_cuda_stable_(const kopt_optimizer *opt) { return opt->rule == KOPT_ADAM && opt->stable; }

/* Checks the groups, and counts their tensors and elements. */
static kopt_result kopt_cuda_check_(const kopt_cuda_group *groups, size_t count, size_t *tensors, uint64_t *elements) {
    size_t g, i;
    *tensors = 0;
    *elements = 0;
    if (groups == NULL && count != 0) return KOPT_ERROR_NULL;
    for (g = 0; g < count; g++) {
        const kopt_tensor *last = NULL; /* the last tensor of this group that has elements */
        kopt_result result = kopt_cuda_check_options_(groups[g].opt);
        if (result != KOPT_OK) return result;
        if (groups[g].tensors == NULL && groups[g].count != 0) return KOPT_ERROR_NULL;
        for (i = 0; i < groups[g].count; i++) {
            const kopt_tensor *t = &groups[g].tensors[i];
            result = kopt_check_tensor_(t, groups[g].opt->weight_format);
            if (result == KOPT_OK)
                result = kopt_check_memory_(t, kopt_bytes_of_(groups[g].opt->weight_format),
                                            kopt_layout_for_(groups[g].opt, t->n).total, 1);
            if (result != KOPT_OK) return result;
            if (t->n >> (kopt_cuda_stable_(groups[g].opt) ? 36 : 40) != 0) return KOPT_ERROR_BOUNDS;
            if (((uintptr_t)t->counts & 7) != 0 || kopt_as_u32_(t->stable_scale) != 0) return KOPT_ERROR_OPTION;
            if (t->n == 0) continue;
            if (last != NULL && !kopt_may_follow_(last, t)) return KOPT_ERROR_ID;
            last = t;
            *elements += t->n;
        }
        *tensors += groups[g].count;
    }
    /* Fewer than 2^40 elements: each adds less than 2^24 to a bin of 64 bits. */
    return *tensors >> 31 != 0 || *elements >> 40 != 0 ? KOPT_ERROR_BOUNDS : KOPT_OK;
}

/* Is the array aligned for vector loads where its first complete octet begins, after `lead` elements? */
static int kopt_cuda_aligned_(const void *p, size_t lead, size_t size) {
    const size_t octet = 8 * size < 16 ? 8 * size : 16;
    return size == 0 || p == NULL || ((uintptr_t)p + lead * size) % octet == 0;
}

static void kopt_cuda_describe_(kopt_cuda_tensor_ *d, const kopt_optimizer *opt, const kopt_tensor *t) {
    const kopt_layout_ layout = kopt_layout_for_(opt, t->n);
    const size_t weight_size = kopt_bytes_of_(opt->weight_format), grad_size = kopt_bytes_of_(t->grad_format);
    const size_t residual_size = kopt_bytes_of_residual_(opt->weight_format, opt->rounding);
    const int moments = kopt_moments_(opt), blocks = moments > 0 && opt->moment_format == KOPT_Q8;
    /* Codes need no alignment here: see kopt_cuda_wide_part_. */
    const size_t moment_size = blocks ? 0 : kopt_bytes_of_(opt->moment_format);
    int m;
    kopt_byte_ *state = (kopt_byte_ *)t->state;
    size_t lead = (size_t)((8 - (t->first_index & 7)) & 7);
    d->weight = (kopt_byte_ *)t->weight;
    d->grad = (kopt_byte_ *)t->grad;
    d->residual = residual_size == 0 || state == NULL ? NULL : state + layout.residual;
    for (m = 0; m < 4; m++) d->moment[m] = m >= moments || state == NULL ? NULL : state + layout.moment[m];
    d->slow = state == NULL ? NULL : state + layout.slow;
    d->slow_residual = state == NULL ? NULL : state + layout.slow_residual;
    for (m = 0; m < 4; m++) d->scale[m] = NULL;
    if (blocks && state != NULL)
        for (m = 0; m < moments; m++) d->scale[m] = state + layout.moment[m] + layout.scale;
    d->counts = t->counts;
    d->rate_scale = d->base_scale = kopt_rate_scale_(t);
    d->ratio_plus_1 = d->first_round = 0;
    d->copy = (kopt_byte_ *)t->copy;
    d->id = t->id;
    d->grad_format = (uint8_t)t->grad_format;
    d->copy_format = (uint8_t)(t->copy == NULL ? KOPT_F32 : t->copy_format);
    d->pad = t->first_index & 255;
    /* 8-bit moments: blocks are counted from the tensor's first element, whatever its global index is. */
    if (blocks) d->pad = lead = 0;
    d->wide = kopt_cuda_aligned_(d->grad, lead, grad_size) && kopt_cuda_aligned_(d->weight, lead, weight_size) &&
              kopt_cuda_aligned_(d->residual, lead, residual_size) &&
              kopt_cuda_aligned_(d->moment[0], lead, moment_size) &&
              kopt_cuda_aligned_(d->moment[1], lead, moment_size) &&
              kopt_cuda_aligned_(d->copy, lead, d->copy_format == KOPT_F32 ? 4 : 2);
    d->usual = opt->rule != KOPT_ADAM || moments != 2 || opt->moment_rounding != opt->compensation_rounding ? 0
               : opt->moment_rounding == KOPT_STOCHASTIC                                                    ? 1
                                                                                                            : 2;
    d->end = d->pad + t->n;
    d->complete = t->n < 8 ? 0 : t->n - 7;
    d->first = t->first_index - d->pad;
}

static size_t kopt_cuda_tasks_(const kopt_cuda_tensor_ *d, uint32_t width) {
    return d->end == d->pad ? 0 : (size_t)((d->end + width - 1) / width);
}

/* StableAdamW: the number of rounds of a tensor. */
static size_t kopt_cuda_rounds_(uint64_t n) { return (size_t)((n + KOPT_ROUND_ - 1) / KOPT_ROUND_); }

/* The plan in memory: control, groups, tensors, tasks; for StableAdamW ratios and rounds. */
static kopt_result kopt_cuda_layout_(kopt_cuda_plan *plan, const kopt_cuda_group *groups, size_t count) {
    size_t tensors, tasks = 0, stable = 0, rounds = 0, g, i;
    uint64_t elements;
    int formats = 0;
    kopt_result result = kopt_cuda_check_(groups, count, &tensors, &elements);
    if (result != KOPT_OK) return result;
    plan->device = NULL;
    plan->groups_ = count;
    plan->blocks = 0;
    for (g = 0; g < count; g++)
        for (i = 0; i < groups[g].count; i++)
            if (groups[g].tensors[i].n != 0) formats |= 1 << groups[g].tensors[i].grad_format;
    plan->grad_format_ = formats == 2 ? KOPT_BF16 : formats == 4 ? KOPT_FP16 : formats == 1 ? KOPT_F32 : 3;
    /* Twice the width only where the slots of the statistics allow it: see KOPT_CUDA_STATS_BLOCK_. */
    plan->width_ = elements >> 22 != 0 && (formats == 2 || formats == 4) ? 2 * KOPT_WARP_STRIDE_ : KOPT_WARP_STRIDE_;
    for (g = 0; g < count; g++)
        for (i = 0; i < groups[g].count; i++) {
            kopt_cuda_tensor_ d;
            kopt_cuda_describe_(&d, groups[g].opt, &groups[g].tensors[i]);
            tasks += kopt_cuda_tasks_(&d, plan->width_);
            if (!kopt_cuda_stable_(groups[g].opt)) continue;
            stable++;
            rounds += kopt_cuda_rounds_(groups[g].tensors[i].n);
        }
    if (tasks >> 31 != 0 || rounds >> 31 != 0) return KOPT_ERROR_BOUNDS;
    plan->stable_ = (uint32_t)stable;
    plan->rounds_ = (uint32_t)rounds;
    plan->at_tensors_ =
        kopt_cuda_align16_(sizeof(kopt_cuda_control_)) + kopt_cuda_align16_(count * sizeof(kopt_cuda_group_));
    plan->at_tasks_ = plan->at_tensors_ + kopt_cuda_align16_(tensors * sizeof(kopt_cuda_tensor_));
    plan->at_ratios_ = plan->at_tasks_ + kopt_cuda_align16_(tasks * 4);
    plan->at_rounds_ = plan->at_ratios_ + kopt_cuda_align16_(stable * sizeof(kopt_cuda_ratio_));
    plan->size = plan->at_rounds_ + kopt_cuda_align16_(rounds * 4);
    return KOPT_OK;
}

KOPT_CUDA_API_ size_t kopt_cuda_plan_size(const kopt_cuda_group *groups, size_t count) {
    kopt_cuda_plan plan;
    return kopt_cuda_layout_(&plan, groups, count) == KOPT_OK ? plan.size : 0;
}

KOPT_CUDA_API_ kopt_result kopt_cuda_plan_build(kopt_cuda_plan *plan, void *bytes, size_t size,
                                                const kopt_cuda_group *groups, size_t count) {
    kopt_byte_ *const base = (kopt_byte_ *)bytes;
    kopt_cuda_plan p;
    kopt_cuda_group_ *group;
    kopt_cuda_tensor_ *tensor;
    uint32_t *task, *round, tasks = 0, rounds = 0, stable = 0;
    size_t g, i, index, k;
    int kernel;
    kopt_result result = kopt_cuda_layout_(&p, groups, count);
    if (result != KOPT_OK) return result;
    if (plan == NULL || bytes == NULL) return KOPT_ERROR_NULL;
    if (size < p.size) return KOPT_ERROR_SIZE;
    if (((uintptr_t)bytes & 15) != 0) return KOPT_ERROR_OPTION;
    for (k = 0; k < p.size; k++) base[k] = 0;
    group = (kopt_cuda_group_ *)(base + kopt_cuda_align16_(sizeof(kopt_cuda_control_)));
    tensor = (kopt_cuda_tensor_ *)(base + p.at_tensors_);
    task = (uint32_t *)(base + p.at_tasks_);
    round = (uint32_t *)(base + p.at_rounds_);
    ((kopt_cuda_control_ *)base)->groups = count;
    for (g = 0; g < count; g++) {
        group[g].opt = *groups[g].opt;
        kopt_copy_options_(groups[g].opt, &group[g].step);
    }
    for (kernel = 0; kernel < KOPT_CUDA_KERNELS_; kernel++) { /* the tasks of one kernel are contiguous */
        p.first_[kernel] = tasks;
        for (g = 0, index = 0; g < count; g++)
            for (i = 0; i < groups[g].count; i++, index++) {
                if (kopt_cuda_kernel_of_(groups[g].opt, &groups[g].tensors[i]) != kernel) continue;
                kopt_cuda_describe_(&tensor[index], groups[g].opt, &groups[g].tensors[i]);
                tensor[index].natural = kopt_cuda_natural_(groups[g].opt, &groups[g].tensors[i]) != 0;
                tensor[index].group = (uint32_t)g;
                tensor[index].first_task = tasks;
                for (k = kopt_cuda_tasks_(&tensor[index], p.width_); k > 0; k--) task[tasks++] = (uint32_t)index;
            }
    }
    p.first_[KOPT_CUDA_KERNELS_] = tasks;
    for (g = 0, index = 0; g < count; g++) /* in the order of the list, which is the same on all GPUs */
        for (i = 0; i < groups[g].count; i++, index++) {
            if (!kopt_cuda_stable_(groups[g].opt)) continue;
            tensor[index].ratio_plus_1 = ++stable;
            tensor[index].first_round = rounds;
            for (k = kopt_cuda_rounds_(groups[g].tensors[i].n); k > 0; k--) round[rounds++] = (uint32_t)index;
        }
    *plan = p;
    return KOPT_OK;
}

KOPT_CUDA_API_ kopt_result kopt_cuda_plan_upload(kopt_cuda_plan *plan, void *device, const void *bytes, void *stream) {
    kopt_result result;
    if (plan == NULL || device == NULL || bytes == NULL) return KOPT_ERROR_NULL;
    if (((uintptr_t)device & 15) != 0) return KOPT_ERROR_OPTION;
    result = kopt_cuda_refuse_capture_(stream);
    if (result == KOPT_OK) result = kopt_cuda_copy_(device, bytes, plan->size, stream);
    if (result == KOPT_OK) plan->device = device;
    return result;
}

static kopt_cuda_group_ *kopt_cuda_groups_(const kopt_cuda_plan *plan) {
    return (kopt_cuda_group_ *)((kopt_byte_ *)plan->device + kopt_cuda_align16_(sizeof(kopt_cuda_control_)));
}

static kopt_cuda_arguments_ kopt_cuda_arguments_of_(const kopt_cuda_plan *plan, uint32_t first, uint32_t count) {
    kopt_byte_ *const base = (kopt_byte_ *)plan->device;
    kopt_cuda_arguments_ a;
    a.control = (kopt_cuda_control_ *)base;
    a.groups = kopt_cuda_groups_(plan);
    a.tensors = (kopt_cuda_tensor_ *)(base + plan->at_tensors_);
    a.tasks = (const uint32_t *)(base + plan->at_tasks_);
    a.first = first;
    a.count = count;
    a.width = plan->width_;
    a.grad_format = plan->grad_format_;
    a.ratios = (kopt_cuda_ratio_ *)(base + plan->at_ratios_);
    a.rounds = (const uint32_t *)(base + plan->at_rounds_);
    a.round_count = plan->rounds_;
    return a;
}

static uint32_t kopt_cuda_tensors_(const kopt_cuda_plan *plan) {
    return (uint32_t)((plan->at_tasks_ - plan->at_tensors_) / sizeof(kopt_cuda_tensor_));
}

static uint32_t kopt_cuda_blocks_(const kopt_cuda_plan *plan, uint32_t tasks, uint32_t limit) {
    uint32_t blocks = (tasks + KOPT_WARPS_ - 1) / KOPT_WARPS_;
    if (limit != 0 && blocks > limit) blocks = limit;
    if (plan->blocks != 0 && blocks > plan->blocks) blocks = plan->blocks;
    return blocks == 0 ? 1 : blocks;
}

KOPT_CUDA_API_ kopt_result kopt_cuda_plan_step_begin(const kopt_cuda_plan *plan, void *stream) {
    kopt_cuda_arguments_ a;
    kopt_result result;
    uint32_t blocks, resident;
    if (plan == NULL || plan->device == NULL) return KOPT_ERROR_NULL;
    result =
        kopt_cuda_launch_prologue_((kopt_cuda_control_ *)plan->device, kopt_cuda_groups_(plan), plan->groups_, stream);
    if (result != KOPT_OK || plan->stable_ == 0) return result;
    a = kopt_cuda_arguments_of_(plan, 0, 0);
    resident = kopt_cuda_resident_(KOPT_CUDA_MEASURE_);
    blocks = a.round_count == 0 ? 1 : a.round_count < resident ? a.round_count : resident;
    if (plan->blocks != 0 && blocks > plan->blocks) blocks = plan->blocks;
    return kopt_cuda_launch_measure_(&a, plan->stable_ * sizeof(kopt_cuda_ratio_), blocks, stream);
}

KOPT_CUDA_API_ kopt_result kopt_cuda_plan_step_end(const kopt_cuda_plan *plan, void *stream) {
    kopt_result result = KOPT_OK;
    int kernel;
    if (plan == NULL || plan->device == NULL) return KOPT_ERROR_NULL;
    if (plan->stable_ != 0) {
        kopt_cuda_arguments_ a = kopt_cuda_arguments_of_(plan, 0, 0);
        result = kopt_cuda_launch_factors_(&a, kopt_cuda_tensors_(plan), stream);
    }
    for (kernel = 0; kernel < KOPT_CUDA_KERNELS_ && result == KOPT_OK; kernel++) {
        kopt_cuda_arguments_ a =
            kopt_cuda_arguments_of_(plan, plan->first_[kernel], plan->first_[kernel + 1] - plan->first_[kernel]);
        if (a.count != 0) result = kopt_cuda_launch_step_(kernel, &a, kopt_cuda_blocks_(plan, a.count, 0), stream);
    }
    return result;
}

KOPT_CUDA_API_ kopt_result kopt_cuda_plan_step(const kopt_cuda_plan *plan, void *stream) {
    const kopt_result result = kopt_cuda_plan_step_begin(plan, stream);
    return result == KOPT_OK ? kopt_cuda_plan_step_end(plan, stream) : result;
}

KOPT_CUDA_API_ uint64_t *kopt_cuda_plan_ratios(const kopt_cuda_plan *plan, size_t *words) {
    if (words != NULL) *words = 0;
    if (plan == NULL || plan->device == NULL) return NULL;
    if (words != NULL) *words = plan->stable_ * (sizeof(kopt_cuda_ratio_) / 8);
    return (uint64_t *)((kopt_byte_ *)plan->device + plan->at_ratios_);
}

KOPT_CUDA_API_ kopt_result kopt_cuda_plan_measure(const kopt_cuda_plan *plan, void *stream) {
    kopt_cuda_arguments_ a;
    if (plan == NULL || plan->device == NULL) return KOPT_ERROR_NULL;
    a = kopt_cuda_arguments_of_(plan, 0, plan->first_[KOPT_CUDA_KERNELS_]);
    return kopt_cuda_launch_stats_(&a, kopt_cuda_blocks_(plan, a.count, kopt_cuda_resident_(KOPT_CUDA_STATS_)), stream);
}

static kopt_cuda_setting_ kopt_cuda_setting_of_(const kopt_cuda_plan *plan, int which) {
    kopt_cuda_setting_ s;
    s.control = (kopt_cuda_control_ *)plan->device;
    s.group = kopt_cuda_groups_(plan);
    s.options.check_finite = 0;
    s.options.max_norm = 0;
    s.options.lr = s.options.loss_scale = s.options.found_inf = NULL;
    s.opt = kopt_sgd(0, 0);
    s.step = 0;
    s.which = which;
    return s;
}

KOPT_CUDA_API_ kopt_result kopt_cuda_plan_set_options(const kopt_cuda_plan *plan, const kopt_cuda_options *options,
                                                      void *stream) {
    kopt_cuda_setting_ s;
    if (plan == NULL || plan->device == NULL || options == NULL) return KOPT_ERROR_NULL;
    if (!kopt_within_(options->max_norm, 0, KOPT_DOUBLE_(1e300, 0x7E37E43Cu, 0x8800759Cu))) return KOPT_ERROR_RANGE;
    s = kopt_cuda_setting_of_(plan, 0);
    s.options = *options;
    return kopt_cuda_launch_setting_(&s, stream);
}

KOPT_CUDA_API_ kopt_result kopt_cuda_plan_set_optimizer(const kopt_cuda_plan *plan, size_t group,
                                                        const kopt_optimizer *opt, void *stream) {
    kopt_cuda_setting_ s;
    kopt_result result = kopt_cuda_check_options_(opt);
    if (result != KOPT_OK) return result;
    if (plan == NULL || plan->device == NULL) return KOPT_ERROR_NULL;
    if (group >= plan->groups_) return KOPT_ERROR_BOUNDS;
    s = kopt_cuda_setting_of_(plan, 1);
    s.group += group;
    s.opt = *opt;
    return kopt_cuda_launch_setting_(&s, stream);
}

KOPT_CUDA_API_ kopt_result kopt_cuda_plan_set_step(const kopt_cuda_plan *plan, uint32_t step, void *stream) {
    kopt_cuda_setting_ s;
    if (plan == NULL || plan->device == NULL) return KOPT_ERROR_NULL;
    s = kopt_cuda_setting_of_(plan, 2);
    s.step = step;
    return kopt_cuda_launch_setting_(&s, stream);
}

KOPT_CUDA_API_ const uint32_t *kopt_cuda_plan_steps(const kopt_cuda_plan *plan, size_t group) {
    if (plan == NULL || plan->device == NULL || group >= plan->groups_) return NULL;
    return &kopt_cuda_groups_(plan)[group].opt.step;
}

KOPT_CUDA_API_ const kopt_cuda_status *kopt_cuda_plan_status(const kopt_cuda_plan *plan) {
    if (plan == NULL || plan->device == NULL) return NULL;
    return &((const kopt_cuda_control_ *)plan->device)->status;
}

KOPT_CUDA_API_ kopt_norm *kopt_cuda_plan_norm(const kopt_cuda_plan *plan, size_t *words) {
    if (words != NULL) *words = 0;
    if (plan == NULL || plan->device == NULL) return NULL;
    if (words != NULL) *words = sizeof(kopt_norm) / 8;
    return &((kopt_cuda_control_ *)plan->device)->norm;
}

KOPT_CUDA_API_ kopt_result kopt_cuda_state_init(const kopt_optimizer *opt, const kopt_tensor *t, const float *weights,
                                                void *stream) {
    kopt_layout_ layout;
    kopt_cuda_init_ k;
    kopt_byte_ header[KOPT_HEADER_];
    size_t i;
    kopt_result result = kopt_check_init_(opt, t, weights, &layout);
    if (result != KOPT_OK || t->n == 0) return result;
    result = kopt_cuda_refuse_capture_(stream);
    if (result != KOPT_OK) return result;
    k.state = layout.total == 0 ? NULL : (kopt_byte_ *)t->state;
    k.weight = (kopt_byte_ *)t->weight;
    k.copy = (kopt_byte_ *)t->copy;
    k.weights = (const kopt_byte_ *)weights;
    k.residual_size = kopt_bytes_of_residual_(opt->weight_format, opt->rounding);
    k.residual = k.residual_size == 0 ? NULL : k.state + layout.residual;
    k.slow = k.slow_residual = NULL;
    if (opt->rule == KOPT_RANGER && k.state != NULL) {
        k.slow = k.state + layout.slow;
        if (k.residual_size != 0) k.slow_residual = k.state + layout.slow_residual;
    }
    k.n = t->n;
    k.format = opt->weight_format;
    k.copy_format = t->copy_format;
    k.rounding = opt->rounding;
    if (k.state != NULL) {
        kopt_make_open_header_(header, opt, t->id, t->n, t->first_index);
        for (i = 0; i < KOPT_HEADER_ / 4; i++) k.header[i] = kopt_load32_(header + 4 * i);
    }
    return kopt_cuda_launch_init_(&k, layout.total, stream);
}

KOPT_CUDA_API_ kopt_result kopt_cuda_state_save(const kopt_cuda_plan *plan, size_t group, const kopt_tensor *t,
                                                void *block, size_t size, void *stream) {
    kopt_byte_ *const to = (kopt_byte_ *)block;
    const kopt_optimizer *opt; /* on the GPU */
    kopt_result result;
    if (plan == NULL || plan->device == NULL || t == NULL) return KOPT_ERROR_NULL;
    if (group >= plan->groups_) return KOPT_ERROR_BOUNDS;
    if (size == 0) return KOPT_OK;
    if (block == NULL || t->state == NULL) return KOPT_ERROR_NULL;
    if (size < KOPT_HEADER_ || size > t->state_size) return KOPT_ERROR_SIZE;
    if (kopt_overlap_(block, size, t->state, size)) return KOPT_ERROR_OVERLAP;
    opt = &kopt_cuda_groups_(plan)[group].opt;
    result = kopt_cuda_copy_back_(block, t->state, size, stream);
    if (result == KOPT_OK) result = kopt_cuda_copy_back_(to + 32, &opt->seed, 8, stream); /* as in a sealed block */
    return result == KOPT_OK ? kopt_cuda_copy_back_(to + 40, &opt->step, 4, stream) : result;
}

/* The tensor with its block in host memory. The functions that take it read no other memory of the tensor. */
static kopt_tensor kopt_cuda_on_host_(const kopt_tensor *t, void *block, size_t size) {
    kopt_tensor host = *t;
    host.state = block;
    host.state_size = size;
    host.copy = NULL;
    return host;
}

KOPT_CUDA_API_ kopt_result kopt_cuda_state_seal(const kopt_optimizer *opt, const kopt_tensor *t, void *block,
                                                size_t size) {
    const kopt_byte_ *const h = (const kopt_byte_ *)block;
    kopt_optimizer saved;
    kopt_tensor host;
    kopt_result result;
    if (opt == NULL || t == NULL) return KOPT_ERROR_NULL;
    host = kopt_cuda_on_host_(t, block, size);
    result = kopt_check_state_(opt, &host, 0);
    if (result != KOPT_OK || kopt_state_size(opt, t->n) == 0) return result;
    saved = *opt;
    saved.seed = kopt_load_le64_(h + 32);
    saved.step = kopt_load_le32_(h + 40);
    return kopt_state_seal(&saved, &host);
}

KOPT_CUDA_API_ kopt_result kopt_cuda_state_load(kopt_optimizer *opt, const kopt_tensor *t, void *block, size_t size,
                                                void *stream) {
    kopt_optimizer opened;
    kopt_tensor host;
    kopt_layout_ layout;
    kopt_result result = kopt_check_init_(opt, t, NULL, &layout);
    if (result != KOPT_OK || t->n == 0) return result;
    if (kopt_overlap_(block, size, t->state, layout.total)) return KOPT_ERROR_OVERLAP;
    result = kopt_cuda_refuse_capture_(stream);
    if (result != KOPT_OK) return result;
    opened = *opt;
    host = kopt_cuda_on_host_(t, block, size);
    result = kopt_state_open(&opened, &host);
    if (result != KOPT_OK) return result;
    if (layout.total != 0) result = kopt_cuda_copy_(t->state, block, layout.total, stream);
    if (result == KOPT_OK && t->copy != NULL)
        result = kopt_cuda_convert(t->copy, t->copy_format, t->weight, opt->weight_format, t->n, stream);
    if (result == KOPT_OK)
        *opt = opened;
    else if (layout.total != 0 && kopt_state_seal(&opened, &host) != KOPT_OK)
        return KOPT_ERROR_STATE; /* cannot be: it was opened a moment ago */
    return result;
}

static kopt_result kopt_cuda_convert_run_(kopt_conversion_ *c, void *dst, const void *src, void *stream) {
    if (!kopt_format_valid_(c->dst_format) || !kopt_format_valid_(c->src_format)) return KOPT_ERROR_OPTION;
    if (!kopt_n_valid_(c->n) || c->first >> 63 != 0) return KOPT_ERROR_BOUNDS;
    if (c->n == 0) return KOPT_OK;
    if (dst == NULL || src == NULL) return KOPT_ERROR_NULL;
    if (kopt_overlap_(dst, c->n * kopt_bytes_of_(c->dst_format), src, c->n * kopt_bytes_of_(c->src_format)))
        return KOPT_ERROR_OVERLAP;
    c->dst = (kopt_byte_ *)dst;
    c->src = (const kopt_byte_ *)src;
    return kopt_cuda_launch_convert_(c, c->n, kopt_cuda_pad_(dst, kopt_bytes_of_(c->dst_format)), stream);
}

KOPT_CUDA_API_ kopt_result kopt_cuda_convert(void *dst, kopt_format dst_format, const void *src, kopt_format src_format,
                                             size_t n, void *stream) {
    kopt_conversion_ c;
    c.dst_format = dst_format;
    c.src_format = src_format;
    c.n = n;
    c.stochastic = 0;
    c.seed = c.first = 0;
    c.step = c.id = 0;
    return kopt_cuda_convert_run_(&c, dst, src, stream);
}

KOPT_CUDA_API_ kopt_result kopt_cuda_convert_stochastic(void *dst, kopt_format dst_format, const void *src,
                                                        kopt_format src_format, size_t n, kopt_random_key key,
                                                        void *stream) {
    kopt_conversion_ c;
    c.dst_format = dst_format;
    c.src_format = src_format;
    c.n = n;
    c.stochastic = 1;
    c.seed = key.seed;
    c.first = key.first_index;
    c.step = key.step;
    c.id = key.id;
    return kopt_cuda_convert_run_(&c, dst, src, stream);
}

KOPT_CUDA_API_ kopt_result kopt_cuda_compress(kopt_compressor *c, void *out, size_t out_size, const void *grad,
                                              kopt_format grad_format, uint32_t *steps, void *stream) {
    kopt_result result = kopt_check_compressor_(c, out, out_size, grad, grad_format);
    kopt_cuda_compression_ k;
    if (result != KOPT_OK) return result;
    k.c = *c;
    k.c.step++;
    k.out = (kopt_byte_ *)out;
    k.grad = (const kopt_byte_ *)grad;
    k.grad_format = grad_format;
    k.steps = steps;
    result = kopt_cuda_launch_compress_(&k, stream);
    if (result == KOPT_OK && steps == NULL) c->step++;
    return result;
}

static float kopt_cuda_rounded_(double scale) {
    kopt_environment_ environment;
    float rounded;
    kopt_enter_(&environment);
    rounded = kopt_to_float_(kopt_to_f64_(scale));
    kopt_leave_(&environment);
    return rounded;
}

KOPT_CUDA_API_ kopt_result kopt_cuda_decompress_add(void *sum, kopt_format format, const void *in, size_t in_size,
                                                    kopt_format code, size_t n, double scale, void *stream) {
    kopt_result result = kopt_check_array_(sum, format, n);
    size_t in_bytes;
    kopt_cuda_sum_ k;
    if (result != KOPT_OK) return result;
    if (!kopt_code_valid_(code)) return KOPT_ERROR_OPTION;
    if (!kopt_magnitude_at_most_(scale, KOPT_3E38_)) return KOPT_ERROR_RANGE;
    in_bytes = kopt_code_bytes_(code, n);
    if (in == NULL && in_bytes != 0) return KOPT_ERROR_NULL;
    if (in_size < in_bytes) return KOPT_ERROR_SIZE;
    if (kopt_overlap_(sum, n * kopt_bytes_of_(format), in, in_bytes)) return KOPT_ERROR_OVERLAP;
    if (n == 0) return KOPT_OK;
    k.to = (kopt_byte_ *)sum;
    k.from = (const kopt_byte_ *)in;
    k.to_format = format;
    k.from_format = code;
    k.n = n;
    k.stride = k.count = 0;
    k.scale = kopt_cuda_rounded_(scale);
    return kopt_cuda_launch_decompress_(&k, n, 0, stream);
}

KOPT_CUDA_API_ kopt_result kopt_cuda_reduce(void *out, kopt_format out_format, const void *shards, size_t stride,
                                            size_t count, kopt_format format, size_t n, double scale, void *stream) {
    const kopt_byte_ *const from = (const kopt_byte_ *)shards;
    kopt_result result = kopt_check_array_(out, out_format, n);
    size_t k;
    kopt_cuda_sum_ sum;
    if (result == KOPT_OK) result = kopt_check_array_(shards, format, n);
    if (result != KOPT_OK) return result;
    if (count == 0 || !kopt_magnitude_at_most_(scale, KOPT_3E38_)) return KOPT_ERROR_RANGE;
    if (!kopt_n_valid_(count) || !kopt_n_valid_(stride)) return KOPT_ERROR_BOUNDS;
    if (stride != 0 && count - 1 > ~(size_t)0 / 32 / stride) return KOPT_ERROR_BOUNDS;
    if (count > 1 && stride < n) return KOPT_ERROR_OVERLAP;
    if (n == 0) return KOPT_OK;
    for (k = 0; k < count; k++) {
        const kopt_byte_ *const shard = from + k * stride * kopt_bytes_of_(format);
        if (shard == out && format == out_format) continue;
        if (kopt_overlap_(out, n * kopt_bytes_of_(out_format), shard, n * kopt_bytes_of_(format)))
            return KOPT_ERROR_OVERLAP;
    }
    sum.to = (kopt_byte_ *)out;
    sum.from = from;
    sum.to_format = out_format;
    sum.from_format = format;
    sum.n = n;
    sum.stride = stride * kopt_bytes_of_(format);
    sum.count = count;
    sum.scale = kopt_cuda_rounded_(scale);
    return kopt_cuda_launch_reduce_(&sum, n, kopt_cuda_pad_(out, kopt_bytes_of_(out_format)), stream);
}

KOPT_CUDA_API_ kopt_result kopt_cuda_clip_value(void *x, kopt_format format, size_t n, double limit, void *stream) {
    kopt_result result = kopt_check_array_(x, format, n);
    kopt_tool_ t;
    if (result == KOPT_OK) result = kopt_round_limit_(limit, format, &t.limit);
    if (result != KOPT_OK || n == 0) return result;
    t.dst = (kopt_byte_ *)x;
    t.dst_format = format;
    return kopt_cuda_launch_clip_(&t, n, kopt_cuda_pad_(x, kopt_bytes_of_(format)), stream);
}

KOPT_CUDA_API_ kopt_result kopt_cuda_accumulate(kopt_accumulator *a, const void *grad, kopt_format grad_format,
                                                double scale, uint32_t *counts, void *stream) {
    kopt_result result = kopt_check_array_(grad, grad_format, a == NULL ? 0 : a->n);
    kopt_cuda_accumulation_ k;
    if (result == KOPT_OK)
        result = kopt_check_accumulator_(a, grad, a == NULL ? 0 : a->n * kopt_bytes_of_(grad_format));
    if (result != KOPT_OK) return result;
    if (!kopt_magnitude_at_most_(scale, KOPT_3E38_)) return KOPT_ERROR_RANGE;
    if (counts == NULL && (a->step == 0xFFFFFFFFu || a->count == 0xFFFFFFFFu)) return KOPT_ERROR_STEP;
    k.a = *a;
    k.a.step++;
    k.grad = (const kopt_byte_ *)grad;
    k.out = NULL;
    k.counts = counts;
    k.grad_format = grad_format;
    k.scale = kopt_as_f32_(kopt_as_u32_(kopt_cuda_rounded_(scale)) ^ 0x80000000u);
    if (a->n != 0)
        result = kopt_cuda_launch_accumulate_(&k, a->n, kopt_cuda_pad_(a->sum, kopt_bytes_of_(a->format)), stream);
    if (result == KOPT_OK && counts != NULL) return kopt_cuda_launch_count_(counts, 2, stream);
    if (result != KOPT_OK) return result;
    a->step++;
    a->count++;
    return KOPT_OK;
}

KOPT_CUDA_API_ kopt_result kopt_cuda_accumulator_read(const kopt_accumulator *a, float *out, const uint32_t *counts,
                                                      void *stream) {
    const kopt_result result = kopt_check_accumulator_(a, out, a == NULL ? 0 : a->n * 4);
    kopt_cuda_accumulation_ k;
    if (result != KOPT_OK || a->n == 0) return result;
    if (out == NULL) return KOPT_ERROR_NULL;
    k.a = *a;
    k.grad = NULL;
    k.out = (kopt_byte_ *)out;
    k.counts = counts;
    k.grad_format = KOPT_F32;
    k.scale = 1;
    return kopt_cuda_launch_read_sum_(&k, a->n, kopt_cuda_pad_(out, 4), stream);
}

#ifdef KAHAN_OPT_VMATH
static kopt_cuda_function_ kopt_cuda_function_of_(void *out, void *out2, const void *x, const void *y) {
    kopt_cuda_function_ k;
    k.out = (kopt_byte_ *)out;
    k.out2 = (kopt_byte_ *)out2;
    k.x = (const kopt_byte_ *)x;
    k.y = (const kopt_byte_ *)y;
    return k;
}

#define KOPT_CUDA_UNARY_(name)                                                                                  \
    KOPT_CUDA_API_ kopt_result kopt_cuda_vmath_##name(float *out, const float *x, size_t n, void *stream) {     \
        kopt_cuda_function_ k = kopt_cuda_function_of_(out, NULL, x, NULL);                                     \
        const kopt_result result = kopt_vmath_check_(out, x, x, n, 4);                                          \
        return result != KOPT_OK || n == 0 ? result                                                             \
                                           : kopt_cuda_launch_##name##_(&k, n, kopt_cuda_pad_(out, 4), stream); \
    }
KOPT_CUDA_UNARY_(exp)
KOPT_CUDA_UNARY_(log)
KOPT_CUDA_UNARY_(tanh)
KOPT_CUDA_UNARY_(erf)
KOPT_CUDA_UNARY_(erfc)
#undef KOPT_CUDA_UNARY_

KOPT_CUDA_API_ kopt_result kopt_cuda_vmath_atan2(float *out, const float *y, const float *x, size_t n, void *stream) {
    kopt_cuda_function_ k = kopt_cuda_function_of_(out, NULL, y, x);
    const kopt_result result = kopt_vmath_check_(out, y, x, n, 4);
    if (result != KOPT_OK || n == 0) return result;
    return kopt_cuda_launch_atan2_(&k, n, kopt_cuda_pad_(out, 4), stream);
}

KOPT_CUDA_API_ kopt_result kopt_cuda_vmath_sincospi(float *sine, float *cosine, const float *x, size_t n,
                                                    void *stream) {
    kopt_cuda_function_ k = kopt_cuda_function_of_(sine, cosine, x, NULL);
    kopt_result result = kopt_vmath_check_(sine, x, x, n, 4);
    if (result == KOPT_OK) result = kopt_vmath_check_(cosine, x, x, n, 4);
    if (result == KOPT_OK && n != 0 && kopt_overlap_(sine, n * 4, cosine, n * 4)) result = KOPT_ERROR_OVERLAP;
    if (result != KOPT_OK || n == 0) return result;
    return kopt_cuda_launch_sincospi_(&k, n, kopt_cuda_pad_(sine, 4), stream);
}

/* y: NULL, or the factor of each result. */
static kopt_result kopt_cuda_map_run_(kopt_function f, void *out, const void *y, const void *x, kopt_format format,
                                      size_t n, void *stream) {
    kopt_cuda_map_ k;
    unsigned count, i;
    const uint32_t *const patches = kopt_map_exceptions_(f, format, &count);
    k.arrays = kopt_cuda_function_of_(out, NULL, x, y);
    k.f = f;
    k.format = format;
    k.count = count;
    for (i = 0; i < sizeof k.patches / 4; i++) k.patches[i] = i < count ? patches[i] : 0;
    return kopt_cuda_launch_map_(&k, n, kopt_cuda_pad_(out, 2), stream);
}

KOPT_CUDA_API_ kopt_result kopt_cuda_map(kopt_function f, void *out, const void *x, kopt_format format, size_t n,
                                         void *stream) {
    const kopt_result result = kopt_map_check_(f, KOPT_GELU_TANH_SLOPE, out, x, x, format, n);
    if (result != KOPT_OK || n == 0) return result;
    return kopt_cuda_map_run_(f, out, NULL, x, format, n, stream);
}

KOPT_CUDA_API_ kopt_result kopt_cuda_map_backward(kopt_function f, void *dx, const void *dy, const void *x,
                                                  kopt_format format, size_t n, void *stream) {
    const kopt_result result = kopt_map_check_(f, KOPT_SOFTPLUS, dx, dy, x, format, n);
    if (f == KOPT_LOG) return KOPT_ERROR_OPTION;
    if (result != KOPT_OK || n == 0) return result;
    return kopt_cuda_map_run_(kopt_slope_of_(f), dx, dy, x, format, n, stream);
}
#endif

#endif /* KAHAN_OPT_CUDA_IMPLEMENTATION */

#ifdef __CUDACC__
#pragma nv_diagnostic pop
#endif

#else /* kahan_opt.h includes this part twice, before the kernels */

/* ================================================================================================================== */
/* VOCABULARY: one lane. Floating-point operations are PTX with .rn, so --use_fast_math, -ftz and -fmad change none.  */
/* ================================================================================================================== */
#define ISA_TARGET_ __device__
#define LANES_ ((size_t)(1))
#if KOPT_PASS_ == KOPT_PASS_CUDA_
#define ISA_ cuda
#define ONE_LANE_ 1
#define ONE_PASS_ 1
#else
#define ISA_ octet
#define CORE_ONLY_ 1
#define CHECK_UNROUNDED_ 1 /* the NaN of an operation is 0x7FFFFFFF */
#endif
typedef uint32_t vu32_;
typedef int vmask_;

#if KOPT_PASS_ == KOPT_PASS_CUDA_
#define F32_ "f" /* the letter of a vf32_ in asm */
typedef float vf32_;
FN_ vf32_ splat_(float x) { return x; }
FN_ vf32_ add_(vf32_ a, vf32_ b) { return kopt_add_(a, b); }
FN_ vf32_ sub_(vf32_ a, vf32_ b) { return kopt_sub_(a, b); }
FN_ vf32_ mul_(vf32_ a, vf32_ b) { return kopt_mul_(a, b); }
FN_ vf32_ div_(vf32_ a, vf32_ b) { return kopt_div_(a, b); }
FN_ vf32_ sqrt_(vf32_ a) { return kopt_sqrt_(a); }
FN_ vu32_ as_u32_(vf32_ a) { return kopt_as_u32_(a); }
FN_ vf32_ as_f32_(vu32_ a) { return kopt_as_f32_(a); }
#else            /* a float is held as its bits, in a register without a type: a bitcast takes no instruction of PTX */
#define F32_ "r"
typedef uint32_t vf32_;
FN_ vf32_ splat_(float x) { return kopt_as_u32_(x); }
#define KOPT_BINARY_(name, operation)                                    \
    FN_ vf32_ name(vf32_ a, vf32_ b) {                                   \
        vf32_ r;                                                         \
        asm(operation ".rn.f32 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b)); \
        return r;                                                        \
    }
KOPT_BINARY_(add_, "add")
KOPT_BINARY_(sub_, "sub")
KOPT_BINARY_(mul_, "mul")
KOPT_BINARY_(div_, "div")
#undef KOPT_BINARY_
FN_ vf32_ sqrt_(vf32_ a) {
    vf32_ r;
    asm("sqrt.rn.f32 %0, %1;" : "=r"(r) : "r"(a));
    return r;
}
FN_ vu32_ as_u32_(vf32_ a) { return a; }
FN_ vf32_ as_f32_(vu32_ a) { return a; }
#endif
FN_ vf32_ convert_f32_(vu32_ a) {
    vf32_ r;
    asm("cvt.rn.f32.s32 %0, %1;" : "=" F32_(r) : "r"(a));
    return r;
}
FN_ vu32_ round_u32_(vf32_ a) { /* 0 <= a < 2^31 */
    vu32_ r;
    asm("cvt.rni.s32.f32 %0, %1;" : "=r"(r) : F32_(a));
    return r;
}
FN_ vu32_ isplat_(uint32_t a) { return a; }
FN_ vu32_ isplat_hoisted_(uint32_t a) { return a; }
#define OPERATORS_ 1
FN_ vu32_ mul16_(vu32_ a, vu32_ b) { return (a * b & 0xFFFFu) | ((a >> 16) * (b >> 16) << 16); }
FN_ void mulhilo_(vu32_ a, uint32_t b, vu32_ *high, vu32_ *low) { /* one product of 64 bits */
    asm("{ .reg .u64 product; mul.wide.u32 product, %2, %3; mov.b64 {%0, %1}, product; }"
        : "=r"(*low), "=r"(*high)
        : "r"(a), "r"(b));
}
FN_ vmask_ igt_(vu32_ a, vu32_ b) { return (int32_t)a > (int32_t)b; }
FN_ vmask_ ieq_(vu32_ a, vu32_ b) { return a == b; }
FN_ vmask_ mask_or_(vmask_ a, vmask_ b) { return a | b; }
FN_ int any_true_(vmask_ a) { return a; }
FN_ vu32_ select_(vmask_ m, vu32_ yes, vu32_ no) { return m ? yes : no; }
FN_ vu32_ select_or_zero_(vmask_ m, vu32_ a) { return m ? a : 0; }
FN_ vu32_ load32_(const kopt_byte_ *p) { return kopt_load32_(p); }
FN_ vu32_ load16_(const kopt_byte_ *p) { return kopt_load16_(p); }
FN_ vu32_ load8_(const kopt_byte_ *p) { return ((uint32_t)(*p) ^ 0x80u) - 0x80u; }
FN_ void store32_(kopt_byte_ *p, vu32_ a) { kopt_store32_(p, a); }
FN_ void store16_(kopt_byte_ *p, vu32_ a) { kopt_store16_(p, a); }
FN_ void store8_(kopt_byte_ *p, vu32_ a) { *p = (kopt_byte_)(a & 0xFFu); }
FN_ vf32_ widen_fp16_(vu32_ a) {
    vf32_ r;
    asm("cvt.f32.f16 %0, %1;" : "=" F32_(r) : "h"(static_cast<uint16_t>(a)));
    return r;
}
FN_ vu32_ narrow_fp16_(vf32_ a) {
    uint16_t r;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(r) : F32_(a));
    return r;
}
#if KOPT_PASS_ == KOPT_PASS_CUDA_OCTET_
FN_ vu32_ add16_(vu32_ a, vu32_ b) { return (a + b) & 0xFFFFu; } /* the upper half stays 0 */
FN_ vu32_ unpack_low16_(vu32_ a) { return a & 0xFFFFu; }
FN_ vu32_ unpack_high16_(vu32_ a) { return a >> 16; }
#define MIN_MAX_ 1
FN_ vf32_ min_(vf32_ a, vf32_ b) { return (vf32_)(min((int)a, (int)b)); }
FN_ vf32_ max_(vf32_ a, vf32_ b) { return (vf32_)(max((int)a, (int)b)); }
#define IMAX_ 1
FN_ vu32_ imax_(vu32_ a, vu32_ b) { return (vu32_)(max((int)a, (int)b)); }
#define FLUSH_ 1
FN_ vu32_ imin_(vu32_ a, vu32_ b) { return (vu32_)(min((int)a, (int)b)); }
FN_ vf32_ flush_(vf32_ a) { /* the only operation that flushes */
    vf32_ r;
    asm("add.rn.ftz.f32 %0, %1, 0f00000000;" : "=r"(r) : "r"(a));
    return r;
}
#define FP16_ 1
FN_ vf32_ load_fp16_(const kopt_byte_ *p) { return widen_fp16_(load16_(p)); }
FN_ vf32_ round_fp16_(vf32_ a, vu32_ *stored) {
    *stored = narrow_fp16_(a);
    return widen_fp16_(*stored);
}
#endif
#undef F32_

#endif /* KOPT_PASS_ */
