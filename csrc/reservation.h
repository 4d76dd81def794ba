// Addresses that an owner keeps for good, and the pages mapped there now.
#pragma once
#include "device.h"

namespace staccato {

struct Slots {  // a range of slots; a slot has the addresses of a page
    uint64_t first;
    uint64_t count;
};

class Reservation {
  public:
    static constexpr uint32_t NONE = 0xffffffff;
    static constexpr uint32_t ARRIVING = 0xfffffffe;  // claimed by a call under way
    static constexpr uint32_t SCRATCH = 0xfffffffd;   // ordinary memory, no page of the pool
    static bool is_page(uint32_t slot) { return slot < SCRATCH; }

    Reservation(Device&, uint64_t bytes);

    Device& device;
    const uint64_t bytes;
    const uint64_t address;
    const uint32_t owner;
    // By slot, a page or a constant above; guarded by device.mu. The slot of a leaving page is NONE: the move list has
    // the page.
    std::vector<uint32_t> slots;

    uint64_t address_of(uint64_t slot) const { return address + slot * device.backend->page_bytes; }
    Slots slots_of(uint64_t offset, uint64_t bytes) const;      // any range; throws if the range lies outside
    Slots whole_slots(uint64_t offset, uint64_t bytes) const;   // throws if the range is not whole pages

    void map(uint64_t offset, uint64_t bytes, const Deadline&);
    TicketPtr map_later(uint64_t offset, uint64_t bytes);
    void unmap(uint64_t offset, uint64_t bytes, uint64_t after);
    void mark_clean(uint64_t offset, uint64_t bytes);
    void residency(uint64_t offset, uint64_t bytes, uint64_t& mapped, uint64_t& clean);
    void scratch(uint64_t offset, uint64_t bytes, bool on);
    int export_page(uint64_t offset, uint64_t& fd_offset);
    void release(const Deadline&);  // then call only the destructor

    // -- device.mu is held -------------------------------------------------------------------------------------------
    bool all_are(Slots, uint32_t value) const;
    void fill(Slots, uint32_t value);
    bool leaving(Slots) const;          // whether the move list still owns addresses of the range
    void refuse_hopeless(Slots) const;    // throws if addresses of the range will not become free

    // Maps pages taken for this reservation. If mapping fails in the middle, mapped pages leave, and the rest is free.
    void attach(uint64_t first_slot, const std::vector<uint32_t>& pages, bool zero_foreign);

  private:
    void refuse_mapped(Slots) const;
    std::vector<uint32_t> await_pages(Lock&, Slots, const Deadline&);
    std::vector<uint32_t> take_promised(Lock&, Slots, const Ticket&);
    void map_promised(Slots, TicketPtr);  // runs on the grower's thread
    void settle(Slots, const std::vector<uint32_t>& pages);
    bool overlaps(const Leaving&, Slots) const;
    void zero_foreign_pages(uint64_t first_slot, const std::vector<uint32_t>& pages);
    void unmap_slots(Slots, TicketPtr after);
    std::vector<TicketPtr> transfers_on(const std::vector<uint32_t>& pages);
};

}  // namespace staccato
