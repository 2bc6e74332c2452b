// Kernels of the relational workloads: hash join, transitive closure, radix sort. What each one does is said where it is declared:
// xlog_workloads::relational::kernels, which also has the twins for the simulated device.
//
// Loops over rows step by the size of the grid, loops over tiles by its number of blocks, so any grid is right. Neighbouring threads
// take neighbouring rows. Where a thread has to look at random places it asks for several of them before it waits for the first.
//
// scripts/build-kernels makes relational.ptx from this file.

typedef unsigned int u32;
typedef unsigned long long u64;

// Threads of a block; every kernel here is launched with as many.
#define THREADS 256
#define WARPS (THREADS / 32)
// Rows that a thread takes of a tile, and rows of a tile.
#define EACH 4
#define TILE (THREADS * EACH)
// The same for the sort.
#define SORT_EACH 16
#define SORT_TILE (THREADS * SORT_EACH)
#define DIGITS 256
#define EMPTY (~0ull)
#define WHOLE_WARP 0xffffffffu

static __device__ __forceinline__ u64 first() {
    return (u64)blockIdx.x * blockDim.x + threadIdx.x;
}

static __device__ __forceinline__ u64 stride() {
    return (u64)gridDim.x * blockDim.x;
}

static __device__ __forceinline__ u64 mix(u64 x) {
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
    return x ^ (x >> 31);
}

static __device__ __forceinline__ u64 number(u64 seed, u64 row) {
    return mix(seed + (row + 1) * 0x9e3779b97f4a7c15ull);
}

// The sum of all threads of the block, in every thread. All threads of the block call it.
static __device__ __forceinline__ u64 block_sum(u64 value) {
    __shared__ u64 parts[WARPS];
    for (int lane = 16; lane > 0; lane /= 2) {
        value += __shfl_down_sync(WHOLE_WARP, value, lane);
    }
    __syncthreads();
    if (threadIdx.x % 32 == 0) {
        parts[threadIdx.x / 32] = value;
    }
    __syncthreads();
    u64 sum = 0;
    for (int warp = 0; warp < WARPS; warp++) {
        sum += parts[warp];
    }
    return sum;
}

// The sum of all threads before this one; `total` becomes the sum of all. All threads of the block call it.
template <typename T> static __device__ __forceinline__ T block_before(T value, T *total) {
    __shared__ T parts[WARPS];
    u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    T sum = value;
    for (u32 step = 1; step < 32; step *= 2) {
        T other = __shfl_up_sync(WHOLE_WARP, sum, step);
        if (lane >= step) {
            sum += other;
        }
    }
    __syncthreads();
    if (lane == 31) {
        parts[warp] = sum;
    }
    __syncthreads();
    T before = 0, all = 0;
    for (u32 other = 0; other < WARPS; other++) {
        before += other < warp ? parts[other] : (T)0;
        all += parts[other];
    }
    *total = all;
    return before + sum - value;
}

// Tables -----------------------------------------------------------------------------------------------------------------------

extern "C" __global__ void generate_keys(u32 *out, u64 rows, u64 seed, u32 domain) {
    for (u64 row = first(); row < rows; row += stride()) {
        out[row] = (u32)((number(seed, row) >> 32) * domain >> 32);
    }
}

extern "C" __global__ void generate_edges(u64 *out, u64 rows, u64 seed, u32 vertices) {
    for (u64 row = first(); row < rows; row += stride()) {
        u64 both = number(seed, row);
        u64 from = (both >> 32) * vertices >> 32;
        u64 to = (both & 0xffffffffull) * vertices >> 32;
        out[row] = from << 32 | to;
    }
}

extern "C" __global__ void generate_numbers(u64 *out, u64 rows, u64 seed) {
    for (u64 row = first(); row < rows; row += stride()) {
        out[row] = number(seed, row);
    }
}

