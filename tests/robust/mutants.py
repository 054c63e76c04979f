"""Mutants of kahan_opt.h: `mutants.py HEADER OUT LISTED` writes OUT/kahan_opt.h, in which KOPT_MUTANT=N of the
environment chooses one at run time, OUT/mutants: lines `N TAB identity`, and OUT/listed: the identities in LISTED. An
identity is room, function, text and change: it stays when other text moves. Those in LISTED are made in any case.
tests/robust/mutants.sh runs them."""
import bisect
import hashlib
import math
import re
import struct
import subprocess
import sys

EACH_ROOM = 7  # mutants by rule; some more in rooms of many functions

# By hand: function ('': anywhere), what is there once, what it becomes. Both are expressions; but if the latter has @,
# which is 1 in the mutant and else 0, it is the new text for both.
BY_HAND = [
    ("K_(encode_q8_scalar)", "mag < 0x40780000u", "1"),
    ("K_(encode_pair)", "K_(min16)(places, isplat_(0x00010001u))", "isplat_(0)"),
    ("K_(place_q8)", "iadd_(mag, isplat_(2))", "mag"),
    ("kopt_scale_folds_", "exponent - 40 < 184", "1"),
    ("kopt_exponent_q8_", "largest >= 0x7F800000u", "0"),
    ("K_(find_scales)", "i % PAIR_ != 0", "0"),
    ("K_(find_scales)", "scale[k] == 254", "0"),
    ("kopt_compare_headers_", "kopt_has_old_codes_(a)", "0"),
    ("K_(decode_pair)", "K_(flush16)(K_(min16)(low, high), minus_codes)", "K_(min16)(low, high)"),
    ("kopt_header_options_valid_", "h[8] == kopt_format_byte_(KOPT_Q8)", "h[8] <= kopt_format_byte_(KOPT_Q8)"),
    ("kopt_compute_scalars_", "opt->second_moment_format == KOPT_Q8 && s->step > 1",
     "opt->second_moment_format == KOPT_Q8"),
    ("kopt_compute_scalars_", "opt->second_moment_format == KOPT_Q8 && s->step > 1",
     "opt->first_moment_format == KOPT_Q8 && s->step > 1"),
    ("kopt_scale_", "bounded < 0x00800000u", "bounded <= 0x00800000u"),
    ("kopt_norm_root_", "pair >= 0 && remainder == 0", "0"),
    ("kopt_norm_tool_", "kopt_norm_carry_(norm)", "(void)0"),
    ("K_(norm_add16)", "shr_(all, 28)", "shr_(all, 29)"),
    ("K_(norm_add32)", "((highest + 3) << 23) - 1", "((highest + 4) << 23) - 1"),
    ("K_(norm_add32)", "(highest - 18) << 23", "(highest - 19) << 23"),
    ("K_(norm_add32)", "p < 44 ? 0 : p - 44", "p < 44 ? 0 : p - 43"),
    ("K_(norm_add32)", "2 * highest + 6", "2 * highest + 5"),
    ("K_(norm_format)", "groups < 64 ? groups : 64", "groups < 128 ? groups : 128"),
    ("kopt_sign_bit_", "kopt_mul_(y, 32768.0f) > kopt_add_((float)random16, 0.5f)",
     "kopt_mul_(y, 32768.0f) >= kopt_add_((float)random16, 0.5f)"),
    ("K_(vmath_log)", "horner_(z, 0.666666627f", "horner_(z, @ ? 0.666666687f : 0.666666627f"),
    ("K_(vmath_log)", "horner_(z, 0.400008112f", "horner_(z, @ ? 0.400008142f : 0.400008112f"),
    ("K_(commit)", "r &= 0xFFFFu", "r &= 0xFEFFu"),
    ("K_(round16)", "iadd_(u, r)", "iadd_(u, and_(r, isplat_(0xFFFEu)))"),
    # what vectors leave to one lane
    ("K_(direction_pair)", "any_true_(K_(mask_or)(K_(is_nan)(x->a), K_(is_nan)(x->b)))", "0"),
    ("K_(direction_pair)", "kind.grad != kind.weight", "0"),
    ("K_(step_element)", "as_u32_(K_(canonical_nan)(x))", "as_u32_(x)"),
    ("K_(commit_pair)", "K_(any_gt16)(and_(stored, c->magnitude), bf16 ? c->bf16_limit : isplat_(0x7BFF7BFFu))", "0"),
    ("K_(commit_pair)", "any_true_(igt_(largest, bf16 ? isplat_(0x7F7EFFFFu) : c->fp16_limit))", "0"),
    ("K_(store_moment_pair)", "K_(any_gt16)(largest16, c->bf16_limit)", "0"),
    ("K_(store_moment_pair)", "any_true_(igt_(imax_(a->largest, b->largest), c->fp16_limit))", "0"),
    ("K_(make_constants)", "isplat_hoisted_(0x7F7E7F7Eu)", "isplat_hoisted_(0x7F7F7F7Fu)"),
    ("K_(make_constants)", "isplat_hoisted_(0x477FDFFFu)", "isplat_hoisted_(0x477FEFFFu)"),
    ("K_(convert_general)", "0x7F7EFFFFu : 0x477FDFFFu", "@ ? 0x7F7FFFFFu : 0x7F7EFFFFu : 0x477FDFFFu"),
    ("kopt_step_elements_scalar_", "pair != 0 ? q % 2 * (pair / 2) + q / 2 : q", "q"),
    ("kopt_tally_", "in_pair % 2 * (t->apart / 2) + in_pair / 2", "in_pair"),
    ("K_(update_tile)", "t->w + i + q", "t->w + i"),
    ("K_(direction_pair)", "K_(reorder)(K_(load_f32_pair)(w_buffer), ORDER_(kind.weight), order)",
     "K_(load_f32_pair)(w_buffer)"),
    ("kopt_close_tail_", "a->written", "1"),
    ("kopt_close_tail_", "*a->at = a->original", "(void)0"),
    ("kopt_loop_over_tail_", "job.end = pair", "(void)0"),
    ("kopt_loop_over_tail_", "job.first += begin", "(void)0"),
    ("K_(specialized)", "n == KOPT_RANDOM_GROUP_ && index % KOPT_RANDOM_SPAN_ != 0", "index % KOPT_RANDOM_SPAN_ != 0"),
    ("K_(specialized)", "n == KOPT_RANDOM_GROUP_ && index % KOPT_RANDOM_SPAN_ != 0", "n == KOPT_RANDOM_GROUP_"),
    ("kopt_step_tiles_", "whole_pairs < n ? whole_pairs + pair : n", "n"),
    ("kopt_optimizer_from_header_", "!kopt_less64_(0, opt->momentum)", "0"),
    ("kopt_optimizer_from_header_", "sgd && moments != 0 && !kopt_less64_(0, opt->momentum)",
     "sgd && !kopt_less64_(0, opt->momentum)"),
    ("kopt_read_tensor_head_", "h[10] > 1", "0"),
    ("kopt_read_tensor_head_", "h[4] != KOPT_BLOCK_VERSION_", "0"),
    ("kopt_inspect_tensor", "end - at < KOPT_HEADER_", "0"),
    ("kopt_inspect_tensor", "at > in_size", "0"),
    ("kopt_inspect_tensor", "h[10] == 0", "0"),
    ("kopt_judge_block_", "h[10] == 0", "1"),
    ("kopt_judge_block_", "h[9] == (kopt_byte_)l->moment_count", "1"),
    ("kopt_judge_block_", "kopt_load_le64_(h + 16) == t->n", "kopt_load_le32_(h + 16) == (uint32_t)t->n"),
    ("kopt_check_init_", "kopt_overlaps_list_(weights, length * 4, opt, tensors, count, except)", "0"),
    ("kopt_check_init_", "(unsigned)(count == 1)", "1u"),
    ("kopt_overlaps_tensor_", "x != t->copy || t->copy_format != KOPT_F32", "t->copy_format != KOPT_F32"),
    ("kopt_state_write", "(unsigned)(slot == KOPT_SLOT_WEIGHT)", "1u"),
    ("kopt_state_init", "weights += t->n", "(void)0"),
    ("kopt_overlaps_tensor_", "(except >> a->what & 1u) == 0", "1"),
    ("kopt_judge_options_", "kopt_between_(opt->beta1, 0, 1)", "1"),
    ("kopt_judge_options_", "(opt->lookahead >= 1 && kopt_between_(opt->lookahead_rate, 0, 1))",
     "kopt_between_(opt->lookahead_rate, 0, 1)"),
    ("kopt_round_limit_", "kopt_as_u32_(kopt_f32_from_fp16((kopt_fp16)bits)) > exact", "0"),
    ("kopt_compress_", "ys, -1, finite, 0, part", "ys, -1, @ ? 0x7F7FFFFFu : finite, 0, part"),
    ("kopt_compress_", "k < n && c->code != KOPT_Q8", "0"),
    ("kopt_decompress_add", "factor, 0x7F800000u, 0x7FC00000u", "factor, @ ? 0x7FFFFFFFu : 0x7F800000u, 0x7FC00000u"),
    ("kopt_quantise_in_tile_", "drawn == NULL ? 0 : (int)drawn->store - 1", "0"),
    ("kopt_read_slot_", "format == KOPT_FP16 ? 1.0f / 2048 : 1", "1"),
    ("kopt_read_slot_", "beside + i / KOPT_BLOCK_", "beside"),
    ("kopt_scaled_step_", "scaled.clip = 1", "(void)0"),
    ("kopt_scaled_step_", "!kopt_magnitude_at_most_(*grad_scale, KOPT_3E38_)", "0"),
    ("kopt_next_step_", "opt->step == 0xFFFFFFFFu", "0"),
    ("kopt_take_step_", "kopt_norm_clip(norm, max_norm, grad_scale)", "opt->clip"),
    ("kopt_take_step_", "kopt_norm_clip(norm, max_norm, grad_scale)",
     "kopt_norm_clip(norm, max_norm, opt->grad_scale)"),
    ("kopt_take_step_", "memset(s, 0, sizeof *s)", "(void)0"),
    ("kopt_take_step_", "opt->step = s->step", "(void)0"),
    ("kopt_take_step_", "scaler->steps_ < opt->step", "0"),
    ("kopt_scaler_begin", "opts[i].step >= scaler->steps_", "1"),
    ("kopt_scaler_step", "opt->step < scaler->steps_", "0"),
    ("kopt_check_scaler_", "s->reserved_ != 0", "0"),
    ("kopt_norm_clip", "norm->nonfinite != 0", "0"),
    ("kopt_make_job_", "t->no_decay ? s->undecayed_rate : s->rate", "s->rate"),
    ("kopt_make_job_", "t->no_decay ? 0 : s->weight_decay", "s->weight_decay"),
    ("kopt_make_job_", "t->no_decay ? 0 : s->l2", "s->l2"),
    # a format for each moment
    ("kopt_has_blocks_", "kopt_has_scales_(s->first_moment_format) || kopt_has_scales_(s->second_moment_format)",
     "kopt_has_scales_(s->first_moment_format)"),
    ("kopt_has_blocks_", "kopt_has_scales_(s->first_moment_format) || kopt_has_scales_(s->second_moment_format)",
     "kopt_has_scales_(s->second_moment_format)"),
    ("kopt_copy_options_", "s->moment_count < 2", "0"),
    ("kopt_moment_format_", "kopt_is_square_(kind.rule, moment)", "moment == 1"),
    ("kopt_format_in_layout_", "kopt_is_square_(l->rule, m)", "m == 1"),
    ("kopt_layout_of_step_", "count == 3 ? 2 : count > 1", "count > 1"),
    ("kopt_layout_of_step_", "count == 3 ? 2 : count > 1", "count > 1 ? 2 : 0"),
    ("kopt_needs_random_", "kind.first != KOPT_F32 || kind.second != KOPT_F32", "kind.first != KOPT_F32"),
    ("kopt_needs_random_", "kind.first != KOPT_F32 || kind.second != KOPT_F32", "kind.second != KOPT_F32"),
    ("K_(direction_half)", "kopt_unbuffered_(kind.first) == KOPT_F32 && kopt_unbuffered_(kind.second) == KOPT_F32",
     "kopt_unbuffered_(kind.first) == KOPT_F32"),
    ("K_(direction_half)", "kopt_unbuffered_(kind.first) == KOPT_F32 && kopt_unbuffered_(kind.second) == KOPT_F32",
     "kopt_unbuffered_(kind.second) == KOPT_F32"),
    ("K_(direction_pair)", "kopt_unbuffered_(kind.first) != kind.weight", "0"),
    ("K_(direction_pair)", "kopt_unbuffered_(kind.second) != kind.weight", "0"),
    ("K_(store_moment_pair)", "kind.first == KOPT_BF16 || kind.second == KOPT_BF16", "kind.first == KOPT_BF16"),
    ("K_(store_moment_pair)", "kind.first == KOPT_BF16 || kind.second == KOPT_BF16", "kind.second == KOPT_BF16"),
    ("K_(store_moment_pair)", "kind.first == KOPT_FP16 || kind.second == KOPT_FP16", "kind.first == KOPT_FP16"),
    ("K_(store_moment_pair)", "kind.first == KOPT_FP16 || kind.second == KOPT_FP16", "kind.second == KOPT_FP16"),
    ("K_(store_moment_pair)", "kopt_has_scales_(format)", "kopt_has_scales_(kind.first)"),
    ("kopt_measure_", "kopt_has_scales_(s->second_moment_format)", "kopt_has_scales_(s->first_moment_format)"),
    ("kopt_second_byte_", "moment_count < 2", "0"),
    ("kopt_second_byte_", "first == second", "0"),
    ("kopt_make_variant_", "moment_count > 1 && opt->second_moment_format != KOPT_F32", "0"),
    ("kopt_make_variant_", "moment_count > 1", "1"),
    ("kopt_judge_block_",
     "h[11] == kopt_second_byte_(l->first_moment_format, l->second_moment_format, l->moment_count)", "1"),
    ("kopt_read_tensor_head_",
     "h[11] != kopt_second_byte_(head->opt.first_moment_format, head->opt.second_moment_format, moments & 7)", "0"),
    # an average in a checkpoint
    ("kopt_change_form_", "opt->rule != KOPT_RULE_EMA", "1"),
    ("kopt_change_form_", "kopt_sub64_(1, beta1)", "beta1"),
    ("kopt_change_form_", "kopt_sub64_(1, lr)", "lr"),
    ("kopt_change_form_", "loads ? kopt_sub64_(1, lr) : lr", "kopt_sub64_(1, lr)"),
    # a state in arrays of the caller
    ("kopt_place_state_", "(kopt_byte_ *)a->residual", "(kopt_byte_ *)a->slow_residual"),
    ("kopt_scale_of_", "(kopt_byte_ *)job->arrays->scale[m]", "job->moment[m] + job->scale"),
    ("kopt_place_state_", "(kopt_byte_ *)a->slow_residual", "(kopt_byte_ *)a->residual"),
    ("kopt_check_arrays_", "a->size != sizeof *a", "0"),
    ("kopt_check_arrays_", "t->state != NULL", "0"),
    ("kopt_check_arrays_", "a->moment[m] == NULL", "0"),
    ("kopt_check_arrays_", "kopt_has_scales_(kopt_format_in_layout_(l, m)) && a->scale[m] == NULL", "0"),
    ("kopt_check_arrays_", "kopt_has_scales_(kopt_format_in_layout_(l, m)) && a->scale[m] == NULL",
     "a->scale[m] == NULL"),
    ("kopt_check_arrays_", "a->slow == NULL", "0"),
    ("kopt_check_arrays_", "l->residual_bytes != 0 && a->slow_residual == NULL", "0"),
    ("kopt_check_arrays_", "l->residual_bytes != 0 && a->residual == NULL", "0"),
    ("kopt_check_arrays_", "a->rates == NULL", "0"),
    # FEEDBACK
    ("kopt_guard_", "kopt_as_u32_(rate) & 0x7FFFFFFFu", "kopt_as_u32_(rate)"),
    ("kopt_guard_", "now > last", "0"),
    ("kopt_guard_", "b < s->step && (b > a || a >= s->step)", "b > a"),
    ("kopt_guard_", "(b > a || a >= s->step)", "(b > a)"),
    ("kopt_guard_", "(second ? b : a) - 1 < s->step - 1", "(second ? b : a) < s->step"),
    ("kopt_guard_", "(second ? b : a) - 1 < s->step - 1", "1"),
    ("kopt_guard_", "s->moments_only", "0"),
    ("kopt_guard_", "s->unrectified", "0"),
    ("kopt_guard_", "!first", "0"),
    ("kopt_run_", "begin == 0", "1"),
    ("kopt_guard_", "now == 0", "0"),
    ("kopt_compute_scalars_", "sgd && opt->nesterov", "0"),
    ("kopt_compute_scalars_", "kopt_one_minus_(opt->momentum)", "s->gain1"),
    ("K_(pay_back)", "sub_(sub_(w, error), u)", "sub_(y, error)"),
    ("K_(pay_back)", "mul_(mul_(k->feedback, error), p->root[0])", "mul_(k->feedback, error)"),
    ("K_(pay_back)", "kind.first == KOPT_BF16 ? 0x7F7F0000u : 0x7F7FFFFFu", "0x7F7FFFFFu"),
    ("K_(pay_back)", "igt_(and_(*stored, c->abs_mask), c->subnormal)", "igt_(and_(*stored, c->abs_mask), isplat_(0))"),
    ("kopt_check_arrays_", "l->residual_bytes != 0 && a->residual == NULL", "a->residual == NULL"),
    ("kopt_list_memory_", "t->arrays == NULL", "1"),
    ("kopt_array_ranges_", "a->n * a->bytes", "a->n"),
    ("kopt_state_init", "memset(a->at, 0, a->n * a->bytes)", "(void)0"),
    ("kopt_state_arrays_of", "kopt_has_scales_(kopt_format_in_layout_(&l, m))", "1"),
    ("kopt_refresh_", "memcpy(a.slow_residual, a.residual, t->n * l->residual_bytes)", "(void)0"),
    ("kopt_walk_checkpoint_", "t->arrays == NULL", "1"),
    # another header, or a later one
    ("kopt_optimizer_init", "KOPT_VERSION < 10000 ? version == KOPT_VERSION : version / 10000 == KOPT_VERSION / 10000",
     "1"),
    ("kopt_optimizer_init", "opt_size != sizeof *opt", "0"),
    ("kopt_optimizer_init", "tensor_size != sizeof(kopt_tensor)", "0"),
    ("kopt_optimizer_init", "memset(opt, 0, opt_size)", "memset(opt, 0, @ ? sizeof *opt : opt_size)"),
    ("kopt_optimizer_init", "opt_size >= sizeof foreign", "1"),
    ("kopt_optimizer_init", "memcpy(opt, &foreign, sizeof foreign)", "(void)0"),
    ("kopt_check_accumulator_", "a->reserved_n_ != 0 || a->reserved32_ != 0", "0"),
    ("kopt_check_compressor_", "c->reserved32_ != 0", "0"),
    # careless use
    ("kopt_check_accumulator_", "a->made_ != KOPT_MADE_", "0"),
    ("kopt_check_compressor_", "c->made_ != KOPT_MADE_", "0"),
    ("kopt_run_", "!kopt_is_zero_(t->rate_scale)", "1"),
    ("kopt_run_", "s->stable && !kopt_is_zero_(t->stable_scale)", "!kopt_is_zero_(t->stable_scale)"),
    ("kopt_check_neighbours_", "p->id > t->id || p->first_index + p->n > t->first_index", "p->id > t->id"),
    ("kopt_check_neighbours_", "p->first_index + p->n > t->first_index", "p->first_index + p->n > t->first_index + 1"),
    ("kopt_state_init", "kopt_refresh_(&l, t, 1)", "(void)0"),
    ("kopt_state_write", "kopt_refresh_(&l, t, 1)", "(void)0"),
    ("kopt_dither_", "kopt_refresh_(l, t, 1)", "(void)0"),
    ("kopt_state_dither", "k < tensors[i].n * l.residual_bytes", "0"),
    ("kopt_state_dither", "opt->rule == KOPT_RULE_EMA", "0"),
    ("kopt_one_minus_beta_", "(cut | 1) << 11", "cut << 11"),
    ("kopt_one_minus_beta_", "cut << (shift + 11) == q", "1"),
    ("kopt_one_minus_beta_", "q = 0 - q", "q = ~q"),
    ("kopt_state_dither", "k < tensors[i].n * l.residual_bytes", "k < (l.residual_bytes ? tensors[i].n : 0)"),
    ("kopt_state_dither", "tensors[i].weight_format != KOPT_F32 && opt->rounding == KOPT_NEAREST",
     "opt->rounding == KOPT_NEAREST"),
    ("kopt_dither_", "kept += 0x80u", "(void)0"),
    ("kopt_dither_", "is_fp16 ? r & 0xFFF8u : r", "r"),
    ("kopt_dither_", "mag - 0x0D80u >= 0x7200u", "mag - 0x0080u >= 0x7F00u"),
    ("kopt_dither_", "mag - 1 >= 0x7BFFu", "mag >= 0x7C00u"),
    ("kopt_check_neighbours_", "p->id >= t->id", "p->id == t->id"),
    ("kopt_check_neighbours_", "list->current = !list->current", "(void)0"),
    ("kopt_check_tensor_", "memory->end = memory->range", "(void)0"),
    ("kopt_round_up16_", "(bytes + 15) & ~(size_t)15", "(bytes + 7) & ~(size_t)7"),
    ("kopt_walk_checkpoint_", "kopt_round_up16_(size) - size", "(size_t)0"),
    ("kopt_check_save_header_", "h[172] >> 1 & 1", "h[172] & 1"),
    ("kopt_walk_checkpoint_", "kopt_load_le32_(found) != s->checksum", "0"),
    ("kopt_load_list_", "memset(t->state, 0, 4)", "(void)0"),
    ("kopt_load_list_", "kopt_refresh_(&l, t, 0)", "(void)0"),
    ("kopt_load_list_", "s.checksum != checksum", "0"),
    ("kopt_load", "result == KOPT_ERROR_FILE ? KOPT_ERROR_SIZE : result", "result"),
    ("kopt_check_states_", "*bytes + size < size", "0"),
    ("kopt_format_of_list_", "tensors[i].weight_format != KOPT_F32", "1"),
    ("kopt_format_of_list_", "count == 0 ? KOPT_BF16 : KOPT_F32", "KOPT_F32"),
    ("kopt_format_of_list_", "count == 0 ? KOPT_BF16 : KOPT_F32", "KOPT_BF16"),
    ("kopt_find_part_", "tensors[i].n > ~before", "0"),
    ("kopt_find_part_", "begin == end ? 0 : i - first", "i - first"),
    ("kopt_range_of_part_", "*end != n", "1"),
    ("kopt_has_blocks_", "s->moment_count > 0", "1"),
    ("kopt_step_range", "begin < end && end - begin != part.tensors[i].n", "end - begin != part.tensors[i].n"),
    ("K_(commit)", "shr_(r, 8)", "r"),
    ("kopt_judge_tensor_", "kopt_bits64_(t->rate_scale) <= largest",
     "kopt_bits64_(t->rate_scale) << 1 <= largest << 1"),
    ("kopt_judge_tensor_", "(t->reserved32_ | t->reserved_[0] | t->reserved_[1]) == 0", "1"),
    ("kopt_judge_options_", "opt->reserved_[5] | opt->reserved_[6]", "0"),
    # what AVX-512 and AVX2 have as instructions
    ("", "_mm512_cmpgt_epi32_mask(a, b)", "_mm512_cmpgt_epu32_mask(a, b)"),
    ("", "MM_(max_epi16)(a, b)", "MM_(min_epi16)(a, b)"),
    ("", 'ASSEMBLED_(vf32_, min_, "minps", MM_(min_ps))', 'ASSEMBLED_(vf32_, K_(least), "minps", MM_(min_ps))\n'
     'ASSEMBLED_(vf32_, K_(most), "maxps", MM_(max_ps))\n'
     'FN_ vf32_ min_(vf32_ a, vf32_ b) { return @ ? K_(most)(a, b) : K_(least)(a, b); }'),
    ("", "_mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15)",
     "_mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 14)"),
    ("", "_mm512_maskz_cvtps_ph(0xFFFFu, a, 0)", "_mm512_maskz_cvtps_ph(0xFFFFu, a, 1)"),
]

