/* A bridge with the functions of bench/peers/rmm_bridge.cu and no RMM: memory comes from whoever installed itself, so that the Rust
   side can be tested on a simulated device. */

#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#ifndef FAKE_VERSION
#define FAKE_VERSION 1
#endif

typedef int (*allocate_function)(void *context, size_t bytes, void *stream, uint64_t *ptr);
typedef int (*deallocate_function)(void *context, uint64_t ptr, void *stream);

static allocate_function allocate_with;
static deallocate_function deallocate_with;
/* How many frees fail from now on. */
static int failures;

void fake_install(allocate_function allocate, deallocate_function deallocate)
{
  allocate_with   = allocate;
  deallocate_with = deallocate;
}

void fake_fail_frees(int count) { failures = count; }

uint32_t xlog_rmm_version(void) { return FAKE_VERSION; }

void *xlog_rmm_open(char const *kind, uint32_t ordinal, size_t initial, char *message, size_t room)
{
  (void)ordinal;
  if (initial == 1) {
    snprintf(message, room, "no %s today", kind);
    return NULL;
  }
  return malloc(1);
}

void xlog_rmm_close(void *resource) { free(resource); }

int xlog_rmm_allocate(void *resource, size_t bytes, void *stream, uint64_t *ptr, char *message, size_t room)
{
  int status = allocate_with(resource, bytes, stream, ptr);
  if (status != 0) { snprintf(message, room, "the fake has no %zu bytes", bytes); }
  return status;
}

int xlog_rmm_deallocate(void *resource, uint64_t ptr, size_t bytes, void *stream, char *message, size_t room)
{
  (void)bytes;
  if (failures > 0) {
    --failures;
    snprintf(message, room, "the fake fails this free");
    return 2;
  }
  return deallocate_with(resource, ptr, stream);
}
