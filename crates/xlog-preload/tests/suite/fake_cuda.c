// A driver without a device: it counts, and answers as libcuda does. Device 0 has 1 GiB.
#include <pthread.h>
#include <semaphore.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

typedef int R;
typedef uint64_t H;
enum { OK = 0, INVALID = 1, OOM = 2, NOT_INIT = 3, NO_CONTEXT = 201, NOT_FOUND = 500 };
#define TOTAL ((size_t)1 << 30)
#define CHUNK ((size_t)32 << 20)
#define MAX 4096
// The stream that is being captured.
#define CAPTURING 99
// The stream whose frees take effect, and whose graphs end, when it is synchronised.
#define BUSY 55
// The owner of blocks that graphs have left to the program. Lower ones are pools, higher ones contexts.
#define LEFT 8

static int initialized, primary_refs, calls;
static H current;
static size_t used;
static H next_address = 0x7f0000000000, next_handle = 0x100, next_context = 0xc0de0;

typedef struct { H key; size_t bytes; H owner; int refs, maps; } Item;
static Item blocks[MAX], handles[MAX], maps[MAX], pools[8];
static size_t pool_used[8];

static Item *find(Item *items, H key) {
    for (int i = 0; i < MAX; i++) if (items[i].key == key) return &items[i];
    return NULL;
}
static Item *put(Item *items, H key, size_t bytes, H owner) {
    Item *item = find(items, 0);
    *item = (Item){key, bytes, owner, 1, 0};
    return item;
}
static R take(size_t bytes) {
    calls++;
    if (!initialized) return NOT_INIT;
    if (bytes == 0) return INVALID;
    if (bytes > TOTAL - used) return OOM;
    used += bytes;
    return OK;
}
static H address(size_t bytes) {
    H at = next_address;
    next_address += (bytes + 0x1fffff) & ~(H)0x1fffff;
    return at;
}

size_t fakeUsed(void) { return used; }

// Calls that wait inside the driver. One that is not let go ends the program.
typedef struct { char call[64]; int is_set, fails; H argument; sem_t arrived, go; } Hold;
static Hold holds[4];
static pthread_mutex_t holds_lock = PTHREAD_MUTEX_INITIALIZER;
static void wait_for(sem_t *semaphore) {
    struct timespec end;
    clock_gettime(CLOCK_REALTIME, &end);
    end.tv_sec += 600;
    if (sem_timedwait(semaphore, &end)) abort();
}
static Hold *hold_of(const char *call) {
    for (int i = 0; i < 4; i++) if (!strcmp(holds[i].call, call)) return &holds[i];
    return NULL;
}
void fakeHold(const char *call, int fails) {
    pthread_mutex_lock(&holds_lock);
    Hold *hold = hold_of(call);
    if (!hold) {
        hold = hold_of("");
        strcpy(hold->call, call);
        sem_init(&hold->arrived, 0, 0);
        sem_init(&hold->go, 0, 0);
    }
    hold->is_set = 1;
    hold->fails = fails;
    pthread_mutex_unlock(&holds_lock);
}
H fakeArrived(const char *call) { wait_for(&hold_of(call)->arrived); return hold_of(call)->argument; }
void fakeGo(const char *call) { sem_post(&hold_of(call)->go); }
// Whether the call fails.
static int pass(const char *call, H argument) {
    pthread_mutex_lock(&holds_lock);
    Hold *hold = hold_of(call);
    int is_held = hold && hold->is_set;
    if (is_held) { hold->is_set = 0; hold->argument = argument; }
    pthread_mutex_unlock(&holds_lock);
    if (is_held) { sem_post(&hold->arrived); wait_for(&hold->go); }
    return is_held && hold->fails;
}
// Frees memory in a way that is not intercepted; the driver gives the same address or handle next.
void fakeReuse(H key) {
    Item *block = find(blocks, key), *handle = find(handles, key), *item = block ? block : handle;
    used -= item->bytes;
    item->key = 0;
    *(block ? &next_address : &next_handle) = key;
}
// A capture of the program in the default mode: calls on pools and graph memory break it, unless the calling thread has relaxed its mode.
static int is_open, is_broken;
static __thread int capture_mode;
void fakeCapture(int open) { is_open = open; }
int fakeBroken(void) { return is_broken; }
static void forbidden(void) { if (is_open && capture_mode != 2) is_broken = 1; }
// Calls that take no memory and give none back: what the library asks, beside the calls of the program.
static atomic_int queries;
int fakeQueries(void) { return queries; }
R cuThreadExchangeStreamCaptureMode(int *mode) {
    queries++;
    int before = capture_mode;
    capture_mode = *mode;
    *mode = before;
    return OK;
}
int fakeCalls(void) { return calls; }
static int trims, asks;
int fakeTrims(void) { return trims; }
int fakeAsks(void) { return asks; }