# Rooms are the banners of the header; these functions are a room of their own.
OWN_ROOMS = [
    (r"K_\((stable_ratio_of|measure)\)|kopt_(measure|stable|must_measure|given_stable)", "StableAdamW"),
]
# No mutants: what other builds or machines are for, and what chooses among ways to the same bits.
NOT_HERE = re.compile(r"kopt_(copy_options|isa_\w*|swap\w*|"
                      r"version|make_optimizer|result_string|enter|leave|copy|prefetch\w*)_?$|"
                      r"K_\((step|convert|convert_array|nt_\w+)\)")
NO_CHANGE = re.compile(r"PREFETCH_|DIVIDE64_|prefetch_pair|OPAQUE_|sizeof|\"|__asm__|\(void\)|KOPT_SINGLE_BIT_|"
                       r"NT_THRESHOLD_|sfence|__builtin_ia32|K_\(make_philox_key\)\(0|POSITIVE64_ \?")
CONSTANT = re.compile(r"\bgeneral &&")  # in these builds
PAIRS = ("add sub", "and or", "min_ K_(max)", "K_(interleave_low) K_(interleave_high)", "K_(min16) K_(max16)",
         "mul div", "unpacklo unpackhi", "srli slli", "cmpgt cmpeq", "packus packs", "cvtepu16 cvtepi16", "< <=",
         "> >=", "== !=", "&& ||", "+ -")
