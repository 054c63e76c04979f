/* kahan_opt_cuda.cuh - the steps of kahan_opt.h on a GPU: the same bits, many tensors in one launch - MIT-0 or public
   domain

   DO THIS ONCE: in one .cu file, compiled by nvcc (or by another compiler: see kopt_cuda_use_ptx). That file gets a
   private copy of the parts of kahan_opt.h that it needs.

       #define KAHAN_OPT_CUDA_IMPLEMENTATION
       #include "kahan_opt_cuda.cuh"

   QUICK START, from C or C++. *all is {opt, tensors, count}, with the tensors as on the CPU, but with device addresses.
   bytes (malloc) and device (cudaMalloc) have size = kopt_cuda_plan_size(all, 1). It is 0 if *all is refused.

       kopt_result begin(kopt_cuda_plan *plan, const kopt_cuda_group *all, void *bytes, void *device, size_t size) {
           kopt_result result = kopt_cuda_plan_build(plan, bytes, size, all, 1);
           if (result == KOPT_OK) result = kopt_cuda_state_init(all->opt, all->tensors, all->count, NULL, NULL);
           return result == KOPT_OK ? kopt_cuda_plan_upload(plan, device, NULL) : result;
       }

   After each backward pass, on the same stream: kopt_cuda_plan_step(&plan, stream). At the end: cudaFree(plan.device)
   and free(plan.bytes). docs/gpu.md shows graphs, clipping, checkpoints, NCCL and PyTorch.

   NAMES              kopt_cuda_plan_X acts on a plan. Every other kopt_cuda_X does on device memory, on a stream, what
                      kopt_X, if there is one, does on the CPU. Version 1.0 freezes all but names in PTX.

   STREAMS            A stream is a cudaStream_t; NULL is the default stream. A function that takes one is asynchronous:
                      it returns when the work is enqueued. Its result is about its arguments and the launch; errors
                      that the GPU finds later are in the status of the plan. Each call with a plan writes the plan, so
                      use a plan and its tensors on one stream at a time: with two, the result is undefined. To change
                      streams, let the new one wait for an event of the old one (cudaEventRecord, cudaStreamWaitEvent).
                      To step on several streams at once, give each a plan with tensors of its own.

   CAPTURE            All of these functions can be captured in a CUDA graph, except three that would undo the training
                      at every replay: kopt_cuda_state_init(), kopt_cuda_state_load() and kopt_cuda_plan_upload(). They
                      refuse a stream that is being captured with KOPT_ERROR_CAPTURE. A captured call keeps its
                      arguments: each replay passes them again, as they were. So a new plan needs a new graph.

   ERRORS             A kopt_cuda_plan_X() that fails after kopt_cuda_plan_upload(), because of its arguments or because
                      of CUDA, stops the plan: the status says why, and each step is skipped and counted as skipped,
                      until kopt_cuda_plan_acknowledge() or kopt_cuda_plan_upload(). So no step is made with settings
                      that the program believes to have changed, unless the stream takes no launch at all (that of
                      another GPU): check the result. Arguments that are refused change nothing else. In a capture, the
                      graph gets the stop: discard it.

   WHAT IT DOES NOT   It never allocates, synchronises, exits or prints, and it never reads or clears the program's CUDA
                      error.

   CONFIGURATION
   KAHAN_OPT_CUDA_IMPLEMENTATION   create the implementation: in one .cu file, before that file includes kahan_opt.h.
   KAHAN_OPT_CUDA_SELF             the name of this file, with quotes, if you renamed it: the file includes itself.

   CONTENTS   PLAN   STEP   STATISTICS   STATE   ACCUMULATION
              (implementation)   VOCABULARY   KERNELS   PUBLIC FUNCTIONS
*/
#ifndef KOPT_PASS_ /* everything except the vocabulary, for which kahan_opt.h includes this file */
#ifdef __NVCC__
#pragma nv_diagnostic push
#pragma nv_diag_suppress 177 /* unused static functions */
#endif
#if defined(__cplusplus) && (defined(__GNUC__) || defined(__clang__)) /* casts are those of C, as in kahan_opt.h */
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wcast-align"
#pragma GCC diagnostic ignored "-Wold-style-cast"
#pragma GCC diagnostic ignored "-Wzero-as-null-pointer-constant"
#endif
#if defined(KAHAN_OPT_CUDA_IMPLEMENTATION) && !defined(KOPT_CUDA_IMPLEMENTED_) && defined(KAHAN_OPT_H)
#error "define KAHAN_OPT_CUDA_IMPLEMENTATION before the first include of kahan_opt.h or kahan_opt_cuda.cuh"
#undef KAHAN_OPT_CUDA_IMPLEMENTATION
#endif
#ifndef KAHAN_OPT_CUDA_CUH
#define KAHAN_OPT_CUDA_CUH

#ifndef KAHAN_OPT_SELF
#define KAHAN_OPT_SELF "kahan_opt.h"
#endif
#ifndef KAHAN_OPT_CUDA_SELF
#define KAHAN_OPT_CUDA_SELF "kahan_opt_cuda.cuh"
#endif
#if defined(KAHAN_OPT_STATIC) && defined(KAHAN_OPT_CUDA_IMPLEMENTATION)
#define KOPT_CUDA_API_ static KOPT_UNUSED_
#elif defined(KAHAN_OPT_API)
#define KOPT_CUDA_API_ KOPT_EXTERN_ KAHAN_OPT_API
#else
#define KOPT_CUDA_API_ KOPT_EXTERN_
#endif

/* The implementation needs private parts of kahan_opt.h. It makes them static, so that they do not collide with the
   program's own copy at link time. KAHAN_OPT_API is for the functions of this file then. */
#if defined(KAHAN_OPT_CUDA_IMPLEMENTATION) && !defined(KAHAN_OPT_IMPLEMENTATION)
#pragma push_macro("KAHAN_OPT_API")
#undef KAHAN_OPT_API
#ifndef KAHAN_OPT_STATIC
#define KAHAN_OPT_STATIC
#endif
#define KAHAN_OPT_IMPLEMENTATION
#include KAHAN_OPT_SELF
#pragma pop_macro("KAHAN_OPT_API")
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

enum { KOPT_CUDA_KERNELS_ = 81, KOPT_CUDA_ROOM_ = 128 }; /* a plan has room for more kernels: its layout stays */

/* A handle: a plain struct that owns no memory. The plan itself is a block of bytes that you keep, on the host and in
   GPU memory, as long as you use the plan. */
typedef struct kopt_cuda_plan {
    /* Yours: set it at any time after kopt_cuda_plan_build(). */
    uint32_t blocks; /* upper limit on the thread blocks of a launch; 0: no limit. Does not change results            */
    uint32_t reserved32_; /* 0 */
    /* Only read them. */
    void *bytes;  /* the plan on the host, which kopt_cuda_plan_build() has written                               */
    void *device; /* the plan on the GPU, or NULL before kopt_cuda_plan_upload()                                  */
    size_t size;  /* of each, in bytes                                                                            */
    /* Only the library uses these: their names end in _. */
    size_t groups_, at_tensors_, at_tasks_, at_ratios_;
    uint32_t tensors_, width_, grad_format_, stable_, guards_, rounds_, first_[KOPT_CUDA_ROOM_];
} kopt_cuda_plan;

/* The size of a plan in bytes: about 1,000 per group, 200 per tensor. 0 if a group is invalid. */
KOPT_CUDA_API_ size_t kopt_cuda_plan_size(const kopt_cuda_group *groups, size_t count);

/* Checks everything that can be checked without reading device memory, and writes the plan to bytes: size bytes of host
   memory, aligned to 16, which later calls read. Needs no GPU. Keeps no pointer to its other arguments. Each group
   begins at its opt->step. In each tensor, counts must be NULL and stable_scale 0 (the GPU measures it itself);
   otherwise KOPT_ERROR_OPTION. All tensors of the plan together must have fewer than 2^40 elements, a tensor with
   StableAdamW fewer than 2^36; otherwise KOPT_ERROR_BOUNDS (elements on other GPUs are not checked). No two tensors of
   a plan may share memory; only neighbours are checked, also those of two groups: KOPT_ERROR_OVERLAP. */
KOPT_CUDA_API_ KOPT_RESULT_ kopt_cuda_plan_build(kopt_cuda_plan *plan, void *bytes, size_t size,
                                                 const kopt_cuda_group *groups, size_t count);

/* Loads all kernels that calls with the plan launch, and copies the plan, plan->size bytes, to device memory aligned to
   16. So a GPU that lacks code for them (KOPT_ERROR_ISA) or room (KOPT_ERROR_DEVICE) is found here and not in a step,
   and a capture needs no step before it. A later upload sets all back to what kopt_cuda_plan_build() was given, step
   counts and addresses, too, and the options to zero. KOPT_ERROR_CAPTURE: so would each replay. */
KOPT_CUDA_API_ KOPT_RESULT_ kopt_cuda_plan_upload(kopt_cuda_plan *plan, void *device, void *stream);

/* Only of an object without kernels, which a C++ compiler other than nvcc has made of this file (C++14): takes them
   from PTX. All calls are then made by the driver of the system, that of CUDA 12.0 or a later one. ptx is what
   `nvcc -ptx -arch=compute_75` makes of the same file with the same macros, or several such texts one after the other,
   each with its NUL: size bytes in all, which stay where they are. A text is compiled when the first of its kernels is
   loaded. Before this call, and after KOPT_ERROR_ISA (no driver, an older one, or no GPU), all others fail.
   KOPT_ERROR_BOUNDS: the last byte is not NUL. */
#if !defined(__CUDACC__) || !defined(KAHAN_OPT_CUDA_IMPLEMENTATION)
KOPT_CUDA_API_ KOPT_RESULT_ kopt_cuda_use_ptx(const char *ptx, size_t size);
#endif

/* For tensors that move: new addresses of weight, grad, state, arrays and copy of the tensors `first` to
   first + count - 1 of the plan, in the order of its lists. Their contents move with them, but a gradient may be a new
   one. The call is a launch for each 96 tensors, or each 25 if one of them has arrays, with the addresses as its
   arguments. Of the rest of the tensors only n and the formats are read. KOPT_ERROR_MISMATCH: they are not those of
   the plan, or a copy or a state is there where none was, or the other way round. KOPT_ERROR_OPTION: a tensor has
   arrays where it had none, or the reverse, or both a block and arrays. KOPT_ERROR_BOUNDS: no such tensors. */
KOPT_CUDA_API_ KOPT_RESULT_ kopt_cuda_plan_set_arrays(const kopt_cuda_plan *plan, size_t first, size_t count,
                                                      const kopt_tensor *tensors, void *stream);

/* ---- STEP ------------------------------------------------------------------------------------------------------- */

/* Makes one step of every tensor of the plan: counts the step, computes its scalars, and writes weights, state and
   copies. The bits are those of kopt_optimizer_step() for each group. Arrays may have any alignment; at 16 bytes, or
   for a shard where its index is a multiple of 8, it is fast. After KOPT_ERROR_DEVICE some tensors may be stepped and
   others not: load a checkpoint. */
KOPT_CUDA_API_ KOPT_RESULT_ kopt_cuda_plan_step(const kopt_cuda_plan *plan, void *stream);

/* The settings below hold for all following steps on the stream. They are copied when they are called; in a graph, each
   replay sets the captured values again. */

/* Options. kopt_cuda_plan_set_options() copies them into the plan on the GPU. All zero at first. */
typedef struct kopt_cuda_options {
    int check_finite;        /* 1: skip the step if a gradient is not finite       (needs kopt_cuda_plan_measure())   */
    uint32_t reserved32_;    /* 0 */
    double max_norm;         /* > 0: clip the norm of all gradients together to it (needs kopt_cuda_plan_measure())   */
    const float *lr;         /* NULL, or the device address of the learning rate of all groups, in place of opt->lr. An
                                average has none: its decay is beta1, and kopt_cuda_plan_set_optimizer() changes it   */
    const float *loss_scale; /* NULL, or the device address of a number that divides the gradients                    */
    const float *found_inf;  /* NULL, or the device address of a flag: if it is not zero, the step is skipped         */
    uint64_t reserved_[4];   /* 0, otherwise KOPT_ERROR_OPTION */
} kopt_cuda_options;
KOPT_CUDA_API_ KOPT_RESULT_ kopt_cuda_plan_set_options(const kopt_cuda_plan *plan, const kopt_cuda_options *options,
                                                       void *stream);

/* Sets new hyper-parameters of a group, e.g. for a learning rate schedule. Rule, formats of moments, roundings,
   stable and the number of moments must stay; otherwise KOPT_ERROR_MISMATCH. Ignores opt->step: the GPU counts. */
KOPT_CUDA_API_ KOPT_RESULT_ kopt_cuda_plan_set_optimizer(const kopt_cuda_plan *plan, size_t group,
                                                         const kopt_optimizer *opt, void *stream);

/* Sets the number of steps that all groups have begun so far. For different numbers, build and upload a new plan. */
KOPT_CUDA_API_ KOPT_RESULT_ kopt_cuda_plan_set_step(const kopt_cuda_plan *plan, uint32_t step, void *stream);

/* The device address of the number of steps that a group has begun so far: kopt_optimizer.step. Copy it to the host
   when you need it; kopt_cuda_state_save() does. NULL if there is no such group. */
KOPT_CUDA_API_ const uint32_t *kopt_cuda_plan_steps(const kopt_cuda_plan *plan, size_t group);

/* What the GPU reports. A skipped step changes nothing: no weight, no state, no gradient, no step count. */
typedef struct kopt_cuda_status {
    uint32_t result;       /* a kopt_result: KOPT_OK, or why the plan is stopped (see ERRORS), or why the last step was
                              refused, as a CPU step would be                                                         */
    uint32_t skipped;      /* 1 if the last step was skipped                                                          */
    uint64_t steps, skips; /* numbers of steps made and skipped since kopt_cuda_plan_upload()                         */
    double norm;           /* of the gradients in memory, unscaled, by the last kopt_cuda_plan_measure() that a step
                              used                                                                                    */
} kopt_cuda_status;

/* The device address of the status. Copy it to the host when you need it. */
KOPT_CUDA_API_ const kopt_cuda_status *kopt_cuda_plan_status(const kopt_cuda_plan *plan);

/* For a plan that an error has stopped (see ERRORS): the following steps are made again, with the settings that it has.
   The result of its status becomes KOPT_OK. */
KOPT_CUDA_API_ KOPT_RESULT_ kopt_cuda_plan_acknowledge(const kopt_cuda_plan *plan, void *stream);

/* ---- STATISTICS: one pass over all gradients. Exact: the same bits in any order and for any sharding ------------- */

/* Measures all gradients. Call it before each kopt_cuda_plan_step() if the options have check_finite or max_norm;
   without it the step is refused: the status says KOPT_ERROR_STEP. */
KOPT_CUDA_API_ KOPT_RESULT_ kopt_cuda_plan_measure(const kopt_cuda_plan *plan, void *stream);

/* The device address of the result: the kopt_norm of all gradients, bit for bit as from kopt_norm_add(). With several
   GPUs, sum its *words words as uint64 over all GPUs (ncclSum) between kopt_cuda_plan_measure() and
   kopt_cuda_plan_step(). words may be NULL. */
KOPT_CUDA_API_ kopt_norm *kopt_cuda_plan_norm(const kopt_cuda_plan *plan, size_t *words);

/* ---- STATE: blocks, or arrays of the caller, on the GPU. They are those of kahan_opt.h, byte for byte. All pointers
        in a tensor are device addresses, but t.arrays is a struct in host memory: those in it are device addresses - */

/* kopt_state_init() on device memory: the same states, weights and copies, and the same errors. weights is NULL or
   the device address of kopt_list_length() fp32 values. KOPT_ERROR_CAPTURE: each replay would erase the moments. */
KOPT_CUDA_API_ KOPT_RESULT_ kopt_cuda_state_init(const kopt_optimizer *opt, const kopt_tensor *tensors, size_t count,
                                                 const float *weights, void *stream);

/* Checkpoints are made on the host, by kopt_save(), of tensors in host memory that have the same weight_format, n, id
   and first_index, and arrays if t has arrays, otherwise a block (KOPT_ERROR_OPTION). kopt_cuda_state_save() copies
   weights and state of t to such a tensor, and the number of steps that its group has begun to opt->step. The copies
   are complete when the stream has come that far (cudaStreamSynchronize); with page-locked memory the host does not
   wait for them. KOPT_ERROR_BOUNDS: there is no such group. */
KOPT_CUDA_API_ KOPT_RESULT_ kopt_cuda_state_save(const kopt_cuda_plan *plan, size_t group, kopt_optimizer *opt,
                                                 const kopt_tensor *t, const kopt_tensor *host, void *stream);

/* The other way round, in place of kopt_cuda_state_init(), after kopt_load() has filled the tensors on the host: checks
   the state of the tensor, copies weights and state to t and sets t->copy to the weights. Then build a plan, which
   begins at opt->step; a plan that exists already needs kopt_cuda_plan_set_optimizer(), kopt_cuda_plan_set_step() and
   kopt_cuda_plan_acknowledge(). KOPT_ERROR_CAPTURE: each replay would load the state again. */
KOPT_CUDA_API_ KOPT_RESULT_ kopt_cuda_state_load(const kopt_optimizer *opt, const kopt_tensor *t,
                                                 const kopt_tensor *host, void *stream);

/* ---- ACCUMULATION on device memory. Arrays have any alignment; 16 bytes is fastest ------------------------------- */

/* kopt_accumulator_add() on device memory: sum += grad * scale. The struct a is on the host, its arrays sum and
   residual are on the GPU. grad has a->n values and must not overlap either of them. If counts is NULL, the call itself
   increments a->count and a->step, and plan may be NULL. Otherwise counts is the device address, aligned to 4, of two
   words that replace a->count and a->step, and plan is the one that steps with it. Set both words to 0 at first; each
   addition increments both when the GPU runs it, so that a captured call can be replayed. To begin a new sum, set the
   first to 0 (cudaMemsetAsync). At a count of 2^32 - 1 the call is refused with KOPT_ERROR_STEP; if the counts are on
   the GPU, the addition does nothing and stops the plan with this error (see ERRORS). */
KOPT_CUDA_API_ KOPT_RESULT_ kopt_cuda_accumulator_add(kopt_accumulator *a, const void *grad, kopt_format grad_format,
                                                      double scale, uint32_t *counts, const kopt_cuda_plan *plan,
                                                      void *stream);

/* kopt_accumulator_read() on device memory: out becomes the sum with its residual, a->n fp32 values; zeros while the
   count is 0. */
KOPT_CUDA_API_ KOPT_RESULT_ kopt_cuda_accumulator_read(const kopt_accumulator *a, float *out, const uint32_t *counts,
                                                       void *stream);

#endif /* KAHAN_OPT_CUDA_CUH */

/* ================================================================================================================== */
/* IMPLEMENTATION                                                                                                     */
/* ================================================================================================================== */
#if defined(KAHAN_OPT_CUDA_IMPLEMENTATION) && !defined(KOPT_CUDA_IMPLEMENTED_)
#define KOPT_CUDA_IMPLEMENTED_

#ifdef __CUDACC__
#ifdef __CUDACC_DEBUG__
#error "nvcc -G makes 140 MB of PTX of this file, where everything is inlined: use -lineinfo in its place"
#endif
#include <cuda_runtime.h>
#ifdef __CUDA_ARCH__
#define KOPT_UNROLL_ _Pragma("unroll")
#define KOPT_ROLL_ _Pragma("unroll 1")
#define KOPT_UNROLL_PAIRS_ _Pragma("unroll PAIRS")
#else
#define KOPT_UNROLL_
#define KOPT_ROLL_
#define KOPT_UNROLL_PAIRS_
#endif
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
#else /* a compiler that does not know kernels: they are in a text of PTX, and the driver launches them */
#include <atomic>
#include <cstring>
#ifdef _WIN32
#include <windows.h>
#define KOPT_CUDA_OPEN_ LoadLibraryA("nvcuda.dll")
#define KOPT_CUDA_FIND_ reinterpret_cast<void *>(GetProcAddress(static_cast<HMODULE>(kopt_driver_.driver), name))
#else
#include <dlfcn.h>
#define KOPT_CUDA_OPEN_ dlopen("libcuda.so.1", RTLD_NOW)
#define KOPT_CUDA_FIND_ dlsym(kopt_driver_.driver, name)
#endif
typedef kopt_scalars_scalar_ kopt_scalars_cuda_; /* of the same layout */
#endif

