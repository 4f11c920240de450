/* AdamW over flat vectors in one pass: every byte is read once and written once.

   The arithmetic, and the order of its roundings, is that of torch's own kernel. Compiled on the machine that runs it
   (host_adam.py); where that is not possible, torch computes the same in pieces. */

#include <math.h>
#include <stdint.h>
#include <string.h>

/* Made of the step's numbers in double precision, as torch makes them. */
typedef struct {
    float factor;   /* of gradients: clipping, and fp16's loss scale */
    float take1;    /* 1 - beta1 */
    float beta2, take2;
    float shrink;   /* 1 - rate * decay */
    float size;     /* rate / (1 - beta1^step) */
    float root;     /* sqrt(1 - beta2^step) */
    float eps;
} Step;

static inline uint16_t round_to_bf16(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    return (uint16_t)((bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : rounded);
}

/* weights: in bf16, or NULL where `master` is what the model computes with. */
void adamw(float *restrict master, const float *restrict gradients, float *restrict first, float *restrict second,
           uint16_t *restrict weights, int64_t count, int threads, Step step) {
#pragma omp parallel for simd schedule(static) num_threads(threads)
    for (int64_t i = 0; i < count; i++) {
        const float g = gradients[i] * step.factor;
        const float m = first[i] + (g - first[i]) * step.take1;
        const float v = second[i] * step.beta2 + step.take2 * g * g;
        const float p = master[i] * step.shrink - step.size * m / (sqrtf(v) / step.root + step.eps);
        first[i] = m;
        second[i] = v;
        master[i] = p;
        if (weights) weights[i] = round_to_bf16(p);
    }
}