static __device__ __forceinline__ void put(u64 *table, u64 mask, u64 of, u64 entry) {
    u64 place = mix(of) & mask;
    while (atomicCAS(&table[place], EMPTY, entry) != EMPTY) {
        place = (place + 1) & mask;
    }
}

extern "C" __global__ void build_rows(const u32 *__restrict__ keys, u64 rows, u64 *table, u64 mask) {
    for (u64 row = first(); row < rows; row += stride()) {
        u64 key = keys[row];
        put(table, mask, key, key << 32 | row);
    }
}

extern "C" __global__ void build_pairs(const u64 *__restrict__ pairs, u64 rows, u64 *table, u64 mask) {
    for (u64 row = first(); row < rows; row += stride()) {
        u64 pair = pairs[row];
        put(table, mask, pair >> 32, pair);
    }
}

// Matches ----------------------------------------------------------------------------------------------------------------------

static __device__ __forceinline__ u32 key_of(u32 row) {
    return row;
}

static __device__ __forceinline__ u32 key_of(u64 pair) {
    return (u32)pair;
}

// The keys of this thread in a tile, and the first place of the table for each: EACH loads that do not wait for each other.
template <typename Row>
static __device__ __forceinline__ void begin(const Row *rows, u64 len, const u64 *table, u64 mask, u64 tile, Row *row, u64 *place,
                                             u64 *entry) {
    for (int i = 0; i < EACH; i++) {
        u64 at = tile * TILE + i * THREADS + threadIdx.x;
        row[i] = at < len ? rows[at] : (Row)0;
    }
    for (int i = 0; i < EACH; i++) {
        u64 at = tile * TILE + i * THREADS + threadIdx.x;
        place[i] = mix(key_of(row[i])) & mask;
        entry[i] = at < len ? table[place[i]] : EMPTY;
    }
}

template <typename Row>
static __device__ __forceinline__ void count_matches(const Row *rows, u64 len, const u64 *table, u64 mask, u32 *counts, u64 *sums) {
    u64 tiles = (len + TILE - 1) / TILE;
    for (u64 tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        Row row[EACH];
        u64 place[EACH], entry[EACH], all = 0;
        begin(rows, len, table, mask, tile, row, place, entry);
        for (int i = 0; i < EACH; i++) {
            u32 key = key_of(row[i]), found = 0;
            for (u64 here = entry[i], at = place[i]; here != EMPTY; here = table[at]) {
                found += (u32)(here >> 32) == key;
                at = (at + 1) & mask;
            }
            u64 at = tile * TILE + i * THREADS + threadIdx.x;
            if (at < len) {
                counts[at] = found;
            }
            all += found;
        }
        u64 sum = block_sum(all);
        if (threadIdx.x == 0) {
            sums[tile] = sum;
        }
    }
}

extern "C" __global__ void count_rows(const u32 *__restrict__ keys, u64 len, const u64 *__restrict__ table, u64 mask,
                                      u32 *__restrict__ counts, u64 *__restrict__ sums) {
    count_matches(keys, len, table, mask, counts, sums);
}

extern "C" __global__ void count_pairs(const u64 *__restrict__ pairs, u64 len, const u64 *__restrict__ table, u64 mask,
                                       u32 *__restrict__ counts, u64 *__restrict__ sums) {
    count_matches(pairs, len, table, mask, counts, sums);
}

// What becomes of a row and an entry that match.
static __device__ __forceinline__ u64 joined(u32, u64 at, u64 entry) {
    return entry << 32 | at;
}

static __device__ __forceinline__ u64 joined(u64 pair, u64, u64 entry) {
    return pair >> 32 << 32 | (u32)entry;
}