OTHER = {a: b for pair in PAIRS for a, b in (pair.split(), pair.split()[::-1])}
RELATION = re.compile(r" (<=|>=|==|!=|<|>|&&|\|\||\+|-)\s")
CALL = re.compile(r"(?<![\w.>])(?:kopt_|i)?(add|sub|and|or|mul|div)(?=(?:64)?_\()"
                  r"|(?<![\w.>])(min_|K_\((?:max|min16|max16|interleave_low|interleave_high)\))(?=\()"
                  r"|(?<=_)(unpacklo|unpackhi|srli|slli|max|cmpgt|packus|cvtepu16)(?=_)")
NUMBER = re.compile(r"(?<![\w.])(0x[0-9A-F]+u?|\d+\.\d*(?:e[+-]?\d+)?f?|\d+e[+-]?\d+f?|\d+u?)(?![\w.])")


def other_number(text, less):
    """The next float or double, of a limit twice it; an integer a bit away, a mask 0..01..1 without its highest."""
    if text.startswith("0x"):
        value = int(text.rstrip("u"), 16)
        if value & (value + 1) == 0 and value > 0xF:
            value >>= 1
        else:
            value = value ^ 1 if value & 1 or value == 0 else value + (value & -value)
        return "0x%Xu" % value if value < 1 << 32 else None
    if "." in text or "e" in text:
        value = float(text.rstrip("f"))
        if not text.endswith("f"):
            return repr(2 * value if value > 1e30 else math.nextafter(value, math.inf))
        bits = struct.unpack("<i", struct.pack("<f", value))[0]
        return "%.9ef" % struct.unpack("<f", struct.pack("<i", bits + 1))[0]
    value = int(text.rstrip("u"))
    return "%d" % (value - 1 if less and value > 0 else value + 1) + ("u" if text.endswith("u") else "")


