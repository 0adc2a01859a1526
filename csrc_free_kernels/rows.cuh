// Rows of bytes, copied for many leaves in one launch: blockIdx.y is the leaf; a thread copies words of `width` bytes.

struct Leaf {
    const u8 *source;
    u8 *target, *second;
    i64 row_bytes;
    u32 width;  // 16, 4 or 1: what the row's bytes and all addresses are multiples of
};

struct Leaves {
    Leaf leaf[MAX_LEAVES];
};

// a division of 64 bits is a hundred instructions
__device__ __forceinline__ i64 divided(i64 a, i64 b) {
    return (u64)a >> 32 || (u64)b >> 32 ? a / b : (i64)((u32)a / (u32)b);
}

// Where rows of one leaf go: nullptr for nowhere. A rule needs `second` only where each row has two targets.
template <typename Word, typename Rule>
__device__ __forceinline__ void copy_words(const Rule &rule, const Leaf &leaf, i64 rows) {
    const i64 words = leaf.row_bytes / (i64)sizeof(Word), all = rows * words;
    for (i64 i = global_thread(); i < all; i += (i64)gridDim.x * blockDim.x) {
        const i64 row = divided(i, words), at = i - row * words;
        const u8 *source = rule.source(leaf, row);
        u8 *target = rule.target(leaf, row), *second = rule.second(leaf, row);
        if (source == nullptr || (target == nullptr && second == nullptr)) continue;
        const Word word = reinterpret_cast<const Word *>(source)[at];
        if (target != nullptr) reinterpret_cast<Word *>(target)[at] = word;
        if (second != nullptr) reinterpret_cast<Word *>(second)[at] = word;
    }
}

template <typename Rule>
__device__ __forceinline__ void copy_rows(const Rule &rule, const Leaf &leaf, i64 rows) {
    if (leaf.width == 16)
        copy_words<uint4>(rule, leaf, rows);
    else if (leaf.width == 4)
        copy_words<u32>(rule, leaf, rows);
    else
        copy_words<u8>(rule, leaf, rows);
}
