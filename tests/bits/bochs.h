/* bochs.h - for programs that avx512.sh runs in Bochs, included before all else. VCVTPS2PH of Bochs 2.7 rounds a number
   halfway between two of fp16 away from zero, in place of to even. Where it does, an odd result may be wrong: then that
   of the fp32 number below in magnitude is right. Where it does not, nothing changes. */
#include <immintrin.h>

#define BOCHS_TIE 1.00048828125f /* 1 + 2^-11: to even it is 0x3c00, up 0x3c01 */

__attribute__((__target__("avx2,f16c"))) static inline __m128i bochs_nearest8(__m256 a) {
    const __m256i one = _mm256_set1_epi32(1);
    const __m256 below = _mm256_castsi256_ps(_mm256_sub_epi32(_mm256_castps_si256(a), one));
    const __m128i up = _mm256_cvtps_ph(a, 0), down = _mm256_cvtps_ph(below, 0);
    const __m128i odd = _mm_and_si128(up, _mm256_cvtps_ph(_mm256_set1_ps(BOCHS_TIE), 0));
    return _mm_blendv_epi8(up, down, _mm_srai_epi16(_mm_slli_epi16(odd, 15), 15));
}

__attribute__((__target__("avx512f,avx512bw,avx512dq,avx512vl,avx2,f16c"))) static inline __m256i
bochs_nearest16(__m512 a) {
    const __m512i one = _mm512_set1_epi32(1);
    const __m512 below = _mm512_castsi512_ps(_mm512_sub_epi32(_mm512_castps_si512(a), one));
    const __m256i up = _mm512_maskz_cvtps_ph(0xFFFF, a, 0), down = _mm512_maskz_cvtps_ph(0xFFFF, below, 0);
    const __m256i odd = _mm256_and_si256(up, _mm512_maskz_cvtps_ph(0xFFFF, _mm512_set1_ps(BOCHS_TIE), 0));
    return _mm256_blendv_epi8(up, down, _mm256_srai_epi16(_mm256_slli_epi16(odd, 15), 15));
}

#undef _mm256_cvtps_ph
#undef _mm512_maskz_cvtps_ph
#define _mm256_cvtps_ph(a, how) bochs_nearest8(a)
#define _mm512_maskz_cvtps_ph(mask, a, how) bochs_nearest16(a)
