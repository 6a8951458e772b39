// The binary file of the dequantize laboratory: one NF4 weight with double quantization. Host C++ only, no CUDA.
//
// Version 1, little-endian, a 64-byte header and then four arrays without gaps; nothing may follow them.
//
//   offset  type      field
//        0  char[8]   magic, "NF4LAB\r\n"
//        8  uint32    version, 1
//       12  uint32    table type of absmax2 and code2: 0 = float32, 1 = float16
//       16  uint64    rows            24  uint64    columns
//       32  uint32    blocksize, a power of two 32..4096
//       36  uint32    nested blocksize, 256
//       40  float32   offset added to every decoded scale, finite
//       44  uint32    CRC-32 (that of zlib) of the whole file with this field taken as 0
//       48  uint64    bytes after the header
//       56  uint64    reserved, 0
//
//   uint8 codes[ceil(rows * columns / 2)]      two a byte, high nibble first, flat over [rows, columns]
//   uint8 absmax_q[ceil(rows * columns / blocksize)]
//   table absmax2[ceil(blocks / nested blocksize)]
//   table code2[256]
//
// nf4linear/lab/weight_file.py is the writer and the other reader. A file that differs in anything is refused.
#pragma once

#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <array>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "../portable/numeric16.h"

namespace nf4l::lab {

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "fields are copied as they lie in the file");

constexpr char MAGIC[8] = {'N', 'F', '4', 'L', 'A', 'B', '\r', '\n'};
constexpr uint32_t VERSION = 1;
constexpr size_t HEADER_BYTES = 64;
constexpr size_t CHECKSUM_AT = 44;
constexpr uint64_t MAX_ELEMENTS = uint64_t(1) << 40;  // so that no size below overflows
constexpr uint32_t CODE2_SIZE = 256;

enum TableType : uint32_t { TABLE_FLOAT32 = 0, TABLE_FLOAT16 = 1 };

// What the file holds; tables are float32 here whatever they were in the file (widening is exact).
struct WeightFile {
  uint64_t rows = 0, columns = 0;
  uint32_t blocksize = 0, nested_blocksize = 0;
  uint32_t table_type = TABLE_FLOAT32;
  float offset = 0;
  std::vector<uint8_t> codes, absmax_q;
  std::vector<float> absmax2, code2;

  uint64_t numel() const { return rows * columns; }
  uint64_t blocks() const { return (numel() + blocksize - 1) / blocksize; }
  uint64_t groups() const { return (blocks() + nested_blocksize - 1) / nested_blocksize; }
  uint64_t table_bytes() const { return table_type == TABLE_FLOAT16 ? 2 : 4; }
  uint64_t payload_bytes() const {
    return (numel() + 1) / 2 + blocks() + (groups() + CODE2_SIZE) * table_bytes();
  }
};

struct DamagedFile : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// CRC-32 of `size` bytes; `before` is that of the bytes before them, as in zlib.
inline uint32_t crc32(const uint8_t* data, size_t size, uint32_t before = 0) {
  static const std::array<uint32_t, 256> table = [] {
    std::array<uint32_t, 256> t{};
    for (uint32_t byte = 0; byte < 256; ++byte) {
      t[byte] = byte;
      for (int bit = 0; bit < 8; ++bit) t[byte] = t[byte] >> 1 ^ (t[byte] & 1 ? 0xedb88320u : 0);
    }
    return t;
  }();
  uint32_t crc = ~before;
  for (size_t i = 0; i < size; ++i) crc = table[(crc ^ data[i]) & 0xff] ^ crc >> 8;
  return ~crc;
}

