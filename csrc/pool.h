// The pages of a device: a page's state, the owner of a page's bytes, transfers that touch a page. Only bookkeeping.
#pragma once
#include <array>
#include <vector>

#include "backend.h"

namespace staccato {

enum PageState : uint8_t {
    FREE = STC_PAGE_FREE,
    MAPPED = STC_PAGE_MAPPED,
    CLEAN = STC_PAGE_CLEAN,
    LIMBO = STC_PAGE_LIMBO,
};

struct Page {
    PageState state = FREE;
    uint32_t owner = 0;                     // as in stc_page
    std::array<uint64_t, LANES> touched{};  // newest ticket of each lane; a lane's older tickets are over before
};

class Pool {
  public:
    explicit Pool(uint64_t pages) : pages_(pages) { counts_[FREE] = pages; }

    uint64_t size() const { return pages_.size(); }
    uint64_t count(PageState state) const { return counts_[state]; }
    Page& operator[](uint32_t page) { return pages_[page]; }

    void set(uint32_t page, PageState state) {
        counts_[pages_[page].state]--;
        counts_[pages_[page].state = state]++;
    }

    // Takes `count` free pages and marks the pages as mapped; the pool must have as many free pages. The search begins
    // at the end of the last search. Neighbours stay together that way: a run of pages is mapped by one call.
    std::vector<uint32_t> take(uint64_t count) {
        std::vector<uint32_t> taken;
        taken.reserve(count);
        for (; taken.size() < count; cursor_ = (cursor_ + 1) % pages_.size()) {
            if (pages_[cursor_].state != FREE) continue;
            set(cursor_, MAPPED);
            taken.push_back(cursor_);
        }
        return taken;
    }

  private:
    std::vector<Page> pages_;
    std::array<uint64_t, 4> counts_{};
    uint32_t cursor_ = 0;
};

}  // namespace staccato
