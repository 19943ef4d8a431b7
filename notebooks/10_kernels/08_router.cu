// 08 router: softmax, top-k, counts and permutation for a mixture of experts; warps vote, blocks wait once.
//
// With libraries these are half a dozen kernels, each as long as its launch. Here a warp has a token: a lane holds the
// scores of a few neighbouring experts. The k best are found in k rounds of a maximum over the warp (`redux`, one
// instruction) and a ballot that says who has it; of equals the expert of lower number wins, always. A block has 32
// tokens, so one 32-bit word an expert says which of them chose it: bits below one's own are one's rank, all bits the
// count. Where an expert's tokens begin depends on all tokens: the blocks write their counts, wait for one another,
// and each adds up what stands before it.
// All blocks must be running at once to wait for one another: there are no more of them than SMs, and one such kernel
// runs at a time. The order of tokens is that of their numbers, so the same input gives the same output, always.

#ifndef EXPERTS
#define EXPERTS 64
#define TOP_K 8
#endif
constexpr int PER_LANE = (EXPERTS + 31) / 32, THREADS = 1024, PARTS = THREADS / EXPERTS;
static_assert(EXPERTS <= THREADS / 2 && TOP_K <= EXPERTS && TOP_K <= 32, "a lane an expert of a token");

__device__ unsigned arrived, generation;  // of the barrier of all blocks; `arrived` is 0 when none waits

__device__ void sync_blocks() {
    __syncthreads();
    if (threadIdx.x == 0) {
        const unsigned before = *(volatile unsigned*)&generation;
        __threadfence();
        if (atomicInc(&arrived, gridDim.x - 1) == gridDim.x - 1) {  // the last one: back to 0
            atomicAdd(&generation, 1);
        } else {
            while (*(volatile unsigned*)&generation == before) {}
        }
        __threadfence();
    }
    __syncthreads();
}

// Unsigned numbers in the order of floats: -0 and 0 the same, NaN the largest. None is 0.
__device__ unsigned rank_of(float x) {
    const unsigned bits = __float_as_uint(x + 0.0f);
    return x != x ? ~0u : bits >> 31 ? ~bits : bits | 1u << 31;
}

