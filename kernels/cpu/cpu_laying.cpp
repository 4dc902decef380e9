// Codes from the order in which checkpoints store them to planar words, and from these to strips: what a model does once
// for every weight when it is loaded, without arithmetic (`layouts.words`, `layouts.strips` draw both).

#include <cstdint>
#include <cstring>
#include <vector>

namespace {

constexpr int64_t PLANE = 32, ROWS = 16, LINE_BYTES = 64, BLOCK_BYTES = 64;

}  // namespace

// Rows of codes one after another, of 4 bits (two in a byte, the first one below) or 8, in `row_bytes` each, to planar
// words. Columns that fill the last block are 0.
extern "C" void planar_of_rows(const uint8_t* from, uint8_t* to, int64_t rows, int64_t row_bytes, int64_t columns,
                               int32_t bits) {
  const int64_t per_block = BLOCK_BYTES * 8 / bits, blocks = (columns + per_block - 1) / per_block;
  std::vector<uint8_t> padded(blocks * BLOCK_BYTES);
  const int64_t whole = columns * bits / 8;
  for (int64_t r = 0; r < rows; ++r, from += row_bytes) {
    std::memcpy(padded.data(), from, whole);
    if (columns * bits % 8 != 0) padded[whole] = from[whole] & 15;
    for (const uint8_t* p = padded.data(); p < padded.data() + padded.size(); p += BLOCK_BYTES, to += BLOCK_BYTES) {
      if (bits == 8) {
        for (int64_t i = 0; i < PLANE; ++i) to[2 * i] = p[i], to[2 * i + 1] = p[PLANE + i];
        continue;
      }
      for (int64_t i = 0; i < PLANE / 2; ++i) {
        const uint8_t a = p[i], b = p[16 + i], c = p[32 + i], d = p[48 + i];
        to[4 * i] = (a & 15) | b << 4;
        to[4 * i + 1] = (c & 15) | d << 4;
        to[4 * i + 2] = a >> 4 | (b & 0xf0);
        to[4 * i + 3] = c >> 4 | (d & 0xf0);
      }
    }
  }
}

// Planar words of whole strips of rows, in `row_bytes` each, to lines of strips.
extern "C" void strips_of_planar(const uint8_t* from, uint8_t* to, int64_t strips, int64_t row_bytes, int64_t lines,
                                 int32_t bits) {
  const int64_t per_block = BLOCK_BYTES * 8 / bits, per_line = 32 / bits;
  for (int64_t s = 0; s < strips; ++s, from += ROWS * row_bytes)
    for (int64_t j = 0; j < lines; ++j, to += LINE_BYTES) {
      const int64_t column = j * per_line, in_block = column % per_block, plane = in_block / PLANE;
      const int64_t word = column / per_block * BLOCK_BYTES + 2 * (in_block % PLANE);
      if (bits == 8) {
        for (int64_t r = 0; r < ROWS; ++r)
          for (int64_t b = 0; b < 4; ++b) to[4 * r + b] = from[r * row_bytes + word + 2 * b + plane];
        continue;
      }
      const int shift = static_cast<int>(plane % 2 * 4);
      for (int64_t r = 0; r < ROWS; ++r) {
        const uint8_t* p = from + r * row_bytes + word + plane / 2;
        for (int64_t b = 0; b < 4; ++b)
          to[4 * r + b] = (p[2 * b] >> shift & 15) | static_cast<uint8_t>(p[2 * b + 8] >> shift) << 4;
      }
    }
}
