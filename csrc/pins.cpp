#include "pins.h"

#include <algorithm>
#include <chrono>

namespace staccato {

namespace {

// The driver may keep launches waiting while it registers memory: 64 MiB in small pages take some 20 ms, in folios 2 ms.
constexpr uint64_t EXTENT_MOST = 64 << 20, SMALL_PAGE = 4096;

uint64_t extent_bytes(uint64_t limit) {
    if (limit == 0) return EXTENT_MOST;
    // Each lane and the background may need an extent at the same time.
    return std::clamp(limit / 8 / SMALL_PAGE * SMALL_PAGE, SMALL_PAGE, EXTENT_MOST);
}

}  // namespace

Pins::Pins(Backend& backend, uint64_t limit, std::function<void(Lane)> drain)
    : backend_(backend), limit_(limit), extent_bytes_(extent_bytes(limit)), drain_(std::move(drain)) {}

void Pins::announce(char* base, uint64_t bytes) {
    std::lock_guard<std::mutex> lock(mu_);
    const auto after = extents_.lower_bound(base);
    const bool overlaps_next = after != extents_.end() && after->first < base + bytes;
    const bool overlaps_last =
        after != extents_.begin() && std::prev(after)->first + std::prev(after)->second.bytes > base;
    if (overlaps_next || overlaps_last) fail(STC_STATE, "the range, or a part of it, is pinned for this device already");
    for (uint64_t at = 0; at < bytes; at += extent_bytes_) {
        Extent extent{};
        extent.range = base;
        extent.bytes = std::min(extent_bytes_, bytes - at);
        extents_.emplace(base + at, extent);
    }
    filling_++;
}

void Pins::fill(char* base) {
    Lock lock(mu_);
    for (char* at = base;;) {
        const auto extent = extents_.find(at);
        if (extent == extents_.end() || extent->second.range != base) break;  // the end, or withdrawn
        at += extent->second.bytes;
        if (extent->second.state != WAITING) continue;
        if (limit_ && registered_bytes_ + extent->second.bytes > limit_) break;  // copies make room when they need it
        try {
            register_it(lock, extent);
        } catch (const Error&) {
            break;  // a copy tries again, and reports the reason
        }
    }
    filling_--;
    changed_.notify_all();
}

void Pins::withdraw(char* base) {
    Lock lock(mu_);
    for (;;) {
        auto extent = extents_.lower_bound(base);
        if (extent == extents_.end() || extent->second.range != base) return;
        if (extent->second.holds || extent->second.state == CHANGING) {
            changed_.wait(lock);
            continue;
        }
        if (extent->second.state == REGISTERED) {
            unregister(lock, extent);
            continue;
        }
        extents_.erase(extent);
    }
}

bool Pins::idle() const {
    std::lock_guard<std::mutex> lock(mu_);
    return filling_ == 0;
}

// -- registering: `lock` is released during the driver's work, and the extent stays in the map, for it is CHANGING ----

void Pins::register_it(Lock& lock, Extents::iterator at) {
    Extent& extent = at->second;
    extent.state = CHANGING;
    registered_bytes_ += extent.bytes;
    lock.unlock();
    const auto start = std::chrono::steady_clock::now();
    try {
        backend_.pin(at->first, extent.bytes);
    } catch (...) {
        lock.lock();
        extent.state = WAITING;
        registered_bytes_ -= extent.bytes;
        changed_.notify_all();
        throw;
    }
    lock.lock();
    seconds_ += std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    calls_++;
    extent.state = REGISTERED;
    extent.lanes = 0;
    changed_.notify_all();
}

void Pins::unregister(Lock& lock, Extents::iterator at) {
    Extent& extent = at->second;
    extent.state = CHANGING;
    const unsigned lanes = extent.lanes;
    lock.unlock();
    for (int lane = 0; lane < LANES; lane++) {
        if (lanes >> lane & 1) drain_(static_cast<Lane>(lane));
    }
    try {
        backend_.unpin(at->first);
    } catch (...) {  // the device is gone: nothing is registered any more
    }
    lock.lock();
    extent.state = WAITING;
    registered_bytes_ -= extent.bytes;
    changed_.notify_all();
}

// Makes room for so many bytes; true if the lock was released meanwhile, so that the caller must look again.
bool Pins::make_room(Lock& lock, uint64_t bytes) {
    if (!limit_ || registered_bytes_ + bytes <= limit_) return false;
    auto oldest = extents_.end();
    for (auto extent = extents_.begin(); extent != extents_.end(); ++extent) {
        if (extent->second.state != REGISTERED || extent->second.holds) continue;
        if (oldest == extents_.end() || extent->second.used_at < oldest->second.used_at) oldest = extent;
    }
    if (oldest == extents_.end()) {
        changed_.wait(lock);  // others hold or change their extents, for a moment
    } else {
        unregister(lock, oldest);
    }
    return true;
}

// -- copies -----------------------------------------------------------------------------------------------------------

Pins::Extents::iterator Pins::extent_of(const char* host) {
    auto after = extents_.upper_bound(const_cast<char*>(host));
    if (after == extents_.begin()) return extents_.end();
    --after;
    return host < after->first + after->second.bytes ? after : extents_.end();
}

void Pins::each(const Copy& copy, Lane lane, const std::function<void(const Copy&)>& issue) {
    if (copy.rows == 1) return issue_row(copy, lane, issue);
    bool together;
    {
        std::lock_guard<std::mutex> lock(mu_);
        const auto first = extent_of(copy.host);
        together = first != extents_.end() && first == extent_of(copy.host + (copy.rows - 1) * copy.host_pitch + copy.width - 1);
    }
    if (together) return issue_part(copy, lane, issue);
    for (uint64_t row = 0; row < copy.rows; row++) {
        issue_row({copy.address + row * copy.pitch, 0, copy.host + row * copy.host_pitch, 0, copy.width, 1}, lane, issue);
    }
}

void Pins::issue_row(Copy copy, Lane lane, const std::function<void(const Copy&)>& issue) {
    while (copy.width) {
        Copy part = copy;
        {
            std::lock_guard<std::mutex> lock(mu_);
            const auto extent = extent_of(copy.host);
            if (extent != extents_.end()) {
                part.width = std::min<uint64_t>(copy.width, static_cast<uint64_t>(extent->first + extent->second.bytes - copy.host));
            }
        }
        issue_part(part, lane, issue);
        copy.address += part.width;
        copy.host += part.width;
        copy.width -= part.width;
    }
}

void Pins::issue_part(const Copy& part, Lane lane, const std::function<void(const Copy&)>& issue) {
    Lock lock(mu_);
    Extents::iterator extent;
    for (;;) {
        extent = extent_of(part.host);
        if (extent == extents_.end()) {
            fail(STC_STATE, part.bytes(), " bytes of the host are not pinned for the device: pin the range of the cache first");
        }
        if (extent->second.state == REGISTERED) break;
        if (extent->second.state == CHANGING) {
            changed_.wait(lock);
        } else if (!make_room(lock, extent->second.bytes)) {
            register_it(lock, extent);
        }
    }
    extent->second.holds++;
    extent->second.used_at = ++uses_;
    lock.unlock();
    const auto let_go = [&] {
        lock.lock();
        extent->second.holds--;
        extent->second.lanes |= 1u << lane;
        changed_.notify_all();
    };
    try {
        issue(part);
    } catch (...) {
        let_go();
        throw;
    }
    let_go();
}

void Pins::add_to(stc_stats& stats) const {
    std::lock_guard<std::mutex> lock(mu_);
    stats.pinned_bytes = registered_bytes_;
    stats.pin_calls = calls_;
    stats.pin_s = seconds_;
}

}  // namespace staccato
