// What stands for a divisor that is the same throughout a launch, of dividends below 2^31: dividend / divisor is
// dividend * factor >> shift. A division would take some twenty instructions, one waiting for the other.
struct Reciprocal {
  unsigned factor;
  int shift;

  __device__ __forceinline__ unsigned quotient_of(unsigned dividend) const {
    return static_cast<unsigned>(static_cast<unsigned long long>(dividend) * factor >> shift);
  }
};

// From what a kernel is given: the factor in the low half, the shift in the high.
__device__ __forceinline__ Reciprocal reciprocal_in(long long number) {
  return {static_cast<unsigned>(number), static_cast<int>(number >> 32)};
}
