// 06 kv_combine: the states of one head's splits, merged as lesson 07 merges two: the largest maximum counts.
//
// A block a head, a thread a dimension. It is a kernel of its own because the splits of a head end in any order.

#include <cuda_fp16.h>

constexpr int D = 128;

// part (heads, splits, D): weighted sums of values; state (heads, splits): their maximum, as a power of two, and the
// weights' sum -> out (heads, D); of no tokens the output is 0.
extern "C" __global__ __launch_bounds__(D)
void kv_combine(const float* part, const float2* state, __half* out, int splits) {
    const size_t head = blockIdx.x;
    part += head * splits * D + threadIdx.x;
    state += head * splits;
    float top = -1e30f, sum = 0, o = 0;
    for (int i = 0; i < splits; ++i) top = fmaxf(top, state[i].x);
    for (int i = 0; i < splits; ++i) {
        const float weight = exp2f(state[i].x - top);
        sum += state[i].y * weight;
        o += part[i * D] * weight;
    }
    out[head * D + threadIdx.x] = __float2half(sum > 0 ? o / sum : 0.0f);
}
