// One thread a column, backwards in time: neighbouring threads read neighbouring columns of a row.
// `x > bar ? bar : x` and not fminf: a NaN must come through, as it does in the twin.

struct Clips {
    float rho_bar, c_bar, rho_pg_bar, lambda;
};

struct Targets {
    float vs, advantage;
};

__device__ __forceinline__ float at_most(float x, float bar) { return x > bar ? bar : x; }

// `excess` is vs - V of the row after; becomes that of this one
__device__ __forceinline__ Targets vtrace_step(float behaviour, float target, float discount, float reward,
                                               float value, float next_value, float mask, Clips clips,
                                               float *excess) {
    const float ratio = expf(at_most(target - behaviour, MAX_LOG_RATIO));
    const float delta = at_most(ratio, clips.rho_bar) * (reward + discount * next_value - value) * mask;
    const float trace = discount * (at_most(ratio, clips.c_bar) * clips.lambda) * mask;
    const float next_vs = next_value + *excess;
    const float advantage = at_most(ratio, clips.rho_pg_bar) * (reward + discount * next_vs - value) * mask;
    *excess = delta + trace * *excess;
    return Targets{value + *excess, advantage};
}

extern "C" __global__ void vtrace(const float *__restrict__ behaviour, const float *__restrict__ target,
                                  const float *__restrict__ discounts, const float *__restrict__ rewards,
                                  const float *__restrict__ values, const float *__restrict__ bootstrap_value,
                                  Clips clips, i64 steps, i64 columns, float *__restrict__ vs,
                                  float *__restrict__ advantages) {
    const i64 column = global_thread();
    if (column >= columns) return;
    float excess = 0.0f, next_value = bootstrap_value[column];
    for (i64 t = steps - 1; t >= 0; t--) {
        const i64 at = t * columns + column;
        const float value = values[at];
        const Targets out = vtrace_step(behaviour[at], target[at], discounts[at], rewards[at], value, next_value,
                                        1.0f, clips, &excess);
        vs[at] = out.vs;
        advantages[at] = out.advantage;
        next_value = value;
    }
}

extern "C" __global__ void vtrace_rows(const float *__restrict__ behaviour, const float *__restrict__ target,
                                       const float *__restrict__ rewards, const float *__restrict__ values,
                                       const u8 *__restrict__ terminated, const u8 *__restrict__ first, float gamma,
                                       Clips clips, i64 steps, i64 columns, float *__restrict__ vs,
                                       float *__restrict__ advantages, float *__restrict__ mask) {
    const i64 column = global_thread();
    if (column >= columns) return;
    float excess = 0.0f, next_value = values[steps * columns + column];
    for (i64 t = steps - 1; t >= 0; t--) {
        const i64 at = t * columns + column, after = at + columns;
        const float value = values[at], counts = first[after] ? 0.0f : 1.0f;
        const Targets out = vtrace_step(behaviour[at], target[at], terminated[after] ? 0.0f : gamma,
                                        rewards[after], value, next_value, counts, clips, &excess);
        vs[at] = out.vs;
        advantages[at] = out.advantage;
        mask[at] = counts;
        next_value = value;
    }
}

extern "C" __global__ void gae_rows(const float *__restrict__ rewards, const float *__restrict__ values,
                                    const u8 *__restrict__ terminated, const u8 *__restrict__ first, float gamma,
                                    float lambda, i64 steps, i64 columns, float *__restrict__ returns,
                                    float *__restrict__ advantages, float *__restrict__ mask) {
    const i64 column = global_thread();
    if (column >= columns) return;
    float advantage = 0.0f, next_value = values[steps * columns + column];
    for (i64 t = steps - 1; t >= 0; t--) {
        const i64 at = t * columns + column, after = at + columns;
        const float value = values[at], counts = first[after] ? 0.0f : 1.0f;
        const float discount = terminated[after] ? 0.0f : gamma;
        const float delta = (rewards[after] + discount * next_value - value) * counts;
        advantage = delta + discount * lambda * counts * advantage;
        returns[at] = value + advantage;
        advantages[at] = advantage;
        mask[at] = counts;
        next_value = value;
    }
}
