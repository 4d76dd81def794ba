// An NVIDIA GPU as a device: pages are physical handles of the driver's virtual memory management, lanes are streams.
#include <dlfcn.h>

#include <algorithm>
#include <array>
#include <mutex>
#include <vector>

#include "backend.h"
#include "cuda_driver.h"

namespace staccato {

namespace cuda {

namespace {

Driver load_driver() {
    void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
    if (!library) fail(STC_UNSUPPORTED, "this machine has no CUDA driver: ", dlerror());
    Driver driver{};
#define STACCATO_FIND(name, symbol, arguments)                                                      \
    driver.name = reinterpret_cast<Result(*) arguments>(dlsym(library, symbol));                    \
    if (!driver.name) fail(STC_UNSUPPORTED, "the CUDA driver is too old, it has no ", symbol, ": update it");
    STACCATO_CUDA_FUNCTIONS(STACCATO_FIND)
#undef STACCATO_FIND
    return driver;
}

}  // namespace

const Driver& driver() {
    static const Driver loaded = load_driver();  // after an exception the next call tries again
    return loaded;
}

}  // namespace cuda

namespace {

using cuda::driver;

// Results after which the context is broken for the whole process.
bool deadly(cuda::Result result) {
    static const cuda::Result DEADLY[] = {cuda::DEINITIALIZED, cuda::ECC_UNCORRECTABLE, cuda::ILLEGAL_ADDRESS,
                                          cuda::LAUNCH_TIMEOUT, cuda::ASSERT, cuda::LAUNCH_FAILED, cuda::UNKNOWN};
    const bool exception = result >= cuda::HARDWARE_STACK_ERROR && result <= cuda::LAUNCH_FAILED;
    return exception || std::find(std::begin(DEADLY), std::end(DEADLY), result) != std::end(DEADLY);
}

void check(cuda::Result result, const char* what) {
    if (result == cuda::SUCCESS) return;
    const char* why = nullptr;
    driver().error_string(result, &why);
    const int code = deadly(result) ? STC_DEAD : result == cuda::OUT_OF_MEMORY ? STC_NO_MEMORY : STC_DRIVER;
    fail(code, what, ": ", why ? why : "unknown error", " (", result, ")");
}

// Makes the primary context, torch's own, current during a call; afterwards the thread's current device is as before.
class Current {
  public:
    explicit Current(cuda::Context context) { check(driver().context_push(context), "cuCtxPushCurrent"); }
    ~Current() {
        cuda::Context popped;
        driver().context_pop(&popped);
    }
};

// A store of events to use again: making events is slow.
class EventStore {
  public:
    explicit EventStore(cuda::Context context) : context(context) {}
    ~EventStore() {
        for (cuda::EventHandle event : free_) driver().event_destroy(event);
    }

    cuda::EventHandle take() {
        {
            std::lock_guard<std::mutex> lock(mu_);
            if (!free_.empty()) {
                cuda::EventHandle event = free_.back();
                free_.pop_back();
                return event;
            }
        }
        cuda::EventHandle event;
        check(driver().event_create(&event, cuda::EVENT_BLOCKING_SYNC | cuda::EVENT_DISABLE_TIMING), "cuEventCreate");
        return event;
    }

    void give(cuda::EventHandle event) {
        std::lock_guard<std::mutex> lock(mu_);
        free_.push_back(event);
    }

    const cuda::Context context;

  private:
    std::mutex mu_;
    std::vector<cuda::EventHandle> free_;
};

class CudaEvent : public Event {
  public:
    CudaEvent(std::shared_ptr<EventStore> store, cuda::Stream stream)
        : store_(std::move(store)), event_(store_->take()) {
        check(driver().event_record(event_, stream), "cuEventRecord");
    }
    ~CudaEvent() override { store_->give(event_); }

    bool done() override {
        Current current(store_->context);
        const cuda::Result result = driver().event_query(event_);
        if (result != cuda::NOT_READY) check(result, "cuEventQuery");
        return result == cuda::SUCCESS;
    }
    void wait() override {
        Current current(store_->context);
        check(driver().event_synchronize(event_), "cuEventSynchronize");
    }
    void hold_stream(void* stream) override {
        Current current(store_->context);
        check(driver().stream_wait_event(static_cast<cuda::Stream>(stream), event_, 0), "cuStreamWaitEvent");
    }

  private:
    const std::shared_ptr<EventStore> store_;
    const cuda::EventHandle event_;
};

// An event that is over when all events of a list are over.
class AllOf : public Event {
  public:
    explicit AllOf(std::vector<EventPtr> events) : events_(std::move(events)) {}

