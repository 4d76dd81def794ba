// Copies of ranges and KV blocks between mapped pages and the host: queued here, carried out by a lane's thread.
#pragma once
#include "cache.h"
#include "reservation.h"

namespace staccato {

TicketPtr copy_range(Reservation&, uint64_t offset, Cache&, uint64_t cache_offset, uint64_t bytes, Direction,
                     uint64_t after);

TicketPtr copy_blocks(Reservation&, Cache&, const std::vector<stc_piece>&, const uint32_t* device_blocks,
                      const uint32_t* host_blocks, uint64_t blocks, Direction, uint64_t after);

}  // namespace staccato
