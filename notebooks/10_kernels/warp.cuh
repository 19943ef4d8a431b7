// What one warp does together and CUDA C has no words for: a product on tensor cores.
#pragma once
#include <cuda_fp16.h>

// d += a @ b, a of 16 x 16 fp16, b of 16 x 8, d of 16 x 8 sums in fp32, spread over the warp's lanes. With g = lane / 4
// and c = lane % 4, two fp16 in a register:
//   a[0], a[1], a[2], a[3]: rows g, g + 8, g, g + 8; columns 2c and 2c + 1, the last two 8 further
//   b[0], b[1]:             column g; rows 2c and 2c + 1, the second 8 further
//   d[0..1], d[2..3]:       rows g, g + 8; columns 2c and 2c + 1
__device__ __forceinline__ void mma(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
#ifdef __CUDACC_RTC__
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32"
        " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#else  // the same in words of C: each lane asks the others for the elements of its rows and columns
    const int g = threadIdx.x % 32 / 4, c = threadIdx.x % 4;
    for (int k = 0; k < 16; ++k) {
        const int owner = k % 8 / 2;
        float rows[2], columns[2];
        for (int i = 0; i < 2; ++i) {
            const unsigned x = __shfl_sync(~0u, a[k / 8 * 2 + i], g * 4 + owner);
            const unsigned y = __shfl_sync(~0u, b[k / 8], (2 * c + i) * 4 + owner);
            rows[i] = __half2float(__ushort_as_half(x >> 16 * (k % 2)));
            columns[i] = __half2float(__ushort_as_half(y >> 16 * (k % 2)));
        }
        for (int i = 0; i < 4; ++i) d[i] += rows[i / 2] * columns[i % 2];
    }
#endif
}