def changes(slot, loop):
    """Each way to change an expression, or the condition of a loop by steps of `loop`: begin, end, the new text."""
    for m in RELATION.finditer(slot):
        op, left, right = m[1], " ".join(slot[:m.start()].split()), " ".join(slot[m.end():].split())
        choice = re.match(r"(.+?) \? (.+?) : ([^;,]+)", right)
        if op in ("&&", "||") and CONSTANT.search(slot):
            continue
        if op in "<>" and choice and (left.endswith(choice[2]) and choice[3].startswith(choice[1]) or
                                      left.endswith(choice[3].rstrip(")")) and choice[2] == choice[1]):
            continue  # a < b ? a : b: the same for a == b
        if op == ">" and right.startswith("0") or op == "<" and left.endswith("(0"):
            continue  # loops without an end
        yield m.start(1), m.end(1), "+ %s <" % loop if loop and op == "<" else OTHER[op]  # no store beyond an array
    for m in NUMBER.finditer(slot):
        before = slot[max(0, m.start() - 2):m.start()]
        new = other_number(m[1], before.endswith("[") or m[1] == "1" and before not in ("< ", "> "))
        if new and not (m[1] == "0" and slot[m.end():].startswith(" <")):
            yield m.start(), m.end(), new
    for m in CALL.finditer(slot):
        yield m.start(m.lastindex), m.end(m.lastindex), OTHER[m[m.lastindex]]


