// A libcuda.so.1 without a GPU, for tests of the CUDA backend: two devices whose memory is host memory, streams are
// threads that lag behind, and what a real driver forbids is refused: calls without a context, unallowed access, half
// unmaps.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <thread>
#include <vector>

#include "../cuda_driver.h"

using namespace staccato::cuda;

namespace staccato::cuda {

struct StreamOf {
    explicit StreamOf(DeviceNumber device) : device(device) {}
    const DeviceNumber device;
    std::mutex mu;
    std::condition_variable changed;
    std::deque<std::function<void()>> jobs;
    bool stopping = false, busy = false;
    std::thread thread{[this] { run(); }};

    void run() {
        std::unique_lock<std::mutex> lock(mu);
        for (;;) {
            changed.wait(lock, [this] { return stopping || !jobs.empty(); });
            if (jobs.empty()) return;
            auto job = std::move(jobs.front());
            jobs.pop_front();
            busy = true;
            lock.unlock();
            job();
            lock.lock();
            busy = false;
            changed.notify_all();
        }
    }
    void put(std::function<void()> job) {
        std::lock_guard<std::mutex> lock(mu);
        jobs.push_back(std::move(job));
        changed.notify_all();
    }
};

struct EventOf {
    std::mutex mu;
    std::condition_variable changed;
    int recorded = 0, reached = 0;

    void wait(int which) {
        std::unique_lock<std::mutex> lock(mu);
        changed.wait(lock, [&] { return reached >= which; });
    }
    int newest() {
        std::lock_guard<std::mutex> lock(mu);
        return recorded;
    }
};

}  // namespace staccato::cuda

namespace {

constexpr Result INVALID_VALUE = 1, INVALID_CONTEXT = 201, ALREADY_REGISTERED = 712;
constexpr size_t GRANULE = 64 << 10;
constexpr DeviceNumber DEVICES = 2;
constexpr size_t MEMORY = 1 << 30;  // of each device

struct Mapping {
    size_t bytes;  // of one handle
    std::set<int> allowed;  // devices
};

thread_local std::vector<DeviceNumber> contexts;  // of the thread, the current one last
std::mutex mappings_mu;
std::map<Address, Mapping> mappings;
std::map<Address, DeviceNumber> buffers;  // made by cuMemAlloc
std::map<Address, size_t> buffer_bytes;
std::map<PageHandle, std::pair<DeviceNumber, size_t>> pages;  // made by cuMemCreate: device and bytes
std::array<size_t, DEVICES> taken;  // bytes of pages and buffers of each device
std::array<std::atomic<uint64_t>, DEVICES> carried;  // bytes from the host

// Not of CUDA: calls by kind, of all threads and of the calling thread.
enum Kind { MAPS, ZEROES, WAITS, UNMAPS, REGISTRATIONS, COPIES, REFUSED_COPIES, LATE_COPIES, KINDS };
std::array<std::atomic<uint64_t>, KINDS> calls;
thread_local std::array<uint64_t, KINDS> own_calls;
void count(Kind kind) { calls[kind]++, own_calls[kind]++; }

std::map<uintptr_t, size_t> registered;  // memory of the host; guarded by mappings_mu

// Whether the bytes lie in one registered range: a copy from two ranges is refused by a real driver as well.
bool is_registered(const void* host, size_t bytes) {
    const auto at = reinterpret_cast<uintptr_t>(host);
    std::lock_guard<std::mutex> lock(mappings_mu);
    auto after = registered.upper_bound(at);
    if (after == registered.begin()) return false;
    --after;
    return at + bytes <= after->first + after->second;
}

bool may_copy(const void* host, size_t bytes) {
    count(COPIES);
    if (is_registered(host, bytes)) return true;
    return count(REFUSED_COPIES), false;
}

// A copy that comes after the end of the registration reads or writes memory that may be another's.
void look_again(const void* host, size_t bytes) {
    if (!is_registered(host, bytes)) count(LATE_COPIES);
}

char* pointer(Address address) { return reinterpret_cast<char*>(address); }

Result lag(Stream stream, std::function<void()> job, int microseconds = 200) {
    if (contexts.empty()) return INVALID_CONTEXT;
    stream->put([job = std::move(job), microseconds] {
        std::this_thread::sleep_for(std::chrono::microseconds(microseconds));
        job();
    });
    return SUCCESS;
}

// All of it is a buffer of the device's, or was allowed to it.
bool may_write(DeviceNumber device, Address address, size_t bytes) {
    std::lock_guard<std::mutex> lock(mappings_mu);
    if (auto buffer = buffers.find(address); buffer != buffers.end()) return buffer->second == device;
    auto at = mappings.upper_bound(address);
    if (at == mappings.begin()) return false;
    for (--at; address < at->first + at->second.bytes && at->second.allowed.count(device); ++at) {
        if (address + bytes <= at->first + at->second.bytes) return true;
        if (std::next(at) == mappings.end() || std::next(at)->first != at->first + at->second.bytes) return false;
    }
    return false;
}

// Books bytes of a device; mappings_mu is held.
bool take(DeviceNumber device, size_t bytes) {
    size_t& of_device = taken[static_cast<size_t>(device)];
    if (bytes > MEMORY - of_device) return false;
    of_device += bytes;
    return true;
}

Result set_protection(Address address, size_t bytes, int protection) {
    return mprotect(pointer(address), bytes, protection) == 0 ? SUCCESS : INVALID_VALUE;
}

}  // namespace