R cuInit(unsigned flags) { initialized = 1; return OK; }
R cuDeviceGetCount(int *n) { *n = 1; return initialized ? OK : NOT_INIT; }
R cuDeviceGetName(char *name, int length, int device) { strncpy(name, "Fake H0", length); return OK; }
R cuDeviceTotalMem_v2(size_t *bytes, int device) { *bytes = TOTAL; return initialized ? OK : NOT_INIT; }
R cuDeviceGetUuid_v2(unsigned char *uuid, int device) { memset(uuid, 0xab + device, 16); return initialized ? OK : NOT_INIT; }
R cuCtxGetCurrent(H *context) { queries++; *context = current; return initialized ? OK : NOT_INIT; }
R cuCtxGetDevice(int *device) { queries++; *device = 0; return !initialized ? NOT_INIT : current ? OK : NO_CONTEXT; }
R cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) { queries++; *flags = 0; *active = device == 0 && primary_refs > 0; return OK; }
R cuDevicePrimaryCtxRetain(H *context, int device) { queries++; primary_refs++; *context = 0xc0de; return OK; }
R cuCtxSetCurrent(H context) { current = context; return OK; }
R cuCtxCreate_v2(H *context, unsigned flags, int device) { current = *context = next_context++; return OK; }
static void end(H context) {
    for (int i = 0; i < MAX; i++)
        if (blocks[i].key && blocks[i].owner == context) { used -= blocks[i].bytes; blocks[i].key = 0; }
}
R cuCtxDestroy_v2(H context) { if (!context) return INVALID; end(context); if (current == context) current = 0; return OK; }
R cuDevicePrimaryCtxRelease_v2(int device) { if (--primary_refs == 0) end(0xc0de); return OK; }
R cuDevicePrimaryCtxReset_v2(int device) { primary_refs = 0; end(0xc0de); return OK; }

static R allocate(H *out, size_t bytes) {
    if (!current) return initialized ? NO_CONTEXT : NOT_INIT;
    R r = take(bytes);
    if (r == OK) { *out = address(bytes); put(blocks, *out, bytes, current); }
    return r;
}
R cuMemAlloc_v2(H *out, size_t bytes) { return allocate(out, bytes); }
// Another address for the same function, as a driver may have.
static R mem_alloc_internal(H *out, size_t bytes) { return allocate(out, bytes); }
R cuMemAlloc(unsigned *out, unsigned bytes) { return INVALID; }
R cuMemAllocManaged(H *out, size_t bytes, unsigned flags) { return allocate(out, bytes); }
R cuMemAllocPitch_v2(H *out, size_t *pitch, size_t width, size_t height, unsigned element) {
    *pitch = (width + 511) & ~(size_t)511;
    return allocate(out, *pitch * height);
}
R cuMemFreeAsync(H at, H stream);
R cuMemPoolTrimTo(H pool, size_t keep);
R cuMemFree_v2(H at) {
    Item *block = at ? find(blocks, at) : NULL;
    if (!block) return INVALID;
    if (block->owner <= LEFT) { R r = cuMemFreeAsync(at, -1); return r ? r : cuMemPoolTrimTo(1, 0); }
    used -= block->bytes;
    block->key = 0;
    return OK;
}
R cuMemGetInfo_v2(size_t *free, size_t *total) { *free = TOTAL - used; *total = TOTAL; return initialized ? OK : NOT_INIT; }

