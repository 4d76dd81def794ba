// The operations that the library needs of a device: pages, addresses, copies, events. A backend decides nothing.
#pragma once
#include <cstdint>
#include <memory>

#include "error.h"

namespace staccato {

// Transfers of a lane happen in the order of submission. Loads of weights have a lane of their own, so that the KV
// cache of a request does not wait behind a model.
enum Lane { LOAD, IN, OUT, LANES, ZERO = LANES, STREAMS };

enum Direction { TO_DEVICE = STC_TO_DEVICE, TO_HOST = STC_TO_HOST };

// `rows` pieces of `width` bytes, `pitch` apart; one row is a plain copy.
struct Copy {
    uint64_t address;
    uint64_t pitch;
    char* host;
    uint64_t host_pitch;
    uint64_t width;
    uint64_t rows;
    uint64_t bytes() const { return width * rows; }
};

// A point in a lane or stream.
struct Event {
    virtual ~Event() = default;
    virtual bool done() = 0;  // throws if the device failed
    virtual void wait() = 0;
    virtual void hold_stream(void* stream) = 0;  // later work of the stream waits for the event
};
using EventPtr = std::shared_ptr<Event>;

struct Backend {
    virtual ~Backend() = default;
    uint64_t page_bytes = 0;
    uint64_t pages = 0;
    uint64_t huge_bytes = 0;
    bool fresh_pages_are_zero = false;
    bool copies_pinned_alone = false;  // copies need registered memory of the host

    virtual uint64_t reserve(uint64_t bytes) = 0;
    virtual void release(uint64_t address, uint64_t bytes) = 0;
    virtual void map(uint64_t address, uint32_t first_page, uint64_t count) = 0;  // all or, if it throws, none
    virtual void allow(uint64_t address, uint64_t bytes) = 0;                    // call once for a whole mapped range
    virtual void unmap(uint64_t address, uint64_t bytes) = 0;                    // whole mapped pages
    virtual void make_scratch(uint64_t address, uint64_t bytes) = 0;             // ordinary memory, until unmap()
    virtual void zero(Lane, uint64_t address, uint64_t bytes) = 0;
    virtual void copy(Lane, const Copy&, Direction) = 0;
    virtual EventPtr record(Lane) = 0;
    virtual EventPtr record_stream(void* stream) = 0;
    virtual void hold_lane(Lane, Event&) = 0;
    virtual void pin(void* base, uint64_t bytes) = 0;  // registers memory of the host
    virtual void unpin(void* base) = 0;
    virtual void memory(uint64_t& free_bytes, uint64_t& total_bytes) = 0;  // of the whole device
    virtual int export_page(uint32_t page, uint64_t& fd_offset) = 0;
};

std::unique_ptr<Backend> open_host(const stc_config&);
std::unique_ptr<Backend> open_cuda(const stc_config&);

}  // namespace staccato
