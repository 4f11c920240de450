// The scan on NVIDIA's cards, for 16-bit inputs with channels last and 16 states. What it computes, and how time is cut
// into segments, is as in kernels.py; what differs is who has what.
//
// Where nothing is summed over channels, a thread has two channels with all of their states: no sum leaves it. In
// `backward` a thread has half of the states of one channel. Sums over channels are left to the matrix units: the
// numbers that a warp's threads have of one state are one operand of a product with ones. The states of every fourth
// step, which the gradients start from, wait in shared memory, and the sums of a block take the place of its states.
//
// Defined by whoever compiles it: HALF (inputs are fp16, else bf16), LOG_RATES (A is given as the logarithm of what it
// takes away), SOFTPLUS, HAS_D, HAS_Z, HAS_BIAS and HAS_STARTS. With a place for it, `backward` writes the output again.

typedef unsigned int u32;
typedef unsigned short u16;
typedef long long i64;

#define LOG2_E 1.4426950408889634f
#define LN_2 0.6931471805599453f
#define N 16
#define BORDER 64
#define UNTRUNCATED 1.000352f  // tf32 cuts 13 bits off, half of 2^-10 times the mean of 1/mantissa, which is 0.72
#define WARPS 4  // of a block of `backward`

struct Scan {
    const u16 *u, *delta, *z, *dout;
    const void *A, *D, *bias, *B, *C;  // as they are given
    float *rates, *skips, *biases, *packed;  // as `prepare` leaves them: A for a power of two, D, the bias; B beside C
    const unsigned char *starts;
    const float *first;
    float *ends, *spans, *begins, *borders, *last, *dfirst;
    float *parts_A, *parts_D, *parts_bias, *sums;  // of each segment, and of each tile
    void *dA, *dD, *dbias, *dB, *dC;
    u16 *out, *du, *ddelta, *dz;
    i64 u_b, t_b, z_b, g_b, o_b, du_b, dt_b, dz_b, s_b, B_b, C_b, dB_b, dC_b;
    int u_l, t_l, z_l, g_l, o_l, du_l, dt_l, dz_l, s_l, B_l, C_l, dB_l, dC_l;
    int B_n, C_n, dB_n, dC_n;
    int kind_A, kind_D, kind_bias, kind_B, kind_C, kind_dB, kind_dC;  // 0: fp32, 1: bf16, 2: fp16
    int batch, channels, length, padded, segment, segments, border_count, tiles, reverse;
};

#ifndef EMULATED
__device__ __forceinline__ float exp_2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ float inverse(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ float from_bf16(u16 x) { return __uint_as_float((u32)x << 16); }

__device__ __forceinline__ float from_fp16(u16 x) {
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x));
    return y;
}

__device__ __forceinline__ u16 to_bf16(float x) {
    u16 y;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ u16 to_fp16(float x) {
    u16 y;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y) : "f"(x));
    return y;
}

// Two numbers beside each other; the first is in the lower half.
__device__ __forceinline__ u32 narrow(float first, float second) {
    u32 y;
#if HALF
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(second), "f"(first));
#else
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(second), "f"(first));
#endif
    return y;
}

// Adds up four numbers of the four threads whose lanes differ in the lower two bits, in tf32. The sums come to the
// thread of the four that `first` and `second` are for: those with ones in the columns of its own.
__device__ __forceinline__ void multiply(float sum[4], const float x[4], float first, float second) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(__float_as_uint(x[0])), "r"(__float_as_uint(x[2])), "r"(__float_as_uint(x[1])),
          "r"(__float_as_uint(x[3])), "r"(__float_as_uint(first)), "r"(__float_as_uint(second)));
}

__device__ __forceinline__ float4 fixed(const float4 *from) { return __ldg(from); }
__device__ __forceinline__ float from_lane(float x, int lane) { return __shfl_sync(0xffffffffu, x, lane); }
__device__ __forceinline__ float across(float x, int mask) { return __shfl_xor_sync(0xffffffffu, x, mask); }
#endif

__device__ __forceinline__ float widen(u16 x) { return HALF ? from_fp16(x) : from_bf16(x); }
__device__ __forceinline__ float first_of(u32 pair) { return widen((u16)(pair & 0xffffu)); }
__device__ __forceinline__ float second_of(u32 pair) {
#if HALF
    return widen((u16)(pair >> 16));
#else
    return __uint_as_float(pair & 0xffff0000u);
#endif
}

__device__ __forceinline__ float sigmoid(float x) { return inverse(1.0f + exp_2(-x * LOG2_E)); }

