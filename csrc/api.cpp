// The C interface: handles in, codes out; an exception becomes a code and the thread's error sentence.
#include "capture.h"
#include "load.h"
#include "transfer.h"

using namespace staccato;

struct stc_device : Device {
    using Device::Device;
};
struct stc_reservation : Reservation {
    using Reservation::Reservation;
};
struct stc_cache : Cache {
    using Cache::Cache;
};

namespace {

thread_local std::string last_error;

template <typename Call>
int guarded(const void* handle, Call call) {
    try {
        if (!handle) fail(STC_INVALID, "the handle is closed, or was never opened");
        call();
        return STC_OK;
    } catch (const std::exception& thrown) {
        const Error error = as_error(thrown);
        last_error = error.what();
        return error.code;
    }
}

// A call with two handles fails if either is null.
const void* both(const void* one, const void* other) { return one ? other : one; }

Direction direction_of(int direction) {
    if (direction == STC_TO_DEVICE || direction == STC_TO_HOST) return static_cast<Direction>(direction);
    fail(STC_INVALID, "there is no direction ", direction);
}

TicketPtr find(Device& device, stc_ticket id) {
    std::lock_guard<std::mutex> lock(device.mu);
    return device.find_ticket(id);
}

}  // namespace

int stc_abi(void) { return STC_ABI; }
const char* stc_last_error(void) { return last_error.c_str(); }

int stc_device_open(const stc_config* config, stc_device** out) {
    return guarded(config, [&] { *out = new stc_device(*config); });
}

int stc_device_close(stc_device* device) {
    return guarded(device, [&] {
        device->close();
        delete device;
    });
}

int stc_device_stats(stc_device* device, stc_stats* out) {
    return guarded(device, [&] { *out = device->stats(); });
}

int stc_device_memory(stc_device* device, uint64_t* free_bytes, uint64_t* total_bytes) {
    return guarded(device, [&] { device->backend->memory(*free_bytes, *total_bytes); });
}

int stc_device_pages(stc_device* device, stc_page* out, uint64_t count) {
    return guarded(device, [&] {
        std::lock_guard<std::mutex> lock(device->mu);
        if (count > device->pool.size()) {
            fail(STC_INVALID, count, " pages were asked for, the pool has ", device->pool.size());
        }
        for (uint64_t i = 0; i < count; i++) out[i] = {device->pool[i].state, device->pool[i].owner};
    });
}

int stc_device_settle(stc_device* device, double timeout_s) {
    return guarded(device, [&] { device->settle(Deadline(timeout_s)); });
}

int stc_device_throttle(stc_device* device, double bytes_per_s) {
    return guarded(device, [&] { device->throttle(bytes_per_s); });
}

int stc_device_fault(stc_device* device, int operation, uint64_t nth) {
    return guarded(device, [&] { device->inject(operation, nth); });
}

int stc_reserve(stc_device* device, uint64_t bytes, stc_reservation** out, stc_place* place) {
    return guarded(device, [&] {
        *out = new stc_reservation(*device, bytes);
        *place = {(*out)->address, (*out)->bytes, (*out)->owner};
    });
}

int stc_release(stc_reservation* reservation, double timeout_s) {
    return guarded(reservation, [&] {
        reservation->release(Deadline(timeout_s));
        delete reservation;
    });
}

int stc_map(stc_reservation* reservation, uint64_t offset, uint64_t bytes, double timeout_s) {
    return guarded(reservation, [&] { reservation->map(offset, bytes, Deadline(timeout_s)); });
}

int stc_map_later(stc_reservation* reservation, uint64_t offset, uint64_t bytes, stc_ticket* out) {
    return guarded(reservation, [&] { *out = reservation->map_later(offset, bytes)->id; });
}

int stc_unmap(stc_reservation* reservation, uint64_t offset, uint64_t bytes, stc_ticket after) {
    return guarded(reservation, [&] { reservation->unmap(offset, bytes, after); });
}

int stc_mark_clean(stc_reservation* reservation, uint64_t offset, uint64_t bytes) {
    return guarded(reservation, [&] { reservation->mark_clean(offset, bytes); });
}

int stc_residency(stc_reservation* reservation, uint64_t offset, uint64_t bytes, uint64_t* mapped, uint64_t* clean) {
    return guarded(reservation, [&] { reservation->residency(offset, bytes, *mapped, *clean); });
}

int stc_scratch(stc_reservation* reservation, uint64_t offset, uint64_t bytes, int on) {
    return guarded(reservation, [&] { reservation->scratch(offset, bytes, on != 0); });
}

int stc_export_page(stc_reservation* reservation, uint64_t offset, int* fd, uint64_t* fd_offset) {
    return guarded(reservation, [&] { *fd = reservation->export_page(offset, *fd_offset); });
}

