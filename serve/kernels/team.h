// A team of threads that goes through the phases of a step together.
//
// All call the same function; `each` hands the tasks of a phase out one by one, and returns in all
// when all are done. Between phases threads spin for some microseconds, as a phase takes about as
// long; then they yield, for the machine may have other work. Between steps they sleep.

#pragma once

#include <immintrin.h>
#include <sched.h>

#include <atomic>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace eagleray {

class Team {
 public:
  explicit Team(int size) : size_(size < 1 ? 1 : size) {
    for (int index = 1; index < size_; ++index) {
      threads_.emplace_back([this, index] { work(index); });
    }
  }

  ~Team() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      is_over_ = true;
      ++round_;
    }
    wake_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }

  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  int size() const { return size_; }

  // Calls `act` with the index of each thread, in all of them; the caller's is 0.
  void run(const std::function<void(int)>& act) {
    if (size_ > 1) {
      std::lock_guard<std::mutex> lock(mutex_);
      act_ = &act;
      ++round_;
    }
    wake_.notify_all();
    act(0);
    // No thread may still be in `act` when the next round begins.
    meet();
  }

  // Inside `run`, by all threads: `act` for each task below `count`, by whichever thread is free.
  template <typename Act>
  void each(int count, Act&& act) {
    for (int task; (task = next_.fetch_add(1, std::memory_order_relaxed)) < count;) act(task);
    meet();
  }

 private:
  void work(int index) {
    long seen = 0;
    for (;;) {
      const std::function<void(int)>* act = nullptr;
      {
        std::unique_lock<std::mutex> lock(mutex_);
        wake_.wait(lock, [&] { return round_ != seen; });
        seen = round_;
        if (is_over_) return;
        act = act_;
      }
      (*act)(index);
      meet();
    }
  }

  void meet() {
    if (size_ == 1) {
      next_.store(0, std::memory_order_relaxed);
      return;
    }
    const unsigned phase = phase_.load(std::memory_order_acquire);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == size_) {
      arrived_.store(0, std::memory_order_relaxed);
      next_.store(0, std::memory_order_relaxed);
      phase_.store(phase + 1, std::memory_order_release);
      return;
    }
    for (int spins = 0; phase_.load(std::memory_order_acquire) == phase; ++spins) {
      if (spins < kSpins) {
        _mm_pause();
      } else {
        sched_yield();
      }
    }
  }

  static constexpr int kSpins = 2000;

  const int size_;
  std::vector<std::thread> threads_;
  std::mutex mutex_;
  std::condition_variable wake_;
  const std::function<void(int)>* act_ = nullptr;
  long round_ = 0;
  bool is_over_ = false;
  alignas(64) std::atomic<int> next_{0};
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<unsigned> phase_{0};
};

}  // namespace eagleray