    bool done() override {
        return std::all_of(events_.begin(), events_.end(), [](const EventPtr& event) { return event->done(); });
    }
    void wait() override {
        for (const EventPtr& event : events_) event->wait();
    }
    void hold_stream(void* stream) override {
        for (const EventPtr& event : events_) event->hold_stream(stream);
    }

  private:
    const std::vector<EventPtr> events_;
};

// The primary context of a device, retained while the object lives.
class Primary {
  public:
    explicit Primary(int ordinal) {
        check(driver().init(0), "cuInit");
        check(driver().device_get(&device_, ordinal), "cuDeviceGet");
        check(driver().context_retain(&context_, device_), "cuDevicePrimaryCtxRetain");
    }
    ~Primary() { driver().context_release(device_); }
    cuda::DeviceNumber device() const { return device_; }
    cuda::Context context() const { return context_; }

  private:
    cuda::DeviceNumber device_ = 0;
    cuda::Context context_ = nullptr;
};

// A helper device that relays bytes to the pool's device: over the helper's link to the host into a buffer, then over
// the link between the devices, while the next bytes come into the helper's second buffer (Prism, section 5.2).
class Relay {
  public:
    Relay(int ordinal, cuda::DeviceNumber target, uint64_t bytes);
    ~Relay() { close(); }

    void carry(uint64_t address, const char* host, uint64_t bytes);  // at most the bytes of a buffer
    void record(std::vector<EventPtr>& events);
    cuda::DeviceNumber device() const { return primary_.device(); }

  private:
    struct Way {
        cuda::Stream stream = nullptr;
        cuda::Address buffer = 0;
    };
    void close() noexcept;

    const Primary primary_;
    std::shared_ptr<EventStore> events_;
    std::array<Way, 2> ways_;
    uint64_t turn_ = 0;
};

Relay::Relay(int ordinal, cuda::DeviceNumber target, uint64_t bytes)
    : primary_(ordinal), events_(std::make_shared<EventStore>(primary_.context())) {
    int reaches = 0;
    if (device() != target) check(driver().can_access(&reaches, device(), target), "cuDeviceCanAccessPeer");
    if (!reaches) {
        fail(STC_UNSUPPORTED, "device ", ordinal, " can't write to the memory of the device that loads, ", target,
             ": name others that can as helpers, or none");
    }
    try {
        Current current(primary_.context());
        for (Way& way : ways_) {
            check(driver().stream_create(&way.stream, cuda::STREAM_NON_BLOCKING), "cuStreamCreate");
            check(driver().allocate(&way.buffer, bytes), "cuMemAlloc");
        }
    } catch (...) {
        close();
        throw;
    }
}

void Relay::close() noexcept {
    if (driver().context_push(primary_.context()) != cuda::SUCCESS) return;
    for (Way& way : ways_) {
        if (way.stream) {
            driver().stream_synchronize(way.stream);
            driver().stream_destroy(way.stream);
        }
        if (way.buffer) driver().deallocate(way.buffer);
    }
    events_.reset();
    cuda::Context popped;
    driver().context_pop(&popped);
}

void Relay::carry(uint64_t address, const char* host, uint64_t bytes) {
    Current current(primary_.context());
    const Way& way = ways_[turn_++ % ways_.size()];
    check(driver().copy_to_device(way.buffer, host, bytes, way.stream), "cuMemcpyHtoDAsync");
    check(driver().copy_on_devices(address, way.buffer, bytes, way.stream), "cuMemcpyDtoDAsync");
}

void Relay::record(std::vector<EventPtr>& events) {
    Current current(primary_.context());
    for (const Way& way : ways_) events.push_back(std::make_shared<CudaEvent>(events_, way.stream));
}

class Cuda : public Backend {
  public:
    explicit Cuda(const stc_config&);
    ~Cuda() override { close(); }

    uint64_t reserve(uint64_t bytes) override;
    void release(uint64_t address, uint64_t bytes) override;
    void map(uint64_t address, uint32_t first_page, uint64_t count) override;
    void allow(uint64_t address, uint64_t bytes) override;
    void unmap(uint64_t address, uint64_t bytes) override;
    void make_scratch(uint64_t, uint64_t) override {
        fail(STC_UNSUPPORTED, "scratch memory is for the host backend: map pages of the pool instead");
    }
    void zero(Lane, uint64_t address, uint64_t bytes) override;
    void copy(Lane, const Copy&, Direction) override;
    EventPtr record(Lane) override;
    EventPtr record_stream(void* stream) override;
    void hold_lane(Lane lane, Event& event) override { event.hold_stream(streams_[lane]); }
    void pin(void* base, uint64_t bytes) override;
    void unpin(void* base) override;
    void memory(uint64_t& free_bytes, uint64_t& total_bytes) override;
    int export_page(uint32_t page, uint64_t& fd_offset) override;

  private:
    void make_pages(const stc_config&);
    void make_relays(const stc_config&);
    void share_out(const Copy&);
    void close() noexcept;

