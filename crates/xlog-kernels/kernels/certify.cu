// Single accesses, right or wrong, for showing which checker notices.

// Writes one byte.
extern "C" __global__ void poke(unsigned char *at, unsigned int value) {
    *at = static_cast<unsigned char>(value);
}

// Copies one byte.
extern "C" __global__ void carry(unsigned char *to, const unsigned char *from) {
    *to = *from;
}
