/* kahan_opt.h - v0.15 - train neural networks in pure 16 bit as if in fp32 - MIT-0 or public domain

   Optimizers (SGD, AdamW, Lion and others) for weights, gradients and moments in bf16 or fp16. You compute the
   gradients, the library updates the weights. It allocates nothing: all memory is yours.

   DO THIS ONCE: in exactly one C or C++ file, before the include, to create the implementation:

       #define KAHAN_OPT_IMPLEMENTATION
       #include "kahan_opt.h"

   QUICK START: a bf16 weight tensor, its bf16 gradient, and a state block of 6 bytes per weight.

       enum { N = 1000 };
       static kopt_bf16 weight[N], grad[N];
       static unsigned char state[KOPT_STATE_BYTES(N, 6)];

       void train(const float *initial_weights, int steps) {
           kopt_optimizer opt = kopt_adamw(1e-3);          // bf16, Kahan; set any field you like
           kopt_tensor    t   = KOPT_TENSOR(KOPT_BF16, weight, grad, N, state, sizeof state);
           if (kopt_state_init(&opt, &t, 1, initial_weights) != KOPT_OK) return;
           while (steps-- > 0) {
               // ... forward and backward pass: read weight[], write grad[] ...
               if (kopt_optimizer_step(&opt, &t, 1) != KOPT_OK) return;
           }
       }

   A 16-bit weight cannot hold all bits of its new value. opt.rounding says what happens to the part that is cut off.
   Bytes are those of a weight and what is kept beside it. Two sizes of updates, relative to a bf16 weight, whatever its
   residual: the smallest that counts in full (in the mean, within 2 % over weights of all sizes, within 10 % at one
   size), and the smallest that counts:

       opt.rounding       kept beside the weight          bytes   in full   at all
       KOPT_KAHAN         16-bit compensation, stochastic   4     2^-31     2^-33    the default
       KOPT_EXACT         low 16 bits of the fp32 weight    4     2^-22     2^-24    fp32 master weights, bit for bit
       KOPT_COMPACT       8-bit compensation, stochastic    3     2^-22     2^-24    most of Kahan for one byte less
       KOPT_FEEDBACK      nothing; the first moment pays    2     2^-22     2^-24    for Adam and momentum; flickers
       KOPT_STOCHASTIC    nothing; the weight is unbiased   2     2^-22     2^-24    noisy
       KOPT_NEAREST       nothing                           2     2^-6      2^-8     stalls: the baseline

   COMPILES as C99, C11, C17, C++98 and later, with gcc, clang and tcc. Microsoft's compiler has not been run; clang-cl
   compiles the lines that it would take. No flags are needed: the library chooses the best of SSE2, AVX2, AVX-512 and
   NEON at run time, and all of them give the same bits.

   CONTENTS (each entry is a banner: search for it)
       WHAT IT DOES               WHAT IT DOES NOT        CONFIGURATION               CONTRACT
       BYTES PER PARAMETER        FORMATS AND RESULTS     INSTRUCTION SETS            CONVERSIONS OF ONE VALUE
       RANDOM BITS                ONE-ELEMENT UPDATES     INLINE STEPS                OPTIMIZER
       TENSOR AND STATE           STEP                    CHECKPOINTS                 NORM AND CLIPPING
       LOSS SCALING               GRADIENT ACCUMULATION   REDUCTION                   CONVERSIONS OF ARRAYS
       NOT FROZEN                 GRADIENT COMPRESSION    VECTOR MATHEMATICS          RANDOM NUMBERS
       IMPLEMENTATION             COMPILER AND TARGET     INTERNAL TYPES              RULES AND FORMATS
       MEMORY                     BINARY64 ARITHMETIC     EXACT NORM                  FLOATING-POINT ENVIRONMENT
       A STEP BEGUN               A STEP ON TENSORS       ONE PASS PER INSTRUCTION SET
       VOCABULARIES               KERNELS                 DISPATCH                    TILES
       8-BIT MOMENTS IN SCALAR CODE                       PUBLIC FUNCTIONS            LICENCE
*/
/* From 1.0 on, the declarations of any version with the same major number will do. */
#if defined(KOPT_VERSION) && KOPT_VERSION != 1500 &&                                        \
    (KOPT_VERSION < 10000 || KOPT_VERSION / 10000 != 1500 / 10000 || defined(KOPT_PASS_) || \
     (defined(KAHAN_OPT_IMPLEMENTATION) && !defined(KOPT_IMPLEMENTED_)))
#error "two versions of kahan_opt.h in one file: give each a file of its own (KAHAN_OPT_STATIC), see KAHAN_OPT_SELF"
#endif

#ifndef KOPT_PASS_ /* defined where the file includes itself: once per instruction set, for VOCABULARIES and KERNELS */
/* Casts are those of C, also in C++. */
#if (defined(__GNUC__) || defined(__clang__)) && !defined(__TINYC__)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wcast-align" /* loads and stores take any address */
#pragma GCC diagnostic ignored "-Wcast-qual"
#ifdef __cplusplus
#pragma GCC diagnostic ignored "-Wold-style-cast"
#pragma GCC diagnostic ignored "-Wzero-as-null-pointer-constant"
#ifndef __clang__
#pragma GCC diagnostic ignored "-Wuseless-cast"
#endif
#endif
#elif defined(_MSC_VER) /* against /fp:fast. The pop at the end does not restore fp_contract, which has no stack */
#pragma float_control(precise, on, push)
#pragma fp_contract(off)
#endif

#ifndef KAHAN_OPT_H
/* The declarations are tables that are aligned by hand. */
/* clang-format off */
#define KAHAN_OPT_H

/* WHAT IT DOES
   - Updates weights by SGD, Adam, AdamW, AMSGrad, StableAdamW, Lion, Adan, RAdam or Ranger, and averages them. Weights,
     gradients and moments are bf16, fp16 or fp32, in any combination; moments may have 8 bits, too. KAHAN_OPT_VMATH
     adds Adam-atan2 and smooth Lion.
   - Keeps the rounding residual of each 16-bit weight (Kahan, compact, exact), or rounds without bias (stochastic), and
     may pay the rounding error back (feedback).
   - Does the rest of a training loop: exact gradient norm with a check for infinity and NaN, clipping, loss scaling,
     gradient accumulation, counts of weights that stall, gradients compressed to 16, 8 or 1 bit with error feedback,
     and reduction of shards in a fixed order.
   - Gives the same bits however a tensor is split into ranges or shards, on any thread and any machine.

   WHAT IT DOES NOT
   - No malloc, threads, stdio, libm or errno. No mutable global state except the cached choice of the instruction set.
   - No forward or backward pass: the library begins where you have a gradient.
   - No promise about NaN payloads in conversions (a NaN stays a NaN). Steps store the canonical NaN.

   CONFIGURATION (define before the include; all = in every file, with the same value; impl = where it is implemented)
   KAHAN_OPT_IMPLEMENTATION   impl  Creates the implementation. Define it in exactly one file of the program.
   KAHAN_OPT_STATIC           impl  Makes every function static, so that one program may hold several private copies,
                                    even of different versions, each in its own file. Define it before the first include
                                    in that file. Costs one copy of the code per file.
   KAHAN_OPT_API              all   Declaration specifier of the functions, e.g. __declspec(dllexport). Cannot be used
                                    together with KAHAN_OPT_STATIC.
   KAHAN_OPT_NO_SIMD          impl  Compiles the scalar code only: 20-100x slower, a third of the code. To drop
                                    functions that you do not call, compile with -ffunction-sections and link with
                                    -Wl,--gc-sections. Where that is too much, see INLINE STEPS.
   KAHAN_OPT_VMATH            all   Adds vector mathematics, random numbers and the rules Adam-atan2 and smooth Lion:
                                    see their sections. Without it, their declarations are hidden; the layout of structs
                                    is the same. Costs 2 s of compile time and 42 KB of code.
   KAHAN_OPT_SLEEF            impl  With KAHAN_OPT_VMATH: SLEEF (3.5.1 or later, x86-64 or AArch64) computes
                                    kopt_vmath_exp to kopt_vmath_atan2, and the atan2 and tanh of a step. Link with
                                    -lsleef. The bits are others, but still the same on every instruction set.
                                    kopt_map and random numbers never use it.
   KAHAN_OPT_ALL_ISAS         impl  Compiles every instruction set of the machine. Without it, a build leaves out those
                                    that the compiler's flags make useless: SSE2 if they promise AVX2 (-march=native,
                                    -mavx2, /arch:AVX2), and AVX2 if they promise AVX-512.
   KAHAN_OPT_BINDINGS         all   Leaves declarations only, without inline functions and attributes, for programs that
                                    make bindings: cffi, SWIG (which has it by itself), LuaJIT's ffi.cdef. They call
                                    kopt_optimizer_init() in place of a constructor.
   KAHAN_OPT_SELF             impl  The name of this file, with quotes, if you renamed it. The file includes itself, so
                                    it must stay a separate file. gcc 12, clang 9 and later find the name themselves.

   CONTRACT
   1. Same bits everywhere. The result of a step depends on its inputs alone: not on the instruction set, the compiler
      or its flags (-Ofast, -ffp-contract=fast), the caller's rounding mode or FTZ/DAZ, nor on threads, ranges or
      shards. Every operation (+ - * / and sqrt) of the formulas in docs/numerics.md is one IEEE binary32 operation, in
      the written order, never fused. Scalars such as the corrected learning rate are computed once per step.
   2. Fidelity. Weight decay is part of the compensated update. Moments are computed in fp32, and the update uses them
      before they are rounded: only stores round. By default, 16-bit moments are stored with stochastic rounding.
   3. NaN stays NaN, and infinity stays infinity. In the last binade step before infinity, from the largest finite
      16-bit number on, every rounding is to nearest, stochastic rounding included. When a weight becomes infinite or
      NaN, its residual becomes zero.
   4. Subnormals. A step stores bf16 and fp32 values below 2^-126 in magnitude as +0. fp16 subnormals are ordinary
      values, and 8-bit moments are not flushed. Conversions keep all subnormals.
   5. Random bits are a pure function of (seed, step, tensor id, stream, global element index): see RANDOM BITS.
   6. Memory. Any alignment (inline functions: that of the type); n up to SIZE_MAX / 32 - 8; pointers may be NULL if n
      is 0. The stack use, measured with gcc and clang, is at most 12 KB (3 KB in a build without vectors), and 4 KB
      more with 8-bit moments or with what KAHAN_OPT_VMATH adds. Compiled by clang -O0, functions use up to 48 KB.
   7. Bad input is refused before anything is written, but inline steps check nothing. Every function that can fail
      returns a kopt_result, which kopt_result_string() explains. Overlapping buffers of one tensor are refused; for
      lists see STEP. A struct of zeros means the defaults (kopt_tensor, kopt_norm, kopt_random_key) or is refused.
   8. State is bytes. kopt_save() writes a list of tensors, weights included, as one checkpoint: portable
      (little-endian), with a checksum. kopt_load() checks all of it, then sets weights, states and optimizer. Steps
      after that continue bit for bit. A checkpoint loads only under the rule, decay mode, formats and roundings that
      made it, and only if it is byte for byte what kopt_save() would write, whoever made its checksum. Later versions
      load it, and write its layout again wherever that holds all. Equal runs have equal bytes in weights and state
      blocks: a load or another learning rate on the way leaves no trace of its own.
   9. Growth. Minor versions add functions, rules, errors and other values of enums: give a switch a default, and let a
      binding take an enum as an int. Structs grow into their reserved fields, which must be 0; those without any never
      change. No struct has padding: neither packing options nor a #pragma pack change its layout, unless enums are
      short (-fshort-enums, the default of arm-none-eabi). Constructors compare the version of the header and the sizes
      of its structs with those of the implementation. If they differ (before 1.0 in any digit, later in the major
      version; the implementation may be the newer one), if enums are not as short in all files, or if a call reaches
      another version than the constructor did (a plug-in that was reloaded), every call with that optimizer returns
      KOPT_ERROR_VERSION and touches no memory.

   BYTES PER PARAMETER (weight + gradient + state; AdamW)
                               weight   grad   residual   moments   total
   fp32                           4       4        -         8        16
   fp32 weights, bf16 copy      4 + 2     2        -         8        16    classic mixed precision
   bf16 KAHAN or EXACT            2       2        2         4        10
   bf16 COMPACT                   2       2        1         4         9
   bf16 FEEDBACK or STOCHASTIC    2       2        -         4         8
   bf16 KAHAN, 8-bit second m.    2       2        2         3.02      9.02
   bf16 COMPACT, 8-bit second m.  2       2        1         3.02      8.02
   bf16 COMPACT, 8-bit moments    2       2        1         2.03      7.03
   bf16 FEEDBACK, 8-bit moments   2       2        -         2.03      6.03
   Instead of 2 moments, EMA and SGD without momentum keep 0, SGD with momentum and Lion 1, AMSGrad 3 and Adan 4.
   Ranger keeps 2 and a second copy of weight and residual. Without a gradient buffer (step each tensor as soon as its
   gradient exists, then reuse the buffer), subtract 2.

   VERSION HISTORY: docs/CHANGELOG.md
*/

#define KOPT_VERSION 1500 /* 10000 * major + 100 * minor + patch; the check at the top of the file repeats it */

#include <stddef.h>
#include <stdint.h>

#if defined(SWIG) && !defined(KAHAN_OPT_BINDINGS)
#define KAHAN_OPT_BINDINGS
#endif

#ifdef __cplusplus
#define KOPT_EXTERN_ extern "C"
#else
#define KOPT_EXTERN_ extern
#endif

#if (defined(__GNUC__) || defined(__clang__)) && !defined(__TINYC__)
#define KOPT_GNU_ 1 /* gcc, clang, clang-cl: GNU attributes, builtins and assembly are available */
#endif
#if defined(KOPT_GNU_) && !defined(__clang__) && !defined(__INTEL_COMPILER) && !defined(__NVCOMPILER)
#define KOPT_GCC_ 1 /* gcc itself: the others define __GNUC__, too, but have neither its pragmas nor its headers */
#endif
#if defined(__aarch64__) || defined(__arm64ec__) /* Windows' ARM64EC calls itself x86-64, too */
#define KOPT_AARCH64_ 1
#elif defined(__x86_64__)
#define KOPT_X86_64_ 1
#endif

#if defined(__cplusplus) || (defined(__STDC_VERSION__) && __STDC_VERSION__ >= 199901L)
#define KOPT_INLINE_KEYWORD_ inline
#else
#define KOPT_INLINE_KEYWORD_ __inline
#endif
/* Inline functions have external linkage in C++, where a module exports no others. */
#if defined(__cplusplus) && !defined(KAHAN_OPT_STATIC)
#define KOPT_LOCAL_
#else
#define KOPT_LOCAL_ static
#endif
/* Marks the functions that kahan_opt_cuda.cuh calls on the host and on the device. */
#ifdef __CUDACC__
#define KOPT_HOST_DEVICE_ __host__ __device__
#else
#define KOPT_HOST_DEVICE_
#endif
/* always_inline in C++: else linkers merge the functions of files that have another header or other flags. And for gcc
   -O0: the kernels are optimized at -O0, too, but gcc would call these functions from them. */
#if defined(KOPT_GNU_) && !defined(__CUDACC__) &&            \
    ((defined(__cplusplus) && !defined(KAHAN_OPT_STATIC)) || \
     (defined(KOPT_GCC_) && !defined(__OPTIMIZE__) &&        \
      (defined(KOPT_X86_64_) || defined(__i386__) || defined(KOPT_AARCH64_))))
#define KOPT_INLINE_ KOPT_LOCAL_ KOPT_INLINE_KEYWORD_ __attribute__((__always_inline__))
#define KOPT_HOST_INLINE_ KOPT_INLINE_ /* of what calls the implementation, which is on the host */
#else
#define KOPT_INLINE_ KOPT_LOCAL_ KOPT_HOST_DEVICE_ KOPT_INLINE_KEYWORD_
#define KOPT_HOST_INLINE_ KOPT_LOCAL_ KOPT_INLINE_KEYWORD_
#endif

/* Marks a static function that may stay unused. Not the attribute for clang, which warns if a function that has it is
   used; clang does not warn about unused inline functions. */
#ifdef KOPT_GCC_
#define KOPT_UNUSED_ __attribute__((__unused__))
#else
#define KOPT_UNUSED_ KOPT_INLINE_KEYWORD_
#endif

#if defined(KAHAN_OPT_STATIC) && defined(KAHAN_OPT_API)
#error "KAHAN_OPT_STATIC and KAHAN_OPT_API contradict each other: define one of them"
#elif defined(KAHAN_OPT_STATIC)
#define KOPT_API_ static KOPT_UNUSED_
#define KOPT_API_IS_STATIC_
#elif defined(KAHAN_OPT_API)
#define KOPT_API_ KOPT_EXTERN_ KAHAN_OPT_API
#else
#define KOPT_API_ KOPT_EXTERN_
#endif

/* The kopt_result of a public function: compilers warn if the caller ignores it. gcc and clang look at the function in
   any language, others at the enum (KOPT_NODISCARD_, from C++17 and C23 on), Microsoft's /analyze at _Check_return_. */
#if defined(KOPT_GNU_) && !defined(KAHAN_OPT_BINDINGS)
#define KOPT_RESULT_ __attribute__((__warn_unused_result__)) kopt_result
#elif defined(_Check_return_)
#define KOPT_RESULT_ _Check_return_ kopt_result
#else
#define KOPT_RESULT_ kopt_result
#endif
#if !defined(KOPT_GNU_) && ((defined(__cplusplus) && __cplusplus >= 201703L) || \
                            (defined(_MSVC_LANG) && _MSVC_LANG >= 201703L) ||   \
                            (defined(__STDC_VERSION__) && __STDC_VERSION__ >= 202311L))
#define KOPT_NODISCARD_ [[nodiscard]]
#else
#define KOPT_NODISCARD_
#endif

/* ---- FORMATS AND RESULTS ---------------------------------------------------------------------------------------- */

/* The 16-bit numbers, as integers that hold their bits. Not structs: 16-bit arrays come from files, NumPy, other
   libraries and the 16-bit types of compilers, and are used here without a cast of each pointer. */
typedef uint16_t kopt_bf16; /* 1 sign, 8 exponent, 7 fraction bits: the upper half of an fp32 */
typedef uint16_t kopt_fp16; /* 1 sign, 5 exponent, 10 fraction bits: IEEE binary16 */

/* Formats of arrays. docs/numerics.md section 1 has their ranges. */
typedef enum kopt_format {
    KOPT_F32 = 0,  /* float: IEEE binary32 */
    KOPT_BF16 = 1, /* kopt_bf16 */
    KOPT_FP16 = 2, /* kopt_fp16 */
    KOPT_Q8 = 3,   /* moments and compressed gradients only: 8-bit codes and one byte of scale per 64 values
                      (docs/numerics.md section 6b). Steps of Adam have the length of those with fp32 moments, within
                      3 % on average, beside an outlier of up to 1e4 in the block, and a noise of 8 to 31 %; from a
                      beta1 of 0.99 on, keep first moments in bf16 (docs/evidence.md) */
    KOPT_Q1 = 4    /* compressed gradients only: signs and one fp32 scale per 256 values */
} kopt_format;

/* Bytes of n values, scales included; 0 if there is no such format or n is too large. If n is a multiple of 64
   (KOPT_Q8) or 256 (KOPT_Q1), it is also the offset of element n in a longer code. */
KOPT_API_ size_t kopt_format_size(kopt_format format, size_t n);

/* How a value is rounded to 16 bits, and what is kept of the part that is cut off. */
typedef enum kopt_rounding {
    KOPT_NEAREST = 0,    /* to nearest, ties to even */
    KOPT_STOCHASTIC = 1, /* away from zero with a probability equal to the fraction of an ulp cut off: unbiased */
    KOPT_KAHAN = 2,      /* to nearest (bf16: ties away); a 16-bit compensation holds the residual (fp16: * 2^11) */
    KOPT_COMPACT = 3,    /* to nearest, ties away; an 8-bit integer holds the residual in units of 2^-8 ulp */
    KOPT_EXACT = 4,      /* to nearest, ties away; a 16-bit integer holds the residual in units of 2^-16 ulp: all of
                            the fp32 value (fp16: multiples of 2^-40, which is all of it from 2^-17 on) */
    KOPT_FEEDBACK = 5    /* STOCHASTIC, and the first moment pays the rounding error back in the next steps (ECO, 2026;
                            docs/numerics.md section 3a). For Adam, RAdam, Adan and SGD with momentum; beta1 or momentum
                            above 0 and at most 0.999; first moments in fp32, or stochastic in bf16 or 8 bits. Weights
                            flicker by an ulp, also where gradients are 0, and the first moment is no mean of gradients.
                            Where the rate of a tensor rises, its first moment is cut by the same factor. A step of
                            element 0 stores the rate: step that element in each step */
} kopt_rounding;

/* Update rules. docs/numerics.md sections 5 to 6a have their formulas. */
typedef enum kopt_rule {
    KOPT_RULE_SGD = 0,        /* with or without momentum, Nesterov */
    KOPT_RULE_ADAM = 1,       /* Adam and AdamW, which differ in opt.decay_mode; AMSGrad: opt.amsgrad */
    KOPT_RULE_LION = 2,       /* Chen et al. 2023 */
    KOPT_RULE_ADAN = 3,       /* Xie et al. 2022 */
    KOPT_RULE_RADAM = 4,      /* Liu et al. 2020 */
    KOPT_RULE_RANGER = 5,     /* RAdam with Lookahead (Zhang et al. 2019) */
    KOPT_RULE_EMA = 6,        /* the average of other weights, which are passed as the "gradient" */
    KOPT_RULE_ADAM_ATAN2 = 7, /* Adam without eps (Everett et al. 2024); only with KAHAN_OPT_VMATH */
    /* For kopt_optimizer_init() only: the constructors of these names. opt.rule then is that of Adam or Lion. */
    KOPT_RULE_ADAMW = 64,
    KOPT_RULE_STABLE_ADAMW = 65,
    KOPT_RULE_SMOOTH_LION = 66 /* only with KAHAN_OPT_VMATH */
} kopt_rule;

/* How weight decay enters the update of a weight w with gradient g. */
typedef enum kopt_decay_mode {
    KOPT_DECAY_L2 = 0,             /* g += weight_decay * w                  (PyTorch's Adam and SGD) */
    KOPT_DECAY_DECOUPLED = 1,      /* w -= lr * weight_decay * w             (PyTorch's AdamW) */
    KOPT_DECAY_FULLY_DECOUPLED = 2 /* w -= (lr / max_lr) * weight_decay * w  (optimi, FlashOptim) */
} kopt_decay_mode;

/* What a function that can fail returns: see CONTRACT, 7. Compilers warn if it is not used. To ignore it: `kopt_result
   ignored = kopt_step_run(&step, &t, 1); (void)ignored;`. gcc warns about `(void)kopt_step_run(&step, &t, 1)`, too. */
typedef enum KOPT_NODISCARD_ kopt_result {
    KOPT_OK = 0,         /* success */
    KOPT_ERROR_NULL,     /* a required pointer is NULL */
    KOPT_ERROR_OPTION,   /* an option has a value that does not exist, does not apply, or is not in this build:
                            kopt_explain() names the field; or a reserved field is not 0 */
    KOPT_ERROR_RANGE,    /* a hyper-parameter or another number is out of range, or NaN: kopt_explain() */
    KOPT_ERROR_BOUNDS,   /* begin > end, end > n, or a size, index or id that is too large; codes: a range that
                            splits a block of 64 (KOPT_Q8) or 256 (KOPT_Q1) */
    KOPT_ERROR_SIZE,     /* a state block or a buffer is too small, or a checkpoint was cut off */
    KOPT_ERROR_STATE,    /* not a state block or checkpoint, or one of an unknown version; or one with 8-bit moments
                            of version 0.9 or before, whose codes were others */
    KOPT_ERROR_MISMATCH, /* the state block, checkpoint or GPU plan belongs to another optimizer, tensor or shard; or a
                            loss scale to other optimizers: see kopt_scaler_begin() */
    KOPT_ERROR_CHECKSUM, /* the state block or checkpoint is damaged */
    KOPT_ERROR_OVERLAP,  /* two buffers overlap */
    KOPT_ERROR_STEP,     /* the step was not begun; all 2^32 - 1 steps are used up; a part of a tensor is stepped by
                            StableAdamW while stable_scale is 0; or kopt_state_dither() comes too late */
    KOPT_ERROR_ISA,      /* this build or this machine does not have the instruction set, or a GPU */
    KOPT_ERROR_DEVICE,   /* a CUDA call failed: cudaPeekAtLastError() says why */
    KOPT_ERROR_UNINITIALIZED, /* no constructor made the optimizer, accumulator or compressor */
    KOPT_ERROR_ID,       /* the ids of a list of tensors do not increase: call kopt_list_set_ids() */
    KOPT_ERROR_CAPTURE,  /* the CUDA stream is being captured in a graph, which would repeat the call */
    KOPT_ERROR_FILE,     /* a function of kopt_file failed */
    KOPT_ERROR_VERSION,  /* the header that made the optimizer and the implementation differ: see CONTRACT, 9; or
                            another implementation began the step; or the checkpoint has the layout of a later one */
    KOPT_ERROR_CLOSURE   /* a function of kopt_closure failed */
} kopt_result;

/* Explains a result in one English sentence. Never NULL. */
KOPT_API_ const char *kopt_result_string(kopt_result result);

/* KOPT_VERSION of the implementation that was linked. */
KOPT_API_ int kopt_version(void);

/* ---- INSTRUCTION SETS -------------------------------------------------------------------------------------------- */

/* Instruction sets. All give the same bits. The best one of this machine is used, or that of kopt_isa_force(). */
typedef enum kopt_isa {
    KOPT_ISA_SCALAR = 0,  /* plain C: in every build */
    KOPT_ISA_SSE2 = 1,    /* of every x86-64 */
    KOPT_ISA_AVX2 = 2,    /* with F16C */
    KOPT_ISA_AVX512 = 3,  /* F, BW, DQ and VL */
    KOPT_ISA_NEON = 4,    /* of AArch64 */
    KOPT_ISA_SIMD128 = 5, /* of WebAssembly (with -msimd128) */
    KOPT_ISA_AUTO = 255   /* for kopt_isa_force() */
} kopt_isa;

/* 1 if this build contains the instruction set and this machine has it, else 0. */
KOPT_API_ int kopt_isa_usable(kopt_isa isa);

/* The instruction set that calls use now. */
KOPT_API_ kopt_isa kopt_isa_current(void);

/* Makes all later calls, of all threads, use isa: for tests and measurements. KOPT_ISA_AUTO makes the choice automatic
   again. KOPT_ERROR_ISA if isa is not usable. */
KOPT_API_ KOPT_RESULT_ kopt_isa_force(kopt_isa isa);

/* "scalar", "sse2", ...; "unknown" for any other value. Never NULL. A loop over instruction sets ends at "unknown". */
KOPT_API_ const char *kopt_isa_name(kopt_isa isa);

/* ---- CONVERSIONS OF ONE VALUE ------------------------------------------------------------------------------------ */

#ifndef KAHAN_OPT_BINDINGS
/* These functions use integer arithmetic and exact conversions only, so they are correct for every input in any
   floating-point environment. Subnormals are kept. Compilers vectorize loops over them, as far as -O3 or
   -march=native lets them; kopt_convert() is fast in every build. */

typedef union kopt_bitcast_ {
    float f;
    uint32_t u;
} kopt_bitcast_;

/* Bitcasts. */
KOPT_INLINE_ uint32_t kopt_bits_(float x) {
    const kopt_bitcast_ w = {x};
    return w.u;
}

KOPT_INLINE_ uint32_t kopt_as_u32_(float x) {
    uint32_t bits = kopt_bits_(x);
#if defined(KOPT_GNU_) && !defined(__CUDA_ARCH__)
    __asm__("" : "+r"(bits)); /* clang 19 -Ofast turns tests of the bits into tests of x, and assumes it is not NaN */
#endif
    return bits;
}

KOPT_INLINE_ float kopt_as_f32_(uint32_t bits) {
    kopt_bitcast_ w;
    w.u = bits;
    return w.f;
}

/* Is mag, the bits of an fp32 number without its sign, a NaN? Opaque for the same reason as kopt_as_u32_, but what is
   opaque is a constant, which leaves the loop: compilers vectorize loops over the conversions below. */
KOPT_INLINE_ int kopt_is_nan_(uint32_t mag) {
    uint32_t infinity = 0x7F800000u;
#if defined(KOPT_GNU_) && defined(__clang__) && !defined(__CUDA_ARCH__)
    __asm__("" : "+r"(infinity));
#endif
    return mag > infinity;
}

/* x * 2^-shift, rounded to nearest, ties to even. shift is 1 to 28; x + 2^shift is below 2^32. */
KOPT_INLINE_ uint32_t kopt_shift_to_even_(uint32_t x, uint32_t shift) {
    return (x + ((uint32_t)1 << (shift - 1)) - 1 + ((x >> shift) & 1u)) >> shift;
}

/* Exact. bf16 is the upper half of the fp32 word: s eeeeeeee fffffff | ffff ffff ffff ffff */
KOPT_INLINE_ float kopt_f32_from_bf16(kopt_bf16 x) { return kopt_as_f32_((uint32_t)x << 16); }

/* Rounds to nearest, ties to even. Overflow gives infinity. */
KOPT_INLINE_ kopt_bf16 kopt_bf16_from_f32(float x) {
    const uint32_t u = kopt_bits_(x);
    return (kopt_bf16)(kopt_is_nan_(u & 0x7FFFFFFFu) ? (u >> 16) | 0x0040u /* quiet NaN */
                                                     : kopt_shift_to_even_(u, 16));
}

/* Exact. fp16: s eeeee ffffffffff with exponent bias 15; fp32: s eeeeeeee ffffffffff fffffffffffff with bias 127. */
KOPT_INLINE_ float kopt_f32_from_fp16(kopt_fp16 x) {
    const uint32_t u = x, sign = (u & 0x8000u) << 16, mag = u & 0x7FFFu;
    const uint32_t integer = kopt_bits_((float)(int32_t)mag);                         /* exact */
    const int32_t tiny = (int32_t)integer - 0x0C000000;                               /* subnormal: mag * 2^-24; or 0 */
    const uint32_t large = mag > 0x7C00u    ? 0x7FC00000u | (mag << 13)               /* quiet NaN */
                           : mag == 0x7C00u ? 0x7F800000u                             /* infinity */
                           : mag >= 0x0400u ? (mag << 13) + 0x38000000u               /* normal: add 112 to exponent */
                                            : 0;
    return kopt_as_f32_(sign | (tiny > (int32_t)large ? (uint32_t)tiny : large));
}

/* Rounds to nearest, ties to even. Overflow, from 65520 on, gives infinity. */
KOPT_INLINE_ kopt_fp16 kopt_fp16_from_f32(float x) {
    const uint32_t u = kopt_bits_(x), sign = (u >> 16) & 0x8000u, mag = u & 0x7FFFFFFFu, exponent = mag >> 23;
    const int normal = exponent >= 113;
    const uint32_t shift = normal ? 13 : exponent > 101 ? 126 - exponent : 25; /* below 2^-25: to 0 */
    /* a subnormal is a multiple of 2^-24 */
    const uint32_t digits = normal ? mag - 0x38000000u : (mag & 0x007FFFFFu) | 0x00800000u;
    const uint32_t half = kopt_shift_to_even_(digits, shift), rounded = half < 0x7C00u ? half : 0x7C00u;
    return (kopt_fp16)(sign | (kopt_is_nan_(mag) ? 0x7E00u | ((mag >> 13) & 0x03FFu) : rounded));
}

/* Extended bits (docs/numerics.md section 1): a 32-bit word whose upper half is x truncated to bf16 or fp16, and whose
   lower half is the part cut off, in units of 2^-16 ulp. A NaN becomes the canonical NaN. */
KOPT_INLINE_ uint32_t kopt_extended_bf16_(float x) {
    const uint32_t u = kopt_bits_(x);
    return kopt_is_nan_(u & 0x7FFFFFFFu) ? 0x7FC00000u : u;
}

KOPT_INLINE_ uint32_t kopt_extended_fp16_(float x) {
    uint32_t u = kopt_bits_(x), sign = u & 0x80000000u, mag = u & 0x7FFFFFFFu, digits;
    if (kopt_is_nan_(mag)) return 0x7E000000u;
    if (mag >= 0x47800000u) return sign | 0x7C000000u;
    if (mag >= 0x38800000u) return sign | ((mag - 0x38000000u) << 3);
    if (mag < 0x2B000000u) return sign;                                      /* below 2^-41: rounds to 0 * 2^-40 */
    digits = (mag & 0x007FFFFFu) | 0x00800000u;                              /* |x| = digits * 2^(exponent - 150) */
    if (mag >= 0x37000000u) return sign | (digits << ((mag >> 23) - 110));   /* from 2^-17 on: a multiple of 2^-40 */
    return sign | kopt_shift_to_even_(digits, 110 - (mag >> 23));
}

/* Stochastic rounding: away from zero with a probability equal to the fraction of an ulp cut off, by the lower 16 bits
   of random16 (uniform). In the last binade step before infinity, to nearest. A NaN becomes the canonical NaN. */
KOPT_INLINE_ kopt_bf16 kopt_bf16_from_f32_stochastic(float x, uint32_t random16) {
    uint32_t u = kopt_extended_bf16_(x);
    return (kopt_bf16)((u + ((u & 0x7FFFFFFFu) >= 0x7F7F0000u ? 0x8000u : random16 & 0xFFFFu)) >> 16);
}

/* The same for fp16. Bits of x below 2^-40 are rounded to nearest before that. */
KOPT_INLINE_ kopt_fp16 kopt_fp16_from_f32_stochastic(float x, uint32_t random16) {
    uint32_t u = kopt_extended_fp16_(x);
    return (kopt_fp16)((u + ((u & 0x7FFFFFFFu) >= 0x7BFF0000u ? 0x8000u : random16 & 0xFFFFu)) >> 16);
}
#endif

/* ---- RANDOM BITS ------------------------------------------------------------------------------------------------- */

/* Selects random numbers: element i of an array gets those of global index first_index + i. A struct of zeros is valid.
   Arrays that need independent numbers must differ in seed, step or id, or have no global index in common. */
typedef struct kopt_random_key {
    uint64_t seed;        /* of the run */
    uint32_t step;        /* of the training, or 0 */
    uint32_t id;          /* of the tensor or array */
    uint64_t first_index; /* global index of element 0; below 2^63 */
} kopt_random_key;

/* The random bits r of element i, from Philox4x32-7 (Salmon et al. 2011): see docs/numerics.md section 7. stream is 0
   to 15, and reserved above: the library uses 0 to 7, and 8 to 15 are yours. KOPT_RANDOM_STORE_(r, k) is the 16-bit
   random number of the element's store k, 0 to 4; it evaluates r twice. Store 0 is that of the weight or its
   compensation, store k that of the k-th moment. Functions of one value use only the lower 16 bits of random16, which
   are number 0: you can pass r to them. As a whole, r is not a uniform 32-bit number. */
KOPT_API_ uint32_t kopt_random(kopt_random_key key, uint32_t stream, uint64_t i);
#define KOPT_RANDOM_STORE_(r, k) (((r) + (k) * ((r) >> 16)) & 0xFFFFu)

/* ---- ONE-ELEMENT UPDATES ----------------------------------------------------------------------------------------- */

#ifndef KAHAN_OPT_BINDINGS
/* For code without a gradient buffer: `*w -= lr * dw` becomes kopt_kahan_add_bf16(w, c, -lr * dw, random16). */

/* Makes x opaque to the compiler, which then cannot fuse or reassociate operations across it or keep excess precision.
   KOPT_REGISTER_ is the constraint of a register that holds a float on this machine, or of memory. */
#if defined(__AVX512F__) && defined(KOPT_X86_64_)
#define KOPT_REGISTER_ "v"
#elif defined(KOPT_X86_64_) || (defined(__i386__) && defined(__SSE2_MATH__))
#define KOPT_REGISTER_ "x"
#elif defined(KOPT_AARCH64_)
#define KOPT_REGISTER_ "w"
#elif defined(__arm__) && defined(__ARM_FP)
#define KOPT_REGISTER_ "t"
#elif defined(__riscv_flen) || defined(__s390x__) || defined(__mips_hard_float) || \
    defined(__loongarch_hard_float) || (defined(__powerpc__) && !defined(_SOFT_FLOAT))
#define KOPT_REGISTER_ "f"
#elif defined(__i386__) || defined(__wasm__)
#define KOPT_REGISTER_ "m"
#else
#define KOPT_REGISTER_ "r"
#endif
#if !defined(KOPT_GNU_) || defined(__CUDA_ARCH__)
#define KOPT_OPAQUE_FLOAT_(x) ((void)0)
#else
#define KOPT_OPAQUE_FLOAT_(x) __asm__("" : "+" KOPT_REGISTER_(x))
#endif

/* Functions of one operation. On a GPU it is an instruction in PTX, which no flag of nvcc changes. */
#ifdef __CUDA_ARCH__
#define KOPT_PTX_(name, number, letter, ptx)                            \
    KOPT_INLINE_ number name(number a, number b) {                      \
        number r;                                                       \
        asm(ptx " %0, %1, %2;" : "=" letter(r) : letter(a), letter(b)); \
        return r;                                                       \
    }
#define KOPT_OPERATION_(name, operation, ptx) KOPT_PTX_(name, float, "f", ptx ".f32")
#else
#define KOPT_OPERATION_(name, operation, ptx)   \
    KOPT_INLINE_ float name(float a, float b) { \
        float r = a operation b;                \
        KOPT_OPAQUE_FLOAT_(r);                  \
        return r;                               \
    }
#endif
KOPT_OPERATION_(kopt_add_, +, "add.rn")
KOPT_OPERATION_(kopt_sub_, -, "sub.rn")
KOPT_OPERATION_(kopt_mul_, *, "mul.rn")

/* a / b, correctly rounded: in assembly, as -mrecip, -mlow-precision-div and PowerPC's clang -Ofast use estimates. */
KOPT_INLINE_ float kopt_div_(float a, float b) {
#ifdef __CUDA_ARCH__
    asm("div.rn.f32 %0, %1, %2;" : "=f"(a) : "f"(a), "f"(b));
#elif defined(KOPT_GNU_) && defined(__powerpc__) && !defined(_SOFT_FLOAT)
    __asm__("fdivs %0, %1, %2" : "=f"(a) : "f"(a), "f"(b));
#elif defined(KOPT_GNU_) && (defined(KOPT_X86_64_) || defined(__SSE2_MATH__)) && defined(__AVX__)
    __asm__("vdivss {%2, %1, %0|%0, %1, %2}" : "=x"(a) : "x"(a), "x"(b));
#elif defined(KOPT_GNU_) && (defined(KOPT_X86_64_) || defined(__SSE2_MATH__))
    __asm__("divss {%2, %0|%0, %2}" : "=x"(a) : "0"(a), "x"(b));
#elif defined(KOPT_GNU_) && defined(KOPT_AARCH64_)
    __asm__("fdiv %s0, %s1, %s2" : "=w"(a) : "w"(a), "w"(b));
#elif defined(KOPT_GNU_) && defined(__arm__) && defined(__ARM_FP) && (__ARM_FP & 4)
    __asm__("vdiv.f32 %0, %1, %2" : "=t"(a) : "t"(a), "t"(b));
#else
#ifdef KOPT_GNU_ /* or -freciprocal-math multiplies by 1 / b, computed once for a loop, or for two a */
    __asm__("" : "+" KOPT_REGISTER_(a), "+" KOPT_REGISTER_(b));
#endif
    a = a / b;
    KOPT_OPAQUE_FLOAT_(a);
#endif
    return a;
}

/* Square root, correctly rounded: one instruction where the machine has it, else bit by bit. */
KOPT_INLINE_ float kopt_sqrt_(float x) {
#ifdef __CUDA_ARCH__
    asm("sqrt.rn.f32 %0, %1;" : "=f"(x) : "f"(x));
#elif defined(KOPT_GNU_) && (defined(KOPT_X86_64_) || defined(__SSE2_MATH__)) && defined(__AVX__)
    __asm__("vsqrtss {%1, %1, %0|%0, %1, %1}" : "=x"(x) : "x"(x));
#elif defined(KOPT_GNU_) && (defined(KOPT_X86_64_) || defined(__SSE2_MATH__))
    __asm__("sqrtss {%1, %0|%0, %1}" : "=x"(x) : "x"(x));
#elif defined(KOPT_GNU_) && defined(KOPT_AARCH64_)
    __asm__("fsqrt %s0, %s1" : "=w"(x) : "w"(x));
#elif defined(KOPT_GNU_) && (defined(__riscv_flen) || defined(__loongarch_hard_float))
    __asm__("fsqrt.s %0, %1" : "=f"(x) : "f"(x));
#elif defined(KOPT_GNU_) && defined(__arm__) && defined(__ARM_FP) && (__ARM_FP & 4)
    __asm__("vsqrt.f32 %0, %1" : "=t"(x) : "t"(x));
#elif defined(KOPT_GNU_) && defined(__wasm__)
    x = __builtin_sqrtf(x);
    KOPT_OPAQUE_FLOAT_(x);
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
    root = (root + 1u) >> 1; /* never a tie: a root of exactly 25 bits has a square of 49 or 50 bits, and x has 24 */
    x = kopt_as_f32_((exponent << 23) + (root - 0x00800000u));
#endif
    return x;
}

/* *w += delta. The compensation *c, 0 at first, keeps what does not fit into *w, so that updates down to 2^-31 of the
   weight count in full, in the mean. In the default floating-point environment, which it does not set, the bits are
   those of a step's KAHAN store with the same random16. random16 = 0x8000 rounds *c to nearest, ties away from zero. */
KOPT_INLINE_ void kopt_kahan_add_bf16(kopt_bf16 *w, kopt_bf16 *c, float delta, uint32_t random16) {
    float old = kopt_f32_from_bf16(*w), y, sum;
    uint32_t rounded, compensation;
    KOPT_OPAQUE_FLOAT_(delta); /* or a product that the caller passes is fused with the first addition */
    y = kopt_add_(kopt_f32_from_bf16(*c), delta);
    sum = kopt_add_(old, y);
    rounded = (kopt_extended_bf16_(sum) + 0x8000u) >> 16;
    compensation = kopt_bf16_from_f32_stochastic(kopt_add_(kopt_sub_(old, kopt_as_f32_(rounded << 16)), y), random16);
    /* 0 beside a weight that is infinite or NaN; below 2^-126 both are flushed to zero */
    if ((rounded & 0x7F80u) == 0x7F80u || (compensation & 0x7F80u) == 0) compensation = 0;
    *w = (kopt_bf16)((rounded & 0x7F80u) == 0 ? 0 : rounded);
    *c = (kopt_bf16)compensation;
}

/* kopt_f32_from_fp16() where no loop is vectorized: fewer instructions, as the branches are easy to predict. */
KOPT_INLINE_ float kopt_f32_from_fp16_by_branches_(kopt_fp16 x) {
    uint32_t u = x, sign = (u & 0x8000u) << 16, mag = u & 0x7FFFu, exponent = 113;
    if (mag > 0x7C00u) return kopt_as_f32_(sign | 0x7FC00000u | (mag << 13));       /* quiet NaN */
    if (mag == 0x7C00u) return kopt_as_f32_(sign | 0x7F800000u);                    /* infinity */
    if (mag >= 0x0400u) return kopt_as_f32_(sign | ((mag << 13) + 0x38000000u));    /* normal: add 112 to exponent */
    if (mag == 0) return kopt_as_f32_(sign);
    for (; mag < 0x0400u; mag <<= 1) exponent--;                                    /* subnormal: mag * 2^-24 */
    return kopt_as_f32_(sign | (exponent << 23) | ((mag & 0x03FFu) << 13));
}

/* The same for fp16. The compensation holds the residual * 2^11, so that it does not underflow. */
KOPT_INLINE_ void kopt_kahan_add_fp16(kopt_fp16 *w, kopt_fp16 *c, float delta, uint32_t random16) {
    float old = kopt_f32_from_fp16_by_branches_(*w), y, sum, residual;
    kopt_fp16 rounded, compensation;
    KOPT_OPAQUE_FLOAT_(delta);
    y = kopt_add_(kopt_f32_from_fp16_by_branches_(*c) * (1.0f / 2048), delta);
    sum = kopt_add_(old, y);
    rounded = kopt_fp16_from_f32(sum);
    residual = kopt_add_(kopt_sub_(old, kopt_f32_from_fp16_by_branches_(rounded)), y);
    compensation = kopt_fp16_from_f32_stochastic(residual * 2048, random16);
    if ((rounded & 0x7FFFu) > 0x7C00u) rounded = 0x7E00u; /* the canonical NaN */
    *w = rounded;
    *c = (rounded & 0x7C00u) == 0x7C00u ? (kopt_fp16)0 : compensation;
}
#endif

/* The same for n weights in bf16 or fp16: w[i] += delta[i], with the compensations c[i]. From about 64 weights on it is
   faster than a loop over the functions above, for thousands of weights 7 to 12 times (docs/benchmarks.md), and it runs
   in any floating-point environment. The bits are those of such a loop with random16 = kopt_random(key, 0, i), and
   those of a step of kopt_sgd(1, 0) with the gradient -delta and with the seed, step and id of key. So change key
   before each call, for example by key.step++: with the same key, small updates are lost as with KOPT_NEAREST. delta
   must overlap neither w nor c. Errors, with nothing written: KOPT_ERROR_OPTION for another format, KOPT_ERROR_BOUNDS
   if key.first_index is not below 2^63 or n is above SIZE_MAX / 32 - 8, KOPT_ERROR_NULL, KOPT_ERROR_OVERLAP. */
KOPT_API_ KOPT_RESULT_ kopt_kahan_add(void *w, void *c, kopt_format format, const float *delta, size_t n,
                                      kopt_random_key key);

/* ---- INLINE STEPS ------------------------------------------------------------------------------------------------ */

#ifndef KAHAN_OPT_BINDINGS
/* The step on one screen: AdamW, and SGD without momentum, of bf16 weights with KAHAN. It is made for firmware: 624
   bytes of code on a Cortex-M4F, and no implementation is needed.

       static kopt_bf16 weight[N], grad[N], state[3 * N];                         // SGD: state[N]. All zero, but weight
       kopt_inline_optimizer opt = kopt_inline_optimizer_of(1e-3f, 0.01f, 0);     // one for each tensor
       for (;;) kopt_inline_adamw(&opt, weight, state, grad, N);                  // after each backward pass

   Nothing is checked. The arrays must not overlap, and n is the same in each call. opt counts the steps of one tensor:
   two tensors need an opt each, with its own id. Step 2^32 counts as 2^31, where no correction is left; random bits
   then repeat those of 2^31 steps ago. To resume, save weight, state and opt.

   In the default floating-point environment the bits are those of kopt_optimizer_step() with bf16 gradients, for
   kopt_adamw(lr) or kopt_sgd(lr, 0) with the same weight_decay, eps, seed and id, beta = 1 - gain, no other option, and
   a state block that began without fp32 weights. */
typedef struct kopt_inline_optimizer {
    float lr, weight_decay;  /* both may change between steps. SGD adds weight_decay * w to the gradient */
    float gain1, gain2, eps; /* gain = 1 - beta: 0.1f for a beta of 0.9. SGD reads none of them */
    uint32_t reserved32_;    /* 0 */
    uint64_t seed;           /* of the random bits */
    uint32_t step, id;       /* steps done so far; a number that no other tensor has */
} kopt_inline_optimizer;

/* Other fields as in kopt_adamw(): beta 0.9 and 0.999, eps 1e-8, seed 0. weight_decay: 0.01 there, 0 in kopt_sgd(). */
KOPT_INLINE_ kopt_inline_optimizer kopt_inline_optimizer_of(float lr, float weight_decay, uint32_t id) {
    const kopt_inline_optimizer opt = {lr, weight_decay, 0.1f, 0.001f, 1e-8f, 0, 0, 0, id};
    return opt;
}

/* The random bits of element i: kopt_random(), stream 0. words keeps what eight elements share, from i % 8 == 0 on. */
KOPT_INLINE_ uint32_t kopt_inline_random_(const kopt_inline_optimizer *opt, uint32_t words[4], size_t i) {
    uint32_t two, key0 = (uint32_t)opt->seed, key1 = (uint32_t)(opt->seed >> 32), round;
    if (i % 8 == 0) { /* Philox4x32-7 */
        words[0] = (uint32_t)(i >> 11 << 4 | (i >> 3 & 15));
        words[1] = 0;
        words[2] = opt->step;
        words[3] = opt->id;
        for (round = 0; round < 7; round++, key0 += 0x9E3779B9u, key1 += 0xBB67AE85u) {
            const uint64_t p = (uint64_t)words[0] * 0xD2511F53u, q = (uint64_t)words[2] * 0xCD9E8D57u;
            words[0] = (uint32_t)(q >> 32) ^ words[1] ^ key0;
            words[1] = (uint32_t)q;
            words[2] = (uint32_t)(p >> 32) ^ words[3] ^ key1;
            words[3] = (uint32_t)p;
        }
    }
    two = words[i / 2 & 3]; /* of two elements */
    if (i % 2 != 0) two = two >> 16 | two << 16;
    return two >> 16 << 17 | ((two + (two >> 16 << 1) * (uint32_t)(i >> 7 & 15) * 8) & 0xFFFFu);
}

/* 1 - (1 - a)(1 - b), where 1 - a and 1 - b would lose digits of small a and b. */
KOPT_INLINE_ float kopt_combine_gains_(float a, float b) { return kopt_sub_(kopt_add_(a, b), kopt_mul_(a, b)); }

/* The bias correction 1 - beta^step, by squaring. */
KOPT_INLINE_ float kopt_correction_(float gain, uint32_t step) {
    float r = 0;
    for (;; gain = kopt_combine_gains_(gain, gain)) {
        if ((step & 1u) != 0) r = kopt_combine_gains_(r, gain);
        if ((step >>= 1) == 0) return r;
    }
}

/* A moment rounds stochastically; a subnormal one is stored as 0. */
KOPT_INLINE_ kopt_bf16 kopt_inline_moment_(float x, uint32_t random16) {
    const kopt_bf16 moment = kopt_bf16_from_f32_stochastic(x, random16);
    return (moment & 0x7F80u) != 0 ? moment : (kopt_bf16)0;
}

KOPT_INLINE_ uint32_t kopt_inline_next_(uint32_t step) { return step == 0xFFFFFFFFu ? 0x80000000u : step + 1; }

/* Loshchilov & Hutter 2019, algorithm 2, with PyTorch's decay of lr * weight_decay. state is the compensation c of each
   weight, then the moments m, then v. */
KOPT_INLINE_ void kopt_inline_adamw(kopt_inline_optimizer *opt, kopt_bf16 *weight, kopt_bf16 *state,
                                    const kopt_bf16 *grad, size_t n) {
    kopt_bf16 *c = state, *m = state + n, *v = state + 2 * n;
    const uint32_t t = opt->step = kopt_inline_next_(opt->step);
    const float rate = kopt_div_(opt->lr, kopt_correction_(opt->gain1, t));        /* lr / (1 - beta1^t) */
    const float scale = kopt_div_(1, kopt_sqrt_(kopt_correction_(opt->gain2, t))); /* 1 / sqrt(1 - beta2^t) */
    const float decay = kopt_mul_(opt->lr, opt->weight_decay);
    const float beta1 = kopt_sub_(1, opt->gain1), beta2 = kopt_sub_(1, opt->gain2);
    uint32_t words[4], r;
    size_t i;
    for (i = 0; i < n; i++) {
        const float g = kopt_f32_from_bf16(grad[i]), w = kopt_f32_from_bf16(weight[i]);
        const float m1 = kopt_add_(kopt_mul_(beta1, kopt_f32_from_bf16(m[i])), kopt_mul_(opt->gain1, g));
        const float v1 = kopt_add_(kopt_mul_(beta2, kopt_f32_from_bf16(v[i])), kopt_mul_(kopt_mul_(opt->gain2, g), g));
        float update = kopt_mul_(rate, kopt_div_(m1, kopt_add_(kopt_mul_(kopt_sqrt_(v1), scale), opt->eps)));
        if (kopt_as_u32_(decay) != 0) update = kopt_add_(update, kopt_mul_(decay, w)); /* 0 * infinity would be NaN */
        r = kopt_inline_random_(opt, words, i);
        m[i] = kopt_inline_moment_(m1, KOPT_RANDOM_STORE_(r, 1));
        v[i] = kopt_inline_moment_(v1, KOPT_RANDOM_STORE_(r, 2));
        kopt_kahan_add_bf16(&weight[i], &c[i], -update, r);
    }
}

/* w -= lr * (g + weight_decay * w). state is the compensation of each weight. */
KOPT_INLINE_ void kopt_inline_sgd(kopt_inline_optimizer *opt, kopt_bf16 *weight, kopt_bf16 *state,
                                  const kopt_bf16 *grad, size_t n) {
    const float decay = opt->weight_decay;
    uint32_t words[4], r;
    size_t i;
    opt->step = kopt_inline_next_(opt->step);
    for (i = 0; i < n; i++) {
        float g = kopt_f32_from_bf16(grad[i]);
        if (kopt_as_u32_(decay) != 0) g = kopt_add_(g, kopt_mul_(decay, kopt_f32_from_bf16(weight[i])));
        r = kopt_inline_random_(opt, words, i);
        kopt_kahan_add_bf16(&weight[i], &state[i], -kopt_mul_(opt->lr, g), r);
    }
}
#endif

/* ---- OPTIMIZER -------------------------------------------------------------------------------------------------- */

/* Conventions of this section and all that follow. n counts elements, never bytes. An array may have any alignment. A
   function that returns an error has changed nothing, unless its comment says so. The comments name the errors of each
   function, except four that any may return: KOPT_ERROR_NULL (a required pointer is NULL), KOPT_ERROR_OPTION (an enum
   value does not exist or does not apply), KOPT_ERROR_BOUNDS (n is above SIZE_MAX / 32 - 8) and KOPT_ERROR_OVERLAP (two
   buffers overlap that must not). Any of several errors may be returned. A double that must be finite is at most 3e38
   in magnitude. */

/* An optimizer: its options and its step count. It owns no memory, so it may be copied. Make it with one of the
   constructors below, then set any field. Constructors check nothing; the functions that take the optimizer do. They
   refuse a struct that no constructor made, such as {0}, with KOPT_ERROR_UNINITIALIZED, a number that is not finite or
   out of its range with KOPT_ERROR_RANGE, and a combination that does not exist with KOPT_ERROR_OPTION.

   The rule, the formats of moments, the rounding and the number of moments (momentum, amsgrad) decide the layout of a
   state block. If one of them changes after kopt_state_init(), the block is refused with KOPT_ERROR_MISMATCH. All other
   fields may change between steps. A field whose comment begins with a rule is read by this rule only. */
typedef struct kopt_optimizer {
    uint32_t made_;                  /* set by the constructor; the first field in every version */
    kopt_rule rule;                  /* set by the constructor */
    kopt_rounding rounding;          /* of 16-bit weights; default KOPT_KAHAN. fp32 weights are stored as they are */
    kopt_rounding residual_rounding; /* of KAHAN and COMPACT: KOPT_STOCHASTIC (default) or KOPT_NEAREST */
    kopt_format first_moment_format; /* of the first moment, and Adan's third and fourth: KOPT_F32, KOPT_BF16 (default),
                                        KOPT_FP16 or KOPT_Q8, which is noisy for Lion and for beta1 >= 0.99 */
    kopt_format second_moment_format; /* of the second moment, and AMSGrad's third: the same. KOPT_FP16 stores the
                                        root; gradients below 1e-6 are partly lost, even with a loss scale (see LOSS
                                        SCALING) */
    kopt_rounding moment_rounding;   /* of 16- and 8-bit moments: KOPT_STOCHASTIC (default) or KOPT_NEAREST */
    kopt_decay_mode decay_mode;      /* default KOPT_DECAY_L2 for SGD, Adam and RAdam, KOPT_DECAY_DECOUPLED for the
                                        others */
    int nesterov;                    /* SGD: 1: Nesterov momentum; needs momentum > 0 and dampening 0; default 0 */
    int amsgrad;                     /* Adam: 1: AMSGrad: divide by the root of the largest second moment so far;
                                        default 0. Adam-atan2 refuses amsgrad and stable */
    int stable;                      /* Adam: 1: StableAdamW: if the RMS of g / sqrt(v) over a tensor is above 1,
                                        divide the tensor's rate by it (see kopt_norm_add_stable()); default 0 */
    int maximize;                    /* 1: maximize the objective: the gradient is negated; default 0 */
    int zero_grad;                   /* 1: a step sets the gradient to zero after it has read it; default 0 */
    int moments_only;                /* 1: a step updates only the moments, not weight, residual and copy (optimizer
                                        accumulation); default 0 */
    int lookahead;                   /* Ranger: number of steps between synchronizations, >= 1; default 6. A
                                        synchronization moves the slow weights, a second copy in the state block,
                                        towards the weights, then sets the weights to them */
    int atan2_outside;               /* Adam-atan2: 1: the bias correction of m is outside of atan2: w -=
                                        lr * a / (1 - beta1^t) * atan2(m, b * sqrt(v / (1 - beta2^t))). With a = b = 1
                                        this is the Python package adam-atan2; default 0 */
    uint32_t step;                   /* steps begun so far, at most 2^32 - 1; 0 for a new run */
    uint32_t reserved32_;            /* 0 */
    /* kopt_step_begin() rounds all numbers below to float. It computes 1 - beta and 1 - dampening before it rounds:
       1 - 0.999f would have a relative error of 1.3e-5. */
    double lr;                       /* learning rate, >= 0; EMA does not read it */
    double max_lr;                   /* > 0; only KOPT_DECAY_FULLY_DECOUPLED reads it. Default: the constructor's lr */
    double weight_decay;             /* >= 0; default 0, AdamW and StableAdamW 0.01, Adan 0.02 */
    double beta1, beta2, beta3;      /* in [0, 1); Adam: 0.9, 0.999. EMA: beta1 is the decay, in [0, 1]. SGD reads none
                                        of them, only Adan reads beta3 */
    double eps;                      /* a positive normal float, added to the root in fp32; default 1e-8 (other
                                        constructors: see below). SGD, Lion, Adam-atan2 and EMA do not read it */
    double momentum, dampening;      /* SGD: finite, momentum >= 0; default 0, 0 */
    double grad_scale;               /* finite; gradients are multiplied by grad_scale * clip; default 1. To undo a
                                        loss scale of your own: 1 / loss scale; kopt_scaler_step() and
                                        kopt_scaler_begin() divide by theirs */
    double clip;                     /* finite; the coefficient of gradient clipping (kopt_norm_clip()); default 1 */
    double lookahead_rate;           /* Ranger: how far the slow weights move: 0 not at all, 1 all the way; in [0, 1];
                                        default 0.5 */
    double atan2_a, atan2_b;         /* Adam-atan2: w -= lr * a * atan2(m / (1 - beta1^t), b *
                                        sqrt(v / (1 - beta2^t))); a >= 0, b a positive normal float; default 1.27, 1 */
    double sharpness;                /* Lion: >= 0; c is the interpolated gradient. 0 (default): sign(c). Above 0:
                                        smooth Lion, tanh(sharpness * c), which tends to sign(c) as sharpness grows
                                        (smooth_beta of optax.scale_by_lion); needs KAHAN_OPT_VMATH */
    uint64_t seed;                   /* of the random bits; default 0 */
    uint64_t reserved_[7];           /* 0 */
} kopt_optimizer;

/* What all constructors call, and other languages should. rule is that of the constructor, such as KOPT_RULE_ADAMW; lr
   is its first argument (of kopt_ema(), decay); version is KOPT_VERSION; opt_size and tensor_size are the sizes of the
   caller's kopt_optimizer and kopt_tensor. Errors:

   - KOPT_ERROR_VERSION: see CONTRACT, 9. The opt_size bytes at opt are zeros and a mark.
   - KOPT_ERROR_OPTION: this build has no such constructor. *opt is all zeros. */
KOPT_API_ KOPT_RESULT_ kopt_optimizer_init(kopt_optimizer *opt, kopt_rule rule, double lr, int version,
                                           size_t opt_size, size_t tensor_size);

#ifndef KAHAN_OPT_BINDINGS
KOPT_HOST_INLINE_ kopt_optimizer kopt_make_optimizer_(kopt_rule rule, double lr); /* below: it needs kopt_tensor */

/* Formulas and defaults of torch.optim.SGD, Adam and AdamW (docs/numerics.md sections 5 and 6). lr is the learning
   rate. Weight decay is 0 for SGD and Adam, 0.01 for AdamW. These and all other constructors choose KOPT_KAHAN and bf16
   moments. */
KOPT_HOST_INLINE_ kopt_optimizer kopt_sgd(double lr, double momentum) {
    kopt_optimizer opt = kopt_make_optimizer_(KOPT_RULE_SGD, lr);
    opt.momentum = momentum;
    return opt;
}
KOPT_HOST_INLINE_ kopt_optimizer kopt_adam(double lr) { return kopt_make_optimizer_(KOPT_RULE_ADAM, lr); }
KOPT_HOST_INLINE_ kopt_optimizer kopt_adamw(double lr) { return kopt_make_optimizer_(KOPT_RULE_ADAMW, lr); }

/* The other rules (docs/numerics.md section 6a; papers: see kopt_rule, StableAdamW: Wortsman et al. 2023). RAdam:
   formulas and defaults of torch.optim.RAdam, L2 weight decay. Others: those of optimi, decoupled decay. */
/* StableAdamW: beta 0.9, 0.99; eps 1e-6; decay 0.01 */
KOPT_HOST_INLINE_ kopt_optimizer kopt_stable_adamw(double lr) {
    return kopt_make_optimizer_(KOPT_RULE_STABLE_ADAMW, lr);
}
/* Lion: beta 0.9, 0.99; decay 0 */
KOPT_HOST_INLINE_ kopt_optimizer kopt_lion(double lr) { return kopt_make_optimizer_(KOPT_RULE_LION, lr); }
/* Adan: beta 0.98, 0.92, 0.99; eps 1e-6; decay 0.02 */
KOPT_HOST_INLINE_ kopt_optimizer kopt_adan(double lr) { return kopt_make_optimizer_(KOPT_RULE_ADAN, lr); }
/* RAdam: beta 0.9, 0.999; eps 1e-8; decay 0 */
KOPT_HOST_INLINE_ kopt_optimizer kopt_radam(double lr) { return kopt_make_optimizer_(KOPT_RULE_RADAM, lr); }
/* Ranger: beta 0.9, 0.99; eps 1e-6; decay 0; lookahead 6, 0.5 */
KOPT_HOST_INLINE_ kopt_optimizer kopt_ranger(double lr) { return kopt_make_optimizer_(KOPT_RULE_RANGER, lr); }

#ifdef KAHAN_OPT_VMATH
/* Adam-atan2 (Everett et al. 2024) with a = 1.27, b = 1, beta 0.9 and 0.99. Smooth Lion is Lion with
   tanh(sharpness * c) in place of sign(c). A good sharpness is about 1 / |g|, where |g| is the magnitude of the
   gradients that should count. Weight decay is decoupled, and 0 by default. */
KOPT_HOST_INLINE_ kopt_optimizer kopt_adam_atan2(double lr) {
    return kopt_make_optimizer_(KOPT_RULE_ADAM_ATAN2, lr);
}
KOPT_HOST_INLINE_ kopt_optimizer kopt_smooth_lion(double lr, double sharpness) {
    kopt_optimizer opt = kopt_make_optimizer_(KOPT_RULE_SMOOTH_LION, lr);
    opt.sharpness = sharpness;
    return opt;
}
#endif

/* An exponential moving average of weights: average += (1 - decay) * (weights - average), with any rounding but
   KOPT_FEEDBACK. The tensor's `weight` is the average; its `grad` is the array of weights to average, which a step only
   reads. decay is in [0, 1], otherwise KOPT_ERROR_RANGE; it is opt.beta1, which may change from step to step. maximize,
   zero_grad, moments_only and weight_decay must be 0 (KOPT_ERROR_OPTION). For an average leave opt.grad_scale and
   opt.clip, which multiply the weights to average, at 1, and t.rate_scale, which multiplies 1 - decay, at 0 or 1. The
   average of a fine-tuning run, whose weights move by less than an ulp, needs KOPT_STOCHASTIC, KOPT_F32 or a stochastic
   copy: docs/fine-tuning.md. */
KOPT_HOST_INLINE_ kopt_optimizer kopt_ema(double decay) { return kopt_make_optimizer_(KOPT_RULE_EMA, decay); }
#endif

/* ---- TENSOR AND STATE ------------------------------------------------------------------------------------------- */

/* What a step reads and writes: one tensor, or one shard of a larger tensor. The caller owns all memory; no function
   keeps the struct or a pointer from it after it returns. A field that is zero has its default, so
   `kopt_tensor t = {0}` and designated initializers work. The defaults are fp32 weights and gradients, no copy, no
   counts, id 0, first_index 0, rate_scale 1 and no stable_scale. The arrays and *counts must not overlap each other.
   The functions of this section do not read the gradient, so grad may be NULL. */
typedef struct kopt_tensor {
    void *weight;               /* n values of weight_format */
    void *grad;                 /* n values of grad_format; a step only reads them, unless opt.zero_grad is set */
    void *copy;                 /* NULL, or n values of copy_format: each step writes new weights, none reads them */
    void *state;                /* the state block: kopt_state_size() bytes; may be NULL if that is 0 */
    size_t state_size;          /* bytes at state; if there are too few: KOPT_ERROR_SIZE */
    size_t n;                   /* number of elements; 0 is valid, and then the pointers may be NULL */
    const struct kopt_state_arrays *arrays; /* NULL: the state is the block. Otherwise it is in these arrays of the
                                   caller, and state must be NULL (KOPT_ERROR_OPTION) */
    struct kopt_counts *counts; /* NULL, or the counts that a step adds to; this is slower. One per thread */
    kopt_format weight_format;  /* KOPT_F32, KOPT_BF16 or KOPT_FP16. A list may mix them */
    kopt_format grad_format;    /* the same, independent of the weights' format */
    kopt_format copy_format;    /* the same. A 16-bit copy of fp32 weights is classic mixed precision */
    uint32_t id;                /* selects the random bits: each tensor of a model needs its own id. Set it before
                                   kopt_state_init(): see kopt_list_set_ids() */
    int no_decay;               /* 1: steps it as with opt.weight_decay = 0, for biases and norms; default 0 */
    uint32_t reserved32_;       /* 0 */
    uint64_t first_index;       /* of a shard: the index of its element 0 in the whole tensor; below 2^63, otherwise
                                   KOPT_ERROR_BOUNDS. With 8-bit moments, make it a multiple of 64: only then does the
                                   shard get the bits of the whole tensor */
    double rate_scale;          /* factor of the learning rate and of the weight decay of this tensor: finite, >= 0,
                                   otherwise KOPT_ERROR_RANGE (-0, too). 0 (default) means 1, so no schedule may end at
                                   0. To freeze a tensor: see kopt_optimizer_step() */
    double stable_scale;        /* StableAdamW in parts: kopt_norm_stable_scale() of the whole tensor, for one step
                                   only; finite, >= 0, otherwise KOPT_ERROR_RANGE. Rate and weight decay are multiplied
                                   by it and by rate_scale. 0 (default): not measured; a step over all n elements then
                                   measures them itself. Other optimizers ignore it */
    uint64_t reserved_[2];      /* 0 */
} kopt_tensor;

/* A state in arrays of the caller, in place of a block: for programs that already have m and v, and for tensors of
   other libraries. A step works on them in place, with the bits of a block. kopt_save() writes the same checkpoint, so
   one may be loaded into the other. All zeros are a fresh state (Ranger: kopt_state_init(), for its slow weights). To
   go on from moments of your own, set opt.step, and the weights by kopt_state_write(): kopt_state_init() would set the
   moments to 0. An array that the options do not need is not read and may be NULL; one that they need and that is NULL
   is KOPT_ERROR_NULL. No two arrays of a tensor, or of neighbours in a list, may overlap (KOPT_ERROR_OVERLAP). The
   struct is read during a call only. Random bits still depend on t.id and t.first_index.

   There is no header. So what a block finds is not found here: arrays that are too short, of another format, rounding,
   rule, tensor or id, never set, or half loaded because kopt_load_from() could not read twice. Prefer a block. */
typedef struct kopt_state_arrays {
    size_t size;                /* sizeof(kopt_state_arrays), otherwise KOPT_ERROR_SIZE */
    void *residual;             /* KAHAN: n values of the weights' format (fp16: times 2^11); EXACT: n uint16_t;
                                   COMPACT: n uint8_t (docs/numerics.md section 3) */
    void *moment[4];            /* the first to fourth: n values of the format of this moment, of KOPT_Q8 n codes. With
                                   KOPT_FP16 and KOPT_Q8 a mean of squares is stored as its root */
    void *scale[4];             /* KOPT_Q8: of each moment (n + 63) / 64 bytes; otherwise NULL */
    void *slow, *slow_residual; /* Ranger: n values like the weights, and like the residual */
    void *rates;                /* FEEDBACK: 16 bytes, aligned to 4: a step (uint32_t) and its rate (float), twice */
    void *reserved_[4];         /* NULL, otherwise KOPT_ERROR_OPTION */
} kopt_state_arrays;

/* Counts of stalled weights. Set them to 0; every step with t.counts adds to them. */
typedef struct kopt_counts {
    uint64_t wanted; /* weights whose update is not 0 */
    uint64_t still;  /* of these, weights whose stored value did not change: normal with KAHAN, COMPACT and EXACT */
    uint64_t stuck;  /* of these, weights whose residual did not change either: the whole update was lost */
} kopt_counts;

#ifndef KAHAN_OPT_BINDINGS
KOPT_HOST_INLINE_ kopt_optimizer kopt_make_optimizer_(kopt_rule rule, double lr) {
    kopt_optimizer opt;
    const kopt_result ignored = /* the functions that take the optimizer refuse it */
        kopt_optimizer_init(&opt, rule, lr, KOPT_VERSION, sizeof opt, sizeof(kopt_tensor));
    (void)ignored;
    return opt;
}

/* A tensor with these fields; the others have their defaults. */
KOPT_INLINE_ kopt_tensor kopt_tensor_of(void *weight, kopt_format weight_format, void *grad, kopt_format grad_format,
                                        size_t n, void *state, size_t state_size) {
    const kopt_tensor t = {weight,      grad, NULL, state, state_size, n, NULL, NULL, weight_format, grad_format,
                           KOPT_F32,    0,    0,    0,     0,          1, 0,    {0, 0}};
    return t;
}

/* The same for typed pointers and a constant format: KOPT_TENSOR(KOPT_BF16, weight, grad, n, state, sizeof state).
   Gradients of 4 bytes are KOPT_F32, others have the format of the weights. Elements of another size do not compile.
   Use kopt_tensor_of() for pointers to void, a format in a variable, and bf16 gradients of fp32 or fp16 weights. */
#define KOPT_TENSOR(format, weight, grad, n, state, state_size)                                         \
    kopt_tensor_of(weight, format, grad, sizeof *(grad) == 4 ? KOPT_F32 : (format), n, state,               \
                   (state_size) + 0 * KOPT_FITS_(format, sizeof *(weight), sizeof *(grad)))
#define KOPT_FITS_(format, size, grad_size) \
    sizeof(char[(size) == ((format) == KOPT_F32 ? 4 : 2) && ((grad_size) == 4 || (grad_size) == (size)) ? 1 : -1])
#endif

/* Sets the ids of a list to first_id, first_id + 1, and so on. Call it once, before kopt_state_init(): a state block
   belongs to an id. With several lists (parameter groups), the next list begins at first_id + count: two tensors
   with the same id and seed would draw the same random bits. Shards of one tensor need the same id, so do not number
   a list of shards. KOPT_ERROR_BOUNDS if an id would be above 2^32 - 1. */
KOPT_API_ KOPT_RESULT_ kopt_list_set_ids(kopt_tensor *tensors, size_t count, uint32_t first_id);

/* Bytes of the state block of a tensor, of which it reads n and weight_format: a header of 64 bytes, the residual (what
   KAHAN, COMPACT and EXACT keep of each weight), each moment (an 8-bit moment has one more byte per 64 elements, for
   their scale) and, with Ranger, the slow weights and their residual. Each array is rounded up to a multiple of 16
   bytes. 0 if there is nothing to store or n is 0, and also if the optimizer or the tensor is refused: kopt_explain()
   tells why. t.arrays is not read. */
KOPT_API_ size_t kopt_state_size(const kopt_optimizer *opt, const kopt_tensor *t);

/* An upper bound of kopt_state_size() as a constant, for static arrays. bytes is the size per weight of the residual,
   the moments and Ranger's slow weights with their residual: bf16 AdamW needs 6 with KAHAN or EXACT, 5 with COMPACT, 4
   with FEEDBACK, STOCHASTIC or NEAREST. Do not use it for 8-bit moments, whose scales it does not include. */
#define KOPT_STATE_BYTES(n, bytes) (64 + sizeof(char) * (n) * (bytes) + 75)

/* Makes fresh states, with all moments 0, for this optimizer and a list of tensors. If weights is not NULL, it
   points to kopt_list_length() fp32 values: those of tensors[0] first, then those of tensors[1], and so on. The weights
   become these values, rounded to nearest, and the residuals what the rounding lost. If weights is NULL, the weights
   stay as they are and the residuals are zero (to fine-tune such weights, see kopt_state_dither()). Then Ranger's slow
   weights, and t.copy if any, are set to the weights. weights must not overlap the weights, states, copies or counts of
   the list, but may be the copy of a single tensor if that is KOPT_F32. All tensors are checked before the first is
   written. In the middle of a run set opt.step to 0, too, and take another opt.seed: zero moments with the bias
   correction of a later step make the first updates too long (see kopt_optimizer_step()). Errors: those of the fields
   of *opt and the tensors; KOPT_ERROR_ID, KOPT_ERROR_OVERLAP: as in kopt_optimizer_step(). */
KOPT_API_ KOPT_RESULT_ kopt_state_init(const kopt_optimizer *opt, const kopt_tensor *tensors, size_t count,
                                       const float *weights);

/* For fine-tuning from 16-bit weights, once, after kopt_state_init(.., NULL). Draws each residual at random from all
   that leave the weight as it is. Then t.weight, which the model reads, moves from the first step on, in the mean over
   many weights, as far as the weight with its residual. Without it, t.weight changes only after updates of half an ulp
   in all, as do 16-bit copies of fp32 weights (docs/fine-tuning.md).

   t.weight does not change, nor would it by a step whose updates are 0. The residual is uniform on each side of the
   weight, in 256 levels (EXACT: all that there are). Below a power of two that side is half as wide, and gets half of
   the draws. The residual stays 0 beside zeros (pruned weights), infinity and NaN, and beside bf16 weights below
   2^-100. Ranger's slow weights get it, too, and t.copy is set again. The draws depend on opt->seed, t.id and the
   global index (stream 6; docs/numerics.md section 8d), so shards get those of the whole tensor. kopt_state_read()
   returns the drawn values; with EXACT the run is, bit for bit, the fp32 run from them.

   fp32 weights, KOPT_STOCHASTIC and KOPT_FEEDBACK have no such delay, and the call does nothing. Errors, with nothing
   written: KOPT_ERROR_OPTION with KOPT_NEAREST, which keeps no residual, and for kopt_ema(), whose steps undo a draw;
   KOPT_ERROR_STEP if any residual is not 0: after steps, at a second call, or after fp32 values in kopt_state_init() or
   kopt_state_write(), which need no draw; those of kopt_state_read(); KOPT_ERROR_ID, KOPT_ERROR_OVERLAP: as in
   kopt_optimizer_step(). For a GPU call it on the host, before kopt_cuda_state_load(). */
KOPT_API_ KOPT_RESULT_ kopt_state_dither(const kopt_optimizer *opt, const kopt_tensor *tensors, size_t count);

/* An array of kopt_state_read() and kopt_state_write(). KOPT_ERROR_OPTION if the rule does not have this moment. */
typedef enum kopt_slot {
    KOPT_SLOT_WEIGHT = 0,        /* the weights together with their residual */
    KOPT_SLOT_FIRST_MOMENT = 1,  /* average of gradients; SGD: the momentum buffer */
    KOPT_SLOT_SECOND_MOMENT = 2, /* average of squared gradients, not its root */
    KOPT_SLOT_THIRD_MOMENT = 3,  /* AMSGrad: the largest second moment; Adan: the average of gradient differences */
    KOPT_SLOT_FOURTH_MOMENT = 4  /* Adan: the previous gradient */
} kopt_slot;

/* Copies the weights or a moment to out, as n fp32 values: for fp32 checkpoints and for other libraries. out must not
   overlap t->weight, t->state, t->copy or t->counts. KOPT_ERROR_SIZE, _STATE and _MISMATCH: as in kopt_step_range(). */
KOPT_API_ KOPT_RESULT_ kopt_state_read(const kopt_optimizer *opt, const kopt_tensor *t, kopt_slot slot, float *out);

/* Sets the weights or a moment from n fp32 values, rounded to nearest (docs/numerics.md section 8b). KOPT_SLOT_WEIGHT
   also sets the residual, t->copy and Ranger's slow weights. in must not overlap t->weight, t->state, t->copy or
   t->counts, but new weights may be the copy itself if that is KOPT_F32. The errors are those of kopt_state_read(). The
   values are not checked: the root of a negative second moment is NaN.

   Use it also to change weights in the middle of a run (pruning, averaging). If you store a weight directly in
   t->weight, it keeps the residual of its old value, which is at most about half an ulp of that value; where the two
   together would be NaN (COMPACT and EXACT: a zero beside a negative residual), the weight stands alone. Ranger's next
   synchronization pulls it back towards the old slow weight. */
KOPT_API_ KOPT_RESULT_ kopt_state_write(const kopt_optimizer *opt, const kopt_tensor *t, kopt_slot slot,
                                         const float *in);

/* Tells where the arrays of a state are: in its block, or *t->arrays. Those that the options do not need are NULL.
   Errors: those of kopt_state_read(). */
KOPT_API_ KOPT_RESULT_ kopt_state_arrays_of(const kopt_optimizer *opt, const kopt_tensor *t, kopt_state_arrays *arrays);

/* Explains an error to a human: the first field of *opt that is refused, and what it may be, or the product of fields
   that is too large for the next step; then the first field, memory or state block of the tensors that is refused.
   Blocks that are not initialized come last, as kopt_state_init() and kopt_load() take them. To find the tensor, pass
   them one by one. Any argument may be NULL or 0. If it finds nothing, it says so: then the cause is grad, which it
   does not judge, or another argument. Never NULL. */
KOPT_API_ const char *kopt_explain(const kopt_optimizer *opt, const kopt_tensor *tensors, size_t count);

/* ---- STEP ------------------------------------------------------------------------------------------------------- */

/* One optimizer step over a list of tensors: begins the step, checks all tensors, then steps them. Call it once per
   iteration, with all tensors of the model: each call that is not refused counts as one step. A gradient that is not
   finite is not refused: it makes the weight and its moments NaN or infinite. Check first (kopt_norm, kopt_all_finite),
   or use kopt_scaler_step(), which skips such a step. Errors: those of kopt_step_begin() and kopt_step_run(), and:

   - KOPT_ERROR_ID: the ids of the list do not increase. Otherwise two tensors would draw the same random bits.
     Shards of one tensor have the same id, and each begins at or after the end of the shard before it.
   - KOPT_ERROR_OVERLAP: two neighbours share memory. No two tensors of the list may, but only neighbours are checked,
     in O(1) each. Exceptions: tensors may read the same gradient, unless opt.zero_grad is set, and share counts.

   A weight that the model uses twice is listed once, with the sum of its gradients. The rules for ids and overlap do
   not apply to tensors without elements.

   To freeze a tensor, leave it out of the list. But a tensor that begins later than the others needs an id that no
   other tensor has, and its own optimizer, `kopt_optimizer late = opt; late.step = 0;`, which steps it in each
   iteration, beside opt. Otherwise its moments begin at 0 with the bias correction of opt->step, and its first updates
   are too long: with Adam's defaults and a steady gradient 3 to 7 times, else up to 1 / sqrt(1 - beta2) times. */
KOPT_API_ KOPT_RESULT_ kopt_optimizer_step(kopt_optimizer *opt, const kopt_tensor *tensors, size_t count);

/* A learning rate with linear warm-up and cosine decay: `opt.lr = kopt_cosine_lr(opt.step, 100, 10000, 1e-3, 1e-4);`
   before each step. It has the same bits on every machine; one made by libm's cos() has not.

   - It grows from peak / warmup in step 0 to peak in step warmup - 1, falls along half a cosine to last, which it has
     in step steps - 1, and stays there. peak and last are exact. If last is above peak, it rises.
   - warmup 0 begins with peak in step 0, as 1 does. With warmup == steps there is no cosine: step `steps` has last.
     steps 0, or 1 without warm-up: always last.
   - If last is 0, the last step moves no weight: pass one more than you take, and all of them count.

   NaN, which a step refuses (KOPT_ERROR_RANGE), if peak or last is negative, infinite or NaN, or warmup > steps. */
KOPT_API_ double kopt_cosine_lr(uint32_t step, uint32_t warmup, uint32_t steps, double peak, double last);

/* A step that has begun: the options and scalars of docs/numerics.md, sections 4 to 6a. You may copy it, also to other
   threads, but not change it. It does the work of kopt_optimizer_step() in parts: by shards, over the frames of a game,
   or by several threads, also on one tensor: kopt_step_begin() once, kopt_step_range() in each thread, then join them.
   Step each element at most once, in any order and ranges; nothing checks this. One left out, like an unused row of an
   embedding, keeps its weight and moments; StableAdamW and Ranger need all. To skip a step, do not begin it. Zeros are
   a step that has not begun. */
typedef struct kopt_step {
    uint64_t private_[32];
} kopt_step;

/* Begins a step: counts it in opt->step and computes its scalars. Errors: those of the fields of kopt_optimizer;
   KOPT_ERROR_RANGE also if a scalar overflows a float; KOPT_ERROR_STEP after 2^32 - 1 steps. After an error *step is
   what it was: the last step, which could be taken twice. */
KOPT_API_ KOPT_RESULT_ kopt_step_begin(kopt_step *step, kopt_optimizer *opt);

/* Steps all elements of a list of tensors; of one tensor, (step, &t, 1). All are checked before the first element is
   written. Errors:

   - KOPT_ERROR_STEP: the step has not begun, or was skipped by kopt_scaler_begin(). KOPT_ERROR_VERSION: an
     implementation of another version began it.
   - KOPT_ERROR_SIZE, KOPT_ERROR_STATE, KOPT_ERROR_MISMATCH: a state block is too small, not initialized, or of another
     optimizer or tensor.
   - KOPT_ERROR_ID, KOPT_ERROR_OVERLAP: as in kopt_optimizer_step().
   - KOPT_ERROR_OPTION, KOPT_ERROR_RANGE: a field of a tensor is invalid. */
KOPT_API_ KOPT_RESULT_ kopt_step_run(const kopt_step *step, const kopt_tensor *tensors, size_t count);

/* Elements of a list: the sum of all n. 0 if that does not fit into a size_t, or tensors is NULL. */
KOPT_API_ size_t kopt_list_length(const kopt_tensor *tensors, size_t count);

/* Steps elements [begin, end) of a list as one long row: those of tensors[0] first, then those of tensors[1], and so
   on. Ranges of the row need not end where tensors end, so a model can be stepped in parts of equal cost: by threads,
   or in the time that each frame of a game has left (docs/examples/lockstep.c). For the norm: kopt_norm_add_range().

       size_t i, n, length = kopt_list_length(tensors, count);
       if (kopt_step_begin(&step, &opt)) return 1;
       for (i = 0; i < length; i += n) {
           n = length - i < budget ? length - i : budget;
           if (kopt_step_range(&step, tensors, count, i, i + n)) return 1;
       }

   Of k threads, thread i takes [length * i / k, length * (i + 1) / k). With FEEDBACK one of them stores the tensor's
   new rate, which the others load, too, but do not use: ThreadSanitizer reports it. begin and end are rounded down to
   the start of a block of 64 8-bit moments, except at the end of their tensor, so that ranges that cover the list still
   step each element once. Finding the tensors takes one addition for each. Errors, among the tensors of the range:
   those of kopt_step_run(); KOPT_ERROR_STEP also if StableAdamW steps a part of a tensor whose stable_scale is 0 (with
   opt.moments_only it may be 0); KOPT_ERROR_BOUNDS: begin > end, or end > kopt_list_length(). */
KOPT_API_ KOPT_RESULT_ kopt_step_range(const kopt_step *step, const kopt_tensor *tensors, size_t count, size_t begin,
                                       size_t end);

/* ---- CHECKPOINTS ------------------------------------------------------------------------------------------------- */

/* A checkpoint holds a whole list of tensors under one checksum (CRC-32): the options, hyper-parameters, seed and step
   count of the optimizer, and of each tensor its id, first_index, weights and state (docs/numerics.md section 8c). Save
   between two steps. With several lists (parameter groups) make one checkpoint of each. A training loop has more to
   keep: a kopt_scaler, its place in the data. docs/examples/checkpoint.c writes all to a file that survives a crash.

       size_t size = kopt_save_size(&opt, tensors, count);
       save:    kopt_save(&opt, tensors, count, bytes, size)
       resume:  make the optimizer and the tensors as before, without kopt_state_init(), which kopt_load() replaces;
                kopt_load(&opt, tensors, count, bytes, size)
                the next step has the bits that it would have had without the interruption */

/* Bytes of the checkpoint of a list. 0 if kopt_save() would refuse the list for anything but its memory (pointers and
   state_size are not read), or if the size does not fit into a size_t. */
KOPT_API_ size_t kopt_save_size(const kopt_optimizer *opt, const kopt_tensor *tensors, size_t count);

/* Writes the checkpoint of a list to out. The tensors are only read, so training can go on. out must not overlap their
   memory; bytes after the checkpoint stay as they are. Errors:

   - KOPT_ERROR_SIZE: out_size is less than kopt_save_size(), or a state block is too small.
   - KOPT_ERROR_STATE, KOPT_ERROR_MISMATCH: a state block is not initialized, or of another optimizer or tensor.
   - KOPT_ERROR_ID, KOPT_ERROR_OVERLAP: as in kopt_optimizer_step().
   - those of the fields of kopt_optimizer and kopt_tensor. */
KOPT_API_ KOPT_RESULT_ kopt_save(const kopt_optimizer *opt, const kopt_tensor *tensors, size_t count, void *out,
                                 size_t out_size);

/* Checks all of a checkpoint, then sets the weights, states and copies of the tensors and all fields of *opt from it.
   To resume with another learning rate, set it afterwards. State blocks need no kopt_state_init(): old contents do not
   matter. Not in it, so set them as before: grad, copy, arrays, no_decay, rate_scale, stable_scale and counts of a
   tensor. Errors:

   - KOPT_ERROR_STATE: the bytes are no checkpoint; or kopt_save() would not write these bytes for what they hold,
     though their checksum is right. (What is in an array is not judged.)
   - KOPT_ERROR_VERSION: the checkpoint has the layout of a later version, which can load it.
   - KOPT_ERROR_MISMATCH: another number of tensors, n, id, first_index, rule (also StableAdamW, Nesterov, AMSGrad,
     atan2_outside), decay mode, format, rounding or number of moments. kopt_inspect() shows what it has.
   - KOPT_ERROR_SIZE: in_size is less than the checkpoint needs: it was cut off. Or a state block is too small.
   - KOPT_ERROR_CHECKSUM: it is damaged.
   - KOPT_ERROR_ID, KOPT_ERROR_OVERLAP (also of `in` with the tensors), errors of the fields: as in kopt_save(). */
KOPT_API_ KOPT_RESULT_ kopt_load(kopt_optimizer *opt, const kopt_tensor *tensors, size_t count, const void *in,
                                 size_t in_size);

/* Where a checkpoint goes to or comes from, in pieces: for models larger than a buffer. Each function gets user as its
   first argument and returns 0 if it has done all that it was asked for; anything else ends the call with
   KOPT_ERROR_FILE. A function that is not needed may be NULL. */
typedef struct kopt_file {
    int (*write)(void *user, const void *data, size_t size);            /* appends `size` bytes */
    int (*read)(void *user, uint64_t offset, void *data, size_t size);  /* reads `size` bytes from `offset` on; 0 is
                                                                           the first byte of the checkpoint */
    void *user;
} kopt_file;

/* kopt_save() to a file, in pieces of at most 32 KiB. After an error the file is incomplete: remove it. */
KOPT_API_ KOPT_RESULT_ kopt_save_to(const kopt_optimizer *opt, const kopt_tensor *tensors, size_t count,
                                    const kopt_file *file);

/* kopt_load() from a file, which is read twice, each time from the first to the last byte: first to check all of it,
   then to set the tensors. If the second reading fails or finds other bytes than the first, with KOPT_ERROR_FILE or
   KOPT_ERROR_CHECKSUM, *opt is unchanged, but weights may be overwritten; the state blocks are then not initialized, so
   that a step refuses them. Any other error means that nothing was written. */
KOPT_API_ KOPT_RESULT_ kopt_load_from(kopt_optimizer *opt, const kopt_tensor *tensors, size_t count,
                                      const kopt_file *file);

/* Reads the head of a checkpoint, of a state block, or of one tensor in a checkpoint: the options into *opt, the number
   of tensors (1, unless it is a checkpoint) into *count, and the size of the whole in bytes into *size. Each of the
   three may be NULL. Of the whole, the first 1024 bytes are enough, or all, if there are fewer. Fields of *opt:

   - A checkpoint has all of them.
   - A tensor in a checkpoint has rule, formats, roundings, decay mode, seed and step, and lr, weight_decay, beta1 and
     beta2 (SGD: momentum and dampening) in fp32, which are not judged. All else becomes the default.
   - A state block has only what may not change between steps: rule, formats, rounding of weights and number of moments.
     lr, max_lr, seed and step become 0, a momentum above 0 becomes 1.4e-45, all else the default.

   The checksum is not checked: kopt_load() does that. Errors, with nothing written: KOPT_ERROR_SIZE (fewer bytes than
   the head); KOPT_ERROR_STATE (none of the three, or a head that contradicts itself, such as AdamW with one moment);
   KOPT_ERROR_VERSION (the layout of a later version); KOPT_ERROR_BOUNDS (one tensor, and it is too large for this
   machine); KOPT_ERROR_OPTION (options that this build leaves out, or that exclude each other). */
KOPT_API_ KOPT_RESULT_ kopt_inspect(const void *in, size_t in_size, kopt_optimizer *opt, uint64_t *count,
                                    uint64_t *size);

/* Walks over the tensors of a checkpoint: reads the header of the tensor at *offset into *t (weight_format, n, id and
   first_index; the rest is 0) and moves *offset to its end, which is where the next one begins. Begin with *offset = 0,
   the first tensor. t may be NULL. Of the checkpoint it reads the two headers, so it may be mapped or cut off. A state
   block, or one tensor of a checkpoint, has an offset of 0 only: this is how to walk over a file that is not in memory,
   with at = 0 and the count of kopt_inspect():

       for (; count > 0; count--, at += length) {
           length = 0;  read 1024 bytes, or as many as there are, from byte `at` of the checkpoint on
           if (kopt_inspect_tensor(bytes, got, &length, &t) != KOPT_OK) break;
       }

   Errors, with nothing written: those of kopt_inspect(), for the head and for the tensor; KOPT_ERROR_BOUNDS also after
   the last tensor; KOPT_ERROR_SIZE also if the bytes at *offset are not there; KOPT_ERROR_STATE also if there is no
   tensor at *offset, or it is longer than the checkpoint. Otherwise tensors are not compared with the head or with each
   other: kopt_load() does that. */
KOPT_API_ KOPT_RESULT_ kopt_inspect_tensor(const void *in, size_t in_size, uint64_t *offset, kopt_tensor *t);

/* ---- NORM AND CLIPPING ------------------------------------------------------------------------------------------- */

/* From here on: what a training loop does between the backward pass and the step. Formulas: docs/numerics.md, sections
   9 to 13. Examples: docs/guide.md. */

/* An exact sum of squares: a long integer that is never rounded. It does not depend on the order, the slicing, the
   threads, the ranks (processes of MPI or NCCL) or the machine. The same pass counts the values that are not finite.
   Begin with zeros: `kopt_norm norm = {0};` (C++: `{}`). Give each thread a kopt_norm of its own, and merge them with
   kopt_norm_merge(). Over ranks, sum the 21 words as uint64_t (MPI_SUM, ncclSum). Up to 2^32 kopt_norm may be summed
   in this way before one of the functions below reads the sum. */
typedef struct kopt_norm {
    uint64_t nonfinite; /* number of values that are infinite or NaN; the sum does not contain them */
    uint64_t digit[20]; /* sum of squares * 2^298 = the sum of digit[i] * 2^(32 * i) */
} kopt_norm;

/* Adds the squares of n values to *norm. */
KOPT_API_ KOPT_RESULT_ kopt_norm_add(kopt_norm *norm, const void *x, kopt_format format, size_t n);

/* Adds *other to *norm. */
KOPT_API_ KOPT_RESULT_ kopt_norm_merge(kopt_norm *norm, const kopt_norm *other);

/* Adds the squares of the gradients of a list of tensors. Of each tensor it reads grad, grad_format and n. */
KOPT_API_ KOPT_RESULT_ kopt_norm_add_grads(kopt_norm *norm, const kopt_tensor *tensors, size_t count);

/* The same for elements [begin, end) of a list, with the KOPT_ERROR_BOUNDS of kopt_step_range(): see there. */
KOPT_API_ KOPT_RESULT_ kopt_norm_add_range(kopt_norm *norm, const kopt_tensor *tensors, size_t count,
                                                 size_t begin, size_t end);

/* The square root of the sum, rounded once to nearest even. Infinity if nonfinite is not 0, NaN if norm is NULL. */
KOPT_API_ double kopt_norm_value(const kopt_norm *norm);

/* The coefficient of torch.nn.utils.clip_grad_norm_. Store it in opt.clip: clipping then needs no pass of its own. It
   is min(1, max_norm / (norm * |grad_scale| + 1e-6)). Pass opt.grad_scale as grad_scale: max_norm is then in units of
   the scaled gradient. A max_norm of 0 means no clipping: 1. NaN, with which kopt_step_begin() refuses the step
   (KOPT_ERROR_RANGE), where the step must not happen, whatever max_norm is: if a gradient is not finite, norm is NULL,
   max_norm is negative, infinite or NaN, or |grad_scale| is above 1e100 or NaN. */
KOPT_API_ double kopt_norm_clip(const kopt_norm *norm, double max_norm, double grad_scale);

/* StableAdamW (Wortsman et al. 2023) over ranges, threads, shards or ranks. Its scale depends on the whole tensor,
   so measure all ranges before any element is stepped:

       kopt_norm norm = {0};                                     one per thread or rank
       kopt_norm_add_stable(&norm, &step, &t, begin, end);       each range once
       kopt_norm_merge(&norm, &other);                           all into one
       t.stable_scale = kopt_norm_stable_scale(&norm, n);        n of the whole tensor
       kopt_step_range(&step, &t, 1, begin, end);                each range once

   t.stable_scale belongs to one step: measure again, or set it to 0, before the next. If it is 0, a step over all n
   elements measures these itself: wrong for a shard, which needs the scale of its whole tensor.

   Adds the squares of g / max(sqrt(v) * root_scale, eps), with v as after the step (docs/numerics.md section 6a), of
   elements begin to end - 1 to *norm. The sum is exact: the slicing does not matter. The tensor is only read. Errors:
   those of kopt_step_range(), but with 8-bit moments any begin and end; KOPT_ERROR_OPTION if not StableAdamW. */
KOPT_API_ KOPT_RESULT_ kopt_norm_add_stable(kopt_norm *norm, const kopt_step *step, const kopt_tensor *t, size_t begin,
                                            size_t end);

/* The factor of the learning rate: 1 / max(1, RMS), where the RMS is that of the n ratios whose squares norm sums. It
   is 1 if n is 0 or a ratio is not finite, NaN if norm is NULL. */
KOPT_API_ double kopt_norm_stable_scale(const kopt_norm *norm, uint64_t n);

/* torch.nn.utils.clip_grad_value_: limits magnitudes in place. limit, in units of the loss-scaled gradient, is rounded
   towards zero to the format; KOPT_ERROR_RANGE if negative, infinite or NaN. Infinity becomes limit, NaN stays NaN. */
KOPT_API_ KOPT_RESULT_ kopt_clip_value(void *x, kopt_format format, size_t n, double limit);

/* ---- LOSS SCALING ------------------------------------------------------------------------------------------------ */

/* A dynamic loss scale like torch.amp.GradScaler (docs/numerics.md section 10). The loss is multiplied by scale before
   the backward pass, so that small gradients do not underflow in fp16. A step whose gradients overflow is skipped, and
   the scale is lowered. You may set any field at any time; a value out of its range is refused with KOPT_ERROR_RANGE.

   Gradients are divided by the scale before they enter the moments, so fp16 moments lose what that saved: in 1000 steps
   they move a weight 0.81 times as far as fp32 ones if |g| is 1e-7, 0.18 times if 1e-8. Use bf16 (default) or fp32. */
typedef struct kopt_scaler {
    double scale;        /* of the loss: a positive normal float, default 65536 */
    double minimum;      /* an overflow does not lower the scale below it: >= 0, at most 3e38. Default 0: no minimum */
    double growth;       /* in (1, 1e30], default 2: factor after `interval` steps without overflow */
    double backoff;      /* in [1e-30, 1), default 0.5: factor after an overflow */
    uint32_t interval;   /* > 0, default 2000: see growth */
    uint32_t hysteresis; /* > 0, default 1: from this many overflows in a row on, each lowers the scale (NVIDIA apex) */
    uint32_t good, bad;  /* steps since the last overflow or growth; overflows in a row. 0 for a new run */
    uint64_t steps_;     /* the largest step count of its optimizers; 0 for a new run */
    uint64_t reserved_;  /* 0 */
} kopt_scaler;

#ifndef KAHAN_OPT_BINDINGS
/* A scaler with the defaults. */
KOPT_INLINE_ kopt_scaler kopt_scaler_of(void) {
    const kopt_scaler s = {65536, 0, 2, 0.5, 2000, 1, 0, 0, 0, 0};
    return s;
}
#endif

/* Updates the scale after a step, taken or skipped. found_inf tells whether a gradient of any rank was not finite:
   pass norm.nonfinite != 0, after the sum over ranks. A change that would make the scale infinite or subnormal is not
   made. kopt_scaler_begin() and kopt_scaler_step() call this function themselves. */
KOPT_API_ KOPT_RESULT_ kopt_scaler_update(kopt_scaler *scaler, int found_inf);

/* kopt_step_begin() with a loss scale, for ranges, threads, frames and ranks, and for one optimizer, (.., &step, &opt,
   1, ..), or all whose gradients were made with this scale (parameter groups): begins steps[i] of opts[i], i below
   count, all or none of them, then updates the scale once. norm is that of all gradients that these steps read, over
   all ranks, as they are in memory (still multiplied by the loss scale). Each step multiplies the gradients by its
   grad_scale / scaler->scale, then clips their norm to max_norm; 0 means no clipping. clip of an optimizer must be
   valid but has no effect. Only the field step of the optimizers is written.

   If a gradient is not finite, the steps are skipped: the optimizers are unchanged, and functions that take such a step
   refuse it with KOPT_ERROR_STEP. *skipped, which may be NULL, is set to 1 for skipped steps and to 0 for others.
   Errors: those of kopt_step_begin(); KOPT_ERROR_RANGE also for a field of the scaler, for a quotient of the scales
   above 3e38, for a max_norm that is negative, infinite or NaN, and if count is 0.

   Do not call it, or kopt_scaler_step(), for one group after the other: the first call changes the scale that the
   gradients of the others have. KOPT_ERROR_MISMATCH refuses that: all optimizers of a call have made fewer steps than
   one that the scaler was used with before. Two losses, each with a backward pass of its own, need a scaler each. If an
   optimizer goes back to an older checkpoint, the scaler goes back with it, or is a new kopt_scaler_of(). */
KOPT_API_ KOPT_RESULT_ kopt_scaler_begin(kopt_scaler *scaler, kopt_step *steps, kopt_optimizer *opts, size_t count,
                                         const kopt_norm *norm, double max_norm, int *skipped);

/* The functions that kopt_scaler_step() calls. Each gets user as its first argument and returns 0; anything else ends
   the call with KOPT_ERROR_CLOSURE, and the optimizer, the scaler and the tensors are unchanged, but for the gradients.
   A function that is not needed may be NULL. */
typedef struct kopt_closure {
    int (*evaluate)(void *user, double scale);    /* forward pass, and backward pass of scale * loss into the
                                                     gradients */
    int (*reduce)(void *user, kopt_norm *norm);   /* sums the 21 words of *norm over all ranks */
    void *user;
} kopt_closure;

/* One step with a loss scale: checks all arguments, calls evaluate, computes the norm of the gradients, calls reduce,
   then steps or skips and updates the scale like kopt_scaler_begin(). A skipped step changes only the scaler: no
   weight, state or step count, and no gradient, even if opt.zero_grad is set. *skipped, which may be NULL, is set as in
   kopt_scaler_begin(). closure may be NULL if the gradients are complete and there is only one rank. The functions of
   the closure may leave by longjmp, or, if the implementation has unwind tables (as on x86-64), by an exception; *opt
   and *scaler are then unchanged. They must not change the arguments of the call, which are checked before: gradients
   alone. Errors: those of kopt_optimizer_step() and kopt_scaler_begin(), all returned before evaluate is called. With
   evaluate, whose gradients have the scale of this call, several optimizers may take turns: no KOPT_ERROR_MISMATCH. */
KOPT_API_ KOPT_RESULT_ kopt_scaler_step(kopt_scaler *scaler, kopt_optimizer *opt, const kopt_tensor *tensors,
                                        size_t count, double max_norm, const kopt_closure *closure, int *skipped);

/* ---- GRADIENT ACCUMULATION --------------------------------------------------------------------------------------- */

/* A sum of gradients over micro-batches, with any rounding of weights but KOPT_FEEDBACK. A bf16 sum of thousands of
   gradients stalls with NEAREST. With KAHAN, sum and residual together have a relative error of 3e-6 times the root of
   the count (EXACT: 2e-8 for random gradients, more for equal ones, which fp32 rounds alike); a step reads the sum
   alone, which is rounded to bf16. The caller owns all memory.

   When the sum is complete, set t.grad = a.sum, t.grad_format = a.format and, for the mean, opt.grad_scale = 1.0 /
   a.count; after the step, a.count = 0. Slices of an array need one accumulator each, with its own first_index. */
typedef struct kopt_accumulator {
    uint32_t made_;                  /* set by kopt_accumulator_of() */
    kopt_format format;              /* of the sum: KOPT_F32, KOPT_BF16 or KOPT_FP16 */
    kopt_rounding rounding;          /* of the sum */
    kopt_rounding residual_rounding; /* KOPT_STOCHASTIC (default) or KOPT_NEAREST, as for weights */
    void *sum;                       /* n values of format; the first addition does not read it */
    void *residual;                  /* KAHAN and EXACT: 2 * n bytes; COMPACT: n bytes; otherwise, and with KOPT_F32,
                                        it is not used and may be NULL */
    size_t n;
    size_t reserved_n_;              /* 0 */
    uint32_t count;                  /* micro-batches in the sum; set it to 0 to begin a new sum */
    uint32_t step;                   /* additions so far; do not set it back, or random bits repeat (they are those of
                                        seed, step, id and stream 2) */
    uint32_t id;                     /* gives each sum random bits of its own; default 0 */
    uint32_t reserved32_;            /* 0 */
    uint64_t seed, first_index;      /* default 0; first_index is below 2^63 (KOPT_ERROR_BOUNDS) */
} kopt_accumulator;

/* An accumulator of this format: with KAHAN if residual is not NULL (2 bytes per value), otherwise with STOCHASTIC;
   seed, id and first_index are 0. The functions below refuse any other accumulator with KOPT_ERROR_UNINITIALIZED. */
KOPT_API_ kopt_accumulator kopt_accumulator_of(void *sum, kopt_format format, void *residual, size_t n);

/* sum += grad * scale, stored like a weight (docs/numerics.md section 11), and counts it in a->count. grad has a->n
   values and must not overlap the sum or the residual. Errors: KOPT_ERROR_RANGE if scale is not a finite number,
   KOPT_ERROR_STEP after 2^32 - 1 additions. */
KOPT_API_ KOPT_RESULT_ kopt_accumulator_add(kopt_accumulator *a, const void *grad, kopt_format grad_format,
                                            double scale);

/* Copies sum + residual to out, as n fp32 values; zeros if a->count is 0. out must overlap neither of the two. */
KOPT_API_ KOPT_RESULT_ kopt_accumulator_read(const kopt_accumulator *a, float *out);

/* ---- REDUCTION --------------------------------------------------------------------------------------------------- */

/* Sums arrays of n values in a fixed order: out[i] = (shards[0][i] + shards[1][i] + ...) * scale. Each + and * is in
   fp32; the result is rounded to nearest even once, at the end. scale is 1 / count for the mean. The bits do not depend
   on the slicing. All shards have one format. out may be one of the shards if out_format equals format; otherwise it
   must overlap neither a shard nor the array shards. KOPT_ERROR_RANGE if count is 0 or scale is not finite. */
KOPT_API_ KOPT_RESULT_ kopt_reduce(void *out, kopt_format out_format, const void *const *shards, size_t count,
                                   kopt_format format, size_t n, double scale);

/* ---- CONVERSIONS OF ARRAYS --------------------------------------------------------------------------------------- */

/* Converts n values between KOPT_F32, KOPT_BF16 and KOPT_FP16, rounded to nearest even. dst and src must not overlap.
   NaN stays NaN, subnormals are not flushed to zero, overflow gives infinity. */
KOPT_API_ KOPT_RESULT_ kopt_convert(void *dst, kopt_format dst_format, const void *src, kopt_format src_format,
                                    size_t n);

/* The same with stochastic rounding. Element i uses the random bits of (key, stream 1) at index key.first_index + i.
   KOPT_ERROR_BOUNDS if key.first_index is 2^63 or above. */
KOPT_API_ KOPT_RESULT_ kopt_convert_stochastic(void *dst, kopt_format dst_format, const void *src,
                                               kopt_format src_format, size_t n, kopt_random_key key);

/* 1 if all n values are finite, otherwise 0; 0 also for invalid arguments. Use it to decide whether to skip a step. */
KOPT_API_ int kopt_all_finite(const void *x, kopt_format format, size_t n);

/* ---- NOT FROZEN -------------------------------------------------------------------------------------------------- */

/* What follows may change in any version, also after 1.0: compression, vector mathematics and random numbers, and with
   them the bits of Adam-atan2 and smooth Lion. */

/* ---- GRADIENT COMPRESSION ---------------------------------------------------------------------------------------- */

/* Compresses gradients that are sent from rank to rank. The result, the code of the gradient, takes 2 bytes per value
   (BF16, FP16), 1.016 (Q8) or 0.141 (Q1); formulas: docs/numerics.md section 12. With a residual, what a code loses
   is stored there and added to the next gradient (error feedback: Seide et al. 2014, Karimireddy et al. 2019). So all
   of each gradient arrives in the end, and one bit per value trains as well as 32. Without a residual, use STOCHASTIC,
   which is unbiased but noisy: NEAREST would be biased, and training may fail.

   Skip a gradient that contains infinity or NaN (kopt_norm tells). In BF16 and FP16 such a value arrives as it is. In
   Q8 and Q1 all 64 or 256 values that share its scale arrive as NaN. The residuals of these values become zero. */
typedef struct kopt_compressor {
    uint32_t made_;                  /* set by kopt_compressor_of() */
    kopt_format code;                /* of the result: KOPT_BF16, KOPT_FP16, KOPT_Q8 or KOPT_Q1 */
    kopt_rounding rounding;          /* KOPT_NEAREST or KOPT_STOCHASTIC. KOPT_Q1: NEAREST has the mean of |x| as its
                                        scale; STOCHASTIC draws unbiased signs with the largest |x| as their scale.
                                        Their variance is too large for error feedback: with a residual they are
                                        refused (KOPT_ERROR_OPTION) */
    kopt_rounding residual_rounding; /* of 16-bit residuals: KOPT_STOCHASTIC (default) or KOPT_NEAREST */
    kopt_format residual_format;     /* KOPT_F32, KOPT_BF16 (default) or KOPT_FP16 */
    uint32_t step;                   /* gradients compressed so far; the random bits are those of (seed, step, id,
                                        streams 3 and 4) */
    uint32_t id;                     /* gives each gradient random bits of its own; default 0 */
    uint32_t reserved32_;            /* 0 */
    void *residual;                  /* NULL: no error feedback. Otherwise n values of residual_format, which are not
                                        read while step is 0 */
    size_t n;
    uint64_t seed;
    uint64_t first_index;            /* of a slice: the index of its element 0 in the whole; below 2^63, with Q8 a
                                        multiple of 64, with Q1 of 256 (KOPT_ERROR_BOUNDS). The codes of slices, each
                                        with its own compressor, are then those of the whole */
} kopt_compressor;

/* A compressor with NEAREST and a bf16 residual, or, if residual is NULL, with STOCHASTIC. seed, id and first_index
   are 0. kopt_compress() refuses any other compressor with KOPT_ERROR_UNINITIALIZED. */
KOPT_API_ kopt_compressor kopt_compressor_of(kopt_format code, void *residual, size_t n);

/* Writes the code of gradient + residual to out, stores what the code loses in the residual, and counts it in c->step.
   out_size must be at least kopt_format_size(c->code, c->n), otherwise KOPT_ERROR_SIZE. grad has c->n values. out,
   grad and the residual must not overlap. BF16 and FP16 codes are numbers in the byte order of the machine; the bytes
   of Q8 and Q1 are the same on every machine. KOPT_ERROR_STEP after 2^32 - 1 calls. */
KOPT_API_ KOPT_RESULT_ kopt_compress(kopt_compressor *c, void *out, size_t out_size, const void *grad,
                                     kopt_format grad_format);

/* sum += decoded * scale, rounded to nearest even. sum has n values of format. in is the code of n values, and in_size
   its size in bytes (KOPT_ERROR_SIZE if it is too small). sum and in must not overlap. To sum over ranks, begin with
   fp32 zeros and add the codes of all ranks in the same order everywhere. KOPT_ERROR_RANGE if scale is not finite. */
KOPT_API_ KOPT_RESULT_ kopt_decompress_add(void *sum, kopt_format format, const void *in, size_t in_size,
                                           kopt_format code, size_t n, double scale);

#ifdef KAHAN_OPT_VMATH
#define KOPT_VMATH_DECLARED_
/* ---- VECTOR MATHEMATICS ------------------------------------------------------------------------------------------ */

/* With KAHAN_OPT_VMATH: the functions that forward and backward passes need besides + - * /. docs/numerics.md has the
   formulas, the measured errors and the origin of the coefficients. */

/* out[i] = f(x[i]), computed in the default IEEE environment. Unlike elsewhere, the arrays must be aligned to 4 bytes;
   this is not checked. An output may be one of the inputs; partial overlap is refused, and so is any overlap of sine
   and cosine. NaN gives NaN; subnormals are not flushed to zero. Special values:

       exp        +inf from 88.73 on; 0 below -103.98, with gradual underflow before it
       log        log(0) = -inf; NaN below 0
       tanh, erf  +-1 at +-inf; a zero keeps its sign
       erfc       2 at -inf; 0 from 10.06 on
       atan2      all quadrants, zeros and infinities as in C99
       sincospi   sin(pi x), cos(pi x): exact at multiples of 1/2; a zero sine has the sign of x; NaN at +-inf */
KOPT_API_ KOPT_RESULT_ kopt_vmath_exp(float *out, const float *x, size_t n);
KOPT_API_ KOPT_RESULT_ kopt_vmath_log(float *out, const float *x, size_t n);
KOPT_API_ KOPT_RESULT_ kopt_vmath_tanh(float *out, const float *x, size_t n);
KOPT_API_ KOPT_RESULT_ kopt_vmath_erf(float *out, const float *x, size_t n);
KOPT_API_ KOPT_RESULT_ kopt_vmath_erfc(float *out, const float *x, size_t n);
KOPT_API_ KOPT_RESULT_ kopt_vmath_atan2(float *out, const float *y, const float *x, size_t n);
KOPT_API_ KOPT_RESULT_ kopt_vmath_sincospi(float *sine, float *cosine, const float *x, size_t n);

/* The functions of kopt_map(), with s(x) = 1 / (1 + e^-x), P the cumulative distribution function of the standard
   normal distribution, and g(x) = 2 sqrt(2 / pi) (x + 0.044715 x^3). */
typedef enum kopt_function {
    KOPT_FN_EXP = 0,
    KOPT_FN_LOG = 1,
    KOPT_FN_TANH = 2,
    KOPT_FN_SIGMOID = 3,   /* s(x)                                                                               */
    KOPT_FN_SILU = 4,      /* x s(x)                                                                             */
    KOPT_FN_GELU = 5,      /* x P(x) = x (1 + erf(x / sqrt(2))) / 2                                              */
    KOPT_FN_GELU_TANH = 6, /* x s(g(x)) = x (1 + tanh(g(x) / 2)) / 2                                             */
    KOPT_FN_SOFTPLUS = 7   /* log(1 + e^x)                                                                       */
} kopt_function;

/* out[i] = f(x[i]) on bf16 or fp16 (format, for both), correctly rounded: for each of the 65,536 inputs the result
   is nearest to the true value, ties to even. An infinity gives the limit (a zero has the sign of the side from which f
   approaches it). Subnormal inputs and results stay subnormal. NaN, and log below 0, give the canonical NaN. out may
   be x; partial overlap is refused. */
KOPT_API_ KOPT_RESULT_ kopt_map(void *out, const void *x, kopt_format format, size_t n, kopt_function f);

/* dx[i] = dy[i] * f'(x[i]), for each f but KOPT_FN_LOG. The slope is rounded as in kopt_map(), its exact product with
   dy is rounded to nearest even: a dy of ones gives the slope. dx may be dy or x; partial overlap is refused. */
KOPT_API_ KOPT_RESULT_ kopt_map_backward(void *dx, const void *dy, const void *x, kopt_format format, size_t n,
                                         kopt_function f);

/* ---- RANDOM NUMBERS ---------------------------------------------------------------------------------------------- */

/* Element i of out depends on key.seed, key.step, key.id and key.first_index + i alone (stream 5). Results are rounded
   to nearest even to KOPT_F32, KOPT_BF16 or KOPT_FP16. KOPT_ERROR_BOUNDS if key.first_index + n is above 2^54. */

/* mean + deviation * N(0, 1) (Box and Muller 1958, from all 32 bits of two words). The largest magnitude is 6.76
   deviations. mean and deviation must be finite, and deviation >= 0, otherwise KOPT_ERROR_RANGE. */
KOPT_API_ KOPT_RESULT_ kopt_normal(void *out, kopt_format format, size_t n, double mean, double deviation,
                                  kopt_random_key key);

/* Uniform between low and high: (low + high) / 2 + (high - low) / 2 * u, with u one of 2^24 numbers symmetric about 0,
   never 0 or +-1; rounding may give low or high. KOPT_ERROR_RANGE unless low and high are finite and low <= high. */
KOPT_API_ KOPT_RESULT_ kopt_uniform(void *out, kopt_format format, size_t n, double low, double high,
                                    kopt_random_key key);

#endif

/* clang-format on */

#endif /* KAHAN_OPT_H */

/* ================================================================================================================== */
/* IMPLEMENTATION */
/* ================================================================================================================== */
#if defined(KAHAN_OPT_IMPLEMENTATION) && !defined(KOPT_IMPLEMENTED_)
#define KOPT_IMPLEMENTED_
#define KOPT_IMPLEMENTING_ /* undefined at the end of the implementation */
#if (defined(KAHAN_OPT_STATIC) && !defined(KOPT_API_IS_STATIC_)) || \
    (defined(KAHAN_OPT_VMATH) && !defined(KOPT_VMATH_DECLARED_))
#error "define KAHAN_OPT_STATIC and KAHAN_OPT_VMATH before this file includes kahan_opt.h for the first time"
#endif

#ifdef __has_include
#if !__has_include(<string.h>) /* bare metal, where compilers call these two all the same */
#define KOPT_NO_STRING_H_
KOPT_EXTERN_ void *memcpy(void *to, const void *from, size_t size);
KOPT_EXTERN_ void *memset(void *to, int value, size_t size);
#endif
#endif
#ifndef KOPT_NO_STRING_H_
#include <string.h>
#endif

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

/* In comments, "section" with a number means that section of docs/numerics.md. */

/* The vector code of this build: KOPT_X86_ (AVX-512, KOPT_AVX2_, KOPT_SSE2_), KOPT_NEON_, KOPT_SIMD128_, or none. Sets
   below the one that the flags of the compiler promise are left out. tcc, nvcc and unknown compilers: scalar code. */
#if defined(KAHAN_OPT_NO_SIMD) || defined(__CUDACC__)
#elif (defined(KOPT_GNU_) && (defined(KOPT_X86_64_) || defined(__i386__))) || (defined(_M_X64) && !defined(_M_ARM64EC))
#define KOPT_X86_ 1
#if defined(KAHAN_OPT_ALL_ISAS) || !defined(__AVX2__)
#define KOPT_SSE2_ 1
#endif
#if defined(KAHAN_OPT_ALL_ISAS) || \
    !(defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__))
#define KOPT_AVX2_ 1
#endif
#elif defined(KOPT_AARCH64_) && defined(__ARM_NEON) && !defined(__AARCH64EB__)
#define KOPT_NEON_ 1
#elif defined(KOPT_GNU_) && defined(__wasm_simd128__)
#define KOPT_SIMD128_ 1
#endif
#if defined(KOPT_X86_) || defined(KOPT_NEON_) || defined(KOPT_SIMD128_)
#define KOPT_VECTOR_CODE_ 1 /* this build has vector code */
#endif

#if defined(KOPT_X86_)
#if defined(KOPT_GCC_) && !defined(_IMMINTRIN_H_INCLUDED)
#define KOPT_ONE_BY_ONE_ /* all of gcc's <immintrin.h> takes 3 % longer */
#define _IMMINTRIN_H_INCLUDED
#if !__STDC_HOSTED__ && !defined(_MM_MALLOC_H_INCLUDED)
#define _MM_MALLOC_H_INCLUDED /* no stdlib.h, which bare metal and UEFI lack */
#include <smmintrin.h>
#undef _MM_MALLOC_H_INCLUDED
#endif
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized" /* of _mm512_undefined_ps() in C++ */
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#else
#include <immintrin.h>
#if defined(__clang__) && (defined(_MSC_VER) || defined(__SCE__))
#define KOPT_ONE_BY_ONE_ /* <immintrin.h> leaves these out */
#endif
#endif
#ifdef KOPT_ONE_BY_ONE_
#include <smmintrin.h>
#include <wmmintrin.h>
#include <avxintrin.h>
#include <avx2intrin.h>
#include <f16cintrin.h>
#include <avx512fintrin.h>
#include <avx512vlintrin.h>
#include <avx512bwintrin.h>
#ifdef KOPT_GCC_
#pragma GCC diagnostic pop
#undef _IMMINTRIN_H_INCLUDED
#endif
#undef KOPT_ONE_BY_ONE_
#endif
#elif defined(KOPT_NEON_)
#include <arm_neon.h>
#ifdef __ARM_FEATURE_CRC32
#include <arm_acle.h>
#endif
#endif
#if defined(_MSC_VER) && !defined(KOPT_GNU_)
#include <intrin.h> /* by which Microsoft's compiler reaches the floating-point environment */
#if (defined(_M_X64) && !defined(_M_ARM64EC)) || (defined(_M_IX86_FP) && _M_IX86_FP == 2)
#define KOPT_INTRINSIC_MXCSR_ 1
#elif defined(_M_ARM64) || defined(_M_ARM64EC)
#define KOPT_INTRINSIC_FPCR_ 0x5A20 /* ARM64_FPCR of winnt.h */
#endif
#endif
#if defined(KOPT_X86_) || (defined(KOPT_NEON_) && defined(__ARM_FEATURE_CRC32))
#define KOPT_CRC_VECTORS_ 1 /* kopt_crc_fast_() */
#endif

#ifdef KOPT_GNU_
#define KOPT_NOINLINE_ __attribute__((__noinline__))
#if defined(__clang__) && !defined(__OPTIMIZE__) /* would use 1 MB of stack: no slot is shared by inlined calls */
#define KOPT_FORCE_INLINE_ KOPT_INLINE_KEYWORD_
#else
#define KOPT_FORCE_INLINE_ KOPT_INLINE_KEYWORD_ __attribute__((__always_inline__))
#endif
#define KOPT_TARGET_(isa) __attribute__((__target__(isa)))
#define KOPT_ALIGN64_ __attribute__((__aligned__(64))) /* no vector crosses a cache line */
#elif defined(_MSC_VER)
#define KOPT_ALIGN64_ __declspec(align(64))
#define KOPT_NOINLINE_ __declspec(noinline)
#define KOPT_FORCE_INLINE_ __forceinline
#define KOPT_TARGET_(isa)
#else
#define KOPT_NOINLINE_
#define KOPT_FORCE_INLINE_ KOPT_INLINE_KEYWORD_
#define KOPT_TARGET_(isa)
#endif

#if defined(KOPT_GNU_) && !(defined(__ARM_ARCH_PROFILE) && __ARM_ARCH_PROFILE == 'M')
#define KOPT_PREFETCH_(p) __builtin_prefetch(p)
#elif defined(KOPT_X86_)
#define KOPT_PREFETCH_(p) _mm_prefetch(((const char *)(p)), _MM_HINT_T0)
#else
#define KOPT_PREFETCH_(p) ((void)(p))
#endif

#if defined(KOPT_GCC_) && !defined(__OPTIMIZE__) && !defined(__CUDACC__)
#define KOPT_OPTIMIZED_HERE_
#pragma GCC push_options
#pragma GCC optimize("O2") /* at -O0 vector code is 8-15x slower */
#endif

/* ---- INTERNAL TYPES ---------------------------------------------------------------------------------------------- */

typedef unsigned char kopt_byte_;

enum {
    KOPT_HEADER_ = 64,       /* bytes of a state block before its arrays */
    KOPT_RATES_ = 32,        /* where in it FEEDBACK has the 16 bytes of its rates */
    KOPT_BLOCK_VERSION_ = 2, /* of the layout of a state block */
    KOPT_RANDOM_STEP_ = 0,   /* from here on: streams of random bits, section 7 */
    KOPT_RANDOM_CONVERT_ = 1,
    KOPT_RANDOM_ACCUMULATE_ = 2,
    KOPT_RANDOM_COMPRESS_ = 3,
    KOPT_RANDOM_RESIDUAL_ = 4,
    KOPT_RANDOM_NOISE_ = 5,
    KOPT_RANDOM_DITHER_ = 6
};
#define KOPT_MAGIC_ 0x54504F4Bu /* "KOPT", at the start of a state block */

/* The blocks of KOPT_Q8 and of KOPT_Q1: elements that share a scale. */
#define KOPT_BLOCK_ ((size_t)64)
#define KOPT_SIGNS_ ((size_t)256)

/* The scale of a block of KOPT_Q1, from its largest magnitude or (to nearest) its mean, as bits of fp32. 0 if that is 0
   or subnormal; NaN (7FC00000) if infinite or NaN: then the block decodes to NaN. */
KOPT_INLINE_ uint32_t kopt_scale_(uint32_t largest) {
    const uint32_t infinity = 0x7F800000u, bounded = largest < infinity ? largest : infinity;
    /* infinity + (1 << 22) is 7FC00000. With a conditional expression gcc 12 -O1 for Thumb-2 loses its upper half. */
    return bounded < 0x00800000u ? 0 : bounded + ((uint32_t)(bounded == infinity) << 22);
}
/* True if every code of a block is 0, because its scale is 0 or NaN. */
KOPT_INLINE_ int kopt_codes_are_zero_(uint32_t scale) { return scale == 0 || scale == 0x7FC00000u; }

/* place_q8 of a root, whose code is 255 at most, minus its code: see KERNELS */
#define KOPT_ROOT_PLACE_ ((uint32_t)1049)

/* The scale of a block of KOPT_Q8 is a power of two (section 6b). It is stored as a byte, the exponent field of an fp32
   number; 0: the block is zeros; 255: it is NaN. square: of roots of means of squares. */
KOPT_INLINE_ uint32_t kopt_exponent_q8_(uint32_t largest, int square) {
    const uint32_t exponent = (largest + (square ? 0x007FFFFFu : 0x0007FFFFu)) >> 23;
    return largest >= 0x7F800000u ? 255 : exponent < 254 ? exponent : 254;
}
/* As bits of fp32; NaN (7FC00000) for 255. */
KOPT_INLINE_ uint32_t kopt_scale_q8_(uint32_t exponent) {
    return (exponent << 23) + ((uint32_t)(exponent == 255) << 22);
}
/* Do vectors decode and encode with 2^(exponent - 127) folded into their constants? Not if a number may be subnormal,
   or a constant overflow. */
KOPT_INLINE_ int kopt_scale_folds_(uint32_t exponent) { return exponent - 40 < 184; }
/* The largest magnitude that has a code, 31/16 * 2^127. Larger ones are coded like it. */
#define KOPT_LARGEST_Q8_ 0x7F780000u

/* A step that has begun: what the caller's kopt_step holds. */
typedef struct kopt_begun_ {
    uint64_t made; /* KOPT_BEGUN_, at this place in every version; 8 bytes, so that no field needs padding before it */
    kopt_rule rule;
    kopt_format first_moment_format, second_moment_format; /* the same, if there is no second moment */
    kopt_rounding rounding, moment_rounding, residual_rounding;
    int nesterov, zero_grad;
    int moment_count; /* number of moment arrays, 0 to 4 */
    int moments_only;
    int unrectified;        /* RAdam, Ranger: 1: too few steps to estimate the variance; the update is rate * m */
    int sync;               /* Ranger: 1: this step ends with a synchronization (see opt.lookahead) */
    int stable;             /* 1: StableAdamW */
    float grad_scale;       /* opt.grad_scale * opt.clip, negated to maximize */
    float l2, weight_decay; /* coefficient of the weight in the gradient, and in the update */
    /* An average becomes beta * average + gain * x, where gain is 1 - beta and the betas are numbered as in the paper
       of the rule. SGD: beta1 is the momentum, gain1 is 1 - dampening; in step 1 they are 0 and 1. The direction,
       below, is what the rate multiplies, such as m / (root + eps). */
    float beta1, gain1;
    float beta2, gain2;
    float beta3, gain3;
    float extrapolation;  /* Nesterov: coefficient of the first moment (SGD) or of the change of the gradient (Adan)
                                that is added to the gradient */
    float third_scale;    /* Adan: coefficient of the third moment in the direction */
    float rate;           /* coefficient of the direction: lr with the corrections of the rule; Adam-atan2: also
                                multiplied by atan2_a */
    float undecayed_rate; /* the rate without weight decay, which is another one with Adan only */
    float root_scale;     /* bias correction of the root: 1 / sqrt(1 - beta^t) with the beta of the second moment;
                                RAdam: 1; Adam-atan2: also multiplied by atan2_b. With 8-bit moments also multiplied
                                by 1.003, from step 2 on */
    float eps;            /* that of kopt_optimizer; Adam-atan2: 2^-126 */
    uint32_t step;        /* number of the step, from 1 */
    float feedback;       /* FEEDBACK: the share of an error that the first moment takes, times the rate; otherwise 0 */
    uint64_t seed;
    float sharpness;  /* Lion: 0: sign(c); above 0: smooth Lion */
    float slow_scale; /* Ranger: 1 - lookahead_rate, the coefficient of the slow weight in a synchronization */
} kopt_begun_;
typedef char kopt_step_has_room_[sizeof(kopt_begun_) <= sizeof(kopt_step) ? 1 : -1];

/* A step of elements [begin, end) of one tensor, ready to run: all arguments are checked. */
typedef struct kopt_job_ {
    const kopt_begun_ *step;
    kopt_byte_ *weight, *grad, *copy; /* copy may be NULL */
    kopt_byte_ *residual, *moment[4], *slow, *slow_residual;
    const kopt_state_arrays *arrays; /* of the caller, or NULL */
    kopt_counts *counts;             /* may be NULL */
    kopt_format weight_format, grad_format, copy_format;
    size_t begin, end, scale; /* scale: bytes from the codes of an 8-bit moment to its scales in a state block */
    uint64_t first;           /* global index of element 0 */
    uint32_t id, stream;      /* of the random bits */
    float rate, weight_decay, l2;
    float beta1, feedback; /* of the first moment; FEEDBACK: the factor of the error of a weight, otherwise 0 */
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

/* One call of a training-loop tool: the norm, clipping or the sum of shards. */
typedef enum kopt_tool_kind_ { KOPT_TOOL_NORM_, KOPT_TOOL_CLIP_, KOPT_TOOL_SUM_ } kopt_tool_kind_;
typedef struct kopt_tool_ {
    kopt_tool_kind_ kind;
    kopt_format src_format, dst_format;
    const kopt_byte_ *src;
    kopt_byte_ *dst;
    size_t n;
    kopt_norm *norm;
    uint32_t limit; /* of magnitudes, as bits of dst_format */
    const void *const *shards;
    size_t count;
    float scale;
} kopt_tool_;

/* ---- RULES AND FORMATS ------------------------------------------------------------------------------------------- */

#define KOPT_ALWAYS_INLINE_ static KOPT_HOST_DEVICE_ KOPT_FORCE_INLINE_
#ifdef __CUDA_ARCH__
#define KOPT_SCALARS_ static KOPT_FORCE_INLINE_ /* so that an optimizer and a step stay in registers */
#else
#define KOPT_SCALARS_ static KOPT_NOINLINE_ /* no operation may move out of the FP environment of the call */
#endif

enum { KOPT_LAST_RULE_ = KOPT_RULE_ADAM_ATAN2, KOPT_LAST_ROUNDING_ = KOPT_FEEDBACK };
#ifdef KAHAN_OPT_VMATH
enum { KOPT_HAS_VMATH_ = 1 };
#else
enum { KOPT_HAS_VMATH_ = 0 };
#endif

KOPT_ALWAYS_INLINE_ size_t kopt_bytes_of_(kopt_format format) {
    return format == KOPT_F32 ? 4 : format == KOPT_Q8 ? 1 : 2;
}

/* Is this moment a mean of squares, or AMSGrad's maximum of them? fp16 and 8-bit moments store its root. */
KOPT_ALWAYS_INLINE_ int kopt_is_square_(kopt_rule rule, int moment) {
    return moment == 1 || (moment == 2 && rule == KOPT_RULE_ADAM);
}

/* Has each block of values in this format a scale? */
KOPT_ALWAYS_INLINE_ int kopt_has_scales_(kopt_format format) { return format == KOPT_Q8; }

/* Does the array of a moment in this format hold the root of a mean of squares? */
KOPT_ALWAYS_INLINE_ int kopt_holds_root_(kopt_format format, kopt_rule rule, int moment) {
    return (format == KOPT_FP16 || kopt_has_scales_(format)) && kopt_is_square_(rule, moment);
}

KOPT_ALWAYS_INLINE_ size_t kopt_bytes_of_residual_(kopt_format format, kopt_rounding rounding) {
    if (format == KOPT_F32 || rounding == KOPT_NEAREST || rounding == KOPT_STOCHASTIC || rounding == KOPT_FEEDBACK)
        return 0;
    return rounding == KOPT_COMPACT ? 1 : 2;
}

/* ---- MEMORY ------------------------------------------------------------------------------------------------------ */

#if defined(KOPT_GNU_) && (defined(KOPT_NEON_) || (defined(KOPT_X86_) && defined(__SSE2__)))
#define KOPT_VECTORS16_ 1 /* little-endian, with 16-byte vectors and an instruction that counts leading zeros */
#endif

KOPT_INLINE_ uint32_t kopt_load16_(const kopt_byte_ *p) {
    uint16_t x;
    memcpy(&x, p, 2);
    return x;
}
KOPT_INLINE_ uint32_t kopt_load32_(const kopt_byte_ *p) {
    uint32_t x;
    memcpy(&x, p, 4);
    return x;
}
KOPT_INLINE_ void kopt_store16_(kopt_byte_ *p, uint32_t value) {
    const uint16_t x = (uint16_t)value;
    memcpy(p, &x, 2);
}
KOPT_INLINE_ void kopt_store32_(kopt_byte_ *p, uint32_t x) { memcpy(p, &x, 4); }
/* Copies size bytes to part and fills its `room` bytes with zeros. Returns part. */
static KOPT_NOINLINE_ KOPT_UNUSED_ const kopt_byte_ *kopt_copy_padded_(kopt_byte_ *part, size_t room,
                                                                       const kopt_byte_ *p, size_t size) {
    memset(part, 0, room);
    memcpy(part, p, size);
    return part;
}

/* ---- BINARY64 ARITHMETIC ----------------------------------------------------------------------------------------- */

#if defined(__SIZEOF_DOUBLE__) && __SIZEOF_DOUBLE__ != 8
#error "kahan_opt.h needs a double of 64 bits (AVR: gcc -mdouble=64)"
#endif

KOPT_INLINE_ uint64_t kopt_bits64_(double x) {
    uint64_t bits;
    memcpy(&bits, &x, 8);
    return bits;
}
KOPT_INLINE_ double kopt_bits_to_f64_(uint64_t bits) {
    double x;
    memcpy(&x, &bits, 8);
    return x;
}

/* Exact, in any floating-point environment. */
KOPT_INLINE_ double kopt_to_double_(float x) {
    const uint32_t u = kopt_as_u32_(x), mag = u & 0x7FFFFFFFu;
    uint64_t bits = ((uint64_t)mag << 29) + ((uint64_t)896 << 52);                   /* normal: bias 1023, not 127 */
    if (mag >= 0x7F800000u) bits |= (uint64_t)0x7FF << 52;                           /* infinity, NaN */
    if (mag < 0x00800000u) bits = kopt_bits64_((double)mag) - ((uint64_t)149 << 52); /* mag * 2^-149 */
    return kopt_bits_to_f64_((uint64_t)(u >> 31) << 63 | (mag == 0 ? 0 : bits));
}

#if defined(KOPT_X86_64_) || (defined(__i386__) && defined(__SSE2_MATH__)) || defined(KOPT_AARCH64_)
#define KOPT_REGISTER64_ KOPT_REGISTER_
#else
#define KOPT_REGISTER64_ "m"
#endif
/* Hides x from the compiler. Every operation stands between two of these barriers, and volatile keeps their order: none
   moves before kopt_enter_() or after kopt_leave_(), which set and restore the floating-point environment. */
KOPT_INLINE_ double kopt_opaque64_(double x) {
#if defined(KOPT_GNU_) && !defined(__CUDA_ARCH__)
    __asm__ __volatile__("" : "+" KOPT_REGISTER64_(x));
    return x;
#else
    volatile double y = x;
    return y;
#endif
}

#ifdef __CUDA_ARCH__
#define KOPT_OPERATION64_(name, operation, ptx) KOPT_PTX_(name, double, "d", ptx ".f64")
#else
#define KOPT_OPERATION64_(name, operation, ptx) \
    KOPT_INLINE_ double name(double a, double b) { return kopt_opaque64_(a operation kopt_opaque64_(b)); }
#endif
KOPT_OPERATION64_(kopt_mul64_, *, "mul.rn")
KOPT_OPERATION64_(kopt_add64_, +, "add.rn")
KOPT_OPERATION64_(kopt_sub64_, -, "sub.rn")
KOPT_INLINE_ double kopt_div64_(double a, double b) { /* in assembly, as in kopt_div_() */
#ifdef __CUDA_ARCH__
    asm("div.rn.f64 %0, %1, %2;" : "=d"(a) : "d"(a), "d"(b));
#elif defined(KOPT_GNU_) && defined(__powerpc__)
    __asm__ __volatile__("fdiv %0, %0, %1" : "+d"(a) : "d"(b));
#elif defined(KOPT_GNU_) && defined(KOPT_AARCH64_)
    __asm__ __volatile__("fdiv %d0, %d0, %d1" : "+w"(a) : "w"(b));
#elif defined(KOPT_GNU_) && (defined(KOPT_X86_64_) || defined(__SSE2_MATH__)) && defined(__AVX__)
    __asm__ __volatile__("vdivsd {%1, %0, %0|%0, %0, %1}" : "+x"(a) : "x"(b));
#elif defined(KOPT_GNU_) && (defined(KOPT_X86_64_) || defined(__SSE2_MATH__))
    __asm__ __volatile__("divsd {%1, %0|%0, %1}" : "+x"(a) : "x"(b));
#else
    a = kopt_opaque64_(a / kopt_opaque64_(b));
#endif
    return a;
}

KOPT_INLINE_ float kopt_to_float_(double x) {
#ifdef __CUDA_ARCH__
    float y;
    asm("cvt.rn.f32.f64 %0, %1;" : "=f"(y) : "d"(x));
#elif defined(KOPT_GNU_)
    float y = (float)kopt_opaque64_(x);
    __asm__ __volatile__("" : "+" KOPT_REGISTER64_(y));
#else
    volatile float y = (float)kopt_opaque64_(x);
#endif
    return y;
}

/* A double from its bits in two halves, where its literal is not exact in binary32: -fsingle-precision-constant would
   round that. tests/repo/style.py compares the two. */
#define KOPT_DOUBLE_(literal, high, low) kopt_bits_to_f64_(((uint64_t)(high) << 32) + (low))
#define KOPT_1E_MINUS_6_ KOPT_DOUBLE_(1e-6, 0x3EB0C6F7u, 0xA0B5ED8Du)
#define KOPT_BELOW_1_ KOPT_DOUBLE_(0.99999999999999989, 0x3FEFFFFFu, 0xFFFFFFFFu)
#define KOPT_0_999_ KOPT_DOUBLE_(0.999, 0x3FEFF7CEu, 0xD916872Bu)
#define KOPT_3E38_ KOPT_DOUBLE_(3e38, 0x47EC363Cu, 0xBF21F28Au) /* finite as a float, too */
#define KOPT_LARGEST64_ KOPT_DOUBLE_(1.7976931348623157e308, 0x7FEFFFFFu, 0xFFFFFFFFu)

/* ---- comparisons and ranges of hyper-parameters ---- */

/* a < b, as integers: -Ofast knows no NaNs, DAZ takes subnormals for 0. NaNs are above or, if negative, below all. */
static KOPT_HOST_DEVICE_ int kopt_less64_(double a, double b) {
    const uint64_t top = (uint64_t)1 << 63;
    uint64_t x = kopt_bits64_(a), y = kopt_bits64_(b);
    x = (x & top) != 0 ? top - (x & ~top) : x | top; /* the order of the numbers; -0 becomes 0 */
    y = (y & top) != 0 ? top - (y & ~top) : y | top;
    return x < y;
}

KOPT_INLINE_ int kopt_is_zero_(double x) { return kopt_bits64_(x) << 1 == 0; }

static double kopt_nan64_(void) { return kopt_bits_to_f64_((uint64_t)0x7FF8 << 48); }

/* Is x in [low, high], with 0 <= low? By bits: those of negative numbers and NaNs are above those of any finite bound.
   -0 is 0. */
KOPT_INLINE_ int kopt_between_(double x, double low, double high) {
    uint64_t bits = kopt_bits64_(x);
    if (bits << 1 == 0) bits = 0;
    return bits >= kopt_bits64_(low) && bits <= kopt_bits64_(high);
}
KOPT_INLINE_ int kopt_magnitude_at_most_(double x, double largest) {
    return kopt_bits64_(x) << 1 <= kopt_bits64_(largest) << 1;
}

/* 1 - beta, from the bits of 0 <= beta < 1 or -0: exact, then rounded once to fp32, to nearest even. */
KOPT_ALWAYS_INLINE_ float kopt_one_minus_beta_(uint64_t beta) {
    uint64_t q = beta << 11 | (uint64_t)1 << 63; /* beta * 2^64, a multiple of 2^11 */
    int shift = 1022 - (int)(beta >> 52 & 2047), e = 1022;
    if (shift > 0) { /* the multiple is odd if a digit is cut off: the second rounding then is that of all digits */
        const uint64_t cut = shift < 53 ? q >> (shift + 11) : 0;
        q = shift < 53 && cut << (shift + 11) == q ? cut << 11 : (cut | 1) << 11;
    }
    q = 0 - q; /* (1 - beta) * 2^64 */
#ifdef __CUDA_ARCH__
    shift = __clzll((long long)q);
#elif defined(KOPT_VECTORS16_)
    shift = __builtin_clzll(q);
#else
    for (shift = 0; q >> 63 == 0; q <<= 1) e--;
#endif
    q <<= shift;
    return kopt_to_float_(kopt_bits_to_f64_((q << 1 >> 12) + ((uint64_t)(e - shift) << 52)));
}

/* Stores beta1 and beta2, and 1 - beta of each, in fp32, and computes kopt_correction_() of each. */
#ifdef __CUDA_ARCH__
/* Of beta1 in the even lane of a pair, of beta2 in the odd one. Four bits of the step at a time. */
static KOPT_FORCE_INLINE_ __device__ void kopt_betas_(const kopt_optimizer *opt, kopt_begun_ *s, float *correction1,
                                                      float *correction2) {
    const int even = (int)(threadIdx.x & 30u);
    const uint32_t pair = 3u << even;
    const double beta = (threadIdx.x & 1u) == 0 ? opt->beta1 : opt->beta2;
    const float one_minus_beta = kopt_one_minus_beta_(kopt_bits64_(beta)), beta32 = kopt_to_float_(beta);
    float gain = one_minus_beta, correction = 0;
    uint32_t step = s->step, bit;
    do {
        _Pragma("unroll") for (bit = 1; bit <= 8; bit <<= 1) {
            const float combined = kopt_combine_gains_(correction, gain);
            correction = (step & bit) != 0 ? combined : correction;
            gain = kopt_combine_gains_(gain, gain);
        }
        step >>= 4;
    } while (step != 0);
    s->beta1 = __shfl_sync(pair, beta32, even);
    s->beta2 = __shfl_sync(pair, beta32, even + 1);
    s->gain1 = __shfl_sync(pair, one_minus_beta, even);
    s->gain2 = __shfl_sync(pair, one_minus_beta, even + 1);
    *correction1 = __shfl_sync(pair, correction, even);
    *correction2 = __shfl_sync(pair, correction, even + 1);
}
#else
/* Side by side: neither waits for the other. */
static void kopt_betas_(const kopt_optimizer *opt, kopt_begun_ *s, float *correction1, float *correction2) {
    float gain1 = kopt_one_minus_beta_(kopt_bits64_(opt->beta1)), r1 = 0;
    float gain2 = kopt_one_minus_beta_(kopt_bits64_(opt->beta2)), r2 = 0;
    uint32_t step = s->step;
    s->beta1 = kopt_to_float_(opt->beta1);
    s->beta2 = kopt_to_float_(opt->beta2);
    s->gain1 = gain1;
    s->gain2 = gain2;
    for (;; gain1 = kopt_combine_gains_(gain1, gain1), gain2 = kopt_combine_gains_(gain2, gain2)) {
        if ((step & 1u) != 0) {
            r1 = kopt_combine_gains_(r1, gain1);
            r2 = kopt_combine_gains_(r2, gain2);
        }
        if ((step >>= 1) == 0) break;
    }
    *correction1 = r1;
    *correction2 = r2;
}
#endif

/* Square root of 0 < a <= 1 by Heron's method: the iterates decrease until they converge. */
static KOPT_HOST_DEVICE_ double kopt_sqrt64_(double a) {
    double x, y = 1.0;
    do {
        x = y;
        y = kopt_mul64_(kopt_add64_(x, kopt_div64_(a, x)), 0.5);
    } while (kopt_less64_(y, x));
    return x;
}

/* ---- EXACT NORM -------------------------------------------------------------------------------------------------- */

/* Adds value * 2^(p - 298) to the exact sum without carries: each limb, norm->digit[i], grows by less than 2^33. */
KOPT_INLINE_ void kopt_norm_accumulate_(kopt_norm *norm, uint64_t value, uint32_t p) {
    const uint64_t low = (value & 0xFFFFFFFFu) << (p & 31u), high = (value >> 32) << (p & 31u);
    uint64_t *limb = norm->digit + (p >> 5);
    limb[0] += low & 0xFFFFFFFFu;
    limb[1] += (low >> 32) + (high & 0xFFFFFFFFu);
    limb[2] += high >> 32;
}

/* Propagates carries: all limbs but the last become less than 2^32, and equal sums have equal limbs. */
KOPT_SCALARS_ KOPT_HOST_DEVICE_ void kopt_norm_carry_(kopt_norm *norm) {
    int i;
    for (i = 0; i < 19; i++) {
        norm->digit[i + 1] += norm->digit[i] >> 32;
        norm->digit[i] &= 0xFFFFFFFFu;
    }
}

/* Adds the squares of n values and counts those that are not finite. Carries are due after at most 2^30 values. */
static KOPT_NOINLINE_ KOPT_UNUSED_ KOPT_HOST_DEVICE_ void kopt_norm_add_values_(kopt_norm *norm, const kopt_byte_ *p,
                                                                                kopt_format format, size_t n) {
    const size_t size = kopt_bytes_of_(format);
    for (; n > 0; n--, p += size) {
        const uint32_t u = format == KOPT_F32    ? kopt_load32_(p)
                           : format == KOPT_BF16 ? kopt_load16_(p) << 16
                                                 : kopt_as_u32_(kopt_f32_from_fp16((kopt_fp16)kopt_load16_(p)));
        const uint32_t exponent = u >> 23 & 0xFFu; /* |x| = significand * 2^(max(exponent, 1) - 150) */
        const uint64_t significand = (u & 0x007FFFFFu) | (exponent == 0 ? 0 : 0x00800000u);
        if (exponent == 255)
            norm->nonfinite++;
        else
            kopt_norm_accumulate_(norm, significand * significand, exponent == 0 ? 0 : 2 * exponent - 2);
    }
}

/* The square root, rounded to nearest even from 54 bits and the remainder; infinity if a value was not finite. */
static KOPT_HOST_DEVICE_ double kopt_norm_root_(const kopt_norm *norm) {
    uint64_t remainder, root = 0;
    int pairs, pair, i;
    kopt_norm n = *norm;
    kopt_norm_carry_(&n);
    if (n.nonfinite != 0) return kopt_bits_to_f64_((uint64_t)0x7FF << 52);
    for (i = 19; n.digit[i] == 0; i--)
        if (i == 0) return kopt_bits_to_f64_(0);
    pairs = 16 * i; /* the number of bit pairs of the sum */
    for (remainder = n.digit[i]; remainder != 0; remainder >>= 2) pairs++;
    for (pair = pairs - 1; pair >= pairs - 54; pair--) {
        const int limb = pair >= 320 ? 19 : pair >> 4;
        const uint64_t trial = root << 2 | 1u;
        remainder = remainder << 2 | (pair < 0 ? 0 : n.digit[limb] >> (2 * (pair - 16 * limb)) & 3u);
        root = root << 1 | (remainder >= trial);
        if ((root & 1u) != 0) remainder -= trial;
    }
    for (; pair >= 0 && remainder == 0; pair--) remainder = n.digit[pair >> 4] >> (2 * (pair & 15)) & 3u;
    /* 53 bits, in units of 2^(pairs - 53 - 149) */
    root = (root >> 1) + ((root & 1u) != 0 && (remainder != 0 || (root & 2u) != 0));
    return kopt_bits_to_f64_(((uint64_t)(pairs + 872) << 52) + root);
}

#ifdef KAHAN_OPT_VMATH
typedef enum kopt_vmath_kind_ {
    KOPT_VMATH_EXP_,
    KOPT_VMATH_LOG_,
    KOPT_VMATH_TANH_,
    KOPT_VMATH_ERF_,
    KOPT_VMATH_ERFC_,
    KOPT_VMATH_ATAN2_,
    KOPT_VMATH_SINCOSPI_,
    KOPT_VMATH_MAP_,
    KOPT_VMATH_MAP_BACKWARD_, /* in2 * f(in): f is the slope */
    KOPT_VMATH_NORMAL_,       /* a + b * a standard normal random number */
    KOPT_VMATH_UNIFORM_       /* a + b * a random number in (-1, 1) */
} kopt_vmath_kind_;

/* The functions behind those of kopt_function: slopes. That of KOPT_FN_SOFTPLUS is KOPT_FN_SIGMOID. */
enum {
    KOPT_TANH_SLOPE_ = 8,      /* 1 - tanh(x)^2                       */
    KOPT_SIGMOID_SLOPE_ = 9,   /* s(x) s(-x)                          */
    KOPT_SILU_SLOPE_ = 10,     /* s(x) + x s(x) s(-x)                 */
    KOPT_GELU_SLOPE_ = 11,     /* P(x) + x P'(x)                      */
    KOPT_GELU_TANH_SLOPE_ = 12 /* s(g(x)) + x s(g(x)) s(-g(x)) g'(x)  */
};

/* One call of the kernel of vector mathematics. Each kind reads some of the fields. */
typedef struct kopt_vmath_job_ {
    kopt_vmath_kind_ kind;
    int f; /* a kopt_function, or a slope */
    kopt_format format;
    size_t n;
    const kopt_byte_ *in, *in2;
    kopt_byte_ *out, *out2;
    float a, b;
    kopt_random_key key;
} kopt_vmath_job_;

/* Inputs that the polynomials do not round correctly, by function, format (bf16, fp16) and input: `input << 16 |
   output`. `tests/bits/vmath.py exceptions` prints the table. */
/* clang-format off */
static const kopt_byte_ kopt_map_exception_start_[27] = {0, 0, 2, 2, 3, 3, 3, 3, 9, 9, 11, 11, 14, 14, 19, 19, 21, 21,
    27, 27, 33, 34, 48, 48, 54, 54, 57};
static const uint32_t kopt_map_exceptions_[57] = {
    0x1F793C07u, 0x25CF3C17u, 0x1D78C53Bu, 0x1A003801u, 0x1F003803u, 0x21803805u, 0x960037FFu, 0x9B0037FDu, 0x9D8037FBu,
    0x9E0099FCu, 0xC173B15Du, 0x0E550A55u, 0x157C117Du, 0x8E558A55u, 0x157C117Du, 0x35A73337u, 0x957C917Bu, 0xADF1A981u,
    0xB5A7B017u, 0x17BC398Du, 0x8430398Bu, 0x2B383BF9u, 0x35883B1Du, 0x37723A7Du, 0xAB383BF9u, 0xB5883B1Du, 0xB7723A7Du,
    0x2F3833F9u, 0x3988331Du, 0x3B72327Du, 0xAF3833F9u, 0xB988331Du, 0xBB72327Du, 0xBBC03EFFu, 0x16003801u, 0x1B003803u,
    0x1D803805u, 0x1F803807u, 0x920037FFu, 0x970037FDu, 0x998037FBu, 0x9B8037F9u, 0x9CC037F7u, 0x9DC037F5u, 0xBD1D020Fu,
    0xBD5CA291u, 0xBDD2A85Bu, 0xC563A516u, 0x13853801u, 0x8F8537FFu, 0xADA036E1u, 0xB9FB1783u, 0xBD97B01Fu, 0xC4068F8Fu,
    0xBA050091u, 0xBA0F9845u, 0xC34795FDu};
/* clang-format on */
#endif

/* ---- kinds of steps, random numbers and tiles ---- */

/* The stages of a step, as bits. The final one: slow weights, copies, counts, zeroing the gradient. */
enum { KOPT_DIRECTION_STAGE_ = 1, KOPT_COMMIT_STAGE_ = 2, KOPT_FINAL_STAGE_ = 4, KOPT_ALL_STAGES_ = 7 };
#ifndef KOPT_NT_THRESHOLD_
#define KOPT_NT_THRESHOLD_ (((size_t)1) << 25) /* conversions to this many bytes use non-temporal stores */
#endif
#define KOPT_TILE_ 256 /* elements of a tile: whole blocks of 8-bit moments */

/* The kind of a step. Functions overwrite fields with constants, so that the compiler drops the code for others. */
typedef struct kopt_kind_ {
    kopt_rule rule;
    kopt_format weight, grad, first, second; /* first, second: of the moments (see kopt_moment_format_()) */
    kopt_rounding rounding, moment_rounding, residual_rounding;
    int moment_count, nesterov;
    int feedback; /* KOPT_FEEDBACK: rounding is KOPT_STOCHASTIC then */
} kopt_kind_;

KOPT_ALWAYS_INLINE_ kopt_kind_ kopt_kind_of_(const kopt_job_ *j) {
    const kopt_begun_ *s = j->step;
    const int adam = s->rule == KOPT_RULE_RADAM || s->rule == KOPT_RULE_RANGER; /* they differ in scalars only */
    kopt_kind_ kind;
    kind.rule = adam ? KOPT_RULE_ADAM : s->rule;
    kind.weight = j->weight_format;
    kind.grad = j->grad_format;
    kind.first = s->moment_count == 0 ? KOPT_F32 : s->first_moment_format;
    kind.second = s->moment_count == 0 ? KOPT_F32 : s->second_moment_format;
    kind.feedback = s->rounding == KOPT_FEEDBACK && j->weight_format != KOPT_F32;
    kind.rounding = s->rounding == KOPT_FEEDBACK ? KOPT_STOCHASTIC : s->rounding;
    kind.moment_rounding = s->moment_rounding;
    kind.residual_rounding = s->residual_rounding;
    kind.moment_count = s->moment_count;
    kind.nesterov = s->nesterov;
    return kind;
}

/* The format of a moment. Kernels have 8-bit moments (KOPT_Q8) in fp32 buffers, which their caller stores. */
KOPT_INLINE_ kopt_format kopt_moment_format_(kopt_kind_ kind, int moment) {
    return kopt_is_square_(kind.rule, moment) ? kind.second : kind.first;
}

/* The format of its array or buffer in a kernel, and the bytes of an element. */
KOPT_INLINE_ kopt_format kopt_unbuffered_(kopt_format format) { return kopt_has_scales_(format) ? KOPT_F32 : format; }
KOPT_INLINE_ size_t kopt_moment_bytes_(kopt_kind_ kind, int moment) {
    return kopt_bytes_of_(kopt_unbuffered_(kopt_moment_format_(kind, moment)));
}

/* AMSGrad's maximum, which does not accumulate, is always rounded to nearest. */
KOPT_INLINE_ kopt_rounding kopt_moment_rounding_(kopt_kind_ kind, int moment) {
    return moment == 2 && kind.rule == KOPT_RULE_ADAM ? KOPT_NEAREST : kind.moment_rounding;
}

/* Does any store of such a step draw random bits? */
KOPT_INLINE_ int kopt_needs_random_(kopt_kind_ kind) {
    if ((kind.first != KOPT_F32 || kind.second != KOPT_F32) && kind.moment_rounding == KOPT_STOCHASTIC) return 1;
    if (kind.weight == KOPT_F32) return 0;
    if (kind.rounding == KOPT_STOCHASTIC) return 1;
    return (kind.rounding == KOPT_KAHAN || kind.rounding == KOPT_COMPACT) && kind.residual_rounding == KOPT_STOCHASTIC;
}

/* Has a step 8-bit moments? Then it goes by whole blocks. */
static KOPT_UNUSED_ int kopt_has_blocks_(const kopt_begun_ *s) {
    return s->moment_count > 0 &&
           (kopt_has_scales_(s->first_moment_format) || kopt_has_scales_(s->second_moment_format));
}

/* Section 7 defines group, span, own, other and row. A block of Philox4x32-7 (Salmon et al. 2011) has 8 halves, for 8
   elements in each group of a span. Number k of an element (0: weight, 1 to 4: moments) is own + (8 * row + k) * stride
   modulo 2^16, with stride = 2 * other. r packs number 0 (low half) and stride (high half). */
#define KOPT_RANDOM_GROUP_ 128 /* elements; all 16 groups of a span use the same 16 Philox blocks */
enum { KOPT_RANDOM_SPAN_ = 2048, KOPT_RANDOM_STORES_ = 8 /* numbers of a row, of which 5 are used */ };

/* The Philox block of the element with this global index: b of section 7. */
KOPT_ALWAYS_INLINE_ uint64_t kopt_philox_block_(uint64_t index) { return (index >> 11 << 4) | (index >> 3 & 15); }

/* 8 * row of the element with this global index. */
KOPT_ALWAYS_INLINE_ uint32_t kopt_random_multiplier_(uint64_t index) {
    return (uint32_t)(index >> 7 & 15) * KOPT_RANDOM_STORES_;
}

/* r of an element. halves: its word, with its own half as the lower one. */
KOPT_ALWAYS_INLINE_ uint32_t kopt_random_combine_(uint32_t halves, uint64_t index) {
    const uint32_t stride = halves >> 16 << 1;
    return stride << 16 | ((halves + stride * kopt_random_multiplier_(index)) & 0xFFFFu);
}

/* The key of a seed, and the words of the counter that all elements of a tensor share. */
typedef struct kopt_philox_key_ {
    uint32_t key[2], stream, step, id;
} kopt_philox_key_;

KOPT_ALWAYS_INLINE_ kopt_philox_key_ kopt_make_philox_key_(uint64_t seed, uint32_t step, uint32_t id, uint32_t stream) {
    const kopt_philox_key_ c = {{(uint32_t)(seed & 0xFFFFFFFFu), (uint32_t)(seed >> 32)}, stream << 28, step, id};
    return c;
}

#ifdef KOPT_VECTOR_CODE_
/* Bytes: more than a core's L2, and more than its share of L3. */
enum { KOPT_CORE_CACHE_ = 1 << 21, KOPT_SHARED_CACHE_ = 1 << 25 };

/* Does a step of n elements prefetch? If its arrays exceed `enough` bytes, and take longer than its arithmetic. */
static KOPT_FORCE_INLINE_ int kopt_prefetches_(kopt_kind_ kind, size_t n, size_t enough) {
    const size_t bytes = kopt_bytes_of_(kind.weight) + kopt_bytes_of_residual_(kind.weight, kind.rounding) +
                         kopt_bytes_of_(kind.grad) + (unsigned)kind.moment_count * kopt_bytes_of_(kind.first);
    if (n <= enough / bytes) return 0;
    return kind.moment_count == 0 ||
           (kind.weight == KOPT_F32 && kopt_unbuffered_(kind.first) == KOPT_F32 && kind.moment_count < 3);
}

#define KOPT_BYTES_(p) ((kopt_byte_ *)(p))

/* Random numbers of a tile, which touches up to 3 groups: 16 bits per element, in memory order. */
typedef struct kopt_random_tile_ {
    KOPT_ALIGN64_ uint32_t words[KOPT_RANDOM_GROUP_ / 2]; /* of the span */
    uint32_t lower[3 * KOPT_RANDOM_GROUP_ / 2];           /* number 0 */
    uint32_t upper[3 * KOPT_RANDOM_GROUP_ / 2];           /* stride */
    const kopt_byte_ *number, *stride;                    /* those of the first element of the tile */
} kopt_random_tile_;

typedef struct kopt_job_array_ {
    kopt_byte_ **at, *original; /* the job's pointer to the array; where that was before it pointed to a copy */
    unsigned bytes;             /* of an element */
    int written;                /* by the step */
} kopt_job_array_;
enum { KOPT_JOB_ARRAYS_ = 8 /* weight, residual, gradient, copy; four moments, or two and slow weights */ };
enum { KOPT_LARGEST_PAIR_ = 32 /* elements of a pair of vectors of AVX-512 */ };

/* Consecutive elements, stepped stage by stage in whole pairs of vectors: all arrays have room for the last pair. */
typedef struct kopt_tile_ {
    KOPT_ALIGN64_ float x[KOPT_TILE_];             /* what the rule returns, then the direction */
    float w[KOPT_TILE_], compensation[KOPT_TILE_]; /* weights in fp32 and KAHAN's compensations, if is_loaded */
    kopt_random_tile_ random;
    kopt_job_ job; /* of elements 0 to job.end - 1 */
    kopt_job_array_ arrays[KOPT_JOB_ARRAYS_], *arrays_end;
    kopt_kind_ kind;
    int is_loaded, prefetches, finds_scales;
    kopt_byte_ *scale[4]; /* if finds_scales: of the 8-bit moments, whose buffers job.moment has; else NULL */
    size_t apart;         /* 0, or the elements of a pair: its even elements stand before the odd ones */
    void (*direction)(struct kopt_tile_ *), (*commit)(struct kopt_tile_ *);
} kopt_tile_;

/* Limits the n values of one block. */
static KOPT_NOINLINE_ KOPT_UNUSED_ void kopt_saturate_(float *x, size_t n) {
    size_t i;
    for (i = 0; i < n; i++) {
        const uint32_t u = kopt_as_u32_(x[i]), mag = u & 0x7FFFFFFFu;
        if (mag > KOPT_LARGEST_Q8_) x[i] = kopt_as_f32_(KOPT_LARGEST_Q8_ | (u ^ mag));
    }
}

/* What the loop over tiles calls of an instruction set. */
typedef void kopt_stage_(kopt_tile_ *);
typedef struct kopt_stages_ {
    size_t pair;  /* elements of a pair of vectors */
    int even_odd; /* with bf16 weights, x, w and compensation have the even elements of each pair first */
    void (*fill_random)(kopt_random_tile_ *, const kopt_philox_key_ *, uint64_t, size_t, int, int);
    void (*decode)(float *, const kopt_byte_ *, const kopt_byte_ *, int, size_t);
    void (*find_scales)(kopt_byte_ *, float *, int, size_t);
    void (*encode)(kopt_byte_ *, const kopt_byte_ *, float *, int, int, kopt_rounding, const kopt_random_tile_ *,
                   size_t);
    void (*load_weights)(kopt_byte_ *, kopt_byte_ *, const kopt_kind_ *, size_t, float *, float *);
    int (*find)(const kopt_kind_ *, kopt_stage_ **, kopt_stage_ **);
    void (*update)(kopt_tile_ *);
    void (*convert)(const kopt_conversion_ *);
    const struct kopt_stages_ *other; /* for kinds that find() does not know */
} kopt_stages_;

/* A copy of the last elements of an array, fewer than a pair of vectors, padded with zeros. */
typedef kopt_byte_ kopt_tail_[4 * KOPT_LARGEST_PAIR_];

typedef size_t kopt_loop_(const kopt_job_ *j, size_t begin);
static void kopt_loop_over_tail_(kopt_loop_ *loop, const kopt_job_ *j, size_t begin, size_t pair);
static void kopt_walk_tiles_(const kopt_stages_ *stages, const kopt_job_ *j, size_t begin, size_t end);
static void kopt_stage_in_scalar_(kopt_tile_ *t, int stage, size_t i, size_t pair);
#endif

/* Scalar code, which vector code calls for short ranges and special values. */
static void kopt_walk_scalar_(const kopt_job_ *j, size_t begin, size_t end);
static void kopt_run_blocks_(const kopt_job_ *whole);
static KOPT_UNUSED_ void kopt_step_elements_scalar_(const kopt_job_ *j, size_t i, size_t n, int stages, kopt_byte_ *x,
                                                    size_t pair);
static void kopt_measure_scalar_(const kopt_job_ *j, size_t begin, kopt_byte_ *out);
static void kopt_convert_general_scalar_(const kopt_conversion_ *c, size_t begin, size_t end);

/* ---- FLOATING-POINT ENVIRONMENT ---------------------------------------------------------------------------------- */

/* kopt_enter_() saves the caller's floating-point environment and sets the IEEE default: round to nearest even, gradual
   underflow, no traps. kopt_leave_() restores it. Exception flags raised in between stay raised where that costs
   nothing. Both keep loads and stores of the caller between them, as compilers analyse functions not inlined. */
typedef struct kopt_environment_ {
    uint32_t control; /* MXCSR, FPCR, FPSCR, ... */
    uint16_t x87;
    double power; /* PowerPC's FPSCR */
} kopt_environment_;

#if (defined(KOPT_GNU_) || defined(__TINYC__)) && (defined(KOPT_X86_64_) || defined(__i386__))
#if defined(__SSE__) || (defined(__TINYC__) && defined(KOPT_X86_64_))
#define KOPT_USES_MXCSR_() 1
#elif defined(KOPT_X86_)
#define KOPT_USES_MXCSR_() (kopt_isa_current() != KOPT_ISA_SCALAR)
#else
#define KOPT_USES_MXCSR_() 0
#endif
/* __FLT_EVAL_METHOD__ is not 0 with -mfpmath=both, which adds x87's registers to those of SSE. */
#if defined(__i386__) || !defined(__SSE2_MATH__) || (defined(__FLT_EVAL_METHOD__) && __FLT_EVAL_METHOD__ != 0)
#define KOPT_USES_X87_() 1
#else
#define KOPT_USES_X87_() 0
#endif
#ifdef __TINYC__ /* its assembler does not know these instructions */
#define KOPT_STMXCSR_(x) __asm__ __volatile__(".byte 0x0F, 0xAE, 0x18" : : "a"(&(x)) : "memory")
#define KOPT_LDMXCSR_(x) __asm__ __volatile__(".byte 0x0F, 0xAE, 0x10" : : "a"(&(x)) : "memory")
#else
#define KOPT_STMXCSR_(x) __asm__ __volatile__("stmxcsr %0" : "=m"(x))
#define KOPT_LDMXCSR_(x) __asm__ __volatile__("ldmxcsr %0" : : "m"(x))
#endif
#endif

/* Other machines: the type of their control register, how to read and to write it, and the bits that a call keeps. */
#if defined(KOPT_GNU_) && defined(KOPT_AARCH64_)
#define KOPT_CONTROL_(X) X(uint64_t, "mrs %0, fpcr", "msr fpcr, %0", 0)
#elif defined(KOPT_GNU_) && defined(__ARM_FP) && defined(__ARM_ARCH_PROFILE) && __ARM_ARCH_PROFILE == 'M'
/* Condition and exception flags, and LTPSIZE, without which low-overhead loops of a Cortex-M55 fault. */
#define KOPT_CONTROL_(X) X(uint32_t, "vmrs %0, fpscr", "vmsr fpscr, %0", 0xF807009Fu)
#elif defined(KOPT_GNU_) && defined(__arm__) && defined(__ARM_FP) /* condition and exception flags */
#define KOPT_CONTROL_(X) X(uint32_t, "vmrs %0, fpscr", "vmsr fpscr, %0", 0xF800009Fu)
#elif defined(KOPT_GNU_) && defined(__riscv_flen)
#define KOPT_CONTROL_(X) X(uint32_t, "frrm %0", "fsrm %0", 0)
#elif defined(KOPT_GNU_) && defined(__s390x__)
#define KOPT_CONTROL_(X) X(uint32_t, "efpc %0", "sfpc %0", 0x07FFFFF8u)
#elif defined(KOPT_GNU_) && defined(__mips_hard_float)
#define KOPT_CONTROL_(X) X(uint32_t, "cfc1 %0, $31", "ctc1 %0, $31", 0xFEFFF07Cu)
#elif defined(KOPT_GNU_) && defined(__loongarch_hard_float)
#define KOPT_CONTROL_(X) X(uint32_t, "movfcsr2gr %0, $fcsr0", "movgr2fcsr $fcsr0, %0", 0xFFFFFCE0u)
#endif
#define KOPT_ENTER_(type, get, set, kept)                       \
    type old;                                                   \
    __asm__ __volatile__(get "" : "=r"(old));                   \
    __asm__ __volatile__(set "" : : "r"((type)(old & (kept)))); \
    e->control = (uint32_t)old;
#define KOPT_LEAVE_(type, get, set, kept) __asm__ __volatile__(set "" : : "r"((type)e->control));

static KOPT_NOINLINE_ void kopt_enter_(kopt_environment_ *e) {
#if defined(KOPT_INTRINSIC_MXCSR_)
    e->control = _mm_getcsr();
    _mm_setcsr(0x1F80u);
#elif defined(KOPT_INTRINSIC_FPCR_)
    e->control = (uint32_t)_ReadStatusReg(KOPT_INTRINSIC_FPCR_);
    _WriteStatusReg(KOPT_INTRINSIC_FPCR_, 0);
#elif defined(KOPT_USES_X87_)
    const uint32_t sse = 0x1F80u;
    const uint16_t x87 = 0x027Fu; /* 53-bit precision: an operation on doubles rounds only once */
    if (KOPT_USES_MXCSR_()) {
        KOPT_STMXCSR_(e->control);
        KOPT_LDMXCSR_(sse);
    }
    if (KOPT_USES_X87_()) {
        __asm__ __volatile__("fnstcw %0" : "=m"(e->x87));
        __asm__ __volatile__("fldcw %0" : : "m"(x87));
    }
#elif defined(KOPT_CONTROL_)
    KOPT_CONTROL_(KOPT_ENTER_)
#elif defined(KOPT_GNU_) && defined(__powerpc__) && !defined(_SOFT_FLOAT)
    __asm__ __volatile__("mffs %0\n\tmtfsfi 6, 0\n\tmtfsfi 7, 0" : "=d"(e->power));
#else
    (void)e;
#endif
#ifdef KOPT_GNU_
    __asm__ __volatile__("" : : : "memory");
#endif
}

static KOPT_NOINLINE_ void kopt_leave_(const kopt_environment_ *e) {
#ifdef KOPT_GNU_
    __asm__ __volatile__("" : : : "memory");
#endif
#if defined(KOPT_INTRINSIC_MXCSR_)
    _mm_setcsr(e->control);
#elif defined(KOPT_INTRINSIC_FPCR_)
    _WriteStatusReg(KOPT_INTRINSIC_FPCR_, e->control);
#elif defined(KOPT_USES_X87_)
    if (KOPT_USES_MXCSR_()) KOPT_LDMXCSR_(e->control);
    if (KOPT_USES_X87_()) __asm__ __volatile__("fldcw %0" : : "m"(e->x87));
#elif defined(KOPT_CONTROL_)
    KOPT_CONTROL_(KOPT_LEAVE_)
#elif defined(KOPT_GNU_) && defined(__powerpc__) && !defined(_SOFT_FLOAT)
    __asm__ __volatile__("mtfsf 3, %0" : : "d"(e->power)); /* only the fields of the traps and of the rounding mode */
#else
    (void)e;
#endif
}

/* ---- A STEP BEGUN ------------------------------------------------------------------------------------------------ */

/* ---- constructors ---- */

/* made_ of a struct that a constructor made: "MA", and the version, as far as it counts. Others are refused: of another
   version by KOPT_ERROR_VERSION, all else by KOPT_ERROR_UNINITIALIZED. */
#define KOPT_FOREIGN_ 0x4D410000u
#define KOPT_MADE_ (KOPT_FOREIGN_ + (KOPT_VERSION < 10000 ? KOPT_VERSION : KOPT_VERSION / 10000))
/* The same of a kopt_step: "STEP", and the version, of which every digit counts. */
#define KOPT_BEGUN_ (((uint64_t)0x53544550 << 32) + KOPT_VERSION)

/* The constructors: the rule of each, and its defaults. Decays and betas are in thousandths, because no flag of a
   compiler changes an integer. */
static const struct kopt_rule_row_ {
    kopt_byte_ constructor, rule, decay_mode;
    uint32_t weight_decay, beta1, beta2, inverse_eps;
} kopt_rules_[] = {{KOPT_RULE_SGD, KOPT_RULE_SGD, KOPT_DECAY_L2, 0, 900, 999, 100000000},
                   {KOPT_RULE_ADAM, KOPT_RULE_ADAM, KOPT_DECAY_L2, 0, 900, 999, 100000000},
                   {KOPT_RULE_ADAMW, KOPT_RULE_ADAM, KOPT_DECAY_DECOUPLED, 10, 900, 999, 100000000},
                   {KOPT_RULE_STABLE_ADAMW, KOPT_RULE_ADAM, KOPT_DECAY_DECOUPLED, 10, 900, 990, 1000000},
                   {KOPT_RULE_LION, KOPT_RULE_LION, KOPT_DECAY_DECOUPLED, 0, 900, 990, 100000000},
                   {KOPT_RULE_SMOOTH_LION, KOPT_RULE_LION, KOPT_DECAY_DECOUPLED, 0, 900, 990, 100000000},
                   {KOPT_RULE_ADAN, KOPT_RULE_ADAN, KOPT_DECAY_DECOUPLED, 20, 980, 920, 1000000},
                   {KOPT_RULE_RADAM, KOPT_RULE_RADAM, KOPT_DECAY_L2, 0, 900, 999, 100000000},
                   {KOPT_RULE_RANGER, KOPT_RULE_RANGER, KOPT_DECAY_DECOUPLED, 0, 900, 990, 1000000},
                   {KOPT_RULE_EMA, KOPT_RULE_EMA, KOPT_DECAY_L2, 0, 900, 999, 100000000},
                   {KOPT_RULE_ADAM_ATAN2, KOPT_RULE_ADAM_ATAN2, KOPT_DECAY_DECOUPLED, 0, 900, 990, 100000000}};

static double kopt_thousandths_(uint32_t n) { return kopt_div64_((double)n, 1000); }

/* Sets the fields of an optimizer of zeros. Returns 0 if there is no such constructor. */
static KOPT_NOINLINE_ int kopt_set_defaults_(kopt_optimizer *opt, kopt_rule constructor, double lr) {
    const struct kopt_rule_row_ *row = kopt_rules_, *end = row + sizeof kopt_rules_ / sizeof *kopt_rules_;
    kopt_environment_ environment;
    while (row->constructor != (unsigned)constructor)
        if (++row == end) return 0;
    kopt_enter_(&environment);
    opt->made_ = KOPT_MADE_;
    opt->rule = (kopt_rule)row->rule;
    opt->rounding = KOPT_KAHAN;
    opt->first_moment_format = opt->second_moment_format = KOPT_BF16;
    opt->moment_rounding = opt->residual_rounding = KOPT_STOCHASTIC;
    opt->decay_mode = (kopt_decay_mode)row->decay_mode;
    opt->lr = opt->max_lr = constructor == KOPT_RULE_EMA ? 1 : lr;
    opt->weight_decay = kopt_thousandths_(row->weight_decay);
    opt->lookahead = 6;
    opt->lookahead_rate = 0.5;
    opt->stable = constructor == KOPT_RULE_STABLE_ADAMW;
    opt->beta1 = constructor == KOPT_RULE_EMA ? lr : kopt_thousandths_(row->beta1);
    opt->beta2 = kopt_thousandths_(row->beta2);
    opt->beta3 = kopt_thousandths_(990);
    opt->eps = kopt_div64_(1, (double)row->inverse_eps);
    opt->grad_scale = opt->clip = opt->atan2_b = 1;
    opt->atan2_a = kopt_thousandths_(1270);
    kopt_leave_(&environment);
    return 1;
}

KOPT_API_ kopt_result kopt_optimizer_init(kopt_optimizer *opt, kopt_rule rule, double lr, int version, size_t opt_size,
                                          size_t tensor_size) {
    const int needs_vmath = rule == KOPT_RULE_ADAM_ATAN2 || rule == KOPT_RULE_SMOOTH_LION;
    const int same_version = KOPT_VERSION < 10000 ? version == KOPT_VERSION : version / 10000 == KOPT_VERSION / 10000;
    const uint32_t foreign = KOPT_FOREIGN_;
    if (opt == NULL) return KOPT_ERROR_NULL;
    memset(opt, 0, opt_size); /* the caller's size: never beyond its struct */
    if (!same_version || opt_size != sizeof *opt || tensor_size != sizeof(kopt_tensor)) {
        if (opt_size >= sizeof foreign) memcpy(opt, &foreign, sizeof foreign);
        return KOPT_ERROR_VERSION;
    }
    if (needs_vmath && !KOPT_HAS_VMATH_) return KOPT_ERROR_OPTION;
    return kopt_set_defaults_(opt, rule, lr) ? KOPT_OK : KOPT_ERROR_OPTION;
}

KOPT_API_ kopt_result kopt_list_set_ids(kopt_tensor *tensors, size_t count, uint32_t first_id) {
    size_t i;
    if (tensors == NULL && count != 0) return KOPT_ERROR_NULL;
    if (count != 0 && count - 1 > 0xFFFFFFFFu - first_id) return KOPT_ERROR_BOUNDS;
    for (i = 0; i < count; i++) tensors[i].id = first_id + (uint32_t)i;
    return KOPT_OK;
}

/* ---- checks of an optimizer ---- */

static int kopt_format_valid_(kopt_format f) { return (unsigned)f <= (unsigned)KOPT_FP16; }

/* The number of moments of the optimizer, 0 to 4. */
static KOPT_UNUSED_ KOPT_HOST_DEVICE_ int kopt_moments_(const kopt_optimizer *opt) {
    switch ((int)(opt->rule)) {
    case KOPT_RULE_SGD: return kopt_less64_(0, opt->momentum);
    case KOPT_RULE_ADAM: return opt->amsgrad ? 3 : 2;
    case KOPT_RULE_LION: return 1;
    case KOPT_RULE_ADAN: return 4;
    case KOPT_RULE_EMA: return 0;
    default: return 2;
    }
}

/* KOPT_FEEDBACK needs a first moment that pays debts back without bias. Those of fp16 can be too large for it. */
static int kopt_feedback_fits_(kopt_rule rule, int moment_count, kopt_format first, kopt_rounding moment_rounding,
                               double decay) {
    const unsigned rules = 1u << KOPT_RULE_SGD | 1u << KOPT_RULE_ADAM | 1u << KOPT_RULE_RADAM | 1u << KOPT_RULE_ADAN;
    return (rules >> rule & 1u) != 0 && moment_count > 0 && kopt_between_(decay, 0, KOPT_0_999_) &&
           !kopt_is_zero_(decay) && first != KOPT_FP16 && (first == KOPT_F32 || moment_rounding == KOPT_STOCHASTIC);
}

/* Refuses what does not hold, with words for a human. What uses it is inlined, so that a program without
   kopt_explain() has no words. */
#define MUST_(condition, error, why) \
    if (!(condition)) return *words = (why), KOPT_ERROR_##error

/* Refuses an optimizer that no constructor made, or with a field out of range or that does not apply. *words: why. */
static KOPT_FORCE_INLINE_ kopt_result kopt_judge_options_(const kopt_optimizer *opt, const char **words) {
    const double smallest = 1.1754943508222875e-38, largest = KOPT_3E38_; /* 2^-126; finite floats */
    MUST_(opt != NULL, NULL, "the optimizer is NULL");
    MUST_(opt->made_ == KOPT_MADE_ || opt->made_ >> 16 != KOPT_MADE_ >> 16, VERSION,
          kopt_result_string(KOPT_ERROR_VERSION));
    MUST_(opt->made_ == KOPT_MADE_, UNINITIALIZED, kopt_result_string(KOPT_ERROR_UNINITIALIZED));
    MUST_((opt->reserved_[0] | opt->reserved_[1] | opt->reserved_[2] | opt->reserved_[3] | opt->reserved_[4] |
           opt->reserved_[5] | opt->reserved_[6] | opt->reserved32_) == 0,
          OPTION, "reserved_: a field of a later version, which this implementation does not know");
    MUST_((unsigned)opt->rule <= KOPT_LAST_RULE_, OPTION, "rule: it does not exist");
    MUST_(opt->rule != KOPT_RULE_ADAM_ATAN2 || KOPT_HAS_VMATH_, OPTION, "rule: Adam-atan2 needs KAHAN_OPT_VMATH");
    MUST_((unsigned)opt->rounding <= KOPT_LAST_ROUNDING_, OPTION, "rounding: it does not exist");
    MUST_((unsigned)opt->first_moment_format <= (unsigned)KOPT_Q8 &&
              (unsigned)opt->second_moment_format <= (unsigned)KOPT_Q8,
          OPTION, "first_moment_format or second_moment_format: each KOPT_F32, KOPT_BF16, KOPT_FP16 or KOPT_Q8");
    MUST_(((unsigned)opt->moment_rounding | (unsigned)opt->residual_rounding) <= 1u, OPTION,
          "moment_rounding or residual_rounding: each KOPT_STOCHASTIC or KOPT_NEAREST");
    MUST_((unsigned)opt->decay_mode <= (unsigned)KOPT_DECAY_FULLY_DECOUPLED, OPTION,
          "decay_mode: KOPT_DECAY_L2, KOPT_DECAY_DECOUPLED or KOPT_DECAY_FULLY_DECOUPLED");
    MUST_(kopt_between_(opt->lr, 0, largest), RANGE, "lr: finite, >= 0");
    MUST_(opt->decay_mode != KOPT_DECAY_FULLY_DECOUPLED ||
              (kopt_between_(opt->max_lr, 0, largest) && !kopt_is_zero_(opt->max_lr)),
          RANGE, "max_lr: KOPT_DECAY_FULLY_DECOUPLED needs a finite number above 0");
    MUST_(kopt_between_(opt->weight_decay, 0, largest), RANGE, "weight_decay: finite, >= 0");
    MUST_(kopt_magnitude_at_most_(opt->grad_scale, largest) && kopt_magnitude_at_most_(opt->clip, largest), RANGE,
          "grad_scale or clip: finite");
    MUST_(opt->rule != KOPT_RULE_EMA ||
              (kopt_is_zero_(opt->weight_decay) && !opt->moments_only && !opt->zero_grad && !opt->maximize),
          OPTION, "weight_decay, moments_only, zero_grad or maximize: kopt_ema() needs 0");
    MUST_(opt->rule != KOPT_RULE_EMA || kopt_between_(opt->beta1, 0, 1), RANGE, "beta1, the decay: in [0, 1]");
    MUST_(opt->rule == KOPT_RULE_SGD || opt->rule == KOPT_RULE_EMA ||
              (kopt_between_(opt->beta1, 0, KOPT_BELOW_1_) && kopt_between_(opt->beta2, 0, KOPT_BELOW_1_)),
          RANGE, "beta1 or beta2: each in [0, 1)");
    MUST_(opt->rule != KOPT_RULE_ADAN || kopt_between_(opt->beta3, 0, KOPT_BELOW_1_), RANGE, "beta3: in [0, 1)");
    MUST_((1u << opt->rule &
           (1u << KOPT_RULE_SGD | 1u << KOPT_RULE_LION | 1u << KOPT_RULE_EMA | 1u << KOPT_RULE_ADAM_ATAN2)) != 0 ||
              kopt_between_(opt->eps, smallest, largest),
          RANGE, "eps: at least 2^-126, finite");
    MUST_(opt->rule != KOPT_RULE_SGD ||
              (kopt_between_(opt->momentum, 0, largest) && kopt_magnitude_at_most_(opt->dampening, largest)),
          RANGE, "momentum or dampening: finite, momentum >= 0");
    MUST_(opt->rule != KOPT_RULE_SGD || !opt->nesterov ||
              (!kopt_is_zero_(opt->momentum) && kopt_is_zero_(opt->dampening)),
          OPTION, "nesterov: it needs momentum > 0 and dampening 0");
    MUST_(opt->rule != KOPT_RULE_RANGER || (opt->lookahead >= 1 && kopt_between_(opt->lookahead_rate, 0, 1)), RANGE,
          "lookahead or lookahead_rate: lookahead >= 1, lookahead_rate in [0, 1]");
    MUST_(opt->rule != KOPT_RULE_ADAM_ATAN2 ||
              (kopt_between_(opt->atan2_a, 0, largest) && kopt_between_(opt->atan2_b, smallest, largest)),
          RANGE, "atan2_a or atan2_b: a finite and >= 0, b at least 2^-126 and finite");
    MUST_(opt->rule != KOPT_RULE_ADAM_ATAN2 || (!opt->amsgrad && !opt->stable), OPTION,
          "amsgrad or stable: Adam-atan2 needs 0");
    MUST_(opt->rule != KOPT_RULE_LION || KOPT_HAS_VMATH_ || kopt_is_zero_(opt->sharpness), OPTION,
          "sharpness: smooth Lion needs KAHAN_OPT_VMATH");
    MUST_(opt->rule != KOPT_RULE_LION || kopt_between_(opt->sharpness, 0, largest), RANGE, "sharpness: finite, >= 0");
    MUST_(opt->rounding != KOPT_FEEDBACK ||
              kopt_feedback_fits_(opt->rule, kopt_moments_(opt), opt->first_moment_format, opt->moment_rounding,
                                  opt->rule == KOPT_RULE_SGD ? opt->momentum : opt->beta1),
          OPTION,
          "rounding: KOPT_FEEDBACK is for Adam, RAdam, Adan and SGD with momentum; beta1 or momentum above 0 "
          "and at most 0.999; first moments in fp32, or with moment_rounding KOPT_STOCHASTIC in bf16 or 8 bits");
    return KOPT_OK;
}

static kopt_result kopt_check_options_(const kopt_optimizer *opt) {
    const char *words;
    return kopt_judge_options_(opt, &words);
}

/* ---- scalars of a step ---- */

/* RAdam's rectification term, in (0, 1), or 0 while the length of the approximated moving average is at most 5.
   Computed in binary64, because that length is a small difference of numbers near 2 / (1 - beta). */
static KOPT_HOST_DEVICE_ float kopt_rectifier_(double beta, uint32_t step) {
    const double one = 1, two = 2, four = 4;
    const double longest = kopt_sub64_(kopt_div64_(two, kopt_sub64_(one, beta)), one);
    double power = one, square = beta, length, numerator, denominator;
    uint32_t bits = step;
    for (; bits != 0; bits >>= 1) { /* beta^step */
        if ((bits & 1u) != 0) power = kopt_mul64_(power, square);
        square = kopt_mul64_(square, square);
    }
    length = kopt_div64_(kopt_mul64_(kopt_mul64_(two, (double)step), power), kopt_sub64_(one, power));
    length = kopt_sub64_(longest, length);
    if (!kopt_less64_(5, length)) return 0;
    numerator = kopt_mul64_(kopt_sub64_(length, four), kopt_sub64_(length, two));
    denominator = kopt_mul64_(kopt_sub64_(longest, four), kopt_sub64_(longest, two));
    return kopt_to_float_(kopt_sqrt64_(kopt_div64_(kopt_mul64_(numerator, longest), kopt_mul64_(denominator, length))));
}

static KOPT_UNUSED_ KOPT_HOST_DEVICE_ void kopt_copy_options_(const kopt_optimizer *opt, kopt_begun_ *s) {
    s->rule = opt->rule;
    s->rounding = opt->rounding;
    s->moment_rounding = opt->moment_rounding;
    s->residual_rounding = opt->residual_rounding;
    s->moment_count = kopt_moments_(opt);
    s->first_moment_format = opt->first_moment_format;
    s->second_moment_format = s->moment_count < 2 ? opt->first_moment_format : opt->second_moment_format;
    s->nesterov = opt->rule == KOPT_RULE_SGD && opt->nesterov;
    s->zero_grad = opt->zero_grad;
    s->moments_only = opt->moments_only;
    s->unrectified = s->sync = 0;
    s->stable = opt->rule == KOPT_RULE_ADAM && opt->stable;
    s->seed = opt->seed;
    s->feedback = s->slow_scale = 0;
}

/* 1 - x in binary64, rounded to fp32. For betas there is kopt_one_minus_beta_(). */
static KOPT_UNUSED_ KOPT_HOST_DEVICE_ float kopt_one_minus_(double x) { return kopt_to_float_(kopt_sub64_(1, x)); }

static KOPT_HOST_DEVICE_ int kopt_finite_(float x) { return (kopt_as_u32_(x) & 0x7F800000u) != 0x7F800000u; }

/* Computes the scalars of step opt->step + 1. Returns 0 if one of them overflows a float: kopt_explain() says which. */
KOPT_SCALARS_ KOPT_HOST_DEVICE_ int kopt_compute_scalars_(const kopt_optimizer *opt, kopt_begun_ *s) {
    const kopt_rule rule = opt->rule;
    const kopt_decay_mode decay_mode = opt->decay_mode;
    const float weight_decay = kopt_to_float_(opt->weight_decay);
    float correction1, correction2; /* 1 - beta1^step; 1 - beta2^step, later 1 - beta3^step for Adan */
    s->step = opt->step + 1;
    s->grad_scale = kopt_mul_(kopt_to_float_(opt->grad_scale), kopt_to_float_(opt->clip));
    if (opt->maximize) s->grad_scale = kopt_as_f32_(kopt_as_u32_(s->grad_scale) ^ 0x80000000u);
    s->l2 = decay_mode == KOPT_DECAY_L2 ? weight_decay : 0;
    s->rate = rule == KOPT_RULE_EMA ? kopt_one_minus_(opt->beta1) : kopt_to_float_(opt->lr);
    s->weight_decay = 0;
    if (decay_mode == KOPT_DECAY_DECOUPLED) s->weight_decay = kopt_mul_(s->rate, weight_decay);
    if (decay_mode == KOPT_DECAY_FULLY_DECOUPLED)
        s->weight_decay = kopt_mul_(kopt_div_(s->rate, kopt_to_float_(opt->max_lr)), weight_decay);
    s->beta3 = s->gain3 = s->third_scale = 0;
    s->extrapolation = kopt_to_float_(opt->momentum);
    s->eps = kopt_to_float_(opt->eps);
    s->sharpness = KOPT_HAS_VMATH_ && rule == KOPT_RULE_LION ? kopt_to_float_(opt->sharpness) : 0;
    s->root_scale = 1;
    if (rule == KOPT_RULE_SGD || rule == KOPT_RULE_EMA) {
        s->beta1 = s->gain1 = s->beta2 = s->gain2 = 0;
        if (rule == KOPT_RULE_SGD) {
            s->beta1 = s->step == 1 ? 0 : s->extrapolation;
            s->gain1 = s->step == 1 ? 1 : kopt_one_minus_(opt->dampening);
        }
    } else {
        kopt_betas_(opt, s, &correction1, &correction2);
        if (rule == KOPT_RULE_ADAN) {
            /* Adan divides the new weight by this. */
            const float shrink = decay_mode == KOPT_DECAY_L2 ? 1 : kopt_add_(1, s->weight_decay);
            s->extrapolation = s->beta2;
            s->third_scale = kopt_div_(kopt_mul_(s->beta2, correction1), correction2);
            s->beta3 = kopt_to_float_(opt->beta3);
            s->gain3 = kopt_one_minus_beta_(kopt_bits64_(opt->beta3));
            correction2 = kopt_correction_(s->gain3, s->step);
            s->undecayed_rate = kopt_div_(s->rate, correction1);
            s->rate = kopt_div_(s->rate, shrink);
            s->weight_decay = kopt_div_(s->weight_decay, shrink);
        }
        if (rule != KOPT_RULE_LION) {
#ifdef KAHAN_OPT_VMATH
            /* Outside of atan2, m's bias correction divides the rate; inside, it multiplies the other argument. */
            if (rule == KOPT_RULE_ADAM_ATAN2) {
                const float a = kopt_to_float_(opt->atan2_a), b = kopt_to_float_(opt->atan2_b);
                s->rate = kopt_mul_(s->rate, a);
                if (opt->atan2_outside) s->rate = kopt_div_(s->rate, correction1);
                s->root_scale = kopt_div_(opt->atan2_outside ? b : kopt_mul_(b, correction1), kopt_sqrt_(correction2));
                s->eps = kopt_as_f32_(0x00800000u); /* 2^-126 */
            } else
#endif
            {
                s->rate = kopt_div_(s->rate, correction1);
                s->root_scale = kopt_div_(1, kopt_sqrt_(correction2));
            }
            if (rule == KOPT_RULE_RADAM || rule == KOPT_RULE_RANGER) {
                const float rectifier = kopt_rectifier_(opt->beta2, s->step);
                s->unrectified = kopt_as_u32_(rectifier) == 0;
                if (!s->unrectified) s->rate = kopt_mul_(s->rate, rectifier);
                if (!s->unrectified && rule == KOPT_RULE_RADAM) { /* eps is added before the bias correction */
                    s->rate = kopt_div_(s->rate, s->root_scale);
                    s->root_scale = 1;
                }
            }
            /* The rounding of the stored roots adds noise, which raises the mean of 1 / root (section 6b). */
            if (opt->second_moment_format == KOPT_Q8 && s->step > 1) s->root_scale = kopt_mul_(s->root_scale, 1.003f);
        }
        if (rule == KOPT_RULE_RANGER) {
            s->sync = s->step % (uint32_t)opt->lookahead == 0;
            s->slow_scale = kopt_one_minus_(opt->lookahead_rate);
        }
    }
    if (rule != KOPT_RULE_ADAN) s->undecayed_rate = s->rate;
    if (opt->rounding == KOPT_FEEDBACK) {
        const int sgd = rule == KOPT_RULE_SGD;
        s->feedback = sgd ? kopt_div_(kopt_one_minus_(opt->momentum), s->extrapolation) : kopt_div_(s->gain1, s->beta1);
        if (sgd && opt->nesterov) s->feedback = kopt_div_(s->feedback, s->extrapolation);
    }
    return kopt_finite_(s->grad_scale) && kopt_finite_(s->undecayed_rate) && kopt_finite_(s->weight_decay) &&
           (!KOPT_HAS_VMATH_ || kopt_finite_(s->root_scale)); /* infinite if atan2_b is too large */
}

/* The next step of valid options, which its caller counts: opt->step = s->step. */
static kopt_result kopt_next_step_(kopt_begun_ *s, const kopt_optimizer *opt) {
    kopt_environment_ environment;
    int finite;
    if (opt->step == 0xFFFFFFFFu) return KOPT_ERROR_STEP;
    s->made = KOPT_BEGUN_;
    kopt_copy_options_(opt, s);
    kopt_enter_(&environment);
    finite = kopt_compute_scalars_(opt, s);
    kopt_leave_(&environment);
    return finite ? KOPT_OK : KOPT_ERROR_RANGE;
}

KOPT_API_ kopt_result kopt_step_begin(kopt_step *step, kopt_optimizer *opt) {
    kopt_begun_ s;
    kopt_result result = step == NULL ? KOPT_ERROR_NULL : kopt_check_options_(opt);
    if (result == KOPT_OK) result = kopt_next_step_(&s, opt);
    if (result != KOPT_OK) return result;
    memcpy(step, &s, sizeof s);
    opt->step = s.step;
    return KOPT_OK;
}

/* ---- A STEP ON TENSORS ------------------------------------------------------------------------------------------- */

/* ---- layout of a state block ---- */

/* What determines the layout of a state block, and the bytes of its arrays with their padding. total is its size, or 0
   if it has no arrays. The scales of an 8-bit moment are behind its codes. */
typedef struct kopt_layout_ {
    kopt_rule rule;
    kopt_format weight_format, first_moment_format, second_moment_format;
    kopt_rounding rounding;
    int moment_count;
    size_t n, weight_bytes, residual_bytes;      /* bytes of an element */
    size_t residual, first, second, slow, total; /* first: of the first moment, and each that has its format */
} kopt_layout_;

/* A state block has fewer than 32 bytes per element: all sizes in bytes are below SIZE_MAX. */
#define KOPT_LARGEST_N_ ((~(size_t)0 - 256) / 32)

/* The number of blocks of `size` elements; the last one may be shorter. */
static KOPT_HOST_DEVICE_ size_t kopt_blocks_(size_t n, size_t size) { return n / size + (n % size != 0); }
static KOPT_UNUSED_ size_t kopt_round_up4_(size_t bytes) { return (bytes + 3) & ~(size_t)3; }    /* in a checkpoint  */
static KOPT_UNUSED_ size_t kopt_round_up16_(size_t bytes) { return (bytes + 15) & ~(size_t)15; } /* in a state block */

/* Bytes of a moment in a state block. */
static KOPT_UNUSED_ size_t kopt_bytes_of_moment_(kopt_format format, size_t n) {
    return kopt_round_up16_(n * kopt_bytes_of_(format)) +
           (kopt_has_scales_(format) ? kopt_round_up16_(kopt_blocks_(n, KOPT_BLOCK_)) : 0);
}

/* The layout under a step, of which only the options count. n is at most KOPT_LARGEST_N_. */
static void kopt_layout_of_step_(kopt_layout_ *l, const kopt_begun_ *s, kopt_format weight, size_t n) {
    const kopt_format first = s->first_moment_format, second = s->second_moment_format;
    const int count = s->moment_count, squares = count == 3 ? 2 : count > 1; /* AMSGrad has two */
    const int ranger = s->rule == KOPT_RULE_RANGER;
    size_t total;
    l->rule = s->rule;
    l->weight_format = weight;
    l->first_moment_format = first;
    l->second_moment_format = second;
    l->rounding = weight == KOPT_F32 ? KOPT_NEAREST : s->rounding;
    l->moment_count = count;
    l->n = n;
    l->weight_bytes = kopt_bytes_of_(weight);
    l->residual_bytes = kopt_bytes_of_residual_(weight, s->rounding);
    l->residual = kopt_round_up16_(n * l->residual_bytes);
    l->first = l->second = kopt_bytes_of_moment_(first, n);
    if (second != first) l->second = kopt_bytes_of_moment_(second, n);
    l->slow = ranger ? kopt_round_up16_(n * l->weight_bytes) : 0;
    total = l->residual + (size_t)(count - squares) * l->first + (size_t)squares * l->second;
    if (ranger) total += l->slow + l->residual;
    l->total = total == 0 ? 0 : KOPT_HEADER_ + total;
}

/* The format of moment m. */
static KOPT_UNUSED_ kopt_format kopt_format_in_layout_(const kopt_layout_ *l, int m) {
    return kopt_is_square_(l->rule, m) ? l->second_moment_format : l->first_moment_format;
}

static kopt_layout_ kopt_layout_for_(const kopt_optimizer *opt, const kopt_tensor *t) {
    kopt_layout_ l;
    kopt_begun_ s;
    kopt_copy_options_(opt, &s);
    kopt_layout_of_step_(&l, &s, t->weight_format, t->n);
    return l;
}

/* The header of a tensor in a checkpoint. Numbers are little-endian; a field that does not apply is 0.
     0 "KOPT"     4 version 2    5 rule       6 weight format
     7 rounding + 16 * moment_rounding + 32 * residual_rounding           8 format of the first moment
     9 number of moments + 8 * nesterov + 16 * decay mode + 64 * stable + 128 * atan2_outside
    10 saved      11 format of the second moment + 1, or 0 if it is that of the first
    12 id (4)     16 n (8)     24 first_index (8)   32 seed (8)   40 step (4)   44 0 (4)
    48 lr   52 weight_decay   56 beta1   60 beta2 (fp32)
   The header of a state block in memory has only what may not change between two steps, so that equal runs have equal
   bytes: the rounding in byte 7, the number of moments in byte 9, and 0 in bytes 10 and 32 to 63.

   The arrays follow: residual[n], then each moment[n] (an 8-bit moment: its codes, then its scales), then for Ranger
   the slow weights[n] and their residual[n]. Zeros pad each array to a multiple of 16 bytes; in a checkpoint, to a
   multiple of 4. The arrays have the machine's byte order; in a checkpoint they are little-endian. */

/* Stores the low `bytes` bytes of value in little-endian order. */
static void kopt_store_le_(kopt_byte_ *p, uint64_t value, int bytes) {
    for (; bytes > 0; bytes--, value >>= 8) *p++ = (kopt_byte_)(value & 0xFFu);
}

/* Load little-endian numbers from any address. */
KOPT_INLINE_ uint32_t kopt_load_le32_(const kopt_byte_ *p) {
#ifdef KOPT_VECTORS16_ /* the machine is little-endian */
    return kopt_load32_(p);
#else
    return (uint32_t)p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24;
#endif
}
KOPT_INLINE_ uint64_t kopt_load_le64_(const kopt_byte_ *p) {
    return kopt_load_le32_(p) | (uint64_t)kopt_load_le32_(p + 4) << 32;
}

/* Store and load a hyper-parameter as fp32. */
static void kopt_store_number_(kopt_byte_ *p, double x) { kopt_store_le_(p, kopt_as_u32_(kopt_to_float_(x)), 4); }
static double kopt_load_number_(const kopt_byte_ *p) { return kopt_to_double_(kopt_as_f32_(kopt_load_le32_(p))); }

/* Computes bytes 7 and 9 of the header. */
static void kopt_make_variant_(kopt_byte_ *h7, kopt_byte_ *h9, const kopt_optimizer *opt, kopt_format weight) {
    const int moment_count = kopt_moments_(opt), adam = opt->rule == KOPT_RULE_ADAM;
    uint32_t byte7 = 0, byte9 = (uint32_t)moment_count;
    if (weight != KOPT_F32) byte7 = (uint32_t)opt->rounding;
    if ((moment_count > 0 && opt->first_moment_format != KOPT_F32) ||
        (moment_count > 1 && opt->second_moment_format != KOPT_F32))
        byte7 |= (uint32_t)opt->moment_rounding << 4;
    if ((byte7 & 15u) == KOPT_KAHAN || (byte7 & 15u) == KOPT_COMPACT) byte7 |= (uint32_t)opt->residual_rounding << 5;
    if (opt->rule == KOPT_RULE_SGD && opt->nesterov) byte9 |= 8u;
    if (opt->rule != KOPT_RULE_EMA) byte9 |= (uint32_t)opt->decay_mode << 4;
    if (adam && opt->stable) byte9 |= 64u;
    if (opt->rule == KOPT_RULE_ADAM_ATAN2 && opt->atan2_outside) byte9 |= 128u;
    *h7 = (kopt_byte_)byte7;
    *h9 = (kopt_byte_)byte9;
}

/* Byte 8 of the header. KOPT_Q8 is written as 5; up to version 0.9, whose codes were others, it was 4. */
static KOPT_FORCE_INLINE_ kopt_byte_ kopt_format_byte_(kopt_format format) {
    return (kopt_byte_)(format == KOPT_Q8 ? 5 : (int)format);
}

/* Byte 11 of the header. */
static KOPT_FORCE_INLINE_ kopt_byte_ kopt_second_byte_(kopt_format first, kopt_format second, int moment_count) {
    return (kopt_byte_)(moment_count < 2 || first == second ? 0 : 1 + (int)kopt_format_byte_(second));
}

/* Has a state block or checkpoint, whose header is at h, 8-bit moments of version 0.9 or before? */
static int kopt_has_old_codes_(const kopt_byte_ *h) { return h[8] == 4 || h[11] == 1 + 4; }

/* Writes 64 bytes at h: the header of a state block of this optimizer for a tensor with this format of weights, id, n
   and first_index. */
static void kopt_make_header_(kopt_byte_ *h, const kopt_optimizer *opt, kopt_format weight, uint32_t id, uint64_t n,
                              uint64_t first_index) {
    memset(h, 0, KOPT_HEADER_);
    kopt_store_le_(h, KOPT_MAGIC_, 4);
    h[4] = KOPT_BLOCK_VERSION_;
    h[5] = (kopt_byte_)opt->rule;
    h[6] = (kopt_byte_)weight;
    h[7] = (kopt_byte_)(weight == KOPT_F32 ? KOPT_NEAREST : opt->rounding);
    h[8] = kopt_format_byte_(opt->first_moment_format);
    h[9] = (kopt_byte_)kopt_moments_(opt);
    h[11] = kopt_second_byte_(opt->first_moment_format, opt->second_moment_format, h[9]);
    kopt_store_le_(h + 12, id, 4);
    kopt_store_le_(h + 16, n, 8);
    kopt_store_le_(h + 24, first_index, 8);
}

/* The same in a checkpoint: with bytes 7, 9, 10 and 32 to 63. */
static void kopt_make_saved_header_(kopt_byte_ *h, const kopt_optimizer *opt, kopt_format weight, uint32_t id,
                                    uint64_t n, uint64_t first_index) {
    const int sgd = opt->rule == KOPT_RULE_SGD;
    kopt_environment_ environment;
    kopt_make_header_(h, opt, weight, id, n, first_index);
    kopt_make_variant_(h + 7, h + 9, opt, weight);
    h[10] = 1;
    kopt_store_le_(h + 32, opt->seed, 8);
    kopt_store_le_(h + 40, opt->step, 4);
    kopt_enter_(&environment);
    kopt_store_number_(h + 48, opt->lr);
    kopt_store_number_(h + 52, opt->weight_decay);
    kopt_store_number_(h + 56, sgd ? opt->momentum : opt->beta1);
    kopt_store_number_(h + 60, sgd ? opt->dampening : opt->beta2);
    kopt_leave_(&environment);
}

/* Are arrays of the caller those of this layout? */
static KOPT_NOINLINE_ kopt_result kopt_check_arrays_(const kopt_tensor *t, const kopt_layout_ *l) {
    const kopt_state_arrays *const a = t->arrays;
    const int ranger = l->rule == KOPT_RULE_RANGER;
    int m;
    if (a->size != sizeof *a) return KOPT_ERROR_SIZE;
    if (t->state != NULL) return KOPT_ERROR_OPTION;
    for (m = 0; m < 4; m++)
        if (a->reserved_[m] != NULL) return KOPT_ERROR_OPTION;
    if (t->n == 0) return KOPT_OK;
    if (l->rounding == KOPT_FEEDBACK && a->rates == NULL) return KOPT_ERROR_NULL;
    for (m = 0; m < l->moment_count; m++)
        if (a->moment[m] == NULL || (kopt_has_scales_(kopt_format_in_layout_(l, m)) && a->scale[m] == NULL))
            return KOPT_ERROR_NULL;
    if (ranger && (a->slow == NULL || (l->residual_bytes != 0 && a->slow_residual == NULL))) return KOPT_ERROR_NULL;
    return l->residual_bytes != 0 && a->residual == NULL ? KOPT_ERROR_NULL : KOPT_OK;
}

/* Does a state belong to the optimizer and the tensor? Asked before the size: another format is KOPT_ERROR_MISMATCH.
   *words: why not, for a human. */
static KOPT_FORCE_INLINE_ kopt_result kopt_judge_block_(const kopt_tensor *t, const kopt_layout_ *l,
                                                        const char **words) {
    const kopt_byte_ *const h = (const kopt_byte_ *)t->state;
    if (t->arrays != NULL) {
        const kopt_result result = kopt_check_arrays_(t, l);
        MUST_(result != KOPT_ERROR_SIZE, SIZE, "arrays: size must be sizeof(kopt_state_arrays)");
        MUST_(result != KOPT_ERROR_OPTION, OPTION, "arrays: with them state must be NULL, and reserved_, too");
        MUST_(result != KOPT_ERROR_NULL, NULL,
              "arrays: the options need one that is NULL: residual, moment, scale, slow, slow_residual or rates");
        return KOPT_OK;
    }
    if (l->total == 0) return KOPT_OK;
    MUST_(h != NULL, NULL, "state: NULL");
    MUST_(t->state_size >= KOPT_HEADER_, SIZE, "state_size: less than kopt_state_size()");
    MUST_(kopt_load_le32_(h) == KOPT_MAGIC_ && h[4] == KOPT_BLOCK_VERSION_ && h[10] == 0, STATE,
          "state: not initialized by kopt_state_init() or kopt_load()");
    MUST_(!kopt_has_old_codes_(h), STATE,
          "state: it has 8-bit moments of version 0.9 or before, whose codes were others");
    MUST_(h[5] == (kopt_byte_)l->rule && h[9] == (kopt_byte_)l->moment_count, MISMATCH,
          "state: it was made under another rule or with another number of moments (momentum, amsgrad)");
    MUST_(h[6] == (kopt_byte_)l->weight_format, MISMATCH, "weight_format: another one than when the state was made");
    MUST_(h[7] == (kopt_byte_)l->rounding && h[8] == kopt_format_byte_(l->first_moment_format) &&
              h[11] == kopt_second_byte_(l->first_moment_format, l->second_moment_format, l->moment_count),
          MISMATCH, "rounding or the format of a moment: another one than when the state was made");
    MUST_(kopt_load_le32_(h + 12) == t->id, MISMATCH, "id: another one than when the state was made");
    MUST_(kopt_load_le64_(h + 16) == t->n, MISMATCH, "n: another one than when the state was made");
    MUST_(kopt_load_le64_(h + 24) == t->first_index, MISMATCH, "first_index: another one than when the state was made");
    return KOPT_OK;
}

/* ---- checks of memory ---- */

/* Do two arrays overlap? Sizes in bytes. A NULL pointer or an empty array overlaps nothing. */
static int kopt_overlap_(const void *a, size_t a_size, const void *b, size_t b_size) {
    const uintptr_t x = (uintptr_t)a, y = (uintptr_t)b;
    if (a == NULL || b == NULL || a_size == 0 || b_size == 0) return 0;
    return x < y ? y - x < a_size : x - y < b_size;
}

/* A memory range of a tensor, neither NULL nor empty. KOPT_ARRAYS_: the most arrays of a state. */
typedef enum kopt_memory_kind_ { KOPT_WEIGHTS_, KOPT_STATE_, KOPT_COPY_, KOPT_GRADS_, KOPT_COUNTS_ } kopt_memory_kind_;
enum { KOPT_TENSOR_RANGES_ = 5, KOPT_ARRAYS_ = 11, KOPT_MEMORY_RANGES_ = KOPT_TENSOR_RANGES_ + KOPT_ARRAYS_ };
typedef struct kopt_memory_range_ {
    const void *at;
    size_t size;
    kopt_memory_kind_ what;
} kopt_memory_range_;
typedef struct kopt_memory_ {
    kopt_memory_range_ range[KOPT_MEMORY_RANGES_], *end;
} kopt_memory_;

/* An array of a state, or the weights. */
typedef struct kopt_array_ {
    kopt_byte_ *at;
    size_t n, bytes; /* elements, and bytes of one element */
} kopt_array_;

static kopt_array_ *kopt_list_arrays_(kopt_array_ *array, const kopt_layout_ *l, const kopt_tensor *t);

/* Adds the arrays of the caller to a list of ranges. */
static KOPT_NOINLINE_ kopt_memory_range_ *kopt_array_ranges_(kopt_memory_range_ *to, const kopt_tensor *t,
                                                             const kopt_layout_ *l) {
    kopt_array_ array[KOPT_ARRAYS_], *a, *const end = kopt_list_arrays_(array, l, t);
    for (a = array; a != end; a++) {
        const kopt_memory_range_ range = {a->at, a->n * a->bytes, KOPT_STATE_};
        *to++ = range;
    }
    return to;
}

/* Lists the memory ranges of a tensor. */
static void kopt_list_memory_(kopt_memory_ *memory, const kopt_tensor *t, const kopt_layout_ *l) {
    const void *const at[] = {t->weight, t->state, t->copy, t->grad, t->counts}; /* by kopt_memory_kind_ */
    const size_t size[] = {t->n * l->weight_bytes, l->total, t->n * kopt_bytes_of_(t->copy_format),
                           t->n * kopt_bytes_of_(t->grad_format), sizeof *t->counts};
    kopt_memory_range_ *to = memory->range;
    unsigned i;
    for (i = 0; i < KOPT_TENSOR_RANGES_; i++)
        if (at[i] != NULL && size[i] != 0) {
            const kopt_memory_range_ range = {at[i], size[i], (kopt_memory_kind_)i};
            *to++ = range;
        }
    memory->end = t->arrays == NULL || t->n == 0 ? to : kopt_array_ranges_(to, t, l);
}

static KOPT_FORCE_INLINE_ int kopt_ranges_overlap_(const kopt_memory_range_ *a, const kopt_memory_range_ *b) {
    const uintptr_t x = (uintptr_t)a->at, y = (uintptr_t)b->at;
    return x < y ? y - x < a->size : x - y < b->size;
}

/* Checks that no required pointer is NULL, that the state block, if any, is large enough, and that no two memory ranges
   overlap. Without needs_grad the gradient may be NULL and may overlap the others. Lists the memory, if n is not 0. */
static kopt_result kopt_check_memory_(kopt_memory_ *m, const kopt_tensor *t, const kopt_layout_ *l, int needs_grad) {
    kopt_memory_range_ *a, *b;
    if (t->n == 0) return KOPT_OK;
    if (t->weight == NULL || (needs_grad && t->grad == NULL)) return KOPT_ERROR_NULL;
    if (t->arrays != NULL) {
        const kopt_result result = kopt_check_arrays_(t, l);
        if (result != KOPT_OK) return result;
    } else {
        if (l->total != 0 && t->state == NULL) return KOPT_ERROR_NULL;
        if (t->state_size < l->total) return KOPT_ERROR_SIZE;
    }
    kopt_list_memory_(m, t, l);
    for (a = m->range; a != m->end; a++)
        for (b = m->range; b != a; b++)
            if (kopt_ranges_overlap_(a, b) && (needs_grad || (a->what != KOPT_GRADS_ && b->what != KOPT_GRADS_)))
                return KOPT_ERROR_OVERLAP;
    return KOPT_OK;
}

/* Checks the fields of a tensor, but not its pointers. *words: what is refused, for a human. */
static KOPT_FORCE_INLINE_ kopt_result kopt_judge_tensor_(const kopt_tensor *t, const char **words) {
    const uint64_t largest = kopt_bits64_(KOPT_3E38_); /* above it are infinity, NaN, -0 and what is negative, too */
    MUST_(t != NULL, NULL, "a tensor is NULL");
    MUST_(kopt_format_valid_(t->weight_format), OPTION, "weight_format: KOPT_F32, KOPT_BF16 or KOPT_FP16");
    MUST_(kopt_format_valid_(t->grad_format), OPTION, "grad_format: KOPT_F32, KOPT_BF16 or KOPT_FP16");
    MUST_(t->copy == NULL || kopt_format_valid_(t->copy_format), OPTION,
          "copy_format: KOPT_F32, KOPT_BF16 or KOPT_FP16");
    MUST_((t->reserved32_ | t->reserved_[0] | t->reserved_[1]) == 0, OPTION,
          "reserved_ of a tensor: a field of a later version, or of a struct that was not set to zeros");
    MUST_(t->n <= KOPT_LARGEST_N_, BOUNDS, "n: at most SIZE_MAX / 32 - 8");
    MUST_(t->first_index >> 63 == 0, BOUNDS, "first_index: below 2^63");
    MUST_(kopt_bits64_(t->rate_scale) <= largest && kopt_bits64_(t->stable_scale) <= largest, RANGE,
          "rate_scale or stable_scale: finite, >= 0");
    return KOPT_OK;
}

#undef MUST_

/* What is checked of a tensor: its fields; also its memory without the gradient; also the state; also the gradient. */
typedef enum kopt_checks_ { KOPT_CHECK_FIELDS_, KOPT_CHECK_MEMORY_, KOPT_CHECK_STATE_, KOPT_CHECK_STEP_ } kopt_checks_;

/* Checks a tensor under the options of s, and computes the layout of its state. Lists its memory if that is checked. */
static kopt_result kopt_check_tensor_(kopt_layout_ *layout, kopt_memory_ *memory, const kopt_begun_ *s,
                                      const kopt_tensor *t, kopt_checks_ checks) {
    const char *words;
    kopt_result result = kopt_judge_tensor_(t, &words); /* refuses NULL */
    if (result != KOPT_OK) return result;
    memory->end = memory->range;
    kopt_layout_of_step_(layout, s, t->weight_format, t->n);
    if (checks >= KOPT_CHECK_STATE_) result = kopt_judge_block_(t, layout, &words);
    if (result != KOPT_OK || checks == KOPT_CHECK_FIELDS_) return result;
    return kopt_check_memory_(memory, t, layout, checks == KOPT_CHECK_STEP_);
}

/* The same under an optimizer, which is checked, too. */
static kopt_result kopt_check_state_(kopt_layout_ *layout, const kopt_optimizer *opt, const kopt_tensor *t,
                                     kopt_checks_ checks) {
    const kopt_result result = kopt_check_options_(opt);
    kopt_memory_ memory;
    kopt_begun_ s;
    if (result != KOPT_OK) return result;
    kopt_copy_options_(opt, &s);
    return kopt_check_tensor_(layout, &memory, &s, t, checks);
}

KOPT_API_ size_t kopt_state_size(const kopt_optimizer *opt, const kopt_tensor *t) {
    kopt_layout_ l;
    return kopt_check_state_(&l, opt, t, KOPT_CHECK_FIELDS_) == KOPT_OK ? l.total : 0;
}

/* ---- checks of a step ---- */

/* Takes a step from the caller's kopt_step, if this implementation began it. */
static kopt_result kopt_open_step_(kopt_begun_ *s, const kopt_step *step) {
    if (step == NULL) return KOPT_ERROR_NULL;
    memcpy(s, step, sizeof *s);
    if (s->made == KOPT_BEGUN_) return KOPT_OK;
    return s->made >> 32 == KOPT_BEGUN_ >> 32 ? KOPT_ERROR_VERSION : KOPT_ERROR_STEP;
}

/* Does StableAdamW have to measure the tensor before this step? Not if the caller has set t->stable_scale. */
static KOPT_UNUSED_ int kopt_must_measure_(const kopt_begun_ *s, const kopt_tensor *t) {
    return s->stable && !s->moments_only && kopt_is_zero_(t->stable_scale);
}

/* The last tensor of a list that has elements, its memory, and that of the one which is checked. */
typedef struct kopt_neighbours_ {
    const kopt_tensor *previous;
    kopt_memory_ memory[2];
    int current;
} kopt_neighbours_;

/* Compares a tensor with the one before it in its list, in O(1): finds neighbours that overlap (the caller passed n in
   bytes, or forgot to advance a pointer), and ids (of shards: first indices) that do not increase, so that no two use
   one state block, which belongs to an id. Tensors may share counts, and gradients that the step only reads. */
static kopt_result kopt_check_neighbours_(kopt_neighbours_ *list, const kopt_tensor *t, int zero_grad) {
    const kopt_memory_ *const a = &list->memory[!list->current], *const b = &list->memory[list->current];
    const kopt_tensor *const p = list->previous;
    const kopt_memory_range_ *x, *y;
    if (t->n == 0) return KOPT_OK;
    for (x = a->range; p != NULL && x != a->end; x++)
        for (y = b->range; y != b->end; y++)
            if (kopt_ranges_overlap_(x, y) &&
                (x->what != y->what || (x->what != KOPT_COUNTS_ && (x->what != KOPT_GRADS_ || zero_grad))))
                return KOPT_ERROR_OVERLAP;
    if (p != NULL && p->id >= t->id && (p->id > t->id || p->first_index + p->n > t->first_index)) return KOPT_ERROR_ID;
    list->previous = t;
    list->current = !list->current;
    return KOPT_OK;
}

/* Checks all tensors of a list. *last: the layout of the last one, which most often is the only one. Not inlined: its
   callers, which run the step, need no room for the lists of memory. */
static KOPT_NOINLINE_ kopt_result kopt_check_list_(const kopt_begun_ *s, const kopt_tensor *tensors, size_t count,
                                                   kopt_layout_ *last) {
    kopt_neighbours_ list;
    size_t i;
    if (tensors == NULL && count != 0) return KOPT_ERROR_NULL;
    list.previous = NULL;
    list.current = 0;
    for (i = 0; i < count; i++) {
        kopt_result result = kopt_check_tensor_(last, &list.memory[list.current], s, &tensors[i], KOPT_CHECK_STEP_);
        if (result == KOPT_OK && count > 1) /* one tensor has no neighbours */
            result = kopt_check_neighbours_(&list, &tensors[i], s->zero_grad);
        if (result != KOPT_OK) return result;
    }
    return KOPT_OK;
}

/* Sets the arrays of the state in a job, from the arrays of the caller or from the block. Those that the options do not
   need may be anything. */
static KOPT_UNUSED_ void kopt_place_state_(kopt_job_ *job, const kopt_layout_ *l, const kopt_tensor *t) {
    const kopt_state_arrays *const a = t->arrays;
    kopt_byte_ *const state = (kopt_byte_ *)t->state;
    int m;
    job->arrays = a;
    job->scale = kopt_round_up16_(l->n);
    if (a != NULL) {
        job->residual = (kopt_byte_ *)a->residual;
        for (m = 0; m < 4; m++) job->moment[m] = (kopt_byte_ *)a->moment[m];
        job->slow = (kopt_byte_ *)a->slow;
        job->slow_residual = (kopt_byte_ *)a->slow_residual;
    } else if (l->total != 0) {
        job->residual = state + KOPT_HEADER_;
        job->moment[0] = job->residual + l->residual;
        job->moment[1] = job->moment[0] + l->first;
        job->moment[2] = job->moment[1] + l->second;
        job->moment[3] = job->moment[2] + l->first; /* Adan's */
        job->slow_residual = state + l->total - l->residual;
        job->slow = job->slow_residual - l->slow;
    } else {
        for (m = 0; m < 4; m++) job->moment[m] = NULL;
        job->residual = job->slow = job->slow_residual = NULL;
    }
}

/* The two steps with their rates of KOPT_FEEDBACK. */
static kopt_byte_ *kopt_rates_of_(const kopt_tensor *t) {
    return t->arrays != NULL ? (kopt_byte_ *)t->arrays->rates : (kopt_byte_ *)t->state + KOPT_RATES_;
}

/* The scales of an 8-bit moment. */
static kopt_byte_ *kopt_scale_of_(const kopt_job_ *job, int m) {
    return job->arrays != NULL ? (kopt_byte_ *)job->arrays->scale[m] : job->moment[m] + job->scale;
}

/* Describes the step of elements [begin, end) to the kernels. The pointers are those of element 0. */
static KOPT_UNUSED_ void kopt_make_job_(kopt_job_ *job, const kopt_layout_ *l, const kopt_begun_ *s,
                                        const kopt_tensor *t, size_t begin, size_t end) {
    kopt_place_state_(job, l, t);
    job->step = s;
    job->weight = (kopt_byte_ *)t->weight;
    job->grad = (kopt_byte_ *)t->grad;
    job->counts = t->counts;
    job->rate = t->no_decay ? s->undecayed_rate : s->rate;
    job->weight_decay = t->no_decay ? 0 : s->weight_decay;
    job->l2 = t->no_decay ? 0 : s->l2;
    job->beta1 = s->beta1;
    job->feedback = 0;
    job->copy = (kopt_byte_ *)t->copy;
    job->weight_format = t->weight_format;
    job->grad_format = t->grad_format;
    job->copy_format = t->copy_format;
    job->begin = begin;
    job->end = end;
    job->first = t->first_index;
    job->id = t->id;
    job->stream = KOPT_RANDOM_STEP_;
}

/* ---- running a step ---- */

/* What the kernels do, below: the step of a job (DISPATCH), and the sum of StableAdamW (PUBLIC FUNCTIONS). */
static void kopt_step_job_(const kopt_job_ *job);
static void kopt_measure_(const kopt_layout_ *layout, const kopt_begun_ *s, const kopt_tensor *t, size_t begin,
                          size_t end, kopt_norm *norm);
static KOPT_HOST_DEVICE_ float kopt_stable_from_norm_(const kopt_norm *norm, uint64_t n);

/* KOPT_FEEDBACK (section 3a): a debt in the first moment is in units of the rate at which it was made. Where the rate
   rises, the first moment is cut, or it would be paid many times over. The state has two places for a step and its
   rate: ranges of a step, in any order, read what earlier steps wrote, and that of element 0 writes the older one. */
static KOPT_HOST_DEVICE_ void kopt_guard_(const kopt_begun_ *s, kopt_byte_ *rates, float rate, int first, float *beta1,
                                          float *feedback) {
    const uint32_t a = kopt_load32_(rates), b = kopt_load32_(rates + 8), now = kopt_as_u32_(rate) & 0x7FFFFFFFu;
    const int second = b < s->step && (b > a || a >= s->step);
    kopt_byte_ *const newer = second ? rates + 8 : rates, *const older = second ? rates : rates + 8;
    const uint32_t last = (second ? b : a) - 1 < s->step - 1 ? kopt_load32_(newer + 4) : 0; /* as now; no step is 0 */
    const float share = kopt_div_(s->feedback, rate);
    *beta1 = now > last ? kopt_mul_(s->beta1, kopt_div_(kopt_as_f32_(last), rate)) : s->beta1;
    *feedback = s->moments_only || s->unrectified || !kopt_finite_(share) ? 0 : share; /* at rate 0 it is infinite */
    if (!first || now == 0) return;
    kopt_store32_(older, s->step);
    kopt_store32_(older + 4, now);
}

/* Steps elements [begin, end); all of them, if StableAdamW has to measure the tensor. */
static void kopt_run_(const kopt_layout_ *l, const kopt_begun_ *s, const kopt_tensor *t, size_t begin, size_t end) {
    kopt_environment_ environment;
    kopt_job_ job;
    kopt_norm norm;
    const int measures = kopt_must_measure_(s, t);
    volatile float scale = 1; /* so that no compiler moves the products above kopt_enter_() */
    if (begin == end) return;
    if (measures) {
        memset(&norm, 0, sizeof norm);
        kopt_measure_(l, s, t, begin, end, &norm);
    }
    kopt_make_job_(&job, l, s, t, begin, end);
    kopt_enter_(&environment);
    if (s->rounding == KOPT_FEEDBACK && t->weight_format != KOPT_F32)
        kopt_guard_(s, kopt_rates_of_(t),
                    kopt_is_zero_(t->rate_scale) ? job.rate : kopt_mul_(job.rate, kopt_to_float_(t->rate_scale)),
                    begin == 0, &job.beta1, &job.feedback);
    if (measures) scale = kopt_stable_from_norm_(&norm, t->n);
    if (s->stable && !kopt_is_zero_(t->stable_scale)) scale = kopt_to_float_(t->stable_scale);
    if (!kopt_is_zero_(t->rate_scale)) scale = kopt_mul_(kopt_to_float_(t->rate_scale), scale); /* 0 means 1 */
    if (kopt_as_u32_(scale) != 0x3F800000u) {
        job.rate = kopt_mul_(job.rate, scale);
        job.weight_decay = kopt_mul_(job.weight_decay, scale);
    }
    kopt_step_job_(&job);
    kopt_leave_(&environment);
}

/* Steps the tensors of a list that is checked. *last: from kopt_check_list_(). */
static void kopt_run_list_(const kopt_begun_ *s, const kopt_tensor *tensors, size_t count, const kopt_layout_ *last) {
    kopt_layout_ layout;
    size_t i;
    for (i = 0; i < count; i++) {
        if (i + 1 < count) kopt_layout_of_step_(&layout, s, tensors[i].weight_format, tensors[i].n);
        kopt_run_(i + 1 < count ? &layout : last, s, &tensors[i], 0, tensors[i].n);
    }
}

KOPT_API_ kopt_result kopt_optimizer_step(kopt_optimizer *opt, const kopt_tensor *tensors, size_t count) {
    kopt_begun_ s;
    kopt_layout_ last;
    kopt_result result = kopt_check_options_(opt);
    if (result == KOPT_OK) result = kopt_next_step_(&s, opt);
    if (result == KOPT_OK) result = kopt_check_list_(&s, tensors, count, &last);
    if (result != KOPT_OK) return result;
    opt->step = s.step;
    kopt_run_list_(&s, tensors, count, &last);
    return KOPT_OK;
}

KOPT_API_ kopt_result kopt_step_run(const kopt_step *step, const kopt_tensor *tensors, size_t count) {
    kopt_begun_ s;
    kopt_layout_ last;
    kopt_result result = kopt_open_step_(&s, step);
    if (result == KOPT_OK) result = kopt_check_list_(&s, tensors, count, &last);
    if (result == KOPT_OK) kopt_run_list_(&s, tensors, count, &last);
    return result;
}

/* ---- ranges of a list ---- */

/* Elements of a list: from element `begin` of the first of these tensors up to element `end` of the last one. */
typedef struct kopt_part_ {
    const kopt_tensor *tensors;
    size_t count, begin, end;
} kopt_part_;

static kopt_result kopt_find_part_(kopt_part_ *p, const kopt_tensor *tensors, size_t count, size_t begin, size_t end) {
    size_t i, first = 0, before = 0; /* before: elements of the tensors before tensor i */
    if (tensors == NULL && count != 0) return KOPT_ERROR_NULL;
    if (begin > end) return KOPT_ERROR_BOUNDS;
    p->begin = p->end = 0;
    for (i = 0; before < end; i++) {
        if (i == count || tensors[i].n > KOPT_LARGEST_N_ || tensors[i].n > ~before) return KOPT_ERROR_BOUNDS;
        if (before <= begin && begin - before < tensors[i].n) {
            first = i;
            p->begin = begin - before;
        }
        p->end = end - before;
        before += tensors[i].n;
    }
    p->tensors = count == 0 ? tensors : tensors + first;
    p->count = begin == end ? 0 : i - first;
    return KOPT_OK;
}

/* The elements [*begin, *end) of tensor i of a part. blocks: rounded down to blocks of 8-bit moments. */
static void kopt_range_of_part_(const kopt_part_ *part, size_t i, int blocks, size_t *begin, size_t *end) {
    const size_t n = part->tensors[i].n;
    *begin = i == 0 ? part->begin : 0;
    *end = i + 1 == part->count ? part->end : n;
    if (blocks) *begin -= *begin % KOPT_BLOCK_;
    if (blocks && *end != n) *end -= *end % KOPT_BLOCK_;
}

KOPT_API_ kopt_result kopt_step_range(const kopt_step *step, const kopt_tensor *tensors, size_t count, size_t begin,
                                      size_t end) {
    kopt_begun_ s;
    kopt_result result = kopt_open_step_(&s, step);
    kopt_layout_ layout;
    kopt_part_ part;
    int blocks;
    size_t i;
    if (result == KOPT_OK) result = kopt_find_part_(&part, tensors, count, begin, end);
    if (result == KOPT_OK) result = kopt_check_list_(&s, part.tensors, part.count, &layout);
    if (result != KOPT_OK) return result;
    blocks = kopt_has_blocks_(&s);
    for (i = 0; i < part.count; i++) {
        kopt_range_of_part_(&part, i, blocks, &begin, &end);
        if (begin < end && end - begin != part.tensors[i].n && kopt_must_measure_(&s, &part.tensors[i]))
            return KOPT_ERROR_STEP; /* a part cannot be measured by itself */
    }
    for (i = 0; i < part.count; i++) {
        const kopt_tensor *const t = &part.tensors[i];
        kopt_range_of_part_(&part, i, blocks, &begin, &end);
        kopt_layout_of_step_(&layout, &s, t->weight_format, t->n);
        if (begin < end) kopt_run_(&layout, &s, t, begin, end);
    }
    return KOPT_OK;
}

/* ---- ONE PASS PER INSTRUCTION SET -------------------------------------------------------------------------------- */

/* The file includes itself once per instruction set, for a vocabulary and the kernels. */

#define KOPT_PASS_SCALAR_ 1
#define KOPT_PASS_SSE2_ 2
#define KOPT_PASS_AVX2_ 3
#define KOPT_PASS_AVX512_ 4
#define KOPT_PASS_NEON_ 5
#define KOPT_PASS_SIMD128_ 6
#define KOPT_PASS_CUDA_ 7       /* read by kahan_opt_cuda.cuh, for any value */
#define KOPT_PASS_CUDA_OCTET_ 8 /* also: the arithmetic of vectors, for ordinary numbers only */

#ifdef KOPT_IMPLEMENTING_
#ifdef KOPT_AVX2_
#define KOPT_PASS_ KOPT_PASS_AVX2_
#include KAHAN_OPT_SELF
#undef KOPT_PASS_
#endif

#if defined(KOPT_X86_)
#define KOPT_PASS_ KOPT_PASS_AVX512_
#elif defined(KOPT_NEON_)
#define KOPT_PASS_ KOPT_PASS_NEON_
#elif defined(KOPT_SIMD128_)
#define KOPT_PASS_ KOPT_PASS_SIMD128_
#endif
#ifdef KOPT_PASS_
#include KAHAN_OPT_SELF
#undef KOPT_PASS_
#endif

#if defined(KOPT_GCC_) && !defined(__OPTIMIZE_SIZE__) && !defined(__CUDACC__) && !defined(KOPT_OPTIMIZED_HERE_) && \
    !defined(__FAST_MATH__) && defined(KOPT_VECTOR_CODE_)
/* -O1 for what follows: two thirds of the compile time. Not with -Ofast: pop_options does not restore __FAST_MATH__. */
#define KOPT_COLD_HERE_
#pragma GCC push_options
#pragma GCC optimize("O1")
#endif

#ifdef KOPT_SSE2_
#define KOPT_PASS_ KOPT_PASS_SSE2_
#include KAHAN_OPT_SELF
#undef KOPT_PASS_
#endif

#define KOPT_PASS_ KOPT_PASS_SCALAR_
#include KAHAN_OPT_SELF
#undef KOPT_PASS_
#endif

#ifndef KOPT_READ_
#error "kahan_opt.h did not read itself: keep it a separate file, without a guard or #pragma once (KAHAN_OPT_SELF)"
#undef KOPT_IMPLEMENTING_
#endif

#endif /* KAHAN_OPT_IMPLEMENTATION: to be continued after the kernels */
#endif /* KOPT_PASS_ */

#ifdef KOPT_PASS_ /* this inclusion is the pass for one ISA */

/* ================================================================================================================== */
/* VOCABULARIES: the operations from which the kernels are made, for each ISA. Intrinsics live here and nowhere else.

   The table says what an operation does in one lane. a, b: operands; m: a mask; n: a constant; p: bytes of any
   alignment. (X_): a vocabulary that has it defines X_, for others KERNELS makes it. "Not scalar": not needed with
   ONE_LANE_. Rare ones have no macro: dot_ is K_(dot).

   Types
   vf32_                     LANES_ lanes of float (binary32)
   vu32_                     LANES_ lanes of uint32_t, or 2 * LANES_ halves: half 2 * i is the lower one of lane i
   vmask_                    LANES_ truth values

   Floats. add_ to sqrt_ round once, to nearest even. They and as_u32_ are opaque to gcc and clang: no flag can
   fuse, reorder or approximate them.
   splat_(x)                 x, a float: broadcast
   add_ sub_ mul_ div_(a, b) a + b, a - b, a * b, a / b
   sqrt_(a)                  square root
   flush_(a)                 a, but +0 if |a| < 2^-126, and 0x7FFFFFFF for every NaN (FLUSH_)
   min_ max_(a, b)           minimum, maximum; at most one of a and b is negative (MIN_MAX_). The ISA decides which
                             of 0 and -0 is less. If a NaN has the sign bit 0, min_(NaN, b) is b and max_(a, NaN) is
                             NaN. For any NaN, at least one of min_(a, b) and max_(b, a) is NaN
   as_u32_(a) as_f32_(a)     bitcast from float to uint32_t, from uint32_t to float
   round_u32_(a)             float to integer, to nearest even; 0 <= a < 2^31
   convert_f32_(a)           int32_t to float, to nearest even

   Words
   isplat_(x)                x, a uint32_t: broadcast
   isplat_hoisted_(x)        the same, opaque, so that it stays in a register throughout a loop
   iadd_ isub_(a, b)         a + b, a - b modulo 2^32
   and_ or_ xor_(a, b)       a & b, a | b, a ^ b
   shl_ shr_(a, n)           a << n, a >> n (logical): macros. Without them vu32_ has the operators of C
   imax_(a, b)               maximum of int32_t (IMAX_)
   imin_(a, b)               minimum of int32_t. With FLUSH_ only
   mulhilo_(a, x, &hi, &lo)  upper and lower word of the 64-bit product a * x; x is one uint32_t for all lanes
   dot_(sum, a, b)           adds 64-bit products a * b to sum[0] and sum[1]. Not scalar, not with TOOLS_ISA_

   Binary64. Not scalar, not with TOOLS_ISA_. Opaque, like floats
   K_(f64)                   LANES_ / 2 lanes of double
   load_f64_(p)              LANES_ / 2 floats, widened
   splat_f64_(x)             x, a double: broadcast
   add_f64_ sub_f64_ mul_f64_(a, b)

   Masks
   igt_(a, b) ieq_(a, b)     mask: a > b as int32_t; a == b
   mask_or_(m, m2)           m || m2
   any_true_(m)              int: not 0 if m is true in any lane
   select_(m, yes, no)       m ? yes : no, of words: blend
   select_or_zero_(m, a)     m ? a : 0

   Memory: LANES_ consecutive elements
   load32_ load16_ load8_(p) uint32_t; uint16_t, zero-extended; int8_t, sign-extended
   store32_ store16_ store8_ the lower 32, 16 or 8 bits of a (store8_: ONE_LANE_ only)
   nt_store32_ nt_store16_   non-temporal stores to p, aligned to their size; nt_store16_: a < 2^16 (NT_STORES_)
   nt_fence_()               orders non-temporal stores before later ones (NT_STORES_)

   fp16, in the lower half of a lane; the upper half is 0
   widen_fp16_(a)            fp16 to float
   narrow_fp16_(a)           float to fp16, to nearest even
   GENERIC_FP16_             KERNELS makes widen_fp16_ and narrow_fp16_ from other operations
   load_fp16_(p)             widen_fp16_(load16_(p)) (FP16_)
   fp16_low_ fp16_high_(a)   halves 0 .. LANES_ - 1, halves LANES_ .. 2 * LANES_ - 1, widened (FP16_; not scalar)
   round_fp16_(a, &stored)   stored = narrow_fp16_(a); returns widen_fp16_(stored) (FP16_)

   Halves. Not scalar
   add16_ mul16_(a, b)       a + b, a * b modulo 2^16
   min16_ max16_(a, b)       minimum, maximum of int16_t
   any_gt16_(a, b)           int: not 0 if a > b as int16_t in any half; all halves of b are the same number
   flush16_(a, b)            (a & b) != 0 ? a : 0
   unpack_low16_ _high16_(a) halves 0 .. LANES_ - 1, halves LANES_ .. 2 * LANES_ - 1, zero-extended to words
   bf16_low_ bf16_high_(a)   the same halves as bf16, widened to float
   pack_high16_(a, b)        the upper halves of all lanes of a, then those of b: narrows two vectors
   interleave_high16_(a, b)  half 2 * i is the upper half of lane i of a, half 2 * i + 1 that of b (REORDER_)
   load8_to16_(p)            loads 2 * LANES_ bytes, zero-extended to halves
   store8_from16_(p, a)      stores the lower 8 bits of each half: 2 * LANES_ bytes

   Order of the elements of two vectors: memory order (a before b), or even and odd elements apart (REORDER_)
   deinterleave_ interleave_ (a, b, &even, &odd): from memory order; (even, odd, &a, &b): to memory order

   Order of random words. Not scalar
   interleave_low_ _high_    a0 b0 a1 b1, a2 b2 a3 b3, of words 0 to 3 of each 128-bit part
   largest_part_(a)          word i of each part: the largest of the words i of all parts, as int32_t
   block_of_lane_()          which of LANES_ consecutive Philox blocks lane 4 * i + k has: k * (LANES_ / 4) + i

   Macros that describe a vocabulary
   ISA_                      the last part of the names of its kernels; K_(step) is kopt_step_avx2_ for avx2
   ISA_TARGET_               the attribute of a function that enables its instructions
   LANES_ ONE_LANE_          lanes of a vector, a size_t; scalar code defines ONE_LANE_
   LOADS_EXTEND_             load16_ and a shift take less time than bf16_low_ and bf16_high_ of a load32_
   REORDER_                  bf16 takes less time with even and odd elements apart
   SPECIALIZED_              there are specialized loops
   LOOPS_HAVE_L2_            1: they step with L2, too
   RUNS_AHEAD_               1: loops prefetch, and start the divisions of a pair before they commit the last one
   STAGES_ISA_               the ISA whose stages step what its own do not
   TOOLS_ISA_                the ISA whose kernels it uses for norm, clipping, reduction and StableAdamW's ratios
   CONVERT_ISA_              the ISA whose kernel it uses for general conversions
   CORE_ONLY_                only the arithmetic of a step is compiled, from registers to registers
   CHECK_UNROUNDED_          special values are found before they are rounded: a NaN of all bits would carry */
/* ================================================================================================================== */

/* The name of a function or type of this pass: K_(step) is kopt_step_avx2_ in the pass for AVX2. */
#define K_(name) KOPT_GLUE_(kopt_##name##_, ISA_)
#define KOPT_GLUE_(name, isa) KOPT_GLUE2_(name, isa)
#define KOPT_GLUE2_(name, isa) name##isa##_
#define FN_ static KOPT_FORCE_INLINE_ ISA_TARGET_

/* Names of a pass: types of the kernels, and the vocabulary. */
#define scalars_ K_(scalars)
#define constants_ K_(constants)
#define element_ K_(element)
#define pair_ K_(pair)
#define moments_ K_(moments)
#define half_pair_ K_(half_pair)
#define random_pair_ K_(random_pair)
#define vf32_ K_(vf32)
#define vu32_ K_(vu32)
#define vmask_ K_(vmask)
#define add_ K_(add)
#define sub_ K_(sub)
#define mul_ K_(mul)
#define div_ K_(div)
#define sqrt_ K_(sqrt)
#define min_ K_(min)
#define splat_ K_(splat)
#define as_u32_ K_(as_u32)
#define as_f32_ K_(as_f32)
#define convert_f32_ K_(convert_f32)
#define isplat_ K_(isplat)
#define isplat_hoisted_ K_(isplat_hoisted)
#define iadd_ K_(iadd)
#define isub_ K_(isub)
#define and_ K_(iand)
#define or_ K_(ior)
#define xor_ K_(ixor)
#define igt_ K_(igt)
#define ieq_ K_(ieq)
#define any_true_ K_(any_true)
#define select_ K_(select)
#define select_or_zero_ K_(select_or_zero)
#define load32_ K_(load32)
#define load16_ K_(load16)
#define store32_ K_(store32)
#define widen_fp16_ K_(widen_fp16)
#define narrow_fp16_ K_(narrow_fp16)
#define imax_ K_(imax)

/* ---- scalar: one lane, the reference for all others ---- */

#if KOPT_PASS_ == KOPT_PASS_SCALAR_
#define ISA_ scalar
#define ISA_TARGET_
#define LANES_ ((size_t)1)
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
FN_ vf32_ convert_f32_(vu32_ a) { return (float)(int32_t)a; }
FN_ vu32_ K_(round_u32)(vf32_ a) { /* 0 <= a < 2^31 */
    uint32_t u = kopt_as_u32_(a), exponent = u >> 23, significand = (u & 0x007FFFFFu) | 0x00800000u;
    if (exponent < 126) return 0; /* a < 1/2 */
    if (exponent >= 150) return significand << (exponent - 150);
    return kopt_shift_to_even_(significand, 150 - exponent);
}
FN_ vu32_ isplat_(uint32_t a) { return a; }
FN_ vu32_ isplat_hoisted_(uint32_t a) { return a; }
FN_ void K_(mulhilo)(vu32_ a, uint32_t b, vu32_ *high, vu32_ *low) {
    uint64_t product = (uint64_t)a * b;
    *high = (uint32_t)(product >> 32);
    *low = (uint32_t)(product & 0xFFFFFFFFu);
}
FN_ vmask_ igt_(vu32_ a, vu32_ b) { return (int32_t)a > (int32_t)b; }
FN_ vmask_ ieq_(vu32_ a, vu32_ b) { return a == b; }
FN_ vmask_ K_(mask_or)(vmask_ a, vmask_ b) { return a | b; }
FN_ int any_true_(vmask_ a) { return a; }
FN_ vu32_ select_(vmask_ m, vu32_ yes, vu32_ no) { return m ? yes : no; }
FN_ vu32_ select_or_zero_(vmask_ m, vu32_ a) { return m ? a : 0; }
FN_ vu32_ load32_(const kopt_byte_ *p) { return kopt_load32_(p); }
FN_ vu32_ load16_(const kopt_byte_ *p) { return kopt_load16_(p); }
FN_ vu32_ K_(load8)(const kopt_byte_ *p) { return ((uint32_t)*p ^ 0x80u) - 0x80u; } /* sign-extends */
FN_ void store32_(kopt_byte_ *p, vu32_ a) { kopt_store32_(p, a); }
FN_ void K_(store16)(kopt_byte_ *p, vu32_ a) { kopt_store16_(p, a); }
FN_ void K_(store8)(kopt_byte_ *p, vu32_ a) { *p = (kopt_byte_)(a & 0xFFu); }
static KOPT_NOINLINE_ vf32_ widen_fp16_(vu32_ a) { return kopt_f32_from_fp16((kopt_fp16)a); }
static KOPT_NOINLINE_ vu32_ narrow_fp16_(vf32_ a) { return kopt_fp16_from_f32(a); }
FN_ vu32_ K_(block_of_lane)(void) { return 0; }

/* ---- x86: SSE2 (4 lanes), AVX2 with F16C (8), AVX-512 F, BW, DQ and VL (16) ---- */

#elif KOPT_PASS_ <= KOPT_PASS_AVX512_
#if KOPT_PASS_ == KOPT_PASS_SSE2_ /* for processors from before 2013: small code rather than fast code */
#define ISA_ sse2
#define ISA_TARGET_ KOPT_TARGET_("sse2")
#define LANES_ ((size_t)4)
#define TOOLS_ISA_ scalar
#define GENERIC_FP16_ 1
#define RUNS_AHEAD_ 0
#define MM_(name) _mm_##name
#define SI_(name_si) _mm_##name_si##128
typedef __m128 vf32_;
typedef __m128i vu32_, vmask_;
FN_ vf32_ as_f32_(vu32_ a) { return _mm_castsi128_ps(a); }
#elif KOPT_PASS_ == KOPT_PASS_AVX2_
#define ISA_ avx2
#define ISA_TARGET_ KOPT_TARGET_("avx2,f16c")
#define LANES_ ((size_t)8)
#define RUNS_AHEAD_ 0
#define LOOPS_HAVE_L2_ 0 /* it has few registers, and the test for L2 would slow down every step */
#define MM_(name) _mm256_##name
#define SI_(name_si) _mm256_##name_si##256
#define PART_(name_si) _mm_##name_si##128
typedef __m256 vf32_;
typedef __m256i vu32_, vmask_;
typedef __m128i K_(part); /* half a vector */
typedef __m256d K_(f64);
FN_ vf32_ as_f32_(vu32_ a) { return _mm256_castsi256_ps(a); }
#else
#define ISA_ avx512
/* evex512 against -mno-evex512, which zig cc passes: the compilers that have that flag know it. */
#if (defined(__clang__) && !defined(__apple_build_version__) && __clang_major__ >= 18 && __clang_major__ <= 21) || \
    (defined(KOPT_GCC_) && __GNUC__ >= 14 && __GNUC__ <= 15)
#define ISA_TARGET_ KOPT_TARGET_("avx512f,avx512bw,avx512dq,avx512vl,avx2,f16c,evex512")
#else
#define ISA_TARGET_ KOPT_TARGET_("avx512f,avx512bw,avx512dq,avx512vl,avx2,f16c")
#endif
#define LANES_ ((size_t)16)
#ifdef KOPT_AVX2_ /* saves code */
#define TOOLS_ISA_ avx2
#define STAGES_ISA_ avx2
#define CONVERT_ISA_ avx2
#endif
#define LOADS_EXTEND_ 1
#define RUNS_AHEAD_ 1 /* elsewhere the test costs SGD a tenth, and there is nothing to gain */
#define LOOPS_HAVE_L2_ 1
#define MM_(name) _mm512_##name
#define SI_(name_si) _mm512_##name_si##512
#define PART_(name_si) _mm256_##name_si##256
typedef __m512 vf32_;
typedef __m512i vu32_;
typedef __mmask16 vmask_;
typedef __m256i K_(part);
typedef __m512d K_(f64);
FN_ vf32_ as_f32_(vu32_ a) { return _mm512_castsi512_ps(a); }
#endif
#define MIN_MAX_ 1

/* gcc -m32 -Ofast does not inline SSE's intrinsics of floats, such as those of add and set1. With -Ofast those of div,
   sqrt, min and max become estimates, or their operands are swapped: they are assembly. */
#ifdef KOPT_GNU_
#define OPAQUE_(r) __asm__("" : "+v"(r))
#define ARITHMETIC_(type, name, operation, intrinsic) \
    FN_ type name(type a, type b) {                   \
        type r = a operation b;                       \
        OPAQUE_(r);                                   \
        return r;                                     \
    }
#if KOPT_PASS_ == KOPT_PASS_SSE2_ && !defined(__AVX__)
#define ASSEMBLE_(operation, r, a, b) __asm__(operation " {%2, %0|%0, %2}" : "=x"(r) : "0"(a), "x"(b))
#else /* with -mavx the encoding of SSE would stall */
#define ASSEMBLE_(operation, r, a, b) __asm__("v" operation " {%2, %1, %0|%0, %1, %2}" : "=v"(r) : "v"(a), "v"(b))
#endif
#define ASSEMBLED_(type, name, operation, intrinsic) \
    FN_ type name(type a, type b) {                  \
        type r;                                      \
        ASSEMBLE_(operation, r, a, b);               \
        return r;                                    \
    }
FN_ vf32_ sqrt_(vf32_ a) {
    vf32_ r;
#if KOPT_PASS_ == KOPT_PASS_SSE2_ && !defined(__AVX__)
    __asm__("sqrtps {%1, %0|%0, %1}" : "=x"(r) : "x"(a));
#else
    __asm__("vsqrtps {%1, %0|%0, %1}" : "=v"(r) : "v"(a));
#endif
    return r;
}
#else
#define OPAQUE_(r) ((void)0)
#define ARITHMETIC_(type, name, operation, intrinsic) \
    FN_ type name(type a, type b) { return intrinsic(a, b); }
#define ASSEMBLED_ ARITHMETIC_
FN_ vf32_ sqrt_(vf32_ a) { return MM_(sqrt_ps)(a); }
#endif
ARITHMETIC_(vf32_, add_, +, MM_(add_ps))
ARITHMETIC_(vf32_, sub_, -, MM_(sub_ps))
ARITHMETIC_(vf32_, mul_, *, MM_(mul_ps))
ASSEMBLED_(vf32_, div_, "divps", MM_(div_ps))
ASSEMBLED_(vf32_, min_, "minps", MM_(min_ps))
ASSEMBLED_(vf32_, K_(max), "maxps", MM_(max_ps))

FN_ vu32_ as_u32_(vf32_ a) { /* opaque: see kopt_as_u32_ */
    vu32_ r = SI_(castps_si)(a);
    OPAQUE_(r);
    return r;
}
FN_ vu32_ K_(round_u32)(vf32_ a) { return MM_(cvtps_epi32)(a); }
FN_ vf32_ convert_f32_(vu32_ a) { return MM_(cvtepi32_ps)(a); }
FN_ vu32_ isplat_(uint32_t a) { return MM_(set1_epi32)((int)a); }
FN_ vu32_ isplat_hoisted_(uint32_t a) { return as_u32_(as_f32_(isplat_(a))); }
FN_ vu32_ iadd_(vu32_ a, vu32_ b) { return MM_(add_epi32)(a, b); }
FN_ vu32_ isub_(vu32_ a, vu32_ b) { return MM_(sub_epi32)(a, b); }
FN_ vu32_ and_(vu32_ a, vu32_ b) { return SI_(and_si)(a, b); }
FN_ vu32_ or_(vu32_ a, vu32_ b) { return SI_(or_si)(a, b); }
FN_ vu32_ xor_(vu32_ a, vu32_ b) { return SI_(xor_si)(a, b); }
#define shl_(a, n) MM_(slli_epi32)(a, n)
#define shr_(a, n) MM_(srli_epi32)(a, n)
FN_ vu32_ K_(add16)(vu32_ a, vu32_ b) { return MM_(add_epi16)(a, b); }
FN_ vu32_ K_(mul16)(vu32_ a, vu32_ b) { return MM_(mullo_epi16)(a, b); }
FN_ vu32_ K_(min16)(vu32_ a, vu32_ b) { return MM_(min_epi16)(a, b); }
FN_ vu32_ K_(max16)(vu32_ a, vu32_ b) { return MM_(max_epi16)(a, b); }
FN_ void K_(mulhilo)(vu32_ a, uint32_t b, vu32_ *high, vu32_ *low) {
    const vu32_ factor = isplat_(b), upper = MM_(slli_epi64)(isplat_(0xFFFFFFFFu), 32); /* the odd words */
    const vu32_ even = MM_(mul_epu32)(a, factor), odd = MM_(mul_epu32)(MM_(srli_epi64)(a, 32), factor);
    *low = or_(SI_(andnot_si)(upper, even), MM_(slli_epi64)(odd, 32));
    *high = or_(MM_(srli_epi64)(even, 32), and_(upper, odd));
}
FN_ void K_(dot)(vu32_ sum[2], vu32_ a, vu32_ b) { /* even lanes; next line: odd lanes */
    sum[0] = MM_(add_epi64)(sum[0], MM_(mul_epu32)(a, b));
    sum[1] = MM_(add_epi64)(sum[1], MM_(mul_epu32)(MM_(srli_epi64)(a, 32), MM_(srli_epi64)(b, 32)));
}
FN_ vu32_ load32_(const kopt_byte_ *p) { return SI_(loadu_si)((const vu32_ *)p); }
FN_ void store32_(kopt_byte_ *p, vu32_ a) { SI_(storeu_si)((vu32_ *)p, a); }
FN_ vu32_ K_(interleave_low)(vu32_ a, vu32_ b) { return MM_(unpacklo_epi32)(a, b); }
FN_ vu32_ K_(interleave_high)(vu32_ a, vu32_ b) { return MM_(unpackhi_epi32)(a, b); }

#if KOPT_PASS_ != KOPT_PASS_AVX512_ /* masks are vectors */
FN_ vmask_ igt_(vu32_ a, vu32_ b) { return MM_(cmpgt_epi32)(a, b); }
FN_ vmask_ ieq_(vu32_ a, vu32_ b) { return MM_(cmpeq_epi32)(a, b); }
FN_ vmask_ K_(mask_or)(vmask_ a, vmask_ b) { return or_(a, b); }
FN_ int any_true_(vmask_ a) { return MM_(movemask_epi8)(a) != 0; }
FN_ vu32_ select_or_zero_(vmask_ m, vu32_ a) { return and_(m, a); }
FN_ vu32_ K_(flush16)(vu32_ a, vu32_ exponent) { /* ~((a & exponent) == 0) & a */
    return SI_(andnot_si)(MM_(cmpeq_epi16)(and_(a, exponent), isplat_(0)), a);
}
FN_ int K_(any_gt16)(vu32_ a, vu32_ limit) { return MM_(movemask_epi8)(MM_(cmpgt_epi16)(a, limit)) != 0; }
/* SSE2 has no blend, and that of gcc 12 with -funsigned-char takes every mask for false. */
#if KOPT_PASS_ == KOPT_PASS_SSE2_ || (defined(KOPT_GCC_) && defined(__CHAR_UNSIGNED__))
FN_ vu32_ select_(vmask_ m, vu32_ yes, vu32_ no) { return or_(and_(m, yes), SI_(andnot_si)(m, no)); }
#else
FN_ vu32_ select_(vmask_ m, vu32_ yes, vu32_ no) { return _mm256_blendv_epi8(no, yes, m); }
#endif
#endif

#if KOPT_PASS_ == KOPT_PASS_SSE2_
FN_ vu32_ K_(largest_part)(vu32_ a) { return a; }
FN_ vf32_ splat_(float x) { return as_f32_(isplat_(kopt_as_u32_(x))); }
FN_ vu32_ K_(load64)(const kopt_byte_ *p) { return _mm_loadl_epi64((const __m128i *)p); }
FN_ void K_(store64)(kopt_byte_ *p, vu32_ a) { _mm_storel_epi64((__m128i *)p, a); }
FN_ vu32_ K_(unpack_low16)(vu32_ a) { return _mm_unpacklo_epi16(a, isplat_(0)); }
FN_ vu32_ K_(unpack_high16)(vu32_ a) { return _mm_unpackhi_epi16(a, isplat_(0)); }
FN_ vf32_ K_(bf16_low)(vu32_ a) { return as_f32_(_mm_unpacklo_epi16(isplat_(0), a)); }
FN_ vf32_ K_(bf16_high)(vu32_ a) { return as_f32_(_mm_unpackhi_epi16(isplat_(0), a)); }
FN_ vu32_ load16_(const kopt_byte_ *p) { return K_(unpack_low16)(K_(load64)(p)); }
FN_ vu32_ K_(load8)(const kopt_byte_ *p) { /* each byte four times in its word; the arithmetic shift extends the sign */
    vu32_ a = isplat_(kopt_load32_(p));
    a = _mm_unpacklo_epi8(a, a);
    return _mm_srai_epi32(_mm_unpacklo_epi16(a, a), 24);
}
FN_ vu32_ K_(load8_to16)(const kopt_byte_ *p) { return _mm_unpacklo_epi8(K_(load64)(p), isplat_(0)); }
/* Arithmetic shifts, so that packs does not saturate. */
FN_ vu32_ K_(pack_high16)(vu32_ a, vu32_ b) { return _mm_packs_epi32(_mm_srai_epi32(a, 16), _mm_srai_epi32(b, 16)); }
FN_ void K_(store16)(kopt_byte_ *p, vu32_ a) { K_(store64)(p, K_(pack_high16)(shl_(a, 16), a)); }
FN_ void K_(store8_from16)(kopt_byte_ *p, vu32_ a) {
    a = and_(a, isplat_(0x00FF00FF));
    K_(store64)(p, _mm_packus_epi16(a, a));
}
FN_ vu32_ K_(block_of_lane)(void) { return _mm_setr_epi32(0, 1, 2, 3); }
#else /* AVX2 and AVX-512: what SSE2 does without */
#define SPECIALIZED_ 1
#define NT_STORES_ 1
#define REORDER_ 1
#define IMAX_ 1
#define FP16_ 1
FN_ vf32_ splat_(float x) { return MM_(set1_ps)(x); }
FN_ vu32_ imax_(vu32_ a, vu32_ b) { return MM_(max_epi32)(a, b); }
ARITHMETIC_(K_(f64), K_(add_f64), +, MM_(add_pd))
ARITHMETIC_(K_(f64), K_(sub_f64), -, MM_(sub_pd))
ARITHMETIC_(K_(f64), K_(mul_f64), *, MM_(mul_pd))
FN_ K_(f64) K_(splat_f64)(double x) { return MM_(set1_pd)(x); }
FN_ K_(part) K_(load_part)(const kopt_byte_ *p) { return PART_(loadu_si)((const K_(part) *)p); }
FN_ void K_(store_part)(kopt_byte_ *p, K_(part) a) { PART_(storeu_si)((K_(part) *)p, a); }

#if KOPT_PASS_ == KOPT_PASS_AVX2_
/* Packing narrows each 128-bit part by itself, unpacking takes the low half of each. 0xD8 puts the 64-bit quarters
   0 2 1 3 into the order 0 1 2 3 or back, 0x08 joins quarters 0 and 2. packus saturates: words must be below 2^16. */
#define QUARTERS_(a, order) _mm256_permute4x64_epi64(a, order)
FN_ __m128i K_(low_part)(vu32_ a) { return _mm256_castsi256_si128(a); }
FN_ __m128i K_(high_part)(vu32_ a) { return _mm256_extracti128_si256(a, 1); }
FN_ __m128i K_(narrow16)(vu32_ a) { return K_(low_part)(QUARTERS_(_mm256_packus_epi32(a, a), 0x08)); }
FN_ void K_(store16)(kopt_byte_ *p, vu32_ a) { K_(store_part)(p, K_(narrow16)(and_(a, isplat_(0xFFFF)))); }
FN_ void K_(store8_from16)(kopt_byte_ *p, vu32_ a) {
    a = and_(a, isplat_(0x00FF00FF));
    K_(store_part)(p, K_(low_part)(QUARTERS_(_mm256_packus_epi16(a, a), 0x08)));
}
FN_ __m128i K_(part_fp16)(vf32_ a) { return _mm256_cvtps_ph(a, 0); } /* 0: to nearest even */
FN_ vu32_ K_(load8)(const kopt_byte_ *p) { return _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p)); }
FN_ vf32_ K_(bf16_low)(vu32_ a) { return as_f32_(_mm256_unpacklo_epi16(isplat_(0), QUARTERS_(a, 0xD8))); }
FN_ vf32_ K_(bf16_high)(vu32_ a) { return as_f32_(_mm256_unpackhi_epi16(isplat_(0), QUARTERS_(a, 0xD8))); }
FN_ vu32_ K_(pack_high16)(vu32_ a, vu32_ b) { return QUARTERS_(_mm256_packus_epi32(shr_(a, 16), shr_(b, 16)), 0xD8); }
FN_ vu32_ K_(interleave_high16)(vu32_ even, vu32_ odd) { return _mm256_blend_epi16(shr_(even, 16), odd, 0xAA); }
FN_ vu32_ K_(largest_part)(vu32_ a) { return imax_(a, _mm256_permute2x128_si256(a, a, 1)); }
FN_ void K_(deinterleave)(vf32_ a, vf32_ b, vf32_ *even, vf32_ *odd) {
    *even = as_f32_(QUARTERS_(as_u32_(_mm256_shuffle_ps(a, b, 0x88)), 0xD8));
    *odd = as_f32_(QUARTERS_(as_u32_(_mm256_shuffle_ps(a, b, 0xDD)), 0xD8));
}
FN_ void K_(interleave)(vf32_ even, vf32_ odd, vf32_ *a, vf32_ *b) { /* unpack: 0 1 of each 128-bit part, then 2 3 */
    const vf32_ low = _mm256_unpacklo_ps(even, odd), high = _mm256_unpackhi_ps(even, odd);
    *a = _mm256_permute2f128_ps(low, high, 0x20);
    *b = _mm256_permute2f128_ps(low, high, 0x31);
}
FN_ vu32_ K_(block_of_lane)(void) { return _mm256_setr_epi32(0, 2, 4, 6, 1, 3, 5, 7); }
FN_ __m256d K_(load_f64)(const kopt_byte_ *p) { /* without _mm_loadu_ps, which gcc -m32 -Ofast cannot inline here */
    return _mm256_cvtps_pd(_mm_castsi128_ps(_mm_loadu_si128((const __m128i *)p)));
}
#undef QUARTERS_
#else
FN_ __m256i K_(low_part)(vu32_ a) { return _mm512_castsi512_si256(a); }
FN_ __m256i K_(high_part)(vu32_ a) { return _mm512_extracti64x4_epi64(a, 1); }
FN_ __m256i K_(narrow16)(vu32_ a) { return _mm512_cvtepi32_epi16(a); }
FN_ void K_(store16)(kopt_byte_ *p, vu32_ a) { K_(store_part)(p, K_(narrow16)(a)); }
FN_ void K_(store8_from16)(kopt_byte_ *p, vu32_ a) { K_(store_part)(p, _mm512_cvtepi16_epi8(a)); }
FN_ __m256i K_(part_fp16)(vf32_ a) { return _mm512_maskz_cvtps_ph(0xFFFFu, a, 0); } /* 0: to nearest even */
FN_ vmask_ igt_(vu32_ a, vu32_ b) { return _mm512_cmpgt_epi32_mask(a, b); }
FN_ vmask_ ieq_(vu32_ a, vu32_ b) { return _mm512_cmpeq_epi32_mask(a, b); }
FN_ vmask_ K_(mask_or)(vmask_ a, vmask_ b) { return (vmask_)(a | b); }
FN_ int any_true_(vmask_ a) { return a != 0; }
FN_ vu32_ select_(vmask_ m, vu32_ yes, vu32_ no) { return _mm512_mask_blend_epi32(m, no, yes); }
FN_ vu32_ select_or_zero_(vmask_ m, vu32_ a) { return _mm512_maskz_mov_epi32(m, a); }
FN_ vu32_ K_(flush16)(vu32_ a, vu32_ exponent) {
    return _mm512_maskz_mov_epi16(_mm512_test_epi16_mask(a, exponent), a);
}
FN_ int K_(any_gt16)(vu32_ a, vu32_ limit) {
    uint32_t above = _mm512_cmpgt_epi16_mask(a, limit);
#ifdef KOPT_GNU_
    __asm__("" : "+r"(above)); /* tests a general register; kortest is slower on some processors */
#endif
    return above != 0;
}
FN_ vu32_ K_(load8)(const kopt_byte_ *p) { return _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p)); }
/* 0, 1 .. 15, in words or in the upper halves: indices of the permutations */
FN_ vu32_ K_(iota)(void) { return _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15); }
FN_ vf32_ K_(bf16)(vu32_ a, vu32_ halves) { return as_f32_(_mm512_maskz_permutexvar_epi16(0xAAAAAAAAu, halves, a)); }
FN_ vf32_ K_(bf16_low)(vu32_ a) { return K_(bf16)(a, shl_(K_(iota)(), 16)); }
FN_ vf32_ K_(bf16_high)(vu32_ a) { return K_(bf16)(a, or_(shl_(K_(iota)(), 16), isplat_(0x100000))); }
FN_ vu32_ K_(pack_high16)(vu32_ a, vu32_ b) { /* halves 1, 3 .. 31 of a, then those of b, which are 33, 35 .. 63 */
    const vu32_ odd = or_(K_(mul16)(K_(iota)(), isplat_(4)), isplat_(0x00030001));
    return _mm512_permutex2var_epi16(a, or_(odd, shl_(odd, 16)), b);
}
FN_ vu32_ K_(largest_part)(vu32_ a) {
    a = imax_(a, _mm512_shuffle_i32x4(a, a, 0x4E));
    return imax_(a, _mm512_shuffle_i32x4(a, a, 0xB1));
}
FN_ vu32_ K_(interleave_high16)(vu32_ even, vu32_ odd) { /* bytes 2 and 3 of even replace bytes 0 and 1 of odd */
    const __mmask64 low = (uint64_t)0x33333333u << 32 | 0x33333333u;
    return _mm512_mask_shuffle_epi8(odd, low, even, _mm512_set4_epi32(0x0F0E, 0x0B0A, 0x0706, 0x0302));
}
FN_ void K_(deinterleave)(vf32_ a, vf32_ b, vf32_ *even, vf32_ *odd) {
    const __m512i evens = iadd_(K_(iota)(), K_(iota)());
    *even = _mm512_permutex2var_ps(a, evens, b);
    *odd = _mm512_permutex2var_ps(a, or_(evens, isplat_(1)), b);
}
FN_ void K_(interleave)(vf32_ even, vf32_ odd, vf32_ *a, vf32_ *b) {
    const __m512i first = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    *a = _mm512_permutex2var_ps(even, first, odd);
    *b = _mm512_permutex2var_ps(even, or_(first, isplat_(8)), odd);
}
FN_ vu32_ K_(block_of_lane)(void) { return _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15); }
FN_ __m512d K_(load_f64)(const kopt_byte_ *p) { return _mm512_cvtps_pd(_mm256_loadu_ps((const float *)p)); }
#endif
FN_ vu32_ load16_(const kopt_byte_ *p) { return MM_(cvtepu16_epi32)(K_(load_part)(p)); }
FN_ vu32_ K_(load8_to16)(const kopt_byte_ *p) { return MM_(cvtepu8_epi16)(K_(load_part)(p)); }
FN_ void K_(nt_store32)(kopt_byte_ *p, vu32_ a) { SI_(stream_si)((vu32_ *)p, a); }
FN_ void K_(nt_store16)(kopt_byte_ *p, vu32_ a) { PART_(stream_si)((K_(part) *)p, K_(narrow16)(a)); }
FN_ void K_(nt_fence)(void) { _mm_sfence(); }
FN_ vu32_ K_(unpack_low16)(vu32_ a) { return MM_(cvtepu16_epi32)(K_(low_part)(a)); }
FN_ vu32_ K_(unpack_high16)(vu32_ a) { return MM_(cvtepu16_epi32)(K_(high_part)(a)); }
FN_ vf32_ widen_fp16_(vu32_ a) { return MM_(cvtph_ps)(K_(narrow16)(a)); }
FN_ vu32_ narrow_fp16_(vf32_ a) { return MM_(cvtepu16_epi32)(K_(part_fp16)(a)); }
FN_ vf32_ K_(load_fp16)(const kopt_byte_ *p) { return MM_(cvtph_ps)(K_(load_part)(p)); }
FN_ vf32_ K_(fp16_low)(vu32_ a) { return MM_(cvtph_ps)(K_(low_part)(a)); }
FN_ vf32_ K_(fp16_high)(vu32_ a) { return MM_(cvtph_ps)(K_(high_part)(a)); }
FN_ vf32_ K_(round_fp16)(vf32_ x, vu32_ *stored) {
    const K_(part) half = K_(part_fp16)(x);
    *stored = MM_(cvtepu16_epi32)(half);
    return MM_(cvtph_ps)(half);
}
#endif
#if KOPT_PASS_ == KOPT_PASS_AVX512_ /* of every build for x86; it takes no AVX */
/* The CRC-32 of n bytes behind those that gave value; n is 64, 128, 192 and so on. PCLMULQDQ multiplies polynomials
   over GF(2): four remainders take 64 bytes at a time, then become one (Gopal et al., Intel, 2009: "Fast CRC
   Computation for Generic Polynomials Using PCLMULQDQ Instruction"; its constants for this polynomial, reflected). */
static KOPT_NOINLINE_ KOPT_TARGET_("sse2,pclmul") uint32_t
    kopt_crc_fast_(uint32_t value, const kopt_byte_ *p, size_t n) {
    const __m128i by512 = _mm_set_epi32(1, (int)0xC6E41596u, 1, 0x54442BD4), words = _mm_set_epi32(0, -1, 0, -1);
    const __m128i by128 = _mm_set_epi32(0, (int)0xCCAA009Eu, 1, 0x751997D0), by32 = _mm_set_epi32(0, 0, 1, 0x63CD6124);
    const __m128i polynomial = _mm_set_epi32(1, (int)0xF7011641u, 1, (int)0xDB710641u); /* and its inverse */
    __m128i x[4], y;
    size_t i;
#define FOLD_(x, by) _mm_xor_si128(_mm_clmulepi64_si128(x, by, 0x00), _mm_clmulepi64_si128(x, by, 0x11))
    for (i = 0; i < 4; i++) x[i] = _mm_loadu_si128((const __m128i *)(const void *)(p + 16 * i));
    x[0] = _mm_xor_si128(x[0], _mm_cvtsi32_si128((int)value));
    for (p += 64; n >= 128; p += 64, n -= 64)
        for (i = 0; i < 4; i++)
            x[i] = _mm_xor_si128(FOLD_(x[i], by512), _mm_loadu_si128((const __m128i *)(const void *)(p + 16 * i)));
    for (i = 1; i < 4; i++) x[i] = _mm_xor_si128(FOLD_(x[i - 1], by128), x[i]);
#undef FOLD_
    y = _mm_xor_si128(_mm_srli_si128(x[3], 8), _mm_clmulepi64_si128(x[3], by128, 0x10));                /* 96 bits */
    y = _mm_xor_si128(_mm_srli_si128(y, 4), _mm_clmulepi64_si128(_mm_and_si128(y, words), by32, 0x00)); /* 64 */
    x[0] = _mm_clmulepi64_si128(_mm_and_si128(y, words), polynomial, 0x10); /* the quotient, by Barrett */
    x[0] = _mm_clmulepi64_si128(_mm_and_si128(x[0], words), polynomial, 0x00);
    return (uint32_t)_mm_cvtsi128_si32(_mm_srli_si128(_mm_xor_si128(x[0], y), 4));
}
#endif
#undef PART_
#undef ARITHMETIC_
#undef ASSEMBLED_
#undef ASSEMBLE_

/* ---- vectors of GNU C with 4 lanes: NEON of AArch64, simd128 of WebAssembly ---- */

#elif KOPT_PASS_ <= KOPT_PASS_SIMD128_
#define ISA_TARGET_
#define LANES_ ((size_t)4)
#define SPECIALIZED_ 1
#define RUNS_AHEAD_ 0
#define LOOPS_HAVE_L2_ 1
#define AS_(lanes, a) ((K_(lanes))(a)) /* the same bits as other lanes */
#define WORDS_(a) ((vu32_)(a))
#if KOPT_PASS_ == KOPT_PASS_NEON_
#define ISA_ neon
#define IMAX_ 1
#define FP16_ 1
typedef float32x4_t vf32_;
typedef uint32x4_t vu32_, vmask_;
typedef int16x8_t K_(i16);
typedef uint16x8_t K_(u16);
typedef int32x4_t K_(i32);
typedef uint64x2_t K_(u64);
typedef float64x2_t K_(f64);
#else
#define ISA_ simd128
#define GENERIC_FP16_ 1
typedef float vf32_ __attribute__((__vector_size__(16)));
typedef uint32_t vu32_ __attribute__((__vector_size__(16)));
typedef vu32_ vmask_;
typedef signed char K_(i8) __attribute__((__vector_size__(16)));
typedef int16_t K_(i16) __attribute__((__vector_size__(16)));
typedef uint16_t K_(u16) __attribute__((__vector_size__(16)));
typedef int32_t K_(i32) __attribute__((__vector_size__(16)));
typedef uint64_t K_(u64) __attribute__((__vector_size__(16)));
typedef double K_(f64) __attribute__((__vector_size__(16)));
typedef uint32_t K_(unaligned128) __attribute__((__vector_size__(16), __aligned__(1), __may_alias__));
typedef uint64_t K_(unaligned64) __attribute__((__aligned__(1), __may_alias__));
#endif

FN_ vu32_ isplat_(uint32_t a) {
    const vu32_ r = {a, a, a, a};
    return r;
}
FN_ vu32_ K_(block_of_lane)(void) {
    const vu32_ r = {0, 1, 2, 3};
    return r;
}
FN_ vf32_ as_f32_(vu32_ a) { return (vf32_)a; }
FN_ vu32_ K_(add16)(vu32_ a, vu32_ b) { return WORDS_(AS_(u16, a) + AS_(u16, b)); }
FN_ vu32_ K_(mul16)(vu32_ a, vu32_ b) { return WORDS_(AS_(u16, a) * AS_(u16, b)); }
FN_ vmask_ igt_(vu32_ a, vu32_ b) { return WORDS_(AS_(i32, a) > AS_(i32, b)); }
FN_ vmask_ ieq_(vu32_ a, vu32_ b) { return WORDS_(a == b); }
FN_ vmask_ K_(mask_or)(vmask_ a, vmask_ b) { return a | b; }
FN_ vu32_ select_or_zero_(vmask_ m, vu32_ a) { return m & a; }

#if KOPT_PASS_ == KOPT_PASS_NEON_
FN_ vu32_ as_u32_(vf32_ a) { /* opaque: see kopt_as_u32_. Words, or clang sees the floats behind the asm. */
    vu32_ r = WORDS_(a);
    __asm__("" : "+w"(r));
    return r;
}
FN_ vu32_ isplat_hoisted_(uint32_t a) { return as_u32_(as_f32_(isplat_(a))); }
FN_ vf32_ splat_(float x) { return vdupq_n_f32(x); }
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
FN_ vu32_ K_(round_u32)(vf32_ a) { return WORDS_(vcvtnq_s32_f32(a)); }
FN_ vf32_ convert_f32_(vu32_ a) { return vcvtq_f32_s32(AS_(i32, a)); }
FN_ void K_(mulhilo)(vu32_ a, uint32_t b, vu32_ *high, vu32_ *low) {
    const vu32_ x = WORDS_(vmull_n_u32(vget_low_u32(a), b)), y = WORDS_(vmull_n_u32(vget_high_u32(a), b));
    *low = vuzp1q_u32(x, y); /* the even words of both; next line: the odd ones */
    *high = vuzp2q_u32(x, y);
}
FN_ void K_(dot)(vu32_ sum[2], vu32_ a, vu32_ b) {
    sum[0] = WORDS_(vmlal_u32(AS_(u64, sum[0]), vget_low_u32(a), vget_low_u32(b)));
    sum[1] = WORDS_(vmlal_u32(AS_(u64, sum[1]), vget_high_u32(a), vget_high_u32(b)));
}
FN_ int any_true_(vmask_ a) { return vmaxvq_u32(a) != 0; }
FN_ vu32_ select_(vmask_ m, vu32_ yes, vu32_ no) { return vbslq_u32(m, yes, no); }
FN_ K_(f64) K_(load_f64)(const kopt_byte_ *p) { return vcvt_f64_f32((float32x2_t)vld1_u8(p)); }
FN_ vu32_ load32_(const kopt_byte_ *p) { return WORDS_(vld1q_u8(p)); }
FN_ vu32_ load16_(const kopt_byte_ *p) { return vmovl_u16((uint16x4_t)vld1_u8(p)); }
FN_ vu32_ K_(load8)(const kopt_byte_ *p) {
    const int8x8_t a = (int8x8_t)vdup_n_u32(kopt_load32_(p));
    return WORDS_(vmovl_s16(vget_low_s16(vmovl_s8(a))));
}
FN_ vu32_ K_(load8_to16)(const kopt_byte_ *p) { return WORDS_(vmovl_u8(vld1_u8(p))); }
FN_ void store32_(kopt_byte_ *p, vu32_ a) { vst1q_u8(p, (uint8x16_t)a); }
FN_ void K_(store16)(kopt_byte_ *p, vu32_ a) { vst1_u8(p, (uint8x8_t)vmovn_u32(a)); }
FN_ void K_(store8_from16)(kopt_byte_ *p, vu32_ a) { vst1_u8(p, vmovn_u16(AS_(u16, a))); }
FN_ vu32_ K_(interleave_low)(vu32_ a, vu32_ b) { return vzip1q_u32(a, b); }
FN_ vu32_ K_(interleave_high)(vu32_ a, vu32_ b) { return vzip2q_u32(a, b); }
FN_ vu32_ K_(pack_high16)(vu32_ a, vu32_ b) { return WORDS_(vuzp2q_u16(AS_(u16, a), AS_(u16, b))); }
FN_ vu32_ K_(unpack_low16)(vu32_ a) { return vmovl_u16(vget_low_u16(AS_(u16, a))); }
FN_ vu32_ K_(unpack_high16)(vu32_ a) { return vmovl_high_u16(AS_(u16, a)); }
FN_ vf32_ K_(bf16_low)(vu32_ a) { return (vf32_)vzip1q_u16(vdupq_n_u16(0), AS_(u16, a)); }
FN_ vf32_ K_(bf16_high)(vu32_ a) { return (vf32_)vzip2q_u16(vdupq_n_u16(0), AS_(u16, a)); }
FN_ vu32_ K_(flush16)(vu32_ a, vu32_ exponent) { return a & WORDS_(vtstq_u16(AS_(u16, a), AS_(u16, exponent))); }
FN_ vu32_ K_(min16)(vu32_ a, vu32_ b) { return WORDS_(vminq_s16(AS_(i16, a), AS_(i16, b))); }
FN_ vu32_ K_(max16)(vu32_ a, vu32_ b) { return WORDS_(vmaxq_s16(AS_(i16, a), AS_(i16, b))); }
FN_ int K_(any_gt16)(vu32_ a, vu32_ limit) { return vmaxvq_s16(AS_(i16, a)) > vgetq_lane_s16(AS_(i16, limit), 0); }
FN_ vu32_ imax_(vu32_ a, vu32_ b) { return WORDS_(vmaxq_s32(AS_(i32, a), AS_(i32, b))); }
FN_ vf32_ widen_fp16_(vu32_ a) { return vcvt_f32_f16((float16x4_t)vmovn_u32(a)); }
FN_ vu32_ narrow_fp16_(vf32_ a) { return vmovl_u16((uint16x4_t)vcvt_f16_f32(a)); }
FN_ vf32_ K_(load_fp16)(const kopt_byte_ *p) { return vcvt_f32_f16((float16x4_t)vld1_u8(p)); }
FN_ vf32_ K_(fp16_low)(vu32_ a) { return vcvt_f32_f16(vget_low_f16((float16x8_t)a)); }
FN_ vf32_ K_(fp16_high)(vu32_ a) { return vcvt_high_f32_f16((float16x8_t)a); }
FN_ vf32_ K_(round_fp16)(vf32_ x, vu32_ *stored) {
    const float16x4_t half = vcvt_f16_f32(x);
    *stored = vmovl_u16((uint16x4_t)half);
    return vcvt_f32_f16(half);
}
#else /* simd128 */
FN_ vu32_ isplat_hoisted_(uint32_t a) {
    __asm__("" : "+r"(a));
    return isplat_(a);
}
/* opaque: see kopt_as_u32_. clang 19 crashes on a vector as operand of an asm, but 0 may look like a number. */
FN_ vu32_ as_u32_(vf32_ a) { return WORDS_(a) ^ isplat_hoisted_(0); }
FN_ vf32_ splat_(float x) { return (vf32_)isplat_(kopt_as_u32_(x)); }
FN_ vf32_ div_(vf32_ a, vf32_ b) { /* the divisor depends on a: no reciprocal serves two divisions */
    return as_f32_(as_u32_(a / (vf32_)(WORDS_(b) ^ (WORDS_(a) & isplat_hoisted_(0)))));
}
FN_ vf32_ sqrt_(vf32_ a) { return as_f32_(as_u32_(__builtin_wasm_sqrt_f32x4(a))); }
FN_ vu32_ K_(round_u32)(vf32_ a) { return WORDS_(__builtin_convertvector(__builtin_wasm_nearest_f32x4(a), K_(i32))); }
FN_ vf32_ convert_f32_(vu32_ a) { return __builtin_convertvector(AS_(i32, a), vf32_); }
#define SHUFFLE_ __builtin_shufflevector
#define WIDE_(a, i, j) __builtin_convertvector(SHUFFLE_(a, a, i, j), K_(u64))
FN_ vu32_ K_(products)(vu32_ a, vu32_ b) { return WORDS_(WIDE_(a, 0, 1) * WIDE_(b, 0, 1)); } /* of lanes 0 and 1 */
FN_ vu32_ K_(other_products)(vu32_ a, vu32_ b) { return WORDS_(WIDE_(a, 2, 3) * WIDE_(b, 2, 3)); }
FN_ void K_(mulhilo)(vu32_ a, uint32_t b, vu32_ *high, vu32_ *low) {
    const vu32_ factor = isplat_(b), x = K_(products)(a, factor), y = K_(other_products)(a, factor);
    *low = SHUFFLE_(x, y, 0, 2, 4, 6);
    *high = SHUFFLE_(x, y, 1, 3, 5, 7);
}
FN_ void K_(dot)(vu32_ sum[2], vu32_ a, vu32_ b) {
    sum[0] = WORDS_(AS_(u64, sum[0]) + AS_(u64, K_(products)(a, b)));
    sum[1] = WORDS_(AS_(u64, sum[1]) + AS_(u64, K_(other_products)(a, b)));
}
FN_ int any_true_(vmask_ a) { return __builtin_wasm_any_true_v128(AS_(i8, a)) != 0; }
FN_ vu32_ select_(vmask_ m, vu32_ yes, vu32_ no) { return (m & yes) | (~m & no); }
FN_ vu32_ K_(unpack_low16)(vu32_ a) {
    return WORDS_(SHUFFLE_(AS_(u16, a), AS_(u16, isplat_(0)), 0, 8, 1, 8, 2, 8, 3, 8));
}
FN_ vu32_ K_(unpack_high16)(vu32_ a) {
    return WORDS_(SHUFFLE_(AS_(u16, a), AS_(u16, isplat_(0)), 4, 8, 5, 8, 6, 8, 7, 8));
}
FN_ vf32_ K_(bf16_low)(vu32_ a) { return as_f32_(K_(unpack_low16)(a) << 16); }
FN_ vf32_ K_(bf16_high)(vu32_ a) { return as_f32_(K_(unpack_high16)(a) << 16); }
FN_ vu32_ K_(load64)(const kopt_byte_ *p) {
    const K_(u64) a = {*(const K_(unaligned64) *)p, 0};
    return WORDS_(a);
}
FN_ K_(f64) K_(load_f64)(const kopt_byte_ *p) {
    const vf32_ a = as_f32_(K_(load64)(p));
    return __builtin_convertvector(SHUFFLE_(a, a, 0, 1), K_(f64));
}
FN_ vu32_ load32_(const kopt_byte_ *p) { return *(const K_(unaligned128) *)p; }
FN_ vu32_ load16_(const kopt_byte_ *p) { return K_(unpack_low16)(K_(load64)(p)); }
FN_ vu32_ K_(load8)(const kopt_byte_ *p) { /* each byte four times in its word; the arithmetic shift extends the sign */
    const K_(i8) a = AS_(i8, isplat_(kopt_load32_(p)));
    return WORDS_(AS_(i32, SHUFFLE_(a, a, 0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3)) >> 24);
}
FN_ vu32_ K_(load8_to16)(const kopt_byte_ *p) {
    const K_(i8) a = AS_(i8, K_(load64)(p));
    return WORDS_(SHUFFLE_(a, a, 0, 8, 1, 8, 2, 8, 3, 8, 4, 8, 5, 8, 6, 8, 7, 8));
}
FN_ void store32_(kopt_byte_ *p, vu32_ a) { *(K_(unaligned128) *)p = a; }
FN_ void K_(store16)(kopt_byte_ *p, vu32_ a) {
    const K_(u16) x = AS_(u16, a), r = SHUFFLE_(x, x, 0, 2, 4, 6, 0, 2, 4, 6);
    *(K_(unaligned64) *)p = AS_(u64, r)[0];
}
FN_ void K_(store8_from16)(kopt_byte_ *p, vu32_ a) {
    const K_(i8) x = AS_(i8, a), r = SHUFFLE_(x, x, 0, 2, 4, 6, 8, 10, 12, 14, 0, 2, 4, 6, 8, 10, 12, 14);
    *(K_(unaligned64) *)p = AS_(u64, r)[0];
}
FN_ vu32_ K_(interleave_low)(vu32_ a, vu32_ b) { return SHUFFLE_(a, b, 0, 4, 1, 5); }
FN_ vu32_ K_(interleave_high)(vu32_ a, vu32_ b) { return SHUFFLE_(a, b, 2, 6, 3, 7); }
FN_ vu32_ K_(pack_high16)(vu32_ a, vu32_ b) {
    return WORDS_(SHUFFLE_(AS_(u16, a), AS_(u16, b), 1, 3, 5, 7, 9, 11, 13, 15));
}
#undef SHUFFLE_
FN_ vu32_ K_(flush16)(vu32_ a, vu32_ exponent) { return a & ~WORDS_(AS_(i16, a & exponent) == 0); }
FN_ vu32_ K_(gt16)(vu32_ a, vu32_ b) { return WORDS_(AS_(i16, a) > AS_(i16, b)); }
FN_ vu32_ K_(min16)(vu32_ a, vu32_ b) { return select_(K_(gt16)(a, b), b, a); }
FN_ vu32_ K_(max16)(vu32_ a, vu32_ b) { return select_(K_(gt16)(a, b), a, b); }
FN_ int K_(any_gt16)(vu32_ a, vu32_ limit) { return any_true_(K_(gt16)(a, limit)); }
#endif
FN_ vu32_ K_(largest_part)(vu32_ a) { return a; }
/* as_u32_ keeps compilers from joining the operations. */
FN_ vf32_ add_(vf32_ a, vf32_ b) { return as_f32_(as_u32_(a + b)); }
FN_ vf32_ sub_(vf32_ a, vf32_ b) { return as_f32_(as_u32_(a - b)); }
FN_ vf32_ mul_(vf32_ a, vf32_ b) { return as_f32_(as_u32_(a * b)); }
FN_ K_(f64) K_(add_f64)(K_(f64) a, K_(f64) b) { return (K_(f64))as_u32_((vf32_)(a + b)); }
FN_ K_(f64) K_(sub_f64)(K_(f64) a, K_(f64) b) { return (K_(f64))as_u32_((vf32_)(a - b)); }
FN_ K_(f64) K_(mul_f64)(K_(f64) a, K_(f64) b) { return (K_(f64))as_u32_((vf32_)(a * b)); }
FN_ K_(f64) K_(splat_f64)(double x) {
    const K_(f64) r = {x, x};
    return r;
}
#if KOPT_PASS_ == KOPT_PASS_NEON_ && defined(KOPT_CRC_VECTORS_)
static uint32_t kopt_crc_fast_(uint32_t value, const kopt_byte_ *p, size_t n) { /* as that of x86 */
    for (; n > 0; p += 8, n -= 8) value = __crc32d(value, vget_lane_u64(vreinterpret_u64_u8(vld1_u8(p)), 0));
    return value;
}
#endif

#elif KOPT_PASS_ >= KOPT_PASS_CUDA_
#include KAHAN_OPT_CUDA_SELF
#endif

/* ================================================================================================================== */
/* KERNELS: plain C over the vocabulary, written once. docs/numerics.md is their specification.                       */
/* ================================================================================================================== */

/* A step of an element (step_element), or of a pair of vectors (direction_pair, then commit_pair). A stage of a pair
   that meets a special value stores nothing, and scalar code runs it.

       g, m = load gradient and moments           load_pair, load_moment
       x = direction from g and m; updates m      rule (L2 and EMA also read the weight)
       store round(m)                             round_moment, store_moment_pair
       w, residual = load the weight              load_weight, load_weight_pair
       u = rate * x + decay * w                   update
       u += what pulls to the slow weight         lookahead, if due
       w, residual = round(w + residual - u)      commit
       store w and residual                       commit_pair, encode_weight
       copy, count, zero the gradient             encode_copy, tally */

/* Optional operations that the vocabulary of this pass lacks. */
#ifndef shl_
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
FN_ vf32_ K_(max)(vf32_ a, vf32_ b) { return as_f32_(select_(igt_(as_u32_(b), as_u32_(a)), as_u32_(b), as_u32_(a))); }
#endif
#ifndef IMAX_
FN_ vu32_ imax_(vu32_ a, vu32_ b) { return select_(igt_(a, b), a, b); }
#endif

#ifndef CHECK_UNROUNDED_
#define CHECK_UNROUNDED_ 0
#endif

#ifdef GENERIC_FP16_ /* not inlined: the gain in speed is not worth the compile time */
/* Both split a magnitude at 2^-14: low has steps of 2^-24, as subnormals do; high (or 0) is shifted by 13. */
static KOPT_NOINLINE_ ISA_TARGET_ vf32_ widen_fp16_(vu32_ a) {
    const vu32_ mag = and_(a, isplat_(0x7FFFu)), low = as_u32_(min_(as_f32_(mag), as_f32_(isplat_(0x0400u))));
    vu32_ u = iadd_(as_u32_(mul_(convert_f32_(low), splat_(5.9604644775390625e-08f))), shl_(isub_(mag, low), 13));
    u = iadd_(u, select_or_zero_(igt_(mag, isplat_(0x7BFFu)), isplat_(0x38000000u))); /* infinity, NaN */
    u = or_(u, select_or_zero_(igt_(mag, isplat_(0x7C00u)), isplat_(0x00400000u)));   /* a quiet NaN */
    return as_f32_(or_(u, shl_(and_(a, isplat_(0x8000u)), 16)));
}
static KOPT_NOINLINE_ ISA_TARGET_ vu32_ narrow_fp16_(vf32_ a) {
    const vu32_ sign_and_mag = as_u32_(a), mag = and_(sign_and_mag, isplat_(0x7FFFFFFFu));
    const vf32_ low = min_(as_f32_(mag), splat_(6.103515625e-05f)); /* of a NaN: any number */
    const vu32_ high = isub_(mag, as_u32_(low)), odd = and_(shr_(high, 13), isplat_(1));
    /* an ulp of 0.5 is 2^-24: the sum rounds */
    vu32_ u = isub_(as_u32_(add_(low, splat_(0.5f))), isplat_(0x3F000000u));
    u = iadd_(u, shr_(iadd_(iadd_(high, isplat_(0x0FFFu)), odd), 13));
    u = as_u32_(min_(as_f32_(u), as_f32_(isplat_(0x7C00u)))); /* overflow */
    u = or_(u, select_or_zero_(igt_(mag, isplat_(0x7F800000u)),
                               or_(isplat_(0x0200u), and_(shr_(mag, 13), isplat_(0x03FFu)))));
    return or_(u, and_(shr_(sign_and_mag, 16), isplat_(0x8000u)));
}
#endif

/* The scalars of a kopt_step, broadcast, with the names of docs/numerics.md. A GPU loads the first 16 words, which must
   hold all before slow_scale, as vectors. */
typedef struct scalars_ {
    vf32_ grad_scale, l2, weight_decay, beta1, gain1, beta2, gain2, beta3, gain3;
    vf32_ extrapolation; /* beta1 of the Nesterov line (SGD), beta2 of the line for v (Adan) */
    vf32_ third_scale, rate, root_scale, eps;
#ifdef KAHAN_OPT_VMATH
    vf32_ sharpness;
    int smooth;
#endif
    vf32_ slow_scale; /* 1 - lookahead_rate */
    vf32_ feedback;
    int use_scale, use_l2, use_decay, zero_grad, moments_only, unrectified, sync, first_step;
} scalars_;

/* rate, decay: those of the step, or of a tensor (times its rate_scale and stable_scale). */
FN_ scalars_ K_(splat_step)(const kopt_begun_ *s, float rate, float decay, float l2) {
    scalars_ k;
    k.grad_scale = splat_(s->grad_scale);
    k.l2 = splat_(l2);
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
    k.feedback = splat_(0);
    k.rate = splat_(rate);
    k.root_scale = splat_(s->root_scale);
    k.eps = splat_(s->eps);
#ifdef KAHAN_OPT_VMATH
    k.sharpness = splat_(s->sharpness);
    k.smooth = kopt_as_u32_(s->sharpness) << 1 != 0;
#endif
    k.use_scale = LANES_ == 1 || kopt_as_u32_(s->grad_scale) != 0x3F800000u;
    k.use_l2 = kopt_as_u32_(l2) << 1 != 0; /* neither 0 nor -0 */
    k.use_decay = kopt_as_u32_(decay) << 1 != 0;
    k.zero_grad = s->zero_grad;
    k.moments_only = s->moments_only;
    k.unrectified = s->unrectified;
    k.sync = s->sync;
    k.first_step = s->step == 1;
    return k;
}

#if KOPT_PASS_ < KOPT_PASS_CUDA_ /* CUDA has loads, stores and loops of its own */
FN_ scalars_ K_(splat_job)(const kopt_job_ *j) {
    scalars_ k = K_(splat_step)(j->step, j->rate, j->weight_decay, j->l2);
    k.beta1 = splat_(j->beta1);
    k.feedback = splat_(j->feedback);
    return k;
}

/* ---- loads and stores of n lanes ---- */

/* How many of n elements, from element i on, one vector takes. */
FN_ size_t K_(lanes_left)(size_t n, size_t i) { return n - i < LANES_ ? n - i : LANES_; }

/* Loads n elements (1 to LANES_) of 4, 2 (zero-extended) or 1 byte (sign-extended), no more; other lanes are 0. */
FN_ vu32_ K_(load_n)(const kopt_byte_ *p, size_t size, size_t n) {
    kopt_byte_ part[4 * LANES_];
    if (LANES_ > 1 && n < LANES_) p = kopt_copy_padded_(part, sizeof part, p, n * size);
    return size == 4 ? load32_(p) : size == 2 ? load16_(p) : K_(load8)(p);
}

/* Stores the low `size` bytes of the first n lanes, and writes nothing past them. Vectors: size is 4 or 2. */
FN_ void K_(store_n)(kopt_byte_ *p, size_t size, size_t n, vu32_ a) {
    kopt_byte_ part[4 * LANES_], *const to = LANES_ > 1 && n < LANES_ ? part : p;
    if (size == 4)
        store32_(to, a);
    else if (size == 2)
        K_(store16)(to, a);
#ifdef ONE_LANE_
    else
        K_(store8)(to, a);
#endif
    if (LANES_ > 1 && n < LANES_) memcpy(p, part, n * size);
}
#endif

/* NOINLINE_FN_: a function that the passes with vectors do not inline: inlining would double the compile time. On a GPU
   all functions are inlined, so that values stay in registers. */
#if KOPT_PASS_ == KOPT_PASS_SCALAR_
#define NOINLINE_FN_ static KOPT_UNUSED_
#else
#define NOINLINE_FN_ static KOPT_NOINLINE_ ISA_TARGET_
#endif
/* The loops of the headline: where gcc puts them moves the time of small tensors by up to 15 %, and how it schedules
   them after it has chosen registers, that of all by 5 %. */
#if defined(SPECIALIZED_) && defined(KOPT_GCC_) && defined(__OPTIMIZE__) && !defined(__OPTIMIZE_SIZE__) && \
    !defined(__FAST_MATH__) && !defined(__CUDACC__)
#define HOT_FN_ NOINLINE_FN_ __attribute__((__aligned__(64), __optimize__("align-loops=64", "no-schedule-insns2")))
#else
#define HOT_FN_ NOINLINE_FN_
#endif

#ifndef CORE_ONLY_
/* ---- random bits ---- */

/* x[i] = word i of LANES_ Philox blocks, one block per lane: lane l has block `block` + block_of_lane[l]. `block` is a
   multiple of LANES_. Not inlined: a call of vectors serves up to 128 * LANES_ elements. */
HOT_FN_ void K_(philox)(vu32_ x[4], const kopt_philox_key_ *c, uint64_t block) {
    vu32_ x0 = iadd_(isplat_((uint32_t)(block & 0xFFFFFFFFu)), K_(block_of_lane)());
    vu32_ x1 = isplat_((uint32_t)(block >> 32) + c->stream), x2 = isplat_(c->step), x3 = isplat_(c->id);
    vu32_ key0 = isplat_(c->key[0]), key1 = isplat_(c->key[1]), high0, low0, high1, low1;
    int round;
    for (round = 0; round < 7; round++) {
        K_(mulhilo)(x0, 0xD2511F53u, &high0, &low0);
        K_(mulhilo)(x2, 0xCD9E8D57u, &high1, &low1);
        x0 = xor_(xor_(high1, x1), key0);
        x1 = low1;
        x2 = xor_(xor_(high0, x3), key1);
        x3 = low0;
        key0 = iadd_(key0, isplat_(0x9E3779B9u));
        key1 = iadd_(key1, isplat_(0xBB67AE85u));
    }
    x[0] = x0;
    x[1] = x1;
    x[2] = x2;
    x[3] = x3;
}

#ifdef ONE_LANE_
/* r of the element with this global index. Each call takes the element after that of the call before. first: this is
   the first call. x keeps the words of the current Philox block from call to call. */
FN_ vu32_ K_(random_at)(vu32_ x[4], const kopt_philox_key_ *cipher, uint64_t index, int first) {
    const unsigned position = (unsigned)(index & 7);
    uint32_t halves;
    if (position == 0 || first) K_(philox)(x, cipher, kopt_philox_block_(index));
    halves = x[position >> 1];
    if ((position & 1) != 0) halves = halves >> 16 | halves << 16;
    return kopt_random_combine_(halves, index);
}

/* Number k, in the low 16 bits; the bits above are arbitrary. */
FN_ vu32_ K_(random16)(vu32_ r, uint32_t k) { return r + k * (r >> 16); }

FN_ void K_(philox_transpose)(vu32_ w[4], const vu32_ x[4]) { memcpy(w, x, 4 * sizeof w[0]); }
#else
/* Transposes the output of philox into the order of memory: w holds the 4 * LANES_ words, one Philox block after the
   other. K_(block_of_lane) orders the blocks so that these interleavings suffice. */
FN_ void K_(philox_transpose)(vu32_ w[4], const vu32_ x[4]) {
    const vu32_ even_low = K_(interleave_low)(x[0], x[2]), even_high = K_(interleave_high)(x[0], x[2]);
    const vu32_ odd_low = K_(interleave_low)(x[1], x[3]), odd_high = K_(interleave_high)(x[1], x[3]);
    w[0] = K_(interleave_low)(even_low, odd_low);
    w[1] = K_(interleave_high)(even_low, odd_low);
    w[2] = K_(interleave_low)(even_high, odd_high);
    w[3] = K_(interleave_high)(even_high, odd_high);
}

/* The random words of the span that holds this global index, in the order of memory. Fills in (at least) those that the
   elements [from, to) of each group use; `words` has room for the 64 words of a whole group. */
HOT_FN_ void K_(random_span)(uint32_t *words, const kopt_philox_key_ *cipher, uint64_t index, size_t from, size_t to) {
    const uint64_t first_block = kopt_philox_block_(index - (unsigned)(index % KOPT_RANDOM_SPAN_));
    size_t block, i;
    for (block = from / 8 / LANES_ * LANES_; 8 * block < to; block += LANES_) {
        vu32_ x[4], w[4];
        K_(philox)(x, cipher, first_block + block);
        K_(philox_transpose)(w, x);
        for (i = 0; i < 4; i++) store32_((kopt_byte_ *)(words + 4 * block + i * LANES_), w[i]);
    }
}

/* kopt_random_combine_() of (at least) the elements [from, to) of the group that holds this global index. lower: the
   lower halves of r (number 0), upper: the upper halves (2 * other), packed two to a word in the order of memory. */
FN_ void K_(random_group)(uint32_t *lower, uint32_t *upper, const uint32_t *words, uint64_t index, size_t from,
                          size_t to) {
    const vu32_ multiplier = isplat_(kopt_random_multiplier_(index) * 0x00010001u);
    size_t i;
    for (i = from / (2 * LANES_) * LANES_; 2 * i < to; i += LANES_) {
        const vu32_ own = load32_((const kopt_byte_ *)(words + i)), other = or_(shl_(own, 16), shr_(own, 16));
        const vu32_ stride = K_(add16)(other, other);
        store32_((kopt_byte_ *)(lower + i), K_(add16)(own, K_(mul16)(stride, multiplier)));
        store32_((kopt_byte_ *)(upper + i), stride);
    }
}

/* Makes the random numbers of the n elements from this global index on. need_words: r does not hold the words of their
   span yet. last_use: no later tile uses these words; if the n elements lie in one group, only theirs are made. */
HOT_FN_ void K_(fill_random_tile)(kopt_random_tile_ *r, const kopt_philox_key_ *cipher, uint64_t index, size_t n,
                                  int need_words, int last_use) {
    const size_t offset = (unsigned)(index % KOPT_RANDOM_GROUP_);
    const int partial = last_use && offset + n <= KOPT_RANDOM_GROUP_;
    const size_t from = partial ? offset : 0, to = partial ? offset + n : KOPT_RANDOM_GROUP_;
    size_t q;
    for (q = 0; q < offset + n; q += KOPT_RANDOM_GROUP_) {
        const uint64_t group = index - offset + q;
        if (group % KOPT_RANDOM_SPAN_ == 0 || (need_words && q == 0))
            K_(random_span)(r->words, cipher, group, from, to);
        K_(random_group)(r->lower + q / 2, r->upper + q / 2, r->words, group, from, to);
    }
    r->number = (const kopt_byte_ *)r->lower + 2 * offset;
    r->stride = (const kopt_byte_ *)r->upper + 2 * offset;
}
#endif
#endif

/* ---- 8-bit codes ---- */

/* Section 6b. square: 1 for means of squares, whose roots are coded without a sign; 0 for all other numbers. */

FN_ vu32_ K_(abs_u32)(vf32_ x) { return and_(as_u32_(x), isplat_(0x7FFFFFFFu)); }

/* What multiplies a number before it is encoded: 2^24 / scale for a root (far from subnormals), 2 / scale otherwise.
   scale: its fp32 word. */
FN_ vf32_ K_(inverse_scale_q8)(uint32_t scale, int square) {
    return as_f32_(isplat_((square ? 0x8B000000u : 0x7F800000u) - scale));
}

/* The place of a number among the codes, in the upper half. y: the number times inverse_scale_q8(), below 4; or, if it
   is no root, that times 2^power. r: 16 random bits, or 2^15 to round to nearest. The low byte of the place of a number
   that is no root is its code. */
FN_ vu32_ K_(place_q8)(vf32_ y, int square, int power, vu32_ r) {
    const vu32_ u = as_u32_(y);
    vu32_ mag;
    vf32_ c;
    if (square) { /* 8 codes per binade, but 32 in each of the upper four. The place of 0 is 0, of any other above 95 */
        const vu32_ low = shr_(iadd_(u, isplat_(8)), 4);
        const vu32_ high = iadd_(shr_(iadd_(u, isplat_(2)), 2), isplat_(0u - 0x0DC80000u));
        return iadd_(imax_(low, high), r);
    }
    /* 16 codes in each of the upper four binades, then 8, 4, 2, 1: the word, shifted right by 2, as a float. Below
       that, 2^-20 apart. c: 2^16 times the place; adding 2^23 makes it an integer, in the low bits */
    mag = and_(u, isplat_(0x7FFFFFFFu));
    c = min_(as_f32_(iadd_(shr_(iadd_(mag, isplat_(2)), 2), isplat_(0x3AE00000u - ((uint32_t)power << 21)))),
             mul_(as_f32_(mag), as_f32_(isplat_((uint32_t)(127 + 36 - power) << 23))));
    return or_(iadd_(as_u32_(add_(c, splat_(8388608.0f))), r), and_(shr_(u, 8), isplat_(0x00800000u)));
}

#ifdef ONE_LANE_
/* The code as a byte of memory. That of a root is KOPT_ROOT_PLACE_ less than its place, but at least 1; 0 if the place
   is 0. A number above KOPT_LARGEST_Q8_ gets the largest code. */
FN_ vu32_ K_(encode_q8_scalar)(vf32_ y, int square, vu32_ r) {
    const vu32_ u = as_u32_(y), mag = u & 0x7FFFFFFFu;
    uint32_t place;
    if (!square)
        return K_(place_q8)(as_f32_((mag < 0x40780000u ? mag : 0x40780000u) | (u ^ mag)), 0, 0, r) >> 16 & 0xFFu;
    place = K_(place_q8)(y, 1, 0, r) >> 16;
    return place == 0 ? 0 : place > KOPT_ROOT_PLACE_ ? place - KOPT_ROOT_PLACE_ : 1;
}
#endif

/* Decodes a sign-extended byte. The result times the scale is the number, or the root; if it is no root, the result is
   already multiplied by 2^power. */
FN_ vf32_ K_(decode_q8)(vu32_ code, int square, int power) {
    const vu32_ bias = isplat_(0x33000000u - ((uint32_t)power << 21));
    vu32_ u;
    vf32_ c, y;
    if (square) {
        u = and_(shl_(code, 20), isplat_(0x0FF00000u));
        y = min_(as_f32_(iadd_(u, isplat_(0x35900000u))), as_f32_(iadd_(shr_(u, 2), isplat_(0x3B840000u))));
        return as_f32_(select_or_zero_(igt_(u, isplat_(0)), as_u32_(y)));
    }
    c = convert_f32_(and_(code, isplat_(0x7Fu)));
    y = as_f32_(shl_(isub_(as_u32_(K_(max)(c, as_f32_(bias))), bias), 2));
    y = K_(max)(y, mul_(c, as_f32_(isplat_((uint32_t)(127 - 21 + power) << 23))));
    return as_f32_(or_(as_u32_(y), and_(code, isplat_(0x80000000u))));
}

/* ---- rounding ---- */

/* Section 2. Kernels round in 32-bit words whose upper half is the 16-bit number, and whose lower half is cut off: the
   extended bits of section 1 (bf16: the fp32 word itself). A number is ordinary if its magnitude is below the largest
   finite one of the format. Vectors round ordinary numbers only; vectors with any other value go to the scalar code. */

/* Constants of the vector loops. Hoisted, as compilers would otherwise rebuild some of them in each iteration. */
typedef struct constants_ {
    vu32_ one, bias, half_ulp, upper, lower;
    vu32_ exponent, magnitude, bf16_limit; /* of two bf16 in a word: masks, and the largest ordinary magnitude */
    vu32_ abs_mask, subnormal, fp16_limit; /* of an fp32: mask, largest subnormal, largest ordinary one in fp16 */
    vf32_ two_to_minus_14, two_to_40;      /* below 2^-14 fp16 is subnormal, in equal steps */
} constants_;

FN_ constants_ K_(make_constants)(void) {
    constants_ c;
    c.one = isplat_hoisted_(1);
    c.bias = isplat_hoisted_(0x7FFFu);
    c.half_ulp = isplat_hoisted_(0x8000u);
    c.upper = isplat_hoisted_(0xFFFF0000u);
    c.lower = isplat_hoisted_(0xFFFFu);
    c.exponent = isplat_hoisted_(0x7F807F80u);
    c.magnitude = isplat_hoisted_(0x7FFF7FFFu);
    c.bf16_limit = isplat_hoisted_(0x7F7E7F7Eu);
    c.abs_mask = isplat_hoisted_(0x7FFFFFFFu);
    c.subnormal = isplat_hoisted_(0x007FFFFFu);
    c.fp16_limit = isplat_hoisted_(0x477FDFFFu);
    c.two_to_minus_14 = as_f32_(isplat_hoisted_(0x38800000u));
    c.two_to_40 = as_f32_(isplat_hoisted_(0x53800000u));
    return c;
}

FN_ vmask_ K_(is_nan)(vf32_ x) { return igt_(K_(abs_u32)(x), isplat_(0x7F800000u)); }

/* Makes a NaN canonical. With another payload, rounding in vectors could carry and turn the NaN into a number. */
FN_ vf32_ K_(canonical_nan)(vf32_ x) { return as_f32_(select_(K_(is_nan)(x), isplat_(0x7FC00000u), as_u32_(x))); }

#ifdef ONE_LANE_
/* extended() of section 1. */
FN_ vu32_ K_(extended)(vf32_ x, kopt_format format, const constants_ *c) {
    (void)c;
    return format == KOPT_FP16 ? kopt_extended_fp16_(x) : as_u32_(K_(canonical_nan)(x));
}
#else
/* extended() of section 1, for an fp16 magnitude below 2^16. */
FN_ vu32_ K_(extended_fp16)(vu32_ mag, const constants_ *c) {
    const vf32_ low = min_(as_f32_(mag), c->two_to_minus_14);
    return iadd_(shl_(isub_(mag, as_u32_(low)), 3), K_(round_u32)(mul_(low, c->two_to_40)));
}

/* extended() of section 1, for ordinary numbers. */
FN_ vu32_ K_(extended)(vf32_ x, kopt_format format, const constants_ *c) {
    const vu32_ u = as_u32_(x), mag = and_(u, c->abs_mask);
    return format == KOPT_BF16 ? u : or_(K_(extended_fp16)(mag, c), xor_(u, mag));
}
#endif

/* from_extended() of section 1. largest: NULL, or the largest magnitudes so far, one per lane. fp16 magnitudes update
   it, infinity and NaN as a number above fp16_limit, so that the caller hands the vectors to the scalar code. */
FN_ vf32_ K_(from_extended)(vu32_ u, kopt_format format, vu32_ *largest) {
    vu32_ mag = and_(u, isplat_(0x7FFFFFFFu)), low, bits;
    if (format == KOPT_BF16) return as_f32_(u);
    low = as_u32_(min_(as_f32_(mag), as_f32_(isplat_(0x04000000u)))); /* the part up to 2^-14, in units of 2^-40 */
    bits = iadd_(as_u32_(mul_(convert_f32_(low), splat_(9.094947017729282e-13f))), shr_(isub_(mag, low), 3));
    if (largest != NULL) {
        *largest = imax_(*largest, bits);
    } else {
        bits = select_(igt_(mag, isplat_(0x7BFFFFFFu)), isplat_(0x7F800000u), bits);
        bits = select_(igt_(mag, isplat_(0x7C000000u)), isplat_(0x7FC00000u), bits);
    }
    return as_f32_(or_(bits, xor_(u, mag)));
}

/* x rounded to the nearest 16-bit number, ties to even, in the lower half. Takes any value. */
FN_ vu32_ K_(round_nearest16)(vf32_ x, kopt_format format) {
    vu32_ u = as_u32_(x);
    if (format == KOPT_FP16) return select_(K_(is_nan)(x), isplat_(0x7E00u), narrow_fp16_(x));
    u = shr_(iadd_(iadd_(u, isplat_(0x7FFFu)), and_(shr_(u, 16), isplat_(1))), 16);
    return select_(K_(is_nan)(x), isplat_(0x7FC0u), u);
}

#ifndef FP16_
FN_ vf32_ K_(load_fp16)(const kopt_byte_ *p) { return widen_fp16_(load16_(p)); }
FN_ vf32_ K_(round_fp16)(vf32_ x, vu32_ *stored) {
    /* in one lane a NaN becomes the canonical one; vectors hand it to scalar code */
    *stored = LANES_ == 1 ? K_(round_nearest16)(x, KOPT_FP16) : narrow_fp16_(x);
    return widen_fp16_(*stored);
}
#endif

/* x rounded to 16 bits, stochastically or to nearest, in the upper half. r: 16 random bits; vectors need zeros above
   them. In one lane round16 takes any value, and the result is what a step stores. Vectors take ordinary numbers only,
   and their caller flushes bf16. */
#ifndef ONE_LANE_
FN_ vu32_ K_(round16)(vf32_ x, kopt_format format, kopt_rounding how, vu32_ r, const constants_ *c) {
    const vu32_ u = as_u32_(x);
    if (format == KOPT_FP16)
        return how == KOPT_STOCHASTIC ? iadd_(K_(extended)(x, format, c), r) : shl_(narrow_fp16_(x), 16);
    if (how == KOPT_STOCHASTIC) return iadd_(u, r);
    return iadd_(iadd_(u, c->bias), and_(shr_(u, 16), c->one));
}
#else
/* Any value; the upper 16 bits of r do not matter. */
FN_ vu32_ K_(round_stochastic)(vf32_ x, kopt_format format, vu32_ r, const constants_ *c) {
    const vu32_ u = K_(extended)(x, format, c);
    return u + ((u & 0x7FFFFFFFu) > (format == KOPT_BF16 ? 0x7F7EFFFFu : 0x7BFEFFFFu) ? 0x8000u : r & 0xFFFFu);
}

/* A step stores a bf16 below 2^-126 as +0. u: the bf16 in the upper half. */
FN_ vu32_ K_(flush_bf16)(vu32_ u, kopt_format format) { return format == KOPT_BF16 && (u & 0x7F800000u) == 0 ? 0 : u; }

static KOPT_NOINLINE_ ISA_TARGET_ vu32_ K_(round16)(vf32_ x, kopt_format format, kopt_rounding how, vu32_ r,
                                                    const constants_ *c) {
    vu32_ u = K_(extended)(x, KOPT_BF16, c); /* shared with round_stochastic */
    u = how == KOPT_STOCHASTIC ? K_(round_stochastic)(x, format, r, c)
        : format == KOPT_FP16  ? shl_(K_(round_nearest16)(x, format), 16)
                               : u + 0x7FFFu + ((u >> 16) & 1u);
    return K_(flush_bf16)(u, format);
}
#endif

/* What a step stores of an fp32: +0 below 2^-126, and the canonical NaN. */
FN_ vu32_ K_(flush_f32)(vf32_ x) {
#ifdef FLUSH_
    return K_(imin)(as_u32_(K_(flush)(x)), isplat_(0x7FC00000u));
#else
    vu32_ u = as_u32_(x), mag = and_(u, isplat_(0x7FFFFFFFu));
    u = select_or_zero_(igt_(mag, isplat_(0x007FFFFFu)), u);
    return select_(igt_(mag, isplat_(0x7F800000u)), isplat_(0x7FC00000u), u);
#endif
}

/* A stored number as fp32; a: its 32 or 16 bits, zero-extended. */
FN_ vf32_ K_(widen)(vu32_ a, kopt_format format) {
    if (format == KOPT_F32) return as_f32_(a);
    return format == KOPT_BF16 ? as_f32_(shl_(a, 16)) : widen_fp16_(a);
}

#ifdef KAHAN_OPT_VMATH
/* ---- vector mathematics ---- */

/* Functions of one vector. docs/numerics.md has the formulas; `python3 tests/bits/vmath.py coefficients` prints the
   coefficients. exp, log and tanh are not inlined, as many functions call them. */

#define blend_ K_(blend)
#define horner_ K_(horner)
#define horner4_ K_(horner4)
#define abs_ K_(abs)

FN_ vf32_ blend_(vmask_ m, vf32_ yes, vf32_ no) { return as_f32_(select_(m, as_u32_(yes), as_u32_(no))); }
FN_ vf32_ abs_(vf32_ x) { return as_f32_(and_(as_u32_(x), isplat_(0x7FFFFFFFu))); }

/* x, with its magnitude reduced to limit if it is above limit or NaN. The sign stays. */
FN_ vf32_ K_(clamp_abs)(vf32_ x, float limit) {
    const vu32_ u = as_u32_(x), mag = and_(u, isplat_(0x7FFFFFFFu)), end = isplat_(kopt_as_u32_(limit));
    return as_f32_(or_(xor_(u, mag), select_(igt_(mag, end), end, mag)));
}

/* c + x * higher, one step of Horner's method. A polynomial is horner_(x, c0, horner_(x, c1, ... splat_(c_last))). */
FN_ vf32_ horner_(vf32_ x, float c, vf32_ higher) { return add_(mul_(higher, x), splat_(c)); }
FN_ vf32_ horner4_(vf32_ x, float c0, float c1, float c2, float c3, vf32_ higher) {
    return horner_(x, c0, horner_(x, c1, horner_(x, c2, horner_(x, c3, higher))));
}

/* Returns a * b; *error: its exact rounding error (Dekker 1971). Magnitudes below 2^115, products above 2^-100. */
FN_ vf32_ K_(two_product)(vf32_ a, vf32_ b, vf32_ *error) {
    const vf32_ split = splat_(4097.0f), p = mul_(a, b), at = mul_(a, split), bt = mul_(b, split);
    const vf32_ ah = sub_(at, sub_(at, a)), al = sub_(a, ah), bh = sub_(bt, sub_(bt, b)), bl = sub_(b, bh);
    *error = add_(add_(add_(sub_(mul_(ah, bh), p), mul_(ah, bl)), mul_(al, bh)), mul_(al, bl));
    return p;
}

/* e^(x + d), d a small correction of x. With x + d = k log 2 + r, log 2 in two parts (Cody and Waite), it is
   2^k (1 + r + r^2 P(r)). r_error is the rounding error of r, low that of 1 + r. */
NOINLINE_FN_ vf32_ K_(vmath_exp)(vf32_ x, vf32_ d) {
    /* Adding magic = 1.5 * 2^23 rounds to an integer, which is then in the low bits. */
    const vf32_ magic = splat_(12582912.0f), one = splat_(1.0f), a = K_(clamp_abs)(x, 104.0f);
    const vf32_ t = add_(mul_(a, splat_(1.44269504f)), magic), k = sub_(t, magic);
    const vf32_ r0 = sub_(a, mul_(k, splat_(0.693359375f))), c = sub_(d, mul_(k, splat_(-0.000212194440f)));
    const vf32_ r = add_(r0, c), r_error = add_(sub_(r0, r), c), high = add_(one, r), low = sub_(r, sub_(high, one));
    const vf32_ p = horner4_(r, 0.166666672f, 0.0416664518f, 0.00833319779f, 0.00139361445f, splat_(0.000199533533f));
    const vf32_ tail = add_(mul_(mul_(r, r), horner_(r, 0.5f, p)), r_error);
    const vu32_ i = iadd_(isub_(as_u32_(t), as_u32_(magic)), isplat_(512)), i1 = shr_(i, 1), i2 = isub_(i, i1);
    /* 2^k as two factors, so that a subnormal result is rounded only once. */
    vf32_ y = mul_(add_(high, add_(low, tail)), as_f32_(shl_(isub_(i1, isplat_(256 - 127)), 23)));
    y = mul_(y, as_f32_(shl_(isub_(i2, isplat_(256 - 127)), 23)));
    return blend_(igt_(and_(as_u32_(x), isplat_(0x7FFFFFFFu)), isplat_(0x7F800000u)), as_f32_(isplat_(0x7FC00000u)), y);
}

/* log(x) = k log 2 + log(1 + f), where x = 2^k (1 + f) with sqrt(1/2) <= 1 + f < sqrt(2).
   With s = f / (2 + f), log(1 + f) = f - f^2/2 + s (f^2/2 + R(s^2)). */
NOINLINE_FN_ vf32_ K_(vmath_log)(vf32_ x) {
    const vu32_ bits = as_u32_(x);
    /* 0 and subnormals; negative numbers, too, but their result is replaced below */
    const vmask_ tiny = igt_(isplat_(0x00800000u), bits);
    const vu32_ u =
        iadd_(select_(tiny, as_u32_(mul_(x, splat_(8388608.0f))), bits), isplat_(0x3F800000u - 0x3F3504F3u));
    const vf32_ f = sub_(as_f32_(iadd_(and_(u, isplat_(0x007FFFFFu)), isplat_(0x3F3504F3u))), splat_(1.0f));
    const vf32_ k = convert_f32_(isub_(shr_(u, 23), select_(tiny, isplat_(127 + 23), isplat_(127))));
    const vf32_ s = div_(f, add_(splat_(2.0f), f)), z = mul_(s, s), half = mul_(mul_(f, f), splat_(0.5f));
    const vf32_ p = horner_(z, 0.400008112f, horner_(z, 0.285134971f, splat_(0.239589244f)));
    const vf32_ r = sub_(mul_(s, add_(half, mul_(z, horner_(z, 0.666666627f, p)))), half);
    const vf32_ a = mul_(k, splat_(0.693359375f)), high = add_(a, f), low = sub_(f, sub_(high, a));
    vf32_ y = add_(high, add_(low, add_(mul_(k, splat_(-0.000212194440f)), r)));
    y = blend_(igt_(bits, isplat_(0x7F7FFFFFu)), x, y);                   /* +infinity, NaN */
    y = blend_(igt_(isplat_(0), bits), as_f32_(isplat_(0x7FC00000u)), y); /* negative */
    return blend_(ieq_(and_(bits, isplat_(0x7FFFFFFFu)), isplat_(0)), as_f32_(isplat_(0xFF800000u)), y);
}

/* tanh(x) = x + x^3 P(x^2) for |x| < 0.8, else 1 - 2 q / (1 + q) with q = e^(-2 |x|), and the sign of x. */
NOINLINE_FN_ vf32_ K_(vmath_tanh)(vf32_ x) {
    const vf32_ a = abs_(x), z = mul_(a, a), one = splat_(1.0f),
                q = K_(vmath_exp)(mul_(a, splat_(-2.0f)), splat_(0.0f));
    const vf32_ p =
        horner4_(z, -0.0539542474f, 0.0217733867f, -0.00850884989f, 0.0028497458f, splat_(-0.000569574651f));
    const vf32_ below = add_(a, mul_(mul_(a, z), horner_(z, -0.333333313f, horner_(z, 0.133332387f, p))));
    /* 1 + q = d + d_error; 2 q / (1 + q) = w - correction = w - w d_error / d, with 1 / d = 1 - w / 2. */
    const vf32_ d = add_(one, q), d_error = sub_(q, sub_(d, one)), w = div_(mul_(q, splat_(2.0f)), d);
    const vf32_ high = sub_(one, w), correction = mul_(mul_(w, d_error), sub_(one, mul_(w, splat_(0.5f))));
    const vf32_ above = add_(high, add_(sub_(sub_(one, high), w), correction));
    return as_f32_(
        or_(xor_(as_u32_(x), as_u32_(a)), as_u32_(blend_(igt_(as_u32_(splat_(0.8f)), as_u32_(a)), below, above))));
}

/* erf(x) = x + x P(x^2) for 0 <= x < 1. */
FN_ vf32_ K_(vmath_erf_below_1)(vf32_ x) {
    const vf32_ z = mul_(x, x), p = horner_(z, 0.000108587818f, splat_(-8.57798841e-06f));
    const vf32_ q = horner4_(z, 0.112837434f, -0.0268635508f, 0.00521640619f, -0.000842323236f, p);
    return add_(x, mul_(x, horner_(z, 0.128379166f, horner_(z, -0.376126349f, q))));
}

/* erfcx(y) = e^(y^2) erfc(y) = P(t) / (1 + 2 y) with t = (y - 2) / (y + 2), for 0 <= y < 10.9. */
FN_ vf32_ K_(vmath_erfcx)(vf32_ y) {
    const vf32_ two = splat_(2.0f), t = div_(sub_(y, two), add_(y, two));
    vf32_ p = horner_(t, -0.000410605775f, horner_(t, 0.000190243765f, splat_(9.18475271e-05f)));
    p = horner4_(t, -0.00802993868f, 0.00872326922f, 0.00125348219f, -0.00144877564f, p);
    p = horner4_(t, -0.0927638113f, -0.166030198f, 0.164050832f, -0.0542211086f, p);
    return div_(horner_(t, 1.27697837f, p), add_(splat_(1.0f), mul_(two, y)));
}

/* erfc(y) = e^(-y^2) erfcx(y) for y >= 0, with y^2 in two parts. */
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
    const vf32_ a = abs_(x), one = splat_(1.0f), positive = K_(vmath_erfc_positive)(a);
    const vu32_ sign = xor_(as_u32_(x), as_u32_(a));
    const vf32_ below = sub_(one, as_f32_(or_(as_u32_(K_(vmath_erf_below_1)(a)), sign)));
    const vf32_ above = blend_(ieq_(sign, isplat_(0)), positive, sub_(splat_(2.0f), positive));
    const vf32_ y = blend_(igt_(as_u32_(splat_(0.5f)), as_u32_(a)), below, above);
    return blend_(igt_(as_u32_(a), isplat_(0x7F800000u)), x, y);
}

/* q is the smaller of |y| and |x| divided by the larger, atan(q) = q + q^3 P(q^2). The result is atan(q),
   pi/2 -+ atan(q) or pi - atan(q), depending on the octant, with the sign of y. */
FN_ vf32_ K_(vmath_atan2)(vf32_ y, vf32_ x) {
    const vf32_ ay = abs_(y), ax = abs_(x);
    const vu32_ v = as_u32_(ay), u = as_u32_(ax), x_sign = xor_(u, as_u32_(x)), zero = isplat_(0);
    const vmask_ swap = igt_(v, u), nan = K_(mask_or)(igt_(v, isplat_(0x7F800000u)), igt_(u, isplat_(0x7F800000u)));
    const vu32_ largest = select_(swap, v, u), q_sign = xor_(x_sign, select_(swap, isplat_(0x80000000u), zero));
    vf32_ q = div_(blend_(swap, ax, ay), as_f32_(largest)), z, p, high, low;
    z = mul_(q, q);
    p = horner4_(z, -0.0538603701f, 0.0337226987f, -0.0157589912f, 0.004706142f, splat_(-0.000659056939f));
    p = horner4_(z, -0.14283745f, 0.110914007f, -0.0897195861f, 0.0722251087f, p);
    q = add_(q, mul_(mul_(q, z), horner_(z, -0.333333313f, horner_(z, 0.199998975f, p))));
    q = blend_(ieq_(v, u), as_f32_(isplat_(0x3F490FDBu)), q); /* |y| = |x|: pi/4, also if both are infinite */
    q = blend_(ieq_(largest, zero), as_f32_(zero), q);        /* both are 0 */
    /* high + low is pi/2, 0 or pi */
    high = as_f32_(select_(swap, isplat_(0x3FC90FDBu), select_(ieq_(x_sign, zero), zero, isplat_(0x40490FDBu))));
    low = as_f32_(select_(swap, isplat_(0xB33BBD2Eu), select_(ieq_(x_sign, zero), zero, isplat_(0xB3BBBD2Eu))));
    z = add_(high, add_(low, as_f32_(xor_(as_u32_(q), q_sign))));
    z = as_f32_(or_(and_(as_u32_(z), isplat_(0x7FFFFFFFu)), xor_(v, as_u32_(y))));
    return blend_(nan, as_f32_(isplat_(0x7FC00000u)), z);
}

/* Returns the word of sin(pi x); *cosine: that of cos(pi x). x = n/2 + f with |f| <= 1/4. The lower 2 bits of n decide
   which of sin(pi f) = 4 f - f P(f^2) and cos(pi f) = 1 + f^2 Q(f^2) is the result, and its sign. */
FN_ vu32_ K_(sincospi_turned)(vu32_ n, vf32_ f, vu32_ *cosine) {
    const vf32_ z = mul_(f, f);
    const vf32_ p = horner4_(z, 0.858407319f, 5.16771889f, -2.55051947f, 0.606866181f, splat_(-0.135735944f));
    const vf32_ q = horner4_(z, -4.93480206f, 4.05869341f, -1.33446038f, 0.221272752f, splat_(0.0610933602f));
    const vu32_ s = as_u32_(sub_(mul_(f, splat_(4.0f)), mul_(f, p))), c = as_u32_(add_(splat_(1.0f), mul_(z, q)));
    const vmask_ even = ieq_(and_(n, isplat_(1)), isplat_(0));
    *cosine = xor_(select_(even, c, s), shl_(and_(iadd_(n, isplat_(1)), isplat_(2)), 30));
    return xor_(select_(even, s, c), shl_(and_(n, isplat_(2)), 30));
}

/* Returns sin(pi x); *cosine becomes cos(pi x). A zero sine has the sign of x, a zero cosine is +0. */
FN_ vf32_ K_(vmath_sincospi)(vf32_ x, vf32_ *cosine) {
    /* Adding 1.5 * 2^23 rounds to an integer, adding 1.5 * 2^33 to a multiple of 2^10. */
    const vf32_ magic = splat_(12582912.0f), magic_1024 = splat_(12884901888.0f);
    const vu32_ mag = and_(as_u32_(x), isplat_(0x7FFFFFFFu)), sign = xor_(as_u32_(x), mag), zero = isplat_(0);
    const vf32_ a = as_f32_(select_(igt_(mag, isplat_(0x4B7FFFFFu)), zero, mag)); /* 2^24 and above are even: like 0 */
    const vf32_ b = sub_(a, sub_(add_(a, magic_1024), magic_1024)), t = add_(add_(b, b), magic);
    const vmask_ special = igt_(mag, isplat_(0x7F7FFFFFu));
    /* the low bits of t are those of the integer n; b - n/2 is exact */
    vu32_ c, s = K_(sincospi_turned)(as_u32_(t), sub_(b, mul_(sub_(t, magic), splat_(0.5f))), &c);
    s = select_(ieq_(and_(s, isplat_(0x7FFFFFFFu)), zero), sign, xor_(s, sign));
    c = select_(ieq_(and_(c, isplat_(0x7FFFFFFFu)), zero), zero, c);
    *cosine = as_f32_(select_(special, isplat_(0x7FC00000u), c));
    return as_f32_(select_(special, isplat_(0x7FC00000u), s));
}

/* ---- functions from 16 bits to 16 bits ---- */

/* kopt_map() computes f(x) as map_result() of exp, log or tanh of map_argument(), whatever KAHAN_OPT_SLEEF says. */

/* g(|x|) = |x| (c1 + c3 x^2) of GELU's tanh form is the returned value + *remainder. |x| > 12 and NaN count as 12. */
FN_ vf32_ K_(gelu_tanh_argument)(vf32_ x, vf32_ *remainder) {
    /* The square is exact: x has at most 11 significant bits. */
    const vf32_ a = K_(clamp_abs)(abs_(x), 12.0f), c1 = splat_(1.59576917f), square = mul_(a, a);
    vf32_ low, error, p = K_(two_product)(square, splat_(0.0713548139f), &low), sum = add_(c1, p);
    /* Dekker's fast two-sum needs the larger term first: c1 up to |x| = 4.7, p beyond. */
    const vmask_ swap = igt_(as_u32_(p), as_u32_(c1));
    const vf32_ big = blend_(swap, p, c1), little = blend_(swap, c1, p);
    low = add_(low, sub_(little, sub_(sum, big)));
    /* the low parts of c3 and c1 */
    low = add_(low, add_(mul_(square, splat_(2.3988324e-09f)), splat_(-4.53406804e-08f)));
    p = K_(two_product)(a, sum, &error);
    *remainder = add_(error, mul_(a, low));
    return p;
}

/* The argument of exp, log or tanh. */
FN_ vf32_ K_(map_argument)(int f, vf32_ x) {
    const vu32_ minus = isplat_(0x80000000u);
    vf32_ g;
    switch (f) {
    case KOPT_FN_SIGMOID:
    case KOPT_FN_SILU:
    case KOPT_FN_SOFTPLUS:
    case KOPT_SIGMOID_SLOPE_:
    case KOPT_SILU_SLOPE_: return as_f32_(or_(as_u32_(x), minus));
    case KOPT_TANH_SLOPE_: return mul_(as_f32_(or_(as_u32_(x), minus)), splat_(2.0f));
    case KOPT_FN_GELU:
    case KOPT_GELU_SLOPE_: return mul_(mul_(x, x), splat_(-0.5f));
    case KOPT_FN_GELU_TANH:
    case KOPT_GELU_TANH_SLOPE_:
        g = K_(gelu_tanh_argument)(x, &g); /* without the remainder: map_result() uses it */
        x = blend_(igt_(and_(as_u32_(x), isplat_(0x7FFFFFFFu)), isplat_(0x7F800000u)), x, g);
        return as_f32_(or_(as_u32_(x), minus));
    default: return x;
    }
}

/* f(x), given the result q of the function and, for SOFTPLUS, l = log(1 + q). */
FN_ vf32_ K_(map_result)(int f, vf32_ x, vf32_ q, vf32_ l) {
    const int gelu_tanh = f == KOPT_FN_GELU_TANH || f == KOPT_GELU_TANH_SLOPE_;
    const vf32_ one = splat_(1.0f), bounded = K_(clamp_abs)(x, gelu_tanh ? 12.0f : 200.0f); /* bounded * 0 is 0 */
    const vu32_ mag = K_(abs_u32)(x);
    const vmask_ negative = igt_(isplat_(0), as_u32_(x));
    vf32_ d, r = q, s, v, t;
    if (f == KOPT_FN_EXP || f == KOPT_FN_LOG || f == KOPT_FN_TANH) return r;
    if (f == KOPT_FN_GELU || f == KOPT_GELU_SLOPE_) {
        s = K_(vmath_erfcx)(mul_(K_(clamp_abs)(abs_(x), 15.0f), splat_(0.707106769f)));
        s = mul_(mul_(q, splat_(0.5f)), s);
        s = blend_(negative, s, sub_(one, s));
        v = mul_(mul_(bounded, splat_(0.398942292f)), q); /* x P'(x), and s = P(x): the normal distribution */
    } else {
        if (gelu_tanh) {
            K_(gelu_tanh_argument)(x, &t);
            q = sub_(q, mul_(q, t)); /* e^-(g + t) = e^-g (1 - t) */
        }
        d = add_(one, q);
        s = div_(blend_(negative, q, one), d);
        v = div_(blend_(negative, one, q), d);
        if (f == KOPT_TANH_SLOPE_) {
            r = div_(div_(mul_(q, splat_(4.0f)), d), d);
        } else if (f == KOPT_SIGMOID_SLOPE_) {
            r = mul_(s, v);
        } else if (f == KOPT_FN_SOFTPLUS) {
            /* log(1 + q) = log(d) q / (d - 1), which corrects the rounding of d = 1 + q. */
            r = blend_(ieq_(as_u32_(d), as_u32_(one)), q, div_(mul_(l, q), sub_(d, one)));
            r = add_(r, blend_(negative, splat_(0.0f), x));
        }
        v = mul_(mul_(s, v), bounded);
        if (gelu_tanh) /* g' = c1 + 3 c3 x^2 */
            v = mul_(v, add_(splat_(1.59576917f), mul_(mul_(bounded, bounded), splat_(0.214064449f))));
    }
    if (f == KOPT_FN_SIGMOID) r = s;
    if (f == KOPT_FN_SILU || f == KOPT_FN_GELU || f == KOPT_FN_GELU_TANH) {
        r = mul_(blend_(negative, bounded, x), s);
        /* For |x| < 2^-12, f(x) is slightly above x/2. One ulp above x/2 rounds like it, also where x/2 is a tie. */
        l = as_f32_(iadd_(as_u32_(mul_(x, splat_(0.5f))), select_(negative, isplat_(0xFFFFFFFFu), isplat_(1))));
        r = blend_(igt_(isplat_(0x39800000u), mag), blend_(ieq_(mag, isplat_(0)), x, l), r);
    }
    if (f == KOPT_SILU_SLOPE_ || f == KOPT_GELU_SLOPE_ || f == KOPT_GELU_TANH_SLOPE_) {
        r = add_(s, v);
        /* A zero has the sign of x. */
        r = as_f32_(
            or_(as_u32_(r), select_(ieq_(as_u32_(r), isplat_(0)), and_(as_u32_(x), isplat_(0x80000000u)), isplat_(0))));
    }
    return blend_(igt_(mag, isplat_(0x7F800000u)), x, r);
}

/* f(x) correctly rounded to 16 bits, for a 16-bit x. */
FN_ vu32_ K_(map16)(int f, kopt_format format, vu32_ x) {
    const vf32_ wide = K_(widen)(x, format), a = K_(map_argument)(f, wide);
    const vf32_ q = f == KOPT_FN_LOG    ? K_(vmath_log)(a)
                    : f == KOPT_FN_TANH ? K_(vmath_tanh)(a)
                                        : K_(vmath_exp)(a, splat_(0));
    const vf32_ l = f == KOPT_FN_SOFTPLUS ? K_(vmath_log)(add_(q, splat_(1.0f))) : q;
    const int row = 2 * f + (format == KOPT_FP16), last = kopt_map_exception_start_[row + 1];
    vu32_ y = K_(round_nearest16)(K_(map_result)(f, wide, q, l), format);
    int i;
    for (i = kopt_map_exception_start_[row]; i < last; i++) {
        const uint32_t e = kopt_map_exceptions_[i];
        y = select_(ieq_(x, isplat_(e >> 16)), isplat_(e & 0xFFFFu), y);
    }
    return y;
}

/* ---- functions of steps and arrays ---- */

/* atan2(y, x) for x > 0, within 2^-17 (relative; section 6a, where y is m): a polynomial in q, the smaller of |y| and x
   divided by the larger; if |y| is the larger, pi/2 minus the polynomial. The polynomial is a product of factors, which
   saves an operation, and two factors can be computed in parallel. Two infinities give NaN. */
FN_ vf32_ K_(atan2_positive)(vf32_ y, vf32_ x) {
    const vu32_ mag = and_(as_u32_(y), isplat_(0x7FFFFFFFu));
    const vf32_ q = div_(min_(as_f32_(mag), x), K_(max)(x, as_f32_(mag))); /* NaN if y or x is NaN: see min_ */
    const vf32_ z = mul_(q, q);
    const vf32_ a = add_(mul_(add_(z, splat_(1.75760663f)), z), splat_(3.77875996f));
    const vf32_ b = add_(mul_(sub_(z, splat_(3.12811708f)), z), splat_(6.84485292f));
    vf32_ angle = mul_(mul_(mul_(splat_(0.0131872343f), q), sub_(splat_(2.93177509f), z)), mul_(a, b));
    angle = blend_(igt_(mag, as_u32_(x)), sub_(splat_(1.57079637f), angle), angle);
    return as_f32_(or_(as_u32_(angle), and_(as_u32_(y), isplat_(0x80000000u))));
}

#if defined(KAHAN_OPT_SLEEF) && KOPT_PASS_ < KOPT_PASS_CUDA_
/* SLEEF's functions without FMA ("cinz"): they have the same bits in every width. Unless the flags of the file promise
   wide vectors, clang passes them otherwise than SLEEF expects (LLVM issue 64706): then parts of 128 bits go there. */
#if KOPT_PASS_ == KOPT_PASS_NEON_
#define SLEEF_(name, ulp) Sleef_cinz_##name##f4_u##ulp##advsimdnofma
#define SLEEF_VECTOR_ vf32_
#elif KOPT_PASS_ == KOPT_PASS_AVX512_ && (defined(KOPT_GCC_) || defined(__AVX512F__))
#define SLEEF_(name, ulp) Sleef_cinz_##name##f16_u##ulp##avx512fnofma
#define SLEEF_VECTOR_ vf32_
#elif KOPT_PASS_ == KOPT_PASS_AVX2_ && (defined(KOPT_GCC_) || defined(__AVX__))
#define SLEEF_(name, ulp) Sleef_cinz_##name##f8_u##ulp##avx
#define SLEEF_VECTOR_ vf32_
#elif KOPT_PASS_ == KOPT_PASS_SCALAR_ || KOPT_PASS_ == KOPT_PASS_SIMD128_
#define SLEEF_(name, ulp) Sleef_cinz_##name##f1_u##ulp##purec
#define SLEEF_VECTOR_ float
#else
#define SLEEF_(name, ulp) Sleef_cinz_##name##f4_u##ulp##sse2
#define SLEEF_VECTOR_ __m128
#endif
KOPT_EXTERN_ SLEEF_VECTOR_ SLEEF_(exp, 10)(SLEEF_VECTOR_), SLEEF_(log, 10)(SLEEF_VECTOR_),
    SLEEF_(tanh, 10)(SLEEF_VECTOR_), SLEEF_(erf, 10)(SLEEF_VECTOR_), SLEEF_(erfc, 15)(SLEEF_VECTOR_),
    SLEEF_(atan2, 10)(SLEEF_VECTOR_, SLEEF_VECTOR_);

/* exp to atan2 of an array. y: the second argument of atan2. */
FN_ vf32_ K_(function)(kopt_vmath_kind_ kind, vf32_ x, vf32_ y) {
    SLEEF_VECTOR_ a[sizeof(vf32_) / sizeof(SLEEF_VECTOR_)], b[sizeof(vf32_) / sizeof(SLEEF_VECTOR_)];
    size_t i;
    memcpy(a, &x, sizeof x);
    memcpy(b, &y, sizeof y);
    for (i = 0; i < sizeof a / sizeof *a; i++) switch ((int)kind) {
        case KOPT_VMATH_EXP_: a[i] = SLEEF_(exp, 10)(a[i]); break;
        case KOPT_VMATH_LOG_: a[i] = SLEEF_(log, 10)(a[i]); break;
        case KOPT_VMATH_TANH_: a[i] = SLEEF_(tanh, 10)(a[i]); break;
        case KOPT_VMATH_ERF_: a[i] = SLEEF_(erf, 10)(a[i]); break;
        case KOPT_VMATH_ERFC_: a[i] = SLEEF_(erfc, 15)(a[i]); break;
        default: a[i] = SLEEF_(atan2, 10)(a[i], b[i]);
        }
    memcpy(&x, a, sizeof x);
    return K_(canonical_nan)(x);
}
#undef SLEEF_
#undef SLEEF_VECTOR_
FN_ vf32_ K_(step_atan2)(vf32_ y, vf32_ x) { return K_(function)(KOPT_VMATH_ATAN2_, y, x); }
#else
FN_ vf32_ K_(function)(kopt_vmath_kind_ kind, vf32_ x, vf32_ y) {
    switch ((int)kind) {
    case KOPT_VMATH_EXP_: return K_(vmath_exp)(x, splat_(0));
    case KOPT_VMATH_LOG_: return K_(vmath_log)(x);
    case KOPT_VMATH_TANH_: return K_(vmath_tanh)(x);
    case KOPT_VMATH_ERF_: return K_(vmath_erf)(x);
    case KOPT_VMATH_ERFC_: return K_(vmath_erfc)(x);
    default: return K_(vmath_atan2)(x, y);
    }
}
FN_ vf32_ K_(step_atan2)(vf32_ y, vf32_ x) { return K_(atan2_positive)(y, x); }
#endif
FN_ vf32_ K_(step_tanh)(vf32_ x) { return K_(function)(KOPT_VMATH_TANH_, x, x); }

#if !defined(CORE_ONLY_) && KOPT_PASS_ != KOPT_PASS_CUDA_ /* the rest is about arrays: CUDA has loops of its own */

/* Replaces two random words by two independent normal numbers, r cos(pi a) and r sin(pi a) (Box and Muller 1958).
   r = sqrt(-2 log u) with u = (x + 1/2) / 2^32; u is the sum of two floats, as a single one would make small r coarse.
   a = n/2 + f: n is the upper 2 bits of y; f is the other bits, symmetric about 0, as otherwise small results would be
   coarse. */
FN_ void K_(box_muller)(vu32_ *x, vu32_ *y) {
    const vf32_ high = mul_(convert_f32_(shr_(*x, 16)), splat_(1.52587890625e-05f)); /* 2^-16 */
    const vf32_ unit = splat_(2.3283064365386963e-10f);                              /* 2^-32 */
    const vf32_ low = mul_(add_(convert_f32_(and_(*x, isplat_(0xFFFFu))), splat_(0.5f)), unit);
    /* near 1, where it counts, log(u + remainder) = log(u) + remainder */
    const vf32_ u = add_(high, low), remainder = sub_(low, sub_(u, high));
    const vf32_ r = sqrt_(mul_(add_(K_(vmath_log)(u), remainder), splat_(-2.0f)));
    const vu32_ odd = isub_(or_(shl_(*y, 1), isplat_(0x80000001u)), isplat_(0xC0000000u));
    vu32_ c, s = K_(sincospi_turned)(shr_(*y, 30), mul_(convert_f32_(odd), unit), &c);
    *x = as_u32_(mul_(r, as_f32_(c)));
    *y = as_u32_(mul_(r, as_f32_(s)));
}

/* n random numbers. The 4 words of a Philox block make 4 of them. */
FN_ void K_(random_numbers)(const kopt_vmath_job_ *j) {
    const size_t chunk = 4 * LANES_, size = kopt_bytes_of_(j->format);
    const kopt_philox_key_ cipher = kopt_make_philox_key_(j->key.seed, j->key.step, j->key.id, KOPT_RANDOM_NOISE_);
    size_t i, k, n;
    for (i = 0; i < j->n; i += n) {
        const uint64_t index = j->key.first_index + i;
        const size_t offset = (unsigned)(index % chunk);
        kopt_byte_ part[4 * 4 * LANES_];
        vu32_ x[4], w[4];
        n = j->n - i < chunk - offset ? j->n - i : chunk - offset;
        K_(philox)(x, &cipher, (index - offset) >> 2);
        if (j->kind == KOPT_VMATH_NORMAL_) {
            for (k = 0; k < 4; k += 2) K_(box_muller)(&x[k], &x[k + 1]);
        } else {
            for (k = 0; k < 4; k++) /* odd numbers in (-2^24, 2^24) */
                x[k] = as_u32_(mul_(convert_f32_(isub_(or_(shl_(shr_(x[k], 8), 1), isplat_(1)), isplat_(0x01000000u))),
                                    splat_(5.9604644775390625e-08f)));
        }
        K_(philox_transpose)(w, x);
        for (k = 0; k < 4; k++) {
            const vf32_ y = add_(splat_(j->a), mul_(splat_(j->b), as_f32_(w[k])));
            const vu32_ u = size == 4 ? as_u32_(y) : K_(round_nearest16)(y, j->format);
            K_(store_n)(part + k * LANES_ * size, size, LANES_, u);
        }
        memcpy(j->out + i * size, part + offset * size, n * size);
    }
}

/* Runs one job. */
static KOPT_NOINLINE_ ISA_TARGET_ void K_(vmath)(const kopt_vmath_job_ *j) {
    const size_t size = kopt_bytes_of_(j->format);
    size_t i, n;
    if (j->kind == KOPT_VMATH_NORMAL_ || j->kind == KOPT_VMATH_UNIFORM_) {
        K_(random_numbers)(j);
        return;
    }
    for (i = 0; i < j->n; i += n) {
        const kopt_byte_ *const in2 = j->in2 + i * size;
        vu32_ u;
        vf32_ x, y;
        n = K_(lanes_left)(j->n, i);
        u = K_(load_n)(j->in + i * size, size, n);
        x = as_f32_(u);
        switch ((int)j->kind) {
        case KOPT_VMATH_SINCOSPI_:
            x = K_(vmath_sincospi)(x, &y);
            K_(store_n)(j->out2 + i * size, size, n, as_u32_(y));
            break;
        case KOPT_VMATH_MAP_:
        case KOPT_VMATH_MAP_BACKWARD_:
            u = K_(map16)(j->f, j->format, u);
            if (j->kind == KOPT_VMATH_MAP_BACKWARD_) {
                y = mul_(K_(widen)(u, j->format), K_(widen)(K_(load_n)(in2, size, n), j->format));
                u = K_(round_nearest16)(y, j->format);
            }
            x = as_f32_(u);
            break;
        default: x = K_(function)(j->kind, x, as_f32_(K_(load_n)(in2, size, n)));
        }
        K_(store_n)(j->out + i * size, size, n, as_u32_(x));
    }
}
#endif

#undef blend_
#undef horner_
#undef horner4_
#undef abs_
#endif /* KAHAN_OPT_VMATH */

/* ---- rules ---- */

/* Sections 4 to 6a: gradient and moments in, the direction out. It is what the rate multiplies in the update. */

/* The moments of a weight, as in kopt_slot: a rule replaces old by new. root: the roots of the new means of squares;
   root[0]: what the first moment is divided by in the direction, or 1. */
typedef struct moments_ {
    vf32_ x[4], root[4];
} moments_;

/* mean(beta, old, x) of section 6a. square(beta, old, x) is this mean with gain * x as the gain. */
FN_ vf32_ K_(moving_average)(vf32_ beta, vf32_ gain, vf32_ old, vf32_ x) {
    return add_(mul_(beta, old), mul_(gain, x));
}

/* -1, 0 or 1; NaN stays NaN. */
FN_ vf32_ K_(sign)(vf32_ x) {
    vu32_ mag = K_(abs_u32)(x), one = or_(xor_(as_u32_(x), mag), isplat_(0x3F800000u));
    one = select_or_zero_(igt_(mag, isplat_(0)), one);
    return as_f32_(select_(igt_(mag, isplat_(0x7F800000u)), as_u32_(x), one));
}

/* The larger of two magnitudes; NaN if one of them is NaN. */
FN_ vf32_ K_(max_abs)(vf32_ a, vf32_ b) { return as_f32_(imax_(K_(abs_u32)(a), K_(abs_u32)(b))); }

/* A loop over the moments m of a rule. Compilers unroll it, so that m is constant, in a fraction of the time that four
   copies in the source take. The second form is the fastest of clang 19 on x86; older ones, and NEON, lose by it. */
#if defined(KOPT_GCC_) && __GNUC__ >= 8 && !defined(__CUDACC__)
#define EACH_MOMENT_ _Pragma("GCC unroll 4") for (m = 0; m < kind.moment_count; m++)
#elif defined(KOPT_X86_) && defined(__clang__) && __clang_major__ >= 19
#define EACH_MOMENT_        \
    for (m = 0; m < 4; m++) \
        if (m < kind.moment_count)
#else
#define EACH_MOMENT_ for (m = 0; m < 4 && m < kind.moment_count; m++)
#endif

/* One step of the rule: updates the moments *p and returns the direction. g is the gradient as loaded, w the full
   weight or, with KAHAN, the visible one, which decay reads (section 3), compensation that of KAHAN or 0. L2 reads w,
   and KOPT_RULE_EMA reads both; in all other cases they may be anything. */
FN_ vf32_ K_(rule)(kopt_kind_ kind, const scalars_ *k, vf32_ w, vf32_ compensation, vf32_ g, moments_ *p) {
    vf32_ x, denominator;
    p->root[0] = p->root[1] = p->root[2] = p->root[3] = g; /* any value */
    p->root[0] = splat_(1);
    /* section 4: the gradient */
    if ((k->use_scale | k->use_l2) != 0) { /* one test: most steps have neither. A scale of 1 changes no number */
        g = mul_(g, k->grad_scale);
        if (k->use_l2) g = add_(g, mul_(k->l2, w));
    }

    if (kind.rule == KOPT_RULE_SGD) { /* section 5 */
        if (kind.moment_count == 0) return g;
        p->x[0] = K_(moving_average)(k->beta1, k->gain1, p->x[0], g);
        return kind.nesterov ? add_(g, mul_(k->extrapolation, p->x[0])) : p->x[0];
    }
    if (kind.rule == KOPT_RULE_LION) { /* section 6a: Lion */
        x = K_(moving_average)(k->beta1, k->gain1, p->x[0], g);
        p->x[0] = K_(moving_average)(k->beta2, k->gain2, p->x[0], g);
#ifdef KAHAN_OPT_VMATH
        if (k->smooth) return K_(step_tanh)(mul_(k->sharpness, x));
#endif
        return K_(sign)(x);
    }
    /* section 6a: EMA, where w is the average and g are the weights */
    if (kind.rule == KOPT_RULE_EMA) return add_(sub_(w, g), compensation);

    if (kind.rule == KOPT_RULE_ADAN) { /* section 6a: Adan; the fourth moment is the gradient of the step before */
        const vf32_ change = k->first_step ? splat_(0) : sub_(g, p->x[3]);
        p->x[0] = K_(moving_average)(k->beta1, k->gain1, p->x[0], g);
        p->x[2] = K_(moving_average)(k->beta2, k->gain2, p->x[2], change);
        p->x[3] = g;
        g = add_(g, mul_(k->extrapolation, change));
        p->x[1] = K_(moving_average)(k->beta3, mul_(k->gain3, g), p->x[1], g);
        p->root[1] = sqrt_(p->x[1]);
        p->root[0] = add_(mul_(p->root[1], k->root_scale), k->eps);
        return div_(add_(p->x[0], mul_(k->third_scale, p->x[2])), p->root[0]);
    }

    if (kind.rule != KOPT_RULE_ADAM && kind.rule != KOPT_RULE_ADAM_ATAN2)
        return as_f32_(isplat_(0x7FC00000u)); /* no such rule */
    /* sections 6 and 6a: Adam, AMSGrad, StableAdamW, Adam-atan2; RAdam and Ranger: Adam with other scalars */
    p->x[0] = K_(moving_average)(k->beta1, k->gain1, p->x[0], g);
    p->x[1] = K_(moving_average)(k->beta2, mul_(k->gain2, g), p->x[1], g);
    denominator = p->root[1] = sqrt_(p->x[1]);
    if (kind.moment_count > 2) { /* AMSGrad */
        p->x[2] = K_(max_abs)(p->x[2], p->x[1]);
        denominator = p->root[2] = sqrt_(p->x[2]);
    }
    if (k->unrectified) return p->x[0]; /* RAdam and Ranger in their first steps */
    p->root[0] = denominator = add_(mul_(denominator, k->root_scale), k->eps);
#ifdef KAHAN_OPT_VMATH
    if (kind.rule == KOPT_RULE_ADAM_ATAN2) return K_(step_atan2)(p->x[0], denominator);
#endif
    return div_(p->x[0], denominator);
}

/* What is subtracted from the weight w: rate * direction + decay * w. */
FN_ vf32_ K_(update)(const scalars_ *k, vf32_ direction, vf32_ w) {
    vf32_ update = mul_(k->rate, direction);
    if (k->use_decay) update = add_(update, mul_(k->weight_decay, w));
    return update;
}

/* Lookahead (section 6a, Ranger). With the update that it returns the weight becomes
   slow + lookahead_rate * ((w - update) - slow), compensations included. slow_scale is 1 - lookahead_rate. */
FN_ vf32_ K_(lookahead)(vf32_ slow_scale, vf32_ w, vf32_ compensation, vf32_ update, vf32_ slow,
                        vf32_ slow_compensation) {
    return add_(update, mul_(slow_scale, sub_(add_(sub_(w, slow), sub_(compensation, slow_compensation)), update)));
}

/* The ratio of StableAdamW (section 6a): g / larger(sqrt(new second moment) * root_scale, eps). g: the gradient after
   grad_scale and L2; v: the second moment before the step. */
FN_ vf32_ K_(stable_ratio_of)(const scalars_ *k, vf32_ g, vf32_ v) {
    v = K_(moving_average)(k->beta2, mul_(k->gain2, g), v, g);
    return div_(g, K_(max_abs)(mul_(sqrt_(v), k->root_scale), k->eps));
}

/* ---- weights and moments, from and to memory ---- */

/* Does a step with this rounding keep the bits below its 16-bit weights as the residual (COMPACT, EXACT)? */
FN_ int K_(stores_bits)(kopt_kind_ kind) {
    return kind.weight != KOPT_F32 && (kind.rounding == KOPT_EXACT || kind.rounding == KOPT_COMPACT);
}

/* The full weight of COMPACT or EXACT (section 3), from the 16 bits of the weight and its residual: 8 bits,
   sign-extended (COMPACT), or 16 bits, zero-extended (EXACT). A weight that the caller stored may stand beside a
   residual that does not belong to it. If the two together are infinite or NaN, the weight stands alone. With largest
   (see from_extended) such vectors go to the scalar code. */
FN_ vf32_ K_(full_weight)(kopt_rounding rounding, kopt_format format, vu32_ stored, vu32_ residual, vu32_ *largest) {
    vu32_ u;
    if (rounding == KOPT_COMPACT) residual = shl_(residual, 8);
    if (rounding == KOPT_EXACT) residual = isub_(xor_(residual, isplat_(0x8000u)), isplat_(0x8000u));
    u = as_u32_(K_(from_extended)(iadd_(shl_(stored, 16), residual), format, largest));
    if (largest != NULL) return as_f32_(u);
    stored = as_u32_(K_(widen)(and_(stored, isplat_(0xFFFFu)), format));
    return as_f32_(select_(igt_(and_(u, isplat_(0x7FFFFFFFu)), isplat_(0x7F7FFFFFu)), stored, u));
}

/* The weight store of section 3, for 16-bit weights. Returns the new weight, w - update, in the upper half. w: as decay
   reads it; compensation: that of KAHAN. Sets *residual, in the upper half (COMPACT: its low 8 bits). Raises *largest
   to |w - update| where vectors must test it before rounding: with COMPACT and EXACT, in fp16 with NEAREST and
   STOCHASTIC, and with CHECK_UNROUNDED_ always. The caller flushes small bf16 weights, vectors also compensations. */
FN_ vu32_ K_(commit)(kopt_kind_ kind, vf32_ w, vf32_ compensation, vf32_ update, vu32_ r, const constants_ *c,
                     vu32_ *residual, vu32_ *largest) {
    const int kahan = kind.rounding == KOPT_KAHAN;
    vf32_ y, new_w;
    vu32_ u = r;
    if (K_(stores_bits)(kind)) { /* w, y: x, x' of section 3 */
        vu32_ mag;
        y = sub_(w, update);
        mag = and_(as_u32_(y), c->abs_mask);
        *largest = imax_(*largest, mag);
#ifdef FLUSH_
        y = K_(flush)(y);
#else
        y = as_f32_(select_or_zero_(igt_(mag, c->subnormal), as_u32_(y)));
#endif
        u = K_(extended)(y, kind.weight, c);
        if (kind.rounding == KOPT_COMPACT) { /* keeps the upper 8 of the 16 bits below the weight */
#ifdef ONE_LANE_
            r &= 0xFFFFu;
#endif
            u = iadd_(u, kind.residual_rounding == KOPT_STOCHASTIC ? shr_(r, 8) : isplat_(0x80u));
        }
        *residual = shl_(u, kind.rounding == KOPT_COMPACT ? 8 : 16);
        return iadd_(u, c->half_ulp);
    }
    if (kahan) {
        y = sub_(compensation, update);
        new_w = add_(w, y); /* s of section 3, then w' */
        if (CHECK_UNROUNDED_) *largest = imax_(*largest, and_(as_u32_(new_w), c->abs_mask));
        if (kind.weight == KOPT_FP16) {
            new_w = K_(round_fp16)(new_w, &u);
            u = shl_(u, 16);
        } else { /* the compensation keeps the rounding error, so ties need not go to even */
            u = iadd_(K_(extended)(new_w, KOPT_BF16, c), c->half_ulp);
            new_w = as_f32_(and_(u, c->upper));
        }
        y = add_(sub_(w, new_w), y);
        if (kind.weight == KOPT_FP16) y = mul_(y, splat_(2048.0f));
    } else {
        y = sub_(w, update);
        if (kind.weight == KOPT_FP16 || CHECK_UNROUNDED_) *largest = imax_(*largest, and_(as_u32_(y), c->abs_mask));
    }
    *residual = K_(round16)(y, kind.weight, kahan ? kind.residual_rounding : kind.rounding, r, c);
    return kahan ? u : *residual;
}

/* KOPT_FEEDBACK (section 3a): the first moment, less what brings the error of the weight back. x: the direction. Rounds
   the weight as commit does: *stored, in the upper half, before flushing; *largest: its magnitude before, in fp16. */
FN_ vf32_ K_(pay_back)(kopt_kind_ kind, const scalars_ *k, const constants_ *c, vf32_ w, vf32_ x, const moments_ *p,
                       vu32_ r, vu32_ *stored, vu32_ *largest) {
    const uint32_t finite = kind.first == KOPT_BF16 ? 0x7F7F0000u : 0x7F7FFFFFu;
    const vf32_ u = K_(update)(k, x, w), y = sub_(w, u);
    vf32_ error, m;
    *stored = K_(round16)(y, kind.weight, KOPT_STOCHASTIC, r, c);
    if (kind.weight == KOPT_FP16 || CHECK_UNROUNDED_) *largest = and_(as_u32_(y), c->abs_mask);
    error = widen_fp16_(shr_(*stored, 16));
    if (kind.weight == KOPT_BF16)
        error = as_f32_(select_or_zero_(igt_(and_(*stored, c->abs_mask), c->subnormal), and_(*stored, c->upper)));
    error = sub_(sub_(w, error), u);
    m = sub_(p->x[0], mul_(mul_(k->feedback, error), p->root[0]));
    if (LANES_ > 1 && kopt_unbuffered_(kind.first) != KOPT_F32) return m; /* if too large, scalar code is next */
    return as_f32_(select_(igt_(and_(as_u32_(m), c->abs_mask), isplat_(finite)), as_u32_(p->x[0]), as_u32_(m)));
}

/* A moment rounded to 16 bits, in the upper half. rooted: the array is fp16 and stores root, that of a mean of squares,
   in its place; a positive root never becomes 0. */
FN_ vu32_ K_(round_moment)(vf32_ x, kopt_format format, int rooted, vf32_ root, kopt_rounding how, vu32_ r,
                           const constants_ *c) {
    vu32_ u;
    if (!rooted) return K_(round16)(x, format, how, r, c);
#ifndef ONE_LANE_
    if (how == KOPT_STOCHASTIC)
        u = iadd_(K_(extended_fp16)(as_u32_(root), c), r);
    else
#endif
        u = K_(round16)(root, KOPT_FP16, how, r, c);
    return imax_(u, as_u32_(min_(root, as_f32_(isplat_(0x00010000u)))));
}

/* Decodes a stored weight and its residual. Returns the weight as decay reads it; *compensation is that of KAHAN, or 0.
   largest: see from_extended; scalar code passes NULL. */
FN_ vf32_ K_(load_weight)(kopt_kind_ kind, vu32_ stored, vu32_ residual, vf32_ *compensation, vu32_ *largest) {
    *compensation = splat_(0);
    if (K_(stores_bits)(kind)) return K_(full_weight)(kind.rounding, kind.weight, stored, residual, largest);
    if (kind.weight != KOPT_F32 && kind.rounding == KOPT_KAHAN) {
        *compensation = K_(widen)(residual, kind.weight);
        if (kind.weight == KOPT_FP16) *compensation = mul_(*compensation, splat_(1.0f / 2048));
    }
    return K_(widen)(stored, kind.weight);
}

/* An element of each lane, as memory stores it: each number is in the low bits of its word. */
typedef struct element_ {
    vu32_ weight, residual, grad, moment[4], slow, slow_residual;
} element_;

FN_ vf32_ K_(load_moment)(kopt_kind_ kind, const element_ *e, int moment) {
    const vf32_ x = K_(widen)(e->moment[moment], kopt_unbuffered_(kopt_moment_format_(kind, moment)));
    return kopt_holds_root_(kind.second, kind.rule, moment) ? mul_(x, x) : x;
}

/* The ratio of StableAdamW for an element as stored. */
FN_ vf32_ K_(stable_ratio)(kopt_kind_ kind, const scalars_ *k, const element_ *e) {
    vf32_ g = K_(widen)(e->grad, kind.grad), compensation;
    if (k->use_scale) g = mul_(g, k->grad_scale);
    if (k->use_l2) g = add_(g, mul_(k->l2, K_(load_weight)(kind, e->weight, e->residual, &compensation, NULL)));
    return K_(stable_ratio_of)(k, g, K_(load_moment)(kind, e, 1));
}

#ifdef ONE_LANE_
/* ---- scalar code ---- */

/* The scalar code of a step takes any kind and any value. */

/* The weight nearest to an fp32 value, which is given by its bits: an x87 register makes a signaling NaN quiet.
   *residual: what the rounding keeps of the rest. */
FN_ vu32_ K_(split_weight)(kopt_rounding rounding, kopt_format format, vu32_ bits, vu32_ *residual) {
    const vu32_ infinity = format == KOPT_BF16 ? 0x7F80u : 0x7C00u;
    const vf32_ x = as_f32_(bits);
    vu32_ u;
    *residual = 0;
    if (format == KOPT_F32) return bits;
    if (rounding == KOPT_EXACT || rounding == KOPT_COMPACT) {
        u = K_(extended)(x, format, NULL);
        if (rounding == KOPT_COMPACT) u = (u + 0x80u) & 0xFFFFFF00u;
        *residual = rounding == KOPT_COMPACT ? u >> 8 & 0xFFu : u & 0xFFFFu;
        u = (u + 0x8000u) >> 16;
    } else {
        u = K_(round_nearest16)(x, format);
        if (rounding == KOPT_KAHAN && format == KOPT_BF16) /* split() of section 3: ties go away from zero */
            u = (K_(extended)(x, format, NULL) + 0x8000u) >> 16;
        if (rounding == KOPT_KAHAN)
            *residual = K_(round_nearest16)(
                mul_(sub_(x, K_(widen)(u, format)), splat_(format == KOPT_FP16 ? 2048.0f : 1.0f)), format);
    }
    if ((u & infinity) == infinity) *residual = 0;
    return u;
}

/* A new moment as stored, in the low bits; for an fp32 buffer unrounded, a mean of squares as root. r: random bits. */
NOINLINE_FN_ vu32_ K_(encode_moment)(kopt_kind_ kind, int moment, vf32_ x, vf32_ root, vu32_ r) {
    const kopt_format format = kopt_moment_format_(kind, moment);
    const int rooted = kopt_holds_root_(kind.second, kind.rule, moment);
    const constants_ c = K_(make_constants)();
    if (kopt_has_scales_(format)) return as_u32_(rooted ? root : x);
    if (format == KOPT_F32) return K_(flush_f32)(x);
    return K_(round_moment)(x, format, rooted, root, kopt_moment_rounding_(kind, moment),
                            K_(random16)(r, (uint32_t)moment + 1), &c) >>
           16;
}

/* The first stage of an element: updates its moments. Returns the direction. */
FN_ vf32_ K_(direction)(kopt_kind_ kind, const scalars_ *k, vf32_ w, vf32_ compensation, element_ *e, vu32_ r) {
    moments_ p;
    vf32_ x;
    int m;
    p.x[0] = p.x[1] = p.x[2] = p.x[3] = w; /* any value: a rule reads only the moments that it has */
    EACH_MOMENT_ p.x[m] = K_(load_moment)(kind, e, m);
    x = K_(rule)(kind, k, w, compensation, K_(widen)(e->grad, kind.grad), &p);
    if (kind.feedback) {
        const constants_ c = K_(make_constants)();
        vu32_ stored, largest = 0;
        p.x[0] = K_(pay_back)(kind, k, &c, w, x, &p, K_(random16)(r, 0), &stored, &largest);
    }
    EACH_MOMENT_ e->moment[m] = K_(encode_moment)(kind, m, p.x[m], p.root[m], r);
    return x;
}

/* The second stage of an element: updates its weight and residual. sync: with Lookahead. Returns the update. */
FN_ vf32_ K_(commit_element)(kopt_kind_ kind, const scalars_ *k, vf32_ direction, vf32_ w, vf32_ compensation,
                             element_ *e, vu32_ r, int sync) {
    const vu32_ infinity = kind.weight == KOPT_BF16 ? 0x7F80u : 0x7C00u;
    const constants_ c = K_(make_constants)();
    vu32_ residual = 0, largest = 0;
    vf32_ slow_compensation, update = K_(update)(k, direction, w);
    if (sync) {
        const vf32_ slow = K_(load_weight)(kind, e->slow, e->slow_residual, &slow_compensation, NULL);
        update = K_(lookahead)(k->slow_scale, w, compensation, update, slow, slow_compensation);
    }
    if (k->moments_only) return update;
    if (kind.weight == KOPT_F32) {
        e->weight = K_(flush_f32)(sub_(w, update));
        return update;
    }
    e->weight = K_(commit)(kind, w, compensation, update, K_(random16)(r, 0), &c, &residual, &largest);
    e->weight = K_(flush_bf16)(e->weight, kind.weight) >> 16;
    e->residual = (e->weight & infinity) == infinity ? 0 : residual >> 16; /* infinite or NaN: 0 */
    return update;
}

/* The new weight for the copy (section 8). */
FN_ vu32_ K_(encode_copy)(kopt_kind_ kind, const element_ *e, kopt_format format) {
    const vf32_ w = K_(widen)(e->weight, kind.weight);
    return format == KOPT_F32 ? as_u32_(w) : K_(round_nearest16)(w, format);
}

/* Counts a weight (kopt_counts): was the update not 0, did the weight move, and if not, did its residual? */
static KOPT_UNUSED_ KOPT_HOST_DEVICE_ void K_(tally)(kopt_counts *counts, vu32_ update, int moved, int residual_moved) {
    const int wanted = (update & 0x7FFFFFFFu) != 0, still = wanted && !moved;
    counts->wanted += wanted != 0;
    counts->still += still != 0;
    counts->stuck += still && !residual_moved;
}

#if KOPT_PASS_ == KOPT_PASS_SCALAR_
FN_ vu32_ K_(load_at)(const kopt_byte_ *p, size_t i, size_t size) { return K_(load_n)(p + i * size, size, 1); }
FN_ void K_(store_at)(kopt_byte_ *p, size_t i, size_t size, vu32_ a) { K_(store_n)(p + i * size, size, 1, a); }

/* Runs these stages (KOPT_DIRECTION_STAGE_ ...) of element i. r: its random bits. If the first stage runs alone, it
   stores the direction in *x_buffer. If the second stage runs without the first, it takes it from there. */
FN_ void K_(step_element)(const kopt_job_ *j, kopt_kind_ kind, const scalars_ *k, size_t i, vu32_ r, int stages,
                          kopt_byte_ *x_buffer) {
    const size_t weight_size = kopt_bytes_of_(kind.weight), grad_size = kopt_bytes_of_(kind.grad);
    const size_t residual_size = kopt_bytes_of_residual_(kind.weight, kind.rounding);
    const int extras = (stages & KOPT_FINAL_STAGE_) != 0, sync = extras && k->sync;
    vf32_ w, compensation, x, update;
    element_ e = {0, 0, 0, {0, 0, 0, 0}, 0, 0}, old;
    int m;
    e.weight = K_(load_at)(j->weight, i, weight_size);
    if (residual_size != 0) e.residual = K_(load_at)(j->residual, i, residual_size);
    old = e;
    w = K_(load_weight)(kind, e.weight, e.residual, &compensation, NULL);
    if ((stages & KOPT_DIRECTION_STAGE_) != 0) {
        e.grad = K_(load_at)(j->grad, i, grad_size);
        EACH_MOMENT_ e.moment[m] = K_(load_at)(j->moment[m], i, kopt_moment_bytes_(kind, m));
        x = K_(direction)(kind, k, w, compensation, &e, r);
        EACH_MOMENT_ K_(store_at)(j->moment[m], i, kopt_moment_bytes_(kind, m), e.moment[m]);
        if (stages == KOPT_DIRECTION_STAGE_) {
            store32_(x_buffer, as_u32_(K_(canonical_nan)(x)));
            return;
        }
    } else {
        x = as_f32_(load32_(x_buffer));
    }
    if (sync) {
        e.slow = K_(load_at)(j->slow, i, weight_size);
        if (residual_size != 0) e.slow_residual = K_(load_at)(j->slow_residual, i, residual_size);
    }
    update = K_(commit_element)(kind, k, x, w, compensation, &e, r, sync);
    if (!k->moments_only) {
        K_(store_at)(j->weight, i, weight_size, e.weight);
        if (residual_size != 0) K_(store_at)(j->residual, i, residual_size, e.residual);
        if (sync) { /* the new slow weight */
            K_(store_at)(j->slow, i, weight_size, e.weight);
            if (residual_size != 0) K_(store_at)(j->slow_residual, i, residual_size, e.residual);
        }
        if (extras && j->copy != NULL)
            K_(store_at)(j->copy, i, kopt_bytes_of_(j->copy_format), K_(encode_copy)(kind, &e, j->copy_format));
    }
    if (extras && j->counts != NULL) {
        const uint32_t stored = residual_size == 0 ? 0 : residual_size == 1 ? 0xFFu : 0xFFFFu;
        K_(tally)(j->counts, as_u32_(update), e.weight != old.weight, ((e.residual ^ old.residual) & stored) != 0);
    }
    if (extras && k->zero_grad) K_(store_at)(j->grad, i, grad_size, 0);
}

/* Runs these stages of the elements i to i + n - 1. x: an fp32 buffer as for step_element, or NULL. pair: 0, or the
   buffer holds a pair of so many elements, first the even ones, then the odd ones. */
static KOPT_NOINLINE_ KOPT_UNUSED_ void kopt_step_elements_scalar_(const kopt_job_ *j, size_t i, size_t n, int stages,
                                                                   kopt_byte_ *x, size_t pair) {
    const scalars_ k = K_(splat_job)(j);
    const kopt_kind_ kind = kopt_kind_of_(j);
    const kopt_philox_key_ cipher = kopt_make_philox_key_(j->step->seed, j->step->step, j->id, j->stream);
    const int random = kopt_needs_random_(kind);
    vu32_ words[4];
    size_t q;
    for (q = 0; q < n; q++) {
        const size_t offset = 4 * (pair != 0 ? q % 2 * (pair / 2) + q / 2 : q);
        const vu32_ r = random ? K_(random_at)(words, &cipher, j->first + i + q, q == 0) : 0;
        K_(step_element)(j, kind, &k, i + q, r, stages, x == NULL ? x : x + offset);
    }
}

/* Steps the elements [begin, end): all stages of an element, then the next element. */
NOINLINE_FN_ void K_(walk)(const kopt_job_ *j, size_t begin, size_t end) {
    kopt_step_elements_scalar_(j, begin, end - begin, KOPT_ALL_STAGES_, NULL, 0);
}

NOINLINE_FN_ void K_(step)(const kopt_job_ *j) {
    if (kopt_has_blocks_(j->step))
        kopt_run_blocks_(j);
    else
        K_(walk)(j, j->begin, j->end);
}
#endif

#else /* vectors */
/* ---- pairs of vectors ---- */

/* The loops step two vectors at a time: a pair. Its elements are in the order of memory, or (EVEN_ODD_) one vector has
   the even and the other the odd elements. Those are the low and the high halves of 32-bit words, so bf16 needs no
   operation that crosses lanes. A function has one order in registers; what it loads and stores in another format, and
   what it hands on to a stage with another order, is reordered. */
#define EVEN_ODD_ 1

/* The order of a stage whose arrays are in this format: the moments in the first stage, the weights in the second one.
   x, w and compensation of a tile are in the order of the second stage. */
#ifdef REORDER_
#define ORDER_(format) ((format) == KOPT_BF16 ? EVEN_ODD_ : 0)
#else
#define ORDER_(format) 0
#endif

/* The 16-bit numbers of the first or the second vector of a pair, zero-extended. */
FN_ vu32_ K_(random_half)(vu32_ both, int second, int order, const constants_ *c) {
    if (order == EVEN_ODD_) return second ? shr_(both, 16) : and_(both, c->lower);
    return second ? K_(unpack_high16)(both) : K_(unpack_low16)(both);
}

/* One vector of a pair: its new moments, unrounded and rounded. */
typedef struct half_pair_ {
    moments_ moments;
    vu32_ u[4];    /* rounded moments, in the upper halves */
    vu32_ largest; /* the largest magnitude before rounding (fp16; with CHECK_UNROUNDED_ bf16, too) */
    vu32_ weight;  /* FEEDBACK: new weights, in the upper halves; largest has the magnitudes of those in fp16, too */
} half_pair_;

/* The rule, and the rounding of its moments, for the first or the second vector of a pair. number: number 0 of both
   vectors, stride: 2 * other (see kopt_random_combine_). */
FN_ vf32_ K_(direction_half)(kopt_kind_ kind, const scalars_ *k, const constants_ *c, vf32_ w, vf32_ compensation,
                             vf32_ g, vu32_ number, vu32_ stride, int second, int order, half_pair_ *h) {
    const vf32_ x = K_(rule)(kind, k, w, compensation, g, &h->moments);
    vu32_ largest = isplat_(0);
    int m;
    h->u[0] = h->u[1] = h->u[2] = h->u[3] = number; /* any value */
    h->weight = largest;
    if (kind.feedback)
        h->moments.x[0] = K_(pay_back)(kind, k, c, w, x, &h->moments, K_(random_half)(number, second, order, c),
                                       &h->weight, &largest);
    h->largest = largest;
    if (kopt_unbuffered_(kind.first) == KOPT_F32 && kopt_unbuffered_(kind.second) == KOPT_F32) return x;
    EACH_MOMENT_ {
        const kopt_format format = kopt_moment_format_(kind, m);
        const vf32_ moment = h->moments.x[m], root = h->moments.root[m];
        const int rooted = kopt_holds_root_(kind.second, kind.rule, m);
        number = K_(add16)(number, stride);
        if (kopt_unbuffered_(format) == KOPT_F32) continue;
        h->u[m] = K_(round_moment)(moment, format, rooted, root, kopt_moment_rounding_(kind, m),
                                   K_(random_half)(number, second, order, c), c);
        if (format == KOPT_FP16 || CHECK_UNROUNDED_)
            largest = imax_(largest, and_(as_u32_(rooted ? root : moment), c->abs_mask));
    }
    h->largest = largest; /* once: clang keeps h in memory */
    return x;
}

#ifndef CORE_ONLY_
#define PAIR_ (2 * LANES_)
typedef struct pair_ {
    vf32_ a, b;
} pair_;

/* A pair in another order: from and to are 0 or EVEN_ODD_. */
FN_ pair_ K_(reorder)(pair_ x, int from, int to) {
#ifdef REORDER_
    if (from < to) K_(deinterleave)(x.a, x.b, &x.a, &x.b);
    if (from > to) K_(interleave)(x.a, x.b, &x.a, &x.b);
#endif
    (void)from, (void)to;
    return x;
}

/* LANES_ numbers of an fp32 buffer, and two vectors of it. */
FN_ vf32_ K_(load_f32)(const float *p) { return as_f32_(load32_((const kopt_byte_ *)p)); }
FN_ void K_(store_f32)(float *p, vf32_ x) { store32_((kopt_byte_ *)p, as_u32_(x)); }
FN_ pair_ K_(load_f32_pair)(const float *p) {
    pair_ x;
    x.a = K_(load_f32)(p);
    x.b = K_(load_f32)(p + LANES_);
    return x;
}
FN_ void K_(store_f32_pair)(float *p, pair_ x) {
    K_(store_f32)(p, x.a);
    K_(store_f32)(p + LANES_, x.b);
}

/* Prefetches the lines of a pair 2 KB behind element i. A burst of a whole tile would make the loads behind it wait. */
FN_ void K_(prefetch_pair)(const kopt_byte_ *p, size_t i, size_t bytes) {
    size_t q;
    for (q = 0; q < PAIR_ * bytes; q += 64) KOPT_PREFETCH_(p + i * bytes + 2048 + q);
}

/* The random numbers of the pair at element i of a tile, two to a word: number 0 and 2 * other of each element. */
typedef struct random_pair_ {
    vu32_ number, stride;
} random_pair_;

/* Loads the elements i to i + PAIR_ - 1 as fp32. */
FN_ pair_ K_(load_pair)(const kopt_byte_ *p, size_t i, kopt_format format, int order, const constants_ *c) {
    pair_ x;
    if (format == KOPT_F32) {
        x.a = as_f32_(load32_(p + 4 * i));
        x.b = as_f32_(load32_(p + 4 * (i + LANES_)));
        return K_(reorder)(x, 0, order);
    }
    if (format == KOPT_FP16) {
        x.a = K_(load_fp16)(p + 2 * i);
        x.b = K_(load_fp16)(p + 2 * (i + LANES_));
        return K_(reorder)(x, 0, order);
    }
    if (order != 0) {
        const vu32_ both = load32_(p + 2 * i);
        x.a = as_f32_(shl_(both, 16));
        x.b = as_f32_(and_(both, c->upper));
        return x;
    }
#ifdef LOADS_EXTEND_
    x.a = as_f32_(shl_(load16_(p + 2 * i), 16));
    x.b = as_f32_(shl_(load16_(p + 2 * (i + LANES_)), 16));
#else
    x.a = K_(bf16_low)(load32_(p + 2 * i));
    x.b = K_(bf16_high)(load32_(p + 2 * i));
#endif
    return x;
}

/* Packs the upper halves of a pair, two to a word, in the order of memory. */
FN_ vu32_ K_(pack_pair)(vu32_ a, vu32_ b, int order) {
#ifdef REORDER_
    if (order != 0) return K_(interleave_high16)(a, b);
#endif
    (void)order;
    return K_(pack_high16)(a, b);
}

/* Loads a pair of weights as decay reads them, and KAHAN's compensations, else 0. largest: see from_extended. */
FN_ pair_ K_(load_weight_pair)(const kopt_job_ *j, kopt_kind_ kind, size_t i, int order, const constants_ *c,
                               pair_ *compensation, vu32_ *largest) {
    pair_ w;
    compensation->a = compensation->b = splat_(0);
    if (K_(stores_bits)(kind)) {
        const int exact = kind.rounding == KOPT_EXACT;
        kopt_rounding rounding = kind.rounding;
        const kopt_byte_ *const residual = j->residual + (exact ? 2 * i : i), *const weight = j->weight + 2 * i;
        vu32_ a, b, residual_a, residual_b;
        if (order != 0) {
            const vu32_ residuals = exact ? load32_(residual) : shl_(K_(load8_to16)(residual), 8); /* 16 bits each */
            a = load32_(weight);
            b = shr_(a, 16);
            residual_a = and_(residuals, c->lower);
            residual_b = shr_(residuals, 16);
            rounding = KOPT_EXACT; /* what a residual of 16 bits means */
        } else {
            a = load16_(weight);
            b = load16_(weight + 2 * LANES_);
            residual_a = exact ? load16_(residual) : K_(load8)(residual);
            residual_b = exact ? load16_(residual + 2 * LANES_) : K_(load8)(residual + LANES_);
        }
        w.a = K_(full_weight)(rounding, kind.weight, a, residual_a, largest);
        w.b = K_(full_weight)(rounding, kind.weight, b, residual_b, largest);
        return w;
    }
    if (kind.weight != KOPT_F32 && kind.rounding == KOPT_KAHAN) {
        *compensation = K_(load_pair)(j->residual, i, kind.weight, order, c);
        if (kind.weight == KOPT_FP16) {
            compensation->a = mul_(compensation->a, splat_(1.0f / 2048));
            compensation->b = mul_(compensation->b, splat_(1.0f / 2048));
        }
    }
    return K_(load_pair)(j->weight, i, kind.weight, order, c);
}

/* The second stage of a pair: updates and stores weights and residuals. w_buffer, compensation_buffer: as in
   direction_pair. number: see random_pair_. Returns 0, with nothing stored, if the pair needs the scalar code. */
FN_ int K_(commit_pair)(const kopt_job_ *j, kopt_kind_ kind, const scalars_ *k, const constants_ *c, size_t i,
                        const float *w_buffer, const float *compensation_buffer, pair_ direction, vu32_ number,
                        int order) {
    const int bf16 = kind.weight == KOPT_BF16, kahan = kind.rounding == KOPT_KAHAN, bits = K_(stores_bits)(kind);
    vu32_ largest = isplat_(0), stored, residual, a, b, residual_a = largest, residual_b = largest;
    pair_ compensation, w;
    if (w_buffer == NULL) {
        w = K_(load_weight_pair)(j, kind, i, order, c, &compensation, &largest);
    } else {
        w = K_(load_f32_pair)(w_buffer);
        compensation = K_(load_f32_pair)(compensation_buffer);
    }
    if (kind.weight == KOPT_F32) {
        store32_(j->weight + 4 * i, K_(flush_f32)(sub_(w.a, K_(update)(k, direction.a, w.a))));
        store32_(j->weight + 4 * (i + LANES_), K_(flush_f32)(sub_(w.b, K_(update)(k, direction.b, w.b))));
        return 1;
    }
    a = K_(commit)(kind, w.a, compensation.a, K_(update)(k, direction.a, w.a), K_(random_half)(number, 0, order, c), c,
                   &residual_a, &largest);
    b = K_(commit)(kind, w.b, compensation.b, K_(update)(k, direction.b, w.b), K_(random_half)(number, 1, order, c), c,
                   &residual_b, &largest);
    stored = K_(pack_pair)(a, b, order);
    residual = K_(pack_pair)(residual_a, residual_b, order);
    if (bf16 && !bits) stored = K_(flush16)(stored, c->exponent);
    if (bf16 ? !bits : kahan) {
        if (K_(any_gt16)(and_(stored, c->magnitude), bf16 ? c->bf16_limit : isplat_(0x7BFF7BFFu))) return 0;
    } else {
        if (any_true_(igt_(largest, bf16 ? isplat_(0x7F7EFFFFu) : c->fp16_limit))) return 0;
    }
    store32_(j->weight + 2 * i, stored);
    if (kahan && bf16) residual = K_(flush16)(residual, c->exponent);
    if (kind.rounding == KOPT_COMPACT)
        K_(store8_from16)(j->residual + i, residual);
    else if (kahan || bits)
        store32_(j->residual + 2 * i, residual);
    return 1;
}

/* Stores the moments of a pair; returns 0, with nothing stored, if it needs the scalar code. The fp32 buffers of
   8-bit moments get unflushed values. */
FN_ int K_(store_moment_pair)(const kopt_job_ *j, kopt_kind_ kind, const constants_ *c, size_t i, const half_pair_ *a,
                              const half_pair_ *b, int order) {
    const int bf16 = kind.first == KOPT_BF16 || kind.second == KOPT_BF16;
    const int fp16 = kind.first == KOPT_FP16 || kind.second == KOPT_FP16;
    vu32_ joint[4], largest16 = isplat_(0);
    int m;
    joint[0] = joint[1] = joint[2] = joint[3] = largest16; /* or gcc warns */
    EACH_MOMENT_ {
        const kopt_format format = kopt_moment_format_(kind, m);
        if (kopt_unbuffered_(format) == KOPT_F32) continue;
        joint[m] = K_(pack_pair)(a->u[m], b->u[m], order);
        if (format == KOPT_BF16) {
            joint[m] = K_(flush16)(joint[m], c->exponent);
            largest16 = m == 0 ? and_(joint[m], c->magnitude) : K_(max16)(largest16, and_(joint[m], c->magnitude));
        }
    }
    if (bf16 && K_(any_gt16)(largest16, c->bf16_limit)) return 0;
    if (fp16 && any_true_(igt_(imax_(a->largest, b->largest), c->fp16_limit))) return 0;
    EACH_MOMENT_ {
        const kopt_format format = kopt_moment_format_(kind, m);
        const int rooted = kopt_holds_root_(kind.second, kind.rule, m), q8 = kopt_has_scales_(format);
        const vf32_ x = rooted ? a->moments.root[m] : a->moments.x[m];
        const vf32_ y = rooted ? b->moments.root[m] : b->moments.x[m];
        if (kopt_unbuffered_(format) != KOPT_F32) {
            store32_(j->moment[m] + 2 * i, joint[m]);
            continue;
        }
        store32_(j->moment[m] + 4 * i, q8 ? as_u32_(x) : K_(flush_f32)(x));
        store32_(j->moment[m] + 4 * (i + LANES_), q8 ? as_u32_(y) : K_(flush_f32)(y));
    }
    return 1;
}

/* The first stage of a pair: updates the moments. *x: the direction. w_buffer, compensation_buffer: the weights in
   fp32, if the rule or FEEDBACK reads them; NULL: they are loaded from memory, and FEEDBACK, which rounds bf16 weights
   here, stores them, too. Returns 0, with nothing stored, if the pair needs the scalar code. */
FN_ int K_(direction_pair)(const kopt_job_ *j, kopt_kind_ kind, const scalars_ *k, const constants_ *c, size_t i,
                           const float *w_buffer, const float *compensation_buffer, const random_pair_ *r, int order,
                           pair_ *x) {
    const pair_ g = K_(load_pair)(j->grad, i, kind.grad, order, c);
    pair_ w = g, compensation = g;
    half_pair_ a, b;
    int m;
    if (k->use_l2 || kind.rule == KOPT_RULE_EMA || kind.feedback) {
        if (w_buffer == NULL) {
            w = K_(load_weight_pair)(j, kind, i, order, c, &compensation, NULL);
        } else {
            w = K_(reorder)(K_(load_f32_pair)(w_buffer), ORDER_(kind.weight), order);
            compensation = K_(reorder)(K_(load_f32_pair)(compensation_buffer), ORDER_(kind.weight), order);
        }
    }
    for (m = 0; m < 4; m++) a.moments.x[m] = b.moments.x[m] = g.a; /* any value: a rule reads only those that it has */
    EACH_MOMENT_ {
        const kopt_format format = kopt_unbuffered_(kopt_moment_format_(kind, m));
        const pair_ moment = K_(load_pair)(j->moment[m], i, format, order, c);
        const int rooted = kopt_holds_root_(kind.second, kind.rule, m);
        a.moments.x[m] = rooted ? mul_(moment.a, moment.a) : moment.a;
        b.moments.x[m] = rooted ? mul_(moment.b, moment.b) : moment.b;
    }
    x->a = K_(direction_half)(kind, k, c, w.a, compensation.a, g.a, r->number, r->stride, 0, order, &a);
    x->b = K_(direction_half)(kind, k, c, w.b, compensation.b, g.b, r->number, r->stride, 1, order, &b);
    /* A NaN of another format can have bits below those of a bf16: rounding could carry and make it a number. */
    if (kind.grad != kind.weight || (kind.moment_count > 0 && kopt_unbuffered_(kind.first) != kind.weight) ||
        (kind.moment_count > 1 && kopt_unbuffered_(kind.second) != kind.weight)) {
        if (any_true_(K_(mask_or)(K_(is_nan)(x->a), K_(is_nan)(x->b)))) return 0;
    }
    if (kind.feedback) {
        const vu32_ stored = K_(flush16)(K_(pack_pair)(a.weight, b.weight, order), c->exponent);
        if (kind.weight == KOPT_BF16 ? K_(any_gt16)(and_(stored, c->magnitude), c->bf16_limit)
                                     : any_true_(igt_(imax_(a.largest, b.largest), c->fp16_limit)))
            return 0;
        if (!K_(store_moment_pair)(j, kind, c, i, &a, &b, order)) return 0;
        if (w_buffer == NULL) store32_(j->weight + 2 * i, stored);
        return 1;
    }
    return kind.moment_count == 0 || K_(store_moment_pair)(j, kind, c, i, &a, &b, order);
}

/* ---- 8-bit moments in fp32 buffers ---- */

/* docs/numerics.md, section 6b. square: the moment is a mean of squares, and codes and buffer hold its root. */

/* decode_q8 for a pair, times 2^power. Nothing is rounded, so the operations may differ from those of decode_q8. */
FN_ pair_ K_(decode_pair)(const kopt_byte_ *code, int square, int power) {
    pair_ x;
    if (square) { /* the upper halves of decode_q8 */
        const vu32_ codes = K_(load8_to16)(code), both = isplat_((uint32_t)power * 0x00800080u);
        const vu32_ low = iadd_(shl_(codes, 4), iadd_(isplat_(0x35903590u), both));
        const vu32_ high = iadd_(shl_(codes, 2), iadd_(isplat_(0x3B843B84u), both));
        const vu32_ minus_codes = K_(mul16)(codes, isplat_(0xFFFFFFFFu)); /* bits 8 to 15 are set, if it is not 0 */
        const vu32_ roots = K_(flush16)(K_(min16)(low, high), minus_codes);
        x.a = K_(bf16_low)(roots);
        x.b = K_(bf16_high)(roots);
    } else {
        x.a = K_(decode_q8)(K_(load8)(code), 0, power);
        x.b = K_(decode_q8)(K_(load8)(code + LANES_), 0, power);
    }
    return x;
}

/* Multiplies n elements of a buffer, and those behind them up to the end of a pair. */
NOINLINE_FN_ void K_(multiply)(float *x, vf32_ factor, size_t n) {
    size_t i;
    for (i = 0; i < n; i += LANES_) K_(store_f32)(x + i, mul_(K_(load_f32)(x + i), factor));
}

FN_ void K_(decode_blocks)(float *buffer, const kopt_byte_ *code, const kopt_byte_ *scale, int square, size_t n) {
    kopt_byte_ part[KOPT_BLOCK_];
    size_t i, k;
    for (i = 0; i < n; i += KOPT_BLOCK_) {
        const uint32_t exponent = scale[i / KOPT_BLOCK_];
        const int folds = kopt_scale_folds_(exponent), power = folds ? (int)exponent - 127 : 0;
        const kopt_byte_ *const from =
            n - i < KOPT_BLOCK_ ? kopt_copy_padded_(part, sizeof part, code + i, n - i) : code + i;
        for (k = 0; k < KOPT_BLOCK_; k += PAIR_)
            K_(store_f32_pair)(buffer + i + k, K_(decode_pair)(from + k, square, power));
        if (!folds) K_(multiply)(buffer + i, as_f32_(isplat_(kopt_scale_q8_(exponent))), KOPT_BLOCK_);
    }
}

/* Decodes n codes, from the first one of a block on, into an fp32 buffer, which needs room for whole blocks. */
NOINLINE_FN_ void K_(decode_tile)(float *buffer, const kopt_byte_ *code, const kopt_byte_ *scale, int square,
                                  size_t n) {
    if (square)
        K_(decode_blocks)(buffer, code, scale, 1, n);
    else
        K_(decode_blocks)(buffer, code, scale, 0, n);
}

/* number: the 16-bit random numbers of the pair, two to a word, in the order of memory. inverse: of roots only. */
FN_ void K_(encode_pair)(kopt_byte_ *code, const float *x, vf32_ inverse, int square, int power, vu32_ number,
                         const constants_ *c) {
    vf32_ x0 = K_(load_f32)(x), x1 = K_(load_f32)(x + LANES_);
    vu32_ a, b, places;
    if (square) x0 = mul_(x0, inverse);
    if (square) x1 = mul_(x1, inverse);
    a = K_(place_q8)(x0, square, power, K_(random_half)(number, 0, 0, c));
    b = K_(place_q8)(x1, square, power, K_(random_half)(number, 1, 0, c));
    places = K_(pack_high16)(a, b);
    if (square) /* as in encode_q8_scalar */
        places = K_(max16)(K_(add16)(places, isplat_((0x10000u - KOPT_ROOT_PLACE_) * 0x00010001u)),
                           K_(min16)(places, isplat_(0x00010001u)));
    K_(store8_from16)(code, places);
}

/* The scales of n elements of a buffer, from the first one of a block on. Limits elements to what has a code. */
NOINLINE_FN_ void K_(find_scales)(kopt_byte_ *scale, float *buffer, int square, size_t n) {
    uint32_t lane[LANES_];
    vu32_ x[4], even, odd;
    size_t i, k;
    for (i = n; i % PAIR_ != 0; i++) buffer[i] = 0; /* vectors read them */
    for (k = 0; k < 4; k++) { /* the largest magnitudes of block k, as fp32 bits: in each lane some of them */
        const size_t end = n < (k + 1) * KOPT_BLOCK_ ? n : (k + 1) * KOPT_BLOCK_;
        vu32_ largest = isplat_(0);
        for (i = k * KOPT_BLOCK_; i < end; i += LANES_) largest = imax_(largest, K_(abs_u32)(K_(load_f32)(buffer + i)));
        x[k] = largest;
    }
    even = imax_(K_(interleave_low)(x[0], x[2]), K_(interleave_high)(x[0], x[2])); /* of blocks 0 2 0 2 */
    odd = imax_(K_(interleave_low)(x[1], x[3]), K_(interleave_high)(x[1], x[3]));
    store32_((kopt_byte_ *)lane,
             K_(largest_part)(imax_(K_(interleave_low)(even, odd), K_(interleave_high)(even, odd)))); /* 0 1 2 3 */
    for (k = 0; k * KOPT_BLOCK_ < n; k++) {
        scale[k] = (kopt_byte_)kopt_exponent_q8_(lane[k], square);
        if (scale[k] == 254)
            kopt_saturate_(buffer + k * KOPT_BLOCK_, n - k * KOPT_BLOCK_ < KOPT_BLOCK_ ? n % KOPT_BLOCK_ : KOPT_BLOCK_);
    }
}

/* number, stride: the random numbers of the tile; number is NULL: round to nearest. */
FN_ void K_(encode_blocks)(kopt_byte_ *code, const kopt_byte_ *scale, float *buffer, int square, int moment,
                           const kopt_byte_ *number, const kopt_byte_ *stride, size_t n) {
    const constants_ c = K_(make_constants)();
    const vu32_ store_number = isplat_hoisted_(((uint32_t)moment + 1) * 0x00010001u);
    kopt_byte_ part[KOPT_BLOCK_];
    size_t i, k;
    for (i = 0; i < n; i += KOPT_BLOCK_) {
        const uint32_t exponent = scale[i / KOPT_BLOCK_], scale_bits = kopt_scale_q8_(exponent);
        const vf32_ inverse = K_(inverse_scale_q8)(scale_bits, square);
        const int folds = kopt_scale_folds_(exponent), power = folds ? (int)exponent - 128 : 0;
        const size_t left = n - i < KOPT_BLOCK_ ? n - i : KOPT_BLOCK_;
        kopt_byte_ *const to = left == KOPT_BLOCK_ ? code + i : part;
        if (kopt_codes_are_zero_(scale_bits)) {
            memset(code + i, 0, left);
            continue;
        }
        if (!square && !folds) K_(multiply)(buffer + i, inverse, left);
        for (k = 0; k < left; k += PAIR_) {
            const size_t at = 2 * (i + k);
            vu32_ numbers = isplat_(0x80008000u);
            if (number != NULL)
                numbers = K_(add16)(load32_(number + at), K_(mul16)(load32_(stride + at), store_number));
            K_(encode_pair)(to + k, buffer + i + k, inverse, square, power, numbers, &c);
        }
        if (to == part) memcpy(code + i, part, left);
    }
}

/* Encodes n elements of a buffer, whose scales find_scales found. Changes the buffer. */
NOINLINE_FN_ void K_(encode_tile)(kopt_byte_ *code, const kopt_byte_ *scale, float *buffer, int square, int moment,
                                  kopt_rounding rounding, const kopt_random_tile_ *r, size_t n) {
    const kopt_byte_ *const number = rounding == KOPT_NEAREST ? NULL : r->number;
    if (square)
        K_(encode_blocks)(code, scale, buffer, 1, moment, number, r->stride, n);
    else
        K_(encode_blocks)(code, scale, buffer, 0, moment, number, r->stride, n);
}

/* ---- stages of a tile ---- */

/* First stage: computes x, and stores the moments. order: that of the pairs in it. */
FN_ void K_(direction_tile)(kopt_tile_ *t, kopt_kind_ kind, int order) {
    const kopt_job_ a = t->job; /* a copy: the stores do not change its pointers */
    const scalars_ k = K_(splat_job)(&t->job);
    const constants_ c = K_(make_constants)();
    const kopt_byte_ *const number = t->random.number, *const stride = t->random.stride;
    const size_t n = t->job.end;
    const int prefetches = RUNS_AHEAD_ && t->prefetches && kind.first == KOPT_F32 && kind.second == KOPT_F32;
    size_t i;
    int m;
    for (i = 0; i < n; i += PAIR_) {
        random_pair_ r;
        pair_ x;
        r.number = load32_(number + 2 * i);
        r.stride = load32_(stride + 2 * i);
        if (prefetches) {
            K_(prefetch_pair)(a.grad, i, kopt_bytes_of_(kind.grad));
            EACH_MOMENT_ K_(prefetch_pair)(a.moment[m], i, 4);
        }
        if (!K_(direction_pair)(&a, kind, &k, &c, i, t->w + i, t->compensation + i, &r, order, &x)) {
            kopt_stage_in_scalar_(t, KOPT_DIRECTION_STAGE_, i, PAIR_);
            continue;
        }
        K_(store_f32_pair)(t->x + i, K_(reorder)(x, order, ORDER_(kind.weight)));
    }
}

/* Second stage: steps and stores weights and residuals, from x. */
FN_ void K_(commit_tile)(kopt_tile_ *t, kopt_kind_ kind) {
    const kopt_job_ a = t->job; /* a copy: stores of a stage do not change its pointers */
    const scalars_ k = K_(splat_job)(&t->job);
    const constants_ c = K_(make_constants)();
    const kopt_byte_ *const number = t->random.number;
    const size_t n = t->job.end;
    const int prefetches = RUNS_AHEAD_ && kind.weight == KOPT_F32 && t->prefetches;
    const int loaded = kind.weight == KOPT_FP16 && t->is_loaded; /* bf16 is loaded as fast from memory */
    size_t i;
    for (i = 0; i < n; i += PAIR_) {
        if (prefetches) K_(prefetch_pair)(a.weight, i, 4);
        if (!K_(commit_pair)(&a, kind, &k, &c, i, loaded ? t->w + i : NULL, loaded ? t->compensation + i : NULL,
                             K_(load_f32_pair)(t->x + i), load32_(number + 2 * i), ORDER_(kind.weight)))
            kopt_stage_in_scalar_(t, KOPT_COMMIT_STAGE_, i, PAIR_);
    }
}

/* ---- functions of the stages ---- */

/* Each line of DIRECTIONS_ and COMMITS_ makes one function of a stage, K_(name), with the values of the line as
   constants:

       DIRECTIONS_    LINE_(name, rule, other rule, moments, formats of the first and the second, FEEDBACK?)
       COMMITS_       LINE_(name, format of the weights, rounding, other rounding)

   A line may serve two rules or roundings, told apart by a test per vector; a line for one names it twice. ANY_ matches
   every value, which is then tested at run time. KOPT_Q8 stands for the fp32 buffers of 8-bit moments. The first line
   that matches a step is taken. A step that lacks a line is stepped by STAGES_ISA_, with the same bits. */
#define ANY_ 99
/* clang-format off */
#define COMMITS_F32_BF16_(LINE_) \
    LINE_(commit_f32, KOPT_F32, ANY_, ANY_) \
    LINE_(commit_bf16_kahan, KOPT_BF16, KOPT_KAHAN, KOPT_KAHAN) \
    LINE_(commit_bf16_nearest_stochastic, KOPT_BF16, KOPT_NEAREST, KOPT_STOCHASTIC) \
    LINE_(commit_bf16_compact_exact, KOPT_BF16, KOPT_COMPACT, KOPT_EXACT)
#define DIRECTIONS_USED_MOST_(LINE_) \
    LINE_(direction_adam_bf16, KOPT_RULE_ADAM, KOPT_RULE_ADAM, 2, KOPT_BF16, KOPT_BF16, 0) \
    LINE_(direction_adam_f32, KOPT_RULE_ADAM, KOPT_RULE_ADAM, 2, KOPT_F32, KOPT_F32, 0) \
    LINE_(direction_momentum_lion_bf16, KOPT_RULE_SGD, KOPT_RULE_LION, 1, KOPT_BF16, KOPT_BF16, 0) \
    LINE_(direction_momentum_lion_f32, KOPT_RULE_SGD, KOPT_RULE_LION, 1, KOPT_F32, KOPT_F32, 0) \
    LINE_(direction_sgd, KOPT_RULE_SGD, KOPT_RULE_SGD, 0, KOPT_F32, KOPT_F32, 0)
#if KOPT_PASS_ == KOPT_PASS_AVX2_
#define DIRECTIONS_OF_SET_(LINE_) \
    LINE_(direction_adam_buffered, KOPT_RULE_ADAM, KOPT_RULE_ADAM, 2, KOPT_Q8, KOPT_Q8, 0) \
    LINE_(direction_adam_mixed, KOPT_RULE_ADAM, KOPT_RULE_ADAM, 2, KOPT_BF16, KOPT_Q8, ANY_) \
    LINE_(direction_adam_buffered_feedback, KOPT_RULE_ADAM, KOPT_RULE_ADAM, 2, KOPT_Q8, KOPT_Q8, 1) \
    LINE_(direction_adam_fp16, KOPT_RULE_ADAM, KOPT_RULE_ADAM, 2, KOPT_FP16, KOPT_FP16, 0) \
    LINE_(direction_momentum_lion_fp16, KOPT_RULE_SGD, KOPT_RULE_LION, 1, KOPT_FP16, KOPT_FP16, 0) \
    LINE_(direction_any_bf16, ANY_, ANY_, ANY_, KOPT_BF16, KOPT_BF16, 0) \
    LINE_(direction_any_f32, ANY_, ANY_, ANY_, KOPT_F32, KOPT_F32, 0)
#elif KOPT_PASS_ == KOPT_PASS_AVX512_
#define DIRECTIONS_OF_SET_(LINE_) \
    LINE_(direction_adam_buffered, KOPT_RULE_ADAM, KOPT_RULE_ADAM, 2, KOPT_Q8, KOPT_Q8, 0) \
    LINE_(direction_adam_mixed, KOPT_RULE_ADAM, KOPT_RULE_ADAM, 2, KOPT_BF16, KOPT_Q8, ANY_) \
    LINE_(direction_adam_buffered_feedback, KOPT_RULE_ADAM, KOPT_RULE_ADAM, 2, KOPT_Q8, KOPT_Q8, 1)
#else
#define DIRECTIONS_OF_SET_(LINE_)
#endif
#ifdef STAGES_ISA_ /* AVX-512 beside AVX2 */
#define DIRECTIONS_(LINE_) DIRECTIONS_USED_MOST_(LINE_) DIRECTIONS_OF_SET_(LINE_)
#define COMMITS_(LINE_) COMMITS_F32_BF16_(LINE_) LINE_(commit_fp16, KOPT_FP16, ANY_, ANY_)
#define OTHER_STAGES_ &KOPT_GLUE_(kopt_stages_, STAGES_ISA_)
#else
#define DIRECTIONS_(LINE_) \
    DIRECTIONS_USED_MOST_(LINE_) \
    DIRECTIONS_OF_SET_(LINE_) \
    LINE_(direction_ema, KOPT_RULE_EMA, KOPT_RULE_EMA, 0, KOPT_F32, KOPT_F32, 0) \
    LINE_(direction_any, ANY_, ANY_, ANY_, ANY_, ANY_, ANY_)
#define COMMITS_(LINE_) COMMITS_F32_BF16_(LINE_) LINE_(commit_fp16, KOPT_FP16, ANY_, ANY_)
#define OTHER_STAGES_ NULL
#endif
/* clang-format on */

#define MATCHES_(value, first, second) ((first) == ANY_ || (int)(value) == (first) || (int)(value) == (second))

/* The value that MATCHES_ found: a constant, or one of two. */
FN_ int K_(one_of)(int value, int first, int second) { return first == ANY_ ? value : value == first ? first : second; }

#define LINE_(name, line_rule, other_rule, line_moments, line_first, line_second, line_feedback) \
    NOINLINE_FN_ void K_(name)(kopt_tile_ * t) {                                                 \
        kopt_kind_ kind = t->kind;                                                               \
        const int rule = K_(one_of)((int)kind.rule, line_rule, other_rule);                      \
        const int first = K_(one_of)((int)kind.first, line_first, line_first);                   \
        const int second = K_(one_of)((int)kind.second, line_second, line_second);               \
        kind.rule = (kopt_rule)rule;                                                             \
        kind.first = (kopt_format)first;                                                         \
        kind.second = (kopt_format)second;                                                       \
        if ((line_moments) != ANY_) kind.moment_count = line_moments;                            \
        kind.feedback = K_(one_of)(kind.feedback, line_feedback, line_feedback);                 \
        K_(direction_tile)(t, kind, ((line_first) == (line_second)) * ORDER_(line_first));       \
    }
DIRECTIONS_(LINE_)
#undef LINE_
#define LINE_(name, line_format, line_rounding, other_rounding)                             \
    NOINLINE_FN_ void K_(name)(kopt_tile_ * t) {                                            \
        kopt_kind_ kind = t->kind;                                                          \
        const int rounding = K_(one_of)((int)kind.rounding, line_rounding, other_rounding); \
        kind.weight = line_format;                                                          \
        kind.rounding = (kopt_rounding)rounding;                                            \
        K_(commit_tile)(t, kind);                                                           \
    }
COMMITS_(LINE_)
#undef LINE_

/* The functions of the two stages of a kind of step; 0: this list lacks one. */
static int K_(find_stages)(const kopt_kind_ *kind, kopt_stage_ **direction, kopt_stage_ **commit) {
#define LINE_(name, line_rule, other_rule, line_moments, line_first, line_second, line_feedback)                     \
    if (*direction == NULL && MATCHES_(kind->rule, line_rule, other_rule) &&                                         \
        MATCHES_(kind->feedback, line_feedback, line_feedback) &&                                                    \
        MATCHES_(kind->moment_count, line_moments, line_moments) && MATCHES_(kind->first, line_first, line_first) && \
        MATCHES_(kind->second, line_second, line_second))                                                            \
        *direction = K_(name);
    *direction = NULL;
    DIRECTIONS_(LINE_)
#undef LINE_
#define LINE_(name, line_format, line_rounding, other_rounding)                                                      \
    if (*commit == NULL && kind->weight == (line_format) && MATCHES_(kind->rounding, line_rounding, other_rounding)) \
        *commit = K_(name);
    *commit = NULL;
    COMMITS_(LINE_)
#undef LINE_
    return *direction != NULL && *commit != NULL;
}

/* ---- weights of a tile in fp32, and its updates ---- */

/* Loads the n weights at `weight` into w as decay reads them, and their compensations (KOPT_KAHAN; 0 for other
   roundings). Reads and writes whole pairs. residual: NULL if there is none. */
NOINLINE_FN_ void K_(load_weights)(kopt_byte_ *weight, kopt_byte_ *residual, const kopt_kind_ *actual, size_t n,
                                   float *w, float *compensation) {
    const kopt_kind_ kind = *actual;
    const constants_ c = K_(make_constants)();
    kopt_job_ a;
    size_t i;
    a.weight = weight;
    a.residual = residual;
    for (i = 0; i < n; i += PAIR_) {
        pair_ r;
        K_(store_f32_pair)(w + i, K_(load_weight_pair)(&a, kind, i, ORDER_(kind.weight), &c, &r, NULL));
        K_(store_f32_pair)(compensation + i, r);
    }
}

/* Replaces x by the update of each weight, with Lookahead if the step synchronizes the slow weights of Ranger. */
NOINLINE_FN_ void K_(update_tile)(kopt_tile_ *t) {
    const kopt_job_ *const j = &t->job;
    const size_t size = kopt_bytes_of_(t->kind.weight);
    const size_t residual_size = kopt_bytes_of_residual_(t->kind.weight, t->kind.rounding);
    const scalars_ k = K_(splat_job)(j);
    size_t i, q;
    for (i = 0; i < j->end; i += PAIR_) {
        float slow[PAIR_], slow_compensation[PAIR_];
        kopt_byte_ *const residual = k.sync && residual_size != 0 ? j->slow_residual + i * residual_size : NULL;
        if (k.sync) K_(load_weights)(j->slow + i * size, residual, &t->kind, PAIR_, slow, slow_compensation);
        for (q = 0; q < PAIR_; q += LANES_) {
            const vf32_ w = K_(load_f32)(t->w + i + q);
            vf32_ update = K_(update)(&k, K_(load_f32)(t->x + i + q), w);
            if (k.sync)
                update = K_(lookahead)(k.slow_scale, w, K_(load_f32)(t->compensation + i + q), update,
                                       K_(load_f32)(slow + q), K_(load_f32)(slow_compensation + q));
            K_(store_f32)(t->x + i + q, update);
        }
    }
}

static void K_(convert)(const kopt_conversion_ *c);

static const kopt_stages_ K_(stages) = {
    PAIR_,           ORDER_(KOPT_BF16) != 0, K_(fill_random_tile), K_(decode_tile), K_(find_scales),
    K_(encode_tile), K_(load_weights),       K_(find_stages),      K_(update_tile), K_(convert),
    OTHER_STAGES_};

#ifdef SPECIALIZED_
/* ---- specialized loops ---- */

/* The most common kinds of step have a loop of their own, in which rule, formats and roundings are all constants. It
   steps whole pairs, and takes no step with a copy or other extras (`step` has the list). */

/* Second stage of a pair. Scalar code takes the pair if commit_pair refuses it. */
FN_ void K_(commit_pair_or_scalar)(const kopt_job_ *whole, const kopt_job_ *a, kopt_kind_ kind, const scalars_ *k,
                                   const constants_ *c, size_t i, pair_ x, vu32_ number, int order) {
    float buffer[PAIR_];
    if (K_(commit_pair)(a, kind, k, c, i, NULL, NULL, x, number, order)) return;
    K_(store_f32_pair)(buffer, x);
    kopt_step_elements_scalar_(whole, i, PAIR_, KOPT_COMMIT_STAGE_, KOPT_BYTES_(buffer), order != 0 ? PAIR_ : 0);
}

/* Steps whole pairs from element `begin` on, whose global index has to be a multiple of PAIR_. Returns the first
   element behind the last pair. With RUNS_AHEAD_ Kahan AdamW is pipelined: it commits a pair while the divisions of the
   next one are in flight. Adding 8 * stride to number 0 gives that at the same place of the next group, so one run of
   Philox serves the 16 groups of a span. */
FN_ size_t K_(specialized)(const kopt_job_ *whole, kopt_kind_ kind, size_t begin) {
    const kopt_job_ a = *whole; /* a copy: stores of a stage do not change its pointers */
    const kopt_begun_ *s = whole->step;
    const kopt_philox_key_ cipher = kopt_make_philox_key_(s->seed, s->step, whole->id, whole->stream);
    const constants_ c = K_(make_constants)();
    const int random = kopt_needs_random_(kind), order = ORDER_(kind.weight);
    const int pipelined = RUNS_AHEAD_ && kind.rule == KOPT_RULE_ADAM && kind.rounding == KOPT_KAHAN;
    const int prefetches = kopt_prefetches_(kind, whole->end - begin, KOPT_CORE_CACHE_);
    const vu32_ next_group = isplat_(KOPT_RANDOM_STORES_ * 0x00010001u);
    scalars_ k = K_(splat_job)(whole);
    kopt_random_tile_ tile;
    random_pair_ last;
    pair_ pending;
    size_t i = begin, n = 0, q;
    int m;
    if (!LOOPS_HAVE_L2_ || kind.rule == KOPT_RULE_EMA) k.use_l2 = 0; /* see `step` */
    k.unrectified = k.first_step = 0;
    if (kind.rule == KOPT_RULE_EMA) k.use_decay = k.zero_grad = 0; /* refused: see kopt_judge_options_ */
    last.number = last.stride = isplat_(0);
    pending.a = pending.b = as_f32_(last.number);
    for (; whole->end - i >= PAIR_; i += n) {
        const uint64_t index = whole->first + i;
        const size_t in_group = (unsigned)(index % KOPT_RANDOM_GROUP_);
        const int continues = n == KOPT_RANDOM_GROUP_ && index % KOPT_RANDOM_SPAN_ != 0;
        kopt_byte_ *const number = KOPT_BYTES_(tile.lower) + 2 * in_group;
        const kopt_byte_ *const stride = KOPT_BYTES_(tile.upper) + 2 * in_group;
        n = KOPT_RANDOM_GROUP_ - in_group;
        if (whole->end - i < n) n = (whole->end - i) / PAIR_ * PAIR_;
        if (random && !continues) K_(fill_random_tile)(&tile, &cipher, index, n, 1, n < KOPT_RANDOM_GROUP_);
        for (q = i; q < i + n; q += PAIR_) {
            random_pair_ r = last;
            pair_ x;
            if (prefetches) {
                K_(prefetch_pair)(a.weight, q, kopt_bytes_of_(kind.weight));
                K_(prefetch_pair)(a.grad, q, kopt_bytes_of_(kind.grad));
                EACH_MOMENT_ K_(prefetch_pair)(a.moment[m], q, kopt_bytes_of_(kind.first));
            }
            if (random) {
                r.number = load32_(number + 2 * (q - i));
                r.stride = load32_(stride + 2 * (q - i));
                store32_(number + 2 * (q - i), K_(add16)(r.number, K_(mul16)(r.stride, next_group)));
            }
            if (!K_(direction_pair)(&a, kind, &k, &c, q, NULL, NULL, &r, order, &x)) {
                float buffer[PAIR_];
                kopt_step_elements_scalar_(whole, q, PAIR_, KOPT_DIRECTION_STAGE_, KOPT_BYTES_(buffer),
                                           order != 0 ? PAIR_ : 0);
                x = K_(load_f32_pair)(buffer);
            } else if (kind.feedback)
                continue;
            if (!pipelined) /* without `continue`, which makes AVX2's loop 10 % slower (gcc 12) */
                K_(commit_pair_or_scalar)(whole, &a, kind, &k, &c, q, x, r.number, order);
            else if (q != begin)
                K_(commit_pair_or_scalar)(whole, &a, kind, &k, &c, q - PAIR_, pending, last.number, order);
            if (pipelined) {
                pending = x;
                last = r;
            }
        }
        if (k.zero_grad) memset(a.grad + i * kopt_bytes_of_(kind.grad), 0, n * kopt_bytes_of_(kind.grad));
    }
    if (pipelined && i != begin)
        K_(commit_pair_or_scalar)(whole, &a, kind, &k, &c, i - PAIR_, pending, last.number, order);
    return i;
}

/* Each line makes one specialized loop, with its values as constants. The first line that matches a step is taken. A
   step without a line goes through the loop over tiles, with the same bits.

       LINE_(name, rule, number of moments, format of weights, gradients and moments, rounding of the weights,
             rounding of moments and compensation)

   Roundings are ignored if the format is fp32. */
/* clang-format off */
#ifdef REORDER_ /* even and odd elements apart: the loop over tiles is nearly as fast */
#define SPECIALIZATIONS_IN_ORDER_(LINE_)
#else
#define SPECIALIZATIONS_IN_ORDER_(LINE_) \
    LINE_(specialized_adam_kahan_nearest, KOPT_RULE_ADAM, 2, KOPT_BF16, KOPT_KAHAN, KOPT_NEAREST)
#endif
#define SPECIALIZATIONS_(LINE_) \
    LINE_(specialized_adam_kahan, KOPT_RULE_ADAM, 2, KOPT_BF16, KOPT_KAHAN, KOPT_STOCHASTIC) \
    LINE_(specialized_adam_stochastic, KOPT_RULE_ADAM, 2, KOPT_BF16, KOPT_STOCHASTIC, KOPT_STOCHASTIC) \
    LINE_(specialized_adam_feedback, KOPT_RULE_ADAM, 2, KOPT_BF16, KOPT_FEEDBACK, KOPT_STOCHASTIC) \
    LINE_(specialized_momentum_kahan, KOPT_RULE_SGD, 1, KOPT_BF16, KOPT_KAHAN, KOPT_STOCHASTIC) \
    LINE_(specialized_adam_f32, KOPT_RULE_ADAM, 2, KOPT_F32, KOPT_NEAREST, KOPT_NEAREST) \
    LINE_(specialized_ema_kahan, KOPT_RULE_EMA, 0, KOPT_BF16, KOPT_KAHAN, KOPT_STOCHASTIC) \
    LINE_(specialized_ema_f32, KOPT_RULE_EMA, 0, KOPT_F32, KOPT_NEAREST, KOPT_NEAREST) \
    SPECIALIZATIONS_IN_ORDER_(LINE_)
/* clang-format on */

#define LINE_(name, line_rule, line_moments, line_format, line_rounding, line_state_rounding) \
    HOT_FN_ size_t K_(name)(const kopt_job_ *j, size_t begin) {                               \
        kopt_kind_ kind;                                                                      \
        kind.nesterov = j->step->nesterov;                                                    \
        kind.rule = line_rule;                                                                \
        kind.moment_count = line_moments;                                                     \
        kind.weight = kind.grad = kind.first = kind.second = line_format;                     \
        kind.feedback = (line_rounding) == KOPT_FEEDBACK;                                     \
        kind.rounding = line_rounding;                                                        \
        if (kind.feedback) kind.rounding = KOPT_STOCHASTIC;                                   \
        kind.moment_rounding = kind.residual_rounding = line_state_rounding;                  \
        return K_(specialized)(j, kind, begin);                                               \
    }
SPECIALIZATIONS_(LINE_)
#undef LINE_
#endif

NOINLINE_FN_ void K_(step)(const kopt_job_ *j) {
    size_t i = j->begin;
#ifdef SPECIALIZED_
    /* The random numbers of a group come in whole pairs, so a specialized loop begins at a global index that is a
       multiple of PAIR_. The loop over tiles steps those before it; called from here, their frames do not add up. */
    const kopt_begun_ *const s = j->step;
    const size_t from = i + (unsigned)((0 - (j->first + i)) % PAIR_);
    if (j->end > from + 3 && (s->moments_only | s->sync | s->unrectified) == 0 && j->counts == NULL &&
        j->copy == NULL && (LOOPS_HAVE_L2_ || kopt_as_u32_(j->l2) << 1 == 0)) {
        const kopt_kind_ kind = kopt_kind_of_(j);
        kopt_loop_ *loop;
#define LINE_(name, line_rule, line_moments, line_format, line_rounding, line_state_rounding)              \
    if (kind.rule == (line_rule) && kind.moment_count == (line_moments) && kind.weight == (line_format) && \
        kind.grad == (line_format) &&                                                                      \
        ((line_moments) == 0 || (kind.first == (line_format) && kind.second == (line_format))) &&          \
        ((line_format) == KOPT_F32 ||                                                                      \
         (j->step->rounding == (line_rounding) && kind.moment_rounding == (line_state_rounding) &&         \
          ((line_rounding) != KOPT_KAHAN || kind.residual_rounding == (line_state_rounding)))))            \
        loop = K_(name);                                                                                   \
    else
        SPECIALIZATIONS_(LINE_) loop = NULL;
#undef LINE_
        if (loop != NULL) {
            if (from > i) kopt_walk_tiles_(&K_(stages), j, i, from);
            i = loop(j, from);
            if (j->end - i > 3) {
                kopt_loop_over_tail_(loop, j, i, PAIR_);
                i = j->end;
            }
        }
    }
#endif
    if (i < j->end) kopt_walk_tiles_(&K_(stages), j, i, j->end);
}
#endif /* CORE_ONLY_ */
#endif /* vectors */

/* ---- conversions of arrays ---- */

/* Rounds any value to nearest even, into the low bits. A NaN stays a NaN and keeps the upper bits of its payload. */
FN_ vu32_ K_(convert_value)(vf32_ x, kopt_format to) {
    const vu32_ a = as_u32_(x), mag = and_(a, isplat_(0x7FFFFFFFu));
    if (to == KOPT_F32) return a;
    if (to == KOPT_FP16) return narrow_fp16_(x);
    return select_(igt_(mag, isplat_(0x7F800000u)), or_(shr_(a, 16), isplat_(0x0040u)),
                   shr_(iadd_(iadd_(a, isplat_(0x7FFFu)), and_(shr_(a, 16), isplat_(1))), 16));
}

/* Limits the magnitude of a number. a, limit: bits of the format, in the low bits of a lane. NaN stays. */
FN_ vu32_ K_(clip_value)(vu32_ a, kopt_format format, vu32_ limit) {
    const vu32_ mag = and_(a, isplat_(format == KOPT_F32 ? 0x7FFFFFFFu : 0x7FFFu));
    const vu32_ infinity = isplat_(format == KOPT_F32 ? 0x7F800000u : format == KOPT_BF16 ? 0x7F80u : 0x7C00u);
    return or_(select_(igt_(mag, infinity), mag, select_(igt_(mag, limit), limit, mag)), isub_(a, mag));
}

/* docs/numerics.md, section 13. Scales the sum and rounds it to nearest. Keeps subnormals; NaN becomes canonical. */
FN_ vu32_ K_(reduce_value)(vf32_ sum, float scale, kopt_format to) {
    if (kopt_as_u32_(scale) != 0x3F800000u) sum = mul_(sum, splat_(scale));
    return to != KOPT_F32 ? K_(round_nearest16)(sum, to) : as_u32_(K_(canonical_nan)(sum));
}

#if KOPT_PASS_ < KOPT_PASS_CUDA_
#ifdef CONVERT_ISA_
FN_ void K_(convert_general)(const kopt_conversion_ *c, size_t begin, size_t end) {
    KOPT_GLUE_(kopt_convert_general_, CONVERT_ISA_)(c, begin, end);
}
#else
/* Converts elements [begin, end) between any formats, to nearest or stochastically. In a stochastic conversion, scalar
   code takes the vectors with a value that is not ordinary. */
NOINLINE_FN_ void K_(convert_general)(const kopt_conversion_ *c, size_t begin, size_t end) {
    const size_t to_size = kopt_bytes_of_(c->dst_format), from_size = kopt_bytes_of_(c->src_format);
    const uint32_t stream = (uint32_t)c->stochastic;
    const kopt_philox_key_ cipher =
        stream == 0 ? kopt_make_philox_key_(0, 0, 0, 0) : kopt_make_philox_key_(c->seed, c->step, c->id, stream);
    const constants_ constants = K_(make_constants)();
#ifdef ONE_LANE_
    vu32_ words[4];
#else /* the words of a span; the random numbers of a group, behind which a load may go */
    uint32_t words[KOPT_RANDOM_GROUP_ / 2], lower[KOPT_RANDOM_GROUP_ / 2 + LANES_], upper[KOPT_RANDOM_GROUP_ / 2];
#endif
    size_t i, n;
    for (i = begin; i < end; i += n) {
        const uint64_t index = c->first + i;
        vu32_ u;
        vf32_ x;
        n = K_(lanes_left)(end, i);
        x = K_(widen)(K_(load_n)(c->src + i * from_size, from_size, n), c->src_format);
        if (stream == 0 || c->dst_format == KOPT_F32) {
            u = K_(convert_value)(x, c->dst_format);
        } else {
#ifdef ONE_LANE_
            u = K_(random_at)(words, &cipher, index, i == begin);
            u = K_(round_stochastic)(x, c->dst_format, u, &constants) >> 16;
#else
            const uint32_t limit = c->dst_format == KOPT_BF16 ? 0x7F7EFFFFu : 0x477FDFFFu;
            const size_t position = (unsigned)(index % KOPT_RANDOM_GROUP_);
            if (index % KOPT_RANDOM_SPAN_ == 0 || i == begin)
                K_(random_span)(words, &cipher, index, 0, KOPT_RANDOM_GROUP_);
            if (position == 0 || i == begin) K_(random_group)(lower, upper, words, index, 0, KOPT_RANDOM_GROUP_);
            if (KOPT_RANDOM_GROUP_ - position < n) n = KOPT_RANDOM_GROUP_ - position;
            if (any_true_(igt_(K_(abs_u32)(x), isplat_(limit)))) {
                kopt_convert_general_scalar_(c, i, i + n);
                continue;
            }
            u = load16_((const kopt_byte_ *)lower + 2 * position);
            u = shr_(K_(round16)(x, c->dst_format, KOPT_STOCHASTIC, u, &constants), 16);
#endif
        }
        K_(store_n)(c->dst + i * to_size, to_size, n, u);
    }
}
#endif

#ifdef SPECIALIZED_
FN_ vu32_ K_(convert_vector)(const kopt_byte_ *p, kopt_format to, kopt_format from) {
    KOPT_PREFETCH_(p + 4096); /* far ahead: closer is slower for arrays in DRAM */
    return K_(convert_value)(K_(widen)(K_(load_n)(p, kopt_bytes_of_(from), LANES_), from), to);
}

/* Rounds to nearest, with constant formats. A result that is too large for the caches is written with non-temporal
   stores, which do not read the destination first. They need an aligned address. */
FN_ void K_(convert_array)(const kopt_conversion_ *c, kopt_format to, kopt_format from) {
    const size_t size = kopt_bytes_of_(to), from_size = kopt_bytes_of_(from), n = c->n;
    const kopt_byte_ *const src = c->src;
    kopt_byte_ *const dst = c->dst;
    size_t i = 0;
#ifdef NT_STORES_
    if (n >= KOPT_NT_THRESHOLD_ / size && (uintptr_t)dst % size == 0) {
        i = (64 - (uintptr_t)dst % 64) % 64 / size; /* up to the next cache line */
        K_(convert_general)(c, 0, i);
        for (; n - i >= LANES_; i += LANES_) {
            const vu32_ a = K_(convert_vector)(src + i * from_size, to, from);
            if (size == 4)
                K_(nt_store32)(dst + 4 * i, a);
            else
                K_(nt_store16)(dst + 2 * i, a);
        }
        K_(nt_fence)();
    }
#endif
    for (; n - i >= LANES_; i += LANES_)
        K_(store_n)(dst + i * size, size, LANES_, K_(convert_vector)(src + i * from_size, to, from));
    if (i < n) K_(convert_general)(c, i, n);
}
#endif

static KOPT_NOINLINE_ ISA_TARGET_ void K_(convert)(const kopt_conversion_ *c) {
#ifdef SPECIALIZED_ /* other passes have one loop for all formats */
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
/* x += y * factor, of n fp32 values and those behind up to the end of a vector. A sum with a magnitude above `most`
   becomes `other` (bits). */
static KOPT_NOINLINE_ ISA_TARGET_ void K_(add_scaled)(kopt_byte_ *x, const kopt_byte_ *y, float factor, uint32_t most,
                                                      uint32_t other, size_t n) {
    size_t i;
    for (i = 0; i < 4 * n; i += 4 * LANES_) {
        const vf32_ sum = add_(as_f32_(load32_(x + i)), mul_(as_f32_(load32_(y + i)), splat_(factor)));
        store32_(x + i, select_(igt_(K_(abs_u32)(sum), isplat_(most)), isplat_(other), as_u32_(sum)));
    }
}

/* Are all n values finite? One added to the exponent field carries into the sign bit if the field is all ones. A word
   is one fp32 value, or two of 16 bits. */
static KOPT_NOINLINE_ ISA_TARGET_ int K_(all_finite)(const kopt_byte_ *p, kopt_format format, size_t n) {
    const uint32_t one = format == KOPT_F32 ? 0x00800000u : format == KOPT_BF16 ? 0x00800080u : 0x04000400u;
    const vu32_ sign = isplat_(format == KOPT_F32 ? 0x80000000u : 0x80008000u), exponent = isub_(sign, isplat_(one));
    size_t bytes = n * kopt_bytes_of_(format);
    kopt_byte_ part[8 * LANES_];
    vu32_ found = isplat_(0);
    while (bytes > 0) {
        vu32_ a, b;
        if (bytes < sizeof part) { /* zeros are finite */
            p = kopt_copy_padded_(part, sizeof part, p, bytes);
            bytes = sizeof part;
        }
        a = iadd_(and_(load32_(p), exponent), isplat_(one));
        b = iadd_(and_(load32_(p + 4 * LANES_), exponent), isplat_(one));
        found = or_(found, and_(or_(a, b), sign));
        if (LANES_ == 1 && any_true_(igt_(shr_(found, 15), isplat_(0)))) return 0; /* or clang makes vectors of it */
        bytes -= sizeof part;
        p += sizeof part;
    }
    return !any_true_(igt_(shr_(found, 15), isplat_(0)));
}

/* Writes the ratios of StableAdamW of the elements [begin, j->end) to out, as fp32. */
NOINLINE_FN_ void K_(measure)(const kopt_job_ *j, size_t begin, kopt_byte_ *out) {
    const scalars_ k = K_(splat_job)(j);
    const kopt_kind_ kind = kopt_kind_of_(j);
    const size_t grad_size = kopt_bytes_of_(kind.grad), moment_size = kopt_moment_bytes_(kind, 1);
    const size_t weight_size = kopt_bytes_of_(kind.weight);
    const size_t residual_size = kopt_bytes_of_residual_(kind.weight, kind.rounding);
    size_t i;
    for (i = begin; j->end - i >= LANES_; i += LANES_) {
        element_ e;
        e.grad = K_(load_n)(j->grad + i * grad_size, grad_size, LANES_);
        e.moment[1] = K_(load_n)(j->moment[1] + i * moment_size, moment_size, LANES_);
        e.weight = e.residual = e.grad; /* any value, without L2 */
        if (k.use_l2) e.weight = K_(load_n)(j->weight + i * weight_size, weight_size, LANES_);
        if (k.use_l2 && residual_size != 0)
            e.residual = K_(load_n)(j->residual + i * residual_size, residual_size, LANES_);
        store32_(out + 4 * (i - begin), as_u32_(K_(stable_ratio)(kind, &k, &e)));
    }
    if (i < j->end) kopt_measure_scalar_(j, i, out + 4 * (i - begin));
}

/* ---- norm, clipping and reduction ---- */

#ifndef ONE_LANE_
/* docs/numerics.md, section 9. Vectors take the magnitudes in a window, whose top is two binades above the largest one
   of the block for which it was chosen: 21 binades in bf16 and fp32, 18 in fp16. A group is four vectors, a block 64
   groups. If any value of a group is outside the window, the group is added one value at a time. */

/* |x| as fp32 bits, for vector i of a group. bf16: the even or the odd elements of two vectors; sums need no order. */
FN_ vu32_ K_(norm_load)(const kopt_byte_ *p, kopt_format format, size_t i) {
    if (format == KOPT_F32) return and_(load32_(p + 4 * LANES_ * i), isplat_(0x7FFFFFFFu));
    if (format == KOPT_FP16) return K_(abs_u32)(widen_fp16_(load16_(p + 2 * LANES_ * i)));
    p += 4 * LANES_ * (i / 2);
    return and_(i % 2 == 0 ? shl_(load32_(p), 16) : load32_(p), isplat_(0x7FFF0000u));
}

/* The exponent field (of fp32) of the largest magnitude in the first `groups` groups. */
FN_ uint32_t K_(norm_scan)(const kopt_byte_ *p, kopt_format format, size_t groups) {
    uint32_t lane[LANES_], most = 0;
    vu32_ largest = isplat_(0);
    size_t i;
    for (; groups > 0; groups--, p += 4 * LANES_ * kopt_bytes_of_(format))
        for (i = 0; i < 4; i++) largest = imax_(largest, K_(norm_load)(p, format, i));
    store32_((kopt_byte_ *)lane, largest);
    for (i = 0; i < LANES_; i++) most = lane[i] > most ? lane[i] : most;
    return most >> 23;
}

/* x * factor as an integer; factor is the reciprocal of the window's unit. Sets bits in *bad if the product is not
   an integer, and a bit above the lowest 28 in *all if x is above the window. */
FN_ vu32_ K_(norm_to_integer)(vu32_ x, vf32_ factor, vu32_ *bad, vu32_ *all) {
    const vf32_ scaled = mul_(as_f32_(x), factor);
    const vu32_ integer = K_(round_u32)(scaled);
    *bad = or_(*bad, xor_(as_u32_(convert_f32_(integer)), as_u32_(scaled)));
    *all = or_(*all, integer);
    return integer;
}

/* Adds groups of 16-bit values. They are integers below 2^28 in the window's unit, 2^(127 - scale), and the 256 squares
   of a block add up exactly in 64 bits. top: from norm_scan. Returns the number of groups outside the window. */
FN_ size_t K_(norm_add16)(kopt_norm *norm, const kopt_byte_ *p, kopt_format format, size_t groups, uint32_t top) {
    const size_t group = 4 * LANES_;
    const uint32_t scale = top > 25 ? 279 - top : 254;
    const vf32_ factor = splat_(kopt_as_f32_(scale << 23));
    uint64_t part[LANES_];
    size_t i, outside = 0;
    vu32_ sum[2];
    if (scale < 127) { /* a factor below 1 could make 0 of the smallest numbers, which `bad` would not show */
        kopt_norm_add_values_(norm, p, format, groups * group);
        return groups;
    }
    sum[0] = sum[1] = isplat_(0);
    for (; groups > 0; groups--, p += 2 * group) {
        vu32_ bad = isplat_(0), all = isplat_(0), a, b, c, d;
        KOPT_PREFETCH_(p + 2048);
        a = K_(norm_to_integer)(K_(norm_load)(p, format, 0), factor, &bad, &all);
        b = K_(norm_to_integer)(K_(norm_load)(p, format, 1), factor, &bad, &all);
        c = K_(norm_to_integer)(K_(norm_load)(p, format, 2), factor, &bad, &all);
        d = K_(norm_to_integer)(K_(norm_load)(p, format, 3), factor, &bad, &all);
        bad = or_(and_(bad, isplat_(0x7FFFFFFFu)), shr_(all, 28));
        if (any_true_(igt_(bad, isplat_(0)))) {
            kopt_norm_add_values_(norm, p, format, group);
            outside++;
        } else {
            K_(dot)(sum, a, a);
            K_(dot)(sum, b, b);
            K_(dot)(sum, c, c);
            K_(dot)(sum, d, d);
        }
    }
    store32_((kopt_byte_ *)part, sum[0]);
    store32_((kopt_byte_ *)(part + LANES_ / 2), sum[1]);
    for (i = 0; i < LANES_; i++) kopt_norm_accumulate_(norm, part[i], 552 - 2 * scale);
    return outside;
}

/* Adds the squares of LANES_ / 2 fp32 values at p, and of as many 8 * LANES_ bytes behind. They are exact in binary64.
   Adding and subtracting the constant rounds a square to a multiple of the last bit of that: *high sums the multiples,
   *low what the rounding cut off. */
FN_ void K_(norm_squares)(K_(f64) * high, K_(f64) * low, const kopt_byte_ *p, K_(f64) constant) {
    const K_(f64) x = K_(load_f64)(p), y = K_(load_f64)(p + 8 * LANES_);
    const K_(f64) square = K_(mul_f64)(x, x), square2 = K_(mul_f64)(y, y);
    const K_(f64) multiple = K_(sub_f64)(K_(add_f64)(square, constant), constant);
    const K_(f64) multiple2 = K_(sub_f64)(K_(add_f64)(square2, constant), constant);
    *high = K_(add_f64)(K_(add_f64)(*high, multiple), multiple2);
    *low = K_(add_f64)(K_(add_f64)(*low, K_(sub_f64)(square, multiple)), K_(sub_f64)(square2, multiple2));
}

/* The same for groups of fp32 values, in units of 2^(p - 298) and 2^(q - 298). A lane of a block has 512 squares: high
   and low are exact if each is at most 2^44 of the larger unit and a multiple of the smaller one. */
FN_ size_t K_(norm_add32)(kopt_norm *norm, const kopt_byte_ *at, size_t groups, uint32_t top) {
    const uint32_t highest = top < 252 ? top : 252, p = 2 * highest + 6, q = p < 44 ? 0 : p - 44;
    const vu32_ sign = isplat_(0x80000000u), most = isplat_(((highest + 3) << 23) - 1);
    const vu32_ least = isub_(sign, isplat_(highest < 19 ? 1 : (highest - 18) << 23));
    const double to_p = kopt_bits_to_f64_((uint64_t)(1321 - p) << 52);
    const double to_q = kopt_bits_to_f64_((uint64_t)(1321 - q) << 52);
    const K_(f64) constant = K_(splat_f64)(kopt_bits_to_f64_((uint64_t)(2 * (p + 777) + 1) << 51)),
                  zero = K_(splat_f64)(0);
    K_(f64) high[4], low[4];
    double highs[LANES_ / 2], lows[LANES_ / 2];
    uint64_t sum = 0, rest = (uint64_t)4096 << (p - q); /* above the magnitude of that of low, which may be negative */
    size_t i, outside = 0;
    high[0] = high[1] = high[2] = high[3] = low[0] = low[1] = low[2] = low[3] = zero;
    for (; groups > 0; groups--, at += 16 * LANES_) {
        const vu32_ a = K_(norm_load)(at, KOPT_F32, 0), b = K_(norm_load)(at, KOPT_F32, 1);
        const vu32_ c = K_(norm_load)(at, KOPT_F32, 2), d = K_(norm_load)(at, KOPT_F32, 3);
        const vu32_ largest = imax_(imax_(a, b), imax_(c, d)); /* next line: the smallest, without zeros */
        const vu32_ smallest = imax_(imax_(isub_(sign, a), isub_(sign, b)), imax_(isub_(sign, c), isub_(sign, d)));
        KOPT_PREFETCH_(at + 2048);
        KOPT_PREFETCH_(at + 2048 + 8 * LANES_);
        if (any_true_(K_(mask_or)(igt_(largest, most), igt_(smallest, least)))) {
            kopt_norm_add_values_(norm, at, KOPT_F32, 4 * LANES_);
            outside++;
            continue;
        }
        K_(norm_squares)(&high[0], &low[0], at, constant);
        K_(norm_squares)(&high[1], &low[1], at + 2 * LANES_, constant);
        K_(norm_squares)(&high[2], &low[2], at + 4 * LANES_, constant);
        K_(norm_squares)(&high[3], &low[3], at + 6 * LANES_, constant);
    }
    high[0] = K_(add_f64)(K_(add_f64)(high[0], high[1]), K_(add_f64)(high[2], high[3]));
    low[0] = K_(add_f64)(K_(add_f64)(low[0], low[1]), K_(add_f64)(low[2], low[3]));
    memcpy(highs, &high[0], sizeof highs);
    memcpy(lows, &low[0], sizeof lows);
    for (i = 0; i < LANES_ / 2; i++) {
        const double x = kopt_mul64_(highs[i], to_p), y = kopt_mul64_(lows[i], to_q);
        sum += (uint64_t)x;
        rest += (uint64_t)(int64_t)y;
    }
    kopt_norm_accumulate_(norm, sum + (rest >> (p - q)) - 4096, p);
    kopt_norm_accumulate_(norm, rest & (((uint64_t)1 << (p - q)) - 1), q);
    return outside;
}

FN_ void K_(norm_format)(kopt_norm *norm, const kopt_byte_ *p, kopt_format format, size_t n) {
    const size_t group = 4 * LANES_, size = kopt_bytes_of_(format);
    size_t groups = n / group, todo, outside = 2;
    uint32_t top = 0;
    for (; groups > 0; groups -= todo, p += todo * group * size) {
        todo = groups < 64 ? groups : 64;
        if (outside > 1) top = K_(norm_scan)(p, format, todo);
        outside = format == KOPT_F32 ? K_(norm_add32)(norm, p, todo, top) : K_(norm_add16)(norm, p, format, todo, top);
        kopt_norm_carry_(norm);
    }
    kopt_norm_add_values_(norm, p, format, n % group);
    kopt_norm_carry_(norm);
}
#else
FN_ void K_(norm_format)(kopt_norm *norm, const kopt_byte_ *p, kopt_format format, size_t n) {
    size_t part;
    for (; n > 0; n -= part, p += part * kopt_bytes_of_(format)) {
        part = n < 1u << 14 ? n : 1u << 14;
        kopt_norm_add_values_(norm, p, format, part);
        kopt_norm_carry_(norm);
    }
}
#endif

FN_ void K_(clip)(const kopt_tool_ *t) {
    const size_t size = kopt_bytes_of_(t->dst_format);
    size_t i, n;
    for (i = 0; i < t->n; i += n) {
        kopt_byte_ *const p = t->dst + i * size;
        n = K_(lanes_left)(t->n, i);
        K_(store_n)(p, size, n, K_(clip_value)(K_(load_n)(p, size, n), t->dst_format, isplat_(t->limit)));
    }
}

/* Adds the shards in their order. */
FN_ void K_(reduce)(const kopt_tool_ *t) {
    const kopt_format from = t->src_format, to = t->dst_format;
    const size_t from_size = kopt_bytes_of_(from), to_size = kopt_bytes_of_(to), count = t->count;
    size_t i, k, n;
    for (i = 0; i < t->n; i += n) {
        vf32_ sum = splat_(0);
        n = K_(lanes_left)(t->n, i);
        for (k = 0; k < count; k++) {
            const kopt_byte_ *p = (const kopt_byte_ *)t->shards[k] + i * from_size;
            const vf32_ x = K_(widen)(K_(load_n)(p, from_size, n), from);
            sum = k == 0 ? x : add_(sum, x);
        }
        K_(store_n)(t->dst + i * to_size, to_size, n, K_(reduce_value)(sum, t->scale, to));
    }
}

static KOPT_NOINLINE_ ISA_TARGET_ void K_(tool)(const kopt_tool_ *t) {
    if (t->kind == KOPT_TOOL_CLIP_)
        K_(clip)(t);
    else if (t->kind == KOPT_TOOL_SUM_)
        K_(reduce)(t);
    else if (t->src_format == KOPT_F32)
        K_(norm_format)(t->norm, t->src, KOPT_F32, t->n);
    else if (t->src_format == KOPT_BF16)
        K_(norm_format)(t->norm, t->src, KOPT_BF16, t->n);
    else
        K_(norm_format)(t->norm, t->src, KOPT_FP16, t->n);
}
#endif

#endif

/* ---- end of a pass: undefines all macros of the pass ---- */
#undef KOPT_READ_
#define KOPT_READ_ 1
#undef KOPT_GLUE2_
#undef KOPT_GLUE_
#undef K_
#undef FN_
#undef scalars_
#undef constants_
#undef element_
#undef pair_
#undef moments_
#undef half_pair_
#undef random_pair_
#undef vf32_
#undef vu32_
#undef vmask_
#undef add_
#undef sub_
#undef mul_
#undef div_
#undef sqrt_
#undef min_
#undef splat_
#undef as_u32_
#undef as_f32_
#undef convert_f32_
#undef isplat_
#undef isplat_hoisted_
#undef iadd_
#undef isub_
#undef and_
#undef or_
#undef xor_
#undef igt_
#undef ieq_
#undef any_true_
#undef select_
#undef select_or_zero_
#undef load32_
#undef load16_
#undef store32_
#undef widen_fp16_
#undef narrow_fp16_
#undef imax_
#undef LOADS_EXTEND_
#undef REORDER_
#undef ORDER_
#undef HOT_FN_
#undef NOINLINE_FN_
#undef ANY_
#undef COMMITS_
#undef COMMITS_F32_BF16_
#undef OTHER_STAGES_
#undef DIRECTIONS_
#undef DIRECTIONS_OF_SET_
#undef DIRECTIONS_USED_MOST_
#undef EACH_MOMENT_
#undef FP16_
#undef CORE_ONLY_
#undef FLUSH_
#undef GENERIC_FP16_
#undef SPECIALIZATIONS_
#undef SPECIALIZATIONS_IN_ORDER_
#undef IMAX_
#undef ISA_
#undef ISA_TARGET_
#undef LANES_
#undef CONVERT_ISA_
#undef MIN_MAX_
#undef ONE_LANE_
#undef SPECIALIZED_
#undef EVEN_ODD_
#undef OPAQUE_
#undef MM_
#undef SI_
#undef AS_
#undef WORDS_
#undef WIDE_
#undef NT_STORES_
#undef TOOLS_ISA_
#undef STAGES_ISA_
#undef PAIR_
#undef shl_
#undef shr_
#undef CHECK_UNROUNDED_
#undef LOOPS_HAVE_L2_
#undef RUNS_AHEAD_
#undef MATCHES_

#elif defined(KOPT_IMPLEMENTING_) /* the implementation, continued */

/* ---- DISPATCH ---------------------------------------------------------------------------------------------------- */

/* The kernels of one instruction set; NULL if this build lacks it. */
typedef struct kopt_kernels_ {
    void (*step)(const kopt_job_ *);
    void (*convert)(const kopt_conversion_ *);
    int (*all_finite)(const kopt_byte_ *, kopt_format, size_t);
    void (*measure)(const kopt_job_ *, size_t, kopt_byte_ *);
    void (*tool)(const kopt_tool_ *);
    void (*add_scaled)(kopt_byte_ *, const kopt_byte_ *, float, uint32_t, uint32_t, size_t);
    const struct kopt_stages_ *stages; /* NULL: scalar */
#ifdef KAHAN_OPT_VMATH
    void (*vmath)(const kopt_vmath_job_ *);
#define KOPT_AND_VMATH_(kernel) , kernel
#else
#define KOPT_AND_VMATH_(kernel)
#endif
} kopt_kernels_;

/* tools: the ISA whose all_finite, measure, tool and add_scaled this ISA uses (TOOLS_ISA_ of its vocabulary). */
#define KOPT_KERNELS_(isa, tools, stages) \
    {kopt_step_##isa##_,                  \
     kopt_convert_##isa##_,               \
     kopt_all_finite_##tools##_,          \
     kopt_measure_##tools##_,             \
     kopt_tool_##tools##_,                \
     kopt_add_scaled_##tools##_,          \
     stages KOPT_AND_VMATH_(kopt_vmath_##isa##_)}
#define KOPT_NO_KERNELS_ {NULL, NULL, NULL, NULL, NULL, NULL, NULL KOPT_AND_VMATH_(NULL)}
enum { KOPT_ISAS_ = KOPT_ISA_SIMD128 + 1 };
static const kopt_kernels_ kopt_table_[KOPT_ISAS_] = {
    KOPT_KERNELS_(scalar, scalar, NULL),
#ifdef KOPT_SSE2_
    KOPT_KERNELS_(sse2, scalar, &kopt_stages_sse2_),
#else
    KOPT_NO_KERNELS_,
#endif
#ifdef KOPT_AVX2_
    KOPT_KERNELS_(avx2, avx2, &kopt_stages_avx2_),
    KOPT_KERNELS_(avx512, avx2, &kopt_stages_avx512_),
#elif defined(KOPT_X86_)
    KOPT_NO_KERNELS_,
    KOPT_KERNELS_(avx512, avx512, &kopt_stages_avx512_),
#else
    KOPT_NO_KERNELS_,
    KOPT_NO_KERNELS_,
#endif
#ifdef KOPT_NEON_
    KOPT_KERNELS_(neon, neon, &kopt_stages_neon_),
#elif defined(KOPT_SIMD128_)
    KOPT_NO_KERNELS_,
    KOPT_KERNELS_(simd128, simd128, &kopt_stages_simd128_),
#endif
};

#ifdef KOPT_VECTOR_CODE_
#define KOPT_KERNEL_(name) (kopt_table_[kopt_isa_current()].name)
#else /* direct calls, so that the linker can drop kernels */
#define KOPT_KERNEL_(name) kopt_##name##_scalar_
#endif

static void kopt_step_job_(const kopt_job_ *job) { (KOPT_KERNEL_(step))(job); }

/* Bytes of n values, and the offset of value n (KOPT_Q8, KOPT_Q1: of the first of a block). */
static KOPT_HOST_DEVICE_ size_t kopt_code_bytes_(kopt_format code, size_t n) {
    if (code == KOPT_Q1) return n / 8 + (n % 8 != 0) + 4 * kopt_blocks_(n, KOPT_SIGNS_);
    return n * kopt_bytes_of_(code) + (code == KOPT_Q8 ? kopt_blocks_(n, KOPT_BLOCK_) : 0);
}

KOPT_API_ size_t kopt_format_size(kopt_format format, size_t n) {
    return (unsigned)format > (unsigned)KOPT_Q1 || n > KOPT_LARGEST_N_ ? 0 : kopt_code_bytes_(format, n);
}

KOPT_API_ const char *kopt_result_string(kopt_result result) {
    static const char *const sentences[] = {
        "success",
        "a required pointer is NULL, or a GPU plan was not uploaded",
        "an option has a value that does not exist, does not apply or is not in this build (kopt_explain() names a "
        "field of the optimizer or of a tensor), or a reserved field is not 0: begin with the constructor",
        "a number is out of range or NaN: kopt_explain() names a hyper-parameter, a field of a tensor or a product",
        "the range of elements is not inside the tensor, the tensor, an id or an index is too large, a slice cuts a "
        "block of 8-bit or 1-bit codes, a GPU plan has no such group, or a text of PTX does not end in NUL",
        "a state block (kopt_state_size() says its bytes) or a buffer is too small, or a checkpoint was cut off",
        "neither a checkpoint nor a state block: not made by kopt_state_init(), of another version (8-bit moments of "
        "0.9 and before cannot be read), or contradicting itself",
        "the state block, checkpoint or GPU plan belongs to another optimizer, tensor or shard (kopt_inspect() and "
        "kopt_inspect_tensor() show which), or the loss scale to other optimizers (kopt_scaler_begin() takes several) "
        "or, after kopt_load(), to later steps (begin a new one)",
        "the state block or checkpoint is damaged: its checksum is wrong",
        "two of the buffers overlap",
        "the step was not begun, or the loss scaler skipped it; all 2^32 - 1 steps are used up; StableAdamW has not "
        "measured the tensor, or kopt_cuda_plan_measure() the gradients; or there are residuals already, which "
        "kopt_state_dither() would erase",
        "this instruction set, or a GPU, is not in this build or not on this machine",
        "a CUDA call failed: cudaPeekAtLastError() says why",
        "no constructor made this struct: start from kopt_adamw(), kopt_accumulator_of() or another one; or this "
        "build lacks the constructor, without KAHAN_OPT_VMATH",
        "the ids of a list of tensors do not increase: call kopt_list_set_ids() before kopt_state_init()",
        "the stream is being captured: call this function before the capture, or the graph would repeat it",
        "reading or writing a checkpoint failed: the file may be too short, or the disk full",
        "the header that made the optimizer and the implementation that was linked are of different versions, or were "
        "compiled with other sizes of structs or enums; or a plug-in found the copy of another part of the program; or "
        "the checkpoint has the layout of a later version of the library",
        "a function of the kopt_closure failed"};
    return (unsigned)result <= (unsigned)KOPT_ERROR_CLOSURE ? sentences[result] : "unknown result";
}

KOPT_API_ int kopt_version(void) { return KOPT_VERSION; }

#ifdef KOPT_X86_
/* r: eax, ebx, ecx and edx of cpuid for this leaf, with ecx = 0. */
static void kopt_cpuid_(uint32_t leaf, uint32_t r[4]) {
#ifndef KOPT_GNU_
    __cpuidex((int *)r, (int)leaf, 0);
#elif defined(__i386__) /* ebx must survive: it may hold the address of the global offset table */
    __asm__("xchgl %%ebx, %1\n\tcpuid\n\txchgl %%ebx, %1"
            : "=a"(r[0]), "=&r"(r[1]), "=c"(r[2]), "=d"(r[3])
            : "0"(leaf), "2"(0));
#else
    __asm__("cpuid" : "=a"(r[0]), "=b"(r[1]), "=c"(r[2]), "=d"(r[3]) : "0"(leaf), "2"(0));
#endif
}
#endif

KOPT_API_ int kopt_isa_usable(kopt_isa isa) {
    if ((unsigned)isa >= (unsigned)KOPT_ISAS_ || kopt_table_[isa].step == NULL) return 0;
#ifdef KOPT_X86_
    if (isa != KOPT_ISA_SCALAR) {
        uint32_t r[4], max, saved; /* saved: XCR0, the registers that the operating system saves */
        kopt_cpuid_(0, r);
        max = r[0];
        kopt_cpuid_(1, r);
        if (isa == KOPT_ISA_SSE2 || (r[3] >> 26 & 1u) == 0) return (int)(r[3] >> 26 & 1u);
        if ((r[2] & 0x38000000u) != 0x38000000u || max < 7) return 0; /* OSXSAVE, AVX, F16C */
#ifndef KOPT_GNU_
        saved = (uint32_t)(_xgetbv(0) & 0xFFFFFFFFu);
#else
        __asm__ __volatile__(".byte 0x0F, 0x01, 0xD0" : "=a"(saved), "=d"(max) : "c"(0)); /* xgetbv */
#endif
        kopt_cpuid_(7, r);
        if ((saved & 0x06u) != 0x06u || (r[1] >> 5 & 1u) == 0) return 0; /* XMM and YMM; AVX2 */
        if (isa == KOPT_ISA_AVX512)                                      /* ZMM, masks; VL BW DQ F */
            return (saved & 0xE6u) == 0xE6u && (r[1] & 0xC0030000u) == 0xC0030000u;
    }
#endif
    return 1;
}

/* The ISA that calls use, + 1; 0: not chosen yet. Threads that choose at the same time store the same value. */
#ifndef KOPT_VECTOR_CODE_ /* no atomics, which small cores lack */
#define KOPT_GET_CHOSEN_() 1
#define KOPT_SET_CHOSEN_(x) ((void)(x))
#else
static int kopt_chosen_;
#ifdef KOPT_GNU_
#define KOPT_GET_CHOSEN_() __atomic_load_n(&kopt_chosen_, __ATOMIC_RELAXED)
#define KOPT_SET_CHOSEN_(x) __atomic_store_n(&kopt_chosen_, x, __ATOMIC_RELAXED)
#else
#define KOPT_GET_CHOSEN_() (*(volatile int *)&kopt_chosen_)
#define KOPT_SET_CHOSEN_(x) (*(volatile int *)&kopt_chosen_ = (x))
#endif
#endif

KOPT_API_ kopt_isa kopt_isa_current(void) {
    int chosen = KOPT_GET_CHOSEN_();
    if (chosen == 0) {
        for (chosen = KOPT_ISAS_; !kopt_isa_usable((kopt_isa)(chosen - 1)); chosen--) {
        }
        KOPT_SET_CHOSEN_(chosen);
    }
    return (kopt_isa)(chosen - 1);
}

KOPT_API_ kopt_result kopt_isa_force(kopt_isa isa) {
    if (isa != KOPT_ISA_AUTO && !kopt_isa_usable(isa)) return KOPT_ERROR_ISA;
    KOPT_SET_CHOSEN_(isa == KOPT_ISA_AUTO ? 0 : (int)isa + 1);
    return KOPT_OK;
}

KOPT_API_ const char *kopt_isa_name(kopt_isa isa) {
    static const char *const names[KOPT_ISAS_] = {"scalar", "sse2", "avx2", "avx512", "neon", "simd128"};
    return (unsigned)isa < (unsigned)KOPT_ISAS_ ? names[isa] : "unknown";
}

/* ---- TILES ------------------------------------------------------------------------------------------------------- */

/* The loop over tiles takes every kind of step. It runs one stage of an instruction set (kopt_stages_) for the whole
   tile, then the next. Stages step whole pairs of vectors; the tail behind the last whole pair is stepped in copies. */

#ifdef KOPT_VECTOR_CODE_
KOPT_INLINE_ void kopt_add_job_array_(kopt_job_array_ **next, kopt_byte_ **at, size_t bytes, int written) {
    const kopt_job_array_ array = {at, NULL, (unsigned)bytes, written};
    **next = array;
    *next += bytes != 0;
}

/* The arrays that a job of this kind has in memory. Returns the end of the list. */
static kopt_job_array_ *kopt_list_job_arrays_(kopt_job_array_ *list, kopt_job_ *j, const kopt_kind_ *kind) {
    const size_t weight = kopt_bytes_of_(kind->weight);
    const size_t residual = kopt_bytes_of_residual_(kind->weight, kind->rounding);
    const int commits = !j->step->moments_only, sync = j->step->sync;
    int m;
    kopt_add_job_array_(&list, &j->weight, weight, commits);
    kopt_add_job_array_(&list, &j->residual, residual, commits);
    kopt_add_job_array_(&list, &j->grad, kopt_bytes_of_(kind->grad), j->step->zero_grad);
    for (m = 0; m < kind->moment_count; m++)
        if (!kopt_has_scales_(kopt_moment_format_(*kind, m)))
            kopt_add_job_array_(&list, &j->moment[m], kopt_moment_bytes_(*kind, m), 1);
    kopt_add_job_array_(&list, &j->slow, sync ? weight : 0, commits);
    kopt_add_job_array_(&list, &j->slow_residual, sync ? residual : 0, commits);
    if (j->copy != NULL && commits) kopt_add_job_array_(&list, &j->copy, kopt_bytes_of_(j->copy_format), 1);
    return list;
}

/* A stage in scalar code, of the pair at element i, or of what the tile has of it. */
static KOPT_NOINLINE_ void kopt_stage_in_scalar_(kopt_tile_ *t, int stage, size_t i, size_t pair) {
    const size_t n = t->job.end - i < pair ? t->job.end - i : pair;
    size_t q;
    for (q = 0; stage == KOPT_DIRECTION_STAGE_ && q < pair; q++) t->x[i + q] = 1; /* also behind the end of a tail */
    kopt_step_elements_scalar_(&t->job, i, n, stage, KOPT_BYTES_(t->x + i), t->apart);
}

/* Counts the elements of a tile, whose updates are in x. old_weight, old_residual: before the step. */
static void kopt_tally_(const kopt_tile_ *t, const kopt_byte_ *old_weight, const kopt_byte_ *old_residual, size_t size,
                        size_t residual_size) {
    const kopt_job_ *const j = &t->job;
    size_t i;
    for (i = 0; i < j->end; i++) {
        const size_t in_pair = t->apart != 0 ? i & (t->apart - 1) : 0; /* apart is a power of 2 */
        const size_t at = i - in_pair + in_pair % 2 * (t->apart / 2) + in_pair / 2;
        const int moved = kopt_load_at_scalar_(old_weight, i, size) != kopt_load_at_scalar_(j->weight, i, size);
        const int residual_moved = residual_size != 0 && kopt_load_at_scalar_(old_residual, i, residual_size) !=
                                                             kopt_load_at_scalar_(j->residual, i, residual_size);
        kopt_tally_scalar_(j->counts, kopt_as_u32_(t->x[at]), moved, residual_moved);
    }
}

/* The commit stage of a step that counts updates or synchronizes the slow weights of Ranger (Lookahead). It replaces x
   by the update, then runs the ordinary commit with rate 1 and decay 0. */
static KOPT_NOINLINE_ void kopt_commit_updates_(const kopt_stages_ *stages, kopt_tile_ *t) {
    kopt_job_ *const j = &t->job;
    const size_t n = j->end, size = kopt_bytes_of_(t->kind.weight);
    const size_t residual_size = kopt_bytes_of_residual_(t->kind.weight, t->kind.rounding);
    const int moments_only = j->step->moments_only;
    kopt_byte_ *const old_weight = KOPT_BYTES_(t->w); /* free once the updates are computed */
    kopt_byte_ *const old_residual = KOPT_BYTES_(t->compensation);
    (stages->update)(t);
    t->is_loaded = 0;
    memcpy(old_weight, j->weight, n * size);
    if (residual_size != 0) memcpy(old_residual, j->residual, n * residual_size);
    if (!moments_only) {
        const kopt_job_ job = *j;
        j->rate = 1;
        j->weight_decay = 0;
        t->commit(t);
        *j = job;
    }
    if (j->counts != NULL) kopt_tally_(t, old_weight, old_residual, size, residual_size);
    if (j->step->sync && !moments_only) {
        memcpy(j->slow, j->weight, n * size);
        if (residual_size != 0) memcpy(j->slow_residual, j->residual, n * residual_size);
    }
}

static void kopt_find_scales_(const kopt_stages_ *stages, const kopt_tile_ *t, size_t n) {
    int m;
    for (m = 0; m < t->kind.moment_count; m++)
        if (t->scale[m] != NULL)
            (stages->find_scales)(t->scale[m], (float *)(void *)t->job.moment[m], kopt_is_square_(t->kind.rule, m), n);
}

static KOPT_NOINLINE_ void kopt_step_tile_(const kopt_stages_ *stages, kopt_tile_ *t) {
    const kopt_job_ *const j = &t->job;
    const kopt_begun_ *const s = j->step;
    const int general = s->sync || j->counts != NULL, moments_only = s->moments_only;
    t->is_loaded = general || t->kind.rule == KOPT_RULE_EMA || t->kind.feedback || kopt_as_u32_(j->l2) << 1 != 0;
    if (t->is_loaded) (stages->load_weights)(j->weight, j->residual, &t->kind, j->end, t->w, t->compensation);
    t->direction(t);
    if (t->finds_scales) kopt_find_scales_(stages, t, j->end); /* here, so that they overlap with the next stage */
    if (general)
        kopt_commit_updates_(stages, t);
    else if (!moments_only)
        t->commit(t);
    if (j->copy != NULL && !moments_only) {
        const kopt_conversion_ copy = {j->copy, j->weight, j->copy_format, t->kind.weight, j->end, 0, 0, 0, 0, 0};
        (stages->convert)(&copy);
    }
    if (s->zero_grad) memset(j->grad, 0, j->end * kopt_bytes_of_(t->kind.grad));
}

/* Puts copies of the n elements from `begin` on in place of the arrays of a job; and copies back those that the step
   wrote, and takes the copies away. */
static KOPT_NOINLINE_ void kopt_open_tail_(kopt_tail_ *copy, kopt_job_array_ *a, const kopt_job_array_ *end,
                                           size_t begin, size_t n) {
    for (; a != end; a++, copy++) {
        a->original = *a->at + begin * a->bytes;
        kopt_copy_padded_(*copy, sizeof *copy, a->original, n * a->bytes);
        *a->at = *copy;
    }
}

static KOPT_NOINLINE_ void kopt_close_tail_(const kopt_job_array_ *a, const kopt_job_array_ *end, size_t n) {
    for (; a != end; a++) {
        if (a->written) memcpy(a->original, *a->at, n * a->bytes);
        *a->at = a->original;
    }
}

/* Steps the elements from `begin` on, fewer than a pair, by a specialized loop. */
static KOPT_NOINLINE_ void kopt_loop_over_tail_(kopt_loop_ *loop, const kopt_job_ *whole, size_t begin, size_t pair) {
    const kopt_kind_ kind = kopt_kind_of_(whole);
    kopt_tail_ copies[KOPT_JOB_ARRAYS_];
    kopt_job_array_ arrays[KOPT_JOB_ARRAYS_], *end;
    kopt_job_ job = *whole;
    end = kopt_list_job_arrays_(arrays, &job, &kind);
    job.first += begin;
    job.end = pair;
    kopt_open_tail_(copies, arrays, end, begin, whole->end - begin);
    loop(&job, 0);
    kopt_close_tail_(arrays, end, whole->end - begin);
}

/* kopt_step_tile_() for fewer elements than a pair. Buffers of 8-bit moments have room for a pair from `at` on. */
static KOPT_NOINLINE_ void kopt_step_tail_(const kopt_stages_ *stages, kopt_tile_ *t, size_t at) {
    kopt_tail_ copies[KOPT_JOB_ARRAYS_];
    int m;
    kopt_open_tail_(copies, t->arrays, t->arrays_end, 0, t->job.end);
    for (m = 0; m < t->kind.moment_count; m++)
        if (kopt_has_scales_(kopt_moment_format_(t->kind, m))) t->job.moment[m] += 4 * at;
    kopt_step_tile_(stages, t);
    for (m = 0; m < t->kind.moment_count; m++)
        if (kopt_has_scales_(kopt_moment_format_(t->kind, m))) t->job.moment[m] -= 4 * at;
    kopt_close_tail_(t->arrays, t->arrays_end, t->job.end);
}

static void kopt_advance_tile_(kopt_tile_ *t, size_t n) {
    const kopt_job_array_ *a;
    for (a = t->arrays; a != t->arrays_end; a++) *a->at += n * a->bytes;
    t->job.first += n;
}

/* Steps elements [begin, end), tile by tile. buffer: room for a tile of each moment, for those of 8 bits; NULL if there
   is none. With 8-bit moments a tile is whole blocks, whose scales need all of their elements (begin is the first of a
   block). Otherwise a tile ends where the global index is a multiple of its size, as groups of random numbers do. */
static KOPT_NOINLINE_ void kopt_step_tiles_(const kopt_stages_ *stages, const kopt_job_ *whole, size_t begin,
                                            size_t end, float *buffer) {
    const kopt_begun_ *s = whole->step;
    const kopt_philox_key_ cipher = kopt_make_philox_key_(s->seed, s->step, whole->id, whole->stream);
    const kopt_kind_ kind = kopt_kind_of_(whole);
    const int buffered = buffer != NULL, random = kopt_needs_random_(kind);
    kopt_tile_ t;
    size_t i, n, whole_pairs, pair;
    int m, drawn = 0;
    while (!stages->find(&kind, &t.direction, &t.commit)) stages = stages->other;
    pair = stages->pair;
    t.job = *whole;
    t.kind = kind;
    t.prefetches = kopt_prefetches_(kind, end - begin, KOPT_SHARED_CACHE_);
    t.apart = stages->even_odd && kind.weight == KOPT_BF16 ? pair : 0;
    t.arrays_end = kopt_list_job_arrays_(t.arrays, &t.job, &t.kind);
    kopt_advance_tile_(&t, begin);
    t.job.begin = 0;
    t.random.number = t.random.stride = KOPT_BYTES_(t.random.lower);
    if (!random) memset(t.random.lower, 0, 2 * (end - begin < KOPT_TILE_ ? end - begin + pair : KOPT_TILE_));
    for (i = begin; i < end; i += n) {
        const uint64_t index = t.job.first;
        n = KOPT_TILE_ - (unsigned)((buffered ? i : index) % KOPT_TILE_);
        if (end - i < n) n = end - i;
        whole_pairs = n / pair * pair;
        if (!buffered && n < 4) { /* too few for vectors; kopt_walk_scalar_() does not read 8-bit codes */
            kopt_walk_scalar_(&t.job, 0, n);
            kopt_advance_tile_(&t, n);
            continue;
        }
        if (random)
            (stages->fill_random)(&t.random, &cipher, index, whole_pairs < n ? whole_pairs + pair : n, !drawn,
                                  !drawn && n == end - i);
        drawn = 1;
        for (m = 0; buffered && m < kind.moment_count; m++) {
            float *const moment = buffer + (size_t)m * KOPT_TILE_;
            t.scale[m] = NULL;
            if (!kopt_has_scales_(kopt_moment_format_(kind, m))) continue;
            t.scale[m] = kopt_scale_of_(whole, m) + i / KOPT_BLOCK_;
            t.job.moment[m] = KOPT_BYTES_(moment);
            (stages->decode)(moment, whole->moment[m] + i, t.scale[m], kopt_is_square_(kind.rule, m), n);
        }
        if (whole_pairs > 0) {
            t.job.end = whole_pairs;
            t.finds_scales = buffered;
            kopt_step_tile_(stages, &t);
            kopt_advance_tile_(&t, whole_pairs);
        }
        if (whole_pairs < n) {
            t.job.end = n - whole_pairs;
            t.finds_scales = 0;
            t.random.number += 2 * whole_pairs;
            t.random.stride += 2 * whole_pairs;
            kopt_step_tail_(stages, &t, whole_pairs);
            kopt_advance_tile_(&t, n - whole_pairs);
            t.random.number -= 2 * whole_pairs;
            t.random.stride -= 2 * whole_pairs;
            if (buffered) kopt_find_scales_(stages, &t, n);
        }
        for (m = 0; buffered && m < kind.moment_count; m++)
            if (t.scale[m] != NULL)
                (stages->encode)(whole->moment[m] + i, t.scale[m], buffer + (size_t)m * KOPT_TILE_,
                                 kopt_is_square_(kind.rule, m), m, kopt_moment_rounding_(kind, m), &t.random, n);
    }
}

static KOPT_NOINLINE_ void kopt_step_buffered_(const kopt_stages_ *s, const kopt_job_ *j, size_t begin, size_t end) {
    KOPT_ALIGN64_ float buffer[4 * KOPT_TILE_];
    kopt_step_tiles_(s, j, begin, end, buffer);
}

static KOPT_NOINLINE_ void kopt_walk_tiles_(const kopt_stages_ *stages, const kopt_job_ *j, size_t begin, size_t end) {
    if (kopt_has_blocks_(j->step))
        kopt_step_buffered_(stages, j, begin, end);
    else if (end - begin < 4)
        kopt_walk_scalar_(j, begin, end);
    else
        kopt_step_tiles_(stages, j, begin, end, NULL);
}
#endif

/* ---- 8-BIT MOMENTS IN SCALAR CODE -------------------------------------------------------------------------------- */

/* Elements of arrays on the stack, and of the ratios of StableAdamW. */
#ifdef KOPT_VECTOR_CODE_
#define KOPT_PART_ KOPT_SIGNS_
#define KOPT_RATIOS_ ((size_t)384)
#else
#define KOPT_PART_ KOPT_BLOCK_
#define KOPT_RATIOS_ KOPT_PART_
#endif

/* The number of an 8-bit code (section 6b). square: the root of a mean of squares. */
static KOPT_INLINE_KEYWORD_ float kopt_decode_number_(uint32_t code, float scale, int square) {
    float y = kopt_decode_q8_scalar_((code ^ 0x80u) - 0x80u, square, 0);
    KOPT_OPAQUE_FLOAT_(y); /* otherwise -Ofast turns 0 * scale into 0, even if scale is NaN */
    return kopt_mul_scalar_(y, scale);
}

/* Decodes n codes, from the first one of a block on, to fp32 at x, which has room for whole blocks. */
static void kopt_dequantise_(float *x, const kopt_byte_ *code, const kopt_byte_ *scale, size_t n, int square) {
    size_t i;
#ifdef KOPT_VECTOR_CODE_
    const kopt_stages_ *const stages = KOPT_KERNEL_(stages);
    if (stages != NULL) {
        (stages->decode)(x, code, scale, square, n);
        return;
    }
#endif
    for (i = 0; i < n; i++) {
        const float factor = kopt_as_f32_(kopt_scale_q8_(scale[i / KOPT_BLOCK_]));
        x[i] = kopt_decode_number_(code[i], factor, square);
    }
}

/* The 16-bit random numbers of consecutive elements. */
typedef struct kopt_random_reader_ {
    kopt_philox_key_ cipher;
    kopt_vu32_scalar_ words[4]; /* of the current Philox block */
    uint64_t first;             /* global index of element 0: set by the caller */
    uint32_t store;             /* k of KOPT_RANDOM_STORE_ */
} kopt_random_reader_;

/* The random number of element first + i. Call it for i = 0, 1, 2 ... without a gap. */
static KOPT_FORCE_INLINE_ uint32_t kopt_next_random16_(kopt_random_reader_ *d, size_t i) {
    const uint32_t r = kopt_random_at_scalar_(d->words, &d->cipher, d->first + i, i == 0);
    return KOPT_RANDOM_STORE_(r, d->store);
}

#ifdef KOPT_VECTOR_CODE_
/* kopt_quantise_() by an instruction set. A separate function, so that scalar code has no tile in its frame. */
static KOPT_NOINLINE_ void kopt_quantise_in_tile_(const kopt_stages_ *stages, kopt_byte_ *code, kopt_byte_ *scale,
                                                  const kopt_byte_ *x, size_t n, int square,
                                                  const kopt_random_reader_ *drawn) {
    KOPT_ALIGN64_ float buffer[KOPT_BLOCK_];
    kopt_random_tile_ random;
    memcpy(buffer, x, 4 * n);
    random.number = random.stride = KOPT_BYTES_(random.lower);
    if (drawn != NULL) (stages->fill_random)(&random, &drawn->cipher, drawn->first, KOPT_BLOCK_, 1, 1);
    (stages->find_scales)(scale, buffer, square, n);
    (stages->encode)(code, scale, buffer, square, drawn == NULL ? 0 : (int)drawn->store - 1,
                     drawn == NULL ? KOPT_NEAREST : KOPT_STOCHASTIC, &random, n);
}
#endif

/* Encodes n fp32 numbers of one block and stores its scale. drawn: NULL rounds to nearest. */
static KOPT_NOINLINE_ void kopt_quantise_(kopt_byte_ *code, kopt_byte_ *scale, const kopt_byte_ *x, size_t n,
                                          int square, kopt_random_reader_ *drawn) {
    uint32_t largest = 0, scale_bits;
    float inverse;
    size_t i;
#ifdef KOPT_VECTOR_CODE_
    const kopt_stages_ *const stages = KOPT_KERNEL_(stages);
    if (stages != NULL) {
        kopt_quantise_in_tile_(stages, code, scale, x, n, square, drawn);
        return;
    }
#endif
    for (i = 0; i < n; i++) {
        const uint32_t mag = kopt_load32_(x + 4 * i) & 0x7FFFFFFFu;
        if (mag > largest) largest = mag;
    }
    *scale = (kopt_byte_)kopt_exponent_q8_(largest, square);
    scale_bits = kopt_scale_q8_(*scale);
    inverse = kopt_codes_are_zero_(scale_bits) ? 0 : kopt_inverse_scale_q8_scalar_(scale_bits, square);
    for (i = 0; i < n; i++) {
        const uint32_t r = drawn == NULL ? 0x8000u : kopt_next_random16_(drawn, i);
        const float y = kopt_mul_scalar_(kopt_as_f32_(kopt_load32_(x + 4 * i)), inverse);
        code[i] = kopt_codes_are_zero_(scale_bits) ? 0 : (kopt_byte_)kopt_encode_q8_scalar_scalar_(y, square, r);
    }
}

/* The step of a job with 8-bit moments in scalar code. Block by block, it decodes the moments to fp32, steps the
   elements, and encodes the moments again. moment has room for one block of each moment. */
static KOPT_NOINLINE_ void kopt_run_blocks_(const kopt_job_ *whole) {
    const kopt_begun_ *s = whole->step;
    const kopt_kind_ kind = kopt_kind_of_(whole);
    float moment[4 * KOPT_BLOCK_];
    const size_t weight_bytes = kopt_bytes_of_(kind.weight), grad_bytes = kopt_bytes_of_(kind.grad);
    const size_t residual_bytes = kopt_bytes_of_residual_(kind.weight, kind.rounding);
    kopt_random_reader_ drawn;
    kopt_job_ job;
    size_t i, n;
    int m;
    job = *whole;
    drawn.cipher = kopt_make_philox_key_(s->seed, s->step, whole->id, KOPT_RANDOM_STEP_);
    for (i = whole->begin; i < whole->end; i += n) {
        const size_t block = i / KOPT_BLOCK_;
        n = whole->end - i < KOPT_BLOCK_ ? whole->end - i : KOPT_BLOCK_;
        for (m = 0; m < s->moment_count; m++) {
            job.moment[m] = whole->moment[m] + i * kopt_moment_bytes_(kind, m);
            if (!kopt_has_scales_(kopt_moment_format_(kind, m))) continue;
            job.moment[m] = (kopt_byte_ *)(moment + (unsigned)m * KOPT_BLOCK_);
            kopt_dequantise_(moment + (unsigned)m * KOPT_BLOCK_, whole->moment[m] + i, kopt_scale_of_(whole, m) + block,
                             n, kopt_is_square_(s->rule, m));
        }
        job.weight = whole->weight + i * weight_bytes;
        job.grad = whole->grad + i * grad_bytes;
        if (residual_bytes != 0) job.residual = whole->residual + i * residual_bytes;
        if (s->sync) job.slow = whole->slow + i * weight_bytes;
        if (s->sync && residual_bytes != 0) job.slow_residual = whole->slow_residual + i * residual_bytes;
        if (whole->copy != NULL) job.copy = whole->copy + i * kopt_bytes_of_(whole->copy_format);
        job.first = whole->first + i;
        kopt_walk_scalar_(&job, 0, n);
        for (m = 0; m < s->moment_count; m++) {
            const int nearest = kopt_moment_rounding_(kind, m) == KOPT_NEAREST;
            if (!kopt_has_scales_(kopt_moment_format_(kind, m))) continue;
            drawn.first = job.first;
            drawn.store = (uint32_t)m + 1;
            kopt_quantise_(whole->moment[m] + i, kopt_scale_of_(whole, m) + block, job.moment[m], n,
                           kopt_is_square_(s->rule, m), nearest ? NULL : &drawn);
        }
    }
}

/* ---- PUBLIC FUNCTIONS -------------------------------------------------------------------------------------------- */

KOPT_API_ uint32_t kopt_random(kopt_random_key key, uint32_t stream, uint64_t i) {
    const kopt_philox_key_ cipher = kopt_make_philox_key_(key.seed, key.step, key.id, stream);
    uint32_t words[4];
    return kopt_random_at_scalar_(words, &cipher, key.first_index + i, 1);
}

/* ---- state: init, read and write ---- */

/* Stores an fp32 value, given by its bits, as a weight and its residual. */
static void kopt_write_weight_(const kopt_layout_ *l, kopt_byte_ *weight, kopt_byte_ *residual, uint32_t bits) {
    uint32_t kept;
    const uint32_t u = kopt_split_weight_scalar_(l->rounding, l->weight_format, bits, &kept);
    kopt_store_at_scalar_(weight, 0, l->weight_bytes, u);
    if (l->residual_bytes != 0) kopt_store_at_scalar_(residual, 0, l->residual_bytes, kept);
}

/* Converts v->n elements, rounded to nearest if stream is 0, otherwise stochastically. */
static KOPT_NOINLINE_ void kopt_convert_part_(kopt_conversion_ *v, kopt_byte_ *to, kopt_format to_format,
                                              const kopt_byte_ *from, kopt_format from_format, int stream) {
    v->dst = to;
    v->src = from;
    v->dst_format = to_format;
    v->src_format = from_format;
    v->stochastic = stream;
    if (to_format == KOPT_F32 && from_format == KOPT_F32)
        memcpy(to, from, 4 * v->n);
    else
        KOPT_KERNEL_(convert)(v);
}

/* Copies a slot to out as fp32. from: its array. beside: the residuals of weights, or the scales of a moment. */
static KOPT_NOINLINE_ void kopt_read_slot_(const kopt_layout_ *l, kopt_slot slot, const kopt_byte_ *from,
                                           const kopt_byte_ *beside, float *out) {
    const int is_weight = slot == KOPT_SLOT_WEIGHT, m = (int)slot - 1;
    const kopt_format format = is_weight ? l->weight_format : kopt_format_in_layout_(l, m);
    const int is_root = !is_weight && kopt_holds_root_(format, l->rule, m);
    const int has_residual = is_weight && l->residual_bytes != 0, adds = l->rounding == KOPT_KAHAN;
    kopt_environment_ environment;
    kopt_conversion_ v;
    float x[KOPT_PART_], y[KOPT_PART_];
    size_t i, k;
    v.first = 0;
    kopt_enter_(&environment);
    for (i = 0; i < l->n; i += v.n) {
        v.n = l->n - i < KOPT_PART_ ? l->n - i : KOPT_PART_;
        if (kopt_has_scales_(format))
            kopt_dequantise_(x, from + i, beside + i / KOPT_BLOCK_, v.n, is_root);
        else
            kopt_convert_part_(&v, (kopt_byte_ *)x, KOPT_F32, from + i * kopt_bytes_of_(format), format, 0);
        for (k = 0; is_root && k < v.n; k++) x[k] = kopt_mul_(x[k], x[k]);
        if (has_residual && adds) {
            kopt_convert_part_(&v, (kopt_byte_ *)y, KOPT_F32, beside + 2 * i, format, 0);
            KOPT_KERNEL_(add_scaled)
            ((kopt_byte_ *)x, (kopt_byte_ *)y, format == KOPT_FP16 ? 1.0f / 2048 : 1, 0x7FFFFFFFu, 0, v.n);
        }
        for (k = 0; has_residual && !adds && k < v.n; k++)
            x[k] = kopt_full_weight_scalar_(l->rounding, format, kopt_load_at_scalar_(from, i + k, 2),
                                            kopt_load_at_scalar_(beside, i + k, l->residual_bytes), NULL);
        memcpy((kopt_byte_ *)(out + i), x, 4 * v.n); /* at any address */
    }
    kopt_leave_(&environment);
}

static void kopt_write_weights_(const kopt_layout_ *l, const kopt_tensor *t, const float *values) {
    kopt_byte_ *const weight = (kopt_byte_ *)t->weight;
    kopt_environment_ environment;
    kopt_job_ a;
    size_t i;
    kopt_place_state_(&a, l, t);
    if (l->residual_bytes == 0) a.residual = weight; /* any address */
    kopt_enter_(&environment);
    for (i = 0; i < t->n; i++)
        kopt_write_weight_(l, weight + i * l->weight_bytes, a.residual + i * l->residual_bytes,
                           kopt_load32_((const kopt_byte_ *)(values + i)));
    kopt_leave_(&environment);
}

/* Sets a moment to the nearest values that its format has. That of a root has no sign: -0 becomes 0. */
static void kopt_write_moment_(const kopt_layout_ *l, const kopt_tensor *t, int m, const float *values) {
    const kopt_format format = kopt_format_in_layout_(l, m);
    const int is_root = kopt_holds_root_(format, l->rule, m);
    float x[KOPT_BLOCK_];
    kopt_environment_ environment;
    kopt_job_ a;
    size_t i, k, n;
    kopt_place_state_(&a, l, t);
    kopt_enter_(&environment);
    for (i = 0; i < t->n; i += n) {
        n = t->n - i < KOPT_BLOCK_ ? t->n - i : KOPT_BLOCK_;
        memcpy(x, (const kopt_byte_ *)(values + i), 4 * n); /* at any address */
        for (k = 0; is_root && k < n; k++) x[k] = kopt_as_f32_(kopt_as_u32_(kopt_sqrt_(x[k])) & 0x7FFFFFFFu);
        if (kopt_has_scales_(format))
            kopt_quantise_(a.moment[m] + i, kopt_scale_of_(&a, m) + i / KOPT_BLOCK_, (const kopt_byte_ *)x, n, is_root,
                           NULL);
        for (k = 0; !kopt_has_scales_(format) && k < n; k++) {
            uint32_t bits = kopt_load32_((const kopt_byte_ *)(x + k));
            if (format != KOPT_F32) bits = kopt_round_nearest16_scalar_(x[k], format);
            if (is_root && bits == 0 && kopt_as_u32_(x[k]) != 0) bits = 1; /* a positive root never becomes 0 */
            kopt_store_at_scalar_(a.moment[m], i + k, kopt_bytes_of_(format), bits);
        }
    }
    kopt_leave_(&environment);
}

/* After the weights have been set: fills t->copy, if there is one, and Ranger's slow weights. */
static void kopt_refresh_(const kopt_layout_ *l, const kopt_tensor *t, int slow) {
    kopt_job_ a;
    kopt_place_state_(&a, l, t);
    if (slow && l->rule == KOPT_RULE_RANGER) {
        memcpy(a.slow, t->weight, t->n * l->weight_bytes);
        if (l->residual_bytes != 0) memcpy(a.slow_residual, a.residual, t->n * l->residual_bytes);
    }
    if (t->copy != NULL && kopt_convert(t->copy, t->copy_format, t->weight, l->weight_format, t->n) != KOPT_OK)
        return; /* cannot be: the caller has checked the copy */
}

/* Does an array overlap the memory of a tensor? `except` is a set of kinds of memory that it may overlap; of a copy
   only one in fp32 that is the array itself. */
static KOPT_NOINLINE_ int kopt_overlaps_tensor_(const void *x, size_t size, const kopt_tensor *t, const kopt_layout_ *l,
                                                unsigned except) {
    const kopt_memory_range_ *a;
    kopt_memory_ memory;
    kopt_list_memory_(&memory, t, l);
    if (x != t->copy || t->copy_format != KOPT_F32) except &= ~(1u << KOPT_COPY_);
    for (a = memory.range; a != memory.end; a++)
        if ((except >> a->what & 1u) == 0 && kopt_overlap_(x, size, a->at, a->size)) return 1;
    return 0;
}

static int kopt_overlaps_list_(const void *x, size_t size, const kopt_optimizer *opt, const kopt_tensor *tensors,
                               size_t count, unsigned except) {
    size_t i;
    for (i = 0; i < count; i++) {
        const kopt_layout_ l = kopt_layout_for_(opt, &tensors[i]);
        if (kopt_overlaps_tensor_(x, size, &tensors[i], &l, except)) return 1;
    }
    return 0;
}

static kopt_result kopt_check_states_(uint64_t *bytes, const kopt_optimizer *opt, const kopt_tensor *tensors,
                                      size_t count, kopt_checks_ checks);

/* The checks of kopt_state_init(). */
static kopt_result kopt_check_init_(const kopt_optimizer *opt, const kopt_tensor *tensors, size_t count,
                                    const float *weights) {
    const unsigned except = 1u << KOPT_GRADS_ | (unsigned)(count == 1) << KOPT_COPY_;
    uint64_t bytes;
    size_t i, length = 0;
    const kopt_result result = kopt_check_states_(&bytes, opt, tensors, count, KOPT_CHECK_MEMORY_);
    if (result != KOPT_OK) return result;
    for (i = 0; i < count; length += tensors[i++].n)
        if (tensors[i].n > ~(size_t)0 / 4 - length) return KOPT_ERROR_BOUNDS;
    return kopt_overlaps_list_(weights, length * 4, opt, tensors, count, except) ? KOPT_ERROR_OVERLAP : KOPT_OK;
}

KOPT_API_ kopt_result kopt_state_init(const kopt_optimizer *opt, const kopt_tensor *tensors, size_t count,
                                      const float *weights) {
    const kopt_result result = kopt_check_init_(opt, tensors, count, weights);
    size_t i;
    if (result != KOPT_OK) return result;
    for (i = 0; i < count; i++) {
        const kopt_tensor *const t = &tensors[i];
        const kopt_layout_ l = kopt_layout_for_(opt, t);
        if (t->n == 0) continue;
        if (t->arrays != NULL) {
            kopt_array_ array[KOPT_ARRAYS_], *a, *const end = kopt_list_arrays_(array, &l, t);
            for (a = array; a != end; a++) memset(a->at, 0, a->n * a->bytes);
        } else if (l.total != 0) {
            kopt_make_header_((kopt_byte_ *)t->state, opt, t->weight_format, t->id, t->n, t->first_index);
            memset((kopt_byte_ *)t->state + KOPT_HEADER_, 0, l.total - KOPT_HEADER_);
        }
        if (weights != NULL) {
            kopt_write_weights_(&l, t, weights);
            weights += t->n;
        }
        kopt_refresh_(&l, t, 1);
    }
    return KOPT_OK;
}

/* Draws the residuals of a tensor with elements, which all are 0. */
static void kopt_dither_(const kopt_optimizer *opt, const kopt_tensor *t, const kopt_layout_ *l) {
    kopt_environment_ environment;
    kopt_random_reader_ drawn;
    kopt_byte_ *const weight = (kopt_byte_ *)t->weight;
    kopt_job_ a;
    const int is_fp16 = t->weight_format == KOPT_FP16;
    size_t i;
    kopt_place_state_(&a, l, t);
    drawn.cipher = kopt_make_philox_key_(opt->seed, 0, t->id, KOPT_RANDOM_DITHER_);
    drawn.first = t->first_index;
    drawn.store = 0;
    kopt_enter_(&environment);
    for (i = 0; i < t->n; i++) { /* kept: in units of 2^-16 ulp, plus half an ulp. The sum is exact in fp32 */
        const uint32_t w = kopt_load16_(weight + 2 * i), mag = w & 0x7FFFu, r = kopt_next_random16_(&drawn, i);
        uint32_t kept = opt->rounding != KOPT_EXACT ? r & 0xFF00u : is_fp16 ? r & 0xFFF8u : r;
        if (opt->rounding == KOPT_KAHAN) kept += 0x80u; /* the middle: no tie, and a bf16 compensation holds it */
        if (is_fp16 ? mag - 1 >= 0x7BFFu : mag - 0x0D80u >= 0x7200u) continue;
        kopt_write_weight_(
            l, weight + 2 * i, a.residual + i * l->residual_bytes,
            kopt_as_u32_(kopt_full_weight_scalar_(KOPT_EXACT, t->weight_format, w, kept ^ 0x8000u, NULL)));
    }
    kopt_leave_(&environment);
    kopt_refresh_(l, t, 1);
}

KOPT_API_ kopt_result kopt_state_dither(const kopt_optimizer *opt, const kopt_tensor *tensors, size_t count) {
    uint64_t bytes;
    size_t i, k;
    const kopt_result result = kopt_check_states_(&bytes, opt, tensors, count, KOPT_CHECK_STATE_);
    if (result != KOPT_OK) return result;
    if (opt->rule == KOPT_RULE_EMA) return KOPT_ERROR_OPTION;
    for (i = 0; i < count; i++) {
        const kopt_layout_ l = kopt_layout_for_(opt, &tensors[i]);
        kopt_job_ a;
        kopt_place_state_(&a, &l, &tensors[i]);
        if (tensors[i].weight_format != KOPT_F32 && opt->rounding == KOPT_NEAREST) return KOPT_ERROR_OPTION;
        for (k = 0; k < tensors[i].n * l.residual_bytes; k++)
            if (a.residual[k] != 0) return KOPT_ERROR_STEP;
    }
    for (i = 0; i < count; i++) {
        const kopt_layout_ l = kopt_layout_for_(opt, &tensors[i]);
        if (l.residual_bytes != 0 && tensors[i].n != 0) kopt_dither_(opt, &tensors[i], &l);
    }
    return KOPT_OK;
}

/* Checks a call that reads a slot to n fp32 values or writes it from them, of which `except` says what they may be. */
static kopt_result kopt_check_slot_(kopt_layout_ *l, const kopt_optimizer *opt, const kopt_tensor *t, kopt_slot slot,
                                    const void *values, unsigned except) {
    const kopt_result result = kopt_check_state_(l, opt, t, KOPT_CHECK_STATE_);
    if (result != KOPT_OK) return result;
    if ((unsigned)slot > (unsigned)l->moment_count) return KOPT_ERROR_OPTION;
    if (t->n != 0 && values == NULL) return KOPT_ERROR_NULL;
    return kopt_overlaps_tensor_(values, t->n * 4, t, l, 1u << KOPT_GRADS_ | except) ? KOPT_ERROR_OVERLAP : KOPT_OK;
}

KOPT_API_ kopt_result kopt_state_read(const kopt_optimizer *opt, const kopt_tensor *t, kopt_slot slot, float *out) {
    kopt_layout_ l;
    kopt_job_ a;
    const kopt_result result = kopt_check_slot_(&l, opt, t, slot, out, 0);
    if (result != KOPT_OK || t->n == 0) return result;
    kopt_place_state_(&a, &l, t);
    if (slot == KOPT_SLOT_WEIGHT)
        kopt_read_slot_(&l, slot, (const kopt_byte_ *)t->weight, a.residual, out);
    else
        kopt_read_slot_(&l, slot, a.moment[slot - 1], kopt_scale_of_(&a, (int)slot - 1), out);
    return KOPT_OK;
}

KOPT_API_ kopt_result kopt_state_write(const kopt_optimizer *opt, const kopt_tensor *t, kopt_slot slot,
                                       const float *in) {
    kopt_layout_ l;
    const kopt_result result =
        kopt_check_slot_(&l, opt, t, slot, in, (unsigned)(slot == KOPT_SLOT_WEIGHT) << KOPT_COPY_);
    if (result != KOPT_OK || t->n == 0) return result;
    if (slot == KOPT_SLOT_WEIGHT) {
        kopt_write_weights_(&l, t, in);
        kopt_refresh_(&l, t, 1);
    } else {
        kopt_write_moment_(&l, t, (int)slot - 1, in);
    }
    return KOPT_OK;
}

KOPT_API_ kopt_result kopt_state_arrays_of(const kopt_optimizer *opt, const kopt_tensor *t, kopt_state_arrays *arrays) {
    kopt_state_arrays found; /* *arrays may be *t->arrays */
    kopt_layout_ l;
    kopt_job_ a;
    int m, there;
    const kopt_result result = kopt_check_state_(&l, opt, t, KOPT_CHECK_STATE_);
    if (result != KOPT_OK) return result;
    if (arrays == NULL) return KOPT_ERROR_NULL;
    there = t->n != 0 || t->arrays != NULL; /* an empty tensor has no block */
    kopt_place_state_(&a, &l, t);
    memset(&found, 0, sizeof found);
    found.size = sizeof found;
    if (l.residual_bytes != 0) found.residual = a.residual;
    for (m = 0; m < l.moment_count; m++) {
        found.moment[m] = a.moment[m];
        if (kopt_has_scales_(kopt_format_in_layout_(&l, m)) && there) found.scale[m] = kopt_scale_of_(&a, m);
    }
    if (l.rounding == KOPT_FEEDBACK && there) found.rates = kopt_rates_of_(t);
    if (l.rule == KOPT_RULE_RANGER) found.slow = a.slow;
    if (l.rule == KOPT_RULE_RANGER && l.residual_bytes != 0) found.slow_residual = a.slow_residual;
    *arrays = found;
    return KOPT_OK;
}

/* ---- checksums, arrays of a state, and its header ---- */

/* The CRC-32 of zlib, PNG and IEEE 802.3, four bits at a time. By kopt_crc_fast_() where the machine has carry-less
   multiplication or an instruction for this CRC. Else, in a build with vectors, eight bytes at a time, by 16
   independent lookups: table[k][x] is what the four bits x become after 4 * k more bits. */
static const uint32_t kopt_crc_table_[16] = {
    0x00000000u, 0x1DB71064u, 0x3B6E20C8u, 0x26D930ACu, 0x76DC4190u, 0x6B6B51F4u, 0x4DB26158u, 0x5005713Cu,
    0xEDB88320u, 0xF00F9344u, 0xD6D6A3E8u, 0xCB61B38Cu, 0x9B64C2B0u, 0x86D3D2D4u, 0xA00AE278u, 0xBDBDF21Cu};

typedef struct kopt_crc_ {
    uint32_t value; /* begins as 0xFFFFFFFF; the checksum is its complement */
#ifdef KOPT_VECTORS16_
    uint32_t table[16][16];
#endif
#ifdef KOPT_CRC_VECTORS_
    int fast; /* the machine has what kopt_crc_fast_() takes */
#endif
} kopt_crc_;

static void kopt_crc_begin_(kopt_crc_ *crc) {
#ifdef KOPT_VECTORS16_
    int k, x;
    memcpy(crc->table[0], kopt_crc_table_, sizeof kopt_crc_table_);
    for (k = 1; k < 16; k++)
        for (x = 0; x < 16; x++)
            crc->table[k][x] = (crc->table[k - 1][x] >> 4) ^ kopt_crc_table_[crc->table[k - 1][x] & 15u];
#endif
#ifdef KOPT_CRC_VECTORS_
    crc->fast = kopt_isa_current() != KOPT_ISA_SCALAR;
#ifdef KOPT_X86_
    if (crc->fast) {
        uint32_t r[4];
        kopt_cpuid_(1, r);
        crc->fast = (int)(r[2] >> 1 & 1u); /* PCLMULQDQ */
    }
#endif
#endif
    crc->value = 0xFFFFFFFFu;
}

static KOPT_NOINLINE_ void kopt_crc_add_(kopt_crc_ *crc, const kopt_byte_ *p, size_t n) {
    uint32_t value = crc->value;
#ifdef KOPT_CRC_VECTORS_
    if (crc->fast && n >= 64) {
        const size_t most = n & ~(size_t)63;
        value = kopt_crc_fast_(value, p, most);
        p += most;
        n -= most;
    }
#endif
#ifdef KOPT_VECTORS16_
#define KOPT_CRC_BYTE_(word, i, k) \
    (crc->table[k][(word) >> (8 * (i)) & 15u] ^ crc->table[(k) - 1][(word) >> (8 * (i) + 4) & 15u])
#define KOPT_CRC_WORD_(word, k)                                                                         \
    (KOPT_CRC_BYTE_(word, 0, k) ^ KOPT_CRC_BYTE_(word, 1, (k) - 2) ^ KOPT_CRC_BYTE_(word, 2, (k) - 4) ^ \
     KOPT_CRC_BYTE_(word, 3, (k) - 6))
    for (; n >= 8; n -= 8, p += 8) {
        const uint32_t low = kopt_load_le32_(p) ^ value, high = kopt_load_le32_(p + 4);
        value = KOPT_CRC_WORD_(low, 15) ^ KOPT_CRC_WORD_(high, 7);
    }
#undef KOPT_CRC_BYTE_
#undef KOPT_CRC_WORD_
#endif
    for (; n > 0; n--) {
        value ^= *p++;
        value = (value >> 4) ^ kopt_crc_table_[value & 15u];
        value = (value >> 4) ^ kopt_crc_table_[value & 15u];
    }
    crc->value = value;
}

static int kopt_little_endian_(void) {
    const uint16_t one = 1;
    return *(const kopt_byte_ *)&one == 1;
}

/* Converts n numbers from the machine's byte order to little-endian, or back. */
static void kopt_swap_(kopt_byte_ *p, size_t n, size_t bytes) {
    if (kopt_little_endian_()) return;
    for (; n > 0; n--, p += bytes) {
        size_t i;
        for (i = 0; i < bytes / 2; i++) {
            const kopt_byte_ low = p[i];
            p[i] = p[bytes - 1 - i];
            p[bytes - 1 - i] = low;
        }
    }
}

static KOPT_FORCE_INLINE_ kopt_array_ *kopt_add_array_(kopt_array_ *to, kopt_byte_ *at, size_t n, size_t bytes) {
    const kopt_array_ array = {at, n, bytes};
    *to = array;
    return bytes == 0 ? to : to + 1;
}

/* Lists the arrays of a state in array[], in the order of a checkpoint. Returns the end of the list. */
static kopt_array_ *kopt_list_arrays_(kopt_array_ *array, const kopt_layout_ *l, const kopt_tensor *t) {
    kopt_job_ a;
    int m;
    if (l->total == 0) return array;
    kopt_place_state_(&a, l, t);
    array = kopt_add_array_(array, a.residual, l->n, l->residual_bytes);
    for (m = 0; m < l->moment_count; m++) {
        const kopt_format format = kopt_format_in_layout_(l, m);
        array = kopt_add_array_(array, a.moment[m], l->n, kopt_bytes_of_(format));
        if (kopt_has_scales_(format))
            array = kopt_add_array_(array, kopt_scale_of_(&a, m), kopt_blocks_(l->n, KOPT_BLOCK_), 1);
    }
    if (l->rounding == KOPT_FEEDBACK) array = kopt_add_array_(array, kopt_rates_of_(t), 4, 4);
    if (l->rule != KOPT_RULE_RANGER) return array;
    array = kopt_add_array_(array, a.slow, l->n, l->weight_bytes);
    return kopt_add_array_(array, a.slow_residual, l->n, l->residual_bytes);
}

/* Makes the optimizer that a header describes; defaults elsewhere. saved: the header is of a checkpoint or in one. */
static KOPT_NOINLINE_ void kopt_optimizer_from_header_(kopt_optimizer *opt, const kopt_byte_ *h, int saved) {
    const int sgd = h[5] == KOPT_RULE_SGD, moments = h[9] & 7, q8 = kopt_format_byte_(KOPT_Q8);
    const int first = h[8], second = h[11] == 0 ? first : h[11] - 1;
    memset(opt, 0, sizeof *opt);
    kopt_set_defaults_(opt, (kopt_rule)h[5], 0);
    opt->lr = opt->max_lr = 0; /* kopt_ema() has 1 */
    opt->rounding = (kopt_rounding)(h[7] & 15);
    opt->first_moment_format = first == q8 ? KOPT_Q8 : (kopt_format)first;
    opt->second_moment_format = second == q8 ? KOPT_Q8 : (kopt_format)second;
    opt->amsgrad = h[5] == KOPT_RULE_ADAM && moments == 3;
    if (saved) {
        opt->lr = opt->max_lr = kopt_load_number_(h + 48);
        opt->weight_decay = kopt_load_number_(h + 52);
        opt->decay_mode = (kopt_decay_mode)(h[9] >> 4 & 3);
        opt->moment_rounding = (kopt_rounding)(h[7] >> 4 & 1);
        opt->residual_rounding = (kopt_rounding)(h[7] >> 5 & 1);
        opt->nesterov = h[9] >> 3 & 1;
        opt->stable = h[9] >> 6 & 1;
        opt->atan2_outside = h[9] >> 7;
        opt->seed = kopt_load_le64_(h + 32);
        opt->step = kopt_load_le32_(h + 40);
        if (sgd && moments != 0) opt->momentum = kopt_load_number_(h + 56);
        if (sgd) opt->dampening = kopt_load_number_(h + 60);
        if (!sgd) opt->beta1 = kopt_load_number_(h + 56);
        if (!sgd) opt->beta2 = kopt_load_number_(h + 60);
    }
    /* With a moment the momentum was above 0, but in fp32 it may have underflowed to 0. */
    if (sgd && moments != 0 && !kopt_less64_(0, opt->momentum)) opt->momentum = 1.4012984643248171e-45;
    if (opt->stable) opt->eps = KOPT_1E_MINUS_6_;
}

static int kopt_header_options_valid_(const kopt_byte_ *h) {
    return h[5] <= KOPT_LAST_RULE_ && h[6] <= KOPT_FP16 && (h[7] & 15u) <= KOPT_LAST_ROUNDING_ &&
           (h[8] <= KOPT_FP16 || h[8] == kopt_format_byte_(KOPT_Q8)) && (h[9] & 7u) <= 4u &&
           (h[11] <= 1 + KOPT_FP16 || h[11] == 1 + kopt_format_byte_(KOPT_Q8)) &&
           (h[9] >> 4 & 3u) <= KOPT_DECAY_FULLY_DECOUPLED;
}

KOPT_API_ const char *kopt_explain(const kopt_optimizer *opt, const kopt_tensor *tensors, size_t count) {
    const char *words = NULL, *uninitialized = NULL; /* words that wait for other reasons */
    kopt_neighbours_ list;
    kopt_begun_ s;
    size_t i;
    list.previous = NULL;
    list.current = 0;
    if (opt != NULL && kopt_judge_options_(opt, &words) != KOPT_OK) return words;
    if (opt != NULL && kopt_next_step_(&s, opt) == KOPT_ERROR_RANGE) {
        if (!kopt_finite_(s.grad_scale)) return "grad_scale * clip: the product overflows a float";
        if (!kopt_finite_(s.undecayed_rate))
            return "lr: with the corrections and factors of the rule, it overflows a float";
        if (!kopt_finite_(s.weight_decay)) return "lr * weight_decay, or lr / max_lr * weight_decay, overflows a float";
        return "atan2_b: with the corrections of the rule, it overflows a float";
    }
    for (i = 0; tensors != NULL && i < count; i++) {
        const kopt_tensor *const t = &tensors[i];
        kopt_layout_ l;
        kopt_result result;
        if (kopt_judge_tensor_(t, &words) != KOPT_OK) return words;
        if (opt == NULL || t->n == 0) continue;
        l = kopt_layout_for_(opt, t);
        result = kopt_judge_block_(t, &l, &words);
        if (result != KOPT_OK && result != KOPT_ERROR_STATE) return words;
        if (result != KOPT_OK) uninitialized = words;
        result = kopt_check_memory_(&list.memory[list.current], t, &l, 0);
        if (result == KOPT_ERROR_NULL) return "weight: NULL";
        if (result == KOPT_ERROR_SIZE) return "state_size: less than kopt_state_size()";
        if (result == KOPT_ERROR_OVERLAP) return "weight, state, copy or counts: two of them overlap";
        result = kopt_check_neighbours_(&list, t, opt->zero_grad);
        if (result == KOPT_ERROR_OVERLAP) return "weight, grad, state, copy or counts: one overlaps the tensor before";
        if (result == KOPT_ERROR_ID) return "id: it is not above that of the tensor before";
    }
    if (uninitialized != NULL) return uninitialized;
    return opt == NULL && count == 0 ? "the optimizer is NULL"
                                     : "all fields of the optimizer and the tensors are valid, if grad is: look at it, "
                                       "at the other arguments, and for a checkpoint at kopt_inspect()";
}

/* ---- StableAdamW ---- */

/* kopt_norm_add() within kopt_enter_(). */
static void kopt_norm_tool_(kopt_norm *norm, const kopt_byte_ *x, kopt_format format, size_t n) {
    const kopt_tool_ t = {KOPT_TOOL_NORM_, format, format, x, NULL, n, norm, 0, NULL, 0, 0};
    kopt_norm_carry_(norm);
    KOPT_KERNEL_(tool)(&t);
}

/* StableAdamW: adds the squares of g / max(sqrt(v) * root_scale, eps) of elements [begin, end) to norm (section 6a). */
static KOPT_NOINLINE_ void kopt_measure_(const kopt_layout_ *layout, const kopt_begun_ *s, const kopt_tensor *t,
                                         size_t begin, size_t end, kopt_norm *norm) {
    const int q8 = kopt_has_scales_(s->second_moment_format);
    size_t chunk = KOPT_RATIOS_;
    kopt_environment_ environment;
    kopt_job_ whole, job;
    float ratios[KOPT_RATIOS_]; /* with 8-bit moments, first the decoded roots, which the ratios overwrite */
    kopt_byte_ *const ratio_bytes = (kopt_byte_ *)ratios;
    size_t i, n;
    if (q8) chunk = KOPT_BLOCK_;
    kopt_make_job_(&whole, layout, s, t, begin, end);
    job = whole;
    kopt_enter_(&environment);
    for (i = begin; i < end; i += n) {
        n = chunk - i % chunk;
        if (end - i < n) n = end - i;
        job.begin = i;
        job.end = i + n;
        if (q8) {
            job.moment[1] = ratio_bytes;
            kopt_dequantise_(ratios, whole.moment[1] + i, kopt_scale_of_(&whole, 1) + i / KOPT_BLOCK_, n, 1);
            job.weight = whole.weight + i * layout->weight_bytes;
            if (layout->residual_bytes != 0) job.residual = whole.residual + i * layout->residual_bytes;
            job.grad = whole.grad + i * kopt_bytes_of_(t->grad_format);
            job.begin = 0;
            job.end = n;
        }
        KOPT_KERNEL_(measure)(&job, job.begin, ratio_bytes);
        kopt_norm_tool_(norm, ratio_bytes, KOPT_F32, n);
    }
    kopt_leave_(&environment);
}

/* (1 - cos(pi y)) / 2 = sin(pi y / 2)^2 for 0 < y <= 1/2, within a relative 6e-16. The sine is y P6(y^2), fitted like
   the polynomials of vector mathematics (docs/numerics.md section 14), but in binary64: within a relative 4e-17. */
static double kopt_half_cosine_(double y) {
    const double z = kopt_mul64_(y, y);
    double p = KOPT_DOUBLE_(5.626849632470721e-08, 0x3E6E357Bu, 0xB6294AE5u);
    p = kopt_add64_(kopt_mul64_(p, z), KOPT_DOUBLE_(-3.5985856851716116e-06, 0xBECE2FE7u, 0x66F665BAu));
    p = kopt_add64_(kopt_mul64_(p, z), KOPT_DOUBLE_(0.00016044113267913118, 0x3F250782u, 0xD5E89456u));
    p = kopt_add64_(kopt_mul64_(p, z), KOPT_DOUBLE_(-0.004681754129623581, 0xBF732D2Cu, 0xCDFE8D0Au));
    p = kopt_add64_(kopt_mul64_(p, z), KOPT_DOUBLE_(0.0796926262458441, 0x3FB466BCu, 0x67754FFBu));
    p = kopt_add64_(kopt_mul64_(p, z), KOPT_DOUBLE_(-0.6459640975062381, 0xBFE4ABBCu, 0xE625BE09u));
    p = kopt_add64_(kopt_mul64_(p, z), KOPT_DOUBLE_(1.5707963267948966, 0x3FF921FBu, 0x54442D18u));
    p = kopt_mul64_(p, y);
    return kopt_mul64_(p, p);
}

KOPT_API_ double kopt_cosine_lr(uint32_t step, uint32_t warmup, uint32_t steps, double peak, double last) {
    const uint32_t top = warmup == 0 ? 0 : warmup - 1, down = step - top, left = steps - 1 - step;
    kopt_environment_ environment;
    double lr;
    if (warmup > steps || !kopt_between_(peak, 0, KOPT_LARGEST64_) || !kopt_between_(last, 0, KOPT_LARGEST64_))
        return kopt_nan64_();
    if (step >= steps || (step >= warmup && left == 0)) return last;
    if (step == top) return peak;
    kopt_enter_(&environment);
    if (step < top) {
        lr = kopt_mul64_(peak, kopt_div64_((double)(step + 1), (double)warmup));
    } else { /* from the nearer end: near it, steps differ by less than an ulp of 1 */
        lr = kopt_half_cosine_(kopt_div64_((double)(down <= left ? down : left), (double)(down + left)));
        lr = kopt_mul64_(kopt_sub64_(peak, last), lr);
        lr = down <= left ? kopt_sub64_(peak, lr) : kopt_add64_(last, lr);
    }
    kopt_leave_(&environment);
    return lr;
}

KOPT_API_ size_t kopt_list_length(const kopt_tensor *tensors, size_t count) {
    size_t i, length = 0;
    if (tensors == NULL) return 0;
    for (i = 0; i < count; length += tensors[i++].n)
        if (tensors[i].n > ~length) return 0;
    return length;
}

/* ---- checkpoints ---- */

/* A checkpoint: a header of 176 bytes; each tensor: its header, the weights, the arrays of its state block; the CRC-32
   of all bytes before it and one more zero byte (4 bytes; without the zero byte, all checkpoints as a whole would have
   the same CRC-32). The header is like that of a tensor (kopt_make_saved_header_()), with these differences:
     0 "KSAV"    4 version 1    10 0    12 0 (4)    16 number of tensors (8)    24 bytes of the checkpoint (8)
    44 0 (4)    48 KOPT_SAVE_NUMBERS_ (binary64)    168 lookahead (4)
   172 maximize + 2 * zero_grad + 4 * moments_only (4)
   Of an average lr is 1 - beta1, and beta1 is lr (kopt_change_form_()).
   Zeros pad each array to a multiple of 4 bytes. All numbers are little-endian. */
enum { KOPT_SAVE_VERSION_ = 1, KOPT_SAVE_HEADER_ = 176 };
#define KOPT_SAVE_MAGIC_ 0x5641534Bu /* "KSAV" */

/* clang-format off */
#define KOPT_SAVE_NUMBERS_(X)                                                                                         \
    X(48, lr) X(56, max_lr) X(64, weight_decay) X(72, lookahead_rate) X(80, beta1) X(88, beta2) X(96, beta3)          \
    X(104, eps) X(112, momentum) X(120, dampening) X(128, grad_scale) X(136, clip) X(144, atan2_a) X(152, atan2_b)    \
    X(160, sharpness)
/* clang-format on */

/* What a walk over a checkpoint does with its bytes. */
typedef enum kopt_walk_ {
    KOPT_SAVING_,   /* writes them from the tensors */
    KOPT_CHECKING_, /* reads them, and compares all that is no array */
    KOPT_LOADING_   /* the same, and reads the arrays into the tensors */
} kopt_walk_;

typedef struct kopt_stream_ {
    kopt_walk_ walk;
    const kopt_file *file;
    uint64_t offset;    /* bytes written or read so far */
    kopt_result result; /* after an error nothing more is written or read */
    kopt_result wrong;  /* an error that waits for the checksum, because damage explains it better */
    uint32_t checksum;  /* of the whole */
    kopt_crc_ crc;
#ifdef KOPT_VECTORS16_
    kopt_byte_ buffer[4096];
#else
    kopt_byte_ buffer[256];
#endif
} kopt_stream_;

static void kopt_walk_bytes_(kopt_stream_ *s, kopt_byte_ *p, size_t n) {
    const kopt_file *const f = s->file;
    if (s->result != KOPT_OK || n == 0) return;
    if (s->walk == KOPT_SAVING_ ? f->write(f->user, p, n) : f->read(f->user, s->offset, p, n)) {
        s->result = KOPT_ERROR_FILE;
        return;
    }
    kopt_crc_add_(&s->crc, p, n);
    s->offset += n;
}

/* Writes the numbers of an array, reads them and forgets them, or reads them into the array. */
static void kopt_walk_array_(kopt_stream_ *s, const kopt_array_ *a) {
    const int direct = s->walk == KOPT_LOADING_ || (s->walk == KOPT_SAVING_ && kopt_little_endian_());
    const size_t largest = direct ? 32768 : sizeof s->buffer;
    size_t left = a->n * a->bytes, piece;
    kopt_byte_ zero[4], *at = a->at;
    for (; left != 0 && s->result == KOPT_OK; at += piece, left -= piece) {
        kopt_byte_ *p = direct ? at : s->buffer;
        piece = left < largest ? left : largest;
        if (s->walk == KOPT_SAVING_ && !direct) {
            memcpy(p, at, piece);
            kopt_swap_(p, piece / a->bytes, a->bytes);
        }
        kopt_walk_bytes_(s, p, piece);
        if (s->walk == KOPT_LOADING_) kopt_swap_(p, piece / a->bytes, a->bytes);
    }
    memset(zero, 0, 4);
    kopt_walk_bytes_(s, zero, kopt_round_up4_(a->n * a->bytes) - a->n * a->bytes);
    if (s->wrong == KOPT_OK && kopt_load_le32_(zero) != 0) s->wrong = KOPT_ERROR_STATE;
}

static int kopt_bytes_differ_(const kopt_byte_ *a, const kopt_byte_ *b, int begin, int end) {
    for (; begin < end; begin++)
        if (a[begin] != b[begin]) return 1;
    return 0;
}

/* Do two headers, of checkpoints or of tensors, describe the same thing? */
static kopt_result kopt_compare_headers_(const kopt_byte_ *a, const kopt_byte_ *b) {
    if (!kopt_bytes_differ_(a, b, 0, 4) && a[4] > b[4]) return KOPT_ERROR_VERSION;
    if (kopt_bytes_differ_(a, b, 0, 5) || kopt_bytes_differ_(a, b, 10, 11)) return KOPT_ERROR_STATE; /* name, version */
    if (kopt_has_old_codes_(a)) return KOPT_ERROR_STATE;
    return kopt_bytes_differ_(a, b, 5, 32) ? KOPT_ERROR_MISMATCH : KOPT_OK;
}

/* Makes an optimizer what a checkpoint has, or (loads) the other way round: before 0.9 an average had 1 - decay in lr.
   In place, to save stack. */
static void kopt_change_form_(kopt_optimizer *opt, int loads) {
    const double lr = opt->lr, beta1 = opt->beta1;
    kopt_environment_ environment;
    if (opt->rule != KOPT_RULE_EMA) return;
    kopt_enter_(&environment);
    opt->lr = loads ? beta1 : kopt_sub64_(1, beta1);
    opt->beta1 = loads ? kopt_sub64_(1, lr) : lr;
    kopt_leave_(&environment);
}

/* The format in the header of a checkpoint: that of the first tensor whose weights have 16 bits, or else KOPT_F32;
   KOPT_BF16 for an empty list. */
static kopt_format kopt_format_of_list_(const kopt_tensor *tensors, size_t count) {
    size_t i;
    for (i = 0; i < count; i++)
        if (tensors[i].weight_format != KOPT_F32) return tensors[i].weight_format;
    return count == 0 ? KOPT_BF16 : KOPT_F32;
}

static KOPT_NOINLINE_ void kopt_make_save_header_(kopt_byte_ *h, const kopt_optimizer *opt, kopt_format weight,
                                                  uint64_t count, uint64_t bytes) {
    kopt_make_saved_header_(h, opt, weight, 0, count, bytes);
    kopt_store_le_(h, KOPT_SAVE_MAGIC_, 4);
    h[4] = KOPT_SAVE_VERSION_;
    h[10] = 0;
#define KOPT_SAVE_NUMBER_(at, field) kopt_store_le_(h + (at), kopt_bits64_(opt->field), 8);
    KOPT_SAVE_NUMBERS_(KOPT_SAVE_NUMBER_)
#undef KOPT_SAVE_NUMBER_
    kopt_store_le_(h + 168, (uint32_t)opt->lookahead, 4);
    kopt_store_le_(h + 172, (opt->maximize != 0) + (opt->zero_grad ? 2u : 0u) + (opt->moments_only ? 4u : 0u), 4);
}

/* Is h the header that kopt_save() would write for the options that it holds? Sets those that a load does not compare
   in *opt, as they are saved; it has the others already. The header has room for one at expected. */
static kopt_result kopt_check_save_header_(const kopt_byte_ *h, kopt_byte_ *expected, kopt_optimizer *opt) {
    double lr, beta1;
    kopt_result result;
    opt->lookahead = (int)kopt_load_le32_(h + 168);
    opt->seed = kopt_load_le64_(h + 32);
    opt->step = kopt_load_le32_(h + 40);
    opt->maximize = h[172] & 1;
    opt->zero_grad = h[172] >> 1 & 1;
    opt->moments_only = h[172] >> 2 & 1;
#define KOPT_LOAD_NUMBER_(at, field) opt->field = kopt_bits_to_f64_(kopt_load_le64_(h + (at)));
    KOPT_SAVE_NUMBERS_(KOPT_LOAD_NUMBER_)
#undef KOPT_LOAD_NUMBER_
    lr = opt->lr;
    beta1 = opt->beta1;
    kopt_change_form_(opt, 1);
    result = kopt_check_options_(opt);
    opt->lr = lr;
    opt->beta1 = beta1;
    if (result != KOPT_OK) return result;
    kopt_make_save_header_(expected, opt, (kopt_format)h[6], kopt_load_le64_(h + 16), kopt_load_le64_(h + 24));
    return kopt_bytes_differ_(h, expected, 0, KOPT_SAVE_HEADER_) ? KOPT_ERROR_STATE : KOPT_OK;
}

/* Walks over a checkpoint from its first to its last byte. *form is the optimizer as it is saved. Unless the checkpoint
   is saved, h and *form receive its header and the optimizer, and all bytes but those of the arrays have to be those
   that kopt_save() would write. */
static void kopt_walk_checkpoint_(kopt_stream_ *s, kopt_walk_ walk, const kopt_optimizer *opt,
                                  const kopt_tensor *tensors, size_t count, uint64_t bytes, kopt_optimizer *form,
                                  kopt_byte_ *h) {
    kopt_byte_ *expected = s->buffer, *found = s->buffer + KOPT_SAVE_HEADER_; /* until the next array */
    const int saves = walk == KOPT_SAVING_;
    kopt_array_ array[1 + KOPT_ARRAYS_], *a, *end;
    size_t i;
    s->walk = walk;
    s->offset = 0;
    s->result = s->wrong = KOPT_OK;
    kopt_crc_begin_(&s->crc);
    if (!saves) *form = *opt;
    kopt_make_save_header_(expected, form, kopt_format_of_list_(tensors, count), count, bytes);
    kopt_walk_bytes_(s, saves ? expected : h, KOPT_SAVE_HEADER_);
    if (!saves && s->result == KOPT_OK) {
        s->result = kopt_compare_headers_(h, expected);
        if (kopt_check_save_header_(h, expected, form) != KOPT_OK) s->wrong = KOPT_ERROR_STATE;
    }
    for (i = 0; i < count && s->result == KOPT_OK; i++) {
        const kopt_tensor *t = &tensors[i];
        const kopt_layout_ l = kopt_layout_for_(opt, t);
        kopt_make_saved_header_(expected, form, t->weight_format, t->id, t->n, t->first_index);
        kopt_walk_bytes_(s, saves ? expected : found, KOPT_HEADER_);
        if (!saves && s->result == KOPT_OK) {
            if (s->wrong == KOPT_OK) s->wrong = kopt_compare_headers_(found, expected);
            if (s->wrong == KOPT_OK && kopt_bytes_differ_(found, expected, 0, KOPT_HEADER_))
                s->wrong = KOPT_ERROR_STATE;
        }
        end = kopt_list_arrays_(kopt_add_array_(array, (kopt_byte_ *)t->weight, t->n, l.weight_bytes), &l, t);
        for (a = array; a != end; a++) kopt_walk_array_(s, a);
        for (a = array + 1; walk == KOPT_LOADING_ && t->arrays == NULL && a < end; a++) { /* the padding in the block */
            const size_t size = a->n * a->bytes;
            memset(a->at + size, 0, kopt_round_up16_(size) - size);
        }
    }
    found[0] = 0;
    kopt_crc_add_(&s->crc, found, 1);
    s->checksum = ~s->crc.value;
    kopt_store_le_(found, s->checksum, 4);
    kopt_walk_bytes_(s, found, 4);
    if (s->result == KOPT_OK && kopt_load_le32_(found) != s->checksum) s->result = KOPT_ERROR_CHECKSUM;
    if (s->result == KOPT_OK) s->result = s->wrong;
}

/* ---- checkpoints: save and load ---- */

static uint64_t kopt_saved_size_(const kopt_layout_ *l) {
    const uint64_t copies = l->rule == KOPT_RULE_RANGER ? 2 : 1; /* of weights and residuals */
    uint64_t size =
        KOPT_HEADER_ + copies * (kopt_round_up4_(l->n * l->weight_bytes) + kopt_round_up4_(l->n * l->residual_bytes));
    int m;
    for (m = 0; m < l->moment_count; m++) {
        const kopt_format format = kopt_format_in_layout_(l, m);
        size += kopt_round_up4_(l->n * kopt_bytes_of_(format));
        if (kopt_has_scales_(format)) size += kopt_round_up4_(kopt_blocks_(l->n, KOPT_BLOCK_));
    }
    return size + (l->rounding == KOPT_FEEDBACK && l->total != 0 ? 16 : 0);
}

/* Checks an optimizer and a list for all that is no step, and sums the bytes of its checkpoint. */
static kopt_result kopt_check_states_(uint64_t *bytes, const kopt_optimizer *opt, const kopt_tensor *tensors,
                                      size_t count, kopt_checks_ checks) {
    kopt_result result = kopt_check_options_(opt);
    kopt_neighbours_ list;
    kopt_begun_ s;
    size_t i;
    if (result != KOPT_OK) return result;
    if (tensors == NULL && count != 0) return KOPT_ERROR_NULL;
    kopt_copy_options_(opt, &s);
    memset(&list, 0, sizeof list);
    *bytes = KOPT_SAVE_HEADER_ + 4;
    for (i = 0; i < count; i++) {
        const kopt_tensor *const t = &tensors[i];
        kopt_layout_ l;
        uint64_t size;
        result = kopt_check_tensor_(&l, &list.memory[list.current], &s, t, checks);
        if (result != KOPT_OK) return result;
        size = kopt_saved_size_(&l);
        result = kopt_check_neighbours_(&list, t, 0);
        if (result == KOPT_OK && *bytes + size < size) result = KOPT_ERROR_BOUNDS;
        if (result != KOPT_OK) return result;
        *bytes += size;
    }
    return KOPT_OK;
}

KOPT_API_ size_t kopt_save_size(const kopt_optimizer *opt, const kopt_tensor *tensors, size_t count) {
    uint64_t bytes;
    if (kopt_check_states_(&bytes, opt, tensors, count, KOPT_CHECK_FIELDS_) != KOPT_OK) return 0;
    return (size_t)bytes == bytes ? (size_t)bytes : 0;
}

/* Save and load after the checks, which need much stack: in one function both would count. */
static KOPT_NOINLINE_ kopt_result kopt_save_list_(const kopt_optimizer *opt, const kopt_tensor *tensors, size_t count,
                                                  const kopt_file *file, uint64_t bytes) {
    kopt_optimizer form = *opt;
    kopt_stream_ s;
    s.file = file;
    kopt_change_form_(&form, 0);
    kopt_walk_checkpoint_(&s, KOPT_SAVING_, opt, tensors, count, bytes, &form, NULL);
    return s.result;
}

static KOPT_NOINLINE_ kopt_result kopt_load_list_(kopt_optimizer *opt, const kopt_tensor *tensors, size_t count,
                                                  const kopt_file *file, uint64_t bytes) {
    kopt_byte_ h[KOPT_SAVE_HEADER_];
    kopt_optimizer loaded;
    kopt_stream_ s;
    uint32_t checksum;
    size_t i;
    s.file = file;
    kopt_walk_checkpoint_(&s, KOPT_CHECKING_, opt, tensors, count, bytes, &loaded, h);
    if (s.result != KOPT_OK) return s.result;
    checksum = s.checksum;
    for (i = 0; i < count; i++) {
        const kopt_tensor *const t = &tensors[i];
        if (t->arrays != NULL || kopt_layout_for_(opt, t).total == 0) continue;
        kopt_make_header_((kopt_byte_ *)t->state, opt, t->weight_format, t->id, t->n, t->first_index);
        memset(t->state, 0, 4); /* no step takes such a block: the second reading may end early */
    }
    kopt_walk_checkpoint_(&s, KOPT_LOADING_, opt, tensors, count, bytes, &loaded, h);
    if (s.result == KOPT_ERROR_FILE) return s.result;
    if (s.result != KOPT_OK || s.checksum != checksum) return KOPT_ERROR_CHECKSUM; /* not what was checked */
    *opt = loaded;
    kopt_change_form_(opt, 1);
    for (i = 0; i < count; i++) {
        const kopt_tensor *const t = &tensors[i];
        const kopt_layout_ l = kopt_layout_for_(opt, t);
        if (t->arrays == NULL && l.total != 0) kopt_store_le_((kopt_byte_ *)t->state, KOPT_MAGIC_, 4);
        kopt_refresh_(&l, t, 0);
    }
    return KOPT_OK;
}

typedef struct kopt_memory_file_ {
    kopt_byte_ *to;
    const kopt_byte_ *from;
    size_t size; /* at from */
} kopt_memory_file_;

static int kopt_write_memory_(void *user, const void *data, size_t size) {
    kopt_memory_file_ *file = (kopt_memory_file_ *)user;
    memcpy(file->to, data, size);
    file->to += size;
    return 0;
}

static int kopt_read_memory_(void *user, uint64_t offset, void *data, size_t size) {
    const kopt_memory_file_ *file = (const kopt_memory_file_ *)user;
    if (offset > file->size || size > file->size - (size_t)offset) return 1;
    memcpy(data, file->from + (size_t)offset, size);
    return 0;
}

KOPT_API_ kopt_result kopt_save(const kopt_optimizer *opt, const kopt_tensor *tensors, size_t count, void *out,
                                size_t out_size) {
    kopt_memory_file_ memory = {(kopt_byte_ *)out, NULL, 0};
    const kopt_file file = {kopt_write_memory_, kopt_read_memory_, &memory};
    uint64_t bytes;
    const kopt_result result = kopt_check_states_(&bytes, opt, tensors, count, KOPT_CHECK_STATE_);
    if (result != KOPT_OK) return result;
    if (out == NULL) return KOPT_ERROR_NULL;
    if (out_size < bytes) return KOPT_ERROR_SIZE;
    if (kopt_overlaps_list_(out, (size_t)bytes, opt, tensors, count, 0)) return KOPT_ERROR_OVERLAP;
    return kopt_save_list_(opt, tensors, count, &file, bytes);
}

KOPT_API_ kopt_result kopt_load(kopt_optimizer *opt, const kopt_tensor *tensors, size_t count, const void *in,
                                size_t in_size) {
    kopt_memory_file_ memory = {NULL, (const kopt_byte_ *)in, in_size};
    const kopt_file file = {kopt_write_memory_, kopt_read_memory_, &memory};
    uint64_t bytes;
    kopt_result result = kopt_check_states_(&bytes, opt, tensors, count, KOPT_CHECK_MEMORY_);
    if (result != KOPT_OK) return result;
    if (in == NULL) return KOPT_ERROR_NULL;
    if (kopt_overlaps_list_(in, bytes < in_size ? (size_t)bytes : in_size, opt, tensors, count, 0))
        return KOPT_ERROR_OVERLAP;
    result = kopt_load_list_(opt, tensors, count, &file, bytes);
    return result == KOPT_ERROR_FILE ? KOPT_ERROR_SIZE : result;
}

KOPT_API_ kopt_result kopt_save_to(const kopt_optimizer *opt, const kopt_tensor *tensors, size_t count,
                                   const kopt_file *file) {
    uint64_t bytes;
    const kopt_result result = kopt_check_states_(&bytes, opt, tensors, count, KOPT_CHECK_STATE_);
    if (result != KOPT_OK) return result;
    if (file == NULL || file->write == NULL) return KOPT_ERROR_NULL;
    return kopt_save_list_(opt, tensors, count, file, bytes);
}

KOPT_API_ kopt_result kopt_load_from(kopt_optimizer *opt, const kopt_tensor *tensors, size_t count,
                                     const kopt_file *file) {
    uint64_t bytes;
    const kopt_result result = kopt_check_states_(&bytes, opt, tensors, count, KOPT_CHECK_MEMORY_);
    if (result != KOPT_OK) return result;
    if (file == NULL || file->read == NULL) return KOPT_ERROR_NULL;
    return kopt_load_list_(opt, tensors, count, file, bytes);
}

/* ---- checkpoints: inspection ---- */

/* What a head tells. */
typedef struct kopt_head_ {
    kopt_optimizer opt;
    kopt_tensor t; /* none of a checkpoint */
    uint64_t count, size;
} kopt_head_;

/* The 64 bytes of a state block, or of a tensor in a checkpoint. */
static kopt_result kopt_read_tensor_head_(kopt_head_ *head, const kopt_byte_ *h) {
    const int saved = h[10];
    kopt_byte_ rounding, moments;
    kopt_layout_ l;
    if (kopt_load_le32_(h) == KOPT_MAGIC_ && h[4] > KOPT_BLOCK_VERSION_) return KOPT_ERROR_VERSION;
    if (kopt_load_le32_(h) != KOPT_MAGIC_ || h[4] != KOPT_BLOCK_VERSION_ || h[10] > 1 || !kopt_header_options_valid_(h))
        return KOPT_ERROR_STATE;
    memset(&head->t, 0, sizeof head->t);
    head->t.weight_format = (kopt_format)h[6];
    head->t.n = (size_t)kopt_load_le64_(h + 16);
    head->t.id = kopt_load_le32_(h + 12);
    head->t.first_index = kopt_load_le64_(h + 24);
    if (head->t.n != kopt_load_le64_(h + 16) || head->t.n > KOPT_LARGEST_N_) return KOPT_ERROR_BOUNDS;
    if (h[5] == KOPT_RULE_ADAM_ATAN2 && !KOPT_HAS_VMATH_) return KOPT_ERROR_OPTION;
    kopt_optimizer_from_header_(&head->opt, h, saved);
    kopt_make_variant_(&rounding, &moments, &head->opt, head->t.weight_format);
    /* does it contradict the rule or a format? */
    if (h[7] != (rounding & (saved ? 255 : 15)) || h[9] != (moments & (saved ? 255 : 7)) ||
        h[11] != kopt_second_byte_(head->opt.first_moment_format, head->opt.second_moment_format, moments & 7))
        return KOPT_ERROR_STATE;
    if (saved) kopt_change_form_(&head->opt, 1);
    if ((head->opt.rounding == KOPT_FEEDBACK &&
         !kopt_feedback_fits_(head->opt.rule, moments & 7, head->opt.first_moment_format, head->opt.moment_rounding,
                              KOPT_0_999_)) ||
        (head->opt.nesterov && (moments & 7) == 0) || head->t.first_index >> 63 != 0)
        return KOPT_ERROR_STATE;
    l = kopt_layout_for_(&head->opt, &head->t);
    head->count = 1;
    head->size = saved ? kopt_saved_size_(&l) : l.total;
    return head->size == 0 ? KOPT_ERROR_STATE : KOPT_OK; /* nobody makes a block that stores nothing */
}

static kopt_result kopt_read_head_(kopt_head_ *head, const kopt_byte_ *h, size_t in_size) {
    kopt_byte_ expected[KOPT_SAVE_HEADER_];
    kopt_result result;
    uint64_t left;
    if (h == NULL) return KOPT_ERROR_NULL;
    if (in_size < KOPT_HEADER_) return KOPT_ERROR_SIZE;
    if (kopt_load_le32_(h) != KOPT_SAVE_MAGIC_) return kopt_read_tensor_head_(head, h);
    if (in_size < KOPT_SAVE_HEADER_) return KOPT_ERROR_SIZE;
    if (h[4] > KOPT_SAVE_VERSION_) return KOPT_ERROR_VERSION;
    if (h[4] != KOPT_SAVE_VERSION_ || h[10] != 0 || !kopt_header_options_valid_(h)) return KOPT_ERROR_STATE;
    kopt_optimizer_from_header_(&head->opt, h, 1);
    result = kopt_check_save_header_(h, expected, &head->opt);
    if (result != KOPT_OK) return result == KOPT_ERROR_OPTION ? result : KOPT_ERROR_STATE;
    kopt_change_form_(&head->opt, 1);
    head->count = kopt_load_le64_(h + 16);
    head->size = kopt_load_le64_(h + 24);
    left = head->size - (KOPT_SAVE_HEADER_ + 4); /* bytes of the tensors; huge if it is below 0 */
    if (left % 4 != 0 || left / KOPT_HEADER_ < head->count || left >> 63 != 0 || (head->count == 0 && left != 0))
        return KOPT_ERROR_STATE;
    return KOPT_OK;
}

KOPT_API_ kopt_result kopt_inspect(const void *in, size_t in_size, kopt_optimizer *opt, uint64_t *count,
                                   uint64_t *size) {
    kopt_head_ head;
    const kopt_result result = kopt_read_head_(&head, (const kopt_byte_ *)in, in_size);
    if (result != KOPT_OK) return result;
    if (opt != NULL) *opt = head.opt;
    if (count != NULL) *count = head.count;
    if (size != NULL) *size = head.size;
    return KOPT_OK;
}

KOPT_API_ kopt_result kopt_inspect_tensor(const void *in, size_t in_size, uint64_t *offset, kopt_tensor *t) {
    const kopt_byte_ *h = (const kopt_byte_ *)in;
    kopt_head_ head;
    kopt_result result = kopt_read_head_(&head, h, in_size);
    uint64_t at, end;
    if (result != KOPT_OK) return result;
    if (offset == NULL) return KOPT_ERROR_NULL;
    at = *offset;
    end = head.size;
    if (kopt_load_le32_(h) == KOPT_SAVE_MAGIC_) {
        if (at == 0) at = KOPT_SAVE_HEADER_;
        end -= 4; /* the checksum */
        if (at >= end) return KOPT_ERROR_BOUNDS;
        if (end - at < KOPT_HEADER_) return KOPT_ERROR_STATE;
        if (at > in_size || in_size - at < KOPT_HEADER_) return KOPT_ERROR_SIZE;
        h += (size_t)at;
        result = kopt_read_tensor_head_(&head, h);
        if (result != KOPT_OK) return result;
        if (h[10] == 0 || head.size > end - at) return KOPT_ERROR_STATE;
    } else if (at != 0) {
        return KOPT_ERROR_BOUNDS;
    }
    *offset = at + head.size;
    if (t != NULL) *t = head.t;
    return KOPT_OK;
}

/* ---- norm and clipping ---- */

static kopt_result kopt_check_array_(const void *x, kopt_format format, size_t n) {
    if (!kopt_format_valid_(format)) return KOPT_ERROR_OPTION;
    if (n > KOPT_LARGEST_N_) return KOPT_ERROR_BOUNDS;
    return x == NULL && n != 0 ? KOPT_ERROR_NULL : KOPT_OK;
}

KOPT_API_ kopt_result kopt_norm_add(kopt_norm *norm, const void *x, kopt_format format, size_t n) {
    const kopt_result result = kopt_check_array_(x, format, n);
    kopt_environment_ environment;
    if (norm == NULL) return KOPT_ERROR_NULL;
    if (result != KOPT_OK) return result;
    if (kopt_overlap_(norm, sizeof *norm, x, n * kopt_bytes_of_(format))) return KOPT_ERROR_OVERLAP;
    if (n == 0) return KOPT_OK;
    kopt_enter_(&environment);
    kopt_norm_tool_(norm, (const kopt_byte_ *)x, format, n);
    kopt_leave_(&environment);
    return KOPT_OK;
}

KOPT_API_ kopt_result kopt_norm_merge(kopt_norm *norm, const kopt_norm *other) {
    kopt_norm sum;
    int i;
    if (norm == NULL || other == NULL) return KOPT_ERROR_NULL;
    sum = *other;
    kopt_norm_carry_(&sum);
    kopt_norm_carry_(norm);
    for (i = 0; i < 20; i++) norm->digit[i] += sum.digit[i];
    norm->nonfinite += sum.nonfinite;
    kopt_norm_carry_(norm);
    return KOPT_OK;
}

/* Adds the squares of the gradients of a part, all of which are checked first. */
static kopt_result kopt_norm_add_part_(kopt_norm *norm, const kopt_part_ *part) {
    kopt_environment_ environment;
    size_t i, begin, end;
    for (i = 0; i < part->count; i++) {
        const kopt_tensor *t = &part->tensors[i];
        const kopt_result result = kopt_check_array_(t->grad, t->grad_format, t->n);
        if (result != KOPT_OK) return result;
        if (kopt_overlap_(norm, sizeof *norm, t->grad, t->n * kopt_bytes_of_(t->grad_format)))
            return KOPT_ERROR_OVERLAP;
    }
    kopt_enter_(&environment);
    for (i = 0; i < part->count; i++) {
        const kopt_tensor *t = &part->tensors[i];
        kopt_range_of_part_(part, i, 0, &begin, &end);
        if (begin < end)
            kopt_norm_tool_(norm, (const kopt_byte_ *)t->grad + begin * kopt_bytes_of_(t->grad_format), t->grad_format,
                            end - begin);
    }
    kopt_leave_(&environment);
    return KOPT_OK;
}

KOPT_API_ kopt_result kopt_norm_add_grads(kopt_norm *norm, const kopt_tensor *tensors, size_t count) {
    kopt_part_ part = {tensors, count, 0, 0};
    if (norm == NULL || (tensors == NULL && count != 0)) return KOPT_ERROR_NULL;
    if (count != 0) part.end = tensors[count - 1].n;
    return kopt_norm_add_part_(norm, &part);
}

KOPT_API_ kopt_result kopt_norm_add_range(kopt_norm *norm, const kopt_tensor *tensors, size_t count, size_t begin,
                                          size_t end) {
    kopt_part_ part;
    const kopt_result result = norm == NULL ? KOPT_ERROR_NULL : kopt_find_part_(&part, tensors, count, begin, end);
    return result != KOPT_OK ? result : kopt_norm_add_part_(norm, &part);
}

KOPT_API_ double kopt_norm_value(const kopt_norm *norm) { return norm == NULL ? kopt_nan64_() : kopt_norm_root_(norm); }

KOPT_API_ double kopt_norm_clip(const kopt_norm *norm, double max_norm, double grad_scale) {
    const double scale = kopt_bits_to_f64_(kopt_bits64_(grad_scale) & ~((uint64_t)1 << 63)); /* |grad_scale| */
    kopt_environment_ environment;
    double value;
    if (norm == NULL || norm->nonfinite != 0 || !kopt_between_(max_norm, 0, KOPT_LARGEST64_) ||
        !kopt_between_(scale, 0, KOPT_DOUBLE_(1e100, 0x54B249ADu, 0x2594C37Du)))
        return kopt_nan64_();
    if (kopt_is_zero_(max_norm)) return 1;
    kopt_enter_(&environment);
    value = kopt_mul64_(kopt_norm_root_(norm), scale);
    value = kopt_div64_(max_norm, kopt_add64_(value, KOPT_1E_MINUS_6_));
    kopt_leave_(&environment);
    return kopt_less64_(value, 1) ? value : 1;
}

KOPT_API_ kopt_result kopt_norm_add_stable(kopt_norm *norm, const kopt_step *step, const kopt_tensor *t, size_t begin,
                                           size_t end) {
    kopt_memory_ memory;
    kopt_layout_ layout;
    kopt_begun_ s;
    kopt_result result = kopt_open_step_(&s, step);
    if (result == KOPT_OK) result = kopt_check_tensor_(&layout, &memory, &s, t, KOPT_CHECK_STEP_);
    if (result != KOPT_OK) return result;
    if (norm == NULL) return KOPT_ERROR_NULL;
    if (!s.stable) return KOPT_ERROR_OPTION;
    if (begin > end || end > t->n) return KOPT_ERROR_BOUNDS;
    if (kopt_overlaps_tensor_(norm, sizeof *norm, t, &layout, 0)) return KOPT_ERROR_OVERLAP;
    kopt_measure_(&layout, &s, t, begin, end, norm);
    return KOPT_OK;
}

/* min(1, 1 / RMS), where RMS is the root of the mean square of n values; 1 if n is 0 or a value is not finite. */
static KOPT_HOST_DEVICE_ float kopt_stable_from_norm_(const kopt_norm *norm, uint64_t n) {
    double rms, count = kopt_mul64_((double)(uint32_t)(n >> 32), 4294967296.0);
    if (n == 0 || norm->nonfinite != 0) return 1;
    count = kopt_add64_(count, (double)(uint32_t)(n & 0xFFFFFFFFu)); /* n, rounded to nearest even */
    rms = kopt_mul64_(kopt_norm_root_(norm), kopt_sqrt64_(kopt_div64_(1, count)));
    return kopt_less64_(1, rms) ? kopt_to_float_(kopt_div64_(1, rms)) : 1;
}

KOPT_API_ double kopt_norm_stable_scale(const kopt_norm *norm, uint64_t n) {
    kopt_environment_ environment;
    double scale;
    if (norm == NULL) return kopt_nan64_();
    kopt_enter_(&environment);
    scale = kopt_to_double_(kopt_stable_from_norm_(norm, n));
    kopt_leave_(&environment);
    return scale;
}

/* The bits of the largest number of the format that is at most limit, which is at least 0. */
static uint32_t kopt_round_limit_(double limit, kopt_format format) {
    const double largest = 3.4028234663852886e38; /* of fp32 */
    uint32_t bits, exact;
    if (kopt_less64_(largest, limit)) limit = largest;
    exact = kopt_as_u32_(kopt_to_float_(limit)) & 0x7FFFFFFFu; /* a limit of -0 means 0; rounded to nearest */
    if (kopt_less64_(limit, kopt_to_double_(kopt_as_f32_(exact)))) exact--;
    if (format != KOPT_FP16) return format == KOPT_BF16 ? exact >> 16 : exact;
    bits = kopt_fp16_from_f32(kopt_as_f32_(exact));
    return kopt_as_u32_(kopt_f32_from_fp16((kopt_fp16)bits)) > exact ? bits - 1 : bits;
}

KOPT_API_ kopt_result kopt_clip_value(void *x, kopt_format format, size_t n, double limit) {
    kopt_tool_ t = {KOPT_TOOL_CLIP_, format, format, NULL, (kopt_byte_ *)x, n, NULL, 0, NULL, 0, 0};
    const kopt_result result = kopt_check_array_(x, format, n);
    kopt_environment_ environment;
    if (result != KOPT_OK) return result;
    if (!kopt_between_(limit, 0, KOPT_LARGEST64_)) return KOPT_ERROR_RANGE;
    if (n == 0) return KOPT_OK;
    kopt_enter_(&environment);
    t.limit = kopt_round_limit_(limit, format);
    KOPT_KERNEL_(tool)(&t);
    kopt_leave_(&environment);
    return KOPT_OK;
}

/* ---- loss scaling ---- */

static kopt_result kopt_check_scaler_(const kopt_scaler *s) {
    const double most = KOPT_DOUBLE_(1e30, 0x46293E59u, 0x39A08CEAu);
    const double least = KOPT_DOUBLE_(1e-30, 0x39B4484Bu, 0xFEEBC2A0u);
    if (s == NULL) return KOPT_ERROR_NULL;
    if (s->reserved_ != 0) return KOPT_ERROR_OPTION;
    if (!kopt_between_(s->scale, 1.1754943508222875e-38, 3.4028234663852886e38)) return KOPT_ERROR_RANGE;
    if (!kopt_between_(s->minimum, 0, KOPT_3E38_)) return KOPT_ERROR_RANGE;
    if (!kopt_between_(s->growth, 1, most) || !kopt_less64_(1, s->growth)) return KOPT_ERROR_RANGE;
    if (!kopt_between_(s->backoff, least, 1) || !kopt_less64_(s->backoff, 1)) return KOPT_ERROR_RANGE;
    return s->interval == 0 || s->hysteresis == 0 ? KOPT_ERROR_RANGE : KOPT_OK;
}

KOPT_API_ kopt_result kopt_scaler_update(kopt_scaler *s, int found_inf) {
    const double overflow = KOPT_DOUBLE_(3.4028235677973366e38, 0x47EFFFFFu, 0xF0000000u);
    const kopt_result result = kopt_check_scaler_(s);
    kopt_environment_ environment;
    double scale;
    if (result != KOPT_OK) return result;
    kopt_enter_(&environment);
    s->good = found_inf ? 0 : s->good + 1;
    s->bad = !found_inf ? 0 : s->bad + (s->bad != 0xFFFFFFFFu);
    if (found_inf && s->bad >= s->hysteresis) {
        scale = kopt_mul64_(s->scale, s->backoff);
        /* the old scale stays if the new one is below 2^-126 */
        if (!kopt_less64_(scale, 1.1754943508222875e-38)) s->scale = kopt_to_double_(kopt_to_float_(scale));
        if (kopt_less64_(s->scale, s->minimum)) s->scale = s->minimum;
    }
    if (!found_inf && s->good >= s->interval) {
        scale = kopt_mul64_(s->scale, s->growth);
        /* ... or 2^128 - 2^103 or above, which rounds to infinity */
        if (kopt_less64_(scale, overflow)) s->scale = kopt_to_double_(kopt_to_float_(scale));
        s->good = 0;
    }
    kopt_leave_(&environment);
    return KOPT_OK;
}

/* Checks a call, and computes the next step of opt with *grad_scale, which is that of opt divided by the loss scale. */
static KOPT_NOINLINE_ kopt_result kopt_scaled_step_(const kopt_scaler *scaler, const kopt_optimizer *opt,
                                                    double max_norm, double *grad_scale, kopt_begun_ *s) {
    kopt_result result = kopt_check_scaler_(scaler);
    kopt_environment_ environment;
    kopt_optimizer scaled;
    if (result == KOPT_OK) result = kopt_check_options_(opt);
    if (result != KOPT_OK) return result;
    scaled = *opt;
    scaled.clip = 1;
    kopt_enter_(&environment);
    *grad_scale = scaled.grad_scale = kopt_div64_(opt->grad_scale, scaler->scale);
    kopt_leave_(&environment);
    if (!kopt_between_(max_norm, 0, KOPT_LARGEST64_) || !kopt_magnitude_at_most_(*grad_scale, KOPT_3E38_))
        return KOPT_ERROR_RANGE;
    return kopt_next_step_(s, &scaled);
}

/* Clips a step of kopt_scaled_step_() and counts it; or makes it none, if a gradient is not finite. */
static void kopt_take_step_(kopt_scaler *scaler, kopt_optimizer *opt, const kopt_norm *norm, double max_norm,
                            double grad_scale, kopt_begun_ *s) {
    const double clip = kopt_norm_clip(norm, max_norm, grad_scale);
    kopt_environment_ environment;
    kopt_enter_(&environment);
    s->grad_scale = kopt_mul_(s->grad_scale, kopt_to_float_(clip));
    kopt_leave_(&environment);
    if (norm->nonfinite != 0) memset(s, 0, sizeof *s);
    if (norm->nonfinite == 0) opt->step = s->step;
    if (scaler->steps_ < opt->step) scaler->steps_ = opt->step;
}

KOPT_API_ kopt_result kopt_scaler_begin(kopt_scaler *scaler, kopt_step *steps, kopt_optimizer *opts, size_t count,
                                        const kopt_norm *norm, double max_norm, int *skipped) {
    kopt_result result = KOPT_OK;
    double grad_scale;
    kopt_begun_ s;
    size_t i;
    int behind = 1; /* all are, one of an earlier call: the scale has changed since their gradients */
    if (opts == NULL || norm == NULL || steps == NULL) return KOPT_ERROR_NULL;
    if (count == 0) return KOPT_ERROR_RANGE;
    for (i = 0; i < count && result == KOPT_OK; i++) { /* checks all before anything is written */
        result = kopt_scaled_step_(scaler, &opts[i], max_norm, &grad_scale, &s);
        if (result == KOPT_OK && opts[i].step >= scaler->steps_) behind = 0;
    }
    if (result == KOPT_OK && behind) result = KOPT_ERROR_MISMATCH;
    for (i = 0; i < count && result == KOPT_OK; i++) {
        result = kopt_scaled_step_(scaler, &opts[i], max_norm, &grad_scale, &s);
        kopt_take_step_(scaler, &opts[i], norm, max_norm, grad_scale, &s);
        memcpy(&steps[i], &s, sizeof s);
    }
    if (result != KOPT_OK) return result;
    if (skipped != NULL) *skipped = norm->nonfinite != 0;
    return kopt_scaler_update(scaler, norm->nonfinite != 0);
}

KOPT_API_ kopt_result kopt_scaler_step(kopt_scaler *scaler, kopt_optimizer *opt, const kopt_tensor *tensors,
                                       size_t count, double max_norm, const kopt_closure *closure, int *skipped) {
    const int evaluates = closure != NULL && closure->evaluate != NULL;
    kopt_layout_ last;
    double grad_scale;
    kopt_norm norm;
    kopt_begun_ s;
    kopt_result result = kopt_scaled_step_(scaler, opt, max_norm, &grad_scale, &s);
    if (result == KOPT_OK && !evaluates && opt->step < scaler->steps_) result = KOPT_ERROR_MISMATCH;
    if (result == KOPT_OK) result = kopt_check_list_(&s, tensors, count, &last);
    if (result != KOPT_OK) return result;
    memset(&norm, 0, sizeof norm);
    if (evaluates && closure->evaluate(closure->user, scaler->scale)) return KOPT_ERROR_CLOSURE;
    result = kopt_norm_add_grads(&norm, tensors, count);
    if (closure != NULL && closure->reduce != NULL && closure->reduce(closure->user, &norm)) return KOPT_ERROR_CLOSURE;
    if (evaluates) scaler->steps_ = 0; /* the gradients have this scale, whatever was stepped before */
    if (result != KOPT_OK) return result;
    kopt_take_step_(scaler, opt, &norm, max_norm, grad_scale, &s);
    if (skipped != NULL) *skipped = norm.nonfinite != 0;
    if (norm.nonfinite == 0) kopt_run_list_(&s, tensors, count, &last);
    return kopt_scaler_update(scaler, norm.nonfinite != 0);
}

/* ---- gradient accumulation, and one-element updates of an array ---- */

/* Checks an accumulator, and the caller's other array, a->n values, which may overlap neither sum nor residual. */
static kopt_result kopt_check_accumulator_(const kopt_accumulator *a, const void *other, kopt_format format) {
    size_t sum, residual, size;
    kopt_result result;
    if (a == NULL) return KOPT_ERROR_NULL;
    if (a->made_ != KOPT_MADE_) return KOPT_ERROR_UNINITIALIZED;
    if (a->reserved_n_ != 0 || a->reserved32_ != 0) return KOPT_ERROR_OPTION;
    result = kopt_check_array_(a->sum, a->format, a->n);
    if (result == KOPT_OK) result = kopt_check_array_(other, format, a->n);
    if (result != KOPT_OK) return result;
    if ((unsigned)a->rounding > (unsigned)KOPT_EXACT || (unsigned)a->residual_rounding > 1u) return KOPT_ERROR_OPTION;
    if (a->first_index >> 63 != 0) return KOPT_ERROR_BOUNDS;
    sum = a->n * kopt_bytes_of_(a->format);
    residual = a->n * kopt_bytes_of_residual_(a->format, a->rounding);
    size = a->n * kopt_bytes_of_(format);
    if (residual != 0 && a->residual == NULL) return KOPT_ERROR_NULL;
    if (kopt_overlap_(a->sum, sum, a->residual, residual) || kopt_overlap_(a->sum, sum, other, size) ||
        kopt_overlap_(a->residual, residual, other, size))
        return KOPT_ERROR_OVERLAP;
    return KOPT_OK;
}

/* a->sum += x * scale, with a step of SGD: the weight is the sum, the rate is 1 and grad_scale is -scale. */
static void kopt_add_to_sum_(const kopt_accumulator *a, const void *x, kopt_format format, double scale,
                             uint32_t stream) {
    kopt_environment_ environment;
    kopt_job_ job;
    kopt_begun_ s;
    if (a->n == 0) return;
    memset(&s, 0, sizeof s);
    memset(&job, 0, sizeof job);
    s.rule = KOPT_RULE_SGD;
    s.rounding = a->rounding;
    s.moment_rounding = s.residual_rounding = a->residual_rounding;
    s.seed = a->seed;
    s.step = a->step;
    job.step = &s;
    job.weight = (kopt_byte_ *)a->sum;
    job.residual = (kopt_byte_ *)a->residual;
    memcpy(&job.grad, &x, sizeof x);
    job.grad_format = format;
    job.weight_format = a->format;
    job.end = a->n;
    job.first = a->first_index;
    job.id = a->id;
    job.stream = stream;
    job.rate = 1;
    kopt_enter_(&environment);
    s.grad_scale = kopt_as_f32_(kopt_as_u32_(kopt_to_float_(scale)) ^ 0x80000000u);
    kopt_step_job_(&job);
    kopt_leave_(&environment);
}

KOPT_API_ kopt_result kopt_kahan_add(void *w, void *c, kopt_format format, const float *delta, size_t n,
                                     kopt_random_key key) {
    kopt_accumulator sum = kopt_accumulator_of(w, format, c, n);
    kopt_result result;
    sum.rounding = KOPT_KAHAN;
    sum.seed = key.seed;
    sum.step = key.step;
    sum.id = key.id;
    sum.first_index = key.first_index;
    result = format == KOPT_F32 ? KOPT_ERROR_OPTION : kopt_check_accumulator_(&sum, delta, KOPT_F32);
    if (result == KOPT_OK) kopt_add_to_sum_(&sum, delta, KOPT_F32, 1, KOPT_RANDOM_STEP_);
    return result;
}

KOPT_API_ kopt_accumulator kopt_accumulator_of(void *sum, kopt_format format, void *residual, size_t n) {
    kopt_accumulator a;
    memset(&a, 0, sizeof a);
    a.sum = sum;
    a.residual = residual;
    a.format = format;
    a.rounding = residual == NULL ? KOPT_STOCHASTIC : KOPT_KAHAN;
    a.residual_rounding = KOPT_STOCHASTIC;
    a.n = n;
    a.made_ = KOPT_MADE_;
    return a;
}

KOPT_API_ kopt_result kopt_accumulator_add(kopt_accumulator *a, const void *grad, kopt_format grad_format,
                                           double scale) {
    const kopt_result result = kopt_check_accumulator_(a, grad, grad_format);
    if (result != KOPT_OK) return result;
    if (!kopt_magnitude_at_most_(scale, KOPT_3E38_)) return KOPT_ERROR_RANGE;
    if (a->step == 0xFFFFFFFFu || a->count == 0xFFFFFFFFu) return KOPT_ERROR_STEP;
    a->step++;
    if (a->count++ == 0 && a->n != 0) { /* the first addition does not read the old sum */
        const size_t residual = a->n * kopt_bytes_of_residual_(a->format, a->rounding);
        memset(a->sum, 0, a->n * kopt_bytes_of_(a->format));
        if (residual != 0) memset(a->residual, 0, residual);
    }
    kopt_add_to_sum_(a, grad, grad_format, scale, KOPT_RANDOM_ACCUMULATE_);
    return KOPT_OK;
}

KOPT_API_ kopt_result kopt_accumulator_read(const kopt_accumulator *a, float *out) {
    const kopt_result result = kopt_check_accumulator_(a, out, KOPT_F32);
    kopt_layout_ l;
    kopt_begun_ s;
    if (result != KOPT_OK || a->n == 0) return result;
    memset(&s, 0, sizeof s); /* SGD without momentum has this layout */
    s.rounding = a->rounding;
    kopt_layout_of_step_(&l, &s, a->format, a->n);
    if (a->count == 0)
        memset(out, 0, 4 * a->n);
    else
        kopt_read_slot_(&l, KOPT_SLOT_WEIGHT, (const kopt_byte_ *)a->sum, (const kopt_byte_ *)a->residual, out);
    return KOPT_OK;
}

/* ---- gradient compression ---- */

KOPT_API_ kopt_compressor kopt_compressor_of(kopt_format code, void *residual, size_t n) {
    kopt_compressor c;
    memset(&c, 0, sizeof c);
    c.code = code;
    c.rounding = residual == NULL ? KOPT_STOCHASTIC : KOPT_NEAREST;
    c.residual = residual;
    c.residual_format = KOPT_BF16;
    c.residual_rounding = KOPT_STOCHASTIC;
    c.n = n;
    c.made_ = KOPT_MADE_;
    return c;
}

/* The elements of a code that share a scale; 1 if it has none. */
static size_t kopt_block_of_(kopt_format code) {
    return code == KOPT_Q8 ? KOPT_BLOCK_ : code == KOPT_Q1 ? KOPT_SIGNS_ : 1;
}

static int kopt_code_valid_(kopt_format code) { return code != KOPT_F32 && (unsigned)code <= (unsigned)KOPT_Q1; }

static kopt_result kopt_check_compressor_(const kopt_compressor *c, const void *out, size_t out_size, const void *grad,
                                          kopt_format grad_format) {
    kopt_result result;
    size_t size, grad_size, residual_size = 0;
    if (c == NULL) return KOPT_ERROR_NULL;
    if (c->made_ != KOPT_MADE_) return KOPT_ERROR_UNINITIALIZED;
    if (c->reserved32_ != 0) return KOPT_ERROR_OPTION;
    result = kopt_check_array_(grad, grad_format, c->n);
    if (result != KOPT_OK) return result;
    if (!kopt_code_valid_(c->code) || (unsigned)c->rounding > 1u) return KOPT_ERROR_OPTION;
    if (c->residual != NULL) {
        if (!kopt_format_valid_(c->residual_format) || (unsigned)c->residual_rounding > 1u) return KOPT_ERROR_OPTION;
        if (c->code == KOPT_Q1 && c->rounding == KOPT_STOCHASTIC) return KOPT_ERROR_OPTION;
        residual_size = c->n * kopt_bytes_of_(c->residual_format);
    }
    if (c->first_index >> 63 != 0 || c->first_index % kopt_block_of_(c->code) != 0) return KOPT_ERROR_BOUNDS;
    if (c->step == 0xFFFFFFFFu) return KOPT_ERROR_STEP;
    size = kopt_code_bytes_(c->code, c->n);
    grad_size = c->n * kopt_bytes_of_(grad_format);
    if (out == NULL && size != 0) return KOPT_ERROR_NULL;
    if (out_size < size) return KOPT_ERROR_SIZE;
    if (kopt_overlap_(out, size, grad, grad_size) || kopt_overlap_(out, size, c->residual, residual_size) ||
        kopt_overlap_(grad, grad_size, c->residual, residual_size))
        return KOPT_ERROR_OVERLAP;
    return KOPT_OK;
}

/* The bit of x in KOPT_Q1 (section 12): 1 decodes to -scale, 0 to scale. 0 if scale, an fp32 word, is 0 or NaN. */
static uint32_t kopt_sign_bit_(float x, uint32_t scale, int stochastic, uint32_t random16) {
    float y;
    if (kopt_codes_are_zero_(scale)) return 0;
    if (!stochastic) return kopt_as_u32_(x) >> 31;
    y = kopt_add_(kopt_div_(x, kopt_as_f32_(scale)), 1.0f);
    return !(kopt_mul_(y, 32768.0f) > kopt_add_((float)random16, 0.5f)); /* 1 for NaN */
}

/* Encodes one block of KOPT_Q1 (section 12): 4 bytes of scale, then the signs. */
static KOPT_NOINLINE_ void kopt_compress_signs_(kopt_byte_ *out, const float *x, size_t n, kopt_random_reader_ *drawn) {
    uint32_t largest = 0, scale, bits = 0;
    float mean = 0;
    size_t i;
    for (i = 0; i < n; i++) {
        const uint32_t mag = kopt_as_u32_(x[i]) & 0x7FFFFFFFu;
        if (mag > largest) largest = mag;
        mean = kopt_add_(mean, kopt_mul_(kopt_as_f32_(mag), 1.0f / 256)); /* of a whole block */
    }
    if (n < KOPT_SIGNS_) mean = kopt_mul_(mean, kopt_div_(256.0f, (float)n));
    scale = kopt_scale_(drawn != NULL ? largest : kopt_as_u32_(mean));
    kopt_store_le_(out, scale, 4);
    for (i = 0; i < n; i++) {
        const uint32_t r = drawn == NULL ? 0 : kopt_next_random16_(drawn, i);
        if (i % 8 == 0) bits = 0;
        bits |= kopt_sign_bit_(x[i], scale, drawn != NULL, r) << i % 8;
        if (i % 8 == 7 || i == n - 1) out[4 + i / 8] = (kopt_byte_)bits;
    }
}

/* Decodes elements i .. i + n - 1 of the code at in to fp32 at y. i is a multiple of 64, n at most KOPT_PART_; of
   KOPT_Q1 they lie in one block. */
static KOPT_NOINLINE_ void kopt_decompress_part_(float *y, const kopt_byte_ *in, kopt_format code, size_t i, size_t n) {
    const size_t offset = i % kopt_block_of_(code);
    kopt_conversion_ v;
    size_t k;
    in += kopt_code_bytes_(code, i - offset);
    if (code == KOPT_Q1) {
        const uint32_t scale = kopt_load_le32_(in);
        in += 4 + offset / 8;
        for (k = 0; k < n; k++) y[k] = kopt_as_f32_(scale ^ (uint32_t)(in[k / 8] >> k % 8) << 31);
    } else if (code == KOPT_Q8) {
        for (k = 0; k < n; k += KOPT_BLOCK_, in += 1 + KOPT_BLOCK_)
            kopt_dequantise_(y + k, in + 1, in, n - k < KOPT_BLOCK_ ? n - k : KOPT_BLOCK_, 0);
    } else {
        v.n = n;
        v.first = 0;
        kopt_convert_part_(&v, (kopt_byte_ *)y, KOPT_F32, in, code, 0);
    }
}

/* kopt_compress() after the checks, 256 elements at a time. c->step counts this gradient; in step 1 the old residual is
   not read. x: gradient + old residual, then the new residual. y: the old residual, then the decoded values. */
static KOPT_NOINLINE_ void kopt_compress_(const kopt_compressor *c, kopt_byte_ *out, const kopt_byte_ *grad,
                                          kopt_format grad_format) {
    const size_t grad_size = kopt_bytes_of_(grad_format), residual_size = kopt_bytes_of_(c->residual_format);
    const uint32_t finite = c->residual_format == KOPT_F32    ? 0x7F7FFFFFu
                            : c->residual_format == KOPT_BF16 ? 0x7F7F7FFFu
                                                              : 0x477FEFFFu;
    const int stochastic = c->rounding == KOPT_STOCHASTIC;
    kopt_byte_ *const residual = (kopt_byte_ *)c->residual;
    kopt_conversion_ v = {NULL, NULL, KOPT_F32, KOPT_F32, 0, 0, c->seed, 0, c->step, c->id};
    kopt_random_reader_ drawn;
    float x[KOPT_SIGNS_], y[KOPT_PART_] = {0}; /* set: gcc -fanalyzer does not see what a kernel writes */
    kopt_byte_ *const xs = (kopt_byte_ *)x, *const ys = (kopt_byte_ *)y;
    size_t i, n, offset, k;
    drawn.cipher = kopt_make_philox_key_(c->seed, c->step, c->id, KOPT_RANDOM_COMPRESS_);
    drawn.store = 0;
    for (i = 0; i < c->n; i += n) {
        kopt_byte_ *block = out + kopt_code_bytes_(c->code, i);
        kopt_byte_ *const block_residual = residual == NULL ? NULL : residual + i * residual_size;
        n = c->n - i < KOPT_SIGNS_ ? c->n - i : KOPT_SIGNS_;
        v.n = n;
        v.first = drawn.first = c->first_index + i;
        kopt_convert_part_(&v, xs, KOPT_F32, grad + i * grad_size, grad_format, 0);
        for (offset = 0; residual != NULL && c->step > 1 && offset < n; offset += v.n) {
            v.n = n - offset < KOPT_PART_ ? n - offset : KOPT_PART_;
            kopt_convert_part_(&v, ys, KOPT_F32, block_residual + offset * residual_size, c->residual_format, 0);
            KOPT_KERNEL_(add_scaled)((kopt_byte_ *)(x + offset), ys, 1, 0x7F800000u, 0x7FC00000u, v.n);
        }
        v.n = n;
        for (k = 0; k < n && c->code != KOPT_Q8; k++) x[k] = kopt_canonical_nan_scalar_(x[k]);
        if (c->code == KOPT_Q8) /* of each block one byte of scale, then the codes */
            for (k = 0; k < n; k += KOPT_BLOCK_, block += 1 + KOPT_BLOCK_, drawn.first += KOPT_BLOCK_)
                kopt_quantise_(block + 1, block, xs + 4 * k, n - k < KOPT_BLOCK_ ? n - k : KOPT_BLOCK_, 0,
                               stochastic ? &drawn : NULL);
        else if (c->code == KOPT_Q1)
            kopt_compress_signs_(block, x, n, stochastic ? &drawn : NULL);
        else
            kopt_convert_part_(&v, block, c->code, xs, KOPT_F32, stochastic ? KOPT_RANDOM_COMPRESS_ : 0);
        if (residual == NULL) continue;
        for (offset = 0; offset < n; offset += KOPT_PART_) {
            const size_t part = n - offset < KOPT_PART_ ? n - offset : KOPT_PART_;
            kopt_decompress_part_(y, out, c->code, i + offset, part);
            KOPT_KERNEL_(add_scaled)((kopt_byte_ *)(x + offset), ys, -1, finite, 0, part);
        }
        kopt_convert_part_(&v, block_residual, c->residual_format, xs, KOPT_F32,
                           c->residual_rounding == KOPT_STOCHASTIC ? KOPT_RANDOM_RESIDUAL_ : 0);
    }
}

KOPT_API_ kopt_result kopt_compress(kopt_compressor *c, void *out, size_t out_size, const void *grad,
                                    kopt_format grad_format) {
    const kopt_result result = kopt_check_compressor_(c, out, out_size, grad, grad_format);
    kopt_environment_ environment;
    if (result != KOPT_OK) return result;
    c->step++;
    kopt_enter_(&environment);
    kopt_compress_(c, (kopt_byte_ *)out, (const kopt_byte_ *)grad, grad_format);
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
    size_t i, in_bytes;
    if (result != KOPT_OK) return result;
    if (!kopt_code_valid_(code)) return KOPT_ERROR_OPTION;
    if (!kopt_magnitude_at_most_(scale, KOPT_3E38_)) return KOPT_ERROR_RANGE;
    in_bytes = kopt_code_bytes_(code, n);
    if (in == NULL && in_bytes != 0) return KOPT_ERROR_NULL;
    if (in_size < in_bytes) return KOPT_ERROR_SIZE;
    if (kopt_overlap_(sum, n * size, in, in_bytes)) return KOPT_ERROR_OVERLAP;
    kopt_enter_(&environment);
    factor = kopt_to_float_(scale);
    for (i = 0; i < n; i += v.n) {
        kopt_byte_ *const to = (kopt_byte_ *)sum + i * size;
        v.n = n - i < KOPT_PART_ ? n - i : KOPT_PART_;
        kopt_decompress_part_(y, (const kopt_byte_ *)in, code, i, v.n);
        kopt_convert_part_(&v, (kopt_byte_ *)x, KOPT_F32, to, format, 0);
        KOPT_KERNEL_(add_scaled)((kopt_byte_ *)x, (kopt_byte_ *)y, factor, 0x7F800000u, 0x7FC00000u, v.n);
        kopt_convert_part_(&v, to, format, (kopt_byte_ *)x, KOPT_F32, 0);
    }
    kopt_leave_(&environment);
    return KOPT_OK;
}

/* ---- reduction ---- */

KOPT_API_ kopt_result kopt_reduce(void *out, kopt_format out_format, const void *const *shards, size_t count,
                                  kopt_format format, size_t n, double scale) {
    const kopt_result result = kopt_check_array_(out, out_format, n);
    kopt_tool_ t = {KOPT_TOOL_SUM_, format, out_format, NULL, (kopt_byte_ *)out, n, NULL, 0, shards, count, 0};
    kopt_environment_ environment;
    size_t k;
    if (result != KOPT_OK) return result;
    if (!kopt_format_valid_(format)) return KOPT_ERROR_OPTION;
    if (count == 0 || !kopt_magnitude_at_most_(scale, KOPT_3E38_)) return KOPT_ERROR_RANGE;
    if (count > KOPT_LARGEST_N_) return KOPT_ERROR_BOUNDS;
    if (n == 0) return KOPT_OK;
    if (shards == NULL) return KOPT_ERROR_NULL;
    if (kopt_overlap_(out, n * kopt_bytes_of_(out_format), shards, count * sizeof *shards)) return KOPT_ERROR_OVERLAP;
    for (k = 0; k < count; k++) {
        if (shards[k] == NULL) return KOPT_ERROR_NULL;
        if ((shards[k] != out || format != out_format) &&
            kopt_overlap_(out, n * kopt_bytes_of_(out_format), shards[k], n * kopt_bytes_of_(format)))
            return KOPT_ERROR_OVERLAP;
    }
    kopt_enter_(&environment);
    t.scale = kopt_to_float_(scale);
    KOPT_KERNEL_(tool)(&t);
    kopt_leave_(&environment);
    return KOPT_OK;
}

/* ---- conversions of arrays ---- */

static kopt_result kopt_convert_run_(const kopt_conversion_ *c) {
    kopt_environment_ environment;
    if (!kopt_format_valid_(c->dst_format) || !kopt_format_valid_(c->src_format)) return KOPT_ERROR_OPTION;
    if (c->n > KOPT_LARGEST_N_ || c->first >> 63 != 0) return KOPT_ERROR_BOUNDS;
    if (c->n == 0) return KOPT_OK;
    if (c->dst == NULL || c->src == NULL) return KOPT_ERROR_NULL;
    if (kopt_overlap_(c->dst, c->n * kopt_bytes_of_(c->dst_format), c->src, c->n * kopt_bytes_of_(c->src_format)))
        return KOPT_ERROR_OVERLAP;
    kopt_enter_(&environment);
    KOPT_KERNEL_(convert)(c);
    kopt_leave_(&environment);
    return KOPT_OK;
}

KOPT_API_ kopt_result kopt_convert(void *dst, kopt_format dst_format, const void *src, kopt_format src_format,
                                   size_t n) {
    const kopt_conversion_ c = {(kopt_byte_ *)dst, (const kopt_byte_ *)src, dst_format, src_format, n, 0, 0, 0, 0, 0};
    return kopt_convert_run_(&c);
}

KOPT_API_ kopt_result kopt_convert_stochastic(void *dst, kopt_format dst_format, const void *src,
                                              kopt_format src_format, size_t n, kopt_random_key key) {
    const kopt_conversion_ c = {
        (kopt_byte_ *)dst, (const kopt_byte_ *)src, dst_format, src_format, n, KOPT_RANDOM_CONVERT_,
        key.seed,          key.first_index,         key.step,   key.id};
    return kopt_convert_run_(&c);
}

KOPT_API_ int kopt_all_finite(const void *x, kopt_format format, size_t n) {
    if (kopt_check_array_(x, format, n) != KOPT_OK) return 0;
    return KOPT_KERNEL_(all_finite)((const kopt_byte_ *)x, format, n);
}

#ifdef KAHAN_OPT_VMATH
/* ---- functions of arrays ---- */

/* Do two arrays of `size` bytes begin at the same address or not overlap at all? */
static int kopt_same_or_disjoint_(const void *a, const void *b, size_t size) {
    return a == b || !kopt_overlap_(a, size, b, size);
}

/* Checks the arrays of a job of n elements, then runs it. y is x, and out2 is out, if there is no such array. */
static kopt_result kopt_vmath_(kopt_vmath_kind_ kind, int f, kopt_format format, void *out, void *out2, const void *x,
                               const void *y, size_t n) {
    const size_t bytes = n * kopt_bytes_of_(format);
    kopt_environment_ environment;
    kopt_vmath_job_ j;
    if (n > KOPT_LARGEST_N_) return KOPT_ERROR_BOUNDS;
    if (n == 0) return KOPT_OK;
    if (out == NULL || out2 == NULL || x == NULL || y == NULL) return KOPT_ERROR_NULL;
    if (!kopt_same_or_disjoint_(out, x, bytes) || !kopt_same_or_disjoint_(out, y, bytes) ||
        !kopt_same_or_disjoint_(out2, x, bytes) ||
        (kind == KOPT_VMATH_SINCOSPI_ && kopt_overlap_(out, bytes, out2, bytes)))
        return KOPT_ERROR_OVERLAP;
    memset(&j, 0, sizeof j);
    j.kind = kind;
    j.f = f;
    j.format = format;
    j.n = n;
    j.in = (const kopt_byte_ *)x;
    j.in2 = (const kopt_byte_ *)y;
    j.out = (kopt_byte_ *)out;
    j.out2 = (kopt_byte_ *)out2;
    kopt_enter_(&environment);
    KOPT_KERNEL_(vmath)(&j);
    kopt_leave_(&environment);
    return KOPT_OK;
}

#define KOPT_UNARY_(name, kind)                                                     \
    KOPT_API_ kopt_result kopt_vmath_##name(float *out, const float *x, size_t n) { \
        return kopt_vmath_(kind, KOPT_FN_EXP, KOPT_F32, out, out, x, x, n);         \
    }
KOPT_UNARY_(exp, KOPT_VMATH_EXP_)
KOPT_UNARY_(log, KOPT_VMATH_LOG_)
KOPT_UNARY_(tanh, KOPT_VMATH_TANH_)
KOPT_UNARY_(erf, KOPT_VMATH_ERF_)
KOPT_UNARY_(erfc, KOPT_VMATH_ERFC_)
#undef KOPT_UNARY_

KOPT_API_ kopt_result kopt_vmath_atan2(float *out, const float *y, const float *x, size_t n) {
    return kopt_vmath_(KOPT_VMATH_ATAN2_, KOPT_FN_EXP, KOPT_F32, out, out, y, x, n);
}

KOPT_API_ kopt_result kopt_vmath_sincospi(float *sine, float *cosine, const float *x, size_t n) {
    return kopt_vmath_(KOPT_VMATH_SINCOSPI_, KOPT_FN_EXP, KOPT_F32, sine, cosine, x, x, n);
}

KOPT_API_ kopt_result kopt_map(void *out, const void *x, kopt_format format, size_t n, kopt_function f) {
    if ((unsigned)f > (unsigned)KOPT_FN_SOFTPLUS || (format != KOPT_BF16 && format != KOPT_FP16))
        return KOPT_ERROR_OPTION;
    return kopt_vmath_(KOPT_VMATH_MAP_, (int)f, format, out, out, x, x, n);
}

KOPT_API_ kopt_result kopt_map_backward(void *dx, const void *dy, const void *x, kopt_format format, size_t n,
                                        kopt_function f) {
    static const int kopt_slopes_[] = {KOPT_FN_EXP,      KOPT_FN_LOG,      KOPT_TANH_SLOPE_,      KOPT_SIGMOID_SLOPE_,
                                       KOPT_SILU_SLOPE_, KOPT_GELU_SLOPE_, KOPT_GELU_TANH_SLOPE_, KOPT_FN_SIGMOID};
    if ((unsigned)f > (unsigned)KOPT_FN_SOFTPLUS || f == KOPT_FN_LOG || (format != KOPT_BF16 && format != KOPT_FP16))
        return KOPT_ERROR_OPTION;
    return kopt_vmath_(KOPT_VMATH_MAP_BACKWARD_, kopt_slopes_[f], format, dx, dx, x, dy, n);
}

/* ---- random numbers ---- */

/* Checks its arguments, then out[i] = middle + width * (random number of index key.first_index + i). */
static kopt_result kopt_draw_(kopt_vmath_kind_ kind, void *out, kopt_format format, size_t n, double middle,
                              double width, kopt_random_key key) {
    kopt_environment_ environment;
    kopt_vmath_job_ j;
    if (n > KOPT_LARGEST_N_ || key.first_index >> 54 != 0 || key.first_index + n > (uint64_t)1 << 54)
        return KOPT_ERROR_BOUNDS;
    if (!kopt_format_valid_(format)) return KOPT_ERROR_OPTION;
    if (!kopt_magnitude_at_most_(middle, KOPT_3E38_) || !kopt_between_(width, 0, KOPT_3E38_)) return KOPT_ERROR_RANGE;
    if (n == 0) return KOPT_OK;
    if (out == NULL) return KOPT_ERROR_NULL;
    memset(&j, 0, sizeof j);
    j.kind = kind;
    j.format = format;
    j.n = n;
    j.out = (kopt_byte_ *)out;
    j.key = key;
    kopt_enter_(&environment);
    j.a = kopt_to_float_(middle);
    j.b = kopt_to_float_(width);
    KOPT_KERNEL_(vmath)(&j);
    kopt_leave_(&environment);
    return KOPT_OK;
}

KOPT_API_ kopt_result kopt_normal(void *out, kopt_format format, size_t n, double mean, double deviation,
                                  kopt_random_key key) {
    return kopt_draw_(KOPT_VMATH_NORMAL_, out, format, n, mean, deviation, key);
}

KOPT_API_ kopt_result kopt_uniform(void *out, kopt_format format, size_t n, double low, double high,
                                   kopt_random_key key) {
    kopt_environment_ environment;
    double a, b, middle, width;
    if (!kopt_magnitude_at_most_(low, KOPT_3E38_) || !kopt_magnitude_at_most_(high, KOPT_3E38_) ||
        kopt_less64_(high, low))
        return KOPT_ERROR_RANGE;
    kopt_enter_(&environment);
    a = kopt_mul64_(low, 0.5);
    b = kopt_mul64_(high, 0.5);
    middle = kopt_add64_(b, a);
    width = kopt_sub64_(b, a);
    kopt_leave_(&environment);
    return kopt_draw_(KOPT_VMATH_UNIFORM_, out, format, n, middle, width, key);
}
#endif

/* ---- end of the implementation ---- */
#ifdef KOPT_COLD_HERE_
#pragma GCC pop_options
#endif
#ifdef KOPT_OPTIMIZED_HERE_
#pragma GCC pop_options
#endif
#undef KOPT_IMPLEMENTING_
#endif /* KOPT_IMPLEMENTING_ */

#ifndef KOPT_PASS_
#ifdef KOPT_GNU_
#pragma GCC diagnostic pop
#elif defined(_MSC_VER)
#pragma float_control(pop)
#endif
#endif

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
