#include "transfer.h"

#include <algorithm>
#include <utility>

namespace staccato {

namespace {

constexpr uint64_t LARGEST_COPY = 32 << 20;  // between two copies a transfer can be cancelled
constexpr uint64_t LARGEST_STRIDE = 2ull << 30;  // a stride times a block's number still fits 64 bits

using Blocks = std::vector<std::pair<uint32_t, uint32_t>>;  // device block, host block

void carry_out(Device& device, const TicketPtr& ticket, const TicketPtr& after, Lane lane, Direction direction,
               const std::vector<Copy>& copies) {
    try {
        if (after) {
            device.await_submission(*after, FOREVER);  // an older ticket: never behind this job in a queue
            device.backend->hold_lane(lane, after->event());
        }
        for (const Copy& copy : copies) {
            if (ticket->cancelled) fail(STC_CANCELLED, "transfer ", ticket->id, " was cancelled");
            device.copy(lane, copy, direction);
            ticket->land(copy.bytes());
        }
        EventPtr event = device.backend->record(lane);
        std::lock_guard<std::mutex> lock(device.mu);
        ticket->submit(std::move(event));
        device.announce();
    } catch (const std::exception& thrown) {
        device.drain(lane);
        std::lock_guard<std::mutex> lock(device.mu);
        ticket->fail(as_error(thrown));
        device.announce();
    }
}

// Visits the slot of every page that a copy reads or writes.
template <typename Visit>
void each_slot(const Reservation& reservation, const Copy& copy, Visit visit) {
    for (uint64_t row = 0; row < copy.rows; row++) {
        const Slots range = reservation.slots_of(copy.address - reservation.address + row * copy.pitch, copy.width);
        for (uint64_t slot = range.first; slot < range.first + range.count; slot++) visit(slot);
    }
}

void refuse_unmapped(const Reservation& reservation, uint64_t slot) {
    const uint32_t page = reservation.slots[slot];
    if (Reservation::is_page(page) && reservation.device.pool[page].state == MAPPED) return;
    fail(STC_STATE, "page ", slot, " of reservation ", reservation.owner,
         " is not mapped: map or load it before copying");
}

TicketPtr queue(Reservation& reservation, Cache& cache, std::vector<Copy> copies, Direction direction,
                uint64_t after_id) {
    Device& device = reservation.device;
    const Lane lane = direction == TO_DEVICE ? IN : OUT;
    uint64_t bytes = 0;
    for (const Copy& copy : copies) bytes += copy.bytes();

    std::lock_guard<std::mutex> lock(device.mu);
    TicketPtr after = device.find_ticket(after_id);
    for (const Copy& copy : copies) {
        each_slot(reservation, copy, [&](uint64_t slot) { refuse_unmapped(reservation, slot); });
    }
    TicketPtr ticket = device.new_ticket(bytes);
    for (const Copy& copy : copies) {
        each_slot(reservation, copy, [&](uint64_t slot) {
            device.pool[reservation.slots[slot]].touched[lane] = ticket->id;
        });
    }
    cache.use(ticket);
    device.lanes[lane].post([&device, ticket, after, lane, direction, copies = std::move(copies)] {
        carry_out(device, ticket, after, lane, direction, copies);
    });
    return ticket;
}

// Sorts blocks by target; two blocks with an equal target would be a race.
Blocks in_order(const uint32_t* device_blocks, const uint32_t* host_blocks, uint64_t count, Direction direction) {
    Blocks blocks;
    for (uint64_t i = 0; i < count; i++) blocks.emplace_back(device_blocks[i], host_blocks[i]);
    auto target = [&](auto& block) { return direction == TO_DEVICE ? block.first : block.second; };
    std::sort(blocks.begin(), blocks.end(), [&](auto& a, auto& b) { return target(a) < target(b); });
    for (uint64_t i = 1; i < count; i++) {
        if (target(blocks[i - 1]) == target(blocks[i])) {
            fail(STC_INVALID, "block ", target(blocks[i]), " is the target of two copies");
        }
    }
    return blocks;
}

// Fuses blocks that are neighbours on both sides: a plain copy if the pieces of neighbours touch, else a copy of rows.
Copy fuse(const Reservation& reservation, const Cache& cache, const stc_piece& piece, const Blocks& blocks,
          uint64_t first, uint64_t count) {
    const uint64_t on_device = piece.device_offset + blocks[first].first * piece.device_stride;
    const uint64_t on_host = piece.host_offset + blocks[first].second * piece.host_stride;
    reservation.slots_of(on_device, (count - 1) * piece.device_stride + piece.bytes);
    char* host = cache.range(on_host, (count - 1) * piece.host_stride + piece.bytes);
    if (piece.device_stride == piece.bytes && piece.host_stride == piece.bytes) {
        return {reservation.address + on_device, 0, host, 0, count * piece.bytes, 1};
    }
    return {reservation.address + on_device, piece.device_stride, host, piece.host_stride, piece.bytes, count};
}

}  // namespace

TicketPtr copy_range(Reservation& reservation, uint64_t offset, Cache& cache, uint64_t cache_offset, uint64_t bytes,
                     Direction direction, uint64_t after) {
    reservation.slots_of(offset, bytes);
    char* host = cache.range(cache_offset, bytes);
    std::vector<Copy> copies;
    for (uint64_t at = 0; at < bytes; at += LARGEST_COPY) {
        copies.push_back({reservation.address + offset + at, 0, host + at, 0, std::min(LARGEST_COPY, bytes - at), 1});
    }
    return queue(reservation, cache, std::move(copies), direction, after);
}

TicketPtr copy_blocks(Reservation& reservation, Cache& cache, const std::vector<stc_piece>& pieces,
                      const uint32_t* device_blocks, const uint32_t* host_blocks, uint64_t count, Direction direction,
                      uint64_t after) {
    for (const stc_piece& piece : pieces) {
        if (piece.bytes == 0 || std::min(piece.device_stride, piece.host_stride) < piece.bytes ||
            std::max(piece.device_stride, piece.host_stride) > LARGEST_STRIDE) {
            fail(STC_INVALID, "a piece of ", piece.bytes, " bytes needs strides from there to 2 GiB, not ",
                 piece.device_stride, " on the device and ", piece.host_stride, " on the host");
        }
    }
    const Blocks blocks = in_order(device_blocks, host_blocks, count, direction);
    std::vector<Copy> copies;
    for (uint64_t first = 0, next; first < count; first = next) {
        next = first + 1;
        while (next < count && blocks[next].first == blocks[next - 1].first + 1 &&
               blocks[next].second == blocks[next - 1].second + 1) {
            next++;
        }
        for (const stc_piece& piece : pieces) {
            copies.push_back(fuse(reservation, cache, piece, blocks, first, next - first));
        }
    }
    return queue(reservation, cache, std::move(copies), direction, after);
}

}  // namespace staccato
