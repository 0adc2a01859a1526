// Philox-4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3", section 3.3).

struct Words {
    u32 word[4];
};

__device__ __forceinline__ Words philox(Words counter, u64 key) {
    u32 low = (u32)key, high = (u32)(key >> 32);
    u32 *c = counter.word;
    for (int round = 0; round < 10; round++) {
        const u32 top0 = __umulhi(0xD2511F53u, c[0]), bottom0 = 0xD2511F53u * c[0];
        const u32 top1 = __umulhi(0xCD9E8D57u, c[2]), bottom1 = 0xCD9E8D57u * c[2];
        counter = Words{{top1 ^ c[1] ^ low, bottom1, top0 ^ c[3] ^ high, bottom0}};
        low += 0x9E3779B9u;
        high += 0xBB67AE85u;
    }
    return counter;
}
