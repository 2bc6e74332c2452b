// A CUDA program that does what its standard input says, one command a line, and answers each with one line. It finds the driver's
// functions as its first argument says: linked, dlsym, proc (CUDA 11's cuGetProcAddress), proc2 (CUDA 12's), per-thread (proc2, with
// per-thread default streams). Compiled with LINKED it has the driver as a dependency.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <libgen.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

typedef uint64_t H;
typedef int (*Fn)(H, H, H, H, H);
typedef int (*Find)(const char *, void **, int, H);
typedef int (*Find2)(const char *, void **, int, H, int *);

static const char *mode;
static void *library;

static void *proc(const char *base, int version, H flags) {
    void *found = NULL;
    if (!strcmp(mode, "proc")) ((Find)dlsym(library, "cuGetProcAddress"))(base, &found, version, flags);
    else ((Find2)dlsym(library, "cuGetProcAddress_v2"))(base, &found, version, flags, NULL);
    return found;
}

#ifdef LINKED
#define LINK(name) extern int name();
#include "linked.h"
#undef LINK
static void *linked(const char *symbol) {
#define LINK(name) if (!strcmp(symbol, #name)) return (void *)name;
#include "linked.h"
    return NULL;
}
#else
static void *linked(const char *symbol) { return NULL; }
#endif

static Fn get(const char *symbol) {
    char base[64];
    strncpy(base, symbol, sizeof base - 1);
    char *version = strstr(base, "_v2");
    if (version) *version = 0;
    void *found = !strcmp(mode, "linked") ? linked(symbol) : !strcmp(mode, "dlsym") ? dlsym(library, symbol)
        : proc(base, strcmp(mode, "proc") ? 12050 : 11040, !strcmp(mode, "per-thread") ? 2 : 0);
    if (!found) { fprintf(stderr, "no %s\n", symbol); exit(9); }
    return (Fn)found;
}

static const char *object(void *address) {
    Dl_info info;
    return address && dladdr(address, &info) ? basename((char *)info.dli_fname) : "none";
}

// One byte at a time, so that a forked child goes on where its parent stopped.
static int line(char *text, size_t size) {
    size_t n = 0;
    while (n + 1 < size && read(0, text + n, 1) == 1) if (text[n++] == '\n') { text[n - 1] = 0; return 1; }
    return 0;
}

static void perform(const char *text, FILE *answer);

// Commands on other threads, each with the answer that it gave.
static struct { pthread_t thread; char text[256], *answer; size_t length; } others[8];
static int started;
static void *perform_other(void *at) {
    int i = (int)(intptr_t)at;
    FILE *answer = open_memstream(&others[i].answer, &others[i].length);
    perform(others[i].text, answer);
    fclose(answer);
    return NULL;
}
// Calls of the fake driver that wait inside it.
static H fake(const char *symbol, const char *call, int fails) { return ((H (*)(const char *, int))dlsym(library, symbol))(call, fails); }

