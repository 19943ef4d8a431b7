// What attention needs of sm_90a beyond 09_gemm/hopper.cuh: tiles of 128 columns, operands of products in registers.
#pragma once
#include "hopper.cuh"

// A tile of a map (head, half, row, 64 columns), both halves.
__device__ __forceinline__ void load_tile(u32 to, const TensorMap& map, u32 barrier, int row, int head) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
        " [%0], [%1, {%3, %4, %3, %5}], [%2];"
        ::"r"(to), "l"(&map), "r"(barrier), "r"(0), "r"(row), "r"(head) : "memory");
}

__device__ __forceinline__ void store_tile(const TensorMap& map, u32 from, int row, int head) {
    asm volatile(
        "cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %2, %4}], [%1];\n"
        "cp.async.bulk.commit_group;"
        ::"l"(&map), "r"(from), "r"(0), "r"(row), "r"(head) : "memory");
}

// A tile of V, whose rows are the products' K: 16384 bytes from 64 columns to the next 64, 1024 from 8 rows to 8 more.
__device__ __forceinline__ u64 describe_rows(u32 tile) {
    return (tile & 0x3ffff) >> 4 | 1024ull << 16 | 64ull << 32 | 1ull << 62;
}

// d = a @ b or d + a @ b, a from registers: 64 x 16, b: 16 rows of 128. Asynchronous.
#define F4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define F16(i) F4(i), F4(i + 4), F4(i + 8), F4(i + 12)
__device__ __forceinline__ void multiply_rows(float (&d)[64], const u32* a, u64 b, bool add) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %69, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32." PTX_TYPE "." PTX_TYPE " {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
        "}, {%64, %65, %66, %67}, %68, p, 1, 1, 1;\n}"
        : F16(0), F16(16), F16(32), F16(48)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((int)add));
}
#undef F16
#undef F4

__device__ __forceinline__ float exp2_approx(float x) {
    asm("ex2.approx.ftz.f32 %0, %0;" : "+f"(x));
    return x;
}

// Nothing that makes these numbers is moved below this line, and nothing that uses them above it.
template <int R>
__device__ __forceinline__ void settle(u32 (&numbers)[R]) {
#pragma unroll
    for (int i = 0; i < R; ++i) asm volatile("" : "+r"(numbers[i])::"memory");
}