def closing(text, at):
    """The place behind the bracket that closes the one at `at`."""
    depth = 0
    for i in range(at, len(text)):
        depth += (text[i] in "([{") - (text[i] in ")]}")
        if depth == 0:
            return i + 1
    raise ValueError("brackets: " + text[at:at + 60])


def split(text, begin, end, mark):
    """Parts between marks outside of brackets, as (begin, end)."""
    depth, last, parts = 0, begin, []
    for i in range(begin, end):
        depth += (text[i] in "([{") - (text[i] in ")]}")
        if depth == 0 and text[i] == mark:
            parts.append((last, i))
            last = i + 1
    return parts + [(last, end)]


def trimmed(text, begin, end):
    """The place without the spaces around it."""
    part = text[begin:end]
    return begin + len(part) - len(part.lstrip()), max(begin, end - len(part) + len(part.rstrip()))


DECLARATION = re.compile(r"(?:(?:const|volatile)\s+)*(?:[A-Za-z_]\w*|K_\(\w+\))(?:\s+const)?(?:\s+|\s*\*\s*)"
                         r"(?:const\s+)?\w+\s*(?:[,=\[]|$)")


def statement(text, begin, end):
    """The expressions of one statement without its semicolon: (begin, end, kind)."""
    begin, end = trimmed(text, begin, end)
    while True:
        m = re.match(r"(?:case [^:?]*:|default:|else\b|do\b|EACH_\w+)\s*", text[begin:end])
        if m:
            begin += m.end()
            continue
        m = re.match(r"(if|while|for|switch) (?=\()", text[begin:end])
        if not m:
            break
        at = begin + m.end()
        after = closing(text, at)
        inner = split(text, at + 1, after - 1, ";")
        rest = text[after:end].strip()
        if m[1] in ("if", "while"):
            yield (*trimmed(text, *inner[0]), "check" if rest.startswith("return") and m[1] == "if" else "condition")
        elif m[1] == "for" and len(inner) == 3:
            step = re.search(r"\+= ([\dA-Z_ *]+)$", text[inner[2][0]:inner[2][1]])
            yield (*trimmed(text, *inner[1]), "loop " + (step[1] if step else "1"))
        begin, end = trimmed(text, after, end)
    body = text[begin:end]
    if not body or body.startswith(("static", "typedef", "break", "continue", "goto")) or NO_CHANGE.search(body):
        return
    if re.match(r"return\b", body):
        at, _ = trimmed(text, begin + 6, end)
        if re.search(r"\w \w|[(\d]", text[at:end]):
            yield at, end, "value"
    elif DECLARATION.match(body):
        for a, b in split(text, begin, end, ","):
            m = re.match(r"[^=(]*?[^=<>!]=(?!=)\s*", text[a:b])
            if m and text[a + m.end()] != "{":
                yield a + m.end(), trimmed(text, a, b)[1], "value"
    elif re.match(r"[\w>.*\[\]() +/%-]*?[^=<>!]=(?!=)|(\+\+|--)?[\w>.*-]+(\+\+|--)?$", body):
        if not re.search(r" = -?[\d.]+$", body): # such a number is changed: what is not set is what the compiler likes
            yield begin, end, "statement"
        m = re.match(r"[^=]*?[^=<>!]=\s+(?!=)", body)
        if m:
            yield begin + m.end(), end, "value"
    elif re.match(r"[\w>.()-]+\(", body) and not re.match(r"(?!K_)[A-Z_]+\(.*\)\s*$", body, re.S):
        yield begin, end, "statement"
        yield begin, end, "value"