// logits (tokens, EXPERTS) -> weights, experts (tokens, TOP_K): the largest of the softmax, in falling order; counts
// (EXPERTS): how often each was chosen; order (tokens * TOP_K): which choices (token * TOP_K + place among its own) go
// to expert 0, in the order of tokens, then to expert 1, ...; of_blocks (blocks, EXPERTS): scratch.
extern "C" __global__ __launch_bounds__(THREADS)
void router(const float* logits, float* weights, int* experts, int* order, int* counts, int* of_blocks, int tokens) {
    __shared__ unsigned chosen[EXPERTS];  // bit i: by token i of this group of 32
    __shared__ int mine[EXPERTS], next[EXPERTS], totals[EXPERTS];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, groups = (tokens + 31) / 32;
    const int each = (groups + gridDim.x - 1) / gridDim.x;  // consecutive groups of this block
    const int first = min(blockIdx.x * each, groups), last = min(first + each, groups);
    if (threadIdx.x < EXPERTS) mine[threadIdx.x] = next[threadIdx.x] = totals[threadIdx.x] = 0;

    int choice = -1;  // of lane i: the expert of place i
    for (int group = first; group < last; ++group) {
        if (threadIdx.x < EXPERTS) chosen[threadIdx.x] = 0;
        __syncthreads();
        const int token = group * 32 + warp;
        choice = -1;
        if (token < tokens) {
            float x[PER_LANE];
            unsigned rank[PER_LANE];
#pragma unroll
            for (int j = 0; j < PER_LANE; ++j) {
                const int expert = lane * PER_LANE + j;
                x[j] = expert < EXPERTS ? logits[(size_t)token * EXPERTS + expert] : 0.0f;
                rank[j] = expert < EXPERTS ? rank_of(x[j]) : 0;
            }
            float top = 0, value = 0;
#pragma unroll
            for (int place = 0; place < TOP_K; ++place) {
                unsigned own = 0;
                int at = 0;
#pragma unroll
                for (int j = PER_LANE - 1; j >= 0; --j)
                    if (rank[j] >= own) own = rank[j], at = j;
                const unsigned best = __reduce_max_sync(~0u, own);
                const int owner = __ffs(__ballot_sync(~0u, own == best)) - 1;
                float found = x[0];
#pragma unroll
                for (int j = 0; j < PER_LANE; ++j) {
                    if (j == at) found = x[j];
                    if (j == at && lane == owner) rank[j] = 0;
                }
                found = __shfl_sync(~0u, found, owner);
                at = __shfl_sync(~0u, at, owner) + owner * PER_LANE;
                if (place == 0) top = found;
                if (lane == place) choice = at, value = found;
            }
            float sum = 0;
#pragma unroll
            for (int j = 0; j < PER_LANE; ++j)
                if (lane * PER_LANE + j < EXPERTS) sum += __expf(x[j] - top);
            for (int d = 16; d > 0; d /= 2) sum += __shfl_xor_sync(~0u, sum, d);
            if (lane < TOP_K) {
                weights[(size_t)token * TOP_K + lane] = __expf(value - top) / sum;
                experts[(size_t)token * TOP_K + lane] = choice;
                atomicOr(&chosen[choice], 1u << warp);
            }
        }
        __syncthreads();
        if (threadIdx.x < EXPERTS) mine[threadIdx.x] += __popc(chosen[threadIdx.x]);
    }
    if (threadIdx.x < EXPERTS) of_blocks[blockIdx.x * EXPERTS + threadIdx.x] = mine[threadIdx.x];
    sync_blocks();

    // next: where this block's last choice of each expert ends
    const int expert = threadIdx.x % EXPERTS, part = threadIdx.x / EXPERTS;
    if (part < PARTS) {
        int before = 0, all = 0;
#pragma unroll 8
        for (int block = part; block < gridDim.x; block += PARTS) {
            const int count = __ldcg(of_blocks + block * EXPERTS + expert);
            all += count;
            if (block <= blockIdx.x) before += count;
        }
        atomicAdd(&totals[expert], all);
        atomicAdd(&next[expert], before);
    }
    __syncthreads();
    if (warp == 0) {
        int own[PER_LANE], sum = 0;
        for (int j = 0; j < PER_LANE; ++j) {
            own[j] = sum;
            if (lane * PER_LANE + j < EXPERTS) sum += totals[lane * PER_LANE + j];
        }
        int start = sum;  // of this lane's first expert
        for (int d = 1; d < 32; d *= 2) {
            const int from = __shfl_up_sync(~0u, start, d);
            if (lane >= d) start += from;
        }
        start -= sum;
        for (int j = 0; j < PER_LANE; ++j)
            if (lane * PER_LANE + j < EXPERTS) next[lane * PER_LANE + j] += start + own[j];
    }
    if (blockIdx.x == 0 && threadIdx.x < EXPERTS) counts[threadIdx.x] = totals[threadIdx.x];
    __syncthreads();
    for (int group = last - 1; group >= first; --group) {  // backwards: what the last group chose is still here
        const int token = group * 32 + warp;
        if (group < last - 1) {
            if (threadIdx.x < EXPERTS) chosen[threadIdx.x] = 0;
            __syncthreads();
            choice = lane < TOP_K ? experts[(size_t)token * TOP_K + lane] : -1;
            if (lane < TOP_K) atomicOr(&chosen[choice], 1u << warp);
            __syncthreads();
        }
        if (threadIdx.x < EXPERTS) next[threadIdx.x] -= __popc(chosen[threadIdx.x]);
        __syncthreads();
        if (choice >= 0) order[next[choice] + __popc(chosen[choice] & ((1u << warp) - 1))] = token * TOP_K + lane;
        __syncthreads();
    }
}
