#include "memfile.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif
#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25
#endif

namespace staccato {

int make_memfile(const char* name, uint64_t bytes) {
    const int fd = memfd_create(name, MFD_CLOEXEC);
    if (fd < 0) fail(STC_DRIVER, "memfd_create: ", std::strerror(errno));
    if (ftruncate(fd, static_cast<off_t>(bytes)) != 0) {
        const int error = errno;
        close(fd);
        fail(STC_NO_MEMORY, "a file of ", mebibytes(bytes), " MiB can't be made: ", std::strerror(error));
    }
    return fd;
}

char* reserve_addresses(uint64_t bytes) {
    const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    void* mapped = mmap(nullptr, bytes + HUGE_BYTES, PROT_NONE, flags, -1, 0);
    if (mapped == MAP_FAILED) {
        fail(STC_NO_ADDRESSES, mebibytes(bytes), " MiB of addresses can't be reserved: ", std::strerror(errno));
    }
    char* start = static_cast<char*>(mapped);
    const uint64_t before = (HUGE_BYTES - reinterpret_cast<uintptr_t>(start) % HUGE_BYTES) % HUGE_BYTES;
    if (before > 0) munmap(start, before);
    munmap(start + before + bytes, HUGE_BYTES - before);
    return start + before;
}

uint64_t make_resident(char* base, uint64_t bytes, bool huge) {
    constexpr uint64_t STRIDE = 256 << 20;  // one call for many folios: each call drains lists of every processor
    const uint64_t first = (HUGE_BYTES - reinterpret_cast<uintptr_t>(base) % HUGE_BYTES) % HUGE_BYTES;
    uint64_t collapsed = 0;
    for (uint64_t at = first; huge && at + HUGE_BYTES <= bytes; at += STRIDE) {
        const uint64_t length = std::min(STRIDE, bytes - at) / HUGE_BYTES * HUGE_BYTES;
        // The kernel collapses only ranges with a page: a small page seeds each folio.
        for (uint64_t seed = at; seed < at + length; seed += HUGE_BYTES) {
            madvise(base + seed, 4096, MADV_POPULATE_WRITE);
        }
        if (madvise(base + at, length, MADV_COLLAPSE) == 0) collapsed += length;  // else small pages stay
    }
    if (madvise(base, bytes, MADV_POPULATE_WRITE) != 0) {
        fail(errno == EINVAL ? STC_UNSUPPORTED : STC_NO_MEMORY, "no memory for ", mebibytes(bytes), " MiB: ",
             std::strerror(errno), errno == EINVAL ? " (Linux 5.14 or newer is needed)" : "");
    }
    return collapsed;
}

}  // namespace staccato
