// 05 kv_decode: one query against a cache of 8-bit keys and values, unpacked in registers on the way to tensor cores.
//
// A step of generation reads the whole cache once, so its bytes are its time: int8 or fp8 (e4m3) with one scale a head
// are half of fp16's. The saving is lost if unpacking costs more than the read. Here it costs little:
//   - int8 to fp16 takes no conversion: a byte b placed under 0x64 is the fp16 number 1024 + b, one `prmt` for two.
//   - A key's offset is the same for all keys, and softmax does not see what is added to all scores: left in.
//   - fp8 to fp16 is a shift of the fields; what it leaves of the exponent, a factor 2^8, goes into the scale.
//   - The scales multiply scores and outputs, not elements.
//   - Products take their operands' rows in any order if both take the same: so each lane loads 16 bytes as they lie in
//     memory, and no byte changes lanes.
// The query heads of a group, at most 8, are the 8 columns of the products. A warp takes 16 keys at a time; while it
// works on them, the next keys and these keys' values are on their way. Each warp keeps a state of the online softmax
// (lesson 07); a block merges its warps', and 06 the blocks' of a head.

#include "warp.cuh"

#ifndef FP8
#define FP8 0   // 0: int8, 1: e4m3
#define WARPS 4
#define BLOCKS 4  // of an SM, at least
#define KEYS 16   // of a warp's step
#endif
constexpr int D = 128, HEADS = 8;  // head dimension; columns of a product
constexpr float NONE = -1e30f;  // the maximum of no scores, as a power of two

// The two fp16 numbers of bytes i and j of x and y (byte 0 to 3 of x, 4 to 7 of y): byte + 1152, or e4m3 / 2^8.
template <int I, int J>
__device__ __forceinline__ unsigned widened(unsigned x, unsigned y) {
#if FP8
    const unsigned high = __byte_perm(x, y, I << 4 | J << 12);  // in the upper bytes; what is below goes
    return (high & 0x80008000) | (high >> 1 & 0x3f803f80);
#else
    const unsigned low = __byte_perm(x, y, I | J << 8);
    return (low & 0x00ff00ff) ^ 0x64806480;
#endif
}

// The four numbers of a word, in two pairs.
__device__ __forceinline__ void widen(unsigned (&pairs)[2], unsigned x) {
#if FP8
    pairs[0] = widened<0, 1>(x, 0), pairs[1] = widened<2, 3>(x, 0);
#else
    x ^= 0x80808080;
    pairs[0] = __byte_perm(x, 0x64, 0x4140), pairs[1] = __byte_perm(x, 0x64, 0x4342);
#endif
}

// As `widened`, but without the offset.
template <int I, int J>
__device__ __forceinline__ unsigned exact(unsigned x, unsigned y) {
    const unsigned pair = widened<I, J>(x, y);
#if FP8
    return pair;
#else
    const __half2 number = __hsub2(*reinterpret_cast<const __half2*>(&pair), __float2half2_rn(1152.0f));
    return *reinterpret_cast<const unsigned*>(&number);
#endif
}

__device__ __forceinline__ unsigned halves(float first, float second) {
    const __half2 pair = __floats2half2_rn(first, second);
    return *reinterpret_cast<const unsigned*>(&pair);
}

// Rows of 128 bytes from global memory to registers. A lane has 16 bytes of each.
struct Keys {
    uint4 of[KEYS / 8][2];  // key 8n + g: bytes 16c and 64 + 16c onwards
    __device__ __forceinline__ void load(const uint4* cache, int first, int last) {
        const int g = threadIdx.x % 32 / 4, c = threadIdx.x % 4;
#pragma unroll
        for (int n = 0; n < KEYS / 8; ++n) {
            const uint4* row = cache + (size_t)min(first + 8 * n + g, last - 1) * (D / 16);
            of[n][0] = __ldcs(row + c);
            of[n][1] = __ldcs(row + 4 + c);
        }
    }
};
struct Values {
    uint4 of[KEYS / 8][2];  // keys 8n + 2c and 8n + 2c + 1: bytes 16g onwards
    __device__ __forceinline__ void load(const uint4* cache, int first, int last) {
        const int g = threadIdx.x % 32 / 4, c = threadIdx.x % 4;
#pragma unroll
        for (int n = 0; n < KEYS / 8; ++n)
#pragma unroll
            for (int i = 0; i < 2; ++i)
                of[n][i] = __ldcs(cache + (size_t)min(first + 8 * n + 2 * c + i, last - 1) * (D / 16) + g);
    }
};

__device__ __forceinline__ unsigned word(const uint4& v, int i) {
    return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w;
}

