// Addresses that one owner keeps for good, and the pages that are mapped there now.
#pragma once
#include "device.h"

namespace staccato {

struct Slots {  // of one page each
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
    // A page or one of these; guarded by device.mu. What leaves is NONE here: the move list has it.
    std::vector<uint32_t> slots;

    uint64_t address_of(uint64_t slot) const { return address + slot * device.backend->page_bytes; }
    Slots slots_of(uint64_t offset, uint64_t bytes) const;      // any range; throws if it lies outside
    Slots whole_slots(uint64_t offset, uint64_t bytes) const;   // throws if it isn't whole pages

    void map(uint64_t offset, uint64_t bytes, const Deadline&);
    void unmap(uint64_t offset, uint64_t bytes, uint64_t after);
    void mark_clean(uint64_t offset, uint64_t bytes);
    void residency(uint64_t offset, uint64_t bytes, uint64_t& mapped, uint64_t& clean);
    void scratch(uint64_t offset, uint64_t bytes, bool on);
    int export_page(uint64_t offset, uint64_t& fd_offset);
    void release(const Deadline&);  // afterwards only the destructor may be called

    // -- device.mu is held -------------------------------------------------------------------------------------------
    bool all_are(Slots, uint32_t value) const;
    void fill(Slots, uint32_t value);
    bool leaving(Slots) const;          // the move list still owns some of these addresses
    void refuse_hopeless(Slots) const;    // throws when they will not come free by themselves

    // Maps pages that were taken for it. If that fails in the middle, what was mapped leaves and the rest is free.
    void attach(uint64_t first_slot, const std::vector<uint32_t>& pages, bool zero_foreign);

  private:
    std::vector<uint32_t> await_pages(Lock&, Slots, const Deadline&);
    bool overlaps(const Leaving&, Slots) const;
    void zero_foreign_pages(uint64_t first_slot, const std::vector<uint32_t>& pages);
    void unmap_slots(Slots, TicketPtr after);
    std::vector<TicketPtr> transfers_on(const std::vector<uint32_t>& pages);
};

}  // namespace staccato
