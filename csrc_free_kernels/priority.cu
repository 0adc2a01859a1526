// A tree of sums of two stored levels: priorities, and the sum of each CHUNK of them. What lies between, and above, is built in
// shared memory when it is needed, each node from its two children, so that no rounding adds up over updates.
// `nodes` is a heap: node i has the children 2i and 2i + 1, node 1 is the root.

struct Sums {
    double *nodes;

    // All threads, none of which still reads the tree of before; thread 0, which adds the last two nodes, may read at once.
    // `width` leaves, a power of two, of which `load` gives those below `count`; the others are 0.
    template <typename Load> __device__ __forceinline__ void build(i64 width, i64 count, Load load) {
        for (i64 i = threadIdx.x; i < width; i += blockDim.x) nodes[width + i] = i < count ? (double)load[i] : 0.0;
        for (i64 level = width / 2; level >= 1; level /= 2) {
            __syncthreads();
            for (i64 i = level + threadIdx.x; i < 2 * level; i += blockDim.x) nodes[i] = nodes[2 * i] + nodes[2 * i + 1];
        }
    }

    // One thread: the leaf in which `left` of the sum falls; `left` becomes what of it is the leaf's own.
    __device__ __forceinline__ i64 descend(i64 width, double *left) const {
        i64 at = 1;
        while (at < width) {
            at *= 2;
            // never into a part that is empty, where rounding would lead
            if (*left >= nodes[at] && nodes[at + 1] > 0.0) {
                *left -= nodes[at];
                at++;
            }
        }
        return at - width;
    }
};

extern "C" __global__ void write_priorities(float *priorities, const i64 *places, const float *values, i64 count,
                                            i64 capacity) {
    const i64 i = global_thread();
    if (i >= count || places[i] < 0 || places[i] >= capacity) return;
    for (i64 later = count - 1; later > i; later--)
        if (places[later] == places[i]) return;  // where a place stands twice, the last counts
    const float value = values[i];
    priorities[places[i]] = value > 0.0f ? (value < LARGEST ? value : LARGEST) : 0.0f;
}

// One block a place that was written; blocks of the same chunk write the same sum.
extern "C" __global__ void sum_chunks(const float *priorities, double *sums, const i64 *places, i64 capacity) {
    __shared__ double nodes[2 * CHUNK];
    const i64 place = places[blockIdx.x];
    if (place < 0 || place >= capacity) return;
    const i64 begin = place / CHUNK * CHUNK, rest = capacity - begin;
    Sums tree{nodes};
    tree.build(CHUNK, rest < CHUNK ? rest : CHUNK, priorities + begin);
    if (threadIdx.x == 0) sums[place / CHUNK] = nodes[1];
}

// One block a draw.
extern "C" __global__ void draw_places(const float *priorities, const double *sums, i64 capacity, i64 top_width,
                                       u64 key, const i64 *step, i64 items, double beta, i64 *places,
                                       double *weights) {
    __shared__ double nodes[2 * MAX_CHUNKS];
    __shared__ double left, total;
    __shared__ i64 chunk;
    const i64 chunks = (capacity + CHUNK - 1) / CHUNK, i = blockIdx.x;
    Sums tree{nodes};
    tree.build(top_width, chunks, sums);
    if (threadIdx.x == 0) {
        const Words drawn = philox(Words{{(u32)i, STREAM, (u32)*step, (u32)((u64)*step >> 32)}}, key);
        const double uniform =
            ((double)(drawn.word[0] >> 5) * 67108864.0 + (double)(drawn.word[1] >> 6)) * 1.1102230246251565e-16;
        total = nodes[1];
        left = ((double)i + uniform) / (double)gridDim.x * total;
        chunk = tree.descend(top_width, &left);
    }
    __syncthreads();
    const i64 begin = chunk * CHUNK, rest = capacity - begin;
    tree.build(CHUNK, rest < CHUNK ? rest : CHUNK, priorities + begin);
    if (threadIdx.x == 0) {
        const i64 place = begin + tree.descend(CHUNK, &left);
        places[i] = place;
        weights[i] = total > 0.0 ? pow((double)items * ((double)priorities[place] / total), -beta) : 0.0;
    }
}

// One block.
extern "C" __global__ void scale_weights(const double *weights, i64 count, bool over_batch, float *scaled) {
    __shared__ double largest[THREADS];
    double own = 0.0;
    for (i64 i = threadIdx.x; i < count; i += blockDim.x) own = weights[i] > own ? weights[i] : own;
    largest[threadIdx.x] = own;
    __syncthreads();
    for (u32 i = 0; i < blockDim.x; i++) own = largest[i] > own ? largest[i] : own;
    const double by = over_batch && own > 0.0 ? own : 1.0;
    for (i64 i = threadIdx.x; i < count; i += blockDim.x) scaled[i] = (float)(weights[i] / by);
}
