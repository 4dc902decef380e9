// Scales and zero points that are codes themselves (SpQR; pack_tiles.py draws the layout), decoded as fp32 for the
// loops over strips when the turn of their rows comes: scale = lowest + step * code, and the zero point likewise, in the
// order of `layouts.tiles.tile_scales`. A tile's range is that of some lanes of a strip, mostly of all.

#pragma once

#include "cpu_work.h"

namespace {

// Of all groups of 16 rows from row r on, of which those before `first` have theirs already.
INLINE void decode_levels(Work& work, int64_t r, int64_t first) {
  const Arguments& a = work.a;
  const int64_t size = size_of(a.scale_type), groups = a.K / a.group, n = work.n0 + r;
  const char* range = static_cast<const char*>(a.ranges) + (n + first) / a.tile_rows * 4 * groups * size;
  const uint8_t* levels = a.levels + n * groups;
  const Int before = minus(lanes(), every(static_cast<int32_t>(first)));  // in the top bit
  for (int64_t start = 0; start < groups; start += LANES) {
    const int64_t count = std::min<int64_t>(LANES, groups - start);
    float lines[4][LANES];
    each<4>([&](auto i) {
      store(lines[i], float_to_bits(load_floats(range + (i * groups + start) * size, a.scale_type, count)));
    });
    for (int64_t i = 0; i < count; ++i) {
      const uint8_t* at = levels + (start + i) * LANES;
      Int scale = widen_bytes(at), zero = shift_right<4>(scale);
      if (a.level_bits == 4)
        scale = both(scale, every(0xf));
      else
        zero = widen_bytes(at + a.N * groups);
      const auto keep = [&](float* to, float lowest, float step, Int code) {
        const Float found = plus(every(lowest), times(every(step), to_float(code)));
        store(to, float_to_bits(first == 0 ? found : where(before, bits_to_float(load(to)), found)));
      };
      const int64_t to = (start + i) * ROWS + r;
      keep(&work.scale[to], lines[1][i], lines[0][i], scale);
      keep(&work.float_zero[to], lines[3][i], lines[2][i], zero);
    }
  }
}

// Of the rows that a thread works on. Padding of columns may be a group more, of zeros.
INLINE void decode_levels(Work& work) {
  const Arguments& a = work.a;
  for (int64_t r = 0; r < work.count(); r += LANES) {
    const int64_t n = work.n0 + r;
    for (int64_t first = 0; first < LANES; first = ((n + first) / a.tile_rows + 1) * a.tile_rows - n)
      decode_levels(work, r, first);
    for (int64_t g = a.K / a.group; g < a.G; ++g) std::fill_n(&work.scale[g * ROWS + r], LANES, 0.0f);
  }
}

}  // namespace