/* ---- the data structures in GPU memory ---- */

/* The bytes of the scalars that every kernel loads, a multiple of 16: all before slow_scale, with KAHAN_OPT_VMATH, too.
   With fewer, a kernel would take 0 for the others. */
enum { KOPT_CUDA_SCALARS_ = 64 };
typedef char kopt_cuda_scalars_fit_[offsetof(kopt_scalars_cuda_, slow_scale) <= KOPT_CUDA_SCALARS_ ? 1 : -1];

/* A group of the plan is two of these: that of the tensors with weight decay, and that of those with no_decay. */
typedef struct alignas(16) kopt_cuda_group_ {
    kopt_scalars_cuda_ k; /* of the current step. Kernels load its first KOPT_CUDA_SCALARS_ bytes as vectors */
    kopt_optimizer opt;   /* a multiple of 16 from the start: loaded as vectors, too */
    kopt_begun_ step;
    uint32_t step_number; /* step.step, where kernels load it with fewer instructions */
    uint32_t result;
} kopt_cuda_group_;

typedef struct kopt_cuda_control_ {
    kopt_cuda_options options;
    kopt_cuda_status status;
    kopt_norm norm;
    /* The sums of a pass of the statistics. The launch clears norm, bins and arrived first. */
    uint64_t bins[256];
    uint32_t arrived;
    uint32_t ready; /* norm is complete, and no step has used it yet */
    uint32_t skip;
    uint32_t stopped; /* KOPT_OK, or the error that has stopped the plan */
    uint64_t groups;
} kopt_cuda_control_;

/* Element i of a tensor has position x = i + pad. Eight elements whose first position is a multiple of 8 are an octet;
   one thread steps an octet at a time. Except with 8-bit moments, where pad is 0, the position of an element is
   congruent to its global index modulo 256, so the 8 elements of an octet share one Philox block. */
typedef struct alignas(16) kopt_cuda_tensor_ {
    kopt_byte_ *weight, *grad, *copy, *state; /* state: NULL with arrays of the caller */
    kopt_byte_ *residual, *moment[4], *scale[4], *slow, *slow_residual;
    kopt_byte_ *rates; /* FEEDBACK; NULL: the tensor has no guard, and beta1 and feedback are not read */
    uint64_t pad, end; /* position of the first element, and the position after the last */
    uint64_t first;    /* global index of position 0, modulo 2^64 */
    uint64_t complete; /* an octet is complete if the index of its first element, modulo 2^64, is below this */
    uint32_t id, group;
    /* base_scale is rate_scale without StableAdamW's factor, which changes with each step. */
    float rate_scale, base_scale, beta1, feedback;
    uint32_t ratio_plus_1; /* StableAdamW: index of its norm + 1, or 0 */
    uint8_t weight_format, grad_format, copy_format, weight_size, residual_size, moment_size[4];
    uint8_t arrays; /* its state is in arrays of the caller */
    uint8_t wide;   /* all arrays are aligned for vector loads */
} kopt_cuda_tensor_;

typedef struct kopt_cuda_arguments_ {
    kopt_cuda_control_ *control;
    kopt_cuda_group_ *groups;
    kopt_cuda_tensor_ *tensors;                 /* in the order of their kernels */
    const uint32_t *first_task, *first_round;   /* of each tensor; a round is a task of StableAdamW */
    uint32_t tensor_count, first, count, width; /* the tasks of this launch: first, number; positions per task */
    kopt_norm *ratios;                          /* StableAdamW: one sum for each of its tensors */
} kopt_cuda_arguments_;

enum { KOPT_THREADS_ = 256, KOPT_WARPS_ = 8, KOPT_ROUND_ = 4096 /* elements of a round: 512 for each warp */ };
#define KOPT_CUDA_WARPS_OF_(moment) ((moment) >= (int)KOPT_Q8 ? 4 : 8) /* of a block of steps with such moments */
enum { KOPT_PROLOGUE_PAIRS_ = 64, KOPT_PROLOGUE_THREADS_ = 2 * KOPT_PROLOGUE_PAIRS_ + 32 };

/* ---- what kernels are there ---- */

/* What is constant in a kernel: the format of the weights, that of the moments, and (but for KOPT_CUDA_ANY_) how
   weights are rounded. HOW: */
enum {
    KOPT_CUDA_ADAM_, /* Adam with two moments, whose moments and compensations are rounded stochastically */
    KOPT_CUDA_ONE_,  /* SGD, Lion, EMA, and nothing but weights, residuals and moments is stored (of fp32: copies) */
    KOPT_CUDA_MORE_, /* the same for Adam and Adan */
    KOPT_CUDA_ANY_,  /* all steps */
    KOPT_CUDA_MIXED_ /* all steps, with moments of two formats: element by element, and no format is constant */
};
enum { KOPT_CUDA_VARIES_ = 9 };            /* in place of a rounding: it is not constant */
enum { KOPT_CUDA_BF16_Q8_ = KOPT_Q8 + 1 }; /* in place of a format: bf16 first and 8-bit second moments */

/* The kernels, X(weights, moments, rounding, how). A tensor takes the first that fits; the last one takes the rest. */
#define KOPT_CUDA_ROUNDINGS_(X, weight, moment, how) \
    X(weight, moment, KOPT_KAHAN, how)               \
    X(weight, moment, KOPT_EXACT, how)               \
    X(weight, moment, KOPT_COMPACT, how) X(weight, moment, KOPT_STOCHASTIC, how) X(weight, moment, KOPT_NEAREST, how)
#define KOPT_CUDA_MOMENTS_(X, weight)                       \
    X(weight, KOPT_F32, KOPT_CUDA_VARIES_, KOPT_CUDA_ANY_)  \
    X(weight, KOPT_BF16, KOPT_CUDA_VARIES_, KOPT_CUDA_ANY_) \
    X(weight, KOPT_FP16, KOPT_CUDA_VARIES_, KOPT_CUDA_ANY_) X(weight, KOPT_Q8, KOPT_CUDA_VARIES_, KOPT_CUDA_ANY_)
#define KOPT_CUDA_NEAREST_(X, weight, moment, how) X(weight, moment, KOPT_NEAREST, how)
#define KOPT_CUDA_HOWS_(ROUNDINGS, X, weight, moment) \
    ROUNDINGS(X, weight, moment, KOPT_CUDA_ADAM_)     \
    ROUNDINGS(X, weight, moment, KOPT_CUDA_ONE_) ROUNDINGS(X, weight, moment, KOPT_CUDA_MORE_)
#ifndef KOPT_CUDA_STEPS_ /* fewer of them, to try something */
#define KOPT_CUDA_STEPS_(X)                                            \
    KOPT_CUDA_HOWS_(KOPT_CUDA_ROUNDINGS_, X, KOPT_BF16, KOPT_BF16)     \
    KOPT_CUDA_HOWS_(KOPT_CUDA_ROUNDINGS_, X, KOPT_BF16, KOPT_F32)      \
    KOPT_CUDA_HOWS_(KOPT_CUDA_ROUNDINGS_, X, KOPT_BF16, KOPT_Q8)       \
    KOPT_CUDA_HOWS_(KOPT_CUDA_NEAREST_, X, KOPT_F32, KOPT_F32)         \
    KOPT_CUDA_HOWS_(KOPT_CUDA_NEAREST_, X, KOPT_F32, KOPT_Q8)          \
    X(KOPT_BF16, KOPT_CUDA_BF16_Q8_, KOPT_KAHAN, KOPT_CUDA_ADAM_)      \
    X(KOPT_BF16, KOPT_CUDA_BF16_Q8_, KOPT_COMPACT, KOPT_CUDA_ADAM_)    \
    X(KOPT_BF16, KOPT_CUDA_BF16_Q8_, KOPT_STOCHASTIC, KOPT_CUDA_ADAM_) \
    X(KOPT_BF16, KOPT_CUDA_BF16_Q8_, KOPT_FEEDBACK, KOPT_CUDA_ADAM_)   \
    KOPT_CUDA_ROUNDINGS_(X, KOPT_FP16, KOPT_FP16, KOPT_CUDA_ADAM_)     \
    KOPT_CUDA_ROUNDINGS_(X, KOPT_FP16, KOPT_F32, KOPT_CUDA_ADAM_)      \
    X(KOPT_BF16, KOPT_BF16, KOPT_FEEDBACK, KOPT_CUDA_ADAM_)            \
    X(KOPT_BF16, KOPT_F32, KOPT_FEEDBACK, KOPT_CUDA_ADAM_)             \
    X(KOPT_BF16, KOPT_Q8, KOPT_FEEDBACK, KOPT_CUDA_ADAM_)              \
    KOPT_CUDA_MOMENTS_(X, KOPT_F32)                                    \
    KOPT_CUDA_MOMENTS_(X, KOPT_BF16)                                   \
    KOPT_CUDA_MOMENTS_(X, KOPT_FP16)                                   \
    X(KOPT_BF16, KOPT_Q8, KOPT_CUDA_VARIES_, KOPT_CUDA_MIXED_)
#endif

/* ---- the arguments of the other kernels, and the addresses of tensors ---- */

typedef struct kopt_cuda_setting_ {
    kopt_cuda_control_ *control;
    kopt_cuda_group_ *group; /* the group of this setting, or the first of all groups */
    kopt_cuda_options options;
    kopt_optimizer opt;
    uint32_t step, *counts, result;
    int which; /* 0: options, 1: optimizer, 2: step; 3: an addition to counts, the count and the step of a sum;
                  4: result, an error that stops the plan, or KOPT_OK, with which it goes on */
} kopt_cuda_setting_;

/* Is array p aligned for vectors where the first octet begins, after `lead` elements? */
static KOPT_HOST_DEVICE_ int kopt_cuda_aligned_(const void *p, uint64_t lead, size_t size) {
    return size == 0 || p == NULL || ((uintptr_t)p + lead * size) % (size == 1 ? 8 : 16) == 0;
}

/* A tensor's addresses: weight, grad, state, copy and, with arrays of the caller, KOPT_ARRAYS_ of them and rates. */
enum { KOPT_CUDA_ADDRESSES_ = 5 + KOPT_ARRAYS_ };
static void kopt_cuda_addresses_(void **to, const kopt_tensor *t) {
    const kopt_state_arrays *const a = t->arrays;
    int m;
    to[0] = t->weight;
    to[1] = t->grad;
    to[2] = t->state;
    to[3] = t->copy;
    if (a == NULL) return;
    for (m = 0; m < 4; m++) to[4 + m] = a->moment[m];
    for (m = 0; m < 4; m++) to[8 + m] = a->scale[m];
    to[12] = a->residual;
    to[13] = a->slow;
    to[14] = a->slow_residual;
    to[15] = a->rates;
}

/* Gives a tensor these addresses. The arrays that it has keep their places in a block. */
static KOPT_HOST_DEVICE_ void kopt_cuda_place_(kopt_cuda_tensor_ *t, void *const *to) {
    const uint64_t lead = (8 - (t->pad & 7)) & 7;
    kopt_byte_ **const inside[] = {&t->moment[0], &t->moment[1], &t->moment[2],     &t->moment[3],
                                   &t->scale[0],  &t->scale[1],  &t->scale[2],      &t->scale[3],
                                   &t->residual,  &t->slow,      &t->slow_residual, &t->rates};
    const size_t size[KOPT_CUDA_ADDRESSES_ - 4] = {
        t->moment_size[0], t->moment_size[1], t->moment_size[2], t->moment_size[3], 0, 0, 0, 0,
        t->residual_size,  t->weight_size,    t->residual_size};
    int wide, i;
    t->weight = (kopt_byte_ *)to[0];
    t->grad = (kopt_byte_ *)to[1];
    t->copy = (kopt_byte_ *)to[3];
    wide = kopt_cuda_aligned_(t->weight, lead, t->weight_size) &&
           kopt_cuda_aligned_(t->grad, lead, t->grad_format == KOPT_F32 ? 4 : 2) &&
           kopt_cuda_aligned_(t->copy, lead, t->copy_format == KOPT_F32 ? 4 : 2);
    for (i = 0; i < KOPT_CUDA_ADDRESSES_ - 4; i++) {
        if (*inside[i] != NULL)
            *inside[i] = t->arrays ? (kopt_byte_ *)to[4 + i] : (kopt_byte_ *)to[2] + (*inside[i] - t->state);
        wide = wide && kopt_cuda_aligned_(*inside[i], lead, size[i]);
    }
    t->state = (kopt_byte_ *)to[2];
    t->wide = (uint8_t)wide;
}

enum { KOPT_CUDA_MOVES_ = 96 }; /* tensors without arrays, whose addresses fit into the arguments of one launch */
typedef struct kopt_cuda_moves_ {
    kopt_cuda_tensor_ *tensors;
    const uint32_t *slots;         /* where the tensors of the list are in the order of their kernels */
    uint32_t first, count, stride; /* stride: addresses of each tensor, 4 or KOPT_CUDA_ADDRESSES_ */
    void *to[4 * KOPT_CUDA_MOVES_];
} kopt_cuda_moves_;

typedef struct kopt_cuda_accumulation_ {
    kopt_cuda_tensor_ tensor;
    kopt_begun_ step;
    uint32_t count;         /* additions before this one */
    const uint32_t *counts; /* NULL, or count and the step before this one, on the GPU */
    kopt_byte_ *out;        /* of a sum that is read, fp32 */
} kopt_cuda_accumulation_;

typedef struct kopt_cuda_init_ {
    kopt_cuda_tensor_ tensor;  /* its state is NULL if it has none */
    const kopt_byte_ *weights; /* fp32, or NULL: the weights stay as they are */
    kopt_format format;
    kopt_rounding rounding;
    int fresh; /* 0: only the copy is written */
    kopt_byte_ header[KOPT_HEADER_];
} kopt_cuda_init_;

#ifdef __CUDACC__
/* Hides from the compiler that x keeps its value. So the compiler recomputes or reloads what depends on x and keeps
   nothing of it in registers. */
#define KOPT_CUDA_OPAQUE_(x, letter) asm volatile("" : "+" letter(x))

/* The tensor of a task: the last one whose first task is not above it. By all lanes of a warp. */
KOPT_CUDA_FN_ uint32_t kopt_cuda_find_(const uint32_t *first, uint32_t count, uint32_t task, uint32_t lane) {
    uint32_t low = 0;
    while (count > 1) {
        const uint32_t stride = (count + 31) / 32, at = lane * stride;
        const uint32_t below = (uint32_t)__popc(__ballot_sync(0xFFFFFFFFu, at < count && first[low + at] <= task)) - 1;
        low += below * stride;
        count = min(stride, count - below * stride);
    }
    return low;
}

/* ---- loads and stores of global memory in PTX, with exactly this width and in exactly this order ---- */

/* bytes: 8, or a multiple of 16; the address is a multiple of 8, or of 16. */
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

/* The octet that begins at element i: elements of 1, 2 or 4 bytes, or 0 if there is no such array. */
KOPT_CUDA_FN_ void kopt_cuda_load_octet_(uint32_t *to, const kopt_byte_ *p, uint64_t i, size_t size) {
    if (size == 4) kopt_cuda_load_words_(to, p + i * 4, 32);
    if (size == 2) kopt_cuda_load_words_(to, p + i * 2, 16);
    if (size == 1) kopt_cuda_load_words_(to, p + i, 8);
}

KOPT_CUDA_FN_ void kopt_cuda_store_octet_(kopt_byte_ *p, uint64_t i, size_t size, const uint32_t *from) {
    if (size == 4) kopt_cuda_store_words_(p + i * 4, from, 32);
    if (size == 2) kopt_cuda_store_words_(p + i * 2, from, 16);
    if (size == 1) kopt_cuda_store_words_(p + i, from, 8);
}

/* Element i, of 1, 2 or 4 bytes, in the low bits, at any alignment. Of 0 bytes, if there is no such array, it is 0. */
KOPT_CUDA_FN_ uint32_t kopt_cuda_load_one_(const kopt_byte_ *array, uint64_t i, size_t size) {
    const kopt_byte_ *const p = array + i * size;
    uint32_t a = 0, byte;
    if (size == 4 && ((uintptr_t)p & 3) == 0) {
        asm volatile("ld.global.u32 %0, [%1];" : "=r"(a) : "l"(p));
    } else if (size == 2 && ((uintptr_t)p & 1) == 0) {
        asm volatile("ld.global.u16 %0, [%1];" : "=r"(a) : "l"(p));
    } else {
        for (size_t k = 0; k < size; k++) {
            asm volatile("ld.global.u8 %0, [%1];" : "=r"(byte) : "l"(p + k));
            a |= byte << (8 * k);
        }
    }
    return a;
}

KOPT_CUDA_FN_ void kopt_cuda_store_one_(kopt_byte_ *array, uint64_t i, size_t size, uint32_t a) {
    kopt_byte_ *const p = array + i * size;
    if (size == 4 && ((uintptr_t)p & 3) == 0) {
        asm volatile("st.global.u32 [%0], %1;" : : "l"(p), "r"(a) : "memory");
    } else if (size == 2 && ((uintptr_t)p & 1) == 0) {
        asm volatile("st.global.u16 [%0], %1;" : : "l"(p), "r"(a) : "memory");
    } else {
        for (size_t k = 0; k < size; k++)
            asm volatile("st.global.u8 [%0], %1;" : : "l"(p + k), "r"(a >> (8 * k)) : "memory");
    }
}

/* Element q of 8 elements that are packed as in memory. */
KOPT_CUDA_FN_ uint32_t kopt_cuda_extract_(const uint32_t *packed, size_t size, int q) {
    if (size == 4) return packed[q];
    return size == 2 ? packed[q >> 1] >> 16 * (q & 1) & 0xFFFFu : packed[q >> 2] >> 8 * (q & 3) & 0xFFu;
}

/* The 1-byte residuals of COMPACT, and codes, are signed. */
KOPT_CUDA_FN_ uint32_t kopt_cuda_sign_extend_(uint32_t a, size_t size) { return size == 1 ? (a ^ 0x80u) - 0x80u : a; }
KOPT_CUDA_FN_ uint32_t kopt_cuda_load_signed_(const kopt_byte_ *array, uint64_t i, size_t size) {
    return kopt_cuda_sign_extend_(kopt_cuda_load_one_(array, i, size), size);
}

/* ---- random bits ---- */

/* r of element i of a tensor (see kopt_random_combine_). */
KOPT_CUDA_FN_ uint32_t kopt_cuda_random_one_(const kopt_cuda_tensor_ *t, const kopt_philox_key_ *key, uint64_t i) {
    const uint64_t e = t->first + t->pad + i;
    uint32_t w[4], halves;
    kopt_philox_cuda_(w, key, kopt_philox_block_(e));
    halves = (e & 4) != 0 ? ((e & 2) != 0 ? w[3] : w[2]) : ((e & 2) != 0 ? w[1] : w[0]);
    return kopt_random_combine_((e & 1) != 0 ? halves >> 16 | halves << 16 : halves, e);
}

KOPT_CUDA_FN_ kopt_philox_key_ kopt_cuda_key_(const kopt_cuda_tensor_ *t, const kopt_cuda_group_ *g) {
    return kopt_make_philox_key_(g->step.seed, g->step_number, t->id, KOPT_RANDOM_STEP_);
}

/* Number 0 of an element of a pair (see kopt_random_combine_), and *stride, 2 * other, each modulo 2^16 with any bits
   above. word: that of the pair; half: which of the two; multiplier: of the octet. */
KOPT_CUDA_FN_ uint32_t kopt_cuda_number_(uint32_t word, int half, uint32_t multiplier, uint32_t *stride) {
    const uint32_t low = word & 0xFFFFu, high = word >> 16, other = half == 0 ? high : low;
    *stride = 2 * other;
    return (half == 0 ? low : high) + other * (2 * multiplier);
}

/* ---- elements: any kind, any value, any alignment ---- */

KOPT_CUDA_FN_ kopt_kind_ kopt_cuda_kind_(const kopt_cuda_tensor_ *t, const kopt_begun_ *s) {
    kopt_job_ job;
    job.step = s;
    job.weight_format = (kopt_format)t->weight_format;
    job.grad_format = (kopt_format)t->grad_format;
    return kopt_kind_of_(&job);
}

