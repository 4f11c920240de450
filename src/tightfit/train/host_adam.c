/* AdamW over flat vectors in one pass: every byte is read once and written once. What is new takes the place of what was
   read or, ahead of the gradients' norm, goes to another set of copies and moments.

   The arithmetic, and the order of its roundings, is that of torch's own kernel. Compiled on the machine that runs it
   (host_adam.py); where that is not possible, torch computes the same in pieces. */

#include <math.h>
#include <stdint.h>
#include <string.h>
#ifdef __SSE2__
#include <emmintrin.h>
#endif

enum { BLOCK = 1024, CHUNK = 1 << 16 }; /* elements: what stays in the nearest cache, and what a thread takes at a time */

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

/* Past the caches: memory that is only written is not read before, as it is where caches take it in. */
static inline void write_past(void *to, const void *from, int64_t bytes) {
#ifdef __SSE2__
    if (((uintptr_t)to & 15) == 0) {
        const int64_t whole = bytes & ~(int64_t)15;
        for (int64_t at = 0; at < whole; at += 16)
            _mm_stream_si128((__m128i *)((char *)to + at), _mm_loadu_si128((const __m128i *)((const char *)from + at)));
        to = (char *)to + whole, from = (const char *)from + whole, bytes -= whole;
    }
#endif
    memcpy(to, from, (size_t)bytes);
}

static inline void finish_writes(void) {
#ifdef __SSE2__
    _mm_sfence();
#endif
}

/* Elements `from` to `to`, at most `BLOCK`. `is_ahead`: what is new goes elsewhere. */
static inline __attribute__((always_inline)) void update_block(const Vectors x, const Step step, int64_t from, int64_t to,
                                                               int is_narrow, int has_master, int has_weights,
                                                               int is_ahead) {
    const int64_t count = to - from, width = is_narrow ? 2 : 4;
    const float *master = has_master ? x.master + from : 0, *gradients = x.gradients + from;
    const char *old_first = (const char *)x.first + width * from, *old_second = (const char *)x.second + width * from;
    const float *first = (const float *)old_first, *second = (const float *)old_second;
    const uint16_t *narrow_first = (const uint16_t *)old_first, *narrow_second = (const uint16_t *)old_second;
    const uint16_t *weights = has_weights ? x.weights + from : 0;
    char *first_place = (char *)x.new_first + width * from, *second_place = (char *)x.new_second + width * from;
    float *master_place = has_master ? x.new_master + from : 0;
    float made_master[BLOCK], made_first[BLOCK], made_second[BLOCK];
    uint16_t made_weights[BLOCK];
    float *new_master = is_ahead ? made_master : master_place;
    float *new_first = is_ahead ? made_first : (float *)first_place;
    float *new_second = is_ahead ? made_second : (float *)second_place;
    uint16_t *new_narrow_first = (uint16_t *)new_first, *new_narrow_second = (uint16_t *)new_second;
#pragma omp simd
    for (int64_t i = 0; i < count; i++) {
        const uint32_t number = (uint32_t)(x.begin + from + i);
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
        if (has_master && has_weights) made_weights[i] = round_nearest(p);
        if (!has_master) made_weights[i] = round_at_random(p, number, x.key ^ 0x5bd1e995u);
    }
    if (is_ahead) {
        write_past(first_place, made_first, width * count);
        write_past(second_place, made_second, width * count);
        if (has_master) write_past(master_place, made_master, 4 * count);
    }
    if (has_weights) write_past(x.weights + from, made_weights, 2 * count);
}

/* Code of its own for each kind of state: what a loop would have to ask for every element is known when it is compiled. */
typedef void Work(const Vectors x, const Step step, int64_t begin, int64_t end);

#define WORK(name, is_narrow, has_master, has_weights, is_ahead)                                          \
    static void name(const Vectors x, const Step step, int64_t begin, int64_t end) {                      \
        for (int64_t from = begin; from < end; from += BLOCK)                                             \
            update_block(x, step, from, from + BLOCK < end ? from + BLOCK : end, is_narrow, has_master,   \
                         has_weights, is_ahead);                                                          \
        finish_writes();                                                                                  \
    }
#define WORK_AND_AHEAD(name, is_narrow, has_master, has_weights) \
    WORK(name, is_narrow, has_master, has_weights, 0)            \
    WORK(name##_ahead, is_narrow, has_master, has_weights, 1)

WORK_AND_AHEAD(narrow_with_master, 1, 1, 1)
WORK_AND_AHEAD(narrow, 1, 0, 1)
WORK_AND_AHEAD(with_master, 0, 1, 1)
WORK_AND_AHEAD(weights_alone, 0, 0, 1)
WORK_AND_AHEAD(master_alone, 0, 1, 0)

/* Threads take the next chunk when they are done with one: another program's work on a core delays one chunk, not all. */
void adamw(Vectors x, Step step, int threads, int is_narrow) {
    const int is_ahead = x.new_first != x.first;
    Work *work;
    if (is_narrow && x.master)
        work = is_ahead ? narrow_with_master_ahead : narrow_with_master;
    else if (is_narrow)
        work = is_ahead ? narrow_ahead : narrow;
    else if (!x.master)
        work = is_ahead ? weights_alone_ahead : weights_alone;
    else if (x.weights)
        work = is_ahead ? with_master_ahead : with_master;
    else
        work = is_ahead ? master_alone_ahead : master_alone;
#pragma omp parallel for schedule(dynamic) num_threads(threads)
    for (int64_t begin = 0; begin < x.count; begin += CHUNK)
        work(x, step, begin, begin + CHUNK < x.count ? begin + CHUNK : x.count);
}