// As _softplus in kernels.py; `slope` is its derivative.
__device__ __forceinline__ float softplus(float x, float &slope) {
    float e = exp_2(-fabsf(x) * LOG2_E);
    float near = 0.005126102361828089f;
    near = fmaf(near, e, -0.029074065387248993f);
    near = fmaf(near, e, 0.0775160863995552f);
    near = fmaf(near, e, -0.13602247834205627f);
    near = fmaf(near, e, 0.19076880812644958f);
    near = fmaf(near, e, -0.2483539879322052f);
    near = fmaf(near, e, 0.3331812024116516f);
    near = fmaf(near, e, -0.4999944567680359f);
    near = fmaf(near, e, 0.9999999403953552f);
    slope = (x > 0.0f ? 1.0f : e) * inverse(1.0f + e);
    return fmaf(near, e, fmaxf(x, 0.0f));
}

__device__ __forceinline__ float time_step(float raw, bool inside, float &slope) {
    slope = 1.0f;
#if SOFTPLUS
    raw = softplus(raw, slope);
#endif
    return inside ? raw : 0.0f;
}

template <int count> __device__ __forceinline__ void load(float *to, const float *from) {
#pragma unroll
    for (int i = 0; i < count; i += 4) {
        float4 four = *(const float4 *)(from + i);
        to[i] = four.x, to[i + 1] = four.y, to[i + 2] = four.z, to[i + 3] = four.w;
    }
}

// The same of what no kernel that reads it writes: such loads may be moved before stores.
template <int count> __device__ __forceinline__ void load_fixed(float *to, const float *from) {
#pragma unroll
    for (int i = 0; i < count; i += 4) {
        float4 four = fixed((const float4 *)(from + i));
        to[i] = four.x, to[i + 1] = four.y, to[i + 2] = four.z, to[i + 3] = four.w;
    }
}

template <int count> __device__ __forceinline__ void store(float *to, const float *from) {
#pragma unroll
    for (int i = 0; i < count; i += 4) *(float4 *)(to + i) = make_float4(from[i], from[i + 1], from[i + 2], from[i + 3]);
}

// Where a step is; strides are in bytes, so that it takes one instruction.
__device__ __forceinline__ const u16 *step_of(const u16 *from, int stride, int t) {
    return (const u16 *)((const char *)from + (i64)t * stride);
}
__device__ __forceinline__ u16 *step_of(u16 *from, int stride, int t) {
    return (u16 *)((char *)from + (i64)t * stride);
}

// A pair of neighbouring channels at a step; zeros outside.
__device__ __forceinline__ u32 pair_at(const u16 *from, int stride, int t, int length) {
    return t >= 0 && t < length ? *(const u32 *)step_of(from, stride, t) : 0u;
}

__device__ __forceinline__ float kept_at(const unsigned char *starts, int stride, int t, int length) {
#if HAS_STARTS
    return t < length && starts[t * stride] ? 0.0f : 1.0f;
#else
    return 1.0f;
#endif
}

__device__ __forceinline__ float decay(float step, float rate, float kept) {
#if HAS_STARTS
    return exp_2(step * rate) * kept;
#else
    return exp_2(step * rate);
#endif
}

__device__ __forceinline__ float read(const void *from, i64 at, int kind) {
    if (kind == 0) return ((const float *)from)[at];
    const u16 x = ((const u16 *)from)[at];
    return kind == 1 ? from_bf16(x) : from_fp16(x);
}

__device__ __forceinline__ void write(void *to, i64 at, int kind, float x) {
    if (kind == 0) ((float *)to)[at] = x;
    else ((u16 *)to)[at] = kind == 1 ? to_bf16(x) : to_fp16(x);
}

// Rows as columns: `u` has `length` numbers in each of `channels` rows, `out` gets it the other way round.
extern "C" __global__ void __launch_bounds__(256) turn(const Scan p) {
#ifdef EMULATED
    u16 *tile = (u16 *)emulated_shared;
#else
    __shared__ u32 room[64 * 33];
    u16 *tile = (u16 *)room;
#endif
    const int x = threadIdx.x & 31, row = blockIdx.y * 64, column = blockIdx.x * 64, b = blockIdx.z;
    for (int y = threadIdx.x >> 5; y < 64; y += 8)
        if (row + y < p.channels && column + 2 * x < p.length)
            *(u32 *)(tile + y * 66 + 2 * x) = *(const u32 *)step_of(p.u + b * p.u_b + column + 2 * x, p.u_l, row + y);
    __syncthreads();
    for (int y = threadIdx.x >> 5; y < 64; y += 8)
        if (column + y < p.length && row + 2 * x < p.channels) {
            const u32 pair = tile[2 * x * 66 + y] | (u32)tile[(2 * x + 1) * 66 + y] << 16;
            *(u32 *)step_of(p.out + b * p.o_b + row + 2 * x, p.o_l, column + y) = pair;
        }
}

