// A load brings a model's pages back: it maps ahead in one thread and copies in another, all or nothing.
#pragma once
#include "cache.h"
#include "reservation.h"

namespace staccato {

TicketPtr start_load(Reservation&, Cache&, std::vector<stc_segment>, uint64_t chunk_bytes);

}  // namespace staccato
