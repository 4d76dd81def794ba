#include "load.h"

#include <algorithm>

namespace staccato {

namespace {

constexpr uint64_t IN_FLIGHT = 4;  // chunks queued at the device: enough to keep it busy, few enough to cancel soon

struct Part {
    uint64_t address;
    char* source;  // null: zeroes, where no segment lies
    uint64_t bytes;
};

struct Chunk {
    uint64_t first;  // slot
    uint64_t count;
    std::vector<Part> parts;
    std::vector<uint32_t> pages;
};

// The work of a load, decided before the load begins.
struct Plan {
    std::vector<Chunk> chunks;                         // missing pages
    std::vector<std::pair<uint64_t, uint32_t>> clean;  // clean pages: slot and page
    uint64_t pages = 0, bytes = 0;
};

std::vector<stc_segment> in_order(std::vector<stc_segment> segments) {
    std::sort(segments.begin(), segments.end(), [](auto& a, auto& b) { return a.offset < b.offset; });
    for (uint64_t i = 1; i < segments.size(); i++) {
        if (segments[i].offset - segments[i - 1].offset < segments[i - 1].bytes) {
            fail(STC_INVALID, "two segments overlap at ", segments[i].offset);
        }
    }
    return segments;
}

// The segments' parts of a chunk, and zeroes between segments. `at`: the first segment that may reach into the chunk.
std::vector<Part> parts_of(const Reservation& reservation, const Cache& cache, const std::vector<stc_segment>& segments,
                           uint64_t& at, uint64_t begin, uint64_t end) {
    std::vector<Part> parts;
    uint64_t done = begin;
    while (at < segments.size() && segments[at].offset + segments[at].bytes <= begin) at++;
    for (uint64_t i = at; i < segments.size() && segments[i].offset < end; i++) {
        const uint64_t from = std::max(begin, segments[i].offset);
        const uint64_t to = std::min(end, segments[i].offset + segments[i].bytes);
        if (done < from) parts.push_back({reservation.address + done, nullptr, from - done});
        char* source = cache.range(segments[i].cache_offset + from - segments[i].offset, to - from);
        parts.push_back({reservation.address + from, source, to - from});
        done = to;
    }
    if (done < end) parts.push_back({reservation.address + done, nullptr, end - done});
    return parts;
}

Plan make_plan(const Reservation& reservation, const Cache& cache, const std::vector<stc_segment>& segments,
               uint64_t chunk_bytes) {
    const uint64_t page_bytes = reservation.device.backend->page_bytes;
    const uint64_t chunk_pages = std::max<uint64_t>(1, chunk_bytes / page_bytes);
    Plan plan;
    uint64_t next = 0;  // first slot not looked at yet
    for (const stc_segment& segment : segments) {
        cache.range(segment.cache_offset, segment.bytes);
        const Slots range = reservation.slots_of(segment.offset, segment.bytes);
        for (uint64_t slot = std::max(next, range.first); slot < range.first + range.count; next = ++slot) {
            const uint32_t page = reservation.slots[slot];
            if (page == Reservation::NONE) {
                Chunk* last = plan.chunks.empty() ? nullptr : &plan.chunks.back();
                if (!last || last->first + last->count != slot || last->count == chunk_pages) {
                    plan.chunks.push_back({slot, 0, {}, {}});
                }
                plan.chunks.back().count++;
                plan.pages++;
            } else if (Reservation::is_page(page) && reservation.device.pool[page].state == CLEAN) {
                plan.clean.emplace_back(slot, page);
            } else {
                fail(STC_STATE, "page ", slot, " of reservation ", reservation.owner,
                     " is mapped, on its way or scratch already: unmap it or mark it clean first");
            }
        }
    }
    uint64_t at = 0;
    for (Chunk& chunk : plan.chunks) {
        const uint64_t begin = chunk.first * page_bytes;
        chunk.parts = parts_of(reservation, cache, segments, at, begin, begin + chunk.count * page_bytes);
        for (const Part& part : chunk.parts) plan.bytes += part.source ? part.bytes : 0;
    }
    return plan;
}

class Load {
  public:
    Load(Reservation& reservation, Plan plan)
        : device_(reservation.device), reservation_(reservation), plan_(std::move(plan)) {}

    TicketPtr claim();  // claims addresses and a promise of pages; device.mu is held
    void map_ahead();   // runs on the mapper's thread
    void stream();      // runs on the lane's thread

  private:
    void take_pages(Chunk&);
    void await_mapped(uint64_t chunk);
    void copy(const Part&);
    void finish();
    void undo(const Error&);
    void settle_clean(PageState);
    void refuse_cancelled() const {
        if (ticket_->cancelled) fail(STC_CANCELLED, "load ", ticket_->id, " was cancelled");
    }