// Pools: 1 is the device's own. They grow by chunks and keep what is freed.
static H current_pool = 1;
R cuDeviceGetMemPool(H *pool, int device) { queries++; *pool = current_pool; pass(__func__, *pool); return OK; }
R cuDeviceSetMemPool(int device, H pool) { current_pool = pool; return OK; }
R cuMemSetMemPool(const int *location, int type, H pool) { current_pool = pool; return OK; }
R cuMemPoolCreate(H *pool, const int *properties) {
    for (H i = 2; i < 8; i++) if (!pools[i].key) { pools[i] = (Item){i, 0, 0, 1, 0}; pool_used[i] = 0; *pool = i; return OK; }
    return OOM;
}
R cuMemPoolDestroy(H pool) {
    if (pool < 2 || pool > 7 || !pools[pool].key) return INVALID;
    if (pool_used[pool] == 0) used -= pools[pool].bytes;
    pools[pool].key = 0;
    if (current_pool == pool) current_pool = 1;
    pass(__func__, pool);
    return OK;
}
R cuMemPoolGetAttribute(H pool, int attribute, H *value) {
    queries++;
    forbidden();
    pass(__func__, pool);
    if (pool > 1 && !pools[pool].key) abort();
    asks++;
    *value = attribute == 5 ? pools[pool].bytes : 0;
    pass("answered", pool);
    return OK;
}
R cuMemPoolSetAttribute(H pool, int attribute, void *value) { return OK; }
R cuMemPoolTrimTo(H pool, size_t keep) {
    forbidden();
    queries++;
    trims++;
    while (pools[pool].bytes >= CHUNK + keep && pools[pool].bytes - CHUNK >= pool_used[pool]) {
        pools[pool].bytes -= CHUNK;
        used -= CHUNK;
    }
    return OK;
}
R cuMemAllocFromPoolAsync(H *out, size_t bytes, H pool, H stream) {
    calls++;
    if (!current) return NO_CONTEXT;
    pass(__func__, pool);
    if (stream == CAPTURING) { *out = address(bytes); return OK; }
    size_t grown = pools[pool].bytes;
    while (grown - pool_used[pool] < bytes) grown += CHUNK;
    if (grown - pools[pool].bytes > TOTAL - used) return OOM;
    used += grown - pools[pool].bytes;
    pools[pool].bytes = grown;
    pool_used[pool] += bytes;
    *out = address(bytes);
    put(blocks, *out, bytes, pool);
    return OK;
}
R cuMemAllocFromPoolAsync_ptsz(H *out, size_t bytes, H pool, H stream) { return cuMemAllocFromPoolAsync(out, bytes, pool, stream); }
R cuMemAllocAsync(H *out, size_t bytes, H stream) { return cuMemAllocFromPoolAsync(out, bytes, current_pool, stream); }
R cuMemAllocAsync_ptsz(H *out, size_t bytes, H stream) { return cuMemAllocFromPoolAsync(out, bytes, current_pool, stream); }
// The stream of the last free; -1 if it was cuMemFree.
static H freed_on, pending;
static size_t running;
H fakeFreedOn(void) { return freed_on; }
R cuMemFreeAsync(H at, H stream) {
    pass(__func__, at);
    freed_on = stream;
    if (stream == BUSY) { pending = at; return OK; }
    Item *block = at ? find(blocks, at) : NULL;
    if (!block || block->owner > LEFT) return INVALID;
    if (block->owner < LEFT) pool_used[block->owner] -= block->bytes;
    block->key = 0;
    pass("freed", at);
    return OK;
}
R cuMemFreeAsync_ptsz(H at, H stream) { return cuMemFreeAsync(at, stream); }
R cuStreamIsCapturing(H stream, int *status) { queries++; *status = stream == CAPTURING; return OK; }
// Synchronisation returns what the device's own pool does not use.
static R done(H stream) {
    if (stream == BUSY) {
        running = 0;
        if (pending) cuMemFreeAsync(pending, 0);
        pending = 0;
    }
    return cuMemPoolTrimTo(1, 0);
}
R cuStreamSynchronize(H stream) { return pass(__func__, stream) ? INVALID : done(stream); }
R cuStreamSynchronize_ptsz(H stream) { return done(stream); }
// An event has the number of its stream.
R cuEventSynchronize(H event) { return done(event); }
R cuCtxSynchronize(void) { return done(BUSY); }
R cuCtxSynchronize_v2(H context) { return OK; }

