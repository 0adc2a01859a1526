// One thread an entry [t, b], forwards over up to n rows; neighbouring threads read neighbouring columns.

extern "C" __global__ void n_step(const float *__restrict__ rewards, const float *__restrict__ bootstrap_q,
                                  const u8 *__restrict__ terminated, const u8 *__restrict__ ended, double gamma,
                                  i64 n, i64 steps, i64 columns, float *__restrict__ targets,
                                  i64 *__restrict__ steps_used) {
    const i64 begin = global_thread();
    if (begin >= steps * columns) return;
    const i64 row = begin / columns, most = n < steps - row ? n : steps - row;
    float total = 0.0f;
    double weight = 1.0;
    i64 used = 0;
    for (bool going = most > 0; going; weight *= gamma) {
        const i64 at = begin + used * columns;
        going = ++used < most && !ended[at];
        const float value = going || terminated[at] ? 0.0f : bootstrap_q[at];
        total += (float)weight * (rewards[at] + (float)gamma * value);
    }
    targets[begin] = total;
    steps_used[begin] = used;
}
