// scan.cu without a GPU: every thread of a block is a fiber, and whatever looks at other threads lets all of them come
// to the same place first. Built and called by emulated.py.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <ucontext.h>
#include <vector>
using std::min;

#define EMULATED
#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
struct float2 { float x, y; };
struct float4 { float x, y, z, w; };
struct Place { int x, y, z; };
static inline float2 make_float2(float x, float y) { return {x, y}; }
static inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

static Place blockIdx, blockDim, threadIdx;
static float *emulated_shared;
static const int STACK = 256 << 10;
struct Fiber {
    ucontext_t context;
    std::vector<char> stack;
    int turn;
    bool done;
};
static std::vector<Fiber> fibers;
static ucontext_t scheduler;
static int current;
static float deposits[2][1024][8];

static void meet() { swapcontext(&fibers[current].context, &scheduler); }
static void __syncthreads() { meet(); }
static float (*deposit(const float *values, int count))[8] {
    float(*board)[8] = deposits[fibers[current].turn++ & 1];
    std::memcpy(board[current], values, count * sizeof(float));
    meet();
    return board;
}

typedef unsigned int u32;
typedef unsigned short u16;
static float __uint_as_float(u32 x) { float y; std::memcpy(&y, &x, 4); return y; }
static u32 __float_as_uint(float x) { u32 y; std::memcpy(&y, &x, 4); return y; }
static float __int_as_float(int x) { return __uint_as_float((u32)x); }
static float exp_2(float x) { return exp2f(x); }
static float inverse(float x) { return 1.0f / x; }
static float from_bf16(u16 x) { return __uint_as_float((u32)x << 16); }
static u16 to_bf16(float x) { u32 y = __float_as_uint(x); return (u16)((y + 0x7fffu + (y >> 16 & 1u)) >> 16); }
static float from_fp16(u16 x) {
    float y = ldexpf(x & 0x3ff, -24);
    if (x & 0x7c00) y = ldexpf(1024 + (x & 0x3ff), (x >> 10 & 31) - 25);
    return x & 0x8000 ? -y : y;
}
static u16 to_fp16(float x) {  // no infinities
    int exponent;
    frexpf(x, &exponent);
    exponent = x == 0.0f ? -13 : std::max(exponent, -13);
    int digits = (int)nearbyintf(ldexpf(fabsf(x), 11 - exponent));
    return (u16)((x < 0 ? 0x8000 : 0) + ((exponent + 13) << 10) + digits);
}
static u32 narrow(float first, float second) {
    return HALF ? to_fp16(first) | (u32)to_fp16(second) << 16 : to_bf16(first) | (u32)to_bf16(second) << 16;
}
static float4 fixed(const float4 *from) { return *from; }
static float from_lane(float x, int lane) { return deposit(&x, 1)[(current & ~31) + lane][0]; }
static float across(float x, int mask) { return deposit(&x, 1)[current ^ mask][0]; }
static float tf32(float x) { return __uint_as_float(__float_as_uint(x) & 0xffffe000u); }
static void multiply(float sum[4], const float x[4], float first, float second) {
    // a[row][k] and b[k][column], as the instruction takes them from the lanes
    float mine[6] = {x[0], x[2], x[1], x[3], first, second};
    float(*board)[8] = deposit(mine, 6) + (current & ~31);
    int lane = current & 31;
    for (int c = 0; c < 4; c++) {
        int row = lane / 4 + (c / 2) * 8, column = lane % 4 * 2 + c % 2;
        for (int k = 0; k < 8; k++) {
            float a = board[row % 8 * 4 + k % 4][row / 8 + k / 4 * 2], b = board[column * 4 + k % 4][4 + k / 4];
            sum[c] += tf32(a) * tf32(b);
        }
    }
}

#include "scan.cu"

typedef void (*Kernel)(const Scan);
static Kernel kernel;
static const Scan *given;
static void enter() {
    kernel(*given);
    fibers[current].done = true;
    for (;;) meet();
}

extern "C" int run(const char *name, int x, int y, int z, int threads, int shared, const Scan *scan) {
    kernel = !strcmp(name, "states") ? states : !strcmp(name, "forward") ? forward : !strcmp(name, "wanted") ? wanted
           : !strcmp(name, "combine") ? combine : !strcmp(name, "backward") ? backward
           : !strcmp(name, "prepare") ? prepare : !strcmp(name, "finish") ? finish
           : !strcmp(name, "turn") ? turn : nullptr;
    if (!kernel) return 1;
    given = scan;
    std::vector<float> room(std::max<size_t>(shared, 16 << 10) / sizeof(float));
    emulated_shared = room.data();
    blockDim = {threads, 1, 1};
    fibers.resize(threads);
    for (int b = 0; b < x * y * z; b++) {
        blockIdx = {b % x, b / x % y, b / x / y};
        std::fill(room.begin(), room.end(), NAN);
        for (Fiber &fiber : fibers) {
            fiber.stack.resize(STACK), fiber.turn = 0, fiber.done = false;
            getcontext(&fiber.context);
            fiber.context.uc_stack.ss_sp = fiber.stack.data(), fiber.context.uc_stack.ss_size = STACK;
            makecontext(&fiber.context, enter, 0);
        }
        for (bool left = true; left;) {
            left = false;
            for (current = 0; current < threads; current++) {
                threadIdx = {current, 0, 0};
                if (fibers[current].done) continue;
                swapcontext(&scheduler, &fibers[current].context);
                left = left || !fibers[current].done;
            }
        }
    }
    return 0;
}
