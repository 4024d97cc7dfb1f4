#pragma once
/* In place of CuPy's header: complex numbers are moved, cast and added. */
namespace thrust {
template <class T> struct alignas(2 * sizeof(T)) complex {
    T real_, imag_;
    complex() {}
    complex(T real) : real_(real), imag_(0) {}
    complex(T real, T imag) : real_(real), imag_(imag) {}
    template <class U> complex(const complex<U> &other) : real_(other.real_), imag_(other.imag_) {}
    complex operator+(const complex &other) const
    {
        return complex(real_ + other.real_, imag_ + other.imag_);
    }
    T real() const { return real_; }
    T imag() const { return imag_; }
};
}
using thrust::complex;