/* Moment m of element i in its word; of 8-bit moments as fp32, and of a mean of squares their root. */
KOPT_CUDA_FN_ uint32_t kopt_cuda_load_moment_(const kopt_cuda_tensor_ *t, kopt_kind_ kind, int m, uint64_t i) {
    const kopt_format format = kopt_moment_format_(kind, m);
    float y;
    if (format != KOPT_Q8) return kopt_cuda_load_one_(t->moment[m], i, kopt_bytes_of_(format));
    y = kopt_decode_q8_cuda_(kopt_cuda_load_signed_(t->moment[m], i, 1), kopt_is_square_(kind.rule, m), 0);
    KOPT_OPAQUE_FLOAT_(y); /* see kopt_decode_number_ */
    return kopt_as_u32_(
        kopt_mul_cuda_(y, kopt_as_f32_(kopt_scale_q8_(kopt_cuda_load_one_(t->scale[m], i / KOPT_BLOCK_, 1)))));
}

/* Steps element i from memory to memory. 8-bit moments are not stored but returned, as fp32. */
KOPT_CUDA_FN_ uint4 kopt_cuda_element_(const kopt_cuda_tensor_ *t, kopt_kind_ kind, const kopt_scalars_cuda_ *scalars,
                                       const kopt_philox_key_ *key, uint64_t i) {
    const size_t weight_size = kopt_bytes_of_(kind.weight);
    const size_t residual_size = kopt_bytes_of_residual_(kind.weight, kind.rounding);
    const size_t grad_size = kopt_bytes_of_(kind.grad), copy_size = t->copy_format == KOPT_F32 ? 4 : 2;
    const uint32_t r = kopt_needs_random_(kind) ? kopt_cuda_random_one_(t, key, i) : 0;
    kopt_scalars_cuda_ k = *scalars;
    kopt_element_cuda_ e;
    float w, compensation, x;
    int m;
    k.rate = kopt_mul_cuda_(k.rate, t->rate_scale);
    k.weight_decay = kopt_mul_cuda_(k.weight_decay, t->rate_scale);
    k.use_decay = kopt_as_u32_(k.weight_decay) != 0;
    if (kind.feedback) k.beta1 = t->beta1;
    if (kind.feedback) k.feedback = t->feedback;
    e.weight = kopt_cuda_load_one_(t->weight, i, weight_size);
    e.grad = kopt_cuda_load_one_(t->grad, i, grad_size);
    e.residual = kopt_cuda_load_signed_(t->residual, i, residual_size);
    e.slow = e.slow_residual = 0;
    KOPT_UNROLL_
    for (m = 0; m < 4; m++) e.moment[m] = m < kind.moment_count ? kopt_cuda_load_moment_(t, kind, m, i) : 0;
    if (k.sync) {
        e.slow = kopt_cuda_load_one_(t->slow, i, weight_size);
        e.slow_residual = kopt_cuda_load_signed_(t->slow_residual, i, residual_size);
    }
    w = kopt_load_weight_cuda_(kind, e.weight, e.residual, &compensation, NULL);
    x = kopt_direction_cuda_(kind, &k, w, compensation, &e, r);
    kopt_commit_element_cuda_(kind, &k, x, w, compensation, &e, r, k.sync);
    if (!k.moments_only) {
        kopt_cuda_store_one_(t->weight, i, weight_size, e.weight);
        if (residual_size != 0) kopt_cuda_store_one_(t->residual, i, residual_size, e.residual);
        if (t->copy != NULL)
            kopt_cuda_store_one_(t->copy, i, copy_size, kopt_encode_copy_cuda_(kind, &e, (kopt_format)t->copy_format));
        if (k.sync) kopt_cuda_store_one_(t->slow, i, weight_size, e.weight);
        if (k.sync && residual_size != 0) kopt_cuda_store_one_(t->slow_residual, i, residual_size, e.residual);
    }
    KOPT_UNROLL_
    for (m = 0; m < 4; m++)
        if (m < kind.moment_count && kopt_moment_format_(kind, m) != KOPT_Q8)
            kopt_cuda_store_one_(t->moment[m], i, kopt_moment_bytes_(kind, m), e.moment[m]);
    if (k.zero_grad) kopt_cuda_store_one_(t->grad, i, grad_size, 0);
    return make_uint4(e.moment[0], e.moment[1], e.moment[2], e.moment[3]);
}

KOPT_CUDA_FN_ void kopt_cuda_store_code_(const kopt_cuda_tensor_ *t, kopt_kind_ kind, const kopt_philox_key_ *key,
                                         uint64_t i, int m, uint32_t moment, uint32_t scale) {
    const int square = kopt_is_square_(kind.rule, m);
    const float y = kopt_mul_cuda_(kopt_as_f32_(moment), kopt_inverse_scale_q8_cuda_(scale, square));
    uint32_t r = 0x8000u;
    if (kopt_moment_rounding_(kind, m) == KOPT_STOCHASTIC)
        r = KOPT_RANDOM_STORE_(kopt_cuda_random_one_(t, key, i), (uint32_t)m + 1);
    kopt_cuda_store_one_(t->moment[m], i, 1,
                         kopt_encode_q8_scalar_cuda_(kopt_codes_are_zero_(scale) ? 0 : y, square, r));
}

/* ---- octets: the arithmetic of vectors, in registers. If one of its numbers is special (docs/numerics.md, section 2),
        nothing is stored, and the octet is stepped element by element. All moments have the format kind.first ---- */

/* An octet of each array, packed as in memory; gradients, and 8-bit moments once they are decoded, as fp32. Lookahead
   has two moments: its slow weights and their residuals are in place of the others. */
typedef struct kopt_cuda_octet_ {
    uint32_t weight[8], residual[4], moment[4][8], scale[4];
    kopt_vf32_octet_ grad[8];
} kopt_cuda_octet_;

/* The first two of 8 packed elements, and setting them from words that have them in the upper halves (with 4 bytes: in
   all of it); then the other six move up, and the two become the last. So a loop over pairs needs no other index. */
KOPT_CUDA_FN_ uint32_t kopt_cuda_first_(const uint32_t *x, size_t size, int half) {
    if (size == 0) return 0;
    return kopt_cuda_sign_extend_(kopt_cuda_extract_(x, size, half), size);
}

KOPT_CUDA_FN_ uint32_t kopt_cuda_pack_(uint32_t low, uint32_t high) { return __byte_perm(low, high, 0x7632); }

KOPT_CUDA_FN_ void kopt_cuda_put_(uint32_t *x, size_t size, uint32_t a, uint32_t b) {
    if (size == 4) {
        x[0] = a;
        x[1] = b;
    }
    if (size == 2) x[0] = kopt_cuda_pack_(a, b);
    if (size == 1) x[0] = __byte_perm(x[0], kopt_cuda_pack_(a, b), 0x3264); /* bytes 0 and 2 of the packed word */
}

KOPT_CUDA_FN_ void kopt_cuda_rotate_(uint32_t *x, size_t size) {
    const uint32_t a = x[0], b = x[1];
    int q;
    if (size == 1) {
        x[0] = a >> 16 | b << 16;
        x[1] = b >> 16 | a << 16;
    }
    if (size == 2) {
        KOPT_UNROLL_
        for (q = 0; q < 3; q++) x[q] = x[q + 1];
        x[3] = a;
    }
    if (size == 4) {
        KOPT_UNROLL_
        for (q = 0; q < 6; q++) x[q] = x[q + 2];
        x[6] = a;
        x[7] = b;
    }
}

/* 0, 1 or 2; the compiler sees that it is never 4. */
KOPT_CUDA_FN_ size_t kopt_cuda_residual_size_(kopt_kind_ kind) {
    return kopt_bytes_of_residual_(kind.weight, kind.rounding) & 3;
}

KOPT_CUDA_FN_ void kopt_cuda_widen_all_(uint32_t x[8], kopt_format format) {
    int q;
    if (format == KOPT_F32) return;
    KOPT_UNROLL_
    for (q = 7; q >= 0; q--)
        x[q] = format == KOPT_BF16 ? kopt_widen_octet_(kopt_cuda_extract_(x, 2, q), KOPT_BF16)
                                   : kopt_widen_octet_(kopt_cuda_extract_(x, 2, q), KOPT_FP16);
}

/* Loads an octet of each array, all before it uses the first; 8-bit moments as codes. */
KOPT_CUDA_FN_ void kopt_cuda_load_all_(kopt_cuda_octet_ *x, const kopt_cuda_tensor_ *t, kopt_kind_ kind, uint64_t i,
                                       int sync) {
    const size_t weight_size = kopt_bytes_of_(kind.weight), residual_size = kopt_cuda_residual_size_(kind);
    int m;
    kopt_cuda_load_octet_(x->weight, t->weight, i, weight_size);
    kopt_cuda_load_octet_(x->residual, t->residual, i, residual_size);
    KOPT_UNROLL_
    for (m = 0; m < 4; m++)
        if (m < kind.moment_count) {
            kopt_cuda_load_octet_(x->moment[m], t->moment[m], i, kopt_bytes_of_(kopt_moment_format_(kind, m)));
            if (kopt_moment_format_(kind, m) == KOPT_Q8)
                x->scale[m] = kopt_cuda_load_one_(t->scale[m], i / KOPT_BLOCK_, 1);
        }
    if (sync) {
        kopt_cuda_load_octet_(x->moment[2], t->slow, i, weight_size);
        kopt_cuda_load_octet_(x->moment[3], t->slow_residual, i, residual_size);
    }
    /* each format has a load of its own: otherwise nvcc converts from all formats and selects */
    if (t->grad_format == KOPT_F32) {
        kopt_cuda_load_octet_(x->grad, t->grad, i, 4);
    } else if (t->grad_format == KOPT_BF16) {
        kopt_cuda_load_octet_(x->grad, t->grad, i, 2);
        kopt_cuda_widen_all_(x->grad, KOPT_BF16);
    } else {
        kopt_cuda_load_octet_(x->grad, t->grad, i, 2);
        kopt_cuda_widen_all_(x->grad, KOPT_FP16);
    }
}

/* Stores them, but not 8-bit moments. */
KOPT_CUDA_FN_ void kopt_cuda_store_all_(kopt_cuda_octet_ *x, const kopt_cuda_tensor_ *t, const kopt_cuda_group_ *g,
                                        kopt_kind_ kind, uint64_t i, int copies, int sync) {
    const size_t weight_size = kopt_bytes_of_(kind.weight), residual_size = kopt_cuda_residual_size_(kind);
    uint32_t other[8] = {0, 0, 0, 0, 0, 0, 0, 0};
    int m, q;
    KOPT_UNROLL_
    for (m = 0; m < 4; m++)
        if (m < kind.moment_count && kopt_moment_format_(kind, m) != KOPT_Q8)
            kopt_cuda_store_octet_(t->moment[m], i, kopt_moment_bytes_(kind, m), x->moment[m]);
    if (g->k.zero_grad) kopt_cuda_store_octet_(t->grad, i, t->grad_format == KOPT_F32 ? 4 : 2, other);
    if (g->k.moments_only) return;
    kopt_cuda_store_octet_(t->weight, i, weight_size, x->weight);
    kopt_cuda_store_octet_(t->residual, i, residual_size, x->residual);
    if (sync) kopt_cuda_store_octet_(t->slow, i, weight_size, x->weight);
    if (sync) kopt_cuda_store_octet_(t->slow_residual, i, residual_size, x->residual);
    if (copies && t->copy != NULL) {
        const kopt_format format = (kopt_format)t->copy_format;
        KOPT_UNROLL_
        for (q = 0; q < 8; q++) {
            const kopt_vf32_octet_ w = kopt_widen_octet_(kopt_cuda_extract_(x->weight, weight_size, q), kind.weight);
            if (format == KOPT_F32)
                other[q] = w;
            else
                other[q / 2] |= kopt_round_nearest16_octet_(w, format) << 16 * (q % 2);
        }
        kopt_cuda_store_octet_(t->copy, i, format == KOPT_F32 ? 4 : 2, other);
    }
}

/* The scalars of a step for octets, with the rates of a tensor. */
KOPT_CUDA_FN_ kopt_scalars_octet_ kopt_cuda_scalars_(const kopt_cuda_tensor_ *t, const kopt_cuda_group_ *g, int how,
                                                     int feedback) {
    union {
        uint32_t words[sizeof(kopt_scalars_octet_) / 4];
        kopt_scalars_octet_ k;
    } local;
    size_t i;
    kopt_cuda_load_words_(local.words, (const kopt_byte_ *)(&g->k), KOPT_CUDA_SCALARS_);
    KOPT_UNROLL_
    for (i = KOPT_CUDA_SCALARS_ / 4; i < sizeof local.words / 4; i++)
        local.words[i] = how != KOPT_CUDA_ANY_ ? 0 : ((const uint32_t *)&g->k)[i];
    if (how == KOPT_CUDA_MORE_) local.k.unrectified = g->k.unrectified;
    if (how == KOPT_CUDA_MORE_) local.k.first_step = g->k.first_step;
    local.k.rate = kopt_mul_octet_(local.k.rate, kopt_as_u32_(t->rate_scale));
    local.k.weight_decay = kopt_mul_octet_(local.k.weight_decay, kopt_as_u32_(t->rate_scale));
    if (feedback) local.k.beta1 = kopt_as_u32_(t->beta1);
    if (feedback) local.k.feedback = kopt_as_u32_(t->feedback);
    local.k.use_scale = 1; /* the factor 1 changes no number */
    local.k.use_l2 = local.k.l2 != 0;
    local.k.use_decay = local.k.weight_decay != 0;
    return local.k;
}

/* Steps an octet in registers. w: the words of its Philox block, with the octet's multiplier. Returns 0 if a number is
   special. PAIRS: how many of the 4 pairs the code has: 4 for speed, or 1 for a loop. */
template <int PAIRS>
KOPT_CUDA_FN_ int kopt_cuda_step_octet_(kopt_cuda_octet_ *x, kopt_kind_ kind, const kopt_scalars_octet_ *k,
                                        uint32_t w[4], uint32_t multiplier) {
    const kopt_format format = kopt_unbuffered_(kind.first);
    const size_t weight_size = kopt_bytes_of_(kind.weight), residual_size = kopt_cuda_residual_size_(kind);
    const kopt_constants_octet_ c = kopt_make_constants_octet_();
    uint32_t largest[2] = {0, 0}, *const largest_moment = format == kind.weight ? largest : largest + 1;
    int pair, m, half;
    KOPT_UNROLL_PAIRS_
    for (pair = 0; pair < 4; pair++) {
        uint32_t weight[2], residual[2], moment[4][2], stride;
        KOPT_UNROLL_
        for (half = 0; half < 2; half++) {
            const uint32_t number = kopt_cuda_number_(w[0], half, multiplier, &stride) & 0xFFFFu;
            kopt_half_pair_octet_ h;
            kopt_vf32_octet_ compensation, update;
            const uint32_t rest = kopt_cuda_first_(x->residual, residual_size, half);
            const kopt_vf32_octet_ old = kopt_load_weight_octet_(kind, kopt_cuda_first_(x->weight, weight_size, half),
                                                                 rest, &compensation, largest);
            KOPT_UNROLL_
            for (m = 0; m < 4; m++) {
                const kopt_format each = kopt_unbuffered_(kopt_moment_format_(kind, m));
                const kopt_vf32_octet_ stored =
                    m >= kind.moment_count
                        ? 0
                        : kopt_widen_octet_(kopt_cuda_first_(x->moment[m], kopt_bytes_of_(each), half), each);
                h.moments.x[m] = kopt_holds_root_(kind.second, kind.rule, m) ? kopt_mul_octet_(stored, stored) : stored;
            }
            update =
                kopt_direction_half_octet_(kind, k, &c, old, compensation, x->grad[half], number, stride, 0, 0, &h);
            *largest_moment = kopt_imax_octet_(*largest_moment, h.largest);
            update = kopt_update_octet_(k, update, old);
            if (k->sync) {
                kopt_vf32_octet_ slow_compensation;
                const kopt_vf32_octet_ slow = kopt_load_weight_octet_(
                    kind, kopt_cuda_first_(x->moment[2], weight_size, half),
                    kopt_cuda_first_(x->moment[3], residual_size, half), &slow_compensation, largest);
                update = kopt_lookahead_octet_(k->slow_scale, old, compensation, update, slow, slow_compensation);
            }
            KOPT_UNROLL_
            for (m = 0; m < 4; m++) {
                const kopt_vf32_octet_ new_value =
                    kopt_holds_root_(kind.second, kind.rule, m) ? h.moments.root[m] : h.moments.x[m];
                const kopt_format each = kopt_moment_format_(kind, m);
                moment[m][half] = each == KOPT_Q8     ? new_value
                                  : each == KOPT_F32  ? kopt_flush_f32_octet_(new_value)
                                  : each == KOPT_BF16 ? kopt_flush_octet_(h.u[m])
                                                      : h.u[m];
            }
            residual[half] = 0;
            if (kind.weight == KOPT_F32) {
                weight[half] = kopt_flush_f32_octet_(kopt_sub_octet_(old, update));
            } else {
                weight[half] = h.weight;
                if (kind.feedback)
                    largest[0] = kopt_imax_octet_(largest[0], h.largest);
                else
                    weight[half] =
                        kopt_commit_octet_(kind, old, compensation, update, number, &c, &residual[half], largest);
                if (kind.weight == KOPT_BF16 && kind.rounding < KOPT_COMPACT)
                    weight[half] = kopt_flush_octet_(weight[half]);
                if (kind.weight == KOPT_BF16 && kind.rounding == KOPT_KAHAN)
                    residual[half] = kopt_flush_octet_(residual[half]);
            }
        }
        KOPT_UNROLL_
        for (m = 0; m < 4; m++)
            if (m < kind.moment_count) {
                const size_t size = kopt_bytes_of_(kopt_unbuffered_(kopt_moment_format_(kind, m)));
                kopt_cuda_put_(x->moment[m], size, moment[m][0], moment[m][1]);
                kopt_cuda_rotate_(x->moment[m], size);
            }
        kopt_cuda_put_(x->weight, weight_size, weight[0], weight[1]);
        kopt_cuda_rotate_(x->weight, weight_size);
        kopt_cuda_put_(x->residual, residual_size, residual[0], residual[1]);
        kopt_cuda_rotate_(x->residual, residual_size);
        if (k->sync) {
            kopt_cuda_rotate_(x->moment[2], weight_size);
            if (residual_size == 2) kopt_cuda_rotate_(x->moment[3], 2); /* with a size that is not constant it spills */
            if (residual_size == 1) kopt_cuda_rotate_(x->moment[3], 1);
        }
        kopt_cuda_rotate_(x->grad, 4);
        kopt_cuda_rotate_(w, 2);
    }
    if (kind.weight != KOPT_F32 && largest[0] > (kind.weight == KOPT_BF16 ? 0x7F7EFFFFu : 0x477FDFFFu)) return 0;
    if (format != KOPT_F32 && largest[1] > (format == KOPT_BF16 ? 0x7F7EFFFFu : 0x477FDFFFu)) return 0;
    return 1;
}

/* ---- 8-bit moments: 8 lanes step the 64 elements of a block, which share a scale; the new moments (of means of
        squares: their roots) wait in registers until the largest magnitude is known ---- */

KOPT_CUDA_FN_ void kopt_cuda_decode_octet_(uint32_t x[8], uint32_t exponent, int square) {
    const uint32_t codes[2] = {x[0], x[1]}, scale = kopt_scale_q8_(exponent);
    int q;
    KOPT_UNROLL_
    for (q = 0; q < 8; q++)
        x[q] = kopt_mul_octet_(
            kopt_decode_q8_octet_(kopt_cuda_sign_extend_(kopt_cuda_extract_(codes, 1, q), 1), square, 0), scale);
}