// What is given in any precision and order, as the other kernels read it; zeros past the last step.
extern "C" __global__ void __launch_bounds__(256) prepare(const Scan p) {
    const i64 cell = (i64)blockIdx.x * 256 + threadIdx.x;
    if (cell < p.channels * N) {
        const float rate = read(p.A, cell, p.kind_A);
        p.rates[cell] = (LOG_RATES ? -exp_2(rate * LOG2_E) : rate) * LOG2_E;
    }
    if (cell < p.channels) {
#if HAS_D
        p.skips[cell] = read(p.D, cell, p.kind_D);
#endif
#if HAS_BIAS
        p.biases[cell] = read(p.bias, cell, p.kind_bias);
#endif
    }
    if (cell < (i64)p.batch * p.padded * N) {
        const int n = cell % N, t = cell / N % p.padded, b = cell / N / p.padded;
        const bool inside = t < p.length;
        float *to = p.packed + (cell - n) * 2 + n;
        to[0] = inside ? read(p.B, b * p.B_b + (i64)t * p.B_l + n * p.B_n, p.kind_B) : 0.0f;
        to[N] = inside ? read(p.C, b * p.C_b + (i64)t * p.C_l + n * p.C_n, p.kind_C) : 0.0f;
    }
}

// --- two channels a thread ---------------------------------------------------------------------------------------------

#ifndef PAIR_BLOCKS
#define PAIR_BLOCKS 12  // that a processor should be able to run at once
#endif

struct Pair {
    int b, s, d, first, last;
    float rates[2][N], bias[2];

    __device__ __forceinline__ Pair(const Scan &p, int from = 0) {
        b = blockIdx.z, s = blockIdx.y + from, d = (blockIdx.x * blockDim.x + threadIdx.x) * 2;
        first = s * p.segment, last = min(first + p.segment, p.length);
#pragma unroll
        for (int c = 0; c < 2; c++) {
            load<N>(rates[c], p.rates + (i64)(d + c) * N);
#if HAS_BIAS
            bias[c] = p.biases[d + c];
#else
            bias[c] = 0.0f;
#endif
        }
    }
};

// Of a segment that begins with nothing: its last state, and the sum of its time steps.
extern "C" __global__ void __launch_bounds__(32, PAIR_BLOCKS) states(const Scan p) {
    Pair me(p);
    float h[2][N], total[2] = {0.0f, 0.0f};
#pragma unroll
    for (int n = 0; n < N; n++) h[0][n] = h[1][n] = 0.0f;
    const u16 *u = p.u + me.b * p.u_b + me.d, *delta = p.delta + me.b * p.t_b + me.d;
    const float *packed = p.packed + (i64)me.b * p.padded * 2 * N;
    const unsigned char *starts = p.starts + me.b * p.s_b;
    u32 next_x[4], next_raw[4];
#pragma unroll
    for (int k = 0; k < 4; k++) {
        next_x[k] = pair_at(u, p.u_l, me.first + k, p.length);
        next_raw[k] = pair_at(delta, p.t_l, me.first + k, p.length);
    }
    for (int t = me.first; t < me.last; t += 4) {
        u32 x[4], raw[4];
#pragma unroll
        for (int k = 0; k < 4; k++) {
            x[k] = next_x[k], raw[k] = next_raw[k];
            next_x[k] = pair_at(u, p.u_l, t + 4 + k, p.length);
            next_raw[k] = pair_at(delta, p.t_l, t + 4 + k, p.length);
        }
#pragma unroll
        for (int k = 0; k < 4; k++) {
            float slope, into[N], kept = kept_at(starts, p.s_l, t + k, p.length);
            bool inside = t + k < p.length;
            float step0 = time_step(first_of(raw[k]) + me.bias[0], inside, slope);
            float step1 = time_step(second_of(raw[k]) + me.bias[1], inside, slope);
            float driven0 = step0 * first_of(x[k]), driven1 = step1 * second_of(x[k]);
            load_fixed<N>(into, packed + (t + k) * 2 * N);
            total[0] += step0, total[1] += step1;
#if HAS_STARTS
            if (kept == 0.0f) total[0] = total[1] = __int_as_float(0x7f800000);
#endif
#pragma unroll
            for (int n = 0; n < N; n++) {
                h[0][n] = fmaf(decay(step0, me.rates[0][n], kept), h[0][n], driven0 * into[n]);
                h[1][n] = fmaf(decay(step1, me.rates[1][n], kept), h[1][n], driven1 * into[n]);
            }
        }
    }
    i64 place = ((i64)me.b * p.segments + me.s) * p.channels + me.d;
    store<N>(p.ends + place * N, h[0]);
    store<N>(p.ends + (place + 1) * N, h[1]);
    *(float2 *)(p.spans + place) = make_float2(total[0], total[1]);
}

