// What one lane does and the compiler does not find by itself: any function of three words in one instruction.
#pragma once

// (word & mask) | rest, bit by bit. Where mask and rest are both known, the compiler makes two instructions of it, for
// one has room for a single constant. 0xEA is the function's table: its values for the eight cases of three bits.
__device__ __forceinline__ unsigned keep_or(unsigned word, unsigned mask, unsigned rest) {
#ifdef __CUDACC_RTC__
    unsigned result;
    asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(result) : "r"(word), "r"(mask), "r"(rest));
    return result;
#else
    return (word & mask) | rest;
#endif
}
