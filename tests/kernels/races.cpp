// A main for the kernels of priority.cu, whose threads talk: a block's threads are real ones, under the thread sanitizer.
#include <cstdio>
#include <vector>

int main() {
    const unsigned int one[2] = {1, 1}, three[2] = {3, 1};
    i64 capacity = 2 * CHUNK + 5, top_width = 4, items = 3, step = 1, count = 3;
    u64 key = 7;
    double beta = 0.5;
    bool over_batch = true;
    std::vector<float> memory(capacity, 1.0f), scaled(3);
    std::vector<double> sum(3), raw(3);
    std::vector<i64> place = {0, capacity - 1, CHUNK}, drawn(3);
    float *priorities = memory.data(), *weights = scaled.data();
    double *sums = sum.data(), *unscaled = raw.data();
    i64 *places = place.data(), *into = drawn.data(), *steps = &step;
    void *summed[] = {&priorities, &sums, &places, &capacity};
    run_sum_chunks(three, 3, summed);
    void *draws[] = {&priorities, &sums, &capacity, &top_width, &key, &steps, &items, &beta, &into, &unscaled};
    run_draw_places(three, 3, draws);
    void *scales[] = {&unscaled, &count, &over_batch, &weights};
    run_scale_weights(one, 3, scales);
    std::printf("%g %g\n", sum[0] + sum[1] + sum[2], scaled[0]);
}