// Outputs of a segment, the states at its borders, and of the last one the state after it.
extern "C" __global__ void __launch_bounds__(32, PAIR_BLOCKS) forward(const Scan p) {
    Pair me(p);
    float h[2][N], skip[2] = {0.0f, 0.0f};
    i64 place = ((i64)me.b * p.segments + me.s) * p.channels + me.d;
    load<N>(h[0], p.begins + place * N);
    load<N>(h[1], p.begins + (place + 1) * N);
#if HAS_D
    skip[0] = p.skips[me.d], skip[1] = p.skips[me.d + 1];
#endif
    const u16 *u = p.u + me.b * p.u_b + me.d, *delta = p.delta + me.b * p.t_b + me.d;
    const u16 *z = p.z + me.b * p.z_b + me.d;
    const float *packed = p.packed + (i64)me.b * p.padded * 2 * N;
    const unsigned char *starts = p.starts + me.b * p.s_b;
    u16 *out = p.out + me.b * p.o_b + me.d;
    float *borders = p.borders + ((i64)me.b * p.border_count * p.channels + me.d) * N;
    u32 next_x[4], next_raw[4], next_gate[4];
#pragma unroll
    for (int k = 0; k < 4; k++) {
        next_x[k] = pair_at(u, p.u_l, me.first + k, p.length);
        next_raw[k] = pair_at(delta, p.t_l, me.first + k, p.length);
        next_gate[k] = HAS_Z ? pair_at(z, p.z_l, me.first + k, p.length) : 0u;
    }
    for (int t = me.first; t < me.last; t += 4) {
        if (t % BORDER == 0) {
            float *to = borders + (i64)(t / BORDER) * p.channels * N;
            store<N>(to, h[0]);
            store<N>(to + N, h[1]);
        }
        u32 x[4], raw[4], gate[4], result[4];
#pragma unroll
        for (int k = 0; k < 4; k++) {
            x[k] = next_x[k], raw[k] = next_raw[k], gate[k] = next_gate[k];
            next_x[k] = pair_at(u, p.u_l, t + 4 + k, p.length);
            next_raw[k] = pair_at(delta, p.t_l, t + 4 + k, p.length);
            next_gate[k] = HAS_Z ? pair_at(z, p.z_l, t + 4 + k, p.length) : 0u;
        }
#pragma unroll
        for (int k = 0; k < 4; k++) {
            float slope, into[N], outof[N], kept = kept_at(starts, p.s_l, t + k, p.length);
            bool inside = t + k < p.length;
            float x0 = first_of(x[k]), x1 = second_of(x[k]);
            float step0 = time_step(first_of(raw[k]) + me.bias[0], inside, slope);
            float step1 = time_step(second_of(raw[k]) + me.bias[1], inside, slope);
            float driven0 = step0 * x0, driven1 = step1 * x1, y0 = skip[0] * x0, y1 = skip[1] * x1;
            load_fixed<N>(into, packed + (t + k) * 2 * N);
            load_fixed<N>(outof, packed + (t + k) * 2 * N + N);
#pragma unroll
            for (int n = 0; n < N; n++) {
                h[0][n] = fmaf(decay(step0, me.rates[0][n], kept), h[0][n], driven0 * into[n]);
                h[1][n] = fmaf(decay(step1, me.rates[1][n], kept), h[1][n], driven1 * into[n]);
                y0 = fmaf(h[0][n], outof[n], y0), y1 = fmaf(h[1][n], outof[n], y1);
            }
#if HAS_Z
            float gate0 = first_of(gate[k]), gate1 = second_of(gate[k]);
            y0 *= gate0 * sigmoid(gate0), y1 *= gate1 * sigmoid(gate1);
#endif
            result[k] = narrow(y0, y1);
        }
#pragma unroll
        for (int k = 0; k < 4; k++)
            if (t + k < p.length) *(u32 *)step_of(out, p.o_l, t + k) = result[k];
    }
    if (me.last == p.length) {
        float *to = p.last + ((i64)me.b * p.channels + me.d) * N;
        store<N>(to, h[0]);
        store<N>(to + N, h[1]);
    }
}