/* Encodes the octet of moment m. w and multiplier as for step_octet. */
template <int PAIRS>
KOPT_CUDA_FN_ void kopt_cuda_encode_octet_(uint32_t codes[2], uint32_t moment[8], int m, int square, uint32_t exponent,
                                           int stochastic, uint32_t w[4], uint32_t multiplier) {
    const uint32_t scale = kopt_scale_q8_(exponent);
    const kopt_vf32_octet_ inverse = kopt_inverse_scale_q8_octet_(scale, square);
    int pair, half, q;
    codes[0] = codes[1] = 0;
    if (!square && exponent == 254) { /* then one may be larger than all that have a code */
        KOPT_UNROLL_
        for (q = 0; q < 8; q++) moment[q] = min(moment[q] & 0x7FFFFFFFu, KOPT_LARGEST_Q8_) | (moment[q] & 0x80000000u);
    }
    KOPT_UNROLL_PAIRS_
    for (pair = 0; pair < 4; pair++) {
        uint32_t u[2], stride;
        KOPT_UNROLL_
        for (half = 0; half < 2; half++) {
            uint32_t number = kopt_cuda_number_(w[0], half, multiplier, &stride);
            number += ((uint32_t)m + 1) * stride;
            u[half] = kopt_place_q8_octet_(kopt_mul_octet_(moment[half], inverse), square, 0,
                                           stochastic ? number & 0xFFFFu : 0x8000u);
            if (square) /* as in encode_q8_scalar */
                u[half] = kopt_imax_octet_(u[half] - (KOPT_ROOT_PLACE_ << 16), kopt_imin_octet_(u[half], 0x10000u));
        }
        kopt_cuda_put_(codes, 1, u[0], u[1]);
        kopt_cuda_rotate_(codes, 1);
        kopt_cuda_rotate_(moment, 4);
        kopt_cuda_rotate_(w, 2);
    }
    if (kopt_codes_are_zero_(scale)) codes[0] = codes[1] = 0;
}

KOPT_CUDA_FN_ void kopt_cuda_add_(uint64_t *to, uint64_t x) {
    atomicAdd(reinterpret_cast<unsigned long long *>(to), static_cast<unsigned long long>(x));
}

/* The next element in the place of the first of 8: the others move up. */
KOPT_CUDA_FN_ void kopt_cuda_push_(uint32_t x[8], uint32_t a) {
    int q;
    KOPT_UNROLL_
    for (q = 0; q < 7; q++) x[q] = x[q + 1];
    x[7] = a;
}

/* Scales and codes of the new 8-bit moments of four blocks. By all lanes of a warp. whole: the lane's octet is complete
   and aligned, and has one Philox block; otherwise its codes are stored one by one. */
template <int PAIRS>
KOPT_CUDA_FN_ void kopt_cuda_store_block_(kopt_cuda_octet_ *x, const kopt_cuda_tensor_ *t, const kopt_cuda_group_ *g,
                                          kopt_kind_ kind, uint64_t i, int whole, uint32_t w[4], uint32_t multiplier) {
    const kopt_philox_key_ key = kopt_cuda_key_(t, g);
    const uint64_t n = t->end;
    uint32_t exponent[4];
    int m, q;
    KOPT_UNROLL_
    for (m = 0; m < 4; m++) {
        uint32_t largest = 0;
        if (m >= kind.moment_count || kopt_moment_format_(kind, m) != KOPT_Q8) continue;
        KOPT_UNROLL_
        for (q = 0; q < 8; q++) largest = max(largest, x->moment[m][q] & 0x7FFFFFFFu);
        for (q = 4; q > 0; q >>= 1) largest = max(largest, __shfl_xor_sync(0xFFFFFFFFu, largest, q));
        exponent[m] = kopt_exponent_q8_(largest, kopt_is_square_(kind.rule, m));
    }
    __syncwarp(); /* all lanes have read the old scales, which the first lane of each block overwrites now */
    KOPT_UNROLL_
    for (m = 0; m < 4; m++)
        if (m < kind.moment_count && kopt_moment_format_(kind, m) == KOPT_Q8 && i % KOPT_BLOCK_ == 0 && i < n)
            kopt_cuda_store_one_(t->scale[m], i / KOPT_BLOCK_, 1, exponent[m]);
    if (whole) {
        KOPT_UNROLL_
        for (m = 0; m < 4; m++) {
            const int square = kopt_is_square_(kind.rule, m);
            const int stochastic = kopt_moment_rounding_(kind, m) == KOPT_STOCHASTIC;
            uint32_t codes[2];
            if (m >= kind.moment_count || kopt_moment_format_(kind, m) != KOPT_Q8) continue;
            kopt_cuda_encode_octet_<PAIRS>(codes, x->moment[m], m, square, exponent[m], stochastic, w, multiplier);
            kopt_cuda_store_octet_(t->moment[m], i, 1, codes);
        }
        return;
    }
    KOPT_ROLL_
    for (q = 0; q < 8; q++) {
        KOPT_UNROLL_
        for (m = 0; m < 4; m++) {
            if (m >= kind.moment_count || kopt_moment_format_(kind, m) != KOPT_Q8 || i + (uint64_t)q >= n) continue;
            kopt_cuda_store_code_(t, kind, &key, i + (uint64_t)q, m, x->moment[m][0], kopt_scale_q8_(exponent[m]));
            kopt_cuda_push_(x->moment[m], 0);
        }
    }
}

/* ---- the step ---- */

template <int WEIGHT, int MOMENT, int ROUNDING, int HOW>
KOPT_CUDA_FN_ kopt_kind_ kopt_cuda_kind_in_(const kopt_cuda_tensor_ *t, const kopt_cuda_group_ *g) {
    kopt_kind_ kind = kopt_cuda_kind_(t, &g->step);
    if (HOW == KOPT_CUDA_MIXED_) return kind;
    kind.feedback = ROUNDING == (int)KOPT_FEEDBACK;
    kind.weight = (kopt_format)WEIGHT;
    kind.first = (kopt_format)(MOMENT == KOPT_CUDA_BF16_Q8_ ? (int)KOPT_BF16 : MOMENT);
    kind.second = (kopt_format)(MOMENT == KOPT_CUDA_BF16_Q8_ ? (int)KOPT_Q8 : MOMENT);
    if (HOW == KOPT_CUDA_ANY_) return kind;
    kind.rounding = kind.feedback ? KOPT_STOCHASTIC : (kopt_rounding)ROUNDING;
    if (HOW == KOPT_CUDA_ONE_) kind.moment_count &= 1;
    if (HOW == KOPT_CUDA_ONE_ && kind.rule != KOPT_RULE_SGD && kind.rule != KOPT_RULE_LION) kind.rule = KOPT_RULE_EMA;
    if (HOW == KOPT_CUDA_MORE_ && MOMENT == KOPT_Q8) kind.moment_count = 2;
    if (HOW == KOPT_CUDA_MORE_ && kind.rule != KOPT_RULE_ADAM_ATAN2 &&
        (MOMENT == KOPT_Q8 || kind.rule != KOPT_RULE_ADAN))
        kind.rule = KOPT_RULE_ADAM;
    if (HOW != KOPT_CUDA_ADAM_) return kind;
    kind.rule = KOPT_RULE_ADAM;
    kind.moment_rounding = kind.residual_rounding = KOPT_STOCHASTIC;
    kind.moment_count = 2;
    kind.nesterov = 0;
    return kind;
}

/* Steps an octet if it is complete and aligned, and all its numbers are ordinary; if not, or if formats are mixed,
   returns 0. With 8-bit moments it steps every octet; all lanes of the warp must call it. w: the Philox block of the
   octet before in this task. */
template <int WEIGHT, int MOMENT, int ROUNDING, int HOW>
KOPT_CUDA_FN_ int kopt_cuda_step_(const kopt_cuda_arguments_ *a, uint32_t index, uint64_t position, uint32_t w[4]) {
    enum { ONE = HOW == KOPT_CUDA_ONE_, MORE = HOW == KOPT_CUDA_MORE_ };
    enum { MIXED = HOW == KOPT_CUDA_MIXED_, ANY = HOW == KOPT_CUDA_ANY_ || MIXED };
    enum { HALF = MOMENT == KOPT_BF16 || MOMENT == KOPT_FP16, Q8 = MOMENT >= KOPT_Q8, PAIRS = !ANY || HALF ? 4 : 1 };
    const kopt_cuda_tensor_ *t = a->tensors + index;
    const kopt_cuda_group_ *g = a->groups + t->group;
    const uint64_t i = position - t->pad, e = t->first + position;
    const uint32_t multiplier = kopt_random_multiplier_(e);
    const int begins = (position & (a->width - 256)) == 0;
    const int whole = !MIXED && i < t->complete && t->wide && (!Q8 || (e & 7) == 0);
    kopt_kind_ kind = kopt_cuda_kind_in_<WEIGHT, MOMENT, ROUNDING, HOW>(t, g);
    kopt_cuda_octet_ x;
    const int atan2 = kind.rule == KOPT_RULE_ADAM_ATAN2;
    const int nearest = !atan2 && kind.moment_rounding == KOPT_NEAREST && kind.residual_rounding == KOPT_NEAREST;
    int done = 0, sync = 0, m, q;
    if (MIXED && kind.first != KOPT_Q8 && kind.second != KOPT_Q8) return 0;
    if (!MIXED && (begins || (e & 2047) < 256) && kopt_needs_random_(kind)) {
        const kopt_philox_key_ key = kopt_cuda_key_(t, g);
        kopt_philox_cuda_(w, &key, kopt_philox_block_(e));
    }
    if (whole) {
        const kopt_scalars_octet_ k = kopt_cuda_scalars_(t, g, HOW, kind.feedback);
        if (ANY) sync = k.sync;
        kopt_cuda_load_all_(&x, t, kind, i, sync);
        KOPT_UNROLL_
        for (m = 0; m < 4; m++)
            if (m < kind.moment_count && kopt_moment_format_(kind, m) == KOPT_Q8)
                kopt_cuda_decode_octet_(x.moment[m], x.scale[m], kopt_is_square_(kind.rule, m));
#define KOPT_CUDA_OCTET_ kopt_cuda_step_octet_<PAIRS>(&x, kind, &k, w, multiplier)
#define KOPT_CUDA_AS_(which, count) (kind.rule = (which), kind.moment_count = (count), KOPT_CUDA_OCTET_)
        done = ONE && kind.rule == KOPT_RULE_EMA     ? KOPT_CUDA_AS_(KOPT_RULE_EMA, 0)
               : ONE && kind.rule == KOPT_RULE_LION  ? KOPT_CUDA_AS_(KOPT_RULE_LION, 1)
               : ONE && kind.moment_count == 0       ? KOPT_CUDA_AS_(KOPT_RULE_SGD, 0)
               : ONE                                 ? KOPT_CUDA_AS_(KOPT_RULE_SGD, 1)
               : MORE && kind.rule == KOPT_RULE_ADAN ? KOPT_CUDA_AS_(KOPT_RULE_ADAN, 4)
               : MORE && kind.moment_count == 3      ? KOPT_CUDA_AS_(KOPT_RULE_ADAM, 3) /* AMSGrad */
               : MORE && nearest
                   ? (kind.moment_rounding = kind.residual_rounding = KOPT_NEAREST, KOPT_CUDA_AS_(KOPT_RULE_ADAM, 2))
               : MORE ? KOPT_CUDA_AS_(atan2 ? KOPT_RULE_ADAM_ATAN2 : KOPT_RULE_ADAM, 2)
                      : KOPT_CUDA_OCTET_;
    }
    KOPT_CUDA_OPAQUE_(index, "r"); /* what is used again is loaded again */
    t = a->tensors + index;
    g = a->groups + t->group;
    if (done) kopt_cuda_store_all_(&x, t, g, kind, i, ANY || WEIGHT == KOPT_F32, sync);
    if (Q8) {
        KOPT_ROLL_
        for (q = 0; q < 8 && !done; q++) {
            uint4 moment = make_uint4(0, 0, 0, 0);
            if (i + (uint64_t)q < t->end) {
                const kopt_philox_key_ key = kopt_cuda_key_(t, g);
                moment = kopt_cuda_element_(t, kind, &g->k, &key, i + (uint64_t)q);
            }
            kopt_cuda_push_(x.moment[0], moment.x);
            kopt_cuda_push_(x.moment[1], moment.y);
            kopt_cuda_push_(x.moment[2], moment.z);
            kopt_cuda_push_(x.moment[3], moment.w);
        }
        kopt_cuda_store_block_<PAIRS>(&x, t, g, kind, i, whole, w, multiplier);
        done = 1;
    }
    return done;
}

/* A warp takes one task after the other, 256 positions at a time. What an octet needs is loaded again for each, which
   takes fewer registers. The blocks that run at once limit them: 3 to 80, 2 to 128; with 8-bit moments 5 to 96. */
#define KOPT_CUDA_AT_ONCE_(weight, moment, how)           \
    ((moment) >= KOPT_Q8 ? 4 + ((how) == KOPT_CUDA_ADAM_) \
                         : 2 + ((how) < KOPT_CUDA_MORE_ && ((weight) != KOPT_FP16 || (moment) != KOPT_F32)))
template <int WEIGHT, int MOMENT, int ROUNDING, int HOW>
static __global__ void __launch_bounds__(32 * KOPT_CUDA_WARPS_OF_(MOMENT), KOPT_CUDA_AT_ONCE_(WEIGHT, MOMENT, HOW))
    kopt_cuda_step_kernel_(const kopt_cuda_arguments_ a) {
    enum { WARPS = KOPT_CUDA_WARPS_OF_(MOMENT) };
    uint32_t task = blockIdx.x * WARPS + (threadIdx.x >> 5), q;
    if (a.control->skip) return;
    for (; task < a.count; task += gridDim.x * WARPS) {
        uint32_t w[4] = {0, 0, 0, 0};
        uint32_t index = kopt_cuda_find_(a.first_task, a.tensor_count, a.first + task, threadIdx.x & 31);
        uint32_t left = 0; /* the octets that must be stepped element by element */
        uint64_t position = (uint64_t)(a.first + task - a.first_task[index]) * a.width + 8 * (threadIdx.x & 31);
        do { /* no counter: the position has it */
            KOPT_CUDA_OPAQUE_(index, "r");
            if ((position & ~(uint64_t)255) >= a.tensors[index].end) break;
            if (!kopt_cuda_step_<WEIGHT, MOMENT, ROUNDING, HOW>(&a, index, position, w))
                left |= 1u << ((position & (a.width - 1)) >> 8);
            position += 256;
        } while ((position & (a.width - 256)) != 0);
        KOPT_ROLL_
        for (q = 0; left != 0; q++) {
            const kopt_cuda_tensor_ *const t = a.tensors + index;
            const kopt_cuda_group_ *const g = a.groups + t->group;
            const uint64_t task_begin = (uint64_t)(a.first + task - a.first_task[index]) * a.width;
            const uint64_t i = task_begin + 8 * (threadIdx.x & 31) + (q >> 3 << 8) + (q & 7) - t->pad;
            KOPT_CUDA_OPAQUE_(index, "r");
            if ((left >> (q >> 3) & 1) != 0 && i < t->end - t->pad) {
                const kopt_philox_key_ key = kopt_cuda_key_(t, g);
                kopt_cuda_element_(t, kopt_cuda_kind_in_<WEIGHT, MOMENT, ROUNDING, HOW>(t, g), &g->k, &key, i);
            }
            if ((q & 7) == 7) left &= ~(1u << (q >> 3));
        }
    }
}

/* ---- the prologue of a step: its scalars, and whether it is made. One thread block. A pair of lanes takes one group
        at a time; a lane of the last warp takes what all groups share ---- */

/* The scalars of a group's step, by a pair of lanes. The norm is not known yet: with max_norm the clip is 0 here.
   Returns 0 if one of the scalars overflows. */
KOPT_CUDA_FN_ int kopt_cuda_begin_(const kopt_cuda_options *options, kopt_optimizer *opt, kopt_begun_ *s) {
    const double clip = opt->clip;
    int valid = 1;
    if (options->lr != NULL) {
        opt->lr = kopt_to_double_(*options->lr);
        valid = kopt_between_(opt->lr, 0, KOPT_3E38_);
    }
    if (options->loss_scale != NULL)
        opt->grad_scale = kopt_div64_(opt->grad_scale, kopt_to_double_(*options->loss_scale));
    if (options->max_norm > 0) opt->clip = 0;
    kopt_copy_options_(opt, s);
    valid &= kopt_compute_scalars_(opt, s);
    opt->clip = clip;
    return valid;
}

/* The scale of the gradients with max_norm, as in kopt_compute_scalars_(), with the coefficient of
   kopt_norm_clip(): max_norm / (norm * |grad_scale| + 1e-6), at most 1. Returns 0 if it overflows. */
KOPT_CUDA_FN_ int kopt_cuda_clip_(double norm, double max_norm, const kopt_optimizer *opt, kopt_begun_ *s) {
    const double scale = kopt_bits_to_f64_(kopt_bits64_(opt->grad_scale) & ~((uint64_t)1 << 63));
    double clip = kopt_div64_(max_norm, kopt_add64_(kopt_mul64_(norm, scale), KOPT_1E_MINUS_6_));
    clip = kopt_mul64_(opt->clip, kopt_less64_(clip, 1) ? clip : 1);
    s->grad_scale = kopt_mul_(kopt_to_float_(opt->grad_scale), kopt_to_float_(clip));
    if (opt->maximize) s->grad_scale = kopt_as_f32_(kopt_as_u32_(s->grad_scale) ^ 0x80000000u);
    return kopt_finite_(s->grad_scale);
}

/* What the kernels of a step read. */
KOPT_CUDA_FN_ void kopt_cuda_store_step_(kopt_cuda_group_ *group, const kopt_begun_ *s, uint32_t result) {
    kopt_scalars_cuda_ k = kopt_splat_step_cuda_(s, s->rate, s->weight_decay, s->l2);
    /* Not -0: the kernels test the bits of l2 and weight_decay instead of the flags. */
    if (!k.use_l2) k.l2 = 0;
    if (!k.use_decay) k.weight_decay = 0;
    group->k = k;
    group->step_number = s->step;
    group->step = *s;
    group->result = result;
}

static __global__ void __launch_bounds__(KOPT_PROLOGUE_THREADS_)
    kopt_cuda_prologue_kernel_(const kopt_cuda_arguments_ a) {
    __shared__ struct {
        double norm;
        uint32_t result, skip;
    } shared; /* by all groups */
    kopt_cuda_control_ *const c = a.control;
    kopt_cuda_group_ *const groups = a.groups;
    const uint64_t count = c->groups;
    const uint32_t thread = threadIdx.x;
    const kopt_cuda_options options = c->options;
    const int shares = thread >= 2 * KOPT_PROLOGUE_PAIRS_, measured = options.check_finite || options.max_norm > 0;
    uint64_t first = 0, g;
    int failed = 0, skip;
    do {
        kopt_optimizer opt;
        kopt_begun_ s;
        int valid = 1;
        g = first + thread / 2;
        if (thread == 2 * KOPT_PROLOGUE_PAIRS_ && first == 0) {
            shared.norm = measured ? kopt_norm_root_(&c->norm) : 0;
            shared.result = c->stopped != KOPT_OK ? c->stopped : measured && !c->ready ? KOPT_ERROR_STEP : KOPT_OK;
            shared.skip = (measured && c->norm.nonfinite != 0) ||
                          (options.found_inf != NULL && (kopt_as_u32_(*options.found_inf) & 0x7FFFFFFFu) != 0);
            if (measured) c->status.norm = shared.norm;
            c->ready = 0;
        } else if (!shares && g < count) {
            opt = groups[g].opt; /* all at once: one wait for memory */
            valid = kopt_cuda_begin_(&options, &opt, &s);
        }
        __syncthreads();
        if (!shares && g < count) {
            uint32_t result;
            if (options.max_norm > 0) valid &= kopt_cuda_clip_(shared.norm, options.max_norm, &opt, &s);
            result = opt.step == 0xFFFFFFFFu ? KOPT_ERROR_STEP : valid ? KOPT_OK : KOPT_ERROR_RANGE;
            if ((thread & 1) == 0) kopt_cuda_store_step_(&groups[g], &s, result);
            failed |= result != KOPT_OK;
        }
        first += KOPT_PROLOGUE_PAIRS_;
    } while (first < count);
    failed = __syncthreads_or(failed);
    skip = failed || shared.skip != 0 || shared.result != KOPT_OK;
    if (thread == 0) { /* is the step made? */
        uint32_t result = shared.result;
        for (g = 0; failed && shared.skip == 0 && result == KOPT_OK; g++) result = groups[g].result;
        c->skip = c->status.skipped = (uint32_t)skip;
        c->status.result = result;
        kopt_cuda_add_(skip ? &c->status.skips : &c->status.steps, 1);
    }
    for (g = thread; g < count && !skip; g += KOPT_PROLOGUE_THREADS_) atomicAdd(&groups[g].opt.step, 1u);
}

