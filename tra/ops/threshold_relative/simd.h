// Vectors of floats and the few operations the kernel builds on.
//
// Everything here computes each lane by itself, in an order that does not depend on the lane, the
// tile or the vector's neighbours. The kernel's promise of equal bits rests on that: compile with
// -ffp-contract=off, so that only multiply_add() fuses, and always.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>
#if defined(__SSE2__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace {

// The register block of multiply(): kVectors vectors of queries against kKeys keys. Together they
// must fill, but not overflow, the register file.
#if defined(__AVX512F__)
constexpr int kWidth = 16, kVectors = 2, kKeys = 8;
#elif defined(__AVX2__)
constexpr int kWidth = 8, kVectors = 2, kKeys = 6;
#else
constexpr int kWidth = 4, kVectors = 2, kKeys = 4;
#endif
constexpr int kLanes = kVectors * kWidth;

// Without a fused instruction multiply_add() rounds twice.
#if defined(__FMA__) || defined(__AVX512F__) || defined(__aarch64__)
constexpr bool kFuses = true;
#else
constexpr bool kFuses = false;
#endif

typedef float Floats __attribute__((vector_size(4 * kWidth), may_alias));
typedef int32_t Ints __attribute__((vector_size(4 * kWidth), may_alias));
typedef uint32_t Words __attribute__((vector_size(4 * kWidth), may_alias));

inline Floats load(const float* from) { return *reinterpret_cast<const Floats*>(from); }
inline Ints load(const int32_t* from) { return *reinterpret_cast<const Ints*>(from); }
inline Words load(const uint32_t* from) { return *reinterpret_cast<const Words*>(from); }
inline void store(float* to, Floats value) { *reinterpret_cast<Floats*>(to) = value; }
inline Floats splat(float value) { return value - Floats{}; }  // unlike + 0, folds away
inline Ints splat(int32_t value) { return value - Ints{}; }
inline Words splat(uint32_t value) { return value - Words{}; }

inline float multiply_add(float a, float b, float c) {
    return kFuses ? __builtin_fmaf(a, b, c) : a * b + c;
}
inline Floats multiply_add(Floats a, Floats b, Floats c) {
#if defined(__AVX512F__)
    return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__) && defined(__AVX2__)
    return (Floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
    return (Floats)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    return a * b + c;
#endif
}

// The larger of both, b where a is NaN.
inline Floats larger(Floats a, Floats b) {
#if defined(__AVX512F__)
    return (Floats)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
    return (Floats)_mm256_max_ps((__m256)a, (__m256)b);
#elif defined(__SSE2__)
    return (Floats)_mm_max_ps((__m128)a, (__m128)b);
#else
    return a > b ? a : b;
#endif
}

// What comparisons find, lane by lane. AVX-512 has registers of their own for it; gcc 12 takes a logical product of
// vectors of comparisons there apart into single bits.
#if defined(__AVX512F__)
typedef __mmask16 Truth;
constexpr Truth kEverywhere = 0xffff;
inline Truth greater(Floats a, Floats b) { return _mm512_cmp_ps_mask((__m512)a, (__m512)b, _CMP_GT_OQ); }
inline Truth at_least(Ints a, Ints b) { return _mm512_cmpge_epi32_mask((__m512i)a, (__m512i)b); }
inline Truth at_least(Words a, Words b) { return _mm512_cmpge_epu32_mask((__m512i)a, (__m512i)b); }
inline Truth equal(Ints a, Ints b) { return _mm512_cmpeq_epi32_mask((__m512i)a, (__m512i)b); }
inline Truth both(Truth a, Truth b) { return Truth(a & b); }
inline Floats choose(Truth truth, Floats a, Floats b) {
    return (Floats)_mm512_mask_blend_ps(truth, (__m512)b, (__m512)a);
}
inline uint64_t bits_of(Truth truth) { return truth; }
#else
typedef Ints Truth;
constexpr Truth kEverywhere = ~Ints{};
inline Truth greater(Floats a, Floats b) { return a > b; }
inline Truth at_least(Ints a, Ints b) { return a >= b; }
inline Truth at_least(Words a, Words b) { return a >= b; }
inline Truth equal(Ints a, Ints b) { return a == b; }
inline Truth both(Truth a, Truth b) { return a & b; }
inline Floats choose(Truth truth, Floats a, Floats b) { return truth ? a : b; }
inline uint64_t bits_of(Truth truth) {
#if defined(__AVX2__)
    return uint32_t(_mm256_movemask_ps((__m256)truth));
#else
    uint64_t bits = 0;
    for (int lane = 0; lane < kWidth; lane++) bits |= uint64_t(truth[lane] & 1) << lane;
    return bits;
#endif
}
#endif
inline Truth less(Floats a, Floats b) { return greater(b, a); }
inline Floats where(Truth truth, Floats a) { return choose(truth, a, Floats{}); }

