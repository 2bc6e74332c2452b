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

// One atomic operation for each tile.
extern "C" __global__ void collect(const u64 *__restrict__ set, u64 places, u64 *__restrict__ out, u64 *count) {
    __shared__ u64 start;
    u64 tiles = (places + TILE - 1) / TILE;
    for (u64 tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        u64 value[EACH];
        u32 mine = 0, all;
        for (int i = 0; i < EACH; i++) {
            u64 at = tile * TILE + i * THREADS + threadIdx.x;
            value[i] = at < places ? set[at] : EMPTY;
        }
        for (int i = 0; i < EACH; i++) {
            mine += value[i] != EMPTY;
        }
        u32 before = block_before(mine, &all);
        if (threadIdx.x == 0) {
            start = atomicAdd(count, (u64)all);
        }
        __syncthreads();
        // The next tile writes `start` after the block has met in `block_before`.
        u64 to = start + before;
        for (int i = 0; i < EACH; i++) {
            if (value[i] != EMPTY) {
                out[to++] = value[i];
            }
        }
    }
}

// A fixpoint whose lengths stay on the device: every buffer has a fixed capacity, and what does not fit is reported in the state. Each
// round of a batch has a counter of its own, so a round is one kernel: it extends as many pairs as its counter says, and adds what it
// finds to the next counter. What a round takes is the longest chain of loads of one thread, so a search reads a bucket of places at once,
// and no thread puts more than a few pairs into the set.

// Words of the state; word 0 counts what `collect` lists.
#define OVERFLOW 1  // not 0: something did not fit
#define FOUND 2     // the counter of the first round; those of further rounds follow

// How far a search goes in a set before it counts as full.
#define MAX_PROBES 256
// Places of a bucket, where searches begin and which they read at once; divides the length of every table, and MAX_PROBES.
#define BUCKET 8
// A processor runs four blocks of a round at a time, so a thread may have the registers that all loads of a search need at once.
#define FEW_BLOCKS __launch_bounds__(THREADS, 4)
// Pairs that a block keeps in shared memory.
#define STAGE (2 * THREADS)

// What became of an insertion.
#define NEW 0
#define KNOWN 1
#define FULL 2

static __device__ __forceinline__ u64 bucket_of(u64 of, u64 mask) {
    return mix(of) & mask & ~(u64)(BUCKET - 1);
}

// Loads a bucket, 16 bytes at a time.
static __device__ __forceinline__ void load_bucket(const u64 *places, u64 bucket, u64 *there) {
    const ulonglong2 *twos = (const ulonglong2 *)(places + bucket);
#pragma unroll
    for (u32 i = 0; i < BUCKET / 2; i++) {
        ulonglong2 two = twos[i];
        there[2 * i] = two.x;
        there[2 * i + 1] = two.y;
    }
}

// Puts a value at the first empty place from the bucket of `of` on, unless it is there or `limit` places are taken. A place is EMPTY
// until a value is put there, and then keeps it. So a place that was loaded as taken is taken, and one that was loaded as empty is tried.
static __device__ __forceinline__ u32 insert_near(u64 *places, u64 mask, u64 of, u64 value, u64 limit) {
    u64 bucket = bucket_of(of, mask);
    for (u64 probes = 0; probes < limit; probes += BUCKET, bucket = (bucket + BUCKET) & mask) {
        u64 there[BUCKET];
        u32 same = 0, empty = 0;
        load_bucket(places, bucket, there);
#pragma unroll
        for (u32 i = 0; i < BUCKET; i++) {
            same |= (there[i] == value ? 1u : 0u) << i;
            empty |= (there[i] == EMPTY ? 1u : 0u) << i;
        }
        for (u32 left = same | empty; left != 0; left &= left - 1) {
            u32 next = __ffs(left) - 1;
            if (same >> next & 1) {
                return KNOWN;
            }
            u64 now = atomicCAS(&places[bucket + next], EMPTY, value);
            if (now == EMPTY) {
                return NEW;
            }
            if (now == value) {
                return KNOWN;
            }
        }
    }
    return FULL;
}

// Appends pairs in shared memory to those of a round, with one atomic operation; beyond the capacity they are only counted. All
// threads of the block call it, after they have met.
static __device__ __forceinline__ void append(const u64 *staged, u32 len, u64 *fresh, u64 *found, u64 capacity) {
    __shared__ u64 start;
    if (threadIdx.x == 0 && len > 0) {
        start = atomicAdd(found, (u64)len);
    }
    __syncthreads();
    for (u32 i = threadIdx.x; i < len; i += THREADS) {
        if (start + i < capacity) {
            fresh[start + i] = staged[i];
        }
    }
}

extern "C" __global__ void clear_fixpoint(u64 *table, u64 places, u64 *set, u64 set_places, u64 *state, u64 words) {
    for (u64 at = first(); at < set_places; at += stride()) {
        set[at] = EMPTY;
    }
    for (u64 at = first(); at < places; at += stride()) {
        table[at] = EMPTY;
    }
    for (u64 at = first(); at < words; at += stride()) {
        state[at] = 0;
    }
}

