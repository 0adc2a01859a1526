struct Append {
    OpenRows open;

    __device__ __forceinline__ const u8 *source(const Leaf &leaf, i64 b) const {
        return leaf.source + b * leaf.row_bytes;
    }
    __device__ __forceinline__ u8 *target(const Leaf &leaf, i64 b) const {
        const i64 row = open.row(b);
        return row < 0 ? nullptr : leaf.target + row * leaf.row_bytes;
    }
    __device__ __forceinline__ u8 *second(const Leaf &, i64) const { return nullptr; }
};

extern "C" __global__ void append_rows(Leaves leaves, OpenRows open, i64 rows) {
    copy_rows(Append{open}, leaves.leaf[blockIdx.y], rows);
}
