struct Gather {
    const i64 *slots;
    const u8 *first;
    i64 num_slots;

    // `second` of the table is the initial state here
    __device__ __forceinline__ const u8 *source(const Leaf &leaf, i64 b) const {
        const i64 slot = slots[b];
        return first[b] || slot < 0 || slot >= num_slots ? leaf.second : leaf.source + slot * leaf.row_bytes;
    }
    __device__ __forceinline__ u8 *target(const Leaf &leaf, i64 b) const { return leaf.target + b * leaf.row_bytes; }
    __device__ __forceinline__ u8 *second(const Leaf &, i64) const { return nullptr; }
};

struct Scatter {
    const i64 *places;
    i64 there;

    __device__ __forceinline__ const u8 *source(const Leaf &leaf, i64 b) const {
        return leaf.source + b * leaf.row_bytes;
    }
    __device__ __forceinline__ u8 *target(const Leaf &leaf, i64 b) const {
        const i64 place = places[b];
        return place < 0 || place >= there ? nullptr : leaf.target + place * leaf.row_bytes;
    }
    __device__ __forceinline__ u8 *second(const Leaf &, i64) const { return nullptr; }
};

extern "C" __global__ void gather_state(Leaves leaves, const i64 *slots, const u8 *first, i64 num_slots, i64 rows) {
    copy_rows(Gather{slots, first, num_slots}, leaves.leaf[blockIdx.y], rows);
}

extern "C" __global__ void scatter_rows(Leaves leaves, const i64 *places, i64 there, i64 rows) {
    copy_rows(Scatter{places, there}, leaves.leaf[blockIdx.y], rows);
}
