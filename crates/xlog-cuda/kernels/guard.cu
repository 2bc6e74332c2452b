// Looks at a guarded block: are the bytes around it, and in it where it was freed, still those that the guard put there?
// xlog_cuda::device_runtime::debug_guard queues it; the simulated device computes the same there.
//
// scripts/build-kernels makes guard.ptx from this file.

typedef unsigned char u8;
typedef unsigned int u32;
typedef unsigned long long u64;

// What was found of one kind of byte. All zero is: nothing.
struct Finding {
    // The complement of the lowest offset, so that the lowest has the largest.
    u64 first_inverted;
    u64 count;
    u8 found[16];
};

// Zero before the launch.
struct Slot {
    Finding around;
    Finding inside;
    u32 blocks_done;
};

static __device__ void note(Finding *finding, u64 first_inverted, u64 count) {
    if (count != 0) {
        atomicMax(&finding->first_inverted, first_inverted);
        atomicAdd(&finding->count, count);
    }
}

static __device__ void copy_found(Finding *finding, const u8 *base, u64 end) {
    if (finding->count == 0) {
        return;
    }
    u64 at = ~finding->first_inverted;
    for (u32 n = 0; n < 16 && at + n < end; n++) {
        finding->found[n] = base[at + n];
    }
}

extern "C" __global__ void guard_check(const u8 *base, u64 front, u64 bytes, u64 back, u32 around, u32 inside,
                                       u32 looks_inside, Slot *slot) {
    u64 end = front + bytes + back;
    u64 looked_at = looks_inside ? end : front + back;
    u64 step = (u64)gridDim.x * blockDim.x;
    u64 first_around = 0, first_inside = 0, count_around = 0, count_inside = 0;
    for (u64 n = (u64)blockIdx.x * blockDim.x + threadIdx.x; n < looked_at; n += step) {
        u64 at = looks_inside || n < front ? n : n + bytes;
        bool is_inside = at >= front && at - front < bytes;
        if (base[at] == (u8)(is_inside ? inside : around)) {
            continue;
        }
        // A thread goes upwards, so what it meets first is its lowest.
        if (is_inside) {
            first_inside = count_inside == 0 ? ~at : first_inside;
            count_inside++;
        } else {
            first_around = count_around == 0 ? ~at : first_around;
            count_around++;
        }
    }
    note(&slot->around, first_around, count_around);
    note(&slot->inside, first_inside, count_inside);
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0 && atomicAdd(&slot->blocks_done, 1) == gridDim.x - 1) {
        __threadfence();
        copy_found(&slot->around, base, end);
        copy_found(&slot->inside, base, end);
    }
}