/* ---- statistics: a gradient's square, an integer, is added to a counter (slot) in shared memory. A bin has a slot for
        each of 32 lanes. If all gradients have the same 16-bit format, there is a bin for each exponent. Otherwise all
        are fp32: bin b counts in units of 2^(8 * b), and most squares are added in registers first (a window). The last
        bin counts infinities and NaNs ---- */

#define KOPT_CUDA_LEAST_TOP_ 0x0C000000u /* of a window: of bin 0 */
#define KOPT_CUDA_BINS_(all) ((all) == KOPT_BF16 ? 256u : (all) == KOPT_FP16 ? 32u : 128u)

KOPT_CUDA_FN_ void kopt_cuda_add_slot_(uint32_t address, uint32_t x) {
    asm volatile("red.shared.add.u32 [%0], %1;" : : "r"(address), "r"(x) : "memory");
}

/* Adds the square of a gradient to the slots of a column. x: its bits. finite: it is known to be. */
KOPT_CUDA_FN_ void kopt_cuda_add_square16_(uint32_t column, uint32_t x, uint32_t all, int finite) {
    const uint32_t mask = all == KOPT_BF16 ? 0x7F80u : 0x7C00u, one = all == KOPT_BF16 ? 0x80u : 0x400u;
    const uint32_t exponent = x & mask;
    uint32_t digits = min(exponent, one); /* | (x & (one - 1)): with the leading 1 of a normal number */
    asm("lop3.b32 %0, %1, %2, %0, 0xEA;" : "+r"(digits) : "r"(x), "r"(one - 1));
    kopt_cuda_add_slot_(column + (all == KOPT_BF16 ? exponent : exponent >> 3), /* 128 bytes per bin */
                        finite || exponent != mask ? digits * digits : 1);
}

/* Adds value * 2^(8 * bin), 16 bits to each slot. */
KOPT_CUDA_FN_ void kopt_cuda_add_wide_(uint32_t column, uint32_t bin, uint64_t value) {
    uint32_t i;
    KOPT_UNROLL_
    for (i = 0; i < 4; i++) kopt_cuda_add_slot_(column + bin * 128 + 256 * i, (uint32_t)(value >> 16 * i) & 0xFFFFu);
}

KOPT_CUDA_FN_ void kopt_cuda_add_square32_(uint32_t column, uint32_t x) {
    const uint32_t exponent = x >> 23 & 0xFFu, bit = 2 * max(exponent, 1u) - 2;
    const uint64_t digits = (x & 0x007FFFFFu) | (exponent == 0 ? 0 : 0x00800000u);
    if (exponent == 255)
        kopt_cuda_add_slot_(column + 127 * 128, 1);
    else
        kopt_cuda_add_wide_(column, bit / 8, digits * digits << bit % 8);
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
        for (q = 0; q < 8; q++) kopt_cuda_add_square16_(column, packed[q >> 1] >> 16 * (q & 1), all, 0);
    } else {
        KOPT_UNROLL_
        for (q = 0; q < 8; q++) kopt_cuda_add_square16_(column, packed[q >> 1] >> 16 * (q & 1), all, 1);
    }
}

/* A lane's sum of squares of numbers below C that are multiples of 2^-46 * C. The magnitude of such a number is
   (high * 2^23 + low) * 2^-46 * C. */
typedef struct kopt_cuda_window_ {
    uint32_t top;              /* the bits of C = 2^(4 * bin - 103) */
    uint64_t high, cross, low; /* the sums of high^2, high * low, low^2 */
} kopt_cuda_window_;

/* Empties the window into the slots. */
KOPT_CUDA_FN_ void kopt_cuda_flush_window_(uint32_t column, kopt_cuda_window_ *w) {
    const uint32_t bin = (w->top >> 25) - 6;
    kopt_cuda_add_wide_(column, bin + 5, (w->high + (uint64_t)((int64_t)w->cross >> 22)) << 6);
    kopt_cuda_add_wide_(column, bin, ((w->cross & 0x3FFFFFu) << 24) + w->low);
    w->high = w->cross = w->low = 0;
}

/* Adds the squares of an octet to the window. If one does not fit, all go to the slots, and it moves to the largest. */
KOPT_CUDA_FN_ void kopt_cuda_add_octet32_(uint32_t column, kopt_cuda_window_ *w, const uint32_t x[8]) {
    const uint32_t top = w->top, low_top = top - (23u << 23) + 0x400000u; /* the bits of C and of 1.5 * 2^-23 * C */
    const kopt_cuda_window_ before = *w;
    uint32_t above = 0, below = 0, largest = 0;
    int q;
    KOPT_UNROLL_
    for (q = 0; q < 8; q++) { /* adding C rounds to a multiple of 2^-23 * C, adding low_top to one of 2^-46 * C */
        uint32_t a;
        asm("abs.f32 %0, %1;" : "=r"(a) : "r"(x[q]));
        const uint32_t sum = kopt_add_octet_(a, top), rest = kopt_sub_octet_(a, kopt_sub_octet_(sum, top));
        const uint32_t low_sum = kopt_add_octet_(rest, low_top);
        const int32_t high = (int32_t)(sum - top), low = (int32_t)(low_sum - low_top);
        above |= sum;
        below |= kopt_sub_octet_(low_sum, low_top) ^ rest;
        w->high += (uint64_t)((int64_t)high * high);
        w->cross += (uint64_t)((int64_t)high * low);
        w->low += (uint64_t)((int64_t)low * low);
    }
    if ((above ^ top) >> 23 == 0 && below == 0) return;
    *w = before;
    kopt_cuda_flush_window_(column, w);
    KOPT_UNROLL_
    for (q = 0; q < 8; q++) {
        largest = max(largest, x[q] & 0x7E000000u);
        kopt_cuda_add_square32_(column, x[q]);
    }
    w->top = min(max(largest + 0x02000000u, KOPT_CUDA_LEAST_TOP_), 0x7E000000u); /* above the largest */
}

/* The squares of a lane's part of a task: up to 4 octets (2 of fp32), all loaded before the first is used. */
template <int ALL>
KOPT_CUDA_FN_ void kopt_cuda_stats_lane_(const kopt_cuda_arguments_ *a, uint32_t task, uint32_t lane, uint32_t column,
                                         kopt_cuda_window_ *w) {
    enum { LOADS = ALL == 3 ? 2 : 4 }; /* as many as the largest width has */
    const uint32_t index = kopt_cuda_find_(a->first_task, a->tensor_count, task, lane);
    const kopt_cuda_tensor_ *const t = a->tensors + index;
    const kopt_format format = (kopt_format)(ALL == 3 ? t->grad_format : ALL);
    const size_t size = format == KOPT_F32 ? 4 : 2; /* kopt_bytes_of_(): no gradient has 8 bits */
    const uint64_t n = t->end - t->pad;
    const uint64_t i = (uint64_t)(task - a->first_task[index]) * a->width + 8 * lane - t->pad;
    uint32_t packed[LOADS][ALL == 3 ? 8 : 4], k;
    if (((uintptr_t)(t->grad + i * size) & 15) == 0 && i < n && n - i >= a->width - 248) {
        KOPT_UNROLL_
        for (k = 0; k < LOADS; k++)
            if (256 * k < a->width) kopt_cuda_load_octet_(packed[k], t->grad, i + 256 * k, size);
        KOPT_UNROLL_
        for (k = 0; k < LOADS; k++)
            if (ALL == 3)
                kopt_cuda_widen_all_(packed[k], format), kopt_cuda_add_octet32_(column, w, packed[k]);
            else if (256 * k < a->width)
                kopt_cuda_add_octet16_(column, packed[k], ALL);
        return;
    }
    KOPT_ROLL_
    for (k = 0; k < a->width / 32; k++) {
        const uint64_t at = i + 256 * (k >> 3) + (k & 7);
        const uint32_t x = at < n ? kopt_cuda_load_one_(t->grad, at, size) : 0;
        if (ALL == 3)
            kopt_cuda_add_square32_(column, kopt_as_u32_(kopt_widen_cuda_(x, format)));
        else
            kopt_cuda_add_square16_(column, x, ALL, 0);
    }
}

/* The sum of the slots of bin number `thread`, which it clears, four slots at a time. It begins at a column that
   depends on its number, so that 8 threads use different memory banks. */
KOPT_CUDA_FN_ uint64_t kopt_cuda_collect_(uint32_t *slots, uint32_t bins, uint32_t thread) {
    uint64_t sum = 0;
    uint32_t i;
    if (thread >= bins) return 0;
    KOPT_UNROLL_
    for (i = 0; i < 8; i++) {
        uint4 *const slot = reinterpret_cast<uint4 *>(slots) + 8 * thread + ((i + thread) & 7);
        const uint4 x = *slot;
        *slot = make_uint4(0, 0, 0, 0);
        sum += (uint64_t)x.x + x.y + ((uint64_t)x.z + x.w);
    }
    return sum;
}

/* Adds the sum of a bin to the digits of a norm. The digits do not overflow with fewer than 2^36 elements in each call:
   a round adds less than 2^40 to a digit. */
KOPT_CUDA_FN_ void kopt_cuda_deliver_(kopt_norm *norm, uint64_t sum, uint32_t bin, uint32_t all) {
    /* as in kopt_norm_add_values_: a square of exponent e, 0 like 1, is an integer at bit 2 * e - 2 */
    const uint32_t bit = all == KOPT_BF16   ? (bin == 0 ? 0 : 2 * bin - 2) + 32
                         : all == KOPT_FP16 ? 248 + 2 * (bin == 0 ? 1 : bin)
                                            : bin * 8;
    kopt_norm digits;
    uint32_t i;
    if (sum == 0) return;
    if (bin == KOPT_CUDA_BINS_(all) - 1) {
        kopt_cuda_add_(&norm->nonfinite, sum);
        return;
    }
    digits.digit[0] = digits.digit[1] = digits.digit[2] = 0;
    kopt_norm_accumulate_(&digits, sum, bit & 31);
    KOPT_UNROLL_
    for (i = 0; i < 3; i++)
        if (digits.digit[i] != 0) kopt_cuda_add_(&norm->digit[(bit >> 5) + i], digits.digit[i]);
}

/* Rounds whose sums fit, into 32 bits of a slot and 58 bits of a window's high. A round is 8 tasks, one for each warp.
   It adds 8 * width / 32 numbers to a slot: 256, for fp16 at most 2047^2, for bf16 at most 255^2; with fp32 128 below
   2^16, and a few of each window that is emptied. To high it adds 16, below 2^46. */
KOPT_CUDA_FN_ uint32_t kopt_cuda_rounds_(uint32_t all) { return all == KOPT_FP16 ? 4 : 256; }

template <int ALL>
static __global__ void __launch_bounds__(KOPT_THREADS_, 4) kopt_cuda_stats_kernel_(const kopt_cuda_arguments_ a) {
    __shared__ __align__(16) uint32_t slots[KOPT_CUDA_BINS_(ALL) * 32];
    const uint32_t thread = threadIdx.x;
    const uint32_t column = (uint32_t)__cvta_generic_to_shared(slots + (thread & 31));
    uint64_t sum = 0; /* of bin number `thread` */
    kopt_cuda_window_ w = {KOPT_CUDA_LEAST_TOP_, 0, 0, 0};
    int last = 0;
    uint32_t rounds, base = blockIdx.x * KOPT_WARPS_, i;
    for (i = thread; i < KOPT_CUDA_BINS_(ALL) * 32; i += KOPT_THREADS_) slots[i] = 0;
    __syncthreads();
    while (base < a.count) {
        for (rounds = 0; rounds < kopt_cuda_rounds_(ALL) && base < a.count; rounds++, base += gridDim.x * KOPT_WARPS_)
            if (base + (thread >> 5) < a.count)
                kopt_cuda_stats_lane_<ALL>(&a, base + (thread >> 5), thread & 31, column, &w);
        if (ALL == 3) kopt_cuda_flush_window_(column, &w);
        __syncthreads();
        sum += kopt_cuda_collect_(slots, KOPT_CUDA_BINS_(ALL), thread);
        __syncthreads();
    }
    if (sum != 0) kopt_cuda_add_(&a.control->bins[thread], sum);
    /* the last thread block to finish makes the norm from the bins, one bin per thread */
    __threadfence();
    __syncthreads();
    if (thread == 0) {
        last = atomicAdd(&a.control->arrived, 1u) == gridDim.x - 1;
        __threadfence();
    }
    if (!__syncthreads_or(last)) return; /* with a word more of shared memory, one block would fit a T4 and not two */
    kopt_cuda_deliver_(&a.control->norm, a.control->bins[thread], thread, ALL);
    __threadfence();
    __syncthreads();
    if (thread != 0) return;
    kopt_norm_carry_(&a.control->norm);
    a.control->ready = 1;
}

/* ---- StableAdamW: the sum of the squares of each tensor's ratios, before the step. A round is 4096 elements of one
        tensor, 512 for each warp: 128 numbers for a slot ---- */

/* The ratio of element i, of any value, at any alignment and with L2. */
KOPT_CUDA_FN_ uint32_t kopt_cuda_ratio_(const kopt_cuda_tensor_ *t, const kopt_cuda_group_ *g, uint64_t i) {
    const kopt_kind_ kind = kopt_cuda_kind_(t, &g->step);
    const size_t weight_size = t->weight_size, residual_size = t->residual_size, size = kopt_bytes_of_(kind.grad);
    kopt_element_cuda_ e;
    e.weight = e.residual = 0;
    e.grad = kopt_cuda_load_one_(t->grad, i, size);
    e.moment[1] = kopt_cuda_load_moment_(t, kind, 1, i);
    if (g->k.use_l2) e.weight = kopt_cuda_load_one_(t->weight, i, weight_size);
    if (g->k.use_l2) e.residual = kopt_cuda_load_signed_(t->residual, i, residual_size);
    return kopt_as_u32_(kopt_stable_ratio_cuda_(kind, &g->k, &e));
}

KOPT_CUDA_FN_ void kopt_cuda_measure_lane_(const kopt_cuda_arguments_ *a, uint32_t index, uint32_t round,
                                           uint32_t thread, uint32_t column) {
    const kopt_cuda_tensor_ *const t = a->tensors + index;
    const kopt_cuda_group_ *const g = a->groups + t->group;
    const kopt_format format = g->step.second_moment_format;
    const int rooted = format == KOPT_Q8 || format == KOPT_FP16;
    const uint64_t n = t->end - t->pad;
    const uint64_t i = (uint64_t)round * KOPT_ROUND_ + (thread >> 5) * 512 + 8 * (thread & 31);
    uint32_t half, q;
    if (i < n && n - i >= 256 + 8 && t->pad % 8 == 0 && t->wide && !g->k.use_l2) {
        const kopt_scalars_octet_ k = kopt_cuda_scalars_(t, g, KOPT_CUDA_ADAM_, 0);
        struct {
            uint32_t grad[8], v[8], scale;
        } p[2];                                       /* what the ratios of two octets need, as loaded */
        kopt_cuda_window_ w = {0x42000000u, 0, 0, 0}; /* C is 32: no ratio is above 1 / sqrt(1 - beta2) */
        KOPT_UNROLL_
        for (half = 0; half < 2; half++) {
            kopt_cuda_load_octet_(p[half].grad, t->grad, i + 256 * half, t->grad_format == KOPT_F32 ? 4 : 2);
            kopt_cuda_load_octet_(p[half].v, t->moment[1], i + 256 * half, t->moment_size[1]);
            if (format == KOPT_Q8) p[half].scale = kopt_cuda_load_one_(t->scale[1], (i + 256 * half) / KOPT_BLOCK_, 1);
        }
        KOPT_UNROLL_
        for (half = 0; half < 2; half++) {
            uint32_t *const v = p[half].v, *const grad = p[half].grad;
            kopt_cuda_widen_all_(grad, (kopt_format)t->grad_format);
            if (format == KOPT_Q8)
                kopt_cuda_decode_octet_(v, p[half].scale, 1);
            else
                kopt_cuda_widen_all_(v, format);
            KOPT_UNROLL_
            for (q = 0; q < 8; q++)
                grad[q] = kopt_stable_ratio_of_octet_(&k, kopt_mul_octet_(grad[q], k.grad_scale),
                                                      rooted ? kopt_mul_octet_(v[q], v[q]) : v[q]);
            kopt_cuda_add_octet32_(column, &w, grad);
        }
        kopt_cuda_flush_window_(column, &w);
        return;
    }
    KOPT_ROLL_
    for (q = 0; q < 16; q++) {
        const uint64_t at = i + (q >> 3) * 256 + (q & 7);
        if (at < n) kopt_cuda_add_square32_(column, kopt_cuda_ratio_(t, g, at));
    }
}

static __global__ void __launch_bounds__(KOPT_THREADS_, 3) kopt_cuda_measure_kernel_(const kopt_cuda_arguments_ a) {
    __shared__ __align__(16) uint32_t slots[KOPT_CUDA_BINS_(KOPT_F32) * 32];
    const uint32_t thread = threadIdx.x, lane = thread & 31;
    const uint32_t column = (uint32_t)__cvta_generic_to_shared(slots + lane);
    uint32_t round, rounds = 0, index, next, i;
    if (a.control->skip) return;
    for (i = thread; i < KOPT_CUDA_BINS_(KOPT_F32) * 32; i += KOPT_THREADS_) slots[i] = 0;
    __syncthreads();
    index = kopt_cuda_find_(a.first_round, a.tensor_count, blockIdx.x, lane);
    for (round = blockIdx.x; round < a.count; round += gridDim.x, index = next) {
        kopt_cuda_measure_lane_(&a, index, round - a.first_round[index], thread, column);
        next = kopt_cuda_find_(a.first_round, a.tensor_count, round + gridDim.x, lane);
        if (++rounds < kopt_cuda_rounds_(KOPT_F32) && next == index && round + gridDim.x < a.count) continue;
        __syncthreads();
        kopt_cuda_deliver_(a.ratios + (a.tensors[index].ratio_plus_1 - 1),
                           kopt_cuda_collect_(slots, KOPT_CUDA_BINS_(KOPT_F32), thread), thread, KOPT_F32);
        __syncthreads();
        rounds = 0;
    }
}

/* What differs between tensors: the rates with StableAdamW, and FEEDBACK's guard. */
static __global__ void __launch_bounds__(KOPT_THREADS_) kopt_cuda_factor_kernel_(const kopt_cuda_arguments_ a) {
    const uint32_t index = blockIdx.x * KOPT_THREADS_ + threadIdx.x;
    kopt_cuda_tensor_ *const t = a.tensors + index;
    if (a.control->skip || index >= a.tensor_count) return;
    if (t->rates != NULL) {
        const kopt_begun_ *const s = &a.groups[t->group].step;
        kopt_guard_(s, t->rates, kopt_mul_cuda_(s->rate, t->base_scale), 1, &t->beta1, &t->feedback);
    }
    if (t->ratio_plus_1 != 0)
        t->rate_scale =
            kopt_mul_cuda_(t->base_scale, kopt_stable_from_norm_(a.ratios + (t->ratio_plus_1 - 1), t->end - t->pad));
}

/* ---- settings, and tensors that move ---- */

static __global__ void kopt_cuda_setting_kernel_(const kopt_cuda_setting_ s) {
    const int full = s.which == 3 && (s.counts[0] == 0xFFFFFFFFu || s.counts[1] == 0xFFFFFFFFu);
    const uint32_t result = full ? KOPT_ERROR_STEP : s.result;
    uint64_t g;
    if (s.which == 0) {
        s.control->options = s.options;
    } else if (s.which == 1) {
        const uint32_t step = s.group->opt.step;
        s.group[0].opt = s.group[1].opt = s.opt;
        s.group[0].opt.step = s.group[1].opt.step = step;
        s.group[1].opt.weight_decay = 0;
    } else if (s.which == 2) {
        for (g = 0; g < s.control->groups; g++) s.group[g].opt.step = s.step;
    } else if (s.which == 3 && !full) {
        s.counts[0]++;
        s.counts[1]++;
    } else if (result == KOPT_OK || s.control->stopped == KOPT_OK) { /* the first error stays */
        s.control->stopped = s.control->status.result = result;
    }
}

static __global__ void kopt_cuda_move_kernel_(const kopt_cuda_moves_ m) {
    const uint32_t i = threadIdx.x;
    if (i < m.count) kopt_cuda_place_(m.tensors + m.slots[m.first + i], m.to + i * m.stride);
}