// The mirror of `states`: what a segment wants of the state before it, if later ones want nothing.
extern "C" __global__ void __launch_bounds__(32, PAIR_BLOCKS) wanted(const Scan p) {
    Pair me(p, 1);  // nobody asks what the first one wants
    float carry[2][N], total[2] = {0.0f, 0.0f};
#pragma unroll
    for (int n = 0; n < N; n++) carry[0][n] = carry[1][n] = 0.0f;
    const u16 *delta = p.delta + me.b * p.t_b + me.d, *z = p.z + me.b * p.z_b + me.d;
    const u16 *dout = p.dout + me.b * p.g_b + me.d;
    const float *packed = p.packed + (i64)me.b * p.padded * 2 * N + N;
    const unsigned char *starts = p.starts + me.b * p.s_b;
    int end = me.first + (me.last - me.first + 3) / 4 * 4 - 4;
    u32 next_dy[4], next_raw[4], next_gate[4];
#pragma unroll
    for (int k = 0; k < 4; k++) {
        next_dy[k] = pair_at(dout, p.g_l, end + k, p.length);
        next_raw[k] = pair_at(delta, p.t_l, end + k, p.length);
        next_gate[k] = HAS_Z ? pair_at(z, p.z_l, end + k, p.length) : 0u;
    }
    for (int t = end; t >= me.first; t -= 4) {
        u32 dy[4], raw[4], gate[4];
#pragma unroll
        for (int k = 0; k < 4; k++) {
            dy[k] = next_dy[k], raw[k] = next_raw[k], gate[k] = next_gate[k];
            next_dy[k] = pair_at(dout, p.g_l, t - 4 + k, p.length);
            next_raw[k] = pair_at(delta, p.t_l, t - 4 + k, p.length);
            next_gate[k] = HAS_Z ? pair_at(z, p.z_l, t - 4 + k, p.length) : 0u;
        }
#pragma unroll
        for (int k = 3; k >= 0; k--) {
            float slope, outof[N], kept = kept_at(starts, p.s_l, t + k, p.length);
            bool inside = t + k < p.length;
            float step0 = time_step(first_of(raw[k]) + me.bias[0], inside, slope);
            float step1 = time_step(second_of(raw[k]) + me.bias[1], inside, slope);
            float dy0 = first_of(dy[k]), dy1 = second_of(dy[k]);
#if HAS_Z
            float gate0 = first_of(gate[k]), gate1 = second_of(gate[k]);
            dy0 *= gate0 * sigmoid(gate0), dy1 *= gate1 * sigmoid(gate1);
#endif
            load_fixed<N>(outof, packed + (t + k) * 2 * N);
            total[0] += step0, total[1] += step1;
#if HAS_STARTS
            if (kept == 0.0f) total[0] = total[1] = __int_as_float(0x7f800000);
#endif
#pragma unroll
            for (int n = 0; n < N; n++) {
                carry[0][n] = decay(step0, me.rates[0][n], kept) * fmaf(dy0, outof[n], carry[0][n]);
                carry[1][n] = decay(step1, me.rates[1][n], kept) * fmaf(dy1, outof[n], carry[1][n]);
            }
        }
    }
    i64 place = ((i64)me.b * p.segments + me.s) * p.channels + me.d;
    store<N>(p.ends + place * N, carry[0]);
    store<N>(p.ends + (place + 1) * N, carry[1]);
    *(float2 *)(p.spans + place) = make_float2(total[0], total[1]);
}

// From what each segment adds, what each begins with; `reverse`: from the last segment to the first. A thread has four
// states of a channel.
extern "C" __global__ void __launch_bounds__(128) combine(const Scan p) {
    const int cell = (blockIdx.x * 128 + threadIdx.x) * 4, b = blockIdx.y, d = cell / N;
    if (d >= p.channels) return;
    float rates[4], h[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    load<4>(rates, p.rates + cell);
    if (p.first) load<4>(h, p.first + (i64)b * p.channels * N + cell);
#pragma unroll 8
    for (int k = 0; k < p.segments; k++) {
        const int s = p.reverse ? p.segments - 1 - k : k;
        const i64 place = ((i64)b * p.segments + s) * p.channels;
        float added[4] = {0.0f, 0.0f, 0.0f, 0.0f}, span = 0.0f;
        if (k < p.segments - 1) {
            load<4>(added, p.ends + place * N + cell);
            span = p.spans[place + d];
        }
        store<4>(p.begins + place * N + cell, h);
#pragma unroll
        for (int n = 0; n < 4; n++) {
            float left = span == __int_as_float(0x7f800000) ? 0.0f : exp_2(span * rates[n]);
            h[n] = fmaf(left, h[n], added[n]);
        }
    }
}

// --- all gradients -----------------------------------------------------------------------------------------------------

__device__ __forceinline__ u16 one_at(const u16 *from, int stride, int t, int length) {
    return t >= 0 && t < length ? *step_of(from, stride, t) : (u16)0;
}

// Of two numbers for each of four steps, of which the lower half of a warp has the first two steps', all.
__device__ __forceinline__ void exchange(float all[4], float mine0, float mine1, int lane) {
    all[0] = from_lane(mine0, lane & 15), all[1] = from_lane(mine1, lane & 15);
    all[2] = from_lane(mine0, lane | 16), all[3] = from_lane(mine1, lane | 16);
}

// Sums over the two halves of a channel's states: of four steps' parts, those of the two that are mine.
__device__ __forceinline__ void gather(float mine[2], const float parts[4], int half) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
        float keep = half ? parts[2 + i] : parts[i], give = half ? parts[i] : parts[2 + i];
        mine[i] = keep + across(give, 16);
    }
}

