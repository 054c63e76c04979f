/* kahan_opt.h - v0.2 - train neural networks in pure 16 bit as if in fp32 - MIT-0 or public domain

   DO THIS ONCE: in one C or C++ file, before the include, to create the implementation:

       #define KAHAN_OPT_IMPLEMENTATION
       #include "kahan_opt.h"

   QUICK START: a bf16 weight tensor, its bf16 gradient, and a state block of 6 bytes per weight.

       enum { N = 1000 };
       static kopt_bf16 weight[N], grad[N];
       static unsigned char state[KOPT_STATE_BYTES(N, 6)];

       void train(const float *initial_weights, int steps) {
           kopt_optimizer opt = kopt_adamw(1e-3);          // bf16, Kahan; set any field you like
           kopt_tensor    t   = kopt_tensor_of(weight, grad, KOPT_BF16, N, state, sizeof state);
           if (kopt_state_init(&opt, &t, initial_weights) != KOPT_OK) return;
           while (steps-- > 0) {
               // ... forward and backward pass: read weight[], write grad[] ...
               if (kopt_optimizer_step(&opt, &t, 1) != KOPT_OK) return;
           }
       }

   A 16-bit store loses what does not fit. Every store here says what becomes of the loss:

       opt.rounding       beside the weight               bytes   what it gives
       KOPT_KAHAN         16-bit compensation, stochastic   4     moves down to updates of 2^-33 of a weight (default)
       KOPT_EXACT         the low 16 bits of the fp32       4     fp32 master weights, bit for bit: down to 2^-25
       KOPT_COMPACT       8-bit compensation, stochastic    3     most of Kahan for 3 bytes: down to 2^-25 in the mean
       KOPT_STOCHASTIC    nothing; unbiased                 2     moves in the mean, down to 2^-25; noisy
       KOPT_NEAREST       nothing                           2     stalls below 2^-9 of a weight: the baseline

   COMPILES as C99, C11, C17, C++98 and later; gcc, clang, tcc (Microsoft's compiler: its lines are compiled by
   clang-cl, not run). No flags are needed: the best of SSE2, AVX2, AVX-512 and NEON is chosen at run time,
   and the result bits are the same on all of them.

   CONTENTS (each entry is a banner: search for it)
       WHAT IT DOES               WHAT IT DOES NOT        CONFIGURATION               CONTRACT
       BYTES PER PARAMETER        VERSION HISTORY
       FORMATS AND RESULTS        INSTRUCTION SETS        CONVERSIONS OF ONE VALUE    RANDOM BITS
       ONE-ELEMENT UPDATES        OPTIMIZER               TENSOR AND STATE            STEP
       NORM AND CLIPPING          LOSS SCALING            GRADIENT ACCUMULATION       GRADIENT COMPRESSION
       REDUCTION                  CONVERSIONS OF ARRAYS   VECTOR MATHEMATICS          SOFTMAX AND CROSS ENTROPY
       RANDOM NUMBERS             LANGEVIN DYNAMICS
       IMPLEMENTATION             COMPILER AND TARGET     INTERNAL TYPES              CONTENTS OF THIS BUILD
       MEMORY                     FP32 ARITHMETIC         BINARY64 ARITHMETIC         EXACT NORM
       ONE PASS PER INSTRUCTION SET                       VOCABULARIES                KERNELS
       DISPATCH                   FLOATING-POINT ENVIRONMENT                          8-BIT MOMENTS IN SCALAR CODE
       PUBLIC FUNCTIONS           LICENCE
*/
#if defined(KOPT_VERSION) && KOPT_VERSION != 200
#error "two versions of kahan_opt.h in one file: give each a file of its own (KAHAN_OPT_STATIC), see KAHAN_OPT_SELF"
#endif

#ifndef KOPT_PASS_ /* the whole file but the vocabularies and kernels, which are read once per ISA */
#ifndef KAHAN_OPT_H
#define KAHAN_OPT_H

/* WHAT IT DOES
   - Weights, gradients and moments in bf16, fp16 or fp32, in any mixture (moments also in 8 bit), stepped by SGD, Adam,
     AdamW, AMSGrad, StableAdamW, Lion, Adan, RAdam or Ranger; averages of weights. With KAHAN_OPT_VMATH also Adam-atan2 and
     smooth Lion.
   - The rounding residual of a 16-bit weight is kept (Kahan, compact, exact) or rounded without bias.
   - The rest of a training loop: exact norm and finite check, clipping, loss scale, gradient accumulation, stall counts,
     gradients compressed to 16, 8 or 1 bit with error feedback, reduction of shards in a fixed order.
   - Any slicing of a tensor into ranges, any thread, any shard, any machine: the same bits.

   WHAT IT DOES NOT
   - No malloc, no threads, no stdio, no libm, no errno, no mutable global but one cached ISA index.
   - No forward or backward pass: it begins where you have a gradient.
   - No claim about NaN payloads in conversions (a NaN stays a NaN); steps store the canonical NaN.

   CONFIGURATION (define before the include; 'all' = the same everywhere, 'impl' = where it is implemented)
   KAHAN_OPT_IMPLEMENTATION   impl  create the implementation. In one file of the program.
   KAHAN_OPT_STATIC           impl  every function is static: several private copies, of any versions, may live in
                                    one program, each in its own file; there before the first include of this one.
                                    Cost: a copy per file.
   KAHAN_OPT_API              all   declaration specifier, e.g. __declspec(dllexport). Not with KAHAN_OPT_STATIC.
   KAHAN_OPT_NO_SIMD          impl  scalar path only, 10-30x slower, a tenth of the code. Link with -Wl,--gc-sections
                                    after -ffunction-sections: what is not called is dropped.
   KAHAN_OPT_ONLY             impl  a set of KOPT_WITH_ bits (below): the rest is left out of the build, and refused with
                                    KOPT_ERROR_OPTION. What is left gives the same bits. KOPT_WITH_ALL & ~KOPT_WITH_FP16
                                    is all but fp16; KOPT_TINY is AdamW and SGD in bf16 in 1.5 KB of flash (M4F), SGD
                                    alone in 1 KB (docs/size.md). Danger: without KOPT_WITH_CHECKS nothing is refused
                                    but what the guards of KOPT_TINY name, state blocks have no header (all else is in
                                    its place), and the caller's FP environment must be the default. Run the same calls
                                    once in a build with checks.
   KAHAN_OPT_VMATH            all   vector mathematics, softmax, loss, random numbers, Langevin steps, and the rules Adam-atan2
                                    and smooth Lion, with the implementation: see there. Where it is not defined their
                                    declarations are not seen; structs are the same. Cost: 3 s to compile, 100 KB.
   KAHAN_OPT_SLEEF            impl  with the former: SLEEF 3.5.1 or later computes exp to sincospi by default, and what
                                    is made of them; link with -lsleef. A step uses it if opt.vmath says so; no random
                                    number does.
   KAHAN_OPT_SELF             impl  the name of this file, with quotes, if you renamed it: it includes itself, so it has
                                    to stay a file of its own. gcc 12, clang 9 and later know the name.

   CONTRACT
   1. Same bits everywhere. A step's result is a pure function of its inputs: not of the ISA, the compiler, its
      flags (-Ofast, -ffp-contract=fast), the caller's rounding mode or FTZ/DAZ, the thread, the range, the shard.
      Every + - * / and sqrt of the formulas in docs/numerics.md is one IEEE binary32 operation in the written
      order, never fused; per-step scalars are computed once.
   2. Fidelity. Weight decay is part of the compensated update. Moments are computed in fp32 and the update uses
      the unrounded moments; only the store rounds. 16-bit moments are stored stochastically by default.
   3. NaN stays NaN, infinity stays infinity. A finite value beyond the largest 16-bit number follows
      round-to-nearest in the last interval, stochastic or not; when a weight becomes infinite or NaN its residual
      becomes zero.
   4. Subnormals. bf16 and fp32 values that a step stores below 2^-126 are stored as +0. fp16 subnormals are
      ordinary values. Conversions keep all subnormals.
   5. Random bits are a pure function of (seed, step, tensor id, stream, global element index): see RANDOM BITS.
   6. Any alignment, n up to SIZE_MAX / 32. Pointers may be NULL when n is 0. Stack: 12 KB, in a build without vectors
      2, and 1 more for each 8-bit moment; what KAHAN_OPT_VMATH adds: 22, without vectors 8; by clang -O0 up to 48.
   7. Bad input is refused before anything is written: every function that can fail returns a kopt_result, and
      kopt_result_string() says it in words. Overlapping buffers of one tensor are refused; in lists see STEP.
      A struct of zeros means the defaults (kopt_tensor, kopt_norm) or is refused.
   8. State is bytes: kopt_state_seal() makes a block portable (little-endian, checksummed), kopt_state_open()
      checks it and makes it ready again; a step after that continues bit for bit. A block opens under the rule,
      decay mode, formats and roundings that made it, and no others.
   9. Structs have one layout, whatever macros a file defines. What a build leaves out does not link or is refused.

   BYTES PER PARAMETER (weight + gradient + state; AdamW)
                                weight  grad  residual  moments  total    fp32 AdamW: 16
   bf16 KAHAN or EXACT             2      2       2        4       10     mixed precision (fp32 master): 16
   bf16 COMPACT                    2      2       1        4        9
   bf16 STOCHASTIC or NEAREST      2      2       -        4        8
   bf16 COMPACT, 8-bit moments     2      2       1        2.03     7.03
   Other rules keep 0 (EMA), 1 (Lion, SGD with momentum), 3 (AMSGrad) or 4 (Adan) moments instead of 2; Ranger 2, and
   a second copy of weight and residual. Without a gradient buffer (step each tensor when its gradient exists, then reuse the buffer): 2 less.

   VERSION HISTORY
   0.2  A careless call is right or refused: structs of zeros, ids of a list, counts inside an array, a copy that
        nothing filled, a block under another optimizer, small builds. New: kopt_number_tensors, kopt_state_inspect,
        kopt_scaler_begin, kopt_state_write_codes, KOPT_BARE. Other bits than 0.1: COMPACT with stochastic
        compensation draws from the upper bits of its random number; 8-bit codes are minifloats, no longer the dynamic
        map; rate_scale 0 is 1; and blocks have layout 2 (blocks of 0.1, and moments of the dynamic map, are read).
   0.1  first
*/

#define KOPT_VERSION 200 /* 10000 * major + 100 * minor + patch; also above the first #endif */

/* clang-format off: the declarations are tables, aligned by hand */

/* What KAHAN_OPT_ONLY is made of: see CONFIGURATION. */
#define KOPT_WITH_F32 0x00000001u              /* formats of weights, gradients, moments and copies               */
#define KOPT_WITH_BF16 0x00000002u
#define KOPT_WITH_FP16 0x00000004u
#define KOPT_WITH_Q8 0x00000008u
#define KOPT_WITH_COMPRESSION 0x00000010u      /* kopt_compress, kopt_decompress_add (kopt_reduce is always there)*/
#define KOPT_WITH_NEAREST 0x00000020u          /* opt.rounding                                                    */
#define KOPT_WITH_STOCHASTIC 0x00000040u
#define KOPT_WITH_KAHAN 0x00000080u
#define KOPT_WITH_COMPACT 0x00000100u
#define KOPT_WITH_EXACT 0x00000200u
#define KOPT_WITH_NEAREST_STATE 0x00000400u    /* opt.moment_rounding and opt.compensation_rounding               */
#define KOPT_WITH_STOCHASTIC_STATE 0x00000800u
#define KOPT_WITH_L2 0x00001000u               /* opt.decay_mode                                                       */
#define KOPT_WITH_DECOUPLED 0x00002000u
#define KOPT_WITH_FULLY_DECOUPLED 0x00004000u
#define KOPT_WITH_MOMENTUM 0x00008000u         /* SGD: opt.momentum, dampening, nesterov                          */
#define KOPT_WITH_SGD 0x00010000u              /* rules                                                           */
#define KOPT_WITH_ADAM 0x00020000u             /* with SGD and F32 also Adam-atan2                                */
#define KOPT_WITH_LION 0x00040000u
#define KOPT_WITH_ADAN 0x00080000u
#define KOPT_WITH_RADAM 0x00100000u
#define KOPT_WITH_RANGER 0x00200000u
#define KOPT_WITH_EMA 0x00400000u
#define KOPT_WITH_GUARDS 0x20000000u           /* of a build without KOPT_WITH_CHECKS: see KOPT_TINY              */
#define KOPT_WITH_EXTRAS 0x40000000u           /* opt.maximize, zero_grad, clip, amsgrad, moments_only; tensor.copy,
                                                  rate_scale, counts, first_index; fp32 weights to kopt_state_init */
#define KOPT_WITH_CHECKS 0x80000000u           /* arguments, buffers, state blocks; the caller's FP environment   */
#define KOPT_WITH_ALL 0xFFFFFFFFu
/* SGD without momentum and AdamW, all in bf16 with KAHAN: see docs/size.md. Its guards refuse what would go wrong in
   silence: kopt_step_begin() an optimizer that no constructor made or that wants what is left out, kopt_state_init()
   that and fp32 weights, a gradient in another format, a state block that is too small. KOPT_BARE has no guards. */
#define KOPT_BARE (KOPT_WITH_BF16 | KOPT_WITH_KAHAN | KOPT_WITH_STOCHASTIC_STATE | KOPT_WITH_DECOUPLED | \
                   KOPT_WITH_SGD | KOPT_WITH_ADAM)
#define KOPT_TINY (KOPT_BARE | KOPT_WITH_GUARDS)

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
#define KOPT_CAST_(type, x) static_cast<type>(x)
#define KOPT_EXTERN_ extern "C"
#else
#define KOPT_CAST_(type, x) ((type)(x))
#define KOPT_EXTERN_ extern
#endif

#if defined(__cplusplus) && __cplusplus >= 201103L
#define KOPT_NULL_ nullptr
#else
#define KOPT_NULL_ NULL
#endif

#if (defined(__GNUC__) || defined(__clang__)) && !defined(__TINYC__)
#define KOPT_GNU_ 1 /* gcc, clang, clang-cl: they know GNU attributes, builtins and assembly */
#endif
#if defined(KOPT_GNU_) && !defined(__clang__) && !defined(__INTEL_COMPILER) && !defined(__NVCOMPILER)
#define KOPT_GCC_ 1 /* gcc itself: the others say that they are it, and know neither its pragmas nor its headers */
#endif

#if defined(__cplusplus) || (defined(__STDC_VERSION__) && __STDC_VERSION__ >= 199901L)
#define KOPT_INLINED_ inline
#else
#define KOPT_INLINED_ __inline
#endif
#ifdef __CUDACC__
#define KOPT_HOST_DEVICE_ __host__ __device__ /* what kahan_opt_cuda.cuh needs on both sides */
#else
#define KOPT_HOST_DEVICE_
#endif
#if defined(KOPT_GCC_) && !defined(__OPTIMIZE__) && !defined(__CUDACC__) && \
    (defined(__x86_64__) || defined(__i386__) || defined(__aarch64__))
#define KOPT_INLINE_ static KOPT_INLINED_ __attribute__((__always_inline__)) /* at -O0, too, where the kernels are optimized */
#else
#define KOPT_INLINE_ static KOPT_HOST_DEVICE_ KOPT_INLINED_
#endif

/* A static function that may stay unused. clang warns if one that is marked so is used, but not about inline ones. */
#ifdef KOPT_GCC_
#define KOPT_UNUSED_ __attribute__((__unused__))
#else
#define KOPT_UNUSED_ KOPT_INLINED_
#endif

#if defined(KAHAN_OPT_STATIC) && defined(KAHAN_OPT_API)
#error "KAHAN_OPT_STATIC and KAHAN_OPT_API contradict each other: define one of them"
#elif defined(KAHAN_OPT_STATIC)
#define KOPT_API_ static KOPT_UNUSED_
#elif defined(KAHAN_OPT_API)
#define KOPT_API_ KOPT_EXTERN_ KAHAN_OPT_API
#else
#define KOPT_API_ KOPT_EXTERN_
#endif

/* ---- FORMATS AND RESULTS ---------------------------------------------------------------------------------------- */

typedef uint16_t kopt_bf16; /* 1 sign, 8 exponent, 7 fraction bits: the upper half of an fp32 */
typedef uint16_t kopt_fp16; /* 1 sign, 5 exponent, 10 fraction bits: IEEE binary16            */

typedef enum kopt_format {
    KOPT_F32 = 0, KOPT_BF16 = 1, KOPT_FP16 = 2,
    KOPT_Q8 = 3,  /* of moments, compressed gradients: 8-bit codes, one fp32 scale per 256 values (docs/numerics.md 6b).
                     As moments the length of a step is within 2 % of fp32's in the mean, its noise 5 to 17 % */
    KOPT_SIGN = 4 /* of compressed gradients only: signs, and one fp32 scale per 256 values                       */
} kopt_format;

typedef enum kopt_rounding {
    KOPT_NEAREST = 0,    /* to nearest, ties to even                                                         */
    KOPT_STOCHASTIC = 1, /* up with the probability of the fraction that is cut off: unbiased                */
    KOPT_KAHAN = 2,      /* nearest (bf16: ties away), residual in a 16-bit compensation (fp16: times 2^11)  */
    KOPT_COMPACT = 3,    /* ties away, and the residual in an 8-bit count of 2^-8 ulp                        */
    KOPT_EXACT = 4       /* ties away, and the residual in a 16-bit count of 2^-16 ulp: all of the fp32      */
} kopt_rounding;

typedef enum kopt_rule {
    KOPT_SGD = 0,
    KOPT_ADAM = 1,   /* Adam and AdamW: they differ in opt.decay_mode. AMSGrad: opt.amsgrad                       */
    KOPT_LION = 2,   /* Chen et al. 2023                                                                     */
    KOPT_ADAN = 3,   /* Xie et al. 2022                                                                      */
    KOPT_RADAM = 4,  /* Liu et al. 2020                                                                      */
    KOPT_RANGER = 5, /* RAdam with Lookahead (Zhang et al. 2019)                                             */
    KOPT_EMA = 6,    /* the average of other weights: the "gradient" is those weights                        */
    KOPT_ADAM_ATAN2 = 7 /* Everett et al. 2024: Adam without eps. Only with KAHAN_OPT_VMATH                  */
} kopt_rule;

typedef enum kopt_decay_mode {
    KOPT_L2 = 0,             /* g += weight_decay * w                                  (PyTorch Adam, SGD)   */
    KOPT_DECOUPLED = 1,      /* w -= lr * weight_decay * w                             (Loshchilov & Hutter) */
    KOPT_FULLY_DECOUPLED = 2 /* w -= (lr / max_lr) * weight_decay * w                  (optimi, FlashOptim)  */
} kopt_decay_mode;

typedef enum kopt_result {
    KOPT_OK = 0,
    KOPT_ERROR_NULL,      /* a required pointer is NULL                                            */
    KOPT_ERROR_OPTION,    /* an enum field holds no value of its enum, or one that does not apply  */
    KOPT_ERROR_RANGE,     /* a hyper-parameter is out of its range, or not a number                */
    KOPT_ERROR_BOUNDS,    /* begin > end, end > n, or n too large for the address space            */
    KOPT_ERROR_SIZE,      /* the state block is smaller than kopt_state_size() says                */
    KOPT_ERROR_STATE,     /* the block is no state block, or not one of this version               */
    KOPT_ERROR_MISMATCH,  /* the block belongs to another optimizer, tensor or shard               */
    KOPT_ERROR_SEALED,    /* the block is sealed: kopt_state_open() it first                       */
    KOPT_ERROR_CHECKSUM,  /* the block was damaged                                                 */
    KOPT_ERROR_OVERLAP,   /* two buffers overlap                                                   */
    KOPT_ERROR_STEP,      /* the step was not begun, or 2^32 - 1 steps are used up                 */
    KOPT_ERROR_ISA,       /* this machine or this build has no such instruction set, or no GPU     */
    KOPT_ERROR_DEVICE,    /* a CUDA call failed: cudaPeekAtLastError() says why                    */
    KOPT_ERROR_UNINITIALIZED, /* an optimizer, accumulator or compressor that no constructor made  */
    KOPT_ERROR_ID         /* the ids of a list of tensors do not increase: kopt_number_tensors()   */
} kopt_result;

/* One English sentence for each result, never NULL. */
KOPT_API_ const char *kopt_result_string(kopt_result result);

/* KOPT_VERSION of the implementation that was linked. */
KOPT_API_ int kopt_version(void);

/* ---- INSTRUCTION SETS -------------------------------------------------------------------------------------------- */

/* The instruction sets, and which of them is in use: the best that this machine has, unless another is forced. */
typedef enum kopt_isa {
    KOPT_ISA_SCALAR = 0, KOPT_ISA_SSE2 = 1, KOPT_ISA_AVX2 = 2, KOPT_ISA_AVX512 = 3, KOPT_ISA_NEON = 4,
    KOPT_ISA_COUNT = 5
} kopt_isa;
KOPT_API_ int kopt_isa_usable(kopt_isa isa);            /* 1 if compiled in and present on this machine           */
KOPT_API_ kopt_isa kopt_isa_current(void);
KOPT_API_ kopt_result kopt_isa_force(kopt_isa isa);     /* for tests and measurements; KOPT_ISA_COUNT: automatic  */
KOPT_API_ const char *kopt_isa_name(kopt_isa isa);

/* ---- CONVERSIONS OF ONE VALUE ------------------------------------------------------------------------------------ */

/* Integer arithmetic only: right for every input, in any floating-point environment. */

typedef union kopt_bitcast_ {
    float f;
    uint32_t u;
} kopt_bitcast_;

KOPT_INLINE_ uint32_t kopt_as_u32_(float x) {
    kopt_bitcast_ w;
    w.f = x;
#if defined(KOPT_GNU_) && !defined(__CUDA_ARCH__)
    __asm__("" : "+r"(w.u)); /* or clang 19 -Ofast makes a question about the bits one about the number, and no NaN exists */
#endif
    return w.u;
}

KOPT_INLINE_ float kopt_as_f32_(uint32_t bits) {
    kopt_bitcast_ w;
    w.u = bits;
    return w.f;
}

/* bf16 is the upper half of the fp32 word:     s eeeeeeee fffffff | ffff ffff ffff ffff */
KOPT_INLINE_ float kopt_f32_from_bf16(kopt_bf16 x) { return kopt_as_f32_(KOPT_CAST_(uint32_t, x) << 16); }

/* Nearest, ties to even. */
KOPT_INLINE_ kopt_bf16 kopt_bf16_from_f32(float x) {
    uint32_t u = kopt_as_u32_(x), odd = (u >> 16) & 1u;
    if ((u & 0x7FFFFFFFu) > 0x7F800000u) return KOPT_CAST_(kopt_bf16, (u >> 16) | 0x0040u); /* NaN, quiet */
    return KOPT_CAST_(kopt_bf16, (u + 0x7FFFu + odd) >> 16);
}

/* fp16:  s eeeee ffffffffff, exponent bias 15;  fp32:  s eeeeeeee ffffffffff fffffffffffff, bias 127 */
KOPT_INLINE_ float kopt_f32_from_fp16(kopt_fp16 x) {
    uint32_t u = x, sign = (u & 0x8000u) << 16, mag = u & 0x7FFFu, exponent = 113;
    if (mag > 0x7C00u) return kopt_as_f32_(sign | 0x7FC00000u | (mag << 13));         /* NaN, quiet          */
    if (mag == 0x7C00u) return kopt_as_f32_(sign | 0x7F800000u);                      /* infinity            */
    if (mag >= 0x0400u) return kopt_as_f32_(sign | ((mag << 13) + 0x38000000u));      /* normal: 112 << 23   */
    if (mag == 0) return kopt_as_f32_(sign);
    for (; mag < 0x0400u; mag <<= 1) exponent--;                                     /* subnormal: mag 2^-24 */
    return kopt_as_f32_(sign | (exponent << 23) | ((mag & 0x03FFu) << 13));
}

/* Nearest, ties to even. */
KOPT_INLINE_ kopt_fp16 kopt_fp16_from_f32(float x) {
    uint32_t u = kopt_as_u32_(x), sign = (u >> 16) & 0x8000u, mag = u & 0x7FFFFFFFu, shift = 13, half;
    if (mag > 0x7F800000u) return KOPT_CAST_(kopt_fp16, sign | 0x7E00u | ((mag >> 13) & 0x03FFu)); /* NaN */
    if (mag >= 0x477FF000u) return KOPT_CAST_(kopt_fp16, sign | 0x7C00u);          /* from 65520 on: infinity */
    if (mag >= 0x38800000u) {
        half = mag - 0x38000000u;                                                  /* normal                  */
    } else {
        if (mag < 0x33000000u) return KOPT_CAST_(kopt_fp16, sign);                 /* below 2^-25: zero       */
        shift = 126 - (mag >> 23);                                                 /* subnormal: units 2^-24  */
        half = (mag & 0x007FFFFFu) | 0x00800000u;
    }
    half = (half + (KOPT_CAST_(uint32_t, 1) << (shift - 1)) - 1 + ((half >> shift) & 1u)) >> shift;
    return KOPT_CAST_(kopt_fp16, sign | half);
}

/* The 32-bit word whose upper half is x cut off to bf16, fp16 and whose lower half is the rest in 2^-16 ulp; NaN is
   canonical (docs/numerics.md section 1). */
KOPT_INLINE_ uint32_t kopt_extended_bf16_(float x) {
    uint32_t u = kopt_as_u32_(x);
    return (u & 0x7FFFFFFFu) > 0x7F800000u ? 0x7FC00000u : u;
}

KOPT_INLINE_ uint32_t kopt_extended_fp16_(float x) {
    uint32_t u = kopt_as_u32_(x), sign = u & 0x80000000u, mag = u & 0x7FFFFFFFu, shift, digits;
    if (mag > 0x7F800000u) return 0x7E000000u;
    if (mag >= 0x47800000u) return sign | 0x7C000000u;
    if (mag >= 0x38800000u) return sign | ((mag - 0x38000000u) << 3);
    if (mag < 0x2B000000u) return sign;                                           /* below 2^-41: no 2^-40    */
    digits = (mag & 0x007FFFFFu) | 0x00800000u;                                   /* digits * 2^(exp - 150)   */
    if (mag >= 0x37000000u) return sign | (digits << ((mag >> 23) - 110));        /* in units of 2^-40        */
    shift = 110 - (mag >> 23);
    return sign | ((digits + (KOPT_CAST_(uint32_t, 1) << (shift - 1)) - 1 + ((digits >> shift) & 1u)) >> shift);
}

/* Stochastic: away from zero with the probability of the part cut off, given 16 random bits. */
KOPT_INLINE_ kopt_bf16 kopt_bf16_from_f32_stochastic(float x, uint32_t random16) {
    uint32_t u = kopt_extended_bf16_(x);
    return KOPT_CAST_(kopt_bf16, (u + ((u & 0x7FFFFFFFu) >= 0x7F7F0000u ? 0x8000u : random16 & 0xFFFFu)) >> 16);
}

/* The same in fp16. */
KOPT_INLINE_ kopt_fp16 kopt_fp16_from_f32_stochastic(float x, uint32_t random16) {
    uint32_t u = kopt_extended_fp16_(x);
    return KOPT_CAST_(kopt_fp16, (u + ((u & 0x7FFFFFFFu) >= 0x7BFF0000u ? 0x8000u : random16 & 0xFFFFu)) >> 16);
}

/* ---- RANDOM BITS ------------------------------------------------------------------------------------------------- */

/* Which random numbers: element i of an array has those of global index first_index + i. A struct of zeros will do; what
   is to be independent differs in one of the four. */
typedef struct kopt_random_key {
    uint64_t seed;
    uint32_t step;
    uint32_t id;          /* of the tensor or array                      */
    uint64_t first_index; /* global index of element 0; below 2^63       */
} kopt_random_key;

/* The random bits r of element i, from Philox4x32-7 (Salmon et al. 2011): see docs/numerics.md section 7. stream is
   in [0, 16); 0 to 7 are the library's, 8 to 15 are yours. KOPT_RANDOM_STORE(r, k) is the 16-bit number of its store k,
   0 to 4: 0 is the weight or its compensation, k the k-th moment. Number 0 is the lower half of r, which is all that
   the functions of one value take of their random16. */
KOPT_API_ uint32_t kopt_random(kopt_random_key key, uint32_t stream, uint64_t i);
#define KOPT_RANDOM_STORE(r, k) (((r) + (k) * ((r) >> 16)) & 0xFFFFu)

/* ---- ONE-ELEMENT UPDATES ----------------------------------------------------------------------------------------- */

/* For code that never holds a gradient buffer: `*w -= lr * dw` becomes
   kopt_kahan_add_bf16(w, c, -lr * dw, random16). */

/* Makes x an opaque register value: nothing is fused, reassociated or kept in excess precision across it. */
#if defined(__AVX512F__) && defined(__x86_64__)
#define KOPT_REGISTER_ "v"
#elif defined(__x86_64__) || (defined(__i386__) && defined(__SSE2_MATH__))
#define KOPT_REGISTER_ "x"
#elif defined(__aarch64__)
#define KOPT_REGISTER_ "w"
#elif defined(__arm__) && defined(__ARM_FP)
#define KOPT_REGISTER_ "t"
#elif defined(__riscv_flen) || defined(__s390x__) || defined(__mips_hard_float) || \
    (defined(__powerpc__) && !defined(_SOFT_FLOAT))
#define KOPT_REGISTER_ "f"
#elif defined(__i386__) || defined(__wasm__)
#define KOPT_REGISTER_ "m"
#else
#define KOPT_REGISTER_ "r"
#endif
#if !defined(KOPT_GNU_) || defined(__CUDA_ARCH__)
#define KOPT_OPAQUE_FLOAT_(x) ((void)0)
#define KOPT_OPAQUE_FLOATS_(x, y) ((void)0)
#else
#define KOPT_OPAQUE_FLOAT_(x) __asm__("" : "+" KOPT_REGISTER_(x))
#define KOPT_OPAQUE_FLOATS_(x, y) __asm__("" : "+" KOPT_REGISTER_(x), "+" KOPT_REGISTER_(y))
#endif

#ifdef __CUDA_ARCH__ /* no flag of nvcc changes what is written in PTX */
#define KOPT_PTX_(operation, letter, r, a, b) __asm__(operation " %0, %1, %2;" : "=" letter(r) : letter(a), letter(b))
#endif

KOPT_INLINE_ float kopt_add_(float a, float b) {
    float sum;
#ifdef __CUDA_ARCH__
    KOPT_PTX_("add.rn.f32", "f", sum, a, b);
#else
    sum = a + b;
    KOPT_OPAQUE_FLOAT_(sum);
#endif
    return sum;
}

KOPT_INLINE_ float kopt_sub_(float a, float b) {
    float difference;
#ifdef __CUDA_ARCH__
    KOPT_PTX_("sub.rn.f32", "f", difference, a, b);
#else
    difference = a - b;
    KOPT_OPAQUE_FLOAT_(difference);
#endif
    return difference;
}

/* w += delta, with the compensation c (start with 0): moves down to 2^-33 of the weight. Bit for bit the KAHAN store of
   a step with the same 16 random bits; random16 = 0x8000 rounds c to nearest. Runs in the caller's FP environment. */
KOPT_INLINE_ void kopt_kahan_add_bf16(kopt_bf16 *w, kopt_bf16 *c, float delta, uint32_t random16) {
    float old = kopt_f32_from_bf16(*w), y = kopt_add_(kopt_f32_from_bf16(*c), delta), sum = kopt_add_(old, y);
    uint32_t sixteen = (kopt_extended_bf16_(sum) + 0x8000u) >> 16, rest;
    rest = kopt_bf16_from_f32_stochastic(kopt_add_(kopt_sub_(old, kopt_as_f32_(sixteen << 16)), y), random16);
    if ((sixteen & 0x7F80u) == 0x7F80u || (rest & 0x7F80u) == 0) rest = 0; /* not finite; below 2^-126 */
    *w = KOPT_CAST_(kopt_bf16, (sixteen & 0x7F80u) == 0 ? 0 : sixteen);
    *c = KOPT_CAST_(kopt_bf16, rest);
}

/* The same in fp16; the compensation holds 2^11 times the residual, so that it does not underflow. */
KOPT_INLINE_ void kopt_kahan_add_fp16(kopt_fp16 *w, kopt_fp16 *c, float delta, uint32_t random16) {
    float old = kopt_f32_from_fp16(*w), y = kopt_add_(kopt_f32_from_fp16(*c) * (1.0f / 2048), delta);
    float sum = kopt_add_(old, y);
    kopt_fp16 sixteen = kopt_fp16_from_f32(sum), rest;
    float residual = kopt_add_(kopt_sub_(old, kopt_f32_from_fp16(sixteen)), y);
    rest = kopt_fp16_from_f32_stochastic(residual * 2048, random16);
    if ((sixteen & 0x7FFFu) > 0x7C00u) sixteen = 0x7E00u; /* the canonical NaN */
    *w = sixteen;
    *c = (sixteen & 0x7C00u) == 0x7C00u ? KOPT_CAST_(kopt_fp16, 0) : rest;
}

/* ---- OPTIMIZER -------------------------------------------------------------------------------------------------- */

/* A plain struct: make one with the functions below, then set any field, at any time. One that none of them made, such
   as {0}, is refused with KOPT_ERROR_UNINITIALIZED. */
typedef struct kopt_optimizer {
    kopt_rule rule;
    kopt_format weight_format;           /* default KOPT_BF16                                                     */
    kopt_rounding rounding;              /* of weights, default KOPT_KAHAN; ignored for KOPT_F32 weights          */
    kopt_format moment_format;           /* default KOPT_BF16. fp16 keeps sqrt(second moment), and loses gradients
                                            below 1e-6, with a loss scale, too                                    */
    kopt_rounding moment_rounding;       /* of 16- and 8-bit moments: KOPT_STOCHASTIC (default) or KOPT_NEAREST   */
    kopt_rounding compensation_rounding; /* in KAHAN and COMPACT: KOPT_STOCHASTIC (default) or KOPT_NEAREST       */
    kopt_decay_mode decay_mode;               /* default L2 for SGD and Adam, decoupled for AdamW                      */
    int nesterov;                        /* SGD: needs momentum > 0 and dampening == 0                            */
    int maximize;                        /* 1: ascend                                                             */
    int zero_grad;                       /* 1: a step sets the gradient to zero after it was read                 */
    /* A step rounds these to float; 1 - beta and 1 - dampening are formed before, as 1 - 0.999f is off by 1.3e-5 */
    double lr;                           /* >= 0                                                                  */
    double max_lr;                       /* > 0; only KOPT_FULLY_DECOUPLED reads it. Default: the first lr        */
    double weight_decay;                 /* >= 0; default 0, AdamW 0.01                                           */
    int amsgrad;                         /* Adam: 1: divide by the largest second moment so far                   */
    int stable;                          /* Adam: 1: StableAdamW: divide the rate by the RMS of g / sqrt(v) over the
                                            tensor, if that is above 1 (see kopt_stable_measure)                    */
    int moments_only;                    /* 1: a step leaves weights and copy alone (optimizer accumulation)      */
    int lookahead;                       /* Ranger: every how many steps, >= 1; default 6                         */
    double lookahead_rate;               /* Ranger: in [0, 1]; default 0.5                                        */
    double beta1, beta2, beta3;          /* in [0, 1); Adam 0.9, 0.999; beta3 is Adan's                           */
    double eps;                          /* all but SGD, Lion: a normal positive float; default 1e-8; added in fp32 */
    double momentum, dampening;          /* SGD: finite, momentum >= 0; default 0, 0                              */
    double grad_scale;                   /* gradients are multiplied by grad_scale * clip, e.g. 1 / loss scale    */
    double clip;                         /* ... and the coefficient of gradient clipping; both default 1          */
    uint64_t seed;                       /* of the random bits; default 0                                         */
    uint32_t step;                       /* steps begun so far; kopt_step_begin() counts it. 0 for a new run      */
    uint32_t made_;                      /* set by the functions below, and read by the library alone             */
    /* Of the rules of KAHAN_OPT_VMATH; a build without it refuses them. */
    double atan2_a, atan2_b;             /* Adam-atan2: w -= lr * a * atan2(m / (1 - beta1^t), b * sqrt(v / (1 - beta2^t)));
                                            a >= 0, b a normal positive float; default 1.27, 1                    */
    int atan2_outside;                   /* ... 1: lr * a / (1 - beta1^t) * atan2(m, b * sqrt(v / (1 - beta2^t))): with
                                            a = b = 1 the adam-atan2 package that HRM uses; default 0             */
    double sharpness;                    /* Lion: >= 0. 0 (default): sign(c); above, smooth: tanh(sharpness * c), which
                                            tends to sign(c) (smooth_beta of optax.scale_by_lion)                 */
    const struct kopt_vmath *vmath;      /* whose atan2 (Adam-atan2) and tanh (smooth Lion); NULL (default): the built-in,
                                            the same bits everywhere. See VECTOR MATHEMATICS                      */
} kopt_optimizer;

/* Defaults and formulas of torch.optim.SGD, Adam and AdamW (see docs/numerics.md), weights and moments in bf16. */
KOPT_API_ kopt_optimizer kopt_sgd(double lr, double momentum);
KOPT_API_ kopt_optimizer kopt_adam(double lr);
KOPT_API_ kopt_optimizer kopt_adamw(double lr);

/* RAdam as torch.optim.RAdam; the others with optimi's formulas and defaults: Lion beta 0.9, 0.99; Adan beta 0.98,
   0.92, 0.99, eps 1e-6, decay 0.02; Ranger beta 0.9, 0.99, eps 1e-6, lookahead 6, 0.5. Decay is decoupled (RAdam:
   L2). */
KOPT_API_ kopt_optimizer kopt_stable_adamw(double lr); /* Wortsman et al. 2023: beta 0.9, 0.99, eps 1e-6, decay 0.01 */
KOPT_API_ kopt_optimizer kopt_lion(double lr);
KOPT_API_ kopt_optimizer kopt_adan(double lr);
KOPT_API_ kopt_optimizer kopt_radam(double lr);
KOPT_API_ kopt_optimizer kopt_ranger(double lr);

#ifdef KAHAN_OPT_VMATH
/* Adam-atan2 with a = 1.27, b = 1, beta 0.9, 0.99; Lion with tanh(sharpness * c) for its sign: sharpness about 1 over
   the size of the gradients that are to count. Decay is decoupled, 0. */
KOPT_API_ kopt_optimizer kopt_adam_atan2(double lr);
KOPT_API_ kopt_optimizer kopt_smooth_lion(double lr, double sharpness);
#endif

/* An exponential moving average of weights, average += (1 - decay) * (weights - average), with any rounding: the
   tensor's `weight` is the average, its `grad` the weights it follows (only read). */
KOPT_API_ kopt_optimizer kopt_ema(double decay);

/* ---- TENSOR AND STATE ------------------------------------------------------------------------------------------- */

/* What a step reads and writes. All memory is the caller's; nothing is kept of this struct between calls. A field that
   is zero has its default, so that kopt_tensor t = {0} and designated initialisers will do: fp32 gradients, no copy, no
   counts, id and first_index 0, rate_scale 1. None of its arrays may overlap another, nor may counts lie in one. */
typedef struct kopt_tensor {
    void *weight;            /* n values of opt.weight_format                                                     */
    void *grad;              /* n values of grad_format; only read, unless opt.zero_grad                          */
    kopt_format grad_format; /* independent of the weights' format                                                */
    size_t n;
    void *state;             /* kopt_state_size() bytes, any alignment; may be NULL if that is 0                  */
    size_t state_size;
    void *copy;              /* NULL, or n values of copy_format, refreshed with the new weights by every step    */
    kopt_format copy_format; /* fp32 weights + 16-bit copy = classic mixed precision                              */
    uint32_t id;             /* tells this tensor's random bits from another's: give each tensor of a model its own,
                                before kopt_state_init(): see kopt_number_tensors()                               */
    uint64_t first_index;    /* global index of element 0 when this is a shard of a larger tensor; below 2^63.
                                With 8-bit moments a shard gives the bits of the whole if it is a multiple of 256 */
    float rate_scale;        /* this tensor's learning rate, decay included, is this times the optimizer's; 0 (the
                                default) is 1. To freeze a tensor, leave it out of the list                       */
    float stable_scale;      /* StableAdamW in ranges or shards: kopt_stable_scale() of the whole tensor in this step;
                                0 (the default): a step over all n elements measures it by itself               */
    struct kopt_counts *counts; /* NULL, or what a step adds its counts to (slower; one per thread)               */
} kopt_tensor;

/* Stall telemetry: of the weights that a step wanted to move (update != 0), how many did not. */
typedef struct kopt_counts {
    uint64_t wanted; /* weights with update != 0                                                                  */
    uint64_t still;  /* ... whose visible value did not move: normal with KAHAN, COMPACT and EXACT               */
    uint64_t stuck;  /* ... and whose residual did not move either: nothing of the update was kept               */
} kopt_counts;

/* The tensor with id 0, first_index 0, rate_scale 1, no copy and no counts. */
KOPT_API_ kopt_tensor kopt_tensor_of(void *weight, void *grad, kopt_format grad_format, size_t n, void *state,
                                     size_t state_size);

/* Sets the ids of a list to first_id, first_id + 1, and so on: once, before kopt_state_init(), as a state block belongs
   to an id. With several lists (parameter groups) the next first_id is first_id + count: two tensors with one id and
   one seed draw the same random bits. Refused if an id would be above 2^32 - 1. Shards of one tensor keep the tensor's
   id. */
KOPT_API_ kopt_result kopt_number_tensors(kopt_tensor *tensors, size_t count, uint32_t first_id);

/* Bytes of one tensor's state block: 64 + n * (residual + moments), each array rounded up to 4 bytes; 0 if there is
   nothing to keep. 0 also for an invalid optimizer or an n too large for the address space. */
KOPT_API_ size_t kopt_state_size(const kopt_optimizer *opt, size_t n);

/* The same as a constant, for static arrays. bytes = residual + moments per weight: bf16 AdamW needs 6 with KAHAN or
   EXACT, 5 with COMPACT, 4 with STOCHASTIC or NEAREST. */
#define KOPT_STATE_BYTES(n, bytes) (64 + KOPT_CAST_(size_t, n) * (bytes) + 12)

/* Makes a fresh state block. If weights is not NULL, t->weight is set to those n fp32 values and the residual (KAHAN,
   COMPACT, EXACT) to what did not fit; if it is NULL, t->weight stays and the residual is zero. Then t->copy, if there
   is one, is filled from t->weight. weights must not overlap the tensor's memory, but may be t->copy itself, in
   fp32. */
KOPT_API_ kopt_result kopt_state_init(const kopt_optimizer *opt, const kopt_tensor *t, const float *weights);

/* Reads the weights (with their residual), the first or the second moment as n fp32 values, or writes them: the way
   from and to fp32 checkpoints and other libraries' state. out and in overlap nothing of the tensor. Writing rounds to
   nearest; written weights are also where Ranger's slow weights start, and t->copy is refreshed from them. Set weights
   with it in the middle of a run, too (pruning, averaging): stored past it they keep the residual of the value that was
   there before, and with COMPACT or EXACT a zero with such a residual is a NaN. */
typedef enum kopt_slot {
    KOPT_WEIGHT = 0, KOPT_FIRST_MOMENT = 1, KOPT_SECOND_MOMENT = 2,
    KOPT_THIRD_MOMENT = 3, /* AMSGrad's largest second moment; Adan's average of gradient differences */
    KOPT_FOURTH_MOMENT = 4 /* Adan's previous gradient                                                */
} kopt_slot;
KOPT_API_ kopt_result kopt_state_read(const kopt_optimizer *opt, const kopt_tensor *t, kopt_slot slot, float *out);
KOPT_API_ kopt_result kopt_state_write(const kopt_optimizer *opt, const kopt_tensor *t, kopt_slot slot,
                                       const float *in);

/* Writes a moment of any format from the 8-bit states of bitsandbytes: n codes of its dynamic map, that without signs
   for a mean of squares, and the largest magnitude of each 256 values. Nothing overlaps the tensor. KOPT_WEIGHT:
   KOPT_ERROR_OPTION. */
KOPT_API_ kopt_result kopt_state_write_codes(const kopt_optimizer *opt, const kopt_tensor *t, kopt_slot slot,
                                             const unsigned char *codes, const float *scales);

/* Before a block is saved: stores opt->step and opt->seed in it, turns it to little-endian and adds a checksum
   (CRC-32). The bytes can then go to a file; a step on a sealed block is refused. The weights are saved by you. */
KOPT_API_ kopt_result kopt_state_seal(const kopt_optimizer *opt, const kopt_tensor *t);

/* After it was loaded, or right after saving: checks a sealed block against opt and t, makes it ready for steps, sets
   opt->step and opt->seed from it, and refreshes t->copy: load the weights first. A block that is truncated, damaged,
   another tensor's, or made with another rule (StableAdamW, Nesterov, AMSGrad are others), decay mode, format or
   rounding is refused. Numbers (rates, betas, weight decay) may differ: see kopt_state_inspect(). Where there is no
   block (n == 0, or kopt_state_size() == 0) seal and open save and check nothing: save opt->step and opt->seed
   yourself. */
KOPT_API_ kopt_result kopt_state_open(kopt_optimizer *opt, const kopt_tensor *t);

/* What a block, sealed or open, says of itself: n, id, first_index, and of its optimizer the rule, formats, roundings,
   decay mode, seed, step, and as fp32 numbers lr, weight_decay, beta1 and beta2 (SGD: momentum and dampening) of the
   last kopt_state_init() or kopt_state_seal(); everything else is as the rule's constructor has it. A block of version
   0.1 holds no such numbers (they become 0) and neither decay mode nor roundings of the state. Either pointer may be
   NULL. The checksum is not checked: kopt_state_open() does that. */
KOPT_API_ kopt_result kopt_state_inspect(const void *state, size_t state_size, kopt_optimizer *opt, kopt_tensor *t);

/* ---- STEP ------------------------------------------------------------------------------------------------------- */

/* One optimizer step over a list of tensors: begin, check all, run all. If anything is refused, nothing is written and
   the step is not counted. The ids of a list increase (shards of one tensor: the same id, and each begins where the one
   before it ends, or later), so that no two tensors draw the same random bits. Tensors of one list share no memory, but
   may read one gradient: a weight that the model uses twice is listed once, with the sum of its gradients. Refused
   where O(1) per tensor can show it: neighbours in the list that overlap, and one state block for two tensors. Tensors
   without elements do not count. */
KOPT_API_ kopt_result kopt_optimizer_step(kopt_optimizer *opt, const kopt_tensor *tensors, size_t count);

/* The same in pieces, for threads, frames and shards. kopt_step_begin() counts the step and computes its scalars into
   a plain value; after that, each element of each tensor must be stepped exactly once, in any order and slicing, by
   any threads (ranges of one tensor at the same time are fine). To skip a step (overflow), do not begin it. */
typedef struct kopt_step {
    kopt_rule rule;
    kopt_format weight_format, moment_format;
    kopt_rounding rounding, moment_rounding, compensation_rounding;
    int nesterov, zero_grad;
    int moment_count;                    /* arrays of moments, 0 to 4                                             */
    int moments_only;
    int unrectified;                     /* RAdam, Ranger: too few steps for the variance; the update is rate * m */
    int sync;                            /* Ranger: this step ends in Lookahead                                   */
    int stable;                          /* StableAdamW                                                           */
    float grad_scale;                    /* grad_scale * clip, negative to maximize                               */
    float l2, weight_decay;              /* coefficients of the weight in the gradient, in the update             */
    float beta1, gain1;                  /* an average becomes beta * average + gain * x, with the betas as the   */
    float beta2, gain2;                  /* rule's paper numbers them, and gain = 1 - beta. SGD: beta1 is the     */
    float beta3, gain3;                  /* momentum, gain1 1 - dampening; in the first step 0 and 1              */
    float extrapolation;                 /* Nesterov's: times the first moment (SGD) or the change of the gradient
                                            (Adan), added to the gradient                                         */
    float third_scale;                   /* Adan: of the third moment in the direction                            */
    float rate;                          /* of the direction: lr, with the corrections that the rule has          */
    float root_scale;                    /* 1 / sqrt(1 - beta2^t); 8-bit moments after the first step: times 1.003 */
    float eps;
    uint32_t step;
    uint64_t seed;
    float sharpness;                     /* Lion: 0: sign. Adam-atan2: its rate is lr * a, its root_scale times b */
    float slow_scale;                    /* Ranger: 1 - lookahead_rate: of the slow weight in a sync              */
    const struct kopt_vmath *vmath;
} kopt_step;
KOPT_API_ kopt_result kopt_step_begin(kopt_optimizer *opt, kopt_step *step);
KOPT_API_ kopt_result kopt_step_run(const kopt_step *step, const kopt_tensor *t);
/* Elements [begin, end). If the rule keeps 8-bit moments a range is of whole blocks: begin is a multiple of 256, end
   too or n. */
KOPT_API_ kopt_result kopt_step_range(const kopt_step *step, const kopt_tensor *t, size_t begin, size_t end);

/* ---- NORM AND CLIPPING ------------------------------------------------------------------------------------------- */

/* What stands between the backward pass and the step. docs/training-loop.md has examples of ten lines each,
   docs/numerics.md (sections 9 to 13) the formulas. */

/* One pass over the gradients finds what is not finite and adds up the squares, exactly: as one long
   integer that is never rounded. So the order does not matter, nor the slicing, the threads, the ranks, the machine.
   Begin with all words zero; give each thread its own and merge them. Over ranks, add the 21 words of all kopt_norm as
   uint64_t (MPI_SUM, ncclSum): up to 2^32 of them may be summed before a kopt_norm_merge() or a reading. */
typedef struct kopt_norm {
    uint64_t digit[20]; /* sum of squares * 2^298 = the sum of digit[i] * 2^(32 * i)                              */
    uint64_t nonfinite; /* how many values were infinite or NaN; they are not in the sum                          */
} kopt_norm;
KOPT_API_ kopt_result kopt_norm_add(kopt_norm *norm, const void *x, kopt_format format, size_t n);
KOPT_API_ kopt_result kopt_norm_merge(kopt_norm *norm, const kopt_norm *other);

/* The gradients of a list of tensors. */
KOPT_API_ kopt_result kopt_norm_add_grads(kopt_norm *norm, const kopt_tensor *tensors, size_t count);

/* The square root of the sum, rounded once (nearest even); infinity if nonfinite is not 0. */
KOPT_API_ double kopt_norm_value(const kopt_norm *norm);

/* The coefficient of torch.nn.utils.clip_grad_norm_ for opt.clip, so that the clipping costs no pass of its own:
   min(1, max_norm / (norm * |grad_scale| + 1e-6)), with grad_scale that of the optimizer. 0 if nonfinite is not 0: skip
   that step. 1, no clipping, unless max_norm is a positive number. */
KOPT_API_ double kopt_clip_coefficient(const kopt_norm *norm, double max_norm, double grad_scale);

/* StableAdamW over ranges, threads or ranks (kopt_step_run and kopt_optimizer_step do this by themselves;
   kopt_step_range does not): before any element of the tensor is stepped, add all its ranges to a kopt_norm, merge, and
   set t->rate_scale = kopt_stable_scale(&norm, n of the whole tensor). Exact, so the same for any slicing. */
KOPT_API_ kopt_result kopt_stable_measure(const kopt_step *step, const kopt_tensor *t, size_t begin, size_t end,
                                        kopt_norm *norm);
KOPT_API_ float kopt_stable_scale(const kopt_norm *norm, uint64_t n);

/* torch.nn.utils.clip_grad_value_: no |x| above limit, which is rounded towards zero to the format; infinity becomes
   the limit, NaN stays. With a loss scale, limit is in units of the scaled gradient. */
KOPT_API_ kopt_result kopt_clip_value(void *x, kopt_format format, size_t n, double limit);

/* ---- LOSS SCALING ------------------------------------------------------------------------------------------------ */

/* torch.amp.GradScaler: multiply the loss by scale before the backward pass, so that small gradients do
   not underflow in fp16; a step whose gradients overflow is skipped and the scale halved. Set any field. The gradient
   is divided by the scale before it enters the moments: fp16 moments lose what the scale has saved. In 1000 steps they
   move a weight by 0.81 of its way under |g| = 1e-7, by 0.18 under 1e-8. Keep moments in bf16 (the default) or fp32. */
typedef struct kopt_scaler {
    float scale;         /* of the loss; default 65536                                                            */
    float minimum;       /* the scale is not lowered below it; default 0: none                                    */
    double growth;       /* > 1; after `interval` steps without overflow the scale is multiplied by it; default 2 */
    double backoff;      /* in (0, 1); after an overflow; default 0.5                                             */
    uint32_t interval;   /* > 0; default 2000                                                                     */
    uint32_t hysteresis; /* > 0; the scale is lowered from this many overflows in a row on (apex); default 1      */
    uint32_t good, bad;  /* steps without overflow since the last change; overflows in a row. 0 for a new run     */
} kopt_scaler;
KOPT_API_ kopt_scaler kopt_grad_scaler(void);

/* After each step, taken or skipped: found_inf is norm.nonfinite != 0, summed over all ranks. kopt_scaler_begin() and
   kopt_scaler_step() call it themselves. */
KOPT_API_ kopt_result kopt_scaler_update(kopt_scaler *scaler, int found_inf);

/* kopt_step_begin() under a loss scale, for ranges, threads, frames and ranks: norm is that of all gradients that this
   step reads, over all ranks. One call, so that nothing can be in the wrong order: begins *step with the gradients
   multiplied by opt->grad_scale / scaler->scale and clipped to max_norm (0: no clipping), then updates the scale.
   opt->clip is not read, and of opt only step is written. If a gradient is not finite, the step is skipped: opt is as
   before, *skipped (which may be NULL) is 1, and *step is one that every function refuses with KOPT_ERROR_STEP. If
   anything is refused, *step is as before. */
KOPT_API_ kopt_result kopt_scaler_begin(kopt_scaler *scaler, kopt_optimizer *opt, const kopt_norm *norm,
                                        double max_norm, kopt_step *step, int *skipped);

/* What kopt_scaler_step() calls, each with user; either may be NULL. */
typedef struct kopt_closure {
    void (*evaluate)(void *user, float scale);    /* forward, and backward of scale * loss, into the gradients    */
    void (*reduce)(void *user, kopt_norm *norm);  /* sums the 21 words of norm over all ranks                     */
    void *user;
} kopt_closure;

/* One step under a loss scale: evaluate, check and norm in one pass, reduce, clip to max_norm (0: no clipping), step or
   skip, update the scale. The gradients are multiplied by opt->grad_scale / scaler->scale; opt->clip is not read. A
   skipped step changes nothing but the scaler: no weight, no state, no gradient, no step count; *skipped, which may be
   NULL, tells. closure may be NULL: the gradients are there and there is one rank. Its functions may leave by longjmp
   or an exception: then opt and the scaler are as before. */
KOPT_API_ kopt_result kopt_scaler_step(kopt_scaler *scaler, kopt_optimizer *opt, const kopt_tensor *tensors, size_t count,
                                       double max_norm, const kopt_closure *closure, int *skipped);

/* ---- GRADIENT ACCUMULATION --------------------------------------------------------------------------------------- */

/* Sums of gradients over micro-batches, with the five roundings of weights: with KAHAN a bf16 sum of thousands, its
   residual included, is right to 1e-4, and what a step reads of it is that rounded to bf16; plain bf16 stalls. All
   memory is the caller's. When the sum is complete, it is the gradient of a step: t.grad = a.sum, t.grad_format =
   a.format (and opt.grad_scale = 1.0 / a.count for the mean); then set a.count to 0. Slices: one accumulator each, with
   first_index. */
typedef struct kopt_accumulator {
    void *sum;           /* n values of format; what was in it before the first addition is not read              */
    void *residual;      /* KAHAN and EXACT: 2 bytes each, COMPACT: 1 (KOPT_F32: not used); otherwise NULL        */
    kopt_format format;
    kopt_rounding rounding;              /* of the sum                                                            */
    kopt_rounding compensation_rounding; /* KOPT_STOCHASTIC (default) or KOPT_NEAREST, as for weights             */
    size_t n;
    uint32_t count;      /* micro-batches in the sum; set it to 0 to begin a new one                              */
    uint32_t step;       /* additions so far, never set back: its random bits are (seed, step, id, stream 2)      */
    uint32_t id;
    uint64_t seed, first_index;
    uint32_t made_;      /* set by kopt_accumulator_of(); one that it did not make is refused                     */
} kopt_accumulator;

/* In format, with KAHAN if there is a residual (2 bytes for each value), else STOCHASTIC; seed, id, first_index 0. */
KOPT_API_ kopt_accumulator kopt_accumulator_of(void *sum, kopt_format format, void *residual, size_t n);

/* sum += grad * scale, and counts it. */
KOPT_API_ kopt_result kopt_accumulate(kopt_accumulator *a, const void *grad, kopt_format grad_format, double scale);

/* The sum with its residual, as n fp32 values. */
KOPT_API_ kopt_result kopt_accumulator_read(const kopt_accumulator *a, float *out);

/* ---- GRADIENT COMPRESSION ---------------------------------------------------------------------------------------- */

/* Compressed gradients for the way from rank to rank: 2 bytes a value (BF16, FP16), 1.016 (Q8) or 0.141 (SIGN). With a
   residual, what the code loses is kept beside the gradient and added to the next one (error feedback: Seide et al.
   2014, Karimireddy et al. 2019), so that all of every gradient arrives, and one bit trains as well as 32. Without one,
   use STOCHASTIC, which is right in the mean and noisy; NEAREST without a residual is biased and may not train at all.
   A gradient that is not finite (kopt_norm tells) is better skipped than compressed: its value or, in Q8 and SIGN, its
   block of 256 arrives as NaN, or as infinity in BF16 and FP16, and its residuals become zero. */
typedef struct kopt_compressor {
    kopt_format code;        /* KOPT_BF16, KOPT_FP16, KOPT_Q8 or KOPT_SIGN                                        */
    kopt_rounding rounding;  /* KOPT_NEAREST or KOPT_STOCHASTIC; SIGN: the signs with the mean of |x|, or unbiased
                                random signs with the largest |x|, which no residual can catch up with: refused   */
    void *residual;          /* NULL: no error feedback. n values of residual_format, not read before step is 1   */
    kopt_format residual_format;      /* KOPT_F32, KOPT_BF16 or KOPT_FP16                                         */
    kopt_rounding residual_rounding;  /* of 16-bit residuals: KOPT_STOCHASTIC (default) or KOPT_NEAREST           */
    size_t n;
    uint32_t step;           /* gradients compressed so far; its random bits are (seed, step, id, streams 3, 4)   */
    uint32_t id;
    uint64_t seed;
    uint64_t first_index;    /* of a slice. In Q8 and SIGN a multiple of 256: so the code of the slices, each with
                                a compressor of its own, is the code of the whole                                 */
    uint32_t made_;          /* set by kopt_compressor_of(); one that it did not make is refused                  */
} kopt_compressor;

/* With a bf16 residual NEAREST, with none STOCHASTIC; seed, id, first_index 0. */
KOPT_API_ kopt_compressor kopt_compressor_of(kopt_format code, void *residual, size_t n);

/* Bytes of n compressed values, and the place of element n if that is a multiple of 256. 0: no such code, or n too
   large. */
KOPT_API_ size_t kopt_compressed_size(kopt_format code, size_t n);

/* out = the code of gradient + residual, residual = what it lacks; counts a step. BF16 and FP16 are n numbers like any
   others; Q8 and SIGN are bytes that are the same on every machine. */
KOPT_API_ kopt_result kopt_compress(kopt_compressor *c, void *out, size_t out_size, const void *grad,
                                    kopt_format grad_format);

/* sum += decoded * scale, rounded to nearest even. Of one rank after the other, into fp32 zeros: the sum over ranks. */
KOPT_API_ kopt_result kopt_decompress_add(void *sum, kopt_format format, const void *in, size_t in_size, kopt_format code,
                                          size_t n, double scale);

/* ---- REDUCTION --------------------------------------------------------------------------------------------------- */

/* Sums over shards in a fixed order: out[i] = (shards[0][i] + shards[1][i] + ... ) * scale, each + and * in fp32, rounded to
   nearest even once at the end; scale 1 / count for the mean. The same bits for any slicing. count is at least 1; out
   may be one of the shards, if the formats are equal. */
KOPT_API_ kopt_result kopt_reduce(void *out, kopt_format out_format, const void *const *shards, size_t count,
                                  kopt_format format, size_t n, double scale);

/* ---- CONVERSIONS OF ARRAYS --------------------------------------------------------------------------------------- */

/* Any format to any format, any alignment, no overlap. */

/* Round to nearest even, right for every input: NaN stays NaN, subnormals are kept, overflow goes to infinity. */
KOPT_API_ kopt_result kopt_convert(void *dst, kopt_format dst_format, const void *src, kopt_format src_format,
                                   size_t n);

/* Stochastic rounding with the random bits of (seed, step, id, stream 1, first_index + i). */
KOPT_API_ kopt_result kopt_convert_stochastic(void *dst, kopt_format dst_format, const void *src,
                                              kopt_format src_format, size_t n, kopt_random_key key);

/* 1 if all n values are finite (neither NaN nor infinite), else 0; also 0 for bad input. The check before a step that
   may be skipped. */
KOPT_API_ int kopt_all_finite(const void *x, kopt_format format, size_t n);

#ifdef KAHAN_OPT_VMATH
/* ---- VECTOR MATHEMATICS ------------------------------------------------------------------------------------------ */

/* With KAHAN_OPT_VMATH: what a forward and a backward pass need besides + - * /. docs/vmath.md has the formulas, the
   measured errors and the origin of the coefficients. */

/* Functions of arrays of fp32, by whoever computes them best. Any n, any alignment of 4; out may be an input (in
   place). They are called in the IEEE environment of contract 1 and have to return: a longjmp or an exception would
   leave it to the caller. Make your own from SVML, vForce, libmvec ...; an entry that is NULL is served by the
   built-in. In a step (opt.vmath) atan2 and tanh are called in place for up to 256 elements, in no particular order, on
   the thread of the step. */
typedef struct kopt_vmath {
    const char *name;
    void (*exp)(float *out, const float *x, size_t n);
    void (*log)(float *out, const float *x, size_t n);
    void (*tanh)(float *out, const float *x, size_t n);
    void (*erf)(float *out, const float *x, size_t n);
    void (*erfc)(float *out, const float *x, size_t n);
    void (*atan2)(float *out, const float *y, const float *x, size_t n);
    void (*sincospi)(float *sine, float *cosine, const float *x, size_t n); /* of pi * x */
} kopt_vmath;

/* The built-in: plain + - * /, so the same bits on every machine. exp, log and tanh within 1 ulp, all within 4. */
KOPT_API_ const kopt_vmath *kopt_vmath_builtin(void);

/* SLEEF, in a build with KAHAN_OPT_SLEEF and -lsleef: within 1.1 ulp (erfc 1.5), in the width of kopt_isa_current()
   (SSE2: its 128-bit form). NULL where it cannot be had: another build, no FMA, KOPT_ISA_SCALAR, or neither x86-64 with
   the System V calling convention nor AArch64, by gcc or clang. fp32 results have other bits than the built-in's. */
KOPT_API_ const kopt_vmath *kopt_vmath_sleef(void);

/* Who computes: "builtin avx2", "sleef avx512", or the name of your table. NULL, here and below, is the default: SLEEF
   if kopt_vmath_sleef() has it, else the built-in. */
KOPT_API_ const char *kopt_vmath_name(const kopt_vmath *vmath);

/* out[i] = f(x[i]) in the IEEE environment. An array may be in place of an input, or apart from it, but not partly over
   it. NaN gives NaN, subnormals are ordinary numbers, and
       exp     +inf from 88.73 on, 0 below -103.98, gradual between       log     log(0) = -inf, NaN below 0
       tanh    +-1 at infinity; the sign of zero stays                    erf     the same
       erfc    2 at -inf, 0 from 10.06 on                                 atan2   all quadrants, zeros and infinities as C99
       sincospi   exact at multiples of 1/2; a zero sine has the sign of x (SLEEF: any); NaN at infinity */
KOPT_API_ kopt_result kopt_vmath_exp(const kopt_vmath *vmath, float *out, const float *x, size_t n);
KOPT_API_ kopt_result kopt_vmath_log(const kopt_vmath *vmath, float *out, const float *x, size_t n);
KOPT_API_ kopt_result kopt_vmath_tanh(const kopt_vmath *vmath, float *out, const float *x, size_t n);
KOPT_API_ kopt_result kopt_vmath_erf(const kopt_vmath *vmath, float *out, const float *x, size_t n);
KOPT_API_ kopt_result kopt_vmath_erfc(const kopt_vmath *vmath, float *out, const float *x, size_t n);
KOPT_API_ kopt_result kopt_vmath_atan2(const kopt_vmath *vmath, float *out, const float *y, const float *x, size_t n);
KOPT_API_ kopt_result kopt_vmath_sincospi(const kopt_vmath *vmath, float *sine, float *cosine, const float *x, size_t n);

/* Functions from 16 bits to the same 16 bits, with s(x) = 1 / (1 + e^-x), P the normal distribution function and
   g(x) = 2 sqrt(2 / pi) (x + 0.044715 x^3). */
typedef enum kopt_function {
    KOPT_EXP = 0,
    KOPT_LOG = 1,
    KOPT_TANH = 2,
    KOPT_SIGMOID = 3,         /* s(x)                                                                            */
    KOPT_SILU = 4,            /* x s(x)                                                                          */
    KOPT_GELU = 5,            /* x P(x) = x (1 + erf(x / sqrt(2))) / 2                                           */
    KOPT_GELU_TANH = 6,       /* x s(g(x)) = x (1 + tanh(g(x) / 2)) / 2                                          */
    KOPT_SOFTPLUS = 7,        /* log(1 + e^x)                                                                    */
    KOPT_TANH_SLOPE = 8,      /* 1 - tanh(x)^2                                                                   */
    KOPT_SIGMOID_SLOPE = 9,   /* s(x) s(-x); the slope of KOPT_SOFTPLUS is KOPT_SIGMOID                          */
    KOPT_SILU_SLOPE = 10,     /* s(x) + x s(x) s(-x)                                                             */
    KOPT_GELU_SLOPE = 11,     /* P(x) + x P'(x)                                                                  */
    KOPT_GELU_TANH_SLOPE = 12 /* s(g(x)) + x s(g(x)) s(-g(x)) g'(x)                                              */
} kopt_function;

/* out[i] = the bf16 or fp16 (format) nearest to the true f(x[i]), ties to even, for every one of the 65,536 inputs:
   correctly rounded, so the same bits on every machine and with any table whose exp, log and tanh are within 1 ulp.
   Infinities give the limit (a zero keeps the sign of the side it is approached from), subnormals are kept on both
   sides, NaN and log below 0 give the canonical NaN. out may be x; partial overlap is refused. */
KOPT_API_ kopt_result kopt_map(const kopt_vmath *vmath, kopt_function f, void *out, const void *x, kopt_format format,
                               size_t n);

/* dx[i] = dy[i] * f'(x[i]) for f up to KOPT_SOFTPLUS, but for KOPT_LOG: the slope as of kopt_map(), times dy exactly,
   rounded to nearest even. dx may be dy or x. */
KOPT_API_ kopt_result kopt_map_backward(const kopt_vmath *vmath, kopt_function f, void *dx, const void *dy, const void *x,
                                        kopt_format format, size_t n);

/* ---- SOFTMAX AND CROSS ENTROPY ----------------------------------------------------------------------------------- */

/* Row r is the `columns` values from element r * stride on, stride >= columns; what is between rows is neither
   read nor written. out may be x; otherwise they are apart, from the first row to the last. Any format; arithmetic is
   fp32, sums are compensated in a fixed order, so that the length of a row costs no accuracy, and with the built-in the
   bits are the same everywhere. -inf has probability 0. A row with +inf or NaN, or all -inf, has no probabilities: all
   of it becomes NaN. */

/* out = e^x / sum of e^x, row by row. */
KOPT_API_ kopt_result kopt_softmax(const kopt_vmath *vmath, void *out, const void *x, kopt_format format, size_t rows,
                                   size_t columns, size_t stride);

/* Softmax and cross entropy, forward and backward: loss[r] = log(sum of e^x) - x[target[r]], and the gradient
   scale * (softmax(x) - onehot(target)), rounded once to format; scale is for the mean and the loss scale, e.g.
   1024.0 / rows. A negative target: the row is ignored, not read, its loss and gradient are 0. One from columns on is
   refused. loss or grad may be NULL. grad may be logits. The loss is +inf where the target's logit is -inf. */
KOPT_API_ kopt_result kopt_cross_entropy(const kopt_vmath *vmath, float *loss, void *grad, const void *logits,
                                         kopt_format format, const int32_t *target, size_t rows, size_t columns,
                                         size_t stride, double scale);

/* ---- RANDOM NUMBERS ---------------------------------------------------------------------------------------------- */

/* Each is a pure function of (seed, step, id, first_index + i), for any slicing and whatever table is in use;
   stream 5 (of kopt_langevin_step: 6). Rounded to nearest even. first_index + n is at most 2^54. */

/* mean + deviation * N(0, 1), up to 6.7 deviations (Box and Muller 1958, of all 32 bits of each word). */
KOPT_API_ kopt_result kopt_normal(void *out, kopt_format format, size_t n, double mean, double deviation, kopt_random_key key);

/* The same, drawn again until it is at most limit (>= 0.5) deviations from the mean; 2 is usual. */
KOPT_API_ kopt_result kopt_truncated_normal(void *out, kopt_format format, size_t n, double mean, double deviation,
                                            double limit, kopt_random_key key);

/* Between low and high: the middle + the half * (2^24 numbers, symmetric about 0, none of them 0 or +-1). */
KOPT_API_ kopt_result kopt_uniform(void *out, kopt_format format, size_t n, double low, double high, kopt_random_key key);

/* Initial weights with mean 0 and variance 2 / fan_in (He et al. 2015, for ReLU and its kin) or 2 / (fan_in + fan_out)
   (Glorot & Bengio 2010). Step 0. With a residual, draw KOPT_F32 for kopt_state_init(). */
typedef enum kopt_distribution {
    KOPT_NORMAL = 0,
    KOPT_UNIFORM = 1,         /* up to sqrt(3) deviations                                        */
    KOPT_TRUNCATED_NORMAL = 2 /* at 2 deviations, which are widened so that the variance is that */
} kopt_distribution;
KOPT_API_ kopt_result kopt_init_he(void *out, kopt_format format, size_t n, kopt_distribution distribution,
                                   size_t fan_in, kopt_random_key key);
KOPT_API_ kopt_result kopt_init_xavier(void *out, kopt_format format, size_t n, kopt_distribution distribution,
                                       size_t fan_in, size_t fan_out, kopt_random_key key);

/* ---- LANGEVIN DYNAMICS ------------------------------------------------------------------------------------------- */

/* Stochastic gradient Langevin DYNAMICS (Welling & Teh 2011): w -= lr * g, by SGD without momentum, with its decay and
   roundings, and w += sqrt(2 * lr * temperature) * N(0, 1). With g the gradient of -log of the posterior, whole, not a
   mean (grad_scale = the number of data), lr = epsilon / 2 and temperature 1 it is theirs. Temperature 0 is SGD, bit
   for bit. In bf16, fp16 use KAHAN or EXACT, or a small noise is lost. No claim of differential privacy. Like
   kopt_optimizer_step and kopt_step_range; the bits are the same for any slicing. Momentum and other rules: refused. */
KOPT_API_ kopt_result kopt_langevin_step(kopt_optimizer *opt, const kopt_tensor *tensors, size_t count, double temperature);
KOPT_API_ kopt_result kopt_langevin_range(const kopt_step *step, const kopt_tensor *t, double temperature, size_t begin,
                                          size_t end);
#endif

/* clang-format on */

#endif /* KAHAN_OPT_H */

/* ================================================================================================================== */
/* IMPLEMENTATION                                                                                                     */
/* ================================================================================================================== */
#if defined(KAHAN_OPT_IMPLEMENTATION) && !defined(KOPT_IMPLEMENTED_)
#define KOPT_IMPLEMENTED_
#define KOPT_IMPLEMENTING_ /* undefined at the end of the implementation */

#ifndef KAHAN_OPT_SELF
#if defined(__INCLUDE_LEVEL__) && __INCLUDE_LEVEL__ == 0
#error "kahan_opt.h is pasted into another file, or compiled by itself: include it (CONFIGURATION: KAHAN_OPT_SELF)"
#undef KOPT_IMPLEMENTING_
#define KOPT_READ_ 0 /* suppresses the error about a file that did not read itself */
#endif
#ifdef __FILE_NAME__
#define KAHAN_OPT_SELF __FILE_NAME__
#else
#define KAHAN_OPT_SELF "kahan_opt.h"
#endif
#endif

/* ---- COMPILER AND TARGET ----------------------------------------------------------------------------------------- */

/* Selects the vocabularies of this build. tcc, nvcc and unknown compilers get the scalar one only. */
#if defined(KAHAN_OPT_NO_SIMD) || defined(__TINYC__) || defined(__CUDACC__)
#elif (defined(KOPT_GNU_) && (defined(__x86_64__) || defined(__i386__))) || defined(_M_X64)
#define KOPT_X86_ 1
#elif defined(__aarch64__) && defined(__ARM_NEON) && !defined(__AARCH64EB__)
#define KOPT_NEON_ 1
#endif

#if defined(KOPT_X86_)
#if defined(KOPT_GCC_) && !defined(_IMMINTRIN_H_INCLUDED)
/* Without this macro gcc's headers refuse to be included one by one. <immintrin.h> includes them all, mostly for
   AVX-512, which takes an eighth of the compile time of this file. */
#define _IMMINTRIN_H_INCLUDED
#if !__STDC_HOSTED__ && !defined(_MM_MALLOC_H_INCLUDED)
#define _MM_MALLOC_H_INCLUDED /* keeps them from including stdlib.h, which bare metal and UEFI do not have */
#include <smmintrin.h>
#undef _MM_MALLOC_H_INCLUDED
#endif
#include <smmintrin.h>
#include <avxintrin.h>
#include <avx2intrin.h>
#include <f16cintrin.h>
#undef _IMMINTRIN_H_INCLUDED
#else
#include <immintrin.h>
#endif
#ifndef KOPT_GNU_
#include <intrin.h>
#elif defined(__clang__) && (defined(_MSC_VER) || defined(__SCE__)) /* here <immintrin.h> leaves these out */
#include <smmintrin.h>
#include <avxintrin.h>
#include <avx2intrin.h>
#include <f16cintrin.h>
#include <avx512fintrin.h>
#include <avx512bwintrin.h>
#include <avx512dqintrin.h>
#include <avx512vlintrin.h>
#include <avx512vlbwintrin.h>
#include <avx512vldqintrin.h>
#endif
#elif defined(KOPT_NEON_)
#include <arm_neon.h>
#endif

#ifdef KOPT_GNU_
#define KOPT_NOINLINE_ __attribute__((__noinline__))
/* Not forced at clang -O0, which gives every value of every inlined call its own stack slot: 1 MB of stack. */
#if defined(__clang__) && !defined(__OPTIMIZE__)
#define KOPT_FORCE_INLINE_ KOPT_INLINED_
#else
#define KOPT_FORCE_INLINE_ KOPT_INLINED_ __attribute__((__always_inline__))
#endif
#define KOPT_TARGET_(isa) __attribute__((__target__(isa)))
#elif defined(_MSC_VER)
#define KOPT_NOINLINE_ __declspec(noinline)
#define KOPT_FORCE_INLINE_ __forceinline
#define KOPT_TARGET_(isa)
#else
#define KOPT_NOINLINE_
#define KOPT_FORCE_INLINE_ KOPT_INLINED_
#define KOPT_TARGET_(isa)
#endif

#if defined(KOPT_GNU_) && !(defined(__ARM_ARCH_PROFILE) && __ARM_ARCH_PROFILE == 'M')
#define KOPT_PREFETCH_(p) __builtin_prefetch(p)
#elif defined(_M_X64)
#define KOPT_PREFETCH_(p) _mm_prefetch(KOPT_CONST_POINTER_(const char *, p), _MM_HINT_T0)
#else
#define KOPT_PREFETCH_(p) ((void)(p))
#endif

/* Pointer casts go through void *, so that no compiler warns about alignment: loads and stores of a vocabulary need
   none. */
#define KOPT_POINTER_(type, p) KOPT_CAST_(type, KOPT_CAST_(void *, p))
#define KOPT_CONST_POINTER_(type, p) KOPT_CAST_(type, KOPT_CAST_(const void *, p))
#ifdef __cplusplus
#define KOPT_ADDRESS_(p) reinterpret_cast<uintptr_t>(p)
#define KOPT_VECTOR_CAST_(type, vector) reinterpret_cast<type>(vector)
#else
#define KOPT_ADDRESS_(p) ((uintptr_t)(p))
#define KOPT_VECTOR_CAST_(type, vector) ((type)(vector))
#endif

#ifdef KOPT_GCC_
#if !defined(__OPTIMIZE__) && !defined(__CUDACC__)
#pragma GCC push_options
#pragma GCC optimize("O2") /* at -O0 vector code is 8-15x slower */
#define KOPT_OPTIMIZED_HERE_
#endif
#elif defined(_MSC_VER) && !defined(KOPT_GNU_)
#pragma float_control(precise, on, push)
#pragma fp_contract(off)
#endif

/* ---- INTERNAL TYPES ---------------------------------------------------------------------------------------------- */

typedef unsigned char kopt_byte_;

enum {
    KOPT_HEADER_ = 64,       /* bytes of a state block before its arrays */
    KOPT_BLOCK_VERSION_ = 2, /* of the layout of a state block */
    KOPT_RANDOM_STEP_ = 0,   /* from here on: streams of random bits, section 7 */
    KOPT_RANDOM_CONVERT_ = 1,
    KOPT_RANDOM_ACCUMULATE_ = 2,
    KOPT_RANDOM_COMPRESS_ = 3,
    KOPT_RANDOM_RESIDUAL_ = 4,
    KOPT_RANDOM_NOISE_ = 5,
    KOPT_RANDOM_LANGEVIN_ = 6
};

/* The scale of a block of 8-bit codes, from its largest magnitude, both as fp32 words. 0 if that is subnormal, NaN
   (7FC00000) if it is infinite or NaN: then the whole block is NaN. */
KOPT_INLINE_ uint32_t kopt_scale_(uint32_t largest) {
    const uint32_t infinity = 0x7F800000u, bounded = largest < infinity ? largest : infinity;
    /* infinity + (1 << 22) is 7FC00000. Not a conditional expression with that constant: gcc 12 -O1 for Thumb-2 loses
       the upper half of it. */
    return bounded < 0x00800000u ? 0 : bounded + (KOPT_CAST_(uint32_t, bounded == infinity) << 22);
}
/* Are all codes of a block with this scale 0? */
KOPT_INLINE_ int kopt_codes_are_zero_(uint32_t scale) { return scale == 0 || scale == 0x7FC00000u; }

/* The scale of section 6b. square: the block holds roots of means of squares. For all other numbers the scale is a
   power of two. */
KOPT_INLINE_ uint32_t kopt_scale_q8_(uint32_t largest, int square) {
    const uint32_t power = (largest + 0x000FFFFFu) & 0x7F800000u;
    if (square || largest >= 0x7F800000u) return kopt_scale_(largest);
    return power > 0x00800000u ? power - 0x00800000u : 0;
}

/* A step of elements [begin, end) of one tensor, ready to run: all arguments are checked. */
typedef struct kopt_job_ {
    const kopt_step *step;
    kopt_byte_ *weight, *grad, *residual, *moment[4], *slow, *slow_residual, *copy; /* copy may be NULL */
    kopt_counts *counts;                                                            /* may be NULL */
    kopt_format grad_format, copy_format, moment_format;                            /* formats in memory */
    size_t begin, end, scale; /* scale: offset in bytes from the codes of an 8-bit moment to its scales */
    uint64_t first;           /* global index of element 0 */
    uint32_t id, stream;
    float rate, weight_decay;
    int buffered; /* the moments are fp32 buffers, with roots of means of squares; the caller rounds and stores them */
#ifdef KAHAN_OPT_VMATH
    /* The table with the function that runs between the stages; NULL: none, or the built-in one of Adam-atan2. */
    const kopt_vmath *vmath;
    int quotient; /* Adam-atan2: vmath->atan2 computes the arc tangent of one argument, the quotient y / x */
#endif
} kopt_job_;

/* The conversion of an array. */
typedef struct kopt_conversion_ {
    kopt_byte_ *dst;
    const kopt_byte_ *src;
    kopt_format dst_format, src_format;
    size_t n;
    int stochastic; /* 0: to nearest; else the stream of the random bits */
    uint64_t seed, first;
    uint32_t step, id;
} kopt_conversion_;

/* One call of a training-loop tool for n elements: the norm, the clipping of values or the sum of shards. Each tool
   reads only some of the fields. */
typedef enum kopt_tool_kind_ { KOPT_TOOL_NORM_, KOPT_TOOL_CLIP_, KOPT_TOOL_SUM_ } kopt_tool_kind_;
typedef struct kopt_tool_ {
    kopt_tool_kind_ kind;
    kopt_format src_format, dst_format;
    const kopt_byte_ *src;
    kopt_byte_ *dst;
    size_t n;
    kopt_norm *norm;
    uint32_t limit; /* largest magnitude, as bits of dst_format */
    const void *const *shards;
    size_t count;
    float scale;
} kopt_tool_;

/* ---- CONTENTS OF THIS BUILD -------------------------------------------------------------------------------------- */

#ifdef KAHAN_OPT_ONLY
#define KOPT_ONLY_ ((KAHAN_OPT_ONLY) & KOPT_WITH_ALL)
#else
#define KOPT_ONLY_ KOPT_WITH_ALL
#endif
#if !(KOPT_ONLY_ & 7u) || !(KOPT_ONLY_ & 0x0FFF0000u)
#error "KAHAN_OPT_ONLY leaves no format or no rule"
#endif
#define KOPT_HAS_(what) ((KOPT_ONLY_ & (what)) != 0)
/* Does this build step moments in fp32 buffers? 8-bit moments always are, fp16 moments in vector code only. */
#if defined(KOPT_X86_) || defined(KOPT_NEON_)
#define KOPT_BUFFERED_MOMENTS_ KOPT_HAS_(KOPT_WITH_Q8 | KOPT_WITH_FP16)
#else
#define KOPT_BUFFERED_MOMENTS_ KOPT_HAS_(KOPT_WITH_Q8)
#endif

/* Specifiers of functions that a build without checks inlines, because it calls each of them only once or twice. */
#if KOPT_ONLY_ & KOPT_WITH_CHECKS
#define KOPT_SMALL_FN_ static KOPT_UNUSED_
#define KOPT_SCALARS_ static KOPT_NOINLINE_ /* no operation may move out of the FP environment of the call */
#else
#define KOPT_SMALL_FN_ static KOPT_FORCE_INLINE_
#define KOPT_SCALARS_ static KOPT_FORCE_INLINE_
#endif

/* Returns value, which is an option of this build: bit i of the constant `set` says whether the build contains option
   i. So the compiler knows which values are impossible and drops their code: if one option is left the result is a
   constant, if two are left it costs one comparison. An option that the build lacks becomes one that it contains. */
static KOPT_HOST_DEVICE_ KOPT_FORCE_INLINE_ int kopt_enabled_value_(uint32_t set, int value) {
    const uint32_t lowest_bit = set & (0u - set), others = set ^ lowest_bit;
    const int low = lowest_bit == 1    ? 0
                    : lowest_bit == 2  ? 1
                    : lowest_bit == 4  ? 2
                    : lowest_bit == 8  ? 3
                    : lowest_bit == 16 ? 4
                    : lowest_bit == 32 ? 5
                                       : 6;
    if (others == 0) return low;
    if ((others & (others - 1)) == 0) {
        const int high = others == 2    ? 1
                         : others == 4  ? 2
                         : others == 8  ? 3
                         : others == 16 ? 4
                         : others == 32 ? 5
                         : others == 64 ? 6
                                        : 7;
        return value == high ? high : low;
    }
    if ((set & 1u) == 0 && value == 0) value = low;
    if ((set & 2u) == 0 && value == 1) value = low;
    if ((set & 4u) == 0 && value == 2) value = low;
    if ((set & 8u) == 0 && value == 3) value = low;
    if ((set & 16u) == 0 && value == 4) value = low;
    if ((set & 32u) == 0 && value == 5) value = low;
    if ((set & 64u) == 0 && value == 6) value = low;
    return value;
}

#define KOPT_FORMATS_ (KOPT_ONLY_ & 0xFu)
#define KOPT_ROUNDINGS_ (KOPT_ONLY_ >> 5 & 0x1Fu)
#define KOPT_STATE_ROUNDINGS_ (KOPT_ONLY_ >> 10 & 3u)
#define KOPT_DECAYS_ (KOPT_ONLY_ >> 12 & 7u)
#ifdef KAHAN_OPT_VMATH
/* A build contains Adam-atan2 if it contains Adam, SGD and fp32. */
#define KOPT_SECOND_PASS_ (KOPT_WITH_SGD | KOPT_WITH_F32)
#define KOPT_RULES_               \
    ((KOPT_ONLY_ >> 16 & 0x7Fu) | \
     ((KOPT_ONLY_ & KOPT_SECOND_PASS_) == KOPT_SECOND_PASS_ ? KOPT_ONLY_ >> 10 & 0x80u : 0u))
#define KOPT_LAST_RULE_ KOPT_ADAM_ATAN2
#define KOPT_IS_ATAN2_(rule) ((rule) == KOPT_ADAM_ATAN2)
#define KOPT_VMATH_HERE_ 1
#else
#define KOPT_VMATH_HERE_ 0
#define KOPT_RULES_ (KOPT_ONLY_ >> 16 & 0x7Fu)
#define KOPT_LAST_RULE_ KOPT_EMA
#define KOPT_IS_ATAN2_(rule) 0
#endif
#define KOPT_SINGLE_BIT_(set) (((set) & ((set) - 1u)) == 0)
#define KOPT_ENABLED_VALUE_(type, set, value) KOPT_CAST_(type, kopt_enabled_value_(set, KOPT_CAST_(int, value)))
#define KOPT_RULE_(value) KOPT_ENABLED_VALUE_(kopt_rule, KOPT_RULES_, value)
#define KOPT_FORMAT_(value) KOPT_ENABLED_VALUE_(kopt_format, KOPT_FORMATS_ & 7u, value) /* weight, gradient, copy */
#define KOPT_MOMENT_FORMAT_(value) KOPT_ENABLED_VALUE_(kopt_format, KOPT_FORMATS_, value)
/* The format of moments as a kernel sees them: fp32 instead of 8 bits. */
#define KOPT_STEP_FORMAT_(value) KOPT_ENABLED_VALUE_(kopt_format, (KOPT_FORMATS_ | KOPT_FORMATS_ >> 3) & 7u, value)
#define KOPT_ROUNDING_(value) KOPT_ENABLED_VALUE_(kopt_rounding, KOPT_ROUNDINGS_, value)
#define KOPT_STATE_ROUNDING_(value) KOPT_ENABLED_VALUE_(kopt_rounding, KOPT_STATE_ROUNDINGS_, value)
/* Nearest or stochastic, for weights or for the state. With extras nearest is there for AMSGrad's maximum. */
#define KOPT_ROUND_MODE_(value) \
    KOPT_ENABLED_VALUE_(kopt_rounding, (KOPT_ROUNDINGS_ | KOPT_STATE_ROUNDINGS_ | (KOPT_ONLY_ >> 30 & 1u)) & 3u, value)
#define KOPT_DECAY_(value) KOPT_ENABLED_VALUE_(kopt_decay_mode, KOPT_DECAYS_, value)

/* The global index of an element. */
#if KOPT_ONLY_ & KOPT_WITH_EXTRAS
typedef uint64_t kopt_index_;
#define KOPT_INDEX_(x) (x)
#else
typedef size_t kopt_index_; /* enough, because tensor.first_index is 0 */
#define KOPT_INDEX_(x) KOPT_CAST_(size_t, x)
#endif

/* The number of moments: a constant where the rule alone determines it in this build. */
static KOPT_HOST_DEVICE_ KOPT_FORCE_INLINE_ int kopt_moments_here_(kopt_rule rule, int moments) {
    if (rule == KOPT_SGD && !KOPT_HAS_(KOPT_WITH_MOMENTUM)) return 0;
    if (rule == KOPT_ADAM && !KOPT_HAS_(KOPT_WITH_EXTRAS)) return 2;
    if (rule == KOPT_SGD && !KOPT_HAS_(KOPT_WITH_EXTRAS))
        return moments != 0; /* 0 or 1: a small build drops the code for more */
    return moments;
}

static KOPT_HOST_DEVICE_ KOPT_FORCE_INLINE_ size_t kopt_bytes_of_(kopt_format format) {
    return format == KOPT_F32 ? 4 : format == KOPT_Q8 ? 1 : 2;
}

/* Is this moment a mean of squares, or AMSGrad's maximum of them? fp16 and 8-bit moments keep its square root. */
static KOPT_HOST_DEVICE_ KOPT_FORCE_INLINE_ int kopt_is_square_(kopt_rule rule, int moment) {
    return moment == 1 || (moment == 2 && rule == KOPT_ADAM);
}

static KOPT_HOST_DEVICE_ KOPT_FORCE_INLINE_ size_t kopt_bytes_of_residual_(kopt_format format, kopt_rounding rounding) {
    if (format == KOPT_F32 || rounding == KOPT_NEAREST || rounding == KOPT_STOCHASTIC) return 0;
    return rounding == KOPT_COMPACT ? 1 : 2;
}

/* ---- MEMORY ------------------------------------------------------------------------------------------------------ */

/* Hides the value of an integer from the optimizer, which then cannot replace a loop by a call of memcpy or memset. */
#ifdef KOPT_GNU_
#define KOPT_OPAQUE_(x) __asm__("" : "+r"(x))
#else
#define KOPT_OPAQUE_(x) ((void)0)
#endif

#ifdef KOPT_GNU_
typedef uint16_t kopt_unaligned16_ __attribute__((__aligned__(1), __may_alias__));
typedef uint32_t kopt_unaligned32_ __attribute__((__aligned__(1), __may_alias__));
#if defined(KOPT_NEON_) || (defined(KOPT_X86_) && defined(__SSE2__))
#define KOPT_VECTORS16_ 1 /* little-endian, with 16-byte vectors and an instruction that counts leading zeros */
typedef uint64_t kopt_unaligned64_ __attribute__((__aligned__(1), __may_alias__));
typedef uint32_t kopt_unaligned128_ __attribute__((__vector_size__(16), __aligned__(1), __may_alias__));
#endif
#endif

/* Copies size bytes, in wide pieces where the hardware allows unaligned access and code size does not matter: every
   call copies a step and a job. */
#ifdef KOPT_VECTORS16_
KOPT_INLINE_ void kopt_copy64_(kopt_byte_ *to, const kopt_byte_ *from) {
    const kopt_unaligned128_ *const in = KOPT_CONST_POINTER_(const kopt_unaligned128_ *, from);
    kopt_unaligned128_ *const out = KOPT_POINTER_(kopt_unaligned128_ *, to), a = in[0], b = in[1], c = in[2], d = in[3];
    __asm__("" : "+" KOPT_REGISTER_(a), "+" KOPT_REGISTER_(b), "+" KOPT_REGISTER_(c), "+" KOPT_REGISTER_(d));
    out[0] = a;
    out[1] = b;
    out[2] = c;
    out[3] = d;
}
#endif
static KOPT_FORCE_INLINE_ KOPT_HOST_DEVICE_ void kopt_copy_(kopt_byte_ *to, const kopt_byte_ *from, size_t size) {
#ifdef KOPT_VECTORS16_
    for (; size >= 128; size -= 128, to += 128, from += 128) { /* for a constant size no loop is left */
        kopt_copy64_(to, from);
        kopt_copy64_(to + 64, from + 64);
    }
    for (; size >= 64; size -= 64, to += 64, from += 64) kopt_copy64_(to, from);
    for (; size >= 8; size -= 8, to += 8, from += 8) {
        uint64_t piece = *KOPT_CONST_POINTER_(const kopt_unaligned64_ *, from);
        KOPT_OPAQUE_(piece);
        *KOPT_POINTER_(kopt_unaligned64_ *, to) = piece;
    }
#endif
#if defined(KOPT_GNU_) && (defined(KOPT_X86_) || defined(KOPT_NEON_))
    for (; size >= 4; size -= 4, to += 4, from += 4) {
        uint32_t piece = *KOPT_CONST_POINTER_(const kopt_unaligned32_ *, from);
        KOPT_OPAQUE_(piece);
        *KOPT_POINTER_(kopt_unaligned32_ *, to) = piece;
    }
#endif
    for (; size > 0; size--, to++) {
        uint32_t octet = *from++;
        KOPT_OPAQUE_(octet);
        *to = KOPT_CAST_(kopt_byte_, octet);
    }
}

/* Loads and stores at any alignment: one instruction where the machine allows it, never a call of memcpy. */
#ifdef KOPT_GNU_
KOPT_INLINE_ uint32_t kopt_load16_(const kopt_byte_ *p) { return *KOPT_CONST_POINTER_(const kopt_unaligned16_ *, p); }
KOPT_INLINE_ uint32_t kopt_load32_(const kopt_byte_ *p) { return *KOPT_CONST_POINTER_(const kopt_unaligned32_ *, p); }
KOPT_INLINE_ void kopt_store16_(kopt_byte_ *p, uint32_t x) {
    *KOPT_POINTER_(kopt_unaligned16_ *, p) = KOPT_CAST_(uint16_t, x);
}
KOPT_INLINE_ void kopt_store32_(kopt_byte_ *p, uint32_t x) { *KOPT_POINTER_(kopt_unaligned32_ *, p) = x; }
#else
KOPT_INLINE_ uint32_t kopt_load16_(const kopt_byte_ *p) {
    uint16_t x;
    kopt_copy_(KOPT_POINTER_(kopt_byte_ *, &x), p, 2);
    return x;
}
KOPT_INLINE_ uint32_t kopt_load32_(const kopt_byte_ *p) {
    uint32_t x;
    kopt_copy_(KOPT_POINTER_(kopt_byte_ *, &x), p, 4);
    return x;
}
KOPT_INLINE_ void kopt_store16_(kopt_byte_ *p, uint32_t value) {
    const uint16_t x = KOPT_CAST_(uint16_t, value);
    kopt_copy_(p, KOPT_CONST_POINTER_(const kopt_byte_ *, &x), 2);
}
KOPT_INLINE_ void kopt_store32_(kopt_byte_ *p, uint32_t x) {
    kopt_copy_(p, KOPT_CONST_POINTER_(const kopt_byte_ *, &x), 4);
}
#endif

static KOPT_NOINLINE_ KOPT_UNUSED_ KOPT_HOST_DEVICE_ void kopt_copy_noinline_(kopt_byte_ *to, const kopt_byte_ *from,
                                                                              size_t size) {
    kopt_copy_(to, from, size);
}

/* Copies a job into a local variable, which no store through the pointers of the job can change. Not an assignment:
   some compilers turn it into a call of memcpy. */
KOPT_INLINE_ const kopt_job_ *kopt_copy_job_(kopt_job_ *to, const kopt_job_ *from) {
    kopt_copy_(KOPT_POINTER_(kopt_byte_ *, to), KOPT_CONST_POINTER_(const kopt_byte_ *, from), sizeof *to);
    return to;
}

/* Fills the `room` bytes of part, a multiple of 4, with size bytes from p and then zeros. Returns part. */
static KOPT_NOINLINE_ KOPT_UNUSED_ const kopt_byte_ *kopt_copy_padded_(kopt_byte_ *part, size_t room,
                                                                       const kopt_byte_ *p, size_t size) {
    size_t i;
    for (i = 0; i < room; i += 4) {
        uint32_t zero = 0;
        KOPT_OPAQUE_(zero);
        kopt_store32_(part + i, zero);
    }
    kopt_copy_(part, p, size);
    return part;
}

/* ---- FP32 ARITHMETIC --------------------------------------------------------------------------------------------- */

KOPT_INLINE_ float kopt_mul_(float a, float b) {
    float product;
#ifdef __CUDA_ARCH__
    KOPT_PTX_("mul.rn.f32", "f", product, a, b);
#else
    product = a * b;
    KOPT_OPAQUE_FLOAT_(product);
#endif
    return product;
}

/* a / b, correctly rounded. In assembly where a compiler might use an estimate of the reciprocal instead (clang -Ofast
   on PowerPC does). */
KOPT_INLINE_ float kopt_div_(float a, float b) {
    float r;
#ifdef __CUDA_ARCH__
    KOPT_PTX_("div.rn.f32", "f", r, a, b);
#elif defined(KOPT_GNU_) && defined(__powerpc__) && !defined(_SOFT_FLOAT)
    __asm__("fdivs %0, %1, %2" : "=f"(r) : "f"(a), "f"(b));
#elif defined(KOPT_GNU_) && defined(__arm__) && defined(__ARM_FP) && (__ARM_FP & 4)
    __asm__("vdiv.f32 %0, %1, %2" : "=t"(r) : "t"(a), "t"(b));
#else
    /* Against -freciprocal-math, which multiplies by 1 / b, computed once for a whole loop. */
    KOPT_OPAQUE_FLOATS_(a, b);
    r = a / b;
    KOPT_OPAQUE_FLOAT_(r);
#endif
    return r;
}

KOPT_INLINE_ int kopt_above_(float a, float b) { /* a > b */
#ifdef __CUDA_ARCH__
    int r;
    __asm__("{ .reg .pred above; setp.gt.f32 above, %1, %2; selp.s32 %0, 1, 0, above; }" : "=r"(r) : "f"(a), "f"(b));
    return r;
#else
    return a > b;
#endif
}

/* Square root, correctly rounded: one instruction where the machine has it, else bit by bit. */
KOPT_INLINE_ float kopt_sqrt_(float x) {
#ifdef __CUDA_ARCH__
    float root;
    __asm__("sqrt.rn.f32 %0, %1;" : "=f"(root) : "f"(x));
    return root;
#elif defined(KOPT_GNU_) && (defined(__x86_64__) || defined(__SSE2_MATH__))
    float root;
#ifdef __AVX__
    __asm__("vsqrtss {%1, %1, %0|%0, %1, %1}" : "=x"(root) : "x"(x));
#else
    __asm__("sqrtss {%1, %0|%0, %1}" : "=x"(root) : "x"(x));
#endif
    return root;
#elif defined(KOPT_GNU_) && defined(__aarch64__)
    float root;
    __asm__("fsqrt %s0, %s1" : "=w"(root) : "w"(x));
    return root;
#elif defined(KOPT_GNU_) && defined(__riscv_flen)
    float root;
    __asm__("fsqrt.s %0, %1" : "=f"(root) : "f"(x));
    return root;
#elif defined(KOPT_GNU_) && defined(__arm__) && defined(__ARM_FP) && (__ARM_FP & 4)
    float root;
    __asm__("vsqrt.f32 %0, %1" : "=t"(root) : "t"(x));
    return root;
#else
    uint32_t u = kopt_as_u32_(x), exponent = u >> 23, significand = u & 0x007FFFFFu, root = 0, trial;
    uint32_t remainder = 0, i;
    if ((u & 0x7FFFFFFFu) > 0x7F800000u || (u > 0x80000000u)) return kopt_as_f32_(0x7FC00000u);
    if ((u & 0x7FFFFFFFu) == 0 || u == 0x7F800000u) return x;
    if (exponent == 0) {
        for (exponent = 1; significand < 0x00800000u; significand <<= 1) exponent--; /* may fall below 0: modulo 2^32 */
    } else {
        significand |= 0x00800000u;
    }
    exponent += 127; /* x = significand * 2^(exponent - 277); an even exponent, halved, is the exponent of the root */
    if ((exponent & 1u) != 0) significand <<= 1;
    exponent >>= 1;
    significand <<= 7;         /* 31 or 32 bits; each bit of the root consumes two */
    for (i = 0; i < 25; i++) { /* 24 bits and a rounding bit */
        remainder = (remainder << 2) | (significand >> 30);
        significand <<= 2;
        trial = (root << 2) | 1u;
        root <<= 1;
        if (remainder >= trial) {
            remainder -= trial;
            root |= 1u;
        }
    }
    root = (root + 1u) >> 1; /* never a tie: the square of a root of exactly 25 bits would have 49 or 50 bits */
    return kopt_as_f32_((exponent << 23) + (root - 0x00800000u));
#endif
}

/* ---- BINARY64 ARITHMETIC ----------------------------------------------------------------------------------------- */

/* Norms, loss scales, RAdam and checks of arguments need binary64. kopt_f64_ is double where the hardware computes in
   binary64. Elsewhere (an FPU for fp32 only, no FPU, a double of 32 bits) it is the 64-bit word of a binary64 number,
   and the operations below are integer code, which gives the same bits and calls no function of the compiler's runtime
   library. */

#ifndef KOPT_SOFT64_ /* 1: integer code; a test defines it to check that code on any machine */
#if defined(__SIZEOF_DOUBLE__) && __SIZEOF_DOUBLE__ != 8
#define KOPT_SOFT64_ 1
#elif defined(__arm__) && !(defined(__ARM_FP) && (__ARM_FP & 8))
#define KOPT_SOFT64_ 1
#elif defined(__riscv) && !(defined(__riscv_flen) && __riscv_flen >= 64)
#define KOPT_SOFT64_ 1
#elif defined(__mips_soft_float) || defined(__XTENSA__) || defined(__MSP430__) || defined(_SOFT_FLOAT)
#define KOPT_SOFT64_ 1
#else
#define KOPT_SOFT64_ 0
#endif
#endif

/* Converts binary32 to binary64, exactly. Returns the bits. */
KOPT_INLINE_ uint64_t kopt_float_to_bits64_(float x) {
    uint32_t u = kopt_as_u32_(x), fraction = u & 0x007FFFFFu, exponent = (u >> 23 & 0xFFu) + 896;
    const uint64_t sign = KOPT_CAST_(uint64_t, u >> 31) << 63;
    if (exponent == 896 && fraction == 0) return sign;
    if (exponent == 896 + 255) exponent = 2047;
    if (exponent == 896) { /* subnormal in binary32, normal in binary64 */
        for (exponent++; fraction < 0x00800000u; fraction <<= 1) exponent--;
        fraction &= 0x007FFFFFu;
    }
    return sign | KOPT_CAST_(uint64_t, exponent) << 52 | KOPT_CAST_(uint64_t, fraction) << 29;
}

typedef union kopt_bitcast64_ {
    double d;
    uint64_t u;
} kopt_bitcast64_;

/* The bits of a double as binary64. A double of 32 bits is converted, exactly. */
KOPT_INLINE_ uint64_t kopt_bits64_(double x) {
#if defined(__SIZEOF_DOUBLE__) && __SIZEOF_DOUBLE__ == 4
    return kopt_float_to_bits64_(x);
#else
    kopt_bitcast64_ bits;
    bits.d = x;
    return bits.u;
#endif
}

/* Is this a build without checks, whose formulas compute with positive numbers only? */
#ifdef KAHAN_OPT_VMATH
#define KOPT_POSITIVE64_ 0
#else
#define KOPT_POSITIVE64_ \
    (!KOPT_HAS_(KOPT_WITH_CHECKS | KOPT_WITH_EXTRAS | KOPT_WITH_ADAN | KOPT_WITH_RADAM | KOPT_WITH_RANGER))
#endif

#if KOPT_SOFT64_

typedef uint64_t kopt_f64_;

enum { KOPT_SOFT_MUL_, KOPT_SOFT_DIV_, KOPT_SOFT_ADD_ };

/* The significand of a normal number: 53 bits, the leading one in bit 61, and 9 bits for rounding. Bit 0 is sticky:
   right shifts of a significand keep it set if they shift out a 1. */
KOPT_INLINE_ uint64_t kopt_significand64_(uint64_t x) {
    const uint64_t lead = KOPT_CAST_(uint64_t, 1) << 61;
    return (x << 9 & (lead - 1)) | lead;
}

/* x * y, x / y or x + y, rounded to nearest even as in IEEE 754, with one difference: the result is +infinity if an
   operand is infinite or NaN, or if the divisor is 0. The code is small rather than fast: one loop of right shifts and
   additions serves both products and sums. With KOPT_POSITIVE64_ it takes positive numbers only (the second term of a
   sum may be negative, if its magnitude is smaller) and returns 0 for a subnormal result. */
static KOPT_NOINLINE_ uint64_t kopt_soft64_(uint64_t x, uint64_t y, int operation) {
    const int general = !KOPT_POSITIVE64_;
    const uint64_t top = KOPT_CAST_(uint64_t, 1) << 63, infinity = KOPT_CAST_(uint64_t, 2047) << 52;
    uint64_t sign = (x ^ y) & top, a, b, m = 0;
    const int subtract = operation == KOPT_SOFT_ADD_ && sign != 0;
    int e, e2, n;
    if (general && operation == KOPT_SOFT_ADD_) {
        if ((x & ~top) < (y & ~top)) { /* swap, so that |x| >= |y| */
            a = x;
            x = y;
            y = a;
        }
        sign = x & top;
    }
    a = kopt_significand64_(x);
    b = kopt_significand64_(y);
    e = KOPT_CAST_(int, x >> 52 & 2047);
    e2 = KOPT_CAST_(int, y >> 52 & 2047);
    if (general) {
        if (e == 2047 || e2 == 2047) return infinity;
        if (y << 1 == 0 && operation == KOPT_SOFT_ADD_) return x << 1 == 0 ? x & y : x;
        if (y << 1 == 0 && operation == KOPT_SOFT_DIV_) return infinity;
        if (x << 1 == 0 || y << 1 == 0) return sign;
        if (e == 0) { /* subnormal */
            a = x << 12 >> 3;
            for (e = 1; a >> 61 == 0; a <<= 1) e--;
        }
        if (e2 == 0) {
            b = y << 12 >> 3;
            for (e2 = 1; b >> 61 == 0; b <<= 1) e2--;
        }
    }
    n = e - e2;
    if (operation == KOPT_SOFT_DIV_) {
        e = n + 1023 + 62;
        do { /* long division: one bit of the quotient in each iteration */
            m <<= 1;
            if (a >= b) {
                a -= b;
                m |= 1;
            }
            a <<= 1;
            e--;
        } while (m >> 61 == 0);
        m |= a != 0;
    } else {
        a >>= 1;
        if (operation == KOPT_SOFT_ADD_) {
            m = b; /* the loop shifts it right by the difference of the exponents */
            b = 0;
            e++;
        } else {
            e += e2 - 1022;
            n = 61; /* the loop adds a for each bit of b, from the lowest */
        }
        for (;; b >>= 1) {
            m = (m >> 1) | (m & 1);
            if (n-- == 0) break;
            if ((b & 1) != 0) m += a;
        }
        if (subtract) m = 0 - m;
        m += a;
        if (general && m == 0) return 0;
        for (; m >> 61 == 0; m <<= 1) e--;
    }
    if (!general) sign = 0;
    if (!general && e <= 0) return 0;
    for (; general && e <= 0; e++) m = (m >> 1) | (m & 1); /* subnormal */
    /* to nearest even, at bit 9 */
    m += 255 + (m >> 9 & 1);
    if (general && e >= 2047) return sign | infinity;
    return sign | ((m >> 9) + (KOPT_CAST_(uint64_t, e - 1) << 52));
}

KOPT_INLINE_ kopt_f64_ kopt_to_f64_(double x) { return kopt_bits64_(x); }
KOPT_INLINE_ uint64_t kopt_f64_to_bits_(kopt_f64_ x) { return x; }
KOPT_INLINE_ kopt_f64_ kopt_mul64_(kopt_f64_ a, kopt_f64_ b) { return kopt_soft64_(a, b, KOPT_SOFT_MUL_); }
KOPT_INLINE_ kopt_f64_ kopt_div64_(kopt_f64_ a, kopt_f64_ b) { return kopt_soft64_(a, b, KOPT_SOFT_DIV_); }
KOPT_INLINE_ kopt_f64_ kopt_add64_(kopt_f64_ a, kopt_f64_ b) { return kopt_soft64_(a, b, KOPT_SOFT_ADD_); }
KOPT_INLINE_ kopt_f64_ kopt_sub64_(kopt_f64_ a, kopt_f64_ b) {
    return kopt_soft64_(a, b ^ KOPT_CAST_(uint64_t, 1) << 63, KOPT_SOFT_ADD_);
}

KOPT_INLINE_ kopt_f64_ kopt_u32_to_f64_(uint32_t n) { /* n > 0 */
    int e = 1023 + 52;
    uint64_t significand = n;
    for (; significand >> 52 == 0; significand <<= 1) e--;
    return significand + (KOPT_CAST_(uint64_t, e - 1) << 52);
}

KOPT_INLINE_ kopt_f64_ kopt_half64_(kopt_f64_ x) { return x - (KOPT_CAST_(uint64_t, 1) << 52); }

/* Rounds to binary32, nearest even. A NaN becomes an infinity. With KOPT_POSITIVE64_ a subnormal result becomes 0. */
static KOPT_NOINLINE_ float kopt_to_float_(kopt_f64_ x) {
    const uint32_t sign = !KOPT_POSITIVE64_ ? KOPT_CAST_(uint32_t, x >> 32) & 0x80000000u : 0;
    const int exponent = KOPT_CAST_(int, x >> 52 & 2047);
    int shift = 897 - exponent;
    if (!KOPT_POSITIVE64_ && exponent >= 1023 + 128) return kopt_as_f32_(sign | 0x7F800000u);
    if (KOPT_POSITIVE64_) {
        if (shift > 0) return 0;
        x -= KOPT_CAST_(uint64_t, 896) << 52;
    } else {
        x &= (KOPT_CAST_(uint64_t, 1) << 52) - 1;
        if (shift <= 0) x += KOPT_CAST_(uint64_t, exponent - 896) << 52;
        if (shift > 0) x |= KOPT_CAST_(uint64_t, exponent != 0) << 52; /* subnormal or zero */
        for (; shift > 0 && x != 0; shift--) x = (x >> 1) | (x & 1);
    }
    x += 0x0FFFFFFFu + (x >> 29 & 1); /* to nearest even, at bit 29 */
    return kopt_as_f32_(sign | KOPT_CAST_(uint32_t, x >> 29));
}

KOPT_INLINE_ kopt_f64_ kopt_bits_to_f64_(uint64_t bits) { return bits; }
KOPT_INLINE_ double kopt_to_double_(kopt_f64_ x) {
#if defined(__SIZEOF_DOUBLE__) && __SIZEOF_DOUBLE__ == 4
    return kopt_to_float_(x);
#else
    kopt_bitcast64_ bits;
    bits.u = x;
    return bits.d;
#endif
}

#else

typedef double kopt_f64_;

#if defined(__x86_64__) || (defined(__i386__) && defined(__SSE2_MATH__)) || defined(__aarch64__)
#define KOPT_REGISTER64_ KOPT_REGISTER_
#else
#define KOPT_REGISTER64_ "m"
#endif
/* An optimization barrier: hides the value of x from the optimizer. The barriers here and in kopt_to_float_() are
   volatile, so they stay in order, and every operation is between two of them: one for its operand, one for its result.
   So the compiler cannot move an operation out from between kopt_enter_() and kopt_leave_(). */
KOPT_INLINE_ double kopt_opaque64_(double x) {
#ifdef __CUDA_ARCH__
    return x;
#elif defined(KOPT_GNU_)
    __asm__ __volatile__("" : "+" KOPT_REGISTER64_(x));
    return x;
#else
    volatile double y = x;
    return y;
#endif
}

KOPT_INLINE_ kopt_f64_ kopt_bits_to_f64_(uint64_t bits) {
    kopt_bitcast64_ whole;
    whole.u = bits;
    return whole.d;
}
KOPT_INLINE_ double kopt_to_double_(kopt_f64_ x) { return x; }
KOPT_INLINE_ kopt_f64_ kopt_to_f64_(double x) { return x; }
KOPT_INLINE_ kopt_f64_ kopt_u32_to_f64_(uint32_t n) { return n; }
KOPT_INLINE_ uint64_t kopt_f64_to_bits_(kopt_f64_ x) { return kopt_bits64_(x); }
#ifdef __CUDA_ARCH__
#define KOPT_OPERATION64_(name, ptx, operation)             \
    KOPT_INLINE_ kopt_f64_ name(kopt_f64_ a, kopt_f64_ b) { \
        kopt_f64_ r;                                        \
        KOPT_PTX_(ptx, "d", r, a, b);                       \
        return r;                                           \
    }
#else
#define KOPT_OPERATION64_(name, ptx, operation) \
    KOPT_INLINE_ kopt_f64_ name(kopt_f64_ a, kopt_f64_ b) { return kopt_opaque64_(a operation kopt_opaque64_(b)); }
#endif
KOPT_OPERATION64_(kopt_mul64_, "mul.rn.f64", *)
KOPT_OPERATION64_(kopt_div64_, "div.rn.f64", /)
KOPT_OPERATION64_(kopt_add64_, "add.rn.f64", +)
KOPT_OPERATION64_(kopt_sub64_, "sub.rn.f64", -)

KOPT_INLINE_ kopt_f64_ kopt_half64_(kopt_f64_ x) { return kopt_mul64_(x, 0.5); }

KOPT_INLINE_ float kopt_to_float_(kopt_f64_ x) {
#ifdef __CUDA_ARCH__
    float y;
    __asm__("cvt.rn.f32.f64 %0, %1;" : "=f"(y) : "d"(x));
#elif defined(KOPT_GNU_)
    float y = KOPT_CAST_(float, kopt_opaque64_(x));
    __asm__ __volatile__("" : "+" KOPT_REGISTER64_(y));
#else
    volatile float y = KOPT_CAST_(float, kopt_opaque64_(x));
#endif
    return y;
}

#endif

/* ---- comparisons and ranges of hyper-parameters ---- */

/* a < b, compared as integers: -Ofast assumes that there are no NaNs, and with DAZ set by the caller subnormals would
   count as 0. A NaN is above all numbers or, if its sign bit is set, below all. */
static KOPT_HOST_DEVICE_ int kopt_less64_(kopt_f64_ a, kopt_f64_ b) {
    const uint64_t top = KOPT_CAST_(uint64_t, 1) << 63;
    uint64_t x = kopt_f64_to_bits_(a), y = kopt_f64_to_bits_(b);
    if (KOPT_POSITIVE64_) return x < y;
    x = (x & top) != 0 ? top - (x & ~top) : x | top; /* the order of the numbers; -0 becomes 0 */
    y = (y & top) != 0 ? top - (y & ~top) : y | top;
    return x < y;
}

/* Is x finite and in [low, high]? */
static KOPT_HOST_DEVICE_ int kopt_within64_(kopt_f64_ x, kopt_f64_ low, kopt_f64_ high) {
    return (kopt_f64_to_bits_(x) >> 52 & 2047) != 2047 && !kopt_less64_(x, low) && !kopt_less64_(high, x);
}

static KOPT_HOST_DEVICE_ int kopt_less_(double a, double b) { return kopt_less64_(kopt_to_f64_(a), kopt_to_f64_(b)); }

static KOPT_HOST_DEVICE_ int kopt_within_(double x, double low, double high) {
    return kopt_within64_(kopt_to_f64_(x), kopt_to_f64_(low), kopt_to_f64_(high));
}

/* Faster checks, for every step. The words of nonnegative numbers are in the order of the numbers, and those of
   negative numbers and NaNs are above that of any finite bound. -0 counts as 0. */
KOPT_INLINE_ int kopt_is_zero_(double x) { return kopt_bits64_(x) << 1 == 0; }
KOPT_INLINE_ int kopt_from_0_to_(double x, double largest) {
    return kopt_bits64_(x) <= kopt_bits64_(largest) || kopt_is_zero_(x);
}
KOPT_INLINE_ int kopt_from_0_below_1_(double x) { return kopt_bits64_(x) < kopt_bits64_(1) || kopt_is_zero_(x); }
KOPT_INLINE_ int kopt_magnitude_at_most_(double x, double largest) {
    return kopt_bits64_(x) << 1 <= kopt_bits64_(largest) << 1;
}
KOPT_INLINE_ int kopt_normal_at_most_(double x, double largest) { /* at least 2^-126, the smallest normal fp32 */
    return kopt_bits64_(x) >= kopt_bits64_(1.1754943508222875e-38) && kopt_bits64_(x) <= kopt_bits64_(largest);
}

/* Rounds to binary32, nearest even. */
KOPT_INLINE_ float kopt_narrow64_(double x) { return kopt_to_float_(kopt_to_f64_(x)); }

/* 1 - beta in fp32, from the bits of 0 <= beta < 1. Truncates beta to 64 bits after the binary point, truncates the
   difference to 53 significant bits and rounds it to fp32. In integers, so that it needs no binary64 arithmetic. */
static KOPT_FORCE_INLINE_ KOPT_HOST_DEVICE_ float kopt_one_minus_beta_(uint64_t beta) {
    uint64_t q = beta << 11 | KOPT_CAST_(uint64_t, 1) << 63;
    /* 2047 drops the sign bit: beta may be -0 */
    int shift = 1022 - KOPT_CAST_(int, beta >> 52 & (KOPT_POSITIVE64_ ? 4095 : 2047)), e = 1022;
    for (; shift > 0; shift--) q >>= 1;
    q = ~q;                  /* 1 - beta, too small by 2^-64 */
#ifdef KOPT_VECTORS16_       /* one instruction counts the zeros */
    e -= __builtin_clzll(q); /* q is not 0 */
    q <<= __builtin_clzll(q);
#else
    for (; q >> 63 == 0; q <<= 1) e--;
#endif
    return kopt_to_float_(kopt_bits_to_f64_((q << 1 >> 12) + (KOPT_CAST_(uint64_t, e) << 52)));
}

/* 1 - (1 - a) * (1 - b), computed as a + b - a * b: a small a or b would lose its digits in 1 - a or 1 - b. */
static KOPT_FORCE_INLINE_ KOPT_HOST_DEVICE_ float kopt_combine_gains_(float a, float b) {
    return kopt_sub_(kopt_add_(a, b), kopt_mul_(a, b));
}

/* Stores beta and 1 - beta in fp32. Returns the bias correction 1 - beta^step, by binary exponentiation. */
static KOPT_HOST_DEVICE_ float kopt_beta_(double beta, uint32_t step, float *beta32, float *gain32) {
    float gain = kopt_one_minus_beta_(kopt_bits64_(beta)), correction = kopt_as_f32_(0);
    *beta32 = kopt_to_float_(kopt_to_f64_(beta));
    *gain32 = gain;
    for (;;) {
        if ((step & 1u) != 0) correction = kopt_combine_gains_(correction, gain);
        step >>= 1;
        if (step == 0) return correction;
        gain = kopt_combine_gains_(gain, gain);
    }
}

#ifdef KOPT_VECTORS16_
typedef float kopt_f32x4_ __attribute__((__vector_size__(16)));

static KOPT_FORCE_INLINE_ kopt_f32x4_ kopt_combine_gains4_(kopt_f32x4_ a, kopt_f32x4_ b) {
    kopt_f32x4_ sum = a + b, product = a * b, r;
    __asm__("" : "+" KOPT_REGISTER_(sum), "+" KOPT_REGISTER_(product));
    r = sum - product;
    KOPT_OPAQUE_FLOAT_(r);
    return r;
}

/* kopt_beta_() of both beta1 and beta2 in one loop, in lanes 0 and 1. */
static KOPT_NOINLINE_ KOPT_UNUSED_ void kopt_betas_(const kopt_optimizer *opt, kopt_step *s, float *correction1,
                                                    float *correction2) {
    const float one_minus_beta1 = kopt_one_minus_beta_(kopt_bits64_(opt->beta1)),
                one_minus_beta2 = kopt_one_minus_beta_(kopt_bits64_(opt->beta2));
    kopt_f32x4_ gain = {one_minus_beta1, one_minus_beta2}, correction = {0, 0};
    uint32_t step = s->step;
    s->beta1 = kopt_narrow64_(opt->beta1);
    s->beta2 = kopt_narrow64_(opt->beta2);
    s->gain1 = one_minus_beta1;
    s->gain2 = one_minus_beta2;
    for (;;) {
        if ((step & 1u) != 0) correction = kopt_combine_gains4_(correction, gain);
        step >>= 1;
        if (step == 0) break;
        gain = kopt_combine_gains4_(gain, gain);
    }
    *correction1 = correction[0];
    *correction2 = correction[1];
}
#endif

/* Square root of 0 < a <= 1 by Heron's method. The iterates decrease until they have converged. */
static KOPT_HOST_DEVICE_ kopt_f64_ kopt_sqrt64_(kopt_f64_ a) {
    kopt_f64_ x = kopt_to_f64_(1.0), y;
    for (;;) {
        y = kopt_half64_(kopt_add64_(x, kopt_div64_(a, x)));
        if (!kopt_less64_(y, x)) return x;
        x = y;
    }
}

/* Converts n > 0 to binary64, nearest even. */
static KOPT_HOST_DEVICE_ kopt_f64_ kopt_u64_to_f64_(uint64_t n) {
    const uint32_t high = KOPT_CAST_(uint32_t, n >> 32), low = KOPT_CAST_(uint32_t, n & 0xFFFFFFFFu);
    const kopt_f64_ low64 = low == 0 ? kopt_to_f64_(0) : kopt_u32_to_f64_(low);
    if (high == 0) return low64;
    return kopt_add64_(kopt_mul64_(kopt_u32_to_f64_(high), kopt_to_f64_(4294967296.0)), low64);
}

/* ---- EXACT NORM -------------------------------------------------------------------------------------------------- */

/* Adds value * 2^(p - 298) to the exact sum. Does not propagate carries: each limb grows by less than 2^33. */
KOPT_INLINE_ void kopt_norm_accumulate_(kopt_norm *norm, uint64_t value, uint32_t p) {
    const uint64_t low = (value & 0xFFFFFFFFu) << (p & 31u), high = (value >> 32) << (p & 31u);
    uint64_t *limb = norm->digit + (p >> 5);
    limb[0] += low & 0xFFFFFFFFu;
    limb[1] += (low >> 32) + (high & 0xFFFFFFFFu);
    limb[2] += high >> 32;
}

/* Propagates carries. Then all limbs but the last are below 2^32, and equal sums have equal limbs. */
static KOPT_UNUSED_ KOPT_HOST_DEVICE_ void kopt_norm_carry_(kopt_norm *norm) {
    int i;
    for (i = 0; i < 19; i++) {
        norm->digit[i + 1] += norm->digit[i] >> 32;
        norm->digit[i] &= 0xFFFFFFFFu;
    }
}

/* The fp32 word of |x|. */
KOPT_INLINE_ uint32_t kopt_load_magnitude_(const kopt_byte_ *p, kopt_format format) {
    if (format == KOPT_F32) return kopt_load32_(p) & 0x7FFFFFFFu;
    if (format == KOPT_BF16) return (kopt_load16_(p) & 0x7FFFu) << 16;
    return kopt_as_u32_(kopt_f32_from_fp16(KOPT_CAST_(kopt_fp16, kopt_load16_(p) & 0x7FFFu)));
}

/* Adds the squares of n values one by one. Takes any value. At most 2^30 values until the next kopt_norm_carry_(). */
static KOPT_NOINLINE_ KOPT_UNUSED_ KOPT_HOST_DEVICE_ void kopt_norm_add_values_(kopt_norm *norm, const kopt_byte_ *p,
                                                                                kopt_format format, size_t n) {
    const size_t size = kopt_bytes_of_(format);
    for (; n > 0; n--, p += size) {
        const uint32_t magnitude = kopt_load_magnitude_(p, format), exponent = magnitude >> 23;
        /* |x| = significand * 2^(max(exponent, 1) - 150) */
        const uint64_t significand = (magnitude & 0x007FFFFFu) | (exponent == 0 ? 0 : 0x00800000u);
        if (exponent == 255)
            norm->nonfinite++;
        else
            kopt_norm_accumulate_(norm, significand * significand, exponent == 0 ? 0 : 2 * exponent - 2);
    }
}

/* Copies a norm and propagates the carries of the copy. Not an assignment, which would call memcpy. */
static KOPT_HOST_DEVICE_ void kopt_norm_copy_(kopt_norm *to, const kopt_norm *from) {
    kopt_copy_noinline_(KOPT_POINTER_(kopt_byte_ *, to), KOPT_CONST_POINTER_(const kopt_byte_ *, from), sizeof *to);
    kopt_norm_carry_(to);
}

/* The square root, rounded to nearest even; infinity if a value was not finite. Computes 54 bits of the root one by
   one; the last bit and the remainder decide the rounding. */
static KOPT_HOST_DEVICE_ kopt_f64_ kopt_norm_root_(const kopt_norm *norm) {
    uint64_t remainder = 0, root = 0;
    int pairs, pair, i;
    kopt_norm n;
    kopt_norm_copy_(&n, norm);
    if (n.nonfinite != 0) return kopt_bits_to_f64_(KOPT_CAST_(uint64_t, 0x7FF) << 52);
    for (i = 19; i >= 0 && n.digit[i] == 0; i--) {
    }
    if (i < 0) return kopt_bits_to_f64_(0);
    pairs = 16 * i; /* the number of bit pairs of the sum */
    for (remainder = n.digit[i]; remainder != 0; remainder >>= 2) pairs++;
    for (pair = pairs - 1; pair >= pairs - 54; pair--) {
        const int limb = pair >= 320 ? 19 : pair >> 4;
        uint64_t trial;
        remainder <<= 2;
        if (pair >= 0) remainder |= n.digit[limb] >> (2 * (pair - 16 * limb)) & 3u;
        trial = (root << 2) | 1u;
        root <<= 1;
        if (remainder >= trial) {
            remainder -= trial;
            root |= 1u;
        }
    }
    for (; pair >= 0 && remainder == 0; pair--) remainder = n.digit[pair >> 4] >> (2 * (pair & 15)) & 3u;
    /* 53 bits, in units of 2^(pairs - 53 - 149) */
    root = (root >> 1) + ((root & 1u) != 0 && (remainder != 0 || (root & 2u) != 0));
    return kopt_bits_to_f64_((KOPT_CAST_(uint64_t, pairs + 872) << 52) + root);
}

#ifdef KAHAN_OPT_VMATH
/* ---- jobs of vector mathematics, and inputs that are hard to round ---- */

/* clang-format off: a table */
typedef enum kopt_vmath_kind_ {
    KOPT_VMATH_EXP_, /* functions of vector mathematics */
    KOPT_VMATH_LOG_,
    KOPT_VMATH_TANH_,
    KOPT_VMATH_ERF_,
    KOPT_VMATH_ERFC_,
    KOPT_VMATH_ATAN2_,
    KOPT_VMATH_SINCOSPI_,
    KOPT_VMATH_ADD_ONE_,    /* in fp32 */
    KOPT_VMATH_PREPARE_,    /* kopt_map: the arguments of the function */
    KOPT_VMATH_FINISH_,     /* kopt_map: the 16-bit results */
    KOPT_VMATH_MULTIPLY_,   /* kopt_map: 16-bit products */
    KOPT_VMATH_MAXIMUM_,    /* kopt_softmax: the largest value of a row */
    KOPT_VMATH_DIFFERENCE_, /* kopt_softmax: the distances from it, and their rounding errors */
    KOPT_VMATH_TERMS_,      /* kopt_softmax: corrected terms and their sums */
    KOPT_VMATH_NORMAL_,     /* random numbers */
    KOPT_VMATH_UNIFORM_,
    KOPT_VMATH_LINEAR_ /* a + b * in2, or a * in + b * in2 */
} kopt_vmath_kind_;
/* clang-format on */

typedef struct kopt_vmath_job_ {
    kopt_vmath_kind_ kind;
    kopt_function f;
    kopt_format format;
    size_t n;
    const kopt_byte_ *in, *in2;
    kopt_byte_ *out, *out2; /* FINISH_ of SOFTPLUS reads out2 */
    float a, b;
    uint64_t seed, first;
    uint32_t step, id, stream, attempt;
} kopt_vmath_job_;

#define KOPT_PARTS_ 16 /* partial sums of a row, one for each lane of the widest vector: element i is in sum i mod 16 */

/* All inputs that are hard to round: the exact result is so close to the midpoint of two 16-bit numbers (relative 2^-20
   for bf16, 2^-21 for fp16) that an fp32 result does not show which one is nearer. By function and format; an entry is
   `input << 16 | output`, in ascending order. `tests/vmath.py patches` prints them. */
/* clang-format off: tables */
static const unsigned kopt_map_exception_start_[27] = {0,   4,   42,  50,  107, 107, 139, 146, 211,
                                                       219, 261, 262, 312, 313, 364, 369, 427, 427,
                                                       467, 467, 507, 516, 641, 643, 737, 739, 816};
static const uint32_t kopt_map_exception_table_[816] = {
    0x3CDD3F84u, 0x40DB446Bu, 0x41F955F0u, 0xBE663F4Du, 0x0FFE3C00u, 0x0FFF3C00u, 0x10003C01u, 0x15FF3C02u, 0x1AFD3C04u,
    0x1F793C07u, 0x23333C0Fu, 0x25CF3C17u, 0x264C3C19u, 0x2ED73C73u, 0x32373CDCu, 0x3F0345C6u, 0x3F85468Eu, 0x4758660Bu,
    0x497C7B16u, 0x8BFD3C00u, 0x8BFE3C00u, 0x8BFF3C00u, 0x8C003C00u, 0x8C013BFFu, 0x8C023BFFu, 0x92003BFFu, 0x92013BFEu,
    0x95013BFDu, 0x97023BFCu, 0x99823BFAu, 0x9E453BF3u, 0xA0E63BECu, 0xA1A83BE9u, 0xA51D3BD7u, 0xA57F3BD4u, 0xA9223BAFu,
    0xA9543BACu, 0xAA0C3BA1u, 0xAC953B73u, 0xC13B2CAFu, 0xC1EF2A97u, 0xC64E177Du, 0x0E99C288u, 0x1069C282u, 0x233CC21Cu,
    0x23C7C219u, 0x256CC210u, 0x35E5C155u, 0x6C1A4278u, 0x6CA3427Au, 0x01A3C94Du, 0x0385C8EAu, 0x0BE3C82Au, 0x0E5DC7DBu,
    0x11ACC747u, 0x12FAC711u, 0x1308C710u, 0x160DC685u, 0x18F3C606u, 0x1935C5F9u, 0x1D78C53Bu, 0x24CEC3F3u, 0x253FC3C6u,
    0x261CC379u, 0x2780C310u, 0x297DC24Du, 0x2DBBC0D3u, 0x2EEDC072u, 0x2FDDC031u, 0x3025C017u, 0x305FBFF6u, 0x30ADBFB1u,
    0x32DDBE28u, 0x355EBC5Eu, 0x3575BC4Eu, 0x358BBC3Du, 0x391CB72Du, 0x396FB630u, 0x3BFE9401u, 0x40F63B45u, 0x41313BA2u,
    0x423E3C8Du, 0x43A43D5Du, 0x449E3E1Fu, 0x453E3EA1u, 0x45B53EF7u, 0x46353F4Du, 0x47493FF1u, 0x4B284153u, 0x4BB9417Au,
    0x52A943F3u, 0x5A284549u, 0x5D3245CEu, 0x602F4648u, 0x60514651u, 0x653D4733u, 0x65D84750u, 0x66D54778u, 0x697047EFu,
    0x699147F4u, 0x69C447FEu, 0x6E964869u, 0x6F1F4873u, 0x71BC48B0u, 0x779D492Du, 0x790B4951u, 0x7995495Du, 0x27442744u,
    0x27452744u, 0x27462745u, 0x28942894u, 0x2A9B2A9Au, 0x2D862D82u, 0x319B318Du, 0x34E334BEu, 0x36543605u, 0x36B23654u,
    0x397A38C2u, 0x3D613AFCu, 0x3E773B65u, 0x3EC43B79u, 0x402F3BC2u, 0x42D03BFBu, 0xA744A744u, 0xA745A744u, 0xA746A745u,
    0xA894A894u, 0xAA9BAA9Au, 0xAD86AD82u, 0xB19BB18Du, 0xB4E3B4BEu, 0xB654B605u, 0xB6B2B654u, 0xB97AB8C2u, 0xBD61BAFCu,
    0xBE77BB65u, 0xBEC4BB79u, 0xC02FBBC2u, 0xC2D0BBFBu, 0x3C003F00u, 0x3CC03F01u, 0x3E693F0Eu, 0xBB803F00u, 0xBC403EFFu,
    0xBCA03EFEu, 0xBCE03EFDu, 0x13FE3800u, 0x13FF3800u, 0x14003800u, 0x14013801u, 0x1A003801u, 0x1D003802u, 0x1F003803u,
    0x20803804u, 0x21803805u, 0x22803806u, 0x23803807u, 0x24403808u, 0x24C03809u, 0x2540380Au, 0x25C0380Bu, 0x3B8939C1u,
    0x40C93B54u, 0x42AB3BBAu, 0x457B3BF8u, 0x46B53BFDu, 0x47383BFFu, 0x8FFC3800u, 0x8FFD3800u, 0x8FFE3800u, 0x8FFF3800u,
    0x90003800u, 0x900137FFu, 0x900237FFu, 0x95FF37FFu, 0x960037FFu, 0x960137FEu, 0x990037FEu, 0x9B0037FDu, 0x9C8037FCu,
    0x9D8037FBu, 0x9E8037FAu, 0x9F8037F9u, 0xA04037F8u, 0xA0C037F7u, 0xA14037F6u, 0xA1C037F5u, 0xA24037F4u, 0xA2C037F3u,
    0xA34037F2u, 0xA3C037F1u, 0xA42037F0u, 0xA46037EFu, 0xA4A037EEu, 0xA4E037EDu, 0xA52037ECu, 0xA56037EBu, 0xA5A037EAu,
    0xADC937A4u, 0xAF4A378Cu, 0xB096376Eu, 0xB13F3758u, 0xB239373Au, 0xBC8B33C7u, 0xBF3C3082u, 0xBFF82FAEu, 0xC0E32D1Du,
    0xC1CC2AB0u, 0xC318272Cu, 0xC7371206u, 0xC8770856u, 0x3BB53B35u, 0x3C003B80u, 0x3E653DFEu, 0x4081407Du, 0x40BE40BDu,
    0xBB80BB00u, 0xBBB5BB35u, 0xC043BE0Eu, 0x0FFE0BFEu, 0x0FFF0BFFu, 0x11A80DA8u, 0x11A90DAAu, 0x14001000u, 0x16EE12F0u,
    0x18E614E7u, 0x1A531655u, 0x1E001A04u, 0x1EA21AA7u, 0x1F361B3Cu, 0x1FBF1BC7u, 0x2500210Cu, 0x2ABF26ECu, 0x2BB727F3u,
    0x344730D8u, 0x3728345Du, 0x43E143BBu, 0x8FFE8BFEu, 0x8FFF8BFFu, 0x90008C00u, 0x91A88DA8u, 0x91A98DA8u, 0x96EE92ECu,
    0x98E694E5u, 0x9A539651u, 0x9E0099FCu, 0x9EA29A9Du, 0x9F369B30u, 0x9FBF9BB7u, 0xA500A0F4u, 0xA7F0A3D1u, 0xA808A3F0u,
    0xAABFA692u, 0xABB7A77Bu, 0xAFA3AB2Eu, 0xB6D9B167u, 0xB6E5B16Fu, 0xB9B6B383u, 0xC173B15Du, 0xC4ECA88Fu, 0xC7A59B7Du,
    0xBEACBDFDu, 0x0E540A54u, 0x0E550A55u, 0x0E560A57u, 0x107A0C7Au, 0x107B0C7Cu, 0x13C10FC2u, 0x13C20FC4u, 0x157C117Du,
    0x1B6D1772u, 0x1CC018C5u, 0x20561C5Eu, 0x21991DA6u, 0x25DF21FBu, 0x27202348u, 0x29E6261Du, 0x2B7327CCu, 0x2D5429AEu,
    0x2DF12A62u, 0x2E4D2ACBu, 0x2E9E2B29u, 0x3330303Bu, 0x36F234A4u, 0x3B623A12u, 0x3C143AE6u, 0x3FA83F72u, 0x408A407Cu,
    0x42E542E5u, 0x8E548A54u, 0x8E558A55u, 0x8E568A55u, 0x907A8C7Au, 0x907B8C7Au, 0x93C18FC0u, 0x93C28FC0u, 0x957C917Bu,
    0x9B6D9768u, 0x9CC098BBu, 0xA0569C4Eu, 0xA1999D8Cu, 0xA5DFA1C3u, 0xA720A2F8u, 0xA9E6A5AFu, 0xAB73A71Au, 0xAD54A8FAu,
    0xADF1A980u, 0xAE9EAA13u, 0xB3ADAE38u, 0xBBB1B12Cu, 0xBCF1B049u, 0xBDF1AE89u, 0x3F063EBBu, 0x0E540A54u, 0x0E550A55u,
    0x0E560A57u, 0x107A0C7Au, 0x107B0C7Cu, 0x13C10FC2u, 0x13C20FC4u, 0x157C117Du, 0x1B6D1772u, 0x1CC018C5u, 0x20561C5Eu,
    0x21991DA6u, 0x25DF21FBu, 0x27202348u, 0x29E6261Du, 0x2B7327CCu, 0x2DF12A61u, 0x30832D05u, 0x31DE2EB8u, 0x32112EFAu,
    0x334F3051u, 0x35A73337u, 0x3C2C3B1Bu, 0x3FE93FB8u, 0x8E548A54u, 0x8E558A55u, 0x8E568A55u, 0x907A8C7Au, 0x907B8C7Au,
    0x93C18FC0u, 0x93C28FC0u, 0x957C917Bu, 0x9B6D9768u, 0x9CC098BBu, 0xA0569C4Eu, 0xA1999D8Cu, 0xA5DFA1C3u, 0xA720A2F8u,
    0xA9E6A5AFu, 0xAB73A71Au, 0xADF1A981u, 0xB083AC01u, 0xB1DEAD04u, 0xB3FEAE6Bu, 0xB5A7B017u, 0xB750B0BCu, 0xB89FB135u,
    0xBC36B0EEu, 0xBDC7AEE3u, 0xBFFFA9D2u, 0xC01EA930u, 0x39DE3F31u, 0x39DF3F32u, 0x3F923FB5u, 0xBC7A3F30u, 0xBF4C3EBFu,
    0x1379398Cu, 0x137A398Du, 0x17BC398Du, 0x1DED3991u, 0x253539A0u, 0x25F339A4u, 0x276E39A9u, 0x287439B0u, 0x2C1E39CEu,
    0x2C3D39D1u, 0x2DBE39EAu, 0x2F593A05u, 0x2FF03A0Fu, 0x31DB3A50u, 0x3D223E1Du, 0x42084221u, 0x45234525u, 0x463D463Du,
    0x8425398Cu, 0x8426398Cu, 0x8427398Cu, 0x8428398Cu, 0x8429398Cu, 0x842A398Cu, 0x842B398Cu, 0x842C398Cu, 0x842D398Cu,
    0x842E398Cu, 0x842F398Cu, 0x8430398Bu, 0x8431398Bu, 0x8432398Bu, 0x8433398Bu, 0x8434398Bu, 0x8435398Bu, 0x8436398Bu,
    0x8437398Bu, 0x8438398Bu, 0x8439398Bu, 0x843A398Bu, 0x843B398Bu, 0x9443398Bu, 0x9822398Au, 0x9A233988u, 0x9E133986u,
    0x9F143984u, 0xA08B3982u, 0xA20D397Fu, 0xAA773958u, 0xAF24391Du, 0xB6F837FBu, 0xB7AA37B7u, 0xB8DD36F4u, 0xB9923678u,
    0xBAC835B5u, 0xBB893544u, 0xBEA53191u, 0xC3032792u, 0x23FF3C00u, 0x24003C00u, 0x24013BFFu, 0x26EE3BFFu, 0x2A013BFCu,
    0x2B383BF9u, 0x2C213BF7u, 0x2CCE3BF5u, 0x2D953BF0u, 0x31043BCEu, 0x312B3BCBu, 0x35883B1Du, 0x37723A7Du, 0x39D538E7u,
    0x3A673878u, 0x3ACC382Eu, 0x3D643396u, 0x3DDD3226u, 0x3F602E1Au, 0x4173245Eu, 0xA3FF3C00u, 0xA4003C00u, 0xA4013BFFu,
    0xA6EE3BFFu, 0xAA013BFCu, 0xAB383BF9u, 0xAC213BF7u, 0xACCE3BF5u, 0xAD953BF0u, 0xB1043BCEu, 0xB12B3BCBu, 0xB5883B1Du,
    0xB7723A7Du, 0xB9D538E7u, 0xBA673878u, 0xBACC382Eu, 0xBD643396u, 0xBDDD3226u, 0xBF602E1Au, 0xC173245Eu, 0x27FF3400u,
    0x28003400u, 0x280133FFu, 0x2AEE33FFu, 0x2E0133FCu, 0x2F3833F9u, 0x302133F7u, 0x30CE33F5u, 0x319533F0u, 0x350433CEu,
    0x352B33CBu, 0x3988331Du, 0x3B72327Du, 0x3DD530E7u, 0x3E673078u, 0x3ECC302Eu, 0x41642B96u, 0x41DD2A26u, 0x4360261Au,
    0x45731C5Eu, 0xA7FF3400u, 0xA8003400u, 0xA80133FFu, 0xAAEE33FFu, 0xAE0133FCu, 0xAF3833F9u, 0xB02133F7u, 0xB0CE33F5u,
    0xB19533F0u, 0xB50433CEu, 0xB52B33CBu, 0xB988331Du, 0xBB72327Du, 0xBDD530E7u, 0xBE673078u, 0xBECC302Eu, 0xC1642B96u,
    0xC1DD2A26u, 0xC360261Au, 0xC5731C5Eu, 0x3B803F00u, 0x3C403F01u, 0xBB003F00u, 0xBBC03EFFu, 0xBC203EFEu, 0xBC603EFDu,
    0xBC903EFCu, 0xBF253E4Cu, 0xC02BBDC7u, 0x0FFE3800u, 0x0FFF3800u, 0x10003800u, 0x10013801u, 0x16003801u, 0x19003802u,
    0x1B003803u, 0x1C803804u, 0x1D803805u, 0x1E803806u, 0x1F803807u, 0x20403808u, 0x20C03809u, 0x2140380Au, 0x21C0380Bu,
    0x2240380Cu, 0x22C0380Du, 0x2340380Eu, 0x2E9B386Au, 0x369D399Cu, 0x374439C1u, 0x376C39CAu, 0x393D3A72u, 0x3CE93BE8u,
    0x3D1C3BFFu, 0x410F3C65u, 0x48463C01u, 0x8BFC3800u, 0x8BFD3800u, 0x8BFE3800u, 0x8BFF3800u, 0x8C003800u, 0x8C0137FFu,
    0x8C0237FFu, 0x91FF37FFu, 0x920037FFu, 0x920137FEu, 0x950037FEu, 0x970037FDu, 0x988037FCu, 0x998037FBu, 0x9A8037FAu,
    0x9B8037F9u, 0x9C4037F8u, 0x9CC037F7u, 0x9D4037F6u, 0x9DC037F5u, 0x9E4037F4u, 0x9EC037F3u, 0x9F4037F2u, 0x9FC037F1u,
    0xA02037F0u, 0xA06037EFu, 0xA0A037EEu, 0xA0E037EDu, 0xA12037ECu, 0xA16037EBu, 0xA1A037EAu, 0xA1E037E9u, 0xA22037E8u,
    0xA26037E7u, 0xA2A037E6u, 0xA2E037E5u, 0xA32037E4u, 0xAB49378Cu, 0xAC95376Eu, 0xADC63748u, 0xB2F83646u, 0xB49935BBu,
    0xB64334F2u, 0xB9113282u, 0xB96931F3u, 0xBA503093u, 0xBA713062u, 0xBAB72FFDu, 0xBB5B2E40u, 0xBB902DB7u, 0xBC082C7Au,
    0xBC112C4Fu, 0xBCA826E0u, 0xBCEB21A4u, 0xBCFE1EECu, 0xBCFF1EB2u, 0xBD001E79u, 0xBD041D91u, 0xBD0F1A38u, 0xBD111956u,
    0xBD161642u, 0xBD171561u, 0xBD19133Fu, 0xBD1B0F7Fu, 0xBD1C0C01u, 0xBD1D020Fu, 0xBD1E89F0u, 0xBD1F8E73u, 0xBD2192B2u,
    0xBD2495F1u, 0xBD2596CEu, 0xBD29991Fu, 0xBD2D9AD5u, 0xBD2E9B43u, 0xBD2F9BB0u, 0xBD319C45u, 0xBD46A055u, 0xBD54A1C3u,
    0xBD59A244u, 0xBD5CA291u, 0xBD62A329u, 0xBD65A375u, 0xBD6AA3F3u, 0xBDB0A73Du, 0xBDBEA7DAu, 0xBDCDA840u, 0xBDD2A85Bu,
    0xBE3AAA5Eu, 0xBE8DABBBu, 0xBE95ABDBu, 0xBF83AD56u, 0xBFA2AD79u, 0xC14AAE3Du, 0xC154AE37u, 0xC372ABF5u, 0xC3E8AAF0u,
    0xC563A516u, 0xC8A49252u, 0x3DBA3F12u, 0x3F693F87u, 0x0D033800u, 0x0D043801u, 0x13853801u, 0x16443802u, 0x18633804u,
    0x1DF43809u, 0x21CC3813u, 0x244F381Bu, 0x25903824u, 0x27EA3832u, 0x28FA383Fu, 0x2AA03855u, 0x2B55385Du, 0x2BF63865u,
    0x2C883874u, 0x307C38E4u, 0x33583970u, 0x33E2398Bu, 0x36623A6Au, 0x3EA23C7Au, 0x3EAF3C78u, 0x3F713C67u, 0x42943C05u,
    0x89013800u, 0x89023800u, 0x89033800u, 0x890437FFu, 0x890537FFu, 0x8F8437FFu, 0x8F8537FFu, 0x8F8637FEu, 0x924437FEu,
    0x946337FCu, 0x95A437FBu, 0x99F437F7u, 0x9B3537F4u, 0x9DCC37EDu, 0x9F5D37E9u, 0xA44537C9u, 0xA6C737A9u, 0xAC443726u,
    0xACC7370Cu, 0xADA036E1u, 0xAE5136BFu, 0xB20A359Eu, 0xB2313590u, 0xB3DE34ECu, 0xB3FE34E0u, 0xB5933374u, 0xB5AE334Fu,
    0xB5E832FEu, 0xB697320Fu, 0xB7D23077u, 0xB9292A76u, 0xB99B25E8u, 0xB9A72534u, 0xB9B82437u, 0xB9ED1CF1u, 0xB9F81910u,
    0xB9FA1831u, 0xB9FB1783u, 0xB9FD15C6u, 0xB9FE14E8u, 0xB9FF140Au, 0xBA001258u, 0xBA01109Du, 0xBA020DC4u, 0xBA03089Fu,
    0xBA048492u, 0xBA058C97u, 0xBA069005u, 0xBA0791BEu, 0xBA0B964Eu, 0xBA0D9802u, 0xBA0F98DDu, 0xBA169BD9u, 0xBA1C9D31u,
    0xBA1D9D67u, 0xBA1E9D9Du, 0xBA269F4Cu, 0xBA289FB7u, 0xBA3AA1B9u, 0xBA3EA222u, 0xBA5BA488u, 0xBA6EA577u, 0xBA70A590u,
    0xBA7CA626u, 0xBAB0A84Bu, 0xBB26AAD4u, 0xBB91AC6Du, 0xBB95AC76u, 0xBD97B01Fu, 0xC2AD9CC3u, 0xC4068F8Fu, 0x3EFB3F5Cu,
    0xC07DB9D8u, 0x0D033800u, 0x0D043801u, 0x13853801u, 0x16443802u, 0x18633804u, 0x1DF43809u, 0x21CC3813u, 0x25903824u,
    0x27EA3832u, 0x29D7384Bu, 0x2AA03854u, 0x2D013880u, 0x2E26389Cu, 0x2E7738A4u, 0x36833A76u, 0x3F333C6Eu, 0x41A93C13u,
    0x89013800u, 0x89023800u, 0x89033800u, 0x890437FFu, 0x890537FFu, 0x8F8437FFu, 0x8F8537FFu, 0x8F8637FEu, 0x924437FEu,
    0x946337FCu, 0x95A437FBu, 0x99F437F7u, 0x9B3537F4u, 0x9DCC37EDu, 0x9F5D37E9u, 0xA44537C9u, 0xA6C737A9u, 0xA8F53781u,
    0xAE9D36B0u, 0xB1D135B4u, 0xB43234BBu, 0xB6CF31C4u, 0xB77D30E3u, 0xB7B2309Fu, 0xB80B3024u, 0xB82A2FB0u, 0xB9372A0Au,
    0xB9882718u, 0xB9992616u, 0xB9C722DBu, 0xB9CA2284u, 0xB9CB2268u, 0xB9F31BD4u, 0xB9FA18C6u, 0xB9FE1614u, 0xBA001459u,
    0xBA0112F8u, 0xBA02113Eu, 0xBA030F09u, 0xBA040B2Cu, 0xBA050091u, 0xBA068A9Au, 0xBA078EBDu, 0xBA089116u, 0xBA0992CEu,
    0xBA0A9442u, 0xBA0B951Eu, 0xBA0E97AEu, 0xBA0F9845u, 0xBA1399F9u, 0xBA39A177u, 0xBA55A427u, 0xBA87A697u, 0xBAA1A7D1u,
    0xBB6AAC0Du, 0xBD02AFD9u, 0xBEA8AF9Au, 0xC0D8A9A8u, 0xC34795FDu, 0xC39D9236u};
/* clang-format on */

/* The entries of one function and format. */
static const uint32_t *kopt_map_exceptions_(kopt_function f, kopt_format format, unsigned *count) {
    const unsigned *const start = kopt_map_exception_start_ + 2 * KOPT_CAST_(int, f) + (format == KOPT_FP16);
    *count = start[1] - start[0];
    return kopt_map_exception_table_ + start[0];
}

/* The correct result for input x if it has an entry, else y. */
static KOPT_HOST_DEVICE_ uint32_t kopt_map_exception_(const uint32_t *patches, unsigned count, uint32_t x, uint32_t y) {
    unsigned low = 0, high = count;
    while (low < high) {
        const unsigned middle = (low + high) / 2;
        if (patches[middle] >> 16 == x) return patches[middle] & 0xFFFFu;
        if (patches[middle] >> 16 < x)
            low = middle + 1;
        else
            high = middle;
    }
    return y;
}
#endif

/* The stages of a step, as bits. For a pair that a vector kernel hands to the scalar code, the scalar code runs only
   the direction or only the commit stage, and the direction is in a buffer. The final stage comes after the weights are
   stored: slow weights, copies, counts, zeroing the gradient. */
enum { KOPT_DIRECTION_STAGE_ = 1, KOPT_COMMIT_STAGE_ = 2, KOPT_FINAL_STAGE_ = 4, KOPT_ALL_STAGES_ = 7 };
#ifndef KOPT_NT_THRESHOLD_
#define KOPT_NT_THRESHOLD_ (KOPT_CAST_(size_t, 1) << 25) /* bytes of a result from which on stores are non-temporal */
#endif
#define KOPT_TILE_ 256 /* elements, as in a block of 8-bit moments */

/* The order of stages in a specialized loop. Tiled: each stage runs over a whole tile. Fused: the commit stage of a
   pair follows its direction stage at once. Pipelined: the commit stage of a pair follows the direction stage of the
   next pair, so that the processor can work on two divisions at a time. docs/benchmarks.md measures the gain. */
typedef enum kopt_schedule_ { KOPT_TILED_, KOPT_FUSED_, KOPT_PIPELINED_ } kopt_schedule_;

/* Scalar code, which vector code calls for ranges that are too short and for values that are special. */
static void kopt_walk_scalar_(const kopt_job_ *j, size_t begin, size_t end);
static KOPT_UNUSED_ void kopt_step_elements_scalar_(const kopt_job_ *j, size_t i, size_t n, int stages, kopt_byte_ *x,
                                                    kopt_byte_ *y, int even_odd);
static KOPT_UNUSED_ void kopt_store_fp16_buffer_scalar_(kopt_byte_ *to, const kopt_byte_ *row, int square, int moment,
                                                        kopt_rounding how, const kopt_byte_ *base,
                                                        const kopt_byte_ *stride, size_t n);
static void kopt_measure_from_scalar_(const kopt_job_ *j, size_t begin, kopt_byte_ *out);
static void kopt_convert_general_scalar_(const kopt_conversion_ *c, size_t begin, size_t end);
static KOPT_UNUSED_ void kopt_tally_(const kopt_job_ *tile, const kopt_byte_ *update, const kopt_byte_ *weight_before,
                                     const kopt_byte_ *residual_before, size_t size, size_t residual_size);
static void kopt_zero_(kopt_byte_ *p, size_t size);
#ifdef KAHAN_OPT_VMATH
/* Calls the function of the job's table that runs between the stages: y = tanh(y) for Lion, y = atan2(y, x) for
   Adam-atan2, or y = atan(y) if the job says quotient. */
static void kopt_call_rule_function_(const kopt_job_ *j, float *y, const float *x, size_t n);
#endif

/* ---- ONE PASS PER INSTRUCTION SET -------------------------------------------------------------------------------- */

/* The file includes itself once per instruction set. Each inclusion compiles only the vocabulary and the kernels. */

#define KOPT_PASS_SCALAR_ 1
#define KOPT_PASS_SSE2_ 2
#define KOPT_PASS_AVX2_ 3
#define KOPT_PASS_AVX512_ 4
#define KOPT_PASS_NEON_ 5
#define KOPT_PASS_CUDA_ 6 /* read by kahan_opt_cuda.cuh */

#ifdef KOPT_IMPLEMENTING_
#ifdef KOPT_X86_
#define KOPT_PASS_ KOPT_PASS_AVX2_
#include KAHAN_OPT_SELF
#undef KOPT_PASS_
#define KOPT_PASS_ KOPT_PASS_AVX512_
#include KAHAN_OPT_SELF
#undef KOPT_PASS_
#endif

#ifdef KOPT_NEON_
#define KOPT_PASS_ KOPT_PASS_NEON_
#include KAHAN_OPT_SELF
#undef KOPT_PASS_
#endif

#if defined(KOPT_GCC_) && !defined(__OPTIMIZE_SIZE__) && !defined(__CUDACC__) && !defined(KOPT_OPTIMIZED_HERE_) && \
    !defined(__FAST_MATH__) && (defined(KOPT_X86_) || defined(KOPT_NEON_))
/* -O1 for all code after the vector kernels above, which then takes a third less time to compile. Not with -Ofast:
   gcc's pop_options does not restore its macro __FAST_MATH__. */
#define KOPT_COLD_HERE_
#pragma GCC push_options
#pragma GCC optimize("O1")
#endif

#ifdef KOPT_X86_
#define KOPT_PASS_ KOPT_PASS_SSE2_
#include KAHAN_OPT_SELF
#undef KOPT_PASS_
#endif

#define KOPT_PASS_ KOPT_PASS_SCALAR_
#include KAHAN_OPT_SELF
#undef KOPT_PASS_
#endif

#ifndef KOPT_READ_
#error "kahan_opt.h did not read itself: is it a file of its own, without a guard? (CONFIGURATION: KAHAN_OPT_SELF)"
#undef KOPT_IMPLEMENTING_
#endif

#endif /* KAHAN_OPT_IMPLEMENTATION: to be continued after the kernels */
#endif /* KOPT_PASS_ */

#ifdef KOPT_PASS_ /* this inclusion is the pass for one ISA */

/* ================================================================================================================== */
/* VOCABULARIES: the operations from which the kernels are made, for each ISA. Intrinsics live here and nowhere else.

   The table gives the meaning of an operation for one lane: a and b are operands, m is a mask, n is a constant, p is a
   pointer to bytes, of any alignment. An operation marked (X_) is optional: a vocabulary that has it defines X_, and
   otherwise KERNELS makes it from other operations. "Not scalar": vocabularies with ONE_LANE_ do not need it.

   Types
   vf32_                        LANES_ lanes of float (binary32)
   vu32_                        LANES_ lanes of uint32_t, or 2 * LANES_ halves of uint16_t in the order of memory: half
                                2 * i is the lower half of lane i, half 2 * i + 1 the upper one
   vmask_                       LANES_ truth values

   Floats. Each operation rounds once, as in IEEE 754, to nearest even. Its result is opaque to the optimizer, so no
   compiler flag can fuse, reorder or approximate operations.
   splat_(x)                    x, a float: broadcast
   add_ sub_ mul_ div_(a, b)    a + b, a - b, a * b, a / b
   sqrt_(a)                     square root
   masked_sub_(m, a, b)         m ? a - b : b (MASKED_SUB_)
   min_(a, b) max_(a, b)        minimum, maximum; at most one of a and b is negative (MIN_MAX_). The result for 0 and -0
                                depends on the ISA, and so does that for a NaN, except: min_(NaN, b) is b and
                                max_(a, NaN) is NaN if the sign bit of the NaN is 0, and min_(a, b) or max_(b, a) is NaN
                                if a or b is any NaN
   unordered_(a, b)             mask: is a or b a NaN? (UNORDERED_)
   as_u32_(a) as_f32_(a)        bitcast from float to uint32_t, from uint32_t to float
   round_u32_(a)                float to integer, to nearest even; 0 <= a < 2^31
   convert_f32_(a)              int32_t to float, to nearest even

   Words
   isplat_(x)                   x, a uint32_t: broadcast
   isplat_hoisted_(x)           the same, opaque to the optimizer, so that it stays in a register throughout a loop
   iadd_ isub_(a, b)            a + b, a - b modulo 2^32
   and_ or_ xor_(a, b)          a & b, a | b, a ^ b
   shl_ shr_(a, n)              a << n, a >> n (logical); macros
   OPERATORS_                   a macro: vu32_ has the operators of C, and KERNELS defines iadd_ to shr_ with them
   imax_(a, b)                  maximum of int32_t (IMAX_)
   mulhilo_(a, x, &high, &low)  upper and lower word of the 64-bit product a * x; x is one uint32_t for all lanes
   dot_(sum, a, b)              adds the 64-bit products a * b to the 64-bit lanes of the vectors sum[0] and sum[1];
                                which product goes to which lane depends on the ISA. Not scalar, not with TOOLS_ISA_

   Masks
   igt_(a, b) ieq_(a, b)        mask: a > b as int32_t; a == b
   mask_or_(m, m2)              m || m2
   any_true_(m)                 int: not 0 if m is true in any lane
   select_(m, yes, no)          m ? yes : no, of words: blend
   select_or_zero_(m, a)        m ? a : 0

   Memory: LANES_ consecutive elements
   load32_ load16_ load8_(p)    uint32_t; uint16_t, zero-extended; int8_t, sign-extended
   store32_ store16_ store8_(p, a)
                                the lower 32, 16 or 8 bits of a
   nt_store32_ nt_store16_(p, a)
                                non-temporal stores to p, aligned to the size of the store; nt_store16_: a < 2^16
                                (NT_STORES_; without it they are store32_ and store16_)
   nt_fence_()                  orders non-temporal stores before later stores; follows the last one (NT_STORES_)

   fp16, in the lower half of a lane; the upper half is 0
   widen_fp16_(a)               fp16 to float
   narrow_fp16_(a)              float to fp16, to nearest even
   GENERIC_FP16_                a macro: KERNELS makes widen_fp16_ and narrow_fp16_ from the other operations
   load_fp16_(p)                widen_fp16_(load16_(p)) (FP16_)
   round_fp16_(a, &stored)      stored = narrow_fp16_(a); returns widen_fp16_(stored) (FP16_)

   Halves. Not scalar
   add16_ mul16_(a, b)          a + b, a * b modulo 2^16
   max16_(a, b)                 maximum of int16_t
   any_gt16_(a, b)              int: not 0 if a > b as int16_t in any half
   flush16_(a, b)               (a & b) != 0 ? a : 0
   unpack_low16_ unpack_high16_(a)
                                halves 0 .. LANES_ - 1, halves LANES_ .. 2 * LANES_ - 1, zero-extended to words
   pack_high16_(a, b)           the upper halves of all lanes of a, then those of b: narrows two vectors
   interleave_high16_(a, b)     half 2 * i is the upper half of lane i of a, half 2 * i + 1 that of b.
                                With SPECIALIZED_ only
   store8_from16_(p, a)         stores the lower 8 bits of each half: 2 * LANES_ bytes

   Order of random words. Not scalar
   interleave_low_(a, b)        in each 128-bit block: a0 b0 a1 b1, of its words 0 to 3
   interleave_high_(a, b)       in each 128-bit block: a2 b2 a3 b3
   block_of_lane_()             which of LANES_ consecutive Philox blocks a lane computes: lane 4 * i + k has block
                                k * (LANES_ / 4) + i. Then philox_transpose puts the words into the order of memory

   Macros that describe a vocabulary
   ISA_                         the last part of the names of its kernels; K_(step) is kopt_step_avx2_ for avx2
   ISA_TARGET_                  the attribute of a function that enables its instructions
   LANES_ ONE_LANE_             lanes of a vector, a size_t; ONE_LANE_ is defined for scalar code
   OPAQUE_(r)                   hides the value of the vector r from the optimizer; only vocabularies use it
   SPECIALIZED_                 there are specialized loops, in which one vector of a pair can hold the even bf16
                                elements and the other the odd ones
   ONE_PASS_                    the functions of vector mathematics are part of a rule: a step calls no function of a
                                table between its stages
   TOOLS_ISA_                   the ISA whose kernels it uses for StableAdamW's measure, norm, clipping and reduction
   CONVERT_ISA_                 the ISA whose kernel it uses for general conversions                                  */
/* ================================================================================================================== */

/* The name of a function or type of this pass: K_(step) is kopt_step_avx2_ in the pass for AVX2. */
#define K_(name) KOPT_GLUE_(kopt_##name##_, ISA_)
#define KOPT_GLUE_(name, isa) KOPT_GLUE2_(name, isa)
#define KOPT_GLUE2_(name, isa) name##isa##_
#define FN_ static KOPT_FORCE_INLINE_ ISA_TARGET_

/* Names of this pass: the types of the kernels, */
#define scalars_ K_(scalars)
#define philox_key_ K_(philox_key)
#define random_buffer_ K_(random_buffer)
#define constants_ K_(constants)
#define moments_ K_(moments)
#define atan2_reduced_ K_(atan2_reduced)
#define element_ K_(element)
#define pair_ K_(pair)
#define arrays_ K_(arrays)
#define half_pair_ K_(half_pair)
#define random_pair_ K_(random_pair)
#define random_tile_ K_(random_tile)
#define buffers_ K_(buffers)
#define random_counter_ K_(random_counter)
#define norm_sums_ K_(norm_sums)
/* and the vocabulary. */
#define vf32_ K_(vf32)
#define vu32_ K_(vu32)
#define vmask_ K_(vmask)
#define add_ K_(add)
#define sub_ K_(sub)
#define mul_ K_(mul)
#define div_ K_(div)
#define sqrt_ K_(sqrt)
#define masked_sub_ K_(masked_sub)
#define min_ K_(min)
#define max_ K_(max)
#define splat_ K_(splat)
#define as_u32_ K_(as_u32)
#define as_f32_ K_(as_f32)
#define round_u32_ K_(round_u32)
#define convert_f32_ K_(convert_f32)
#define isplat_ K_(isplat)
#define isplat_hoisted_ K_(isplat_hoisted)
#define iadd_ K_(iadd)
#define isub_ K_(isub)
#define and_ K_(iand)
#define or_ K_(ior)
#define xor_ K_(ixor)
#define mulhilo_ K_(mulhilo)
#define add16_ K_(add16)
#define mul16_ K_(mul16)
#define dot_ K_(dot)
#define igt_ K_(igt)
#define ieq_ K_(ieq)
#define mask_or_ K_(mask_or)
#define any_true_ K_(any_true)
#define select_ K_(select)
#define select_or_zero_ K_(select_or_zero)
#define load32_ K_(load32)
#define load16_ K_(load16)
#define load8_ K_(load8)
#define store32_ K_(store32)
#define store16_ K_(store16)
#define store8_ K_(store8)
#define widen_fp16_ K_(widen_fp16)
#define narrow_fp16_ K_(narrow_fp16)
#define block_of_lane_ K_(block_of_lane)
#define interleave_low_ K_(interleave_low)
#define interleave_high_ K_(interleave_high)
#define unpack_low16_ K_(unpack_low16)
#define unpack_high16_ K_(unpack_high16)
#define pack_high16_ K_(pack_high16)
#define imax_ K_(imax)
#define unordered_ K_(unordered)
#define load_fp16_ K_(load_fp16)
#define round_fp16_ K_(round_fp16)
#define store8_from16_ K_(store8_from16)
#define interleave_high16_ K_(interleave_high16)
#define flush16_ K_(flush16)
#define max16_ K_(max16)
#define any_gt16_ K_(any_gt16)

/* ---- scalar: one lane ---- */

/* The reference: every other vocabulary gives the same bits. */
#if KOPT_PASS_ == KOPT_PASS_SCALAR_
#define ISA_ scalar
#define ISA_TARGET_
#define LANES_ KOPT_CAST_(size_t, 1)
#define ONE_LANE_ 1
typedef float vf32_;
typedef uint32_t vu32_;
typedef int vmask_;

FN_ vf32_ splat_(float x) { return x; }
FN_ vf32_ add_(vf32_ a, vf32_ b) { return kopt_add_(a, b); }
FN_ vf32_ sub_(vf32_ a, vf32_ b) { return kopt_sub_(a, b); }
FN_ vf32_ mul_(vf32_ a, vf32_ b) { return kopt_mul_(a, b); }
FN_ vf32_ div_(vf32_ a, vf32_ b) { return kopt_div_(a, b); }
FN_ vf32_ sqrt_(vf32_ a) { return kopt_sqrt_(a); }
FN_ vu32_ as_u32_(vf32_ a) { return kopt_as_u32_(a); }
FN_ vf32_ as_f32_(vu32_ a) { return kopt_as_f32_(a); }
FN_ vf32_ convert_f32_(vu32_ a) { return KOPT_CAST_(float, KOPT_CAST_(int32_t, a)); }
FN_ vu32_ round_u32_(vf32_ a) { /* 0 <= a < 2^31 */
    uint32_t u = kopt_as_u32_(a), exponent = u >> 23, significand = (u & 0x007FFFFFu) | 0x00800000u,
             shift = 150 - exponent;
    if (exponent < 126) return 0; /* a < 1/2 */
    if (exponent >= 150) return significand << (exponent - 150);
    /* a = significand / 2^shift: add just less than a half, or a half if the integer below is odd */
    return (significand + (KOPT_CAST_(uint32_t, 1) << (shift - 1)) - 1 + ((significand >> shift) & 1u)) >> shift;
}
FN_ vu32_ isplat_(uint32_t a) { return a; }
FN_ vu32_ isplat_hoisted_(uint32_t a) { return a; }
#define OPERATORS_ 1
FN_ void mulhilo_(vu32_ a, uint32_t b, vu32_ *high, vu32_ *low) {
    uint64_t product = KOPT_CAST_(uint64_t, a) * b;
    *high = KOPT_CAST_(uint32_t, product >> 32);
    *low = KOPT_CAST_(uint32_t, product & 0xFFFFFFFFu);
}
FN_ vmask_ igt_(vu32_ a, vu32_ b) { return KOPT_CAST_(int32_t, a) > KOPT_CAST_(int32_t, b); }
FN_ vmask_ ieq_(vu32_ a, vu32_ b) { return a == b; }
FN_ vmask_ mask_or_(vmask_ a, vmask_ b) { return a | b; }
FN_ int any_true_(vmask_ a) { return a; }
FN_ vu32_ select_(vmask_ m, vu32_ yes, vu32_ no) { return m ? yes : no; }
FN_ vu32_ select_or_zero_(vmask_ m, vu32_ a) { return m ? a : 0; }
FN_ vu32_ load32_(const kopt_byte_ *p) { return kopt_load32_(p); }
FN_ vu32_ load16_(const kopt_byte_ *p) { return kopt_load16_(p); }
FN_ vu32_ load8_(const kopt_byte_ *p) { return (KOPT_CAST_(uint32_t, *p) ^ 0x80u) - 0x80u; } /* sign-extends */
FN_ void store32_(kopt_byte_ *p, vu32_ a) { kopt_store32_(p, a); }
FN_ void store16_(kopt_byte_ *p, vu32_ a) { kopt_store16_(p, a); }
FN_ void store8_(kopt_byte_ *p, vu32_ a) { *p = KOPT_CAST_(kopt_byte_, a & 0xFFu); }
static KOPT_NOINLINE_ vf32_ widen_fp16_(vu32_ a) { return kopt_f32_from_fp16(KOPT_CAST_(kopt_fp16, a)); }
static KOPT_NOINLINE_ vu32_ narrow_fp16_(vf32_ a) { return kopt_fp16_from_f32(a); }
FN_ vu32_ block_of_lane_(void) { return 0; }

/* ---- SSE2: 4 lanes ---- */

/* For processors without AVX2 (before 2013): small code rather than fast code. */
#elif KOPT_PASS_ == KOPT_PASS_SSE2_
#define ISA_ sse2
#define TOOLS_ISA_ scalar
#define ISA_TARGET_ KOPT_TARGET_("sse2")
#define LANES_ KOPT_CAST_(size_t, 4)
#define GENERIC_FP16_ 1
typedef __m128 vf32_;
typedef __m128i vu32_;
typedef __m128i vmask_;

#ifdef KOPT_GNU_
#define OPAQUE_(r) __asm__("" : "+x"(r))
#define INFIX_OR_(a, operation, b, intrinsic) ((a)operation(b)) /* gcc -m32 -Ofast refuses to inline the intrinsics */
#else
#define OPAQUE_(r) ((void)0)
#define INFIX_OR_(a, operation, b, intrinsic) intrinsic(a, b)
#endif

FN_ vf32_ splat_(float x) { return _mm_castsi128_ps(_mm_set1_epi32(KOPT_CAST_(int, kopt_as_u32_(x)))); }
FN_ vf32_ add_(vf32_ a, vf32_ b) {
    vf32_ r = INFIX_OR_(a, +, b, _mm_add_ps);
    OPAQUE_(r);
    return r;
}
FN_ vf32_ sub_(vf32_ a, vf32_ b) {
    vf32_ r = INFIX_OR_(a, -, b, _mm_sub_ps);
    OPAQUE_(r);
    return r;
}
FN_ vf32_ mul_(vf32_ a, vf32_ b) {
    vf32_ r = INFIX_OR_(a, *, b, _mm_mul_ps);
    OPAQUE_(r);
    return r;
}
/* For gcc and clang div_ and sqrt_ are assembly in all vocabularies: -Ofast replaces the intrinsics by estimates. */
FN_ vf32_ div_(vf32_ a, vf32_ b) {
#if defined(KOPT_GNU_) && defined(__AVX__) /* with -mavx the legacy encoding would stall */
    __asm__("vdivps {%1, %0, %0|%0, %0, %1}" : "+x"(a) : "x"(b));
    return a;
#elif defined(KOPT_GNU_)
    __asm__("divps {%1, %0|%0, %1}" : "+x"(a) : "x"(b));
    return a;
#else
    return _mm_div_ps(a, b);
#endif
}
FN_ vf32_ sqrt_(vf32_ a) {
#if defined(KOPT_GNU_) && defined(__AVX__)
    __asm__("vsqrtps {%0, %0|%0, %0}" : "+x"(a));
    return a;
#elif defined(KOPT_GNU_)
    __asm__("sqrtps {%0, %0|%0, %0}" : "+x"(a));
    return a;
#else
    return _mm_sqrt_ps(a);
#endif
}
FN_ vu32_ as_u32_(vf32_ a) { /* opaque: see kopt_as_u32_ */
    vu32_ r = _mm_castps_si128(a);
    OPAQUE_(r);
    return r;
}
FN_ vf32_ as_f32_(vu32_ a) { return _mm_castsi128_ps(a); }
FN_ vu32_ round_u32_(vf32_ a) { return _mm_cvtps_epi32(a); }
FN_ vf32_ convert_f32_(vu32_ a) { return _mm_cvtepi32_ps(a); }
FN_ vu32_ isplat_(uint32_t a) { return _mm_set1_epi32(KOPT_CAST_(int, a)); }
FN_ vu32_ isplat_hoisted_(uint32_t a) {
    vu32_ r = isplat_(a);
    OPAQUE_(r);
    return r;
}
FN_ vu32_ iadd_(vu32_ a, vu32_ b) { return _mm_add_epi32(a, b); }
FN_ vu32_ isub_(vu32_ a, vu32_ b) { return _mm_sub_epi32(a, b); }
FN_ vu32_ and_(vu32_ a, vu32_ b) { return _mm_and_si128(a, b); }
FN_ vu32_ or_(vu32_ a, vu32_ b) { return _mm_or_si128(a, b); }
FN_ vu32_ xor_(vu32_ a, vu32_ b) { return _mm_xor_si128(a, b); }
#define shl_(a, n) _mm_slli_epi32(a, n)
#define shr_(a, n) _mm_srli_epi32(a, n)
FN_ vu32_ add16_(vu32_ a, vu32_ b) { return _mm_add_epi16(a, b); }
FN_ vu32_ mul16_(vu32_ a, vu32_ b) { return _mm_mullo_epi16(a, b); }
FN_ void mulhilo_(vu32_ a, uint32_t b, vu32_ *high, vu32_ *low) {
    vu32_ factor = isplat_(b), even = _mm_mul_epu32(a, factor), odd = _mm_mul_epu32(_mm_srli_epi64(a, 32), factor);
    /* even: products of lanes 0 and 2, odd: of lanes 1 and 3. 0x08 takes their lower words, 0x0D their upper words. */
    *low = _mm_unpacklo_epi32(_mm_shuffle_epi32(even, 0x08), _mm_shuffle_epi32(odd, 0x08));
    *high = _mm_unpacklo_epi32(_mm_shuffle_epi32(even, 0x0D), _mm_shuffle_epi32(odd, 0x0D));
}
FN_ vmask_ igt_(vu32_ a, vu32_ b) { return _mm_cmpgt_epi32(a, b); }
FN_ vmask_ ieq_(vu32_ a, vu32_ b) { return _mm_cmpeq_epi32(a, b); }
FN_ vmask_ mask_or_(vmask_ a, vmask_ b) { return _mm_or_si128(a, b); }
FN_ int any_true_(vmask_ a) { return _mm_movemask_epi8(a) != 0; }
FN_ vu32_ select_(vmask_ m, vu32_ yes, vu32_ no) { /* (m & yes) | (~m & no) */
    return _mm_or_si128(_mm_and_si128(m, yes), _mm_andnot_si128(m, no));
}
FN_ vu32_ select_or_zero_(vmask_ m, vu32_ a) { return _mm_and_si128(m, a); }
FN_ vu32_ load32_(const kopt_byte_ *p) { return _mm_loadu_si128(KOPT_CONST_POINTER_(const __m128i *, p)); }
FN_ vu32_ load16_(const kopt_byte_ *p) {
    return _mm_unpacklo_epi16(_mm_loadl_epi64(KOPT_CONST_POINTER_(const __m128i *, p)), _mm_setzero_si128());
}
FN_ vu32_ load8_(const kopt_byte_ *p) {
    vu32_ a = _mm_cvtsi32_si128(KOPT_CAST_(int, kopt_load32_(p)));
    a = _mm_unpacklo_epi8(a, a); /* each byte four times in its word, then an arithmetic shift: sign-extends */
    return _mm_srai_epi32(_mm_unpacklo_epi16(a, a), 24);
}
FN_ void store32_(kopt_byte_ *p, vu32_ a) { _mm_storeu_si128(KOPT_POINTER_(__m128i *, p), a); }
FN_ void store16_(kopt_byte_ *p, vu32_ a) {
    a = _mm_srai_epi32(_mm_slli_epi32(a, 16), 16); /* sign-extends, so that packs does not saturate */
    _mm_storel_epi64(KOPT_POINTER_(__m128i *, p), _mm_packs_epi32(a, a));
}
FN_ void store8_(kopt_byte_ *p, vu32_ a) {
    a = _mm_and_si128(a, isplat_(0xFF));
    a = _mm_packs_epi32(a, a);
    kopt_store32_(p, KOPT_CAST_(uint32_t, _mm_cvtsi128_si32(_mm_packus_epi16(a, a))));
}
FN_ vu32_ block_of_lane_(void) { return _mm_setr_epi32(0, 1, 2, 3); }
FN_ vu32_ interleave_low_(vu32_ a, vu32_ b) { return _mm_unpacklo_epi32(a, b); }
FN_ vu32_ interleave_high_(vu32_ a, vu32_ b) { return _mm_unpackhi_epi32(a, b); }
FN_ vu32_ unpack_low16_(vu32_ a) { return _mm_unpacklo_epi16(a, _mm_setzero_si128()); }
FN_ vu32_ unpack_high16_(vu32_ a) { return _mm_unpackhi_epi16(a, _mm_setzero_si128()); }
/* Arithmetic shifts, so that packs does not saturate. */
FN_ vu32_ pack_high16_(vu32_ a, vu32_ b) { return _mm_packs_epi32(_mm_srai_epi32(a, 16), _mm_srai_epi32(b, 16)); }
FN_ void store8_from16_(kopt_byte_ *p, vu32_ a) {
    a = _mm_and_si128(a, isplat_(0x00FF00FF));
    _mm_storel_epi64(KOPT_POINTER_(__m128i *, p), _mm_packus_epi16(a, a));
}
FN_ vu32_ flush16_(vu32_ a, vu32_ exponent) { /* ~((a & exponent) == 0) & a */
    return _mm_andnot_si128(_mm_cmpeq_epi16(_mm_and_si128(a, exponent), _mm_setzero_si128()), a);
}
FN_ vu32_ max16_(vu32_ a, vu32_ b) { return _mm_max_epi16(a, b); }
FN_ int any_gt16_(vu32_ a, vu32_ limit) { return _mm_movemask_epi8(_mm_cmpgt_epi16(a, limit)) != 0; }

/* ---- AVX2 and F16C: 8 lanes ---- */
#elif KOPT_PASS_ == KOPT_PASS_AVX2_
#define ISA_ avx2
#define ISA_TARGET_ KOPT_TARGET_("avx2,f16c")
#define LANES_ KOPT_CAST_(size_t, 8)
#define SPECIALIZED_ 1
typedef __m256 vf32_;
typedef __m256i vu32_;
typedef __m256i vmask_;

#ifdef KOPT_GNU_
#define OPAQUE_(r) __asm__("" : "+x"(r))
#else
#define OPAQUE_(r) ((void)0)
#endif

FN_ vf32_ splat_(float x) { return _mm256_set1_ps(x); }
FN_ vf32_ add_(vf32_ a, vf32_ b) {
    vf32_ r = _mm256_add_ps(a, b);
    OPAQUE_(r);
    return r;
}
FN_ vf32_ sub_(vf32_ a, vf32_ b) {
    vf32_ r = _mm256_sub_ps(a, b);
    OPAQUE_(r);
    return r;
}
FN_ vf32_ mul_(vf32_ a, vf32_ b) {
    vf32_ r = _mm256_mul_ps(a, b);
    OPAQUE_(r);
    return r;
}
#ifdef KOPT_GNU_ /* -Ofast would estimate quotients, and swap the operands of min and max */
#define BINARY_OP_(name, operation, intrinsic)                                    \
    FN_ vf32_ name(vf32_ a, vf32_ b) {                                            \
        vf32_ r;                                                                  \
        __asm__(operation " {%2, %1, %0|%0, %1, %2}" : "=x"(r) : "x"(a), "x"(b)); \
        return r;                                                                 \
    }
#else
#define BINARY_OP_(name, operation, intrinsic) \
    FN_ vf32_ name(vf32_ a, vf32_ b) { return intrinsic(a, b); }
#endif
#define MIN_MAX_ 1 /* one instruction instead of a comparison and a blend */
BINARY_OP_(div_, "vdivps", _mm256_div_ps)
BINARY_OP_(min_, "vminps", _mm256_min_ps)
BINARY_OP_(max_, "vmaxps", _mm256_max_ps)
#undef BINARY_OP_
FN_ vf32_ sqrt_(vf32_ a) {
#ifdef KOPT_GNU_
    vf32_ r;
    __asm__("vsqrtps {%1, %0|%0, %1}" : "=x"(r) : "x"(a));
    return r;
#else
    return _mm256_sqrt_ps(a);
#endif
}
FN_ vu32_ as_u32_(vf32_ a) { /* opaque: see kopt_as_u32_ */
    vu32_ r = _mm256_castps_si256(a);
    OPAQUE_(r);
    return r;
}
FN_ vf32_ as_f32_(vu32_ a) { return _mm256_castsi256_ps(a); }
FN_ vu32_ round_u32_(vf32_ a) { return _mm256_cvtps_epi32(a); }
FN_ vf32_ convert_f32_(vu32_ a) { return _mm256_cvtepi32_ps(a); }
FN_ vu32_ isplat_(uint32_t a) { return _mm256_set1_epi32(KOPT_CAST_(int, a)); }
FN_ vu32_ isplat_hoisted_(uint32_t a) {
    vu32_ r = isplat_(a);
    OPAQUE_(r);
    return r;
}
FN_ vu32_ iadd_(vu32_ a, vu32_ b) { return _mm256_add_epi32(a, b); }
FN_ vu32_ isub_(vu32_ a, vu32_ b) { return _mm256_sub_epi32(a, b); }
FN_ vu32_ and_(vu32_ a, vu32_ b) { return _mm256_and_si256(a, b); }
FN_ vu32_ or_(vu32_ a, vu32_ b) { return _mm256_or_si256(a, b); }
FN_ vu32_ xor_(vu32_ a, vu32_ b) { return _mm256_xor_si256(a, b); }
#define shl_(a, n) _mm256_slli_epi32(a, n)
#define shr_(a, n) _mm256_srli_epi32(a, n)
FN_ vu32_ add16_(vu32_ a, vu32_ b) { return _mm256_add_epi16(a, b); }
FN_ vu32_ mul16_(vu32_ a, vu32_ b) { return _mm256_mullo_epi16(a, b); }
FN_ void mulhilo_(vu32_ a, uint32_t b, vu32_ *high, vu32_ *low) {
    vu32_ factor = isplat_(b), even = _mm256_mul_epu32(a, factor);
    vu32_ odd = _mm256_mul_epu32(_mm256_srli_epi64(a, 32), factor);
    /* even: products of the even lanes, odd: of the odd lanes. 0xAA takes the odd words from the second operand. */
    *low = _mm256_blend_epi32(even, _mm256_slli_epi64(odd, 32), 0xAA);
    *high = _mm256_blend_epi32(_mm256_srli_epi64(even, 32), odd, 0xAA);
}
FN_ void dot_(vu32_ sum[2], vu32_ a, vu32_ b) {
    sum[0] = _mm256_add_epi64(sum[0], _mm256_mul_epu32(a, b)); /* even lanes; next line: odd lanes */
    sum[1] = _mm256_add_epi64(sum[1], _mm256_mul_epu32(_mm256_srli_epi64(a, 32), _mm256_srli_epi64(b, 32)));
}
FN_ vmask_ igt_(vu32_ a, vu32_ b) { return _mm256_cmpgt_epi32(a, b); }
FN_ vmask_ ieq_(vu32_ a, vu32_ b) { return _mm256_cmpeq_epi32(a, b); }
FN_ vmask_ mask_or_(vmask_ a, vmask_ b) { return _mm256_or_si256(a, b); }
FN_ int any_true_(vmask_ a) { return _mm256_movemask_epi8(a) != 0; }
FN_ vu32_ select_(vmask_ m, vu32_ yes, vu32_ no) { return _mm256_blendv_epi8(no, yes, m); }
FN_ vu32_ select_or_zero_(vmask_ m, vu32_ a) { return _mm256_and_si256(m, a); }
FN_ vu32_ load32_(const kopt_byte_ *p) { return _mm256_loadu_si256(KOPT_CONST_POINTER_(const __m256i *, p)); }
FN_ vu32_ load16_(const kopt_byte_ *p) {
    return _mm256_cvtepu16_epi32(_mm_loadu_si128(KOPT_CONST_POINTER_(const __m128i *, p)));
}
FN_ vu32_ load8_(const kopt_byte_ *p) {
    return _mm256_cvtepi8_epi32(_mm_loadl_epi64(KOPT_CONST_POINTER_(const __m128i *, p)));
}
FN_ void store32_(kopt_byte_ *p, vu32_ a) { _mm256_storeu_si256(KOPT_POINTER_(__m256i *, p), a); }
/* packus narrows each 128-bit block by itself: the result is in 64-bit quarters 0 and 2, which permute4x64 with 0x08
   joins. packus saturates: the words must be zero-extended. */
FN_ void store16_(kopt_byte_ *p, vu32_ a) {
    a = _mm256_and_si256(a, isplat_(0xFFFF));
    a = _mm256_permute4x64_epi64(_mm256_packus_epi32(a, a), 0x08);
    _mm_storeu_si128(KOPT_POINTER_(__m128i *, p), _mm256_castsi256_si128(a));
}
FN_ void store8_(kopt_byte_ *p, vu32_ a) {
    a = _mm256_and_si256(a, isplat_(0xFF));
    a = _mm256_permute4x64_epi64(_mm256_packus_epi32(a, a), 0x08);
    _mm_storel_epi64(KOPT_POINTER_(__m128i *, p),
                     _mm_packus_epi16(_mm256_castsi256_si128(a), _mm256_castsi256_si128(a)));
}
FN_ vf32_ widen_fp16_(vu32_ a) {
    a = _mm256_permute4x64_epi64(_mm256_packus_epi32(a, a), 0x08);
    return _mm256_cvtph_ps(_mm256_castsi256_si128(a));
}
FN_ vu32_ narrow_fp16_(vf32_ a) { return _mm256_cvtepu16_epi32(_mm256_cvtps_ph(a, 0)); } /* 0: to nearest even */
FN_ vu32_ block_of_lane_(void) { return _mm256_setr_epi32(0, 2, 4, 6, 1, 3, 5, 7); }
FN_ vu32_ interleave_low_(vu32_ a, vu32_ b) { return _mm256_unpacklo_epi32(a, b); }
FN_ vu32_ interleave_high_(vu32_ a, vu32_ b) { return _mm256_unpackhi_epi32(a, b); }
#define NT_STORES_ 1
FN_ void K_(nt_store32)(kopt_byte_ *p, vu32_ a) { _mm256_stream_si256(KOPT_POINTER_(__m256i *, p), a); }
FN_ void K_(nt_store16)(kopt_byte_ *p, vu32_ a) {
    __m256i x = _mm256_packus_epi32(a, a);
    _mm_stream_si128(KOPT_POINTER_(__m128i *, p), _mm256_castsi256_si128(_mm256_permute4x64_epi64(x, 0x08)));
}
FN_ void K_(nt_fence)(void) { _mm_sfence(); }
FN_ void store8_from16_(kopt_byte_ *p, vu32_ a) {
    a = _mm256_and_si256(a, isplat_(0x00FF00FF));
    a = _mm256_permute4x64_epi64(_mm256_packus_epi16(a, a), 0x08);
    _mm_storeu_si128(KOPT_POINTER_(__m128i *, p), _mm256_castsi256_si128(a));
}
FN_ vu32_ interleave_high16_(vu32_ even, vu32_ odd) { /* even >> 16 | (odd & 0xFFFF0000) */
    return _mm256_blend_epi16(_mm256_srli_epi32(even, 16), odd, 0xAA);
}
FN_ vu32_ flush16_(vu32_ a, vu32_ exponent) { /* ~((a & exponent) == 0) & a */
    return _mm256_andnot_si256(_mm256_cmpeq_epi16(_mm256_and_si256(a, exponent), _mm256_setzero_si256()), a);
}
FN_ vu32_ max16_(vu32_ a, vu32_ b) { return _mm256_max_epi16(a, b); }
FN_ int any_gt16_(vu32_ a, vu32_ limit) { return _mm256_movemask_epi8(_mm256_cmpgt_epi16(a, limit)) != 0; }
FN_ vu32_ unpack_low16_(vu32_ a) { return _mm256_cvtepu16_epi32(_mm256_castsi256_si128(a)); }
FN_ vu32_ unpack_high16_(vu32_ a) { return _mm256_cvtepu16_epi32(_mm256_extracti128_si256(a, 1)); }
FN_ vu32_ pack_high16_(vu32_ a, vu32_ b) { /* packus gives quarters a0 b0 a1 b1; 0xD8 makes them a0 a1 b0 b1 */
    return _mm256_permute4x64_epi64(_mm256_packus_epi32(_mm256_srli_epi32(a, 16), _mm256_srli_epi32(b, 16)), 0xD8);
}
#define IMAX_ 1
FN_ vu32_ imax_(vu32_ a, vu32_ b) { return _mm256_max_epi32(a, b); }
#define FP16_ 1
FN_ vf32_ load_fp16_(const kopt_byte_ *p) {
    return _mm256_cvtph_ps(_mm_loadu_si128(KOPT_CONST_POINTER_(const __m128i *, p)));
}
FN_ vf32_ round_fp16_(vf32_ x, vu32_ *stored) {
    const __m128i half = _mm256_cvtps_ph(x, 0);
    *stored = _mm256_cvtepu16_epi32(half);
    return _mm256_cvtph_ps(half);
}

/* ---- AVX-512 F, BW, DQ, VL: 16 lanes ---- */
#elif KOPT_PASS_ == KOPT_PASS_AVX512_
#define ISA_ avx512
#define TOOLS_ISA_ avx2
#define CONVERT_ISA_ avx2 /* saves code: general conversions are not a hot path */
#define ISA_TARGET_ KOPT_TARGET_("avx512f,avx512bw,avx512dq,avx512vl,avx2,f16c")
#define LANES_ KOPT_CAST_(size_t, 16)
#define SPECIALIZED_ 1
#define MASKED_SUB_ 1 /* one instruction */
#define MIN_MAX_ 1
#define NT_STORES_ 1
#ifdef KOPT_GNU_
#define OPAQUE_(r) __asm__("" : "+v"(r))
#else
#define OPAQUE_(r) ((void)0)
#endif

/* For gcc: vector extensions, and inline assembly where they lack an operation, because gcc's headers for AVX-512 take
   long to compile. Assembly has both syntaxes, {AT&T|Intel}. "Yk" is a mask register; with {z} lanes become 0 where the
   mask is 0. */
#ifdef KOPT_GCC_
typedef float vf32_ __attribute__((__vector_size__(64)));
typedef uint32_t vu32_ __attribute__((__vector_size__(64)));
typedef int K_(ints) __attribute__((__vector_size__(64)));
typedef uint16_t vmask_;
typedef uint32_t K_(bytes32) __attribute__((__vector_size__(32)));
typedef uint32_t K_(bytes16) __attribute__((__vector_size__(16)));
typedef uint32_t K_(any64) __attribute__((__vector_size__(64), __aligned__(1), __may_alias__));
typedef uint32_t K_(any32) __attribute__((__vector_size__(32), __aligned__(1), __may_alias__));
typedef uint32_t K_(any16) __attribute__((__vector_size__(16), __aligned__(1), __may_alias__));
#define AT_(type, p) (*KOPT_POINTER_(K_(type) *, p))
#define CONST_AT_(type, p) (*KOPT_CONST_POINTER_(const K_(type) *, p))
#define UNARY_OP_(result, name, operation, given)                 \
    FN_ result name(given a) {                                    \
        result r;                                                 \
        __asm__(operation " {%1, %0|%0, %1}" : "=v"(r) : "v"(a)); \
        return r;                                                 \
    }
#define BINARY_OP_(result, kind, name, operation, given)                          \
    FN_ result name(given a, given b) {                                           \
        result r;                                                                 \
        __asm__(operation " {%2, %1, %0|%0, %1, %2}" : kind(r) : "v"(a), "v"(b)); \
        return r;                                                                 \
    }
#define LOAD_OP_(name, operation, type)                                            \
    FN_ vu32_ name(const kopt_byte_ *p) {                                          \
        vu32_ r;                                                                   \
        __asm__(operation " {%1, %0|%0, %1}" : "=v"(r) : "m"(CONST_AT_(type, p))); \
        return r;                                                                  \
    }

FN_ vf32_ splat_(float x) {
    const vf32_ r = {x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x};
    return r;
}
FN_ vf32_ add_(vf32_ a, vf32_ b) {
    vf32_ r = a + b;
    OPAQUE_(r);
    return r;
}
FN_ vf32_ sub_(vf32_ a, vf32_ b) {
    vf32_ r = a - b;
    OPAQUE_(r);
    return r;
}
FN_ vf32_ mul_(vf32_ a, vf32_ b) {
    vf32_ r = a * b;
    OPAQUE_(r);
    return r;
}
BINARY_OP_(vf32_, "=v", div_, "vdivps", vf32_)
UNARY_OP_(vf32_, sqrt_, "vsqrtps", vf32_)
BINARY_OP_(vf32_, "=v", min_, "vminps", vf32_)
BINARY_OP_(vf32_, "=v", max_, "vmaxps", vf32_)
FN_ vu32_ as_u32_(vf32_ a) { /* opaque: see kopt_as_u32_ */
    vu32_ r = KOPT_VECTOR_CAST_(vu32_, a);
    OPAQUE_(r);
    return r;
}
FN_ vf32_ as_f32_(vu32_ a) { return KOPT_VECTOR_CAST_(vf32_, a); }
UNARY_OP_(vu32_, round_u32_, "vcvtps2dq", vf32_)
UNARY_OP_(vf32_, convert_f32_, "vcvtdq2ps", vu32_)
FN_ vu32_ isplat_(uint32_t a) {
    const vu32_ r = {a, a, a, a, a, a, a, a, a, a, a, a, a, a, a, a};
    return r;
}
#define OPERATORS_ 1
BINARY_OP_(vu32_, "=v", add16_, "vpaddw", vu32_)
BINARY_OP_(vu32_, "=v", mul16_, "vpmullw", vu32_)
BINARY_OP_(vu32_, "=v", K_(mul64), "vpmuludq", vu32_) /* 64-bit products of the even words */
FN_ vu32_ K_(odd_words)(vu32_ a) {                    /* each 64 bits >> 32: the odd words in the even lanes */
    vu32_ r;
    __asm__("vpsrlq {$32, %1, %0|%0, %1, 32}" : "=v"(r) : "v"(a));
    return r;
}
FN_ vu32_ K_(blend_swapped)(vu32_ a, vmask_ m, vu32_ b) { /* lane i: m ? b[i ^ 1] : a[i] */
    __asm__("vpshufd {$0xB1, %2, %0%{%1%}|%0%{%1%}, %2, 0xB1}" : "+v"(a) : "Yk"(m), "v"(b));
    return a;
}
FN_ void mulhilo_(vu32_ a, uint32_t b, vu32_ *high, vu32_ *low) {
    vu32_ factor = isplat_(b), even = K_(mul64)(a, factor), odd = K_(mul64)(K_(odd_words)(a), factor);
    *low = K_(blend_swapped)(even, 0xAAAA, odd);  /* lower words of odd into the odd lanes   */
    *high = K_(blend_swapped)(odd, 0x5555, even); /* upper words of even into the even lanes */
}
BINARY_OP_(vmask_, "=Yk", igt_, "vpcmpgtd", vu32_)
BINARY_OP_(vmask_, "=Yk", ieq_, "vpcmpeqd", vu32_)
/* A builtin, not assembly: gcc merges it with other operations into masked instructions. */
FN_ vu32_ select_(vmask_ m, vu32_ yes, vu32_ no) {
    return KOPT_VECTOR_CAST_(
        vu32_, __builtin_ia32_blendmd_512_mask(KOPT_VECTOR_CAST_(K_(ints), no), KOPT_VECTOR_CAST_(K_(ints), yes), m));
}
FN_ vf32_ masked_sub_(vmask_ m, vf32_ a, vf32_ b) {
    vf32_ r = b; /* stays where m is 0 */
    __asm__("vsubps {%2, %1, %0%{%3%}|%0%{%3%}, %1, %2}" : "+v"(r) : "v"(a), "v"(b), "Yk"(m));
    return r;
}
FN_ vu32_ select_or_zero_(vmask_ m, vu32_ a) {
    vu32_ r;
    __asm__("vmovdqa32 {%1, %0%{%2%}%{z%}|%0%{%2%}%{z%}, %1}" : "=v"(r) : "v"(a), "Yk"(m));
    return r;
}
/* vpmovzx, vpmovsx: zero-extend, sign-extend. vpmovdw, vpmovdb, vpmovwb: the lower part of each element. */
FN_ vu32_ load32_(const kopt_byte_ *p) { return CONST_AT_(any64, p); }
LOAD_OP_(load16_, "vpmovzxwd", any32)
LOAD_OP_(load8_, "vpmovsxbd", any16)
UNARY_OP_(K_(bytes32), K_(truncate_to16), "vpmovdw", vu32_)
UNARY_OP_(K_(bytes16), K_(truncate_to8), "vpmovdb", vu32_)
UNARY_OP_(K_(bytes32), K_(truncate16_to8), "vpmovwb", vu32_)
UNARY_OP_(vu32_, K_(zero_extend16), "vpmovzxwd", K_(bytes32))
FN_ void store32_(kopt_byte_ *p, vu32_ a) { AT_(any64, p) = a; }
FN_ void store16_(kopt_byte_ *p, vu32_ a) { AT_(any32, p) = K_(truncate_to16)(a); }
FN_ void store8_(kopt_byte_ *p, vu32_ a) { AT_(any16, p) = K_(truncate_to8)(a); }
FN_ void store8_from16_(kopt_byte_ *p, vu32_ a) { AT_(any32, p) = K_(truncate16_to8)(a); }
FN_ vf32_ widen_fp16_(vu32_ a) {
    vf32_ r;
    __asm__("vcvtph2ps {%1, %0|%0, %1}" : "=v"(r) : "v"(K_(truncate_to16)(a)));
    return r;
}
FN_ vu32_ narrow_fp16_(vf32_ a) {
    K_(bytes32) r;
    __asm__("vcvtps2ph {$0, %1, %0|%0, %1, 0}" : "=v"(r) : "v"(a));
    return K_(zero_extend16)(r);
}
FN_ vu32_ block_of_lane_(void) {
    const vu32_ r = {0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15};
    return r;
}
BINARY_OP_(vu32_, "=v", interleave_low_, "vpunpckldq", vu32_)
BINARY_OP_(vu32_, "=v", interleave_high_, "vpunpckhdq", vu32_)
FN_ void K_(nt_store32)(kopt_byte_ *p, vu32_ a) {
    __asm__ __volatile__("vmovntdq {%1, %0|%0, %1}" : "=m"(AT_(any64, p)) : "v"(a));
}
FN_ void K_(nt_store16)(kopt_byte_ *p, vu32_ a) {
    __asm__ __volatile__("vmovntdq {%1, %0|%0, %1}" : "=m"(AT_(any32, p)) : "v"(K_(truncate_to16)(a)));
}
/* even >> 16 | (odd & 0xFFFF0000): bytes 2 and 3 of each word of even replace bytes 0 and 1 of odd. */
FN_ vu32_ interleave_high16_(vu32_ even, vu32_ odd) {
    const vu32_ bytes = {0x0302, 0x0706, 0x0B0A, 0x0F0E, 0x0302, 0x0706, 0x0B0A, 0x0F0E,
                         0x0302, 0x0706, 0x0B0A, 0x0F0E, 0x0302, 0x0706, 0x0B0A, 0x0F0E};
    const uint64_t low = KOPT_CAST_(uint64_t, 0x33333333u) << 32 | 0x33333333u;
    __asm__("vpshufb {%3, %2, %0%{%1%}|%0%{%1%}, %2, %3}" : "+v"(odd) : "Yk"(low), "v"(even), "v"(bytes));
    return odd;
}
FN_ vu32_ flush16_(vu32_ a, vu32_ exponent) {
    uint32_t normal; /* mask: (a & exponent) != 0 */
    vu32_ r;
    __asm__("vptestmw {%2, %1, %0|%0, %1, %2}" : "=Yk"(normal) : "v"(a), "v"(exponent));
    __asm__("vmovdqu16 {%1, %0%{%2%}%{z%}|%0%{%2%}%{z%}, %1}" : "=v"(r) : "v"(a), "Yk"(normal));
    return r;
}
BINARY_OP_(vu32_, "=v", max16_, "vpmaxsw", vu32_)
BINARY_OP_(uint32_t, "=Yk", K_(gt16), "vpcmpgtw", vu32_)
FN_ int any_gt16_(vu32_ a, vu32_ limit) {
    uint32_t above = K_(gt16)(a, limit);
    __asm__("" : "+r"(above)); /* tests a general register; kortest is slower on some processors */
    return above != 0;
}
FN_ vu32_ unpack_low16_(vu32_ a) {
    vu32_ r;
    __asm__("vpmovzxwd {%t1, %0|%0, %t1}" : "=v"(r) : "v"(a)); /* %t1: the lower 256 bits */
    return r;
}
FN_ vu32_ unpack_high16_(vu32_ a) {
    K_(bytes32) r;
    __asm__("vextracti64x4 {$1, %1, %0|%0, %1, 1}" : "=v"(r) : "v"(a)); /* the upper 256 bits */
    return K_(zero_extend16)(r);
}
FN_ vu32_ pack_high16_(vu32_ a, vu32_ b) { /* indices 0x00 to 0x1F are the halves of a, 0x20 to 0x3F those of b */
    const vu32_ odd = {0x00030001, 0x00070005, 0x000B0009, 0x000F000D, 0x00130011, 0x00170015, 0x001B0019, 0x001F001D,
                       0x00230021, 0x00270025, 0x002B0029, 0x002F002D, 0x00330031, 0x00370035, 0x003B0039, 0x003F003D};
    __asm__("vpermt2w {%2, %1, %0|%0, %1, %2}" : "+v"(a) : "v"(odd), "v"(b));
    return a;
}
#define IMAX_ 1
BINARY_OP_(vu32_, "=v", imax_, "vpmaxsd", vu32_)
#define UNORDERED_ 1
BINARY_OP_(vmask_, "=Yk", unordered_, "vcmpunordps", vf32_)
#define FP16_ 1
FN_ vf32_ load_fp16_(const kopt_byte_ *p) {
    vf32_ r;
    __asm__("vcvtph2ps {%1, %0|%0, %1}" : "=v"(r) : "m"(CONST_AT_(any32, p)));
    return r;
}
FN_ vf32_ round_fp16_(vf32_ x, vu32_ *stored) {
    K_(bytes32) half;
    vf32_ r;
    __asm__("vcvtps2ph {$0, %1, %0|%0, %1, 0}" : "=v"(half) : "v"(x));
    __asm__("vcvtph2ps {%1, %0|%0, %1}" : "=v"(r) : "v"(half));
    *stored = K_(zero_extend16)(half);
    return r;
}
#undef UNARY_OP_
#undef BINARY_OP_
#undef LOAD_OP_
#undef AT_
#undef CONST_AT_

#else
typedef __m512 vf32_;
typedef __m512i vu32_;
typedef __mmask16 vmask_;

FN_ vf32_ splat_(float x) { return _mm512_set1_ps(x); }
FN_ vf32_ add_(vf32_ a, vf32_ b) {
    vf32_ r = _mm512_add_ps(a, b);
    OPAQUE_(r);
    return r;
}
FN_ vf32_ sub_(vf32_ a, vf32_ b) {
    vf32_ r = _mm512_sub_ps(a, b);
    OPAQUE_(r);
    return r;
}
FN_ vf32_ mul_(vf32_ a, vf32_ b) {
    vf32_ r = _mm512_mul_ps(a, b);
    OPAQUE_(r);
    return r;
}
FN_ vf32_ div_(vf32_ a, vf32_ b) {
#ifdef KOPT_GNU_
    vf32_ r;
    __asm__("vdivps {%2, %1, %0|%0, %1, %2}" : "=v"(r) : "v"(a), "v"(b));
    return r;
#else
    return _mm512_div_ps(a, b);
#endif
}
FN_ vf32_ sqrt_(vf32_ a) {
#ifdef KOPT_GNU_
    vf32_ r;
    __asm__("vsqrtps {%1, %0|%0, %1}" : "=v"(r) : "v"(a));
    return r;
#else
    return _mm512_sqrt_ps(a);
#endif
}
FN_ vf32_ min_(vf32_ a, vf32_ b) { return _mm512_min_ps(a, b); }
FN_ vf32_ max_(vf32_ a, vf32_ b) { return _mm512_max_ps(a, b); }
FN_ vu32_ as_u32_(vf32_ a) { /* opaque: see kopt_as_u32_ */
    vu32_ r = _mm512_castps_si512(a);
    OPAQUE_(r);
    return r;
}
FN_ vf32_ as_f32_(vu32_ a) { return _mm512_castsi512_ps(a); }
FN_ vu32_ round_u32_(vf32_ a) { return _mm512_cvtps_epi32(a); }
FN_ vf32_ convert_f32_(vu32_ a) { return _mm512_cvtepi32_ps(a); }
FN_ vu32_ isplat_(uint32_t a) { return _mm512_set1_epi32(KOPT_CAST_(int, a)); }
FN_ vu32_ iadd_(vu32_ a, vu32_ b) { return _mm512_add_epi32(a, b); }
FN_ vu32_ isub_(vu32_ a, vu32_ b) { return _mm512_sub_epi32(a, b); }
FN_ vu32_ and_(vu32_ a, vu32_ b) { return _mm512_and_si512(a, b); }
FN_ vu32_ or_(vu32_ a, vu32_ b) { return _mm512_or_si512(a, b); }
FN_ vu32_ xor_(vu32_ a, vu32_ b) { return _mm512_xor_si512(a, b); }
#define shl_(a, n) _mm512_slli_epi32(a, n)
#define shr_(a, n) _mm512_srli_epi32(a, n)
FN_ vu32_ add16_(vu32_ a, vu32_ b) { return _mm512_add_epi16(a, b); }
FN_ vu32_ mul16_(vu32_ a, vu32_ b) { return _mm512_mullo_epi16(a, b); }
FN_ void mulhilo_(vu32_ a, uint32_t b, vu32_ *high, vu32_ *low) {
    vu32_ factor = isplat_(b), even = _mm512_mul_epu32(a, factor);
    vu32_ odd = _mm512_mul_epu32(_mm512_srli_epi64(a, 32), factor);
    *low = _mm512_mask_shuffle_epi32(even, 0xAAAA, odd, _MM_PERM_CDAB);  /* lower words of odd into the odd lanes   */
    *high = _mm512_mask_shuffle_epi32(odd, 0x5555, even, _MM_PERM_CDAB); /* upper words of even into the even lanes */
}
FN_ vmask_ igt_(vu32_ a, vu32_ b) { return _mm512_cmpgt_epi32_mask(a, b); }
FN_ vmask_ ieq_(vu32_ a, vu32_ b) { return _mm512_cmpeq_epi32_mask(a, b); }
FN_ vu32_ select_(vmask_ m, vu32_ yes, vu32_ no) { return _mm512_mask_blend_epi32(m, no, yes); }
FN_ vf32_ masked_sub_(vmask_ m, vf32_ a, vf32_ b) {
    vf32_ r = _mm512_mask_sub_ps(b, m, a, b);
    OPAQUE_(r);
    return r;
}
FN_ vu32_ select_or_zero_(vmask_ m, vu32_ a) { return _mm512_maskz_mov_epi32(m, a); }
FN_ vu32_ load32_(const kopt_byte_ *p) { return _mm512_loadu_si512(KOPT_CONST_POINTER_(const __m512i *, p)); }
FN_ vu32_ load16_(const kopt_byte_ *p) {
    return _mm512_cvtepu16_epi32(_mm256_loadu_si256(KOPT_CONST_POINTER_(const __m256i *, p)));
}
FN_ vu32_ load8_(const kopt_byte_ *p) {
    return _mm512_cvtepi8_epi32(_mm_loadu_si128(KOPT_CONST_POINTER_(const __m128i *, p)));
}
FN_ void store32_(kopt_byte_ *p, vu32_ a) { _mm512_storeu_si512(KOPT_POINTER_(__m512i *, p), a); }
FN_ void store16_(kopt_byte_ *p, vu32_ a) {
    _mm256_storeu_si256(KOPT_POINTER_(__m256i *, p), _mm512_cvtepi32_epi16(a));
}
FN_ void store8_(kopt_byte_ *p, vu32_ a) { _mm_storeu_si128(KOPT_POINTER_(__m128i *, p), _mm512_cvtepi32_epi8(a)); }
FN_ vf32_ widen_fp16_(vu32_ a) { return _mm512_cvtph_ps(_mm512_cvtepi32_epi16(a)); }
FN_ vu32_ narrow_fp16_(vf32_ a) { return _mm512_cvtepu16_epi32(_mm512_maskz_cvtps_ph(0xFFFFu, a, 0)); }
FN_ vu32_ block_of_lane_(void) { return _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15); }
FN_ vu32_ interleave_low_(vu32_ a, vu32_ b) { return _mm512_unpacklo_epi32(a, b); }
FN_ vu32_ interleave_high_(vu32_ a, vu32_ b) { return _mm512_unpackhi_epi32(a, b); }
FN_ void K_(nt_store32)(kopt_byte_ *p, vu32_ a) { _mm512_stream_si512(KOPT_POINTER_(__m512i *, p), a); }
FN_ void K_(nt_store16)(kopt_byte_ *p, vu32_ a) {
    _mm256_stream_si256(KOPT_POINTER_(__m256i *, p), _mm512_cvtepi32_epi16(a));
}
FN_ void store8_from16_(kopt_byte_ *p, vu32_ a) {
    _mm256_storeu_si256(KOPT_POINTER_(__m256i *, p), _mm512_cvtepi16_epi8(a));
}
/* even >> 16 | (odd & 0xFFFF0000): bytes 2 and 3 of each word of even replace bytes 0 and 1 of odd. */
FN_ vu32_ interleave_high16_(vu32_ even, vu32_ odd) {
    const __mmask64 low = KOPT_CAST_(uint64_t, 0x33333333u) << 32 | 0x33333333u;
    return _mm512_mask_shuffle_epi8(odd, low, even, _mm512_set4_epi32(0x0F0E, 0x0B0A, 0x0706, 0x0302));
}
FN_ vu32_ flush16_(vu32_ a, vu32_ exponent) { return _mm512_maskz_mov_epi16(_mm512_test_epi16_mask(a, exponent), a); }
FN_ vu32_ max16_(vu32_ a, vu32_ b) { return _mm512_max_epi16(a, b); }
FN_ int any_gt16_(vu32_ a, vu32_ limit) {
    uint32_t above = _mm512_cmpgt_epi16_mask(a, limit);
#ifdef KOPT_GNU_
    __asm__("" : "+r"(above)); /* tests a general register; kortest is slower on some processors */
#endif
    return above != 0;
}
FN_ vu32_ unpack_low16_(vu32_ a) { return _mm512_cvtepu16_epi32(_mm512_castsi512_si256(a)); }
FN_ vu32_ unpack_high16_(vu32_ a) { return _mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(a, 1)); }
FN_ vu32_ pack_high16_(vu32_ a, vu32_ b) { /* indices 0x00 to 0x1F are the halves of a, 0x20 to 0x3F those of b */
    const vu32_ odd = _mm512_set_epi32(0x003F003D, 0x003B0039, 0x00370035, 0x00330031, 0x002F002D, 0x002B0029,
                                       0x00270025, 0x00230021, 0x001F001D, 0x001B0019, 0x00170015, 0x00130011,
                                       0x000F000D, 0x000B0009, 0x00070005, 0x00030001);
    return _mm512_permutex2var_epi16(a, odd, b);
}
#define IMAX_ 1
FN_ vu32_ imax_(vu32_ a, vu32_ b) { return _mm512_max_epi32(a, b); }
#define FP16_ 1
FN_ vf32_ load_fp16_(const kopt_byte_ *p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(KOPT_CONST_POINTER_(const __m256i *, p)));
}
FN_ vf32_ round_fp16_(vf32_ x, vu32_ *stored) {
    const __m256i half = _mm512_maskz_cvtps_ph(0xFFFFu, x, 0);
    *stored = _mm512_cvtepu16_epi32(half);
    return _mm512_cvtph_ps(half);
}
#endif

FN_ vu32_ isplat_hoisted_(uint32_t a) {
    vu32_ r = isplat_(a);
    OPAQUE_(r);
    return r;
}
FN_ vmask_ mask_or_(vmask_ a, vmask_ b) { return KOPT_CAST_(vmask_, a | b); }
FN_ int any_true_(vmask_ a) { return a != 0; }
FN_ void K_(nt_fence)(void) { _mm_sfence(); }

/* ---- NEON of AArch64: 4 lanes ---- */
#elif KOPT_PASS_ == KOPT_PASS_NEON_
#define ISA_ neon
#define ISA_TARGET_
#define LANES_ KOPT_CAST_(size_t, 4)
#define SPECIALIZED_ 1
typedef float32x4_t vf32_;
typedef uint32x4_t vu32_;
typedef uint32x4_t vmask_;

#define OPAQUE_(r) __asm__("" : "+w"(r))

FN_ vf32_ splat_(float x) { return vdupq_n_f32(x); }
FN_ vf32_ add_(vf32_ a, vf32_ b) {
    vf32_ r = vaddq_f32(a, b);
    OPAQUE_(r);
    return r;
}
FN_ vf32_ sub_(vf32_ a, vf32_ b) {
    vf32_ r = vsubq_f32(a, b);
    OPAQUE_(r);
    return r;
}
FN_ vf32_ mul_(vf32_ a, vf32_ b) {
    vf32_ r = vmulq_f32(a, b);
    OPAQUE_(r);
    return r;
}
FN_ vf32_ div_(vf32_ a, vf32_ b) {
    vf32_ r;
    __asm__("fdiv %0.4s, %1.4s, %2.4s" : "=w"(r) : "w"(a), "w"(b));
    return r;
}
FN_ vf32_ sqrt_(vf32_ a) {
    vf32_ r;
    __asm__("fsqrt %0.4s, %1.4s" : "=w"(r) : "w"(a));
    return r;
}
FN_ vu32_ as_u32_(vf32_ a) { /* opaque: see kopt_as_u32_ */
    vu32_ r = vreinterpretq_u32_f32(a);
    OPAQUE_(r);
    return r;
}
FN_ vf32_ as_f32_(vu32_ a) { return vreinterpretq_f32_u32(a); }
FN_ vu32_ round_u32_(vf32_ a) { return vreinterpretq_u32_s32(vcvtnq_s32_f32(a)); }
FN_ vf32_ convert_f32_(vu32_ a) { return vcvtq_f32_s32(vreinterpretq_s32_u32(a)); }
FN_ vu32_ isplat_(uint32_t a) { return vdupq_n_u32(a); }
FN_ vu32_ isplat_hoisted_(uint32_t a) {
    vu32_ r = isplat_(a);
    OPAQUE_(r);
    return r;
}
FN_ vu32_ iadd_(vu32_ a, vu32_ b) { return vaddq_u32(a, b); }
FN_ vu32_ isub_(vu32_ a, vu32_ b) { return vsubq_u32(a, b); }
FN_ vu32_ and_(vu32_ a, vu32_ b) { return vandq_u32(a, b); }
FN_ vu32_ or_(vu32_ a, vu32_ b) { return vorrq_u32(a, b); }
FN_ vu32_ xor_(vu32_ a, vu32_ b) { return veorq_u32(a, b); }
#define shl_(a, n) vshlq_n_u32(a, n)
#define shr_(a, n) vshrq_n_u32(a, n)
FN_ vu32_ add16_(vu32_ a, vu32_ b) {
    return vreinterpretq_u32_u16(vaddq_u16(vreinterpretq_u16_u32(a), vreinterpretq_u16_u32(b)));
}
FN_ vu32_ mul16_(vu32_ a, vu32_ b) {
    return vreinterpretq_u32_u16(vmulq_u16(vreinterpretq_u16_u32(a), vreinterpretq_u16_u32(b)));
}
FN_ void mulhilo_(vu32_ a, uint32_t b, vu32_ *high, vu32_ *low) {
    vu32_ first = vreinterpretq_u32_u64(vmull_n_u32(vget_low_u32(a), b));
    vu32_ second = vreinterpretq_u32_u64(vmull_n_u32(vget_high_u32(a), b));
    *low = vuzp1q_u32(first, second); /* the even words of both; next line: the odd ones */
    *high = vuzp2q_u32(first, second);
}
FN_ void dot_(vu32_ sum[2], vu32_ a, vu32_ b) {
    sum[0] = vreinterpretq_u32_u64(vmlal_u32(vreinterpretq_u64_u32(sum[0]), vget_low_u32(a), vget_low_u32(b)));
    sum[1] = vreinterpretq_u32_u64(vmlal_u32(vreinterpretq_u64_u32(sum[1]), vget_high_u32(a), vget_high_u32(b)));
}
FN_ vmask_ igt_(vu32_ a, vu32_ b) { return vcgtq_s32(vreinterpretq_s32_u32(a), vreinterpretq_s32_u32(b)); }
FN_ vmask_ ieq_(vu32_ a, vu32_ b) { return vceqq_u32(a, b); }
FN_ vmask_ mask_or_(vmask_ a, vmask_ b) { return vorrq_u32(a, b); }
FN_ int any_true_(vmask_ a) { return vmaxvq_u32(a) != 0; }
FN_ vu32_ select_(vmask_ m, vu32_ yes, vu32_ no) { return vbslq_u32(m, yes, no); }
FN_ vu32_ select_or_zero_(vmask_ m, vu32_ a) { return vandq_u32(m, a); }
FN_ vu32_ load32_(const kopt_byte_ *p) { return vreinterpretq_u32_u8(vld1q_u8(p)); }
FN_ vu32_ load16_(const kopt_byte_ *p) { return vmovl_u16(vreinterpret_u16_u8(vld1_u8(p))); }
FN_ vu32_ load8_(const kopt_byte_ *p) {
    int8x8_t a = vreinterpret_s8_u32(vdup_n_u32(kopt_load32_(p)));
    return vreinterpretq_u32_s32(vmovl_s16(vget_low_s16(vmovl_s8(a))));
}
FN_ void store32_(kopt_byte_ *p, vu32_ a) { vst1q_u8(p, vreinterpretq_u8_u32(a)); }
FN_ void store16_(kopt_byte_ *p, vu32_ a) { vst1_u8(p, vreinterpret_u8_u16(vmovn_u32(a))); }
FN_ void store8_(kopt_byte_ *p, vu32_ a) {
    uint16x4_t half = vmovn_u32(a);
    uint8x8_t quarter = vmovn_u16(vcombine_u16(half, half));
    kopt_store32_(p, vget_lane_u32(vreinterpret_u32_u8(quarter), 0));
}
FN_ vf32_ widen_fp16_(vu32_ a) { return vcvt_f32_f16(vreinterpret_f16_u16(vmovn_u32(a))); }
FN_ vu32_ narrow_fp16_(vf32_ a) { return vmovl_u16(vreinterpret_u16_f16(vcvt_f16_f32(a))); }
FN_ vu32_ block_of_lane_(void) {
    static const uint32_t kopt_lanes_[4] = {0, 1, 2, 3};
    return vld1q_u32(kopt_lanes_);
}
FN_ vu32_ interleave_low_(vu32_ a, vu32_ b) { return vzip1q_u32(a, b); }
FN_ vu32_ interleave_high_(vu32_ a, vu32_ b) { return vzip2q_u32(a, b); }
FN_ void store8_from16_(kopt_byte_ *p, vu32_ a) { vst1_u8(p, vmovn_u16(vreinterpretq_u16_u32(a))); }
FN_ vu32_ interleave_high16_(vu32_ even, vu32_ odd) { /* even >> 16 | (odd & 0xFFFF0000) */
    return vbslq_u32(vdupq_n_u32(0xFFFF0000u), odd, vshrq_n_u32(even, 16));
}
FN_ vu32_ flush16_(vu32_ a, vu32_ exponent) {
    /* normal: (a & exponent) != 0 ? 0xFFFF : 0 */
    uint16x8_t normal = vtstq_u16(vreinterpretq_u16_u32(a), vreinterpretq_u16_u32(exponent));
    return vandq_u32(a, vreinterpretq_u32_u16(normal));
}
FN_ vu32_ max16_(vu32_ a, vu32_ b) {
    return vreinterpretq_u32_s16(vmaxq_s16(vreinterpretq_s16_u32(a), vreinterpretq_s16_u32(b)));
}
FN_ int any_gt16_(vu32_ a, vu32_ limit) {
    return vmaxvq_u16(vcgtq_s16(vreinterpretq_s16_u32(a), vreinterpretq_s16_u32(limit))) != 0;
}
FN_ vu32_ unpack_low16_(vu32_ a) { return vmovl_u16(vget_low_u16(vreinterpretq_u16_u32(a))); }
FN_ vu32_ unpack_high16_(vu32_ a) { return vmovl_high_u16(vreinterpretq_u16_u32(a)); }
FN_ vu32_ pack_high16_(vu32_ a, vu32_ b) {
    return vreinterpretq_u32_u16(vuzp2q_u16(vreinterpretq_u16_u32(a), vreinterpretq_u16_u32(b)));
}
#define IMAX_ 1
FN_ vu32_ imax_(vu32_ a, vu32_ b) {
    return vreinterpretq_u32_s32(vmaxq_s32(vreinterpretq_s32_u32(a), vreinterpretq_s32_u32(b)));
}
#define FP16_ 1
FN_ vf32_ load_fp16_(const kopt_byte_ *p) { return vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(p))); }
FN_ vf32_ round_fp16_(vf32_ x, vu32_ *stored) {
    const float16x4_t half = vcvt_f16_f32(x);
    *stored = vmovl_u16(vreinterpret_u16_f16(half));
    return vcvt_f32_f16(half);
}

#elif KOPT_PASS_ == KOPT_PASS_CUDA_
#include KAHAN_OPT_CUDA_SELF
#endif

/* ================================================================================================================== */
/* KERNELS: plain C over the vocabulary, written once. docs/numerics.md is their specification.                       */
/* ================================================================================================================== */

#define imax_ K_(imax)
#define unordered_ K_(unordered)
#define load_fp16_ K_(load_fp16)
#define round_fp16_ K_(round_fp16)
#ifdef NT_STORES_
#define nt_store16_ K_(nt_store16)
#define nt_store32_ K_(nt_store32)
#define nt_fence_ K_(nt_fence)
#else
#define NT_STORES_ 0 /* no stores past the caches */
#define nt_store16_ store16_
#define nt_store32_ store32_
#define nt_fence_() ((void)0)
#endif

#ifdef OPERATORS_
FN_ vu32_ iadd_(vu32_ a, vu32_ b) { return a + b; }
FN_ vu32_ isub_(vu32_ a, vu32_ b) { return a - b; }
FN_ vu32_ and_(vu32_ a, vu32_ b) { return a & b; }
FN_ vu32_ or_(vu32_ a, vu32_ b) { return a | b; }
FN_ vu32_ xor_(vu32_ a, vu32_ b) { return a ^ b; }
#define shl_(a, n) ((a) << (n))
#define shr_(a, n) ((a) >> (n))
#endif
#ifndef MIN_MAX_
FN_ vf32_ min_(vf32_ a, vf32_ b) { return as_f32_(select_(igt_(as_u32_(a), as_u32_(b)), as_u32_(b), as_u32_(a))); }
FN_ vf32_ max_(vf32_ a, vf32_ b) { return as_f32_(select_(igt_(as_u32_(b), as_u32_(a)), as_u32_(b), as_u32_(a))); }
#endif
#ifndef MASKED_SUB_
FN_ vf32_ masked_sub_(vmask_ m, vf32_ a, vf32_ b) { return as_f32_(select_(m, as_u32_(sub_(a, b)), as_u32_(b))); }
#endif

#ifndef IMAX_
FN_ vu32_ imax_(vu32_ a, vu32_ b) { return select_(igt_(a, b), a, b); }
#endif
#ifndef UNORDERED_
FN_ vmask_ unordered_(vf32_ a, vf32_ b) {
    const vu32_ all = isplat_(0x7FFFFFFFu), infinity = isplat_(0x7F800000u);
    return mask_or_(igt_(and_(as_u32_(a), all), infinity), igt_(and_(as_u32_(b), all), infinity));
}
#endif

#ifdef GENERIC_FP16_ /* functions: inlined they cost more time to compile than to run */
static KOPT_NOINLINE_ ISA_TARGET_ vf32_ widen_fp16_(vu32_ a) {
    vu32_ sign = shl_(and_(a, isplat_(0x8000u)), 16), mag = and_(a, isplat_(0x7FFFu)), u = shl_(mag, 13);
    vu32_ normal = iadd_(u, isplat_(0x38000000u)); /* exponent + 112        */
    vu32_ tiny =
        as_u32_(sub_(as_f32_(iadd_(u, isplat_(0x38800000u))), splat_(6.103515625e-05f))); /* (2^-14 + x) - 2^-14  */
    vu32_ special = select_(igt_(mag, isplat_(0x7C00u)), or_(u, isplat_(0x7FC00000u)), isplat_(0x7F800000u));
    u = select_(igt_(isplat_(0x0400u), mag), tiny, normal);
    return as_f32_(or_(sign, select_(igt_(mag, isplat_(0x7BFFu)), special, u)));
}
static KOPT_NOINLINE_ ISA_TARGET_ vu32_ narrow_fp16_(vf32_ a) {
    vu32_ u = as_u32_(a), mag = and_(u, isplat_(0x7FFFFFFFu)), sign = and_(shr_(u, 16), isplat_(0x8000u));
    vu32_ odd = and_(shr_(mag, 13), isplat_(1)), t = isub_(mag, isplat_(0x38000000u));
    vu32_ normal = shr_(iadd_(iadd_(t, isplat_(0x0FFFu)), odd), 13);
    vu32_ tiny = isub_(as_u32_(add_(as_f32_(mag), splat_(0.5f))), isplat_(0x3F000000u)); /* 0.5 has the ulp 2^-24 */
    vu32_ nan = or_(isplat_(0x7E00u), and_(shr_(mag, 13), isplat_(0x03FFu)));
    u = select_(igt_(isplat_(0x38800000u), mag), tiny, normal);
    u = select_(igt_(mag, isplat_(0x477FEFFFu)), isplat_(0x7C00u), u);
    return or_(sign, select_(igt_(mag, isplat_(0x7F800000u)), nan, u));
}
#endif

/* What a kernel does: constants where a kernel has its own, the fields of kopt_step elsewhere. */
#ifndef KOPT_KIND_
#define KOPT_KIND_
typedef struct kopt_kind_ {
    kopt_rule rule;
    kopt_format weight, grad, moment;
    kopt_rounding rounding, moment_rounding, compensation_rounding;
    int moment_count, nesterov,
        buffered; /* buffered: new moments go to rows of fp32, which the store to memory rounds */
} kopt_kind_;

/* Is a moment kept as the root of the mean of squares that it is? */
KOPT_INLINE_ int kopt_stores_root_(kopt_kind_ kind, int moment) {
    return (kind.moment == KOPT_FP16 || kind.moment == KOPT_Q8 || kind.buffered) && kopt_is_square_(kind.rule, moment);
}

KOPT_INLINE_ int kopt_needs_random_(kopt_kind_ kind) {
    if (kind.moment_count != 0 && kind.moment != KOPT_F32 && kind.moment_rounding == KOPT_STOCHASTIC) return 1;
    if (kind.weight == KOPT_F32) return 0;
    if (kind.rounding == KOPT_STOCHASTIC) return 1;
    return (kind.rounding == KOPT_KAHAN || kind.rounding == KOPT_COMPACT) &&
           kind.compensation_rounding == KOPT_STOCHASTIC;
}
#endif

typedef struct scalars_ {
    vf32_ grad_scale, l2, weight_decay, beta1, gain1, beta2, gain2, beta3, gain3;
    vf32_ extrapolation, third_scale, rate, root_scale, eps;
#ifdef KAHAN_OPT_VMATH
    vf32_ sharpness;
    int smooth;
#endif
    vf32_ slow_scale; /* after the 16 words that a GPU loads for eight elements */
    int use_scale, use_l2, use_decay, zero_grad, moments_only, unrectified, sync, first_step;
} scalars_;

FN_ scalars_ K_(splat_step)(const kopt_step *s, float rate, float decay) {
    scalars_ k;
    k.grad_scale = splat_(s->grad_scale);
    k.l2 = splat_(s->l2);
    k.weight_decay = splat_(decay);
    k.beta1 = splat_(s->beta1);
    k.gain1 = splat_(s->gain1);
    k.beta2 = splat_(s->beta2);
    k.gain2 = splat_(s->gain2);
    k.beta3 = splat_(s->beta3);
    k.gain3 = splat_(s->gain3);
    k.extrapolation = splat_(s->extrapolation);
    k.third_scale = splat_(s->third_scale);
    k.slow_scale = splat_(s->slow_scale);
    k.rate = splat_(rate);
    k.root_scale = splat_(s->root_scale);
    k.eps = splat_(s->eps);
#ifdef KAHAN_OPT_VMATH
    k.sharpness = splat_(s->sharpness);
    k.smooth = kopt_as_u32_(s->sharpness) << 1 != 0;
#endif
    k.use_scale = LANES_ == 1 || kopt_as_u32_(s->grad_scale) != 0x3F800000u; /* times 1 changes no number */
    k.use_l2 = KOPT_HAS_(KOPT_WITH_L2) && kopt_as_u32_(s->l2) << 1 != 0;     /* neither 0 nor -0 */
    k.use_decay = KOPT_HAS_(KOPT_WITH_DECOUPLED | KOPT_WITH_FULLY_DECOUPLED) && kopt_as_u32_(decay) << 1 != 0;
    k.zero_grad = KOPT_HAS_(KOPT_WITH_EXTRAS) && s->zero_grad;
    k.moments_only = KOPT_HAS_(KOPT_WITH_EXTRAS) && s->moments_only;
    k.unrectified = KOPT_HAS_(KOPT_WITH_RADAM | KOPT_WITH_RANGER) && s->unrectified;
    k.sync = KOPT_HAS_(KOPT_WITH_RANGER) && s->sync;
    k.first_step = s->step == 1;
    return k;
}

FN_ scalars_ K_(splat_job)(const kopt_job_ *j) { return K_(splat_step)(j->step, j->rate, j->weight_decay); }

/* ---- loads and stores of n lanes ---- */

FN_ size_t K_(lanes_left)(size_t n, size_t i) { return n - i < LANES_ ? n - i : LANES_; }

FN_ vu32_ K_(load_n)(const kopt_byte_ *p, size_t size, size_t n) {
#ifndef ONE_LANE_
    kopt_byte_ part[4 * LANES_];
    if (n < LANES_) p = kopt_copy_padded_(part, sizeof part, p, n * size);
#else
    KOPT_CAST_(void, n);
#endif
    return size == 4 ? load32_(p) : size == 2 ? load16_(p) : load8_(p);
}

FN_ void K_(store_n)(kopt_byte_ *p, size_t size, size_t n, vu32_ a) {
#ifndef ONE_LANE_
    kopt_byte_ part[4 * LANES_], *to = n < LANES_ ? part : p;
#else
    kopt_byte_ *to = p;
    KOPT_CAST_(void, n);
#endif
    if (size == 4)
        store32_(to, a);
    else if (size == 2)
        store16_(to, a);
    else
        store8_(to, a);
#ifndef ONE_LANE_
    if (n < LANES_) kopt_copy_noinline_(p, part, n * size);
#endif
}

/* NOINLINE_FN_: a function that is not inlined, in a pass with vectors: it would double the compile time. VECTOR_FN_: one that
   is inlined there, where formats and roundings are constants, and not in the scalar pass. */
#ifndef ONE_LANE_
#define NOINLINE_FN_ static KOPT_NOINLINE_ ISA_TARGET_
#define VECTOR_FN_ FN_
#elif KOPT_PASS_ == KOPT_PASS_CUDA_ /* everything in registers */
#define NOINLINE_FN_ FN_
#define VECTOR_FN_ FN_
#else
#define NOINLINE_FN_ KOPT_SMALL_FN_
#define VECTOR_FN_ KOPT_SMALL_FN_
#endif

/* ---- random bits ---- */

/* Section 7: Philox4x32-7 over 8 * LANES_ elements. */

#ifndef KOPT_RANDOM_GROUP_
#define KOPT_RANDOM_GROUP_ 128 /* elements: 16 Philox blocks, which serve the 16 rows of a span */
#define KOPT_RANDOM_SPAN_ 2048
static KOPT_HOST_DEVICE_ KOPT_FORCE_INLINE_ kopt_index_ kopt_philox_block_(kopt_index_ index) {
    return (index >> 11 << 4) | (index >> 3 & 15);
}

/* Number k of an element is own + (t + k) * 2 * other. This is t: 8 to a row, of which 5 are in use. */
enum { KOPT_RANDOM_STORES_ = 8 };
static KOPT_HOST_DEVICE_ KOPT_FORCE_INLINE_ uint32_t kopt_random_multiplier_(kopt_index_ index) {
    return KOPT_CAST_(uint32_t, index >> 7 & 15) * KOPT_RANDOM_STORES_;
}

/* r of an element whose own half is the lower one: number 0, and above it what each store adds. */
static KOPT_HOST_DEVICE_ KOPT_FORCE_INLINE_ uint32_t kopt_random_combine_(uint32_t halves, kopt_index_ index) {
    const uint32_t twice = halves >> 16 << 1;
    return twice << 16 | ((halves + twice * kopt_random_multiplier_(index)) & 0xFFFFu);
}
#endif

/* The key of one seed and the counter words that are the same for all elements of a tensor. */
typedef struct philox_key_ {
    uint32_t key[2], stream, step, id;
} philox_key_;

FN_ philox_key_ K_(make_philox_key)(uint64_t seed, uint32_t step, uint32_t id, uint32_t stream) {
    philox_key_ c;
    c.key[0] = KOPT_CAST_(uint32_t, seed & 0xFFFFFFFFu);
    c.key[1] = KOPT_CAST_(uint32_t, seed >> 32);
    c.stream = stream << 28;
    c.step = step;
    c.id = id;
    return c;
}

#ifdef ONE_LANE_
FN_ void K_(philox)(vu32_ x[4], const philox_key_ *c, kopt_index_ block) {
    vu32_ key0 = c->key[0], key1 = c->key[1], x0 = KOPT_CAST_(uint32_t, block & 0xFFFFFFFFu);
    const uint64_t wide = block;
    vu32_ x1 = KOPT_CAST_(uint32_t, wide >> 32) + c->stream, x2 = c->step, x3 = c->id;
    vu32_ high0, low0, high1, low1, add0 = 0x9E3779B9u, add1 = 0xBB67AE85u;
    int round;
    KOPT_OPAQUE_(add0); /* in registers, not in pieces of instructions */
    KOPT_OPAQUE_(add1);
    for (round = 0; round < 7; round++, key0 += add0, key1 += add1) {
        mulhilo_(x0, 0xD2511F53u, &high0, &low0);
        mulhilo_(x2, 0xCD9E8D57u, &high1, &low1);
        x0 = high1 ^ x1 ^ key0;
        x1 = low1;
        x2 = high0 ^ x3 ^ key1;
        x3 = low0;
    }
    x[0] = x0;
    x[1] = x1;
    x[2] = x2;
    x[3] = x3;
}
#else
/* The words x of LANES_ Philox blocks, of which `block`, a multiple of LANES_, is the first: one block per lane. Called
   once for 16 * LANES_ elements: inlined it is no faster, in every kernel again. */
NOINLINE_FN_ void K_(philox)(vu32_ x[4], const philox_key_ *c, uint64_t block) {
    vu32_ x0 = iadd_(isplat_(KOPT_CAST_(uint32_t, block & 0xFFFFFFFFu)), block_of_lane_());
    vu32_ x1 = isplat_(KOPT_CAST_(uint32_t, block >> 32) + c->stream), x2 = isplat_(c->step), x3 = isplat_(c->id);
    vu32_ key0 = isplat_(c->key[0]), key1 = isplat_(c->key[1]), high0, low0, high1, low1;
#define ROUND_                                \
    mulhilo_(x0, 0xD2511F53u, &high0, &low0); \
    mulhilo_(x2, 0xCD9E8D57u, &high1, &low1); \
    x0 = xor_(xor_(high1, x1), key0);         \
    x1 = low1;                                \
    x2 = xor_(xor_(high0, x3), key1);         \
    x3 = low0;                                \
    key0 = iadd_(key0, isplat_(0x9E3779B9u)); \
    key1 = iadd_(key1, isplat_(0xBB67AE85u));
    ROUND_ ROUND_ ROUND_ ROUND_ ROUND_ ROUND_ ROUND_
#undef ROUND_
        x[0] = x0;
    x[1] = x1;
    x[2] = x2;
    x[3] = x3;
}
#endif

#ifdef ONE_LANE_
/* r of the element with this global index. x: the words of its block, made anew for a block's first element, or if
   `first`. */
FN_ vu32_ K_(random_at)(vu32_ x[4], const philox_key_ *cipher, kopt_index_ index, int first) {
    const unsigned at = KOPT_CAST_(unsigned, index & 7);
    uint32_t halves;
    if (at == 0 || first) K_(philox)(x, cipher, kopt_philox_block_(index));
    halves = x[at >> 1];
    if ((at & 1) != 0) halves = halves >> 16 | halves << 16;
    return kopt_random_combine_(halves, index);
}

/* The number of store k, and something above its 16 bits. */
FN_ vu32_ K_(random16)(vu32_ r, uint32_t k) { return r + k * (r >> 16); }

typedef struct random_buffer_ {
    vu32_ x[4];
} random_buffer_;

/* Number 0 of the *n elements from this index on. The first call says so. */
FN_ vu32_ K_(random_next)(random_buffer_ *draws, const philox_key_ *cipher, kopt_index_ index, int first, size_t *n) {
    *n = 1;
    return K_(random_at)(draws->x, cipher, index, first);
}

FN_ void K_(philox_transpose)(vu32_ w[4], const vu32_ x[4]) {
    w[0] = x[0];
    w[1] = x[1];
    w[2] = x[2];
    w[3] = x[3];
}
#else
/* Into the order of memory: w[0] holds words 0 .. LANES_-1 of the sequence block by block, and so on. Lane l had block
   block_of_lane_[l]. */
FN_ void K_(philox_transpose)(vu32_ w[4], const vu32_ x[4]) {
    vu32_ even_low = interleave_low_(x[0], x[2]), even_high = interleave_high_(x[0], x[2]);
    vu32_ odd_low = interleave_low_(x[1], x[3]), odd_high = interleave_high_(x[1], x[3]);
    w[0] = interleave_low_(even_low, odd_low);
    w[1] = interleave_high_(even_low, odd_low);
    w[2] = interleave_low_(even_high, odd_high);
    w[3] = interleave_high_(even_high, odd_high);
}

/* The words of the span that holds this global index, in the order of memory: what the elements [from, to) of its rows
   need. */
NOINLINE_FN_ void K_(random_span)(uint32_t *words, const philox_key_ *cipher, kopt_index_ index, size_t from,
                                  size_t to) {
    size_t block, i;
    index -= KOPT_CAST_(unsigned, index % KOPT_RANDOM_SPAN_);
    for (block = from / 8 / LANES_ * LANES_; 8 * block < to; block += LANES_) {
        vu32_ x[4], w[4];
        K_(philox)(x, cipher, kopt_philox_block_(index) + block);
        K_(philox_transpose)(w, x);
        for (i = 0; i < 4; i++) store32_(KOPT_POINTER_(kopt_byte_ *, words + 4 * block + i * LANES_), w[i]);
    }
}

/* kopt_random_combine_ of the row of this index: lower and upper half of r, each packed two to a word. */
FN_ void K_(random_group)(uint32_t *lower, uint32_t *upper, const uint32_t *words, kopt_index_ index, size_t from,
                          size_t to) {
    const vu32_ times = isplat_(kopt_random_multiplier_(index) * 0x00010001u);
    size_t i;
    for (i = from / (2 * LANES_) * LANES_; 2 * i < to; i += LANES_) {
        const vu32_ own = load32_(KOPT_CONST_POINTER_(const kopt_byte_ *, words + i)),
                    other = or_(shl_(own, 16), shr_(own, 16));
        const vu32_ twice = add16_(other, other);
        store32_(KOPT_POINTER_(kopt_byte_ *, lower + i), add16_(own, mul16_(twice, times)));
        store32_(KOPT_POINTER_(kopt_byte_ *, upper + i), twice);
    }
}

typedef struct random_buffer_ {
    uint32_t words[KOPT_RANDOM_GROUP_ / 2], lower[KOPT_RANDOM_GROUP_ / 2 + LANES_], upper[KOPT_RANDOM_GROUP_ / 2];
} random_buffer_;

/* The same for vectors, of LANES_ elements or fewer at the end of a row. */
FN_ vu32_ K_(random_next)(random_buffer_ *draws, const philox_key_ *cipher, kopt_index_ index, int first, size_t *n) {
    const size_t at = KOPT_CAST_(unsigned, index % KOPT_RANDOM_GROUP_);
    if (index % KOPT_RANDOM_SPAN_ == 0 || first) K_(random_span)(draws->words, cipher, index, 0, KOPT_RANDOM_GROUP_);
    if (at == 0 || first) K_(random_group)(draws->lower, draws->upper, draws->words, index, 0, KOPT_RANDOM_GROUP_);
    *n = KOPT_RANDOM_GROUP_ - at < LANES_ ? KOPT_RANDOM_GROUP_ - at : LANES_;
    return load16_(KOPT_CONST_POINTER_(const kopt_byte_ *, draws->lower) + 2 * at);
}
#endif

/* ---- 8-bit codes ---- */

/* Section 6b. Signed, or square: of the roots of mean squares. */

/* What numbers are multiplied by to be coded: roots 1 / scale, others 2 / scale. */
FN_ vf32_ K_(inverse_scale_q8)(uint32_t scale, int square) {
    return square ? div_(splat_(1), as_f32_(isplat_(scale))) : as_f32_(isplat_(0x7F800000u - scale));
}

/* The code of a number times inverse_scale_q8() in the upper half, the sign as a float has it. r: 16 random bits, or 2^15
   for the nearest. */
FN_ vu32_ K_(encode_q8)(vf32_ y, int square, vu32_ r) {
    const vu32_ u = as_u32_(y);
    vf32_ mag;
    if (square) { /* 8 codes to a binade, and 32 to each of the upper 4; what is not 0 does not become 0 */
        const vu32_ low = iadd_(shr_(iadd_(u, isplat_(8)), 4), isplat_(0x007F0000u - 0x03D80000u));
        const vu32_ high = iadd_(shr_(iadd_(u, isplat_(2)), 2), isplat_(0x00FF0000u - 0x0FE00000u));
        const vu32_ least = shl_(as_u32_(min_(y, as_f32_(isplat_(0x00000400u)))), 6); /* 2^-139: 0, or code 1 */
        return iadd_(imax_(imax_(low, high), least), r);
    }
    mag = as_f32_(and_(u, isplat_(0x7FFFFFFFu)));
    mag = max_(mag, mul_(add_(mag, splat_(2.44140625e-04f)), splat_(0.5f))); /* gradual underflow below 2^-12 */
    return or_(iadd_(shr_(iadd_(as_u32_(mag), isplat_(8 - 0x39000000u)), 4), r), and_(u, isplat_(0x80000000u)));
}

#ifdef ONE_LANE_
FN_ vu32_ K_(encode_q8_scalar)(vf32_ y, int square, vu32_ r) {
    const vu32_ u = K_(encode_q8)(y, square, r);
    return square ? u >> 16 : (u >> 16 & 0x7Fu) | (u >> 24 & 0x80u);
}
#endif

/* The number of a code, of 8 bits with their sign; over the scale. */
FN_ vf32_ K_(decode_q8)(vu32_ code, int square) {
    vu32_ u;
    vf32_ y;
    if (square) {
        u = and_(shl_(code, 20), isplat_(0x0FF00000u));
        y = min_(as_f32_(iadd_(u, isplat_(0x35900000u))), as_f32_(iadd_(shr_(u, 2), isplat_(0x3B840000u))));
        return as_f32_(select_or_zero_(igt_(u, isplat_(0)), as_u32_(y)));
    }
    y = as_f32_(iadd_(and_(shl_(code, 20), isplat_(0x07F00000u)), isplat_(0x38800000u)));
    y = min_(y, sub_(add_(y, y), splat_(1.220703125e-04f)));
    return as_f32_(or_(as_u32_(y), and_(code, isplat_(0x80000000u))));
}

/* ---- rounding ---- */

/* Section 2. In a word of 32 bits a 16-bit number is the upper half, and what rounds off is the lower
   one: of a bf16 the word is that of fp32, of an fp16 its extended form. Vectors know ordinary numbers: a turn
   with an infinity, a NaN or a value of the last interval before infinity goes through the code of one lane. */

/* Constants of the loops. Held: made anew by the compiler they cost up to eight operations a turn. */
typedef struct constants_ {
    vu32_ one, bias, half_ulp, upper, lower, exponent, magnitude, limit;
    vu32_ of_sign, subnormal, limit16;
    vf32_ tiny, scale;
} constants_;

FN_ constants_ K_(make_constants)(void) {
    constants_ c;
    c.one = isplat_hoisted_(1);
    c.bias = isplat_hoisted_(0x7FFFu);
    c.half_ulp = isplat_hoisted_(0x8000u);
    c.upper = isplat_hoisted_(0xFFFF0000u);
    c.lower = isplat_hoisted_(0xFFFFu);
    c.exponent = isplat_hoisted_(0x7F807F80u); /* two bf16 to a word: their exponents, magnitudes, */
    c.magnitude = isplat_hoisted_(0x7FFF7FFFu);
    c.limit = isplat_hoisted_(0x7F7E7F7Eu);   /* and the largest below the last interval */
    c.of_sign = isplat_hoisted_(0x7FFFFFFFu); /* all but the sign of an fp32, the largest that is subnormal, */
    c.subnormal = isplat_hoisted_(0x007FFFFFu);
    c.limit16 = isplat_hoisted_(0x477FDFFFu);        /* and below the last interval of fp16 */
    c.tiny = as_f32_(isplat_hoisted_(0x38800000u));  /* 2^-14, where fp16 begins to have equal steps, */
    c.scale = as_f32_(isplat_hoisted_(0x53800000u)); /* and 2^40 */
    return c;
}

FN_ vu32_ K_(abs_u32)(vf32_ x) { return and_(as_u32_(x), isplat_(0x7FFFFFFFu)); }

#ifdef ONE_LANE_
FN_ vu32_ K_(extended)(vf32_ x, kopt_format format, const constants_ *c) {
    const vu32_ u = as_u32_(x);
    vu32_ mag = and_(u, isplat_(0x7FFFFFFFu)), low;
    const vu32_ sign = xor_(u, mag);
    const vmask_ nan = igt_(mag, isplat_(0x7F800000u));
    if (format == KOPT_BF16) return select_(nan, isplat_(0x7FC00000u), u);
    KOPT_CAST_(void, c);
    mag = select_(igt_(mag, isplat_(0x47800000u)), isplat_(0x47800000u), mag); /* infinity */
    low = as_u32_(min_(as_f32_(mag), splat_(6.103515625e-05f))); /* up to 2^-14, where the steps of fp16 are equal */
    mag = iadd_(shl_(isub_(mag, low), 3), round_u32_(mul_(as_f32_(low), splat_(1099511627776.0f)))); /* 2^40 */
    return select_(nan, isplat_(0x7E000000u), or_(mag, sign));
}

FN_ vf32_ K_(from_extended)(vu32_ u, kopt_format format) {
    vu32_ mag = and_(u, isplat_(0x7FFFFFFFu)), sign = xor_(u, mag), normal, tiny;
    if (format == KOPT_BF16) return as_f32_(u);
    normal = iadd_(shr_(mag, 3), isplat_(0x38000000u));
    tiny = as_u32_(mul_(convert_f32_(mag), splat_(9.094947017729282e-13f))); /* 2^-40 */
    normal = select_(igt_(isplat_(0x04000000u), mag), tiny, normal);
    normal = select_(igt_(mag, isplat_(0x7BFFFFFFu)), isplat_(0x7F800000u), normal);
    normal = select_(igt_(mag, isplat_(0x7C000000u)), isplat_(0x7FC00000u), normal);
    return as_f32_(or_(normal, sign));
}
#else
/* Of a magnitude in fp16, below infinity. */
FN_ vu32_ K_(extended_fp16)(vu32_ mag, const constants_ *c) {
    const vf32_ low = min_(as_f32_(mag), c->tiny);
    return iadd_(shl_(isub_(mag, as_u32_(low)), 3), round_u32_(mul_(low, c->scale)));
}

FN_ vu32_ K_(extended)(vf32_ x, kopt_format format, const constants_ *c) {
    const vu32_ u = as_u32_(x), mag = and_(u, c->of_sign);
    return format == KOPT_BF16 ? u : or_(K_(extended_fp16)(mag, c), xor_(u, mag));
}

/* most: NULL, or the largest magnitude so far: infinity and NaN are numbers above limit16 there. */
FN_ vf32_ K_(from_extended)(vu32_ u, kopt_format format, vu32_ *most) {
    vu32_ mag = and_(u, isplat_(0x7FFFFFFFu)), low, number;
    if (format == KOPT_BF16) return as_f32_(u);
    low = as_u32_(min_(as_f32_(mag), as_f32_(isplat_(0x04000000u)))); /* up to 2^-14, in units of 2^-40 */
    number = iadd_(as_u32_(mul_(convert_f32_(low), splat_(9.094947017729282e-13f))), shr_(isub_(mag, low), 3));
    if (most != KOPT_NULL_) {
        *most = imax_(*most, number);
    } else {
        number = select_(igt_(mag, isplat_(0x7BFFFFFFu)), isplat_(0x7F800000u), number);
        number = select_(igt_(mag, isplat_(0x7C000000u)), isplat_(0x7FC00000u), number);
    }
    return as_f32_(or_(number, xor_(u, mag)));
}
#endif

/* The nearest 16-bit number, any value; in the lower half. */
FN_ vu32_ K_(round_nearest16)(vf32_ x, kopt_format format) {
    vu32_ u = as_u32_(x);
    const vmask_ nan = igt_(and_(u, isplat_(0x7FFFFFFFu)), isplat_(0x7F800000u));
    if (format == KOPT_FP16) return select_(nan, isplat_(0x7E00u), narrow_fp16_(x));
    u = shr_(iadd_(iadd_(u, isplat_(0x7FFFu)), and_(shr_(u, 16), isplat_(1))), 16);
    return select_(nan, isplat_(0x7FC0u), u);
}

#ifdef ONE_LANE_
/* The weight that KAHAN shows. What it rounds off is kept, so in bf16 a tie need not go to even. */
FN_ vu32_ K_(round_kahan16)(vf32_ x, kopt_format format) {
    if (format == KOPT_FP16) return K_(round_nearest16)(x, format);
    return shr_(iadd_(K_(extended)(x, format, KOPT_NULL_), isplat_(0x8000u)), 16);
}
#endif

#ifndef FP16_
FN_ vf32_ load_fp16_(const kopt_byte_ *p) { return widen_fp16_(load16_(p)); }
FN_ vf32_ round_fp16_(vf32_ x, vu32_ *stored) {
    *stored = K_(round_nearest16)(x, KOPT_FP16);
    return widen_fp16_(*stored);
}
#endif

/* x as 16 bits, in the upper half. r: 16 random bits; for vectors there is nothing above them. */
FN_ vu32_ K_(round_stochastic)(vf32_ x, kopt_format format, vu32_ r, const constants_ *c) {
    const vu32_ u = K_(extended)(x, format, c);
#ifdef ONE_LANE_
    r = (u & 0x7FFFFFFFu) > (format == KOPT_BF16 ? 0x7F7EFFFFu : 0x7BFEFFFFu) ? 0x8000u : r & 0xFFFFu;
#endif
    return iadd_(u, r);
}

#ifndef ONE_LANE_
FN_ vu32_ K_(round16)(vf32_ x, kopt_format format, kopt_rounding how, vu32_ r, const constants_ *c) {
    const vu32_ u = as_u32_(x);
    if (how == KOPT_STOCHASTIC) return K_(round_stochastic)(x, format, r, c);
    if (format == KOPT_FP16) return shl_(narrow_fp16_(x), 16);
    return iadd_(iadd_(u, c->bias), and_(shr_(u, 16), c->one));
}
#else
#if KOPT_PASS_ == KOPT_PASS_CUDA_ /* everything in registers */
#define ROUND_ FN_
#else
#define ROUND_ static KOPT_NOINLINE_
#endif
/* What a step stores of a bf16 below 2^-126 is +0. */
FN_ vu32_ K_(flush_bf16)(vu32_ u, kopt_format format) { return format == KOPT_BF16 && (u & 0x7F800000u) == 0 ? 0 : u; }

ROUND_ vu32_ K_(round16_bits)(vu32_ x, kopt_format format, kopt_rounding how, vu32_ r) {
    vu32_ u = K_(extended)(as_f32_(x), KOPT_BF16, KOPT_NULL_); /* as in round_stochastic: once for both */
    format = KOPT_STEP_FORMAT_(format);
    u = KOPT_ROUND_MODE_(how) == KOPT_STOCHASTIC ? K_(round_stochastic)(as_f32_(x), format, r, KOPT_NULL_)
        : format == KOPT_FP16                    ? shl_(K_(round_nearest16)(as_f32_(x), format), 16)
                                                 : u + 0x7FFFu + ((u >> 16) & 1u);
    return K_(flush_bf16)(u, format);
}
#undef ROUND_
FN_ vu32_ K_(round16)(vf32_ x, kopt_format format, kopt_rounding how, vu32_ r, const constants_ *c) {
    KOPT_CAST_(void, c);
    return K_(round16_bits)(as_u32_(x), format, how, r);
}
#endif

FN_ vu32_ K_(flush_f32)(vf32_ x) {
    vu32_ u = as_u32_(x), mag = and_(u, isplat_(0x7FFFFFFFu));
    u = select_or_zero_(igt_(mag, isplat_(0x007FFFFFu)), u);
    return select_(igt_(mag, isplat_(0x7F800000u)), isplat_(0x7FC00000u), u);
}

/* A NaN without a payload, which could carry in the rounding of vectors. */
FN_ vf32_ K_(canonical_nan)(vf32_ x) {
    return as_f32_(
        select_(igt_(and_(as_u32_(x), isplat_(0x7FFFFFFFu)), isplat_(0x7F800000u)), isplat_(0x7FC00000u), as_u32_(x)));
}

FN_ vf32_ K_(widen)(vu32_ a, kopt_format format) {
    if (format == KOPT_F32) return as_f32_(a);
    return format == KOPT_BF16 ? as_f32_(shl_(a, 16)) : widen_fp16_(a);
}

/* ---- rules ---- */

/* Sections 4 to 6: the direction, which the rate multiplies. */

/* The moments of a weight, before and after the rule, and the roots of the new means of squares. */
typedef struct moments_ {
    vf32_ m, v, third, fourth, root, third_root;
} moments_;

FN_ vf32_ K_(moving_average)(vf32_ beta, vf32_ gain, vf32_ old, vf32_ x) {
    return add_(mul_(beta, old), mul_(gain, x));
}

FN_ vf32_ K_(moving_average_of_squares)(vf32_ beta, vf32_ gain, vf32_ old, vf32_ x) {
    return add_(mul_(beta, old), mul_(mul_(gain, x), x));
}

/* -1, 0 or 1; NaN stays. */
FN_ vf32_ K_(sign)(vf32_ x) {
    vu32_ mag = and_(as_u32_(x), isplat_(0x7FFFFFFFu)), one = or_(xor_(as_u32_(x), mag), isplat_(0x3F800000u));
    one = select_or_zero_(igt_(mag, isplat_(0)), one);
    return as_f32_(select_(igt_(mag, isplat_(0x7F800000u)), as_u32_(x), one));
}

/* The larger of two magnitudes; NaN stays. */
FN_ vf32_ K_(max_abs)(vf32_ a, vf32_ b) {
    vu32_ x = and_(as_u32_(a), isplat_(0x7FFFFFFFu)), y = and_(as_u32_(b), isplat_(0x7FFFFFFFu));
    return as_f32_(select_(igt_(x, y), x, y));
}

#ifdef KAHAN_OPT_VMATH
/* atan2(y, x) for x > 0, within 2^-17 of it: of the smaller over the larger a polynomial by its roots (an operation
   less, and two of its factors at a time), or pi/2 less that. Infinity over infinity is NaN. Coefficients:
   `tests/vmath.py coefficients`. In two parts, the division and what comes after it: see atan2_tile. */
typedef struct atan2_reduced_ {
    vf32_ y, q; /* q: the smaller over the larger */
    vmask_ steep;
} atan2_reduced_;

FN_ atan2_reduced_ K_(atan2_reduce)(vf32_ y, vf32_ x) {
    const vu32_ height = and_(as_u32_(y), isplat_(0x7FFFFFFFu));
    atan2_reduced_ o;
    o.y = y;
    o.q = div_(min_(as_f32_(height), x), max_(x, as_f32_(height))); /* NaN if one of them is */
    o.steep = igt_(height, as_u32_(x));
    return o;
}

FN_ vf32_ K_(atan2_polynomial)(const atan2_reduced_ *o) {
    const vf32_ z = mul_(o->q, o->q);
    const vf32_ a = add_(mul_(add_(z, splat_(1.75760663f)), z), splat_(3.77875996f));
    const vf32_ b = add_(mul_(sub_(z, splat_(3.12811708f)), z), splat_(6.84485292f));
    vf32_ angle = mul_(mul_(mul_(splat_(0.0131872343f), o->q), sub_(splat_(2.93177509f), z)), mul_(a, b));
    angle = masked_sub_(o->steep, splat_(1.57079637f), angle);
    return as_f32_(or_(as_u32_(angle), and_(as_u32_(o->y), isplat_(0x80000000u))));
}

FN_ vf32_ K_(atan2_positive)(vf32_ y, vf32_ x) {
    const atan2_reduced_ o = K_(atan2_reduce)(y, x);
    return K_(atan2_polynomial)(&o);
}
#endif

#define MOMENTS_ kopt_moments_here_(kind.rule, kind.moment_count)

/* w is the weight that decay sees, rest what it does not see of the weight, g the gradient; of w and rest only what L2
   and KOPT_EMA read. Moves the moments. What it returns the rate multiplies, but of Adam-atan2 and of a smooth Lion:
   there it is the first argument of atan2, *y being the second, or that of tanh. */
FN_ vf32_ K_(rule)(kopt_kind_ kind, const scalars_ *k, vf32_ w, vf32_ rest, vf32_ g, moments_ *p, vf32_ *y) {
    vf32_ x, denominator;
    *y = p->root = p->third_root = g;
    if (k->use_scale) g = mul_(g, k->grad_scale);
    if (k->use_l2) g = add_(g, mul_(k->l2, w));

    if (kind.rule == KOPT_SGD) {
        if (MOMENTS_ == 0) return g;
        p->m = K_(moving_average)(k->beta1, k->gain1, p->m, g);
        return kind.nesterov ? add_(g, mul_(k->extrapolation, p->m)) : p->m;
    }
    if (kind.rule == KOPT_LION) {
        x = K_(moving_average)(k->beta1, k->gain1, p->m, g);
        p->m = K_(moving_average)(k->beta2, k->gain2, p->m, g);
#ifdef KAHAN_OPT_VMATH
        if (k->smooth) return mul_(k->sharpness, x);
#endif
        return K_(sign)(x);
    }
    if (kind.rule == KOPT_EMA) return add_(sub_(w, g), rest);

    if (kind.rule == KOPT_ADAN) {
        const vf32_ change = k->first_step ? splat_(0) : sub_(g, p->fourth);
        p->m = K_(moving_average)(k->beta1, k->gain1, p->m, g);
        p->third = K_(moving_average)(k->beta2, k->gain2, p->third, change);
        p->v = K_(moving_average_of_squares)(k->beta3, k->gain3, p->v, add_(g, mul_(k->extrapolation, change)));
        p->fourth = g;
        p->root = sqrt_(p->v);
        return div_(add_(p->m, mul_(k->third_scale, p->third)), add_(mul_(p->root, k->root_scale), k->eps));
    }

    if (kind.rule != KOPT_ADAM && !KOPT_IS_ATAN2_(kind.rule)) return as_f32_(isplat_(0x7FC00000u)); /* none's formula */
    p->m = K_(moving_average)(k->beta1, k->gain1, p->m, g);
    p->v = K_(moving_average_of_squares)(k->beta2, k->gain2, p->v, g);
    denominator = p->root = sqrt_(p->v);
    if (MOMENTS_ > 2) {
        p->third = K_(max_abs)(p->third, p->v);
        denominator = p->third_root = sqrt_(p->third);
    }
    if (k->unrectified) return p->m; /* RAdam and Ranger, which differ from Adam in their scalars */
    *y = add_(mul_(denominator, k->root_scale), k->eps);
    return KOPT_IS_ATAN2_(kind.rule) ? p->m : div_(p->m, *y);
}

/* What is subtracted from a weight w: the rate times x, and its decay. */
FN_ vf32_ K_(update)(const scalars_ *k, vf32_ x, vf32_ w) {
    vf32_ update = mul_(k->rate, x);
    if (k->use_decay) update = add_(update, mul_(k->weight_decay, w));
    return update;
}

/* Lookahead: the update that leads from w to lookahead_rate of the way from the slow weight to w - update. */
FN_ vf32_ K_(lookahead)(vf32_ slow_scale, vf32_ w, vf32_ c, vf32_ update, vf32_ slow, vf32_ slow_c) {
    return add_(update, mul_(slow_scale, sub_(add_(sub_(w, slow), sub_(c, slow_c)), update)));
}

/* ---- weights and moments, from and to memory ---- */

/* The word of a weight of KOPT_COMPACT or KOPT_EXACT. Both words in their low halves, the residual with its sign. */
FN_ vu32_ K_(join_residual)(kopt_kind_ kind, vu32_ stored, vu32_ kept) {
    if (kind.rounding == KOPT_COMPACT) kept = shl_(kept, 8);
    if (kind.rounding == KOPT_EXACT) kept = isub_(xor_(kept, isplat_(0x8000u)), isplat_(0x8000u));
    return iadd_(shl_(stored, 16), kept);
}

/* A 16-bit weight w less the update, in the upper half; rest is the compensation of KOPT_KAHAN. *kept: its new residual
   in an upper half. *most: the largest magnitude of numbers that are rounded with 32 bits. */
FN_ vu32_ K_(commit)(kopt_kind_ kind, vf32_ w, vf32_ rest, vf32_ update, vu32_ r, const constants_ *c, vu32_ *kept,
                     vu32_ *most) {
    const int kahan = kind.rounding == KOPT_KAHAN;
    vf32_ y, shown;
    vu32_ u = r;
    if (kind.rounding == KOPT_EXACT || kind.rounding == KOPT_COMPACT) {
        vu32_ mag;
        y = sub_(w, update);
        mag = and_(as_u32_(y), c->of_sign);
        *most = imax_(*most, mag);
        u = K_(extended)(as_f32_(select_or_zero_(igt_(mag, c->subnormal), as_u32_(y))), kind.weight, c);
        if (kind.rounding == KOPT_COMPACT) { /* of the 16 bits below the weight the upper 8 are kept */
#ifdef ONE_LANE_
            r &= 0xFFFFu;
#endif
            u = iadd_(u, kind.compensation_rounding == KOPT_STOCHASTIC ? shr_(r, 8) : isplat_(0x80u));
            *kept = shl_(u, 8);
        } else {
            *kept = shl_(u, 16);
        }
        return iadd_(u, c->half_ulp);
    }
    if (kahan) {
        y = sub_(rest, update);
        shown = add_(w, y);
        if (kind.weight == KOPT_FP16) {
            shown = round_fp16_(shown, &u);
            u = shl_(u, 16);
        } else { /* what is rounded off is kept, so a tie need not go to even */
            u = iadd_(K_(extended)(shown, KOPT_BF16, c), c->half_ulp);
            shown = as_f32_(and_(u, c->upper));
        }
        y = add_(sub_(w, shown), y);
        if (kind.weight == KOPT_FP16) y = mul_(y, splat_(2048.0f));
    } else {
        y = sub_(w, update);
        if (kind.weight == KOPT_FP16) *most = imax_(*most, and_(as_u32_(y), c->of_sign));
    }
    *kept = K_(round16)(y, kind.weight, kahan ? kind.compensation_rounding : kind.rounding, r, c);
    return kahan ? u : *kept;
}

/* A moment as 16 bits in the upper half; root: of a mean of squares, which fp16 keeps so. No root becomes 0. */
FN_ vu32_ K_(round_moment)(vf32_ x, kopt_format format, int square, vf32_ root, kopt_rounding how, vu32_ r,
                           const constants_ *c) {
    vu32_ u;
    if (format != KOPT_FP16 || !square) return K_(round16)(x, format, how, r, c);
#ifndef ONE_LANE_
    if (how == KOPT_STOCHASTIC)
        u = iadd_(K_(extended_fp16)(as_u32_(root), c), r);
    else
#endif
        u = K_(round16)(root, KOPT_FP16, how, r, c);
    return imax_(u, as_u32_(min_(root, as_f32_(isplat_(0x00010000u)))));
}

#ifndef KOPT_MOMENT_ROUNDING_
#define KOPT_MOMENT_ROUNDING_
/* Moments are rounded as opt.moment_rounding says, but AMSGrad's maximum, which does not accumulate, to nearest. */
KOPT_INLINE_ kopt_rounding kopt_moment_rounding_(kopt_kind_ kind, int moment) {
    return moment == 2 && kopt_is_square_(kind.rule, moment) ? KOPT_NEAREST : kind.moment_rounding;
}
#endif

FN_ vf32_ K_(square_if)(vf32_ x, int rooted) { return rooted ? mul_(x, x) : x; }

FN_ kopt_kind_ K_(kind_of)(const kopt_job_ *j) {
    const kopt_step *s = j->step;
    kopt_kind_ kind;
    kind.rule = KOPT_RULE_(s->rule);
    if (kind.rule == KOPT_RADAM || kind.rule == KOPT_RANGER) kind.rule = KOPT_ADAM; /* they differ in their scalars */
    kind.weight = KOPT_FORMAT_(s->weight_format);
    kind.grad = KOPT_FORMAT_(j->grad_format);
#ifdef ONE_LANE_ /* it steps 8-bit moments in rows */
    kind.moment = KOPT_STEP_FORMAT_(j->moment_format);
#else
    kind.moment = KOPT_MOMENT_FORMAT_(j->moment_format);
#endif
    kind.rounding = KOPT_ROUNDING_(s->rounding);
    kind.moment_rounding = KOPT_STATE_ROUNDING_(s->moment_rounding);
    kind.compensation_rounding = KOPT_STATE_ROUNDING_(s->compensation_rounding);
    kind.moment_count = kopt_moments_here_(kind.rule, s->moment_count);
    kind.nesterov = KOPT_HAS_(KOPT_WITH_MOMENTUM) && s->nesterov;
    kind.buffered = KOPT_BUFFERED_MOMENTS_ && j->buffered;
    if (kind.buffered) kind.moment = KOPT_F32;
    return kind;
}

#ifdef ONE_LANE_
/* ---- scalar code ---- */

/* Takes any kind and any value. An element is in registers, as memory has it. */

typedef struct element_ {
    vu32_ weight, residual, grad, moment[4], slow, slow_residual;
} element_;

/* A weight as stored, with its residual: what decay sees, and what KAHAN keeps beside it. */
FN_ vf32_ K_(load_weight)(kopt_kind_ kind, vu32_ stored, vu32_ kept, vf32_ *rest) {
    *rest = splat_(0);
    if (kind.weight != KOPT_F32 && kind.rounding >= KOPT_COMPACT)
        return K_(from_extended)(K_(join_residual)(kind, stored, kept), kind.weight);
    if (kind.weight != KOPT_F32 && kind.rounding == KOPT_KAHAN) {
        *rest = K_(widen)(kept, kind.weight);
        if (kind.weight == KOPT_FP16) *rest = mul_(*rest, splat_(1.0f / 2048));
    }
    return K_(widen)(stored, kind.weight);
}

FN_ vf32_ K_(load_moment)(kopt_kind_ kind, const element_ *e, int moment) {
    return K_(square_if)(K_(widen)(e->moment[moment], kind.moment), kopt_stores_root_(kind, moment));
}

VECTOR_FN_ vu32_ K_(encode_moment)(kopt_kind_ kind, int moment, vf32_ x, vf32_ root, vu32_ r) {
    const int square = kopt_is_square_(kind.rule, moment);
    const constants_ c = K_(make_constants)();
    if (kind.buffered) return as_u32_(square ? root : x);
    if (kind.moment == KOPT_F32) return K_(flush_f32)(x);
    return K_(round_moment)(x, kind.moment, square, root, kopt_moment_rounding_(kind, moment),
                            K_(random16)(r, KOPT_CAST_(uint32_t, moment) + 1), &c) >>
           16;
}

/* The first stage: the moments. */
FN_ vf32_ K_(direction)(kopt_kind_ kind, const scalars_ *k, vf32_ w, vf32_ rest, element_ *e, vu32_ r, vf32_ *y) {
    moments_ p;
    vf32_ x;
    p.m = p.v = p.third = p.fourth = p.third_root = w; /* anything: a rule reads the moments that it has */
    if (MOMENTS_ > 0) p.m = K_(load_moment)(kind, e, 0);
    if (MOMENTS_ > 1) p.v = K_(load_moment)(kind, e, 1);
    if (MOMENTS_ > 2) p.third = K_(load_moment)(kind, e, 2);
    if (MOMENTS_ > 3) p.fourth = K_(load_moment)(kind, e, 3);
    x = K_(rule)(kind, k, w, rest, K_(widen)(e->grad, kind.grad), &p, y);
    if (MOMENTS_ > 0) e->moment[0] = K_(encode_moment)(kind, 0, p.m, p.m, r);
    if (MOMENTS_ > 1) e->moment[1] = K_(encode_moment)(kind, 1, p.v, p.root, r);
    if (MOMENTS_ > 2) e->moment[2] = K_(encode_moment)(kind, 2, p.third, p.third_root, r);
    if (MOMENTS_ > 3) e->moment[3] = K_(encode_moment)(kind, 3, p.fourth, p.fourth, r);
    return x;
}

/* A weight w less the update, with its residual. */
FN_ void K_(encode_weight)(kopt_kind_ kind, vf32_ w, vf32_ rest, vf32_ update, element_ *e, vu32_ r) {
    const vu32_ infinity = kind.weight == KOPT_BF16 ? 0x7F80u : 0x7C00u;
    const constants_ c = K_(make_constants)();
    vu32_ kept = 0, most = 0;
    if (kind.weight == KOPT_F32) {
        e->weight = K_(flush_f32)(sub_(w, update));
        return;
    }
    e->weight = K_(flush_bf16)(K_(commit)(kind, w, rest, update, r, &c, &kept, &most), kind.weight) >> 16;
    e->residual = kept >> 16;
    if ((e->weight & infinity) == infinity) e->residual = 0; /* an infinite weight or NaN has none */
}

/* The second stage: the weight. x: what the rate multiplies. Returns what is subtracted. */
FN_ vf32_ K_(commit_element)(kopt_kind_ kind, const scalars_ *k, vf32_ x, vf32_ w, vf32_ rest, element_ *e, vu32_ r,
                             int sync) {
    vf32_ slow_rest, update = K_(update)(k, x, w);
    if (sync) {
        const vf32_ slow = K_(load_weight)(kind, e->slow, e->slow_residual, &slow_rest);
        update = K_(lookahead)(k->slow_scale, w, rest, update, slow, slow_rest);
    }
    if (!k->moments_only) K_(encode_weight)(kind, w, rest, update, e, K_(random16)(r, 0));
    return update;
}

/* The weight in another format. */
FN_ vu32_ K_(encode_copy)(kopt_kind_ kind, const element_ *e, kopt_format format) {
    const vf32_ seen = K_(widen)(e->weight, kind.weight);
    return format == KOPT_F32 ? as_u32_(seen) : K_(round_nearest16)(seen, format);
}

/* Telemetry: did a nonzero update move the weight, or what is kept of it? */
KOPT_SMALL_FN_ KOPT_HOST_DEVICE_ void K_(tally)(kopt_counts *counts, vu32_ update, int moved, int kept_moved) {
    const int wanted = (update & 0x7FFFFFFFu) != 0, still = wanted && !moved;
    counts->wanted += wanted != 0;
    counts->still += still != 0;
    counts->stuck += still && !kept_moved;
}

/* ... of an element that was *before. */
FN_ void K_(count_element)(kopt_kind_ kind, kopt_counts *counts, const element_ *before, const element_ *e,
                           vf32_ update) {
    const size_t size = kopt_bytes_of_residual_(kind.weight, kind.rounding);
    K_(tally)(counts, as_u32_(update), e->weight != before->weight,
              size != 0 && ((e->residual ^ before->residual) & (size == 1 ? 0xFFu : 0xFFFFu)) != 0);
}

#if defined(KAHAN_OPT_VMATH) && defined(ONE_PASS_)
FN_ vf32_ K_(vmath_tanh)(vf32_ x); /* below, with vector mathematics */
#endif

/* What comes between the stages: of a table only in rows. */
FN_ vf32_ K_(rule_function)(kopt_kind_ kind, const scalars_ *k, vf32_ x, vf32_ y) {
#ifdef KAHAN_OPT_VMATH
    if (kind.rule == KOPT_ADAM_ATAN2) return K_(atan2_positive)(x, y);
#ifdef ONE_PASS_
    if (kind.rule == KOPT_LION && k->smooth) return K_(vmath_tanh)(x);
#endif
#endif
    KOPT_CAST_(void, kind);
    KOPT_CAST_(void, k);
    KOPT_CAST_(void, y);
    return x;
}

#if KOPT_PASS_ == KOPT_PASS_SCALAR_
/* The same of a tile, with its updates, and what its weights and residuals were. */
static KOPT_UNUSED_ KOPT_NOINLINE_ void kopt_tally_(const kopt_job_ *tile, const kopt_byte_ *update,
                                                    const kopt_byte_ *before, const kopt_byte_ *kept_before,
                                                    size_t size, size_t residual_size) {
    size_t i, q;
    for (i = 0; i < tile->end; i++) {
        int moved = 0, kept_moved = 0;
        for (q = 0; q < size; q++) moved |= before[i * size + q] != tile->weight[i * size + q];
        for (q = 0; q < residual_size; q++)
            kept_moved |= kept_before[i * residual_size + q] != tile->residual[i * residual_size + q];
        K_(tally)(tile->counts, kopt_load32_(update + 4 * i), moved, kept_moved);
    }
}
#endif

FN_ vu32_ K_(load_at)(const kopt_byte_ *p, size_t i, size_t size) { return K_(load_n)(p + i * size, size, 1); }
FN_ void K_(store_at)(kopt_byte_ *p, size_t i, size_t size, vu32_ a) { K_(store_n)(p + i * size, size, 1, a); }

/* Of the element at i. r: its random number. x_row and y_row: where x and y of it are, if it is not both stages. */
FN_ void K_(step_element)(const kopt_job_ *j, kopt_kind_ kind, const scalars_ *k, size_t i, vu32_ r, int stages,
                          kopt_byte_ *x_row, kopt_byte_ *y_row) {
    const size_t weight_size = kopt_bytes_of_(kind.weight), grad_size = kopt_bytes_of_(kind.grad);
    const size_t residual_size = kopt_bytes_of_residual_(kind.weight, kind.rounding),
                 moment_size = kopt_bytes_of_(kind.moment);
    vf32_ w, rest, x, y, update;
    element_ e, before;
    e.moment[0] = e.moment[1] = e.moment[2] = e.moment[3] = e.slow = e.slow_residual = e.grad = 0;
    before.moment[0] = before.moment[1] = before.moment[2] = before.moment[3] = 0;
    before.slow = before.slow_residual = before.grad = 0;
    e.weight = before.weight = K_(load_at)(j->weight, i, weight_size);
    e.residual = before.residual = residual_size != 0 ? K_(load_at)(j->residual, i, residual_size) : 0;
    w = K_(load_weight)(kind, e.weight, e.residual, &rest);
    if ((stages & KOPT_DIRECTION_STAGE_) != 0) {
        e.grad = K_(load_at)(j->grad, i, grad_size);
        if (MOMENTS_ > 0) e.moment[0] = K_(load_at)(j->moment[0], i, moment_size);
        if (MOMENTS_ > 1) e.moment[1] = K_(load_at)(j->moment[1], i, moment_size);
        if (MOMENTS_ > 2) e.moment[2] = K_(load_at)(j->moment[2], i, moment_size);
        if (MOMENTS_ > 3) e.moment[3] = K_(load_at)(j->moment[3], i, moment_size);
        x = K_(direction)(kind, k, w, rest, &e, r, &y);
        if (MOMENTS_ > 0) K_(store_at)(j->moment[0], i, moment_size, e.moment[0]);
        if (MOMENTS_ > 1) K_(store_at)(j->moment[1], i, moment_size, e.moment[1]);
        if (MOMENTS_ > 2) K_(store_at)(j->moment[2], i, moment_size, e.moment[2]);
        if (MOMENTS_ > 3) K_(store_at)(j->moment[3], i, moment_size, e.moment[3]);
        if (stages == KOPT_DIRECTION_STAGE_) {
            store32_(x_row, as_u32_(K_(canonical_nan)(x)));
#ifdef KAHAN_OPT_VMATH
            if (kind.rule == KOPT_ADAM_ATAN2) store32_(y_row, as_u32_(K_(canonical_nan)(y)));
#else
            KOPT_CAST_(void, y_row);
#endif
            return;
        }
        x = K_(rule_function)(kind, k, x, y);
    } else {
        x = as_f32_(load32_(x_row));
    }
    if ((stages & KOPT_FINAL_STAGE_) != 0 && k->sync) {
        e.slow = K_(load_at)(j->slow, i, weight_size);
        e.slow_residual = residual_size != 0 ? K_(load_at)(j->slow_residual, i, residual_size) : 0;
    }
    update = K_(commit_element)(kind, k, x, w, rest, &e, r, (stages & KOPT_FINAL_STAGE_) != 0 && k->sync);
    if (!k->moments_only) {
        K_(store_at)(j->weight, i, weight_size, e.weight);
        if (residual_size != 0) K_(store_at)(j->residual, i, residual_size, e.residual);
        if ((stages & KOPT_FINAL_STAGE_) != 0 && k->sync) { /* the next slow weight */
            K_(store_at)(j->slow, i, weight_size, e.weight);
            if (residual_size != 0) K_(store_at)(j->slow_residual, i, residual_size, e.residual);
        }
        if (KOPT_HAS_(KOPT_WITH_EXTRAS) && (stages & KOPT_FINAL_STAGE_) != 0 && j->copy != KOPT_NULL_)
            K_(store_at)(j->copy, i, kopt_bytes_of_(j->copy_format), K_(encode_copy)(kind, &e, j->copy_format));
    }
    if ((stages & KOPT_FINAL_STAGE_) != 0 && k->zero_grad) K_(store_at)(j->grad, i, grad_size, 0);
    if (KOPT_HAS_(KOPT_WITH_EXTRAS) && (stages & KOPT_FINAL_STAGE_) != 0 && j->counts != KOPT_NULL_)
        K_(count_element)(kind, j->counts, &before, &e, update);
}

#if KOPT_PASS_ == KOPT_PASS_SCALAR_
/* One stage of the n elements at i, x and y in rows. parted: first the even elements, then the odd ones. */
static KOPT_NOINLINE_ KOPT_UNUSED_ void kopt_step_elements_scalar_(const kopt_job_ *j, size_t i, size_t n, int stages,
                                                                   kopt_byte_ *x, kopt_byte_ *y, int parted) {
    const scalars_ k = K_(splat_job)(j);
    const kopt_kind_ kind = K_(kind_of)(j);
    const philox_key_ cipher = K_(make_philox_key)(j->step->seed, j->step->step, j->id, j->stream);
    vu32_ numbers[4];
    size_t q;
    for (q = 0; q < n; q++) {
        const size_t at = 4 * (parted ? q % 2 * (n / 2) + q / 2 : q);
        const vu32_ r = K_(random_at)(numbers, &cipher, KOPT_INDEX_(j->first + i + q), q == 0);
        kopt_byte_ *const x_at = x == KOPT_NULL_ ? x : x + at, *const y_at = y == KOPT_NULL_ ? y : y + at;
        K_(step_element)(j, kind, &k, i + q, r, stages, x_at, y_at);
    }
}
#endif

#if KOPT_PASS_ == KOPT_PASS_SCALAR_
/* A moment from a row of fp32, of a mean of squares its root, to fp16. number, twice: 16 bits of each element. */
static KOPT_NOINLINE_ KOPT_UNUSED_ void kopt_store_fp16_buffer_scalar_(kopt_byte_ *to, const kopt_byte_ *row,
                                                                       int square, int moment, kopt_rounding how,
                                                                       const kopt_byte_ *number,
                                                                       const kopt_byte_ *twice, size_t n) {
    const constants_ c = K_(make_constants)();
    size_t i;
    for (i = 0; i < n; i++) {
        const vf32_ x = as_f32_(load32_(row + 4 * i));
        const vu32_ r = load16_(number + 2 * i) + (KOPT_CAST_(uint32_t, moment) + 1) * load16_(twice + 2 * i);
        K_(store_at)(to, i, 2, K_(round_moment)(x, KOPT_FP16, square, x, how, r, &c) >> 16);
    }
}
#endif

#if defined(KAHAN_OPT_VMATH) && !defined(ONE_PASS_)
/* With the function of a table between the stages. */
static KOPT_NOINLINE_ void K_(walk_tiled)(const kopt_job_ *j, size_t begin, size_t end) {
    float x[KOPT_TILE_], y[KOPT_TILE_];
    kopt_byte_ *const x_row = KOPT_POINTER_(kopt_byte_ *, x), *const y_row = KOPT_POINTER_(kopt_byte_ *, y);
    size_t n, q;
    for (; begin < end; begin += n) {
        n = end - begin < KOPT_TILE_ ? end - begin : KOPT_TILE_;
        kopt_step_elements_scalar_(j, begin, n, KOPT_DIRECTION_STAGE_, x_row, y_row, 0);
        for (q = 0; j->quotient && q < n; q++) x[q] = div_(x[q], y[q]);
        kopt_call_rule_function_(j, x, y, n);
        kopt_step_elements_scalar_(j, begin, n, KOPT_COMMIT_STAGE_ | KOPT_FINAL_STAGE_, x_row, y_row, 0);
    }
}
#endif

/* Elements [begin, end), both stages of each at once; with a table of functions, stage by stage. */
NOINLINE_FN_ void K_(walk)(const kopt_job_ *j, size_t begin, size_t end) {
#if !defined(KOPT_X86_) && !defined(KOPT_NEON_) /* where nothing gives a turn back, there is one copy of step_element */
    const scalars_ k = K_(splat_job)(j);
    const kopt_kind_ kind = K_(kind_of)(j);
    const philox_key_ cipher = K_(make_philox_key)(j->step->seed, j->step->step, j->id, j->stream);
    const int random = kopt_needs_random_(kind);
    vu32_ numbers[4];
    size_t i;
#endif
#if defined(KAHAN_OPT_VMATH) && !defined(ONE_PASS_)
    if (j->vmath != KOPT_NULL_) {
        K_(walk_tiled)(j, begin, end);
        return;
    }
#endif
#if defined(KOPT_X86_) || defined(KOPT_NEON_)
    kopt_step_elements_scalar_(j, begin, end - begin, KOPT_ALL_STAGES_, KOPT_NULL_, KOPT_NULL_, 0);
#else
    for (i = begin; i < end; i++)
        K_(step_element)(j, kind, &k, i,
                         random ? K_(random_at)(numbers, &cipher, KOPT_INDEX_(j->first + i), i == begin) : 0,
                         KOPT_ALL_STAGES_, KOPT_NULL_, KOPT_NULL_);
#endif
}
#else /* vectors */
/* ---- pairs of vectors ---- */

/* The loops step two vectors at a time: a pair. Its elements lie in the order of memory, or one vector has the even
   elements and the other the odd ones, the halves of 32-bit words: so nothing crosses lanes where everything is bf16. */

#define PAIR_ (2 * LANES_)
typedef struct pair_ {
    vf32_ a, b;
} pair_;

/* The arrays of a job, where no store of a stage can change them. */
typedef struct arrays_ {
    kopt_byte_ *weight, *residual, *grad, *moment[4];
} arrays_;

FN_ arrays_ K_(arrays_of)(const kopt_job_ *j) {
    arrays_ a;
    a.weight = j->weight;
    a.residual = j->residual;
    a.grad = j->grad;
    a.moment[0] = j->moment[0];
    a.moment[1] = j->moment[1];
    a.moment[2] = j->moment[2];
    a.moment[3] = j->moment[3];
    return a;
}

/* How a turn lies, in bits: are its elements parted? Has each half of its random numbers a vector, zero-extended? */
#define EVEN_ODD_ 1
#define RANDOM_ZERO_EXTENDED_ 2

/* Those of either vector, zero-extended. */
FN_ vu32_ K_(first16)(vu32_ both, int lie, const constants_ *c) {
    return (lie & RANDOM_ZERO_EXTENDED_) != 0 ? both
           : (lie & EVEN_ODD_) != 0           ? and_(both, c->lower)
                                              : unpack_low16_(both);
}
FN_ vu32_ K_(second16)(vu32_ both, int lie) {
    return (lie & RANDOM_ZERO_EXTENDED_) != 0 ? both : (lie & EVEN_ODD_) != 0 ? shr_(both, 16) : unpack_high16_(both);
}

/* The random numbers of a turn: number 0, and what each store adds. Both vectors hold the same, if they are not
   apart. */
typedef struct random_pair_ {
    vu32_ own[2], twice[2];
} random_pair_;

FN_ pair_ K_(load_pair)(const kopt_byte_ *p, size_t i, kopt_format format, int lie, const constants_ *c) {
    pair_ x;
    if (format == KOPT_F32) {
        x.a = as_f32_(load32_(p + 4 * i));
        x.b = as_f32_(load32_(p + 4 * (i + LANES_)));
    } else if (format == KOPT_FP16) {
        x.a = load_fp16_(p + 2 * i);
        x.b = load_fp16_(p + 2 * (i + LANES_));
    } else if ((lie & EVEN_ODD_) != 0) {
        const vu32_ both = load32_(p + 2 * i);
        x.a = as_f32_(shl_(both, 16));
        x.b = as_f32_(and_(both, c->upper));
    } else {
        x.a = as_f32_(shl_(load16_(p + 2 * i), 16));
        x.b = as_f32_(shl_(load16_(p + 2 * (i + LANES_)), 16));
    }
    return x;
}

/* The upper halves of a turn. */
FN_ vu32_ K_(pack_pair)(vu32_ a, vu32_ b, int lie) {
#ifdef SPECIALIZED_
    if ((lie & EVEN_ODD_) != 0) return interleave_high16_(a, b);
#endif
    KOPT_CAST_(void, lie);
    return pack_high16_(a, b);
}

/* Weights, and the compensation of KOPT_KAHAN. most: see from_extended. */
FN_ pair_ K_(load_weight_pair)(const arrays_ *j, kopt_kind_ kind, size_t i, int lie, const constants_ *c, pair_ *rest,
                               vu32_ *most) {
    pair_ w;
    rest->a = rest->b = splat_(0);
    if (kind.weight != KOPT_F32 && kind.rounding >= KOPT_COMPACT) {
        const int exact = kind.rounding == KOPT_EXACT;
        const kopt_byte_ *const kept = j->residual + (exact ? 2 * i : i);
        const vu32_ a = exact ? load16_(kept) : load8_(kept);
        const vu32_ b = exact ? load16_(kept + 2 * LANES_) : load8_(kept + LANES_);
        w.a = K_(from_extended)(K_(join_residual)(kind, load16_(j->weight + 2 * i), a), kind.weight, most);
        w.b = K_(from_extended)(K_(join_residual)(kind, load16_(j->weight + 2 * (i + LANES_)), b), kind.weight, most);
        return w;
    }
    if (kind.weight != KOPT_F32 && kind.rounding == KOPT_KAHAN) {
        *rest = K_(load_pair)(j->residual, i, kind.weight, lie, c);
        if (kind.weight == KOPT_FP16) {
            rest->a = mul_(rest->a, splat_(1.0f / 2048));
            rest->b = mul_(rest->b, splat_(1.0f / 2048));
        }
    }
    return K_(load_pair)(j->weight, i, kind.weight, lie, c);
}

/* The second stage of a turn, x being what the rate multiplies: weights and residuals. Returns 0, with nothing stored,
   if it wants the code of one lane. */
FN_ int K_(commit_pair)(const arrays_ *j, kopt_kind_ kind, const scalars_ *k, const constants_ *c, size_t i, pair_ x,
                        const vu32_ own[2], int lie) {
    vu32_ most = isplat_(0), stored, kept, a, b, kept_a = most, kept_b = most;
    pair_ rest, w = K_(load_weight_pair)(j, kind, i, lie, c, &rest, &most);
    if (kind.weight == KOPT_F32) {
        store32_(j->weight + 4 * i, K_(flush_f32)(sub_(w.a, K_(update)(k, x.a, w.a))));
        store32_(j->weight + 4 * (i + LANES_), K_(flush_f32)(sub_(w.b, K_(update)(k, x.b, w.b))));
        return 1;
    }
    a = K_(commit)(kind, w.a, rest.a, K_(update)(k, x.a, w.a), K_(first16)(own[0], lie, c), c, &kept_a, &most);
    b = K_(commit)(kind, w.b, rest.b, K_(update)(k, x.b, w.b), K_(second16)(own[1], lie), c, &kept_b, &most);
    stored = K_(pack_pair)(a, b, lie);
    kept = K_(pack_pair)(kept_a, kept_b, lie);
    if (kind.weight == KOPT_BF16 && kind.rounding < KOPT_COMPACT) stored = flush16_(stored, c->exponent);
    if (kind.weight == KOPT_BF16 && kind.rounding < KOPT_COMPACT && any_gt16_(and_(stored, c->magnitude), c->limit))
        return 0;
    if (kind.weight == KOPT_BF16 && kind.rounding >= KOPT_COMPACT && any_true_(igt_(most, isplat_(0x7F7EFFFFu))))
        return 0;
    if (kind.weight == KOPT_FP16 && kind.rounding == KOPT_KAHAN &&
        any_gt16_(and_(stored, c->magnitude), isplat_(0x7BFF7BFFu)))
        return 0;
    if (kind.weight == KOPT_FP16 && kind.rounding != KOPT_KAHAN && any_true_(igt_(most, c->limit16))) return 0;
    store32_(j->weight + 2 * i, stored);
    if (kind.rounding == KOPT_KAHAN && kind.weight == KOPT_BF16) kept = flush16_(kept, c->exponent);
    if (kind.rounding == KOPT_COMPACT) store8_from16_(j->residual + i, kept);
    if (kind.rounding == KOPT_KAHAN || kind.rounding == KOPT_EXACT) store32_(j->residual + 2 * i, kept);
    return 1;
}

/* For each moment m that a rule has. Compilers unroll it, so that m is constant; but not before they have left out what
   cannot come, which takes them a fraction of the time that four copies in the source would. */
#if defined(KOPT_GCC_) && __GNUC__ >= 8
#define EACH_MOMENT_ _Pragma("GCC unroll 4") for (m = 0; m < MOMENTS_; m++)
#else
#define EACH_MOMENT_ for (m = 0; m < 4 && m < MOMENTS_; m++)
#endif

FN_ vf32_ K_(moment_at)(const moments_ *p, int m) {
    return m == 0 ? p->m : m == 1 ? p->v : m == 2 ? p->third : p->fourth;
}
FN_ vf32_ K_(root_at)(const moments_ *p, int m) { return m == 2 ? p->third_root : p->root; }

/* One vector of a turn, its moments rounded. */
typedef struct half_pair_ {
    moments_ p;
    vu32_ u[4], most; /* moments in the upper halves; the largest magnitude of what fp16 has rounded */
} half_pair_;

/* The rule and its moments, of the first or the second vector. */
FN_ vf32_ K_(direction_half)(kopt_kind_ kind, const scalars_ *k, const constants_ *c, vf32_ w, vf32_ rest, vf32_ g,
                             vu32_ number, vu32_ twice, int second, int lie, half_pair_ *h, vf32_ *y) {
    const vf32_ x = K_(rule)(kind, k, w, rest, g, &h->p, y);
    int m;
    h->u[0] = h->u[1] = h->u[2] = h->u[3] = number; /* anything */
    h->most = isplat_(0);
    if (kind.moment == KOPT_F32) return x;
    EACH_MOMENT_ {
        const int square = kopt_is_square_(kind.rule, m);
        const vf32_ moment = K_(moment_at)(&h->p, m), root = K_(root_at)(&h->p, m);
        number = add16_(number, twice);
        h->u[m] = K_(round_moment)(moment, kind.moment, square, root, kopt_moment_rounding_(kind, m),
                                   second ? K_(second16)(number, lie) : K_(first16)(number, lie, c), c);
        if (kind.moment == KOPT_FP16) h->most = imax_(h->most, and_(as_u32_(square ? root : moment), c->of_sign));
    }
    return x;
}

/* Stores the moments, or returns 0. largest: of those that go to rows. */
FN_ int K_(store_moment_pair)(const arrays_ *j, kopt_kind_ kind, const constants_ *c, size_t i, const half_pair_ *a,
                              const half_pair_ *b, int lie, vu32_ *largest) {
    vu32_ joint[4], most = isplat_(0);
    int m;
    if (kind.moment == KOPT_F32) {
        EACH_MOMENT_ {
            const int rooted = kopt_stores_root_(kind, m);
            const vf32_ x = rooted ? K_(root_at)(&a->p, m) : K_(moment_at)(&a->p, m);
            const vf32_ y = rooted ? K_(root_at)(&b->p, m) : K_(moment_at)(&b->p, m);
            if (kind.buffered) largest[m] = imax_(largest[m], imax_(K_(abs_u32)(x), K_(abs_u32)(y)));
            store32_(j->moment[m] + 4 * i, kind.buffered ? as_u32_(x) : K_(flush_f32)(x));
            store32_(j->moment[m] + 4 * (i + LANES_), kind.buffered ? as_u32_(y) : K_(flush_f32)(y));
        }
        return 1;
    }
    EACH_MOMENT_ {
        joint[m] = K_(pack_pair)(a->u[m], b->u[m], lie);
        if (kind.moment == KOPT_BF16) {
            joint[m] = flush16_(joint[m], c->exponent);
            most = max16_(most, and_(joint[m], c->magnitude));
        }
    }
    if (kind.moment == KOPT_BF16 ? any_gt16_(most, c->limit) : any_true_(igt_(imax_(a->most, b->most), c->limit16)))
        return 0;
    EACH_MOMENT_ store32_(j->moment[m] + 2 * i, joint[m]);
    return 1;
}

/* The first stage of a turn: gradients and moments, x and of Adam-atan2 y. w_row and rest_row: the turn's weights in
   fp32, if the rule wants them and they are in rows. Returns 0, with nothing stored, if it wants the code of
   one lane. */
FN_ int K_(direction_pair)(const arrays_ *j, kopt_kind_ kind, const scalars_ *k, const constants_ *c, size_t i,
                           const vf32_ *w_row, const vf32_ *rest_row, const random_pair_ *r, int lie, pair_ *x,
                           pair_ *y, vu32_ *largest) {
    const pair_ g = K_(load_pair)(j->grad, i, kind.grad, lie, c);
    pair_ w = g, rest = g, kept[4];
    half_pair_ p, q;
    int m;
    if (k->use_l2 || kind.rule == KOPT_EMA) {
        if (w_row == KOPT_NULL_) {
            w = K_(load_weight_pair)(j, kind, i, lie, c, &rest, KOPT_NULL_);
        } else {
            w.a = w_row[0];
            w.b = w_row[1];
            rest.a = rest_row[0];
            rest.b = rest_row[1];
        }
    }
    kept[0] = kept[1] = kept[2] = kept[3] = g; /* anything: a rule reads the moments that it has */
    EACH_MOMENT_ {
        kept[m] = K_(load_pair)(j->moment[m], i, kind.moment, lie, c);
        kept[m].a = K_(square_if)(kept[m].a, kopt_stores_root_(kind, m));
        kept[m].b = K_(square_if)(kept[m].b, kopt_stores_root_(kind, m));
    }
    p.p.m = kept[0].a;
    q.p.m = kept[0].b;
    p.p.v = kept[1].a;
    q.p.v = kept[1].b;
    p.p.third = kept[2].a;
    q.p.third = kept[2].b;
    p.p.fourth = kept[3].a;
    q.p.fourth = kept[3].b;
    x->a = K_(direction_half)(kind, k, c, w.a, rest.a, g.a, r->own[0], r->twice[0], 0, lie, &p, &y->a);
    x->b = K_(direction_half)(kind, k, c, w.b, rest.b, g.b, r->own[1], r->twice[1], 1, lie, &q, &y->b);
    /* the bits of a NaN of another format, or of a weight with its residual, could carry when it becomes a bf16 */
    if (kind.grad != kind.weight || (MOMENTS_ > 0 && kind.moment != kind.weight) ||
        (k->use_l2 && kind.rounding >= KOPT_COMPACT)) {
        if (any_true_(unordered_(x->a, x->b))) return 0;
        if (kind.rule == KOPT_ADAM_ATAN2 && any_true_(unordered_(y->a, y->b))) return 0;
    }
    return MOMENTS_ == 0 || K_(store_moment_pair)(j, kind, c, i, &p, &q, lie, largest);
}

/* ---- random numbers of a tile, in the order of memory ---- */

typedef struct random_tile_ {
    uint32_t words[KOPT_RANDOM_GROUP_ / 2];                                        /* of the span */
    uint32_t lower[3 * KOPT_RANDOM_GROUP_ / 2], upper[3 * KOPT_RANDOM_GROUP_ / 2]; /* of up to 3 rows: random_group */
    const kopt_byte_ *number, *twice;                                              /* of the tile's first element */
} random_tile_;

FN_ random_pair_ K_(load_random_pair)(const kopt_byte_ *number, const kopt_byte_ *twice, size_t i) {
    random_pair_ r;
    r.own[0] = r.own[1] = load32_(number + 2 * i);
    r.twice[0] = r.twice[1] = load32_(twice + 2 * i);
    return r;
}

/* Of the n elements from this index on. fresh: there was no tile before; alone: nor is there one behind it. */
NOINLINE_FN_ void K_(fill_random_tile)(random_tile_ *r, const philox_key_ *cipher, kopt_index_ index, size_t n,
                                       int fresh, int alone) {
    const size_t offset = KOPT_CAST_(unsigned, index % KOPT_RANDOM_GROUP_);
    const int part = alone && offset + n <= KOPT_RANDOM_GROUP_;
    const size_t from = part ? offset : 0, to = part ? offset + n : KOPT_RANDOM_GROUP_;
    size_t q;
    for (q = 0; q < offset + n; q += KOPT_RANDOM_GROUP_) {
        const kopt_index_ at = index - offset + q;
        if (at % KOPT_RANDOM_SPAN_ == 0 || (fresh && q == 0)) K_(random_span)(r->words, cipher, at, from, to);
        K_(random_group)(r->lower + q / 2, r->upper + q / 2, r->words, at, from, to);
    }
    r->number = KOPT_CONST_POINTER_(const kopt_byte_ *, r->lower) + 2 * offset;
    r->twice = KOPT_CONST_POINTER_(const kopt_byte_ *, r->upper) + 2 * offset;
}

/* ---- tiles ---- */

/* A tile goes stage by stage. Each stage is a function with constants for what it asks at each pair; it runs over whole
   pairs, and over a padded copy of the tail. Takes any kind. */

typedef struct buffers_ { /* x: what the rate multiplies. w, rest: weights, if a stage but the last wants them */
    vf32_ x[KOPT_TILE_ / LANES_], w[KOPT_TILE_ / LANES_], rest[KOPT_TILE_ / LANES_];
    vu32_ largest[4]; /* of new moments in rows the largest magnitudes, of each lane, */
    uint32_t most[4]; /* and of all */
    vf32_ *moment[4]; /* moments as they are kept, if they are in rows */
    random_tile_ r;
} buffers_;

#define AS_BYTES_(row) KOPT_POINTER_(kopt_byte_ *, row)
#define Y_BUFFER_(rows) ((rows)->rest) /* of Adam-atan2, which does not read what it takes the place of */

/* ---- 8-bit moments in fp32 buffers ---- */

/* Section 6b. */

FN_ void K_(decode_elements)(vf32_ *row, const kopt_byte_ *code, vf32_ scale, int square, size_t n) {
    kopt_byte_ part[PAIR_];
    size_t i;
    for (i = 0; i < n; i += PAIR_) {
        if (n - i < PAIR_) code = kopt_copy_padded_(part, sizeof part, code, n - i);
        row[0] = mul_(K_(decode_q8)(load8_(code), square), scale);
        row[1] = mul_(K_(decode_q8)(load8_(code + LANES_), square), scale);
        row += 2;
        code += PAIR_;
    }
}

/* n elements of a moment in 8 bits, of one block. */
NOINLINE_FN_ void K_(decode_block)(vf32_ *row, const kopt_byte_ *code, const kopt_byte_ *scale, int square, size_t n) {
    const vf32_ its_scale = as_f32_(isplat_(kopt_load32_(scale)));
    if (square)
        K_(decode_elements)(row, code, its_scale, 1, n);
    else
        K_(decode_elements)(row, code, its_scale, 0, n);
}

FN_ void K_(encode_pair)(kopt_byte_ *code, const vf32_ *x, vf32_ inverse, int square, vu32_ number,
                         const constants_ *c) {
    number = pack_high16_(K_(encode_q8)(mul_(x[0], inverse), square, K_(first16)(number, 0, c)),
                          K_(encode_q8)(mul_(x[1], inverse), square, K_(second16)(number, 0)));
    store8_from16_(code, square ? number : or_(number, shr_(number, 8)));
}

/* r: NULL, or the random numbers. */
FN_ void K_(encode_elements)(kopt_byte_ *code, const vf32_ *row, vf32_ inverse, int square, int moment,
                             const random_tile_ *r, size_t n) {
    const constants_ c = K_(make_constants)();
    const vu32_ store = isplat_hoisted_((KOPT_CAST_(uint32_t, moment) + 1) * 0x00010001u),
                half = isplat_hoisted_(0x80008000u);
    const kopt_byte_ *const number = r == KOPT_NULL_ ? KOPT_NULL_ : r->number;
    const kopt_byte_ *const twice = r == KOPT_NULL_ ? KOPT_NULL_ : r->twice;
    kopt_byte_ part[PAIR_];
    size_t i;
    for (i = 0; i < n; i += PAIR_) {
        const vu32_ its_number =
            r == KOPT_NULL_ ? half : add16_(load32_(number + 2 * i), mul16_(load32_(twice + 2 * i), store));
        K_(encode_pair)(n - i < PAIR_ ? part : code + i, row, inverse, square, its_number, &c);
        row += 2;
    }
    if (n % PAIR_ != 0) kopt_copy_noinline_(code + n / PAIR_ * PAIR_, part, n % PAIR_);
}

NOINLINE_FN_ void K_(encode_block)(kopt_byte_ *code, kopt_byte_ *scale, const vf32_ *row, uint32_t largest, int square,
                                   int moment, kopt_rounding how, const random_tile_ *r, size_t n) {
    const uint32_t its_scale = kopt_scale_q8_(largest, square);
    kopt_store32_(scale, its_scale);
    if (kopt_codes_are_zero_(its_scale)) {
        kopt_zero_(code, n);
        return;
    }
    if (how == KOPT_NEAREST) r = KOPT_NULL_;
    if (square)
        K_(encode_elements)(code, row, K_(inverse_scale_q8)(its_scale, 1), 1, moment, r, n);
    else
        K_(encode_elements)(code, row, K_(inverse_scale_q8)(its_scale, 0), 0, moment, r, n);
}

/* ---- stages of a tile ---- */

FN_ uint32_t K_(reduce_max)(vu32_ a) {
    uint32_t lane[LANES_], largest = 0;
    size_t i;
    store32_(KOPT_POINTER_(kopt_byte_ *, lane), a);
    for (i = 0; i < LANES_; i++) largest = lane[i] > largest ? lane[i] : largest;
    return largest;
}

/* The first stage of a turn in the code of one lane. buffered: so many moments are. A kind would be in memory here, and
   its constants lost to who calls. */
NOINLINE_FN_ void K_(direction_in_scalar)(const kopt_job_ *tile, buffers_ *rows, size_t i, int buffered, int with_y) {
    const size_t q = i / LANES_, n = tile->end - i < PAIR_ ? tile->end - i : PAIR_;
    kopt_job_ job;
    int m;
    kopt_copy_job_(&job, tile);
    for (m = 0; m < 4; m++) /* not `m < buffered`: no call of memcpy */
        if (m < buffered) job.moment[m] = AS_BYTES_(rows->moment[m]);
    job.buffered = buffered > 0;
    rows->x[q] = rows->x[q + 1] = splat_(1); /* behind the end of a tail */
    if (with_y) Y_BUFFER_(rows)[q] = Y_BUFFER_(rows)[q + 1] = splat_(1);
    kopt_step_elements_scalar_(&job, i, n, KOPT_DIRECTION_STAGE_, AS_BYTES_(rows->x + q),
                               AS_BYTES_(Y_BUFFER_(rows) + q), 0);
    for (m = 0; m < buffered; m++) {
        const kopt_byte_ *const row = job.moment[m] + 4 * i;
        const vu32_ first = K_(load_n)(row, 4, K_(lanes_left)(n, 0));
        const vu32_ second = n > LANES_ ? K_(load_n)(row + 4 * LANES_, 4, n - LANES_) : first;
        rows->largest[m] = imax_(rows->largest[m], imax_(K_(abs_u32)(as_f32_(first)), K_(abs_u32)(as_f32_(second))));
    }
}

/* Field by field: copied as a whole it stays in memory, and a wide load waits for narrow stores. */
FN_ kopt_kind_ K_(copy_kind)(const kopt_kind_ *p) {
    kopt_kind_ kind;
    kind.rule = p->rule;
    kind.weight = p->weight;
    kind.grad = p->grad;
    kind.moment = p->moment;
    kind.rounding = p->rounding;
    kind.moment_rounding = p->moment_rounding;
    kind.compensation_rounding = p->compensation_rounding;
    kind.moment_count = p->moment_count;
    kind.nesterov = p->nesterov;
    kind.buffered = p->buffered;
    return kind;
}

FN_ void K_(direction_tile)(const kopt_job_ *tile, kopt_kind_ kind, buffers_ *rows) {
    arrays_ a = K_(arrays_of)(tile);
    const scalars_ k = K_(splat_job)(tile);
    const constants_ c = K_(make_constants)();
    const kopt_byte_ *const number = rows->r.number, *const twice = rows->r.twice;
    const size_t n = tile->end;
    vu32_ largest[4];
    size_t i;
    for (i = 0; kind.buffered && i < 4; i++) {
        a.moment[i] = AS_BYTES_(rows->moment[i]);
        largest[i] = isplat_(0);
    }
    for (i = 0; i < n; i += PAIR_) {
        const size_t q = i / LANES_;
        const random_pair_ r = K_(load_random_pair)(number, twice, i);
        pair_ x, y;
        if (!K_(direction_pair)(&a, kind, &k, &c, i, rows->w + q, rows->rest + q, &r, 0, &x, &y, largest)) {
            K_(direction_in_scalar)(tile, rows, i, kind.buffered ? MOMENTS_ : 0, kind.rule == KOPT_ADAM_ATAN2);
            continue;
        }
        rows->x[q] = x.a;
        rows->x[q + 1] = x.b;
#ifdef KAHAN_OPT_VMATH
        if (kind.rule == KOPT_ADAM_ATAN2) {
            Y_BUFFER_(rows)[q] = y.a;
            Y_BUFFER_(rows)[q + 1] = y.b;
        }
#endif
    }
    for (i = 0; kind.buffered && i < KOPT_CAST_(size_t, MOMENTS_); i++) {
        rows->largest[i] = imax_(rows->largest[i], largest[i]);
        rows->most[i] = K_(reduce_max)(rows->largest[i]); /* here it is done beside the next stage */
    }
}

FN_ void K_(commit_tile)(const kopt_job_ *tile, kopt_kind_ kind, buffers_ *rows) {
    const arrays_ a = K_(arrays_of)(tile);
    const scalars_ k = K_(splat_job)(tile);
    const constants_ c = K_(make_constants)();
    const kopt_byte_ *const number = rows->r.number;
    const size_t n = tile->end;
    size_t i;
    for (i = 0; i < n; i += PAIR_) {
        const size_t q = i / LANES_;
        vu32_ own[2];
        pair_ x;
        own[0] = own[1] = load32_(number + 2 * i);
        x.a = rows->x[q];
        x.b = rows->x[q + 1];
        if (!K_(commit_pair)(&a, kind, &k, &c, i, x, own, 0))
            kopt_step_elements_scalar_(tile, i, n - i < PAIR_ ? n - i : PAIR_, KOPT_COMMIT_STAGE_,
                                       AS_BYTES_(rows->x + q), KOPT_NULL_, 0);
    }
}

/* ---- which function steps a tile ---- */

/* The stages that there are, with what is constant in each; the first line that matches is taken. KOPT_Q8 are moments
   in rows: of 8 bits, or of fp16 if it has no line. ANY_ format is fp32, in memory or in rows. */
#define ANY_ 99
#ifdef SPECIALIZED_
#define FULL_ONLY_(line) line
#else /* small rather than fast */
#define FULL_ONLY_(line)
#endif
/* clang-format off: tables */
#define DIRECTIONS_(LINE_)                                   \
    LINE_(adam_bf16, KOPT_ADAM, 2, KOPT_BF16)                \
    FULL_ONLY_(LINE_(amsgrad_bf16, KOPT_ADAM, 3, KOPT_BF16)) \
    LINE_(any_bf16, ANY_, ANY_, KOPT_BF16)                   \
    FULL_ONLY_(LINE_(adam_fp16, KOPT_ADAM, 2, KOPT_FP16))    \
    LINE_(adam_f32, KOPT_ADAM, 2, KOPT_F32)                  \
    FULL_ONLY_(LINE_(adam_buffered, KOPT_ADAM, 2, KOPT_Q8))  \
    FULL_ONLY_(LINE_(ema, KOPT_EMA, 0, KOPT_F32))            \
    LINE_(rest, ANY_, ANY_, ANY_)
#define COMMITS_(LINE_)                                            \
    FULL_ONLY_(LINE_(bf16_kahan, KOPT_BF16, KOPT_KAHAN))           \
    FULL_ONLY_(LINE_(bf16_stochastic, KOPT_BF16, KOPT_STOCHASTIC)) \
    LINE_(bf16, KOPT_BF16, ANY_)                                   \
    FULL_ONLY_(LINE_(fp16_kahan, KOPT_FP16, KOPT_KAHAN))           \
    FULL_ONLY_(LINE_(fp16_compact, KOPT_FP16, KOPT_COMPACT))       \
    FULL_ONLY_(LINE_(fp16_exact, KOPT_FP16, KOPT_EXACT))           \
    LINE_(fp16, KOPT_FP16, ANY_)                                   \
    LINE_(f32, KOPT_F32, ANY_)
/* clang-format on */

#define MATCHES_(value, its) ((its) == ANY_ || KOPT_CAST_(int, value) == (its))
#define COUNT_MATCHES_(its_moments) ((its_moments) == ANY_ || MOMENTS_ == (its_moments))
#define FIXED_OR_(its, value) ((its) == ANY_ ? KOPT_CAST_(int, value) : (its) + 0)
#define FORMAT_MATCHES_(its_format, format) \
    ((its_format) == ANY_ ? (format) == KOPT_F32 || (format) == KOPT_Q8 : KOPT_CAST_(int, format) == (its_format))

/* Is this a line, and not one that takes any? The compiler leaves out of the others what cannot come. */
FN_ int K_(direction_has_line)(kopt_kind_ kind) {
    const kopt_format format = kind.buffered ? KOPT_Q8 : kind.moment;
    if (kind.rule == KOPT_ADAM && (MOMENTS_ < 2 || MOMENTS_ > 3)) return 1; /* nor can this come */
#define LINE_(name, its_rule, its_moments, its_format)                                      \
    if ((its_rule) != ANY_ && MATCHES_(kind.rule, its_rule) && MOMENTS_ == (its_moments) && \
        FORMAT_MATCHES_(its_format, format))                                                \
        return 1;
    DIRECTIONS_(LINE_)
#undef LINE_
    return 0;
}
/* Are the moments stepped as memory has them? */
FN_ int K_(direction_in_place)(kopt_kind_ kind) {
#define LINE_(name, its_rule, its_moments, its_format)                                                            \
    if (MATCHES_(kind.rule, its_rule) && COUNT_MATCHES_(its_moments) && FORMAT_MATCHES_(its_format, kind.moment)) \
        return 1;
    if (kind.moment != KOPT_Q8) {
        DIRECTIONS_(LINE_)
    }
#undef LINE_
    return MOMENTS_ == 0;
}
FN_ int K_(commit_has_line)(kopt_kind_ kind) {
#define LINE_(name, its_format, its_rounding) \
    if ((its_rounding) != ANY_ && kind.weight == (its_format) && MATCHES_(kind.rounding, its_rounding)) return 1;
    COMMITS_(LINE_)
#undef LINE_
    return 0;
}
#ifdef KOPT_GNU_
#define UNREACHABLE_IF_(condition) \
    if (condition) __builtin_unreachable();
#else
#define UNREACHABLE_IF_(condition)
#endif

#define LINE_(name, its_rule, its_moments, its_format)                                                          \
    NOINLINE_FN_ void K_(direction_##name)(const kopt_job_ *tile, const kopt_kind_ *any, buffers_ *rows) {      \
        kopt_kind_ kind = K_(copy_kind)(any);                                                                   \
        kind.rule = KOPT_CAST_(kopt_rule, FIXED_OR_(its_rule, kind.rule));                                      \
        if ((its_moments) != ANY_) kind.moment_count = its_moments;                                             \
        kind.moment = (its_format) == KOPT_BF16 ? KOPT_BF16 : (its_format) == KOPT_FP16 ? KOPT_FP16 : KOPT_F32; \
        UNREACHABLE_IF_((its_rule) == ANY_ && K_(direction_has_line)(kind))                                     \
        if ((its_format) != ANY_) kind.buffered = (its_format) == KOPT_Q8;                                      \
        K_(direction_tile)(tile, kind, rows);                                                                   \
    }
DIRECTIONS_(LINE_)
#undef LINE_
#define LINE_(name, its_format, its_rounding)                                                           \
    NOINLINE_FN_ void K_(commit_##name)(const kopt_job_ *tile, const kopt_kind_ *any, buffers_ *rows) { \
        kopt_kind_ kind = K_(copy_kind)(any);                                                           \
        kind.weight = its_format;                                                                       \
        kind.rounding = KOPT_CAST_(kopt_rounding, FIXED_OR_(its_rounding, kind.rounding));              \
        UNREACHABLE_IF_((its_rounding) == ANY_ && K_(commit_has_line)(kind))                            \
        K_(commit_tile)(tile, kind, rows);                                                              \
    }
COMMITS_(LINE_)
#undef LINE_

NOINLINE_FN_ void K_(direction_dispatch)(const kopt_job_ *tile, const kopt_kind_ *any, buffers_ *rows) {
    const kopt_kind_ kind = K_(copy_kind)(any);
    const kopt_format format = kind.buffered ? KOPT_Q8 : kind.moment;
#define LINE_(name, its_rule, its_moments, its_format)                                                         \
    if (MATCHES_(kind.rule, its_rule) && COUNT_MATCHES_(its_moments) && FORMAT_MATCHES_(its_format, format)) { \
        K_(direction_##name)(tile, any, rows);                                                                 \
        return;                                                                                                \
    }
    DIRECTIONS_(LINE_)
#undef LINE_
}

NOINLINE_FN_ void K_(commit_dispatch)(const kopt_job_ *tile, const kopt_kind_ *any, buffers_ *rows) {
    const kopt_kind_ kind = K_(copy_kind)(any);
#define LINE_(name, its_format, its_rounding)                                   \
    if (kind.weight == (its_format) && MATCHES_(kind.rounding, its_rounding)) { \
        K_(commit_##name)(tile, any, rows);                                     \
        return;                                                                 \
    }
    COMMITS_(LINE_)
#undef LINE_
}

/* ---- a tile and its tail ---- */

/* Rows of weights, and of the compensation of KOPT_KAHAN. */
NOINLINE_FN_ void K_(load_weight_tile)(kopt_byte_ *weight, kopt_byte_ *residual, const kopt_kind_ *any, size_t n,
                                       vf32_ *w, vf32_ *rest) {
    const kopt_kind_ kind = K_(copy_kind)(any);
    const constants_ c = K_(make_constants)();
    arrays_ a;
    size_t i;
    a.weight = weight;
    a.residual = residual;
    for (i = 0; i < n; i += PAIR_) {
        pair_ r;
        const pair_ x = K_(load_weight_pair)(&a, kind, i, 0, &c, &r, KOPT_NULL_);
        w[i / LANES_] = x.a;
        w[i / LANES_ + 1] = x.b;
        rest[i / LANES_] = r.a;
        rest[i / LANES_ + 1] = r.b;
    }
}

#ifdef KAHAN_OPT_VMATH
FN_ void K_(atan2_tile)(vf32_ *x, const vf32_ *y, size_t n) {
    atan2_reduced_ first = K_(atan2_reduce)(x[0], y[0]), second = K_(atan2_reduce)(x[1], y[1]), next;
    size_t q;
    for (q = 2; q < n; q += 2) { /* divisions are under way while the polynomials of the turn before are computed */
        next = K_(atan2_reduce)(x[q], y[q]);
        x[q - 2] = K_(atan2_polynomial)(&first);
        first = next;
        next = K_(atan2_reduce)(x[q + 1], y[q + 1]);
        x[q - 1] = K_(atan2_polynomial)(&second);
        second = next;
    }
    x[q - 2] = K_(atan2_polynomial)(&first);
    x[q - 1] = K_(atan2_polynomial)(&second);
}

/* The function of the rule, of a row: x from x and y. */
NOINLINE_FN_ void K_(rule_function)(const kopt_job_ *j, vf32_ *x, vf32_ *y, size_t n) {
    size_t q, vectors = (n + PAIR_ - 1) / PAIR_ * 2;
    if (j->vmath == KOPT_NULL_) {
        K_(atan2_tile)(x, y, vectors);
        return;
    }
    if (j->quotient)
        for (q = 0; q < vectors; q++) x[q] = div_(x[q], y[q]);
    kopt_call_rule_function_(j, KOPT_POINTER_(float *, x), KOPT_POINTER_(float *, y), n);
    for (q = 0; q < vectors; q++) x[q] = K_(canonical_nan)(x[q]);
}
#endif

/* The second stage of the steps that count what moves, or look back: x becomes the update itself. */
NOINLINE_FN_ void K_(commit_general)(const kopt_job_ *tile, const kopt_kind_ *any, buffers_ *rows) {
    const kopt_kind_ kind = K_(copy_kind)(any);
    const size_t n = tile->end, size = kopt_bytes_of_(kind.weight);
    const size_t residual_size = kopt_bytes_of_residual_(kind.weight, kind.rounding);
    kopt_byte_ *const before = AS_BYTES_(rows->w); /* when the updates are there */
    kopt_byte_ *const kept_before = AS_BYTES_(rows->rest);
    const scalars_ k = K_(splat_job)(tile);
    kopt_job_ as_is;
    size_t i, q;
    for (i = 0; i < n; i += PAIR_) {
        vf32_ slow[2], slow_rest[2];
        if (k.sync)
            K_(load_weight_tile)(tile->slow + i * size,
                                 residual_size == 0 ? KOPT_NULL_ : tile->slow_residual + i * residual_size, any, PAIR_,
                                 slow, slow_rest);
        for (q = 0; q < 2; q++) {
            const size_t at = i / LANES_ + q;
            vf32_ update = K_(update)(&k, rows->x[at], rows->w[at]);
            if (k.sync)
                update = K_(lookahead)(k.slow_scale, rows->w[at], rows->rest[at], update, slow[q], slow_rest[q]);
            rows->x[at] = update;
        }
    }
    kopt_copy_noinline_(before, tile->weight, n * size);
    if (residual_size != 0) kopt_copy_noinline_(kept_before, tile->residual, n * residual_size);
    if (!k.moments_only) {
        kopt_copy_job_(&as_is, tile);
        as_is.rate = 1;
        as_is.weight_decay = 0;
        K_(commit_dispatch)(&as_is, any, rows);
    }
    if (tile->counts != KOPT_NULL_) kopt_tally_(tile, AS_BYTES_(rows->x), before, kept_before, size, residual_size);
    if (k.sync && !k.moments_only) { /* the next slow weights */
        kopt_copy_noinline_(tile->slow, tile->weight, n * size);
        if (residual_size != 0) kopt_copy_noinline_(tile->slow_residual, tile->residual, n * residual_size);
    }
}

static void K_(convert)(const kopt_conversion_ *c);

/* All stages of a tile of tile->end elements; its arrays are as long as its turns are. */
NOINLINE_FN_ void K_(step_tile)(const kopt_job_ *tile, const kopt_kind_ *kind, buffers_ *rows) {
    const kopt_step *s = tile->step;
    const size_t n = tile->end;
    const int rarely =
        (KOPT_HAS_(KOPT_WITH_RANGER) && s->sync) || (KOPT_HAS_(KOPT_WITH_EXTRAS) && tile->counts != KOPT_NULL_);
    const int moments_only = KOPT_HAS_(KOPT_WITH_EXTRAS) && s->moments_only;
    if (rarely || kind->rule == KOPT_EMA || kopt_as_u32_(s->l2) << 1 != 0)
        K_(load_weight_tile)(tile->weight, tile->residual, kind, n, rows->w, rows->rest);
    K_(direction_dispatch)(tile, kind, rows);
#ifdef KAHAN_OPT_VMATH
    if (kind->rule == KOPT_ADAM_ATAN2 || tile->vmath != KOPT_NULL_)
        K_(rule_function)(tile, rows->x, Y_BUFFER_(rows), n);
#endif
    if (rarely)
        K_(commit_general)(tile, kind, rows);
    else if (!moments_only)
        K_(commit_dispatch)(tile, kind, rows);
    if (KOPT_HAS_(KOPT_WITH_EXTRAS) && tile->copy != KOPT_NULL_ && !moments_only) {
        kopt_conversion_ copy;
        copy.dst = tile->copy;
        copy.src = tile->weight;
        copy.dst_format = tile->copy_format;
        copy.src_format = kind->weight;
        copy.n = n;
        copy.stochastic = 0;
        K_(convert)(&copy);
    }
    if (KOPT_HAS_(KOPT_WITH_EXTRAS) && s->zero_grad) kopt_zero_(tile->grad, n * kopt_bytes_of_(kind->grad));
}

/* The same for less than a turn, over copies with zeros behind. */
NOINLINE_FN_ void K_(step_tail)(const kopt_job_ *tile, const kopt_kind_ *any, buffers_ *rows) {
    const kopt_kind_ kind = K_(copy_kind)(any);
    const size_t n = tile->end, size = kopt_bytes_of_(kind.weight), grad_size = kopt_bytes_of_(kind.grad);
    const size_t residual_size = kopt_bytes_of_residual_(kind.weight, kind.rounding),
                 moment_size = kopt_bytes_of_(kind.moment);
    const kopt_step *s = tile->step;
    kopt_byte_ room[10][4 * PAIR_];
    kopt_job_ padded;
    int m;
    kopt_copy_job_(&padded, tile);
#define PAD_(place, array, bytes) \
    padded.array = room[place];   \
    kopt_copy_padded_(room[place], sizeof room[place], tile->array, n *(bytes));
    PAD_(0, weight, size)
    PAD_(1, grad, grad_size)
    if (residual_size != 0) {
        PAD_(2, residual, residual_size)
    }
    for (m = 0; m < kind.moment_count && !kind.buffered; m++) {
        PAD_(3 + m, moment[m], moment_size)
    }
    if (s->sync) {
        PAD_(7, slow, size)
    }
    if (s->sync && residual_size != 0) {
        PAD_(8, slow_residual, residual_size)
    }
#undef PAD_
    if (tile->copy != KOPT_NULL_) padded.copy = room[9];
    K_(step_tile)(&padded, any, rows);
    if (!s->moments_only) {
        kopt_copy_noinline_(tile->weight, padded.weight, n * size);
        if (residual_size != 0) kopt_copy_noinline_(tile->residual, padded.residual, n * residual_size);
        if (s->sync) kopt_copy_noinline_(tile->slow, padded.slow, n * size);
        if (s->sync && residual_size != 0)
            kopt_copy_noinline_(tile->slow_residual, padded.slow_residual, n * residual_size);
        if (tile->copy != KOPT_NULL_)
            kopt_copy_noinline_(tile->copy, padded.copy, n * kopt_bytes_of_(tile->copy_format));
    }
    for (m = 0; m < kind.moment_count && !kind.buffered; m++)
        kopt_copy_noinline_(tile->moment[m], padded.moment[m], n * moment_size);
    if (s->zero_grad) kopt_copy_noinline_(tile->grad, padded.grad, n * grad_size);
}

/* The n elements at i. */
FN_ void K_(tile_at)(kopt_job_ *tile, const kopt_job_ *whole, kopt_kind_ kind, size_t i, size_t n) {
    const size_t size = kopt_bytes_of_(kind.weight), moment_size = kopt_bytes_of_(kind.moment);
    const size_t residual_size = kopt_bytes_of_residual_(kind.weight, kind.rounding);
    int m;
    tile->weight = whole->weight + i * size;
    tile->grad = whole->grad + i * kopt_bytes_of_(kind.grad);
    if (residual_size != 0) tile->residual = whole->residual + i * residual_size; /* NULL + 0 is undefined */
    for (m = 0; m < kind.moment_count && !kind.buffered; m++) tile->moment[m] = whole->moment[m] + i * moment_size;
    if (whole->step->sync) tile->slow = whole->slow + i * size;
    if (whole->step->sync && residual_size != 0) tile->slow_residual = whole->slow_residual + i * residual_size;
    if (whole->copy != KOPT_NULL_) tile->copy = whole->copy + i * kopt_bytes_of_(whole->copy_format);
    tile->first = whole->first + i;
    tile->begin = 0;
    tile->end = n;
}

/* ---- fp16 moments in fp32 buffers, and the loop over tiles ---- */

/* A moment in fp16 to a row of fp32 and back, any values. */
NOINLINE_FN_ void K_(load_fp16_buffer)(vf32_ *row, const kopt_byte_ *from, size_t n) {
    kopt_byte_ part[2 * PAIR_];
    size_t i;
    for (i = 0; i < n; i += PAIR_) {
        const kopt_byte_ *p = from + 2 * i;
        if (n - i < PAIR_) p = kopt_copy_padded_(part, sizeof part, p, 2 * (n - i));
        row[i / LANES_] = load_fp16_(p);
        row[i / LANES_ + 1] = load_fp16_(p + 2 * LANES_);
    }
}

FN_ void K_(store_fp16_elements)(kopt_byte_ *to, const vf32_ *row, int square, int moment, kopt_rounding how,
                                 const random_tile_ *r, size_t n) {
    const constants_ c = K_(make_constants)();
    const vu32_ store = isplat_hoisted_((KOPT_CAST_(uint32_t, moment) + 1) * 0x00010001u);
    const kopt_byte_ *const number = r->number, *const twice = r->twice;
    size_t i;
    for (i = 0; i < n; i += PAIR_) {
        const vf32_ x = row[i / LANES_], y = row[i / LANES_ + 1];
        const vu32_ its = add16_(load32_(number + 2 * i), mul16_(load32_(twice + 2 * i), store));
        const vu32_ both = pack_high16_(K_(round_moment)(x, KOPT_FP16, square, x, how, K_(first16)(its, 0, &c), &c),
                                        K_(round_moment)(y, KOPT_FP16, square, y, how, K_(second16)(its, 0), &c));
        kopt_byte_ part[2 * PAIR_];
        store32_(n - i < PAIR_ ? part : to + 2 * i, both);
        if (n - i < PAIR_) kopt_copy_noinline_(to + 2 * i, part, 2 * (n - i));
    }
}

NOINLINE_FN_ void K_(store_fp16_buffer)(kopt_byte_ *to, const vf32_ *row, uint32_t largest, int square, int moment,
                                        kopt_rounding how, const random_tile_ *r, size_t n) {
    if (largest > 0x477FDFFFu) /* some will be infinite or are NaN */
        kopt_store_fp16_buffer_scalar_(to, KOPT_CONST_POINTER_(const kopt_byte_ *, row), square, moment, how, r->number,
                                       r->twice, n);
    else if (how != KOPT_STOCHASTIC)
        K_(store_fp16_elements)(to, row, square, moment, KOPT_NEAREST, r, n);
    else if (square)
        K_(store_fp16_elements)(to, row, 1, moment, KOPT_STOCHASTIC, r, n);
    else
        K_(store_fp16_elements)(to, row, 0, moment, KOPT_STOCHASTIC, r, n);
}

#define FP16_BUFFER_ (KOPT_TILE_ + KOPT_TILE_ / 2) /* elements of all moments together: fewer of each */

/* Elements [begin, end). moment: rows for those that are not stepped in place, or NULL. */
NOINLINE_FN_ void K_(step_tiles)(const kopt_job_ *whole, size_t begin, size_t end, vf32_ *moment) {
    const kopt_step *s = whole->step;
    const philox_key_ cipher = K_(make_philox_key)(s->seed, s->step, whole->id, whole->stream);
    kopt_kind_ kind = K_(kind_of)(whole);
    const int buffered = moment != KOPT_NULL_, random = kopt_needs_random_(kind);
    const int coded = buffered && kind.moment == KOPT_Q8;
    const size_t tile_size =
        buffered && !coded && MOMENTS_ > 1 ? FP16_BUFFER_ / KOPT_CAST_(size_t, MOMENTS_) : KOPT_TILE_;
    kopt_job_ tile;
    buffers_ rows;
    size_t i, n, turns, q;
    int m, drawn = 0;
    kopt_copy_job_(&tile, whole);
    kind.buffered = buffered;
    if (buffered || MOMENTS_ == 0) kind.moment = KOPT_F32;
    rows.r.number = rows.r.twice = KOPT_CONST_POINTER_(const kopt_byte_ *, rows.r.lower);
    for (q = 0; !random && q < KOPT_TILE_ / 2; q += LANES_)
        store32_(AS_BYTES_(rows.r.lower + q), isplat_hoisted_(0)); /* no memset */
    for (i = begin; i < end; i += n) {
        const kopt_index_ index = KOPT_INDEX_(whole->first + i);
        n = tile_size - KOPT_CAST_(unsigned, (coded ? i : index) % tile_size);
        if (end - i < n) n = end - i;
        turns = n / PAIR_ * PAIR_;
        if (!coded && n < 4) {
            kopt_walk_scalar_(whole, i, i + n);
            continue;
        }
        if (random)
            K_(fill_random_tile)(&rows.r, &cipher, index, turns < n ? turns + PAIR_ : turns, !drawn,
                                 !drawn && n == end - i);
        drawn = 1;
        for (m = 0; buffered && m < kind.moment_count; m++) {
            rows.moment[m] = moment + KOPT_CAST_(size_t, m) * (tile_size / LANES_);
            rows.largest[m] = isplat_(0);
            if (coded)
                K_(decode_block)(rows.moment[m], whole->moment[m] + i,
                                 whole->moment[m] + whole->scale + i / KOPT_TILE_ * 4, kopt_is_square_(kind.rule, m),
                                 n);
            else
                K_(load_fp16_buffer)(rows.moment[m], whole->moment[m] + 2 * i, n);
        }
        if (turns > 0) {
            K_(tile_at)(&tile, whole, kind, i, turns);
            K_(step_tile)(&tile, &kind, &rows);
        }
        if (turns < n) {
            rows.r.number += 2 * turns;
            rows.r.twice += 2 * turns;
            for (m = 0; buffered && m < kind.moment_count; m++) rows.moment[m] += turns / LANES_;
            K_(tile_at)(&tile, whole, kind, i + turns, n - turns);
            K_(step_tail)(&tile, &kind, &rows);
            rows.r.number -= 2 * turns;
            rows.r.twice -= 2 * turns;
        }
        for (m = 0; buffered && m < kind.moment_count; m++) {
            const vf32_ *const row = moment + KOPT_CAST_(size_t, m) * (tile_size / LANES_);
            const int square = kopt_is_square_(kind.rule, m);
            const kopt_rounding how = kopt_moment_rounding_(kind, m);
            if (coded)
                K_(encode_block)(whole->moment[m] + i, whole->moment[m] + whole->scale + i / KOPT_TILE_ * 4, row,
                                 rows.most[m], square, m, how, &rows.r, n);
            else
                K_(store_fp16_buffer)(whole->moment[m] + 2 * i, row, rows.most[m], square, m, how, &rows.r, n);
        }
    }
}

/* The frames of that: only as large as need be. Rows of fp16 moments take 1.5 KB at most, and are whole turns. */
#define BUFFERED_(moments)                                                                  \
    NOINLINE_FN_ void K_(buffered##moments)(const kopt_job_ *j, size_t begin, size_t end) { \
        vf32_ moment[(moments) * (KOPT_TILE_ / LANES_)];                                    \
        K_(step_tiles)(j, begin, end, moment);                                              \
    }
BUFFERED_(1)
BUFFERED_(2)
BUFFERED_(3)
BUFFERED_(4)
#undef BUFFERED_
NOINLINE_FN_ void K_(buffered_fp16)(const kopt_job_ *j, size_t begin, size_t end) {
    vf32_ moment[FP16_BUFFER_ / LANES_];
    K_(step_tiles)(j, begin, end, moment);
}

NOINLINE_FN_ void K_(walk)(const kopt_job_ *j, size_t begin, size_t end) {
    const kopt_kind_ kind = K_(kind_of)(j);
    if (K_(direction_in_place)(kind))
        K_(step_tiles)(j, begin, end, KOPT_NULL_);
    else
        (MOMENTS_ == 1              ? K_(buffered1)
         : kind.moment == KOPT_FP16 ? K_(buffered_fp16)
         : MOMENTS_ == 2            ? K_(buffered2)
         : MOMENTS_ == 3            ? K_(buffered3)
                                    : K_(buffered4))(j, begin, end);
}

#ifdef SPECIALIZED_
/* ---- specialized loops ---- */

/* The same with constants for everything, for what is used most. */

/* The numbers of a turn's place in a row of 128 elements; `row` makes them those of the next row. So they count up
   through the 16 rows of a span, from one run of Philox. */
typedef struct random_counter_ {
    random_pair_ r;
    vu32_ row[2];
} random_counter_;

FN_ void K_(start_random_counters)(random_counter_ *r, const random_tile_ *drawn, size_t from, size_t to,
                                   const constants_ *c) {
    const vu32_ rows = isplat_(KOPT_RANDOM_STORES_);
    size_t q;
    for (q = from / PAIR_; q < to / PAIR_; q++) {
        const random_pair_ d = K_(load_random_pair)(KOPT_CONST_POINTER_(const kopt_byte_ *, drawn->lower),
                                                    KOPT_CONST_POINTER_(const kopt_byte_ *, drawn->upper), q * PAIR_);
        const int lie = LANES_ > 4 ? EVEN_ODD_ : 0;
        r[q].r.own[0] = K_(first16)(d.own[0], lie, c);
        r[q].r.own[1] = K_(second16)(d.own[0], lie);
        r[q].r.twice[0] = K_(first16)(d.twice[0], lie, c);
        r[q].r.twice[1] = K_(second16)(d.twice[0], lie);
        r[q].row[0] = mul16_(r[q].r.twice[0], rows);
        r[q].row[1] = mul16_(r[q].r.twice[1], rows);
    }
}

/* The second stage of a turn, with what one lane does if it has to. */
FN_ void K_(commit_pair_or_scalar)(const kopt_job_ *whole, const arrays_ *a, kopt_kind_ kind, const scalars_ *k,
                                   const constants_ *c, size_t i, pair_ x, const vu32_ own[2], int lie) {
    vf32_ row[2];
    if (K_(commit_pair)(a, kind, k, c, i, x, own, lie)) return;
    row[0] = x.a;
    row[1] = x.b;
    kopt_step_elements_scalar_(whole, i, PAIR_, KOPT_COMMIT_STAGE_, AS_BYTES_(row), KOPT_NULL_, lie & EVEN_ODD_);
}

#ifdef KAHAN_OPT_VMATH
#define SPECIALIZE_TILED_ 1
#else
#define SPECIALIZE_TILED_ (LANES_ == 8) /* there is an order that goes through a row */
#endif
#define SPECIALIZE_L2_ (LANES_ != 8) /* with the few registers of AVX2 to ask for it takes 2 to 4 % of all steps */

/* Whole turns from `begin` on, which is at a turn of the random numbers. Returns where they end. */
FN_ size_t K_(specialized)(const kopt_job_ *whole, kopt_kind_ kind, int parted, kopt_schedule_ order, size_t begin) {
    const arrays_ a = K_(arrays_of)(whole);
    const kopt_step *s = whole->step;
    const philox_key_ cipher = K_(make_philox_key)(s->seed, s->step, whole->id, whole->stream);
    const constants_ c = K_(make_constants)();
    const size_t end = whole->end;
    const int random = kopt_needs_random_(kind);
    scalars_ k = K_(splat_job)(whole);
    const int in_a_row = SPECIALIZE_TILED_ && order == KOPT_TILED_;
    const int in_turns =
        LANES_ == 16 && order == KOPT_PIPELINED_; /* other orders are left out before specialized is inlined */
    const int lie = parted | (in_a_row ? 0 : RANDOM_ZERO_EXTENDED_);
    random_counter_ counted[KOPT_RANDOM_GROUP_ / PAIR_];
    buffers_ rows;
    random_pair_ none;
    pair_ waiting;
    vu32_ its_own[2];
    size_t i = begin, n, q;
    int waits = 0;
    if (!SPECIALIZE_L2_) k.use_l2 = 0;
    k.unrectified = k.first_step = 0;
    its_own[0] = its_own[1] = none.own[0] = none.own[1] = none.twice[0] = none.twice[1] = isplat_(0);
    waiting.a = waiting.b = as_f32_(none.own[0]);
    for (n = 0; end - i >= PAIR_; i += n) {
        const kopt_index_ index = KOPT_INDEX_(whole->first + i);
        const size_t in_row = KOPT_CAST_(unsigned, index % KOPT_RANDOM_GROUP_);
        const int fresh =
            n != KOPT_RANDOM_GROUP_ || index % KOPT_RANDOM_SPAN_ == 0; /* the numbers are not counted on */
        n = in_a_row ? KOPT_TILE_ - KOPT_CAST_(unsigned, index % KOPT_TILE_) : KOPT_RANDOM_GROUP_ - in_row;
        if (end - i < n) n = (end - i) / PAIR_ * PAIR_;
        if (in_a_row && random) K_(fill_random_tile)(&rows.r, &cipher, index, n, i == begin, n + PAIR_ > end - begin);
        if (!in_a_row && random && fresh) {
            K_(fill_random_tile)(&rows.r, &cipher, index, n, 1, n < KOPT_RANDOM_GROUP_);
            K_(start_random_counters)(counted, &rows.r, in_row, in_row + n, &c);
        }
        for (q = 0; q < n; q += PAIR_) {
            const size_t at = in_a_row ? q / LANES_ : 0;
            random_pair_ r = none;
            pair_ x, y;
            if (in_a_row && random) {
                r = K_(load_random_pair)(rows.r.number, rows.r.twice, q);
            } else if (random) {
                random_counter_ *const place = counted + (in_row + q) / PAIR_;
                r = place->r;
                place->r.own[0] = add16_(r.own[0], place->row[0]);
                place->r.own[1] = add16_(r.own[1], place->row[1]);
            }
            if (!K_(direction_pair)(&a, kind, &k, &c, i + q, KOPT_NULL_, KOPT_NULL_, &r, lie, &x, &y, KOPT_NULL_)) {
                kopt_step_elements_scalar_(whole, i + q, PAIR_, KOPT_DIRECTION_STAGE_, AS_BYTES_(rows.x + at),
                                           AS_BYTES_(Y_BUFFER_(&rows) + at), parted);
                x.a = rows.x[at];
                x.b = rows.x[at + 1];
                y.a = Y_BUFFER_(&rows)[at];
                y.b = Y_BUFFER_(&rows)[at + 1];
            }
            if (in_a_row) {
                rows.x[at] = x.a;
                rows.x[at + 1] = x.b;
#ifdef KAHAN_OPT_VMATH
                if (kind.rule == KOPT_ADAM_ATAN2) {
                    Y_BUFFER_(&rows)[at] = y.a;
                    Y_BUFFER_(&rows)[at + 1] = y.b;
                }
#endif
            } else { /* this turn, or the one before, while this one's divisions are under way */
                if (!in_turns || waits)
                    K_(commit_pair_or_scalar)(whole, &a, kind, &k, &c, in_turns ? i + q - PAIR_ : i + q,
                                              in_turns ? waiting : x, in_turns ? its_own : r.own, lie);
                if (in_turns) {
                    waiting = x;
                    its_own[0] = r.own[0];
                    its_own[1] = r.own[1];
                    waits = 1;
                }
            }
        }
        if (in_a_row) {
#ifdef KAHAN_OPT_VMATH
            if (kind.rule == KOPT_ADAM_ATAN2) K_(atan2_tile)(rows.x, Y_BUFFER_(&rows), n / LANES_);
#endif
            for (q = 0; q < n; q += PAIR_) {
                vu32_ own[2];
                pair_ x;
                own[0] = own[1] = random ? load32_(rows.r.number + 2 * q) : isplat_(0);
                x.a = rows.x[q / LANES_];
                x.b = rows.x[q / LANES_ + 1];
                K_(commit_pair_or_scalar)(whole, &a, kind, &k, &c, i + q, x, own, lie);
            }
        }
        if (k.zero_grad) kopt_zero_(a.grad + i * kopt_bytes_of_(kind.grad), n * kopt_bytes_of_(kind.grad));
    }
    if (in_turns && waits) K_(commit_pair_or_scalar)(whole, &a, kind, &k, &c, i - PAIR_, waiting, its_own, lie);
    return i;
}

/* What has a kernel of its own; the first line that matches is taken. */
#define SCHEDULE_(on_avx512) (LANES_ == 16 ? (on_avx512) : LANES_ == 8 ? KOPT_TILED_ : KOPT_FUSED_)
/* clang-format off: tables */
#ifdef KAHAN_OPT_VMATH
#define SPECIALIZATIONS_VMATH_(LINE_)                                                           \
    LINE_(atan2_kahan, KOPT_ADAM_ATAN2, 2, KOPT_BF16, KOPT_KAHAN, KOPT_STOCHASTIC, KOPT_TILED_) \
    LINE_(atan2_f32, KOPT_ADAM_ATAN2, 2, KOPT_F32, KOPT_NEAREST, KOPT_NEAREST, KOPT_TILED_)
#else
#define SPECIALIZATIONS_VMATH_(LINE_)
#endif
#define SPECIALIZATIONS_(LINE_)                                                                               \
    LINE_(adam_kahan, KOPT_ADAM, 2, KOPT_BF16, KOPT_KAHAN, KOPT_STOCHASTIC, SCHEDULE_(KOPT_PIPELINED_))       \
    LINE_(adam_stochastic, KOPT_ADAM, 2, KOPT_BF16, KOPT_STOCHASTIC, KOPT_STOCHASTIC, SCHEDULE_(KOPT_FUSED_)) \
    LINE_(momentum_kahan, KOPT_SGD, 1, KOPT_BF16, KOPT_KAHAN, KOPT_STOCHASTIC, KOPT_FUSED_)                   \
    LINE_(adam_f32, KOPT_ADAM, 2, KOPT_F32, KOPT_NEAREST, KOPT_NEAREST, KOPT_FUSED_)                          \
    SPECIALIZATIONS_VMATH_(LINE_)
/* clang-format on */

#define LINE_(name, its_rule, its_moments, format, its_rounding, small, order)                              \
    NOINLINE_FN_ size_t K_(specialized_##name)(const kopt_job_ *j, size_t begin) {                          \
        kopt_kind_ kind;                                                                                    \
        kind.nesterov = j->step->nesterov;                                                                  \
        kind.rule = its_rule;                                                                               \
        kind.moment_count = its_moments;                                                                    \
        kind.weight = kind.grad = kind.moment = format;                                                     \
        kind.buffered = 0;                                                                                  \
        kind.rounding = its_rounding;                                                                       \
        kind.moment_rounding = kind.compensation_rounding = small;                                          \
        return K_(specialized)(j, kind, (format) == KOPT_BF16 && LANES_ > 4 ? EVEN_ODD_ : 0, order, begin); \
    }
SPECIALIZATIONS_(LINE_)
#undef LINE_

/* From `begin` on what has a kernel of its own, returns where that ends. */
FN_ size_t K_(specialized_step)(const kopt_job_ *j, kopt_kind_ kind, size_t begin) {
    const kopt_step *s = j->step;
    if ((s->moments_only | s->sync | s->unrectified) != 0 || j->counts != KOPT_NULL_ || j->copy != KOPT_NULL_)
        return begin;
    if (!SPECIALIZE_L2_ && kopt_as_u32_(s->l2) << 1 != 0) return begin;
#ifdef KAHAN_OPT_VMATH
    if (j->vmath != KOPT_NULL_) return begin;
#endif
#define LINE_(name, its_rule, its_moments, format, its_rounding, small, order)                                      \
    if (kind.rule == (its_rule) && MOMENTS_ == (its_moments) && kind.weight == (format) && kind.grad == (format) && \
        kind.moment == (format) &&                                                                                  \
        ((format) == KOPT_F32 || (kind.rounding == (its_rounding) && kind.moment_rounding == (small) &&             \
                                  ((its_rounding) != KOPT_KAHAN || kind.compensation_rounding == (small))))) {      \
        return K_(specialized_##name)(j, begin);                                                                    \
    }
    SPECIALIZATIONS_(LINE_)
#undef LINE_
    return begin;
}
#endif
#endif /* vectors */

NOINLINE_FN_ void K_(step)(const kopt_job_ *j) {
    size_t i = j->begin;
#ifdef SPECIALIZED_
    /* rows of random numbers have whole turns; the frames of what steps the ends are not there beside that of the rest */
    const size_t head = KOPT_CAST_(unsigned, (0 - KOPT_INDEX_(j->first + i)) % PAIR_);
    if (j->end - i >= head + PAIR_) {
        const size_t end = K_(specialized_step)(j, K_(kind_of)(j), i + head);
        if (end > i + head) {
            if (head > 0) K_(walk)(j, i, i + head);
            i = end;
        }
    }
#endif
    if (i < j->end) K_(walk)(j, i, j->end);
}

#ifndef TOOLS_ISA_
/* StableAdamW: g / larger(root of the new second moment, eps), g scaled and with L2 in it. */
FN_ vf32_ K_(stable_ratio_of)(const scalars_ *k, vf32_ g, vf32_ v) {
    v = K_(moving_average_of_squares)(k->beta2, k->gain2, v, g);
    return div_(g, K_(max_abs)(mul_(sqrt_(v), k->root_scale), k->eps));
}

#ifdef ONE_LANE_
FN_ vf32_ K_(stable_ratio)(kopt_kind_ kind, const scalars_ *k, const element_ *e) {
    vf32_ g = K_(widen)(e->grad, kind.grad), rest;
    if (k->use_scale) g = mul_(g, k->grad_scale);
    if (k->use_l2) g = add_(g, mul_(k->l2, K_(load_weight)(kind, e->weight, e->residual, &rest)));
    return K_(stable_ratio_of)(k, g, K_(load_moment)(kind, e, 1));
}
#endif

/* Of elements [begin, end) to out. */
NOINLINE_FN_ void K_(measure_from)(const kopt_job_ *j, size_t begin, kopt_byte_ *out) {
    const scalars_ k = K_(splat_job)(j);
    const kopt_kind_ kind = K_(kind_of)(j);
    size_t i = begin;
#ifdef ONE_LANE_
    for (; i < j->end; i++) {
        const size_t residual_size = kopt_bytes_of_residual_(kind.weight, kind.rounding);
        element_ e;
        e.weight = e.residual = e.moment[0] = e.moment[2] = e.moment[3] = e.slow = e.slow_residual = 0;
        e.grad = K_(load_at)(j->grad, i, kopt_bytes_of_(kind.grad));
        e.moment[1] = K_(load_at)(j->moment[1], i, kopt_bytes_of_(kind.moment));
        if (k.use_l2) e.weight = K_(load_at)(j->weight, i, kopt_bytes_of_(kind.weight));
        if (k.use_l2 && residual_size != 0) e.residual = K_(load_at)(j->residual, i, residual_size);
        K_(store_at)(out, i - begin, 4, as_u32_(K_(stable_ratio)(kind, &k, &e)));
    }
#else
    const constants_ c = K_(make_constants)();
    for (; j->end - i >= PAIR_ && !k.use_l2; i += PAIR_) {
        pair_ g = K_(load_pair)(j->grad, i, kind.grad, 0, &c);
        const pair_ v = K_(load_pair)(j->moment[1], i, kind.moment, 0, &c);
        if (k.use_scale) {
            g.a = mul_(g.a, k.grad_scale);
            g.b = mul_(g.b, k.grad_scale);
        }
        store32_(out + 4 * (i - begin),
                 as_u32_(K_(stable_ratio_of)(&k, g.a, K_(square_if)(v.a, kopt_stores_root_(kind, 1)))));
        store32_(out + 4 * (i - begin + LANES_),
                 as_u32_(K_(stable_ratio_of)(&k, g.b, K_(square_if)(v.b, kopt_stores_root_(kind, 1)))));
    }
    kopt_measure_from_scalar_(j, i, out + 4 * (i - begin));
#endif
}

NOINLINE_FN_ void K_(measure)(const kopt_job_ *j, kopt_byte_ *out) { K_(measure_from)(j, j->begin, out); }
#endif

/* ---- conversions of arrays ---- */

/* To the nearest, any value; a NaN keeps its payload. */
FN_ vu32_ K_(convert_value)(vf32_ x, kopt_format to) {
    const vu32_ a = as_u32_(x), mag = and_(a, isplat_(0x7FFFFFFFu));
    if (to == KOPT_F32) return a;
    if (to == KOPT_FP16) return narrow_fp16_(x);
    return select_(igt_(mag, isplat_(0x7F800000u)), or_(shr_(a, 16), isplat_(0x0040u)),
                   shr_(iadd_(iadd_(a, isplat_(0x7FFFu)), and_(shr_(a, 16), isplat_(1))), 16));
}

#ifdef CONVERT_ISA_
FN_ void K_(convert_general)(const kopt_conversion_ *c, size_t begin, size_t end) {
    KOPT_GLUE_(kopt_convert_general_, CONVERT_ISA_)(c, begin, end);
}
#else
/* Elements begin to end. */
NOINLINE_FN_ void K_(convert_general)(const kopt_conversion_ *c, size_t begin, size_t end) {
    const size_t to_size = kopt_bytes_of_(c->dst_format), from_size = kopt_bytes_of_(c->src_format);
    const uint32_t stream = KOPT_CAST_(uint32_t, c->stochastic);
    const philox_key_ cipher =
        stream == 0 ? K_(make_philox_key)(0, 0, 0, 0) : K_(make_philox_key)(c->seed, c->step, c->id, stream);
    const int stochastic = stream != 0 && c->dst_format != KOPT_F32;
    const constants_ constants = K_(make_constants)();
    random_buffer_ draws;
    size_t i, n;
    for (i = begin; i < end; i += n) {
        vu32_ r = isplat_(0);
        vf32_ x;
        n = LANES_;
        if (stream != 0) r = K_(random_next)(&draws, &cipher, KOPT_INDEX_(c->first + i), i == begin, &n);
        if (end - i < n) n = end - i;
        x = K_(widen)(K_(load_n)(c->src + i * from_size, from_size, n), c->src_format);
        r = stochastic ? shr_(K_(round_stochastic)(x, c->dst_format, and_(r, isplat_(0xFFFFu)), &constants), 16)
                       : K_(convert_value)(x, c->dst_format);
#ifndef ONE_LANE_
        if (stochastic &&
            any_true_(igt_(K_(abs_u32)(x), isplat_(c->dst_format == KOPT_BF16 ? 0x7F7EFFFFu : 0x477FDFFFu)))) {
            kopt_convert_general_scalar_(c, i, i + n);
            continue;
        }
#endif
        K_(store_n)(c->dst + i * to_size, to_size, n, r);
    }
}
#endif

#ifdef SPECIALIZED_
FN_ vu32_ K_(convert_vector)(const kopt_byte_ *p, kopt_format to, kopt_format from) {
    KOPT_PREFETCH_(p + 4096); /* narrowing in DRAM: 1 KB ahead is a sixth slower */
    return K_(convert_value)(K_(widen)(K_(load_n)(p, kopt_bytes_of_(from), LANES_), from), to);
}

/* To nearest, with constant formats. An array that no cache holds is written past the caches, if the machine can: 1.9
   times as fast to 32 bits, 1.3 times to 16. */
FN_ void K_(convert_array)(const kopt_conversion_ *c, kopt_format to, kopt_format from) {
    const size_t size = kopt_bytes_of_(to), from_size = kopt_bytes_of_(from), n = c->n;
    const kopt_byte_ *const src = c->src;
    kopt_byte_ *const dst = c->dst;
    size_t i = 0;
    if (NT_STORES_ && n >= KOPT_NT_THRESHOLD_ / size && KOPT_ADDRESS_(dst) % size == 0) {
        i = (64 - KOPT_ADDRESS_(dst) % 64) % 64 / size; /* up to a line of the cache */
        K_(convert_general)(c, 0, i);
        for (; n - i >= LANES_; i += LANES_) {
            const vu32_ a = K_(convert_vector)(src + i * from_size, to, from);
            if (size == 4)
                nt_store32_(dst + 4 * i, a);
            else
                nt_store16_(dst + 2 * i, a);
        }
        nt_fence_();
    }
    for (; n - i >= LANES_; i += LANES_)
        K_(store_n)(dst + i * size, size, LANES_, K_(convert_vector)(src + i * from_size, to, from));
    K_(convert_general)(c, i, n);
}
#endif

static KOPT_NOINLINE_ ISA_TARGET_ void K_(convert)(const kopt_conversion_ *c) {
#ifdef SPECIALIZED_ /* elsewhere one instance for all formats */
    if (!c->stochastic && c->src_format == KOPT_F32 && c->dst_format == KOPT_BF16)
        K_(convert_array)(c, KOPT_BF16, KOPT_F32);
    else if (!c->stochastic && c->src_format == KOPT_BF16 && c->dst_format == KOPT_F32)
        K_(convert_array)(c, KOPT_F32, KOPT_BF16);
    else if (!c->stochastic && c->src_format == KOPT_F32 && c->dst_format == KOPT_FP16)
        K_(convert_array)(c, KOPT_FP16, KOPT_F32);
    else if (!c->stochastic && c->src_format == KOPT_FP16 && c->dst_format == KOPT_F32)
        K_(convert_array)(c, KOPT_F32, KOPT_FP16);
    else
#endif
        K_(convert_general)(c, 0, c->n);
}

#ifndef TOOLS_ISA_
static KOPT_NOINLINE_ ISA_TARGET_ int K_(all_finite)(const kopt_byte_ *p, kopt_format format, size_t n) {
    const size_t size = kopt_bytes_of_(format);
    const vu32_ exponent = isplat_(format == KOPT_F32 ? 0x7F800000u : format == KOPT_BF16 ? 0x7F80u : 0x7C00u);
    vmask_ found = igt_(exponent, exponent);
    size_t i;
    for (i = 0; i < n; i += n - i < LANES_ ? n - i : LANES_) {
        vu32_ a = K_(load_n)(p + i * size, size, n - i < LANES_ ? n - i : LANES_);
        found = mask_or_(found, ieq_(and_(a, exponent), exponent));
    }
    return !any_true_(found);
}
#endif

/* ---- norm, clipping and reduction ---- */

#if !defined(ONE_LANE_) && !defined(TOOLS_ISA_)
/* Section 9. A window of magnitudes is counted in units of 2^-scale as integers below 2^28, whose squares add up in 64
   bits; bf16 has 20 binades in it, fp16 17. A group with anything else in it goes one value at a time. fp32 values are
   cut into 12 + 12 bits, the lower in units of 2^-(scale + 12): 16 binades. */
FN_ void K_(norm_spill)(kopt_norm *norm, const vu32_ sum[2], uint32_t p) {
    uint64_t part[LANES_ / 2];
    size_t i;
    int half;
    for (half = 0; half < 2; half++) {
        store32_(KOPT_POINTER_(kopt_byte_ *, part), sum[half]);
        for (i = 0; i < LANES_ / 2; i++) kopt_norm_accumulate_(norm, part[i], p);
    }
}

/* The word of |x| as fp32 for vector i of a group; of bf16, the even or the odd elements. */
FN_ vu32_ K_(norm_load)(const kopt_byte_ *p, kopt_format format, size_t i) {
    if (format == KOPT_F32) return and_(load32_(p + 4 * LANES_ * i), isplat_(0x7FFFFFFFu));
    if (format == KOPT_FP16) return and_(as_u32_(widen_fp16_(load16_(p + 2 * LANES_ * i))), isplat_(0x7FFFFFFFu));
    p += 4 * LANES_ * (i / 2);
    return and_(i % 2 == 0 ? shl_(load32_(p), 16) : load32_(p), isplat_(0x7FFF0000u));
}

/* The exponent field of the largest value of the first groups. */
FN_ uint32_t K_(norm_scan)(const kopt_byte_ *p, kopt_format format, size_t groups) {
    vu32_ most = isplat_(0);
    uint32_t lane[LANES_], top = 0;
    size_t i;
    for (; groups > 0; groups--, p += 4 * LANES_ * kopt_bytes_of_(format)) {
        for (i = 0; i < 4; i++) {
            vu32_ x = K_(norm_load)(p, format, i);
            most = select_(igt_(x, most), x, most);
        }
    }
    store32_(KOPT_POINTER_(kopt_byte_ *, lane), most);
    for (i = 0; i < LANES_; i++) top = lane[i] >> 23 > top ? lane[i] >> 23 : top;
    return top;
}

/* x in units of the window. What is no integer leaves a bit in *bad, what is beyond the window one above the 28 in
   *all. */
FN_ vu32_ K_(norm_to_integer)(vf32_ x, vf32_ unit, vu32_ *bad, vu32_ *all) {
    vf32_ scaled = mul_(x, unit);
    vu32_ whole = round_u32_(scaled);
    *bad = or_(*bad, xor_(as_u32_(convert_f32_(whole)), as_u32_(scaled)));
    *all = or_(*all, whole);
    return whole;
}

typedef struct norm_sums_ {
    vu32_ high[2], cross[2], low[2];
} norm_sums_;

/* Vector i of a group: whole, and of fp32 its lower 12 bits. */
FN_ vu32_ K_(norm_split)(const kopt_byte_ *p, kopt_format format, size_t i, vf32_ unit, vf32_ fine, vu32_ *rest,
                         vu32_ *bad, vu32_ *all) {
    vu32_ x = K_(norm_load)(p, format, i), cut = x;
    if (format == KOPT_F32) {
        cut = and_(x, isplat_(0xFFFFF000u));
        *rest = K_(norm_to_integer)(sub_(as_f32_(x), as_f32_(cut)), fine, bad, all);
    }
    return K_(norm_to_integer)(as_f32_(cut), unit, bad, all);
}

FN_ void K_(norm_dot)(norm_sums_ *s, kopt_format format, vu32_ whole, vu32_ rest) {
    dot_(s->high, whole, whole);
    if (format == KOPT_F32) {
        dot_(s->cross, whole, rest);
        dot_(s->low, rest, rest);
    }
}

FN_ void K_(norm_format)(kopt_norm *norm, const kopt_byte_ *p, kopt_format format, size_t n) {
    const size_t group = 4 * LANES_, bytes = group * kopt_bytes_of_(format);
    size_t groups = n / group;
    uint32_t scale = 0; /* the unit of the window is 2^(127 - scale); 0: to be chosen */
    while (groups > 0) {
        size_t todo = groups < 64 ? groups : 64; /* 256 vectors: as many squares as 64 bits hold */
        norm_sums_ s;
        vf32_ unit, fine;
        int strange = 0;
        groups -= todo;
        if (scale == 0) { /* two binades of room above the largest */
            const uint32_t top = K_(norm_scan)(p, format, todo), most = format == KOPT_F32 ? 242 : 254;
            scale = top > 279 - most ? 279 - top : most;
        }
        if (scale < 127) { /* a unit below 1 could make 0 of the smallest numbers, and nobody would see it */
            kopt_norm_add_values_(norm, p, format, todo * group);
            kopt_norm_carry_(norm);
            p += todo * bytes;
            scale = 0;
            continue;
        }
        unit = splat_(kopt_as_f32_(scale << 23));
        fine = splat_(kopt_as_f32_((scale + 12) << 23));
        s.high[0] = s.high[1] = s.cross[0] = s.cross[1] = s.low[0] = s.low[1] = isplat_(0);
        for (; todo > 0; todo--, p += bytes) {
            vu32_ bad = isplat_(0), all = isplat_(0), a, b, c, d, rest_a = all, rest_b = all, rest_c = all,
                  rest_d = all;
            KOPT_PREFETCH_(p + 2048);
            if (format == KOPT_F32) KOPT_PREFETCH_(p + 2048 + 8 * LANES_);
            a = K_(norm_split)(p, format, 0, unit, fine, &rest_a, &bad, &all);
            b = K_(norm_split)(p, format, 1, unit, fine, &rest_b, &bad, &all);
            c = K_(norm_split)(p, format, 2, unit, fine, &rest_c, &bad, &all);
            d = K_(norm_split)(p, format, 3, unit, fine, &rest_d, &bad, &all);
            bad = or_(and_(bad, isplat_(0x7FFFFFFFu)), shr_(all, 28));
            if (any_true_(igt_(bad, isplat_(0)))) {
                kopt_norm_add_values_(norm, p, format, group);
                strange++;
            } else {
                K_(norm_dot)(&s, format, a, rest_a);
                K_(norm_dot)(&s, format, b, rest_b);
                K_(norm_dot)(&s, format, c, rest_c);
                K_(norm_dot)(&s, format, d, rest_d);
            }
        }
        K_(norm_spill)(norm, s.high, 552 - 2 * scale);
        if (format == KOPT_F32) {
            K_(norm_spill)(norm, s.cross, 552 + 1 - 12 - 2 * scale);
            K_(norm_spill)(norm, s.low, 552 - 24 - 2 * scale);
        }
        if (strange > 1) scale = 0;
        kopt_norm_carry_(norm);
    }
    kopt_norm_add_values_(norm, p, format, n % group);
    kopt_norm_carry_(norm);
}
#else
FN_ void K_(norm_format)(kopt_norm *norm, const kopt_byte_ *p, kopt_format format, size_t n) {
    const size_t most = KOPT_CAST_(size_t, 1) << 14;
    while (n > 0) {
        const size_t part = n < most ? n : most;
        kopt_norm_add_values_(norm, p, format, part);
        kopt_norm_carry_(norm);
        p += part * kopt_bytes_of_(format);
        n -= part;
    }
}
#endif

/* A number of `format` as it is stored, its magnitude at most limit; NaN stays. */
FN_ vu32_ K_(clip_value)(vu32_ a, kopt_format format, vu32_ limit) {
    const vu32_ mag = and_(a, isplat_(format == KOPT_F32 ? 0x7FFFFFFFu : 0x7FFFu));
    const vu32_ infinity = isplat_(format == KOPT_F32 ? 0x7F800000u : format == KOPT_BF16 ? 0x7F80u : 0x7C00u);
    return or_(select_(igt_(mag, infinity), mag, select_(igt_(mag, limit), limit, mag)), isub_(a, mag));
}

FN_ void K_(clip)(const kopt_tool_ *t) {
    const size_t size = kopt_bytes_of_(t->dst_format);
    size_t i, n;
    for (i = 0; i < t->n; i += n) {
        kopt_byte_ *const p = t->dst + i * size;
        n = t->n - i < LANES_ ? t->n - i : LANES_;
        K_(store_n)(p, size, n, K_(clip_value)(K_(load_n)(p, size, n), t->dst_format, isplat_(t->limit)));
    }
}

/* Section 13. Stored without a payload of NaN, with subnormals. */
FN_ vu32_ K_(reduce_value)(vf32_ sum, float scale, kopt_format to) {
    vu32_ a;
    if (kopt_as_u32_(scale) != 0x3F800000u) sum = mul_(sum, splat_(scale));
    if (to != KOPT_F32) return K_(round_nearest16)(sum, to);
    a = as_u32_(sum);
    return select_(igt_(and_(a, isplat_(0x7FFFFFFFu)), isplat_(0x7F800000u)), isplat_(0x7FC00000u), a);
}

FN_ void K_(reduce)(const kopt_tool_ *t, kopt_format from, kopt_format to, size_t count) {
    const size_t from_size = kopt_bytes_of_(from), to_size = kopt_bytes_of_(to);
    size_t i, k, n;
    for (i = 0; i < t->n; i += n) {
        vf32_ sum = splat_(0);
        n = t->n - i < LANES_ ? t->n - i : LANES_;
        for (k = 0; k < count; k++) {
            const kopt_byte_ *p = KOPT_CAST_(const kopt_byte_ *, t->shards[k]) + i * from_size;
            const vf32_ x = K_(widen)(K_(load_n)(p, from_size, n), from);
            sum = k == 0 ? x : add_(sum, x);
        }
        K_(store_n)(t->dst + i * to_size, to_size, n, K_(reduce_value)(sum, t->scale, to));
    }
}

#ifndef TOOLS_ISA_
static KOPT_NOINLINE_ ISA_TARGET_ void K_(tool)(const kopt_tool_ *t) {
    switch (KOPT_CAST_(int, t->kind)) {
    case KOPT_TOOL_NORM_:
        if (t->src_format == KOPT_F32)
            K_(norm_format)(t->norm, t->src, KOPT_F32, t->n);
        else if (t->src_format == KOPT_BF16)
            K_(norm_format)(t->norm, t->src, KOPT_BF16, t->n);
        else
            K_(norm_format)(t->norm, t->src, KOPT_FP16, t->n);
        break;
    case KOPT_TOOL_CLIP_: K_(clip)(t); break;
    case KOPT_TOOL_SUM_: K_(reduce)(t, t->src_format, t->dst_format, t->count); break;
    default: break;
    }
}
#endif

#ifdef KAHAN_OPT_VMATH
/* ---- vector mathematics ---- */

/* docs/vmath.md. The coefficients are those of `tests/vmath.py coefficients`. */

#define blend_ K_(blend)
#define horner_ K_(horner)
#define abs_ K_(abs)

FN_ vf32_ blend_(vmask_ m, vf32_ yes, vf32_ no) { return as_f32_(select_(m, as_u32_(yes), as_u32_(no))); }
FN_ vf32_ abs_(vf32_ x) { return as_f32_(and_(as_u32_(x), isplat_(0x7FFFFFFFu))); }

/* |x|, and limit if it is above or NaN: x with its sign. */
FN_ vf32_ K_(clamp_abs)(vf32_ x, float limit) {
    const vu32_ u = as_u32_(x), mag = and_(u, isplat_(0x7FFFFFFFu)), end = isplat_(kopt_as_u32_(limit));
    return as_f32_(or_(xor_(u, mag), select_(igt_(mag, end), end, mag)));
}

/* c + x * rest: a polynomial is horner_(x, c0, horner_(x, c1, ... splat_(c_last))) */
FN_ vf32_ horner_(vf32_ x, float c, vf32_ rest) { return add_(mul_(rest, x), splat_(c)); }

/* a * b and what the product lost (Dekker 1971); magnitudes below 2^115, products above 2^-100. */
FN_ vf32_ K_(two_product)(vf32_ a, vf32_ b, vf32_ *rest) {
    const vf32_ split = splat_(4097.0f), p = mul_(a, b), at = mul_(a, split), bt = mul_(b, split);
    const vf32_ ah = sub_(at, sub_(at, a)), al = sub_(a, ah), bh = sub_(bt, sub_(bt, b)), bl = sub_(b, bh);
    *rest = add_(add_(add_(sub_(mul_(ah, bh), p), mul_(ah, bl)), mul_(al, bh)), mul_(al, bl));
    return p;
}

/* e^(x + d), d a correction: x = k log 2 + r, 2^k (1 + r + r^2 P(r)). */
FN_ vf32_ K_(vmath_exp)(vf32_ x, vf32_ d) {
    const vf32_ magic = splat_(12582912.0f), one = splat_(1.0f), a = K_(clamp_abs)(x, 104.0f); /* 1.5 * 2^23 */
    const vf32_ t = add_(mul_(a, splat_(1.44269504f)), magic), k = sub_(t, magic);
    const vf32_ r0 = sub_(a, mul_(k, splat_(0.693359375f))), c = sub_(d, mul_(k, splat_(-0.000212194440f)));
    const vf32_ r = add_(r0, c), lost = add_(sub_(r0, r), c), high = add_(one, r), low = sub_(r, sub_(high, one));
    const vf32_ p =
        add_(mul_(mul_(r, r), horner_(r, 0.5f,
                                      horner_(r, 0.166666672f,
                                              horner_(r, 0.0416664518f,
                                                      horner_(r, 0.00833319779f,
                                                              horner_(r, 0.00139361445f, splat_(0.000199533533f))))))),
             lost);
    const vu32_ i = iadd_(isub_(as_u32_(t), as_u32_(magic)), isplat_(512)), i1 = shr_(i, 1), i2 = isub_(i, i1);
    vf32_ y = mul_(add_(high, add_(low, p)), as_f32_(shl_(isub_(i1, isplat_(256 - 127)), 23))); /* 2^k in two factors */
    y = mul_(y, as_f32_(shl_(isub_(i2, isplat_(256 - 127)), 23)));
    return blend_(igt_(and_(as_u32_(x), isplat_(0x7FFFFFFFu)), isplat_(0x7F800000u)), as_f32_(isplat_(0x7FC00000u)), y);
}

/* x = 2^k (1 + f), sqrt(1/2) <= 1 + f < sqrt(2), s = f / (2 + f): log(1 + f) = f - f^2/2 + s (f^2/2 + R(s^2)). */
FN_ vf32_ K_(vmath_log)(vf32_ x) {
    const vu32_ given = as_u32_(x);
    const vmask_ tiny = igt_(isplat_(0x00800000u), given);
    const vu32_ u =
        iadd_(select_(tiny, as_u32_(mul_(x, splat_(8388608.0f))), given), isplat_(0x3F800000u - 0x3F3504F3u));
    const vf32_ f = sub_(as_f32_(iadd_(and_(u, isplat_(0x007FFFFFu)), isplat_(0x3F3504F3u))), splat_(1.0f));
    const vf32_ k = convert_f32_(isub_(shr_(u, 23), select_(tiny, isplat_(127 + 23), isplat_(127))));
    const vf32_ s = div_(f, add_(splat_(2.0f), f)), z = mul_(s, s), half = mul_(mul_(f, f), splat_(0.5f));
    const vf32_ r = sub_(
        mul_(s, add_(half, mul_(z, horner_(z, 0.666666627f,
                                           horner_(z, 0.400008112f, horner_(z, 0.285134971f, splat_(0.239589244f))))))),
        half);
    const vf32_ a = mul_(k, splat_(0.693359375f)), high = add_(a, f), low = sub_(f, sub_(high, a));
    vf32_ y = add_(high, add_(low, add_(mul_(k, splat_(-0.000212194440f)), r)));
    y = blend_(igt_(given, isplat_(0x7F7FFFFFu)), x, y);                   /* inf, NaN */
    y = blend_(igt_(isplat_(0), given), as_f32_(isplat_(0x7FC00000u)), y); /* negative */
    return blend_(ieq_(and_(given, isplat_(0x7FFFFFFFu)), isplat_(0)), as_f32_(isplat_(0xFF800000u)), y);
}

/* x + x^3 P(x^2) below 0.8, else 1 - 2 q / (1 + q) with q = e^(-2 |x|). */
FN_ vf32_ K_(vmath_tanh)(vf32_ x) {
    const vf32_ a = abs_(x), z = mul_(a, a), one = splat_(1.0f),
                q = K_(vmath_exp)(mul_(a, splat_(-2.0f)), splat_(0.0f));
    const vf32_ below =
        add_(a, mul_(mul_(a, z),
                     horner_(z, -0.333333313f,
                             horner_(z, 0.133332387f,
                                     horner_(z, -0.0539542474f,
                                             horner_(z, 0.0217733867f,
                                                     horner_(z, -0.00850884989f,
                                                             horner_(z, 0.0028497458f, splat_(-0.000569574651f)))))))));
    const vf32_ d = add_(one, q), rest = sub_(q, sub_(d, one)),
                w = div_(mul_(q, splat_(2.0f)), d); /* 1 + q = d + rest */
    const vf32_ high = sub_(one, w),
                lost = mul_(mul_(w, rest), sub_(one, mul_(w, splat_(0.5f)))); /* 1 / d = 1 - w / 2 */
    const vf32_ above = add_(high, add_(sub_(sub_(one, high), w), lost));
    return as_f32_(
        or_(xor_(as_u32_(x), as_u32_(a)), as_u32_(blend_(igt_(as_u32_(splat_(0.8f)), as_u32_(a)), below, above))));
}

/* For 0 <= x < 1: x + x P(x^2) */
FN_ vf32_ K_(vmath_erf_below_1)(vf32_ x) {
    const vf32_ z = mul_(x, x);
    return add_(x, mul_(x, horner_(z, 0.128379166f,
                                   horner_(z, -0.376126349f,
                                           horner_(z, 0.112837434f,
                                                   horner_(z, -0.0268635508f,
                                                           horner_(z, 0.00521640619f,
                                                                   horner_(z, -0.000842323236f,
                                                                           horner_(z, 0.000108587818f,
                                                                                   splat_(-8.57798841e-06f))))))))));
}

/* e^(y^2) erfc(y) for 0 <= y < 10.9: P(t) / (1 + 2 y), t = (y - 2) / (y + 2) */
FN_ vf32_ K_(vmath_erfcx)(vf32_ y) {
    const vf32_ two = splat_(2.0f), t = div_(sub_(y, two), add_(y, two));
    return div_(
        horner_(
            t, 1.27697837f,
            horner_(
                t, -0.0927638113f,
                horner_(
                    t, -0.166030198f,
                    horner_(t, 0.164050832f,
                            horner_(t, -0.0542211086f,
                                    horner_(t, -0.00802993868f,
                                            horner_(t, 0.00872326922f,
                                                    horner_(t, 0.00125348219f,
                                                            horner_(t, -0.00144877564f,
                                                                    horner_(t, -0.000410605775f,
                                                                            horner_(t, 0.000190243765f,
                                                                                    splat_(9.18475271e-05f)))))))))))),
        add_(splat_(1.0f), mul_(two, y)));
}

/* erfc(y) for y >= 0 */
FN_ vf32_ K_(vmath_erfc_positive)(vf32_ y) {
    vf32_ low, high, a = K_(clamp_abs)(y, 10.5f);
    high = K_(two_product)(a, a, &low);
    return mul_(K_(vmath_exp)(as_f32_(xor_(as_u32_(high), isplat_(0x80000000u))),
                              as_f32_(xor_(as_u32_(low), isplat_(0x80000000u)))),
                K_(vmath_erfcx)(a));
}

FN_ vf32_ K_(vmath_erf)(vf32_ x) {
    const vf32_ a = abs_(x), one = splat_(1.0f),
                y = blend_(igt_(as_u32_(one), as_u32_(a)), K_(vmath_erf_below_1)(a),
                           sub_(one, K_(vmath_erfc_positive)(a)));
    return blend_(igt_(as_u32_(a), isplat_(0x7F800000u)), x, as_f32_(or_(xor_(as_u32_(x), as_u32_(a)), as_u32_(y))));
}

FN_ vf32_ K_(vmath_erfc)(vf32_ x) {
    const vf32_ a = abs_(x), one = splat_(1.0f), tail = K_(vmath_erfc_positive)(a);
    const vu32_ sign = xor_(as_u32_(x), as_u32_(a));
    const vf32_ below = sub_(one, as_f32_(or_(as_u32_(K_(vmath_erf_below_1)(a)), sign)));
    const vf32_ above = blend_(ieq_(sign, isplat_(0)), tail, sub_(splat_(2.0f), tail));
    const vf32_ y = blend_(igt_(as_u32_(splat_(0.5f)), as_u32_(a)), below, above);
    return blend_(igt_(as_u32_(a), isplat_(0x7F800000u)), x, y);
}

/* The angle of the smaller over the larger, q + q^3 P(q^2), put into its octant. */
FN_ vf32_ K_(vmath_atan2)(vf32_ y, vf32_ x) {
    const vf32_ ay = abs_(y), ax = abs_(x);
    const vu32_ v = as_u32_(ay), u = as_u32_(ax), flip = xor_(u, as_u32_(x)), zero = isplat_(0);
    const vmask_ swap = igt_(v, u), nan = mask_or_(igt_(v, isplat_(0x7F800000u)), igt_(u, isplat_(0x7F800000u)));
    const vu32_ most = select_(swap, v, u), turn = xor_(flip, select_(swap, isplat_(0x80000000u), zero));
    vf32_ q = div_(blend_(swap, ax, ay), as_f32_(most)), z, high, low;
    z = mul_(q, q);
    q = add_(
        q,
        mul_(mul_(q, z),
             horner_(
                 z, -0.333333313f,
                 horner_(
                     z, 0.199998975f,
                     horner_(
                         z, -0.14283745f,
                         horner_(z, 0.110914007f,
                                 horner_(z, -0.0897195861f,
                                         horner_(z, 0.0722251087f,
                                                 horner_(z, -0.0538603701f,
                                                         horner_(z, 0.0337226987f,
                                                                 horner_(z, -0.0157589912f,
                                                                         horner_(z, 0.004706142f,
                                                                                 splat_(-0.000659056939f)))))))))))));
    q = blend_(ieq_(v, u), as_f32_(isplat_(0x3F490FDBu)), q); /* pi/4, infinite or not */
    q = blend_(ieq_(most, zero), as_f32_(zero), q);
    high =
        as_f32_(select_(swap, isplat_(0x3FC90FDBu), select_(ieq_(flip, zero), zero, isplat_(0x40490FDBu)))); /* pi/2, 0,
          pi */
    low = as_f32_(
        select_(swap, isplat_(0xB33BBD2Eu), select_(ieq_(flip, zero), zero, isplat_(0xB3BBBD2Eu)))); /* the rest    */
    z = add_(high, add_(low, as_f32_(xor_(as_u32_(q), turn))));
    z = as_f32_(or_(and_(as_u32_(z), isplat_(0x7FFFFFFFu)), xor_(v, as_u32_(y))));
    return blend_(nan, as_f32_(isplat_(0x7FC00000u)), z);
}

/* For |f| <= 1/4: sin(pi f) = 4 f - f P(f^2), cos(pi f) = 1 + f^2 Q(f^2). */
FN_ vf32_ K_(sincospi_quarter)(vf32_ f, vf32_ *cosine) {
    const vf32_ z = mul_(f, f);
    *cosine =
        add_(splat_(1.0f),
             mul_(z, horner_(z, -4.93480206f,
                             horner_(z, 4.05869341f,
                                     horner_(z, -1.33446038f, horner_(z, 0.221272752f, splat_(0.0610933602f)))))));
    return sub_(mul_(f, splat_(4.0f)),
                mul_(f, horner_(z, 0.858407319f,
                                horner_(z, 5.16771889f,
                                        horner_(z, -2.55051947f, horner_(z, 0.606866181f, splat_(-0.135735944f)))))));
}

/* x = n/2 + f, |f| <= 1/4, exactly. */
FN_ vf32_ K_(vmath_sincospi)(vf32_ x, vf32_ *cosine) {
    const vf32_ magic = splat_(12582912.0f),
                far_away = splat_(12884901888.0f); /* 1.5 * 2^33: rounds to multiples of 2^10 */
    const vu32_ mag = and_(as_u32_(x), isplat_(0x7FFFFFFFu)), sign = xor_(as_u32_(x), mag), zero = isplat_(0);
    const vf32_ a = as_f32_(select_(igt_(mag, isplat_(0x4B7FFFFFu)), zero, mag)); /* from 2^24 on they are even */
    const vf32_ b = sub_(a, sub_(add_(a, far_away), far_away)), t = add_(add_(b, b), magic);
    vf32_ c;
    const vf32_ s = K_(sincospi_quarter)(sub_(b, mul_(sub_(t, magic), splat_(0.5f))), &c);
    const vu32_ n = as_u32_(t); /* of which the low bits are those of the integer */
    const vmask_ even = ieq_(and_(n, isplat_(1)), zero), special = igt_(mag, isplat_(0x7F7FFFFFu));
    vu32_ sw = select_(even, as_u32_(s), as_u32_(c)), cw = select_(even, as_u32_(c), as_u32_(s));
    sw = xor_(sw, shl_(and_(n, isplat_(2)), 30));
    sw = select_(ieq_(and_(sw, isplat_(0x7FFFFFFFu)), zero), sign, xor_(sw, sign));
    cw = xor_(cw, shl_(and_(iadd_(n, isplat_(1)), isplat_(2)), 30));
    cw = select_(ieq_(and_(cw, isplat_(0x7FFFFFFFu)), zero), zero, cw);
    *cosine = as_f32_(select_(special, isplat_(0x7FC00000u), cw));
    return as_f32_(select_(special, isplat_(0x7FC00000u), sw));
}

/* ---- functions from 16 bits to 16 bits ---- */

/* map_argument() makes the argument of the table's function, map_result() the result from what that returns. */

/* g(|x|) = |x| (c1 + c3 x^2) of the tanh form of GELU, and what it lost; |x| <= 12. */
FN_ vf32_ K_(gelu_tanh_argument)(vf32_ x, vf32_ *rest) {
    const vf32_ a = K_(clamp_abs)(abs_(x), 12.0f), c1 = splat_(1.59576917f), square = mul_(a, a); /* exact: 22 bits */
    vf32_ low, tail, p = K_(two_product)(square, splat_(0.0713548139f), &low), sum = add_(c1, p);
    /* c1 >= p up to |x| = 4.7; beyond, what is lost of c1 counts the other way round */
    const vmask_ swap = igt_(as_u32_(p), as_u32_(c1));
    const vf32_ big = blend_(swap, p, c1), little = blend_(swap, c1, p);
    low = add_(low, sub_(little, sub_(sum, big)));
    low = add_(low, add_(mul_(square, splat_(2.3988324e-09f)), splat_(-4.53406804e-08f)));
    p = K_(two_product)(a, sum, &tail);
    *rest = add_(tail, mul_(a, low));
    return p;
}

FN_ vf32_ K_(map_argument)(kopt_function f, vf32_ x) {
    const vu32_ minus = isplat_(0x80000000u);
    vf32_ rest;
    switch (KOPT_CAST_(int, f)) {
    case KOPT_SIGMOID:
    case KOPT_SILU:
    case KOPT_SOFTPLUS:
    case KOPT_SIGMOID_SLOPE:
    case KOPT_SILU_SLOPE: return as_f32_(or_(as_u32_(x), minus));
    case KOPT_TANH_SLOPE: return mul_(as_f32_(or_(as_u32_(x), minus)), splat_(2.0f));
    case KOPT_GELU:
    case KOPT_GELU_SLOPE: return mul_(mul_(x, x), splat_(-0.5f));
    case KOPT_GELU_TANH:
    case KOPT_GELU_TANH_SLOPE:
        rest = K_(gelu_tanh_argument)(x, &rest);
        x = blend_(igt_(and_(as_u32_(x), isplat_(0x7FFFFFFFu)), isplat_(0x7F800000u)), x, rest);
        return as_f32_(or_(as_u32_(x), minus));
    default: return x;
    }
}

/* The normal distribution function, given q = e^(-x^2/2). */
FN_ vf32_ K_(normal_cdf)(vf32_ x, vf32_ q) {
    const vf32_ y = mul_(K_(clamp_abs)(abs_(x), 15.0f), splat_(0.707106769f));
    const vf32_ p = mul_(mul_(q, splat_(0.5f)), K_(vmath_erfcx)(y));
    return blend_(igt_(isplat_(0), as_u32_(x)), p, sub_(splat_(1.0f), p));
}

/* f(x) from x, the table's q and, for SOFTPLUS, l = log(1 + q); *size is the sum of the magnitudes of its terms. */
FN_ vf32_ K_(map_result)(kopt_function f, vf32_ x, vf32_ q, vf32_ l, vf32_ *size) {
    const vf32_ one = splat_(1.0f), least = K_(clamp_abs)(x, 200.0f);
    const vu32_ mag = and_(as_u32_(x), isplat_(0x7FFFFFFFu));
    const vmask_ negative = igt_(isplat_(0), as_u32_(x));
    const int steep = f == KOPT_GELU_TANH || f == KOPT_GELU_TANH_SLOPE;
    vf32_ d, r = q, s, v, rest;
    if (f == KOPT_EXP || f == KOPT_LOG || f == KOPT_TANH) {
        *size = abs_(r);
        return r;
    }
    if (f == KOPT_GELU || f == KOPT_GELU_SLOPE) {
        s = K_(normal_cdf)(x, q);
        v = mul_(mul_(K_(clamp_abs)(x, 20.0f), splat_(0.398942292f)), q); /* x P'(x) */
    } else {
        if (steep) {
            K_(gelu_tanh_argument)(x, &rest);
            q = sub_(q, mul_(q, rest));
        }
        d = add_(one, q);
        s = div_(blend_(negative, q, one), d);
        v = div_(blend_(negative, one, q), d);
        if (f == KOPT_TANH_SLOPE) {
            r = div_(div_(mul_(q, splat_(4.0f)), d), d);
        } else if (f == KOPT_SIGMOID_SLOPE) {
            r = mul_(s, v);
        } else if (f == KOPT_SOFTPLUS) {
            r = blend_(ieq_(as_u32_(d), as_u32_(one)), q, div_(mul_(l, q), sub_(d, one))); /* log(1 + q) */
            r = add_(r, blend_(negative, splat_(0.0f), x));
        }
        if (steep) {
            v = mul_(mul_(s, v), K_(clamp_abs)(x, 12.0f));
            rest = K_(clamp_abs)(x, 12.0f);
            v = mul_(v,
                     add_(splat_(1.59576917f), mul_(mul_(rest, rest), splat_(0.214064449f)))); /* g' = c1 + 3 c3 x^2 */
        } else {
            v = mul_(mul_(s, v), least);
        }
    }
    if (f == KOPT_SIGMOID) r = s;
    if (f == KOPT_SILU || f == KOPT_GELU || f == KOPT_GELU_TANH) {
        r = mul_(blend_(negative, least, x), s);
        /* Close to 0 it is x/2 and a little above: that little decides where x/2 is a tie. */
        l = as_f32_(iadd_(as_u32_(mul_(x, splat_(0.5f))), select_(negative, isplat_(0xFFFFFFFFu), isplat_(1))));
        r = blend_(igt_(isplat_(0x39800000u), mag), blend_(ieq_(mag, isplat_(0)), x, l), r); /* 2^-12 */
    }
    *size = abs_(r);
    if (f == KOPT_SILU_SLOPE || f == KOPT_GELU_SLOPE || f == KOPT_GELU_TANH_SLOPE) {
        r = add_(s, v);
        *size = add_(s, abs_(v));
        r = as_f32_(or_(as_u32_(r), select_(ieq_(as_u32_(r), isplat_(0)), and_(as_u32_(x), isplat_(0x80000000u)),
                                            isplat_(0)))); /* -0 */
    }
    return blend_(igt_(mag, isplat_(0x7F800000u)), x, r);
}

/* The same in 16 bits, from 16 bits x. In doubt (Ziv's test: not all numbers near the result round alike) the table of
   such inputs knows. */
FN_ vu32_ K_(map_result16)(kopt_function f, kopt_format format, vu32_ x, vf32_ q, vf32_ l, vmask_ *doubt) {
    vf32_ width, r = K_(map_result)(f, K_(widen)(x, format), q, l, &width);
    vu32_ differ;
    width = mul_(width, splat_(format == KOPT_BF16 ? 9.5367431640625e-07f : 4.76837158203125e-07f)); /* 2^-20, 2^-21 */
    differ = xor_(K_(round_nearest16)(sub_(r, width), format), K_(round_nearest16)(add_(r, width), format));
    *doubt = igt_(and_(differ, isplat_(0x7FFFu)), isplat_(0));
    return K_(round_nearest16)(r, format);
}

#if KOPT_PASS_ != KOPT_PASS_CUDA_ /* from here on arrays, by jobs */
/* ---- rows of softmax, and random numbers ---- */

/* The largest of n > 0 values, as a word that grows with them; NaN is above all. */
FN_ void K_(row_max)(const kopt_vmath_job_ *j) {
    const size_t size = kopt_bytes_of_(j->format), whole = j->n < LANES_ ? LANES_ : j->n;
    const kopt_byte_ *p = j->in;
    vu32_ most = isplat_(0x80000000u);
    uint32_t lane[LANES_], top = 0;
    size_t i;
#ifndef ONE_LANE_
    kopt_byte_ part[4 * LANES_];
    if (j->n < LANES_) { /* a vector of what is there */
        for (i = 0; i < LANES_; i++) kopt_copy_(part + i * size, p + i % j->n * size, size);
        p = part;
    }
#endif
    for (i = 0; i < whole; i += LANES_) { /* the last vector may begin in the one before it */
        const size_t at = whole - i < LANES_ ? whole - LANES_ : i;
        const vu32_ u = as_u32_(K_(widen)(K_(load_n)(p + at * size, size, LANES_), j->format));
        const vu32_ mag = and_(u, isplat_(0x7FFFFFFFu));
        vu32_ key = select_(igt_(isplat_(0), u), xor_(u, isplat_(0x7FFFFFFFu)), u);
        key = select_(igt_(mag, isplat_(0x7F800000u)), isplat_(0x7FC00000u), key);
        most = select_(igt_(key, most), key, most);
    }
    store32_(KOPT_POINTER_(kopt_byte_ *, lane), most);
    for (i = 0; i < LANES_; i++)
        if ((lane[i] ^ 0x80000000u) > top) top = lane[i] ^ 0x80000000u;
    kopt_store32_(j->out, top ^ 0x80000000u);
}

/* out = in + in * in2; unless out2 is NULL, the 16 sums of that and what each has lost (Knuth's two-sum). */
FN_ void K_(row_sum)(const kopt_vmath_job_ *j) {
    vf32_ sum[KOPT_PARTS_ / LANES_], lost[KOPT_PARTS_ / LANES_];
    kopt_byte_ *const at = j->out2, *const at_lost = at == KOPT_NULL_ ? at : at + 4 * KOPT_PARTS_;
    size_t i, k, n;
    for (k = 0; k < KOPT_PARTS_ / LANES_; k++) {
        sum[k] = as_f32_(at == KOPT_NULL_ ? isplat_(0) : load32_(at + 4 * k * LANES_));
        lost[k] = as_f32_(at == KOPT_NULL_ ? isplat_(0) : load32_(at_lost + 4 * k * LANES_));
    }
    for (i = 0; i < j->n; i += KOPT_PARTS_)
        for (k = 0; k < KOPT_PARTS_ / LANES_ && i + k * LANES_ < j->n; k++) {
            const size_t begin = i + k * LANES_;
            vf32_ x, s, more;
            n = j->n - begin < LANES_ ? j->n - begin : LANES_;
            x = as_f32_(K_(load_n)(j->in + 4 * begin, 4, n)); /* beyond n: 0 */
            x = add_(x, mul_(x, as_f32_(K_(load_n)(j->in2 + 4 * begin, 4, n))));
            K_(store_n)(j->out + 4 * begin, 4, n, as_u32_(x));
            s = add_(sum[k], x);
            more = sub_(s, sum[k]);
            lost[k] = add_(lost[k], add_(sub_(sum[k], sub_(s, more)), sub_(x, more)));
            sum[k] = s;
        }
    for (k = 0; k < KOPT_PARTS_ / LANES_ && at != KOPT_NULL_; k++) {
        store32_(at + 4 * k * LANES_, as_u32_(sum[k]));
        store32_(at_lost + 4 * k * LANES_, as_u32_(lost[k]));
    }
}

/* Two words become two independent normal numbers, r cos(pi a) and r sin(pi a): r = sqrt(-2 log u) with
   u = (x + 1/2) / 2^32 as the sum of two floats, or small r would be coarse; a = n/2 + f, n the upper 2 bits of y, f
   the others, symmetric about 0, or small results would be. */
FN_ void K_(box_muller)(vu32_ *x, vu32_ *y) {
    const vf32_ high = mul_(convert_f32_(shr_(*x, 16)), splat_(1.52587890625e-05f)); /* 2^-16 */
    const vf32_ least = splat_(2.3283064365386963e-10f);                             /* 2^-32 */
    const vf32_ low = mul_(add_(convert_f32_(and_(*x, isplat_(0xFFFFu))), splat_(0.5f)), least);
    const vf32_ u = add_(high, low), rest = sub_(low, sub_(u, high)); /* log(u + rest) is log(u) + rest near 1 */
    const vf32_ r = sqrt_(mul_(add_(K_(vmath_log)(u), rest), splat_(-2.0f)));
    const vu32_ n = shr_(*y, 30), odd = isub_(or_(shl_(*y, 1), isplat_(0x80000001u)), isplat_(0xC0000000u));
    vf32_ c, s = K_(sincospi_quarter)(mul_(convert_f32_(odd), least), &c);
    const vmask_ even = ieq_(and_(n, isplat_(1)), isplat_(0));
    const vu32_ sw = select_(even, as_u32_(s), as_u32_(c)), cw = select_(even, as_u32_(c), as_u32_(s));
    *x = as_u32_(mul_(r, as_f32_(xor_(cw, shl_(and_(iadd_(n, isplat_(1)), isplat_(2)), 30)))));
    *y = as_u32_(mul_(r, as_f32_(xor_(sw, shl_(and_(n, isplat_(2)), 30)))));
}

/* The numbers of the indices first .. first + n - 1, which are within one block of 256: element 0 of out is that of the
   first of the block, and what is not asked for may be written, too. Four words of one Philox block, four numbers. */
FN_ void K_(random_numbers)(const kopt_vmath_job_ *j) {
    const size_t offset = KOPT_CAST_(unsigned, j->first & 255), chunk = 4 * LANES_;
    philox_key_ cipher = K_(make_philox_key)(j->seed, j->step, j->id, j->stream);
    size_t i, k;
    cipher.stream += j->attempt << 20;
    for (i = offset / chunk * chunk; i < offset + j->n; i += chunk) {
        vu32_ x[4], w[4];
        K_(philox)(x, &cipher, KOPT_INDEX_((j->first - offset + i) >> 2));
        if (j->kind == KOPT_VMATH_NORMAL_) {
            for (k = 0; k < 4; k += 2) K_(box_muller)(&x[k], &x[k + 1]);
        } else {
            for (k = 0; k < 4; k++) /* odd numbers in (-2^24, 2^24) */
                x[k] = as_u32_(mul_(convert_f32_(isub_(or_(shl_(shr_(x[k], 8), 1), isplat_(1)), isplat_(0x01000000u))),
                                    splat_(5.9604644775390625e-08f)));
        }
        K_(philox_transpose)(w, x);
        for (k = 0; k < 4; k++) store32_(j->out + 4 * (i + k * LANES_), w[k]);
    }
}

/* Elements i .. i + n - 1 of one job. */
FN_ void K_(vmath_elements)(const kopt_vmath_job_ *j, size_t i, size_t n) {
    const size_t size = kopt_bytes_of_(j->format);
    vf32_ x = as_f32_(isplat_(0)), y, r, width;
    vu32_ old, next;
    vmask_ doubt;
    if (j->kind < KOPT_VMATH_PREPARE_) x = as_f32_(K_(load_n)(j->in + 4 * i, 4, n));
    switch (KOPT_CAST_(int, j->kind)) {
    case KOPT_VMATH_EXP_: x = K_(vmath_exp)(x, splat_(0.0f)); break;
    case KOPT_VMATH_LOG_: x = K_(vmath_log)(x); break;
    case KOPT_VMATH_TANH_: x = K_(vmath_tanh)(x); break;
    case KOPT_VMATH_ERF_: x = K_(vmath_erf)(x); break;
    case KOPT_VMATH_ERFC_: x = K_(vmath_erfc)(x); break;
    case KOPT_VMATH_ATAN2_: x = K_(vmath_atan2)(x, as_f32_(K_(load_n)(j->in2 + 4 * i, 4, n))); break;
    case KOPT_VMATH_SINCOSPI_:
        x = K_(vmath_sincospi)(x, &y);
        K_(store_n)(j->out2 + 4 * i, 4, n, as_u32_(y));
        break;
    case KOPT_VMATH_ADD_ONE_: x = add_(x, splat_(1.0f)); break;
    case KOPT_VMATH_PREPARE_:
        x = K_(map_argument)(j->f, K_(widen)(K_(load_n)(j->in + i * size, size, n), j->format));
        break;
    case KOPT_VMATH_MULTIPLY_:
        x = K_(widen)(K_(load_n)(j->in + i * size, size, n), j->format);
        y = K_(widen)(K_(load_n)(j->in2 + i * size, size, n), j->format);
        K_(store_n)(j->out + i * size, size, n, K_(round_nearest16)(mul_(x, y), j->format));
        return;
    case KOPT_VMATH_DIFFERENCE_: /* in - a, and what the difference lost */
        y = K_(widen)(K_(load_n)(j->in + i * size, size, n), j->format);
        r = splat_(j->a);
        x = sub_(y, r);
        width = sub_(x, y);
        width = sub_(sub_(y, sub_(x, width)), add_(r, width));
        next = select_(igt_(as_u32_(abs_(x)), isplat_(0x42D00000u)), isplat_(0), as_u32_(width)); /* 104: e^x is 0 */
        K_(store_n)(j->out2 + 4 * i, 4, n, next);
        break;
    case KOPT_VMATH_LINEAR_: /* a + b * in2, or, to fp32, a * in + b * in2 */
        y = mul_(splat_(j->b), as_f32_(K_(load_n)(j->in2 + 4 * i, 4, n)));
        x = splat_(j->a);
        if (j->in != KOPT_NULL_) x = mul_(K_(widen)(K_(load_n)(j->in + i * size, size, n), j->format), x);
        x = add_(x, y);
        if (j->in != KOPT_NULL_ || size == 4) break;
        K_(store_n)(j->out + i * size, size, n, K_(round_nearest16)(x, j->format));
        return;
    default: /* KOPT_VMATH_FINISH_ */
        old = K_(load_n)(j->in + i * size, size, n);
        y = as_f32_(K_(load_n)(j->in2 + 4 * i, 4, n));
        r = j->f == KOPT_SOFTPLUS ? as_f32_(K_(load_n)(j->out2 + 4 * i, 4, n)) : y;
        next = K_(map_result16)(j->f, j->format, old, y, r, &doubt);
        K_(store_n)(j->out + i * size, size, n, next);
        if (any_true_(doubt)) {
            kopt_byte_ part[2 * LANES_];
            unsigned count;
            const uint32_t *const patches = kopt_map_exceptions_(j->f, j->format, &count);
            size_t lane;
            store16_(part, old);
            for (lane = 0; lane < n; lane++) {
                kopt_byte_ *const out = j->out + (i + lane) * size;
                kopt_store16_(out,
                              kopt_map_exception_(patches, count, kopt_load16_(part + 2 * lane), kopt_load16_(out)));
            }
        }
        return;
    }
    K_(store_n)(j->out + 4 * i, 4, n, as_u32_(x));
}

static KOPT_NOINLINE_ ISA_TARGET_ void K_(vmath)(const kopt_vmath_job_ *j) {
    size_t i, n;
    if (j->kind == KOPT_VMATH_MAXIMUM_) {
        K_(row_max)(j);
        return;
    }
    if (j->kind == KOPT_VMATH_TERMS_) {
        K_(row_sum)(j);
        return;
    }
    if (j->kind == KOPT_VMATH_NORMAL_ || j->kind == KOPT_VMATH_UNIFORM_) {
        K_(random_numbers)(j);
        return;
    }
    for (i = 0; i < j->n; i += n) {
        n = j->n - i < LANES_ ? j->n - i : LANES_;
        K_(vmath_elements)(j, i, n);
    }
}
#endif

#undef blend_
#undef horner_
#undef abs_
#endif /* KAHAN_OPT_VMATH */

#if KOPT_PASS_ == KOPT_PASS_SCALAR_
static uint32_t K_(random)(uint64_t seed, uint32_t step, uint32_t id, uint32_t stream, uint64_t index) {
    const philox_key_ cipher = K_(make_philox_key)(seed, step, id, stream);
    vu32_ x[4];
    return K_(random_at)(x, &cipher, index, 1);
}
#endif

/* ---- the end of a pass: only its functions stay ---- */
#undef KOPT_READ_
#define KOPT_READ_ 1
#undef KOPT_GLUE2_
#undef KOPT_GLUE_
#undef K_
#undef FN_
#undef scalars_
#undef philox_key_
#undef random_buffer_
#undef constants_
#undef moments_
#undef atan2_reduced_
#undef element_
#undef pair_
#undef arrays_
#undef half_pair_
#undef random_pair_
#undef random_tile_
#undef buffers_
#undef random_counter_
#undef norm_sums_
#undef vf32_
#undef vu32_
#undef vmask_
#undef add_
#undef sub_
#undef mul_
#undef div_
#undef sqrt_
#undef masked_sub_
#undef min_
#undef max_
#undef splat_
#undef as_u32_
#undef as_f32_
#undef round_u32_
#undef convert_f32_
#undef isplat_
#undef isplat_hoisted_
#undef iadd_
#undef isub_
#undef and_
#undef or_
#undef xor_
#undef mulhilo_
#undef add16_
#undef mul16_
#undef dot_
#undef igt_
#undef ieq_
#undef mask_or_
#undef any_true_
#undef select_
#undef select_or_zero_
#undef load32_
#undef load16_
#undef load8_
#undef store32_
#undef store16_
#undef store8_
#undef widen_fp16_
#undef narrow_fp16_
#undef block_of_lane_
#undef interleave_low_
#undef interleave_high_
#undef unpack_low16_
#undef unpack_high16_
#undef pack_high16_
#undef imax_
#undef unordered_
#undef load_fp16_
#undef round_fp16_
#undef store8_from16_
#undef interleave_high16_
#undef flush16_
#undef max16_
#undef any_gt16_
#undef NOINLINE_FN_
#undef INFIX_OR_
#undef SCHEDULE_
#undef AS_BYTES_
#undef ANY_
#undef COMMITS_
#undef DIRECTIONS_
#undef EACH_MOMENT_
#undef FP16_
#undef GENERIC_FP16_
#undef SPECIALIZE_L2_
#undef SPECIALIZE_TILED_
#undef SPECIALIZATIONS_
#undef SPECIALIZATIONS_VMATH_
#undef IMAX_
#undef ISA_
#undef ISA_TARGET_
#undef LANES_
#undef CONVERT_ISA_
#undef MIN_MAX_
#undef MOMENTS_
#undef RANDOM_ZERO_EXTENDED_
#undef ONE_LANE_
#undef OPERATORS_
#undef SPECIALIZED_
#undef EVEN_ODD_
#undef OPAQUE_
#undef VECTOR_FN_
#undef ROUND_
#undef NT_STORES_
#undef MASKED_SUB_
#undef TOOLS_ISA_
#undef PAIR_
#undef UNORDERED_
#undef Y_BUFFER_
#undef shl_
#undef shr_
#undef nt_store16_
#undef nt_store32_
#undef nt_fence_
#undef imax_
#undef unordered_
#undef load_fp16_
#undef round_fp16_
#undef FULL_ONLY_
#undef FIXED_OR_
#undef FORMAT_MATCHES_
#undef UNREACHABLE_IF_
#undef MATCHES_
#undef COUNT_MATCHES_
#undef FP16_BUFFER_

#elif defined(KOPT_IMPLEMENTING_) /* the implementation, continued */

/* ---- DISPATCH ---------------------------------------------------------------------------------------------------- */

typedef struct kopt_kernels_ {
    const char *name;
    void (*step)(const kopt_job_ *);
    void (*convert)(const kopt_conversion_ *);
    int (*all_finite)(const kopt_byte_ *, kopt_format, size_t);
    void (*measure)(const kopt_job_ *, kopt_byte_ *);
#ifdef KAHAN_OPT_VMATH
    void (*vmath)(const kopt_vmath_job_ *);
#endif
} kopt_kernels_;

#ifdef KAHAN_OPT_VMATH
#define KOPT_AND_VMATH_(kernel) , kernel
#else
#define KOPT_AND_VMATH_(kernel)
#endif

#define KOPT_KERNELS_(isa, tools)                                                 \
    {#isa, kopt_step_##isa##_, kopt_convert_##isa##_, kopt_all_finite_##tools##_, \
     kopt_measure_##tools##_ KOPT_AND_VMATH_(kopt_vmath_##isa##_)}
#define KOPT_NO_KERNELS_(isa) {#isa, KOPT_NULL_, KOPT_NULL_, KOPT_NULL_, KOPT_NULL_ KOPT_AND_VMATH_(KOPT_NULL_)}
static const kopt_kernels_ kopt_table_[KOPT_ISA_COUNT] = {KOPT_KERNELS_(scalar, scalar),
#ifdef KOPT_X86_
                                                          KOPT_KERNELS_(sse2, scalar), KOPT_KERNELS_(avx2, avx2),
                                                          KOPT_KERNELS_(avx512, avx2),
#else
                                                          KOPT_NO_KERNELS_(sse2), KOPT_NO_KERNELS_(avx2),
                                                          KOPT_NO_KERNELS_(avx512),
#endif
#ifdef KOPT_NEON_
                                                          KOPT_KERNELS_(neon, neon)
#else
                                                          KOPT_NO_KERNELS_(neon)
#endif
};
#undef KOPT_KERNELS_
#undef KOPT_NO_KERNELS_
#undef KOPT_AND_VMATH_

#if defined(KOPT_X86_) || defined(KOPT_NEON_)
#define KOPT_KERNEL_(name) (kopt_table_[kopt_isa_current()].name)
#else /* there is only one: the linker can drop what is not called */
#define KOPT_KERNEL_(name) kopt_##name##_scalar_
#endif

KOPT_API_ const char *kopt_result_string(kopt_result result) {
    switch (KOPT_CAST_(int, result)) {
    case KOPT_OK: return "success";
    case KOPT_ERROR_NULL: return "a required pointer is NULL";
    case KOPT_ERROR_OPTION: return "an option has a value that does not exist, does not apply or is not in this build";
    case KOPT_ERROR_RANGE: return "a hyper-parameter is out of range or not a number";
    case KOPT_ERROR_BOUNDS: return "the range of elements is not inside the tensor, or the tensor is too large";
    case KOPT_ERROR_SIZE: return "the state block is smaller than kopt_state_size() says";
    case KOPT_ERROR_STATE: return "the state block was not made by kopt_state_init(), or by another version";
    case KOPT_ERROR_MISMATCH: return "the state block belongs to another optimizer, tensor or shard";
    case KOPT_ERROR_SEALED: return "the state block is sealed: open it with kopt_state_open() first";
    case KOPT_ERROR_CHECKSUM: return "the state block is damaged: its checksum is wrong";
    case KOPT_ERROR_OVERLAP: return "two of the buffers overlap";
    case KOPT_ERROR_STEP: return "the step was not begun, or all 2^32 - 1 steps are used up";
    case KOPT_ERROR_ISA: return "this instruction set, or a GPU, is not in this build or not on this machine";
    case KOPT_ERROR_DEVICE: return "a CUDA call failed: cudaPeekAtLastError() says why";
    case KOPT_ERROR_UNINITIALIZED:
        return "no constructor made this struct: start from kopt_adamw(), kopt_accumulator_of() or another one";
    case KOPT_ERROR_ID:
        return "the ids of a list of tensors do not increase: call kopt_number_tensors() before kopt_state_init()";
    default: return "unknown result";
    }
}

KOPT_API_ int kopt_version(void) { return KOPT_VERSION; }

#ifdef KOPT_X86_
static void kopt_cpuid_(uint32_t leaf, uint32_t out[4]) {
#ifndef KOPT_GNU_
    int r[4];
    __cpuidex(r, KOPT_CAST_(int, leaf), 0);
    out[0] = KOPT_CAST_(uint32_t, r[0]);
    out[1] = KOPT_CAST_(uint32_t, r[1]);
    out[2] = KOPT_CAST_(uint32_t, r[2]);
    out[3] = KOPT_CAST_(uint32_t, r[3]);
#elif defined(__i386__) /* ebx may hold the address of the global offset table */
    __asm__("xchgl %%ebx, %1\n\tcpuid\n\txchgl %%ebx, %1"
            : "=a"(out[0]), "=&r"(out[1]), "=c"(out[2]), "=d"(out[3])
            : "0"(leaf), "2"(0));
#else
    __asm__("cpuid" : "=a"(out[0]), "=b"(out[1]), "=c"(out[2]), "=d"(out[3]) : "0"(leaf), "2"(0));
#endif
}
#endif

KOPT_API_ int kopt_isa_usable(kopt_isa isa) {
    if (KOPT_CAST_(unsigned, isa) >= KOPT_CAST_(unsigned, KOPT_ISA_COUNT)) return 0;
    if (kopt_table_[isa].step == KOPT_NULL_) return 0;
#ifdef KOPT_X86_
    if (isa != KOPT_ISA_SCALAR) {
        uint32_t r[4], max, features, saved = 0;
        kopt_cpuid_(0, r);
        max = r[0];
        kopt_cpuid_(1, r);
        if ((r[3] >> 26 & 1u) == 0) return 0; /* SSE2 */
        if (isa == KOPT_ISA_SSE2) return 1;
        features = r[2];
        if ((features >> 27 & 1u) == 0 || (features >> 28 & 1u) == 0 || (features >> 29 & 1u) == 0 || max < 7) return 0;
#ifndef KOPT_GNU_ /* OSXSAVE, AVX, F16C are there: which registers does the system save? */
        saved = KOPT_CAST_(uint32_t, _xgetbv(0) & 0xFFFFFFFFu);
#else
        {
            uint32_t high;
            __asm__ __volatile__(".byte 0x0F, 0x01, 0xD0" : "=a"(saved), "=d"(high) : "c"(0)); /* xgetbv */
        }
#endif
        kopt_cpuid_(7, r);
        if ((saved & 0x06u) != 0x06u || (r[1] >> 5 & 1u) == 0) return 0; /* xmm and ymm; AVX2 */
        if (isa == KOPT_ISA_AVX2) return 1;
        return (saved & 0xE6u) == 0xE6u && (r[1] & 0xC0030000u) == 0xC0030000u; /* zmm, masks; VL BW DQ F */
    }
#endif
    return 1;
}

/* 0: not chosen yet; else the ISA + 1. Several threads may choose at once: they choose the same. */
#if !defined(KOPT_X86_) && !defined(KOPT_NEON_) /* no choice: nothing to keep, and small cores have no atomics */
#define KOPT_GET_CHOSEN_() 1
#define KOPT_SET_CHOSEN_(x) KOPT_CAST_(void, x)
#elif defined(KOPT_GNU_)
static int kopt_chosen_;
#define KOPT_GET_CHOSEN_() __atomic_load_n(&kopt_chosen_, __ATOMIC_RELAXED)
#define KOPT_SET_CHOSEN_(x) __atomic_store_n(&kopt_chosen_, x, __ATOMIC_RELAXED)
#else
static int kopt_chosen_;
#define KOPT_GET_CHOSEN_() (*KOPT_CAST_(volatile int *, &kopt_chosen_))
#define KOPT_SET_CHOSEN_(x) (*KOPT_CAST_(volatile int *, &kopt_chosen_) = (x))
#endif

KOPT_API_ kopt_isa kopt_isa_current(void) {
    int chosen = KOPT_GET_CHOSEN_();
    if (chosen == 0) {
        for (chosen = KOPT_ISA_COUNT; !kopt_isa_usable(KOPT_CAST_(kopt_isa, chosen - 1)); chosen--) {
        }
        KOPT_SET_CHOSEN_(chosen);
    }
    return KOPT_CAST_(kopt_isa, chosen - 1);
}

KOPT_API_ kopt_result kopt_isa_force(kopt_isa isa) {
    if (isa == KOPT_ISA_COUNT) {
        KOPT_SET_CHOSEN_(0);
    } else {
        if (!kopt_isa_usable(isa)) return KOPT_ERROR_ISA;
        KOPT_SET_CHOSEN_(KOPT_CAST_(int, isa) + 1);
    }
    return KOPT_OK;
}

KOPT_API_ const char *kopt_isa_name(kopt_isa isa) {
    return KOPT_CAST_(unsigned, isa) < KOPT_CAST_(unsigned, KOPT_ISA_COUNT) ? kopt_table_[isa].name : "unknown";
}

/* ---- FLOATING-POINT ENVIRONMENT ---------------------------------------------------------------------------------- */

/* The FP environment of a call is the IEEE default (nearest even, gradual underflow, no traps); the caller's is put
   back. Flags that are raised stay raised where that costs nothing. */
typedef struct kopt_environment_ {
    uint32_t control; /* MXCSR, FPCR, FPSCR, ... */
    uint16_t x87;
    double power; /* PowerPC reads its FPSCR into a floating-point register */
} kopt_environment_;

#if (defined(KOPT_GNU_) || defined(__TINYC__)) && (defined(__x86_64__) || defined(__i386__))
#if defined(__SSE__) || (defined(__TINYC__) && defined(__x86_64__))
#define KOPT_USES_MXCSR_() 1
#elif defined(KOPT_X86_)
#define KOPT_USES_MXCSR_() (kopt_isa_current() != KOPT_ISA_SCALAR)
#else
#define KOPT_USES_MXCSR_() 0
#endif
#if defined(__i386__) || !defined(__SSE2_MATH__)
#define KOPT_USES_X87_() 1
#else
#define KOPT_USES_X87_() 0
#endif
#ifdef __TINYC__ /* it does not know the names */
#define KOPT_STMXCSR_(x) __asm__ __volatile__(".byte 0x0F, 0xAE, 0x18" : : "a"(&(x)) : "memory")
#define KOPT_LDMXCSR_(x) __asm__ __volatile__(".byte 0x0F, 0xAE, 0x10" : : "a"(&(x)) : "memory")
#else
#define KOPT_STMXCSR_(x) __asm__ __volatile__("stmxcsr %0" : "=m"(x))
#define KOPT_LDMXCSR_(x) __asm__ __volatile__("ldmxcsr %0" : : "m"(x))
#endif
#endif

/* Compilers see through functions that are not inlined, too: with it no load moves up past kopt_enter_ and no store
   down past kopt_leave_. */
#if defined(KOPT_GNU_) && (KOPT_ONLY_ & KOPT_WITH_CHECKS)
#define KOPT_FENCE_() __asm__ __volatile__("" : : : "memory")
#else
#define KOPT_FENCE_() ((void)0)
#endif

static KOPT_NOINLINE_ void kopt_enter_(kopt_environment_ *e) {
#if !(KOPT_ONLY_ & KOPT_WITH_CHECKS)
    KOPT_CAST_(void, e);
#elif defined(KOPT_X86_) && !defined(KOPT_GNU_)
    e->control = _mm_getcsr();
    _mm_setcsr(0x1F80u);
#elif defined(KOPT_USES_X87_)
    const uint32_t sse = 0x1F80u;
    const uint16_t x87 = 0x027Fu; /* 53-bit precision: a double operation rounds once */
    if (KOPT_USES_MXCSR_()) {
        KOPT_STMXCSR_(e->control);
        KOPT_LDMXCSR_(sse);
    }
    if (KOPT_USES_X87_()) {
        __asm__ __volatile__("fnstcw %0" : "=m"(e->x87));
        __asm__ __volatile__("fldcw %0" : : "m"(x87));
    }
#elif defined(KOPT_GNU_) && defined(__aarch64__)
    uint64_t old;
    __asm__ __volatile__("mrs %0, fpcr" : "=r"(old));
    __asm__ __volatile__("msr fpcr, %0" : : "r"(KOPT_CAST_(uint64_t, 0)));
    e->control = KOPT_CAST_(uint32_t, old);
#elif defined(KOPT_GNU_) && defined(__arm__) && defined(__ARM_FP)
    __asm__ __volatile__("vmrs %0, fpscr" : "=r"(e->control));
#if defined(__ARM_ARCH_PROFILE) && \
    __ARM_ARCH_PROFILE == 'M' /* keeps the flags, and LTPSIZE, or loops of a Cortex-M55 fault */
    __asm__ __volatile__("vmsr fpscr, %0" : : "r"(e->control & 0xF807009Fu));
#else
    __asm__ __volatile__("vmsr fpscr, %0" : : "r"(e->control & 0xF800009Fu));
#endif
#elif defined(KOPT_GNU_) && defined(__riscv_flen)
    __asm__ __volatile__("fsrm %0, zero" : "=r"(e->control));
#elif defined(KOPT_GNU_) && defined(__s390x__)
    __asm__ __volatile__("efpc %0" : "=d"(e->control));
    __asm__ __volatile__("sfpc %0" : : "d"(e->control & 0x07FFFFF8u));
#elif defined(KOPT_GNU_) && defined(__mips_hard_float)
    __asm__ __volatile__("cfc1 %0, $31" : "=r"(e->control));
    __asm__ __volatile__("ctc1 %0, $31" : : "r"(e->control & 0xFEFFF07Cu));
#elif defined(KOPT_GNU_) && defined(__powerpc__) && !defined(_SOFT_FLOAT)
    __asm__ __volatile__("mffs %0\n\tmtfsfi 6, 0\n\tmtfsfi 7, 0" : "=d"(e->power));
#else
    KOPT_CAST_(void, e);
#endif
    KOPT_FENCE_();
}

static KOPT_NOINLINE_ void kopt_leave_(const kopt_environment_ *e) {
    KOPT_FENCE_();
#if !(KOPT_ONLY_ & KOPT_WITH_CHECKS)
    KOPT_CAST_(void, e);
#elif defined(KOPT_X86_) && !defined(KOPT_GNU_)
    _mm_setcsr(e->control);
#elif defined(KOPT_USES_X87_)
    if (KOPT_USES_MXCSR_()) KOPT_LDMXCSR_(e->control);
    if (KOPT_USES_X87_()) __asm__ __volatile__("fldcw %0" : : "m"(e->x87));
#elif defined(KOPT_GNU_) && defined(__aarch64__)
    __asm__ __volatile__("msr fpcr, %0" : : "r"(KOPT_CAST_(uint64_t, e->control)));
#elif defined(KOPT_GNU_) && defined(__arm__) && defined(__ARM_FP)
    __asm__ __volatile__("vmsr fpscr, %0" : : "r"(e->control));
#elif defined(KOPT_GNU_) && defined(__riscv_flen)
    __asm__ __volatile__("fsrm %0" : : "r"(e->control));
#elif defined(KOPT_GNU_) && defined(__s390x__)
    __asm__ __volatile__("sfpc %0" : : "d"(e->control));
#elif defined(KOPT_GNU_) && defined(__mips_hard_float)
    __asm__ __volatile__("ctc1 %0, $31" : : "r"(e->control));
#elif defined(KOPT_GNU_) && defined(__powerpc__) && !defined(_SOFT_FLOAT)
    __asm__ __volatile__("mtfsf 3, %0" : : "d"(e->power)); /* the fields of traps and rounding only */
#else
    KOPT_CAST_(void, e);
#endif
}

/* ---- 8-BIT MOMENTS IN SCALAR CODE -------------------------------------------------------------------------------- */

/* Section 6b. */

#define KOPT_BLOCK_ KOPT_CAST_(size_t, 256) /* elements that share a scale */
/* How many of them are on the stack where a part of a block will do, and how many ratios of StableAdamW are. */
#if defined(KOPT_X86_) || defined(KOPT_NEON_)
#define KOPT_PART_ KOPT_BLOCK_
#define KOPT_MEASURED_ KOPT_CAST_(size_t, 384)
#else
#define KOPT_PART_ KOPT_CAST_(size_t, 64)
#define KOPT_MEASURED_ KOPT_PART_
#endif

/* The number of a code of 8 bits; of a mean of squares its root. */
static KOPT_INLINED_ float kopt_number_of_(uint32_t code, float scale, int square) {
    float y = kopt_decode_q8_scalar_((code ^ 0x80u) - 0x80u, square);
    KOPT_OPAQUE_FLOAT_(y); /* or -Ofast sees 0 * NaN and makes it 0 */
    return kopt_mul_scalar_(y, scale);
}

/* The n numbers of one block as fp32 at any address; of mean squares the roots. */
static void kopt_dequantise_(kopt_byte_ *x, const kopt_byte_ *code, const kopt_byte_ *scale, size_t n, int square) {
    const float its_scale = kopt_as_f32_(kopt_load32_(scale));
    size_t i;
    for (i = 0; i < n; i++) kopt_store32_(x + 4 * i, kopt_as_u32_(kopt_number_of_(code[i], its_scale, square)));
}

/* The random numbers of one store, from element `first` on. */
typedef struct kopt_drawn_ {
    kopt_philox_key_scalar_ cipher;
    kopt_vu32_scalar_ words[4];
    uint64_t first;
    uint32_t store;
} kopt_drawn_;

static void kopt_drawn_of_(kopt_drawn_ *d, uint64_t seed, uint32_t step, uint32_t id, uint32_t stream) {
    d->cipher = kopt_make_philox_key_scalar_(seed, step, id, stream);
    d->store = 0;
}

/* That of element first + i. Each i from 0 on, or none is left out. */
static KOPT_FORCE_INLINE_ uint32_t kopt_draw16_(kopt_drawn_ *d, size_t i) {
    const uint32_t r = kopt_random_at_scalar_(d->words, &d->cipher, KOPT_INDEX_(d->first + i), i == 0);
    return KOPT_RANDOM_STORE(r, d->store);
}

/* The codes of the n numbers of one block, of mean squares their roots; drawn may be NULL: nearest. */
static void kopt_encode_(kopt_byte_ *code, uint32_t scale, const kopt_byte_ *x, size_t n, int square,
                         kopt_drawn_ *drawn) {
    const float inverse = kopt_codes_are_zero_(scale) ? 0 : kopt_inverse_scale_q8_scalar_(scale, square);
    size_t i;
    for (i = 0; i < n; i++) {
        const uint32_t r = drawn == KOPT_NULL_ ? 0x8000u : kopt_draw16_(drawn, i);
        const float y = kopt_mul_scalar_(kopt_as_f32_(kopt_load32_(x + 4 * i)), inverse);
        kopt_byte_ *to = code + i;
        KOPT_OPAQUE_(to); /* or this becomes a call of memset where the scale is 0 */
        *to = kopt_codes_are_zero_(scale) ? 0 : KOPT_CAST_(kopt_byte_, kopt_encode_q8_scalar_scalar_(y, square, r));
    }
}

static void kopt_quantise_(kopt_byte_ *code, kopt_byte_ *scale, const kopt_byte_ *x, size_t n, int square,
                           kopt_drawn_ *drawn) {
    uint32_t largest = 0;
    size_t i;
    for (i = 0; i < n; i++) {
        const uint32_t mag = kopt_load32_(x + 4 * i) & 0x7FFFFFFFu;
        if (mag > largest) largest = mag;
    }
    largest = kopt_scale_q8_(largest, square);
    kopt_store32_(scale, largest);
    kopt_encode_(code, largest, x, n, square, drawn);
}

/* ---- PUBLIC FUNCTIONS -------------------------------------------------------------------------------------------- */

/* Each checks its arguments, then runs. */

KOPT_API_ uint32_t kopt_random(kopt_random_key key, uint32_t stream, uint64_t i) {
    return kopt_random_scalar_(key.seed, key.step, key.id, stream, key.first_index + i);
}

/* ---- constructors ---- */

/* What the constructors set made_ to. */
#define KOPT_MADE_ 0x4D414445u

/* Not inline: of a struct that is copied, gcc -O2 makes a call of memcpy. */
static KOPT_NOINLINE_ kopt_optimizer kopt_start_(kopt_rule rule, double lr, kopt_decay_mode decay,
                                                 double weight_decay) {
    const int checks = KOPT_HAS_(KOPT_WITH_CHECKS);
    kopt_optimizer opt;
    opt.rule = rule;
    opt.weight_format = KOPT_BF16;
    opt.rounding = KOPT_KAHAN;
    opt.moment_format = KOPT_BF16;
    opt.moment_rounding = KOPT_STOCHASTIC;
    opt.compensation_rounding = KOPT_STOCHASTIC;
    opt.decay_mode = decay;
    opt.maximize = 0;
    opt.zero_grad = 0;
    opt.lr = lr;
    opt.weight_decay = weight_decay;
    opt.amsgrad = 0;
    opt.stable = 0;
    opt.moments_only = 0;
    opt.beta1 = 0.9;
    opt.beta2 = 0.999;
    opt.eps = 1e-8;
    opt.momentum = 0;
    opt.grad_scale = 1;
    opt.clip = 1;
    opt.seed = 0;
    opt.step = 0;
    opt.made_ = KOPT_MADE_;
    /* the smallest builds leave alone what they do not read */
    if (checks || KOPT_HAS_(KOPT_WITH_FULLY_DECOUPLED)) opt.max_lr = lr;
    if (checks || KOPT_HAS_(KOPT_WITH_ADAN)) opt.beta3 = 0.99;
    if (checks || KOPT_HAS_(KOPT_WITH_MOMENTUM)) {
        opt.dampening = 0;
        opt.nesterov = 0;
    }
    if (checks || KOPT_HAS_(KOPT_WITH_RANGER)) {
        opt.lookahead = 6;
        opt.lookahead_rate = 0.5;
    }
    if (checks || KOPT_VMATH_HERE_) {
        opt.atan2_a = 1.27;
        opt.atan2_b = 1;
        opt.atan2_outside = 0;
        opt.sharpness = 0;
        opt.vmath = KOPT_NULL_;
    }
    return opt;
}

/* Without checks the constructor of what is left out does not link. */
#ifdef KAHAN_OPT_STATIC /* a function that is declared static has to be defined */
#define KOPT_LINKED_(what) 1
#else
#define KOPT_LINKED_(what) (KOPT_ONLY_ & (KOPT_WITH_CHECKS | (what)))
#endif

#if KOPT_LINKED_(KOPT_WITH_SGD)
KOPT_API_ kopt_optimizer kopt_sgd(double lr, double momentum) {
    kopt_optimizer opt = kopt_start_(KOPT_SGD, lr, KOPT_L2, 0);
    opt.momentum = momentum;
    return opt;
}
#endif

#if KOPT_LINKED_(KOPT_WITH_ADAM)
KOPT_API_ kopt_optimizer kopt_adam(double lr) { return kopt_start_(KOPT_ADAM, lr, KOPT_L2, 0); }

KOPT_API_ kopt_optimizer kopt_adamw(double lr) { return kopt_start_(KOPT_ADAM, lr, KOPT_DECOUPLED, 0.01); }
#endif

#if KOPT_LINKED_(KOPT_WITH_EXTRAS)
KOPT_API_ kopt_optimizer kopt_stable_adamw(double lr) {
    kopt_optimizer opt = kopt_start_(KOPT_ADAM, lr, KOPT_DECOUPLED, 0.01);
    opt.stable = 1;
    opt.beta2 = 0.99;
    opt.eps = 1e-6;
    return opt;
}
#endif

#if KOPT_LINKED_(KOPT_WITH_LION)
KOPT_API_ kopt_optimizer kopt_lion(double lr) {
    kopt_optimizer opt = kopt_start_(KOPT_LION, lr, KOPT_DECOUPLED, 0);
    opt.beta2 = 0.99;
    return opt;
}
#endif

#if KOPT_LINKED_(KOPT_WITH_ADAN)
KOPT_API_ kopt_optimizer kopt_adan(double lr) {
    kopt_optimizer opt = kopt_start_(KOPT_ADAN, lr, KOPT_DECOUPLED, 0.02);
    opt.beta1 = 0.98;
    opt.beta2 = 0.92;
    opt.eps = 1e-6;
    return opt;
}
#endif

#if KOPT_LINKED_(KOPT_WITH_RADAM)
KOPT_API_ kopt_optimizer kopt_radam(double lr) { return kopt_start_(KOPT_RADAM, lr, KOPT_L2, 0); }
#endif

#if KOPT_LINKED_(KOPT_WITH_RANGER)
KOPT_API_ kopt_optimizer kopt_ranger(double lr) {
    kopt_optimizer opt = kopt_start_(KOPT_RANGER, lr, KOPT_DECOUPLED, 0);
    opt.beta2 = 0.99;
    opt.eps = 1e-6;
    return opt;
}
#endif

#ifdef KAHAN_OPT_VMATH
#if KOPT_LINKED_(KOPT_WITH_ADAM)
KOPT_API_ kopt_optimizer kopt_adam_atan2(double lr) {
    kopt_optimizer opt = kopt_start_(KOPT_ADAM_ATAN2, lr, KOPT_DECOUPLED, 0);
    opt.beta2 = 0.99;
    return opt;
}
#endif

#if KOPT_LINKED_(KOPT_WITH_LION)
KOPT_API_ kopt_optimizer kopt_smooth_lion(double lr, double sharpness) {
    kopt_optimizer opt = kopt_lion(lr);
    opt.sharpness = sharpness;
    return opt;
}
#endif
#endif

#if KOPT_LINKED_(KOPT_WITH_EMA)
KOPT_API_ kopt_optimizer kopt_ema(double decay) {
    kopt_environment_ environment;
    double rate;
    kopt_enter_(&environment);
    rate = kopt_to_double_(kopt_sub64_(kopt_to_f64_(1), kopt_to_f64_(decay)));
    kopt_leave_(&environment);
    return kopt_start_(KOPT_EMA, rate, KOPT_L2, 0);
}
#endif

KOPT_API_ kopt_tensor kopt_tensor_of(void *weight, void *grad, kopt_format grad_format, size_t n, void *state,
                                     size_t state_size) {
    kopt_tensor t;
    t.weight = weight;
    t.grad = grad;
    t.grad_format = grad_format;
    t.n = n;
    t.state = state;
    t.state_size = state_size;
    t.copy = KOPT_NULL_;
    t.copy_format = KOPT_F32;
    t.id = 0;
    t.first_index = 0;
    t.rate_scale = 1;
    if (KOPT_HAS_(KOPT_WITH_EXTRAS)) t.stable_scale = 0;
    t.counts = KOPT_NULL_;
    return t;
}

KOPT_API_ kopt_result kopt_number_tensors(kopt_tensor *tensors, size_t count, uint32_t first_id) {
    size_t i;
    if (tensors == KOPT_NULL_ && count != 0) return KOPT_ERROR_NULL;
    if (count != 0 && count - 1 > 0xFFFFFFFFu - first_id) return KOPT_ERROR_BOUNDS;
    for (i = 0; i < count; i++) tensors[i].id = first_id + KOPT_CAST_(uint32_t, i);
    return KOPT_OK;
}

/* 0 is the default. By words: a caller's DAZ takes a subnormal for 0. */
static KOPT_HOST_DEVICE_ float kopt_rate_scale_(const kopt_tensor *t) {
    const uint32_t bits = kopt_as_u32_(t->rate_scale);
    return kopt_as_f32_(bits == 0 ? 0x3F800000u : bits);
}

/* ---- checks of an optimizer ---- */

static int kopt_format_valid_(kopt_format f) { return KOPT_CAST_(unsigned, f) <= KOPT_CAST_(unsigned, KOPT_FP16); }

KOPT_SMALL_FN_ KOPT_HOST_DEVICE_ int kopt_moments_(const kopt_optimizer *opt) {
    switch (KOPT_CAST_(int, KOPT_RULE_(opt->rule))) {
    case KOPT_SGD: return KOPT_HAS_(KOPT_WITH_MOMENTUM) && kopt_less_(0, opt->momentum);
    case KOPT_ADAM: return KOPT_HAS_(KOPT_WITH_EXTRAS) && opt->amsgrad ? 3 : 2;
    case KOPT_LION: return 1;
    case KOPT_ADAN: return 4;
#ifdef KAHAN_OPT_VMATH
    case KOPT_ADAM_ATAN2:
#endif
    case KOPT_RADAM:
    case KOPT_RANGER: return 2;
    default: return 0;
    }
}

static int kopt_in_(uint32_t set, int value) { return value >= 0 && value < 16 && (set >> value & 1u) != 0; }

/* Does this build have all that opt uses? */
static int kopt_built_in_(const kopt_optimizer *opt) {
#if KOPT_ONLY_ == KOPT_WITH_ALL
    KOPT_CAST_(void, opt);
    return 1;
#else
    const kopt_rule rule = KOPT_RULE_(opt->rule); /* each of these is the option, or one that is here */
    const kopt_format weight = KOPT_FORMAT_(opt->weight_format), moment = KOPT_MOMENT_FORMAT_(opt->moment_format);
    const kopt_rounding rounding = KOPT_ROUNDING_(opt->rounding);
    const int half = weight != KOPT_F32, compensated = rounding == KOPT_KAHAN || rounding == KOPT_COMPACT;
    if (opt->rule != rule || opt->weight_format != weight || (half && opt->rounding != rounding)) return 0;
    if (half && compensated && opt->compensation_rounding != KOPT_STATE_ROUNDING_(opt->compensation_rounding)) return 0;
    if (rule == KOPT_SGD && !KOPT_HAS_(KOPT_WITH_MOMENTUM) && kopt_bits64_(opt->momentum) << 1 != 0) return 0;
    if (kopt_moments_(opt) > 0) {
        if (opt->moment_format != moment) return 0;
        if (moment != KOPT_F32 && opt->moment_rounding != KOPT_STATE_ROUNDING_(opt->moment_rounding)) return 0;
    }
#ifdef KAHAN_OPT_VMATH
    if (opt->rule == KOPT_LION && kopt_less_(0, opt->sharpness) &&
        (KOPT_ONLY_ & KOPT_SECOND_PASS_) != KOPT_SECOND_PASS_)
        return 0;
#endif
    if (kopt_bits64_(opt->weight_decay) << 1 != 0 && opt->decay_mode != KOPT_DECAY_(opt->decay_mode)) return 0;
    if (KOPT_HAS_(KOPT_WITH_EXTRAS)) return 1;
    return (opt->maximize | opt->zero_grad | opt->moments_only | opt->amsgrad | opt->stable) == 0 &&
           kopt_bits64_(opt->clip) == KOPT_CAST_(uint64_t, 0x3FF00000u) << 32; /* 1 */
#endif
}

static kopt_result kopt_check_options_(const kopt_optimizer *opt) {
    const double most = 3e38; /* what still is a finite float */
    if (!KOPT_HAS_(KOPT_WITH_CHECKS | KOPT_WITH_GUARDS)) return KOPT_OK;
    if (KOPT_HAS_(KOPT_WITH_CHECKS) && opt == KOPT_NULL_) return KOPT_ERROR_NULL;
    if (opt->made_ != KOPT_MADE_) return KOPT_ERROR_UNINITIALIZED;
    if (!KOPT_HAS_(KOPT_WITH_CHECKS)) return kopt_built_in_(opt) ? KOPT_OK : KOPT_ERROR_OPTION;
    if (KOPT_CAST_(unsigned, opt->rule) > KOPT_CAST_(unsigned, KOPT_LAST_RULE_)) return KOPT_ERROR_OPTION;
    if (!kopt_format_valid_(opt->weight_format)) return KOPT_ERROR_OPTION;
    if (!kopt_format_valid_(opt->moment_format) && opt->moment_format != KOPT_Q8) return KOPT_ERROR_OPTION;
    if (KOPT_CAST_(unsigned, opt->rounding) > KOPT_CAST_(unsigned, KOPT_EXACT)) return KOPT_ERROR_OPTION;
    if ((KOPT_CAST_(unsigned, opt->moment_rounding) | KOPT_CAST_(unsigned, opt->compensation_rounding)) > 1u)
        return KOPT_ERROR_OPTION;
    if (KOPT_CAST_(unsigned, opt->decay_mode) > KOPT_CAST_(unsigned, KOPT_FULLY_DECOUPLED)) return KOPT_ERROR_OPTION;
    if (!kopt_built_in_(opt)) return KOPT_ERROR_OPTION;
    if (!kopt_from_0_to_(opt->lr, most) || !kopt_from_0_to_(opt->weight_decay, most)) return KOPT_ERROR_RANGE;
    if (!kopt_magnitude_at_most_(opt->grad_scale, most) || !kopt_magnitude_at_most_(opt->clip, most)) return KOPT_ERROR_RANGE;
    if (opt->decay_mode == KOPT_FULLY_DECOUPLED && (!kopt_from_0_to_(opt->max_lr, most) || kopt_is_zero_(opt->max_lr)))
        return KOPT_ERROR_RANGE;
    if (opt->rule == KOPT_EMA) {
        if (!kopt_from_0_to_(opt->lr, 1)) return KOPT_ERROR_RANGE;
        if (!kopt_is_zero_(opt->weight_decay) || opt->moments_only || opt->zero_grad || opt->maximize)
            return KOPT_ERROR_OPTION;
    } else if (opt->rule != KOPT_SGD) {
        if (!kopt_from_0_below_1_(opt->beta1) || !kopt_from_0_below_1_(opt->beta2)) return KOPT_ERROR_RANGE;
        if (opt->rule == KOPT_ADAN && !kopt_from_0_below_1_(opt->beta3)) return KOPT_ERROR_RANGE;
        if (opt->rule != KOPT_LION && opt->rule != KOPT_ADAM_ATAN2 && !kopt_normal_at_most_(opt->eps, most))
            return KOPT_ERROR_RANGE;
#ifdef KAHAN_OPT_VMATH
        if (opt->rule == KOPT_ADAM_ATAN2) {
            if (!kopt_from_0_to_(opt->atan2_a, most) || !kopt_normal_at_most_(opt->atan2_b, most)) return KOPT_ERROR_RANGE;
            if (opt->amsgrad || opt->stable) return KOPT_ERROR_OPTION;
        }
        if (opt->rule == KOPT_LION && !kopt_from_0_to_(opt->sharpness, most)) return KOPT_ERROR_RANGE;
#else
        if (opt->rule == KOPT_LION && !kopt_is_zero_(opt->sharpness)) return KOPT_ERROR_OPTION;
#endif
        if (opt->rule == KOPT_RANGER && (opt->lookahead < 1 || !kopt_from_0_to_(opt->lookahead_rate, 1)))
            return KOPT_ERROR_RANGE;
    } else {
        if (!kopt_from_0_to_(opt->momentum, most)) return KOPT_ERROR_RANGE;
        if (!kopt_magnitude_at_most_(opt->dampening, most)) return KOPT_ERROR_RANGE;
        if (opt->nesterov && (kopt_is_zero_(opt->momentum) || !kopt_is_zero_(opt->dampening))) return KOPT_ERROR_OPTION;
    }
    return KOPT_OK;
}

/* ---- layout of a state block ---- */

/* What is kept of each weight: the part of an optimizer that decides what a state block looks like. */
typedef struct kopt_kept_ {
    kopt_rule rule;
    kopt_format weight, moment;
    kopt_rounding rounding;
    int moment_count;
} kopt_kept_;

/* Where the arrays of a state block begin, in bytes from its start; total is 0 if there is nothing to keep. */
typedef struct kopt_layout_ {
    size_t residual, moment[4], scale, slow, slow_residual, total; /* scale: from a moment of 8 bits to its scales */
} kopt_layout_;

KOPT_SMALL_FN_ kopt_kept_ kopt_kept_of_(const kopt_optimizer *opt) {
    kopt_kept_ kept;
    kept.rule = KOPT_RULE_(opt->rule);
    kept.weight = KOPT_FORMAT_(opt->weight_format);
    kept.moment = KOPT_MOMENT_FORMAT_(opt->moment_format);
    kept.rounding = kept.weight == KOPT_F32 ? KOPT_NEAREST : KOPT_ROUNDING_(opt->rounding);
    kept.moment_count = kopt_moments_(opt);
    if (KOPT_HAS_(KOPT_WITH_CHECKS) && kept.moment_count == 0) kept.moment = opt->moment_format; /* unused: as it is */
    return kept;
}

KOPT_SMALL_FN_ kopt_kept_ kopt_kept_in_(const kopt_step *s) {
    kopt_kept_ kept;
    kept.rule = KOPT_RULE_(s->rule);
    kept.weight = KOPT_FORMAT_(s->weight_format);
    kept.moment = KOPT_MOMENT_FORMAT_(s->moment_format);
    kept.rounding = kept.weight == KOPT_F32 ? KOPT_NEAREST : KOPT_ROUNDING_(s->rounding);
    kept.moment_count = kopt_moments_here_(kept.rule, s->moment_count);
    if (KOPT_HAS_(KOPT_WITH_CHECKS) && kept.moment_count == 0) kept.moment = s->moment_format;
    if (!KOPT_HAS_(KOPT_WITH_CHECKS | KOPT_WITH_EXTRAS | KOPT_WITH_RANGER | KOPT_WITH_ADAN | KOPT_WITH_Q8))
        kept.moment_count =
            2; /* the place of a moment does not depend on it, and a rule leaves alone those that it lacks */
    return kept;
}

static KOPT_HOST_DEVICE_ size_t kopt_blocks_(size_t n) { return n / KOPT_BLOCK_ + (n % KOPT_BLOCK_ != 0); }
KOPT_SMALL_FN_ size_t kopt_words_(size_t bytes) { return (bytes + 3) & ~KOPT_CAST_(size_t, 3); }

KOPT_SMALL_FN_ void kopt_lay_out_(kopt_layout_ *at, const kopt_kept_ *kept, size_t n) {
    const size_t residual_size = kopt_bytes_of_residual_(kept->weight, kept->rounding);
    const size_t residual = kopt_words_(n * residual_size);
    const size_t moment = kopt_words_(n * kopt_bytes_of_(kept->moment));
    const size_t slow = kept->rule == KOPT_RANGER ? kopt_words_(n * kopt_bytes_of_(kept->weight)) : 0;
    const size_t stride = moment + (kept->moment == KOPT_Q8 ? 4 * kopt_blocks_(n) : 0);
    at->residual = KOPT_HEADER_;
    at->moment[0] = at->residual + residual; /* no loop, so that a compiler sees through it */
    at->moment[1] = at->moment[0] + (kept->moment_count > 0 ? stride : 0);
    at->moment[2] = at->moment[1] + (kept->moment_count > 1 ? stride : 0);
    at->moment[3] = at->moment[2] + (kept->moment_count > 2 ? stride : 0);
    at->total = at->slow = at->moment[3] + (kept->moment_count > 3 ? stride : 0);
    at->scale = moment;
    at->slow_residual = at->slow + slow;
    if (slow != 0) at->total = at->slow_residual + residual;
    if ((residual_size == 0 && kept->moment_count == 0) || (KOPT_HAS_(KOPT_WITH_CHECKS) && n == 0)) at->total = 0;
}

KOPT_SMALL_FN_ kopt_layout_ kopt_layout_for_(const kopt_optimizer *opt, size_t n) {
    const kopt_kept_ kept = kopt_kept_of_(opt);
    kopt_layout_ at;
    kopt_lay_out_(&at, &kept, n);
    return at;
}

/* Of a step. */
KOPT_SMALL_FN_ void kopt_lay_out_step_(kopt_layout_ *at, const kopt_step *s, size_t n) {
    const kopt_kept_ kept = kopt_kept_in_(s);
    kopt_lay_out_(at, &kept, n);
}

static int kopt_n_valid_(size_t n) { return n <= (~KOPT_CAST_(size_t, 0) - 256) / 32; }

KOPT_API_ size_t kopt_state_size(const kopt_optimizer *opt, size_t n) {
    if (kopt_check_options_(opt) != KOPT_OK || !kopt_n_valid_(n)) return 0;
    return kopt_layout_for_(opt, n).total;
}

/* The header of a state block, little-endian:
     0 "KOPT"     4 version 2    5 rule       6 weight format
     7 rounding + 16 * moment_rounding + 32 * compensation_rounding           8 moment format
     9 moments + 8 * nesterov + 16 * decay mode + 64 * stable + 128 * atan2_outside
    10 sealed    11 0           12 id (4)    16 n (8)     24 first_index (8)   32 seed (8)   40 step (4)
    44 CRC-32 of the whole block with this field 0     48 lr   52 weight_decay   56 beta1   60 beta2 (fp32)
   In version 1 bytes 7 and 9 have the rounding and the moments alone, and 48 to 63 are 0. What does not apply is 0.
   Then residual[n], the moments[n] in their order (8-bit: each followed by its scales) and, for Ranger, slow weights[n]
   and their residual[n], each array rounded up to 4 bytes: in the machine's byte order while the block is open, little-endian while it is sealed. */
static void kopt_put_(kopt_byte_ *p, uint64_t value, int bytes) {
    for (; bytes > 0; bytes--, value >>= 8) {
        uint32_t octet = KOPT_CAST_(uint32_t, value & 0xFFu);
        KOPT_OPAQUE_(octet); /* or zeros become a call of memset */
        *p++ = KOPT_CAST_(kopt_byte_, octet);
    }
}

/* Little-endian numbers at any address. */
#ifdef KOPT_VECTORS16_ /* little-endian machines */
KOPT_INLINE_ uint32_t kopt_little32_(const kopt_byte_ *p) { return kopt_load32_(p); }
KOPT_INLINE_ uint64_t kopt_little64_(const kopt_byte_ *p) { return *KOPT_CONST_POINTER_(const kopt_unaligned64_ *, p); }
#else
static uint32_t kopt_little32_(const kopt_byte_ *p) {
    return KOPT_CAST_(uint32_t, p[0]) | KOPT_CAST_(uint32_t, p[1]) << 8 | KOPT_CAST_(uint32_t, p[2]) << 16 |
           KOPT_CAST_(uint32_t, p[3]) << 24;
}

static uint64_t kopt_little64_(const kopt_byte_ *p) {
    return kopt_little32_(p) | KOPT_CAST_(uint64_t, kopt_little32_(p + 4)) << 32;
}
#endif

/* As fp32. */
static void kopt_put_number_(kopt_byte_ *p, double x) { kopt_put_(p, kopt_as_u32_(kopt_narrow64_(x)), 4); }
static double kopt_number_in_(const kopt_byte_ *p) {
    return kopt_to_double_(kopt_bits_to_f64_(kopt_float_to_bits64_(kopt_as_f32_(kopt_little32_(p)))));
}

/* Bytes 7 and 9. */
static void kopt_make_variant_(kopt_byte_ *rounding, kopt_byte_ *moments, const kopt_optimizer *opt) {
    const int kept = kopt_moments_(opt), adam = opt->rule == KOPT_ADAM;
    uint32_t a = 0, b = KOPT_CAST_(uint32_t, kept);
    if (opt->weight_format != KOPT_F32) a = KOPT_CAST_(uint32_t, opt->rounding);
    if (kept > 0 && opt->moment_format != KOPT_F32) a |= KOPT_CAST_(uint32_t, opt->moment_rounding) << 4;
    if ((a & 15u) == KOPT_KAHAN || (a & 15u) == KOPT_COMPACT)
        a |= KOPT_CAST_(uint32_t, opt->compensation_rounding) << 5;
    if (opt->rule == KOPT_SGD && opt->nesterov) b |= 8u;
    if (opt->rule != KOPT_EMA) b |= KOPT_CAST_(uint32_t, opt->decay_mode) << 4;
    if (adam && opt->stable) b |= 64u;
    if (opt->rule == KOPT_ADAM_ATAN2 && opt->atan2_outside) b |= 128u;
    *rounding = KOPT_CAST_(kopt_byte_, a);
    *moments = KOPT_CAST_(kopt_byte_, b);
}

/* Byte 8: of moments. 3 are codes of the dynamic map, which kopt_state_open() makes those of KOPT_Q8. */
static KOPT_FORCE_INLINE_ kopt_byte_ kopt_format_byte_(kopt_format format) {
    return KOPT_CAST_(kopt_byte_, format == KOPT_Q8 ? 4 : KOPT_CAST_(int, format));
}

static void kopt_make_header_(kopt_byte_ *h, const kopt_optimizer *opt, const kopt_tensor *t) {
    const int sgd = opt->rule == KOPT_SGD;
    kopt_environment_ environment;
    kopt_put_(h, 0x54504F4Bu, 4);
    h[4] = KOPT_BLOCK_VERSION_;
    h[5] = KOPT_CAST_(kopt_byte_, opt->rule);
    h[6] = KOPT_CAST_(kopt_byte_, opt->weight_format);
    kopt_make_variant_(h + 7, h + 9, opt);
    h[8] = kopt_format_byte_(opt->moment_format);
    h[10] = h[11] = 0;
    kopt_put_(h + 12, t->id, 4);
    kopt_put_(h + 16, t->n, 8);
    kopt_put_(h + 24, t->first_index, 8);
    kopt_put_(h + 32, opt->seed, 8);
    kopt_put_(h + 40, opt->step, 4);
    kopt_put_(h + 44, 0, 4);
    kopt_enter_(&environment);
    kopt_put_number_(h + 48, opt->lr);
    kopt_put_number_(h + 52, opt->weight_decay);
    kopt_put_number_(h + 56, sgd ? opt->momentum : opt->beta1);
    kopt_put_number_(h + 60, sgd ? opt->dampening : opt->beta2);
    kopt_leave_(&environment);
}

/* Is it a header? A block of version 1 is read while it is sealed: kopt_state_open() makes it one of today. */
static KOPT_FORCE_INLINE_ int kopt_header_valid_(const kopt_byte_ *h) {
    return kopt_little32_(h) == 0x54504F4Bu && (h[4] == KOPT_BLOCK_VERSION_ || (h[4] == 1 && h[10] == 1)) &&
           h[10] <= 1 && h[11] == 0;
}

static KOPT_FORCE_INLINE_ kopt_result kopt_check_header_(const kopt_byte_ *h, const kopt_kept_ *kept,
                                                         const kopt_tensor *t, int sealed) {
    if (!KOPT_HAS_(KOPT_WITH_CHECKS)) return KOPT_OK;
    if (!kopt_header_valid_(h)) return KOPT_ERROR_STATE;
    if (h[5] != KOPT_CAST_(kopt_byte_, kept->rule)) return KOPT_ERROR_MISMATCH;
    if (h[6] != KOPT_CAST_(kopt_byte_, kept->weight)) return KOPT_ERROR_MISMATCH;
    if ((h[7] & 0xCFu) != KOPT_CAST_(kopt_byte_, kept->rounding)) return KOPT_ERROR_MISMATCH;
    if (h[8] != kopt_format_byte_(kept->moment) && !(sealed && h[8] == 3 && kept->moment == KOPT_Q8))
        return KOPT_ERROR_MISMATCH;
    if ((h[9] & 7u) != KOPT_CAST_(kopt_byte_, kept->moment_count)) return KOPT_ERROR_MISMATCH;
    if (kopt_little32_(h + 12) != t->id || kopt_little64_(h + 16) != t->n) return KOPT_ERROR_MISMATCH;
    if (kopt_little64_(h + 24) != t->first_index) return KOPT_ERROR_MISMATCH;
    if (sealed != h[10]) return sealed ? KOPT_ERROR_STATE : KOPT_ERROR_SEALED;
    return KOPT_OK;
}

/* The block, before anything that follows from it: an optimizer of other formats would see a block of another size. */
static kopt_result kopt_check_block_(const kopt_tensor *t, const kopt_kept_ *kept, size_t total, int sealed) {
    if (!KOPT_HAS_(KOPT_WITH_CHECKS) || t->n == 0 || total == 0) return KOPT_OK;
    if (t->state == KOPT_NULL_) return KOPT_ERROR_NULL;
    if (t->state_size < KOPT_HEADER_) return KOPT_ERROR_SIZE;
    return kopt_check_header_(KOPT_CAST_(const kopt_byte_ *, t->state), kept, t, sealed);
}

/* ---- checks of memory ---- */

static int kopt_overlap_(const void *a, size_t a_size, const void *b, size_t b_size) {
    const uintptr_t x = KOPT_ADDRESS_(a), y = KOPT_ADDRESS_(b);
    if (a == KOPT_NULL_ || b == KOPT_NULL_ || a_size == 0 || b_size == 0) return 0;
    return x < y ? y - x < a_size : x - y < b_size;
}

/* The memory of a tensor, as far as there is some. */
typedef enum kopt_memory_ { KOPT_WEIGHTS_, KOPT_STATE_, KOPT_COPY_, KOPT_GRADS_, KOPT_COUNTS_ } kopt_memory_;
enum { KOPT_SPANS_ = 5 };
typedef struct kopt_span_ {
    const void *at;
    size_t size;
    kopt_memory_ what;
} kopt_span_;

static KOPT_FORCE_INLINE_ kopt_span_ *kopt_add_span_(kopt_span_ *to, const void *at, size_t size, kopt_memory_ what) {
    if (at == KOPT_NULL_ || size == 0) return to;
    to->at = at;
    to->size = size;
    to->what = what;
    return to + 1;
}

/* Returns their end. */
static kopt_span_ *kopt_spans_(kopt_span_ *to, const kopt_tensor *t, size_t weight_bytes, size_t state_bytes) {
    if (t->n != 0) {
        to = kopt_add_span_(to, t->weight, t->n * weight_bytes, KOPT_WEIGHTS_);
        to = kopt_add_span_(to, t->state, state_bytes, KOPT_STATE_);
        to = kopt_add_span_(to, t->grad, t->n * kopt_bytes_of_(t->grad_format), KOPT_GRADS_);
        to = kopt_add_span_(to, t->copy, t->n * kopt_bytes_of_(t->copy_format), KOPT_COPY_);
    }
    return kopt_add_span_(to, t->counts, sizeof *t->counts, KOPT_COUNTS_);
}

static KOPT_FORCE_INLINE_ int kopt_meet_(const kopt_span_ *a, const kopt_span_ *b) {
    const uintptr_t x = KOPT_ADDRESS_(a->at), y = KOPT_ADDRESS_(b->at);
    return x < y ? y - x < a->size : x - y < b->size;
}

/* All pointers that are needed are there, the block is large enough, and nothing overlaps. */
static kopt_result kopt_check_memory_(const kopt_tensor *t, size_t weight_bytes, size_t state_bytes, int needs_grad) {
    kopt_span_ span[KOPT_SPANS_], *a, *b, *end;
    if (!KOPT_HAS_(KOPT_WITH_CHECKS))
        return KOPT_HAS_(KOPT_WITH_GUARDS) && t->state_size < state_bytes ? KOPT_ERROR_SIZE : KOPT_OK;
    if (t->n == 0) return KOPT_OK;
    if (t->weight == KOPT_NULL_ || (needs_grad && t->grad == KOPT_NULL_)) return KOPT_ERROR_NULL;
    if (state_bytes != 0 && t->state == KOPT_NULL_) return KOPT_ERROR_NULL;
    if (t->state_size < state_bytes) return KOPT_ERROR_SIZE;
    end = kopt_spans_(span, t, weight_bytes, state_bytes);
    for (a = span; a != end; a++)
        for (b = span; b != a; b++)
            if (kopt_meet_(a, b) && (needs_grad || (a->what != KOPT_GRADS_ && b->what != KOPT_GRADS_)))
                return KOPT_ERROR_OVERLAP;
    return KOPT_OK;
}

static kopt_result kopt_check_tensor_(const kopt_tensor *t) {
    const int checks = KOPT_HAS_(KOPT_WITH_CHECKS);
    if (!KOPT_HAS_(KOPT_WITH_CHECKS | KOPT_WITH_GUARDS)) return KOPT_OK;
    if (checks && t == KOPT_NULL_) return KOPT_ERROR_NULL;
    if (checks && !kopt_format_valid_(t->grad_format)) return KOPT_ERROR_OPTION;
    if (checks && t->copy != KOPT_NULL_ && !kopt_format_valid_(t->copy_format)) return KOPT_ERROR_OPTION;
    if (!kopt_in_(KOPT_FORMATS_, KOPT_CAST_(int, t->grad_format))) return KOPT_ERROR_OPTION;
    if (t->copy != KOPT_NULL_ && !kopt_in_(KOPT_FORMATS_, KOPT_CAST_(int, t->copy_format))) return KOPT_ERROR_OPTION;
    if (!KOPT_HAS_(KOPT_WITH_EXTRAS) &&
        (t->copy != KOPT_NULL_ || t->counts != KOPT_NULL_ || t->first_index != 0 ||
         (kopt_as_u32_(t->rate_scale) != 0 && kopt_as_u32_(t->rate_scale) != 0x3F800000u)))
        return KOPT_ERROR_OPTION;
    if (!checks) return KOPT_OK;
    if (!kopt_n_valid_(t->n) || t->first_index >> 63 != 0) return KOPT_ERROR_BOUNDS;
    if (kopt_as_u32_(t->rate_scale) > 0x7F7FFFFFu || kopt_as_u32_(t->stable_scale) > 0x7F7FFFFFu)
        return KOPT_ERROR_RANGE; /* negative, infinite or NaN */
    return KOPT_OK;
}

/* opt, t and its block fit together, and the block is sealed or not. */
static kopt_result kopt_check_state_(const kopt_optimizer *opt, const kopt_tensor *t, int sealed) {
    kopt_result result = kopt_check_options_(opt);
    kopt_layout_ at;
    kopt_kept_ kept;
    if (result == KOPT_OK) result = kopt_check_tensor_(t);
    if (result != KOPT_OK) return result;
    kept = kopt_kept_of_(opt);
    kopt_lay_out_(&at, &kept, t->n);
    result = kopt_check_block_(t, &kept, at.total, sealed);
    if (result != KOPT_OK) return result;
    return kopt_check_memory_(t, kopt_bytes_of_(opt->weight_format), at.total, 0);
}

/* ---- state: init, read and write ---- */

/* One weight and its residual from an fp32 value, rounded to nearest. */
static void kopt_write_weight_(const kopt_optimizer *opt, kopt_byte_ *weight, kopt_byte_ *residual, uint32_t bits) {
    const kopt_format format = KOPT_FORMAT_(opt->weight_format);
    const kopt_rounding rounding = KOPT_ROUNDING_(opt->rounding);
    const uint32_t infinity = format == KOPT_BF16 ? 0x7F80u : 0x7C00u;
    const float x = kopt_as_f32_(bits);
    uint32_t u, kept;
    if (format == KOPT_F32) {
        kopt_store32_(weight, bits); /* not x: an x87 register would quiet a NaN */
    } else if (rounding == KOPT_EXACT || rounding == KOPT_COMPACT) {
        u = kopt_extended_scalar_(x, format, KOPT_NULL_);
        if (rounding == KOPT_COMPACT) u = (u + 0x80u) & 0xFFFFFF00u;
        kept = rounding == KOPT_COMPACT ? u >> 8 & 0xFFu : u & 0xFFFFu;
        u = (u + 0x8000u) >> 16;
        if ((u & infinity) == infinity) kept = 0;
        kopt_store16_(weight, u);
        if (rounding == KOPT_COMPACT)
            *residual = KOPT_CAST_(kopt_byte_, kept);
        else
            kopt_store16_(residual, kept);
    } else {
        u = rounding == KOPT_KAHAN ? kopt_round_kahan16_scalar_(x, format) : kopt_round_nearest16_scalar_(x, format);
        kopt_store16_(weight, u);
        if (rounding == KOPT_KAHAN) {
            float rest = kopt_sub_(x, kopt_widen_scalar_(u, format));
            if (format == KOPT_FP16) rest *= 2048;
            kopt_store16_(residual, (u & infinity) == infinity ? 0 : kopt_round_nearest16_scalar_(rest, format));
        }
    }
}

static float kopt_read_weight_(const kopt_optimizer *opt, const kopt_byte_ *weight, const kopt_byte_ *residual) {
    const kopt_format format = opt->weight_format;
    float rest;
    if (format == KOPT_F32) return kopt_as_f32_(kopt_load32_(weight));
    if (opt->rounding == KOPT_EXACT)
        return kopt_from_extended_scalar_((kopt_load16_(weight) << 16) + ((kopt_load16_(residual) ^ 0x8000u) - 0x8000u),
                                          format);
    if (opt->rounding == KOPT_COMPACT)
        return kopt_from_extended_scalar_(
            (kopt_load16_(weight) << 16) + (((KOPT_CAST_(uint32_t, *residual) ^ 0x80u) - 0x80u) << 8), format);
    if (opt->rounding != KOPT_KAHAN) return kopt_widen_scalar_(kopt_load16_(weight), format);
    rest = kopt_widen_scalar_(kopt_load16_(residual), format);
    if (format == KOPT_FP16) rest *= 1.0f / 2048;
    return kopt_add_(kopt_widen_scalar_(kopt_load16_(weight), format), rest);
}

/* t->copy, if there is one, follows the weights. */
static void kopt_refresh_copy_(const kopt_optimizer *opt, const kopt_tensor *t) {
    if (KOPT_HAS_(KOPT_WITH_EXTRAS) && t->copy != KOPT_NULL_)
        kopt_convert(t->copy, t->copy_format, t->weight, opt->weight_format, t->n);
}

/* Ranger's slow weights start at the weights. */
static void kopt_start_slow_(const kopt_optimizer *opt, const kopt_tensor *t) {
    const kopt_layout_ at = kopt_layout_for_(opt, t->n);
    kopt_byte_ *state = KOPT_CAST_(kopt_byte_ *, t->state);
    if (KOPT_RULE_(opt->rule) != KOPT_RANGER) return;
    kopt_copy_noinline_(state + at.slow, KOPT_CAST_(const kopt_byte_ *, t->weight),
                        t->n * kopt_bytes_of_(opt->weight_format));
    kopt_copy_noinline_(state + at.slow_residual, state + at.residual,
                        t->n * kopt_bytes_of_residual_(opt->weight_format, opt->rounding));
}

KOPT_API_ kopt_result kopt_state_init(const kopt_optimizer *opt, const kopt_tensor *t, const float *weights) {
    kopt_result result = kopt_check_options_(opt);
    kopt_environment_ environment;
    kopt_layout_ at;
    kopt_byte_ *weight, *state;
    size_t i, weight_bytes, residual_bytes;
    if (result == KOPT_OK) result = kopt_check_tensor_(t);
    if (result != KOPT_OK) return result;
    at = kopt_layout_for_(opt, t->n);
    weight_bytes = kopt_bytes_of_(KOPT_FORMAT_(opt->weight_format));
    residual_bytes = kopt_bytes_of_residual_(KOPT_FORMAT_(opt->weight_format), KOPT_ROUNDING_(opt->rounding));
    result = kopt_check_memory_(t, weight_bytes, at.total, 0);
    if (result != KOPT_OK || (KOPT_HAS_(KOPT_WITH_CHECKS) && t->n == 0)) return result;
    if (KOPT_HAS_(KOPT_WITH_CHECKS) && (kopt_overlap_(weights, t->n * 4, t->weight, t->n * weight_bytes) ||
                                        kopt_overlap_(weights, t->n * 4, t->state, at.total) ||
                                        kopt_overlap_(weights, t->n * 4, t->counts, sizeof *t->counts)))
        return KOPT_ERROR_OVERLAP;
    if (KOPT_HAS_(KOPT_WITH_CHECKS) && !(weights == t->copy && t->copy_format == KOPT_F32) &&
        kopt_overlap_(weights, t->n * 4, t->copy, t->n * kopt_bytes_of_(t->copy_format)))
        return KOPT_ERROR_OVERLAP;
    weight = KOPT_CAST_(kopt_byte_ *, t->weight);
    state = KOPT_CAST_(kopt_byte_ *, t->state);
    if (KOPT_HAS_(KOPT_WITH_CHECKS | KOPT_WITH_GUARDS) && weights != KOPT_NULL_ && !KOPT_HAS_(KOPT_WITH_EXTRAS))
        return KOPT_ERROR_OPTION;
    if (at.total != 0) {
        if (KOPT_HAS_(KOPT_WITH_CHECKS)) kopt_make_header_(state, opt, t);
        for (i = KOPT_HAS_(KOPT_WITH_CHECKS) ? KOPT_HEADER_ : 0; i < at.total;
             i += 4) { /* every array is a multiple of 4 bytes */
            uint32_t zero = 0;
            KOPT_OPAQUE_(zero);
            kopt_store32_(state + i, zero);
        }
    }
    if (KOPT_HAS_(KOPT_WITH_EXTRAS) && weights != KOPT_NULL_) {
        kopt_enter_(&environment);
        for (i = 0; i < t->n; i++)
            kopt_write_weight_(opt, weight + i * weight_bytes,
                               residual_bytes == 0 ? KOPT_NULL_ : state + at.residual + i * residual_bytes,
                               kopt_load32_(KOPT_CONST_POINTER_(const kopt_byte_ *, weights + i)));
        kopt_leave_(&environment);
    }
    kopt_start_slow_(opt, t);
    kopt_refresh_copy_(opt, t);
    return KOPT_OK;
}

/* Is a stream kept as the roots of what it is? */
static int kopt_keeps_root_(const kopt_optimizer *opt, kopt_slot slot) {
    return (opt->moment_format == KOPT_FP16 || opt->moment_format == KOPT_Q8) && slot != KOPT_WEIGHT &&
           kopt_is_square_(opt->rule, KOPT_CAST_(int, slot) - 1);
}

/* values: an array of the caller; scales: it has one for each block. */
static kopt_result kopt_check_slot_(const kopt_optimizer *opt, const kopt_tensor *t, kopt_slot slot, const void *values,
                                    size_t bytes, int scales) {
    kopt_result result = kopt_check_state_(opt, t, 0);
    kopt_span_ span[KOPT_SPANS_], *a, *end;
    size_t n;
    if (result != KOPT_OK) return result;
    if (KOPT_CAST_(unsigned, slot) > KOPT_CAST_(unsigned, kopt_moments_(opt))) return KOPT_ERROR_OPTION;
    if (t->n != 0 && values == KOPT_NULL_) return KOPT_ERROR_NULL;
    n = scales ? kopt_blocks_(t->n) : t->n;
    end = kopt_spans_(span, t, kopt_bytes_of_(opt->weight_format), kopt_layout_for_(opt, t->n).total);
    for (a = span; a != end; a++)
        if (a->what != KOPT_GRADS_ && kopt_overlap_(values, n * bytes, a->at, a->size)) return KOPT_ERROR_OVERLAP;
    return KOPT_OK;
}

KOPT_API_ kopt_result kopt_state_read(const kopt_optimizer *opt, const kopt_tensor *t, kopt_slot slot, float *out) {
    kopt_result result = kopt_check_slot_(opt, t, slot, out, 4, 0);
    kopt_environment_ environment;
    const kopt_byte_ *weight, *state, *moment;
    kopt_layout_ at;
    size_t i, weight_bytes, residual_bytes, moment_bytes;
    int rooted;
    if (result != KOPT_OK || t->n == 0) return result;
    rooted = kopt_keeps_root_(opt, slot);
    at = kopt_layout_for_(opt, t->n);
    weight = KOPT_CAST_(const kopt_byte_ *, t->weight);
    state = KOPT_CAST_(const kopt_byte_ *, t->state);
    weight_bytes = kopt_bytes_of_(opt->weight_format);
    residual_bytes = kopt_bytes_of_residual_(opt->weight_format, opt->rounding);
    moment_bytes = kopt_bytes_of_(opt->moment_format);
    kopt_enter_(&environment);
    for (i = 0; i < t->n; i++) {
        float x;
        if (slot == KOPT_WEIGHT) {
            x = kopt_read_weight_(opt, weight + i * weight_bytes,
                                  residual_bytes == 0 ? KOPT_NULL_ : state + at.residual + i * residual_bytes);
        } else if (KOPT_HAS_(KOPT_WITH_Q8) && opt->moment_format == KOPT_Q8) {
            moment = state + at.moment[slot - KOPT_FIRST_MOMENT];
            x = kopt_number_of_(moment[i], kopt_as_f32_(kopt_load32_(moment + at.scale + i / KOPT_BLOCK_ * 4)), rooted);
            if (rooted) x = kopt_mul_scalar_(x, x);
        } else {
            moment = state + at.moment[slot - KOPT_FIRST_MOMENT] + i * moment_bytes;
            x = kopt_widen_scalar_(moment_bytes == 4 ? kopt_load32_(moment) : kopt_load16_(moment), opt->moment_format);
            if (rooted) x = kopt_mul_scalar_(x, x);
        }
        kopt_store32_(KOPT_POINTER_(kopt_byte_ *, out) + 4 * i, kopt_as_u32_(x));
    }
    kopt_leave_(&environment);
    return KOPT_OK;
}

/* Values of a block of 8-bit moments, to the nearest codes. */
static void kopt_code_block_(kopt_byte_ *code, kopt_byte_ *scale, const kopt_byte_ *in, size_t n, int rooted) {
    float row[KOPT_BLOCK_];
    size_t i;
    for (i = 0; i < n; i++) {
        uint32_t bits = kopt_load32_(in + 4 * i);
        KOPT_OPAQUE_(bits); /* no call of memcpy */
        row[i] = rooted ? kopt_sqrt_(kopt_as_f32_(bits)) : kopt_as_f32_(bits);
    }
    kopt_quantise_(code, scale, KOPT_CONST_POINTER_(const kopt_byte_ *, row), n, rooted, KOPT_NULL_);
}

/* Values of elements [begin, end) of a stream; begin is at a block. */
static void kopt_write_slot_(const kopt_optimizer *opt, const kopt_tensor *t, kopt_slot slot, const kopt_byte_ *in,
                             size_t begin, size_t end) {
    const kopt_layout_ at = kopt_layout_for_(opt, t->n);
    const size_t residual_bytes = kopt_bytes_of_residual_(opt->weight_format, opt->rounding);
    const size_t weight_bytes = kopt_bytes_of_(opt->weight_format);
    const size_t moment_bytes = slot == KOPT_WEIGHT ? 0 : kopt_bytes_of_(opt->moment_format);
    const int rooted = kopt_keeps_root_(opt, slot);
    kopt_byte_ *const weight = KOPT_CAST_(kopt_byte_ *, t->weight), *const state = KOPT_CAST_(kopt_byte_ *, t->state);
    kopt_byte_ *const moments = slot == KOPT_WEIGHT ? weight : state + at.moment[slot - KOPT_FIRST_MOMENT];
    size_t i, n;
    for (i = begin; i < end; i += n, in += 4 * n) {
        const uint32_t bits = kopt_load32_(in);
        kopt_byte_ *const moment = moments + i * moment_bytes;
        float x = kopt_as_f32_(bits);
        uint32_t rounded;
        n = 1;
        if (slot == KOPT_WEIGHT) {
            kopt_write_weight_(opt, weight + i * weight_bytes,
                               residual_bytes == 0 ? KOPT_NULL_ : state + at.residual + i * residual_bytes, bits);
            continue;
        }
        if (KOPT_HAS_(KOPT_WITH_Q8) && opt->moment_format == KOPT_Q8) {
            n = end - i < KOPT_BLOCK_ ? end - i : KOPT_BLOCK_;
            kopt_code_block_(moment, moments + at.scale + i / KOPT_BLOCK_ * 4, in, n, rooted);
            continue;
        }
        if (opt->moment_format == KOPT_F32) {
            kopt_store32_(moment, bits);
            continue;
        }
        if (rooted) x = kopt_sqrt_(x);
        rounded = kopt_round_nearest16_scalar_(x, opt->moment_format);
        if (rooted && rounded == 0 && kopt_as_u32_(x) != 0) rounded = 1; /* positive, so never zero */
        kopt_store16_(moment, rounded);
    }
}

KOPT_API_ kopt_result kopt_state_write(const kopt_optimizer *opt, const kopt_tensor *t, kopt_slot slot,
                                       const float *in) {
    const kopt_result result = kopt_check_slot_(opt, t, slot, in, 4, 0);
    kopt_environment_ environment;
    if (result != KOPT_OK || t->n == 0) return result;
    kopt_enter_(&environment);
    kopt_write_slot_(opt, t, slot, KOPT_CONST_POINTER_(const kopt_byte_ *, in), 0, t->n);
    kopt_leave_(&environment);
    if (slot == KOPT_WEIGHT) {
        kopt_start_slow_(opt, t);
        kopt_refresh_copy_(opt, t);
    }
    return KOPT_OK;
}

/* The value of a code of the dynamic map (Dettmers et al. 2022): the middles of 2^d equal parts of [0.1, 1], times
   10^(d - 6), d from 0 to 6; then 1. Of the map without signs there are twice as many parts. */
static float kopt_dynamic_value_(uint32_t code, int square) {
    const uint32_t zero = square ? 0 : 127;
    uint32_t part = (code < zero ? zero - code : code - zero) - 1, parts = square ? 2 : 1;
    kopt_f64_ shrink = kopt_to_f64_(1e6), x = kopt_to_f64_(1);
    float value;
    int d;
    if (code == zero) return 0;
    for (d = 0; d < 7 && part >= parts; d++) {
        part -= parts;
        parts *= 2;
        shrink = kopt_div64_(shrink, kopt_to_f64_(10));
    }
    if (d < 7) {
        x = kopt_div64_(kopt_u32_to_f64_(2 * part + 1), kopt_u32_to_f64_(2 * parts));
        x = kopt_div64_(kopt_add64_(kopt_to_f64_(0.1), kopt_mul64_(kopt_to_f64_(0.9), x)), shrink);
    }
    value = kopt_to_float_(x);
    return code < zero ? kopt_as_f32_(kopt_as_u32_(value) | 0x80000000u) : value;
}

/* A moment from codes of the dynamic map, which may be where the moment is going to be. */
static void kopt_write_dynamic_(const kopt_optimizer *opt, const kopt_tensor *t, kopt_slot slot,
                                const kopt_byte_ *codes, const kopt_byte_ *scales) {
    const int square = kopt_is_square_(opt->rule, KOPT_CAST_(int, slot) - 1);
    kopt_environment_ environment;
    float row[KOPT_BLOCK_];
    size_t i, k, n;
    kopt_enter_(&environment);
    for (i = 0; i < t->n; i += n) {
        const float scale = kopt_as_f32_(kopt_load32_(scales + i / KOPT_BLOCK_ * 4));
        n = t->n - i < KOPT_BLOCK_ ? t->n - i : KOPT_BLOCK_;
        for (k = 0; k < n; k++) {
            row[k] = kopt_dynamic_value_(codes[i + k], square);
            KOPT_OPAQUE_FLOAT_(row[k]); /* or -Ofast sees 0 * NaN and makes it 0 */
            row[k] = kopt_mul_scalar_(row[k], scale);
        }
        kopt_write_slot_(opt, t, slot, KOPT_CONST_POINTER_(const kopt_byte_ *, row), i, i + n);
    }
    kopt_leave_(&environment);
}

KOPT_API_ kopt_result kopt_state_write_codes(const kopt_optimizer *opt, const kopt_tensor *t, kopt_slot slot,
                                             const unsigned char *codes, const float *scales) {
    kopt_result result = kopt_check_slot_(opt, t, slot, codes, 1, 0);
    if (result == KOPT_OK) result = kopt_check_slot_(opt, t, slot, scales, 4, 1);
    if (result == KOPT_OK && slot == KOPT_WEIGHT) return KOPT_ERROR_OPTION;
    if (result == KOPT_OK && t->n != 0)
        kopt_write_dynamic_(opt, t, slot, codes, KOPT_CONST_POINTER_(const kopt_byte_ *, scales));
    return result;
}

/* ---- state: seal, open and inspect ---- */

/* CRC-32 of zlib, PNG and IEEE 802.3, four bits at a time, of a block with zeros in the checksum's own place. */
static uint32_t kopt_crc32_(const kopt_byte_ *block, size_t n) {
    static const uint32_t kopt_nibbles_[16] = {
        0x00000000u, 0x1DB71064u, 0x3B6E20C8u, 0x26D930ACu, 0x76DC4190u, 0x6B6B51F4u, 0x4DB26158u, 0x5005713Cu,
        0xEDB88320u, 0xF00F9344u, 0xD6D6A3E8u, 0xCB61B38Cu, 0x9B64C2B0u, 0x86D3D2D4u, 0xA00AE278u, 0xBDBDF21Cu};
    uint32_t crc = 0xFFFFFFFFu;
    size_t i;
    for (i = 0; i < n; i++) {
        if (i < 44 || i >= 48) crc ^= block[i];
        crc = (crc >> 4) ^ kopt_nibbles_[crc & 15u];
        crc = (crc >> 4) ^ kopt_nibbles_[crc & 15u];
    }
    return ~crc;
}

static void kopt_swap_(kopt_byte_ *p, size_t n, size_t bytes) {
    const uint16_t one = 1;
    if (*KOPT_CONST_POINTER_(const kopt_byte_ *, &one) == 1) return; /* little-endian: nothing to do */
    for (; n > 0; n--, p += bytes) {
        size_t i;
        for (i = 0; i < bytes / 2; i++) {
            const kopt_byte_ low = p[i];
            p[i] = p[bytes - 1 - i];
            p[bytes - 1 - i] = low;
        }
    }
}

static void kopt_swap_arrays_(const kopt_optimizer *opt, const kopt_tensor *t) {
    const kopt_layout_ at = kopt_layout_for_(opt, t->n);
    kopt_byte_ *state = KOPT_CAST_(kopt_byte_ *, t->state);
    const size_t moment_bytes = kopt_bytes_of_(opt->moment_format);
    const size_t residual_bytes = kopt_bytes_of_residual_(opt->weight_format, opt->rounding);
    int i;
    kopt_swap_(state + at.residual, t->n, residual_bytes);
    for (i = 0; i < kopt_moments_(opt); i++) {
        kopt_swap_(state + at.moment[i], t->n, moment_bytes);
        if (opt->moment_format == KOPT_Q8) kopt_swap_(state + at.moment[i] + at.scale, kopt_blocks_(t->n), 4);
    }
    if (opt->rule == KOPT_RANGER) {
        kopt_swap_(state + at.slow, t->n, kopt_bytes_of_(opt->weight_format));
        kopt_swap_(state + at.slow_residual, t->n, residual_bytes);
    }
}

KOPT_API_ kopt_result kopt_state_seal(const kopt_optimizer *opt, const kopt_tensor *t) {
    kopt_result result = kopt_check_state_(opt, t, 0);
    kopt_byte_ *state;
    size_t total;
    if (result != KOPT_OK || t->n == 0) return result;
    total = kopt_layout_for_(opt, t->n).total;
    if (total == 0) return KOPT_OK;
    state = KOPT_CAST_(kopt_byte_ *, t->state);
    kopt_make_header_(state, opt, t);
    state[10] = 1;
    kopt_swap_arrays_(opt, t);
    kopt_put_(state + 44, kopt_crc32_(state, total), 4);
    return KOPT_OK;
}

KOPT_API_ kopt_result kopt_state_open(kopt_optimizer *opt, const kopt_tensor *t) {
    kopt_result result = kopt_check_state_(opt, t, 1);
    kopt_byte_ *state, rounding, moments;
    kopt_layout_ at;
    size_t total;
    int i, dynamic;
    if (result != KOPT_OK || t->n == 0) return result;
    at = kopt_layout_for_(opt, t->n);
    total = at.total;
    if (total != 0) {
        state = KOPT_CAST_(kopt_byte_ *, t->state);
        kopt_make_variant_(&rounding, &moments, opt);
        if (state[4] != 1 && (state[7] != rounding || state[9] != moments)) return KOPT_ERROR_MISMATCH;
        if (kopt_crc32_(state, total) != kopt_little32_(state + 44)) return KOPT_ERROR_CHECKSUM;
        opt->seed = kopt_little64_(state + 32);
        opt->step = kopt_little32_(state + 40);
        dynamic = state[8] == 3;
        kopt_make_header_(state, opt, t);
        kopt_swap_arrays_(opt, t);
        for (i = 0; KOPT_HAS_(KOPT_WITH_Q8) && dynamic && i < kopt_moments_(opt); i++)
            kopt_write_dynamic_(opt, t, KOPT_CAST_(kopt_slot, i + 1), state + at.moment[i],
                                state + at.moment[i] + at.scale);
    }
    kopt_refresh_copy_(opt, t);
    return KOPT_OK;
}

/* The optimizer that a header tells of. */
static void kopt_optimizer_in_(kopt_optimizer *opt, const kopt_byte_ *h) {
    const kopt_rule rule = KOPT_CAST_(kopt_rule, h[5]);
    const kopt_decay_mode decay = KOPT_CAST_(kopt_decay_mode, h[9] >> 4 & 3);
    kopt_optimizer made = kopt_start_(rule, kopt_number_in_(h + 48), decay, kopt_number_in_(h + 52));
    made.weight_format = KOPT_CAST_(kopt_format, h[6]);
    made.rounding = KOPT_CAST_(kopt_rounding, h[7] & 15);
    made.moment_format = KOPT_CAST_(kopt_format, h[8] < 3 ? h[8] : 3);
    made.moment_rounding = KOPT_CAST_(kopt_rounding, h[7] >> 4 & 1);
    made.compensation_rounding = KOPT_CAST_(kopt_rounding, h[7] >> 5 & 1);
    made.nesterov = h[9] >> 3 & 1;
    made.stable = h[9] >> 6 & 1;
    made.atan2_outside = h[9] >> 7;
    made.amsgrad = rule == KOPT_ADAM && (h[9] & 7) == 3;
    made.seed = kopt_little64_(h + 32);
    made.step = kopt_little32_(h + 40);
    if (rule == KOPT_SGD && (h[9] & 7) != 0) { /* positive, as there is a moment: fp32 may have 0 for it */
        made.momentum = kopt_number_in_(h + 56);
        if (!kopt_less_(0, made.momentum)) made.momentum = 1.4012984643248171e-45;
    }
    made.dampening = rule == KOPT_SGD ? kopt_number_in_(h + 60) : 0;
    if (rule != KOPT_SGD) made.beta1 = kopt_number_in_(h + 56);
    if (rule != KOPT_SGD) made.beta2 = kopt_number_in_(h + 60);
    if (rule == KOPT_ADAN || rule == KOPT_RANGER || made.stable) made.eps = 1e-6;
    kopt_copy_noinline_(KOPT_POINTER_(kopt_byte_ *, opt), KOPT_CONST_POINTER_(const kopt_byte_ *, &made), sizeof made);
}

KOPT_API_ kopt_result kopt_state_inspect(const void *state, size_t state_size, kopt_optimizer *opt, kopt_tensor *t) {
    const kopt_byte_ *h = KOPT_CAST_(const kopt_byte_ *, state);
    size_t n = 0;
    int i;
    if (!KOPT_HAS_(KOPT_WITH_CHECKS)) return KOPT_ERROR_OPTION; /* such a build writes no headers */
    if (h == KOPT_NULL_) return KOPT_ERROR_NULL;
    if (state_size < KOPT_HEADER_) return KOPT_ERROR_SIZE;
    if (!kopt_header_valid_(h) || h[5] > KOPT_ADAM_ATAN2 || h[6] > KOPT_FP16 || (h[7] & 15u) > KOPT_EXACT ||
        h[8] > kopt_format_byte_(KOPT_Q8) || (h[9] & 7u) > 4u)
        return KOPT_ERROR_STATE;
    for (i = 8; i > 0; i--) n = n << 8 | h[15 + i];
    if (n != kopt_little64_(h + 16)) return KOPT_ERROR_BOUNDS; /* of a machine with a larger address space */
    if (opt != KOPT_NULL_) kopt_optimizer_in_(opt, h);
    if (t != KOPT_NULL_) {
        t->n = n;
        t->id = kopt_little32_(h + 12);
        t->first_index = kopt_little64_(h + 24);
    }
    return KOPT_OK;
}

/* ---- scalars of a step ---- */

/* RAdam's rectification term, in (0, 1); 0 while the approximated moving average is 5 steps or shorter. In binary64:
   that length is a difference of numbers near 2 / (1 - beta). */
static KOPT_HOST_DEVICE_ float kopt_rectifier_(kopt_f64_ beta, uint32_t step) {
    const kopt_f64_ one = kopt_to_f64_(1), two = kopt_to_f64_(2), four = kopt_to_f64_(4);
    const kopt_f64_ longest = kopt_sub64_(kopt_div64_(two, kopt_sub64_(one, beta)), one);
    kopt_f64_ power = one, square = beta, length, above, below;
    uint32_t bits = step;
    for (; bits != 0; bits >>= 1) { /* beta^step */
        if ((bits & 1u) != 0) power = kopt_mul64_(power, square);
        square = kopt_mul64_(square, square);
    }
    length = kopt_div64_(kopt_mul64_(kopt_mul64_(two, kopt_u32_to_f64_(step)), power), kopt_sub64_(one, power));
    length = kopt_sub64_(longest, length);
    if (!kopt_less64_(kopt_to_f64_(5), length)) return 0;
    above = kopt_mul64_(kopt_sub64_(length, four), kopt_sub64_(length, two));
    below = kopt_mul64_(kopt_sub64_(longest, four), kopt_sub64_(longest, two));
    return kopt_to_float_(kopt_sqrt64_(kopt_div64_(kopt_mul64_(above, longest), kopt_mul64_(below, length))));
}

/* What a step takes over from the options. */
KOPT_SMALL_FN_ KOPT_HOST_DEVICE_ void kopt_take_options_(const kopt_optimizer *opt, kopt_step *s) {
    const int checks = KOPT_HAS_(KOPT_WITH_CHECKS), extras = KOPT_HAS_(KOPT_WITH_EXTRAS);
    const int momentum = KOPT_HAS_(KOPT_WITH_MOMENTUM);
    s->rule = opt->rule; /* what is the only choice of a build is not kept, but not read either */
    if (checks || !KOPT_SINGLE_BIT_(KOPT_FORMATS_)) {
        s->weight_format = opt->weight_format;
        s->moment_format = opt->moment_format;
    }
    if (checks || !KOPT_SINGLE_BIT_(KOPT_ROUNDINGS_)) s->rounding = opt->rounding;
    if (checks || !KOPT_SINGLE_BIT_(KOPT_STATE_ROUNDINGS_)) {
        s->moment_rounding = opt->moment_rounding;
        s->compensation_rounding = opt->compensation_rounding;
    }
    if (checks != 0 || extras != 0 || momentum != 0 || (KOPT_RULES_ & ~3u) != 0) {
        s->moment_count = kopt_moments_(opt);
        s->nesterov = momentum && opt->rule == KOPT_SGD && opt->nesterov;
        s->zero_grad = extras ? opt->zero_grad : 0;
        s->moments_only = extras ? opt->moments_only : 0;
        s->unrectified = s->sync = 0;
        s->stable = extras && opt->rule == KOPT_ADAM && opt->stable;
    }
    s->seed = opt->seed;
#ifdef KAHAN_OPT_VMATH
    s->vmath = opt->vmath;
#else
    if (checks) s->vmath = KOPT_NULL_;
#endif
    if (checks) s->slow_scale = 0;
}

/* 1 - x of other hyper-parameters. */
KOPT_SMALL_FN_ KOPT_HOST_DEVICE_ float kopt_one_minus_(double x) {
    return kopt_to_float_(kopt_sub64_(kopt_to_f64_(1), kopt_to_f64_(x)));
}

static KOPT_HOST_DEVICE_ int kopt_finite_(float x) { return (kopt_as_u32_(x) & 0x7F800000u) != 0x7F800000u; }

/* The step after opt->step. Returns 0 if a scalar is beyond the range of a float. */
KOPT_SCALARS_ KOPT_HOST_DEVICE_ int kopt_compute_scalars_(const kopt_optimizer *opt, kopt_step *s) {
    const kopt_rule rule = KOPT_RULE_(opt->rule);
    const kopt_decay_mode how = KOPT_DECAY_(opt->decay_mode);
    const float weight_decay = kopt_narrow64_(opt->weight_decay);
    float rest1, rest2;
    s->step = opt->step + 1;
    s->grad_scale = kopt_narrow64_(opt->grad_scale);
    if (KOPT_HAS_(KOPT_WITH_EXTRAS)) s->grad_scale = kopt_mul_(s->grad_scale, kopt_narrow64_(opt->clip));
    if (KOPT_HAS_(KOPT_WITH_EXTRAS) && opt->maximize)
        s->grad_scale = kopt_as_f32_(kopt_as_u32_(s->grad_scale) ^ 0x80000000u);
    if (KOPT_HAS_(KOPT_WITH_L2)) s->l2 = how == KOPT_L2 ? weight_decay : 0;
    s->rate = kopt_narrow64_(opt->lr);
    s->weight_decay = 0;
    if (how == KOPT_DECOUPLED) s->weight_decay = kopt_mul_(s->rate, weight_decay);
    if (how == KOPT_FULLY_DECOUPLED)
        s->weight_decay = kopt_mul_(kopt_div_(s->rate, kopt_narrow64_(opt->max_lr)), weight_decay);
    if (KOPT_HAS_(KOPT_WITH_ADAN | KOPT_WITH_RANGER)) s->beta3 = s->gain3 = s->third_scale = 0;
    if (KOPT_HAS_(KOPT_WITH_MOMENTUM)) s->extrapolation = kopt_narrow64_(opt->momentum);
    s->eps = kopt_narrow64_(opt->eps);
#ifdef KAHAN_OPT_VMATH
    s->sharpness = rule == KOPT_LION ? kopt_narrow64_(opt->sharpness) : 0;
#else
    if (KOPT_HAS_(KOPT_WITH_CHECKS)) s->sharpness = 0;
#endif
    if (KOPT_HAS_(KOPT_WITH_CHECKS) || rule != KOPT_ADAM) s->root_scale = 1;
    if (rule == KOPT_SGD || rule == KOPT_EMA) {
        if (KOPT_HAS_(KOPT_WITH_CHECKS)) s->beta1 = s->gain1 = s->beta2 = s->gain2 = 0;
        if (KOPT_HAS_(KOPT_WITH_MOMENTUM) && rule == KOPT_SGD) {
            s->beta1 = s->step == 1 ? 0 : s->extrapolation;
            s->gain1 = s->step == 1 ? 1 : kopt_one_minus_(opt->dampening);
        }
    } else {
#ifdef KOPT_VECTORS16_
        kopt_betas_(opt, s, &rest1, &rest2);
#else
        rest1 = kopt_beta_(opt->beta1, s->step, &s->beta1, &s->gain1);
        rest2 = kopt_beta_(opt->beta2, s->step, &s->beta2, &s->gain2);
#endif
        if (rule == KOPT_ADAN) {
            const float shrink = how == KOPT_L2 ? 1 : kopt_add_(1, s->weight_decay); /* the weight is divided by this */
            s->extrapolation = s->beta2;
            s->third_scale = kopt_div_(kopt_mul_(s->beta2, rest1), rest2);
            rest2 = kopt_beta_(opt->beta3, s->step, &s->beta3, &s->gain3);
            s->rate = kopt_div_(s->rate, shrink);
            s->weight_decay = kopt_div_(s->weight_decay, shrink);
        }
        if (rule != KOPT_LION) {
#ifdef KAHAN_OPT_VMATH
            if (rule == KOPT_ADAM_ATAN2) { /* the correction of m, there or with what is beside it in atan2 */
                const float a = kopt_narrow64_(opt->atan2_a), b = kopt_narrow64_(opt->atan2_b);
                s->rate = kopt_mul_(s->rate, a);
                if (opt->atan2_outside) s->rate = kopt_div_(s->rate, rest1);
                s->root_scale = kopt_div_(opt->atan2_outside ? b : kopt_mul_(b, rest1), kopt_sqrt_(rest2));
                s->eps = kopt_as_f32_(0x00800000u);
            } else
#endif
            {
                s->rate = kopt_div_(s->rate, rest1);
                s->root_scale = kopt_div_(1, kopt_sqrt_(rest2));
            }
            if (rule == KOPT_RADAM || rule == KOPT_RANGER) {
                const float rectifier = kopt_rectifier_(kopt_to_f64_(opt->beta2), s->step);
                s->unrectified = kopt_as_u32_(rectifier) == 0;
                if (!s->unrectified) s->rate = kopt_mul_(s->rate, rectifier);
                if (!s->unrectified && rule == KOPT_RADAM) { /* eps is added to the root before its correction */
                    s->rate = kopt_div_(s->rate, s->root_scale);
                    s->root_scale = 1;
                }
            }
            if (KOPT_HAS_(KOPT_WITH_Q8) && opt->moment_format == KOPT_Q8 && s->step > 1)
                s->root_scale =
                    kopt_mul_(s->root_scale, 1.003f); /* what noise in a root adds to the mean of 1 / root */
        }
        if (rule == KOPT_RANGER) {
            s->sync = s->step % KOPT_CAST_(uint32_t, opt->lookahead) == 0;
            s->slow_scale = kopt_one_minus_(opt->lookahead_rate);
        }
    }
#ifdef KAHAN_OPT_VMATH
    if (KOPT_HAS_(KOPT_WITH_CHECKS) && !kopt_finite_(s->root_scale)) return 0; /* b */
#endif
    return !KOPT_HAS_(KOPT_WITH_CHECKS) ||
           (kopt_finite_(s->grad_scale) && kopt_finite_(s->rate) && kopt_finite_(s->weight_decay));
}

/* ---- running a step ---- */

/* No memory that never was a step gets to the kernels: they trust its formats, arrays and rules. */
static int kopt_step_valid_(const kopt_step *s) {
    static const kopt_byte_ kopt_fewest_[] = {0, 2, 1, 4, 2, 2, 0, 2},
                            kopt_more_[] = {1, 1, 0, 0, 0, 0, 0, 0}; /* moments */
    const unsigned rule = KOPT_CAST_(unsigned, s->rule), moments = KOPT_CAST_(unsigned, s->moment_count);
    return rule <= KOPT_CAST_(unsigned, KOPT_LAST_RULE_) && moments - kopt_fewest_[rule] <= kopt_more_[rule] &&
           kopt_format_valid_(s->weight_format) &&
           (kopt_format_valid_(s->moment_format) || s->moment_format == KOPT_Q8) &&
           KOPT_CAST_(unsigned, s->rounding) <= KOPT_CAST_(unsigned, KOPT_EXACT) &&
           (KOPT_CAST_(unsigned, s->moment_rounding) | KOPT_CAST_(unsigned, s->compensation_rounding)) <= 1u &&
           (!s->stable || s->rule == KOPT_ADAM) && (!s->sync || s->rule == KOPT_RANGER) &&
           (!s->unrectified || s->rule == KOPT_RADAM || s->rule == KOPT_RANGER);
}

/* Lays the block out, too. */
KOPT_SMALL_FN_ kopt_result kopt_check_step_(kopt_layout_ *at, const kopt_step *s, const kopt_tensor *t) {
    const int checks = KOPT_HAS_(KOPT_WITH_CHECKS);
    kopt_result result = KOPT_OK;
    kopt_kept_ kept;
    if (checks && s == KOPT_NULL_) return KOPT_ERROR_NULL;
    if (checks && (s->step == 0 || !kopt_step_valid_(s))) return KOPT_ERROR_STEP;
    if (checks) result = kopt_check_tensor_(t); /* NULL, too */
    if (result != KOPT_OK) return result;
    kept = kopt_kept_in_(s);
    kopt_lay_out_(at, &kept, t->n);
    if (checks) result = kopt_check_block_(t, &kept, at->total, 0);
    if (!checks || result != KOPT_OK) return result;
    return kopt_check_memory_(t, kopt_bytes_of_(s->weight_format), at->total, 1);
}

#ifdef KAHAN_OPT_VMATH
static const kopt_vmath *kopt_vmath_of_steps_(const kopt_vmath *vmath);

/* The table whose function runs between the stages; NULL: the built-in in the kernel. */
static const kopt_vmath *kopt_table_of_(const kopt_step *s) {
    const kopt_vmath *vmath = s->vmath;
    if ((KOPT_ONLY_ & KOPT_SECOND_PASS_) != KOPT_SECOND_PASS_) return KOPT_NULL_;
    if (s->rule == KOPT_LION && kopt_as_u32_(s->sharpness) << 1 != 0)
        return vmath == KOPT_NULL_ || vmath->tanh == KOPT_NULL_ ? kopt_vmath_builtin() : kopt_vmath_of_steps_(vmath);
    if (s->rule != KOPT_ADAM_ATAN2 || vmath == KOPT_NULL_ || vmath->atan2 == KOPT_NULL_) return KOPT_NULL_;
    return vmath->atan2 == kopt_vmath_builtin()->atan2 ? KOPT_NULL_ : kopt_vmath_of_steps_(vmath);
}

static void kopt_call_rule_function_(const kopt_job_ *j, float *y, const float *x, size_t n) {
    if (j->step->rule == KOPT_LION)
        (j->vmath->tanh)(y, y, n);
    else
        (j->vmath->atan2)(y, y, x, n);
}

#endif

/* A range of a tensor with 8-bit moments: block by block the moments become fp32, are stepped, and become codes
   again. */
static KOPT_NOINLINE_ void kopt_run_blocks_(const kopt_job_ *whole, kopt_byte_ *state, const kopt_layout_ *at,
                                            float *moment) {
    const kopt_step *s = whole->step;
    const size_t weight_bytes = kopt_bytes_of_(s->weight_format), grad_bytes = kopt_bytes_of_(whole->grad_format);
    const size_t residual_bytes = kopt_bytes_of_residual_(s->weight_format, s->rounding);
    kopt_drawn_ drawn;
    kopt_job_ job;
    size_t i, n;
    int m;
    kopt_copy_noinline_(KOPT_POINTER_(kopt_byte_ *, &job), KOPT_CONST_POINTER_(const kopt_byte_ *, whole), sizeof job);
    kopt_drawn_of_(&drawn, s->seed, s->step, whole->id, KOPT_RANDOM_STEP_);
    job.moment_format = KOPT_F32;
    job.buffered = 1;
    job.begin = 0;
    for (m = 0; m < s->moment_count; m++)
        job.moment[m] = KOPT_POINTER_(kopt_byte_ *, moment + KOPT_CAST_(unsigned, m) * KOPT_BLOCK_);
    for (i = whole->begin; i < whole->end; i += n) {
        const size_t scale = i / KOPT_BLOCK_ * 4;
        n = whole->end - i < KOPT_BLOCK_ ? whole->end - i : KOPT_BLOCK_;
        for (m = 0; m < s->moment_count; m++)
            kopt_dequantise_(job.moment[m], state + at->moment[m] + i, state + at->moment[m] + at->scale + scale, n,
                             kopt_is_square_(s->rule, m));
        job.weight = whole->weight + i * weight_bytes;
        job.grad = whole->grad + i * grad_bytes;
        job.residual = whole->residual + i * residual_bytes;
        job.slow = whole->slow + (s->rule == KOPT_RANGER ? i * weight_bytes : 0);
        job.slow_residual = whole->slow_residual + (s->rule == KOPT_RANGER ? i * residual_bytes : 0);
        if (whole->copy != KOPT_NULL_) job.copy = whole->copy + i * kopt_bytes_of_(whole->copy_format);
        job.first = whole->first + i;
        job.end = n;
        (KOPT_KERNEL_(step))(&job);
        for (m = 0; m < s->moment_count; m++) {
            const int nearest = s->moment_rounding == KOPT_NEAREST || (m == 2 && s->rule == KOPT_ADAM);
            drawn.first = job.first;
            drawn.store = KOPT_CAST_(uint32_t, m) + 1;
            kopt_quantise_(state + at->moment[m] + i, state + at->moment[m] + at->scale + scale, job.moment[m], n,
                           kopt_is_square_(s->rule, m), nearest ? KOPT_NULL_ : &drawn);
        }
    }
}

/* The frames of that: a row for each moment. */
#define KOPT_FRAME_(moments)                                                                          \
    static KOPT_NOINLINE_ void kopt_run_blocks##moments##_(const kopt_job_ *whole, kopt_byte_ *state, \
                                                           const kopt_layout_ *at) {                  \
        float moment[(moments) * KOPT_BLOCK_];                                                        \
        kopt_run_blocks_(whole, state, at, moment);                                                   \
    }
KOPT_FRAME_(1)
KOPT_FRAME_(2)
KOPT_FRAME_(3)
KOPT_FRAME_(4)
#undef KOPT_FRAME_

KOPT_SMALL_FN_ void kopt_make_job_(kopt_job_ *job, const kopt_layout_ *at, const kopt_step *s, const kopt_tensor *t,
                                   size_t begin, size_t end) {
    const int extras = KOPT_HAS_(KOPT_WITH_EXTRAS), none = KOPT_HAS_(KOPT_WITH_CHECKS) && at->total == 0;
    kopt_byte_ *state = KOPT_CAST_(kopt_byte_ *, t->state);
    job->step = s;
    job->weight = KOPT_CAST_(kopt_byte_ *, t->weight);
    job->grad = KOPT_CAST_(kopt_byte_ *, t->grad);
    if (none) {
        job->residual = job->slow = job->slow_residual = KOPT_NULL_;
        job->moment[0] = job->moment[1] = job->moment[2] = job->moment[3] = KOPT_NULL_;
    } else {
        job->residual = state + at->residual;
        job->moment[0] = state + at->moment[0];
        job->moment[1] = state + at->moment[1];
        job->moment[2] = state + at->moment[2];
        job->moment[3] = state + at->moment[3];
        job->slow = state + at->slow;
        job->slow_residual = state + at->slow_residual;
    }
    job->counts = extras ? t->counts : KOPT_NULL_;
    job->rate = s->rate;
    job->weight_decay = s->weight_decay;
    job->copy = extras ? KOPT_CAST_(kopt_byte_ *, t->copy) : KOPT_NULL_;
    job->grad_format = t->grad_format;
    job->copy_format = t->copy_format;
    job->moment_format = s->moment_format;
    job->begin = begin;
    job->end = end;
    job->first = extras ? t->first_index : 0;
    job->id = t->id;
    job->stream = KOPT_RANDOM_STEP_;
    job->scale = at->scale;
    job->buffered = 0;
#ifdef KAHAN_OPT_VMATH
    job->vmath = kopt_table_of_(s);
    job->quotient = s->rule == KOPT_ADAM_ATAN2 && job->vmath != KOPT_NULL_ && job->vmath != s->vmath;
#endif
}

/* stable: StableAdamW's factor of the rate, beside the tensor's. */
KOPT_SMALL_FN_ void kopt_run_(const kopt_layout_ *at, const kopt_step *s, const kopt_tensor *t, size_t begin,
                              size_t end, float stable) {
    kopt_environment_ environment;
    kopt_job_ job;
    if (KOPT_HAS_(KOPT_WITH_CHECKS) && begin == end) return;
    kopt_make_job_(&job, at, s, t, begin, end);
    kopt_enter_(&environment);
    if (KOPT_HAS_(KOPT_WITH_EXTRAS)) {
        volatile float factor = stable; /* read here, so that nothing is multiplied before kopt_enter_ */
        const float scale = kopt_mul_scalar_(kopt_rate_scale_(t), factor);
        if (kopt_as_u32_(scale) != 0x3F800000u) {
            job.rate = kopt_mul_scalar_(job.rate, scale);
            job.weight_decay = kopt_mul_scalar_(job.weight_decay, scale);
        }
    }
    if (KOPT_HAS_(KOPT_WITH_Q8) && s->moment_format == KOPT_Q8 && s->moment_count > 0 &&
        kopt_isa_current() == KOPT_ISA_SCALAR)
        (s->moment_count == 1   ? kopt_run_blocks1_
         : s->moment_count == 2 ? kopt_run_blocks2_
         : s->moment_count == 3 ? kopt_run_blocks3_
                                : kopt_run_blocks4_)(&job, KOPT_CAST_(kopt_byte_ *, t->state), at);
    else
        (KOPT_KERNEL_(step))(&job);
    kopt_leave_(&environment);
}

static void kopt_norm_tool_(kopt_norm *norm, const kopt_byte_ *x, kopt_format format, size_t n);
static KOPT_NOINLINE_ void kopt_measure_(const kopt_layout_ *at, const kopt_step *s, const kopt_tensor *t, size_t begin,
                                         size_t end, kopt_norm *norm) {
    size_t part = KOPT_MEASURED_;
    kopt_byte_ *state = KOPT_CAST_(kopt_byte_ *, t->state);
    kopt_environment_ environment;
    kopt_job_ job;
    float row[KOPT_MEASURED_]; /* ratios, in the place of squares that were codes */
    kopt_byte_ *const bytes = KOPT_POINTER_(kopt_byte_ *, row);
    size_t i, n;
    if (s->moment_format == KOPT_Q8) part = KOPT_PART_;
    kopt_make_job_(&job, at, s, t, begin, end);
    kopt_enter_(&environment);
    for (i = begin; i < end; i += n) {
        n = part - i % part;
        if (end - i < n) n = end - i;
        job.begin = i;
        job.end = i + n;
        if (s->moment_format == KOPT_Q8) {
            job.moment_format = KOPT_F32;
            job.buffered = 1;
            job.moment[1] = bytes;
            kopt_dequantise_(bytes, state + at->moment[1] + i, state + at->moment[1] + at->scale + i / KOPT_BLOCK_ * 4,
                             n, 1);
            job.weight = KOPT_CAST_(kopt_byte_ *, t->weight) + i * kopt_bytes_of_(s->weight_format);
            job.residual = state + at->residual + i * kopt_bytes_of_residual_(s->weight_format, s->rounding);
            job.grad = KOPT_CAST_(kopt_byte_ *, t->grad) + i * kopt_bytes_of_(t->grad_format);
            job.begin = 0;
            job.end = n;
        }
        KOPT_KERNEL_(measure)(&job, bytes);
        kopt_norm_tool_(norm, bytes, KOPT_F32, n);
    }
    kopt_leave_(&environment);
}

/* Must StableAdamW measure the tensor before the step? */
KOPT_SMALL_FN_ int kopt_unmeasured_(const kopt_step *s, const kopt_tensor *t) {
    return KOPT_HAS_(KOPT_WITH_EXTRAS) && s->stable && !s->moments_only && kopt_as_u32_(t->stable_scale) == 0;
}

/* StableAdamW's factor of the rate, as far as the tensor has it. */
KOPT_SMALL_FN_ float kopt_known_scale_(const kopt_step *s, const kopt_tensor *t) {
    return KOPT_HAS_(KOPT_WITH_EXTRAS) && s->stable && kopt_as_u32_(t->stable_scale) != 0 ? t->stable_scale : 1;
}

KOPT_SMALL_FN_ void kopt_run_whole_(const kopt_layout_ *at, const kopt_step *s, const kopt_tensor *t) {
    kopt_norm norm;
    float scale = kopt_known_scale_(s, t);
    if (kopt_unmeasured_(s, t)) {
        kopt_copy_padded_(KOPT_POINTER_(kopt_byte_ *, &norm), sizeof norm, KOPT_NULL_, 0); /* zeros */
        kopt_measure_(at, s, t, 0, t->n, &norm);
        scale = kopt_stable_scale(&norm, t->n);
    }
    kopt_run_(at, s, t, 0, t->n, scale);
}

/* Of a list that was checked. */
KOPT_SMALL_FN_ void kopt_run_tensor_(const kopt_step *s, const kopt_tensor *t) {
    kopt_layout_ at;
    kopt_lay_out_step_(&at, s, t->n);
    kopt_run_whole_(&at, s, t);
}

/* Do two tensors share memory that a step would write? Counts may be those of the whole list. */
static int kopt_share_(const kopt_step *s, const kopt_span_ *x, const kopt_span_ *x_end, const kopt_span_ *y,
                       const kopt_span_ *y_end) {
    const kopt_span_ *b;
    for (; x != x_end; x++)
        for (b = y; b != y_end; b++)
            if (kopt_meet_(x, b) &&
                (x->what != b->what || (x->what != KOPT_COUNTS_ && (x->what != KOPT_GRADS_ || s->zero_grad))))
                return 1;
    return 0;
}

/* The ids of a list increase; those of shards of one tensor are equal, and their elements follow each other. */
static int kopt_follows_(const kopt_tensor *a, const kopt_tensor *b) {
    return a->id < b->id || (a->id == b->id && a->first_index + a->n <= b->first_index);
}

/* In O(1) per tensor: neighbours that share memory (an n in bytes, a pointer that was not moved on), and ids, so that
   no state block serves two tensors. */
static kopt_result kopt_check_list_(const kopt_step *s, const kopt_tensor *tensors, size_t count) {
    const kopt_tensor *last = KOPT_NULL_; /* that has elements */
    kopt_span_ span[2][KOPT_SPANS_], *end, *last_end = KOPT_NULL_;
    kopt_layout_ at;
    size_t i;
    int turn = 0;
    if (!KOPT_HAS_(KOPT_WITH_CHECKS)) return KOPT_OK;
    for (i = 0; i < count; i++) {
        const kopt_tensor *t = &tensors[i];
        const kopt_result result = kopt_check_step_(&at, s, t);
        if (result != KOPT_OK) return result;
        if (t->n == 0) continue;
        turn = !turn;
        end = kopt_spans_(span[turn], t, kopt_bytes_of_(s->weight_format), at.total);
        if (last != KOPT_NULL_ && kopt_share_(s, span[!turn], last_end, span[turn], end)) return KOPT_ERROR_OVERLAP;
        if (last != KOPT_NULL_ && !kopt_follows_(last, t)) return KOPT_ERROR_ID;
        last = t;
        last_end = end;
    }
    return KOPT_OK;
}

KOPT_API_ kopt_result kopt_optimizer_step(kopt_optimizer *opt, const kopt_tensor *tensors, size_t count) {
    kopt_result result;
    kopt_step s;
    uint32_t before;
    size_t i;
    if (opt == KOPT_NULL_ || (tensors == KOPT_NULL_ && count != 0)) return KOPT_ERROR_NULL;
    before = opt->step;
    result = kopt_step_begin(opt, &s);
    if (result != KOPT_OK) return result;
    result = kopt_check_list_(&s, tensors, count);
    if (result != KOPT_OK) {
        opt->step = before;
        return result;
    }
    for (i = 0; i < count; i++) kopt_run_tensor_(&s, &tensors[i]);
    return KOPT_OK;
}

KOPT_API_ kopt_result kopt_step_begin(kopt_optimizer *opt, kopt_step *step) {
    kopt_result result = kopt_check_options_(opt);
    int checks = KOPT_HAS_(KOPT_WITH_CHECKS);
    kopt_environment_ environment;
    kopt_step local, *s = step;
    int finite;
    if (checks) s = &local; /* if it fails, *step is as before */
    if (result != KOPT_OK) return result;
    if (checks && step == KOPT_NULL_) return KOPT_ERROR_NULL;
    if (checks && opt->step == 0xFFFFFFFFu) return KOPT_ERROR_STEP;
    kopt_take_options_(opt, s);
    kopt_enter_(&environment);
    finite = kopt_compute_scalars_(opt, s);
    kopt_leave_(&environment);
    if (!finite) return KOPT_ERROR_RANGE;
    if (checks) kopt_copy_(KOPT_POINTER_(kopt_byte_ *, step), KOPT_CONST_POINTER_(const kopt_byte_ *, s), sizeof *s);
    opt->step = s->step;
    return KOPT_OK;
}

KOPT_API_ kopt_result kopt_step_run(const kopt_step *step, const kopt_tensor *t) {
    kopt_layout_ at;
    const kopt_result result = kopt_check_step_(&at, step, t);
    if (result == KOPT_OK) kopt_run_whole_(&at, step, t);
    return result;
}

KOPT_API_ kopt_result kopt_step_range(const kopt_step *step, const kopt_tensor *t, size_t begin, size_t end) {
    kopt_layout_ at;
    kopt_result result = kopt_check_step_(&at, step, t);
    if (result != KOPT_OK) return result;
    if (begin > end || end > t->n) return KOPT_ERROR_BOUNDS;
    if (step->moment_format == KOPT_Q8 && step->moment_count > 0 && begin != end && /* whole blocks */
        (begin % KOPT_BLOCK_ != 0 || (end % KOPT_BLOCK_ != 0 && end != t->n)))
        return KOPT_ERROR_BOUNDS;
    if (kopt_unmeasured_(step, t) && begin != end) {
        if (end - begin != t->n) return KOPT_ERROR_STEP;
        kopt_run_whole_(&at, step, t);
    } else {
        kopt_run_(&at, step, t, begin, end, kopt_known_scale_(step, t));
    }
    return KOPT_OK;
}

/* ---- tools of a training loop ---- */

/* A table of its own: a program that uses no tool does not link them. An ISA that is not in it uses the scalar ones. */
static void (*const kopt_tools_[KOPT_ISA_COUNT])(const kopt_tool_ *) = {kopt_tool_scalar_,
#ifdef KOPT_X86_
                                                                        kopt_tool_scalar_, kopt_tool_avx2_,
                                                                        kopt_tool_avx2_,
#else
                                                                        KOPT_NULL_, KOPT_NULL_, KOPT_NULL_,
#endif
#ifdef KOPT_NEON_
                                                                        kopt_tool_neon_
#else
                                                                        KOPT_NULL_
#endif
};

static void kopt_run_tool_(const kopt_tool_ *t) { /* inside the library's environment */
    const kopt_isa isa = kopt_isa_current();
    kopt_tools_[kopt_tools_[isa] == KOPT_NULL_ ? KOPT_ISA_SCALAR : isa](t);
}
static void kopt_use_tool_(const kopt_tool_ *t) {
    kopt_environment_ environment;
    kopt_enter_(&environment);
    kopt_run_tool_(t);
    kopt_leave_(&environment);
}

/* ---- norm and clipping ---- */

static kopt_result kopt_check_array_(const void *x, kopt_format format, size_t n) {
    if (!kopt_format_valid_(format)) return KOPT_ERROR_OPTION;
    if (!kopt_n_valid_(n)) return KOPT_ERROR_BOUNDS;
    return x == KOPT_NULL_ && n != 0 ? KOPT_ERROR_NULL : KOPT_OK;
}

static void kopt_norm_tool_(kopt_norm *norm, const kopt_byte_ *x, kopt_format format, size_t n) {
    kopt_tool_ t;
    kopt_norm_carry_(norm);
    t.kind = KOPT_TOOL_NORM_;
    t.norm = norm;
    t.src = x;
    t.src_format = format;
    t.n = n;
    kopt_run_tool_(&t);
}

KOPT_API_ kopt_result kopt_norm_add(kopt_norm *norm, const void *x, kopt_format format, size_t n) {
    const kopt_result result = kopt_check_array_(x, format, n);
    kopt_environment_ environment;
    if (norm == KOPT_NULL_) return KOPT_ERROR_NULL;
    if (result != KOPT_OK) return result;
    if (kopt_overlap_(norm, sizeof *norm, x, n * kopt_bytes_of_(format))) return KOPT_ERROR_OVERLAP;
    if (n == 0) return KOPT_OK;
    kopt_enter_(&environment);
    kopt_norm_tool_(norm, KOPT_CAST_(const kopt_byte_ *, x), format, n);
    kopt_leave_(&environment);
    return KOPT_OK;
}

KOPT_API_ kopt_result kopt_norm_merge(kopt_norm *norm, const kopt_norm *other) {
    kopt_norm sum;
    int i;
    if (norm == KOPT_NULL_ || other == KOPT_NULL_) return KOPT_ERROR_NULL;
    kopt_norm_copy_(&sum, other);
    kopt_norm_carry_(norm);
    for (i = 0; i < 20; i++) norm->digit[i] += sum.digit[i];
    norm->nonfinite += sum.nonfinite;
    kopt_norm_carry_(norm);
    return KOPT_OK;
}

KOPT_API_ kopt_result kopt_norm_add_grads(kopt_norm *norm, const kopt_tensor *tensors, size_t count) {
    size_t i;
    if (norm == KOPT_NULL_ || (tensors == KOPT_NULL_ && count != 0)) return KOPT_ERROR_NULL;
    for (i = 0; i < count; i++) {
        const kopt_tensor *t = &tensors[i];
        kopt_result result = kopt_check_array_(t->grad, t->grad_format, t->n);
        if (result != KOPT_OK) return result;
        if (kopt_overlap_(norm, sizeof *norm, t->grad, t->n * kopt_bytes_of_(t->grad_format)))
            return KOPT_ERROR_OVERLAP;
    }
    for (i = 0; i < count; i++) kopt_norm_add(norm, tensors[i].grad, tensors[i].grad_format, tensors[i].n);
    return KOPT_OK;
}

KOPT_API_ double kopt_norm_value(const kopt_norm *norm) {
    return norm == KOPT_NULL_ ? 0 : kopt_to_double_(kopt_norm_root_(norm));
}

KOPT_API_ double kopt_clip_coefficient(const kopt_norm *norm, double max_norm, double grad_scale) {
    const kopt_f64_ zero = kopt_to_f64_(0), one = kopt_to_f64_(1), most = kopt_to_f64_(max_norm);
    const kopt_f64_ huge = kopt_bits_to_f64_((KOPT_CAST_(uint64_t, 0x54B249ADu) << 32) + 0x2594C37Du); /* 1e100 */
    const kopt_f64_ scale =
        kopt_bits_to_f64_(kopt_bits64_(grad_scale) & ~(KOPT_CAST_(uint64_t, 1) << 63)); /* without sign */
    kopt_f64_ value;
    kopt_environment_ environment;
    if (norm == KOPT_NULL_ || !kopt_less64_(zero, most) || !kopt_within64_(most, zero, most)) return 1;
    if (norm->nonfinite != 0 || !kopt_within64_(scale, zero, huge)) return 0;
    kopt_enter_(&environment);
    value = kopt_mul64_(kopt_norm_root_(norm), scale);
    value = kopt_div64_(most, kopt_add64_(value, kopt_to_f64_(1e-6)));
    kopt_leave_(&environment);
    return kopt_to_double_(kopt_less64_(value, one) ? value : one);
}

KOPT_API_ kopt_result kopt_stable_measure(const kopt_step *step, const kopt_tensor *t, size_t begin, size_t end,
                                          kopt_norm *norm) {
    kopt_layout_ at;
    kopt_result result = kopt_check_step_(&at, step, t);
    kopt_span_ span[KOPT_SPANS_], *a, *spans;
    if (result != KOPT_OK) return result;
    if (norm == KOPT_NULL_) return KOPT_ERROR_NULL;
    if (!step->stable) return KOPT_ERROR_OPTION;
    if (begin > end || end > t->n) return KOPT_ERROR_BOUNDS;
    spans = kopt_spans_(span, t, kopt_bytes_of_(step->weight_format), at.total);
    for (a = span; a != spans; a++)
        if (kopt_overlap_(norm, sizeof *norm, a->at, a->size)) return KOPT_ERROR_OVERLAP;
    kopt_measure_(&at, step, t, begin, end, norm);
    return KOPT_OK;
}

/* 1 / (root of the mean square), at most 1. */
static KOPT_HOST_DEVICE_ float kopt_stable_of_(const kopt_norm *norm, uint64_t n) {
    const kopt_f64_ one = kopt_to_f64_(1);
    kopt_f64_ rms;
    if (n == 0 || norm->nonfinite != 0) return 1;
    rms = kopt_mul64_(kopt_norm_root_(norm), kopt_sqrt64_(kopt_div64_(one, kopt_u64_to_f64_(n))));
    return kopt_less64_(one, rms) ? kopt_to_float_(kopt_div64_(one, rms)) : 1;
}

KOPT_API_ float kopt_stable_scale(const kopt_norm *norm, uint64_t n) {
    kopt_environment_ environment;
    float scale = 1;
    if (norm == KOPT_NULL_) return scale;
    kopt_enter_(&environment);
    scale = kopt_stable_of_(norm, n);
    kopt_leave_(&environment);
    return scale;
}

/* The largest number of format that is not above `limit`, as it is stored. */
static kopt_result kopt_limit_of_(double limit, kopt_format format, uint32_t *bits) {
    const kopt_f64_ largest = kopt_bits_to_f64_(kopt_float_to_bits64_(kopt_as_f32_(0x7F7FFFFFu)));
    kopt_f64_ most = kopt_to_f64_(limit);
    kopt_environment_ environment;
    if (!kopt_within64_(most, kopt_to_f64_(0), most)) return KOPT_ERROR_RANGE;
    kopt_enter_(&environment);
    if (kopt_less64_(largest, most)) most = largest;
    *bits = kopt_as_u32_(kopt_to_float_(most)) & 0x7FFFFFFFu;                            /* -0 is 0 */
    if (kopt_less64_(most, kopt_bits_to_f64_(kopt_float_to_bits64_(kopt_as_f32_(*bits))))) --*bits; /* towards zero */
    if (format == KOPT_BF16) *bits >>= 16;
    if (format == KOPT_FP16) {
        const uint32_t exact = *bits;
        *bits = kopt_fp16_from_f32(kopt_as_f32_(exact));
        if (kopt_as_u32_(kopt_f32_from_fp16(KOPT_CAST_(kopt_fp16, *bits))) > exact) --*bits;
    }
    kopt_leave_(&environment);
    return KOPT_OK;
}

KOPT_API_ kopt_result kopt_clip_value(void *x, kopt_format format, size_t n, double limit) {
    kopt_result result = kopt_check_array_(x, format, n);
    kopt_tool_ t;
    if (result == KOPT_OK) result = kopt_limit_of_(limit, format, &t.limit);
    if (result != KOPT_OK) return result;
    t.kind = KOPT_TOOL_CLIP_;
    t.dst = KOPT_CAST_(kopt_byte_ *, x);
    t.dst_format = format;
    t.n = n;
    if (n != 0) kopt_use_tool_(&t);
    return KOPT_OK;
}

/* ---- loss scaling ---- */

static void kopt_zero_(kopt_byte_ *p, size_t size) {
    for (; size > 0; size--) {
        KOPT_OPAQUE_(p); /* no call of memset */
        *p++ = 0;
    }
}

KOPT_API_ kopt_scaler kopt_grad_scaler(void) {
    kopt_scaler s;
    s.scale = 65536;
    s.minimum = 0;
    s.growth = 2;
    s.backoff = 0.5;
    s.interval = 2000;
    s.hysteresis = 1;
    s.good = s.bad = 0;
    return s;
}

static kopt_result kopt_check_scaler_(const kopt_scaler *s) {
    const uint32_t scale = s == KOPT_NULL_ ? 0 : kopt_as_u32_(s->scale),
                   minimum = s == KOPT_NULL_ ? 0 : kopt_as_u32_(s->minimum);
    if (s == KOPT_NULL_) return KOPT_ERROR_NULL;
    if (scale < 0x00800000u || scale >= 0x7F800000u || minimum >= 0x7F800000u) return KOPT_ERROR_RANGE;
    if (!kopt_within_(s->growth, 1, 1e30) || !kopt_less_(1, s->growth)) return KOPT_ERROR_RANGE;
    if (!kopt_within_(s->backoff, 1e-30, 1) || !kopt_less_(s->backoff, 1)) return KOPT_ERROR_RANGE;
    return s->interval == 0 || s->hysteresis == 0 ? KOPT_ERROR_RANGE : KOPT_OK;
}

KOPT_API_ kopt_result kopt_scaler_update(kopt_scaler *s, int found_inf) {
    const kopt_result result = kopt_check_scaler_(s);
    kopt_environment_ environment;
    kopt_f64_ scale;
    if (result != KOPT_OK) return result;
    kopt_enter_(&environment);
    scale = kopt_bits_to_f64_(kopt_float_to_bits64_(s->scale));
    if (found_inf) {
        s->good = 0;
        if (s->bad != 0xFFFFFFFFu) s->bad++;
        if (s->bad >= s->hysteresis) {
            const kopt_f64_ least = kopt_bits_to_f64_(kopt_float_to_bits64_(kopt_as_f32_(0x00800000u)));
            scale = kopt_mul64_(scale, kopt_to_f64_(s->backoff));
            if (!kopt_less64_(scale, least)) s->scale = kopt_to_float_(scale); /* stays a normal float */
            if (kopt_as_u32_(s->scale) < kopt_as_u32_(s->minimum)) s->scale = s->minimum;
        }
    } else {
        s->bad = 0;
        if (++s->good >= s->interval) {
            const kopt_f64_ most =
                kopt_bits_to_f64_((KOPT_CAST_(uint64_t, 0x47EFFFFFu) << 32) + 0xF0000000u); /* 2^128 - 2^103 */
            scale = kopt_mul64_(scale, kopt_to_f64_(s->growth));
            if (kopt_less64_(scale, most)) s->scale = kopt_to_float_(scale); /* stays finite */
            s->good = 0;
        }
    }
    kopt_leave_(&environment);
    return KOPT_OK;
}

/* The step of a copy of opt, so that opt is as before whatever happens; norm may be NULL: no clipping. */
static KOPT_NOINLINE_ kopt_result kopt_scaled_step_(const kopt_scaler *scaler, const kopt_optimizer *opt,
                                                    const kopt_norm *norm, double max_norm, kopt_step *step) {
    const kopt_f64_ most = kopt_bits_to_f64_((KOPT_CAST_(uint64_t, 0x7FEFFFFFu) << 32) + 0xFFFFFFFFu); /* what is finite */
    kopt_result result = kopt_check_scaler_(scaler);
    kopt_environment_ environment;
    kopt_optimizer scaled;
    if (result == KOPT_OK) result = kopt_check_options_(opt);
    if (result != KOPT_OK) return result;
    if (!kopt_within64_(kopt_to_f64_(max_norm), kopt_to_f64_(0), most)) return KOPT_ERROR_RANGE;
    kopt_copy_noinline_(KOPT_POINTER_(kopt_byte_ *, &scaled), KOPT_CONST_POINTER_(const kopt_byte_ *, opt),
                        sizeof scaled);
    kopt_enter_(&environment);
    scaled.grad_scale =
        kopt_to_double_(kopt_div64_(kopt_to_f64_(opt->grad_scale), kopt_bits_to_f64_(kopt_float_to_bits64_(scaler->scale))));
    kopt_leave_(&environment);
    scaled.clip = norm == KOPT_NULL_ ? 1 : kopt_clip_coefficient(norm, max_norm, scaled.grad_scale);
    return kopt_step_begin(&scaled, step);
}

KOPT_API_ kopt_result kopt_scaler_begin(kopt_scaler *scaler, kopt_optimizer *opt, const kopt_norm *norm,
                                        double max_norm, kopt_step *step, int *skipped) {
    kopt_result result;
    if (norm == KOPT_NULL_ || step == KOPT_NULL_) return KOPT_ERROR_NULL;
    if (norm->nonfinite != 0) {
        kopt_step untaken; /* all that a step refuses is refused in one that is skipped, too */
        result = kopt_scaled_step_(scaler, opt, KOPT_NULL_, max_norm, &untaken);
        if (result == KOPT_OK) kopt_zero_(KOPT_POINTER_(kopt_byte_ *, step), sizeof *step);
    } else {
        result = kopt_scaled_step_(scaler, opt, norm, max_norm, step);
        if (result == KOPT_OK) opt->step = step->step;
    }
    if (result != KOPT_OK) return result;
    if (skipped != KOPT_NULL_) *skipped = norm->nonfinite != 0;
    return kopt_scaler_update(scaler, norm->nonfinite != 0);
}

KOPT_API_ kopt_result kopt_scaler_step(kopt_scaler *scaler, kopt_optimizer *opt, const kopt_tensor *tensors,
                                       size_t count, double max_norm, const kopt_closure *closure, int *skipped) {
    kopt_result result;
    kopt_norm norm;
    kopt_step step;
    size_t i;
    if (tensors == KOPT_NULL_ && count != 0) return KOPT_ERROR_NULL;
    /* all checks before the closure writes a gradient */
    result = kopt_scaled_step_(scaler, opt, KOPT_NULL_, max_norm, &step);
    if (result == KOPT_OK) result = kopt_check_list_(&step, tensors, count);
    if (result != KOPT_OK) return result;
    kopt_copy_padded_(KOPT_POINTER_(kopt_byte_ *, &norm), sizeof norm, KOPT_NULL_, 0); /* zeros */
    if (closure != KOPT_NULL_ && closure->evaluate != KOPT_NULL_) closure->evaluate(closure->user, scaler->scale);
    result = kopt_norm_add_grads(&norm, tensors, count);
    if (closure != KOPT_NULL_ && closure->reduce != KOPT_NULL_) closure->reduce(closure->user, &norm);
    if (result == KOPT_OK) result = kopt_scaler_begin(scaler, opt, &norm, max_norm, &step, skipped);
    for (i = 0; i < count && result == KOPT_OK && norm.nonfinite == 0; i++) kopt_run_tensor_(&step, &tensors[i]);
    return result;
}

/* ---- gradient accumulation ---- */

KOPT_API_ kopt_accumulator kopt_accumulator_of(void *sum, kopt_format format, void *residual, size_t n) {
    kopt_accumulator a;
    a.sum = sum;
    a.residual = residual;
    a.format = format;
    a.rounding = residual == KOPT_NULL_ ? KOPT_STOCHASTIC : KOPT_KAHAN;
    a.compensation_rounding = KOPT_STOCHASTIC;
    a.n = n;
    a.count = a.step = a.id = 0;
    a.seed = a.first_index = 0;
    a.made_ = KOPT_MADE_;
    return a;
}

static kopt_result kopt_check_accumulator_(const kopt_accumulator *a, const void *other, size_t other_size) {
    size_t sum, residual;
    kopt_result result;
    if (a == KOPT_NULL_) return KOPT_ERROR_NULL;
    if (a->made_ != KOPT_MADE_) return KOPT_ERROR_UNINITIALIZED;
    result = kopt_check_array_(a->sum, a->format, a->n);
    if (result != KOPT_OK) return result;
    if (KOPT_CAST_(unsigned, a->rounding) > KOPT_CAST_(unsigned, KOPT_EXACT)) return KOPT_ERROR_OPTION;
    if (KOPT_CAST_(unsigned, a->compensation_rounding) > 1u) return KOPT_ERROR_OPTION;
    if (a->first_index >> 63 != 0) return KOPT_ERROR_BOUNDS;
    sum = a->n * kopt_bytes_of_(a->format);
    residual = a->n * kopt_bytes_of_residual_(a->format, a->rounding);
    if (residual != 0 && a->residual == KOPT_NULL_) return KOPT_ERROR_NULL;
    if (kopt_overlap_(a->sum, sum, a->residual, residual) || kopt_overlap_(a->sum, sum, other, other_size) ||
        kopt_overlap_(a->residual, residual, other, other_size))
        return KOPT_ERROR_OVERLAP;
    return KOPT_OK;
}

/* An addition is a step of SGD on the sum with rate 1 and minus the scale. */
KOPT_API_ kopt_result kopt_accumulate(kopt_accumulator *a, const void *grad, kopt_format grad_format, double scale) {
    kopt_result result = kopt_check_array_(grad, grad_format, a == KOPT_NULL_ ? 0 : a->n);
    kopt_environment_ environment;
    kopt_job_ job;
    kopt_step s;
    size_t residual_bytes;
    if (result == KOPT_OK)
        result = kopt_check_accumulator_(a, grad, a == KOPT_NULL_ ? 0 : a->n * kopt_bytes_of_(grad_format));
    if (result != KOPT_OK) return result;
    if (!kopt_within_(scale, -3e38, 3e38)) return KOPT_ERROR_RANGE;
    if (a->step == 0xFFFFFFFFu || a->count == 0xFFFFFFFFu) return KOPT_ERROR_STEP;
    residual_bytes = kopt_bytes_of_residual_(a->format, a->rounding);
    kopt_zero_(KOPT_POINTER_(kopt_byte_ *, &s), sizeof s); /* 2 more than a multiple of 4 where alignment is 1 or 2 */
    kopt_zero_(KOPT_POINTER_(kopt_byte_ *, &job), sizeof job);
    s.rule = KOPT_SGD;
    s.weight_format = s.moment_format = a->format;
    s.rounding = a->rounding;
    s.moment_rounding = s.compensation_rounding = a->compensation_rounding;
    s.seed = a->seed;
    s.step = ++a->step;
    job.step = &s;
    job.weight = KOPT_CAST_(kopt_byte_ *, a->sum);
    job.residual = KOPT_CAST_(kopt_byte_ *, a->residual);
    kopt_copy_noinline_(KOPT_POINTER_(kopt_byte_ *, &job.grad), KOPT_CONST_POINTER_(const kopt_byte_ *, &grad),
                        sizeof grad);
    job.grad_format = grad_format;
    job.moment_format = a->format;
    job.end = a->n;
    job.first = a->first_index;
    job.id = a->id;
    job.stream = KOPT_RANDOM_ACCUMULATE_;
    job.rate = 1;
    if (a->count++ == 0 && a->n != 0) { /* the old sum is not read */
        kopt_zero_(job.weight, a->n * kopt_bytes_of_(a->format));
        if (residual_bytes != 0) kopt_zero_(job.residual, a->n * residual_bytes);
    }
    kopt_enter_(&environment);
    s.grad_scale = kopt_as_f32_(kopt_as_u32_(kopt_narrow64_(scale)) ^ 0x80000000u);
    if (a->n != 0) (KOPT_KERNEL_(step))(&job);
    kopt_leave_(&environment);
    return KOPT_OK;
}

KOPT_API_ kopt_result kopt_accumulator_read(const kopt_accumulator *a, float *out) {
    kopt_result result = kopt_check_accumulator_(a, out, a == KOPT_NULL_ ? 0 : a->n * 4);
    const kopt_byte_ *sum, *residual;
    kopt_environment_ environment;
    kopt_optimizer like; /* whose weights are stored like this sum; only two fields are read */
    size_t i, size, residual_size;
    if (result != KOPT_OK || a->n == 0) return result;
    if (out == KOPT_NULL_) return KOPT_ERROR_NULL;
    like.weight_format = a->format;
    like.rounding = a->rounding;
    size = kopt_bytes_of_(a->format);
    residual_size = kopt_bytes_of_residual_(a->format, a->rounding);
    sum = KOPT_CAST_(const kopt_byte_ *, a->sum);
    residual = KOPT_CAST_(const kopt_byte_ *, a->residual);
    kopt_enter_(&environment);
    for (i = 0; i < a->n; i++) {
        uint32_t value = 0;
        if (a->count != 0)
            value = kopt_as_u32_(kopt_read_weight_(&like, sum + i * size,
                                                   residual_size == 0 ? KOPT_NULL_ : residual + i * residual_size));
        KOPT_OPAQUE_(value);
        kopt_store32_(KOPT_POINTER_(kopt_byte_ *, out) + 4 * i, value);
    }
    kopt_leave_(&environment);
    return KOPT_OK;
}

/* ---- gradient compression ---- */

/* In blocks of 256, with the conversions of the kernels between them. */

KOPT_API_ kopt_compressor kopt_compressor_of(kopt_format code, void *residual, size_t n) {
    kopt_compressor c;
    c.code = code;
    c.rounding = residual == KOPT_NULL_ ? KOPT_STOCHASTIC : KOPT_NEAREST;
    c.residual = residual;
    c.residual_format = KOPT_BF16;
    c.residual_rounding = KOPT_STOCHASTIC;
    c.n = n;
    c.step = c.id = 0;
    c.seed = c.first_index = 0;
    c.made_ = KOPT_MADE_;
    return c;
}

/* Where the code of element n begins, or ends. */
static KOPT_HOST_DEVICE_ size_t kopt_code_at_(kopt_format code, size_t n) {
    return code == KOPT_Q8     ? n + 4 * kopt_blocks_(n)
           : code == KOPT_SIGN ? n / 8 + (n % 8 != 0) + 4 * kopt_blocks_(n)
                               : 2 * n;
}

static int kopt_code_valid_(kopt_format code) {
    if (!KOPT_HAS_(KOPT_WITH_COMPRESSION)) return 0;
    return code == KOPT_SIGN || (code != KOPT_F32 && kopt_in_(KOPT_FORMATS_, KOPT_CAST_(int, code)));
}

KOPT_API_ size_t kopt_compressed_size(kopt_format code, size_t n) {
    return kopt_code_valid_(code) && kopt_n_valid_(n) ? kopt_code_at_(code, n) : 0;
}

static kopt_result kopt_check_compressor_(const kopt_compressor *c, const void *out, size_t out_size, const void *grad,
                                          kopt_format grad_format) {
    kopt_result result;
    size_t size, grad_size, residual_size = 0;
    if (c == KOPT_NULL_) return KOPT_ERROR_NULL;
    if (c->made_ != KOPT_MADE_) return KOPT_ERROR_UNINITIALIZED;
    result = kopt_check_array_(grad, grad_format, c->n);
    if (result != KOPT_OK) return result;
    if (!kopt_code_valid_(c->code) || KOPT_CAST_(unsigned, c->rounding) > 1u) return KOPT_ERROR_OPTION;
    if (c->residual != KOPT_NULL_) {
        if (!kopt_format_valid_(c->residual_format) || KOPT_CAST_(unsigned, c->residual_rounding) > 1u)
            return KOPT_ERROR_OPTION;
        if (c->code == KOPT_SIGN && c->rounding == KOPT_STOCHASTIC) return KOPT_ERROR_OPTION;
        residual_size = c->n * kopt_bytes_of_(c->residual_format);
    }
    if (c->first_index >> 63 != 0) return KOPT_ERROR_BOUNDS;
    if ((c->code == KOPT_Q8 || c->code == KOPT_SIGN) && c->first_index % KOPT_BLOCK_ != 0) return KOPT_ERROR_BOUNDS;
    if (c->step == 0xFFFFFFFFu) return KOPT_ERROR_STEP;
    size = kopt_code_at_(c->code, c->n);
    grad_size = c->n * kopt_bytes_of_(grad_format);
    if (out == KOPT_NULL_ && size != 0) return KOPT_ERROR_NULL;
    if (out_size < size) return KOPT_ERROR_SIZE;
    if (kopt_overlap_(out, size, grad, grad_size) || kopt_overlap_(out, size, c->residual, residual_size) ||
        kopt_overlap_(grad, grad_size, c->residual, residual_size))
        return KOPT_ERROR_OVERLAP;
    return KOPT_OK;
}

/* By words: -Ofast takes it that no operand of a choice between floats is NaN. */
KOPT_INLINE_ float kopt_canonical_nan_(float x) {
    const uint32_t u = kopt_as_u32_(x);
    return kopt_as_f32_((u & 0x7FFFFFFFu) > 0x7F800000u ? 0x7FC00000u : u);
}

/* x and y are parts of arrays of any format. v: the random bits, if any; their stream is in v->stochastic. */
static KOPT_NOINLINE_ void kopt_move_(kopt_conversion_ *v, kopt_byte_ *to, kopt_format to_format,
                                      const kopt_byte_ *from, kopt_format from_format, int stream) {
    v->dst = to;
    v->src = from;
    v->dst_format = to_format;
    v->src_format = from_format;
    v->stochastic = stream;
    KOPT_KERNEL_(convert)(v);
}

/* One more magnitude for the mean of a block. */
KOPT_INLINE_ float kopt_more_(float mean, uint32_t mag) {
    return kopt_add_(mean, kopt_mul_(kopt_as_f32_(mag), 1.0f / 256));
}

/* The scale of a block of KOPT_Q8 or KOPT_SIGN, from its largest magnitude and the sum of |x| / 256. */
static KOPT_HOST_DEVICE_ uint32_t kopt_scale_of_(kopt_format code, uint32_t largest, float mean, size_t n,
                                                 int stochastic) {
    if (KOPT_HAS_(KOPT_WITH_Q8) && code == KOPT_Q8) return kopt_scale_q8_(largest, 0);
    if (stochastic) return kopt_scale_(largest);
    if (n < KOPT_BLOCK_) mean = kopt_mul_(mean, kopt_div_(256.0f, KOPT_CAST_(float, n)));
    return kopt_scale_(kopt_as_u32_(mean));
}

/* The bit of KOPT_SIGN. */
static KOPT_HOST_DEVICE_ uint32_t kopt_sign_of_(float x, uint32_t scale, int stochastic, uint32_t random16) {
    float y;
    if (scale == 0 || scale == 0x7FC00000u) return 0;
    if (!stochastic) return kopt_as_u32_(x) >> 31;
    y = kopt_add_(kopt_div_(x, kopt_as_f32_(scale)), 1.0f);
    return !kopt_above_(kopt_mul_(y, 32768.0f), kopt_add_(KOPT_CAST_(float, random16), 0.5f));
}

/* What the code y of x lacks, if a residual can hold it. */
static KOPT_HOST_DEVICE_ float kopt_lost_(float x, float y, kopt_format format) {
    const uint32_t limit = format == KOPT_F32 ? 0x7F800000u : format == KOPT_BF16 ? 0x7F7F8000u : 0x477FF000u;
    const uint32_t lost = kopt_as_u32_(kopt_sub_(x, y));
    return kopt_as_f32_((lost & 0x7FFFFFFFu) < limit ? lost : 0);
}

/* sum + y * scale */
KOPT_INLINE_ float kopt_sum_with_(float sum, float y, float scale) {
    return kopt_canonical_nan_(kopt_add_(sum, kopt_as_u32_(scale) == 0x3F800000u ? y : kopt_mul_(y, scale)));
}

/* One block of KOPT_Q8 or KOPT_SIGN; drawn may be NULL: nearest. */
static KOPT_NOINLINE_ void kopt_pack_(kopt_byte_ *out, kopt_format code, const float *x, size_t n, kopt_drawn_ *drawn) {
    uint32_t largest = 0, scale, bits = 0;
    float mean = 0;
    size_t i;
    for (i = 0; i < n; i++) {
        const uint32_t mag = kopt_as_u32_(x[i]) & 0x7FFFFFFFu;
        if (mag > largest) largest = mag;
        mean = kopt_more_(mean, mag);
    }
    scale = kopt_scale_of_(code, largest, mean, n, drawn != KOPT_NULL_);
    kopt_put_(out, scale, 4);
    if (KOPT_HAS_(KOPT_WITH_Q8) && code == KOPT_Q8) {
        kopt_encode_(out + 4, scale, KOPT_CONST_POINTER_(const kopt_byte_ *, x), n, 0, drawn);
        return;
    }
    for (i = 0; i < n; i++) {
        const uint32_t minus =
            kopt_sign_of_(x[i], scale, drawn != KOPT_NULL_, drawn == KOPT_NULL_ ? 0 : kopt_draw16_(drawn, i));
        bits |= minus << (i % 8);
        if (i % 8 == 7 || i == n - 1) {
            KOPT_OPAQUE_(bits); /* no call of memset */
            out[4 + i / 8] = KOPT_CAST_(kopt_byte_, bits);
            bits = 0;
        }
    }
}

/* Elements i to i + n of the code, as fp32 in y; they are of one block, and i is a multiple of 8. */
static KOPT_NOINLINE_ void kopt_decode_(kopt_byte_ *y, const kopt_byte_ *in, kopt_format code, size_t i, size_t n) {
    const size_t at = code == KOPT_SIGN || code == KOPT_Q8 ? i % KOPT_BLOCK_ : 0;
    kopt_conversion_ v;
    size_t k;
    in += kopt_code_at_(code, i - at);
    if (code == KOPT_SIGN) {
        const uint32_t scale = kopt_little32_(in);
        const kopt_byte_ *const bits = in + 4 + at / 8;
        for (k = 0; k < n; k++) {
            const uint32_t bit = KOPT_CAST_(uint32_t, bits[k / 8]) >> (k % 8);
            kopt_store32_(y + 4 * k, scale ^ bit << 31);
        }
    } else if (KOPT_HAS_(KOPT_WITH_Q8) && code == KOPT_Q8) {
        kopt_byte_ scale[4];
        kopt_store32_(scale, kopt_little32_(in));
        kopt_dequantise_(y, in + 4 + at, scale, n, 0);
    } else {
        v.n = n;
        kopt_move_(&v, y, KOPT_F32, in, code, 0);
    }
}

/* Block by block: x is the gradient with its residual, and then the new residual; y, by parts, the old one, and what is
   decoded. */
static KOPT_NOINLINE_ void kopt_compress_(const kopt_compressor *c, kopt_byte_ *out, const kopt_byte_ *grad,
                                          kopt_format grad_format) {
    const size_t grad_size = kopt_bytes_of_(grad_format), residual_size = kopt_bytes_of_(c->residual_format);
    const int stochastic = c->rounding == KOPT_STOCHASTIC, blocks = c->code == KOPT_Q8 || c->code == KOPT_SIGN;
    kopt_byte_ *const residual = KOPT_CAST_(kopt_byte_ *, c->residual);
    kopt_conversion_ v;
    kopt_drawn_ drawn;
    float x[KOPT_BLOCK_], y[KOPT_PART_];
    kopt_byte_ *const xs = KOPT_POINTER_(kopt_byte_ *, x), *const ys = KOPT_POINTER_(kopt_byte_ *, y);
    size_t i, n, at, k;
    kopt_drawn_of_(&drawn, c->seed, c->step, c->id, KOPT_RANDOM_COMPRESS_);
    v.seed = c->seed;
    v.step = c->step;
    v.id = c->id;
    for (i = 0; i < c->n; i += n) {
        kopt_byte_ *const to = out + kopt_code_at_(c->code, i);
        kopt_byte_ *const rest = residual == KOPT_NULL_ ? KOPT_NULL_ : residual + i * residual_size;
        n = c->n - i < KOPT_BLOCK_ ? c->n - i : KOPT_BLOCK_;
        v.n = n;
        v.first = drawn.first = c->first_index + i;
        kopt_move_(&v, xs, KOPT_F32, grad + i * grad_size, grad_format, 0);
        for (at = 0; residual != KOPT_NULL_ && c->step > 1 && at < n; at += v.n) {
            v.n = n - at < KOPT_PART_ ? n - at : KOPT_PART_;
            kopt_move_(&v, ys, KOPT_F32, rest + at * residual_size, c->residual_format, 0);
            for (k = 0; k < v.n; k++) x[at + k] = kopt_add_(x[at + k], y[k]);
        }
        v.n = n;
        for (k = 0; k < n; k++) x[k] = kopt_canonical_nan_(x[k]);
        if (blocks)
            kopt_pack_(to, c->code, x, n, stochastic ? &drawn : KOPT_NULL_);
        else
            kopt_move_(&v, to, c->code, xs, KOPT_F32, stochastic ? KOPT_RANDOM_COMPRESS_ : 0);
        if (residual == KOPT_NULL_) continue;
        for (at = 0; at < n; at += KOPT_PART_) {
            const size_t part = n - at < KOPT_PART_ ? n - at : KOPT_PART_;
            const kopt_format format = c->residual_format;
            float *const rests = x + at;
            kopt_decode_(ys, out, c->code, i + at, part);
            for (k = 0; k < part; k++) rests[k] = kopt_lost_(rests[k], y[k], format);
        }
        kopt_move_(&v, rest, c->residual_format, xs, KOPT_F32,
                   c->residual_rounding == KOPT_STOCHASTIC ? KOPT_RANDOM_RESIDUAL_ : 0);
    }
}

KOPT_API_ kopt_result kopt_compress(kopt_compressor *c, void *out, size_t out_size, const void *grad,
                                    kopt_format grad_format) {
    const kopt_result result = kopt_check_compressor_(c, out, out_size, grad, grad_format);
    kopt_environment_ environment;
    if (!KOPT_HAS_(KOPT_WITH_COMPRESSION)) return KOPT_ERROR_OPTION;
    if (result != KOPT_OK) return result;
    c->step++;
    kopt_enter_(&environment);
    kopt_compress_(c, KOPT_CAST_(kopt_byte_ *, out), KOPT_CAST_(const kopt_byte_ *, grad), grad_format);
    kopt_leave_(&environment);
    return KOPT_OK;
}

KOPT_API_ kopt_result kopt_decompress_add(void *sum, kopt_format format, const void *in, size_t in_size,
                                          kopt_format code, size_t n, double scale) {
    const kopt_result result = kopt_check_array_(sum, format, n);
    const size_t size = kopt_bytes_of_(format);
    kopt_environment_ environment;
    kopt_conversion_ v;
    float x[KOPT_PART_], y[KOPT_PART_], factor;
    size_t i, k, in_bytes;
    if (!KOPT_HAS_(KOPT_WITH_COMPRESSION)) return KOPT_ERROR_OPTION;
    if (result != KOPT_OK) return result;
    if (!kopt_code_valid_(code)) return KOPT_ERROR_OPTION;
    if (!kopt_within_(scale, -3e38, 3e38)) return KOPT_ERROR_RANGE;
    in_bytes = kopt_code_at_(code, n);
    if (in == KOPT_NULL_ && in_bytes != 0) return KOPT_ERROR_NULL;
    if (in_size < in_bytes) return KOPT_ERROR_SIZE;
    if (kopt_overlap_(sum, n * size, in, in_bytes)) return KOPT_ERROR_OVERLAP;
    kopt_enter_(&environment);
    factor = kopt_narrow64_(scale);
    for (i = 0; i < n; i += v.n) {
        kopt_byte_ *const to = KOPT_CAST_(kopt_byte_ *, sum) + i * size;
        v.n = n - i < KOPT_PART_ ? n - i : KOPT_PART_;
        kopt_decode_(KOPT_POINTER_(kopt_byte_ *, y), KOPT_CAST_(const kopt_byte_ *, in), code, i, v.n);
        kopt_move_(&v, KOPT_POINTER_(kopt_byte_ *, x), KOPT_F32, to, format, 0);
        for (k = 0; k < v.n; k++) x[k] = kopt_sum_with_(x[k], y[k], factor);
        kopt_move_(&v, to, format, KOPT_POINTER_(kopt_byte_ *, x), KOPT_F32, 0);
    }
    kopt_leave_(&environment);
    return KOPT_OK;
}

/* ---- reduction ---- */

KOPT_API_ kopt_result kopt_reduce(void *out, kopt_format out_format, const void *const *shards, size_t count,
                                  kopt_format format, size_t n, double scale) {
    const kopt_result result = kopt_check_array_(out, out_format, n);
    kopt_environment_ environment;
    kopt_tool_ t;
    size_t k;
    if (result != KOPT_OK) return result;
    if (!kopt_format_valid_(format)) return KOPT_ERROR_OPTION;
    if (count == 0 || !kopt_within_(scale, -3e38, 3e38)) return KOPT_ERROR_RANGE;
    if (!kopt_n_valid_(count)) return KOPT_ERROR_BOUNDS;
    if (n == 0) return KOPT_OK;
    if (shards == KOPT_NULL_) return KOPT_ERROR_NULL;
    if (kopt_overlap_(out, n * kopt_bytes_of_(out_format), shards, count * sizeof *shards)) return KOPT_ERROR_OVERLAP;
    for (k = 0; k < count; k++) {
        if (shards[k] == KOPT_NULL_) return KOPT_ERROR_NULL;
        if (shards[k] == out && format == out_format) continue;
        if (kopt_overlap_(out, n * kopt_bytes_of_(out_format), shards[k], n * kopt_bytes_of_(format)))
            return KOPT_ERROR_OVERLAP;
    }
    kopt_enter_(&environment);
    t.scale = kopt_narrow64_(scale);
    kopt_leave_(&environment);
    t.kind = KOPT_TOOL_SUM_;
    t.dst = KOPT_CAST_(kopt_byte_ *, out);
    t.dst_format = out_format;
    t.src_format = format;
    t.shards = shards;
    t.count = count;
    t.n = n;
    kopt_use_tool_(&t);
    return KOPT_OK;
}

/* ---- conversions of arrays ---- */

static kopt_result kopt_convert_run_(const kopt_conversion_ *c) {
    kopt_environment_ environment;
    if (!kopt_format_valid_(c->dst_format) || !kopt_format_valid_(c->src_format)) return KOPT_ERROR_OPTION;
    if (!kopt_n_valid_(c->n) || c->first >> 63 != 0) return KOPT_ERROR_BOUNDS;
    if (c->n == 0) return KOPT_OK;
    if (c->dst == KOPT_NULL_ || c->src == KOPT_NULL_) return KOPT_ERROR_NULL;
    if (kopt_overlap_(c->dst, c->n * kopt_bytes_of_(c->dst_format), c->src, c->n * kopt_bytes_of_(c->src_format)))
        return KOPT_ERROR_OVERLAP;
    kopt_enter_(&environment);
    KOPT_KERNEL_(convert)(c);
    kopt_leave_(&environment);
    return KOPT_OK;
}

KOPT_API_ kopt_result kopt_convert(void *dst, kopt_format dst_format, const void *src, kopt_format src_format,
                                   size_t n) {
    kopt_conversion_ c;
    c.dst = KOPT_CAST_(kopt_byte_ *, dst);
    c.src = KOPT_CAST_(const kopt_byte_ *, src);
    c.dst_format = dst_format;
    c.src_format = src_format;
    c.n = n;
    c.stochastic = 0;
    c.seed = c.first = 0;
    c.step = c.id = 0;
    return kopt_convert_run_(&c);
}

KOPT_API_ kopt_result kopt_convert_stochastic(void *dst, kopt_format dst_format, const void *src,
                                              kopt_format src_format, size_t n, kopt_random_key key) {
    kopt_conversion_ c;
    c.dst = KOPT_CAST_(kopt_byte_ *, dst);
    c.src = KOPT_CAST_(const kopt_byte_ *, src);
    c.dst_format = dst_format;
    c.src_format = src_format;
    c.n = n;
    c.stochastic = KOPT_RANDOM_CONVERT_;
    c.seed = key.seed;
    c.first = key.first_index;
    c.step = key.step;
    c.id = key.id;
    return kopt_convert_run_(&c);
}

KOPT_API_ int kopt_all_finite(const void *x, kopt_format format, size_t n) {
    if (!kopt_format_valid_(format) || !kopt_n_valid_(n) || (x == KOPT_NULL_ && n != 0)) return 0;
    return KOPT_KERNEL_(all_finite)(KOPT_CAST_(const kopt_byte_ *, x), format, n);
}

#ifdef KAHAN_OPT_VMATH
/* ---- vector mathematics: the built-in table ---- */

#define KOPT_VMATH_TILE_ 256

static void kopt_vmath_run_(kopt_vmath_kind_ kind, float *out, float *out2, const float *in, const float *in2,
                            size_t n) {
    kopt_vmath_job_ j;
    kopt_environment_ environment;
    kopt_zero_(KOPT_POINTER_(kopt_byte_ *, &j), sizeof j);
    j.kind = kind;
    j.f = KOPT_EXP;
    j.format = KOPT_F32;
    j.n = n;
    j.in = KOPT_CONST_POINTER_(const kopt_byte_ *, in);
    j.in2 = KOPT_CONST_POINTER_(const kopt_byte_ *, in2);
    j.out = KOPT_POINTER_(kopt_byte_ *, out);
    j.out2 = KOPT_POINTER_(kopt_byte_ *, out2);
    kopt_enter_(&environment);
    KOPT_KERNEL_(vmath)(&j);
    kopt_leave_(&environment);
}

#define KOPT_BUILTIN_(name, kind)                                              \
    static void kopt_builtin_##name##_(float *out, const float *x, size_t n) { \
        kopt_vmath_run_(kind, out, KOPT_NULL_, x, KOPT_NULL_, n);              \
    }
KOPT_BUILTIN_(exp, KOPT_VMATH_EXP_)
KOPT_BUILTIN_(log, KOPT_VMATH_LOG_)
KOPT_BUILTIN_(tanh, KOPT_VMATH_TANH_)
KOPT_BUILTIN_(erf, KOPT_VMATH_ERF_)
KOPT_BUILTIN_(erfc, KOPT_VMATH_ERFC_)
#undef KOPT_BUILTIN_
static void kopt_builtin_atan2_(float *out, const float *y, const float *x, size_t n) {
    kopt_vmath_run_(KOPT_VMATH_ATAN2_, out, KOPT_NULL_, y, x, n);
}
static void kopt_builtin_sincospi_(float *sine, float *cosine, const float *x, size_t n) {
    kopt_vmath_run_(KOPT_VMATH_SINCOSPI_, sine, cosine, x, KOPT_NULL_, n);
}

#define KOPT_BUILTIN_(isa)                                                           \
    {"builtin " #isa,   kopt_builtin_exp_,  kopt_builtin_log_,   kopt_builtin_tanh_, \
     kopt_builtin_erf_, kopt_builtin_erfc_, kopt_builtin_atan2_, kopt_builtin_sincospi_}
static const kopt_vmath kopt_builtin_table_[KOPT_ISA_COUNT] = {
    KOPT_BUILTIN_(scalar), KOPT_BUILTIN_(sse2), KOPT_BUILTIN_(avx2), KOPT_BUILTIN_(avx512), KOPT_BUILTIN_(neon)};
#undef KOPT_BUILTIN_

KOPT_API_ const kopt_vmath *kopt_vmath_builtin(void) { return &kopt_builtin_table_[kopt_isa_current()]; }

/* ---- vector mathematics by SLEEF ---- */

/* Only names that 3.5.1, 3.9 and 4.0 have, and that give the same bits in each of them on each machine. They are
   declared under names of our own, without vector types: clang passes vectors wrongly, without a word, from a file that
   is compiled without -mavx512f (LLVM issue 64706), function attributes or not. Lines of assembly call them. */

#if defined(KAHAN_OPT_SLEEF) && defined(KOPT_GNU_) && \
    ((defined(KOPT_X86_) && defined(__x86_64__) && !defined(_WIN32) && !defined(__ILP32__)) || defined(KOPT_NEON_))
typedef void kopt_sleef_raw_(void); /* not their type: nothing calls them by it */
enum {
    KOPT_SLEEF_EXP_,
    KOPT_SLEEF_LOG_,
    KOPT_SLEEF_TANH_,
    KOPT_SLEEF_ERF_,
    KOPT_SLEEF_ERFC_,
    KOPT_SLEEF_ATAN2_,
    KOPT_SLEEF_SINCOSPI_
};

#ifdef __cplusplus
#define KOPT_SLEEF_AS_(type, f) reinterpret_cast<type>(f)
#else
#define KOPT_SLEEF_AS_(type, f) ((type)(f))
#endif

#ifdef KOPT_X86_
/* out[i] = f(a[i], b[i]), whole vectors, so many bytes of each; or one vector, *pair = f(*a): a structure of two comes
   back through its address. The loop is in here, in registers that a function keeps: with a call of ours for each
   vector a step by Adam-atan2 is 6 % slower. */
#define KOPT_SLEEF_CALL_(width, target, r, more)                                                                      \
    static KOPT_NOINLINE_ KOPT_TARGET_(target) void kopt_sleef_call_##width##_(kopt_sleef_raw_ *f, kopt_byte_ *out,   \
                                                                               kopt_byte_ *pair, const kopt_byte_ *a, \
                                                                               const kopt_byte_ *b, size_t bytes) {   \
        __asm__ __volatile__("mov{q %%rax, %%r15| r15, rax}\n\t"                                                      \
                             "mov{q %%rcx, %%r13| r13, rcx}\n\t"                                                      \
                             "mov{q %%rdx, %%r14| r14, rdx}\n\t"                                                      \
                             "xor{l %%r12d, %%r12d| r12d, r12d}\n\t"                                                  \
                             "mov{q %%rsp, %%rax| rax, rsp}\n\t"                                                      \
                             "sub{q $256, %%rsp| rsp, 256}\n\t" /* below the red zone */                              \
                             "and{q $-64, %%rsp| rsp, -64}\n\t"                                                       \
                             "mov{q %%rax, (%%rsp)| [rsp], rax}\n\t"                                                  \
                             "mov{q %%rsi, 8(%%rsp)| [rsp + 8], rsi}\n\t"                                             \
                             "2:\n\t"                                                                                 \
                             "vmovups {(%%r13,%%r12), %%" r "0|" r "0, [r13 + r12]}\n\t"                              \
                             "vmovups {(%%r14,%%r12), %%" r "1|" r "1, [r14 + r12]}\n\t"                              \
                             "call {*%%r15|r15}\n\t"                                                                  \
                             "vmovups {%%" r "0, (%%rbx,%%r12)|[rbx + r12], " r "0}\n\t"                              \
                             "add{q $" #width "/8, %%r12| r12, " #width "/8}\n\t"                                     \
                             "cmp{q 8(%%rsp), %%r12| r12, [rsp + 8]}\n\t"                                             \
                             "jb 2b\n\t"                                                                              \
                             "mov{q (%%rsp), %%rsp| rsp, [rsp]}\n\t"                                                  \
                             "vzeroupper"                                                                             \
                             : "+a"(f), "+D"(pair), "+c"(a), "+d"(b), "+S"(bytes)                                     \
                             : "b"(out)                                                                               \
                             : "r8", "r9", "r10", "r11", "r12", "r13", "r14", "r15", "cc", "memory", "xmm0", "xmm1",  \
                               "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10", "xmm11",      \
                               "xmm12", "xmm13", "xmm14", "xmm15" more);                                              \
    }
#define KOPT_SLEEF_LOW_
#define KOPT_SLEEF_ALL_                                                                                           \
    , "xmm16", "xmm17", "xmm18", "xmm19", "xmm20", "xmm21", "xmm22", "xmm23", "xmm24", "xmm25", "xmm26", "xmm27", \
        "xmm28", "xmm29", "xmm30", "xmm31", "k1", "k2", "k3", "k4", "k5", "k6", "k7"
KOPT_SLEEF_CALL_(512, "avx512f", "zmm", KOPT_SLEEF_ALL_)
KOPT_SLEEF_CALL_(256, "avx2", "ymm", KOPT_SLEEF_LOW_)
KOPT_SLEEF_CALL_(128, "avx2", "xmm", KOPT_SLEEF_LOW_)
#undef KOPT_SLEEF_CALL_
#undef KOPT_SLEEF_LOW_
#undef KOPT_SLEEF_ALL_
#define KOPT_SLEEF_KIND_(what) /* the three kinds are called alike */
#else
typedef struct kopt_sleef_two_ {
    float32x4_t first, second;
} kopt_sleef_two_;
static KOPT_NOINLINE_ void kopt_sleef_call_128_(kopt_sleef_raw_ *f, kopt_byte_ *out, kopt_byte_ *pair,
                                                const kopt_byte_ *a, const kopt_byte_ *b, size_t bytes, int what) {
    size_t i;
    for (i = 0; i < bytes; i += 16) {
        const float32x4_t x = vreinterpretq_f32_u8(vld1q_u8(a + i)), y = vreinterpretq_f32_u8(vld1q_u8(b + i));
        if (what == KOPT_SLEEF_SINCOSPI_) {
            const kopt_sleef_two_ two = KOPT_SLEEF_AS_(kopt_sleef_two_(*)(float32x4_t), f)(x);
            vst1q_u8(pair, vreinterpretq_u8_f32(two.first));
            vst1q_u8(pair + 16, vreinterpretq_u8_f32(two.second));
        } else if (what == KOPT_SLEEF_ATAN2_) {
            vst1q_u8(out + i, vreinterpretq_u8_f32(KOPT_SLEEF_AS_(float32x4_t(*)(float32x4_t, float32x4_t), f)(x, y)));
        } else {
            vst1q_u8(out + i, vreinterpretq_u8_f32(KOPT_SLEEF_AS_(float32x4_t(*)(float32x4_t), f)(x)));
        }
    }
}
#define KOPT_SLEEF_KIND_(what) , what
#endif

#define KOPT_SLEEF_TEXT2_(x) #x
#define KOPT_SLEEF_TEXT_(x) KOPT_SLEEF_TEXT2_(x)
#define KOPT_SLEEF_NAME_(own, name) KOPT_EXTERN_ void own(void) __asm__(KOPT_SLEEF_TEXT_(__USER_LABEL_PREFIX__) name)
#define KOPT_SLEEF_UNARY_(width, name) static void kopt_sleef_##name##_##width##_(float *out, const float *x, size_t n)

/* SLEEF's cospi is 0 from some |x| on that differs between versions: from 2^22 on the built-in takes over. */
static void kopt_sleef_mend_(float *sine, float *cosine, const kopt_byte_ *x, size_t n) {
    size_t i;
    for (i = 0; i < n; i++) {
        const uint32_t word = kopt_load32_(x + 4 * i);
        if ((word & 0x7FFFFFFFu) >= 0x4A800000u && (word & 0x7FFFFFFFu) < 0x7F800000u) {
            const float value = kopt_as_f32_(word);
            kopt_vmath_run_(KOPT_VMATH_SINCOSPI_, sine + i, cosine + i, &value, KOPT_NULL_, 1);
        }
    }
}

/* One width: the declarations, the loop, the seven functions and their table. A tail is padded to a whole vector. A
   step, which is in the environment already, calls the loop itself. */
#define KOPT_SLEEF_FORM_(width, lanes, suffix, title)                                                                 \
    KOPT_SLEEF_NAME_(kopt_sleef_exp_raw_##width##_, "Sleef_expf" lanes "_u10" suffix);                                \
    KOPT_SLEEF_NAME_(kopt_sleef_log_raw_##width##_, "Sleef_logf" lanes "_u10" suffix);                                \
    KOPT_SLEEF_NAME_(kopt_sleef_tanh_raw_##width##_, "Sleef_tanhf" lanes "_u10" suffix);                              \
    KOPT_SLEEF_NAME_(kopt_sleef_erf_raw_##width##_, "Sleef_erff" lanes "_u10" suffix);                                \
    KOPT_SLEEF_NAME_(kopt_sleef_erfc_raw_##width##_, "Sleef_erfcf" lanes "_u15" suffix);                              \
    KOPT_SLEEF_NAME_(kopt_sleef_atan2_raw_##width##_, "Sleef_atan2f" lanes "_u10" suffix);                            \
    KOPT_SLEEF_NAME_(kopt_sleef_sincospi_raw_##width##_, "Sleef_sincospif" lanes "_u05" suffix);                      \
    KOPT_SLEEF_NAME_(kopt_sleef_tanh_fast_##width##_, "Sleef_tanhf" lanes "_u35" suffix);                             \
    KOPT_SLEEF_NAME_(kopt_sleef_atan_fast_##width##_, "Sleef_atanf" lanes "_u35" suffix);                             \
    static void kopt_sleef_one_##width##_(kopt_sleef_raw_ *f, int what, float *out, float *out2, const float *x,      \
                                          const float *y, size_t n) {         /* up to one vector */                  \
        kopt_byte_ room[7 * 64], *at = room + (0 - KOPT_ADDRESS_(room)) % 64; /* pair (128), x, y, out */             \
        kopt_byte_ *to = KOPT_POINTER_(kopt_byte_ *, out);                                                            \
        kopt_copy_padded_(at + 128, 64, KOPT_CONST_POINTER_(const kopt_byte_ *, x), 4 * n);                           \
        kopt_copy_padded_(at + 192, 64, KOPT_CONST_POINTER_(const kopt_byte_ *, y), 4 * n);                           \
        kopt_sleef_call_##width##_(f, at + 256, at, at + 128, at + 192, width / 8 KOPT_SLEEF_KIND_(what));            \
        kopt_copy_noinline_(to, what == KOPT_SLEEF_SINCOSPI_ ? at : at + 256, 4 * n);                                 \
        if (what != KOPT_SLEEF_SINCOSPI_) return;                                                                     \
        kopt_copy_noinline_(KOPT_POINTER_(kopt_byte_ *, out2), at + width / 8, 4 * n);                                \
        kopt_sleef_mend_(out, out2, at + 128, n);                                                                     \
    }                                                                                                                 \
    static void kopt_sleef_loop_##width##_(kopt_sleef_raw_ *f, int what, float *out, float *out2, const float *x,     \
                                           const float *y, size_t n) {                                                \
        const size_t count = width / 32, whole = what == KOPT_SLEEF_SINCOSPI_ ? 0 : n / count * count;                \
        size_t i, m;                                                                                                  \
        if (whole != 0)                                                                                               \
            kopt_sleef_call_##width##_(f, KOPT_POINTER_(kopt_byte_ *, out), KOPT_NULL_,                               \
                                       KOPT_CONST_POINTER_(const kopt_byte_ *, x),                                    \
                                       KOPT_CONST_POINTER_(const kopt_byte_ *, y), 4 * whole KOPT_SLEEF_KIND_(what)); \
        for (i = whole; i < n; i += m) {                                                                              \
            m = n - i < count ? n - i : count;                                                                        \
            kopt_sleef_one_##width##_(f, what, out + i, out2 + i, x + i, y + i, m);                                   \
        }                                                                                                             \
    }                                                                                                                 \
    static void kopt_sleef_run_##width##_(kopt_sleef_raw_ *f, int what, float *out, float *out2, const float *x,      \
                                          const float *y, size_t n) {                                                 \
        kopt_environment_ environment;                                                                                \
        kopt_enter_(&environment);                                                                                    \
        kopt_sleef_loop_##width##_(f, what, out, out2, x, y, n);                                                      \
        kopt_leave_(&environment);                                                                                    \
    }                                                                                                                 \
    KOPT_SLEEF_UNARY_(width, exp) { kopt_sleef_run_##width##_(kopt_sleef_exp_raw_##width##_, 0, out, out, x, x, n); } \
    KOPT_SLEEF_UNARY_(width, log) { kopt_sleef_run_##width##_(kopt_sleef_log_raw_##width##_, 0, out, out, x, x, n); } \
    KOPT_SLEEF_UNARY_(width, tanh) {                                                                                  \
        kopt_sleef_run_##width##_(kopt_sleef_tanh_raw_##width##_, 0, out, out, x, x, n);                              \
    }                                                                                                                 \
    KOPT_SLEEF_UNARY_(width, erf) { kopt_sleef_run_##width##_(kopt_sleef_erf_raw_##width##_, 0, out, out, x, x, n); } \
    KOPT_SLEEF_UNARY_(width, erfc) {                                                                                  \
        kopt_sleef_run_##width##_(kopt_sleef_erfc_raw_##width##_, 0, out, out, x, x, n);                              \
    }                                                                                                                 \
    static void kopt_sleef_atan2_##width##_(float *out, const float *y, const float *x, size_t n) {                   \
        kopt_sleef_run_##width##_(kopt_sleef_atan2_raw_##width##_, KOPT_SLEEF_ATAN2_, out, out, y, x, n);             \
    }                                                                                                                 \
    static void kopt_sleef_sincospi_##width##_(float *sine, float *cosine, const float *x, size_t n) {                \
        kopt_sleef_run_##width##_(kopt_sleef_sincospi_raw_##width##_, KOPT_SLEEF_SINCOSPI_, sine, cosine, x, x, n);   \
    }                                                                                                                 \
    KOPT_SLEEF_UNARY_(width, steps_tanh) {                                                                            \
        kopt_sleef_loop_##width##_(kopt_sleef_tanh_fast_##width##_, 0, out, out, x, x, n);                            \
    }                                                                                                                 \
    static void kopt_sleef_steps_atan_##width##_(float *out, const float *quotient, const float *x, size_t n) {       \
        (void)x;                                                                                                      \
        kopt_sleef_loop_##width##_(kopt_sleef_atan_fast_##width##_, 0, out, out, quotient, quotient, n);              \
    }                                                                                                                 \
    static const kopt_vmath kopt_sleef_steps_##width##_ = {"sleef " title ", 3.5 ulp",       KOPT_NULL_, KOPT_NULL_,  \
                                                           kopt_sleef_steps_tanh_##width##_, KOPT_NULL_, KOPT_NULL_,  \
                                                           kopt_sleef_steps_atan_##width##_, KOPT_NULL_};             \
    static const kopt_vmath kopt_sleef_table_##width##_ = {"sleef " title,                                            \
                                                           kopt_sleef_exp_##width##_,                                 \
                                                           kopt_sleef_log_##width##_,                                 \
                                                           kopt_sleef_tanh_##width##_,                                \
                                                           kopt_sleef_erf_##width##_,                                 \
                                                           kopt_sleef_erfc_##width##_,                                \
                                                           kopt_sleef_atan2_##width##_,                               \
                                                           kopt_sleef_sincospi_##width##_};

#ifdef KOPT_X86_
KOPT_SLEEF_FORM_(512, "16", "avx512f", "avx512")
KOPT_SLEEF_FORM_(256, "8", "avx2", "avx2")
KOPT_SLEEF_FORM_(128, "4", "avx2128", "avx2, 128 bits")
#else
KOPT_SLEEF_FORM_(128, "4", "advsimd", "neon")
#endif
#undef KOPT_SLEEF_FORM_
#undef KOPT_SLEEF_UNARY_
#undef KOPT_SLEEF_NAME_
#undef KOPT_SLEEF_TEXT_
#undef KOPT_SLEEF_TEXT2_
#undef KOPT_SLEEF_KIND_
#undef KOPT_SLEEF_AS_

KOPT_API_ const kopt_vmath *kopt_vmath_sleef(void) {
#ifdef KOPT_X86_
    uint32_t r[4];
    if (kopt_isa_current() == KOPT_ISA_SCALAR || !kopt_isa_usable(KOPT_ISA_AVX2)) return KOPT_NULL_;
    kopt_cpuid_(1, r);
    if ((r[2] >> 12 & 1u) == 0) return KOPT_NULL_; /* FMA */
    if (kopt_isa_current() == KOPT_ISA_AVX512) return &kopt_sleef_table_512_;
    return kopt_isa_current() == KOPT_ISA_AVX2 ? &kopt_sleef_table_256_ : &kopt_sleef_table_128_;
#else
    return kopt_isa_current() == KOPT_ISA_NEON ? &kopt_sleef_table_128_ : KOPT_NULL_;
#endif
}

/* For steps its forms with 3.5 ulp, which are twice as fast; of Adam-atan2, whose second argument is positive, the arc
   tangent of the quotient: 31 operations instead of 55, a step takes 0.84 of the time. */
static const kopt_vmath *kopt_vmath_of_steps_(const kopt_vmath *vmath) {
#ifdef KOPT_X86_
    if (vmath == &kopt_sleef_table_512_) return &kopt_sleef_steps_512_;
    if (vmath == &kopt_sleef_table_256_) return &kopt_sleef_steps_256_;
#endif
    return vmath == &kopt_sleef_table_128_ ? &kopt_sleef_steps_128_ : vmath;
}
#else
KOPT_API_ const kopt_vmath *kopt_vmath_sleef(void) { return KOPT_NULL_; }
static const kopt_vmath *kopt_vmath_of_steps_(const kopt_vmath *vmath) { return vmath; }
#endif

/* ---- functions of arrays ---- */

/* The table, or the default if it is NULL. */
static const kopt_vmath *kopt_vmath_of_(const kopt_vmath *vmath) {
    if (vmath == KOPT_NULL_) vmath = kopt_vmath_sleef();
    return vmath == KOPT_NULL_ ? kopt_vmath_builtin() : vmath;
}

KOPT_API_ const char *kopt_vmath_name(const kopt_vmath *vmath) {
    const char *name = kopt_vmath_of_(vmath)->name;
    return name == KOPT_NULL_ ? "unnamed" : name;
}

/* Two arrays of n elements are the same or do not overlap. */
static int kopt_apart_(const void *a, const void *b, size_t size) { return a == b || !kopt_overlap_(a, size, b, size); }

static kopt_result kopt_vmath_check_(const void *out, const void *x, const void *y, size_t n, size_t size) {
    if (!kopt_n_valid_(n)) return KOPT_ERROR_BOUNDS;
    if (n == 0) return KOPT_OK;
    if (out == KOPT_NULL_ || x == KOPT_NULL_ || y == KOPT_NULL_) return KOPT_ERROR_NULL;
    return kopt_apart_(out, x, n * size) && kopt_apart_(out, y, n * size) ? KOPT_OK : KOPT_ERROR_OVERLAP;
}

/* In the IEEE environment; the tables' functions have the names of libm's, which may be macros: hence the
   parentheses. */
#define KOPT_VMATH_CALL_(function, arguments)                            \
    do {                                                                 \
        const kopt_vmath *table = kopt_vmath_of_(vmath);                 \
        kopt_environment_ environment;                                   \
        if (table->function == KOPT_NULL_) table = kopt_vmath_builtin(); \
        kopt_enter_(&environment);                                       \
        (table->function) arguments;                                     \
        kopt_leave_(&environment);                                       \
    } while (0)
#define KOPT_VMATH_UNARY_(name)                                                                              \
    KOPT_API_ kopt_result kopt_vmath_##name(const kopt_vmath *vmath, float *out, const float *x, size_t n) { \
        const kopt_result result = kopt_vmath_check_(out, x, x, n, 4);                                       \
        if (result == KOPT_OK && n != 0) KOPT_VMATH_CALL_(name, (out, x, n));                                \
        return result;                                                                                       \
    }
KOPT_VMATH_UNARY_(exp)
KOPT_VMATH_UNARY_(log)
KOPT_VMATH_UNARY_(tanh)
KOPT_VMATH_UNARY_(erf)
KOPT_VMATH_UNARY_(erfc)
#undef KOPT_VMATH_UNARY_

KOPT_API_ kopt_result kopt_vmath_atan2(const kopt_vmath *vmath, float *out, const float *y, const float *x, size_t n) {
    const kopt_result result = kopt_vmath_check_(out, y, x, n, 4);
    if (result == KOPT_OK && n != 0) KOPT_VMATH_CALL_(atan2, (out, y, x, n));
    return result;
}

KOPT_API_ kopt_result kopt_vmath_sincospi(const kopt_vmath *vmath, float *sine, float *cosine, const float *x,
                                          size_t n) {
    kopt_result result = kopt_vmath_check_(sine, x, x, n, 4);
    if (result == KOPT_OK) result = kopt_vmath_check_(cosine, x, x, n, 4);
    if (result == KOPT_OK && n != 0 && kopt_overlap_(sine, n * 4, cosine, n * 4)) result = KOPT_ERROR_OVERLAP;
    if (result == KOPT_OK && n != 0) KOPT_VMATH_CALL_(sincospi, (sine, cosine, x, n));
    return result;
}

/* n <= KOPT_VMATH_TILE_ elements of a kopt_map */
static void kopt_map_tile_(const kopt_vmath *vmath, kopt_function f, kopt_byte_ *out, const kopt_byte_ *x,
                           kopt_format format, size_t n) {
    float a[KOPT_VMATH_TILE_], b[KOPT_VMATH_TILE_];
    kopt_vmath_job_ j;
    kopt_zero_(KOPT_POINTER_(kopt_byte_ *, &j), sizeof j);
    j.f = f;
    j.format = format;
    j.n = n;
    j.kind = KOPT_VMATH_PREPARE_;
    j.in = x;
    j.in2 = KOPT_NULL_;
    j.out = KOPT_POINTER_(kopt_byte_ *, a);
    j.out2 = KOPT_POINTER_(kopt_byte_ *, b);
    KOPT_KERNEL_(vmath)(&j);
    if (f == KOPT_LOG)
        KOPT_VMATH_CALL_(log, (a, a, n));
    else if (f == KOPT_TANH)
        KOPT_VMATH_CALL_(tanh, (a, a, n));
    else
        KOPT_VMATH_CALL_(exp, (a, a, n));
    if (f == KOPT_SOFTPLUS) {
        j.kind = KOPT_VMATH_ADD_ONE_;
        j.in = KOPT_CONST_POINTER_(const kopt_byte_ *, a);
        j.out = j.out2;
        KOPT_KERNEL_(vmath)(&j);
        KOPT_VMATH_CALL_(log, (b, b, n));
    }
    j.kind = KOPT_VMATH_FINISH_;
    j.in = x;
    j.in2 = KOPT_CONST_POINTER_(const kopt_byte_ *, a);
    j.out = out;
    KOPT_KERNEL_(vmath)(&j);
}

static kopt_result kopt_map_check_(kopt_function f, kopt_function last, const void *out, const void *x, const void *y,
                                   kopt_format format, size_t n) {
    if (KOPT_CAST_(unsigned, f) > KOPT_CAST_(unsigned, last)) return KOPT_ERROR_OPTION;
    if (!(format == KOPT_BF16 && KOPT_HAS_(KOPT_WITH_BF16)) && !(format == KOPT_FP16 && KOPT_HAS_(KOPT_WITH_FP16)))
        return KOPT_ERROR_OPTION;
    return kopt_vmath_check_(out, x, y, n, 2);
}

KOPT_API_ kopt_result kopt_map(const kopt_vmath *vmath, kopt_function f, void *out, const void *x, kopt_format format,
                               size_t n) {
    const kopt_result result = kopt_map_check_(f, KOPT_GELU_TANH_SLOPE, out, x, x, format, n);
    kopt_environment_ environment;
    size_t i, m;
    if (result != KOPT_OK || n == 0) return result;
    vmath = kopt_vmath_of_(vmath); /* once: it asks the processor */
    kopt_enter_(&environment);
    for (i = 0; i < n; i += m) {
        m = n - i < KOPT_VMATH_TILE_ ? n - i : KOPT_VMATH_TILE_;
        kopt_map_tile_(vmath, f, KOPT_CAST_(kopt_byte_ *, out) + 2 * i, KOPT_CAST_(const kopt_byte_ *, x) + 2 * i,
                       format, m);
    }
    kopt_leave_(&environment);
    return KOPT_OK;
}

static kopt_function kopt_slope_of_(kopt_function f) {
    static const kopt_function kopt_slope_[] = {
        KOPT_EXP,        KOPT_LOG,        KOPT_TANH_SLOPE,      KOPT_SIGMOID_SLOPE,
        KOPT_SILU_SLOPE, KOPT_GELU_SLOPE, KOPT_GELU_TANH_SLOPE, KOPT_SIGMOID};
    return kopt_slope_[f];
}

KOPT_API_ kopt_result kopt_map_backward(const kopt_vmath *vmath, kopt_function f, void *dx, const void *dy,
                                        const void *x, kopt_format format, size_t n) {
    const kopt_result result = kopt_map_check_(f, KOPT_SOFTPLUS, dx, dy, x, format, n);
    uint16_t slope[KOPT_VMATH_TILE_];
    kopt_environment_ environment;
    kopt_vmath_job_ j;
    size_t i, m;
    kopt_zero_(KOPT_POINTER_(kopt_byte_ *, &j), sizeof j);
    if (f == KOPT_LOG) return KOPT_ERROR_OPTION;
    if (result != KOPT_OK || n == 0) return result;
    vmath = kopt_vmath_of_(vmath);
    j.kind = KOPT_VMATH_MULTIPLY_;
    j.f = f;
    j.format = format;
    j.out2 = KOPT_NULL_;
    j.in = KOPT_CONST_POINTER_(const kopt_byte_ *, slope);
    kopt_enter_(&environment);
    for (i = 0; i < n; i += m) {
        m = n - i < KOPT_VMATH_TILE_ ? n - i : KOPT_VMATH_TILE_;
        kopt_map_tile_(vmath, kopt_slope_of_(f), KOPT_POINTER_(kopt_byte_ *, slope),
                       KOPT_CAST_(const kopt_byte_ *, x) + 2 * i, format, m);
        j.in2 = KOPT_CAST_(const kopt_byte_ *, dy) + 2 * i;
        j.out = KOPT_CAST_(kopt_byte_ *, dx) + 2 * i;
        j.n = m;
        KOPT_KERNEL_(vmath)(&j);
    }
    kopt_leave_(&environment);
    return KOPT_OK;
}

/* ---- softmax and cross entropy ---- */

/* One row; sum of e^(x - most) = high + low. */
typedef struct kopt_row_ {
    const kopt_vmath *vmath;
    const kopt_byte_ *x;
    size_t n;
    float most, high, low;
    uint32_t key; /* of the largest: see row_max */
    float term[KOPT_VMATH_TILE_], rest[KOPT_VMATH_TILE_], sum[2 * KOPT_PARTS_];
    kopt_vmath_job_ job;
} kopt_row_;

/* a + b and what it lost (Knuth). */
static float kopt_two_sum_(float a, float b, float *rest) {
    const float sum = kopt_add_(a, b), more = kopt_sub_(sum, a);
    *rest = kopt_add_(kopt_sub_(a, kopt_sub_(sum, more)), kopt_sub_(b, more));
    return sum;
}

static float kopt_load_float_(const kopt_byte_ *p, kopt_format format) {
    return format == KOPT_F32 ? kopt_as_f32_(kopt_load32_(p)) : kopt_widen_scalar_(kopt_load16_(p), format);
}

static void kopt_store_float_(kopt_byte_ *p, kopt_format format, float x) {
    if (format == KOPT_F32)
        kopt_store32_(p, kopt_as_u32_(x));
    else
        kopt_store16_(p, kopt_round_nearest16_scalar_(x, format));
}

static void kopt_fill_(kopt_byte_ *p, kopt_format format, size_t n, float x) {
    for (; n > 0; n--, p += kopt_bytes_of_(format)) kopt_store_float_(p, format, x);
}

/* term = e^(x - most) of the elements i .. i + n - 1, with what the difference lost; sum: adds them up. */
static void kopt_row_terms_(kopt_row_ *row, size_t i, size_t n, kopt_byte_ *sum) {
    const kopt_vmath *vmath = row->vmath;
    kopt_vmath_job_ *j = &row->job;
    j->kind = KOPT_VMATH_DIFFERENCE_;
    j->n = n;
    j->in = row->x + i * kopt_bytes_of_(j->format);
    j->out = KOPT_POINTER_(kopt_byte_ *, row->term);
    j->out2 = KOPT_POINTER_(kopt_byte_ *, row->rest);
    j->a = row->most;
    KOPT_KERNEL_(vmath)(j);
    KOPT_VMATH_CALL_(exp, (row->term, row->term, n));
    j->kind = KOPT_VMATH_TERMS_;
    j->in = j->out;
    j->in2 = j->out2;
    j->out2 = sum;
    KOPT_KERNEL_(vmath)(j);
}

/* out = 0 + term * factor, rounded. */
static void kopt_row_weigh_(kopt_row_ *row, kopt_byte_ *out, size_t n, float factor) {
    kopt_vmath_job_ *j = &row->job;
    j->kind = KOPT_VMATH_LINEAR_;
    j->n = n;
    j->in = KOPT_NULL_;
    j->in2 = KOPT_POINTER_(kopt_byte_ *, row->term);
    j->out = out;
    j->a = kopt_as_f32_(0);
    j->b = factor;
    KOPT_KERNEL_(vmath)(j);
}

/* The largest value and the sum; 0 if the row has no probabilities. */
static int kopt_row_sum_(kopt_row_ *row) {
    kopt_byte_ *sum = KOPT_POINTER_(kopt_byte_ *, row->sum);
    float high = kopt_as_f32_(0), low = high, lost;
    uint32_t key;
    size_t i, n;
    row->key = 0x807FFFFFu; /* of -inf */
    row->job.kind = KOPT_VMATH_MAXIMUM_;
    row->job.in = row->x;
    row->job.n = row->n;
    row->job.out = KOPT_POINTER_(kopt_byte_ *, &row->key);
    if (row->n != 0) KOPT_KERNEL_(vmath)(&row->job);
    key = row->key;
    if (key == 0x807FFFFFu || (key >> 31 == 0 && key >= 0x7F800000u)) return 0;
    row->most = kopt_as_f32_(key >> 31 == 0 ? key : key ^ 0x7FFFFFFFu);
    kopt_fill_(sum, KOPT_F32, 2 * KOPT_PARTS_, low);
    for (i = 0; i < row->n; i += n) {
        n = row->n - i < KOPT_VMATH_TILE_ ? row->n - i : KOPT_VMATH_TILE_;
        kopt_row_terms_(row, i, n, sum);
    }
    for (i = 0; i < KOPT_PARTS_; i++) {
        high = kopt_two_sum_(high, row->sum[i], &lost);
        low = kopt_add_(low, kopt_add_(lost, row->sum[KOPT_PARTS_ + i]));
    }
    row->high = kopt_two_sum_(high, low, &row->low);
    return 1;
}

/* factor * term / sum into out; out may be the row itself. */
static void kopt_row_out_(kopt_row_ *row, kopt_byte_ *out, float factor) {
    const float f = kopt_div_(factor, row->high);
    size_t i, n;
    for (i = 0; i < row->n; i += n) {
        n = row->n - i < KOPT_VMATH_TILE_ ? row->n - i : KOPT_VMATH_TILE_;
        if (row->n > KOPT_VMATH_TILE_) kopt_row_terms_(row, i, n, KOPT_NULL_); /* else they still are there */
        kopt_row_weigh_(row, out + i * kopt_bytes_of_(row->job.format), n, f);
    }
}

static KOPT_NOINLINE_ void kopt_row_softmax_(kopt_row_ *row, kopt_byte_ *out) {
    if (kopt_row_sum_(row))
        kopt_row_out_(row, out, 1);
    else
        kopt_fill_(out, row->job.format, row->n, kopt_as_f32_(0x7FC00000u));
}

/* Returns the loss; grad may be NULL. */
static KOPT_NOINLINE_ float kopt_row_loss_(kopt_row_ *row, kopt_byte_ *grad, size_t target, float scale) {
    const kopt_format format = row->job.format;
    const kopt_vmath *vmath = row->vmath;
    const size_t at = target * kopt_bytes_of_(format);
    const float x = kopt_load_float_(row->x + at, format);
    float loss, rest, term, others;
    if (!kopt_row_sum_(row)) {
        if (grad != KOPT_NULL_) kopt_fill_(grad, format, row->n, kopt_as_f32_(0x7FC00000u));
        return kopt_as_f32_(0x7FC00000u);
    }
    if (grad != KOPT_NULL_) {
        kopt_row_out_(row, grad, scale);
        if (row->n > KOPT_VMATH_TILE_) { /* the target's term once more */
            const kopt_byte_ *begin = row->x;
            kopt_byte_ value[4];
            kopt_store_float_(value, format, x);
            row->x = value;
            kopt_row_terms_(row, 0, 1, KOPT_NULL_);
            row->x = begin;
            target = 0;
        }
        term = row->term[target]; /* 1 - term / sum = (sum - term) / sum: right to the end when the model is sure */
        others = kopt_add_(kopt_sub_(row->high, term), row->low);
        others = kopt_mul_(kopt_div_(scale, row->high), others);
        kopt_store_float_(grad + at, format, kopt_as_f32_(kopt_as_u32_(others) ^ 0x80000000u));
    }
    loss = kopt_two_sum_(row->most, kopt_as_f32_(kopt_as_u32_(x) ^ 0x80000000u), &rest);
    if (kopt_as_u32_(loss) == 0x7F800000u) return loss;
    KOPT_VMATH_CALL_(log, (&term, &row->high, 1));
    return kopt_add_(loss, kopt_add_(term, kopt_add_(rest, kopt_div_(row->low, row->high))));
}

/* span: bytes from the first row to the end of the last. */
static kopt_result kopt_rows_check_(kopt_format format, size_t rows, size_t columns, size_t stride, size_t *span) {
    const size_t most = (~KOPT_CAST_(size_t, 0) - 256) / 32;
    if (!kopt_format_valid_(format) || !kopt_in_(KOPT_FORMATS_, KOPT_CAST_(int, format))) return KOPT_ERROR_OPTION;
    if (columns > stride || stride > most || rows > most) return KOPT_ERROR_BOUNDS;
    *span = 0;
    if (rows == 0) return KOPT_OK;
    if (stride != 0 && rows - 1 > (most - columns) / stride) return KOPT_ERROR_BOUNDS;
    *span = ((rows - 1) * stride + columns) * kopt_bytes_of_(format);
    if (columns == 0) *span = 0;
    return KOPT_OK;
}

static void kopt_row_begin_(kopt_row_ *row, const kopt_vmath *vmath, kopt_format format, size_t columns) {
    row->vmath = kopt_vmath_of_(vmath);
    row->n = columns;
    row->job.f = KOPT_EXP;
    row->job.format = format;
    row->job.in2 = KOPT_NULL_;
    row->job.out2 = KOPT_NULL_;
}

KOPT_API_ kopt_result kopt_softmax(const kopt_vmath *vmath, void *out, const void *x, kopt_format format, size_t rows,
                                   size_t columns, size_t stride) {
    kopt_environment_ environment;
    kopt_row_ row;
    size_t r, span;
    const kopt_result result = kopt_rows_check_(format, rows, columns, stride, &span);
    if (result != KOPT_OK || span == 0) return result;
    if (out == KOPT_NULL_ || x == KOPT_NULL_) return KOPT_ERROR_NULL;
    if (!kopt_apart_(out, x, span)) return KOPT_ERROR_OVERLAP;
    kopt_row_begin_(&row, vmath, format, columns);
    kopt_enter_(&environment);
    for (r = 0; r < rows; r++) {
        const size_t at = r * stride * kopt_bytes_of_(format);
        row.x = KOPT_CAST_(const kopt_byte_ *, x) + at;
        kopt_row_softmax_(&row, KOPT_CAST_(kopt_byte_ *, out) + at);
    }
    kopt_leave_(&environment);
    return KOPT_OK;
}

KOPT_API_ kopt_result kopt_cross_entropy(const kopt_vmath *vmath, float *loss, void *grad, const void *logits,
                                         kopt_format format, const int32_t *target, size_t rows, size_t columns,
                                         size_t stride, double scale) {
    const kopt_byte_ *const targets = KOPT_CONST_POINTER_(const kopt_byte_ *, target);
    kopt_byte_ *const losses = KOPT_POINTER_(kopt_byte_ *, loss), *const grads = KOPT_CAST_(kopt_byte_ *, grad);
    kopt_environment_ environment;
    kopt_row_ row;
    size_t r, span;
    float factor;
    const kopt_result result = kopt_rows_check_(format, rows, columns, stride, &span);
    if (result != KOPT_OK) return result;
    if (!kopt_within_(scale, -3e38, 3e38)) return KOPT_ERROR_RANGE;
    if (rows == 0) return KOPT_OK;
    if (target == KOPT_NULL_ || (loss == KOPT_NULL_ && grad == KOPT_NULL_)) return KOPT_ERROR_NULL;
    if (span != 0 && logits == KOPT_NULL_) return KOPT_ERROR_NULL;
    if (!kopt_apart_(grad, logits, span) || kopt_overlap_(grad, span, target, rows * 4) ||
        kopt_overlap_(loss, rows * 4, target, rows * 4) || kopt_overlap_(loss, rows * 4, logits, span) ||
        kopt_overlap_(loss, rows * 4, grad, span))
        return KOPT_ERROR_OVERLAP;
    for (r = 0; r < rows; r++) {
        const uint32_t t = kopt_load32_(targets + 4 * r);
        if (t >> 31 == 0 && t >= columns) return KOPT_ERROR_BOUNDS;
    }
    if (span == 0) { /* rows of no columns, all of them left out */
        if (losses != KOPT_NULL_) kopt_zero_(losses, rows * 4);
        return KOPT_OK;
    }
    kopt_row_begin_(&row, vmath, format, columns);
    kopt_enter_(&environment);
    factor = kopt_narrow64_(scale);
    for (r = 0; r < rows; r++) {
        const size_t at = r * stride * kopt_bytes_of_(format);
        const uint32_t t = kopt_load32_(targets + 4 * r);
        float value = kopt_as_f32_(0);
        row.x = KOPT_CAST_(const kopt_byte_ *, logits) + at;
        if (t >> 31 == 0)
            value = kopt_row_loss_(&row, grads == KOPT_NULL_ ? grads : grads + at, t, factor);
        else if (grads != KOPT_NULL_)
            kopt_fill_(grads + at, format, columns, value);
        if (losses != KOPT_NULL_) kopt_store32_(losses + 4 * r, kopt_as_u32_(value));
    }
    kopt_leave_(&environment);
    return KOPT_OK;
}
#undef KOPT_VMATH_CALL_

/* ---- random numbers ---- */

typedef struct kopt_draw_ {
    kopt_vmath_kind_ kind; /* NORMAL_ or UNIFORM_ */
    uint64_t seed;
    uint32_t step, id, stream, limit; /* limit: the word of the largest magnitude that is taken */
} kopt_draw_;

/* Number first + i in z[first % 256 + i], for n indices within one block of 256. */
static void kopt_draw_tile_(const kopt_draw_ *draw, kopt_byte_ *z, uint64_t first, size_t n) {
    const size_t offset = KOPT_CAST_(unsigned, first & 255);
    kopt_byte_ again[4 * KOPT_VMATH_TILE_];
    kopt_vmath_job_ j;
    size_t i;
    int left = 1;
    kopt_zero_(KOPT_POINTER_(kopt_byte_ *, &j), sizeof j);
    j.kind = draw->kind;
    j.n = n;
    j.first = first;
    j.seed = draw->seed;
    j.step = draw->step;
    j.id = draw->id;
    j.stream = draw->stream;
    j.out = z;
    for (j.attempt = 0; left && j.attempt < 256; j.attempt++) { /* one is within 1/2 deviation with probability 0.38 */
        KOPT_KERNEL_(vmath)(&j);
        if (draw->limit == 0x7FFFFFFFu) return;
        left = 0;
        for (i = offset; i < offset + n; i++) {
            if ((kopt_load32_(z + 4 * i) & 0x7FFFFFFFu) <= draw->limit) continue;
            if (j.attempt != 0) kopt_store32_(z + 4 * i, kopt_load32_(again + 4 * i));
            if ((kopt_load32_(z + 4 * i) & 0x7FFFFFFFu) > draw->limit) left = 1;
        }
        j.out = again;
    }
}

static kopt_result kopt_index_check_(uint64_t first, size_t n) {
    if (!kopt_n_valid_(n) || first >> 54 != 0 || (first + n) > KOPT_CAST_(uint64_t, 1) << 54) return KOPT_ERROR_BOUNDS;
    return KOPT_HAS_(KOPT_WITH_EXTRAS) || first == 0 ? KOPT_OK : KOPT_ERROR_OPTION;
}

/* out = middle + width * number */
static kopt_result kopt_draw_run_(const kopt_draw_ *draw, void *out, kopt_format format, size_t n, double middle,
                                  double width, uint64_t first) {
    const kopt_result result = kopt_index_check_(first, n);
    float z[KOPT_VMATH_TILE_];
    kopt_environment_ environment;
    kopt_vmath_job_ j;
    size_t i;
    kopt_zero_(KOPT_POINTER_(kopt_byte_ *, &j), sizeof j);
    if (!kopt_format_valid_(format) || !kopt_in_(KOPT_FORMATS_, KOPT_CAST_(int, format))) return KOPT_ERROR_OPTION;
    if (result != KOPT_OK) return result;
    if (!kopt_within_(middle, -3e38, 3e38) || !kopt_within_(width, 0, 3e38)) return KOPT_ERROR_RANGE;
    if (n == 0) return KOPT_OK;
    if (out == KOPT_NULL_) return KOPT_ERROR_NULL;
    kopt_enter_(&environment);
    j.kind = KOPT_VMATH_LINEAR_;
    j.format = format;
    j.a = kopt_narrow64_(middle);
    j.b = kopt_narrow64_(width);
    j.in = KOPT_NULL_;
    for (i = 0; i < n; i += j.n) {
        const size_t offset = KOPT_CAST_(unsigned, (first + i) & 255);
        j.n = n - i < KOPT_VMATH_TILE_ - offset ? n - i : KOPT_VMATH_TILE_ - offset;
        kopt_draw_tile_(draw, KOPT_POINTER_(kopt_byte_ *, z), first + i, j.n);
        j.in2 = KOPT_CONST_POINTER_(const kopt_byte_ *, z + offset);
        j.out = KOPT_CAST_(kopt_byte_ *, out) + i * kopt_bytes_of_(format);
        KOPT_KERNEL_(vmath)(&j);
    }
    kopt_leave_(&environment);
    return KOPT_OK;
}

static void kopt_draw_of_(kopt_draw_ *draw, kopt_vmath_kind_ kind, uint32_t stream, uint64_t seed, uint32_t step,
                          uint32_t id) {
    draw->kind = kind;
    draw->stream = stream;
    draw->seed = seed;
    draw->step = step;
    draw->id = id;
    draw->limit = 0x7FFFFFFFu;
}

KOPT_API_ kopt_result kopt_normal(void *out, kopt_format format, size_t n, double mean, double deviation,
                                  kopt_random_key key) {
    kopt_draw_ draw;
    kopt_draw_of_(&draw, KOPT_VMATH_NORMAL_, KOPT_RANDOM_NOISE_, key.seed, key.step, key.id);
    return kopt_draw_run_(&draw, out, format, n, mean, deviation, key.first_index);
}

KOPT_API_ kopt_result kopt_truncated_normal(void *out, kopt_format format, size_t n, double mean, double deviation,
                                            double limit, kopt_random_key key) {
    kopt_environment_ environment;
    kopt_draw_ draw;
    if (!kopt_within_(limit, 0.5, 3e38)) return KOPT_ERROR_RANGE;
    kopt_draw_of_(&draw, KOPT_VMATH_NORMAL_, KOPT_RANDOM_NOISE_, key.seed, key.step, key.id);
    kopt_enter_(&environment);
    draw.limit = kopt_as_u32_(kopt_narrow64_(limit));
    kopt_leave_(&environment);
    return kopt_draw_run_(&draw, out, format, n, mean, deviation, key.first_index);
}

KOPT_API_ kopt_result kopt_uniform(void *out, kopt_format format, size_t n, double low, double high,
                                   kopt_random_key key) {
    kopt_environment_ environment;
    kopt_f64_ a, b;
    double middle, width;
    kopt_draw_ draw;
    if (!kopt_within_(low, -3e38, 3e38) || !kopt_within_(high, low, 3e38)) return KOPT_ERROR_RANGE;
    kopt_draw_of_(&draw, KOPT_VMATH_UNIFORM_, KOPT_RANDOM_NOISE_, key.seed, key.step, key.id);
    kopt_enter_(&environment);
    a = kopt_mul64_(kopt_to_f64_(low), kopt_to_f64_(0.5));
    b = kopt_mul64_(kopt_to_f64_(high), kopt_to_f64_(0.5));
    middle = kopt_to_double_(kopt_add64_(b, a));
    width = kopt_to_double_(kopt_sub64_(b, a));
    kopt_leave_(&environment);
    return kopt_draw_run_(&draw, out, format, n, middle, width, key.first_index);
}

/* Mean 0 and variance 2 / fan. */
static kopt_result kopt_init_(void *out, kopt_format format, size_t n, kopt_distribution distribution, uint64_t fan,
                              kopt_random_key key) {
    kopt_environment_ environment;
    double deviation;
    kopt_f64_ root;
    if (KOPT_CAST_(unsigned, distribution) > KOPT_CAST_(unsigned, KOPT_TRUNCATED_NORMAL)) return KOPT_ERROR_OPTION;
    kopt_enter_(&environment);
    root = kopt_sqrt64_(kopt_div64_(kopt_to_f64_(0.5), kopt_u64_to_f64_(fan)));
    root = kopt_add64_(root, root);
    if (distribution == KOPT_UNIFORM) root = kopt_mul64_(root, kopt_to_f64_(1.7320508075688772)); /* sqrt(3) */
    if (distribution == KOPT_TRUNCATED_NORMAL) /* cut at 2, the deviation is 1 over this */
        root = kopt_mul64_(root, kopt_to_f64_(1.1368472343385565));
    deviation = kopt_to_double_(root);
    kopt_leave_(&environment);
    if (distribution == KOPT_TRUNCATED_NORMAL) return kopt_truncated_normal(out, format, n, 0, deviation, 2, key);
    if (distribution == KOPT_UNIFORM) return kopt_uniform(out, format, n, -deviation, deviation, key);
    return kopt_normal(out, format, n, 0, deviation, key);
}

KOPT_API_ kopt_result kopt_init_he(void *out, kopt_format format, size_t n, kopt_distribution distribution,
                                   size_t fan_in, kopt_random_key key) {
    if (fan_in == 0) return KOPT_ERROR_RANGE;
    return kopt_init_(out, format, n, distribution, fan_in, key);
}

KOPT_API_ kopt_result kopt_init_xavier(void *out, kopt_format format, size_t n, kopt_distribution distribution,
                                       size_t fan_in, size_t fan_out, kopt_random_key key) {
    if (fan_in == 0 || fan_out == 0) return KOPT_ERROR_RANGE;
    if (!kopt_n_valid_(fan_in) || !kopt_n_valid_(fan_out)) return KOPT_ERROR_BOUNDS;
    return kopt_init_(out, format, n, distribution, fan_in + fan_out, key);
}

/* ---- Langevin dynamics ---- */

/* SGD with a gradient of tiles: grad_scale * g + noise / rate. */

/* The noise in units of the rate, negative: sqrt(2 temperature / rate); 0 without noise. Not finite: refused. */
static KOPT_NOINLINE_ float kopt_langevin_factor_(float rate, float rate_scale, double temperature) {
    const float heat = kopt_narrow64_(temperature);
    if (kopt_as_u32_(rate_scale) != 0x3F800000u) rate = kopt_mul_scalar_(rate, rate_scale);
    if ((kopt_as_u32_(heat) << 1) == 0 || (kopt_as_u32_(rate) << 1) == 0) return kopt_as_f32_(0);
    return kopt_sqrt_(kopt_div_(kopt_add_(heat, heat), rate));
}

static kopt_result kopt_langevin_rule_(const kopt_step *s, double temperature) {
    if (s->rule != KOPT_SGD || s->moment_count != 0) return KOPT_ERROR_OPTION;
    return kopt_within_(temperature, 0, 1e38) ? KOPT_OK : KOPT_ERROR_RANGE;
}

static kopt_result kopt_langevin_check_(const kopt_step *s, const kopt_tensor *t, double temperature) {
    const kopt_result result = kopt_index_check_(t->first_index, t->n);
    kopt_environment_ environment;
    int finite;
    if (result != KOPT_OK) return result;
    kopt_enter_(&environment);
    finite = kopt_finite_(kopt_langevin_factor_(s->rate, kopt_rate_scale_(t), temperature));
    kopt_leave_(&environment);
    return finite ? KOPT_OK : KOPT_ERROR_RANGE;
}

static KOPT_NOINLINE_ void kopt_langevin_tiles_(kopt_job_ *job, const kopt_job_ *whole, kopt_step *local,
                                                float factor) {
    const kopt_step *s = whole->step;
    const size_t weight_bytes = kopt_bytes_of_(s->weight_format), grad_bytes = kopt_bytes_of_(whole->grad_format);
    const size_t residual_bytes = kopt_bytes_of_residual_(s->weight_format, s->rounding);
    float z[KOPT_VMATH_TILE_], g[KOPT_VMATH_TILE_];
    kopt_vmath_job_ j;
    kopt_draw_ draw;
    size_t i, n;
    kopt_zero_(KOPT_POINTER_(kopt_byte_ *, &j), sizeof j);
    kopt_draw_of_(&draw, KOPT_VMATH_NORMAL_, KOPT_RANDOM_LANGEVIN_, s->seed, s->step, whole->id);
    local->grad_scale = 1;
    local->zero_grad = 0;
    job->step = local;
    job->grad = KOPT_POINTER_(kopt_byte_ *, g);
    job->grad_format = KOPT_F32;
    job->begin = 0;
    j.kind = KOPT_VMATH_LINEAR_;
    j.format = whole->grad_format;
    j.out = job->grad;
    j.a = s->grad_scale;
    j.b = kopt_as_f32_(kopt_as_u32_(factor) ^ 0x80000000u);
    for (i = whole->begin; i < whole->end; i += n) {
        const size_t offset = KOPT_CAST_(unsigned, (whole->first + i) & 255);
        kopt_byte_ *grad = whole->grad + i * grad_bytes;
        n = whole->end - i < KOPT_VMATH_TILE_ - offset ? whole->end - i : KOPT_VMATH_TILE_ - offset;
        kopt_draw_tile_(&draw, KOPT_POINTER_(kopt_byte_ *, z), whole->first + i, n);
        j.n = n;
        j.in = grad;
        j.in2 = KOPT_CONST_POINTER_(const kopt_byte_ *, z + offset);
        KOPT_KERNEL_(vmath)(&j);
        job->weight = whole->weight + i * weight_bytes;
        if (residual_bytes != 0) job->residual = whole->residual + i * residual_bytes;
        if (whole->copy != KOPT_NULL_) job->copy = whole->copy + i * kopt_bytes_of_(whole->copy_format);
        job->first = whole->first + i;
        job->end = n;
        (KOPT_KERNEL_(step))(job);
        if (s->zero_grad) kopt_zero_(grad, n * grad_bytes);
    }
}

static void kopt_langevin_run_(const kopt_step *s, const kopt_tensor *t, double temperature, size_t begin, size_t end) {
    kopt_environment_ environment;
    kopt_layout_ at;
    kopt_job_ whole, job;
    kopt_step local;
    float factor;
    if (begin == end) return;
    kopt_lay_out_step_(&at, s, t->n);
    kopt_make_job_(&whole, &at, s, t, begin, end);
    kopt_enter_(&environment);
    if (kopt_as_u32_(kopt_rate_scale_(t)) != 0x3F800000u) {
        volatile float scale = t->rate_scale; /* as in kopt_run_ */
        whole.rate = kopt_mul_scalar_(whole.rate, scale);
        whole.weight_decay = kopt_mul_scalar_(whole.weight_decay, scale);
    }
    factor = kopt_langevin_factor_(s->rate, kopt_rate_scale_(t), temperature);
    if (kopt_as_u32_(factor) == 0) {
        (KOPT_KERNEL_(step))(&whole);
    } else {
        kopt_copy_noinline_(KOPT_POINTER_(kopt_byte_ *, &local), KOPT_CONST_POINTER_(const kopt_byte_ *, s),
                            sizeof local);
        kopt_copy_job_(&job, &whole);
        kopt_langevin_tiles_(&job, &whole, &local, factor);
    }
    kopt_leave_(&environment);
}

KOPT_API_ kopt_result kopt_langevin_step(kopt_optimizer *opt, const kopt_tensor *tensors, size_t count,
                                         double temperature) {
    kopt_result result;
    kopt_step s;
    uint32_t before;
    size_t i;
    if (opt == KOPT_NULL_ || (tensors == KOPT_NULL_ && count != 0)) return KOPT_ERROR_NULL;
    before = opt->step;
    result = kopt_step_begin(opt, &s);
    if (result != KOPT_OK) return result;
    result = kopt_langevin_rule_(&s, temperature);
    if (result == KOPT_OK) result = kopt_check_list_(&s, tensors, count);
    for (i = 0; i < count && result == KOPT_OK; i++) result = kopt_langevin_check_(&s, &tensors[i], temperature);
    if (result != KOPT_OK) {
        opt->step = before;
        return result;
    }
    for (i = 0; i < count; i++) kopt_langevin_run_(&s, &tensors[i], temperature, 0, tensors[i].n);
    return KOPT_OK;
}

KOPT_API_ kopt_result kopt_langevin_range(const kopt_step *step, const kopt_tensor *t, double temperature, size_t begin,
                                          size_t end) {
    kopt_layout_ at;
    kopt_result result = kopt_check_step_(&at, step, t);
    if (result == KOPT_OK) result = kopt_langevin_rule_(step, temperature);
    if (result == KOPT_OK) result = kopt_langevin_check_(step, t, temperature);
    if (result != KOPT_OK) return result;
    if (begin > end || end > t->n) return KOPT_ERROR_BOUNDS;
    kopt_langevin_run_(step, t, temperature, begin, end);
    return KOPT_OK;
}

#endif

/* ---- the end of the implementation ---- */
#ifdef KOPT_GCC_
#ifdef KOPT_COLD_HERE_
#pragma GCC pop_options
#endif
#ifdef KOPT_OPTIMIZED_HERE_
#pragma GCC pop_options
#endif
#elif defined(_MSC_VER) && !defined(KOPT_GNU_)
#pragma float_control(pop)
#endif
#undef KOPT_IMPLEMENTING_
#endif /* KOPT_IMPLEMENTING_ */

/* ---- LICENCE ------------------------------------------------------------------------------------------------------
   Choose whichever you prefer.

   ALTERNATIVE A - MIT No Attribution
   Copyright (c) 2026 the kahan_opt authors
   Permission is hereby granted, free of charge, to any person obtaining a copy of this software and associated
   documentation files (the "Software"), to deal in the Software without restriction, including without limitation the
   rights to use, copy, modify, merge, publish, distribute, sublicense, and/or sell copies of the Software, and to
   permit persons to whom the Software is furnished to do so.
   THE SOFTWARE IS PROVIDED "AS IS", WITHOUT WARRANTY OF ANY KIND, EXPRESS OR IMPLIED, INCLUDING BUT NOT LIMITED TO THE
   WARRANTIES OF MERCHANTABILITY, FITNESS FOR A PARTICULAR PURPOSE AND NONINFRINGEMENT. IN NO EVENT SHALL THE AUTHORS OR
   COPYRIGHT HOLDERS BE LIABLE FOR ANY CLAIM, DAMAGES OR OTHER LIABILITY, WHETHER IN AN ACTION OF CONTRACT, TORT OR
   OTHERWISE, ARISING FROM, OUT OF OR IN CONNECTION WITH THE SOFTWARE OR THE USE OR OTHER DEALINGS IN THE SOFTWARE.

   ALTERNATIVE B - Public Domain (www.unlicense.org)
   This is free and unencumbered software released into the public domain. Anyone is free to copy, modify, publish, use,
   compile, sell, or distribute this software, either in source code form or as a compiled binary, for any purpose,
   commercial or non-commercial, and by any means. In jurisdictions that recognize copyright laws, the author or authors
   of this software dedicate any and all copyright interest in the software to the public domain. We make this
   dedication for the benefit of the public at large and to the detriment of our heirs and successors. We intend this
   dedication to be an overt act of relinquishment in perpetuity of all present and future rights to this software under
   copyright law. THE SOFTWARE IS PROVIDED "AS IS", WITHOUT WARRANTY OF ANY KIND, as above. */
