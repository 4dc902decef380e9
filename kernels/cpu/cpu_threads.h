// Loops that threads share: by OpenMP or, where a compiler comes without it (clang on macOS), by threads that wait here.

#pragma once

#include <cstdint>

#include "cpu_vectors.h"

#ifdef _OPENMP

#include <omp.h>

namespace {

// body(i, thread) for every i below count, in their order on each thread. A single one needs no team: the barriers of
// one ask the kernel to wake nobody, which takes longer than a small product.
template <class Body>
void in_parallel(int64_t count, int threads, Body body) {
  if (threads == 1) {
    for (int64_t i = 0; i < count; ++i) body(i, 0);
    return;
  }
#pragma omp parallel for schedule(static) num_threads(threads)
  for (int64_t i = 0; i < count; ++i) body(i, omp_get_thread_num());
}

// The same in runs of so many, which threads take when they are free.
template <class Body>
void in_runs(int64_t count, int threads, int64_t run, Body body) {
  if (threads == 1) return in_parallel(count, 1, body);
#pragma omp parallel for schedule(dynamic, run) num_threads(threads)
  for (int64_t i = 0; i < count; ++i) body(i, omp_get_thread_num());
}

// first(i, thread) for every i below `firsts`, and when all are done, body(i, thread) as in_runs.
template <class First, class Body>
void in_turn(int64_t firsts, First first, int64_t count, int threads, int64_t run, Body body) {
  if (threads == 1) {
    in_parallel(firsts, 1, first);
    return in_parallel(count, 1, body);
  }
#pragma omp parallel num_threads(threads)
  {
    const int thread = omp_get_thread_num();
#pragma omp for schedule(static)
    for (int64_t i = 0; i < firsts; ++i) first(i, thread);
#pragma omp for schedule(dynamic, run)
    for (int64_t i = 0; i < count; ++i) body(i, thread);
  }
}

}  // namespace

#else

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

#include <unistd.h>

// Threads that wait for work from one call to the next, of all units of a library. The caller works too, and waits only
// for those that have joined it. A second caller works alone, and so does a process that was forked: it has none of the
// threads, and a lock that one of them held stays locked there.
struct __attribute__((visibility("hidden"))) Helpers {
  std::mutex calling, lock;
  std::condition_variable begun, ended;
  std::vector<std::thread> threads;
  const void* work = nullptr;
  void (*call)(const void* work, int thread) = nullptr;
  int64_t calls = 0;
  int wanted = 0, joined = 0, active = 0;
  const pid_t owner = getpid();

  void wait_for_work() {
    std::unique_lock<std::mutex> held(lock);
    for (int64_t seen = 0;;) {
      begun.wait(held, [&] { return work != nullptr && calls != seen && joined < wanted; });
      seen = calls;
      ++active;
      const int thread = ++joined;
      // Read under the lock: a caller that has done its own part takes the work away.
      const auto called = call;
      const void* const taken = work;
      held.unlock();
      called(taken, thread);
      held.lock();
      if (--active == 0) ended.notify_one();
    }
  }

  // body(thread) on the calling thread, which is 0, and on up to `others` more.
  template <class Body>
  void run(int others, const Body& body) {
    if (others <= 0 || getpid() != owner) return body(0);
    const std::unique_lock<std::mutex> alone(calling, std::try_to_lock);
    if (!alone) return body(0);
    {
      const std::lock_guard<std::mutex> held(lock);
      while (static_cast<int>(threads.size()) < others) threads.emplace_back([this] { wait_for_work(); });
      work = &body;
      call = [](const void* of, int thread) { (*static_cast<const Body*>(of))(thread); };
      wanted = others, joined = 0, ++calls;
    }
    begun.notify_all();
    body(0);
    std::unique_lock<std::mutex> held(lock);
    work = nullptr;
    ended.wait(held, [&] { return active == 0; });
  }

  // Never destroyed: they wait until the process ends.
  static Helpers& of_library() {
    static Helpers& made = *new Helpers;
    return made;
  }
};

namespace {

template <class Body>
void in_runs(int64_t count, int threads, int64_t run, Body body) {
  std::atomic<int64_t> next{0};
  const int64_t runs = (count + run - 1) / run;
  Helpers::of_library().run(static_cast<int>(std::min<int64_t>(threads, runs)) - 1, [&](int thread) {
    for (int64_t first; (first = next.fetch_add(run)) < count;)
      for (int64_t i = first; i < std::min(first + run, count); ++i) body(i, thread);
  });
}

template <class Body>
void in_parallel(int64_t count, int threads, Body body) {
  in_runs(count, threads, std::max<int64_t>((count + threads - 1) / threads, 1), body);
}

template <class First, class Body>
void in_turn(int64_t firsts, First first, int64_t count, int threads, int64_t run, Body body) {
  in_parallel(firsts, threads, first);
  in_runs(count, threads, run, body);
}

}  // namespace

#endif
