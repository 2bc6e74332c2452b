// A library that calls the driver for others, and one that asks it: the same source under two names.
#include <stdint.h>

typedef uint64_t H;
typedef int (*Fn)(H, H, H, H, H);

int forward(Fn call, H a, H b) {
    int result = call(a, b, 0, 0, 0);
    __asm__ volatile("");  // Not a tail call: the frame stays on the stack.
    return result;
}
int ask(int (*forward)(Fn, H, H), Fn call, H a, H b) {
    int result = forward(call, a, b);
    __asm__ volatile("");
    return result;
}
