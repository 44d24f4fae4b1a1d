/* Updates of some rows of float32 tables, each in one pass over memory.

   A table is [rows, width], row-major. Rows are distinct, so that parts of them can be updated by several
   threads at once: a call does those at places first .. last - 1. Arithmetic is IEEE float32 in the order
   written here (-ffp-contract=off), so that every machine gives the same result.

   kgshard/optim/kernels.py calls these and says what they compute; where there is no compiler, torch does it
   in a dozen passes. */

#include <math.h>
#include <stdint.h>

/* One copy for AVX2, chosen when the library is loaded, where the compiler and the C library can do that. */
#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__)
#define FOR_EACH_PROCESSOR __attribute__((target_clones("avx2", "default")))
#else
#define FOR_EACH_PROCESSOR
#endif

#define LINE 64
#define AHEAD 4
#define LANES 8

/* Ask for a row before its turn: rows lie anywhere, and the processor cannot guess where. */
static inline void prefetch(const float *row, int64_t width)
{
    const char *bytes = (const char *)row;
    for (int64_t at = 0; at < width * (int64_t)sizeof(float); at += LINE)
        __builtin_prefetch(bytes + at, 1);
}

/* rate1 is 1 - beta1, rate2 1 - beta2: in float32, 1 - 0.999f would be off by 5e-5 of itself. factors and
   epsilons hold one number for each place, or one for all, where per_row is 0. */
FOR_EACH_PROCESSOR
void kgshard_adam(float *weight, float *average, float *squared, const int64_t *rows, const float *gradients,
                  int64_t first, int64_t last, int64_t width, float rate1, float beta2, float rate2,
                  const float *factors, const float *epsilons, int64_t per_row)
{
    for (int64_t place = first; place < last; place++) {
        if (place + AHEAD < last) {
            int64_t next = rows[place + AHEAD] * width;
            prefetch(weight + next, width);
            prefetch(average + next, width);
            prefetch(squared + next, width);
        }
        float *restrict w = weight + rows[place] * width;
        float *restrict m = average + rows[place] * width;
        float *restrict v = squared + rows[place] * width;
        const float *restrict g = gradients + place * width;
        float factor = factors[place * per_row], epsilon = epsilons[place * per_row];
        for (int64_t i = 0; i < width; i++) {
            m[i] += rate1 * (g[i] - m[i]);
            v[i] = beta2 * v[i] + rate2 * (g[i] * g[i]);
            w[i] += factor * (m[i] / (sqrtf(v[i]) + epsilon));
        }
    }
}

FOR_EACH_PROCESSOR
void kgshard_adagrad(float *weight, float *sums, const int64_t *rows, const float *gradients, int64_t first,
                     int64_t last, int64_t width, float lr, float epsilon)
{
    for (int64_t place = first; place < last; place++) {
        if (place + AHEAD < last) {
            int64_t next = rows[place + AHEAD] * width;
            prefetch(weight + next, width);
            prefetch(sums + next, width);
        }
        float *restrict w = weight + rows[place] * width;
        float *restrict s = sums + rows[place] * width;
        const float *restrict g = gradients + place * width;
        for (int64_t i = 0; i < width; i++) {
            s[i] += g[i] * g[i];
            w[i] -= lr * (g[i] / (sqrtf(s[i]) + epsilon));
        }
    }
}

/* sums is float32[rows]. */
FOR_EACH_PROCESSOR
void kgshard_adagrad_rowwise(float *weight, float *sums, const int64_t *rows, const float *gradients,
                             int64_t first, int64_t last, int64_t width, float lr, float epsilon)
{
    for (int64_t place = first; place < last; place++) {
        if (place + AHEAD < last)
            prefetch(weight + rows[place + AHEAD] * width, width);
        float *restrict w = weight + rows[place] * width;
        const float *restrict g = gradients + place * width;
        float lanes[LANES] = {0}, total = 0;
        int64_t i = 0;
        for (; i + LANES <= width; i += LANES)
            for (int lane = 0; lane < LANES; lane++)
                lanes[lane] += g[i + lane] * g[i + lane];
        for (; i < width; i++)
            total += g[i] * g[i];
        for (int lane = 0; lane < LANES; lane++)
            total += lanes[lane];
        float sum = sums[rows[place]] += total / width;
        float rate = 1 / (sqrtf(sum) + epsilon) * lr;
        for (i = 0; i < width; i++)
            w[i] -= rate * g[i];
    }
}