#define FAKE(name) extern "C" __attribute__((visibility("default"))) Result name
#define NEEDS_CONTEXT \
    if (contexts.empty()) return INVALID_CONTEXT

FAKE(cuInit)(unsigned) { return SUCCESS; }
FAKE(cuGetErrorString)(Result, const char** text) {
    *text = "the fake driver refused";
    return SUCCESS;
}
FAKE(cuDeviceGet)(DeviceNumber* device, int ordinal) {
    return (*device = ordinal) < DEVICES ? SUCCESS : INVALID_VALUE;
}
FAKE(cuDeviceGetAttribute)(int* value, int, DeviceNumber) { return *value = 1, SUCCESS; }
FAKE(cuDevicePrimaryCtxRetain)(Context* context, DeviceNumber device) {
    return *context = reinterpret_cast<Context>(uintptr_t{1} + static_cast<uintptr_t>(device)), SUCCESS;
}
FAKE(cuDevicePrimaryCtxRelease_v2)(DeviceNumber) { return SUCCESS; }
FAKE(cuCtxPushCurrent_v2)(Context context) {
    contexts.push_back(static_cast<DeviceNumber>(reinterpret_cast<uintptr_t>(context) - 1));
    return SUCCESS;
}
FAKE(cuCtxPopCurrent_v2)(Context*) { return contexts.pop_back(), SUCCESS; }
FAKE(cuDeviceCanAccessPeer)(int* can, DeviceNumber device, DeviceNumber other) {
    return *can = device != other, SUCCESS;
}