def expressions(text, begin, end):
    """Statements between the braces of a function."""
    last, depth = begin, 0
    for i in range(begin, end):
        depth += (text[i] in "([") - (text[i] in ")]")
        if depth == 0 and text[i] in ";{}":
            head = text[last:i]
            if text[i] == ";" or text[i] == "{" and not head.rstrip().endswith("="):
                yield from statement(text, last, i)
            last = i + 1


def functions(text):
    """Name, and where the body begins and ends."""
    head = re.compile(r"^(?!typedef|enum|struct)[A-Za-z_][^;{}#=()]*?(?:__attribute__\(\(\w+\)\)[^;{}#=()]*)?"
                      r"(?<!\w)(K_\(\w+\)|(?!K_)\w+)\((?=[^;{}#]*\) \{)", re.M)
    for m in head.finditer(text):
        brace = text.index("{", closing(text, m.end() - 1))
        yield m[1], brace + 1, closing(text, brace) - 1


def used_lines(path):
    """Lines of the header that the preprocessor keeps in one of the builds that the tests are."""
    used = set()
    for options in ((), ("-DKAHAN_OPT_VMATH",), ("-DKAHAN_OPT_NO_SIMD",)):
        command = ["gcc", "-E", "-std=c99", "-DKAHAN_OPT_IMPLEMENTATION", '-DKAHAN_OPT_SELF="kahan_opt.h"', *options,
                   "-x", "c", path]
        number = 0
        for line in subprocess.run(command, check=True, capture_output=True, text=True).stdout.split("\n"):
            m = re.match(r'# (\d+) "(.*?)"', line)
            if m:
                here, number = m[2] == path, int(m[1])
            else:
                if here and line.strip():
                    used.add(number)
                number += 1
    return used


