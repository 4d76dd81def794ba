// A libcuda.so.1 without a GPU, for tests of the CUDA backend: device memory is host memory, streams are threads that
// lag behind, and what a real driver forbids is refused: calls without a context, unallowed access, half unmaps.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <thread>

#include "../cuda_driver.h"

using namespace staccato::cuda;

namespace staccato::cuda {

struct StreamOf {
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

constexpr Result INVALID_VALUE = 1, INVALID_CONTEXT = 201;
constexpr size_t GRANULE = 64 << 10;

thread_local int context_depth = 0;
std::mutex mappings_mu;
std::map<Address, size_t> mappings;  // address → bytes of one handle

char* pointer(Address address) { return reinterpret_cast<char*>(address); }

Result lag(Stream stream, std::function<void()> job) {
    if (context_depth == 0) return INVALID_CONTEXT;
    stream->put([job = std::move(job)] {
        std::this_thread::sleep_for(std::chrono::microseconds(200));
        job();
    });
    return SUCCESS;
}

Result set_protection(Address address, size_t bytes, int protection) {
    return mprotect(pointer(address), bytes, protection) == 0 ? SUCCESS : INVALID_VALUE;
}

}  // namespace

#define FAKE(name) extern "C" __attribute__((visibility("default"))) Result name
#define NEEDS_CONTEXT \
    if (context_depth == 0) return INVALID_CONTEXT

FAKE(cuInit)(unsigned) { return SUCCESS; }
FAKE(cuGetErrorString)(Result, const char** text) {
    *text = "the fake driver refused";
    return SUCCESS;
}
FAKE(cuDeviceGet)(DeviceNumber* device, int ordinal) { return (*device = ordinal) == 0 ? SUCCESS : INVALID_VALUE; }
FAKE(cuDeviceGetAttribute)(int* value, int, DeviceNumber) { return *value = 1, SUCCESS; }
FAKE(cuDevicePrimaryCtxRetain)(Context* context, DeviceNumber) {
    return *context = reinterpret_cast<Context>(1), SUCCESS;
}
FAKE(cuDevicePrimaryCtxRelease_v2)(DeviceNumber) { return SUCCESS; }
FAKE(cuCtxPushCurrent_v2)(Context) { return context_depth++, SUCCESS; }
FAKE(cuCtxPopCurrent_v2)(Context*) { return context_depth--, SUCCESS; }

FAKE(cuMemGetInfo_v2)(size_t* free_bytes, size_t* total_bytes) {
    NEEDS_CONTEXT;
    return *free_bytes = *total_bytes = 1 << 30, SUCCESS;
}
FAKE(cuMemGetAllocationGranularity)(size_t* granule, const AllocationProperties*, unsigned) {
    return *granule = GRANULE, SUCCESS;
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
FAKE(cuMemCreate)(PageHandle* handle, size_t bytes, const AllocationProperties*, unsigned long long) {
    NEEDS_CONTEXT;
    const int fd = memfd_create("fake-page", MFD_CLOEXEC);
    if (bytes % GRANULE || fd < 0 || ftruncate(fd, static_cast<off_t>(bytes)) != 0) return INVALID_VALUE;
    *handle = static_cast<PageHandle>(fd);
    return SUCCESS;
}
FAKE(cuMemRelease)(PageHandle handle) { return close(static_cast<int>(handle)) == 0 ? SUCCESS : INVALID_VALUE; }
FAKE(cuMemExportToShareableHandle)(void* fd, PageHandle handle, unsigned, unsigned long long) {
    *static_cast<int*>(fd) = dup(static_cast<int>(handle));
    return SUCCESS;
}
FAKE(cuMemMap)(Address address, size_t bytes, size_t offset, PageHandle handle, unsigned long long) {
    NEEDS_CONTEXT;
    std::lock_guard<std::mutex> lock(mappings_mu);
    const auto after = mappings.lower_bound(address);
    if (offset != 0 || (after != mappings.end() && after->first < address + bytes)) return INVALID_VALUE;
    void* mapped = mmap(pointer(address), bytes, PROT_NONE, MAP_SHARED | MAP_FIXED, static_cast<int>(handle), 0);
    if (mapped == MAP_FAILED) return OUT_OF_MEMORY;
    mappings[address] = bytes;
    return SUCCESS;
}
FAKE(cuMemUnmap)(Address address, size_t bytes) {
    NEEDS_CONTEXT;
    std::lock_guard<std::mutex> lock(mappings_mu);
    for (Address at = address; at < address + bytes; at += mappings[at]) {
        if (!mappings.count(at) || at + mappings[at] > address + bytes) return INVALID_VALUE;
    }
    mappings.erase(mappings.find(address), mappings.lower_bound(address + bytes));
    const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED;
    return mmap(pointer(address), bytes, PROT_NONE, flags, -1, 0) != MAP_FAILED ? SUCCESS : INVALID_VALUE;
}
FAKE(cuMemSetAccess)(Address address, size_t bytes, const AccessDescription* access, size_t) {
    NEEDS_CONTEXT;
    return access->flags == ACCESS_READ_WRITE ? set_protection(address, bytes, PROT_READ | PROT_WRITE) : INVALID_VALUE;
}

FAKE(cuStreamCreate)(Stream* stream, unsigned) {
    NEEDS_CONTEXT;
    return *stream = new StreamOf, SUCCESS;
}
FAKE(cuStreamSynchronize)(Stream stream) {
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
    event->wait(event->newest());
    return SUCCESS;
}

FAKE(cuMemcpyHtoDAsync_v2)(Address to, const void* from, size_t bytes, Stream stream) {
    return lag(stream, [=] { std::memcpy(pointer(to), from, bytes); });
}
FAKE(cuMemcpyDtoHAsync_v2)(void* to, Address from, size_t bytes, Stream stream) {
    return lag(stream, [=] { std::memcpy(to, pointer(from), bytes); });
}
FAKE(cuMemcpy2DAsync_v2)(const Copy2D* rows, Stream stream) {
    return lag(stream, [copy = *rows] {
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
    return lag(stream, [=] { std::memset(pointer(address), value, bytes); });
}
FAKE(cuMemHostRegister_v2)(void*, size_t, unsigned) {
    NEEDS_CONTEXT;
    return SUCCESS;
}
FAKE(cuMemHostUnregister)(void*) { return SUCCESS; }
