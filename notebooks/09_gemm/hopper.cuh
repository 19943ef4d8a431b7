// What CUDA C has no words for: instructions of sm_90a as functions, for rungs 12 and up. PTX's manual has them all.
//
// Addresses in shared memory are 32 bits. ELEMENT is __nv_bfloat16 or __half; y is written two elements at a time.
#pragma once

typedef unsigned int u32;
typedef unsigned long long u64;

#define TYPE_OF___nv_bfloat16 "bf16"
#define TYPE_OF___half "f16"
#define TYPE_OF_(element) TYPE_OF_##element
#define TYPE_OF(element) TYPE_OF_(element)
#ifndef ELEMENT
#define ELEMENT __nv_bfloat16
#endif
#define PTX_TYPE TYPE_OF(ELEMENT)

struct alignas(64) TensorMap {  // what the copy engine is told of a matrix: written by the driver, passed by value
    u64 opaque[16];
};

__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

// A tile of 128-byte rows must begin at a multiple of 1024 bytes: eight rows, after which the swizzle repeats.
__device__ __forceinline__ u32 aligned(const void* p) { return (shared_address(p) + 1023) & ~1023u; }

// --- mbarriers: a phase ends when all arrivals and all expected bytes are there ----------------------------------
__device__ __forceinline__ void init_barrier(u32 barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// What was initialised is seen by the copy engine and, after the next barrier, by the blocks of the cluster.
__device__ __forceinline__ void barriers_ready() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

__device__ __forceinline__ void arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Arrive at the same barrier of another block of the cluster. Relaxed: nothing was written that it should see.
__device__ __forceinline__ void arrive_at(u32 barrier, int block) {
    asm volatile(
        "{\n.reg .b32 there;\nmapa.shared::cluster.u32 there, %0, %1;\n"
        "mbarrier.arrive.relaxed.cluster.shared::cluster.b64 _, [there];\n}" ::"r"(barrier), "r"(block) : "memory");
}

__device__ __forceinline__ void arrive_expecting(u32 barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// Returns when the phase of this parity is over. A new barrier counts as if one of parity 1 had just ended.
__device__ __forceinline__ void wait(u32 barrier, int parity) {
    asm volatile(
        "{\n.reg .pred over;\nagain:\nmbarrier.try_wait.parity.shared::cta.b64 over, [%0], %1;\n@!over bra again;\n}"
        ::"r"(barrier), "r"(parity) : "memory");
}

// --- the copy engine, TMA: one thread asks for a whole tile ------------------------------------------------------
__device__ __forceinline__ void load(u32 to, const TensorMap& map, u32 barrier, int column, int row) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];"
        ::"r"(to), "l"(&map), "r"(barrier), "r"(column), "r"(row) : "memory");
}

// The same tile to the same place in all blocks of the cluster; the bytes are counted by the barrier of each.
__device__ __forceinline__ void load_for_all(u32 to, const TensorMap& map, u32 barrier, int column, int row,
                                             int blocks) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster"
        " [%0], [%1, {%3, %4}], [%2], %5;"
        ::"r"(to), "l"(&map), "r"(barrier), "r"(column), "r"(row), "h"((unsigned short)((1 << blocks) - 1)) : "memory");
}

__device__ __forceinline__ void store(const TensorMap& map, u32 from, int column, int row) {
    asm volatile(
        "cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%2, %3}], [%1];\ncp.async.bulk.commit_group;"
        ::"l"(&map), "r"(from), "r"(column), "r"(row) : "memory");
}

// Returns when all but the last N stores of this thread have read shared memory.
template <int N>
__device__ __forceinline__ void stores_have_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(N) : "memory");
}

// What this thread wrote to shared memory, the copy engine and the tensor cores see.
__device__ __forceinline__ void written_for_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// --- wgmma: four warps multiply tiles that lie in shared memory --------------------------------------------------
// Describes a tile of 128-byte rows, swizzled as TMA swizzles them: its address, 1024 bytes from 8 rows to the next 8,
// the swizzle; addresses in units of 16 bytes. The next 16 elements along K are 32 bytes further: descriptor + 2.
__device__ __forceinline__ u64 describe(u32 tile) {
    return (tile & 0x3ffff) >> 4 | 1ull << 16 | 64ull << 32 | 1ull << 62;
}

__device__ __forceinline__ void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void end_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Returns when all but the last N groups of products are done.
template <int N>
__device__ __forceinline__ void wait_for_products() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}

// Nothing that uses these sums is moved above this line.
template <int R>
__device__ __forceinline__ void settle(float (&sums)[R]) {
#pragma unroll
    for (int i = 0; i < R; ++i) asm volatile("" : "+f"(sums[i])::"memory");
}

// d = a @ b.T, or d + a @ b.T: 16 elements along K. Asynchronous.
#define F4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define F8(i) F4(i), F4(i + 4)

