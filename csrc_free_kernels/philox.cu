extern "C" __global__ void random_words(const i64 *counters, u64 key, i64 count, i64 *into) {
    const i64 i = global_thread();
    if (i >= count) return;
    Words counter;
    for (int k = 0; k < 4; k++) counter.word[k] = (u32)counters[4 * i + k];
    const Words drawn = philox(counter, key);
    for (int k = 0; k < 4; k++) into[4 * i + k] = drawn.word[k];
}
