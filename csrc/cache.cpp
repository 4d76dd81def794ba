#include "cache.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "memfile.h"

namespace staccato {

namespace {

int open_file(int fd, uint64_t bytes) {
    if (bytes == 0) fail(STC_INVALID, "a cache of 0 bytes can't be made");
    if (fd < 0) return make_memfile("staccato-cache", bytes);
    const off_t size = lseek(fd, 0, SEEK_END);
    if (size < 0 || static_cast<uint64_t>(size) < bytes) {
        fail(STC_INVALID, "file ", fd, " has ", size, " bytes, the cache is to have ", bytes);
    }
    const int own = fcntl(fd, F_DUPFD_CLOEXEC, 0);
    if (own < 0) fail(STC_DRIVER, "file ", fd, ": ", std::strerror(errno));
    return own;
}

char* map_file(int fd, uint64_t bytes) {
    char* base = nullptr;
    try {
        base = reserve_addresses(bytes);
        if (mmap(base, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, 0) != MAP_FAILED) return base;
        fail(STC_NO_ADDRESSES, "the cache of ", mebibytes(bytes), " MiB can't be mapped: ", std::strerror(errno));
    } catch (...) {
        if (base) munmap(base, bytes);
        close(fd);
        throw;
    }
}

}  // namespace

Cache::Cache(int fd, uint64_t bytes) : bytes(bytes), fd(open_file(fd, bytes)), base(map_file(this->fd, bytes)) {}

Cache::~Cache() {
    munmap(base, bytes);
    ::close(fd);
}

char* Cache::range(uint64_t offset, uint64_t length) const {
    if (length == 0 || offset > bytes || length > bytes - offset) {
        fail(STC_INVALID, length, " bytes at ", offset, " do not lie in the cache of ", bytes, " bytes");
    }
    return base + offset;
}

uint64_t Cache::commit(uint64_t offset, uint64_t length) {
    if (offset % 4096) fail(STC_INVALID, "offset ", offset, " is not a multiple of 4096");
    return make_resident(range(offset, length), length, true);
}

void Cache::discard(uint64_t offset, uint64_t length) {
    range(offset, length);
    const auto at = static_cast<off_t>(offset), end = static_cast<off_t>(length);
    if (fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, at, end) != 0) {
        fail(STC_DRIVER, mebibytes(length), " MiB of the cache can't be given back: ", std::strerror(errno));
    }
}

void Cache::pin(Device& device, uint64_t offset, uint64_t length) {
    char* pinned = range(offset, length);
    if (offset % 4096) fail(STC_INVALID, "offset ", offset, " is not a multiple of 4096");
    device.pin(pinned, length);
    std::lock_guard<std::mutex> lock(mu_);
    pins_.push_back({&device, pinned});
}

void Cache::unpin(Device& device, uint64_t offset) {
    {
        std::lock_guard<std::mutex> lock(mu_);
        const auto is_it = [&](const Pin& pin) { return pin.device == &device && pin.base == base + offset; };
        const auto pin = std::find_if(pins_.begin(), pins_.end(), is_it);
        if (pin == pins_.end()) fail(STC_INVALID, "no range at ", offset, " of the cache is pinned for this device");
        pins_.erase(pin);
    }
    device.unpin(base + offset);
}

void Cache::use(const TicketPtr& ticket) {
    std::lock_guard<std::mutex> lock(mu_);
    if (users_.size() >= 64 && users_.size() == users_.capacity()) drop_finished_users();
    users_.push_back(ticket);
}

void Cache::drop_finished_users() {
    const auto over = [](const TicketPtr& ticket) { return ticket->over(); };
    users_.erase(std::remove_if(users_.begin(), users_.end(), over), users_.end());
}

void Cache::close() {
    std::unique_lock<std::mutex> lock(mu_);
    drop_finished_users();
    if (!users_.empty()) {
        fail(STC_STATE, users_.size(), " transfers use the cache: wait for them or cancel them first");
    }
    const std::vector<Pin> pins = std::move(pins_);
    lock.unlock();  // a device locks its own members first
    for (const Pin& pin : pins) pin.device->unpin(pin.base);
}

}  // namespace staccato