#if defined(__clang__)
#define TRA_SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define TRA_SHUFFLE(a, b, ...) __builtin_shuffle(a, b, Ints{__VA_ARGS__})
#endif

// Swaps blocks of kStep x kStep lanes that lie across the diagonal of two vectors of a square.
template <int kStep, int... kLane>
inline void swap_blocks(Floats& upper, Floats& lower, std::integer_sequence<int, kLane...>) {
    const Floats kept = upper;
    upper = TRA_SHUFFLE(kept, lower, (kLane & kStep ? kWidth + kLane - kStep : kLane)...);
    lower = TRA_SHUFFLE(kept, lower, (kLane & kStep ? kWidth + kLane : kLane + kStep)...);
}
// Rows become columns.
template <int kStep = kWidth / 2>
inline void transpose(Floats (&square)[kWidth]) {
    for (int row = 0; row < kWidth; row++)
        if (!(row & kStep))
            swap_blocks<kStep>(square[row], square[row + kStep], std::make_integer_sequence<int, kWidth>());
    if constexpr (kStep > 1) transpose<kStep / 2>(square);
}

// The least argument exponential() takes: below it 2^n would leave the normal numbers.
constexpr float kLeastExponent = -86.0f;

// e^x to about one unit in the last place, for x in [kLeastExponent, 88]: x = n ln 2 + r with
// |r| <= ln 2 / 2, a minimax polynomial for e^r (2e-9), and n added to the exponent bits.
inline Floats exponential(Floats x) {
    const Floats shifter = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
    Floats shifted = multiply_add(x, splat(1.44269504f), shifter);
    Floats n = shifted - shifter;
    Floats r = multiply_add(n, splat(-0.693359375f), x);
    r = multiply_add(n, splat(2.12194440e-4f), r);
    Floats p = multiply_add(splat(0x1.6ae72p-10f), r, splat(0x1.126792p-7f));
    p = multiply_add(p, r, splat(0x1.555822p-5f));
    p = multiply_add(p, r, splat(0x1.55541ap-3f));
    p = multiply_add(p, r, splat(0x1.fffffcp-2f));
    p = multiply_add(p, r, splat(1.0f));
    p = multiply_add(p, r, splat(1.0f));
    return (Floats)((Words)p + ((Words)shifted << 23));
}

// Adds a term to a sum, and to `lost` what rounding took away. Numbers or vectors of them.
template <class Number>
inline void add_term(Number& sum, Number& lost, Number term) {
    Number larger = sum + term;
    lost += term - (larger - sum);
    sum = larger;
}

// Adds a row of partial sums to its totals, and starts them anew.
inline void settle(float* partial, float* total, float* lost, long count) {
    for (long d = 0; d < count; d++) {
        add_term(total[d], lost[d], partial[d]);
        partial[d] = 0;
    }
}

// What multiply() does with what its result holds already: nothing, go on summing from there, or add
// a sum of its own to it.
enum class Onto { kNothing, kSum, kTotal };

// c[k][lane] (+)= sum over t of a[t][lane] * b[t][k], one multiply_add() per term from t = 0 upward,
// whatever the block: the kernel's only inner loop. The lanes of a row are contiguous; elements of b
// that belong to one t lie `kStep` apart. With Indexed, term t is found at a + a_index[t] and
// b + b_index[t], otherwise at a + t * a_stride and b + t * b_stride.
struct Terms {
    long count;
    const float* a;
    long a_stride;
    const float* b;
    long b_stride;
    const int64_t* a_index = nullptr;
    const int64_t* b_index = nullptr;
};