// Of four numbers, each to be added up over the threads whose lanes differ in bits 2 and 3, the one that these bits name.
__device__ __forceinline__ float scatter(const float sum[4], int lane) {
    const bool upper = lane & 4, odd = lane & 8;
    float keep0 = upper ? sum[2] : sum[0], keep1 = upper ? sum[3] : sum[1];
    keep0 += across(upper ? sum[0] : sum[2], 4), keep1 += across(upper ? sum[1] : sum[3], 4);
    return (odd ? keep1 : keep0) + across(odd ? keep0 : keep1, 8);
}

#ifndef BLOCKS
#define BLOCKS 3
#endif
#define HALF_N 8
extern "C" __global__ void __launch_bounds__(WARPS * 32, BLOCKS) backward(const Scan p) {
#ifdef EMULATED
    float *shared = emulated_shared;
#else
    extern __shared__ float shared[];
#endif
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, half = lane >> 4, mine = half * 2;
    const int tile = blockIdx.x, s = blockIdx.y, b = blockIdx.z;
    const int d = tile * WARPS * 16 + warp * 16 + (lane & 15);
    float *slots = shared + warp * (BORDER / 4) * 16 * N;
    float rates[HALF_N], carry[HALF_N], grad_A[HALF_N], bias = 0.0f, skip = 0.0f, grad_D = 0.0f, grad_bias = 0.0f;
    load<HALF_N>(rates, p.rates + (i64)d * N + half * HALF_N);
    const i64 here = ((i64)b * p.segments + s) * p.channels + d;
    load<HALF_N>(carry, p.begins + here * N + half * HALF_N);
    float ones[HALF_N];  // of the operand whose columns say which thread of four gets a sum
    // Where a sum goes: that of C to the lower two of four threads, of B to the others.
    const int place = (lane & 2 ? 0 : N) + half * HALF_N + (lane & 1) * 4 + (lane & 4) / 2 + (lane & 8) / 8;
#pragma unroll
    for (int n = 0; n < HALF_N; n++) {
        grad_A[n] = 0.0f;
        ones[n] = lane >> 2 == n ? 1.0f : 0.0f;
    }
#if HAS_BIAS
    bias = p.biases[d];
#endif
#if HAS_D
    skip = p.skips[d];
#endif
    const u16 *u = p.u + b * p.u_b + d, *delta = p.delta + b * p.t_b + d, *z = p.z + b * p.z_b + d;
    const u16 *dout = p.dout + b * p.g_b + d;
    u16 *du = p.du + b * p.du_b + d, *ddelta = p.ddelta + b * p.dt_b + d, *dz = p.dz + b * p.dz_b + d;
    u16 *out = p.out + b * p.o_b + d;
    const float *packed = p.packed + (i64)b * p.padded * 2 * N + half * HALF_N;
    const unsigned char *starts = p.starts + b * p.s_b;
    const float *borders = p.borders + ((i64)b * p.border_count * p.channels + d) * N + half * HALF_N;
    float *sums = p.sums + ((i64)tile * p.batch + b) * p.padded * 2 * N;
    const int first = s * p.segment, last = min(first + p.segment, p.length);

    for (int border = first + (last - first - 1) / BORDER * BORDER; border >= first; border -= BORDER) {
        const int blocks = (min(border + BORDER, last) - border + 3) / 4;
        float h[HALF_N];
        load<HALF_N>(h, borders + (i64)(border / BORDER) * p.channels * N);
        u16 next_x[2], next_raw[2];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            next_x[i] = one_at(u, p.u_l, border + mine + i, p.length);
            next_raw[i] = one_at(delta, p.t_l, border + mine + i, p.length);
        }
        for (int block = 0;; block++) {
            const int t = border + block * 4;
            float *slot = slots + block * 16 * N + lane * 4;
            *(float4 *)slot = make_float4(h[0], h[1], h[2], h[3]);
            *(float4 *)(slot + 128) = make_float4(h[4], h[5], h[6], h[7]);
            if (block == blocks - 1) break;
            float step[2], driven[2], steps[4], drives[4], slope;
#pragma unroll
            for (int i = 0; i < 2; i++) {
                step[i] = time_step(widen(next_raw[i]) + bias, t + mine + i < p.length, slope);
                driven[i] = step[i] * widen(next_x[i]);
                next_x[i] = one_at(u, p.u_l, t + 4 + mine + i, p.length);
                next_raw[i] = one_at(delta, p.t_l, t + 4 + mine + i, p.length);
            }
            exchange(steps, step[0], step[1], lane);
            exchange(drives, driven[0], driven[1], lane);
#pragma unroll
            for (int k = 0; k < 4; k++) {
                float into[HALF_N], kept = kept_at(starts, p.s_l, t + k, p.length);
                load_fixed<HALF_N>(into, packed + (t + k) * 2 * N);
#pragma unroll
                for (int n = 0; n < HALF_N; n++)
                    h[n] = fmaf(decay(steps[k], rates[n], kept), h[n], drives[k] * into[n]);
            }
        }
        u16 next_dy[2], next_gate[2];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int at = border + (blocks - 1) * 4 + mine + i;
            next_x[i] = one_at(u, p.u_l, at, p.length);
            next_raw[i] = one_at(delta, p.t_l, at, p.length);
            next_dy[i] = one_at(dout, p.g_l, at, p.length);
            next_gate[i] = HAS_Z ? one_at(z, p.z_l, at, p.length) : (u16)0;
        }
        for (int block = blocks - 1; block >= 0; block--) {
            const int t = border + block * 4;
            float *slot = slots + block * 16 * N;
            float states[4][HALF_N], left[4][HALF_N];
            load<4>(states[0], slot + lane * 4);
            load<4>(states[0] + 4, slot + 128 + lane * 4);
            float x[2], dy[2], gate[2], share[2], gated[2], step[2], slope[2], steps[4], drives[4], gates[4];
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const int at = t + mine + i;
                x[i] = widen(next_x[i]), dy[i] = widen(next_dy[i]), gate[i] = widen(next_gate[i]);
                step[i] = time_step(widen(next_raw[i]) + bias, at < p.length, slope[i]);
                next_x[i] = one_at(u, p.u_l, at - 4, p.length);
                next_raw[i] = one_at(delta, p.t_l, at - 4, p.length);
                next_dy[i] = one_at(dout, p.g_l, at - 4, p.length);
                next_gate[i] = HAS_Z ? one_at(z, p.z_l, at - 4, p.length) : (u16)0;
#if HAS_Z
                share[i] = sigmoid(gate[i]);
                gated[i] = dy[i] * gate[i] * share[i];
#else
                gated[i] = dy[i];
#endif
            }
            exchange(steps, step[0], step[1], lane);
            exchange(drives, step[0] * x[0], step[1] * x[1], lane);
            exchange(gates, gated[0], gated[1], lane);
            float y[4], by_input[4], by_rate[4], sum[4][4];
