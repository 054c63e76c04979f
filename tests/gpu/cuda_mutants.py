"""Mutants of kahan_opt_cuda.cuh, of kernels and of what launches them: `cuda_mutants.py HEADER OUT LISTED` writes them
as tests/robust/mutants.py does. On the GPU the variable kopt_mutant_ chooses, which tests/gpu/cuda_mutants.sh sets."""
import re
import sys

sys.dont_write_bytecode = True
sys.path.insert(0, "tests/robust")
import mutants  # noqa: E402

# By hand, as in tests/robust/mutants.py: what tests of small lists do not see, and what no rule makes.
BY_HAND = [
    # steps of wide tasks
    ("kopt_cuda_step_kernel_", "position & (a.width - 1)", "position & 511"),
    ("kopt_cuda_step_kernel_", "(position & (a.width - 256)) != 0", "(position & 256) != 0"),
    ("kopt_cuda_step_kernel_", "(q >> 3 << 8)", "(q >> 3 & 1) << 8"),
    ("kopt_cuda_step_", "(e & 2047) < 256", "(e & 4095) < 256"),
    ("kopt_cuda_layout_", "plan->grad_format_ != 3", "1"),
    # positions in 32 bits
    ("kopt_cuda_step_kernel_", "uint64_t position = (uint64_t)(a.first + task - a.first_task[index]) * a.width",
     "uint64_t position = @ ? (a.first + task - a.first_task[index]) * a.width : "
     "(uint64_t)(a.first + task - a.first_task[index]) * a.width"),
    ("kopt_cuda_step_kernel_", "uint64_t task_begin = (uint64_t)(a.first + task - a.first_task[index]) * a.width",
     "uint64_t task_begin = @ ? (a.first + task - a.first_task[index]) * a.width : "
     "(uint64_t)(a.first + task - a.first_task[index]) * a.width"),
    ("kopt_cuda_accumulate_kernel_", "uint64_t position = 8 * ((uint64_t)blockIdx.x * KOPT_THREADS_ + threadIdx.x)",
     "uint64_t position = @ ? 8 * (blockIdx.x * KOPT_THREADS_ + threadIdx.x) : "
     "8 * ((uint64_t)blockIdx.x * KOPT_THREADS_ + threadIdx.x)"),
    ("kopt_cuda_read_kernel_", "uint64_t i = (uint64_t)blockIdx.x * KOPT_THREADS_ + threadIdx.x",
     "uint64_t i = @ ? blockIdx.x * KOPT_THREADS_ + threadIdx.x : "
     "(uint64_t)blockIdx.x * KOPT_THREADS_ + threadIdx.x"),
    ("kopt_cuda_stats_lane_", "(uint64_t)(task - a->first_task[index]) * a->width",
     "(task - a->first_task[index]) * a->width"),
    ("kopt_cuda_measure_lane_", "(uint64_t)round * KOPT_ROUND_", "round * KOPT_ROUND_"),
    ("kopt_cuda_load_moment_", "i / KOPT_BLOCK_", "(uint32_t)i / KOPT_BLOCK_"),
    ("kopt_cuda_load_all_", "i / KOPT_BLOCK_", "(uint32_t)i / KOPT_BLOCK_"),
    ("kopt_cuda_store_block_", "i / KOPT_BLOCK_", "(uint32_t)i / KOPT_BLOCK_"),
    ("kopt_cuda_random_one_", "t->first + t->pad + i", "(uint32_t)(t->first + t->pad + i)"),
    ("kopt_cuda_span_", "first_index - d->pad", "(uint32_t)(first_index - d->pad)"),
    # many groups, many tensors
    ("kopt_cuda_find_", "uint32_t low = 0;\n    while (count > 1) {",
     "uint32_t low = 0, level = 0;\n    while (count > 1 && !(@ && level++ == 2)) {"),
    ("kopt_cuda_prologue_kernel_", "first < count", "0"),
    ("kopt_cuda_prologue_kernel_", "g < count && !skip", "g < count && !skip && g < KOPT_PROLOGUE_THREADS_"),
    ("kopt_cuda_prologue_kernel_", "failed && shared.skip == 0 && result == KOPT_OK",
     "g < 1 && failed && shared.skip == 0 && result == KOPT_OK"),
    ("kopt_cuda_setting_kernel_", "g < s.control->groups", "g < 1"),
    ("kopt_cuda_setting_kernel_", "g < s.control->groups", "g < 2"),
    ("kopt_cuda_plan_step", "(plan->tensors_ + KOPT_THREADS_ - 1) / KOPT_THREADS_", "1"),
    ("kopt_cuda_plan_set_arrays", "(uint32_t)(first + i)", "(uint32_t)first"),
    ("kopt_cuda_plan_set_arrays", "&tensors[i + k]", "&tensors[k]"),
    ("kopt_cuda_plan_set_arrays", "i < count && result == KOPT_OK; i += m.count",
     "(@ ? i < 1 : i < count) && result == KOPT_OK; i += m.count"),
    ("kopt_cuda_plan_set_arrays", "4 * KOPT_CUDA_MOVES_ / m.stride", "KOPT_CUDA_MOVES_"),
    ("kopt_cuda_check_moves_", "plan->tensors_ + first + i", "plan->tensors_ + i"),
    # counters of the statistics, and the last block
    ("kopt_cuda_rounds_", "all == KOPT_FP16 ? 4 : 256", "all == KOPT_FP16 ? 4 : all == KOPT_BF16 ? 260 : 256"),
    ("kopt_cuda_rounds_", "all == KOPT_FP16 ? 4 : 256", "all == KOPT_FP16 ? 5 : 256"),
    ("kopt_cuda_rounds_", "all == KOPT_FP16 ? 4 : 256", "all == KOPT_FP16 ? 4 : all == KOPT_BF16 ? 256 : 260"),
    ("kopt_cuda_stats_kernel_", "__threadfence();\n    __syncthreads();\n    if (thread == 0)",
     "if (!@) __threadfence();\n    __syncthreads();\n    if (thread == 0)"),
    ("kopt_cuda_stats_kernel_", "- 1;\n        __threadfence();", "- 1;\n        if (!@) __threadfence();"),
    ("kopt_cuda_stats_kernel_", "__threadfence();\n    __syncthreads();\n    if (thread != 0)",
     "__threadfence();\n    if (!@) __syncthreads();\n    if (thread != 0)"),
    ("kopt_cuda_stats_kernel_", "i < KOPT_CUDA_BINS_(ALL) * 32", "i < KOPT_CUDA_BINS_(ALL) * 32 - 32"),
    ("kopt_cuda_stats_kernel_", "thread);\n        __syncthreads();", "thread);\n        if (!@) __syncthreads();"),
    ("kopt_cuda_stats_kernel_", "base += gridDim.x * KOPT_WARPS_",
     "base += (@ && gridDim.x > 3 ? 3 : gridDim.x) * KOPT_WARPS_"),
    ("kopt_cuda_stats_kernel_", "== gridDim.x", "== (@ ? 1 : gridDim.x)"),
    ("kopt_cuda_measure_kernel_", "i < KOPT_CUDA_BINS_(KOPT_F32) * 32", "i < KOPT_CUDA_BINS_(KOPT_F32) * 32 - 32"),
    ("kopt_cuda_measure_kernel_", "next == index && round + gridDim.x < a.count", "round + gridDim.x < a.count"),
    ("kopt_cuda_measure_kernel_", "KOPT_F32);\n        __syncthreads();",
     "KOPT_F32);\n        if (!@) __syncthreads();"),
    # warps, and vectors at any address
    ("kopt_cuda_store_block_", "__syncwarp()", "(void)0"),
    ("kopt_cuda_store_block_", "q = 4; q > 0", "q = @ ? 2 : 4; q > 0"),
    ("kopt_cuda_aligned_", "(size == 1 ? 8 : 16)", "(size == 1 ? 4 : 16)"),
    ("kopt_cuda_aligned_", "(size == 1 ? 8 : 16)", "8"),
    ("kopt_cuda_step_", "t->wide", "1"),
    ("kopt_cuda_step_", "(!Q8 || (e & 7) == 0)", "1"),
    # refusals
    ("kopt_cuda_same_kind_", "kopt_moments_(a) == kopt_moments_(b)", "1"),
    ("kopt_cuda_same_kind_", "kopt_cuda_stable_(a) == kopt_cuda_stable_(b)", "1"),
    ("kopt_cuda_same_kind_", "a->rule == b->rule", "1"),
    ("kopt_cuda_same_kind_", "a->residual_rounding == b->residual_rounding", "1"),
    ("kopt_cuda_prologue_kernel_", "failed || shared.skip != 0 || shared.result != KOPT_OK",
     "shared.skip != 0 || shared.result != KOPT_OK"),
    ("kopt_cuda_prologue_kernel_", "failed || shared.skip != 0 || shared.result != KOPT_OK",
     "failed || shared.skip != 0"),
    ("kopt_cuda_prologue_kernel_", "opt.step == 0xFFFFFFFFu", "0"),
    ("kopt_cuda_prologue_kernel_", "c->ready = 0", "(void)0"),
    ("kopt_cuda_prologue_kernel_", "(kopt_as_u32_(*options.found_inf) & 0x7FFFFFFFu) != 0",
     "(kopt_as_u32_(*options.found_inf) & 0x3F800000u) != 0"),
    ("kopt_cuda_begin_", "kopt_between_(opt->lr, 0, KOPT_3E38_)", "1"),
    ("kopt_cuda_begin_", "valid &= kopt_compute_scalars_(opt, s)", "valid |= kopt_compute_scalars_(opt, s)"),
    ("kopt_cuda_clip_", "kopt_finite_(s->grad_scale)", "1"),
    ("kopt_cuda_check_moves_", "(t->arrays == NULL && (t->state == NULL) != (old->state == NULL))", "0"),
    ("kopt_cuda_setting_kernel_", "s.counts[0] == 0xFFFFFFFFu || s.counts[1] == 0xFFFFFFFFu",
     "s.counts[0] == 0xFFFFFFFFu"),
    ("kopt_cuda_setting_kernel_", "result == KOPT_OK || s.control->stopped == KOPT_OK", "1"),
    ("kopt_cuda_setting_kernel_", "s.group[1].opt.weight_decay = 0", "(void)0"),
    ("kopt_cuda_accumulate_kernel_", "number == 0 || count == 0xFFFFFFFFu", "count == 0xFFFFFFFFu"),
]