// part (splits of a head side by side): D numbers of each; state: its maximum, as a power of two, and its sum.
extern "C" __global__ __launch_bounds__(32 * WARPS, BLOCKS)
void kv_decode(const __half* q, const uint4* k, const uint4* v, const float* k_scale, const float* v_scale,
            const int* lengths, float* part, float2* state, int tokens, int kv_heads, int group, float scale) {
    const int split = blockIdx.x, splits = gridDim.x, cache = blockIdx.y;  // cache: sequence * kv_heads + head
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
    const int length = min(lengths[cache / kv_heads], tokens);
    const int chunk = ((length + splits - 1) / splits + KEYS * WARPS - 1) / (KEYS * WARPS) * (KEYS * WARPS);
    const int begin = min(split * chunk, length), last = min(begin + chunk, length);
    const float by = scale * k_scale[cache] * (FP8 ? 256.0f : 1.0f);
    k += (size_t)cache * tokens * (D / 16);
    v += (size_t)cache * tokens * (D / 16);

    unsigned query[8][2];  // columns of this lane's words of a key, row g
#pragma unroll
    for (int j = 0; j < 8; ++j) {
        const __half* at = q + ((size_t)cache * group + g) * D + j / 4 * 64 + c * 16 + j % 4 * 4;
        query[j][0] = g < group ? *reinterpret_cast<const unsigned*>(at) : 0;
        query[j][1] = g < group ? *reinterpret_cast<const unsigned*>(at + 2) : 0;
    }
    float out[8][4] = {};  // [m]: dimension 16g + 2m, heads 2c and 2c + 1; the same of dimension 16g + 2m + 1
    float most = NONE, total = 0;  // of head g: this lane's part of the sum
    Keys keys;
    int first = begin + warp * KEYS;
    if (first < last) keys.load(k, first, last);
#pragma unroll 1
    for (; first < last; first += KEYS * WARPS) {
        Values values;
        values.load(v, first, last);
        float s[KEYS / 8][4] = {};  // [n]: head g, keys 8n + 2c and 8n + 2c + 1
#pragma unroll
        for (int j = 0; j < 8; ++j)
#pragma unroll
            for (int n = 0; n < KEYS / 8; ++n) {
                const unsigned a[4] = {query[j][0], 0, query[j][1], 0};
                unsigned b[2];
                widen(b, word(keys.of[n][j / 4], j % 4));
                mma(s[n], a, b);
            }
        if (first + KEYS * WARPS < last) keys.load(k, first + KEYS * WARPS, last);

        float larger = most;
#pragma unroll
        for (int n = 0; n < KEYS / 8; ++n)
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                s[n][i] = first + 8 * n + 2 * c + i < last ? s[n][i] * by : NONE;
                larger = fmaxf(larger, s[n][i]);
            }
        larger = fmaxf(larger, __shfl_xor_sync(~0u, larger, 1));
        larger = fmaxf(larger, __shfl_xor_sync(~0u, larger, 2));
        if (__any_sync(~0u, larger > most)) {
            const float shrink = exp2f(most - larger);
            const float of_even = __shfl_sync(~0u, shrink, 8 * c), of_odd = __shfl_sync(~0u, shrink, 8 * c + 4);
            total *= shrink;
            most = larger;
#pragma unroll
            for (int m = 0; m < 8; ++m)
#pragma unroll
                for (int i = 0; i < 4; ++i) out[m][i] *= i % 2 ? of_odd : of_even;
        }
        unsigned p[KEYS / 8];
#pragma unroll
        for (int n = 0; n < KEYS / 8; ++n) {
            const float one = exp2f(s[n][0] - most), two = exp2f(s[n][1] - most);
            total += one + two;
            p[n] = halves(one, two);
        }
#pragma unroll
        for (int n = 0; n < KEYS / 8; n += 2)
#pragma unroll
            for (int m = 0; m < 8; ++m) {
                const unsigned w = word(values.of[n][0], m / 2), x = word(values.of[n][1], m / 2);
                const unsigned y = word(values.of[n + 1][0], m / 2), z = word(values.of[n + 1][1], m / 2);
                const unsigned b[2] = {p[n], p[n + 1]};
                if (m % 2 == 0) {
                    const unsigned a[4] = {exact<0, 4>(w, x), exact<1, 5>(w, x), exact<0, 4>(y, z), exact<1, 5>(y, z)};
                    mma(out[m], a, b);
                } else {
                    const unsigned a[4] = {exact<2, 6>(w, x), exact<3, 7>(w, x), exact<2, 6>(y, z), exact<3, 7>(y, z)};
                    mma(out[m], a, b);
                }
            }
    }
    total += __shfl_xor_sync(~0u, total, 1);
    total += __shfl_xor_sync(~0u, total, 2);

    __shared__ float outs[WARPS][HEADS][D];
    __shared__ float mosts[WARPS][HEADS], totals[WARPS][HEADS];
#pragma unroll
    for (int m = 0; m < 8; ++m)
#pragma unroll
        for (int i = 0; i < 4; ++i) outs[warp][2 * c + i % 2][16 * g + 2 * m + i / 2] = out[m][i];
    if (c == 0) mosts[warp][g] = most, totals[warp][g] = total;
    __syncthreads();
    for (int i = threadIdx.x; i < group * D; i += 32 * WARPS) {
        const int head = i / D, d = i % D;
        float top = NONE, sum = 0, o = 0;
        for (int w = 0; w < WARPS; ++w) top = fmaxf(top, mosts[w][head]);
        for (int w = 0; w < WARPS; ++w) {
            const float weight = exp2f(mosts[w][head] - top);
            sum += totals[w][head] * weight;
            o += outs[w][head][d] * weight;
        }
        const size_t place = ((size_t)cache * group + head) * splits + split;
        part[place * D + d] = o * v_scale[cache] * (FP8 ? 256.0f : 1.0f);
        if (d == 0) state[place] = make_float2(top, sum);
    }
}
