/* AdamW over flat vectors in one pass: every byte is read once and written once. What is new takes the place of what was
   read or, ahead of the gradients' norm, goes to another set of copies and moments.

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

/* What a call works on. */
typedef struct {
    float *master;          /* fp32 copies; NULL: the bf16 weights themselves are updated */
    const float *gradients;
    void *first, *second;   /* in fp32, or in bf16 */
    float *new_master;      /* where they go: the same, or elsewhere */
    void *new_first, *new_second;
    uint16_t *weights;      /* in bf16; NULL: the copies are what the model computes with */
    int64_t count, begin;   /* elements, and the number of the first in its unit */
    uint32_t key;           /* of the noise, which a unit and a step have for themselves */
} Vectors;

static inline float widen(uint16_t narrow) {
    uint32_t bits = (uint32_t)narrow << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

static inline uint16_t round_nearest(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    return (uint16_t)((bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : rounded);
}

/* Up as often as it is near: by noise that hangs on nothing but the key and the element's number. */
static inline uint16_t round_at_random(float value, uint32_t number, uint32_t key) {
    uint32_t noise = number * 0x9e3779b1u ^ key;
    noise ^= noise >> 16;
    noise *= 0x85ebca6bu;
    noise ^= noise >> 13;
    noise *= 0xc2b2ae35u;
    noise ^= noise >> 16;
    uint32_t bits;
    memcpy(&bits, &value, 4);
    uint32_t rounded = (bits + (noise & 0xffffu)) >> 16;
    return (uint16_t)((bits & 0x7f800000u) == 0x7f800000u ? bits >> 16 | ((bits & 0x7fffffffu) > 0x7f800000u) : rounded);
}

static inline __attribute__((always_inline)) void update(const Vectors x, const Step step, int threads, int is_narrow,
                                                          int has_master, int has_weights) {
    const float *master = x.master, *first = x.first, *second = x.second, *gradients = x.gradients;
    const uint16_t *narrow_first = x.first, *narrow_second = x.second;
    float *new_master = x.new_master, *new_first = x.new_first, *new_second = x.new_second;
    uint16_t *new_narrow_first = x.new_first, *new_narrow_second = x.new_second, *weights = x.weights;
#pragma omp parallel for simd schedule(static) num_threads(threads)
    for (int64_t i = 0; i < x.count; i++) {
        const uint32_t number = (uint32_t)(x.begin + i);
        const float g = gradients[i] * step.factor;
        const float m0 = is_narrow ? widen(narrow_first[i]) : first[i];
        const float v0 = is_narrow ? widen(narrow_second[i]) : second[i];
        const float p0 = has_master ? master[i] : widen(weights[i]);
        const float m = m0 + (g - m0) * step.take1;
        const float v = v0 * step.beta2 + step.take2 * g * g;
        const float p = p0 * step.shrink - step.size * m / (sqrtf(v) / step.root + step.eps);
        if (is_narrow) {
            new_narrow_first[i] = round_nearest(m);
            new_narrow_second[i] = round_at_random(v, number, x.key); /* to nearest it could not come down */
        } else {
            new_first[i] = m;
            new_second[i] = v;
        }
        if (has_master) new_master[i] = p;
        if (has_master && has_weights) weights[i] = round_nearest(p);
        if (!has_master) weights[i] = round_at_random(p, number, x.key ^ 0x5bd1e995u);
    }
}

void adamw(Vectors x, Step step, int threads, int is_narrow) {
    if (is_narrow) {
        if (x.master)
            update(x, step, threads, 1, 1, 1);
        else
            update(x, step, threads, 1, 0, 1);
    } else if (!x.master)
        update(x, step, threads, 0, 0, 1);
    else if (x.weights)
        update(x, step, threads, 0, 1, 1);
    else
        update(x, step, threads, 0, 1, 0);
}