#pragma unroll
            for (int k = 0; k < 4; k++) {
                float into[HALF_N], outof[HALF_N], kept = kept_at(starts, p.s_l, t + k, p.length), after[HALF_N];
                load_fixed<HALF_N>(into, packed + (t + k) * 2 * N);
                load_fixed<HALF_N>(outof, packed + (t + k) * 2 * N + N);
                y[k] = 0.0f;
#pragma unroll
                for (int n = 0; n < HALF_N; n++) {
                    left[k][n] = decay(steps[k], rates[n], kept);
                    after[n] = fmaf(left[k][n], states[k][n], drives[k] * into[n]);
                    y[k] = fmaf(after[n], outof[n], y[k]);
                    if (k < 3) states[k + 1][n] = after[n];
                    after[n] *= gates[k];
                }
                sum[k][0] = sum[k][1] = sum[k][2] = sum[k][3] = 0.0f;
                multiply(sum[k], after, ones[0], ones[1]);
                multiply(sum[k], after + 4, ones[2], ones[3]);
            }
#pragma unroll
            for (int k = 3; k >= 0; k--) {
                float into[HALF_N], outof[HALF_N];
                load_fixed<HALF_N>(into, packed + (t + k) * 2 * N);
                load_fixed<HALF_N>(outof, packed + (t + k) * 2 * N + N);
                by_input[k] = by_rate[k] = 0.0f;
#pragma unroll
                for (int n = 0; n < HALF_N; n++) {
                    float wants = fmaf(gates[k], outof[n], carry[n]);
                    by_input[k] = fmaf(wants, into[n], by_input[k]);
                    carry[n] = left[k][n] * wants;
                    float exponent = carry[n] * states[k][n];
                    grad_A[n] = fmaf(exponent, steps[k], grad_A[n]);
                    by_rate[k] = fmaf(exponent, rates[n], by_rate[k]);
                    outof[n] = wants * drives[k];
                }
                multiply(sum[k], outof, ones[4], ones[5]);
                multiply(sum[k], outof + 4, ones[6], ones[7]);
                slot[k * 2 * N + place] = scatter(sum[k], lane);
            }
            float outs[2], inputs[2], exponents[2];
            gather(outs, y, half);
            gather(inputs, by_input, half);
            gather(exponents, by_rate, half);
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const int at = t + mine + i;
                float grad_step = (exponents[i] * LN_2 + inputs[i] * x[i]) * slope[i];
                float grad_u = fmaf(inputs[i], step[i], skip * gated[i]), result = fmaf(skip, x[i], outs[i]);
                if (at < p.length) {
                    grad_bias += grad_step, grad_D = fmaf(gated[i], x[i], grad_D);
                    u32 pair = narrow(grad_u, grad_step);
                    *step_of(du, p.du_l, at) = (u16)(pair & 0xffffu);
                    *step_of(ddelta, p.dt_l, at) = (u16)(pair >> 16);
#if HAS_Z
                    float grad_z = dy[i] * result * share[i] * (1.0f + gate[i] * (1.0f - share[i]));
                    pair = narrow(grad_z, result * gate[i] * share[i]);
                    *step_of(dz, p.dz_l, at) = (u16)(pair & 0xffffu);
                    if (p.out) *step_of(out, p.o_l, at) = (u16)(pair >> 16);
#else
                    if (p.out) *step_of(out, p.o_l, at) = (u16)(narrow(result, result) & 0xffffu);
#endif
                }
            }
        }
        __syncthreads();
        for (int i = threadIdx.x; i < blocks * 32; i += WARPS * 32) {
            float *from = shared + (i >> 5) * 16 * N + (i & 31) * 4;
            float4 total = *(float4 *)from;
#pragma unroll
            for (int other = 1; other < WARPS; other++) {
                float4 more = *(float4 *)(from + other * (BORDER / 4) * 16 * N);
                total.x += more.x, total.y += more.y, total.z += more.z, total.w += more.w;
            }
            *(float4 *)(sums + (i64)border * 2 * N + i * 4) = total;
        }
        __syncthreads();
    }
    store<HALF_N>(p.parts_A + here * N + half * HALF_N, grad_A);
    grad_D += across(grad_D, 16), grad_bias += across(grad_bias, 16);
    if (half == 0) p.parts_D[here] = grad_D, p.parts_bias[here] = grad_bias;
    if (s == 0 && p.dfirst) store<HALF_N>(p.dfirst + ((i64)b * p.channels + d) * N + half * HALF_N, carry);
}