/* ---- accumulation: a step of SGD whose weights are the sums. The rate is 1, and the scale is negated ---- */

template <int WEIGHT, int ROUNDING>
static __global__ void __launch_bounds__(KOPT_THREADS_, 2)
    kopt_cuda_accumulate_kernel_(const kopt_cuda_accumulation_ a) {
    enum { PAIRS = ROUNDING == (int)KOPT_CUDA_VARIES_ ? 1 : 4 };
    const kopt_cuda_tensor_ *const t = &a.tensor;
    const uint32_t count = a.counts == NULL ? a.count : a.counts[0];
    const uint32_t number = a.counts == NULL ? a.step.step : a.counts[1] + 1;
    const kopt_philox_key_ key = kopt_make_philox_key_(a.step.seed, number, t->id, KOPT_RANDOM_ACCUMULATE_);
    const kopt_scalars_octet_ k = kopt_splat_step_octet_(&a.step, 1, 0, 0);
    const kopt_scalars_cuda_ scalars = kopt_splat_step_cuda_(&a.step, 1, 0, 0);
    kopt_kind_ kind = kopt_cuda_kind_(t, &a.step);
    uint64_t position = 8 * ((uint64_t)blockIdx.x * KOPT_THREADS_ + threadIdx.x);
    if (a.counts != NULL && (number == 0 || count == 0xFFFFFFFFu)) return;
    kind.weight = kind.first = kind.second = (kopt_format)WEIGHT;
    kind.moment_count = kind.feedback = 0;
    if (ROUNDING != KOPT_CUDA_VARIES_) kind.rounding = (kopt_rounding)ROUNDING;
    for (; position < t->end; position += (uint64_t)gridDim.x * 8 * KOPT_THREADS_) {
        const uint64_t i = position - t->pad, e = t->first + position;
        uint32_t w[4] = {0, 0, 0, 0}, q;
        kopt_cuda_octet_ x;
        if (i < t->complete && t->wide) {
            kopt_cuda_load_all_(&x, t, kind, i, 0);
            KOPT_UNROLL_
            for (q = 0; q < 8; q++) {
                if (count == 0) x.weight[q] = 0;
                if (count == 0 && q < 4) x.residual[q] = 0;
            }
            if (kopt_needs_random_(kind)) kopt_philox_cuda_(w, &key, kopt_philox_block_(e));
            if (kopt_cuda_step_octet_<PAIRS>(&x, kind, &k, w, kopt_random_multiplier_(e))) {
                kopt_cuda_store_octet_(t->weight, i, t->weight_size, x.weight);
                kopt_cuda_store_octet_(t->residual, i, t->residual_size, x.residual);
                continue;
            }
        }
        KOPT_ROLL_
        for (q = 0; q < 8; q++) {
            if (i + q >= t->end - t->pad) continue;
            if (count == 0) kopt_cuda_store_one_(t->weight, i + q, t->weight_size, 0);
            if (count == 0) kopt_cuda_store_one_(t->residual, i + q, t->residual_size, 0);
            kopt_cuda_element_(t, kind, &scalars, &key, i + q);
        }
    }
}

static __global__ void __launch_bounds__(KOPT_THREADS_) kopt_cuda_read_kernel_(const kopt_cuda_accumulation_ a) {
    const kopt_cuda_tensor_ *const t = &a.tensor;
    const kopt_kind_ kind = kopt_cuda_kind_(t, &a.step);
    const size_t size = t->weight_size, residual_size = t->residual_size;
    uint64_t i = (uint64_t)blockIdx.x * KOPT_THREADS_ + threadIdx.x;
    for (; i < t->end - t->pad; i += (uint64_t)gridDim.x * KOPT_THREADS_) {
        const uint32_t rest = kopt_cuda_load_signed_(t->residual, i, residual_size);
        float compensation,
            x = kopt_load_weight_cuda_(kind, kopt_cuda_load_one_(t->weight, i, size), rest, &compensation, NULL);
        if (kind.rounding == KOPT_KAHAN) x = kopt_add_(x, compensation);
        if ((a.counts == NULL ? a.count : a.counts[0]) == 0) x = 0;
        kopt_cuda_store_one_(a.out, i, 4, kopt_as_u32_(x));
    }
}

/* ---- state blocks: one thread for each element ---- */

static __global__ void __launch_bounds__(KOPT_THREADS_) kopt_cuda_init_kernel_(const kopt_cuda_init_ k) {
    const kopt_cuda_tensor_ *const t = &k.tensor;
    const uint64_t all = static_cast<uint64_t>(gridDim.x) * KOPT_THREADS_, n = t->end - t->pad;
    const size_t size = t->weight_size, residual_size = t->residual_size;
    uint64_t i = static_cast<uint64_t>(blockIdx.x) * KOPT_THREADS_ + threadIdx.x;
    if (k.fresh && t->state != NULL && i < KOPT_HEADER_) t->state[i] = k.header[i];
    for (; i < n; i += all) {
        uint32_t residual = 0, weight;
        if (k.weights == NULL)
            weight = kopt_cuda_load_one_(t->weight, i, size);
        else
            weight = kopt_split_weight_cuda_(k.rounding, k.format, kopt_cuda_load_one_(k.weights, i, 4), &residual);
        if (k.weights != NULL) kopt_cuda_store_one_(t->weight, i, size, weight);
        if (k.fresh && t->residual != NULL) kopt_cuda_store_one_(t->residual, i, residual_size, residual);
        if (k.fresh && t->slow != NULL) kopt_cuda_store_one_(t->slow, i, size, weight);
        if (k.fresh && t->slow_residual != NULL) kopt_cuda_store_one_(t->slow_residual, i, residual_size, residual);
        if (t->copy != NULL) {
            const kopt_format format = (kopt_format)t->copy_format;
            kopt_cuda_store_one_(
                t->copy, i, kopt_bytes_of_(format),
                format == k.format ? weight : kopt_convert_value_cuda_(kopt_widen_cuda_(weight, k.format), format));
        }
    }
}

