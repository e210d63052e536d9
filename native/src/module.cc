// The module `kvcairn._native._core`: arguments in, errors out. Everything runs without the GIL.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>

#include "copy.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

template <typename T>
using Array = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

template <typename T>
kvcairn::Span<const T> span(const Array<T>& array) {
    return {array.data(), array.shape(0)};
}

// The memory of anything with the buffer protocol, in one piece, held for as long as this lives.
class Buffer {
   public:
    Buffer(nb::handle owner, int flags) {
        if (PyObject_GetBuffer(owner.ptr(), &view_, flags) != 0) throw nb::python_error();
    }
    ~Buffer() { PyBuffer_Release(&view_); }
    Buffer(const Buffer&) = delete;
    Buffer& operator=(const Buffer&) = delete;

    kvcairn::Span<std::uint8_t> bytes() const {
        return {static_cast<std::uint8_t*>(view_.buf), static_cast<std::size_t>(view_.len)};
    }
    kvcairn::Span<const std::uint8_t> constant() const { return {bytes().data, bytes().size}; }

   private:
    Py_buffer view_{};
};

kvcairn::Pages pages(const Array<std::uint64_t>& bases, std::int64_t pool_bytes, const Array<std::int64_t>& indices,
                     std::int64_t stride_bytes, std::int64_t page_bytes) {
    return {span(bases), pool_bytes, span(indices), stride_bytes, page_bytes};
}

void gather(const Array<std::uint64_t>& bases, std::int64_t pool_bytes, const Array<std::int64_t>& indices,
            std::int64_t stride_bytes, std::int64_t page_bytes, nb::handle out, const Array<std::int64_t>& offsets,
            unsigned threads) {
    const Buffer block(out, PyBUF_WRITABLE);
    const nb::gil_scoped_release free;
    kvcairn::gather(pages(bases, pool_bytes, indices, stride_bytes, page_bytes), {block.bytes(), span(offsets)}, threads);
}

void scatter(const Array<std::uint64_t>& bases, std::int64_t pool_bytes, const Array<std::int64_t>& indices,
             std::int64_t stride_bytes, std::int64_t page_bytes, nb::handle source, const Array<std::int64_t>& offsets,
             unsigned threads) {
    const Buffer block(source, PyBUF_SIMPLE);
    const nb::gil_scoped_release free;
    kvcairn::scatter(pages(bases, pool_bytes, indices, stride_bytes, page_bytes), {block.constant(), span(offsets)}, threads);
}

void copy(const Array<std::uint64_t>& targets, const Array<std::uint64_t>& sources, const Array<std::int64_t>& sizes,
          unsigned threads) {
    const nb::gil_scoped_release free;
    kvcairn::copy({span(targets), span(sources), span(sizes)}, threads);
}

nb::bytes copy_hashed(const Array<std::uint64_t>& targets, const Array<std::uint64_t>& sources,
                      const Array<std::int64_t>& sizes, unsigned threads, const std::optional<Array<std::int64_t>>& counts) {
    const auto wanted = counts ? span(*counts) : kvcairn::Span<const std::int64_t>{nullptr, 0};
    const nb::bytes digests(nullptr, (counts ? wanted.size : sizes.shape(0)) * kvcairn::digest_bytes);
    auto* const out = reinterpret_cast<std::uint8_t*>(PyBytes_AsString(digests.ptr()));
    const nb::gil_scoped_release free;
    static const std::int64_t none = 0;  // an empty array may have no address
    kvcairn::copy_hashed({span(targets), span(sources), span(sizes)},
                         counts && wanted.size == 0 ? kvcairn::Span<const std::int64_t>{&none, 0} : wanted, out, threads);
    return digests;
}

nb::bytes checksum(nb::handle data) {
    const Buffer buffer(data, PyBUF_SIMPLE);
    std::uint8_t digest[kvcairn::digest_bytes];
    {
        const nb::gil_scoped_release free;
        kvcairn::hash(buffer.constant(), digest);
    }
    return nb::bytes(digest, sizeof digest);
}

}  // namespace

NB_MODULE(_core, m) {
    m.def("instruction_set", [] { return kvcairn::best_level().name; });
    m.def("gather", gather, "bases"_a, "pool_bytes"_a, "indices"_a, "stride_bytes"_a, "page_bytes"_a, "out"_a,
          "offsets"_a, "threads"_a = 1);
    m.def("scatter", scatter, "bases"_a, "pool_bytes"_a, "indices"_a, "stride_bytes"_a, "page_bytes"_a, "source"_a,
          "offsets"_a, "threads"_a = 1);
    m.def("copy", copy, "targets"_a, "sources"_a, "sizes"_a, "threads"_a = 1);
    m.def("copy_hashed", copy_hashed, "targets"_a, "sources"_a, "sizes"_a, "threads"_a = 1,
          "counts"_a = nb::none());
    m.def("checksum", checksum, "data"_a);
}