// Physical memory.
R cuMemCreate(H *out, size_t bytes, const int *properties, H flags) {
    R r = take(bytes);
    if (r == OK) { *out = next_handle++; put(handles, *out, bytes, 0); }
    return r;
}
static void end_handle(Item *handle) {
    if (handle->refs == 0 && handle->maps == 0) { used -= handle->bytes; handle->key = 0; }
}
R cuMemRelease(H handle) {
    Item *item = handle ? find(handles, handle) : NULL;
    if (!item || item->refs == 0 || pass(__func__, handle)) return INVALID;
    item->refs--;
    end_handle(item);
    return OK;
}
R cuMemMap(H at, size_t bytes, size_t offset, H handle, H flags) {
    Item *item = handle ? find(handles, handle) : NULL;
    if (!item || find(maps, at)) return INVALID;
    item->maps++;
    put(maps, at, bytes, handle);
    return OK;
}
R cuMemUnmap(H at, size_t bytes) {
    int found = 0;
    if (pass(__func__, at)) return INVALID;
    for (int i = 0; i < MAX; i++)
        if (maps[i].key && maps[i].key >= at && maps[i].key < at + bytes) {
            Item *item = find(handles, maps[i].owner);
            maps[i].key = 0;
            item->maps--;
            end_handle(item);
            found = 1;
        }
    return found ? OK : INVALID;
}
R cuMemRetainAllocationHandle(H *out, H at) {
    Item *map = find(maps, at);
    if (!map) return INVALID;
    find(handles, *out = map->owner)->refs++;
    return OK;
}

// Arrays of one byte an element.
typedef struct { size_t width, height; unsigned format, channels; } Flat;
typedef struct { size_t width, height, depth; unsigned format, channels, flags; } Cubic;
R cuArrayCreate_v2(H *out, const Flat *d) { return allocate(out, d->width * (d->height ? d->height : 1)); }
R cuArray3DCreate_v2(H *out, const Cubic *d) { return allocate(out, d->width * d->height * d->depth); }
R cuMipmappedArrayCreate(H *out, const Cubic *d, unsigned levels) { return allocate(out, d->width * d->height * 2); }
R cuArrayDestroy(H array) { return cuMemFree_v2(array); }
R cuMipmappedArrayDestroy(H array) { return cuMemFree_v2(array); }