template <typename Row>
static __device__ __forceinline__ void write_matches(const Row *rows, u64 len, const u64 *table, u64 mask, const u32 *counts,
                                                     const u64 *sums, u64 *out) {
    u64 tiles = (len + TILE - 1) / TILE;
    for (u64 tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        Row row[EACH];
        u64 place[EACH], entry[EACH];
        u32 left[EACH], mine = 0, all;
        for (int i = 0; i < EACH; i++) {
            u64 at = tile * TILE + i * THREADS + threadIdx.x;
            left[i] = at < len ? counts[at] : 0;
            mine += left[i];
        }
        begin(rows, len, table, mask, tile, row, place, entry);
        u64 next = sums[tile] + block_before(mine, &all);
        for (int i = 0; i < EACH; i++) {
            u64 at = tile * TILE + i * THREADS + threadIdx.x;
            u32 key = key_of(row[i]);
            u64 here = entry[i], look = place[i];
            while (left[i] > 0) {
                if ((u32)(here >> 32) == key) {
                    out[next++] = joined(row[i], at, here);
                    left[i]--;
                }
                look = (look + 1) & mask;
                if (left[i] > 0) {
                    here = table[look];
                }
            }
        }
    }
}

extern "C" __global__ void write_rows(const u32 *__restrict__ keys, u64 len, const u64 *__restrict__ table, u64 mask,
                                      const u32 *__restrict__ counts, const u64 *__restrict__ sums, u64 *__restrict__ out) {
    write_matches(keys, len, table, mask, counts, sums, out);
}

extern "C" __global__ void write_pairs(const u64 *__restrict__ pairs, u64 len, const u64 *__restrict__ table, u64 mask,
                                       const u32 *__restrict__ counts, const u64 *__restrict__ sums, u64 *__restrict__ out) {
    write_matches(pairs, len, table, mask, counts, sums, out);
}

// Sums -------------------------------------------------------------------------------------------------------------------------

extern "C" __global__ void sum_tiles(const u32 *__restrict__ counts, u64 len, u64 *__restrict__ sums) {
    u64 tiles = (len + TILE - 1) / TILE;
    for (u64 tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        u64 all = 0;
        for (int i = 0; i < EACH; i++) {
            u64 at = tile * TILE + i * THREADS + threadIdx.x;
            all += at < len ? counts[at] : 0;
        }
        u64 sum = block_sum(all);
        if (threadIdx.x == 0) {
            sums[tile] = sum;
        }
    }
}

// One block: the tiles are few. Each thread sums up a run of them, so that the block meets only once for each run of runs.
extern "C" __global__ void scan_sums(u64 *sums, u64 tiles) {
    const int run = 8;
    u64 before = 0;
    for (u64 start = 0; start < tiles; start += THREADS * run) {
        u64 mine[run], all = 0, total;
        u64 at = start + (u64)threadIdx.x * run;
        for (int i = 0; i < run; i++) {
            mine[i] = at + i < tiles ? sums[at + i] : 0;
            all += mine[i];
        }
        u64 here = before + block_before(all, &total);
        for (int i = 0; i < run; i++) {
            if (at + i < tiles) {
                sums[at + i] = here;
            }
            here += mine[i];
        }
        before += total;
    }
    if (threadIdx.x == 0) {
        sums[tiles] = before;
    }
}

extern "C" __global__ void spread_sums(const u32 *__restrict__ counts, u64 len, const u64 *__restrict__ sums,
                                       u32 *__restrict__ offsets) {
    u64 tiles = (len + TILE - 1) / TILE;
    for (u64 tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        // Neighbouring counts of one thread, unlike elsewhere: the order matters here.
        u64 at = tile * TILE + (u64)threadIdx.x * EACH;
        u32 mine[EACH], all = 0, total;
        for (int i = 0; i < EACH; i++) {
            mine[i] = at + i < len ? counts[at + i] : 0;
            all += mine[i];
        }
        u32 here = (u32)sums[tile] + block_before(all, &total);
        for (int i = 0; i < EACH; i++) {
            if (at + i < len) {
                offsets[at + i] = here;
            }
            here += mine[i];
        }
    }
}

// Sets -------------------------------------------------------------------------------------------------------------------------