namespace detail {

template <class T>
T field(const std::vector<uint8_t>& bytes, size_t at) {
  T value;
  memcpy(&value, bytes.data() + at, sizeof(T));
  return value;
}

inline std::string got_want(const char* what, uint64_t got, const std::string& want) {
  return std::string(what) + " is " + std::to_string(got) + ", expected " + want;
}

inline std::vector<uint8_t> read_bytes(const std::string& path) {
  std::unique_ptr<FILE, int (*)(FILE*)> file(fopen(path.c_str(), "rb"), fclose);
  if (!file) throw DamagedFile(path + ": cannot be opened");
  std::vector<uint8_t> bytes;
  std::vector<uint8_t> chunk(1 << 20);
  while (const size_t got = fread(chunk.data(), 1, chunk.size(), file.get())) {
    bytes.insert(bytes.end(), chunk.begin(), chunk.begin() + got);
  }
  if (ferror(file.get())) throw DamagedFile(path + ": read error");
  return bytes;
}

// Header fields into `w`; throws the reason when they are not a legal version 1 header.
inline void parse_header(const std::vector<uint8_t>& bytes, WeightFile& w) {
  if (bytes.size() < HEADER_BYTES) throw DamagedFile("the file ends inside the 64-byte header");
  if (memcmp(bytes.data(), MAGIC, sizeof MAGIC) != 0) throw DamagedFile("wrong magic: not an nf4linear lab file");
  if (const auto version = field<uint32_t>(bytes, 8); version != VERSION) {
    throw DamagedFile(got_want("version", version, "1; write the file again with `nf4linear lab generate`"));
  }
  w.table_type = field<uint32_t>(bytes, 12);
  if (w.table_type > TABLE_FLOAT16) {
    throw DamagedFile(got_want("table type", w.table_type, "0 (float32) or 1 (float16)"));
  }
  w.rows = field<uint64_t>(bytes, 16);
  w.columns = field<uint64_t>(bytes, 24);
  if (w.rows == 0 || w.columns == 0 || w.rows > MAX_ELEMENTS / w.columns) {
    throw DamagedFile("shape " + std::to_string(w.rows) + " x " + std::to_string(w.columns) + " is empty or too large");
  }
  w.blocksize = field<uint32_t>(bytes, 32);
  if (w.blocksize < 32 || w.blocksize > 4096 || (w.blocksize & (w.blocksize - 1))) {
    throw DamagedFile(got_want("blocksize", w.blocksize, "a power of two from 32 to 4096"));
  }
  w.nested_blocksize = field<uint32_t>(bytes, 36);
  if (w.nested_blocksize != 256) throw DamagedFile(got_want("nested blocksize", w.nested_blocksize, "256"));
  w.offset = field<float>(bytes, 40);
  if (!isfinite(w.offset)) throw DamagedFile("the offset is not a finite number");
  if (field<uint64_t>(bytes, 56) != 0) throw DamagedFile("the reserved header field is not 0");
}

inline std::vector<float> table(const uint8_t* data, size_t size, uint32_t type) {
  std::vector<float> values(size);
  if (type == TABLE_FLOAT32) memcpy(values.data(), data, size * 4);
  for (size_t i = 0; type == TABLE_FLOAT16 && i < size; ++i) {
    uint16_t half;
    memcpy(&half, data + 2 * i, 2);
    values[i] = portable::half_to_float(half);
  }
  return values;
}

// CRC-32 of the whole file with its own field taken as 0.
inline uint32_t checksum(const std::vector<uint8_t>& bytes) {
  std::vector<uint8_t> header(bytes.begin(), bytes.begin() + HEADER_BYTES);
  memset(header.data() + CHECKSUM_AT, 0, sizeof(uint32_t));
  return crc32(bytes.data() + HEADER_BYTES, bytes.size() - HEADER_BYTES, crc32(header.data(), header.size()));
}

inline WeightFile parse(const std::vector<uint8_t>& bytes) {
  WeightFile w;
  parse_header(bytes, w);
  const uint64_t said = field<uint64_t>(bytes, 48), payload = w.payload_bytes();
  if (said != payload) {
    throw DamagedFile(got_want("payload size in the header", said, std::to_string(payload) + " for this shape"));
  }
  if (bytes.size() != HEADER_BYTES + payload) {
    throw DamagedFile(got_want("file size", bytes.size(), std::to_string(HEADER_BYTES + payload) + " bytes"));
  }
  if (checksum(bytes) != field<uint32_t>(bytes, CHECKSUM_AT)) {
    throw DamagedFile("checksum mismatch: the file is damaged; write it again with `nf4linear lab generate`");
  }
  const uint8_t* at = bytes.data() + HEADER_BYTES;
  w.codes.assign(at, at + (w.numel() + 1) / 2);
  at += w.codes.size();
  w.absmax_q.assign(at, at + w.blocks());
  at += w.absmax_q.size();
  w.absmax2 = table(at, w.groups(), w.table_type);
  w.code2 = table(at + w.groups() * w.table_bytes(), CODE2_SIZE, w.table_type);
  return w;
}

}  // namespace detail

// Reads and checks a whole file. Throws DamagedFile with the path and what is wrong.
inline WeightFile read_weight_file(const std::string& path) {
  const std::vector<uint8_t> bytes = detail::read_bytes(path);
  try {
    return detail::parse(bytes);
  } catch (const DamagedFile& reason) {
    throw DamagedFile(path + ": " + reason.what());
  }
}

}  // namespace nf4l::lab