FAKE(cuMemGetInfo_v2)(size_t* free_bytes, size_t* total_bytes) {
    NEEDS_CONTEXT;
    std::lock_guard<std::mutex> lock(mappings_mu);
    return *total_bytes = MEMORY, *free_bytes = MEMORY - taken[static_cast<size_t>(contexts.back())], SUCCESS;
}
FAKE(cuMemGetAllocationGranularity)(size_t* granule, const AllocationProperties*, unsigned) {
    return *granule = GRANULE, SUCCESS;
}
FAKE(cuMemAlloc_v2)(Address* address, size_t bytes) {
    NEEDS_CONTEXT;
    std::lock_guard<std::mutex> lock(mappings_mu);
    if (!take(contexts.back(), bytes)) return OUT_OF_MEMORY;
    *address = reinterpret_cast<Address>(std::malloc(bytes));
    buffers[*address] = contexts.back();
    buffer_bytes[*address] = bytes;
    return SUCCESS;
}
FAKE(cuMemFree_v2)(Address address) {
    NEEDS_CONTEXT;
    std::lock_guard<std::mutex> lock(mappings_mu);
    if (buffers.count(address) == 0) return INVALID_VALUE;
    taken[static_cast<size_t>(buffers[address])] -= buffer_bytes[address];
    buffers.erase(address);
    buffer_bytes.erase(address);
    return std::free(pointer(address)), SUCCESS;
}
FAKE(cuMemAddressReserve)(Address* address, size_t bytes, size_t, Address, unsigned long long) {
    void* mapped = mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (mapped == MAP_FAILED) return OUT_OF_MEMORY;
    *address = reinterpret_cast<Address>(mapped);
    return SUCCESS;
}
FAKE(cuMemAddressFree)(Address address, size_t bytes) {
    return munmap(pointer(address), bytes) == 0 ? SUCCESS : INVALID_VALUE;
}
FAKE(cuMemCreate)(PageHandle* handle, size_t bytes, const AllocationProperties* properties, unsigned long long) {
    NEEDS_CONTEXT;
    std::lock_guard<std::mutex> lock(mappings_mu);
    const DeviceNumber device = properties->location.id;
    if (!take(device, bytes)) return OUT_OF_MEMORY;
    const int fd = memfd_create("fake-page", MFD_CLOEXEC);
    if (bytes % GRANULE || fd < 0 || ftruncate(fd, static_cast<off_t>(bytes)) != 0) return INVALID_VALUE;
    *handle = static_cast<PageHandle>(fd);
    pages[*handle] = {device, bytes};
    return SUCCESS;
}
FAKE(cuMemRelease)(PageHandle handle) {
    std::lock_guard<std::mutex> lock(mappings_mu);
    if (auto page = pages.find(handle); page != pages.end()) {
        taken[static_cast<size_t>(page->second.first)] -= page->second.second;
        pages.erase(page);
    }
    return close(static_cast<int>(handle)) == 0 ? SUCCESS : INVALID_VALUE;
}
FAKE(cuMemExportToShareableHandle)(void* fd, PageHandle handle, unsigned, unsigned long long) {
    *static_cast<int*>(fd) = dup(static_cast<int>(handle));
    return SUCCESS;
}
FAKE(cuMemMap)(Address address, size_t bytes, size_t offset, PageHandle handle, unsigned long long) {
    NEEDS_CONTEXT;
    count(MAPS);
    std::lock_guard<std::mutex> lock(mappings_mu);
    const auto after = mappings.lower_bound(address);
    if (offset != 0 || (after != mappings.end() && after->first < address + bytes)) return INVALID_VALUE;
    void* mapped = mmap(pointer(address), bytes, PROT_NONE, MAP_SHARED | MAP_FIXED, static_cast<int>(handle), 0);
    if (mapped == MAP_FAILED) return OUT_OF_MEMORY;
    mappings[address] = {bytes, {}};
    return SUCCESS;
}
FAKE(cuMemUnmap)(Address address, size_t bytes) {
    NEEDS_CONTEXT;
    count(UNMAPS);
    std::lock_guard<std::mutex> lock(mappings_mu);
    for (Address at = address; at < address + bytes; at += mappings[at].bytes) {
        if (!mappings.count(at) || at + mappings[at].bytes > address + bytes) return INVALID_VALUE;
    }
    mappings.erase(mappings.find(address), mappings.lower_bound(address + bytes));
    const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED;
    return mmap(pointer(address), bytes, PROT_NONE, flags, -1, 0) != MAP_FAILED ? SUCCESS : INVALID_VALUE;
}
FAKE(cuMemSetAccess)(Address address, size_t bytes, const AccessDescription* access, size_t count) {
    NEEDS_CONTEXT;
    std::lock_guard<std::mutex> lock(mappings_mu);
    for (size_t i = 0; i < count; i++) {
        if (access[i].flags != ACCESS_READ_WRITE) return INVALID_VALUE;
        for (auto at = mappings.find(address); at != mappings.end() && at->first < address + bytes; at++) {
            at->second.allowed.insert(access[i].location.id);
        }
    }
    return set_protection(address, bytes, PROT_READ | PROT_WRITE);
}

FAKE(cuStreamCreate)(Stream* stream, unsigned) {
    NEEDS_CONTEXT;
    return *stream = new StreamOf(contexts.back()), SUCCESS;
}
FAKE(cuStreamSynchronize)(Stream stream) {
    count(WAITS);
    std::unique_lock<std::mutex> lock(stream->mu);
    stream->changed.wait(lock, [stream] { return stream->jobs.empty() && !stream->busy; });
    return SUCCESS;
}
FAKE(cuStreamDestroy_v2)(Stream stream) {
    {
        std::lock_guard<std::mutex> lock(stream->mu);
        stream->stopping = true;
        stream->changed.notify_all();
    }
    stream->thread.join();
    delete stream;
    return SUCCESS;
}
FAKE(cuStreamWaitEvent)(Stream stream, EventHandle event, unsigned) {
    return lag(stream, [event, which = event->newest()] { event->wait(which); });
}

FAKE(cuEventCreate)(EventHandle* event, unsigned) {
    NEEDS_CONTEXT;
    return *event = new EventOf, SUCCESS;
}
FAKE(cuEventDestroy_v2)(EventHandle event) { return delete event, SUCCESS; }
FAKE(cuEventRecord)(EventHandle event, Stream stream) {
    int which;
    {
        std::lock_guard<std::mutex> lock(event->mu);
        which = ++event->recorded;
    }
    return lag(stream, [event, which] {
        std::lock_guard<std::mutex> lock(event->mu);
        event->reached = std::max(event->reached, which);  // an older record, on another stream, may come late
        event->changed.notify_all();
    });
}
FAKE(cuEventQuery)(EventHandle event) {
    NEEDS_CONTEXT;
    std::lock_guard<std::mutex> lock(event->mu);
    return event->reached >= event->recorded ? SUCCESS : NOT_READY;
}
FAKE(cuEventSynchronize)(EventHandle event) {
    NEEDS_CONTEXT;
    count(WAITS);
    event->wait(event->newest());
    return SUCCESS;
}