    Device& device_;
    Reservation& reservation_;  // lives: a reservation with arriving slots can't be released
    Plan plan_;
    TicketPtr ticket_;
    // Guarded by device.mu:
    uint64_t mapped_ = 0;  // number of chunks
    bool mapper_done_ = false;
    std::optional<Error> error_;
};

TicketPtr Load::claim() {
    if (plan_.pages + device_.promised > device_.pool.count(FREE) + device_.coming()) {
        fail(STC_NO_PAGES, device_.shortage(plan_.pages));
    }
    device_.promised += plan_.pages;
    for (auto [slot, page] : plan_.clean) reservation_.slots[slot] = Reservation::ARRIVING;
    for (const Chunk& chunk : plan_.chunks) reservation_.fill({chunk.first, chunk.count}, Reservation::ARRIVING);
    return ticket_ = device_.new_ticket(plan_.bytes);
}

void Load::map_ahead() {
    std::optional<Error> error;
    try {
        for (Chunk& chunk : plan_.chunks) {
            take_pages(chunk);
            reservation_.attach(chunk.first, chunk.pages, false);
            std::lock_guard<std::mutex> lock(device_.mu);
            mapped_++;
            device_.announce();
        }
    } catch (const std::exception& thrown) {
        error = as_error(thrown);
    }
    std::lock_guard<std::mutex> lock(device_.mu);
    if (!error_) error_ = error;
    mapper_done_ = true;
    device_.announce();
}

// Waits for pages. Pages in limbo depend only on older tickets, so loads never wait for each other in a circle, and no
// other call takes pages promised to loads.
void Load::take_pages(Chunk& chunk) {
    Lock lock(device_.mu);
    device_.await(lock, FOREVER, [&] {
        refuse_cancelled();
        if (error_) throw *error_;
        reservation_.refuse_hopeless({chunk.first, chunk.count});
        if (device_.promised > device_.pool.count(FREE) + device_.coming()) {
            fail(STC_NO_PAGES, "pages that were promised can't be unmapped: ", device_.shortage(chunk.count));
        }
        return chunk.count <= device_.pool.count(FREE) && !reservation_.leaving({chunk.first, chunk.count});
    });
    chunk.pages = device_.pool.take(chunk.count);
    device_.promised -= chunk.count;
    for (uint32_t page : chunk.pages) device_.pool[page].owner = STC_MIXED;  // until the whole load has landed
}

void Load::stream() {
    try {
        std::deque<std::pair<EventPtr, uint64_t>> in_flight;
        for (uint64_t i = 0; i < plan_.chunks.size(); i++) {
            await_mapped(i);
            uint64_t bytes = 0;
            for (const Part& part : plan_.chunks[i].parts) {
                copy(part);
                bytes += part.source ? part.bytes : 0;
            }
            in_flight.emplace_back(device_.backend->record(LOAD), bytes);
            while (!in_flight.empty() && (in_flight.size() > IN_FLIGHT || in_flight.front().first->done())) {
                in_flight.front().first->wait();
                ticket_->land(in_flight.front().second);
                in_flight.pop_front();
            }
        }
        refuse_cancelled();
        finish();
    } catch (const std::exception& thrown) {
        undo(as_error(thrown));
    }
}

void Load::await_mapped(uint64_t chunk) {
    Lock lock(device_.mu);
    device_.await(lock, FOREVER, [&] { return mapped_ > chunk || error_; });
    if (error_) throw *error_;
    refuse_cancelled();
}

void Load::copy(const Part& part) {
    if (part.source) {
        device_.copy(LOAD, {part.address, 0, part.source, 0, part.bytes, 1}, TO_DEVICE);
    } else {
        device_.zero(LOAD, part.address, part.bytes);
    }
}

void Load::finish() {
    EventPtr event = device_.backend->record(LOAD);
    std::lock_guard<std::mutex> lock(device_.mu);
    for (const Chunk& chunk : plan_.chunks) {
        std::copy(chunk.pages.begin(), chunk.pages.end(), reservation_.slots.begin() + chunk.first);
        for (uint32_t page : chunk.pages) {
            device_.pool[page].owner = reservation_.owner;
            device_.pool[page].touched[LOAD] = ticket_->id;
        }
    }
    settle_clean(MAPPED);
    ticket_->submit(std::move(event));
    device_.announce();
}

// Undoes the load: waits until no copy is in flight and the mapper is idle, then gives pages and promises back.
void Load::undo(const Error& error) {
    device_.drain(LOAD);
    Lock lock(device_.mu);
    if (!error_) error_ = error;
    device_.announce();
    device_.await(lock, FOREVER, [&] { return mapper_done_; });
    for (uint64_t i = 0; i < plan_.chunks.size(); i++) {
        Chunk& chunk = plan_.chunks[i];
        reservation_.fill({chunk.first, chunk.count}, Reservation::NONE);
        if (i < mapped_) device_.leave(reservation_, chunk.first, chunk.pages, {});
        if (chunk.pages.empty()) device_.promised -= chunk.count;
    }
    settle_clean(CLEAN);
    ticket_->fail(error);
    device_.announce();
}

void Load::settle_clean(PageState state) {
    for (auto [slot, page] : plan_.clean) {
        reservation_.slots[slot] = page;
        device_.pool.set(page, state);
    }
}

}  // namespace

TicketPtr start_load(Reservation& reservation, Cache& cache, std::vector<stc_segment> segments, uint64_t chunk_bytes) {
    if (segments.empty()) fail(STC_INVALID, "a load needs at least one segment");
    segments = in_order(std::move(segments));
    Device& device = reservation.device;
    std::lock_guard<std::mutex> lock(device.mu);
    auto load = std::make_shared<Load>(reservation, make_plan(reservation, cache, segments, chunk_bytes));
    TicketPtr ticket = load->claim();
    cache.use(ticket);
    device.mapper.post([load] { load->map_ahead(); });
    device.lanes[LOAD].post([load] { load->stream(); });
    return ticket;
}

}  // namespace staccato