// Sums over segments and over tiles, in a fixed order; those of the parameters as these are kept.
extern "C" __global__ void __launch_bounds__(256) finish(const Scan p) {
    const i64 cell = (i64)blockIdx.x * 256 + threadIdx.x;
    const int parts = p.batch * p.segments;
    if (blockIdx.y == 0) {
        if (cell < p.channels * N) {
            float total = 0.0f;
#pragma unroll 8
            for (int part = 0; part < parts; part++) total += p.parts_A[(i64)part * p.channels * N + cell];
            write(p.dA, cell, p.kind_A, LOG_RATES ? total * p.rates[cell] * LN_2 : total);
        }
        if (cell < p.channels) {
            float of_D = 0.0f, of_bias = 0.0f;
#pragma unroll 8
            for (int part = 0; part < parts; part++) {
                of_D += p.parts_D[(i64)part * p.channels + cell];
                of_bias += p.parts_bias[(i64)part * p.channels + cell];
            }
            if (HAS_D) write(p.dD, cell, p.kind_D, of_D);
            if (HAS_BIAS) write(p.dbias, cell, p.kind_bias, of_bias);
        }
    } else if (cell < (i64)p.batch * p.padded * 2 * N) {
        const int n = cell % N, which = cell / N % 2, t = cell / (2 * N) % p.padded, b = cell / (2 * N) / p.padded;
        float total = 0.0f;
        const i64 tile = (i64)p.batch * p.padded * 2 * N;
#pragma unroll 8
        for (int part = 0; part < p.tiles; part++) total += p.sums[part * tile + cell];
        if (t >= p.length) return;
        total *= UNTRUNCATED;
        if (which) write(p.dC, b * p.dC_b + (i64)t * p.dC_l + n * p.dC_n, p.kind_dC, total);
        else write(p.dB, b * p.dB_b + (i64)t * p.dB_l + n * p.dB_n, p.kind_dB, total);
    }
}