extern "C" __global__ void FEW_BLOCKS insert_edges(const u64 *__restrict__ edges, u64 rows, u64 *table, u64 mask, u64 *set,
                                                   u64 set_mask, u64 *__restrict__ fresh, u64 *state, u64 capacity) {
    __shared__ u64 kept[THREADS];
    __shared__ u32 kept_len;
    for (u64 base = (u64)blockIdx.x * THREADS; base < rows; base += stride()) {
        if (threadIdx.x == 0) {
            kept_len = 0;
        }
        __syncthreads();
        if (base + threadIdx.x < rows) {
            u64 edge = edges[base + threadIdx.x];
            if (insert_near(table, mask, edge >> 32, edge, mask + 1) == NEW) {
                u32 outcome = insert_near(set, set_mask, edge, edge, MAX_PROBES);
                if (outcome == NEW) {
                    kept[atomicAdd(&kept_len, 1u)] = edge;
                } else if (outcome == FULL) {
                    state[OVERFLOW] = 1;
                }
            }
        }
        __syncthreads();
        append(kept, kept_len, fresh, state + FOUND, capacity);
        __syncthreads();
    }
}

// A block takes as many pairs as it has threads. First each thread looks up the edges that go on from its pair; then the threads share
// what was found, and put it into the set; then the block appends what was new.
extern "C" __global__ void FEW_BLOCKS extend_pairs(const u64 *__restrict__ pairs, u64 *state, u64 round, const u64 *__restrict__ table,
                                                   u64 mask, u64 *set, u64 set_mask, u64 *__restrict__ fresh, u64 capacity) {
    __shared__ u64 candidates[STAGE], kept[STAGE];
    __shared__ u32 candidates_len, kept_len;
    u64 *found = state + FOUND + round + 1;
    // Asked for together with the length; beyond the length it is not used.
    u64 at = first();
    u64 pair = at < capacity ? pairs[at] : 0;
    u64 len = state[FOUND + round];
    len = len < capacity ? len : capacity;
    for (; at - threadIdx.x < len; at += stride()) {
        if (threadIdx.x == 0) {
            candidates_len = 0;
            kept_len = 0;
        }
        __syncthreads();
        bool more = at < len;
        u32 key = (u32)pair;
        for (u64 bucket = bucket_of(key, mask); more; bucket = (bucket + BUCKET) & mask) {
            u64 entry[BUCKET];
            u32 matches = 0;
            load_bucket(table, bucket, entry);
#pragma unroll
            for (u32 i = 0; i < BUCKET; i++) {
                more = more && entry[i] != EMPTY;
                matches |= (more && (u32)(entry[i] >> 32) == key ? 1u : 0u) << i;
            }
            u32 to = matches != 0 ? atomicAdd(&candidates_len, (u32)__popc(matches)) : 0;
            for (; matches != 0; matches &= matches - 1, to++) {
                u64 edge = table[bucket + __ffs(matches) - 1];
                u64 value = pair >> 32 << 32 | (u32)edge;
                if (to < STAGE) {
                    candidates[to] = value;
                    continue;
                }
                // There is no room left in shared memory: a block that finds this many pairs is rare.
                u32 outcome = insert_near(set, set_mask, value, value, MAX_PROBES);
                if (outcome == NEW) {
                    u64 place = next_place(found);
                    if (place < capacity) {
                        fresh[place] = value;
                    }
                } else if (outcome == FULL) {
                    state[OVERFLOW] = 1;
                }
            }
        }
        if (at + stride() < len) {
            pair = pairs[at + stride()];
        }
        __syncthreads();
        u32 staged = candidates_len < STAGE ? candidates_len : STAGE;
        for (u32 i = threadIdx.x; i < staged; i += THREADS) {
            u64 value = candidates[i];
            u32 outcome = insert_near(set, set_mask, value, value, MAX_PROBES);
            if (outcome == NEW) {
                kept[atomicAdd(&kept_len, 1u)] = value;
            } else if (outcome == FULL) {
                state[OVERFLOW] = 1;
            }
        }
        __syncthreads();
        append(kept, kept_len, fresh, found, capacity);
        __syncthreads();
    }
}

// The first block alone. A further batch follows only one in which every round had pairs, so the last counter that is not 0 is the one after its
// last round.
extern "C" __global__ void next_batch(u64 *state, u64 words) {
    if (blockIdx.x > 0) {
        return;
    }
    u64 mine = 0;
    for (u64 at = FOUND + threadIdx.x; at < words; at += THREADS) {
        mine += state[at] != 0;
    }
    u64 counters = block_sum(mine);
    u64 last = counters > 0 ? state[FOUND + counters - 1] : 0;
    __syncthreads();
    for (u64 at = FOUND + threadIdx.x; at < words; at += THREADS) {
        state[at] = at == FOUND ? last : 0;
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