def blank(text):
    """Comments and lines for the preprocessor as spaces."""
    def space(m):
        return re.sub(r"[^\n]", " ", m[0])
    text = re.sub(r"/\*.*?\*/|//[^\n]*", space, text, flags=re.S)
    return re.sub(r"^[ \t]*#(?:[^\n]*\\\n)*[^\n]*", space, text, flags=re.M)


def candidates(source, text, used):
    """Each mutant by rule: room, function, place, new text, what it is."""
    starts = [m.end() for m in re.finditer("^", source, re.M)]
    def is_used(at):
        return bisect.bisect_right(starts, at) in used
    banners = [(m.start(), m[1] or m[2])
               for m in re.finditer(r"^/\* (?:---- (.*?)(?::| -{3})|(KERNELS):)", source, re.M)]
    for name, begin, end in functions(text):
        if not is_used(begin) or NOT_HERE.search(name):
            continue
        room = [title.strip() for at, title in banners if at < begin][-1]
        for pattern, own in OWN_ROOMS:
            if re.match(pattern, name):
                room = own
        for a, b, kind in expressions(text, begin, end):
            slot = text[a:b]
            if not is_used(a) or "\n" in slot and "#" in source[a:b]:
                continue
            if kind == "statement":
                yield room, name, a, b, "(void)0", "drop"
            elif not NO_CHANGE.search(slot):
                if kind == "check" and not CONSTANT.search(slot):
                    yield room, name, a, b, "0", "drop"
                for x, y, new in changes(slot, kind[5:] if kind.startswith("loop") else ""):
                    yield room, name, a, b, slot[:x] + new + slot[y:], "`%s` to `%s`" % (near(text, a + x, a + y), new)


def near(text, begin, end):
    """A change with what is around it, on one line."""
    return " ".join((text[begin - 30:begin].split("\n")[-1] + "[" + text[begin:end] + "]" + text[end:end + 20]).split())


def by_hand(source, text, rows):
    """The mutants of such rows like those of candidates(): each snippet must be there once."""
    places, stale = {}, []
    for name, begin, end in functions(text):
        places.setdefault(name, []).append((begin, end))
    for name, old, new in rows:
        found = [(a + m.start(), a + m.end()) for a, b in (places.get(name, []) if name else [(0, len(source))])
                 for m in re.finditer(re.escape(old), source[a:b])]
        if len(found) != 1:
            where = name or "the header"
            stale.append("mutants.py: BY_HAND: `%s` is %d times in %s, not once" % (old, len(found), where))
            continue
        texts = (" ".join(part.split())[:90] for part in (old, new))
        yield "by hand: %s: `%s` to `%s`" % (name, *texts), ("", name, *found[0], new)
    if stale:
        sys.exit("\n".join(stale))