    const Primary primary_;
    const cuda::DeviceNumber device_;
    const cuda::Context context_;
    bool exportable_;
    std::vector<cuda::PageHandle> handles_;
    std::array<cuda::Stream, STREAMS> streams_{};
    std::shared_ptr<EventStore> events_;
    std::vector<std::unique_ptr<Relay>> relays_;
    uint64_t piece_bytes_ = 0, turn_ = 0;            // size and turn of pieces shared with relays
    std::vector<cuda::AccessDescription> accesses_;  // devices that access mapped pages
};

Cuda::Cuda(const stc_config& config)
    : primary_(config.ordinal), device_(primary_.device()), context_(primary_.context()), exportable_(config.exportable) {
    int virtual_memory = 0;
    check(driver().device_attribute(&virtual_memory, cuda::ATTRIBUTE_VIRTUAL_MEMORY, device_), "cuDeviceGetAttribute");
    if (!virtual_memory) fail(STC_UNSUPPORTED, "device ", config.ordinal, " has no virtual memory management");
    copies_pinned_alone = true;  // else the driver copies through a buffer of its own, at a fifth of the speed
    make_relays(config);
    try {
        Current current(context_);
        events_ = std::make_shared<EventStore>(context_);
        for (auto& stream : streams_) {
            check(driver().stream_create(&stream, cuda::STREAM_NON_BLOCKING), "cuStreamCreate");
        }
        make_pages(config);
    } catch (...) {
        close();
        throw;
    }
}

void Cuda::make_relays(const stc_config& config) {
    piece_bytes_ = (config.relay_bytes ? config.relay_bytes : 32 << 20) / 2;
    if (piece_bytes_ == 0) fail(STC_INVALID, "a relay of ", config.relay_bytes, " bytes has no two buffers: 2 at least");
    accesses_.push_back({{cuda::LOCATION_DEVICE, device_}, cuda::ACCESS_READ_WRITE});
    for (int ordinal = 0; ordinal < 32; ordinal++) {
        if (!(config.helpers >> ordinal & 1)) continue;
        relays_.push_back(std::make_unique<Relay>(ordinal, device_, piece_bytes_));
        accesses_.push_back({{cuda::LOCATION_DEVICE, relays_.back()->device()}, cuda::ACCESS_READ_WRITE});
    }
}

// Makes all page handles once: making a handle is the dearest call of all, 190 us for 2 MiB on an A100.
void Cuda::make_pages(const stc_config& config) {
    cuda::AllocationProperties properties{};
    properties.type = cuda::ALLOCATION_PINNED;
    properties.handle_types = exportable_ ? unsigned{cuda::HANDLE_POSIX_FD} : 0u;
    properties.location = {cuda::LOCATION_DEVICE, device_};
    size_t granule = 0, free_bytes = 0, total_bytes = 0;
    check(driver().granularity(&granule, &properties, cuda::GRANULARITY_MINIMUM), "cuMemGetAllocationGranularity");
    check(driver().memory_info(&free_bytes, &total_bytes), "cuMemGetInfo");

    page_bytes = config.page_bytes ? config.page_bytes : 32 << 20;
    page_bytes = (page_bytes + granule - 1) / granule * granule;
    pages = config.pool_bytes / page_bytes;
    if (pages == 0 || pages * page_bytes > free_bytes) {
        fail(STC_NO_MEMORY, "a pool of ", mebibytes(config.pool_bytes), " MiB in pages of ", mebibytes(page_bytes),
             " MiB doesn't fit: device ", config.ordinal, " has ", mebibytes(free_bytes), " MiB free of ",
             mebibytes(total_bytes));
    }
    handles_.reserve(pages);
    while (handles_.size() < pages) {
        cuda::PageHandle handle;
        check(driver().page_create(&handle, page_bytes, &properties, 0), "cuMemCreate");
        handles_.push_back(handle);
    }
}

void Cuda::close() noexcept {
    relays_.clear();
    if (driver().context_push(context_) == cuda::SUCCESS) {
        for (cuda::Stream stream : streams_) {
            if (!stream) continue;
            driver().stream_synchronize(stream);
            driver().stream_destroy(stream);
        }
        for (cuda::PageHandle handle : handles_) driver().page_release(handle);
        events_.reset();
        cuda::Context popped;
        driver().context_pop(&popped);
    }
}

uint64_t Cuda::reserve(uint64_t bytes) {
    Current current(context_);
    cuda::Address address = 0;
    if (driver().address_reserve(&address, bytes, page_bytes, 0, 0) != cuda::SUCCESS) {
        fail(STC_NO_ADDRESSES, mebibytes(bytes), " MiB of device addresses can't be reserved");
    }
    return address;
}

void Cuda::release(uint64_t address, uint64_t bytes) {
    Current current(context_);
    check(driver().address_free(address, bytes), "cuMemAddressFree");
}

void Cuda::map(uint64_t address, uint32_t first_page, uint64_t count) {
    Current current(context_);
    for (uint64_t i = 0; i < count; i++) {
        const cuda::Result result = driver().map(address + i * page_bytes, page_bytes, 0, handles_[first_page + i], 0);
        if (result == cuda::SUCCESS) continue;
        for (uint64_t j = 0; j < i; j++) driver().unmap(address + j * page_bytes, page_bytes);
        check(result, "cuMemMap");
    }
}

void Cuda::allow(uint64_t address, uint64_t bytes) {
    Current current(context_);
    check(driver().set_access(address, bytes, accesses_.data(), accesses_.size()), "cuMemSetAccess");
}

void Cuda::unmap(uint64_t address, uint64_t bytes) {
    Current current(context_);
    check(driver().unmap(address, bytes), "cuMemUnmap");
}

void Cuda::zero(Lane lane, uint64_t address, uint64_t bytes) {
    Current current(context_);
    check(driver().fill(address, 0, bytes, streams_[lane]), "cuMemsetD8Async");
}

void Cuda::copy(Lane lane, const Copy& copy, Direction direction) {
    if (lane == LOAD && !relays_.empty()) return share_out(copy);
    Current current(context_);
    if (copy.rows == 1 && direction == TO_DEVICE) {
        return check(driver().copy_to_device(copy.address, copy.host, copy.width, streams_[lane]), "cuMemcpyHtoDAsync");
    }
    if (copy.rows == 1) {
        return check(driver().copy_to_host(copy.host, copy.address, copy.width, streams_[lane]), "cuMemcpyDtoHAsync");
    }
    const cuda::Side device{0, 0, cuda::MEMORY_DEVICE, nullptr, copy.address, nullptr, copy.pitch};
    const cuda::Side host{0, 0, cuda::MEMORY_HOST, copy.host, 0, nullptr, copy.host_pitch};
    const cuda::Copy2D rows = direction == TO_DEVICE ? cuda::Copy2D{host, device, copy.width, copy.rows}
                                                     : cuda::Copy2D{device, host, copy.width, copy.rows};
    check(driver().copy_2d(&rows, streams_[lane]), "cuMemcpy2DAsync");
}

// Copies a row of a load to the device in pieces, in turns over the device's own link to the host and relays' links.
void Cuda::share_out(const Copy& copy) {
    for (uint64_t at = 0; at < copy.width; at += piece_bytes_) {
        const uint64_t bytes = std::min(piece_bytes_, copy.width - at);
        const uint64_t turn = turn_++ % (relays_.size() + 1);
        if (turn > 0) {
            relays_[turn - 1]->carry(copy.address + at, copy.host + at, bytes);
            continue;
        }
        Current current(context_);
        check(driver().copy_to_device(copy.address + at, copy.host + at, bytes, streams_[LOAD]), "cuMemcpyHtoDAsync");
    }
}

EventPtr Cuda::record(Lane lane) {
    EventPtr own = record_stream(streams_[lane]);
    if (lane != LOAD || relays_.empty()) return own;
    std::vector<EventPtr> events{std::move(own)};
    for (const auto& relay : relays_) relay->record(events);
    return std::make_shared<AllOf>(std::move(events));
}

EventPtr Cuda::record_stream(void* stream) {
    Current current(context_);
    return std::make_shared<CudaEvent>(events_, static_cast<cuda::Stream>(stream));
}

void Cuda::pin(void* base, uint64_t bytes) {
    Current current(context_);
    check(driver().host_register(base, bytes, cuda::HOST_REGISTER_PORTABLE), "cuMemHostRegister");
}

void Cuda::unpin(void* base) {
    Current current(context_);
    check(driver().host_unregister(base), "cuMemHostUnregister");
}

void Cuda::memory(uint64_t& free_bytes, uint64_t& total_bytes) {
    Current current(context_);
    size_t free = 0, total = 0;
    check(driver().memory_info(&free, &total), "cuMemGetInfo");
    free_bytes = free;
    total_bytes = total;
}

int Cuda::export_page(uint32_t page, uint64_t& fd_offset) {
    if (!exportable_) fail(STC_UNSUPPORTED, "pages can't be exported: open the device with exportable set");
    Current current(context_);
    int fd = -1;
    check(driver().page_export(&fd, handles_[page], cuda::HANDLE_POSIX_FD, 0), "cuMemExportToShareableHandle");
    fd_offset = 0;
    return fd;
}

}  // namespace

std::unique_ptr<Backend> open_cuda(const stc_config& config) { return std::make_unique<Cuda>(config); }

}  // namespace staccato