typedef void kopt_cuda_entry_(kopt_cuda_arguments_);
typedef void kopt_cuda_sum_(kopt_cuda_accumulation_);
#else
/* A kernel, in place of the function of this name: its name in the PTX, where the digits of a template are zeros. */
typedef struct kopt_cuda_code_ {
    const char *name;
    int arguments[4] = {};
    std::atomic<void *> handle{NULL}; /* of the driver, for all GPUs, once it is loaded */
} kopt_cuda_code_, kopt_cuda_entry_, kopt_cuda_sum_;
static kopt_cuda_code_ kopt_cuda_prologue_kernel_[1] = {{"_Z26kopt_cuda_prologue_kernel_20kopt_cuda_arguments_"}};
static kopt_cuda_code_ kopt_cuda_measure_kernel_[1] = {{"_Z25kopt_cuda_measure_kernel_20kopt_cuda_arguments_"}};
static kopt_cuda_code_ kopt_cuda_factor_kernel_[1] = {{"_Z24kopt_cuda_factor_kernel_20kopt_cuda_arguments_"}};
static kopt_cuda_code_ kopt_cuda_setting_kernel_[1] = {{"_Z25kopt_cuda_setting_kernel_18kopt_cuda_setting_"}};
static kopt_cuda_code_ kopt_cuda_move_kernel_[1] = {{"_Z22kopt_cuda_move_kernel_16kopt_cuda_moves_"}};
static kopt_cuda_code_ kopt_cuda_read_kernel_[1] = {{"_Z22kopt_cuda_read_kernel_23kopt_cuda_accumulation_"}};
static kopt_cuda_code_ kopt_cuda_init_kernel_[1] = {{"_Z22kopt_cuda_init_kernel_15kopt_cuda_init_"}};
#define KOPT_CUDA_CODES_(length, name, rest) \
    template <int... N> static kopt_cuda_code_ name[1] = {{"_Z" #length #name rest, {N...}}};
KOPT_CUDA_CODES_(22, kopt_cuda_step_kernel_, "ILi0ELi0ELi0ELi0EEv20kopt_cuda_arguments_")
KOPT_CUDA_CODES_(23, kopt_cuda_stats_kernel_, "ILi0EEv20kopt_cuda_arguments_")
KOPT_CUDA_CODES_(28, kopt_cuda_accumulate_kernel_, "ILi0ELi0EEv23kopt_cuda_accumulation_")
#endif

/* ---- launches ---- */

/* The result of a call of the runtime or of the driver, whose codes are the same numbers. KOPT_ERROR_ISA: a stub of a
   driver, one that is too old or missing, or not the system's; no such kernel; no GPU; no code for it; PTX that is too
   new for the driver. */
static kopt_result kopt_cuda_result_(int error) {
    static const int isa[] = {34, 35, 803, 98, 100, 209, 222};
    size_t i;
    for (i = 0; i < sizeof isa / sizeof *isa; i++)
        if (error == isa[i]) return KOPT_ERROR_ISA;
    return error == 0 ? KOPT_OK : KOPT_ERROR_DEVICE;
}

#ifdef __CUDACC__ /* by CUDA's runtime */
template <class Argument>
static kopt_result kopt_cuda_launch_(void (*kernel)(Argument), Argument &argument, uint32_t blocks, uint32_t threads,
                                     void *stream) {
    void *arguments[] = {&argument};
    return kopt_cuda_result_(cudaLaunchKernel(reinterpret_cast<const void *>(kernel), dim3(blocks), dim3(threads),
                                              arguments, 0, static_cast<cudaStream_t>(stream)));
}

/* Loads a kernel, which CUDA may do at its first launch otherwise. */
template <class Kernel> static kopt_result kopt_cuda_load_(Kernel *kernel) {
    cudaFuncAttributes attributes;
    return kopt_cuda_result_(cudaFuncGetAttributes(&attributes, reinterpret_cast<const void *>(kernel)));
}

static kopt_result kopt_cuda_copy_(void *to, const void *from, size_t size, int to_host, void *stream) {
    return kopt_cuda_result_(cudaMemcpyAsync(to, from, size, to_host ? cudaMemcpyDeviceToHost : cudaMemcpyHostToDevice,
                                             static_cast<cudaStream_t>(stream)));
}

/* At most as many blocks as the GPU runs at once: each clears shared memory first and ends with atomic additions. */
template <class Kernel> static uint32_t kopt_cuda_resident_(Kernel *kernel, uint32_t blocks) {
    const void *const k = reinterpret_cast<const void *>(kernel);
    int device = 0, processors = 0, each = 0;
    if (cudaGetDevice(&device) == cudaSuccess &&
        cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device) == cudaSuccess)
        (void)cudaOccupancyMaxActiveBlocksPerMultiprocessor(&each, k, KOPT_THREADS_, 0);
    each = each > 0 ? each * processors : 1024; /* if CUDA does not say */
    return blocks < (uint32_t)each ? blocks : (uint32_t)each;
}

#define KOPT_CUDA_CALL_(runtime, driver, ...) kopt_cuda_result_(runtime(__VA_ARGS__))
typedef cudaStreamCaptureStatus kopt_cuda_capture_;
typedef cudaStream_t kopt_cuda_stream_;
#else /* by the driver: the same functions */
static struct {
    void *driver;
    const char *ptx, *end;
    std::atomic<void *> library; /* the last text that was loaded */
} kopt_driver_;

/* Calls a function of the driver. An address on the GPU is an integer of 64 bits there. */
template <class... Arguments> static int kopt_cuda_ask_(const char *name, Arguments... arguments) {
    int (*f)(Arguments...) = NULL;
    if (kopt_driver_.driver != NULL) f = reinterpret_cast<int (*)(Arguments...)>(KOPT_CUDA_FIND_);
    return f == NULL ? 35 : f(arguments...);
}

/* The same on a GPU: as with CUDA's runtime, a thread that has chosen none uses the first one. */
template <class... Arguments> static kopt_result kopt_cuda_call_(const char *name, Arguments... arguments) {
    void *context = NULL;
    int error = kopt_cuda_ask_("cuCtxGetCurrent", &context);
    if (error == 0 && context == NULL) {
        error = kopt_cuda_ask_("cuDevicePrimaryCtxRetain", &context, 0);
        if (error == 0) error = kopt_cuda_ask_("cuCtxSetCurrent", context);
    }
    return kopt_cuda_result_(error != 0 ? error : kopt_cuda_ask_(name, arguments...));
}

KOPT_CUDA_API_ kopt_result kopt_cuda_use_ptx(const char *ptx, size_t size) {
    if (ptx == NULL || size == 0) return KOPT_ERROR_NULL;
    if (ptx[size - 1] != 0) return KOPT_ERROR_BOUNDS;
    kopt_driver_.driver = KOPT_CUDA_OPEN_;
    kopt_driver_.ptx = ptx;
    kopt_driver_.end = ptx + size;
    return kopt_cuda_result_(kopt_cuda_ask_("cuInit", 0u));
}

/* Loads a kernel, on this GPU: from the text that was loaded last, if it has it. */
static kopt_result kopt_cuda_load_(kopt_cuda_code_ *code) {
    void *library = kopt_driver_.library, *handle = code->handle, *function, *const none = NULL;
    const char *text = kopt_driver_.ptx;
    kopt_result result = KOPT_OK;
    char name[80], *p;
    int i = 0;
    if (handle != NULL) return kopt_cuda_call_("cuKernelGetFunction", &function, handle);
    memcpy(name, code->name, strlen(code->name) + 1);
    for (p = strstr(name, "Li"); p != NULL && *p == 'L'; p += 4) p[2] = static_cast<char>('0' + code->arguments[i++]);
    while (text != kopt_driver_.end && strstr(text, name) == NULL) text += strlen(text) + 1;
    if (text == kopt_driver_.end) return KOPT_ERROR_ISA;
    if (library == NULL || kopt_cuda_ask_("cuLibraryGetKernel", &handle, library, name) != 0) {
        result = kopt_cuda_call_("cuLibraryLoadData", &library, text, none, none, 0u, none, none, 0u);
        if (result == KOPT_OK) result = kopt_cuda_call_("cuLibraryGetKernel", &handle, library, name);
        if (result == KOPT_OK) kopt_driver_.library = library;
    }
    if (result != KOPT_OK) return result;
    code->handle = handle;
    return kopt_cuda_load_(code);
}

template <class Argument>
static kopt_result kopt_cuda_launch_(kopt_cuda_code_ *code, Argument &argument, uint32_t blocks, uint32_t threads,
                                     void *stream) {
    void *arguments[] = {&argument}, **const list = arguments, **const none = NULL;
    const kopt_result result = code->handle != NULL ? KOPT_OK : kopt_cuda_load_(code);
    if (result != KOPT_OK) return result;
    return kopt_cuda_call_("cuLaunchKernel", code->handle.load(), blocks, 1u, 1u, threads, 1u, 1u, 0u, stream, list,
                           none);
}

static kopt_result kopt_cuda_copy_(void *to, const void *from, size_t size, int to_host, void *stream) {
    return kopt_cuda_call_(to_host ? "cuMemcpyDtoHAsync_v2" : "cuMemcpyHtoDAsync_v2", to, from, size, stream);
}

#define KOPT_CUDA_CALL_(runtime, driver, ...) kopt_cuda_call_(driver, __VA_ARGS__)
typedef int kopt_cuda_capture_;
typedef void *kopt_cuda_stream_;
static uint32_t kopt_cuda_resident_(const kopt_cuda_code_ *, uint32_t blocks) { return blocks < 1024 ? blocks : 1024; }
#endif

static kopt_result kopt_cuda_clear_memory_(void *p, size_t size, void *stream) {
    return KOPT_CUDA_CALL_(cudaMemsetAsync, "cuMemsetD8Async", p, 0, size, static_cast<kopt_cuda_stream_>(stream));
}

/* For calls that no graph should repeat. */
static kopt_result kopt_cuda_refuse_capture_(void *stream) {
    kopt_cuda_capture_ status = static_cast<kopt_cuda_capture_>(0);
    const kopt_result result =
        KOPT_CUDA_CALL_(cudaStreamIsCapturing, "cuStreamIsCapturing", static_cast<kopt_cuda_stream_>(stream), &status);
    return result == KOPT_OK && status != 0 ? KOPT_ERROR_CAPTURE : result;
}

/* The number of thread blocks for so many threads; each thread takes more if that is too many. */
static uint32_t kopt_cuda_grid_(uint64_t threads) {
    const uint64_t blocks = (threads + KOPT_THREADS_ - 1) / KOPT_THREADS_;
    return blocks < 0x7FFFFFFFu ? (uint32_t)blocks : 0x7FFFFFFFu;
}

/* ---- PUBLIC FUNCTIONS -------------------------------------------------------------------------------------------- */

static size_t kopt_cuda_align16_(size_t x) { return (x + 15) & ~(size_t)15; }

/* The kernels of steps, by number, and what is constant in each. */
typedef struct kopt_cuda_kernel_ {
    kopt_cuda_entry_ *kernel;
    int weight, moment, rounding, how;
} kopt_cuda_kernel_;

#define KOPT_CUDA_LINE_(weight, moment, rounding, how) \
    {kopt_cuda_step_kernel_<weight, moment, rounding, how>, weight, moment, rounding, how},
static const kopt_cuda_kernel_ kopt_cuda_kernels_[] = {KOPT_CUDA_STEPS_(KOPT_CUDA_LINE_)};
typedef char
    kopt_cuda_kernels_fit_[sizeof kopt_cuda_kernels_ / sizeof *kopt_cuda_kernels_ <= KOPT_CUDA_KERNELS_ ? 1 : -1];

/* The kernels of sums: those that add, by format and rounding, and the one that reads. */
static kopt_cuda_sum_ *const kopt_cuda_sum_kernels_[] = {
    kopt_cuda_accumulate_kernel_<KOPT_F32, KOPT_NEAREST>, kopt_cuda_accumulate_kernel_<KOPT_FP16, KOPT_CUDA_VARIES_>,
    kopt_cuda_accumulate_kernel_<KOPT_BF16, KOPT_KAHAN>, kopt_cuda_accumulate_kernel_<KOPT_BF16, KOPT_CUDA_VARIES_>,
    kopt_cuda_read_kernel_};

static uint32_t kopt_cuda_kernel_of_(const kopt_optimizer *opt, kopt_format weight, int copies) {
    const int moments = kopt_moments_(opt), f32 = weight == KOPT_F32;
    const int two = moments > 1 && opt->first_moment_format != opt->second_moment_format;
    const int mixed = two && (opt->first_moment_format != KOPT_BF16 || opt->second_moment_format != KOPT_Q8);
    const int moment = two ? (int)KOPT_CUDA_BF16_Q8_ : moments == 0 ? (int)weight : (int)opt->first_moment_format;
    const kopt_rounding rounding = f32 ? KOPT_NEAREST : opt->rounding;
    const int one = opt->rule == KOPT_RULE_SGD || opt->rule == KOPT_RULE_LION || opt->rule == KOPT_RULE_EMA;
    const int few = opt->rule != KOPT_RULE_RANGER && (!copies || f32);
    const int adam = few && moments == 2 && opt->rule == KOPT_RULE_ADAM &&
                     (f32 || opt->residual_rounding == KOPT_STOCHASTIC) &&
                     (moment == (int)KOPT_F32 || opt->moment_rounding == KOPT_STOCHASTIC);
    const int more = few && !one && (moments == 2 || moment != (int)KOPT_Q8);
    const int fits[] = {adam, few && one, more, rounding != KOPT_FEEDBACK}; /* by how: the last takes FEEDBACK, too */
    const kopt_cuda_kernel_ *k = kopt_cuda_kernels_;
    while (k->how != KOPT_CUDA_MIXED_ && (mixed || k->weight != (int)weight || k->moment != moment || !fits[k->how] ||
                                          (k->how != KOPT_CUDA_ANY_ && k->rounding != (int)rounding)))
        k++;
    return (uint32_t)(k - kopt_cuda_kernels_);
}

static int kopt_cuda_stable_(const kopt_optimizer *opt) { return opt->rule == KOPT_RULE_ADAM && opt->stable; }

/* Checks the groups. Makes the plan, without the tasks: in memory are control, groups, tensors; the first task, the
   first round and the slot of each tensor; for StableAdamW the sums. */
static kopt_result kopt_cuda_layout_(kopt_cuda_plan *plan, const kopt_cuda_group *groups, size_t count) {
    size_t tensors = 0, stable = 0, g, i;
    uint64_t elements = 0;
    int formats = 0, guards = 0, zero_grad = 0;
    const kopt_tensor none = {}; /* any tensor may follow it */
    kopt_neighbours_ list = {};
    if (groups == NULL && count != 0) return KOPT_ERROR_NULL;
    for (g = 0; g < count; g++) {
        kopt_result result = kopt_check_options_(groups[g].opt);
        kopt_begun_ s;
        if (result != KOPT_OK) return result;
        if (groups[g].tensors == NULL && groups[g].count != 0) return KOPT_ERROR_NULL;
        kopt_copy_options_(groups[g].opt, &s);
        if (list.previous != NULL) list.previous = &none; /* ids begin anew; the memory is that of the last tensor */
        zero_grad |= s.zero_grad;
        for (i = 0; i < groups[g].count; i++) {
            const kopt_tensor *t = &groups[g].tensors[i];
            kopt_layout_ layout; /* of a state that is on the GPU */
            result = kopt_check_tensor_(&layout, &list.memory[list.current], &s, t, KOPT_CHECK_FIELDS_);
            if (result == KOPT_OK) result = kopt_check_memory_(&list.memory[list.current], t, &layout, 1);
            if (result != KOPT_OK) return result;
            if (t->n >> (kopt_cuda_stable_(groups[g].opt) ? 36 : 40) != 0) return KOPT_ERROR_BOUNDS;
            if (t->counts != NULL || !kopt_is_zero_(t->stable_scale)) return KOPT_ERROR_OPTION;
            result = kopt_check_neighbours_(&list, t, zero_grad);
            if (result != KOPT_OK) return result;
            if (t->n == 0) continue;
            zero_grad = s.zero_grad;
            elements += t->n;
            formats |= 1 << t->grad_format;
        }
        tensors += groups[g].count;
        if (kopt_cuda_stable_(groups[g].opt)) stable += groups[g].count;
        guards |= groups[g].opt->rounding == KOPT_FEEDBACK;
    }
    /* Each element adds less than 2^24 to a bin of 64 bits. There are fewer than 2^32 tasks. */
    if (tensors >> 28 != 0 || elements >> 40 != 0) return KOPT_ERROR_BOUNDS;
    plan->bytes = plan->device = NULL;
    plan->blocks = plan->reserved32_ = 0;
    plan->groups_ = count;
    plan->tensors_ = (uint32_t)tensors;
    plan->stable_ = (uint32_t)stable;
    plan->guards_ = (uint32_t)guards;
    plan->grad_format_ = formats == 2 ? KOPT_BF16 : formats == 4 ? KOPT_FP16 : 3;
    /* Twice the width only where the slots of the statistics allow it. */
    plan->width_ = elements >> 22 != 0 && plan->grad_format_ != 3 ? 1024 : 512;
    plan->at_tensors_ =
        kopt_cuda_align16_(sizeof(kopt_cuda_control_)) + kopt_cuda_align16_(2 * count * sizeof(kopt_cuda_group_));
    plan->at_tasks_ = plan->at_tensors_ + tensors * sizeof(kopt_cuda_tensor_);
    plan->at_ratios_ = plan->at_tasks_ + kopt_cuda_align16_(tensors * 12);
    plan->size = plan->at_ratios_ + kopt_cuda_align16_(stable * sizeof(kopt_norm));
    return KOPT_OK;
}

KOPT_CUDA_API_ size_t kopt_cuda_plan_size(const kopt_cuda_group *groups, size_t count) {
    kopt_cuda_plan plan;
    return kopt_cuda_layout_(&plan, groups, count) == KOPT_OK ? plan.size : 0;
}

/* The positions of n elements from this global index on; mask: the bits of the index that are in the position. */
static void kopt_cuda_span_(kopt_cuda_tensor_ *d, uint64_t first_index, uint64_t n, uint64_t mask) {
    d->pad = first_index & mask;
    d->end = d->pad + n;
    d->first = first_index - d->pad;
    d->complete = n < 8 ? 0 : n - 7;
}

static void kopt_cuda_describe_(kopt_cuda_tensor_ *d, const kopt_optimizer *opt, const kopt_tensor *t) {
    const kopt_layout_ layout = kopt_layout_for_(opt, t);
    void *to[KOPT_CUDA_ADDRESSES_];
    kopt_environment_ environment;
    kopt_job_ a;
    int blocks = 0, m;
    kopt_place_state_(&a, &layout, t);
    d->weight_format = (uint8_t)t->weight_format;
    d->weight_size = (uint8_t)layout.weight_bytes;
    d->residual_size = (uint8_t)layout.residual_bytes;
    d->state = (kopt_byte_ *)t->state;
    d->arrays = t->arrays != NULL;
    for (m = 0; m < layout.moment_count; m++) {
        const kopt_format format = kopt_format_in_layout_(&layout, m);
        d->moment[m] = a.moment[m];
        d->moment_size[m] = (uint8_t)kopt_bytes_of_(format);
        if (kopt_has_scales_(format)) d->scale[m] = kopt_scale_of_(&a, m);
        blocks |= format == KOPT_Q8;
    }
    if (d->residual_size != 0) d->residual = a.residual;
    if (opt->rounding == KOPT_FEEDBACK && t->weight_format != KOPT_F32 && t->n != 0) d->rates = kopt_rates_of_(t);
    if (opt->rule == KOPT_RULE_RANGER) d->slow = a.slow;
    if (opt->rule == KOPT_RULE_RANGER && d->residual_size != 0) d->slow_residual = a.slow_residual;
    kopt_enter_(&environment);
    d->rate_scale = d->base_scale = kopt_is_zero_(t->rate_scale) ? 1 : kopt_to_float_(t->rate_scale);
    kopt_leave_(&environment);
    d->id = t->id;
    d->grad_format = (uint8_t)t->grad_format;
    d->copy_format = (uint8_t)(t->copy == NULL ? KOPT_F32 : t->copy_format);
    /* 8-bit moments: blocks are counted from the tensor's first element, whatever its global index is. */
    kopt_cuda_span_(d, t->first_index, t->n, blocks ? 0 : 255);
    kopt_cuda_addresses_(to, t);
    kopt_cuda_place_(d, to);
}

KOPT_CUDA_API_ kopt_result kopt_cuda_plan_build(kopt_cuda_plan *plan, void *bytes, size_t size,
                                                const kopt_cuda_group *groups, size_t count) {
    kopt_byte_ *const base = (kopt_byte_ *)bytes;
    uint32_t next[KOPT_CUDA_KERNELS_ + 1] = {0}, tasks = 0, rounds = 0, stable = 0, *task, *slot, index, kernel;
    kopt_cuda_plan p;
    kopt_cuda_group_ *group;
    kopt_cuda_tensor_ *tensor;
    size_t g, i;
    int pass;
    kopt_result result = kopt_cuda_layout_(&p, groups, count);
    if (result != KOPT_OK) return result;
    if (plan == NULL || bytes == NULL) return KOPT_ERROR_NULL;
    if (size < p.size) return KOPT_ERROR_SIZE;
    if (((uintptr_t)bytes & 15) != 0) return KOPT_ERROR_OPTION;
    for (i = 0; i < p.size; i++) base[i] = 0;
    group = (kopt_cuda_group_ *)(base + kopt_cuda_align16_(sizeof(kopt_cuda_control_)));
    tensor = (kopt_cuda_tensor_ *)(base + p.at_tensors_);
    task = (uint32_t *)(base + p.at_tasks_);
    slot = task + 2 * p.tensors_;
    ((kopt_cuda_control_ *)base)->groups = 2 * count;
    for (pass = 0; pass < 2; pass++) { /* the tensors of one kernel are contiguous: count them, then place them */
        for (g = 0, index = 0; g < count; g++) {
            const kopt_optimizer *const opt = groups[g].opt;
            uint32_t kernels[3][2], format;
            for (format = KOPT_F32; format <= KOPT_FP16; format++) {
                kernels[format][0] = kopt_cuda_kernel_of_(opt, (kopt_format)format, 0);
                kernels[format][1] = kopt_cuda_kernel_of_(opt, (kopt_format)format, 1);
            }
            group[2 * g].opt = group[2 * g + 1].opt = *opt;
            group[2 * g + 1].opt.weight_decay = 0;
            for (i = 0; i < groups[g].count; i++, index++) {
                const kopt_tensor *const t = &groups[g].tensors[i];
                const uint32_t at = next[kernels[t->weight_format][t->copy != NULL] + (pass == 0)]++;
                if (pass == 0) continue;
                kopt_cuda_describe_(&tensor[at], opt, t);
                tensor[at].group = (uint32_t)(2 * g + (t->no_decay != 0));
                if (kopt_cuda_stable_(opt)) tensor[at].ratio_plus_1 = ++stable;
                slot[index] = at;
            }
        }
        for (kernel = 0; pass == 0 && kernel < KOPT_CUDA_KERNELS_; kernel++) next[kernel + 1] += next[kernel];
    }
    for (kernel = 0, index = 0; kernel < KOPT_CUDA_KERNELS_; kernel++)
        for (p.first_[kernel] = tasks; index < next[kernel]; index++) {
            const kopt_cuda_tensor_ *const t = &tensor[index];
            task[index] = tasks;
            task[p.tensors_ + index] = rounds;
            if (t->end != t->pad) tasks += (uint32_t)((t->end + p.width_ - 1) / p.width_);
            if (t->ratio_plus_1 != 0) rounds += (uint32_t)((t->end - t->pad + KOPT_ROUND_ - 1) / KOPT_ROUND_);
        }
    p.first_[KOPT_CUDA_KERNELS_] = tasks;
    p.rounds_ = rounds;
    p.bytes = bytes;
    *plan = p;
    return KOPT_OK;
}

/* A plan in host or GPU memory. All pointers are NULL if it is not there. */
static kopt_cuda_arguments_ kopt_cuda_arguments_at_(const kopt_cuda_plan *plan, void *memory) {
    kopt_cuda_arguments_ a = {};
    kopt_byte_ *const base = (kopt_byte_ *)memory;
    if (base == NULL) return a;
    a.control = (kopt_cuda_control_ *)base;
    a.groups = (kopt_cuda_group_ *)(base + kopt_cuda_align16_(sizeof(kopt_cuda_control_)));
    a.tensors = (kopt_cuda_tensor_ *)(base + plan->at_tensors_);
    a.first_task = (const uint32_t *)(base + plan->at_tasks_);
    a.first_round = a.first_task + plan->tensors_;
    a.tensor_count = plan->tensors_;
    a.width = plan->width_;
    a.ratios = (kopt_norm *)(base + plan->at_ratios_);
    return a;
}

static kopt_cuda_arguments_ kopt_cuda_arguments_of_(const kopt_cuda_plan *plan, uint32_t first, uint32_t end) {
    kopt_cuda_arguments_ a = kopt_cuda_arguments_at_(plan, plan == NULL ? NULL : plan->device);
    a.first = first;
    a.count = end - first;
    return a;
}

static kopt_cuda_entry_ *kopt_cuda_stats_of_(const kopt_cuda_plan *plan) {
    return plan->grad_format_ == KOPT_BF16   ? kopt_cuda_stats_kernel_<KOPT_BF16>
           : plan->grad_format_ == KOPT_FP16 ? kopt_cuda_stats_kernel_<KOPT_FP16>
                                             : kopt_cuda_stats_kernel_<3>;
}

static kopt_result kopt_cuda_load_kernels_(const kopt_cuda_plan *plan) {
    kopt_result result = kopt_cuda_load_(kopt_cuda_setting_kernel_);
    uint32_t kernel;
    if (result == KOPT_OK) result = kopt_cuda_load_(kopt_cuda_move_kernel_);
    if (result == KOPT_OK) result = kopt_cuda_load_(kopt_cuda_stats_of_(plan));
    if (result == KOPT_OK) result = kopt_cuda_load_(kopt_cuda_prologue_kernel_);
    if (result == KOPT_OK && plan->stable_ != 0) result = kopt_cuda_load_(kopt_cuda_measure_kernel_);
    if (result == KOPT_OK && (plan->stable_ | plan->guards_) != 0) result = kopt_cuda_load_(kopt_cuda_factor_kernel_);
    for (kernel = 0; kernel < sizeof kopt_cuda_kernels_ / sizeof *kopt_cuda_kernels_ && result == KOPT_OK; kernel++)
        if (plan->first_[kernel + 1] != plan->first_[kernel])
            result = kopt_cuda_load_(kopt_cuda_kernels_[kernel].kernel);
    for (kernel = 0; kernel < sizeof kopt_cuda_sum_kernels_ / sizeof *kopt_cuda_sum_kernels_ && result == KOPT_OK;
         kernel++)
        result = kopt_cuda_load_(kopt_cuda_sum_kernels_[kernel]);
    return result;
}

KOPT_CUDA_API_ kopt_result kopt_cuda_plan_upload(kopt_cuda_plan *plan, void *device, void *stream) {
    kopt_result result;
    if (plan == NULL || plan->bytes == NULL || device == NULL) return KOPT_ERROR_NULL;
    if (((uintptr_t)device & 15) != 0) return KOPT_ERROR_OPTION;
    result = kopt_cuda_refuse_capture_(stream);
    if (result == KOPT_OK) result = kopt_cuda_load_kernels_(plan);
    if (result == KOPT_OK) result = kopt_cuda_copy_(device, plan->bytes, plan->size, 0, stream);
    if (result == KOPT_OK) plan->device = device;
    return result;
}

/* Without a plan on the GPU, control is NULL. */
static kopt_cuda_setting_ kopt_cuda_setting_of_(const kopt_cuda_plan *plan, int which) {
    const kopt_cuda_arguments_ a = kopt_cuda_arguments_of_(plan, 0, 0);
    kopt_cuda_setting_ s = {};
    s.control = a.control;
    s.group = a.groups;
    s.which = which;
    return s;
}

/* The end of a call with a plan on the GPU: an error stops the plan. */
static kopt_result kopt_cuda_end_(const kopt_cuda_plan *plan, kopt_result result, void *stream) {
    kopt_cuda_setting_ s = kopt_cuda_setting_of_(plan, 4);
    s.result = result;
    if (result != KOPT_OK) (void)kopt_cuda_launch_(kopt_cuda_setting_kernel_, s, 1, 1, stream);
    return result;
}

/* Makes a setting, if its arguments are right: result. */
static kopt_result kopt_cuda_set_(const kopt_cuda_plan *plan, kopt_cuda_setting_ &s, kopt_result result, void *stream) {
    if (s.control == NULL) return KOPT_ERROR_NULL;
    if (result == KOPT_OK) result = kopt_cuda_launch_(kopt_cuda_setting_kernel_, s, 1, 1, stream);
    return kopt_cuda_end_(plan, result, stream);
}

static uint32_t kopt_cuda_blocks_(const kopt_cuda_plan *plan, uint32_t blocks) {
    if (plan->blocks != 0 && blocks > plan->blocks) blocks = plan->blocks;
    return blocks == 0 ? 1 : blocks;
}

KOPT_CUDA_API_ kopt_result kopt_cuda_plan_step(const kopt_cuda_plan *plan, void *stream) {
    kopt_cuda_arguments_ a = kopt_cuda_arguments_of_(plan, 0, 0);
    kopt_result result;
    uint32_t kernel, warps;
    if (a.control == NULL) return KOPT_ERROR_NULL;
    result = kopt_cuda_launch_(kopt_cuda_prologue_kernel_, a, 1, KOPT_PROLOGUE_THREADS_, stream);
    if (result == KOPT_OK && plan->stable_ != 0) {
        a.count = plan->rounds_;
        result = kopt_cuda_clear_memory_(a.ratios, plan->stable_ * sizeof(kopt_norm), stream);
        if (result == KOPT_OK)
            result = kopt_cuda_launch_(kopt_cuda_measure_kernel_, a,
                                       kopt_cuda_blocks_(plan, kopt_cuda_resident_(kopt_cuda_measure_kernel_, a.count)),
                                       KOPT_THREADS_, stream);
    }
    if (result == KOPT_OK && (plan->stable_ | plan->guards_) != 0)
        result = kopt_cuda_launch_(kopt_cuda_factor_kernel_, a, (plan->tensors_ + KOPT_THREADS_ - 1) / KOPT_THREADS_,
                                   KOPT_THREADS_, stream);
    for (kernel = 0; kernel < sizeof kopt_cuda_kernels_ / sizeof *kopt_cuda_kernels_ && result == KOPT_OK; kernel++) {
        a = kopt_cuda_arguments_of_(plan, plan->first_[kernel], plan->first_[kernel + 1]);
        warps = KOPT_CUDA_WARPS_OF_(kopt_cuda_kernels_[kernel].moment);
        if (a.count != 0)
            result = kopt_cuda_launch_(kopt_cuda_kernels_[kernel].kernel, a,
                                       kopt_cuda_blocks_(plan, (a.count + warps - 1) / warps), 32 * warps, stream);
    }
    return kopt_cuda_end_(plan, result, stream);
}

KOPT_CUDA_API_ kopt_result kopt_cuda_plan_measure(const kopt_cuda_plan *plan, void *stream) {
    kopt_cuda_arguments_ a = kopt_cuda_arguments_of_(plan, 0, plan == NULL ? 0 : plan->first_[KOPT_CUDA_KERNELS_]);
    kopt_cuda_entry_ *kernel;
    uint32_t blocks;
    kopt_result result;
    if (a.control == NULL) return KOPT_ERROR_NULL;
    kernel = kopt_cuda_stats_of_(plan);
    blocks = kopt_cuda_resident_(kernel, (a.count + KOPT_WARPS_ - 1) / KOPT_WARPS_);
    result = kopt_cuda_clear_memory_(
        &a.control->norm, offsetof(kopt_cuda_control_, arrived) + 4 - offsetof(kopt_cuda_control_, norm), stream);
    if (result == KOPT_OK)
        result = kopt_cuda_launch_(kernel, a, kopt_cuda_blocks_(plan, blocks), KOPT_THREADS_, stream);
    return kopt_cuda_end_(plan, result, stream);
}

/* May these tensors take the places of those from `first` on? */
static kopt_result kopt_cuda_check_moves_(const kopt_cuda_plan *plan, size_t first, size_t count,
                                          const kopt_tensor *tensors) {
    const kopt_cuda_arguments_ a = kopt_cuda_arguments_at_(plan, plan->bytes);
    kopt_result result = KOPT_OK;
    size_t i;
    if (tensors == NULL && count != 0) return KOPT_ERROR_NULL;
    if (first > plan->tensors_ || count > plan->tensors_ - first) return KOPT_ERROR_BOUNDS;
    for (i = 0; i < count && result == KOPT_OK; i++) {
        const kopt_tensor *const t = &tensors[i];
        const kopt_cuda_tensor_ *const old = &a.tensors[a.first_round[plan->tensors_ + first + i]];
        kopt_layout_ layout;
        if (t->n != 0 && (t->weight == NULL || t->grad == NULL)) return KOPT_ERROR_NULL;
        if ((t->arrays != NULL) != old->arrays) return KOPT_ERROR_OPTION;
        if (t->n != old->end - old->pad || (uint8_t)t->weight_format != old->weight_format ||
            (uint8_t)t->grad_format != old->grad_format || (t->copy == NULL) != (old->copy == NULL) ||
            (t->copy != NULL && (uint8_t)t->copy_format != old->copy_format) ||
            (t->arrays == NULL && (t->state == NULL) != (old->state == NULL)))
            return KOPT_ERROR_MISMATCH;
        if (t->arrays == NULL) continue;
        layout = kopt_layout_for_(&a.groups[old->group].opt, t);
        result = kopt_check_arrays_(t, &layout);
    }
    return result;
}

KOPT_CUDA_API_ kopt_result kopt_cuda_plan_set_arrays(const kopt_cuda_plan *plan, size_t first, size_t count,
                                                     const kopt_tensor *tensors, void *stream) {
    const kopt_cuda_arguments_ a = kopt_cuda_arguments_of_(plan, 0, 0);
    kopt_cuda_moves_ m;
    kopt_result result;
    size_t i;
    if (a.control == NULL) return KOPT_ERROR_NULL;
    result = kopt_cuda_check_moves_(plan, first, count, tensors);
    m.tensors = a.tensors;
    m.slots = a.first_round + plan->tensors_;
    m.stride = 4;
    for (i = 0; i < count && result == KOPT_OK; i++)
        if (tensors[i].arrays != NULL) m.stride = KOPT_CUDA_ADDRESSES_;
    for (i = 0; i < count && result == KOPT_OK; i += m.count) {
        uint32_t k;
        m.first = (uint32_t)(first + i);
        m.count = 4 * KOPT_CUDA_MOVES_ / m.stride;
        if (count - i < m.count) m.count = (uint32_t)(count - i);
        for (k = 0; k < m.count; k++) kopt_cuda_addresses_(m.to + k * m.stride, &tensors[i + k]);
        result = kopt_cuda_launch_(kopt_cuda_move_kernel_, m, 1, KOPT_CUDA_MOVES_, stream);
    }
    return kopt_cuda_end_(plan, result, stream);
}

KOPT_CUDA_API_ kopt_result kopt_cuda_plan_set_options(const kopt_cuda_plan *plan, const kopt_cuda_options *options,
                                                      void *stream) {
    kopt_cuda_setting_ s = kopt_cuda_setting_of_(plan, 0);
    kopt_result result = KOPT_ERROR_NULL;
    if (options != NULL) {
        const uint64_t *const r = options->reserved_;
        const int good = kopt_between_(options->max_norm, 0, KOPT_DOUBLE_(1e300, 0x7E37E43Cu, 0x8800759Cu));
        const int known = (options->reserved32_ | r[0] | r[1] | r[2] | r[3]) == 0;
        s.options = *options;
        result = !known ? KOPT_ERROR_OPTION : good ? KOPT_OK : KOPT_ERROR_RANGE;
    }
    return kopt_cuda_set_(plan, s, result, stream);
}

/* May an optimizer take the place of another one in a plan? */
static int kopt_cuda_same_kind_(const kopt_optimizer *a, const kopt_optimizer *b) {
    return a->rule == b->rule && a->rounding == b->rounding && a->first_moment_format == b->first_moment_format &&
           (kopt_moments_(a) < 2 || a->second_moment_format == b->second_moment_format) &&
           a->moment_rounding == b->moment_rounding && a->residual_rounding == b->residual_rounding &&
           kopt_moments_(a) == kopt_moments_(b) && kopt_cuda_stable_(a) == kopt_cuda_stable_(b);
}

KOPT_CUDA_API_ kopt_result kopt_cuda_plan_set_optimizer(const kopt_cuda_plan *plan, size_t group,
                                                        const kopt_optimizer *opt, void *stream) {
    kopt_cuda_setting_ s = kopt_cuda_setting_of_(plan, 1);
    kopt_result result = kopt_check_options_(opt);
    if (s.control == NULL) return KOPT_ERROR_NULL;
    if (result == KOPT_OK && group >= plan->groups_) result = KOPT_ERROR_BOUNDS;
    if (result == KOPT_OK) {
        s.group += 2 * group;
        s.opt = *opt;
        if (!kopt_cuda_same_kind_(opt, &kopt_cuda_arguments_at_(plan, plan->bytes).groups[2 * group].opt))
            result = KOPT_ERROR_MISMATCH;
    }
    return kopt_cuda_set_(plan, s, result, stream);
}

KOPT_CUDA_API_ kopt_result kopt_cuda_plan_set_step(const kopt_cuda_plan *plan, uint32_t step, void *stream) {
    kopt_cuda_setting_ s = kopt_cuda_setting_of_(plan, 2);
    s.step = step;
    return kopt_cuda_set_(plan, s, KOPT_OK, stream);
}

KOPT_CUDA_API_ kopt_result kopt_cuda_plan_acknowledge(const kopt_cuda_plan *plan, void *stream) {
    kopt_cuda_setting_ s = kopt_cuda_setting_of_(plan, 4);
    return kopt_cuda_set_(plan, s, KOPT_OK, stream);
}

KOPT_CUDA_API_ const uint32_t *kopt_cuda_plan_steps(const kopt_cuda_plan *plan, size_t group) {
    const kopt_cuda_arguments_ a = kopt_cuda_arguments_of_(plan, 0, 0);
    return a.control == NULL || group >= plan->groups_ ? NULL : &a.groups[2 * group].opt.step;
}

KOPT_CUDA_API_ const kopt_cuda_status *kopt_cuda_plan_status(const kopt_cuda_plan *plan) {
    const kopt_cuda_arguments_ a = kopt_cuda_arguments_of_(plan, 0, 0);
    return a.control == NULL ? NULL : &a.control->status;
}

KOPT_CUDA_API_ kopt_norm *kopt_cuda_plan_norm(const kopt_cuda_plan *plan, size_t *words) {
    const kopt_cuda_arguments_ a = kopt_cuda_arguments_of_(plan, 0, 0);
    if (words != NULL) *words = a.control == NULL ? 0 : sizeof(kopt_norm) / 8;
    return a.control == NULL ? NULL : &a.control->norm;
}

/* Lists the weights of a tensor and its state: a block as one piece, or its arrays. Returns the end of the list. */
static kopt_array_ *kopt_cuda_pieces_(kopt_array_ *to, const kopt_layout_ *l, const kopt_tensor *t) {
    to = kopt_add_array_(to, (kopt_byte_ *)t->weight, l->n, l->weight_bytes);
    if (t->arrays != NULL) return kopt_list_arrays_(to, l, t);
    return kopt_add_array_(to, (kopt_byte_ *)t->state, l->total, l->total != 0);
}

static kopt_result kopt_cuda_init_tensor_(const kopt_optimizer *opt, const kopt_tensor *t, const float *weights,
                                          void *stream) {
    const kopt_layout_ layout = kopt_layout_for_(opt, t);
    kopt_array_ array[1 + KOPT_ARRAYS_], *a, *const end = kopt_cuda_pieces_(array, &layout, t);
    kopt_cuda_init_ k = {};
    kopt_result result = KOPT_OK;
    if (t->n == 0) return result;
    for (a = array + 1; a != end && result == KOPT_OK; a++)
        result = kopt_cuda_clear_memory_(a->at, a->n * a->bytes, stream);
    if (result != KOPT_OK) return result;
    kopt_cuda_describe_(&k.tensor, opt, t);
    k.weights = (const kopt_byte_ *)weights;
    k.format = t->weight_format;
    k.rounding = opt->rounding;
    k.fresh = 1;
    if (layout.total == 0) k.tensor.state = NULL;
    kopt_make_header_(k.header, opt, t->weight_format, t->id, t->n, t->first_index);
    return kopt_cuda_launch_(kopt_cuda_init_kernel_, k, kopt_cuda_grid_(t->n), KOPT_THREADS_, stream);
}

KOPT_CUDA_API_ kopt_result kopt_cuda_state_init(const kopt_optimizer *opt, const kopt_tensor *tensors, size_t count,
                                                const float *weights, void *stream) {
    kopt_result result = kopt_check_init_(opt, tensors, count, weights);
    size_t i;
    if (result == KOPT_OK && kopt_list_length(tensors, count) != 0) result = kopt_cuda_refuse_capture_(stream);
    for (i = 0; i < count && result == KOPT_OK; i++) {
        result = kopt_cuda_init_tensor_(opt, &tensors[i], weights, stream);
        if (weights != NULL) weights += tensors[i].n;
    }
    return result;
}

/* Does the host have a tensor of the same description? */
static kopt_result kopt_cuda_check_twin_(kopt_layout_ *layout, const kopt_optimizer *opt, const kopt_tensor *t,
                                         const kopt_tensor *host) {
    kopt_array_ array[1 + KOPT_ARRAYS_], *a, *end;
    kopt_result result = kopt_check_init_(opt, host, 1, NULL);
    if (result == KOPT_OK) result = kopt_check_init_(opt, t, 1, NULL);
    if (result != KOPT_OK) return result;
    *layout = kopt_layout_for_(opt, t);
    if (host->weight_format != t->weight_format || host->n != t->n || host->id != t->id ||
        host->first_index != t->first_index)
        return KOPT_ERROR_MISMATCH;
    if ((host->arrays == NULL) != (t->arrays == NULL)) return KOPT_ERROR_OPTION;
    end = kopt_cuda_pieces_(array, layout, host);
    for (a = array; a != end; a++)
        if (kopt_overlaps_tensor_(a->at, a->n * a->bytes, t, layout, 1u << KOPT_GRADS_)) return KOPT_ERROR_OVERLAP;
    return KOPT_OK;
}

/* Copies weights and state of a tensor with elements to its twin. */
static kopt_result kopt_cuda_copy_pieces_(const kopt_layout_ *l, const kopt_tensor *to, const kopt_tensor *from,
                                          int to_host, void *stream) {
    kopt_array_ a[1 + KOPT_ARRAYS_], b[1 + KOPT_ARRAYS_], *const end = kopt_cuda_pieces_(a, l, to);
    kopt_result result = KOPT_OK;
    size_t k;
    (void)kopt_cuda_pieces_(b, l, from);
    for (k = 0; a + k != end && result == KOPT_OK; k++)
        result = kopt_cuda_copy_(a[k].at, b[k].at, a[k].n * a[k].bytes, to_host, stream);
    return result;
}

KOPT_CUDA_API_ kopt_result kopt_cuda_state_save(const kopt_cuda_plan *plan, size_t group, kopt_optimizer *opt,
                                                const kopt_tensor *t, const kopt_tensor *host, void *stream) {
    const uint32_t *const step = kopt_cuda_plan_steps(plan, group);
    kopt_layout_ layout;
    kopt_result result = kopt_cuda_check_twin_(&layout, opt, t, host);
    if (result != KOPT_OK) return result;
    if (step == NULL) return plan == NULL || plan->device == NULL ? KOPT_ERROR_NULL : KOPT_ERROR_BOUNDS;
    result = kopt_cuda_copy_(&opt->step, step, 4, 1, stream);
    if (result != KOPT_OK || t->n == 0) return result;
    return kopt_cuda_copy_pieces_(&layout, host, t, 1, stream);
}

KOPT_CUDA_API_ kopt_result kopt_cuda_state_load(const kopt_optimizer *opt, const kopt_tensor *t,
                                                const kopt_tensor *host, void *stream) {
    kopt_cuda_init_ k = {};
    kopt_layout_ layout;
    kopt_result result = kopt_cuda_check_twin_(&layout, opt, t, host);
    if (result == KOPT_OK) result = kopt_check_state_(&layout, opt, host, KOPT_CHECK_STATE_);
    if (result != KOPT_OK || t->n == 0) return result;
    result = kopt_cuda_refuse_capture_(stream);
    if (result == KOPT_OK) result = kopt_cuda_copy_pieces_(&layout, t, host, 0, stream);
    if (result != KOPT_OK || t->copy == NULL) return result;
    kopt_cuda_describe_(&k.tensor, opt, t);
    k.format = t->weight_format;
    return kopt_cuda_launch_(kopt_cuda_init_kernel_, k, kopt_cuda_grid_(t->n), KOPT_THREADS_, stream);
}

/* What both calls need. The residual is in place of a state block. */
static kopt_cuda_accumulation_ kopt_cuda_accumulation_of_(const kopt_accumulator *a, void *grad,
                                                          kopt_format grad_format, const uint32_t *counts) {
    kopt_cuda_accumulation_ k = {};
    void *const to[] = {a->sum, grad, a->residual, NULL};
    k.tensor.weight_size = (uint8_t)kopt_bytes_of_(a->format);
    k.tensor.residual_size = (uint8_t)kopt_bytes_of_residual_(a->format, a->rounding);
    if (k.tensor.residual_size != 0) k.tensor.residual = k.tensor.state = (kopt_byte_ *)a->residual;
    k.tensor.weight_format = (uint8_t)a->format;
    k.tensor.grad_format = (uint8_t)grad_format;
    k.tensor.id = a->id;
    k.tensor.rate_scale = 1;
    kopt_cuda_span_(&k.tensor, a->first_index, a->n, 7);
    kopt_cuda_place_(&k.tensor, to);
    k.step.rule = KOPT_RULE_SGD;
    k.step.rounding = a->format == KOPT_F32 ? KOPT_NEAREST : a->rounding;
    k.step.moment_rounding = k.step.residual_rounding = a->residual_rounding;
    k.step.seed = a->seed;
    k.step.step = a->step + 1;
    k.count = a->count;
    k.counts = counts;
    return k;
}

KOPT_CUDA_API_ kopt_result kopt_cuda_accumulator_add(kopt_accumulator *a, const void *grad, kopt_format grad_format,
                                                     double scale, uint32_t *counts, const kopt_cuda_plan *plan,
                                                     void *stream) {
    kopt_result result = kopt_check_accumulator_(a, grad, grad_format);
    kopt_environment_ environment;
    kopt_cuda_accumulation_ k;
    kopt_cuda_setting_ s = kopt_cuda_setting_of_(plan, 3);
    int kernel;
    if (result != KOPT_OK) return result;
    if (counts != NULL && s.control == NULL) return KOPT_ERROR_NULL;
    if (!kopt_magnitude_at_most_(scale, KOPT_3E38_)) return KOPT_ERROR_RANGE;
    if (counts == NULL && (a->step == 0xFFFFFFFFu || a->count == 0xFFFFFFFFu)) return KOPT_ERROR_STEP;
    kernel = a->format == KOPT_F32 ? 0 : a->format == KOPT_FP16 ? 1 : a->rounding == KOPT_KAHAN ? 2 : 3;
    k = kopt_cuda_accumulation_of_(a, const_cast<void *>(grad), grad_format, counts);
    kopt_enter_(&environment);
    k.step.grad_scale = kopt_as_f32_(kopt_as_u32_(kopt_to_float_(scale)) ^ 0x80000000u);
    kopt_leave_(&environment);
    if (a->n != 0)
        result = kopt_cuda_launch_(kopt_cuda_sum_kernels_[kernel], k, kopt_cuda_grid_(k.tensor.end / 8 + 1),
                                   KOPT_THREADS_, stream);
    s.counts = counts;
    if (result == KOPT_OK && counts != NULL) return kopt_cuda_launch_(kopt_cuda_setting_kernel_, s, 1, 1, stream);
    a->step += result == KOPT_OK;
    a->count += result == KOPT_OK;
    return result;
}

KOPT_CUDA_API_ kopt_result kopt_cuda_accumulator_read(const kopt_accumulator *a, float *out, const uint32_t *counts,
                                                      void *stream) {
    const kopt_result result = kopt_check_accumulator_(a, out, KOPT_F32);
    kopt_cuda_accumulation_ k;
    if (result != KOPT_OK || a->n == 0) return result;
    k = kopt_cuda_accumulation_of_(a, NULL, KOPT_F32, counts);
    k.out = (kopt_byte_ *)out;
    return kopt_cuda_launch_(kopt_cuda_read_kernel_, k, kopt_cuda_grid_(a->n), KOPT_THREADS_, stream);
}

#endif /* KAHAN_OPT_CUDA_IMPLEMENTATION */

#if defined(__cplusplus) && (defined(__GNUC__) || defined(__clang__))
#pragma GCC diagnostic pop
#endif
#ifdef __NVCC__
#pragma nv_diagnostic pop
#endif

#else /* kahan_opt.h includes this part twice, before the kernels */

/* ================================================================================================================== */
/* VOCABULARY: one lane. Floating-point operations are PTX with .rn, so --use_fast_math, -ftz and -fmad change none.  */
/* ================================================================================================================== */
#define ISA_TARGET_ __device__
#define LANES_ (size_t)1
#if KOPT_PASS_ == KOPT_PASS_CUDA_
#define ISA_ cuda
#define ONE_LANE_ 1
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
FN_ vu32_ as_u32_(vf32_ a) { return kopt_as_u32_(a); }
FN_ vf32_ as_f32_(vu32_ a) { return kopt_as_f32_(a); }
#else            /* a float is held as its bits, in a register without a type: a bitcast takes no instruction of PTX */
#define F32_ "r"
typedef uint32_t vf32_;
FN_ vu32_ as_u32_(vf32_ a) { return a; }
FN_ vf32_ as_f32_(vu32_ a) { return a; }
#endif
FN_ vf32_ splat_(float x) { return as_f32_(kopt_as_u32_(x)); }
#define KOPT_BINARY_(name, operation)                                          \
    FN_ vf32_ name(vf32_ a, vf32_ b) {                                         \
        vf32_ r;                                                               \
        asm(operation ".rn.f32 %0, %1, %2;" : "=" F32_(r) : F32_(a), F32_(b)); \
        return r;                                                              \
    }
KOPT_BINARY_(add_, "add")
KOPT_BINARY_(sub_, "sub")
KOPT_BINARY_(mul_, "mul")
KOPT_BINARY_(div_, "div")
#undef KOPT_BINARY_
FN_ vf32_ sqrt_(vf32_ a) {
    vf32_ r;
    asm("sqrt.rn.f32 %0, %1;" : "=" F32_(r) : F32_(a));
    return r;
}
FN_ vf32_ convert_f32_(vu32_ a) {
    vf32_ r;
    asm("cvt.rn.f32.s32 %0, %1;" : "=" F32_(r) : "r"(a));
    return r;
}
FN_ vu32_ K_(round_u32)(vf32_ a) { /* 0 <= a < 2^31 */
    vu32_ r;
    asm("cvt.rni.s32.f32 %0, %1;" : "=r"(r) : F32_(a));
    return r;
}
FN_ vu32_ isplat_(uint32_t a) { return a; }
FN_ vu32_ isplat_hoisted_(uint32_t a) { return a; }
FN_ void K_(mulhilo)(vu32_ a, uint32_t b, vu32_ *high, vu32_ *low) { /* one product of 64 bits */
    asm("{ .reg .u64 product; mul.wide.u32 product, %2, %3; mov.b64 {%0, %1}, product; }"
        : "=r"(*low), "=r"(*high)
        : "r"(a), "r"(b));
}
FN_ vmask_ igt_(vu32_ a, vu32_ b) { return (int32_t)a > (int32_t)b; }
FN_ vmask_ ieq_(vu32_ a, vu32_ b) { return a == b; }
FN_ vmask_ K_(mask_or)(vmask_ a, vmask_ b) { return a | b; }
FN_ int any_true_(vmask_ a) { return a; }
FN_ vu32_ select_(vmask_ m, vu32_ yes, vu32_ no) { return m ? yes : no; }
FN_ vu32_ select_or_zero_(vmask_ m, vu32_ a) { return m ? a : 0; }
FN_ vu32_ load32_(const kopt_byte_ *p) { return kopt_load32_(p); }
FN_ vu32_ load16_(const kopt_byte_ *p) { return kopt_load16_(p); }
FN_ vu32_ K_(load8)(const kopt_byte_ *p) { return ((uint32_t)(*p) ^ 0x80u) - 0x80u; }
FN_ void store32_(kopt_byte_ *p, vu32_ a) { kopt_store32_(p, a); }
FN_ void K_(store16)(kopt_byte_ *p, vu32_ a) { kopt_store16_(p, a); }
FN_ void K_(store8)(kopt_byte_ *p, vu32_ a) { *p = (kopt_byte_)(a & 0xFFu); }
FN_ vu32_ K_(block_of_lane)(void) { return 0; }
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
FN_ vu32_ K_(add16)(vu32_ a, vu32_ b) { return (a + b) & 0xFFFFu; } /* the upper half stays 0 */
FN_ vu32_ K_(unpack_low16)(vu32_ a) { return a & 0xFFFFu; }
FN_ vu32_ K_(unpack_high16)(vu32_ a) { return a >> 16; }
#define MIN_MAX_ 1
FN_ vf32_ min_(vf32_ a, vf32_ b) { return (vf32_)(min((int)a, (int)b)); }
FN_ vf32_ K_(max)(vf32_ a, vf32_ b) { return (vf32_)(max((int)a, (int)b)); }
#define IMAX_ 1
FN_ vu32_ imax_(vu32_ a, vu32_ b) { return (vu32_)(max((int)a, (int)b)); }
#define FLUSH_ 1
FN_ vu32_ K_(imin)(vu32_ a, vu32_ b) { return (vu32_)(min((int)a, (int)b)); }
FN_ vf32_ K_(flush)(vf32_ a) { /* the only operation that flushes */
    vf32_ r;
    asm("add.rn.ftz.f32 %0, %1, 0f00000000;" : "=r"(r) : "r"(a));
    return r;
}
#define FP16_ 1
FN_ vf32_ K_(round_fp16)(vf32_ a, vu32_ *stored) {
    *stored = narrow_fp16_(a);
    return widen_fp16_(*stored);
}
#endif
#undef F32_

#endif /* KOPT_PASS_ */