def musts(source):
    """The same of each condition of an optimizer's options."""
    start = source.index("MUST_(opt != NULL")
    for m in re.compile(r"MUST_\((?=(.*))").finditer(source, start, source.index("#undef", start)):
        yield "by hand: MUST_: not `%s`" % m[1][:90], ("", "", *m.span(), "MUST_(@ || ")


def chosen_of(everything, listed, hand):
    """Those by hand, those in the list, and some of each room, of one function after the other, in order of a hash."""
    def rank(word):
        return hashlib.sha256(word.encode()).digest()
    rooms, chosen = {}, dict(hand)
    chosen.update((identity, everything[identity]) for identity in listed if identity in everything)
    for identity, mutant in everything.items():
        rooms.setdefault(mutant[0], {}).setdefault(mutant[1], []).append(identity)
    for of in rooms.values():
        queues = [sorted(of[name], key=rank) for name in sorted(of, key=rank)]
        turns = [queue[turn] for turn in range(max(map(len, queues))) for queue in queues if turn < len(queue)]
        for identity in turns[:max(EACH_ROOM, len(of) // 2)]:
            chosen[identity] = everything[identity]
    return chosen


def render(text, begin, end, mutants):
    """text[begin:end] with a choice at each place; mutants: (begin, end, number, new), places nested or apart."""
    result, at = "", begin
    for a, b in sorted({m[:2] for m in mutants}, key=lambda place: (place[0], -place[1])):
        if a < at:
            if b > at:
                sys.exit("mutants.py: BY_HAND: `%s` is half within another one" % text[a:b])
            continue  # within the one before
        here = [m for m in mutants if m[:2] == (a, b)]
        inner = render(text, a, b, [m for m in mutants if a <= m[0] and m[1] <= b and m[:2] != (a, b)])
        for _, _, number, new in here:
            choice = "KOPT_MUTANT_(%d)" % number
            if "@" in new:
                inner = new.replace("@", choice)
            elif new == "(void)0":
                inner = "(%s ? (void)0 : (void)(%s))" % (choice, inner)
            else:
                inner = "(%s ? (%s) : (%s))" % (choice, new, inner)
        result += text[at:a] + inner
        at = b
    return result + text[at:end]


PRELUDE = """#ifndef KOPT_MUTANT_
#include <stdio.h>
#include <stdlib.h>
static int kopt_mutant_;
static unsigned char kopt_reached_[COUNT];
static __attribute__((constructor)) void kopt_mutant_begin_(void) {
    const char *number = getenv("KOPT_MUTANT");
    kopt_mutant_ = number ? atoi(number) : 0;
}
static __attribute__((destructor)) void kopt_mutant_end_(void) { /* which mutants the program comes by */
    FILE *file = getenv("KOPT_REACHED") ? fopen(getenv("KOPT_REACHED"), "a") : 0;
    int i;
    if (!file) return;
    for (i = 0; i < COUNT; i++)
        if (kopt_reached_[i]) fprintf(file, "%d\\n", i);
    fclose(file);
}
#define KOPT_MUTANT_(n) (kopt_reached_[n] = 1, kopt_mutant_ == (n))
#endif
#line 1
"""


def make(source, hand, by_rule, prelude, out, name, list_of):
    """Writes OUT/NAME, a header with a choice at each place, OUT/mutants and OUT/listed."""
    with open(list_of) as file:
        lines = re.sub(r"\n +", " ", file.read()).split("\n")
    listed = [line.split(" -- ")[0] for line in lines if line and line[0] != "#"]
    everything = {}
    for room, function, a, b, new, how in by_rule:
        for _, _, x, y, by in hand.values(): # the same, or half within one, or where one has the only text
            if (a <= x and y <= b and " ".join((source[a:x] + by + source[y:b]).split()) == " ".join(new.split()) or
                    x < b and a < y and not (a <= x and y <= b) and ("@" in by or not (x <= a and b <= y)) or
                    (a, b) == (x, y) and "@" in by):
                break
        else:
            if how == "drop":
                how = "drop `%s`" % " ".join(source[a:b].split())[:70]
            identity = "%s: %s: %s" % (room, function, how)
            while identity in everything:
                identity += " again"
            everything[identity] = (room, function, a, b, new)
    stale = [identity for identity in listed if identity not in everything and identity not in hand]
    if stale:
        sys.exit("\n".join("mutants.py: there is no mutant `%s`: strike it from %s" % (s, list_of) for s in stale))
    chosen = chosen_of(everything, listed, hand)
    mutants = [(m[2], m[3], number, m[4]) for number, m in enumerate(chosen.values(), 1)]
    text = render(source, 0, len(source), mutants)
    for number, identity in enumerate(chosen, 1):
        if "KOPT_MUTANT_(%d)" % number not in text:
            sys.exit("mutants.py: `%s` is within the text of another one" % identity)
    with open(out + "/" + name, "w") as file:
        file.write(prelude.replace("COUNT", str(len(mutants) + 1)) + text)
    with open(out + "/mutants", "w") as file:
        file.writelines("%d\t%s\n" % line for line in enumerate(chosen, 1))
    with open(out + "/listed", "w") as file:
        file.writelines(identity + "\n" for identity in listed)


def main(path, out, list_of):
    with open(path) as file:
        source = file.read()
    text = blank(source)
    hand = dict(by_hand(source, text, BY_HAND))
    hand.update(musts(source))
    make(source, hand, candidates(source, text, used_lines(path)), PRELUDE, out, "kahan_opt.h", list_of)


if __name__ == "__main__":
    main(*sys.argv[1:])
