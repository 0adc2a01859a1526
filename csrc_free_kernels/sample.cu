// One thread a row. Actions are the twin's to the bit: noise comes from Philox and from a logarithm of plain float32 sums and products.

struct Branches {
    i64 count;
    u32 size[MAX_BRANCHES];
};

// The natural logarithm of a normal number above 0 (the polynomial of Cephes' logf), within 1 unit of the last place or so.
__device__ __forceinline__ float plain_log(float x) {
    const int bits = __float_as_int(x);
    float exponent = (float)((bits >> 23) - 126);
    float m = __int_as_float((bits & 0x7FFFFF) | 0x3F000000);  // [0.5, 1)
    if (m < 0.70710678f) {
        exponent -= 1.0f;
        m = m + m;
    }
    m -= 1.0f;
    const float square = m * m;
    float y = 7.0376836292e-2f;
    y = y * m + -1.1514610310e-1f;
    y = y * m + 1.1676998740e-1f;
    y = y * m + -1.2420140846e-1f;
    y = y * m + 1.4249322787e-1f;
    y = y * m + -1.6668057665e-1f;
    y = y * m + 2.0000714765e-1f;
    y = y * m + -2.4999993993e-1f;
    y = y * m + 3.3333331174e-1f;
    y = y * m * square;
    y = y + exponent * -2.12194440e-4f;
    y = y + square * -0.5f;
    return m + y + exponent * 0.693359375f;
}

__device__ __forceinline__ float gumbel(u32 word) {
    // the middles of 2^23 equal parts of (0, 1), each exact in float32
    const float uniform = ((float)(word >> 9) + 0.5f) * 1.1920928955078125e-7f;
    return -plain_log(-plain_log(uniform));
}

// a thread's array lies in registers only where every index is a constant
__device__ __forceinline__ u32 word_of(const Words &drawn, u32 k) {
    return k < 2 ? (k == 0 ? drawn.word[0] : drawn.word[1]) : (k == 2 ? drawn.word[2] : drawn.word[3]);
}

extern "C" __global__ void sample_discrete(const float *__restrict__ logits, const u8 *__restrict__ mask,
                                           Branches branches, u64 key, const i64 *__restrict__ slots,
                                           const i64 *__restrict__ step, const u8 *__restrict__ greedy, i64 rows,
                                           i64 width, i64 *__restrict__ actions, float *__restrict__ log_probs,
                                           float *__restrict__ entropies) {
    const i64 b = global_thread();
    if (b >= rows) return;
    const float *row = logits + b * width;
    const u8 *legal = mask == nullptr ? nullptr : mask + b * width;
    const bool noisy = greedy == nullptr || !greedy[b];
    Words drawn = {};
    i64 begin = 0, four = -1;
    float log_prob = 0.0f, entropy = 0.0f;
    for (i64 k = 0; k < branches.count; k++) {
        const i64 end = begin + branches.size[k];
        float largest = 0.0f;
        for (i64 j = begin; j < end; j++) {
            const float logit = legal == nullptr || legal[j] ? row[j] : ILLEGAL;
            // not fmaxf, which would lose a NaN: where there is one the twin, too, takes the first action
            if (j == begin || logit > largest || logit != logit) largest = logit;
        }
        i64 best = begin;
        float best_score = 0.0f, chosen = 0.0f, sum = 0.0f, weighted = 0.0f;
        for (i64 j = begin; j < end; j++) {
            const float logit = (legal == nullptr || legal[j] ? row[j] : ILLEGAL) - largest;
            float score = logit;
            if (noisy) {
                if (j >> 2 != four) {
                    four = j >> 2;
                    drawn = philox(Words{{(u32)slots[b], (u32)four, (u32)*step, (u32)((u64)*step >> 32)}}, key);
                }
                score = logit + gumbel(word_of(drawn, (u32)j & 3));
            }
            if (j == begin || score > best_score) {
                best = j;
                best_score = score;
                chosen = logit;
            }
            const float weight = expf(logit);
            sum += weight;
            weighted += weight * logit;
        }
        const float log_sum = logf(sum);
        actions[b * branches.count + k] = best - begin;
        log_prob += chosen - log_sum;
        entropy += log_sum - weighted / sum;
        begin = end;
    }
    log_probs[b] = log_prob;
    entropies[b] = entropy;
}