// Graphs of one allocation node, a kernel node, and a child graph. Memory is taken at the first launch or upload, and kept for other
// graphs when the executable ends.
static Item graphs[MAX], executables[MAX];
static size_t graph_reserved, graph_step = 2 << 20;
void fakeGraphStep(size_t step) { graph_step = step; }
static size_t in_steps(size_t bytes) { return (bytes + graph_step - 1) / graph_step * graph_step; }
static size_t graphs_in_use(void) {
    size_t bytes = running;
    for (int i = 0; i < MAX; i++) {
        if (executables[i].key && executables[i].maps) bytes += in_steps(executables[i].bytes);
        if (blocks[i].key && blocks[i].owner == LEFT) bytes += in_steps(blocks[i].bytes);
    }
    return bytes;
}
// The block that a launched graph leaves to the program when it is destroyed.
R fakeLeave(H *out, H executable) {
    Item *item = find(executables, executable);
    put(blocks, *out = address(item->bytes), item->bytes, LEFT);
    item->maps = 0;
    return OK;
}
typedef struct { int pool[22]; H access; size_t accesses, bytes; H address; } AllocationNode;
static R instantiate(H *out, H graph) {
    Item *item = find(graphs, graph);
    if (!item) return INVALID;
    size_t bytes = item->bytes;
    for (Item *child = item; child->owner && (child = find(graphs, child->owner));) bytes += child->bytes;
    put(executables, *out = next_handle++, bytes, 0);
    return OK;
}
R cuGraphCreate(H *out, unsigned flags) { put(graphs, *out = next_handle++ << 8, 0, 0); return OK; }
R fakeGraph(H *out, size_t bytes, H child) { put(graphs, *out = next_handle++ << 8, bytes, child); return OK; }
R cuGraphGetNodes(H graph, H *nodes, size_t *count) {
    Item *item = find(graphs, graph);
    if (!item) return INVALID;
    H found[3] = {graph + 1}; size_t n = 1;
    if (item->bytes) found[n++] = graph + 2;
    if (item->owner) found[n++] = graph + 3;
    if (nodes) memcpy(nodes, found, (n < *count ? n : *count) * sizeof *nodes);
    *count = n;
    return OK;
}
R cuGraphNodeGetType(H node, int *type) { *type = (node & 255) == 2 ? 10 : (node & 255) == 3 ? 4 : 0; return OK; }
R cuGraphMemAllocNodeGetParams(H node, AllocationNode *out) {
    *out = (AllocationNode){{1, 0, 1, 0}, 0, 0, find(graphs, node & ~(H)255)->bytes, 0};
    return (node & 255) == 2 ? OK : INVALID;
}
R cuGraphChildGraphNodeGetGraph(H node, H *out) { *out = find(graphs, node & ~(H)255)->owner; return OK; }
R cuGraphInstantiate(H *out, H graph, H *error, char *log, size_t size) { return instantiate(out, graph); }
R cuGraphInstantiate_v2(H *out, H graph, H *error, char *log, size_t size) { return instantiate(out, graph); }
R cuGraphInstantiateWithFlags(H *out, H graph, H flags) { return instantiate(out, graph); }
R cuGraphInstantiateWithParams(H *out, H graph, void *parameters) { return instantiate(out, graph); }
R cuGraphInstantiateWithParams_ptsz(H *out, H graph, void *parameters) { return instantiate(out, graph); }
R cuGraphLaunch(H executable, H stream) {
    Item *item = executable ? find(executables, executable) : NULL;
    if (!item) return INVALID;
    pass(__func__, executable);
    size_t needed = item->maps || !item->bytes ? 0 : in_steps(item->bytes), in_use = graphs_in_use();
    size_t grown = in_use + needed > graph_reserved ? in_use + needed - graph_reserved : 0;
    if (grown) { R r = take(grown); if (r != OK) return r; }
    graph_reserved += grown;
    item->maps = 1;
    item->owner = stream;
    return OK;
}
R cuGraphLaunch_ptsz(H executable, H stream) { return cuGraphLaunch(executable, stream); }
R cuGraphUpload(H executable, H stream) { return cuGraphLaunch(executable, stream); }
R cuGraphUpload_ptsz(H executable, H stream) { return cuGraphLaunch(executable, stream); }
R cuGraphExecDestroy(H executable) {
    Item *item = executable ? find(executables, executable) : NULL;
    if (!item) return INVALID;
    item->key = 0;
    if (item->owner == BUSY && item->maps) running += in_steps(item->bytes);
    return OK;
}
static int trims_idle;
void fakeTrimsIdle(int yes) { trims_idle = yes; }
R cuDeviceGraphMemTrim(int device) {
    queries++;
    forbidden();
    if (trims_idle) for (int i = 0; i < MAX; i++) executables[i].maps = 0;
    size_t in_use = graphs_in_use();
    used -= graph_reserved - in_use;
    graph_reserved = in_use;
    return OK;
}
R cuDeviceGetGraphMemAttribute(int device, int attribute, H *value) { forbidden(); queries++; *value = attribute == 2 ? graph_reserved : 0; return OK; }