int stc_cache_open(int fd, uint64_t bytes, stc_cache** out, void** base, int* own_fd) {
    return guarded(out, [&] {
        *out = new stc_cache(fd, bytes);
        *base = (*out)->base;
        *own_fd = (*out)->fd;
    });
}

int stc_cache_close(stc_cache* cache) {
    return guarded(cache, [&] {
        cache->close();
        delete cache;
    });
}

int stc_cache_commit(stc_cache* cache, uint64_t offset, uint64_t bytes, uint64_t* huge_bytes) {
    return guarded(cache, [&] { *huge_bytes = cache->commit(offset, bytes); });
}

int stc_cache_discard(stc_cache* cache, uint64_t offset, uint64_t bytes) {
    return guarded(cache, [&] { cache->discard(offset, bytes); });
}

int stc_cache_pin(stc_cache* cache, stc_device* device, uint64_t offset, uint64_t bytes) {
    return guarded(both(cache, device), [&] { cache->pin(*device, offset, bytes); });
}

int stc_cache_unpin(stc_cache* cache, stc_device* device, uint64_t offset) {
    return guarded(both(cache, device), [&] { cache->unpin(*device, offset); });
}

int stc_device_pinned(stc_device* device, double timeout_s) {
    return guarded(device, [&] { device->await_pins(Deadline(timeout_s)); });
}

int stc_load(stc_reservation* reservation, stc_cache* cache, const stc_segment* segments, uint64_t count,
             uint64_t chunk_bytes, stc_ticket* out) {
    return guarded(both(reservation, cache), [&] {
        *out = start_load(*reservation, *cache, {segments, segments + count}, chunk_bytes)->id;
    });
}

int stc_copy(stc_reservation* reservation, uint64_t offset, stc_cache* cache, uint64_t cache_offset, uint64_t bytes,
             int direction, stc_ticket after, stc_ticket* out) {
    return guarded(both(reservation, cache), [&] {
        *out = copy_range(*reservation, offset, *cache, cache_offset, bytes, direction_of(direction), after)->id;
    });
}

int stc_copy_blocks(stc_reservation* reservation, stc_cache* cache, const stc_piece* pieces, uint64_t piece_count,
                    const uint32_t* device_blocks, const uint32_t* host_blocks, uint64_t blocks, int direction,
                    stc_ticket after, stc_ticket* out) {
    return guarded(both(reservation, cache), [&] {
        TicketPtr ticket = copy_blocks(*reservation, *cache, {pieces, pieces + piece_count}, device_blocks, host_blocks,
                                       blocks, direction_of(direction), after);
        *out = ticket->id;
    });
}

int stc_ticket_poll(stc_device* device, stc_ticket id) {
    bool finished = false;
    const int code = guarded(device, [&] {
        TicketPtr ticket = find(*device, id);
        finished = !ticket || ticket->finished();
    });
    return code ? code : finished;
}

int stc_ticket_wait(stc_device* device, stc_ticket id, double timeout_s) {
    return guarded(device, [&] {
        if (TicketPtr ticket = find(*device, id)) device->await_ticket(*ticket, Deadline(timeout_s));
    });
}

int stc_ticket_landed(stc_device* device, stc_ticket id, uint64_t* bytes) {
    return guarded(device, [&] {
        TicketPtr ticket = find(*device, id);
        *bytes = ticket ? ticket->landed() : UINT64_MAX;
    });
}

int stc_ticket_cancel(stc_device* device, stc_ticket id) {
    return guarded(device, [&] {
        std::lock_guard<std::mutex> lock(device->mu);
        if (TicketPtr ticket = device->find_ticket(id)) ticket->cancelled = true;
        device->announce();
    });
}

int stc_stream_ticket(stc_device* device, void* stream, stc_ticket* out) {
    return guarded(device, [&] {
        EventPtr event = device->backend->record_stream(stream);
        std::lock_guard<std::mutex> lock(device->mu);
        TicketPtr ticket = device->new_ticket(0);
        ticket->submit(std::move(event));
        *out = ticket->id;
    });
}

int stc_stream_wait(stc_device* device, stc_ticket id, void* stream, double timeout_s) {
    return guarded(device, [&] {
        TicketPtr ticket = find(*device, id);
        if (!ticket) return;
        device->await_submission(*ticket, Deadline(timeout_s));
        ticket->event().hold_stream(stream);
    });
}

int stc_capture_install(const char* object) {
    return guarded(object, [&] { capture::install(object); });
}

int stc_capture_next(uint64_t least, uint64_t most, uint64_t granule, void* place) {
    return guarded(place, [&] { capture::next(least, most, granule, place); });
}

int stc_capture_taken(uint64_t* bytes) {
    return guarded(bytes, [&] { *bytes = capture::taken(); });
}

int stc_capture_forget(void* place) {
    return guarded(place, [&] { capture::forget(place); });
}
