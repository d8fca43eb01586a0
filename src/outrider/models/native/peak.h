// What the processor's arithmetic could do at best. A part of kernels.cpp, in its namespace.

#if AMX
// The same in tile registers, as bfloat16, into four sums that do not wait for each other.
double amx_dots_per_second(double seconds) {
    constexpr int CHAINS = 4, TIMES = 1000;
    constexpr double EACH = 16.0 * 16 * 32;  // multiply-adds of an instruction
    const amx::Registers registers(true);
    amx::zero<0>(), amx::zero<1>(), amx::zero<2>(), amx::zero<3>(), amx::zero<6>(), amx::zero<7>();
    const auto begin = std::chrono::steady_clock::now();
    for (double done = TIMES * CHAINS * EACH;; done += TIMES * CHAINS * EACH) {
        for (int n = 0; n < TIMES; n++) {
            amx::add_brains<0, 6, 7>();
            amx::add_brains<1, 6, 7>();
            amx::add_brains<2, 6, 7>();
            amx::add_brains<3, 6, 7>();
        }
        const double took = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
        if (took >= seconds) return done / took;
    }
}
#endif

// Multiply-adds of 8 bits in a second by the instructions that products of many rows use.
double dots_per_second(double seconds) {
#if AMX
    if (amx::usable()) return amx_dots_per_second(seconds);
#endif
#if WIDE || HALF_WIDE
    constexpr int CHAINS = 12, TIMES = 1000;  // sums that do not wait for each other; rounds between two looks at the clock
#if WIDE
    __m512i sums[CHAINS] = {}, a = _mm512_set1_epi8(1), b = a;
#if VNNI
#define OUTRIDER_DOT(i) asm volatile("vpdpbusd %2, %1, %0" : "+v"(sums[i]) : "v"(a), "v"(b))
#else  // each of 16 bits counts as two
#define OUTRIDER_DOT(i) asm volatile("vpmaddwd %2, %1, %0" : "=v"(sums[i]) : "v"(a), "v"(b))
#endif
#else
    __m256i sums[CHAINS] = {}, a = _mm256_set1_epi8(1), b = a;
#define OUTRIDER_DOT(i) asm volatile("vpmaddubsw %2, %1, %0" : "=x"(sums[i]) : "x"(a), "x"(b))
#endif
    const auto begin = std::chrono::steady_clock::now();
    for (double done = TIMES * CHAINS * sizeof(a);; done += TIMES * CHAINS * sizeof(a)) {
        for (int n = 0; n < TIMES; n++) {
            OUTRIDER_DOT(0); OUTRIDER_DOT(1); OUTRIDER_DOT(2); OUTRIDER_DOT(3); OUTRIDER_DOT(4); OUTRIDER_DOT(5);
            OUTRIDER_DOT(6); OUTRIDER_DOT(7); OUTRIDER_DOT(8); OUTRIDER_DOT(9); OUTRIDER_DOT(10); OUTRIDER_DOT(11);
        }
        const double took = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
        if (took >= seconds) return done / took;
    }
#undef OUTRIDER_DOT
#else
    static_cast<void>(seconds);
    return 0;
#endif
}
