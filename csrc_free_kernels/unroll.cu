struct Rows {
    const i64 *rows;
    i64 num_rows;

    __device__ __forceinline__ const u8 *source(const Leaf &leaf, i64 i) const {
        const i64 row = rows[i];
        return row < 0 || row >= num_rows ? nullptr : leaf.source + row * leaf.row_bytes;
    }
    __device__ __forceinline__ u8 *target(const Leaf &leaf, i64 i) const { return leaf.target + i * leaf.row_bytes; }
    __device__ __forceinline__ u8 *second(const Leaf &, i64) const { return nullptr; }
};

extern "C" __global__ void gather_rows(Leaves leaves, const i64 *rows, i64 num_rows, i64 count) {
    copy_rows(Rows{rows, num_rows}, leaves.leaf[blockIdx.y], count);
}

// Stacks of frames, rebuilt from frames that are stored once. One block an image.

struct Stacks {
    const u8 *frames;  // [num_rows, frame_bytes]
    const i64 *rows;   // [history + R, columns]
    const u8 *first;   // [history + R, columns]
    i64 num_rows, frame_bytes, history, columns, stack;
    u32 width;  // 4 or 1

    // of image `blockIdx.x` of [R, columns, stack]: the row as many back as its place says, but not before the episode's first
    __device__ __forceinline__ const u8 *image() const {
        const i64 i = blockIdx.x, row = divided(i, stack), t = divided(row, columns), b = row - t * columns;
        i64 at = (history + t) * columns + b;
        for (i64 back = stack - 1 - (i - row * stack); back > 0 && at >= columns && !first[at]; back--) at -= columns;
        return rows[at] < 0 || rows[at] >= num_rows ? nullptr : frames + rows[at] * frame_bytes;
    }
};

// Four pixels at a time where they lie aligned. `shades` [256] is what becomes of each.
template <typename Shade> struct alignas(4 * sizeof(Shade)) Four {
    Shade shade[4];
};

template <typename Shade>
__device__ __forceinline__ void frames_as(const Stacks &stacks, const Shade *shades, Shade *into) {
    const u8 *source = stacks.image();
    if (source == nullptr) return;
    Shade *target = into + (i64)blockIdx.x * stacks.frame_bytes;
    if (stacks.width == 4) {
        for (i64 i = threadIdx.x; i < stacks.frame_bytes / 4; i += blockDim.x) {
            const u32 four = reinterpret_cast<const u32 *>(source)[i];
            reinterpret_cast<Four<Shade> *>(target)[i] = Four<Shade>{
                {shades[four & 255], shades[four >> 8 & 255], shades[four >> 16 & 255], shades[four >> 24]}};
        }
    } else {
        for (i64 i = threadIdx.x; i < stacks.frame_bytes; i += blockDim.x) target[i] = shades[source[i]];
    }
}

extern "C" __global__ void gather_frames_8(Stacks stacks, const u8 *shades, u8 *into) {
    frames_as<u8>(stacks, shades, into);
}

extern "C" __global__ void gather_frames_16(Stacks stacks, const u16 *shades, u16 *into) {
    frames_as<u16>(stacks, shades, into);
}

extern "C" __global__ void gather_frames_32(Stacks stacks, const u32 *shades, u32 *into) {
    frames_as<u32>(stacks, shades, into);
}
