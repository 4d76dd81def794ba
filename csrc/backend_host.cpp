// A machine without a GPU as a device: the pool is a memfile, mmap maps pages, and a copy is a plain copy.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "backend.h"
#include "memfile.h"

namespace staccato {

namespace {

constexpr uint64_t STREAMING_FROM = 1 << 20;

#if defined(__x86_64__)
// Stores that go past the caches: reading the target first, as plain stores do, costs a third of the bandwidth.
__attribute__((target("avx2"))) void streaming_copy(char* to, const char* from, uint64_t bytes) {
    for (; bytes && reinterpret_cast<uintptr_t>(to) % 32; bytes--) *to++ = *from++;
    for (; bytes >= 128; bytes -= 128, to += 128, from += 128) {
        const auto* source = reinterpret_cast<const __m256i*>(from);
        auto* target = reinterpret_cast<__m256i*>(to);
        const __m256i a = _mm256_loadu_si256(source), b = _mm256_loadu_si256(source + 1);
        const __m256i c = _mm256_loadu_si256(source + 2), d = _mm256_loadu_si256(source + 3);
        _mm256_stream_si256(target, a);
        _mm256_stream_si256(target + 1, b);
        _mm256_stream_si256(target + 2, c);
        _mm256_stream_si256(target + 3, d);
    }
    _mm_sfence();
    std::memcpy(to, from, bytes);
}
#endif

void copy_row(char* to, const char* from, uint64_t bytes) {
#if defined(__x86_64__)
    static const bool avx2 = __builtin_cpu_supports("avx2");
    if (avx2 && bytes >= STREAMING_FROM) return streaming_copy(to, from, bytes);
#endif
    std::memcpy(to, from, bytes);
}

char* pointer(uint64_t address) { return reinterpret_cast<char*>(address); }

// The event of a copy on the host: a copy is over when the call returns.
struct Done : Event {
    bool done() override { return true; }
    void wait() override {}
    void hold_stream(void*) override {}
};

class Host : public Backend {
  public:
    explicit Host(const stc_config&);
    ~Host() override { close(fd_); }

    uint64_t reserve(uint64_t bytes) override { return reinterpret_cast<uint64_t>(reserve_addresses(bytes)); }
    void release(uint64_t address, uint64_t bytes) override { munmap(pointer(address), bytes); }
    // Populated: a fault for each small page of a folio costs more than the copy into it.
    void map(uint64_t address, uint32_t first_page, uint64_t count) override {
        map_file(address, first_page, count, MAP_POPULATE);
    }
    void allow(uint64_t, uint64_t) override {}
    void unmap(uint64_t address, uint64_t bytes) override;
    void make_scratch(uint64_t address, uint64_t bytes) override;
    void zero(Lane, uint64_t address, uint64_t bytes) override { std::memset(pointer(address), 0, bytes); }
    void copy(Lane, const Copy&, Direction) override;
    EventPtr record(Lane) override { return done_; }
    EventPtr record_stream(void*) override { return done_; }
    void hold_lane(Lane, Event& event) override { event.wait(); }
    void pin(void*, uint64_t) override {}
    void unpin(void*) override {}
    void memory(uint64_t& free_bytes, uint64_t& total_bytes) override {
        const auto page = static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
        free_bytes = static_cast<uint64_t>(sysconf(_SC_AVPHYS_PAGES)) * page;
        total_bytes = static_cast<uint64_t>(sysconf(_SC_PHYS_PAGES)) * page;
    }
    int export_page(uint32_t page, uint64_t& fd_offset) override;

  private:
    void map_file(uint64_t address, uint32_t first_page, uint64_t count, int populate);
    int fd_ = -1;
    const EventPtr done_ = std::make_shared<Done>();
};

Host::Host(const stc_config& config) {
    page_bytes = config.page_bytes ? config.page_bytes : HUGE_BYTES;
    if (page_bytes % 4096) {
        fail(STC_INVALID, "a page of ", page_bytes, " bytes is not a multiple of 4096");
    }
    pages = config.pool_bytes / page_bytes;
    if (pages == 0) {
        fail(STC_INVALID, "a pool of ", mebibytes(config.pool_bytes), " MiB holds no page of ", mebibytes(page_bytes),
             " MiB");
    }
    fresh_pages_are_zero = true;

    const uint64_t bytes = pages * page_bytes;
    fd_ = make_memfile("staccato-pool", bytes);
    if (config.lazy) return;
    char* all = nullptr;
    try {  // map the pool for a moment, to get all memory now
        all = reserve_addresses(bytes);
        map_file(reinterpret_cast<uint64_t>(all), 0, pages, 0);
        huge_bytes = make_resident(all, bytes, config.huge_folios && page_bytes % HUGE_BYTES == 0);
        munmap(all, bytes);
    } catch (...) {
        if (all) munmap(all, bytes);
        close(fd_);
        throw;
    }
}

void Host::map_file(uint64_t address, uint32_t first_page, uint64_t count, int populate) {
    const int flags = MAP_SHARED | MAP_FIXED | populate;
    const auto offset = static_cast<off_t>(first_page * page_bytes);
    if (mmap(pointer(address), count * page_bytes, PROT_READ | PROT_WRITE, flags, fd_, offset) == MAP_FAILED) {
        fail(STC_DRIVER, count, " pages can't be mapped: ", std::strerror(errno),
             errno == ENOMEM ? " (raise vm.max_map_count)" : "");
    }
}

void Host::unmap(uint64_t address, uint64_t bytes) {
    const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED;
    if (mmap(pointer(address), bytes, PROT_NONE, flags, -1, 0) == MAP_FAILED) {
        fail(STC_DRIVER, mebibytes(bytes), " MiB can't be unmapped: ", std::strerror(errno));
    }
}

void Host::make_scratch(uint64_t address, uint64_t bytes) {
    const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED;
    if (mmap(pointer(address), bytes, PROT_READ | PROT_WRITE, flags, -1, 0) == MAP_FAILED) {
        fail(STC_NO_MEMORY, mebibytes(bytes), " MiB of scratch memory can't be had: ", std::strerror(errno));
    }
}

void Host::copy(Lane, const Copy& copy, Direction direction) {
    for (uint64_t row = 0; row < copy.rows; row++) {
        char* device = pointer(copy.address + row * copy.pitch);
        char* host = copy.host + row * copy.host_pitch;
        if (direction == TO_DEVICE) {
            copy_row(device, host, copy.width);
        } else {
            copy_row(host, device, copy.width);
        }
    }
}

int Host::export_page(uint32_t page, uint64_t& fd_offset) {
    const int fd = fcntl(fd_, F_DUPFD_CLOEXEC, 0);
    if (fd < 0) fail(STC_DRIVER, "the pool's file can't be shared: ", std::strerror(errno));
    fd_offset = page * page_bytes;
    return fd;
}

}  // namespace

std::unique_ptr<Backend> open_host(const stc_config& config) { return std::make_unique<Host>(config); }

}  // namespace staccato