// Gives each thread that wants one a place of its own after those that were given, with one atomic operation for those of the warp
// that are here.
static __device__ __forceinline__ u64 next_place(u64 *count) {
    u32 here = __activemask();
    u32 lane = threadIdx.x % 32;
    u32 leader = __ffs(here) - 1;
    u64 start = 0;
    if (lane == leader) {
        start = atomicAdd(count, (u64)__popc(here));
    }
    start = __shfl_sync(here, start, leader);
    return start + __popc(here & ((1u << lane) - 1));
}

extern "C" __global__ void insert_new(const u64 *__restrict__ values, u64 len, u64 *set, u64 mask, u64 *__restrict__ fresh,
                                      u64 *count) {
    for (u64 at = first(); at < len; at += stride()) {
        u64 value = values[at];
        u64 place = mix(value) & mask, there;
        for (;;) {
            there = atomicCAS(&set[place], EMPTY, value);
            if (there == EMPTY || there == value) {
                break;
            }
            place = (place + 1) & mask;
        }
        if (there == EMPTY) {
            fresh[next_place(count)] = value;
        }
    }
}

extern "C" __global__ void rehash(const u64 *__restrict__ set, u64 places, u64 *larger, u64 mask) {
    for (u64 at = first(); at < places; at += stride()) {
        u64 value = set[at];
        if (value != EMPTY) {
            put(larger, mask, value, value);
        }
    }
}

extern "C" __global__ void collect(const u64 *__restrict__ set, u64 places, u64 *__restrict__ out, u64 *count) {
    for (u64 at = first(); at < places; at += stride()) {
        u64 value = set[at];
        if (value != EMPTY) {
            out[next_place(count)] = value;
        }
    }
}

// A fixpoint whose lengths stay on the device: every buffer has a fixed capacity, and what does not fit is reported in the state.

// Words of the state.
#define PAIRS 0     // pairs that the round extends
#define ENTRIES 1   // pairs in the set
#define OVERFLOW 2  // not 0: something did not fit
#define ROUNDS 3    // rounds that had pairs

// How far a search goes in a set before it counts as full.
#define MAX_PROBES 256

// Begins a round: what the round before found is what this one extends.
extern "C" __global__ void begin_round(u64 *state, u64 *found, u64 capacity) {
    if (first() == 0) {
        u64 pairs = *found < capacity ? *found : capacity;
        if (*found > capacity) {
            state[OVERFLOW] = 1;
        }
        state[PAIRS] = pairs;
        state[ENTRIES] += *found;
        state[ROUNDS] += pairs > 0;
        *found = 0;
    }
}

// Extends each pair by the edges that go on from it, and keeps what the set did not have.
extern "C" __global__ void extend_pairs(const u64 *__restrict__ pairs, u64 *state, const u64 *__restrict__ table, u64 mask, u64 *set,
                                        u64 set_mask, u64 *__restrict__ fresh, u64 *found, u64 capacity) {
    u64 len = state[PAIRS];
    for (u64 at = first(); at < len; at += stride()) {
        u64 pair = pairs[at];
        u32 key = (u32)pair;
        for (u64 look = mix(key) & mask;; look = (look + 1) & mask) {
            u64 entry = table[look];
            if (entry == EMPTY) {
                break;
            }
            if ((u32)(entry >> 32) != key) {
                continue;
            }
            u64 value = pair >> 32 << 32 | (u32)entry;
            u64 place = mix(value) & set_mask, there = 0;
            u32 probes = 0;
            for (; probes < MAX_PROBES; probes++) {
                there = atomicCAS(&set[place], EMPTY, value);
                if (there == EMPTY || there == value) {
                    break;
                }
                place = (place + 1) & set_mask;
            }
            if (probes == MAX_PROBES) {
                state[OVERFLOW] = 1;
            } else if (there == EMPTY) {
                u64 to = next_place(found);
                if (to < capacity) {
                    fresh[to] = value;
                }
            }
        }
    }
}

