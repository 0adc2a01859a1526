// CUDA's built-ins for the host's compiler, so that a .cu file runs on the CPU as it stands.
// Blocks run one after the other. A block's threads do too, unless SHIM_THREADS is defined: then they are threads, for __syncthreads.
#pragma once
#include <cmath>
#include <cstring>
#include <tuple>
#include <utility>
#ifdef SHIM_THREADS
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>
#endif

#define __global__
#define __device__
#define __forceinline__ inline
#define __restrict__
#define __shared__ static

struct ShimIndex {
    unsigned int x, y, z;
};
inline thread_local ShimIndex threadIdx;
inline ShimIndex blockIdx, blockDim, gridDim;

struct alignas(16) uint4 {
    unsigned int x, y, z, w;
};

inline unsigned int __umulhi(unsigned int a, unsigned int b) {
    return (unsigned int)(((unsigned long long)a * b) >> 32);
}
inline int __float_as_int(float x) {
    int bits;
    std::memcpy(&bits, &x, 4);
    return bits;
}
inline float __int_as_float(int bits) {
    float x;
    std::memcpy(&x, &bits, 4);
    return x;
}

#ifdef SHIM_THREADS
class ShimBarrier {
  public:
    void reset(unsigned int count) { count_ = count; }
    void wait() {
        std::unique_lock<std::mutex> lock(mutex_);
        const unsigned long turn = turn_;
        if (++waiting_ == count_) {
            waiting_ = 0;
            turn_++;
            all_.notify_all();
        } else {
            all_.wait(lock, [&] { return turn_ != turn; });
        }
    }

  private:
    std::mutex mutex_;
    std::condition_variable all_;
    unsigned int count_ = 0, waiting_ = 0;
    unsigned long turn_ = 0;
};
inline ShimBarrier shim_barrier;
inline void __syncthreads() { shim_barrier.wait(); }
#endif

template <typename... A, std::size_t... I>
void shim_call(void (*kernel)(A...), void **arguments, std::index_sequence<I...>) {
    kernel(*static_cast<A *>(arguments[I])...);
}

template <typename... A> void shim_run(void (*kernel)(A...), const unsigned int *grid, unsigned int threads, void **arguments) {
    gridDim = {grid[0], grid[1], 1};
    blockDim = {threads, 1, 1};
    const auto call = [&] { shim_call(kernel, arguments, std::index_sequence_for<A...>{}); };
#ifdef SHIM_THREADS
    shim_barrier.reset(threads);
    std::vector<std::thread> team;
    for (unsigned int i = 0; i < threads; i++)
        team.emplace_back([&, i] {
            threadIdx = {i, 0, 0};
            for (unsigned int y = 0; y < grid[1]; y++)
                for (unsigned int x = 0; x < grid[0]; x++) {
                    shim_barrier.wait();
                    if (i == 0) blockIdx = {x, y, 0};
                    shim_barrier.wait();
                    call();
                }
        });
    for (auto &thread : team) thread.join();
#else
    for (unsigned int y = 0; y < grid[1]; y++)
        for (unsigned int x = 0; x < grid[0]; x++)
            for (unsigned int i = 0; i < threads; i++) {
                blockIdx = {x, y, 0};
                threadIdx = {i, 0, 0};
                call();
            }
#endif
}

#define SHIM_KERNEL(name)                                                                                               \
    extern "C" void run_##name(const unsigned int *grid, unsigned int threads, void **arguments) {                      \
        shim_run(name, grid, threads, arguments);                                                                       \
    }