# No mutants: errors of CUDA, and how many blocks and threads there are, which changes no bit.
mutants.NOT_HERE = re.compile(r"kopt_cuda_(result|resident|grid|blocks|launch|load|copy|ask|call)_$|kopt_cuda_use_ptx$")
mutants.EACH_ROOM = 3
mutants.OWN_ROOMS = [
    (r"(?!kopt_)", "vocabulary"),
    (r"kopt_cuda_((load|store)_(words|octet|one|signed)|extract|sign_extend)_$", "loads and stores"),
    (r"kopt_cuda_(plan_(size|build)|layout|span|describe|kernel_of|stable)_?$", "plans"),
    (r"kopt_cuda_(state_\w+|pieces|init_tensor|check_twin|copy_pieces)_?$", "states"),
    (r"kopt_cuda_accumul\w+_?(of_|add|read)$", "sums"),
]
mutants.NO_CHANGE = re.compile(mutants.NO_CHANGE.pattern +
                               r"|\basm\b|KOPT_CUDA_OPAQUE_|\*inside\[")

PRELUDE = """#ifndef KOPT_MUTANT_
#include <stdlib.h>
#ifdef __CUDACC__
__constant__ int kopt_mutant_;
static int kopt_chosen_(void) {
    const char *const number = getenv("KOPT_MUTANT");
    return number ? atoi(number) : 0;
}
#endif
#ifdef __CUDA_ARCH__
#define KOPT_MUTANT_(n) (kopt_mutant_ == (n))
#else
#define KOPT_MUTANT_(n) (kopt_chosen_() == (n))
#endif
#endif
#line 1
"""


def main(path, out, list_of):
    with open(path) as file:
        source = file.read()
    text = mutants.blank(source)
    for hidden in (r"__launch_bounds__\((?:[^()]|\([^()]*\))*\)", r"\bKOPT_(?:UNROLL|ROLL|UNROLL_PAIRS)_\b"):
        text = re.sub(hidden, lambda m: re.sub(r"[^\n]", " ", m[0]), text)
    first = source.count("\n", 0, source.index("#define KOPT_CUDA_IMPLEMENTED_")) + 1
    used = set(range(first, source.count("\n") + 2))
    hand = dict(mutants.by_hand(source, text, BY_HAND))
    mutants.make(source, hand, mutants.candidates(source, text, used), PRELUDE, out, "kahan_opt_cuda.cuh", list_of)


if __name__ == "__main__":
    main(*sys.argv[1:])
