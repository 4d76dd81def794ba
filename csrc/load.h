// A load brings a model's pages back, all or none: one thread maps ahead, another thread copies.
#pragma once
#include "cache.h"
#include "reservation.h"

namespace staccato {

TicketPtr start_load(Reservation&, Cache&, std::vector<stc_segment>, uint64_t chunk_bytes);

}  // namespace staccato