// Sort -------------------------------------------------------------------------------------------------------------------------

static __device__ __forceinline__ u32 digit_of(u64 number, u32 shift) {
    return (u32)(number >> shift) % DIGITS;
}

extern "C" __global__ void count_digits(const u64 *__restrict__ numbers, u64 len, u32 shift, u32 *__restrict__ counts) {
    __shared__ u32 found[DIGITS];
    u64 tiles = (len + SORT_TILE - 1) / SORT_TILE;
    for (u64 tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        found[threadIdx.x] = 0;
        __syncthreads();
        for (int i = 0; i < SORT_EACH; i++) {
            u64 at = tile * SORT_TILE + i * THREADS + threadIdx.x;
            if (at < len) {
                atomicAdd(&found[digit_of(numbers[at], shift)], 1u);
            }
        }
        __syncthreads();
        counts[threadIdx.x * tiles + tile] = found[threadIdx.x];
        __syncthreads();
    }
}

// Each warp takes a run of its tile, 32 numbers at a time, and finds for each how many with its digit came before it in the run; the
// digits of the warps before, and of the tiles before, are added up. The numbers change places in shared memory first, so that those
// of one digit are written side by side.
extern "C" __global__ void scatter_digits(const u64 *__restrict__ numbers, u64 len, u32 shift, const u32 *__restrict__ offsets,
                                          u64 *__restrict__ out) {
    __shared__ u64 staged[SORT_TILE];
    __shared__ u32 counters[WARPS][DIGITS];
    __shared__ u32 starts[DIGITS];
    u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    u64 tiles = (len + SORT_TILE - 1) / SORT_TILE;
    for (u64 tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        for (int other = 0; other < WARPS; other++) {
            counters[other][threadIdx.x] = 0;
        }
        __syncthreads();
        u64 base = tile * SORT_TILE;
        u32 here = len - base < SORT_TILE ? (u32)(len - base) : SORT_TILE;
        u64 mine[SORT_EACH];
        u32 rank[SORT_EACH];
        for (int i = 0; i < SORT_EACH; i++) {
            u32 at = warp * 32 * SORT_EACH + i * 32 + lane;
            mine[i] = at < here ? numbers[base + at] : 0;
        }
        for (int i = 0; i < SORT_EACH; i++) {
            u32 at = warp * 32 * SORT_EACH + i * 32 + lane;
            bool valid = at < here;
            u32 digit = digit_of(mine[i], shift);
            u32 same = __match_any_sync(WHOLE_WARP, valid ? digit : DIGITS);
            u32 before = __popc(same & ((1u << lane) - 1));
            rank[i] = valid ? counters[warp][digit] + before : 0;
            __syncwarp();
            if (valid && before == 0) {
                counters[warp][digit] += __popc(same);
            }
            __syncwarp();
        }
        __syncthreads();
        // One thread for each digit: what the warps before have of it, and where it begins in the tile.
        u32 sum = 0, all;
        for (int other = 0; other < WARPS; other++) {
            u32 found = counters[other][threadIdx.x];
            counters[other][threadIdx.x] = sum;
            sum += found;
        }
        starts[threadIdx.x] = block_before(sum, &all);
        __syncthreads();
        for (int i = 0; i < SORT_EACH; i++) {
            u32 at = warp * 32 * SORT_EACH + i * 32 + lane;
            if (at < here) {
                u32 digit = digit_of(mine[i], shift);
                staged[starts[digit] + counters[warp][digit] + rank[i]] = mine[i];
            }
        }
        __syncthreads();
        for (u32 at = threadIdx.x; at < here; at += THREADS) {
            u64 number = staged[at];
            u32 digit = digit_of(number, shift);
            out[offsets[digit * tiles + tile] + (at - starts[digit])] = number;
        }
        __syncthreads();
    }
}
