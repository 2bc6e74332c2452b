/* A tool that writes down what it is told: the other side of the interface, laid out by a C compiler.
 *
 * Each call becomes a line in the file that FAKE_TOOL_LOG names. A structure of another size than expected, or a batch that is
 * none of one element, becomes a line that begins with "bad".
 */
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

struct range { size_t size; const void *at; };

struct heap_description {
    uint16_t compat, struct_size;
    uint32_t reserved, usage, type;
    size_t range_size;
    const struct range *range;
    uint32_t category, name_type;
    const char *name;
};

struct register_batch {
    uint16_t compat, struct_size;
    uint32_t type;
    void *heap;
    size_t count, element_size;
    const struct range *elements;
    void **handles;
};

struct unregister_batch {
    uint16_t compat, struct_size;
    uint32_t reference_type;
    size_t count, element_size;
    void *const *elements;
};

struct region_name {
    uint32_t reference_type, name_type;
    const void *region;
    const char *name;
    uint32_t category, reserved;
};

struct name_batch {
    uint16_t compat, struct_size;
    uint32_t reserved;
    size_t count, element_size;
    const struct region_name *elements;
    size_t reserved_at_end;
};

struct segment { size_t id, slot_count; intptr_t *slots; };

struct module_info {
    uint16_t version, struct_size, module, compat;
    size_t segment_count;
    struct segment *segments;
    intptr_t (*export_function)(uint32_t);
    const void *extension_info;
};

struct callbacks {
    size_t struct_size;
    int (*module_table)(uint32_t module, void (***table[])(void), unsigned *size);
};

struct versions { size_t struct_size; uint32_t version, reserved; void (*set)(uint32_t); };

static FILE *log_file(void) {
    static FILE *file;
    if (!file) {
        const char *path = getenv("FAKE_TOOL_LOG");
        file = path ? fopen(path, "w") : NULL;
        if (!file) file = stderr;
        setvbuf(file, NULL, _IOLBF, 0);
    }
    return file;
}

static void check(const char *what, size_t size, size_t expected, unsigned compat) {
    if (size != expected || compat != 0x102)
        fprintf(log_file(), "bad %s: size %zu, not %zu, compat %#x\n", what, size, expected, compat);
}

static void *domain_create(const char *name) {
    fprintf(log_file(), "domain %s\n", name);
    return (void *)0xd0;
}

static void domain_destroy(void *domain) { fprintf(log_file(), "domain %p gone\n", domain); }

static void *heap_register(void *domain, const struct heap_description *heap) {
    check("heap", heap->struct_size, sizeof *heap, heap->compat);
    check("range", heap->range_size, sizeof *heap->range, 0x102);
    fprintf(log_file(), "heap %p at %p size %zu usage %u type %u name %u %s\n", domain, heap->range->at,
            heap->range->size, heap->usage, heap->type, heap->name_type, heap->name);
    /* Memory at these addresses is refused, in the two ways in which tools do that. */
    if (heap->range->at == (void *)0xbad000) return NULL;
    if (heap->range->at == (void *)0xbad001) return (void *)(intptr_t)-1;
    return (void *)0x4ea9;
}

static void heap_unregister(void *domain, void *heap) { fprintf(log_file(), "heap %p %p gone\n", domain, heap); }

static void regions_register(void *domain, const struct register_batch *batch) {
    check("register", batch->struct_size, sizeof *batch, batch->compat);
    check("register element", batch->element_size, sizeof *batch->elements, 0x102);
    for (size_t i = 0; i < batch->count; i++)
        fprintf(log_file(), "region %p of %p at %p size %zu type %u\n", domain, batch->heap, batch->elements[i].at,
                batch->elements[i].size, batch->type);
}

static void regions_unregister(void *domain, const struct unregister_batch *batch) {
    check("unregister", batch->struct_size, sizeof *batch, batch->compat);
    check("unregister element", batch->element_size, sizeof *batch->elements, 0x102);
    for (size_t i = 0; i < batch->count; i++)
        fprintf(log_file(), "region %p at %p by %u gone\n", domain, batch->elements[i], batch->reference_type);
}

static void regions_name(void *domain, const struct name_batch *batch) {
    check("name", batch->struct_size, sizeof *batch, batch->compat);
    check("name element", batch->element_size, sizeof *batch->elements, 0x102);
    for (size_t i = 0; i < batch->count; i++)
        fprintf(log_file(), "name %p of %p by %u is %u %s\n", domain, batch->elements[i].region,
                batch->elements[i].reference_type, batch->elements[i].name_type, batch->elements[i].name);
}

int InitializeInjectionNvtx2(const void *(*export_table)(uint32_t)) {
    const struct callbacks *callbacks = export_table(1);
    const struct versions *versions = export_table(3);
    void (***table)(void) = NULL;
    unsigned size = 0;
    if (!callbacks || callbacks->struct_size != sizeof *callbacks || !versions) return 0;
    versions->set(3);
    int known = callbacks->module_table(5, (void (***(*))(void))&table, &size);
    fprintf(log_file(), "core version %u domains %d of %u\n", versions->version, known, size);
    if (!known || size < 15) return 0;
    *table[12] = (void (*)(void))domain_create;
    *table[14] = (void (*)(void))domain_destroy;
    return 1;
}

int InitializeInjectionNvtxExtension(struct module_info *info) {
    check("module", info->struct_size, sizeof *info, info->compat);
    fprintf(log_file(), "extension %u version %u segments %zu segment %zu slots %zu\n", info->module, info->version,
            info->segment_count, info->segments->id, info->segments->slot_count);
    intptr_t *slots = info->segments->slots;
    slots[0] = (intptr_t)heap_register;
    slots[1] = (intptr_t)heap_unregister;
    slots[3] = (intptr_t)regions_register;
    slots[5] = (intptr_t)regions_unregister;
    slots[6] = (intptr_t)regions_name;
    return 1;
}
