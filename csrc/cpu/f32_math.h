// Products in float32: exact weights up to one rounding a product, on every level and for every dtype of x.

namespace nf4l::cpu::NF4L_CPU_LEVEL {

template <class Isa>
struct F32Math {
  using Element = float;
  using Operand = typename Isa::Vec;
  static constexpr int K_STEP = 1;
  static constexpr int GROUP = Isa::GROUP;  // steps

  template <class T>
  static constexpr int64_t most_rows() {
    return Isa::MOST_ROWS;
  }

  // Calls body(group, STEP(), weights of 16 rows) for every input of a tile, step GROUP * group + STEP.
  template <class Format, class Body>
  static void for_each_step(const uint8_t* tile, const Body& body) {
    if constexpr (IS_4BIT<Format>) {
      Isa::template for_each_input4<Format>(tile, body);
    } else {
      Isa::template for_each_input8<Format>(tile, body);
    }
  }

  template <class T>
  static float pack(const T* slab, int step, int64_t inputs) {
    return step < inputs ? to_float(slab[step]) : 0.0f;
  }

  template <class Format>
  static constexpr float output_factor() {
    return 1.0f;
  }

  static Operand load(const float* p) { return Isa::load(p); }
  static void store(float* p, Operand v) { Isa::store(p, v); }
  static Operand broadcast(float v) { return Isa::broadcast(v); }
  static Operand multiply_add(Operand acc, Operand w, Operand x) { return Isa::multiply_add(acc, w, x); }
};

}  // namespace nf4l::cpu::NF4L_CPU_LEVEL