R cuGetProcAddress(const char *name, void **out, int version, H flags);
R cuGetProcAddress_v2(const char *name, void **out, int version, H flags, int *status);
#define F(name) {#name, 2000, 0, (void *)name}
static const struct { const char *base; int since, per_thread; void *function; } TABLE[] = {
    {"cuMemAlloc", 2000, 0, (void *)cuMemAlloc}, {"cuMemAlloc", 3020, 0, (void *)mem_alloc_internal},
    {"cuMemFree", 3020, 0, (void *)cuMemFree_v2}, {"cuMemAllocPitch", 3020, 0, (void *)cuMemAllocPitch_v2},
    {"cuMemGetInfo", 3020, 0, (void *)cuMemGetInfo_v2}, {"cuDeviceTotalMem", 3020, 0, (void *)cuDeviceTotalMem_v2},
    {"cuArrayCreate", 3020, 0, (void *)cuArrayCreate_v2}, {"cuArray3DCreate", 3020, 0, (void *)cuArray3DCreate_v2},
    {"cuCtxDestroy", 4000, 0, (void *)cuCtxDestroy_v2}, {"cuCtxCreate", 3020, 0, (void *)cuCtxCreate_v2},
    {"cuDevicePrimaryCtxRelease", 11000, 0, (void *)cuDevicePrimaryCtxRelease_v2},
    {"cuDevicePrimaryCtxReset", 11000, 0, (void *)cuDevicePrimaryCtxReset_v2},
    {"cuMemAllocAsync", 11020, 0, (void *)cuMemAllocAsync}, {"cuMemAllocAsync", 11020, 1, (void *)cuMemAllocAsync_ptsz},
    {"cuMemFreeAsync", 11020, 0, (void *)cuMemFreeAsync}, {"cuMemFreeAsync", 11020, 1, (void *)cuMemFreeAsync_ptsz},
    {"cuMemAllocFromPoolAsync", 11020, 0, (void *)cuMemAllocFromPoolAsync},
    {"cuMemAllocFromPoolAsync", 11020, 1, (void *)cuMemAllocFromPoolAsync_ptsz},
    {"cuStreamSynchronize", 2000, 0, (void *)cuStreamSynchronize}, {"cuStreamSynchronize", 7000, 1, (void *)cuStreamSynchronize_ptsz},
    {"cuCtxSynchronize", 2000, 0, (void *)cuCtxSynchronize}, {"cuCtxSynchronize", 13000, 0, (void *)cuCtxSynchronize_v2},
    {"cuGetProcAddress", 11030, 0, (void *)cuGetProcAddress}, {"cuGetProcAddress", 12000, 0, (void *)cuGetProcAddress_v2},
    {"cuGraphInstantiate", 10000, 0, (void *)cuGraphInstantiate}, {"cuGraphInstantiate", 11000, 0, (void *)cuGraphInstantiate_v2},
    {"cuGraphInstantiate", 12000, 0, (void *)cuGraphInstantiateWithFlags},
    {"cuGraphInstantiateWithFlags", 11040, 0, (void *)cuGraphInstantiateWithFlags},
    {"cuGraphInstantiateWithParams", 12000, 0, (void *)cuGraphInstantiateWithParams},
    {"cuGraphInstantiateWithParams", 12000, 1, (void *)cuGraphInstantiateWithParams_ptsz},
    {"cuGraphLaunch", 10000, 0, (void *)cuGraphLaunch}, {"cuGraphLaunch", 10000, 1, (void *)cuGraphLaunch_ptsz},
    {"cuGraphUpload", 11010, 0, (void *)cuGraphUpload}, {"cuGraphUpload", 11010, 1, (void *)cuGraphUpload_ptsz},
    F(cuGraphExecDestroy), F(cuDeviceGraphMemTrim),
    F(cuInit), F(cuDeviceGetCount), F(cuCtxSetCurrent), F(cuDevicePrimaryCtxRetain), F(cuMemAllocManaged), F(cuMemPoolCreate),
    F(cuMemPoolDestroy), F(cuDeviceSetMemPool), F(cuMemPoolTrimTo), F(cuMemPoolSetAttribute), F(cuEventSynchronize), F(cuMemCreate), F(cuMemRelease),
    F(cuMemMap), F(cuMemUnmap), F(cuMemRetainAllocationHandle), F(cuArrayDestroy), F(cuMipmappedArrayCreate),
    F(cuMipmappedArrayDestroy), {"cuMemSetMemPool", 13000, 0, (void *)cuMemSetMemPool},
};
R cuGetProcAddress_v2(const char *name, void **out, int version, H flags, int *status) {
    void *plain = NULL, *per_thread = NULL;
    for (size_t i = 0; i < sizeof TABLE / sizeof *TABLE; i++)
        if (!strcmp(TABLE[i].base, name) && TABLE[i].since <= version)
            *(TABLE[i].per_thread ? &per_thread : &plain) = TABLE[i].function;
    *out = (flags & 2) && per_thread ? per_thread : plain;
    if (status) *status = *out ? 0 : 1;
    return *out ? OK : NOT_FOUND;
}
R cuGetProcAddress(const char *name, void **out, int version, H flags) {
    return cuGetProcAddress_v2(name, out, version, flags, NULL);
}