template <int kCount, int kStep, bool kIndexed>
inline void multiply(const Terms& terms, float* c, long c_stride, Onto onto) {
    Floats sum[kKeys][kCount];
    for (int k = 0; k < kKeys; k++)
        for (int n = 0; n < kCount; n++)
            sum[k][n] = onto == Onto::kSum ? load(c + k * c_stride + n * kWidth) : Floats{};
    const float* a = terms.a;
    const float* b = terms.b;
    for (long t = 0; t < terms.count; t++) {
        if (kIndexed) {
            a = terms.a + terms.a_index[t];
            b = terms.b + terms.b_index[t];
        }
        Floats left[kCount];
        for (int n = 0; n < kCount; n++) left[n] = load(a + n * kWidth);
        for (int k = 0; k < kKeys; k++) {
            Floats right = splat(b[k * kStep]);
            for (int n = 0; n < kCount; n++) sum[k][n] = multiply_add(left[n], right, sum[k][n]);
        }
        if (!kIndexed) {
            a += terms.a_stride;
            b += terms.b_stride;
        }
    }
    for (int k = 0; k < kKeys; k++)
        for (int n = 0; n < kCount; n++) {
            float* to = c + k * c_stride + n * kWidth;
            store(to, onto == Onto::kTotal ? load(to) + sum[k][n] : sum[k][n]);
        }
}

// Counter-based random bits, the same for every implementation of the operator: a row's two words
// come from the seed, a key's 32 bits from those words and the key's index.
inline uint32_t mix(uint32_t x) {
    x ^= x >> 16;
    x *= 0x7feb352du;
    x ^= x >> 15;
    x *= 0x846ca68bu;
    return x ^ (x >> 16);
}
template <class Word>
inline Word random_bits(uint32_t key, Word low, Word high) {
    Word x = low + key * 0x9e3779b9u;
    x ^= x >> 16;
    x *= 0x7feb352du;
    x ^= x >> 15;
    x += high;
    x *= 0x846ca68bu;
    return x ^ (x >> 16);
}

// Element types in memory; inside, everything is fp32.
enum Type : int32_t { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2 };

inline float from_bits(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}
inline uint32_t to_bits(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    return bits;
}
inline float from_half(uint16_t half) {
    uint32_t magnitude = (half & 0x7fffu) << 13, sign = (half & 0x8000u) << 16;
    if (magnitude >= 0x0f800000u) return from_bits(sign | magnitude | 0x7f800000u);  // inf, NaN
    return from_bits(sign | to_bits(from_bits(magnitude) * 0x1p112f));
}
inline uint16_t to_half(float value) {
    uint32_t bits = to_bits(value), sign = (bits >> 16) & 0x8000u, magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return uint16_t(sign | 0x7e00u);
    if (magnitude >= 0x47800000u) return uint16_t(sign | 0x7c00u);  // 65536 and beyond
    if (magnitude < 0x38800000u)  // subnormal: let an addition round at the last place of 2^-24
        return uint16_t(sign | (to_bits(from_bits(magnitude) + 0.5f) - to_bits(0.5f)));
    return uint16_t(sign | ((magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1)) >> 13));
}
inline uint16_t to_bfloat(float value) {
    uint32_t bits = to_bits(value);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return uint16_t((bits >> 16) | 0x40u);
    return uint16_t((bits + 0x7fffu + ((bits >> 16) & 1)) >> 16);
}

inline void read_row(const void* data, int64_t offset, int64_t stride, int64_t count, Type type,
                     float* to) {
    if (type == kFloat32) {
        const float* from = static_cast<const float*>(data) + offset;
        if (stride == 1) std::memcpy(to, from, count * sizeof(float));
        else for (int64_t d = 0; d < count; d++) to[d] = from[d * stride];
    } else if (type == kBFloat16) {
        const uint16_t* from = static_cast<const uint16_t*>(data) + offset;
        for (int64_t d = 0; d < count; d++) to[d] = from_bits(uint32_t(from[d * stride]) << 16);
    } else {
        const uint16_t* from = static_cast<const uint16_t*>(data) + offset;
        for (int64_t d = 0; d < count; d++) to[d] = from_half(from[d * stride]);
    }
}
inline void write_row(void* data, int64_t offset, int64_t stride, int64_t count, Type type,
                      const float* from) {
    if (type == kFloat32) {
        float* to = static_cast<float*>(data) + offset;
        if (stride == 1) std::memcpy(to, from, count * sizeof(float));
        else for (int64_t d = 0; d < count; d++) to[d * stride] = from[d];
    } else {
        uint16_t* to = static_cast<uint16_t*>(data) + offset;
        for (int64_t d = 0; d < count; d++)
            to[d * stride] = type == kBFloat16 ? to_bfloat(from[d]) : to_half(from[d]);
    }
}

}  // namespace
