// Tile registers of AMX: eight matrices of 16 rows of 64 bytes, and their products.
//
//   multiply_pairs<C, A, B>     C[m][n] += sum over k and i of A[m][k][i] B[k][n][i]: two bf16 each, sums in fp32
//   multiply_bytes<C, A, B>     the same of four signed bytes each, sums in int32
//
// They are written as assembly, which orders them among loads and stores as the intrinsics of some compilers do not.
// EMULATED_TILES has them in plain C++, for tests on processors without AMX.

#pragma once

#include "cpu_numbers.h"

#if defined(EMULATED_TILES)
#define AMX 1
#elif !WIDE || !BF16_DOT || !defined(__linux__)
#define AMX 0
#elif defined(__clang__)
#define AMX (defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AMX_INT8__))
#else
#define AMX (__GNUC__ >= 11)
#endif

#if AMX

#if !defined(EMULATED_TILES)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace {

constexpr int TILE_REGISTERS = 8;
constexpr int64_t TILE_ROWS = 16, TILE_LINE = 64, TILE_BYTES = TILE_ROWS * TILE_LINE;
// Registers: four of sums, [tokens][outputs], two of tokens and two of outputs. Those of tokens and their sums may have
// fewer rows.
constexpr int TOKEN_TILE = 4, OUTPUT_TILE = 6;

#if defined(EMULATED_TILES)

struct Emulated {
  int64_t rows[TILE_REGISTERS];
  alignas(TILE_LINE) char held[TILE_REGISTERS][TILE_BYTES];
};
thread_local Emulated emulated;

inline bool has_tiles() { return true; }
inline void begin_tiles(int64_t tokens) {
  for (int i = 0; i < TILE_REGISTERS; ++i) emulated.rows[i] = i < OUTPUT_TILE ? tokens : TILE_ROWS;
  memset(emulated.held, 0xff, sizeof emulated.held);
}
inline void end_tiles() {}
template <int T>
void load_tile(const void* p) {
  memcpy(emulated.held[T], p, emulated.rows[T] * TILE_LINE);
}
template <int T>
void store_tile(void* p) {
  memcpy(p, emulated.held[T], emulated.rows[T] * TILE_LINE);
}
template <int T>
void clear_tile() {
  memset(emulated.held[T], 0, TILE_BYTES);
}

// Of numbers of a type, so many in 32 bits.
template <int C, int A, int B, class Sum, class Number, class Value>
void multiply_tiles(Value value) {
  constexpr int64_t EACH = 4 / sizeof(Number), WIDTH = TILE_LINE / 4;
  Sum* sums = reinterpret_cast<Sum*>(emulated.held[C]);
  const Number* a = reinterpret_cast<const Number*>(emulated.held[A]);
  const Number* b = reinterpret_cast<const Number*>(emulated.held[B]);
  for (int64_t m = 0; m < emulated.rows[C]; ++m)
    for (int64_t n = 0; n < WIDTH; ++n)
      for (int64_t k = 0; k < TILE_ROWS; ++k)
        for (int64_t i = 0; i < EACH; ++i)
          sums[m * WIDTH + n] += value(a[(m * WIDTH + k) * EACH + i]) * value(b[(k * WIDTH + n) * EACH + i]);
}
template <int C, int A, int B>
void multiply_pairs() {
  multiply_tiles<C, A, B, float, uint16_t>([](const uint16_t& v) { return load_float(&v, BF16); });
}
template <int C, int A, int B>
void multiply_bytes() {
  multiply_tiles<C, A, B, int32_t, int8_t>([](int32_t v) { return v; });
}

#else

// True where the processor has tiles and Linux lets this process use them, for which it must be asked
// (https://docs.kernel.org/arch/x86/xstate.html).
inline bool has_tiles() {
  static const bool found = [] {
    constexpr uint32_t LEAF = 7, BF16_BIT = 1u << 22, TILE_BIT = 1u << 24, INT8_BIT = 1u << 25;
    constexpr uint32_t NEEDED = BF16_BIT | TILE_BIT | INT8_BIT;
    constexpr long REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;
    uint32_t a, b, c, d;
    if (!__get_cpuid_count(LEAF, 0, &a, &b, &c, &d) || (d & NEEDED) != NEEDED) return false;
    return syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
  }();
  return found;
}

// Of the thread that calls, until `end_tiles`; tokens: rows of a tile of these.
inline void begin_tiles(int64_t tokens) {
  struct {
    uint8_t palette = 1, start = 0, unused[14] = {};
    uint16_t line[16] = {};
    uint8_t rows[16] = {};
  } sizes;
  for (int i = 0; i < TILE_REGISTERS; ++i) {
    sizes.line[i] = TILE_LINE;
    sizes.rows[i] = i < OUTPUT_TILE ? tokens : TILE_ROWS;
  }
  asm volatile("ldtilecfg %0" ::"m"(sizes) : "memory");
}
inline void end_tiles() { asm volatile("tilerelease" ::: "memory"); }
template <int T>
INLINE void load_tile(const void* p) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(p), "r"(TILE_LINE), "i"(T) : "memory");
}
template <int T>
INLINE void store_tile(void* p) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(p), "r"(TILE_LINE), "i"(T) : "memory");
}
template <int T>
INLINE void clear_tile() {
  asm volatile("tilezero %%tmm%c0" ::"i"(T));
}
template <int C, int A, int B>
INLINE void multiply_pairs() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
}
template <int C, int A, int B>
INLINE void multiply_bytes() {
  asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
}

#endif

template <bool BYTES, int C, int A, int B>
INLINE void add_product() {
  if constexpr (BYTES)
    multiply_bytes<C, A, B>();
  else
    multiply_pairs<C, A, B>();
}

}  // namespace

#endif