__device__ __forceinline__ void multiply(float (&d)[32], u64 a, u64 b, bool add) {  // 64 x 64 sums of a warpgroup
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32." PTX_TYPE "." PTX_TYPE " {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
        "}, %32, %33, p, 1, 1, 0, 0;\n}"
        : F8(0), F8(8), F8(16), F8(24)
        : "l"(a), "l"(b), "r"((int)add));
}

__device__ __forceinline__ void multiply(float (&d)[64], u64 a, u64 b, bool add) {  // 64 x 128 sums of a warpgroup
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32." PTX_TYPE "." PTX_TYPE " {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
        "}, %64, %65, p, 1, 1, 0, 0;\n}"
        : F8(0), F8(8), F8(16), F8(24), F8(32), F8(40), F8(48), F8(56)
        : "l"(a), "l"(b), "r"((int)add));
}

__device__ __forceinline__ void multiply(float (&d)[96], u64 a, u64 b, bool add) {  // 64 x 192 sums of a warpgroup
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %98, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n192k16.f32." PTX_TYPE "." PTX_TYPE " {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "
        "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "
        "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
        "}, %96, %97, p, 1, 1, 0, 0;\n}"
        : F8(0), F8(8), F8(16), F8(24), F8(32), F8(40), F8(48), F8(56),
          F8(64), F8(72), F8(80), F8(88)
        : "l"(a), "l"(b), "r"((int)add));
}

__device__ __forceinline__ void multiply(float (&d)[128], u64 a, u64 b, bool add) {  // 64 x 256 sums of a warpgroup
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %130, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n256k16.f32." PTX_TYPE "." PTX_TYPE " {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "
        "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "
        "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "
        "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, "
        "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
        "}, %128, %129, p, 1, 1, 0, 0;\n}"
        : F8(0), F8(8), F8(16), F8(24), F8(32), F8(40), F8(48), F8(56),
          F8(64), F8(72), F8(80), F8(88), F8(96), F8(104), F8(112), F8(120)
        : "l"(a), "l"(b), "r"((int)add));
}

#undef F8
#undef F4

// --- sums to y ---------------------------------------------------------------------------------------------------
__device__ __forceinline__ u32 pack(float first, float second) {  // two elements, as they lie in memory
    u32 pair;
    asm("cvt.rn." PTX_TYPE "x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
    return pair;
}

__device__ __forceinline__ void unpack(u32 pair, float& first, float& second) {
    asm("{\n.reg .b16 a, b;\nmov.b32 {a, b}, %2;\ncvt.f32." PTX_TYPE " %0, a;\ncvt.f32." PTX_TYPE " %1, b;\n}"
        : "=f"(first), "=f"(second) : "r"(pair));
}

__device__ __forceinline__ float tanh_approx(float x) {  // one instruction; off by up to 2^-11 of its value
    asm("tanh.approx.f32 %0, %0;" : "+f"(x));
    return x;
}

// The 64 x 2R sums of a warpgroup from registers to y[row:, column:]. A warp holds 16 rows; a thread holds two columns
// of each eight, in two rows.
template <int R>
__device__ __forceinline__ void write(const float (&sums)[R], u32* y, int row, int column, int M, int N) {
    row += threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
    column += threadIdx.x % 4 * 2;
    u32* upper = y + ((size_t)row * N + column) / 2;
    u32* lower = upper + (size_t)4 * N;
#pragma unroll
    for (int j = 0; j < R / 4; ++j) {
        if (column + 8 * j >= N) break;
        if (row < M) upper[4 * j] = pack(sums[4 * j], sums[4 * j + 1]);
        if (row + 8 < M) lower[4 * j] = pack(sums[4 * j + 2], sums[4 * j + 3]);
    }
}

// Four 8 x 8 matrices of elements to shared memory, each lane giving the address of one row of one of them.
__device__ __forceinline__ void store_matrices(u32 to, u32 a, u32 b, u32 c, u32 d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
                 ::"r"(to), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}

// The same four, each transposed: a lane gives the address of a column of the registers' matrix.
__device__ __forceinline__ void store_transposed(u32 to, u32 a, u32 b, u32 c, u32 d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};"
                 ::"r"(to), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}

// --- threads -----------------------------------------------------------------------------------------------------
__device__ __forceinline__ void sync_warpgroup(int name) { asm volatile("bar.sync %0, 128;" ::"r"(name) : "memory"); }

// Two consumers in turns: take_turn(me) returns when the other has given it the turn.
__device__ __forceinline__ void take_turn(int me) { asm volatile("bar.sync %0, 256;" ::"r"(1 + me) : "memory"); }
__device__ __forceinline__ void give_turn(int it) { asm volatile("bar.arrive %0, 256;" ::"r"(1 + it) : "memory"); }

// A warpgroup's threads get N registers each, more or fewer than they were launched with.
template <int N>
__device__ __forceinline__ void more_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N)); }
template <int N>
__device__ __forceinline__ void fewer_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N)); }

__device__ __forceinline__ int rank_in_cluster() {
    int rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

__device__ __forceinline__ void sync_cluster() {
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
