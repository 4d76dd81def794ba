#include "reservation.h"

#include <algorithm>

namespace staccato {

namespace {

// Number of neighbouring pages from `at` on.
uint64_t run_length(const std::vector<uint32_t>& pages, uint64_t at) {
    uint64_t end = at + 1;
    while (end < pages.size() && pages[end] == pages[end - 1] + 1) end++;
    return end - at;
}

uint64_t round_up(uint64_t bytes, uint64_t page_bytes) {
    if (bytes == 0 || bytes > (1ull << 47)) {
        fail(STC_INVALID, mebibytes(bytes), " MiB of addresses can't be reserved: ask for 1 byte to 128 TiB");
    }
    return (bytes + page_bytes - 1) / page_bytes * page_bytes;
}

uint32_t enlist(Device& device, uint64_t bytes) {
    std::lock_guard<std::mutex> lock(device.mu);
    device.users++;
    device.counted.reserved_bytes += bytes;
    return device.next_owner++;
}

}  // namespace

Reservation::Reservation(Device& device, uint64_t wanted)
    : device(device),
      bytes(round_up(wanted, device.backend->page_bytes)),
      address(device.backend->reserve(bytes)),
      owner(enlist(device, bytes)),
      slots(bytes / device.backend->page_bytes, NONE) {}

void Reservation::release(const Deadline& deadline) {
    Lock lock(device.mu);
    if (std::find(slots.begin(), slots.end(), ARRIVING) != slots.end()) {
        fail(STC_STATE, "reservation ", owner, " is being mapped or loaded: cancel that or wait for it");
    }
    const Slots all{0, slots.size()};
    unmap_slots(all, nullptr);
    const auto empty = [&] {
        refuse_hopeless(all);
        return !leaving(all);
    };
    if (!device.await(lock, deadline, empty)) {
        fail(STC_TIMEOUT, "reservation ", owner, " still has pages in limbo after ", deadline.timeout_s,
             " s: release it again later");
    }
    lock.unlock();
    device.backend->release(address, bytes);
    lock.lock();
    device.users--;
    device.counted.reserved_bytes -= bytes;
}

// -- map --------------------------------------------------------------------------------------------------------------

void Reservation::map(uint64_t offset, uint64_t bytes, const Deadline& deadline) {
    const Slots range = whole_slots(offset, bytes);
    Lock lock(device.mu);
    refuse_mapped(range);
    fill(range, ARRIVING);
    std::vector<uint32_t> pages;
    try {
        pages = await_pages(lock, range, deadline);
        lock.unlock();
        attach(range.first, pages, true);
        lock.lock();
    } catch (...) {
        if (!lock) lock.lock();
        fill(range, NONE);
        device.announce();
        throw;
    }
    settle(range, pages);
}

// Maps as `map` does, on the grower's thread. The pages are promised at once, as a load's pages are.
TicketPtr Reservation::map_later(uint64_t offset, uint64_t bytes) {
    const Slots range = whole_slots(offset, bytes);
    std::lock_guard<std::mutex> lock(device.mu);
    refuse_mapped(range);
    if (range.count + device.promised > device.pool.count(FREE) + device.coming()) {
        fail(STC_NO_PAGES, device.shortage(range.count));
    }
    device.promised += range.count;
    fill(range, ARRIVING);
    TicketPtr ticket = device.new_ticket(0);
    device.grower.post([this, range, ticket] { map_promised(range, ticket); });
    return ticket;
}

void Reservation::map_promised(Slots range, TicketPtr ticket) {
    Lock lock(device.mu);
    bool taken = false;
    try {
        const std::vector<uint32_t> pages = take_promised(lock, range, *ticket);
        taken = true;
        lock.unlock();
        EventPtr event = device.backend->record(ZERO);
        attach(range.first, pages, true);
        lock.lock();
        settle(range, pages);
        ticket->submit(std::move(event));
    } catch (const std::exception& thrown) {
        if (!lock) lock.lock();
        fill(range, NONE);
        if (!taken) device.promised -= range.count;
        ticket->fail(as_error(thrown));
    }
    device.announce();
}

std::vector<uint32_t> Reservation::take_promised(Lock& lock, Slots range, const Ticket& ticket) {
    device.await(lock, FOREVER, [&] {
        if (ticket.cancelled) fail(STC_CANCELLED, "ticket ", ticket.id, " was cancelled");
        refuse_hopeless(range);
        if (device.promised > device.pool.count(FREE) + device.coming()) {
            fail(STC_NO_PAGES, "pages that were promised can't be unmapped: ", device.shortage(range.count));
        }
        return range.count <= device.pool.count(FREE) && !leaving(range);
    });
    device.promised -= range.count;
    return device.pool.take(range.count);
}

void Reservation::refuse_mapped(Slots range) const {
    if (all_are(range, NONE)) return;
    fail(STC_STATE, "not all of these ", range.count, " pages of reservation ", owner, " are empty: unmap them first");
}

void Reservation::settle(Slots range, const std::vector<uint32_t>& pages) {
    for (uint64_t i = 0; i < pages.size(); i++) {
        device.pool[pages[i]].owner = owner;
        slots[range.first + i] = pages[i];
    }
}

// Waits for free pages and takes the pages. Free pages promised to loads are left for the loads.
std::vector<uint32_t> Reservation::await_pages(Lock& lock, Slots range, const Deadline& deadline) {
    const auto there = [&] {
        const uint64_t wanted = range.count + device.promised, free = device.pool.count(FREE);
        refuse_hopeless(range);
        if (wanted > free + device.coming()) fail(STC_NO_PAGES, device.shortage(range.count));
        return wanted <= free && !leaving(range);
    };
    if (!device.await(lock, deadline, there)) {
        fail(STC_TIMEOUT, device.shortage(range.count), " (waited ", deadline.timeout_s, " s)");
    }
    return device.pool.take(range.count);
}

void Reservation::attach(uint64_t first_slot, const std::vector<uint32_t>& pages, bool zero_foreign) {
    uint64_t mapped = 0;
    try {
        for (uint64_t run; mapped < pages.size(); mapped += run) {
            run = run_length(pages, mapped);
            device.map(address_of(first_slot + mapped), pages[mapped], run);
        }
        device.allow(address_of(first_slot), pages.size() * device.backend->page_bytes);
        if (zero_foreign) zero_foreign_pages(first_slot, pages);
    } catch (...) {
        std::lock_guard<std::mutex> lock(device.mu);
        for (uint64_t i = mapped; i < pages.size(); i++) device.pool.set(pages[i], FREE);
        device.leave(*this, first_slot, {pages.begin(), pages.begin() + mapped}, {});
        device.announce();
        throw;
    }
}

// Zeroes pages with bytes of other owners. Other owners' bytes must not be read, and bytes that are NaN to this owner
// spoil even masked attention: 0 * NaN is NaN.
void Reservation::zero_foreign_pages(uint64_t first_slot, const std::vector<uint32_t>& pages) {
    bool any = false;
    for (uint64_t i = 0; i < pages.size(); i++) {
        const uint32_t before = device.pool[pages[i]].owner;
        if (before == owner || (before == 0 && device.backend->fresh_pages_are_zero)) continue;
        device.zero(ZERO, address_of(first_slot + i), device.backend->page_bytes);
        any = true;
    }
    if (any) device.backend->record(ZERO)->wait();
}

// -- unmap ------------------------------------------------------------------------------------------------------------

void Reservation::unmap(uint64_t offset, uint64_t bytes, uint64_t after) {
    const Slots range = whole_slots(offset, bytes);
    std::lock_guard<std::mutex> lock(device.mu);
    const auto begin = slots.begin() + range.first, end = begin + range.count;
    if (std::find(begin, end, ARRIVING) != end) {
        fail(STC_STATE, "pages of reservation ", owner, " are being mapped or loaded: cancel that or wait for it");
    }
    unmap_slots(range, device.find_ticket(after));
}

// Makes an entry of the move list for each stretch without a hole.
void Reservation::unmap_slots(Slots range, TicketPtr after) {
    const uint64_t end = range.first + range.count;
    for (uint64_t first = range.first; first < end;) {
        uint64_t next = first;
        while (next < end && is_page(slots[next])) next++;
        std::vector<uint32_t> pages(slots.begin() + first, slots.begin() + next);
        fill({first, next - first}, NONE);
        auto tickets = transfers_on(pages);
        if (after) tickets.push_back(after);
        device.leave(*this, first, std::move(pages), std::move(tickets));
        first = next + 1;
    }
}

std::vector<TicketPtr> Reservation::transfers_on(const std::vector<uint32_t>& pages) {
    std::array<uint64_t, LANES> newest{};
    for (uint32_t page : pages) {
        for (int lane = 0; lane < LANES; lane++) newest[lane] = std::max(newest[lane], device.pool[page].touched[lane]);
    }
    std::vector<TicketPtr> tickets;
    for (uint64_t id : newest) {
        if (auto ticket = device.find_ticket(id)) tickets.push_back(ticket);
    }
    return tickets;
}

bool Reservation::overlaps(const Leaving& entry, Slots range) const {
    return entry.reservation == this && entry.first < range.first + range.count &&
           range.first < entry.first + entry.pages.size();
}

bool Reservation::leaving(Slots range) const {
    return std::any_of(device.move_list.begin(), device.move_list.end(),
                       [&](const Leaving& entry) { return overlaps(entry, range); });
}

void Reservation::refuse_hopeless(Slots range) const {
    for (const Leaving& entry : device.move_list) {
        if (!entry.hopeless() || !overlaps(entry, range)) continue;
        fail(STC_STATE, entry.pages.size(), " pages of reservation ", owner, " can't be unmapped, after ",
             entry.failures, " attempts: if that lasts, restart this process");
    }
}

// -- small things -----------------------------------------------------------------------------------------------------

void Reservation::mark_clean(uint64_t offset, uint64_t bytes) {
    const Slots range = whole_slots(offset, bytes);
    std::lock_guard<std::mutex> lock(device.mu);
    const auto begin = slots.begin() + range.first, end = begin + range.count;
    if (std::any_of(begin, end, [](uint32_t page) { return !is_page(page); })) {
        fail(STC_STATE, "not all of these ", range.count, " pages of reservation ", owner,
             " are mapped: only mapped pages can be clean");
    }
    std::for_each(begin, end, [this](uint32_t page) { device.pool.set(page, CLEAN); });
}

void Reservation::residency(uint64_t offset, uint64_t bytes, uint64_t& mapped, uint64_t& clean) {
    const Slots range = whole_slots(offset, bytes);
    std::lock_guard<std::mutex> lock(device.mu);
    mapped = clean = 0;
    for (uint64_t slot = range.first; slot < range.first + range.count; slot++) {
        if (!is_page(slots[slot])) continue;
        (device.pool[slots[slot]].state == CLEAN ? clean : mapped) += device.backend->page_bytes;
    }
}

void Reservation::scratch(uint64_t offset, uint64_t bytes, bool on) {
    const Slots range = whole_slots(offset, bytes);
    const uint32_t before = on ? NONE : SCRATCH;
    Lock lock(device.mu);
    if (!all_are(range, before) || leaving(range)) {
        fail(STC_STATE, "not all of these ", range.count, " pages of reservation ", owner,
             on ? " are empty: unmap them and let the device settle" : " are scratch memory");
    }
    fill(range, ARRIVING);
    lock.unlock();
    try {
        on ? device.backend->make_scratch(address + offset, bytes) : device.backend->unmap(address + offset, bytes);
    } catch (...) {
        lock.lock();
        fill(range, before);
        throw;
    }
    lock.lock();
    fill(range, on ? SCRATCH : NONE);
}

int Reservation::export_page(uint64_t offset, uint64_t& fd_offset) {
    const Slots range = whole_slots(offset, device.backend->page_bytes);
    uint32_t page;
    {
        std::lock_guard<std::mutex> lock(device.mu);
        page = slots[range.first];
    }
    if (!is_page(page)) {
        fail(STC_STATE, "page ", range.first, " of reservation ", owner, " is not mapped");
    }
    return device.backend->export_page(page, fd_offset);
}

Slots Reservation::slots_of(uint64_t offset, uint64_t length) const {
    if (length == 0 || offset > bytes || length > bytes - offset) {
        fail(STC_INVALID, length, " bytes at ", offset, " do not lie in reservation ", owner, " of ", bytes, " bytes");
    }
    const uint64_t page = device.backend->page_bytes;
    return {offset / page, (offset + length - 1) / page - offset / page + 1};
}

Slots Reservation::whole_slots(uint64_t offset, uint64_t length) const {
    const uint64_t page = device.backend->page_bytes;
    if (offset % page || length % page) {
        fail(STC_INVALID, length, " bytes at ", offset, " are not whole pages of ", page, " bytes");
    }
    return slots_of(offset, length);
}

bool Reservation::all_are(Slots range, uint32_t value) const {
    const auto begin = slots.begin() + range.first;
    return std::count(begin, begin + range.count, value) == static_cast<int64_t>(range.count);
}

void Reservation::fill(Slots range, uint32_t value) {
    std::fill_n(slots.begin() + range.first, range.count, value);
}

}  // namespace staccato
