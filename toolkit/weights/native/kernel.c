/* Fused loops over one weight: its sums, its block maxima, and the errors of a 16-level block quantizer.
 *
 * Built without -ffast-math and with -ffp-contract=off, so that every float operation rounds as in the plain
 * tensor reference; sums are taken in double, in several lanes (the only reordering, by `omp simd`).
 * Blocks restart at each row of `columns` elements. Block k of a range lies in row k / per_row; since rows are
 * contiguous, a range of blocks is one contiguous run of elements.
 */
#include <stdint.h>
#include <string.h>
#ifdef __AVX512F__
#include <immintrin.h>
#endif

enum { FP32 = 0, FP16 = 1, BF16 = 2 };
enum { MULTIPLY = 0, DIVIDE = 1, DIVIDE_PARTIAL = 2 };
#define STRIP 1024
#define AHEAD 8192

static inline float from_bits(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* IEEE half to float, exactly, also where the machine flushes subnormal numbers to zero. */
static inline float from_half(uint16_t half) {
    uint32_t sign = (uint32_t)(half & 0x8000u) << 16;
    uint32_t exponent = (half >> 10) & 0x1fu, fraction = half & 0x3ffu;
    uint32_t normal = ((exponent + 112u) << 23) | (fraction << 13);
    float tiny = (float)(int32_t)fraction * 5.9604644775390625e-08f; /* 2^-24 */
    uint32_t tiny_bits;
    memcpy(&tiny_bits, &tiny, sizeof tiny_bits);
    uint32_t special = 0x7f800000u | (fraction << 13);
    uint32_t bits = exponent == 0 ? tiny_bits : exponent == 31u ? special : normal;
    return from_bits(bits | sign);
}

/* Ask for the bytes that come `AHEAD` later: hardware prefetching stops at each 4 KiB page. */
static inline void prefetch(const void *weight, int dtype, int64_t start, int64_t n) {
    int64_t size = dtype == FP32 ? 4 : 2;
    const char *from = (const char *)weight + start * size + AHEAD;
    for (int64_t at = 0; at < n * size; at += 64) __builtin_prefetch(from + at, 0, 1);
}

/* `n` elements from `start` on as floats: in `buffer`, or where they lie. */
static const float *load(const void *weight, int dtype, int64_t start, int64_t n, float *buffer) {
    if (dtype == FP32) return (const float *)weight + start;
    const uint16_t *half = (const uint16_t *)weight + start;
    if (dtype == BF16) {
        uint32_t bits;
        for (int64_t i = 0; i < n; i++) {
            bits = (uint32_t)half[i] << 16;
            memcpy(&buffer[i], &bits, sizeof bits);
        }
    } else {
        for (int64_t i = 0; i < n; i++) buffer[i] = from_half(half[i]);
    }
    return buffer;
}

/* Σ|w|, Σw² and the largest |w| as bits (at least 0x7f800000 where one is not finite); with `out`, the floats. */
void toolkit_scan(const void *weight, int dtype, int64_t start, int64_t n, float *out, double *sums, uint32_t *top) {
    float buffer[STRIP];
    double absolute = 0, square = 0;
    uint32_t largest = 0;
    for (int64_t at = 0; at < n; at += STRIP) {
        int64_t m = n - at < STRIP ? n - at : STRIP;
        prefetch(weight, dtype, start + at, m);
        const float *x = load(weight, dtype, start + at, m, out ? out + at : buffer);
#pragma omp simd reduction(+ : absolute, square) reduction(max : largest)
        for (int64_t i = 0; i < m; i++) {
            uint32_t bits;
            memcpy(&bits, &x[i], sizeof bits);
            bits &= 0x7fffffffu;
            largest = bits > largest ? bits : largest;
            double value = (double)from_bits(bits);
            absolute += value;
            square += value * value;
        }
    }
    sums[0] = absolute;
    sums[1] = square;
    *top = largest;
}

static inline __attribute__((always_inline)) void absmax_fixed(const void *weight, int dtype, int64_t start,
                                                               int64_t n, float *out) {
    if (dtype == FP32) {
        const uint32_t *x = (const uint32_t *)weight + start;
        uint32_t largest = 0;
#pragma omp simd reduction(max : largest)
        for (int64_t i = 0; i < n; i++) {
            uint32_t bits = x[i] & 0x7fffffffu;
            largest = bits > largest ? bits : largest;
        }
        *out = from_bits(largest);
    } else {
        const uint16_t *x = (const uint16_t *)weight + start;
        uint16_t largest = 0;
#pragma omp simd reduction(max : largest)
        for (int64_t i = 0; i < n; i++) {
            uint16_t bits = x[i] & 0x7fffu;
            largest = bits > largest ? bits : largest;
        }
        *out = dtype == BF16 ? from_bits((uint32_t)largest << 16) : from_half(largest);
    }
}

/* max|w| of the blocks first … last−1, written to out[first …]; NaN or infinity stays one. */
void toolkit_absmax(const void *weight, int dtype, int64_t columns, int64_t block, int64_t first, int64_t last,
                    float *out) {
    int64_t per_row = (columns + block - 1) / block;
    for (int64_t k = first; k < last; k++) {
        int64_t column = (k % per_row) * block, start = (k / per_row) * columns + column;
        int64_t n = columns - column < block ? columns - column : block;
        if (n == 64) absmax_fixed(weight, dtype, start, 64, out + k);
        else if (n == 32) absmax_fixed(weight, dtype, start, 32, out + k);
        else if (n == 16) absmax_fixed(weight, dtype, start, 16, out + k);
        else absmax_fixed(weight, dtype, start, n, out + k);
    }
}

/* Thresholds and levels, and with AVX-512 the same as lookup registers for a search in four steps. */
typedef struct {
    float threshold[15], level[16];
#ifdef __AVX512F__
    __m512 above8, from3, from1, from0, levels;
#endif
} codebook;

static codebook prepare(const float *thresholds, const float *levels) {
    codebook book;
    memcpy(book.threshold, thresholds, sizeof book.threshold);
    memcpy(book.level, levels, sizeof book.level);
#ifdef __AVX512F__
    float shifted[16] = {0};
    memcpy(shifted, thresholds, 15 * sizeof(float));
    book.from0 = _mm512_loadu_ps(shifted);
    memcpy(shifted, thresholds + 1, 14 * sizeof(float));
    book.from1 = _mm512_loadu_ps(shifted);
    memcpy(shifted, thresholds + 3, 12 * sizeof(float));
    book.from3 = _mm512_loadu_ps(shifted);
    book.above8 = _mm512_set1_ps(thresholds[7]);
    book.levels = _mm512_loadu_ps(levels);
#endif
    return book;
}

/* e = x − scale·level[#{t < x·factor}] (or x/factor), for n elements of one block. */
static inline __attribute__((always_inline)) void errors_fixed(const float *x, float *e, int64_t n, float factor,
                                                               int divide, float scale, const codebook *book) {
    int64_t i = 0;
#ifdef __AVX512F__
    const __m512 by = _mm512_set1_ps(factor), size = _mm512_set1_ps(scale);
    for (; i + 16 <= n; i += 16) {
        __m512 value = _mm512_loadu_ps(x + i);
        __m512 y = divide ? _mm512_div_ps(value, by) : _mm512_mul_ps(value, by);
        __m512i at = _mm512_maskz_set1_epi32(_mm512_cmp_ps_mask(y, book->above8, _CMP_GT_OQ), 8);
        __mmask16 up = _mm512_cmp_ps_mask(y, _mm512_permutexvar_ps(at, book->from3), _CMP_GT_OQ);
        at = _mm512_mask_add_epi32(at, up, at, _mm512_set1_epi32(4));
        up = _mm512_cmp_ps_mask(y, _mm512_permutexvar_ps(at, book->from1), _CMP_GT_OQ);
        at = _mm512_mask_add_epi32(at, up, at, _mm512_set1_epi32(2));
        up = _mm512_cmp_ps_mask(y, _mm512_permutexvar_ps(at, book->from0), _CMP_GT_OQ);
        at = _mm512_mask_add_epi32(at, up, at, _mm512_set1_epi32(1));
        __m512 near = _mm512_mul_ps(_mm512_permutexvar_ps(at, book->levels), size);
        _mm512_storeu_ps(e + i, _mm512_sub_ps(value, near));
    }
#endif
    for (; i < n; i++) {
        float y = divide ? x[i] / factor : x[i] * factor;
        float level = book->level[0];
        for (int t = 0; t < 15; t++) level = y > book->threshold[t] ? book->level[t + 1] : level;
        e[i] = x[i] - scale * level;
    }
}

/* ΣE², Σ|E|, max|E| and ΣW² over the blocks first … last−1.
 * `factor` and `scale` hold one number a block; `mode` says whether x is multiplied by its factor, divided by
 * it, or divided only in a block shorter than `block`. */
void toolkit_errors(const void *weight, int dtype, int64_t columns, int64_t block, int64_t first, int64_t last,
                    const float *factor, const float *scale, int mode, const float *thresholds,
                    const float *levels, double *out) {
    float buffer[STRIP], e[STRIP];
    const codebook book = prepare(thresholds, levels);
    double square = 0, absolute = 0, norm = 0;
    float largest = 0;
    int64_t per_row = (columns + block - 1) / block;
    int64_t k = first, inside = 0; /* the next block, and how much of it is done */
    while (k < last) {
        int64_t column = (k % per_row) * block + inside, begin = (k / per_row) * columns + column, filled = 0;
        int64_t left = columns - column, piece;
        const float *x;
        /* As many elements of this row as fit a strip: whole blocks, or a piece of one larger than a strip. */
        if (block >= STRIP) {
            int64_t rest = block - inside < left ? block - inside : left;
            piece = rest < STRIP ? rest : STRIP;
        } else {
            int64_t whole = STRIP / block;
            if (whole > last - k) whole = last - k;
            piece = left < whole * block ? left : whole * block;
        }
        prefetch(weight, dtype, begin, piece);
        x = load(weight, dtype, begin, piece, buffer);
        while (filled < piece) {
            int64_t start = (k % per_row) * block, length = columns - start < block ? columns - start : block;
            int64_t n = length - inside < piece - filled ? length - inside : piece - filled;
            int divide = mode == DIVIDE || (mode == DIVIDE_PARTIAL && length < block);
            const float *from = x + filled;
            float *to = e + filled;
            if (divide) {
                if (n == 16) errors_fixed(from, to, 16, factor[k], 1, scale[k], &book);
                else if (n == 32) errors_fixed(from, to, 32, factor[k], 1, scale[k], &book);
                else errors_fixed(from, to, n, factor[k], 1, scale[k], &book);
            } else {
                if (n == 64) errors_fixed(from, to, 64, factor[k], 0, scale[k], &book);
                else if (n == 32) errors_fixed(from, to, 32, factor[k], 0, scale[k], &book);
                else errors_fixed(from, to, n, factor[k], 0, scale[k], &book);
            }
            filled += n;
            inside += n;
            if (inside == length) {
                inside = 0;
                k++;
            }
        }
#pragma omp simd reduction(+ : square, absolute, norm) reduction(max : largest)
        for (int64_t i = 0; i < piece; i++) {
            float size = e[i] < 0 ? -e[i] : e[i];
            double error = (double)size, value = (double)x[i];
            square += error * error;
            absolute += error;
            norm += value * value;
            largest = size > largest ? size : largest;
        }
    }
    out[0] = square;
    out[1] = absolute;
    out[2] = (double)largest;
    out[3] = norm;
}