static void perform(const char *text, FILE *answer) {
    char word[64], name[64];
    H a = 0, b = 0, c = 0, out = 0, second = 0;
    sscanf(text, "%63s %li %li %li", word, (long *)&a, (long *)&b, (long *)&c);
#define IS(x) (!strcmp(word, x))
#define SAY(result) do { int r = (result); fprintf(answer, "%d 0x%lx\n", r, (unsigned long)out); } while (0)
    int on_device[8] = {1, 0, 1, c}, on_host[8] = {1, 0, 2, 0};
    struct { size_t width, height; unsigned format, channels; } flat = {a, b, 1, 1};
    struct { size_t width, height, depth; unsigned format, channels, flags; } cubic = {a, b, 1, 1, 1, c};
    if (IS("init")) {
        get("cuInit")(0, 0, 0, 0, 0);
        get("cuDevicePrimaryCtxRetain")((H)&out, 0, 0, 0, 0);
        SAY(get("cuCtxSetCurrent")(out, 0, 0, 0, 0));
    }
    else if (IS("alloc")) SAY(get("cuMemAlloc_v2")((H)&out, a, 0, 0, 0));
    // By the CUDA runtime, for this program and for a library.
    else if (IS("forward")) SAY(((int (*)(Fn, H, H))dlsym(dlopen("libcudart.so.12", RTLD_NOW), "forward"))(get("cuMemAlloc_v2"), (H)&out, a));
    else if (IS("ask")) {
        void *forward = dlsym(dlopen("libcudart.so.12", RTLD_NOW), "forward");
        SAY(((int (*)(void *, Fn, H, H))dlsym(dlopen("libother.so", RTLD_NOW), "ask"))(forward, get("cuMemAlloc_v2"), (H)&out, a));
    }
    else if (IS("managed")) SAY(get("cuMemAllocManaged")((H)&out, a, 1, 0, 0));
    else if (IS("pitch")) SAY(get("cuMemAllocPitch_v2")((H)&out, (H)&second, a, b, 4));
    else if (IS("free")) SAY(get("cuMemFree_v2")(a, 0, 0, 0, 0));
    else if (IS("async")) SAY(get("cuMemAllocAsync")((H)&out, a, b, 0, 0));
    else if (IS("from")) SAY(get("cuMemAllocFromPoolAsync")((H)&out, a, b, c, 0));
    else if (IS("free-async")) SAY(get("cuMemFreeAsync")(a, b, 0, 0, 0));
    else if (IS("sync")) SAY(get("cuStreamSynchronize")(a, 0, 0, 0, 0));
    else if (IS("sync-event")) SAY(get("cuEventSynchronize")(a, 0, 0, 0, 0));
    else if (IS("sync-context")) SAY(get("cuCtxSynchronize")(0, 0, 0, 0, 0));
    else if (IS("pool")) SAY(get("cuMemPoolCreate")((H)&out, (H)(a ? on_host : on_device), 0, 0, 0));
    else if (IS("use-pool")) SAY(get("cuDeviceSetMemPool")(0, a, 0, 0, 0));
    else if (IS("use-pool-at")) SAY(get("cuMemSetMemPool")((H)&on_device[2], 1, a, 0, 0));
    else if (IS("destroy-pool")) SAY(get("cuMemPoolDestroy")(a, 0, 0, 0, 0));
    else if (IS("trim")) SAY(get("cuMemPoolTrimTo")(a, b, 0, 0, 0));
    else if (IS("create")) SAY(get("cuMemCreate")((H)&out, a, (H)(b ? on_host : on_device), 0, 0));
    else if (IS("release")) SAY(get("cuMemRelease")(a, 0, 0, 0, 0));
    else if (IS("map")) SAY(get("cuMemMap")(a, b, 0, c, 0));
    else if (IS("unmap")) SAY(get("cuMemUnmap")(a, b, 0, 0, 0));
    else if (IS("retain")) SAY(get("cuMemRetainAllocationHandle")((H)&out, a, 0, 0, 0));
    else if (IS("array")) SAY(get("cuArrayCreate_v2")((H)&out, (H)&flat, 0, 0, 0));
    else if (IS("cubic")) SAY(get("cuArray3DCreate_v2")((H)&out, (H)&cubic, 0, 0, 0));
    else if (IS("mipmapped")) SAY(get("cuMipmappedArrayCreate")((H)&out, (H)&cubic, 2, 0, 0));
    else if (IS("destroy-array")) SAY(get("cuArrayDestroy")(a, 0, 0, 0, 0));
    else if (IS("destroy-mipmapped")) SAY(get("cuMipmappedArrayDestroy")(a, 0, 0, 0, 0));
    else if (IS("graph")) SAY(((int (*)(H *, size_t, H))dlsym(library, "fakeGraph"))(&out, a, b));
    else if (IS("instantiate")) SAY(get("cuGraphInstantiateWithFlags")((H)&out, a, 0, 0, 0));
    else if (IS("instantiate-short")) SAY(get(strcmp(mode, "dlsym") && strcmp(mode, "linked") ? "cuGraphInstantiate" : "cuGraphInstantiate_v2")((H)&out, a, 0, 0, 0));
    else if (IS("launch")) SAY(get("cuGraphLaunch")(a, b, 0, 0, 0));
    else if (IS("upload")) SAY(get("cuGraphUpload")(a, b, 0, 0, 0));
    else if (IS("destroy-executable")) SAY(get("cuGraphExecDestroy")(a, 0, 0, 0, 0));
    else if (IS("capture")) { ((void (*)(int))dlsym(library, "fakeCapture"))(a); SAY(0); }
    else if (IS("broken")) fprintf(answer, "%d\n", ((int (*)(void))dlsym(library, "fakeBroken"))());
    else if (IS("trims-idle")) { ((void (*)(int))dlsym(library, "fakeTrimsIdle"))(a); SAY(0); }
    else if (IS("trim-graphs")) SAY(get("cuDeviceGraphMemTrim")(0, 0, 0, 0, 0));
    else if (IS("context")) SAY(get("cuCtxCreate_v2")((H)&out, 0, 0, 0, 0));
    else if (IS("current")) SAY(get("cuCtxSetCurrent")(a, 0, 0, 0, 0));
    else if (IS("destroy-context")) SAY(get("cuCtxDestroy_v2")(a, 0, 0, 0, 0));
    else if (IS("reset")) SAY(get("cuDevicePrimaryCtxReset_v2")(0, 0, 0, 0, 0));
    else if (IS("info")) {
        int r = get("cuMemGetInfo_v2")((H)&out, (H)&second, 0, 0, 0);
        fprintf(answer, "%d %lu %lu\n", r, (unsigned long)out, (unsigned long)second);
    }
    else if (IS("total")) { int r = get("cuDeviceTotalMem_v2")((H)&out, 0, 0, 0, 0); fprintf(answer, "%d %lu\n", r, (unsigned long)out); }
    else if (IS("used")) fprintf(answer, "%lu\n", (unsigned long)((size_t (*)(void))dlsym(library, "fakeUsed"))());
    else if (IS("calls")) fprintf(answer, "%d\n", ((int (*)(void))dlsym(library, "fakeCalls"))());
    else if (IS("queries")) fprintf(answer, "%d\n", ((int (*)(void))dlsym(library, "fakeQueries"))());
    else if (IS("asks")) fprintf(answer, "%d\n", ((int (*)(void))dlsym(library, "fakeAsks"))());
    else if (IS("graph-step")) { ((void (*)(size_t))dlsym(library, "fakeGraphStep"))(a); SAY(0); }
    else if (IS("leave")) SAY(((int (*)(H *, H))dlsym(library, "fakeLeave"))(&out, a));
    else if (IS("trims")) fprintf(answer, "%d\n", ((int (*)(void))dlsym(library, "fakeTrims"))());
    else if (IS("freed-on")) { out = ((H (*)(void))dlsym(library, "fakeFreedOn"))(); SAY(0); }
    // Where lookups lead to.
    else if (IS("where")) {
        sscanf(text, "%*s %63s %li %li", name, (long *)&a, (long *)&b);
        fprintf(answer, "%s\n", object(proc(name, a, b)));
    }
    else if (IS("symbol")) { sscanf(text, "%*s %63s", name); fprintf(answer, "%s\n", object(dlsym(library, name))); }
    else if (IS("default")) { sscanf(text, "%*s %63s", name); fprintf(answer, "%s\n", object(dlsym(RTLD_DEFAULT, name))); }
    else if (IS("next")) { sscanf(text, "%*s %63s", name); fprintf(answer, "%s\n", object(dlsym(RTLD_NEXT, name))); }
    else if (IS("self")) { sscanf(text, "%*s %63s", name); fprintf(answer, "%s\n", object(dlsym(dlopen(NULL, RTLD_NOW), name))); }
    else if (IS("threads")) {
        int tasks = 0; char entry[256]; FILE *status = fopen("/proc/self/status", "r");
        while (fgets(entry, sizeof entry, status)) sscanf(entry, "Threads: %d", &tasks);
        fclose(status);
        fprintf(answer, "%d\n", tasks);
    }
    else if (IS("fork")) {
        pid_t child = fork();
        if (child) { int status; waitpid(child, &status, 0); fprintf(answer, "%d\n", status); }
        else fprintf(answer, "child %d\n", getpid());
    }
    // The same program anew, in the same process.
    else if (IS("exec")) { SAY(0); execl("/proc/self/exe", "again", mode, NULL); }
    else if (IS("reuse")) { ((void (*)(H))dlsym(library, "fakeReuse"))(a); SAY(0); }
    // Finds a function, closes the driver and opens it again at another address.
    else if (IS("reload")) {
        void *first = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
        Dl_info info;
        dladdr(dlsym(first, "fakeUsed"), &info);
        dlsym(first, "cuMemAlloc_v2");
        dlclose(first);
        mmap(info.dli_fbase, 1 << 16, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);
        library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
        SAY(library == NULL);
    }
    // The next call of the function waits inside the driver, until "go"; "arrived" waits for it and answers its pool or address. With
    // "fail" instead of "hold" the call fails then.
    else if (IS("hold") || IS("fail")) { sscanf(text, "%*s %63s", name); fake("fakeHold", name, IS("fail")); SAY(0); }
    else if (IS("arrived")) { sscanf(text, "%*s %63s", name); out = fake("fakeArrived", name, 0); SAY(0); }
    else if (IS("go")) { sscanf(text, "%*s %63s", name); fake("fakeGo", name, 0); SAY(0); }
    // Begins a command on another thread; "join" waits for it and gives its answer.
    else if (IS("begin")) {
        strcpy(others[started].text, text + sizeof "begin");
        pthread_create(&others[started].thread, NULL, perform_other, (void *)(intptr_t)started);
        out = started++;
        SAY(0);
    }
    else if (IS("join")) { pthread_join(others[a].thread, NULL); fputs(others[a].answer, answer); }
    else if (IS("exit")) exit((int)a);
    else { fprintf(answer, "what?\n"); }
}

int main(int count, char **arguments) {
    mode = arguments[1];
    setvbuf(stdout, NULL, _IOLBF, 0);
    if (strcmp(mode, "late")) library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    char text[256];
    while (line(text, sizeof text)) perform(text, stdout);
    return 0;
}
