// Kernels that exercise the runtime: they keep a stream busy, leave patterns behind, and tell whether a pattern is intact.
// The host and the simulated device compute the same numbers: xlog_kernels::exercise, which says what each one does.
//
// scripts/build-kernels makes exercise.ptx from this file.

typedef unsigned int u32;
typedef unsigned long long u64;

static __device__ u32 word(u32 salt, u32 at) {
    u32 x = at * 0x9e3779b9u + salt;
    x ^= x >> 16;
    x *= 0x85ebca6bu;
    x ^= x >> 13;
    x *= 0xc2b2ae35u;
    return x ^ (x >> 16);
}

static __device__ u64 first() {
    return (u64)blockIdx.x * blockDim.x + threadIdx.x;
}

static __device__ u64 stride() {
    return (u64)gridDim.x * blockDim.x;
}

extern "C" __global__ void spin(u64 ticks, u32 *out, u32 value) {
    if (first() != 0) {
        return;
    }
    u64 start = clock64();
    while (clock64() - start < ticks) {
    }
    *out = value;
}

extern "C" __global__ void fill_pattern(u32 *out, u64 rows, u32 salt) {
    for (u64 at = first(); at < rows; at += stride()) {
        out[at] = word(salt, (u32)at);
    }
}

extern "C" __global__ void check_pattern(const u32 *data, u64 rows, u32 salt, u32 *wrong) {
    u32 found = 0;
    for (u64 at = first(); at < rows; at += stride()) {
        found += data[at] != word(salt, (u32)at);
    }
    if (found != 0) {
        atomicAdd(wrong, found);
    }
}

extern "C" __global__ void mix(u32 *out, const u32 *left, const u32 *right, u64 rows) {
    for (u64 at = first(); at < rows; at += stride()) {
        u32 turned = (left[at] << 5) | (left[at] >> 27);
        out[at] = turned + right[at] * 2654435761u;
    }
}

extern "C" __global__ void fold(const u32 *data, u64 rows, u64 *sum) {
    u64 part = 0;
    for (u64 at = first(); at < rows; at += stride()) {
        part += data[at] * (2 * at + 1);
    }
    for (int lane = 16; lane > 0; lane /= 2) {
        part += __shfl_down_sync(0xffffffffu, part, lane);
    }
    if (threadIdx.x % 32 == 0) {
        atomicAdd(sum, part);
    }
}
