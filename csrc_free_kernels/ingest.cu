// The source is memory of the host, read over the bus: each word once, for both of its targets.

struct Ingest {
    const i64 *slots, *rows;
    i64 num_slots, num_rows;

    __device__ __forceinline__ const u8 *source(const Leaf &leaf, i64 b) const {
        const i64 slot = slots[b];
        return slot < 0 || slot >= num_slots ? nullptr : leaf.source + slot * leaf.row_bytes;
    }
    __device__ __forceinline__ u8 *target(const Leaf &leaf, i64 b) const { return leaf.target + b * leaf.row_bytes; }
    __device__ __forceinline__ u8 *second(const Leaf &leaf, i64 b) const {
        const i64 row = rows[b];
        return row < 0 || row >= num_rows ? nullptr : leaf.second + row * leaf.row_bytes;
    }
};

extern "C" __global__ void ingest_rows(Leaves leaves, Ingest ingest, i64 rows) {
    copy_rows(ingest, leaves.leaf[blockIdx.y], rows);
}