FAKE(cuMemcpyHtoDAsync_v2)(Address to, const void* from, size_t bytes, Stream stream) {
    if (!may_write(stream->device, to, bytes) || !may_copy(from, bytes)) return INVALID_VALUE;
    carried[static_cast<size_t>(stream->device)] += bytes;
    return lag(stream, [=] {
        look_again(from, bytes);
        std::memcpy(pointer(to), from, bytes);
    });
}
FAKE(cuMemcpyDtoDAsync_v2)(Address to, Address from, size_t bytes, Stream stream) {
    if (!may_write(stream->device, to, bytes)) return INVALID_VALUE;
    return lag(stream, [=] { std::memcpy(pointer(to), pointer(from), bytes); }, 1000);  // after all that is not awaited
}
FAKE(cuMemcpyDtoHAsync_v2)(void* to, Address from, size_t bytes, Stream stream) {
    if (!may_copy(to, bytes)) return INVALID_VALUE;
    return lag(stream, [=] {
        look_again(to, bytes);
        std::memcpy(to, pointer(from), bytes);
    });
}
FAKE(cuMemcpy2DAsync_v2)(const Copy2D* rows, Stream stream) {
    const Side& host = rows->source.memory_type == MEMORY_HOST ? rows->source : rows->target;
    const size_t span = (rows->height - 1) * host.pitch + rows->width;
    if (!may_copy(host.host, span)) return INVALID_VALUE;
    return lag(stream, [copy = *rows, memory = host.host, span] {
        look_again(memory, span);
        auto start = [](const Side& side) {
            if (side.memory_type == MEMORY_DEVICE) return pointer(side.device);
            return static_cast<char*>(const_cast<void*>(side.host));
        };
        for (size_t row = 0; row < copy.height; row++) {
            char* to = start(copy.target) + row * copy.target.pitch;
            std::memcpy(to, start(copy.source) + row * copy.source.pitch, copy.width);
        }
    });
}
FAKE(cuMemsetD8Async)(Address address, unsigned char value, size_t bytes, Stream stream) {
    count(ZEROES);
    return lag(stream, [=] { std::memset(pointer(address), value, bytes); });
}
FAKE(cuMemHostRegister_v2)(void* base, size_t bytes, unsigned) {
    NEEDS_CONTEXT;
    count(REGISTRATIONS);
    const auto at = reinterpret_cast<uintptr_t>(base);
    if (at % 4096) return INVALID_VALUE;
    std::this_thread::sleep_for(std::chrono::microseconds(200));
    std::lock_guard<std::mutex> lock(mappings_mu);
    const auto after = registered.lower_bound(at);
    if (after != registered.end() && after->first < at + bytes) return ALREADY_REGISTERED;
    if (after != registered.begin() && std::prev(after)->first + std::prev(after)->second > at) return ALREADY_REGISTERED;
    return registered[at] = bytes, SUCCESS;
}
FAKE(cuMemHostUnregister)(void* base) {
    NEEDS_CONTEXT;
    std::lock_guard<std::mutex> lock(mappings_mu);
    return registered.erase(reinterpret_cast<uintptr_t>(base)) ? SUCCESS : INVALID_VALUE;
}

// What vLLM's libraries and the CUDA runtime look for when they are loaded, and must not find out of here.
constexpr Result NOT_FOUND = 500;
FAKE(cuGetProcAddress_v2)(const char*, void** function, int, unsigned long long, int*) {
    return *function = nullptr, NOT_FOUND;
}
FAKE(cuPointerGetAttribute)(void*, int, Address) { return INVALID_VALUE; }
FAKE(cuTensorMapEncodeTiled)() { return NOT_FOUND; }
FAKE(cuCtxGetCurrent)(Context* context) { return *context = nullptr, SUCCESS; }
FAKE(cuCtxSetCurrent)(Context) { return SUCCESS; }

// Not of CUDA: the calls of a kind, of all threads or of the calling thread.
extern "C" __attribute__((visibility("default"))) uint64_t fake_calls(int kind, int own) {
    return own ? own_calls[static_cast<size_t>(kind)] : calls[static_cast<size_t>(kind)].load();
}

// Not of CUDA: the bytes that came to a device from the host.
extern "C" __attribute__((visibility("default"))) uint64_t fake_carried(DeviceNumber device) {
    return carried[static_cast<size_t>(device)];
}

// Not of CUDA: the registered memory of the host. Writes up to `most` addresses and sizes; returns the number of ranges.
extern "C" __attribute__((visibility("default"))) size_t fake_registered(uintptr_t* at, size_t* bytes, size_t most) {
    std::lock_guard<std::mutex> lock(mappings_mu);
    size_t count = 0;
    for (const auto& [base, size] : registered) {
        if (count < most) at[count] = base, bytes[count] = size;
        count++;
    }
    return count;
}
